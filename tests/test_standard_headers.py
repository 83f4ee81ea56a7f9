"""Kernels include the standard headers that they include under nvcc; a header that is missing is named, with where it is."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from cupyflash.launch.nvrtc import CompileError
from cupyflash.launch.standard_headers import HEADERS, OFFER, advice
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


def test_a_tensor_map_is_that_of_the_driver() -> None:
    """A parameter of cuda.h's type is as long and as aligned as the toolkit's."""
    code = """#include <cuda.h>
    extern "C" __global__ void k(int* x, const __grid_constant__ CUtensorMap map) {
        x[0] = sizeof(map); x[1] = alignof(CUtensorMap); x[2] = CUDA_VERSION; }"""
    x = np.zeros(3, np.int32)
    assert not Module.from_source(code).launch("k", 1, 1, [x, bytes(128)]).findings
    assert x[0] == 128 and x[1] == (64 if x[2] < 13000 else 128) and x[2] >= 12000


def test_raw_kernels_have_them_too() -> None:
    x = np.zeros(4, np.int32)
    code = '#include <cstdint>\nextern "C" __global__ void k(std::int32_t* x) { x[threadIdx.x] = INT32_MAX; }'
    RawKernel(code, "k")((1,), (4,), (x,))
    assert (x == 2**31 - 1).all()


@pytest.mark.wide
def test_cub_for_blocks_and_warps() -> None:
    code = """#include <cub/cub.cuh>
    extern "C" __global__ void k(const float* x, float* y) {
        __shared__ cub::BlockReduce<float, 64>::TempStorage temp;
        float sum = cub::BlockReduce<float, 64>(temp).Sum(x[threadIdx.x]);
        if (threadIdx.x == 0) *y = sum;
    }"""
    x, y = np.arange(64, dtype=np.float32), np.zeros(1, np.float32)
    assert not Module.from_source(code).launch("k", 1, 64, [x, y]).findings and y == x.sum()


@pytest.mark.parametrize(
    ("name", "where"), [("iostream", "cupyflash run"), ("time.h", "cupyflash run"), ("curand_kernel.h", "wheel nvidia-curand ")]
)
def test_a_header_that_is_missing_is_named_with_what_to_do(name: str, where: str) -> None:
    with pytest.raises(CompileError, match=where) as raised:
        Module.from_source(f'#include <{name}>\nextern "C" __global__ void k() {{}}')
    assert raised.value.advice.startswith(f"{name}: ") and raised.value.advice not in raised.value.log
    assert pickle.loads(pickle.dumps(raised.value)).advice == raised.value.advice


def test_a_toolkit_and_its_compiler_are_offered(tmp_path: Path) -> None:
    (tmp_path / "crt").mkdir()
    (tmp_path / "crt" / "mma.h").write_text("")
    log = 'a.cu(1): catastrophic error: cannot open source file "{}"'
    told = advice(log.format("crt/mma.h"), ["/nowhere", str(tmp_path)], nvcc=True)
    assert "wheel nvidia-cuda-crt" in told and f"-I {tmp_path}" in told and OFFER not in told
    assert advice(log.format("vector"), nvcc=True).endswith(OFFER) and OFFER not in advice(log.format("vector"))
    assert advice(log.format("my.h"), nvcc=True) == "my.h: -I says in which folder it is"
    assert advice('a.h(3): error: namespace "std" has no member "map"', nvcc=True) == OFFER
    assert not advice("a.cu(1): error: expected a ;", nvcc=True)
    assert "`cupyflash run`" in advice("a.cu(3): error: ... host functions are not allowed in JIT mode. Consider ...")
