"""A fused forward in Triton, as people write one: a program a block of rows, K and V block by block, m and l on the way.

Written for the benchmark, so that a GPU's Triton is timed without anybody else's package. It has no gradients.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

BLOCK_ROWS, BLOCK_COLS = 128, {16: 128, 32: 128, 64: 128, 128: 64, 256: 32}  # Br, and Bc by d


@triton.jit
def fused(
    Q, K, V, O,  # noqa: E741
    stride_head, stride_row, n, scale_log2,
    D: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """O = softmax(scale Q K^T) V of one block of rows of one head; all four of (heads, n, D), alike in memory."""
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, columns, inner = i * BR + tl.arange(0, BR), tl.arange(0, BC), tl.arange(0, D)
    place = head * stride_head + rows[:, None] * stride_row + inner[None, :]
    Qi = tl.load(Q + place, mask=rows[:, None] < n, other=0.0)
    m = tl.full([BR], float("-inf"), tl.float32)
    l = tl.zeros([BR], tl.float32)  # noqa: E741
    acc = tl.zeros([BR, D], tl.float32)
    last = tl.minimum((i + 1) * BR, n) if CAUSAL else n
    for j in range(0, last, BC):
        keys = j + columns
        there = head * stride_head + keys[:, None] * stride_row + inner[None, :]
        Kj = tl.load(K + there, mask=keys[:, None] < n, other=0.0)
        S = tl.dot(Qi, tl.trans(Kj)) * scale_log2
        seen = keys[None, :] < n
        if CAUSAL:
            seen = seen & (rows[:, None] >= keys[None, :])
        S = tl.where(seen, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1))
        P = tl.exp2(S - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(P, 1)  # noqa: E741
        Vj = tl.load(V + there, mask=keys[:, None] < n, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(P.to(Vj.dtype), Vj)
        m = m_new
    tl.store(O + place, (acc / l[:, None]).to(O.dtype.element_ty), mask=rows[:, None] < n)


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """O of tensors (b, h, n, d), contiguous, d one of those that `BLOCK_COLS` has."""
    batch, heads, n, d = q.shape
    out = q.new_empty(q.shape)
    grid = triton.cdiv(n, BLOCK_ROWS), batch * heads
    scale_log2 = math.log2(math.e) / math.sqrt(d)
    given = (q, k, v, out, q.stride(1), q.stride(2), n, scale_log2)
    fused[grid](*given, D=d, BR=BLOCK_ROWS, BC=BLOCK_COLS[d], CAUSAL=causal, num_warps=8 if d >= 128 else 4)
    return out
