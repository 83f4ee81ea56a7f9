"""wgmma: what is found in kernels that use it wrongly, and setmaxnreg."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import kernel, run
from test_ptx_wgmma import BYTES, COMMIT, FENCE, PROXY, SEEDS, WAIT, WHOLE, Case, Matrix, data, execute, program, right

from cupyflash.sim.ptx import Launch, UnsupportedPTX

pytest.importorskip("ml_dtypes")


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


FIRST = "setp.eq.u32 %p2, %t, 0;"
READY = f"{PROXY} bar.sync 0;"
HEAD = f"{READY} {FENCE} MMA {COMMIT}\n"
END = f"\n {COMMIT} {WAIT}"
FAULTS: dict[str, tuple[str, str, str]] = {
    "accumulators read before the wait": (f"{HEAD} add.u32 %r1, %d5, 1;\n {WAIT}", "add.u32 %r1", "in flight"),
    "accumulators written before the wait": (f"{HEAD} add.u32 %d5, %r1, 1;\n {WAIT}", "add.u32 %d5", "in flight"),
    "accumulators zeroed before the wait": (f"{HEAD} mov.b32 %d5, 0;\n {WAIT}", "mov.b32 %d5", "in flight"),
    "some accumulators stored before the wait": (
        f"{HEAD} {FIRST} @%p2 st.global.u32 [%rd2], %d5;\n {WAIT}",
        "@%p2 st.global.u32",
        "in flight",
    ),
    "a wait for too few groups": (
        f"{HEAD} wgmma.wait_group.sync.aligned 1;\n add.u32 %r1, %d5, 1;\n {WAIT}",
        "add.u32 %r1",
        "in flight",
    ),
    "no commit": (f"{READY} {FENCE} MMA {WAIT}\n add.u32 %r1, %d5, 1;{END}", "add.u32 %r1", "in flight"),
    "a copy read before the wait": (f"{HEAD} mov.b32 %e1, %d5;\n add.u32 %r1, %e1, 1;\n {WAIT}", "add.u32 %r1", "in flight"),
    "no fence at all": (f"{READY}\n MMA{END}", "wgmma.mma_async", "missing fence"),
    "a write behind the fence": (f"{READY} {FENCE} add.f32 %d5, %d5, %d5;\n MMA{END}", "wgmma.mma_async", "missing fence"),
    "no fence behind the next write": (
        f"{HEAD} {WAIT} add.f32 %d5, %d5, %d5;\n MMA /* 2 */{END}",
        "/* 2 */",
        "missing fence",
    ),
    "no proxy fence": (f"bar.sync 0; {FENCE}\n MMA{END}", "wgmma.mma_async", "proxy"),
    "no barrier": (f"{PROXY} {FENCE}\n MMA{END}", "wgmma.mma_async", "race"),
    "a stage overwritten before the wait": (f"{HEAD} {FIRST} @%p2 st.shared.u32 [%r3], 0;\n {WAIT}", "@%p2 st.shared.u32", "race"),
    "a stage overwritten by cp.async": (
        f"{HEAD} {FIRST} @%p2 cp.async.ca.shared.global [%r3], [%rd1], 16;\n cp.async.wait_all; {WAIT}",
        "cp.async.ca",
        "race",
    ),
    "descriptors differ": (
        f"{READY} {FENCE} shr.u32 %r7, %t, 5; cvt.u64.u32 %rd9, %r7; add.s64 %rd6, %rd6, %rd9;\n MMA{END}",
        "wgmma.mma_async",
        "disagreement",
    ),
    "scale-d differs": (f"{READY} {FENCE} setp.eq.u32 %adds, %t, 64;\n MMA{END}", "wgmma.mma_async", "disagreement"),
    "a tile beyond shared memory": (
        f"{READY} {FENCE} mov.b64 %rd9, {(BYTES - 4096) >> 4}; add.s64 %rd5, %rd5, %rd9;\n MMA{END}",
        "wgmma.mma_async",
        "out of bounds",
    ),
    "a warp that does not come": (
        f"{READY} {FENCE} setp.ge.u32 %p2, %t, 96; @%p2 bra DONE;\n MMA{END} DONE:",
        "wgmma.mma_async",
        "deadlock",
    ),
    "a warp at another product": (
        f"{READY} {FENCE} setp.ge.u32 %p2, %t, 96; @%p2 bra OTHER;\n MMA /* 1 */\n bra DONE; OTHER: MMA DONE:{END}",
        "/* 1 */",
        "deadlock",
    ),
}
REGISTER_FAULTS = {
    "fragments written before the wait": (f"{HEAD} add.u32 %a2, %r1, 1;\n {WAIT}", "add.u32 %a2", "in flight"),
    "fragments moved over before the wait": (f"{HEAD} mov.b32 %a2, %r1;\n {WAIT}", "mov.b32 %a2", "in flight"),
    "fragments written behind the fence": (
        f"{READY} {FENCE} xor.b32 %a2, %a2, 0;\n MMA{END}",
        "wgmma.mma_async",
        "missing fence",
    ),
}


UNDER_SEEDS = (
    "accumulators read before the wait",
    "no proxy fence",
    "a warp that does not come",
    "fragments moved over before the wait",
)
"""Faults that the quick suite looks for under a seed too."""


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if seed is None or (seed == 0 and name in UNDER_SEEDS) else pytest.mark.wide)
        for name in [*FAULTS, *REGISTER_FAULTS]
        for seed in (None, 0, 1)
    ],
)
def test_fault(name: str, seed: int | None) -> None:
    case = Case() if name in FAULTS else Case(a=None)
    body, part, kind = (FAULTS | REGISTER_FAULTS)[name]
    found = data(case)
    text = program(case, body.replace("MMA", case.instruction().replace("\n", " ")))
    launch = run(text.replace("/*", "//").replace("*/", "\n"), found.args, block=128, seed=seed)
    assert {f.kind for f in launch.findings} == {kind}, [str(f) for f in launch.findings]
    assert line_of(text, part) in [f.ptx_line for f in launch.findings]
    assert len(launch.findings) == (2 if "another product" in name else 1)
    if kind == "deadlock":
        assert "warpgroup of warps 0 to 3: only warps" in launch.findings[0].message


BULK = f"""{READY} {FIRST} add.u32 %r14, %r3, 65024;
@%p2 mbarrier.init.shared::cta.b64 [%r14], 1; @%p2 fence.mbarrier_init.release.cluster; bar.sync 0;
@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r14], 64512;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%rd1], 64512, [%r14];
W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r14], 0; @!%p3 bra W;
{FENCE} MMA {COMMIT} {WAIT} bar.sync 0; @%p2 st.shared.u32 [%r3], 0; BEHIND {FENCE}
MMA {COMMIT} {WAIT}"""
"""A bulk copy of whole tiles, a product, a store into a tile, a product."""


@pytest.mark.parametrize(("behind", "kinds"), [("", {"race"}), ("bar.sync 0;", {"proxy"}), (READY, set())])
def test_a_store_into_a_tile_that_a_bulk_copy_wrote(behind: str, kinds: set[str]) -> None:
    """Products have looked at the whole tile before: what they know of it is old."""
    case = Case()
    text = program(case, BULK.replace("BEHIND", behind).replace("MMA", case.instruction().replace("\n", " ")))
    launch = run(text, data(case).args, block=128)
    assert {f.kind for f in launch.findings} == kinds, [str(f) for f in launch.findings]


def test_accumulators_that_nobody_wrote() -> None:
    """They matter only if the product is added to them."""
    for adds, kinds in ((True, ["uninitialised"]), (False, [])):
        case = Case(adds=adds)
        moved = "".join(f"mov.b32 %d{r}, %e{r};" for r in range(32))
        launch, found = execute(case, f"{READY} {FENCE} {case.instruction(d='%e')} {COMMIT} {WAIT} {moved}")
        assert [f.kind for f in launch.findings][:1] == kinds
        assert adds or right(case, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_product_needs_a_fence_whatever_its_registers(seed: int | None) -> None:
    case = Case(adds=False)
    for fence, kinds in ((FENCE, []), ("", ["missing fence"])):
        launch, _ = execute(case, f"{READY} {fence} {case.instruction(d='%e')} {COMMIT} {WAIT}", seed=seed)
        assert [f.kind for f in launch.findings] == kinds


def test_shared_memory_that_nobody_wrote() -> None:
    case = Case(b=Matrix(start=16384))
    text = program(case, WHOLE.replace("MMA", case.instruction()), shared=16384).replace("s[16384]", "s[32768]")
    launch = run(text, data(case, shared=32768).args, block=128)
    assert [f.kind for f in launch.findings] == ["uninitialised"]


def test_what_a_kernel_that_does_not_wait_gets() -> None:
    """The latest results that are allowed: registers keep their values until the wait, and a tile is read as it is at the wait."""
    case = Case()
    early = "".join(f"add.u32 %e{r}, %d{r}, 0;" for r in range(32))
    moved = "".join(f"mov.b32 %d{r}, %e{r};" for r in range(32))
    launch, found = execute(case, f"{HEAD} {early} {WAIT} {moved}")
    assert launch.findings and (found.args["y"] == data(case).args["y"]).all()
    zero = f"{FIRST} @%p2 st.shared.v4.u32 [%r3], {{%r7, %r7, %r7, %r7}};"
    launch, found = execute(case, f"{HEAD} mov.u32 %r7, 0; {zero} {WAIT}")
    found.a[0, :8] = 0
    assert launch.findings and right(case, found)


def test_under_seeds_a_product_is_computed_at_some_moment() -> None:
    spin = "mov.u32 %r7, 0; SPIN: add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, 20; @%p1 bra SPIN;"
    zero = f"{FIRST} @%p2 st.shared.v4.u32 [%r3], {{%r7, %r7, %r7, %r7}};"
    times = set()
    for seed in range(8):
        # Behind the barrier nobody has waited yet, and all are behind the store.
        _, found = execute(Case(), f"{HEAD} {spin} {zero} bar.sync 0; {WAIT}", seed=seed)
        times.add(right(Case(), found))
    assert times == {True, False}


# -- stages that are given back -------------------------------------------------------------------------------------------------

RING = """setp.ge.u32 %p2, %t, 128; mov.u32 %r12, bar; setp.eq.u32 %p3, %t, 128; @!%p3 bra GO; mbarrier.init.shared.b64 [%r12], 1;
GO: bar.sync 0; @%p2 bra PRODUCER; FENCE MMA COMMIT BEFORE
setp.eq.u32 %p1, %t, ARRIVES; @%p1 mbarrier.arrive.shared.b64 %rd9, [%r12]; AFTER bra DONE;
PRODUCER: @!%p3 bra DONE; LOOK: mbarrier.try_wait.parity.shared.b64 %p1, [%r12], 0; @!%p1 bra LOOK;
st.shared.u32 [%r3], 0;
DONE:"""


def ring(before: str, after: str, arrives: int, seed: int | None) -> tuple[Launch, int]:
    """A warpgroup of which thread `arrives` gives a stage back, thread 128 overwrites it; the line where it does."""
    case = Case()
    body = RING
    for name, text in (("FENCE", FENCE), ("MMA", case.instruction()), ("COMMIT", COMMIT), ("BEFORE", before), ("AFTER", after)):
        body = body.replace(name, text)
    text = program(case, f".shared .align 8 .b64 bar; {PROXY} {body}".replace("ARRIVES", str(arrives)))
    found = data(case)
    found.args |= {name: np.concatenate([found.args[name]] * 2) for name in "yz"}
    launch = run(text, found.args, block=256, seed=seed)
    found.args["y"] = found.args["y"][:128]
    assert launch.findings or right(case, found)
    return launch, line_of(text, "st.shared.u32 [%r3], 0")


@pytest.mark.parametrize("seed", SEEDS)
def test_one_thread_may_give_a_stage_back(seed: int | None) -> None:
    """Pipelines have it: after the wait of its warp."""
    for arrives in (0, 33, 96):
        assert ring(WAIT, "", arrives, seed)[0].findings == ()
    launch, line = ring("", WAIT, 33, seed)
    assert [(f.kind, f.ptx_line) for f in launch.findings] == [("race", line)]


# -- the same instruction in all four warps -------------------------------------------------------------------------------------

LAST = "setp.ge.u32 %p2, %t, 96;"
DONE = f"{READY} {FENCE} MMA {COMMIT} {WAIT} {LAST}"
ARRIVE = "mbarrier.arrive.shared.b64 %rd1, [bar];"
REGISTERS = "setmaxnreg.dec.sync.aligned.u32"
ALIGNED: dict[str, tuple[str, str, str]] = {
    "wgmma.fence": (f"@%p2 bra OVER;\n {FENCE}\n OVER:", FENCE, "warp 3 runs wgmma.commit_group at PTX line"),
    "wgmma.commit_group": (f"@%p2 bra OVER;\n {COMMIT}\n OVER:", COMMIT, "warp 3 runs wgmma.commit_group at PTX line"),
    "wgmma.wait_group": (f"@!%p2 bra OVER;\n {WAIT}\n OVER:", WAIT, "warp 0 runs wgmma.commit_group at PTX line"),
    "setmaxnreg.dec": (f"@%p2 bra OVER;\n {REGISTERS} 40;\n OVER:", REGISTERS, "warp 3 runs wgmma.commit_group at PTX line"),
    "wgmma.wait_group ": (
        f"@%p2 bra OTHER;\n {WAIT}\n bra OVER; OTHER: wgmma.wait_group.sync.aligned 0x0; OVER:",
        WAIT,
        "warp 3 runs wgmma.wait_group at PTX line",
    ),
    "wgmma.fence ": (f"@%p2 ret;\n {FENCE}\n", FENCE, "warp 3 has exited"),
    "wgmma.commit_group ": (f"setp.ne.u32 %p2, %t, 40;\n @%p2 {COMMIT}\n", f"@%p2 {COMMIT}", "for some threads of a warp only"),
}
"""By the instruction that not all run (a blank tells two apart): code behind a whole product, the line, a part of the message."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ALIGNED)
def test_not_all_warps_run_it(name: str, seed: int | None) -> None:
    body, part, message = ALIGNED[name]
    case = Case()
    text = program(case, f"{DONE.replace('MMA', case.instruction())}\n {body} {COMMIT}")
    launch = run(text, data(case).args, block=128, seed=seed)
    assert [f.kind for f in launch.findings] == ["disagreement"], [str(f) for f in launch.findings]
    assert text.splitlines()[launch.findings[0].ptx_line - 1].strip() == part + (" 40;" if part == REGISTERS else "")
    assert launch.findings[0].message.startswith(f"{name.strip()} must be run by all") and message in launch.findings[0].message


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_that_part_and_run_the_same_do_not_disagree(seed: int | None) -> None:
    """At different times, with an ordinary branch between; also in a block whose last warpgroup has only one warp."""
    spin = "mov.u32 %r7, 0; SPIN: add.u32 %r7, %r7, 1; setp.lt.u32 %p1, %r7, %t; @%p1 bra SPIN;"
    body = f"{REGISTERS} 40; setp.ge.u32 %p2, %t, 128; @%p2 bra OVER; {FENCE} MMA {spin} {COMMIT} {WAIT} OVER: {spin} bar.sync 0;"
    case, block = Case(), 160
    found = data(case)
    found.args |= {name: np.concatenate([found.args[name], found.args[name][:32]]) for name in "yz"}
    text = program(case, f"{READY} {body.replace('MMA', case.instruction()).replace('SPIN', 'TURN', 2)}")
    launch = run(text, found.args, block=block, seed=seed)
    found.args["y"] = found.args["y"][:128]
    assert launch.findings == () and right(case, found)


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_of_two_blocks_are_no_warpgroup(seed: int | None) -> None:
    """Two warps of one block and the other two of the next come first, together."""
    body = f"""{READY} mov.u32 %r7, %ctaid.x; shr.u32 %r8, %t, 6; setp.eq.u32 %p2, %r7, %r8; @!%p2 bra LATER;
    GO: {FENCE} MMA {COMMIT} {WAIT} mul.wide.u32 %rd9, %r7, 16384; add.s64 %rd2, %rd2, %rd9; add.s64 %rd2, %rd2, 16384; bra OVER;
    LATER: add.u32 %r9, %r7, 0; bra GO; OVER:"""
    case = Case()
    found = data(case)
    found.args["y"] = np.concatenate([found.args["y"]] * 3)
    launch = run(program(case, body.replace("MMA", case.instruction())), found.args, grid=2, block=128, seed=seed)
    assert launch.findings == ()
    results = found.args["y"]
    for k in (1, 2):
        found.args["y"] = results[128 * k : 128 * (k + 1)]
        assert right(case, found)


# -- setmaxnreg -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("first", "second", "directives", "kinds"),
    [
        ("dec 40", "inc 232", ".maxnreg 136", []),
        ("inc 232", "dec 104", ".maxntid 384 .minnctapersm 1", []),
        ("dec 24", "inc 232", ".maxntid 256, 1, 1 .minnctapersm 2", []),
        ("inc 240", "dec 40", ".maxnreg 136", ["deadlock"]),
        ("dec 24", "inc 240", ".reqntid 256 .minnctapersm 2", ["deadlock"]),
        ("inc 40", "inc 232", ".maxnreg 136", ["register budget"]),
        ("inc 40", "dec 24", ".maxnreg 136", []),
        ("inc 240", "dec 40", ".maxntid 256 .minnctapersm 1", []),
        ("dec 24", "dec 144", ".maxnreg 136", ["register budget"]),
        ("inc 240", "inc 240", "", []),
    ],
)
def test_register_pools(first: str, second: str, directives: str, kinds: list[str], seed: int | None) -> None:
    """A request beyond the pool never succeeds; without directives ptxas ignores the instruction.

    At launch a thread has no more than the largest .inc asks for: so has ptxas 13.0 it (-v).
    """
    a, b = (f"setmaxnreg.{one.split()[0]}.sync.aligned.u32 {one.split()[1]};" for one in (first, second))
    body = f"mov.u32 %t, %tid.x; setp.ge.u32 %p1, %t, 128; @%p1 bra SECOND; {a} bra DONE; SECOND: {b} DONE:"
    text = kernel(body, [], ".reg .b32 %t; .reg .pred %p1;").replace("k()", f"k() {directives}")
    launch = run(text, {}, block=256, seed=seed)
    assert [f.kind for f in launch.findings] == kinds
    if kinds == ["deadlock"]:
        assert "of the block's" in launch.findings[0].message and "registers a thread" in launch.findings[0].message


@pytest.mark.parametrize("seed", SEEDS)
def test_between_two_setmaxnreg_the_warpgroup_synchronises(seed: int | None) -> None:
    for between, kinds in (
        ("", ["register budget"]),
        ("bar.warp.sync -1;", ["register budget"]),
        ("setp.lt.u32 %p1, %t, 64; @%p1 bar.sync 2, 64; @!%p1 bar.sync 3, 64;", ["register budget"]),
        ("bar.sync 0;", []),
        ("bar.sync 1, 128;", []),
        (f"{ARRIVE} LOOK: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra LOOK;", []),
    ):
        body = f"""mov.u32 %t, %tid.x; setp.eq.u32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [bar], 128; bar.sync 0;
        {REGISTERS} 64;\n {between}\n {REGISTERS} 40;"""
        text = kernel(body, [], ".shared .align 8 .b64 bar; .reg .b32 %t; .reg .b64 %rd1; .reg .pred %p1;")
        launch = run(text.replace("k()", "k() .maxnreg 128"), {}, block=128, seed=seed)
        assert [(f.kind, f.ptx_line) for f in launch.findings] == [(kind, line_of(text, "40;")) for kind in kinds], between
        assert not kinds or "must synchronise between the two" in launch.findings[0].message


@pytest.mark.parametrize("count", ["16", "260", "28"])
def test_counts_that_setmaxnreg_does_not_take(count: str) -> None:
    with pytest.raises(UnsupportedPTX, match="multiple of 8 from 24 to 256"):
        run(kernel(f"setmaxnreg.inc.sync.aligned.u32 {count};"), {})
