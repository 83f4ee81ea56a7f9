"""The PTX in the fat binary of a compiled program.

A fat binary is a header (magic, version, its own size, the size of all behind it) and entries, each a header and a payload: PTX or
machine code, of an architecture, as it is or compressed (the layout that NVIDIA's `cuobjdump` shows; fatbinary_section.h has the
wrapper around it).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = 0xBA55ED50
WRAPPER = 0x466243B1
LINKED = 2
"""The version of a wrapper whose last word points to the fat binaries that are linked when the program begins (-rdc=true)."""
PTX, MACHINE_CODE = 1, 2
COMPRESSED = 0x2000 | 0x8000
"""Flags of a payload that LZ4 or Zstandard made smaller."""


class NoPtx(Exception):
    """Raised for a fat binary without PTX that can be read; says how to compile the program."""


@dataclass(frozen=True)
class Entry:
    """One payload. `architecture` is 80 for compute_80."""

    kind: int
    architecture: int
    flags: int
    payload: bytes


def entries(data: bytes) -> list[Entry]:
    """Returns the entries of a fat binary, whose first bytes are its header."""
    magic, _, header, size = struct.unpack_from("<IHHQ", data)
    if magic != MAGIC:
        raise NoPtx("this is no fat binary of CUDA")
    found, at = [], header
    while at < header + size:
        kind, _, own, padded = struct.unpack_from("<HHIQ", data, at)
        compressed, _, _, _, architecture = struct.unpack_from("<IIHHI", data, at + 16)
        (flags,) = struct.unpack_from("<Q", data, at + 40)
        start = at + own
        found.append(Entry(kind, architecture, flags, data[start : start + (compressed or padded)]))
        at = start + padded
    return found


def ptx_for(data: bytes, architecture: int) -> str:
    """Returns the PTX for the newest architecture that is not newer than this one. Raises NoPtx if there is none."""
    found = entries(data)
    texts = [one for one in found if one.kind == PTX]
    if not texts:
        raise NoPtx("the program has machine code only; compile it with -arch=compute_XX -code=compute_XX")
    fitting = [one for one in texts if one.architecture <= architecture]
    if not fitting:
        least = min(one.architecture for one in texts)
        raise NoPtx(f"the program has PTX for compute_{least} and newer, the device is of {architecture}: choose --device")
    best = max(fitting, key=lambda one: one.architecture)
    if best.flags & COMPRESSED:
        raise NoPtx("the program's PTX is compressed; compile it with -no-compress")
    return best.payload.rstrip(b"\0").decode()


def texts(binaries: Sequence[bytes], architecture: int) -> list[str]:
    """Returns the PTX of fat binaries that are linked. Raises NoPtx if none has any.

    Those without are left out: the device runtime's own library, whose functions are not needed here, is machine code.
    """
    found, reasons = [], []
    for data in binaries:
        try:
            found.append(ptx_for(data, architecture))
        except NoPtx as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found
