"""Second-order information in one backward pass, and torch.optim optimizers that live on it."""

from curvopt.core.backward.backpack import backpack
from curvopt.core.backward.columns import set_columns_per_sweep
from curvopt.core.recording.extend import extend
from curvopt.core.recording.state import disable
from curvopt.errors import CurvoptError, CurvoptWarning
from curvopt.regularizers import L2Regularizer

__version__ = "0.1.0"

__all__ = [
    "CurvoptError",
    "CurvoptWarning",
    "L2Regularizer",
    "backpack",
    "disable",
    "extend",
    "set_columns_per_sweep",
]
