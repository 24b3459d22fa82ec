"""How every extension is computed for every layer of torch.nn with parameters, observed by computing it.

Each layer is put into a tiny float64 network, each extension runs on it by itself, and the field of every parameter of
the layer is compared with its definition, evaluated by plain autograd. A request that is refused is "not defined".
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, einsum, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize

from curvopt import CurvoptError, backpack, extend, extensions
from curvopt.core.backward.backward_pass import BackwardPass
from curvopt.core.backward.residuals import Residuals
from curvopt.core.graph import CallInGraph
from curvopt.core.layers.operations import ParameterCall

N, C = 2, 3  # samples and classes

# ------------------------------------------------------------------------------------------------------------- layers


class Scaled(nn.Linear):
    """A subclass that inherits the forward."""


class Bag(nn.EmbeddingBag):
    """Means of embeddings in operations that PyTorch can differentiate twice."""

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight).mean(1)


class Normed(nn.Module):
    """What `weight_norm` does to a weight; PyTorch's own operation has a wrong second derivative (2.15)."""

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return length * direction / direction.norm(dim=1, keepdim=True)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.norm(dim=1, keepdim=True), weight


class Custom(nn.Module):
    """A module that nobody has a rule for, with parameters in operations that the graph shows."""

    def __init__(self):
        super().__init__()
        self.gate, self.power = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate) * x + self.power * x**2


class Multiplying(nn.Module):
    """Another, with matrices."""

    def __init__(self):
        super().__init__()
        self.W, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W + self.b


class Logarithm(Custom):
    """Another, with operations that are not known."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(x, self.gate) + torch.atan2(x, self.power)


@dataclass(frozen=True)
class Layer:
    """A layer under test, what it is called with, and whether the network is in train mode."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Sequence[Tensor]]
    train: bool = False
    same: Callable[[], nn.Module] | None = None  # for the definition


def normal(*shape: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: [torch.randn(N, *shape, dtype=torch.float64)]


def tokens(*shape: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: [torch.randint(4, (N, *shape))]


def twice(*shape: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: [*normal(*shape)(), *normal(*shape)()]


def same(*shape: int) -> Callable[[], Sequence[Tensor]]:
    return lambda: 3 * [*normal(*shape)()]


def parametrized(layer: nn.Module, parametrization: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", parametrization)
    return layer


IMAGES = {1: (4, 4), 2: (4, 4, 3), 3: (4, 3, 2, 2)}
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}

LAYERS = [
    Layer("Linear", lambda: nn.Linear(3, 2), normal(3)),
    Layer("Linear on `[N, T, F]`", lambda: nn.Linear(3, 2), normal(2, 3)),
    Layer("Bilinear", lambda: nn.Bilinear(2, 2, 3), twice(2)),
    *(Layer(f"Conv{d}d", lambda d=d: CONV[d](4, 2, 2, groups=2), normal(*IMAGES[d])) for d in CONV),
    *(Layer(f"ConvTranspose{d}d", lambda d=d: CONV_TRANSPOSE[d](4, 2, 2), normal(*IMAGES[d])) for d in CONV),
    Layer("Embedding", lambda: nn.Embedding(4, 2), tokens(3)),
    Layer("EmbeddingBag", lambda: nn.EmbeddingBag(4, 2), tokens(3), same=lambda: Bag(4, 2)),
    *(Layer(f"BatchNorm{d}d, eval", lambda d=d: BATCH_NORM[d](4), normal(*IMAGES[d])) for d in CONV),
    *(Layer(f"BatchNorm{d}d, train", lambda d=d: BATCH_NORM[d](4), normal(*IMAGES[d]), train=True) for d in CONV),
    Layer("LayerNorm", lambda: nn.LayerNorm(3), normal(2, 3)),
    Layer("GroupNorm", lambda: nn.GroupNorm(2, 4), normal(4, 3)),
    *(Layer(f"InstanceNorm{d}d", lambda d=d: INSTANCE_NORM[d](4, affine=True), normal(*IMAGES[d])) for d in CONV),
    Layer("RMSNorm", lambda: nn.RMSNorm(3), normal(2, 3)),
    Layer("PReLU", lambda: nn.PReLU(3), normal(3)),
    Layer("MultiheadAttention", lambda: nn.MultiheadAttention(4, 2, batch_first=True), same(3, 4)),
    Layer(
        "TransformerEncoderLayer",
        lambda: nn.TransformerEncoderLayer(2, 1, dim_feedforward=3, dropout=0.0, batch_first=True),
        normal(3, 2),
        train=True,
    ),
    Layer("RNN", lambda: nn.RNN(2, 3, batch_first=True), normal(3, 2)),
    Layer("LSTM", lambda: nn.LSTM(2, 2, batch_first=True), normal(3, 2)),
    Layer("GRU", lambda: nn.GRU(2, 2, batch_first=True), normal(3, 2)),
    Layer("RNNCell", lambda: nn.RNNCell(2, 3), normal(2)),
    Layer("LSTMCell", lambda: nn.LSTMCell(2, 2), normal(2)),
    Layer("GRUCell", lambda: nn.GRUCell(2, 2), normal(2)),
    Layer(
        "Linear with `weight_norm`",
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
        normal(3),
        same=lambda: parametrized(nn.Linear(3, 2), Normed()),
    ),
    Layer("Linear with a custom parametrization", lambda: parametrized(nn.Linear(3, 2), Normed()), normal(3)),
    Layer("Linear, a subclass of it", lambda: Scaled(3, 2), normal(3)),
    Layer("a custom module that multiplies by matrices", Multiplying, normal(3)),
    Layer("a custom module that adds, scales or repeats", Custom, normal(3)),
    Layer("a custom module, other operations", Logarithm, normal(3)),
]


class Net(nn.Module):
    """The layer, a tanh, and a linear head."""

    def __init__(self, layer: nn.Module, inputs: Sequence[Tensor]):
        super().__init__()
        self.layer = layer.double()
        for p in layer.parameters():
            nn.init.normal_(p, std=0.7)
        self.head = nn.Linear(self.features(inputs).shape[1], C).double()

    def features(self, inputs: Sequence[Tensor]) -> Tensor:
        out = self.layer(*inputs)
        while not isinstance(out, Tensor):
            out = out[0]
        return torch.tanh(out).flatten(1)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.head(self.features(inputs))


# -------------------------------------------------------------------------------------------------------- definitions


class Definition:
    """What the fields of one parameter should hold, from plain autograd, with the entries of the parameter in a row.

    Attributes:
        gradients: of every sample's term of the mean loss, ``[N, P]``.
        sampled: its gradients at every label the model may draw, ``[N, C, P]``.
        ggn: Gauss-Newton matrices, ``[N, P, P]``.
        hessian: Hessians, ``[N, P, P]``.
    """

    def __init__(self, z: Tensor, y: Tensor, p: nn.Parameter):
        def derivative(value: Tensor, create_graph: bool = False) -> Tensor:
            (grad,) = torch.autograd.grad(
                value, p, retain_graph=True, create_graph=create_graph, materialize_grads=True
            )
            return grad.flatten()

        losses = F.cross_entropy(z, y, reduction="none") / N
        gradients = [derivative(loss, create_graph=True) for loss in losses]
        self.gradients = torch.stack(gradients).detach()
        self.hessian = torch.stack([torch.stack([derivative(entry) for entry in g]) for g in gradients])
        J = torch.stack([torch.stack([derivative(entry) for entry in row]) for row in z])
        probabilities = z.detach().softmax(1)
        self.sampled = (einsum("nc,ncp->np", probabilities, J).unsqueeze(1) - J) / N**0.5
        self.ggn = einsum("nc,ncp,ncq->npq", probabilities, self.sampled, self.sampled)

    def drawn(self) -> Iterator[Tensor]:
        """Sampled gradients ``[N, P]`` for all labels that one draw for each sample may give."""
        for labels in itertools.product(range(C), repeat=N):
            yield self.sampled[torch.arange(N), list(labels)]


def definitions(layer: Layer) -> dict[str, Definition]:
    """Of every parameter of a layer."""
    model, inputs, y = build(layer, layer.same or layer.make)
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
        z = model(inputs)
    return {name: Definition(z, y, p) for name, p in model.layer.named_parameters()}


def close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual.reshape(expected.shape), expected, rtol=1e-7, atol=1e-10)


def is_psd(matrix: Tensor) -> bool:
    matrix = torch.diag_embed(matrix) if matrix.dim() == 1 else matrix
    smallest = torch.linalg.eigvalsh(matrix).min()
    return close(matrix, matrix.mT) and bool(smallest >= -1e-10 * (1 + matrix.abs().max()))


def matrix_of(product: Callable[[Tensor], Tensor], p: nn.Parameter) -> Tensor:
    """``[P, P]`` from its products."""
    return product(torch.eye(p.numel(), dtype=p.dtype).reshape(-1, *p.shape)).reshape(p.numel(), p.numel())


def are_factors(factors: list[Tensor], p: nn.Parameter) -> bool:
    """Whether Kronecker factors are positive semi-definite and together as large as the parameter."""
    groups = factors[0].shape[0] if factors[0].dim() == 3 else 1
    return prod((f.shape[-1] for f in factors), start=groups) == p.numel() and all(is_psd(f) for f in factors)


def is_right(field: str, p: nn.Parameter, of: Definition) -> bool:
    """Whether a field of a parameter agrees with its definition, as far as that determines it."""
    value = getattr(p, field)
    if field in ("kfac", "kflr", "kfra", "kfac_empirical"):
        if not are_factors(value, p) or len(value) > 1 or field == "kfra":
            return are_factors(value, p)
        if field == "kfac_empirical":
            return close(value[0], N * of.gradients.T @ of.gradients)
        return close(value[0], of.ggn.sum(0)) if field == "kflr" else any(close(value[0], s.T @ s) for s in of.drawn())
    diagonals = of.ggn.diagonal(0, 1, 2), of.hessian.diagonal(0, 1, 2)
    match field:
        case "grad_batch":
            return close(value, of.gradients)
        case "batch_l2":
            return close(value, of.gradients.square().sum(1))
        case "sum_grad_squared":
            return close(value.flatten(), of.gradients.square().sum(0))
        case "variance":
            return close(value.flatten(), of.gradients.var(0, unbiased=False))
        case "diag_ggn_exact":
            return close(value.flatten(), diagonals[0].sum(0))
        case "diag_ggn_exact_batch":
            return close(value, diagonals[0])
        case "diag_h":
            return close(value.flatten(), diagonals[1].sum(0))
        case "diag_h_batch":
            return close(value, diagonals[1])
        case "sqrt_ggn_exact":
            flat = value.reshape(*value.shape[:2], -1)
            return close(einsum("vnp,vnq->npq", flat, flat), of.ggn)
        case "sqrt_ggn_mc":
            return any(close(value[0], s) for s in of.drawn())
        case "diag_ggn_mc":
            return any(close(value.flatten(), s.square().sum(0)) for s in of.drawn())
        case "diag_ggn_mc_batch":
            return any(close(value, s.square()) for s in of.drawn())
        case "ggnmp":
            return close(matrix_of(value, p), of.ggn.sum(0))
        case "hmp":
            return close(matrix_of(value, p), of.hessian.sum(0))
        case "pchmp":  # clipping what is added to the Gauss-Newton matrix bounds that and the Hessian from above
            matrix = matrix_of(value, p)
            return is_psd(matrix - of.ggn.sum(0)) and is_psd(matrix - of.hessian.sum(0))
    raise NotImplementedError(f"no definition of {field}")


# ----------------------------------------------------------------------------------------------------------- the table

#: Every extension of the library that needs no arguments; Monte-Carlo ones draw one sample.
EXTENSIONS = [
    e
    for e in vars(extensions).values()
    if isinstance(e, type) and issubclass(e, extensions.Extension)
    if e not in (extensions.Extension, extensions.EigenDiagonal)
]
Kind = type[extensions.Extension]


@dataclass(frozen=True)
class Cell:
    """How a layer's quantity is computed; ``note`` says why it is not defined, or what is wrong."""

    how: str
    note: str = ""


def build(layer: Layer, make: Callable[[], nn.Module]) -> tuple[Net, Sequence[Tensor], Tensor]:
    """The same network, inputs and labels at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs = layer.inputs()
        return Net(make(), inputs).train(layer.train), inputs, torch.randint(C, (N,))


def way_of(call: CallInGraph) -> str:
    """How the Jacobians of a call's parameters are computed."""
    if isinstance(call.samples, dict):
        return "sample by sample"
    return "operations" if isinstance(call.call, ParameterCall) else "rule"


@contextmanager
def observed() -> Iterator[dict[nn.Parameter, set[str]]]:
    """How the quantities of each parameter are computed, while this is open."""
    ways: dict[nn.Parameter, set[str]] = defaultdict(set)
    begin, differentiate = BackwardPass.before_backward, Residuals._differentiate

    def observed_begin(run: BackwardPass, *args: Any) -> BackwardPass:
        for call in run.calls:
            for p in call.parameters.values():
                ways[p].add(way_of(call))
        return begin(run, *args)

    def observed_differentiate(self: Residuals, *args: Any) -> None:
        ways.update((p, {"double backward"}) for p in self.direct)
        differentiate(self, *args)

    with (
        mock.patch.object(BackwardPass, "before_backward", observed_begin),
        mock.patch.object(Residuals, "_differentiate", observed_differentiate),
    ):
        yield ways


def cell(layer: Layer, kind: Kind, expected: dict[str, Definition]) -> Cell:
    """Compute one quantity of one layer, see how it was done, and check it."""
    model, inputs, y = build(layer, layer.make)
    model, lossfunc = extend(model), extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings(), observed() as ways:
        warnings.simplefilter("ignore")  # of cost
        try:
            with backpack(kind()):
                lossfunc(model(inputs), y).backward()
        except CurvoptError as error:
            return Cell("not defined", shortened(str(error), kind.field))
        except Exception as error:
            return Cell("wrong", f"{type(error).__name__}: {shortened(str(error), kind.field)}")
    for name, p in model.layer.named_parameters():
        if not hasattr(p, kind.field):
            return Cell("wrong", f"{name} got no field")
        if not is_right(kind.field, p, expected[name]):
            return Cell("wrong", f"{name} disagrees with its definition")
    found = set[str]().union(*(ways[p] for p in model.layer.parameters()))
    return Cell(", ".join(way for way in ("rule", "operations", "sample by sample", "double backward") if way in found))


def shortened(message: str, field: str) -> str:
    """An error message without the place, the field and the remedy."""
    reason = message.splitlines()[0].split(": ", 1)[-1].split(";")[0].removesuffix(".")
    return reason.removeprefix(field).strip()


@functools.cache
def table() -> dict[str, dict[Kind, Cell]]:
    """Cells by layer and extension."""
    rows = {}
    for layer in LAYERS:
        expected = definitions(layer)
        rows[layer.name] = {kind: cell(layer, kind, expected) for kind in EXTENSIONS}
    return rows


INTRODUCTION = """\
The table below lists every layer of `torch.nn` that has parameters, and says how curvopt computes
each quantity of these parameters. Each layer is tried in a network of that layer, a tanh and a
linear head.

- **rule**: the layer has a registered rule. Quantities of the Hessian add the second derivatives of
  the nonlinear operations behind the layer.
- **operations**: curvopt reads the operations that use a parameter off the autograd graph, and each
  kind of operation has a rule.
- **sample by sample**: no rule knows the operation, or its samples are not along one axis. The
  vectors of each sample are pulled back on their own. This is exact, and slower.
- **double backward**: the Gauss-Newton part comes from one of these. The layer's own part of the
  Hessian comes from differentiating its gradient again, with one backward pass for each entry of
  the parameter.
- **not defined**: the request is an error. A note under the table has its reason.

`python -m benchmarks.coverage` computes every cell and compares it with the definition of the
quantity. Kronecker factors that have no unique definition are only checked to be factors."""


def columns(rows: dict[str, dict[Kind, Cell]]) -> list[list[Kind]]:
    """Extensions whose cells are equal, together."""
    groups: dict[tuple[Cell, ...], list[Kind]] = {}
    for kind in EXTENSIONS:
        groups.setdefault(tuple(row[kind] for row in rows.values()), []).append(kind)
    return list(groups.values())


def markdown(rows: dict[str, dict[Kind, Cell]]) -> str:
    """The table, with a numbered list of notes."""
    groups, notes = columns(rows), []
    titles = [" ".join(f"`{kind.__name__}`" for kind in kinds) for kinds in groups]
    lines = ["| " + " | ".join(["layer", *titles]) + " |", "|---" * (1 + len(groups)) + "|"]
    for name, row in rows.items():
        cells = [name]
        for kinds in groups:
            cell = row[kinds[0]]
            if cell.note and cell.note not in notes:
                notes.append(cell.note)
            cells.append(f"{cell.how} [{notes.index(cell.note) + 1}]" if cell.note else cell.how)
        lines.append("| " + " | ".join(cells) + " |")
    numbered = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    return "\n".join(["# Supported layers", "", INTRODUCTION, "", *lines, "", *numbered, ""])


def main(file: Annotated[Path | None, tyro.conf.arg(name="markdown", metavar="FILE")] = None) -> None:
    """Print the table of layers and extensions.

    Args:
        file: also write it here.
    """
    text = markdown(table())
    print(text)
    if file is not None:
        file.write_text(text)
    wrong = sum(cell.how == "wrong" for row in table().values() for cell in row.values())
    if wrong:
        raise SystemExit(f"{wrong} cells are wrong")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.coverage", description=__doc__)
