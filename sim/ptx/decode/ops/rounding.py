"""The host's floating-point environment: the rounding direction and the flushing of subnormals.

PTX has both as instruction modifiers (.rn/.rz/.rm/.rp, .ftz). The host's vector unit has them as control bits of the thread, and
NumPy's loops obey them, so `.ftz` and directed rounding cost nothing per lane. The bits are set through `fesetenv` of the C
library, whose `fenv_t` holds them on the platforms below; elsewhere only the default environment exists: subnormals are kept, and
directed rounding is refused.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Callable
from functools import partial

import numpy as np

from ...text.syntax import PtxError

NEAREST, DOWN, UP, ZERO = 0, 1, 2, 3
ROUNDING = {"rn": NEAREST, "rna": NEAREST, "rm": DOWN, "rp": UP, "rz": ZERO}


def mode(rounding: int = NEAREST, flush: bool = False) -> int:
    """Returns the code of an environment: the index in `Environment.setters`."""
    return rounding * 2 + flush


KEEP = mode()
"""Round to nearest, keep subnormals: the environment that everything outside of the run loop expects."""


def _layout() -> tuple[int, int, int, tuple[int, int, int, int], int] | None:
    """Returns (offset of the control word, its bytes, flush bits, rounding bits by direction, mask) inside fenv_t."""
    machine, system = platform.machine(), platform.system()
    if system == "Linux" and machine == "x86_64":  # MXCSR: FTZ, DAZ; RC in bits 13-14
        return 28, 4, 0x8040, (0, 1 << 13, 2 << 13, 3 << 13), 0x8040 | 3 << 13
    if machine in ("aarch64", "arm64"):  # FPCR: FZ; RMode in bits 22-23 counts nearest, up, down, zero
        offset, width = (0, 4) if system == "Linux" else (8, 8)
        return offset, width, 1 << 24, (0, 2 << 22, 1 << 22, 3 << 22), 1 << 24 | 3 << 22
    return None


FLUSH = mode(NEAREST, True)
"""Round to nearest, flush subnormals: the environment of `.ftz`."""


class Environment:
    """`setters[mode]()` switches the calling thread; `native`: True if modes other than `KEEP` exist here."""

    def __init__(self) -> None:
        self.setters: dict[int, Callable[[], object]] = {KEEP: _nothing}
        self.native = False
        layout = _layout()
        if layout is None:
            return
        offset, width, flush_bits, rounding_bits, mask = layout
        libm = ctypes.CDLL(ctypes.util.find_library("m") or None)
        base = (ctypes.c_ubyte * 64)()
        libm.fegetenv(base)
        control = int.from_bytes(bytes(base)[offset : offset + width], "little") & ~mask
        setters: dict[int, Callable[[], object]] = {}
        for rounding in (NEAREST, DOWN, UP, ZERO):
            for flush in (False, True):
                env = (ctypes.c_ubyte * 64).from_buffer_copy(base)
                word = control | rounding_bits[rounding] | (flush_bits if flush else 0)
                env[offset : offset + width] = list(word.to_bytes(width, "little"))
                setters[mode(rounding, flush)] = partial(libm.fesetenv, env)
        tiny = np.full(8, 1e-39, np.float32)
        setters[FLUSH]()
        self.native = not (tiny * np.float32(1)).any()
        setters[KEEP]()
        if self.native:
            self.setters = setters

    def setter(self, code: int) -> Callable[[], object]:
        """Returns the switch to environment `code`; without host support flushing is dropped, directed rounding refused."""
        if code in self.setters:
            return self.setters[code]
        if code == FLUSH:
            return _nothing
        raise PtxError("directed rounding (.rz, .rm, .rp) needs Linux on x86-64, or an ARM64 host")


def _nothing() -> None:
    pass


ENVIRONMENT = Environment()
