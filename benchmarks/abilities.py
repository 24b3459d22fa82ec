"""What packages make of networks that are not chains of layers: right numbers, wrong ones, or an error.

    python -m benchmarks.abilities

A row is a small network with one feature. Each package is asked for individual gradients, the diagonal of the GGN and
its Kronecker factors (exact columns), which are compared with `curvopt.testing.Reference`, that is, plain autograd.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.agreement import default_dtype, error_of
from benchmarks.packages import PACKAGES, NotOffered, Values, installed, method
from benchmarks.problems import Task
from curvopt.testing import Reference

QUANTITIES = {"BatchGrad": "individual gradients", "DiagGGNExact": "GGN's diagonal", "KFLR": "Kronecker factors"}


class Net(nn.Module):
    """Modules by name, and a function of them and the input."""

    def __init__(self, function: Callable, **modules: nn.Module):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Scale(nn.Module):
    """A module of one's own."""

    def __init__(self, features: int):
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.slope * x)


def tied() -> Net:
    def forward(net: Net, x: Tensor) -> Tensor:
        return F.linear(net.body(net.embedding(x).mean(1)), net.embedding.weight)

    return Net(forward, embedding=nn.Embedding(5, 4), body=nn.Linear(4, 4))


def linear() -> dict[str, nn.Module]:
    return {"first": nn.Linear(4, 4), "last": nn.Linear(4, 5)}


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5))


def convolution(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, **options), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 5))


def lstm() -> Net:
    modules = {"rnn": nn.LSTM(4, 4, batch_first=True), "flatten": nn.Flatten(), "last": nn.Linear(12, 5)}
    return Net(lambda net, x: net.last(net.flatten(net.rnn(x)[0])), **modules)


VECTORS, TOKENS, SEQUENCES, IMAGES = (6, 4), (6, 3), (6, 3, 4), (6, 2, 5, 5)

#: Name of a feature, the shape of the input (of tokens if it is made of them), and the network.
FEATURES: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "a chain of layers": (VECTORS, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5))),
    "functional activation": (VECTORS, lambda: Net(lambda n, x: n.last(torch.tanh(n.first(x))), **linear())),
    "residual connection": (
        VECTORS,
        lambda: Net(lambda n, x: n.last(x + n.relu(n.first(x))), relu=nn.ReLU(), **linear()),
    ),
    "layer used twice": (VECTORS, lambda: Net(lambda n, x: n.last(torch.tanh(n.first(n.first(x)))), **linear())),
    "output tied to the embedding": (TOKENS, tied),
    "activation checkpointing": (
        VECTORS,
        lambda: Net(lambda n, x: n.last(checkpoint(n.first, x, use_reentrant=False)), **linear()),
    ),
    "custom module": (VECTORS, lambda: nn.Sequential(nn.Linear(4, 4), Scale(4), nn.Linear(4, 5))),
    "weight norm": (VECTORS, lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 5))),
    "layer norm": (VECTORS, norm),
    "grouped convolution": (IMAGES, lambda: convolution(groups=2)),
    "circular convolution": (IMAGES, lambda: convolution(padding_mode="circular")),
    "LSTM": (SEQUENCES, lstm),
    "attention": (
        SEQUENCES,
        lambda: Net(
            lambda n, x: n.last(n.attention(x, x, x)[0].mean(1)),
            attention=nn.MultiheadAttention(4, 2, batch_first=True),
            last=nn.Linear(4, 5),
        ),
    ),
}


def make(feature: str) -> Task:
    """The network with a batch, in the default dtype."""
    shape, model = FEATURES[feature]
    torch.manual_seed(0)
    x = torch.randint(5, shape) if shape is TOKENS else torch.randn(shape)
    return Task(model().to(torch.get_default_dtype()), nn.CrossEntropyLoss(), x, torch.arange(len(x)) % 5)


def expected(feature: str, quantity: str) -> Values:
    """By plain autograd; Kronecker factors only where all matrices have one definition, else nothing."""
    task = make(feature)
    reference = Reference(task.model, task.x, lambda z: task.lossfunc(z, task.y))
    if quantity == "KFLR":
        matrices = [name for name, p in reference.parameters.items() if p.dim() > 1]
        factors = {name: reference.kflr(name) for name in matrices if reference.has_factors(name)}
        whole = len(factors) == len(matrices) and all(B.dim() == 2 for B, _ in factors.values())
        return {name: [(B,), (A,)] for name, (B, A) in factors.items()} if whole else {}
    definition = {"BatchGrad": reference.grad_batch, "DiagGGNExact": reference.diag_ggn_exact}[quantity]
    return {name: definition(name) for name in reference.parameters}


def verdict(package: str, feature: str, quantity: str) -> str:
    """``right``, ``wrong``, ``incomplete`` (some parameters have nothing), ``error`` or ``-`` (not offered)."""
    found = "error"
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-3)):  # some packages know one of them
        with default_dtype(dtype), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            reference = expected(feature, quantity)
            try:
                asked = method(package, copy.copy(make(feature)), quantity)
                values = asked.read(asked.run())
            except NotOffered:
                return "-"
            except Exception:  # whatever it raises
                continue
            here = {name: value for name, value in values.items() if name in reference}
            try:
                right = bool(here) and error_of(here, {name: reference[name] for name in here}) <= tolerance
            except Exception:  # shapes that cannot be compared
                right = False
            if right and len(here) == len(reference):
                return "right"
            found = "incomplete" if right else "wrong"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name in PACKAGES if name != "torch.func"]
    parser.add_argument("--packages", nargs="+", choices=list(PACKAGES), default=names)
    arguments = parser.parse_args()
    packages = installed(arguments.packages)
    for quantity, title in QUANTITIES.items():
        print(f"\n### {title}\n\n| network | {' | '.join(packages)} |\n|---|{'---|' * len(packages)}", flush=True)
        for feature in FEATURES:
            if not expected(feature, quantity):
                continue
            print(f"| {feature} | {' | '.join(verdict(p, feature, quantity) for p in packages)} |", flush=True)


if __name__ == "__main__":
    main()
