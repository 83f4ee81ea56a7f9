"""Problem: what it takes, what it refuses, and what it says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import Problem
from cupyflash.request.options import Band, BlockMask

GOOD = {"batch": 2, "heads": 4, "kv_heads": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 64, "dtype": "float16"}


def test_defaults() -> None:
    problem = Problem(**GOOD)
    assert problem.softmax_scale == 1 / 8
    assert problem.head_count == 8
    assert problem.diagonal == 2
    assert problem.flops == 4 * 8 * 5 * 7 * 64


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype(np.float16)])
def test_dtype_in_any_spelling_is_one_problem(dtype: object) -> None:
    assert Problem(**GOOD | {"dtype": dtype}) == Problem(**GOOD)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"batch": -1}, ValueError, "batch"),
        ({"heads": 2.0}, TypeError, "heads"),
        ({"seqlen_q": True}, TypeError, "seqlen_q"),
        ({"head_dim": 0}, ValueError, "head_dim"),
        ({"head_dim": 513}, ValueError, "head_dim must be between 1 and 512, got 513"),
        ({"head_dim": 257, "dtype": "float32"}, ValueError, "head_dim must be between 1 and 256 for float32, got 257"),
        ({"kv_heads": 3}, ValueError, "multiple of kv_heads"),
        ({"kv_heads": 0}, ValueError, "multiple of kv_heads"),
        ({"dtype": "float64"}, TypeError, "float16, bfloat16, float32"),
        ({"dtype": "int8"}, TypeError, "int8"),
        ({"causal": "yes"}, TypeError, "causal"),
        ({"scale": float("nan")}, ValueError, "scale must be 0 or of a magnitude from .* got nan"),
        ({"scale": "0.1"}, TypeError, "scale"),
        ({"alignment": 3}, ValueError, "alignment"),
        ({"alignment": 16.0}, ValueError, "alignment"),
        ({"padded": True, "key_lengths": (4.7, 7)}, TypeError, "key_lengths must be integers, got 4.7"),
        ({"padded": True, "key_lengths": np.array([4.0, 7])}, TypeError, "key_lengths must be integers, got 4.0"),
        ({"padded": True, "key_lengths": (True, 7)}, TypeError, "key_lengths must be integers, got True"),
        ({"padded": True, "key_lengths": 7}, TypeError, "key_lengths must be a sequence of integers, got 7"),
        ({"padded": True, "key_lengths": "77"}, TypeError, "key_lengths must be a sequence of integers, got '77'"),
        ({"padded": True, "key_lengths": (7,)}, ValueError, "key_lengths must be 2 lengths between 0 and 7"),
        ({"padded": True, "key_lengths": (7, 8)}, ValueError, "key_lengths must be 2 lengths between 0 and 7"),
        ({"key_lengths": (7, 7)}, ValueError, "padded"),
        ({"block_mask": np.ones((2, 2))}, TypeError, "block_mask must be of dtype bool, got float64"),
        ({"block_mask": np.ones(2, bool)}, ValueError, "block_mask must be"),
        ({"block_mask": np.ones((3, 2, 2), bool)}, ValueError, r"b, h\) = \(2, 4\), got shape \(3, 2, 2\)"),
        ({"block_mask": BlockMask((3, 1, 2, 2))}, ValueError, r"b, h\) = \(2, 4\), got shape \(3, 1, 2, 2\)"),
        ({"block_mask": [[True]]}, TypeError, "block_mask must be a NumPy or CuPy array, got list"),
        ({"dtype": "float32", "alignment": 2}, ValueError, "alignment"),
    ],
)
def test_bad_values_are_named(changed: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Problem(**GOOD | changed)


def test_lengths_and_masks_in_any_form_are_one_problem() -> None:
    """Hashable too, as a plan needs it."""
    lengths = [Problem(**GOOD | {"padded": True, "key_lengths": form}) for form in ((7, 3), [7, 3], np.array([7, 3], np.int8))]
    assert len(set(lengths)) == 1 and lengths[0].options.key_lengths == (7, 3)
    kept = np.array([[True, False]])
    masks = [Problem(**GOOD | {"block_mask": form}) for form in (kept, kept[None], BlockMask.of(kept))]
    assert len(set(masks)) == 1
    assert np.array_equal(masks[0].options.block_mask.kept, kept[None, None])


def arrays(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None, dtype: object = np.float16
) -> list[np.ndarray]:
    return [np.zeros(shape, dtype) for shape in (q, k, v or k)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((5, 64), (7, 64)), (1, 1, 1, 5, 7, 64)),
        (((4, 5, 64), (2, 7, 64)), (1, 4, 2, 5, 7, 64)),
        (((3, 4, 5, 64), (3, 2, 7, 64)), (3, 4, 2, 5, 7, 64)),
    ],
)
def test_from_arrays(shapes: tuple[tuple[int, ...], tuple[int, ...]], expected: tuple[int, ...]) -> None:
    p = Problem.from_arrays(*arrays(*shapes))
    assert (p.batch, p.heads, p.kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim) == expected


@pytest.mark.parametrize(
    ("q", "k", "v", "says"),
    [
        ((64,), (64,), None, "q must be"),
        ((1, 1, 1, 5, 64), (1, 1, 1, 5, 64), None, "q must be"),
        ((5, 64), (1, 7, 64), None, "as many axes"),
        ((5, 64), (7, 32), None, "head dimension 64"),
        ((5, 64), (7, 64), (8, 64), "v must have k's shape"),
        ((4, 5, 64), (3, 7, 64), None, "multiple of kv_heads"),
        ((2, 4, 5, 64), (3, 4, 7, 64), None, "batch size 2"),
    ],
)
def test_shapes_that_do_not_go_together(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Problem.from_arrays(*arrays(q, k, v))


def test_last_axis_must_be_contiguous() -> None:
    q, _, v = arrays((5, 64), (7, 64))
    with pytest.raises(ValueError, match=r"k must be contiguous.*: pass k.copy\(\)"):
        Problem.from_arrays(q, np.zeros((64, 7), np.float16).T, v)


def test_dtypes_must_agree() -> None:
    q, k, v = arrays((5, 64), (7, 64))
    with pytest.raises(TypeError, match="v must have q's dtype"):
        Problem.from_arrays(q, k, v.astype(np.float32))


@pytest.mark.parametrize(("offset", "row", "alignment"), [(0, 64, 16), (4, 64, 8), (2, 64, 4), (1, 64, 2), (0, 65, 2), (0, 68, 8)])
def test_alignment_is_what_divides_every_row(offset: int, row: int, alignment: int) -> None:
    room = np.zeros(4096, np.float16)
    start = (-room.ctypes.data % 16) // 2 + offset
    q = np.lib.stride_tricks.as_strided(room[start:], (5, 64), (row * 2, 2))
    assert Problem.from_arrays(q, *arrays((5, 64), (7, 64))[1:]).alignment == alignment


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (2, 1)}, {"window": (0, None)}, {"window": Band(-1, 3)}])
def test_a_row_sees_what_its_options_say(asked: dict[str, Any]) -> None:
    """The definition: row r sees key c if r + n_k - n_q - left <= c <= r + n_k - n_q + right."""
    for n_q, n_k in ((5, 7), (7, 5), (6, 0)):
        problem = Problem(**GOOD | {"seqlen_q": n_q, "seqlen_k": n_k} | asked)
        left, right = problem.options.left, problem.options.right
        own, c = np.arange(n_q)[:, None] + n_k - n_q, np.arange(n_k)
        expected = (left is None or own - left <= c) & (right is None or c <= own + right)
        assert np.array_equal(problem.sees(np.arange(n_q), n_k), np.broadcast_to(expected, (n_q, n_k)))
