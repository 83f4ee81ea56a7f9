"""FlashAttention-3's kernel: numbers by the 2x rule, theory == replay == execution, no finding, whatever it is asked for."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_magnitudes
import test_varlen
from hypothesis import strategies as st
from lines import LINES

import cupyflash
from cases_fa3 import H100, Case, Layout, cases, check, check_packed, packed
from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.request.score import Form
from cupyflash.schedules import Kernel, choose, fa3_tiles, plan_varlen
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim import execution
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.numbers.yardstick import DTYPES, measure, measure_gradients
from suites import sweep, wide

Arrays = dict[str, np.ndarray]


def one(problem: Problem, tiling: tuple[int, int] | None = None, order: int | None = None, **others: Any) -> Case:
    """A case of contiguous arrays (b, h, n, d)."""
    layouts = dict.fromkeys(("q", "k", "v", "out"), Layout())
    return replace(Case(problem, H100, tiling, layouts, axes=4, seed=0, order=order, v_mean=1.0, lse=True), **others)


halves = st.sampled_from(["float16", "bfloat16"])


@sweep(1, 3)
def test_random_problems(data: st.DataObject) -> None:
    for case in data.draw(cases(data.draw(halves))):
        check(case)


@pytest.mark.wide
@sweep(1, 2)
def test_random_batches_of_packed_sequences(data: st.DataObject) -> None:
    check_packed(data.draw(packed(data.draw(halves))), data.draw(st.integers(0, 99)))


SMALL = Problem(1, 1, 1, 150, 45, 64, "float16", causal=True, padded=True, key_lengths=(41,), sinks=True)
"""Two row blocks of up to three turns in blocks of 128 x 16, rows that see no key, and keys that do not count."""


@pytest.mark.wide
@pytest.mark.parametrize("orders", [1, wide(2)])
def test_the_same_bits_each_time_and_in_every_order(orders: int) -> None:
    """Also when one thread block does all the work, from a queue."""
    case = one(SMALL, (128, 16))
    first, _ = check(case)
    alone = replace(case, device=replace(H100, sm_count=1))
    for again in (case, alone, *(replace((alone, case)[seed % 2], order=seed) for seed in range(orders))):
        found, _ = check(again)
        assert found.out.tobytes() == first.out.tobytes()
        assert found.traffic == first.traffic or again.device.sm_count == 1  # which takes its row blocks from a queue
        assert found.lse is not None and first.lse is not None and found.lse.tobytes() == first.lse.tobytes()


@pytest.mark.parametrize(
    ("d", "d_v", "tiling"),
    [(64, 64, (128, 16)), wide(256, 256, None), wide(96, 200, None)],
)
def test_no_bank_conflicts(d: int, d_v: int, tiling: tuple[int, int] | None) -> None:
    """All shared accesses take as many wavefronts as their bytes need: O's way out, and zeros behind the last key."""
    problem = replace(SMALL, head_dim=d, head_dim_v=d_v)
    found, _ = check(one(problem, tiling))
    counters = found.counters["fa3_forward"]
    kinds = {kind for kind, _ in counters.shared}
    assert {kind: counters.shared_kind(kind).conflicts for kind in kinds} == dict.fromkeys(kinds, 0)
    assert {"stmatrix", "st", "wgmma"} <= kinds


@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "kind"), [("float16", "causal"), wide("float16", "plain"), wide("bfloat16", "lengths")])
def test_scores_of_any_size(dtype: str, kind: str) -> None:
    """Scores from 1e-40 to 1e38, of which many are equal: weights and L to the last digits; four turns."""
    whole = (dtype, kind) != ("float16", "causal")
    for powers in test_magnitudes.POWERS[dtype][:: 1 if whole else 4]:
        (q, k, v, _), options = test_magnitudes.pose(dtype, *powers, "plain" if kind == "lengths" else kind, 60)
        options |= {"key_lengths": np.array([50], np.int32)} if kind == "lengths" else {}
        with cupyflash.simulated_device(H100):
            out, lse = cupyflash.attention(q, k, v, return_lse=True, algorithm="fa3", tiling=(128, 16), **options)
        expected, expected_lse = reference(q, k, v, **options)
        most = test_magnitudes.steps_of(dtype) * np.abs(v.astype(np.float64)).max()
        assert np.abs(out.astype(np.float64) - expected).max() <= most, powers
        assert np.allclose(lse, expected_lse, rtol=2.0**-21, atol=1e-5), powers


# --- a call takes it, or FlashAttention-2


def test_the_models_have_the_choice() -> None:
    large = Problem(4, 16, 16, 4096, 4096, 128, "float16")
    assert choose(large, H100).algorithm == choose(large.asking(causal=True), H100).algorithm == "fa3"
    assert choose(Problem(1, 1, 1, 16, 16, 8, "float16"), H100).algorithm == "fa2"
    assert choose(large, H100, (128, 128)).algorithm == choose(large, Device.named("A100-40GB")).algorithm == "fa2"
    with pytest.raises(ValueError, match=r"compute capability 9.0's, and A100-40GB has 8.0"):
        plan(large, Device.named("A100-40GB"), "fa3")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The algorithms of the calls in a test, on a Hopper on which "fa3" is faster wherever it runs."""
    algorithms: list[str] = []
    run_kernels = execution.run_kernels

    def spied(schedule: Any, *given: Any, **others: Any) -> Any:
        algorithms.append(schedule.algorithm)
        return run_kernels(schedule, *given, **others)

    monkeypatch.setattr(execution, "run_kernels", spied)
    monkeypatch.setattr(fa3_tiles, "clocks", lambda *given: 0.0)
    with cupyflash.simulated_device(replace(H100, name="a Hopper")):  # what was chosen for an H100 is kept
        yield algorithms


def posed(dtype: str = "float16", d: int = 32, d_v: int | None = None, n_q: int = 150, n_k: int = 100, heads: int = 2) -> Arrays:
    """q (2, n_q, d), k and v of one head, if `heads` is 2."""
    rng = np.random.default_rng(0)
    shapes = {"q": (heads, n_q, d), "k": (heads // 2, n_k, d), "v": (heads // 2, n_k, d_v or d)}
    return {name: rng.standard_normal(shape).astype(np.float32).astype(DTYPES[dtype]) for name, shape in shapes.items()}


def among(array: np.ndarray, columns: int, first: int = 0) -> np.ndarray:
    """The same array as columns of a wider one, the first of which is `first`."""
    wider = np.zeros((*array.shape[:-1], columns), array.dtype)
    wider[..., first : first + array.shape[-1]] = array
    return wider[..., first : first + array.shape[-1]]


PLAIN = posed()
# What is different from the plain call, and why "fa3" does not take it
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "float32": (posed("float32"), "half types, and this is float32"),
    "block mask": ({"block_mask": np.array([[1, 0], [1, 1], [0, 1]], bool), "tiling": (64, 64)}, "no place for a block mask"),
    "sine": ({"score": Score("s + sin(s)")}, "no stack, and the score function's sin takes one"),
    "cosine": ({"mask": Mask("cos(q) < 0.5")}, "no stack, and the mask function's cos takes one"),
    "negative scale": ({"scale": -0.3}, "scale is positive, and this is -0.3"),
    "no scale": ({"scale": 0.0}, "scale is positive, and this is 0.0"),
    "no keys": (posed(n_k=0), "tensors with elements"),
    "no queries": (posed(n_q=0), "tensors with elements"),
    "no heads": (posed(heads=0), "tensors with elements"),
    "odd rows": ({"q": among(PLAIN["q"], 33)}, "multiples of 16 bytes, and here they are at multiples of 2"),
    "eight bytes off": ({"k": among(PLAIN["k"], 40, 4)}, "multiples of 16 bytes, and here they are at multiples of 8"),
    "d": (posed(d=20), "multiples of 16 bytes, and here they are at multiples of 8"),
    "d of V": (posed(d_v=33), "multiples of 16 bytes, and here they are at multiples of 2"),
    "broadcast": ({"k": np.broadcast_to(PLAIN["k"], (2, 100, 32)), "v": np.repeat(PLAIN["v"], 2, 0)}, "K's from head to head is 0"),
    "backwards": ({"v": PLAIN["v"][:, ::-1].copy()[:, ::-1]}, "V's from row to row is -64"),
    "O in odd rows": (
        {"out": among(np.zeros((2, 150, 32), np.float16), 36)},
        "multiples of 16 bytes, and here they are at multiples of 8",
    ),
}


OTHERS = "block mask", "odd rows", "no scale", "cosine"  # numbers of which other tests check


@pytest.mark.parametrize(
    ("name", "executed"), [*((name, False) for name in REFUSED), *(wide(name, True) for name in REFUSED if name not in OTHERS)]
)
def test_what_it_refuses_goes_to_fa2(name: str, executed: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changed, reason = REFUSED[name]
    call: dict[str, Any] = PLAIN | changed
    if not executed:
        monkeypatch.setattr(execution, "run_kernels", lambda schedule, *given: (ran.append(schedule.algorithm), {}, ()))
    made = cupyflash.attention(**call, return_lse=True)
    assert ran == ["fa2"]
    if executed:
        asked = {name: value for name, value in call.items() if name not in ("q", "k", "v", "out", "tiling")}
        numbers = measure(*made, Inputs.of(call["q"], call["k"], call["v"], blocks=call.get("tiling"), **asked))
        assert all(each.good for each in numbers.values()), numbers
    explicit = call | {"tiling": (128, 64) if "tiling" in call else None}
    with pytest.raises(ValueError, match=reason) as raised:
        cupyflash.attention(**explicit, algorithm="fa3")
    assert "\n" not in str(raised.value) and raised.value.__cause__ is None
    assert len(ran) == 1


TAKEN: dict[str, dict[str, Any]] = {
    "rows among others": {name: among(array, 40, 8) for name, array in PLAIN.items()}
    | {"out": among(np.zeros((2, 150, 32), np.float16), 64, 32)},
    "rows first": {name: np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1) for name, array in PLAIN.items()},
    "a head that is broadcast to itself": {name: np.broadcast_to(PLAIN[name][0], (1, 100, 32)) for name in "kv"},
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_it_takes(name: str, ran: list[str]) -> None:
    call = PLAIN | TAKEN[name]
    numbers = measure(*cupyflash.attention(**call, return_lse=True), Inputs.of(*PLAIN.values()))
    assert all(each.good for each in numbers.values()), numbers
    assert ran == ["fa3"]


FAR = Score(
    "where(group[q] == group[k], c * tanh(s / c), -far) - slope[h] * abs(q - k)",
    group=np.arange(100) // 40,
    c=3.0,
    far=np.inf,
    slope=np.array([0.5, 0.01, 0.2, 0.1], np.float32),
)


@pytest.mark.wide
@pytest.mark.parametrize("queries", [2, wide(30)])
def test_it_takes_a_score_function_of_several_heads_in_a_block(queries: int, ran: list[str]) -> None:
    """Few queries: rows of four heads share blocks, and each has its own slope. Whole blocks are masked by the line."""
    arrays = posed(n_q=queries, heads=4)
    q, k, v = arrays["q"], arrays["k"][:1], arrays["v"][:1]
    made = cupyflash.attention(q, k, v, score=FAR, return_lse=True, causal=True)
    numbers = measure(*made, Inputs.of(q, k, v, score=FAR, causal=True))
    assert all(each.good for each in numbers.values()), numbers
    assert ran == ["fa3"]


@pytest.mark.parametrize(("score", "together"), [(None, 16), wide(LINES[2], 8)])
def test_sixteen_heads_of_few_queries(score: Form | None, together: int) -> None:
    """A score function speaks of a row's head: a lane's two rows are of one."""
    case = one(Problem(1, 16, 1, 3, 40, 32, "float16", causal=True, score=score), (128, 16))
    schedule = case.schedule
    assert isinstance(schedule, Fa3Schedule) and schedule.pack == together
    check(case)


@pytest.mark.parametrize("executed", [False, wide(True)])
@pytest.mark.parametrize(("columns", "algorithm"), [(40, "fa3"), (33, "fa2")])
def test_packed_sequences(columns: int, algorithm: str, executed: bool, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows among others of so many columns in all."""
    seqlens = ((70, 20), (0, 5), (150, 77), (30, 0))
    q, k, v, cu_q, cu_k = test_varlen.packed(seqlens, 2, 1, 32, 32)
    if not executed:
        monkeypatch.setattr(execution, "run_kernels", lambda schedule, *given: (ran.append(schedule.algorithm), {}, ()))
    made = cupyflash.attention_varlen(among(q, columns), k, v, cu_q, cu_k, return_lse=True)
    assert ran == [algorithm]
    if executed:
        test_varlen.check_sequences(*made, q, k, v, seqlens)


def test_packed_sequences_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Kernel] = []
    monkeypatch.setattr("cupyflash.sim.execution.module", lambda kernel, capability: compiled.append(kernel))
    with cupyflash.simulated_device("H100-SXM"):
        cupyflash.warmup(head_dim=32, varlen=True, algorithm="fa3")
    asked = Problem(4, 8, 8, 300, 300, 32, "float16")
    assert plan_varlen(asked, H100, algorithm="fa3").kernels()[-1].constants in [kernel.constants for kernel in compiled]


# --- what a call without masks, bias or dropout runs

UNMASKED = Path(__file__).with_name("unmasked.json")
"""By problem a hash of the PTX of a compiler, how often it has each instruction. By disassembly that is the machine code from
before the kernel took these options. Loads of parameters do not count: another field moves them."""


@pytest.mark.wide
def test_options_that_are_not_asked_for_leave_the_code_as_it_was() -> None:
    from killers import nvrtc_version

    known = json.loads(UNMASKED.read_text())
    for options in ({}, {"causal": True}, {"window": (100, 0)}, {"padded": True}, {"sinks": True}):
        for d in (64, 128, 256):
            name = f"d {d}, {', '.join(options) or 'full'}"
            made = plan(Problem(2, 4, 4, 1000, 1000, d, "bfloat16", **options), H100, "fa3")
            assert isinstance(made, Fa3Schedule)
            text = execution.ptx(made.main_kernel, H100.compute_capability)
            often = Counter(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)\s", text, re.MULTILINE))
            counts = sorted((name, count) for name, count in often.items() if not name.startswith("ld.param"))
            found = hashlib.sha256(repr(counts).encode()).hexdigest()[:16]
            assert found == known[name] or nvrtc_version() != known["nvrtc"], (
                f"{name}: {found}; {UNMASKED.name} is for who means it"
            )


# --- with its backward


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float16", {}),
        wide("bfloat16", {"causal": True, "key_lengths": [90, 33], "sinks": np.array([0.5, -1], np.float32), "scale": 0.3}),
    ],
)
def test_gradients_of_the_pair(dtype: str, options: dict[str, Any], ran: list[str]) -> None:
    """O and L of this forward, gradients of `attention_backward` from them: by the 2x rule."""
    batch = 2 if "key_lengths" in options else 1
    arrays = {
        name: np.stack([array * (1 - each / 2) for each in range(batch)]).astype(DTYPES[dtype]) for name, array in posed().items()
    }
    out, lse = cupyflash.attention(**arrays, return_lse=True, **options)
    dout = np.random.default_rng(3).standard_normal(out.shape).astype(np.float32).astype(DTYPES[dtype])
    gradients = cupyflash.attention_backward(dout, **arrays, out=out, lse=lse, **options)
    named = dict(zip(("dQ", "dK", "dV", "dsinks"), gradients, strict=False))
    inputs = Inputs.of(**arrays, **options | ({"key_lengths": np.array(options["key_lengths"])} if batch > 1 else {}))
    numbers = measure_gradients(named, dout, inputs)
    assert all(each.good for each in numbers.values()), numbers
    assert ran == ["fa3", "fa3"]
