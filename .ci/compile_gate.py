#!/usr/bin/env python3
"""Compile every kernel to machine code for every architecture, without a GPU, and fail where one spills or has a stack.

    python .ci/compile_gate.py [--json FILE] [--markdown docs/kernels.md]

The kernels come from their schedules. What is compiled: for every architecture, dtype and head dimension the lightest and
the heaviest set of constants (no mask and 16-byte copies; every mask at once and the narrowest copies), on the tiling that
the device gets; and on some architectures each constant by itself, other tilings and a d of V that is not d.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cupyflash import Device, Problem, plan
from cupyflash.resources import Resources, resources
from cupyflash.schedules import ALGORITHMS, Kernel, Schedule, plan_softmax
from cupyflash.schedules.softmax import SOFTMAX_ALGORITHMS
from cupyflash.tiling import DoesNotFit, TilingChoice

# One device for each architecture.
DEVICES = tuple(Device.named(name) for name in ("T4", "A100-40GB", "A10", "L4", "H100-SXM", "B200", "RTX 5090"))
HEAD_DIMS = (16, 40, 64, 80, 96, 128, 192, 256)
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}
LIGHT: dict[str, Any] = {}
EACH: tuple[dict[str, Any], ...] = ({"causal": True}, {"mask": True}, {"bias": True}, {"padded": True})
HEAVY = {name: value for one in EACH for name, value in one.items()}
# Sub-tiles of 16, 32, 48 and 64 columns; one warp and eight.
TILINGS: tuple[TilingChoice, ...] = ((16, 16), (128, 32), (16, 48), (128, 64))
VALUE_DIMS = ((64, 128), (192, 128), (128, 40), (256, 16))
SOFTMAX_COLS = (2, 20, 1000, 5000)


@dataclass(frozen=True)
class Job:
    """Kernels that one compilation gives, for one architecture, and what they are for."""

    label: str
    kernels: tuple[Kernel, ...]
    device: Device


def attention_schedules(device: Device) -> Iterator[tuple[str, Schedule]]:
    """Every kind of attention kernel that a device has."""

    def posed(d: int, dtype: str, narrow: bool = False, tiling: TilingChoice = None, **constants: Any) -> tuple[str, Problem]:
        alignment = DTYPES[dtype] if narrow else 8 if d * DTYPES[dtype] % 16 else 16
        label = " ".join([f"d {d}", dtype, *constants, f"copies of {alignment}", *([f"tiling {tiling}"] if tiling else [])])
        return label, Problem(1, 1, 1, 4096, 4096, d, dtype, alignment=alignment, **constants)

    for algorithm in ALGORITHMS:
        problems = []
        for dtype in DTYPES:
            if dtype == "bfloat16" and device.compute_capability < (8, 0):
                continue
            for d in HEAD_DIMS:
                problems += [(*posed(d, dtype, **LIGHT), None), (*posed(d, dtype, narrow=True, **HEAVY), None)]
            if device.compute_capability in ((7, 5), (9, 0)) and dtype != "bfloat16":
                problems += [(*posed(128, dtype, **one), None) for one in EACH]
                problems += [(*posed(d, dtype, head_dim_v=value), None) for d, value in VALUE_DIMS]
                problems += [(*posed(64, dtype, tiling=tiling, **HEAVY), tiling) for tiling in TILINGS]
        for label, problem, tiling in problems:
            try:
                schedule = plan(problem, device, algorithm, tiling)
                schedule.kernels()
            except DoesNotFit:
                continue  # one of TILINGS on a small SRAM
            except ValueError:
                break  # an algorithm without a kernel
            yield f"{algorithm} {label}", schedule


def softmax_schedules(device: Device) -> Iterator[tuple[str, Schedule]]:
    """Softmax by one thread, by part of a warp, by a warp and by a block a row."""
    for dtype in DTYPES:
        if dtype == "bfloat16" and device.compute_capability < (8, 0):
            continue
        for algorithm in SOFTMAX_ALGORITHMS:
            yield f"softmax {dtype} down the columns", plan_softmax(10**6, 20, dtype, device, algorithm, adjacent_rows=True)
            for cols in SOFTMAX_COLS:
                yield f"softmax {dtype} {cols} columns", plan_softmax(1000, cols, dtype, device, algorithm)


def jobs() -> list[Job]:
    """What there is to compile, each program once for an architecture."""
    programs: dict[tuple[Any, ...], Job] = {}
    for device in DEVICES:
        for label, schedule in (*attention_schedules(device), *softmax_schedules(device)):
            for kernel in schedule.kernels():
                key = device, kernel.source, kernel.constants
                job = programs.get(key, Job(label, (), device))
                if kernel.name not in [each.name for each in job.kernels]:
                    programs[key] = Job(job.label, (*job.kernels, kernel), device)
    return list(programs.values())


def compiled(job: Job) -> tuple[Resources, ...]:
    return resources(job.kernels, job.device.compute_capability)


def table(found: list[tuple[Job, Resources]]) -> Iterator[str]:
    """A line for each kernel and architecture."""
    yield f"{'kernel':<20}{'device':<12}{'sm':>7}{'compiled':>10}{'registers':>12}{'with stack or spills':>22}"
    for name in dict.fromkeys(needs.name for _, needs in found):
        for device in DEVICES:
            rows = [needs for job, needs in found if needs.name == name and job.device == device]
            registers = f"{min(row.registers for row in rows)} to {max(row.registers for row in rows)}"
            dirty = sum(not row.clean for row in rows)
            yield f"{name:<20}{device.name:<12}{device.sm:>7}{len(rows):>10}{registers:>12}{dirty:>22}"


def rows(found: list[tuple[Job, Resources]]) -> list[dict[str, Any]]:
    """For JSON: every compiled kernel."""
    return [{"for": job.label, "device": job.device.name, "sm": job.device.sm} | asdict(needs) for job, needs in found]


def markdown() -> Iterator[str]:
    """docs/kernels.md: registers and occupancy of the configurations that are used by default."""
    from cupy.cuda import nvrtc

    yield "# Registers and occupancy"
    yield ""
    yield "What the kernels take of a multiprocessor, from their machine code (`ptxas -v` through NVRTC {}.{}; no GPU).".format(
        *nvrtc.getVersion()
    )
    yield "Written by `python .ci/compile_gate.py --markdown docs/kernels.md`; `cupyflash inspect` shows the same for any problem."
    yield ""
    yield "A cell: registers a thread / thread blocks that a multiprocessor holds / occupancy (resident warps over the most that"
    yield "it can hold). No kernel here has a stack or spills; the compile gate in `.ci/run` fails when one does. Algorithm 1 asks"
    yield "for as much shared memory as a block may have, so that one block fills a multiprocessor: few warps are the price of a"
    yield "large M."
    chosen = [(algorithm, dtype, d) for algorithm in ALGORITHMS for dtype in ("float16", "float32") for d in (64, 128, 256)]
    cells: dict[str, dict[str, list[str]]] = {}
    for algorithm, dtype, d in chosen:
        for device in DEVICES:
            try:
                kernels = plan(Problem(1, 1, 1, 4096, 4096, d, dtype), device, algorithm).kernels()
            except ValueError:  # an algorithm without a kernel
                continue
            for needs in resources(kernels, device.compute_capability):
                occupancy = needs.occupancy(device)
                cell = f"{needs.registers} / {occupancy.blocks} / {occupancy.fraction:.0%}"
                cells.setdefault(needs.name, {}).setdefault(f"{dtype}, d {d}", []).append(cell)
    for name, lines in cells.items():
        yield from ("", f"## {name}", "")
        yield "| | " + " | ".join(f"{device.name} ({device.sm})" for device in DEVICES) + " |"
        yield "| --- |" + " --- |" * len(DEVICES)
        for configuration, line in lines.items():
            yield f"| {configuration} | " + " | ".join(line) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every compiled kernel there")
    parser.add_argument("--markdown", type=Path, help="write the default configurations there, and compile nothing else")
    arguments = parser.parse_args()
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(markdown()) + "\n")
        return 0
    start, work = time.perf_counter(), jobs()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        accounts = list(pool.map(compiled, work, chunksize=4))
    found = [(job, needs) for job, account in zip(work, accounts, strict=True) for needs in account]
    print("\n".join(table(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows(found), indent=1) + "\n")
    dirty = [(job, needs) for job, needs in found if not needs.clean]
    for job, needs in dirty:
        print(
            f"{job.device.sm} {needs.name}, {job.label}: {needs.registers} registers, {needs.stack_bytes} bytes of stack, "
            f"{needs.spill_bytes} bytes of spills; {dict(job.kernels[0].constants)}"
        )
    print(f"{len(work)} programs, {len(found)} kernels, {len(dirty)} with stack or spills, {time.perf_counter() - start:.0f} s")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
