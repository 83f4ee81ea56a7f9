"""The driver's tensor maps in the stand-in: their 128 bytes are the PTX machine's own, with the address on the device in them."""

from __future__ import annotations

import ctypes
from typing import Any

from cupyflash.launch import driver
from cupyflash.sim.ptx.memory.swizzles import (
    FILLS,
    INTERLEAVES,
    MAP_ALIGN,
    MAP_BYTES,
    PROMOTIONS,
    SWIZZLES,
    TYPES,
    Description,
    decode,
)

INVALID_VALUE = 1


def encode(at: int, kind: int, rank: int, address: int, *rest: Any) -> int:
    """The stand-in of cuTensorMapEncodeTiled."""
    (dims, strides, box, steps), (interleave, swizzle, promotion, fill) = rest[:4], rest[4:]
    description = Description(
        tuple(TYPES)[kind],
        tuple((ctypes.c_uint64 * rank).from_address(dims)),
        tuple((ctypes.c_uint64 * (rank - 1)).from_address(strides)),
        tuple((ctypes.c_uint32 * rank).from_address(box)),
        tuple((ctypes.c_uint32 * rank).from_address(steps)),
        INTERLEAVES[interleave],
        SWIZZLES[swizzle],
        PROMOTIONS[promotion],
        FILLS[fill],
    )
    try:
        description.check()
    except ValueError:
        return INVALID_VALUE
    return _write(at, description, address)


def replace_address(at: int, address: int) -> int:
    """The stand-in of cuTensorMapReplaceAddress."""
    found = decode(ctypes.string_at(at, MAP_BYTES)) if at % MAP_ALIGN == 0 else None
    return INVALID_VALUE if found is None else _write(at, found[0], address)


def _write(at: int, description: Description, address: int | None) -> int:
    if at % MAP_ALIGN or not address or address % 16:
        return INVALID_VALUE
    ctypes.memmove(at, description.encode(address), MAP_BYTES)
    return 0


functions = driver.Functions(driver.ENCODE(encode), driver.REPLACE_ADDRESS(replace_address))
