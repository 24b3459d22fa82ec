"""The parameters of extended models: names, modules and models.

>>> from curvopt import extend
>>> model = extend(nn.Sequential(nn.Linear(3, 2)))
>>> extended_name(model[0].weight), extended_owner(model[0].weight) is model[0]
('0.weight', True)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from curvopt.core.record.model_calls import Model


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that a module's own forward uses: its own, and those of containers that have no forward.

    Names are relative to the module, e.g. ``weight``, ``parametrizations.weight.original0``, ``scales.0``.
    """
    owned = {name: p for name, p in module._parameters.items() if p is not None}
    for name, child in module._modules.items():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)) or (
            child is not None and name == "parametrizations"
        ):
            owned |= {f"{name}.{key}": p for key, p in child.named_parameters(remove_duplicate=False)}
    return owned


# names of the parameters of extended modules, and the modules, to notice calls that nothing recorded
_extended = WeakIdKeyDictionary()
_lock = threading.RLock()  # one thread may extend a model while another one looks all parameters through
_UNKNOWN: tuple[str | None, Callable[[], nn.Module | None], Model | None] = None, lambda: None, None


def note_parameters(module: nn.Module, path: str, model: Model, again: bool = True) -> None:
    """Note the parameters that a module of an extended model owns now, and its path in the model.

    Args:
        module: the module.
        path: of it in the model.
        model: the model.
        again: also those that are noted already, perhaps for another module.
    """
    for name, p in owned_parameters(module).items():
        if again or p not in _extended:
            with _lock:
                _extended[p] = f"{path}.{name}".lstrip("."), weakref.ref(module), model


def extended_name(p: Tensor) -> str | None:
    """Path of a parameter in the model that was extended, ``None`` for other tensors."""
    return (_extended.get(p) or _UNKNOWN)[0]


def extended_model(p: Tensor) -> Model | None:
    """The extended model to which a parameter belongs, ``None`` for other tensors."""
    return (_extended.get(p) or _UNKNOWN)[2]


def extended_parameters(models: Collection[Model | None]) -> list[Tensor]:
    """The parameters of some extended models."""
    with _lock:
        return [p for p, (_, _, model) in _extended.items() if model in models]


def extended_owner(p: Tensor) -> nn.Module:
    """The extended module that owns a parameter, called or not; an empty one if there is none any more."""
    owner = (_extended.get(p) or _UNKNOWN)[1]()
    return nn.Module() if owner is None else owner
