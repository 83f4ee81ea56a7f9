"""Timelines of one thread block: the clock's run of its machine code, in spans."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash import Device, Problem, plan
from cupyflash.sim import profile
from cupyflash.sim.cli import main
from cupyflash.sim.clock import sass, spans, timeline
from cupyflash.sim.clock.loaded import of_source
from cupyflash.sim.clock.stalls import Stretch
from cupyflash.sim.clock.timeline import KINDS, NUMBERS, device_of
from cupyflash.sim.profiling import timeline_of
from cupyflash.sim.ptx import Module
from cupyflash.sim.trace import Trace, trace
from suites import wide

pytest.importorskip("cupy")
needs_disassembler = pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")
A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")


@cache
def attention(algorithm: str) -> tuple[Trace, dict[str, Any]]:
    """A forward pass of one head, and the timeline of its only block."""
    device, rows = (A100, 16) if algorithm == "fa2" else (H100, 64)
    made = trace(plan(Problem(1, 1, 1, rows, 400, 64, "float16"), device, algorithm), timeline_block=0)
    assert made.agrees and not made.problems
    return made, made.timelines[0]["timeline"]


def timed(cuda: str, block: int, args: Any, *options: str, grid: int = 1) -> dict[str, Any]:
    """The timeline of a kernel's first block on an A100, or the reason for none."""
    return timeline.told(lambda: of_source(cuda, A100, options, "k.cu").launch("k", ((grid,), (block,)), args), A100, 0, str)


def kinds_of(told: dict[str, Any], group: str) -> set[str]:
    return {KINDS[kind][0] for row in told["rows"] if row["group"] == group for _, _, kind, _, _ in row["spans"]}


def clocks_of(told: dict[str, Any], name: str) -> float:
    """The clocks of all warps in spans of a kind."""
    return sum(share[NUMBERS[name]] for share in told["shares"])


@needs_disassembler
@pytest.mark.parametrize("name", [wide("fa2"), "fa3"])
def test_a_block_of_attention_has_its_copies_products_and_waits(name: str) -> None:
    made, told = attention(name)
    roles = [row["role"] for row in told["rows"] if row["group"] == "warps"]
    assert roles.count("producer") == (name == "fa3")
    assert {"fa2": "waits_copies", "fa3": "waits_phase"}[name] in kinds_of(told, "warps")
    assert kinds_of(told, "copies") == {"copy_flying", "copy_there"} and kinds_of(told, "products") == {"product"}
    assert ("waits_products" in kinds_of(told, "warps")) == (name == "fa3")
    # All bytes of the launch are this block's: those that notes name are those that the PTX machine counted.
    inward = {note for note in told["notes"] if " to shared memory" in note}
    read = sum(made.executed[tensor].read_bytes for tensor in "QKV")
    assert sum(int(note.split(": ")[1].split(" bytes")[0].replace(",", "")) for note in inward) == read
    assert {file for file, *_ in told["sources"]} == {f"{name}_forward.cu"}  # the kernel's own lines
    if name == "fa3":
        assert len({row["name"] for row in told["rows"] if row["group"] == "products"}) == roles.count("consumer") / 4
        assert any("last came a copy of warp 0" in note for note in told["notes"])
        assert any(len(warps) > 4 for _, _, warps in told["meetings"])


@needs_disassembler
@pytest.mark.parametrize("name", [wide("fa2"), "fa3"])
def test_a_timeline_is_json_whose_spans_are_apart_and_whose_shares_are_the_rows(name: str) -> None:
    _, told = attention(name)
    assert told == json.loads(json.dumps(told)) and told["shown"] == told["clocks"] > 1000
    for row in told["rows"]:
        flat = [clock for begin, end, *_ in row["spans"] for clock in (begin, end)]
        assert flat == sorted(flat) and flat[-1] <= told["clocks"]
        assert all(-1 <= line < len(told["sources"]) and -1 <= note < len(told["notes"]) for *_, line, note in row["spans"])
    warps = [row for row in told["rows"] if row["group"] == "warps"]
    for row, shares in zip(warps, told["shares"], strict=True):
        assert all(before[1] == behind[0] for before, behind in zip(row["spans"], row["spans"][1:], strict=False))
        assert sum(shares) == pytest.approx(told["clocks"] - row["spans"][0][0], abs=0.1)
        for number, share in enumerate(shares):
            assert sum(end - begin for begin, end, kind, *_ in row["spans"] if kind == number) == pytest.approx(share, abs=0.1)
    assert any(shares[NUMBERS["special"]] > 0.02 * told["clocks"] for shares in told["shares"])
    assert all(0 < clocks <= told["clocks"] for clocks in told["busy"].values())


STAGES = r"""
// y = the sum over tiles of A's products with themselves, a tile of 16 x 16 halfs a turn, STAGES of them in shared memory.
extern "C" __global__ void k(const unsigned short* x, float* y, int turns) {
    __shared__ __align__(16) unsigned short tile[STAGES][8][16][16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto at = [](const void* p) { return (unsigned)__cvta_generic_to_shared(p); };
    auto fetch = [&](int turn) {
        if (turn < turns)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at(&tile[turn % STAGES][warp][lane / 2][lane % 2 * 8])),
                         "l"(x + (turn * 8 + warp) * 256 + lane * 8) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    float c[4] = {};
    for (int turn = 0; turn < STAGES - 1; ++turn) fetch(turn);
    for (int turn = 0; turn < turns; ++turn) {
        fetch(turn + STAGES - 1);
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
        __syncwarp();
        unsigned a[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                     : "r"(at(&tile[turn % STAGES][warp][lane % 16][lane / 16 * 8])) : "memory");
        for (int again = 0; again < 8; ++again)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%4,%5}, {%0,%1,%2,%3};"
                         : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
        __syncwarp();
    }
    for (int e = 0; e < 4; ++e) y[threadIdx.x * 4 + e] = c[e];
}"""


@cache
def staged(stages: int, turns: int = 9) -> dict[str, Any]:
    x = np.zeros(turns * 8 * 256, np.uint16)
    told = timed(STAGES, 256, {"x": x, "y": np.zeros(1024, np.float32), "turns": np.int32(turns)}, f"-DSTAGES={stages}")
    return dict(told["timeline"])


@needs_disassembler
def test_a_second_stage_hides_copies_under_products() -> None:
    one, three = staged(1), staged(3)
    assert clocks_of(one, "waits_copies") > 2 * clocks_of(three, "waits_copies") and one["clocks"] > 1.3 * three["clocks"]


@needs_disassembler
def test_turns_that_are_left_out_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    told = staged(1, turns=96)
    ((at, text),) = told["gaps"]
    assert 0 < at < told["clocks"] and text.endswith("turns of the loop") and text in told["model"]
    monkeypatch.setattr(timeline, "MOST_SPANS", 50)
    short = staged.__wrapped__(1)
    assert short["gaps"] == []
    drawn = [span for row in short["rows"] for span in row["spans"]]
    assert 40 <= len(drawn) <= 50 and max(end for _, end, *_ in drawn) == short["shown"] < short["clocks"]
    assert all(sum(shares) == pytest.approx(short["clocks"], rel=0.05) for shares in short["shares"])


@needs_disassembler
def test_a_block_is_run_beside_those_that_its_multiprocessor_has() -> None:
    cuda = """extern "C" __global__ void k(float* y) {
        float a = y[threadIdx.x];
        for (int i = 0; i < 64; ++i) a = a * a + 1;
        y[blockIdx.x * 512 + threadIdx.x] = a; }"""
    y = np.zeros(512 * 433, np.float32)
    alone, beside = (timed(cuda, 512, {"y": y}, grid=grid)["timeline"] for grid in (1, 433))
    assert "1 block at once" in alone["model"] and "4 blocks at once" in beside["model"]
    assert beside["clocks"] > 1.5 * alone["clocks"] and len(beside["shares"]) == 16


INLINED = r"""__device__ float twice(const float* x, int at) {
  float value = x[at];
  return value + value;
}
extern "C" __global__ void k(const float* x, float* y) {
  float first = twice(x, 0);
  y[0] = first;
  __syncthreads();
  y[1] = twice(x, threadIdx.x) + first;
}"""


@needs_disassembler
def test_spans_and_notes_name_the_line_of_an_inlined_function_and_its_call(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(INLINED)
    args = {"x": np.ones(64, np.float32), "y": np.zeros(2, np.float32)}
    told = profile(tmp_path / "k.cu", grid=1, block=64, args=args, races=False, timeline_block=0).timeline["timeline"]
    lines = {tuple(number) for _, *number in told["sources"]}
    assert {(2, "float value = x[at];", 6), (2, "float value = x[at];", 9), (7, "y[0] = first;", -1)} <= lines
    assert {note for note in told["notes"] if "LDG" in note} == {f"for LDG of line 2 (called at line {call})" for call in (6, 9)}
    assert told["meetings"][0][1:] == [0, [0, 1]] and any("barrier 0" in note for note in told["notes"])


def test_waits_are_joined_into_the_one_before() -> None:
    def kept(*clocks: float) -> list[tuple[float, float, int]]:
        begin, waits = 0.0, []
        for number, length in enumerate(clocks):
            waits.append(Stretch(begin, begin + length, "wait", number))
            begin += length
        return [(each.begin, each.end, each.cause) for each in spans.joined(waits)]

    assert kept(5, 20, 3, 16) == [(0, 28, 1), (28, 44, 3)]
    assert kept(6, 15, 9) == [(0, 30, 1)]


NONE = {
    "deadlock": (
        '__shared__ int s; if (threadIdx.x < 32) __syncthreads(); else asm volatile("bar.sync 1, 96;");',
        "wait at barriers",
    ),
    "spin": ("while (*(volatile int*)y == 0) {}", "runs more than 2,000 instructions"),
    "outside": ("y[1 << 20] = 1;", "an access outside of y"),
}


@needs_disassembler
@pytest.mark.parametrize("name", NONE)
def test_a_block_without_an_end_has_no_timeline_and_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_RUN", 2000)
    body, why = NONE[name]
    told = timed(f'extern "C" __global__ void k(float* y) {{ {body} }}', 64, {"y": np.zeros(1, np.float32)})
    assert told["timeline"] is None and why in told["timeline_why"]


def test_without_tools_there_is_no_timeline_and_one_sentence_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "tool", lambda name: None)
    cuda, args = 'extern "C" __global__ void k(float* y) { y[0] = 1; }', {"y": np.zeros(1, np.float32)}
    told = timed(cuda, 32, args)
    assert told["timeline"] is None and "pip install" in told["timeline_why"] and "\n" not in told["timeline_why"]
    module = Module.from_ptx(Module.from_source(cuda).text)
    told = timeline_of(module, "k", 0, (1, 32, args, 0, None))
    assert told["timeline"] is None and "ptxas" in told["timeline_why"]


def test_devices_for_what_is_compiled_for() -> None:
    names = {"sm_75": "T4", "sm_80": "A100-40GB", "sm_90a": "H100-SXM", "sm_88": "A10", "sm_60": "T4"}
    assert {target: device_of(target).name for target in names} == names


@needs_disassembler
def test_the_commands_have_it_if_asked(tmp_path: Path) -> None:
    path, launch = tmp_path / "k.cu", ["--grid", "2,2", "--block", "64", "--json"]
    path.write_text('extern "C" __global__ void k() {\n  __syncthreads();\n}')
    found = json.loads(CliRunner().invoke(main, ["profile", str(path), *launch, "--timeline-block", "3"]).stdout)["timeline"]
    assert (found["block"], found["blocks"], found["target"], found["device"]) == (3, 4, "sm_80", "A100-40GB")
    assert "__syncthreads();" in [text for _, _, text, _ in found["sources"]] and found["meetings"][0][1:] == [0, [0, 1]]
    found = json.loads(CliRunner().invoke(main, ["profile", str(path), *launch]).stdout)
    assert found["timeline"] is None and found["timeline_why"] == "it was not asked for"
    wrong = CliRunner().invoke(main, ["profile", str(path), *launch, "--timeline-block", "4"])
    assert wrong.exit_code == 2 and "the grid's 4 thread blocks" in wrong.output
    small = ["trace", "--seqlen", "64", "--head-dim", "16", "--tiling", "16x16", "--algorithms", "fa2"]
    wrong = CliRunner().invoke(main, [*small, "--timeline-block", "4"])
    assert wrong.exit_code == 2 and "no launch has more than 4 thread blocks" in wrong.output
    (player,) = json.loads(CliRunner().invoke(main, [*small, "--timeline-block", "3", "--json"]).stdout)["players"]
    made = player["launches"][0]["timeline"]
    assert (made["kernel"], made["block"], made["device"]) == ("fa2_forward", 3, "A100-40GB")
    assert any("K" in note for note in made["notes"]) and any("find_row_block" in text for _, _, text, _ in made["sources"])
