"""Traces: moves of tiles sum to the theory, lie in their tensors, make the tiles of S that the schedule visits, in one order."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.request.options import Pattern
from cupyflash.schedules import TileSchedule, plan_backward
from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.trace import Span, TileMove, Trace, inner_of, refuse_longer, trace, with_scores
from cupyflash.sim.trace.lines import BACKWARD, FORWARD
from cupyflash.sim.trace.page import COLUMNS, masked, page, report, seen
from suites import wide

A100, H100 = Device.named("A100-40GB", sram="64KB"), Device.named("H100-SXM")
SMALL = Problem(1, 2, 1, 40, 56, 16, "float16", causal=True)
BLOCKS = 16, 32
pytest.importorskip("cupy")


def forward(algorithm: str, device: Device = A100, **asked: Any) -> TileSchedule:
    problem = replace(SMALL.asking(**{n: v for n, v in asked.items() if n != "dtype"}), dtype=asked.get("dtype", "float16"))
    return plan(problem, device, algorithm, None if algorithm in ("decode", "fa3") else BLOCKS, lse=True)


def backward(algorithm: str, **how: bool) -> TileSchedule:
    return plan_backward(SMALL, A100, algorithm, (16, 16) if algorithm != "fa2" else None, **how)


SCHEDULES = {
    "standard": lambda: plan(SMALL, A100, "standard", (16, 16), lse=True),
    "fa1": lambda: forward("fa1"),
    "fa2": lambda: forward("fa2"),
    "fa3": lambda: forward("fa3", H100),
    "decode": lambda: plan(replace(SMALL, seqlen_q=3), A100, "decode"),
    "window": lambda: forward("fa1", causal=False, window=(20, 4)),
    "no keys for some rows": lambda: forward("fa1", causal=False, window=(0, 0), padded=True, key_lengths=(7,)),
    "lengths": lambda: forward("fa2", padded=True, key_lengths=(33,)),
    "a mask, a bias, sinks": lambda: forward("fa2", mask=True, bias=True, sinks=True),
    "float32": lambda: forward("fa1", dtype="float32"),
    "standard backward": lambda: backward("standard"),
    "fa1 backward": lambda: backward("fa1"),
    "fa2 backward": lambda: backward("fa2"),
    "fa2 backward, deterministic": lambda: backward("fa2", deterministic=True),
}
FEW = ("fa1", "fa2")


@pytest.mark.parametrize("name", [name if name in FEW else wide(name) for name in SCHEDULES])
def test_the_moves_are_what_the_theory_counts(name: str) -> None:
    schedule = SCHEDULES[name]()
    made = trace(schedule)
    assert made.traffic == made.executed == theory.traffic(made.schedule) and made.agrees and not made.problems
    for move in made.moves:
        slabs, rows, cols = made.tensors[move.tensor].shape
        assert (
            0 <= move.slab < slabs and 0 <= move.rows.first < move.rows.end <= rows and 0 <= move.cols.first < move.cols.end <= cols
        )
        places = (move.rows.end - move.rows.first) * (move.cols.end - move.cols.first) * made.tensors[move.tensor].itemsize
        of_tiles = move.tensor not in ("sinks", "key_lengths", "cache_seqlens", "mask", "bias")  # these in parts, or more than once
        assert move.nbytes == places if of_tiles else move.nbytes > 0
    launches = [(move.launch, move.block) for move in made.moves]
    assert launches == sorted(launches)
    assert_scores(made)
    told = report([made], [name], name)
    (player,) = told["players"]
    assert all(len(row) == len(COLUMNS) for row in player["moves"])
    assert (
        sum(row[COLUMNS.index("bytes")] for row in player["moves"])
        == player["total_bytes"]
        == theory.traffic(made.schedule).total_bytes
    )
    unlit = {player["launches"][row[0]]["kernel"] for row in player["moves"] if row[COLUMNS.index("line")] < 0}
    assert unlit <= {"mask_tiles"}  # which no paper has


def assert_scores(made: Trace) -> None:
    """The tiles of S that are made are those that the schedule visits, each as often as there are launches that make them."""
    s, p = made.schedule, made.schedule.problem
    makers = {number for number in range(len(made.kernels)) if inner_of(made.walk(number))}
    for number in makers:
        constants = dict(made.kernels[number].constants)
        rows, cols = (int(constants.get(side, size)) for side, size in zip(("BR", "BC"), (s.block_rows, s.block_cols), strict=True))
        tiles = [each for move in made.moves if move.launch == number for each in move.scores]
        assert len(tiles) == len(set(tiles))
        found = {(each.head, each.rows.first // rows, each.cols.first // cols) for each in tiles}
        assert found == {(head, *tile) for head in range(p.head_count) for tile in visited(s, rows, cols)}


def visited(s: TileSchedule, rows: int, cols: int) -> set[tuple[int, int]]:
    """(i, j) of one head: all of standard attention's, else where some row sees a key."""
    p = s.problem
    keys = p.options.key_lengths[0] if p.options.key_lengths else p.seqlen_k
    seen = p.sees(np.arange(p.seqlen_q), keys) | (s.algorithm == "standard")
    return {(row // rows, key // cols) for row, key in np.argwhere(seen).tolist()}


def test_the_order_is_the_same_each_time() -> None:
    one, two = (trace(forward("fa2")) for _ in range(2))
    assert one.moves == two.moves and page(report([one], ["a"], "t")) == page(report([two], ["a"], "t"))


def moved(tensor: str, first: int) -> TileMove:
    return TileMove(0, 0, tensor, False, 0, Span(first, first + 16), Span(0, 8), 256, "k.cu:1")


def test_a_tile_of_s_begins_with_the_later_of_its_q_and_k() -> None:
    def made(inner: str | None, *tiles: tuple[str, int], first: bool = False) -> list[tuple[int, int, int]]:
        found = with_scores(inner, [moved(*tile) for tile in tiles], first=first)
        return [(at, each.rows.first, each.cols.first) for at, move in enumerate(found) for each in move.scores]

    assert made("K", ("Q", 0), ("K", 0), ("V", 0), ("K", 16)) == [(1, 0, 0), (3, 0, 16)]
    assert made("Q", ("K", 0), ("Q", 0), ("Q", 16), ("K", 16), ("Q", 0)) == [(1, 0, 0), (2, 16, 0), (4, 0, 16)]
    rows_of_two_heads = ("K", 16), ("Q", 0), ("Q", 16), ("K", 0)
    assert made("K", *rows_of_two_heads, first=True) == [(1, 0, 16), (2, 16, 16), (3, 0, 0), (3, 16, 0)]
    two_row_blocks = ("K", 16), ("Q", 0), ("V", 16), ("K", 0), ("K", 32), ("Q", 48), ("K", 16)
    assert made("K", *two_row_blocks, first=True) == [(1, 0, 16), (3, 0, 0), (5, 48, 32), (6, 48, 16)]
    assert made(None, ("K", 0), ("Q", 0)) == []


def test_what_is_too_long_for_a_page_is_refused_before_it_runs() -> None:
    schedule = plan(Problem(1, 4, 4, 2048, 2048, 64, "float16"), Device.named("A100-40GB", sram="16KB"), "fa1")
    with pytest.raises(ValueError, match=r"at most 20,000 moves of tiles; fa1 makes about [\d,]+ or more here"):
        refuse_longer(schedule)


def test_what_is_masked_is_drawn_score_by_score() -> None:
    bits = np.random.default_rng(0).random((2, 1, 40, 56)) < 0.5
    options = {"causal": True, "padded": True, "key_lengths": (56, 20), "mask": True, "pattern": Pattern.of(bits)}
    problem = replace(SMALL, batch=2).asking(**options)
    told = masked(partial(seen, problem))
    assert [told["mask_of"][head] for head in range(4)] == [0, 0, 1, 1]
    for batch, ends in enumerate(told["masks"]):
        drawn = np.zeros((40, 56), bool)
        for row, own in enumerate(ends):
            for first, end in zip(own[::2], own[1::2], strict=True):
                drawn[row, first:end] = True
        kept = np.tri(40, 56, 16, dtype=bool) & (np.arange(56) < (56, 20)[batch]) & bits[batch, 0]
        assert np.array_equal(drawn, ~kept)


def test_every_kernel_of_an_algorithm_has_its_step() -> None:
    for algorithms, planned in ((FORWARD, lambda a: plan(SMALL, H100, a)), (BACKWARD, lambda a: plan_backward(SMALL, A100, a))):
        for name, algorithm in algorithms.items():
            numbers = {number for number, _, _ in algorithm.lines}
            assert len(numbers) == len(algorithm.lines)
            schedule = planned(name)
            for kernel in schedule.kernels():
                assert kernel.name in algorithm.steps, kernel.name
            for step in algorithm.steps.values():
                assert {*step.reads.values(), *step.writes.values(), *step.scores} <= numbers
                assert step.first is None or step.first in numbers


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments])


def test_the_command_writes_one_page_that_asks_the_network_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    sizes = ("--seqlen", "40", "--seqlen-k", "56", "--head-dim", "16", "--heads", "2", "--kv-heads", "1", "--causal")
    how = ("--sram", "64KB", "--tiling", "16x32", "--lse", "--algorithms", "fa1,fa2")
    result = command(*sizes, *how, "--html", str(file), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    text = file.read_text(encoding="utf-8")
    inside = text.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    assert json.loads(inside) == told and [each["algorithm"] for each in told["players"]] == ["fa1", "fa2"]
    outside = text.replace(inside, "").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in outside.replace("http-equiv", "") and "default-src 'none'" in outside


@pytest.mark.parametrize(
    ("arguments", "names", "backward"),
    [
        (("fa2,fa2-backward",), ["FlashAttention-2", "FlashAttention-2's backward"], [False, True]),
        wide(("fa1,fa2-backward-deterministic",), ["FlashAttention", "deterministic FlashAttention-2's backward"], [False, True]),
        wide(("fa2,fa2-backward,fa1", "--backward"), ["FlashAttention-2", "FlashAttention"], [True, True]),
    ],
)
def test_forward_and_backward_are_on_one_page(arguments: tuple[str, ...], names: list[str], backward: list[bool]) -> None:
    sizes = ("--seqlen", "16", "--head-dim", "16", *(() if "--backward" in arguments else ("--lse",)))
    result = command(*sizes, "--json", "--algorithms", *arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [(each["name"], each["backward"]) for each in told["players"]] == list(zip(names, backward, strict=True))
    assert told["title"].endswith("backward") == all(backward)


def test_of_those_by_default_what_cannot_run_the_problem_is_left_out() -> None:
    """Heads wider than 256 are fa2's alone; asked for by its name, another is refused."""
    wide = ("trace", "--seqlen", "16", "--head-dim", "264", "--json")
    result = CliRunner().invoke(main, list(wide))
    assert result.exit_code == 0 and [each["algorithm"] for each in json.loads(result.stdout)["players"]] == ["fa2"]
    assert result.stderr.count("left out: head_dim must be between 1 and 256") == 2
    assert CliRunner().invoke(main, [*wide, "--algorithms", "fa1,fa2"]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--algorithms", "fa3-backward"), "fa3's backward does not run this"),
        (("--algorithms", "fa3-backward-deterministic"), "got 'fa3-backward-deterministic'"),
        (("--algorithms", "fa1,fa9"), "got 'fa9'"),
        (("--algorithms", "decode", "--backward"), "got 'decode'"),
        (("--algorithms", "fa1", "--algorithm", "fa2"), "--algorithm and --algorithms"),
        (("--seqlen", "4096", "--sram", "16KB"), "at most 20,000 moves of tiles"),
        (("--seqlen", "0", "--algorithms", "fa1", "--html", "out.html"), "FlashAttention moves nothing"),
        (("--algorithms", "fa2-backward", "--lse"), "--lse is for the forward pass"),
        (("--html", "out.txt"), "must end in .html or .htm"),
        (("--tiling", "paper", "--algorithms", "fa1"), "the fa1 kernel runs blocks in steps of 16"),
    ],
)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2 and says in result.output and "Traceback" not in result.output


DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.wide
def test_the_screenshot_is_of_today_s_moves() -> None:
    spec = importlib.util.spec_from_file_location("screenshot", DOCS / "screenshot.py")
    assert spec is not None and spec.loader is not None
    screenshot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screenshot)
    assert screenshot.COMMAND in (DOCS / "trace.md").read_text() and screenshot.COMMAND in (DOCS.parent / "README.md").read_text()
    content = (DOCS / "trace.png").read_bytes()
    drawn = content.split(b"tEXt" + screenshot.KEY.encode() + b"\0")[1][:64].decode()
    assert drawn == screenshot.digest(screenshot.told()), "python docs/screenshot.py draws it anew"
