"""The programs of BackPACK's gallery, written anew and small: functions that return their numbers.

Each imports what it needs itself, so that it runs with the real package and with `curvopt.as_backpack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, C = 6, 4


def images(side: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 1, side, side), torch.randint(C, (N,))


def seeded(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in modules))


def cnn(activation: Callable[[], nn.Module] = nn.Sigmoid) -> nn.Sequential:
    return seeded(
        lambda: nn.Conv2d(1, 2, 3),
        activation,
        lambda: nn.MaxPool2d(2),
        nn.Flatten,
        lambda: nn.Linear(18, 5),
        activation,
        lambda: nn.Linear(5, C),
    )


def fields(parameters: Any, *names: str) -> dict[str, list[Any]]:
    return {name: [getattr(p, name) for p in parameters] for name in names}


def all_in_one() -> dict[str, Any]:
    """Every extension, for a linear model; of what is sampled, the shapes."""
    from backpack import backpack, extend
    from backpack import extensions as ext

    model, lossfunc, (x, y) = (
        extend(seeded(nn.Flatten, lambda: nn.Linear(64, C))),
        extend(nn.CrossEntropyLoss()),
        images(),
    )
    numbers: dict[str, Any] = {}
    exact = [ext.BatchGrad, ext.BatchL2Grad, ext.SumGradSquared, ext.Variance, ext.DiagGGNExact, ext.BatchDiagGGNExact]
    exact += [ext.DiagHessian, ext.BatchDiagHessian, ext.KFLR, ext.KFRA]
    for group in [[each] for each in exact] + [exact]:
        with backpack(*(each() for each in group)):
            lossfunc(model(x), y).backward()
        numbers[str(len(group))] = fields(model.parameters(), *(each().savefield for each in group))
    with backpack(ext.SqrtGGNExact()):
        lossfunc(model(x), y).backward()
    numbers["root"] = [
        torch.einsum("cn...,cn...->n...", p.sqrt_ggn_exact, p.sqrt_ggn_exact) for p in model.parameters()
    ]
    with backpack(
        ext.DiagGGNMC(mc_samples=2), ext.BatchDiagGGNMC(), ext.KFAC(mc_samples=1), ext.SqrtGGNMC(mc_samples=3)
    ):
        lossfunc(model(x), y).backward()
    shapes = [(p.diag_ggn_mc.shape, p.diag_ggn_mc_batch.shape, p.sqrt_ggn_mc.shape) for p in model.parameters()]
    numbers["sampled"] = [list(shape) for each in shapes for shape in each]
    numbers["sampled factors"] = [list(factor.shape) for p in model.parameters() for factor in p.kfac]
    products = [ext.GGNMP(), ext.HMP(), ext.PCHMP(savefield="pchmp_clip", modify="clip")]
    with backpack(*products, ext.PCHMP(savefield="pchmp_abs", modify="abs")):
        lossfunc(model(x), y).backward()
    for vectors in (1, 3):
        for name in ("ggnmp", "hmp", "pchmp_clip", "pchmp_abs"):
            along = [torch.linspace(-1, 1, vectors * p.numel()).view(vectors, *p.shape) for p in model.parameters()]
            numbers[f"{name} {vectors}"] = [vars(p)[name](v) for p, v in zip(model.parameters(), along, strict=True)]
    return numbers


def batched_jacobians() -> dict[str, Any]:
    """Jacobians of an output: by one backward for each entry, and by the root of a square's GGN."""
    from backpack import backpack, extend, extensions

    model = extend(seeded(lambda: nn.Linear(5, 4), nn.ReLU, lambda: nn.Linear(4, 3)))
    torch.manual_seed(1)
    outputs = model(torch.rand(N, 5))
    by_gradients = [torch.zeros(*outputs.shape, *p.shape) for p in model.parameters()]
    for c in range(outputs.shape[1]):
        with backpack(extensions.BatchGrad(), retain_graph=True):
            outputs[:, c].sum().backward(retain_graph=True)
        for jacobian, p in zip(by_gradients, model.parameters(), strict=True):
            jacobian[:, c] = p.grad_batch
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    with backpack(extensions.SqrtGGNExact()):
        lossfunc(outputs, torch.zeros_like(outputs)).backward()
    return {"gradients": by_gradients, "root": [p.sqrt_ggn_exact.transpose(0, 1) / 2**0.5 for p in model.parameters()]}


class Scale(nn.Module):
    """A layer that BackPACK does not know."""

    def __init__(self, weight: float = 2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def custom_module() -> dict[str, Any]:
    """Fields of a custom layer. BackPACK is taught both of them; here the rules are ignored."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, DiagGGNExact
    from backpack.extensions.firstorder.base import FirstOrderModuleExtension
    from backpack.extensions.module_extension import ModuleExtension

    class OfGradients(FirstOrderModuleExtension):
        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
            return (g_out[0] * module.input0).sum(1, keepdim=True)

    class OfDiagonal(ModuleExtension):
        def backpropagate(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
            return quantities * module.weight

        def weight(self, ext: Any, module: Any, g_inp: Any, g_out: Any, quantities: Any) -> Tensor:
            return (quantities * module.input0).sum(2).square().sum().reshape(1)

    numbers: dict[str, Any] = {}
    for extension, of_module in ((BatchGrad(), OfGradients), (DiagGGNExact(), OfDiagonal)):
        extension.set_module_extension(Scale, of_module(params=["weight"]))  # type: ignore[attr-defined]
        model, lossfunc = extend(Scale()), extend(nn.CrossEntropyLoss(reduction="sum"))
        torch.manual_seed(1)
        with backpack(extension):
            lossfunc(model(torch.randn(N, C)), torch.randint(C, (N,))).backward()
        numbers[extension.savefield] = vars(model.weight)[extension.savefield]
    return numbers


class Residual(nn.Module):
    """A residual network that is no chain of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.shortcut = nn.Conv2d(1, 2, 1)
        self.relu, self.last = nn.ReLU(), nn.Linear(2 * 36, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.relu(self.first(x))) + self.shortcut(x)
        return self.last(x.flatten(1))


def first_order_resnet() -> dict[str, Any]:
    """Individual gradients of a residual network that is no chain, by a loss in functions."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    torch.manual_seed(0)
    model, (x, y) = extend(Residual()), images(6)
    with backpack(BatchGrad()):
        F.cross_entropy(model(x), y, reduction="sum").backward()
    return fields(model.parameters(), "grad_batch")


def gradient_of_variance() -> dict[str, Any]:
    """The variance of individual gradients, differentiated."""
    from backpack import backpack, extend
    from backpack.extensions import Variance

    numbers: dict[str, Any] = {}
    torch.manual_seed(1)
    regression = torch.randn(N, 2), torch.randn(N, 1)
    for name, model, lossfunc, (x, y) in (
        ("regression", seeded(lambda: nn.Linear(2, 1, bias=False)), nn.MSELoss(reduction="sum"), regression),
        ("linear", seeded(nn.Flatten, lambda: nn.Linear(64, C)), nn.CrossEntropyLoss(reduction="sum"), images()),
        ("convolutions", cnn(nn.ReLU), nn.CrossEntropyLoss(reduction="sum"), images()),
    ):
        extend(model)
        with backpack(Variance()):
            lossfunc(model(x), y).backward(retain_graph=True, create_graph=True)
        total = sum(p.variance.sum() for p in model.parameters())  # type: ignore[operator]
        numbers[name] = total.detach(), torch.autograd.grad(total, list(model.parameters()))
    return numbers


def resnet_all_in_one() -> dict[str, Any]:
    """Diagonals of residual networks: one of BackPACK's modules, and one in functions that is converted."""
    from backpack import backpack, extend
    from backpack.custom_module.branching import Parallel, SumModule
    from backpack.extensions import DiagGGNExact
    from backpack.utils.examples import autograd_diag_ggn_exact

    (x, y), lossfunc = images(6), extend(nn.CrossEntropyLoss())
    block = seeded(lambda: nn.Conv2d(2, 2, 3, padding=1), nn.ReLU)
    model = seeded(
        lambda: nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU,
        lambda: Parallel(nn.Identity(), block, merge_module=SumModule()),
        nn.Flatten,
        lambda: nn.Linear(72, C),
    )
    torch.manual_seed(0)
    numbers: dict[str, Any] = {}
    for name, network in (("modules", extend(model)), ("converted", extend(Residual(), use_converter=True))):
        with backpack(DiagGGNExact()):
            lossfunc(network(x), y).backward()
        flat = torch.cat([p.diag_ggn_exact.flatten() for p in network.parameters()])
        some = torch.linspace(0, len(flat) - 1, 10, dtype=torch.int32)
        torch.testing.assert_close(autograd_diag_ggn_exact(x, y, network, lossfunc, idx=some), flat[some])
        numbers[name] = {path: p.diag_ggn_exact for path, p in network.named_parameters()}
    return numbers


def retain_graph() -> dict[str, Any]:
    """The diagonal for an autoencoder, at once and by slices of its output with the graph kept."""
    from backpack import backpack, extend
    from backpack.custom_module.slicing import Slicing
    from backpack.extensions import DiagGGNExact

    model = extend(seeded(lambda: nn.Conv2d(1, 2, 3), nn.Sigmoid, lambda: nn.ConvTranspose2d(2, 1, 3), nn.Flatten))
    (x, _), lossfunc = images(6), extend(nn.MSELoss())
    with backpack(DiagGGNExact()):
        lossfunc(model(x), x.flatten(1)).backward()
    numbers: dict[str, Any] = {"at once": fields(model.parameters(), "diag_ggn_exact")}
    outputs, slices = model(x), 4
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(slices):
        part = (slice(None), slice(i * 36 // slices, (i + 1) * 36 // slices))
        loss = lossfunc(extend(Slicing(part))(outputs), x.flatten(1)[part])
        with backpack(DiagGGNExact(), retain_graph=True):
            loss.backward(retain_graph=True)
        for total, p in zip(totals, model.parameters(), strict=True):
            total += p.diag_ggn_exact / slices
    return {**numbers, "by slices": totals}


class Characters(nn.Module):
    """A recurrent network over characters, in functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.dense = nn.Embedding(7, 4), nn.LSTM(4, 4, 2, batch_first=True), nn.Linear(4, 7)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(x))
        return self.dense(x).permute(0, 2, 1)


def rnn() -> dict[str, Any]:
    """Fields of recurrent networks: one of BackPACK's modules, and one in functions that is converted."""
    from backpack import backpack, extend
    from backpack.custom_module.permute import Permute
    from backpack.custom_module.reduce_tuple import ReduceTuple
    from backpack.extensions import BatchGrad, DiagGGNExact

    model = seeded(
        lambda: nn.Embedding(7, 4),
        lambda: nn.LSTM(4, 4, batch_first=True),
        lambda: ReduceTuple(index=0),
        lambda: nn.LSTM(4, 4, batch_first=True),
        lambda: ReduceTuple(index=0),
        lambda: nn.Linear(4, 7),
        lambda: Permute(0, 2, 1),
    )
    lossfunc = extend(nn.CrossEntropyLoss())
    torch.manual_seed(1)
    x, y = torch.randint(7, (N, 5)), torch.randint(7, (N, 5))
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(extend(model)(x), y).backward()
    numbers: dict[str, Any] = {"modules": fields(model.parameters(), "grad_batch", "diag_ggn_exact")}
    torch.manual_seed(0)
    converted = extend(Characters(), use_converter=True)
    with backpack(DiagGGNExact()):
        lossfunc(converted(x), y).backward()
    # the converter makes one layer of each, under other names
    return {**numbers, "converted": sorted_by_shape([p.diag_ggn_exact for p in converted.parameters()])}


def sorted_by_shape(tensors: Sequence[Tensor]) -> list[Tensor]:
    return sorted(tensors, key=lambda t: (tuple(t.shape), float(t.sum())))


def save_memory_convolutions() -> dict[str, Any]:
    """Individual gradients by both algorithms that BackPACK has for convolutions."""
    from backpack import backpack, extend, extensions
    from backpack.core.derivatives.convnd import weight_jac_t_save_memory

    numbers: dict[str, Any] = {}
    for save_memory in (True, False):
        model, lossfunc, (x, y) = extend(cnn(nn.ReLU)), extend(nn.CrossEntropyLoss()), images()
        with weight_jac_t_save_memory(save_memory=save_memory), backpack(extensions.BatchGrad()):
            lossfunc(model(x), y).backward()
        numbers[str(save_memory)] = fields(model.parameters(), "grad_batch")
    return numbers


def subsampling() -> dict[str, Any]:
    """Individual gradients of some samples."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    model, lossfunc, (x, y) = extend(cnn()), extend(nn.CrossEntropyLoss()), images()
    with backpack(BatchGrad(subsampling=[0, 1, 4])):
        lossfunc(model(x), y).backward()
    return fields(model.parameters(), "grad_batch")


# ------------------------------------------------------------------------------------- optimizers and estimates


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


#: But for two that `compat.clients` says more of.
PROGRAMS: list[Callable[[], dict[str, Any]]] = [
    all_in_one,
    batched_jacobians,
    custom_module,
    first_order_resnet,
    gradient_of_variance,
    resnet_all_in_one,
    retain_graph,
    rnn,
    save_memory_convolutions,
    subsampling,
    differential_privacy,
    extension_hook,
    trace_estimation,
]
