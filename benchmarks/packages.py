"""One adapter for every package: how it computes a quantity, and where its numbers are.

An adapter is a function of a `Task` and the name of a quantity (that of the extension here) and returns a `Method`, or
raises `NotOffered`. The names of what a method returns are those of the parameters.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import curvopt
import curvopt.extensions
from benchmarks.problems import Task

Values = dict[str, Any]

#: Every quantity; "Idle" is the gradient of a network that is extended while nothing is asked for.
FIRST_ORDER = ("BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance")
SAMPLED = ("KFAC", "DiagGGNMC", "BatchDiagGGNMC", "SqrtGGNMC")
EXACT = ("KFLR", "DiagGGNExact", "BatchDiagGGNExact", "DiagHessian", "BatchDiagHessian", "SqrtGGNExact", "KFRA")
PRODUCTS = ("GGNMP", "HMP", "PCHMP")
QUANTITIES = ("Idle", *FIRST_ORDER, *SAMPLED, *EXACT, *PRODUCTS)
KRONECKER = ("KFAC", "KFLR", "KFRA")


class NotOffered(Exception):
    """The package has no such quantity."""


@dataclass(frozen=True)
class Method:
    """How a package computes a quantity.

    Args:
        run: computes it; this is what is timed.
        read: what ``run`` returned as a value for every parameter, scaled as the fields are.
        gradient: whether the gradient itself comes along.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Values] = lambda values: values
    gradient: bool = True


def of_samples(quantity: str, grads: Mapping[str, Tensor]) -> Values:
    """A first-order quantity from gradients ``[N, *p]`` of all samples."""
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "BatchGrad": lambda g: g,
        "BatchL2Grad": lambda g: g.flatten(1).square().sum(1),
        "SumGradSquared": lambda g: g.square().sum(0),
        "Variance": lambda g: g.var(0, unbiased=False),
    }
    if quantity not in reductions:
        raise NotOffered(quantity)
    return {name: reductions[quantity](g) for name, g in grads.items()}


def direction(p: Tensor) -> Tensor:
    """What matrix products are measured with."""
    return torch.linspace(-1, 1, p.numel(), device=p.device).reshape(p.shape)


# ------------------------------------------------------------------------------------------- curvopt and BackPACK


def in_a_backward(task: Task, quantity: str, package: Any, extensions: Any, model: nn.Module) -> Method:
    """Both put fields on parameters, and under the same names."""
    lossfunc, x, y = package.extend(task.lossfunc), task.x, task.y
    named = dict(model.named_parameters())

    def gradient() -> None:
        model.zero_grad()
        lossfunc(model(x), y).backward()

    if quantity == "Idle":
        return Method(gradient, lambda _: {name: p.grad for name, p in named.items()})
    extension = getattr(extensions, quantity)()
    field = extension.savefield if hasattr(extension, "savefield") else extension.field
    directions = {name: direction(p).unsqueeze(0) for name, p in named.items()}

    def run() -> Values:
        with package.backpack(extension):
            gradient()
        values = {name: vars(p).pop(field) for name, p in named.items()}
        if quantity in PRODUCTS:
            return {name: product(directions[name])[0] for name, product in values.items()}
        return values

    def read(values: Values) -> Values:
        return {name: v.square().sum((0, 1)) for name, v in values.items()} if quantity.startswith("Sqrt") else values

    return Method(run, read)


def curvopt_(task: Task, quantity: str) -> Method:
    return in_a_backward(task, quantity, curvopt, curvopt.extensions, curvopt.extend(task.model))


def backpack_(task: Task, quantity: str) -> Method:
    import backpack
    import backpack.extensions

    model = backpack.extend(task.model, use_converter=not isinstance(task.model, nn.Sequential))
    return in_a_backward(task, quantity, backpack, backpack.extensions, model)


# ------------------------------------------------------------------------------------------------------- torch.func


def functorch_(task: Task, quantity: str) -> Method:
    from torch.func import functional_call, grad, vjp, vmap

    model, lossfunc, N = task.model, task.lossfunc, len(task.x)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def output(p: Values, x: Tensor) -> Tensor:
        return functional_call(model, p, (x.unsqueeze(0),))

    def per_sample(labels: Tensor) -> Values:
        def loss(p: Values, x: Tensor, y: Tensor) -> Tensor:
            return lossfunc(output(p, x), y.unsqueeze(0)) / N

        return vmap(grad(loss), (None, 0, 0), randomness="different")(parameters, task.x, labels)

    def sampled() -> Values:
        with torch.no_grad():
            p = model(task.x).softmax(1)
            rows = p.movedim(1, -1)
            labels = torch.multinomial(rows.flatten(0, -2), 1).reshape(rows.shape[:-1])
        # divided by the root of the number of labels, where the mean loss divides by that number
        return {name: labels.numel() ** 0.5 * g for name, g in per_sample(labels).items()}

    def squares() -> Values:
        def of_one(x: Tensor) -> Values:
            z, pull = vjp(lambda p: output(p, x)[0], parameters)
            p = z.softmax(0)
            root = ((torch.eye(len(z), device=z.device) - p) * p.sqrt().unsqueeze(1)) / N**0.5
            total = {name: torch.zeros_like(p) for name, p in parameters.items()}
            for column in root:
                total = {name: total[name] + g.square() for name, g in pull(column)[0].items()}
            return total

        return vmap(of_one)(task.x)

    if quantity in ("BatchDiagGGNExact", "DiagGGNExact"):
        total = quantity == "DiagGGNExact"
        return Method(lambda: {n: s.sum(0) if total else s for n, s in squares().items()}, gradient=False)
    if quantity == "DiagGGNMC":
        return Method(lambda: of_samples("SumGradSquared", sampled()), gradient=False)
    of_samples(quantity, {})
    return Method(lambda: of_samples(quantity, per_sample(task.y)), gradient=False)


# ------------------------------------------------------------------------------------------------------------ Opacus


def opacus_(task: Task, quantity: str) -> Method:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    of_samples(quantity, {})
    N, named = len(task.x), dict(task.model.named_parameters())
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in task.model.modules()):
        raise RuntimeError("opacus refuses batch normalisation")
    ghost = quantity == "BatchL2Grad"
    wrapper = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
    model = wrapper(task.model.train(), loss_reduction="mean")  # its hooks work in train mode only
    for module in task.model.modules():
        module.train(not isinstance(module, nn.Dropout))

    def run() -> Values:
        for p in named.values():
            p.grad = p.grad_sample = None
        task.lossfunc(model(task.x), task.y).backward()
        if ghost:
            return {name: p._norm_sample for name, p in named.items()}
        return of_samples(quantity, {name: p.grad_sample for name, p in named.items()})

    def read(values: Values) -> Values:  # of the sum of losses, and norms that are not squared
        power = 1 if quantity == "BatchGrad" else 2
        return {name: (v.square() if ghost else v) / N**power for name, v in values.items()}

    return Method(run, read)


# -------------------------------------------------------------------------------------------------------------- ASDL


def asdl_(task: Task, quantity: str) -> Method:
    import asdl

    model, named, rows = task.model, dict(task.model.named_parameters()), task.y.numel()
    config = {
        "KFAC": (asdl.FISHER_MC, asdl.SHAPE_KRON),
        "KFLR": (asdl.FISHER_EXACT, asdl.SHAPE_KRON),
        "DiagGGNMC": (asdl.FISHER_MC, asdl.SHAPE_DIAG),
        "DiagGGNExact": (asdl.FISHER_EXACT, asdl.SHAPE_DIAG),
    }.get(quantity)
    if config is None:
        of_samples(quantity, {})

        def backward() -> Tensor:
            model.zero_grad()
            loss = task.lossfunc(model(task.x), task.y)
            loss.backward()
            return loss

        def run() -> Values:
            asdl.save_batch_gradient(model, backward)
            return of_samples(quantity, {name: vars(p).pop("batch_grad") for name, p in named.items()})

        return Method(run)

    fisher_type, shape = config
    settings = asdl.FisherConfig(fisher_type, [shape], loss_type=asdl.LOSS_CROSS_ENTROPY, data_size=rows)
    maker = asdl.get_fisher_maker(model, settings)

    def fisher() -> Values:
        model.zero_grad()
        logits = maker.setup_model_call(model, task.x)
        maker.setup_loss_call(torch.nn.functional.cross_entropy, logits, task.y, reduction="sum")
        maker.setup_logits_repr(logits.transpose(1, -1) if task.y.dim() > 1 else logits)
        maker.forward_and_backward(calc_loss_grad=True)
        return {name: vars(m).pop("fisher") for name, m in model.named_modules() if hasattr(m, "fisher")}

    def read(values: Values) -> Values:
        found: Values = {}
        for name, matrix in values.items():
            if shape == asdl.SHAPE_KRON:
                found[f"{name}.weight"] = [matrix.kron.B, matrix.kron.A]
            else:
                found |= {f"{name}.weight": matrix.diag.weight, f"{name}.bias": matrix.diag.bias}
        return {name: value for name, value in found.items() if name in named}

    return Method(fisher, read)


# -------------------------------------------------------------------------------------------------------- NNGeometry


def nngeometry_(task: Task, quantity: str) -> Method:
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM, FIM_MonteCarlo
    from nngeometry.object.map import PFMapDense
    from nngeometry.object.pspace import PMatDiag, PMatKFAC

    model, batch = task.model, (task.x.detach(), task.y)
    representation = {
        "KFAC": (FIM_MonteCarlo, PMatKFAC),
        "KFLR": (FIM, PMatKFAC),
        "DiagGGNMC": (FIM_MonteCarlo, PMatDiag),
        "DiagGGNExact": (FIM, PMatDiag),
    }.get(quantity)
    if representation is None:
        of_samples(quantity, {})
    layers = LayerCollection.from_model(model)
    options = {"variant": "classif_logits", "device": str(task.x.device), "layer_collection": layers}

    def split(flat: Tensor) -> Values:
        """``[..., P]`` by parameter."""
        found = {}
        for layer, start in layers.p_pos.items():
            module = model.get_submodule(layer)
            for name in ("weight", "bias"):
                p = getattr(module, name, None)
                if p is not None:
                    part = flat[..., start : start + p.numel()]
                    found[f"{layer}.{name}"], start = part.reshape(*flat.shape[:-1], *p.shape), start + p.numel()
        return found

    if representation is None:

        def losses(*batch: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none") / len(batch[0])
            return loss.flatten(1).mean(1, keepdim=True) if loss.dim() > 1 else loss.unsqueeze(1)

        def run() -> Values:
            generator = TorchHooksJacobianBackend(model, losses, layer_collection=layers)
            return of_samples(quantity, split(PFMapDense(generator, examples=batch).to_torch()[0]))

        return Method(run, gradient=False)
    information, shape = representation

    def read(matrix: Any) -> Values:
        if shape is PMatDiag:
            return split(matrix.get_diag())
        found = {}
        for layer, (A, B) in matrix.data.items():
            weight = model.get_submodule(layer).weight
            found[f"{layer}.weight"] = [B, A[: weight[0].numel(), : weight[0].numel()]]  # the last input is the bias'
        return found

    return Method(lambda: information(model, batch, shape, **options), read, gradient=False)


# -------------------------------------------------------------------------------------------------------- curvlinops


def curvlinops_(task: Task, quantity: str) -> Method:
    from curvlinops import FisherType, KFACLinearOperator

    if quantity not in ("KFAC", "KFLR"):
        raise NotOffered(quantity)
    kind = FisherType.MC if quantity == "KFAC" else FisherType.TYPE2
    layers = [m for m in task.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    settings: dict[str, Any] = {
        "params": [p for layer in layers for p in layer.parameters()],
        "data": [(task.x, task.y)],
        "fisher_type": kind,
        "check_deterministic": False,
        "num_data": len(task.x),
        "num_per_example_loss_terms": task.y[0].numel(),
    }

    def run() -> Any:
        operator = KFACLinearOperator(task.model, task.lossfunc, **settings)
        operator.compute_kronecker_factors()
        return operator._gradient_covariances, operator._input_covariances

    def read(factors: tuple[Values, Values]) -> Values:
        return {f"{name}.weight": [factors[0][name], A] for name, A in factors[1].items()}

    return Method(run, read, gradient=False)


#: Where the first is the library itself; values are the names that are imported and the adapters.
PACKAGES: dict[str, tuple[str, Callable[[Task, str], Method]]] = {
    "curvopt": ("curvopt", curvopt_),
    "backpack": ("backpack", backpack_),
    "asdl": ("asdl", asdl_),
    "nngeometry": ("nngeometry", nngeometry_),
    "opacus": ("opacus", opacus_),
    "curvlinops": ("curvlinops", curvlinops_),
    "torch.func": ("torch.func", functorch_),
}


def method(package: str, task: Task, quantity: str) -> Method:
    """How a package computes a quantity of a task; the task is the method's own from then on.

    Raises:
        NotOffered: the package has no such quantity.
        Exception: whatever the package raises for this network.
    """
    name, adapter = PACKAGES[package]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(name)
        return adapter(task, quantity)


def installed(packages: Sequence[str]) -> list[str]:
    """Those that can be imported."""
    return [package for package in packages if importlib.util.find_spec(PACKAGES[package][0]) is not None]
