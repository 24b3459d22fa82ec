"""What cannot be answered rightly is refused, with where, what and the remedy, and without a trace.

Tests of `core/backward/backward_pass.py`, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from cases import Problem, mlp
from checks import FIRST_ORDER
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvopt import backpack, extend
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.extensions import (
    KFAC,
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    Extension,
    SqrtGGNExact,
    SqrtGGNMC,
)
from curvopt.optim import KFACSGD

EXACT: list[type[Extension]] = [DiagGGNExact, KFLR]
SAMPLED: list[type[Extension]] = [DiagGGNMC, KFAC]
EVERY = [*FIRST_ORDER, *EXACT, *SAMPLED]


def problem(model: nn.Module | None = None) -> Problem:
    """A classifier, extended, on four samples."""
    model = extend((mlp(4, 5, 3) if model is None else model).double())
    return Problem(model, torch.randn(4, 4).double(), torch.randint(3, (4,)), nn.CrossEntropyLoss())


@contextmanager
def refused(
    model: nn.Module, *parts: str, error: type[Exception] = CurvoptError, midway: bool = False
) -> Iterator[None]:
    """What happens inside raises with all ``parts`` in the message; fields and ``.grad`` stay as they were before.

    They are first given contents that a half-finished backward would replace. What only shows ``midway``, after later
    layers had their gradients, may cost them their old fields but gives them no new ones.
    """
    parameters = list(model.parameters())
    for p in parameters[1:]:
        p.grad = torch.randn_like(p)
        for extension in EVERY:
            setattr(p, extension.field, torch.randn(1))
    before = [dict(vars(p)) for p in parameters]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    with pytest.raises(error) as caught:
        yield
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    for p, fields, gradient in zip(parameters, before, gradients, strict=True):
        left = vars(p)
        assert left.items() <= fields.items() if midway else left == fields
        if not midway:
            assert (p.grad is None) == (gradient is None)
            assert gradient is None or torch.equal(p.grad, gradient)


def works(problem: Problem) -> None:
    """The problem can be differentiated with fields after all."""
    with backpack(BatchGrad(), DiagGGNMC()):
        problem.loss().backward()
    for p in problem.trainable().values():
        assert p.grad_batch.shape == (len(problem.x), *p.shape) and p.diag_ggn_mc.shape == p.shape


# --------------------------------------------------------------------------------------------------- arguments


def test_a_class_is_no_extension():
    for extension in EVERY:
        name = extension.__name__
        with pytest.raises(TypeError, match=rf"class {name}; .* {name}\(\)"):
            backpack(extension)


@pytest.mark.parametrize("thing", [None, "KFAC", 1, nn.Linear(1, 1), len, object], ids=str)
def test_other_things_are_no_extensions(thing: object):
    with pytest.raises(TypeError, match=re.escape(repr(thing))):
        backpack(BatchGrad(), thing)


def test_two_extensions_for_one_field_are_refused():
    with pytest.raises(ValueError, match="diag_ggn_mc"):
        backpack(DiagGGNMC(mc_samples=1), DiagGGNMC(mc_samples=2))


@pytest.mark.parametrize("extension", SAMPLED, ids=lambda extension: extension.__name__)
@pytest.mark.parametrize("samples", [0, -1, 1.5, None])
def test_number_of_samples_is_a_positive_integer(extension: type[Extension], samples: object):
    with pytest.raises((ValueError, TypeError), match=f"mc_samples.*{samples}"):
        extension(mc_samples=samples)


SUBSAMPLED = pytest.mark.parametrize("extension", [BatchGrad, SqrtGGNExact, SqrtGGNMC], ids=lambda e: e.__name__)


@SUBSAMPLED
@pytest.mark.parametrize("subsampling", [[True, False, True, True], torch.ones(4) > 0, [0.5], "first"], ids=str)
def test_subsampling_takes_indices_and_no_mask(extension: type[Extension], subsampling: object):
    with pytest.raises(TypeError, match=r"subsampling: expected indices .*" + re.escape(repr(subsampling))):
        extension(subsampling=subsampling)


@SUBSAMPLED
@pytest.mark.parametrize("sample", [4, -5])
def test_a_sample_that_the_batch_does_not_have(extension: type[Extension], sample: int):
    it = problem()
    parts = [extension.field, f"sample {sample}", "has 4", "from -4 to 3"]
    with refused(it.model, *parts), backpack(BatchL2Grad(), extension(subsampling=[0, sample])):
        it.loss().backward()
    with backpack(extension(subsampling=torch.tensor([3, -4]))):  # a tensor of indices is a list of them
        it.loss().backward()
    assert getattr(it.model[0].weight, extension.field).shape[-3:] == (2, *it.model[0].weight.shape)


@pytest.mark.parametrize("thing", [None, torch.zeros(1), lambda x: x, nn.Linear])
def test_only_modules_are_extended(thing: object):
    with pytest.raises(TypeError, match=r"nn\.Module"):
        extend(thing)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_programs_of_torch_jit_are_not_extended():
    model = nn.Sequential(nn.Linear(4, 5), torch.jit.trace(nn.Linear(5, 3), torch.randn(2, 5)))
    with pytest.raises(TypeError, match="1 .*torch.jit.*freeze"):
        extend(model)
    assert not model[0]._forward_hooks


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("made", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(2, 5))])
def test_frozen_programs_of_torch_jit_are_parts_of_models(made: Callable):
    """Encoders in front, and networks behind, through which gradients go."""
    frozen = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).requires_grad_(False)
    x, y = torch.randn(4, 5), torch.randint(5, (4,))
    head, fields = nn.Linear(5, 5), []
    for part in (frozen, made(frozen)):
        model = extend(nn.Sequential(part, copy.deepcopy(head), part))
        for _ in range(3):  # programs are compiled anew at the second call
            model.zero_grad()
            with backpack(BatchGrad(), KFLR()):
                F.cross_entropy(model(x), y).backward()
        fields.append([model[1].weight.grad_batch, *model[1].weight.kflr])
    torch.testing.assert_close(*fields)


def test_parameters_without_numbers():
    model, x, y = extend(nn.Linear(4, 3)).to("meta"), torch.randn(2, 4, device="meta"), torch.zeros(2, device="meta")
    with pytest.raises(CurvoptError, match="kfac.*weight.*meta"), backpack(KFAC()):
        F.cross_entropy(model(x), y.long()).backward()


# ---------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """A batch norm inside of a submodule, to be named by its path."""

    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        self.into = nn.Linear(4, 5)
        self.body = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(5) if norm is None else norm)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.into(x)))


@pytest.mark.parametrize("extension", [*FIRST_ORDER, *EXACT], ids=lambda extension: extension.__name__)
@pytest.mark.parametrize("affine", [True, False])
def test_train_mode_batch_norm_mixes_samples(extension: type[Extension], affine: bool):
    it = problem(Block(nn.BatchNorm1d(5, affine=affine)))
    loss = it.loss()
    path = ["body.1"] if affine else []
    with refused(it.model, *path, "BatchNorm", extension.field, "model.eval()"), backpack(extension()):
        loss.backward()
    it.model.eval()
    works(it)


def test_a_model_that_is_not_extended():
    for extension in EVERY:
        it = problem()
        it.model = mlp(4, 5, 3).double()
        loss = it.loss()
        with refused(it.model, extension.field, "extend("), backpack(extension()):
            loss.backward()


def test_a_backward_inside_of_a_backward():
    for extension in EVERY:
        it = problem()
        hidden = it.model[0](it.x)

        def begins_another(gradient: Tensor, it: Problem = it) -> None:
            with torch.enable_grad():
                it.model[2](torch.ones_like(gradient)).sum().backward()

        hidden.register_hook(begins_another)
        loss = it.lossfunc(it.model[1:](hidden), it.y)
        with refused(it.model, extension.field, "use_reentrant=False", midway=True), backpack(extension()):
            loss.backward()


class Kernel(torch.autograd.Function):
    """A tanh of which the backward does what fused kernels do."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, does: str) -> Tensor:
        y = torch.tanh(x + bias)
        ctx.save_for_backward(x, y)
        ctx.does, ctx.bias, ctx.factor = does, bias, 1.0
        if does == "prepares":
            ctx.slope = 1 - y**2
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        if ctx.does == "scales":
            ctx.factor = ctx.factor * grad.flatten()[0]
        found = ctx.factor * grad * (1 - y**2)
        if ctx.does == "overwrites":
            y.detach().numpy()[...] = found.detach().numpy()
            found = y
        elif ctx.does == "frees":
            del ctx.factor
        elif ctx.does == "draws":
            found = found * torch.rand_like(found)
        elif ctx.does == "adds":
            ctx.bias.grad = found.sum(0) if ctx.bias.grad is None else ctx.bias.grad.add_(found.sum(0))
        elif ctx.does == "detaches":
            found = found.detach().clone()
        elif ctx.does == "prepares":
            found = grad * ctx.slope
        return found, None if ctx.does == "adds" else found.sum(0), None


class Fused(nn.Module):
    def __init__(self, does: str):
        super().__init__()
        self.does, self.first, self.last = does, nn.Linear(4, 5, bias=False), nn.Linear(5, 3)
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Kernel.apply(self.first(x), self.bias, self.does))


@pytest.mark.parametrize("does", ["overwrites", "frees", "scales", "adds"])
def test_functions_whose_backward_cannot_be_repeated(does: str, monkeypatch: pytest.MonkeyPatch):
    """Where the loss comes after it or is it; an optimizer does not go on with gradients that are wrong."""
    monkeypatch.setattr("curvopt.core.vjp._repeatable", set())
    for extension in (BatchGrad, KFLR):
        it = problem(Fused(does))
        bias = torch.zeros(3).double().requires_grad_()
        for loss in (it.loss(), Kernel.apply(it.model(it.x), bias, does).sum()):
            with refused(it.model, extension.field, "KernelBackward", "plain operations"), backpack(extension()):
                loss.backward()
    it = problem(Fused(does))
    optimizer = KFACSGD(it.model)
    for _ in range(2):
        with pytest.raises(CurvoptError, match="KernelBackward"):
            it.loss().backward()
    assert set(optimizer.coverage().values()) == {"none"}


def test_functions_that_draw_are_repeated_with_the_same_numbers():
    it = problem(Fused("draws"))
    with backpack(KFAC()):
        it.loss().backward()


@pytest.mark.parametrize("does", ["detaches", "prepares"])
def test_functions_that_leave_autograd_have_no_second_derivative(does: str):
    """Nor have those whose forward computes their slopes; where the loss comes after them or is one."""
    it = problem(Fused(does))
    with backpack(BatchGrad(), KFLR()):
        it.loss().backward()
    loss = it.loss()
    with refused(it.model, "diag_h", "KernelBackward", "leaves autograd", "GGN"), backpack(DiagHessian()):
        loss.backward()
    it, bias = problem(), torch.zeros(3).double().requires_grad_()
    for extension in (DiagHessian, KFLR, KFAC):
        loss = it.loss() + Kernel.apply(it.model(it.x), bias, does).sum()
        with refused(it.model, extension.field, "no second derivative", "KernelBackward"), backpack(extension()):
            loss.backward()
    with backpack(BatchGrad()):
        (it.loss() + Kernel.apply(it.model(it.x), bias, does).sum()).backward()


def test_several_vectors_at_once():
    it = problem()
    vectors = torch.randn(3, 4, 3).double()

    def pull() -> tuple[Tensor, ...]:
        return torch.autograd.grad(it.model(it.x), list(it.model.parameters()), vectors, is_grads_batched=True)

    expected = pull()
    with refused(it.model, "grad_batch", "is_grads_batched"), backpack(BatchGrad()):
        pull()
    with backpack(BatchGrad()), backpack():
        torch.testing.assert_close(pull(), expected)
    other = nn.Linear(4, 3).double()  # whose gradients are not asked about
    with backpack(BatchGrad()):
        torch.autograd.grad(other(it.x), other.weight, vectors, is_grads_batched=True)


def test_a_reentrant_checkpoint_of_the_whole_model():
    it = problem()
    loss = it.lossfunc(checkpoint(it.model, it.x.requires_grad_(), use_reentrant=True), it.y)
    with pytest.raises(CurvoptError, match="use_reentrant=False"), backpack(KFAC()):
        loss.backward()
    optimizer = KFACSGD(it.model.parameters())
    optimizer.attach(it.model, it.lossfunc)
    it.lossfunc(checkpoint(it.model, it.x, use_reentrant=True), it.y).backward()
    with pytest.warns(CurvoptWarning, match="takes plain gradients.*use_reentrant=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "extension", "is_slow"),
    [("softmax", DiagGGNExact(), True), ("softmax", DiagGGNMC(), False), ("plain", DiagGGNExact(), False)],
    ids=["exact", "sampled", "plain"],
)
def test_weights_that_are_computed_are_said_to_be_slow(
    kind: str, extension: Extension, is_slow: bool, recwarn: pytest.WarningsRecorder
) -> None:
    class Computed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.softmax(1) if kind == "softmax" else self.weight)

    given = problem(nn.Sequential(Computed(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    for _ in range(2):
        with backpack(extension):
            given.loss().backward()
    said = [str(warning.message) for warning in recwarn if "mix entries" in str(warning.message)]
    assert len(said) == is_slow and all(text.startswith("0 (Computed)") and "diag_ggn_exact" in text for text in said)
