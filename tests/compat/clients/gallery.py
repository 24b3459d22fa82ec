"""The programs of BackPACK's gallery, written anew and small: functions that return their numbers.

What they import of BackPACK, they import when they run: from the real package, or from `curvopt.as_backpack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, C = 6, 4
Batch = tuple[Tensor, Tensor]


def images(side: int = 8) -> Batch:
    torch.manual_seed(1)
    return torch.randn(N, 1, side, side), torch.randint(C, (N,))


def seeded(*modules: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in modules))


def cnn(activation: Callable[[], nn.Module] = nn.Sigmoid) -> nn.Sequential:
    first, hidden, last = lambda: nn.Conv2d(1, 2, 3), lambda: nn.Linear(18, 5), lambda: nn.Linear(5, C)
    return seeded(first, activation, lambda: nn.MaxPool2d(2), nn.Flatten, hidden, activation, last)


def fields(parameters: Any, *names: str) -> dict[str, list[Any]]:
    return {name: [getattr(p, name) for p in parameters] for name in names}


def compute(extensions: Sequence[Any], model: nn.Module, batch: Batch, lossfunc: Any = None, **options: Any) -> Tensor:
    """A backward in which extensions compute their fields, of a mean cross-entropy unless told; the loss."""
    from backpack import backpack, extend

    loss = (lossfunc or extend(nn.CrossEntropyLoss()))(model(batch[0]), batch[1])
    with backpack(*extensions, **options):
        loss.backward()
    return loss.detach()


def all_in_one() -> dict[str, Any]:
    """Every extension, for a linear model; of what is sampled, the shapes."""
    from backpack import extend
    from backpack import extensions as ext

    model, batch = extend(seeded(nn.Flatten, lambda: nn.Linear(64, C))), images()
    numbers: dict[str, Any] = {}
    exact = [ext.BatchGrad, ext.BatchL2Grad, ext.SumGradSquared, ext.Variance, ext.DiagGGNExact, ext.BatchDiagGGNExact]
    exact += [ext.DiagHessian, ext.BatchDiagHessian, ext.KFLR, ext.KFRA]
    for group in [[each] for each in exact] + [exact]:
        compute([each() for each in group], model, batch)
        numbers[str(len(group))] = fields(model.parameters(), *(each().savefield for each in group))
    compute([ext.SqrtGGNExact()], model, batch)
    roots = [p.sqrt_ggn_exact for p in model.parameters()]
    numbers["root"] = [torch.einsum("cn...,cn...->n...", root, root) for root in roots]
    sampled = [ext.DiagGGNMC(mc_samples=2), ext.BatchDiagGGNMC(), ext.KFAC(mc_samples=1), ext.SqrtGGNMC(mc_samples=3)]
    compute(sampled, model, batch)
    shapes = [(p.diag_ggn_mc.shape, p.diag_ggn_mc_batch.shape, p.sqrt_ggn_mc.shape) for p in model.parameters()]
    numbers["sampled"] = [list(shape) for each in shapes for shape in each]
    numbers["sampled factors"] = [list(factor.shape) for p in model.parameters() for factor in p.kfac]
    replaced = [ext.PCHMP(savefield=f"pchmp_{modify}", modify=modify) for modify in ("clip", "abs")]
    compute([ext.GGNMP(), ext.HMP(), *replaced], model, batch)
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
    x = torch.rand(N, 5)
    outputs = model(x)
    by_gradients = [torch.zeros(*outputs.shape, *p.shape) for p in model.parameters()]
    for c in range(outputs.shape[1]):
        with backpack(extensions.BatchGrad(), retain_graph=True):
            outputs[:, c].sum().backward(retain_graph=True)
        for jacobian, p in zip(by_gradients, model.parameters(), strict=True):
            jacobian[:, c] = p.grad_batch
    compute([extensions.SqrtGGNExact()], model, (x, torch.zeros(N, 3)), extend(nn.MSELoss(reduction="sum")))
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
    from backpack import extend
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
        torch.manual_seed(1)
        model, batch = extend(Scale()), (torch.randn(N, C), torch.randint(C, (N,)))
        compute([extension], model, batch, extend(nn.CrossEntropyLoss(reduction="sum")))
        numbers[extension.savefield] = vars(model.weight)[extension.savefield]
    return numbers


class Residual(nn.Module):
    """A residual network that is no chain of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.shortcut, self.relu, self.last = nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Linear(2 * 36, C)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.relu(self.first(x))) + self.shortcut(x)
        return self.last(x.flatten(1))


def first_order_resnet() -> dict[str, Any]:
    """Individual gradients of a residual network that is no chain, by a loss in functions."""
    from backpack import extend
    from backpack.extensions import BatchGrad

    model = extend(seeded(Residual)[0])
    compute([BatchGrad()], model, images(6), lambda z, y: F.cross_entropy(z, y, reduction="sum"))
    return fields(model.parameters(), "grad_batch")


def gradient_of_variance() -> dict[str, Any]:
    """The variance of individual gradients, differentiated."""
    from backpack import backpack, extend
    from backpack.extensions import Variance

    numbers: dict[str, Any] = {}
    torch.manual_seed(1)
    regression, cross_entropy = (torch.randn(N, 2), torch.randn(N, 1)), nn.CrossEntropyLoss(reduction="sum")
    for name, model, lossfunc, (x, y) in (
        ("regression", seeded(lambda: nn.Linear(2, 1, bias=False)), nn.MSELoss(reduction="sum"), regression),
        ("linear", seeded(nn.Flatten, lambda: nn.Linear(64, C)), cross_entropy, images()),
        ("convolutions", cnn(nn.ReLU), cross_entropy, images()),
    ):
        extend(model)
        with backpack(Variance()):
            lossfunc(model(x), y).backward(retain_graph=True, create_graph=True)
        total = sum(p.variance.sum() for p in model.parameters())  # type: ignore[operator]
        numbers[name] = total.detach(), torch.autograd.grad(total, list(model.parameters()))
    return numbers


def resnet_all_in_one() -> dict[str, Any]:
    """Diagonals of residual networks: one of BackPACK's modules, and one in functions that is converted."""
    from backpack import extend
    from backpack.custom_module.branching import Parallel, SumModule
    from backpack.extensions import DiagGGNExact
    from backpack.utils.examples import autograd_diag_ggn_exact

    (x, y), lossfunc = images(6), extend(nn.CrossEntropyLoss())
    first, block = lambda: nn.Conv2d(1, 2, 3, padding=1), seeded(lambda: nn.Conv2d(2, 2, 3, padding=1), nn.ReLU)
    branches, last = lambda: Parallel(nn.Identity(), block, merge_module=SumModule()), lambda: nn.Linear(72, C)
    model = seeded(first, nn.ReLU, branches, nn.Flatten, last)
    numbers: dict[str, Any] = {}
    converted = extend(seeded(Residual)[0], use_converter=True)
    for name, network in (("modules", extend(model)), ("converted", converted)):
        compute([DiagGGNExact()], network, (x, y), lossfunc)
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
    compute([DiagGGNExact()], model, (x, x.flatten(1)), lossfunc)
    numbers: dict[str, Any] = {"at once": fields(model.parameters(), "diag_ggn_exact")}
    outputs, slices = model(x), 4
    totals = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(slices):
        part = (slice(None), slice(i * 36 // slices, (i + 1) * 36 // slices))
        with backpack(DiagGGNExact(), retain_graph=True):
            lossfunc(extend(Slicing(part))(outputs), x.flatten(1)[part]).backward(retain_graph=True)
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
    from backpack import extend
    from backpack.custom_module.permute import Permute
    from backpack.custom_module.reduce_tuple import ReduceTuple
    from backpack.extensions import BatchGrad, DiagGGNExact

    layer = [lambda: nn.LSTM(4, 4, batch_first=True), lambda: ReduceTuple(index=0)]
    ends = [lambda: nn.Embedding(7, 4)], [lambda: nn.Linear(4, 7), lambda: Permute(0, 2, 1)]
    model = extend(seeded(*ends[0], *layer, *layer, *ends[1]))
    torch.manual_seed(1)
    x, y = torch.randint(7, (N, 5)), torch.randint(7, (N, 5))
    compute([BatchGrad(), DiagGGNExact()], model, (x, y))
    converted = extend(seeded(Characters)[0], use_converter=True)
    compute([DiagGGNExact()], converted, (x, y))
    # the converter makes one layer of each, under other names
    by_shape = sorted(
        (p.diag_ggn_exact for p in converted.parameters()), key=lambda t: (tuple(t.shape), float(t.sum()))
    )
    return {"modules": fields(model.parameters(), "grad_batch", "diag_ggn_exact"), "converted": by_shape}


def save_memory_convolutions() -> dict[str, Any]:
    """Individual gradients by both algorithms that BackPACK has for convolutions."""
    from backpack import extend, extensions
    from backpack.core.derivatives.convnd import weight_jac_t_save_memory

    numbers: dict[str, Any] = {}
    for save_memory in (True, False):
        model = extend(cnn(nn.ReLU))
        with weight_jac_t_save_memory(save_memory=save_memory):
            compute([extensions.BatchGrad()], model, images())
        numbers[str(save_memory)] = fields(model.parameters(), "grad_batch")
    return numbers


def subsampling() -> dict[str, Any]:
    """Individual gradients of some samples."""
    from backpack import extend
    from backpack.extensions import BatchGrad

    model = extend(cnn())
    compute([BatchGrad(subsampling=[0, 1, 4])], model, images())
    return fields(model.parameters(), "grad_batch")


# ------------------------------------------------------------------------------------- optimizers and estimates


def descend(
    extensions: Sequence[Any], update: Callable[[Any, int], Tensor], activation: Callable[[], nn.Module]
) -> dict[str, Any]:
    """The losses of three steps, which take ``update`` of each parameter and of the number of the step."""
    from backpack import extend

    model, losses = extend(cnn(activation)), []
    for step in range(3):
        model.zero_grad()
        losses.append(compute(extensions, model, images()))
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(update(p, step))
    return {"losses": losses}


def newton_direction(product: Callable[[Tensor], Tensor], gradient: Tensor, damping: float = 1e-2) -> Tensor:
    """``(curvature + damping)⁻¹ gradient`` by three steps of conjugate gradients."""
    x, r = torch.zeros_like(gradient), gradient.clone()
    d = r.clone()
    for _ in range(3):
        Ad = product(d.unsqueeze(0)).squeeze(0) + damping * d
        length = r.square().sum() / (d * Ad).sum()
        x, smaller = x + length * d, r - length * Ad
        d, r = smaller + smaller.square().sum() / r.square().sum() * d, smaller
    return x


def cg_newton() -> dict[str, Any]:
    """Two steps with the blocks of each of four curvature matrices."""
    from backpack import extensions as ext

    curvatures = {"GGNMP": ext.GGNMP(), "HMP": ext.HMP()}
    curvatures |= {f"PCHMP {modify}": ext.PCHMP(modify=modify) for modify in ("abs", "clip")}
    numbers: dict[str, Any] = {}
    for name, curvature in curvatures.items():
        update = lambda p, step, field=curvature.savefield: 0.1 * newton_direction(vars(p)[field], p.grad)  # noqa: E731
        numbers[name] = descend([curvature], update, nn.Sigmoid)["losses"]
    return numbers


def diag_ggn_optimizer() -> dict[str, Any]:
    """Three steps on the sampled diagonal: of so many samples that it is the exact one up to a few percent."""
    from backpack.extensions import DiagGGNMC

    return descend([DiagGGNMC(mc_samples=500)], lambda p, step: 0.1 * p.grad / (p.diag_ggn_mc + 0.1), nn.ReLU)


def differential_privacy() -> dict[str, Any]:
    """Individual gradients are clipped by their norms over all parameters, summed, and get noise."""
    from backpack import extend
    from backpack.extensions import BatchGrad, BatchL2Grad

    model, limit, losses = extend(cnn(nn.ReLU)), 0.01, []
    for step in range(3):
        model.zero_grad()
        losses.append(compute([BatchGrad(), BatchL2Grad()], model, images(), nn.CrossEntropyLoss()))
        norms = torch.stack([p.batch_l2 for p in model.parameters()]).sum(0).sqrt()
        torch.manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                clipped = torch.einsum("n,n...->...", (limit / norms).clamp(max=1), p.grad_batch)
                p.sub_(clipped + 0.1 * limit * torch.randn_like(clipped), alpha=0.5)
    return {"losses": losses, "norms": norms}


def extension_hook() -> dict[str, Any]:
    """The trace of the Hessian, summed layer by layer in a hook that frees the diagonals."""
    from backpack import extend
    from backpack.extensions import DiagHessian

    model, traces, batch = extend(cnn()), [], set()

    def sum_up(module: nn.Module) -> None:
        for p in module.parameters():
            if hasattr(p, "diag_h"):
                batch.add(len(module.input0))  # type: ignore[arg-type]
                traces.append(p.diag_h.sum())  # type: ignore[operator]
                del p.diag_h

    compute([DiagHessian()], model, images(), extension_hook=sum_up)
    assert not any(hasattr(p, "diag_h") for p in model.parameters())
    return {"trace": torch.stack(traces).sum(), "parameters": len(traces), "batch": sorted(batch)}


def trace_estimation() -> dict[str, Any]:
    """The trace of the Hessian: exact, by products with its blocks, and by products with all of it."""
    from backpack import backpack, extend
    from backpack.extensions import HMP, DiagHessian
    from backpack.hessianfree.hvp import hessian_vector_product

    first, last = lambda: nn.Linear(64, 5, bias=False), lambda: nn.Linear(5, C, bias=False)
    model, lossfunc, (x, y) = seeded(nn.Flatten, first, nn.Sigmoid, last), extend(nn.CrossEntropyLoss()), images()
    loss = lossfunc(extend(model)(x), y)
    with backpack(DiagHessian(), HMP()):
        loss.backward(retain_graph=True)
    parameters: list[Any] = list(model.parameters())
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
PROGRAMS: list[Callable[[], dict[str, Any]]] = [all_in_one, batched_jacobians, custom_module, first_order_resnet]
PROGRAMS += [gradient_of_variance, resnet_all_in_one, retain_graph, rnn, save_memory_convolutions, subsampling]
PROGRAMS += [differential_privacy, extension_hook, trace_estimation]
