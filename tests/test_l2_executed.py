"""The L2 from an execution: exact lines, each block in its own order; near the model from the schedule, exact where all fits."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from test_l2 import Plain

from cupyflash import Device, Problem, plan, sim
from cupyflash.multiprocessor import occupancy
from cupyflash.schedules import TileSchedule, plan_backward, plan_decode, plan_varlen, plan_varlen_backward
from cupyflash.schedules.base import Kernel
from cupyflash.sim import l2, theory
from cupyflash.sim.cli import main
from cupyflash.sim.execution import Onlookers
from cupyflash.sim.l2 import L2, LINE, SECTOR, executed
from cupyflash.sim.l2.launch import LaunchedBlocks
from cupyflash.sim.profiling import together
from cupyflash.sim.ptx import Access, Module
from cupyflash.sim.verification import DrawnInputs, run_drawn
from suites import sample

pytest.importorskip("cupy")

A100, H100 = (replace(Device.named(name), sm_count=3) for name in ("A100-40GB", "H100-SXM"))
PAGE = (Path(__file__).parents[1] / "docs" / "l2.md").read_text()
EVERYTHING = L2(1 << 26)


# -- beside the schedule ----------------------------------------------------------------------------------------------------------

CAUSAL = Problem(1, 2, 1, 512, 512, 64, "float16", causal=True)
SCHEDULES: dict[str, Callable[[Problem], TileSchedule]] = {
    "`fa2`": lambda p: plan(p, A100, "fa2"),
    "`fa3`": lambda p: plan(p, H100, "fa3"),
    "`fa1`, 24 KB of SRAM": lambda p: plan(p, A100.with_sram("24KB"), "fa1"),
    "`standard`": lambda p: plan(p, A100, "standard"),
    "`fa2` backward": lambda p: plan_backward(p, A100),
    "the same, deterministic": lambda p: plan_backward(p, A100, deterministic=True),
    "decoding, 4 rows in 4 splits": lambda p: plan_decode(replace(p, seqlen_q=4), A100, num_splits=4),
}


@cache
def played(name: str) -> tuple[TileSchedule, executed.Observed]:
    """A schedule, executed."""
    schedule = SCHEDULES[name](CAUSAL)
    execution, watch = executed.observed(schedule)
    run_drawn(schedule, DrawnInputs.of(schedule.problem, 0, watch=watch))
    return schedule, execution


def documented() -> dict[str, dict[int, float]]:
    """The page's table: by schedule and bytes of L2, DRAM bytes of the execution over those of the schedule's model."""
    section = PAGE[PAGE.index("| execution : schedule |") :].split("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in section)
    sizes = [int(size.removesuffix(" KB")) << 10 for size in head[1:]]
    return {name: dict(zip(sizes, map(float, told), strict=True)) for name, *told in rows}


@pytest.mark.parametrize("name", sample(SCHEDULES, ["`fa2`", "`fa3`"]))
def test_an_execution_is_near_its_schedule(name: str) -> None:
    """It requests the bytes that theory counts; data that fit are read once; beyond that DRAM's bytes are as on the page."""
    schedule, execution = played(name)
    fits, model = execution.behind(EVERYTHING), l2.run(schedule, l2=EVERYTHING)
    assert fits.asked == model.asked == theory.traffic(schedule)
    assert fits.dram == model.dram and fits.blocks == model.blocks
    for size, told in documented()[name].items():
        ratio = execution.behind(L2(size)).dram.total_bytes / l2.run(schedule, l2=L2(size)).dram.total_bytes
        assert round(ratio, 2) == told
        # Warps of `standard` take P, and atomics the sum of dQ, in parts of sectors and rows
        assert 0.87 < ratio < (2 if name in ("`standard`", "`fa2` backward") else 1.04)


def test_the_page_s_table_has_every_schedule() -> None:
    assert documented().keys() == SCHEDULES.keys()


def test_packed_sequences() -> None:
    q, seqlens = np.ones((80, 1, 32), np.float16), ((30, 30), (50, 50))
    schedule = plan_varlen(Problem(2, 1, 1, 50, 50, 32, "float16"), A100, seqlens=seqlens, lse=True)
    execution, watch = executed.observed(schedule)
    found = sim.execute_varlen(schedule, q, q.copy(), q.copy(), watch=watch)
    behind, model = execution.behind(EVERYTHING), l2.run(schedule, l2=EVERYTHING)
    assert behind.asked == found.traffic == model.asked and behind.dram == model.dram
    gradients = plan_varlen_backward(schedule.problem, A100, seqlens=seqlens)
    execution, watch = executed.observed(gradients)
    given = [q.copy() for _ in range(4)]  # one array would be read once
    assert found.lse is not None
    again = sim.execute_varlen_backward(gradients, *given, found.out, found.lse, watch=watch)
    behind, model = execution.behind(EVERYTHING), l2.run(gradients, l2=EVERYTHING)
    assert behind.asked == again.traffic == model.asked and behind.dram == model.dram


# -- a plain simulator ------------------------------------------------------------------------------------------------------------


class Requests:
    """The requests of each block, one by one: (tensor's number, write, sector)."""

    def __init__(self, execution: executed.Observed) -> None:
        self.execution = execution
        self.blocks: defaultdict[int, list[set[tuple[int, bool, int]]]] = defaultdict(list)

    def __call__(self, access: Access) -> None:
        if access.segment is None or access.segment.space != "global":
            return
        tensor, shift = self.execution.place(access.segment)
        of_block: defaultdict[int, set[tuple[int, bool, int]]] = defaultdict(set)
        sizes = np.broadcast_to(np.asarray(access.size), access.addresses.shape).tolist()
        blocks = np.broadcast_to(access.lanes.block, access.addresses.shape).tolist()
        for block, address, size in zip(blocks, access.addresses.tolist(), sizes, strict=True):
            first = address + shift
            found = of_block[block + access.lanes.wave.first_block]
            found.update((tensor, access.write, at) for at in range(first // SECTOR, -(-(first + size) // SECTOR)))
        for block, asked in of_block.items():
            if access.kind == "atom" and access.write:
                self.blocks[block][-1] |= asked
            else:
                self.blocks[block].append(asked)

    def turns(self, grid: int, slots: int) -> list[set[tuple[int, bool, int]]]:
        """The turns in lockstep."""
        waiting, running, turns = list(range(grid))[::-1], [], []
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(list(self.blocks[waiting.pop()]) or [set()])
            turns.append(set().union(*(each.pop(0) for each in running)))
            running = [each for each in running if each]
        return turns


def plainly(launches: list[tuple[Requests, int, int]], geometry: L2) -> Plain:
    """Launches through one plain cache: in a turn line by line, of a line reads first."""
    plain = Plain(geometry)
    for requests, grid, slots in launches:
        for turn in requests.turns(grid, slots):
            for tensor, write, sector in sorted(turn, key=lambda one: (one[2] * SECTOR // LINE, one[1], one[0], one[2])):
                plain.access(str(tensor), sector * SECTOR, SECTOR, write)
    return plain


@pytest.mark.parametrize("name", sample(SCHEDULES, ["`fa2` backward"]))
def test_a_plain_simulator_of_what_was_observed_says_the_same(name: str) -> None:
    """Several launches, tensor maps and atomics among them, through one small cache, in order."""
    schedule = SCHEDULES[name](Problem(1, 2, 1, 80, 100, 24, "float16", causal=True))
    execution, watch = executed.observed(schedule)
    seen: list[Requests] = []

    def both(kernel: Kernel) -> Onlookers:
        seen.append(Requests(execution))
        observer = watch(kernel).observer
        assert observer is not None
        return Onlookers(together(observer, seen[-1]))

    run_drawn(schedule, DrawnInputs.of(schedule.problem, 0, watch=both))
    launches = [(one, launch.grid, launch.slots) for one, launch in zip(seen, execution.launches, strict=True)]
    for geometry in (L2(1 << 13, 4), L2(3 << 13, 3), L2(1 << 16)):
        assert execution.behind(geometry).dram.total_bytes == plainly(launches, geometry).dram.total_bytes


# -- kernels of strangers ---------------------------------------------------------------------------------------------------------

KERNELS = """
extern "C" __global__ void copy(const float* x, float* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = x[i];
}
extern "C" __global__ void strided(const float* x, float* y) { y[threadIdx.x] = x[32 * threadIdx.x]; }
extern "C" __global__ void by_columns(const float* x, float* y) {  // 256 rows of 32
    float sum = 0;
    for (int col = 0; col < 32; col++)
        for (int row = threadIdx.x; row < 256; row += 32) sum += x[32 * row + col];
    y[32 * blockIdx.x + threadIdx.x] = sum;
}
extern "C" __global__ void rows(const float* x, float* y, int pitch) {
    int i = pitch * blockIdx.x + threadIdx.x;
    y[i] = x[i];
}
extern "C" __global__ void count(int* x) { atomicAdd(x + 8 * threadIdx.x, 1); }
"""


@cache
def module() -> Module:
    return Module.from_source(KERNELS)


def profiled(kernel: str, grid: int, block: int, args: Any, nbytes: int = 1 << 20, sm_count: int = 1) -> sim.Profile:
    return sim.profile(module(), kernel, grid=grid, block=block, args=args, l2=replace(A100, sm_count=sm_count, l2_bytes=nbytes))


def dram(found: sim.Profile) -> dict[str, tuple[int, int]]:
    """Read and written, by tensor."""
    assert found.l2 is not None
    return {name: (moved.read_bytes, moved.write_bytes) for name, moved in found.l2.found.dram.items()}


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_a_copy_moves_its_bytes_once_whatever_the_cache() -> None:
    for nbytes in (2048, 1 << 20):
        found = profiled("copy", 64, 128, {"x": floats(64 * 128), "y": floats(64 * 128)}, nbytes)
        assert found.l2 is not None and found.l2.found.hit_rates["x"] == 0
        assert dram(found) == {"x": (64 * 512, 0), "y": (0, 64 * 512)}


def test_what_is_scattered_takes_whole_sectors() -> None:
    """4 bytes of each 128 are asked for, 32 come."""
    found = profiled("strided", 1, 64, {"x": floats(32 * 64), "y": floats(64)})
    assert found.l2 is not None and found.l2.found.asked["x"].read_bytes == 64 * 4
    assert dram(found) == {"x": (64 * SECTOR, 0), "y": (0, 64 * 4)}


def test_a_matrix_walked_by_columns_comes_eight_times_where_a_column_does_not_fit() -> None:
    """256 rows of a line each. A cache of 128 lines has lost each before the next column; one of 256 and y's has all."""
    args = {"x": floats(256, 32), "y": floats(32)}
    assert dram(profiled("by_columns", 1, 32, args, 128 * LINE))["x"] == (256 * 32 * SECTOR, 0)
    found = profiled("by_columns", 1, 32, args, 512 * LINE)
    assert dram(found)["x"] == (256 * 32 * 4, 0) and found.l2 is not None and found.l2.found.hit_rate == 7 / 8


def test_blocks_that_run_together_share_what_they_read() -> None:
    """Two of them in lockstep read the matrix as one does; where each waits for the one before, as often as there are blocks."""
    args = {"x": floats(256, 32), "y": floats(34, 32)}
    together, apart = (dram(profiled("by_columns", 34, 32, args, 128 * LINE, sm_count))["x"][0] for sm_count in (2, 1))
    assert together == 256 * 32 * SECTOR and apart == 2 * together  # 32 at a time on a multiprocessor
    assert dram(profiled("by_columns", 34, 32, args, 512 * LINE))["x"][0] == 256 * 32 * 4


def test_views_of_one_array_lie_where_they_do() -> None:
    """Halves of rows of a line: each tensor has its own sectors. What is written in place by another name is read once."""
    base = floats(256, 32)
    found = profiled("rows", 256, 16, {"x": base[:, :16], "y": base[:, 16:], "pitch": 32})
    assert dram(found) == {"x": (256 * 64, 0), "y": (0, 256 * 64)}
    assert dram(profiled("rows", 256, 16, {"x": base, "y": base, "pitch": 32})) == {"x": (256 * 64, 0), "y": (0, 256 * 64)}
    # 128 lines hold what is near, and of a written array's sectors each is returned once
    tight = profiled("rows", 256, 16, {"x": base[:, :16], "y": base[:, 16:], "pitch": 32}, 128 * LINE)
    assert dram(tight) == dram(found)
    far = profiled("rows", 4, 16, {"x": floats(4, 64)[:, 8:24], "y": floats(4, 16), "pitch": 16})
    assert dram(far)["x"] == (4 * 64, 0)


def test_an_atomic_reads_and_writes() -> None:
    found = profiled("count", 3, 32, {"x": np.zeros(256, np.int32)})
    assert found.l2 is not None and found.l2.found.asked["x"] == sim.TensorTraffic(3 * 32 * 4, 3 * 32 * 4)
    assert dram(found) == {"x": (32 * SECTOR, 32 * SECTOR)}


def test_clusters_start_together() -> None:
    blocks = LaunchedBlocks()
    blocks.grid, blocks.slots, blocks.turns, blocks.cluster = 6, 5, np.array([1, 3, 1, 1, 2, 2]), 2
    assert blocks.starts().tolist() == [0, 0, 0, 0, 1, 1]


# -- where it is seen -------------------------------------------------------------------------------------------------------------


def test_verify_tells_it_beside_the_schedule_s() -> None:
    options = ["verify", "--l2", "--causal", "--seqlen", "128", "--head-dim", "32"]
    told = json.loads(CliRunner().invoke(main, [*options, "--json"]).stdout)["l2"]
    schedule = plan(Problem(1, 1, 1, 128, 128, 32, "float16", causal=True), Device.named("A100-40GB"))
    assert told["executed"] == executed.run(schedule).as_dict() and told["schedule"] == l2.run(schedule).as_dict()
    assert told["not_followed"] is None and told["l2_bytes"] == 40 << 20
    text = CliRunner().invoke(main, options).stdout
    for row in told["executed"]["tensors"].values():
        assert f"{row['dram_read_bytes']:,}" in text and f"{row['dram_write_bytes']:,}" in text
    assert "l2" not in json.loads(CliRunner().invoke(main, ["verify", "--seqlen", "32", "--json"]).stdout)


CALLS = (
    "--mask",
    "--bias --heads 4 --kv-heads 2",
    "--mask-function 'id[q] == id[k]' --capture id=int32 --seqlen 300",
    "--sinks --lse --window 40,0",
    "--backward --algorithm standard",
    "--backward --algorithm fa1 --sram 24KB --seqlen 128",
    "--decode --page-size 16",
    "--decode --append 2 --cache-seqlens 130,47",
)


@pytest.mark.parametrize("call", sample(CALLS, CALLS[:1]))
def test_whatever_a_call_asks_for_both_models_have_the_same_bytes(call: str) -> None:
    """For each tensor, the requested bytes and DRAM's, if all fits, as the command prints them. tests/test_l2_calls.py
    has others."""
    result = CliRunner().invoke(main, ["verify", "--l2", "--json", *shlex.split(call)])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)["l2"]
    both = [
        {name: {**row, "hit_rate": None} for name, row in told[witness]["tensors"].items() if any(row.values())}
        for witness in ("executed", "schedule")
    ]
    assert both[0] == both[1]


def test_verify_says_what_the_schedule_s_model_does_not_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(schedule: TileSchedule, **given: object) -> None:
        raise l2.TooLong("much too long")

    monkeypatch.setattr(executed, "model", refuse)
    options = ["verify", "--l2", "--seqlen", "64", "--head-dim", "32"]
    told = json.loads(CliRunner().invoke(main, [*options, "--json"]).stdout)["l2"]
    assert told["schedule"] is None and told["not_followed"] == "much too long" and told["executed"]["tensors"]["K"]
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 0 and "\nmuch too long\n" in result.stdout


def test_profile_tells_it(tmp_path: Path) -> None:
    """For the requested device, with the registers of its machine code if there is a source."""
    (tmp_path / "k.cu").write_text(KERNELS)
    (tmp_path / "k.ptx").write_text(module().text)
    args = json.dumps({"x": {"shape": [4096]}, "y": {"shape": [4096], "fill": "empty"}})
    command = ["--kernel", "copy", "--grid", "32", "--block", "128", "--args", args, "--l2", "--device", "T4"]
    T4, told = Device.named("T4"), {}
    for name in ("k.cu", "k.ptx"):
        result = CliRunner().invoke(main, ["profile", str(tmp_path / name), *command, "--json"])
        assert result.exit_code == 0, result.stderr
        told[name] = json.loads(result.stdout)["l2"]
        registers = told[name]["registers"]
        assert told[name]["resident_blocks"] == [40 * occupancy(T4, 128, registers or 0, 0).blocks]
        assert (told[name]["device"], told[name]["l2_bytes"], told[name]["thread_blocks"]) == ("T4", 4 << 20, [32])
    assert 0 < told["k.cu"]["registers"] < 32 and told["k.ptx"]["registers"] is None
    x = told["k.cu"]["tensors"]["x"]
    assert (x["read_bytes"], x["dram_read_bytes"], x["dram_write_bytes"], x["hit_rate"]) == (16384, 16384, 0, 0)
    text = CliRunner().invoke(main, ["profile", str(tmp_path / "k.cu"), *command]).stdout
    assert "behind the L2 of T4" in text and re.search(r"x +16,384 +16,384 +0\.0 %", text)
    assert "L1 and time are not modelled" in text
    lone = CliRunner().invoke(main, ["profile", str(tmp_path / "k.cu"), *command[:-3], "--device", "T4"])
    assert lone.exit_code == 2 and "--device chooses the L2 and needs --l2" in lone.stderr
    quiet = sim.profile(Module.from_source('extern "C" __global__ void quiet() {}'), grid=2, block=64, l2=T4)
    assert quiet.to_dict()["l2"]["tensors"].keys() == {"total"} and "DRAM" not in quiet.text()


def test_an_array_called_total_and_a_block_that_the_device_cannot_hold() -> None:
    source = 'extern "C" __global__ void k(const float* x, float* total) { total[threadIdx.x] = x[threadIdx.x] + x[32]; }'
    kernel, x, T4 = Module.from_source(source), np.zeros(64, np.float32), Device.named("T4")
    rows = sim.profile(kernel, grid=1, block=32, args={"x": x, "total": x.copy()}, l2=T4).to_dict()["l2"]["tensors"]
    assert rows["total (array)"]["write_bytes"] == rows["total"]["write_bytes"] == 128 and rows["total (array)"]["read_bytes"] == 0
    with pytest.raises(ValueError, match="70,000 bytes of shared memory, more than the 65,536 of T4"):
        sim.profile(kernel, grid=1, block=32, args={"x": x, "total": x.copy()}, shared_bytes=70_000, l2=T4)


def test_too_many_lines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executed, "MOST_LINES", 10)
    with pytest.raises(l2.TooLong, match="up to 10 lines"):
        profiled("copy", 64, 128, {"x": floats(64 * 128), "y": floats(64 * 128)})
