"""Random calls of FlashAttention-3's kernel: a problem, how its arrays lie in memory, a device; and what must hold of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import lines
import numpy as np
import test_varlen
from hypothesis import assume
from hypothesis import strategies as st

from cupyflash import Device, Mask, Problem, TileSchedule, plan
from cupyflash.request.score import captured_values
from cupyflash.schedules import VarlenSchedule, fa3_tiles, patterns_of, plan_varlen
from cupyflash.sim import execute_varlen, replay, theory
from cupyflash.sim.execution import Execution, run
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import Numbers, draw_mask, draw_score, drawn, knowing_mask, measure
from cupyflash.tiling import DoesNotFit
from problems import patterns, sides
from suites import problems_each

H100 = Device.named("H100-SXM")
BESIDE = 7.5  # what memory holds next to O
HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (6, 1), (8, 1), (8, 2))


@dataclass(frozen=True)
class Layout:
    """The layout of an array (b, h, n, d) in memory: with heads inside of rows or not, `step` rows apart, and with room after each
    row.

    Rows begin at multiples of 16 bytes whatever d is.
    """

    rows_first: bool = False
    step: int = 1
    room: int = 0

    def empty(self, shape: tuple[int, ...], dtype: Any, fill: float) -> tuple[np.ndarray, np.ndarray]:
        """All of the memory, and the array in it, both full of `fill`."""
        *heads, n, d = shape
        axes, columns = [*heads, n * self.step], -(-d // 8) * 8 + self.room
        swapped = self.rows_first and len(heads) > 0
        if swapped:
            axes[-2:] = axes[:-3:-1]
        memory = np.full((*axes, columns), fill, dtype)
        array = memory.swapaxes(-2, -3) if swapped else memory
        return memory, array[..., :: self.step, :d]


@dataclass(frozen=True)
class Case:
    """One call. `axes` of its arrays, 4 for (b, h, n, d); `order`: the seed of a schedule; `v_mean`: what V is about."""

    problem: Problem
    device: Device
    tiling: tuple[int, int] | None
    layouts: dict[str, Layout]
    axes: int
    seed: int
    order: int | None
    v_mean: float
    lse: bool

    @property
    def schedule(self) -> TileSchedule:
        return knowing_mask(plan(self.problem, self.device, "fa3", self.tiling, lse=self.lse), self.seed, self.mask)

    @property
    def mask(self) -> Mask | None:
        """The mask function with its values."""
        return draw_mask(self.problem, self.seed)

    def inputs(self) -> Inputs:
        """The inputs for float64: zeros for keys that do not count, an array for a mask function."""
        made = drawn(self.schedule.problem, self.seed, self.v_mean)
        for batch, keys in enumerate(made.beside.get("key_lengths", ())):
            made.k[batch, :, keys:] = made.v[batch, :, keys:] = 0
        flat = (0,) * (4 - self.axes)  # there is one of these
        beside = {name: array[flat] if array.ndim == 4 else array for name, array in made.beside.items()}
        return replace(made, q=made.q[flat], k=made.k[flat], v=made.v[flat], beside=beside)


def executed(case: Case) -> tuple[Execution, dict[str, Numbers]]:
    """An execution and its errors. Behind rows, and where keys do not count, arrays hold NaN; beside O nothing may change."""
    inputs = case.inputs()
    arrays: dict[str, Any] = dict(inputs.beside)
    for name, array in zip("qkv", inputs.qkv, strict=True):
        _, arrays[name] = case.layouts[name].empty(array.shape, array.dtype, np.nan)
        arrays[name][...] = array
        if name != "q":
            for batch, keys in enumerate(inputs.beside.get("key_lengths", ())):
                arrays[name][batch if case.axes == 4 else ...][..., keys:, :] = np.nan
    memory, out = case.layouts["out"].empty((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype, BESIDE)
    lse = np.empty(inputs.q.shape[:-1], np.float32) if case.lse else None
    captured, numbers = captured_values(inputs.score, case.mask)
    arrays |= captured | dict(numbers) | ({} if inputs.dropout is None else inputs.dropout.numbers)
    execution = replace(run(case.schedule, {**arrays, "out": out, "lse": lse}, seed=case.order), out=out.copy())
    out[...] = BESIDE
    assert (memory == BESIDE).all(), "O was written beside its rows"
    return execution, measure(execution.out, lse, inputs)


def check(case: Case) -> tuple[Execution, dict[str, Numbers]]:
    """Executes a case; all that must hold of it."""
    execution, numbers = executed(case)
    assert execution.findings == (), execution.findings[0]
    assert theory.traffic(case.schedule) == replay(case.schedule) == execution.traffic
    assert all(each.good for each in numbers.values()), numbers
    return execution, numbers


def check_packed(schedule: VarlenSchedule, seed: int = 0, order: int | None = None) -> Execution:
    """Executes packed sequences; all that must hold of them."""
    p, seqlens = schedule.problem, schedule.seqlens
    assert seqlens is not None
    q, k, v, cu_q, cu_k = test_varlen.packed(seqlens, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.dtype, seed)
    beside = {"sinks": np.arange(p.heads, dtype=np.float32) - 1} if p.options.sinks else {}
    score, mask, dropout = draw_score(p, seed), draw_mask(p, seed), test_varlen.dropout_of(p.options)
    if mask is not None:
        schedule = replace(schedule, patterns=patterns_of(p, seqlens, mask.arrays | mask.numbers))
    execution = execute_varlen(schedule, q, k, v, seed=order, score=score, mask=mask, dropout=dropout, **beside)
    assert execution.findings == (), execution.findings[0]
    assert theory.traffic(schedule) == replay(schedule) == execution.traffic
    options = replace(p.options, packed=False, mask_function=None)
    for b, (rows, keys) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        each = (array[slice(*part)].swapaxes(0, 1) for array, part in ((q, rows), (k, keys), (v, keys)))
        lse = None if execution.lse is None else execution.lse[:, slice(*rows)]
        n_q, n_k = seqlens[b]
        seen = {"mask": np.broadcast_to(schedule.patterns[b].kept[0], (p.heads, n_q, n_k))} if schedule.patterns else {}
        own = test_varlen.dropout_of(p.options, b)
        inputs = Inputs(*each, options, beside | seen, score=score, sequence=b, dropout=own)
        numbers = measure(execution.out[slice(*rows)].swapaxes(0, 1), lse, inputs)
        assert all(one.good for one in numbers.values()), numbers
    return execution


def runs(problem: Problem, blocks: tuple[int, int] | None) -> bool:
    """True if the kernel runs such blocks, or any."""
    try:
        fa3_tiles.choose(problem, H100, blocks)
    except DoesNotFit:
        return False
    return True


def tilings(problem: Problem) -> st.SearchStrategy[tuple[int, int] | None]:
    """The blocks that are fitted, and any other: narrow ones as often as wide ones."""
    rows = [team.block_rows for team in fa3_tiles.TEAMS]
    found = [(r, c) for r in rows for c in range(16, fa3_tiles.MOST_COLS + 1, 16) if runs(problem, (r, c))]
    narrow = [blocks for blocks in found if blocks[1] <= 48]
    return st.none() | st.sampled_from(narrow) | st.sampled_from(found)


layouts = st.just(Layout()) | st.builds(Layout, st.booleans(), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 8, 40]))
widths = st.sampled_from([64, 64, 128, 96, 192, 256]) | st.integers(1, 32).map(lambda eighth: 8 * eighth) | st.integers(1, 256)


@st.composite
def cases(draw: st.DrawFn, dtype: str, most: int = 420) -> list[Case]:
    """Cases of one kernel: lengths up to `most`."""
    d = draw(widths)
    d_v = draw(st.just(d) | widths)
    causal, windowed, padded, sinks, masked, *others = (draw(st.sampled_from([False, False, True])) for _ in range(7))
    window, score, function = (most, 0 if causal else most) if windowed else None, draw(lines.some), draw(lines.masks)
    own = {"score": score, "mask": masked and function is None, "mask_function": function if masked else None}
    own |= zip(("bias", "dropout"), others, strict=True)
    alike = Problem(1, 1, 1, 1, 1, d, dtype, head_dim_v=d_v, causal=causal, window=window, **own)
    assume(runs(alike, None))
    tiling = draw(tilings(alike))
    heads, kv_heads = draw(st.sampled_from(HEADS))

    def one() -> Case:
        axes = draw(st.sampled_from([4, 4, 3] if heads > 1 else [4, 3, 2]))
        batch = draw(st.integers(1, 3)) if axes == 4 else 1
        n_q, n_k = (draw(st.integers(1, 40) | st.integers(1, most if batch * heads < 4 else most // 2)) for _ in range(2))
        asked: dict[str, Any] = {"scale": draw(st.sampled_from([None, None, 0.02, 1.0, 5.0, 20.0])), "sinks": sinks, **own}
        if own["mask"]:
            asked["pattern"] = draw(patterns(batch, heads, n_q, n_k))
        if padded:
            lengths = st.just(0) | st.just(n_k) | st.integers(0, n_k)
            asked |= {"padded": True, "key_lengths": draw(st.tuples(*[lengths] * batch))}
        if windowed:
            left, right = draw(sides), 0 if causal else draw(sides)
            asked["window"] = (left, right) if (left, right) not in ((None, None), (None, 0)) else (most, right)
        else:
            asked["causal"] = causal
        problem = Problem(batch, heads, kv_heads, n_q, n_k, d, dtype, head_dim_v=d_v, **asked)
        sm_count, l2_bytes = draw(st.sampled_from([H100.sm_count, 1, 3])), draw(st.sampled_from([H100.l2_bytes, 1]))
        small = batch * heads <= 2 and n_q * n_k < 20_000
        return Case(
            problem,
            replace(H100, sm_count=sm_count, l2_bytes=l2_bytes),
            tiling,
            {name: draw(layouts) for name in ("q", "k", "v", "out")},
            axes,
            draw(st.integers(0, 99)),
            draw(st.sampled_from([None, 5, 7]) if small else st.none()),
            draw(st.sampled_from([0.0, 1.0])),
            draw(st.booleans()),
        )

    return [one() for _ in range(problems_each())]


@st.composite
def packed(draw: st.DrawFn, dtype: str, most: int = 300) -> VarlenSchedule:
    """Up to five sequences of nothing to `most` queries and keys."""
    lengths = st.integers(0, most) | st.sampled_from([0, 1, 64, 128, 192])
    seqlens = ((draw(st.integers(1, most)), draw(st.integers(1, most))), *draw(st.lists(st.tuples(lengths, lengths), max_size=4)))
    seqlens = tuple(draw(st.permutations(seqlens)))
    d = draw(widths.map(eights))
    d_v = draw(st.just(d) | widths.map(eights))
    windowed, causal, sinks = (draw(st.sampled_from([False, True])) for _ in range(3))
    heads, kv_heads = draw(st.sampled_from(HEADS[:5]))
    asked: dict[str, Any] = {"window": (draw(st.integers(0, most)), draw(sides))} if windowed else {"causal": causal}
    asked |= {"score": draw(lines.some), "mask_function": draw(lines.masks), "dropout": draw(st.sampled_from([False, False, True]))}
    longest = (max(1, max(each[side] for each in seqlens)) + draw(st.sampled_from([0, 70])) for side in (0, 1))
    scale = draw(st.sampled_from([None, 0.3, 5.0]))
    problem = Problem(len(seqlens), heads, kv_heads, *longest, d, dtype, head_dim_v=d_v, scale=scale, sinks=sinks, **asked)
    device = replace(H100, sm_count=draw(st.sampled_from([H100.sm_count, 1, 3])))
    assume(runs(problem.asking(packed=True), None))
    tiling = draw(tilings(problem.asking(packed=True)))
    return plan_varlen(problem, device, seqlens, tiling, lse=draw(st.booleans()), algorithm="fa3")


def eights(d: int) -> int:
    """The next multiple of eight: rows of arrays without room between them begin at multiples of 16 bytes."""
    return -(-d // 8) * 8
