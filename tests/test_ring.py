"""Attention over ranks that are threads: the ring against one whole call, positions, agreement, faults. MPI: test_mpi.py."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.distributed import (
    RankFailed,
    parts,
    ring_attention,
    ring_attention_backward,
    ring_attention_varlen,
    ring_attention_varlen_backward,
    ring_attention_vjp,
    shard,
    threads,
    unshard,
)
from cupyflash.distributed.asked import Asked, PieceCalls
from cupyflash.distributed.communicator import as_communicator
from cupyflash.distributed.positions import NUMBERS, numbers_of_part, of_part
from cupyflash.distributed.threads import ThreadCommunicator
from cupyflash.distributed.varlen_calls import VarlenCalls
from cupyflash.distributed.varlen_plan import Cut, Packed, VarlenPlan
from cupyflash.dropout import KEY_GROUP, MOST_PAIRS, ROW_GROUP, Dropout
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.gradients import of_heads
from cupyflash.options import Band, Options
from cupyflash.schedules import plan_backward
from cupyflash.sim import replay, theory
from cupyflash.sim.inputs import Inputs
from cupyflash.sim.reference import masked_scores, reference, reference_gradients
from cupyflash.sim.yardstick import measure, measure_gradients
from suites import sweep

LAYOUTS = ("zigzag", "contiguous")
A100 = Device.named("A100-40GB")


def arrays(n_q: int, n_k: int, d: int = 16, heads: int = 2, dtype: Any = np.float16, seed: int = 0) -> list[np.ndarray]:
    """q, k, v and dout, of one key head."""
    rng = np.random.default_rng(seed)
    shapes = [(heads, n_q, d), (1, n_k, d), (1, n_k, d), (heads, n_q, d)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def over_ranks(
    ranks: int, q: Any, k: Any, v: Any, dout: Any, *, layout: str = "zigzag", gather_kv: bool = False, **options: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """O, L, dQ, dK and dV of the whole, and the ranks' shares of dsinks."""
    alike = {"layout": layout, "gather_kv": gather_kv}

    def work(comm: ThreadCommunicator) -> tuple[list[Any], tuple[Any, ...]]:
        own = [shard(x, comm, layout) for x in (q, k, v)]
        forward = {name: value for name, value in options.items() if name != "deterministic"}
        out, lse = ring_attention(*own, comm, return_lse=True, **alike, **forward)
        made = ring_attention_backward(shard(dout, comm, layout), *own, out, lse, comm, **alike, **options)
        return [unshard(x, comm, layout, -1 if x is lse else -2) for x in (out, lse, *made[:3])], made[3:]

    results = threads(ranks, work)
    for whole, _ in results[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(whole, results[0][0], strict=True))
    return results[0][0], [share for _, shares in results for share in shares]


def plain_forward(calls: PieceCalls, piece: Any, q: Any, k: Any, v: Any) -> Any:
    given, options, _ = calls._of(piece, q, k, v)
    return reference(given["q"], given["k"], given["v"], causal=options.causal, window=options.window)


def plain_backward(calls: PieceCalls, piece: Any, rows: Any, k: Any, v: Any) -> Any:
    """From the whole's L and O, in float64."""
    given, options, _ = calls._of(piece, rows["q"], k, v)
    given |= calls._rows(piece, rows)
    inputs = Inputs(given["q"], given["k"], given["v"], Options(causal=options.causal, window=options.window))
    lse = np.where(np.isneginf(given["lse"]), 0, given["lse"])[..., None]
    P = np.exp(masked_scores(inputs).astype(np.float64) - lse)
    dP = given["dout"] @ np.swapaxes(given["v"], -1, -2)
    dS = P * (dP - (given["dout"] * given["out"]).sum(axis=-1, keepdims=True)) * inputs.problem.softmax_scale
    groups = (np.swapaxes(dS, -1, -2) @ given["q"], np.swapaxes(P, -1, -2) @ given["dout"])
    return dS @ given["k"], *(x.sum(axis=0, keepdims=True) for x in groups)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces in NumPy's float64, which nothing has to be compiled for: what is tested is the ring."""
    monkeypatch.setattr(PieceCalls, "forward", plain_forward)
    monkeypatch.setattr(PieceCalls, "backward", plain_backward)
    for name in ("prepare_forward", "prepare_backward"):
        monkeypatch.setattr(PieceCalls, name, lambda *arguments: None)


side = st.none() | st.integers(0, 20) | st.integers(0, 300)


@sweep(
    12,
    100,
    ranks=st.integers(1, 9),
    n_q=st.integers(0, 330),
    n_k=st.none() | st.integers(0, 330),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    window=st.none() | st.tuples(side, side),
    gather=st.booleans(),
)
def test_any_ring(
    ranks: int, n_q: int, n_k: int | None, layout: str, causal: bool, window: Any, gather: bool, plainly: None
) -> None:
    """The whole is one device's to float32's rounding: ranks that do not divide, empty parts, windows that end the ring."""
    q, k, v, dout = arrays(n_q, n_q if n_k is None else n_k, d=4, dtype=np.float32)
    options = {"causal": causal, "window": window}
    (out, lse, *made), _ = over_ranks(ranks, q, k, v, dout, layout=layout, gather_kv=gather, **options)
    expected = reference(q, k, v, **options)
    assert np.allclose(out, expected[0], atol=1e-5) and np.allclose(lse, expected[1], atol=1e-5)
    gradients = reference_gradients(dout, q, k, v, **options)
    for name, gradient in zip(("dQ", "dK", "dV"), made, strict=True):
        assert np.allclose(gradient, gradients[name], atol=3e-5), name


def check(ranks: int, given: list[np.ndarray], said: Any = None, **options: Any) -> None:
    """Numbers by the 2x rule against float64; `said` is what a mask function says, as an array."""
    asked = {name: value for name, value in options.items() if name not in ("layout", "gather_kv", "deterministic")}
    (out, lse, *made), shares = over_ranks(ranks, *given, **options)
    inputs = Inputs.of(*given[:3], **(asked | ({} if said is None else {"mask": said})))
    numbers = measure(out, lse, inputs)
    numbers |= measure_gradients(dict(zip(("dQ", "dK", "dV"), made, strict=True)), given[3], inputs)
    assert all(each.good for each in numbers.values()), numbers
    if "sinks" in options:
        expected = of_heads(reference_gradients(given[3], *given[:3], **asked)["dsinks"])
        # D is made of an O that was rounded to q's dtype twice: at most a unit of its last place off in each product
        assert np.allclose(sum(shares), expected, atol=2**-11 * np.abs(given[3] * out).sum())


SLOPES = np.array([0.1, 0.02], np.float32)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "n_q", "n_k", "options"),
    [
        (8, 150, 150, {"causal": True, "layout": "contiguous", "gather_kv": True, "sinks": np.array([0.5, -1], np.float32)}),
        (2, 64, 90, {"window": (40, 10), "dropout": 0.25, "seed": 11, "deterministic": True}),
    ],
)
def test_on_the_simulated_device(ranks: int, n_q: int, n_k: int, options: dict[str, Any]) -> None:
    check(ranks, arrays(n_q, n_k), **options)


@pytest.mark.wide
def test_functions_see_the_whole() -> None:
    ids = np.repeat([0, 1, 2], [30, 40, 10]).astype(np.int32)
    said = (ids[:, None] == ids) & np.tri(80, dtype=bool)
    mask = Mask("document[q] == document[k] and k <= q", document=ids)
    check(2, arrays(80, 80), said, mask=mask, alibi_slopes=SLOPES, softcap=4.0)


@sweep(20, 200, data=st.data())
def test_a_part_of_a_function_is_the_function_of_the_whole(data: st.DataObject) -> None:
    text = data.draw(
        st.sampled_from(
            ["s + q - k", "s + row * 2 + n_q", "where(q >= k, s, first_row)", "s + table[k] * n_k", "s + other[q, k % 5]", "s * 2"]
        )
    )
    values: dict[str, Any] = {"table": np.arange(60.0, dtype=np.float32), "other": np.arange(300).reshape(60, 5), "first_row": 9}
    own = {name: value for name, value in values.items() if name in text}
    form = Score(text, **own).form
    part, names = of_part(form)
    assert set(names.values()).isdisjoint(own) and {one.name for one in part.captured} == {*own, *names.values()}
    n_q, row, key = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    whole = {"b": 1, "h": 1, "kv_h": 1, "row": n_q, "k": 60}
    sizes = whole | {"row": max(0, n_q - row), "k": 60 - key}
    if not all(sizes.values()):
        return
    scores = np.random.default_rng(0).standard_normal((1, 1, n_q, 60))
    expected = evaluate(form.tree, positions(whole) | own | {"s": scores}, np.float64)
    numbers = numbers_of_part(names, row, key, n_q, 60)
    found = evaluate(part.tree, positions(sizes) | own | numbers | {"s": scores[..., row:, key:]}, np.float64)
    assert np.array_equal(*np.broadcast_arrays(found, np.broadcast_to(expected, scores.shape)[..., row:, key:]))
    assert names.keys() == set(re.findall(r"\w+", text)) & NUMBERS.keys()


# -- packed sequences ------------------------------------------------------------------------------------------------------------


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
    plan = VarlenPlan(of_rows, of_keys, data.draw(st.integers(1, 5)), layout, reach, gather)
    dropped = data.draw(st.sampled_from([None, Dropout(0.5, seed=3)]))
    asked = Asked(False, None, None, layout, gather, None, IN_PACKED, dropped)
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
    """What a mask does of a call's sequence of these lengths."""
    at = positions({"b": 1, "h": 1, "kv_h": 1, "row": n_q, "k": n_k})
    found = evaluate(form.tree, {**at, "b": at["b"] + sequence, **values})
    return np.broadcast_to(found, (1, 1, n_q, n_k))[0, 0]


def masked_in(calls: VarlenCalls, piece: Cut | Packed, rows: int, keys: int) -> np.ndarray:
    """What the mask of a piece's call says of the piece, which has nothing else to see."""
    if isinstance(piece, Packed):
        forms, numbers = calls._forms(piece)
        form = forms["mask"]
    else:
        q, k = (np.zeros((1, n, 1)) for n in (rows, keys))
        form, numbers = (calls._of(piece, q, k, k)[i] for i in (1, 2))
        form = form.mask_function
    values = {name.removeprefix("mask_"): number for name, number in numbers} | IN_PACKED.arrays
    if isinstance(piece, Cut):
        row, key = calls._ahead(piece)
        whole = says(form, values, 0, row + len(piece.rows), key + len(piece.keys))
        assert not whole[:row].any() and not whole[:, :key].any()
        return whole[row:, key:]
    said = np.zeros((len(piece.rows), len(piece.keys)), bool)
    for number, ((q, q_end), (k, k_end)) in enumerate(zip(pairwise(piece.cu_seqlens_q), pairwise(piece.cu_seqlens_k), strict=True)):
        said[q:q_end, k:k_end] = says(form, values, number, q_end - q, k_end - k)
    return said


def within(n_q: int, n_k: int, reach: Any) -> np.ndarray:
    """What rows see, aligned bottom-right."""
    behind = np.arange(n_k) - (np.arange(n_q) + n_k - n_q)[:, None]
    return (behind >= -(n_q + n_k if reach[0] is None else reach[0])) & (behind <= (n_q + n_k if reach[1] is None else reach[1]))


def said_of(piece: Cut | Packed, reach: Any) -> np.ndarray:
    if isinstance(piece, Cut):
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
    """As `attention_varlen`, held to the 2x rule elsewhere: sequences that are cut, whole ones, an empty one."""
    cu_seqlens = np.array([0, 20, 20, 75, 90, 128], np.int32)
    q, k, v, dout = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays(128, 128))
    expected = cupyflash.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, return_lse=True, **options)
    gradients = cupyflash.attention_varlen_backward(dout, q, k, v, *expected, cu_seqlens, cu_seqlens, **options)

    layout = how.get("layout", "zigzag")

    def work(comm: Any) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
        own = [shard(x, comm, layout, axis=0) for x in (q, k, v, dout)]
        found = ring_attention_varlen(*own[:3], cu_seqlens, cu_seqlens, comm, return_lse=True, **how, **options)
        made = ring_attention_varlen_backward(own[3], *own[:3], *found, cu_seqlens, cu_seqlens, comm, **how, **options)
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


# -- what ranks agree on ---------------------------------------------------------------------------------------------------------


def refusals(ranks: int, work: Callable[[Any], Any]) -> list[Exception]:
    """What each rank raises."""

    def caught(comm: Any) -> Exception:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as info:
            work(comm)
        return info.value

    return threads(ranks, caught)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "causal must be the same on all 3 ranks, got False on ranks 0 and 2; True on rank 1"),
        ({"scale": 0.5}, "scale must be the same on all 3 ranks, got None on ranks 0 and 2; 0.5 on rank 1"),
        ({"softcap": 3.0}, "score must be the same on all 3 ranks"),
        ({"dropout": 0.1, "seed": 3}, "dropout must be the same on all 3 ranks"),
        ({"gather_kv": True}, "gather_kv must be the same on all 3 ranks"),
        ({"layout": "contiguous"}, "layout must be the same on all 3 ranks, got zigzag on ranks 0 and 2; contiguous on rank 1"),
        ({"sinks": np.zeros(2, np.float32)}, "sinks must be the same on all 3 ranks, got none on ranks 0 and 2; float32"),
        ({"layout": "spiral"}, "layout must be one of zigzag, contiguous, got 'spiral'"),
        ({"mask": np.ones((32, 96), bool)}, "mask must be a cupyflash.Mask or None over ranks, got ndarray"),
        ({"window": (-1, 3)}, "window must be .left, right. of at least 0"),
        ({"dropout": 0.1}, "dropout needs a seed"),
    ],
)
def test_what_differs_on_a_rank_is_refused_on_all(change: dict[str, Any], message: str) -> None:
    q, k, v, _ = arrays(96, 96)

    def work(comm: Any) -> None:
        ring_attention(*(shard(x, comm) for x in (q, k, v)), comm, **(change if comm.rank == 1 else {}))

    found = refusals(3, work)
    for rank, error in enumerate(found):
        assert isinstance(error, ValueError | TypeError)
        with pytest.raises(type(error), match=message):
            raise error
        own = "must be the same" in message or rank == 1
        assert own or str(error).startswith("rank 1 cannot take part: "), error


@pytest.mark.wide
@pytest.mark.parametrize("d", [16, 300])
def test_the_gradient_of_a_sum_and_wide_heads(d: int) -> None:
    """A dout that is broadcast, which kernels cannot read as it is."""
    q = np.random.default_rng(0).standard_normal((2, 64, d)).astype(np.float16)

    def work(comm: ThreadCommunicator) -> list[np.ndarray]:
        own = [shard(q, comm)] * 3
        out, pullback = ring_attention_vjp(*own, comm)
        return [unshard(x, comm) for x in pullback(np.broadcast_to(np.float16(1), out.shape))]

    out, pullback = cupyflash.attention_vjp(q, q, q)
    for found, expected in zip(threads(2, work)[0], pullback(np.ones_like(out)), strict=True):
        assert np.abs(found.astype(np.float64) - expected).max() < 8e-3



def test_arrays_that_do_not_go_together_are_refused_on_all() -> None:
    q, k, v, dout = arrays(96, 96)

    def call(changed: Callable[[Any, list[Any]], list[Any]]) -> list[Exception]:
        return refusals(2, lambda comm: ring_attention(*changed(comm, [shard(x, comm) for x in (q, k, v)]), comm))

    found = call(lambda comm, own: [x.astype(np.float32) for x in own] if comm.rank else own)
    assert {str(each) for each in found} == {
        "q must be the same on all 2 ranks, got float16 (2, n, 16) on rank 0; float32 (2, n, 16) on rank 1"
    }
    found = call(lambda comm, own: [own[0][:, :-1], *own[1:]] if comm.rank else own)
    assert "q must be cut as layout 'zigzag' does" in str(found[0]) and str(found[0]) == str(found[1])
    found = call(lambda comm, own: [own[0], own[1][..., :8], own[2]] if comm.rank else own)
    own = "k must have q's head dimension 16, got shape (1, 64, 8)"
    assert [str(each) for each in found] == [f"rank 1 cannot take part: ValueError: {own}", own]
    slopes = Score("s + table[k]", table=np.zeros(32, np.float32))  # of a part, where the whole's is wanted
    for error in refusals(2, lambda comm: ring_attention(*(shard(x, comm) for x in (q, k, v)), comm, score=slopes)):
        with pytest.raises(ValueError, match="table must have length 96 along axis 0"):
            raise error
    ring = refusals(2, lambda comm: (ring_attention if comm.rank else lambda *a: unshard(a[0], comm))(q, k, v, comm))
    assert all("the call must be the same" in str(each) for each in ring)
    lse = np.zeros((2, 5), np.float32)
    alone = refusals(1, lambda comm: ring_attention_backward(dout, q, k, v, q, lse, comm))[0]
    assert "lse must have shape (2, 96)" in str(alone)
    with pytest.raises(TypeError, match=r"comm must be an mpi4py.MPI.Comm .pip install 'cupyflash\[mpi\]'."):
        ring_attention(q, k, v, None)


# -- faults ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_a_rank_that_fails_in_the_middle(plainly: None, monkeypatch: pytest.MonkeyPatch, backward: bool, gather: bool) -> None:
    """It raises its own error, the others one that names it; all have passed on what they had to."""
    q, k, v, dout = arrays(256, 256, d=4)
    pieces = {"forward": plain_forward, "backward": plain_backward}
    name = "backward" if backward else "forward"

    def fails(calls: PieceCalls, piece: Any, *given: Any) -> Any:
        if piece.row >= 96 and piece.row < 128:  # rows that rank 3 alone holds
            raise MemoryError("nothing left")
        return pieces[name](calls, piece, *given)

    def work(comm: Any) -> Any:
        own = [shard(x, comm, "contiguous") for x in (q, k, v)]
        _, pullback = ring_attention_vjp(*own, comm, layout="contiguous", gather_kv=gather)
        return pullback(shard(dout, comm, "contiguous"))

    def caught(comm: Any) -> Any:
        with pytest.raises((MemoryError, RankFailed)) as info:
            work(comm)
        return type(info.value), str(info.value)

    threads(8, work)
    monkeypatch.setattr(PieceCalls, name, fails)
    failed = (RankFailed, "rank 3 failed: MemoryError: nothing left")
    assert threads(8, caught) == [failed] * 3 + [(MemoryError, "nothing left")] + [failed] * 4


def test_a_late_rank_and_one_that_leaves(plainly: None) -> None:
    q, k, v, _ = arrays(64, 64, d=4)

    def late(comm: Any) -> np.ndarray:
        time.sleep(0.1 * (comm.rank == 1))
        return unshard(ring_attention(*(shard(x, comm) for x in (q, k, v)), comm), comm)

    assert all(np.allclose(out, reference(q, k, v)[0], atol=2e-3) for out in threads(2, late))

    def leaves(comm: Any) -> Any:
        if comm.rank == 1:
            raise KeyError("gone")
        return ring_attention(*(shard(x, comm) for x in (q, k, v)), comm)

    with pytest.raises(KeyError, match="gone"):
        threads(2, leaves)
    with pytest.raises(RankFailed, match="rank 1 failed: it has returned"):
        threads(2, lambda comm: None if comm.rank else comm.gather(b""))


# -- transports and layouts ------------------------------------------------------------------------------------------------------


def test_messages_of_threads() -> None:
    """Several under way at once, waited for in another order, empty ones among them; arrays of any type."""

    def work(comm: Any) -> list[Any]:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = [np.full(3, comm.rank, np.int64), np.full((0, 2), 1.0), np.full((2, 2), comm.rank, np.float16)]
        came = [np.zeros_like(x) for x in sent]
        first = comm.exchange(sent, right, came, left)
        second_came = [np.zeros(1)]
        second = comm.exchange([np.array([10.0 + comm.rank])], left, second_came, right)
        second.wait()
        first.wait()
        assert comm.gather(bytes([comm.rank])) == [bytes([rank]) for rank in range(comm.size)]
        return [int(came[0][0]), float(came[2][1, 1]), float(second_came[0][0])]

    assert threads(4, work) == [[(r - 1) % 4, float((r - 1) % 4), 10.0 + (r + 1) % 4] for r in range(4)]
    assert threads(2, lambda comm: as_communicator(comm) is comm) == [True, True]
    with cupyflash.simulated_device("H100-SXM"):
        assert threads(2, lambda comm: cupyflash.simulated.current_simulation().device.name) == ["H100-SXM"] * 2


@sweep(10, 50, length=st.integers(0, 300), ranks=st.integers(1, 9), layout=st.sampled_from(LAYOUTS), axis=st.integers(-2, 1))
def test_unshard_is_shards_inverse(length: int, ranks: int, layout: str, axis: int) -> None:
    x = np.arange(length * 3, dtype=np.int32).reshape((length, 3) if axis % 2 == 0 else (3, length))
    own = threads(ranks, lambda comm: (shard(x, comm, layout, axis), unshard(shard(x, comm, layout, axis), comm, layout, axis)))
    assert [part.shape[axis] for part, _ in own] == [sum(map(len, part)) for part in parts(length, ranks, layout)]
    assert all(np.array_equal(whole, x) for _, whole in own)
    with pytest.raises(ValueError, match="axis must be between -2 and 1"):
        threads(1, lambda comm: shard(x, comm, layout, 2))


def test_a_band_is_for_parts_only() -> None:
    """A window of a user's has no negative sides; that of a piece may, and must not be empty."""
    assert Options(window=Band(-3, 5)).window == (-3, 5) and Options(window=Band(None, 0)).causal
    with pytest.raises(ValueError, match="left \\+ right of at least 0"):
        Options(window=Band(-3, 2))
    with pytest.raises(ValueError, match="window must be"):
        Options(window=(-3, 5))


@sweep(15, 200, data=st.data())
def test_bands_are_counted(data: st.DataObject) -> None:
    """Closed forms and schedules agree where rows see nothing at either end, and the last one not the last key."""
    left, right = data.draw(st.tuples(*[st.none() | st.integers(-150, 150)] * 2))
    if left is not None and right is not None and left + right < 0:
        left, right = -right, -left
    lengths = {"padded": True, "key_lengths": (data.draw(st.integers(0, 50)),)} if data.draw(st.booleans()) else {}
    n_q, n_k = data.draw(st.integers(1, 200)), data.draw(st.integers(50, 200))
    problem = Problem(1, 2, 1, n_q, n_k, 16, "float16", window=Band(left, right), **lengths)
    for algorithm in ("fa1", "fa2", "standard"):
        for schedule in (plan(problem, A100, algorithm), plan_backward(problem, A100, algorithm)):
            assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
