"""Recurrent nets whose vectors are pulled back through time in closed form.

Backpropagation through time (Werbos, "Backpropagation through time: what it does and how to do it", 1990) needs the
values of the gates at every step. As all hidden states are known after a forward pass, these are products and functions
of all steps at once; what is left for each step is a product with the recurrent matrix, and a few products of entries.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import _VF, Tensor, nn

State = tuple[Tensor, ...]
_RUN = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}


def run(mode: str, x: Tensor, state: State, weights: Sequence[Tensor]) -> Tensor:
    """Hidden states ``[N, T, H]`` of one layer in one direction."""
    before = [part.unsqueeze(0).contiguous() for part in state]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        given = before if mode == "LSTM" else before[0]
        return _RUN[mode](x, given, list(weights), len(weights) > 2, 1, 0.0, False, False, True)[0]


class Layer:
    """One layer in one direction, forwards in time: ``W_ih x + b_ih`` and ``W_hh h + b_hh``, and how they go on.

    Args:
        mode: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        x: inputs ``[N, T, I]``.
        state: the initial one, ``[N, H]`` each.
        weights: ``W_ih`` and ``W_hh``, and the biases if there are any.
        last: the index of the last steps of all sequences in ``[..., N, T, H]``.

    Attributes:
        hidden: the hidden states ``[N, T, H]``; after the last step whatever they are.
        before: those before each step.
        final: the last state.
    """

    def __init__(
        self, mode: str, x: Tensor, state: State, weights: Sequence[Tensor], last: tuple = (..., -1, slice(None))
    ):
        """Compute the gates of all steps from the hidden states."""
        self.mode, self.x, self.last = mode, x, last
        self.W_ih, self.W_hh, *biases = weights
        b_ih, b_hh = biases or (None, None)
        self.hidden = run(mode, x, state, weights)
        self.before = torch.cat([state[0].unsqueeze(1), self.hidden[:, :-1]], 1)
        self.final: State = (self.hidden[last],)
        from_input, from_state = F.linear(x, self.W_ih, b_ih), F.linear(self.before, self.W_hh, b_hh)
        if mode == "LSTM":
            self._lstm(from_input + from_state, state[1])
        elif mode == "GRU":
            self._gru(from_input, from_state)
        else:
            #: Slopes of the steps in what enters them, ``[N, T, gates, H]``.
            h = self.hidden
            self.slopes = (1 - h.square() if mode == "RNN_TANH" else (h > 0).to(h.dtype)).unsqueeze(2)

    def _lstm(self, gates: Tensor, cell: Tensor) -> None:
        i, f, g, o = gates.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cells = [cell]
        for new, forget in zip((i * g).unbind(1), f.unbind(1), strict=True):
            cells.append(torch.addcmul(new, forget, cells[-1]))
        before, after = torch.stack(cells[:-1], 1), torch.stack(cells[1:], 1)
        self.final = (*self.final, after[self.last])
        squashed = after.tanh()
        # of what the cell's state depends on, in that state; and of the output gate, and the cell's state, in h
        self.slopes = torch.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - g.square())], 2)
        self.output_slopes, self.cell_slopes = squashed * o * (1 - o), o * (1 - squashed.square())
        self.kept = f

    def _gru(self, from_input: Tensor, from_state: Tensor) -> None:
        (r, z, n), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
        n = (n + r * n_h).tanh()
        self.new_slopes = (1 - z) * (1 - n.square())
        self.slopes = torch.stack(
            [self.new_slopes * n_h * r * (1 - r), (self.before - n) * z * (1 - z), self.new_slopes * r], 2
        )
        self.kept = z

    def pull(self, hidden: Tensor, final: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """What arrives at ``W_ih x + b_ih`` and at ``W_hh h + b_hh`` in all steps, ``[V, N, T, gates * H]`` each.

        Args:
            hidden: vectors at the hidden states, ``[V, N, T, H]``.
            final: those at the last state, ``[V, N, H]`` each.
        """
        V, N, T, H = hidden.shape
        hidden = self._with_final(hidden, final[0])
        from_state = hidden.new_empty(V, N, T, len(self.W_hh))
        gates = from_state.unflatten(3, (-1, H))
        rows = from_state.flatten(0, 1).unbind(1)
        arriving = hidden.flatten(0, 1).unbind(1)
        slopes = self.slopes.unbind(1)
        h = arriving[-1]
        if self.mode == "LSTM":
            of_cell, of_output = gates[..., :3, :].unbind(2), gates[..., 3, :].unbind(2)
            output_slopes, cell_slopes, kept = (x.unbind(1) for x in (self.output_slopes, self.cell_slopes, self.kept))
            cell = hidden.new_zeros(V, N, H)
            cells = None if final[1] is None else self._with_final(torch.zeros_like(hidden), final[1]).unbind(2)
            for t in reversed(range(T)):
                here = h.view(V, N, H)
                cell = cell if cells is None else cell + cells[t]
                cell = torch.addcmul(cell, here, cell_slopes[t])
                torch.mul(cell.unsqueeze(2), slopes[t], out=of_cell[t])
                torch.mul(here, output_slopes[t], out=of_output[t])
                cell = cell * kept[t]
                h = torch.addmm(arriving[t - 1], rows[t], self.W_hh) if t else h
            return from_state, from_state
        steps, kept = gates.unbind(2), self.kept.unbind(1) if self.mode == "GRU" else None
        passed: list[Tensor] = [h] * T
        for t in reversed(range(T)):
            passed[t] = here = h.view(V, N, H)
            torch.mul(here.unsqueeze(2), slopes[t], out=steps[t])
            if t:
                h = torch.addmm(arriving[t - 1], rows[t], self.W_hh)
                if kept is not None:
                    h.view(V, N, H).addcmul_(here, kept[t])
        if kept is None:
            return from_state, from_state
        from_input = from_state.clone()  # but for the new state, of which the reset gate lets a part pass
        from_input[..., 2 * H :] = torch.stack(passed, 2) * self.new_slopes
        return from_input, from_state

    def _with_final(self, steps: Tensor, final: Tensor | None) -> Tensor:
        """Vectors in all steps ``[V, N, T, H]``, and those at the last state ``[V, N, H]`` in the last one."""
        if final is None:
            return steps
        steps = steps.clone()
        steps[self.last] += final
        return steps


class Unrolled:
    """A call of a recurrent net without projections.

    Args:
        module: the net.
        x: the input, ``[N, T, I]``.
        initial: initial states, ``[layers * directions, N, H]`` each.
        lengths: of the sequences ``[N]``, which are padded; ``None`` if all are as long.

    Attributes:
        outputs: output ``[N, T, directions * H]`` and final states.
        layers: each direction of each layer.
    """

    def __init__(self, module: nn.RNNBase, x: Tensor, initial: State, lengths: Tensor | None = None):
        """Run it."""
        self.directions = 2 if module.bidirectional else 1
        #: Where the last steps are, whether a step is one of its sequence, and where it is if time runs backwards.
        last, self.mask, self.turned = (..., -1, slice(None)), None, None
        if lengths is not None:
            samples, steps = (torch.arange(length, device=x.device) for length in x.shape[:2])
            lengths = lengths.to(x.device)
            last, lengths = (..., samples, lengths - 1, slice(None)), lengths.unsqueeze(1)
            self.mask = steps < lengths
            self.turned = (..., samples.unsqueeze(1), torch.where(self.mask, lengths - 1 - steps, steps), slice(None))
        self.layers: list[Layer] = []
        finals: list[State] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(self.directions):
                number = layer * self.directions + direction
                weights = [getattr(module, name) for name in module._all_weights[number]]
                x = x.to(weights[0].dtype)
                state = tuple(part[number].to(x.dtype) for part in initial)
                one = Layer(module.mode, self._turn(x) if direction else x, state, weights, last)
                self.layers.append(one)
                finals.append(one.final)
                outputs.append(self._turn(one.hidden) if direction else one.hidden)
                if self.mask is not None:
                    one.before = torch.where(self.mask.unsqueeze(2), one.before, 0)
            x = torch.cat(outputs, -1)
            x = x if self.mask is None else torch.where(self.mask.unsqueeze(2), x, 0)
        self.outputs = [x, *(torch.stack(part) for part in zip(*finals, strict=True))]

    def _turn(self, steps: Tensor) -> Tensor:
        """Steps ``[..., N, T, H]`` in the other direction of time."""
        return steps.flip(-2) if self.turned is None else steps[self.turned]

    def pull(self, hidden: Tensor | None, final: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        """What arrives at the products of all `layers` (see `Layer.pull`).

        Args:
            hidden: vectors at the output, ``[V, N, T, directions * H]``.
            final: those at the final states, ``[V, layers * directions, N, H]`` each.
        """
        if hidden is None:
            V = next(len(part) for part in final if part is not None)
            hidden = torch.zeros_like(self.outputs[0]).expand(V, *self.outputs[0].shape)
        found: list[tuple[Tensor, Tensor]] = []
        for number in reversed(range(len(self.layers))):
            layer, direction = self.layers[number], number % self.directions
            if direction == self.directions - 1:
                vectors, below = hidden.chunk(self.directions, -1), None
            own = vectors[direction]
            states = [None if part is None else part[:, number] for part in final]
            found.append(layer.pull(self._turn(own) if direction else own, states))
            if number >= self.directions:
                down = found[-1][0] @ layer.W_ih
                down = self._turn(down) if direction else down
                below = down if below is None else below + down
                hidden = below
        return found[::-1]
