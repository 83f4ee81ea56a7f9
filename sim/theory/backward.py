"""Closed forms of the backward passes' HBM traffic, with their constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyflash.request import score
from cupyflash.request.problem import Problem
from cupyflash.request.score_sums import LARGEST, sum_field
from cupyflash.schedules import BackwardSchedule, VarlenBackwardSchedule
from cupyflash.schedules.fa1_backward import Fa1BackwardSchedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule, QueriesSchedule, SumsSchedule
from cupyflash.schedules.fa3_backward import WARPS, Fa3BackwardSchedule
from cupyflash.schedules.row_bases import RowBasesSchedule
from cupyflash.sim.theory import forms
from cupyflash.sim.theory.forms import FLOAT32, blocks_in
from cupyflash.sim.theory.visits import (
    INT32,
    Bytes,
    KeptTiles,
    Visits,
    columns_of,
    head_bytes,
    in_bytes,
    lengths,
    mask_bytes,
    masks_and_lengths,
    position_bytes,
    scores_of,
    searched_bytes,
    searched_tiles,
    seen_blocks,
    span,
    states_made,
    tile_bytes,
    visits_of,
)
from cupyflash.sim.traffic import Traffic

# Numbers of query heads of a group, with the tiles that their masks keep (None: all)
Heads = list[tuple[int, KeptTiles | None]]


def backward_traffic(schedule: BackwardSchedule) -> Traffic:
    """The closed form of a backward schedule's HBM traffic, per tensor, in bytes."""
    return Traffic.summed(_varlen(schedule) if isinstance(schedule, VarlenBackwardSchedule) else _parts(schedule))


def _parts(schedule: BackwardSchedule) -> Iterator[tuple[int, Traffic]]:
    """Yield (how often it counts, traffic) of the pairs of batch and key head, and of what is beside them."""
    for part, form in _forms(schedule):
        for times, keys, heads in _groups(part):
            yield times, form(part, keys, heads)
        yield 1, states_made(part)


def _varlen(schedule: VarlenBackwardSchedule) -> Iterator[tuple[int, Traffic]]:
    """Yield its sequences' parts, and the bounds that thread blocks read to find theirs."""
    p, packed = schedule.problem, schedule.packed
    for one, count in schedule.sequences().items():
        yield count, backward_traffic(one)
    k, q = searched_bytes(p.kv_heads, p.batch, packed.total_k, schedule.block_cols)
    yield len(schedule.launches), Traffic.of({"cu_seqlens_q": q, "cu_seqlens_k": k}, {})
    q, k = searched_bytes(p.heads, p.batch, packed.total_q, schedule.by_rows.block_rows)
    launched = sum(len(each.ways) if isinstance(each, SumsSchedule) else 1 for each in schedule.beside)
    yield launched, Traffic.of({"cu_seqlens_q": q, "cu_seqlens_k": k}, {})
    for part in (schedule, *schedule.beside):
        yield 1, Traffic.of(searched_tiles(part), {})


def _forms(schedule: BackwardSchedule) -> Iterator[tuple[BackwardSchedule, Callable[[Any, int, Heads], Traffic]]]:
    """The closed forms whose sum a schedule's traffic is."""
    forms: dict[str, Callable[[Any, int, Heads], Traffic]] = {"fa1": _fa1, "fa2": _fa2, "fa3": _fa2, "standard": _standard}
    yield schedule, forms[schedule.algorithm]
    bases = None if isinstance(schedule, RowBasesSchedule | QueriesSchedule) else getattr(schedule, "bases", None)
    if bases is not None:
        yield bases, _bases
    if isinstance(schedule, Fa2BackwardSchedule) and schedule.queries is not None:
        yield schedule.queries, _queries
    if isinstance(schedule, Fa2BackwardSchedule) and schedule.sums is not None:
        yield schedule.sums, _sums


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
    return _visits(schedule, keys, [(times, kept and KeptTiles(kept.asked, kept.asked)) for times, kept in heads])


def _loaded(schedule: BackwardSchedule, keys: int, heads: Heads) -> int:
    """The keys of the column blocks that any row block of any query head visits; FlashAttention-3 loads whole blocks within k."""
    masks = [kept.visited for _, kept in heads if kept is not None]
    room = schedule.rooms_beyond[1] if isinstance(schedule, Fa3BackwardSchedule) else keys
    return columns_of(schedule, keys, np.any(masks, axis=0) if masks else None, room)


def _rows_behind(schedule: BackwardSchedule, keys: int, heads: Heads) -> int:
    """Rows beyond a packed sequence in all copies of its last row block, since FlashAttention-3 loads whole blocks."""
    last = blocks_in(schedule.problem.seqlen_q, schedule.block_rows) - 1
    if not isinstance(schedule, Fa3BackwardSchedule) or last not in seen_blocks(schedule, keys):
        return 0
    begin, end = span(schedule, keys, last)
    room = min((last + 1) * schedule.block_rows, schedule.rooms_beyond[0])
    visits = (times * (end - begin if kept is None else int(kept.visited[last, begin:end].sum())) for times, kept in heads)
    return sum(visits) * (room - schedule.problem.seqlen_q)


def _fa1(schedule: Fa1BackwardSchedule, keys: int, heads: Heads) -> Traffic:
    """R = sum r_i c_i visits of a row: Q, O, dO, dQ and L are read at each, dQ is written at each and once to begin.

    K and V of the visited column blocks are read once; dK and dV are written once to begin, and once for those blocks.
    """
    p, visits = schedule.problem, _visits(schedule, keys, heads)
    R, rows, loaded = visits.row_visits, schedule.group * p.seqlen_q, _loaded(schedule, keys, heads)
    of_blocks = schedule.group * blocks_in(loaded, schedule.block_cols)  # a head's part of a score function is loaded this often
    read, written = forms.fa1_backward(rows, p.seqlen_k, loaded, R)
    read |= _given(p, R, schedule.bases is not None)
    if p.dtype == "float32":  # dQ itself is float32
        read["dQ"] = read.pop("dQ_acc")
        written["dQ"] += written.pop("dQ_acc")
    beside = position_bytes(schedule, 1, visits.blocks) + _mask_bytes(schedule, keys, heads) + head_bytes(p, of_blocks)
    return Traffic.of(in_bytes(p, read) + beside, in_bytes(p, written))


def _fa2(schedule: Fa2BackwardSchedule, keys: int, heads: Heads) -> Traffic:
    """Q, dO, D and L (float32: m and log l) once a visit of a row, K and V once, dK and dV once; an atomic reads and writes dQ
    at each visit.

    Before the pass, O and dO are read for D, and dQ's sum is cleared. After it, the sum is read and dQ written in its own type.
    Each thread block of a cluster reads D and L; Q and dO come to all of it at once.
    """
    p, group = schedule.problem, schedule.group
    visits = _visits(schedule, keys, heads)
    R = visits.row_visits
    Nq, atomics = group * p.seqlen_q, schedule.sums_queries
    loaded, made = _loaded(schedule, keys, heads), len(schedule.launches)
    copied = R + _rows_behind(schedule, keys, heads)
    scores, asked = _mask_bytes(schedule, keys, heads, by_tiles=schedule.by_tiles), _asked(schedule, keys, heads)
    col_blocks = blocks_in(p.seqlen_k, schedule.block_cols)
    beside = Counter({name: schedule.readers * nbytes for name, nbytes in scores.items()})
    if schedule.by_tiles:
        of_keys = sum(times * columns_of(schedule, keys, None if kept is None else kept.visited) for times, kept in heads)
        beside += head_bytes(p, group * col_blocks) + tile_bytes(p, R, of_keys, asked.row_visits, of_keys)
    else:  # FlashAttention-3's consumer warps each read what functions have of a head, a mask's alone where they ask it
        beside += head_bytes(p, WARPS * (visits if p.options.score else asked).visits)
    # A row of dQ's sum has padded columns.
    sums = (R + Nq) * blocks_in(p.head_dim, 16) * 16 * FLOAT32 * atomics
    added = Counter(dQ_acc=sums, dbias=scores["bias"] // p.bias_itemsize * FLOAT32 * schedule.dbias)
    turns = Counter[str]()
    if isinstance(schedule, Fa3BackwardSchedule) and schedule.deterministic and p.seqlen_q:
        turns["turns"] = INT32 * (
            Nq + schedule.adders * visits.blocks + col_blocks
        )  # 0 for each row; a visit adds 1 or more; a thread block counts itself
    read = {
        "Q": made * copied,
        "K": made * loaded,
        "V": loaded,
        "O": Nq,
        "dO": Nq + made * copied,
        **_given(p, p.options.sinks * Nq + made * schedule.cluster * R),
        "sinks": p.options.sinks * Nq,
        "D": schedule.cluster * R,
    }
    beside = Counter({name: made * nbytes for name, nbytes in beside.items()})
    beside += position_bytes(schedule, made * col_blocks, made * visits.blocks) + added
    written = {"dsinks": p.options.sinks * Nq, "D": Nq, "dK": p.seqlen_k, "dV": p.seqlen_k, "dQ": Nq * atomics}
    return Traffic.of(in_bytes(p, read) + beside, in_bytes(p, written) + added + turns)


def _given(p: Problem, rows: int, exact: bool = True) -> dict[str, int]:
    """The rows of the bases of weights: m and log l in float32 if that is `exact`, else L."""
    return {"bases" if p.dtype == "float32" and exact else "L": rows}


def _bases(schedule: RowBasesSchedule, keys: int, heads: Heads) -> Traffic:
    """m and log l again, as a forward computes them: Q once if a row block visits any column block, K at each visit, L (and its
    head's sink) once a row, two floats written a row. Half types only read L: further reads for rows with a large L are not
    counted."""
    p, rows = schedule.problem, schedule.group * schedule.problem.seqlen_q
    if p.dtype != "float32":
        return Traffic.of(in_bytes(p, {"L": rows}), {})
    visits, blocks = _visits(schedule, keys, heads), schedule.group * blocks_in(p.seqlen_q, schedule.block_rows)
    read = in_bytes(p, {"Q": visits.rows, "K": visits.keys, "L": rows, "sinks": p.options.sinks * rows})
    beside = position_bytes(schedule, blocks, visits.blocks) + _mask_bytes(schedule, keys, heads) + head_bytes(p, blocks)
    return Traffic.of(read + beside, in_bytes(p, {"bases": rows}))


def _queries(schedule: QueriesSchedule, keys: int, heads: Heads) -> Traffic:
    """The traffic of dQ's own kernel: `_query_reads`, and dQ once."""
    p = schedule.problem
    return Traffic.of(_query_reads(schedule, keys, heads), in_bytes(p, {"dQ": schedule.group * p.seqlen_q}))


def _sums(schedule: SumsSchedule, keys: int, heads: Heads) -> Traffic:
    """The same reads, and atomics, which read and write elements of the gradients of captured arrays: an element for each score
    that position leaves in the visited blocks, or, if it is one for a head, once a thread block. Loads by which scores find their
    elements, or their derivatives, are made once more. Deterministic sums read all of that twice; each thread block adds to the
    largest sizes, a word an array, and reads them; a sum has 64 bits."""
    p, found, form = schedule.problem, schedule.summed, schedule.problem.options.score
    assert form is not None
    blocks = schedule.group * blocks_in(p.seqlen_q, schedule.block_rows)
    scores = sum(times * scores_of(p, keys, None if kept is None else kept.visited, schedule.blocks) for times, kept in heads)
    again, added = Counter[str](), Counter[str]()
    for load in found.again:
        again[score.field(load.name)] += scores * score.itemsize(form, load)
    for load, times in (*((load, scores) for load, _ in found.score), *((load, blocks) for load, _ in found.head)):
        added[sum_field(load.name)] += (2 if schedule.deterministic else 1) * FLOAT32 * times
    read = _query_reads(schedule, keys, heads) + again
    if not schedule.deterministic:
        return Traffic.of(read + added, added)
    sizes = Counter({LARGEST: INT32 * len(schedule.dscore) * blocks})
    return Traffic.of(read + read + added + sizes + sizes, added + sizes)


def _query_reads(schedule: QueriesSchedule, keys: int, heads: Heads) -> Bytes:
    """The bytes that a kernel with row blocks as thread blocks reads, as in the forward: Q, dO, L and D once if a row block visits
    any column block, K and V at each visit."""
    p, visits = schedule.problem, _visits(schedule, keys, heads)
    blocks, seen, loaded = schedule.group * blocks_in(p.seqlen_q, schedule.block_rows), visits.rows, visits.keys
    read = in_bytes(p, {"Q": seen, "dO": seen, **_given(p, seen), "D": seen, "K": loaded, "V": loaded})
    beside = position_bytes(schedule, blocks, visits.blocks) + _mask_bytes(schedule, keys, heads, by_tiles=True)
    beside += head_bytes(p, blocks) + tile_bytes(p, seen, loaded, seen, _asked(schedule, keys, heads).keys)
    return read + beside


def _standard(schedule: BackwardSchedule, keys: int, heads: Heads) -> Traffic:
    """Algorithm 3 moves 7 N^2: it reads P twice, dP once and dS twice, and writes dP and dS, if P is given as in the paper.

    The kernels write P, from Q, K and L, and read P and dP once more by rows. The slopes of a score function go through HBM too,
    in dS's place. Tr x Tc tiles: tensors of Nq rows are read for each column of tiles, all keys of K and V for each row of tiles.
    """
    p, group = schedule.problem, schedule.group
    Tr, Tc = blocks_in(p.seqlen_q, schedule.block_rows), blocks_in(p.seqlen_k, schedule.block_cols)
    again = 0 if schedule.tiling.used == schedule.tiling.paper else 1  # 1 if P is computed again
    sloped = int(p.options.transformed)
    Nq, scores = group * p.seqlen_q, group * p.seqlen_q * p.seqlen_k
    read = {
        "Q": (1 + again) * Tc * Nq,
        "K": (1 + again) * group * Tr * keys,
        "V": group * Tr * keys,
        "dO": 2 * Tc * Nq,
        **_given(p, again * Tc * Nq),
        "P": (2 + again) * scores,
        "dP": (1 + again) * scores,
        "dS": (2 + sloped) * scores,
        "key_lengths": group * Tr * ((1 + again) * Tc + 1) * p.options.padded,
    }
    beside = _mask_bytes(schedule, keys, heads) + head_bytes(p, group * Tr * Tc) if again else Counter[str]()
    written = {"P": again * scores, "dP": scores, "dS": (1 + again * sloped) * scores, "dQ": Nq, "dK": p.seqlen_k, "dV": p.seqlen_k}
    return Traffic.of(in_bytes(p, read) + beside, in_bytes(p, written))


def _mask_bytes(schedule: BackwardSchedule, keys: int, heads: Heads, by_tiles: bool = False) -> Bytes:
    """The bytes of mask, bias and score function for one pass over all visited scores."""
    found = Counter[str]()
    for times, kept in heads:
        for name, nbytes in mask_bytes(schedule.problem, keys, kept, schedule.blocks, by_tiles).items():
            found[name] += times * nbytes
    return found


def standard_backward_ideal(problem: Problem) -> Traffic:
    """Algorithm 3 with each input of each step read once and P given: the bytes of standard attention's gradients.

    dV = P^T dO; dP = dO V^T; dS = P * (dP - rowsum(P * dP)); dQ = dS K; dK = dS^T Q. Each query head reads Nq (d + 2 d_v) +
    Nk (d + d_v) + 5 Nq Nk elements and writes the gradients, dP and dS; dK and dV once a key head. Masks change nothing, since
    P has them; key lengths shorten K and V.
    """
    p, rows = problem, problem.head_count * problem.seqlen_q
    scores, keys = rows * p.seqlen_k, sum(keys * batches for keys, batches in lengths(p).items()) * p.heads
    made, products = p.batch * p.kv_heads * p.seqlen_k, 2 * p.head_count  # those with K or V, each of which reads its key length
    read, written = forms.standard_backward(rows, keys, made, scores)
    read["dS"] += p.options.transformed * scores
    read["key_lengths"] = products * p.options.padded
    return Traffic.of(in_bytes(p, read), in_bytes(p, written))
