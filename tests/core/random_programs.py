"""Random programs: models, data and losses, and the dense definition of their fields.

A program calls its models and takes terms of a loss from their outputs, the heads. The definition runs the same program
with a copy of the parameters for each row of each call (`Copies`), so the gradients, Jacobians and Hessians of a sample
are those of its copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, einsum, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune

from curvopt import extend, prediction

N, INPUTS, WIDTH = 4, 3, 4

# --------------------------------------------------------------------------------------------------------------- models


class Computed(nn.Module):
    """A layer by functions, whose weight may be computed from parameters."""

    def __init__(self, kind: str, inputs: int, outputs: int):
        super().__init__()
        self.kind = kind
        self.w, self.b = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs))
        if kind == "lora":
            self.A, self.B = nn.Parameter(torch.randn(1, inputs)), nn.Parameter(torch.randn(outputs, 1))
        self.register_buffer("mask", (torch.rand(outputs, inputs) < 0.6).to(self.w))

    def forward(self, h: Tensor) -> Tensor:
        if self.kind == "matmul":
            return h @ self.w.T
        if self.kind == "scaled":
            return 2 * F.linear(h, self.w, self.b)
        weight = {
            "functional": lambda: self.w,
            "masked": lambda: self.w * self.mask,
            "lora": lambda: self.w + self.B @ self.A,
            "normalized": lambda: F.normalize(self.w),
        }[self.kind]()
        return F.linear(h, weight, self.b)


class Normed(nn.Module):
    """Weight normalisation, of operations that can be differentiated twice."""

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return length * direction / direction.norm(dim=1, keepdim=True)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.norm(dim=1, keepdim=True), weight


def layer(kind: str, inputs: int, outputs: int) -> nn.Module:
    """A layer of ``[N, inputs]``."""
    linear = nn.Linear(inputs, outputs)
    if kind == "linear":
        return linear
    if kind == "pruned":
        return prune.random_unstructured(linear, "weight", 0.3)
    if kind == "weight_norm":
        parametrize.register_parametrization(linear, "weight", Normed())
        return linear
    if kind == "spectral_norm":
        return parametrizations.spectral_norm(linear).eval()
    return Computed(kind, inputs, outputs)


LAYERS = (
    "linear", "pruned", "weight_norm", "spectral_norm", "lora",
    "functional", "masked", "matmul", "normalized", "scaled",
)  # fmt: skip
BODIES = ("mlp", "deep", "tied", "residual", "gated", "direct")


class Net(nn.Module):
    """A trunk and heads on it; rows are samples."""

    def __init__(self, body: str, heads: Sequence[tuple[str, int]], inputs: int = INPUTS):
        super().__init__()
        self.body, self.kinds = body, [kind for kind, _ in heads]
        width = inputs if body == "direct" else WIDTH
        if body != "direct":
            self.first = nn.Linear(inputs, WIDTH)
        if body in ("deep", "residual"):
            self.second = nn.Linear(WIDTH, WIDTH)
        if body == "tied":
            self.again = nn.Linear(WIDTH, WIDTH)
        if body == "gated":
            self.gate = nn.Parameter(torch.randn(WIDTH))
        self.heads = nn.ModuleList(layer(kind, width, outputs) for kind, outputs in heads)

    def trunk(self, x: Tensor) -> Tensor:
        if self.body == "direct":
            return x
        h = torch.tanh(self.first(x))
        if self.body == "deep":
            h = torch.sigmoid(self.second(h))
        if self.body == "residual":
            h = h + torch.tanh(self.second(h))
        if self.body == "tied":
            h = torch.tanh(self.again(torch.tanh(self.again(h)))) + h
        return h * self.gate if self.body == "gated" else h

    def forward(self, x: Tensor) -> Any:
        h = self.trunk(x)
        outputs = tuple(head(h) for head in self.heads)
        return outputs if len(outputs) > 1 else outputs[0]

    def samples(self, x: Tensor) -> list[tuple]:
        """The arguments of each sample."""
        return [(row,) for row in x.split(1)]

    def __repr__(self) -> str:
        return f"{self.body} with {', '.join(self.kinds)}"


class Molecules(nn.Module):
    """Energies of molecules, ``[M, 1]`` or ``[M]``, which are sums over their atoms: molecules are samples."""

    def __init__(self, column: bool):
        super().__init__()
        self.atom, self.last, self.column = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 1), column

    def forward(self, atoms: Tensor, molecule: Tensor, M: int) -> Tensor:
        e = atoms.new_zeros(M, 1).index_add(0, molecule, self.last(torch.tanh(self.atom(atoms))))
        return e if self.column else e[:, 0]

    def samples(self, atoms: Tensor, molecule: Tensor, M: int) -> list[tuple]:
        return [(atoms[molecule == m], 0 * molecule[molecule == m], 1) for m in range(M)]

    def __repr__(self) -> str:
        return "[M, 1]" if self.column else "[M]"


# --------------------------------------------------------------------------------------------------------------- losses


@dataclass
class Loss:
    """A scalar of rows ``[R, C]``.

    Attributes:
        of: the scalar.
        halves: two functions it consists of; what is between them has a row for each sample.
        at: two functions it consists of, where it is split between them.
        known: whether it is recognised, and so is split at its own input.
        convex: whether its Hessian in its input is positive semi-definite.
        coupled: whether it mixes samples.
    """

    of: Callable[..., Tensor]
    known: bool = False
    convex: bool = True
    coupled: bool = False
    halves: tuple[Callable[..., Any], Callable[..., Tensor]] | None = None
    at: tuple[Callable[..., Any], Callable[..., Tensor]] | None = None


def losses(R: int, C: int) -> dict[str, Loss]:
    """Losses of ``[R, C]``, with random targets."""
    t, y = torch.randn(R, C), torch.randint(C, (R,))
    bits, rows, sign = torch.randint(2, (R, C)).to(t), torch.arange(R), torch.randint(2, (R,)) * 2 - 1
    known = {
        "cross_entropy": lambda z: F.cross_entropy(z, y),
        "cross_entropy, sum": lambda z: F.cross_entropy(z, y, reduction="sum"),
        "nll_loss": lambda z: F.nll_loss(F.log_softmax(z, 1), y),
        "log_softmax by hand": lambda z: -F.log_softmax(z, 1)[rows, y].mean(),
        "kl_div": lambda z: F.kl_div(F.log_softmax(z, 1), t.softmax(1), reduction="batchmean"),
        "mse_loss": lambda z: F.mse_loss(z, t),
        "mse_loss, rows": lambda z: F.mse_loss(z, t, reduction="none").sum(1).mean(),
        "mse_loss, sum": lambda z: F.mse_loss(z, t, reduction="sum") / 3,
        "bce": lambda z: F.binary_cross_entropy_with_logits(z, bits),
        "Bernoulli": lambda z: -distributions.Bernoulli(logits=z).log_prob(bits).mean(),
    }
    extended = extend(nn.CrossEntropyLoss(label_smoothing=0.1)), extend(nn.MSELoss(reduction="sum"))
    known["CrossEntropyLoss"] = lambda z: extended[0](z, y)
    known["MSELoss"] = lambda z: extended[1](z, t)
    near = lambda p: 0.9 * p.detach() + 0.1 * t.softmax(1)  # noqa: E731
    squares = {  # of what, and the rest of the loss
        "squares": (lambda z: z, lambda z: ((z - t) ** 2).mean()),
        "Normal": (lambda z: z, lambda z: -distributions.Normal(z, 0.7).log_prob(t).mean()),
        "Brier": (lambda z: z.softmax(1), lambda p: (p - t.softmax(1)).square().mean()),
        "Brier, nearly met": (lambda z: z.softmax(1), lambda p: (p - near(p)).square().sum(1).mean()),
        "variance": (lambda z: z.var(1, correction=0), lambda v: (v - 0.1).square().mean()),
    }
    by_hand = {
        "Categorical": lambda z: -distributions.Categorical(logits=z).log_prob(y).mean(),
        "log-cosh": lambda z: (z - t).cosh().log().mean(),
        "huber_loss": lambda z: F.huber_loss(z, t),
        "softplus": lambda z: F.softplus(-z * sign[:, None]).mean(),
        "poisson_nll_loss": lambda z: F.poisson_nll_loss(z, t.abs()),
        "distance": lambda z: (z - t).norm(dim=1).mean(),
        "logsumexp": lambda z: (z.logsumexp(1) - z[rows, y]).mean(),
        "soft margin": lambda z: F.soft_margin_loss(z, sign[:, None].to(z).expand_as(z)),
    }
    linear = {
        "l1_loss": lambda z: F.l1_loss(z, t),
        "hinge": lambda z: F.relu(1 - z).mean(),
        "score": lambda z: -z[:, 0].mean(),
        "weighted": lambda z: (z * t).sum() / R,
    }
    not_convex = {
        "Huber loss of a norm": lambda z: F.huber_loss(z.square().sum(1).add(1).sqrt(), t[:, 0].abs()),
        "focal": lambda z: (lambda ce: ((1 - (-ce).exp()) ** 2 * ce).mean())(F.cross_entropy(z, y, reduction="none")),
        "learned variance": lambda z: -distributions.Normal(z[:, 0], z[:, -1].exp()).log_prob(t[:, 0]).mean(),
        "clipped": lambda z: (lambda r: -torch.minimum(r * t[:, :1], r.clamp(0.8, 1.2) * t[:, :1]).mean())(
            z.softmax(1)[rows, y][:, None] * C
        ),
        "entropy": lambda z: (z.logsumexp(1) - z[rows, y] - distributions.Categorical(logits=z).entropy()).mean(),
    }
    coupled = {
        "rmse": lambda z: F.mse_loss(z, t).sqrt(),
        "pairs": lambda z: F.cross_entropy(z @ z.T, rows),
    }
    halves = {
        "nll_loss": (lambda z: F.log_softmax(z, 1), lambda p: F.nll_loss(p, y)),
        "log_softmax by hand": (lambda z: F.log_softmax(z, 1)[rows, y], lambda p: -p.mean()),
        "cross_entropy": (lambda z: F.cross_entropy(z, y, reduction="none"), torch.mean),
        "mse_loss, rows": (lambda z: F.mse_loss(z, t, reduction="none").sum(1), torch.mean),
        "Bernoulli": (lambda z: distributions.Bernoulli(logits=z).log_prob(bits), lambda p: -p.mean()),
        "Categorical": (lambda z: distributions.Categorical(logits=z).log_prob(y), lambda p: -p.mean()),
        "Normal": (lambda z: distributions.Normal(z, 0.7).log_prob(t).sum(1), lambda p: -p.sum() / t.numel()),
        "squares": (lambda z: ((z - t) ** 2).sum(1), lambda p: p.sum() / t.numel()),
        "log-cosh": (lambda z: (z - t).cosh().log().sum(1), lambda p: p.sum() / t.numel()),
        "distance": (lambda z: (z - t).norm(dim=1), torch.mean),
        "l1_loss": (lambda z: (z - t).abs().sum(1), lambda p: p.sum() / t.numel()),
        "Brier": (lambda z: (z.softmax(1) - t.softmax(1)).square().sum(1), lambda p: p.sum() / t.numel()),
        "Brier, nearly met": (lambda z: (z.softmax(1) - near(z.softmax(1))).square().sum(1), torch.mean),
    }
    kinds = {**dict.fromkeys(known | squares, {"known": True}), **dict.fromkeys(by_hand | linear, {})}
    kinds |= {
        **dict.fromkeys(not_convex, {"convex": False}),
        **dict.fromkeys(coupled, {"convex": False, "coupled": True}),
    }
    whole = {name: lambda z, of=of, rest=rest: rest(of(z)) for name, (of, rest) in squares.items()}
    return {
        name: Loss(of, halves=halves.get(name), at=squares.get(name), **kinds[name])
        for name, of in (known | whole | by_hand | linear | not_convex | coupled).items()
    }


#: What stands between a head and a loss: whether it is linear, and the function.
BETWEEN: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    "identity": (True, lambda z: z),
    "scale": (True, lambda z: 1.5 * z - 0.5),
    "half": (True, lambda z: z[: len(z) // 2]),
    "other half": (True, lambda z: z[len(z) // 2 :]),
    "rows": (True, lambda z: z[[2, 0]]),
    "mask": (True, lambda z: z[torch.arange(len(z)) != 1]),
    "columns": (True, lambda z: z[:, :2]),
    "sigmoid": (False, torch.sigmoid),
    "tanh": (False, torch.tanh),
    "normalize": (False, lambda z: F.normalize(z, dim=1)),
    "tanh of a half": (False, lambda z: z[: len(z) // 2].tanh()),
    "sigmoid of rows": (False, lambda z: z[[2, 0]].sigmoid()),
}
#: The same, where the user says that the result is the prediction.
MARKED = {f"prediction {name}": BETWEEN[name][1] for name in ("scale", "sigmoid", "tanh", "normalize")}
BETWEEN |= {name: (False, lambda z, of=of: prediction(of(z))) for name, of in MARKED.items()}


@dataclass
class Term:
    """A weight times a loss of heads, each behind a function."""

    name: str
    weight: float
    heads: tuple[int, ...]
    between: str
    loss: Loss

    def inputs(self, heads: Sequence[Tensor]) -> list[Tensor]:
        """What the loss is computed from."""
        return [BETWEEN[self.between][1](heads[i]) for i in self.heads]

    def value(self, heads: Sequence[Tensor]) -> Tensor:
        return self.weight * self.loss.of(*self.inputs(heads))

    @property
    def is_definite(self) -> bool:
        """Whether it has a Gauss-Newton matrix that is a sum over samples."""
        linear = BETWEEN[self.between][0] or self.loss.known or self.between in MARKED
        return self.loss.convex and not self.loss.coupled and linear


# ------------------------------------------------------------------------------------------------------------- programs

Call = Callable[..., Any]


def plainly(model: nn.Module, *args: Any) -> Any:
    return model(*args)


def total(values: Sequence[Tensor]) -> Tensor:
    return sum(values[1:], start=values[0])


@dataclass
class Program:
    """Models, how heads come from calls of them, and the terms of the loss."""

    text: str
    models: list[nn.Module]
    data: tuple[Tensor, ...]
    run: Callable[..., list[Tensor]]
    terms: list[Term]

    def heads(self, call: Call | None = None, data: tuple[Tensor, ...] | None = None) -> list[Tensor]:
        """The outputs of which terms are computed; ``call(model, *args)`` calls a model."""
        return self.run(call or plainly, *(self.data if data is None else data))

    def loss(self, terms: Sequence[Term] | None = None) -> Tensor:
        """The scalar, of all terms or of some."""
        heads = self.heads()
        return total([term.value(heads) for term in (self.terms if terms is None else terms)])

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{i}.{name}": p for i, model in enumerate(self.models) for name, p in model.named_parameters()}

    def __str__(self) -> str:
        terms = [f"{t.weight} {t.name}({t.between} of {t.heads})" for t in self.terms]
        return f"{self.text}: {'; '.join(map(str, self.models))}: {' + '.join(terms)}"


def heads_of(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def some_heads(rng: random.Random, number: int, outputs: int) -> list[tuple[str, int]]:
    return [(rng.choice([*LAYERS, "linear", "linear"]), outputs) for _ in range(number)]


Plot = tuple[list[nn.Module], tuple[Tensor, ...], Callable[..., list[Tensor]]]


def one_net(rng: random.Random) -> Plot:
    net = Net(rng.choice(BODIES), some_heads(rng, rng.choice([1, 2, 2, 3]), 3))
    return [net], (torch.randn(N, INPUTS),), lambda call, x: heads_of(call(net, x))


def two_nets(rng: random.Random) -> Plot:
    nets = [Net(rng.choice(BODIES), some_heads(rng, 1, 3)) for _ in range(2)]
    return nets, (torch.randn(N, INPUTS),), lambda call, x: [call(net, x) for net in nets]


def parts(rng: random.Random) -> Plot:
    """A trunk and its heads are models; a head may see some rows, and a loss what the trunk gives."""
    trunk = Net(rng.choice(["mlp", "deep"]), some_heads(rng, 1, WIDTH))
    heads = [Net("direct", some_heads(rng, 1, 3), WIDTH) for _ in range(2)]
    rows = rng.choice([slice(None), slice(0, 3)])

    def run(call: Call, x: Tensor) -> list[Tensor]:
        z = call(trunk, x)
        h = torch.tanh(z)
        return [call(heads[0], h), call(heads[1], h[rows]), z]

    return [trunk, *heads], (torch.randn(N, INPUTS),), run


def slopes(rng: random.Random) -> Plot:
    net = Net(rng.choice(["mlp", "deep", "residual"]), some_heads(rng, 1, 1))

    def run(call: Call, x: Tensor) -> list[Tensor]:
        at = x.clone().requires_grad_()
        z = call(net, at)
        (first,) = torch.autograd.grad(z.sum(), at, create_graph=True)
        return [z, first, *torch.autograd.grad(first.sum(), at, create_graph=True)]

    return [net], (torch.randn(N, INPUTS),), run


def halves(rng: random.Random) -> Plot:
    net = Net(rng.choice(BODIES), some_heads(rng, 1, 3))
    return [net], (torch.randn(N, INPUTS),), lambda call, x: [call(net, torch.cat([x[:2], x[2:]]))]


def gan(rng: random.Random) -> Plot:
    """A discriminator of generated samples, and maybe of real ones in the same call."""
    G, D = Net("mlp", some_heads(rng, 1, INPUTS)), Net(rng.choice(["mlp", "deep"]), some_heads(rng, 1, 2))
    joint = rng.random() < 0.6

    def run(call: Call, z: Tensor, real: Tensor) -> list[Tensor]:
        fake = call(G, z)
        return [call(D, torch.cat([real, fake]) if joint else fake)]

    return [G, D], (torch.randn(N, INPUTS), torch.randn(N, INPUTS)), run


def twice(rng: random.Random) -> Plot:
    net = Net(rng.choice(BODIES), some_heads(rng, 1, 3))
    return [net], (torch.randn(N, INPUTS), torch.randn(N, INPUTS)), lambda call, a, b: [call(net, a), call(net, b)]


def in_a_row(rng: random.Random) -> Plot:
    net = Net(rng.choice(BODIES), some_heads(rng, 1, INPUTS))
    return [net], (torch.randn(N, INPUTS),), lambda call, x: [call(net, call(net, x))]


def teacher(rng: random.Random) -> Plot:
    """What another model says without gradients is subtracted from the output."""
    net, of = (Net(rng.choice(BODIES), some_heads(rng, 1, 3)) for _ in range(2))
    of.requires_grad_(rng.random() < 0.5)

    def run(call: Call, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            target = call(of, x)
        return [call(net, x) - target]

    return [net, of], (torch.randn(N, INPUTS),), run


def molecules(rng: random.Random) -> Plot:
    net, molecule = Molecules(rng.random() < 0.5), torch.tensor([0, 0, 1, 1, 1, 2, 2])
    return [net], (torch.randn(7, INPUTS), molecule), lambda call, atoms, molecule: [call(net, atoms, molecule, 3)]


PLOTS = {
    plot.__name__: plot for plot in (one_net, two_nets, parts, slopes, halves, gan, twice, in_a_row, teacher, molecules)
}


def terms_of(rng: random.Random, heads: Sequence[Tensor], number: int, plain: bool, may_mark: bool) -> list[Term]:
    """Random terms of heads; all of them have Gauss-Newton matrices if ``plain``."""
    found: list[Term] = []
    functions = [name for name in BETWEEN if may_mark or name not in MARKED]
    while len(found) < number:
        head, between = rng.randrange(len(heads)), rng.choice([*functions, *["identity"] * 6])
        z = heads[head]
        of_rows = between.split()[-1] in ("identity", "scale", "sigmoid", "tanh")
        if not of_rows and (z.dim() < 2 or z.shape[1] < 2 or len(z) < 4):
            continue
        at = BETWEEN[between][1](z)
        if at.dim() < 2 or at.shape[1] < 2:
            name = rng.choice(["mse_loss", "bce", "squares", "log-cosh", "huber_loss", "l1_loss"])
            table = losses(len(at), 1)
            made = table[name]
            if at.dim() == 1:
                of = made.of
                made = Loss(lambda z, of=of: of(z[:, None]), made.known, made.convex, made.coupled)
        else:
            table = losses(*at.shape)
            name = rng.choice(sorted(table))
            made = table[name]
        term = Term(name, rng.choice([1.0, 0.5, 2.0]), (head,), between, made)
        if not plain or term.is_definite:
            found.append(term)
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of a seed, in double precision."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(default)


def program(seed: int, plot: str | None = None, plain: bool = False) -> Program:
    """The program of a seed; ``plain``: all its terms have Gauss-Newton matrices."""
    rng = random.Random(seed)
    with seeded(seed):
        name = plot or rng.choice(list(PLOTS))
        models, data, run = PLOTS[name](rng)
        heads = [z.detach() for z in run(plainly, *data)]
        may_mark = name not in ("gan", "parts", "molecules")  # refused: samples are those of several models, or pooled
        terms = terms_of(rng, heads, rng.choice([1, 2, 2, 3]), plain, may_mark)
        if name in ("two_nets", "twice") and rng.random() < 0.4:
            joint = Loss(lambda a, b: (a - b).square().sum(1).mean())
            terms.append(Term("distance of heads", 1.0, (0, 1), "identity", joint))
    return Program(name, models, data, run, terms)


def smooth(seed: int) -> Program:
    """A plain program in which nothing but ``tanh`` and ``sigmoid`` is nonlinear between parameters and losses."""
    rng = random.Random(seed)
    with seeded(seed):
        kinds = ["linear", "pruned", "functional", "masked", "matmul", "scaled", "lora"]
        net = Net(rng.choice(["mlp", "deep", "residual", "direct"]), [(rng.choice(kinds), 3) for _ in range(2)])
        x = torch.randn(N, INPUTS)
        heads, terms = [z.detach() for z in net(x)], list[Term]()
        while len(terms) < 2:
            (term,) = terms_of(rng, heads, 1, True, True)
            if "normalize" not in term.between and not (
                term.loss.at and term.name in ("variance", "Brier", "Brier, nearly met")
            ):
                terms.append(term)
    return Program("smooth", [net], (x,), lambda call, x: heads_of(call(net, x)), terms)


def one_loss(name: str, kind: str = "linear", beside: str | None = None, between: str = "identity") -> Program:
    """A net whose last layer is of a kind, with a loss behind a function, and maybe another one of the same head."""
    with seeded(0):
        net, x = Net("mlp", [(kind, 3)]), torch.randn(N, INPUTS)
        tables = {each: losses(*BETWEEN[each][1](net(x)).shape) for each in (between, "identity")}
    terms = [Term(name, 1.0, (0,), between, tables[between][name])]
    terms += [Term(beside, 1.0, (0,), "identity", tables["identity"][beside])] if beside else []
    return Program("one_loss", [net], (x,), lambda call, x: [call(net, x)], terms)


# ---------------------------------------------------------------------------------------------------------------- steps


def put_in_place(h: Tensor, _: Tensor) -> Tensor:
    """Rows are put one by one where none was yet."""
    rows = torch.zeros_like(h)
    for to, row in enumerate(h.flip(0)):
        rows[to - 1] = row
    return rows


#: What is done with ``[4, T, 5]``, of which the first axis may be that of samples, and numbers ``[5, 5]``.
STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scale": lambda h, c: h * c[0],
    "gate": lambda h, c: h + c[0, 0] * h.flip(0),
    "leak": lambda h, c: h - c[0, 0] * h.mean(0),
    "branch": lambda h, c: torch.where(c[0] > 0.5, h, h.roll(1, 0)),
    "interpolation": lambda h, c: torch.lerp(h, h.cos(), c[0]),
    "matrix of samples": lambda h, c: (c[:4, :4] @ h.flatten(1)).view_as(h),
    "matrix of steps": lambda h, c: c[: h.shape[1], : h.shape[1]] @ h,
    "matrix of features": lambda h, c: h @ c,
    "time first": lambda h, c: (h.transpose(0, 1).flatten(0, 1) * c[0]).unflatten(0, (-1, 4)).transpose(0, 1),
    "rows": lambda h, c: torch.tanh(h.flatten(0, 1) + c[0]).view_as(h),
    "attention": lambda h, c: (h @ h.mT + c[: h.shape[1], : h.shape[1]]).softmax(-1) @ h,
    "attention among samples": lambda h, c: torch.einsum("mn,ntd->mtd", (h[:, 0] @ h[:, 0].T + c[:4, :4]).tanh(), h),
    "one row": lambda h, c: torch.cat([h[:1] * c[0], h[1:]]),
    "order": lambda h, c: h[[1, 3, 0, 2]] - c[0],
    "one after the other": lambda h, c: torch.stack([step * c[0] for step in h.unbind(1)], 1),
    "two views": lambda h, c: torch.mul(*torch.cat([h, h.cos() * c[0]]).chunk(2)),
    "views in turn": lambda h, c: torch.stack([h, h.cos()], 1).flatten(0, 1).view(4, 2, *h.shape[1:]).sum(1) * c[0],
    "put in place": put_in_place,
    "norm": lambda h, c: F.layer_norm(h, (5,), c[0], c[1]),
    "kernel along steps": lambda h, c: F.conv1d(h.mT, c[:, :1, None].expand(5, 1, 3), padding=1, groups=5).mT,
    "kernel along samples": lambda h, c: F.conv1d(h.permute(1, 2, 0), c[:, :, None]).permute(2, 0, 1),
    "sums so far": lambda h, c: h.cumsum(1) + c[0],
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------- definitions


class Copies:
    """Calls a model with a copy of its parameters for each sample; calls with equal numbers of samples share them."""

    def __init__(self, model: nn.Module, calls: Sequence[int]):
        self.model, self.agree = model, len(set(calls)) == 1
        self.rows = calls[0] if self.agree else sum(calls)
        self.done = 0
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.of = {
            name: p.detach().expand(self.rows, *p.shape).clone().requires_grad_() for name, p in trainable.items()
        }

    def __call__(self, *args: Any) -> Any:
        samples = self.model.samples(*args)
        first = 0 if self.agree else self.done
        self.done += len(samples)
        outputs = [
            functional_call(self.model, {name: p[first + n] for name, p in self.of.items()}, sample)
            for n, sample in enumerate(samples)
        ]
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(each) for each in zip(*outputs, strict=True))
        return torch.cat(outputs)


def split(term: Term, heads: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Tensor]]:
    """The tensors at which a term is split, and the rest of it as a function of these."""
    if term.loss.known:
        first, rest = term.loss.at or ((lambda z: z), term.loss.of)
        return [first(z) for z in term.inputs(heads)], lambda z: term.weight * rest(z)
    if term.between in MARKED:
        return term.inputs(heads), lambda z: term.weight * term.loss.of(z)

    def of(*z: Tensor) -> Tensor:
        return term.value([z[term.heads.index(i)] if i in term.heads else each for i, each in enumerate(heads)])

    return [heads[i] for i in term.heads], of


def dense_hessian(of: Callable[..., Tensor], at: Sequence[Tensor]) -> Tensor:
    """The Hessian of a function of some tensors, in all their entries."""
    sizes = [z.numel() for z in at]

    def flat(v: Tensor) -> Tensor:
        return of(*(part.view(z.shape) for part, z in zip(v.split(sizes), at, strict=True)))

    return torch.autograd.functional.hessian(flat, torch.cat([z.detach().flatten() for z in at]))


@dataclass
class Reference:
    """The fields of a program by their definitions; arrays are ``[samples, *p]`` or sums of these."""

    program: Program
    copies: dict[nn.Module, Copies] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts: dict[nn.Module, list[int]] = {}

        def count(model: nn.Module, *args: Any) -> Any:
            counts.setdefault(model, []).append(len(model.samples(*args)))
            return model(*args)

        self.program.heads(count)
        self.copies = {model: Copies(model, calls) for model, calls in counts.items()}
        self.heads = self.program.heads(lambda model, *args: self.copies[model](*args))
        self.names, self.thetas, self.agree = [], [], {}
        for i, model in enumerate(self.program.models):
            for name, p in self.copies[model].of.items():
                self.names.append(f"{i}.{name}")
                self.thetas.append(p)
                self.agree[f"{i}.{name}"] = self.copies[model].agree
        self.loss = total([term.value(self.heads) for term in self.program.terms])

    def _rows(self, outputs: Tensor) -> dict[str, Tensor]:
        """Derivatives of each entry, ``[entries, samples, *p]``."""
        rows = [
            torch.autograd.grad(entry, self.thetas, retain_graph=True, materialize_grads=True)
            if entry.requires_grad
            else [torch.zeros_like(p) for p in self.thetas]
            for entry in outputs.flatten()
        ]
        return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(self.names)}

    @cached_property
    def gradients(self) -> dict[str, Tensor]:
        """Individual gradients ``[samples, *p]``."""
        return {name: rows[0] for name, rows in self._rows(self.loss).items()}

    @cached_property
    def curvatures(self) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """The Hessian of each term where it is split, and the Jacobians there."""
        found = []
        for term in self.program.terms:
            at, of = split(term, self.heads)
            H = dense_hessian(of, at)
            found.append((H, self._rows(torch.cat([z.flatten() for z in at]))))
        return found

    def ggn(self, name: str) -> Tensor:
        """The block of the Gauss-Newton matrix, ``[P, P]``."""
        blocks = [J[name].sum(1).flatten(1).T @ H @ J[name].sum(1).flatten(1) for H, J in self.curvatures]
        return total(blocks)

    def ggn_batch(self, name: str) -> Tensor:
        """The blocks of samples, ``[samples, P, P]``."""
        blocks = [einsum("cnp,cd,dnq->npq", J[name].flatten(2), H, J[name].flatten(2)) for H, J in self.curvatures]
        return total(blocks)

    @cached_property
    def hessians(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The block of the Hessian ``[P, P]``, and those of samples ``[samples, P, P]`` where these do not mix."""
        gradients = torch.autograd.grad(self.loss, self.thetas, create_graph=True, materialize_grads=True)
        found = {}
        for name, theta, g in zip(self.names, self.thetas, gradients, strict=True):
            rows = [
                torch.autograd.grad(entry, theta, retain_graph=True, materialize_grads=True)[0].flatten(1)
                if entry.requires_grad
                else torch.zeros_like(theta).flatten(1)
                for entry in g.sum(0).flatten()
            ]
            blocks = torch.stack(rows, 1)
            found[name] = blocks.sum(0), blocks
        return found


#: Layers that multiply their input by a parameter itself.
MULTIPLIES = ("linear", "functional", "matmul")


class Recorded:
    """The inputs and outputs of a program's layers, and the values of its ``tanh`` and ``sigmoid``, in one run.

    Each output has a change of zero added, ``[rows, O]``, so that derivatives by it are those at the rows of one call.
    """

    def __init__(self, program: Program):
        self.program = program
        self.inputs: dict[str, list[Tensor]] = {}
        self.changes: dict[str, list[Tensor]] = {}
        handles = []
        for name, p in program.parameters().items():
            owner = program.models[int(name.split(".")[0])].get_submodule(".".join(name.split(".")[1:-1]))
            of_itself = type(owner) is nn.Linear and not parametrize.is_parametrized(owner) and "_orig" not in name
            if p.dim() == 2 and (of_itself or getattr(owner, "kind", "") in MULTIPLIES):
                handles.append(owner.register_forward_hook(lambda _, x, z, name=name: self._called(name, x[0], z)))
        self.heads = program.heads()
        for handle in handles:
            handle.remove()

    def _called(self, name: str, x: Tensor, z: Tensor) -> Tensor:
        self.inputs.setdefault(name, []).append(x.detach())
        self.changes.setdefault(name, []).append(torch.zeros_like(z).requires_grad_())
        return z + self.changes[name][-1]

    def reaching(self, name: str, term: Term) -> list[int]:
        """The calls of a layer to which a term has a path."""
        value = term.value(self.heads)
        found = torch.autograd.grad(value, self.changes[name], retain_graph=True, allow_unused=True)
        return [i for i, g in enumerate(found) if g is not None]

    def input_factor(self, name: str, calls: Iterable[int]) -> Tensor:
        """The mean over all rows of ``x x^T``."""
        x = torch.cat([self.inputs[name][i] for i in calls])
        return x.T @ x / len(x)

    def output_factor(self, name: str) -> Tensor:
        """The sum over terms and rows of ``J^T H J``, of the outputs of the layer at a row."""
        parts = []
        for term in self.program.terms:
            at, of = split(term, self.heads)
            H = dense_hessian(of, at)
            for change in self.changes[name]:
                entries = torch.cat([z.flatten() for z in at])
                rows = [torch.autograd.grad(e, change, retain_graph=True, materialize_grads=True)[0] for e in entries]
                J = torch.stack(rows)  # [entries, rows, O]
                parts.append(einsum("crp,cd,drq->pq", J, H, J))
        return total(parts)

    def empirical_factor(self, name: str, term: Term, of_entries: bool) -> Tensor:
        """The sum over rows of ``s s^T / w``, of the gradients s by the layer's output, of a loss of weight w a row."""
        value, (at,) = term.value(self.heads), term.inputs(self.heads)
        slopes = torch.autograd.grad(value, self.changes[name], retain_graph=True, materialize_grads=True)
        weight = term.weight / (at.numel() if of_entries else len(at))
        return total([g.T @ g for g in slopes]) / weight


def activations(run: Callable[[], Tensor]) -> tuple[Tensor, list[tuple[str, Tensor, Tensor]]]:
    """What a function returns, and the kind, inputs and outputs of its ``tanh`` and ``sigmoid``."""
    found = []

    class Listens(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = f(*args, **(kwargs or {}))
            kind = getattr(f, "__name__", "")
            if kind in ("tanh", "sigmoid") and result.requires_grad:
                found.append((kind, args[0], result))
            return result

    with Listens():
        return run(), found
