"""The benchmark of the clock's constants: its arithmetic, a dry run, its machine code, and the clock's constants given back."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.launch.nvrtc import compile_to_cubin, remarks
from cupyflash.launch.resources import parse_account
from cupyflash.sim.clock import loaded, sass
from cupyflash.sim.clock.measured import read
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.clock.whole import Clock
from suites import wide

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a script that Python runs there
rates, chips, measurements, rate_steps, records, power = (
    importlib.import_module(name) for name in ("rates", "rate_chips", "rate_measurements", "rate_steps", "records", "power")
)
H100 = Device.named("H100-SXM")


def test_constants_are_computed_from_clocks() -> None:
    assert chips.span(np.array([[10, 50], [12, 60]])) == 50
    assert measurements.line([(1, 24), (2, 26), (8, 38)]) == (pytest.approx(22), pytest.approx(2))
    assert measurements.two_groups([200] * 60 + [300] * 38 + [5000] * 2) == (200, 300, pytest.approx(60 / 98))
    assert measurements.two_groups([7, 7, 7]) == (7, 7, 1)
    blocks = np.array([[0, 100, 200], [1, 100, 210], [0, 900, 950], [1, 910, 980], [0, 1700, 1800]])
    assert measurements.gaps(blocks) == [700, 750, 700]
    assert measurements.less([10.0, 12.0], [4.0], [1.0, 2.0, 3.0]) == [4, 6]
    assert np.isnan(measurements.a_clock(1, [0])).all() and measurements.a_clock(8, [2, 4]) == [4, 2]


def test_the_table_is_found_by_cuda_s_name_of_a_device() -> None:
    by_cuda = replace(H100, name="NVIDIA H100 80GB HBM3")
    assert measurements.known(by_cuda) == measurements.known(H100) == ChipRates.of(H100).constants
    assert measurements.known(replace(H100, name="NVIDIA X1")) == {}


CHILD = """
import os, sys, time
from pathlib import Path
from records import Records
_, out, _, *names = sys.argv[1:]
with Records(Path(out), "") as records:
    for name in names:
        if name == "dram":
            time.sleep(60)
        if name == "lanes":
            os._exit(11)
        records.write("extra", {"name": name, "value": 1})
        if name == "tensor":
            os._exit(3)
"""


def test_a_measurement_that_hangs_or_ends_its_process_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "SILENT_SECONDS", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    path, script = tmp_path / "lines.jsonl", tmp_path / "child.py"
    path.write_text("")
    script.write_text(CHILD)
    assert rates.in_processes(list(measurements.MEASUREMENTS), path, records.Budget(60), [sys.executable, str(script)]) == 1
    lines = list(read(path))
    assert [line["name"] for line in lines] == list(measurements.MEASUREMENTS)
    assert [line["name"] for line in lines if "error" in line] == ["dram", "lanes"]


@pytest.mark.parametrize("device", [wide("H100-SXM"), "A100-40GB"])
def test_a_dry_run_writes_every_constant(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_STAND_IN", device)
    path = tmp_path / "dry.jsonl"
    assert rates.main(["--dry-run", "--out", str(path)]) == 0
    lines = list(read(path))
    found = {line["name"]: line for line in lines if line["kind"] == "rate"}
    assert {line["measurement"] for line in found.values()} == set(measurements.names(Device.named(device)))
    constants = ChipRates.of(Device.named(device)).constants
    assert len(set(found) & set(constants)) > (60 if device == "H100-SXM" else 50)
    assert ("wgmma.fmas" in found) == (device == "H100-SXM")
    line = found["latency.fma"]
    known = constants["latency.fma"]
    assert (line["table"], line["source"], line["unit"]) == (known.value, known.source, "clocks")
    table = list(rates.table(lines))
    assert len(table) == 1 + len(found) and any(row.startswith("latency.fma") and known.source[:30] in row for row in table)


def test_what_is_far_from_the_table_is_marked_and_errors_are_told() -> None:
    line = {"kind": "rate", "name": "latency.fma", "spread": 0.0, "table": 4.0, "source": "nak: it", "unit": "clocks"}
    failed = {"kind": "extra", "name": "dram", "error": "no"}
    near, far, error = list(rates.table([line | {"value": 4.1, "ratio": 1.025}, line | {"value": 5.0, "ratio": 1.25}, failed]))[1:]
    assert "!" not in near and "1.25 !" in far and error.split() == ["dram", "no"]


class Compiled(chips.Simulated):  # type: ignore[misc,name-defined]
    """Compiles what a GPU would get, for a Hopper, and examines the machine code in place of a measurement."""

    repeats, steps, turns = 1, chips.STEPS, (1, 2)
    simulated = False

    def __init__(self) -> None:
        self.device = H100
        self.examined: list[str] = []

    def load(self, source: str) -> Callable[[str], Any]:
        cubin, log = compile_to_cubin(source, self.options, "rates.cu")
        assert not remarks(log)
        spilled = {name: account for name, (account, _) in parse_account(log).items() if account["stores"]}
        assert not spilled, spilled
        code = sass.read(cubin).kernels

        def named(name: str) -> Any:
            def launch(*_: Any) -> None:
                assert name in code

            launch.code = code[name]  # type: ignore[attr-defined]
            return launch

        return named

    def per_step(self, launch: Any, timed: Any, threads: int = 32, blocks: int = 1) -> list[float]:
        examine(launch.code, timed)
        self.examined.append(timed.name)
        return [1.0]


def examine(code: Sequence[sass.Instruction], timed: Any) -> None:
    """The clock is read before and behind one loop, which has each of the step's instructions as often as it should, and no load of
    something else."""
    clocks = [each.address for each in code if any("SR_CLOCK" in operand for operand in each.operands)]
    begin, behind = clocks
    (end,) = (each for each in code if each.target is not None and begin < each.target < each.address < behind)
    loop = [each for each in code if end.target <= each.address <= end.address]
    wanted = timed.steps * timed.chains
    for opcode in set(timed.step.opcodes):
        parts = opcode.split(".")
        here = [each for each in loop if each.opcode.endswith(parts[0]) or each.opcode.startswith(parts[0])]
        here = [each for each in here if not each.never and set(parts[1:]) <= set(each.modifiers)]
        assert len(here) >= wanted * timed.step.opcodes.count(opcode), (timed.name, opcode, len(here), wanted)


REPEATED = {"arithmetic": 16, "shared_latencies": 15, "l1_latencies": 5, "lanes": 20, "wavefronts": 11, "tensor": 24, "clusters": 3}


@pytest.mark.parametrize("name", [*REPEATED, wide("wgmma")])
def test_each_measured_loop_is_the_chain_or_stream_that_it_should_be(name: str) -> None:
    chip = Compiled()
    list(measurements.MEASUREMENTS[name](chip))
    assert len(chip.examined) == REPEATED.get(name, 24)


class Modelled(chips.Simulated):  # type: ignore[misc,name-defined]
    """Takes the clocks of a loop from the clock's own run of the machine code."""

    repeats, steps, turns = 1, 64, (2, 6)

    def __init__(self) -> None:
        self.device = H100

    def load(self, source: str) -> Callable[[str], Any]:
        code = loaded.of_source(source, H100, self.options[1:], "rates.cu")
        return lambda name: types.SimpleNamespace(code=code, name=name)

    def per_step(self, launch: Any, timed: Any, threads: int = 32, blocks: int = 1) -> list[float]:
        clocks = []
        for turns in self.turns:
            arrays = [
                np.zeros(2048, np.uint64),
                np.array(timed.values, np.uint64),
                np.zeros(64, np.uint64),
                np.zeros(1024, np.uint64),
            ]
            clock = Clock(launch.code.launch(launch.name, ((blocks,), (threads,)), [*arrays, np.int32(turns)]).launch, H100)
            clocks.append(clock.time().seconds * 1e6 * clock.mhz)
        return [(clocks[1] - clocks[0]) / ((self.turns[1] - self.turns[0]) * timed.steps)]


@pytest.mark.parametrize("name", ["arithmetic", "l1_latencies", wide("wgmma")])
def test_the_clock_s_own_constants_come_back(name: str) -> None:
    """The way from clocks to constants is right if the clock, measured in place of a GPU, has the table's constants."""
    table = ChipRates.of(H100)
    found = {each.name: each.value for each in measurements.MEASUREMENTS[name](Modelled())}
    same = set(found) & set(table.constants)
    same -= {"wgmma.fmas"}  # two warpgroups are for a GPU
    assert len(same) >= 3
    for constant in same:
        assert found[constant] == pytest.approx(table[constant], abs=0.5), constant


def test_fences_and_arrivals_hold_a_warp_back() -> None:
    table, steps = ChipRates.of(H100), rate_steps.SHARED + rate_steps.BARRIERS
    wanted = {"fence_block": "latency.fence_block", "fence_gpu": "latency.fence_gpu", "mbarrier_arrive": "copies.mbarrier_arrive"}
    found = measurements.chains(Modelled(), [step for step in steps if step.name in wanted])
    for name, constant in wanted.items():
        assert found[name][0] == pytest.approx(table[constant], abs=10), name  # with what ptxas puts behind


def test_a_copy_past_the_l1_leaves_nothing_there() -> None:
    for kind, kept in {".ca": True, ".cg": False}.items():
        source = SOURCE % (kind, kind)
        code = loaded.of_source(source, H100, (), "k.cu")
        clock = Clock(code.launch("k", ((1,), (32,)), [np.zeros(128, np.uint32)]).launch, H100)
        asked = [issue.cost.l2_bytes for issue in clock.traces[0][0] if issue.cost is not None and issue.cost.asked]
        assert asked == [512, 0 if kept else 512]


SOURCE = """extern "C" __global__ void k(const float4* x) {
    __shared__ float4 to[64];
    const unsigned at = (unsigned)__cvta_generic_to_shared(to + threadIdx.x);
    asm volatile("{cp.async%s.shared.global [%%0], [%%2], 16;} {cp.async%s.shared.global [%%1], [%%2], 16;}"
                 :: "r"(at), "r"(at + 512), "l"(x + threadIdx.x));
}"""


@pytest.mark.parametrize(("device", "loads"), [("H100-SXM", 14), ("A100-40GB", 8)])
def test_a_dry_run_of_power_runs_every_load(device: str, loads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_STAND_IN", device)
    path = tmp_path / "dry.jsonl"
    assert power.main(["--dry-run", "--out", str(path)]) == 0
    lines = [each for each in read(path) if each["kind"] == "power"]
    assert len({each["load"] for each in lines}) == len(lines) == loads
    assert all(each["stretches"] > 0 and each["clocks"] > 0 for each in lines)


def test_rates_of_a_series_are_clocks_over_nanoseconds() -> None:
    """A chip that falls from 2,000 to 1,500 MHz after 0.1 s, measured each ms for half of it."""
    at = np.arange(0, 500_000_000, 1_000_000)
    clocks = np.cumsum(np.where(at < 100_000_000, 2_000_000, 1_500_000)) - 2_000_000
    rates_at = np.where(at < 100_000_000, 2.0, 1.5)
    taken = np.stack([clocks, at, clocks + (500_000 * rates_at).astype(int), at + 500_000], axis=1)
    found = power.told_series(taken, 0.2)
    assert found["mhz"] == pytest.approx(1500) and found["busy mhz"] == pytest.approx(1500)
    assert found["falls"][0] == [0.0, 2000] and found["falls"][-1][1] == 1500
    meter = power.Meter(None)
    meter.found = [(0.01 * k, 1000 + 6000 * (k // 10), 600_000) for k in range(100)]  # 600 W, a counter that moves each 0.1 s
    assert meter.told(1.0) == {"watts": pytest.approx(60.0), "watts at once": pytest.approx(600.0)}
