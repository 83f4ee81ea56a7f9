"""Repeats on the chip what is launched on the PTX machine: the same PTX, grid, arguments and memory, and the same bits after it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import re
import tempfile
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupyflash import Device
from cupyflash.sim.ptx import Launch, Module
from cupyflash.sim.ptx.module import triple
from cupyflash.sim.ptx.parameters import POINTER_BYTES, BoundArguments, bind
from cupyflash.sim.ptx.text.syntax import find_kernel

MACHINE = Module.launch

# A chip's own affairs, in which the machine need not be like it: nothing that holds these is repeated.
UNLIKE = re.compile(
    r"%(clock|globaltimer|warpid|nwarpid|smid|nsmid|gridid|total_smem_size)|activemask|vprintf|\bmalloc\b|nanosleep|__assertfail"
    r"|pending_count"  # arrivals of a warp are one to an H100: each lane is told the same number
)
# Rounded as each sees fit, within bounds: approximate functions, sums in an order that nobody fixes. What the chip makes of these
# is not compared with the machine's, but takes its place: the test that launched holds it to its own bounds.
ROUNDED_OTHERWISE = r"\.approx|div\.full|(atom|red)\.[^;]*add[^;]*\.(f16|bf16|f32|f64)"
# So are sums in tensor cores, except those whose rule is known: "H100" is that of compute capability 9.0.
SUMS = {None: r"|mma\.[^;]*\.(f16|bf16|tf32|f32|f64)", "H100": r"|wmma[^;]*\.(f16|bf16|tf32|f32|f64)|mma\.[^;]*\.(e4m3|e5m2|f64)"}


def tensor_cores() -> str | None:
    """The chip, if the machine can sum as its tensor cores do."""
    return "H100" if Device.current().compute_capability == (9, 0) else None


# The newest PTX ISA that a driver of this CUDA version reads (PTX ISA, "Release Notes").
ISA_OF_CUDA = {
    **{12000 + 10 * minor: isa for minor, isa in enumerate(("8.0", "8.1", "8.2", "8.3", "8.4", "8.5", "8.5", "8.6", "8.7", "8.8"))},
    **{13000 + 10 * minor: f"9.{minor}" for minor in range(10)},
}


def readable(text: str) -> str:
    """PTX of the newest version that the driver reads, for this very chip.

    NVRTC may be newer than the driver, and states its own version although it used nothing new; PTX by hand states an old version
    and target beside opcodes that came later. A target of one architecture's own instructions ("sm_90a") stays.
    """
    import cupy

    newest = ISA_OF_CUDA.get(cupy.cuda.runtime.driverGetVersion() // 10 * 10)
    if newest is not None:
        text = re.sub(r"^(\s*\.version\s+)\d+\.\d+", rf"\g<1>{newest}", text, count=1, flags=re.MULTILINE)
    own = "sm_{}{}".format(*Device.current().compute_capability)
    return re.sub(r"^(\s*\.target\s+)sm_\d+\b", rf"\g<1>{own}", text, count=1, flags=re.MULTILINE)


def runs_here(text: str, shared_bytes: int) -> bool:
    """True if this chip can run it: its architecture, its shared memory, and nothing in which it differs from the machine."""
    device, target = Device.current(), re.search(r"^\s*\.target\s+sm_(\d+)([af]?)", text, re.MULTILINE)
    assert target
    wanted, own = int(target[1]), device.compute_capability[0] * 10 + device.compute_capability[1]
    fits = wanted == own if target[2] else wanted <= own
    return fits and shared_bytes <= device.sram_per_block and not UNLIKE.search(text)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cupyflash-ptx-"))


_functions: weakref.WeakKeyDictionary[Module, dict[str, Any]] = weakref.WeakKeyDictionary()
_loads = itertools.count()


def _function(module: Module, kernel: str) -> Any:
    """A kernel of the module as the chip has it. One with variables is loaded anew: they begin as the machine's do."""
    import cupy

    known = _functions.setdefault(module, {})
    if not known:
        own = f"-{next(_loads)}" if module.program.variables else ""
        path = _folder() / f"{hashlib.sha1(module.text.encode()).hexdigest()}{own}.ptx"
        path.write_text(readable(module.text))
        loaded = cupy.RawModule(path=str(path))
        known |= {name: loaded.get_function(name) for name in module.kernels}
    return known[kernel]


class Memories:
    """The allocations that arrays show, as bytes: two views of one allocation stay two views of one."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._extents = {byte_bounds(_root(array)) for array in arrays}
        self._before = {(low, high): _bytes(low, high).copy() for low, high in self._extents}

    def copied(self) -> dict[tuple[int, int], Any]:
        """Copies, as they were at first, on the GPU."""
        import cupy

        return {extent: cupy.asarray(held if held.size else np.zeros(1, np.uint8)) for extent, held in self._before.items()}

    def give(self, extent: tuple[int, int], held: np.ndarray) -> None:
        """Have the arrays show these bytes."""
        _bytes(*extent)[:] = held[: extent[1] - extent[0]]


def _root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _bytes(low: int, high: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ubyte * (high - low)).from_address(low), np.uint8)


def launch(
    self: Module, kernel: str | None, grid: Any, block: Any, args: Mapping[str, Any] | Sequence[Any], **options: Any
) -> Launch:
    """Launch on the machine, in place of `Module.launch`, and then, if that found no fault, on the chip.

    The chip's results are compared, and left in the arrays for the test that launched to judge.
    """
    name = find_kernel(self.kernels, kernel)
    bound = bind(name, self.code(name).params, args, ())
    memories = Memories([tensor.array for tensor in bound.tensors])
    sums = tensor_cores()
    found = MACHINE(self, kernel, grid, block, args, **{"tensor_cores": sums, **options})
    shared_bytes = options.get("shared_bytes", 0)
    writeable = all(tensor.array.flags.writeable for tensor in bound.tensors)
    if found.findings or not writeable or not runs_here(self.text, shared_bytes):
        return found
    on_chip = memories.copied()
    repeat(self, name, (triple(grid, "grid"), triple(block, "block")), bound, on_chip, shared_bytes)
    expected = [tensor.array.copy() for tensor in bound.tensors]
    for extent, held in on_chip.items():
        memories.give(extent, held.get())
    if not re.search(ROUNDED_OTHERWISE + SUMS[sums], self.text):
        for tensor, machine in zip(bound.tensors, expected, strict=True):
            compare(tensor.array, machine, f"{tensor.path} of {name}")
    repeated.append(name)
    return found


repeated: list[str] = []


def repeat(
    module: Module,
    kernel: str,
    shape: tuple[Any, Any],
    bound: BoundArguments,
    on_chip: Mapping[tuple[int, int], Any],
    shared_bytes: int,
) -> None:
    """Launch on the chip; arrays are where their allocations are, all else is passed as the bytes that the machine passes."""
    function, data, there = _function(module, kernel), bytearray(bound.data), {}
    for tensor in bound.tensors:
        extent = byte_bounds(_root(tensor.array))
        view = on_chip[extent][tensor.array.__array_interface__["data"][0] - extent[0] :]
        data[tensor.at : tensor.at + POINTER_BYTES] = view.data.ptr.to_bytes(POINTER_BYTES, "little")
        there[tensor.at] = view
    arguments = []
    for param in module.code(kernel).params:
        start = bound.offsets[param.name]
        inside = {at - start: view for at, view in there.items() if start <= at < start + param.size}
        if not inside or param.is_array:
            arguments.append(_value(bytes(data[start : start + param.size]), inside))
        else:
            (view,) = inside.values()
            arguments.append(view)
    if shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared_bytes
    function(*shape, tuple(arguments), shared_mem=shared_bytes)


def _value(data: bytes, pointers: Collection[int]) -> Any:
    """The value that CuPy passes as these bytes; a structure's pointers, at these places, are fields of it."""
    if not pointers:
        return np.frombuffer(data, f"V{len(data)}")
    fields, at = [], 0
    while at < len(data):
        fields.append((f"at_{at}", np.uint64 if at in pointers else np.uint8))
        at += POINTER_BYTES if at in pointers else 1
    return np.frombuffer(data, fields)[0]


def compare(chip: np.ndarray, machine: np.ndarray, what: str) -> None:
    """Equal bits; of floating-point arrays any NaN equals any NaN."""
    same = chip == machine
    if chip.dtype.kind == "f":
        bits = f"u{chip.itemsize}"
        same = (chip.view(bits) == machine.view(bits)) | (np.isnan(chip) & np.isnan(machine))
    if not np.all(same):
        at = tuple(int(axis[0]) for axis in np.nonzero(~np.asarray(same)))
        raise AssertionError(
            f"{what}: {np.count_nonzero(~np.asarray(same))} of {chip.size} elements differ, the first at {at}: "
            f"the chip has {chip[at]!r}, the machine {machine[at]!r}"
        )
