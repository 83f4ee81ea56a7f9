"""Arrays that are neither NumPy's nor CuPy's, on the GPU path: lists, the CUDA array interface, DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import (
    attention,
    attention_varlen,
    attention_vjp,
)
from cupyflash.sim.numbers.yardstick import DTYPES
from recorded_cupy import Recorded


def test_lists_of_lengths_and_bounds_are_copied_to_the_gpu(cupy: Recorded) -> None:
    q, k, v = (cupy.array(2, 4, 16, 64) for _ in range(3))
    for lengths in ([3, 16], (3, 16), np.array([3, 16])):
        attention(q, k, v, key_lengths=lengths)
        (copied,) = (one for one in cupy.launches[-1][2].values() if isinstance(one, cupy.ndarray) and one.dtype == np.int32)
        assert copied.host.tolist() == [3, 16]
    out, pullback = attention_vjp(q, k, v, key_lengths=[3, 16])
    pullback(out)
    with pytest.raises(ValueError, match="key_lengths must be 2 lengths between 0 and 16"):
        attention(q, k, v, key_lengths=[3, 17])
    packed = [cupy.array(40, 4, 64) for _ in range(3)]
    attention_varlen(*packed, [0, 10, 40], (0, 10, 40))
    copied = [one.host.tolist() for one in cupy.launches[-1][2].values() if isinstance(one, cupy.ndarray) and one.dtype == np.int32]
    assert copied == [[0, 10, 40]] * 2


class ByInterface:
    """The CUDA array interface and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array, self.__cuda_array_interface__ = array, {}


def test_objects_with_the_cuda_array_interface_alone_are_taken_as_cupy_takes_them(cupy: Recorded) -> None:
    cupy.asarray = lambda foreign: foreign.array
    q, k, v = (cupy.array(16, 64) for _ in range(3))
    attention(ByInterface(q), ByInterface(k), ByInterface(v))
    assert [cupy.launches[0][2][name] for name in "QKV"] == [q, k, v]


class Tensor:
    """The stand-in of PyTorch's tensors on a GPU: DLPack beside a CUDA array interface, in which bfloat16 is two nameless bytes."""

    requires_grad = False

    def __init__(self, array: Any) -> None:
        self.array, self.streams = array, []  # type: ignore[var-annotated]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AssertionError("DLPack goes first")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int) -> Any:
        self.streams.append(stream)
        return self.array


def test_dlpack_goes_before_the_cuda_array_interface(cupy: Recorded) -> None:
    """CuPy's own function takes it, which passes its current stream."""
    q, k, v = (Tensor(cupy.array(16, 64, dtype=DTYPES["bfloat16"])) for _ in range(3))
    attention(q, k, v)
    assert [cupy.launches[0][2][name] for name in "QKV"] == [q.array, k.array, v.array] and q.streams == [1]


def test_a_tensor_that_requires_grad_or_cannot_be_taken_is_refused_by_name(cupy: Recorded) -> None:
    q, k, v = (Tensor(cupy.array(16, 64)) for _ in range(3))
    k.requires_grad = True
    with pytest.raises(TypeError, match=r"k must be a tensor that does not require grad, got one that does: pass k.detach\(\)"):
        attention(q, k, v)

    def refuse(_: Any) -> Any:
        raise NotImplementedError("no float8")

    cupy.from_dlpack = refuse
    with pytest.raises(TypeError, match="q cannot be taken through DLPack: no float8"):
        attention(q, k, v)

    def break_off(_: Any) -> Any:
        raise ValueError("no masks")

    cupy.asarray = break_off
    with pytest.raises(TypeError, match="q cannot be taken through the CUDA array interface: no masks"):
        attention(ByInterface(q.array), k, v)
