"""Loads, stores and address spaces; what is counted, and what is found wrong."""

from __future__ import annotations

import numpy as np
import pytest
from test_ptx_harness import COPY, HEAD, POINTER_REGISTERS, apply, elementwise, integers, kernel, pointer_kernel, run

from cupyflash.sim.ptx import Access, Module, PtxError, UnsupportedPTX


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


# -- access widths ------------------------------------------------------------------------------------------------------


def test_narrow_loads_extend_by_type() -> None:
    x = np.arange(-20, 44, dtype=np.int8)
    body = "add.s64 %rd3, %rd1, %rd10; shl.b64 %rd11, %rd10, 2; add.s64 %rd4, %rd2, %rd11;"
    for type_, want in (("s8", x.astype(np.int32)), ("u8", x.view(np.uint8).astype(np.int32))):
        out = np.zeros(64, np.int32)
        run(
            pointer_kernel(f"{body} ld.global.{type_} %r2, [%rd3]; st.global.u32 [%rd4], %r2;", "x", "y"),
            {"x": x, "y": out},
            block=64,
        )
        assert (out == want).all()


def test_narrow_stores_take_the_low_part(rng: np.random.Generator) -> None:
    x, out = integers(rng, np.uint32, 64), np.zeros(64, np.uint8)
    body = "shl.b64 %rd11, %rd10, 2; add.s64 %rd3, %rd1, %rd11; add.s64 %rd4, %rd2, %rd10;"
    launch = run(
        pointer_kernel(f"{body} ld.global.u32 %r2, [%rd3]; st.global.u8 [%rd4], %r2;", "x", "y"), {"x": x, "y": out}, block=64
    )
    assert (out == x.astype(np.uint8)).all()
    assert launch.traffic["y"].write_bytes == 64 and launch.traffic["y"].write_sectors == 2


@pytest.mark.parametrize(
    ("suffix", "count", "bits"), [("v2.u32", 2, 32), ("v4.f32", 4, 32), ("v2.b64", 2, 64), ("v4.u16", 4, 16), ("v4.u8", 4, 8)]
)
def test_vectors(suffix: str, count: int, bits: int, rng: np.random.Generator) -> None:
    size = count * bits // 8
    x = rng.integers(0, 256, 64 * size, dtype=np.uint8)
    out = np.zeros_like(x)
    register = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}[bits]
    names = [f"{register}{k + (12 if bits == 64 else 4 if bits == 32 else 0)}" for k in range(count)]
    body = f"""mul.lo.u64 %rd11, %rd10, {size}; add.s64 %rd3, %rd1, %rd11; add.s64 %rd4, %rd2, %rd11;
    ld.global.{suffix} {{{", ".join(names)}}}, [%rd3]; st.global.{suffix} [%rd4], {{{", ".join(names[::-1])}}};"""
    launch = run(pointer_kernel(body, "x", "y"), {"x": x, "y": out}, block=64)
    assert (out.reshape(64, count, -1) == x.reshape(64, count, -1)[:, ::-1]).all()
    assert launch.traffic["x"].read_bytes == x.nbytes and launch.traffic["x"].read_requests == 2


def test_vector_store_of_constants_and_ordering_modifiers() -> None:
    out = np.zeros(128, np.uint32)
    body = """shl.b64 %rd11, %rd10, 4; add.s64 %rd3, %rd1, %rd11; st.volatile.global.v4.u32 [%rd3], {%r1, 7, %r1, 9};
    ld.relaxed.gpu.global.L1::no_allocate.u32 %r3, [%rd3+4]; st.global.wb.u32 [%rd3+4], %r3;
    st.release.sys.global.u32 [%rd3+8], %r3;"""
    run(pointer_kernel(body, "y"), {"y": out})
    lane = np.arange(32)
    assert (out.reshape(32, 4) == np.stack([lane, lane * 0 + 7, lane * 0 + 7, lane * 0 + 9], 1)).all()


# -- address spaces -----------------------------------------------------------------------------------------------------


def test_generic_addresses_reach_every_space() -> None:
    text = kernel(
        """ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd10, %r1, 4; add.s64 %rd1, %rd1, %rd10;
        mov.u64 %rd2, buffer; cvta.shared.u64 %rd3, %rd2; add.s64 %rd3, %rd3, %rd10;
        mov.u64 %rd4, depot; cvta.local.u64 %rd5, %rd4;
        add.u32 %r2, %r1, 100; st.u32 [%rd3], %r2; add.u32 %r3, %r1, 200; st.u32 [%rd5+4], %r3; st.u32 [%rd1], %r1;
        and.b32 %r4, %r1, 3; setp.eq.u32 %p1, %r4, 1; setp.eq.u32 %p2, %r4, 2;
        selp.b64 %rd6, %rd3, %rd1, %p1; add.s64 %rd7, %rd5, 4; selp.b64 %rd6, %rd7, %rd6, %p2;
        ld.u32 %r5, [%rd6]; bar.sync 0; st.global.u32 [%rd1], %r5;
        isspacep.shared %p3, %rd6; @%p3 st.global.u32 [%rd1], 1; isspacep.local %p3, %rd6; @%p3 add.u32 %r5, %r5, 1;
        isspacep.global %p3, %rd6; @%p3 add.u32 %r5, %r5, 5; @!%p1 st.global.u32 [%rd1], %r5;
        cvta.to.shared.u64 %rd8, %rd3; ld.shared.u32 %r6, [%rd8];""",
        [".u64 y"],
        ".shared .align 16 .b8 pad[48]; .shared .align 4 .b8 buffer[128]; .local .align 8 .b8 depot[8];" + POINTER_REGISTERS,
    )
    out = np.zeros(32, np.uint32)
    launch = run(text, {"y": out})
    lane = np.arange(32)
    want = np.where(lane % 4 == 1, 1, np.where(lane % 4 == 2, lane + 201, lane + 5))
    assert launch.findings == () and (out == want).all()


def test_one_store_to_several_tensors_and_spaces() -> None:
    text = pointer_kernel(
        """.shared .align 4 .b8 s[128]; shl.b64 %rd11, %rd10, 2; mov.u64 %rd3, s; cvta.shared.u64 %rd3, %rd3;
        and.b32 %r2, %r1, 3; setp.eq.u32 %p1, %r2, 1; setp.eq.u32 %p2, %r2, 2; add.s64 %rd6, %rd1, %rd11;
        add.s64 %rd7, %rd2, %rd11; add.s64 %rd8, %rd3, %rd11; selp.b64 %rd9, %rd7, %rd6, %p1; selp.b64 %rd9, %rd8, %rd9, %p2;
        st.u32 [%rd9], %r1; bar.sync 0; @%p2 ld.u32 %r3, [%rd8]; @%p2 add.u32 %r3, %r3, 100; @%p2 st.global.u32 [%rd6], %r3;""",
        "x",
        "y",
    )
    x, y = np.full(32, 999, np.uint32), np.full(32, 999, np.uint32)
    launch = run(text, {"x": x, "y": y})
    lane = np.arange(32)
    assert launch.findings == () and (y == np.where(lane % 4 == 1, lane, 999)).all()
    assert (x == np.choose(lane % 4, [lane, 999, lane + 100, lane])).all()
    assert (launch.traffic["x"].write_bytes, launch.traffic["y"].write_bytes) == (64 + 32, 32)


def test_local_memory_belongs_to_the_thread() -> None:
    body = """mov.u64 %rd2, depot; shl.b64 %rd3, %rd10, 2; and.b64 %rd3, %rd3, 28; add.s64 %rd4, %rd2, %rd3;
    st.local.u32 [depot], 5; st.local.u32 [%rd4], %r1; ld.local.u32 %r2, [depot];
    shl.b64 %rd11, %rd10, 2; add.s64 %rd1, %rd1, %rd11; st.global.u32 [%rd1], %r2;"""
    out = np.zeros(64, np.uint32)
    run(pointer_kernel(".local .align 4 .b8 depot[32];" + body, "y"), {"y": out}, block=32, grid=1)
    assert (out[:32] == np.where(np.arange(32) % 8 == 0, np.arange(32), 5)).all()


def test_module_variables_constants_and_pointers_between_them() -> None:
    text = pointer_kernel(
        """mov.u64 %rd2, table; shl.b64 %rd11, %rd10, 2; and.b64 %rd3, %rd11, 12; add.s64 %rd2, %rd2, %rd3;
        ld.const.u32 %r2, [%rd2]; ld.global.u64 %rd5, [link]; ld.global.f32 %f1, [%rd5]; cvt.rzi.u32.f32 %r3, %f1;
        add.u32 %r2, %r2, %r3; add.s64 %rd1, %rd1, %rd11; st.global.u32 [%rd1], %r2; atom.global.add.u32 %r4, [counter], 1;""",
        "y",
        extra=""".const .align 4 .u32 table[4] = {10, 20, 30, 0x28};
.global .align 4 .u32 counter;
.global .align 4 .f32 value[2] = {0f3F800000, 0f40400000};
.global .align 8 .u64 link[1] = {value+4};
""",
    )
    module, out = Module.from_ptx(text), np.zeros(32, np.uint32)
    for _ in range(2):
        launch = module.launch("k", 1, 32, {"y": out})
    assert launch.findings == () and (out == np.tile([13, 23, 33, 43], 8)).all()
    assert module.variable("counter").view(np.uint32)[0] == 64
    traffic = launch.counters.traffic
    assert traffic["counter"].write_bytes == 128 and traffic["table"].read_bytes == 128 and list(launch.traffic) == ["y"]


def test_dynamic_shared_memory_lies_behind_the_static_one() -> None:
    text = kernel(
        """ld.param.u64 %rd1, [y]; mov.u64 %rd2, small; mov.u64 %rd3, large; cvt.u32.u64 %r1, %rd2; cvt.u32.u64 %r2, %rd3;
        sub.u32 %r2, %r2, %r1; mov.u32 %r3, %dynamic_smem_size; st.global.v2.u32 [%rd1], {%r2, %r3};
        st.shared.u32 [large+60], 1;""",
        [".u64 y"],
        ".shared .align 4 .b8 small[20];" + POINTER_REGISTERS,
    ).replace(HEAD, HEAD + ".extern .shared .align 64 .b8 large[];\n")
    out = np.zeros(2, np.uint32)
    launch = run(text, {"y": out}, block=1, shared_bytes=64)
    assert out.tolist() == [64, 64] and launch.findings == ()
    assert run(text, {"y": out}, block=1, shared_bytes=32).findings[0].kind == "out of bounds"


# -- findings -----------------------------------------------------------------------------------------------------------


def test_out_of_bounds_names_tensor_place_and_lane() -> None:
    x, y = np.arange(30, dtype=np.uint32), np.full(32, 9, np.uint32)
    launch = run(COPY.replace("ld.global.u32", ".loc 1 42 3\nld.global.u32") + '\n.file 1 "/src/copy.cu"\n', {"x": x, "y": y})
    (finding,) = launch.findings
    assert (finding.kind, finding.tensor, finding.source) == ("out of bounds", "x", ("/src/copy.cu", 42))
    assert (finding.block, finding.warp, finding.lane) == (0, 0, 30) and launch.findings_total == 2
    assert "offset 120 of 'x', which has 120 bytes" in finding.message and finding.address is not None
    assert y.tolist() == [*range(30), 0, 0] and launch.traffic["x"].read_bytes == 120
    assert "copy.cu:42" in str(finding)


def test_access_before_the_start_is_charged_to_the_same_tensor() -> None:
    x, y = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    launch = run(COPY.replace("[%rd3]", "[%rd3+-8]"), {"x": x, "y": y})
    assert [(f.kind, f.tensor, f.lane) for f in launch.findings] == [("out of bounds", "x", 0)]
    assert "offset -8" in launch.findings[0].message and y.tolist() == [0, 0, *range(30)]


def test_one_byte_past_the_end() -> None:
    x, y = np.arange(31, dtype=np.uint8), np.zeros(32, np.uint32)
    body = """add.s64 %rd3, %rd1, %rd10; ld.global.u8 %r2, [%rd3]; shl.b64 %rd11, %rd10, 2; add.s64 %rd4, %rd2, %rd11;
    st.global.u32 [%rd4], %r2;"""
    launch = run(pointer_kernel(body, "x", "y"), {"x": x, "y": y})
    assert [(f.kind, f.lane) for f in launch.findings] == [("out of bounds", 31)] and y.tolist() == [*range(31), 0]
    assert run(pointer_kernel(body, "x", "y"), {"x": x, "y": y}, block=31).findings == ()


def test_misaligned_and_null_and_wild_pointers() -> None:
    x, y = np.arange(64, dtype=np.uint32), np.zeros(32, np.uint32)
    launch = run(COPY.replace("[%rd3]", "[%rd3+2]"), {"x": x, "y": y})
    assert [(f.kind, f.tensor) for f in launch.findings] == [("misaligned", "x")] and not y.any()
    launch = run(COPY, {"x": None, "y": y})
    assert [f.kind for f in launch.findings] == ["null pointer"] and launch.findings_total == 32
    launch = run(COPY, {"x": x, "y": 7 << 50})
    assert [(f.kind, f.tensor) for f in launch.findings] == [("out of bounds", None)]


def test_an_array_at_an_odd_place_is_misaligned() -> None:
    x = np.zeros(140, np.uint8)[2:134]
    y = np.zeros(32, np.uint32)
    assert [f.kind for f in run(COPY, {"x": x, "y": y}).findings] == ["misaligned"]
    # Memory that NumPy does not own keeps its real address.
    buffer = bytearray(256)
    foreign = np.frombuffer(buffer, np.uint8)
    skew = -foreign.ctypes.data % 4
    assert [f.kind for f in run(COPY, {"x": foreign[skew + 1 :][:132], "y": y}).findings] == ["misaligned"]
    assert run(COPY, {"x": foreign[skew:][:132], "y": y}).findings == ()


SHARED = """.shared .align 16 .b8 s[64]; shl.b32 %r2, %r1, 2; mov.u32 %r3, s; add.u32 %r3, %r3, %r2;
shl.b64 %rd11, %rd10, 2; add.s64 %rd3, %rd1, %rd11;"""


def test_shared_memory_out_of_bounds_and_misaligned() -> None:
    out = np.zeros(32, np.uint32)
    body = SHARED + "st.shared.u32 [%r3], 5; ld.shared.u32 %r4, [%r3]; st.global.u32 [%rd3], %r4;"
    launch = run(pointer_kernel(body, "y"), {"y": out})
    assert [(f.kind, f.lane, f.address) for f in launch.findings] == [("out of bounds", 16, 64)] * 2
    assert out.tolist() == [5] * 16 + [0] * 16
    launch = run(pointer_kernel(SHARED + "st.shared.u32 [%r3+2], 5;", "y"), {"y": out}, block=8)
    assert [(f.kind, f.lane) for f in launch.findings] == [("misaligned", 0)]


def test_reading_shared_memory_that_nobody_wrote() -> None:
    out = np.zeros(16, np.uint32)
    body = (
        SHARED
        + """setp.lt.u32 %p1, %r1, 10; @%p1 st.shared.u32 [%r3], %r1; bar.sync 0;
    ld.shared.u32 %r4, [%r3]; st.global.u32 [%rd3], %r4;"""
    )
    launch = run(pointer_kernel(body, "y"), {"y": out}, block=16, grid=3, races=False)
    assert [(f.kind, f.block, f.lane) for f in launch.findings] == [("uninitialised", 0, 10)]
    assert launch.findings_total == 18 and out[:10].tolist() == list(range(10))


def test_a_partly_written_word_is_uninitialised() -> None:
    body = """.shared .align 4 .b8 s[8]; st.shared.u16 [s], 1; st.shared.u16 [s+4], 1; st.shared.u16 [s+6], 1;
    ld.shared.u32 %r1, [s+4]; ld.shared.u32 %r2, [s];"""
    launch = run(kernel(body, [], POINTER_REGISTERS), {}, block=1)
    assert [(f.kind, f.address) for f in launch.findings] == [("uninitialised", 0)]


def test_findings_are_capped_but_counted() -> None:
    body = "".join(f"ld.global.u32 %r2, [%rd1+{4 * k}];\n" for k in range(150))
    launch = run(pointer_kernel(body, "x"), {"x": None})
    assert len(launch.findings) == 100 and launch.findings_total == 150 * 32


# -- counts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "sectors", "unique"), [(0, 1, 4), (1, 4, 128), (2, 8, 128), (8, 32, 128), (32, 32, 128)])
def test_sectors_and_unique_bytes(stride: int, sectors: int, unique: int) -> None:
    x = np.zeros(32 * 32 + 1, np.uint32)
    body = f"mul.lo.u64 %rd11, %rd10, {4 * stride}; add.s64 %rd3, %rd1, %rd11; ld.global.u32 %r2, [%rd3];"
    traffic = run(pointer_kernel(body, "x"), {"x": x}).traffic["x"]
    assert (traffic.read_sectors, traffic.unique_read_bytes, traffic.read_bytes, traffic.read_requests) == (sectors, unique, 128, 1)


def test_sectors_of_a_view_depend_on_its_offset() -> None:
    x, y = np.zeros(64, np.uint32), np.zeros(32, np.uint32)
    for offset, sectors in ((0, 4), (1, 5), (8, 4), (12, 5)):
        assert run(COPY, {"x": x[offset:], "y": y}).traffic["x"].read_sectors == sectors


def test_predicated_off_lanes_are_not_counted() -> None:
    x = np.zeros(64, np.uint32)
    body = """shl.b64 %rd11, %rd10, 2; add.s64 %rd3, %rd1, %rd11; setp.lt.u32 %p1, %r1, 40;
    @%p1 ld.global.u32 %r2, [%rd3]; setp.lt.u32 %p2, %r1, 32; @!%p2 st.global.u32 [%rd3], 1;"""
    traffic = run(pointer_kernel(body, "x"), {"x": x}, block=64).traffic["x"]
    assert (traffic.read_bytes, traffic.read_requests) == (160, 2)
    assert (traffic.write_bytes, traffic.write_requests) == (128, 1) and x[:32].sum() == 0 and x[32:].all()


@pytest.mark.parametrize(
    ("size", "stride", "wavefronts", "ideal"),
    [
        (4, 4, 1, 1),
        (4, 8, 2, 1),
        (4, 128, 32, 1),
        (4, 0, 1, 1),
        (4, 132, 1, 1),
        (8, 8, 2, 2),
        (16, 16, 4, 4),
        (16, 128, 32, 4),
        (2, 2, 1, 1),
    ],
)
def test_wavefronts_of_shared_memory(size: int, stride: int, wavefronts: int, ideal: int) -> None:
    suffix = {2: "u16", 4: "u32", 8: "v2.u32", 16: "v4.u32"}[size]
    value = {2: "%h1", 4: "%r5", 8: "{%r5, %r6}", 16: "{%r5, %r6, %r7, %r8}"}[size]
    body = f""".shared .align 16 .b8 s[8448]; mul.lo.u32 %r2, %r1, {stride}; mov.u32 %r3, s;
    add.u32 %r3, %r3, %r2; st.shared.{suffix} [%r3], {value};"""
    counts = run(pointer_kernel(body, "x"), {"x": None}, block=64).counters.shared_kind("st")
    assert (counts.wavefronts, counts.ideal_wavefronts, counts.requests) == (2 * wavefronts, 2 * ideal, 2)
    assert counts.bytes == 64 * size


def test_observer_sees_every_access() -> None:
    seen: list[Access] = []
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    run(COPY, {"x": x, "y": y}, observer=seen.append)
    read, write = [a for a in seen if a.space == "global"]
    assert not read.write and write.write and read.segment is not None and read.segment.name == "x"
    assert (read.addresses - read.addresses[0] == 4 * np.arange(32)).all() and read.size == 4 and read.lanes.n == 32


# -- loading ------------------------------------------------------------------------------------------------------------


def test_everything_unknown_is_listed_at_load() -> None:
    text = kernel(
        "frobnicate.b32 %r1, %r2;\nadd.u32 %r1, %r1, 1;\nadd.rn.u32 %r1, %r1, 1;\ntcgen05.wait::ld.sync.aligned;",
        [],
        POINTER_REGISTERS,
    )
    with pytest.raises(UnsupportedPTX) as caught:
        Module.from_ptx(text)
    first = text[: text.index("frobnicate")].count("\n") + 1
    assert [item[0] for item in caught.value.items] == [first, first + 2, first + 3]
    for part in ("frobnicate.b32 %r1, %r2", "add.rn.u32", "tcgen05", f"line {first}"):
        assert part in str(caught.value)


def test_hopper_instructions_are_listed_not_guessed() -> None:
    lines = [
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1;",
        "cp.async.bulk.tensor.2d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4], {%h1};",
        "st.async.mmio.release.gpu.global.u32 [%rd1], %r2;",
        "red.async.relaxed.cluster.global.add.u32 [%rd1], %r2;",
        ".reg .b128 %wide;",
        "mov.b128 %wide, {%rd1, %rd2};",
        "barrier.cluster.sync.aligned;",
        "tcgen05.fence::before_thread_sync;",
        "fma.rz.f64 %fd1, %fd1, %fd1, %fd1;",
    ]
    with pytest.raises(UnsupportedPTX) as caught:
        Module.from_ptx(kernel("\n".join(["add.u32 %r1, %r1, 1;", *lines, "sub.u32 %r1, %r1, 1;"]), [], POINTER_REGISTERS))
    numbers = [item[0] for item in caught.value.items]
    assert numbers == list(range(numbers[0], numbers[0] + len(lines)))


def test_text_that_is_no_ptx() -> None:
    for text in (
        "hello",
        kernel("add.u32 %r1, %r2", [], POINTER_REGISTERS).replace("ret;", ""),
        HEAD + ".visible .entry k()\n{ ret;",
    ):
        with pytest.raises(PtxError):
            Module.from_ptx(text)
    with pytest.raises(PtxError, match="no label NOWHERE"):
        run(kernel("bra NOWHERE;"), {})


def test_elementwise_text_is_what_it_says() -> None:
    text = elementwise("mov.b32 %d0, %a0;", [np.zeros(3, np.uint32)], [np.uint32])
    assert text.count(".param") == 6 and apply("mov.b32 %d0, %a0;", [np.arange(3, dtype=np.uint32)], [np.uint32])[0].tolist() == [
        0,
        1,
        2,
    ]
