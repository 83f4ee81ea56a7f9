"""Accesses that leave the shared variable that they are of: an index that runs from one array into the next."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from test_ptx_tma import INIT, OUT, WAIT, load, program

from cupyflash.sim.ptx import Finding, Launch, Module, TensorMap
from suites import sample

SEEDS = sample([None, 0, 1], [None])
TWO = "__shared__ unsigned a[64];\n__shared__ unsigned b[64];\n"


@cache
def compiled(source: str) -> Module:
    return Module.from_source(source)


def launch(body: str, n: int = 0, shared_bytes: int = 0, seed: int | None = None, head: str = "") -> Launch:
    """64 threads of a kernel of (y, n): y are 64 results."""
    source = f'{head}\nextern "C" __global__ void k(unsigned *y, int n) {{\nint t = threadIdx.x;\n{body}\n}}'
    return compiled(source).launch("k", 1, 64, {"y": np.zeros(64, np.uint32), "n": n}, shared_bytes=shared_bytes, seed=seed)


def astray(found: Launch) -> list[Finding]:
    """The findings, all of an array that was left."""
    assert {f.kind for f in found.findings} <= {"out of bounds"}
    assert all("what lies there is" in f.message for f in found.findings), found.findings
    return list(found.findings)


FILL = "a[t] = t;\nb[t] = 7;\n__syncthreads();\n"
ASYNC = 'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\\ncp.async.wait_all;" :: "r"(s), "l"(y + t) : "memory");'

# Bodies in which t + n is an index; at n = 0 all is well, at 1 the last thread leaves its array, at -1 the first one.
INDEXED = {
    "a load": TWO + FILL + "y[t] = a[t + n] + b[t];",
    "a load of the second": TWO + FILL + "y[t] = a[t] + b[t + n];",
    "a store": TWO + "b[t] = 7;\n__syncthreads();\na[t + n] = t;\n__syncthreads();\ny[t] = b[t] + a[63 - t];",
    "an atomic": TWO + FILL + "atomicAdd(a + t + n, 1u);\n__syncthreads();\ny[t] = b[t] + a[t];",
    "a pointer in a loop": TWO + FILL + "unsigned *p = b + n;\nfor (int i = 0; i < t; i++) p++;\ny[t] = *p + a[t];",
    "through another function": TWO + FILL + "y[t] = pick(a, t + n) + b[t];",
    "dynamic memory first": "extern __shared__ unsigned d[];\n"
    + TWO
    + FILL
    + "d[t] = 1;\n__syncthreads();\ny[t] = a[t + n] + b[t] + d[t];",
    "a structure": "__shared__ struct { unsigned u[2]; unsigned v[62]; } s;\n__shared__ unsigned b[64];\n"
    "s.u[t] = t;\nb[t] = 7;\n__syncthreads();\ny[t] = s.u[t + n] + b[t];",
    "cp.async": TWO
    + FILL
    + "unsigned s = (unsigned)__cvta_generic_to_shared(a + t + n);\n"
    + ASYNC
    + "\n__syncthreads();\ny[t] = b[t] + a[t];",
}
HEAD = (
    "__device__ __noinline__ void nothing() {}\n__device__ __forceinline__ unsigned pick(const unsigned *p, int i) { return p[i]; }"
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_runs_into_the_next_array(name: str, seed: int | None) -> None:
    def run(n: int) -> Launch:
        return launch(INDEXED[name], n, shared_bytes=256 if "dynamic" in name else 0, seed=seed, head=HEAD)

    assert run(0).findings == ()
    told = [f for n in (1, -1) for f in run(n).findings]
    assert {f.kind for f in told} <= {"out of bounds", "uninitialised", "race"} and any(
        "what lies there is" in f.message for f in told
    )
    # One of the two ends is the next array, the other may be that of shared memory.
    (found,) = [f for f in told if "what lies there is" in f.message]
    assert (found.warp, found.lane, found.lanes) in ((1, 31, 1), (0, 0, 1))


LAWFUL = {
    "from the end": TWO + FILL + "unsigned *p = a + 64;\ny[t] = *(p - 1 - t) + b[t];",
    "from in front": TWO + FILL + "unsigned *p = b - 1;\ny[t] = p[t + 1] + a[t];",
    "rows of one array": "__shared__ unsigned c[2][32];\n__shared__ unsigned b[64];\nc[0][t] = t;\nb[t] = 7;\n__syncthreads();\n"
    "y[t] = (&c[1][0])[t - 32] + b[t];",
    "one of two": TWO + FILL + "unsigned *p = n ? a : b;\ny[t] = p[t] + a[t];",
    "swapped in a loop": TWO + FILL + "unsigned *p = a, *q = b, s = 0;\nfor (int i = 0; i < 4 + n; i++) {\ns += p[t];\n"
    "unsigned *r = p;\np = q;\nq = r;\n}\ny[t] = s;",
    "a union": "__shared__ union { unsigned u[64]; unsigned char c[512]; } s;\n__shared__ unsigned b[64];\ns.c[t + 256] = 1;\n"
    "s.u[t] = 2;\nb[t] = 7;\n__syncthreads();\ny[t] = s.u[63 - t] + b[t] + s.c[t + 256];",
    "dynamic memory in parts": "extern __shared__ unsigned d[];\n__shared__ unsigned b[64];\nd[t] = 1;\nd[t + 64] = 2;\nb[t] = 7;\n"
    "__syncthreads();\ny[t] = d[127 - t] + b[t];",
    "two names of dynamic memory": "extern __shared__ unsigned d[];\nextern __shared__ unsigned char e[];\n"
    "__shared__ unsigned b[64];\n"
    "d[t] = 1;\nb[t] = 7;\n__syncthreads();\ny[t] = e[4 * t] + b[t];",
}


@pytest.mark.parametrize("name", LAWFUL)
def test_what_stays_in_its_array_or_may_be_of_several(name: str) -> None:
    for n in (0, 1):
        assert astray(launch(LAWFUL[name], n, shared_bytes=512)) == []


PTX = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def assembled(body: str, cluster: int | None = None) -> Launch:
    """One warp a block, in PTX, with variables a and b of 256 bytes each; 32 results y."""
    barrier = "barrier.cluster.arrive; barrier.cluster.wait;" if cluster else "bar.sync 0;"
    text = f"""{PTX}.visible .entry k(.param .u64 y)\n{{\n.shared .align 16 .b8 a[256]; .shared .align 16 .b8 b[256];
    .reg .b64 %rd<9>; .reg .b32 %r<20>; .reg .pred %p<4>; ld.param.u64 %rd8, [y]; mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 3;
    mov.u32 %r2, a; mov.u32 %r3, b; add.u32 %r4, %r2, %r1; add.u32 %r5, %r3, %r1; mov.u64 %rd1, 0;
    st.shared.u64 [%r4], %rd1; st.shared.u64 [%r5], %rd1; {barrier}
    {body} {barrier} ret;\n}}\n"""
    y = np.zeros(64, np.uint32)
    return compiled_ptx(text).launch("k", cluster or 1, 32, {"y": y}, cluster=cluster)


@cache
def compiled_ptx(text: str) -> Module:
    return Module.from_ptx(text)


# Each access leaves the array it is of by the bytes of PLUS, in all of its lanes or in the last ones.
ACCESSES = {
    "a vector": "add.u32 %r6, %r4, {}; ld.shared.v2.u32 {{%r7, %r8}}, [%r6];",
    "an offset": "ld.shared.u64 %rd2, [%r4+{}];",
    "the symbol": "ld.shared.u64 %rd2, [a+{}];",
    "generic": "cvt.u64.u32 %rd2, %r4; cvta.shared.u64 %rd3, %rd2; add.s64 %rd4, %rd3, {}; ld.u64 %rd5, [%rd4];",
    "generic of the symbol": "cvta.shared.u64 %rd3, a; ld.u64 %rd5, [%rd3+{}];",
    "mad": "mad.lo.u32 %r6, %r0, 8, %r2; ld.shared.u64 %rd2, [%r6+{}];",
    "aligned": "add.u32 %r6, %r4, 7; and.b32 %r6, %r6, -8; ld.shared.u64 %rd2, [%r6+{}];",
    "a shuffle": "shfl.sync.bfly.b32 %r6, %r4, 1, 31, -1; ld.shared.u64 %rd2, [%r6+{}];",
    "ldmatrix": "shl.b32 %r9, %r0, 4; and.b32 %r10, %r9, 127; add.u32 %r6, %r2, %r10;"
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%r7}}, [%r6+{}];",
    "an index from memory": "ld.shared.u32 %r9, [%r5]; add.u32 %r6, %r4, %r9; ld.shared.u64 %rd2, [%r6+{}];",
    "volatile": "ld.volatile.shared.u64 %rd2, [%r4+{}];",
    "an atomic": "atom.shared.exch.b64 %rd2, [%r4+{}], %rd1;",
}


@pytest.mark.parametrize("name", ACCESSES)
def test_every_kind_of_access(name: str) -> None:
    assert assembled(ACCESSES[name].format(0)).findings == ()
    (found,) = astray(assembled(ACCESSES[name].format(256)))
    assert "of 'a', which has 256 bytes; what lies there is 0x" in found.message and "(b" in found.message


def test_another_blocks_array() -> None:
    """mapa gives an address of the same variable, in another block."""
    body = """mov.u32 %r6, %cluster_ctarank; xor.b32 %r6, %r6, 1; mapa.shared::cluster.u32 %r7, %r4, %r6;
    ld.shared::cluster.u64 %rd2, [%r7+{}];"""
    assert assembled(body.format(0), 2).findings == ()
    (found,) = astray(assembled(body.format(8), 2))
    assert found.lane == 31 and found.lanes == 2


def test_a_copy_from_one_array_to_another() -> None:
    """Neither end in shared memory is taken for the other's variable."""
    body = """mov.u32 %r9, bar; setp.ne.u32 %p1, %r0, 0; @!%p1 mbarrier.init.shared::cta.b64 [%r9], 1;
    @!%p1 fence.mbarrier_init.release.cluster; bar.sync 0; fence.proxy.async; @%p1 bra W;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r9], 256;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r3], [%r2], 256, [%r9];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r9], 0; @!%p2 bra W;"""
    assert assembled(f".shared .align 8 .b64 bar; {body}").findings == ()


MIXED = {
    "either": "setp.gt.u32 %p1, %r0, 15; selp.b32 %r6, %r2, %r3, %p1; ld.shared.u64 %rd2, [%r6+256];",
    "by two moves": "setp.gt.u32 %p1, %r0, 15; mov.u32 %r6, %r3; @%p1 mov.u32 %r6, %r2;"
    "sub.u32 %r6, %r6, 256; ld.shared.u64 %rd2, [%r6+256];",
    "the distance of two": "sub.u32 %r6, %r3, %r2; add.u32 %r7, %r6, %r4; ld.shared.u64 %rd2, [%r7];",
    "a place in a line": "and.b32 %r6, %r5, 127; ld.shared.u64 %rd2, [%r6];",
    "a place in a line of another": "and.b32 %r6, %r4, 127; add.u32 %r7, %r6, %r3; ld.shared.u64 %rd2, [%r7];",
    "kept in memory": "st.shared.u32 [%r4], %r5; ld.shared.u32 %r6, [%r4]; ld.shared.u64 %rd2, [%r6];",
    "a number": "mov.u32 %r6, 256; ld.shared.u64 %rd2, [%r6];",
}


@pytest.mark.parametrize("name", MIXED)
def test_addresses_of_more_than_one_or_of_none_are_left_alone(name: str) -> None:
    body = MIXED[name] if name != "either" else MIXED[name].replace("+256", "")
    assert assembled(body).findings == ()


def test_tiles_of_bulk_copies() -> None:
    """The tile t of 8,192 bytes and the mbarrier behind it: a box that begins so late that it ends behind the tile."""
    x, y = np.zeros((32, 32), np.float32), np.zeros((8, 32), np.float32)

    def run(plus: int) -> Launch:
        copy = load(2, "%r20, %r20", 1024).replace("[%r1]", f"[%r1+{plus}]" if plus else "[%r1]")
        body = f"{INIT} mov.u32 %r20, 0; {copy} {WAIT} {OUT}"
        text = program(body, size=1024).replace(".shared .align 8 .b64 bar;", ".shared .align 8 .b64 bar; .shared .b8 u[4096];")
        text = text.replace("mov.u32 %r2, bar;", "mov.u32 %r2, bar; mov.u32 %r29, u;")
        return Module.from_ptx(text).launch("k", 1, 64, {"x": TensorMap(x, (32, 8)), "y": y})

    assert run(0).findings == ()
    kinds = [f for f in run(8192 - 512).findings if f.kind == "out of bounds"]
    assert len(kinds) == 1 and "at 0x1e00 of shared memory: offset 7680 of 't', which has 8,192 bytes" in kinds[0].message, kinds
