"""sim/clock of launches whose blocks differ in work, and of the kernels that a schedule launches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cupyflash import Device, Problem, plan
from cupyflash.launch.nvrtc import compile_to_cubin
from cupyflash.request.options import Pattern
from cupyflash.schedules import plan_backward
from cupyflash.sim import l2, ptx
from cupyflash.sim.clock import sass
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.lanes import Lanes
from cupyflash.sim.clock.loaded import of_source
from cupyflash.sim.clock.opcodes import decoded
from cupyflash.sim.clock.planned import clocks, dram_shares
from cupyflash.sim.clock.sass import Instruction
from cupyflash.sim.clock.unequal import counted
from cupyflash.sim.clock.whole import Clock
from cupyflash.sim.ptx.parameters import BoundArguments, BoundTensor

pytestmark = pytest.mark.skipif(sass.disassembler() is None, reason="needs NVIDIA's disassemblers")

A100 = Device.named("A100-40GB")
BLOCKS = 64
SOURCE = r"""
extern "C" __global__ void steps(float* y, int each, int more) {
  float a[4] = {1, 2, 3, 4};
  const int turns = each + more * (63 - blockIdx.x % 64);
#pragma unroll 1
  for (int i = 0; i < turns; i++)
#pragma unroll
    for (int k = 0; k < 8; k++) a[k % 4] = a[k % 4] * a[k % 4] + 1.f;
  y[threadIdx.x] = a[0] + a[1] + a[2] + a[3];
}
"""


def steps(each: int, more: int, heads: int = 200) -> Clock:
    code = CubinKernel.of(compile_to_cubin(SOURCE, ("-arch=sm_80",), "steps.cu")[0], "steps")
    bound = BoundArguments(bytearray(8) + np.array([each, more], np.int32).tobytes(), {"y": 0, "each": 8, "more": 12})
    bound.tensors.append(BoundTensor("y", "y", np.zeros(64, np.float32), "y", 0))
    return Clock(CodeLaunch(code, (BLOCKS, heads), (64,), bound, 40 << 10), A100)


def test_a_launch_s_own_share_of_dram_goes_before_that_of_its_first_blocks() -> None:
    cuda = 'extern "C" __global__ void k(const float4* x, float4* y) { int i = blockIdx.x * 256 + threadIdx.x; y[i] = x[i]; }'
    arrays, small = {name: np.zeros(1 << 16, np.float32) for name in "xy"}, replace(A100, sm_count=4, l2_bytes=1 << 16)
    launch = of_source(cuda, A100, (), "k.cu").launch("k", ((1 << 6,), (256,)), arrays).launch
    opcodes = [i.opcode for i in launch.kernel.instructions]
    for known, share in (({}, 1.0), ({"x": 0.25}, 0.25)):
        reach, news = Clock(launch, small, dram=known).shares
        assert reach[opcodes.index("LDG")] == share and reach[opcodes.index("STG")] == news[opcodes.index("LDG")] == 1


@pytest.mark.wide
def test_kernels_behind_a_queue_load_what_the_model_of_the_l2_says() -> None:
    schedule = plan(Problem(1, 32, 32, 1024, 1024, 64, "float16", causal=True), Device.named("H100-SXM"), "fa3")
    found, moved = dram_shares(schedule), l2.run(schedule)
    assert found["K"] * moved.asked["K"].read_bytes == moved.dram["K"].read_bytes and 0 < found["K"] < found["Q"] == 1
    assert [clock.dram == found for clock in clocks(schedule)] == [False, True]


def test_a_launch_s_work_repeats_itself_after_the_blocks_of_a_head() -> None:
    """Thread blocks of the backward have a key head, those of all other kernels a query head."""
    p = Problem(1, 4, 2, 256, 256, 64, "float16", causal=True)
    for schedule in (plan(p, A100), plan_backward(p, A100)):
        for clock in clocks(schedule):
            issued, _, _ = counted(clock.launch, range(clock.blocks))
            heads = p.kv_heads if clock.launch.kernel.name == "fa2_backward" else p.heads
            assert clock.period == clock.blocks // heads
            assert np.array_equal(issued, np.tile(issued[: clock.period], heads))


@pytest.mark.wide
def test_a_queue_that_several_blocks_make_is_there() -> None:
    """129 row blocks of a head are more than the threads of a block."""
    problem = Problem(1, 2, 2, 129 * 128, 129 * 128, 128, "float16", causal=True)
    first, second = clocks(plan(problem, Device.named("H100-SXM"), "fa3"))
    assert first.blocks == 2 and second.time().flops > problem.flops / 2


def test_what_a_mask_leaves_empty_is_not_visited() -> None:
    """The states of tiles are those of the mask, where it is known, though the kernel that finds them is not run before."""
    p = Problem(1, 2, 2, 1024, 1024, 64, "float16")
    left = np.zeros((1, 1, 1, 1024), bool)
    left[..., :128] = True
    masks = (Pattern.of(np.broadcast_to(mask, (1, 2, 1024, 1024))) for mask in (np.ones_like(left), left))
    whole, some = (list(clocks(plan(p.asking(mask=True, pattern=mask), A100)))[1].time().flops for mask in masks)
    assert some < whole / 4


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("VOTE.ANY P1, P0", False),  # what a kernel votes on is rare
        ("VOTE.ALL P1, P0", True),
        ("VOTE.ANY P1, P2", True),
        ("VOTE.ALL P1, !P2", False),
        ("VOTE.ANY R3, P1, P0", None),
        ("PLOP3.LUT P1, PT, P0, P2, PT, 0xa8, 0x0", True),  # P0 or P2
        ("PLOP3.LUT P1, PT, P0, P3, PT, 0xa8, 0x0", None),
        ("ISETP.NE.AND P1, PT, R2, RZ, P0", False),
        ("ISETP.EQ.AND P1, PT, R2, RZ, P0", None),
        ("ISETP.EQ.OR P1, PT, R2, RZ, P0", True),
        ("FSETP.GT.AND P1, PT, |R4|, 2.5, PT", True),  # -3
        ("FSETP.LE.FTZ.AND P1, PT, -R4, 2.5, PT", False),
        ("FSETP.NEU.AND P1, PT, R4, -INF, PT", True),
        ("FSETP.GEU.AND P1, PT, R4, +QNAN, PT", True),
        ("FSETP.GE.AND P1, PT, R4, +QNAN, PT", False),
        ("FSETP.GT.AND P1, PT, R5, 2.5, PT", None),
    ],
)
def test_what_does_not_depend_on_unknown_numbers_is_known(text: str, known: bool | None) -> None:
    lanes = Lanes(32, {})
    lanes.forget("P0", None)
    lanes.write("P2", lanes.everyone, None)
    lanes.write("P3", lanes.no, None)
    lanes.write("R4", np.full(32, -3, np.float32).view(np.uint32), None)
    lanes.forget("R5", None)
    opcode, _, operands = text.partition(" ")
    name, *modifiers = opcode.split(".")
    decoded(Instruction(0, name, tuple(modifiers), tuple(operands.split(", "))), {}).run(lanes, None)
    assert (None if lanes.lacking(["P1"], None) is not None else bool(lanes.predicate("P1").all())) == known


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("POPC R3, R2", 2),
        ("UPOPC UR3, UR2", 2),
        ("UFLO.U32 UR3, UR2", 3),
        ("USHL UR3, UR2, 0x4", 0xC0),
        ("UBREV UR3, UR2", 3 << 28),
    ],
)
def test_an_opcode_of_the_warp_computes_as_that_of_a_lane(text: str, value: int) -> None:
    lanes = Lanes(32, {})
    for register in ("R2", "UR2"):
        lanes.write(register, np.full(32, 12, np.uint32), None)
    name, *modifiers = text.partition(" ")[0].split(".")
    operands = text.partition(" ")[2].split(", ")
    decoded(Instruction(0, name, tuple(modifiers), tuple(operands)), {}).run(lanes, None)
    assert (lanes.register(operands[0]) == value).all()


@pytest.mark.parametrize(
    ("sass", "opcode"),
    [
        ("SGXT.U32", "szext.clamp.u32"),
        ("SGXT.W.U32", "szext.wrap.u32"),
        ("SGXT", "szext.clamp.s32"),
        ("SGXT.W", "szext.wrap.s32"),
        ("BMSK", "bmsk.clamp.b32"),
        ("BMSK.W", "bmsk.wrap.b32"),
    ],
)
def test_fields_of_bits_are_those_of_ptx(sass: str, opcode: str) -> None:
    """ptxas makes these of those."""
    rng = np.random.default_rng(0)
    count = np.resize(np.array([0, 1, 3, 8, 31, 32, 33, 64, 2**31], np.uint32), 64)
    value = rng.integers(0, 2**32, 64, np.uint32) if opcode[0] == "s" else np.arange(64, dtype=np.uint32) * 7 % 40
    expected = np.zeros(64, np.uint32)
    text = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 y) {{
  .reg .b64 %rd<5>; .reg .b32 %r<5>;
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd4, %r1, 4;
  ld.param.u64 %rd1, [a]; add.u64 %rd1, %rd1, %rd4; ld.global.u32 %r2, [%rd1];
  ld.param.u64 %rd2, [b]; add.u64 %rd2, %rd2, %rd4; ld.global.u32 %r3, [%rd2];
  {opcode} %r4, %r2, %r3;
  ld.param.u64 %rd3, [y]; add.u64 %rd3, %rd3, %rd4; st.global.u32 [%rd3], %r4;
  ret;
}}
"""
    ptx.Module.from_ptx(text).launch("k", 1, 64, {"a": value, "b": count, "y": expected})
    lanes = Lanes(64, {})
    lanes.write("R1", value, None)
    lanes.write("R2", count, None)
    name, *modifiers = sass.split(".")
    decoded(Instruction(0, name, tuple(modifiers), ("R3", "R1", "R2")), {}).run(lanes, None)
    assert np.array_equal(lanes.register("R3"), expected)


def test_blocks_that_differ_take_turns_and_the_time_is_that_of_their_mean() -> None:
    unequal, longest = steps(0, 1), steps(63, 0)
    assert longest.work is None and unequal.work is not None
    of_longest, found = longest.time(), unequal.time()
    assert found.flops == pytest.approx(of_longest.flops / 2, rel=0.05)
    assert 0.5 * of_longest.seconds < found.seconds < 0.62 * of_longest.seconds  # the last ones end alone
    assert unequal.again(mhz=705).time().seconds > 1.8 * found.seconds


@pytest.mark.wide
def test_a_schedule_s_launches_have_clocks_and_a_queue_is_made_before_it_is_read() -> None:
    problem = Problem(1, 16, 16, 2048, 2048, 64, "float16", causal=True)
    first, second = clocks(plan(problem, Device.named("H100-SXM"), "fa3"))
    assert (first.launch.kernel.name, second.launch.kernel.name) == ("fa3_queue", "fa3_forward")
    # Blocks of 192 rows: those of the middle one have half of the products, and tiles are whole.
    assert 1 < second.time().flops / (problem.flops / 2) < 1.7


@pytest.mark.wide
@pytest.mark.parametrize("asked", ["", "deterministic", "bias", "dbias"])
def test_a_backward_s_launches_have_clocks(asked: str) -> None:
    p = Problem(1, 4, 4, 1024, 1024, 64, "float16", causal=True).asking(bias="bias" in asked)
    found = clocks(plan_backward(p, A100, "fa2", deterministic=asked == "deterministic", dbias=asked == "dbias"))
    times = {each.launch.kernel.name: each.time() for each in found}
    assert max(times, key=lambda name: times[name].seconds) == "fa2_backward" and len(times) >= 3


@pytest.mark.wide
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_warpgroup_products_have_a_clock(causal: bool) -> None:
    """Turns are left out of each role, so none takes longer than the others. Under a causal mask blocks differ."""
    problem = Problem(1, 16, 16, 2048, 2048, 128, "float16", causal=causal)
    found = {each.launch.kernel.name: each for each in clocks(plan_backward(problem, Device.named("H100-SXM"), "fa3"))}
    clock = found["fa3_backward"]
    time, turns = clock.time(), [at for at, _ in (clock.alike[0] if causal else clock).sample(1).run.turns]
    assert (clock.work is not None) == causal and 1 < time.flops / (5 * problem.flops / 2 / (1 + causal)) < 1.25
    assert time.seconds > sum(each.time().seconds for name, each in found.items() if name != "fa3_backward")
    assert max(b - a for a, b in pairwise(turns)) < 2 * np.median(np.diff(turns)) and "without" in time.sampled


@pytest.mark.wide
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_that_send_each_other_what_they_have_are_run_together(causal: bool) -> None:
    """Copies and stores from one block of a cluster to the other, whose barriers count them; dQ is added once for both."""
    problem = Problem(1, 2, 2, 256, 256, 192, "float16", causal=causal)
    *_, clock, _ = clocks(plan_backward(problem, Device.named("H100-SXM"), "fa3"))
    assert clock.launch.cluster == (2, 1, 1) and clock.time().seconds > 0
    for _ in clock.launch.run(*(clock.launch.index(block) for block in range(8))):
        pass
    rows = 2 * (256 + (128 if causal else 256))  # half of them see the keys of the second pair
    assert clock.launch.traffic["dQ_acc"].write_bytes >= rows * 192 * 4
