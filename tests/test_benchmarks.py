"""Benchmarks that need no GPU: docs/performance.md, host time, planning (the others: test_timing*.py, test_on_gpu.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

from cupyflash import Device, kernels_cu
from cupyflash.schedules import choose, choose_backward, plan, plan_backward
from cupyflash.sim import ptx
from cupyflash.sim.theory.forms import split_bytes

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}

sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a script that Python runs there


def load(name: str) -> types.ModuleType:
    """A file of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def performance() -> types.ModuleType:
    return load("performance")


LARGER = (64, 64, 64), (64, 128, 32)
PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("name", ["tiles", "warpgroups", "split", "lazy", "decode", "calls", "auto", "choices of tiles"])
def test_the_page_on_performance_says_what_the_code_does(performance: types.ModuleType, name: str) -> None:
    lines = list(performance.TABLES[name]())
    assert len(lines) > 4 and "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"]) in PAGE


def test_the_page_of_measured_times_says_what_is_on_file() -> None:
    page, measured = (ROOT / "docs" / "measured.md").read_text(), load("measured")
    assert all(len(measured.cases(name)) > 4 for name in ("forward", "backward", "decode"))
    assert measured.written(page) == page


def test_stalls_are_read_from_nsight_compute_s_page() -> None:
    """As it prints them: a line with the kernel's name before each table, and perhaps another page behind."""
    head = '"Address","Source","# Samples","Instructions Executed","stall_wait","stall_selected","stall_wait (Not Issued)"'
    rows = '"0x10","   FADD R1, R2, R3","30","8","20","10","20"', '"0x20","   EXIT","10","8","0","10","0"'
    page = "\n".join(
        ["==PROF== noise", '"Kernel Name","one",', head, *rows, '"Kernel Name","two",', head, rows[1], '"ID","x"', '"0","y"']
    )
    stalls = load("stalls")
    (name, lines), (other, _) = stalls.kernels(page)
    assert (name, other) == ("one", "two") and lines[0].reasons == {"wait": 20, "selected": 10}
    every, first = stalls.table(lines, 0.5)
    assert every == "40 samples: wait 50%, selected 50%" and "75.00%" in first and "FADD R1, R2, R3" in first


def test_faults_are_seeded_in_the_place_that_the_list_names(tmp_path: Path) -> None:
    faults = load("programs/faults")
    every = tomllib.loads((ROOT / "benchmarks" / "programs" / "faults.toml").read_text())["fault"]
    assert len(every) > 12 and all({"what", "program", "file", "old", "new", "kind", "line"} <= set(each) for each in every)
    fault = {"program": "a/b", "file": "c.cu", "old": "sync();", "new": "", "nth": 1, "kind": "race"}
    (tmp_path / "Samples" / "a" / "b").mkdir(parents=True)
    (tmp_path / "Samples" / "a" / "b" / "c.cu").write_text("sync();\nx = 1;\nsync();\n")
    folder = faults.seeded(fault, tmp_path, tmp_path / "copy")
    assert (folder / "c.cu").read_text() == "sync();\nx = 1;\n\n"
    found = {"kind": "race", "source": ["/elsewhere/c.cu", 2], "other": None, "inlined_at": [["/no/such.cu", 7]]}
    assert list(faults.places(found, folder)) == ["race, c.cu:2: x = 1;"]
    with pytest.raises(ValueError, match="1 times before"):
        faults.seeded(fault | {"old": "x = 1;"}, tmp_path, tmp_path / "again")


def split_counted(
    warps: int, split_k: bool, rows: int, cols: int, d: int, tiles: int = 3
) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
    """Bytes of shared memory a tile as the PTX machine counts them for split.cu (ldmatrix, ld, st), its O, and the right one."""
    constants = {"ELEMENT": "__half", "HEAD_DIM": d, "VALUE_DIM": d, "BR": rows, "BC": cols, "SPLIT_K": int(split_k)}
    options = (
        "-arch=compute_80",
        "-ftz=true",
        f"-I{kernels_cu.DIRECTORY}",
        *(f"-D{name}={value}" for name, value in constants.items()),
    )
    module = ptx.Module.from_source((ROOT / "benchmarks" / "split.cu").read_text(), options=options)
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((n, d)).astype(np.float16) for n in (rows, tiles * cols, tiles * cols))
    out, counts = np.zeros((rows, d), np.float32), []
    for n in (1, tiles):
        launch = module.launch("split", 1, 32 * warps, {"Q": q, "K": k, "V": v, "O": out, "tiles": n})
        if launch.findings:
            raise RuntimeError(f"split.cu has a fault: {launch.findings[0]}")
        counts.append({kind: launch.counters.shared_kind(kind).bytes for kind in ("ldmatrix", "ld", "st")})
    a_tile = {kind: (counts[1][kind] - counts[0][kind]) // (tiles - 1) for kind in counts[0]}
    scores = q.astype(np.float64) @ k.astype(np.float64).T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return a_tile, out, weights / weights.sum(1, keepdims=True) @ v.astype(np.float64)


@pytest.mark.parametrize(("rows", "cols", "d"), [(64, 64, 32), *(pytest.param(*sizes, marks=pytest.mark.wide) for sizes in LARGER)])
@pytest.mark.parametrize("split_k", [False, True])
def test_shared_memory_of_both_splits_is_the_closed_form_to_the_byte(
    performance: types.ModuleType, split_k: bool, rows: int, cols: int, d: int
) -> None:
    counted, out, expected = split_counted(performance.WARPS, split_k, rows, cols, d)
    form = split_bytes(rows, cols, d, performance.WARPS)["split-K" if split_k else "split-Q"]
    assert counted["ldmatrix"] == form["Q"] + form["K and V"]
    assert counted["ld"] + counted["st"] == form["O"] + form["maxima"]
    assert np.abs(out - expected).max() < 2e-3


@pytest.mark.wide
def test_our_kernel_moves_what_split_q_says(performance: types.ModuleType) -> None:
    """A tile more of K and V costs the closed form's bytes, in the real kernel."""
    from cupyflash import Device, Problem, plan
    from cupyflash.sim import execute
    from cupyflash.sim.numbers.yardstick import draw

    device, moved = Device.named("A100-40GB"), []
    for n in (128, 192):
        problem = Problem(1, 1, 1, 128, n, 64, "float16")
        schedule = plan(problem, device, "fa2", (128, 64))
        tile = schedule.candidate.config  # type: ignore[attr-defined]
        assert not tile.q_in_regs
        (counters,) = execute(schedule, *draw(problem)).counters.values()
        moved.append(counters.shared_kind("ldmatrix").bytes)
        assert counters.shared_kind("ldmatrix").wavefronts == counters.shared_kind("ldmatrix").ideal_wavefronts
    form = split_bytes(128, 64, 64, tile.warps)["split-Q"]
    assert moved[1] - moved[0] == form["Q"] + form["K and V"]


@pytest.mark.wide
def test_host_time_is_measured_with_arrays_of_cupy_where_no_gpu_is() -> None:
    pytest.importorskip("cuda.pathfinder")
    pytest.importorskip("cupy")
    told = subprocess.run([sys.executable, ROOT / "benchmarks" / "host.py", "--runs", "1"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert re.findall(r"compiling for (sm_\d+), d (\d+)", told.stdout) == [
        (sm, d) for sm in ("sm_80", "sm_90") for d in ("64", "128")
    ]
    assert all(f"\n{call} " in told.stdout for call in ("causal", "causal, out given", "fa1, causal", "varlen, causal"))
    assert re.search(r"conversion of a struct of \d+ bytes: -?[0-9.]+ us", told.stdout)


def test_a_first_call_s_host_time_is_measured_without_a_gpu() -> None:
    pytest.importorskip("cupy")
    command = [sys.executable, ROOT / "benchmarks" / "host.py", "--first-call"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout)
    assert set(told) == {"import", "first_call"} and min(told.values()) > 0


def test_planning_s_figures_are_of_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points; what is timed is counted, the time itself is not looked at."""
    planning = load("planning")
    swept = []
    sweep = planning.sweep
    monkeypatch.setattr(planning, "sweep", lambda *arguments: swept.append(sweep(*arguments)))
    found = planning.points(runs=1, count=20)
    assert list(found) == ["over sram", "over sram, causal", "over seqlen", "over seqlen, causal"]
    assert [len(each.points) for each in swept] == [20] * 4 and all(seconds >= 0 for seconds in found.values())
    assert set(planning.replays(runs=1, tokens=4096)) == {"fa1", "fa2", "standard"}


@pytest.mark.wide
def test_calls_are_timed_and_kept_one_figure_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter call than the table's: twice the same figure, by the device's rates below its peak, and one row of the table."""
    calls = load("calls")
    monkeypatch.setattr(calls, "KEPT", tmp_path / "calls.json")
    monkeypatch.setattr(calls, "LENGTH", 512)
    for _ in range(2):
        assert calls.main(["forward", "A100-40GB", "64", "full", "--write"]) == 0
    [one] = calls.read()
    assert one.call.n == 512 and 0 < one.tflops < 312 and one.tflops == pytest.approx(one.call.flops / one.seconds / 1e12)
    assert len(list(calls.table())) == 3


def test_calls_have_their_measured_times_beside_them(tmp_path: Path) -> None:
    """The newest right figure of a real device, in either half type, of the same case."""
    calls = load("calls")
    call = calls.Call("forward", "fa2", "H100-SXM", 64, "causal", 4096)
    run = {"kind": "run", "simulated": False, "date": "2026-11-27", "device": {"name": "NVIDIA H100 80GB HBM3", "sm_count": 132}}
    line = {
        "kind": "measurement",
        "pass": "forward",
        "d": 64,
        "n": 4096,
        "causal": True,
        "batch": 4,
        "heads": 32,
        "dtype": "bfloat16",
    }
    ours, torch = line | {"implementation": "fa2", "seconds": 2e-3}, line | {"implementation": "torch flash", "seconds": 4e-3}
    wrong = [torch | {"seconds": 1e-3, "right": False}, ours | {"causal": False}, ours | {"dtype": "float32"}, ours | {"n": 1024}]
    older = [run | {"date": "2026-11-26"}, ours | {"seconds": 9e-3}, run | {"simulated": True}, ours | {"seconds": 8e-3}]
    lines = [run, line | {"implementation": "fa2"}, ours, torch, *wrong, *older]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert calls.measured_seconds(call, tmp_path) == {"fa2": 2e-3, "torch flash": 4e-3}
    for whose, over in ((calls.OURS, "1.50 of fa2's"), ("FlashAttention-2", "0.75 of torch flash's")):
        figure = calls.Figure(call, whose, 3e-3, 100.0, "tensor", "tensor cores")
        assert figure.beside(tmp_path) == f"measured: fa2 2,000 us, torch flash 4,000 us, the figure is {over}"
    other = calls.Figure(calls.Call("forward", "fa3", "H200", 64, "full", 4096), calls.OURS, 1.0, 1.0, "MUFU", "warp roles")
    assert other.beside(tmp_path) == ""


def test_ways_of_a_call_begin_with_the_one_that_is_taken() -> None:
    auto = load("auto")
    ways = {question: dict(question.ways()) for question in auto.questions() if question.device != "RTX 5090"}
    for question, named in ways.items():
        first, p, device = next(iter(named)), question.problem, Device.named(question.device)
        if question.of == auto.ALGORITHMS:
            choice = (choose if question.direction == auto.FORWARD else choose_backward)(p, device)
            assert first == choice.algorithm and all(schedule.algorithm == name for name, schedule in named.items())
        elif question.of != "decode":
            assert len(named) == 1 + auto.OTHERS and [auto.tile_of(each) for each in named.values()] == list(named)
            made = plan if question.direction == auto.FORWARD else plan_backward
            assert first == auto.tile_of(made(p, device, question.of))
        else:
            assert [schedule.splits for schedule in named.values()] == [int(name.split()[0]) for name in named]


def test_a_choice_that_is_slower_than_the_clock_s_error_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto = load("auto")
    monkeypatch.setattr(auto, "KEPT", tmp_path / "auto.json")
    [first, second, *_] = (each for each in auto.questions() if each.of == auto.ALGORITHMS)
    auto.keep(auto.Answer(second, {"fa2": 2e-6, "fa3": 1e-6}, {"fa2": 3e-6, "fa3": 4e-6}))
    for seconds in (9.0, 1.0):
        auto.keep(auto.Answer(first, {"fa3": seconds, "fa2": 0.99}, {}))
    assert [each.question for each in auto.read()] == [first, second]
    _, _, *rows = auto.table(algorithms=True)
    assert [row.split(" | ")[-2:] for row in rows] == [
        ["fa3 1,000,000; fa2 990,000", "1% |"],
        ["fa2 2 (3); fa3 1 (4)", "**100%** |"],
    ]
    assert len(list(auto.table(algorithms=False))) == 2


@pytest.mark.wide
def test_ways_are_timed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a short call: decoding is faster than rows of a tile, and the formulas say so too."""
    auto = load("auto")
    monkeypatch.setattr(auto, "KEPT", tmp_path / "auto.json")
    monkeypatch.setattr(auto, "ROWS", (("algorithms", "forward", ("A100-40GB",), (((1, 8, 2), 16, 2048, 64),)),))
    assert auto.main(["algorithms", "--write"]) == 0
    [one] = auto.read()
    assert list(one.clock) == list(one.formula) == ["decode", "fa2"] and one.least == "decode" and one.slower == 0


@pytest.mark.wide
def test_imports_are_those_behind_numpy() -> None:
    listed = (
        "import time: self [us] | cumulative | imported package\nimport time:       900 |        900 | numpy\n\n"
        "import time:       250 |        250 |     cupyflash.request.problem\nimport time:        50 |        300 |   cupyflash\n"
    )
    assert load("planning").module_times(listed) == {"cupyflash.request.problem": 250, "cupyflash": 50}
    found = load("planning").imports(1)
    assert found["seconds"] > 0 and 0 < found["modules"] < 10 and not any(name.startswith("numpy") for name in found["slowest_us"])


@pytest.mark.wide
def test_the_forward_that_is_timed_is_right_and_clean() -> None:
    pytest.importorskip("cupy")
    found, error = load("simulator").fa3(300)
    assert found.findings == () and error < 1e-3
