"""Attention over ranks on GPUs: threads and MPI's processes on one, NCCL over two."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cupy
import numpy as np
import pytest
from test_mpi import check_ranks

from cupyflash import Mask
from cupyflash.distributed import ring_attention_varlen, ring_attention_vjp, shard, threads, unshard
from cupyflash.distributed.communicator import as_communicator
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure, measure_gradients

RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal((heads, 96, 16)).astype(np.float16) for heads in (2, 1, 1, 2)]
CU_SEQLENS = [0, 40, 41, 96]
AHEAD = np.array([3, 0, 20], np.int32)  # how far each sequence's rows see beyond their own key


def over_ranks(comm: Any) -> list[np.ndarray]:
    """O, dQ, dK and dV, and O of packed sequences; all on a stream of this rank's own."""
    with cupy.cuda.Stream(non_blocking=True):
        own = [shard(cupy.asarray(x), comm) for x in ARRAYS]
        out, pullback = ring_attention_vjp(*own[:3], comm, causal=True)
        made = [unshard(x, comm).get() for x in (out, *pullback(own[3]))]
        packed = [shard(cupy.asarray(np.ascontiguousarray(x.swapaxes(0, 1))), comm, axis=0) for x in ARRAYS[:3]]
        mask = Mask("k - q <= ahead[b]", ahead=cupy.asarray(AHEAD))
        options: dict[str, Any] = {"mask": mask, "dropout": 0.25, "seed": 4}
        of_packed = ring_attention_varlen(*packed, CU_SEQLENS, CU_SEQLENS, comm, gather_kv=True, **options)
        return [*made, unshard(of_packed, comm, axis=0).get()]


def check(ranks: int, work: Callable[[Any], list[np.ndarray]]) -> None:
    inputs = Inputs.of(*ARRAYS[:3], causal=True)
    for out, dq, dk, dv, packed in threads(ranks, work):
        numbers = measure(out, None, inputs) | measure_gradients({"dQ": dq, "dK": dk, "dV": dv}, ARRAYS[3], inputs)
        assert all(each.good for each in numbers.values()), numbers
        for number, (begin, end) in enumerate(pairwise(CU_SEQLENS)):
            options: dict[str, Any] = {"window": (None, int(AHEAD[number])), "dropout": 0.25, "seed": 4}
            sequence = Inputs.of(*(x[:, begin:end] for x in ARRAYS[:3]), **options, dropout_origin=(number, 0, 0, 0))
            assert measure(packed[begin:end].swapaxes(0, 1), None, sequence)["O"].good


def test_threads_on_one_gpu() -> None:
    check(3, over_ranks)


@pytest.mark.parametrize("binding", ["cupy", "nccl4py"])
def test_nccl_over_two_gpus(binding: str) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("NCCL needs a GPU for each rank, here is one")
    if binding == "cupy" and not hasattr(cupy.cuda, "nccl"):
        pytest.skip("this CuPy was built without NCCL")
    nccl = cupy.cuda.nccl if binding == "cupy" else pytest.importorskip("nccl.core")
    number = nccl.get_unique_id()

    def work(comm: Any) -> list[np.ndarray]:
        with cupy.cuda.Device(comm.rank):
            if binding == "cupy":
                return over_ranks(nccl.NcclCommunicator(2, number, comm.rank))
            return over_ranks(nccl.Communicator.init(2, comm.rank, number))

    check(2, work)


def test_a_graph_is_refused() -> None:
    q, k, v = (cupy.asarray(x) for x in ARRAYS[:3])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="a CUDA graph cannot hold attention over ranks"):
                ring_attention_vjp(q, k, v, Alone())
        finally:
            stream.end_capture()


class Alone:
    """The one rank of a communicator, which has nobody to send to."""

    rank, size = 0, 1

    def gather(self, message: bytes) -> list[bytes]:
        return [message]

    def exchange(self, *_: Any) -> Any:
        raise AssertionError("there is nobody")


@pytest.mark.skipif(not hasattr(cupy.cuda, "nccl"), reason="this CuPy was built without NCCL")
def test_nccl_refuses_arrays_of_numpy() -> None:
    comm = as_communicator(cupy.cuda.nccl.NcclCommunicator(1, cupy.cuda.nccl.get_unique_id(), 0))
    assert comm.gather(b"x" * 5000) == [b"x" * 5000] and comm.gather(b"") == [b""]
    with pytest.raises(TypeError, match="arrays must be CuPy's over NCCL"):
        comm.exchange([ARRAYS[0]], 0, [ARRAYS[0]], 0)


def test_processes_of_mpi_on_one_gpu() -> None:
    check_ranks(2, "cupy")
