"""Solving a differential equation with a network
==============================================

Heat a square plate and keep its edges cold: its temperature u solves *Poisson's equation*, ``-(u_xx + u_yy) = f``, with
the heating f and u = 0 at the edges. A *physics-informed* network (Raissi et al. 2019) takes the position and returns
u. It is trained until the equation holds at random points. Such losses are hard for Adam, and curvature helps: by
Gauss-Newton steps (Müller & Zeinhofer 2023) or by Kronecker factors (Dangel et al. 2024). This page compares
``HessianFree``, ``KFACAdamW`` and AdamW.
"""

# %%
# For ``f = 2 π² sin(πx) sin(πy)`` the solution is known: ``u = sin(πx) sin(πy)``. So we can see how wrong a network is.
import time
from math import pi

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvopt.optim import HessianFree, KFACAdamW

axis = torch.linspace(0, 1, 41)
grid = torch.cartesian_prod(axis, axis)


def solution(at: Tensor) -> Tensor:
    return (pi * at).sin().prod(1, keepdim=True)


def error(model: nn.Module) -> float:
    """Distance to the solution, relative to its size: 1 for a network that always returns zero."""
    with torch.no_grad():
        return ((model(grid) - solution(grid)).norm() / solution(grid).norm()).item()


# %%
# The *residual* is by how much the equation fails at a point. It takes second derivatives of the network in its inputs,
# which PyTorch computes by two backward passes with ``create_graph=True``. The loss is the mean squared residual at
# random points inside, plus 100 times the mean square of u at random points on the edges.


def points(number: int) -> tuple[Tensor, Tensor]:
    """Points inside, and a quarter as many on the edges."""
    edge, row = torch.rand(number // 4, 2), torch.arange(number // 4)
    edge[row, torch.randint(2, row.shape)] = torch.randint(2, row.shape).float()
    return torch.rand(number, 2), edge


def loss_at(model: nn.Module, inside: Tensor, edge: Tensor) -> Tensor:
    at = inside.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
    second = [torch.autograd.grad(slope[:, k].sum(), at, create_graph=True)[0][:, k : k + 1] for k in (0, 1)]
    residual = second[0] + second[1] + 2 * pi**2 * solution(inside)
    return F.mse_loss(residual, torch.zeros_like(residual)) + 100 * F.mse_loss(model(edge), torch.zeros(len(edge), 1))


class Run:
    """A network, and its losses and errors with the seconds of training until then."""

    def __init__(self, name: str, color: str) -> None:
        torch.manual_seed(0)
        self.name, self.color, self.spent = name, color, 0.0
        self.model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.steps, self.losses, self.errors, self.seconds = [], [], [], []

    def train(self, step, steps: int, every: int) -> None:
        for number in range(1, steps + 1):
            begin = time.process_time()
            loss = step()
            self.spent += time.process_time() - begin
            if number % every == 0:
                self.steps.append(number)
                self.losses.append(loss.item())
                self.errors.append(error(self.model))
                self.seconds.append(self.spent)


# %%
# AdamW and ``KFACAdamW`` take 128 new points for each step. Both have the learning rate 0.1, the best of 0.01, 0.03,
# 0.1 and 0.3, which falls to zero.
def descend(run: Run, optimizer: torch.optim.Optimizer, steps: int) -> None:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)

    def step() -> Tensor:
        loss = loss_at(run.model, *points(128))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    run.train(step, steps, every=10)


adam = Run("AdamW", "C1")
descend(adam, torch.optim.AdamW(adam.model.parameters(), lr=0.1, weight_decay=0.0), 1500)
kfac = Run("KFACAdamW", "C2")
optimizer = KFACAdamW(kfac.model.parameters(), lr=0.1)
optimizer.attach(kfac.model)
descend(kfac, optimizer, 500)

# %%
# ``HessianFree`` keeps 256 points. Each of its steps solves a linear system with the curvature of all parameters by up
# to 50 products of the curvature with vectors, so it takes as long as many steps of AdamW. There is no learning rate.
newton = Run("HessianFree", "C0")
optimizer = HessianFree(newton.model.parameters(), cg_iterations=50)
chosen = points(256)
newton.train(lambda: optimizer.step(lambda: loss_at(newton.model, *chosen)), 28, every=1)

# %%
# Per step ``HessianFree`` is ahead by far, and needs no learning rate. ``KFACAdamW`` comes further than AdamW in a
# third of its steps, and in less time. This is one run of each. (The loss of ``HessianFree`` is that at its own
# points.)
figure, axes = plt.subplots(2, 1, figsize=(5, 7))
for height, run in zip((0.22, 0.14, 0.06), (adam, kfac, newton), strict=True):
    axes[0].loglog(run.steps, run.losses, color=run.color)
    axes[1].semilogy(run.seconds, run.errors, color=run.color)
    axes[0].text(0.03, height, run.name, color=run.color, weight="bold", transform=axes[0].transAxes)
    print(f"{run.name:12} {run.steps[-1]:5} steps, {run.seconds[-1]:.1f} s, error {run.errors[-1]:.4f}")
axes[0].set(xlabel="steps", ylabel="loss")
axes[1].set(xlabel="seconds", ylabel="relative error of the solution")
plt.show()

# %%
# How wrong are the networks, and where? The second scale is finer than the first one.
figure, axes = plt.subplots(2, 1, figsize=(5, 7.6))
for ax, run in zip(axes, (adam, newton), strict=True):
    with torch.no_grad():
        wrong = (run.model(grid) - solution(grid)).reshape(41, 41).T
    largest = wrong.abs().max().item()
    image = ax.imshow(wrong, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r", vmin=-largest, vmax=largest)
    ax.set(title=run.name)
    figure.colorbar(image, ax=ax, label="network minus solution")
plt.show()
