"""The committed list of problems that a broken kernel or schedule must not survive: killers.toml, and what is held against each.

What `cupyflash verify` says of a problem is said here: theory == replay == execution to the byte, numbers by the 2x rule, nothing
found, results NaN until they are written, caches right to the bit. V is about one, where errors in the weights show.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import test_backward
import test_backward_sparse
import test_magnitudes
import test_masks_sequences
import test_ring_sums
import test_softmax
import test_varlen

import cases_fa3
from cupyflash import Device, dropout_mask, kernels_cu, simulated_device
from cupyflash.distributed import sums
from cupyflash.request.dropout import Dropout
from cupyflash.request.options import BlockMask, Pattern
from cupyflash.schedules import (
    BackwardSchedule,
    Kernel,
    Schedule,
    TileSchedule,
    VarlenBackwardSchedule,
    VarlenSchedule,
    fa3_backward,
    plan_backward,
    plan_softmax,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.sim import replay, theory
from cupyflash.sim.cli.commands.problems import verify as command
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.execution import execute, run_kernels
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import dropped
from cupyflash.sim.numbers.yardstick import DROPPED, draw_gradient, draw_mask, drawn, knowing_mask, measure
from cupyflash.sim.ptx import Counters
from cupyflash.sim.verification import DrawnInputs, has_cache, run_drawn, score_dtype, with_lengths

LIST = Path(__file__).with_suffix(".toml")
SPENT = Path(__file__).with_name("killers_spent.json")
A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")
SEED = 2**40 + 77
INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Killed(AssertionError):
    """A found fault, in a few words."""


def require(right: bool, wrong: object) -> None:
    if not right:
        raise Killed(str(wrong)[:300])


@dataclass(frozen=True)
class Killer:
    """A problem, or with `more` the same program again: the kernel that it is listed for, why, and what is asked, by the names of
    killers.toml, which says what each means."""

    kernel: str
    number: int
    why: str
    more: int = 0
    verify: str = ""
    packed: str = ""
    packed_mask: str = ""
    blocks: float = 0.0
    dbias: bool = False
    alignment: int = 0
    power: int = 0
    scale: float = 0.0
    sms: int = 0
    patches: int = 0
    large: str = ""
    softmax: str = ""
    add_state: str = ""
    dropout_mask: str = ""
    design: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.number}" + (f".{self.more}" if self.more else "")

    @cached_property
    def request(self) -> ProblemRequest:
        """What the command would be asked."""
        with command.make_context("verify", shlex.split(self.verify)) as context:
            own = ("seed", "data_seed", "l2", "max_seconds", "as_json")
            request = ProblemRequest.of({name: value for name, value in context.params.items() if name not in own})
        problem = request.problem
        if self.scale:
            problem = problem.asking(scale=self.scale)
        if self.alignment:
            problem = replace(problem, alignment=self.alignment)
        if self.blocks:
            assert isinstance(request.tiling, tuple), "block masks are of a tiling's blocks"
            tiles = (-(-length // size) for length, size in zip((problem.seqlen_q, problem.seqlen_k), request.tiling, strict=True))
            kept = np.random.default_rng(0).random((problem.batch, problem.heads, *tiles)) < self.blocks
            problem = problem.asking(block_mask=BlockMask.of(kept))
        if self.patches:
            b, h, n_q, n_k, size = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k, self.patches
            each = np.random.default_rng(0).random((b, h, n_q // size + 1, n_k // size + 1)) < 0.5
            said = each[..., np.arange(n_q)[:, None] // size, np.arange(n_k) // size]
            problem = problem.asking(pattern=Pattern.of(said))
        if self.sms:
            request = replace(request, device=replace(request.device, sm_count=self.sms))
        if self.packed:
            lengths = self.sequences
            longest = (max(each[side] for each in lengths) for side in (0, 1))
            problem = replace(problem, **dict(zip(("batch", "seqlen_q", "seqlen_k"), (len(lengths), *longest), strict=True)))
        if self.design:
            designs = fa3_backward.designs(problem, request.deterministic)
            request = replace(request, tiling=next(each for each in designs if each.label == self.design))
        return replace(request, problem=problem)

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each."""
        pairs = (each.split("x") for each in self.packed.split(","))
        return tuple((int(queries), int(keys)) for queries, keys in pairs)

    @cached_property
    def schedule(self) -> Schedule:
        if self.softmax:
            algorithm, shape, dtype, *down = self.softmax.split()
            *rows, cols = (int(length) for length in shape.split("x"))
            return plan_softmax(math.prod(rows), cols, dtype, A100, algorithm, adjacent_rows=down == ["down"])
        if self.add_state:
            return sums.schedule_of(self._sums(), A100)
        if self.dropout_mask:
            return DropoutMaskSchedule(self._dropped()[1], A100)
        if self.large:
            return self._large()[0]
        if self.packed_mask:
            return self._with_mask()
        r = self.request
        if self.packed and r.backward:
            how: dict[str, Any] = {"deterministic": r.deterministic, "algorithm": r.algorithm}
            return plan_varlen_backward(r.problem, r.device, self.sequences, r.tiling, **how)
        if self.packed:
            return plan_varlen(r.problem, r.device, self.sequences, r.tiling, lse=r.lse, algorithm=r.algorithm)
        if self.dbias:
            return plan_backward(r.problem, r.device, r.algorithm, r.tiling, dbias=True)
        schedule = with_lengths(r.schedule())
        return schedule if has_cache(schedule) else knowing_mask(schedule, mask=draw_mask(schedule.problem))

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """The launched kernels."""
        return tuple(kernel for kernel in self.schedule.kernels() if kernel.grid)

    def counts(self) -> None:
        """Raises `Killed` where theory and replay disagree."""
        expected = theory.traffic(self.schedule)
        for literal in (False, True):
            found = replay(self.schedule, literal=literal)
            require(found == expected, f"theory {dict(expected)}, replay {dict(found)}")

    def check(self) -> None:
        """Raises `Killed`, or whatever a broken schedule raises, unless all holds."""
        schedule = self.schedule
        if self.softmax:
            self._softmax()
        elif self.large:
            self._of_large_scores()
        elif self.packed_mask:
            forward = self.packed_mask.startswith("forward")
            kind = test_masks_sequences.check if forward else test_masks_sequences.check_backward
            self._spent(kind(schedule).counters)
        elif self.add_state:
            self._add_state()
        elif self.dropout_mask:
            self._dropout_mask()
        elif isinstance(schedule, VarlenBackwardSchedule):
            self._spent(test_backward_sparse.check_packed(schedule).counters)
        elif isinstance(schedule, VarlenSchedule):
            self._spent((cases_fa3 if self.request.algorithm == "fa3" else test_varlen).check_packed(schedule).counters)
        else:
            assert isinstance(schedule, TileSchedule)
            self._attention(schedule)

    def _spent(self, counters: Mapping[str, Counters]) -> None:
        """Raises `Killed` where kernels take more than is written down, or less, by the NVRTC of which it is known."""
        now = spent(counters)
        OBSERVED[self.name] = now
        allowed = written().get(self.name) if nvrtc_version() == written().get("nvrtc") else None
        other = {name: f"{now[name]:,} for {allowed[name]:,}" for name in now if now[name] != allowed[name]} if allowed else {}
        require(not other, f"takes other counts than it did (mutator.py --spent writes them down): {other}")

    def _attention(self, schedule: TileSchedule) -> None:
        self.counts()
        p, dropped = schedule.problem, self.request.dropout or DROPPED
        given = DrawnInputs.of(p, 0, dropped=dropped)
        if has_cache(schedule):
            run = run_drawn(schedule, given, 1.0)
            self._holds(run.traffic, run.numbers, (*run.findings, *run.caches))
            self._spent(run.counters)
            return
        inputs = self._laid(replace(drawn(p, 0, 1.0, blocks_of(schedule), dropped), score=given.score))
        mask = {} if given.mask is None else {"mask": given.mask}
        if isinstance(schedule, BackwardSchedule):
            execution, numbers = test_backward.backward_with_errors(schedule, inputs, draw_gradient(p), given=mask)
            self._holds(execution.traffic, numbers, execution.findings)
            self._spent(execution.counters)
            return
        asked: dict[str, Any] = {**inputs.beside, **mask, "score": inputs.score, "dropout": inputs.dropout}
        done = execute(schedule, *inputs.qkv, **asked)
        self._holds(done.traffic, measure(done.out, done.lse, inputs, score_dtype(schedule)), done.findings)
        self._spent(done.counters)

    def _holds(self, traffic: Any, numbers: Any, findings: tuple[object, ...]) -> None:
        require(not findings, findings[0] if findings else "")
        expected = theory.traffic(self.schedule)
        require(traffic == expected, f"theory {dict(expected)}, execution {dict(traffic)}")
        require(all(each.good for each in numbers.values()), numbers)

    def _laid(self, inputs: Inputs) -> Inputs:
        """Arrays with Q of another size, and rows at `alignment`."""
        q, k, v = inputs.qkv
        q = q * q.dtype.type(2.0**self.power)
        if self.alignment:
            q, k, v = (with_room(array, self.alignment) for array in (q, k, v))
        return replace(inputs, q=q, k=k, v=v)

    def _large(self) -> tuple[BackwardSchedule, list[np.ndarray], dict[str, Any]]:
        """The schedule, the arrays and the options of scores about 2**28 that are no whole ones of L's."""
        kind, n_k, *how = self.large.split()
        arrays, options = test_magnitudes.pose("float16", 13, -3, kind, int(n_k))
        problem = Inputs.of(*arrays[:3], **options).problem
        where = (H100, "fa3", None) if "fa3" in how else (A100, "fa2", (16, 32))
        return plan_backward(problem, *where, deterministic="deterministic" in how), arrays, options

    def _of_large_scores(self) -> None:
        schedule, arrays, options = self._large()
        self.counts()
        found, right = test_magnitudes.backward_of(schedule, arrays, options)
        require(not found.findings, found.findings[:1])
        require(right, "numbers")
        self._spent(found.counters)

    def _with_mask(self) -> VarlenSchedule | VarlenBackwardSchedule:
        (which, *other), lengths = self.packed_mask.split(), test_masks_sequences.UNEVEN
        algorithm = other[0] if other else "fa2"
        if which == "forward":
            return test_masks_sequences.planned(plan_varlen, lengths, algorithm=algorithm, lse=True)
        deterministic = which == "deterministic"
        return test_masks_sequences.planned(plan_varlen_backward, lengths, algorithm=algorithm, deterministic=deterministic)

    def _softmax(self) -> None:
        algorithm, lengths, dtype, *down = self.softmax.split()
        shape = [int(length) for length in lengths.split("x")]
        if down == ["down"]:
            shape.reverse()
        # Axes of rows with gaps between, so that they are not one
        room = [*shape[:1], *(length + 1 for length in shape[1:-1]), shape[-1] * (2 if down == ["apart"] else 1)]
        x = test_softmax.rows_of(tuple(room), dtype, scale=3 * 2.0**self.power)
        x = x[(*(slice(length) for length in shape[:-1]), slice(None, None, room[-1] // shape[-1]))]
        adjacent = down == ["down"]
        self._spent(test_softmax.check_softmax(x, algorithm, 0 if adjacent else -1, adjacent_rows=adjacent).counters)

    def _sums(self) -> dict[str, Any]:
        dtype, d = self.add_state.split()
        return test_ring_sums.drawn((2, 3, 25), slice(3, 22), int(d), dtype)

    def _add_state(self) -> None:
        given = self._sums()
        right = test_ring_sums.expected_of(given)
        traffic, counters, findings = run_kernels(self.schedule, sums.values(given), ())
        found = given["O"], given["L"][..., 0]
        close = all(np.allclose(a, b, rtol=2e-6, atol=2e-6) for a, b in zip(found, right, strict=True))
        require(not findings, findings)
        require(traffic == theory.traffic(self.schedule) == replay(self.schedule), traffic)
        require(close, "numbers")
        self._spent(counters)

    def _dropped(self) -> tuple[float, tuple[int, int, int, int]]:
        p, shape = self.dropout_mask.split()
        b, h, n_q, n_k = (int(length) for length in shape.split("x"))
        return float(p), (b, h, n_q, n_k)

    def _dropout_mask(self) -> None:
        (p, shape), origin = self._dropped(), (3, 9, 64, 1024)
        self.counts()
        with simulated_device(A100):
            kept = dropout_mask(shape, p, seed=SEED, offset=3, dropout_origin=origin)
        require(np.array_equal(kept, ~dropped(Dropout(p, SEED, 3, origin), shape)), "numbers")


# What problems have taken in this process
OBSERVED: dict[str, dict[str, int]] = {}


def spent(counters: Mapping[str, Counters]) -> dict[str, int]:
    """The counts of all launches that cost time and change no number."""
    each = counters.values()
    return {
        "instructions": sum(one.instructions for one in each),
        "FLOPs of tensor cores": sum(one.mma_flops for one in each),
        "barriers": sum(one.barriers for one in each),
        "shared wavefronts": sum(one.shared_memory.wavefronts for one in each),
        "sectors": sum(one.global_memory.sectors for one in each),
    }


@cache
def written() -> dict[str, Any]:
    """The counts of each problem, by name, and the "nvrtc" that gave them: `python tests/mutator.py --spent` writes them."""
    found: dict[str, Any] = json.loads(SPENT.read_text()) if SPENT.exists() else {}
    return found


def nvrtc_version() -> str:
    from cupy.cuda import nvrtc

    return "{}.{}".format(*nvrtc.getVersion())


def blocks_of(schedule: TileSchedule) -> tuple[int, int]:
    """The blocks of a block mask."""
    own = schedule.block_rows, schedule.block_cols
    return schedule.mask_blocks or own if isinstance(schedule, BackwardSchedule) else own


def with_room(array: np.ndarray, alignment: int) -> np.ndarray:
    """The same (b, h, n, d), in memory with heads inside of rows, and each row at an odd multiple of `alignment` bytes."""
    b, h, n, d = array.shape
    step = alignment // array.itemsize
    width = (-(-d // step) | 1) * step
    memory = np.full(b * n * h * width + step, np.nan, array.dtype)[step:].reshape(b, n, h, width)
    found = memory.swapaxes(1, 2)[..., :d]
    found[...] = array
    return found


@cache
def killers() -> tuple[Killer, ...]:
    """All problems of the list."""
    listed: dict[str, list[dict[str, Any]]] = tomllib.loads(LIST.read_text())
    made = []
    for kernel, some in listed.items():
        for number, each in enumerate(some, 1):
            also = each.pop("also", [])
            made.append(Killer(kernel, number, **each))
            verify = [f"{each.get('verify', '')} {more}" for more in also]
            made += [replace(made[-1], more=place, verify=one) for place, one in enumerate(verify, 1)]
    return tuple(made)


@cache
def closure(source: str) -> frozenset[str]:
    """A kernel's source and all that it includes of ours."""
    text = kernels_cu.source(source)
    return frozenset({source}).union(*(closure(name) for name in INCLUDED.findall(text) if (kernels_cu.DIRECTORY / name).exists()))


def of_source(file: str) -> list[Killer]:
    """The problems whose kernels have a file in them: of a list at a time the first, then the second and so on."""
    own = [each for each in killers() if any(file in closure(kernel.source) for kernel in each.kernels)]
    return sorted(own, key=lambda each: (each.more, each.number))
