"""Every rule gives what autograd gives sample by sample, every reduction what it means for dense Jacobians."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import changed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

from curvopt import backpack, extend
from curvopt.core.products import base
from curvopt.core.products.base import Dense, Jacobian
from curvopt.core.products.lookup import Lookup
from curvopt.core.products.outer import Outer
from curvopt.core.products.sums import combine
from curvopt.core.record import KEY, ModuleCall
from curvopt.errors import CurvoptError
from curvopt.extending import rule_for
from curvopt.extensions import (
    KFAC,
    KFLR,
    BatchGrad,
    BatchL2Grad,
    DiagGGNExact,
    DiagGGNMC,
    DiagHessian,
    SumGradSquared,
    Variance,
)

N = 3  # samples
few = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

# ------------------------------------------------------------------------------------------- one call and its Jacobians


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass
class Call:
    """A call of a module; ``axes`` are the batch axes of its outputs, all 0 where not given."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple]
    axes: tuple[int, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def record(call: Call) -> tuple[nn.Module, ModuleCall, list[Tensor]]:
    """The module with random parameters, the recorded use, and the outputs that carry a gradient."""
    module = extend(call.make().double())
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    result = module(*call.inputs(), **call.kwargs)
    outputs = [out for out in tree_leaves(result) if isinstance(out, Tensor)]
    return module, next(o for o in outputs if o.grad_fn is not None).grad_fn.metadata[KEY][0][0], outputs


def sample_by_sample(module, outputs: list[Tensor], vectors: list[Tensor | None], axes) -> dict[str, Tensor]:
    """``J_n^T v_n`` ``[V, N, *p]``: one plain backward for every vector whose other samples' entries are zeroed."""
    names, params = zip(*module.named_parameters(), strict=True)
    V = next(v.shape[0] for v in vectors if v is not None)
    pairs = [(out, v, axis) for out, v, axis in zip(outputs, vectors, axes, strict=True) if v is not None]
    rows = []
    for v in range(V):
        for n in range(N):
            alone = [
                torch.zeros_like(x[v]).index_copy(axis, torch.tensor([n]), x[v].narrow(axis, n, 1))
                if isinstance(axis, int)
                else x[v] * (axis == n)[:, None]
                for _, x, axis in pairs
            ]
            rows.append(
                torch.autograd.grad(
                    [out for out, _, _ in pairs], params, alone, retain_graph=True, materialize_grads=True
                )
            )
    return {
        name: torch.stack(column).unflatten(0, (V, N))
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def check(call: Call, V: int = 2) -> None:
    """The rule's Jacobians and their reductions are those of plain autograd, for all outputs and for each alone."""
    module, use, outputs = record(call)
    rule = rule_for(module)
    assert rule is not None
    axes = call.axes or (0,) * len(outputs)
    real = [i for i, out in enumerate(outputs) if out.grad_fn is not None]
    if rule.reads_graph:
        use.cache["nodes"] = [outputs[i].grad_fn for i in real]
    for i in real:
        assert torch.equal(torch.as_tensor(rule.output_axis(use, i)), torch.as_tensor(axes[i]))
    for wanted in {tuple(real), *((i,) for i in real)}:
        vectors = [normal(V, *out.shape) if i in wanted else None for i, out in enumerate(outputs)]
        expected = sample_by_sample(module, outputs, vectors, axes)
        with torch.enable_grad():  # some choose other ways where derivatives are asked for
            differentiable = rule.jac_t(use, vectors, list(expected), N)
        with torch.no_grad():
            jacobians = rule.jac_t(use, vectors, list(expected), N)
        assert jacobians.keys() == differentiable.keys() == expected.keys()
        for name, jacobian in differentiable.items():
            assert_close(jacobian.dense().detach(), expected[name])
        for name, jacobian in jacobians.items():
            assert_close(jacobian.dense(), expected[name], msg=lambda text: f"{name}: {text}")  # noqa: B023
            assert jacobian.shape == expected[name].shape[2:]
            check_reductions(jacobian)


def check_reductions(jacobian: Jacobian) -> None:
    J = jacobian.dense()
    V, n = J.shape[:2]
    assert (jacobian.V, jacobian.N, jacobian.shape) == (V, n, J.shape[2:])
    assert_close(jacobian.sum_batch(), J.sum(1))
    assert_close(jacobian.squares(), J.square().sum((0, 1)))
    assert_close(jacobian.squares(per_sample=True), J.square().sum(0))
    assert_close(jacobian.norms2(), J.reshape(V, n, -1).square().sum(2))


def cases(**calls: Call):
    return pytest.mark.parametrize("call", calls.values(), ids=calls.keys())


def one(make: Callable[[], nn.Module], *shape: int, **options) -> Call:
    """A module called with one normal tensor."""
    return Call(make, lambda: (normal(*shape),), **options)


# -------------------------------------------------------------------------------------------------------- affine layers


class Same(nn.Conv2d):
    pass


@cases(
    linear=one(lambda: nn.Linear(4, 3), N, 4),
    linear_no_bias=one(lambda: nn.Linear(4, 3, bias=False), N, 2, 2, 4),
    linear_keyword=Call(lambda: nn.Linear(4, 3), tuple, kwargs={"input": torch.ones(N, 4).double()}),
    bilinear=Call(lambda: nn.Bilinear(3, 2, 4), lambda: (normal(N, 3), normal(N, 2))),
    bilinear_positions=Call(lambda: nn.Bilinear(3, 2, 4, bias=False), lambda: (normal(N, 5, 3), normal(N, 5, 2))),
    bilinear_keywords=Call(
        lambda: nn.Bilinear(3, 2, 4),
        tuple,
        kwargs={"input2": torch.rand(N, 2).double(), "input1": torch.rand(N, 3).double()},
    ),
    conv3d=one(lambda: nn.Conv3d(2, 4, (2, 1, 3), (1, 2, 2), 1, groups=2), N, 2, 3, 4, 3),
    transpose1d=one(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), N, 2, 4),
    transpose2d=one(lambda: nn.ConvTranspose2d(4, 6, (2, 3), (2, 1), groups=2, bias=False), N, 4, 3, 2),
    transpose3d=one(lambda: nn.ConvTranspose3d(2, 2, (1, 2, 2), 2, (0, 1, 0), dilation=(1, 2, 1)), N, 2, 2, 3, 2),
    transpose_one_number=one(lambda: nn.ConvTranspose2d(2, 3, 3, stride=(2,), padding=(1,), dilation=(2,)), N, 2, 3, 2),
    transpose_assigned=one(lambda: changed(nn.ConvTranspose2d(2, 3, 3, padding=1), stride=2, dilation=2), N, 2, 3, 2),
    subclass=one(lambda: Same(2, 3, 2), N, 2, 3, 3),
    transpose_output_size=Call(lambda: nn.ConvTranspose2d(2, 3, 3, stride=3), lambda: (normal(N, 2, 3, 2), [11, 7])),
)
def test_affine(call: Call):
    check(call)


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


def fits(module: nn.Module, x: Tensor) -> bool:
    try:
        return module(x).numel() > 0
    except (RuntimeError, ValueError):  # smaller than the kernel, or padded by more than there is
        return False


@few
@given(convolutions(transposed=False))
def test_convolution(problem):
    assume(fits(*problem))
    check(Call(lambda: problem[0], lambda: (problem[1],)), V=1)


@few
@given(convolutions(transposed=True))
def test_transposed_convolution(problem):
    assume(fits(*problem))
    check(Call(lambda: problem[0], lambda: (problem[1],)), V=1)


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


# ----------------------------------------------------------------------------------------------------------- embeddings


def words(*shape: int, largest: int = 5) -> Tensor:
    return torch.randint(largest, shape)


def bag(mode: str, **options) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(5, 2, mode=mode, **options)


OFFSETS = torch.tensor([0, 4, 4])  # the second bag is empty


@cases(
    one_word=Call(lambda: nn.Embedding(5, 2), lambda: (words(N),)),
    sentence=Call(lambda: nn.Embedding(5, 2), lambda: (words(N, 7),)),
    padded=Call(lambda: nn.Embedding(5, 2, padding_idx=1), lambda: (words(N, 7, largest=3),)),
    max_norm=Call(lambda: nn.Embedding(5, 2, max_norm=0.5), lambda: (words(N, 2, 3),)),
    bag=Call(bag("sum"), lambda: (words(N, 4),)),
    bag_mean=Call(bag("mean", padding_idx=1), lambda: (words(N, 6, largest=3),)),
    bag_offsets=Call(bag("mean"), lambda: (words(7), OFFSETS)),
    bag_last_offset=Call(bag("sum", include_last_offset=True), lambda: (words(7), torch.tensor([0, 4, 4, 7]))),
    bag_weights=Call(bag("sum"), lambda: (words(7), OFFSETS, normal(7))),
)
def test_embedding(call: Call):
    check(call)


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_embedding_has_the_factors_of_the_linear_layer_on_one_hot_words(approx):
    x, left = words(N, 4), normal(2, N, 4, 3)
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


# --------------------------------------------------------------------------------------------------------- scale layers


def trained(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """In eval mode, with running statistics that are not the initial ones."""

    def build() -> nn.Module:
        module = make().eval()
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2.0)
        return module

    return build


@cases(
    batchnorm1d=one(trained(lambda: nn.BatchNorm1d(2)), N, 2),
    batchnorm1d_length=one(trained(lambda: nn.BatchNorm1d(2)), N, 2, 4),
    batchnorm2d=one(trained(lambda: nn.BatchNorm2d(2)), N, 2, 4, 3),
    batchnorm3d_one_channel=one(trained(lambda: nn.BatchNorm3d(1)), N, 1, 2, 2, 2),
    instancenorm1d=one(lambda: nn.InstanceNorm1d(2, affine=True), N, 2, 4),
    instancenorm2d_train=one(lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), N, 2, 4, 3),
    instancenorm3d_eval=one(
        trained(lambda: nn.InstanceNorm3d(2, affine=True, track_running_stats=True)), N, 2, 2, 2, 3
    ),
    groupnorm=one(lambda: nn.GroupNorm(2, 4), N, 4, 3, 2),
    groupnorm_flat=one(lambda: nn.GroupNorm(2, 4), N, 4),
    layernorm=one(lambda: nn.LayerNorm(4), N, 4),
    layernorm_two_axes=one(lambda: nn.LayerNorm((3, 4)), N, 2, 3, 4),
    layernorm_no_bias=one(lambda: nn.LayerNorm(4, bias=False), N, 2, 2, 4),
    rmsnorm=one(lambda: nn.RMSNorm(4), N, 3, 4),
    rmsnorm_eps=one(lambda: nn.RMSNorm((2, 4), eps=0.1), N, 2, 4),
    prelu=one(lambda: nn.PReLU(), N, 4, 2),
    prelu_vector=one(lambda: nn.PReLU(), N),
    prelu_channels=one(lambda: nn.PReLU(4), N, 4, 2, 2),
    prelu_features=one(lambda: nn.PReLU(4), N, 4),
)
def test_scale(call: Call):
    check(call)


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


# ------------------------------------------------------------------------------------------------------- recurrent nets

KINDS = [nn.RNN, nn.LSTM, nn.GRU]


def state(kind: type[nn.Module], layers: int) -> Any:
    h = normal(layers, N, 2)
    return (h, normal(layers, N, 2)) if kind is nn.LSTM else h


# options that only one kind has
ONLY = {"nonlinearity": (nn.RNN, nn.RNNCell)}


def kinds_and_options(kinds: list[type[nn.Module]], options: list[dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(kind, some, id="-".join([kind.__name__, *some]))
        for some in options
        for kind in kinds
        if all(kind in ONLY.get(option, kinds) for option in some)
    ]


@pytest.mark.parametrize(
    ("kind", "options"),
    kinds_and_options(
        KINDS,
        [
            {"batch_first": True},
            {"bias": False},
            {"num_layers": 2, "bidirectional": True, "batch_first": True},
            {"num_layers": 2, "bidirectional": True, "hidden": True},
            {"nonlinearity": "relu", "hidden": True},
            {"num_layers": 2, "dropout": 0.5, "eval": True},
            {"num_layers": 3, "dropout": 0.5, "batch_first": True, "bidirectional": True},
            {"num_layers": 2, "dropout": 0.5, "packed": "unsorted"},
            {"packed": "sorted", "batch_first": True},
            {"packed": "unsorted", "num_layers": 2, "bidirectional": True, "hidden": True},
        ],
    ),
)
def test_recurrent(kind, options):
    options = dict(options)
    hidden, packed, evaluate = options.pop("hidden", False), options.pop("packed", None), options.pop("eval", False)
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    T, first = 4, options.get("batch_first", False)

    def inputs():
        x = normal(N, T, 2) if first else normal(T, N, 2)
        if packed:
            lengths = [4, 3, 1] if packed == "sorted" else [2, 4, 2]
            x = pack_padded_sequence(x, torch.tensor(lengths, device="cpu"), first, enforce_sorted=packed == "sorted")
        return (x, state(kind, layers)) if hidden else (x,)

    make = lambda: kind(2, 2, **options).train(not evaluate)  # noqa: E731
    states = (1,) * (2 if kind is nn.LSTM else 1)
    if not packed:
        check(Call(make, inputs, axes=(0 if first else 1, *states)))
        return
    lengths = torch.tensor([4, 3, 1] if packed == "sorted" else [2, 4, 2], device="cpu")
    of_sample = pack_padded_sequence(
        torch.arange(N)[:, None, None].expand(N, T, 1), lengths, True, enforce_sorted=packed == "sorted"
    )
    integers = (0,) * (1 if packed == "sorted" else 3)
    check(Call(make, inputs, axes=(of_sample.data.flatten(), *integers, *states)))


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_of_single_packed_steps(kind):
    model = extend(nn.Sequential(kind(2, 3, 2, dropout=0.5), Take(0, 0), nn.Linear(3, 2)).double())
    with backpack(BatchGrad()):
        out = model(pack_padded_sequence(normal(1, N, 2), torch.ones(N, device="cpu")))
        out.square().sum().backward(retain_graph=True)
    for p in model.parameters():
        for n in range(N):
            assert_close(p.grad_batch[n], torch.autograd.grad(out[n].square().sum(), p, retain_graph=True)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("trained", ["all", "weight_ih_l1", "weight_hh_l0"])
def test_layers_of_which_some_are_frozen(trained: str, dropout: float):
    """Masks of dropout before frozen layers are not in the graph, so operations are read off it."""
    model = nn.Sequential(nn.LSTM(2, 3, 3, dropout=dropout, batch_first=True), Take(0), nn.Linear(3, 2)).double()
    for name, p in model[0].named_parameters():
        p.requires_grad_(trained in ("all", name))
    extend(model)
    with backpack(BatchGrad(), KFLR(), DiagHessian()):
        out = model(normal(N, 4, 2))
        out.square().sum().backward(retain_graph=True)
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        for n in range(N):
            (expected,) = torch.autograd.grad(out[n].square().sum(), p, retain_graph=True)
            assert_close(p.grad_batch[n], expected)
        (grad,) = torch.autograd.grad(out.square().sum(), p, create_graph=True)
        rows = [torch.autograd.grad(g, p, retain_graph=True)[0].flatten()[i] for i, g in enumerate(grad.flatten())]
        assert_close(p.diag_h.flatten(), torch.stack(rows))


@pytest.mark.parametrize(
    ("kind", "options"),
    kinds_and_options([nn.RNNCell, nn.LSTMCell, nn.GRUCell], [{}, {"bias": False}, {"nonlinearity": "relu"}]),
)
@pytest.mark.parametrize("given_state", [False, True])
def test_cell(kind, options, given_state):
    h = (normal(N, 2), normal(N, 2)) if kind is nn.LSTMCell else normal(N, 2)
    model = nn.Sequential(Calling(kind(3, 2, **options), h if given_state else None)).double()
    check_fields(model, normal(N, 3))


# ------------------------------------------------------------------------------------------------------------ attention

CAUSAL = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
PADDING = torch.tensor([[False] * 4, [False, False, True, True], [False, True, False, False]])


class Attending(nn.Module):
    """Attention with 2 heads over 4 tokens; keys and values are the queries, one other tensor, or two."""

    def __init__(self, make: dict, kwargs: dict | None = None, keys: str = "self"):
        super().__init__()
        self.attention, self.kwargs, self.keys = nn.MultiheadAttention(4, 2, **make), kwargs or {}, keys

    def forward(self, x: Tensor) -> Tensor:
        """All outputs ``[N, *]``, of inputs ``[N, T, 4]``."""
        module, first = self.attention, self.attention.batch_first
        x = x if first else x.transpose(0, 1)
        other = x.flip(0 if not first else 1).tanh()
        k, v = other[..., : module.kdim], x.sin()[..., -module.vdim :]
        q, k, v = {"self": (x, x, x), "key=value": (x, other, other), "all": (x, k, v)}[self.keys]
        out, weights = module(q, k, v, **self.kwargs)
        out = out if first else out.transpose(0, 1)
        return torch.cat([part.flatten(1) for part in (out, weights) if part is not None], 1)


def attention(make: dict, kwargs: dict | None = None, keys: str = "self") -> Callable[[], Attending]:
    return partial(Attending, make, kwargs, keys)


ATTENTION = dict(
    plain=attention({}),
    batch_first=attention({"batch_first": True}),
    no_bias=attention({"bias": False}),
    no_weights=attention({"batch_first": True}, {"need_weights": False}),
    weights_per_head=attention({"batch_first": True}, {"average_attn_weights": False}),
    key_is_value=attention({}, keys="key=value"),
    all_different=attention({"batch_first": True}, keys="all"),
    kdim_vdim=attention({"kdim": 3, "vdim": 2}, keys="all"),
    kdim_vdim_no_bias=attention({"kdim": 3, "vdim": 2, "bias": False}, keys="all"),
    bias_kv=attention({"add_bias_kv": True, "batch_first": True}, keys="key=value"),
    zero_attention=attention({"add_zero_attn": True, "add_bias_kv": True}),
    causal=attention({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    causal_boolean=attention({}, {"attn_mask": CAUSAL == -torch.inf}),
    mask_per_head=attention({}, {"attn_mask": torch.rand(2 * N, 4, 4).double()}),
    padding=attention({"batch_first": True}, {"key_padding_mask": PADDING}),
    padding_and_mask=attention(
        {"add_bias_kv": True}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL == -torch.inf, "need_weights": False}
    ),
    dropout=attention({"dropout": 0.4, "batch_first": True}),
    dropout_no_weights=attention({"dropout": 0.4}, {"need_weights": False}),
)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str):
    model = ATTENTION[name]()
    check_fields(model.double(), normal(N, 4, 4))
    matrices = [p for p in model.attention.parameters() if p.dim() == 2]
    assert all([len(factor) for factor in p.kflr] == list(p.shape) for p in matrices)


# --------------------------------------------------------------------------------- modules for which no rule may answer


class Calling(nn.Module):
    """A cell with a state; all of the new one."""

    def __init__(self, cell: nn.Module, state: Any):
        super().__init__()
        self.cell, self.state = cell, state

    def forward(self, x: Tensor) -> Tensor:
        new = self.cell(x, self.state)
        return new if isinstance(new, Tensor) else torch.cat(new, 1)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class DoubledRecurrence(nn.GRU):
    def forward(self, input, hx=None):
        return 2 * super().forward(input, hx)[0]


class Lists(nn.Module):
    """Parameters in containers that have no forward of their own."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList([nn.Parameter(torch.ones(4, 4)) for _ in range(2)])
        self.vectors = nn.ParameterDict({"shift": nn.Parameter(torch.ones(4))})

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = torch.tanh(x @ matrix + self.vectors["shift"])
        return x


def biased(shape: tuple[int, ...]) -> nn.Module:
    """A linear layer with a bias that is broadcast."""
    module = nn.Linear(4, 3)
    module.bias = nn.Parameter(torch.ones(shape))
    return module


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 3).double())


@cases(
    overridden=one(lambda: Doubled(4, 3), N, 2, 4),
    overridden_recurrence=one(lambda: DoubledRecurrence(2, 2, batch_first=True), N, 4, 2),
    containers=one(Lists, N, 4),
    weight_norm=one(lambda: parametrizations.weight_norm(nn.Conv2d(2, 3, 2)), N, 2, 3, 3),
    weight_norm_norm_layer=one(lambda: parametrizations.weight_norm(nn.LayerNorm(4)), N, 2, 4),
    spectral_norm=one(lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), N, 4),
    orthogonal=one(lambda: parametrizations.orthogonal(nn.Linear(4, 4)), N, 4),
    old_weight_norm=one(old_weight_norm, N, 4),
    **{f"bias_of_shape_{shape}": one(partial(biased, shape), N, 2, 4) for shape in [(), (1,), (1, 3)]},
    transpose_other_kernel=one(
        lambda: changed(nn.ConvTranspose2d(2, 3, (3, 1)), weight=nn.Parameter(torch.randn(2, 3, 1, 3))), *(N, 2, 3, 3)
    ),
)
def test_modules_without_a_rule(call: Call):
    module = call.make().double()
    assert rule_for(module) is None
    check_fields(nn.Sequential(module, nn.Flatten()), *call.inputs())


# ------------------------------------------------------------------------------------------- reductions of random sizes


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
    embeddings = [Lookup(normal(2, N, 3), words(N, largest=4), samples, N, shape) for _ in range(2)]
    matrices = [Outer(normal(2, N, 1, S, 4), normal(N, 1, S, 3), shape) for S in (1, 2)]
    flipped = Outer(normal(2, N, 1, 2, 3), normal(N, 1, 2, 4), shape, transposed=True)
    for parts in (embeddings, matrices, [*embeddings, *matrices], [*matrices, flipped]):
        together = combine(parts)
        assert_close(together.dense(), sum(part.dense() for part in parts))
        check_reductions(together)
    assert isinstance(combine(embeddings), Lookup) and isinstance(combine(matrices), Outer)


# --------------------------------------------------------------------------------------------------- fields, end to end


class Take(nn.Module):
    """One of several outputs."""

    def __init__(self, *which):
        super().__init__()
        self.which = which

    def forward(self, outputs):
        for i in self.which:
            outputs = outputs[i]
        return outputs


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "decoder": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 3, 2, 1, 1, groups=2), nn.PReLU(4), nn.GroupNorm(2, 4),
                                      nn.ConvTranspose2d(4, 2, 2, dilation=2), nn.Flatten()),
                lambda: normal(N, 2, 2, 3)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True), Take(0), nn.RMSNorm(6),
                                        nn.GRU(6, 3, batch_first=True), Take(1, 0), nn.Linear(3, 3)),
                  lambda: normal(N, 4, 4)),
    "attention": (lambda: nn.Sequential(ATTENTION["no_weights"](), nn.Linear(16, 3)), lambda: normal(N, 4, 4)),
}  # fmt: skip


def check_fields(model: nn.Module, x: Tensor) -> None:
    """Fields of every parameter are those from the Jacobian of the outputs by plain autograd, for a squared error."""
    lossfunc = extend(nn.MSELoss(reduction="sum"))
    extend(model)
    z = model(x)
    y = torch.randn_like(z)
    with backpack(BatchGrad(), BatchL2Grad(), SumGradSquared(), Variance(), DiagGGNExact(), KFLR(), KFAC()):
        lossfunc(z, y).backward(retain_graph=True)
    residual = 2 * (z - y).detach()
    for path, p in model.named_parameters():
        rows = [torch.autograd.grad(out, p, retain_graph=True)[0].to_dense() for out in z.flatten()]
        J = torch.stack(rows).unflatten(0, z.shape)  # [N, C, *p]
        g = torch.einsum("nc,nc...->n...", residual, J)
        assert_close(p.grad_batch, g, msg=lambda text: f"{path}.grad_batch: {text}")  # noqa: B023
        assert_close(p.batch_l2, g.reshape(len(g), -1).square().sum(1))
        assert_close(p.sum_grad_squared, g.square().sum(0))
        assert_close(p.variance, g.var(0, unbiased=False))
        diagonal = 2 * J.square().sum((0, 1))
        assert_close(p.diag_ggn_exact, diagonal, msg=lambda text: f"{path}.diag_ggn_exact: {text}")  # noqa: B023
        entries = 1
        for factor in p.kflr:
            entries *= len(factor)
        groups = p.kflr[0].shape[0] if p.kflr[0].dim() == 3 else 1
        assert (entries if groups == 1 else p.numel()) == p.numel()
        if len(p.kflr) == 1:
            flat = J.reshape(z.numel(), -1)
            assert_close(p.kflr[0], 2 * flat.T @ flat)


@pytest.mark.parametrize("name", NETS)
def test_fields_can_be_differentiated(name: str):
    """Under create_graph the gradient of a field's sum is that of the same sum from plain autograd."""
    make, make_input = NETS[name]
    model, x, lossfunc = extend(make().double()), make_input(), extend(nn.MSELoss(reduction="sum"))
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no second derivative
        z = model(x)
    y = torch.randn_like(z)
    params = list(model.parameters())
    with backpack(BatchGrad(), DiagGGNExact()):
        lossfunc(z, y).backward(create_graph=True)
    fields = sum(p.grad_batch.square().sum() + p.diag_ggn_exact.sum() for p in params)
    expected = 0.0
    for n in range(N):
        one = torch.autograd.grad((z[n] - y[n]).square().sum(), params, create_graph=True)
        expected = expected + sum(g.square().sum() for g in one)
        for c in range(z.shape[1]):
            J = torch.autograd.grad(z[n, c], params, create_graph=True)
            expected = expected + 2 * sum(j.square().sum() for j in J)
    assert_close(fields, expected)
    for field_grad, reference_grad in zip(
        torch.autograd.grad(fields, params, retain_graph=True), torch.autograd.grad(expected, params), strict=True
    ):
        assert_close(field_grad, reference_grad)


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
