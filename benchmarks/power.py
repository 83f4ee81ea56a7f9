"""Clock rate and power of the GPU at hand under loads that keep one kind of unit busy:

    python benchmarks/power.py [--out FOLDER] [--seconds S] [--dry-run]

A line of JSON a load: the clock rate that a multiprocessor kept and how it fell, by clock64 beside globaltimer; watts by NVML's
counter of energy, and those that it takes at once; the work that was done. 16 s, by CuPy and NVRTC alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from checkout import ROOT

# isort: split
from command import folder, surroundings, writing
from machine import Nvml, gpu_versions, stand_in
from rate_chips import HOPPER, Chip, Gpu, Launch, Simulated
from records import Records, told

from cupyflash import Device
from cupyflash.basics import Array, Report

ROOM, HOPPER_ROOM = 98304, 196608  # power.cu's
SECONDS, SETTLED, POLL_SECONDS = 0.85, 0.4, 0.004  # of a load; the share of it after which power is steady
SAMPLES, APART_NS = 3000, 300_000
LINES_REHEARSED = 1 << 12
SHOWN = 0, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7  # seconds at which the rate is told


@dataclass(frozen=True)
class Load:
    """A kernel of power.cu: threads, the kind of its numbers, chunks of a stretch, clocks between two, 16-byte lines of a block."""

    name: str
    kernel: str
    threads: int = 512
    numbers: str = "bits"
    chunks: int = 8
    pause: int = 0
    lines: int = 0


LOADS = (
    Load("nothing", "nothing", 32, chunks=10),
    Load("ffma", "ffma"),
    Load("special", "special", chunks=4),
    Load("shared", "shared_reads"),
    Load("l2", "global_reads", chunks=4, lines=1 << 13),
    Load("dram", "global_reads", chunks=4, lines=1 << 19),
    Load("mma", "mma", numbers="normal"),
    Load("mma, half", "mma", numbers="normal", pause=12_000),
)
HOPPER_LOADS = (
    Load("wgmma", "wgmma", 256, "normal"),
    Load("wgmma, zeros", "wgmma", 256, "zeros"),
    Load("wgmma, A in registers", "wgmma_registers", 256, "normal"),
    Load("wgmma, half", "wgmma", 256, "normal", pause=32_768),
    Load("wgmma, a third", "wgmma", 256, "normal", pause=65_536),
    Load("wgmma, 1 ms and 1 ms of a pause", "wgmma", 256, "normal", 480, 1_900_000),
)


def source(hopper: bool) -> str:
    """CUDA C of power.cu, with wgmma's products, whose sums are 128 operands."""
    if not hopper:
        return (ROOT / "benchmarks" / "power.cu").read_text()
    sums, names, head = ", ".join(f'"+f"(d[{i}])' for i in range(128)), ", ".join(f"%{i}" for i in range(128)), ""
    registers = ", ".join(f'"r"(a[{i}])' for i in range(4))
    for product, factors, given, more in (
        ("PRODUCT", "%128, %129, p, 1, 1, 0, 1", '"l"(a), "l"(b)', "%130"),
        ("PRODUCT_OF_REGISTERS", "{%128, %129, %130, %131}, %132, p, 1, 1, 1", f'{registers}, "l"(b)', "%133"),
    ):
        wgmma = f"wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {{{names}}}, {factors};"
        ptx = f"{{.reg .pred p; setp.ne.b32 p, {more}, 0; {wgmma}}}"
        head += f'#define {product}(d, a, b, more) asm volatile("{ptx}" : {sums} : {given}, "r"(more))\n'
    return head + (ROOT / "benchmarks" / "power.cu").read_text()


def room(device: Device) -> int:
    """Bytes of shared memory that hold a load's numbers."""
    return HOPPER_ROOM if device.compute_capability == HOPPER else ROOM


class Meter:
    """Watts while the device works: NVML polled by a thread, with the seconds since its begin."""

    def __init__(self, nvml: Nvml | None) -> None:
        self.nvml, self.found, self.over = nvml, list[tuple[float, int | None, int | None]](), threading.Event()
        self.thread = threading.Thread(target=self.poll)

    def __enter__(self) -> Meter:
        self.begun = time.perf_counter()
        self.thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.over.set()
        self.thread.join()

    def poll(self) -> None:
        while self.nvml is not None and not self.over.wait(POLL_SECONDS):
            self.found.append((time.perf_counter() - self.begun, self.nvml.millijoules(), self.nvml.milliwatts()))

    def told(self, seconds: float) -> Report:
        """Watts once they are steady: from the energy between two changes of its counter, and the mean of momentary readings."""
        late = [each for each in self.found if each[0] > SETTLED * seconds and None not in each[1:]]
        edges = [b for a, b in pairwise(late) if a[1] != b[1]]
        first, last = (edges[0], edges[-1]) if len(edges) > 1 else ((0, 0, 0), (1, 0, 0))
        by_energy = (last[1] - first[1]) / 1e3 / (last[0] - first[0]) if len(edges) > 1 else None
        return {"watts": by_energy, "watts at once": sum(each[2] for each in late) / len(late) / 1e3 if late else None}


def measure(chip: Chip, launch: Launch, load: Load, seconds: float, numbers: Any, nvml: Nvml | None) -> Report:
    """Runs a load on all multiprocessors; its line."""
    blocks = chip.size(chip.device.sm_count, 2)
    series, stretches = chip.out(4 * SAMPLES), chip.out(1)
    sink = chip.zeros(4 * blocks * load.threads)
    duration, chunks, pause = chip.size(int(seconds * 1e9), 500), chip.size(load.chunks, 1), chip.size(load.pause, load.pause and 1)
    lines = np.int64(chip.size(load.lines, min(load.lines, LINES_REHEARSED)))
    sizes = np.int32(chunks), np.int32(pause), np.int32(SAMPLES), np.int32(chip.size(APART_NS, 0))
    chip.check()
    with Meter(nvml) as meter:
        launch(
            (blocks,), (load.threads,), (series, stretches, numbers, sink, lines, np.uint64(duration), *sizes), room(chip.device)
        )
        chip.check()
    taken = chip.get(series).reshape(-1, 4)
    return told_series(taken[taken[:, 3] > 0], SETTLED * seconds) | {
        "stretches": int(chip.get(stretches)[0]),
        **meter.told(seconds),
    }


def told_series(taken: Array, settled: float) -> Report:
    """MHz of a series: over all behind `settled` seconds, the median of stretches of work there, and how it went from the begin."""
    at = (taken[:, 1] - taken[0, 1]) / 1e9
    late = taken[at >= min(settled, at[-1] / 2)]
    busy = 1e3 * (late[:, 2] - late[:, 0]) / np.maximum(late[:, 3] - late[:, 1], 1)
    mhz = 1e3 * (late[-1, 2] - late[0, 0]) / max(late[-1, 3] - late[0, 1], 1)
    falls = [[float(at[k]), round(1e3 * float(b[0] - a[0]) / max(float(b[1] - a[1]), 1.0))] for k, a, b in shown(at, taken)]
    whole = {"clocks": int(taken[-1, 2] - taken[0, 0]), "seconds": float(taken[-1, 3] - taken[0, 1]) / 1e9}
    return {"mhz": float(mhz), "busy mhz": float(np.median(busy)), "falls": falls, **whole}


def shown(at: Array, taken: Array) -> list[tuple[int, Array, Array]]:
    """The samples behind the times that are told, each with the next one."""
    places = dict.fromkeys(int(k) for k in np.searchsorted(at, SHOWN) if k + 1 < len(at))
    return [(k, taken[k], taken[k + 1]) for k in places]


def main(argv: Sequence[str] | None = None) -> int:
    parser = writing(__doc__, "the PTX machine")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of each load ({SECONDS})")
    given = parser.parse_args(argv)
    dry = given.dry_run
    device = stand_in() if dry else Device.current()
    chip, nvml = (Simulated(), None) if dry else (Gpu(), Nvml.of_current())
    random, status, size = np.random.default_rng(1), 0, room(device)
    normal = (random.standard_normal(size // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
    bits = random.integers(0, 1 << 32, size // 4, np.uint32)
    numbers = {"normal": normal.view(np.uint8), "bits": bits.view(np.uint8), "zeros": np.zeros(size, np.uint8)}
    kernels = chip.load(source(device.compute_capability == HOPPER))
    with Records(folder(given), f"{'simulated ' if dry else ''}{device.name} power") as records:
        records.write("run", surroundings(device, dict if dry else gpu_versions) | {"what": "power", "simulated": dry})
        for load in (*LOADS, *(HOPPER_LOADS if device.compute_capability == HOPPER else ())):
            try:
                lines = chip.size(load.lines * device.sm_count, 2 * LINES_REHEARSED)
                given_numbers = chip.put(np.resize(numbers[load.numbers], max(size, 16 * lines)))
                line = measure(chip, kernels(load.kernel), load, given.seconds, given_numbers, nvml)
                print(f"{load.name:36} {line['mhz']:6.0f} MHz {line['watts'] or float('nan'):6.0f} W", flush=True)
            except Exception as error:
                line, status = {"error": told(error)}, 1
                print(f"{load.name:36} {line['error']}", flush=True)
            records.write("power", {"load": load.name, "chunks": load.chunks, "pause": load.pause, **line})
        records.write("end", {"reason": "done"})
    return status


if __name__ == "__main__":
    sys.exit(main())
