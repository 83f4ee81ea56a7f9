"""Packed sequences: each is attention of its own, and the bytes are the sum."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import lines
import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cupyflash import Device, Problem
from cupyflash.request.dropout import Dropout
from cupyflash.request.options import Options
from cupyflash.request.score import Score
from cupyflash.schedules import VarlenSchedule, plan, plan_varlen, plan_varlen_backward
from cupyflash.sim import execute_varlen, execute_varlen_backward, replay, theory
from cupyflash.sim.execution import Execution
from cupyflash.sim.numbers.inputs import NOTHING, Inputs
from cupyflash.sim.numbers.yardstick import DTYPES, draw_score, measure
from suites import sample, sweep, wide

A100 = Device.named("A100-40GB")
Seqlens = tuple[tuple[int, int], ...]


def bounds(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths], dtype=np.int32)


def packed(seqlens: Seqlens, heads: int, kv_heads: int, d: int, d_v: int, dtype: str = "float16", seed: int = 0) -> Any:
    """q, k and v of shape (total, h, d), V away from zero, and the two arrays of bounds."""
    rng = np.random.default_rng(seed)
    cu_q, cu_k = bounds([n for n, _ in seqlens]), bounds([n for _, n in seqlens])
    shapes = ((cu_q[-1], heads, d), (cu_k[-1], kv_heads, d), (cu_k[-1], kv_heads, d_v))
    q, k, v = ((rng.standard_normal(shape) + (shape is shapes[2])).astype(np.float32).astype(DTYPES[dtype]) for shape in shapes)
    return q, k, v, cu_q, cu_k


def dropout_of(options: Options, number: int = 0) -> Dropout | None:
    """The dropped weights of a sequence of a problem with dropout."""
    return Dropout(0.25, 2**40, 1, (number, 0, 0, 0)) if options.dropout else None


def check_sequences(
    out: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seqlens: Seqlens,
    options: Options = NOTHING,
    score: Score | None = None,
) -> None:
    """The 2x rule for each sequence on its own."""
    first_q = first_k = 0
    for b, (n_q, n_k) in enumerate(seqlens):
        rows, cols = slice(first_q, first_q + n_q), slice(first_k, first_k + n_k)
        heads_first = (array.swapaxes(0, 1) for array in (q[rows], k[cols], v[cols]))
        inputs = Inputs(*heads_first, options, score=score, sequence=b, dropout=dropout_of(options, b))
        numbers = measure(out[rows].swapaxes(0, 1), None if lse is None else lse[:, rows], inputs)
        assert all(each.good for each in numbers.values()), numbers
        first_q, first_k = first_q + n_q, first_k + n_k


def check_packed(schedule: VarlenSchedule, data_seed: int = 0, seed: int | None = None) -> Execution:
    """All that must hold of one execution."""
    p, seqlens = schedule.problem, schedule.seqlens
    assert seqlens is not None
    q, k, v, _, _ = packed(seqlens, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.dtype, data_seed)
    score = draw_score(p, data_seed)
    execution = execute_varlen(schedule, q, k, v, seed=seed, score=score, dropout=dropout_of(p.options))
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic
    check_sequences(execution.out, execution.lse, q, k, v, seqlens, replace(p.options, packed=False), score)
    return execution


@st.composite
def any_schedule(draw: st.DrawFn, dtype: str) -> VarlenSchedule:
    """Up to five sequences of nothing to 100 queries and keys, grouped heads, any d and d_v."""
    lengths = st.integers(0, 100) | st.sampled_from([0, 1, 16, 64])
    seqlens = tuple(draw(st.lists(st.tuples(lengths, lengths), max_size=5)))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
    d, d_v = draw(st.sampled_from([(16, None), (64, None), (128, None), (40, 33), (64, 96)]))
    longest_q, longest_k = (max((each[side] for each in seqlens), default=0) + draw(st.sampled_from([0, 0, 70])) for side in (0, 1))
    size = 4 if dtype == "float32" else 2
    bits = d * size | (d_v or d) * size | 16
    problem = Problem(
        len(seqlens),
        heads,
        kv_heads,
        longest_q,
        longest_k,
        d,
        dtype,
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.2])),
        head_dim_v=d_v,
        alignment=bits & -bits,
        score=draw(lines.some),
    )
    tiling = draw(st.sampled_from([None, (16, 16), (48, 32)]))
    device = draw(st.sampled_from([A100, A100.with_sram("64KB")]))
    return plan_varlen(problem, device, seqlens, tiling, lse=draw(st.booleans()))


@pytest.mark.parametrize("dtype", [wide("float16"), "bfloat16", wide("float32")])
@sweep(1, 6)
def test_random_batches(dtype: str, data: st.DataObject) -> None:
    check_packed(data.draw(any_schedule(dtype)), data.draw(st.integers(0, 99)), data.draw(st.sampled_from([None, None, 7])))


UNEVEN: Seqlens = ((5, 17), (130, 100), (0, 9), (70, 0), (0, 0), (33, 90))


@pytest.mark.parametrize(
    ("causal", "device"),
    sample(product([False, True], ["T4", "A100-40GB", "H100-SXM", "RTX 4090"]), [(True, "T4")]),
)
def test_every_generation(device: str, causal: bool) -> None:
    check_packed(plan_varlen(Problem(6, 2, 1, 130, 100, 64, "float16", causal=causal), Device.named(device), UNEVEN, lse=True))


@pytest.mark.parametrize("dtype", [wide("float16"), wide("float32")])
def test_heads_that_take_half_of_the_registers(dtype: str) -> None:
    check_packed(plan_varlen(Problem(3, 1, 1, 20, 40, 256, dtype, causal=True), A100, ((5, 17), (20, 40), (0, 9)), lse=True))


@pytest.mark.wide
def test_every_schedule_seed_gives_the_same_bits() -> None:
    schedule = plan_varlen(Problem(6, 2, 1, 130, 100, 64, "float16", causal=True), A100, UNEVEN, (64, 32), lse=True)
    first = check_packed(schedule)
    for seed in range(3):
        again = check_packed(schedule, seed=seed)
        assert again.out.tobytes() == first.out.tobytes() and again.traffic == first.traffic
        assert again.lse is not None and first.lse is not None and again.lse.tobytes() == first.lse.tobytes()


def test_a_batch_of_equal_lengths_moves_what_the_padded_batch_moves_and_its_bounds() -> None:
    """Also where the host does not know the lengths: counts are then of full length."""
    problem = Problem(3, 4, 2, 100, 70, 64, "float16", causal=True)
    fixed = theory.traffic(plan(problem, A100, "fa2", (64, 32), lse=True))
    for seqlens in (((100, 70),) * 3, None):
        schedule = plan_varlen(problem, A100, seqlens, (64, 32), lse=True)
        moved = theory.traffic(schedule)
        assert moved == replay(schedule)
        assert {name: moved[name] for name in fixed} == dict(fixed)
        # A head has 300 // 64 + 3 thread blocks, of which each looks at 32 bounds and reads two of both tensors.
        assert (moved["cu_seqlens_q"].read_bytes, moved["cu_seqlens_k"].read_bytes) == (4 * 7 * 34 * 4, 4 * 7 * 2 * 4)
        assert moved.total_bytes == fixed.total_bytes + 4 * 7 * 36 * 4


@pytest.mark.parametrize("longest", [None, wide(130), 200])
def test_the_call(longest: int | None) -> None:
    q, k, v, cu_q, cu_k = packed(UNEVEN, 4, 2, 64, 48)
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, longest, longest, causal=True, return_lse=True)
    assert out.shape == (238, 4, 48) and out.dtype == q.dtype and lse.shape == (4, 238) and lse.dtype == np.float32
    check_sequences(out, lse, q, k, v, UNEVEN, Options(causal=True))
    assert (out[135:205] == 0).all() and np.isneginf(lse[:, 135:205]).all()  # no keys


@pytest.mark.wide
def test_any_strides_and_a_given_out() -> None:
    """Heads first in memory, and rows that are part of wider ones: q, k and v as slices of one array."""
    q, k, v, cu_q, cu_k = packed(UNEVEN, 2, 2, 32, 32)
    turned = np.ascontiguousarray(q.swapaxes(0, 1)).swapaxes(0, 1)
    both = np.concatenate([k, v], axis=-1)
    room = np.full((238, 2, 40), 7, np.float16)
    out = room[..., 3:35]
    assert cupyflash.attention_varlen(turned, both[..., :32], both[..., 32:], cu_q[::1], cu_k, out=out) is out
    check_sequences(out, None, q, k, v, UNEVEN)
    assert (room[..., :3] == 7).all() and (room[..., 35:] == 7).all()
    strided, plain = np.stack([cu_q, cu_q], axis=1)[:, 0], cupyflash.attention_varlen(q, k, v, cu_q, cu_k)
    assert np.array_equal(cupyflash.attention_varlen(q, k, v, strided, cu_k), plain)
    assert np.array_equal(cupyflash.attention_varlen(q, k, v, cu_q.tolist(), tuple(cu_k.tolist())), plain)


def test_nothing_to_do() -> None:
    q, k, v, cu_q, cu_k = packed((), 2, 2, 16, 16)
    assert cupyflash.attention_varlen(q, k, v, cu_q, cu_k).shape == (0, 2, 16)
    q, k, v, cu_q, cu_k = packed(((0, 5), (0, 0)), 2, 2, 16, 16)
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)


@pytest.mark.wide
def test_warmup_leaves_nothing_to_compile() -> None:
    q, k, v, cu_q, cu_k = packed(((24, 24), (3, 5)), 2, 2, 56, 56)
    cupyflash.warmup(head_dim=56, varlen=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyflash.launch.compiler.compile_to_ptx", lambda *_: pytest.fail("something was compiled"))
        cupyflash.attention_varlen(q, k, v, cu_q, cu_k)


q, k, v, cu_q, cu_k = packed(((10, 20), (30, 5)), 4, 2, 64, 64)
READ_ONLY = np.zeros_like(q)
READ_ONLY.flags.writeable = False


def wrong(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


BAD: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"cu_seqlens_q": wrong(1, 10, 40)}, ValueError, r"cu_seqlens_q must begin with 0, .* got \[1, 10, 40\]"),
    ({"cu_seqlens_q": wrong(0, 41, 40)}, ValueError, "cu_seqlens_q must begin with 0, not decrease"),
    ({"cu_seqlens_q": wrong(0, 10, 39)}, ValueError, "end with 40, the length of q"),
    ({"cu_seqlens_k": wrong(0, 20, 26)}, ValueError, "cu_seqlens_k must .* end with 25, the length of k"),
    ({"cu_seqlens_k": wrong(0, 25)}, ValueError, "cu_seqlens_k must have cu_seqlens_q's shape"),
    ({"cu_seqlens_q": wrong(), "cu_seqlens_k": wrong()}, ValueError, "a bound more than there are sequences"),
    ({"cu_seqlens_q": cu_q[None]}, ValueError, "cu_seqlens_q must have shape"),
    ({"cu_seqlens_k": cu_k.astype(np.float32)}, TypeError, "cu_seqlens_k must be of an integer dtype, got float32"),
    ({"cu_seqlens_q": [0, 10.0, 40]}, TypeError, "cu_seqlens_q must be integers, got 10.0"),
    ({"cu_seqlens_q": [0, True, 40]}, TypeError, "cu_seqlens_q must be integers, got True"),
    ({"cu_seqlens_q": [0, 2**31, 40]}, ValueError, "cu_seqlens_q must fit 32 bits, got 2147483648"),
    ({"cu_seqlens_q": [0, 10, 41]}, ValueError, "end with 40, the length of q"),
    ({"cu_seqlens_q": [[0, 10, 40]]}, TypeError, "cu_seqlens_q must be integers"),
    ({"cu_seqlens_q": 40}, TypeError, "cu_seqlens_q must be a NumPy or CuPy array, or a list or tuple of integers, got int"),
    ({"max_seqlen_q": 29}, ValueError, "max_seqlen_q must be at least the longest sequence's 30, got 29"),
    ({"max_seqlen_k": 19}, ValueError, "max_seqlen_k must be at least the longest sequence's 20"),
    ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be between 0 and"),
    ({"max_seqlen_k": 2**31}, ValueError, "max_seqlen_k must be between 0 and"),
    ({"max_seqlen_q": 30.0}, TypeError, "max_seqlen_q must be an integer"),
    ({"max_seqlen_q": True}, TypeError, "max_seqlen_q must be an integer"),
    ({"q": q[0]}, ValueError, r"q must be \(total, h, d\)"),
    ({"v": v[None]}, ValueError, r"v must be \(total, h, d\)"),
    ({"k": k[..., :32]}, ValueError, r"k must have q's head dimension 64, got shape \(25, 2, 32\)"),
    ({"v": v[:, :1]}, ValueError, r"v must have k's shape \(25, 2, 64\) but for the last axis"),
    ({"q": q[:, :3]}, ValueError, "multiple of kv_heads"),
    ({"k": k.astype(np.float32)}, TypeError, "k must have q's dtype"),
    ({"q": q.astype(np.float64)}, TypeError, "float64"),
    ({"q": q[..., ::-1]}, ValueError, "q must be contiguous along its last axis"),
    ({"scale": np.inf}, ValueError, "scale must be 0 or of a magnitude from .* got inf"),
    ({"causal": 1}, TypeError, "causal must be True or False"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ({"tiling": (8, 8)}, ValueError, "steps of 16"),
    ({"out": q}, ValueError, "out must not overlap q"),
    ({"out": READ_ONLY}, ValueError, "out must be writeable"),
    ({"out": q[:, :2].copy()}, ValueError, r"out must have shape \(40, 4, 64\)"),
    ({"out": READ_ONLY.astype(np.float32)}, TypeError, "out must have q's dtype"),
]


@pytest.mark.parametrize(("changed", "error", "says"), BAD)
def test_wrong_input_is_refused_before_any_work(changed: dict[str, object], error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | changed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=says):
        patch.setattr("cupyflash.launch.compiler.compile_to_ptx", lambda *_: pytest.fail("something was compiled"))
        cupyflash.attention_varlen(**given)


def test_a_slow_call_is_refused() -> None:
    with cupyflash.simulated_device(max_seconds=1e-9), pytest.raises(RuntimeError, match="estimated"):
        cupyflash.attention_varlen(q, k, v, cu_q, cu_k)


def test_schedules_refuse_what_they_cannot_say() -> None:
    problem = Problem(2, 4, 2, 30, 20, 64, "float16")
    for seqlens in (((10, 20),), ((10, 20), (31, 5)), ((10, -1), (30, 5))):
        with pytest.raises(ValueError, match="seqlens must be 2 pairs of at most 30 queries and 20 keys"):
            plan_varlen(problem, A100, seqlens)
    with pytest.raises(ValueError, match="attention_varlen has no place for a mask of bool"):
        plan_varlen(problem.asking(mask=True), A100)
    with pytest.raises(ValueError, match="the lengths of its sequences"):
        execute_varlen(plan_varlen(problem, A100), q, k, v)
    with pytest.raises(ValueError, match="the arrays pose"):
        execute_varlen(plan_varlen(replace(problem.asking(causal=True), heads=2), A100, ((10, 20), (30, 5))), q, k, v)
    with pytest.raises(ValueError, match="algorithm must be one of auto, fa2, fa3 for varlen, got 'fa1'"):
        cupyflash.warmup(head_dim=64, varlen=True, algorithm="fa1")


@pytest.mark.parametrize("algorithm", ["fa2", "fa3"])
def test_unknown_lengths_count_as_full_whatever_the_totals(algorithm: str) -> None:
    """The totals decide how many thread blocks there are, and where boxes that are copied whole end."""
    problem, device = Problem(3, 2, 2, 300, 200, 64, "float16"), Device.named("H100-SXM")
    full, fewer = (plan_varlen(problem, device, totals=totals, algorithm=algorithm) for totals in (None, (350, 210)))
    assert fewer.kernels()[0].grid <= full.kernels()[0].grid
    assert theory.traffic(fewer) == replay(fewer)
    assert replay(fewer)["O"] == replay(full)["O"]


@pytest.mark.parametrize("d", [64, 128])
def test_a_sequence_s_gradients_are_counted_by_the_blocks_of_the_kernel(d: int) -> None:
    """The blocks that a schedule of that sequence alone would have do not matter."""
    problem = Problem(2, 1, 1, 160, 190, d, "float16", causal=True)
    schedule = plan_varlen_backward(problem, A100, ((160, 190), (90, 130)), deterministic=True)
    assert {one.by_rows.tiling for one in schedule.sequences()} == {schedule.by_rows.tiling}


@pytest.mark.wide
def test_deterministic_gradients_of_wide_heads_move_what_is_counted() -> None:
    """With keys that end, for each row block, within a K block of one size and not of another."""
    lengths, d = ((160, 190), (90, 130)), 128
    problem = Problem(2, 1, 1, 160, 190, d, "float16", causal=True)
    q, k, v, *_ = packed(lengths, 1, 1, d, d)
    schedule, lse = plan_varlen_backward(problem, A100, lengths, deterministic=True), np.full((1, len(q)), 5, np.float32)
    found = execute_varlen_backward(schedule, q, q, k, v, q, lse)
    assert theory.traffic(schedule) == replay(schedule) == found.traffic


@pytest.mark.wide
@pytest.mark.parametrize("window", [wide((5, 0)), (12, 3), wide((None, 2))])
def test_a_window_in_each_sequence(window: tuple[int | None, int | None]) -> None:
    """The result of each sequence by itself, to the bit with the same blocks."""
    rng = np.random.default_rng(1)
    lengths_q, lengths_k = (7, 0, 40), (20, 9, 40)
    q = rng.standard_normal((sum(lengths_q), 2, 32)).astype(np.float16)
    k, v = (rng.standard_normal((sum(lengths_k), 1, 32)).astype(np.float16) for _ in range(2))
    cu_q, cu_k = (np.cumsum([0, *lengths], dtype=np.int32) for lengths in (lengths_q, lengths_k))
    out = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, window=window, tiling=(16, 16))
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one = cupyflash.attention(
            *(np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q[rows], k[keys], v[keys])), window=window, tiling=(16, 16)
        )
        assert np.array_equal(out[rows], one.swapaxes(0, 1))
