"""Tensor maps of arrays: which ones TMA takes and why not, their place in a kernel's struct, and copies through them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tile_copy import ROWS, TileCopy

from cupyflash import Problem
from cupyflash.arrays import Layout
from cupyflash.binding import argument_values
from cupyflash.nvrtc import CompileError
from cupyflash.params import Params, arrays, maps, numbers
from cupyflash.schedules import TileSchedule
from cupyflash.sim.execution import run_kernels
from cupyflash.sim.traffic import TensorTraffic
from cupyflash.tensor_maps import Box, first_refusal, refusal

HALF = np.dtype(np.float16)


def layout(*shape: int, strides: tuple[int, ...] | None = None, offset: int = 0) -> Layout:
    made = Layout.contiguous(shape, HALF)
    return made._replace(strides=strides or made.strides, offset=offset)


# -- which arrays ---------------------------------------------------------------------------------------------------------

TAKEN = {
    "contiguous": layout(2, 3, 100, 64),
    "(b, n, h, d), seen as (b, h, n, d)": layout(2, 100, 3, 64).swapaxes(1, 2),
    "packed sequences, heads first": layout(100, 3, 64).swapaxes(0, 1),
    "one head": layout(100, 64),
    "a few columns of a wider array": layout(100, 40, strides=(1024, 2)),
    "one row, whatever its stride": layout(2, 3, 1, 41, strides=(-6, 0, 7, 2))._replace(shape=(1, 1, 1, 41)),
    "the longest stride": layout(2, 64, strides=((1 << 40) - 16, 2)),
    "one column, whose stride is nobody's": layout(4, 1, strides=(16, 99)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_array_that_tma_takes_and_its_map(name: str) -> None:
    array = TAKEN[name]
    assert refusal("Q", array) is None
    made = Box("Q", rows=128, columns=64, swizzle=128).of(array)
    whole = (1,) * (4 - array.ndim) + array.shape
    assert made.dims == whole[::-1] and made.box == (64, 128, 1, 1) and made.dtype == "float16" and len(made.strides) == 3
    steps = dict(zip(range(3), made.strides, strict=True))
    for axis, (length, stride) in enumerate(zip(array.shape[-2::-1], array.strides[-2::-1], strict=True)):
        assert steps[axis] == stride or length == 1
    assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in made.strides)


REFUSED = {
    "an address between": (layout(100, 64, offset=8), "takes addresses that are multiples of 16 bytes, and K's is 8 bytes off"),
    "rows between": (
        layout(100, 60),
        "strides that are positive multiples of 16 bytes below 2**40, and K's from row to row is 120",
    ),
    "heads between": (layout(2, 100, 64, strides=(12808, 128, 2)), "from head to head is 12,808"),
    "one for all": (layout(4, 2, 100, 64, strides=(0, 12800, 128, 2)), "from batch to batch is 0"),
    "backwards": (layout(100, 64, strides=(-128, 2)), "from row to row is -128"),
    "too far": (layout(2, 64, strides=(1 << 40, 2)), "from row to row is 1,099,511,627,776"),
    "too long": (layout(1, 64, strides=(128, 2))._replace(shape=((1 << 32) + 1, 64)), "at most 2**32 elements, and K's row has"),
    "nothing": (layout(2, 0, 64), "tensors with elements, and K has shape (2, 0, 64)"),
    "columns apart": (layout(100, 64, strides=(256, 4)), "rows of neighbours, and K's last axis has a stride of 4 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_tma_takes_no_such_array(name: str) -> None:
    array, says = REFUSED[name]
    reason = refusal("K", array)
    assert reason and reason.startswith("TMA ") and says in reason and "\n" not in reason and ". " not in reason
    assert first_refusal({"Q": TAKEN["contiguous"], "mask": None, "K": array, "V": layout(2, 0, 64)}) == reason
    with pytest.raises(ValueError, match=re.escape(says)):
        Box("K", 64, 64, 128).of(array)
    assert first_refusal({"Q": TAKEN["contiguous"], "mask": None}) is None


# -- the struct -----------------------------------------------------------------------------------------------------------


def test_maps_lie_first_at_multiples_of_their_own_size_as_in_c() -> None:
    made = Params((*maps("Q_map", "K_map"), *arrays("const Element", ("batch", "head", "row"), "Q"), *numbers("int", "n")))
    assert [made.dtype.fields[name][1] for name in ("Q_map", "K_map", "Q", "n")] == [0, 128, 256, 288]  # type: ignore[index]
    assert made.dtype.itemsize == 384
    assert dict(made.constants)["PARAMS"] == "TensorMap Q_map; TensorMap K_map; Rows<const Element> Q; int n;"
    q = np.zeros((2, 3, 32, 64), np.float16)
    boxes = {f"{name}_map": Box(name, 32, 64, 128).of(q) for name in "QK"}
    words, places = made.packed(made.values({"Q": q, "n": 7, **boxes}, "float16"))
    assert len(words) == 48 and places == {"Q_map": 0, "K_map": 16, "Q": 32} and not words[:33].any()
    assert words[33:37].tolist() == [3 * 32 * 64, 32 * 64, 64, 7]
    with pytest.raises(ValueError, match="tensor maps come first in a struct, got n, Q_map"):
        Params((*numbers("int", "n"), *maps("Q_map"))).dtype  # noqa: B018


def test_the_compiler_holds_the_places_of_maps_to_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.compiler import ptx

    (kernel,) = TileCopy.of(Problem(1, 1, 1, 16, 16, 64, "float16")).kernels()
    assert ".target sm_90a" in ptx(kernel, (9, 0))
    wrong = np.dtype([(field.name, np.dtype(field.dtype, align=True)) for field in kernel.params.fields], align=True)
    params = Params(kernel.params.fields)
    monkeypatch.setitem(params.__dict__, "dtype", wrong)  # without the padding to 128 bytes
    with pytest.raises(CompileError, match="C and Python lay the struct out differently"):
        ptx(type(kernel)(**{**kernel.__dict__, "params": params}), (9, 0))


# -- copies on the machine ------------------------------------------------------------------------------------------------


def copied(schedule: TileSchedule, q: np.ndarray, out: np.ndarray, seed: int | None = None) -> Any:
    values = argument_values(schedule, {"Q": q, "K": q, "V": q, "O": out})
    return run_kernels(schedule, values, ("O",), seed=seed)


def drawn(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", ["plain", "swapped", "packed", "one head", "narrow"])
def test_a_kernel_copies_by_the_maps_of_its_struct(name: str, seed: int | None) -> None:
    """The numbers, the bytes in bounds under the tensors' own names, and nothing found."""
    shape = {
        "plain": (2, 3, 37, 64),
        "swapped": (2, 37, 3, 64),
        "packed": (37, 3, 64),
        "one head": (37, 64),
        "narrow": (2, 3, 16, 64),
    }
    q = drawn(*shape[name])
    if name in ("swapped", "packed"):
        q = q.swapaxes(-3, -2)
    if name == "narrow":
        q = q[..., :40]
    out = np.empty_like(q)
    schedule = TileCopy.of(Problem.from_arrays(q, q, q))
    traffic, counters, findings = copied(schedule, q, out, seed)
    assert findings == () and (out == 2 * q).all()
    assert dict(traffic) == {"Q": TensorTraffic(q.nbytes, 0), "O": TensorTraffic(0, q.nbytes)}
    assert counters["copy_tiles"] and q.shape[-2] % ROWS in (0, 5)


def test_what_nobody_wrote_is_seen_through_a_map() -> None:
    """O that is read before it is stored, through the map of another field."""
    q, out = drawn(37, 64), np.empty((37, 64), np.float16)
    schedule = TileCopy.of(Problem.from_arrays(q, q, q))
    values = argument_values(schedule, {"Q": q, "K": q, "V": q, "O": out})
    values["Q_map"] = Box("O", ROWS, 64, 128).of(out)
    _, _, findings = run_kernels(schedule, values, ("O",))
    assert {finding.kind for finding in findings} == {"uninitialised"}
