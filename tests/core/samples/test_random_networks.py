"""Random networks with one to three losses, on random rows, halves and heads: individual gradients against loops."""

from __future__ import annotations

import os
import warnings

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad, DiagGGNExact, Variance

#: 300 in a long run
EXAMPLES = int(os.environ.get("CURVOPT_FUZZ_EXAMPLES", "40"))
N = 6


class Tokens(nn.Module):
    """Attention of a few tokens, or a recurrent net, and a mean."""

    def __init__(self, kind: str):
        super().__init__()
        self.embed, self.kind = nn.Linear(4, 8), kind
        self.net = nn.GRU(8, 4) if kind == "time first" else nn.GRU(8, 4, batch_first=True)
        self.query, self.positions, self.out = nn.Linear(8, 8), nn.Parameter(torch.randn(3, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(torch.stack([x, x.sin(), x.cos()], 1)) + self.positions
        if self.kind == "attention":
            h = (self.query(h) @ h.mT).softmax(-1) @ h
            return self.out(h.flatten(0, 1)).view(len(x), 3, 4).mean(1)
        return self.net(h.transpose(0, 1))[0].mean(0) if self.kind == "time first" else self.net(h)[0][:, -1]


class Gate(nn.Module):
    """Experts, each for the samples that come to it, and a scale."""

    def __init__(self, route: list[int]):
        super().__init__()
        self.experts, self.route = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.tensor(route)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        out, route = torch.zeros_like(x), self.route[rows]
        for k, expert in enumerate(self.experts):
            out = out.index_add(0, (route == k).nonzero()[:, 0], expert(x[route == k]))
        return x + out * self.scale


BODIES = ("mlp", "attention", "time first", "batch first", "experts", "tied", "in place")


class Net(nn.Module):
    """A body, and one to three heads on it; some see a few rows only."""

    def __init__(self, body: str, heads: int, route: list[int]):
        super().__init__()
        self.kind, self.first = body, nn.Linear(4, 4)
        self.body = (
            Gate(route) if body == "experts" else Tokens(body) if "first" in body or body == "attention" else None
        )
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(heads))

    def trunk(self, x: Tensor, rows: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.kind == "experts":
            h = self.body(h, rows)
        elif self.body is not None:
            h = self.body(h)
        elif self.kind == "tied":
            h = torch.tanh(h @ self.first.weight.T) * self.first.bias
        elif self.kind == "in place":
            h = h * 1
            h[:, 1:].mul_(h[:, :1].clone())
        return h

    def forward(self, x: Tensor, rows: Tensor) -> list[Tensor]:
        h = self.trunk(x, rows)
        return [head(h) for head in self.heads]


# of some rows, with their targets: a sum, so that the parts of samples are its terms
LOSSES = {
    "classes": lambda z, y: F.cross_entropy(z, y.abs().argmax(1), reduction="sum"),
    "values": lambda z, y: F.mse_loss(z, y, reduction="sum"),
    "bits": lambda z, y: F.binary_cross_entropy_with_logits(z, (y > 0).double(), reduction="sum"),
    "huber": lambda z, y: F.huber_loss(z, y, reduction="sum"),
    "by hand": lambda z, y: (z - y).abs().pow(3).sum(),
    "in a loop": lambda z, y: sum((F.mse_loss(a, b) for a, b in zip(z, y, strict=True)), torch.zeros(()).double()),
}
KNOWN = {"classes", "values", "bits"}
SELECTIONS = ("all", "rows", "half", "other half", "mask", "permuted", "split")

terms = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(sorted(LOSSES)),
        st.sampled_from(SELECTIONS),
        st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True),
        st.sampled_from([1.0, 0.3]),
    ),
    min_size=1,
    max_size=3,
)


def select(z: Tensor, how: str, rows: list[int]) -> Tensor:
    if how == "rows":
        return z[rows]
    if how == "half":
        return z[: N // 2]
    if how == "other half":
        return z[N // 2 :]
    if how == "mask":
        return z[torch.zeros(N).bool().index_fill(0, torch.tensor(rows), True)]
    if how == "permuted":
        return z[[*rows, *(n for n in range(N) if n not in rows)]]
    return z.split([2, 3, 1])[1] if how == "split" else z


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 40, suppress_health_check=list(HealthCheck))
@given(
    body=st.sampled_from(BODIES),
    route=st.lists(st.integers(0, 1), min_size=N, max_size=N),
    terms=terms,
    parts=st.booleans(),
    seed=st.integers(0, 9),
)
def test_losses_on_rows_halves_and_heads(body: str, route: list[int], terms: list[tuple], parts: bool, seed: int):
    parts = parts and body != "in place"  # through a part that is changed in place no row is followed
    torch.manual_seed(seed)
    net = Net(body, 1 + max(head for head, *_ in terms), route).double()
    x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    numbers = torch.arange(N)

    def total() -> Tensor:
        if parts:  # the heads see some rows only, and no call is that of the whole network
            h = net.trunk(x, numbers)
            zs = [net.heads[i](select(h, how, rows)) for i, _, how, rows, _ in terms]
        else:
            outputs = net(x, numbers)
            zs = [select(outputs[i], how, rows) for i, _, how, rows, _ in terms]
        terms_ = [
            w * LOSSES[loss](z, select(y, how, rows)) for z, (_, loss, how, rows, w) in zip(zs, terms, strict=True)
        ]
        return sum(terms_[1:], start=terms_[0])

    params = list(net.parameters())
    expected = [[torch.zeros_like(p) for p in params] for _ in range(N)]
    for n in range(N):
        zs = net(x[n : n + 1], numbers[n : n + 1])
        part = sum(z.sum() * 0 for z in zs)
        for i, loss, how, rows, w in terms:
            if n in select(numbers, how, rows).tolist():
                part = part + w * LOSSES[loss](zs[i], y[n : n + 1])
        found = torch.autograd.grad(part, params, allow_unused=True)
        expected[n] = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
    extend(net)
    second = [DiagGGNExact()] if all(loss in KNOWN for _, loss, *_ in terms) else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are computed sample by sample
        with backpack(BatchGrad(), Variance(), *second):
            total().backward()
    for p, *gradients in zip(params, *expected, strict=True):
        if p.grad is None:
            assert not hasattr(p, "grad_batch") and not torch.stack(gradients).any()
            continue
        assert_close(p.grad_batch, torch.stack(gradients))
        assert_close(p.variance, torch.stack(gradients).var(0, correction=0))
        assert_close(p.grad_batch.sum(0), p.grad)
        if second:
            assert bool((p.diag_ggn_exact >= 0).all())
