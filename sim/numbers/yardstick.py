"""The rule for correct numbers: an error against float64 of at most twice the plain low-precision computation's.

`verify` and the tests apply the same rule, which is only here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from cupyflash.arrays import numpy_dtype, of_heads
from cupyflash.basics import Array, Report, Shape, Values
from cupyflash.expressions.derivative import derivative
from cupyflash.expressions.tree import Node, counted
from cupyflash.request.dropout import Dropout
from cupyflash.request.options import OPTIONS, VECTORS, Options, Pattern
from cupyflash.request.problem import Problem
from cupyflash.request.score import Form, Mask, Score, seen_by, sizes_of
from cupyflash.request.score_sums import sum_field
from cupyflash.schedules import Cache, TileSchedule
from cupyflash.sim.numbers.inputs import Decoding, Inputs
from cupyflash.sim.numbers.reference import (
    Backward,
    Forward,
    Rounding,
    backward,
    before_function,
    forward,
    masked_scores,
    products,
    sinks_of,
    to_captured,
)

AnyTiles = TypeVar("AnyTiles", bound=TileSchedule)


class _Dtypes(dict[str, np.dtype[Any]]):
    """NumPy's dtypes by name, looked up on first use: only bfloat16 needs another package."""

    def __missing__(self, name: str) -> np.dtype[Any]:
        return self.setdefault(name, numpy_dtype(name))


DTYPES = _Dtypes()
# The probability of dropout if a problem does not give one
DROPPED = 0.25
# The epsilon of bfloat16, which NumPy's own finfo does not know.
BFLOAT16_EPS = 2.0**-7
NOTHING_GIVEN: Values = {}
# Elements of a captured array along an axis that no position counts
FREE_AXIS = 40


@dataclass(frozen=True)
class Numbers:
    """One tensor's largest absolute error against float64, and the allowed one.

    A NaN is an infinite error, and so is a log-sum-exp that is finite where it should be -inf, or the reverse.
    """

    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return bool(self.error <= self.allowed)


def draw(problem: Problem, seed: int = 0, v_mean: float = 0.0) -> tuple[Array, Array, Array]:
    """Normal q, k and v of shape (b, h, n, d); V about `v_mean`, since a mean of zero hides errors in the weights."""
    rng = np.random.default_rng(seed)
    p = problem
    q = rng.standard_normal((p.batch, p.heads, p.seqlen_q, p.head_dim))
    k = rng.standard_normal((p.batch, p.kv_heads, p.seqlen_k, p.head_dim))
    v = rng.standard_normal((p.batch, p.kv_heads, p.seqlen_k, p.head_dim_v)) + v_mean
    return tuple(array.astype(np.float32).astype(DTYPES[p.dtype]) for array in (q, k, v))  # type: ignore[return-value]


def draw_gradient(problem: Problem, seed: int = 0) -> Array:
    """A normal gradient of O, of shape (b, h, n_q, d_v)."""
    rng, p = np.random.default_rng([seed, 2]), problem
    return rng.standard_normal((p.batch, p.heads, p.seqlen_q, p.head_dim_v)).astype(np.float32).astype(DTYPES[p.dtype])


def draw_masks(problem: Problem, seed: int = 0) -> dict[str, Array]:
    """Draw the arrays that the problem has beside q, k and v, by argument name; mask and bias vary along all four axes."""
    rng = np.random.default_rng([seed, 1])
    p, asked, scores = problem, problem.options, (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    drawn: dict[str, Array] = {}
    if asked.mask:
        known = asked.pattern
        random = rng.random(scores) < 0.7
        drawn["mask"] = random if known is None or known.bits is None else known.kept
    if asked.mask_function is not None and asked.pattern is not None:
        drawn["mask"] = np.broadcast_to(asked.pattern.kept, scores)
    if asked.bias:
        drawn["bias"] = rng.standard_normal(scores).astype(np.float32).astype(DTYPES[p.bias_dtype])
    if asked.padded:
        lengths = rng.integers(0, p.seqlen_k + 1, p.batch) if asked.key_lengths is None else asked.key_lengths
        drawn["key_lengths"] = np.array(lengths, np.int32)
    vectors = (name for name in VECTORS if getattr(asked, name))
    drawn |= {name: rng.standard_normal(p.heads).astype(np.float32) for name in vectors}
    if asked.block_mask is not None:
        drawn["block_mask"] = asked.block_mask.kept
    return drawn


def knowing_mask(schedule: AnyTiles, seed: int = 0, mask: Mask | None = None) -> AnyTiles:
    """The schedule with the values of the mask drawn for its problem, or of `mask`, a function: its counts depend on them."""
    p = schedule.problem
    if p.options.pattern is not None or not (p.options.mask or mask is not None):
        return schedule
    said = draw_masks(p, seed)["mask"] if mask is None else seen_by(mask.form, p, mask.arrays | mask.numbers)
    return replace(schedule, problem=p.asking(pattern=Pattern.of(said)))


def drawn(
    problem: Problem, seed: int = 0, v_mean: float = 0.0, blocks: tuple[int, int] | None = None, dropped: float = DROPPED
) -> Inputs:
    """Draw q, k, v and the problem's further arrays; a mask function becomes the array of its values. A block mask has blocks of
    `blocks` (Br, Bc); `dropped` is the probability of dropout, if the problem has it."""
    options = replace(problem.options, block_mask=None, mask_function=None, pattern=None, tiles_given=False)
    score, dropout = draw_score(problem, seed), Dropout(dropped, 2**40 + seed, 1) if problem.options.dropout else None
    return Inputs(*draw(problem, seed, v_mean), options, draw_masks(problem, seed), blocks, score, dropout=dropout)


def draw_score(problem: Problem, seed: int = 0, given: Values = NOTHING_GIVEN) -> Score | None:
    """Draw the values that a problem's score function captures, from 1/4 to 1, or 0 to 3, except those that are `given`.

    An axis that a position indexes has the position's length, any other one `FREE_AXIS` elements.
    """
    form = problem.options.score
    return None if form is None else Score(form.text, **_drawn(problem, form, seed, given))


def draw_mask(problem: Problem, seed: int = 0, given: Values = NOTHING_GIVEN) -> Mask | None:
    """Draw the same for its mask function; integers grow along the last axis, as document numbers do."""
    form = problem.options.mask_function
    return None if form is None else Mask(form.text, **_drawn(problem, form, seed, given))


def _drawn(problem: Problem, form: Form, seed: int, given: Values) -> Report:
    """Draw the values by name."""
    rng = np.random.default_rng([seed, 4 if form.kind == "score" else 5])
    sizes, values = sizes_of(problem), dict[str, Any]()
    for captured in form.captured:
        counts = [[counted(index) for index in load.indices] for load in form.loads if load.name == captured.name]
        free = [next(filter(None, each), None) for each in zip(*counts, strict=True)]
        shape = tuple(FREE_AXIS if each is None else sizes[each] for each in free)
        drawn = {"float": rng.uniform(0.25, 1, shape), "int": rng.integers(0, 4, shape), "bool": rng.random(shape) < 0.5}
        array = np.asarray(drawn[captured.type])
        if form.kind == "mask" and captured.type == "int" and captured.axes:
            array = np.sort(array, axis=-1)
        values[captured.name] = array.item() if captured.axes is None else array.astype(DTYPES[captured.dtype])
    return values | {name: value for name, value in given.items() if name in values}


def draw_decode(problem: Problem, cache: Cache, seed: int = 0, v_mean: float = 0.0) -> Decoding:
    """Draw decoding's arrays as `draw` and `draw_masks` do; caches are NaN wherever no sequence has a key.

    Unknown lengths fill the cache. Pages are in random order, and table entries that must not be read name no page. The tree mask
    lets each query see its own key.
    """
    p, rng = problem, np.random.default_rng([seed, 3])
    room = p.seqlen_k - cache.appended
    lengths = p.options.key_lengths or (room,) * p.batch
    q, *kv = draw(p, seed, v_mean)
    arrays: dict[str, Array] = {"q": q, "cache_seqlens": np.array(lengths, np.int32)}
    places = np.full((p.batch, p.seqlen_k // (cache.page_size or max(1, p.seqlen_k))), -1, np.int32)
    if cache.page_size:
        used = [-(-(length + cache.appended) // cache.page_size) for length in lengths]
        if sum(used) > cache.pages:
            raise ValueError(f"pages must be at least {sum(used)}, the pages that the sequences fill, got {cache.pages}")
        places[np.arange(places.shape[1]) < np.array(used)[:, None]] = rng.permutation(cache.pages)[: sum(used)]
        arrays["block_table"] = places
    for (name, new), rows in zip((("k_cache", "k"), ("v_cache", "v")), kv, strict=True):
        drawn = rows[:, :, :room].copy()
        if cache.appended:
            arrays[new] = rows[:, :, room:].copy()
        for own, length in zip(drawn, lengths, strict=True):
            own[:, length:] = np.nan
        arrays[name] = _in_places(drawn, places, cache, p.seqlen_k)
    if cache.tree:
        arrays["tree_mask"] = (rng.random((p.batch, p.seqlen_q, p.seqlen_q)) < 0.6) | np.eye(p.seqlen_q, dtype=bool)
    arrays |= {name: array for name, array in draw_masks(p, seed).items() if name in VECTORS}
    return Decoding(arrays, p.options.beside({}), draw_score(p, seed), draw_mask(p, seed))


def _in_places(rows: Array, places: Array, cache: Cache, keys: int) -> Array:
    """A cache with room for `keys` keys that holds rows (b, h_kv, fewer, d), in pages if it is paged; NaN elsewhere."""
    b, heads, given, d = rows.shape
    filled = np.full((b, heads, keys, d), np.nan, rows.dtype)
    filled[:, :, :given] = rows
    if cache.page_size is None:
        return filled
    pages = np.full((cache.pages, heads, cache.page_size, d), np.nan, rows.dtype)
    of_sequences = np.moveaxis(filled.reshape(b, heads, -1, cache.page_size, d), 1, 2)
    pages[places[places >= 0]] = of_sequences[places >= 0]
    return pages


def to(dtype: Any) -> Rounding:
    """A function that rounds to a dtype and returns float32."""
    return lambda x: x.astype(dtype).astype(np.float32)


def plain(inputs: Inputs) -> Array:
    """Plain attention in q's dtype: S, P and O each rounded to it, sums in float32."""
    return forward(inputs, np.float32, to(inputs.q.dtype)).O.astype(inputs.q.dtype)


def ulp(x: float, dtype: object) -> float:
    """The unit in the last place of x in a dtype."""
    finfo: Any = np.finfo
    eps = BFLOAT16_EPS if np.dtype(dtype).name == "bfloat16" else float(finfo(dtype).eps)  # type: ignore[call-overload]
    return eps * 2.0 ** math.floor(math.log2(max(x, 1e-30)))


def measure(out: Array, lse: Array | None, inputs: Inputs, score_dtype: object = np.float32) -> dict[str, Numbers]:
    """Measure the errors of O, and of L if there is one, with the allowed ones.

    O: twice the plain computation's error plus one unit in the last place of the output. L: 1e-5 plus four units in the last place
    of the largest score. `score_dtype` is the type of S: float32 on chip, the element type if S goes to HBM.
    """
    exact = forward(inputs)
    step = ulp(np.abs(exact.O).max(initial=0), out.dtype)
    numbers = {"O": Numbers(_largest(out, exact.O), 2 * _largest(plain(inputs), exact.O) + step)}
    if lse is None:
        return numbers
    seen = np.isfinite(exact.L)
    shapes_agree = np.array_equal(np.isfinite(lse), seen) and bool(np.all(np.isneginf(lse[~seen])))
    error = _largest(lse[seen], exact.L[seen]) if shapes_agree else float("inf")
    return numbers | {"L": Numbers(error, 1e-5 + 4 * ulp(largest_score(inputs), score_dtype))}


def measure_decode(out: Array, lse: Array | None, sequences: Sequence[Inputs]) -> dict[str, Numbers]:
    """Measure each of `Decoding.sequences` by itself as `measure` does; returns the numbers of the one nearest to its limit, or
    beyond it."""
    each = [measure(out[b : b + 1], None if lse is None else lse[b : b + 1], inputs) for b, inputs in enumerate(sequences)]
    return {name: max((numbers[name] for numbers in each), key=lambda own: own.error / own.allowed) for name in each[0]}


def largest_score(inputs: Inputs) -> float:
    """The largest absolute score, seen or not."""
    kept = {name for name, each in OPTIONS.items() if each.in_scores}
    options = Options(**{name: getattr(inputs.options, name) for name in kept})
    beside = {name: array for name, array in inputs.beside.items() if name in kept}
    S = masked_scores(replace(inputs, options=options, beside=beside, blocks=None))
    return float(np.abs(S[np.isfinite(S)]).max(initial=0))


def _largest(ours: Array, expected: Array) -> float:
    """The largest absolute difference; infinite if it is NaN."""
    with np.errstate(invalid="ignore"):  # an infinity less an infinity
        largest = float(np.abs(ours.astype(np.float64) - expected).max(initial=0))
    return float("inf") if np.isnan(largest) else largest


def handed_on(inputs: Inputs, algorithm: str) -> tuple[Array, Array]:
    """O and L for a backward, as its forward returns them: exact, then rounded; standard attention's L comes from the stored S."""
    exact = forward(inputs)
    kept = numpy_dtype(inputs.options.score_dtype or inputs.q.dtype.name)
    L = forward(inputs, np.float32, to(kept)).L if algorithm == "standard" else exact.L
    return exact.O.astype(inputs.q.dtype), L.astype(np.float32)


def plain_gradients(dout: Array, inputs: Inputs, *, from_out: bool) -> dict[str, Array]:
    """Plain gradients in q's dtype: S, P, O, dP, dS and the results each rounded to it, sums in float32 (Algorithm 3).

    D is rowsum(P dP), as in the paper's Algorithm 3, or with `from_out` rowsum(dO O), as in Algorithm 4.
    """
    dtype = inputs.q.dtype
    made = backward(dout, inputs, np.float32, to(dtype), from_out=from_out).gradients
    return {name: gradient.astype(dtype) for name, gradient in made.items()}


def measure_gradients(gradients: Mapping[str, Array], dout: Array, inputs: Inputs) -> dict[str, Numbers]:
    """Measure the errors of gradients by name (dQ, dK, dV, dbias, dsinks, dscore_NAME) under the 2x rule. The allowed error is the
    sum of

    2 x the plain computation's error         of the worse of its two ways to D; or, if larger, 2 x what a row's D = rowsum(dO O)
                                              makes of O's rounding, half a unit of O in each product, when such errors add up
                                              as random ones do: with few rows, the plain computation's may be 0 by chance
    1 unit in the last place                  of the gradient's dtype, at its largest element
    2 units in the last place of float32      at the largest term of which dP - D cancels a part
    1 unit in the last place of float32       of the largest score, or of 4 (about log l), the error of S, whose terms cancel,
                                              and of P's exponent; times the change of gradients with scores, P (1 - P) for the
                                              weights: 0 if a row has one weight
    1/2 unit of O, in its dtype               for dsinks: that error of D once more
    """
    exact, p = backward(dout, inputs), inputs.problem
    rough = [plain_gradients(dout, inputs, from_out=from_out) for from_out in (False, True)]
    dO, Q, K = (np.abs(array.astype(np.float64)) for array in (dout, inputs.q, inputs.k))
    whole = exact.P * (np.abs(exact.dP) + np.abs(exact.D))
    cancels = np.maximum(whole, np.abs(before_function(inputs, exact.P, whole))).max(initial=0)
    scale = abs(p.softmax_scale)
    cancelled = {"dQ": scale * cancels * K.max(initial=0), "dK": scale * cancels * Q.max(initial=0), "dV": 0.0}
    moves, of_score = _moved(inputs, exact, dO, Q, K), ulp(max(4.0, largest_score(inputs)), np.float32)
    of_rows = _of_D(dO, inputs, forward(inputs))
    of_out = {name: _of_out(name, of_rows, inputs, exact, ours.shape) for name, ours in gradients.items() if name in OF_D}
    numbers = {}
    for name, ours in gradients.items():
        if name.startswith(sum_field("")):
            errors = np.where(exact.P > 0, of_score * moves["dbias"] + 2 * ulp(cancels, np.float32), 0.0)
            numbers[name] = _measure_captured(name, ours, inputs, exact, rough, errors, of_score, of_rows)
            continue
        expected, *plainly, moved = (_summed(each[name], ours.shape) for each in (exact.gradients, *rough, moves))
        sums = exact.gradients[name].size / max(ours.size, 1)  # summed by a broadcast axis
        numbers[name] = Numbers(
            _largest(ours, expected),
            _of_plain(plainly, expected, ours.dtype, of_out.get(name, 0.0))
            + 2 * ulp(cancelled.get(name, cancels), np.float32) * sums
            + of_score * moved.max(initial=0)
            + (of_out["dsinks"] if name == "dsinks" else 0.0),
        )
    return numbers


def _of_plain(plainly: Sequence[Array], expected: Array, dtype: Any, least: float = 0.0) -> float:
    """Twice the largest error of plain computations, or the `least` of one; and one unit of the largest element."""
    return 2 * max(least, *(_largest(each, expected) for each in plainly)) + ulp(np.abs(expected).max(initial=0), dtype)


def _measure_captured(
    name: str,
    ours: Array,
    inputs: Inputs,
    exact: Backward,
    rough: Sequence[Mapping[str, Array]],
    errors: Array,
    of_score: float,
    of_rows: Array,
) -> Numbers:
    """The error of a captured array's gradient, a sum of dS times derivatives. `errors` of dS are those of a bias's gradient; an
    error of S, `of_score`, is one of the derivatives, too; those of D, `of_rows`, which a rounded O has, are a row's in common. All
    add up at random; twice that is allowed."""
    of, dS = name.removeprefix(sum_field("")), exact.gradients["dbias"]
    expected, *plainly = (to_captured(inputs, each, of) for each in (dS, *(each["dbias"].astype(np.float32) for each in rough)))
    turned = to_captured(inputs, dS, of, lambda tree, load: _again(derivative(tree, load)), at_random="scores")
    by_rows = to_captured(inputs, exact.P * of_rows[..., None], of, at_random="rows")
    return Numbers(
        _largest(ours, expected),
        _of_plain(plainly, expected, ours.dtype)
        + 2 * float((to_captured(inputs, errors, of, at_random="scores") + of_score * turned + by_rows).max(initial=0)),
    )


def _again(slope: Node | None) -> Node | None:
    return None if slope is None else derivative(slope)


def _moved(inputs: Inputs, exact: Backward, dO: Array, Q: Array, K: Array) -> dict[str, Array]:
    """The largest change of each gradient, to a factor of 2, if each score changes by 1; dO, Q and K without their signs."""
    rest, left = 1 - exact.P, np.abs(exact.dP - exact.D)
    of_D = (exact.P * rest * left).sum(axis=-1, keepdims=True)
    dS = exact.P * (rest * left + of_D)
    dsinks = np.abs(exact.gradients["dsinks"]) + of_D[..., 0]
    given = np.abs(before_function(inputs, exact.P, dS))
    return products(inputs, exact.weights * rest, given, dO, Q, K) | {"dbias": dS, "dsinks": dsinks}


OF_D = ("dQ", "dK", "dbias", "dsinks")
"""The gradients that a row's D has a part in."""


def _of_out(name: str, of_rows: Array, inputs: Inputs, exact: Backward, shape: Shape) -> float:
    """The largest error of a gradient of this shape because each row's D, in common for all its keys, has an error of `of_rows`;
    errors of several rows add up at random."""
    if name == "dsinks":
        L = np.where(np.isneginf(of_L := forward(inputs).L), 0, of_L)
        return float(np.sqrt(_summed((np.exp(sinks_of(inputs, np.float64)[..., 0] - L) * of_rows) ** 2, shape)).max(initial=0))
    dS = exact.P * of_rows[..., None]
    if name == "dbias":
        along_keys = dS.sum(axis=-1, keepdims=True) if shape[-1] == 1 else dS
        return float(np.sqrt(_summed(along_keys**2, shape)).max(initial=0))
    q, k = inputs.q.astype(np.float64), inputs.k.astype(np.float64)
    given = before_function(inputs, exact.P, dS)
    if name == "dQ":
        return float(np.abs(products(inputs, exact.P, given, of_rows[..., None], q, k)["dQ"]).max(initial=0))
    squares = products(inputs, exact.P, given**2, of_rows[..., None], q**2, k)["dK"]
    return math.sqrt(abs(inputs.problem.softmax_scale) * np.abs(squares).max(initial=0))


def _of_D(dO: Array, inputs: Inputs, made: Forward) -> Array:
    """The error of each row's D = rowsum(dO O) by a rounded O: half a unit of each of its elements, at random."""
    units = np.exp2(np.floor(np.log2(np.maximum(np.abs(made.O), 1e-30)))) * ulp(1.0, inputs.q.dtype)
    error: Array = np.linalg.norm(dO * units, axis=-1) / 2
    return error


def _summed(gradient: Array, shape: Shape) -> Array:
    """Sum `gradient` over the axes along which an array of `shape` was broadcast."""
    if len(shape) == 1:  # one number a head, which each row used
        return np.asarray(of_heads(gradient), np.float64)
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
    return gradient.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else gradient
