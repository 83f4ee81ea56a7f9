"""Times decoding, a query of each sequence against its cache, beside its peers on the GPU at hand; a line of JSON a measurement:

    python benchmarks/decode.py [--out FOLDER] [--quick] [--budget SECONDS] [--dry-run]
    python benchmarks/decode.py --plan DEVICE [--quick]

In one run, on the same memory and stream: attention_decode with K and V of each sequence together, and in pages in a random order;
PyTorch's scaled_dot_product_attention with each backend that answers, `flash_attn_with_kvcache` and FlashInfer when they can be
imported. GB/s count K and V once; beside them stands the share of what a copy within device memory reaches here, read and written.

Without a GPU, `--plan` tells what is planned for the same cases on a device of the catalogue: splits, thread blocks, waves, bytes,
and bytes in flight. README.md has the format.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import checkout  # noqa: F401

# isort: split
import command
import numpy as np
from cases import TINY_DECODE, DecodeCase, decoding
from machine import Call, Machine, Simulated
from peers import Pages, TorchDecoding
from timing import Implementation, Pass, peers_of

import cupyflash
from cupyflash import Device
from cupyflash.arrays import MAX_ALIGNMENT
from cupyflash.basics import Report
from cupyflash.schedules import Cache, DecodeSchedule, Kernel, decode_tiles, plan_decode
from cupyflash.sim import theory

DEFAULT = "decode"
PAGE_SIZES = (16, 256)
COPY = 16  # bytes
COPY_BYTES = 1 << 31  # at most
COPIES = 9
# K and V are there once more for each page size, in float32 for the reference, and a half of that while it is made.
TIMES_IN_MEMORY = 1 + len(PAGE_SIZES) + 2 + 1
PLAN_MEMORY = 80e9  # of the devices that are planned for


def planned(device: Device, case: DecodeCase, page: int | None = None) -> DecodeSchedule:
    """The schedule that a call plans for contiguous arrays."""
    p = case.problem.asking(padded=True)
    bits = p.head_dim * p.itemsize | MAX_ALIGNMENT
    pages = 0 if page is None else case.batch * case.n // page
    return plan_decode(replace(p, alignment=bits & -bits), device, Cache(page_size=page, pages=pages))


def sizes(case: DecodeCase) -> tuple[int | None, ...]:
    """Page sizes that it is run with, None where K and V of a sequence lie together."""
    return (None, *(page for page in PAGE_SIZES if case.n % page == 0))


def name_of(page: int | None) -> str:
    return DEFAULT if page is None else f"{DEFAULT}, pages of {page}"


def copies(s: DecodeSchedule) -> int:
    """Copies of 16 bytes that a thread makes of a block of K and V, a turn of the main loop."""
    return -(-s.block_cols * decode_tiles.key_bytes(s.problem) // COPY // s.config.threads)


def facts(s: DecodeSchedule) -> Report:
    """The figures of a schedule: `in_flight` are the bytes of a multiprocessor that has the fewest thread blocks."""
    together = min(s.candidate.resident, max(1, s.grid // s.device.sm_count))
    return {
        "splits": s.splits,
        "blocks": s.grid,
        "waves": s.grid / s.device.sm_count / s.candidate.resident,
        "in_flight": decode_tiles.in_flight(s.problem, s.config, together),
        "loads_a_turn": copies(s),
        "model_seconds": s.candidate.seconds,
    }


def in_pages(xp: Any, cache: Any, table: Any, size: int) -> Any:
    """A cache (b, h_kv, n, d) in pages, those of `table` (b, pages of a sequence)."""
    batch, heads, n, d = cache.shape
    bits = cache.view({2: np.uint16, 4: np.uint32}[cache.dtype.itemsize])
    found = xp.empty((batch * n // size, heads, size, d), bits.dtype)
    found[table.reshape(-1)] = bits.reshape(batch, heads, n // size, size, d).swapaxes(1, 2).reshape(-1, heads, size, d)
    return found.view(cache.dtype)


def paged(machine: Machine, case: DecodeCase, arrays: Sequence[Any]) -> Iterator[Pages]:
    """The caches in pages of each size, in a random order."""
    random = np.random.default_rng(0)
    for size in sizes(case)[1:]:
        assert size is not None
        table = machine.xp.asarray(random.permutation(case.batch * case.n // size).astype(np.int32).reshape(case.batch, -1))
        yield Pages(*(in_pages(machine.xp, cache, table, size) for cache in arrays[1:]), table)


def ours(machine: Machine, case: DecodeCase, arrays: Sequence[Any]) -> Iterator[Implementation]:
    """O by cupyflash."""
    q, k, v, *layouts = arrays
    lengths = machine.xp.full(case.batch, case.n, np.int32)
    call = partial(cupyflash.attention_decode, q, k, v, lengths)
    yield Implementation(DEFAULT, call, ours=True, facts=facts(planned(machine.device, case)))
    for pages in layouts:
        call = partial(cupyflash.attention_decode, q, pages.k, pages.v, lengths, block_table=pages.table)
        says = facts(planned(machine.device, case, pages.size))
        yield Implementation(name_of(pages.size), call, ours=True, facts=says)


def kernels(device: Device, case: DecodeCase) -> Iterator[Kernel]:
    for page in sizes(case):
        yield from planned(device, case, page).kernels()


def reference(xp: Any, inputs: Sequence[Any], causal: bool) -> tuple[Any, ...]:
    """(O,) of q (b, h, 1, d), k and v (b, h_kv, n, d), in float32; the one query sees all keys."""
    q, k, v = inputs
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]) / np.float32(q.shape[-1] ** 0.5)
    S = xp.matmul(rows, k.swapaxes(-1, -2))
    S -= S.max(axis=-1, keepdims=True)
    xp.exp(S, out=S)
    S /= S.sum(axis=-1, keepdims=True)
    return (xp.matmul(S, v).reshape(q.shape),)


def theirs(machine: Machine, case: DecodeCase, arrays: Sequence[Any]) -> Iterator[tuple[str, Call]]:
    """PyTorch's and others' on these arrays, by name."""
    q, k, v, *layouts = arrays
    every = [each for pages in layouts for each in (pages.k, pages.v)]
    tables = [machine.xp.full(case.batch, case.n, np.int32), *(pages.table for pages in layouts)]
    floats, integers = machine.torch(q, k, v, *every), machine.torch(*tables)
    if floats and integers:
        lengths, *found = integers.tensors
        pairs = zip(floats.tensors[3::2], floats.tensors[4::2], found, strict=True)
        pages = [Pages(*each) for each in pairs]
        yield from TorchDecoding(floats.torch, *floats.tensors[:3], lengths, pages).calls()


def copied(machine: Machine) -> dict[str, float]:
    """GB/s of a copy within device memory, read and written: the median of several."""
    room = 1 << 16 if isinstance(machine, Simulated) else int(min(COPY_BYTES, machine.memory() // 4))
    arrays = machine.xp.zeros(room // 4, np.float32), machine.xp.empty(room // 4, np.float32)
    copy = partial(machine.xp.copyto, arrays[1], arrays[0])
    copy()
    seconds = statistics.median(machine.sample(copy).seconds for _ in range(COPIES))
    nbytes = arrays[0].nbytes
    del arrays, copy
    machine.release()
    return {"copy_gb_s": 2 * nbytes / seconds / 1e9}


def chosen(machine: Machine, quick: bool) -> Sequence[DecodeCase]:
    return decoding(quick, machine.memory() / TIMES_IN_MEMORY)


DECODE = Pass(
    "decode",
    1,
    3,
    ("O",),
    DEFAULT,
    ours,  # type: ignore[arg-type]
    peers_of(reference, 3, theirs),  # type: ignore[arg-type]
    reference,
    kernels,  # type: ignore[arg-type]
    chosen,
    TINY_DECODE,
    DecodeCase("float16", 64, 128, True, 1, 1, 1),
    1,
    paged,  # type: ignore[arg-type]
    copied,
)

PLAN_HEAD = (
    f"{'batch':>5}{'cache':>8}{'group':>6}{'pages of':>9}{'splits':>7}{'blocks':>8}{'waves':>7}{'kB in flight':>13}"
    f"{'loads':>6}{'MB':>10}{'parts':>7}{'us (model)':>11}"
)


def plan_line(case: DecodeCase, s: DecodeSchedule) -> str:
    """The line of a case's schedule, with the bytes of the closed form: all, and the share of partial results and block tables."""
    says, moved = facts(s), theory.traffic(s)
    beside = sum(each.total_bytes for name, each in moved.items() if name in ("O_part", "m_part", "l_part", "block_table"))
    total = moved.total_bytes
    cells = (
        f"{case.batch:>5}{case.n:>8}{case.heads // case.kv_heads:>6}{s.cache.page_size or '-':>9}",
        f"{says['splits']:>7}{says['blocks']:>8}{says['waves']:>7.2f}{says['in_flight'] / 1e3:>13.0f}{says['loads_a_turn']:>6}",
        f"{total / 1e6:>10.1f}{beside / total:>7.1%}{says['model_seconds'] * 1e6:>11.1f}",
    )
    return "".join(cells)


def plan_table(device: Device, quick: bool) -> Iterator[str]:
    """The schedules as a table for a reader."""
    needed = decode_tiles.needed_in_flight(device) / 1e3
    yield f"{device.name}: {device.sm_count} multiprocessors, each of which needs {needed:.0f} kB in flight"
    yield PLAN_HEAD
    for case in decoding(quick, PLAN_MEMORY / TIMES_IN_MEMORY):
        for page in sizes(case)[:2]:  # other pages make little difference
            yield plan_line(case, planned(device, case, page))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--plan", metavar="DEVICE")
    given, rest = parser.parse_known_args(argv)
    if given.plan is None:
        return command.main(__doc__, DECODE, argv)
    if rest not in ([], ["--quick"]):
        parser.error(f"--plan goes with --quick, got {' '.join(rest)}")
    for line in plan_table(Device.named(given.plan), bool(rest)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
