"""The connection with a running program: its calls come in, orders and results go out (the other end: stubs.c)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

ARGUMENTS = 24
"""Words of a call: six arguments in registers, and the first words of the stack."""
CALLERS = 3
"""Words of a call that say where it came from."""


class Command(IntEnum):
    """Orders to the program, by the numbers of stubs.c."""

    RETURN, READ, WRITE, PRINT, KEEP, MAP, UNMAP, CALL, PROTECT = range(9)


class Ended(Exception):
    """Raised when the program has closed the connection."""


@dataclass(frozen=True)
class RuntimeCall:
    """A call of a runtime function: its number, the calling thread, its arguments as words of 64 bits.

    `callers`: addresses in the program's file that the call, and the calls around it, return to; 0 for one elsewhere.
    """

    function: int
    thread: int
    words: tuple[int, ...]
    callers: tuple[int, ...] = ()


class Channel:
    """A program that waits for answers. Its memory can be read and written while a call is open.

    `serve` answers a call; a function of the program that the simulator calls may make calls of its own.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.serve: Callable[[RuntimeCall], int] = lambda call: 0
        self.open: Callable[[int, int], object] = lambda address, size: None
        """Is called before memory of the program is read or written, which may be closed."""

    def receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.connection.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise Ended
            parts += part
        return bytes(parts)

    def order(self, kind: Command, address: int = 0, size: int = 0, extra: int = 0, data: bytes = b"") -> None:
        self.connection.sendall(struct.pack("<4Q", kind, address & ((1 << 64) - 1), size, extra) + data)

    def answer(self) -> int:
        """Returns the answer to an order, after those calls that the program makes before it."""
        return int(struct.unpack("<Q", self.receive(8))[0])

    def next_call(self) -> RuntimeCall:
        return self.rest_of_call(self.answer())

    def rest_of_call(self, function: int) -> RuntimeCall:
        """Returns the call that begins with a function's number."""
        size = 1 + CALLERS + ARGUMENTS
        thread, *words = struct.unpack(f"<{size}Q", self.receive(8 * size))
        return RuntimeCall(function, thread, tuple(words[CALLERS:]), tuple(words[:CALLERS]))

    def run(self) -> None:
        """Serves calls until the program ends."""
        try:
            while True:
                self.order(Command.RETURN, self.serve(self.next_call()))
        except (Ended, ConnectionError):
            return

    # -- the program's memory --------------------------------------------------------------------------------------------

    def read(self, address: int, size: int) -> bytes:
        if not size:
            return b""
        self.open(address, size)
        self.order(Command.READ, address, size)
        return self.receive(size)

    def write(self, address: int, data: bytes) -> None:
        if data:
            self.open(address, len(data))
            self.order(Command.WRITE, address, len(data), data=data)

    def read_word(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")

    def write_word(self, address: int, value: int) -> None:
        self.write(address, struct.pack("<Q", value & ((1 << 64) - 1)))

    def write_int(self, address: int, value: int) -> None:
        self.write(address, struct.pack("<I", value & 0xFFFFFFFF))

    def text(self, address: int, part: int = 64) -> str:
        """Returns the C string at an address; reads to the end of a page at most, behind which there may be no memory."""
        found = b""
        while b"\0" not in found:
            at = address + len(found)
            found += self.read(at, min(part, 4096 - at % 4096))
        return found.partition(b"\0")[0].decode(errors="replace")

    def keep(self, data: bytes) -> int:
        """Returns the address of a copy that stays in the program."""
        self.order(Command.KEEP, 0, len(data), data=data)
        return self.answer()

    def print(self, text: str) -> None:
        """Writes to the program's own standard output, in order with what it prints itself."""
        data = text.encode()
        if data:
            self.order(Command.PRINT, 0, len(data), data=data)

    def map(self, address: int, size: int, offset: int, keep: bool) -> bool:
        """Shows the device's memory at `offset` at an address of the program; `keep`: in place of what is there, which it gets."""
        self.order(Command.MAP, address, size, offset | keep)
        return bool(self.answer())

    def unmap(self, address: int, size: int) -> None:
        self.order(Command.UNMAP, address, size)
        self.answer()

    def protect(self, address: int, size: int, mode: int) -> None:
        """Closes memory of the program to its own accesses, to its writes, or to none (`guard`)."""
        self.order(Command.PROTECT, address, size, mode)
        self.answer()

    def call(self, function: int, first: int, third: int = 0) -> None:
        """Calls a function of the program with (first, 0, third), and serves its calls until it returns."""
        self.order(Command.CALL, function, first, third)
        # The answer is 1; a call begins with the number of its function, which is more (stubs.c).
        while True:
            word = self.answer()
            if word == 1:
                return
            self.order(Command.RETURN, self.serve(self.rest_of_call(word)))
