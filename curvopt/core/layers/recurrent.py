"""Rules of recurrent nets: time steps are shared positions of the recurrent matrices.

::

    h_t = tanh(W x_t + U h_(t-1))       left: vectors at the argument of tanh, [V, N, 1, T, O]
    W: right = x_1 ... x_T              [N, 1, T, I]
    U: right = h_0 ... h_(T-1)          [N, 1, T, O]
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from curvopt.core.layers.replay import ReplayRule, Site, Tape
from curvopt.core.layers.rule import Jacobians, arguments, register
from curvopt.core.recording.calls import ModuleCall
from curvopt.errors import CurvoptError

State = tuple[Tensor, ...]


def step(mode: str, from_input: Tensor, from_state: Tensor, state: State) -> State:
    """One time step of a cell from its two products ``W_ih x + b_ih`` and ``W_hh h + b_hh``."""
    if mode == "LSTM":
        i, f, g, o = (from_input + from_state).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        (r, z, n), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
        return ((1 - z) * (n + r * n_h).tanh() + z * state[0],)
    total = from_input + from_state
    return (total.tanh() if mode == "RNN_TANH" else total.relu(),)


def steps_of(packed: PackedSequence) -> tuple[Tensor, Tensor]:
    """The sample and the time of each row of packed sequences."""
    sizes = packed.batch_sizes
    times = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    samples = (torch.arange(len(times)) - (sizes.cumsum(0) - sizes)[times]).to(packed.data.device)
    order = packed.sorted_indices
    return samples if order is None else order[samples], times.to(packed.data.device)


@register(nn.RNN, nn.LSTM, nn.GRU)
class Recurrent(ReplayRule):
    """Any number of layers and directions, projections and packed sequences included."""

    def expected(self, module: nn.RNNBase) -> Container[str]:
        return [name for names in module._all_weights for name in names]

    def least_dims(self, module: nn.RNNBase) -> int:
        return 3

    def output_axis(self, call: ModuleCall, index: int) -> int | Tensor:
        x = arguments(call)["input"]
        if index > 0:
            return 1  # states, whatever batch_first says
        return steps_of(x)[0] if isinstance(x, PackedSequence) else 0 if call.module.batch_first else 1

    def jac_t(self, call: ModuleCall, grads: list[Tensor | None], names: list[str], N: int) -> Jacobians:
        jacobians, x = super().jac_t(call, grads, names, N), arguments(call)["input"]
        if isinstance(x, PackedSequence):
            lengths = steps_of(x)[0].bincount().cpu()
            return {name: jacobian.with_lengths(lengths) for name, jacobian in jacobians.items()}
        return jacobians

    def replay(self, call: ModuleCall, tape: Tape) -> Sequence[Tensor | None]:
        module, given = cast(nn.RNNBase, call.module), arguments(call)
        if module.dropout and module.training and module.num_layers > 1:
            raise CurvoptError(
                f"{call.describe()}: the dropout between its layers drew masks that cannot be drawn again; call "
                "model.eval(), or stack single layers with nn.Dropout between them."
            )
        packed, active = given["input"], None
        if isinstance(packed, PackedSequence):
            x, lengths = pad_packed_sequence(packed, batch_first=True)
            active = (torch.arange(x.shape[1]) < lengths[:, None]).to(x.device).unsqueeze(2)
        else:
            x = packed if module.batch_first else packed.transpose(0, 1)
        directions = 2 if module.bidirectional else 1
        initial = self._initial(module, given["hx"], x)
        finals: list[State] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                state = tuple(part[layer * directions + direction] for part in initial)
                output, final = self._direction(tape, x, state, layer, direction == 1, active)
                outputs.append(output)
                finals.append(final)
            x = torch.cat(outputs, -1)
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
        h = x.new_zeros(layers, x.shape[0], module.proj_size or module.hidden_size)
        return (h, x.new_zeros(layers, x.shape[0], module.hidden_size)) if module.mode == "LSTM" else (h,)

    @staticmethod
    def _direction(
        tape: Tape, x: Tensor, state: State, layer: int, reverse: bool, active: Tensor | None
    ) -> tuple[Tensor, State]:
        """Outputs ``[N, T, H]`` and final state of one direction of one layer."""
        mode, names = tape.module.mode, f"_l{layer}" + ("_reverse" if reverse else "")
        W, b = tape.parameter("weight_hh" + names), tape.parameter("bias_hh" + names)
        projection = tape.parameter("weight_hr" + names)
        assert W is not None
        from_input = tape.linear(x, "weight_ih" + names, "bias_ih" + names)
        # zeros added to the products of all steps: their gradient is that of the products, in one tensor
        N, T = x.shape[:2]
        probe = torch.zeros_like(from_input).detach().requires_grad_()
        probe_hr = None if projection is None else probe.new_zeros(N, T, projection.shape[0]).requires_grad_()
        inputs, probes = from_input.unbind(1), probe.unbind(1)
        probes_hr = () if probe_hr is None else probe_hr.unbind(1)
        before, hidden, outputs = [state[0]] * T, [state[0]] * T, [state[0]] * T
        state = tuple(part.to(W.dtype) for part in state)
        for t in reversed(range(T)) if reverse else range(T):
            before[t] = state[0]
            from_state = F.linear(state[0], W, b) + probes[t]
            new = step(mode, inputs[t], from_state, state)
            if projection is not None:
                hidden[t] = new[0]
                new = (F.linear(new[0], projection) + probes_hr[t], *new[1:])
            if active is not None:  # sequences that have ended keep their state
                new = tuple(torch.where(active[:, t], n, old) for n, old in zip(new, state, strict=True))
            state, outputs[t] = new, new[0]
        mask = 1.0 if active is None else active.to(x.dtype)
        bias = None if b is None else "bias_hh" + names
        tape.note(probe, Site(torch.stack(before, 1) * mask, "weight_hh" + names, bias))
        if probe_hr is not None:
            tape.note(probe_hr, Site(torch.stack(hidden, 1) * mask, "weight_hr" + names))
        return torch.stack(outputs, 1) * mask, state
