"""One table of problems on which every promise of the engine is checked.

A row names a model, an input, a loss and how to draw a target for the model's output. A new row is one line in
``CASES``, plus a small module when PyTorch has none that does it; the references in ``reference.py`` need nothing else.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------- inputs, and targets for a given output z


def normal(*shape: int) -> Callable[[], Tensor]:
    """Standard normal input of a shape."""
    return lambda: torch.randn(*shape, dtype=torch.float64)


def values(z: Tensor) -> Tensor:
    """Regression targets."""
    return torch.randn_like(z)


def labels(z: Tensor) -> Tensor:
    """Class indices; classes are dimension 1."""
    return torch.randint(z.shape[1], (z.shape[0], *z.shape[2:]))


def labels_some_ignored(z: Tensor) -> Tensor:
    """Class indices of which the first and every third one after it are ignored."""
    y = labels(z)
    y.view(-1)[::3] = -100
    return y


def labels_some_two(z: Tensor) -> Tensor:
    """Class indices of which the last is 2, for losses that ignore class 2."""
    y = labels(z)
    y.view(-1)[-1] = 2
    return y


def weights_of_classes(z: Tensor) -> Tensor:
    """Positive targets per class that do not sum to one."""
    return 2 * torch.rand_like(z)


def bits(z: Tensor) -> Tensor:
    """Zeros and ones."""
    return torch.randint(2, z.shape).to(z)


def fractions(z: Tensor) -> Tensor:
    """Numbers between zero and one."""
    return torch.rand_like(z)


def row(*numbers: float) -> Tensor:
    """A vector of constants for losses."""
    return torch.tensor(numbers, dtype=torch.float64)


# --------------------------------------------------------------------------------------------------- problems and cases


@dataclass
class Problem:
    """A model in float64 with one batch, ready for a backward pass."""

    model: nn.Module
    x: Tensor
    y: Tensor
    lossfunc: nn.Module = field(default_factory=nn.CrossEntropyLoss)
    scale: float = 1.0

    def loss(self) -> Tensor:
        """The scalar that is differentiated."""
        return self.loss_of_output(self.model(self.x))

    def loss_of_output(self, z: Tensor) -> Tensor:
        """The same scalar as a function of the model's output alone."""
        value = self.lossfunc(z, self.y)
        return value if self.scale == 1.0 else self.scale * value

    def trainable(self) -> dict[str, nn.Parameter]:
        """Named parameters that require a gradient."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class Case:
    """A row of the table; ``problem()`` builds the same problem afresh at every call."""

    name: str
    make_model: Callable[[], nn.Module]
    make_input: Callable[[], Tensor]
    lossfunc: nn.Module = nn.CrossEntropyLoss()  # each problem has a copy
    make_target: Callable[[Tensor], Tensor] = labels
    scale: float = 1.0

    def problem(self, seed: int = 0) -> Problem:
        """A model, input and target drawn with ``seed``; nothing is shared with another call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make_model().double()
            x = self.make_input()
            with torch.no_grad():
                y = self.make_target(model(x))
        return Problem(model, x, y, copy.deepcopy(self.lossfunc), self.scale)


# ------------------------------------------------------------------------------------------------------ building blocks


class Lambda(nn.Module):
    """A function between modules, out of reach of every rule."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Sine(torch.autograd.Function):
    """A function of somebody's own, which can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


class Once(Sine):
    """The same, which says that it cannot."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Sine.backward))


class Net(nn.Module):
    """Modules, parameters and constants by their names, and a function of them and of the inputs.

    A tensor that requires no gradient is the value of a parameter.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            is_value = isinstance(part, Tensor) and not isinstance(part, nn.Parameter) and not part.requires_grad
            setattr(self, name, nn.Parameter(part) if is_value else part)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.function(self, *inputs, **options)


def functional_between() -> nn.Module:
    """Nonlinear functions that are not modules."""
    forward = lambda m, x: m.third(torch.tanh(m.second(F.gelu(m.first(x)))))  # noqa: E731
    return Net(forward, first=nn.Linear(5, 6), second=nn.Linear(6, 4), third=nn.Linear(4, 3))


def residual() -> nn.Module:
    """Linear layers around ``x + f(x)``, where ``+`` is a function."""
    plus = lambda m, x: F.relu(x + m.branch(x))  # noqa: E731
    layers = {"into": nn.Linear(4, 5), "out": nn.Linear(5, 3), "branch": mlp(5, 6, 5, activation=nn.Sigmoid)}
    return Net(lambda m, x: m.out(plus(m, m.into(x))), **layers)


class ResidualConvolution(nn.Module):
    """A branch to which a strided shortcut is added in place."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 2, stride=2))
        self.shortcut = nn.Conv2d(3, 4, 1, stride=2, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        branch = self.branch(x)
        branch += self.shortcut(x)
        return self.head(branch.mean((2, 3)))


def heads() -> nn.Module:
    """One trunk, two heads that are concatenated: the trunk's output has two consumers."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.tanh(m.trunk(x))
        return torch.cat([m.left(h), m.right(h)], dim=1)

    return Net(forward, trunk=nn.Linear(4, 5), left=nn.Linear(5, 2), right=nn.Linear(5, 1, bias=False))


def used_twice() -> nn.Module:
    """One Linear applied twice in a row."""
    forward = lambda m, x: m.out(torch.tanh(m.again(torch.tanh(m.again(x)))))  # noqa: E731
    return Net(forward, again=nn.Linear(4, 4), out=nn.Linear(4, 3))


def used_on_tokens_and_pool() -> nn.Module:
    """One Linear applied to ``[N, T, F]`` and to the mean over tokens ``[N, F]``."""
    forward = lambda m, x: m.out(m.shared(torch.tanh(m.shared(x)).mean(1)))  # noqa: E731
    return Net(forward, shared=nn.Linear(4, 4), out=nn.Linear(4, 2))


def convolution_used_twice() -> nn.Module:
    """One convolution applied at two resolutions."""
    forward = lambda m, x: m.out(m.shared(F.avg_pool2d(torch.tanh(m.shared(x)), 2)).mean((2, 3)))  # noqa: E731
    return Net(forward, shared=nn.Conv2d(2, 2, 3, padding=1), out=nn.Linear(2, 3))


class Mixer(nn.Module):
    """No rule knows this: a causal matrix, a vector and a scalar parameter around an einsum."""

    def __init__(self, tokens: int, features: int):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(tokens, tokens) / tokens**0.5)
        self.gate = nn.Parameter(torch.randn(features))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("st,ntf->nsf", self.mix.tril() * self.temperature, x) * torch.sigmoid(self.gate)


class OwnParametersAndChildren(nn.Module):
    """A block with parameters of its own around children that have rules, as vision transformers have them."""

    def __init__(self, tokens: int = 3, features: int = 4):
        super().__init__()
        self.first_token = nn.Parameter(torch.randn(1, 1, features))
        self.positions = nn.Parameter(torch.randn(tokens + 1, features))
        self.up, self.down = nn.Linear(features, 5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.first_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.scale * self.down(F.silu(self.up(x)))[:, 0]


class Affinely(nn.Module):
    """An unknown module with a keyword-only tensor, a flag and two outputs."""

    def __init__(self, features: int):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(features)), nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor, *, shift_by: Tensor, square: bool = False) -> tuple[Tensor, Tensor]:
        x = self.weight * (x**2 if square else x)
        return x, x + self.shift * shift_by


class KeywordArguments(nn.Module):
    """Modules called by keyword, known and unknown ones."""

    def __init__(self):
        super().__init__()
        self.first, self.unknown, self.last = nn.Linear(4, 5), Affinely(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(input=x)
        left, right = self.unknown(h, shift_by=torch.tanh(h), square=True)
        return self.last(input=torch.sigmoid(left) * right)


class Shifted(nn.Module):
    """An unknown module that is given a tensor without a batch dimension beside its input."""

    def __init__(self, features: int, times: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.weight, self.times = nn.Parameter(torch.randn(features)), times

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return torch.tanh(x + self.times(shift, self.weight))


class Positions(nn.Module):
    """Tokens that get a constant shift per position, ``[N, T, F]`` and ``[T, F]``."""

    def __init__(self, tokens: int, times: Callable[[Tensor, Tensor], Tensor] = torch.mul):
        super().__init__()
        self.first, self.shifted, self.out = nn.Linear(4, 3), Shifted(3, times), nn.Linear(3, 2)
        self.register_buffer("shift", torch.randn(tokens, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.shifted(self.first(x), self.shift))


def attention() -> nn.Module:
    """Tokens attend to each other; the output has a row per token, ``[N, T, F] -> [N T, C]``."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = m.queries_keys_values(x).chunk(3, dim=-1)
        return m.out(torch.softmax(q @ k.mT, dim=-1) @ v).flatten(0, 1)

    return Net(forward, queries_keys_values=nn.Linear(4, 9), out=nn.Linear(3, 3))


def bilinear() -> nn.Module:
    """A module with two inputs that both come from modules."""
    forward = lambda m, x: m.join(torch.tanh(m.left(x)), input2=torch.tanh(m.right(x)))  # noqa: E731
    return Net(forward, left=nn.Linear(4, 3), right=nn.Linear(4, 2), join=nn.Bilinear(3, 2, 3))


class Renamed(nn.Linear):
    """A subclass of a known layer that computes the same."""


class Standardized(nn.Linear):
    """A subclass of a known layer that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


def checkpointed() -> nn.Module:
    """Layers whose activations are recomputed during the backward pass."""
    forward = lambda m, x: m.out(checkpoint(m.inner, x, use_reentrant=False))  # noqa: E731
    return Net(forward, inner=mlp(4, 5, 4), out=nn.Linear(4, 3))


class Take(nn.Module):
    """One output of a module that has several."""

    def __init__(self, module: nn.Module, *path: int):
        super().__init__()
        self.module, self.path = module, path

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.module(x)
        for i in self.path:
            outputs = outputs[i]
        return outputs


class WithState(nn.Module):
    """A recurrent module, the initial state of which is made from the input, or is constant; mean over the steps."""

    def __init__(self, module: nn.RNNBase, constant: bool = False):
        super().__init__()
        self.module, self.constant = module, constant

    def forward(self, x: Tensor) -> Tensor:
        rows = self.module.num_layers * (2 if self.module.bidirectional else 1)
        first = x[:, 0, : self.module.hidden_size]
        state = torch.stack(
            [torch.sin((k + 1) * (torch.ones_like(first) if self.constant else first)) for k in range(rows)]
        )
        state = (state, state.cos()) if isinstance(self.module, nn.LSTM) else state
        return self.module(x, state)[0].mean(1)


class OfPacked(nn.Module):
    """A layer, a recurrent module on packed sequences of several lengths, and what is at their ends and in the mean."""

    def __init__(self, module: nn.RNNBase, ordered: bool = True):
        super().__init__()
        self.layer, self.inner, self.module, self.ordered = nn.Linear(2, 2), nn.Linear(2, 2), module, ordered

    def forward(self, x: Tensor) -> Tensor:
        longest = x.shape[1]
        lengths = torch.tensor([max(longest - n, 1) if self.ordered else 1 + (n + 1) % longest for n in range(len(x))])
        packed = pack_padded_sequence(self.layer(x), lengths.cpu(), True, enforce_sorted=self.ordered)
        output, states = self.module(packed._replace(data=self.inner(packed.data).sin()))
        output, _ = pad_packed_sequence(output, True)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([output.mean(1), *(state.sin().sum(0) for state in states)], 1)


class TimeFirst(nn.Module):
    """A recurrent module that wants time on the first axis, in a network that has samples there."""

    def __init__(self, module: nn.RNNBase):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.transpose(0, 1))[0].transpose(0, 1).mean(1)


def attending(keys: str = "self", **options: Any) -> nn.Module:
    """Attention with 2 heads, inputs ``[N, T, 4]``; keys and values are the queries, one other tensor, or two.

    Options are those of the module and of its call. The outputs are ``[N, *]``.
    """
    of_call = ("need_weights", "average_attn_weights", "attn_mask", "is_causal", "key_padding_mask")
    call = {name: options.pop(name) for name in of_call if name in options}

    def forward(m: Net, x: Tensor) -> Tensor:
        first = m.attention.batch_first
        x = x if first else x.transpose(0, 1)
        other = x.flip(1 if first else 0).tanh()
        k, v = other[..., : m.attention.kdim], x.sin()[..., -m.attention.vdim :]
        inputs = {"self": (x, x, x), "key=value": (x, other, other), "all": (x, k, v)}[keys]
        with sdpa_kernel(SDPBackend.MATH):  # the fast ones have no second derivative
            out, weights = m.attention(*inputs, **call)
        out = out if first else out.transpose(0, 1)
        return torch.cat([part.flatten(1) for part in (out, weights) if part is not None], 1)

    return Net(forward, attention=nn.MultiheadAttention(4, 2, **options))


CAUSAL = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
PADDING = torch.tensor([[False] * 4, [False, False, True, True], [False, True, False, False]])


class Doubled(nn.Linear):
    """A subclass of a known layer that computes something else with its forward."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class DoubledRecurrence(nn.GRU):
    """The same of a recurrent module."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return 2 * super().forward(input, hx)[0]


def cell(make: type[nn.Module], given: bool, **options: Any) -> Callable[[], nn.Module]:
    """All of the new state of a cell, whose state may be given."""

    def forward(m: Net, x: Tensor) -> Tensor:
        state = (x[:, :2].sin(), x[:, 1:].cos()) if make is nn.LSTMCell else x[:, :2].sin()
        new = m.cell(x, state if given else None)
        return torch.cat(new, 1) if isinstance(new, tuple) else new

    return lambda: Net(forward, cell=make(3, 2, **options))


def containers() -> nn.Module:
    """Parameters in containers that have no forward of their own."""

    def forward(m: Net, x: Tensor) -> Tensor:
        for matrix in m.matrices:
            x = torch.tanh(x @ matrix + m.vectors["shift"])
        return x

    matrices = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
    return Net(forward, matrices=matrices, vectors=nn.ParameterDict({"shift": nn.Parameter(torch.randn(4))}))


def bag(lengths: tuple[int, ...] | None = None, weighted: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """Bags of words ``[N, T]``, or of as many words as there are, by offsets, maybe with weights of words."""

    def forward(m: Net, x: Tensor) -> Tensor:
        if lengths is None:
            return m.bag(x)
        words = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
        offsets = torch.tensor([0, *lengths]).cumsum(0)[: None if options.get("include_last_offset") else -1]
        weights = torch.linspace(-1, 1, len(words), dtype=torch.float64) if weighted else None
        return m.bag(words, offsets, per_sample_weights=weights)

    return lambda: Net(forward, bag=nn.EmbeddingBag(5, 2, **options))


def words(*shape: int) -> Callable[[], Tensor]:
    """Numbers of words."""
    return lambda: torch.randint(5, shape)


class Math(nn.Sequential):
    """The modules one after the other, with attention that can be differentiated twice."""

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class Dropped(nn.Module):
    """Dropout with one fixed mask, in which the first entry of each sample falls out."""

    def __init__(self, *shape: int):
        super().__init__()
        mask = torch.bernoulli(torch.full(shape, 0.5)).double() * 2
        mask.view(-1)[0] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def einsum_between() -> nn.Module:
    """Layers joined by an einsum of two of them and a constant."""
    constant = torch.randn(3, 2, dtype=torch.float64)

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.out(torch.einsum("ntf,ntg,fg->ng", m.left(x), torch.tanh(m.right(x)), constant))

    return Net(forward, left=nn.Linear(3, 3), right=nn.Linear(3, 2), out=nn.Linear(2, 2))


def shared_input() -> nn.Module:
    """A module with two inputs that are the same tensor."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.first(x)
        return m.join(h, h)

    return Net(forward, first=nn.Linear(3, 3), join=nn.Bilinear(3, 3, 2))


def of_complex_numbers(known: bool) -> nn.Module:
    """Real parameters that meet the samples in complex numbers, one of them in no known way perhaps."""

    def forward(m: Net, x: Tensor) -> Tensor:
        z = torch.fft.fft(x * m.scale) @ torch.view_as_complex(m.weight)
        return (z if known else torch.complex(z.real, torch.logaddexp(x, m.centre))).abs()

    shapes = {"weight": (3, 3, 2), "scale": (3,), **({} if known else {"centre": (3,)})}
    return Net(forward, **{name: torch.randn(shape) for name, shape in shapes.items()})


def scaled_dot_product(h: Tensor, causal: bool) -> Tensor:
    """Tokens that are their own queries, keys and values."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(h.sin(), h, h.cos(), is_causal=causal)


class Margins(nn.Module):
    """Squared hinges between classes, a mean over samples, or at single entries, a mean over these.

    It is flat where all margins are met.
    """

    def __init__(self, by_entries: bool = False):
        super().__init__()
        self.by_entries = by_entries

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        target = F.one_hot(y, z.shape[1])
        if self.by_entries:
            return (1 - (2 * target - 1) * z).clamp(min=0).square().mean()
        return ((1 + z - z.gather(1, y[:, None])).clamp(min=0) * (1 - target)).square().sum(1).mean()


def frozen(model: nn.Module, *names: str) -> nn.Module:
    """The model with some parameters that require no gradient."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def changed(module: nn.Module, **attributes: Any) -> nn.Module:
    """The module with attributes that were assigned after its construction."""
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def with_statistics(model: nn.Module) -> nn.Module:
    """The model in eval mode after its norm layers saw statistics and got scales that are not the initial ones."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def around(function: Callable[[Tensor], Tensor] | nn.Module, *shape: int, outputs: int = 2) -> Callable[[], nn.Module]:
    """Something between a linear layer whose output is ``[N, *shape]`` and, behind a tanh, another one."""

    def make() -> nn.Module:
        module = copy.deepcopy(function) if isinstance(function, nn.Module) else Lambda(function)
        first = nn.Sequential(nn.Linear(3, math.prod(shape)), nn.Unflatten(1, shape))
        with torch.no_grad():
            features = module.double()(first.double()(torch.randn(2, 3).double())).flatten(1).shape[1]
        return nn.Sequential(first, module, nn.Flatten(), nn.Tanh(), nn.Linear(features, outputs))

    return make


def mlp(*sizes: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])


def cnn(first: nn.Module, channels: int, outputs: int = 3, second: nn.Module | None = None) -> nn.Sequential:
    """A convolution under test, maybe a second, and a linear head on the mean over positions and a few positions."""
    body = [first, nn.Tanh()] + ([second, nn.Sigmoid()] if second is not None else [])
    return nn.Sequential(*body, Lambda(position_features), nn.Linear(3 * channels, outputs))


def position_features(x: Tensor) -> Tensor:
    """Mean, first and last over positions, ``[N, C, *] -> [N, 3 C]``, so that positions differ in their gradients."""
    x = x.flatten(2)
    return torch.cat([x.mean(2), x[:, :, 0], x[:, :, -1]], dim=1)


def channels_first(x: Tensor) -> Tensor:
    """Features to dimension 1, where classes are expected."""
    return x.movedim(-1, 1)


def inplace_relu() -> nn.Module:
    """An activation that overwrites the output of the layer before it."""
    return nn.ReLU(inplace=True)


# ------------------------------------------------------------------------------------------------------------ the table

mse, cross_entropy, bce = nn.MSELoss, nn.CrossEntropyLoss, nn.BCEWithLogitsLoss


def loss_case(name: str, lossfunc: nn.Module, target: Callable[[Tensor], Tensor], dims: tuple[int, ...] = ()) -> Case:
    """A small net whose output is ``[N, 3, *dims]``, for rows that vary the loss."""
    model = (lambda: nn.Sequential(mlp(4, 5, 3), Lambda(channels_first))) if dims else (lambda: mlp(4, 5, 3))
    return Case(name, model, normal(4, *dims, 4), lossfunc, target)


CASES = [
    # linear layers
    Case("linear", lambda: nn.Linear(4, 3), normal(5, 4), mse(), values),
    Case("linear-no-bias", lambda: nn.Linear(4, 3, bias=False), normal(5, 4)),
    Case("mlp", lambda: mlp(4, 5, 6, 3), normal(5, 4)),
    Case("mlp-scaled", lambda: mlp(4, 5, 3), normal(5, 4), scale=2.0),
    Case("mlp-one-sample", lambda: mlp(4, 5, 3), normal(1, 4), mse(), values),
    Case(
        "mlp-squeezed", lambda: nn.Sequential(mlp(4, 5, 1), Lambda(lambda z: z.squeeze(1))), normal(4, 4), mse(), values
    ),
    Case("mlp-tokens", lambda: mlp(4, 3, 2), normal(3, 5, 4), mse(), values),
    Case("mlp-two-leading-dims", lambda: mlp(4, 3, 2), normal(3, 2, 2, 4), mse(reduction="sum"), values),
    # convolutions
    *(
        Case(f"conv2d-{name}", lambda make=make: cnn(make(), 4), normal(3, 2, 6, 5))
        for name, make in {
            "plain": lambda: nn.Conv2d(2, 4, 3),
            "groups": lambda: nn.Conv2d(2, 4, 3, padding=1, groups=2),
            "circular": lambda: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular"),
            "reflect": lambda: nn.Conv2d(2, 4, 3, padding=2, padding_mode="reflect", stride=2),
            "same-circular": lambda: nn.Conv2d(2, 4, 2, padding="same", padding_mode="circular"),
            "one-for-all": lambda: nn.Conv2d(2, 4, 3, stride=(2,), padding=(1,), dilation=(2,)),
            "numbers-assigned": lambda: changed(nn.Conv2d(2, 4, (2, 3)), stride=2, padding=1, dilation=2),
            "same-assigned": lambda: changed(nn.Conv2d(2, 4, (3, 2), padding=1), padding="same", dilation=(2, 1)),
            "valid-assigned": lambda: changed(nn.Conv2d(2, 4, (2, 3), padding=1), padding="valid"),
            "same-dilation-assigned": lambda: changed(nn.Conv2d(2, 4, (3, 2), padding="same"), dilation=2),
            "other-kernel": lambda: changed(nn.Conv2d(2, 4, (3, 1)), weight=nn.Parameter(torch.randn(4, 2, 1, 3))),
            "larger-kernel": lambda: changed(nn.Conv2d(2, 4, 3), weight=nn.Parameter(torch.randn(4, 2, 5, 4))),
        }.items()
    ),
    Case(
        "conv2d-deep",
        lambda: cnn(nn.Conv2d(2, 4, 3, padding=1, stride=2), 6, second=nn.Conv2d(4, 6, 2, groups=2)),
        normal(3, 2, 6, 6),
        mse(),
        values,
    ),
    Case(
        "conv1d", lambda: cnn(nn.Conv1d(2, 3, 3, stride=2, padding=1), 3), normal(4, 2, 7), mse(reduction="sum"), values
    ),
    Case(
        "conv1d-groups-same",
        lambda: cnn(nn.Conv1d(4, 6, 4, padding="same", groups=2, padding_mode="replicate"), 6),
        normal(3, 4, 6),
    ),
    Case(
        "conv3d",
        lambda: cnn(nn.Conv3d(2, 4, (2, 1, 3), padding=1, stride=(1, 2, 2), groups=2), 4),
        normal(3, 2, 3, 4, 3),
    ),
    Case(
        "conv2d-segmentation",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 3, 1)),
        normal(3, 1, 2, 3),
    ),
    # graphs that are no chain of modules
    Case("residual", residual, normal(4, 4)),
    Case("residual-conv", ResidualConvolution, normal(3, 2, 4, 4)),
    Case("heads", heads, normal(4, 4)),
    Case("functional-between", functional_between, normal(4, 5)),
    Case("used-twice", used_twice, normal(4, 4)),
    Case("used-on-tokens-and-pool", used_on_tokens_and_pool, normal(3, 3, 4), mse(), values),
    Case("conv-used-twice", convolution_used_twice, normal(3, 2, 4, 4)),
    Case("inplace-relu", lambda: mlp(4, 6, 5, 3, activation=inplace_relu), normal(5, 4)),
    Case(
        "inplace-relu-conv",
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), inplace_relu(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(6, 3), nn.ELU(inplace=True)
        ),
        normal(4, 2, 4, 6),
        mse(),
        values,
    ),
    Case("attention-row-per-token", attention, normal(3, 2, 4)),
    Case("checkpointed", checkpointed, normal(4, 4)),
    # modules without a rule, and unusual calls
    Case("mixer", lambda: nn.Sequential(nn.Linear(4, 3), Mixer(2, 3), nn.Flatten()), normal(4, 2, 4), mse(), values),
    Case("own-parameters-and-children", OwnParametersAndChildren, normal(4, 3, 4)),
    Case("keyword-arguments", KeywordArguments, normal(4, 4)),
    Case("argument-without-batch", lambda: Positions(2), normal(4, 2, 4), mse(), values),
    Case("bilinear", bilinear, normal(4, 4)),
    Case("subclass", lambda: nn.Sequential(Renamed(4, 5), nn.Tanh(), Standardized(5, 3)), normal(4, 4), mse(), values),
    Case("prelu", lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(5), nn.Linear(5, 3)), normal(4, 4), mse(), values),
    Case("frozen", lambda: frozen(mlp(4, 5, 5, 3), "0.weight", "2.bias"), normal(4, 4)),
    Case("frozen-first", lambda: frozen(mlp(4, 5, 3), "0.weight", "0.bias"), normal(4, 4)),
    Case("input-requires-grad", lambda: mlp(4, 5, 3), lambda: normal(4, 4)().requires_grad_()),
    # norm layers
    Case(
        "batchnorm2d-eval",
        lambda: with_statistics(cnn(nn.Conv2d(2, 3, 3, bias=False), 3, second=nn.BatchNorm2d(3))),
        normal(3, 2, 4, 4),
    ),
    Case(
        "batchnorm1d-eval",
        lambda: with_statistics(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))),
        normal(4, 4),
    ),
    Case(
        "layernorm",
        lambda: with_statistics(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))),
        normal(3, 3, 4),
        mse(),
        values,
    ),
    Case(
        "groupnorm",
        lambda: with_statistics(cnn(nn.Conv2d(2, 4, 2), 4, second=nn.GroupNorm(2, 4))),
        normal(3, 2, 3, 3),
        mse(),
        values,
    ),
    # losses
    loss_case("mse-mean", mse(), values),
    loss_case("mse-sum", mse(reduction="sum"), values),
    loss_case("mse-extra-dims", mse(), values, dims=(2,)),
    loss_case("ce-sum", cross_entropy(reduction="sum"), labels),
    loss_case("ce-extra-dims", cross_entropy(), labels, dims=(2,)),
    loss_case("ce-extra-dims-sum", cross_entropy(reduction="sum"), labels, dims=(2, 2)),
    loss_case("ce-weight", cross_entropy(weight=row(0.5, 2.0, 1.3)), labels),
    loss_case("ce-weight-sum", cross_entropy(weight=row(0.5, 2.0, 1.3), reduction="sum"), labels),
    loss_case("ce-ignored", cross_entropy(), labels_some_ignored),
    loss_case("ce-ignored-class", cross_entropy(ignore_index=2, reduction="sum"), labels_some_two),
    loss_case("ce-ignored-extra-dims", cross_entropy(weight=row(0.5, 2.0, 1.3)), labels_some_ignored, dims=(3,)),
    loss_case("ce-smoothed", cross_entropy(label_smoothing=0.2), labels),
    loss_case("ce-smoothed-weight", cross_entropy(weight=row(0.5, 2.0, 1.3), label_smoothing=0.2), labels),
    loss_case(
        "ce-smoothed-weight-ignored",
        cross_entropy(weight=row(0.5, 2.0, 1.3), label_smoothing=0.2),
        labels_some_ignored,
        dims=(2,),
    ),
    loss_case("ce-probabilities", cross_entropy(), weights_of_classes),
    loss_case("ce-probabilities-sum", cross_entropy(reduction="sum", label_smoothing=0.1), weights_of_classes),
    loss_case("ce-probabilities-weight", cross_entropy(weight=row(0.5, 2.0, 1.3)), weights_of_classes, dims=(2,)),
    loss_case("bce-mean", bce(), bits),
    loss_case("bce-sum", bce(reduction="sum"), fractions),
    loss_case("bce-weight", bce(weight=row(0.5, 2.0, 1.3)), bits),
    loss_case("bce-pos-weight", bce(pos_weight=row(0.5, 2.0, 1.3)), bits),
    loss_case("bce-weights-soft", bce(weight=row(0.5, 2.0, 1.3), pos_weight=row(3.0, 1.0, 0.2)), fractions),
    loss_case("bce-extra-dims", bce(), bits, dims=(2,)),
    loss_case("bce-weight-extra-dims", bce(weight=row(0.5, 2.0, 1.3)[:, None], pos_weight=row(2.0)), bits, dims=(2,)),
    loss_case("bce-weights-of-samples", bce(weight=row(0.0, 0.3, 0.6, 1.0)[:, None], pos_weight=row(2.0)), bits),
    loss_case("bce-weight-scalar", bce(weight=torch.tensor(0.3), pos_weight=row(0.5, 2.0, 1.3)), fractions),
]

# what stands between layers, each as a function of ``[N, *shape]``
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor] | nn.Module, tuple[int, ...]]] = {
    **{
        f"activation-{kind.__name__}": (kind(), (4,))
        for kind in (
            nn.CELU, nn.ELU, nn.GELU, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU,
            nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
            nn.Softsign, nn.Tanh, nn.Tanhshrink,
        )
    },
    "activation-GELU-tanh": (nn.GELU("tanh"), (4,)),
    "activation-Hardshrink": (nn.Hardshrink(0.1), (4,)),
    "activation-Softshrink": (nn.Softshrink(0.1), (4,)),
    "activation-Threshold": (nn.Threshold(0.1, 0.5), (4,)),
    "activation-RReLU-eval": (nn.RReLU().eval(), (4,)),
    "activation-GLU": (nn.GLU(), (4,)),
    "activation-Softmax": (nn.Softmax(1), (4,)),
    "activation-Softmin": (nn.Softmin(1), (4,)),
    "activation-LogSoftmax": (nn.LogSoftmax(1), (4,)),
    "activation-Softmax2d": (nn.Softmax2d(), (2, 1, 2)),
    "avgpool1d": (nn.AvgPool1d(2, 1, 1), (2, 3)),
    "avgpool2d-ceil": (nn.AvgPool2d(2, 2, 1, ceil_mode=True, count_include_pad=False), (1, 3, 2)),
    "avgpool2d-divisor": (nn.AvgPool2d(2, 1, divisor_override=3), (1, 3, 3)),
    "avgpool3d": (nn.AvgPool3d((2, 1, 2), 1, divisor_override=5), (1, 2, 2, 2)),
    "maxpool1d": (nn.MaxPool1d(2, 1, dilation=2), (1, 5)),
    "maxpool2d-ceil": (nn.MaxPool2d(2, 2, 1, ceil_mode=True), (1, 3, 4)),
    "maxpool3d": (nn.MaxPool3d((2, 1, 2)), (1, 2, 2, 2)),
    "adaptive-avgpool1d": (nn.AdaptiveAvgPool1d(2), (1, 5)),
    "adaptive-avgpool2d": (nn.AdaptiveAvgPool2d((2, None)), (1, 3, 2)),
    "adaptive-avgpool2d-larger": (nn.AdaptiveAvgPool2d((3, 4)), (1, 2, 3)),
    "adaptive-avgpool3d": (nn.AdaptiveAvgPool3d(1), (1, 2, 2, 2)),
    "adaptive-maxpool1d": (nn.AdaptiveMaxPool1d(2), (1, 5)),
    "adaptive-maxpool2d": (nn.AdaptiveMaxPool2d((2, 1)), (1, 3, 2)),
    "adaptive-maxpool3d": (nn.AdaptiveMaxPool3d((1, 2, 1)), (1, 2, 2, 2)),
    "lppool1d": (nn.Sequential(nn.Softplus(), nn.LPPool1d(2, 2)), (1, 4)),
    "lppool2d": (nn.Sequential(nn.Softplus(), nn.LPPool2d(3, 2, 1)), (1, 3, 2)),
    "pad-zero": (nn.ZeroPad2d((1, 0, 1, 0)), (1, 2, 2)),
    "pad-constant": (nn.ConstantPad1d(1, 0.5), (1, 3)),
    "pad-reflect": (nn.ReflectionPad1d(2), (1, 3)),
    "pad-reflect2d": (nn.ReflectionPad2d(1), (1, 2, 2)),
    "pad-replicate": (nn.ReplicationPad2d(1), (1, 2, 2)),
    "pad-circular": (nn.CircularPad1d(1), (1, 3)),
    "upsample-nearest": (nn.Upsample(scale_factor=2), (1, 3)),
    "upsample-bilinear": (nn.Upsample(size=(3, 3), mode="bilinear", align_corners=False), (1, 2, 2)),
    "pixel-shuffle": (nn.PixelShuffle(2), (4, 1, 1)),
    "unfold": (nn.Unfold(2), (1, 2, 3)),
    "fold": (nn.Fold((2, 3), 2), (4, 2)),
    "dropout-one-mask": (Dropped(4), (4,)),
    "reshape": (lambda h: h.reshape(len(h), 3, 2).permute(0, 2, 1), (6,)),
    "transpose": (lambda h: (h.transpose(1, 2) * h.new_tensor([1.0, -2.0])).mT, (2, 3)),
    "cat-split": (lambda h: torch.cat([torch.sin(s) for s in h.split([1, 3], 1)][::-1], 1), (4,)),
    "stack": (lambda h: torch.stack([h, h**2, h.exp()], 2), (3,)),
    "slicing": (lambda h: h[:, 1::2] * h[:, ::2], (4,)),
    "where": (lambda h: torch.where(h > 0, h.sin(), h**3), (4,)),
    "gather": (lambda h: h.gather(1, h.argsort(1)[:, :3]) ** 2, (4,)),
    "index": (lambda h: h[:, [2, 0, 0]], (3,)),
    "index-assigned": (lambda h: torch.zeros_like(h).index_copy(1, torch.tensor([1, 2, 0]), h.cos()), (3,)),
    "in-place": (lambda h: h.clone().mul_(2).add_(h.sin()), (3,)),
    "roll-flip": (lambda h: h.roll(1, 1) * h.flip(1), (3,)),
    "fft": (lambda h: torch.fft.rfft(h).abs().square(), (4,)),
    "fft-modulus": (lambda h: torch.fft.rfft(h).abs(), (4,)),  # no piecewise linear function, as of real numbers
    "fft-filter": (lambda h: torch.fft.irfft(torch.fft.rfft(h) * (1 + 2j), n=4), (4,)),
    "einsum": (lambda h: torch.einsum("nij,nkj->nik", h, h), (2, 2)),
    "attention": (lambda h: scaled_dot_product(h, causal=False), (2, 3)),
    "attention-causal": (lambda h: scaled_dot_product(h, causal=True), (2, 3)),
    "normalize": (lambda h: F.normalize(h, dim=1), (3,)),
    "logsumexp": (lambda h: torch.stack([h.logsumexp(1), h.std(1), h.prod(1)], 1), (3,)),
    "max-min": (lambda h: torch.stack([h.amax(1), h.min(1).values, h.norm(dim=1), h.cumsum(1)[:, 1]], 1), (3,)),
    "atan2": (lambda h: torch.atan2(h[:, :2], h[:, 2:]) / (1 + h[:, :2] ** 2), (4,)),
    "solve": (lambda h: torch.linalg.solve(h @ h.mT + torch.eye(2).to(h), h), (2, 2)),
}  # fmt: skip

# layers, alone in the middle of a net, with the input that the net takes
MIDDLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "bilinear-shared": (shared_input, normal(3, 3)),
    "convtranspose1d": (lambda: nn.ConvTranspose1d(2, 2, 3, 2, 1, output_padding=1), normal(2, 2, 3)),
    "convtranspose2d": (lambda: nn.ConvTranspose2d(2, 2, 2, dilation=2, groups=2), normal(2, 2, 2, 2)),
    "convtranspose3d": (lambda: nn.ConvTranspose3d(1, 2, 2, (1, 2, 1), bias=False), normal(2, 1, 1, 2, 2)),
    "embedding": (lambda: nn.Embedding(5, 3), lambda: torch.randint(5, (3, 3))),
    "linear-keyword": (lambda: Net(lambda m, x: m.layer(input=x), layer=nn.Linear(3, 4)), normal(3, 3)),
    "bilinear-positions": (
        lambda: Net(lambda m, x: m.join(x, x[..., :2].tanh()), join=nn.Bilinear(3, 2, 2, bias=False)),
        normal(2, 2, 3),
    ),
    "bilinear-keywords": (
        lambda: Net(lambda m, x: m.join(input2=x[:, :2].tanh(), input1=x), join=nn.Bilinear(3, 2, 4)),
        normal(3, 3),
    ),
    "convtranspose-one-number": (
        lambda: nn.ConvTranspose2d(2, 3, 3, stride=(2,), padding=(1,), dilation=(2,)),
        normal(2, 2, 2, 2),
    ),
    "convtranspose-assigned": (
        lambda: changed(nn.ConvTranspose2d(2, 3, 3, padding=1), stride=2, dilation=2),
        normal(2, 2, 2, 2),
    ),
    "convtranspose-output-size": (
        lambda: Net(lambda m, x: m.layer(x, [7, 7]), layer=nn.ConvTranspose2d(1, 2, 3, stride=3)),
        normal(2, 1, 2, 2),
    ),
    "convtranspose-other-kernel": (
        lambda: changed(nn.ConvTranspose2d(2, 3, (3, 1)), weight=nn.Parameter(torch.randn(2, 3, 1, 3))),
        normal(2, 2, 2, 2),
    ),
    "conv-subclass": (lambda: type("Same", (nn.Conv2d,), {})(2, 3, 2), normal(2, 2, 3, 3)),
    "embedding-one-word": (lambda: nn.Embedding(5, 2), words(3)),
    "embedding-max-norm": (lambda: nn.Embedding(5, 2, max_norm=0.5), words(3, 2, 3)),
    "bag": (bag(mode="sum"), words(3, 4)),
    "bag-mean-padding": (bag(mode="mean", padding_idx=1), words(3, 6)),
    "bag-offsets": (bag((4, 0, 3), mode="mean"), words(3, 4)),
    "bag-last-offset": (bag((4, 0, 3), mode="sum", include_last_offset=True), words(3, 4)),
    "bag-weights": (bag((4, 0, 3), True, mode="sum"), words(3, 4)),
    "embedding-padding": (lambda: nn.Embedding(4, 2, padding_idx=0), lambda: torch.randint(4, (3, 4))),
    "batchnorm-eval": (lambda: with_statistics(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), normal(3, 3)),
    "batchnorm-length": (lambda: with_statistics(nn.BatchNorm1d(2)), normal(3, 2, 4)),
    "batchnorm-one-channel": (lambda: with_statistics(nn.BatchNorm3d(1)), normal(3, 1, 2, 2, 2)),
    "groupnorm-flat": (lambda: nn.GroupNorm(2, 4), normal(3, 4)),
    "instancenorm-train": (lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True), normal(3, 2, 4, 3)),
    "instancenorm-eval": (
        lambda: with_statistics(nn.InstanceNorm3d(2, affine=True, track_running_stats=True)),
        normal(3, 2, 2, 2, 3),
    ),
    "layernorm-no-bias": (lambda: nn.LayerNorm(4, bias=False), normal(2, 2, 2, 4)),
    "rmsnorm-eps": (lambda: nn.RMSNorm((2, 4), eps=0.1), normal(3, 2, 4)),
    "prelu-channels": (lambda: nn.PReLU(4), normal(3, 4, 2, 2)),
    "prelu-features": (lambda: nn.PReLU(4), normal(3, 4)),
    "groupnorm": (lambda: with_statistics(nn.Sequential(nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4))), normal(3, 2, 3)),
    "instancenorm": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True)), normal(3, 2, 4)),
    "instancenorm-plain": (lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.InstanceNorm1d(2)), normal(3, 1, 4)),
    "rmsnorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4)), normal(3, 2, 3)),
    "layernorm-two-axes": (lambda: nn.Sequential(nn.Linear(3, 2), nn.LayerNorm((2, 2))), normal(3, 2, 3)),
    "prelu-one": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU()), normal(4, 3)),
    **{
        f"attention-{name}": (lambda keys=keys, options=options: attending(keys, **options), normal(3, 4, 4))
        for name, keys, options in (
            ("plain", "self", {}),
            ("batch-first-no-bias", "self", {"batch_first": True, "bias": False}),
            ("no-weights", "self", {"batch_first": True, "need_weights": False}),
            ("weights-per-head", "self", {"batch_first": True, "average_attn_weights": False}),
            ("key-is-value", "key=value", {}),
            ("all-different", "all", {"batch_first": True}),
            ("other-keys", "all", {"kdim": 3, "vdim": 2}),
            ("other-keys-no-bias", "all", {"kdim": 3, "vdim": 2, "bias": False}),
            ("bias-kv", "key=value", {"add_bias_kv": True, "batch_first": True}),
            ("zero", "self", {"add_zero_attn": True, "add_bias_kv": True}),
            ("causal", "self", {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
            ("causal-boolean", "self", {"attn_mask": CAUSAL == -torch.inf}),
            ("mask-per-head", "self", {"attn_mask": torch.linspace(0, 1, 96).double().sin().view(6, 4, 4)}),
            ("padding", "self", {"batch_first": True, "key_padding_mask": PADDING}),
        )
    },
    "encoder": (lambda: Math(nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True)), normal(2, 2, 4)),
    "encoder-eval": (
        lambda: Math(nn.TransformerEncoderLayer(4, 2, 3, batch_first=True, norm_first=True, activation="gelu")).eval(),
        normal(2, 2, 4),
    ),
    "rnn": (lambda: Take(nn.RNN(2, 3, batch_first=True), 1, 0), normal(3, 3, 2)),
    "rnn-relu-state": (lambda: WithState(nn.RNN(3, 2, 2, nonlinearity="relu", batch_first=True)), normal(2, 2, 3)),
    "lstm": (lambda: Take(nn.LSTM(2, 2, batch_first=True), 0), normal(2, 2, 2)),
    "lstm-two-ways": (lambda: WithState(nn.LSTM(2, 1, 2, bidirectional=True, batch_first=True)), normal(2, 2, 2)),
    "lstm-constant-state": (lambda: WithState(nn.LSTM(2, 2, batch_first=True), constant=True), normal(2, 2, 2)),
    "lstm-projected": (lambda: Take(nn.LSTM(2, 3, proj_size=2, batch_first=True), 0), normal(2, 2, 2)),
    "lstm-time-first": (lambda: TimeFirst(nn.LSTM(2, 2)), normal(2, 3, 2)),
    "lstm-packed": (lambda: OfPacked(nn.LSTM(2, 2, batch_first=True)), normal(3, 3, 2)),
    "gru-packed-two-ways": (lambda: OfPacked(nn.GRU(2, 1, 2, bidirectional=True), ordered=False), normal(3, 3, 2)),
    "rnn-packed": (lambda: OfPacked(nn.RNN(2, 2, 2), ordered=False), normal(3, 3, 2)),
    "gru": (lambda: TimeFirst(nn.GRU(2, 2, 2)), normal(2, 3, 2)),
    "gru-two-ways-state": (lambda: WithState(nn.GRU(2, 2, bidirectional=True, batch_first=True)), normal(2, 2, 2)),
    "rnn-packed-in-order": (lambda: OfPacked(nn.RNN(2, 2, batch_first=True)), normal(3, 3, 2)),
    "gru-no-bias": (lambda: TimeFirst(nn.GRU(2, 2, bias=False)), normal(2, 3, 2)),
    "lstm-projected-two-ways": (lambda: TimeFirst(nn.LSTM(2, 3, 2, proj_size=1, bidirectional=True)), normal(2, 2, 2)),
    "lstm-cell-state": (lambda: Take(nn.LSTM(2, 2, batch_first=True), 1, 1, 0), normal(3, 2, 2)),
    "rnn-cell": (cell(nn.RNNCell, False), normal(3, 3)),
    "rnn-cell-relu": (cell(nn.RNNCell, True, nonlinearity="relu"), normal(3, 3)),
    "lstm-cell": (cell(nn.LSTMCell, False, bias=False), normal(3, 3)),
    "lstm-cell-of-state": (cell(nn.LSTMCell, True), normal(3, 3)),
    "gru-cell": (cell(nn.GRUCell, False), normal(3, 3)),
    "gru-cell-of-state": (cell(nn.GRUCell, True, bias=False), normal(3, 3)),
    "doubled": (lambda: Doubled(4, 3), normal(3, 2, 4)),
    "doubled-recurrence": (lambda: DoubledRecurrence(2, 2, batch_first=True), normal(2, 3, 2)),
    "containers": (containers, normal(3, 4)),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), normal(3, 4)),
    "weight-norm-norm": (lambda: parametrizations.weight_norm(nn.LayerNorm(4)), normal(3, 2, 4)),
    "weight-norm-old": (lambda: nn.utils.weight_norm(nn.Linear(4, 3).double()), normal(3, 4)),
    **{
        f"bias-of-{name}": (
            lambda shape=shape: changed(nn.Linear(4, 3), bias=nn.Parameter(torch.ones(shape))),
            normal(3, 2, 4),
        )
        for name, shape in {"no-axis": (), "one-axis": (1,), "two-axes": (1, 3)}.items()
    },
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), normal(3, 3)),
    "weight-norm-conv": (lambda: parametrizations.weight_norm(nn.Conv1d(2, 3, 2)), normal(3, 2, 3)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), normal(3, 3)),
    "subclass": (lambda: nn.Sequential(Renamed(3, 4), nn.Tanh(), Standardized(4, 3)), normal(3, 3)),
    "custom": (lambda: Mixer(2, 3), normal(3, 2, 3)),
    "einsum-between": (einsum_between, normal(3, 2, 3)),
    "complex": (lambda: of_complex_numbers(True), normal(3, 3)),
    "complex-unknown": (lambda: of_complex_numbers(False), normal(3, 3)),
    "padding-module": (lambda: nn.Sequential(nn.CircularPad2d(1), nn.Conv2d(1, 2, 2)), normal(2, 1, 2, 2)),
}


def in_the_middle(make: Callable[[], nn.Module], make_input: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    """The layer, a tanh and a linear layer on all that comes out."""

    def model() -> nn.Module:
        layer = make().double()
        with torch.no_grad():
            features = layer(make_input()).flatten(1).shape[1]
        return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2))

    return model


#: Problems on which all quantities are compared but Kronecker factors, which ``reference.py`` cannot tell for them.
LAYERS = [
    *(Case(f"between-{name}", around(function, *shape), normal(3, 3)) for name, (function, shape) in BETWEEN.items()),
    *(Case(name, in_the_middle(*made), made[1]) for name, made in MIDDLE.items()),
]

for table in (CASES, LAYERS):
    assert len({case.name for case in table}) == len(table), "names of cases must differ"

# Parameters that are used several times, or by a rule that does not promise to be linear in them, owe their curvature
# not only to operations after them, so there is no part of it to replace: pchmp refuses such nets.
NO_PCHMP = {
    "used-twice",
    "used-on-tokens-and-pool",
    "conv-used-twice",
    "mixer",
    "subclass",
}
