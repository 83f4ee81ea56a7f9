"""benchmarks/machine_code of kernels whose warpgroups have roles: what is in flight where, and fa3 beside FlashAttention-3."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine_code import __main__ as command  # noqa: E402
from machine_code import hopper, tables  # noqa: E402
from machine_code.hopper import Pair  # noqa: E402
from machine_code.ours import DEVICES, Code  # noqa: E402

from cupyflash import Device  # noqa: E402
from cupyflash.launch.nvrtc import compile_to_cubin, remarks  # noqa: E402
from cupyflash.sim.clock import sass  # noqa: E402
from cupyflash.sim.clock.sass import Control, Instruction  # noqa: E402

PAGE = (ROOT / "docs" / "performance.md").read_text()
# A turn: S (64 x 16) = Q K^T of two products, O (64 x 8) += P V of one, eight exponentials, four conversions. In `under` they stand
# before the wait for P V, and a wait for a barrier behind them; `behind` takes four, of O.
SOURCE = r"""
#define S_REGS(S) "+f"(S[0]), "+f"(S[1]), "+f"(S[2]), "+f"(S[3]), "+f"(S[4]), "+f"(S[5]), "+f"(S[6]), "+f"(S[7])
#define BEGIN asm volatile("wgmma.fence.sync.aligned;" ::: "memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n, regs) asm volatile("wgmma.wait_group.sync.aligned " #n ";" ::: "memory"); asm volatile("" : regs :: "memory")

__device__ __forceinline__ void multiply(float (&S)[8], unsigned long long q, unsigned long long k, int add) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }"
               : S_REGS(S) : "l"(q), "l"(k), "r"(add));
}
__device__ __forceinline__ void multiply(float (&O)[4], const unsigned (&P)[4], unsigned long long v) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 1;"
               : "+f"(O[0]), "+f"(O[1]), "+f"(O[2]), "+f"(O[3]) : "r"(P[0]), "r"(P[1]), "r"(P[2]), "r"(P[3]), "l"(v));
}
__device__ __forceinline__ void wait_for(unsigned barrier, int parity) {
  asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra AGAIN; }"
               :: "r"(barrier), "r"(parity) : "memory");
}
template <int N> __device__ __forceinline__ void weigh(float (&S)[N]) {
  for (int i = 0; i < N; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(S[i]));
}

template <bool UNDER> __device__ __forceinline__ void consume(unsigned long long q, float* out, int turns) {
  float S[8], O[4] = {};
  unsigned P[4] = {};
#pragma unroll 1
  for (int turn = 0; turn < turns; turn++) {
    BEGIN;
    multiply(S, q, q + 64, 0);
    multiply(S, q + 2, q + 66, 1);
    COMMIT;
    BEGIN;
    multiply(O, P, q + 128);
    COMMIT;
    WAIT(1, S_REGS(S));
    if (UNDER) {
      weigh(S);
      wait_for(0, turn & 1);
    }
    WAIT(0, "+f"(O[0]));
    if (!UNDER) weigh(O);
    for (int i = 0; i < 4; i++) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(P[i]) : "f"(S[2 * i]), "f"(S[2 * i + 1]));
  }
  for (int i = 0; i < 4; i++) out[i * blockDim.x + threadIdx.x] = O[i];
}
template <bool UNDER> __device__ __forceinline__ void roles(unsigned long long q, float* out, int turns) {
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume<UNDER>(q, out, turns);
  }
}
#define KERNEL(name, under) \
  extern "C" __global__ void __launch_bounds__(384, 1) name(unsigned long long q, float* out, int turns) { \
    roles<under>(q, out, turns); \
  }
KERNEL(under, true)
KERNEL(behind, false)
"""


@pytest.fixture(scope="module")
def tools() -> None:
    pytest.importorskip("cupy")
    if sass.disassembler() is None:
        pytest.skip(f"needs cuobjdump: {sass.INSTALL}")


@pytest.fixture(scope="module")
def cubin(tools: None) -> sass.Cubin:
    """SOURCE's machine code."""
    made, log = compile_to_cubin(SOURCE, ("-arch=sm_90a",), "turns.cu")
    assert not remarks(log)
    return sass.read(made)


# --- turns that hands can count

# Stall count, instruction. Of the scores' two products and the values' one the first wait leaves the values', the second none.
LOOP = """
2 UIADD3 UR4
1 WARPGROUP.ARRIVE
5 HGMMA.64x16x16.F32 R24 gdesc[UR4] RZ !UPT
7 MUFU.EX2 R23
5 HGMMA.64x16x16.F32 R24 gdesc[UR4] R24 gsb0
3 FADD R1
5 HGMMA.64x8x16.F32 R32 R8 gdesc[UR4] R32 gsb0
4 BAR.ARV R2
2 WARPGROUP.DEPBAR.LE gsb0 0x1
6 MUFU.EX2 R24
1 SYNCS.PHASECHK.TRANS64.TRYWAIT P0 [UR9] R2
5 @!P0 BRA 20
5 @P2 BRA 18
2 WARPGROUP.DEPBAR.LE gsb0 0x0
6 MUFU.EX2 R25
0 F2FP R8
5 @P1 BRA 0
1 EXIT
9 FMUL R32
5 BRA 0
1 SYNCS.PHASECHK.TRANS64.TRYWAIT P0 [UR9] R2
5 @!P0 BRA 20
5 BRA 12
"""
IN_TURN = 17
ISSUING_QK, ISSUING_PV = ("issuing", "QK"), ("issuing", "PV")


def code_of(text: str) -> list[Instruction]:
    """Lines of a stall count, a guard if any, opcode, operands; what a branch's last operand numbers is a line."""
    found = []
    for at, line in enumerate(text.strip().splitlines()):
        stall, *words = line.split()
        guard = words.pop(0)[1:] if words[0].startswith("@") else ""
        opcode, *modifiers = words[0].split(".")
        target = 16 * int(words[-1]) if opcode == "BRA" else None
        found.append(Instruction(16 * at, opcode, tuple(modifiers), tuple(words[1:]), guard, target, Control(int(stall))))
    return found


def test_a_turn_waits_once_and_stays() -> None:
    (turn,) = hopper.turns(code_of(LOOP))
    assert [each.address for each in turn.instructions] == [16 * at for at in range(IN_TURN)]
    assert (turn.keys, turn.tensor_clocks) == (16, (2 * 64 * 16 * 16 + 64 * 8 * 16) / 2048)
    kinds = {"MUFU": 3, "float32": 2, "waits": 5, "uniform": 1, "branch": 3}
    assert turn.counts == {**dict.fromkeys(hopper.KINDS, 0), **kinds}


def test_what_is_in_flight_is_what_no_wait_came_to() -> None:
    (turn,) = hopper.turns(code_of(LOOP))
    assert list(turn.flight) == [(), (), *[ISSUING_QK] * 3, ("QK",), ISSUING_PV, ("QK", "PV"), *[("PV",)] * 5, *[()] * 4]
    assert turn.exposed == (2 + 1) + (2 + 6 + 1 + 5) and turn.stalls == 65  # a stall count of 0 is a clock, too
    assert turn.hidden == 1  # and one between the products of a group


def test_what_the_turn_before_left_in_flight_still_is() -> None:
    """Without the second wait V's product is in flight until the next turn's first one."""
    lines = [line for line in LOOP.strip().splitlines() if "0x0" not in line]
    (turn,) = hopper.turns(code_of("\n".join(lines)))
    assert turn.flight[0] == ("PV",) and turn.flight[5] == ("PV", "QK") and (turn.exposed, turn.hidden) == (0, 2)


def test_a_wait_that_is_repeated_on_the_spot_succeeds_at_once() -> None:
    lines = LOOP.strip().splitlines()
    lines[11:13] = ["5 @P0 BRA 14", "1 SYNCS.PHASECHK.TRANS64.TRYWAIT P0 [UR9] R2", "5 @!P0 BRA 12"]
    del lines[18:]
    (turn,) = hopper.turns(code_of("\n".join(lines)))
    assert [each.address // 16 for each in turn.instructions] == [*range(12), *range(14, 18)]


@pytest.mark.parametrize(("near", "far"), [(1, 3), (3, 1)])
def test_of_two_ways_a_turn_takes_the_shorter(near: int, far: int) -> None:
    lines = [line for line in LOOP.strip().splitlines()[:IN_TURN] if "P0" not in line and "P2" not in line]
    ways = [f"5 @P3 BRA {11 + near}", *["1 FMUL R1"] * near, f"5 BRA {11 + near + far}", *["1 FADD R1"] * far]
    (turn,) = hopper.turns(code_of("\n".join([*lines[:9], *ways, *lines[9:]])))
    opcodes = [each.opcode for each in turn.instructions[9:]]
    taken = ["BRA", "FMUL", "BRA"] if near < far else ["BRA", "FADD"]
    assert opcodes == [*taken, *[line.split()[1].split(".")[0] if "@" not in line else "BRA" for line in lines[9:]]]


def test_of_two_loops_the_shorter_is_first_and_what_leaves_is_none() -> None:
    lines = [line for line in LOOP.strip().splitlines()[:IN_TURN] if "P0" not in line and "P2" not in line]
    masked = ["1 FSEL R24", *lines[:-1], "5 @P1 BRA 0"]
    found = hopper.turns(code_of("\n".join([*masked, *lines[:-1], f"5 @P1 BRA {len(masked)}", "1 EXIT"])))
    assert [len(each.instructions) for each in found] == [len(lines), len(masked)]
    for end in (f"5 BRA {len(lines)}", "1 EXIT"):
        assert hopper.turns(code_of("\n".join([*lines[:5], end, *lines[6:], "5 BRA 0"]))) == []


@pytest.mark.parametrize(("kernel", "exponentials", "hidden"), [("under", 8, 8), ("behind", 4, 0)])
def test_the_reader_finds_what_the_source_orders(cubin: sass.Cubin, kernel: str, exponentials: int, hidden: int) -> None:
    code = Code(kernel, tuple(cubin.kernels[kernel]), cubin.resources[kernel], 384, 0, Device.named(DEVICES[90]))
    figures, turn = hopper.figures(code), hopper.steady(code)
    assert (figures.d, figures.tile, figures.registers, figures.stack) == (32, "128x16", (168, 240, 24), 0)
    assert (figures.counts["MUFU"], figures.hidden, figures.counts["spills"]) == (exponentials, hidden, 0)
    assert [(each.name, len(each.products)) for each in turn.groups] == [("QK", 2), ("PV", 1)]
    assert figures.tensor_clocks == (64 * 16 * 32 + 64 * 8 * 16) / 2048
    opcodes = [each.opcode for each in turn.instructions]
    assert [opcodes.count(each) for each in ("HGMMA", "F2FP", "WARPGROUP", "SYNCS")] == [3, 4, 4, int(kernel == "under")]
    # Exposed is what stands before the first product and from the last wait on.
    last = max(at for at, each in enumerate(turn.instructions) if "DEPBAR" in each.modifiers)
    outside = [*turn.instructions[: opcodes.index("HGMMA")], *turn.instructions[last:]]
    assert figures.exposed == sum(max(each.control.stall, 1) for each in outside) < figures.stalls
    assert figures.issued == len(opcodes) - 3


def test_a_kernel_without_such_a_loop_is_an_error() -> None:
    code = Code("plain", tuple(code_of("1 HGMMA.64x8x16 R4 gsb0\n1 EXIT")), {"REG": 168}, 384, 0, Device.named(DEVICES[90]))
    with pytest.raises(ValueError, match="plain has no loop"):
        hopper.figures(code)


def test_the_command_reads_a_cubin_with_roles(
    cubin: sass.Cubin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sass, "read", lambda code: cubin)
    words = ["--cubin", __file__, "--kernel", "under", "--threads", "384"]
    assert command.main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["kernel"], record["keys"], record["hidden"]) == ("under", 16, 8)
    assert command.main([*words, "--list"]) == 0
    text = capsys.readouterr().out
    assert "8 of 8 exponentials" in text and "nothing in flight" in text and text.count("issuing PV ") == 2


# --- fa3

PAIRS = list(hopper.pairs())


def test_flash_attention_3_s_figures_agree_with_themselves() -> None:
    assert [(pair.subject.d, pair.subject.causal) for pair in PAIRS] == list(itertools.product((64, 128, 256), (False, True)))
    for pair in PAIRS:
        theirs = pair.theirs
        assert set(theirs.counts) == set(hopper.KINDS) and theirs.counts["MUFU"] * 2 >= theirs.keys
        assert theirs.tensor_clocks == 64 * theirs.keys * 2 * theirs.d / hopper.FMA_RATE
        assert theirs.hidden <= theirs.counts["MUFU"] and theirs.exposed < theirs.stalls and "fa3" in pair.words
    assert [f"{pair.theirs.per_key:.2f}" for pair in PAIRS] == ["3.19", "3.24", "3.24", "3.51", "5.49", "5.35"]
    assert [f"{pair.theirs.exposure:.2f}" for pair in PAIRS] == ["1.15", "0.95", "0.46", "0.49", "0.21", "0.23"]


def test_the_page_has_flash_attention_3_s_figures() -> None:
    for pair in PAIRS:
        assert tables.row("", "FlashAttention-3", *tables.of_a_turn(pair.theirs)) in PAGE


@pytest.mark.wide
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_fa3_issues_less_and_exposes_less_than_flash_attention_3(pair: Pair, tools: None) -> None:
    """In code for 9.0 nothing is spilled, ptxas makes no product wait, and all exponentials run under a product."""
    ours, opcodes = pair.ours, {each.opcode for each in pair.code.instructions}
    assert pair.code.remarks == () and ours.stack == 0
    assert "HGMMA" in opcodes and not opcodes & {"HMMA", "LDL", "STL"}
    assert ours.d == pair.subject.d and ours.hidden == ours.counts["MUFU"] >= ours.keys // 2
    assert pair.issue <= 1 and pair.exposure <= 0.8


@pytest.mark.wide
def test_the_page_has_fa3_s_figures(tools: None) -> None:
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    if "(NVRTC {}.{})".format(*nvrtc.getVersion()) not in PAGE:
        pytest.skip("the page is of another NVRTC")
    assert "\n".join(["<!-- fa3 -->", *tables.fa3(), "<!-- end -->"]) in PAGE


@pytest.mark.wide
def test_the_command_sets_fa3_beside_flash_attention_3(tools: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["fa3", "64", "causal", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["causal"], record["d"], record["flash_attention_3"]["exposed"]) == (True, 64, 487)
    assert record["exposed_over_its"] < 0.8
