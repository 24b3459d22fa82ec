"""What tests of fields share: extended problems, and comparisons with the dense references."""

from __future__ import annotations

import pytest
from cases import CASES, Case, Problem
from reference import Reference
from torch.testing import assert_close

from curvopt import extend
from curvopt.extensions import Extension

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
BY_NAME = {case.name: case for case in CASES}


def extended(case: Case) -> Problem:
    """The problem of a case with an extended model and loss."""
    problem = case.problem()
    extend(problem.model)
    extend(problem.lossfunc)
    return problem


def check(problem: Problem, ref: Reference, extension: type[Extension]) -> None:
    """Compare one field of all parameters with the reference."""
    for name, p in problem.model.named_parameters():
        if not p.requires_grad:
            assert not hasattr(p, extension.field), f"{name} requires no gradient"
            continue
        actual, expected = getattr(p, extension.field), getattr(ref, extension.field)(name)
        compare(actual, expected, f"{name}.{extension.field}")


def compare(actual: object, expected: object, what: str) -> None:
    """Both are tensors, or lists of factors; a vector among the factors is a diagonal matrix, or all there is of it."""
    assert_close(actual, expected, rtol=1e-8, atol=1e-11, msg=lambda text: f"{what}: {text}")
