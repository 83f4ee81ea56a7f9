"""Arguments of a kernel: how they are packed, what does not fit, views and what may be written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_ptx_harness import COPY, POINTER_REGISTERS, kernel, run

from cupyflash.sim.ptx import Module


def test_scalars_are_packed_by_the_parameter() -> None:
    record = np.array([(3, 2.5)], np.dtype([("n", np.int32), ("x", np.float32)]))[0]
    text = kernel(
        """ld.param.u64 %rd1, [y]; ld.param.s32 %r1, [i]; ld.param.f32 %f1, [f]; ld.param.f64 %fd1, [d]; ld.param.u8 %h1, [b];
        ld.param.u32 %r2, [s]; ld.param.f32 %f2, [s+4]; ld.param.u64 %rd2, [none]; ld.param.v2.u32 {%r3, %r4}, [s];
        st.global.u32 [%rd1], %r1; st.global.f32 [%rd1+4], %f1; cvt.rn.f32.f64 %f3, %fd1; st.global.f32 [%rd1+8], %f3;
        cvt.u32.u16 %r5, %h1; st.global.u32 [%rd1+12], %r5; st.global.u32 [%rd1+16], %r2; st.global.f32 [%rd1+20], %f2;
        st.global.u32 [%rd1+24], %rd2; st.global.u32 [%rd1+28], %r4;
        mov.b64 %rd5, s; ld.param.u32 %r6, [%rd5]; cvta.param.u64 %rd6, %rd5; ld.u32 %r7, [%rd6]; add.u32 %r6, %r6, %r7;
        st.global.u32 [%rd1+32], %r6;""",
        [".u64 y", ".s32 i", ".f32 f", ".f64 d", ".u8 b", ".align 4 .b8 s[8]", ".u64 .ptr .align 1 none"],
        POINTER_REGISTERS,
    )
    out = np.zeros(9, np.uint32)
    args = {"y": out, "i": -5, "f": 1.5, "d": np.float64(0.25), "b": True, "s": record, "none": None}
    launch = run(text, args, block=1)
    floats = out.view(np.float32)
    assert launch.findings == () and set(launch.traffic) == {"y"}
    assert out[0] == 0xFFFFFFFB and floats[1] == 1.5 and floats[2] == 0.25 and out[3] == 1
    assert out[4] == 3 and floats[5] == 2.5 and out[6] == 0 and out[7] == out[5] and out[8] == 6


@pytest.mark.parametrize(
    ("value", "param", "error"),
    [
        (1.5, ".u32 v", TypeError),
        (np.zeros(3), ".u32 v", TypeError),
        (None, ".u32 v", TypeError),
        (1 << 33, ".u32 v", TypeError),
        (b"abc", ".align 4 .b8 v[8]", TypeError),
        ("text", ".u64 v", TypeError),
    ],
)
def test_arguments_that_do_not_fit(value: Any, param: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="'v'"):
        run(kernel("", [param]), {"v": value})


def test_number_of_arguments_and_launch_shape() -> None:
    module = Module.from_ptx(kernel("", [".u32 a"]))
    with pytest.raises(TypeError, match="takes 1 argument, got 2"):
        module.launch("k", 1, 32, [1, 2])
    with pytest.raises(ValueError, match="no_such"):
        module.launch("no_such", 1, 32, [1])
    with pytest.raises(ValueError, match="1024"):
        module.launch("k", 1, 2000, [1])
    with pytest.raises(ValueError, match="grid"):
        module.launch("k", 0, 32, [1])


def test_views_of_one_array_share_memory_and_are_counted_apart() -> None:
    whole = np.arange(64, dtype=np.uint32)
    launch = run(COPY, {"x": whole[:32], "y": whole[16:48]})
    assert (whole[16:48] == np.arange(32)).all()
    assert launch.traffic["x"].read_bytes == launch.traffic["y"].write_bytes == 128
    assert launch.traffic["x"].write_bytes == launch.traffic["y"].read_bytes == 0


def test_strided_views_are_valid_over_their_extent() -> None:
    whole = np.arange(64, dtype=np.uint32)
    out = np.zeros(32, np.uint32)
    launch = run(COPY, {"x": whole.reshape(32, 2)[:, 1], "y": out})
    # The view starts at the second element and ends with the last one: 63 elements.
    assert (out == whole[1:33]).all() and launch.findings == ()
    backwards = whole[::-1]
    launch = run(COPY, {"x": backwards, "y": out})
    assert out[0] == 63 and launch.findings[0].kind == "out of bounds"


def test_a_read_only_array_is_not_written() -> None:
    x, y = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    y.setflags(write=False)
    launch = run(COPY, {"x": x, "y": y})
    assert not y.any() and [f.kind for f in launch.findings] == ["read-only"] and launch.findings_total == 32
    assert launch.traffic["y"].write_bytes == 0
