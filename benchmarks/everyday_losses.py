"""Everyday losses of a small network, for the table of `benchmarks.losses` and for `benchmarks.compare_versions`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

N, C = 6, 4


class Net(nn.Module):
    """A network that has a loss of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, C)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        z = self.last(torch.tanh(self.first(x)))
        return z if labels is None else F.cross_entropy(z, labels)


def losses() -> Iterator[tuple[str, Callable[[Net, Tensor], Tensor]]]:
    """Names of losses, and functions of a network and its input."""
    y, t, b = torch.randint(C, (N,)), torch.randn(N, C), torch.randint(2, (N, C)).double()

    def of_output(loss: Callable[[Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
        return lambda model, x: loss(model(x))

    def penalty(model: Net, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    rows = torch.arange(N)
    yield "`nn.CrossEntropyLoss`, `F.cross_entropy`", of_output(lambda z: F.cross_entropy(z, y))
    yield "`F.nll_loss(F.log_softmax(z, 1), y)`", of_output(lambda z: F.nll_loss(F.log_softmax(z, 1), y))
    yield "`nn.MSELoss`, `F.mse_loss`", of_output(lambda z: F.mse_loss(z, t))
    yield "`F.binary_cross_entropy_with_logits`", of_output(lambda z: F.binary_cross_entropy_with_logits(z, b))
    yield "the model returns its loss", lambda model, x: model(x, y)
    yield "`(z - t).square().mean()`", of_output(lambda z: (z - t).square().mean())
    yield "`(z.logsumexp(1) - z[rows, y]).mean()`", of_output(lambda z: (z.logsumexp(1) - z[rows, y]).mean())
    yield "`-z.softmax(1).log()[rows, y].mean()`", of_output(lambda z: -z.softmax(1).log()[rows, y].mean())
    yield "`-Categorical(logits=z).log_prob(y)`", of_output(lambda z: -Categorical(logits=z).log_prob(y).mean())
    yield "`-Bernoulli(logits=z).log_prob(b)`", of_output(lambda z: -Bernoulli(logits=z).log_prob(b).mean())
    yield "`-Normal(z, 1).log_prob(t)`", of_output(lambda z: -Normal(z, 1.0).log_prob(t).mean())
    yield "`F.binary_cross_entropy(z.sigmoid(), b)`", of_output(lambda z: F.binary_cross_entropy(z.sigmoid(), b))
    yield "`F.huber_loss`", of_output(lambda z: F.huber_loss(z, t))
    yield "`F.smooth_l1_loss`", of_output(lambda z: F.smooth_l1_loss(z, t))
    yield "`F.gaussian_nll_loss`, fixed variance", of_output(lambda z: F.gaussian_nll_loss(z, t, torch.ones(N, C)))
    yield "`F.poisson_nll_loss`", of_output(lambda z: F.poisson_nll_loss(z, b))
    yield "`F.soft_margin_loss`", of_output(lambda z: F.soft_margin_loss(z, 2 * b - 1))
    yield "`-F.logsigmoid(z[:, 0] - z[:, 1])` (DPO)", of_output(lambda z: -F.logsigmoid(z[:, 0] - z[:, 1]).mean())
    yield (
        "cross-entropy minus an entropy bonus",
        of_output(lambda z: F.cross_entropy(z, y) - 0.01 * Categorical(logits=z).entropy().mean()),
    )
    yield "focal loss", of_output(lambda z: _focal(F.cross_entropy(z, y, reduction="none")))
    yield "`F.l1_loss`, hinge losses (piecewise linear)", of_output(lambda z: F.l1_loss(z, t))
    yield "gradient penalty, PINN residual", penalty
    yield "`F.mse_loss(z, t).sqrt()`", of_output(lambda z: F.mse_loss(z, t).sqrt())
    yield "`z.std(0).sum()` and other batch statistics", of_output(lambda z: z.std(0).sum())


def _focal(cross_entropy: Tensor) -> Tensor:
    return ((1 - (-cross_entropy).exp()) ** 2 * cross_entropy).mean()
