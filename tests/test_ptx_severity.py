"""Severity of findings: what is wrong on some chip or in some order, what every known chip does all the same, what is a note."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_ptx_cluster import SYNC
from test_ptx_cluster import launch as of_cluster
from test_ptx_races import SEEDS, launch, line_of

from cupyflash.sim.ptx import Launch, Module
from cupyflash.sim.ptx.state.findings import ERROR, KINDS, LIMIT, NOTE, SEVERITIES, WARNING, Findings, counted

PTX = (Path(__file__).resolve().parent.parent / "docs" / "ptx.md").read_text()


def severities(found: Launch) -> dict[int, str]:
    """The worst severity of the races, by the later line of each."""
    worst_last = sorted(found.findings, key=lambda f: -SEVERITIES.index(f.severity))
    return {f.source[1]: f.severity for f in worst_last if f.kind == "race" and f.source}


FIRST = "if (t % 32 == 0) x[0] = 7;"
"""A writer in each warp."""

SHARED = "__shared__ __align__(16) unsigned m[64];\n"
USED = "\n__syncthreads();\nif (n[1]) y[t] = m[t];"
"""At the end, so that the compiler leaves the stores."""

CASES = {
    # the body, and where in it what is found: of the last writer, of the reader
    "the same": ("x[0] = 7;", {"x[0]": WARNING}),
    "others": ("x[0] = t;", {"x[0]": ERROR}),
    "the same by two instructions": ("if (t < 32) x[0] = 7;\nelse if (y[t] == 0)\nx[0] = 7 + y[t];", {"x[0] = 7 + y": WARNING}),
    "others by two instructions": ("if (t < 32) x[0] = 7;\nelse if (y[t] == 0)\nx[0] = 8 + y[t];", {"x[0] = 8 + y": ERROR}),
    "one warp's lanes differ": ("if (t < 32) x[0] = t;\nelse if (y[t] == 0)\nx[0] = 31;", {"x[0] = 31": ERROR}),
    "one byte of many": ("if (t < 32) x[0] = 7;\nelse\n((char *)x)[1] = 0;", {"((char": WARNING}),
    "another byte": ("if (t < 32) x[0] = 7;\nelse\n((char *)x)[1] = 7;", {"((char": ERROR}),
    "vectors": ("if (t % 32 == 0)\n((uint4 *)x)[0] = make_uint4(1, 2, n[0], 4);", {"((uint4": WARNING}),
    "vectors, of which a word differs": ("if (t % 32 == 0)\n((uint4 *)x)[0] = make_uint4(1, 2, t, 4);", {"((uint4": ERROR}),
    "through generic addresses": (
        "__shared__ unsigned s[1];\nunsigned *p = n[t % 2] ? x : s;\n*p = 7;\n__syncthreads();\ny[t] = s[0];",
        {"*p = 7": WARNING},
    ),
    "and a reader": (FIRST + "\n__syncwarp();\ny[t] = x[0];", {"y[t]": ERROR}),
    "and an atomic": (FIRST + "\natomicAdd(x, 1);", {"atomicAdd": ERROR}),
    # Behind its own store, yet not behind the other warps'.
    "and another value by the last of them": (FIRST + "\nif (t == 32 || t == 0)\nx[n[0]] = 8;", {"x[n[0]]": ERROR}),
    "and another value behind a barrier": (FIRST + "\n__syncthreads();\nif (t == 32)\nx[n[0]] = 8;", {FIRST: WARNING}),
    "a volatile one": ("if (t < 32) x[0] = 7;\nelse\n*(volatile unsigned *)x = 7;", {"*(volatile": ERROR}),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_writers_of_the_same_bytes_are_a_warning(seed: int | None) -> None:
    for name, (body, wanted) in CASES.items():
        for shared in (False, True):
            text = body if not shared or "generic" in name else re.sub(r"\bx\b", "m", body)
            head, end = (SHARED, USED) if text != body else ("", "")
            found = launch(head + text + end, block=64, seed=seed)
            lines = {line_of(head + text, re.sub(r"\bx\b", "m", at) if head else at): is_ for at, is_ in wanted.items()}
            if name.startswith("and "):
                # A store that comes after the other value meets that.
                assert lines.items() <= severities(found).items(), (name, shared, [str(f) for f in found.findings])
            else:
                assert severities(found) == lines, (name, shared, [str(f) for f in found.findings])
            assert {f.kind for f in found.findings} <= {"race", "uninitialised"}, (name, found.findings)


@pytest.mark.parametrize("seed", SEEDS)
def test_between_blocks_too(seed: int | None) -> None:
    """All blocks write n to o[0], one warp each; with another value of one block behind it that is an error."""
    body = "if (t == 0)\nx[0] = 7;\nif (t == 0 && blockIdx.x == 3)\nx[n[0]] = 8;"
    same, other = line_of(body, "x[0]"), line_of(body, "x[n")
    assert severities(launch(body.replace("== 3", "== 9"), grid=4, block=32, seed=seed)) == {same: WARNING}
    assert severities(launch(body, grid=4, block=32, seed=seed))[other] == ERROR
    assert severities(launch("if (t == 0)\nx[0] = blockIdx.x;", grid=4, block=32, seed=seed)) == {same: ERROR}
    mixed = "x[0] = 7;\nif (t == 0)\ny[blockIdx.x] = x[n[0]];"
    assert severities(launch(mixed, grid=2, block=32, seed=seed))[line_of(mixed, "y[")] == ERROR


@pytest.mark.parametrize("seed", SEEDS)
def test_in_the_memory_of_another_block(seed: int | None) -> None:
    for value, severity in (("7", WARNING), ("%r1", ERROR)):
        body = f"{SYNC}st.shared::cluster.u32 [%r5], {value};\n{SYNC}"
        found, _ = of_cluster(body, block=64, seed=seed)
        assert [(f.kind, f.severity) for f in found.findings] == [("race", severity)]


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_several_blocks_at_once(seed: int | None) -> None:
    """The values that another block's lanes are about to write count, not those in memory before one instruction writes
    for both."""
    for own, other, severity in (("7", "7", WARNING), ("7", "9", ERROR), ("9", "7", ERROR)):
        body = f"""@%p2 st.shared.u32 [%r4], 9;
        {SYNC.replace(chr(10), " ")} mapa.shared::cluster.u32 %r20, %r4, 0; selp.u32 %r21, {own}, {other}, %p2;
        st.shared::cluster.u32 [%r20], %r21;
        {SYNC}"""
        found, _ = of_cluster(body, block=32, seed=seed)
        assert [(f.kind, f.severity) for f in found.findings] == [("race", severity)], (own, other, found.findings)


def test_several_threads_make_one_barrier() -> None:
    """`threadIdx.x == 0` in a block of 16 x 16 does so; with different counts nobody knows which one it has."""
    for count, severity in (("64", WARNING), ("64 + t / 32", ERROR)):
        body = f"""__shared__ unsigned long long bar;
        unsigned a = __cvta_generic_to_shared(&bar), c = {count};
        if (t % 32 == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(a), "r"(c) : "memory");
        __syncthreads();
        asm volatile("{{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }}" :: "r"(a) : "memory");"""
        for seed in (None, 1):
            assert [(f.kind, f.severity) for f in launch(body, seed=seed).findings] == [("race", severity)], (count, seed)


def test_writers_are_told_apart_by_who_comes_later() -> None:
    """Eight warps wrote the same; a barrier of four of them orders only those, so the others' writes still race."""
    first = FIRST.replace("x", "m")
    body = SHARED + first + '\nif (t < 128) asm volatile("bar.sync 1, 128;" ::: "memory");\nif (t == 0)\nm[n[0]] = 8;' + USED
    for seed in (None, 1, 2):
        found = launch(body, block=256, seed=seed)
        assert severities(found)[line_of(body, "m[n")] == ERROR
        four = launch(body.replace("t % 32 == 0", "t % 32 == 0 && t < 128"), block=256, seed=seed)
        assert severities(four) == {line_of(body, first): WARNING}


def test_writers_that_are_over_are_forgotten() -> None:
    """Stores of all warps before a barrier do not count in what two of them order between them later."""
    body = (
        FIRST
        + '\n__syncthreads();\nif (t == 0 || t == 32)\nx[n[0]] = 7;\nif (t < 64) asm volatile("bar.sync 1, 64;" ::: "memory");'
    )
    for seed in (None, 1, 2):
        found = launch(body + "\nif (t == 0)\nx[n[1]] = 8;", block=128, seed=seed)
        assert severities(found) == {line_of(body, FIRST): WARNING, line_of(body, "x[n[0]]"): WARNING}


def test_each_of_three_writers_counts() -> None:
    """A thread that is ordered after the second and the third still races with the first."""
    body = """if (t == 0) x[0] = 7;
    if (t == 32) x[n[0]] = 7;
    if (t == 64) x[n[1]] = 7;
    if (t >= 32) asm volatile("bar.sync 1, 64;" ::: "memory");
    if (t == 64) x[n[2]] = 8;"""
    for seed in (None, 1, 2):
        assert severities(launch(body, block=96, seed=seed))[line_of(body, "x[n[2]]")] == ERROR


def test_several_values_of_a_warp_are_over_once_overwritten() -> None:
    body = """if (t < 32) x[0] = t;
    __syncthreads();
    if (t == 0) x[n[0]] = 7;
    if (t == 32) x[n[1]] = 7;"""
    for seed in (None, 1, 2):
        assert set(severities(launch(body, seed=seed)).values()) == {WARNING}


def test_the_worst_is_what_is_said() -> None:
    """Of several races of one pair of lines the error is reported, whenever it came; errors replace warnings if there is
    no room."""
    body = "for (int k = 0; k < 4; k++)\nx[k] = k < 3 ? 7 : t;"
    for seed in (None, 1, 2):
        (finding,) = launch(body, seed=seed).findings
        assert finding.severity == ERROR and "same bytes" not in finding.message and finding.address is not None
    many = "\n".join(f"x[{k}] = {k};" for k in range(LIMIT + 20)) + "\nx[900] = t;"
    found = launch(many).findings
    assert len(found) == LIMIT and counted(found) == f"1 error and {LIMIT - 1} warnings"


STORED = {
    "part[0] = s;": WARNING,
    "if (t == 1) part[0] = s;": WARNING,
    "part[0] = y[t + 64];": ERROR,
    "part[t ^ 1] = 3;": ERROR,
    "part[t ^ 1] = __shfl_down_sync(~0u, t, 1);": ERROR,
    "__syncwarp(); part[0] = s;": "",
}
"""A warp stores the sum of its parts, made by shuffles, where other lanes of it have loaded those parts."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sum_by_shuffles_is_stored_behind_all_loads(seed: int | None) -> None:
    """As the last step of a block's sum: what is stored depends on what each lane has loaded; not so in a loop."""
    body = """__shared__ unsigned part[64];
part[t] = y[t];
__syncthreads();
LOOP if (t < 32) {
    unsigned s = part[t];
    for (int i = 16; i; i /= 2) s += __shfl_xor_sync(~0u, s, i);
    STORE
}
__syncthreads();
y[t] = part[0];"""
    for store, severity in STORED.items():
        found = launch(body.replace("STORE", store).replace("LOOP", ""), seed=seed)
        assert {one.severity for one in found.findings} == ({severity} if severity else set()), (store, found.findings)
        assert severity != WARNING or "comes from what all lanes read, by shuffles" in found.findings[0].message
    turns = launch(body.replace("STORE", "part[0] = s;").replace("LOOP", "for (unsigned k = 0; k < n[t % 2] + 2; k++)"), seed=seed)
    assert ERROR in {one.severity for one in turns.findings}


def test_a_partial_barrier_is_a_warning() -> None:
    found = launch("if (t >= 40) return;\n__syncthreads();\ny[t] = 1;").findings
    assert [(f.kind, f.severity) for f in found] == [("partial barrier", WARNING)]


def test_text_and_count() -> None:
    (warning,), (error,) = launch("x[0] = 7;").findings, launch("x[0] = t;").findings
    assert ": warning: race: write at offset 0x0" in str(warning)
    assert "not ordered; both write the same bytes (write after write); likely mend: one thread" in str(warning)
    assert re.search(r"kernel.cu:4: race: write", str(error))
    assert "are not ordered (write after write); likely mend: __sync" in str(error)
    assert counted((error, warning, warning)) == "1 error and 2 warnings" and counted(()) == ""


def test_the_docs_have_each_kind_with_its_severity() -> None:
    table = PTX[PTX.index("| kind | severity |") :].partition("\n\n")[0]
    rows = [[part.strip() for part in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    assert {kind.strip() for row in rows for kind in row[0].split(",")} == set(KINDS)
    assert {row[1] for row in rows} == set(SEVERITIES)


def test_only_known_kinds_are_recorded() -> None:
    module = Module.from_source('extern "C" __global__ void k() {}')
    i = module.code("k").instructions[0]
    with pytest.raises(AssertionError, match="odd"):
        Findings("k").record("odd", "", (i,), (0, 0, 0), (), count=1, address=None, tensor=None)


def test_notes_are_no_findings() -> None:
    """A matrix that is loaded whole, with rows that nobody wrote and nobody uses."""
    body = """__shared__ __align__(16) unsigned short s[64];
    if (t < 28) ((unsigned *)s)[t] = 0;
    __syncthreads();
    unsigned r, a = __cvta_generic_to_shared(s) + 16 * (t % 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(a));
    if (t < 28) y[t] = r;"""
    found = launch(body, block=32)
    assert found.findings == () and [(f.kind, f.severity) for f in found.notes] == [("uninitialised", NOTE)]
    assert ": note: uninitialised: " in str(found.notes[0])
    used = launch("x[0] = t;\n" + body.replace("if (t < 28) y", "y"), block=64)
    assert [(f.kind, f.severity) for f in used.findings] == [("race", ERROR), ("uninitialised", ERROR)] and used.notes == ()
