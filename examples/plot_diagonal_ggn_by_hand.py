"""Write your own optimizer in 30 lines
====================================

Fields are attributes of parameters, so an optimizer that uses them is an ordinary ``torch.optim.Optimizer``. Here is
one that divides the gradient by the diagonal of the Gauss-Newton matrix, written from scratch, on data that were never
standardised.
"""

# %%
# The features of scikit-learn's breast cancer data come in their own units: the standard deviations range from 0.003 to
# 569. A step length that suits one weight is absurd for another.
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import DiagGGNExact

features, labels = load_breast_cancer(return_X_y=True)
x, y = torch.from_numpy(features).float(), torch.from_numpy(labels)
print(f"standard deviations of the features: {x.std(0).min():.3f} to {x.std(0).max():.0f}")


class DiagonalGGN(torch.optim.Optimizer):
    """``p -= lr * g / (h + damping)``, where h is the diagonal of the Gauss-Newton matrix."""

    def __init__(self, params, lr: float, damping: float = 1e-6):
        super().__init__(params, {"lr": lr, "damping": damping})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.addcdiv_(p.grad, p.diag_ggn_exact + group["damping"], value=-group["lr"])


# %%
# In the loop, the context around the backward pass brings the field along.


def train(make_optimizer, lr: float, steps: int = 200) -> list[float]:
    model, lossfunc = extend(nn.Linear(30, 2)), nn.CrossEntropyLoss()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = make_optimizer(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(DiagGGNExact()):
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
# Gradient descent is held back by the steepest feature: 1e-6 creeps, 1e-5 already shakes. Divided by the curvature,
# every weight moves in units of its own.
figure, ax = plt.subplots()
for lr in (1e-6, 1e-5):
    ax.plot(train(torch.optim.SGD, lr), label=f"gradient descent, lr {lr:g}")
for lr in (0.01, 0.02):
    ax.plot(train(DiagonalGGN, lr), label=f"diagonal Gauss-Newton, lr {lr:g}")
ax.set(xlabel="step", ylabel="training loss", ylim=(0, 1.2))
figure.legend(loc="outside upper center", ncols=2, fontsize=8)
plt.show()
