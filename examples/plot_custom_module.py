"""A module of one's own
=====================

Any ``nn.Module`` with parameters works as it is: what has no rule is differentiated sample by sample. A rule is a few
lines that make it faster, and its test is that it changes nothing.
"""

# %%
# A linear layer of low rank, ``x -> x U V``, as used to adapt large models. Nothing in the library knows it.
import time

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.core.derivatives import Rule, register
from curvopt.core.jacobians import Outer
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


# %%
# It works: individual gradients and curvature, checked against plain autograd.
torch.manual_seed(0)
small = nn.Sequential(LowRank(6, 5, 2), nn.Tanh(), LowRank(5, 3, 2))
fields = [BatchGrad(), DiagGGNExact()]
check(small, nn.CrossEntropyLoss(), torch.randn(4, 6), torch.arange(4) % 3, fields, raises=True)

# %%
# Now the rule. It is handed vectors ``grads[0]``, ``[V, N, outputs]``, at the layer's output, and returns their
# Jacobian products in factored form: ``Outer`` takes a left side ``[V, N, groups, positions, O]`` and a right side
# ``[N, groups, positions, I]``; ``transposed`` says that the parameter is stored as ``[I, O]``.
x, y = load_one_batch_mnist(64, flat=True)
model = extend(nn.Sequential(LowRank(784, 200, 8), nn.ReLU(), LowRank(200, 10, 8)))
lossfunc = extend(nn.CrossEntropyLoss())


def seconds(*extensions) -> float:
    best = float("inf")
    for _ in range(4):
        loss = lossfunc(model(x), y)
        start = time.perf_counter()
        with backpack(*extensions):
            loss.backward()
        best = min(best, time.perf_counter() - start)
    return best


quantities = {"nothing": (), "BatchGrad": (BatchGrad(),), "DiagGGNExact": (DiagGGNExact(),), "KFLR": (KFLR(),)}
by_default = [seconds(*extensions) for extensions in quantities.values()]


@register(LowRank)
class LowRankRule(Rule):
    def jac_t(self, use, grads, names, N):
        x, U, V = use.input, use.module.U, use.module.V
        at_output, at_middle = (g[:, :, None, None] for g in (grads[0], grads[0] @ V.T))
        return {
            "U": Outer(at_middle, x[:, None, None], U.shape, transposed=True),
            "V": Outer(at_output, (x @ U)[:, None, None], V.shape, transposed=True),
        }


# %%
# The same numbers, in less time; and since the rule shows the structure, Kronecker factors appear.
check(small, nn.CrossEntropyLoss(), torch.randn(4, 6), torch.arange(4) % 3, fields, raises=True)
by_rule = [seconds(*extensions) for extensions in quantities.values()]
print("factors of U:", [list(factor.shape) for factor in model[0].U.kflr])

figure, ax = plt.subplots()
positions = torch.arange(len(quantities))
ax.bar(positions - 0.2, [1000 * s for s in by_default], 0.4, label="without a rule")
ax.bar(positions + 0.2, [1000 * s for s in by_rule], 0.4, label="with the rule")
ax.set_xticks(positions, quantities)
ax.set(ylabel="backward pass in ms", yscale="log")
ax.legend()
plt.show()
