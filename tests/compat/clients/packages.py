"""What packages built on BackPACK do with it, each a function that returns its numbers.

Each imports what it needs itself, so that it runs with the real package and with `curvopt.as_backpack`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

N, C = 6, 3


@contextlib.contextmanager
def missing_in_new_releases() -> Iterator[None]:
    """Inside are again what the last releases of these packages need: ``pkg_resources`` and ``Tensor.symeig``."""
    resources: Any = types.ModuleType("pkg_resources")
    resources.DistributionNotFound = LookupError
    resources.get_distribution = lambda name: types.SimpleNamespace(version="unknown")

    def symeig(self: Tensor, eigenvectors: bool = False, upper: bool = True) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self, "U" if upper else "L")
        return values, vectors if eigenvectors else vectors.new_empty(0)

    before = {"pkg_resources": sys.modules.get("pkg_resources")}, getattr(Tensor, "symeig", None)
    sys.modules["pkg_resources"] = resources
    Tensor.symeig = symeig  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        del sys.modules["pkg_resources"]
        sys.modules.update({name: module for name, module in before[0].items() if module is not None})
        Tensor.symeig = before[1]  # type: ignore[attr-defined]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C))


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, C))


def data(model: nn.Module) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, *((4,) if isinstance(model[0], nn.Linear) else (1, 7, 7))), torch.arange(N) % C


# ---------------------------------------------------------------------------------------------------------- laplace


def laplace_backend(backend: str, make: Callable[[], nn.Sequential], likelihood: str) -> dict[str, Any]:
    """What a backend of laplace-torch computes."""
    from laplace import curvature

    model = make()
    x, y = data(model)
    y = y if likelihood == "classification" else torch.randn(N, C)
    model.output_size = C  # type: ignore[assignment] # as its `fit` sets it
    ef, ggn = (getattr(curvature, f"{backend}{matrix}")(model, likelihood) for matrix in ("EF", "GGN"))
    numbers: dict[str, Any] = {"Kronecker factors": ggn.kron(x, y, N=N)[1].kfacs}
    numbers["loss"], numbers["GGN's diagonal"] = ggn.diag(x, y, N=N)
    numbers["diagonal of the empirical Fisher matrix"] = ef.diag(x, y)[1]
    numbers["individual gradients"] = ggn.gradients(x, y)[0]
    # the real package takes its hooks off after these
    numbers["Jacobians"], numbers["outputs"] = ggn.jacobians(x)
    numbers["selected Jacobians"] = ggn.selected_output_jacobians(x, torch.arange(N) % C)[0]
    return numbers


def laplace_mlp() -> dict[str, Any]:
    """The `BackPackGGN` and `BackPackEF` backends of a classifier."""
    return laplace_backend("BackPack", mlp, "classification")


def laplace_regression() -> dict[str, Any]:
    """The backends of a regression."""
    return laplace_backend("BackPack", mlp, "regression")


def laplace_cnn() -> dict[str, Any]:
    """The backends of a convolutional network."""
    return laplace_backend("BackPack", cnn, "classification")


def laplace_posterior() -> dict[str, Any]:
    """Predictions of a Kronecker-factored and of a diagonal posterior, with the prior fitted."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN
    from torch.utils.data import DataLoader, TensorDataset

    numbers: dict[str, Any] = {}
    for structure in ("kron", "diag"):
        model = mlp()
        x, y = data(model)
        posterior = Laplace(model, "classification", "all", structure, backend=BackPackGGN)
        posterior.fit(DataLoader(TensorDataset(x, y), batch_size=4))
        posterior.optimize_prior_precision(method="marglik", n_steps=3)
        numbers[structure] = posterior(x, link_approx="probit"), posterior.log_marginal_likelihood()
    return numbers


# ---------------------------------------------------------------------------------------------------------- cockpit


def cockpit_full() -> dict[str, Any]:
    """All quantities of Cockpit's full configuration over three steps of SGD."""
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    model = extend(cnn())
    lossfunc, each = extend(nn.CrossEntropyLoss()), nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cockpit = Cockpit(model.parameters(), quantities=configuration("full"))
    for step in range(3):
        x, y = data(model)
        optimizer.zero_grad()
        outputs = model(x)
        loss, losses = lossfunc(outputs, y), each(outputs, y)
        info = {"batch_size": N, "individual_losses": losses, "loss": loss, "optimizer": optimizer}
        torch.manual_seed(step)
        with cockpit(step, info=info):
            loss.backward(create_graph=cockpit.create_graph(step))
        optimizer.step()
    return {f"{step}": dict(values) for step, values in cockpit.get_output().items()}


# ------------------------------------------------------------------------------------------------------------ vivit


def vivit_directions() -> dict[str, Any]:
    """Slopes and curvatures along the leading eigenvectors of the GGN, and a damped Newton step in them."""
    import vivit
    from backpack import backpack, extend

    numbers: dict[str, Any] = {}
    for subsampling in (None, [0, 2, 3]):
        model, lossfunc = extend(cnn()), extend(nn.CrossEntropyLoss())
        x, y = data(model)
        group = {"params": list(model.parameters()), "criterion": lambda values: [len(values) - 2, len(values) - 1]}
        computation = vivit.DirectionalDerivativesComputation(subsampling_ggn=subsampling, subsampling_grad=subsampling)
        with backpack(*computation.get_extensions(), extension_hook=computation.get_extension_hook([group])):
            lossfunc(model(x), y).backward()
        slopes, curvatures = computation.get_result(group)
        numbers[f"derivatives {subsampling}"] = slopes.abs(), curvatures  # eigenvectors have no sign
        group = {**group, "damping": vivit_damping}
        newton = vivit.DirectionalDampedNewtonComputation(subsampling_ggn=subsampling, subsampling_grad=subsampling)
        with backpack(*newton.get_extensions(), extension_hook=newton.get_extension_hook([group])):
            lossfunc(model(x), y).backward()
        numbers[f"step {subsampling}"] = newton.get_result(group)
    return numbers


def vivit_damping(values: Tensor, vectors: Tensor, slopes: Tensor, curvatures: Tensor) -> Tensor:
    return torch.full_like(values, 0.1)


def vivit_gram() -> dict[str, Any]:
    """Eigenvalues of the GGN by the Gram matrix of its root, and Gram matrices of individual gradients."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad, SqrtGGNExact
    from vivit.extensions import hooks

    numbers: dict[str, Any] = {}
    for extension, hook in (
        (SqrtGGNExact(), hooks.GramSqrtGGNExact(free_sqrt_ggn=True)),
        (BatchGrad(), hooks.GramBatchGrad(free_grad_batch=True)),
        (BatchGrad(), hooks.CenteredGramBatchGrad()),
    ):
        model, lossfunc = extend(cnn()), extend(nn.CrossEntropyLoss())
        x, y = data(model)
        with backpack(extension, extension_hook=hook):
            lossfunc(model(x), y).backward()
        gram = hook.get_result()
        numbers[type(hook).__name__] = gram, torch.linalg.eigvalsh(gram)
    return numbers


def vivit_eigenvalues() -> dict[str, Any]:
    """`EigvalshComputation` and `EighComputation`, made of extensions of their own."""
    import vivit
    from backpack import backpack, extend

    computation, model, lossfunc = vivit.EigvalshComputation(), extend(cnn()), extend(nn.CrossEntropyLoss())
    group, (x, y) = {"params": list(model.parameters())}, data(model)
    with backpack(computation.get_extension(), extension_hook=computation.get_extension_hook([group])):
        lossfunc(model(x), y).backward()
    return {"eigenvalues": computation.get_result(group)}


# ------------------------------------------------------------------------------------------------------- curvlinops


def curvlinops_activations() -> dict[str, Any]:
    """The Hessian of the loss in hidden features."""
    from curvlinops.experimental import ActivationHessianLinearOperator

    model = mlp()
    x, y = data(model)
    operator = ActivationHessianLinearOperator(
        model, nn.CrossEntropyLoss(), ("1", "output", 0), [(x, y)], check_deterministic=False
    )
    return {"Hessian": torch.as_tensor(operator @ torch.eye(operator.shape[1]))}


PROGRAMS: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "laplace": [laplace_mlp, laplace_regression, laplace_cnn, laplace_posterior],
    "cockpit": [cockpit_full],
    "vivit": [vivit_directions, vivit_gram, vivit_eigenvalues],
    "curvlinops": [curvlinops_activations],
}
