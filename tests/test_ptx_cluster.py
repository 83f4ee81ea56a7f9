"""Clusters: launches, addresses and accesses of other blocks' shared memory, misuse of their barrier, deadlocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash.sim.profiling import profile
from cupyflash.sim.ptx import Launch, Module, UnsupportedPTX

SEEDS = [None, 0, 1, *(pytest.param(seed, marks=pytest.mark.wide) for seed in (2, 3))]
HEAD = ".version 8.3\n.target {target}\n.address_size 64\n"
REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<40>; .reg .b16 %h<4>; .reg .pred %p<8>;"
SHARED = ".shared .align 16 .b8 s[1024]; .shared .align 8 .b64 bar;"
START = """ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %cluster_nctarank;
xor.b32 %r4, %r2, 1; setp.lt.u32 %p1, %r4, %r3; selp.u32 %r3, %r4, %r2, %p1;
mov.u32 %r4, s; mapa.shared::cluster.u32 %r5, %r4, %r3; mov.u32 %r6, bar; mapa.shared::cluster.u32 %r7, %r6, %r3;
mov.u32 %r8, %ctaid.x; mov.u32 %r9, %ntid.x; mad.lo.u32 %r10, %r8, %r9, %r1; mad.wide.u32 %rd2, %r10, 4, %rd1;
shl.b32 %r11, %r1, 2; add.u32 %r12, %r4, %r11; add.u32 %r13, %r5, %r11; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p2, %r2, 0;
"""
"""%r1 the thread, %r2 the rank, %r3 the one beside it, s at %r4, the other block's at %r5, bar at %r6 and %r7, %rd2 the
thread's word of y, %r12 its word of s and %r13 of the other block's s; %p1: thread 0, %p2: rank 0."""
SYNC = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
OUT = "st.global.u32 [%rd2], %r20;\n"


def program(body: str, directives: str = "", target: str = "sm_90") -> str:
    """A kernel k(y) whose body begins at line 8: each line of it is a line of PTX."""
    start = START.replace("\n", " ")
    entry = f"{HEAD.format(target=target)}.visible .entry k(.param .u64 y)\n{directives}\n"
    return f"{entry}{{\n{REGISTERS}{SHARED}{start}\n{body}\nret;\n}}\n"


FIRST = 8
"""Line of the first line of a body."""


def launch(body: str, *, grid: Any = 2, block: Any = 32, cluster: Any = 2, **options: Any) -> tuple[Launch, np.ndarray]:
    y = np.zeros(int(np.prod(grid)) * int(np.prod(block)), np.uint32)
    return Module.from_ptx(program(body)).launch("k", grid, block, {"y": y}, cluster=cluster, **options), y


def found(body: str, **options: Any) -> list[tuple[str, int]]:
    """Kind and line (of the body, from 0) of all findings, in order."""
    return sorted({(f.kind, f.ptx_line - FIRST) for f in launch(body, **options)[0].findings})


EXCHANGE = (
    """st.shared.u32 [%r12], %r10;
{between}
ld.shared::cluster.u32 %r20, [%r13];
"""
    + SYNC
    + OUT
)
"""Each thread reads what its like in the other block wrote."""


def line(body: str, text: str) -> int:
    """The only line of a body with this text."""
    (number,) = [n for n, one in enumerate(body.splitlines()) if text in one]
    return number


# -- launches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [None, 1, 2, (2, 2), (1, 2, 2), (4, 1, 2)])
def test_special_registers_say_where_a_block_is(cluster: Any) -> None:
    grid = np.array([4, 2, 2])
    size = np.array((*np.atleast_1d(1 if cluster is None else cluster), 1, 1)[:3])
    names = [
        f"%{name}.{axis}" for name in ("ctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"
    ]
    names += ["%cluster_ctarank", "%cluster_nctarank"]
    body = """mov.u32 %r20, %ctaid.x; mov.u32 %r21, %ctaid.y; mov.u32 %r22, %ctaid.z; mad.lo.u32 %r20, %r21, 4, %r20;
    mad.lo.u32 %r20, %r22, 8, %r20; mul.wide.u32 %rd3, %r20, 72; add.u64 %rd3, %rd1, %rd3;
    """
    body += "".join(f"mov.u32 %r20, {name}; st.global.u32 [%rd3+{4 * k}], %r20;\n" for k, name in enumerate(names))
    body += "mov.pred %p3, %is_explicit_cluster; selp.u32 %r20, 1, 0, %p3; st.global.u32 [%rd3+68], %r20;\n"
    y = np.zeros((16, 18), np.uint32)
    assert Module.from_ptx(program(body)).launch("k", grid, 1, {"y": y}, cluster=cluster).findings == ()
    for number, row in enumerate(y):
        block = np.array([number % 4, number // 4 % 2, number // 8])
        inside = block % size
        rank = inside[0] + size[0] * (inside[1] + size[1] * inside[2])
        expected = [*block, *(block // size), *(grid // size), *inside, *size, rank, size.prod(), cluster is not None]
        assert row.tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_findings_name_blocks_of_the_grid_whatever_the_clusters(seed: int | None) -> None:
    body = "mov.u32 %r20, %ctaid.y;\nsetp.eq.u32 %p3, %r20, 1;\nsetp.eq.and.u32 %p3, %r8, 2, %p3;\n@%p3 ld.shared.u32 %r21, [s];"
    (finding,) = launch(body, grid=(4, 2), cluster=(2, 2), block=1, seed=seed)[0].findings
    assert (finding.kind, finding.block) == ("uninitialised", 6)


@pytest.mark.parametrize(
    ("directives", "cluster", "grid", "words"),
    [
        ("", 3, 4, "grid must be whole clusters of"),
        ("", (1, 2), (4, 3), "grid must be whole clusters of"),
        ("", 17, 17, "cluster x is at most 16"),
        ("", (8, 3), (8, 3), "at most 16 blocks, on every device at most 8, got"),
        ("", 0, 1, "cluster must be one to three positive whole numbers"),
        (".reqnctapercluster 2, 1, 1", 4, 4, r"cluster must be \(2, 1, 1\), as k is compiled for, got \(4, 1, 1\)"),
        (".reqnctapercluster 2, 1, 1", None, 3, "grid must be whole clusters"),
        (".explicitcluster", None, 2, r"say cluster=\(x, y, z\)"),
        (".maxclusterrank 4", 8, 8, "at most 4 blocks .k says so."),
    ],
)
def test_a_cluster_that_the_chip_refuses(directives: str, cluster: Any, grid: Any, words: str) -> None:
    module = Module.from_ptx(program("", directives))
    with pytest.raises(ValueError, match=words):
        module.launch("k", grid, 32, {"y": np.zeros(32, np.uint32)}, cluster=cluster)


def test_the_kernel_may_say_its_cluster_and_older_targets_have_none() -> None:
    body = f"mov.u32 %r20, %cluster_nctarank;\n{OUT}"
    for directives, cluster in (
        (".explicitcluster .reqnctapercluster 2, 2, 1", None),
        (".explicitcluster", (2, 2)),
        (".maxclusterrank 4", 4),
    ):
        y = np.zeros(4, np.uint32)
        grid = (4, 1) if cluster == 4 else (2, 2)
        Module.from_ptx(program(body, f".maxntid 32\n{directives}".replace("\n", " "))).launch(
            "k", grid, 1, {"y": y}, cluster=cluster
        )
        assert set(y) == {4, 0} or set(y) == {4}
    with pytest.raises(ValueError, match="cluster needs PTX for sm_90 or newer, this is for sm_80"):
        Module.from_ptx(program("", target="sm_80")).launch("k", 2, 32, {"y": np.zeros(64, np.uint32)}, cluster=2)


def test_an_unknown_special_register_is_called_so() -> None:
    with pytest.raises(UnsupportedPTX, match="unknown special register %cluster_of_stars") as caught:
        Module.from_ptx(program("mov.u32 %r20, %cluster_of_stars;\nmov.u32 %r20, %rr7;"))
    assert "register %rr7 is not declared" in str(caught.value)


def test_a_wave_has_whole_clusters() -> None:
    """More threads than a wave takes: every block still reaches the last one of its cluster."""
    body = f"st.shared.u32 [%r12], %r10;\n{SYNC}mov.u32 %r20, 2; mapa.shared::cluster.u32 %r21, %r12, %r20;\n"
    body += f"ld.shared::cluster.u32 %r20, [%r21];\n{SYNC}{OUT}"
    result, y = launch(body, grid=18, block=256, cluster=3)
    block, thread = np.divmod(np.arange(18 * 256), 256)
    assert result.findings == () and result.counters.waves > 1
    assert (y == (block // 3 * 3 + 2) * 256 + thread).all()


# -- addresses and accesses -------------------------------------------------------------------------------------------------


def test_addresses_in_the_cluster() -> None:
    """mapa and getctarank are inverse, plain and generic; the own window is part of the cluster's."""
    body = """getctarank.shared::cluster.u32 %r20, %r5;
    mov.u64 %rd3, s; cvta.shared.u64 %rd4, %rd3; mapa.u64 %rd5, %rd4, %r3; getctarank.u64 %r21, %rd5;
    mapa.u64 %rd6, %rd5, %r2; getctarank.u64 %r22, %rd6; getctarank.u64 %r23, %rd4;
    cvt.u64.u32 %rd7, %r5; cvta.shared::cluster.u64 %rd7, %rd7; setp.eq.u64 %p3, %rd7, %rd5; selp.u32 %r24, 1, 0, %p3;
    isspacep.shared::cluster %p3, %rd5; selp.u32 %r25, 1, 0, %p3; isspacep.shared::cta %p3, %rd5; selp.u32 %r26, 1, 0, %p3;
    isspacep.shared %p3, %rd6; selp.u32 %r27, 1, 0, %p3; isspacep.shared::cluster %p3, %rd4; selp.u32 %r28, 1, 0, %p3;
    isspacep.shared::cluster %p3, %rd1; selp.u32 %r29, 1, 0, %p3; mapa.shared::cluster.u32 %r31, s+4, %r3; sub.u32 %r30, %r31, %r5;
    mul.wide.u32 %rd8, %r8, 44; add.u64 %rd8, %rd1, %rd8;
    """
    body += "".join(f"st.global.u32 [%rd8+{4 * k}], %r{20 + k};\n" for k in range(11))
    result, y = launch(body, block=11)
    assert result.findings == ()
    for rank, row in enumerate(y.reshape(2, 11).tolist()):
        assert row == [1 - rank, 1 - rank, rank, rank, 1, 1, 0, 1, 1, 0, 4]


def test_mapa_to_a_rank_that_is_not_there() -> None:
    assert found("mov.u32 %r20, 2;\nmapa.shared::cluster.u32 %r21, %r4, %r20;") == [("bad rank", 1)]
    body = f"{SYNC}mov.u32 %r20, 40;\nmapa.shared::cluster.u32 %r21, %r4, %r20;\nld.shared::cluster.u32 %r22, [%r21];\n{SYNC}"
    assert found(body) == [("bad rank", 3), ("out of bounds", 4)]
    assert found("mapa.u64 %rd3, %rd1, %r3;") == [("out of bounds", 0)]


WIDTHS = [
    ("b8", 1, "%r"),
    ("b16", 1, "%h"),
    ("b32", 1, "%r"),
    ("b64", 1, "%rd"),
    ("b32", 2, "%r"),
    ("b64", 2, "%rd"),
    ("b32", 4, "%r"),
]


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_every_width_reaches_the_other_block(generic: bool, writes: bool) -> None:
    """Each thread moves 16 bytes by accesses of each width, through the other block's memory."""
    for type_, vector, register in WIDTHS:
        size = int(type_[1:]) // 8 * vector
        numbers = [1, 2] if register == "%h" else [10, 11, 12, 13] if register == "%rd" else [20, 21, 22, 23]
        names = [f"{register}{n}" for n in numbers[:vector]]
        value = names[0] if vector == 1 else "{" + ", ".join(names) + "}"
        kind = (f".v{vector}" if vector > 1 else "") + f".{type_}"
        far, near = ("", "%rd6") if generic else (".shared::cluster", "%r16")
        moves = [f"ld.global{kind} {value}, [%rd4+{at}]; st.shared{kind} [%r15+{at}], {value};" for at in range(0, 16, size)]
        out = [f"ld{far}{kind} {value}, [{near}+{at}]; st.global{kind} [%rd5+{at}], {value};" for at in range(0, 16, size)]
        if writes:
            moves = [f"ld.global{kind} {value}, [%rd4+{at}]; st{far}{kind} [{near}+{at}], {value};" for at in range(0, 16, size)]
            out = [f"ld.shared{kind} {value}, [%r15+{at}]; st.global{kind} [%rd5+{at}], {value};" for at in range(0, 16, size)]
        start = """shl.b32 %r14, %r1, 4; add.u32 %r15, %r4, %r14; add.u32 %r16, %r5, %r14; mul.wide.u32 %rd4, %r10, 16;
        add.u64 %rd4, %rd1, %rd4; add.u64 %rd5, %rd4, 1024; cvt.u64.u32 %rd6, %r16; cvta.shared::cluster.u64 %rd6, %rd6;"""
        body = f"{start}\n{SYNC}{' '.join(moves)}\n{SYNC}{' '.join(out)}\n{SYNC}"
        y = np.random.default_rng(size).integers(0, 256, 2048, np.uint8)
        result = Module.from_ptx(program(body)).launch("k", 2, 32, {"y": y}, cluster=2)
        assert result.findings == ()
        assert (y[1024:].reshape(2, -1) == y[:1024].reshape(2, -1)[::-1]).all(), (type_, vector)
        moved = result.counters.distributed_memory
        assert (moved.bytes, moved.requests) == (1024, 2 * 16 // size)
        assert {key[1] for key in result.counters.distributed} == {size}
        assert sum(c.distributed_memory.bytes for c in result.counters.lines.values()) == 1024


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_in_another_blocks_memory(seed: int | None) -> None:
    """All threads of four blocks add to words of rank 0: each old value is returned once, in every order."""
    body = f"""@%p1 st.shared.u32 [s], 0; @%p1 st.shared.u32 [s+4], 0;
    {SYNC.replace(chr(10), " ")}
    mov.u32 %r21, 0; mapa.shared::cluster.u32 %r22, %r4, %r21; cvt.u64.u32 %rd3, %r22; cvta.shared::cluster.u64 %rd3, %rd3;
    atom.shared::cluster.add.u32 %r20, [%r22], 1; red.add.u32 [%rd3+4], %r10;
    {SYNC.replace(chr(10), " ")}
    ld.shared::cluster.u32 %r23, [%r22+4]; setp.ne.u32 %p3, %r23, 8128; @%p3 add.u32 %r20, %r20, 1000;
    {SYNC.replace(chr(10), " ")}
    {OUT}"""
    result, y = launch(body, grid=4, cluster=4, seed=seed)
    assert result.findings == () and sorted(y.tolist()) == list(range(128))
    assert result.counters.distributed[("atom", 4)].bytes == 2 * 96 * 4  # the own block's are ordinary shared memory
    assert result.counters.shared[("atom", 4)].bytes == 2 * 32 * 4


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("ld.shared::cluster.u32 %r20, [%r5+1040];", "out of bounds"),
        ("ld.shared::cluster.u32 %r20, [%r5+2];", "misaligned"),
        ("ld.shared::cluster.u32 %r20, [%r5+512];", "uninitialised"),
        ("ld.shared.u32 %r20, [%r5];", "out of bounds"),
        ("st.shared::cluster.u32 [%r5+512], %r1;", "race"),
        ("@%p1 st.shared::cluster.u32 [%r13+4], %r1;", "race"),
    ],
)
def test_faults_in_another_blocks_memory(fault: str, kind: str, seed: int | None) -> None:
    body = f"st.shared.u32 [%r12], %r1;\n{SYNC}ld.shared.u32 %r21, [%r12];\n{fault}\n{SYNC}"
    if kind == "race" and "%p1" not in fault:
        body = body.replace(fault, f"{fault}\nst.shared.u32 [%r4+512], %r1;")
    (finding,) = launch(body, seed=seed)[0].findings
    assert finding.kind == kind and finding.ptx_line - FIRST in (line(body, fault), line(body, fault) + 1)
    if kind == "race":
        assert "the shared memory of block " in finding.message


# -- misuse and deadlocks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("barrier.cluster.wait;", "without an arrival before"),
        ("barrier.cluster.arrive;\nbarrier.cluster.arrive;\nbarrier.cluster.wait;", "without a wait for the first"),
    ],
)
def test_misuse_of_the_barrier_of_the_cluster(body: str, words: str, seed: int | None) -> None:
    (finding,) = launch(body, seed=seed)[0].findings
    assert finding.kind == "cluster barrier" and words in finding.message
    assert finding.ptx_line - FIRST == body.count("\n") // 2


@pytest.mark.parametrize("seed", SEEDS)
def test_threads_that_have_exited_are_not_waited_for(seed: int | None) -> None:
    body = f"@%p2 exit;\n{SYNC}mov.u32 %r20, 5;\n{OUT}"
    result, y = launch(body, seed=seed)
    assert result.findings == () and y.tolist() == [0] * 32 + [5] * 32


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadlock_says_who_waits_for_whom_and_where(seed: int | None) -> None:
    """Three roles: warp 0 waits for an mbarrier, warp 1 at a named barrier, rank 1 and warps 2 and 3 for the cluster."""
    body = """@%p1 mbarrier.init.shared.b64 [%r6], 3;
    bar.sync 0;
    @!%p2 bra OTHERS;
    setp.lt.u32 %p3, %r1, 64;
    @!%p3 bra OTHERS;
    setp.lt.u32 %p3, %r1, 32;
    @!%p3 bar.sync 5, 64;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r6], 0;
    @!%p4 bra WAIT;
    OTHERS: barrier.cluster.arrive;
    barrier.cluster.wait;"""
    result, _ = launch(body, block=128, seed=seed)
    by_line = {f.ptx_line - FIRST: f.message for f in result.findings}
    assert {f.kind for f in result.findings} == {"deadlock"} and sorted(by_line) == [6, 7, 10]
    assert "at barrier 5: 32 of 64 have arrived" in by_line[6]
    assert "for phase 0 (parity 0) of the mbarrier at 0x400 (bar) that lacks 3 arrivals and 0 bytes" in by_line[7]
    assert "at which warps 0-1 of block 0 have not arrived" in by_line[10]
    for message in by_line.values():  # each names all three roles
        assert "warp 0 of block 0 at PTX line 15" in message or message == by_line[7]
        assert "warp 1 of block 0 at PTX line 14" in message or message == by_line[6]
        assert message == by_line[10] or "at PTX line 18 (barrier.cluster.wait) at the barrier of the cluster" in message


# -- what such kernels use besides ------------------------------------------------------------------------------------------------


def test_one_lane_is_elected_and_other_spellings() -> None:
    body = (
        """elect.sync %r21|%p3, -1;
    selp.u32 %r20, 1, 0, %p3; mad.lo.u32 %r20, %r21, 100, %r20;
    elect.sync _|%p4, 0xFFFFFFFF; @%p4 add.u32 %r20, %r20, 10;
    griddepcontrol.wait; griddepcontrol.launch_dependents; nanosleep.u32 100;
    barrier.cta.sync 1, 64; barrier.cta.sync.aligned 0; barrier.sync 2; bar.cta.sync 3; bar.warp.sync 0xffffffff;
    barrier.cta.arrive.aligned 4, 128; barrier.cta.sync.aligned 4, 128; barrier.cta.red.popc.aligned.u32 %r22, 0, %p3;
    mad.lo.u32 %r20, %r22, 1000, %r20;
    """
        + OUT
    )
    result, y = launch(body.replace("barrier.cta.arrive.aligned 4, 128; barrier.cta.sync.aligned 4, 128;", ""), block=64, grid=2)
    assert result.findings == ()
    assert (y == np.where(np.arange(128) % 32 == 0, 2011, 2000)).all()


def test_cooperative_groups_of_several_warps_use_memory_of_the_system() -> None:
    """%reserved_smem_offset: behind the kernel's own shared memory, which does not shrink."""
    body = (
        """mov.u32 %r20, %reserved_smem_offset_begin; mov.u32 %r21, %reserved_smem_offset_end;
    mov.u32 %r22, %reserved_smem_offset_cap;
    sub.u32 %r23, %r21, %r20; sub.u32 %r23, %r23, %r22; mov.u32 %r24, %reserved_smem_offset_1; mov.u32 %r25, %total_smem_size;
    mov.u32 %r26, %aggr_smem_size; sub.u32 %r26, %r26, %r25; add.u32 %r27, %r24, %r11;
    st.shared.u32 [%r27], %r23; st.shared.u32 [%r12], %r26; bar.sync 0; ld.shared.u32 %r20, [%r27]; ld.shared.u32 %r21, [%r12];
    add.u32 %r20, %r20, %r21;
    """
        + OUT
    )
    result, y = launch(body)
    assert result.findings == () and set(y) == {1024}
    zero = "mov.u32 %r24, %reserved_smem_offset_0;\nld.shared.u32 %r20, [%r24];\n" + OUT
    assert not launch(zero, grid=4)[1].any() and found(zero) == []


def test_profiles_count_the_memory_of_other_blocks() -> None:
    module = Module.from_ptx(program(EXCHANGE.format(between=SYNC)))
    found = profile(module, grid=4, block=32, cluster=2, args={"y": np.zeros(128, np.uint32)})
    (entry,) = found.to_dict()["total"]["distributed"]
    assert (entry["kind"], entry["width"], entry["requests"], entry["bytes"]) == ("ld", 4, 4, 512)
    assert "cluster 2 x 1 x 1" in found.text() and "Distributed shared memory" in found.text()
