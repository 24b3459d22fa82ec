"""BackPACK's small functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from curvopt import kroneckers
from curvopt.hessianfree import L_op, R_op, ggn_vector_product
from curvopt.utils.examples import get_mnist_dataset

Tensors = Tensor | Sequence[Tensor]


def transposed_jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """`curvopt.hessianfree.L_op` with other names of its arguments."""
    return L_op(f, x, v, retain_graph, detach)


def jacobian_vector_product(
    f: Tensors, x: Tensors, v: Tensors, retain_graph: bool = True, detach: bool = True
) -> tuple[Tensor, ...]:
    """`curvopt.hessianfree.R_op` with other names of its arguments."""
    return R_op(f, x, v, retain_graph, detach)


def vector_to_parameter_list(vec: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """A vector cut into tensors like some parameters, the inverse of ``parameters_to_vector``."""
    parameters = list(parameters)
    pieces = vec.detach()[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
    return [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


def subsample(tensor: Tensor, dim: int = 0, subsampling: Sequence[int] | None = None) -> Tensor:
    """Some entries along an axis, all for ``None``."""
    return (
        tensor if subsampling is None else tensor.index_select(dim, torch.as_tensor(subsampling, device=tensor.device))
    )


def is_tensor_of_order(order: int, tensor: Tensor) -> bool:
    """Whether a tensor has as many axes."""
    return tensor.dim() == order


def all_tensors_of_order(order: int, tensors: Iterable[Tensor]) -> bool:
    """Whether all tensors have as many axes."""
    return all(tensor.dim() == order for tensor in tensors)


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor has two axes."""
    return tensor.dim() == 2


def is_vector(tensor: Tensor) -> bool:
    """Whether a tensor has one axis."""
    return tensor.dim() == 1


def two_kfacs_to_mat(A: Tensor, B: Tensor) -> Tensor:
    """``A ⊗ B``."""
    return kroneckers.kfacs_to_mat([A, B])


def apply_inv_kfac_mat_prod(
    factors: Sequence[Tensor], mat: Tensor, shift: float | Sequence[float | Tensor] | None = None
) -> Tensor:
    """``[(F1 + shift1 I)⁻¹ ⊗ (F2 + shift2 I)⁻¹ ⊗ ...] mat``."""
    return kroneckers.inv_kfac_mat_prod(factors, shift)(mat)


def get_mnist_dataloader(batch_size: int = 64, shuffle: bool = True) -> DataLoader:
    """Batches of `curvopt.utils.examples.get_mnist_dataset`."""
    return DataLoader(get_mnist_dataset(), batch_size=batch_size, shuffle=shuffle)


def load_one_batch_mnist(batch_size: int = 64, shuffle: bool = True, flat: bool = False) -> tuple[Tensor, Tensor]:
    """The first batch of images ``[N, 1, 28, 28]``, or ``[N, 784]`` if ``flat``, and labels."""
    images, labels = next(iter(get_mnist_dataloader(batch_size, shuffle)))
    return images.flatten(1) if flat else images, labels


def autograd_diag_ggn_exact(
    X: Tensor, y: Tensor, model: nn.Module, loss_function: nn.Module, idx: Sequence[int] | None = None
) -> Tensor:
    """Entries of the GGN's diagonal, one product with the whole matrix for each.

    Args:
        X: inputs of the model.
        y: targets.
        model: a model; its parameters count in a row.
        loss_function: called as ``loss_function(model(X), y)``.
        idx: which entries, else all.

    Returns:
        A vector.
    """
    return torch.stack([column[d] for d, column in _ggn_columns(X, y, model, loss_function, idx)])


def _ggn_columns(
    X: Tensor, y: Tensor, model: nn.Module, loss_function: nn.Module, idx: Sequence[int] | None
) -> Iterator[tuple[int, Tensor]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    outputs = model(X)
    loss = loss_function(outputs, y)
    D = sum(p.numel() for p in parameters)
    for d in range(D) if idx is None else idx:
        unit = torch.zeros(D, dtype=loss.dtype, device=loss.device)
        unit[d] = 1.0
        column = ggn_vector_product(loss, outputs, model, vector_to_parameter_list(unit, parameters))
        yield d, parameters_to_vector([part.contiguous() for part in column])
