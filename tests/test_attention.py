"""The call on NumPy arrays: shapes, strides, devices, refusals. What it computes is test_execution's."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cupyflash
from cupyflash import Device
from yardstick import check_numbers


def draw(*shapes: tuple[int, ...], dtype: object = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("q_shape", "k_shape"), [((40, 64), (50, 64)), ((4, 40, 64), (2, 50, 64)), ((2, 4, 40, 64), (2, 1, 50, 64))]
)
def test_ranks(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    q, k, v = draw(q_shape, k_shape, k_shape)
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:-1] and lse.dtype == np.float32
    check_numbers(out, lse, q, k, v, causal=True)


def test_batch_sequence_head_layout_needs_no_copy() -> None:
    q, k, v = (array.swapaxes(1, 2) for array in draw((2, 30, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64)))
    out = np.zeros((2, 30, 4, 64), np.float16).swapaxes(1, 2)
    assert cupyflash.attention(q, k, v, out=out) is out
    check_numbers(out, None, q, k, v)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize(("start", "row"), [(0, 64), (4, 72), (2, 68), (1, 65)])
def test_any_alignment_and_row_stride(dtype: object, start: int, row: int) -> None:
    """Copies of 16, 8, 4 and 2 bytes; rows beyond the head dimension are another's and stay untouched."""
    q, k, v = (array[:, start : start + 48] for array in draw((40, row + 8), (50, row + 8), (50, row + 8), dtype=dtype))
    room = np.full((40, row), 7, dtype)
    out = room[:, start : start + 48]
    cupyflash.attention(q, k, v, out=out)
    check_numbers(out, None, q, k, v)
    assert (room[:, :start] == 7).all() and (room[:, start + 48 :] == 7).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_offsets_past_two_to_the_31_elements(axis: int) -> None:
    """Heads, or rows, so far apart that a 32-bit offset would wrap; the untouched pages between cost no memory."""
    room = np.zeros(2**31 + 8192, np.float16)
    strides = (2**32, 128, 2) if axis == 0 else (128, 2**32, 2)
    q, k, v = draw((2, 2, 64), (2, 2, 64), (2, 2, 64))
    far = np.lib.stride_tricks.as_strided(room[64:], (2, 2, 64), strides)
    for array in [q, k, v] if axis == 0 else [k]:
        far[...] = array
        arguments = [far if one is array else one for one in (q, k, v)]
        check_numbers(cupyflash.attention(*arguments), None, q, k, v)
    far[...] = 0
    cupyflash.attention(q, k, v, out=far)
    check_numbers(np.ascontiguousarray(far), None, q, k, v)


def test_inputs_are_left_alone() -> None:
    arrays = draw((40, 64), (50, 64), (50, 64))
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    cupyflash.attention(*arrays)
    assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))


def test_empty_arrays() -> None:
    q, k, v = draw((0, 64), (5, 64), (5, 64))
    assert cupyflash.attention(q, k, v).shape == (0, 64)
    q, k, v = draw((3, 64), (0, 64), (0, 64))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    q, k, v = draw((0, 4, 5, 64), (0, 4, 5, 64), (0, 4, 5, 64))
    assert cupyflash.attention(q, k, v).shape == q.shape


def test_the_simulated_device_decides_the_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits differ with the tiling, so a changed device shows in them; and results stay correct."""
    q, k, v = draw((2, 100, 64), (2, 200, 64), (2, 200, 64))
    outs = [cupyflash.attention(q, k, v)]
    with cupyflash.simulated_device("H100-SXM", sram="10KB") as device:
        assert device.sram_per_block == 10 * 1024
        outs.append(cupyflash.attention(q, k, v))
        with cupyflash.simulated_device(Device.named("T4")):
            outs.append(cupyflash.attention(q, k, v))
    monkeypatch.setenv("CUPYFLASH_DEVICE", "L4")
    outs.append(cupyflash.attention(q, k, v))
    for out in outs:
        check_numbers(out, None, q, k, v)
    assert outs[0].tobytes() != outs[1].tobytes()


def test_standard_and_tilings() -> None:
    q, k, v = draw((2, 50, 64), (2, 60, 64), (2, 60, 64))
    for options in ({"algorithm": "standard"}, {"tiling": (16, 32)}, {"algorithm": "standard", "tiling": (32, 16)}):
        check_numbers(cupyflash.attention(q, k, v, **options), None, q, k, v)


def test_a_slow_call_is_refused_with_the_way_to_allow_it() -> None:
    q = np.zeros((16, 8192, 64), np.float16)
    with pytest.raises(RuntimeError, match=r"(?s)estimated.*cupy\.asarray.*max_seconds"):
        cupyflash.attention(q, q, q)
    small = draw((16, 64), (16, 64), (16, 64))
    with cupyflash.simulated_device(max_seconds=1e-9), pytest.raises(RuntimeError, match="estimated"):
        cupyflash.attention(*small)
    with cupyflash.simulated_device(max_seconds=math.inf):
        cupyflash.attention(*small)


q, k, v = draw((4, 40, 64), (4, 50, 64), (4, 50, 64))
READ_ONLY = np.zeros((4, 40, 64), np.float16)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        ((q.tolist(), k, v), {}, TypeError, "q must be a NumPy or CuPy array, got list"),
        ((q, None, v), {}, TypeError, "k must be"),
        ((q.astype(np.float64), k, v), {}, TypeError, "float64"),
        ((q, k.astype(np.int32), v), {}, TypeError, "int32"),
        ((q, k, v.astype(np.float32)), {}, TypeError, "v must have q's dtype"),
        ((q, k[:, :, :32], v), {}, ValueError, "head dimension 64"),
        ((q, k[:3], v[:3]), {}, ValueError, "multiple of kv_heads"),
        ((q, k, v[:, :10]), {}, ValueError, "v must have k's shape"),
        ((q[0, 0], k, v), {}, ValueError, "q must be"),
        ((q[..., ::2], k[..., ::2], v[..., ::2]), {}, ValueError, "contiguous"),
        ((q, k, v), {"scale": float("inf")}, ValueError, "finite"),
        ((q, k, v), {"causal": 3}, TypeError, "causal"),
        ((q, k, v), {"algorithm": "flash"}, ValueError, "auto, fa1, standard"),
        ((q, k, v), {"tiling": (7, 16)}, ValueError, "steps of 16"),
        ((q, k, v), {"tiling": "paper"}, ValueError, "steps of 16"),
        ((q, k, v), {"tiling": (64, 4096)}, ValueError, "bytes"),
        ((q, k, v), {"out": q[:2]}, ValueError, "out must have q's shape"),
        ((q, k, v), {"out": q.astype(np.float32)}, TypeError, "out must have q's dtype"),
        ((q, k, v), {"out": READ_ONLY}, ValueError, "out must be writeable"),
    ],
)
def test_bad_calls_are_refused_by_name(
    arguments: tuple[object, ...], options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        cupyflash.attention(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "A1000"}, "A100"),
        ({"sram": "0KB"}, "sram"),
        ({"max_seconds": 0}, "max_seconds"),
        ({"max_seconds": "x"}, "max_seconds"),
    ],
)
def test_bad_simulated_devices_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says), cupyflash.simulated_device(**options):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(("name", "value"), [("CUPYFLASH_DEVICE", "A1000"), ("CUPYFLASH_MAX_SECONDS", "soon")])
def test_bad_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=value):
        cupyflash.attention(q, k, v)
