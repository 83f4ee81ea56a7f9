"""A schedule of one kernel that copies by tensor maps: what the tests of maps share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cupyflash import Device, Problem
from cupyflash.arrays import ArrayLayout
from cupyflash.launch.binding import prepare
from cupyflash.launch.params import Params
from cupyflash.launch.simulated import Simulation
from cupyflash.launch.tensor_maps import Box
from cupyflash.schedules import Kernel, TileSchedule, Walk, Workspace
from cupyflash.schedules.base import attention_params, element_constants
from cupyflash.schedules.moves import BEGIN, END, Move, Room, tensor
from cupyflash.tiling import TileSize, Tiling

SOURCE = str(Path(__file__).parent / "kernels" / "tile_copy.cu")
ROWS = 16


@dataclass(frozen=True)
class TileCopy(TileSchedule):
    """O = 2 Q by tensor maps, on a device of compute capability 9.0."""

    algorithm: ClassVar[str] = "tile copy"
    params: ClassVar[Params] = attention_params(maps=("Q_map", "O_map"))

    @classmethod
    def of(cls, problem: Problem, device: Device | None = None) -> TileCopy:
        sizes = TileSize(ROWS, ROWS, "")
        return cls(problem, device or Device.named("H100-SXM"), Tiling(sizes, sizes, sizes))

    @property
    def columns(self) -> int:
        """The columns of a box: 128 bytes of them."""
        return 128 // self.problem.itemsize

    def maps(self) -> Mapping[str, Box]:
        return {f"{tensor}_map": Box(tensor, ROWS, self.columns, 128) for tensor in "QO"}

    def walks(self) -> Iterator[Walk]:
        p, room = self.problem, Room("Q", ROWS * 128)
        moves = Move(tensor(p, "Q"), BEGIN, tile=room.name), Move(tensor(p, "O"), END, write=True, tile=room.name)
        yield Walk("copy_tiles", self, self.parts, "gi", "", moves, (room,), every=True)

    def workspaces(self) -> Mapping[str, Workspace]:
        return {}

    def kernels(self) -> tuple[Kernel, ...]:
        constants = (*element_constants(self.problem), ("BR", ROWS), ("COLUMNS", self.columns))
        grid = self.problem.head_count * self.row_blocks
        return (Kernel(SOURCE, "copy_tiles", constants, grid, 32, ROWS * 128, self.params, accelerated=True),)


def prepared(q: Any, simulation: Simulation | None = None) -> Any:
    """The copy of an array, on a GPU or in a simulation, ready to be launched on arrays of its layout."""
    layout = ArrayLayout.of(q)
    out = ArrayLayout.contiguous(q.shape, q.dtype)
    schedule = TileCopy.of(Problem.from_arrays(q, q, q))
    return prepare(schedule, simulation, {**dict.fromkeys("QKV", layout), "O": out}, {"O": out})


def doubled(q: Any, copy: Any = None) -> Any:
    """2 q, by what was prepared for its layout."""
    return (copy or prepared(q)).launch(dict.fromkeys("QKV", q))["O"]
