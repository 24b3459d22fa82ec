"""Learning a second task without forgetting the first
===================================================

A network that has learned one task and then trains on another one forgets the first. *Elastic weight consolidation*
(EWC, Kirkpatrick et al. 2017) holds each weight near its old value, the more so the more the first task needs it. The
need is measured by the *Fisher information*, the curvature of the loss in that weight. This page shows how well that
works, with better and with worse measures of need, and a case in which it fails.
"""

# %%
# The first task is to read digits. In the second one the pixels of all images are shuffled, in one and the same order.
import copy

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import KFLR, DiagGGNExact

Task = tuple[Tensor, Tensor]
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
order, shuffled = torch.randperm(len(images)), torch.randperm(64)
x, y = torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]
first, second = (x, y), (x[:, shuffled], y)


def halves(task: Task) -> tuple[Task, Task]:
    """Two thirds for training, the rest for testing."""
    x, y = task
    cut = 2 * len(x) // 3
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def accuracy(model: nn.Module, task: Task) -> float:
    x, y = halves(task)[1]
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def train(model: nn.Module, task: Task, steps: int, penalty=lambda: 0.0) -> None:
    x, y = halves(task)[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, fused=True)
    for _ in range(steps):
        chosen = torch.randint(len(x), (100,))
        optimizer.zero_grad()
        (nn.functional.cross_entropy(model(x[chosen]), y[chosen]) + penalty()).backward()
        optimizer.step()


def learn_first(task: Task) -> nn.Module:
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    model = nn.Sequential(*layers)
    train(model, task, steps=250)
    return model


# %%
# Three measures of need, each from one backward pass after the first task. ``"equal"`` holds all weights alike.
# ``"EWC"`` takes the diagonal of the Fisher information, which for a softmax with cross-entropy is the diagonal of the
# Gauss-Newton matrix: ``DiagGGNExact``. ``"Kronecker"`` also knows how the weights of a layer act together (Ritter et
# al. 2018): ``KFLR`` gives each layer's curvature as a product of two small matrices.


def penalty(model: nn.Module, task: Task, kind: str, strength: float):
    """How far a model has moved away from what it is now, in terms of the loss of a task."""
    now = extend(copy.deepcopy(model))
    x, y = halves(task)[0]
    with backpack(DiagGGNExact() if kind == "EWC" else KFLR()):
        nn.functional.cross_entropy(now(x), y).backward()

    def product(p: nn.Parameter, move: Tensor) -> Tensor:
        if kind == "equal":
            return move
        if kind == "EWC":
            return p.diag_ggn_exact * move
        left, *right = p.kflr  # a bias has one factor
        return left @ move @ right[0] if right else left @ move

    def value() -> Tensor:
        moves = [
            (p, new - p.detach())
            for p, new in zip(now.parameters(), model.parameters(), strict=True)
        ]
        return strength / 2 * sum((move * product(p, move)).sum() for p, move in moves)

    return value


# %%
# Accuracy on both tasks while the second one is learned. Without a penalty half of the first task is forgotten. With
# EWC it drops at first and recovers, and the second task is learned a little more slowly.
model = learn_first(first)
figure, ax = plt.subplots(figsize=(5, 3.8))
for label, strength, color, height in (
    ("without", 0, "C1", 0.14),
    ("with EWC", 100, "C0", 0.05),
):
    learner = copy.deepcopy(model)
    held = penalty(learner, first, "EWC", strength)
    curves = [(accuracy(learner, first), accuracy(learner, second))]
    for _ in range(15):
        train(learner, second, 10, held)
        curves.append((accuracy(learner, first), accuracy(learner, second)))
    for curve, style in zip(zip(*curves, strict=True), ("-", "--"), strict=True):
        ax.plot(range(0, 151, 10), curve, style, color=color)
    ax.text(0.5, height, label, color=color, weight="bold", transform=ax.transAxes)
ax.text(0.5, 0.23, "solid: first task\ndashed: second task", transform=ax.transAxes)
ax.set(xlabel="steps on the second task", ylabel="test accuracy, %", ylim=(0, 102))
plt.show()

# %%
# How strong should the penalty be? Each dot is one strength: the further up, the less is forgotten; the further right,
# the better the second task is learned. For comparison, a harder case: the first task is to read 0 to 4, the second to
# read 5 to 9, with outputs for all ten digits, of which each task shows five.
cases = {
    "shuffled pixels": (first, second),
    "new digits": tuple((x[chosen], y[chosen]) for chosen in (y < 5, y >= 5)),
}
kinds = {
    "equal": ("C1", (0.01, 0.1, 1)),
    "EWC": ("C0", (10, 100, 1000)),
    "Kronecker": ("C2", (1, 10, 100, 1000)),
}
figure, axes = plt.subplots(2, 1, figsize=(5, 8))
for ax, (case, (old, new)) in zip(axes, cases.items(), strict=True):
    starts = [learn_first(old) for _ in range(2)]
    for height, (kind, (color, strengths)) in zip((0.3, 0.2, 0.1), kinds.items(), strict=True):
        points = []
        for strength in strengths:
            learners = [copy.deepcopy(start) for start in starts]
            for learner in learners:
                train(learner, new, 120, penalty(learner, old, kind, strength))
            points.append(
                [sum(accuracy(each, task) for each in learners) / 2 for task in (new, old)]
            )
        ax.plot(*zip(*points, strict=True), "o-", color=color)
        ax.text(0.04, height, kind, color=color, weight="bold", transform=ax.transAxes)
    ax.set(
        title=case, xlabel="test accuracy on the second task, %", ylabel="on the first task, %"
    )
    ax.set(xlim=(-3, 103), ylim=(-3, 103))
plt.show()

# %%
# With shuffled pixels, EWC keeps the first task at a small cost to the second, which equal weights do not, and the
# Kronecker factors are better yet. With new digits EWC and Kronecker factors fail at all of these strengths, and even
# equal weights are better. The first task never showed a 5 to 9, so its loss hardly depends on how the outputs for
# these are made, and its curvature says that they are free to change.
