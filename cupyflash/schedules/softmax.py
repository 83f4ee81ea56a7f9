"""Softmax along rows (Milakov and Gimelshein, arXiv 1805.02867): safe in three passes, online in two.

Every element is read once a pass and written once: four accesses an element, or three.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from cupyflash.arrays import ITEMSIZE, dtype_name
from cupyflash.device import Device
from cupyflash.launch.params import POINTER, Field, Params, numbers
from cupyflash.request.options import require_choice, require_flag
from cupyflash.request.score import named
from cupyflash.schedules.base import ELEMENT_TYPE, WARP, Kernel, Schedule, require_device, require_dtype
from cupyflash.schedules.moves import FLOAT32, Room, Totals, whole

MAX_GRID = 2**31 - 1
THREADS = 128
# A warp has up to 32 elements a lane; a longer row gets a block of eight warps.
WARP_COLS = 1024
LONG_ROW_LANES = 256
# Threads of a multiprocessor from which on more of them hide no more latency, roughly: half of what the smallest holds.
THREADS_THAT_FILL = 512

STRIDES = tuple(f"{name}_{axis}" for name in "xy" for axis in ("outer", "middle", "inner"))
PARAMS = Params(
    (
        Field("x", "const Element", POINTER),
        Field("y", "Element", POINTER),
        *numbers("long long", "rows", "n", "x_step", "y_step", "middle", "inner", *STRIDES),
    )
)


@dataclass(frozen=True)
class SoftmaxSchedule(Schedule):
    """`rows` rows of `cols` elements of `dtype`, with `lanes` threads a row. Tensors are named x and y.

    The traffic depends on the lanes in nothing; the order of summation, and so the last bit of the result, does.
    """

    rows: int
    cols: int
    dtype: str
    device: Device
    lanes: int

    passes: ClassVar[int]
    """The number of times that x is read."""
    entry: ClassVar[str]
    """The kernel's name."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def threads(self) -> int:
        """Threads of a block: those of one row of several warps, or of several rows."""
        return self.lanes if self.lanes > WARP else THREADS

    @property
    def shared_bytes(self) -> int:
        """Bytes for m and d of each warp, if several warps share a row; a row of one warp needs registers only."""
        return self.lanes // WARP * 2 * FLOAT32 if self.lanes > WARP else 0

    def walks(self) -> Iterator[Totals]:
        elements, room = self.rows * self.cols, self.shared_bytes
        moves = (*(whole("x", elements, self.itemsize),) * self.passes, whole("y", elements, self.itemsize, write=True))
        yield Totals(self.entry, moves, (Room("m and d", room),) if room else ())

    def kernels(self) -> tuple[Kernel, ...]:
        require_dtype(self.dtype, self.device)
        grid = -(-self.rows // (self.threads // self.lanes))
        if grid > MAX_GRID:
            rows = f"{self.rows:,} rows of {self.cols:,}"
            raise ValueError(f"x must need at most {MAX_GRID:,} thread blocks, got {grid:,} for {rows}")
        constants = named(ELEMENT=ELEMENT_TYPE[self.dtype], LANES=self.lanes, THREADS=self.threads)
        return (Kernel("softmax.cu", self.entry, constants, grid, self.threads, self.shared_bytes, PARAMS),)


class SafeSoftmax(SoftmaxSchedule):
    """Algorithm 2: the largest element, the sum, the output."""

    algorithm: ClassVar[str] = "softmax-safe"
    passes = 3
    entry = "softmax_safe"


class OnlineSoftmax(SoftmaxSchedule):
    """Algorithm 3: largest element and sum together, the output."""

    algorithm: ClassVar[str] = "softmax-online"
    passes = 2
    entry = "softmax_online"


_SCHEDULES: dict[str, type[SoftmaxSchedule]] = {"safe": SafeSoftmax, "online": OnlineSoftmax}
SOFTMAX_ALGORITHMS = tuple(_SCHEDULES)


def plan_softmax(
    rows: int, cols: int, dtype: str, device: Device, algorithm: str = "online", *, adjacent_rows: bool = False
) -> SoftmaxSchedule:
    """Return the schedule of `algorithm` ("safe" or "online") for `rows` rows of `cols` elements of `dtype` on a device.

    `adjacent_rows`: True if the rows are neighbours in memory and the elements of one row are not, as along the first axis of a
    matrix. Raises ValueError for an unknown algorithm or a wrong size, TypeError for an unknown dtype or a wrong device.
    """
    require_choice("algorithm", algorithm, SOFTMAX_ALGORITHMS)
    for name, size in (("rows", rows), ("cols", cols)):
        if type(size) is not int or size < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {size!r}")
    require_device(device)
    require_flag("adjacent_rows", adjacent_rows)
    return _plan(rows, cols, dtype_name(dtype), device, algorithm, bool(adjacent_rows))


@lru_cache(maxsize=1024)
def _plan(rows: int, cols: int, dtype: str, device: Device, algorithm: str, adjacent_rows: bool) -> SoftmaxSchedule:
    return _SCHEDULES[algorithm](rows, cols, dtype, device, _lanes(rows, cols, device, adjacent_rows))


def _lanes(rows: int, cols: int, device: Device, adjacent_rows: bool) -> int:
    """Threads a row: neighbouring threads should have neighbouring addresses, and a row no idle threads."""
    if adjacent_rows and (cols <= WARP or rows >= THREADS_THAT_FILL * device.sm_count):
        return 1
    if cols > WARP_COLS:
        return LONG_ROW_LANES
    return min(WARP, 1 << max(0, cols - 1).bit_length())
