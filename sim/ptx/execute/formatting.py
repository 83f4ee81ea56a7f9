"""printf of a device: the format string and its arguments lie in the memory of a lane."""

from __future__ import annotations

import re

import numpy as np

from ..memory.memory import Memory

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d*))?(?P<length>hh|h|ll|l|j|z|t|L)?(?P<kind>.)", re.S
)


class _Arguments:
    """The argument buffer of vprintf: each at a multiple of its own size."""

    def __init__(self, memory: Memory, lane: int, address: int):
        self.memory, self.lane, self.address = memory, lane, address

    def take(self, kind: str) -> int | float:
        width = np.dtype(kind).itemsize
        self.address = -(-self.address // width) * width
        data = self.memory.peek(self.lane, self.address, width)
        self.address += width
        number: int | float = np.frombuffer(data.ljust(width, b"\0"), kind)[0].item()
        return number


def printf(memory: Memory, lane: int, form: int, buffer: int) -> str:
    """What a lane prints: `form` and `buffer` are the generic addresses that it calls vprintf with."""
    arguments = _Arguments(memory, lane, buffer)

    def convert(match: re.Match[str]) -> str:
        kind, long = match["kind"], match["length"] in ("l", "ll", "j", "z", "t")
        if kind == "%":
            return "%"
        width, precision = match["width"] or "", match["precision"]
        if width == "*":
            width = str(arguments.take("i4"))
        if precision == "*":
            precision = str(arguments.take("i4"))
        spec = f"%{match['flags']}{width}" + ("" if precision is None else f".{precision}")
        if kind in "di":
            small = {"h": "i2", "hh": "i1"}.get(match["length"] or "")
            number = arguments.take("i8" if long else "i4")
            return f"{spec}d" % (np.int64(number).astype(small) if small else number)
        if kind in "uxXo":
            number = arguments.take("u8" if long else "u4")
            number = int(number) & {"h": 0xFFFF, "hh": 0xFF}.get(match["length"] or "", (1 << 64) - 1)
            # C writes the prefix of octal numbers as 0, Python as 0o; it writes none for zero.
            if "#" in match["flags"] and (kind == "o" or number == 0):
                spec = spec.replace("#", "")
                return f"{spec}o" % number if number == 0 else f"{spec}s" % f"0{number:o}"
            return f"{spec}{kind.replace('u', 'd')}" % number
        if kind in "fFeEgG":
            return f"{spec}{kind}" % arguments.take("f8")
        if kind in "aA":
            text = float.hex(float(arguments.take("f8")))
            return f"%{width}s" % (text.upper() if kind == "A" else text)
        if kind == "c":
            return f"{spec}s" % chr(int(arguments.take("i4")) & 0xFF)
        if kind == "s":
            return f"{spec}s" % memory.text(lane, int(arguments.take("u8")))
        if kind == "p":
            return f"%{match['flags']}{width}s" % f"{arguments.take('u8'):#x}"
        return match[0]

    return _CONVERSION.sub(convert, memory.text(lane, form))
