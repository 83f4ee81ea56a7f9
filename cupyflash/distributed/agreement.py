"""Messages of ranks around a call: an error on one of them is raised on all, and none waits in vain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from cupyflash.basics import Values
from cupyflash.distributed.communicator import Communicator, RankFailed
from cupyflash.words import cut, plural

Made = TypeVar("Made")
# Of a rank's error that others are told
LONGEST = 2000


def together(comm: Communicator, make: Callable[[], Made], say: Callable[[Made], Values]) -> tuple[Made, list[Any]]:
    """Return the result of `make` on this rank, and what each rank says of its own.

    An exception of `make` on this rank is raised here; the other ranks get a ValueError that names this rank.
    """
    try:
        made = make()
        message = {"said": say(made)}
    except Exception as error:
        comm.gather(json.dumps({"error": _shown(error)}).encode())
        raise
    told = [json.loads(each) for each in comm.gather(json.dumps(message).encode())]
    for rank, each in enumerate(told):
        if "error" in each:
            raise ValueError(f"rank {rank} cannot take part: {each['error']}")
    return made, [each["said"] for each in told]


def require_alike(told: list[Mapping[str, str]]) -> None:
    """ValueError for the first value in which ranks differ, with the value of each."""
    for name in dict.fromkeys(name for each in told for name in each):
        values: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            values.setdefault(each.get(name, "none"), []).append(rank)
        if len(values) > 1:
            shown = "; ".join(f"{cut(value)} on {_ranks(ranks)}" for value, ranks in values.items())
            raise ValueError(f"{name} must be the same on all {plural(len(told), 'rank')}, got {shown}")


def shown(array: Any, free: int | None) -> str:
    """Dtype and shape of an array, whose length along axis `free` may be another on each rank."""
    shape = [str(length) for length in array.shape]
    if free is not None:
        shape[free] = "n"
    return f"{array.dtype} ({', '.join(shape)})"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    few, last = (ranks[:-1], str(ranks[-1])) if len(ranks) <= 8 else (ranks[:8], f"{len(ranks) - 8} more")
    return f"ranks {', '.join(map(str, few))} and {last}"


class Watch:
    """Keeps an error in the middle of a call, while messages still have to be passed on."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def run(self, work: Callable[[], object]) -> None:
        """Do something, unless something went wrong before. NumPy warns of no number, as a GPU: a rank that failed sends any."""
        if self.error is None:
            try:
                with np.errstate(all="ignore"):
                    work()
            except Exception as error:
                self.error = error

    def close(self, comm: Communicator, make: Callable[[], Made]) -> Made:
        """Return the result of `make` at the end of a call. Raise this rank's error, or `RankFailed` for another rank's."""
        made: list[Made] = []
        self.run(lambda: made.append(make()))
        try:
            told = comm.gather(b"" if self.error is None else _shown(self.error).encode())
        except Exception:
            if self.error is None:
                raise
            told = []
        if self.error is not None:
            raise self.error
        for rank, why in enumerate(told):
            if why:
                raise RankFailed(rank, why.decode())
        return made[0]


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST]
