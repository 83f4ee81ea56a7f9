"""st.async and red.async: bytes, the mbarrier that counts them, order, faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module, UnsupportedPTX

SEEDS = [None, 0, 1, 2]
WAY = "shared::cluster.mbarrier::complete_tx::bytes"
READY = """@%p1 mbarrier.init.shared.b64 [bar], 1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], {bytes};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
WAIT = """LOOP: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0;
@!%p2 bra LOOP;
"""


def kernel(body: str) -> str:
    """A kernel k(y): %r1 the thread, %r2 the rank; s, a and bar of the block, at %r13 the thread's 16 bytes of the other block's s,
    at %r14 of its own, at %r7 the other's bar and at %r8 its counter a; %rd2 the thread's 16 bytes of y."""
    return f"""
.version 8.3
.target sm_90
.address_size 64
.visible .entry k(.param .u64 y) {{
.reg .b64 %rd<20>; .reg .b32 %r<40>; .reg .pred %p<8>;
.shared .align 16 .b8 s[1024]; .shared .align 8 .b8 a[8]; .shared .align 8 .b64 bar;
ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r1, 0;
mov.u32 %r4, s; shl.b32 %r5, %r1, 4; add.u32 %r14, %r4, %r5; mapa.shared::cluster.u32 %r13, %r14, %r3;
mov.u32 %r6, bar; mapa.shared::cluster.u32 %r7, %r6, %r3; mov.u32 %r9, a; mapa.shared::cluster.u32 %r8, %r9, %r3;
mad.lo.u32 %r10, %r2, 32, %r1; mul.wide.u32 %rd2, %r10, 16; add.u64 %rd2, %rd1, %rd2;
shl.b32 %r20, %r10, 2; add.u32 %r21, %r20, 1; add.u32 %r22, %r20, 2; add.u32 %r23, %r20, 3;
mov.b64 %rd10, {{%r20, %r21}}; mov.b64 %rd11, {{%r22, %r23}};
{body}
ret;
}}
"""


def launched(body: str, **options: Any) -> tuple[Launch, np.ndarray]:
    y = np.zeros(256, np.uint32)
    return Module.from_ptx(kernel(body)).launch("k", 2, 32, {"y": y}, cluster=2, **options), y


OUT = "ld.shared.v4.u32 {%r30, %r31, %r32, %r33}, [%r14];\nst.global.v4.u32 [%rd2], {%r30, %r31, %r32, %r33};\n"
DONE = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "stores",
    [
        ["v4.b32 [%r13], {%r20, %r21, %r22, %r23}"],
        ["weak.v2.u64 [%r13], {%rd10, %rd11}"],
        ["b64 [%r13], %rd10", "s64 [%r13+8], %rd11"],
        ["v2.u32 [%r13+8], {%r22, %r23}", "b32 [%r13], %r20", "b32 [%r13+4], %r21"],
    ],
)
def test_every_width_reaches_the_other_block_and_its_mbarrier(stores: list[str], seed: int | None) -> None:
    def spelled(store: str) -> str:
        kind, _, operands = store.partition(" ")
        weak = "weak." * kind.startswith("weak.")
        return f"st.async.{weak}{WAY}.{kind.removeprefix('weak.')} {operands}, [%r7];\n"

    result, y = launched(READY.format(bytes=512) + "".join(map(spelled, stores)) + WAIT + OUT + DONE, seed=seed)
    assert result.findings == ()
    assert y.tolist() == [*range(128, 256), *range(128)]
    assert result.counters.distributed_memory.bytes == 1024


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("operation", "start", "value", "expected"),
    [
        ("add.u32", 5, "%r1", 5 + 496),
        ("inc.u32", 0, "15", 0),  # 32 steps around 0 to 15
        ("dec.u32", 3, "3", 3),
        ("min.s32", 7, "%r1", 0),
        ("max.u32", 7, "%r1", 31),
        ("or.b32", 64, "%r1", 95),
        ("xor.b32", 1, "%r1", 1),
        ("and.b32", 255, "31", 31),
        ("add.u64", 2**33, "%rd3", 2**33 + 496),
    ],
)
def test_reductions_are_all_there_once_the_phase_is_complete(
    operation: str, start: int, value: str, expected: int, seed: int | None
) -> None:
    size = int(operation[-2:]) // 8
    body = f"cvt.u64.u32 %rd3, %r1; mov.u64 %rd4, {start}; @%p1 st.shared.u64 [a], %rd4;\n{READY.format(bytes=32 * size)}"
    body += f"red.async.relaxed.cluster.{WAY}.{operation} [%r8], {value}, [%r7];\n{WAIT}"
    body += f"ld.shared.u64 %rd5, [a];\n@%p1 st.global.u64 [%rd2], %rd5;\n{DONE}"
    result, y = launched(body, seed=seed)
    assert result.findings == () and y.view(np.uint64)[[0, 64]].tolist() == [expected, expected]


STORE = f"st.async.{WAY}.b32 [%r13], %r20, [%r7];\n"
READ = "ld.shared.u32 %r30, [%r14];\n"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (STORE + READ + WAIT, "race", "the shared memory of block"),  # nothing orders the read behind the store of another block
        (STORE + DONE + READ + WAIT, "in flight", "has not been waited for"),
        (STORE + WAIT.replace("[bar]", "[a]"), "uninitialised", "that nobody wrote"),
        (READ + STORE + WAIT, "race", "write"),  # the other block may not yet have read
        (f"st.async.{WAY}.b32 [%r13+2], %r20, [%r7];\n", "misaligned", "not aligned to 4"),
        (f"st.async.{WAY}.b32 [%r13+4096], %r20, [%r7];\n", "out of bounds", "shared memory of a block has"),
        (f"st.async.{WAY}.b32 [%r13], %r20, [%r6];\n", "out of bounds", "not in the block that gets the bytes"),
        ("@%p1 " + STORE + "@%p1 st.shared::cluster.u32 [%r13], 7;\n", "in flight", "has not been waited for"),
    ],
)
def test_faults(body: str, kind: str, words: str, seed: int | None) -> None:
    start = "st.shared.v4.u32 [%r14], {%r20, %r20, %r20, %r20};\n" + READY.format(bytes=128)
    result, _ = launched(start + body + DONE, seed=seed)
    assert [(one.kind, words in str(one)) for one in result.findings][:1] == [(kind, True)], result.findings


def test_a_phase_that_lacks_bytes_is_a_deadlock() -> None:
    result, _ = launched(READY.format(bytes=132) + STORE + WAIT + DONE)
    assert any(one.kind == "deadlock" and "4 bytes" in str(one) for one in result.findings)


@pytest.mark.parametrize(
    "refused",
    [
        "st.async.mmio.release.gpu.global.u32 [%rd1], %r2;",  # of sm_100
        f"st.async.{WAY}.v4.b64 [%r13], {{%rd1, %rd1, %rd1, %rd1}}, [%r7];",
        f"st.async.{WAY}.b16 [%r13], 1, [%r7];",
        f"red.async.relaxed.cluster.{WAY}.min.u64 [%r8], %rd1, [%r7];",
        f"red.async.relaxed.cluster.{WAY}.add.f32 [%r8], 0f00000000, [%r7];",
        f"red.async.{WAY}.add.u32 [%r8], %r1, [%r7];",
    ],
)
def test_other_forms_are_refused(refused: str) -> None:
    with pytest.raises(UnsupportedPTX):
        Module.from_ptx(kernel(refused))
