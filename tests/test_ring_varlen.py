"""Packed sequences over ranks: each score is seen once, the calls are those of the whole."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cupyflash import Mask, Score
from cupyflash.distributed import (
    ring_attention_varlen,
    ring_attention_varlen_backward,
    shard,
    threads,
    unshard,
)
from cupyflash.distributed.asked import RingOptions
from cupyflash.distributed.plan import PackedPiece, Piece
from cupyflash.distributed.varlen_calls import VarlenCalls
from cupyflash.distributed.varlen_plan import VarlenPlan
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.request.dropout import KEY_GROUP, MOST_PAIRS, ROW_GROUP, Dropout
from rings import A100, LAYOUTS, arrays, over_ranks, plain_backward, plain_forward, plain_pieces, refusals  # noqa: F401 (a fixture)
from suites import sweep


def bounds(data: st.DataObject, total: int, sequences: int) -> tuple[int, ...]:
    inner = data.draw(st.lists(st.integers(0, total), min_size=sequences - 1, max_size=sequences - 1))
    return (0, *sorted(inner), total)


@sweep(15, 150, data=st.data())
def test_packed_sequences_are_seen_once(data: st.DataObject) -> None:
    """Every score that position leaves, of every sequence, is in one call of one rank, and nothing else is; a mask function says
    there what it says of the whole, and dropout's generator is cut at its groups."""
    sequences, n_q, n_k = (data.draw(st.integers(low, high)) for low, high in ((1, 6), (0, 200), (0, 200)))
    of_rows = bounds(data, n_q, sequences)
    of_keys = of_rows if data.draw(st.booleans()) else bounds(data, n_k, sequences)
    reach = data.draw(st.sampled_from([(None, None), (None, 0), (30, 0), (10, 40), (0, 0), (None, 5)]))
    layout, gather = data.draw(st.sampled_from(LAYOUTS)), data.draw(st.booleans())
    plan = VarlenPlan(of_rows[-1], of_keys[-1], data.draw(st.integers(1, 5)), layout, False, reach, gather, of_rows, of_keys)
    dropped = data.draw(st.sampled_from([None, Dropout(0.5, seed=3)]))
    asked = RingOptions(False, None, None, layout, gather, None, IN_PACKED, dropped)
    calls = VarlenCalls(asked, plan, False)
    seen = np.zeros((of_rows[-1], of_keys[-1]), int)
    masked = np.zeros(seen.shape, bool)
    for rank, of_rank in enumerate(plan.q_parts):
        steps = plan.steps(rank)
        assert len(steps) == len(plan.shifts)
        for step in steps:
            keys = range(plan.n_k) if gather else [key for chunk in plan.k_parts[step.source] for key in chunk]
            rows = [row for chunk in of_rank for row in chunk]
            for piece in step.pieces:
                own = np.ix_([rows[i] for i in piece.rows], [keys[j] for j in piece.keys])
                seen[own] += said_of(piece, reach)
                masked[own] |= masked_in(calls, piece, len(rows), len(keys))
                batch, _, row, key = calls._origin(piece)
                row_ahead, key_ahead = calls._ahead(piece)
                first = rows[piece.rows.start] - of_rows[piece.sequence], keys[piece.keys.start] - of_keys[piece.sequence]
                assert batch == piece.sequence and (row + row_ahead, key + key_ahead) == first
                assert dropped is None or row % ROW_GROUP == key % KEY_GROUP == 0
    expected = np.zeros_like(seen)
    said = np.zeros(seen.shape, bool)
    for number, ((q, q_end), (k, k_end)) in enumerate(zip(pairwise(of_rows), pairwise(of_keys), strict=True)):
        expected[q:q_end, k:k_end] = within(q_end - q, k_end - k, reach)
        said[q:q_end, k:k_end] = says(IN_PACKED.form, IN_PACKED.arrays, number, q_end - q, k_end - k)
    assert np.array_equal(seen, expected) and np.array_equal(masked & (seen > 0), said & (seen > 0))


# Of each sequence another condition, by all that it has of position
IN_PACKED = Mask(
    "by[b, q] <= by[b, k] and (k + row) % 3 != n_k % 3 or seen[row, k] and k < n_q",
    by=np.random.default_rng(1).integers(0, 3, (6, 200)),
    seen=np.random.default_rng(2).random((200, 200)) < 0.3,
)


def says(form: Any, values: Any, sequence: int, n_q: int, n_k: int) -> np.ndarray:
    """The mask's values in a call's sequence of these lengths."""
    at = positions({"b": 1, "h": 1, "kv_h": 1, "row": n_q, "k": n_k})
    found = evaluate(form.tree, {**at, "b": at["b"] + sequence, **values})
    return np.broadcast_to(found, (1, 1, n_q, n_k))[0, 0]


def masked_in(calls: VarlenCalls, piece: Piece | PackedPiece, rows: int, keys: int) -> np.ndarray:
    """What the mask of a piece's call says of the piece, which has nothing else to see."""
    q, k = (np.zeros((1, n, 1)) for n in (rows, keys))
    mask = calls._of(piece, q, k, k)["mask"]
    form, values = mask.form, mask.numbers | mask.arrays
    if isinstance(piece, Piece):
        row, key = calls._ahead(piece)
        whole = says(form, values, 0, row + len(piece.rows), key + len(piece.keys))
        assert not whole[:row].any() and not whole[:, :key].any()
        return whole[row:, key:]
    said = np.zeros((len(piece.rows), len(piece.keys)), bool)
    for number, ((q, q_end), (k, k_end)) in enumerate(zip(pairwise(piece.cu_seqlens_q), pairwise(piece.cu_seqlens_k), strict=True)):
        said[q:q_end, k:k_end] = says(form, values, number, q_end - q, k_end - k)
    return said


def within(n_q: int, n_k: int, reach: Any) -> np.ndarray:
    """The keys that rows see, aligned bottom-right."""
    behind = np.arange(n_k) - (np.arange(n_q) + n_k - n_q)[:, None]
    return (behind >= -(n_q + n_k if reach[0] is None else reach[0])) & (behind <= (n_q + n_k if reach[1] is None else reach[1]))


def said_of(piece: Piece | PackedPiece, reach: Any) -> np.ndarray:
    if isinstance(piece, Piece):
        return within(len(piece.rows), len(piece.keys), (None, 0) if piece.causal else piece.window or (None, None))
    seen = np.zeros((len(piece.rows), len(piece.keys)), int)
    for (q, q_end), (k, k_end) in zip(pairwise(piece.cu_seqlens_q), pairwise(piece.cu_seqlens_k), strict=True):
        seen[q:q_end, k:k_end] = within(q_end - q, k_end - k, reach)
    return seen


# Of each head another condition, and rows that see nothing
OF_HEADS = Mask(
    "h == 0 and document[b, q] == document[b, k] and k <= q or h == 1 and (k < prefix[b] or seen[row, k]) and k < n_k - 3",
    document=np.repeat([[0, 1, 2]], [20, 25, 10], axis=1).repeat(5, axis=0),
    prefix=np.array([5, 0, 30, 0, 9], np.int32),
    seen=np.random.default_rng(0).random((55, 55)) < 0.05,
)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "how", "options"),
    [
        (
            2,
            {},
            {
                "causal": True,
                "score": Score("s - slope[b] * (q - k) + 0.01 * row", slope=np.linspace(0, 0.1, 5, dtype=np.float32)),
                "sinks": np.array([0.5, -1], np.float32),
            },
        ),
        (2, {}, {"mask": OF_HEADS, "dropout": 0.3, "seed": 5}),
        (3, {"layout": "contiguous", "gather_kv": True}, {"mask": OF_HEADS, "dropout": 0.3, "seed": 5}),
    ],
)
def test_packed_sequences_on_the_simulated_device(ranks: int, how: dict[str, Any], options: dict[str, Any]) -> None:
    """The results are `attention_varlen`'s, which the 2x rule checks elsewhere: sequences that are cut, whole ones, an
    empty one."""
    cu_seqlens = np.array([0, 20, 20, 75, 90, 128], np.int32)
    q, k, v, dout = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays(128, 128))
    expected = cupyflash.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, return_lse=True, **options)
    gradients = cupyflash.attention_varlen_backward(dout, q, k, v, *expected, cu_seqlens, cu_seqlens, **options)

    layout = how.get("layout", "zigzag")
    bounds = cu_seqlens.astype(np.int64), cu_seqlens.astype(np.uint8)  # integers of any width

    def work(comm: Any) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
        own = [shard(x, comm, layout, axis=0) for x in (q, k, v, dout)]
        found = ring_attention_varlen(*own[:3], *bounds, comm, return_lse=True, **how, **options)
        made = ring_attention_varlen_backward(own[3], *own[:3], *found, *bounds, comm, **how, **options)
        whole = [unshard(x, comm, layout, axis=0) for x in (found[0], *made[:3])]
        return [*whole, unshard(found[1], comm, layout, axis=1)], made[3:]

    results = threads(ranks, work)
    for name, one, whole in zip(
        ("O", "dQ", "dK", "dV", "L"), (expected[0], *gradients[:3], expected[1]), results[0][0], strict=True
    ):
        known = np.isfinite(one)
        assert np.array_equal(whole[~known], one[~known]), name
        assert np.allclose(whole[known], one[known], atol=2e-3 * max(1, np.abs(one[known]).max())), name
    if "sinks" in options:
        assert np.allclose(sum(share for _, (share,) in results), gradients[3], atol=1e-2)


def test_bounds_that_are_none() -> None:
    q, k, v = (np.zeros((64, 2, 16), np.float16) for _ in range(3))
    for change, message in (
        ([0, 30, 20, 64], "cu_seqlens_q must begin with 0 and not decrease, got .0, 30, 20, 64."),
        ([0, 63], "cu_seqlens_q must end with 64, the tokens of all ranks, got 63"),
        ([0, 10, 64], "cu_seqlens_k must have cu_seqlens_q's 3 bounds, got 2"),
    ):
        own = refusals(2, lambda c, b=change: ring_attention_varlen(*(shard(x, c, axis=0) for x in (q, k, v)), b, [0, 64], c))
        assert all(re.search(message, str(each)) for each in own), own
    differ = refusals(2, lambda c: ring_attention_varlen(*(shard(x, c, axis=0) for x in (q, k, v)), [0, c.rank, 64], [0, 3, 64], c))
    assert all("cu_seqlens_q must be the same on all 2 ranks, got [0, 0, 64] on rank 0; [0, 1, 64]" in str(x) for x in differ)

    def masked(comm: Any, **captured: Any) -> None:
        ring_attention_varlen(*(shard(x, comm, axis=0) for x in (q, k, v)), [0, 3, 64], [0, 3, 64], comm, **captured)

    differ = refusals(2, lambda c: masked(c, mask=Mask("k - q < width", width=c.rank)))
    assert all("mask must be the same on all 2 ranks" in str(x) and "width=0) on rank 0; Mask" in str(x) for x in differ), differ
    for each in refusals(2, lambda c: masked(c, mask=Mask("seen[k]", seen=np.ones(32, bool)))):  # of a part, or a chunk
        assert "seen must have length 61 along axis 0, which k indexes" in str(each)
    many = [0] * (MOST_PAIRS + 1) + [64]
    own = refusals(1, lambda c: ring_attention_varlen(q, k, v, many, many, c, dropout=0.1, seed=0))
    assert "dropout is for at most 65,536 sequences, got 65,537" in str(own[0])
