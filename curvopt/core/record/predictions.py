"""`prediction` marks a tensor as the prediction of which a loss is a function.

>>> from curvopt.core.record.calls import records_of
>>> z = prediction(2 * torch.ones(4, 3, requires_grad=True))
>>> [type(record).__name__ for record, *_ in records_of(z.grad_fn)]
['Prediction']
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvopt.core.record.calls import Prediction, _record
from curvopt.core.record.state import _records, outside_of_graphs


def prediction(z: Tensor) -> Tensor:
    """Say that a tensor is a prediction, and return it: the curvature of a loss is that in its predictions.

    Predictions are the outputs of models, if nobody says otherwise. Where a model returns its loss, they are what its
    last operations with parameters compute. Mark what is meant where that is something else: the residual of a PINN
    whose loss is no square, say, or a probability from which a model computes a loss of its own.

    ::

        residual = curvopt.prediction(slope + u * u_x)
        loss = torch.nn.functional.huber_loss(residual, torch.zeros_like(residual))

    Args:
        z: a tensor with a row for each sample, ``[N, ...]``.

    Returns:
        The tensor itself.
    """
    if torch.compiler.is_dynamo_compiling():
        return outside_of_graphs(prediction, z)
    if _records() and z.grad_fn is not None:
        _record(z.grad_fn, Prediction(), 0, z.output_nr)
    return z
