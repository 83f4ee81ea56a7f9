"""sim/clock: Hopper's engines, bulk copies, mbarriers and the products of warpgroups, and launches whose roles differ."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_clock import A100, A6000, FAST, H100, NOTHING, clocks_of, code_of, requested, run_of

from cupyflash.launch.nvrtc import compile_to_cubin
from cupyflash.sim.clock import recorded, sass
from cupyflash.sim.clock.engines import Products
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.multiprocessor import IDLE, ClockedMultiprocessor, Cost, Issue
from cupyflash.sim.clock.operands import UnknownInstruction
from cupyflash.sim.clock.power import Power
from cupyflash.sim.clock.rates import ChipRates, Constant
from cupyflash.sim.clock.sass import Control
from cupyflash.sim.clock.steps import of_halves, step_of
from cupyflash.sim.clock.traces import Tracer
from cupyflash.sim.clock.waits import PHASE, Key, Waits
from cupyflash.sim.clock.whole import Clock
from cupyflash.sim.ptx import Module, TensorMap
from cupyflash.sim.ptx.parameters import BoundArguments, BoundTensor, bind

pytestmark = pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")

SUMS = 32
RING = """
struct alignas(128) Map { unsigned long long words[16]; };
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(unsigned bar, int parity) {
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again;}"
               ::"r"(bar), "r"(parity) : "memory");
}
__device__ void arrive_at(unsigned bar, int rank) {
  if (CLUSTER == 1)  // a release to the cluster has a fence of the GPU, which hides what stages are for
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
  else asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];}"
               ::"r"(bar), "r"(rank) : "memory");
}
__device__ unsigned long long described(unsigned p) { return (p & 0x3FFFF) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62; }
__device__ unsigned rank() { unsigned r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

#define COPY "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
extern "C" __global__ void __launch_bounds__(256)
ring(const __grid_constant__ Map A, const __grid_constant__ Map B, float* y, int turns) {
  extern __shared__ __align__(1024) unsigned char sram[];
  __shared__ __align__(8) unsigned long long full[STAGES], empty[STAGES];
  const unsigned base = (at(sram) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at(full + s)));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(empty + s)), "r"(4 * CLUSTER));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      for (int k = 0; k < turns; k++) {
        const int s = k % STAGES;
        wait(at(empty + s), k / STAGES & 1 ^ 1);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 16384;" ::"r"(at(full + s)) : "memory");
        const unsigned a = base + s * 16384, b = a + 8192;
        asm volatile(COPY " [%0], [%1, {%2, %3}], [%4];" ::
          "r"(a), "l"(&A), "r"(k * 64), "r"(blockIdx.x * 64), "r"(at(full + s)) : "memory");
#if CLUSTER == 1
        asm volatile(COPY " [%0], [%1, {%2, %3}], [%4];" ::
          "r"(b), "l"(&B), "r"(k * 64), "r"(0), "r"(at(full + s)) : "memory");
#else
        asm volatile(COPY ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::
          "r"(b + rank() * 4096), "l"(&B), "r"(k * 64), "r"(rank() * 32), "r"(at(full + s)), "h"((short)3) : "memory");
#endif
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    float d[SUMS] = {};
    for (int k = 0; k < turns; k++) {
      const int s = k % STAGES;
      wait(at(full + s), k / STAGES & 1);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      for (int j = 0; j < 4; j++) {
        const unsigned long long a = described(base + s * 16384 + j * 32), b = described(base + s * 16384 + 8192 + j * 32);
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {REGISTERS}, %SUMS, %NEXT, 1, 1, 1, 0, 0;"
                     : OUTPUTS : "l"(a), "l"(b));
      }
      asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (threadIdx.x % 32 == 0)
        for (int r = 0; r < CLUSTER; r++) arrive_at(at(empty + s), r);
    }
    for (int i = 0; i < SUMS; i++) y[(blockIdx.x * 128 + threadIdx.x - 128) * SUMS + i] = d[i];
  }
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
"""
RING = (
    RING.replace("REGISTERS", ", ".join(f"%{k}" for k in range(SUMS))).replace("%SUMS", f"%{SUMS}").replace("%NEXT", f"%{SUMS + 1}")
)
RING = RING.replace("OUTPUTS", ", ".join(f'"+f"(d[{k}])' for k in range(SUMS))).replace("SUMS", str(SUMS))


def ring(stages: int, turns: int, blocks: int, cluster: int = 1) -> tuple[CodeLaunch, Module, dict[str, Any]]:
    """A launch of `ring`: a warp copies tiles of A, of each block, and of B, and a warpgroup multiplies them, turn by turn."""
    options = (f"-DSTAGES={stages}", f"-DCLUSTER={cluster}")
    module = Module.from_source(RING, options=(*options, "-arch=compute_90a"))
    f = np.float16
    a, b = (
        TensorMap(np.zeros((64 * blocks, 64 * turns), f), (64, 64), swizzle=128),
        TensorMap(np.zeros((64, 64 * turns), f), (64, 64 // cluster), swizzle=128),
    )
    args = {"A": a, "B": b, "y": np.zeros(blocks * 128 * SUMS, np.float32), "turns": np.int32(turns)}
    cubin = compile_to_cubin(RING, ("-arch=sm_90a", *options), "ring.cu")[0]
    bound = bind("ring", module.program.functions["ring"].params, args, ())
    shared = 1024 + 16384 * stages
    return CodeLaunch(CubinKernel.of(cubin, "ring"), (blocks,), (256,), bound, shared, cluster=(cluster,)), module, args


@pytest.mark.parametrize("cluster", [1, 2])
def test_roles_with_bulk_copies_and_warpgroup_products_make_the_accesses_of_ptx(cluster: int) -> None:
    run, module, args = ring(2, 5, 2, cluster)
    issued: Counter[str] = Counter()
    for event in run.run(*run.indices()):
        issued[run.kernel.instructions[event.at].opcode] += len(event.warps)
    of_ptx = module.launch("ring", 2, 256, args, shared_bytes=1024 + 2 * 16384, races=False, cluster=cluster)
    ours, its = requested(run.traffic), requested(of_ptx.traffic)
    assert {name: each[:2] for name, each in ours.items()} == {name: its[name][:2] for name in ours}
    assert (
        issued["UTMALDG"] == 2 * 2 * 5 and issued["HGMMA"] == 2 * 5 * 4 * 4
    )  # a block, tile and turn; a block, turn, depth and warp


def test_a_ring_is_as_fast_as_its_products_at_most_and_slower_with_fewer_stages() -> None:
    clocks = []
    for stages in (1, 2, 4):
        launch, _, _ = ring(stages, 40, 8)
        clock = Clock(launch, H100)
        clocks.append(clock.sample(1).clocks)
        assert clock.flops() == 2 * 64 * 64 * 64 * 40 * 8
    assert clocks[0] > 1.3 * clocks[1] > 1.3 * clocks[2] > 1.3 * 40 * 4 * 32  # four products a turn, 32 clocks each


def test_a_multicast_asks_the_l2_for_half_as_much() -> None:
    asked = {}
    for cluster in (1, 2):
        launch, _, _ = ring(2, 12, 8, cluster)
        clock = Clock(launch, H100)
        asked[cluster] = sum(issue.cost.l2_bytes for trace in clock.traces[0] for issue in trace if issue.cost and issue.signals)
        wavefronts = sum(issue.cost.pipe for trace in clock.traces[0] for issue in trace if issue.cost and issue.signals)
        assert wavefronts == 12 * 16384 / 128  # all of both tiles comes to each block
    assert asked == {1: 12 * 16384, 2: 12 * (8192 + 4096)}


def test_a_ring_without_its_middle_takes_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    short = Clock(ring(4, 60, 8)[0], H100)
    seconds, sampled, flops = short.time().seconds, short.sampled, short.flops()
    assert "without" in sampled
    monkeypatch.setattr(recorded, "BEFORE", 10**6)
    whole = Clock(ring(4, 60, 8)[0], H100)
    assert whole.time().seconds == pytest.approx(seconds, rel=0.02) and whole.flops() == flops


def test_a_warp_that_has_no_part_in_the_ring_leaves_out_what_it_shares_with_the_others() -> None:
    """A ring of a consumer and a storing warp (number 8), one of a producer and the consumer (16), which the producer fills a turn
    ahead, and one of the producer with a warp that only it meets (24)."""
    turns, phase = 30, lambda number, turn: Key(PHASE, 0, number, turn)
    recordings = [recorded.Recording() for _ in range(4)]

    def issue(warp: int, at: int, *keys: Key) -> None:
        if keys:
            recordings[warp].signals[len(recordings[warp].at)] = tuple((key, False, True) for key in keys)
        recordings[warp].at.append(at)

    for turn in range(turns):
        issue(0, 1, phase(16, turn)), issue(0, 2, phase(8, turn)), issue(0, 3)
        issue(1, 5, phase(8, turn)), issue(1, 6)
        issue(2, 7, phase(24, turn)), issue(2, 8, phase(16, turn + 1)), issue(2, 9)
        issue(3, 10, phase(24, turn)), issue(3, 11)
    cut = recorded.Cut(phase(8, 4), phase(8, 24), 20, 4, 2)
    out = recorded.left_out(recordings, [cut])
    each = [len(recording.at) // turns for recording in recordings]
    assert [(end - begin) // size for ((begin, end),), size in zip(out, each, strict=True)] == [20, 20, 20, 20]
    gone = [
        {key for at, signals in each.signals.items() if any(b <= at < e for b, e in ranges) for key, _, _ in signals}
        for ranges, each in zip(out, recordings, strict=True)
    ]
    assert {key for key in gone[2] if key.number == 24} == gone[3] and {key for key in gone[0] if key.number == 8} == gone[1]


def test_a_jump_by_a_table_goes_to_its_entry() -> None:
    """BRX adds a register to the address behind it; the table is constant bank 2."""
    source = """extern "C" __global__ void k(int* x) {
  int y = x[threadIdx.x];
  switch (blockIdx.x) {
    case 0: y = y * y + 3; __syncthreads(); break;
    case 1: y = __popc(y); __threadfence(); break;
    case 2: y = __brev(y) ^ 5; break;
    case 3: y = __clz(y) + 7; __threadfence_block(); break;
    case 4: y = __ffs(y); __syncwarp(); break;
    case 5: atomicAdd(x + 64, y); break;
    default: y = 9;
  }
  x[threadIdx.x] = y;
}"""
    code = CubinKernel.of(compile_to_cubin(source, ("-arch=sm_90a",), "k.cu")[0], "k")
    assert any(i.opcode == "BRX" for i in code.instructions) and code.jump_tables
    for block, wanted in ((0, 12), (1, 2), (2, 0xC0000005), (3, 37), (4, 1), (6, 9)):
        x = np.full(128, 3, np.int32)
        bound = BoundArguments(bytearray(8), {"x": 0}, [BoundTensor("x", "x", x, "x", 0)])
        launch = CodeLaunch(code, (7,), (32,), bound)
        for _ in launch.run((block, 0, 0)):
            pass
        assert launch.tensors[0].views[4][:32].tolist() == [wanted] * 32


def test_products_wait_for_all_four_warps_and_run_one_after_another() -> None:
    rates = ChipRates.of(H100)
    code = code_of(
        ("WARPGROUP.ARRIVE", Control(1)),
        *[("HGMMA.64x256x16.F32 R24, gdesc[UR4], R24", Control(3))] * 9,
        ("HGMMA.64x256x16.F32 R24, gdesc[UR4], R24, gsb0", Control(3)),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", Control(2)),
        ("MOV R0, R1", Control(1)),
    )
    trace = [Issue(number, mark=True) for number in range(len(code))]
    steps = [step_of(each, rates) for each in code]
    late = [Issue(len(code) - 1)] * 1000 + trace  # a warp that comes a thousand instructions later
    ends = []
    for traces in ([trace] * 4, [trace] * 8, [*[trace] * 3, late]):
        ends.append(ClockedMultiprocessor(steps, rates, FAST, 1).run([traces]).turns[-1][0])
    assert 10 * 128 < ends[0] < 10 * 128 + 100  # m64n256k16 takes 128 clocks (Luo et al.)
    assert ends[2] > ends[0] + 999  # the products wait for it
    both = ClockedMultiprocessor(steps, rates, FAST, 1).run([[trace] * 8])
    assert 20 * 128 < both.clocks < 20 * 128 + 100


def test_phases_of_an_mbarrier_and_named_barriers_meet_as_often_as_they_complete() -> None:
    waits, everyone = Waits(1, 64, 1), np.ones(64, np.bool_)
    place = (0, 0x400)
    waits.begin(place, 2 * (0x100000 - 2))  # as SYNCS.EXCH has a count of 2
    assert waits.passes(place, 1) is not None and waits.passes(place, 0) is None
    first = [waits.arrive(place, 1, 96), waits.arrive(place, 1, 0)]
    assert waits.passes(place, 0) is None  # bytes are missing
    assert waits.arrive(place, 0, -96) == first[0] == first[1] == waits.passes(place, 0)
    assert waits.arrive(place, 1, 0).generation == 1
    one, other = everyone.copy(), everyone.copy()
    one[32:] = other[:32] = False
    numbers = np.full(64, 3, np.uint32)
    arrived = waits.meet(numbers, 64, one, None)
    assert not waits.released(everyone)
    met = waits.meet(numbers, 64, other, 7)
    [(to, lanes)] = waits.released(everyone)
    assert to == 7 and (lanes == other).all() and arrived[0].key == met[0].key
    assert not arrived[0].waits and met[0].waits and waits.meet(numbers, 64, one, None)[0].key.generation == 1


def test_blocks_that_run_without_the_others_take_numbers_in_turns_with_them() -> None:
    source = """extern "C" __global__ void taken(int* next, int* y, int n) {
      for (int k = atomicAdd(next, 1); k < n; k = atomicAdd(next, 1)) y[k] = 1;
    }"""
    module = Module.from_source(source)
    args = {"next": np.zeros(1, np.int32), "y": np.zeros(11, np.int32), "n": np.int32(11)}
    bound = bind("taken", module.program.functions["taken"].params, args, ())
    for blocks, written in (((1,), [1, 5, 9]), ((0, 2), [0, 2, 4, 6, 8, 10]), ((0, 1, 2, 3), [*range(11)])):
        launch = CodeLaunch(CubinKernel.of(compile_to_cubin(source, ("-arch=sm_90",), "k.cu")[0]), (4,), (1,), bound)
        launch.together = True
        for _ in range(2):  # a run leaves the numbers to the next one
            launch.tensors[1].views[4][:] = 0
            for _ in launch.run(*(launch.index(block) for block in blocks)):
                pass
            assert np.flatnonzero(launch.tensors[1].views[4][:11]).tolist() == written


def test_a_warp_that_yields_leaves_a_clock_to_others() -> None:
    """As FADD on an H100: 1 clock, 2 of one warp where it yields, 1 of two warps; a longer stall count hides it."""
    for device, control, clocks in (
        (H100, Control(1), [0, 1, 2]),
        (H100, Control(1, yields=True), [0, 2, 4]),
        (H100, Control(5, yields=True), [0, 5, 10]),
        (A6000, Control(1, yields=True), [0, 2, 4]),
    ):
        assert clocks_of(code_of(*[("NOP", control)] * 3), device) == clocks
    code = code_of(*[("NOP", Control(1, yields=True))] * 50)
    one, two = (max(run_of(code, warps, H100).ends) for warps in (1, 5))  # the first and the fifth are of one sub-core
    assert two - one < 15


def test_bulk_reductions_have_rates_of_their_own() -> None:
    rates = ChipRates.of(H100)
    code = code_of(("UBLKRED.G.S.ADD.F32", Control(1)), ("REDG.E.ADD.F32", Control(1)), ("UBLKCP.G.S", Control(1)))
    assert [FAST.rate(step_of(each, rates)) for each in code] == [FAST.added_bytes, FAST.atomic_bytes, FAST.l2_bytes]
    apart = []
    for opcode in ("UBLKRED.G.S.ADD.F32", "UBLKCP.G.S"):
        steps = [step_of(each, rates) for each in code_of((opcode, Control(1)))]
        run = ClockedMultiprocessor(steps, rates, FAST, 1)
        run.run([[[Issue(0, Cost(8.0, 1024.0))] * 5]])
        apart.append(run.bulk / 5)
    assert apart == [rates["copies.reduce_issue"], rates["copies.tma_issue"]]


def test_an_access_of_no_lane_takes_its_place_in_the_queue_and_no_wavefront() -> None:
    rates, code = ChipRates.of(H100), code_of(("LDS R1, [R0]", Control(1)))
    ends, pipes = [], []
    for cost in (IDLE, Cost(1.0)):
        run = ClockedMultiprocessor([step_of(each, rates) for each in code], rates, FAST, 1)
        ends.append(run.run([[[Issue(0, cost)] * 40]]).ends[0])
        pipes.append(run.pipe)
    assert ends[0] == ends[1] > 60 and pipes[0] < pipes[1]


def test_the_l2_gives_a_line_once_to_multiprocessors_that_ask_for_it_at_a_time() -> None:
    """As an H200 does: three arrays read by 44 multiprocessors each at 13,527 GB/s, arrays of their own at 9,819."""
    tracer = Clock(ring(2, 8, 8)[0], H100).tracer
    tracer.news = {0: 1.0, 1: 1 / 44, 2: 0.0}
    assert [tracer.merged(at) for at in (0, 1, 2)] == pytest.approx([0, 43 * 0.005, 131 * 0.005])
    assert 1 / (1 - tracer.merged(1)) == pytest.approx(13_527 / 9_819, rel=0.1)
    assert Tracer(tracer.launch, ChipRates.of(A100), None, {}, tracer.news, 1).merged(1) == 0
    code, rates = code_of(("LDG.E.128 R4, [R2.64]", Control(1, writes=0))), ChipRates.of(H100)
    busy = []
    for share in (0.0, 0.5):
        run = ClockedMultiprocessor([step_of(each, rates) for each in code], rates, replace(FAST, l2_bytes=8.0), 1)
        run.run([[[Issue(0, Cost(4.0, 2048.0, merged=share))] * 20]])
        busy.append(run.l2)
    assert busy[0] - busy[1] == pytest.approx(20 * 1024 / 8, rel=0.05)


def test_a_cold_launch_may_find_a_part_of_its_arrays_in_the_l2() -> None:
    shares = []
    for warm in (0.0, 0.75):
        clock = Clock(ring(2, 8, 8)[0], H100, cold=True)
        clock.warm = warm * clock.footprint
        shares.append(sum(clock.shares[0].values()))
    assert shares[0] > 0 and shares[1] == pytest.approx(shares[0] / 4)


def test_a_result_and_a_product_s_sums_wait_for_each_other() -> None:
    """As far as a product runs, half a clock each; nothing behind it."""
    products = Products(ChipRates.of(H100))
    assert products.collide(0.0, 4) == 0
    products.free = 32.0
    assert [products.collide(10.0, 4) for _ in range(4)] == [0.5] * 4 and products.free == 32.5
    assert products.collide(33.0, 4) == 0


def test_kernels_with_products_of_tensor_cores_have_the_rate_of_documents_for_them() -> None:
    """132 multiprocessors of 4,096 FLOP a clock make 989.4 TFLOP/s at 1,830 MHz; float32's 66.9 are those of the boost clock."""
    rates = ChipRates.of(H100)
    assert rates["clock.tensor"] * 1e6 * H100.sm_count * 4096 == pytest.approx(H100.tensor_peak["float16"], rel=1e-3)
    assert "clock.tensor" not in ChipRates.of(A6000).constants
    launch = ring(4, 8, 2)[0]
    assert Clock(launch, H100).mhz == rates["clock.tensor"] and Clock(launch, H100, 1590).mhz == 1590
    for text, halves in (
        ("HMMA.16816.F32 R0, R4, R8, R0", True),
        ("DMMA.884 R0, R4, R8, R0", False),
        ("FFMA R0, R1, R2, R3", False),
    ):
        assert of_halves(code_of((text, Control(1)))[0]) == halves


def test_power_lowers_the_clock_to_what_the_limit_leaves() -> None:
    """An H100 that multiplied all the time kept 1,633 MHz; half of the time it could have kept its 1,830."""
    rates = ChipRates.of(H100)
    power, busy = Power(H100, rates), {**NOTHING, "tensor": 0.98, "shared memory and L1": 0.61}
    kept = power.kept(busy, 1830)
    assert kept == pytest.approx(1633, rel=0.02) and power.watts(busy, 1830, kept) == pytest.approx(rates["clock.power"])
    assert power.kept({**NOTHING, "tensor": 0.5}, 1830) == 1830
    tight = replace(rates, constants={**rates.constants, "clock.power": Constant(600.0, "assumed: for this test")})
    busiest = Clock(ring(4, 60, 132)[0], H100, rates=tight)
    free, found = busiest.unlimited(), busiest.time()
    assert found.watts == pytest.approx(600) and found.mhz < free.mhz == 1830
    assert 1 < found.seconds / free.seconds < free.mhz / found.mhz  # DRAM has a clock of its own
    alone = Clock(ring(4, 60, 8)[0], H100).time()  # of the multiprocessors
    assert alone.mhz == 1830 and alone.watts is not None and alone.watts < 200
    launch = ring(4, 60, 132)[0]
    settled, brief, locked = (Clock(launch, H100, rates=tight) for _ in range(3))
    brief.series, locked.locked = 2e-3, True
    assert settled.time().mhz < brief.time().mhz == rates["clock.burst"]
    assert locked.time().mhz == 1830 and locked.time().watts is None
    assert not Power(A100, ChipRates.of(A100)).known


def test_a_block_has_the_shared_memory_that_is_allocated_in_whole_units() -> None:
    """Eight sums of which 32 lanes read, as in a published scan: 128 bytes are there; behind them is nothing."""
    source = """extern "C" __global__ void behind(int* y, int first) {
      __shared__ volatile int sums[8];
      sums[threadIdx.x & 7] = 3;
      y[threadIdx.x] = sums[first + threadIdx.x];
    }"""
    code = CubinKernel.of(compile_to_cubin(source, ("-arch=sm_90",), "k.cu")[0])
    for first, there in ((0, True), (1, False)):
        y = np.zeros(32, np.int32)
        data = bytearray(8) + np.int32(first).tobytes()
        launch = CodeLaunch(code, (1,), (32,), BoundArguments(data, {"y": 0, "first": 8}, [BoundTensor("y", "y", y, "y", 0)]))
        with nullcontext() if there else pytest.raises(UnknownInstruction, match="behind shared memory"):
            for _ in launch.run((0, 0, 0)):
                pass
        assert launch.tensors[0].views[4][:8].tolist() == [3 * there] * 8
