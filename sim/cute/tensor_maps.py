"""Tensor maps as CuTe DSL's host code makes them: 64 bytes in the chip's own format, without the driver.

The fields were found by comparing maps of known tensors: words 0 and 1 are the address, 2 rank, type and swizzle, 3 to 7 strides in
units of 16 bytes with their high bits in word 7, 8 to 12 sizes less one; 13 has the element strides and the innermost length of the
box less one, 14 its other lengths less one.
"""

from __future__ import annotations

import struct

from cupyflash.sim.ptx.memory.swizzles import CHOICES, Description
from cupyflash.sim.triton.calls import ON_HOST

ALWAYS = 0x40002
"""Bits of word 2 that each map has."""
FIELDS = 0x207FF0 | ALWAYS
"""Bits of word 2 that may be set. Bit 21 has no effect here: CUTLASS clears it for tensors below 128 KiB."""


def translated(data: bytes) -> tuple[bytes, int]:
    """Returns a map's 128 bytes in the machine's format, and the address in it. Raises NotImplementedError for fields that are not
    known, and for bytes that are no map.
    """
    words = struct.unpack_from("<16I", data)
    flags, steps = words[2], words[13] & 0xFFFFFF
    if flags & ~FIELDS or flags & ALWAYS != ALWAYS or steps or words[15]:
        found = f"{flags:#x}, {steps:#x}, {words[15]:#x}"
        raise NotImplementedError(f"a tensor map of CuTe DSL has fields that are not simulated: {found}")
    rank, kind, swizzle = (flags >> 4 & 7) + 1, flags >> 7 & 15, flags >> 13 & 3
    address = words[0] | words[1] << 32
    box = words[13] >> 24, *(words[14] >> 8 * k & 255 for k in range(4))
    strides = [(words[3 + k] | (words[7] >> 4 * k & 15) << 32) << 4 for k in range(rank - 1)]
    description = Description(
        dtype=CHOICES["dtype"][ON_HOST.get(kind, kind)],
        dims=tuple(size + 1 for size in words[8 : 8 + rank]),
        strides=tuple(strides),
        box=tuple(length + 1 for length in box[:rank]),
        element_strides=(1,) * rank,
        swizzle=CHOICES["swizzle"][swizzle],
    )
    description.check()
    return description.encode(address), address
