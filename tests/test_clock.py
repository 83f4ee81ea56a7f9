"""sim/clock: machine code is executed to the PTX machine's accesses, and a multiprocessor keeps the clocks that hands can count."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash import Device
from cupyflash.launch.nvrtc import compile_to_cubin
from cupyflash.multiprocessor import EXPONENTIALS, L2_BYTES, SHARED_BYTES, Multiprocessor, clock_rate, mma_rate
from cupyflash.sim import execution as passes
from cupyflash.sim.cli import main
from cupyflash.sim.clock import sass
from cupyflash.sim.clock.accesses import L1, wavefronts
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.memory import WarpAccess
from cupyflash.sim.clock.multiprocessor import WAVEFRONT, ClockedMultiprocessor, Cost, Issue, Outside, Run
from cupyflash.sim.clock.power import UNITS, Power
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.clock.sass import Control, Instruction
from cupyflash.sim.clock.steps import step_of
from cupyflash.sim.clock.traces import Loop, longest_loop
from cupyflash.sim.clock.unequal import longer
from cupyflash.sim.clock.waits import NAMED, Key
from cupyflash.sim.clock.whole import Clock
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.parameters import bind

pytestmark = pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")

A6000 = Device.named("RTX A6000")
H100 = Device.named("H100-SXM")
A100 = Device.named("A100-40GB")
SOURCE = r"""
extern "C" __global__ void total(const float* x, float* y, int n) {
  __shared__ float s[32];
  float t = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) t += x[i];
  for (int o = 16; o; o /= 2) t += __shfl_down_sync(~0u, t, o);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = t;
  __syncthreads();
  if (threadIdx.x < 32) {
    t = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0;
    for (int o = 16; o; o /= 2) t += __shfl_down_sync(~0u, t, o);
    if (!threadIdx.x) atomicAdd(y, t);
  }
}
extern "C" __global__ void gathered(const int* rows, const float* x, float* y, int n, int d) {
  const int r = blockIdx.x;
  const int column = threadIdx.x % d;
  for (int k = rows[r] + threadIdx.x / d; k < rows[r + 1]; k += blockDim.x / d) y[k * d + column] = x[k % 7 * d + column];
}
extern "C" __global__ void voted(const float* x, float* y, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {  // a barrier's votes on numbers as they lie in memory
    const float number = x[i];
    if (__syncthreads_or(number > 3.f)) y[i] = 1;
    if (__syncthreads_and(!(number >= 2.f))) y[i + n] = 2;
    y[2 * n + (i + __syncthreads_count(fabsf(number) != 1.f)) % n] = 3;
  }
}
extern "C" __global__ void products(const float* x, float* y, int n) {
  float a[8];
  for (int k = 0; k < 8; k++) a[k] = x[threadIdx.x + k];
#pragma unroll 1
  for (int i = 0; i < n; i++)
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int k = 0; k < 8; k++) a[k] = a[k] * a[k] + 1.f;
  for (int k = 0; k < 8; k++) y[(blockIdx.x * 8 + k) * blockDim.x + threadIdx.x] = a[k];
}
extern "C" __global__ void copied(const float4* x, float4* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i];
}
extern "C" __global__ void swapped(int* y, int apart) {
  int* to = y + blockIdx.x * apart;
  int old = *to, before;
  if (threadIdx.x == 0)
    do {
      before = old;
      old = atomicCAS(to, before, __float_as_int(__int_as_float(before) + 1.f));
    } while (old != before);
}
extern "C" __global__ void chosen(const float* x, float* y, int inside) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float* from = inside ? s : x;
  y[threadIdx.x] = from[threadIdx.x ^ 1];
}
"""


def requested(traffic: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: (each.read_bytes, each.write_bytes, each.read_sectors, each.write_sectors) for name, each in traffic.items()}


@cache
def module() -> Module:
    return Module.from_source(SOURCE)


@cache
def kernel(name: str, capability: str) -> CubinKernel:
    return CubinKernel.of(compile_to_cubin(SOURCE, (f"-arch=sm_{capability}",), "kernel.cu")[0], name)


def launched(name: str, capability: str, grid: int, block: int, args: Mapping[str, Any]) -> CodeLaunch:
    bound = bind(name, module().program.functions[name].params, args, ())
    return CodeLaunch(kernel(name, capability), (grid,), (block,), bound)


@pytest.mark.parametrize("capability", ["80", "90", *(pytest.param(each, marks=pytest.mark.wide) for each in ("75", "86", "120"))])
def test_machine_code_makes_the_accesses_of_ptx(capability: str) -> None:
    f, sizes = np.float32, {"n": np.int32(3), "d": np.int32(12)}
    cases: list[tuple[str, int, int, dict[str, Any]]] = [
        ("total", 3, 128, {"x": np.ones(1000, f), "y": np.zeros(1, f), "n": np.int32(1000)}),
        ("voted", 1, 64, {"x": np.repeat([1, -4, 5, 2], 64).astype(f), "y": np.zeros(768, f), "n": np.int32(256)}),
        ("gathered", 3, 96, {"rows": np.array([0, 5, 6, 40], np.int32), "x": np.ones(84, f), "y": np.zeros(480, f), **sizes}),
    ]
    for name, grid, block, args in cases:
        run = launched(name, capability, grid, block, args)
        for index in run.indices():
            for _ in run.run(index):
                pass
        of_ptx = module().launch(name, grid, block, args, races=False)
        assert requested(run.traffic) == requested(of_ptx.traffic)
        together = launched(name, capability, grid, block, args)
        for _ in together.run(*together.indices()):
            pass
        assert requested(together.traffic) == requested(of_ptx.traffic)


class Beside:
    """A module of the PTX machine whose launches are run from machine code too."""

    def __init__(self, module: Any, cubin: bytes, unequal: dict[str, set[str]]) -> None:
        self.module, self.cubin, self.unequal = module, cubin, unequal

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def launch(self, name: str, grid: Any, block: Any, args: Mapping[str, Any], **options: Any) -> Any:
        copied = {"p": {key: value.copy() if isinstance(value, np.ndarray) else value for key, value in args["p"].items()}}
        found = self.module.launch(name, grid, block, args, **options)
        bound = bind(name, self.module.program.functions[name].params, copied, ())
        sizes = [(each,) if isinstance(each, int) else each for each in (grid, block)]
        run = CodeLaunch(CubinKernel.of(self.cubin, name), *sizes, bound, options.get("shared_bytes", 0))
        for _ in run.run(*run.indices()):
            pass
        ours, its = requested(run.traffic), requested(found.traffic)
        self.unequal[name] = {tensor for tensor in ours.keys() & its.keys() if ours[tensor] != its[tensor]}
        return found


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """By kernel, the tensors of which machine code and PTX request different bytes or sectors."""
    from cupyflash.launch import cubins
    from cupyflash.launch.compiler import program

    found: dict[str, set[str]] = {}
    real = passes.module

    def beside(kernel: Any, capability: tuple[int, int]) -> Beside:
        return Beside(real(kernel, capability), cubins.compiled(program(kernel, capability)).code, found)

    monkeypatch.setattr(passes, "module", beside)
    yield found


@pytest.mark.parametrize(
    ("words", "but"),
    [
        ("--algorithm fa2", {}),
        pytest.param("--algorithm fa2 --device H100-SXM", {}, marks=pytest.mark.wide),
        ("--algorithm fa3 --device H100-SXM", {}),
        pytest.param("--algorithm fa3 --device H100-SXM --head-dim 128 --causal", {}, marks=pytest.mark.wide),
        # ptxas makes wide stores of narrow ones, so dQ's sectors are fewer
        pytest.param("--algorithm fa2 --backward", {"fa2_backward_finish": {"dQ"}}, marks=pytest.mark.wide),
        pytest.param("--algorithm fa2 --backward --deterministic", {}, marks=pytest.mark.wide),
        pytest.param("--algorithm fa3 --backward --device H100-SXM", {"fa2_backward_finish": {"dQ"}}, marks=pytest.mark.wide),
        pytest.param("--algorithm fa2 --backward --bias", {"fa2_backward_finish": {"dQ"}}, marks=pytest.mark.wide),
        pytest.param("--algorithm standard --backward", {}, marks=pytest.mark.wide),
        pytest.param("--algorithm fa1 --device T4", {}, marks=pytest.mark.wide),
    ],
)
def test_our_kernels_machine_code_makes_the_accesses_of_their_ptx(
    words: str, but: dict[str, set[str]], unequal: dict[str, set[str]]
) -> None:
    done = CliRunner().invoke(main, ["verify", "--seqlen", "40", "--heads", "1", *words.split()])
    assert done.exit_code == 0, done.output
    assert unequal and not [name for name, tensors in unequal.items() if tensors - but.get(name, set())]


def test_every_device_has_every_constant_with_a_source() -> None:
    for device in Device.catalogue():
        rates = ChipRates.of(device)
        assert {"latency.alu", "lanes.fp32", "l2.rate", "dram.read", "clock.boost"} < set(rates.constants)
        assert all(each.source and ":" in each.source for each in rates.constants.values()), device.name
    assert ChipRates.of(A6000)["lanes.fp32"] == 32 and ChipRates.of(Device.named("A100-40GB"))["lanes.fp32"] == 16
    taken = ChipRates.of(Device.named("A100-40GB")).constants["latency.barrier"]  # 8.0 has none of its own
    assert taken.assumed and taken.source.startswith("assumed: as 8.6")
    with pytest.raises(ValueError, match=r"compute_capability = 3\.5: rates are known for"):
        ChipRates.of(replace(A6000, name="old", compute_capability=(3, 5)))
    slower = ChipRates.of(A6000).slower(2)
    assert slower["latency.barrier"] == 2 * ChipRates.of(A6000)["latency.barrier"] and slower["latency.alu"] == 4
    assert slower["launch.start"] == 2 * ChipRates.of(A6000)["launch.start"]


def test_the_planner_s_rates_are_those_of_the_table() -> None:
    for device in Device.catalogue():
        rates, sm = ChipRates.of(device), Multiprocessor.like(device.compute_capability)
        cores = rates["issue.sub_cores"]
        assert (sm.fma_lanes, EXPONENTIALS) == (cores * rates["lanes.fp32"], cores * rates["lanes.special"]), device.name
        assert rates["l1.sm_port"] >= L2_BYTES and SHARED_BYTES == WAVEFRONT  # an H100's port is wider
        assert mma_rate(device) == pytest.approx(2048 * cores / rates["tensor.hmma_16816_f32"], rel=0.06), device.name
        assert clock_rate(device) == pytest.approx(rates["clock.boost"] * 1e6, rel=0.01), device.name


NOTHING = dict.fromkeys((*UNITS, "L2", "DRAM"), 0.0)


@pytest.mark.parametrize(
    ("busy", "mhz", "watts"),
    [
        ({}, 1993, 128.5),
        ({"FMA": 0.93}, 1990, 381.7),
        ({"MUFU": 0.99, "FMA": 0.25}, 1992, 284.7),
        ({"L2": 0.82, "ALU": 0.2}, 1978, 507.1),
        ({"DRAM": 0.93, "L2": 0.29, "ALU": 0.07}, 1979, 526.6),
        ({"tensor": 0.98, "shared memory and L1": 0.61}, 1643, 781.4),
    ],
)
def test_the_watts_of_a_load_are_those_that_an_h100_took(busy: Mapping[str, float], mhz: float, watts: float) -> None:
    power = Power(H100, ChipRates.of(H100))
    assert power.watts({**NOTHING, **busy}, mhz, mhz) == pytest.approx(watts, rel=0.03)


@pytest.mark.parametrize(
    ("flops", "mhz", "read", "watts"), [(1528e9, 1740, 679, 214), (12326e9, 1740, 675, 281), (22250e9, 1680, 358, 300)]
)
def test_the_watts_of_an_a6000_are_near_those_of_the_a40(flops: float, mhz: float, read: float, watts: float) -> None:
    """Rows of the roofline that the constants come from: FLOP/s, MHz, GB/s, the mean watts of eight cards. The program takes more
    for an FMA than loads of nothing else do: its idle, L2 and DRAM are theirs."""
    rates = ChipRates.of(A6000)
    assert A6000.hbm_bandwidth is not None
    l2, dram = read * 1e9 / (rates["l2.rate"] * mhz * 1e6), read * 1e9 / (A6000.hbm_bandwidth * rates["dram.read"])
    fma = flops / (A6000.sm_count * 256 * mhz * 1e6)
    found = Power(A6000, rates).watts({**NOTHING, "FMA": fma, "L2": l2, "DRAM": dram}, mhz, mhz)
    assert 0.85 * watts < found <= 1.02 * watts


def shared_access(addresses: Sequence[int], size: int, write: bool = False) -> WarpAccess:
    return WarpAccess("shared", size, write, np.array(addresses, np.int64).reshape(1, 32), np.ones((1, 32), np.bool_))


@pytest.mark.parametrize(
    ("addresses", "size", "write", "clocks"),
    [
        (range(0, 128, 4), 4, False, 1),
        ([0] * 32, 4, False, 1),
        (range(0, 32 * 8, 8), 4, False, 2),
        (range(0, 32 * 128, 128), 4, False, 32),
        (range(0, 256, 8), 8, False, 2),
        (range(0, 512, 16), 16, False, 4),
        ([16 * (lane // 16) for lane in range(32)], 16, False, 2),  # all lanes pair at distance 1: two quarters in a wavefront
        ([16 * (lane // 16) for lane in range(32)], 16, True, 4),  # stores do not
        ([32 * (lane % 16) for lane in range(32)], 16, False, 8),  # lanes pair at distance 16 only, and conflict
        ([8 * (lane // 2) for lane in range(32)], 8, False, 1),
    ],
)
def test_shared_memory_has_the_chips_conflicts(addresses: Sequence[int], size: int, write: bool, clocks: int) -> None:
    assert wavefronts(shared_access(addresses, size, write), ChipRates.of(A6000)).tolist() == [clocks]


def test_the_l1_keeps_sectors_and_looks_lines_up_in_four_banks() -> None:
    rates = ChipRates.of(A6000)
    l1 = L1(rates, int(rates["l1.bytes"]) - 2 * 128)  # two lines
    assert l1.look_up(np.array([0, 1]), load=True) == (1, 2) and l1.look_up(np.array([0, 1, 2]), load=True) == (1, 1)
    assert l1.look_up(np.array([0]), load=False) == (1, 1)
    l1.look_up(np.array([4]), load=True), l1.look_up(np.array([8]), load=True)
    assert l1.look_up(np.array([0]), load=True) == (1, 1)
    assert l1.look_up(np.arange(0, 16, 4), load=True)[0] == 1  # four lines, a bank each
    assert l1.look_up(np.arange(0, 32 * 4 * 1024, 4 * 1024), load=True)[0] == 32  # lines 1,024 apart have one bank


FAST = Outside(64.0, 64.0, 16.0, 12.0, 64.0, 250.0, 470.0)


def code_of(*lines: tuple[str, Control]) -> list[Instruction]:
    found = []
    for number, (text, control) in enumerate(lines):
        name, _, operands = text.partition(" ")
        opcode, *modifiers = name.split(".")
        found.append(
            Instruction(
                16 * number, opcode, tuple(modifiers), tuple(each.strip() for each in operands.split(",") if each), control=control
            )
        )
    return found


def run_of(code: Sequence[Instruction], warps: int = 1, device: Device = A6000, blocks: int = 1) -> Run:
    rates = ChipRates.of(device)
    met = ((Key(NAMED, 0, 0, 0), True, True),)
    trace = [Issue(number, mark=True, signals=met if each.opcode == "BAR" else ()) for number, each in enumerate(code)]
    steps = [step_of(each, rates) for each in code]
    return ClockedMultiprocessor(steps, rates, FAST, blocks).run([[trace] * warps] * blocks)


def clocks_of(code: Sequence[Instruction], device: Device = A6000) -> list[float]:
    """The clocks at which a single warp issued each instruction."""
    return [begin for begin, _ in run_of(code, device=device).turns]


def test_an_instruction_waits_for_stall_counts_and_scoreboards() -> None:
    code = code_of(
        ("FFMA R0, R2, R4, R6", Control(4)),
        ("LDS R1, [R0]", Control(1, writes=0)),
        ("FADD R2, R1, R1", Control(1, waits=(0,))),
        ("MOV R3, R4", Control(1)),
    )
    assert clocks_of(code) == [0, 4, 4 + ChipRates.of(A6000)["latency.lds_32"], 5 + ChipRates.of(A6000)["latency.lds_32"]]


def test_the_sixth_access_waits_for_the_first_to_leave_the_queue() -> None:
    code = code_of(*[("LDG.E R1, [R2.64]", Control(1))] * 8)
    first = 2  # Huerta et al., table 1: the first issues at clock 2
    assert [first + each for each in clocks_of(code)] == [2, 3, 4, 5, 6, 13, 17, 21]


def test_operands_of_one_bank_hold_the_next_instruction_back_but_for_kept_ones() -> None:
    apart = code_of(*[("FFMA R0, R2, R5, R6", Control(1))] * 6)
    together = code_of(*[("FFMA R0, R2, R4, R6", Control(1))] * 6)
    kept = code_of(*[("FFMA R0, R2.reuse, R4.reuse, R6", Control(1))] * 6)
    ends = [clocks_of(code)[-1] for code in (apart, together, kept)]
    assert ends[1] > ends[0] >= ends[2] and ends[2] == 5
    assert clocks_of(together)[2] - clocks_of(together)[1] == 3  # Huerta et al., section 5.3: two clocks are lost


def test_units_take_their_clocks_and_whole_numbers_only_half_of_the_fma_unit() -> None:
    control = Control(1)
    for text, clocks in (
        ("FFMA R0, R2.reuse, R4.reuse, R6.reuse", 1),
        ("IMAD R0, R2.reuse, R4.reuse, R6.reuse", 2),
        ("IADD3 R0, R2, R5, RZ", 2),
    ):
        begins = clocks_of(code_of(*[(text, control)] * 20))
        assert begins[-1] - begins[9] == 10 * clocks, text
    begins = clocks_of(code_of(*[("MUFU.EX2 R0, R1", control)] * 20))
    assert begins[-1] - begins[9] == 80


def test_shared_memory_gives_its_results_while_a_load_from_dram_is_under_way() -> None:
    rates = ChipRates.of(A6000)
    code = code_of(
        ("LDG.E R0, [R2.64]", Control(1, writes=0)),
        ("LDS R4, [R6]", Control(2, writes=1)),
        ("IADD3 R8, R4, R5, RZ", Control(1, waits=(1,))),
        ("IADD3 R9, R0, R5, RZ", Control(1, waits=(0,))),
    )
    trace = [Issue(0, Cost(1.0, 128.0, 128.0), mark=True), Issue(1, Cost(1.0), mark=True), *(Issue(k, mark=True) for k in (2, 3))]
    begins = [at for at, _ in ClockedMultiprocessor([step_of(each, rates) for each in code], rates, FAST, 1).run([[trace]]).turns]
    assert begins[2] - begins[1] < 30 and begins[3] >= FAST.dram_latency


def test_the_l2_updates_sectors_at_a_rate_of_its_own() -> None:
    rates = ChipRates.of(A6000)
    for text, rate in (("STG.E.128 [R2.64], R4", FAST.l2_bytes), ("REDG.E.ADD.F32x4 [R2.64], R4", FAST.atomic_bytes)):
        steps = [step_of(each, rates) for each in code_of((text, Control(1)))]
        traces = [[Issue(0, Cost(4.0, 2048.0))] * times for times in (20, 40)]
        few, many = (ClockedMultiprocessor(steps, rates, FAST, 1).run([[trace]]).drained for trace in traces)
        assert many - few == 20 * 2048 / rate, text


def test_loads_do_not_wait_for_what_the_l2_adds() -> None:
    rates = ChipRates.of(A6000)
    code = code_of(("REDG.E.ADD.F32x4 [R2.64], R4", Control(1)), ("LDG.E R0, [R2.64]", Control(1, writes=0)))
    run = ClockedMultiprocessor([step_of(each, rates) for each in code], rates, FAST, 1)
    run.run([[[*[Issue(0, Cost(4.0, 2048.0))] * 4, Issue(1, Cost(1.0, 2048.0))]]])
    assert run.updated > 4 * 2048 / FAST.atomic_bytes and run.l2 < run.updated


def test_swaps_of_one_number_succeed_one_after_another() -> None:
    y, blocks = np.zeros(1024, np.int32), 64
    apart, shared = (Clock(launched("swapped", "80", blocks, 32, {"y": y, "apart": np.int32(each)}), A100) for each in (8, 0))
    assert (apart.swaps, shared.swaps) == (0, 1)
    more = (shared.time().seconds - apart.time().seconds) * shared.mhz * 1e6
    assert abs(more / shared.outside.l2_latency - (blocks - 1)) < 0.1 * blocks


def test_of_blocks_that_run_at_once_the_longer_is_found() -> None:
    rows = np.arange(4, dtype=np.int32) ** 2 * 64  # of 64, 192 and 320
    args = {"rows": rows, "x": np.ones(84, np.float32), "y": np.zeros(12 * 576, np.float32), "n": np.int32(3), "d": np.int32(12)}
    launch = launched("gathered", "80", 3, 48, args)
    assert longer(launch, (0, 2)) == 2 and longer(launch, (2, 0)) == 2 and longer(launch, (1, 1)) == 1


@pytest.mark.parametrize("inside", [0, 1])
def test_generic_loads_reach_shared_memory_too(inside: int) -> None:
    args = {"x": np.ones(64, np.float32), "y": np.zeros(64, np.float32), "inside": np.int32(inside)}
    launch = launched("chosen", "90", 1, 64, args)
    code = launch.kernel.instructions
    accesses = [event.access for event in launch.run((0, 0, 0)) if code[event.at].opcode == "LD"]
    assert {each.space for each in accesses if each} == {("global", "shared")[inside]}


def test_the_system_s_shared_memory_is_no_part_of_a_kernel_s() -> None:
    assert [kernel("chosen", capability).shared_bytes for capability in ("80", "90")] == [256, 256]


def test_a_barrier_waits_for_all_warps_of_the_block() -> None:
    code = code_of(("MOV R0, R1", Control(15)), ("BAR.SYNC 0x0", Control(1)), ("MOV R0, R1", Control(1)))
    rates = ChipRates.of(A6000)
    for warps in (1, 8):
        met = 2 * (warps - 1) + 15
        assert run_of(code, warps).turns[2][0] == met + rates["latency.barrier"] + rates["latency.barrier_warp"]
    alone, beside = (max(run_of(code, 4, blocks=count).ends) for count in (1, 2))
    assert beside - alone == 4 * rates["latency.barrier_warp"]  # one unit takes the warps of both blocks


def test_traces_have_the_barriers_at_which_warps_of_a_block_meet() -> None:
    args = {"x": np.ones(1000, np.float32), "y": np.zeros(1, np.float32), "n": np.int32(1000)}
    clock = Clock(launched("total", "86", 2, 128, args), A6000)
    code = clock.launch.kernel.instructions
    met = [[issue.signals for issue in trace if code[issue.at].opcode == "BAR"] for trace in clock.traces[0]]
    assert len(met) == 4 and all(met) and all(each == met[0] and each[0][0][1:] == (True, True) for each in met)


def test_a_wait_for_copies_ends_when_all_but_some_groups_have_arrived() -> None:
    copies = [("LDGSTS.E [R2], [R4.64]", Control(1)), ("LDGDEPBAR", Control(1, writes=0))]
    rest = [("DEPBAR.LE SB0, {}", Control(4)), ("MOV R0, R1", Control(1))]
    ends = []
    for pending in (0, 1, 2):
        code = code_of(*copies * 2, *[(text.format(hex(pending)), control) for text, control in rest])
        ends.append(clocks_of(code)[-1])
    assert ends[0] > ends[1] > ends[2] == 8


def test_the_longest_loop_is_the_outermost_that_turns_often() -> None:
    assert longest_loop(range(100)) is None
    inner = [2, 3, 4] * 20
    path = [0] + [1, *inner, 5] * 30 + [6]
    assert longest_loop(path) == Loop(1, 30)
    assert longest_loop([0, 1, *inner * 2, 5]) == Loop(2, 40)
    few = [1, *[2, 3, 4] * 4, *range(5, 40)]  # 16 outer turns are too few to leave most of the way out, and inner ones not alike
    assert longest_loop([0, *few * 16, 40]) is None


def test_a_launch_that_multiplies_only_or_copies_only_is_near_its_limit() -> None:
    f, blocks = np.float32, 84 * 4
    args: dict[str, Any] = {"x": np.ones(1024, f), "y": np.zeros(blocks * 256 * 8, f), "n": np.int32(400)}
    products = Clock(launched("products", "86", blocks, 256, args), A6000).time()
    assert products.busy["FMA"] > 0.8 and 0.8 < products.tflops / 38.7 < 1
    assert products.sampled == "4 of 336 blocks, 10 of 400 turns of their loop"
    size = 84 * 6 * 4 * 256
    copied = Clock(
        launched("copied", "86", size // 256, 256, {"x": np.ones(4 * size, f), "y": np.zeros(4 * size, f)}), A6000
    ).time()
    assert copied.binds == "DRAM"
    assert 0.6 < 32 * size / copied.seconds / 768e9 < 1


def test_a_clock_refuses_other_devices_and_blocks_that_fit_nowhere() -> None:
    launch = launched("copied", "86", 1, 256, {"x": np.ones(1024, np.float32), "y": np.zeros(1024, np.float32)})
    with pytest.raises(ValueError, match=r"device = H200: its compute capability is 9\.0, the machine code is for 8\.6"):
        Clock(launch, Device.named("H200"))
    launch.shared_bytes = 1 << 20
    with pytest.raises(ValueError, match="no multiprocessor of RTX A6000 holds one"):
        Clock(launch, A6000)


def test_assumed_latencies_give_a_spread() -> None:
    launch = launched(
        "total", "86", 100, 256, {"x": np.ones(100000, np.float32), "y": np.zeros(1, np.float32), "n": np.int32(100000)}
    )
    clock = Clock(launch, A6000)
    low, high = clock.spread()
    assert low < clock.time().seconds < high < 2 * low


def test_the_command_times_a_file(tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(SOURCE)
    words = ["time", str(file), "--kernel", "copied", "--grid", "16", "--block", "256", "--device", "RTX A6000"]
    args = json.dumps([{"shape": [16384]}, {"shape": [16384]}])
    done = CliRunner().invoke(main, [*words, "--args", args, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["kernel"] == "copied" and found["seconds"] > 0 and found["mhz"] == 1800 and set(found["busy"]) >= {"DRAM", "issue"}
    cold = json.loads(CliRunner().invoke(main, [*words, "--args", args, "--json", "--cold"]).stdout)
    assert cold["seconds"] > found["seconds"] and cold["busy"]["DRAM"] > 0 == found["busy"]["DRAM"]
    told = CliRunner().invoke(main, [*words, "--args", args, "--mhz", "900"])
    assert "at 900 MHz and 1" in told.stdout and "1 of 16 blocks" in told.stdout and "DRAM" in told.stdout
    wrong = CliRunner().invoke(main, [*words[:3], "missing", *words[4:], "--args", args])
    assert wrong.exit_code == 2 and "kernel 'missing' is not in this module" in wrong.output
