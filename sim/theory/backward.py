"""Closed forms of the backward passes' HBM traffic, with their constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyflash.request.problem import Problem
from cupyflash.schedules import BackwardSchedule, VarlenBackwardSchedule
from cupyflash.schedules.fa1_backward import Fa1BackwardSchedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule, QueriesSchedule
from cupyflash.schedules.fa2_backward_tiles import launches
from cupyflash.schedules.row_bases import RowBasesSchedule
from cupyflash.sim.theory.visits import (
    FLOAT32,
    Kept,
    Visits,
    added,
    blocks_in,
    columns_of,
    head_bytes,
    lengths,
    mask_bytes,
    masks_and_lengths,
    searched_bytes,
    searched_tiles,
    state_bytes,
    states_made,
    tile_bytes,
    visits_of,
)
from cupyflash.sim.traffic import TensorTraffic, Traffic

# Bytes read and written, by tensor
Form = dict[str, tuple[int, int]]
# Numbers of query heads of a group, with the tiles that their masks keep (None: all)
Heads = list[tuple[int, Kept | None]]


def backward_traffic(schedule: BackwardSchedule) -> Traffic:
    """The closed form of a backward schedule's HBM traffic, per tensor, in bytes."""
    total: Counter[tuple[str, bool]] = Counter()
    if isinstance(schedule, VarlenBackwardSchedule):
        return _varlen(schedule)
    for part, form in _forms(schedule):
        for times, keys, heads in _groups(part):
            for name, moved in form(part, keys, heads).items():
                for write, nbytes in enumerate(moved):
                    total[name, bool(write)] += times * nbytes
        for name, moved in states_made(part).items():
            for write, nbytes in enumerate(moved):
                total[name, bool(write)] += nbytes
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _varlen(schedule: VarlenBackwardSchedule) -> Traffic:
    """The sum over its sequences, and the bounds that thread blocks read to find theirs."""
    p, packed, total = schedule.problem, schedule.packed, Counter[tuple[str, bool]]()
    for one, count in schedule.sequences().items():
        for name, moved in backward_traffic(one).items():
            total[name, False] += count * moved.read_bytes
            total[name, True] += count * moved.write_bytes
    main = searched_bytes(p.kv_heads, p.batch, packed.total_k, schedule.block_cols)
    by_rows = searched_bytes(p.heads, p.batch, packed.total_q, schedule.by_rows.block_rows)
    times, row_kernels = len(launches(p)), len(schedule.beside)
    total["cu_seqlens_q", False] = times * main[1] + row_kernels * by_rows[0]
    total["cu_seqlens_k", False] = times * main[0] + row_kernels * by_rows[1]
    for part in (schedule, *schedule.beside):
        for name, read in searched_tiles(part).items():
            total[name, False] += read
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _forms(schedule: BackwardSchedule) -> Iterator[tuple[BackwardSchedule, Callable[[Any, int, Heads], Form]]]:
    """The closed forms whose sum a schedule's traffic is."""
    forms: dict[str, Callable[[Any, int, Heads], Form]] = {"fa1": _fa1, "fa2": _fa2, "standard": _standard}
    yield schedule, forms[schedule.algorithm]
    bases = None if isinstance(schedule, RowBasesSchedule | QueriesSchedule) else getattr(schedule, "bases", None)
    if bases is not None:
        yield bases, _bases
    if isinstance(schedule, Fa2BackwardSchedule) and schedule.queries is not None:
        yield schedule.queries, _queries


def _groups(schedule: BackwardSchedule) -> Iterator[tuple[int, int, Heads]]:
    """Yield (number of (batch, key head) pairs, their keys, the query heads of their groups by block mask)."""
    p = schedule.problem
    for batches, keys, own in masks_and_lengths(schedule):
        if own is None:
            yield batches * p.kv_heads, keys, [(schedule.group, None)]
            continue
        if len(own) == 1:  # for all heads
            yield batches * p.kv_heads, keys, [(schedule.group, own[0])]
            continue
        for first in range(0, p.heads, schedule.group):
            yield batches, keys, [(1, kept) for kept in own[first : first + schedule.group]]


def _visits(schedule: BackwardSchedule, keys: int, heads: Heads) -> Visits:
    """The visits of all query heads of a group."""
    return Visits.of_heads((times, visits_of(schedule, keys, None if kept is None else kept.visited)) for times, kept in heads)


def _asked(schedule: BackwardSchedule, keys: int, heads: Heads) -> Visits:
    """The visits of the blocks where a mask is evaluated."""
    return _visits(schedule, keys, [(times, kept and Kept(kept.asked, kept.asked)) for times, kept in heads])


def _loaded(schedule: BackwardSchedule, keys: int, heads: Heads) -> int:
    """The keys of the column blocks that any row block of any query head visits."""
    masks = [kept.visited for _, kept in heads if kept is not None]
    return columns_of(schedule, keys, np.any(masks, axis=0) if masks else None)


def _fa1(schedule: Fa1BackwardSchedule, keys: int, heads: Heads) -> Form:
    """R = sum r_i c_i visits of a row: Q, O, dO, dQ and L are read at each, dQ is written at each and once to begin.

    K and V of the visited column blocks are read once; dK and dV are written once to begin, and once for those blocks.
    """
    p, visits = schedule.problem, _visits(schedule, keys, heads)
    R, rows = visits.row_visits, schedule.group * p.seqlen_q
    d, dv, loaded = p.head_dim, p.head_dim_v, _loaded(schedule, keys, heads)
    form = {
        "Q": (R * d * p.itemsize, 0),
        "K": (loaded * d * p.itemsize, 0),
        "V": (loaded * dv * p.itemsize, 0),
        "O": (R * dv * p.itemsize, 0),
        "dO": (R * dv * p.itemsize, 0),
        **_given(p, R, schedule.bases is not None),
        "dK": (0, (p.seqlen_k + loaded) * d * p.itemsize),
        "dV": (0, (p.seqlen_k + loaded) * dv * p.itemsize),
        "key_lengths": (4 if p.options.padded else 0, 0),
        "block_mask": (0 if p.options.block_mask is None else visits.blocks, 0),
        **state_bytes(schedule, visits.blocks),
    }
    if p.dtype == "float32":
        form["dQ"] = (R * d * FLOAT32, (R + rows) * d * FLOAT32)
    else:
        # Of the R + Nq writes of each element, the last goes to dQ in its own type and the others to dQ_acc.
        form["dQ_acc"] = (R * d * FLOAT32, R * d * FLOAT32)
        form["dQ"] = (0, rows * d * p.itemsize)
    of_blocks = schedule.group * blocks_in(loaded, schedule.block_cols)  # a head's part of a score function is loaded this often
    return form | added(_mask_bytes(schedule, keys, heads), head_bytes(p, of_blocks))


def _fa2(schedule: Fa2BackwardSchedule, keys: int, heads: Heads) -> Form:
    """Q, dO, D and L (float32: m and log l) once a visit of a row, K and V once, dK and dV once; an atomic reads and writes dQ
    at each visit.

    Before the pass, O and dO are read for D, and dQ's sum is cleared. After it, the sum is read and dQ written in its own type.
    """
    p, group = schedule.problem, schedule.group
    visits = _visits(schedule, keys, heads)
    R = visits.row_visits
    Nq, d, dv, atomics = group * p.seqlen_q, p.head_dim, p.head_dim_v, not schedule.deterministic
    loaded, made = _loaded(schedule, keys, heads), launches(p)
    of_sum = -(-d // 16) * 16 * FLOAT32  # a row of dQ's sum, whose columns are padded
    form = {
        "Q": (len(made) * R * d * p.itemsize, 0),
        "K": (len(made) * loaded * d * p.itemsize, 0),
        "V": (loaded * dv * p.itemsize, 0),
        "O": (Nq * dv * p.itemsize, 0),
        "dO": ((Nq + len(made) * R) * dv * p.itemsize, 0),
        **_given(p, p.options.sinks * Nq + len(made) * R),
        "sinks": (p.options.sinks * Nq * FLOAT32, 0),
        "dsinks": (0, p.options.sinks * Nq * FLOAT32),
        "D": (R * FLOAT32, Nq * FLOAT32),
        "dK": (0, p.seqlen_k * d * p.itemsize),
        "dV": (0, p.seqlen_k * dv * p.itemsize),
        "dQ": (0, Nq * d * p.itemsize if atomics else 0),
        "dQ_acc": ((R + Nq) * of_sum, (R + Nq) * of_sum) if atomics else (0, 0),
        "key_lengths": (len(made) * 4 * blocks_in(p.seqlen_k, schedule.block_cols) if p.options.padded else 0, 0),
        "block_mask": (0 if p.options.block_mask is None else len(made) * visits.blocks, 0),
        **state_bytes(schedule, len(made) * visits.blocks),
    }
    scores = _mask_bytes(schedule, keys, heads, by_tiles=True)
    if schedule.dbias:
        form["dbias"] = (scores["bias"][0] // p.itemsize * FLOAT32,) * 2
    of_keys = sum(times * columns_of(schedule, keys, None if kept is None else kept.visited) for times, kept in heads)
    of_head = head_bytes(p, group * blocks_in(p.seqlen_k, schedule.block_cols))
    by_tiles = tile_bytes(p, R, of_keys, _asked(schedule, keys, heads).row_visits, of_keys)
    return form | added(*[added(scores, of_head, by_tiles)] * len(made))


def _given(p: Problem, rows: int, exact: bool = True) -> Form:
    """The bytes of the bases of the rows' weights: m and log l in float32 if that is `exact`, else L."""
    return {"bases": (2 * rows * FLOAT32, 0)} if p.dtype == "float32" and exact else {"L": (rows * FLOAT32, 0)}


def _bases(schedule: RowBasesSchedule, keys: int, heads: Heads) -> Form:
    """m and log l again, as a forward computes them: Q once if a row block visits any column block, K at each visit, L (and its
    head's sink) once a row, two floats written a row. Half types only read L: further reads for rows with a large L are not
    counted."""
    p, rows = schedule.problem, schedule.group * schedule.problem.seqlen_q
    if p.dtype != "float32":
        return {"L": (rows * FLOAT32, 0)}
    visits, blocks = _visits(schedule, keys, heads), schedule.group * blocks_in(p.seqlen_q, schedule.block_rows)
    form = {
        "Q": (visits.rows * p.head_dim * FLOAT32, 0),
        "K": (visits.keys * p.head_dim * FLOAT32, 0),
        "L": (rows * FLOAT32, 0),
        "sinks": (p.options.sinks * rows * FLOAT32, 0),
        "bases": (0, 2 * rows * FLOAT32),
        "key_lengths": (4 * blocks if p.options.padded else 0, 0),
        "block_mask": (0 if p.options.block_mask is None else visits.blocks, 0),
        **state_bytes(schedule, visits.blocks),
    }
    return form | added(_mask_bytes(schedule, keys, heads), head_bytes(p, blocks))


def _queries(schedule: QueriesSchedule, keys: int, heads: Heads) -> Form:
    """The traffic of a kernel with row blocks as thread blocks, as in the forward: Q, dO, L and D once if a row block visits any
    column block, K and V at each visit, dQ once."""
    p, size = schedule.problem, schedule.problem.itemsize
    visits = _visits(schedule, keys, heads)
    seen, loaded = visits.rows, visits.keys
    form = {
        "Q": (seen * p.head_dim * size, 0),
        "dO": (seen * p.head_dim_v * size, 0),
        **_given(p, seen),
        "D": (seen * FLOAT32, 0),
        "K": (loaded * p.head_dim * size, 0),
        "V": (loaded * p.head_dim_v * size, 0),
        "dQ": (0, schedule.group * p.seqlen_q * p.head_dim * size),
        "key_lengths": (4 * schedule.group * blocks_in(p.seqlen_q, schedule.block_rows) if p.options.padded else 0, 0),
        "block_mask": (0 if p.options.block_mask is None else visits.blocks, 0),
        **state_bytes(schedule, visits.blocks),
    }
    of_head = head_bytes(p, schedule.group * blocks_in(p.seqlen_q, schedule.block_rows))
    by_tiles = tile_bytes(p, seen, loaded, seen, _asked(schedule, keys, heads).keys)
    return form | added(_mask_bytes(schedule, keys, heads, by_tiles=True), of_head, by_tiles)


def _standard(schedule: BackwardSchedule, keys: int, heads: Heads) -> Form:
    """Algorithm 3 moves 7 N^2: it reads P twice, dP once and dS twice, and writes dP and dS, if P is given as in the paper.

    The kernels write P, from Q, K and L, and read P and dP once more by rows. The slopes of a score function go through HBM too,
    in dS's place. Tr x Tc tiles: tensors of Nq rows are read for each column of tiles, all keys of K and V for each row of tiles.
    """
    p, group, size = schedule.problem, schedule.group, schedule.problem.itemsize
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(p.seqlen_k, schedule.block_cols)
    again = 0 if schedule.tiling.used == schedule.tiling.paper else 1  # 1 if P is computed again
    sloped = int(p.options.transformed)
    Nq, scores = group * p.seqlen_q, group * p.seqlen_q * p.seqlen_k * size
    form = {
        "Q": ((1 + again) * Tc * Nq * p.head_dim * size, 0),
        "K": ((1 + again) * group * Tr * keys * p.head_dim * size, 0),
        "V": (group * Tr * keys * p.head_dim_v * size, 0),
        "dO": (2 * Tc * Nq * p.head_dim_v * size, 0),
        **_given(p, again * Tc * Nq),
        "P": ((2 + again) * scores, again * scores),
        "dP": ((1 + again) * scores, scores),
        "dS": ((2 + sloped) * scores, (1 + again * sloped) * scores),
        "dQ": (0, Nq * p.head_dim * size),
        "dK": (0, p.seqlen_k * p.head_dim * size),
        "dV": (0, p.seqlen_k * p.head_dim_v * size),
        "key_lengths": (4 * group * Tr * ((1 + again) * Tc + 1) if p.options.padded else 0, 0),
    }
    return form | added(*[added(_mask_bytes(schedule, keys, heads), head_bytes(p, group * Tr * Tc))] * again)


def _mask_bytes(schedule: BackwardSchedule, keys: int, heads: Heads, by_tiles: bool = False) -> Form:
    """The bytes of mask, bias and score function for one pass over all visited scores."""
    blocks = schedule.block_rows, schedule.block_cols
    of_each = [[mask_bytes(schedule.problem, keys, kept, blocks, by_tiles)] * times for times, kept in heads]
    return added(*(one for each in of_each for one in each))


def standard_backward_ideal(problem: Problem) -> Traffic:
    """Algorithm 3 with each input of each step read once and P given: the bytes of standard attention's gradients.

    dV = P^T dO; dP = dO V^T; dS = P * (dP - rowsum(P * dP)); dQ = dS K; dK = dS^T Q. Each query head reads Nq (d + 2 d_v) +
    Nk (d + d_v) + 5 Nq Nk elements and writes the gradients, dP and dS; dK and dV once a key head. Masks change nothing, since
    P has them; key lengths shorten K and V.
    """
    p, size = problem, problem.head_count * problem.itemsize
    scores, rows = p.seqlen_q * p.seqlen_k * size, p.seqlen_q * size
    keys = sum(keys * batches for keys, batches in lengths(p).items()) * p.heads * p.itemsize
    made = p.batch * p.kv_heads * p.seqlen_k * p.itemsize
    return Traffic(
        {
            "P": TensorTraffic(2 * scores, 0),
            "dP": TensorTraffic(scores, scores),
            "dS": TensorTraffic((2 + p.options.transformed) * scores, scores),
            "dO": TensorTraffic(2 * rows * p.head_dim_v, 0),
            "Q": TensorTraffic(rows * p.head_dim, 0),
            "K": TensorTraffic(keys * p.head_dim, 0),
            "V": TensorTraffic(keys * p.head_dim_v, 0),
            "dQ": TensorTraffic(0, rows * p.head_dim),
            "dK": TensorTraffic(0, made * p.head_dim),
            "dV": TensorTraffic(0, made * p.head_dim_v),
            "key_lengths": TensorTraffic(8 * p.head_count if p.options.padded else 0, 0),  # once a product with K or V
        }
    )
