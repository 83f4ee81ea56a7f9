"""The call on NumPy arrays: shapes, strides, devices, refusals. What it computes is test_execution's."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.numbers.yardstick import DTYPES
from suites import sample, wide
from yardstick import check_numbers


def normal_arrays(*shapes: tuple[int, ...], dtype: object = np.float16) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("q_shape", "k_shape"), [((40, 64), (50, 64)), ((4, 40, 64), (2, 50, 64)), ((2, 4, 40, 64), (2, 1, 50, 64))]
)
def test_ranks(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    q, k, v = normal_arrays(q_shape, k_shape, k_shape)
    out, lse = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:-1] and lse.dtype == np.float32
    check_numbers(out, lse, q, k, v, causal=True)


def test_batch_sequence_head_layout_needs_no_copy() -> None:
    q, k, v = (array.swapaxes(1, 2) for array in normal_arrays((2, 30, 4, 64), (2, 50, 2, 64), (2, 50, 2, 64)))
    out = np.zeros((2, 30, 4, 64), np.float16).swapaxes(1, 2)
    assert cupyflash.attention(q, k, v, out=out) is out
    check_numbers(out, None, q, k, v)


@pytest.mark.parametrize("dtype", [np.float16, wide(np.float32)])
@pytest.mark.parametrize(("start", "row"), [wide(0, 64), wide(4, 72), wide(2, 68), (1, 65)])
def test_any_alignment_and_row_stride(dtype: object, start: int, row: int) -> None:
    """Copies of 16, 8, 4 and 2 bytes; rows beyond the head dimension are another's and stay untouched."""
    q, k, v = (array[:, start : start + 48] for array in normal_arrays((40, row + 8), (50, row + 8), (50, row + 8), dtype=dtype))
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
    q, k, v = normal_arrays((2, 2, 64), (2, 2, 64), (2, 2, 64))
    far = np.lib.stride_tricks.as_strided(room[64:], (2, 2, 64), strides)
    for array in [q, k, v] if axis == 0 else [k]:
        far[...] = array
        arguments = [far if one is array else one for one in (q, k, v)]
        check_numbers(cupyflash.attention(*arguments), None, q, k, v)
    far[...] = 0
    cupyflash.attention(q, k, v, out=far)
    check_numbers(np.ascontiguousarray(far), None, q, k, v)


def test_inputs_are_left_alone() -> None:
    arrays = normal_arrays((40, 64), (50, 64), (50, 64))
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    cupyflash.attention(*arrays)
    assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))


def test_empty_arrays() -> None:
    q, k, v = normal_arrays((0, 16), (5, 16), (5, 16))
    assert cupyflash.attention(q, k, v).shape == (0, 16)
    q, k, v = normal_arrays((3, 16), (0, 16), (0, 16))
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    q, k, v = normal_arrays((0, 4, 5, 16), (0, 4, 5, 16), (0, 4, 5, 16))
    assert cupyflash.attention(q, k, v).shape == q.shape


@pytest.mark.wide
def test_the_simulated_device_decides_the_tiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of L, a float32 sum, differ with the tiling, so a changed device shows in them; and results stay correct."""
    q, k, v = normal_arrays((2, 100, 64), (2, 200, 64), (2, 200, 64))
    outs = [cupyflash.attention(q, k, v, return_lse=True)]
    with cupyflash.simulated_device("H100-SXM", sram="10KB") as device:
        assert device.sram_per_block == 10 * 1024
        outs.append(cupyflash.attention(q, k, v, return_lse=True))
        with cupyflash.simulated_device(Device.named("T4")):
            outs.append(cupyflash.attention(q, k, v, return_lse=True))
    monkeypatch.setenv("CUPYFLASH_DEVICE", "L4")
    outs.append(cupyflash.attention(q, k, v, return_lse=True))
    for out, lse in outs:
        check_numbers(out, lse, q, k, v)
    assert outs[0][1].tobytes() != outs[1][1].tobytes()


MASKS = (["mask"], ["bias"], ["key_lengths"], ["mask", "bias", "key_lengths"])


@pytest.mark.parametrize(
    ("dtype", "causal", "names"),
    sample(
        product(["float16", "bfloat16", "float32"], [False, True], MASKS),
        [("bfloat16", True, ["mask"]), ("bfloat16", True, ["mask", "bias", "key_lengths"])],
    ),
)
def test_masks_add_up(dtype: str, causal: bool, names: list[str]) -> None:
    q, k, v = normal_arrays((2, 4, 40, 64), (2, 2, 50, 64), (2, 2, 50, 24), dtype=DTYPES[dtype])
    rng = np.random.default_rng(2)
    masks = {
        "mask": rng.random((40, 50)) < 0.7,
        "bias": rng.standard_normal((4, 1, 50)).astype(DTYPES[dtype]),
        "key_lengths": np.array([50, 17]),
    }
    chosen = {name: masks[name] for name in names}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, causal=causal, **chosen)
    assert out.shape == (2, 4, 40, 24)
    check_numbers(out, lse, q, k, v, causal=causal, **chosen)


@pytest.mark.parametrize("algorithm", ["fa1", wide("fa2"), wide("standard")])
def test_what_is_behind_the_key_lengths_is_never_read(algorithm: str) -> None:
    q, k, v = normal_arrays((2, 2, 33, 64), (2, 2, 70, 64), (2, 2, 70, 64))
    lengths = np.array([70, 20])
    expected = cupyflash.attention(q, k, v, key_lengths=lengths, algorithm=algorithm)
    k[1, :, 20:] = v[1, :, 20:] = np.nan
    assert np.array_equal(cupyflash.attention(q, k, v, key_lengths=lengths, algorithm=algorithm), expected)


@pytest.mark.parametrize("algorithm", [wide("fa1"), "fa2", wide("standard")])
def test_a_row_that_sees_no_key_is_zero_and_minus_infinity(algorithm: str) -> None:
    q, k, v = normal_arrays((2, 5, 16), (2, 7, 16), (2, 7, 16))
    none = {"mask": np.zeros((5, 7), bool), "key_lengths": np.array([0]), "bias": np.full((5, 7), -np.inf, np.float16)}
    for name, array in none.items():
        out, lse = cupyflash.attention(q, k, v, return_lse=True, algorithm=algorithm, **{name: array})
        assert (out == 0).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", [np.float16, wide(np.float32)])
def test_not_a_number_and_infinity_go_where_numpy_puts_them(dtype: object) -> None:
    for bad, place in ((np.nan, 0), (np.inf, 0), (-np.inf, 0), (np.nan, 1), (np.nan, 2), (np.inf, 2), (-np.inf, 2)):
        arrays = normal_arrays((40, 16), (50, 16), (50, 16), dtype=dtype)
        arrays[place][3, 5] = bad
        with np.errstate(invalid="ignore"):
            expected, _ = reference(*arrays)
            out = cupyflash.attention(*arrays)
        assert np.array_equal(np.isnan(out), np.isnan(expected)) and np.array_equal(np.isinf(out), np.isinf(expected))


def test_zero_and_negative_strides() -> None:
    q, k, v = normal_arrays((4, 40, 64), (4, 50, 64), (4, 50, 64))
    views = (q[::-1, ::-1], np.broadcast_to(k[:1], k.shape), v[:, ::-1])
    check_numbers(cupyflash.attention(*views), None, *views)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_a_grid_has_one_axis(algorithm: str) -> None:
    """The only one that more (batch, head) pairs fit than 65,535."""
    heads = 65_540
    schedule = cupyflash.plan(Problem(1, heads, heads, 1, 1, 16, "float16"), Device.named("A100-40GB"), algorithm)
    assert all(isinstance(kernel.grid, int) and heads // 4 <= kernel.grid < 2**31 for kernel in schedule.kernels())


@pytest.mark.wide
def test_many_heads() -> None:
    """More (batch, head) pairs than a second grid dimension could hold."""
    q = normal_arrays((65_540, 1, 16))[0]
    out = cupyflash.attention(q, q, q, tiling=(16, 16))  # one warp a block
    assert np.array_equal(out, q)


def test_objects_that_offer_their_memory_are_taken_as_views() -> None:
    class Foreign:
        """DLPack and nothing else."""

        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    q, k, v = normal_arrays((40, 64), (50, 64), (50, 64))
    out = cupyflash.attention(Foreign(q), Foreign(k), Foreign(v))
    assert isinstance(out, np.ndarray)
    check_numbers(out, None, q, k, v)


@pytest.mark.wide
def test_warmup_leaves_nothing_to_compile() -> None:
    q, k, v = normal_arrays((2, 24, 48), (2, 24, 48), (2, 24, 48))
    cupyflash.warmup(head_dim=48, causal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupyflash.launch.compiler.compile_to_ptx", lambda *_: pytest.fail("something was compiled"))
        cupyflash.attention(q, k, v, causal=True)


@pytest.mark.parametrize(
    "options", [wide({"algorithm": "standard"}), {"tiling": (16, 32)}, {"algorithm": "standard", "tiling": (32, 16)}]
)
def test_standard_and_tilings(options: dict[str, Any]) -> None:
    q, k, v = normal_arrays((2, 50, 64), (2, 60, 64), (2, 60, 64))
    check_numbers(cupyflash.attention(q, k, v, **options), None, q, k, v)


def test_a_slow_call_is_refused_with_the_way_to_allow_it() -> None:
    q = np.zeros((64, 16384, 64), np.float16)
    with pytest.raises(RuntimeError, match=r"(?s)estimated.*cupy\.asarray.*max_seconds"):
        cupyflash.attention(q, q, q)
    small = normal_arrays((16, 64), (16, 64), (16, 64))
    with cupyflash.simulated_device(max_seconds=1e-9), pytest.raises(RuntimeError, match="estimated"):
        cupyflash.attention(*small)
    with cupyflash.simulated_device(max_seconds=math.inf):
        cupyflash.attention(*small)


q, k, v = normal_arrays((4, 40, 64), (4, 50, 64), (4, 50, 64))
READ_ONLY = np.zeros((4, 40, 64), np.float16)
READ_ONLY.flags.writeable = False
MASK, BIAS = np.ones((4, 40, 50), bool), np.zeros((4, 40, 50), np.float16)
BATCHED = [array[None] for array in (q, k, v)]
ODD = np.zeros(4 * 40 * 64 * 2 + 1, np.uint8)[1:].view(np.float16).reshape(4, 40, 64)

BAD_ARRAYS = [
    ((q.tolist(), k, v), TypeError, "q must be a NumPy or CuPy array, got list"),
    ((q, None, v), TypeError, "k must be a NumPy or CuPy array, got NoneType"),
    ((q, k, 1.0), TypeError, "v must be"),
    ((q, k, object()), TypeError, "v must be a NumPy or CuPy array, got object"),
    ((np.ma.masked_array(q), k, v), TypeError, "MaskedArray"),
    ((np.float16(1), k, v), TypeError, "q must be"),
    ((q.astype(np.float64), k, v), TypeError, r"got float64: pass q\.astype\(numpy\.float32\), or float16"),
    ((q, k.astype(np.float64), v), TypeError, r"got float64: pass k\.astype\(numpy\.float32\), or float16"),
    ((q.astype(np.complex64), k, v), TypeError, "complex64"),
    ((q.astype(object), k, v), TypeError, "object"),
    ((q.astype(bool), k, v), TypeError, "bool"),
    ((q, k.astype(np.int32), v), TypeError, "int32"),
    ((q.astype(">f2"), k.astype(">f2"), v.astype(">f2")), TypeError, "machine's own order"),
    ((q, k, v.astype(np.float32)), TypeError, "v must have q's dtype"),
    ((q, k[:, :, :32], v), ValueError, "k must have q's head dimension 64"),
    ((q, k[:3], v[:3]), ValueError, "multiple of kv_heads"),
    ((q, k[:0], v[:0]), ValueError, "multiple of kv_heads"),
    ((q, k, v[:, :10]), ValueError, "v must have k's shape"),
    ((q, k, v[:2]), ValueError, "v must have k's shape"),
    ((q[0, 0], k, v), ValueError, "q must be"),
    ((q[None, None], k[None, None], v[None, None]), ValueError, "q must be"),
    ((q, k[0], v[0]), ValueError, "as many axes"),
    ((np.concatenate([q[None]] * 2), k[None], v[None]), ValueError, "batch size 2"),
    ((q[..., ::2], k[..., ::2], v[..., ::2]), ValueError, "q must be contiguous"),
    ((q, k, np.asfortranarray(v)), ValueError, "v must be contiguous"),
    ((q[..., :0], k[..., :0], v[..., :0]), ValueError, "head_dim must be between 1 and 512, got 0"),
    ((*normal_arrays((8, 513), (8, 513), (8, 513)),), ValueError, "head_dim must be between 1 and 512, got 513"),
    ((q, k, np.zeros((4, 50, 600), np.float16)), ValueError, "head_dim_v must be between 1 and 512, got 600"),
    ((ODD, k, v), ValueError, "q must be aligned to its elements"),
]
BAD_OPTIONS = [
    ({"scale": float("inf")}, ValueError, "scale must be 0 or of a magnitude from 1.2e-38 to 1.7e[+]38, got inf"),
    ({"scale": float("nan")}, ValueError, "scale must be 0 or"),
    ({"scale": 2e38}, ValueError, "scale must be 0 or"),
    ({"scale": -1e-40}, ValueError, "scale must be 0 or"),
    ({"scale": "0.5"}, TypeError, "scale must be a real number"),
    ({"scale": 1j}, TypeError, "scale must be a real number"),
    ({"causal": 3}, TypeError, "causal must be True or False"),
    ({"causal": None}, TypeError, "causal must be True or False"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False"),
    ({"algorithm": "flash"}, ValueError, "auto, fa1, fa2, fa3, standard"),
    ({"algorithm": None}, ValueError, "auto, fa1, fa2, fa3, standard"),
    ({"tiling": (7, 16)}, ValueError, "steps of 16"),
    ({"tiling": "paper"}, ValueError, "steps of 16"),
    ({"tiling": [16, 16]}, ValueError, "tiling must be"),
    ({"tiling": (0, 16)}, ValueError, "tiling must be"),
    ({"tiling": (512, 256)}, ValueError, "feed 8 warps, not 32"),
    ({"tiling": (64, 4096)}, ValueError, "bytes of SRAM"),
    ({"out": q[:2]}, ValueError, "out must have shape"),
    ({"out": q.astype(np.float32)}, TypeError, "out must have q's dtype"),
    ({"out": READ_ONLY}, ValueError, "out must be writeable"),
    ({"out": q}, ValueError, "out must not overlap q"),
    ({"out": np.empty((4, 40, 64), np.float16)[:, ::-1]}, ValueError, "positive strides"),
    ({"out": np.broadcast_to(np.float16(0), (4, 40, 64))}, ValueError, "out must be"),
    (
        {"out": np.lib.stride_tricks.as_strided(np.empty(9999, np.float16), (4, 40, 64), (2, 10, 2))},
        ValueError,
        "a place for every",
    ),
    ({"out": [0]}, TypeError, "out must be"),
    ({"mask": MASK.astype(np.int8)}, TypeError, "mask must be of dtype bool"),
    ({"mask": MASK[:, :, :49]}, ValueError, "mask must broadcast"),
    ({"mask": MASK[None]}, ValueError, "mask must broadcast"),
    ({"mask": [[True]]}, TypeError, "mask must be"),
    ({"bias": BIAS.astype(np.float64)}, TypeError, "bias must be"),
    ({"bias": BIAS[:, :7]}, ValueError, "bias must broadcast"),
    ({"key_lengths": np.array([1, 2])}, ValueError, "key_lengths must have shape"),
    ({"key_lengths": [1, 2]}, ValueError, "key_lengths must have shape"),
    ({"key_lengths": [4.7]}, TypeError, "key_lengths must be integers, got 4.7"),
    ({"key_lengths": [51]}, ValueError, "key_lengths must be 1 length between 0 and 50"),
    ({"key_lengths": ["7"]}, TypeError, "key_lengths must be integers, got '7'"),
    ({"key_lengths": np.array([1.0])}, TypeError, "integer"),
    ({"key_lengths": np.array([51])}, ValueError, "key_lengths must be 1 length between 0 and 50"),
    ({"key_lengths": np.array([-1])}, ValueError, "key_lengths must be"),
    ({"key_lengths": 50}, TypeError, "key_lengths must be a NumPy or CuPy array, or a list or tuple of integers, got int"),
    ({"mask": "x"}, TypeError, "mask must be a NumPy or CuPy array, a cupyflash.Mask or a block_mask, got str"),
]


def refused(error: type[Exception], says: str, arguments: tuple[object, ...], options: dict[str, object]) -> None:
    """One clear error, and nothing was compiled, run or written."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(error, match=says):
        patch.setattr("cupyflash.launch.compiler.compile_to_ptx", lambda *_: pytest.fail("something was compiled"))
        cupyflash.attention(*arguments, **options)


@pytest.mark.parametrize(("arguments", "error", "says"), BAD_ARRAYS)
def test_bad_arrays_are_refused_by_name(arguments: tuple[object, ...], error: type[Exception], says: str) -> None:
    refused(error, says, arguments, {})


@pytest.mark.parametrize(("options", "error", "says"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(options: dict[str, object], error: type[Exception], says: str) -> None:
    refused(error, says, (q, k, v), options)


def test_bfloat16_needs_compute_capability_8() -> None:
    arrays = [array.astype(DTYPES["bfloat16"]) for array in (q, k, v)]
    with cupyflash.simulated_device("T4"):
        refused(ValueError, "bfloat16 needs compute capability 8.0 or later; T4 has 7.5", tuple(arrays), {})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "A1000"}, r"^device = 'A1000': not in the catalogue; did you mean A100"),
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
