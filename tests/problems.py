"""Random problems, several of each kernel at a time: to compile one takes longer than to run it on arrays of this size."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cupyflash import Problem
from cupyflash.request.options import BlockMask, Pattern
from suites import problems_each

TILINGS = ((16, 16), (48, 32), (32, 64))
sides = st.none() | st.integers(0, 5) | st.integers(0, 200)  # of a window


def reach(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """A window that may stand beside `causal`."""
    return left, None if causal else right


def longest(tiling: tuple[int, int] | None, most: int = 150) -> int:
    """Lengths of at most five blocks: what more there is happens again."""
    return most if tiling is None else min(most, 5 * max(tiling))


@st.composite
def any_problems(draw: st.DrawFn, dtype: str, fewest_keys: int = 0, most: int = 150) -> list[Problem]:
    """Problems of one kernel as contiguous arrays pose them: every mask, grouped heads, any d and d_v, lengths up to `most`."""
    d, d_v = draw(st.sampled_from([(16, None), (64, None), (128, None), (40, 33), (64, 96)]))
    causal, mask, bias, padded, windowed = (draw(st.booleans()) for _ in range(5))
    size = 4 if dtype == "float32" else 2
    bits = d * size | (d_v or d) * size | 16
    longest_key = 80 if dtype == "float32" else 150  # ordinary FMAs take long to execute

    def one() -> Problem:
        batch, seqlen_k = draw(st.integers(1, 3)), draw(st.integers(fewest_keys, min(most, longest_key)))
        heads, kv_heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]))
        return Problem(
            batch,
            heads,
            kv_heads,
            draw(st.integers(1, min(most, longest_key))),
            seqlen_k,
            d,
            dtype,
            causal=causal,
            window=reach(causal, draw(sides), draw(sides)) if windowed else None,
            scale=draw(st.sampled_from([None, 0.3, -0.2, 1.0])),
            head_dim_v=d_v,
            mask=mask,
            bias=bias,
            padded=padded,
            key_lengths=draw(st.tuples(*[st.integers(0, seqlen_k)] * batch)) if padded else None,
            alignment=bits & -bits,
        )

    return [one() for _ in range(problems_each())]


def orders(problem: Problem) -> st.SearchStrategy[int | None]:
    """Seeds of a schedule, None for warps together; in a random order they run one by one, which only few of them can afford."""
    p = problem
    return st.sampled_from([None, 5, 7]) if p.batch * p.heads <= 2 and p.seqlen_q * p.seqlen_k < 6000 else st.none()


@st.composite
def patterns(draw: st.DrawFn, batch: int, heads: int, n_q: int, n_k: int) -> Pattern:
    """Masks of which some tiles are empty and some whole: documents, patches of one value, a band with holes, single scores."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    shape = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), n_q, n_k
    kind, seen = draw(st.sampled_from(["documents", "patches", "band", "scores", "nothing"])), np.zeros(shape, bool)
    r, c = np.arange(n_q)[:, None], np.arange(n_k)
    if kind == "documents":
        ids = np.sort(rng.integers(0, 3, (*shape[:2], max(n_q, n_k))), axis=-1)
        seen = ids[..., :n_q, None] == ids[..., None, :n_k]
    elif kind == "patches":
        size = draw(st.sampled_from([8, 16, 32, 48]))
        seen = (rng.random((*shape[:2], n_q // size + 1, n_k // size + 1)) < 0.5)[..., r // size, c // size]
    elif kind == "band":
        seen |= (abs(r - c) < draw(st.integers(0, 90))) & (c % 7 != 3)
    elif kind == "scores":
        seen = rng.random(shape) < draw(st.sampled_from([0.001, 0.5, 0.999]))
    return Pattern.of(seen)


@st.composite
def sparse_problems(draw: st.DrawFn, tiling: tuple[int, int], most: int = 200, blocks: bool = True) -> list[Problem]:
    """Problems of one kernel with a window, a block mask (if `blocks`), or both, and whatever else restricts the scores; what a
    mask says may be known."""
    dtype = draw(st.sampled_from(["float16", "float32"]))
    causal, mask, bias, padded, windowed = (draw(st.booleans()) for _ in range(5))
    blocked = blocks and draw(st.booleans())

    def one() -> Problem:
        batch, n_q, n_k = draw(st.integers(1, 2)), draw(st.integers(1, most)), draw(st.integers(1, most))
        block_mask = None
        if blocked:
            shape = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, 2])), -(-n_q // tiling[0]), -(-n_k // tiling[1])
            kept = np.random.default_rng(draw(st.integers(0, 99))).random(shape) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
            block_mask = BlockMask.of(kept)
        known = mask and draw(st.sampled_from([True, True, False]))
        return Problem(
            batch,
            2,
            draw(st.sampled_from([1, 2])),
            n_q,
            n_k,
            16,
            dtype,
            causal=causal,
            mask=mask,
            bias=bias,
            padded=padded,
            key_lengths=draw(st.tuples(*[st.integers(0, n_k)] * batch)) if padded else None,
            window=reach(causal, draw(sides), draw(sides)) if windowed else None,
            block_mask=block_mask,
            pattern=draw(patterns(batch, 2, n_q, n_k)) if known else None,
        )

    return [one() for _ in range(problems_each())]
