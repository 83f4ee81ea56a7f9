"""The waves of a launch in several processes: each runs some of them on its own copy of memory, and returns its results.

The race detector's record shows afterwards if waves were independent: if no process touched what another one wrote, all of them
together did what one process does, wave after wave. Otherwise, or if there is anything to report, their results are discarded,
and the caller runs the launch by itself. So the outcome is the same for any number of processes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from dataclasses import dataclass
from itertools import combinations
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from ..decode.registry import FunctionCall
from ..state.segments import UNWRITTEN, WRITTEN, Segment
from ..text.syntax import Array, PtxInstruction
from .ptx_machine import PtxMachine

VARIABLE = "CUPYFLASH_PROCESSES"
"""Environment variable: the number of processes for launches that give none."""

TABLES = ("traffic", "shared", "distributed")
COUNTS = ("predicated_off", "divergent")


@dataclass
class Done:
    """The results of a process. By segment number: `contents` of those that it wrote, and `unwritten`, masks of unwritten bytes.

    `touched`: masks of the granules of a tensor, by its address: those that were written, and those that anybody touched.
    `executed`: warps and threads of each region. `tally`: the tables of the tally, by name.
    """

    executed: dict[tuple[int, bool], tuple[int, int]]
    tally: dict[str, dict[Any, Any]]
    barriers: int
    touched: dict[int, tuple[Array, Array]]
    contents: dict[int, Array]
    unwritten: dict[int, Array]


def run_apart(machine: PtxMachine, processes: int) -> bool:
    """Runs a launch in up to so many processes; False: nothing has happened, it must be run in this one."""
    count = min(processes, machine.waves, cores())
    if count < 2 or not may_run_apart(machine):
        return False
    found = results(machine, count)
    if found is None or not independent(found):
        return False
    changes = [change for number in machine.memory.segments for change in changed(machine.memory.segments[number], number, found)]
    if any(meet(view, [at for at, _ in parts]) for view, parts in changes):
        return False
    for view, parts in changes:
        for at, values in parts:
            view[at] = values
    machine.code.forget_counts()
    for done in found:
        add(machine, done)
    machine.tally.waves = machine.waves
    return True


def processes_asked(processes: int | None) -> int:
    """Returns the number of an argument, or of the environment. Raises ValueError for a wrong one."""
    name, value = ("processes", processes) if processes is not None else (VARIABLE, os.environ.get(VARIABLE, "1"))
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    return int(value)


def cores() -> int:
    """Returns the processors that this process may use; 1 if it cannot be copied safely."""
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" and alone else 1


def may_run_apart(machine: PtxMachine) -> bool:
    """True if waves may run apart: there is no observer, and no block of one can wait for a block of another."""
    code, memory = machine.code, machine.memory
    looks_on = machine.on_barrier is not None or memory.observer is not None
    limits = machine.setup.limits
    limited = (limits.max_instructions, limits.max_seconds, limits.forecast) != (None, None, None)
    if machine.random is not None or looks_on or memory.races is None or limited:
        return False
    if memory.races.launches is not None:
        return False
    if any_shared([(one.address, one.address + one.size) for one in memory.segments.values()]):
        return False
    return not (
        code.communicates
        or any(i.opcode == "red" or (i.opcode == "cp" and "reduce" in i.mods) for i in code.instructions)
        or any(isinstance(plan.control, FunctionCall) and plan.control.builtin for plan in code.plans)
    )


def any_shared(ranges: list[tuple[int, int]]) -> bool:
    """True if any of these addresses is of memory that processes share after a fork, as a mapped file is (Linux)."""
    mappings = (line.split(maxsplit=2)[:2] for line in Path("/proc/self/maps").read_text().splitlines())
    shared = [[int(end, 16) for end in place.split("-")] for place, permissions in mappings if permissions.endswith("s")]
    return any(low < end and begin < high for low, high in ranges for begin, end in shared)


# -- in the other processes ------------------------------------------------------------------------------------------------------


def work(machine: PtxMachine, part: int, of: int, pipe: Connection) -> None:
    """Runs the waves of one process, and sends the results; an empty message if nobody may use them."""
    names = {id(i): ("instruction", k) for k, i in enumerate(machine.code.instructions)}
    names |= {id(segment): ("segment", number) for number, segment in machine.memory.segments.items()}

    class Out(pickle.Pickler):
        def persistent_id(self, item: object) -> tuple[str, int] | None:
            return names[id(item)] if isinstance(item, PtxInstruction | Segment) else None

    message = io.BytesIO()
    try:
        if machine.run(part, of) and machine.clean():
            Out(message, pickle.HIGHEST_PROTOCOL).dump(done_by(machine))
    except (Exception, KeyboardInterrupt):
        message = io.BytesIO()  # the caller's own run will say what is wrong
    pipe.send_bytes(message.getbuffer())
    pipe.close()


def done_by(machine: PtxMachine) -> Done:
    tally, memory, races = machine.tally, machine.memory, machine.memory.races
    assert races is not None
    if machine.asked_time:
        raise RuntimeError("clocks go on from wave to wave")
    wrote = {number: one for number, one in memory.segments.items() if tally.wrote(one)}
    return Done(
        {key: (region.executed, region.threads) for key, region in machine.code.regions.items() if region.executed},
        {name: dict(getattr(tally, name)) for name in (*TABLES, *COUNTS)},
        tally.barriers,
        {area.low: area.shadow.touched() for _, area in races.touched()},
        {number: one.window(1)[0] for number, one in wrote.items()},
        {number: one.state for number, one in wrote.items() if one.state is not None},
    )


# -- in this one -----------------------------------------------------------------------------------------------------------------


def results(machine: PtxMachine, count: int) -> list[Done] | None:
    """Returns the results of `count` processes; None if any has something to report, could not begin, or did not end."""
    instructions, segments = machine.code.instructions, machine.memory.segments

    class In(pickle.Unpickler):
        def persistent_load(self, name: tuple[str, int]) -> object:
            return (instructions if name[0] == "instruction" else segments)[name[1]]

    context = multiprocessing.get_context("fork")
    children, pipes = [], []
    found: dict[Any, Done] = {}
    try:
        for part in range(count):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=work, args=(machine, part, count, theirs), daemon=True)
            with warnings.catch_warnings():
                # The warning is about threads of a BLAS, which handles forks; there are no others (`cores`).
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            theirs.close()
            children.append(child)
            pipes.append(mine)
        while len(found) < count:
            for pipe in wait([one for one in pipes if one not in found]):
                try:
                    message = pipe.recv_bytes()  # type: ignore[union-attr]
                except EOFError:
                    message = b""
                if not message:
                    return None
                found[pipe] = In(io.BytesIO(message)).load()
        return [found[pipe] for pipe in pipes]
    except OSError:  # no process or pipe more, or one that was killed within its message
        return None
    finally:
        for child in children:
            child.kill()
            child.join()
        for pipe in pipes:
            pipe.close()


def independent(found: list[Done]) -> bool:
    """True if no process touched what another one wrote."""
    for one, other in combinations(found, 2):
        for low in one.touched.keys() & other.touched.keys():
            (wrote, touched), (wrote_too, touched_too) = one.touched[low], other.touched[low]
            if (wrote & touched_too).any() or (wrote_too & touched).any():
                return False
    return True


def meet(view: Array, places: list[Array]) -> bool:
    """True if two of these sets of places have one in common."""
    count = np.zeros(len(view), np.uint8)
    for at in places:
        count[at] += 1
    return bool((count > 1).any())


Change = tuple[Array, list[tuple[Array, Array]]]
"""Bytes, and for each process the places where it changed them, and the new values."""


def changed(segment: Segment, number: int, found: list[Done]) -> list[Change]:
    """Returns the processes' changes of a tensor, and of the states of its bytes; the tensor itself is as it was."""
    view = segment.window(1)[0]
    parts = [(np.flatnonzero(new != view), new) for done in found if (new := done.contents.get(number)) is not None]
    out: list[Change] = [(view, [(at, new[at]) for at, new in parts])]
    if segment.state is not None:
        states = [done.unwritten[number] for done in found if number in done.unwritten]
        now = [np.flatnonzero((state == WRITTEN) & (segment.state == UNWRITTEN)) for state in states]
        out.append((segment.state, [(at, np.full(len(at), WRITTEN, np.uint8)) for at in now]))
    return out


def add(machine: PtxMachine, done: Done) -> None:
    """Adds the results of a process to the counts of the launch."""
    tally = machine.tally
    for key, (warps, threads) in done.executed.items():
        region = machine.code.region(*key)
        region.executed += warps
        region.threads += threads
    for name in TABLES:
        mine = getattr(tally, name)
        for key, counts in done.tally[name].items():
            mine[key].add(counts)
    for name in COUNTS:
        mine = getattr(tally, name)
        for key, number in done.tally[name].items():
            mine[key] += number
    tally.barriers += done.barriers
