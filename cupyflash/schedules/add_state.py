"""What merges a call's O and L into sums over other keys: each row read and written once, a warp a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cupyflash.arrays import ITEMSIZE
from cupyflash.device import Device
from cupyflash.params import ROWS, Params, arrays, numbers
from cupyflash.schedules.base import ELEMENT_TYPE, FLOAT32, WARP, Kernel, Move, Phase, Schedule

THREADS = 128
PARAMS = Params(
    (
        *arrays("float", ROWS, ("O", "L")),
        *arrays("const Element", ROWS, ("O_part",)),
        *arrays("const float", ROWS, ("L_part",)),
        *numbers("long long", "rows"),
        *numbers("int", "Nq", "heads"),
    )
)


@dataclass(frozen=True)
class AddStateSchedule(Schedule):
    """`rows` rows, of all heads together, of `head_dim_v` columns: O and L in float32, O_part in `dtype`, L_part in float32."""

    rows: int
    head_dim_v: int
    dtype: str
    device: Device

    algorithm: ClassVar[str] = "add state"

    @property
    def chip(self) -> Device:
        return self.device

    @property
    def repeats(self) -> int:
        return 1

    def phases(self, *, literal: bool = False) -> Iterator[Phase]:
        elements = self.head_dim_v
        reads = Move("O", elements, FLOAT32), Move("L", 1, FLOAT32)
        parts = Move("O_part", elements, ITEMSIZE[self.dtype]), Move("L_part", 1, FLOAT32)
        yield Phase(
            self.rows, enter=reads + parts, leave=(Move("O", elements, FLOAT32, write=True), Move("L", 1, FLOAT32, write=True))
        )

    def kernels(self) -> tuple[Kernel, ...]:
        constants = (("ELEMENT", ELEMENT_TYPE[self.dtype]), ("DV", self.head_dim_v), ("THREADS", THREADS))
        return (Kernel("add_state.cu", "add_state", constants, -(-self.rows // (THREADS // WARP)), THREADS, 0, PARAMS),)
