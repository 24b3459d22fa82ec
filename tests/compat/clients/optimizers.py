"""The programs of BackPACK's gallery about optimizers and estimates, as in `gallery`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compat.clients.gallery import C, cnn, images, seeded
from torch import Tensor, nn


class BlockwiseNewton(torch.optim.Optimizer):
    """Steps ``(curvature + damping)⁻¹ gradient`` by conjugate gradients, block by block."""

    def __init__(self, parameters: Any, extension: Any, lr: float = 0.1, damping: float = 1e-2):
        super().__init__(parameters, {"lr": lr, "damping": damping, "field": extension.savefield})
        self.extension = extension

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                x, r = torch.zeros_like(p), p.grad.clone()
                d = r.clone()
                for _ in range(3):
                    Ad = vars(p)[group["field"]](d.unsqueeze(0)).squeeze(0) + group["damping"] * d
                    length = r.square().sum() / (d * Ad).sum()
                    x, smaller = x + length * d, r - length * Ad
                    d = smaller + smaller.square().sum() / r.square().sum() * d
                    r = smaller
                p.sub_(x, alpha=group["lr"])


def cg_newton() -> dict[str, Any]:
    """Two steps with the blocks of each of four curvature matrices."""
    from backpack import backpack, extend, extensions

    numbers: dict[str, Any] = {}
    for name, curvature in {
        "GGNMP": extensions.GGNMP(),
        "HMP": extensions.HMP(),
        "PCHMP abs": extensions.PCHMP(modify="abs"),
        "PCHMP clip": extensions.PCHMP(modify="clip"),
    }.items():
        model, lossfunc, (x, y) = extend(cnn()), extend(nn.CrossEntropyLoss()), images()
        optimizer, losses = BlockwiseNewton(model.parameters(), curvature), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(lossfunc(model(x), y))
            with backpack(optimizer.extension):
                losses[-1].backward()
            optimizer.step()
        numbers[name] = [loss.detach() for loss in losses]
    return numbers


class ByDiagonal(torch.optim.Optimizer):
    """Gradients over the damped diagonal of the GGN."""

    def __init__(self, parameters: Any, step_size: float, damping: float):
        super().__init__(parameters, {"step_size": step_size, "damping": damping})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.diag_ggn_mc + group["damping"]), alpha=group["step_size"])


def diag_ggn_optimizer() -> dict[str, Any]:
    """Three steps on the sampled diagonal: of so many samples that it is the exact one up to a few percent."""
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNMC

    model, lossfunc, (x, y) = extend(cnn(nn.ReLU)), extend(nn.CrossEntropyLoss()), images()
    optimizer = ByDiagonal(model.parameters(), step_size=0.1, damping=0.1)
    losses: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(lossfunc(model(x), y))
        with backpack(DiagGGNMC(mc_samples=500)):
            losses[-1].backward()
        optimizer.step()
    return {"losses": [loss.detach() for loss in losses]}


def differential_privacy() -> dict[str, Any]:
    """Individual gradients are clipped by their norms over all parameters, summed, and get noise."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, BatchL2Grad

    model, (x, y) = extend(cnn(nn.ReLU)), images()
    lossfunc, limit, losses = nn.CrossEntropyLoss(), 0.01, []
    for step in range(3):
        model.zero_grad()
        loss = lossfunc(model(x), y)
        with backpack(BatchGrad(), BatchL2Grad()):
            loss.backward()
        norms = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0).sqrt()
        torch.manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                clipped = torch.einsum("n,n...->...", (limit / norms).clamp(max=1), p.grad_batch)
                p.sub_(clipped + 0.1 * limit * torch.randn_like(clipped), alpha=0.5)
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms}


def extension_hook() -> dict[str, Any]:
    """The trace of the Hessian, summed layer by layer in a hook that frees the diagonals."""
    from backpack import backpack, extend
    from backpack.extensions import DiagHessian

    model, lossfunc, (x, y) = extend(cnn()), extend(nn.CrossEntropyLoss()), images()
    traces: list[Tensor] = []
    batch: set[int] = set()

    def sum_up(module: nn.Module) -> None:
        for p in module.parameters():
            if hasattr(p, "diag_h"):
                batch.add(len(module.input0))  # type: ignore[arg-type]
                traces.append(p.diag_h.sum())  # type: ignore[operator]
                del p.diag_h

    with backpack(DiagHessian(), extension_hook=sum_up):
        lossfunc(model(x), y).backward()
    assert not any(hasattr(p, "diag_h") for p in model.parameters())
    return {"trace": torch.stack(traces).sum(), "parameters": len(traces), "batch": sorted(batch)}


def perceptron() -> nn.Sequential:
    return seeded(nn.Flatten, lambda: nn.Linear(64, 5, bias=False), nn.Sigmoid, lambda: nn.Linear(5, C, bias=False))


def trace_estimation() -> dict[str, Any]:
    """The trace of the Hessian: exact, by products with its blocks, and by products with all of it."""
    from backpack import backpack, extend
    from backpack.extensions import HMP, DiagHessian
    from backpack.hessianfree.hvp import hessian_vector_product

    model, lossfunc, (x, y) = extend(perceptron()), extend(nn.CrossEntropyLoss()), images()
    loss = lossfunc(model(x), y)
    with backpack(DiagHessian(), HMP()):
        loss.backward(retain_graph=True)
    parameters = list(model.parameters())
    signs = [torch.randint(2, (5, *p.shape)) * 2.0 - 1 for p in parameters]
    # the real package drops what its products need in any later backward
    blocks = [(v * p.hmp(v)).flatten(1).sum(1) for p, v in zip(parameters, signs, strict=True)]
    whole = [hessian_vector_product(loss, parameters, [v[i] for v in signs]) for i in range(5)]
    return {
        "exact": sum(float(p.diag_h.sum()) for p in parameters),
        "blocks": blocks,
        "whole": [torch.stack([(v[i] * Hv).sum() for v, Hv in zip(signs, whole[i], strict=True)]) for i in range(5)],
    }


PROGRAMS: list[Callable[[], dict[str, Any]]] = [
    cg_newton,
    diag_ggn_optimizer,
    differential_privacy,
    extension_hook,
    trace_estimation,
]
