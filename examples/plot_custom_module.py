"""Layers that you write yourself
==============================

Any ``nn.Module`` with parameters works as it is. Matrix products, convolutions, scales and the like are found in the
graph, wherever they are called; a module that does anything else is differentiated sample by sample. A rule is a few
lines that make that faster, and its test is that it changes nothing.
"""

# %%
# A linear layer of low rank, ``x -> x U V``, as used to adapt large models, and radial basis functions around learned
# centres. Nothing in the library knows either.
import time

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.core.products.base import Dense
from curvopt.extending import Rule, register
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact
from curvopt.testing import check
from curvopt.utils.examples import load_one_batch_mnist


class LowRank(nn.Module):
    """``x @ U @ V`` of rank r."""

    def __init__(self, inputs: int, outputs: int, rank: int):
        super().__init__()
        self.U = nn.Parameter(torch.randn(inputs, rank) / inputs**0.5)
        self.V = nn.Parameter(torch.randn(rank, outputs) / rank**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.U @ self.V


class RadialBasis(nn.Module):
    """``exp(-|x - c|^2 / 2)`` for each centre c."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(x, self.centres).square() / 2)


# %%
# Both work: individual gradients and curvature, checked against plain autograd. The products of the first are known, so
# that its parameters have Kronecker factors.
torch.manual_seed(0)
small = nn.Sequential(LowRank(6, 5, 2), nn.Tanh(), RadialBasis(5, 3))
fields = [BatchGrad(), DiagGGNExact()]
check(small, nn.CrossEntropyLoss(), torch.randn(4, 6), torch.arange(4) % 3, fields, raises=True)

x, y = load_one_batch_mnist(64, flat=True)
model = extend(nn.Sequential(LowRank(784, 32, 8), RadialBasis(32, 100), nn.Linear(100, 10)))
lossfunc = nn.CrossEntropyLoss()
with backpack(KFLR()):
    lossfunc(model(x), y).backward()
for name, p in model.named_parameters():
    print(f"factors of {name}, {list(p.shape)}:", [list(factor.shape) for factor in p.kflr])

# %%
# Now a rule for the second. It is handed vectors ``grads[0]``, ``[V, N, outputs]``, at the layer's output, and returns
# their Jacobian products ``[V, N, outputs, inputs]``.


def seconds(*extensions) -> float:
    best = float("inf")
    for _ in range(4):
        loss = lossfunc(model(x), y)
        start = time.perf_counter()
        with backpack(*extensions):
            loss.backward()
        best = min(best, time.perf_counter() - start)
    return best


quantities = {
    "nothing": (),
    "BatchGrad": (BatchGrad(),),
    "DiagGGNExact": (DiagGGNExact(),),
    "KFLR": (KFLR(),),
}
by_default = [seconds(*extensions) for extensions in quantities.values()]


@register(RadialBasis)
class RadialBasisRule(Rule):
    def jac_t(self, call, grads, names, N):
        away = call.input[:, None] - call.module.centres  # [N, outputs, inputs]
        values = torch.exp(-away.square().sum(2) / 2)
        return {"centres": Dense((grads[0] * values)[..., None] * away)}


# %%
# The same numbers, in less time.
check(small, nn.CrossEntropyLoss(), torch.randn(4, 6), torch.arange(4) % 3, fields, raises=True)
by_rule = [seconds(*extensions) for extensions in quantities.values()]

figure, ax = plt.subplots()
positions = torch.arange(len(quantities))
ax.bar(positions - 0.2, [1000 * s for s in by_default], 0.4, label="without a rule")
ax.bar(positions + 0.2, [1000 * s for s in by_rule], 0.4, label="with the rule")
ax.set_xticks(positions, quantities)
ax.set(ylabel="backward pass in ms", yscale="log")
ax.legend()
plt.show()
