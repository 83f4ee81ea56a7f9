"""The numbers of the page: the closed forms of `sim.theory` for each section's picture, and small models beside them.

`javascript.translated` makes the page's functions of these, so they keep to its part of Python.
"""

from __future__ import annotations

import math

from cupyflash.sim.theory import forms
from cupyflash.sim.theory.bounds import break_even_sram
from cupyflash.tiling import paper_sizes

FLOAT32 = 4
Moved = dict[str, dict[str, int]]
"""Bytes "read" and "written", by tensor."""


def tiles(sram_elements: int, head_dim: int) -> dict[str, int]:
    """The paper's Br and Bc for an SRAM of M elements, the M at which standard attention moves as much, both in elements."""
    block_rows, block_cols = paper_sizes(sram_elements, head_dim)
    return {"block_rows": block_rows, "block_cols": block_cols, "break_even": break_even_sram(head_dim)}


def forward(algorithm: str, seqlen: int, head_dim: int, block_rows: int, block_cols: int, causal: bool, itemsize: int) -> Moved:
    """Bytes that one head reads and writes, by tensor, with N queries and N keys: `theory.traffic` of a schedule with these
    blocks. Standard attention's are `theory.standard_ideal`."""
    right = 0 if causal else 2 * seqlen
    found = forms.visited(seqlen, seqlen, block_rows, block_cols, 2 * seqlen, right)
    if algorithm == "fa1":
        loaded = forms.loaded_keys(seqlen, seqlen, block_rows, block_cols, 2 * seqlen, right, seqlen)
        read, written = forms.fa1(seqlen, loaded, found[0])
    elif algorithm == "fa2":
        read, written = forms.fa2(seqlen, found[1], found[2])
    else:
        read, written = forms.standard(seqlen, seqlen, seqlen * seqlen)
    each = forms.row_bytes(head_dim, head_dim, itemsize, itemsize)
    return {"read": forms.bytes_of(read, each), "written": forms.bytes_of(written, each)}


def online(scores: list[float], values: list[float], block: int, most_growth: float) -> list[dict[str, float]]:
    """Online softmax over blocks of scores, a state after each block: m, l, O (not divided yet), the factor `scale` that l and O
    were multiplied by, and the block's largest score `top`.

    A maximum that grows by no more than `most_growth` is not taken: m is then the old one, and nothing is rescaled.
    """
    m, l, O = -math.inf, 0.0, 0.0  # noqa: E741 (the paper's names)
    steps = []
    for begin in range(forms.blocks_in(len(scores), block)):
        first = begin * block
        end = min(first + block, len(scores))
        top = max(scores[first:end])
        base = top if top > m + most_growth else m
        scale = math.exp(m - base)
        l, O = l * scale, O * scale  # noqa: E741
        for n in range(first, end):
            p = math.exp(scores[n] - base)
            l, O = l + p, O + p * values[n]  # noqa: E741
        m = base
        steps.append({"top": top, "scale": scale, "m": m, "l": l, "O": O})
    return steps


def visits(algorithm: str, row_blocks: int, col_blocks: int, block_rows: int, block_cols: int, causal: bool) -> list[list[int]]:
    """The tiles [i, j] in the order of the algorithm's loops: Algorithm 1 has columns outside, FlashAttention-2 rows."""
    outer, inner = (col_blocks, row_blocks) if algorithm == "fa1" else (row_blocks, col_blocks)
    order = []
    for first in range(outer):
        for second in range(inner):
            i, j = (second, first) if algorithm == "fa1" else (first, second)
            if not causal or j * block_cols < (i + 1) * block_rows:
                order.append([i, j])
    return order


def walk(algorithm: str, seqlen: int, head_dim: int, block_rows: int, block_cols: int, causal: bool, steps: int) -> Moved:
    """Bytes of `forward` in float32 after the first `steps` tiles; O, l and m of Algorithm 1 are written once to begin."""
    row_blocks, col_blocks = forms.blocks_in(seqlen, block_rows), forms.blocks_in(seqlen, block_cols)
    every = visits(algorithm, row_blocks, col_blocks, block_rows, block_cols, causal)
    order = every[:steps]
    read = {"Q": 0, "K": 0, "V": 0}
    written = {"O": 0}
    if algorithm == "fa1":
        read = {"Q": 0, "K": 0, "V": 0, "O_acc": 0, "l": 0, "m": 0}
        written = {"O_acc": 0, "O": seqlen, "l": seqlen, "m": seqlen}
    before = [-1, -1]
    for i, j in order:
        rows = min(block_rows, seqlen - i * block_rows)
        keys = min(block_cols, seqlen - j * block_cols)
        if algorithm == "fa1" or i != before[0]:
            read["Q"] += rows
        if algorithm == "fa2" or j != before[1]:
            read["K"] += keys
            read["V"] += keys
        if algorithm == "fa1":
            for name in ("O_acc", "l", "m"):
                read[name] += rows
                written[name] += rows
        before = [i, j]
    if algorithm == "fa2":
        done = every[steps][0] if steps < len(every) else row_blocks
        written["O"] = min(done * block_rows, seqlen)
    each = forms.row_bytes(head_dim, head_dim, FLOAT32, FLOAT32)
    return {"read": forms.bytes_of(read, each), "written": forms.bytes_of(written, each)}


def warps(rows: int, cols: int, head_dim: int, count: int) -> dict[str, dict[str, int]]:
    """Bytes of shared memory that `count` warps move in one tile of half types, by splitting and by what moves."""
    return forms.split_bytes(rows, cols, head_dim, count)


def decoding(pairs: int, group: int, keys: int, head_dim: int, splits: int, sms: int, block_cols: int) -> dict[str, int]:
    """One query of half types for `pairs` pairs of batch and key head, each with `group` query heads, keys in `splits` parts.

    Thread blocks; the multiprocessors with one; rounds, if each has one thread block at a time; the most keys that one
    multiprocessor reads, one block after the other; HBM bytes, and those of partial results among them.
    """
    col_blocks = forms.blocks_in(keys, block_cols)
    used = min(splits, col_blocks)
    parts = group * used if splits > 1 else 0
    read, written = forms.decode(group, keys, parts)
    each = forms.row_bytes(head_dim, head_dim, 2, 2)
    moved = forms.bytes_of(read | {"Q": group * used}, each)
    stored = forms.bytes_of(written, each)
    partial = sum([moved[name] + stored[name] for name in ("O_part", "m_part", "l_part")])
    blocks = pairs * used
    rounds = forms.blocks_in(blocks, sms)
    return {
        "blocks": blocks,
        "busy": min(blocks, sms),
        "rounds": rounds,
        "longest": rounds * forms.blocks_in(col_blocks, used) * block_cols,
        "bytes": pairs * (sum(moved.values()) + sum(stored.values())),
        "partial": pairs * partial,
    }


def backward(algorithm: str, seqlen: int, head_dim: int, block_rows: int, block_cols: int, causal: bool) -> Moved:
    """Bytes that one head of half types reads and writes in the backward, by tensor: Algorithm 4 with L, or Algorithm 3."""
    if algorithm == "fa1":
        right = 0 if causal else 2 * seqlen
        found = forms.visited(seqlen, seqlen, block_rows, block_cols, 2 * seqlen, right)
        loaded = forms.loaded_keys(seqlen, seqlen, block_rows, block_cols, 2 * seqlen, right, seqlen)
        read, written = forms.fa1_backward(seqlen, seqlen, loaded, found[0])
        read = read | {"L": found[0]}
    else:
        read, written = forms.standard_backward(seqlen, seqlen, seqlen, seqlen * seqlen)
    each = forms.row_bytes(head_dim, head_dim, 2, 2)
    return {"read": forms.bytes_of(read, each), "written": forms.bytes_of(written, each)}


def kept(seqlen: int, heads: int, head_dim: int) -> dict[str, int]:
    """Bytes that a forward of half types keeps for its backward, P or L; and the backward's operations, in FLOP, with P kept
    (four products) or S computed again (five)."""
    product = 2 * heads * seqlen * seqlen * head_dim
    return {"P": 2 * heads * seqlen * seqlen, "L": FLOAT32 * heads * seqlen, "flops": 4 * product, "again": 5 * product}


def roles(turns: int, stages: int, groups: int, ahead: bool, copy: float, product: float, softmax: float) -> list[list[float]]:
    """A row block of a Hopper kernel: a producer warp that copies K_j and V_j into a ring of `stages` slots, and `groups` consumer
    warpgroups with rows of their own. A list of spans [row, kind, j, begin, end] in clocks.

    Row 0 is the producer, then the consumers. Kinds: 0 K_j copied, 1 V_j copied, 2 S = Q K_j^T, 3 softmax, 4 O += P V_j. Copies
    follow one another, so do products on the tensor cores, and exponentials; each role does its work in order. If `ahead`, a
    consumer issues the product S of block j + 1 before it waits for O += P V_j. Whatever can begin first begins.
    """
    tasks = []  # [row, kind, j, clocks]; first the copies, then three of each consumer's turn
    after = []  # by task, the tasks that it waits for; numbers below 0 are none
    for j in range(turns):
        for what in range(2):
            tasks.append([0, what, j, copy])
            freed = [2 * turns + 3 * (g * turns + j - stages) + 2 * what if j >= stages else -1 for g in range(groups)]
            after.append([2 * j + what - 1, *freed])
    for g in range(groups):
        for j in range(turns):
            own = 2 * turns + 3 * (g * turns + j)  # this turn's S; softmax and O follow it
            earlier = own - 3 if j > 0 else -1
            tasks.append([g + 1, 2, j, product])
            after.append([2 * j, earlier + (1 if ahead else 2) if j > 0 else -1])
            tasks.append([g + 1, 3, j, softmax])
            after.append([own])
            tasks.append([g + 1, 4, j, product])
            after.append([own + 1, 2 * j + 1, earlier + 2 if j > 0 else -1, own + 3 if ahead and j + 1 < turns else -1])
    return scheduled(tasks, after)


def scheduled(tasks: list[list[float]], after: list[list[int]]) -> list[list[float]]:
    """Spans [row, kind, j, begin, end] of tasks, each after those that it waits for, one at a time on each unit: copies, tensor
    cores, exponentials. The task that can begin first is taken next, of equals the earlier one of the list."""
    ends = [-1.0 for _ in range(len(tasks))]
    free = [0.0, 0.0, 0.0]
    spans = []
    for _ in range(len(tasks)):
        best, first = -1, math.inf
        for n in range(len(tasks)):
            ready = 0.0 if ends[n] < 0 else math.inf
            for other in after[n]:
                if other >= 0:
                    ready = max(ready, ends[other] if ends[other] >= 0 else math.inf)
            begin = max(ready, free[unit_of(tasks[n][1])])
            if begin < first:
                best, first = n, begin
        row, kind, j, takes = tasks[best]
        ends[best] = first + takes
        free[unit_of(kind)] = ends[best]
        spans.append([row, kind, j, first, ends[best]])
    return spans


def unit_of(kind: float) -> int:
    """The unit that does a kind of work: 0 copies, 1 tensor cores, 2 exponentials."""
    return 0 if kind < 2 else 2 if kind == 3 else 1


def busy(spans: list[list[float]]) -> float:
    """The share of time that the tensor cores work, from the first product's beginning to the last one's end."""
    begin, end, works = math.inf, 0.0, 0.0
    for _, kind, _, first, last in spans:
        if unit_of(kind) == 1:
            begin, end, works = min(begin, first), max(end, last), works + last - first
    return works / (end - begin)
