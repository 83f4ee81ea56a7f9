"""The time of a program's work on the device, as the clock predicts it from machine code (`sim.clock`), for its events.

Launches count one after another, also those of several streams, and branch by what memory holds when they are predicted. Copies,
fills, library calls and kernels that the clock does not execute have no time: what an event measures across them is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cupyflash.device import Device
from cupyflash.sim.program.memory import Block
from cupyflash.sim.ptx.parameters import POINTER_BYTES, parameter_offsets
from cupyflash.sim.ptx.text.syntax import source_name

if TYPE_CHECKING:
    from cupyflash.sim.clock.loaded import MachineCode
    from cupyflash.sim.program.symbols import Image, LaunchRequest

MOST_RUN = 20_000_000
"""The most instructions that the clock executes for a launch."""


@dataclass
class DeviceTime:
    """The `work` of a program so far: launches, and None for each piece without a time. Only what lies between two events that a
    program compares is predicted.

    `say` is called with a line of text for each reason why a kernel has no time.
    """

    device: Device
    say: Callable[[str], None]
    work: list[LaunchRequest | None] = field(default_factory=list)
    _codes: dict[Image, MachineCode] = field(default_factory=dict)
    _known: dict[LaunchRequest, float | None] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def seconds(self, first: int, last: int, blocks: list[Block]) -> float | None:
        """Returns the time of work[first:last], which may access these blocks; None if some of it has none."""
        total, part = 0.0, self.work[first:last]
        if None in part:
            return None
        for request, times in Counter(one for one in part if one is not None).items():
            seconds = self.launch(request, blocks)
            if seconds is None:
                return None
            total += times * seconds
        return total

    def launch(self, request: LaunchRequest, blocks: list[Block]) -> float | None:
        """Returns the time of a launch; None if the clock has none."""
        if request not in self._known:
            try:
                self._known[request] = self.predicted(request, blocks)
            except (ImportError, RuntimeError, ValueError, TypeError) as error:
                if str(error) not in self._said:
                    self._said.add(str(error))
                    self.say(f"{source_name(request.kernel.name)}: the clock has no time for it: {error}")
                self._known[request] = None
        return self._known[request]

    def predicted(self, request: LaunchRequest, blocks: list[Block]) -> float:
        """Returns a launch's predicted seconds; raises ImportError, RuntimeError, ValueError or TypeError if there are none."""
        from cupyflash.sim.clock.timed import timed

        kernel = request.kernel
        module = kernel.image.module
        if kernel.image not in self._codes:
            self._codes[kernel.image] = module.machine_code(self.device)
        params, args = module.code(kernel.name).params, list[Any]()
        for param, at in zip(params, parameter_offsets(params)[0].values(), strict=True):
            data = request.data[at : at + param.size]
            word = int.from_bytes(data, "little") if param.size == POINTER_BYTES else 0
            block = next((one for one in blocks if 0 <= word - one.address < one.allocation.memory.nbytes), None)
            args.append(data if block is None else block.allocation.memory[word - block.address :])
        shape, cluster = (request.grid, request.block), request.cluster or (1, 1, 1)
        loaded = self._codes[kernel.image].launch(kernel.name, shape, args, request.shared, cluster)
        loaded.launch.most = MOST_RUN
        return timed(loaded, self.device).seconds
