"""Long sequences, tensors of more than 2^31 elements, and scores of every magnitude that float32 holds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from chip import DTYPES, choose, dtypes, held_in, needs_cublas, needs_memory, on_gpu, on_host

import cupyflash
from cupyflash import Problem
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import DTYPES as NUMPY
from cupyflash.sim.numbers.yardstick import draw_gradient, measure_gradients
from yardstick import check_numbers, draw

# Relative root mean square error against float32: about three times what rounding S, P, O and dS to the type gives, worst for dQ
# (float16: 1.0e-3 and bfloat16: 8e-3 in NumPy, of 2,048 keys); of float32, which sums thousands of terms one after the other.
ALLOWED = {"float16": 3e-3, "bfloat16": 2.4e-2, "float32": 2e-5}


def in_chunks(dout: Any, q: Any, k: Any, v: Any, causal: bool, rows: int) -> list[Any]:
    """O, L, dQ, dK and dV of (h, n, d) arrays on the GPU, in float32 and plain array code, `rows` rows of S at a time."""
    import cupy

    dout, q, k, v = (array.astype(cupy.float32) for array in (dout, q, k, v))
    scale, n = 1 / math.sqrt(q.shape[-1]), q.shape[1]
    cols, keys, values = cupy.arange(k.shape[1]), k.swapaxes(1, 2), v.swapaxes(1, 2)
    out, lse, dq = cupy.empty(dout.shape, cupy.float32), cupy.empty(q.shape[:2], cupy.float32), cupy.empty(q.shape, cupy.float32)
    dk, dv = cupy.zeros(k.shape, cupy.float32), cupy.zeros(v.shape, cupy.float32)
    for first in range(0, n, rows):
        some = slice(first, first + rows)
        S = q[:, some] @ keys * scale
        if causal:
            S = cupy.where(cols[None, None] <= cupy.arange(n)[some][None, :, None] + (k.shape[1] - n), S, cupy.float32(-np.inf))
        m = S.max(axis=-1, keepdims=True)
        P = cupy.exp(S - m)
        total = P.sum(axis=-1, keepdims=True)
        P = P / total
        out[:, some], lse[:, some] = P @ v, (m + cupy.log(total))[..., 0]
        dP = dout[:, some] @ values
        dS = P * (dP - (P * dP).sum(axis=-1, keepdims=True)) * scale
        dq[:, some] = dS @ k
        dk, dv = dk + dS.swapaxes(1, 2) @ q[:, some], dv + P.swapaxes(1, 2) @ dout[:, some]
    return [out, lse, dq, dk, dv]


@pytest.mark.parametrize("causal", choose([False, True], [True]))
@pytest.mark.parametrize("dtype", choose(DTYPES, DTYPES[:2]))
@pytest.mark.parametrize("n", choose([8192, 16384], [50]))
def test_long_sequences(n: int, dtype: str, causal: bool) -> None:
    """All of O, L and the gradients; an eighth of the keys left out would be an error of 0.1 and more."""
    needs_cublas()
    problem = Problem(1, 2, 2, n, n, 64, dtype)
    host = [array[0] for array in (draw_gradient(problem), *draw(problem, v_mean=1.0))]
    dout, q, k, v = on_gpu(*host)
    out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
    ours, theirs = on_host(out, lse, *gradients), on_host(*in_chunks(dout, q, k, v, causal, choose(2048, 32)))
    errors = {}
    for name, one, other in zip(("O", "L", "dQ", "dK", "dV"), ours, theirs, strict=True):
        wide, exact = one.astype(np.float64), other.astype(np.float64)
        errors[name] = math.sqrt(np.square(wide - exact).mean() / np.square(exact).mean())
    assert all(error <= ALLOWED[dtype] for error in errors.values()), errors


FAR = 2**31 + 2**20
"""Elements from one part of a tensor to the last: their number takes more than 32 bits."""


class Far:
    """A tensor whose batches, heads or rows lie far apart in 4 GiB of memory.

    It is filled and read part by part: of CuPy, not every version has 64-bit offsets for views like this.
    """

    def __init__(self, room: Any, axis: int, shape: tuple[int, ...]) -> None:
        import cupy

        step = FAR // (shape[axis] - 1)
        strides = [64 * shape[2] * shape[1], 64 * shape[2], 64, 1]
        strides[axis] = step - step % 64
        self.view = cupy.ndarray(shape, cupy.float16, room.data, strides=tuple(2 * stride for stride in strides))
        own = tuple(1 if n == axis else length for n, length in enumerate(shape))
        ends = [room.data + 2 * strides[axis] * n for n in range(shape[axis])]
        self.axis, self._parts = axis, [cupy.ndarray(own, cupy.float16, end) for end in ends]

    def fill(self, array: np.ndarray) -> Far:
        for part, its in zip(self._parts, on_gpu(*np.split(array, len(self._parts), self.axis)), strict=True):
            part[...] = its
        return self

    def read(self) -> np.ndarray:
        return np.concatenate(on_host(*self._parts), self.axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_beyond_32_bits(axis: int) -> None:
    """Each tensor in turn: Q, K, V, O and its gradient."""
    import cupy

    needs_memory(2 * 2 * FAR)
    shape = ((2, 1, 40, 64), (1, 2, 40, 64), (1, 1, 33, 64))[axis]
    problem = Problem(*shape[:2], shape[1], shape[2], *shape[2:], "float16")
    (q, k, v), dout = draw(problem, v_mean=1.0), draw_gradient(problem)
    room = cupy.ndarray((FAR + 2**20,), cupy.float16)
    far = Far(room, axis, shape)
    for name, host in {"k": k, "v": v, "q": q, "dout": dout, "out": np.zeros_like(q)}.items():
        given = dict(zip(("q", "k", "v", "dout"), on_gpu(q, k, v, dout), strict=True)) | {name: far.fill(host).view}
        dout_given, out = given.pop("dout"), given.pop("out", None)
        out, lse = cupyflash.attention(**given, out=out, return_lse=True)
        gradients = cupyflash.attention_backward(dout_given, **given, out=out, lse=lse)
        check_numbers(far.read() if name == "out" else on_host(out)[0], *on_host(lse), q, k, v)
        numbers = measure_gradients(dict(zip(("dQ", "dK", "dV"), on_host(*gradients), strict=True)), dout, Inputs(q, k, v))
        assert all(each.good for each in numbers.values()), (name, numbers)


def test_scores_of_more_than_32_bits() -> None:
    """Standard attention holds S and P, here of 2^31 elements and more; the last head lies behind them."""
    heads, n = choose((9, 15_500), (3, 40))
    needs_memory(3 * 2 * heads * n * n)
    q, k, v = draw(Problem(1, heads, heads, n, n, 16, "float16"), v_mean=1.0)
    (out,) = on_host(cupyflash.attention(*on_gpu(q, k, v), algorithm="standard"))
    rows = slice(n - 64 if n > 64 else 0, n)
    check_numbers(out[:, -1:, rows], None, q[:, -1:, rows], k[:, -1:], v[:, -1:])


def test_softmax_of_more_than_32_bits() -> None:
    """In place, with the last rows looked at; and along the other axis, the last columns."""
    import cupy

    rows, cols = choose((32_800, 65_536), (40, 50))
    needs_memory(2 * 2 * rows * cols)
    last = np.random.default_rng(0).standard_normal((8, cols)).astype(np.float16)
    for axis in (0, 1):
        x = cupy.zeros((rows, cols), cupy.float16)
        x[-8:] = on_gpu(last)[0]
        assert cupyflash.softmax(x, axis=axis, out=x) is x
        (found,) = on_host(x[-8:])
        wide = np.exp(last.astype(np.float64))
        expected = wide / (wide.sum(axis=1, keepdims=True) if axis else wide.sum(axis=0) + rows - 8)
        assert np.allclose(found.astype(np.float64), expected, rtol=4e-3, atol=1e-7)


# Scores are c^2 sqrt(d) where q and k are c throughout.
CONSTANTS: dict[str, tuple[float, ...]] = {
    "float16": (1e-7, 1e-3, 100, 4000, 12001, 20001, 30001, 65504),
    "bfloat16": (1e-20, 1e-3, 100, 30001, 1e9, 1e15, 1e18),
    "float32": (1e-20, 1e-3, 100, 30001, 1e9, 1e15, 1e18),
}


@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_are_alike_whatever_their_magnitude(dtype: str, algorithm: str) -> None:
    """Every key has the same score, so O is the mean of V, and L the score and log n."""
    n = choose(150, 40)
    v = draw(Problem(1, 2, 2, n, n, 64, dtype), v_mean=1.0)[2]
    for c in CONSTANTS[dtype]:
        q = np.full((1, 2, n, 64), c).astype(NUMPY[dtype])
        out, lse = on_host(*cupyflash.attention(*on_gpu(q, q, v), algorithm=algorithm, return_lse=True))
        score = float(q[0, 0, 0, 0]) ** 2 * 8
        check_mean(out, v, c)
        assert np.allclose(lse.astype(np.float64), score + math.log(n), rtol=1e-6, atol=1e-5), c


def check_mean(out: np.ndarray, v: np.ndarray, what: object) -> None:
    """O is the mean of V in every row."""
    mean = v.astype(np.float64).mean(axis=-2, keepdims=True)
    step = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6}[v.dtype.name]
    assert np.abs(out.astype(np.float64) - mean).max() <= step, (what, out)


@pytest.mark.parametrize("algorithm", ["fa2", "fa1"])
def test_scales_of_every_magnitude(algorithm: str) -> None:
    """Down to the least normal numbers, of either sign, and none."""
    for dtype in dtypes()[: choose(None, 1)]:
        problem = Problem(1, 2, 2, choose(150, 40), choose(150, 40), 64, dtype)
        q, k, v = draw(problem, v_mean=1.0)
        given = on_gpu(q, k, v)
        for scale in (1.2e-38, -1.2e-38, 1e-30, 0.0):
            check_mean(*on_host(cupyflash.attention(*given, scale=scale, algorithm=algorithm)), v, scale)
        for scale in (-0.3, 3.0):
            out, lse = on_host(*cupyflash.attention(*given, scale=scale, algorithm=algorithm, return_lse=True))
            check_numbers(out, lse, q, k, v, scale=scale, score_dtype=held_in(algorithm, q))


SPREADS = {"float16": (1e-3, 30, 1000, 4000), "bfloat16": (1e-10, 30, 4000, 1e8, 1e15), "float32": (1e-10, 30, 4000, 1e8, 1e15)}


@pytest.mark.parametrize("deterministic", choose([False, True], [True]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_scores_of_every_magnitude(dtype: str, deterministic: bool) -> None:
    """q = k = c N(0, 1): each row sees its own key and no other where c is large; v = dout = 1 has dQ = dK = 0 for any c."""
    n = choose(150, 40)
    one = np.ones((1, 1, n, 64), NUMPY[dtype])
    normal = np.random.default_rng(0).standard_normal((1, 1, n, 64))
    for c in SPREADS[dtype]:
        q = (c * normal).astype(NUMPY[dtype])
        out, pullback = cupyflash.attention_vjp(*on_gpu(q, q, one), deterministic=deterministic)
        dq, dk, dv = on_host(*pullback(on_gpu(one)[0]))
        assert np.allclose(on_host(out)[0].astype(np.float64), 1, atol=4e-3), c
        # dS is P (64 - 64), where O is 1: to O's type while many keys are seen, exactly when one is.
        step = 1e-6 if c >= 30 else {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}[dtype]
        bound = 64 * step * float(np.abs(q.astype(np.float64)).max())
        assert np.abs(dq.astype(np.float64)).max() <= bound and np.abs(dk.astype(np.float64)).max() <= bound, c
        weights = dv.astype(np.float64)[..., 0]
        assert np.allclose(weights.sum(), n, rtol=2e-2) and (c < 30 or np.allclose(weights, 1, atol=2e-2)), c
