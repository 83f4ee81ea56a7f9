"""The Hopper's gradients: numbers by the 2x rule, theory == replay == execution, no finding, whatever is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_magnitudes
import test_score_sums
from hypothesis import strategies as st
from test_backward_sparse import check_packed
from test_l2_calls import ALL

import cupyflash
from cupyflash import Device, Mask, Problem, Score
from cupyflash.request.options import BlockMask
from cupyflash.schedules import choose_backward, fa3_backward, plan_backward, plan_varlen_backward
from cupyflash.sim import l2, replay, theory
from cupyflash.sim.execution import execute_backward, execute_varlen_backward
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference, reference_gradients
from cupyflash.sim.numbers.yardstick import draw_gradient, measure_gradients
from cupyflash.sim.ptx.execute import ptx_machine
from cupyflash.sim.ptx.state.lane_sets import Geometry
from cupyflash.sim.verification import verify
from cupyflash.tiling import TileSize
from suites import MORE, sweep, wide
from yardstick import draw, draw_masks

H100, A100 = Device.named("H100-SXM"), Device.named("A100-40GB")


DOCUMENTS = Mask("doc[q] == doc[k]", doc=np.repeat(np.arange(9, dtype=np.int32), 30))
FUNCTIONS = (
    DOCUMENTS,
    Mask("q - k < 70 or k < 4"),
    Mask("k % 3 > 0 or w[h] > 0", w=np.ones(6, np.float32)),
    Mask("k <= q or k < n[b]", n=np.ones(4, np.int32)),
)
SCORES = (
    Score("30 * tanh(s / 30)"),
    Score("s - a[h] * abs(q - k)", a=np.linspace(0.1, 1, 6, dtype=np.float32)),
    Score("s * t[b, k] + u[row]", t=np.linspace(0.5, 1, 1200, dtype=np.float32).reshape(4, 300), u=np.ones(300, np.float16)),
)
OWN: tuple[dict[str, Any], ...] = (
    *({"score": each.form} for each in SCORES),
    {"score": SCORES[0].form, "dropout": True},
    {"score": SCORES[1].form, "mask_function": FUNCTIONS[2].form, "bias": True},
    *({}, {}, {"mask": True}, {"dropout": True}, {"bias": True}, {"mask": True, "bias": True, "dropout": True}),
    *({"mask_function": each.form} for each in FUNCTIONS),
    {"mask_function": FUNCTIONS[0].form, "dropout": True},
)


OF_SCORES = {"mask", "bias", "dropout", "mask_function", "score"}


@st.composite
def problems(draw_one: st.DrawFn) -> Problem:
    """Ragged both ways, with each option that the kernel has."""
    n_q, n_k = draw_one(st.integers(1, 270)), draw_one(st.integers(1, 270))
    d, d_v = (draw_one(st.sampled_from((8, 40, 64, 72, 96, 128, 136, 192, 256))) for _ in range(2))
    batch, kv_heads, group = draw_one(st.sampled_from(((1, 1, 1), (2, 1, 2), (1, 2, 3), (3, 1, 1))))
    window = draw_one(st.sampled_from((None, None, (50, 20), (0, 0), (None, 30))))
    asked: dict[str, Any] = {
        "causal": window is None and draw_one(st.booleans()),
        "window": window,
        "sinks": draw_one(st.booleans()),
    }
    if draw_one(st.booleans()):
        asked |= {"padded": True, "key_lengths": tuple(draw_one(st.integers(0, n_k)) for _ in range(batch))}
    asked |= draw_one(st.sampled_from(OWN))
    most = (
        (192 if len(asked.keys() & OF_SCORES) < 2 else 64)
        if "bias" in asked
        else 192
        if asked.keys() & {"score", "dropout"}
        else 256
    )
    d, d_v = min(d, most), min(d_v, most)
    dtype = draw_one(st.sampled_from(("float16", "bfloat16")))
    return Problem(batch, kv_heads * group, kv_heads, n_q, n_k, d, dtype, head_dim_v=d_v, **asked)


@sweep(2, 8)
def test_random_problems(data: st.DataObject) -> None:
    problem, deterministic = data.draw(problems()), data.draw(st.booleans())
    design = data.draw(st.sampled_from((None, *fa3_backward.designs(problem, deterministic))))
    schedule = plan_backward(problem, H100, "fa3", design, deterministic=deterministic)
    found = verify(schedule, seed=data.draw(st.sampled_from((None, 1, 2))), data_seed=data.draw(st.integers(0, 99)))
    assert found.good, (schedule.problem, design, found.differences, found.findings, found.wrong_tensors)


@sweep(1, 8)
def test_random_packed_sequences(data: st.DataObject) -> None:
    """Sequences may have any lengths, also none, and begin anywhere."""
    one = data.draw(problems()).asking(packed=True, padded=False, key_lengths=None, mask=False, bias=False, mask_function=None)
    one = one.asking(score=one.options.score and SCORES[0].form)  # without arrays, whose shapes sequences have not
    lengths = st.tuples(st.integers(0, one.seqlen_q), st.integers(0, one.seqlen_k))
    seqlens = (*data.draw(st.lists(lengths, max_size=3)), (1 + one.seqlen_q // 2, 1 + one.seqlen_k // 2))  # of none there is no map
    problem = replace(one, batch=len(seqlens)).asking(sinks=False)
    deterministic = data.draw(st.booleans())
    design = data.draw(st.sampled_from((None, *fa3_backward.designs(problem, deterministic))))
    schedule = plan_varlen_backward(problem, H100, seqlens, design, algorithm="fa3", deterministic=deterministic)
    check_packed(schedule, SCORES[0] if problem.options.score else None)
    behind = l2.run(schedule, l2=ALL)
    assert behind.asked == theory.traffic(schedule)


def test_packed_neighbours_may_hold_anything() -> None:
    """Rows and keys behind a sequence's last are another's, whose infinities it does not see; "auto" takes the kernel."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((150, 2, 64)).astype(np.float16) for _ in range(4))
    bounds = np.array([0, 21, 93, 150], np.int32)
    q[21:93], k[21:93], v[21:93], dout[21:93] = np.inf, np.nan, np.inf, np.nan
    with cupyflash.simulated_device(H100):
        out, lse = cupyflash.attention_varlen(q, k, v, bounds, bounds, 72, 72, causal=True, return_lse=True)
        options: dict[str, Any] = {"causal": True, "deterministic": True}
        made = cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, bounds, bounds, 72, 72, **options)
    for first, end in ((0, 21), (93, 150)):
        assert all(np.isfinite(each[first:end]).all() for each in made)
    problem = Problem(3, 2, 2, 72, 72, 64, "float16", causal=True, packed=True)
    schedule = plan_varlen_backward(problem, H100, ((21, 21), (72, 72), (57, 57)), algorithm="fa3", deterministic=True)
    same = execute_varlen_backward(schedule, dout, q, k, v, out, lse)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(made, (same.dq, same.dk, same.dv), strict=True))


def gradients(problem: Problem, deterministic: bool, seeds: Iterable[int | None]) -> set[tuple[bytes, ...]]:
    """dK's, dV's and, if that has one order, dQ's bits in each order of warps, without a finding."""
    q, k, v = draw(problem)
    dout = draw_gradient(problem)
    out, lse = reference(q, k, v, causal=problem.options.causal)
    schedule = plan_backward(problem, H100, "fa3", deterministic=deterministic)
    given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    runs = [execute_backward(schedule, *given, seed=seed) for seed in seeds]
    assert all(run.findings == () for run in runs)
    return {(run.dk.tobytes(), run.dv.tobytes(), *([run.dq.tobytes()] if deterministic else [])) for run in runs}


@pytest.mark.wide
@pytest.mark.parametrize(("d", "deterministic"), [(64, True), wide(128, True), wide(192, True), wide(256, True)])
def test_the_same_bits_in_every_order(d: int, deterministic: bool) -> None:
    """All that is not summed by additions in HBM, whose order is free, is the same whatever the order of warps."""
    wide_heads = d > 128  # whose warps poll the word of a row block's turn, which takes the machine long
    problem = Problem(1, 2, 1, 60 if wide_heads else 200, 130 if wide_heads else 520, d, "float16", causal=True)
    assert len(gradients(problem, deterministic, (None, *range(MORE if wide_heads else 4 * MORE)))) == 1


@pytest.mark.parametrize(("resident", "d"), [(1, 64), wide(3, 64), wide(2, 192)])
def test_no_deadlock_whatever_blocks_are_resident(resident: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread blocks that wait for others, when the GPU holds few of them at a time, in any order, a cluster's together: the same
    bits."""
    problem = Problem(1, 4, 2, 140, 390, d, "float16", causal=True) if d == 64 else Problem(1, 4, 2, 60, 200, d, "float16")
    everyone = gradients(problem, True, (None,))
    monkeypatch.setattr(ptx_machine, "COMMUNICATING_LANES", resident * 384)
    usual, blocks, cluster = Geometry.position, 2 * 4, 1 if d == 64 else 2
    for seed in range(MORE):
        clusters = np.random.default_rng(seed).permutation(blocks // cluster)
        order = (clusters[:, None] * cluster + np.arange(cluster)).ravel()

        def in_this_order(geometry: Geometry, block: Any, order: Any = order) -> Any:
            return usual(geometry, order[block] if geometry.blocks == blocks else block)

        monkeypatch.setattr(Geometry, "position", in_this_order)
        assert gradients(problem, True, (None,)) == everyone


@pytest.mark.parametrize(("dtype", "score"), [("float16", ""), wide("bfloat16", ""), wide("float16", "where(k < 7, s, s)")])
def test_scores_of_any_size(dtype: str, score: str) -> None:
    """From tiny ones to those of which float32 rounds L too far: rows are then relative to their own largest score; with a score
    function, too."""
    for powers in test_magnitudes.POWERS[dtype][:: 1 if dtype == "bfloat16" else 3]:
        (q, k, v, dout), options = test_magnitudes.pose(dtype, *powers, "causal", 60)
        options |= {"score": Score(score)} if score else {}
        out, lse = reference(q, k, v, **options)
        with cupyflash.simulated_device(H100):
            made = cupyflash.attention_backward(
                dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), algorithm="fa3", **options
            )
        numbers = measure_gradients(dict(zip(("dQ", "dK", "dV"), made, strict=True)), dout, Inputs.of(q, k, v, **options))
        assert all(each.good for each in numbers.values()), (powers, numbers)


def test_keys_and_rows_that_are_not_there_may_hold_anything() -> None:
    """Infinities behind the last key of a batch, and rows that see no key."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, 1, n, 64)).astype(np.float16) for n in (150, 140, 140, 150))
    lengths = np.array([100, 0], np.int32)
    out, lse = reference(q, k, v, key_lengths=lengths)
    k[0, :, 100:], v[0, :, 100:] = np.inf, np.nan
    with cupyflash.simulated_device(H100):
        dq, dk, dv = cupyflash.attention_backward(
            dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), key_lengths=lengths, algorithm="fa3"
        )
    assert all(np.isfinite(each).all() for each in (dq, dk, dv))
    assert not dk[0, :, 100:].any() and not dv[0, :, 100:].any() and not dk[1].any() and not dq[1].any()


@pytest.mark.wide
@pytest.mark.parametrize("shape", [(2, 3, 140, 150), (140, 150), (3, 1, 150)])
def test_the_gradient_of_a_bias(shape: tuple[int, ...]) -> None:
    """In the bias's own shape, of float32, beside the gradients that there are without it."""
    problem = Problem(2, 3, 3, 140, 150, 64, "float16", causal=True)
    (q, k, v), dout = draw(problem), draw_gradient(problem)
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float16)
    with cupyflash.simulated_device(H100):
        out, lse = cupyflash.attention(q, k, v, causal=True, bias=bias, return_lse=True)
        made = cupyflash.attention_backward(
            dout, q, k, v, out, lse, causal=True, bias=bias, return_dbias=True, algorithm="fa3", deterministic=shape[0] == 2
        )
    expected = reference_gradients(dout, q, k, v, causal=True, bias=bias)["dbias"].sum(axis=tuple(range(4 - len(shape))))
    expected = expected.sum(axis=tuple(n for n, length in enumerate(shape) if length == 1), keepdims=True)
    assert made[3].shape == shape and np.allclose(made[3], expected, rtol=4e-3, atol=4e-3)
    numbers = measure_gradients(
        dict(zip(("dQ", "dK", "dV"), made[:3], strict=True)), dout, Inputs.of(q, k, v, causal=True, bias=bias)
    )
    assert all(each.good for each in numbers.values())


@pytest.mark.wide
def test_a_bias_gradients_bytes() -> None:
    problem = Problem(2, 4, 2, 140, 190, 32, "float16", causal=True, bias=True)
    schedule = plan_backward(problem, H100, "fa3", dbias=True)
    (q, k, v), masks, dout = draw(problem), draw_masks(problem), draw_gradient(problem)
    out, lse = reference(q, k, v, causal=True, **masks)
    dbias = np.zeros((2, 4, 140, 190), np.float32)
    found = execute_backward(schedule, dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), **masks, dbias=dbias)
    assert theory.traffic(schedule) == replay(schedule) == found.traffic and found.findings == ()


@pytest.mark.wide
@pytest.mark.parametrize("d", [40, 128, 192])
def test_a_score_functions_gradients(d: int) -> None:
    """Those of captured arrays beside dQ, dK and dV, by fa2's numbers; with a bias, whose gradient is without the derivative."""
    score, asked = SCORES[1], {"causal": True, "algorithm": "fa3", "return_dscore": True}
    (q, k, v), dout = (
        draw(problem := Problem(1, 6, 2, 70, 150, d, "float16")),
        draw_gradient(Problem(1, 6, 2, 70, 150, d, "float16")),
    )
    beside: dict[str, Any] = {"score": score}
    if d <= 64:
        beside |= {"bias": np.random.default_rng(1).standard_normal((70, 150)).astype(np.float16), "return_dbias": True}
    with cupyflash.simulated_device(H100):
        given = {name: each for name, each in beside.items() if name != "return_dbias"}
        out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True, **given)
        made, as_fa2 = (
            cupyflash.attention_backward(dout, q, k, v, out, lse, **asked | {"algorithm": name}, **beside)
            for name in ("fa3", "fa2")
        )
    for ours, theirs in zip(made[:-1], as_fa2[:-1], strict=True):
        np.testing.assert_allclose(ours.astype("f"), theirs.astype("f"), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(made[-1]["a"], as_fa2[-1]["a"], rtol=1e-3, atol=1e-3)
    numbers = measure_gradients(
        dict(zip(("dQ", "dK", "dV"), made[:3], strict=True)), dout, Inputs.of(q, k, v, causal=True, **given)
    )
    assert all(each.good for each in numbers.values()), problem


@pytest.mark.wide
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_bytes_of_captured_arrays_gradients(deterministic: bool) -> None:
    problem = Problem(1, 6, 2, 70, 150, 72, "float16", causal=True, score=SCORES[1].form)
    schedule = plan_backward(problem, H100, "fa3", deterministic=deterministic, dscore=("a",))
    assert test_score_sums.check(schedule, SCORES[1])["dscore_a"].all()


@pytest.mark.wide
def test_tiles_that_a_mask_leaves_empty_are_left_out() -> None:
    """A mask of documents by tiles: of Q and dO only the blocks of the keys' own documents are read."""
    mask = np.zeros((256, 256), bool)
    for first in (0, 128):
        mask[first : first + 128, first : first + 128] = True
    problem = Problem(1, 1, 1, 256, 256, 128, "float16", mask=True)
    (q, k, v), dout = draw(problem), draw_gradient(problem)
    out, lse = reference(q, k, v, mask=mask)
    given = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    schedule = plan_backward(Problem.from_arrays(q, k, v, mask=mask), H100, "fa3")
    found = execute_backward(schedule, *given, mask=mask)
    whole = execute_backward(plan_backward(problem.asking(mask=False), H100, "fa3"), *given)
    assert found.findings == () and found.traffic == theory.traffic(schedule)
    assert found.traffic["Q"].read_bytes * 2 == whole.traffic["Q"].read_bytes
    assert found.traffic["mask"].read_bytes == mask.size, "once, to find the tiles, of which none is mixed"


@pytest.mark.parametrize("d", [64, wide(128), wide(192), wide(256)])
def test_no_bank_conflicts(d: int) -> None:
    problem = Problem(1, 1, 1, 130, 140, d, "float16")
    q, k, v = draw(problem)
    out, lse = reference(q, k, v)
    found = execute_backward(
        plan_backward(problem, H100, "fa3"), draw_gradient(problem), q, k, v, out.astype(q.dtype), lse.astype("f")
    )
    counters = found.counters["fa3_backward"]
    kinds = {kind for kind, _ in counters.shared}
    assert {kind: counters.shared_kind(kind).conflicts for kind in kinds} == dict.fromkeys(kinds, 0)
    assert {"stmatrix", "st", "ld", "wgmma"} <= kinds


def test_auto_takes_it_where_it_runs() -> None:
    plain = Problem(2, 4, 2, 300, 300, 128, "bfloat16")
    assert choose_backward(plain, H100).algorithm == choose_backward(plain.asking(causal=True), H100).algorithm == "fa3"
    assert choose_backward(plain, H100, (64, 64)).algorithm == choose_backward(plain, A100).algorithm == "fa2"
    assert choose_backward(plain, H100.with_sram("100KB")).reason.startswith("fa3's backward needs 198,")
    assert choose_backward(plain, H100, refused="a stride").reason == "fa3's backward does not run this: a stride"
    wider = Problem(1, 1, 1, 64, 64, 264, "float16")
    for others in (wider, plain.asking(bias=True, mask=True), Problem(1, 1, 1, 64, 64, 64, "float32")):
        assert choose_backward(others, H100).algorithm == "fa2"
    assert choose_backward(wider, H100).reason.endswith("the kernel takes d and d_v up to 256, and this has 264")
    for asked in ({"mask": True}, {"dropout": True}, {"mask_function": DOCUMENTS.form}, {"score": SCORES[1].form}, {"bias": True}):
        assert choose_backward(plain.asking(**asked), H100).algorithm == "fa3"
    narrow = Problem(2, 4, 2, 300, 300, 64, "float16", dropout=True)
    assert choose_backward(narrow, H100).reason.startswith("with dropout and heads of up to 64 the clock has fa3 5 % faster")


def test_a_call_by_auto_is_that_of_fa3() -> None:
    problem = Problem(1, 2, 1, 70, 90, 64, "float16")
    q, k, v = draw(problem)
    dout = draw_gradient(problem)
    with cupyflash.simulated_device(H100):
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        by = {
            name: cupyflash.attention_backward(dout, q, k, v, out, lse, algorithm=name, deterministic=True)
            for name in ("auto", "fa3")
        }
        assert [each.tobytes() for each in by["auto"]] == [each.tobytes() for each in by["fa3"]]
        crooked = np.zeros((1, 2, 70, 65), np.float16)[..., 1:]  # rows at odd addresses, which TMA does not take
        crooked[...] = dout
        found = cupyflash.attention_backward(crooked, q, k, v, out, lse)
        with pytest.raises(ValueError, match="TMA takes"):
            cupyflash.attention_backward(crooked, q, k, v, out, lse, algorithm="fa3")
    numbers = measure_gradients(dict(zip(("dQ", "dK", "dV"), found, strict=True)), dout, Inputs.of(q, k, v))
    assert all(each.good for each in numbers.values())


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (Problem(1, 1, 1, 64, 64, 200, "float16", bias=True), "takes a bias with d and d_v up to 192, and this has 200"),
        (Problem(1, 1, 1, 64, 64, 72, "float16", bias=True, mask=True), "takes a bias beside masks, a score function or dropout"),
        (
            Problem(1, 1, 1, 64, 64, 256, "float16", score=SCORES[1].form),
            "takes a score function of captured arrays with d and d_v",
        ),
        (Problem(1, 1, 1, 64, 64, 256, "float16", dropout=True), "takes dropout with d and d_v up to 192, and this has 256"),
        (Problem(1, 1, 1, 64, 64, 64, "float32"), "half types"),
        (Problem(1, 1, 1, 64, 64, 64, "float16", alignment=8), "multiples of 16 bytes"),
        (Problem(1, 1, 1, 64, 64, 64, "float16", scale=-1.0), "scale is positive"),
    ],
)
def test_what_it_does_not_run(problem: Problem, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plan_backward(problem, H100, "fa3")


DESIGNS = [
    (d, design, deterministic)
    for d in (64, 128, 256)
    for deterministic in (False, True)
    for design in fa3_backward.designs(Problem(1, 2, 1, 100, 270, d, "float16"), deterministic)
    if design.apart or not deterministic
]


@pytest.mark.wide
@pytest.mark.parametrize(("d", "design", "deterministic"), DESIGNS, ids=lambda each: getattr(each, "label", str(each)))
def test_every_design(d: int, design: fa3_backward.Fa3BackwardTile, deterministic: bool) -> None:
    problem = Problem(1, 2, 1, 100, 270, d, "float16", head_dim_v=min(d, 128) - 8, causal=design.in_turns)
    found = verify(plan_backward(problem, H100, "fa3", design, deterministic=deterministic), seed=1)
    assert found.good, (found.differences, found.findings, found.wrong_tensors)


def test_a_call_takes_a_design_as_its_tiling() -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 1, 70, 64)).astype(np.float16) for _ in range(4))
    tiling = next(each for each in fa3_backward.designs(Problem(1, 1, 1, 70, 70, 64, "float16")) if each.apart)
    with cupyflash.simulated_device(H100):
        out, lse = cupyflash.attention(q, k, v, return_lse=True)
        made = cupyflash.attention_backward(dout, q, k, v, out, lse, algorithm="fa3", tiling=tiling)
    numbers = measure_gradients(dict(zip(("dQ", "dK", "dV"), made, strict=True)), dout, Inputs.of(q, k, v))
    assert all(each.good for each in numbers.values())


def test_designs_begin_with_the_default() -> None:
    """Each is another one, and that of its blocks is the first with them."""
    for problem in (Problem(1, 1, 1, 64, 64, d, "float16", packed=packed) for d in (64, 128, 256) for packed in (False, True)):
        every = fa3_backward.designs(problem)
        assert len({each.label for each in every}) == len(every)
        assert plan_backward(problem, H100, "fa3").tile.label == every[0].label if not problem.options.packed else True
        for each in every:
            plain = fa3_backward.design(problem, TileSize(each.block_rows, each.block_cols, "asked for"))
            assert plain.label == next(other for other in every if str(other) == str(each)).label


def test_designs_of_other_problems_are_refused() -> None:
    """Their blocks alone do not make them runnable: what registers hold differs."""
    plain = Problem(1, 1, 1, 64, 64, 128, "float16")
    apart, pair = fa3_backward.designs(plain)[1:3]
    for problem, design, deterministic in (
        (plain.asking(dropout=True), apart, False),
        (plain, replace(apart, late=False), False),
        (plain, replace(apart, cluster=2), False),
        (plain, pair, True),
        (plain.asking(causal=True, bias=True), pair, False),
    ):
        with pytest.raises(ValueError, match=r"fa3's backward (does not run the design|runs blocks of|does not run this)"):
            plan_backward(problem, H100, "fa3", design, deterministic=deterministic).kernels()


def test_options_and_blocks_that_it_has_not() -> None:
    plain = Problem(1, 1, 1, 64, 64, 64, "float16")
    sparse = plain.asking(block_mask=BlockMask.of(np.ones((1, 1), bool)))
    with pytest.raises(ValueError, match=r"the backward of 'fa3' has no place for"):
        plan_backward(sparse, H100, "fa3")
    with pytest.raises(ValueError, match=r"runs blocks of Br 128 x Bc 128 or .* or Br 64 x Bc 128; the tiling asks for Br 64"):
        plan_backward(plain, H100, "fa3", (64, 64)).kernels()
    with pytest.raises(ValueError, match=r"needs .* bytes of SRAM"):
        fa3_backward.fit(plain, H100.with_sram("100KB"))
