"""The interface of a transport, and the adapter for an object that is one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Request(Protocol):
    """An exchange that is under way."""

    def wait(self) -> None:
        """Wait until received arrays are complete and sent ones may be written again. On a GPU only the current stream waits."""


class Communicator(Protocol):
    """A carrier of messages between ranks: a few verbs, which all ranks use in the same order.

    `rank` is this one, of 0 to `size` - 1.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def exchange(self, send: Sequence[Any], to: int, receive: Sequence[Any], source: int) -> Request:
        """Begin to send arrays to rank `to` while as many arrive from rank `source`, and return at once.

        Arrays are contiguous, NumPy's or CuPy's; each received one has as many bytes as the one that was sent, which may be none.
        Work that is queued on the current stream before the call comes first. Several exchanges may be in flight; all ranks begin
        them in the same order.
        """

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in their order, on each of them. It waits until they are there."""


class RankFailed(RuntimeError):
    """Another rank failed in the middle of a call, so that there is no result here: `rank` is its number."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} failed: {why}")
        self.rank = rank


@contextmanager
def taking_part(communicator: Communicator) -> Iterator[None]:
    """Call a transport's `abandon`, if any, when this rank alone ends in the middle of a call (Ctrl-C, an exit)."""
    try:
        yield
    except Exception:
        raise
    except BaseException as end:
        if hasattr(communicator, "abandon"):
            communicator.abandon(end)
        raise


def as_communicator(comm: Any) -> Communicator:
    """An adapter for mpi4py's and NCCL's communicators; an object that has the verbs itself, unchanged. TypeError for all
    others."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(comm, mpi.Comm):
        from cupyflash.distributed.mpi import MpiCommunicator

        return MpiCommunicator(comm)
    kinds = {(each.__module__.partition(".")[0], each.__name__) for each in type(comm).__mro__}
    if ("nccl", "Communicator") in kinds or any(name == "NcclCommunicator" for _, name in kinds):
        from cupyflash.distributed.nccl import CupyNccl, Nccl4py, NcclTransport

        return NcclTransport(Nccl4py(comm) if ("nccl", "Communicator") in kinds else CupyNccl(comm))
    if all(hasattr(comm, name) for name in ("rank", "size", "exchange", "gather")):
        found: Communicator = comm
        return found
    raise TypeError(
        "comm must be an mpi4py.MPI.Comm (pip install 'cupyflash[mpi]'), a communicator of cupy.cuda.nccl or nccl4py "
        "(pip install 'cupyflash[nccl]'), what cupyflash.distributed.threads hands over, or have rank, size, exchange and gather "
        f"(cupyflash.distributed.Communicator), got {type(comm).__name__}"
    )
