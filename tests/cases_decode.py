"""Random calls of decoding: a problem, its cache, how arrays lie in memory, a configuration; and what must hold of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import lines
import numpy as np
from hypothesis import strategies as st

from cases_fa3 import Layout
from cupyflash import Device, Problem
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.request.decode import pose
from cupyflash.request.score import Mask, Score, captured_values, seen_by, sizes_of
from cupyflash.schedules import Cache, DecodeSchedule, decode_tiles, plan_decode
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import Execution, execute_decode
from cupyflash.sim.numbers.yardstick import DTYPES, Numbers, draw_mask, draw_score, to, ulp
from cupyflash.tiling import DoesNotFit, TileSize
from suites import problems_each

Arrays = dict[str, np.ndarray]
CACHES = ("k_cache", "v_cache")
LARGE = 64  # a score of which float32 leaves off what a weight's sixth digit is made of
NOBODY_S = (-7, 2**31 - 1)  # pages that nobody may look for


@dataclass(frozen=True)
class Placing:
    """The layout of a call's arrays in memory: each by its layout, or K and V of a key side by side in one, or each row an element
    off wide copies. `shared`: True if two sequences have the same first page."""

    layouts: tuple[Layout, ...] = (Layout(),) * 5
    interleaved: bool = False
    off: bool = False
    shared: bool = False

    def empty(self, which: int, shape: tuple[int, ...], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """All of the memory, and the array in it, full of NaN."""
        memory, array = self.layouts[which].empty((*shape[:-1], shape[-1] + self.off), dtype, np.nan)
        return memory, array[..., int(self.off) :]

    def caches(self, shape: tuple[int, ...], d: int, d_v: int, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """The memory and the arrays of K and V."""
        if not self.interleaved:
            return [self.empty(which, (*shape, width), dtype) for which, width in ((1, d), (2, d_v))]
        memory, array = self.empty(1, (*shape[:-1], 2 * shape[-1], max(d, d_v)), dtype)
        return [(memory, array[..., each::2, :width]) for each, width in enumerate((d, d_v))]


NONE_ADDED = Cache()


@dataclass(frozen=True)
class Case:
    """One call. `problem.options.key_lengths` are the cached keys, `problem.seqlen_k` the room; `blocks`: keys of a block and slots
    of the ring where the schedule does not choose them; `order`: the seed of a schedule; `tree_each`: a tree mask a sequence.
    Q is multiplied by `q_size`, V, about `v_mean`, by `v_size`."""

    problem: Problem
    cache: Cache = NONE_ADDED
    device: Device = field(default_factory=lambda: Device.named("A100-40GB"))
    splits: int | None = None
    blocks: tuple[int, int] | None = None
    placing: Placing = Placing()
    tree_each: bool = False
    seed: int = 0
    order: int | None = None
    q_size: float = 1.0
    v_size: float = 1.0
    v_mean: float = 1.0
    lse: bool = True

    @property
    def lengths(self) -> tuple[int, ...]:
        found = self.problem.options.key_lengths
        assert found is not None
        return found

    def normal(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """Normal numbers of the problem's dtype."""
        return rng.standard_normal(shape).astype(np.float32).astype(DTYPES[self.problem.dtype])

    def arrays(self) -> tuple[Arrays, list[np.ndarray]]:
        """The arguments of a call, by name, and all memory of the caches, with NaN in all elements that must not be read."""
        p, c, rng = self.problem, self.cache, np.random.default_rng(self.seed)
        dtype, room = DTYPES[p.dtype], p.seqlen_k if c.page_size is None else c.page_size
        shape = (p.batch if c.page_size is None else c.pages, p.kv_heads, room)
        (K_all, k_cache), (V_all, v_cache) = self.placing.caches(shape, p.head_dim, p.head_dim_v, dtype)
        made: Arrays = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": np.array(self.lengths, np.int32)}
        if c.page_size is not None:
            made["block_table"] = self.table(rng)
        for b, length in enumerate(self.lengths):
            for at in self.places(made, b, length):
                k_cache[at], v_cache[at] = self.normal(rng, p.kv_heads, p.head_dim), self.values(rng, p.kv_heads, p.head_dim_v)
        new = (p.batch, p.kv_heads, c.appended)
        others = {"q": self.normal(rng, p.batch, p.heads, p.seqlen_q, p.head_dim) * dtype.type(self.q_size)}
        if c.appended:
            others |= {"k": self.normal(rng, *new, p.head_dim), "v": self.values(rng, *new, p.head_dim_v)}
        for which, (name, array) in zip((0, 3, 4), others.items(), strict=False):
            _, made[name] = self.placing.empty(which, array.shape, dtype)
            made[name][...] = array
        if c.tree:
            trees = rng.random((p.batch if self.tree_each else 1, 1, p.seqlen_q, p.seqlen_q)) < 0.6
            wider = np.zeros((*trees.shape[:-1], p.seqlen_q + 3), bool)
            wider[..., 2 : 2 + p.seqlen_q] = trees
            tree = wider[..., 2 : 2 + p.seqlen_q] if self.seed % 2 else trees.swapaxes(2, 3)
            made["tree_mask"] = tree if self.tree_each else tree[0, 0]
        if p.options.sinks:
            made["sinks"] = rng.standard_normal(p.heads).astype(np.float32)
        return made, [K_all, V_all]

    def values(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return (self.normal(rng, *shape) + DTYPES[self.problem.dtype].type(self.v_mean)) * DTYPES[self.problem.dtype].type(
            self.v_size
        )

    def table(self, rng: np.random.Generator) -> np.ndarray:
        """Pages in random order; behind those of a sequence's keys stands what is none."""
        p, c = self.problem, self.cache
        assert c.page_size is not None
        per_sequence = p.seqlen_k // c.page_size
        table = rng.permutation(c.pages)[: p.batch * per_sequence].reshape(p.batch, per_sequence).astype(np.int32)
        if self.placing.shared and p.batch > 1 and min(self.lengths[:2]) >= c.page_size:
            table[1, 0] = table[0, 0]
        for b, length in enumerate(self.lengths):
            table[b, -(-(length + c.appended) // c.page_size) :] = NOBODY_S[b % 2]
        return table

    def places(self, arrays: Arrays, b: int, keys: int) -> list[tuple[Any, ...]]:
        """The places of a sequence's first keys in a cache."""
        page = self.cache.page_size
        if page is None:
            return [(b, slice(None), key) for key in range(keys)]
        return [(arrays["block_table"][b, key // page], slice(None), key % page) for key in range(keys)]

    def schedule_of(self, arrays: Arrays) -> DecodeSchedule:
        options = replace(self.problem.options, key_lengths=None, padded=False, sinks=False)
        problem, cache = pose(arrays | captured_values(self.score, self.mask)[0], options)
        schedule = plan_decode(problem, self.device, cache, num_splits=self.splits, lse=self.lse)
        return schedule if self.blocks is None else configured(schedule, *self.blocks)

    @cached_property
    def score(self) -> Score | None:
        """The problem's score function, with what it captures."""
        return draw_score(self.problem, self.seed)

    @cached_property
    def mask(self) -> Mask | None:
        """Its mask function."""
        return draw_mask(self.problem, self.seed)

    @cached_property
    def schedule(self) -> DecodeSchedule:
        return self.schedule_of(self.arrays()[0])


def configured(schedule: DecodeSchedule, block_cols: int, stages: int) -> DecodeSchedule:
    """The same with other blocks of keys and another ring. ValueError where the device has no room for them."""
    for candidate in decode_tiles.candidates(schedule.problem.asking(key_lengths=None), schedule.device, schedule.splits):
        config = candidate.config
        if (config.block_cols, config.stages) == (block_cols, stages) and not candidate.rejected:
            used = TileSize(config.block_rows, config.block_cols, str(config))
            return replace(schedule, candidate=candidate, tiling=replace(schedule.tiling, fitted=used, used=used))
    raise ValueError(f"{schedule.device.name} does not run {block_cols} keys a block in {stages} slots")


def executed(case: Case) -> tuple[Execution, dict[str, Numbers], bool]:
    """An execution, its errors, and whether in the caches new keys' places have changed, to their bits, and nothing else."""
    arrays, memories = case.arrays()
    schedule = case.schedule_of(arrays)
    expected, wanted = case.arrays()  # the same once more
    for b, length in enumerate(case.lengths):
        for new, at in enumerate(case.places(arrays, b, length + case.cache.appended)[length:]):
            expected["k_cache"][at], expected["v_cache"][at] = arrays["k"][b, :, new], arrays["v"][b, :, new]
    execution = execute_decode(schedule, seed=case.order, score=case.score, mask=case.mask, **arrays)
    kept = all(found.tobytes() == right.tobytes() for found, right in zip(memories, wanted, strict=True))
    return execution, measure(execution.out, execution.lse, case, expected), kept


def check(case: Case) -> tuple[Execution, dict[str, Numbers]]:
    """Executes a case; all that must hold of it."""
    execution, numbers, kept = executed(case)
    schedule = case.schedule
    assert execution.findings == (), execution.findings[0]
    assert kept, "the caches hold something else than what was cached and appended"
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic
    assert all(each.good for each in numbers.values()), numbers
    return execution, numbers


def measure(out: np.ndarray, lse: np.ndarray | None, case: Case, arrays: Arrays) -> dict[str, Numbers]:
    """The errors of O and L by the 2x rule (cupyflash.sim.numbers.yardstick), from caches in which the new keys are.

    Of O in float32 also what a score is off by, times the largest value, where scores are large: of few rows whose weights they
    decide, the plain computation's may by chance be right to more digits than float32 has.
    """
    p = case.problem
    exact, plain, largest = zip(*(attended(case, arrays, b) for b in range(p.batch)), strict=True)
    right, L = (np.stack([each[part] for each in exact]) for part in (0, 1))
    rounded = np.stack([each[0] for each in plain]).astype(out.dtype)
    errors = [_largest(found, right) for found in (out, rounded)]
    of_scores = ulp(max(largest), np.float32) if p.dtype == "float32" and max(largest) > LARGE else 0.0
    of_scores *= np.nanmax(np.abs(arrays["v_cache"].astype(np.float64)), initial=0)
    numbers = {"O": Numbers(errors[0], 2 * errors[1] + ulp(np.abs(right).max(initial=0), out.dtype) + of_scores)}
    if lse is None:
        return numbers
    seen = np.isfinite(L)
    agree = np.array_equal(np.isfinite(lse), seen) and bool(np.all(np.isneginf(lse[~seen])))
    error = _largest(lse[seen], L[seen]) if agree else np.inf
    return numbers | {"L": Numbers(error, 1e-5 + 4 * ulp(max(largest), np.float32))}


Result = tuple[np.ndarray, np.ndarray]


def attended(case: Case, arrays: Arrays, b: int) -> tuple[Result, Result, float]:
    """O and L of a sequence in float64, the same plainly in q's dtype, and the largest score before any cap."""
    p, score, keys = case.problem, case.score, case.lengths[b] + case.cache.appended
    places = case.places(arrays, b, keys)
    shape = (p.kv_heads, 0)
    K, V = (
        np.stack([arrays[name][at] for at in places], 1) if places else np.empty((*shape, d), arrays["q"].dtype)
        for name, d in zip(CACHES, (p.head_dim, p.head_dim_v), strict=True)
    )
    K, V = (np.repeat(array, p.heads // p.kv_heads, 0) for array in (K, V))
    seen, sinks = visible(case, arrays, b, keys), arrays.get("sinks", np.full(p.heads, -np.inf))
    found: list[Any] = []
    for dtype, rounded in ((np.float64, lambda x: x), (np.float32, to(arrays["q"].dtype))):
        S = dtype(p.softmax_scale) * (arrays["q"][b].astype(dtype) @ K.astype(dtype).swapaxes(1, 2))
        most = float(np.abs(S).max(initial=0))
        if score is not None:
            at = {name: value[0] for name, value in positions(sizes_of(p) | {"k": keys}).items() if np.ndim(value)}
            at |= {"b": b, "q": at["row"] + keys - p.seqlen_q, "n_q": p.seqlen_q, "n_k": keys, "s": S}
            S = evaluate(score.form.tree, at | score.arrays | score.numbers, dtype)
        S, sink = rounded(np.where(seen, S, dtype(-np.inf))), sinks.astype(dtype)[:, None, None]
        m = np.maximum(S.max(-1, keepdims=True, initial=-np.inf), sink)
        m = np.where(np.isneginf(m), dtype(0), m)
        P = np.exp(S - m)
        l = P.sum(-1, keepdims=True) + np.exp(sink - m)  # noqa: E741 (the paper's name)
        with np.errstate(divide="ignore"):
            L = (m + np.log(l))[..., 0]
        found.append((rounded(rounded(P / np.where(l == 0, dtype(1), l)) @ V.astype(dtype)), L))
        found.append(most)
    return found[0], found[2], found[1]


def visible(case: Case, arrays: Arrays, b: int, keys: int) -> np.ndarray:
    """The keys of a sequence that each query sees: (n_q, keys), or with heads before. The queries are its newest places."""
    p = case.problem
    own, cols = np.arange(p.seqlen_q)[:, None] + keys - p.seqlen_q, np.arange(keys)
    seen = np.ones((p.seqlen_q, keys), bool)
    if p.options.left is not None:
        seen &= cols >= own - p.options.left
    if p.options.right is not None:
        seen &= cols <= own + p.options.right
    if (tree := arrays.get("tree_mask")) is not None:
        newest = min(p.seqlen_q, keys)
        of_b = tree[b, 0] if tree.ndim == 4 else tree
        seen[:, keys - newest :] &= of_b[:, p.seqlen_q - newest :]
    if case.mask is not None:
        of_sequence = replace(p.asking(padded=False, key_lengths=None), batch=1, seqlen_k=keys)
        seen = seen & seen_by(case.mask.form, of_sequence, case.mask.arrays | case.mask.numbers, b)[0]
    return seen


def _largest(ours: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference; infinite where one is not a number."""
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(ours.astype(np.float64) - expected).max(initial=0))
    return float("inf") if np.isnan(largest) else largest


# --- random ones

GROUPS = (1, 1, 2, 3, 4, 5, 8, 16)
PAGES = (None, None, 16, 32, 48, 80, 256)
SPLITS = (2, 3, 7, 17, 256)
DEVICES = ("A100-40GB", "A100-40GB", "H100-SXM", "T4")
layouts = st.just(Layout()) | st.builds(Layout, st.booleans(), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 8, 40]))
widths = st.sampled_from([16, 64, 64, 128]) | st.integers(1, 32).map(lambda eighth: 8 * eighth) | st.integers(1, 256)
sides = st.none() | st.integers(0, 5) | st.integers(0, 200)


def alike(group: int, n_q: int) -> list[int]:
    """Numbers of queries whose rows go to as many warps, this one among them."""

    def warps(n: int) -> int:
        return min(16, 1 << (-(-n * group // 16) - 1).bit_length())

    return [n for n in range(1, n_q + 20) if warps(n) == warps(n_q)]


@st.composite
def cases(draw: st.DrawFn, pages: Sequence[int | None] = PAGES) -> list[Case]:
    """Cases of one kernel, or one of what the schedule chooses by itself; `pages` has sizes to choose from, None for no pages."""
    flag = st.sampled_from([False, False, True])
    device = Device.named(draw(st.sampled_from(DEVICES)))
    types = ["float16", "float16", "bfloat16", "float32"]
    dtype = draw(st.sampled_from(types if device.compute_capability >= (8, 0) else types[::3]))
    d = draw(widths if dtype != "float32" else widths.map(lambda width: -(-width // 2)))
    d_v = draw(st.just(d) | widths)
    group, n_q = draw(st.sampled_from(GROUPS)), draw(st.integers(1, 4) | st.integers(1, 20) | st.integers(40, 48))
    if dtype == "float32":  # ordinary FMAs take long to execute
        n_q = min(n_q, 40 // group)
    same, page = alike(group, n_q), draw(st.sampled_from(pages))
    causal, windowed = draw(st.booleans()), draw(flag)
    appends, tree, sinks, upside_down, off = (draw(flag) for _ in range(5))
    line, mask = draw(lines.some), draw(lines.masks)
    split, free = draw(flag) is False, draw(flag)
    stages = (2, 3, 4) if device.compute_capability >= (8, 0) else (1,)
    chosen = None if free else (draw(st.sampled_from([16, 32, 64])), draw(st.sampled_from(stages)))
    most = 120 if dtype == "float32" else 420

    def one() -> Case:
        batch, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
        queries = draw(st.sampled_from(same))
        new = draw(st.integers(1, queries + 3)) if appends else 0
        room = draw(st.integers(new, max(new, most // batch)))
        room = room if page is None else -(-max(room, 1) // page) * page
        most_cached = room - new
        length = (
            st.just(0)
            | st.just(most_cached)
            | st.integers(0, most_cached)
            | st.integers(0, most_cached).map(lambda n: n // 16 * 16)
        )
        left, right = (draw(sides), 0 if causal else draw(sides)) if windowed else (None, None)
        if windowed and (left, right) in ((None, None), (None, 0)):
            left = 30
        scale = draw(st.sampled_from([-0.3, 0.0, -5.0] if upside_down else [None, None, 0.02, 1.0, 5.0, 20.0]))
        lengths = draw(st.tuples(*[length] * batch))
        asked: dict[str, Any] = {"scale": scale, "sinks": sinks, "padded": True, "key_lengths": lengths}
        asked |= {"window": (left, right)} if windowed else {"causal": causal}
        pages = 0 if page is None else batch * (room // page) + draw(st.integers(1, 3))
        small = batch * kv_heads * sum(lengths) < 400
        return Case(
            Problem(
                batch, group * kv_heads, kv_heads, queries, room, d, dtype, head_dim_v=d_v, score=line, mask_function=mask, **asked
            ),
            Cache(new, page, pages, tree),
            device if not free else replace(device, sm_count=draw(st.sampled_from([device.sm_count, 1, 5]))),
            (draw(st.none() | st.sampled_from(SPLITS)) if free else draw(st.sampled_from(SPLITS))) if split else 1,
            chosen,
            Placing(tuple(draw(layouts) for _ in range(5)), draw(flag), off, draw(st.booleans())),
            draw(st.booleans()),
            draw(st.integers(0, 99)),
            draw(st.sampled_from([None, None, 5, 7])) if small else None,
            draw(st.sampled_from([1.0, 1.0, 30.0])),
            draw(st.sampled_from([1.0, 1.0, 1000.0])),
            draw(st.sampled_from([0.0, 1.0])),
            draw(st.booleans()),
        )

    return [fitting(one()) for _ in range(1 if free else problems_each() + 1)]


def fitting(case: Case) -> Case:
    """The same with blocks that the device has room for."""
    try:
        case.schedule_of(case.arrays()[0])
    except DoesNotFit:
        return fitting(replace(case, device=Device.named("H100-SXM")))
    except ValueError as error:
        assert "does not run" in str(error), error
        return replace(case, blocks=None)
    return case
