"""Drawing random numbers again.

>>> state = RandomState([])
>>> first = torch.rand(2)
>>> with state.again():
...     again = torch.rand(2)
>>> torch.equal(first, again), state.passed()
(True, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """The present state of the random number generators of the CPU and of accelerators (of one type).

    MPS has a generator that is not looked at.
    """

    def __init__(self, devices: Iterable[torch.device]):
        self._devices = sorted({d for d in devices if d.index is not None and d.type != "mps"}, key=lambda d: d.index)
        self._of_cpu = torch.get_rng_state()
        self._of_devices = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]

    def passed(self) -> bool:
        """Whether random numbers were drawn since."""
        now = RandomState(self._devices)
        pairs = zip([self._of_cpu, *self._of_devices], [now._of_cpu, *now._of_devices], strict=True)
        return not all(torch.equal(then, since) for then, since in pairs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the random numbers that were drawn after this state are drawn again; outside nothing changes."""
        kind = self._devices[0].type if self._devices else "cuda"
        with torch.random.fork_rng(self._devices, device_type=kind):
            torch.set_rng_state(self._of_cpu)
            for device, state in zip(self._devices, self._of_devices, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            yield
