"""Closed forms of the backward passes' HBM traffic, with their constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from cupyflash.schedules import BackwardSchedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule, launches
from cupyflash.sim.theory.visits import FLOAT32, columns_of, lengths, mask_bytes, visits_of
from cupyflash.sim.traffic import TensorTraffic, Traffic

# Bytes read and written, by tensor
Form = dict[str, tuple[int, int]]


def backward_traffic(schedule: BackwardSchedule) -> Traffic:
    """The closed form of a backward schedule's HBM traffic, per tensor, in bytes."""
    forms: dict[str, Callable[[BackwardSchedule, int, list[np.ndarray | None]], Form]] = {
        "fa1": _fa1,
        "fa2": _fa2,
        "standard": _standard,
    }
    total: Counter[tuple[str, bool]] = Counter()
    for times, keys, kept in _groups(schedule):
        for name, moved in forms[schedule.algorithm](schedule, keys, kept).items():
            for write, nbytes in enumerate(moved):
                total[name, bool(write)] += times * nbytes
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _groups(schedule: BackwardSchedule) -> Iterator[tuple[int, int, list[np.ndarray | None]]]:
    """How many (batch, key head) pairs have how many keys, and the block mask (Tr, Tc) of each query head of the group."""
    p = schedule.problem
    if p.block_mask is None:
        for keys, batches in lengths(p).items():
            yield batches * p.kv_heads, keys, [None] * schedule.group
        return
    masks = p.block_mask.kept
    for batch in range(p.batch):
        for first in range(0, p.heads, schedule.group):
            kept = [masks[batch % len(masks), head % masks.shape[1]] for head in range(first, first + schedule.group)]
            yield 1, p.key_lengths[batch] if p.key_lengths else p.seqlen_k, list(kept)


def _loaded(schedule: BackwardSchedule, keys: int, kept: list[np.ndarray | None]) -> int:
    """The keys of the column blocks that any row block of any query head visits."""
    masks = [one for one in kept if one is not None]
    return columns_of(schedule, keys, np.any(masks, axis=0) if masks else None)


def _fa1(schedule: BackwardSchedule, keys: int, kept: list[np.ndarray | None]) -> Form:
    """R = sum r_i c_i visits of a row: Q, O, dO, dQ and L are read at each, dQ is written at each and once to begin.

    K and V of the visited column blocks are read once; dK and dV are written once to begin, and once for those blocks.
    """
    p = schedule.problem
    visits = [visits_of(schedule, keys, one) for one in kept]
    R, rows = sum(int(rows @ times) for rows, times, _, _ in visits), schedule.group * p.seqlen_q
    d, dv, loaded = p.head_dim, p.value_dim, _loaded(schedule, keys, kept)
    form = {
        "Q": (R * d * p.itemsize, 0),
        "K": (loaded * d * p.itemsize, 0),
        "V": (loaded * dv * p.itemsize, 0),
        "O": (R * dv * p.itemsize, 0),
        "dO": (R * dv * p.itemsize, 0),
        "L": (R * FLOAT32, 0),
        "dK": (0, (p.seqlen_k + loaded) * d * p.itemsize),
        "dV": (0, (p.seqlen_k + loaded) * dv * p.itemsize),
        "key_lengths": (4 if p.padded else 0, 0),
        "block_mask": (0 if p.block_mask is None else sum(int(blocks.sum()) for *_, blocks in visits), 0),
    }
    if p.dtype == "float32":
        form["dQ"] = (R * d * FLOAT32, (R + rows) * d * FLOAT32)
    else:
        # Of the R + Nq writes of each element, the last goes to dQ in its own type and the others to dQ_acc.
        form["dQ_acc"] = (R * d * FLOAT32, R * d * FLOAT32)
        form["dQ"] = (0, rows * d * p.itemsize)
    return form | {name: (nbytes, 0) for name, nbytes in _mask_bytes(schedule, keys, kept).items()}


def _fa2(schedule: BackwardSchedule, keys: int, kept: list[np.ndarray | None]) -> Form:
    """Q, dO, L and D once a visit of a row, K and V once, dK and dV once; dQ is read and written by an atomic at each visit.

    Before it O and dO are read for D, and dQ's sum is cleared; behind it the sum is read, and dQ written in its own type.
    """
    assert isinstance(schedule, Fa2BackwardSchedule)
    p, group = schedule.problem, schedule.group
    visits = [visits_of(schedule, keys, one) for one in kept]
    R = sum(int(rows @ times) for rows, times, _, _ in visits)
    Nq, d, dv, atomics = group * p.seqlen_q, p.head_dim, p.value_dim, not schedule.deterministic
    loaded, made = _loaded(schedule, keys, kept), launches(p)
    form = {
        "Q": (len(made) * R * d * p.itemsize, 0),
        "K": (len(made) * loaded * d * p.itemsize, 0),
        "V": (loaded * dv * p.itemsize, 0),
        "O": (Nq * dv * p.itemsize, 0),
        "dO": ((Nq + len(made) * R) * dv * p.itemsize, 0),
        "L": (len(made) * R * FLOAT32, 0),
        "D": (R * FLOAT32, Nq * FLOAT32),
        "dK": (0, p.seqlen_k * d * p.itemsize),
        "dV": (0, p.seqlen_k * dv * p.itemsize),
        "dQ": (0, Nq * d * p.itemsize),
        "dQ_acc": ((R + Nq) * d * FLOAT32, (R + Nq) * d * FLOAT32) if atomics else (0, 0),
        "key_lengths": (len(made) * 4 * math.ceil(p.seqlen_k / schedule.block_cols) if p.padded else 0, 0),
        "block_mask": (0 if p.block_mask is None else len(made) * sum(int(blocks.sum()) for *_, blocks in visits), 0),
    }
    return form | {name: (len(made) * nbytes, 0) for name, nbytes in _mask_bytes(schedule, keys, kept).items()}


def _standard(schedule: BackwardSchedule, keys: int, kept: list[np.ndarray | None]) -> Form:
    """Of N^2, Algorithm 3 reads P, dP and dS twice, once and twice, and writes dP and dS: 7 in all, the paper's own P given.

    The kernels write P, from Q, K and L, and read a row of P and dP once more. Tr x Tc tiles: what has Nq rows is read for each
    column of tiles, K and V, as many keys as there are, for each row of tiles.
    """
    p, group, size = schedule.problem, schedule.group, schedule.problem.itemsize
    Tr, Tc = math.ceil(p.seqlen_q / schedule.block_rows), math.ceil(p.seqlen_k / schedule.block_cols)
    again = 0 if schedule.tiling.used == schedule.tiling.paper else 1  # whether P is made again
    Nq, scores = group * p.seqlen_q, group * p.seqlen_q * p.seqlen_k * size
    form = {
        "Q": ((1 + again) * Tc * Nq * p.head_dim * size, 0),
        "K": ((1 + again) * group * Tr * keys * p.head_dim * size, 0),
        "V": (group * Tr * keys * p.value_dim * size, 0),
        "dO": (2 * Tc * Nq * p.value_dim * size, 0),
        "L": (again * Tc * Nq * FLOAT32, 0),
        "P": ((2 + again) * scores, again * scores),
        "dP": ((1 + again) * scores, scores),
        "dS": (2 * scores, scores),
        "dQ": (0, Nq * p.head_dim * size),
        "dK": (0, p.seqlen_k * p.head_dim * size),
        "dV": (0, p.seqlen_k * p.value_dim * size),
        "key_lengths": (4 * group * Tr * ((1 + again) * Tc + 1) if p.padded else 0, 0),
    }
    return form | {name: (again * nbytes, 0) for name, nbytes in _mask_bytes(schedule, keys, kept).items()}


def _mask_bytes(schedule: BackwardSchedule, keys: int, kept: list[np.ndarray | None]) -> Counter[str]:
    """What one look at every visited score reads of mask and bias."""
    total: Counter[str] = Counter()
    for one in kept:
        for name, (nbytes, _) in mask_bytes(schedule.problem, keys, one, (schedule.block_rows, schedule.block_cols)).items():
            total[name] += nbytes
    return total
