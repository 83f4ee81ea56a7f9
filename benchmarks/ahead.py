"""Compiles kernels by several processes before any is needed: what they leave in CuPy's disk cache is quick to load."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from records import told

from cupyflash.schedules import Kernel

MOST_PROCESSES = 16


def compile_for_gpu(kernel: Kernel) -> None:
    """Compiles and loads a kernel for the current GPU."""
    import cupy

    from cupyflash.compiler import gpu_kernel

    gpu_kernel(kernel, cupy.cuda.runtime.getDevice())


def processes() -> Executor:
    """New processes, since a CUDA context does not survive a fork, and threads compile one at a time."""
    return ProcessPoolExecutor(min(os.cpu_count() or 1, MOST_PROCESSES), mp_context=get_context("spawn"))


def compile_all(
    kernels: Iterable[Kernel], seconds: float, executor: Executor, compile_one: Callable[[Kernel], None] = compile_for_gpu
) -> dict[str, Any]:
    """How many kernels were compiled in how long, and the first error there was. What is not done in `seconds` is left."""
    begun, errors, done = time.monotonic(), [], 0
    with executor:
        futures = [executor.submit(compile_one, kernel) for kernel in kernels]
        try:
            for future in as_completed(futures, timeout=seconds):
                error = future.exception()
                done += error is None
                errors += [told(error)] if error else []
        except TimeoutError:
            executor.shutdown(wait=False, cancel_futures=True)
    found = {"kernels": len(futures), "compiled": done, "seconds": time.monotonic() - begun}
    return found | ({"errors": len(errors), "first_error": errors[0]} if errors else {})
