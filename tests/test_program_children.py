"""Kernels that launch kernels, under the runtime of `cupyflash run`: order, races, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import compile_cuda

from cupyflash.device import Device
from cupyflash.sim import ptx
from cupyflash.sim.program.errors import ErrorCode
from cupyflash.sim.program.launches import BudgetSpent
from cupyflash.sim.program.runtime import Runtime
from cupyflash.sim.program.streams import Settings
from cupyflash.sim.program.symbols import Image, LaunchRequest, ProgramKernel

HEAD = """
extern "C" __device__ void* __cudaCDP2GetParameterBufferV2(void*, dim3, dim3, unsigned);
extern "C" __device__ int __cudaCDP2LaunchDeviceV2(void*, size_t);
extern "C" __device__ int __cudaCDP2StreamCreateWithFlags(size_t*, unsigned);
extern "C" __device__ int __cudaCDP2EventCreateWithFlags(size_t*, unsigned);
extern "C" __device__ int __cudaCDP2EventRecord(size_t, size_t);
extern "C" __device__ int __cudaCDP2StreamWaitEvent(size_t, size_t, unsigned);
extern "C" __device__ int __cudaCDP2MemsetAsync(void*, int, size_t, size_t);
enum { TAIL = 3, FORGET = 4 };
__device__ int call(void (*kernel)(int*, int), int threads, int* x, int value, size_t stream = 0) {
    char* buffer = (char*)__cudaCDP2GetParameterBufferV2((void*)kernel, dim3(1), dim3(threads), 0);
    if (!buffer) return -1;
    *(int**)buffer = x;
    *(int*)(buffer + 8) = value;
    return __cudaCDP2LaunchDeviceV2(buffer, stream);
}
extern "C" __global__ void add(int* x, int value) { x[threadIdx.x] += value; }
extern "C" __global__ void twice(int* x, int) { x[threadIdx.x] *= 2; }
"""


def made(**settings: float) -> Runtime:
    channel: Any = SimpleNamespace(print=lambda text: None)
    return Runtime(channel, Device.named("A100-40GB"), 13, [], set(), Settings(**settings))  # type: ignore[arg-type]


def ran(
    kernels: str, *launches: tuple[str, int, int], runtime: Runtime | None = None
) -> tuple[list[int], list[ptx.Finding], Runtime]:
    """Runs the launches (kernel, threads, value) with one array of 32 zeros; returns the array, the findings, the runtime."""
    runtime = runtime or made()
    image = Image([], 80, runtime.memory)
    image.__dict__["module"] = compile_cuda(HEAD + kernels)
    block = runtime.memory.allocate(128)
    runtime.memory.fill(block.address, 0, 128)
    try:
        for name, threads, value in launches:
            data = block.address.to_bytes(8, "little") + value.to_bytes(4, "little")
            runtime.run(LaunchRequest(ProgramKernel(image, name), (1, 1, 1), (threads, 1, 1), 0, data), runtime.legacy.stream)
        values = np.frombuffer(runtime.memory.read(block.address, 128), np.int32).tolist()
    finally:
        runtime.memory.close()
    return values, [one for record in runtime.records.values() for one in record.findings.values()], runtime


def test_launches_are_ordered_as_their_streams_say() -> None:
    """A child after its parent's write, children of one block in turn, the tail behind all, a grandchild before the next launch."""
    kernels = """
    extern "C" __global__ void nested(int* x, int value) { if (!threadIdx.x) call(add, 32, x, value); }
    extern "C" __global__ void parent(int* x, int value) {
        x[threadIdx.x] = 1;
        __syncthreads();
        if (threadIdx.x) return;
        call(add, 32, x, 1000, TAIL);
        call(nested, 32, x, value);
        call(twice, 32, x, 0);
    }"""
    values, findings, runtime = ran(kernels, ("parent", 32, 4), ("add", 32, 7))
    assert values == [2 * (1 + 4) + 1000 + 7] * 32 and not findings
    assert {name: one.launches for name, one in runtime.records.items()} == {"parent": 1, "nested": 1, "add": 3, "twice": 1}


def test_events_order_streams_of_the_device() -> None:
    kernels = """
    extern "C" __global__ void parent(int* x, int wait) {
        size_t first, second, event;
        __cudaCDP2StreamCreateWithFlags(&first, 1);
        __cudaCDP2StreamCreateWithFlags(&second, 1);
        __cudaCDP2EventCreateWithFlags(&event, 0);
        __cudaCDP2MemsetAsync(x, 1, 4, first);
        call(add, 1, x, 4, first);
        __cudaCDP2EventRecord(event, first);
        if (wait) __cudaCDP2StreamWaitEvent(second, event, 0);
        call(twice, 1, x, 0, second);
    }"""
    values, findings, _ = ran(kernels, ("parent", 1, 1))
    assert values[0] == 2 * (0x01010101 + 4) and not findings
    assert {one.kind for one in ran(kernels, ("parent", 1, 0))[1]} == {"race"}


RACES = {
    "a write behind the launch": ("call(add, 1, x, 1); x[0] = 5;", 1, "launched this one"),
    "another thread's write": ("if (threadIdx.x) x[0] = 5; else call(add, 1, x, 1);", 2, "launched this one"),
    "two that are let go": ("call(add, 1, x, 1, FORGET); call(twice, 1, x, 0, FORGET);", 1, "another stream"),
    "a barrier between": ("if (threadIdx.x) x[0] = 5; __syncthreads(); if (!threadIdx.x) call(add, 1, x, 1);", 64, ""),
    "a write before": ("x[0] = 5; call(add, 1, x, 1);", 1, ""),
}


@pytest.mark.parametrize("case", RACES)
def test_what_nothing_orders_is_a_race(case: str) -> None:
    body, threads, why = RACES[case]
    _, findings, _ = ran(f'extern "C" __global__ void parent(int* x, int) {{ {body} }}', ("parent", threads, 0))
    mine = [one for one in findings if one.kernel in ("add", "twice")]
    assert {one.kind for one in mine} == ({"race"} if why else set()) and all(why in one.message for one in mine)


def test_a_launch_that_a_device_refuses_returns_its_error() -> None:
    kernels = 'extern "C" __global__ void parent(int* x, int threads) { x[0] = call(add, threads, x, 1); }'
    values, findings, runtime = ran(kernels, ("parent", 1, 2000))
    assert values[0] == ErrorCode.INVALID_CONFIGURATION and not findings and "add" not in runtime.records


def test_a_launch_of_no_kernel_is_a_finding() -> None:
    kernels = 'extern "C" __global__ void parent(int* x, int) { call((void (*)(int*, int))x, 1, x, 1); }'
    _, (finding,), runtime = ran(kernels, ("parent", 1, 0))
    assert finding.kind == "bad call" and "no kernel" in finding.message and runtime.sticky == ErrorCode.LAUNCH_FAILURE


def test_without_a_program_a_launch_says_where_it_works() -> None:
    module = compile_cuda(HEAD + 'extern "C" __global__ void parent(int* x, int) { call(add, 1, x, 1); }')
    (finding,) = module.launch("parent", 1, 1, [np.zeros(1, np.int32), np.int32(0)]).findings
    assert finding.kind == "bad call" and "cupyflash run" in finding.message


def test_the_programs_time_ends_a_child_too() -> None:
    kernels = """
    extern "C" __global__ void wait(volatile int* x, int) { while (!x[0]); }
    extern "C" __global__ void parent(int* x, int) { call((void (*)(int*, int))wait, 1, x, 0); }"""
    runtime = made(max_seconds=0.2)
    with pytest.raises(BudgetSpent):
        ran(kernels, ("parent", 1, 0), runtime=runtime)
    assert {name: one.unfinished for name, one in runtime.records.items()} == {"parent": False, "wait": True}
