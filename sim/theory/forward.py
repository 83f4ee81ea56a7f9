"""Closed forms of the forward passes' HBM traffic and of softmax's, with their constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cupyflash.arrays import ITEMSIZE
from cupyflash.basics import Array
from cupyflash.request.problem import Problem
from cupyflash.schedules import DecodeSchedule, SoftmaxSchedule, TileSchedule, VarlenSchedule
from cupyflash.schedules.add_state import AddStateSchedule
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim.theory import forms
from cupyflash.sim.theory.decode import decode_traffic
from cupyflash.sim.theory.forms import FLOAT32, blocks_in
from cupyflash.sim.theory.visits import (
    INT32,
    Bytes,
    KeptTiles,
    columns_of,
    head_bytes,
    in_bytes,
    lengths,
    mask_bytes,
    masks_and_lengths,
    position_bytes,
    searched_bytes,
    searched_tiles,
    seen_blocks,
    states_made,
    tile_bytes,
    visits_of,
)
from cupyflash.sim.traffic import Traffic


def forward_traffic(schedule: TileSchedule | SoftmaxSchedule | DropoutMaskSchedule | AddStateSchedule) -> Traffic:
    """The closed form of a schedule's HBM traffic, per tensor, in bytes."""
    if isinstance(schedule, SoftmaxSchedule):
        return softmax_traffic(schedule.rows, schedule.cols, schedule.dtype, schedule.algorithm)
    if isinstance(schedule, DropoutMaskSchedule):
        return Traffic.of({}, {"kept": math.prod(schedule.shape)})
    if isinstance(schedule, AddStateSchedule):
        return add_state_traffic(schedule.rows, schedule.head_dim_v, schedule.dtype)
    if isinstance(schedule, VarlenSchedule):
        return Traffic.summed(_varlen(schedule))
    if isinstance(schedule, DecodeSchedule):
        return decode_traffic(schedule)
    return Traffic.summed(_parts(schedule))


def _parts(schedule: TileSchedule) -> Iterator[tuple[int, Traffic]]:
    """Yield (how often it counts, traffic) of the pairs of batch and head, and of what is beside them."""
    form = {"fa1": _fa1, "fa2": _fa2, "fa3": _fa3, "standard": _standard}[schedule.algorithm]
    p, together = schedule.problem, schedule.pack if isinstance(schedule, Fa3Schedule) else 1
    if schedule.algorithm == "fa1" and not schedule.row_blocks:
        return  # nothing is launched; in the others, thread blocks are as many as row blocks
    by_tiles = isinstance(schedule, Fa2Schedule) and schedule.by_tiles
    for pairs, keys, kept in _heads(schedule):
        times = pairs // together
        yield times, form(schedule, keys, None if kept is None else kept.visited)
        of_scores = mask_bytes(p, keys, kept, schedule.blocks, by_tiles)
        yield pairs, Traffic.of(of_scores | {"sinks": p.options.sinks * p.seqlen_q * FLOAT32}, {})
        if p.options.transformed or p.options.mask_function is not None:
            of_tiles = _of_tiles(schedule, keys, kept) if by_tiles else Counter()
            yield times, Traffic.of(head_bytes(p, _blocks_of_scores(schedule)) + of_tiles, {})
    yield 1, states_made(schedule)
    if isinstance(schedule, Fa3Schedule):
        yield 1, _queue(schedule)


def _of_tiles(schedule: TileSchedule, keys: int, kept: KeptTiles | None) -> Bytes:
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


def _heads(schedule: TileSchedule) -> Iterator[tuple[int, int, KeptTiles | None]]:
    """Yield (number of (batch, head) pairs, their keys, the tiles that masks keep)."""
    p = schedule.problem
    for batches, keys, masks in masks_and_lengths(schedule):
        if masks is None:
            yield batches * p.heads, keys, None
            continue
        for kept in masks:
            yield batches * p.heads // len(masks), keys, kept


def _varlen(schedule: VarlenSchedule) -> Iterator[tuple[int, Traffic]]:
    """Yield its sequences' parts, and the bounds that thread blocks read to find theirs."""
    p, packed = schedule.problem, schedule.packed
    for one, count in schedule.sequences().items():
        yield count, forward_traffic(one)
    looked, given = searched_bytes(p.heads, p.batch, packed.total_q, schedule.block_rows)
    if isinstance(schedule, Fa3Schedule):
        blocks, every = _taken(schedule), p.heads * (packed.total_q // schedule.block_rows + packed.sequences)
        looks = blocks.asked_for + schedule.block_rows // 16 * blocks.there
        looked, given = looked // every * looks, given // every * looks
        yield 1, _queue(schedule)
    yield 1, Traffic.of(Counter(cu_seqlens_q=looked, cu_seqlens_k=given) + searched_tiles(schedule), {})


def _fa1(schedule: TileSchedule, keys: int, kept: Array | None) -> Traffic:
    """R = sum r_i c_i visits of a row: Q, O, l and m are read at each, O, l and m written at each and once to begin."""
    p, Nq, visits = schedule.problem, schedule.problem.seqlen_q, visits_of(schedule, keys, kept)
    read, written = forms.fa1(Nq, columns_of(schedule, keys, kept), visits.row_visits)
    if p.dtype == "float32":  # O itself is float32
        read["O"] = read.pop("O_acc")
        written["O"] += written.pop("O_acc")
    beside = position_bytes(schedule, 1, visits.blocks)
    return Traffic.of(in_bytes(p, read) + beside, in_bytes(p, written | {"L": Nq * schedule.lse}))


def _fa2(schedule: TileSchedule, keys: int, kept: Array | None) -> Traffic:
    """Q once if a row block visits any column block, K and V at each visit, O and L once."""
    visits = visits_of(schedule, keys, kept)
    looks = blocks_in(schedule.problem.seqlen_q, schedule.block_rows)
    return _row_blocks(schedule, visits.rows, visits.keys, position_bytes(schedule, looks, visits.blocks))


def _row_blocks(schedule: TileSchedule, rows: int, keys: int, beside: Bytes, together: int = 1) -> Traffic:
    """The traffic of row blocks of `together` heads, which load so many rows of Q of each, and of K and V, and read `beside`."""
    p, every = schedule.problem, together * schedule.problem.seqlen_q
    read, written = forms.fa2(every, together * rows, keys)
    return Traffic.of(in_bytes(p, read) + beside, in_bytes(p, written | {"L": every * schedule.lse}))


def _fa3(schedule: TileSchedule, keys: int, kept: Array | None) -> Traffic:
    """The traffic of FlashAttention-3: as FlashAttention-2, except that blocks are loaded whole within the tensors, each warp reads
    the key length, and `pack` heads may share a row block."""
    assert isinstance(schedule, Fa3Schedule)
    p, visits = schedule.problem, visits_of(schedule, keys, kept)
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(keys, schedule.block_cols)
    sees = Tr - 1 in seen_blocks(schedule, keys)
    if kept is not None:
        last = np.arange(Tr)[:, None] == Tr - 1
        sees = visits_of(schedule, keys, kept & last).rows > 0
    behind_q = min(Tr * schedule.block_rows, schedule.room_q) - p.seqlen_q if sees else 0
    behind_k = visits.ends * (min(Tc * schedule.block_cols, schedule.room_k) - keys)
    warps = 1 + schedule.pack * schedule.block_rows // 16
    beside = position_bytes(schedule, warps * Tr, visits.blocks)
    return _row_blocks(schedule, visits.rows + behind_q, visits.keys + behind_k, beside, schedule.pack)


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


def _queue(schedule: Fa3Schedule) -> Traffic:
    """An int32 for each number is written, and read on request; a counter starts at 0, and each row block increments it by an
    atomic. Each of a head's numbers reads its length, and every 128 of them read all lengths once more."""
    if not schedule.queued:
        return Traffic({})
    p, taken = schedule.problem, _taken(schedule)
    items = taken.numbers // (p.heads // schedule.pack)
    looks = INT32 * items * (1 + blocks_in(items, 128))
    read = {"queue": INT32 * taken.asked_for, "taken": INT32 * taken.there}
    if isinstance(schedule, VarlenSchedule):
        halvings = max(1, (schedule.packed.sequences - 1).bit_length())
        read |= {"cu_seqlens_q": looks * (halvings + 2), "cu_seqlens_k": looks * 2}
    elif p.options.padded:
        read["key_lengths"] = looks
    return Traffic.of(read, {"queue": INT32 * taken.numbers, "taken": INT32 * (1 + taken.there)})


def _standard(schedule: TileSchedule, keys: int, kept: Array | None) -> Traffic:
    """Tr x Tc tiles: Q is read for each column of tiles, all keys of K and V for each row of tiles."""
    p = schedule.problem
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(p.seqlen_k, schedule.block_cols)
    ideal, Nq, scores = schedule.tiling.used == schedule.tiling.paper, p.seqlen_q, p.seqlen_q * p.seqlen_k
    looks = Tr * (Tc + 1) * p.options.padded
    read = {"Q": Tc * Nq, "K": Tr * keys, "V": Tr * keys, "S": scores if ideal else 2 * scores, "P": scores, "key_lengths": looks}
    return Traffic.of(in_bytes(p, read), in_bytes(p, {"S": scores, "P": scores, "O": Nq, "L": Nq * schedule.lse}))


def add_state_traffic(rows: int, head_dim_v: int, dtype: str) -> Traffic:
    """The traffic of merging a call's O and L into float32 sums: each is read once, the sums are read and written once."""
    sums = {"O": rows * head_dim_v * FLOAT32, "L": rows * FLOAT32}
    return Traffic.of(sums | {"O_part": rows * head_dim_v * ITEMSIZE[dtype], "L_part": rows * FLOAT32}, sums)


def softmax_traffic(rows: int, cols: int, dtype: str, algorithm: str) -> Traffic:
    """Safe softmax reads each element for the maximum, the sum and the output; online softmax does the first two in one pass."""
    reads = {"softmax-safe": 3, "softmax-online": 2}[algorithm]
    size = rows * cols * ITEMSIZE[dtype]
    return Traffic.of({"x": reads * size}, {"y": size})


def standard_ideal(problem: Problem) -> Traffic:
    """Algorithm 0 with each input of each step read once: (Nq + 2 Nk) d + 2 Nq Nk reads, 2 Nq Nk + Nq d writes a head.

    A mask or bias adds an element for each score that the causal mask keeps; key lengths shorten K and V.
    """
    p, rows = problem, problem.head_count * problem.seqlen_q
    scores, products = rows * p.seqlen_k, 2 * p.head_count  # each of which reads its key length
    every = sum(keys * batches for keys, batches in lengths(p).items()) * p.heads
    read, written = forms.standard(rows, every, scores)
    beside = in_bytes(p, {"key_lengths": products * p.options.padded})
    for keys, batches in lengths(p).items():
        for name, nbytes in mask_bytes(p, keys).items():
            beside[name] += batches * p.heads * nbytes
    return Traffic.of(in_bytes(p, read) + beside, in_bytes(p, written))
