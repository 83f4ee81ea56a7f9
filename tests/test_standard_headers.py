"""Kernels include the standard headers that they include under nvcc; a header that is missing is named, with where it is."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.launch.nvrtc import CompileError
from cupyflash.launch.standard_headers import HEADERS
from cupyflash.sim.ptx import Module, RawKernel
from suites import sample

pytest.importorskip("cupy")

USUAL = ["assert.h", "cmath", "cstdint", "float.h", "limits", "limits.h", "stddef.h", "stdint.h", "stdio.h", "type_traits"]
KERNEL = """
template <typename T> __device__ typename std::enable_if<std::is_same<T, float>::value, T>::type least() {
    return std::numeric_limits<T>::lowest();
}
extern "C" __global__ void k(uint8_t* a, std::uint64_t* b, float* c, size_t n) {
    assert(n > 3);
    a[0] = CHAR_BIT + INT8_MAX;
    b[0] = std::numeric_limits<std::uint64_t>::max() - UINT_MAX;
    c[0] = fmaxf(least<float>(), FLT_MAX);
    c[1] = (float)M_PI + std::abs(-1.0f) + std::sqrt(4.0f);
    c[2] = INFINITY;
    printf("%d %zu\\n", INT_MAX, n);
}
"""


def test_a_kernel_includes_them_and_uses_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    module = Module.from_source("".join(f"#include <{name}>\n" for name in USUAL) + KERNEL)
    a, b, c = np.zeros(1, np.uint8), np.zeros(1, np.uint64), np.zeros(3, np.float32)
    launch = module.launch("k", 1, 1, [a, b, c, 4])
    assert not launch.findings
    assert (a[0], b[0], c[0], c[2]) == (135, 2**64 - 2**32, np.finfo(np.float32).max, np.inf)
    assert c[1] == np.float32(np.pi) + 3
    assert capsys.readouterr().out == "2147483647 4\n"
    (finding,) = module.launch("k", 1, 1, [a, b, c, 3]).findings
    assert finding.kind == "trap" and "n > 3" in finding.message


@pytest.mark.parametrize("name", sample(HEADERS, ["math.h", "string.h"]))
def test_each_header_stands_alone(name: str) -> None:
    Module.from_source(f'#include <{name}>\n#include <{name}>\nextern "C" __global__ void k(int* x) {{ x[0] = 1; }}')


def test_raw_kernels_have_them_too() -> None:
    x = np.zeros(4, np.int32)
    code = '#include <cstdint>\nextern "C" __global__ void k(std::int32_t* x) { x[threadIdx.x] = INT32_MAX; }'
    RawKernel(code, "k")((1,), (4,), (x,))
    assert (x == 2**31 - 1).all()


@pytest.mark.parametrize(("name", "where"), [("iostream", "cupyflash run"), ("curand_kernel.h", "nvidia-curand")])
def test_a_header_that_is_missing_is_named_with_what_to_do(name: str, where: str) -> None:
    with pytest.raises(CompileError, match=where):
        Module.from_source(f'#include <{name}>\nextern "C" __global__ void k() {{}}')
