"""The base of all schedules: which tiles sit in SRAM, what moves when, and which kernels do it.

A schedule is the one description of an algorithm's tiling. The kernels' compile-time constants, their launch, the simulator's
replay and the theory's block sizes are all read from it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from cupyflash.arrays import numpy_dtype
from cupyflash.basics import Array, Shape
from cupyflash.device import Device
from cupyflash.expressions.c import ELEMENTS
from cupyflash.launch import params
from cupyflash.launch.params import CapturedField, Field, Params
from cupyflash.launch.tensor_maps import Box
from cupyflash.request import score
from cupyflash.request.dropout import FIELDS as DROPOUT_FIELDS
from cupyflash.request.options import EMPTY, MIXED, VECTORS
from cupyflash.request.problem import Problem
from cupyflash.request.score import Constants, named
from cupyflash.schedules import mask_tiles
from cupyflash.schedules.mask_tiles import MaskTiles
from cupyflash.schedules.moves import Room, Totals, Walk, search_reads
from cupyflash.schedules.packed import Packed
from cupyflash.schedules.parts import Part, Tiles, batches
from cupyflash.tiling import DoesNotFit, Tiling

# Rows and columns of one tensor core tile (mma m16n8k16): blocks are whole multiples of it.
GRANULE = 16
WARP = 32
# One warp owns 16 rows; eight warps with 255 registers a thread are what a register file of 65,536 holds.
MAX_BLOCK_ROWS = 8 * GRANULE
# A row in shared memory is padded by one 16-byte chunk, so that eight rows start in different banks.
ROW_PADDING_BYTES = 16
ELEMENT_TYPE = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}


def total_bytes(tiles: Iterable[Room]) -> int:
    """The sum of the bytes of all tiles."""
    return sum(tile.nbytes for tile in tiles)


@dataclass(frozen=True)
class Kernel:
    """One launch: entry `name` of `source` compiled with `constants`, on `grid` blocks of `threads`.

    Its one argument is the struct `params`, which `launch.binding` fills. `instead`: other kernels for the same grid with the same
    result, the fastest first; a compiler that has too few registers for this one may have enough for one of those. `accelerated`:
    it needs its architecture's own instructions (wgmma, say), which exist in machine code for sm_90a, but not for sm_90. `cluster`:
    the number of thread blocks in a cluster, which its code says too.
    """

    source: str
    name: str
    constants: Constants
    grid: int
    threads: int
    shared_bytes: int
    params: Params
    instead: tuple[Kernel, ...] = field(default=(), compare=False, repr=False)
    accelerated: bool = False
    cluster: int = 1


@dataclass(frozen=True)
class Workspace:
    """HBM that the algorithm needs beside its inputs and outputs."""

    shape: Shape
    dtype: str


class Schedule(ABC):
    """The moves between HBM and SRAM, their times, and the kernels that make them, for one algorithm on one device."""

    algorithm: ClassVar[str]
    device: Device
    """The device whose SRAM the tiles are in."""

    @abstractmethod
    def walks(self) -> Iterator[Walk | Totals]:
        """A walk for each of its kernels, in the order of `kernels`."""

    @abstractmethod
    def kernels(self) -> tuple[Kernel, ...]:
        """The launches, in order. ValueError when no kernel has this tiling, problem or device."""

    def workspaces(self) -> Mapping[str, Workspace]:
        """HBM needed beside inputs and outputs, by tensor name: none, unless a schedule says otherwise."""
        return {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of HBM beside inputs and outputs: the extra memory of Theorem 1."""
        return sum(math.prod(space.shape) * numpy_dtype(space.dtype).itemsize for space in self.workspaces().values())


def require_problem(problem: object) -> None:
    """TypeError unless an argument is a problem."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a Problem, got {type(problem).__name__}")


def require_device(device: object) -> None:
    """TypeError unless an argument is a device."""
    if not isinstance(device, Device):
        raise TypeError(f"device must be a Device (Device.named finds one by name), got {device!r}")


def require_schedule(schedule: object, kind: type[Any], maker: str, but: tuple[type[Any], ...] = ()) -> None:
    """TypeError unless an argument is a schedule of a kind, which the function `maker` makes, and of none of `but`."""
    if not isinstance(schedule, kind) or isinstance(schedule, but):
        raise TypeError(f"schedule must be a {kind.__name__} ({maker} makes one), got a {type(schedule).__name__}")


@dataclass(frozen=True)
class TileSchedule(Schedule):
    """A problem, a device, an algorithm's tiling, and all that follows from the three.

    `results` are the tensors that the kernels make. `signals` are those by which thread blocks wait for one another: only what is
    written counts, since it depends on the order of things how often a block looks. `lse`: True if L, the log-sum-exp of each row,
    is written.
    """

    results: ClassVar[tuple[str, ...]] = ("O", "L")
    signals: ClassVar[tuple[str, ...]] = ()
    params: ClassVar[Params]

    problem: Problem
    device: Device
    tiling: Tiling
    lse: bool = False

    @property
    def repeats(self) -> int:
        """(Batch, head) pairs, of which each goes through its tiles."""
        return self.problem.head_count

    @property
    def parts(self) -> tuple[Part, ...]:
        """The batches, or the packed sequences."""
        return batches(self)

    @property
    def rooms_beyond(self) -> tuple[int, int]:
        """The rows of Q and of K that the tensors have room for, from a head's first on."""
        return self.problem.seqlen_q, self.problem.seqlen_k

    def sharing(self, kernel: str) -> int | None:
        """The number of a kernel's thread blocks that share a multiprocessor by the planner's choice; None if their sizes
        decide."""
        return None

    def tile_walks(self, parts: tuple[Part, ...]) -> Iterator[Walk]:
        """The walks of the kernels that find the states of a mask's tiles."""
        for each in self.found_tiles:
            planes, heads = each.planes
            yield Walk(
                "mask_tiles",
                self,
                parts if each.packed else parts[:planes],
                "gij",
                "",
                (*search_reads(each.packed, "q"), *each.moves()),
                every=True,
                sizes=each.blocks,
                heads=(1, heads),
                few=True,
                works=each.count if each.packed else None,
            )

    @property
    def together(self) -> Packed | None:
        """The sequences that are packed along one axis, if they are."""
        return None

    @property
    def state_words(self) -> int | None:
        """Words of shared memory for a bit of each tile that a thread block may visit; None if none are skipped."""
        return None

    @property
    def mask_tiles(self) -> tuple[MaskTiles, ...]:
        """The mask's tiles whose states its kernels read, so that they skip the empty ones."""
        made, words = MaskTiles(self.problem, self.blocks, packed=self.together), self.state_words
        fits = words is not None and 8 * words <= mask_tiles.MOST_STATE_BYTES
        return (made,) if self.problem.options.masked and fits and made.count <= mask_tiles.MOST_TILES else ()

    @property
    def found_tiles(self) -> tuple[MaskTiles, ...]:
        """The mask's tiles whose states its own first kernels find."""
        return () if self.problem.options.tiles_given else self.mask_tiles

    @property
    def given_tiles(self) -> tuple[MaskTiles, ...]:
        """The mask's tiles whose states are known before."""
        return self.mask_tiles if self.problem.options.tiles_given else ()

    def kept_tiles(self) -> Tiles | None:
        """The tiles of each (batch, head) that block mask and mask keep; None if all tiles are visited alike."""
        p, states = self.problem, [each.states for each in self.mask_tiles[:1]]
        if p.options.block_mask is None and (not states or states[0] is None):
            return None
        every = np.ones((p.batch, p.heads, self.row_blocks, self.col_blocks), bool)
        kept = every if p.options.block_mask is None else self._by_heads(p.options.block_mask.kept)
        state = states[0] if states and states[0] is not None else np.array(MIXED)
        return Tiles(kept & (state != EMPTY), kept & (state == MIXED))

    def _by_heads(self, block_mask: Array) -> Array:
        """A block mask for each (batch, head), by the schedule's blocks."""
        return np.broadcast_to(block_mask, (self.problem.batch, self.problem.heads, *block_mask.shape[2:]))

    def tile_kernels(self) -> tuple[Kernel, ...]:
        """The kernels that find the states of tiles, before all others."""
        return tuple(
            Kernel("mask_tiles.cu", "mask_tiles", each.constants(), each.count, mask_tiles.THREADS, 0, self.struct)
            for each in self.found_tiles
        )

    def tile_workspaces(self) -> dict[str, Workspace]:
        """The arrays that the `tile_kernels` write, by name."""
        return {each.field: Workspace(each.shape, "uint8") for each in self.found_tiles}

    def maps(self) -> Mapping[str, Box]:
        """The tensor maps of its kernels: by the map's field in the struct, the tensor and the box of one copy."""
        return {}

    def numbers(self) -> Mapping[str, int]:
        """The fields of its kernels' struct that no other algorithm's has."""
        return {}

    @property
    def struct(self) -> Params:
        """The struct that its kernels take."""
        asked = self.problem.options
        own = self.params if asked.bias_dtype is None else in_float32(self.params, "bias")
        return whole_struct(own, (asked.score, asked.mask_function), asked.dropout, self.tile_fields, self.sum_fields)

    @property
    def sum_fields(self) -> tuple[Field, ...]:
        """The fields of that struct for sums of the gradients of captured arrays."""
        return ()

    @property
    def tile_fields(self) -> tuple[str, ...]:
        """The fields of that struct for the states of a mask's tiles."""
        return tuple(each.field for each in self.mask_tiles)

    @property
    def block_rows(self) -> int:
        """Br."""
        return self.tiling.used.block_rows

    @property
    def block_cols(self) -> int:
        """Bc."""
        return self.tiling.used.block_cols

    @property
    def blocks(self) -> tuple[int, int]:
        """(Br, Bc)."""
        return self.block_rows, self.block_cols

    @property
    def row_blocks(self) -> int:
        """Tr = ceil(Nq / Br)."""
        return -(-self.problem.seqlen_q // self.block_rows)

    @property
    def col_blocks(self) -> int:
        """Tc = ceil(Nk / Bc)."""
        return -(-self.problem.seqlen_k // self.block_cols)


def padded_dim(d: int) -> int:
    """d rounded up to the tensor core's 16; the padding is zero and exists on chip only."""
    return -(-d // GRANULE) * GRANULE


def row_bytes(problem: Problem) -> int:
    """Bytes of one row of a Q or K tile in shared memory."""
    return padded_dim(problem.head_dim) * problem.itemsize + ROW_PADDING_BYTES


def value_row_bytes(problem: Problem) -> int:
    """Bytes of one row of a V tile in shared memory."""
    return padded_dim(problem.head_dim_v) * problem.itemsize + ROW_PADDING_BYTES


def require_block_mask(schedule: TileSchedule, blocks: tuple[int, int] | None = None) -> None:
    """ValueError unless the block mask, if there is one, has an element for each of `blocks` (Br, Bc), or of the schedule's."""
    p = schedule.problem
    rows, cols = blocks or schedule.blocks
    needed = -(-p.seqlen_q // rows), -(-p.seqlen_k // cols)
    if p.options.block_mask is not None and p.options.block_mask.shape[2:] != needed:
        raise ValueError(
            f"block_mask must be (..., Tr, Tc) = (..., {needed[0]}, {needed[1]}) for blocks of Br {rows} x Bc {cols}, got "
            f"{p.options.block_mask.shape}; tiling=(Br, Bc) chooses the blocks"
        )


def sub_tile(problem: Problem, block_cols: int) -> int:
    """Columns of K_j that are held in registers as S at a time: the widest piece that divides Bc."""
    # Beside S a thread holds d / 2 registers of O: what is left of 255 without spilling.
    d = max(problem.head_dim, problem.head_dim_v)
    if d > 128:
        widest = 16
    elif problem.itemsize == 4 or (d > 64 and problem.options.of_scores):
        widest = 32
    else:
        widest = 64
    return next(width for width in range(widest, 0, -GRANULE) if block_cols % width == 0)


def element_constants(problem: Problem, with_derivative: bool = False, by_tiles: bool = False) -> Constants:
    """The constants that every attention kernel takes: element type, d and d_v, masks and copy width, and the score function as
    `score.constants` has it."""
    asked = problem.options
    return (
        *named(ELEMENT=ELEMENT_TYPE[problem.dtype], HEAD_DIM=problem.head_dim, VALUE_DIM=problem.head_dim_v),
        *named(WINDOW=int(asked.window is not None), MASK=2 if asked.mask_function else int(asked.mask)),
        *named(SPARSE=int(asked.block_mask is not None)),
        *((name.upper(), int(getattr(asked, name))) for name in ("causal", "bias", "padded", *VECTORS)),
        *named(COPY_BYTES=problem.alignment),
        *(named(DROPOUT=1) if asked.dropout else ()),
        *(score.constants(asked.score, with_derivative, by_tiles) if asked.score else ()),
        *(score.mask_constants(asked.mask_function, by_tiles) if asked.mask_function else ()),
    )


def attention_params(*own: Field, maps: tuple[str, ...] = ()) -> Params:
    """The struct of an algorithm's kernels: the fields that all of them have, and fields of its `own`; with tensor `maps` in place
    of Q, K, V and O if it has any."""
    tensors = (*params.arrays("const Element", params.ROWS, "QKV"), Field("O", "Element", params.ROWS))
    return Params(
        (
            *(params.maps(*maps) if maps else tensors),
            Field("L", "float", params.POINTER),
            *own,
            Field("mask", "const unsigned char", params.SCORES),
            Field("bias", "const Element", params.SCORES),
            Field("block_mask", "const unsigned char", params.SCORES),
            *params.arrays("const int", params.POINTER, ("key_lengths", "cu_seqlens_q", "cu_seqlens_k")),
            Field("rows", "long long"),
            *params.numbers("int", "Nq", "Nk", "total_q", "heads", "group", "sequences", "left", "right"),
            *params.numbers("float", "scale", "scale_log2"),
        )
    )


def tile_constants(schedule: TileSchedule) -> Constants:
    """The constants that tell kernels which skip tiles where the states are."""
    return tuple(("TILES", each.field) for each in schedule.mask_tiles[:1])


@lru_cache(maxsize=256)
def in_float32(struct: Params, name: str) -> Params:
    """A struct in which an array, usually of the elements' type, is of float32."""
    return Params(
        tuple(replace(each, type=each.type.replace("Element", "float")) if each.name == name else each for each in struct.fields)
    )


@lru_cache(maxsize=256)
def whole_struct(
    own: Params,
    functions: tuple[score.Form | None, ...],
    dropped: bool,
    tiles: tuple[str, ...],
    sums: tuple[Field, ...] = (),
) -> Params:
    """An algorithm's struct with the fields that a problem adds: captured arrays, `sums` of their gradients and the states of a
    mask's tiles, after maps and before the first pointer, where C aligns as Python does; captured numbers, dropout's; and vectors
    last, so that a new one moves no other field."""
    fields = [
        CapturedField.of(score.field(one.name, form.kind), ELEMENTS[one.dtype], one.axes)
        if one.axes is not None
        else Field(score.field(one.name, form.kind), score.C_TYPES[one.type])
        for form in functions
        if form is not None
        for one in form.captured
    ]
    arrays = [each for each in fields if each.axes is not None]
    numbers = [each for each in fields if each.axes is None] + [*DROPOUT_FIELDS] * dropped
    states, maps = params.arrays("TileState", params.SCORES, tiles), len(own.maps)
    vectors = params.arrays("const float", params.POINTER, VECTORS)
    return Params((*own.fields[:maps], *arrays, *sums, *states, *own.fields[maps:], *numbers, *vectors))


def require_kernel_tiling(schedule: TileSchedule, shared_bytes: int) -> None:
    """ValueError unless the used block sizes, dtype and device are ones that the kernels can run."""
    used, problem, device = schedule.tiling.used, schedule.problem, schedule.device
    if used.block_rows % GRANULE or used.block_cols % GRANULE or used.block_rows > MAX_BLOCK_ROWS:
        fitted = f"; the fitted sizes are {schedule.tiling.fitted}" if schedule.tiling.fitted else ""
        raise ValueError(
            f"the {schedule.algorithm} kernel runs blocks in steps of {GRANULE}, with at most {MAX_BLOCK_ROWS} rows; "
            f"the tiling asks for {used}{fitted}"
        )
    if shared_bytes > device.sram_per_block:
        raise DoesNotFit(
            f"{schedule.algorithm} with {used} needs {shared_bytes:,} bytes of shared memory at head_dim "
            f"{problem.head_dim} {problem.dtype}; {device.name} gives a block {device.sram_per_block:,} bytes"
        )
    require_dtype(problem.dtype, device)


def least_capability(dtype: str) -> tuple[int, int]:
    """The first compute capability whose kernels have an element type."""
    return (8, 0) if dtype == "bfloat16" else (7, 5)


def has_dtype(dtype: str, device: Device) -> bool:
    """True if the device's generation has the element type."""
    return device.compute_capability >= least_capability(dtype)


def require_dtype(dtype: str, device: Device) -> None:
    """ValueError unless the device's generation has the element type."""
    least = least_capability(dtype)
    if not has_dtype(dtype, device):
        raise ValueError(
            f"{dtype} needs compute capability {least[0]}.{least[1]} or later; {device.name} has "
            f"{device.compute_capability[0]}.{device.compute_capability[1]}"
        )
