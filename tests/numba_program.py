"""Kernels of Numba for tests/test_numba.py."""

import math

from numba import cuda, float32


@cuda.jit(device=True)
def half_more(value):
    return value + value * math.tanh(value) / 2


@cuda.jit
def axpy(x, y, a):
    i = cuda.grid(1)
    if i < x.size:
        y[i] += a * half_more(x[i])


@cuda.jit
def row_sums(x, y):
    part = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for j in range(t, x.shape[1], 64):
        total += x[cuda.blockIdx.x, j]
    part[t] = total
    cuda.syncthreads()
    half = 32
    while half:
        if t < half:
            part[t] += part[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        y[cuda.blockIdx.x] = part[0]


@cuda.jit
def beyond(x, y):
    i = cuda.grid(1)
    y[i] = x[i]  # no guard


@cuda.jit
def unordered(x, y):
    part = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    part[t] = x[t]
    y[t] = part[63 - t]  # no barrier


@cuda.jit
def mixed(out, shape, z, flag, record):
    i = cuda.grid(1)
    if i < shape[0] and flag:
        cuda.atomic.add(out, 0, z.real + shape[1] + record["weight"])
