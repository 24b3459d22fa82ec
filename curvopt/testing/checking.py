"""Checking fields against slow, plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvopt.core.backward.backward_pass import read_and_locate
from curvopt.core.backward.context import backpack
from curvopt.core.extend import extend
from curvopt.core.losses.roots import Exact, Gradient, Hessian, MonteCarlo
from curvopt.core.samples.layout import axis_of
from curvopt.errors import CurvoptError
from curvopt.extensions import PCHMP, EigenDiagonal, Extension
from curvopt.testing.comparison import EXPECTED, Comparison, compare, compare_draws, compare_pchmp, plain_loss
from curvopt.testing.reference import Reference
from curvopt.testing.report import CheckResult

#: Numbers that the Jacobian of a checked model may have: samples times outputs times parameters (8 GB in float64).
JACOBIAN_LIMIT = 1 << 30


def check(
    model: nn.Module,
    lossfunc: Callable[[Tensor, Any], Tensor],
    x: Tensor,
    y: Any,
    extensions: Sequence[Extension],
    *,
    raises: bool = False,
    dtype: torch.dtype = torch.float64,
    rtol: float | None = None,
    entries: int = 10,
    batch_axis: int = 0,
) -> CheckResult:
    """Compare fields with slow, plain autograd on your own model, and print a table.

    The fields are computed as in ``with backpack(*extensions): lossfunc(model(x), y).backward()``, and once more from
    their definition by derivatives of single outputs, in which the engine has no part. Both work on copies in
    ``dtype`` with equal random numbers; model and random state stay as they are.

    Sampled fields are checked in two steps that together determine their mean: the field is computed of the exact
    columns in place of samples and compared with the exact field, and the second moment of 256 to 4096 draws is
    compared with the Hessian of the loss, in standard errors (at an output scaled into ``[-2, 2]``, where draws
    of a confident network vary). Diagonals of the Hessian are compared at ``entries`` random entries of each
    parameter; matrix products and roots by their action on three random directions. ``pchmp`` depends on how the
    network is divided into operations, so no plain derivative defines it: with nothing replaced it is compared with
    the Hessian, and with its replacements it must exceed Hessian and GGN along these directions. ``kfac_empirical`` is
    built from the gradients of single predictions, whose weights in the loss are taken from the engine.

    The cost, for N samples with C outputs each and P parameters: N backward passes for fields of individual gradients;
    N C passes and N C P numbers of memory for all else; for Hessian diagonals N · ``entries`` double backward passes
    for each parameter tensor. So take few samples, and the smallest inputs that exercise the layers.

    Args:
        model: the model, extended or not. Its output is a tensor that has its samples along one axis.
        lossfunc: called as ``lossfunc(output, y)``. Leave out
            terms of parameters (regularizers): for the copies they are constants.
        x: the model's input.
        y: the target.
        extensions: those whose fields are checked.
        raises: raise if a field is wrong.
        dtype: the precision to check in. In float32 algorithms differ visibly near the kinks of ReLU and max-pooling.
        rtol: admitted difference in units of the largest entry of a field; by default 1e-6 in float64, else 1e-2.
        entries: number of entries of each parameter at which Hessian diagonals are compared.
        batch_axis: axis of the input that counts the samples, as in ``extend(model, batch_axis=1)``.

    Returns:
        The rows of the table; ``result.ok`` tells whether all agree.

    Raises:
        TypeError: if a single extension takes the place of the list.
        CurvoptError: if no definition of the field is known, samples depend on each other, a second forward pass has
            another output, or the Jacobian has more than `JACOBIAN_LIMIT` numbers; for all that the engine refuses; and
            for wrong fields, if ``raises``.
    """
    if isinstance(extensions, Extension):
        kind = type(extensions).__name__
        raise TypeError(f"check: expected a list of extensions, got a single {kind}; write check(..., [{kind}()]).")
    _check_request(model, x, extensions)
    extensions = [copy.copy(extension) for extension in extensions]
    for extension in extensions:
        vars(extension).pop("field", None)  # definitions go by the names that fields have by default
    rtol = (1e-6 if dtype == torch.float64 else 1e-2) if rtol is None else rtol
    x, y = (t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in (x, y))
    ours, theirs = (copy.deepcopy(model).to(dtype) for _ in range(2))
    ours.zero_grad()
    if isinstance(lossfunc, nn.Module):
        lossfunc = extend(copy.deepcopy(lossfunc).to(dtype))
    # exact columns in place of the draws of Monte-Carlo extensions, Hessian columns in place of those of PCHMP
    twins = [copy.copy(extension) for extension in extensions]
    for twin in twins:
        if isinstance(twin.columns, MonteCarlo):
            twin.columns = Exact()
        if isinstance(twin, PCHMP):
            twin.columns = Hessian()
        if isinstance(twin, EigenDiagonal):
            bases: dict[Tensor, list[Tensor]] = {}
            for p, own in zip(model.parameters(), ours.parameters(), strict=True):
                if p in twin.bases:
                    bases[own] = [basis.to(own) for basis in twin.bases[p]]
            twin.bases = bases

    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            z = extend(ours, batch_axis=batch_axis)(x)
        except RuntimeError as error:
            raise CurvoptError(
                f"check: the model does not run in {dtype} ({error}); make it independent of the precision, or "
                "pass dtype=torch.float32."
            ) from error
        _check_one_tensor(z, "output", "puts its outputs together")
        if not z.requires_grad:
            raise CurvoptError(
                "check: the output depends on no parameter that requires a gradient; call model.requires_grad_(), "
                "outside of torch.no_grad()."
            )
        loss = lossfunc(z, y)
        if loss.numel() != 1:
            raise CurvoptError(
                f"check: the loss has shape {list(loss.shape)}, but fields are those of a scalar; build it with "
                "reduction='mean' or 'sum'."
            )
        samples, axis = _samples(loss, z)
        if axis and any("reduce" in (getattr(extension, "approx", None) or "") for extension in extensions):
            raise CurvoptError(
                "check: Kronecker factors with approx='reduce' are compared for samples along axis 0 only; check them "
                "on a model that is called batch-first."
            )
        loss.backward(retain_graph=True)
        parameters = {name: p for name, p in ours.named_parameters() if p.grad is not None}
        ours.zero_grad()
        if any(not isinstance(e.columns, Gradient) for e in extensions):
            _check_size(z.numel() * sum(p.numel() for p in parameters.values()), samples)
        with backpack(*twins):
            loss.backward(inputs=list(parameters.values()), retain_graph=True)
        torch.manual_seed(0)
        theirs = _SamplesFirst(theirs, axis) if axis else theirs
        reference = Reference(theirs, x, lambda z: plain_loss(lossfunc, z.movedim(0, axis), y), samples)
        _check_reference(reference, z.movedim(axis, 0))
        result = CheckResult(
            f"curvopt.testing.check: {type(model).__name__}, {samples} samples with {z.numel() // samples} outputs "
            f"each, {sum(p.numel() for p in parameters.values())} parameters, {dtype}"
        )
        comparison = Comparison(reference, theirs, parameters, entries, lambda z: lossfunc(z, y))
        for twin, extension in zip(twins, extensions, strict=True):
            result.rows += compare(comparison, twin, extension, parameters, rtol)
        for extension in extensions:
            if isinstance(extension, PCHMP):
                with backpack(extension):
                    loss.backward(inputs=list(parameters.values()), retain_graph=True)
                result.rows += [compare_pchmp(comparison, name, p, rtol) for name, p in parameters.items()]
        if any(isinstance(e.columns, MonteCarlo) for e in extensions):
            result.rows.append(compare_draws(lossfunc, reference.z, y))
    print(result)
    if raises and not result.ok:
        raise CurvoptError(f"check: fields are wrong.\n{result}")
    return result


def _check_one_tensor(value: Any, role: str, wrapper: str) -> None:
    if not isinstance(value, Tensor):
        raise CurvoptError(
            f"check: expected one tensor as the model's {role}, got {type(value).__name__}; wrap the model in a module "
            f"that {wrapper}."
        )


def _check_request(model: nn.Module, x: Any, extensions: Sequence[Extension]) -> None:
    _check_one_tensor(x, "input", "keeps the other inputs")
    if not extensions:
        raise CurvoptError("check: got no extensions; pass a list, e.g. [curvopt.extensions.BatchGrad()].")
    for extension in extensions:
        name = getattr(type(extension), "field", None)
        if name not in EXPECTED:
            raise CurvoptError(f"check: no definition of {name!r} is known, only of {', '.join(sorted(EXPECTED))}.")
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise CurvoptError(
                f"check: {path or 'model'} ({type(module).__name__}) mixes the samples in train mode; call "
                "model.eval()."
            )


class _SamplesFirst(nn.Module):
    """A model with the axis of its samples in front."""

    def __init__(self, model: nn.Module, axis: int):
        super().__init__()
        self.model, self.axis = model, axis

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).movedim(self.axis, 0)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*args, **kwargs)


def _samples(loss: Tensor, z: Tensor) -> tuple[int, int]:
    """The number of samples that the engine finds, and their axis of the output z."""
    located = read_and_locate([node] if (node := loss.grad_fn) is not None else [])
    locations = list({id(location): location for location in located.locations.values()}.values())
    if len(locations) == 1:
        location = locations[0]
        for (node, output_nr), layout in location.heads.items():
            axis = axis_of(z.shape, layout) if node is z.grad_fn and output_nr == z.output_nr else None
            if axis is not None and axis.before == 1 and layout.labels is None:
                return location.N, axis.index
    raise CurvoptError(
        "check: the model's output does not have its samples along one axis; wrap the model in a module that returns "
        "them so."
    )


def _check_size(numbers: int, samples: int) -> None:
    if numbers > JACOBIAN_LIMIT:
        raise CurvoptError(
            f"check: the Jacobian of all outputs has {numbers:.1e} numbers, more than {JACOBIAN_LIMIT:.1e}; take fewer "
            f"than {samples} samples, a smaller network of the same layers, or fields of individual gradients only."
        )


def _check_reference(reference: Reference, z: Tensor) -> None:
    if z.shape != reference.z.shape or not torch.allclose(z, reference.z, rtol=1e-4, atol=1e-6):
        raise CurvoptError(
            "check: two forward passes with equal random numbers differ, so there is nothing to compare; make the "
            "model deterministic (model.eval(), fixed buffers)."
        )
