"""The rule of recurrent nets: time steps are shared positions of the recurrent matrices.

The forward is replayed from products ``W x``. Autograd pulls the vectors at the module's outputs back to every such
product; from there on each matrix is a linear layer::

    h_t = tanh(W x_t + U h_(t-1))       left: vectors at the argument of tanh, [V, N, 1, T, O]
    W: right = x_1 ... x_T              [N, 1, T, I]
    U: right = h_0 ... h_(T-1)          [N, 1, T, O]
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from curvopt.core.layers.rule import Jacobians, Rule, arguments, register
from curvopt.core.nodes import operation, saved, walk
from curvopt.core.products.base import Dense
from curvopt.core.products.outer import Outer
from curvopt.core.record import ModuleCall, disable
from curvopt.core.vjp import pull
from curvopt.errors import CurvoptError

State = tuple[Tensor, ...]


class Site(NamedTuple):
    """A product of all time steps, ``input W^T + b``.

    Attributes:
        input: ``[N, T, I]``.
        output: ``[N, T, O]``, or zeros that are added to it: autograd pulls back to it.
        weight: name of the weight.
        bias: name of the bias.
    """

    input: Tensor
    output: Tensor
    weight: str
    bias: str | None = None


def step(mode: str, gates: Tensor, state: State) -> State:
    """One time step of a cell from ``W_ih x + b_ih + W_hh h + b_hh``."""
    if mode == "LSTM":
        i, f, g, o = gates.chunk(4, -1)
        c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
        return o.sigmoid() * c.tanh(), c
    return (gates.tanh() if mode == "RNN_TANH" else gates.relu(),)


def gru_step(from_input: Tensor, from_state: Tensor, state: State) -> State:
    """One time step of a GRU from ``W_ih x + b_ih`` and ``W_hh h + b_hh``."""
    (r, z, n), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
    r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
    return ((1 - z) * (n + r * n_h).tanh() + z * state[0],)


def steps_of(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """The sample and the time of each row of packed sequences."""
    sizes = packed.batch_sizes
    times = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    samples = (torch.arange(len(times)) - (sizes.cumsum(0) - sizes)[times]).to(packed.data.device)
    order = packed.sorted_indices
    return samples if order is None else order[samples], times.to(packed.data.device)


def _drops(module: nn.RNNBase, training: bool) -> bool:
    """Whether there is dropout between layers."""
    return bool(module.dropout) and training and module.num_layers > 1


def _masks(call: ModuleCall) -> list[Tensor]:
    """The masks of the dropout behind each layer but the last, ``[N, T, H]``, from the graph of the call."""
    x, found = arguments(call)["input"], dict[int, Tensor]()
    packed = x.data if isinstance(x, PackedSequence) else None
    for node in walk(call.cache["nodes"], call.boundary):
        if operation(node) == "MUL" and node.next_functions[1][0] is None:
            mask = saved(node, "other")
            # other factors are states of one time step, of zeros if that is the only one
            if mask is not None and (mask.dim() == 3 if packed is None else len(mask) == len(packed) and mask.any()):
                found[node._sequence_nr()] = mask  # type: ignore[attr-defined]
    masks = [found[number] for number in sorted(found)]
    if len(masks) + 1 != call.module.num_layers:
        raise CurvoptError(
            f"{call.describe()}: the masks of the dropout between its layers cannot be read off the graph; stack "
            "single layers with nn.Dropout between them, or call model.eval()."
        )
    if not isinstance(x, PackedSequence):
        return [mask.transpose(0, 1) for mask in masks]  # layers have the time first, whatever batch_first says
    samples, times = steps_of(x)
    shape = int(samples.max()) + 1, int(times.max()) + 1
    return [mask.new_zeros(*shape, mask.shape[1]).index_put((samples, times), mask) for mask in masks]


@register(nn.RNN, nn.LSTM, nn.GRU)
class Recurrent(Rule):
    """Any number of layers and directions, packed sequences included; projections are read off the graph."""

    reads_graph = True

    def expected(self, module: nn.RNNBase) -> Container[str]:
        return [name for names in module._all_weights for name in names]

    def fits(self, module: nn.RNNBase) -> bool:
        # on other devices the graph does not show the masks between layers: operations are read off the graph there
        shown = module.dropout < 1 and all(p.is_cpu and p.requires_grad for p in module.parameters())
        return not module.proj_size and (shown or not _drops(module, module.training))

    def least_dims(self, module: nn.RNNBase) -> int:
        return 3

    def output_axis(self, call: ModuleCall, index: int) -> int | Tensor:
        x = arguments(call)["input"]
        if index > 0:
            return 1  # states, whatever batch_first says
        return steps_of(x)[0] if isinstance(x, PackedSequence) else 0 if call.module.batch_first else 1

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        if "replay" not in call.cache:
            sites = list[Site]()
            with torch.enable_grad(), disable():
                call.cache["replay"] = self._replay(call, sites), sites
        outputs, sites = call.cache["replay"]
        sites = [site for site in sites if site.weight in names or site.bias in names]
        # autocast: the forward may have run in another precision
        arrived = [(o, g.to(o.dtype)) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
        products = list({id(site.output): site.output for site in sites}.values())
        pulled = pull([o for o, _ in arrived], products, [g for _, g in arrived])
        of_product = {id(product): left for product, left in zip(products, pulled, strict=True)}
        jacobians: Jacobians = {}
        x, lengths = arguments(call)["input"], None
        if isinstance(x, PackedSequence):
            lengths = steps_of(x)[0].bincount().cpu().view(N, -1).sum(1)
        outers: dict[int, Outer] = {}
        for site in sites:
            left = of_product[id(site.output)]
            left = site.output.new_zeros(len(arrived[0][1]), *site.output.shape) if left is None else left
            rows = left.reshape(len(left), N, 1, -1, left.shape[-1])
            if site.weight in names:
                right = (site.input if torch.is_grad_enabled() else site.input.detach()).to(left.dtype)
                shape = call.module.get_parameter(site.weight).shape
                right, same = right.reshape(N, 1, -1, right.shape[-1]), outers.get(id(site.output))
                outer = Outer(rows, right, shape, lengths=lengths) if same is None else same.beside(right, shape)
                jacobians[site.weight] = outers[id(site.output)] = outer
            if site.bias is not None and site.bias in names:
                jacobians[site.bias] = Dense(rows.sum(3).flatten(2))
        return jacobians

    def _replay(self, call: ModuleCall, sites: list[Site]) -> Sequence[Tensor | None]:
        """The outputs of the call, in order, ``None`` for integer ones; all products are added to the sites."""
        module, given = cast(nn.RNNBase, call.module), arguments(call)
        packed, active = given["input"], None
        if isinstance(packed, PackedSequence):
            x, lengths = pad_packed_sequence(packed, batch_first=True)
            active = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device).unsqueeze(2)
        else:
            x = packed if module.batch_first else packed.transpose(0, 1)
        directions = 2 if module.bidirectional else 1
        initial = self._initial(module, given["hx"], x)
        finals: list[State] = []
        masks = _masks(call) if _drops(module, call.training) else []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                state = tuple(part[layer * directions + direction] for part in initial)
                output, final = self._direction(module, sites, x, state, f"_l{layer}" + "_reverse" * direction, active)
                outputs.append(output)
                finals.append(final)
            x = torch.cat(outputs, -1)
            if layer < len(masks):
                x = x * masks[layer].to(x.dtype)
        states = [torch.stack(part) for part in zip(*finals, strict=True)]
        if not isinstance(packed, PackedSequence):
            return [x if module.batch_first else x.transpose(0, 1), *states]
        integers = 1 if packed.sorted_indices is None else 3  # batch sizes and, if any, the order
        return [x[steps_of(packed)], *[None] * integers, *states]

    @staticmethod
    def _initial(module: nn.RNNBase, hx: Tensor | State | None, x: Tensor) -> State:
        """Initial states, each ``[layers * directions, N, H]``."""
        if hx is not None:
            return (hx,) if isinstance(hx, Tensor) else hx
        layers = len(module._all_weights)  # times directions
        zeros = x.new_zeros(layers, x.shape[0], module.hidden_size)
        return (zeros, zeros) if module.mode == "LSTM" else (zeros,)

    @staticmethod
    def _direction(
        module: nn.RNNBase, sites: list[Site], x: Tensor, state: State, names: str, active: Tensor | None
    ) -> tuple[Tensor, State]:
        """Outputs ``[N, T, H]`` and final state of one direction of one layer, whose parameters have names alike."""
        W, W_ih = module.get_parameter("weight_hh" + names), module.get_parameter("weight_ih" + names)
        b, b_ih = (getattr(module, name + names, None) for name in ("bias_hh", "bias_ih"))
        # the cells but GRU's add both products, so that equal vectors arrive at them: gates are one product
        together = module.mode != "GRU"
        of_input = F.linear(x.to(W.dtype), W_ih, b_ih if b is None or not together else b_ih + b)
        of_input.requires_grad_()  # W_ih may be frozen
        sites.append(Site(x, of_input, "weight_ih" + names, "bias_ih" + names))
        # zeros added to the products of all steps: their gradient is that of the products, in one tensor
        probe = of_input if together else torch.zeros_like(of_input).detach().requires_grad_()
        inputs, probes, T = of_input.unbind(1), probe.unbind(1), x.shape[1]
        before, outputs = [state[0]] * T, [state[0]] * T
        state = tuple(part.to(W.dtype) for part in state)
        for t in reversed(range(T)) if names.endswith("reverse") else range(T):
            before[t] = state[0]
            if together:
                new = step(module.mode, torch.addmm(inputs[t], state[0], W.mT), state)
            else:
                new = gru_step(inputs[t], F.linear(state[0], W, b) + probes[t], state)
            if active is not None:  # sequences that have ended keep their state
                new = tuple(torch.where(active[:, t], n, old) for n, old in zip(new, state, strict=True))
            state, outputs[t] = new, new[0]
        mask = 1.0 if active is None else active.to(x.dtype)
        sites.append(Site(torch.stack(before, 1) * mask, probe, "weight_hh" + names, "bias_hh" + names))
        return torch.stack(outputs, 1) * mask, state
