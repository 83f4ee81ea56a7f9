"""Prepared calls: a later call launches, and refuses, the same as the first one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from cupyflash import Mask, attention, attention_decode, attention_varlen, block_mask, calls
from cupyflash.arrays import ArrayLayout
from cupyflash.launch import launcher
from cupyflash.sim.numbers.yardstick import DTYPES
from recorded_cupy import Recorded


def array(cupy: Recorded, *shape: int, dtype: Any = np.float16, offset: int = 0, order: tuple[int, ...] | None = None) -> Any:
    """An array at an address `offset` bytes past a multiple of 64, its axes in memory in `order`."""
    dtype, order = np.dtype(dtype), tuple(range(len(shape))) if order is None else order
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    laid_out = memory[start : start + size].view(dtype).reshape([shape[axis] for axis in order])
    return cupy.ndarray(shape, dtype, laid_out.transpose(np.argsort(order)))


def launched(cupy: Recorded, call: Callable[..., Any], **arguments: Any) -> tuple[Any, ...]:
    """The launches, allocations and results of a call; of arrays that it made itself, their layouts."""
    for record in (cupy.launches, cupy.functions, cupy.allocated, cupy.devices):
        record.clear()
    returned = call(**arguments)
    given = [id(argument) for argument in arguments.values()]

    def told(value: Any) -> Any:
        if not isinstance(value, cupy.ndarray):
            return type(value), value
        return id(value) if id(value) in given else (value.shape, value.strides, value.dtype)

    launches = [
        (grid, block, {name: told(value) for name, value in values.items()}, shared)
        for grid, block, values, shared in cupy.launches
    ]
    parts = returned if isinstance(returned, tuple) else (returned,)
    return launches, list(cupy.functions), list(cupy.allocated), list(cupy.devices), [told(part) for part in parts]


def same_as_first(cupy: Recorded, call: Callable[..., Any], **arguments: Any) -> None:
    """A call that was made before with the same layouts, or is the first after others, does what it does in a new process."""
    now, again = launched(cupy, call, **arguments), launched(cupy, call, **arguments)
    launcher.KEPT.clear()
    assert now == again == launched(cupy, call, **arguments)


def variations(cupy: Recorded) -> dict[str, Callable[[], Mapping[str, Any]]]:
    """One change each to a call; new arrays at each draw."""

    def qkv(b: int = 2, h: int = 4, n: int = 96, d: int = 64, kv: int = 2, **how: Any) -> dict[str, Any]:
        heads = {"q": h, "k": kv, "v": kv}
        return {name: array(cupy, b, heads[name], n, d, **how) for name in "qkv"}

    return {
        "as it is": qkv,
        "batch": lambda: qkv(b=3),
        "heads": lambda: qkv(h=6),
        "length": lambda: qkv(n=97),
        "long": lambda: qkv(n=8192, b=1, h=2),
        "head dimension": lambda: qkv(d=32),
        "dtype": lambda: qkv(dtype=DTYPES["bfloat16"]),
        "width": lambda: qkv(dtype=np.float32),
        "strides": lambda: qkv(order=(0, 2, 1, 3)),
        "one array's strides": lambda: qkv() | {"k": array(cupy, 2, 2, 96, 64, order=(0, 2, 1, 3))},
        **{
            f"offset {offset}": lambda offset=offset: qkv() | {"k": array(cupy, 2, 2, 96, 64, offset=offset)}
            for offset in (2, 4, 8)
        },
        "offset 16": lambda: qkv() | {"k": array(cupy, 2, 2, 96, 64, offset=16)},
        "value dimension": lambda: qkv() | {"v": array(cupy, 2, 2, 96, 32)},
        "no batch axis": lambda: {name: array(cupy, 4, 96, 64) for name in "qkv"},
        "causal": lambda: qkv() | {"causal": True},
        "NumPy's causal": lambda: qkv() | {"causal": np.True_},
        "window": lambda: qkv() | {"window": (1, 0)},
        "window in a list": lambda: qkv() | {"window": [1, 0]},
        "another window": lambda: qkv() | {"window": (0, 1)},
        "window to one side": lambda: qkv() | {"window": (None, 1)},
        "scale": lambda: qkv() | {"scale": 1.0},
        "integer scale": lambda: qkv() | {"scale": 1},
        "negative scale": lambda: qkv() | {"scale": -1.0},
        "tiling": lambda: qkv() | {"tiling": (64, 32)},
        "another tiling": lambda: qkv() | {"tiling": (32, 64)},
        "fa1": lambda: qkv() | {"algorithm": "fa1"},
        "standard": lambda: qkv() | {"algorithm": "standard"},
        "lse": lambda: qkv() | {"return_lse": True},
        "out": lambda: qkv() | {"out": array(cupy, 2, 4, 96, 64)},
        "out's strides": lambda: qkv() | {"out": array(cupy, 2, 4, 96, 64, order=(0, 2, 1, 3))},
        "out's offset": lambda: qkv() | {"out": array(cupy, 2, 4, 96, 64, offset=2)},
        "mask": lambda: qkv() | {"mask": array(cupy, 96, 96, dtype=bool)},
        "mask's strides": lambda: qkv() | {"mask": array(cupy, 96, 96, dtype=bool, order=(1, 0))},
        "mask's shape": lambda: qkv() | {"mask": array(cupy, 1, 96, dtype=bool)},
        "bias": lambda: qkv() | {"bias": array(cupy, 96, 96)},
        "a mask function": lambda: qkv() | {"mask": Mask("k <= q + by", by=3)},
        "another number": lambda: qkv() | {"mask": Mask("k <= q + by", by=4)},
        "another text": lambda: qkv() | {"mask": Mask("k >= q + by", by=4)},
        "an array in it": lambda: qkv() | {"mask": Mask("k >= by[h]", by=array(cupy, 4, dtype=np.int32))},
        "bias and mask": lambda: qkv() | {"bias": array(cupy, 96, 96), "mask": array(cupy, 96, 96, dtype=bool)},
        "key lengths": lambda: qkv() | {"key_lengths": array(cupy, 2, dtype=np.int32)},
        "wide key lengths": lambda: qkv() | {"key_lengths": array(cupy, 2, dtype=np.int64)},
        "block mask": lambda: qkv() | {"block_mask": array(cupy, 2, 3, dtype=bool), "tiling": (64, 32)},
        "nothing": lambda: qkv(n=0),
        "no batch": lambda: qkv(b=0),
        "another GPU": lambda: {name: _on(one, 1) for name, one in qkv().items()},
    }


def _on(one: Any, device: int) -> Any:
    one.device = device
    return one


def test_a_call_launches_what_it_launches_first_whatever_was_called_before(cupy: Recorded) -> None:
    """Each call with each single change, in random order, with new addresses every time."""
    random = np.random.default_rng(0)
    drawn = variations(cupy)
    cold = {}
    for name, draw in drawn.items():
        launcher.KEPT.clear()
        cold[name] = _shape_of(launched(cupy, attention, **draw()))
    launcher.KEPT.clear()
    before = launcher.KEPT.prepared
    for name in random.permutation(list(drawn) * 3):
        assert _shape_of(launched(cupy, attention, **drawn[name]())) == cold[name], name
    # All but a list can be kept, and offsets of 0 and 16 are one.
    assert launcher.KEPT.prepared - before == len(launcher.KEPT) <= len(drawn) - 2


def _shape_of(told: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part that does not depend on the given arrays."""
    launches, functions, allocated, devices, returned = told
    scalars = [
        (grid, block, {name: None if isinstance(v, int) else v for name, v in values.items()}, shared)
        for grid, block, values, shared in launches
    ]
    return scalars, functions, allocated, devices, [None if isinstance(part, int) else part for part in returned]


def test_changes_that_matter_are_told_apart(cupy: Recorded) -> None:
    """This test makes sure that the one above can fail: most single changes launch something else than the call as it is."""
    drawn = variations(cupy)
    plain = _shape_of(launched(cupy, attention, **drawn["as it is"]()))
    same = {name for name, draw in drawn.items() if _shape_of(launched(cupy, attention, **draw())) == plain}
    assert same == {"as it is", "offset 16"}


@pytest.mark.parametrize("seed", range(60))
def test_random_problems_with_new_addresses(cupy: Recorded, seed: int) -> None:
    random = np.random.default_rng(seed)
    b, kv, n_q, n_k = (int(n) for n in random.integers(1, (3, 4, 300, 300)))
    h, d, d_v = kv * int(random.integers(1, 4)), *(8 * int(n) for n in random.integers(1, 17, 2))
    dtype, offset = random.choice(["float16", "float32"]), int(random.choice([0, 0, 4, 8, 16]))
    order = (0, *(int(axis) for axis in random.permutation([1, 2])), 3)
    options: dict[str, Any] = {"return_lse": bool(random.integers(2)), "algorithm": random.choice(["auto", "fa1", "standard"])}
    options |= random.choice([{}, {"causal": True}, {"window": (int(random.integers(50)), None)}, {"scale": random.random()}])
    some = {name: bool(random.integers(3) == 0) for name in ("out", "mask", "bias", "key_lengths")}
    for _ in range(3):
        arrays = {
            "q": array(cupy, b, h, n_q, d, dtype=dtype, order=order),
            "k": array(cupy, b, kv, n_k, d, dtype=dtype, offset=offset),
            "v": array(cupy, b, kv, n_k, d_v, dtype=dtype, order=order, offset=offset),
            "out": array(cupy, b, h, n_q, d_v, dtype=dtype, order=order),
            "mask": array(cupy, n_q, n_k, dtype=bool),
            "bias": array(cupy, h, 1, n_k, dtype=dtype),
            "key_lengths": array(cupy, b, dtype=np.int32),
        }
        given = {name: one for name, one in arrays.items() if some.get(name, True)}
        same_as_first(cupy, attention, **given, **options)
        launched_on = {id(value) for _, _, values, _ in cupy.launches for value in values.values()}
        assert launched_on >= {id(one) for one in given.values()}


WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": 1}),
    ({"causal": False}, {"causal": 0}),
    ({"return_lse": True}, {"return_lse": 1}),
    ({"window": (1, 0)}, {"window": (True, 0)}),
    ({"window": (1, 0)}, {"window": (1.0, 0)}),
    ({"window": (1, 0)}, {"window": ([1], 0)}),
    ({"scale": 1.0}, {"scale": True}),
    ({"scale": 0.5}, {"scale": "0.5"}),
    ({"tiling": (64, 32)}, {"tiling": (64.0, 32)}),
    ({"tiling": (64, 32)}, {"tiling": [64, 32]}),
    ({"window": [1, 0]}, {"window": [1, "0"]}),
    ({"algorithm": "fa1"}, {"algorithm": "fa3"}),
]


@pytest.mark.parametrize(("right", "wrong"), WRONG, ids=str)
def test_an_option_equal_to_a_right_one_is_refused_as_at_first(
    cupy: Recorded, right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    q, k, v = (array(cupy, 2, 96, 64) for _ in "qkv")
    refused_as_at_first(cupy, lambda: attention(q, k, v, **right), lambda: attention(q, k, v, **wrong))


def refused_as_at_first(cupy: Recorded, right: Callable[[], Any], wrong: Callable[[], Any]) -> None:
    """`wrong` raises the same after `right` as in a new process, before it allocates or launches."""
    right(), right()
    before = len(cupy.launches), len(cupy.allocated), len(cupy.compiled)
    with pytest.raises((TypeError, ValueError)) as warm:
        wrong()
    launcher.KEPT.clear()
    with pytest.raises(type(warm.value)) as cold:
        wrong()
    assert str(warm.value) == str(cold.value) and warm.value.__context__ is None
    assert before == (len(cupy.launches), len(cupy.allocated), len(cupy.compiled))


def test_arrays_that_must_not_be_written_are_refused_on_every_call(cupy: Recorded) -> None:
    q, k, v, out = (array(cupy, 4, 96, 64) for _ in range(4))
    whole = np.zeros((5, 96, 64), np.float16)
    first, last, swapped = (cupy.ndarray((4, 96, 64), whole.dtype, part) for part in (whole[:4], whole[1:], whole[4:0:-1]))
    for name, wrong in (
        ("same memory", lambda: attention(first, k, v, out=first)),
        ("overlap", lambda: attention(q, k, first, out=last)),
        ("backwards", lambda: attention(q, swapped, v, out=first)),
        ("mask", lambda: attention(q, k, v, mask=cupy.ndarray((96, 96), np.dtype(bool), whole[0].view(bool)[:, :96]), out=first)),
        ("dtype", lambda: attention(q, k, v, out=array(cupy, 4, 96, 64, dtype=DTYPES["bfloat16"]))),
        ("shape", lambda: attention(q, k, v, out=array(cupy, 4, 95, 64))),
        ("another GPU", lambda: attention(q, k, v, out=_on(array(cupy, 4, 96, 64), 1))),
        ("NumPy", lambda: attention(q, k, v, out=np.zeros((4, 96, 64), np.float16))),
        ("half an element off", lambda: attention(q, array(cupy, 4, 96, 64, offset=1), v, out=out)),
    ):
        assert name
        refused_as_at_first(cupy, lambda: attention(q, k, v, out=out), wrong)


def test_out_between_the_rows_of_an_input_is_no_overlap(cupy: Recorded) -> None:
    """Spans that meet are looked at more closely."""
    both = np.zeros((96, 2, 64), np.float16)
    q, out = (cupy.ndarray((96, 64), both.dtype, both[:, side]) for side in range(2))
    k, v = (array(cupy, 96, 64) for _ in "kv")
    same_as_first(cupy, attention, q=q, k=k, v=v, out=out)


def test_decoding_launches_what_it_launches_first_and_refuses_as_at_first(cupy: Recorded) -> None:
    def draw(**more: Any) -> dict[str, Any]:
        caches = {name: array(cupy, 2, 2, 64, 32) for name in ("k_cache", "v_cache")}
        return {"q": array(cupy, 2, 4, 1, 32), **caches, "cache_seqlens": array(cupy, 2, dtype=np.int32), **more}

    def paged(**more: Any) -> dict[str, Any]:
        return draw(**{name: array(cupy, 9, 2, 16, 32) for name in ("k_cache", "v_cache")}, **more)

    def rows() -> dict[str, Any]:
        return {name: array(cupy, 2, 2, 1, 32) for name in "kv"}

    def table() -> Any:
        return array(cupy, 2, 4, dtype=np.int32)

    calls: list[Callable[[], dict[str, Any]]] = [
        draw,
        lambda: draw(**rows()),
        lambda: draw(**rows(), out=array(cupy, 2, 4, 1, 32), return_lse=True),
        lambda: paged(block_table=table()),
        lambda: paged(block_table=table(), **rows(), window=(3, None)),
        lambda: draw(cache_seqlens=array(cupy, 2, dtype=np.int64)),
        lambda: draw(cache_seqlens=[3, 5]),
        lambda: draw(softcap=20.0, sinks=array(cupy, 4, dtype=np.float32)),
    ]
    for place in np.random.default_rng(0).permutation(list(range(len(calls))) * 2):
        same_as_first(cupy, attention_decode, **calls[place]())
    before = launcher.KEPT.prepared
    launcher.KEPT.clear()
    for place in np.random.default_rng(1).permutation(list(range(len(calls))) * 3):
        launched(cupy, attention_decode, **calls[place]())
    assert launcher.KEPT.prepared - before == len(launcher.KEPT) == len(calls)
    given = draw(**rows())
    right = partial(attention_decode, **given)
    for wrong in ({"v_cache": given["k_cache"]}, {"num_splits": True}, {"cache_seqlens": [3, 64]}):
        refused_as_at_first(cupy, right, partial(attention_decode, **given | wrong))


def test_a_mask_and_one_that_was_looked_through_are_two(cupy: Recorded) -> None:
    q, k, v = (array(cupy, 2, 96, 64) for _ in "qkv")
    mask = array(cupy, 96, 96, dtype=bool)
    tiled = block_mask(mask, q, k)
    before, launches = launcher.KEPT.prepared, []
    for given in (tiled, mask, tiled, mask):
        cupy.launches.clear()
        attention(q, k, v, mask=given)
        launches.append(len(cupy.launches))
    assert launches == [2, 2, 1, 2] and launcher.KEPT.prepared - before == len(launcher.KEPT) == 2


def test_packed_sequences_launch_what_they_launch_first(cupy: Recorded) -> None:
    def draw(*lengths: int, on_gpu: bool = True, **more: Any) -> dict[str, Any]:
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        side = cupy.ndarray(bounds.shape, bounds.dtype, bounds) if on_gpu else bounds
        tensors = {name: array(cupy, int(bounds[-1]), 4, 64) for name in "qkv"}
        return tensors | {"cu_seqlens_q": side, "cu_seqlens_k": side} | more

    calls: list[Callable[[], dict[str, Any]]] = [
        lambda: draw(10, 30),
        lambda: draw(30, 10),
        lambda: draw(20, 20),
        lambda: draw(20, 20, on_gpu=False),
        lambda: draw(10, 30, max_seqlen_q=30, max_seqlen_k=30),
        lambda: draw(10, 30, max_seqlen_q=40, max_seqlen_k=30),
        lambda: draw(10, 30, causal=True, return_lse=True),
        lambda: draw(10, 30, window=(3, None), out=array(cupy, 40, 4, 64)),
        lambda: draw(10, 30, tiling=(64, 32)),
        lambda: draw(10, 30, mask=Mask("k <= q + by", by=3)),
        lambda: draw(10, 30, mask=Mask("k <= q + by[b]", by=array(cupy, 2, dtype=np.int32))),
        lambda: draw(10, 0, 30),
        lambda: draw(0, 0),
    ]
    for place in np.random.default_rng(0).permutation(list(range(len(calls))) * 2):
        same_as_first(cupy, attention_varlen, **calls[place]())
    launcher.KEPT.clear()
    before = launcher.KEPT.prepared
    for place in np.random.default_rng(1).permutation(list(range(len(calls))) * 3):
        launched(cupy, attention_varlen, **calls[place]())
    assert launcher.KEPT.prepared - before <= len(calls)


def test_bounds_are_looked_at_on_every_call(cupy: Recorded) -> None:
    q, k, v, wide = (array(cupy, 40, 4, 64) for _ in range(4))
    right = np.array([0, 10, 40], np.int32)

    def call(bounds: np.ndarray, **more: Any) -> Callable[[], Any]:
        return lambda: attention_varlen(q, k, v, bounds, right, **{"out": wide} | more)

    for wrong in (
        call(np.array([0, 10, 39], np.int32)),
        call(np.array([0, 50, 40], np.int32)),
        call(np.array([[0, 10, 40]], np.int32)),
        call(right.astype(np.float32)),
        call(right, max_seqlen_q=20),
        call(right, max_seqlen_k=True),
        call(right, out=k),
        call(right, causal=0),
    ):
        refused_as_at_first(cupy, call(right), wrong)


def test_one_device_after_the_other(cupy: Recorded) -> None:
    for device in (1, 0, 1, 0, 1):
        attention(*(_on(array(cupy, 16, 64), device) for _ in "qkv"))
    assert cupy.devices == [1, 0, 1, 0, 1] and len(cupy.compiled) == 2
    assert cupy.functions[0] is cupy.functions[2] is not cupy.functions[1]


def test_what_is_kept_is_bounded_and_holds_no_array(cupy: Recorded) -> None:
    kept = launcher.Kept()
    for number in range(kept.most + 10):
        made = object()
        assert kept.keep((number,), made) is made is kept.get((number,))
    assert len(kept) == kept.most and kept.get((9,)) is None and kept.get((10,)) is not None

    x = array(cupy, 16, 64)
    keys = [launcher.read(calls.FORWARD, {"q": x, "scale": value})[0] for value in (1, True, 1.0, np.float32(1), [1])]
    assert keys.pop() is None and len(set(keys)) == len(keys)
    arguments = dict.fromkeys("qkv", x) | {"scale": 0.5}
    for _ in range(2):
        with pytest.raises(ValueError, match="in steps of 16"):
            attention(**arguments, tiling=(7, 7))
    assert not launcher.KEPT

    q, k, v, out = (array(cupy, 96, 64) for _ in range(4))
    seen = [weakref.ref(each) for each in (q, k, v, out)]
    attention(q, k, v, out=out, algorithm="fa1")
    cupy.launches.clear()
    del q, k, v, out
    gc.collect(1)  # all there is would take long, and these are young
    assert [ref() for ref in seen] == [None] * 4


def test_numpy_arrays_are_prepared_for_anew(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values decide, such as key lengths; and the simulated device."""
    launched: list[Any] = []

    def launch(prepared: Any, *_: Any) -> dict[str, Any]:
        launched.append(prepared)
        return {"O": None}

    monkeypatch.setattr("cupyflash.launch.simulated.PreparedSimulation.launch", launch)
    q = np.zeros((1, 2, 16, 16), np.float16)
    for length in (3, 5):
        attention(q, q, q, key_lengths=np.array([length]))
    assert [one.schedule.problem.options.key_lengths for one in launched] == [(3,), (5,)] and not launcher.KEPT


def test_threads_share_what_is_kept(cupy: Recorded) -> None:
    calls = [[array(cupy, heads, 96, 64) for _ in "qkv"] for heads in (1, 2, 3, 4) * 8]
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda arrays: attention(*arrays), calls))
    by_q = {id(values["Q"]): values for _, _, values, _ in cupy.launches}
    for (q, k, v), out in zip(calls, outs, strict=True):
        assert [by_q[id(q)][name] for name in "QKVO"] == [q, k, v, out] and out.shape == q.shape


@pytest.mark.parametrize("seed", range(20))
def test_a_layout_is_that_of_the_array(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(int(n) for n in random.integers(1, 6, random.integers(1, 5)))
    dtype = random.choice([np.float16, np.float32, np.int8])
    empty = np.empty(shape, dtype)
    assert ArrayLayout.contiguous(shape, dtype) == (empty.shape, empty.strides, empty.dtype, 0)
    one, other = random.integers(0, len(shape), 2)
    swapped = empty.swapaxes(one, other)
    layout = ArrayLayout.of(empty).swapaxes(one, other)
    assert layout == ArrayLayout.of(swapped) and layout.ndim == swapped.ndim
