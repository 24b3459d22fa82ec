"""What holds for rules beyond the table of cases: random hyper-parameters, reductions, factors, derivatives, errors.

Tests of `core/layers/affine.py`, `core/layers/embedding.py`, `core/layers/norms.py` and `core/layers/recurrent.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import MIDDLE, Problem, Take, in_the_middle
from checks import check_all, gradients_of_each, hessian_diagonals
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.testing import assert_close

from curvopt import backpack, extend
from curvopt.core.products import base
from curvopt.core.products.base import Dense, Jacobian
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import combine
from curvopt.core.record import KEY
from curvopt.errors import CurvoptError
from curvopt.extending import rule_for
from curvopt.extensions import KFAC, KFLR, BatchGrad, BatchL2Grad, DiagGGNMC, DiagHessian, SumGradSquared

N = 3  # samples
few = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------------- convolutions

sizes = st.integers(1, 3)


@st.composite
def convolutions(draw, transposed: bool) -> tuple[nn.Module, Tensor]:
    """A convolution of random hyper-parameters and an input that it takes."""
    dim = draw(st.integers(1, 2 if transposed else 3)) if transposed else draw(st.integers(1, 2))
    pick = lambda values: tuple(draw(values) for _ in range(dim))  # noqa: E731
    groups = draw(st.integers(1, 2))
    kernel, dilation, stride = pick(sizes), pick(st.integers(1, 2)), pick(sizes)
    channels = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options: dict[str, Any] = {"dilation": dilation, "groups": groups, "bias": draw(st.booleans())}
    lengths = pick(st.integers(3, 6))
    if transposed:
        options |= {"stride": stride, "padding": pick(st.integers(0, 2))}
        options["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dim - 1]
    else:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
        if draw(st.booleans()):
            options["padding"] = draw(st.sampled_from(["same", "valid"]))
        else:
            options |= {"stride": stride, "padding": pick(st.integers(0, 2))}
        kind = (nn.Conv1d, nn.Conv2d)[dim - 1]
    module = kind(*channels, kernel, **options).double()
    return module, normal(N, channels[0], *lengths)


@few
@given(st.booleans().flatmap(convolutions))
def test_convolutions(problem):
    module, x = problem
    try:
        assume(module(x).numel() > 0)
    except (RuntimeError, ValueError):  # smaller than the kernel, or padded by more than there is
        assume(False)
    model = in_the_middle(lambda: module, lambda: x)().double()
    check_all(Problem(model, x, torch.randint(2, (N,))))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_has_factors_in_the_order_of_its_axes(groups: int):
    """For one sample with one input position the block is the Kronecker product of the factors."""
    module = nn.ConvTranspose1d(4, 2, 3, groups=groups, bias=False).double()
    model, lossfunc, x = extend(module), extend(nn.MSELoss()), normal(1, 4, 1)
    with backpack(KFLR()):
        lossfunc(model(x), normal(1, 2, 3)).backward()
    first, second = (factor.reshape(groups, *factor.shape[-2:]) for factor in module.weight.kflr)
    J = torch.autograd.functional.jacobian(
        lambda w: F.conv_transpose1d(x, w, groups=groups).flatten(), module.weight.detach()
    ).flatten(1)
    size = J.shape[1] // groups
    for g, (a, b) in enumerate(zip(first, second, strict=True)):
        part = J[:, g * size : (g + 1) * size]
        assert_close(torch.kron(a, b), part.T @ part * (2 / 6))


# ----------------------------------------------------------------------------------------------- embeddings and norms


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_embedding_has_the_factors_of_the_linear_layer_on_one_hot_words(approx):
    x, left = torch.randint(5, (N, 4)), normal(2, N, 4, 3)
    one_hot = F.one_hot(x, 5).double()
    lookup = Lookup(left.flatten(1, 2), x.flatten(), torch.arange(N).repeat_interleave(4), N, torch.Size([5, 3]))
    outer = Outer(left[:, :, None], one_hot[:, None], torch.Size([5, 3]), transposed=True)
    assert_close(lookup.dense(), outer.dense())
    assert_close(lookup.output_factor(approx), outer.output_factor(approx))
    assert_close(lookup.input_factor(approx), outer.input_factor(approx).diagonal())


def test_large_vocabulary_takes_no_memory_per_sample():
    model, lossfunc = extend(nn.Embedding(2_000_000, 2, sparse=True)), extend(nn.MSELoss())
    x = torch.randint(2_000_000, (64, 16))
    with backpack(SumGradSquared(), BatchL2Grad(), KFAC(), DiagGGNMC()):
        lossfunc(model(x), torch.randn(64, 16, 2)).backward()
    A, B = model.weight.kfac
    assert A.shape == (2_000_000,) and B.shape == (2, 2)
    assert_close(A.sum(), torch.tensor(1.0))


def test_train_mode_batchnorm_takes_statistics_as_constants():
    module = extend(nn.BatchNorm2d(2).double())
    x, vectors = normal(N, 2, 3, 4), normal(2, N, 2, 3, 4)
    out = module(x)
    running = copy.deepcopy(module.state_dict())
    use = out.grad_fn.metadata[KEY][0][0]
    jacobians = rule_for(module).jac_t(use, [vectors], ["weight", "bias"], N)
    assert_close(jacobians["weight"].dense(), (vectors * out.detach()).sum((3, 4)))  # fresh: weight 1, bias 0
    assert_close(jacobians["bias"].dense(), vectors.sum((3, 4)))
    assert_close(module.state_dict(), running)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("trained", ["all", "weight_ih_l1", "weight_hh_l0"])
def test_layers_of_which_some_are_frozen(trained: str, dropout: float):
    """Masks of dropout before frozen layers are not in the graph, so operations are read off it."""
    model = nn.Sequential(Take(nn.LSTM(2, 3, 3, dropout=dropout, batch_first=True), 0), nn.Linear(3, 2)).double()
    for name, p in model[0].module.named_parameters():
        p.requires_grad_(trained in ("all", name))
    extend(model)
    with backpack(BatchGrad(), KFLR(), DiagHessian()):
        out = model(normal(N, 4, 2))
        out.square().sum().backward(retain_graph=True)
    params = [p for p in model.parameters() if p.requires_grad]
    assert_close([p.grad_batch for p in params], gradients_of_each(out.square().flatten(1).sum(1), params))
    assert_close([p.diag_h for p in params], hessian_diagonals(out.square().sum(), params))


def test_the_rule_of_recurrent_modules_has_the_axes_of_their_outputs_and_all_their_weights():
    module = extend(nn.LSTM(2, 3, 2, bias=False, bidirectional=True, batch_first=True).double())
    out, states = module(normal(N, 4, 2))
    use, rule, vectors = out.grad_fn.metadata[KEY][0][0], rule_for(module), normal(2, *out.shape)
    assert [rule.output_axis(use, i) for i in range(3)] == [0, 1, 1]
    use.cache["nodes"] = [z.grad_fn for z in (out, *states)]
    names, parameters = zip(*module.named_parameters(), strict=True)
    jacobians = rule.jac_t(use, [vectors, None, None], list(names), N)
    expected = [gradients_of_each((out * v).flatten(1).sum(1), parameters) for v in vectors]
    for name, *rows in zip(names, *expected, strict=True):
        assert_close(jacobians[name].dense(), torch.stack(rows))


# ------------------------------------------------------------------------------------------------------- which rule

WITHOUT_A_RULE = (
    "weight-norm weight-norm-norm weight-norm-old orthogonal spectral-norm doubled doubled-recurrence containers "
    "bias-of-no-axis bias-of-one-axis bias-of-two-axes convtranspose-other-kernel"
).split()


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_modules_without_a_rule(name: str):
    assert rule_for(MIDDLE[name][0]()) is None


@pytest.mark.parametrize("name", [name for name in MIDDLE if name.startswith("attention")])
def test_matrices_of_attention_have_two_factors(name: str):
    make, make_input = MIDDLE[name]
    model = extend(make().double())
    with backpack(KFLR()):
        model(make_input()).square().sum().backward()
    for p in model.parameters():
        assert p.dim() != 2 or [len(factor) for factor in p.kflr] == list(p.shape)


# ------------------------------------------------------------------------------------------- reductions of random sizes


def check_reductions(jacobian: Jacobian) -> None:
    """Those of the dense Jacobian, and products with it, without weights of vectors and samples and with them."""
    J = jacobian.dense()
    V, n = J.shape[:2]
    assert (jacobian.V, jacobian.N, jacobian.shape) == (V, n, J.shape[2:])
    assert_close(jacobian.sum_batch(), J.sum(1))
    assert_close(jacobian.squares(), J.square().sum((0, 1)))
    assert_close(jacobian.squares(per_sample=True), J.square().sum(0))
    assert_close(jacobian.norms2(), J.reshape(V, n, -1).square().sum(2))
    expected, directions, coefficients = Dense(J), normal(2, *jacobian.shape), normal(2, V, n)
    for weights in (None, normal(V, n)):
        jacobian.weights = expected.weights = weights
        assert_close(jacobian.project(directions), expected.project(directions))
        assert_close(jacobian.expand(coefficients), expected.expand(coefficients))
        assert_close(jacobian.matmul(directions), expected.matmul(directions))
    jacobian.weights = None


@few
@given(V=sizes, n=sizes, G=sizes, S=st.sampled_from([1, 2, 5, 9]), O=st.integers(1, 12), I=st.integers(1, 12),
       transposed=st.booleans(), approx=st.sampled_from(["expand", "reduce"]))  # fmt: skip
def test_outer(V, n, G, S, O, I, transposed, approx):  # noqa: E741
    left, right = normal(V, n, G, S, O), normal(n, G, S, I)
    letters = "vngio" if transposed else "vngoi"
    J = torch.einsum(f"vngso,ngsi->{letters}", left, right)
    shape = torch.Size([G * J.shape[3], J.shape[4]])
    outer = Outer(left, right, shape, transposed)
    assert_close(outer.dense(), J.reshape(V, n, *shape))
    with torch.set_grad_enabled(V % 2 == 0):
        check_reductions(outer)
    left, right = (left, right) if approx == "expand" else (left.sum(3, True), right.mean(2, True))
    squeeze = (lambda factor: factor[0]) if G == 1 else (lambda factor: factor)
    assert_close(outer.output_factor(approx), squeeze(torch.einsum("vngso,vngsp->gop", left, left)))
    assert_close(
        outer.input_factor(approx), squeeze(torch.einsum("ngsi,ngsj->gij", right, right) / (n * right.shape[2]))
    )


@few
@given(V=sizes, n=sizes, P=st.integers(0, 12), D=sizes, rows=sizes)
def test_lookup(V, n, P, D, rows):
    left, picked, samples = normal(V, P, D), torch.randint(rows, (P,)), torch.randint(n, (P,))
    lookup = Lookup(left, picked, samples, n, torch.Size([rows, D]))
    J = torch.zeros(V, n, rows, D, dtype=torch.float64)
    for p in range(P):
        J[:, samples[p], picked[p]] += left[:, p]
    assert_close(lookup.dense(), J)
    check_reductions(lookup)


@few
@given(V=sizes, n=sizes, shape=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_dense(V, n, shape):
    dense = Dense(normal(V, n, *shape))
    check_reductions(dense)
    flat = dense.dense().flatten(2).flatten(0, 1)
    assert_close(dense.output_factor(), flat.T @ flat)
    with pytest.MonkeyPatch.context() as patched:  # of more entries it is the diagonal
        patched.setattr(base, "DENSE_BLOCK_LIMIT", 0)
        assert_close(dense.output_factor(), flat.square().sum(0))


def test_combined_uses_add_up():
    shape, samples = torch.Size([4, 3]), torch.arange(N)
    embeddings = [Lookup(normal(2, N, 3), torch.randint(4, (N,)), samples, N, shape) for _ in range(2)]
    matrices = [Outer(normal(2, N, 1, S, 4), normal(N, 1, S, 3), shape) for S in (1, 2)]
    flipped = Outer(normal(2, N, 1, 2, 3), normal(N, 1, 2, 4), shape, transposed=True)
    for parts in (embeddings, matrices, [*embeddings, *matrices], [*matrices, flipped]):
        together = combine(parts)
        assert_close(together.dense(), sum(part.dense() for part in parts))
        check_reductions(together)
    assert isinstance(combine(embeddings), Lookup) and isinstance(combine(matrices), Outer)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.Linear(3, 3), (3,)),
        (nn.Conv2d(2, 2, 1), (2, 3, 3)),
        (nn.ConvTranspose1d(2, 2, 1), (2, 3)),
        (nn.LayerNorm(3), (3,)),
        (nn.InstanceNorm1d(3, affine=True), (3, 4)),
        (nn.LSTM(3, 3), (4, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_inputs_without_a_batch_axis_are_refused(module: nn.Module, shape: tuple[int, ...]):
    model = extend(nn.Sequential(module))
    out = model(torch.randn(shape))
    out = out if isinstance(out, Tensor) else out[0]
    with pytest.raises(CurvoptError, match=rf"0 \({type(module).__name__}\).*no batch axis.*unsqueeze"):
        with backpack(BatchGrad()):
            out.square().sum().backward()


@pytest.mark.parametrize(
    "module, inputs, message",
    [
        (nn.Embedding(3, 2, scale_grad_by_freq=True), (torch.ones(2, 3, dtype=torch.long),), "scale_grad_by_freq"),
        (nn.EmbeddingBag(3, 2, mode="max"), (torch.ones(2, 3, dtype=torch.long),), "amax"),
    ],
    ids=["scale-by-frequency", "bag-max"],
)
def test_calls_that_cannot_be_answered_are_refused(module: nn.Module, inputs: tuple, message: str):
    extend(module)
    out = module(*inputs)
    out = out if isinstance(out, Tensor) else out[0]
    with pytest.raises(CurvoptError, match=message):
        with backpack(BatchGrad()):
            out.square().sum().backward()


def test_rows_of_packed_data_are_samples_where_the_model_gets_them_packed():
    model = extend(nn.LSTM(2, 2).double())
    packed = pack_padded_sequence(normal(4, N, 2), torch.tensor([4, 2, 1], device="cpu"))
    output, _ = model(packed)
    assert isinstance(output, PackedSequence)
    with backpack(BatchL2Grad()):
        output.data.square().sum().backward(retain_graph=True)
    for p in model.parameters():
        rows = [torch.autograd.grad(row.square().sum(), p, retain_graph=True)[0] for row in output.data]
        assert_close(p.batch_l2, torch.stack([row.square().sum() for row in rows]))


@pytest.mark.parametrize(
    "norm", [nn.RMSNorm(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.PReLU(), nn.BatchNorm1d(4).eval()], ids=str
)
def test_inputs_of_half_precision_are_there_in_the_backward(norm: nn.Module) -> None:
    """Some operations keep a copy in single precision in place of their input, which is gone then."""
    torch.manual_seed(0)
    model = extend(nn.Sequential(nn.Embedding(5, 4), copy.deepcopy(norm), nn.Linear(4, 3)).bfloat16())
    with backpack(BatchGrad()):
        F.cross_entropy(model(torch.randint(5, (6,))).float(), torch.randint(3, (6,))).backward()
    for p in model.parameters():
        assert_close(p.grad_batch.float().sum(0), p.grad.float(), atol=0.01, rtol=0.02)
