"""The part of the CUDA driver that CuPy lacks: tensor maps. Its library is loaded when the first map is made."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable
from ctypes import c_int, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, ClassVar, NamedTuple

from cupyflash.launch.tensor_maps import ALIGNMENT, L2_PROMOTION, WORDS, MapPlan

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# CUDA's prototypes (cuda.h); enumerations are int. A function of the library, and what stands in for it, is made with these.
ENCODE = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_uint32, *[c_void_p] * 5, *[c_int] * 4)
REPLACE_ADDRESS = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)
# CUDA's enumerations: CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion by bytes.
DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
NOT_INTERLEAVED = FILLED_WITH_ZEROS = 0
ERRORS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    3: "CUDA_ERROR_NOT_INITIALIZED",
    4: "CUDA_ERROR_DEINITIALIZED",
    201: "CUDA_ERROR_INVALID_CONTEXT",
}
WITHOUT_CONTEXT = (3, 201)


class Functions(NamedTuple):
    """The driver's, which return a CUresult: cuTensorMapEncodeTiled and cuTensorMapReplaceAddress."""

    encode: Callable[..., int]
    replace_address: Callable[..., int]


@cache
def functions() -> Functions:
    """The functions of the driver's library. RuntimeError if there is none, or one before CUDA 12."""
    try:
        library = ctypes.CDLL(LIBRARY)
        return Functions(ENCODE(("cuTensorMapEncodeTiled", library)), REPLACE_ADDRESS(("cuTensorMapReplaceAddress", library)))
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"tensor maps need the driver of CUDA 12 or later ({LIBRARY}): {error}") from error


class EncodedMap:
    """A tensor map's words for tensors at several addresses, as the driver encodes them. Recent ones are kept; threads may ask at
    once."""

    WORDS: ClassVar[int] = WORDS
    most = 64

    def __init__(self, tensor_map: MapPlan) -> None:
        self.map, self._first = tensor_map, array("Q")
        self._made: dict[int, array[int]] = {}

    def of(self, address: int) -> array[int]:
        """Encoded at the first address; for later ones it is replaced."""
        made = self._made.get(address)
        if made is None:
            if len(self._made) >= self.most:
                self._made.clear()
            first = self._first  # read once: another thread may set it at any time
            room, at = aligned(first.tobytes())
            (replace_address if first else encode)(self.map, address, at)
            self._made[address] = made = array("Q", ctypes.string_at(at, 8 * WORDS))
            self._first = first or made
            del room
        return made


def aligned(words: bytes = b"") -> tuple[Any, int]:
    """(Memory for a tensor map with these words in it, the aligned address in it); the caller must hold the memory."""
    room = (c_uint64 * (WORDS + ALIGNMENT // 8))()
    at = ctypes.addressof(room) + -ctypes.addressof(room) % ALIGNMENT
    ctypes.memmove(at, words, len(words))
    return room, at


def encode(tensor_map: MapPlan, address: int, at: int) -> None:
    """Write a map's 128 bytes to `at`, aligned to 64, for a tensor at `address`. RuntimeError if the driver refuses."""
    m = tensor_map
    rank = len(m.dims)
    arrays = (
        (c_uint64 * rank)(*m.dims),
        (c_uint64 * (rank - 1))(*m.strides),
        (c_uint32 * rank)(*m.box),
        (c_uint32 * rank)(*[1] * rank),
    )
    choices = NOT_INTERLEAVED, SWIZZLES[m.swizzle], PROMOTIONS[L2_PROMOTION], FILLED_WITH_ZEROS
    places = [ctypes.addressof(array) for array in arrays]
    what = f"a map of {m.tensor} at {address:#x}: {m.dtype}, dims={m.dims}, strides={m.strides}, box={m.box}, swizzle={m.swizzle}"
    _checked(what, lambda: functions().encode(at, DATA_TYPES[m.dtype], rank, address, *places, *choices))


def replace_address(tensor_map: MapPlan, address: int, at: int) -> None:
    """Make the encoded map at `at` describe a tensor of the same layout at `address`. RuntimeError if the driver refuses."""
    status = functions().replace_address(at, address)
    if status:
        what = f"the address {address:#x} in a map of {tensor_map.tensor}"
        _checked(what, lambda: functions().replace_address(at, address))


def _checked(what: str, call: Callable[[], int]) -> None:
    """Call the driver; once more if the thread had no context, which CuPy makes when it first needs one."""
    status = call()
    if status in WITHOUT_CONTEXT:
        runtime = sys.modules["cupy"].cuda.runtime
        runtime.setDevice(runtime.getDevice())  # makes the device's context current (CUDA 12)
        status = call()
    if status:
        raise RuntimeError(f"the CUDA driver refuses {what}: {ERRORS.get(status, f'error {status}')}")
