"""Masks by tiles: conditions and boolean arrays, what is skipped, what is asked, and what finds it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from test_prepared import array

import cupyflash
from cupyflash import Device, Mask, Problem, Score, TileSchedule, plan
from cupyflash.expressions.evaluate import evaluate
from cupyflash.launch import compiler, launcher
from cupyflash.launch.cold import pose
from cupyflash.request.options import EMPTY, MIXED, WHOLE, Options, Pattern
from cupyflash.request.score import Form, captured_values, parts, seen_by
from cupyflash.schedules import Kernel, mask_tiles, plan_backward, plan_varlen
from cupyflash.schedules.mask_tiles import MaskTiles
from cupyflash.sim import theory
from cupyflash.sim.execution import Execution, argument_values, execute, execute_backward, run_kernels
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import forward
from cupyflash.sim.numbers.yardstick import measure, measure_gradients
from cupyflash.sim.theory.visits import states_made
from cupyflash.sim.two_level.machine import replay
from cupyflash.sim.verification import verify
from cupyflash.tiled_mask import StatesSchedule
from cupyflash.tiling import TileSize, Tiling
from expressions import SHAPE, VALUES, by_python, conditions, named
from mutants import Mutant, check_mutant
from recorded_cupy import Recorded
from suites import sample, sweep

B, H, HKV, NQ, NK, D = 2, 4, 2, 70, 90, 24
A100 = Device.named("A100-40GB")
RNG = np.random.default_rng(18)
DOCUMENTS = np.sort(RNG.integers(0, 3, (B, NK)), axis=1)  # int64, as NumPy makes them
TREE = np.tri(20, dtype=bool) & (RNG.random((20, 20)) < 0.7)
TEXTS = {
    "documents": "document[b, q] == document[b, k] and k <= q",
    "prefix": "k <= q or k < prefix[b]",
    "window": "k <= q and (q - k < 24 or k < first)",
    "nothing": "k > n_k",
    "dilated": "k <= q and (q - k) % 5 == 0 or q == k",
    "tree": "k < n_k - 20 or tree[q - n_k + 20, k - n_k + 20]",
    "flags": "not seen[row, k] and not (k == 7 and kv_h == 1)",
    "everything": "k >= 0",
    "steps": "k <= q and 20 * h <= q - k + start[b, k] + ends[row]",
}
CAPTURED = {
    "document": DOCUMENTS,
    "prefix": np.array([12, 40], np.int32),
    "first": 8,
    "tree": TREE,
    "seen": np.asfortranarray(RNG.random((NQ, NK)) < 0.01),
    "start": np.array([[0] * NK, [9] * NK], np.int16),
    "ends": np.zeros(NQ, np.uint8),
}


def mask_of(*texts: str) -> Mask:
    """A condition, or one of so many a head."""
    together = texts[0] if len(texts) == 1 else " or ".join(f"h == {head} and ({text})" for head, text in enumerate(texts))
    words = re.findall(r"\w+", together)
    return Mask(together, **{name: value for name, value in CAPTURED.items() if name in words})


STEPS = mask_of(TEXTS["steps"])  # of which each batch and head has its own
MASKS = {
    "positions": mask_of(*(TEXTS[name] for name in ("documents", "prefix", "window", "nothing"))),
    "elements": mask_of(*(TEXTS[name] for name in ("dilated", "tree", "flags", "everything"))),
    "steps": STEPS,
}
TILES = (32, 16)


def arrays(dtype: str = "float16") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((B, H, NQ, D), (B, HKV, NK, D), (B, HKV, NK, D))
    q, k, v = (RNG.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def posed(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any, score: Score | None = None, **asked: Any) -> Problem:
    """The problem of a mask that is known."""
    if not isinstance(mask, Mask):
        return Problem.from_arrays(q, k, v, mask=mask, **asked)
    captured, numbers = captured_values(score, mask)
    options = Options(mask_function=mask.form, score=score.form if score else None, **asked)
    return pose(False, {"q": q, "k": k, "v": v, **captured}, options, dict(numbers))


def as_array(problem: Problem) -> np.ndarray:
    """The mask of a problem for each score."""
    assert problem.options.pattern is not None
    return np.broadcast_to(problem.options.pattern.kept, (B, H, NQ, NK))


def check(schedule: TileSchedule, found: Execution, inputs: Inputs) -> None:
    """Three counts, and numbers by the 2x rule."""
    assert found.findings == ()
    assert found.traffic == replay(schedule) == replay(schedule, literal=True) == theory.traffic(schedule)
    scores = np.dtype(schedule.problem.dtype if schedule.algorithm == "standard" else "float32")
    assert all(each.good for each in measure(found.out, found.lse, inputs, scores).values())


EVERY = [*product(MASKS, ["fa2"], ["float16"]), ("positions", "fa1", "float32"), ("elements", "standard", "float16")]


@pytest.mark.parametrize(("name", "algorithm", "dtype"), sample(EVERY, [("steps", "fa2", "float16")]))
def test_numbers_and_bytes(name: str, algorithm: str, dtype: str) -> None:
    q, k, v = arrays(dtype)
    problem = posed(q, k, v, MASKS[name], window=(80, None) if name == "elements" else None)
    schedule = plan(problem, A100, algorithm, TILES, lse=True)
    found = execute(schedule, q, k, v, mask=MASKS[name])
    check(schedule, found, Inputs.of(q, k, v, mask=as_array(problem), window=problem.options.window))
    if name == "positions":
        assert found.lse is not None and not found.out[:, 3].any() and np.isneginf(found.lse[:, 3]).all()
    states = MaskTiles(problem, TILES).states
    assert all((states == state).any() for state in (EMPTY, MIXED, WHOLE))


def test_what_is_empty_is_not_read() -> None:
    """NaN in all keys and values that only empty tiles have does not show, and the bytes are those of the other tiles."""
    q, k, v = arrays()
    seen = np.zeros((NQ, NK), bool)
    seen[:, :16] = seen[:60, 48:64] = True
    problem = posed(q, k, v, seen)
    schedule = plan(problem, A100, "fa2", TILES, lse=True)
    k[:, :, 16:48] = v[:, :, 16:48] = k[:, :, 64:] = v[:, :, 64:] = np.nan
    found = execute(schedule, q, k, v, mask=seen)
    check(schedule, found, Inputs.of(q, *(np.nan_to_num(x) for x in (k, v)), mask=seen))
    assert found.traffic["K"].read_bytes == B * H * 16 * 5 * D * 2  # the third row block sees no key from 48 on
    assert found.traffic["tiles"].write_bytes == 3 * 6  # for all batches and heads
    assert found.traffic["mask"].read_bytes == NQ * NK + B * H * 32 * 16  # one tile is mixed


@pytest.mark.wide
@pytest.mark.parametrize(("algorithm", "deterministic"), [("fa2", True), ("fa2", False)])
def test_gradients_and_their_bytes(algorithm: str, deterministic: bool) -> None:
    q, k, v = arrays()
    mask, dout = STEPS, RNG.standard_normal((B, H, NQ, D)).astype(np.float16)
    problem = posed(q, k, v, mask)
    schedule = plan_backward(problem, A100, algorithm, TILES, deterministic=deterministic)
    inputs = Inputs.of(q, k, v, mask=as_array(problem))
    made = forward(inputs)
    found = execute_backward(schedule, dout, q, k, v, made.O.astype(q.dtype), made.L.astype(np.float32), mask=mask)
    assert found.findings == ()
    assert found.traffic == replay(schedule) == replay(schedule, literal=True) == theory.traffic(schedule)
    numbers = measure_gradients(found.gradients, dout, inputs)
    assert all(each.good for each in numbers.values()), numbers


@pytest.mark.wide
def test_beside_a_score_function_a_bias_and_a_block_mask() -> None:
    """All at once, with whole tiles whose scores have something of their own; both functions' parts lie side by side."""
    q, k, v = arrays()
    kept, bias = np.ones((3, 6), bool), RNG.standard_normal((NQ, NK)).astype(np.float16)
    kept[1, 2] = False
    by = {name: RNG.uniform(0, 1, n).astype(np.float32) for name, n in (("gain", H), ("of_row", NQ), ("of_key", NK))}
    score = Score("s * gain[h] + of_row[row] * of_key[k]", **by)
    problem = posed(q, k, v, STEPS, score=score).asking(bias=True, block_mask=kept)
    schedule = plan(problem, A100, "fa2", TILES, lse=True)
    found = execute(schedule, q, k, v, mask=STEPS, score=score, bias=bias, block_mask=kept)
    inputs = Inputs.of(q, k, v, mask=as_array(problem), score=score, bias=bias, block_mask=kept, blocks=TILES)
    check(schedule, found, inputs)
    dout, made = RNG.standard_normal((B, H, NQ, D)).astype(np.float16), forward(inputs)
    backward = plan_backward(problem, A100, "fa2", TILES, deterministic=True)
    given = (dout, q, k, v, made.O.astype(q.dtype), made.L.astype(np.float32))
    gradients = execute_backward(backward, *given, mask=STEPS, score=score, bias=bias, block_mask=kept)
    assert gradients.findings == () and gradients.traffic == replay(backward) == theory.traffic(backward)
    numbers = measure_gradients(gradients.gradients, dout, inputs)
    assert all(each.good for each in numbers.values()), numbers


def test_what_is_of_a_row_or_a_key_is_read_once_a_tile() -> None:
    """For rows if they visit any tile, for keys if a tile is mixed; no score has a read of its own."""
    ids = np.repeat([0, 1, 2], [32, 40, 18]).astype(np.int32)
    q, k, v = arrays()
    mask = Mask("document[q] == document[k] and first[b] >= 0", document=ids, first=np.zeros(B, np.int32))
    schedule = plan(posed(q, k, v, mask), A100, "fa2", TILES)
    (states,) = (each.states[0, 0] for each in schedule.mask_tiles)
    mixed = int((np.minimum(16, NK - 16 * np.arange(6)) * (states == MIXED)).sum())
    counted = theory.traffic(schedule)
    found = B * (NQ * 6 + NK * 3)  # by the kernel that finds the states, for each batch
    assert counted["mask_document"].read_bytes == 4 * (found + B * H * (NQ + mixed))
    assert counted["mask_first"].read_bytes == 4 * (B * 3 * 6 + B * H * 3)
    many = Mask(" or ".join(f"document[q + {n}] == document[k]" for n in range(20)), document=ids)
    assert [len(each) for each in parts(many.form)] == [0, 16, 1, 4]


def test_tiles_that_are_found_once() -> None:
    q, k, v = arrays()
    mask, asked = STEPS, []
    tiled = cupyflash.block_mask(mask, q, k)
    for given in (mask, tiled, tiled):
        out = cupyflash.attention(q, k, v, mask=given, tiling=TILES, return_lse=True)[0]
        asked.append((out.tobytes(), len(tiled._found)))
    assert asked[0] == (asked[1][0], 0) and asked[1] == asked[2] and asked[1][1] == 1
    schedule = plan(posed(q, k, v, mask).asking(tiles_given=True), A100, "fa2", TILES)
    assert "tiles" not in schedule.workspaces() and [kernel.name for kernel in schedule.kernels()] == ["fa2_forward"]
    counted, before = theory.traffic(schedule), theory.traffic(plan(posed(q, k, v, mask), A100, "fa2", TILES))
    assert counted == replay(schedule) and counted["tiles"].write_bytes == 0 < before["tiles"].write_bytes
    assert counted["tiles"].read_bytes == before["tiles"].read_bytes
    assert counted["mask_start"].read_bytes < before["mask_start"].read_bytes
    with pytest.raises(ValueError, match=r"block_mask for q of shape \(2, 4, 70, d\) and k \(2, 2, 90, d\), got \(2, 4, 60, d\)"):
        cupyflash.attention(q[:, :, :60], k, v, mask=tiled)
    with pytest.raises(TypeError, match="block_mask already"):
        cupyflash.block_mask(tiled, q, k)
    with pytest.raises(TypeError, match="mask must be"):
        cupyflash.block_mask("k <= q", q, k)


def test_a_graph_finds_tiles_for_itself(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured call finds tiles for itself alone, in memory that stays; later calls find them once."""
    monkeypatch.setattr(launcher, "_held_for_graphs", [])
    q, k, v = (array(cupy, 1, heads, 96, 64) for heads in (4, 2, 2))
    tiled = cupyflash.block_mask(Mask("k <= q + by[h]", by=array(cupy, 4, dtype=np.int32)), q, k)
    launches = []
    for capturing in (True, False, False):
        cupy.capturing, before = capturing, len(cupy.launches)
        cupyflash.attention(q, k, v, mask=tiled)
        launches.append(len(cupy.launches) - before)
    assert launches == [2, 2, 1]
    assert [held.shape[:2] for held in launcher._held_for_graphs] == [(1, 4)]


def test_warmup_compiles_what_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Kernel] = []
    monkeypatch.setattr("cupyflash.ahead._compile", lambda kernels, *_: compiled.extend(kernels))
    q, k, v = arrays()
    for mask in (STEPS, np.ones((B, 1, NQ, NK), bool)):
        compiled.clear()
        cupyflash.warmup(head_dim=D, mask=mask if isinstance(mask, Mask) else True)
        needed = plan(posed(q, k, v, mask), A100).kernels()
        assert {compiler.options(each) for each in needed} <= {compiler.options(each) for each in compiled} and len(needed) == 2


@pytest.mark.wide
def test_a_mask_of_too_many_tiles_is_asked_for_every_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_tiles, "MOST_STATE_BYTES", 0)
    q, k, v = arrays()
    problem = posed(q, k, v, STEPS)
    schedule = plan(problem, A100.with_sram("100KB"), "fa2", TILES, lse=True)
    assert schedule.mask_tiles == () and [kernel.name for kernel in schedule.kernels()] == ["fa2_forward"]
    check(schedule, execute(schedule, q, k, v, mask=STEPS), Inputs.of(q, k, v, mask=as_array(problem)))


def test_the_longest_masks_are_planned_and_counted() -> None:
    """Some millions of keys are as many as two bits a tile have room for in shared memory; more are not skipped."""
    for n, skips in ((2**20, True), (2**28, False)):
        schedule = plan(Problem(1, 1, 1, n, n, 64, "float16", mask=True), A100)
        assert bool(schedule.mask_tiles) == skips and schedule.kernels()
        seen = n * n * (2 if skips else 1)  # unknown to the host: every tile is mixed
        assert theory.traffic(schedule)["mask"].read_bytes == seen


@sweep(20, 200, seed=st.integers(0, 2**32))
def test_evaluated_as_python_evaluates_the_text(seed: int) -> None:
    places = [*np.ndindex(SHAPE)][seed % 7 :: 7]
    (text,) = conditions(seed, 1)
    found = np.broadcast_to(evaluate(Mask(text, **named(text)).form.tree, VALUES), SHAPE)
    np.testing.assert_array_equal([found[place] for place in places], np.array(by_python(text, places), bool), err_msg=text)


@sweep(1, 5, seed=st.integers(0, 2**32))
def test_the_kernel_says_what_the_reference_does(seed: int) -> None:
    """States of tiles of one score each, four conditions at a time, one a head."""
    texts = [f"h == {head} and ({text})" for head, text in enumerate(conditions(seed, 4))]
    mask, (b, h, n_q, n_k), one = Mask(" or ".join(texts), **named(" ".join(texts))), SHAPE, TileSize(1, 1, "a score")
    problem = Problem(b, h, 2, n_q, n_k, 16, "float16", mask_function=mask.form)
    captured, numbers = captured_values(None, mask)
    schedule = StatesSchedule(problem, A100, Tiling(one, one, one))
    states = np.zeros(schedule.mask_tiles[0].shape, np.uint8)
    values = argument_values(schedule, {"Q": np.zeros((b, h, n_q, 16), np.float16), "tiles": states, **captured, **dict(numbers)})
    traffic, _, findings = run_kernels(schedule, values, ("tiles",))
    made = states_made(schedule)
    assert findings == () and traffic == replay(schedule) == made
    want = np.broadcast_to(evaluate(mask.form.tree, VALUES), SHAPE)
    np.testing.assert_array_equal(np.broadcast_to(states, SHAPE), np.where(want, WHOLE, EMPTY), err_msg=mask.text)


def test_states_of_tiles() -> None:
    seen = np.zeros((1, 2, 5, 7), bool)
    seen[0, 0, :2, :3] = seen[0, 1] = True
    pattern = Pattern.of(seen)
    assert pattern.states((5, 7), (2, 3)).tolist() == [[[[2, 0, 0], [0, 0, 0], [0, 0, 0]], [[2] * 3] * 3]]
    assert pattern.states((5, 7), (5, 7)).ravel().tolist() == [MIXED, WHOLE]
    column = Pattern.of(np.arange(7) < 4)
    assert column.shape == (1, 1, 1, 7) and column.states((5, 7), (2, 2)).tolist() == [[[[2, 2, 0, 0]] * 3]]
    spread = Pattern.of(np.broadcast_to(seen[:, :1], (3, 2, 5, 7)))
    assert spread.shape == (1, 1, 5, 7) and spread == Pattern.of(seen[0, 0])
    assert (Pattern((1, 1, 1, 1)).states((5, 7), (2, 3)) == MIXED).all()
    with pytest.raises(ValueError, match=r"pattern must broadcast to \(b, h, n_q, n_k\) = \(1, 2, 5, 8\)"):
        Problem(1, 2, 1, 5, 8, 16, "float16", mask=True, pattern=pattern)


def test_planes_are_those_that_differ() -> None:
    form = {text: Mask(text).form for text in ("k <= q", "k <= q + b", "h == k", "kv_h + b == k")}
    found = {
        text: MaskTiles(Problem(2, 4, 2, 9, 9, 16, "float16", mask_function=one), (16, 16)).planes for text, one in form.items()
    }
    assert found == {"k <= q": (1, 1), "k <= q + b": (2, 1), "h == k": (1, 4), "kv_h + b == k": (2, 4)}


MUTANTS = {
    "mixed is taken for whole": Mutant("block_mask.cuh", "mixed = state == MIXED", "mixed = false", "numbers"),
    "whole is taken for mixed": Mutant("block_mask.cuh", "mixed = state == MIXED", "mixed = state != EMPTY", "bytes"),
    "empty is taken for whole": Mutant("block_mask.cuh", "&& state != EMPTY", "", "numbers"),
    "another head's states": Mutant("block_mask.cuh", "p.TILES.of(batch, head)", "p.TILES.of(batch, 0)", "numbers"),
    "the states of the tile before": Mutant("block_mask.cuh", "j * mask.state_col", "(j ? j - 1 : 0) * mask.state_col", "numbers"),
    "mixed is found to be empty": Mutant("mask_tiles.cu", "!some ? EMPTY", "!all ? EMPTY", "numbers"),
    "columns behind the last": Mutant("mask_tiles.cu", "if (c >= cols) continue;", "", "uninitialised", ("MASK_LINES",)),
    "another word of a key": Mutant(
        "mask.cuh", "PartOfKey, SCORE_KEY_LOADS, MASK", "PartOfKey, 1 - SCORE_KEY_LOADS, MASK", "numbers"
    ),
    "parts of no key": Mutant("fa2_forward.cu", "MASK && wanted && blocks.asks(j)", "false", "bytes"),
    "nobody waits for rows and columns": Mutant("mask_tiles.cu", "    __syncthreads();\n  }", "  }", "race", ("MASK_LINES",)),
}


@pytest.mark.parametrize("name", sample(MUTANTS, {"mixed is found to be empty"}))
def test_seeded_faults(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (np.random.default_rng(0).standard_normal((B, H, n, D)).astype(np.float16) for n in (NQ, NK, NK))
    problem = posed(q, k, v, STEPS)
    inputs = Inputs.of(q, k, v, mask=as_array(problem))

    def run(schedule: TileSchedule, seed: int | None) -> tuple[Execution, bool]:
        found = execute(schedule, q, k, v, mask=STEPS, seed=seed)
        return found, all(each.good for each in measure(found.out, found.lse, inputs, np.dtype("float32")).values())

    schedule = plan(problem, A100, "fa2", TILES, lse=True)
    check_mutant(MUTANTS[name], schedule, run, tmp_path, monkeypatch)


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("k <= \u00e4", {"\u00e4": 5}, ValueError, "a name of ASCII letters"),
    ("q - k", {}, ValueError, "a mask is a condition, 'q - k' is a number: (q - k) != 0, say"),
    ("s > 0", {}, ValueError, "'s' is not a name here"),
    ("k <= q", {"a": 1}, ValueError, "a is captured, but 'k <= q' does not use it"),
    ("a[k]", {"a": np.zeros(NK)}, TypeError, "a must be of dtype"),
    ("a[k]", {"a": np.zeros(NK, np.int8)}, ValueError, "a mask is a condition"),
    ("a", {"a": True, "k": 1}, ValueError, "k already has a meaning"),
    ("k <= q &", {}, ValueError, "not a Python expression"),
    ("k <= q & k > 3", {}, ValueError, "'q & k' is not allowed"),
    ("k and q", {}, ValueError, "and takes conditions"),
]


@pytest.mark.parametrize(("text", "given", "kind", "said"), REFUSED)
def test_texts_that_are_refused(text: str, given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        Mask(text, **given)
    assert said in str(error.value)


def test_calls_that_are_refused() -> None:
    q, k, v = arrays()
    problem, hopper = posed(q, k, v, mask_of(TEXTS["prefix"])), Device.named("H100-SXM")
    for refused, said in (
        (
            lambda: plan_backward(replace(problem, head_dim=72, head_dim_v=72).asking(bias=True), hopper, "fa3"),
            "a bias beside masks",
        ),
        (lambda: plan_varlen(problem, A100), "attention_varlen has no place for a mask's pattern"),
        (lambda: execute(plan(problem, A100), q, k, v, mask=STEPS), "another mask function"),
        (
            lambda: Problem.from_arrays(q, k, v, mask=np.ones((NQ, NK), bool), mask_function=problem.options.mask_function),
            "one mask",
        ),
        (lambda: problem.asking(mask_function=None), "pattern is that of a mask"),
        (lambda: cupyflash.attention(q, k, v, mask=Mask("a[k]", a=np.ones(5, bool))), "a must have length 90 along axis 0"),
    ):
        with pytest.raises(ValueError, match=said):
            refused()
    with pytest.raises(TypeError, match=r"mask must be a NumPy or CuPy array, a cupyflash\.Mask or a block_mask, got str"):
        cupyflash.attention(q, k, v, mask="k <= q")
    with pytest.raises(TypeError, match="mask_function must be a Mask's form"):
        problem.asking(mask_function=STEPS)


def test_forms_of_both_kinds_differ() -> None:
    text, value = "where(k <= q, 1, 0) > 0", Mask("k <= q").form
    assert isinstance(value, Form) and value.kind == "mask" and value == Mask(" k<=q ").form
    assert repr(mask_of(TEXTS["prefix"])) == "Mask('k <= q or k < prefix[b]', prefix=...)"
    assert hash(value) != hash(Mask(text).form) and Mask("a", a=True).numbers == {"a": True}
    problem = Problem(1, 1, 1, 3, 4, 16, "float16", mask_function=value)
    assert seen_by(value, problem, {}).tolist() == [[np.tri(3, 4, 1, bool).tolist()]]


@pytest.mark.parametrize("shape", [(1, 1, 0, 0), (2, 2, 0, 8), (2, 1, 8, 0)])
def test_an_empty_mask_has_one_pattern(shape: tuple[int, int, int, int]) -> None:
    """However its strides are; and a problem that has it can be drawn and executed."""
    cut = np.ones([length + 1 for length in shape], bool)[tuple(slice(length) for length in shape)]
    pattern = Pattern.of(cut)
    assert pattern == Pattern.of(cut.copy()) == Pattern.of(pattern.kept)
    b, h, n_q, n_k = shape
    assert verify(plan(Problem(b, h, h, n_q, n_k, 16, "float16", mask=True), A100)).good
