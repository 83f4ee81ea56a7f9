"""benchmarks/machine_code: control codes as the assembler wrote them, the way through a loop, clocks that hands can count."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from suites import sample, wide

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import timeline  # noqa: E402
from machine_code import __main__ as command  # noqa: E402
from machine_code import choices, clocks, costs, rates, tables, whole  # noqa: E402
from machine_code.clocks import Effort, Residents  # noqa: E402
from machine_code.costs import Cost, Figure  # noqa: E402
from machine_code.flow import Known, Tracer, written  # noqa: E402
from machine_code.ours import DEVICES, Ours, Subject, peers  # noqa: E402
from machine_code.rates import Rates  # noqa: E402

from cupyflash import Device, Problem  # noqa: E402
from cupyflash.launch.nvrtc import compile_to_cubin  # noqa: E402
from cupyflash.schedules import fa2_tiles  # noqa: E402
from cupyflash.sim.clock import sass  # noqa: E402
from cupyflash.sim.clock.sass import Control, Instruction  # noqa: E402

PAGE = (ROOT / "docs" / "performance.md").read_text()
ARCHITECTURES = (80, 90)
# Loops of known work. A turn of `products` has 8 HMMA, each needing the one before it; of `apart` 8 that need none of each other.
SOURCE = r"""
#define MMA(c) asm volatile( \
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
    : "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#define BEGIN unsigned a[4], b[2]; for (int i = 0; i < 4; i++) a[i] = in[i], b[i % 2] = in[4 + i]; float c[8][4] = {};
#define END for (int i = 0; i < 8; i++) for (int e = 0; e < 4; e++) out[(4 * i + e) * blockDim.x + threadIdx.x] = c[i][e];

extern "C" __global__ void products(const unsigned* in, float* out, int n) {
  BEGIN
#pragma unroll 1
  for (int turn = 0; turn < n; turn++) { MMA(c[0]); MMA(c[0]); MMA(c[0]); MMA(c[0]); MMA(c[0]); MMA(c[0]); MMA(c[0]); MMA(c[0]); }
  END
}
extern "C" __global__ void apart(const unsigned* in, float* out, int n) {
  BEGIN
#pragma unroll 1
  for (int turn = 0; turn < n; turn++) { MMA(c[0]); MMA(c[1]); MMA(c[2]); MMA(c[3]); MMA(c[4]); MMA(c[5]); MMA(c[6]); MMA(c[7]); }
  END
}
extern "C" __global__ void nested(const unsigned* in, float* out, int n) {
  BEGIN
#pragma unroll 1
  for (int turn = 0; turn < n; turn++) {
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < 5; j++) { MMA(c[0]); MMA(c[1]); }
#pragma unroll 1
    for (int j = 3; j < 10; j += 3) MMA(c[2]);
  }
  END
}
extern "C" __global__ void exponentials(const float* in, float* out, int n) {
  float x[8];
  for (int i = 0; i < 8; i++) x[i] = in[i];
#pragma unroll 1
  for (int turn = 0; turn < n; turn++)
#pragma unroll
    for (int i = 0; i < 8; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
  for (int i = 0; i < 8; i++) out[i * blockDim.x + threadIdx.x] = x[i];
}
extern "C" __global__ void shared_loads(float* out, int n) {
  __shared__ float4 room[256];
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(room + threadIdx.x));
  float4 x[8] = {};
#pragma unroll 1
  for (int turn = 0; turn < n; turn++)
#pragma unroll
    for (int i = 0; i < 8; i++)
      asm volatile("ld.volatile.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(x[i].x), "=f"(x[i].y), "=f"(x[i].z), "=f"(x[i].w)
                   : "r"(at + i * 16));
  for (int i = 0; i < 8; i++) out[i * blockDim.x + threadIdx.x] = x[i].x + x[i].y + x[i].z + x[i].w;
}
extern "C" __global__ void copies(const char* in, float* out, int n) {
  __shared__ float4 room[256];
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(room + threadIdx.x));
#pragma unroll 1
  for (int turn = 0; turn < n; turn++) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(in + 16 * threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
  }
  out[threadIdx.x] = room[255 - threadIdx.x].x;
}
extern "C" __global__ void sums(const float* in, float* out) {
  float x = in[threadIdx.x];
  const float y = in[threadIdx.x + 32];
#pragma unroll
  for (int i = 0; i < 32; i++) x = x * y + static_cast<float>(i);
  out[threadIdx.x] = x;
}
"""


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda sm: f"sm_{sm}")
def cubin(request: pytest.FixtureRequest) -> sass.Cubin:
    """SOURCE's machine code."""
    pytest.importorskip("cupy")
    if sass.disassembler() is None:
        pytest.skip(f"needs cuobjdump: {sass.INSTALL}")
    made, _ = compile_to_cubin(SOURCE, (f"-arch=sm_{request.param}",), "loops.cu")
    found = sass.read(made)
    assert found.architecture == request.param
    return found


def turn(cubin: sass.Cubin, kernel: str, warps: int, **changed: float) -> tuple[float, Cost]:
    """Clocks of a turn of a kernel's loop for one block of so many warps: what ten turns more take. And its costs."""
    cost = Cost(Tracer(cubin.kernels[kernel]).steady(), replace(Rates.of(cubin.architecture), **changed), Residents(warps, 1))
    program = clocks.steps(cost.trace.instructions, cost.rates)
    few, more = (clocks.Multiprocessor(program * turns, cost.rates, cost.residents).run([0.0]).clocks for turns in (4, 14))
    return (more - few) / 10, cost


# --- control codes


@pytest.mark.parametrize("seed", range(3))
def test_a_control_code_is_read_from_bits_105_to_125(seed: int) -> None:
    chance = random.Random(seed)
    stall, writes, reads, waits, reuse = (chance.randrange(1 << bits) for bits in (4, 3, 3, 6, 4))
    yields = chance.randrange(2)
    code = stall | (1 - yields) << 4 | writes << 5 | reads << 8 | waits << 11 | reuse << 17
    word = chance.randrange(1 << 105) | code << 105 | chance.randrange(4) << 126
    expected = tuple(board for board in range(6) if waits >> board & 1)
    found = Control.decode(word)
    assert found == Control(stall, bool(yields), None if writes == 7 else writes, None if reads == 7 else reads, expected, reuse)


LISTING = """
        Function : kernel
        /*0000*/                   LDG.E.128 R4, [R2.64] ;                     /* 0x0000000402047981 */
                                                                               /* 0x000ea8000c1e1d00 */
        /*0010*/              @!P0 BRA 0x0 ;                                   /* 0xffffffe000008947 */
                                                                               /* 0x004fea000383ffff */
"""


def test_a_listing_is_read_with_guards_operands_and_targets() -> None:
    load, branch = sass.parse(LISTING)["kernel"]
    assert (load.opcode, load.modifiers, load.operands, load.guard) == ("LDG", ("E", "128"), ("R4", "[R2.64]"), "")
    assert (load.control.stall, load.control.writes, load.control.reads, load.control.waits) == (4, 2, None, ())
    assert (branch.opcode, branch.guard, branch.target, branch.control.waits) == ("BRA", "!P0", 0, (2,))
    with pytest.raises(ValueError, match="no control code"):
        sass.parse("\n".join(line for line in LISTING.splitlines() if "0x000ea8" not in line))


def reads(instruction: Instruction, register: str) -> bool:
    """True if it has a register among its sources."""
    sources = instruction.operands if instruction.opcode in ("STG", "STS") else instruction.operands[1:]
    return any(register in each.replace("[", " ").replace("]", " ").replace(".", " ").replace("|", " ").split() for each in sources)


def consumers(code: list[Instruction], opcode: str) -> Iterator[tuple[int, int]]:
    """For each instruction of an opcode: its place, and the place where its first result is first read, in straight code."""
    for at, each in enumerate(code):
        if each.opcode == opcode:
            results = list(written(each))
            user = next((n for n in range(at + 1, len(code)) if any(reads(code[n], name) for name in results)), None)
            if user is not None:
                yield at, user


@pytest.mark.parametrize(("kernel", "opcode"), [("sums", "LDG"), ("shared_loads", "LDS"), ("exponentials", "MUFU")])
def test_a_result_s_scoreboard_is_waited_for_by_its_consumer(cubin: sass.Cubin, kernel: str, opcode: str) -> None:
    code = cubin.kernels[kernel]
    found = list(consumers(code, opcode))
    assert found
    for at, user in found:
        board = code[at].control.writes
        assert board is not None
        assert any(board in each.control.waits for each in code[at + 1 : user + 1]), (code[at], code[user])


def test_dependent_ffmas_are_at_least_four_clocks_apart(cubin: sass.Cubin) -> None:
    code = cubin.kernels["sums"]
    found = list(consumers(code, "FFMA"))
    assert len(found) >= 31
    assert all(sum(each.control.stall for each in code[at:user]) >= 4 for at, user in found)


# --- the way through


def test_inner_loops_of_a_fixed_number_of_turns_make_them(cubin: sass.Cubin) -> None:
    trace = Tracer(cubin.kernels["nested"]).steady()
    opcodes = [each.opcode for each in trace.instructions]
    assert opcodes.count("HMMA") == 5 * 2 + 3 and opcodes.count("BAR") == 1
    assert [each.rule for each in trace.decisions if "no rule" in each.rule] == []


def test_what_is_known_is_computed_and_nothing_else() -> None:
    known = Known()

    def run(opcode: str, modifiers: str, operands: str, guard: str = "") -> None:
        known.execute(Instruction(0, opcode, tuple(modifiers.split()), tuple(operands.split()), guard))

    run("MOV", "", "R1 0x10")
    run("IADD3", "", "R2 R1 -0x11 RZ")
    assert (known.value("R1"), known.value("R2"), known.value("-R1")) == (16, 2**32 - 1, 2**32 - 16)
    run("ISETP", "GE AND", "P0 PT R2 0x0 PT")
    run("ISETP", "GE U32 AND", "P1 PT R2 0x0 PT")
    assert (known.holds("P0"), known.holds("!P0"), known.holds("P1"), known.holds("P2")) == (False, True, True, None)
    run("MOV", "", "R1 0x3", "P0")
    assert known.value("R1") == 16
    run("MOV", "", "R1 0x3", "P5")
    run("LDS", "128", "R2 [R9]")
    assert known.value("R1") is None and known.value("R2") is None


def code_of(text: str) -> list[Instruction]:
    """Instructions from lines of `[@guard] opcode[.modifiers] operands`; a branch's operand is the line it goes to."""
    found = []
    for at, line in enumerate(text.strip().splitlines()):
        words = line.split()
        guard = words.pop(0)[1:] if words[0].startswith("@") else ""
        opcode, *modifiers = words[0].split(".")
        target = 16 * int(words[-1]) if opcode == "BRA" else None
        found.append(Instruction(16 * at, opcode, tuple(modifiers), tuple(words[1:]), guard, target))
    return found


STEADY = """
HMMA R4
@P1 BRA 4
LDGSTS.128 R1
LDGDEPBAR
VOTE.ANY P0
@!P0 BRA 7
FMUL R4
@P2 BRA P3 9
FSEL R5
MUFU R3
BAR.SYNC 0x0
@P3 BRA 13
@P6 BRA 0
EXIT
"""


def test_rules_decide_what_depends_on_data() -> None:
    tracer = Tracer(code_of(STEADY))
    trace = tracer.steady()
    assert [each.opcode for each in trace.instructions] == [
        *("HMMA", "BRA", "LDGSTS", "LDGDEPBAR", "VOTE", "BRA", "BRA", "MUFU", "BAR", "BRA", "BRA")
    ]
    assert [(each.taken, each.skipped) for each in trace.decisions] == [(False, 0), (True, 1), (True, 1), (False, 0), (True, 0)]
    masked = replace(tracer, masked=True).steady()
    assert {each.opcode for each in masked.instructions} - {each.opcode for each in trace.instructions} == {"FSEL"}
    assert tracer.leaving(tracer.main_loops()[0]).instructions[-1].opcode == "EXIT"


# --- the model


def test_dependent_products_take_their_stall_counts(cubin: sass.Cubin) -> None:
    """A warp by itself: each HMMA waits for the one before by what the assembler wrote."""
    counted, cost = turn(cubin, "products", warps=1)
    assert cost.counts["HMMA"] == 8 and not any(each.control.writes or each.control.reads for each in cost.trace.instructions)
    assert counted == cost.stalls
    assert cost.stalls >= 8 * cost.rates.sub_core_clocks(next(each for each in cost.trace.instructions if each.opcode == "HMMA"))


@pytest.mark.parametrize("warps", [16, 32])
def test_independent_products_are_bound_by_the_tensor_cores(cubin: sass.Cubin, warps: int) -> None:
    counted, cost = turn(cubin, "apart", warps)
    bound = warps / 4 * 8 * 4 * 2048 / cost.rates.tensor
    assert bound <= counted <= 1.05 * bound  # no queue before a tensor core: another warp's instruction may take its clock
    assert cost.bound == "tensor" and cost.all_overlap == 1


@pytest.mark.parametrize("warps", [8, 16])
def test_exponentials_are_bound_by_their_unit(cubin: sass.Cubin, warps: int) -> None:
    counted, cost = turn(cubin, "exponentials", warps)
    assert cost.counts["MUFU"] == 8 and counted == pytest.approx(warps / 4 * 8 * 8)


@pytest.mark.parametrize("warps", [8, 16])
def test_shared_loads_are_bound_by_the_one_pipe(cubin: sass.Cubin, warps: int) -> None:
    counted, cost = turn(cubin, "shared_loads", warps)
    assert cost.counts["LDS"] == 8 and counted == pytest.approx(warps * 8 * 4) and cost.bound == "shared"


@pytest.mark.parametrize("warps", [1, 8])
def test_a_copy_that_is_waited_for_costs_its_latency(cubin: sass.Cubin, warps: int) -> None:
    (few, _), (more, cost) = (turn(cubin, "copies", warps, l2_latency=latency) for latency in (300, 700))
    assert cost.counts["LDGSTS"] == 1 and more - few == 400


def test_a_barrier_holds_all_warps_of_a_block(cubin: sass.Cubin) -> None:
    """With copies of no latency a turn is the code between two barriers, and the barrier itself."""
    (few, _), (more, _) = (turn(cubin, "copies", 8, barrier=latency, l2_latency=0) for latency in (100, 200))
    assert more - few == 100


def test_the_share_is_the_tensor_cores_part_of_the_time(cubin: sass.Cubin) -> None:
    counted, cost = turn(cubin, "products", warps=4)
    share = cost.share(Effort(seeds=2))
    assert share.clocks == pytest.approx(counted, rel=0.02)
    assert share.tensor == pytest.approx(cost.parts["tensor"] / share.clocks) and share.busy["issue"] == pytest.approx(
        cost.issued / share.clocks
    )
    assert share.low <= share.clocks <= share.high


def test_sensitivity_is_to_what_binds(cubin: sass.Cubin) -> None:
    """A loop that waits for copies moves with their latency; one that the tensor cores bind moves with nothing."""
    rough, instructions = Effort(seeds=1, turns=6, warm=2), Tracer(cubin.kernels["copies"]).steady().instructions
    values = costs.varied(Rates.of(80), lambda changed: clocks.steady(instructions, changed, Residents(4, 1), rough).clocks)
    waits = Figure(clocks.steady(instructions, Rates.of(80), Residents(4, 1), rough).clocks, values)
    assert waits.most == "l2_latency" and waits.low < 0.8 * waits.value and waits.high > 1.3 * waits.value
    products = Cost(Tracer(cubin.kernels["apart"]).steady(), Rates.of(cubin.architecture), Residents(32, 1))
    assert all(each == pytest.approx(1, abs=0.05) for pair in products.sensitivity(rough).values() for each in pair)


def test_a_quotient_varies_an_assumption_in_both() -> None:
    one, other = Figure(0.8, {"branch": (0.9, 0.6)}), Figure(0.5, {"branch": (0.6, 0.5)})
    found = one.over(other)
    assert found.by == {"branch": (pytest.approx(1.5), pytest.approx(1.2))} and found.value == found.high == pytest.approx(1.6)
    assert one.over(Figure(0.5, {})).by["branch"] == (pytest.approx(1.8), pytest.approx(1.2))


# --- kernels


def test_the_page_has_the_assumptions() -> None:
    assert "\n".join(["<!-- assumptions -->", *rates.markdown(), "<!-- end -->"]) in PAGE


@pytest.mark.wide
def test_the_page_has_our_instructions(tools: None) -> None:
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    if "(NVRTC {}.{})".format(*nvrtc.getVersion()) not in PAGE:
        pytest.skip("the page is of another NVRTC")
    assert "\n".join(["<!-- instructions -->", *tables.instructions(), "<!-- end -->"]) in PAGE


def test_every_assumption_has_a_source_and_a_width() -> None:
    rows = list(Rates.of(80).rows())
    assert all(what and source for _, _, what, source in rows)
    assert {name for name, _, _ in Rates.of(80).variations()} == {name for name, _, _, source in rows if name not in FIXED}
    with pytest.raises(ValueError, match="sm_70"):
        Rates.of(70)


FIXED = ("tensor", "float32", "integer", "exponentials", "shared")


def test_flash_attention_s_figures_agree_with_themselves() -> None:
    found = list(peers())
    assert len({peer.subject for peer in found}) == len(found) == 16
    for peer in found:
        per = peer.facts["per_hmma"]
        assert set(per) <= set(rates.GROUPS)
        assert sum(per.values()) == pytest.approx(peer.facts["instructions_per_hmma"], abs=0.01)
        assert peer.facts["clock_model"] <= min(1, peer.facts["all_overlap"] + 0.01)


SUBJECTS = [peer.subject for peer in peers()]


@pytest.fixture
def tools() -> None:
    pytest.importorskip("cupy")
    if sass.disassembler() is None:
        pytest.skip(f"needs cuobjdump: {sass.INSTALL}")


@pytest.mark.wide
@pytest.mark.parametrize("subject", sample(SUBJECTS, [SUBJECTS[0]]), ids=str)
def test_a_turn_of_our_kernels_makes_a_tile_s_products(subject: Subject, tools: None) -> None:
    ours = Ours.of(subject)
    cost = ours.cost()
    assert ours.doubt(cost.trace) is None
    assert cost.counts["LDSM"] and cost.counts["LDGSTS"] and cost.counts["MUFU"]
    assert subject.direction == "backward" or cost.rest * cost.issued <= 0.46 * cost.counts["HMMA"]
    assert 0.3 < cost.share(Effort(seeds=1, turns=6, warm=2)).tensor <= cost.warps_overlap + 0.01 <= cost.all_overlap + 0.02


def test_ranks_are_correlated_as_spearman_has_it() -> None:
    assert choices.rank_correlation([1, 2, 3, 9], [2, 4, 6, 7]) == pytest.approx(1)
    assert choices.rank_correlation([1, 2, 3, 9], [7, 6, 4, 2]) == pytest.approx(-1)
    # Two alike share the places 0 and 1: ranks .5, .5, 2 beside 0, 1, 2
    assert choices.rank_correlation([1, 1, 3], [1, 2, 3]) == pytest.approx(np.corrcoef([0.5, 0.5, 2], [0, 1, 2])[0, 1])


@pytest.mark.wide
def test_tiles_are_judged_with_those_that_the_planner_refuses(tools: None) -> None:
    """The planner's own tile, and one whose accumulators do not fit."""
    subject = Subject("forward", 80, 128, False)
    planned = fa2_tiles.choose(subject.problem(), subject.device).config
    two = [planned, replace(planned, block_cols=96)]
    record, lines = choices.judged(subject, Effort(seeds=1, turns=4, warm=1), two)
    by_cols = {each["block_cols"]: each for each in record["tiles"]}
    assert set(by_cols) == {planned.block_cols, 96} and by_cols[96]["refused"] and by_cols[96]["registers"] == 255
    assert by_cols[planned.block_cols]["refused"] is None and by_cols[planned.block_cols]["stack"] == 0
    assert record["best"] == max(each["share"] for each in record["tiles"]) >= record["share"] > 0.3
    assert len(lines) == 1 + len(record["tiles"])


def test_the_command_says_the_same_for_readers_and_programs(tools: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["forward", "80", "64", "full", "--seeds", "1", "--quick"]
    assert command.main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["doubt"] is None and record["stack"] == 0 and record["flash_attention_2"] == 0.715
    assert record["ratio"]["value"] == pytest.approx(record["clock_model"]["value"] / 0.715, abs=1e-3)
    assert command.main([*words, "--list"]) == 0
    text = capsys.readouterr().out
    assert f"model {record['clock_model']['value']:.2f}" in text and text.count(" HMMA.16816.F32 ") == record["counts"]["HMMA"]
    assert "a vote skips what is rare" in text


@pytest.mark.wide
def test_the_command_reads_any_cubin(tools: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, _ = compile_to_cubin(SOURCE, ("-arch=sm_90",), "loops.cu")
    (tmp_path / "loops.cubin").write_bytes(made)
    words = ["--cubin", str(tmp_path / "loops.cubin"), "--kernel", "apart", "--threads", "128", "--json", "--seeds", "1"]
    assert command.main(words) == 0
    record = json.loads(capsys.readouterr().out)
    share = record["clock_model"]
    assert (record["kernel"], record["architecture"], record["counts"]["HMMA"]) == ("apart", 90, 8)
    assert 0.5 < share["low"] <= share["value"] <= share["high"] <= 1.01 and set(share["varied"]) >= {"branch", "l2_latency"}


# --- whole calls


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("causal", "n"), [(False, 1000), (True, 1000), (True, 1024)])
def test_turns_are_those_of_the_mask(direction: str, causal: bool, n: int) -> None:
    """Against the mask itself, block by block."""
    rows, cols = 128, 48
    mask = np.tril(np.ones((n, n), bool)) if causal else np.ones((n, n), bool)
    seen, full = [], []
    for i in range(0, n, rows):
        blocks = [mask[i : i + rows, j : j + cols] for j in range(0, n, cols)]
        seen.append([block.any() for block in blocks])
        full.append([bool(block.all()) and block.shape[1] == cols for block in blocks])
    axis = 1 if direction == "forward" else 0
    whole_turns, masked = whole.visits(Problem(1, 1, 1, n, n, 64, "float16", causal=causal), rows, cols, direction)
    assert (whole_turns + masked).tolist() == np.sum(seen, axis).tolist() and whole_turns.tolist() == np.sum(full, axis).tolist()


def test_blocks_go_to_the_first_place_that_is_free() -> None:
    assert whole.makespan(np.array([3.0, 1, 1, 1, 2]), 2) == 5 and whole.makespan(np.array([2.0]), 8) == 2


def test_a_block_s_time_is_a_fixed_part_and_its_turns(cubin: sass.Cubin) -> None:
    """For a kernel whose work nothing else shares, exactly: beginning, turns and end one after another."""
    tracer = Tracer(cubin.kernels["apart"])
    main, one = tracer.main_loops()[0], Residents(4, 1)
    used = replace(Rates.of(cubin.architecture), start=0)
    traces = [each.instructions for each in (tracer.path(0, main.head), tracer.steady(), tracer.leaving(main))]
    before, again, behind = (clocks.steps(trace, used) for trace in traces)
    few, more = (whole.a_block(before + again * turns + behind, used, one) for turns in (2, 5))
    counted, _ = turn(cubin, "apart", 4)
    assert more - few == pytest.approx(3 * counted, rel=0.01) and few > 2 * counted


@pytest.mark.parametrize(("direction", "causal"), [wide("forward", False)])
def test_longer_rows_come_nearer_to_the_loop_s_share(direction: str, causal: bool, tools: None) -> None:
    subject = Subject(direction, 80, 64, causal)
    rate = []
    for n in tables.LENGTHS:
        ours = Ours.of(subject, n)
        assert [each.name for each in whole.pieces(ours)] == [kernel.name for kernel in ours.schedule.kernels()]
        rate.append(subject.flops(n) / whole.seconds(ours) / 312e12)
    assert rate == sorted(rate) and rate[0] > 0.1 and rate[-1] < Ours.of(subject).cost().warps_overlap


def test_predictions_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "seconds", lambda ours: 0.5)
    named = [({"n": n}, Ours("forward", None)) for n in range(3)]  # type: ignore[arg-type]
    assert whole.predictions(lambda: named, 60) == [{"n": n, "model_seconds": 0.5} for n in range(3)]
    assert whole.predictions(lambda: named, -1) == []


def test_a_kernel_whose_warps_differ_is_refused() -> None:
    from machine_code.ours import Code

    code = Code("wgmma", tuple(code_of("HGMMA R4\nEXIT")), {"REG": 168}, 384, 0, Device.named(DEVICES[90]))
    with pytest.raises(ValueError, match="HGMMA"):
        code.cost()


def test_a_barrier_that_not_all_reach_is_an_error() -> None:
    trace = code_of("BAR.SYNC 0x1 0x80\nEXIT")
    with pytest.raises(ValueError, match="wait for each other"):
        clocks.steady(trace, Rates.of(80), Residents(2, 1))


@pytest.mark.wide
def test_a_timeline_s_clocks_are_near_those_of_the_machine_code() -> None:
    """A turn of fa2's main loop by both models, which share rates and latencies."""
    pytest.importorskip("cupy")
    if sass.disassembler() is None:
        pytest.skip(f"needs cuobjdump: {sass.INSTALL}")
    ours = Ours.of(Subject("forward", 80, 64, False))
    assert 0.8 < timeline.of_timeline(ours) / timeline.of_machine_code(ours) < 1.1
