"""Dropout: Philox by its known answers, the same weights in every kernel, numbers and bytes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_backward_sparse
import test_varlen
from test_backward import backward_with_errors, check_backward

import cupyflash
from cupyflash import Device, Options, Problem, Score, TileSchedule, dropout_mask, kernels_cu, plan
from cupyflash.launch.nvrtc import compile_to_ptx
from cupyflash.request.dropout import ARGUMENTS, Dropout
from cupyflash.schedules import BackwardSchedule, choose, plan_backward, plan_decode, plan_varlen, plan_varlen_backward
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.sim import execute, replay, theory
from cupyflash.sim.execution import BackwardExecution, Execution
from cupyflash.sim.numbers.reference import dropped, philox, reference, reference_gradients
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, measure, measure_gradients
from cupyflash.sim.ptx import Module
from cupyflash.sim.verification import verify
from mutants import Mutant, check_mutant
from suites import sample

A100 = Device.named("A100-40GB")
ALL = 2**32 - 1
# Random123's known answers of philox4x32-10: counter, key, result
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEED, OFFSET = 2**40 + 77, 3


def test_known_answers() -> None:
    for counter, key, answer in ANSWERS:
        assert tuple(int(word) for word in philox(counter, key)) == answer
    text = "\n".join(
        [
            '#include "dropout.cuh"',
            'extern "C" __global__ void answers(const unsigned* given, unsigned* found) {',
            "  const unsigned* x = given + 6 * threadIdx.x;",
            "  const RandomWords words = philox(x[0], x[1], x[2], x[3], x[4], x[5]);",
            "  for (int i = 0; i < 4; i++) found[4 * threadIdx.x + i] = words.of[i];",
            "}",
        ]
    )
    options = (f"-I{kernels_cu.DIRECTORY}", "-DELEMENT=float", "-DPARAMS=int x;", "-DPARAMS_AGREE=true")
    found = np.zeros((len(ANSWERS), 4), np.uint32)
    given = np.array([counter + key for counter, key, _ in ANSWERS], np.uint32)
    launched = Module.from_ptx(compile_to_ptx(text, options, "answers.cu")).launch("answers", 1, len(ANSWERS), [given, found])
    assert launched.findings == () and found.tolist() == [list(answer) for _, _, answer in ANSWERS]


@pytest.mark.parametrize("shape", [(3, 2, 70, 90), (100, 33)])
def test_the_mask_is_the_reference_s(shape: tuple[int, ...]) -> None:
    for p, seed, offset, origin in ((0.3, SEED, OFFSET, (0, 0, 0, 0)), (0.999, 2**64 - 1, ALL, (65533, 9, 64, 2**31 - 1024))):
        kept = dropout_mask(shape, p, seed=seed, offset=offset, dropout_origin=origin)
        assert kept.dtype == bool and np.array_equal(kept, ~dropped(Dropout(p, seed, offset, origin), shape))
    assert dropout_mask(shape, 0, seed=1).all() and dropout_mask((0, 5), 0.5, seed=1).shape == (0, 5)
    assert 1e-9 not in (Dropout(1e-9, 0).probability, 1 - Dropout(1 - 1e-9, 0).probability)  # at least 2**-16
    schedule = DropoutMaskSchedule((3, 2, 70, 90), A100)
    assert theory.traffic(schedule) == replay(schedule) and theory.traffic(schedule)["kept"].write_bytes == 3 * 2 * 70 * 90


@pytest.mark.parametrize("p", sample([0.1, 0.5, 0.9], [0.1]))
def test_weights_are_dropped_as_often_as_asked_and_independently(p: float) -> None:
    """Means and correlations of half a million weights, and of pairs of them: each within five standard deviations."""
    asked = Dropout(p, SEED, OFFSET)
    z = dropped(asked, (2, 2, 256, 512)).astype(np.float64)
    n, p = z.size, asked.probability
    assert abs(p - asked.p) <= 2**-17 and asked.scale == 1 / (1 - p)
    deviation = np.sqrt(p * (1 - p) / n)
    assert abs(z.mean() - p) < 5 * deviation
    rows = z.reshape(-1, 512)
    for axis in (0, 1):  # of one key, of one row
        assert np.abs(rows.mean(axis=axis) - p).max() < 5 * np.sqrt(p * (1 - p) / rows.shape[axis])
    z = (z - p) / np.sqrt(p * (1 - p))
    pairs = {f"rows {far} apart": (z[:, :, far:], z[:, :, :-far]) for far in (1, 8, 16, 24, 32)}
    pairs |= {f"keys {far} apart": (z[..., far:], z[..., :-far]) for far in (1, 8, 16)}
    pairs |= {"batches": (z[0], z[1]), "heads": (z[:, 0], z[:, 1]), "transposed": (z[..., :256], z[..., :256].swapaxes(2, 3))}
    pairs |= {"diagonal neighbours": (z[:, :, 8:, 8:], z[:, :, :-8, :-8])}
    for name, other in (("another offset", Dropout(p, SEED, OFFSET + 1)), ("another seed", Dropout(p, SEED + 1, OFFSET))):
        beside = dropped(other, z.shape)
        pairs[name] = (z, (beside - p) / np.sqrt(p * (1 - p)))
    for name, (one, another) in pairs.items():
        times = 2 if name == "transposed" else 1  # each pair is there twice
        assert abs((one * another).mean()) < 5 * np.sqrt(times / one.size), name


FORWARD = [
    *(("fa2", "float16", 16), ("fa2", "float16", 128), ("fa2", "float32", 16)),
    *(("fa1", "float16", 16), ("standard", "float16", 16)),
]


def posed(d: int, dtype: str, **asked: Any) -> Problem:
    return Problem(1, 2, 1, 75, 101, d, dtype, causal=True, dropout=True, **asked)


@pytest.mark.parametrize(("algorithm", "dtype", "d"), sample(FORWARD, [("fa2", "float16", 16)]))
def test_forward_numbers_and_bytes(algorithm: str, dtype: str, d: int) -> None:
    assert verify(plan(posed(d, dtype), A100, algorithm, lse=True), data_seed=1).good


# Warps of 32 keys, and two that share theirs; the kernel for dQ by itself
BACKWARD = [
    *(("fa2", "float16", 16, True), ("fa2", "float16", 128, False)),
    *(("fa1", "float16", 16, False), ("standard", "float16", 16, False)),
]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("algorithm", "dtype", "d", "fixed"),
    sample(BACKWARD, [("fa2", "float16", 16, True)]),
)
def test_backward_numbers_and_bytes(algorithm: str, dtype: str, d: int, fixed: bool) -> None:
    check_backward(plan_backward(posed(d, dtype), A100, algorithm, deterministic=fixed), v_mean=1.0)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_no_byte_is_added(algorithm: str) -> None:
    with_it, without = (posed(64, "float16").asking(dropout=has) for has in (True, False))
    for planned in (plan, plan_backward):
        moved = [theory.traffic(planned(problem, A100, algorithm, (64, 32))) for problem in (with_it, without)]
        assert moved[0] == moved[1]


def test_one_key_has_gradients_of_zero_but_for_the_rounding_of_its_output() -> None:
    """dP - D cancels: D comes from a rounded O, and the plain computation may have no error by chance. Twice that rounding is
    right, many times as much is a fault."""
    problem = Problem(1, 1, 1, 1, 1, 64, "float16", dropout=True)
    schedule = plan_backward(problem, A100)
    missed = 0
    for seed in range(8):
        inputs, dout = drawn(problem, seed, 1.0), draw_gradient(problem, seed)
        execution, numbers = backward_with_errors(schedule, inputs, dout)
        assert all(each.good for each in numbers.values()), numbers
        wrong = {name: 64 * gradient for name, gradient in execution.gradients.items() if name != "dV"}
        missed += all(each.good for each in measure_gradients(wrong, dout, inputs).values())
    assert missed <= 4  # those with weights that are dropped, or an error of almost 0


@pytest.mark.wide
def test_beside_everything_else() -> None:
    """Masks and a bias leave a warp 16 keys, and blocks of other sizes."""
    asked: dict[str, Any] = {"mask": True, "bias": True, "padded": True, "key_lengths": (66,), "sinks": True}
    problem = Problem(1, 2, 1, 50, 70, 16, "float16", dropout=True, **asked)
    check_backward(plan_backward(problem, A100, "fa2", dbias=True))


@pytest.mark.wide
@pytest.mark.parametrize(("algorithm", "fixed"), [("fa2", False), ("fa2", True), ("fa1", False), ("standard", False)])
def test_behind_a_score_function(algorithm: str, fixed: bool) -> None:
    """Some slopes are below 0: a dropped weight can be told from a kept one all the same."""
    score = Score("where(k % 3 == 0, s, -s / 2) + slope[h]", slope=np.ones(2, np.float32))
    problem = Problem(1, 2, 1, 40, 48, 16, "float16", score=score.form, dropout=True)
    check_backward(plan_backward(problem, A100, algorithm, deterministic=fixed))


SEQLENS = ((5, 17), (70, 60), (0, 9), (33, 40))


@pytest.mark.wide
def test_packed_sequences() -> None:
    """A sequence's number is its batch."""
    problem = Problem(4, 2, 1, 70, 60, 16, "float16", causal=True, dropout=True)
    test_varlen.check_packed(plan_varlen(problem, A100, SEQLENS, lse=True))
    test_backward_sparse.check_packed(plan_varlen_backward(problem, A100, SEQLENS))
    q, k, v, cu_q, cu_k = test_varlen.packed(SEQLENS, 2, 1, 16, 16)
    asked: dict[str, Any] = {"dropout": 0.25, "seed": 2**40, "offset": 1}
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, **asked)
    test_varlen.check_sequences(out, lse, q, k, v, SEQLENS, Options(causal=True, dropout=True))
    gradients = cupyflash.attention_varlen_backward(out, q, k, v, out, lse, cu_q, cu_k, causal=True, **asked)
    other = cupyflash.attention_varlen_backward(out, q, k, v, out, lse, cu_q, cu_k, causal=True, **asked | {"seed": 1})
    assert all(np.abs(one.astype(np.float32) - two).max() > 0.1 for one, two in zip(gradients, other, strict=True))


@pytest.mark.wide
def test_warmup_leaves_nothing_to_compile() -> None:
    x = np.ones((2, 24, 16), np.float16)
    cupyflash.warmup(head_dim=16, causal=True, dropout=True, tiling=(32, 32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyflash.launch.compiler.compile_to_ptx", lambda *_: pytest.fail("something was compiled"))
        cupyflash.attention(x, x, x, causal=True, dropout=0.2, seed=1, tiling=(32, 32))


@pytest.mark.wide
def test_two_warps_that_share_rows_of_a_wide_head() -> None:
    problem = Problem(1, 2, 1, 40, 50, 32, "float16", head_dim_v=320, causal=True, dropout=True)
    assert verify(plan(problem, A100, "fa2", lse=True)).good


@pytest.mark.wide
def test_every_order_gives_the_same() -> None:
    problem = Problem(1, 1, 1, 34, 40, 16, "float16", dropout=True)
    inputs, schedule = drawn(problem), plan(problem, A100, "fa2", (32, 16))
    found = [execute(schedule, *inputs.qkv, dropout=inputs.dropout, seed=seed) for seed in (None, 1, 2)]
    assert all(np.array_equal(each.out, found[0].out) and each.findings == () for each in found)


# Blocks in which it is run: 16 and 32 rows a warp, key blocks of 16, 48 and more
TILINGS: list[tuple[str, str, tuple[int, int] | None]] = [
    *(("fa2", "float16", None), ("fa2", "float16", (16, 48)), ("fa2", "float16", (48, 16))),
]


def seen(algorithm: str, dtype: str, tiling: Any, dropout: Dropout, shape: tuple[int, int, int] = (2, 90, 64)) -> np.ndarray:
    """The weights of O, (heads, rows, keys): V is one at a key's own column, so that O is the weights."""
    rng, (heads, rows, keys) = np.random.default_rng(1), shape
    q, k = (rng.standard_normal((heads, n, 16)).astype(dtype) for n in (rows, keys))
    v = np.broadcast_to(np.eye(keys, 64, dtype=dtype), (heads, keys, 64)).copy()
    problem = Problem.from_arrays(q, k, v, Options(dropout=True))
    found = execute(plan(problem, A100, algorithm, tiling), q, k, v, dropout=dropout)
    assert found.findings == ()
    return found.out[..., :keys] != 0


@pytest.mark.parametrize(("algorithm", "dtype", "tiling"), sample(TILINGS, [TILINGS[1]]))
def test_every_kernel_keeps_the_same_weights(algorithm: str, dtype: str, tiling: Any) -> None:
    dropout = Dropout(0.4, SEED, OFFSET)
    kept = ~dropped(dropout, (2, 90, 64))
    assert np.array_equal(seen(algorithm, dtype, tiling, dropout), kept)


@pytest.mark.wide
def test_parts_of_a_call_keep_what_the_whole_keeps() -> None:
    """Heads, rows and keys of their own devices."""
    kept = ~dropped(Dropout(0.4, SEED, OFFSET), (2, 90, 64))
    for head, row, key in ((1, 0, 0), (0, 32, 0), (1, 64, 48)):
        part = Dropout(0.4, SEED, OFFSET, (0, head, row, key))
        found = seen("fa2", "float16", None, part, (2 - head, 90 - row, 64 - key))
        assert np.array_equal(found, kept[head:, row:, key:])


@pytest.mark.wide
def test_a_call_and_its_gradients() -> None:
    """Both use `attention`'s own arguments; L is that of all weights."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (rng.standard_normal((1, 2, 50, 16)).astype(np.float16) for _ in range(4))
    asked: dict[str, Any] = {"causal": True, "dropout": 0.2, "seed": 5, "offset": 1, "dropout_origin": (3, 2, 32, 16)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **asked)
    exact, _ = reference(q, k, v, **asked)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=4e-3)
    np.testing.assert_array_equal(lse, cupyflash.attention(q, k, v, causal=True, return_lse=True)[1])
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=True, **asked)
    for found, expected in zip(
        gradients, (reference_gradients(dout, q, k, v, **asked)[name] for name in ("dQ", "dK", "dV")), strict=True
    ):
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=2e-2)
    for changed in ({"seed": 6}, {"offset": 2}, {"dropout_origin": (3, 2, 32, 32)}, {"dropout": 0.3}):
        assert not np.array_equal(out, cupyflash.attention(q, k, v, **asked | changed)), changed
    assert np.array_equal(cupyflash.attention(q, k, v, seed=5, offset=1), cupyflash.attention(q, k, v))


def test_the_mean_over_many_calls_is_the_attention_without() -> None:
    """Over 200 offsets, by the reference, which the kernels agree with: within five standard deviations everywhere."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((20, 8)) for _ in range(3))
    plain, _ = reference(*(x.astype(np.float32) for x in (q, k, v)))
    every = np.stack([reference(*(x.astype(np.float32) for x in (q, k, v)), dropout=0.5, seed=4, offset=n)[0] for n in range(200)])
    assert (np.abs(every.mean(axis=0) - plain) < 5 * every.std(axis=0) / np.sqrt(200)).all()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"dropout": 1.0}, ValueError, "dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": -0.1}, ValueError, "dropout must be at least 0 and below 1"),
        ({"dropout": float("nan")}, ValueError, "dropout must be at least 0 and below 1, got nan"),
        ({"dropout": True}, TypeError, "dropout must be a real number, got True"),
        ({"dropout": "half"}, TypeError, "dropout must be a real number, got 'half'"),
        ({"seed": None}, ValueError, "dropout needs a seed"),
        ({"seed": 2**64}, ValueError, "seed must be at least 0 and below 18,446,744,073,709,551,616"),
        ({"seed": 1.0}, TypeError, "seed must be an integer, got 1.0"),
        ({"dropout": 0, "seed": -1}, ValueError, "seed must be at least 0"),
        ({"offset": -1}, ValueError, "offset must be at least 0 and below 4,294,967,296, got -1"),
        ({"dropout_origin": (0, 0, 16, 0)}, ValueError, "dropout_origin must have a row in steps of 32, a key of 16"),
        ({"dropout_origin": (0, 0, 0, 8)}, ValueError, "dropout_origin must have a row in steps of 32, a key of 16"),
        ({"dropout": 0, "seed": None, "dropout_origin": (0, 0, 1, 0)}, ValueError, "dropout_origin must have a row in steps of 32"),
        ({"dropout": 0, "seed": None, "dropout_origin": (1, 2, 3)}, TypeError, "dropout_origin must be"),
        ({"dropout_origin": 3}, TypeError, r"dropout_origin must be \(batch, head, row, key\), got 3"),
        ({"algorithm": "decode"}, ValueError, "dropout"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    x = np.zeros((4, 16), np.float16)
    asked = {"dropout": 0.5, "seed": 1} | changed
    with pytest.raises(error, match=words):
        cupyflash.attention(x, x, x, **asked)
    if "algorithm" not in asked:
        with pytest.raises(error, match=words):
            cupyflash.attention_vjp(x, x, x, **asked)
        if asked["seed"] is not None:
            with pytest.raises(error, match=words):
                dropout_mask((4, 4), asked.pop("dropout"), **asked)


def test_what_has_no_dropout_says_so() -> None:
    hopper, problem = Device.named("H100-SXM"), Problem(1, 1, 1, 4096, 4096, 128, "float16", dropout=True)
    assert choose(problem.asking(dropout=False), hopper).algorithm == "fa3"
    dropped = choose(problem, hopper)
    assert dropped.algorithm == "fa2" and "random numbers" in dropped.reason
    few = Problem(1, 1, 1, 1, 100_000, 128, "float16", dropout=True)
    assert choose(few.asking(dropout=False), A100).algorithm == "decode" and choose(few, A100).algorithm == "fa2"
    for refused in (
        lambda: plan_decode(few, A100),
        lambda: execute(plan(problem, A100), *drawn(problem.asking(dropout=False)).qkv),
        lambda: Problem(70_000, 1, 1, 4, 4, 16, "float16", dropout=True),
        lambda: dropout_mask((1, 70_000, 4, 4), 0.5, seed=1),
    ):
        with pytest.raises(ValueError, match="dropout"):
            refused()
    for wrong in ((5,), "mask", (1, 2, 3, 4, 5)):
        with pytest.raises(TypeError, match="shape must be"):
            dropout_mask(wrong, 0.5, seed=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="xp must be the module numpy or cupy"):
        dropout_mask((4, 4), 0.5, seed=1, xp=pytest)
    assert list(ARGUMENTS) == ["dropout", "seed", "offset", "dropout_origin"]


DROPOUT, FORWARD_KERNEL, BACKWARD_KERNEL = "dropout.cuh", "fa2_forward.cu", "fa2_backward.cu"
FAULTS: dict[str, tuple[Mutant, bool]] = {
    "the offset is forgotten": (Mutant(DROPOUT, "p.dropout_offset,\n", "0u,\n", "numbers"), False),
    "what is kept is not scaled": (Mutant(FORWARD_KERNEL, "inverse *= dropout_of(p, 0, 0).scale", "", "numbers"), False),
    "L is of what is kept": (
        Mutant("online_softmax.cuh", "l[i][e / 2] += S[i][n][e];", "l[i][e / 2] += S[i][n][e] / 2;", "numbers"),
        False,
    ),
    "the backward has other keys": (Mutant(BACKWARD_KERNEL, "dropout, warp_key +", "dropout, 16 + warp_key +", "numbers"), True),
}


def backward(schedule: BackwardSchedule, seed: int | None) -> tuple[BackwardExecution, bool]:
    """An execution, and whether its gradients are right."""
    made, numbers = backward_with_errors(schedule, drawn(schedule.problem), draw_gradient(schedule.problem), seed)
    return made, all(each.good for each in numbers.values())


def forward(schedule: TileSchedule, seed: int | None) -> tuple[Execution, bool]:
    inputs = drawn(schedule.problem, v_mean=1.0)
    made = execute(schedule, *inputs.qkv, dropout=inputs.dropout, seed=seed)
    return made, all(each.good for each in measure(made.out, made.lse, inputs).values())


@pytest.mark.wide
@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, behind = FAULTS[name]
    problem = Problem(1, 1, 1, 40, 48, 16, "float16", dropout=True)
    if behind:
        check_mutant(mutant, plan_backward(problem, A100, "fa2"), backward, tmp_path, monkeypatch)
    else:
        check_mutant(mutant, plan(problem, A100, "fa2", (32, 32), lse=True), forward, tmp_path, monkeypatch)
