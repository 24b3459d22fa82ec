"""Which weights can go? Pruning by curvature
==========================================

*Pruning* sets weights of a trained network to zero, so that it becomes smaller. Which ones? The usual answer is the
smallest ones: pruning by *magnitude*. *Optimal Brain Damage* (LeCun et al. 1990) removes those that the loss needs
least: setting a weight w to zero raises the loss by about ``h w² / 2``, where the curvature h is the weight's entry on
the diagonal of the Hessian, the matrix of second derivatives.
"""

# %%
# Networks with two hidden layers on 1,200 digits, tested on the other 597. Three networks of different seeds show how
# much is chance.
import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import DiagGGNExact, DiagHessian

SEEDS, SPARSITIES = range(3), [0.3, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95]
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
shuffled = torch.randperm(len(images))
x, y = torch.from_numpy(images).float()[shuffled] / 16, torch.from_numpy(labels)[shuffled]
train_x, train_y, test_x, test_y = x[:1200], y[:1200], x[1200:], y[1200:]


def train(model: nn.Module, masks: list[Tensor], epochs: int) -> None:
    """Train the weights whose mask is 1; those whose mask is 0 stay zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for _ in range(epochs):
        for chosen in torch.randperm(len(train_x)).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
            optimizer.step()
            with torch.no_grad():
                for w, mask in zip(weights(model), masks, strict=True):
                    w.mul_(mask)


def weights(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the layers; biases are few and stay."""
    return [p for p in model.parameters() if p.ndim == 2]


def accuracy(model: nn.Module) -> float:
    return 100 * (model(test_x).argmax(1) == test_y).float().mean().item()


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)
    model = nn.Sequential(*layers)
    train(model, [torch.ones_like(w) for w in weights(model)], epochs=20)
    return model


# %%
# Each rule gives every weight a score. ``DiagHessian`` computes the diagonal of the Hessian exactly. ``DiagGGNExact``
# computes that of the Gauss-Newton matrix, which leaves out a part of the Hessian and has no negative entries, as the
# paper suggests. One backward pass over the training images is enough for either.


def scores(model: nn.Module, rule: str) -> list[Tensor]:
    if rule == "magnitude":
        return [w.detach() ** 2 for w in weights(model)]
    extend(model)
    with backpack(DiagHessian() if rule == "Hessian" else DiagGGNExact()):
        nn.functional.cross_entropy(model(train_x), train_y).backward()
    return [
        w.detach() ** 2 * (w.diag_h if rule == "Hessian" else w.diag_ggn_exact) / 2
        for w in weights(model)
    ]


def prune(model: nn.Module, rule: str, steps: bool, epochs: int) -> list[float]:
    """Accuracy at each sparsity; in steps each one starts from the sparsity before."""
    model, accuracies = copy.deepcopy(model), []
    found, masks = scores(model, rule), [torch.ones_like(w) for w in weights(model)]
    for sparsity in SPARSITIES:
        if steps:
            found = [
                s.masked_fill(mask == 0, -torch.inf)
                for s, mask in zip(scores(model, rule), masks, strict=True)
            ]
        bound = torch.cat([s.flatten() for s in found]).quantile(sparsity)
        masks = [(s > bound).float() for s in found]
        with torch.no_grad():
            for w, mask in zip(weights(model), masks, strict=True):
                w.mul_(mask)
        train(model, masks, epochs)
        accuracies.append(accuracy(model))
    return accuracies


# %%
# There are three ways to get to a sparsity, the share of weights that are zero: all at once; in steps, with new scores
# after each; or in steps with two epochs of training after each, as in the paper.
ways = {
    "at once": (False, 0),
    "in steps": (True, 0),
    "in steps, with training in between": (True, 2),
}
rules = {"magnitude": "C1", "Hessian": "C0", "Gauss-Newton": "C2"}
dense = [make_model(seed) for seed in SEEDS]
figure, axes = plt.subplots(3, 1, figsize=(5, 9), sharex=True)
for ax, (way, (steps, epochs)) in zip(axes, ways.items(), strict=True):
    for height, (rule, color) in zip((0.3, 0.18, 0.06), rules.items(), strict=True):
        curves = torch.tensor([prune(model, rule, steps, epochs) for model in dense])
        for curve in curves:
            ax.plot([100 * s for s in SPARSITIES], curve, color=color, linewidth=0.5)
        ax.plot([100 * s for s in SPARSITIES], curves.mean(0), "o-", color=color, markersize=4)
        ax.text(0.03, height, rule, color=color, weight="bold", transform=ax.transAxes)
    ax.set(title=way, ylabel="test accuracy, %", ylim=(0, 102))
axes[-1].set(xlabel="weights set to zero, %")
plt.show()

# %%
# Thick lines are means, thin ones single networks. At once, the rules are about level up to 70 %, and beyond that
# magnitude is much better: scores that hold for one weight at a time say little about the removal of most of them. In
# steps the scores are renewed, and the Hessian is best. With training in between, nine of ten weights can go by either
# curvature at the cost of a percent or two; magnitude costs ten times as much. So curvature pays, but only in steps.
