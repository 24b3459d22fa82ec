"""Making gradients agree: the variance as a penalty
=================================================

A stochastic gradient is as good as its samples agree. How much they disagree, the variance of the individual
gradients, is itself a function of the parameters, and so has a gradient: fields of a backward pass with
``create_graph=True`` can be differentiated again. First on a linear model where the answer is known in closed form,
then as a penalty in the training of two networks on MNIST.
"""

# %%
# Linear regression
# -----------------
# For ``l_n = (w x_n - y_n)^2 / N`` the individual gradients are ``g_n = 2 x_n (w x_n - y_n) / N``, and the variance of
# ``g_n`` is a parabola in w. Its derivative by autograd must be the derivative of the parabola.
import matplotlib.pyplot as plt
import torch
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import Variance
from curvopt.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
N = 50
x = torch.randn(N, 1)
y = 2 * x + 0.5 * torch.randn(N, 1)
line, squared_error = extend(nn.Linear(1, 1, bias=False)), nn.MSELoss()
with backpack(Variance()):
    squared_error(line(x), y).backward(create_graph=True)
(by_autograd,) = torch.autograd.grad(line.weight.variance.sum(), line.weight)

w = line.weight.detach().clone().requires_grad_()
by_hand = (2 * x * (w * x - y) / N).var(0, unbiased=False)
(derivative,) = torch.autograd.grad(by_hand.sum(), w)
print(f"derivative of the variance: {by_autograd.item():.6f}, by hand {derivative.item():.6f}")
assert torch.allclose(by_autograd, derivative, rtol=1e-4)

# %%
# MNIST
# -----
# The same call works for any network. Both networks are trained twice, with and without the variance as a penalty, by a
# few steps of gradient descent on one batch.


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.Tanh(), nn.Linear(20, 10))


def cnn() -> nn.Module:
    convolutions = [
        nn.Conv2d(1, 4, 5, stride=3),
        nn.Tanh(),
        nn.Conv2d(4, 8, 3, stride=2),
        nn.Tanh(),
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(72, 10))


def train(make, penalty: float, steps: int = 40) -> tuple[list[float], list[float]]:
    torch.manual_seed(1)
    x, y = load_one_batch_mnist(64)
    model, lossfunc = extend(make()), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, variances = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(Variance()):
            loss.backward(create_graph=True)
        variance = (
            sum(p.variance.sum() for p in model.parameters()) * len(x) ** 2
        )  # of the unscaled gradients
        gradients = torch.autograd.grad(penalty * variance, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = p.grad.detach() + gradient
        optimizer.step()
        losses.append(loss.item())
        variances.append(variance.item())
    return losses, variances


# %%
# The penalty costs steps, and buys agreement: at the same loss the individual gradients vary less.
figure, axes = plt.subplots(2, 1, figsize=(5, 6.4))
for make, colour in ((mlp, "C0"), (cnn, "C1")):
    for penalty, style in ((0.0, "-"), (0.01, "--")):
        losses, variances = train(make, penalty)
        axes[0].plot(
            losses, style, color=colour, label=f"{make.__name__.upper()}, penalty {penalty:g}"
        )
        axes[1].semilogy(losses, variances, style, color=colour)
axes[0].set(xlabel="step", ylabel="loss of the batch")
axes[0].legend(fontsize=9)
axes[1].set(xlabel="loss of the batch", ylabel="variance of individual gradients")
axes[1].invert_xaxis()
plt.show()
