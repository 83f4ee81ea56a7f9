"""The tests that run under mpiexec: attention over MPI's ranks. Arguments: the folder of compiled programs; cupy, for CuPy's
arrays."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import compiled
from cupyflash.distributed import RankFailed, mpi, ring_attention, ring_attention_vjp, shard, unshard
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.communicator import as_communicator
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure, measure_gradients

compiled.share(Path(sys.argv[1]))
WORLD = MPI.COMM_WORLD
xp: Any = np
if sys.argv[2:] == ["cupy"]:
    if device := os.environ.get("CUPYFLASH_STAND_IN"):
        import stand_in_cupy

        stand_in_cupy.install(device)
    import cupy as xp


def host(x: Any) -> np.ndarray:
    return x if xp is np else x.get()


def raised(work: Any) -> Exception:
    try:
        work()
    except (ValueError, RankFailed, MemoryError) as error:
        return error
    raise AssertionError("nothing was raised")


def messages() -> None:
    """Several exchanges under way, in pieces, some of them empty; a program's own message is not taken for one."""
    comm = as_communicator(WORLD)
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    own = WORLD.irecv(source=left, tag=7)
    sent = [xp.arange(100.0) + rank, xp.empty((3, 0), np.float16), xp.full((2, 5), rank, np.float16)]
    came, back = [xp.zeros(x.shape, x.dtype) for x in sent], [xp.zeros(4)]
    mpi.MOST_BYTES = 300  # so that a tensor takes several messages
    first = comm.exchange(sent, right, came, left)
    second = comm.exchange([xp.full(4, 10.0 + rank)], left, back, right)
    second.wait()
    first.wait()
    mpi.MOST_BYTES = 1 << 30
    WORLD.send("mine", dest=right, tag=7)
    assert own.wait() == "mine"
    first_came, _, last_came = map(host, came)
    assert np.array_equal(first_came, np.arange(100.0) + left) and (last_came == left).all() and (host(back[0]) == 10 + right).all()
    assert comm.gather(b"x" * rank) == [b"x" * each for each in range(size)]


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((heads, 96, 16)).astype(np.float16) for heads in (2, 1, 1, 2)]


def numbers(backward: bool) -> None:
    """Check the numbers by the 2x rule."""
    q, k, v, dout = arrays()
    own = [shard(xp.asarray(x), WORLD) for x in (q, k, v, dout)]
    out, pullback = ring_attention_vjp(*own[:3], WORLD, causal=True)
    inputs = Inputs.of(q, k, v, causal=True)
    found = measure(host(unshard(out, WORLD)), None, inputs)
    if backward:
        made = [host(unshard(x, WORLD)) for x in pullback(own[3])]
        found |= measure_gradients(dict(zip(("dQ", "dK", "dV"), made, strict=True)), dout, inputs)
    assert all(each.good for each in found.values()), found


def faults() -> None:
    """Check that a mistake on one rank is an error on all, and that the next call is right."""
    q, k, v, _ = arrays()
    own, last = [shard(xp.asarray(x), WORLD) for x in (q, k, v)], WORLD.size - 1
    error = raised(lambda: ring_attention(*own, WORLD, causal=WORLD.rank == last))
    assert "causal must be the same on all" in str(error) and f"True on rank {last}" in str(error), error
    error = raised(lambda: ring_attention(own[0], own[1], own[2][..., :3, :] if WORLD.rank == last else own[2], WORLD))
    assert ("v must have k's shape" in str(error)) and str(error).startswith(f"rank {last}" if WORLD.rank < last else "v"), error

    def fails(*arguments: Any) -> Any:
        raise MemoryError("nothing left")

    forward = PieceCalls.forward
    if WORLD.rank == last:
        PieceCalls.forward = fails  # type: ignore[method-assign]
    error = raised(lambda: ring_attention(*own, WORLD, causal=True))
    PieceCalls.forward = forward  # type: ignore[method-assign]
    assert str(error) == ("nothing left" if WORLD.rank == last else f"rank {last} failed: MemoryError: nothing left"), error


messages()
if xp is np:
    faults()
numbers(backward=xp is not np)  # of NumPy's arrays the example shows it
WORLD.Barrier()
if WORLD.rank == 0:
    print(f"{WORLD.size} ranks: all is well")
