"""CuPy in rings: the module of their arrays, and the streams of transports, in order by events: no host waits."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np


def array_module(gpu: bool) -> Any:
    """CuPy, which is there if an array of it is, or NumPy."""
    return sys.modules["cupy"] if gpu else np


@cache
def own_stream(device: int) -> Any:
    """A device's stream for messages."""
    cuda = sys.modules["cupy"].cuda
    with cuda.Device(device):
        return cuda.Stream(non_blocking=True)


def queued() -> Any:
    """An event behind all that is queued on the current stream."""
    return sys.modules["cupy"].cuda.get_current_stream().record()


def wait_for(event: Any) -> None:
    """Let the current stream wait for an event."""
    sys.modules["cupy"].cuda.get_current_stream().wait_event(event)
