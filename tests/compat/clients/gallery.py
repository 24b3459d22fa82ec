"""The programs of BackPACK's gallery about quantities, written anew and small: functions that return their numbers.

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
]
