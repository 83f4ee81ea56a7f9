"""Times attention over several devices beside one device; each rank is a process with a GPU, rank 0 writes a line of JSON a figure:

    mpiexec -n RANKS python -m mpi4py benchmarks/ring.py [--out FOLDER] [--quick] [--budget SECONDS] [--mpi]
    python benchmarks/ring.py --plan DEVICE [--ranks P] [--link RATE] [--quick]
    python benchmarks/ring.py --dry-run

A ring (zigzag and contiguous) and gathered K and V, forward and backward, over NCCL where each rank of a machine has a GPU of its
own, else over MPI (`--mpi`: in any case). A time is that of the slowest rank from a common start to its last result. The efficiency
is what rank 0's device alone takes for the whole problem, over ranks times that; where one device has no room for it, what it would
take by the time of a problem of half the length, times four. Beside it stands what `cupyflash predict --ranks` says of it.

Without GPUs `--plan` tells for the same cases on a device of the catalogue, by counts and models: work, calls, bytes, memory, the
share of the ideal. `--dry-run` runs every line on the simulated device, with two threads for ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

# isort: split
import report
from cases import GroupedCase
from command import completed, measuring, surroundings
from machine import Gpu, Machine, Simulated
from records import Budget, Records, told

import cupyflash
from cupyflash import Device
from cupyflash.basics import Report
from cupyflash.distributed import ring_attention, ring_attention_backward, shard, threads
from cupyflash.distributed.communicator import Communicator, as_communicator
from cupyflash.sim.cli.commands.problems import DEFAULT_LINK, bytes_a_second
from cupyflash.sim.clock.known import PLANNER, own_error
from cupyflash.sim.clock.ring_model import RingModel, ring_of

LENGTHS, HEADS, KV_HEADS, DIM = (131072, 65536, 262144, 32768), 32, 8, 128
REPEATS = 5
ROOM = 12  # arrays of Q's size that a device has room for, to run the whole problem
RANKS_PLANNED = (2, 4, 8, 16)
# Relative RMS of O against one device's: both are rounded to half precision.
MOST_APART = 0.01


@dataclass(frozen=True)
class Way:
    """One way to split a sequence."""

    layout: str
    gather: bool

    def __str__(self) -> str:
        return f"{'gathered' if self.gather else 'ring'}, {self.layout}"


WAYS = (Way("zigzag", False), Way("contiguous", False), Way("zigzag", True))
TINY = GroupedCase("float16", 16, 96, True, 1, 2, 1)


def cases(quick: bool) -> list[GroupedCase]:
    """The most important first."""
    every = [GroupedCase("bfloat16", DIM, n, causal, 1, HEADS, KV_HEADS) for causal in (True, False) for n in LENGTHS]
    return every[:2] if quick else every


def model(case: GroupedCase, ranks: int, way: Way, device: Device, link: float, backward: bool) -> RingModel:
    return RingModel(ring_of(case.problem, ranks, way.layout, way.gather), case.problem, device, link, backward)


# -- by counts ----------------------------------------------------------------------------------------------------------

PLAN_HEAD = (
    f"{'N':>8}{'causal':>8}{'ranks':>7}  {'way':<18}{'pass':<10}{'balance':>8}{'calls':>7}{'received MB':>13}{'HBM GB':>9}"
    f"{'memory MB':>11}{'ms (model)':>12}{'count':>8}{'model':>8}"
)


def plan_line(found: RingModel, way: Way) -> str:
    """The busiest rank's counts, and the share of the ideal by count of work and transfers, and by the models."""
    ring, rank = found.ring, found.busiest
    calls = sum(len(step.pieces) for step in ring.steps(rank))
    count, modelled = (f"{share or 0:>8.1%}" for share in (found.efficiency_by_count, found.efficiency))
    which = "backward" if found.backward else "forward"
    cells = (
        f"{ring.n_q:>8}{'yes' if ring.causal else 'no':>8}{ring.ranks:>7}  {way!s:<18}{which:<10}",
        f"{found.balance:>8.1%}{calls:>7}{found.link_bytes[rank][1] / 1e6:>13.1f}{found.hbm(rank).total_bytes / 1e9:>9.1f}",
        f"{sum(found.memory(rank).values()) / 1e6:>11.1f}{found.seconds * 1e3:>12.3f}{count}{modelled}",
    )
    return "".join(cells)


def plan_table(device: Device, ranks: Sequence[int], link: float, quick: bool) -> Iterator[str]:
    """The plan as a table for a reader."""
    yield f"{device.name}, {link / 1e9:g} GB/s each way: by counts and the planner's formulas, nothing is measured"
    yield ", ".join(str(own_error(PLANNER, each)) for each in ("forward", "backward"))
    yield PLAN_HEAD
    for case in cases(quick):
        for number in ranks:
            for way in WAYS:
                for backward in (False, True):
                    yield plan_line(model(case, number, way, device, link, backward), way)


# -- by the clock -------------------------------------------------------------------------------------------------------


def slowest(comm: Communicator, machine: Machine, call: Callable[[], Any], repeats: int) -> float:
    """The median of what the slowest rank takes from a common start."""
    times = []
    for _ in range(repeats):
        machine.wait()
        comm.gather(b"")
        begun = perf_counter()
        call()
        machine.wait()
        times.append(max(gathered(comm, perf_counter() - begun)))
    return statistics.median(times)


def gathered(comm: Communicator, value: Any) -> list[Any]:
    """The values of all ranks."""
    return [json.loads(each) for each in comm.gather(json.dumps(value).encode())]


class Ranks:
    """A rank's side of the measurement: all ranks do the same, in the same order."""

    def __init__(self, comm: Any, machine: Machine, link: float, repeats: int) -> None:
        self.given, self.comm, self.machine = comm, as_communicator(comm), machine
        self.link, self.repeats = link, repeats

    def measure(self, case: GroupedCase) -> Iterator[Report]:
        """A line for each way and pass; on one rank all lines are whole."""
        alone = self.agreed(lambda: self.one_device(case))
        whole = self.machine.draw(case, 0, 4)
        for way in WAYS:
            q, k, v, dout = (shard(array, self.given, way.layout) for array in whole)
            asked = {"causal": case.causal, "layout": way.layout, "gather_kv": way.gather}
            out, lse = ring_attention(q, k, v, self.given, return_lse=True, **asked)
            apart = max(gathered(self.comm, self.apart(case, whole, out, way)))
            calls = {
                "forward": partial(ring_attention, q, k, v, self.given, **asked),
                "backward": partial(ring_attention_backward, dout, q, k, v, out, lse, self.given, **asked),
            }
            for name, call in calls.items():
                call()  # compiles
                seconds, one = slowest(self.comm, self.machine, call, self.repeats), alone[name]
                predicted = model(case, self.comm.size, way, self.machine.device, self.link, name == "backward")
                yield {
                    "case": asdict(case),
                    "way": str(way),
                    "pass": name,
                    "ranks": self.comm.size,
                    "seconds": seconds,
                    "one_device_seconds": one,
                    "one_device_length": alone["length"],
                    "efficiency": one / (self.comm.size * seconds),
                    "apart": apart,
                    "right": apart <= MOST_APART,
                    "predicted": {
                        "seconds": predicted.seconds,
                        "efficiency": predicted.efficiency,
                        "by_count": predicted.efficiency_by_count,
                        "link_bytes_a_second": self.link,
                    },
                }

    def one_device(self, case: GroupedCase) -> dict[str, float]:
        """The times on rank 0's device alone, for the whole problem or the longest part for which it has room."""
        length = case.n
        while ROOM * case.tensor_bytes * length // case.n > self.machine.memory() and length > 1:
            length //= 2
        q, k, v, dout = self.machine.draw(replace(case, n=length), 0, 4)
        out, lse = cupyflash.attention(q, k, v, causal=case.causal, return_lse=True)
        calls: dict[str, Callable[[], Any]] = {
            "forward": partial(cupyflash.attention, q, k, v, causal=case.causal),
            "backward": partial(cupyflash.attention_backward, dout, q, k, v, out, lse, causal=case.causal),
        }
        found: dict[str, float] = {"length": length}
        for name, call in calls.items():
            call()
            once = statistics.median(self.machine.sample(call).seconds for _ in range(self.repeats))
            found[name] = once * (case.n / length) ** 2
        self.machine.release()
        return found

    def agreed(self, find: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The result of rank 0, for which the others wait."""
        found: dict[str, float] = gathered(self.comm, find() if self.comm.rank == 0 else None)[0]
        return found

    def apart(self, case: GroupedCase, whole: Sequence[Any], out: Any, way: Way) -> float:
        """Relative RMS between this rank's last rows of O and one device's of the same rows."""
        last = min(64, out.shape[-2])
        own = shard(self.machine.xp.arange(case.n)[:, None], self.given, way.layout)[-last:, 0]
        first, end = int(own[0]), int(own[-1]) + 1
        if end - first != last:  # of two chunks: those of the second
            first = end - 1
        keys = end if case.causal else case.n
        rows = whole[0][..., first:end, :]
        expected = cupyflash.attention(rows, *(x[..., :keys, :] for x in whole[1:3]), causal=case.causal)
        ours, theirs = (self.machine.as_float32(x) for x in (out[..., out.shape[-2] - (end - first) :, :], expected))
        return float(((ours - theirs) ** 2).mean() ** 0.5 / (theirs**2).mean() ** 0.5)


def on_rank(comm: Any, machine: Machine, given: argparse.Namespace, records: Records | None) -> int:
    """Everything, on one rank; exit status 1 where something is wrong."""
    ranks, budget, status = Ranks(comm, machine, given.link, 2 if given.dry_run else REPEATS), Budget(given.budget), 0
    for case in [TINY] if given.dry_run else cases(given.quick):
        if ranks.agreed(lambda: {"left": budget.left()})["left"] <= 0:
            if records:
                records.write("left_out", {"cases": [str(case)], "reason": "no time was left"})
            continue
        for row in ranks.measure(case):
            status |= not row["right"]
            if records:
                records.write("ring", row)
                print(report.ring_line(row), flush=True)
    if records:
        records.write("end", {"reason": "done", "seconds": budget.spent()})
    return int(status)


def dry(given: argparse.Namespace) -> int:
    """Two ranks that are threads, on the simulated device."""
    with Simulated() as machine, opened(machine, given, 2, "threads") as records:
        return max(threads(2, lambda comm: on_rank(comm, machine, given, records if comm.rank == 0 else None)))


def opened(machine: Machine, given: argparse.Namespace, ranks: int, transport: str) -> Records:
    """The file, with its head."""
    name = f"{'simulated ' if given.dry_run else ''}{machine.device.name} ring"
    records = Records(given.out, name)
    header = {"what": "ring", "ranks": ranks, "transport": transport, "quick": given.quick, "simulated": given.dry_run}
    records.write("run", surroundings(machine.device, machine.versions) | header)
    print(f"writing {records.path}")
    return records


def measured(given: argparse.Namespace) -> int:
    """Measure under mpiexec, on GPUs."""
    import cupy
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    count = cupy.cuda.runtime.getDeviceCount()
    own = world.allreduce(here.size <= count, MPI.LAND) and not given.mpi
    cupy.cuda.Device(here.rank % count).use()
    comm = world
    if own:
        from cupy.cuda import nccl

        comm = nccl.NcclCommunicator(world.size, world.bcast(nccl.get_unique_id() if world.rank == 0 else None), world.rank)
    with Gpu() as machine:
        transport = "NCCL" if own else "MPI"
        records = opened(machine, given, world.size, transport) if world.rank == 0 else None
        return max(world.allgather(on_rank(comm, machine, given, records)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring(__doc__, "causal, two lengths")
    parser.add_argument("--plan", metavar="DEVICE", help="by counts and models, on a device of the catalogue")
    parser.add_argument("--ranks", type=int, metavar="P", help=f"of --plan (default: {', '.join(map(str, RANKS_PLANNED))})")
    parser.add_argument("--link", default=DEFAULT_LINK, help="of predictions: what a rank sends in a second, and receives")
    parser.add_argument("--mpi", action="store_true", help="over MPI, even where NCCL could be used")
    given = completed(parser.parse_args(argv))
    try:
        given.link = bytes_a_second(given.link)
    except ValueError as error:
        parser.error(f"--link: {error}")
    if given.plan:
        for row in plan_table(Device.named(given.plan), (given.ranks,) if given.ranks else RANKS_PLANNED, given.link, given.quick):
            print(row, flush=True)
        return 0
    if given.ranks:
        parser.error("--ranks is for --plan: else mpiexec -n says how many there are")
    try:
        return dry(given) if given.dry_run else measured(given)
    except ImportError as error:
        parser.error(f"{told(error)}: pip install 'cupyflash[mpi]' and CuPy, and run it under mpiexec")


if __name__ == "__main__":
    sys.exit(main())
