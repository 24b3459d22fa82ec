"""How it is trained: settings of every optimizer of torch.optim and curvopt.optim, made from their signatures.

``OPTIMIZERS`` maps names to frozen dataclasses with one field per scalar option, for the command line.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

import torch
import tyro
from torch import Tensor, nn

import curvopt.optim
from curvopt import extend
from experiments.problems import PROBLEMS

# These need gradients or parameters of a special kind.
_EXCLUDED = (torch.optim.Optimizer, torch.optim.SparseAdam, torch.optim.Muon)
# Of no use to a script that minimizes with one graph per step.
_UNUSED = ("maximize", "differentiable", "capturable")
_TUNED = "tuned"  # in place of a setting that is left to the problem; None is a setting of its own


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of an optimizer; what is left to the problem is ``"tuned"`` until ``resolved``."""

    name: ClassVar[str]
    kind: ClassVar[type[torch.optim.Optimizer]]

    def resolved(self, tuned: Mapping[str, Any]) -> Self:
        """The same settings; what is left to the problem is its tuned value, else the optimizer's own default."""
        own = {name: parameter.default for name, parameter in inspect.signature(self.kind).parameters.items()}
        left = [name for name, value in self.settings().items() if value == _TUNED]
        return replace(self, **{name: {**own, **tuned}[name] for name in left})

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def build(self, model: nn.Module, lossfunc: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters; one of curvopt extends ``model`` and ``lossfunc``."""
        if self.kind.__module__.startswith("curvopt."):
            extend(model)
            extend(lossfunc)
        return self.kind(model.named_parameters(), **self.settings())

    @property
    def needs_closure(self) -> bool:
        """Whether a step evaluates the loss several times, by a closure."""
        adapts = self.settings().get("adaptive_damping", False)
        return adapts or self.kind in (torch.optim.LBFGS, curvopt.optim.HessianFree)

    @property
    def remedy(self) -> str:
        """What to change when the loss explodes."""
        return "lower --lr or raise --damping" if "damping" in self.settings() else "lower --lr"

    def __str__(self) -> str:
        tuned = ", ".join(f"{name} {value:g}" for name, value in self.settings().items() if name in ("lr", "damping"))
        return f"{self.name} ({tuned})"


def _scalar(hint: Any) -> Any:
    """A type that a command line can give: without tensors; ``None`` if nothing is left."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        choices = [_scalar(arg) for arg in args if arg not in (Tensor, NoneType)]
        return None if None in choices or not choices else Union[(*choices, *({NoneType} & set(args)))]  # noqa: UP007
    if origin is tuple:
        parts = [_scalar(arg) for arg in args]
        return None if None in parts else tuple[tuple(parts)]
    return hint if hint in (bool, int, float, str) or origin is Literal else None


def _help(kind: type, name: str) -> str:
    """First sentence of what the docstring of a class says on an argument, in torch's or Google's form."""
    entry = re.search(
        rf"^ +{name}(?: ?\(.*?\))?: *(.*?)(?=^ +\w+(?: \([^)]*\))?:|\n\s*\n|\Z)", kind.__doc__ or "", re.M | re.S
    )
    text = " ".join(entry[1].split()) if entry else ""
    return re.split(r"(?<=[^.\d][^.])\. |; | \(default", re.sub("`_*", "", text))[0].strip(" .")


def _config(kind: type[torch.optim.Optimizer], name: str) -> type[OptimizerConfig]:
    tuned = {option for problem in PROBLEMS.values() for option in problem.tuned.get(name, ())}
    hints = get_type_hints(kind.__init__)
    options: list[tuple[str, Any, Any]] = []
    for option, parameter in inspect.signature(kind).parameters.items():
        hint = _scalar(hints.get(option))
        if hint is None or option in _UNUSED:
            continue
        text, default = _help(kind, option), parameter.default
        if option in tuned | {"lr"}:
            text = f"{text} (without it the problem's tuned value, else {default})"
            hint, default = Union[hint, Literal["tuned"]], _TUNED  # noqa: UP007
        options.append((option, Annotated[hint, tyro.conf.arg(help=text)], field(default=default)))
    config = make_dataclass(f"{kind.__name__}Config", options, bases=(OptimizerConfig,), frozen=True)
    config.__doc__ = " ".join((kind.__doc__ or "").strip().split("\n\n")[0].replace("`", "").split())
    config.name, config.kind = name, kind
    config.__module__ = __name__
    return config


def _optimizers(module: ModuleType) -> dict[str, type[OptimizerConfig]]:
    found = {}
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in _EXCLUDED:
            if "params" not in inspect.signature(kind).parameters:
                continue  # no optimizer by itself: KFACPreconditioner
            name = kind.__name__
            if module is curvopt.optim:  # KFACAdamW: kfac-adamw
                name = re.sub(r"(?<=KFAC)(?=[A-Z])|(?<=[a-z])(?=[A-Z][a-z])", "-", name)
            found[name.lower()] = _config(kind, name.lower())
    return found


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {**_optimizers(curvopt.optim), **_optimizers(torch.optim)}
