"""Times implementations of a pass beside each other, and judges the numbers of each.

On one case all implementations take turns, so that each sees the same clocks and temperatures. Inputs are random and rotate.
A figure that the device cannot reach is kept as `invalid`, with the reason, and has no TFLOP/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import starmap
from typing import Any

import accuracy
from cases import Case
from machine import Call, Machine, Sample, Simulated
from records import Budget, Records, attempt, told

from cupyflash import Device
from cupyflash.basics import Report, Values
from cupyflash.schedules import Kernel


@dataclass(frozen=True)
class Implementation:
    """A call that computes a pass on given arrays. `facts` go into its lines."""

    name: str
    call: Call
    ours: bool = False
    facts: Values = field(default_factory=dict)


Implementations = Callable[[Machine, Case, Sequence[Any]], Iterable[Implementation]]
Reference = Callable[[Any, Sequence[Any], bool], tuple[Any, ...]]


def peers_of(reference: Reference, inputs: int, theirs: Callable[[Machine, Case, Sequence[Any]], Iterable[Any]]) -> Implementations:
    """Other implementations on given arrays: NumPy's on the simulated device, else `theirs`, pairs of a name and a call."""

    def peers(machine: Machine, case: Case, arrays: Sequence[Any]) -> Iterator[Implementation]:
        if isinstance(machine, Simulated):
            own = [machine.as_float32(array) for array in arrays[:inputs]]
            yield Implementation("numpy", lambda: reference(machine.xp, own, case.causal))
        else:
            yield from starmap(Implementation, theirs(machine, case, arrays))

    return peers


@dataclass(frozen=True)
class Pass:
    """A timed pass over attention, which costs `cost` forward passes' FLOPs and makes `outputs` from `inputs` arrays.

    `ours`: cupyflash's implementations; `default`: the one that a call uses; `peers`: the others. `reference(xp, arrays, causal)`:
    the right result, in float32. `kernels`: those that ours launch. `cases`: the timed ones, `tiny`: that of a dry run, `small`:
    the one whose host time is reported, if they are not those of the other passes; `sets`: the largest number of sets of inputs.
    `prepare` makes further arrays from the inputs, such as arrays in another layout. `known` is measured once, before anything
    else.
    """

    name: str
    cost: float
    inputs: int
    outputs: tuple[str, ...]
    default: str
    ours: Implementations
    peers: Implementations
    reference: Reference
    kernels: Callable[[Device, Case], Iterable[Kernel]]
    cases: Callable[[Machine, bool], Sequence[Case]] | None = None
    tiny: Case | None = None
    small: Case | None = None
    sets: int | None = None
    prepare: Callable[[Machine, Any, Sequence[Any]], Iterable[Any]] = lambda machine, case, arrays: ()
    known: Callable[[Machine], dict[str, float]] | None = None

    def draw(self, machine: Machine, case: Case, seed: int) -> list[Any]:
        """A case's inputs, and what follows them."""
        arrays = machine.draw(case, seed, self.inputs)
        return [*arrays, *self.prepare(machine, case, arrays)]


@dataclass(frozen=True)
class Effort:
    """The effort for a case: sets of inputs, seconds of each implementation's repeats, and the least and most of them."""

    sets: int = 3
    seconds: float = 0.25
    least: int = 4
    most: int = 50

    def repeats(self, once: float) -> int:
        return min(max(self.least, int(self.seconds / max(once, 1e-9))), self.most)


class DeviceLost(RuntimeError):
    """Nothing runs on the device any more: what it was doing is in the text."""


def turns(repeats: Mapping[str, int]) -> Iterator[str]:
    """Names in the order of their turns: in rounds, what is repeated less often spread evenly over the rounds."""
    rounds = max(repeats.values(), default=0)
    for number in range(rounds):
        for name, times in repeats.items():
            if (number + 1) * times // rounds > number * times // rounds:
                yield name


def refused(device: Device, what: Pass, case: Case, seconds: float) -> str | None:
    """The reason why a time cannot be true: more FLOP/s than the device's peak, or inputs read faster than its memory allows."""
    if seconds <= 0:
        return f"{seconds:g} s"
    peaks = [device.tensor_peak.get(name, 0.0) for name in ((case.dtype, "tf32") if case.dtype == "float32" else (case.dtype,))]
    peak, rate = max(peaks), what.cost * case.flops / seconds
    if peak and rate > peak:
        return f"{rate / 1e12:,.1f} TFLOP/s are above the device's peak of {peak / 1e12:,.1f}"
    bandwidth, read = device.hbm_bandwidth, case.read_bytes(what.inputs) / seconds
    if bandwidth and read > bandwidth:
        return f"inputs read at {read / 1e9:,.0f} GB/s are above the device's {bandwidth / 1e9:,.0f}"
    return None


def judged(machine: Machine, what: Pass, case: Case, out: Any, expected: Sequence[Any]) -> Report:
    """Each output's relative RMS, its bound, and True if all are within theirs."""
    outs = out if isinstance(out, tuple | list) else (out,)
    pairs = zip(what.outputs, outs, expected, strict=True)
    errors = {name: accuracy.relative_rms(machine.xp, machine.as_float32(each), right) for name, each, right in pairs}
    allowed = accuracy.bound(case.dtype)
    return {"rms": errors, "bound": allowed, "right": all(error <= allowed for error in errors.values())}


def figures(machine: Machine, what: Pass, case: Case, samples: Sequence[Sample]) -> Report:
    """Median and spread (between the quartiles) of the device's seconds, the host's, and what follows from them."""
    lower, median, upper = statistics.quantiles((each.seconds for each in samples), n=4)
    host, fill = statistics.median(each.host_seconds for each in samples), machine.fill_seconds
    row = {"seconds": median, "spread_s": upper - lower, "repeats": len(samples), "host_seconds": host}
    row["exposed"] = fill is not None and host > fill  # the device may have waited for the host
    if reason := refused(machine.device, what, case, median):
        return row | {"invalid": reason}
    return row | case.rates(what.cost, median)


@dataclass
class Session:
    """One run of a benchmark: what it times, on which machine, for how long, and the lines that it has written.

    `without`: names that are left out; `show` gets each line too. `known`: earlier measurements of the machine.
    """

    machine: Machine
    what: Pass
    records: Records
    budget: Budget
    effort: Effort
    without: Sequence[str] = ()
    show: Callable[[Values], None] = lambda line: None
    known: Mapping[str, float] = field(default_factory=dict)
    rows: list[Report] = field(default_factory=list)

    @property
    def sets(self) -> int:
        """The number of sets of inputs."""
        return min(self.effort.sets, self.what.sets or self.effort.sets)

    def write(self, case: Case, implementation: Implementation, found: Values) -> None:
        named = {"implementation": implementation.name, "ours": implementation.ours, **implementation.facts}
        row = {"pass": self.what.name, **asdict(case), **named, **found}
        self.rows.append(row)
        self.records.write("measurement", row)
        self.show(row)

    def measure(self, cases: Sequence[Case]) -> None:
        """Case after case, as long as time is left for one more like the longest so far. Raises `DeviceLost`."""
        longest = 0.0
        for number, case in enumerate(cases):
            if self.budget.left() <= longest:
                left = {"reason": "no time left", "cases": [asdict(each) for each in cases[number:]]}
                self.records.write("left_out", left)
                self.show(left)
                return
            begun = self.budget.spent()
            try:
                Measurement(self, case).run()
            except DeviceLost:
                raise
            except Exception as error:  # inputs that do not fit into memory: the next case may be smaller
                self.write(case, Implementation("inputs", lambda: None), {"error": told(error)})
            finally:
                attempt(self.machine.release)
            longest = max(longest, self.budget.spent() - begun)


@dataclass
class Entrant:
    """An implementation that can be timed: a call for each set of inputs, its verdict, and its turns so far."""

    implementation: Implementation
    calls: Sequence[Call]
    judged: Values
    samples: list[Sample] = field(default_factory=list)


class Measurement:
    """The measurement of one case: every implementation is called and judged, then all are timed in turns, then their lines are
    written."""

    def __init__(self, session: Session, case: Case) -> None:
        self._session, self._machine, self._what, self._case = session, session.machine, session.what, case
        self._entrants: dict[str, Entrant] = {}
        self._clocks: Report = {}

    def run(self) -> None:
        sets = [self._what.draw(self._machine, self._case, seed) for seed in range(self._session.sets)]
        lists = [list(self._what.ours(self._machine, self._case, arrays)) for arrays in sets]
        peers = attempt(lambda: [list(self._what.peers(self._machine, self._case, arrays)) for arrays in sets])
        if "error" in peers:
            self._write(Implementation("peers", lambda: None), peers)
        else:
            lists = [ours + others for ours, others in zip(lists, peers["value"], strict=True)]
        reference = attempt(lambda: self._reference(sets[0]))
        try:
            for same in zip(*lists, strict=True):
                if same[0].name not in self._session.without and self._session.budget.left() > 0:
                    self._prepare(same, reference)
            self._take_turns()
        finally:  # also what was known before the user, or an error, put an end to it
            self._finish()

    def _write(self, implementation: Implementation, found: Values) -> None:
        self._session.write(self._case, implementation, found)

    def _reference(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        inputs = [self._machine.as_float32(array) for array in arrays[: self._what.inputs]]
        return self._what.reference(self._machine.xp, inputs, self._case.causal)

    def _prepare(self, same: Sequence[Implementation], reference: Values) -> None:
        """Compiles, warms up and judges one implementation, here for each set of inputs; one that fails takes no turns."""
        found: Report = {"right": None, "no_reference": reference.get("error")}
        try:
            out = same[0].call()
            if "value" in reference:
                found = judged(self._machine, self._what, self._case, out, reference["value"])
            del out
            for each in same[1:]:
                each.call()
            self._machine.wait()
        except Exception as error:
            self._fail(same[0], found, error)
            return
        self._entrants[same[0].name] = Entrant(same[0], [each.call for each in same], found)

    def _fail(self, implementation: Implementation, found: Values, error: Exception) -> None:
        self._write(implementation, {**found, "error": told(error)})
        attempt(self._machine.release)
        try:
            self._machine.wait()
        except Exception as lost:
            raise DeviceLost(f"{implementation.name} on {self._case}: {told(lost)}") from error

    def _take_turns(self) -> None:
        self._read_clocks("before")
        once = {name: self._sample(name) for name in list(self._entrants)}
        order = list(turns({name: self._session.effort.repeats(each.seconds) for name, each in once.items() if each}))
        for number, name in enumerate(order):
            if self._session.budget.left() <= 0:
                break
            if number == len(order) // 2:
                self._read_clocks("between")
            if sample := self._sample(name):
                self._entrants[name].samples.append(sample)
        self._read_clocks("after")

    def _sample(self, name: str) -> Sample | None:
        """A turn of one that has not failed."""
        if (entrant := self._entrants.get(name)) is None:
            return None
        try:
            return self._machine.sample(entrant.calls[len(entrant.samples) % len(entrant.calls)])
        except Exception as error:
            del self._entrants[name]
            self._fail(entrant.implementation, entrant.judged, error)
            return None

    def _read_clocks(self, when: str) -> None:
        found = attempt(self._machine.clocks)
        self._clocks[when] = found.get("value", found)

    def _finish(self) -> None:
        for each in self._entrants.values():
            timed: Report = {"error": "not timed"}
            if len(each.samples) > 1:
                timed = figures(self._machine, self._what, self._case, each.samples)
            if "gb_s" in timed and "copy_gb_s" in self._session.known:
                timed["of_copy"] = timed["gb_s"] / self._session.known["copy_gb_s"]
            self._write(each.implementation, {**each.judged, **timed, "clocks": self._clocks})
