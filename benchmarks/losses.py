"""Which quantities curvopt has of which loss: the table of `docs/fields.md`, found by running them.

python -m benchmarks.losses           print the table
python -m benchmarks.losses --write   write it into docs/fields.md
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal

from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import BatchGrad, DiagGGNExact, DiagHessian, Extension, KFACEmpirical

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
BEGIN, END = "<!-- begin: benchmarks.losses -->", "<!-- end: benchmarks.losses -->"
N, C = 6, 4
COLUMNS: dict[str, Callable[[], Extension]] = {
    "first order": BatchGrad,
    "GGN": DiagGGNExact,
    "Hessian": DiagHessian,
    "empirical": KFACEmpirical,
}


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


def outcome(loss: Callable[[Net, Tensor], Tensor], extension: Extension) -> str:
    """How the quantity is computed, or why it is refused."""
    torch.manual_seed(1)
    model, x = extend(Net()), torch.randn(N, 5)
    generic: list[bool] = []
    context = backpack(extension, extension_hook=lambda module: generic.append(context._pass.generic is not None))
    try:
        with warnings.catch_warnings(), context:
            warnings.simplefilter("ignore", CurvoptWarning)
            loss(model, x).backward()
    except CurvoptError as error:
        for reason in ("indefinite", "couples samples", "no second derivative", "around"):
            if reason in str(error):
                return f"error: {reason}"
        return "error"
    if isinstance(extension, (BatchGrad, KFACEmpirical)):
        return "yes"
    return "double backward" if any(generic) else "closed form"


def table() -> str:
    """The table, in Markdown."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        rows = [[name, *(outcome(loss, kind()) for kind in COLUMNS.values())] for name, loss in losses()]
    finally:
        torch.set_default_dtype(dtype)
    lines = [["loss", *COLUMNS], ["---"] * (len(COLUMNS) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/fields.md")
    if not parser.parse_args().write:
        print(table())
        return
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
