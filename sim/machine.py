"""The two-level machine: an SRAM of M bytes over an HBM that counts. A schedule is replayed on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cupyflash.options import require_flag
from cupyflash.schedules import Move, Phase, Room, Schedule, TileSchedule, require_schedule
from cupyflash.sim.traffic import TensorTraffic, Traffic

# A replay goes through every row, up to some 50 bytes each.
MOST_ROWS = 1 << 22


class SramOverflow(ValueError):
    """A tile does not fit what is left of the SRAM, or a move does not fit its tile."""


class TooLong(ValueError):
    """The lengths are more than a replay goes through."""


@dataclass
class Machine:
    """SRAM of `sram_bytes`; every tile is allocated before it is used, and refused when it does not fit."""

    sram_bytes: int
    peak_bytes: int = 0
    _tiles: dict[str, int] = field(default_factory=dict)
    _read: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _written: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    @contextmanager
    def hold(self, tiles: Iterable[Room]) -> Iterator[None]:
        """Allocate tiles for as long as the context lasts."""
        held = []
        for tile in tiles:
            used = sum(self._tiles.values())
            if tile.name in self._tiles:
                raise SramOverflow(f"tile {tile.name} is already in SRAM")
            if used + tile.nbytes > self.sram_bytes:
                raise SramOverflow(
                    f"tile {tile.name} of {tile.nbytes:,} bytes does not fit an SRAM of {self.sram_bytes:,} bytes, of which "
                    f"{used:,} are taken"
                )
            self._tiles[tile.name] = tile.nbytes
            self.peak_bytes = max(self.peak_bytes, used + tile.nbytes)
            held.append(tile.name)
        yield
        for name in held:
            del self._tiles[name]

    def move(self, moves: Iterable[Move], times: int) -> None:
        """Make each move `times` times."""
        for move in moves:
            if move.tile is not None and move.nbytes > self._tiles.get(move.tile, 0):
                raise SramOverflow(
                    f"{move.nbytes:,} bytes of {move.tensor} do not fit tile {move.tile} of {self._tiles.get(move.tile, 0):,} bytes"
                )
            (self._written if move.write else self._read)[move.tensor] += times * move.nbytes

    def run(self, phase: Phase, repeats: int) -> None:
        """One phase with all its turns and visits, `repeats` times over."""
        with self.hold(phase.tiles):
            self.move(phase.enter, repeats * phase.times)
            for visit in phase.visits:
                with self.hold(visit.tiles):
                    self.move(visit.moves, repeats * visit.times)
            self.move(phase.leave, repeats * phase.times)

    @property
    def traffic(self) -> Traffic:
        """What was moved so far."""
        return Traffic({name: TensorTraffic(self._read[name], self._written[name]) for name in {*self._read, *self._written}})


@dataclass(frozen=True)
class Replay:
    """What a replay saw: traffic in bytes per tensor, and the most SRAM that one thread block held, in bytes."""

    traffic: Traffic
    peak_sram_bytes: int


def run(schedule: Schedule, *, literal: bool = False) -> Replay:
    """Run a schedule on the machine; `literal` walks every step on its own instead of counting equal ones together.

    Time and memory grow with the lengths (up to some 50 bytes a row), `literal` time with their product. Raises SramOverflow when a
    tile does not fit, and TooLong for more than 4,194,304 queries or keys: `theory.traffic` counts those as fast as any.
    """
    require_schedule(schedule, Schedule, "plan")
    require_flag("literal", literal)
    if isinstance(schedule, TileSchedule) and max(schedule.problem.seqlen_q, schedule.problem.seqlen_k) > MOST_ROWS:
        p = schedule.problem
        raise TooLong(f"a replay goes through at most {MOST_ROWS:,} queries and keys a head, got {p.seqlen_q:,} and {p.seqlen_k:,}")
    machine = Machine(schedule.chip.sram_per_block)
    for repeats, phases in schedule.parts(literal=literal):
        for phase in phases:
            machine.run(phase, repeats)
    return Replay(machine.traffic, machine.peak_bytes)


def replay(schedule: Schedule, *, literal: bool = False) -> Traffic:
    """The HBM traffic of a schedule run on an SRAM of the device's M bytes.

    Costs and raises as `run` does.
    """
    return run(schedule, literal=literal).traffic
