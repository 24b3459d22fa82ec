"""Programs and packages made for BackPACK, with the real package and with `curvopt.as_backpack`: are the numbers equal?

`test_clients` compares them; ``python -m compat.clients [PROGRAM ...]`` in `tests` prints the table of the docs. Both
need the packages of the extra `bench`, and leave out programs of those that are missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from compat.clients import gallery, packages

from benchmarks.agreement import default_dtype
from curvopt.compat.serving import FINDER, PACKAGE, serve

#: The packages that import BackPACK; they keep what they imported.
CLIENTS = ("laplace", "cockpit", "vivit", "curvlinops")


@dataclass(frozen=True)
class Program:
    """A program and what its numbers may differ by.

    Args:
        run: returns its numbers by name.
        needs: the package that it is about.
        rtol: the relative difference of numbers that count as equal.
        differs: the beginnings of names whose numbers differ, and why.
    """

    run: Callable[[], dict[str, Any]]
    needs: str = PACKAGE
    rtol: float = 1e-6
    differs: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def about(self) -> str:
        """The first line of what the program says of itself."""
        return (self.run.__doc__ or "").split("\n")[0].rstrip(".")

    @property
    def installed(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in (PACKAGE, self.needs))


PCHMP = "BackPACK weighs what a nonlinearity adds to `PCHMP` by the gradient twice"

PROGRAMS = [
    *(Program(run) for run in gallery.PROGRAMS),
    Program(gallery.cg_newton, differs={"PCHMP": PCHMP}),
    Program(gallery.diag_ggn_optimizer, rtol=0.05),  # which is sampled
    *(Program(run, needs) for needs, runs in packages.PROGRAMS.items() for run in runs),
]
BY_NAME = {program.name: program for program in PROGRAMS}


@contextlib.contextmanager
def importing(served: bool) -> Iterator[None]:
    """Inside, ``import backpack`` gives what curvopt serves or the real package; to its clients, too, imported anew."""

    def take_out() -> dict[str, Any]:
        names = [name for name in sys.modules if name.partition(".")[0] in (PACKAGE, *CLIENTS)]
        return {name: sys.modules.pop(name) for name in names}

    before, finders = take_out(), list(sys.meta_path)
    sys.meta_path[:] = [finder for finder in finders if finder is not FINDER]
    try:
        if served:
            serve()
        yield
    finally:
        take_out()
        sys.modules.update(before)
        sys.meta_path[:] = finders


def numbers(program: Program, served: bool) -> dict[str, Any]:
    """What a program returns, in double precision and from fixed random numbers."""
    with importing(served), packages.missing_in_new_releases(), default_dtype(torch.float64), torch.random.fork_rng():
        torch.manual_seed(0)
        return program.run()


def differences(expected: Any, actual: Any, rtol: float, path: str = "") -> list[str]:
    """Where two trees of numbers differ by more than a part of the largest entry."""
    if isinstance(expected, Mapping):
        if expected.keys() != actual.keys():
            return [f"{path}: {sorted(map(str, expected))} and {sorted(map(str, actual))}"]
        pairs: Sequence[tuple[str, Any, Any]] = [(str(key), value, actual[key]) for key, value in expected.items()]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return [f"{path}: {len(expected)} and {len(actual)} of them"]
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(expected, actual, strict=True))]
    else:
        a, b = (torch.as_tensor(value).detach().double() for value in (expected, actual))
        atol = rtol * float(a.abs().max()) if a.numel() else 0.0
        return [] if a.shape == b.shape and torch.allclose(a, b, rtol, atol, equal_nan=True) else [path]
    return [found for key, a, b in pairs for found in differences(a, b, rtol, f"{path}/{key}".lstrip("/"))]


def verdict(program: Program) -> str:
    """Whether a program's numbers are those that it has with the real package."""
    expected = numbers(program, served=False)
    try:
        actual = numbers(program, served=True)
    except ImportError as error:
        return f"refused: {str(error).partition(',')[0]}"
    found = differences(expected, actual, program.rtol)
    known = {reason for beginning, reason in program.differs.items() if any(f.startswith(beginning) for f in found)}
    found = [each for each in found if not any(each.startswith(beginning) for beginning in program.differs)]
    if found:
        return f"different: {', '.join(found)}"
    return f"equal, but {'; '.join(known)}" if known else "equal"
