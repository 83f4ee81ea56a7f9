"""Softmax: the numbers, theory == replay == execution, any axis and strides, refusals, and what it asks of CuPy."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

import cupyflash
from cupyflash import Device
from cupyflash.rows import Rows
from cupyflash.schedules import plan_softmax
from cupyflash.schedules.base import WARP
from cupyflash.schedules.softmax import LONG_ROW_LANES, MAX_GRID, WARP_COLS
from cupyflash.sim import execute_softmax, replay, theory
from cupyflash.sim.execution import Execution
from cupyflash.sim.numbers.yardstick import DTYPES, ulp
from recorded_cupy import Recorded
from suites import sample, sweep, wide

A100 = Device.named("A100-40GB")
PASSES = {"safe": 3, "online": 2}


def definition(x: np.ndarray, axis: int) -> np.ndarray:
    """scipy.special.softmax's formula in float64."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
        return e / e.sum(axis=axis, keepdims=True)


def plain(x: np.ndarray, axis: int) -> np.ndarray:
    """Softmax done plainly in x's dtype: each step rounded to it, sums in float32."""
    x32 = x.astype(np.float32)
    shifted = (x32 - x32.max(axis=axis, keepdims=True, initial=-np.inf)).astype(x.dtype).astype(np.float32)
    e = np.exp(shifted).astype(x.dtype).astype(np.float32)
    return (e / e.sum(axis=axis, keepdims=True)).astype(x.dtype)


def check_numbers(y: np.ndarray, x: np.ndarray, axis: int = -1) -> None:
    """The 2x rule, plus two units in the last place of the largest output."""
    assert y.shape == x.shape and y.dtype == x.dtype
    expected = definition(x, axis)
    ours, theirs = (np.abs(got.astype(np.float64) - expected).max(initial=0) for got in (y, plain(x, axis)))
    step = ulp(np.abs(expected).max(initial=0), y.dtype)
    assert ours <= 2 * theirs + 2 * step, f"error {ours:.3g}, plainly {theirs:.3g}, one ulp {step:.3g}"


def check_softmax(x: np.ndarray, algorithm: str, axis: int = -1, seed: int | None = None, adjacent_rows: bool = False) -> Execution:
    """All that must hold of one execution."""
    cols = x.shape[axis]
    rows = math.prod(x.shape[:axis] + (x.shape[axis:][1:]))
    schedule = plan_softmax(rows, cols, str(x.dtype), A100, algorithm, adjacent_rows=adjacent_rows)
    execution = execute_softmax(schedule, x, axis=axis, seed=seed)
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic
    assert execution.traffic["x"].read_bytes == PASSES[algorithm] * x.nbytes
    assert execution.traffic["y"].write_bytes == x.nbytes
    assert execution.traffic.total_bytes == (PASSES[algorithm] + 1) * x.nbytes
    check_numbers(execution.out, x, axis)
    return execution


def rows_of(shape: tuple[int, ...], dtype: str = "float16", seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32).astype(DTYPES[dtype])


@pytest.mark.parametrize("n", [0, 1, 2, 31, 32, 33, 100, WARP_COLS, WARP_COLS + 1, 3000])
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    sample(product(["safe", "online"], ["float16", "bfloat16", "float32"]), [("online", "float32")]),
)
def test_every_length(algorithm: str, dtype: str, n: int) -> None:
    """Part of a warp, a warp, several turns of a warp, a block a row; rows that do not fill the last block."""
    check_softmax(rows_of((5, n), dtype), algorithm)


@pytest.mark.parametrize("algorithm", ["safe", wide("online")])
@pytest.mark.parametrize("adjacent_rows", [False, True])
@pytest.mark.parametrize("shape", [(20, 300), (300, 20), (1, 1), (7, 1), (1, 7)])
def test_down_the_first_axis(algorithm: str, adjacent_rows: bool, shape: tuple[int, int]) -> None:
    check_softmax(rows_of(shape), algorithm, axis=0, adjacent_rows=adjacent_rows)


@st.composite
def strided(draws: st.DrawFn) -> tuple[np.ndarray, int]:
    """An array of 1 to 4 axes in any order in memory, with gaps and reversals, and one of its axes."""
    shape = draws(st.lists(st.integers(1, 12), max_size=3))
    axis = draws(st.integers(0, len(shape)))
    shape.insert(axis, draws(st.sampled_from([0, 1, 3, 32, 33, 70, 1100])))
    steps = [draws(st.sampled_from([1, 1, 1, 2, -1, -3])) for _ in shape]
    order = draws(st.permutations(range(len(shape))))
    dtype = draws(st.sampled_from(["float16", "bfloat16", "float32"]))
    room = rows_of(tuple(shape[one] * abs(steps[one]) for one in order), dtype, draws(st.integers(0, 99)))
    view = room.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    assert view.shape == tuple(shape)
    return view, axis


@sweep(
    10,
    60,
    case=strided(),
    algorithm=st.sampled_from(["safe", "online"]),
    seed=st.sampled_from([None, None, 7]),
    adjacent_rows=st.booleans(),
)
def test_random_problems(case: tuple[np.ndarray, int], algorithm: str, seed: int | None, adjacent_rows: bool) -> None:
    x, axis = case
    check_softmax(x, algorithm, axis, seed, adjacent_rows)


@sweep(6, 20, case=strided(), algorithm=st.sampled_from(["safe", "online"]))
def test_the_call_takes_any_strides(case: tuple[np.ndarray, int], algorithm: str) -> None:
    """Strided inputs and outputs, and in place; memory between the elements of `out` stays untouched."""
    x, axis = case
    before = x.copy()
    y = cupyflash.softmax(x, algorithm=algorithm, axis=axis)
    check_numbers(y, x, axis)
    room = np.full((2, *x.shape[::-1], 2), 7, x.dtype)
    out = room[1, ..., 0].T
    assert cupyflash.softmax(x, algorithm=algorithm, axis=axis - x.ndim, out=out) is out
    assert out.tobytes() == y.tobytes() and x.tobytes() == before.tobytes()
    assert (room[0] == 7).all() and (room[1, ..., 1] == 7).all()
    assert cupyflash.softmax(x, algorithm=algorithm, axis=axis, out=x) is x
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("algorithm", ["safe", "online"])
@pytest.mark.parametrize(
    ("dtype", "shape", "axis", "orders"),
    [
        ("float32", (9, 100), 1, 1),
        *(wide(dtype, *one, 5) for dtype, one in product(["float16", "float32"], [((9, 100), 1), ((3, 2000), 1), ((60, 200), 0)])),
    ],
)
def test_every_schedule_seed_gives_the_same_bits(
    algorithm: str, dtype: str, shape: tuple[int, int], axis: int, orders: int
) -> None:
    x = rows_of(shape, dtype)
    first = check_softmax(x, algorithm, axis, adjacent_rows=axis == 0)
    for seed in range(orders):
        again = check_softmax(x, algorithm, axis, seed, adjacent_rows=axis == 0)
        assert again.out.tobytes() == first.out.tobytes()


@pytest.mark.parametrize("algorithm", ["safe", "online"])
@pytest.mark.parametrize("n", [40, 1000, 2 * LONG_ROW_LANES + WARP_COLS])
def test_equal_elements_get_equal_bits(algorithm: str, n: int) -> None:
    """At any place in the row: all lanes hold the same normalizer to the bit."""
    x = np.repeat(rows_of((20, n // 2), "float32"), 2, axis=1)[:, np.random.default_rng(0).permutation(n)]
    y = cupyflash.softmax(x, algorithm=algorithm)
    places = np.argsort(x, axis=1, kind="stable")
    pairs = np.take_along_axis(y, places, axis=1).reshape(20, n // 2, 2)
    assert np.array_equal(pairs[..., 0], pairs[..., 1])


@pytest.mark.parametrize("device", ["T4", wide("A100-40GB"), "H100-SXM", wide("RTX 4090")])
def test_every_generation(device: str) -> None:
    x = rows_of((4, 100))
    with cupyflash.simulated_device(device):
        for algorithm in PASSES:
            check_numbers(cupyflash.softmax(x, algorithm=algorithm), x)


@pytest.mark.parametrize("algorithm", ["safe", "online"])
@pytest.mark.parametrize(
    ("dtype", "n"), sample(product(["float16", "bfloat16", "float32"], [5, 33, 1500]), [("bfloat16", 33), ("float32", 1500)])
)
def test_large_magnitudes_and_not_a_numbers(algorithm: str, n: int, dtype: str) -> None:
    """The results are those of scipy's formula: NaN for a row with NaN or +inf or with -inf alone, 0 for -inf beside a number."""
    rows = []
    for special in (1e4, -1e4, np.nan, np.inf, -np.inf):
        for place in (0, n // 2, n - 1):
            row = rows_of((n,), "float32")
            row[place] = special
            rows.append(row)
    largest = float(np.float32(3e38)) if dtype != "float16" else 65504.0
    rows += [np.full(n, value, np.float32) for value in (-np.inf, np.inf, np.nan, 1e4, -1e4, largest, -largest)]
    alone = np.full(n, -np.inf, np.float32)
    alone[-1] = -largest
    apart = np.full(n, -largest, np.float32)
    apart[0] = largest
    x = np.array([*rows, alone, apart]).astype(DTYPES[dtype])
    with np.errstate(over="ignore"):
        assert not np.isfinite(np.exp(x[0].astype(np.float32)).sum())  # where naive softmax overflows
    y, expected = cupyflash.softmax(x, algorithm=algorithm), definition(x, -1)
    good = ~np.isnan(expected)
    assert np.array_equal(np.isnan(y.astype(np.float32)), ~good)
    assert good.all(axis=1).sum() + (~good).all(axis=1).sum() == len(x)
    assert np.allclose(y[good].astype(np.float64), expected[good], rtol=0, atol=2 * ulp(1, DTYPES[dtype]))
    assert (y[good][x[good] == -np.inf] == 0).all()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
@pytest.mark.parametrize("algorithm", ["safe", "online"])
def test_empty_arrays(shape: tuple[int, ...], algorithm: str) -> None:
    for axis in range(-len(shape), len(shape)):
        assert cupyflash.softmax(np.zeros(shape, np.float16), algorithm=algorithm, axis=axis).shape == shape


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("algorithm", ["safe", "online"])
def test_offsets_past_two_to_the_31_elements(axis: int, algorithm: str) -> None:
    """The untouched pages between cost no memory."""
    room = np.zeros(2**31 + 8192, np.float16)
    far = np.lib.stride_tricks.as_strided(room[64:], (2, 64), (2**32, 2))
    far[...] = x = rows_of((2, 64))
    check_numbers(cupyflash.softmax(far.T.copy().T, algorithm=algorithm, axis=axis, out=far), x, axis)
    far[...] = x
    near = np.empty_like(x)
    check_numbers(cupyflash.softmax(far, algorithm=algorithm, axis=axis, out=near), x, axis)


def test_broadcast_input() -> None:
    column = rows_of((50, 1), "float32")
    x = np.broadcast_to(column, (50, 40))
    for axis in (0, 1):
        check_numbers(cupyflash.softmax(x, axis=axis), np.ascontiguousarray(x), axis)


@pytest.mark.parametrize(
    ("shape", "order", "axis", "outer"),
    [
        ((7,), (0,), 0, [(1, 0, 0), (1, 0, 0), (1, 0, 0)]),
        ((2, 3, 4, 5), (0, 1, 2, 3), 3, [(1, 0, 0), (1, 0, 0), (24, 5, 5)]),
        ((2, 3, 4, 5), (3, 2, 1, 0), 3, [(1, 0, 0), (1, 0, 0), (24, 1, 1)]),
        ((2, 3, 4, 5), (0, 1, 2, 3), 1, [(1, 0, 0), (2, 60, 60), (20, 1, 1)]),
        ((2, 3, 4, 5), (0, 2, 1, 3), 3, [(1, 0, 0), (1, 0, 0), (24, 5, 5)]),
        ((2, 1, 4, 1, 5, 1), (0, 1, 2, 3, 4, 5), 4, [(1, 0, 0), (1, 0, 0), (8, 5, 5)]),
    ],
)
def test_axes_that_are_one_in_memory_are_merged(
    shape: tuple[int, ...], order: tuple[int, ...], axis: int, outer: list[tuple[int, int, int]]
) -> None:
    x = np.zeros([shape[one] for one in order], np.float16).transpose(np.argsort(order))
    rows = Rows.of(x, x, axis)
    assert list(rows.outer) == outer
    assert rows.rows * rows.cols == x.size and rows.cols == shape[axis]
    assert rows.adjacent == (outer[-1][1] == 1 and rows.cols > 1)


@sweep(60, 400, data=st.data())
def test_rows_are_every_element_once(data: st.DataObject) -> None:
    """The strides lead to the elements of x and of y, row by row, whatever the order of the axes and the strides."""
    ndim = data.draw(st.integers(1, 4))
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * ndim))
    x, y = (strided(data, shape) for _ in "xy")
    axis = data.draw(st.integers(0, ndim - 1))
    rows = Rows.of(x, y, axis)
    lengths = [length for length, _, _ in rows.outer]
    assert rows.rows == math.prod(lengths) and rows.rows * rows.cols == x.size and rows.cols == shape[axis]
    steps = [abs(step) for _, step, _ in rows.outer]
    assert steps[-1] == min((step for step, length in zip(steps, lengths, strict=True) if length > 1), default=0)
    place = np.arange(rows.rows)[:, None]
    at = np.unravel_index(place, lengths)
    found = [sum(i * each[side] for i, each in zip(at, rows.outer, strict=True)) + np.arange(rows.cols) * step
             for side, step in ((1, rows.steps[0]), (2, rows.steps[1]))]  # fmt: skip
    right = [sum(i * step // 2 for i, step in zip(np.indices(shape), array.strides, strict=True)).ravel() for array in (x, y)]
    assert {*zip(*(each.ravel().tolist() for each in found), strict=True)} == {
        *zip(*(each.tolist() for each in right), strict=True)
    }


def strided(data: st.DataObject, shape: tuple[int, ...]) -> np.ndarray:
    """An array with axes in some order in memory, some of them backwards, with room between."""
    order = data.draw(st.permutations(range(len(shape))))
    step, back = (
        data.draw(st.lists(kind, min_size=len(shape), max_size=len(shape))) for kind in (st.integers(1, 2), st.booleans())
    )
    whole = np.zeros([shape[axis] * step[axis] for axis in order], np.float16).transpose(np.argsort(order))
    return whole[tuple(slice(None, None, -one if backwards else one) for one, backwards in zip(step, back, strict=True))]


def test_more_than_three_separate_axes_are_refused_with_the_way_out() -> None:
    x = rows_of((4, 4, 4, 4, 4))[::2, ::2, ::2, ::2]
    with pytest.raises(ValueError, match=r"x and out must have at most 3 axes.*x\.copy\(\)"):
        cupyflash.softmax(x)
    check_numbers(cupyflash.softmax(x.copy()), x)


@pytest.mark.parametrize(
    ("rows", "cols", "adjacent_rows", "lanes"),
    [
        (9, 0, False, 1), (9, 1, False, 1), (9, 2, False, 2), (9, 5, False, 8), (9, 33, False, WARP),
        (9, WARP_COLS, False, WARP), (9, WARP_COLS + 1, False, LONG_ROW_LANES),
        (9, 32, True, 1), (9, 33, True, WARP), (10**6, 10**5, True, 1), (10**6, 10**5, False, LONG_ROW_LANES),
    ],
)  # fmt: skip
def test_lanes(rows: int, cols: int, adjacent_rows: bool, lanes: int) -> None:
    schedule = plan_softmax(rows, cols, "float16", A100, adjacent_rows=adjacent_rows)
    (kernel,) = schedule.kernels()
    assert schedule.lanes == lanes
    assert kernel.grid * kernel.threads >= rows * lanes > (kernel.grid - 1) * kernel.threads
    assert kernel.threads % WARP == kernel.threads % lanes == 0 and schedule.workspace_bytes == 0


def test_more_blocks_than_a_grid_has_are_refused() -> None:
    with pytest.raises(ValueError, match="thread blocks"):
        plan_softmax(4 * MAX_GRID + 1, 64, "float16", A100).kernels()
    plan_softmax(4 * MAX_GRID, 64, "float16", A100).kernels()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((-1, 5, "float16"), "rows"), ((2.0, 5, "float16"), "rows"), ((2, True, "float16"), "cols"), ((2, 5, "int8"), "float16")],
)
def test_bad_plans_are_refused(arguments: tuple[int, int, str], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        plan_softmax(*arguments, A100)


def test_execute_refuses_an_array_of_other_rows() -> None:
    schedule = plan_softmax(4, 5, "float16", A100)
    for other in (np.zeros((5, 4), np.float16), np.zeros((4, 5), np.float32)):
        with pytest.raises(ValueError, match="the schedule is for 4 of 5 float16"):
            execute_softmax(schedule, other)


def test_a_slow_call_is_refused_with_the_way_to_allow_it() -> None:
    huge = np.broadcast_to(np.zeros(1, np.float16), (2**20, 2**20))  # refused before 2 TB are allocated
    with pytest.raises(RuntimeError, match=r"(?s)softmax.*estimated.*cupy\.asarray.*max_seconds"):
        cupyflash.softmax(huge)
    small = rows_of((4, 40))
    with cupyflash.simulated_device(max_seconds=1e-9):
        with pytest.raises(RuntimeError, match="estimated"):
            cupyflash.softmax(small)
        assert cupyflash.softmax(small[:0]).shape == (0, 40)
    with cupyflash.simulated_device(max_seconds=math.inf):
        check_numbers(cupyflash.softmax(small), small)


def test_inputs_are_left_alone() -> None:
    x = rows_of((4, 40))
    before = x.copy()
    x.flags.writeable = False
    y = cupyflash.softmax(x)
    assert y.flags.writeable and np.array_equal(x, before)


x = rows_of((4, 6))
READ_ONLY = np.zeros_like(x)
READ_ONLY.flags.writeable = False
RECORDS = np.zeros(4, [("one", np.float32), ("two", np.int16)])


@pytest.mark.parametrize(
    ("argument", "options", "error", "says"),
    [
        (x.tolist(), {}, TypeError, "x must be a NumPy or CuPy array, got list"),
        (None, {}, TypeError, "x must be a NumPy or CuPy array, got NoneType"),
        (np.float16(3), {}, TypeError, "x must be a NumPy or CuPy array, got float16"),
        (x.astype(np.float64), {}, TypeError, "x must be one of float16, bfloat16, float32, got float64"),
        (x.astype(np.int32), {}, TypeError, "x must be one of .* got int32"),
        (x.astype(object), {}, TypeError, "x must be one of .* got object"),
        (x.astype(bool), {}, TypeError, "x must be one of .* got bool"),
        (x.astype(">f4"), {}, TypeError, "x must .*order"),
        (np.ma.masked_array(x), {}, TypeError, "x must be"),
        (x[0, 0, ...], {}, ValueError, r"x must have at least one axis, got an array of shape \(\)"),
        (RECORDS["one"], {}, ValueError, "x must be aligned"),
        (np.zeros(41, np.uint8)[1:].view(np.float32), {}, ValueError, "x must be aligned"),
        (x, {"axis": 2}, ValueError, "axis must be between -2 and 1 for an x of 2 axes, got 2"),
        (x, {"axis": -3}, ValueError, "axis must be between"),
        (x, {"axis": 1.0}, TypeError, "axis must be an integer, got 1.0"),
        (x, {"axis": True}, TypeError, "axis must be an integer"),
        (x, {"axis": None}, TypeError, "axis must be an integer, got None"),
        (x, {"axis": (0, 1)}, TypeError, "axis must be an integer"),
        (x, {"algorithm": "naive"}, ValueError, "algorithm must be one of safe, online, got 'naive'"),
        (x, {"algorithm": None}, ValueError, "algorithm must be"),
        (x, {"out": x[:2]}, ValueError, r"out must have x's shape \(4, 6\), got \(2, 6\)"),
        (x, {"out": x.astype(np.float32)}, TypeError, "out must have x's dtype float16, got float32"),
        (x, {"out": READ_ONLY}, ValueError, "out must be writeable"),
        (x, {"out": x.tolist()}, TypeError, "out must be a NumPy or CuPy array, got list"),
        (x, {"out": x[::-1]}, ValueError, "out must not overlap x"),
        (x[:, :3], {"out": x[:, 1:4]}, ValueError, "out must not overlap x"),
        (x, {"out": np.lib.stride_tricks.as_strided(x.copy(), x.shape, (0, 2))}, ValueError, "out must have a place"),
    ],
)
def test_bad_calls_are_refused_by_name(argument: object, options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cupyflash.softmax(argument, **options)


@pytest.mark.parametrize("rows", [4, 0])
def test_bfloat16_on_a_device_without_it_is_refused(rows: int) -> None:
    with cupyflash.simulated_device("T4"), pytest.raises(ValueError, match="bfloat16 needs compute capability 8"):
        cupyflash.softmax(rows_of((rows, 6), "bfloat16"))


def test_any_integer_is_an_axis() -> None:
    assert cupyflash.softmax(x, axis=np.int64(-2)).tobytes() == cupyflash.softmax(x, axis=0).tobytes()


@pytest.fixture
def cupy(cupy: Recorded) -> Recorded:
    cupy.empty_like = lambda array: cupy.empty(array.shape, array.dtype)
    return cupy


@pytest.mark.parametrize("algorithm", ["safe", "online"])
def test_on_a_gpu_one_launch_with_the_schedules_constants(cupy: Recorded, algorithm: str) -> None:
    x = cupy.array(3, 5, 2000)
    y = cupyflash.softmax(x, algorithm=algorithm)
    (kernel,) = plan_softmax(15, 2000, "float16", Device.named("H100-SXM"), algorithm).kernels()
    ((grid, block, arguments, shared),) = cupy.launches
    assert (grid, block, shared) == ((kernel.grid,), (kernel.threads,), kernel.shared_bytes) == ((15,), (256,), 64)
    assert {f"-D{name}={value}" for name, value in kernel.constants} < set(cupy.compiled[0][1])
    assert arguments["x"] is x and arguments["y"] is y and cupy.allocated == [((3, 5, 2000), np.float16)]
    assert (arguments["rows"], arguments["n"], arguments["x_step"], arguments["x_inner"]) == (15, 2000, 1, 2000)


def test_on_a_gpu_nothing_is_launched_for_nothing(cupy: Recorded) -> None:
    assert cupyflash.softmax(cupy.array(0, 64)).shape == (0, 64)
    assert cupy.launches == [] and cupy.compiled == []


def test_on_a_gpu_out_is_checked_by_addresses_alone(cupy: Recorded) -> None:
    x = cupy.array(4, 6)
    assert cupyflash.softmax(x, out=x) is x
    reversed_ = cupy.array(4, 6)
    reversed_.data, reversed_.strides = x.data, (2, 8)
    with pytest.raises(ValueError, match="out must not overlap x"):
        cupyflash.softmax(x, out=reversed_)
    with pytest.raises(TypeError, match="x is CuPy's, out is NumPy's"):
        cupyflash.softmax(x, out=np.zeros((4, 6), np.float16))
