"""Kernels of CuTe DSL for tests/test_cute.py."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

BLOCK = 64


@cute.kernel
def double_kernel(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * BLOCK + cute.arch.thread_idx()[0]
    if i < n:
        y[i] = x[i] + x[i]


@cute.jit
def double(x: cute.Tensor, y: cute.Tensor, n: cutlass.Int32):
    double_kernel(x, y, n).launch(grid=[(n + BLOCK - 1) // BLOCK, 1, 1], block=[BLOCK, 1, 1])


def compiled(x, y, n):
    """Returns `double` compiled for vectors of any size."""
    x, y = (from_dlpack(one, enable_tvm_ffi=True).mark_layout_dynamic() for one in (x, y))
    return cute.compile(double, x, y, n)
