"""Compiles kernels by several processes before any is needed: what they leave in CuPy's disk cache is quick to load.

    python benchmarks/ahead.py --out FILE.jsonl --budget SECONDS [--dry-run]

does so for the problems that a GPU is asked first (tests/gpu/first.py), and adds a line to the file. A dry run compiles to PTX what
a few of them launch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from checkout import ROOT

# isort: split
from machine import stand_in
from records import Records, told

from cupyflash import Device
from cupyflash.basics import Report
from cupyflash.schedules import Kernel
from cupyflash.schedules.base import DoesNotFit

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
MOST_PROCESSES = 16
DRY_SHARE = 40  # of a dry run: every so many-th


def compile_for_gpu(kernel: Kernel) -> None:
    """Compiles and loads a kernel for the current GPU."""
    import cupy

    from cupyflash.launch.compiler import gpu_kernel

    gpu_kernel(kernel, cupy.cuda.runtime.getDevice())


def processes() -> Executor:
    """New processes, since a CUDA context does not survive a fork, and threads compile one at a time."""
    return ProcessPoolExecutor(min(os.cpu_count() or 1, MOST_PROCESSES), mp_context=get_context("spawn"))


def compile_all(
    kernels: Iterable[Kernel], seconds: float, executor: Executor, compile_one: Callable[[Kernel], None] = compile_for_gpu
) -> Report:
    """Compile kernels for at most `seconds`: how many were compiled, in what time, and the first error. The others are left out."""
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


def needed(device: Device) -> Iterator[Kernel]:
    """A kernel of each binary that the first problems need, in their order."""
    from first import FIRST

    seen = set()
    for asked in FIRST:
        with suppress(DoesNotFit):
            for kernel in () if asked.lacking(device) else asked.kernels(device):
                if (binary := (kernel.source, kernel.constants)) not in seen:
                    seen.add(binary)
                    yield kernel


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a .jsonl file to add to")
    parser.add_argument("--budget", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--dry-run", action="store_true", help="to PTX, no GPU")
    given = parser.parse_args(argv)
    with Records(given.out, "ahead") as records:
        if given.dry_run:
            from cupyflash.launch.compiler import ptx

            device = stand_in()
            few = list(needed(device))[::DRY_SHARE]
            to_ptx = lambda kernel: ptx(kernel, device.compute_capability) and None  # noqa: E731
            found = records.extra("compiled ahead", lambda: compile_all(few, given.budget, ThreadPoolExecutor(1), to_ptx))
        else:
            kernels = list(needed(Device.current()))
            found = records.extra("compiled ahead", lambda: compile_all(kernels, given.budget, processes()))
    print(f"compiled ahead: {found}", flush=True)
    return int(found is None or "errors" in found)


if __name__ == "__main__":
    sys.exit(main())
