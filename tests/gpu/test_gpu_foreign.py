"""Tensors of other libraries, taken as views: through DLPack, in order with their stream, and the CUDA array interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import DTYPES, choose, on_gpu, on_host
from test_gpu_streams import busy

import cupyflash
from cupyflash import Problem
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure_gradients
from yardstick import check_numbers, draw

PROBLEM = Problem(1, 2, 2, choose(100, 20), choose(150, 33), 64, "float16")


class Tensor:
    """A tensor of a library that works on a stream of its own, and offers its memory as such libraries do."""

    def __init__(self, array: Any, stream: Any = None) -> None:
        self.array, self.stream = array, stream


class DLPackTensor(Tensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """The consumer's stream waits for what was queued on ours."""
        import cupy

        if self.stream is not None:
            current = cupy.cuda.get_current_stream()
            assert stream in (current.ptr, current.ptr or 1)
            current.wait_event(self.stream.record())
        return self.array.__dlpack__(stream=stream, **options)


class InterfaceTensor(Tensor):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface as PyTorch writes it: bfloat16 has no name there (<V2), and it may leave out a stream."""
        told = dict(self.array.__cuda_array_interface__)
        told.pop("descr", None)
        told |= {"stream": self.stream.ptr} if self.stream is not None else {"version": 2}
        if self.stream is None:
            told.pop("stream", None)
        return told


class TorchTensor(DLPackTensor, InterfaceTensor):
    """Both."""


@pytest.mark.parametrize("dtype", choose(DTYPES, DTYPES[:2]))
@pytest.mark.parametrize("kind", [DLPackTensor, InterfaceTensor, TorchTensor])
def test_views_of_tensors(kind: type[Tensor], dtype: str) -> None:
    """The interface alone does not tell bfloat16 from two nameless bytes: refused, by name."""
    problem = Problem(1, 2, 2, PROBLEM.seqlen_q, PROBLEM.seqlen_k, 64, dtype)
    host = draw(problem)
    tensors = [kind(array) for array in on_gpu(*host)]
    if kind is InterfaceTensor and dtype == "bfloat16":
        with pytest.raises(TypeError, match=r"q must|q has"):
            cupyflash.attention(*tensors)
        return
    out, pullback = cupyflash.attention_vjp(*tensors)
    check_numbers(*on_host(out), None, *host)
    gradients = dict(zip(("dQ", "dK", "dV"), on_host(*pullback(kind(out))), strict=True))
    assert all(each.good for each in measure_gradients(gradients, *on_host(out), Inputs(*host)).values())


@pytest.mark.parametrize("kind", [DLPackTensor, InterfaceTensor])
def test_strided_tensors_and_out(kind: type[Tensor]) -> None:
    """(b, n, h, d) with heads and rows swapped, rows that are parts of wider ones, and O written in place."""
    import cupy

    n = choose(30, 10)
    host = [array.swapaxes(1, 2) for array in draw(Problem(2, n, n, 2, 2, 128, "float16"))]
    q, k, v = (array.swapaxes(1, 2)[..., 32:96] for array in on_gpu(*(np.ascontiguousarray(each.swapaxes(1, 2)) for each in host)))
    out = cupy.zeros((2, n, 2, 64), cupy.float16).swapaxes(1, 2)
    tensor = kind(out)
    assert cupyflash.attention(kind(q), kind(k), kind(v), out=tensor) is tensor
    check_numbers(*on_host(out), None, *(each[..., 32:96] for each in host))


@pytest.mark.parametrize("kind", [DLPackTensor, InterfaceTensor])
def test_a_tensor_that_is_still_being_computed(kind: type[Tensor]) -> None:
    """On its own stream, while we are on another."""
    import cupy

    host = draw(PROBLEM)
    q, k, v = on_gpu(*host)
    theirs, ours = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for _ in range(2):
        busy(theirs)
        with theirs:
            late = q * 2
        with ours:
            (found,) = on_host(cupyflash.attention(kind(late, theirs), k, v, scale=1 / 16))
        check_numbers(found, None, *host)
        theirs.synchronize()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_pytorch(dtype: str) -> None:
    """As they are, transposed, and on a stream of PyTorch's own; O and the gradients go back through DLPack."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a PyTorch that sees the GPU")
    problem = Problem(2, 4, 2, 100, 150, 64, dtype)
    host = draw(problem)
    with torch.cuda.stream(torch.cuda.Stream()):
        q, k, v = (
            torch.from_numpy(np.ascontiguousarray(array.astype(np.float32).swapaxes(1, 2))).to("cuda", getattr(torch, dtype))
            for array in host
        )
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        stream = torch.cuda.current_stream()
        for late in (q, (q * 2) / 2):
            out, pullback = cupyflash.attention_vjp(late, k, v)
            gradients = [torch.from_dlpack(each) for each in (out, *pullback(torch.from_dlpack(out)))]
            found, *_ = (each.float().cpu().numpy().astype(host[0].dtype) for each in gradients)
            check_numbers(found, None, *host)
        stream.synchronize()
