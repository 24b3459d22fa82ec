"""Fields with their types, for programs that are checked by pyright or mypy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from curvopt.core.record import extended_name
from curvopt.errors import CurvoptError

if TYPE_CHECKING:
    from curvopt.extensions.base import Extension
    from curvopt.extensions.firstorder import BatchGrad, BatchL2Grad, SumGradSquared, Variance
    from curvopt.extensions.products import BlockProduct, _Product
    from curvopt.extensions.secondorder import Diagonal, EigenDiagonal, KroneckerFactors, _Kronecker, _Root

    _Tensors = BatchGrad | BatchL2Grad | SumGradSquared | Variance | Diagonal | _Root | EigenDiagonal


@overload
def field(p: Tensor, extension: _Tensors | type[_Tensors]) -> Tensor: ...
@overload
def field(p: Tensor, extension: _Kronecker | type[_Kronecker]) -> KroneckerFactors: ...
@overload
def field(p: Tensor, extension: _Product | type[_Product]) -> BlockProduct: ...
@overload
def field(p: Tensor, extension: Extension | type[Extension]) -> Any: ...
def field(p: Tensor, extension: Extension | type[Extension]) -> Any:
    """The field that an extension wrote onto a parameter: ``field(p, KFAC)`` is ``p.kfac``, with its type.

    Args:
        p: a parameter of an extended model.
        extension: a class of `curvopt.extensions`, or an instance of it (of `GGNMP`, `HMP` and `PCHMP` with a
            ``savefield``).

    Returns:
        A tensor; a list of tensors for Kronecker factors; a `BlockProduct`, to be called with directions, for products.

    Raises:
        TypeError: for anything but an extension, a name say.
        CurvoptError: if the parameter has no such field.
    """
    if not hasattr(extension, "field"):
        raise TypeError(f"field: expected an extension such as BatchGrad or KFAC, got {extension!r}.")
    value = getattr(p, extension.field, None)
    if value is None:
        kind = extension if isinstance(extension, type) else type(extension)
        raise CurvoptError(
            f"{extended_name(p) or 'a parameter'} has no field {extension.field}. Run a backward pass that reaches it "
            f"inside of `with backpack({kind.__name__}(...))`, after `extend(model)`."
        )
    return value
