"""Closed forms of HBM traffic, with their constants; Theorem 2 and the lower bounds.

Everything here is derived from sizes and block sizes alone, from the rows' point of view; it shares no code with the
schedules' steps, so that its equality with their replay says something. Sources: FlashAttention (arXiv 2205.14135),
FlashAttention-2 (arXiv 2307.08691), Saha and Ye (arXiv 2402.07443), Milakov and Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from cupyflash.problem import ITEMSIZE, Problem
from cupyflash.schedules import SoftmaxSchedule, TileSchedule, VarlenSchedule
from cupyflash.sim.traffic import TensorTraffic, Traffic

FLOAT32 = 4


def traffic(schedule: TileSchedule | SoftmaxSchedule) -> Traffic:
    """The closed form of a schedule's HBM traffic, per tensor, in bytes."""
    if isinstance(schedule, SoftmaxSchedule):
        return softmax_traffic(schedule.rows, schedule.cols, schedule.dtype, schedule.algorithm)
    if isinstance(schedule, VarlenSchedule):
        return _varlen(schedule)
    form = {"fa1": _fa1, "fa2": _fa2, "standard": _standard}[schedule.algorithm]
    p = schedule.problem
    total: Counter[tuple[str, bool]] = Counter()
    for times, keys, kept in _pairs(p):
        for name, moved in (form(schedule, keys, kept) | _masks(p, keys, kept, (schedule.block_rows, schedule.block_cols))).items():
            for write, nbytes in enumerate(moved):
                total[name, bool(write)] += times * nbytes
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _pairs(p: Problem) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """How many (batch, head) pairs have how many keys, and which block mask (Tr, Tc)."""
    if p.block_mask is None:
        for keys, batches in _lengths(p).items():
            yield batches * p.heads, keys, None
        return
    for batch in range(p.batch):
        for head in range(p.heads):
            which = batch % p.block_mask.shape[0], head % p.block_mask.shape[1]
            yield 1, p.key_lengths[batch] if p.key_lengths else p.seqlen_k, p.block_mask.kept[which]


def _varlen(schedule: VarlenSchedule) -> Traffic:
    """The sum of its sequences; two bounds of each tensor for every thread block, of which each sequence has the longest's."""
    p = schedule.problem
    total: Counter[tuple[str, bool]] = Counter()
    for one, count in schedule.sequences().items():
        for name, moved in traffic(one).items():
            total[name, False] += count * moved.read_bytes
            total[name, True] += count * moved.write_bytes
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        total[name, False] = 8 * p.head_count * math.ceil(p.seqlen_q / schedule.block_rows)
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})


def _lengths(p: Problem) -> Mapping[int, int]:
    """How many batches have how many keys."""
    return {p.seqlen_k: p.batch} if p.key_lengths is None else Counter(p.key_lengths)


def rows_and_visits(schedule: TileSchedule, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """r_i, the rows of row block i, and the columns from a_i to b_i, in whole column blocks, that its rows see of `keys`.

    c_i = (b_i - a_i) / Bc column blocks; a_i = b_i where the rows see none.
    """
    p, br, bc = schedule.problem, schedule.block_rows, schedule.block_cols
    first = np.arange(0, p.seqlen_q, br)
    end = np.minimum(first + br, p.seqlen_q)
    shift = p.seqlen_k - p.seqlen_q
    b = np.full_like(end, keys) if p.right is None else np.clip(end + shift + p.right, 0, keys)
    a = np.zeros_like(first) if p.left is None else np.maximum(first + shift - p.left, 0)
    seen = a < b
    return end - first, np.where(seen, a // bc * bc, 0), np.where(seen, -(-b // bc) * bc, 0)


def _visits(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """r_i, c_i, the keys of the column blocks that row block i visits, and its blocks that a block mask speaks of.

    The last but one is summed for row block i alone; see `_columns` for the keys that any of them visits.
    """
    rows, a, b = rows_and_visits(schedule, keys)
    bc = schedule.block_cols
    if kept is None:
        return rows, (b - a) // bc, np.minimum(b, keys) - a, (b - a) // bc
    starts = np.arange(kept.shape[1]) * bc
    widths = np.clip(keys - starts, 0, bc)
    visited = kept & (a[:, None] <= starts) & (starts < b[:, None])
    return rows, visited.sum(axis=1), visited @ widths, (b - a) // bc


def _columns(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> int:
    """The keys of the column blocks that any row block visits."""
    _, a, b = rows_and_visits(schedule, keys)
    if kept is None:
        return max(0, min(int(b.max(initial=0)), keys) - int(a[a < b].min(initial=keys)))
    starts = np.arange(kept.shape[1]) * schedule.block_cols
    visited = (kept & (a[:, None] <= starts) & (starts < b[:, None])).any(axis=0)
    return int(visited @ np.clip(keys - starts, 0, schedule.block_cols))


def _fa1(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """R = sum r_i c_i visits of a row: Q, O, l and m are read at each, O, l and m written at each and once to begin."""
    p = schedule.problem
    rows, visits, _, blocks = _visits(schedule, keys, kept)
    R, Nq, d, dv = int(rows @ visits), p.seqlen_q, p.head_dim, p.value_dim
    loaded = _columns(schedule, keys, kept)
    form = {
        "Q": (R * d * p.itemsize, 0),
        "K": (loaded * d * p.itemsize, 0),
        "V": (loaded * dv * p.itemsize, 0),
        "l": (R * FLOAT32, (R + Nq) * FLOAT32),
        "m": (R * FLOAT32, (R + Nq) * FLOAT32),
        "L": (0, Nq * FLOAT32 if schedule.lse else 0),
        "key_lengths": (4 if p.padded else 0, 0),
        "block_mask": (0 if kept is None else int(blocks.sum()), 0),
    }
    if p.dtype == "float32":
        form["O"] = (R * dv * FLOAT32, (R + Nq) * dv * FLOAT32)
    else:
        # Of the R + Nq writes of each element, the last goes to O in its own type and the others to O_acc.
        form["O_acc"] = (R * dv * FLOAT32, R * dv * FLOAT32)
        form["O"] = (0, Nq * dv * p.itemsize)
    return form


def _fa2(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """Q once where a row block visits any column block, K and V at each visit, O and L once."""
    p = schedule.problem
    rows, visits, loaded, blocks = _visits(schedule, keys, kept)
    return {
        "Q": (int(rows[visits > 0].sum()) * p.head_dim * p.itemsize, 0),
        "K": (int(loaded.sum()) * p.head_dim * p.itemsize, 0),
        "V": (int(loaded.sum()) * p.value_dim * p.itemsize, 0),
        "O": (0, p.seqlen_q * p.value_dim * p.itemsize),
        "L": (0, p.seqlen_q * FLOAT32 if schedule.lse else 0),
        "key_lengths": (4 * math.ceil(p.seqlen_q / schedule.block_rows) if p.padded else 0, 0),
        "block_mask": (0 if kept is None else int(blocks.sum()), 0),
    }


def _standard(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> dict[str, tuple[int, int]]:
    """Tr x Tc tiles: Q is read for each column of tiles, K and V, as many keys as there are, for each row of tiles."""
    p = schedule.problem
    Tr, Tc = math.ceil(p.seqlen_q / schedule.block_rows), math.ceil(p.seqlen_k / schedule.block_cols)
    ideal = schedule.tiling.used == schedule.tiling.paper
    scores = p.seqlen_q * p.seqlen_k * p.itemsize
    return {
        "Q": (Tc * p.seqlen_q * p.head_dim * p.itemsize, 0),
        "K": (Tr * keys * p.head_dim * p.itemsize, 0),
        "V": (Tr * keys * p.value_dim * p.itemsize, 0),
        "S": (scores if ideal else 2 * scores, scores),
        "P": (scores, scores),
        "O": (0, p.seqlen_q * p.value_dim * p.itemsize),
        "L": (0, p.seqlen_q * FLOAT32 if schedule.lse else 0),
        "key_lengths": (4 * Tr * (Tc + 1) if p.padded else 0, 0),
    }


def _masks(p: Problem, keys: int, kept: np.ndarray | None = None, blocks: tuple[int, int] = (1, 1)) -> dict[str, tuple[int, int]]:
    """Mask and bias: each score of the visited blocks that causal mask and window leave reads its own element."""
    if not (p.mask or p.bias):
        return {}
    own = np.arange(p.seqlen_q) + (p.seqlen_k - p.seqlen_q)
    end = np.clip(own + p.right + 1, 0, keys) if p.right is not None else np.full_like(own, keys)
    begin = np.clip(own - p.left, 0, end) if p.left is not None else np.zeros_like(own)
    if kept is None:
        scores = int((end - begin).sum())
    else:
        cols = np.arange(keys)
        seen = (begin[:, None] <= cols) & (cols < end[:, None])
        rows = np.arange(p.seqlen_q)[:, None] // blocks[0]
        scores = int((seen & kept[rows, cols // blocks[1]]).sum())
    return {"mask": (scores if p.mask else 0, 0), "bias": (scores * p.itemsize if p.bias else 0, 0)}


def softmax_traffic(rows: int, cols: int, dtype: str, algorithm: str) -> Traffic:
    """Safe softmax reads each element for the largest, the sum and the output; the online form has the first two in one."""
    reads = {"softmax-safe": 3, "softmax-online": 2}[algorithm]
    size = rows * cols * ITEMSIZE[dtype]
    return Traffic({"x": TensorTraffic(reads * size, 0), "y": TensorTraffic(0, size)})


def standard_ideal(problem: Problem) -> Traffic:
    """Algorithm 0 with each input of each step read once: (Nq + 2 Nk) d + 2 Nq Nk reads, 2 Nq Nk + Nq d writes a head.

    A mask or bias adds an element for each score that the causal mask leaves; key lengths shorten K and V.
    """
    p, size = problem, problem.head_count * problem.itemsize
    scores = p.seqlen_q * p.seqlen_k * size
    read = Counter({"key_lengths": 8 * p.head_count if p.padded else 0})  # once a product
    for keys, batches in _lengths(p).items():
        rows = {"K": keys * p.head_dim * p.itemsize, "V": keys * p.value_dim * p.itemsize}
        for name, nbytes in (rows | {name: moved for name, (moved, _) in _masks(p, keys).items()}).items():
            read[name] += batches * p.heads * nbytes
    return Traffic(
        {
            "Q": TensorTraffic(p.seqlen_q * p.head_dim * size, 0),
            "S": TensorTraffic(scores, scores),
            "P": TensorTraffic(scores, scores),
            "O": TensorTraffic(0, p.seqlen_q * p.value_dim * size),
        }
        | {name: TensorTraffic(nbytes, 0) for name, nbytes in read.items()}
    )


def theorem2_standard(seqlen: int, head_dim: int) -> float:
    """Theorem 2: standard attention makes Theta(N d + N^2) HBM accesses; this is the argument, in elements."""
    return seqlen * head_dim + seqlen**2


def theorem2_flash(seqlen: int, head_dim: int, sram_elements: float) -> float:
    """Theorem 2: for d <= M <= N d, FlashAttention makes Theta(N^2 d^2 / M) HBM accesses; the argument, in elements."""
    return seqlen**2 * head_dim**2 / sram_elements


def theorem2_holds_for(seqlen: int, head_dim: int, sram_elements: float) -> bool:
    """Whether M is in the theorem's range, d <= M <= N d."""
    return head_dim <= sram_elements <= seqlen * head_dim


def lower_bound(seqlen: int, head_dim: int, sram_elements: float) -> float:
    """What any exact algorithm must move, up to a constant that the proofs leave open; in elements.

    M >= d^2: N^2 d^2 / M; M < d^2: N^2 d / sqrt(M) (Saha and Ye). Compare shapes and ratios with it, not levels.
    """
    if sram_elements >= head_dim**2:
        return theorem2_flash(seqlen, head_dim, sram_elements)
    return seqlen**2 * head_dim / math.sqrt(sram_elements)


def break_even_sram(head_dim: int) -> int:
    """M in elements above which Algorithm 1 moves less than standard attention, to leading order in N: 3 d^2.

    With one item size throughout, Algorithm 1 moves 3 d N^2 / Bc elements (Q and O read, O written at each visit),
    12 N^2 d^2 / M at Bc = M / 4d, against 4 N^2 for S and P written and read.
    """
    return 3 * head_dim**2
