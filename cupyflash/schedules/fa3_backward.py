"""A backward for Hopper: FlashAttention-2's column blocks (arXiv 2307.08691, Algorithm 2), run by warpgroups with roles as in
FlashAttention-3 (arXiv 2407.08608).

The kernels before and behind the main one are FlashAttention-2's. With `deterministic` the thread blocks of a head add to dQ of a
row block one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch import params
from cupyflash.launch.params import POINTER, Params, arrays, numbers
from cupyflash.launch.tensor_maps import Box
from cupyflash.request.options import OPTIONS, Options, refused
from cupyflash.request.problem import Problem
from cupyflash.request.score import Constants, named
from cupyflash.schedules import fa3_tiles
from cupyflash.schedules.base import WARP, Kernel, Workspace, tile_constants, total_bytes
from cupyflash.schedules.fa2_backward import SUMMED_ROWS, Fa2BackwardSchedule
from cupyflash.schedules.fa2_backward_tiles import GradientsLaunch, Warps, block_mask_column_bytes
from cupyflash.schedules.fa3_tiles import BARRIER_BYTES, SLAB, WARPGROUP, WARPGROUP_ROWS, slab_bytes
from cupyflash.schedules.moves import BEGIN, END, MIXED, VISIT, Move, Room, Tensor, Walk, captured
from cupyflash.schedules.parts import Part
from cupyflash.tiling import DoesNotFit, TileSize

CONSUMERS = 2
"""Consumer warpgroups of a thread block."""
WARPS = CONSUMERS * WARPGROUP // WARP
"""Consumer warps of a thread block."""
STAGES = 2
"""Slots of the rings of Q and dO."""
PAIR = 2
"""Thread blocks of a cluster, which share the columns of dQ."""
REGISTERS = 240, 24
"""Registers of a consumer's and of a producer's thread."""
MOST_DIM = 256
"""The most that d and d_v may be: beyond it registers do not hold half of dK and dV of 64 keys."""
WIDE_DIM = 128
"""Beyond it they do not hold all columns of dK and dV of 64 keys: warpgroups share those."""
MOST_SCALED_DIM = 192
"""The most that they may be beside a bias, dropout or what a score function reads, whose addresses and numbers take registers."""
FLOATS_OF_ROW = 3
"""Numbers of each row in a slot: two that its exponents are relative to, and D."""
WORD = 4
TURNS = Tensor("turns", "row block", 1, WORD)
"""Turns to add to dQ of a row block, at its first row."""
MOST_BLOCKS = (1 << 16) - 1
"""Column blocks that a turn's word counts."""
WORK_BYTES = 48
"""For what a thread block has to do, which one thread finds for all."""
OWN = (*numbers("int", "alternate"), *arrays("int", POINTER, ("turns",)))
MAPPED = ("Q", "dO", "K", "V", "dK", "dV")
"""Tensors that TMA moves."""


def _most_dims(asked: Options) -> Iterator[tuple[str, int]]:
    """Yield what needs registers beside wide heads, with the most that d and d_v then may be."""
    if asked.bias and (asked.masked or asked.score or asked.dropout):
        yield "a bias beside masks, a score function or dropout", SLAB
    if asked.bias:
        yield "a bias", MOST_SCALED_DIM
    if asked.score and asked.score.loads:
        yield "a score function of captured arrays", MOST_SCALED_DIM
    if asked.dropout:
        yield "dropout", MOST_SCALED_DIM


def is_wide(problem: Problem) -> bool:
    """True if the warpgroups have the same keys, and each has half of the columns of their gradients."""
    return max(problem.head_dim, problem.head_dim_v) > WIDE_DIM


def cluster(problem: Problem) -> int:
    """Thread blocks of a cluster: a pair if heads are wide, and dQ has columns for all of its warpgroups, unless masks, scores or
    packed sequences ask for more."""
    asked = problem.options
    more = asked.masked or asked.score or asked.bias or asked.dropout or asked.packed
    return PAIR if is_wide(problem) and problem.head_dim > SLAB and not more else 1


def own_cols(problem: Problem) -> int:
    """Keys of a thread block: 64 for each consumer warpgroup, whose registers hold their dK and dV; for both if heads are wide."""
    return WARPGROUP_ROWS * (1 if is_wide(problem) else CONSUMERS)


def block_cols(problem: Problem) -> int:
    """Bc: the keys of a thread block, or of a pair."""
    return own_cols(problem) * cluster(problem)


def peer_slabs(problem: Problem) -> int:
    """Slabs of K that have the columns of dQ which a thread block of a pair makes, over the other one's keys too."""
    return -(-problem.head_dim // SLAB // 2) if cluster(problem) > 1 else 0


def block_rows(problem: Problem) -> int:
    """Br: as many rows as registers hold of S and dP beside the gradients, and what is asked for each score."""
    asked = problem.options
    few = max(problem.head_dim, problem.head_dim_v) <= SLAB and not (asked.dropout or asked.masked or asked.bias or asked.score)
    return 2 * WARPGROUP_ROWS if few else WARPGROUP_ROWS


def refusal(problem: Problem, device: Device) -> str | None:
    """The reason why the kernel does not run a problem with any tile, in one sentence; None if it does."""
    if (widest := max(problem.head_dim, problem.head_dim_v)) > MOST_DIM:
        return f"the kernel takes d and d_v up to {MOST_DIM}, and this has {widest}"
    asked = problem.options
    for words, most in _most_dims(asked):
        if widest > most:
            return f"the kernel takes {words} with d and d_v up to {most}, and this has {widest}"
    if lacking := refused(asked, "fa3 backward"):
        return f"the kernel has no place for {OPTIONS[lacking].words}"
    if problem.seqlen_k > (most := MOST_BLOCKS // adders(problem) * block_cols(problem)):
        return f"the kernel takes up to {most:,} keys, and this has {problem.seqlen_k:,}"
    return fa3_tiles.refusal(problem, device)


def adders(problem: Problem) -> int:
    """Warps of a thread block or a pair that each add a part of dQ: the consumers' if heads are wide, from registers."""
    return WARPS * cluster(problem) if is_wide(problem) else 1


def rooms(problem: Problem, rows: int) -> tuple[Room, ...]:
    """Bytes of shared memory of a thread block by contents: K and V, through which dK and dV leave, the rings, dS of this turn and
    of the one before or of both thread blocks of a pair, dQ unless heads are wide, the columns of a pair's other keys, and the
    barriers with what tells whether a slot has a row of large scores."""
    k, v = slab_bytes(problem.head_dim), slab_bytes(problem.head_dim_v)
    whole, cols = -(-problem.head_dim // 16) * 16, own_cols(problem)
    of_sums = 0 if is_wide(problem) else (rows + SUMMED_ROWS * problem.options.packed) * whole * WORD
    return (
        Room("K", cols * k),
        Room("V", cols * v),
        Room("Q, dO", STAGES * rows * (k + v)),
        Room("dS", 2 * cols * slab_bytes(rows)),
        Room("dQ", of_sums),
        Room("the other's K", peer_slabs(problem) * cols * slab_bytes(SLAB)),
        Room("L, D", STAGES * rows * FLOATS_OF_ROW * WORD),
        Room("barriers", BARRIER_BYTES * (4 + 6 * STAGES) + WORK_BYTES + WORD * STAGES),
        Room("mask's tiles", block_mask_column_bytes(problem, rows)),
    )


def fit(problem: Problem, device: Device) -> TileSize:
    """The blocks of the kernel. ValueError if `refusal` has a reason, `DoesNotFit` if shared memory is too small."""
    if reason := refusal(problem, device):
        raise ValueError(f"fa3's backward does not run this: {reason}")
    rows = block_rows(problem)
    need = total_bytes(rooms(problem, rows))
    if need > device.sram_per_block:
        raise DoesNotFit(
            f"fa3's backward needs {need:,} bytes of SRAM; {device.name} gives a block {device.sram_per_block:,} bytes"
        )
    beside = "" if cluster(problem) == 1 else ", in pairs of thread blocks"
    words = f"a producer and {CONSUMERS} consumer warpgroups{beside}; {need:,} of {device.sram_per_block:,} bytes"
    return TileSize(rows, block_cols(problem), words)


@dataclass(frozen=True)
class Fa3BackwardSchedule(Fa2BackwardSchedule):
    """A thread block, or a pair of them, is a column block of a key head, and visits the row blocks that see it, of every query
    head of the group.

    TMA copies the part of a block that is in the tensor: if a batch has fewer keys than k, the block in which they end is copied
    whole.
    """

    algorithm: ClassVar[str] = "fa3"
    whole_boxes: ClassVar[bool] = True
    by_tiles: ClassVar[bool] = False
    params: ClassVar[Params] = Params(
        (*params.maps(*(f"{name}_tiles" for name in MAPPED)), *Fa2BackwardSchedule.params.fields, *OWN)
    )
    signals: ClassVar[tuple[str, ...]] = ("turns",)

    @property
    def stages(self) -> int:
        return STAGES

    @property
    def state_words(self) -> int | None:
        """None if thread blocks add to dQ one after the other: each has its turn then."""
        return None if self.deterministic else super().state_words

    @property
    def launches(self) -> tuple[GradientsLaunch, ...]:
        return (GradientsLaunch(dk=True, dv=True),)

    @property
    def readers(self) -> int:
        return CONSUMERS if is_wide(self.problem) else 1

    def head_reads(self) -> tuple[Move, ...]:
        """Each consumer warp reads it anew, since query heads take turns; a mask's alone where it asks the mask."""
        return captured(self.problem, "head", VISIT, None if self.problem.options.score else MIXED, times=WARPS)

    @property
    def cluster(self) -> int:
        return self.block_cols // self.own_cols  # the tile says it: one of packed sequences does not know that it is

    @property
    def adders(self) -> int:
        """Warps that each add a part of dQ of a row block, of those that have a column block together."""
        return WARPS * self.cluster if is_wide(self.problem) else 1

    @property
    def own_cols(self) -> int:
        return own_cols(self.problem)

    def _rooms(self, warps: Warps) -> tuple[Room, ...]:
        return rooms(self.problem, self.block_rows)

    @property
    def sums_queries(self) -> bool:
        return True

    @property
    def alternate(self) -> int:
        """Key heads whose thread blocks alternate in the launch.

        As many as the device holds at a time, if thread blocks have turns in different numbers: the last to begin are then short.
        If they add one after the other, a block begins about as much later than the one before it as it waits for that one; of
        different lengths twice as many wait less (simulated: 1.03 times the mean turns, with as many as the device holds 1.06).
        """
        held, asked = max(1, round(self.device.sm_count / max(1, self.col_blocks * self.cluster))), self.problem.options
        unlike = asked.causal or asked.window is not None or asked.padded
        return held * (1 + unlike) if self.deterministic else held if unlike else 1

    def numbers(self) -> Mapping[str, int]:
        return {"alternate": self.alternate}

    @property
    def begun(self) -> tuple[Move, ...]:
        return (Move(replace(TURNS, of="query"), END, write=True),) if self.deterministic else ()

    def _main_walk(self, launch: GradientsLaunch, parts: tuple[Part, ...], sums: Tensor) -> Walk:
        walk = replace(super()._main_walk(launch, parts, sums), loop="Ig", alternate=self.alternate, cluster=self.cluster)
        if not self.deterministic:
            return walk
        added = Move(TURNS, VISIT, write=True, times=self.adders)
        return replace(walk, moves=(*walk.moves, Move(TURNS, BEGIN, write=True), added))

    def workspaces(self) -> Mapping[str, Workspace]:
        turns = {"turns": Workspace(self.query_shape, "int32")} if self.deterministic else {}
        return {**super().workspaces(), **turns}

    def maps(self) -> Mapping[str, Box]:
        rows = {"Q": self.block_rows, "dO": self.block_rows, "K": self.own_cols, "V": self.own_cols}
        return {f"{name}_tiles": Box(name, rows.get(name, WARPGROUP_ROWS), SLAB, fa3_tiles.SWIZZLE) for name in MAPPED}

    def kernels(self) -> tuple[Kernel, ...]:
        if reason := refusal(self.problem, self.device):
            raise ValueError(f"fa3's backward does not run this: {reason}")
        if self.blocks != (runs := (block_rows(self.problem), block_cols(self.problem))):
            raise ValueError(f"fa3's backward runs blocks of Br {runs[0]} x Bc {runs[1]}; the tiling asks for {self.tiling.used}")
        return super().kernels()

    def _main(self, launch: GradientsLaunch, warps: Warps) -> Kernel:
        threads, shared = WARPGROUP * (1 + CONSUMERS), total_bytes(self._rooms(warps))
        grid, constants, pair = self.grid * self.cluster, self._constants(launch, warps), self.cluster
        name = "fa3_backward"
        return Kernel(f"{name}.cu", name, constants, grid, threads, shared, self.struct, accelerated=True, cluster=pair)

    def _constants(self, launch: GradientsLaunch, warps: Warps) -> Constants:
        consumer, producer = REGISTERS
        return (
            *self.constants(),
            *named(
                STAGES=STAGES,
                CONSUMERS=CONSUMERS,
                CONSUMER_REGISTERS=consumer,
                PRODUCER_REGISTERS=producer,
                PING_PONG=int(self.cluster == 1),
                CLUSTER=self.cluster,
            ),
            *tile_constants(self),
            *named(ORDERED=int(self.deterministic), DBIAS=int(self.dbias)),
        )
