"""Arrays that stand for a device's: NumPy's, with the two methods by which CuPy's reach the host."""

from __future__ import annotations

from typing import Any

import numpy as np


class DeviceArray(np.ndarray):
    """What stands for `cupy.ndarray`. To a kernel it is always a pointer, of one element too."""

    def get(self, *_: Any, **__: Any) -> np.ndarray:
        """A copy for the host."""
        return np.array(self, subok=False)

    def set(self, arr: Any, *_: Any, **__: Any) -> None:
        self[...] = arr

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(DeviceArray)  # CuPy has arrays of no dimensions where NumPy has scalars
