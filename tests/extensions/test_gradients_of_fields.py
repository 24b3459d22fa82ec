"""Fields computed under ``create_graph=True`` can be differentiated: along a direction it gives their differences.

The fields themselves are compared with their definitions elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import (
    Lambda,
    Mixer,
    Net,
    Take,
    attending,
    channels_first,
    mlp,
    residual,
    used_on_tokens_and_pool,
    used_twice,
)
from checks import FIRST_ORDER
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from curvopt import CurvoptError, backpack, extend
from curvopt.extensions import KFLR, BatchGrad, DiagGGNExact, DiagHessian, Extension


def by_grad(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    torch.autograd.grad(loss, parameters, create_graph=True)


def by_backward(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    loss.backward(create_graph=True)
    for p in parameters:
        p.grad = None


def gradient_is_the_slope(
    model: nn.Module,
    loss: Callable[[], Tensor],
    extension: Extension,
    differentiate: Callable = by_grad,
    step: float = 3e-4,
) -> None:
    """Of a scalar that depends on every entry of the fields in another way, by a difference of fourth order."""
    parameters = list(model.parameters())
    at, directions = [p.detach().clone() for p in parameters], [torch.randn_like(p) for p in parameters]

    def scalar(moved: float) -> Tensor:
        with torch.no_grad():
            for p, q, v in zip(parameters, at, directions, strict=True):
                p.copy_(q + moved * v)
        with backpack(extension):
            differentiate(loss(), parameters)
        fields = [getattr(p, extension.field) for p in parameters]
        entries = [part for field in fields for part in (field if isinstance(field, list) else [field])]
        return sum((part.flatten() * torch.linspace(1, 2, part.numel()).to(part)).sum() for part in entries)

    gradients = torch.autograd.grad(scalar(0.0), parameters, allow_unused=True, materialize_grads=True)
    slope = sum((gradient * v).sum() for gradient, v in zip(gradients, directions, strict=True))
    near, far = (float(scalar(k * step).detach() - scalar(-k * step).detach()) for k in (1, 2))
    assert slope != 0
    assert_close(float(slope), (8 * near - far) / (12 * step), rtol=1e-7, atol=0.0)


def of_computed_weights(m: Net, x: Tensor) -> Tensor:
    """Layers whose weights are computed: entry by entry, from products of matrices, and by rows."""
    h = torch.tanh(F.linear(x, m.masked.exp() * m.masked, m.bias))
    h = torch.tanh(F.linear(h, torch.eye(4).to(h) + m.up @ m.down / 2))
    return F.linear(h, F.normalize(m.rows, dim=1)).flatten(1)


def computed_weights() -> nn.Module:
    shapes = {"masked": (4, 4), "rows": (3, 4), "up": (4, 2), "down": (2, 4), "bias": (4,)}
    return Net(of_computed_weights, **{name: torch.randn(shape) for name, shape in shapes.items()})


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(4, 5, 3), (4, 4)),
    "residual": (residual, (4, 4)),
    "a layer used twice": (used_twice, (4, 4)),
    "a layer used on tokens and their mean": (used_on_tokens_and_pool, (4, 2, 4)),
    "tokens, Gram matrices": (lambda: nn.Sequential(mlp(9, 8, 3), nn.Flatten()), (3, 2, 9)),
    "without a rule": (lambda: nn.Sequential(nn.Linear(4, 3), Mixer(2, 3), nn.Flatten()), (3, 2, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Sigmoid(), nn.Flatten()), (3, 2, 3, 3)),
    "computed weights": (computed_weights, (4, 4)),
    "computed weights on tokens": (computed_weights, (3, 2, 4)),
    "decoder": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, groups=2),
            nn.GroupNorm(2, 4),
            nn.ConvTranspose2d(4, 2, 2, dilation=2),
            nn.Flatten(),
        ),
        (3, 2, 2, 3),
    ),
    "slopes": (lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.Linear(3, 2)), (3, 4)),
    "recurrent": (
        lambda: nn.Sequential(
            Take(nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True), 0),
            nn.RMSNorm(6),
            Take(nn.GRU(6, 3, batch_first=True), 1, 0),
        ),
        (3, 4, 4),
    ),
    "attention": (lambda: nn.Sequential(attending(need_weights=False), nn.Linear(16, 3)), (3, 4, 4)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", [*FIRST_ORDER, DiagGGNExact, KFLR])
def test_gradient_of_a_field(kind: type[Extension], name: str):
    make, shape = MODELS[name]
    model, x = extend(make().double()), torch.randn(*shape).double()
    y = torch.randint(model(x).shape[1], shape[:1])
    gradient_is_the_slope(model, lambda: F.cross_entropy(model(x), y), kind())


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
@pytest.mark.parametrize("extra_dims", [False, True])
def test_gradient_of_the_diagonal_for_every_loss(extra_dims: bool, differentiate: Callable):
    """The root of the loss Hessian depends on the parameters, too."""
    for lossfunc in [nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.BCEWithLogitsLoss()]:
        model = extend(nn.Sequential(mlp(4, 5, 3), *([Lambda(channels_first)] if extra_dims else [])).double())
        x = torch.randn(3, 2, 4).double() if extra_dims else torch.randn(3, 4).double()
        z = model(x).detach()
        y = torch.randint(3, (3, *z.shape[2:])) if isinstance(lossfunc, nn.CrossEntropyLoss) else torch.rand_like(z)
        loss = lambda of=lossfunc, model=model, x=x, y=y: of(model(x), y)  # noqa: E731
        gradient_is_the_slope(model, loss, DiagGGNExact(), differentiate)


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
@pytest.mark.parametrize(
    ("middle", "extension", "message"),
    [
        (nn.LayerNorm(4), DiagHessian(), "PyTorch's third derivative of layer norm is wrong, so diag_h cannot be diff"),
        (
            weight_norm(nn.Linear(4, 4)),
            BatchGrad(),
            "PyTorch's second derivative of weight norm is wrong, so grad_batch",
        ),
        (weight_norm(nn.Linear(4, 4)), KFLR(), "PyTorch's second derivative of weight norm is wrong, so kflr cannot"),
    ],
    ids=["LayerNorm-diag_h", "weight_norm-grad_batch", "weight_norm-kflr"],
)
def test_what_pytorch_differentiates_wrongly_is_refused(
    middle: nn.Module, extension: Extension, message: str, differentiate: Callable
):
    model = extend(nn.Sequential(nn.Linear(3, 4), copy.deepcopy(middle), nn.Tanh(), nn.Linear(4, 2)))

    def run() -> None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        with backpack(extension):
            differentiate(F.mse_loss(model(torch.randn(2, 3)), torch.randn(2, 2)), trainable)

    with pytest.raises(CurvoptError, match=message):
        run()
    model[1].requires_grad_(False)
    if isinstance(middle, nn.LayerNorm):  # what lies before it is differentiated, too
        model[0].requires_grad_(False)
    run()
    assert hasattr(model[3].weight, extension.field)
