"""The benchmarks without a GPU: the whole path on the simulated device with a clock of our own."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.schedules import BACKWARD_ALGORITHMS

ROOT = Path(__file__).resolve().parent.parent
TICK = 0.05  # seconds between two looks at the clock; so long that each call is repeated a few times only


def load(name: str) -> types.ModuleType:
    """A file of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def forward() -> types.ModuleType:
    return load("forward")


@pytest.fixture(scope="module")
def backward() -> types.ModuleType:
    return load("backward")


@pytest.mark.parametrize(("name", "cost"), [("forward", 1), ("backward", 2.5)])
def test_a_dry_run_measures_every_case_and_writes_the_file(
    request: pytest.FixtureRequest, name: str, cost: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks, benchmark = itertools.count(), request.getfixturevalue(name)
    assert benchmark.main(["--dry-run", "--out", str(tmp_path)], clock=lambda: next(ticks) * TICK) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("simulated-A100-40GB-") and path.name.endswith("-backward.json") == (name == "backward")
    result = json.loads(path.read_text())
    assert result["simulated"] and result["commit"] and result["versions"]["numpy"] == np.__version__
    rows = result[name]
    ours = {"fa2", "fa1", "standard"} if name == "forward" else {*BACKWARD_ALGORITHMS, "fa2 deterministic"}
    assert {row["implementation"]: row["ours"] for row in rows} == dict.fromkeys(ours, True) | {"numpy": False}
    assert len(rows) == 4 * len({"numpy", *ours}) and rows[0]["implementation"] == "fa2"
    for row in rows:
        assert row["agrees"] and row["seconds"] == pytest.approx(TICK) and row["spread_s"] == pytest.approx(0, abs=1e-9)
        scores = row["batch"] * row["heads"] * row["n"] ** 2
        assert row["batch"] * row["n"] == 32 and row["heads"] * row["d"] == 32
        assert row["tflops"] == pytest.approx(cost * 4 * scores * row["d"] / (2 if row["causal"] else 1) / TICK / 1e12)
    assert all(each["ratio"] == pytest.approx(1) and each["best_other"] == "numpy" for each in result["ratios"])
    assert result["warm_call_host"]["seconds"] == pytest.approx(TICK)
    if name == "forward":
        assert result["first_call"]["cold"]["first_call_s"] > 0 and set(result["first_call"]) == {"cold", "warm"}
    assert f"written: {path}" in capsys.readouterr().out


class Scripted:
    """A bench whose clock is what a call says that it takes."""

    device = None

    def seconds(self, call: Any) -> float:
        call()
        return getattr(call, "takes", 1.0)

    def wait(self) -> None: ...

    def release(self) -> None: ...

    def to_host(self, out: Any) -> np.ndarray:
        return np.asarray(out, np.float32)


def scripted(forward: types.ModuleType, outputs: int) -> Any:
    """A pass with peers that fail, lie and tell the truth; all compute one array, or several."""

    def implementations(bench: Any, case: Any, seed: int) -> dict[str, Any]:
        truth = np.random.default_rng(seed).standard_normal((outputs, *case.shape)).astype(case.dtype) * 100

        def absent() -> None:
            raise RuntimeError("No available kernel.\nAborting execution.")

        def wrong() -> Any:
            return (*truth[:-1], truth[-1] + 10) if outputs > 1 else truth[0] + 10

        def right() -> Any:  # rounded otherwise, which is little beside numbers of such size
            return tuple(truth + np.float16(0.25)) if outputs > 1 else truth[0] + np.float16(0.25)

        wrong.takes, right.takes = 0.1, 0.5  # type: ignore[attr-defined]
        return {"ours": lambda: tuple(truth) if outputs > 1 else truth[0], "absent": absent, "wrong": wrong, "right": right}

    return forward.Pass("some", 3, ("ours",), implementations)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_peer_that_does_not_answer_is_told_and_one_that_is_wrong_does_not_win(forward: types.ModuleType, outputs: int) -> None:
    timing, case = forward.timing, forward.Case("float16", 16, 16, True, 1, 1)
    rows = timing.measure(Scripted(), scripted(forward, outputs), [case])
    by = {row["implementation"]: row for row in rows}
    assert by["absent"]["error"] == "RuntimeError: No available kernel. Aborting execution." and "tflops" not in by["absent"]
    assert not by["wrong"]["agrees"] and by["right"]["agrees"] and by["ours"]["ours"] and not by["right"]["ours"]
    assert by["ours"]["tflops"] == pytest.approx(3 * case.flops / 1e12)
    (ratio,) = timing.ratios(rows, "ours")
    assert ratio["best_other"] == "right" and ratio["ratio"] == pytest.approx(0.5)
    text = "\n".join(timing.show(rows))
    assert "No available kernel" in text and "DIFFERS" in text


def test_the_grid_is_sixteen_thousand_tokens_each(forward: types.ModuleType) -> None:
    timing = forward.timing
    cases = timing.grid(timing.DTYPES, timing.HEAD_DIMS, timing.LENGTHS, timing.TOKENS, timing.WIDTH)
    assert len(set(cases)) == len(cases) == 2 * 3 * 6 * 2
    assert all(case.batch * case.n == 16384 and case.heads * case.d == 2048 for case in cases)
    full = next(case for case in cases if (case.d, case.n, case.causal) == (128, 16384, False))
    assert full.flops == 4 * 16 * 16384**2 * 128 == 4 * full.batch * full.heads * full.n**2 * full.d
    assert full.flops == full.problem.flops and 2.5 * full.flops == full.problem.backward_flops


def test_ncu_s_figures_are_read_from_among_its_messages(forward: types.ModuleType) -> None:
    text = (
        '==PROF== Connected to process 7\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","fa2_forward","dram__bytes_read.sum","byte","1,048,576"\n"0","fa2_forward","lts__t_bytes.sum","byte","4194304"\n'
        '"0","fa2_forward","launch__waves","","1"\n'
    )
    assert forward.ncu_metrics(text) == {"dram__bytes_read.sum": 1048576.0, "lts__t_bytes.sum": 4194304.0}
    assert forward.ncu_metrics("==ERROR== ERR_NVGPUCTRPERM") == {}


@pytest.fixture(scope="module")
def performance() -> types.ModuleType:
    return load("performance")


PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize("name", ["tiles", "split", "lazy"])
def test_the_page_on_performance_says_what_the_code_does(performance: types.ModuleType, name: str) -> None:
    lines = list(getattr(performance, name)())
    assert len(lines) > 4 and "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"]) in PAGE


@pytest.mark.parametrize(("rows", "cols", "d"), [(64, 64, 64), (64, 128, 32)])
@pytest.mark.parametrize("split_k", [False, True])
def test_shared_memory_of_both_splits_is_the_closed_form_to_the_byte(
    performance: types.ModuleType, split_k: bool, rows: int, cols: int, d: int
) -> None:
    counted, out, expected = performance.split_counted(split_k, rows, cols, d)
    form = performance.split_bytes(rows, cols, d, performance.WARPS)["split-K" if split_k else "split-Q"]
    assert counted["ldmatrix"] == form["Q"] + form["K and V"]
    assert counted["ld"] + counted["st"] == form["O"] + form["maxima"]
    assert np.abs(out - expected).max() < 2e-3


def test_our_kernel_moves_what_split_q_says(performance: types.ModuleType) -> None:
    """A tile more of K and V costs the closed form's bytes, in the real kernel."""
    from cupyflash import Device, Problem, plan
    from cupyflash.sim import execute
    from cupyflash.sim.yardstick import draw

    device, moved = Device.named("A100-40GB"), []
    for n in (128, 192):
        problem = Problem(1, 1, 1, 128, n, 64, "float16")
        schedule = plan(problem, device, "fa2", (128, 64))
        tile = schedule.candidate.tile  # type: ignore[attr-defined]
        assert not tile.q_in_regs
        (counters,) = execute(schedule, *draw(problem)).counters.values()
        moved.append(counters.shared_kind("ldmatrix").bytes)
        assert counters.shared_kind("ldmatrix").wavefronts == counters.shared_kind("ldmatrix").ideal_wavefronts
    form = performance.split_bytes(128, 64, 64, tile.warps)["split-Q"]
    assert moved[1] - moved[0] == form["Q"] + form["K and V"]


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;                 /* 0x00 */
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;       /* 0x01 */
        /*0020*/                   FSETP.GT.FTZ.AND P0, PT, R1, 8, PT ;   /* 0x02 */
        /*0030*/                   VOTE.ANY P0, P0 ;                      /* 0x03 */
        /*0040*/              @!P0 BRA 0x70 ;                             /* 0x04 */
        /*0050*/                   FMUL.FTZ R4, R4, R9 ;                  /* 0x05 */
        /*0060*/                   FMUL.FTZ R5, R5, R9 ;                  /* 0x06 */
        /*0070*/                   MUFU.EX2 R3, R2 ;                      /* 0x07 */
        /*0080*/               @P1 BRA 0x10 ;                             /* 0x08 */
        /*0090*/                   EXIT ;                                 /* 0x09 */
"""


def test_instructions_are_sorted_by_what_they_are_for() -> None:
    tool = load("instruction_mix")
    code = tool.instructions(SASS)
    assert [each.opcode for each in code[:3]] == ["MOV", "HMMA", "FSETP"] and code[4].guard == "@!P0"
    found = tool.mix(tool.main_loop(code))
    assert found.parts == {"HMMA": 1, "MUFU": 1, "FFMA": 0, "LDSM": 0, "LDGSTS": 0, "softmax": 2, "rest": 2}
    assert (found.total, found.rescale) == (6, 2)


def test_the_rest_is_at_most_fifteen_percent_of_the_main_loop() -> None:
    tool = load("instruction_mix")
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    if tool.disassembler() is None:
        pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    found = list(tool.mixes([tool.Device.named(name) for name in tool.DEVICES]))
    for device, d, _, mix in found:
        assert mix.parts["rest"] <= 0.15 * mix.total, (device.sm, d, mix)
        assert mix.parts["HMMA"] and mix.parts["LDSM"] and mix.parts["LDGSTS"]
    if "NVRTC {}.{},".format(*nvrtc.getVersion()) in PAGE:
        assert "\n".join(tool.table([tool.Device.named(name) for name in tool.DEVICES])) in PAGE


def test_host_time_is_measured_with_arrays_of_cupy_where_no_gpu_is() -> None:
    pytest.importorskip("cuda.pathfinder")
    pytest.importorskip("cupy")
    told = subprocess.run([sys.executable, ROOT / "benchmarks" / "host.py", "--runs", "1"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert re.findall(r"compiling for (sm_\d+), d (\d+)", told.stdout) == [
        (sm, d) for sm in ("sm_80", "sm_90") for d in ("64", "128")
    ]
    assert all(f"\n{call} " in told.stdout for call in ("causal", "causal, out given", "fa1, causal", "varlen, causal"))
    assert re.search(r"conversion of 4\d arguments: -?[0-9.]+ us", told.stdout)
