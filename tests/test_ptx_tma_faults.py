"""Faults in tensor copies are found, at their place and under every seed; pipelines without fault have no finding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_ptx_tma import BYTES, HEAD, INIT, OUT, REGISTERS, SEEDS, START, WAIT, load, program

from cupyflash.sim.ptx import Launch, Module, RawKernel, TensorMap

# -- faults ---------------------------------------------------------------------------------------------------------------

COPY = f"cp.async.bulk.tensor.2d.shared::cta.global.{BYTES}"
ONE_DIMENSION = COPY.replace("2d", "1d")
MAP_STORE = "st.global.v2.u64 [%rd8], {%rd9, %rd10};"

PIPE = f"""{START}
ld.param.u64 %rd2, [g]; mov.u64 %rd3, o;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 prefetch.tensormap [%rd1];
mul.wide.u32 %rd6, %r0, 16; add.u64 %rd7, %rd1, %rd6; add.u64 %rd8, %rd2, %rd6; setp.lt.u32 %p2, %r0, 8;
@%p2 ld.param.v2.u64 {{%rd9, %rd10}}, [%rd7];
@%p2 {MAP_STORE}
fence.proxy.tensormap::generic.release.gpu;
bar.sync 0;
fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p1 {COPY} [%r1], [%rd1, {{0, -2}}], [%r2];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p1 {COPY} [%r1], [%rd2, {{0, -2}}], [%r2];
V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1; @!%p2 bra V;
shl.b32 %r11, %r0, 2; add.u32 %r12, %r1, %r11; ld.shared.u32 %r13, [%r12]; add.u32 %r13, %r13, 1;
st.shared.u32 [%r12], %r13;
fence.proxy.async.shared::cta;
bar.sync 0;
@!%p1 bra J;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {{0, 0}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
J: bar.sync 0;
st.shared.u32 [%r12], 7;
@!%p1 bra DONE;
cp.async.bulk.wait_group 0;
ld.param.u64 %rd5, [q];
ld.global.u32 %r14, [%rd5];
DONE:
"""
PIPE_PARAMS = ".param .align 64 .b8 m[128], .param .align 64 .b8 o[128], .param .u64 g, .param .u64 q"


def pipe(text: str, *, seed: int | None, **given: Any) -> tuple[Launch, str]:
    """The pipeline with a box of 16 rows of 32 floats: loaded twice, by a map of a parameter and by its copy, changed, stored."""
    whole = f"{HEAD}.visible .entry k({PIPE_PARAMS})\n{{\n{REGISTERS}\n{text}\nret;\n}}\n"
    x, y = np.ones((40, 32), np.float32), np.zeros((16, 32), np.float32)
    maps = {"x": TensorMap(x, (32, 16), swizzle=128), "y": TensorMap(y, (32, 16), swizzle=128)}
    args = {**maps, "g": np.zeros(128, np.uint8), "q": y, **given}
    launch = Module.from_ptx(whole).launch("k", 1, 64, args, seed=seed, max_instructions=100_000)
    return launch, whole


FIRST = f"[%r2], 2048;\n@%p1 {COPY} [%r1], [%rd1"
"""Of the first load: the bytes that its mbarrier expects, and where it goes."""

TOO_MANY = f"""[%r2], 2048; @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 1048575;
@%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r2], 1048575;\n@%p1 {COPY} [%r1], [%rd1"""

FAULTS = [
    # what replaces what, the finding's kind, its line, its message
    ("bytes [%r1], [%rd1", "bytes [%r1+64], [%rd1", "misaligned", "bytes [%r1+64]", "no multiple of 128"),
    ("bytes [%r1], [%rd1", "bytes [%r1+7168], [%rd1", "out of bounds", "[%r1+7168]", "it has 8,200 bytes"),
    ("-2}], [%r2];\nW", "-2}], [%r2+4];\nW", "misaligned", "[%r2+4]", "mbarrier at 0x2004"),
    (FIRST, FIRST.replace("2048", "2064"), "deadlock", "W: mb", "mbarrier at 0x2000 (bar) that lacks 0 arrivals and 16 bytes"),
    (FIRST, FIRST.replace("2048", "2032"), "deadlock", "W: mb", "(bar) that lacks 0 arrivals and has 16 bytes too many"),
    (FIRST, TOO_MANY, "bad arrival", "1048575;", "would count 1,050,623 bytes"),
    ("@%p1 fence.mbarrier_init.release.cluster;", "", "proxy", "bytes [%r1], [%rd1", "no fence.mbarrier_init"),
    ("[%r2], 1;\n@%p1 fence", "[%r2], 0;\n@%p1 fence", "bad arrival", "mbarrier.init", "0 arrivals"),
    ("fence.proxy.tensormap::generic.release.gpu;", "", "proxy", "[%rd2, {0", "release, after the store"),
    ("fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;", "", "proxy", "[%rd2, {0", "acquire, before the use"),
    ("128;\n@%p1 mb", f"128; @%p2 {MAP_STORE}\n@%p1 mb", "proxy", "[%rd2, {0", "release, after the store"),
    ("setp.lt.u32 %p2, %r0, 8;", "setp.lt.u32 %p2, %r0, 5;", "bad tensor map", "[%rd2, {0", "offset 0x0 of 'g' are no tensor map"),
    (f"{COPY} [%r1], [%rd1, {{0, -2}}]", f"{ONE_DIMENSION} [%r1], [%rd1, {{-2}}]", "bad tensor map", "1d.shared", "2 dimensions"),
    ("[%rd1, {0, -2}]", "[%rd4, {0, -2}]", "bad tensor map", "[%rd4", "in shared memory"),
    ("prefetch.tensormap [%rd1]", "prefetch.tensormap [0]", "null pointer", "prefetch", "address is null"),
    ("V: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 1; @!%p2 bra V;", "V:", "in flight", "ld.shared", "not been waited"),
    ("fence.proxy.async.shared::cta;", "", "proxy", "[%rd3, {0, 0}]", "no fence.proxy.async behind it"),
    ("cp.async.bulk.wait_group.read 0;", "", "race", "st.shared.u32 [%r12], 7", "not ordered"),
    ("cp.async.bulk.wait_group 0;", "", "race", "ld.global.u32 %r14", "not ordered"),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_are_found_where_they_are(seed: int | None) -> None:
    shared = "mov.u64 %rd4, t; cvta.shared.u64 %rd4, %rd4;\n"
    launch, _ = pipe(shared + PIPE, seed=seed)
    assert launch.findings == ()
    beyond, _ = pipe(shared + PIPE.replace("[%rd3, {0, 0}]", "[%rd3, {0, 15}]"), seed=seed)
    assert beyond.findings == () and beyond.traffic["y"].write_bytes == 128
    for before, after, kind, where, message in FAULTS:
        assert PIPE.count(before) == 1, before
        launch, whole = pipe((shared + PIPE).replace(before, after), seed=seed)
        lines = [number for number, text in enumerate(whole.split("\n"), 1) if where in text]
        hits = [f for f in launch.findings if f.kind == kind and f.ptx_line in lines and message in f.message]
        assert hits, (after, launch.findings)
        follow = {"in flight": {"race"}}.get(kind, {"deadlock"})  # of one cause, or because of it
        assert {f.kind for f in launch.findings} <= {kind} | follow, (after, launch.findings)


# -- maps that a kernel makes ------------------------------------------------------------------------------------------------

FIELDS = [
    ("global_address", "b64", "%rd5"),
    ("rank", "b32", "1"),
    *(("box_dim", "b32", f"{k}, {n}") for k, n in enumerate((32, 16))),
    *(("global_dim", "b32", f"{k}, {n}") for k, n in enumerate((32, 40))),
    ("global_stride", "b64", "0, 128"),
    *(("element_stride", "b32", f"{k}, 1") for k in range(2)),
    *(("elemtype", "b32", "7"), ("interleave_layout", "b32", "0"), ("swizzle_mode", "b32", "3"), ("fill_mode", "b32", "0")),
]
REPLACE = "@%p1 tensormap.replace.tile.{}.shared::cta.b1024.{} [%rd7], {};"
REPLACED = "\n".join(REPLACE.format(*field) for field in FIELDS)

# As Triton's compiler does it: zeros in shared memory become a map, which a warp copies to the launch's scratch memory.
MADE = f"""{START}
ld.param.u64 %rd2, [g]; ld.param.u64 %rd5, [q]; cvt.u64.u32 %rd7, %r1;
setp.lt.u32 %p2, %r0, 32;
shl.b32 %r11, %r0, 2; add.u32 %r12, %r1, %r11;
@%p2 st.shared.b32 [%r12], 0;
bar.warp.sync -1;
{REPLACED}
bar.warp.sync -1;
@%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd2], [%rd7], 128;
@%p2 fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@%p1 fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p1 fence.proxy.async.shared::cta;
@%p1 {COPY} [%r1], [%rd2, {{0, -2}}], [%r2];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0; @!%p2 bra W;
mov.u64 %rd3, o;
bar.sync 0;
@!%p1 bra DONE;
cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd3, {{0, 0}}], [%r1];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


def made(text: str, seed: int | None = None) -> tuple[Launch, np.ndarray, np.ndarray]:
    x, y = np.arange(40 * 32, dtype=np.float32).reshape(40, 32), np.zeros((16, 32), np.float32)
    maps = {"x": TensorMap(x, (32, 16), swizzle=128), "y": TensorMap(y, (32, 16), swizzle=128)}
    whole = f"{HEAD}.visible .entry k({PIPE_PARAMS})\n{{\n{REGISTERS}\n{text}\nret;\n}}\n"
    args = {**maps, "g": np.zeros(128, np.uint8), "q": x}
    return Module.from_ptx(whole).launch("k", 1, 64, args, seed=seed, max_instructions=100_000), x, y


@pytest.mark.parametrize("seed", SEEDS)
def test_a_map_that_a_kernel_makes_is_one_that_the_host_makes(seed: int | None) -> None:
    launch, x, y = made(MADE, seed)
    assert launch.findings == () and launch.traffic["q"].read_bytes == 14 * 128  # two rows of the box lie before the tensor
    assert np.array_equal(y[2:], x[:14]) and not y[:2].any()


@pytest.mark.parametrize(
    "before, after, kind, message",
    [
        ("b1024.b32 [%rd7], 1, 16;", "b1024.b32 [%rd7], 1, 300;", "bad tensor map", "box_dim cannot be 300"),
        ("b1024.b64 [%rd7], 0, 128;", "b1024.b64 [%rd7], 0, 120;", "bad tensor map", "strides must be multiples of 16 bytes"),
        ("b1024.b32 [%rd7], 3;", "b1024.b32 [%rd7], 1;", "bad tensor map", "at most the swizzle's 32 bytes"),
        ("@%p2 st.shared.b32 [%r12], 0;", "@%p2 st.shared.b32 [%r12], 1;", "bad tensor map", "nor zeros of which one can be made"),
        ("@%p2 fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;", "", "proxy", "acquire, before the use"),
        ("@%p2 st.shared.b32 [%r12], 0;\nbar.warp.sync -1;", "@%p2 st.shared.b32 [%r12], 0;", "race", "not ordered"),
    ],
)
def test_faults_in_the_making_of_a_map(before: str, after: str, kind: str, message: str) -> None:
    assert MADE.count(before) >= 1
    launch, _, _ = made(MADE.replace(before, after, 1))
    assert any(one.kind == kind and message in one.message for one in launch.findings), launch.findings


# -- CUDA C -----------------------------------------------------------------------------------------------------------------

CUDA = r"""
struct alignas(64) CUtensorMap { char bytes[128]; };
struct Params { int rows; CUtensorMap in; float scale; CUtensorMap out; };
typedef unsigned u32;
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void wait(u32 bar, u32 parity) {
    asm volatile("{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1, %2; @!p bra W; }"
        :: "r"(bar), "r"(parity), "r"(100) : "memory");
}
__device__ void load(const void* to, const void* map, int x, int y, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
constexpr int ROWS = 16, STAGES = 2;
// out = scale * in, tiles of 16 rows of 32 floats through two stages; swizzled by 128 bytes both ways.
extern "C" __global__ void scale(PARAMS) {
    __shared__ alignas(1024) float tile[STAGES][ROWS * 32];
    __shared__ alignas(8) unsigned long long full[STAGES];
    const int steps = (p.rows + ROWS - 1) / ROWS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&full[s])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    auto fetch = [&](int step) {
        u32 bar = shared(&full[step % STAGES]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "n"(ROWS * 32 * 4) : "memory");
        load(tile[step % STAGES], &p.in, 0, step * ROWS, bar);
    };
    if (threadIdx.x == 0) fetch(0);
    for (int step = 0; step < steps; step++) {
        float* here = tile[step % STAGES];
        if (threadIdx.x == 0 && step + 1 < steps) {
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the next stage has been stored
            fetch(step + 1);
        }
        wait(shared(&full[step % STAGES]), step / STAGES & 1);
        for (int i = threadIdx.x; i < ROWS * 32; i += blockDim.x) here[i] *= p.scale;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                :: "l"(&p.out), "r"(0), "r"(step * ROWS), "r"(shared(here)) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // before the block goes
}
"""

CUDA_FAULTS = {
    "": ("", "", "", ""),
    "not __grid_constant__": ("const __grid_constant__ Params p", "const Params p", "bad tensor map", "tensor.2d.shared::cluster"),
    "a stage loaded while it is stored": (
        'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the next', "//", "race", "tensor.2d.global"
    ),
    "a block that goes too early": (
        'if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // before', "//", "in flight",
        "tensor.2d.global",
    ),
    "no fence of the proxy": ('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "", "proxy", "tensor.2d.global"),
    "a parity too late": ("step / STAGES & 1)", "1)", "in flight", "here[i] *="),
}  # fmt: skip


@pytest.mark.parametrize("name", CUDA_FAULTS)
def test_a_pipeline_in_cuda_and_its_faults(name: str) -> None:
    before, after, kind, where = CUDA_FAULTS[name]
    text = CUDA.replace("PARAMS", "const __grid_constant__ Params p")
    assert text.count(before) == 1 or not before
    text = text.replace(before, after) if before else text
    module = Module.from_source(text, ["-arch=compute_90a"])
    for seed in SEEDS[: 2 if name else 4]:
        x = np.random.default_rng(0).standard_normal((70, 32)).astype(np.float32)
        y = np.zeros_like(x)
        maps = {"in": TensorMap(x, (32, 16), swizzle=128), "out": TensorMap(y, (32, 16), swizzle=128)}
        args = {"p": {"rows": np.int32(70), "in": maps["in"], "scale": np.float32(2), "out": maps["out"]}}
        launch = module.launch("scale", 1, 64, args, seed=seed, unwritten=["p.out"])
        if not kind:
            assert launch.findings == () and (y == 2 * x).all()
            assert (launch.traffic["in"].read_bytes, launch.traffic["out"].write_bytes) == (x.nbytes, x.nbytes)
            continue
        lines = [number for number, line in enumerate(text.split("\n"), 1) if where in line]
        assert {(f.kind, f.source is not None and f.source[1] in lines) for f in launch.findings} >= {(kind, True)}, launch.findings


def test_maps_in_global_memory_and_what_does_not_fit() -> None:
    body = f"ld.param.u64 %rd1, [m]; add.u64 %rd1, %rd1, 128; {INIT} {load(2, '0, 0', 512)} {WAIT} {OUT}"
    module = Module.from_ptx(program(body, ".param .u64 m, .param .u64 y", 512))
    x, y = np.arange(256, dtype=np.float32).reshape(8, 32), np.zeros(128, np.float32)
    launch = module.launch("k", 1, 64, {"m": [TensorMap(x, (32, 1)), TensorMap(x, (32, 4))], "y": y})
    assert launch.findings == () and (y == x.reshape(-1)[:128]).all()
    assert launch.traffic["m[1]"].read_bytes == 512 and launch.traffic["m[0]"].read_bytes == 0
    fresh = module.launch("k", 1, 64, {"m": np.full(256, 0xFF, np.uint8), "y": y}, unwritten=["m"])
    assert fresh.findings[0].kind == "uninitialised" and "which nobody wrote" in fresh.findings[0].message
    longer = module.launch("k", 1, 64, {"m": [TensorMap(x, (32, 1)), TensorMap(x[:3], (32, 4), dims=(32, 8))], "y": y})
    assert (longer.findings[0].kind, longer.findings[0].tensor) == ("out of bounds", "m[1]")
    with pytest.raises(TypeError, match="1 tensor map of 128 bytes"):
        Module.from_ptx(program("", ".param .u32 m, .param .u64 y")).launch("k", 1, 1, [TensorMap(x, (32, 1)), y])
    stored = program(f"{INIT} st.shared.u64 [%r1], 1; cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {{0}}], [%r1];")
    x.flags.writeable = False
    launch = Module.from_ptx(stored).launch("k", 1, 1, [TensorMap(x.reshape(-1), 4), y])
    assert [f.kind for f in launch.findings] == ["read-only"]


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_copies_need_a_barrier_or_a_fence_behind_the_init(seed: int | None) -> None:
    """cuda::memcpy_async has no fence."""
    for between, kinds in (("bar.sync 0;", set()), ("@%p1 fence.proxy.async.shared::cta;", set()), ("", {"proxy"})):
        body = f"""ld.param.u64 %rd2, [x]; @%p1 mbarrier.init.shared::cta.b64 [%r2], 1; {between}
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
        @%p1 cp.async.bulk.shared::cta.global.{BYTES} [%r1], [%rd2], 256, [%r2]; bar.sync 0; {WAIT}"""
        module = Module.from_ptx(program(body, ".param .u64 m, .param .u64 x"))
        found = module.launch("k", 1, 64, [None, np.zeros(64, np.float32)], seed=seed).findings
        assert {f.kind for f in found} == kinds, between


def test_raw_kernels_take_maps() -> None:
    """The pipeline with two maps in a structure, called as CuPy's kernels are."""
    x = np.ones((20, 32), np.float32)
    y = np.zeros_like(x)
    kernel = RawKernel(CUDA.replace("PARAMS", "const __grid_constant__ Params p"), "scale", options=("-arch=compute_90",))
    maps = {"in": TensorMap(x, (32, 16), swizzle=128), "out": TensorMap(y, (32, 16), swizzle=128)}
    kernel((1,), (64,), ({"rows": np.int32(20), "in": maps["in"], "scale": np.float32(2), "out": maps["out"]},))
    assert (y == 2).all()


# -- what published kernels do ----------------------------------------------------------------------------------------------

BEHIND_INIT = {
    # what stands between mbarrier.init and the first tensor copy: is that a fence.mbarrier_init, or more?
    "fence.mbarrier_init.release.cluster; bar.sync 0;": True,
    "barrier.cluster.arrive; barrier.cluster.wait;": True,
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;": True,
    "barrier.cluster.arrive.relaxed; barrier.cluster.wait; bar.sync 0;": False,
    "fence.acq_rel.cluster; bar.sync 0;": True,
    "membar.gl; bar.sync 0;": True,
    "fence.acq_rel.cta; bar.sync 0;": False,
    "fence.acquire.cluster; bar.sync 0;": False,
    "bar.sync 0;": False,
}


@pytest.mark.parametrize("races", [True, False])
def test_a_release_for_the_cluster_does_what_fence_mbarrier_init_does(races: bool) -> None:
    for between, enough in BEHIND_INIT.items():
        body = f"@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; {between}\n{load(1, '0', 128)}\n{WAIT}\nbar.sync 0;\n{OUT}"
        y = np.zeros(32, np.float32)
        args = {"m": TensorMap(np.arange(32, dtype=np.float32), (32,)), "y": y}
        launch = Module.from_ptx(program(body, size=128)).launch("k", 1, 64, args, races=races)
        assert (y == np.arange(32)).all()
        # Behind a barrier of the block every chip has it right; without races nobody knows of the barrier.
        wanted = set() if enough else {("proxy", "warning" if races else "error")}
        assert {(f.kind, f.severity) for f in launch.findings} == wanted, (between, launch.findings)
    body = f"@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\n{load(1, '0', 128)}\nbar.sync 0;\n{WAIT}\nbar.sync 0;\n{OUT}"
    args = {"m": TensorMap(np.arange(32, dtype=np.float32), (32,)), "y": np.zeros(32, np.float32)}
    (finding,) = Module.from_ptx(program(body, size=128)).launch("k", 1, 64, args, races=races).findings
    assert (finding.kind, finding.severity) == ("proxy", "error")


def test_what_a_store_leaves_out_nobody_need_have_written() -> None:
    for columns, kinds in ((6, set()), (5, {"uninitialised"})):
        body = f"""and.b32 %r3, %r0, 7; setp.lt.u32 %p2, %r3, {columns}; shl.b32 %r4, %r0, 2; add.u32 %r4, %r1, %r4;
        @%p2 st.shared.u32 [%r4], %r0; fence.proxy.async.shared::cta; bar.sync 0;
        @!%p1 bra E; cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {{0, 0}}], [%r1];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
        y = np.zeros((4, 8), np.uint32)
        args = {"m": TensorMap(y, (8, 4), dims=(6, 4), strides=(32,)), "y": None}
        launch = Module.from_ptx(program(body)).launch("k", 1, 32, args)
        assert {f.kind for f in launch.findings} == kinds, launch.findings
        assert (y[:, :5] == np.arange(32).reshape(4, 8)[:, :5]).all() and not y[:, 6:].any()
