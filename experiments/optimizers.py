"""The optimizers of the command line: those of torch.optim and curvopt.optim, with options read off their signatures.

``OPTIMIZERS`` maps names to frozen dataclasses with one field per option that a command line can give.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import docstring_parser
import torch
import tyro
from torch import Tensor, nn

import curvopt.optim
from curvopt.optim import KFACPreconditioner
from experiments.problems import PROBLEMS
from experiments.settings import OPTIMIZERS_IN_WORDS

# SparseAdam needs sparse gradients; Muon and KFACPreconditioner are offered together with a second optimizer, below.
_EXCLUDED = (torch.optim.Optimizer, torch.optim.SparseAdam, torch.optim.Muon, KFACPreconditioner)
# Of no use to a script that minimizes with one graph per step.
_UNUSED = ("maximize", "differentiable", "capturable")
_PROBLEM = "problem"  # in place of an option that the problem sets; None is a value of its own


# What options are, in words; others by the first sentence of their docstrings.
_OPTIONS_IN_WORDS = {
    "base": "the optimizer behind it: SGD with momentum 0.9, AdamW or Muon",
    "damping": "what is added to the curvature, which is that of the mean loss, before it is inverted",
    "relative_damping": "damping in multiples of a parameter's mean curvature, or of that of all if it is less",
}


@dataclass(frozen=True)
class OptimizerConfig:
    """Options of an optimizer; those that the problem sets are ``"problem"`` until ``resolved``."""

    name: ClassVar[str]
    kind: ClassVar[type[torch.optim.Optimizer]]

    def resolved(self, settings: Mapping[str, Any]) -> Self:
        """A copy with the problem's settings filled in, or else the optimizer's own defaults."""
        own = {name: parameter.default for name, parameter in _parameters(self.kind).items()}
        left = [name for name, value in self.options().items() if value == _PROBLEM]
        return replace(self, **{name: {**own, **settings}[name] for name in left})

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the model's parameters; those of curvopt still have to be attached."""
        takes: Any = model if "model" in _parameters(self.kind) else model.named_parameters()
        return self.kind(takes, **self.options())

    @property
    def needs_closure(self) -> bool:
        """Whether a step evaluates the loss several times, by a closure."""
        return self.fits_batch

    @property
    def fits_batch(self) -> bool:
        """Whether a step goes so far towards the minimum of its batch that small batches lead nowhere."""
        return self.kind in (torch.optim.LBFGS, curvopt.optim.HessianFree)

    @property
    def scalable(self) -> bool:
        """Whether its gradients may arrive multiplied by a loss scale, as fp16 needs."""
        return not self.needs_closure and not issubclass(self.kind, InTurn)

    @property
    def remedy(self) -> str:
        """Advice for a loss that explodes."""
        return "lower --lr or raise --damping" if "damping" in self.options() else "lower --lr"

    @property
    def label(self) -> str:
        """The optimizer and its learning rate in words, for figures."""
        name = "KFACPreconditioner" if self.kind is Preconditioned else self.kind.__name__
        return f"{name}, learning rate {self.options()['lr']:g}"

    def __str__(self) -> str:
        options = self.options()
        names = ("base", "lr", "damping" if options.get("damping") is not None else "relative_damping")
        shown = {name: value for name, value in options.items() if name in names}
        parts = [f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}" for name, value in shown.items()]
        return f"{self.name} ({', '.join(parts)})"


def attach(optimizer: torch.optim.Optimizer, model: nn.Module, lossfunc: nn.Module, scaler: Any = None) -> None:
    """Let an optimizer of curvopt see the curvature of the model; others need nothing."""
    for part in optimizer.parts if isinstance(optimizer, InTurn) else [optimizer]:
        if hasattr(part, "attach"):
            part.attach(model, lossfunc, scaler)  # pyright: ignore[reportAttributeAccessIssue]


class InTurn(torch.optim.Optimizer):
    """Optimizers that take their steps one after another, and look like one to schedulers and checkpoints."""

    parts: tuple[torch.optim.Optimizer, ...] = ()

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([torch.zeros(())], {})  # in whose place ``param_groups`` shows those of the parts
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Parts keep their groups."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of each part."""
        for part in self.parts:
            part.step()

    def metrics(self) -> dict[str, Any]:
        """The metrics of the parts' last step."""
        reports = [part.metrics() for part in self.parts if hasattr(part, "metrics")]  # pyright: ignore
        return {name: value for report in reports for name, value in report.items()}

    def state_dict(self) -> dict[str, Any]:
        """The states of all parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back the states of all parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


class Muon(InTurn):
    """Muon for matrices of weights, AdamW for all other parameters (embeddings, biases, convolutions, norms).

    Args:
        model: the network.
        lr: learning rate of both; Muon's update is scaled to the size of AdamW's.
        momentum: momentum of Muon.
        weight_decay: weight decay of both.
    """

    def __init__(self, model: nn.Module, lr: float = 0.001, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        parameters = [(p.ndim == 2 and p not in embeddings, p) for p in model.parameters()]
        matrices, others = ([p for is_matrix, p in parameters if is_matrix is wanted] for wanted in (True, False))
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **both))
        if others:
            parts.append(torch.optim.AdamW(others, **both))
        super().__init__(*parts)


_BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
    "adamw": lambda model, lr: torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0),
    "muon": Muon,
}


class Preconditioned(InTurn):
    """KFACPreconditioner in front of SGD with momentum 0.9, AdamW or Muon."""

    def __init__(self, model: nn.Module, base: str = "sgd", lr: float = 0.01, **options: Any) -> None:
        super().__init__(KFACPreconditioner(model, **options), _BASES[base](model, lr=lr))


def _preconditioned_parameters() -> list[inspect.Parameter]:
    own, theirs = (inspect.signature(kind, eval_str=True).parameters for kind in (Preconditioned, KFACPreconditioner))
    base = own["base"].replace(annotation=Literal[tuple(_BASES)])
    return [own["model"], base, own["lr"], *(p for name, p in theirs.items() if name != "model")]


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Parameters of a constructor by name, with types in place of strings."""
    if kind is Preconditioned:
        return {parameter.name: parameter for parameter in _preconditioned_parameters()}
    return dict(inspect.signature(kind, eval_str=True).parameters)


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


def _helps(kind: type) -> dict[str, str]:
    """First sentence of a docstring on each argument."""
    texts = {}
    for argument in docstring_parser.parse(kind.__doc__ or "").params:
        text = re.sub("`_*", "", " ".join((argument.description or "").split()))
        texts[argument.arg_name] = re.split(r"(?<=[^.\d][^.])\. |; | \(default", text)[0].strip(" .")
    return texts


def _config(kind: type[torch.optim.Optimizer], name: str) -> type[OptimizerConfig]:
    set_by_problems = {"lr"} | {option for problem in PROBLEMS.values() for option in problem.settings(name)}
    helps = _helps(kind)
    if kind is Preconditioned:
        helps |= _helps(KFACPreconditioner) | {"lr": "learning rate of the optimizer behind it"}
    helps |= _OPTIONS_IN_WORDS
    options: list[tuple[str, Any, Any]] = []
    for option, parameter in _parameters(kind).items():
        hint = _scalar(parameter.annotation)
        if hint is None or option in _UNUSED:
            continue
        text, default = helps.get(option, ""), parameter.default
        if option in set_by_problems:
            text = f"{text} (without it the problem's value, else {default})"
            hint, default = Union[hint, Literal["problem"]], _PROBLEM  # noqa: UP007
        options.append((option, Annotated[hint, tyro.conf.arg(help=text)], field(default=default)))
    config = make_dataclass(f"{kind.__name__}Config", options, bases=(OptimizerConfig,), frozen=True)
    config.__doc__ = OPTIMIZERS_IN_WORDS.get(name, kind.__name__)
    config.name, config.kind = name, kind
    config.__module__ = __name__
    return config


def _optimizers(module: ModuleType) -> dict[str, type[OptimizerConfig]]:
    found = {}
    for kind in (getattr(module, name) for name in dict.fromkeys([*vars(module), *module.__all__])):  # some come late
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind not in _EXCLUDED:
            name = kind.__name__
            if module is curvopt.optim:  # KFACAdamW: kfac-adamw
                name = re.sub(r"(?<=KFAC)(?=[A-Z])|(?<=[a-z])(?=[A-Z][a-z])", "-", name)
            found[name.lower()] = _config(kind, name.lower())
    return found


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    **_optimizers(curvopt.optim),
    "kfac-preconditioner": _config(Preconditioned, "kfac-preconditioner"),
    "muon": _config(Muon, "muon"),
    **_optimizers(torch.optim),
}
