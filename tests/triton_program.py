"""Kernels of Triton for tests/test_triton.py, and a program that asks for a GPU as such programs do."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def add_strided(x, y, out, n, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at * stride, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def add_without_a_mask(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at) + tl.load(y + at)  # unmasked load
    tl.store(out + at, total)  # unmasked store


@triton.jit
def add_by_table(table, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(table).to(tl.pointer_type(tl.float32))
    y = tl.load(table + 1).to(tl.pointer_type(tl.float32))
    out = tl.load(table + 2).to(tl.pointer_type(tl.float32))
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


@triton.jit
def show(x, BLOCK: tl.constexpr):
    value = tl.load(x + tl.arange(0, BLOCK))
    tl.device_print("value", value)
    tl.device_assert(value < 31, "too large")


@triton.jit
def copy_tiles(x, out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    out.store(at, x.load(at))


@triton.jit
def copy_made_tiles(x, out, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    at = [tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N]
    source = tl.make_tensor_descriptor(x, shape=[rows, cols], strides=[cols, 1], block_shape=[BLOCK_M, BLOCK_N])
    to = tl.make_tensor_descriptor(out, shape=[rows, cols], strides=[cols, 1], block_shape=[BLOCK_M, BLOCK_N])
    to.store(at, source.load(at))


@triton.jit
def sums(x, out, M: tl.constexpr, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + tl.arange(0, M), tl.sum(value, 1))
    tl.store(out + M + tl.arange(0, N), tl.sum(value, 0))


@triton.jit
def meet(count, seen, blocks, BLOCK: tl.constexpr):
    """Each program waits until all have come, and copies what the next one wrote."""
    me, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(seen + me * BLOCK + at, me + at)
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="acq_rel")
    while tl.atomic_add(count, 0, sem="acq_rel") < blocks:
        pass
    tl.debug_barrier()
    tl.store(seen + (blocks + me) * BLOCK + at, tl.load(seen + (me + 1) % blocks * BLOCK + at, volatile=True))


if __name__ == "__main__":
    a, b = torch.rand(1000, device="cuda"), torch.rand(1000).cuda()
    c = torch.empty_like(a)
    device = triton.runtime.driver.active.get_active_torch_device()
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), device)
    assert a.device == b.device == device
    add[(triton.cdiv(1000, 256),)](a, b, c, 1000, BLOCK=256)
    assert torch.equal(c, a + b)
    print("right")
