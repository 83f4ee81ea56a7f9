"""NumPy's memory, of which the n-th allocation fails: the data of arrays, whoever makes them, also within a ufunc.

NumPy asks a handler (NEP 49) for its memory; ours counts, refuses one, and hands all others on to NumPy's own.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
MALLOC = ctypes.PYFUNCTYPE(POINTER, POINTER, SIZE)
CALLOC = ctypes.PYFUNCTYPE(POINTER, POINTER, SIZE, SIZE)
REALLOC = ctypes.PYFUNCTYPE(POINTER, POINTER, POINTER, SIZE)
SET_HANDLER, GET_HANDLER = 304, 305  # in NumPy's C API (numpy/__multiarray_api.h)
NAME = b"mem_handler"


class Handler(ctypes.Structure):
    """PyDataMem_Handler, version 1."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", POINTER),
        ("malloc", MALLOC),
        ("calloc", CALLOC),
        ("realloc", REALLOC),
        ("free", POINTER),
    )


def _numpys(index: int, *arguments: type) -> ctypes._CFunctionType:
    """A function of NumPy's C API."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = POINTER, (ctypes.py_object, ctypes.c_char_p)
    table = ctypes.cast(pointer(np._core.multiarray._ARRAY_API, None), ctypes.POINTER(POINTER))
    return ctypes.PYFUNCTYPE(ctypes.py_object, *arguments)(table[index])


class Memory:
    """NumPy's, in `failing_at`; `places` are where it was asked for, by lines of Python."""

    def __init__(self) -> None:
        self.places: list[tuple[object, ...]] = []
        self.failing = 0
        get, pointer = _numpys(GET_HANDLER), ctypes.pythonapi.PyCapsule_GetPointer
        own = ctypes.cast(pointer(get(), NAME), ctypes.POINTER(Handler)).contents
        handler = Handler(b"failing", 1, own.context, MALLOC(0), CALLOC(0), REALLOC(0), own.free)
        handler.malloc = MALLOC(lambda context, size: None if self._refused() else own.malloc(context, size))
        handler.calloc = CALLOC(lambda context, n, size: None if self._refused() else own.calloc(context, n, size))
        handler.realloc = REALLOC(lambda context, at, size: None if self._refused() else own.realloc(context, at, size))
        self._kept = own, handler  # as long as an array lives that was made by it
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (POINTER, ctypes.c_char_p, POINTER)
        self._handler = new(ctypes.addressof(handler), NAME, None)

    def _refused(self) -> bool:
        asking = sys._getframe(2)
        caller = asking.f_back or asking
        self.places.append((asking.f_code, asking.f_lineno, caller.f_code, caller.f_lineno))
        return len(self.places) == self.failing

    @contextmanager
    def failing_at(self, n: int) -> Iterator[None]:
        """Within, in this context, the n-th allocation fails; from 1 on, 0 for none."""
        set_handler = _numpys(SET_HANDLER, ctypes.py_object)
        self.places, self.failing = [], n
        before = set_handler(self._handler)
        try:
            yield
        finally:
            set_handler(before)


MEMORY = Memory()
