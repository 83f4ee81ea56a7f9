"""The L2 model follows whatever a call asks for: masks, biases, captured arrays, packed sequences, pages, gradients of all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lines
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st
from test_l2 import PAGE, Plain, geometries

from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.request.options import BlockMask, Pattern
from cupyflash.request.score import field
from cupyflash.schedules import (
    Cache,
    DecodeSchedule,
    TileSchedule,
    patterns_of,
    plan_backward,
    plan_decode,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.sim import l2, replay, theory
from cupyflash.sim.cli import main
from cupyflash.sim.l2 import L2, LINE, executed
from cupyflash.sim.l2.launch import DeviceMemory
from cupyflash.sim.numbers.yardstick import knowing_mask
from cupyflash.sim.traffic import Traffic
from problems import patterns, sides
from suites import sample, sweep

A100, H100 = (Device.named(name) for name in ("A100-40GB", "H100-SXM"))
ALL = L2(1 << 26, 1 << 12)  # holds everything
ONE, TWO, THREE = (np.ones((1,) * axes, np.float32) for axes in (1, 2, 3))
SCORES = (*lines.LINES, Score("s + r[h, row, k] + x[k] - x[k + 99] - w[row] + t[abs(q - k)]", r=THREE, x=ONE, w=ONE, t=ONE).form)
MASKS = (*lines.MASKS, Mask("m[row, k] or k < p[c[h]]", m=TWO > 0, p=ONE.astype(np.int32), c=ONE.astype(np.uint8)).form)
TILINGS = ((32, 32), (64, 16))
KINDS = ("fa2", "fa3", "fa1", "standard", "packed fa2", "packed fa3", "decode")
GRADIENTS = ("fa2 gradients", "fa1 gradients", "standard gradients", "packed gradients")


@st.composite
def problems(draw: st.DrawFn, most: int, *, of_scores: bool, masks: bool) -> Problem:
    """Problems with all options: `of_scores` a mask or a bias in an array, `masks` a mask function; a mask may be known."""
    kv_heads, flag = draw(st.integers(1, 2)), st.sampled_from([False, False, True])
    batch, heads, n = draw(st.integers(1, 2)), kv_heads * draw(st.sampled_from([1, 1, 3])), st.integers(1, most)
    n_q, n_k, dims = draw(n), draw(n), st.sampled_from([16, 24, 40, 64, 128])
    asked: dict[str, Any] = {"causal": True} if draw(flag) else {"window": (draw(sides), draw(sides))} if draw(flag) else {}
    if draw(flag):
        asked |= {"padded": True, "key_lengths": draw(st.tuples(*[st.integers(0, n_k)] * batch))}
    masked = draw(st.sampled_from(["mask" if of_scores else None, "mask_function" if masks else None, None]))
    if masked == "mask":
        asked["mask"] = True
    elif masked:
        asked["mask_function"] = draw(st.sampled_from(MASKS))
    if masked and draw(st.booleans()):
        asked["pattern"] = draw(patterns(batch, heads, n_q, n_k))
    if masked and draw(flag):
        asked["tiles_given"] = True
    asked |= {"bias": of_scores and draw(flag), "sinks": draw(flag), "score": draw(st.none() | st.sampled_from(SCORES))}
    dtype = draw(st.sampled_from(["float16", "float16", "float32"])) if of_scores else "float16"
    return Problem(batch, heads, kv_heads, n_q, n_k, draw(dims), dtype, head_dim_v=draw(dims), **asked)


@st.composite
def fixed(draw: st.DrawFn, kind: str, most: int) -> TileSchedule:
    """Schedules of sequences of one length."""
    algorithm, _, backward = kind.partition(" ")
    device = replace(H100 if algorithm == "fa3" else draw(st.sampled_from([A100, H100])), sm_count=draw(st.integers(1, 5)))
    p = draw(problems(most, of_scores=algorithm != "fa3", masks=algorithm != "fa3"))
    if algorithm == "fa3":
        p = replace(p, head_dim=64, head_dim_v=draw(st.sampled_from([64, 128])))
        return plan(p, device, "fa3", lse=draw(st.booleans()))
    tiling = draw(st.none() | st.sampled_from(TILINGS)) if algorithm != "standard" else None
    if tiling is not None:
        blocks = -(-p.seqlen_q // tiling[0]), -(-p.seqlen_k // tiling[1])
        shape = draw(st.sampled_from([1, p.batch])), draw(st.sampled_from([1, p.heads])), *blocks
        kept = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(st.sampled_from([0.0, 0.3, 0.7]))
        p = p.asking(block_mask=BlockMask.of(kept))
    if not backward:
        return plan(p, device, algorithm, tiling, lse=draw(st.booleans()))
    if algorithm != "fa2":
        return plan_backward(p.asking(sinks=False), device, algorithm, tiling)
    dbias = p.options.bias and draw(st.booleans())
    return plan_backward(p, device, algorithm, tiling, deterministic=draw(st.booleans()), dbias=dbias)


@st.composite
def packed(draw: st.DrawFn, kind: str, most: int) -> TileSchedule:
    """Schedules of sequences of their own lengths, which may be unknown; a mask may be known."""
    p = draw(problems(most, of_scores=False, masks="fa3" not in kind)).asking(padded=False, key_lengths=None, pattern=None)
    sequences = draw(st.sampled_from([1, 2, 5, 40]))
    p = replace(p.asking(tiles_given=False), batch=sequences, **({"head_dim": 64, "head_dim_v": 64} if "fa3" in kind else {}))
    each = st.tuples(st.integers(0, p.seqlen_q), st.integers(0, p.seqlen_k))
    seqlens = draw(st.none() | st.lists(each, min_size=sequences, max_size=sequences).map(tuple))
    known = None
    if p.options.mask_function == lines.MASKS[2] and seqlens is not None and draw(st.booleans()):
        known = patterns_of(p, seqlens, {})
    device = replace(H100 if "fa3" in kind else draw(st.sampled_from([A100, H100])), sm_count=draw(st.integers(1, 5)))
    if "gradients" in kind:
        return plan_varlen_backward(p, device, seqlens, deterministic=draw(st.booleans()), patterns=known)
    algorithm = kind.removeprefix("packed ")
    return plan_varlen(p, device, seqlens, lse=draw(st.booleans()), algorithm=algorithm, patterns=known)


@st.composite
def decoding(draw: st.DrawFn, most: int) -> TileSchedule:
    """Schedules of decoding from caches in pages or together, with new keys and drafts that branch."""
    p = draw(problems(most, of_scores=False, masks=True)).asking(padded=False, key_lengths=None, pattern=None, tiles_given=False)
    n_q, page = draw(st.sampled_from([1, 3, 20])), draw(st.sampled_from([None, 16, 48]))
    new, room = draw(st.sampled_from([0, 0, 1, n_q + 2])), -(-(p.seqlen_k + 30) // (page or 1)) * (page or 1)
    p = replace(p, seqlen_q=n_q, seqlen_k=room)
    if draw(st.booleans()):
        p = p.asking(padded=True, key_lengths=draw(st.tuples(*[st.integers(0, room - new)] * p.batch)))
    cache = Cache(new, page, 0 if page is None else p.batch * room // page, draw(st.booleans()))
    device = replace(A100, sm_count=draw(st.sampled_from([1, 5, 108])))
    return plan_decode(p, device, cache, num_splits=draw(st.sampled_from([None, 1, 3, 7])), lse=draw(st.booleans()))


def schedules(kind: str, most: int) -> st.SearchStrategy[TileSchedule]:
    """Schedules of a kind."""
    return decoding(most) if kind == "decode" else packed(kind, most) if kind.startswith("packed") else fixed(kind, most)


@sweep(12, 55)
def test_random_calls_ask_for_what_theory_counts(data: st.DataObject) -> None:
    """Per tensor, to the byte, by launches that are the kernels'; and so does a replay, counted and turn by turn."""
    schedule = data.draw(schedules(data.draw(st.sampled_from(KINDS + GRADIENTS)), 300))
    found = l2.run(schedule, l2=ALL)
    assert found.asked == theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    assert found.blocks == tuple(kernel.grid for kernel in schedule.kernels())
    for name, moved in found.dram.items():
        assert moved.read_bytes <= -(-found.asked[name].read_bytes // 2) * LINE, name  # a sector for each element, at most


@sweep(3, 18)
def test_random_calls_are_served_as_lines_are(data: st.DataObject) -> None:
    """Runs of lines are no other than their lines, and no request leaves its tensor; words have a cache of their own."""
    schedule = data.draw(schedules(data.draw(st.sampled_from(KINDS + GRADIENTS)), 130))
    cache = data.draw(geometries.map(lambda made: replace(made, nbytes=8 * made.nbytes)))
    found, plain, of_words, memory = l2.run(schedule, l2=cache), Plain(cache), Plain(cache), DeviceMemory()
    for launch in l2.launches_of(schedule, "rows", memory):
        names = sorted(memory.bases, key=memory.bases.__getitem__)
        bases = np.array([memory.bases[name] for name in names])
        for _, requests in launch.played():
            columns = (requests.turn, requests.move, requests.first, requests.nbytes, requests.write)
            asked = sorted({each for each in zip(*map(np.ndarray.tolist, columns), strict=True) if each[3]})
            for _, _, first, nbytes, write in asked:
                tensor, last = np.searchsorted(bases, [first, first + nbytes - 1], "right") - 1
                assert tensor == last
                lines = of_words if names[tensor] in memory.of_words else plain
                lines.access(names[tensor], first, nbytes, bool(write))
    assert found.dram == Traffic({**plain.dram, **of_words.dram})


TOUCHED = ("fa2", "fa1", "fa3", "deterministic gradients", "decode")
N, HEADS = 512, 4
PROBLEM = Problem(1, HEADS, HEADS, N, N, 64, "float16")


def test_what_all_heads_share_is_read_once() -> None:
    """A bias comes from DRAM once where it is one for all heads, and once for each where it is not; both are asked for alike."""
    schedule = plan(PROBLEM.asking(bias=True), A100)
    shared = np.broadcast_to(np.zeros((N, N), np.float16), (1, HEADS, N, N))
    own, one = l2.run(schedule), l2.run(schedule, given={"bias": shared})
    assert own.asked == one.asked
    assert (own.dram["bias"].read_bytes, one.dram["bias"].read_bytes) == (HEADS * N * N * 2, N * N * 2)
    transposed = np.zeros((1, HEADS, N, N), np.float16).swapaxes(2, 3)  # each element in a sector of its own
    assert l2.run(schedule, given={"bias": transposed}).dram["bias"] == own.dram["bias"]


def test_indices_that_are_captured_count_by_what_they_are() -> None:
    """The values of a table decide how far apart the elements are that are loaded through it."""
    score = Score("s + w[t[k]]", w=np.zeros(N, np.float32), t=np.arange(N, dtype=np.int32))
    schedule = plan(PROBLEM.asking(score=score.form), A100)
    given = {f"score_{name}": array for name, array in score.arrays.items()}
    assert l2.run(schedule, given=given).dram["score_w"].read_bytes == 4 * N
    alike = given | {"score_t": np.full(N, 7, np.int32)}
    assert l2.run(schedule, given=alike).dram["score_w"].read_bytes == 32
    far = plan(Problem(1, 1, 1, 16, 16384, 64, "float16", score=Score("s + x[k] + x[k + n_k] + y[k]", x=ONE, y=ONE).form), A100)
    found = l2.run(far)
    assert found.asked == theory.traffic(far) and found.dram["score_x"].read_bytes == 2 * 4 * 16384


def test_pages_that_sequences_share_are_read_once() -> None:
    """K and V of a prompt that all sequences share come from DRAM once."""
    p, pages = Problem(4, 8, 2, 1, 256, 64, "float16", causal=True, padded=True), 256 // 16
    schedule = plan_decode(p, A100, Cache(0, 16, 4 * pages))
    own = np.random.default_rng(0).permutation(4 * pages).astype(np.int32).reshape(4, pages)
    common = np.where(np.arange(pages) < pages // 2, own[0], own)
    keys = [l2.run(schedule, given={"block_table": table}).dram["K"].read_bytes for table in (own, common)]
    assert keys[0] == l2.run(schedule).dram["K"].read_bytes == 4 * 2 * 256 * 64 * 2
    assert keys[1] == keys[0] * 5 // 8


def test_a_mask_of_documents_reads_their_tiles(tmp_path: Path) -> None:
    """On the command line too, with the documents in a file."""
    ids = np.repeat(np.arange(4, dtype=np.int32), N // 4)
    np.save(tmp_path / "ids.npy", ids)
    mask = Mask("d[q] == d[k]", d=ids)
    schedule = plan(PROBLEM.asking(mask_function=mask.form, pattern=Pattern.of(ids[:, None] == ids)), A100)
    found = l2.run(schedule, given={"mask_d": ids})
    assert found.asked == theory.traffic(schedule)
    assert found.asked["K"].total_bytes == HEADS * (N // schedule.block_rows) * (N // 4) * 128
    assert found.dram["mask_d"].read_bytes == ids.nbytes
    options = ("--heads", "4", "--mask-function", mask.text, "--capture", f"d={tmp_path / 'ids.npy'}", "--l2", "--json")
    result = CliRunner().invoke(main, ["predict", "--seqlen", "512", "--head-dim", "64", *options])
    told = json.loads(result.stdout)
    assert told["l2"]["tensors"] == found.as_dict()["tensors"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bias": np.zeros((N, N), np.float16)}, "given has 'bias', which this schedule does not read: it reads mask, score_w"),
        ({"mask": np.zeros((N, 7), bool)}, "mask must broadcast to"),
        ({"score_w": np.zeros(7, np.float32)}, "w must have length 512 along axis 0"),
    ],
)
def test_what_is_given_is_checked(given: dict[str, Any], said: str) -> None:
    schedule = plan(PROBLEM.asking(mask=True, score=Score("s + w[k]", w=ONE).form), A100)
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        l2.run(schedule, given=given)


TABLE = np.arange(8, dtype=np.int32).reshape(2, 4)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("block_table", TABLE + 1, "block_table must be pages from 0 to 7, got 8 for sequence 1"),
        ("block_table", TABLE.astype(float), "block_table must be of an integer dtype, got float64"),
        ("block_table", TABLE[:, :2], "block_table must be (b, pages of a sequence) = (2, 4), room for 64 keys, got (2, 2)"),
        ("block_table", TABLE[0], "block_table must be (b, pages of a sequence) with b = 2, got shape (4,)"),
        ("block_table", TABLE * 0, "block_table must give new keys a page of their own, got page 0"),
        ("tree_mask", np.ones((3, 2, 2), bool), "tree_mask must be (n_q, n_q) = (2, 2) or (b, n_q, n_q), got shape (3, 2, 2)"),
        ("tree_mask", 1, "tree_mask must be a NumPy or CuPy array, got int"),
        ("score_w", ONE.astype(np.float16), "score_w must be float32, ndim 1, as it was captured, got float16, ndim 1"),
        ("score_w", ONE[None], "score_w must be float32, ndim 1, as it was captured, got float32, ndim 2"),
        ("score_w", 3, "score_w must be a NumPy or CuPy array, got int"),
        ("score_n", ONE, "score_n must be a number, int, as it was captured, got ndarray"),
        ("score_n", 2.5, "score_n must be a number, int, as it was captured, got 2.5"),
        ("score_n", "y", "score_n must be a number, int, as it was captured, got str"),
        (
            "mask",
            TABLE > 0,
            "given has 'mask', which this schedule does not read: it reads block_table, score_n, score_w, tree_mask",
        ),
    ],
)
def test_what_decoding_is_given_is_checked(name: str, value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        l2.run(decoding_of_pages(), given={name: value})


def test_a_tree_mask_is_given_as_a_call_has_it() -> None:
    schedule = decoding_of_pages()
    own, with_heads = (l2.run(schedule, given={"tree_mask": np.ones(shape, bool)}) for shape in ((2, 2, 2), (2, 1, 2, 2)))
    assert own == with_heads
    with pytest.raises(TypeError, match=r"given must be arrays and numbers by name, in a dict, or None, got \[1\]"):
        l2.run(schedule, given=[1])  # type: ignore[arg-type]


def decoding_of_pages() -> DecodeSchedule:
    """Decoding of two sequences with four pages and new keys each, a tree, and a score that has captured w and n."""
    score = Score("s + w[k % 3] * n", w=ONE, n=2)
    p = Problem(2, 2, 1, 2, 64, 32, "float16", causal=True, padded=True, score=score.form)
    return plan_decode(p, A100, Cache(4, 16, 8, True))


def test_packed_sequences_have_one_order_and_need_their_lengths() -> None:
    p = Problem(2, 1, 1, 64, 64, 64, "float16")
    with pytest.raises(ValueError, match="fa2 of packed sequences has an order of its own"):
        l2.run(plan_varlen(p, A100), order="heads")
    with pytest.raises(ValueError, match="needs the lengths of packed sequences"):
        l2.run(plan_varlen(p, A100, totals=(100, 100)))


def test_a_table_that_scores_look_into_one_by_one_is_refused_where_it_takes_long() -> None:
    score = Score("s + t[h, q - k + n_k]", t=TWO).form
    with pytest.raises(l2.TooLong, match="plays at most"):
        l2.run(plan(Problem(1, 16, 16, 16384, 16384, 128, "float16", score=score), A100))


def touched() -> Iterator[tuple[str, TileSchedule, Score | None, Mask | None]]:
    """Calls whose arrays are looked into in every way."""
    p, rng = Problem(2, 4, 2, 150, 170, 64, "float16"), np.random.default_rng(0)
    tables = {"a": rng.random((4, 150, 170)).astype(np.float16), "w": np.ones(2, np.float32), "t": rng.random(9).astype(np.float32)}
    score = Score("s + a[h, row, k] * w[b] + t[abs(q - k) % 9]", **tables)
    documents = Mask("d[q] == d[k] and k < q + 99", d=np.sort(rng.integers(0, 3, 170)).astype(np.int32))
    seen = Mask("x[b, h, row, k]", x=rng.random((2, 4, 150, 170)) < 0.7)
    yield "fa2", plan(p.asking(mask_function=seen.form, causal=True), A100), None, seen
    yield "fa1", plan(p.asking(score=score.form, sinks=True, mask=True, bias=True), A100, "fa1", lse=True), score, None
    yield "fa3", plan(p.asking(score=score.form), H100, "fa3"), score, None
    gradients = plan_backward(p.asking(mask_function=documents.form), A100, deterministic=True)
    yield "deterministic gradients", gradients, None, documents
    p = Problem(2, 8, 2, 3, 200, 64, "float16", causal=True, padded=True, key_lengths=(150, 190))
    yield "decode", plan_decode(p, A100, Cache(4, None, 0, True), num_splits=3), None, None


@pytest.mark.parametrize("call", sample(TOUCHED, ("decode",)))
def test_what_an_execution_touches_is_what_the_model_does(call: str) -> None:
    """With a cache that holds everything, DRAM's bytes are the sectors of the kernels' own addresses."""
    schedule, score, mask = next(rest for name, *rest in touched() if name == call)
    assert isinstance(schedule, TileSchedule)
    functions = [each for each in (score, mask) if each is not None]
    given = {field(name, each.kind): array for each in functions for name, array in each.arrays.items()}
    executed_ = executed.run(schedule, score=score, mask=mask, l2=ALL)
    modelled = l2.run(knowing_mask(schedule, 0, mask), l2=ALL, given=given)
    assert modelled.asked == executed_.asked and modelled.dram == executed_.dram


def documented() -> dict[str, tuple[str, ...]]:
    """The rows of docs/l2.md's table of calls: GB asked, of DRAM, and of DRAM beside Q, K, V and O."""
    rows = re.findall(r"^\| ([^|\d][^|]*) \| (\d\S+) \| (\S+) \| (\S+) \|$", PAGE, re.MULTILINE)
    return {name: tuple(numbers) for name, *numbers in rows}


def documents(call: str) -> tuple[TileSchedule, l2.Given]:
    """Documents of 512 tokens each."""
    p, ids = Problem(1, 16, 16, 4096, 4096, 128, "float16"), np.repeat(np.arange(8, dtype=np.int32), 512)
    if "packed" in call:
        return plan_varlen(replace(p, batch=8, seqlen_q=512, seqlen_k=512), A100), {}
    pattern = Pattern.of(np.broadcast_to(ids[:, None] == ids, (1, 16, 4096, 4096)))
    if "array" in call:
        return plan(p.asking(mask=True, pattern=pattern), A100), {}
    return plan(p.asking(mask_function=Mask("d[q] == d[k]", d=ids).form, pattern=pattern), A100), {"mask_d": ids}


def decoded(call: str) -> tuple[TileSchedule, l2.Given]:
    """16 sequences of 8,192 keys."""
    p, pages = Problem(16, 32, 8, 1, 8192, 128, "float16", causal=True, padded=True), 8192 // 16
    if "pages" not in call:
        return plan_decode(p, A100), {}
    table = np.random.default_rng(0).permutation(16 * pages).astype(np.int32).reshape(16, pages)
    common = np.where(np.arange(pages) < pages // 2, table[0], table)
    return plan_decode(p, A100, Cache(0, 16, table.size)), {"block_table": common if "common" in call else table}


@pytest.mark.parametrize("call", sample(documented(), ("causal", "ALiBi")))
def test_the_page_s_calls_are_what_the_model_says(call: str) -> None:
    p = Problem(1, 16, 16, 4096, 4096, 128, "float16")
    asked: dict[str, Any] = {"causal": call == "causal", "bias": call.startswith("bias")}
    asked["score"] = Score("s - a[h] * abs(q - k)", a=ONE).form if call == "ALiBi" else None
    schedule, given = plan(p.asking(**asked), A100), {}
    if call == "bias (N, N)":
        given = {"bias": np.broadcast_to(np.zeros((4096, 4096), np.float16), (1, 16, 4096, 4096))}
    if call.startswith(("documents", "decoding")):
        schedule, given = (documents if call.startswith("documents") else decoded)(call)
    found = l2.run(schedule, given=given)
    beside = sum(found.dram[name].total_bytes for name in found.dram if name not in "QKVO")
    numbers = found.asked.total_bytes, found.dram.total_bytes, beside
    assert tuple(f"{number / 1e9:.3f}" for number in numbers) == documented()[call]


def test_sequences_may_all_be_shorter_than_a_call_allows() -> None:
    """A mask's tiles are found by as many thread blocks as the longest sequence would need."""
    problem = Problem(2, 3, 1, 130, 300, 64, "float16", mask_function=Mask("q >= k").form)
    schedule = plan_varlen(problem, A100, ((70, 120), (0, 83)))
    assert any(kernel.name == "mask_tiles" for kernel in schedule.kernels())
    assert l2.run(schedule, l2=ALL).asked == theory.traffic(schedule) == replay(schedule)
