"""Kernels of others on the machine: modules of which a part is not executed, messages, findings by place."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from test_ptx_harness import HEAD, kernel

from cupyflash.sim.profiling import profile
from cupyflash.sim.ptx import KernelWarning, Module, RawKernel, UnsupportedPTX, simulation

REGISTERS = ".reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<6>;"
STORE = "ld.param.u64 %rd1, [y]; st.global.u32 [%rd1], 7;"


def entry(name: str, body: str) -> str:
    """A kernel of one pointer y, without the head of a module."""
    return kernel(body, (".u64 y",), REGISTERS, name).replace(HEAD, "")


# -- modules of which a part is not executed ------------------------------------------------------------------------------

PARTS = {
    "good": STORE,
    "unknown": "frobnicate.b32 %r1, %r2;\nadd.u32 %r1, %r1, 1;\nadd.rn.u32 %r1, %r1, 1;",
    "far": "call.uni through;",
    "declared": "mov.u64 %rd2, picture; st.global.u64 [%rd2], %rd2;",
    "inside": ".reg .b128 %wide;",
}
MODULE = (
    HEAD
    + ".global .texref picture;\n"
    + ".func deep () {\nfrobnicate.deep.b32 1;\nret;\n}\n.func through () {\ncall.uni deep;\nret;\n}\n"
    + ".func nobody () {\ntcgen05.fence;\nret;\n}\n"
    + "".join(entry(name, body) for name, body in PARTS.items())
)


def test_a_kernel_that_is_not_executed_leaves_the_others() -> None:
    module = Module.from_ptx(MODULE)
    y = np.zeros(1, np.uint32)
    assert module.launch("good", 1, 1, [y]).findings == () and y[0] == 7
    assert {name: [text.split()[0] for _, text, _ in items] for name, items in module.refused.items()} == {
        "unknown": ["frobnicate.b32", "add.rn.u32"],
        "far": ["frobnicate.deep.b32"],
        "declared": [".global"],
        "inside": [".reg"],
    }
    for name, items in module.refused.items():
        with pytest.raises(UnsupportedPTX, match=f"^{name}: ") as caught:
            module.launch(name, 1, 1, [y])
        assert tuple(caught.value.items) == items
        assert all(MODULE.splitlines()[line - 1].find(text.split()[0]) >= 0 for line, text, _ in items)


def test_a_module_without_a_kernel_left_is_refused_at_once() -> None:
    for text in (MODULE.replace("st.global.u32", "frobnicate.u32"), ".address_size 32\n" + HEAD + entry("good", STORE)):
        with pytest.raises(UnsupportedPTX):
            Module.from_ptx(text)


def test_a_profile_names_the_kernels_that_are_not_executed() -> None:
    found = profile(Module.from_ptx(MODULE), "good", grid=1, block=1, args={"y": np.zeros(1, np.uint32)})
    text = " ".join(found.text().split())
    assert "Not executed: unknown: line" in text and "opcode frobnicate is not executed (and 1 more)." in text
    assert [item["reason"] for item in found.to_dict()["refused"]["far"]] == ["opcode frobnicate is not executed"]


MESSAGES = {
    "mov.u32 %r1, %pm3;": "special register %pm3 is not executed",
    "mov.u32 %r1, %q7;": "register %q7 is not declared",
    "frobnicate.b32 %r1, {{;": "opcode frobnicate is not executed",
    "@%p1 tcgen05.ld.b32 %r1, [%rd1, {%r1, %r2}];": "opcode tcgen05 is not executed",
    "ld.global.u32 %r1, [%rd1, {%r2, %r3}];": "coordinates of a tensor",
}


@pytest.mark.parametrize("line", MESSAGES)
def test_what_is_said_of_a_statement_that_is_not_executed(line: str) -> None:
    (item,) = Module.from_ptx(HEAD + entry("good", STORE) + entry("bad", line)).refused["bad"]
    assert item[1:] == (line.rstrip(";"), MESSAGES[line])


def test_an_atomic_on_what_nobody_wrote_says_so() -> None:
    body = ".shared .align 4 .b8 s[128]; atom.shared.add.u32 %r1, [s], 1;"
    (finding,) = Module.from_ptx(HEAD + entry("k", body)).launch("k", 1, 1, [None]).findings
    assert finding.message == "atomic access of 4 bytes at 0x0 (s) of shared memory that nobody wrote"


# -- one finding a fault ---------------------------------------------------------------------------------------------------


def line_of(line: tuple[str, int] | None) -> tuple[str, int] | None:
    """A line of source with its file's name only."""
    return line and (Path(line[0]).name, line[1])


INLINED = """__device__ __forceinline__ float look(const float* p, int i) { return p[i]; }
extern "C" __global__ void k(const float* x, float* y, int n) {
    float s = 0;
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        s += look(x, threadIdx.x + 32 * j + n);
    s += look(x, threadIdx.x + n + 999);
    y[threadIdx.x] = s;
}
extern "C" __global__ void crossed(float* y) {
    __shared__ float s[32 * 8];
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        s[32 * j + threadIdx.x] = j;
    float sum = 0;
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        sum += look(s, 32 * j + (threadIdx.x + 1) % 32);
    y[threadIdx.x] = sum;
}
"""


@pytest.fixture(scope="module")
def inlined() -> Module:
    return Module.from_source(INLINED, name="own.cu")


@pytest.mark.parametrize("seed", [None, 0])
def test_copies_of_a_fault_are_one_finding_at_the_kernels_own_line(inlined: Module, seed: int | None) -> None:
    x, y = np.zeros(4, np.float32), np.zeros(32, np.float32)
    launch = inlined.launch("k", 1, 32, [x, y, 4], seed=seed)
    loop, last = launch.findings
    places = [(line_of(f.source), line_of(f.inlined_at[-1])) for f in (loop, last)]
    assert places == [(("own.cu", 1), ("own.cu", 6)), (("own.cu", 1), ("own.cu", 7))]
    assert (loop.instructions, loop.lanes, last.instructions, last.lanes) == (8, 256, 1, 32) and launch.findings_total == 288
    assert re.match(r".*own.cu:1 \(inlined at .*own.cu:6\): out of bounds: ", str(loop)) and "; 8 PTX instructions]" in str(loop)
    text = " ".join(profile(inlined, "k", grid=1, block=32, args=[x, y, 4]).text().split())
    assert "own.cu:1 (inlined at own.cu:6): out of bounds" in text and "own.cu:1 (inlined at own.cu:7): out of bounds" in text


def test_copies_of_a_race_are_one_finding(inlined: Module) -> None:
    launch = inlined.launch("crossed", 1, 32, [np.zeros(32, np.float32)])
    (race,) = launch.findings
    assert race.kind == "race" and {line_of(race.source), *map(line_of, race.inlined_at)} == {("own.cu", 1), ("own.cu", 18)}
    assert race.instructions == 8 and race.lanes == launch.findings_total == 256
    assert "own.cu:14" in str(race) and "own.cu:18): race: " in str(race)


def test_instructions_without_lines_are_told_apart() -> None:
    body = STORE.replace("st.global.u32 [%rd1], 7;", "st.global.u32 [%rd1+4], 7; st.global.u32 [%rd1+8], 7;")
    launch = Module.from_ptx(HEAD + entry("k", body)).launch("k", 1, 1, [np.zeros(1, np.uint32)])
    assert [f.instructions for f in launch.findings] == [1, 1]


# -- what only who asks is told -------------------------------------------------------------------------------------------

VARIABLE = HEAD + ".global .align 4 .u32 counter;\n" + entry("k", STORE + "atom.global.add.u32 %r1, [counter], 1;")


def test_traffic_is_of_what_the_caller_named() -> None:
    launch = Module.from_ptx(VARIABLE).launch("k", 1, 32, {"y": np.zeros(1, np.uint32)})
    assert list(launch.traffic) == ["y"] and launch.traffic["y"].write_bytes == 128
    assert launch.counters.traffic["counter"].write_bytes == launch.counters.traffic["counter"].read_bytes == 128
    found = profile(Module.from_ptx(VARIABLE), grid=1, block=32, args={"y": np.zeros(1, np.uint32)})
    table = found.text().split("Global memory (")[1].split("Instruction mix")[0]
    assert "counter" not in table and "variables of the module  read" in table and "variables of the module  write" in table


# -- rows of a matrix that nobody wrote -----------------------------------------------------------------------------------

SCORES = """#include <cuda_fp16.h>
extern "C" __global__ void scores(const __half* q, const __half* k, float* s, int n, int masked) {  // (16, 16), (8, 16), (16, 8)
    __shared__ __align__(16) __half Q[16][16], K[8][16];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) Q[i / 16][i % 16] = q[i];
    for (int i = lane; i < 16 * n; i += 32) K[i / 16][i % 16] = k[i];
    __syncwarp();
    unsigned a[4], b[2];
    float c[4] = {0, 0, 0, 0};
    unsigned from = (unsigned)__cvta_generic_to_shared(&Q[lane % 16][lane / 16 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(from));
    from = (unsigned)__cvta_generic_to_shared(&K[lane % 8][lane / 8 % 2 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(b[0]), "=r"(b[1]) : "r"(from));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    for (int e = 0; e < 4; ++e) {
        int column = 2 * (lane % 4) + e % 2;
        s[(lane / 4 + e / 2 * 8) * 8 + column] = masked && column >= n ? 0 : c[e];
    }
}
"""


@pytest.fixture(scope="module")
def scores() -> Module:
    return Module.from_source(SCORES, name="scores.cu")


@pytest.mark.parametrize("seed", [None, 0])
def test_matrices_with_rows_that_nobody_wrote(scores: Module, seed: int | None) -> None:
    """Masked away they are one note; what comes into the result is a finding."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((rows, 16)).astype(np.float16) for rows in (16, 8))
    for n, masked in ((8, 0), (5, 1), (5, 0)):
        s = np.zeros((16, 8), np.float32)
        launch = scores.launch("scores", 1, 32, [q, k, s, n, masked], seed=seed)
        kinds = [[f.kind for f in found] for found in (launch.findings, launch.notes)]
        assert kinds == {(8, 0): [[], []], (5, 1): [[], ["uninitialised"]], (5, 0): [["uninitialised"], []]}[n, masked]
        assert np.allclose(s[:, :n], (q.astype(np.float32) @ k.astype(np.float32).T)[:, :n], atol=1e-3)
        for finding in (*launch.findings, *launch.notes):
            assert line_of(finding.source) == ("scores.cu", 14) and finding.lanes == 6
        assert launch.findings_total == (6 if n == 5 and not masked else 0)


def test_a_raw_kernel_warns_of_them() -> None:
    q, k, s = np.ones((16, 16), np.float16), np.ones((8, 16), np.float16), np.zeros((16, 8), np.float32)
    kernel = RawKernel(SCORES, "scores")
    with pytest.warns(KernelWarning, match=r"\(kernel scores has 1 note\):\n .*uninitialised") as warned:
        kernel((1,), (32,), (q, k, s, 5, 1))
    assert warned[0].filename == __file__
    with simulation(findings="keep") as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel((1,), (32,), (q, k, s, 5, 1))
    assert len(launches[0].notes) == 1


def test_a_note_is_told_and_is_no_fault(scores: Module) -> None:
    q, k, s = (np.zeros(shape, kind) for shape, kind in (((16, 16), np.float16), ((8, 16), np.float16), ((16, 8), np.float32)))
    found = profile(scores, grid=1, block=32, args=[q, k, s, 5, 1])
    assert "scores.cu:14: note: uninitialised: read of 16 bytes" in " ".join(found.text().split())
    assert [one["kind"] for one in found.to_dict()["notes"]] == ["uninitialised"] and found.to_dict()["findings"] == []
