"""The clocks of a schedule's kernels, whose arrays hold zeros: what decides their time are addresses, not numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np

from cupyflash.arrays import numpy_dtype
from cupyflash.basics import Array, Report, Values
from cupyflash.launch import cubins
from cupyflash.launch.binding import argument_values
from cupyflash.launch.compiler import program
from cupyflash.launch.params import flat
from cupyflash.request.dropout import Dropout
from cupyflash.request.options import MIXED, VECTORS
from cupyflash.request.score import captured_values
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, Kernel, Schedule, TileSchedule, Walk
from cupyflash.schedules.moves import Totals
from cupyflash.sim import l2
from cupyflash.sim.execution import machine_value, module
from cupyflash.sim.numbers.yardstick import DROPPED, NOTHING_GIVEN, draw_mask, draw_score
from cupyflash.sim.ptx.parameters import BoundArguments, bind

from .execution import CodeLaunch, CubinKernel
from .loaded import LoadedLaunch
from .whole import Clock


def clocks(schedule: TileSchedule, mhz: float | None = None, given: Values = NOTHING_GIVEN) -> Iterator[Clock]:
    """Yields the clocks of `loaded_clocks`."""
    return (clock for clock, _ in loaded_clocks(schedule, mhz, given))


def loaded_clocks(
    schedule: TileSchedule, mhz: float | None = None, given: Values = NOTHING_GIVEN
) -> Iterator[tuple[Clock, LoadedLaunch]]:
    """Yields each of a schedule's launches on its device with its clock, in their order.

    `given`: values that score and mask functions capture, by name; others are drawn. ValueError for packed sequences; raises as
    `Clock` does, RuntimeError without a disassembler.
    """
    if schedule.problem.options.packed:
        raise ValueError("packed sequences have no clock")
    values = argument_values(schedule, contents(schedule, given))
    fields = {name: machine_value(value) for name, value in flat(values).items()}
    dram: Mapping[str, float] | None = None
    queued = False
    for walk, kernel in zip(schedule.walks(), schedule.kernels(), strict=True):
        if not kernel.grid:
            continue
        period = period_of(walk, kernel, schedule)
        loaded = launched(kernel, schedule, fields)
        clock = Clock(loaded.launch, schedule.device, mhz, period=period, dram=dram)
        clock.queued, queued = queued, isinstance(walk, Totals)
        yield clock, loaded
        if queued:  # it makes what the next one reads: the queue of its blocks
            with suppress(l2.TooLong):  # then the share is that of the blocks that the chip has first
                dram = dram_shares(schedule)
            again = launched(kernel, schedule, fields).launch
            for _ in again.run(*(again.index(block) for block in range(kernel.grid))):
                pass
            for tensor, space in zip(arguments(kernel, schedule, fields).tensors, again.tensors, strict=True):
                tensor.array.reshape(-1).view(np.uint8)[:] = space.views[1][: space.size]


def period_of(walk: Walk | Totals, kernel: Kernel, schedule: TileSchedule) -> int | None:
    """Returns the number of blocks after which a kernel's work repeats itself, those of a head, or of the heads whose blocks
    alternate; None where heads or sequences differ, or blocks are not a head's."""
    p = schedule.problem
    lengths, pattern, kept = p.options.key_lengths or (), p.options.pattern, p.options.block_mask
    planes = [one.shape[:2] for one in (pattern, kept) if one is not None]
    if not isinstance(walk, Walk) or len(set(lengths)) > 1 or any(each != (1, 1) for each in planes):
        return None
    heads = p.batch * walk.key_heads * (walk.group if "g" in walk.block else 1)
    return kernel.grid // heads * walk.alternate if heads and kernel.grid % heads == 0 and heads % walk.alternate == 0 else None


def dram_shares(schedule: TileSchedule) -> Mapping[str, float]:
    """The share of each tensor's loaded bytes that come from DRAM, by the L2's model of the whole launch (docs/l2.md).

    A queue's first blocks are the longest of all heads: what they load for the first time, many behind them load again.
    """
    found = l2.run(schedule)
    return {name: found.dram[name].read_bytes / max(moved.read_bytes, 1) for name, moved in found.asked.items()}


def launched(kernel: Kernel, schedule: Schedule, given: Values) -> LoadedLaunch:
    """Returns a launch of a kernel's machine code with the fields of its struct."""
    made = program(kernel, schedule.device.compute_capability)
    cubin = cubins.compiled(made._replace(options=(*made.options, "-lineinfo"))).code
    code, bound = CubinKernel.of(cubin, kernel.name), arguments(kernel, schedule, given)
    # An exit by numbers is that of rows whose L is not large (row_bases.cu).
    shape, cluster = ((kernel.grid,), (kernel.threads,)), (kernel.cluster,)
    launch = CodeLaunch(code, *shape, bound, kernel.shared_bytes, lambda i: i.opcode == "EXIT", cluster)
    return LoadedLaunch(launch, cubin, {made.name: made.source})


def arguments(kernel: Kernel, schedule: Schedule, given: Values) -> BoundArguments:
    """Returns a kernel's struct with some fields' values."""
    params = module(kernel, schedule.device.compute_capability).program.functions[kernel.name].params
    return bind(kernel.name, params, {"p": given}, ())


def contents(schedule: TileSchedule, given: Values = NOTHING_GIVEN) -> Report:
    """The arrays of a schedule's call, results and workspaces too, and its own numbers, by the names of the kernels' struct.

    Arrays hold zeros, but for lengths, pages, block masks and the states of a mask's tiles, which say what is visited: all where
    the host does not know them.
    """
    p, kind = schedule.problem, numpy_dtype(schedule.problem.dtype)
    rows = p.batch, p.heads, p.seqlen_q
    found: Report = {} if not isinstance(schedule, DecodeSchedule) else cache_of(schedule)
    keys = rows_of_keys(schedule)
    shapes = {"Q": (*rows, p.head_dim), "K": (*keys, p.head_dim), "V": (*keys, p.head_dim_v), "O": (*rows, p.head_dim_v)}
    if isinstance(schedule, BackwardSchedule):
        shapes |= {f"d{name}": shape for name, shape in shapes.items()}
    found |= {name: np.zeros(shape, kind) for name, shape in shapes.items()}
    found["L"] = np.zeros(rows, np.float32) if isinstance(schedule, BackwardSchedule) or schedule.lse else None
    found |= {name: np.zeros(p.heads, np.float32) for name in VECTORS if getattr(p.options, name)}
    if isinstance(schedule, BackwardSchedule):
        found |= {name: np.zeros(rows, np.float32) for name in schedule.row_results}
        found |= {"dbias": np.zeros((*rows, p.seqlen_k), np.float32)} if schedule.dbias else {}
    if p.options.bias:
        found["bias"] = np.zeros((*rows, p.seqlen_k), numpy_dtype(p.bias_dtype))
    if p.options.mask:
        found["mask"] = np.zeros((*rows, p.seqlen_k), bool)
    if p.options.block_mask is not None:
        found["block_mask"] = p.options.block_mask.kept
    if p.options.padded:
        found["key_lengths"] = np.array(p.keys_of_each, np.int32)
    arrays, numbers = captured_values(draw_score(p, given=given), draw_mask(p, given=given))
    dropped = Dropout(DROPPED, 0, 0).numbers if p.options.dropout else {}
    spaces = {name: np.zeros(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()}
    return found | arrays | dict(numbers) | dropped | spaces | states_of(schedule)


def cache_of(schedule: DecodeSchedule) -> dict[str, Array]:
    """The arrays of a cache beside K and V; pages follow one another."""
    p, cache, kind = schedule.problem, schedule.cache, numpy_dtype(schedule.problem.dtype)
    found = {"cache_seqlens": np.array(schedule.cached, np.int32)}
    if cache.page_size:
        pages = p.seqlen_k // cache.page_size
        found["block_table"] = np.arange(p.batch * pages, dtype=np.int32).reshape(p.batch, pages)
    if cache.appended:
        new = (p.batch, p.kv_heads, cache.appended)
        found |= {"K_new": np.zeros((*new, p.head_dim), kind), "V_new": np.zeros((*new, p.head_dim_v), kind)}
    return found | ({"tree_mask": np.ones((p.batch, p.seqlen_q, p.seqlen_q), bool)} if cache.tree else {})


def rows_of_keys(schedule: TileSchedule) -> tuple[int, ...]:
    """The axes of K and V before d."""
    p = schedule.problem
    if isinstance(schedule, DecodeSchedule) and schedule.cache.page_size:
        return schedule.cache.pages, p.kv_heads, schedule.cache.page_size
    return p.batch, p.kv_heads, p.seqlen_k


def states_of(schedule: TileSchedule) -> dict[str, Array]:
    """The states of a mask's tiles; mixed ones where the host does not know them."""
    found = {}
    for one in (schedule, *getattr(schedule, "beside", ())):
        for tiles in one.mask_tiles:
            states = np.uint8(MIXED) if tiles.states is None else tiles.states
            found[tiles.field] = np.array(np.broadcast_to(states, tiles.shape))
    return found
