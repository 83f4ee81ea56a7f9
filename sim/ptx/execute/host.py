"""What the parts of the machine ask of it: who is where, and how to move lanes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

from ..decode.code import Code
from ..decode.registry import Arg
from ..memory.memory import Memory
from ..memory.phases import MBarriers
from ..report.diary import Diary
from ..state.lanes import Lanes, Wave
from ..text.types import Array
from .registers import Frame
from .shadows import Shadows


class Host(Protocol):
    """The machine, as barriers and calls see it."""

    wave: Wave
    mbarriers: MBarriers
    full: Frame
    """The registers of the whole wave."""

    @property
    def code(self) -> Code: ...

    @property
    def memory(self) -> Memory:
        """With the findings and the tally of the launch."""

    @property
    def diary(self) -> Diary | None:
        """Of a block of the wave, where somebody asked for it."""

    @property
    def shadows(self) -> Shadows: ...

    @property
    def on_barrier(self) -> Callable[[int, int], None] | None:
        """Called with a block and how many barriers it has completed."""

    def push(self, pc: int, lanes: Lanes) -> None:
        """Lanes are ready to go on at an instruction."""

    def read(self, lanes: Lanes, arg: Arg) -> Array:
        """An operand for lanes, one value a lane."""

    def deactivate(self) -> None:
        """All registers are in `full` afterwards."""

    def rewritten(self, mask: int) -> None:
        """Somebody wrote these rows (bits; -1: any) of `full`, while no frame was active: none has them any more."""

    def flush(self) -> None:
        """All registers are in `full` afterwards; the frame that runs keeps its copies."""

    def stop(self, kind: str, message: str, pc: int, lanes: Lanes) -> NoReturn:
        """A finding that ends the launch."""
