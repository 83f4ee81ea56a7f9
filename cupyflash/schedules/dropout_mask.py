"""The schedule of the kernel that writes which weights are kept: an element a thread, written once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch.params import POINTER, Field, Params, numbers
from cupyflash.request.dropout import FIELDS
from cupyflash.request.score import named
from cupyflash.schedules.base import Kernel, Schedule
from cupyflash.schedules.moves import Totals, whole

THREADS = 128
PARAMS = Params(
    (Field("kept", "unsigned char", POINTER), *numbers("long long", "elements"), *numbers("int", "Nq", "Nk", "heads"), *FIELDS)
)


@dataclass(frozen=True)
class DropoutMaskSchedule(Schedule):
    """`shape` is (batch, heads, n_q, n_k). The tensor is named kept."""

    shape: tuple[int, int, int, int]
    device: Device

    algorithm: ClassVar[str] = "dropout mask"

    def walks(self) -> Iterator[Totals]:
        yield Totals("dropout_mask", (whole("kept", math.prod(self.shape), 1, write=True),))

    def kernels(self) -> tuple[Kernel, ...]:
        constants = named(ELEMENT="float", DROPOUT=1, THREADS=THREADS)
        return (Kernel("dropout_mask.cu", "dropout_mask", constants, -(-math.prod(self.shape) // THREADS), THREADS, 0, PARAMS),)
