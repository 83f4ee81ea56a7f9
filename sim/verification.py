"""Theory, replay and execution of one schedule side by side, with the errors of the kernels' results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import numpy as np

from cupyflash.basics import Report
from cupyflash.request.problem import Problem
from cupyflash.request.score import Mask, Score, captured_values
from cupyflash.schedules import BackwardSchedule, Cache, DecodeSchedule, TileSchedule
from cupyflash.schedules.standard import StandardSchedule
from cupyflash.sim import theory
from cupyflash.sim.estimate import seconds
from cupyflash.sim.execution import Watch, execute, execute_backward, execute_decode
from cupyflash.sim.host_memory import require_room, verified
from cupyflash.sim.l2.executed import Beside, observed
from cupyflash.sim.numbers.inputs import Decoding, Inputs
from cupyflash.sim.numbers.yardstick import (
    DROPPED,
    DTYPES,
    Numbers,
    draw_decode,
    draw_gradient,
    draw_mask,
    draw_score,
    drawn,
    handed_on,
    knowing_mask,
    measure,
    measure_decode,
    measure_gradients,
)
from cupyflash.sim.ptx import Counters
from cupyflash.sim.traffic import TENSORS, TensorTraffic, Traffic
from cupyflash.sim.two_level.machine import replay
from cupyflash.words import plural

# The means of V: at zero, errors in the weights hide; at one, they show.
V_MEANS = (0.0, 1.0)
# For each element of K and V of each query head: drawing it, and computing in float64 and plainly. Fitted on a two-core machine.
SECONDS_PER_ELEMENT = 4e-8


@dataclass(frozen=True)
class VerifiedRun:
    """One execution: numbers by tensor, the machine's findings, errors in the caches and, for decoding, counters by kernel."""

    traffic: Traffic
    numbers: dict[str, Numbers]
    findings: tuple[object, ...]
    caches: tuple[str, ...] = ()
    counters: Mapping[str, Counters] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """The bytes of one tensor that a witness counted beyond the theory; negative if it counted fewer."""

    witness: str
    tensor: str
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True)
class Verification:
    """Three counts of one schedule, the numbers for each mean of V, and the machine's findings.

    `executions` has the traffic of each run, in the order of V_MEANS; counts do not depend on the values, so all must
    agree. `l2`, on request: DRAM's traffic of the first run. `numbers` are each run's, by tensor: O and L of a forward pass,
    dQ, dK and dV of a backward. `findings` are the machine's, as text; `caches` lists the errors in decoding's caches, compared
    bit by bit.
    """

    theory: Traffic
    replay: Traffic
    executions: tuple[Traffic, ...]
    numbers: tuple[dict[str, Numbers], ...]
    findings: tuple[str, ...]
    caches: tuple[str, ...] = ()
    l2: Beside | None = None

    @property
    def witnesses(self) -> dict[str, Traffic]:
        """Each count by name: theory, replay, executed, and executed again if a later run's count differs."""
        named = {"theory": self.theory, "replay": self.replay, "executed": self.executions[0]}
        for v_mean, traffic in zip(V_MEANS[1:], self.executions[1:], strict=True):
            if traffic != self.executions[0]:
                named[f"executed, V about {v_mean:g}"] = traffic
        return named

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Every tensor of every witness whose count differs from the theory's."""
        return tuple(self._differences())

    def _differences(self) -> Iterator[Difference]:
        for witness, traffic in self.witnesses.items():
            for tensor in dict.fromkeys((*TENSORS, *self.theory, *traffic)):
                ours, theirs = (each.get(tensor, TensorTraffic()) for each in (self.theory, traffic))
                if ours != theirs:
                    read, write = theirs.read_bytes - ours.read_bytes, theirs.write_bytes - ours.write_bytes
                    yield Difference(witness, tensor, read, write)

    @property
    def good(self) -> bool:
        """True if the three counts agree, the errors are within the allowed ones and the machine found nothing."""
        return not (self.differences or self.findings or self.wrong_tensors or self.caches)

    @property
    def wrong_tensors(self) -> tuple[str, ...]:
        """The tensors whose error against float64 is larger than allowed."""
        return tuple(dict.fromkeys(name for run in self.numbers for name, numbers in run.items() if not numbers.good))


def verify(
    schedule: TileSchedule,
    *,
    seed: int | None = None,
    data_seed: int = 0,
    score: Score | None = None,
    mask: Mask | None = None,
    dropped: float = DROPPED,
    l2: bool = False,
    progress: Callable[[str], Any] = lambda text: None,
) -> Verification:
    """Count a schedule's traffic by closed form, by replay and by executing its kernels, and measure the errors of their results.

    `data_seed` draws q, k, v, the problem's masks, the values that its functions capture (unless `score` or `mask` are given) and,
    for a backward schedule, dO; V has each of V_MEANS as its mean, and a backward's O and L are float64's, rounded. `seed` is the
    order of warps, as in `execute`. `l2` adds DRAM's traffic behind the device's L2. Decoding's caches are drawn by `draw_decode`,
    and compared afterwards with the expected ones, bit by bit.
    Raises ValueError if no kernel runs the schedule, MemoryError if it is estimated to need more than is free, ImportError
    without a compiler, SramOverflow if a tile does not fit.
    """
    if isinstance(schedule, StandardSchedule) and schedule.ideal:
        raise ValueError("no kernel has tiling 'paper' of standard attention: it is a count that reads each input once")
    schedule.kernels()  # refuses a schedule that no kernel runs before anything is drawn
    schedule = with_lengths(schedule)
    require_room(verified(schedule), f"verifying {schedule.algorithm}")
    given = DrawnInputs.of(schedule.problem, data_seed, score, mask, dropped)
    if not has_cache(schedule):
        schedule = knowing_mask(schedule, data_seed, given.mask)
    form, replayed = theory.traffic(schedule), replay(schedule)
    execution, watch = observed(schedule) if l2 else (None, None)
    runs: list[VerifiedRun] = []
    for v_mean in V_MEANS:
        progress(f"executing with V about {v_mean:g}")
        runs.append(run_drawn(schedule, given if runs else replace(given, watch=watch), v_mean, seed))
    captured, numbers = captured_values(given.score, given.mask)
    return Verification(
        form,
        replayed,
        tuple(run.traffic for run in runs),
        tuple(run.numbers for run in runs),
        tuple(dict.fromkeys(str(finding) for run in runs for finding in run.findings)),
        tuple(dict.fromkeys(wrong for run in runs for wrong in run.caches)),
        Beside.of(execution, schedule, captured | dict(numbers)) if execution else None,
    )


def estimated_seconds(schedule: TileSchedule, seed: int | None) -> float:
    """An estimate of the time of `verify`; for long caches, drawing them and computing in float64 take most of it."""
    measured = 0.0
    if isinstance(schedule, DecodeSchedule):
        p = schedule.problem
        measured = SECONDS_PER_ELEMENT * p.head_count * p.seqlen_k * (p.head_dim + p.head_dim_v)
    return len(V_MEANS) * (seconds(schedule, seeded=seed is not None) + measured)


def has_cache(schedule: TileSchedule) -> TypeGuard[DecodeSchedule]:
    """True for a schedule of `attention_decode`; one without lengths and cache is `attention`'s with split keys."""
    return isinstance(schedule, DecodeSchedule) and (schedule.problem.options.padded or schedule.cache != Cache())


def with_lengths(schedule: TileSchedule) -> TileSchedule:
    """A decoding schedule with known lengths: its own, or those of full caches."""
    if not has_cache(schedule) or schedule.problem.options.key_lengths is not None:
        return schedule
    full = (schedule.problem.seqlen_k - schedule.cache.appended,) * schedule.problem.batch
    return replace(schedule, problem=schedule.problem.asking(padded=True, key_lengths=full))


@dataclass(frozen=True)
class DrawnInputs:
    """The drawn inputs of a schedule's runs: its functions' values, the probability of dropout, the seed for the rest; `watch` as
    in `execute`."""

    score: Score | None
    mask: Mask | None
    dropped: float
    seed: int
    watch: Watch | None = None

    @classmethod
    def of(
        cls,
        problem: Problem,
        seed: int,
        score: Score | None = None,
        mask: Mask | None = None,
        dropped: float = DROPPED,
        watch: Watch | None = None,
    ) -> DrawnInputs:
        """Draw the functions that are not given."""
        return cls(score or draw_score(problem, seed), mask or draw_mask(problem, seed), dropped, seed, watch)


def run_drawn(schedule: TileSchedule, given: DrawnInputs, v_mean: float = 0.0, seed: int | None = None) -> VerifiedRun:
    """Execute a schedule on arrays drawn for it, V about `v_mean`, in the schedule's order `seed`, and measure its numbers."""
    p = schedule.problem
    if has_cache(schedule):
        decoding = draw_decode(p, schedule.cache, given.seed, v_mean)
        return _decode(schedule, replace(decoding, score=given.score, mask=given.mask), given.watch, seed)
    inputs = replace(drawn(p, given.seed, v_mean, mask_blocks(schedule), given.dropped), score=given.score)
    if isinstance(schedule, BackwardSchedule):
        return _backward(schedule, inputs, given, seed)
    return _forward(schedule, inputs, given, seed)


def _given(inputs: Inputs, given: DrawnInputs) -> Report:
    """The arguments beside q, k and v for execution: a mask function replaces its values for each score."""
    beside = dict(inputs.beside) | ({} if given.mask is None else {"mask": given.mask})
    return beside | {"score": inputs.score, "dropout": inputs.dropout, "watch": given.watch}


def _forward(schedule: TileSchedule, inputs: Inputs, given: DrawnInputs, seed: int | None) -> VerifiedRun:
    execution = execute(schedule, *inputs.qkv, seed=seed, **_given(inputs, given))
    return VerifiedRun(execution.traffic, measure(execution.out, execution.lse, inputs, score_dtype(schedule)), execution.findings)


def _decode(schedule: DecodeSchedule, decoding: Decoding, watch: Watch | None, seed: int | None) -> VerifiedRun:
    given: Report = dict(decoding.arrays)
    tree = given.pop("tree_mask", None)
    expected = {name: decoding.appended(name) for name in ("k_cache", "v_cache")}
    sequences = decoding.sequences  # from the caches before the call
    given |= {"tree_mask": None if tree is None else tree[:, None], "score": decoding.score, "mask": decoding.mask}
    execution = execute_decode(schedule, **given, seed=seed, watch=watch)
    wrong = []
    for name, cache in expected.items():
        bits = np.dtype(f"u{cache.itemsize}")
        others = int((given[name].view(bits) != cache.view(bits)).sum())
        if others:
            wrong.append(f"{name}: {plural(others, 'element')} are not, to the bit, what they were or what was appended")
    numbers = measure_decode(execution.out, execution.lse, sequences)
    return VerifiedRun(execution.traffic, numbers, execution.findings, tuple(wrong), execution.counters)


def _backward(schedule: BackwardSchedule, inputs: Inputs, given: DrawnInputs, seed: int | None) -> VerifiedRun:
    dout, (out, lse) = draw_gradient(schedule.problem, given.seed), handed_on(inputs, schedule.algorithm)
    execution = execute_backward(schedule, dout, *inputs.qkv, out, lse, **_given(inputs, given), seed=seed)
    numbers = measure_gradients(execution.gradients, dout, inputs)
    return VerifiedRun(execution.traffic, numbers, execution.findings)


def mask_blocks(schedule: TileSchedule) -> tuple[int, int]:
    """The blocks (Br, Bc) of the schedule's block mask, if it has one."""
    return (schedule.mask_blocks if isinstance(schedule, BackwardSchedule) else None) or schedule.blocks


def score_dtype(schedule: TileSchedule) -> np.dtype:
    """The type of S: float32 on chip, the workspace's type if S goes to HBM."""
    workspace = schedule.workspaces().get("S")
    return DTYPES[workspace.dtype if workspace else "float32"]
