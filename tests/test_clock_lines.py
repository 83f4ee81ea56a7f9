"""Lines of source with their stall reasons, from CUDA C, PTX and cubins, by the command (as clock.md has it) and from Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash import Device
from cupyflash.launch.nvrtc import compile_to_cubin
from cupyflash.sim import ptx
from cupyflash.sim.cli import main
from cupyflash.sim.clock import loaded, sass
from cupyflash.sim.clock.lines import TimedLine, changes, lines_of, places
from cupyflash.sim.clock.multiprocessor import Issue, Outside
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.clock.sass import Control, Instruction
from cupyflash.sim.clock.stalls import REASONS, Watched, stalls
from cupyflash.sim.clock.steps import step_of
from cupyflash.sim.clock.waits import NAMED, Key
from cupyflash.sim.clock.whole import Clock

pytestmark = pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")

A6000 = Device.named("RTX A6000")
SOURCE = """__device__ __forceinline__ float twice(float a) {
    return __expf(a);
}
extern "C" __global__ void summed(const float* x, float* y, float a, int n) {
    __shared__ float part[64];
    float t = a;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += 64)
        t += twice(x[i]);
    part[threadIdx.x] = t;
    __syncthreads();
    y[blockIdx.x * 64 + threadIdx.x] = part[63 - threadIdx.x];
}
"""
X, Y = np.ones(1 << 11, np.float32), np.zeros(84 * 64, np.float32)
ARGS = [X, Y, 2.0, 1 << 11]
TEXT = json.dumps([{"shape": [1 << 11]}, {"shape": [84 * 64]}, 2.0, 1 << 11])


def test_the_clocks_of_all_instructions_are_those_of_the_warps() -> None:
    launched = loaded.of_source(SOURCE, A6000, (), "k.cu").launch(None, ((84,), (64,)), ARGS)
    clock = Clock(launched.launch, A6000)
    rates = ChipRates.of(A6000)
    watched = Watched(launched.launch.kernel.instructions, clock.steps, rates, clock.outside, 1)
    watched.run(clock.traces)
    lives = sum(end - begin for begin, end in watched.lives.values())
    assert len(watched.lives) == 2 and lives > 2 * 1000
    assert sum(sum(spent.values()) for spent in watched.clocks.values()) == pytest.approx(lives)
    assert {reason for spent in watched.clocks.values() for reason in spent} <= set(REASONS)
    issued = sum(len(trace) for block in clock.traces for trace in block)
    assert sum(spent["selected"] for spent in watched.clocks.values()) == issued
    # The turns that are left out take as long as those that stand for them.
    loop = clock.tracer.loop
    assert loop is not None and loop.turns == 32
    selected = sum(spent["selected"] for spent in stalls(clock).values())
    assert selected > 2 * issued


FAST = Outside(64.0, 64.0, 16.0, 12.0, 64.0, 250.0, 470.0)


def reasons(*lines: tuple[str, Control], warps: int = 1, taken: int = -1) -> list[Mapping[str, float]]:
    """The clocks by reason of each instruction of some warps on one sub-core's multiprocessor."""
    code = []
    for number, (text, control) in enumerate(lines):
        name, _, operands = text.partition(" ")
        opcode, *modifiers = name.split(".")
        code.append(Instruction(16 * number, opcode, tuple(modifiers), tuple(operands.split(", ")), control=control))
    rates = ChipRates.of(A6000)
    met = ((Key(NAMED, 0, 0, 0), True, True),)
    trace = [Issue(number, taken=number == taken, signals=met if each.opcode == "BAR" else ()) for number, each in enumerate(code)]
    watched = Watched(code, [step_of(each, rates) for each in code], rates, FAST, 1)
    watched.run([[trace] * warps])
    return [{reason: clocks for reason, clocks in watched.clocks[at].items() if clocks} for at in range(len(code))]


def test_each_wait_has_its_reason() -> None:
    one = Control(1)
    rates = ChipRates.of(A6000)
    load, use = ("LDS R1, [R0]", Control(1, writes=0)), ("FADD R2, R1, R1", Control(1, waits=(0,)))
    assert reasons(("MOV R0, R1", Control(6)), load, use) == [
        {"selected": 1},
        {"wait": 5, "selected": 1},
        {"short scoreboard": rates["latency.lds_32"] - 1, "selected": 1},
    ]
    found = reasons(("LDG.E R1, [R2.64]", Control(1, writes=0)), use)[1]
    assert found == {"long scoreboard": rates["latency.ldg_32"] - 1, "selected": 1}
    assert reasons(("BRA 0x0", Control(2)), ("MOV R0, R1", one), taken=0)[1] == {
        "wait": 1,
        "branch resolving": rates["latency.branch"],
        "selected": 1,
    }
    assert reasons(*[("IADD3 R0, R2, R5, RZ", one)] * 4)[3] == {"math pipe throttle": 1, "selected": 1}
    # The four sub-cores of an A6000 share one unit for float64.
    shared = reasons(("DADD R0, R2, R4", one), warps=2)[0]
    assert shared == {"math pipe throttle": 32 / rates["lanes.fp64"] - rates["launch.spread"], "selected": 2}
    assert "MIO throttle" in reasons(*[load] * 9)[8] and "LG throttle" in reasons(*[("LDG.E R1, [R2.64]", one)] * 9)[8]
    both = reasons(("BAR.SYNC 0x0", one), ("MOV R0, R1", one), warps=8)
    assert both[1]["barrier"] > 8 * rates["latency.barrier"]
    assert "dispatch stall" in reasons(*[("FFMA R0, R2, R4, R6", one)] * 6)[2]


def test_inlined_lines_are_their_own_and_lines_sum_to_the_whole() -> None:
    cubin, _ = compile_to_cubin(SOURCE, ("-arch=sm_86", "-lineinfo"), "k.cu")
    found = places(cubin, "summed")
    lines = {line for file, line in found.values() if file.endswith("k.cu")}
    assert {2, 8, 9, 10, 12} <= lines
    assert places(compile_to_cubin(SOURCE, ("-arch=sm_86",), "k.cu")[0], "summed") == {}
    code = [Instruction(0, "MOV"), Instruction(16, "EXIT"), Instruction(32, "NOP")]
    spent = {0: {"wait": 3.0, "selected": 1.0}, 1: {"selected": 1.0}, 2: {"wait": 5.0}}
    first, second = lines_of(spent, code, {0: ("a.cu", 1), 16: ("a.cu", 2), 32: ("a.cu", 1)}, 1e-3, {"a.cu": "one\n two"})
    assert first.text == "one" and (first.share, first.seconds) == pytest.approx((0.9, 0.9e-3))
    assert first.stalls == {"wait": 8.0, "selected": 1.0}
    assert (second.text, second.number) == ("two", 2) and TimedLine.read(second.to_dict()) == second
    bare = lines_of(spent, code, {}, 1e-3, {})
    assert [line.number for line in bare] == [2, 0, 1] and bare[0].text.endswith("NOP")


def test_changes_are_those_of_lines_that_stand_for_each_other() -> None:
    before = [
        TimedLine("a.cu", number, text, 0, spent, {}) for number, text, spent in ((1, "a", 1.0), (2, "b", 2.0), (3, "c", 3.0))
    ]
    after = [
        TimedLine("a.cu", number, text, 0, spent, {})
        for number, text, spent in ((5, "a", 1.5), (6, "B", 4.0), (7, "c", 3.0), (8, "d", 0.25))
    ]
    assert changes(before, after) == [("B", 2.0, 4.0), ("a", 1.0, 1.5), ("d", 0.0, 0.25), ("c", 3.0, 3.0)]
    assert sum(now - then for _, then, now in changes(before, after)) == 8.75 - 6


def run(*words: Any) -> Any:
    return CliRunner().invoke(main, ["time", *map(str, words), "--device", "RTX A6000", "--grid", "84", "--block", "64"])


def test_the_command_takes_source_and_machine_code_and_compares_runs(tmp_path: Path) -> None:
    file, cubin, before = tmp_path / "k.cu", tmp_path / "k.cubin", tmp_path / "before.json"
    file.write_text(SOURCE)
    cubin.write_bytes(compile_to_cubin(SOURCE, ("-arch=sm_86", "-lineinfo"), str(file))[0])
    first = run(file, "--args", TEXT, "--json")
    assert first.exit_code == 0, first.output
    report = json.loads(first.stdout)
    assert report["lines"][0]["text"].startswith(("t +=", "for", "return")) and report["lines"][0]["file"] == str(file)
    assert sum(line["seconds"] for line in report["lines"]) == pytest.approx(report["seconds"])
    assert sum(line["share"] for line in report["lines"]) == pytest.approx(1)
    assert report["known_error"]["figures"] > 0 and report["known_error"]["kind"] in ("memory", "arithmetic")
    again = run(cubin, "--args", TEXT, "--json")
    assert json.loads(again.stdout)["seconds"] == report["seconds"], again.output
    before.write_text(first.stdout)
    file.write_text(SOURCE.replace("return __expf(a);", "return __expf(a) * __expf(a * a) + __expf(-a);"))
    later = run(file, "--args", TEXT, "--against", before, "--json")
    change = json.loads(later.stdout)["against"]
    assert change["change"] > 0 and sum(line["after"] - line["before"] for line in change["lines"]) == pytest.approx(
        change["change"]
    )
    told = run(file, "--args", TEXT, "--against", before, "--lines", 2)
    assert "Known error: of" in told.stdout and "Against summed on RTX A6000" in told.stdout and "long scoreboard" in told.stdout
    wrong = run(file, "--args", TEXT, "--against", file)
    assert wrong.exit_code == 2 and "is not valid JSON" in wrong.output
    before.write_text("{}")
    assert "is not what `cupyflash time --json` writes" in run(file, "--args", TEXT, "--against", before).output


def test_ptx_needs_ptxas_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "k.ptx"
    file.write_text(ptx.Module.from_source(SOURCE, ("-arch=compute_86",)).text)
    monkeypatch.setattr(sass, "tool", lambda name: None)
    wrong = run(file, "--args", TEXT)
    assert wrong.exit_code == 2 and "no ptxas" in wrong.output and "nvidia-cuda-nvcc" in wrong.output


@pytest.mark.skipif(sass.tool("ptxas") is None, reason="needs ptxas")
def test_ptx_is_assembled(tmp_path: Path) -> None:
    file, made = tmp_path / "k.ptx", ptx.Module.from_source(SOURCE, ("-arch=compute_86",)).text
    file.write_text("\n".join(".version 8.4" if line.startswith(".version") else line for line in made.splitlines()))
    found = run(file, "--args", TEXT, "--json")
    assert found.exit_code == 0, found.output
    of_source = loaded.of_source(SOURCE, A6000, (), "k.cu").launch(None, ((84,), (64,)), ARGS)
    assert json.loads(found.stdout)["seconds"] == pytest.approx(Clock(of_source.launch, A6000).time().seconds, rel=0.1)
    file.write_text(made.replace("add.f32", "fused.f32"))
    wrong = run(file, "--args", TEXT)
    assert wrong.exit_code == 2 and "\n" not in wrong.output.strip().split("Error: ")[-1]


def test_modules_and_raw_kernels_have_the_same_clock() -> None:
    module, kernel = ptx.Module.from_source(SOURCE, ("-ftz=true",)), ptx.RawKernel(SOURCE, "summed")
    found = module.clock("summed", 84, 64, {"x": X, "y": Y, "a": 2.0, "n": 1 << 11}, A6000)
    of_raw = kernel.clock((84,), (64,), (X, Y, np.float32(2), np.int32(1 << 11)), A6000)
    assert found.seconds == of_raw.seconds == found.time.seconds and not Y.any()
    assert found.lines[0].text.startswith(("t +=", "for", "return")) and found.known.figures > 0
    assert module.clock(None, 84, 64, ARGS, A6000, mhz=900).seconds > found.seconds
    with pytest.raises(TypeError, match="summed takes 4 arguments, got 1"):
        module.clock("summed", 84, 64, [X], A6000)
    with pytest.raises(TypeError, match="takes 4 arguments, got 1"):
        kernel.clock((84,), (64,), (X,), A6000)
