"""The clocks of a schedule's kernels, whose arrays hold zeros: what decides their time are addresses, not numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cupyflash.arrays import numpy_dtype
from cupyflash.launch import cubins
from cupyflash.launch.binding import argument_values
from cupyflash.launch.compiler import program
from cupyflash.launch.params import flat
from cupyflash.schedules import BackwardSchedule, Kernel, Schedule, TileSchedule
from cupyflash.sim import l2
from cupyflash.sim.execution import machine_value, module
from cupyflash.sim.ptx.parameters import BoundArguments, bind

from .execution import CodeLaunch, CubinKernel
from .loaded import LoadedLaunch
from .whole import Clock


def clocks(schedule: TileSchedule, mhz: float | None = None) -> Iterator[Clock]:
    """Yields the clock of each of a schedule's launches on its device, in their order.

    For forward and backward passes without options that have arrays. Raises as `Clock` does, RuntimeError without a disassembler.
    """
    values = argument_values(schedule, zeros(schedule))
    given = {name: machine_value(value) for name, value in flat(values).items()}
    heads = schedule.problem.batch * schedule.problem.heads
    dram: Mapping[str, float] | None = None
    for kernel in schedule.kernels():
        if not kernel.grid:
            continue
        period = kernel.grid // heads if kernel.grid % heads == 0 else None
        yield Clock(launched(kernel, schedule, given).launch, schedule.device, mhz, period=period, dram=dram)
        if kernel.grid == 1:  # it makes what the next one reads: the queue of its blocks
            dram = dram_shares(schedule)
            again = launched(kernel, schedule, given).launch
            for _ in again.run(again.index(0)):
                pass
            for tensor, space in zip(arguments(kernel, schedule, given).tensors, again.tensors, strict=True):
                tensor.array.reshape(-1).view(np.uint8)[:] = space.views[1][: space.size]


def dram_shares(schedule: TileSchedule) -> Mapping[str, float]:
    """The share of each tensor's loaded bytes that come from DRAM, by the L2's model of the whole launch (docs/l2.md).

    A queue's first blocks are the longest of all heads: what they load for the first time, many behind them load again.
    """
    found = l2.run(schedule)
    return {name: found.dram[name].read_bytes / max(moved.read_bytes, 1) for name, moved in found.asked.items()}


def launched(kernel: Kernel, schedule: Schedule, given: Mapping[str, Any]) -> LoadedLaunch:
    """Returns a launch of a kernel's machine code with the fields of its struct."""
    made = program(kernel, schedule.device.compute_capability)
    cubin = cubins.compiled(made._replace(options=(*made.options, "-lineinfo"))).code
    code, bound = CubinKernel.of(cubin, kernel.name), arguments(kernel, schedule, given)
    # An exit by numbers is that of rows whose L is not large (row_bases.cu).
    launch = CodeLaunch(code, (kernel.grid,), (kernel.threads,), bound, kernel.shared_bytes, lambda i: i.opcode == "EXIT")
    return LoadedLaunch(launch, cubin, {})


def arguments(kernel: Kernel, schedule: Schedule, given: Mapping[str, Any]) -> BoundArguments:
    """Returns a kernel's struct with some fields' values."""
    params = module(kernel, schedule.device.compute_capability).program.functions[kernel.name].params
    return bind(kernel.name, params, {"p": given}, ())


def zeros(schedule: TileSchedule) -> dict[str, np.ndarray]:
    """The arrays of a problem, results and workspaces by the kernels' names."""
    p, kind = schedule.problem, numpy_dtype(schedule.problem.dtype)
    rows, keys = (p.batch, p.heads, p.seqlen_q), (p.batch, p.kv_heads, p.seqlen_k)
    shapes = {"Q": (*rows, p.head_dim), "K": (*keys, p.head_dim), "V": (*keys, p.head_dim_v), "O": (*rows, p.head_dim_v)}
    if isinstance(schedule, BackwardSchedule):
        shapes |= {f"d{name}": shape for name, shape in shapes.items()}
    found = {name: np.zeros(shape, kind) for name, shape in shapes.items()}
    if isinstance(schedule, BackwardSchedule) or schedule.lse:
        found["L"] = np.zeros(rows, np.float32)
    return found | {name: np.zeros(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()}
