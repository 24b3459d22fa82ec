"""Newton's method without storing a matrix
========================================

A Newton step solves ``(G + damping I) d = -g`` with the Gauss-Newton matrix G of all parameters. Nobody can store G of
a large network, but conjugate gradients only ask for products ``G v``, and a product costs about as much as two
gradients (Schraudolph 2002, Martens 2010). Both are in ``curvopt.hessianfree``; neither needs an extended model.
"""

# %%
# Logistic regression on the digits of scikit-learn, with a little weight decay: convex, so that there is a best loss to
# come close to.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvopt.hessianfree import cg, ggn_vector_product_from_plist

torch.set_default_dtype(torch.float64)
images, labels = load_digits(return_X_y=True)
x, y = torch.from_numpy(images[:600]) / 16, torch.from_numpy(labels[:600])
WEIGHT_DECAY = 1e-3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def objective(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    penalty = 0.5 * WEIGHT_DECAY * sum(p.square().sum() for p in model.parameters())
    return nn.functional.cross_entropy(output, y) + penalty


# %%
# Each step goes towards the minimum of the quadratic model and takes the whole way if that lowers the loss; the damping
# follows how well the model predicted the loss (Levenberg-Marquardt). There is no learning rate.


def newton(steps: int = 14, damping: float = 0.01) -> tuple[list[float], list[int]]:
    model = make_model()
    params = list(model.parameters())
    losses, cost = [], [0]
    for _ in range(steps):
        output = model(x)
        loss, data_loss = objective(model, output), nn.functional.cross_entropy(output, y)
        gradient = torch.autograd.grad(loss, params, retain_graph=True)
        losses.append(loss.item())

        def damped(v, data_loss=data_loss, output=output, shift=damping + WEIGHT_DECAY):
            products = ggn_vector_product_from_plist(data_loss, output, params, v)
            return [Gv + shift * vi for Gv, vi in zip(products, v, strict=True)]

        direction, iterations, _ = cg(damped, [-g for g in gradient], maxiter=100, tol=1e-2)
        cost.append(cost[-1] + 1 + 2 * iterations)
        predicted = 0.5 * sum((g * d).sum() for g, d in zip(gradient, direction, strict=True))
        with torch.no_grad():
            for p, d in zip(params, direction, strict=True):
                p.add_(d)
            ratio = (objective(model, model(x)) - loss) / predicted
            if ratio < 0:  # the loss went up: take the step back
                for p, d in zip(params, direction, strict=True):
                    p.sub_(d)
        damping *= 1.5 if ratio < 0.25 else 2 / 3 if ratio > 0.75 else 1
    return losses, cost[:-1]


def gradient_descent(steps: int, lr: float) -> list[float]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = objective(model, model(x))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
# The horizontal axis counts gradients, a product as two. Gradient descent with a good learning rate is as fast at
# first; close to the minimum its steps shrink with the gradient, while Newton's keep landing there.
losses, cost = newton()
curves = {f"gradient descent, lr {lr:g}": gradient_descent(cost[-1], lr) for lr in (0.3, 1.0)}
best = min(min(losses), *map(min, curves.values()))
figure, ax = plt.subplots()
ax.semilogy(
    cost, [loss - best + 1e-12 for loss in losses], "o-", label="CG-Newton, a dot for each step"
)
for label, curve in curves.items():
    ax.semilogy([loss - best + 1e-12 for loss in curve], label=label)
ax.set(xlabel="cost in gradients of the training set", ylabel="loss above the best")
ax.legend()
plt.show()
