"""Batch-averaged backpropagation of a curvature matrix, layer by layer (Botev et al. 2017).

One matrix ``G``, shared by all samples, travels backwards: ``G_in = 1/N sum_n J_n^T G J_n`` at every operation. It is
kept as a root with one column for each unit at most. Only sequential networks have such a recursion::

    b = W a + c     G_a = W^T G_b W                        equal for all samples: the root is multiplied by W
    b = relu(a)     G_a = G_b * mean_n(d_n d_n^T)          d_n are the slopes, 0 or 1: a new root is formed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvopt.core.graph import CallInGraph
from curvopt.core.layers.rule import AffineRule
from curvopt.core.linear_algebra import eigh
from curvopt.core.losses.roots import LossCurvature
from curvopt.core.nodes import leads_to, name_of, shape_of
from curvopt.core.products.base import Chunk
from curvopt.core.vjp import pull
from curvopt.errors import CurvoptError


def kfra_jacobians(
    edge: GradientEdge,
    curvature: LossCurvature,
    calls: Sequence[CallInGraph],
    N: int,
) -> Iterator[Chunk]:
    """For every parameter the root of the averaged matrix at its layer's output, as Jacobian products of "one sample".

    Args:
        edge: the network's output.
        curvature: Hessian of the loss there.
        calls: the calls with parameters behind it.
        N: number of samples.

    Raises:
        CurvoptError: if the network is not sequential, or has parameters in other than linear and convolution layers.
    """
    for entry in calls:
        if not isinstance(entry.rule, AffineRule):
            raise CurvoptError(
                f"{entry.call.describe()}: kfra is defined for sequential networks of linear and convolution "
                "layers; use KFAC or KFLR."
            )
    left = {(e.node, e.output_nr): entry for entry in calls for e in entry.edges.values()}
    columns = curvature.root(0, curvature.columns)
    root = _root(columns.reshape(len(columns), len(columns[0]), -1).flatten(0, 1))
    while True:
        shape = shape_of(edge.node, edge.output_nr)
        if shape[0] != N:
            raise CurvoptError(
                f"kfra: {name_of(edge.node)} has an output of shape {list(shape)}, not one row for each sample."
            )
        vectors = root.reshape(-1, 1, *shape[1:])
        entry = left.pop((edge.node, edge.output_nr), None)
        if entry is not None:
            entry.call.cache.clear()  # its patches, as the positions of one sample
            jacobians = entry.rule.jac_t(entry.call, [vectors], list(entry.parameters), 1)
            entry.call.cache.clear()
            for name, jacobian in jacobians.items():  # a second call has other inputs
                yield Chunk(entry.parameters[name], jacobian, (entry.call,))
        if not left:
            return
        nodes = {node for node, _ in left}
        inputs = [GradientEdge(f, nr) for f, nr in edge.node.next_functions if f is not None and leads_to(f, nodes)]
        if len(inputs) != 1:
            raise CurvoptError(
                f"kfra is defined for sequential networks only, but {name_of(edge.node)} has {len(inputs)} inputs that "
                "depend on parameters; use KFAC or KFLR."
            )
        pulled = pull([edge], inputs, [vectors.expand(-1, *shape)])[0]
        edge = inputs[0]
        if pulled is None:
            return
        flat = pulled.reshape(len(pulled), len(pulled[0]), -1)
        # an operation that treats all samples alike (linear, convolution, reshape) keeps the columns as they are
        root = flat[:, 0] if bool((flat == flat[:, :1]).all()) else _root(flat.flatten(0, 1) / N**0.5)


def _root(columns: Tensor) -> Tensor:
    """Rows ``[D or fewer, D]`` with the same second moment as the given ones."""
    if columns.shape[0] <= columns.shape[1]:
        return columns
    eigenvalues, eigenvectors = eigh(columns.T @ columns)
    return (eigenvectors * eigenvalues.clamp(min=0).sqrt()).T
