"""A backward for Hopper: FlashAttention-2's column blocks (arXiv 2307.08691, Algorithm 2), run by warpgroups with roles as in
FlashAttention-3 (arXiv 2407.08608).

The kernels before and behind the main one are FlashAttention-2's. With `deterministic` the thread blocks of a head add to dQ of a
row block one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch import params
from cupyflash.launch.params import POINTER, Params, arrays, numbers
from cupyflash.launch.tensor_maps import Box
from cupyflash.request.options import OPTIONS, Options, refused
from cupyflash.request.problem import Problem
from cupyflash.request.score import Constants, named
from cupyflash.schedules import fa3_tiles
from cupyflash.schedules.base import WARP, Kernel, Workspace, padded_dim, tile_constants, total_bytes
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
REGISTERS, REGISTERS_APART = (240, 24, 0), ((208, 24, 72), (208, 32, 64))
"""Registers of a thread of a consumer, of a producer, and of the warpgroup that makes dQ: if there is none, and if there is one, by
itself and in a pair."""
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


@dataclass(frozen=True)
class Fa3BackwardTile(TileSize):
    """A design of the kernel: the blocks, and what its thread blocks and warpgroups share and when.

    `block_cols` are the keys of a thread block, or of a `cluster` of them: 64 for each consumer warpgroup, whose registers hold
    their dK and dV, or for both, each of which then has half of the columns. `in_turns`: warpgroups issue a turn's products one
    after the other. `late`: dP is begun behind P, not beside S, so that its registers are free until then. `apart`: dQ is made by
    a warpgroup of its own, which adds from registers.
    """

    cluster: int = 1
    in_turns: bool = True
    late: bool = False
    apart: bool = False

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread of a consumer, of a producer, and of the warpgroup that makes dQ: 0 if there is none."""
        return REGISTERS_APART[self.cluster > 1] if self.apart else REGISTERS

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + CONSUMERS + self.apart)

    @property
    def own_cols(self) -> int:
        """Keys of a thread block."""
        return self.block_cols // self.cluster

    @property
    def shares_keys(self) -> bool:
        """True if the warpgroups have the same keys, and each has half of the columns of their gradients."""
        return self.own_cols < WARPGROUP_ROWS * CONSUMERS

    @property
    def adders(self) -> int:
        """Warps of a thread block or a pair that each add a part of dQ: the consumers' if they share keys, or those of a warpgroup
        of its own, from registers; else one that adds what is in shared memory."""
        return (WARPGROUP // WARP if self.apart else WARPS) * self.cluster if self.shares_keys or self.apart else 1

    @property
    def most_keys(self) -> int:
        """Keys up to which a turn's word counts all that add."""
        return MOST_BLOCKS // self.adders * self.block_cols

    @property
    def sent_bytes(self) -> int:
        """Bytes of a key's dS that come from the other thread block of a pair: those of 64 rows."""
        return slab_bytes(WARPGROUP_ROWS) if self.cluster > 1 else 0

    def peer_slabs(self, problem: Problem) -> int:
        """Slabs of K that have the columns of dQ which a thread block of a pair makes, over the other one's keys too."""
        return -(-problem.head_dim // SLAB // 2) if self.cluster > 1 else 0

    @property
    def label(self) -> str:
        """A name that tells it from the others of a problem."""
        more = (", dQ apart" if self.apart else "") + (", dP late" if self.late else "") + ("" if self.in_turns else ", no turns")
        return f"{self.block_rows}x{self.block_cols}{more}"

    @property
    def words(self) -> str:
        beside = "" if self.cluster == 1 else ", in pairs of thread blocks"
        return f"a producer and {CONSUMERS} consumer warpgroups{' and one for dQ' if self.apart else ''}{beside}"


def designs(problem: Problem, deterministic: bool = False) -> tuple[Fa3BackwardTile, ...]:
    """The designs that the kernel has for a problem: the default first, then those that benchmarks time beside it, then the others.

    Beyond `WIDE_DIM` warpgroups share keys, in pairs of thread blocks if dQ has columns for all of a pair's warpgroups, unless
    masks, scores or packed sequences ask for more. Br is 128 where registers hold as many rows of S and dP beside the gradients and
    what is asked for each score. dP is late by default where what makes P takes registers. Up to `WIDE_DIM` dQ may be made apart,
    if nothing is asked for each score, in pairs unless sequences are packed or dQ is `deterministic`.
    """
    asked, widest = problem.options, max(problem.head_dim, problem.head_dim_v)
    own = bool(asked.masked or asked.score or asked.bias or asked.dropout)
    wide, few = widest > WIDE_DIM, widest <= SLAB and not own
    late = padded_dim(problem.head_dim) + padded_dim(problem.head_dim_v) > SLAB * (2 if asked.bias or asked.score else 6)
    rows, cols = WARPGROUP_ROWS * (2 if few else 1), WARPGROUP_ROWS * (1 if wide else CONSUMERS)
    single = Fa3BackwardTile(rows, cols, "", late=late)
    pair = replace(single, block_cols=PAIR * cols, cluster=PAIR, late=False)
    alone = own or asked.packed
    found = [single]
    if wide and problem.head_dim > SLAB and not alone:
        found = [replace(pair, in_turns=False), single]
    if not (wide or own):
        found += [replace(each, apart=True, late=True) for each in (single, *(() if alone or deterministic else (pair,)))]
    if few:
        found.append(replace(single, block_rows=WARPGROUP_ROWS))
    found += [replace(each, in_turns=False) for each in found if each.in_turns]
    found += [replace(each, late=True) for each in found if not each.late and each.cluster == 1]
    return tuple(found)


def design(problem: Problem, blocks: TileSize) -> Fa3BackwardTile:
    """The design of these blocks: `blocks` itself if it is one, else the first that has them; one to count with if none has."""
    if isinstance(blocks, Fa3BackwardTile):
        return blocks
    size, every = (blocks.block_rows, blocks.block_cols), designs(problem)
    found = next((each for each in every if (each.block_rows, each.block_cols) == size), replace(every[0], cluster=1))
    return replace(found, block_rows=size[0], block_cols=size[1], reason=blocks.reason)


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
    tile = designs(problem)[0]
    if problem.seqlen_k > tile.most_keys:
        return f"the kernel takes up to {tile.most_keys:,} keys, and this has {problem.seqlen_k:,}"
    return fa3_tiles.refusal(problem, device)


def rooms(problem: Problem, tile: Fa3BackwardTile) -> tuple[Room, ...]:
    """Bytes of shared memory of a thread block by contents: K and V, through which dK and dV leave, the rings, dS of this turn and
    of the one before or of both thread blocks of a pair, dQ unless warpgroups share keys, the columns of a pair's other keys, and
    the barriers with what tells whether a slot has a row of large scores."""
    k, v = slab_bytes(problem.head_dim), slab_bytes(problem.head_dim_v)
    whole, rows, cols = padded_dim(problem.head_dim), tile.block_rows, tile.own_cols
    of_sums = 0 if tile.shares_keys or tile.apart else (rows + SUMMED_ROWS * problem.options.packed) * whole * WORD
    return (
        Room("K", cols * k),
        Room("V", cols * v),
        Room("Q, dO", STAGES * rows * (k + v)),
        Room("dS", (1 if tile.cluster > 1 and tile.shares_keys else 2) * cols * (slab_bytes(rows) + tile.sent_bytes)),
        Room("dQ", of_sums),
        Room("the other's K", tile.peer_slabs(problem) * cols * slab_bytes(SLAB)),
        Room("L, D", STAGES * rows * FLOATS_OF_ROW * WORD),
        Room("barriers", BARRIER_BYTES * (4 + 6 * STAGES) + WORK_BYTES + WORD * STAGES),
        Room("mask's tiles", block_mask_column_bytes(problem, rows)),
    )


def fit(problem: Problem, device: Device) -> TileSize:
    """The blocks of the kernel. ValueError if `refusal` has a reason, `DoesNotFit` if shared memory is too small."""
    if reason := refusal(problem, device):
        raise ValueError(f"fa3's backward does not run this: {reason}")
    tile = designs(problem)[0]
    need = total_bytes(rooms(problem, tile))
    if need > device.sram_per_block:
        raise DoesNotFit(
            f"fa3's backward needs {need:,} bytes of SRAM; {device.name} gives a block {device.sram_per_block:,} bytes"
        )
    return replace(tile, reason=f"{tile.words}; {need:,} of {device.sram_per_block:,} bytes")


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

    @cached_property
    def tile(self) -> Fa3BackwardTile:
        """The design, that of the tiling's blocks if the tiling says no more."""
        return design(self.problem, self.tiling.used)

    @property
    def readers(self) -> int:
        return CONSUMERS if self.tile.shares_keys else 1

    def head_reads(self) -> tuple[Move, ...]:
        """Each consumer warp reads it anew, since query heads take turns; a mask's alone where it asks the mask."""
        return captured(self.problem, "head", VISIT, None if self.problem.options.score else MIXED, times=WARPS)

    @property
    def cluster(self) -> int:
        return self.tile.cluster  # of a sequence the packed ones' tile: its problem does not say that it is packed

    @property
    def adders(self) -> int:
        """Warps that each add a part of dQ of a row block, of those that have a column block together."""
        return self.tile.adders

    @property
    def own_cols(self) -> int:
        return self.tile.own_cols

    def _rooms(self, warps: Warps) -> tuple[Room, ...]:
        return rooms(self.problem, self.tile)

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
        every, tile = designs(self.problem, self.deterministic), self.tile
        blocks = dict.fromkeys(map(str, every))
        if str(tile) not in blocks:
            raise ValueError(f"fa3's backward runs blocks of {' or '.join(blocks)}; the tiling asks for {tile}")
        if replace(tile, reason="") not in every:
            runs = "; ".join(each.label for each in every)
            raise ValueError(f"fa3's backward does not run the design {tile.label!r} of this problem; it runs {runs}")
        if self.problem.seqlen_k > tile.most_keys:
            raise ValueError(f"this design takes up to {tile.most_keys:,} keys, and this has {self.problem.seqlen_k:,}")
        return super().kernels()

    def _main(self, launch: GradientsLaunch, warps: Warps) -> Kernel:
        threads, shared = self.tile.threads, total_bytes(self._rooms(warps))
        grid, constants, pair = self.grid * self.cluster, self._constants(launch, warps), self.cluster
        name = "fa3_backward"
        return Kernel(f"{name}.cu", name, constants, grid, threads, shared, self.struct, accelerated=True, cluster=pair)

    def _constants(self, launch: GradientsLaunch, warps: Warps) -> Constants:
        tile = self.tile
        consumer, producer, queries = tile.registers
        return (
            *self.constants(),
            *named(
                STAGES=STAGES,
                CONSUMERS=CONSUMERS,
                CONSUMER_REGISTERS=consumer,
                PRODUCER_REGISTERS=producer,
                QUERY_REGISTERS=queries,
                PING_PONG=int(tile.in_turns),
                LATE=int(tile.late),
                CLUSTER=tile.cluster,
            ),
            *tile_constants(self),
            *named(ORDERED=int(self.deterministic), DBIAS=int(self.dbias)),
        )
