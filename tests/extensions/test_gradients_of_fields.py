"""Fields computed under ``create_graph=True`` can be differentiated, and equal functional definitions then too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import Lambda, Mixer, channels_first, mlp, residual, used_on_tokens_and_pool, used_twice
from torch import Tensor, einsum, nn
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from curvopt import CurvoptError, backpack, extend
from curvopt.extensions import (
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagHessian,
    Extension,
    SumGradSquared,
    Variance,
)

Params = dict[str, Tensor]


def weighted_sum(fields: list[Tensor]) -> Tensor:
    """A scalar that depends on every entry in another way, so that permuted entries show."""
    return sum((field.flatten() * torch.linspace(1, 2, field.numel(), dtype=field.dtype)).sum() for field in fields)


def by_grad(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    torch.autograd.grad(loss, parameters, create_graph=True)


def by_backward(loss: Tensor, parameters: list[nn.Parameter]) -> None:
    loss.backward(create_graph=True)
    for p in parameters:
        p.grad = None


class Setting:
    """A model whose loss is a mean over samples that do not share a normalizer."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, lossfunc: nn.Module):
        self.x, self.y, self.N = x, y, len(x)
        self.plain_model, self.plain_lossfunc = copy.deepcopy(model), copy.deepcopy(lossfunc)
        self.model, self.lossfunc = extend(model), extend(lossfunc)

    def gradient_of(
        self, extension: Extension, fields: Callable[[nn.Parameter], list[Tensor]], differentiate: Callable = by_grad
    ) -> list[Tensor]:
        """Gradient of the weighted sum of a field of all parameters, through the graph of the backward that set it."""
        parameters = list(self.model.parameters())
        with backpack(extension):
            differentiate(self.lossfunc(self.model(self.x), self.y), parameters)
        total = weighted_sum([field for p in parameters for field in fields(p)])
        return list(torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True))

    def check(self, actual: list[Tensor], definition: Callable[[Params], list[Tensor]]) -> None:
        """Compare with the gradient of the weighted sum of what a function of the parameters returns."""
        at = dict(self.plain_model.named_parameters())
        total = weighted_sum(definition(at))
        expected = torch.autograd.grad(total, list(at.values()), allow_unused=True, materialize_grads=True)
        assert any(gradient.any() for gradient in expected)
        for name, a, b in zip(at, actual, expected, strict=True):
            assert_close(
                a, b, rtol=1e-7, atol=1e-9 * float(b.abs().max()) + 1e-14, msg=lambda t, name=name: f"{name}: {t}"
            )

    # definitions, as functions of the parameters

    def output(self, params: Params, x: Tensor) -> Tensor:
        """The model's output for one sample."""
        return functional_call(self.plain_model, params, (x[None],))[0]

    def loss_of_output(self, z: Tensor, y: Tensor) -> Tensor:
        """One sample's term of the loss."""
        return self.plain_lossfunc(z[None], y[None]) / self.N

    def individual_gradients(self, params: Params) -> Params:
        """``[N, *p]``."""
        loss = lambda params, x, y: self.loss_of_output(self.output(params, x), y)  # noqa: E731
        return vmap(grad(loss), (None, 0, 0))(params, self.x, self.y)

    def gauss_newton_blocks(self, params: Params) -> Params:
        """``[P, P]``."""

        def blocks(x: Tensor, y: Tensor) -> Params:
            z = self.output(params, x)
            H = hessian(self.loss_of_output)(z, y).reshape(z.numel(), z.numel())
            jacobians = jacrev(lambda params: self.output(params, x).flatten())(params)
            flat = {name: J.reshape(z.numel(), -1) for name, J in jacobians.items()}
            return {name: einsum("cp,cd,dq->pq", J, H, J) for name, J in flat.items()}

        return {name: block.sum(0) for name, block in vmap(blocks)(self.x, self.y).items()}


# ----------------------------------------------------------------------------------------- quantities of first order


@pytest.mark.parametrize("differentiate", [by_grad, by_backward])
def test_gradient_of_variance_of_a_small_cnn_on_mnist(mnist: tuple[Tensor, Tensor], differentiate: Callable):
    layers = nn.Conv2d(1, 3, 5, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(144, 10)).double()
    setting = Setting(model, *mnist, nn.CrossEntropyLoss())
    actual = setting.gradient_of(Variance(), lambda p: [p.variance], differentiate)
    setting.check(
        actual, lambda params: list(map(FIRST_ORDER[Variance], setting.individual_gradients(params).values()))
    )


FIRST_ORDER: dict[type[Extension], Callable[[Tensor], Tensor]] = {
    BatchGrad: lambda g: g,
    BatchL2Grad: lambda g: g.reshape(len(g), -1).square().sum(1),
    SumGradSquared: lambda g: g.square().sum(0),
    Variance: lambda g: g.var(0, unbiased=False),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(4, 5, 3), (4, 4)),
    "residual": (residual, (4, 4)),
    "a layer used twice": (used_twice, (4, 4)),
    "a layer used on tokens and their mean": (used_on_tokens_and_pool, (4, 2, 4)),
    "tokens, Gram matrices": (
        lambda: nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 3), nn.Flatten()),
        (3, 2, 9),
    ),
    "without a rule": (lambda: nn.Sequential(nn.Linear(4, 3), Mixer(2, 3), nn.Flatten()), (3, 2, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Sigmoid(), nn.Flatten()), (3, 2, 3, 3)),
}


class ComputedWeights(nn.Module):
    """Layers whose weights are computed: entry by entry, from products of matrices, and by rows."""

    def __init__(self):
        super().__init__()
        self.masked, self.rows = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 4))
        self.up, self.down = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, self.masked.exp() * self.masked, self.bias))
        h = torch.tanh(F.linear(h, torch.eye(4).to(h) + self.up @ self.down / 2))
        return F.linear(h, F.normalize(self.rows, dim=1)).flatten(1)


MODELS |= {"computed weights": (ComputedWeights, (4, 4)), "computed weights on tokens": (ComputedWeights, (3, 2, 4))}
by_model = pytest.mark.parametrize("name", MODELS)


def setting_of(name: str) -> Setting:
    make_model, shape = MODELS[name]
    model = make_model().double()
    x = torch.randn(*shape, dtype=torch.float64)
    outputs = model(x).shape[1]
    return Setting(model, x, torch.randint(outputs, shape[:1]), nn.CrossEntropyLoss())


@by_model
def test_gradient_of_a_first_order_quantity(name: str):
    for extension, field in FIRST_ORDER.items():
        setting = setting_of(name)
        actual = setting.gradient_of(extension(), lambda p, name=extension.field: [getattr(p, name)])
        setting.check(
            actual, lambda params, s=setting, f=field: [f(g) for g in s.individual_gradients(params).values()]
        )


# ------------------------------------------------------------------------------------------------ curvature


@by_model
def test_gradient_of_the_gauss_newton_diagonal(name: str):
    gradient_of_the_gauss_newton_diagonal(setting_of(name))


def gradient_of_the_gauss_newton_diagonal(setting: Setting) -> None:
    actual = setting.gradient_of(DiagGGNExact(), lambda p: [p.diag_ggn_exact])
    setting.check(actual, lambda params: [block.diagonal() for block in setting.gauss_newton_blocks(params).values()])


@pytest.mark.parametrize("extra_dims", [False, True])
def test_gradient_of_the_diagonal_for_every_loss(extra_dims: bool):
    """The root of the loss Hessian depends on the parameters, too."""
    for lossfunc in [nn.MSELoss(), nn.CrossEntropyLoss(label_smoothing=0.1), nn.BCEWithLogitsLoss()]:
        model = nn.Sequential(mlp(4, 5, 3), *([Lambda(channels_first)] if extra_dims else [])).double()
        x = torch.randn(3, 2, 4).double() if extra_dims else torch.randn(3, 4).double()
        z = model(x).detach()
        y = torch.randint(3, (3, *z.shape[2:])) if isinstance(lossfunc, nn.CrossEntropyLoss) else torch.rand_like(z)
        setting = Setting(model, x, y, lossfunc)
        gradient_of_the_gauss_newton_diagonal(setting)


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


def test_gradient_of_kronecker_factors_of_an_mlp():
    """With one position per sample the factor B of a weight is the dense block of the bias beside it."""
    setting = setting_of("mlp")

    def factors(params: Params) -> list[Tensor]:
        blocks = setting.gauss_newton_blocks(params)
        model = setting.plain_model
        inputs = {"0": setting.x, "2": model[1](nn.functional.linear(setting.x, params["0.weight"], params["0.bias"]))}
        return [
            factor
            for layer, h in inputs.items()
            for factor in [blocks[f"{layer}.bias"], h.T @ h / setting.N, blocks[f"{layer}.bias"]]
        ]

    setting.check(setting.gradient_of(KFLR(), lambda p: p.kflr), factors)


@by_model
def test_gradient_of_dense_factors(name: str):
    setting = setting_of(name)
    dense = {p for module in setting.model.modules() for p in module.parameters(recurse=False) if p.dim() < 2}
    names = [name for name, p in setting.model.named_parameters() if p in dense]
    actual = setting.gradient_of(KFLR(), lambda p: p.kflr if p in dense else [])
    setting.check(actual, lambda params: [setting.gauss_newton_blocks(params)[name] for name in names])
