"""Which quantities curvopt has of which loss: the table of `docs/fields.md`, found by running them.

python -m benchmarks.losses           print the table
python -m benchmarks.losses --write   write it into docs/fields.md
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.everyday_losses import N, Net, losses
from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.core.backward.second_order import SecondOrder
from curvopt.extensions import BatchGrad, DiagGGNExact, DiagHessian, Extension, KFACEmpirical

PAGE = Path(__file__).parents[1] / "docs" / "fields.md"
BEGIN, END = "<!-- begin: benchmarks.losses -->", "<!-- end: benchmarks.losses -->"
COLUMNS: dict[str, Callable[[], Extension]] = {
    "first order": BatchGrad,
    "GGN": DiagGGNExact,
    "Hessian": DiagHessian,
    "empirical": KFACEmpirical,
}


def outcome(loss: Callable[[Net, Tensor], Tensor], extension: Extension) -> str:
    """How the quantity is computed, or why it is refused."""
    torch.manual_seed(1)
    model, x = extend(Net()), torch.randn(N, 5)
    generic, compute = [], SecondOrder.compute

    def note(second: SecondOrder) -> None:
        compute(second)
        generic.append(second.remainder is not None)

    try:
        with mock.patch.object(SecondOrder, "compute", note), warnings.catch_warnings(), backpack(extension):
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
