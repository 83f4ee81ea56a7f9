"""`predict --time` and `--roofline`: the clock's times, else the planner's, with the error that is known; labelled a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.multiprocessor import clock_rate
from cupyflash.schedules import Cache, choose, decode_tiles, formulas, plan_backward, plan_decode
from cupyflash.sim import l2
from cupyflash.sim.cli import main
from cupyflash.sim.clock import sass
from cupyflash.sim.clock.known import CLOCK, PLANNER, known_error, own_error
from cupyflash.sim.clock.measured import measured
from cupyflash.sim.clock.planned import clocks
from cupyflash.sim.clock.predicted import flops_of, predicted
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.clock.roofline import Roofline, draw_roofline

A100, H100 = (Device.named(name) for name in ("A100-40GB", "H100-SXM"))
PROBLEM = Problem(1, 4, 4, 2048, 2048, 128, "float16")
SMALL = Problem(1, 4, 4, 512, 512, 64, "float16")
needs_disassembler = pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")
REASON = "no disassembler here"


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the disassemblers were missing."""

    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError(REASON)

    monkeypatch.setattr("cupyflash.sim.clock.predicted.loaded_clocks", refused)


def told(*options: str) -> Result:
    return CliRunner().invoke(main, ["predict", "--seqlen", "2048", "--head-dim", "128", "--heads", "4", *options])


def report(*options: str) -> dict[str, Any]:
    result = told("--time", "--json", *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)["time"]
    return found


# -- by the clock -------------------------------------------------------------------------------------------------------


@needs_disassembler
def test_a_call_s_time_is_that_of_its_launches_by_the_clock() -> None:
    schedule = plan(SMALL.asking(mask=True), A100)
    found, own = predicted(schedule), [(clock, clock.time()) for clock in clocks(schedule)]
    assert [each.kernel for each in found.launches] == ["mask_tiles", "fa2_forward"]
    assert found.seconds == sum(time.seconds for _, time in own) and found.source == "clock" and not found.why
    clock, longest = max(own, key=lambda pair: pair[1].seconds)
    assert found.binds == longest.binds and found.known == (known_error(clock, longest), own_error(CLOCK, "forward"))
    for name, share in found.busy.items():
        assert share * found.seconds == pytest.approx(sum(time.busy[name] * time.seconds for _, time in own))


@needs_disassembler
@pytest.mark.parametrize(("algorithm", "device"), [("fa2", A100), ("fa3", H100)])
def test_keys_and_tiles_that_there_are_not_take_no_time(algorithm: str, device: Device) -> None:
    p = replace(SMALL, heads=1, kv_heads=1, seqlen_q=128, seqlen_k=2048)
    whole, short = (predicted(plan(each, device, algorithm)) for each in (p, p.asking(padded=True, key_lengths=(128,))))
    assert short.launches and short.seconds < whole.seconds / 2 and 16 * short.flops == whole.flops
    if algorithm == "fa2":
        tiling = plan(p, device, algorithm).blocks
        kept = np.arange(-(-2048 // tiling[1])) % 8 == 0
        blocks = np.broadcast_to(kept, (-(-128 // tiling[0]), len(kept)))
        sparse = predicted(plan(p.asking(block_mask=np.ascontiguousarray(blocks)), device, algorithm, tiling))
        assert sparse.launches and sparse.seconds < whole.seconds / 2


@needs_disassembler
def test_a_cache_has_a_time_by_its_lengths_and_pages() -> None:
    full, some = (
        predicted(plan_decode(Problem(2, 8, 2, 1, 4096, 64, "float16", causal=True, padded=True, key_lengths=each), A100, cache))
        for each, cache in (((4095, 4095), Cache(1, 64, 128)), ((200, 100), Cache()))
    )
    assert full.launches and some.launches and full.seconds > some.seconds
    assert full.flops == 2 * 8 * 4096 * 2 * 128 and some.flops == 8 * 300 * 2 * 128


@needs_disassembler
def test_predict_tells_it_and_draws_the_roofline(tmp_path: Path) -> None:
    file = tmp_path / "roofline.svg"
    options = "--time", "--seqlen", "512", "--head-dim", "64"
    result = told(*options, "--roofline", str(file), "--json")
    assert result.exit_code == 0 and file.stat().st_size > 1000
    schedule = plan(SMALL, A100)
    found, shown = predicted(schedule), json.loads(result.stdout)["time"]
    assert shown["modelled"] is True and shown["source"] == "clock" and shown["seconds"] == found.seconds
    assert shown["binds"] == found.binds and shown["busy"] == found.busy and shown["flops_a_second"] == found.rate
    assert [each["kind"] for each in shown["known_errors"]] == [each.kind for each in found.known]
    assert [each["kernel"] for each in shown["launches"]] == ["fa2_forward"]
    assert shown["intensities"]["DRAM"] == found.flops / l2.run(schedule).dram.total_bytes
    text = " ".join(told(*options).stdout.split())
    assert f"predicted: {found.seconds * 1e6:,.1f} us" in text and f"by the clock; {found.binds} binds" in text
    assert all(" ".join(f"Known error: {each}.".split()) in text for each in found.known) and "fa2_forward" in text
    assert "time" not in json.loads(told("--json").stdout)


# -- by the planner's formulas ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("device", [A100, H100])
def test_without_the_clock_the_planner_s_formulas_tell_it_with_their_error(device: Device) -> None:
    for algorithm in ("fa2", "fa3") if device is H100 else ("fa2",):
        found = predicted(plan(PROBLEM, device, algorithm))
        assert found.seconds * clock_rate(device) == pytest.approx(formulas.clocks(PROBLEM, device, algorithm))
        assert (found.source, found.why, found.launches, found.binds) == ("planner", REASON, (), None)
        assert found.known == (own_error(PLANNER, "forward"),) and found.known[0].figures
    back = predicted(plan_backward(PROBLEM, device))
    assert back.seconds == formulas.backward_seconds(PROBLEM, device) and back.known == (own_error(PLANNER, "backward"),)
    split = Problem(1, 32, 8, 1, 8192, 128, "float16", causal=True, padded=True)
    assert predicted(plan_decode(split, device, Cache())).seconds == pytest.approx(decode_tiles.choose(split, device).seconds)


@needs_disassembler
def test_a_run_that_takes_too_long_is_left_to_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyflash.sim.clock.predicted.MOST_RUN", 1000)
    found = predicted(plan(SMALL, A100))
    assert found.source == "planner" and "runs more than 1,000 instructions" in found.why


@pytest.mark.usefixtures("no_clock")
def test_its_text_says_so() -> None:
    text = " ".join(told("--time").stdout.split())
    assert f"by the planner's formulas, which know of no mask and no length not by the clock: {REASON}" in text
    assert f"Known error: {own_error(PLANNER, 'forward')}." in text and "calls of ours" in text


@pytest.mark.usefixtures("no_clock")
def test_an_algorithm_without_a_formula_needs_the_clock() -> None:
    result = told("--algorithm", "fa1", "--time")
    assert result.exit_code == 2 and f"no time for 'fa1': {REASON}" in result.stderr


def test_auto_takes_what_the_formulas_have_fastest() -> None:
    p = replace(PROBLEM, heads=16, kv_heads=16)
    needed = {name: formulas.clocks(p, H100, name) for name in ("fa2", "fa3")}
    assert choose(p, H100).algorithm == min(needed, key=lambda name: needed[name])


def test_flop_are_those_of_the_scores_that_are_seen() -> None:
    p = Problem(2, 4, 2, 100, 100, 64, "float16", causal=True)
    assert flops_of(plan(p, A100)) == 2 * 4 * (100 * 101 // 2) * 2 * 128
    assert flops_of(plan_backward(p, A100)) == 2.5 * flops_of(plan(p, A100))


# -- the roofline -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_clock")
def test_the_picture_has_the_ridges_and_the_points() -> None:
    schedule, rates = plan(PROBLEM, A100), ChipRates.of(A100)
    found, behind = Roofline.of(schedule, predicted(schedule)), l2.run(schedule)
    assert found.intensities["L2"] == flops_of(schedule) / behind.asked.total_bytes
    assert found.bandwidths == {"DRAM": 1555.2e9, "L2": rates["l2.rate"] * rates["clock.boost"] * 1e6}
    axes = draw_roofline(found, "a problem", "A100-40GB").axes[0]
    drawn = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1]
    for intensity in found.intensities.values():
        assert (intensity, found.rate) in drawn
    assert (found.ridge, 312e12) in drawn and found.ridge == pytest.approx(312e12 / 1555.2e9)
    unknown = plan(PROBLEM, replace(A100, hbm_bandwidth=None))
    with pytest.raises(ValueError, match="are not known"):
        Roofline.of(unknown, predicted(unknown))


# -- beside measurements ------------------------------------------------------------------------------------------------


CASE = {"pass": "forward", "dtype": "float16", "d": 128, "n": 2048, "causal": False, "batch": 1, "heads": 4}

MEASURED = {"kind": "measurement", **CASE, "implementation": "fa2", "seconds": 1e-4, "spread_s": 1e-6, "right": True}


def results(folder: Path, *rows: dict[str, Any], device: str = "NVIDIA A100-SXM4-40GB", simulated: bool = False) -> None:
    """A benchmark's file of the 108 multiprocessors of an A100."""
    chip = {"name": device, "sm_count": 108}
    run = {"kind": "run", "device": chip, "date": "2026-12-01", "commit": "abc", "simulated": simulated}
    text = "".join(json.dumps(line) + "\n" for line in (run, *(MEASURED | row for row in rows)))
    (folder / f"{len(list(folder.iterdir()))}.jsonl").write_text(text + '{"kind": "cut o')


@pytest.mark.usefixtures("no_clock")
def test_what_was_measured_stands_beside_the_model_with_its_error(tmp_path: Path) -> None:
    size = "{}x{}".format(*(plan(PROBLEM, A100).tiling.used.block_rows, plan(PROBLEM, A100).block_cols))
    results(tmp_path, {"tile": size}, {"tile": "16x16"})
    found = report("--results", str(tmp_path))
    (row,) = found["measured"]
    assert row["model_error"] == found["seconds"] / 1e-4 - 1 and row["file"] == "0.jsonl" and row["date"] == "2026-12-01"
    text = " ".join(told("--time", "--results", str(tmp_path)).stdout.split())
    assert "measured: 100.0 us (quartiles 1.0 apart) by fa2 on 2026-12-01, commit abc (0.jsonl)" in text
    assert f"predicted is {row['model_error']:+.0%} from that" in text


@pytest.mark.usefixtures("no_clock")
def test_only_right_figures_of_the_same_case_and_chip_are_taken(tmp_path: Path) -> None:
    wrong = ({"right": False}, {"invalid": "too fast"}, {"d": 64}, {"causal": True}, {"heads": 8}, {"implementation": "torch"})
    results(tmp_path, *wrong, {"pass": "backward"}, {"tile": "1x1"})
    results(tmp_path, {}, device="NVIDIA H200")
    results(tmp_path, {}, simulated=True)
    assert measured(plan(PROBLEM, A100), tmp_path) == ()
    results(tmp_path, {"exposed": True})
    (found,) = measured(plan(PROBLEM, A100), tmp_path)
    assert found.exposed and found.seconds == 1e-4
    assert measured(plan(PROBLEM.asking(sinks=True), A100), tmp_path) == () == measured(plan(PROBLEM, H100), tmp_path)
    text = told("--time", "--seqlen-k", "1024", "--results", str(tmp_path)).stdout
    assert "nothing was measured of this problem" in " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--results", "."), "--results is for --time and --roofline"),
        (("--seqlen-k", "0", "--time"), "this one computes nothing"),
        (("--seqlen-k", "0", "--roofline", "picture.svg"), "this one computes nothing"),
        (("--roofline", "picture.txt"), "must end in .png or .svg or .pdf"),
    ],
)
def test_what_has_no_times_is_refused(options: tuple[str, ...], said: str) -> None:
    result = told(*options)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "line 1: not a benchmark's record"),
        ("[]", "line 1: not a benchmark's record"),
        ("3", "line 1: not a benchmark's record"),
        ("", "line 1: not JSON: ''"),
        (json.dumps(MEASURED | {"seconds": 0}), "line 2: not a benchmark's measurement: ValueError('seconds = 0.0')"),
        (json.dumps(MEASURED | {"seconds": None}), "line 2: not a benchmark's measurement"),
        (json.dumps({"kind": "measurement", **CASE, "seconds": 1}), "line 2: not a benchmark's measurement: KeyError"),
    ],
)
def test_a_file_of_another_kind_is_told_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    chip = {"name": "A100-40GB", "sm_count": 108}
    run = {"kind": "run", "device": chip, "date": "2026-12-01", "commit": "abc", "simulated": False}
    first = json.dumps(run) + "\n" if "measurement" in line else ""
    (tmp_path / "a.jsonl").write_text(f"{first}{line}\n" + '{"kind": "end"}\n')
    result = told("--time", "--results", str(tmp_path))
    assert result.exit_code == 2 and f"a.jsonl, {said}" in result.stderr and result.stderr.count("\n") == 1
