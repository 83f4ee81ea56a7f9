"""Closed forms of the forward passes' HBM traffic and of softmax's, with their constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cupyflash.arrays import ITEMSIZE
from cupyflash.request.problem import Problem
from cupyflash.schedules import DecodeSchedule, SoftmaxSchedule, TileSchedule, VarlenSchedule
from cupyflash.schedules.add_state import AddStateSchedule
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim.theory.decode import decode_traffic
from cupyflash.sim.theory.visits import (
    FLOAT32,
    Kept,
    added,
    blocks_in,
    columns_of,
    head_bytes,
    lengths,
    mask_bytes,
    masks_and_lengths,
    searched_bytes,
    searched_tiles,
    seen_blocks,
    state_bytes,
    states_made,
    tile_bytes,
    visits_of,
)
from cupyflash.sim.traffic import TensorTraffic, Traffic


def forward_traffic(schedule: TileSchedule | SoftmaxSchedule | DropoutMaskSchedule | AddStateSchedule) -> Traffic:
    """The closed form of a schedule's HBM traffic, per tensor, in bytes."""
    if isinstance(schedule, SoftmaxSchedule):
        return softmax_traffic(schedule.rows, schedule.cols, schedule.dtype, schedule.algorithm)
    if isinstance(schedule, DropoutMaskSchedule):
        return Traffic({"kept": TensorTraffic(0, math.prod(schedule.shape))})
    if isinstance(schedule, AddStateSchedule):
        return add_state_traffic(schedule.rows, schedule.head_dim_v, schedule.dtype)
    if isinstance(schedule, VarlenSchedule):
        return _varlen(schedule)
    if isinstance(schedule, DecodeSchedule):
        return decode_traffic(schedule)
    form = {"fa1": _fa1, "fa2": _fa2, "fa3": _fa3, "standard": _standard}[schedule.algorithm]
    p = schedule.problem
    total: Counter[tuple[str, bool]] = Counter()
    together = schedule.pack if isinstance(schedule, Fa3Schedule) else 1
    for times, keys, kept in _heads(schedule):
        times //= together
        of_all = form(schedule, keys, None if kept is None else kept.visited)
        of_all["sinks"] = p.options.sinks * together * p.seqlen_q * FLOAT32, 0
        by_tiles = isinstance(schedule, Fa2Schedule) and schedule.by_tiles
        of_one = mask_bytes(p, keys, kept, (schedule.block_rows, schedule.block_cols), by_tiles)
        own = {name: (together * read, 0) for name, (read, _) in of_one.items()}
        of_all |= added(own, head_bytes(p, _blocks_of_scores(schedule)), _of_tiles(schedule, keys, kept) if by_tiles else {})
        for name, moved in of_all.items():
            for write, nbytes in enumerate(moved):
                total[name, bool(write)] += times * nbytes
    for name, moved in (states_made(schedule) | (_queue(schedule) if isinstance(schedule, Fa3Schedule) else {})).items():
        for write, nbytes in enumerate(moved):
            total[name, bool(write)] += nbytes
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _of_tiles(schedule: TileSchedule, keys: int, kept: Kept | None) -> dict[str, tuple[int, int]]:
    """The bytes that functions read for rows, once if they visit any column block, and for keys, at each visit; a mask's only at
    visits where it is evaluated."""
    visits, asked = (visits_of(schedule, keys, kept and kept[place]) for place in range(2))
    return tile_bytes(schedule.problem, visits.rows, visits.keys, visits.rows, asked.keys)


def _blocks_of_scores(schedule: TileSchedule) -> int:
    """The number of times that a head's own values are read: by each thread block that computes scores, or by each of its warps."""
    p = schedule.problem
    if isinstance(schedule, Fa3Schedule):
        return blocks_in(p.seqlen_q, schedule.block_rows) * (schedule.pack * schedule.block_rows // 16) * schedule.pack
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(p.seqlen_k, schedule.block_cols)
    return {"fa1": 1, "standard": Tr * Tc}.get(schedule.algorithm, Tr)


def _heads(schedule: TileSchedule) -> Iterator[tuple[int, int, Kept | None]]:
    """Yield (number of (batch, head) pairs, their keys, the tiles that masks keep)."""
    p = schedule.problem
    for batches, keys, masks in masks_and_lengths(schedule):
        if masks is None:
            yield batches * p.heads, keys, None
            continue
        for kept in masks:
            yield batches * p.heads // len(masks), keys, kept


def _varlen(schedule: VarlenSchedule) -> Traffic:
    """The sum over its sequences, and the bounds that thread blocks read to find theirs."""
    p, packed = schedule.problem, schedule.packed
    total: Counter[tuple[str, bool]] = Counter()
    for one, count in schedule.sequences().items():
        for name, moved in forward_traffic(one).items():
            total[name, False] += count * moved.read_bytes
            total[name, True] += count * moved.write_bytes
    looked, given = searched_bytes(p.heads, p.batch, packed.total_q, schedule.block_rows)
    if isinstance(schedule, Fa3Schedule):
        blocks, every = _taken(schedule), p.heads * (packed.total_q // schedule.block_rows + packed.sequences)
        looks = blocks.asked_for + schedule.block_rows // 16 * blocks.there
        looked, given = looked // every * looks, given // every * looks
        for name, (read, written) in _queue(schedule).items():
            total[name, False] += read
            total[name, True] += written
    total["cu_seqlens_q", False] += looked
    total["cu_seqlens_k", False] += given
    for name, read in searched_tiles(schedule).items():
        total[name, False] += read
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _fa1(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """R = sum r_i c_i visits of a row: Q, O, l and m are read at each, O, l and m written at each and once to begin."""
    p = schedule.problem
    visits, Nq, d, dv = visits_of(schedule, keys, kept), p.seqlen_q, p.head_dim, p.head_dim_v
    R = visits.row_visits
    loaded = columns_of(schedule, keys, kept)
    form = {
        "Q": (R * d * p.itemsize, 0),
        "K": (loaded * d * p.itemsize, 0),
        "V": (loaded * dv * p.itemsize, 0),
        "l": (R * FLOAT32, (R + Nq) * FLOAT32),
        "m": (R * FLOAT32, (R + Nq) * FLOAT32),
        "L": (0, Nq * FLOAT32 if schedule.lse else 0),
        "key_lengths": (4 if p.options.padded else 0, 0),
        "block_mask": (0 if p.options.block_mask is None else visits.blocks, 0),
        **state_bytes(schedule, visits.blocks),
    }
    if p.dtype == "float32":
        form["O"] = (R * dv * FLOAT32, (R + Nq) * dv * FLOAT32)
    else:
        # Of the R + Nq writes of each element, the last goes to O in its own type and the others to O_acc.
        form["O_acc"] = (R * dv * FLOAT32, R * dv * FLOAT32)
        form["O"] = (0, Nq * dv * p.itemsize)
    return form


def _fa2(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """Q once if a row block visits any column block, K and V at each visit, O and L once."""
    p, visits = schedule.problem, visits_of(schedule, keys, kept)
    return {
        "Q": (visits.rows * p.head_dim * p.itemsize, 0),
        "K": (visits.keys * p.head_dim * p.itemsize, 0),
        "V": (visits.keys * p.head_dim_v * p.itemsize, 0),
        "O": (0, p.seqlen_q * p.head_dim_v * p.itemsize),
        "L": (0, p.seqlen_q * FLOAT32 if schedule.lse else 0),
        "key_lengths": (4 * blocks_in(p.seqlen_q, schedule.block_rows) if p.options.padded else 0, 0),
        "block_mask": (0 if p.options.block_mask is None else visits.blocks, 0),
        **state_bytes(schedule, visits.blocks),
    }


def _fa3(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """The traffic of FlashAttention-3: as FlashAttention-2, except that blocks are loaded whole within the tensors, each warp reads
    the key length, and `pack` heads may share a row block."""
    assert isinstance(schedule, Fa3Schedule)
    p, visits = schedule.problem, visits_of(schedule, keys, kept)
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(keys, schedule.block_cols)
    behind_q = min(Tr * schedule.block_rows, schedule.room_q) - p.seqlen_q if Tr - 1 in seen_blocks(schedule, keys) else 0
    behind_k = visits.ends * (min(Tc * schedule.block_cols, schedule.room_k) - keys)
    warps = 1 + schedule.pack * schedule.block_rows // 16
    return _fa2(schedule, keys, kept) | {
        "Q": (schedule.pack * (visits.rows + behind_q) * p.head_dim * p.itemsize, 0),
        "O": (0, schedule.pack * p.seqlen_q * p.head_dim_v * p.itemsize),
        "L": (0, schedule.pack * p.seqlen_q * FLOAT32 if schedule.lse else 0),
        "K": ((visits.keys + behind_k) * p.head_dim * p.itemsize, 0),
        "V": ((visits.keys + behind_k) * p.head_dim_v * p.itemsize, 0),
        "key_lengths": (4 * warps * Tr if p.options.padded else 0, 0),
    }


class _Taken(NamedTuple):
    """The row blocks of all heads: those with a number, those that exist, and those that thread blocks request."""

    numbers: int
    there: int
    asked_for: int


def _taken(schedule: Fa3Schedule) -> _Taken:
    """The requests for row blocks: each of `grid` thread blocks requests until it gets one beyond its sequence's end, or a number
    past the last."""
    p, rows = schedule.problem, schedule.block_rows
    heads = p.heads // schedule.pack
    if isinstance(schedule, VarlenSchedule):
        there = heads * sum(count * blocks_in(one.problem.seqlen_q, rows) for one, count in schedule.sequences().items())
        numbers = heads * (schedule.packed.total_q // rows + schedule.packed.sequences)
    else:
        there = numbers = heads * p.batch * blocks_in(p.seqlen_q, rows)
    return _Taken(numbers, there, there + max(0, min(schedule.grid, numbers - there)))


def _queue(schedule: Fa3Schedule) -> dict[str, tuple[int, int]]:
    """An int32 for each number is written, and read on request; a counter starts at 0, and each row block increments it by an
    atomic. Each of a head's numbers reads its length, and every 128 of them read all lengths once more."""
    if not schedule.queued:
        return {}
    p, taken = schedule.problem, _taken(schedule)
    items = taken.numbers // (p.heads // schedule.pack)
    looks = 4 * items * (1 + blocks_in(items, 128))
    found = {"queue": (4 * taken.asked_for, 4 * taken.numbers), "taken": (4 * taken.there, 4 * (1 + taken.there))}
    if isinstance(schedule, VarlenSchedule):
        halvings = max(1, (schedule.packed.sequences - 1).bit_length())
        return found | {"cu_seqlens_q": (looks * (halvings + 2), 0), "cu_seqlens_k": (looks * 2, 0)}
    return found | {"key_lengths": (looks if p.options.padded else 0, 0)}


def _standard(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """Tr x Tc tiles: Q is read for each column of tiles, all keys of K and V for each row of tiles."""
    p = schedule.problem
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(p.seqlen_k, schedule.block_cols)
    ideal = schedule.tiling.used == schedule.tiling.paper
    scores = p.seqlen_q * p.seqlen_k
    reads = 1 if ideal else 2
    return {
        "Q": (Tc * p.seqlen_q * p.head_dim * p.itemsize, 0),
        "K": (Tr * keys * p.head_dim * p.itemsize, 0),
        "V": (Tr * keys * p.head_dim_v * p.itemsize, 0),
        "S": (reads * scores * p.score_itemsize, scores * p.score_itemsize),
        "P": (scores * p.itemsize, scores * p.itemsize),
        "O": (0, p.seqlen_q * p.head_dim_v * p.itemsize),
        "L": (0, p.seqlen_q * FLOAT32 if schedule.lse else 0),
        "key_lengths": (4 * Tr * (Tc + 1) if p.options.padded else 0, 0),
    }


def add_state_traffic(rows: int, head_dim_v: int, dtype: str) -> Traffic:
    """The traffic of merging a call's O and L into float32 sums: each is read once, the sums are read and written once."""
    sums, part = rows * head_dim_v * FLOAT32, rows * head_dim_v * ITEMSIZE[dtype]
    each = {"O": (sums, sums), "L": (rows * FLOAT32,) * 2, "O_part": (part, 0), "L_part": (rows * FLOAT32, 0)}
    return Traffic({name: TensorTraffic(*moved) for name, moved in each.items()})


def softmax_traffic(rows: int, cols: int, dtype: str, algorithm: str) -> Traffic:
    """Safe softmax reads each element for the maximum, the sum and the output; online softmax does the first two in one pass."""
    reads = {"softmax-safe": 3, "softmax-online": 2}[algorithm]
    size = rows * cols * ITEMSIZE[dtype]
    return Traffic({"x": TensorTraffic(reads * size, 0), "y": TensorTraffic(0, size)})


def standard_ideal(problem: Problem) -> Traffic:
    """Algorithm 0 with each input of each step read once: (Nq + 2 Nk) d + 2 Nq Nk reads, 2 Nq Nk + Nq d writes a head.

    A mask or bias adds an element for each score that the causal mask keeps; key lengths shorten K and V.
    """
    p, size = problem, problem.head_count * problem.itemsize
    scores = p.head_count * p.seqlen_q * p.seqlen_k
    read = Counter({"key_lengths": 8 * p.head_count if p.options.padded else 0})  # once a product
    for keys, batches in lengths(p).items():
        rows = {"K": keys * p.head_dim * p.itemsize, "V": keys * p.head_dim_v * p.itemsize}
        for name, nbytes in (rows | {name: moved for name, (moved, _) in mask_bytes(p, keys).items()}).items():
            read[name] += batches * p.heads * nbytes
    return Traffic(
        {
            "Q": TensorTraffic(p.seqlen_q * p.head_dim * size, 0),
            "S": TensorTraffic(scores * p.score_itemsize, scores * p.score_itemsize),
            "P": TensorTraffic(scores * p.itemsize, scores * p.itemsize),
            "O": TensorTraffic(0, p.seqlen_q * p.head_dim_v * size),
        }
        | {name: TensorTraffic(nbytes, 0) for name, nbytes in read.items()}
    )
