"""What holds for every program, on random ones: see `random_programs`.

A field equals its definition, or is refused by name. The Gauss-Newton matrix of a sum of losses is the sum of theirs. A
line of the program may stand inside of a model or outside. Other quantities change no field, nor do earlier backwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from core import random_programs
from core.random_programs import PLOTS, Program, Reference, plainly, total
from torch import Tensor, nn

from curvopt import CurvoptError, backpack, extend
from curvopt.extensions import (
    GGNMP,
    HMP,
    KFAC,
    KFLR,
    PCHMP,
    BatchDiagGGNExact,
    BatchDiagGGNMC,
    BatchDiagHessian,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    KFACEmpirical,
    SqrtGGNExact,
    SqrtGGNMC,
    SumGradSquared,
    Variance,
)
from curvopt.optim import KFACSGD

pytestmark = pytest.mark.filterwarnings("ignore::curvopt.CurvoptWarning")

FIRST: list[type[Extension]] = [BatchGrad, BatchL2Grad, SumGradSquared, Variance]
GGN: list[type[Extension]] = [DiagGGNExact, BatchDiagGGNExact, SqrtGGNExact, GGNMP]
HESSIAN: list[type[Extension]] = [DiagHessian, BatchDiagHessian, HMP]
SAMPLED: list[type[Extension]] = [DiagGGNMC, BatchDiagGGNMC, SqrtGGNMC, KFAC]
OTHERS: list[type[Extension]] = [KFLR, KFACEmpirical, PCHMP]

Fields = dict[str, list[Tensor]]
Loss = Callable[[], Tensor]

# ---------------------------------------------------------------------------------------------------------- comparisons


def extended(seed: int, plot: str | None = None, plain: bool = False) -> Program:
    """The program of a seed, whose models are extended."""
    made = random_programs.program(seed, plot, plain)
    for model in made.models:
        extend(model)
    return made


def made(kind: type[Extension]) -> Extension:
    """An extension that draws the same numbers at every backward."""
    return kind(generator=torch.Generator().manual_seed(0)) if kind in SAMPLED else kind()  # type: ignore[call-arg]


def matrix(kind: type[Extension], value: Any, p: Tensor) -> list[Tensor]:
    """A field as tensors that are unique: products and roots as the matrices that they are of."""
    P = p.numel()
    if kind in (GGNMP, HMP, PCHMP):
        return [value(torch.eye(P, dtype=p.dtype).view(P, *p.shape)).reshape(P, P)]
    if kind in (SqrtGGNExact, SqrtGGNMC):
        value = value.flatten(0, 1).reshape(-1, P)
        return [value.T @ value]
    return [value] if isinstance(value, Tensor) else list(value)


def fields(parameters: dict[str, nn.Parameter], loss: Loss, kinds: Sequence[type[Extension]]) -> dict[Any, Fields]:
    """The fields of a backward, of those parameters that have gradients."""
    for p in parameters.values():
        p.grad = None
    with backpack(*(extensions := [made(kind) for kind in kinds])):
        loss().backward()
    return {
        kind: {
            name: matrix(kind, getattr(p, extension.field), p)
            for name, p in parameters.items()
            if p.grad is not None and hasattr(p, extension.field)
        }
        for kind, extension in zip(kinds, extensions, strict=True)
    }


def fields_or_refusals(
    parameters: dict[str, nn.Parameter], loss: Loss, kinds: Sequence[type[Extension]]
) -> dict[type[Extension], Fields | CurvoptError]:
    """The fields of each quantity, or why it is refused."""
    try:
        return {**fields(parameters, loss, kinds)}
    except CurvoptError as error:
        if len(kinds) == 1:
            return {kinds[0]: error}
    return {kind: each for kind in kinds for each in fields_or_refusals(parameters, loss, [kind]).values()}


def close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to rounding, in units of their largest entry."""
    return len(found) == len(expected) and all(
        a.shape == b.shape and bool((a - b).abs().max() <= 1e-7 * max(1e-2, float(b.abs().max())))
        for a, b in zip(found, expected, strict=True)
    )


def assert_close(found: Fields, expected: Fields, *what: object) -> None:
    """Equal, where a field that is missing is zero."""
    for name in found | expected:
        zeros = [torch.zeros_like(t) for t in (found | expected)[name]]
        if not close(found.get(name, zeros), expected.get(name, zeros)):
            pytest.fail(f"{name} differs: {', '.join(map(str, what))}", pytrace=False)


def blocks(start: int, stop: int, size: int) -> Any:
    """Seeds, some in each test."""
    return pytest.mark.parametrize("seeds", [range(i, min(i + size, stop)) for i in range(start, stop, size)], ids=str)


# ----------------------------------------------------------------------------------------------------------- properties


def definition(reference: Reference, kind: type[Extension], name: str, p: Tensor) -> Tensor:
    """A field of one parameter."""
    gradients = reference.gradients[name]
    if kind is BatchGrad:
        return gradients
    if kind is BatchL2Grad:
        return gradients.flatten(1).square().sum(1)
    if kind is SumGradSquared:
        return gradients.square().sum(0)
    if kind is Variance:
        return gradients.var(0, correction=0)
    if kind is BatchDiagGGNExact:
        return reference.ggn_batch(name).diagonal(dim1=1, dim2=2).reshape(gradients.shape)
    if kind is BatchDiagHessian:
        return reference.hessians[name][1].diagonal(dim1=1, dim2=2).reshape(gradients.shape)
    block = reference.ggn(name) if kind in (*GGN, KFLR) else reference.hessians[name][0]
    return block.diagonal().reshape(p.shape) if kind in (DiagGGNExact, DiagHessian) else block


@blocks(0, 120, 10)
def test_fields_equal_their_definitions(seeds: Iterable[int]) -> None:
    for seed in seeds:
        program = extended(seed)
        reference, parameters = Reference(program), program.parameters()
        for kinds in (FIRST, GGN, [KFLR], HESSIAN):
            for kind, found in fields_or_refusals(parameters, program.loss, kinds).items():
                if not isinstance(found, CurvoptError):
                    names = [name for name in reference.names if kind is not KFLR or parameters[name].dim() == 1]
                    expected = {name: [definition(reference, kind, name, parameters[name])] for name in names}
                    found = {name: found[name] for name in names if name in found}
                    assert_close(found, expected, kind.__name__, seed, program)
                    assert kind not in FIRST or all(
                        name in found for name, p in parameters.items() if p.grad is not None
                    )


@blocks(2000, 2050, 10)
def test_the_ggn_of_a_sum_is_the_sum(seeds: Iterable[int]) -> None:
    kinds = [*GGN, KFLR]
    for seed in seeds:
        program = extended(seed)
        parameters = program.parameters()
        whole = fields_or_refusals(parameters, program.loss, kinds)
        for kind, found in whole.items():
            alone = [
                fields_or_refusals(parameters, partial(program.loss, [term]), [kind])[kind] for term in program.terms
            ]
            computed = [each for each in alone if not isinstance(each, CurvoptError)]
            if len(computed) < len(alone):
                continue
            if kind is KFLR and isinstance(found, CurvoptError) and "different kinds" in str(found):
                continue
            assert not isinstance(found, CurvoptError), (seed, str(program), str(found))
            names = [name for name in found if kind is not KFLR or parameters[name].dim() == 1]
            zeros = {name: [torch.zeros_like(t) for t in found[name]] for name in names}
            summed = {
                name: [total(parts) for parts in zip(*(each.get(name, zeros[name]) for each in computed), strict=True)]
                for name in names
            }
            assert_close({name: found[name] for name in names}, summed, kind.__name__, seed, program)


@blocks(2500, 2512, 6)
def test_sampled_quantities_have_the_exact_ones_for_a_mean(seeds: Iterable[int]) -> None:
    for seed in seeds:
        program = extended(seed, plot=("one_net", "two_nets", "halves", "twice")[seed % 4], plain=True)
        parameters = program.parameters()
        exact = fields(parameters, program.loss, [DiagGGNExact])[DiagGGNExact]
        draws = []
        for run in range(16):
            source = torch.Generator().manual_seed(run)
            with backpack(DiagGGNMC(20, generator=source)):
                program.loss().backward()
            draws.append({name: parameters[name].diag_ggn_mc for name in exact})
        for name, (expected,) in exact.items():
            sums = torch.stack([draw[name].sum() for draw in draws])
            error, deviation = float(sums.mean() - expected.sum()), float(sums.std() / 4)
            assert abs(error) <= 6 * deviation + 1e-9, (name, seed, str(program), error, deviation)


class Inside(nn.Module):
    """The models of a program, and some of its lines."""

    def __init__(self, program: Program, where: str):
        super().__init__()
        self.models, self.where = nn.ModuleList(program.models), where
        vars(self)["program"] = program

    def forward(self, *data: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Heads, and values of terms."""
        program: Program = vars(self)["program"]
        heads = program.heads(plainly, data)
        if self.where == "heads":
            return heads, []
        if self.where == "input of the first loss":
            return [*heads, *program.terms[0].inputs(heads)], []
        if self.where == "rows of the first loss":
            return [*heads, program.terms[0].loss.halves[0](*program.terms[0].inputs(heads))], []
        terms = program.terms[:1] if self.where == "first loss" else program.terms
        values = [term.value(heads) for term in terms]
        return heads, [total(values)] if self.where == "loss" else values

    def loss(self) -> Tensor:
        """The scalar of the program."""
        program: Program = vars(self)["program"]
        heads, values = self(*program.data)
        if self.where in ("input of the first loss", "rows of the first loss"):
            first, *others = program.terms
            of = first.loss.halves[1] if self.where.startswith("rows") else first.loss.of
            return total([first.weight * of(heads[-1]), *(term.value(heads) for term in others)])
        rest = {"heads": program.terms, "first loss": program.terms[1:]}.get(self.where, [])
        return total([*values, *(term.value(heads) for term in rest)])


@blocks(3000, 3080, 10)
def test_a_line_may_stand_inside_of_a_model(seeds: Iterable[int]) -> None:
    kinds: list[type[Extension]] = [DiagGGNExact, GGNMP, DiagHessian, HMP, BatchGrad]
    for seed in seeds:
        outside, rng = extended(seed), random.Random(seed)
        expected = fields_or_refusals(outside.parameters(), outside.loss, kinds)
        places = ["heads", "loss", "losses", "first loss"]
        first = outside.terms[0]
        if first.loss.halves and first.between in ("identity", "scale", "sigmoid"):
            places.append("rows of the first loss")
        if len(first.heads) == 1 and (first.loss.known or random_programs.BETWEEN[first.between][0]):
            places.append("input of the first loss")
        for place in rng.sample(places, 2):
            inner = Inside(random_programs.program(seed), place)
            extend(inner)
            parameters = vars(inner)["program"].parameters()
            for kind, found in fields_or_refusals(parameters, inner.loss, kinds).items():
                there = expected[kind]
                if isinstance(found, CurvoptError) or isinstance(there, CurvoptError):
                    continue
                if kind is BatchGrad:
                    found, there = ({name: [t[0].sum(0)] for name, t in each.items()} for each in (found, there))
                assert_close(found, there, kind.__name__, place, seed, outside)


@blocks(5000, 5060, 10)
def test_a_field_beside_others_is_the_field_alone(seeds: Iterable[int]) -> None:
    for seed in seeds:
        program, rng = extended(seed), random.Random(seed)
        parameters = program.parameters()
        kinds = rng.sample([*FIRST, *GGN, *HESSIAN, *SAMPLED, *OTHERS], rng.choice([2, 3, 5]))
        if seed % 3 == 0:
            kinds = list(dict.fromkeys([*kinds, DiagHessian, BatchDiagHessian]))
        alone = {kind: fields_or_refusals(parameters, program.loss, [kind])[kind] for kind in kinds}
        refused = [kind for kind, found in alone.items() if isinstance(found, CurvoptError)]
        if refused:
            with pytest.raises(CurvoptError):
                fields(parameters, program.loss, kinds)
        computed = [kind for kind in kinds if kind not in refused]
        for kind, found in fields(parameters, program.loss, computed).items() if computed else ():
            assert_close(found, alone[kind], kind.__name__, [each.__name__ for each in computed], seed, program)


@blocks(6000, 6012, 3)
def test_no_backward_depends_on_earlier_ones(seeds: Iterable[int]) -> None:
    kinds = [BatchGrad, DiagGGNExact, DiagHessian, DiagGGNMC]
    rng = random.Random(seeds[0])
    programs = [extended(seed, plot) for seed, plot in zip(seeds, rng.sample(list(PLOTS), len(seeds)), strict=True)]
    optimizers = []
    for program in programs[::2]:
        optimizer = KFACSGD([p for p in program.parameters().values() if p.requires_grad], lr=0.0, curvature_every=1)
        for model in program.models:
            optimizer.attach(model)
        optimizers.append(optimizer)

    def run(i: int) -> dict[type[Extension], Fields | CurvoptError]:
        return fields_or_refusals(programs[i].parameters(), programs[i].loss, kinds)

    first = [run(i) for i in range(len(programs))]
    for i in rng.choices(range(len(programs)), k=2 * len(programs)):
        if rng.random() < 0.5:
            programs[i].loss().backward()  # of attached optimizers, or of none
        for kind, found in run(i).items():
            there = first[i][kind]
            assert isinstance(found, CurvoptError) == isinstance(there, CurvoptError), (kind, str(programs[i]))
            if not isinstance(found, CurvoptError):
                assert_close(found, there, kind.__name__, programs[i])
