"""Any program of launches, events and waits: the first race of its history is found."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from test_ptx_streams import floats, run

from cupyflash.sim import ptx
from suites import sweep

ARRAYS, STREAMS = 3, 3
LAUNCH = st.tuples(
    st.just("launch"),
    st.integers(0, STREAMS - 1),
    st.sampled_from(["plain", "waits", "early", "never", "fenced"]),
    st.booleans(),
    st.integers(0, ARRAYS - 1),
    st.integers(0, ARRAYS - 1),
)
EVENT = st.tuples(st.just("event"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1))
SYNCHRONIZE = st.tuples(st.just("synchronize"), st.integers(0, STREAMS - 1))


class Graph:
    """The order of events as a graph of moments: begin, wait, accesses and end of each launch."""

    def __init__(self) -> None:
        self.before: dict[Any, set[Any]] = {}
        self.in_stream: list[list[int]] = [[] for _ in range(STREAMS)]
        self.joined: list[set[Any]] = [set() for _ in range(STREAMS)]
        self.host: set[Any] = set()
        self.launches: list[tuple[str, bool, int, int]] = []

    def ends(self, stream: int) -> set[Any]:
        return {("end", k) for k in self.in_stream[stream]} | self.joined[stream]

    def event(self, source: int, to: int) -> None:
        self.joined[to] |= self.ends(source)

    def synchronize(self, stream: int) -> None:
        self.host |= self.ends(stream)

    def launch(self, stream: int, kernel: str, programmatic: bool, reads: int, writes: int) -> bool:
        """True if the launch races with an earlier one."""
        k = len(self.launches)
        front = self.in_stream[stream][-1] if programmatic and self.in_stream[stream] else None
        begin = self.host | self.joined[stream]
        wait = {("begin", k)}
        if front is None:
            begin |= self.ends(stream)
        else:
            begin |= {("go", front)}
            wait |= {("end", front)}
        self.before |= {("begin", k): begin, ("wait", k): wait}
        # Who waits does so first; its blocks let go at their exit, or before they wait, or when they have fenced what they did.
        first = ("begin", k) if kernel in ("plain", "never", "fenced") else ("wait", k)
        self.before |= {("access", k): {first}, ("end", k): {("access", k)}}
        self.before["go", k] = {("access", k) if kernel == "fenced" else first if kernel in ("plain", "waits") else ("begin", k)}
        self.in_stream[stream].append(k)
        self.launches.append((kernel, programmatic, reads, writes))
        over = self.behind(("access", k))
        return any(
            ("access", j) not in over and (writes in (r, w) or reads == w) for j, (_, _, r, w) in enumerate(self.launches[:k])
        )

    def behind(self, moment: Any) -> set[Any]:
        found: set[Any] = set()
        todo = [moment]
        while todo:
            for one in self.before[todo.pop()] - found:
                found.add(one)
                todo.append(one)
        return found


@sweep(12, 150, program=st.lists(st.one_of(LAUNCH, LAUNCH, LAUNCH, EVENT, SYNCHRONIZE), min_size=2, max_size=9))
def test_the_first_race_of_any_program_is_found(program: list[Any]) -> None:
    """Against reachability in a graph of moments; what comes after a race is not looked at."""
    arrays, graph = [floats() for _ in range(ARRAYS)], Graph()
    history = ptx.History()
    streams = [history.stream() for _ in range(STREAMS)]
    for what, stream, *rest in program:
        if what == "event":
            streams[rest[0]].wait(streams[stream].record())
            graph.event(stream, rest[0])
        elif what == "synchronize":
            streams[stream].synchronize()
            graph.synchronize(stream)
        else:
            kernel, programmatic, reads, writes = rest
            launch = run(kernel, arrays[reads], arrays[writes], stream=streams[stream], programmatic=programmatic)
            race = graph.launch(stream, kernel, programmatic, reads, writes)
            assert bool(launch.findings) == race, (program, launch.findings)
            if race:
                return
