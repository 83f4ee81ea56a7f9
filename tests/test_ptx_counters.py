"""The machine's counts, by line of source and in all, against numbers worked out by hand.

A warp has 32 lanes; a sector 32 bytes; shared memory 32 banks of 4 bytes, so that a wavefront moves at most 128 bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from test_ptx_harness import HEAD, compile_cuda, run

from cupyflash.sim.ptx import Counts, Launch, Traffic, coverage
from cupyflash.sim.ptx.state.counters import SharedCounts, instruction_class
from cupyflash.sim.ptx.text.syntax import PtxInstruction
from suites import sweep

SEEDS = [None, 0, 1]


def launch(source: str, args: dict[str, Any], grid: Any = 1, block: Any = 32, seed: int | None = None) -> Launch:
    module = compile_cuda(source)
    return module.launch(module.kernels[0], grid, block, args, seed=seed)


def at(found: Launch, source: str, mark: str) -> Counts:
    """The counts of the line of the source that has `mark` in it."""
    (number,) = (n for n, text in enumerate(source.splitlines(), 1) if mark in text)
    (counts,) = (c for (_, line), c in found.counters.lines.items() if line == number)
    return counts


# -- global memory ------------------------------------------------------------------------------------------------------

READ = """extern "C" __global__ void k(const float* x, float* y) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    float a = x[%s];  // load
    y[t] = a;  // store
}"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("index", "offset", "sectors", "unique"),
    [
        ("t", 0, 4, 128),  # 32 lanes x 4 bytes side by side: 128 / 32
        ("t", 1, 5, 128),  # the same from byte 4 on: bytes 4 to 131 lie in sectors 0 to 4
        ("2 * t", 0, 8, 128),  # every other word: 256 bytes are touched
        ("8 * t", 0, 32, 128),  # a sector a lane
        ("0", 0, 1, 4),  # broadcast
        ("t / 8", 0, 1, 16),  # groups of 8 lanes read one word: 4 words, half a sector
    ],
)
def test_patterns_of_global_loads(index: str, offset: int, sectors: int, unique: int, seed: int | None) -> None:
    source = READ % index.replace("t", "(t & 31)") if index != "0" else READ % "0"
    x, y = np.zeros(1024, np.float32)[offset:], np.zeros(3 * 64, np.float32)
    found = launch(source, {"x": x, "y": y}, 3, 64, seed)
    warps = 3 * 2
    line = at(found, source, "// load")
    assert line.traffic["x"] == Traffic(
        read_bytes=warps * 128, read_requests=warps, read_sectors=warps * sectors, unique_read_bytes=warps * unique
    )
    assert line.shared == {} and line.by_class["load global"] == warps
    stored = at(found, source, "// store").traffic
    assert stored == {
        "y": Traffic(write_bytes=warps * 128, write_requests=warps, write_sectors=warps * 4, unique_write_bytes=warps * 128)
    }


def test_two_tensors_of_one_line_stay_apart() -> None:
    source = """extern "C" __global__ void k(const float* a, const double* b, double* y) {
        int t = threadIdx.x;
        y[t] = a[t] + b[t];  // all
    }"""
    a, b = np.ones(32, np.float32), np.ones(32)
    line = at(launch(source, {"a": a, "b": b, "y": np.zeros(32)}), source, "// all")
    # 32 x 4 bytes are 4 sectors, 32 x 8 are 8.
    assert {name: (t.requested_bytes, t.sectors, t.requests) for name, t in line.traffic.items()} == {
        "a": (128, 4, 1),
        "b": (256, 8, 1),
        "y": (256, 8, 1),
    }
    assert line.global_memory == Traffic(384, 256, 2, 1, 12, 8, 384, 256)
    assert line.by_class["fp64"] == 1 and line.by_class["conversion"] == 1


def test_vectors_of_16_bytes_and_half_a_warp() -> None:
    source = """extern "C" __global__ void k(const float4* x, float4* y) {
        if (threadIdx.x < 16)
            y[threadIdx.x] = x[threadIdx.x];  // copy
    }"""
    x, y = np.zeros(128, np.float32), np.zeros(128, np.float32)
    found = launch(source, {"x": x, "y": y})
    line = at(found, source, "// copy")
    # 16 lanes x 16 bytes = 256 bytes = 8 sectors, each way; the lanes beyond are not counted.
    assert line.global_memory == Traffic(256, 256, 1, 1, 8, 8, 256, 256)


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_read_and_write(seed: int | None) -> None:
    source = """extern "C" __global__ void k(unsigned* hits) {
        __shared__ unsigned s[4];
        if (threadIdx.x < 4) s[threadIdx.x] = 0;
        __syncthreads();
        atomicAdd(&s[threadIdx.x % 4], 1u);  // shared
        atomicAdd(&hits[threadIdx.x % 2], 1u);  // global
    }"""
    hits = np.zeros(2, np.uint32)
    found = launch(source, {"hits": hits}, 2, 64, seed)
    warps = 2 * 2
    # 32 lanes x 4 bytes a warp, on two words: 8 bytes that differ, one sector; each is read and written.
    assert at(found, source, "// global").traffic["hits"] == Traffic(
        *(warps * 128, warps * 128, warps, warps, warps, warps, warps * 8, warps * 8)
    )
    assert at(found, source, "// shared").shared == {("atom", 4): SharedCounts(warps, warps * 128, warps, warps)}
    assert hits.tolist() == [64, 64] and at(found, source, "// global").by_class["atomic"] == warps


# -- shared memory ------------------------------------------------------------------------------------------------------

TILE = """extern "C" __global__ void k(float* y) {
    __shared__ %s s[%d];
    int t = threadIdx.x;
    for (int i = t; i < %d; i += 32) ((volatile %s*)s)[i] = %s;  // fill
    __syncthreads();
    y[t] = ((volatile %s*)s)[%s];  // read
}"""


@pytest.mark.parametrize(
    ("index", "wavefronts"),
    [
        ("t", 1),
        ("0", 1),  # a broadcast: one word for all
        ("2 * t", 2),  # 16 banks, each wanted by two lanes
        ("32 * t", 32),  # a column of a tile of 32 x 32: all in one bank
        ("33 * t", 1),  # the same, rows padded by a word
        ("32 * t + (t ^ 5)", 1),  # the same, swizzled
        ("32 * (t / 2)", 16),  # 16 words in one bank, each read by two lanes
    ],
)
def test_bank_conflicts_of_words(index: str, wavefronts: int) -> None:
    size = 33 * 32
    source = TILE % ("float", size, size, "float", "0.f", "float", index)
    found = launch(source, {"y": np.zeros(32, np.float32)})
    line = at(found, source, "// read")
    assert line.shared == {("ld", 4): SharedCounts(1, 128, wavefronts, 1)}
    assert line.shared_memory.conflicts == wavefronts - 1 and line.by_class["load shared"] == 1
    # The loop of one warp fills it in 33 passes of 32 words.
    filled = at(found, source, "// fill")
    assert filled.shared == {("st", 4): SharedCounts(33, 33 * 128, 33, 33)} and filled.shared_memory.conflicts == 0
    assert found.counters.shared_memory == SharedCounts(34, 34 * 128, 33 + wavefronts, 34)
    assert found.counters.barriers == 1


def test_wide_shared_accesses_take_turns() -> None:
    source = """extern "C" __global__ void k(float4* y) {
        __shared__ float4 a[32];
        __shared__ double b[32];
        int t = threadIdx.x;
        a[t] = make_float4(t, t, t, t);  // 16 bytes
        b[t] = t;  // 8 bytes
        __syncthreads();
        y[t] = a[31 - t];  // vector
        y[t].x = b[31 - t];  // double
    }"""
    found = launch(source, {"y": np.zeros(128, np.float32)})
    # 32 x 16 bytes are four wavefronts of 128 at best, 32 x 8 are two.
    assert at(found, source, "// 16").shared == {("st", 16): SharedCounts(1, 512, 4, 4)}
    assert at(found, source, "// 8").shared == {("st", 8): SharedCounts(1, 256, 2, 2)}
    assert at(found, source, "// vector").shared == {("ld", 16): SharedCounts(1, 512, 4, 4)}
    assert at(found, source, "// double").shared == {("ld", 8): SharedCounts(1, 256, 2, 2)}


MATRICES = """#define LOAD "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
extern "C" __global__ void k(const uint4* x, unsigned* y, int pitch, int swizzle) {
    __shared__ __align__(128) char s[32 * 144];
    int t = threadIdx.x;
    unsigned base = (unsigned)__cvta_generic_to_shared(s);
    for (int i = t; i < 32 * 8; i += 32) {
        unsigned to = base + i / 8 * pitch + (i % 8 ^ (swizzle ? i / 8 % 8 : 0)) * 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(x + i) : "memory");  // copy
    }
    asm volatile("cp.async.wait_all;" ::: "memory");  // wait
    __syncwarp();
    unsigned at = base + t * pitch + (swizzle ? t % 8 : 0) * 16, a, b, c, d;
    asm volatile(LOAD : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");  // matrices
    y[t] = a ^ b ^ c ^ d;
}"""


@pytest.mark.parametrize(("pitch", "swizzle", "reading", "writing"), [(128, 0, 32, 4), (144, 0, 4, 4), (128, 1, 4, 4)])
def test_asynchronous_copies_and_ldmatrix(pitch: int, swizzle: int, reading: int, writing: int) -> None:
    """32 rows of 128 bytes. ldmatrix.x4 reads a column of 16-byte pieces in four phases of 8 rows: rows 128 bytes apart put
    the 8 pieces of a phase in the same four banks (8 wavefronts a phase), padded or swizzled they fill all 32 (one).
    A warp's copy writes 4 rows of 8 pieces: 512 bytes, 4 wavefronts."""
    x = np.arange(32 * 128 // 4, dtype=np.uint32)
    found = launch(MATRICES, {"x": x, "y": np.zeros(32, np.uint32), "pitch": pitch, "swizzle": swizzle})
    assert found.findings == ()
    copied = at(found, MATRICES, "// copy")
    assert copied.shared == {("cp.async", 16): SharedCounts(8, 4096, 8 * writing, 8 * 4)}
    assert copied.traffic == {"x": Traffic(read_bytes=4096, read_requests=8, read_sectors=128, unique_read_bytes=4096)}
    assert copied.by_class["async copy"] == 8 and at(found, MATRICES, "// wait").by_class == {"async copy": 1}
    assert at(found, MATRICES, "// matrices").shared == {("ldmatrix", 16): SharedCounts(1, 512, reading, 4)}
    assert found.counters.shared_kind("ldmatrix").conflicts == reading - 4


# -- instructions and lanes ---------------------------------------------------------------------------------------------


def with_lines(body: str) -> str:
    """A kernel of a pointer x with a .loc for each line of the body: the line number in `body`, from 1."""
    lines = [f".loc 1 {n} 1\n{text}" for n, text in enumerate(body.strip().splitlines(), 1)]
    registers = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;"
    return f'{HEAD}.visible .entry k(.param .u64 x)\n{{ {registers}\n{chr(10).join(lines)}\nret;\n}}\n.file 1 "k.cu"\n'


BRANCH = with_lines("""mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 8;
@%p1 bra FEW;
add.u32 %r2, %r1, 1; add.u32 %r2, %r2, 1; bra DONE;
FEW: add.u32 %r2, %r1, 3;
DONE: setp.lt.u32 %p2, %r1, 16; @%p2 add.u32 %r2, %r2, 1;
@!%p2 add.u32 %r2, %r2, 1;""")


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_of_a_divergent_branch(seed: int | None) -> None:
    """Two warps of 32 and one of 16 lanes. In the first 8 of 32 lanes go one way; the others wholly go the other."""
    found = run(BRANCH, {"x": None}, block=80, seed=seed)
    lines = {line: counts for (_, line), counts in found.counters.lines.items()}
    assert (lines[1].instructions, lines[1].thread_instructions) == (2 * 3, 2 * 80)
    branch = lines[2]
    assert (branch.instructions, branch.thread_instructions, branch.divergent_branches) == (3, 80, 1)
    assert branch.predicated_off == 72 and branch.by_class == {"control": 3}
    # The other way: 24 lanes of the first warp and the two other warps, three instructions each.
    assert (lines[3].instructions, lines[3].thread_instructions) == (3 * 3, 3 * (24 + 32 + 16))
    assert (lines[4].instructions, lines[4].thread_instructions, lines[4].active_lanes) == (1, 8, 8.0)
    # Half of the first warp is below 16, of the others nobody: each side's predicate switches the others off.
    assert lines[5].thread_instructions == 2 * 80 and lines[5].predicated_off == 64
    assert lines[6].predicated_off == 16 and found.counters.divergent_branches == 1
    assert found.counters.predicated_off == 72 + 64 + 16
    # Line 6 has the final ret as well.
    assert lines[6].thread_instructions == 80 * 2 and lines[6].by_class["control"] == lines[6].by_opcode["ret"]


LOOP = with_lines("""mov.u32 %r1, %tid.x; mov.u32 %r2, 0;
AGAIN: add.u32 %r2, %r2, 1;
setp.le.u32 %p1, %r2, %r1; @%p1 bra AGAIN;""")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_with_a_count_of_each_lane(seed: int | None) -> None:
    """Lane t goes round t + 1 times: 32 rounds of the warp, 1 + 2 + ... + 32 of lanes; at 31 branches a lane leaves."""
    found = run(LOOP, {"x": None}, seed=seed)
    lines = {line: counts for (_, line), counts in found.counters.lines.items()}
    assert lines[1].instructions == 2 and lines[2].by_class == {"integer": 32}
    assert lines[2].thread_instructions == 32 * 33 // 2 and lines[2].active_lanes == 16.5
    assert found.counters.divergent_branches == lines[3].divergent_branches == 31
    # The branch is not taken once by each lane.
    assert found.counters.predicated_off == 32


def test_half_a_warp_predicated_off() -> None:
    text = with_lines("""mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 16; ld.param.u64 %rd1, [x]; mul.wide.u32 %rd2, %r1, 4;
add.u64 %rd1, %rd1, %rd2;
@%p1 ld.global.u32 %r2, [%rd1];""")
    found = run(text, {"x": np.zeros(32, np.uint32)})
    line = found.counters.lines["k.cu", 3]
    assert line.traffic == {"x": Traffic(read_bytes=64, read_requests=1, read_sectors=2, unique_read_bytes=64)}
    assert (line.by_opcode["ld"], line.predicated_off, line.divergent_branches) == (1, 16, 0)
    first = found.counters.lines["k.cu", 1]
    assert first.by_class == {"compare, select": 1, "integer": 1, "load param": 1, "move": 1}


def test_code_without_line_information_is_counted_by_line_of_ptx() -> None:
    text = f"{HEAD}.visible .entry k()\n{{ .reg .b32 %r<3>;\nmov.u32 %r1, 1;\nadd.u32 %r2, %r1, %r1;\nret;\n}}\n"
    found = run(text, {}).counters
    number = text.splitlines().index("add.u32 %r2, %r1, %r1;") + 1
    assert found.lines["PTX", number].by_opcode == {"add": 1} and len(found.lines) == 3


def test_inlined_code_belongs_to_its_own_line_and_knows_its_callers() -> None:
    """NVRTC's form: `inlined_at` names the call, and an earlier .loc of that place says where that was inlined."""
    text = f"""{HEAD}.visible .entry k() {{ .reg .f32 %f<5>;
    .loc 1 10 2
    mov.f32 %f1, 0f00000000;
    .loc 1 5 9, function_name $poly, inlined_at 1 10 2
    .loc 2 2 9, function_name $square, inlined_at 1 5 9
    mul.f32 %f2, %f1, %f1;
    .loc 2 2 9, function_name $square, inlined_at 1 11 3
    mul.f32 %f3, %f1, %f2;
    .loc 1 12 1
    ret; }}
    .file 1 "k.cu"
    .file 2 "square.cuh"
    """
    lines = run(text, {}).counters.lines
    assert lines["square.cuh", 2].by_class == {"fp32": 2}
    assert lines["square.cuh", 2].inlined_at == {("k.cu", 10), ("k.cu", 11)}
    assert set(lines) == {("k.cu", 10), ("square.cuh", 2), ("k.cu", 12)} and not lines["k.cu", 12].inlined_at


def test_flops_and_class_of_tensor_cores() -> None:
    source = """extern "C" __global__ void k(float* y) {
        float d[4] = {0, 0, 0, 0};
        unsigned a = 0, b = 0;
        for (int i = 0; i < 3; ++i)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));  // mma
        y[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
    }"""
    found = launch(source, {"y": np.zeros(64, np.float32)}, block=64).counters
    assert found.mma_flops == 2 * 3 * (2 * 16 * 8 * 16) and found.by_class["tensor core"] == 6
    assert [counts.mma_flops for counts in found.lines.values() if counts.mma_flops] == [found.mma_flops]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("add.f32", "fp32"),
        ("fma.rn.ftz.f32", "fp32"),
        ("fma.rn.f16x2", "fp16, bf16"),
        ("add.rn.bf16", "fp16, bf16"),
        ("mul.f64", "fp64"),
        ("rcp.rn.f64", "fp64"),
        ("div.rn.f64", "fp64"),
        ("div.full.f32", "special function"),
        ("ex2.approx.ftz.f32", "special function"),
        ("div.u32", "integer"),
        ("and.pred", "integer"),
        ("lop3.b32", "integer"),
        ("cvt.rn.f16.f32", "conversion"),
        ("setp.lt.f64", "compare, select"),
        ("ld.global.nc.v4.f32", "load global"),
        ("ld.volatile.shared.u32", "load shared"),
        ("ld.shared::cta.u32", "load shared"),
        ("ld.u32", "load generic"),
        ("st.local.v2.u32", "store local"),
        ("red.global.add.f32", "atomic"),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", "store shared"),
        ("cp.async.commit_group", "async copy"),
        ("cp.async.bulk.global.shared::cta.bulk_group", "async copy"),
        ("wmma.load.a.sync.aligned.row.m16n16k16.shared.f16", "load shared"),
        ("wmma.store.d.sync.aligned.row.m16n16k16.f32", "store generic"),
        ("wmma.mma.sync.aligned.row.row.m16n16k16.f32.f32", "tensor core"),
        ("add.f32x2", "fp32"),
        ("mbarrier.arrive.shared.b64", "barrier, fence"),
        ("bar.sync", "barrier, fence"),
        ("shfl.sync.bfly.b32", "warp exchange"),
    ],
)
def test_classes(text: str, kind: str) -> None:
    opcode, *mods = text.split(".")
    assert instruction_class(PtxInstruction(opcode, tuple(mods), (), None, 1, None, text)) == kind


def test_every_opcode_without_a_type_has_a_class() -> None:
    untyped = {row.opcode for row in coverage()}
    other = {o for o in untyped if instruction_class(PtxInstruction(o, ("b32",), (), None, 1, None, "")) == "other"}
    assert other <= {"prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "pmevent"} | {"setmaxnreg", "griddepcontrol"}


# -- sums ---------------------------------------------------------------------------------------------------------------

MIXED = """__device__ int twist(int v) {
    return v % 3 ? v * 5 : v + 7;
}
extern "C" __global__ void k(const int* x, int* y, int n) {
    __shared__ int s[256];
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    s[t] = i < n ? x[i] : 0;
    __syncthreads();
    int sum = 0;
    for (int j = 0; j < (s[t] & 7); ++j) sum += s[(t * j) % blockDim.x];
    if (sum & 1) sum = twist(sum);
    else if (i % 5 == 0) atomicAdd(y + i % 7, 1);
    if (i < n) atomicAdd(y + i, sum);
}"""


def sums(found: Launch) -> Counts:
    out = Counts()
    for counts in found.counters.lines.values():
        out.add(counts)
        for table, whole in ((counts.by_opcode, counts.instructions), (counts.by_class, counts.instructions)):
            assert sum(table.values()) == whole
        assert counts.predicated_off <= counts.thread_instructions <= 32 * counts.instructions
    return out


@sweep(
    10,
    100,
    n=st.integers(1, 400),
    block=st.integers(1, 256),
    grid=st.integers(1, 4),
    data=st.integers(0, 9),
    seed=st.sampled_from([0, 1, 2]),
)
def test_lines_sum_to_the_kernel_whatever_the_schedule(n: int, block: int, grid: int, data: int, seed: int) -> None:
    x = np.random.default_rng(data).integers(0, 1000, n).astype(np.int32)
    found = [launch(MIXED, {"x": x, "y": np.zeros(max(7, n), np.int32), "n": n}, grid, block, order) for order in (None, seed)]
    for one in found:
        total = sums(one)
        for field in dataclasses.fields(Counts):
            if field.name == "traffic":
                touched = {name: moved for name, moved in one.counters.traffic.items() if moved != Traffic()}
                assert touched == total.traffic and one.traffic == one.counters.traffic
            else:
                assert getattr(one.counters, field.name) == getattr(total, field.name), field.name
    # What lanes do does not depend on the order; how many of them do it together may, where they diverge.
    lock_step, random = (one.counters for one in found)
    assert lock_step.thread_instructions == random.thread_instructions
    assert lock_step.predicated_off == random.predicated_off
    for line, counts in lock_step.lines.items():
        assert counts.thread_instructions == random.lines[line].thread_instructions
        assert counts.shared_memory.bytes == random.lines[line].shared_memory.bytes
        for tensor, moved in counts.traffic.items():
            assert moved.requested_bytes == random.lines[line].traffic[tensor].requested_bytes


@pytest.mark.parametrize("pitch", [128, 144])
def test_without_divergence_no_count_depends_on_the_schedule(pitch: int) -> None:
    def counters(seed: int | None) -> dict[str, Any]:
        x, y = np.arange(1024, dtype=np.uint32), np.zeros(32, np.uint32)
        found = launch(MATRICES, {"x": x, "y": y, "pitch": pitch, "swizzle": 0}, seed=seed)
        return dataclasses.asdict(found.counters)

    assert counters(None) == counters(0) == counters(1)


def test_a_launch_starts_from_zero() -> None:
    module = compile_cuda(READ % "t")
    args = {"x": np.zeros(32, np.float32), "y": np.zeros(32, np.float32)}
    first = module.launch("k", 1, 32, args)

    def fail(block: int, count: int) -> None:
        raise RuntimeError

    barrier = compile_cuda('extern "C" __global__ void k() { __syncthreads(); }')
    again = [module.launch("k", 1, 32, args).counters for _ in range(2)]
    assert again == [first.counters] * 2
    before = barrier.launch("k", 1, 32, {}).counters
    with pytest.raises(RuntimeError):
        barrier.launch("k", 1, 32, {}, on_barrier=fail)
    assert barrier.launch("k", 1, 32, {}).counters == before
