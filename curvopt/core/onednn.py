"""oneDNN's product of matrices, which PyTorch itself uses in compiled models only."""

import torch
from torch import Tensor


def available() -> bool:
    """Whether it can be asked for."""
    here = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return here and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32 on a CPU, without a graph.

    Gaps between the rows (or columns) of either make it a thousand times slower, or fail.
    """
    return torch.ops.mkldnn._linear_pointwise.default(a, b.T, None, "none", [], "")
