"""The schedule of the kernel that merges a call's O and L into sums over other keys: it reads and writes each row once, a warp a
row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cupyflash.arrays import ITEMSIZE
from cupyflash.device import Device
from cupyflash.launch.params import ROWS, Params, arrays, numbers
from cupyflash.request.score import named
from cupyflash.schedules.base import ELEMENT_TYPE, WARP, Kernel, Schedule
from cupyflash.schedules.moves import FLOAT32, Totals, whole

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

    def walks(self) -> Iterator[Totals]:
        elements = self.rows * self.head_dim_v
        parts = whole("O_part", elements, ITEMSIZE[self.dtype]), whole("L_part", self.rows, FLOAT32)
        both = (whole(name, n, FLOAT32, write=write) for name, n in (("O", elements), ("L", self.rows)) for write in (False, True))
        yield Totals("add_state", (*both, *parts))

    def kernels(self) -> tuple[Kernel, ...]:
        constants = named(ELEMENT=ELEMENT_TYPE[self.dtype], DV=self.head_dim_v, THREADS=THREADS)
        return (Kernel("add_state.cu", "add_state", constants, -(-self.rows // (THREADS // WARP)), THREADS, 0, PARAMS),)
