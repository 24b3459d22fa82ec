"""The Hessian of any loss, from its graph alone, equals that of `torch.func.hessian`; else there is a named error."""

import pytest
import torch
import torch.nn.functional as F
from cases import Once
from checks import DEVICE, generator
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributions import Categorical, Normal
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from curvopt import backpack, extend
from curvopt.core.losses.any import GenericLoss, Head, loss_weight
from curvopt.errors import CurvoptError
from curvopt.extensions import BatchDiagHessian, DiagGGNExact, DiagHessian

N, C = 4, 3


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


torch.manual_seed(0)
T, Y, ADVANTAGE = randn(N, C), torch.tensor([0, 2, 1, 2]), randn(N)
PIXELS, TOKENS = torch.randint(C, (N, 2, 3)), torch.randint(C, (N, 5))
NC, IMAGE, SEQUENCE, ONE = ((N, C),), ((N, C, 2, 3),), ((N, 5, C),), ((N, 1),)


def ce_in_a_loop(z):
    return sum(F.cross_entropy(z[n], Y[n]) for n in range(N)) / N


def dpo(z):
    chosen, rejected = z.log_softmax(1).gather(1, Y[:, None]), z.log_softmax(1).gather(1, (Y[:, None] + 1) % C)
    return -F.logsigmoid(0.7 * (chosen - rejected)).mean()


def vae(x, mu, logvar):
    return F.mse_loss(x, T) + (0.5 * (mu**2 + logvar.exp() - 1 - logvar)).sum(1).mean()


def learned_variance(x, var, mu, logvar):
    return F.gaussian_nll_loss(x, T, F.softplus(var)) + vae(x, mu, logvar)


#: Losses that random programs do not have: the loss, shapes of the heads, size of the largest block of each sample.
DEFINITE = {
    "huber by hand": (lambda z: torch.where((z - T).abs() < 1, (z - T) ** 2 / 2, (z - T).abs() - 0.5).mean(), NC, 1),
    "smooth l1": (lambda z: F.smooth_l1_loss(z, T), NC, 1),
    "bce of sigmoid": (lambda z: F.binary_cross_entropy(z.sigmoid(), (T > 0).double()), NC, 1),
    "softmax().log()": (lambda z: F.nll_loss(z.softmax(1).log(), Y), NC, C),
    "dpo": (dpo, NC, C),
    "plus activation penalty": (lambda z, h: F.cross_entropy(z, Y) + 0.1 * h.square().mean(), ((N, C), (N, 5)), C),
    "vae": (vae, ((N, C), (N, 2), (N, 2)), 1),
    "on some rows": (lambda z: F.cross_entropy(z[[1, 3]], Y[[1, 3]]), NC, C),
    "in a loop over rows": (ce_in_a_loop, NC, C),
    "on halves": (lambda z: F.softplus(-z[:2]).mean() + F.softplus(z[2:]).mean(), ONE, 1),
    "vector per sample": (lambda z: F.mse_loss(z, T[:, 0]), ((N,),), 1),
    "segmentation": (lambda z: F.nll_loss(z.softmax(1).log(), PIXELS), IMAGE, C),
    "tokens": (lambda z: (z.logsumexp(2) - z.gather(2, TOKENS[..., None])[..., 0]).mean(), SEQUENCE, C),
    "tokens, flat": (lambda z: F.nll_loss(z.flatten(0, 1).softmax(1).log(), TOKENS.flatten()), SEQUENCE, C),
    "heads of one row for each token": (lambda z: F.nll_loss(z.softmax(1).log(), TOKENS.flatten()), ((5 * N, C),), C),
    "mean over tokens, then a norm": (lambda z: z.mean(1).square().sum(1).add(1).sqrt().mean(), SEQUENCE, 5 * C),
}  # fmt: skip
INDEFINITE = {
    "gaussian nll of two heads": (lambda m, v: F.gaussian_nll_loss(m, T, F.softplus(v)), NC * 2, 2),
    "gaussian nll of one head": (
        lambda z: F.gaussian_nll_loss(z[:, :2], T[:, :2], F.softplus(z[:, 2:4])),
        ((N, 4),),
        4,
    ),
    "normal with a scale": (lambda m, s: -Normal(m, s.exp()).log_prob(T).mean(), NC * 2, 2),
    "logistic of a product of heads": (lambda a, b: F.softplus((a * b).sum(1)).mean(), NC * 2, 2 * C),
    "a chain of heads": (lambda a, b, c: (a * b.exp() + b.exp() * c.exp()).mean(), NC * 3, 3),
    "entropy bonus": (lambda z: F.cross_entropy(z, Y) - 3 * Categorical(logits=z).entropy().mean(), NC, C),
    "infonce of fixed keys": (lambda z: F.cross_entropy(5 * F.normalize(z) @ F.normalize(T).T, torch.arange(N)), NC, C),
    "vae with a learned variance": (learned_variance, ((N, C), (N, C), (N, 2), (N, 2)), 2),
    "a probability": (lambda z: -z.sigmoid().mean(), NC, 1),
    "squared probabilities of pixels": (lambda z: z.softmax(1).square().mean(), IMAGE, C),
}
COUPLED = {
    "rmse": (lambda z: F.mse_loss(z, T).sqrt(), NC),
    "infonce with itself": (lambda z: F.cross_entropy(z @ z.T, torch.arange(N)), NC),
    "dice": (lambda z: 1 - 2 * (z.sigmoid() * (T > 0)).sum() / (z.sigmoid().sum() + (T > 0).sum()), NC),
    "batch statistics": (lambda z: ((z - z.mean(0)) ** 2).mean(), NC),
    "pairs of rows": (lambda z: (z[0] * z[1]).sum() + z.square().sum(), NC),
    "two heads, across samples": (lambda a, b: (a * b.flip(0)).mean() + a.exp().mean() + b.exp().mean(), NC * 2),
}


def heads_of(shapes, dtype=torch.float64):
    """Outputs of a small network, and their layouts."""
    torch.manual_seed(1)
    outputs = [1.5 * torch.tanh(nn.Parameter(torch.randn(shape, dtype=dtype))) for shape in shapes]
    return outputs, [Head(get_gradient_edge(z), N) for z in outputs]


def generic(loss, heads, grad=None):
    grad = torch.ones_like(loss) if grad is None else grad
    return GenericLoss([get_gradient_edge(loss)], [grad], heads, sum({head.N for head in heads}))


def by_sample(x, head):
    """``[..., *shape]`` as ``[..., N, D]``."""
    leading = x.shape[: x.dim() - len(head.shape)]
    return x.movedim(len(leading) + head.axis, len(leading)).reshape(*leading, head.N, -1)


def dense(f, outputs, heads):
    """Hessian ``[N, D, N, D]`` of a loss in all entries of the heads."""
    every = tuple(range(len(outputs)))
    hessian = torch.func.hessian(f, argnums=every)(*(z.detach() for z in outputs))
    rows = []
    for row, head in zip(hessian, heads, strict=True):
        row = torch.cat([by_sample(H, h) for H, h in zip(row, heads, strict=True)], -1)  # [*shape, N, D]
        rows.append(row.movedim(head.axis, 0).reshape(N, -1, N, row.shape[-1]))
    return torch.cat(rows, 1)


def together(columns, heads):
    """Columns of all heads ``[v, N, D]``."""
    found = []
    for edges, vectors, weights, *_ in columns:
        parts = dict(zip(edges, vectors, strict=True))
        all_of = [by_sample(parts.get(h.edge, h.new().expand(len(vectors[0]), *h.shape)), h) for h in heads]
        found.append((torch.cat(all_of, 2), torch.ones(len(vectors[0]), N) if weights is None else weights))
    return torch.cat([c for c, _ in found]), torch.cat([w for _, w in found]).double()


def assert_is_dense_hessian(curvature, f, outputs, heads, factor=1.0):
    H = factor * dense(f, outputs, heads)
    blocks = torch.stack([H[n, :, n] for n in range(N)])
    H[range(N), :, range(N)] = 0
    assert H.abs().max() < 1e-14
    columns, weights = together(curvature.signed(size=2), heads)
    found = torch.einsum("vn,vnd,vne->nde", weights, columns, columns)
    torch.testing.assert_close(found, blocks, rtol=1e-9, atol=1e-12)
    assert len(columns) == curvature.num_columns
    return blocks


@pytest.mark.parametrize("name", [*DEFINITE, *INDEFINITE])
def test_gradients_and_columns_are_those_of_the_dense_hessian(name):
    f, shapes, size = (DEFINITE | INDEFINITE)[name]
    outputs, heads = heads_of(shapes)
    loss = f(*outputs)
    curvature = generic(3 * loss, heads, torch.tensor(0.5, dtype=torch.float64))
    for slope, z in zip(curvature.slopes, outputs, strict=True):
        torch.testing.assert_close(slope, 1.5 * torch.autograd.grad(loss, z, retain_graph=True)[0])
    blocks = assert_is_dense_hessian(curvature, f, outputs, heads, 1.5)
    assert max(b.cells.shape[2] for b in curvature.blocks) == size
    if name in DEFINITE:
        columns, weights = together(curvature.root(size=3), heads)
        assert (weights == 1).all()
        torch.testing.assert_close(torch.einsum("vnd,vne->nde", columns, columns), blocks, rtol=1e-9, atol=1e-12)
    else:
        for ask in (lambda: curvature.root(size=3), lambda: curvature.sample(1)):
            with pytest.raises(CurvoptError, match="indefinite.*DiagHessian or HMP, or KFACEmpirical"):
                ask()
    loss.backward()  # the graph is as it was


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_samples_are_refused(name):
    f, shapes = COUPLED[name]
    outputs, heads = heads_of(shapes)
    curvature = generic(f(*outputs), heads)
    assert [s.shape for s in curvature.slopes] == [z.shape for z in outputs]
    for ask in (lambda: curvature.root(size=3), lambda: list(curvature.signed(3)), lambda: curvature.sample(1)):
        with pytest.raises(CurvoptError, match="couples samples.*KFACEmpirical"):
            ask()


def test_softmax_has_one_column_less_than_classes():
    (z,), heads = heads_of(NC)
    assert generic(F.nll_loss(z.softmax(1).log(), Y), heads).num_columns == C - 1


@pytest.mark.parametrize("shape", [(5, N, C), (2, 3 * N)], ids=["steps first", "shares of the second axis"])
def test_samples_along_another_axis(shape):
    def f(z):
        return (z.softmax(-1 if z.dim() == 3 else 0) ** 2).mean()

    (z,), heads = heads_of([shape])
    heads = [heads[0]._replace(axis=1)]
    assert_is_dense_hessian(generic(f(z), heads), f, [z], heads)


def test_a_path_through_another_head_is_cut():
    (a,), heads = heads_of(NC)
    b = (a**3).clone()
    heads = [*heads, Head(get_gradient_edge(b), N)]
    assert_is_dense_hessian(
        generic((a.exp() * b**2).mean(), heads), lambda a, b: (a.exp() * b**2).mean(), [a, b], heads
    )


def test_heads_may_be_leaves_outputs_of_one_node_or_the_loss_itself():
    a, b = (1 * nn.Parameter(randn(N, 2 * C))).split(C, 1)
    leaf, last = nn.Parameter(randn(N, C)), (nn.Parameter(randn(N)) * 2).sum(0, keepdim=True)
    outputs = [a, leaf]
    heads = [Head(get_gradient_edge(z), N) for z in outputs]

    def f(a, leaf):
        return (a.sigmoid() * leaf).mean()

    assert_is_dense_hessian(generic(f(a, leaf), heads), f, outputs, heads)
    assert_is_dense_hessian(generic(f(a, leaf) + b.sum(), heads), f, outputs, heads)  # behind the other output
    ((vector,),) = [columns.vectors for columns in generic(last, [Head(get_gradient_edge(last), 1)]).root(size=5)]
    assert not vector.any()


def test_random_columns_average_to_the_hessian():
    f, shapes, _ = DEFINITE["plus activation penalty"]
    outputs, heads = heads_of(shapes)
    curvature = generic(f(*outputs), heads)
    seeded = generator(0)
    columns, _ = together([([h.edge for h in heads], curvature.sample(2000, seeded), None)], heads)
    products = torch.einsum("vnd,vne->vnde", columns, columns)
    H = dense(f, outputs, heads)
    error = products.mean(0) - torch.stack([H[n, :, n] for n in range(N)])
    assert (error.abs() <= 6 * products.std(0) / 2000**0.5 + 1e-12).all()
    assert (columns.mean(0).abs() <= 6 * columns.std(0) / 2000**0.5).all()
    again = curvature.sample(2000, generator(0))
    assert all(torch.equal(by_sample(s, h), c) for s, h, c in zip(again, heads, columns.split([C, 5], 2), strict=True))


def test_hooks_do_not_run_and_random_numbers_are_left_alone():
    runs = []
    (z,), heads = heads_of(NC)
    z.register_hook(lambda grad: runs.append("output"))
    p = z.softmax(1)
    p.register_hook(lambda grad: runs.append("inside"))
    p.grad_fn.register_hook(lambda *_: runs.append("node"))
    p.grad_fn.register_prehook(lambda *_: runs.append("before node"))
    module = nn.CrossEntropyLoss()
    module.register_full_backward_hook(lambda *_: runs.append("module"))
    loss = p.log().square().mean() + module(z, Y)
    state = torch.get_rng_state()
    curvature = generic(loss, heads)
    assert curvature.slopes and curvature.num_columns and list(curvature.signed(2))
    assert not runs and torch.equal(torch.get_rng_state(), state)
    loss.backward()
    assert sorted(runs) == ["before node", "inside", "module", "node", "output"]


class Cubes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scale, x):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3, x.detach() * 2

    @staticmethod
    def backward(ctx, of_cubes, of_doubles):
        (x,) = ctx.saved_tensors
        return None, ctx.scale * 3 * x**2 * of_cubes + 2 * of_doubles


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum(1)

    @staticmethod
    def backward(ctx, grad):
        return grad[:, None] * ctx.saved_tensors[0].cumsum(1)


def attention(z, backend):
    with sdpa_kernel(backend):
        q = z.reshape(N, 1, C, 1).expand(N, 1, C, 8) + 0
        return F.scaled_dot_product_attention(q, q, q).square().mean()


def in_place(z):
    z = z.clone()
    z[:, 0] *= 2
    z[:, 1].exp_()
    return F.nll_loss(z.softmax(1).log(), Y)


@pytest.mark.parametrize(
    "f",
    [
        lambda z: Cubes.apply(2.0, z)[0].mean(),
        lambda z: checkpoint(lambda z: F.gelu(z).square().mean(), z, use_reentrant=False),
        lambda z: attention(z, SDPBackend.MATH),
        in_place,
    ],
    ids=["custom function", "checkpoint", "attention", "in place"],
)
def test_other_operations_in_the_loss(f):
    (z,), heads = heads_of(NC)
    found = generic(f(z), heads)
    H = torch.autograd.functional.hessian(f, z.detach())
    columns, weights = together(found.signed(9), heads)
    blocks = torch.stack([H[n, :, n] for n in range(N)])
    torch.testing.assert_close(torch.einsum("vn,vnd,vne->nde", weights, columns, columns), blocks)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda z: attention(z, SDPBackend.FLASH_ATTENTION), "no second derivative.*is not implemented.*KFACEmpirical"),
        (lambda z: F.multi_margin_loss(z, Y), "no second derivative.*multi_margin"),
        (lambda z: Once.apply(z).mean(), "no second derivative.*once_differentiable"),
        (lambda z: Wrong.apply(z).mean(), "second derivative of an operation in it is wrong"),
        (lambda z: (z - z.detach()).pow(1.5).mean(), "not finite"),
    ],
    ids=["flash attention", "margin", "once differentiable", "wrong", "not finite"],
)
def test_losses_without_a_second_derivative_are_refused(f, message):
    (z,), heads = heads_of(NC)
    with pytest.raises(CurvoptError, match=message) as raised:
        list(generic(f(z), heads).signed(2))
    assert str(raised.value).count(". ") <= 2


def test_too_large_blocks_are_refused():
    z = 2 * nn.Parameter(randn(2, 5000))
    with pytest.raises(CurvoptError, match="5000 entries.*KFACEmpirical"):
        _ = generic(z.square().sum(1).add(1).sqrt().mean(), [Head(get_gradient_edge(z), 2)]).blocks
    loss = z.square().mean()  # many entries, each by itself
    assert generic(loss, [Head(get_gradient_edge(z), 2)]).num_columns == 5000


def test_a_network_that_diverged_has_curvature_that_is_not_finite():
    z = 2 * nn.Parameter(torch.full((N, C), torch.nan))
    (columns,) = generic(z.logsumexp(1).mean(), [Head(get_gradient_edge(z), N)]).root(size=9)
    assert columns.vectors[0].isnan().any()


def test_under_autocast_blocks_are_as_exact_as_the_loss():
    layer = nn.Linear(5, C)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        z = layer(torch.randn(N, 5))
        loss = F.nll_loss(z.float().softmax(1).log(), Y)
    assert z.dtype == torch.bfloat16
    curvature = generic(loss, [Head(get_gradient_edge(z), N)])
    (vectors,) = torch.cat([columns.vectors[0] for columns in curvature.root(size=9)]).unsqueeze(0)
    p = z.detach().double().softmax(1)
    H = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / N
    torch.testing.assert_close(torch.einsum("vnc,vnd->ncd", vectors, vectors).double(), H, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("confidence", [1, 20, 200])
def test_rounding_errors_of_confident_predictions_are_no_reason_to_refuse(confidence, dtype):
    for seed in range(10):
        torch.manual_seed(seed)
        z = 1 * nn.Parameter((torch.randn(N, C) + confidence * F.one_hot(Y, C)).to(dtype))
        assert generic(F.nll_loss(z.log_softmax(1), Y), [Head(get_gradient_edge(z), N)]).sample(2)[0].isfinite().all()


@pytest.mark.parametrize("rows", [1, N])
def test_rounding_errors_of_half_precision_do_not_couple_samples(rows):
    for seed in range(60):
        torch.manual_seed(seed)
        z = 1 * nn.Parameter(100 * torch.randn(rows, 2).bfloat16())
        assert generic((z.logsumexp(1) - z[:, 0]).mean(), [Head(get_gradient_edge(z), rows)]).blocks


def test_blocks_are_found_in_half_precision():
    for seed in range(30):
        torch.manual_seed(seed)
        z = 1 * nn.Parameter(torch.rand(2, 2).bfloat16())
        loss = (z + 0.5).float().square().sum(1).add(1e-3).sqrt().mean()
        (blocks,) = generic(loss, [Head(get_gradient_edge(z), 2)]).blocks
        assert blocks.cells.shape == (2, 1, 2)


def test_autocast_around_the_backward_changes_nothing():
    z = 1 * nn.Parameter(torch.randn(N, C))
    curvature = [generic((z @ T.float().T).exp().mean(), [Head(get_gradient_edge(z), N)]) for _ in range(2)]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        (inside,) = curvature[0].root(size=9)
    (outside,) = curvature[1].root(size=9)
    assert torch.equal(inside.vectors[0], outside.vectors[0])


@pytest.mark.parametrize(
    ("f", "weight"),
    [
        (lambda z: z.exp().mean(), 1),
        (lambda z: z.exp().sum(), 1),
        (lambda z: z.exp().sum() / N, 1),
        (lambda z: z.exp().mean() / 4, 1 / 4),
        (lambda z: z.exp().sum() / N / 4, 1 / 4),
        (lambda z: 1000 * z.exp().sum(), 1000),
        (lambda z: -z.exp().mean() * 2, 2),
        (lambda z: torch.tensor(3.0) / z.exp().mean(), 1),
        (lambda z: (z.exp().mean() + z.square().sum() / 8) / 2, 1 / 2),
        (lambda z: z.exp().mean(1), 1),
    ],
)
def test_a_loss_weighs_as_means_over_samples_do(f, weight):
    (z,), _ = heads_of(NC)
    loss = f(z)
    found = loss_weight([get_gradient_edge(loss)], [torch.ones_like(loss)], N, None)
    torch.testing.assert_close(found, torch.tensor(weight, dtype=torch.float64))


@pytest.mark.parametrize(
    ("f", "weight"),
    [
        (lambda z: z.exp().sum(), 8),
        (lambda z: z.exp().sum(1).sum() / 8, 1),
        (lambda z: (z.exp().sum() + z.square().sum()) / 8 / 3, 1 / 3),
        (lambda z: (z.exp().sum() - 0.5 * z.sum()) / 4, 2),
        (lambda z: F.mse_loss(z, z.detach() + 1, reduction="sum") - 0.5 * z.exp().sum(), 8),
        (lambda z: 0.1 * z.exp().mean() + 0.2 * z.square().mean(), 1),
        (lambda z: z.exp().mean(0).sum(), 1),
        (lambda z: z.exp().sum() / 100, 1),  # of the tokens that a mask has left, say
        (lambda z: z.exp().mean() + 10 * nn.Parameter(torch.ones(8, 8)).square().sum(), 1),
        (lambda z: z.exp().mean(1).sum() / 16 + nn.Parameter(torch.ones(8, 8)).square().sum(), 1 / 2),  # half a batch
        (lambda z: F.huber_loss(z, z.detach() + 1, reduction="sum") / 16, 1 / 2),
    ],
)
def test_a_sum_over_what_the_network_computes_is_many_means(f, weight):
    z = extend(nn.Linear(5, 3))(torch.randn(8, 5))
    found = loss_weight([get_gradient_edge(f(z))], [torch.ones(())], 8, None)
    torch.testing.assert_close(found, torch.tensor(float(weight)))


def test_several_scalars_and_vectors_may_be_differentiated():
    (z,), heads = heads_of(NC)
    first, second, seeds = z.exp().mean(), z.square().sum(1), randn(N).abs()
    edges = [get_gradient_edge(first), get_gradient_edge(second)]
    curvature = GenericLoss(edges, [torch.tensor(2.0, dtype=torch.float64), seeds], heads, N)
    assert_is_dense_hessian(curvature, lambda z: 2 * z.exp().mean() + (seeds * z.square().sum(1)).sum(), [z], heads)


@pytest.mark.parametrize("known", [True, False])
def test_the_hessian_of_a_known_loss_with_negative_weights(known: bool):
    model = extend(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double())
    x, y, weights = torch.randn(5, 4).double(), torch.randint(3, (5,)), torch.randn(5).double()
    lossfunc = extend(nn.CrossEntropyLoss()) if known else F.cross_entropy

    def loss(z: torch.Tensor) -> torch.Tensor:
        return -lossfunc(z, y) if known else (weights * F.cross_entropy(z, y, reduction="none")).sum()

    with backpack(DiagHessian(), BatchDiagHessian()):
        loss(model(x)).backward()
    values = {name: p.detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        of_one = lambda q, name=name: loss(torch.func.functional_call(model, values | {name: q}, (x,)))  # noqa: E731
        H = torch.func.hessian(of_one)(values[name]).reshape(p.numel(), -1)
        torch.testing.assert_close(p.diag_h.flatten(), H.diagonal())
        torch.testing.assert_close(p.diag_h_batch.sum(0), p.diag_h)
    with pytest.raises(CurvoptError, match="minimised"), backpack(DiagGGNExact()):
        loss(model(x)).backward()
