"""The blocks of FlashAttention-2's backward kernels: their needs of SRAM and registers, and the choice among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from cupyflash.device import Device
from cupyflash.request.problem import USUAL_HEAD_DIM, Problem
from cupyflash.schedules.base import GRANULE, padded_dim, total_bytes
from cupyflash.schedules.fa2_tiles import narrow as narrow_copies
from cupyflash.schedules.fa2_tiles import positioned
from cupyflash.schedules.mask_tiles import kept_bytes, words
from cupyflash.schedules.moves import FLOAT32, Room, part_bytes
from cupyflash.schedules.row_bases import given_floats
from cupyflash.tiling import DoesNotFit, TileSize
from cupyflash.words import plural

MOST_WARPS = 8
BLOCK_ROWS = (64, 48, 32, 16)
BLOCK_COLS = (128, 64, 48, 32, 16)
# d + d_v of the gradients of 16 keys that a warp has in registers, by item size: wider heads take a launch for each.
MOST_ACCUMULATORS = {2: 256, 4: 128}
# Of the multiprocessor's SRAM, what a thread block takes beside its own.
RESERVED = 1024


@dataclass(frozen=True)
class Warps:
    """The division of S^T (in dQ's kernel: of S) among the warps of a block: each warp owns `own` of its rows and computes
    `at_once` of its columns at a time; `beside` warps have the same rows."""

    own: int
    at_once: int
    beside: int = 1

    def count(self, rows: int) -> int:
        """Warps of a thread block with `rows` rows."""
        return rows // self.own * self.beside

    def of(self, rows: int, what: str) -> str:
        """The warps of a block of `rows` in words."""
        same = f", {self.beside} to the same" if self.beside > 1 else ""
        return f"{plural(self.count(rows), 'warp')} of {self.own} {what}{same}"


# Of wide heads two warps share the columns of a gradient; each makes 16 x 16 of S^T, or of S.
SHARING = Warps(GRANULE, GRANULE, 2)
# What there may be room for, the best first
STAGES = (2, 1, 0)


@dataclass(frozen=True)
class GradientsLaunch:
    """One launch of the main kernel: the gradients that it computes. dQ goes with dK."""

    dk: bool
    dv: bool


def launches(problem: Problem) -> tuple[GradientsLaunch, ...]:
    """The launches of dK and dV: together, or one after the other if a warp's registers do not hold both."""
    if padded_dim(problem.head_dim) + padded_dim(problem.head_dim_v) <= MOST_ACCUMULATORS[problem.itemsize]:
        return (GradientsLaunch(dk=True, dv=True),)
    return GradientsLaunch(dk=False, dv=True), GradientsLaunch(dk=True, dv=False)


def is_wide(*dims: int) -> bool:
    """True if a gradient of 16 keys or rows has more columns than a warp's registers hold, so that two warps share them."""
    return max(dims) > USUAL_HEAD_DIM


def row_lanes(problem: Problem) -> int:
    """Lanes that a row has in the first and last kernel: ROW_LANES in fa2_backward.cu, a power of two."""
    pieces = max(problem.head_dim, problem.head_dim_v) // max(1, problem.alignment // problem.itemsize)
    return min(32, 1 << (pieces - 1).bit_length())


def block_mask_column_bytes(problem: Problem, block_rows: int) -> int:
    """Bytes for the block mask's bits of a column block, for each query head of a group, a bit a block in words of 32."""
    return kept_bytes(problem, problem.group * words(problem.seqlen_q, block_rows))


def main_tiles(problem: Problem, block_rows: int, block_cols: int, stages: int, beside: int = 1) -> tuple[Room, ...]:
    """The rooms in shared memory: K_j and V_j, dS, P if warps have the same keys, the Q and dO blocks with L and D, the column
    block's part of a block mask. A launch that computes only one of dK and dV has one room for dS or P. Without a stage there is
    room for either a Q or a dO block."""
    size, both, slots = problem.itemsize, len(launches(problem)) == 1, max(stages, 1)
    row, value_row = (shared_dim(d, beside) * size for d in (problem.head_dim, problem.head_dim_v))
    return (
        Room("K", block_cols * row),
        Room("V", block_cols * value_row),
        Room("dS", block_cols * block_rows * size),
        Room("P", (beside - 1) * block_cols * block_rows * size if both else 0),
        Room("Q, dO", block_rows * (stages * (row + value_row) or max(row, value_row))),
        Room("L, D", slots * (given_floats(problem) + 1) * block_rows * FLOAT32),
        Room("block_mask", block_mask_column_bytes(problem, block_rows)),
        Room("parts", part_bytes(problem, slots * block_rows, block_cols)),
    )


def shared_dim(d: int, beside: int) -> int:
    """Columns of a row in shared memory that `beside` warps share evenly."""
    return -(-d // (beside * GRANULE)) * beside * GRANULE


def query_tiles(problem: Problem, block_rows: int, block_cols: int, stages: int) -> tuple[Room, ...]:
    """The rooms in shared memory of the kernel of dQ: Q_i and dO_i, the K and V blocks, dS if warps share dQ's columns, L and D,
    the row block's part of a block mask. Without a stage there is room for either a K or a V block."""
    wide, size = is_wide(problem.head_dim), problem.itemsize
    row, value_row = shared_dim(problem.head_dim, 1 + wide) * size, padded_dim(problem.head_dim_v) * size
    return (
        Room("Q", block_rows * row),
        Room("dO", block_rows * value_row),
        Room("K", block_cols * (stages * row or max(row, value_row))),
        Room("V", stages * block_cols * value_row),
        Room("dS", wide * block_rows * block_cols * size),
        Room("L, D", (given_floats(problem) + 1) * block_rows * FLOAT32),
        Room("block_mask", kept_bytes(problem, words(problem.seqlen_k, block_cols))),
        Room("parts", part_bytes(problem, block_rows, 2 * block_cols)),
    )


def warps_for(problem: Problem, device: Device, block_rows: int, block_cols: int) -> Warps:
    """The division among warps: 32 keys a warp if registers hold their gradients and two blocks, or one of eight warps, fill a
    multiprocessor; else 16.

    With 32 keys Q and dO are read from shared memory half as often. From d 64 on a warp has half of the columns of the gradients.
    """
    if is_wide(problem.head_dim, problem.head_dim_v):
        return SHARING
    narrow, wide = _half_widths(problem, device)
    if narrow and block_cols == 128 and block_rows % 32 == 0 and _two_fit(main_tiles(problem, block_rows, block_cols, 2), device):
        return Warps(32, 32)
    need = total_bytes(main_tiles(problem, block_rows, block_cols, 2, 2))
    if wide and (block_rows, block_cols) == (64, 128) and need <= device.sram_per_block:
        return Warps(32, 32, 2)
    return Warps(16, block_rows)


def query_warps_for(problem: Problem, device: Device, block_rows: int, block_cols: int) -> Warps:
    """The division among the warps of the kernel of dQ. Up to d 64 Q and dO stay in registers too. At d 128 two warps share their
    rows if a multiprocessor has no room for two blocks without that. The bounds of a window or a sequence have no room in registers
    beside them, and on compute capability 12.0 ptxas spills."""
    if is_wide(problem.head_dim):
        return SHARING
    room = not positioned(problem) and device.compute_capability < (12, 0)
    narrow, wide = (width and room for width in _half_widths(problem, device))
    rooms = query_tiles(problem, block_rows, block_cols, 2)
    if narrow and block_rows == 128 and block_cols in (32, 64) and _two_fit(rooms, device):
        return Warps(32, 32)
    if wide and _two_fit(query_tiles(problem, 128, 32, 2), device):
        return Warps(32, 32) if (block_rows, block_cols) == (128, 32) else Warps(16, block_cols)
    if wide and (block_rows, block_cols) == (128, 64) and total_bytes(rooms) <= device.sram_per_block:
        return Warps(32, 32, 2)
    return Warps(16, block_cols)


def narrower(warps: Warps, at_once: int) -> tuple[Warps, ...]:
    """Others for the same blocks that take fewer registers: of 16 keys (in dQ's kernel rows), and ever less of `at_once`, all
    columns, at once."""
    parts = [size for size in range(at_once, 0, -GRANULE) if at_once % size == 0]
    if warps.own == GRANULE:
        parts = [size for size in parts if size < warps.at_once]
    return tuple(Warps(GRANULE, size) for size in parts)


def _half_widths(problem: Problem, device: Device) -> tuple[bool, bool]:
    """(d and d_v are at most 64, both are 128), for half types on tensor cores that multiply 16 deep, without an element for each
    score; else False."""
    d, dv = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    served = problem.itemsize == 2 and device.compute_capability >= (8, 0) and not problem.options.of_scores
    return served and max(d, dv) <= 64, served and d == dv == 128


def _two_fit(rooms: tuple[Room, ...], device: Device) -> bool:
    """True if a block may have so much shared memory, and two of them fit a multiprocessor's."""
    need = total_bytes(rooms)
    return need <= device.sram_per_block and 2 * (need + RESERVED) <= device.sram_per_sm


def stages_for(problem: Problem, device: Device, block_rows: int, block_cols: int) -> int | None:
    """The number of Q and dO blocks for which there is room: two if they fit, 0 if Q and dO take turns, None if not even one of
    them fits."""
    warps = warps_for(problem, device, block_rows, block_cols)
    if warps.own > GRANULE:
        return 2
    needs = {n: total_bytes(main_tiles(problem, block_rows, block_cols, n, warps.beside)) for n in STAGES}
    return _fitting(needs, _least_stages(warps, (block_rows, block_cols)), device)


def query_stages_for(problem: Problem, device: Device, block_rows: int, block_cols: int) -> int | None:
    """The number of K and V blocks for which the kernel of dQ has room; None as in `stages_for`."""
    needs = {n: total_bytes(query_tiles(problem, block_rows, block_cols, n)) for n in STAGES}
    warps = query_warps_for(problem, device, block_rows, block_cols)
    return _fitting(needs, _least_stages(warps, (block_rows, block_cols)), device)


def _least_stages(warps: Warps, size: tuple[int, int]) -> int:
    """The least number of stages: the smallest blocks of wide heads do without one, if not even one fits."""
    return 0 if warps == SHARING and size == (GRANULE, GRANULE) else 1


def _fitting(needs: dict[int, int], least: int, device: Device) -> int | None:
    """The most stages that fit."""
    return next((n for n in needs if n >= least and needs[n] <= device.sram_per_block), None)


def most_rows(problem: Problem, device: Device, warps: Warps) -> int:
    """Br beyond which S^T and dP^T, beside the gradients, were seen to spill; `.ci/compile_gate.py` holds it to that."""
    d, masked = max(problem.head_dim, problem.head_dim_v), problem.options.of_scores
    both = problem.options.masked and problem.options.bias and narrow_copies(problem)  # whose addresses they take
    if warps == SHARING:
        return warps.own * (1 if both else warps.beside)
    if problem.itemsize == 4:
        return 32 if d <= 64 and not (masked and device.compute_capability < (8, 0)) else 16
    if d <= 64:
        return (32 if device.compute_capability >= (12, 0) else 48) if masked else 64
    if d <= 96:
        return 32 if masked or positioned(problem) or device.compute_capability >= (12, 0) else 64
    parts = part_bytes(problem, GRANULE, GRANULE) > 0 and device.compute_capability < (8, 0)  # score_parts.cuh
    return 16 if (d > 192 and masked) or both or parts else 32


def _blocks(within: tuple[int, int] | None) -> Iterator[tuple[int, int]]:
    """Block sizes in order of preference: many columns, since Q and dO are read once for each column block."""
    if within is None:
        yield from itertools.product(BLOCK_COLS, BLOCK_ROWS)
        return
    rows, cols = ([size for size in range(MOST_WARPS * GRANULE, 0, -GRANULE) if whole % size == 0] for whole in within)
    yield from itertools.product(cols, rows)


@dataclass(frozen=True)
class BackwardCandidate:
    """Blocks of a kernel with their needs: the division among warps, the number of `stages` (the least if none fit), bytes of
    shared memory; or the reason why they were rejected."""

    block_rows: int
    block_cols: int
    warps: Warps
    count: int
    stages: int
    shared_bytes: int
    rejected: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.block_rows, self.block_cols


def candidates(problem: Problem, device: Device, within: tuple[int, int] | None = None) -> Iterator[BackwardCandidate]:
    """The main kernel's blocks, the best first: the first one that is not rejected is chosen. They divide `within`, if it
    is given."""
    for cols, rows in _blocks(within):
        warps, stages = warps_for(problem, device, rows, cols), stages_for(problem, device, rows, cols)
        rooms = partial(main_tiles, problem, rows, cols, beside=warps.beside)
        yield _candidate(problem, device, (rows, cols), warps, stages, rooms, keys=True)


def query_candidates(problem: Problem, device: Device, within: tuple[int, int] | None = None) -> Iterator[BackwardCandidate]:
    """The same of the kernel of dQ."""
    blocks = _blocks(None if within is None else (within[1], within[0]))
    for rows, cols in sorted(blocks, key=lambda each: query_warps_for(problem, device, *each).own, reverse=True):
        warps, stages = query_warps_for(problem, device, rows, cols), query_stages_for(problem, device, rows, cols)
        yield _candidate(problem, device, (rows, cols), warps, stages, partial(query_tiles, problem, rows, cols), keys=False)


def _candidate(
    problem: Problem,
    device: Device,
    size: tuple[int, int],
    warps: Warps,
    stages: int | None,
    rooms: Callable[..., tuple[Room, ...]],
    *,
    keys: bool,
) -> BackwardCandidate:
    """A candidate with blocks whose warps own `keys` keys, or rows."""
    at_once, own = size if keys else size[::-1]
    held, most = _least_stages(warps, size) if stages is None else stages, most_rows(problem, device, warps)
    found = BackwardCandidate(*size, warps, warps.count(own), held, total_bytes(rooms(stages=held)))
    if stages is None:
        return replace(found, rejected=f"shared memory: {found.shared_bytes:,} of {device.sram_per_block:,} bytes")
    if at_once > most and warps.own == GRANULE:
        side = "rows" if keys else "columns"
        return replace(found, rejected=f"registers: S and dP of {at_once} {side} beside the gradients, which spill beyond {most}")
    if found.count > MOST_WARPS:
        return replace(found, rejected=f"registers: they feed {MOST_WARPS} warps, not {found.count}")
    return found


def fit(problem: Problem, device: Device, within: tuple[int, int] | None = None) -> TileSize:
    """The first blocks that registers and SRAM hold; they divide `within`, if it is given."""
    best = next((each for each in candidates(problem, device, within) if not each.rejected), None)
    if best is None:
        wide = is_wide(problem.head_dim, problem.head_dim_v)
        raise _refused(problem, device, main_tiles(problem, GRANULE, GRANULE, 1 - wide, 1 + wide), within)
    made = "dK and dV together" if len(launches(problem)) == 1 else "dV, then dK"
    room = plural(best.stages, "Q and dO block") if best.stages else "Q and dO by turns"
    return _taken(best, device, f"{best.warps.of(best.block_cols, 'keys')}, {made}, {room}")


def fit_queries(problem: Problem, device: Device, within: tuple[int, int] | None) -> TileSize:
    """The same for the kernel of dQ."""
    best = next((each for each in query_candidates(problem, device, within) if not each.rejected), None)
    if best is None:
        raise _refused(problem, device, query_tiles(problem, GRANULE, GRANULE, 1 - is_wide(problem.head_dim)), within)
    room = plural(best.stages, "K and V block") if best.stages else "K and V by turns"
    return _taken(best, device, f"{best.warps.of(best.block_rows, 'rows')}, {room}")


def _taken(best: BackwardCandidate, device: Device, what: str) -> TileSize:
    return TileSize(*best.size, f"{what}; {best.shared_bytes:,} of {device.sram_per_block:,} bytes")


def _refused(problem: Problem, device: Device, least: tuple[Room, ...], within: tuple[int, int] | None) -> ValueError:
    what = f"fa2's backward at head_dim {problem.head_dim} {problem.dtype}"
    if within is not None and (within[0] % GRANULE or within[1] % GRANULE):
        return ValueError(f"{what} runs blocks in steps of {GRANULE}; the tiling asks for Br {within[0]} x Bc {within[1]}")
    return DoesNotFit(
        f"{what} needs at least {total_bytes(least):,} bytes of SRAM; {device.name} gives a block {device.sram_per_block:,} bytes"
    )
