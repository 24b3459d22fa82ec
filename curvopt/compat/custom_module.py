"""BackPACK's small modules, which stand for operations that curvopt needs no modules for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import Tracer
from torch.nn import functional as F


class Branch(nn.Sequential):
    """All modules applied to one input, as a tuple; built like ``nn.Sequential``."""

    def forward(self, input: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Apply each of them."""
        return tuple(module(input) for module in self)


class SumModule(nn.Module):
    """The sum of its arguments."""

    def forward(self, *input: Tensor) -> Tensor:
        """Add tensors of one shape."""
        shapes = [list(x.shape) for x in input]
        if shapes.count(shapes[0]) < len(shapes):
            raise AssertionError(f"SumModule: expected tensors of one shape, got {shapes}.")
        return sum(input[1:], start=input[0])


class Parallel(nn.Module):
    """Modules applied to one input, and their outputs merged; built like ``nn.Sequential``.

    Args:
        *args: the modules, or a dictionary of them.
        merge_module: called with all outputs, by default `SumModule`.
    """

    def __init__(self, *args: nn.Module | OrderedDict[str, nn.Module], merge_module: nn.Module | None = None):
        """Take the modules."""
        super().__init__()
        self.branch = Branch(*args)  # pyright: ignore[reportCallIssue, reportArgumentType]
        self.merge = SumModule() if merge_module is None else merge_module

    def forward(self, input: Tensor) -> Tensor:
        """Apply all of them, then merge."""
        return self.merge(*self.branch(input))


class Pad(nn.Module):
    """`torch.nn.functional.pad` with its arguments."""

    def __init__(self, pad: Sequence[int], mode: str = "constant", value: float = 0.0):
        """Take the arguments."""
        super().__init__()
        self.pad, self.mode, self.value = pad, mode, value

    def forward(self, input: Tensor) -> Tensor:
        """Pad a tensor."""
        return F.pad(input, list(self.pad), self.mode, self.value)


class Permute(nn.Module):
    """``input.permute(dims)``, or ``input.transpose(*dims)``, with the batch axis in its place.

    Args:
        *dims: the axes.
        init_transpose: whether they are two to swap.

    Raises:
        ValueError: if axis 0 is moved.
    """

    def __init__(self, *dims: Any, init_transpose: bool = False):
        """Take the axes."""
        super().__init__()
        self.dims, self.init_transpose = dims, init_transpose
        if (0 in dims) if init_transpose else dims[0] != 0:
            raise ValueError(f"Permute: axis 0 holds the batch and has to stay where it is, got {dims}.")

    def forward(self, input: Tensor) -> Tensor:
        """Move the axes."""
        return input.transpose(*self.dims) if self.init_transpose else input.permute(self.dims)


class ReduceTuple(nn.Module):
    """One entry of a tuple."""

    def __init__(self, index: int = 0):
        """Take its index."""
        super().__init__()
        self.index = index

    def forward(self, input: tuple) -> Any:
        """Take it."""
        return input[self.index]


class ScaleModule(nn.Module):
    """A multiple of its input.

    Raises:
        ValueError: if the factor is no float.
    """

    def __init__(self, weight: float = 1.0):
        """Take the factor."""
        super().__init__()
        if not isinstance(weight, float):
            raise ValueError(f"ScaleModule: expected a float, got {weight!r}.")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        """Multiply."""
        return input * self.weight


class Slicing(nn.Module):
    """``input[slice_info]``."""

    def __init__(self, slice_info: tuple[slice | int, ...]):
        """Take the index."""
        super().__init__()
        self.slice_info = slice_info

    def forward(self, input: Tensor) -> Tensor:
        """Slice a tensor."""
        return input[self.slice_info]


class BackpackTracer(Tracer):
    """A tracer of ``torch.fx`` that does not look into these modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays a call."""
        own = (Branch, SumModule, ReduceTuple, Permute, ScaleModule)
        return isinstance(m, own) or super().is_leaf_module(m, module_qualified_name)
