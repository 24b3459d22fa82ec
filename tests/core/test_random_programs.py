"""What holds for every program, on random ones: see `random_programs`.

A field equals its definition, or is refused by name. The Gauss-Newton matrix of a sum of losses is the sum of theirs. A
line of the program may stand inside of a model or outside. A part of the loss that does not reach a parameter changes
no field of the parameter; nor do other quantities, nor earlier backwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from core import random_programs
from core.random_programs import PLOTS, Net, Program, Reference, plainly, total
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

#: What is refused by name: a loss by hand where models have several numbers of samples.
NUMBERS = "several models with different numbers of samples"

#: Plots in which layers are called with rows of the data, and losses that are means over rows, or over all entries: the
#: loss of a row is their sum then.
FACTORED = ("one_net", "two_nets", "halves", "twice", "gan")
MEANS = ("cross_entropy", "nll_loss", "log_softmax by hand", "kl_div", "CrossEntropyLoss", "mse_loss, rows")
MEANS_OF_ENTRIES = ("mse_loss", "bce", "Bernoulli")

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


def reached_by(loss: Loss, parameters: dict[str, nn.Parameter]) -> set[str]:
    """The parameters to which a loss has a path."""
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss(), list(trainable.values()), allow_unused=True)
    return {name for name, gradient in zip(trainable, gradients, strict=True) if gradient is not None}


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


def check_definitions(program: Program, refused: bool = True) -> None:
    """Compare all quantities that are not refused with their definitions."""
    for model in program.models:
        extend(model)
    reference, parameters = Reference(program), program.parameters()
    for kinds in (FIRST, GGN, [KFLR], HESSIAN):
        for kind, found in fields_or_refusals(parameters, program.loss, kinds).items():
            if isinstance(found, CurvoptError):
                assert refused, (str(program), found)
                continue
            names = [name for name in reference.names if kind is not KFLR or parameters[name].dim() == 1]
            expected = {name: [definition(reference, kind, name, parameters[name])] for name in names}
            found = {name: found[name] for name in names if name in found}
            assert_close(found, expected, kind.__name__, program)
            assert kind not in FIRST or all(name in found for name in names if parameters[name].grad is not None)


@blocks(0, 160, 10)
def test_fields_equal_their_definitions(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check_definitions(random_programs.program(seed))


@blocks(1000, 1080, 10)
def test_programs_of_known_and_convex_losses_have_all_quantities(seeds: Iterable[int]) -> None:
    for seed in seeds:
        program = extended(seed, plain=True)
        for kinds in (FIRST, GGN, HESSIAN):
            for found in fields_or_refusals(program.parameters(), program.loss, kinds).values():
                assert not isinstance(found, CurvoptError) or NUMBERS in str(found), (seed, str(program), found)


@blocks(2000, 2080, 10)
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
            if isinstance(found, CurvoptError) and (NUMBERS in str(found) or "of different kinds" in str(found)):
                continue
            assert not isinstance(found, CurvoptError), (seed, str(program), str(found))
            names = [name for name in found if kind is not KFLR or parameters[name].dim() == 1]
            zeros = {name: [torch.zeros_like(t) for t in found[name]] for name in names}
            summed = {
                name: [total(parts) for parts in zip(*(each.get(name, zeros[name]) for each in computed), strict=True)]
                for name in names
            }
            assert_close({name: found[name] for name in names}, summed, kind.__name__, seed, program)


@blocks(2200, 2260, 10)
def test_kronecker_factors_equal_their_definitions(seeds: Iterable[int]) -> None:
    """Of layers that multiply their input by a parameter: sums and means over the rows of all calls."""
    compared = 0
    for seed in seeds:
        program = extended(seed, plot=FACTORED[seed % len(FACTORED)], plain=True)
        (term,), parameters = (program.terms[:1] if seed % 2 else program.terms[-1:]), program.parameters()
        for kind, terms in ((KFLR, program.terms), (KFACEmpirical, [term])):
            found = fields_or_refusals(parameters, partial(program.loss, terms), [kind])[kind]
            recorded = random_programs.Recorded(replace(program, terms=terms))
            for name in recorded.inputs if not isinstance(found, CurvoptError) else ():
                reaching = [recorded.reaching(name, each) for each in terms]
                if name not in found or len(found[name]) != 2:
                    continue
                B, A = found[name]
                if kind is KFLR:
                    expected = recorded.output_factor(name)
                elif term.name not in (*MEANS, *MEANS_OF_ENTRIES):
                    continue
                else:
                    expected = recorded.empirical_factor(name, term, term.name in MEANS_OF_ENTRIES)
                assert_close({name: [B]}, {name: [expected]}, kind.__name__, "B", seed, program)
                if all(calls == reaching[0] for calls in reaching):
                    expected = recorded.input_factor(name, reaching[0])
                    assert_close({name: [A]}, {name: [expected]}, kind.__name__, "A", seed, program)
                compared += 1
    assert compared > len(seeds)


@blocks(2300, 2360, 10)
def test_pchmp_equals_its_definition(seeds: Iterable[int]) -> None:
    """The Gauss-Newton matrix, and the positive part of what each ``tanh`` and ``sigmoid`` adds."""
    compared = 0
    for seed in seeds:
        program = random_programs.smooth(seed)
        for model in program.models:
            extend(model)
        reference, parameters = Reference(program), program.parameters()
        loss, found = random_programs.activations(program.loss)
        expected = {name: reference.ggn(name) for name in reference.names}
        for kind, a, b in found:
            (slope,) = torch.autograd.grad(loss, b, retain_graph=True)
            second = -2 * b * (1 - b * b) if kind == "tanh" else b * (1 - b) * (1 - 2 * b)
            weights = (slope * second).flatten().clamp(min=0)
            rows = [
                torch.autograd.grad(e, list(parameters.values()), retain_graph=True, materialize_grads=True)
                for e in a.flatten()
            ]
            for i, name in enumerate(parameters):
                J = torch.stack([row[i].flatten() for row in rows])
                expected[name] = expected[name] + torch.einsum("ap,a,aq->pq", J, weights, J)
        field = fields_or_refusals(parameters, program.loss, [PCHMP])[PCHMP]
        if isinstance(field, CurvoptError):
            assert "used once and enter linearly" in str(field), (seed, str(program), field)
            continue
        assert_close(field, {name: [value.detach()] for name, value in expected.items()}, seed, program)
        compared += 1
    assert compared > len(seeds) / 2


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
    """The models of a program, and some of its lines; it returns what the lines outside need."""

    def __init__(self, program: Program, where: str):
        super().__init__()
        self.models, self.where = nn.ModuleList(program.models), where
        vars(self)["program"] = program

    def forward(self, *data: Tensor) -> list[Tensor]:
        program: Program = vars(self)["program"]
        heads = program.heads(plainly, data)
        first, *others = program.terms
        if self.where in ("loss", "losses"):
            values = [term.value(heads) for term in program.terms]
            return [total(values)] if self.where == "loss" else values
        inside = {
            "heads": lambda: [],
            "first loss": lambda: [first.value(heads)],
            "input of the first loss": lambda: first.inputs(heads),
            "rows of the first loss": lambda: [first.loss.halves[0](*first.inputs(heads))],
        }[self.where]()
        return [*inside, *(heads if others or not inside else [])]

    def loss(self) -> Tensor:
        """The scalar of the program."""
        program: Program = vars(self)["program"]
        outputs, (first, *others) = self(*program.data), program.terms
        if self.where in ("loss", "losses"):
            return total(outputs)
        if self.where == "heads":
            return total([term.value(outputs) for term in program.terms])
        of = {"rows of the first loss": lambda rows: first.weight * first.loss.halves[1](rows)}.get(
            self.where, lambda z: first.weight * first.loss.of(z)
        )
        value = outputs[0] if self.where == "first loss" else of(outputs[0])
        return total([value, *(term.value(outputs[1:]) for term in others)])


def check_places(program: Callable[[], Program], places: Sequence[str]) -> None:
    """Compare fields of a program whose lines stand outside, and in some places."""
    kinds: list[type[Extension]] = [DiagGGNExact, GGNMP, DiagHessian, HMP, BatchGrad]
    outside = program()
    for model in outside.models:
        extend(model)
    expected = fields_or_refusals(outside.parameters(), outside.loss, kinds)
    for place in places:
        inner = extend(Inside(program(), place))
        parameters = vars(inner)["program"].parameters()
        for kind, found in fields_or_refusals(parameters, inner.loss, kinds).items():
            there = expected[kind]
            if isinstance(found, CurvoptError) or isinstance(there, CurvoptError):
                continue
            if kind is BatchGrad:  # a sample of another model may be two rows
                found, there = ({name: [t[0].sum(0)] for name, t in each.items()} for each in (found, there))
            assert_close(found, there, kind.__name__, place, outside)


@blocks(3000, 3080, 10)
def test_a_line_may_stand_inside_of_a_model(seeds: Iterable[int]) -> None:
    for seed in seeds:
        first = random_programs.program(seed).terms[0]
        places = ["heads", "loss", "losses", "first loss"]
        if first.loss.halves and first.between in ("identity", "scale", "sigmoid"):
            places.append("rows of the first loss")
        if len(first.heads) == 1 and (first.loss.known or random_programs.BETWEEN[first.between][0]):
            places.append("input of the first loss")
        check_places(partial(random_programs.program, seed), random.Random(seed).sample(places, 2))


@pytest.mark.parametrize("name", random_programs.losses(4, 3))
def test_each_loss_may_stand_inside_of_a_model(name: str) -> None:
    places = ["loss", "rows of the first loss"] if random_programs.losses(4, 3)[name].halves else ["loss"]
    check_places(partial(random_programs.one_loss, name), places)
    check_places(partial(random_programs.one_loss, name, "lora", "mse_loss"), ["loss", "first loss"])


@pytest.mark.parametrize("kind", random_programs.LAYERS)
def test_linear_losses_of_each_layer(kind: str) -> None:
    for name in ("l1_loss", "hinge", "score", "weighted"):
        for beside in (None, "cross_entropy", "squares"):
            check_definitions(random_programs.one_loss(name, kind, beside), refused=False)


@pytest.mark.parametrize("between", random_programs.BETWEEN)
def test_losses_behind_each_function(between: str) -> None:
    for name in ("mse_loss", "cross_entropy", "squares", "log-cosh"):
        made = partial(random_programs.one_loss, name, between=between)
        check_definitions(made(), refused=not made().terms[0].is_definite)
        check_definitions(made(beside="score"), refused=not made().terms[0].is_definite)


def apart(rng: random.Random, program: Program) -> tuple[str, Loss]:
    """A part of a loss that does not reach the program's parameters through what it computes."""
    other, rows = extend(Net("mlp", [(rng.choice(["linear", "masked"]), 3)]).double()), rng.choice([4, 4, 4, 5])
    x, t = torch.randn(2, rows, 3).double().unbind()

    def without_gradients() -> Tensor:
        with torch.no_grad():
            z = other(x)
        return z.square().mean() + total([p.square().sum() for p in other.parameters()])

    found: dict[str, Loss] = {
        "a penalty on its parameters": lambda: total([p.square().sum() for p in program.parameters().values()]),
        "a norm of some parameter": lambda: next(iter(program.parameters().values())).norm(),
        "a penalty on another model": lambda: total([p.abs().sum() for p in other.parameters()]),
        "another model that was called without gradients": without_gradients,
        "a loss of another model": lambda: F.mse_loss(other(x), t),
        "a loss by hand of another model": lambda: (other(x) - t).cosh().mean(),
        "a linear loss of another model": lambda: other(x).mean(),
        "another model, called and penalised": lambda: (
            F.mse_loss(other(x), t) + total([p.square().sum() for p in other.parameters()])
        ),
    }
    return rng.choice(list(found.items()))


@blocks(4000, 4060, 10)
def test_a_part_that_does_not_reach_a_parameter_changes_no_field(seeds: Iterable[int]) -> None:
    for seed in seeds:
        program, rng = extended(seed), random.Random(seed)
        parameters = program.parameters()
        torch.manual_seed(seed)
        name, part = apart(rng, program)
        kinds = [*FIRST, *GGN, DiagHessian, HMP, *(SAMPLED if "penalty on" in name else [])]
        expected = fields_or_refusals(parameters, program.loss, kinds)
        reached = reached_by(program.loss, parameters)
        both = lambda program=program, part=part: program.loss() + 0.3 * part()  # noqa: E731
        found = fields_or_refusals(parameters, both, kinds)
        for kind in kinds:
            there, here = expected[kind], found[kind]
            if isinstance(there, CurvoptError):
                continue
            if isinstance(here, CurvoptError) and NUMBERS in str(here):
                continue
            assert not isinstance(here, CurvoptError), (name, seed, str(program), str(here))
            here = {name: value for name, value in here.items() if name in reached}
            assert_close(here, there, kind.__name__, name, seed, program)


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
