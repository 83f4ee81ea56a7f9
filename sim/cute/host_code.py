"""CuTe DSL's host code on the simulated device: LLVM links it with this module's functions in the CUDA runtime's place.

A compiled function's host code checks the arguments, packs the kernels' parameters, makes tensor maps itself, and launches. It is
CuTe DSL's own; tensors come to it with their addresses of the simulated device (`sim.triton.memory`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cutlass
import torch
import tvm_ffi
from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine
from cutlass.cute import runtime
from cutlass.cutlass_dsl import CuTeDSL, tvm_ffi_provider
from llvmlite import binding as llvm

from cupyflash.device import Device
from cupyflash.sim.ptx import Module, RawArguments, Stream
from cupyflash.sim.ptx.memory.swizzles import MAP_BYTES
from cupyflash.sim.ptx.parameters import parameter_offsets
from cupyflash.sim.ptx.rawkernel import deliver, settings
from cupyflash.sim.replaced import replaced
from cupyflash.sim.triton.devices import cuda_on_cpu
from cupyflash.sim.triton.memory import Addresses

from .tensor_maps import translated

DIMENSIONS = ctypes.c_uint * 3


class LaunchAttribute(ctypes.Structure):
    """The runtime's `cudaLaunchAttribute`."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfiguration(ctypes.Structure):
    """The runtime's `cudaLaunchConfig_t`."""

    _fields_ = (
        ("grid", DIMENSIONS),
        ("block", DIMENSIONS),
        ("shared", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


CLUSTER, PROGRAMMATIC = 4, 6
"""Numbers of a launch's attributes (`cudaLaunchAttributeID`): the cluster's size, programmatic stream serialization."""
SHARED_OPT_IN, MULTIPROCESSORS, MAJOR, MINOR = 97, 16, 75, 76
"""Numbers of a device's attributes (`cudaDeviceAttr`)."""
DEVICE_CUDA = 2
"""DLPack's number of CUDA's devices."""
TENSOR_AT = 24
"""The offset of the DLTensor in an object of TVM FFI's."""


KERNELS: list[tuple[Module, str]] = []
"""The kernels that host code has asked for: a handle is a place here, from 1, and host code keeps it."""


class CuteDevice:
    """The simulated device as CuTe DSL's host code sees it: the functions of the CUDA runtime that the code calls."""

    active: CuteDevice | None = None

    def __init__(self, device: Device, addresses: Addresses):
        self.device, self.addresses, self.stream = device, addresses, Stream()
        self.known: Sequence[tuple[Module, str]] = ()
        """The kernels of the function that is called."""
        self._error: BaseException | None = None

    def answer(self, function: Callable[..., None], args: Sequence[Any]) -> int:
        """Calls a function of this class for host code: returns 0, or 1 after an exception, which is kept."""
        try:
            function(self, *args)
        except BaseException as error:
            self._error = error
            return 1
        return 0

    def nothing(self, *_: Any) -> None:
        """Does nothing."""

    def give_zero(self, to: int, *_: Any) -> None:
        ctypes.c_int.from_address(to).value = 0

    def load(self, handle: int, load: int, load_on_device: int, *_: Any) -> None:
        """Calls the functions of the host code that load its kernels, once."""
        loaded, library = ctypes.c_size_t.from_address(handle), ctypes.c_size_t()
        if not loaded.value:
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(load)(ctypes.addressof(library))
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(load_on_device)(ctypes.addressof(library), 0)
            loaded.value = 1

    def kernel(self, to: int, library: int | None, name: int) -> None:
        wanted = ctypes.string_at(name).decode()
        KERNELS.append(next(one for one in self.known if one[1] == wanted))
        ctypes.c_size_t.from_address(to).value = len(KERNELS)

    def attribute(self, to: int, number: int | None, *_: Any) -> None:
        major, minor = self.device.compute_capability
        known = {SHARED_OPT_IN: self.device.sram_per_block, MULTIPROCESSORS: self.device.sm_count, MAJOR: major, MINOR: minor}
        if number not in known:
            raise NotImplementedError(f"CuTe DSL's host code asks for attribute {number} of the device, which is not simulated")
        ctypes.c_int.from_address(to).value = known[number]

    def launch(self, configuration: int, kernel: int, values: int) -> None:
        """Runs a launch on the machine, and hands the result on."""
        how = LaunchConfiguration.from_address(configuration)
        module, name = KERNELS[kernel - 1]
        params = module.code(name).params
        offsets, size = parameter_offsets(params)
        data, pointers = bytearray(size), []
        for k, (place, param) in enumerate(zip((ctypes.c_void_p * len(params)).from_address(values), params, strict=True)):
            given = ctypes.string_at(place, param.size)
            if param.size == MAP_BYTES:
                given, address = translated(given)
            else:  # a tensor's pointer comes before its sizes and strides
                address = int.from_bytes(given[:8], "little")
            pointers.append((f"parameter {k}", address))
            data[offsets[param.name] : offsets[param.name] + param.size] = given
        attributes = {one.id: one.value for one in how.attributes[: how.count]}
        cluster = tuple(attributes[CLUSTER][:3]) if CLUSTER in attributes else (1, 1, 1)
        options = settings()
        found = module.launch(
            name,
            tuple(how.grid),
            tuple(how.block),
            RawArguments(bytes(data), self.addresses.allocations(pointers)),
            shared_bytes=how.shared,
            cluster=cluster if math.prod(cluster) > 1 else None,
            seed=options.seed,
            races=bool(options.races),
            suppressions=options.suppressions or (),
            stream=self.stream,
            programmatic=PROGRAMMATIC in attributes and bool(attributes[PROGRAMMATIC][0]),
        )
        deliver(name, found, 1)

    def caller(self, called: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the method by which a compiled function is called, with tensors of PyTorch as `tensor` makes them."""

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.known = function.engine.kernels
            try:
                return called(function, *map(self.tensor, args), **{name: self.tensor(one) for name, one in kwargs.items()})
            except Exception:
                error, self._error = self._error, None
                if error is not None:
                    raise error from None
                raise

        return call

    def tensor(self, value: Any) -> Any:
        """Returns a tensor of PyTorch as one of TVM FFI at its address of the simulated device; anything else as it is."""
        if type(value) in (tuple, list):
            return type(value)(map(self.tensor, value))
        if not isinstance(value, torch.Tensor):
            return value
        with torch._C.DisableTorchFunction():
            made = tvm_ffi.from_dlpack(value.detach())
        at = made.__chandle__() + TENSOR_AT
        ctypes.c_size_t.from_address(at).value = self.addresses.of(value)
        ctypes.c_int.from_address(at + 8).value = DEVICE_CUDA
        return made


FUNCTIONS = {
    "cuda_dialect_init_library_once": (CuteDevice.load, 4),
    "cuda_dialect_unload_library_once": (CuteDevice.nothing, 2),
    "_cudaLibraryLoadData": (CuteDevice.give_zero, 8),
    "_cudaLibraryGetKernel": (CuteDevice.kernel, 3),
    "_cudaLaunchKernelEx": (CuteDevice.launch, 3),
    "_cudaGetDevice": (CuteDevice.give_zero, 1),
    "_cudaSetDevice": (CuteDevice.nothing, 1),
    "_cudaDeviceGetAttribute": (CuteDevice.attribute, 3),
    "_cudaFuncSetAttribute": (CuteDevice.nothing, 3),
    "_cudaKernelSetAttributeForDevice": (CuteDevice.nothing, 4),
    "_cuKernelGetAttribute": (CuteDevice.give_zero, 4),
}
"""The functions that host code calls, with the number of their arguments."""


@cache
def callbacks() -> list[Any]:
    """Gives LLVM the addresses of the functions, once; returns what has to stay alive for that."""

    def made(name: str) -> Any:
        function, count = FUNCTIONS[name]

        def call(*args: Any) -> int:
            return 1 if CuteDevice.active is None else CuteDevice.active.answer(function, args)

        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(call)

    alive = {name: made(name) for name in FUNCTIONS}
    for name, function in alive.items():
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    return list(alive.values())


def engine_of(folder: Path) -> type:
    """Returns the class that takes the place of CuTe DSL's engine of compiled host code; PTX is in `folder`."""

    class HostCode:
        def __init__(self, code: bytes, libraries: Sequence[str], *_: Any):
            self.kernels: list[tuple[Module, str]] = []
            for path in folder.glob("*.ptx"):
                module = Module.from_ptx(path.read_text().rstrip("\0"))
                self.kernels += [(module, name) for name in module.kernels]
                path.unlink()
            for library in libraries:
                llvm.load_library_permanently(library)
            callbacks()
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
            machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()

        def lookup(self, name: str) -> int:
            """Returns the address of a function."""
            return int(self._engine.get_function_address(name))

    return HostCode


def hardware(device: Device) -> type:
    """Returns what takes the place of CuTe DSL's `HardwareInfo`."""
    answers = {
        "__init__": lambda *_: None,
        "get_max_active_clusters": lambda self, size=1, *_: device.sm_count // size,
        "get_device_multiprocessor_count": lambda self: device.sm_count,
        "get_l2_cache_size_in_bytes": lambda self: device.l2_bytes,
    }
    return type("HardwareInfo", (), answers)


@contextmanager
def replaced_runtime(device: Device) -> Iterator[None]:
    """Makes `device` CuTe DSL's device, and PyTorch's "cuda"."""
    addresses = Addresses()
    ours = CuteDevice(device, addresses)
    made, settings_of_dsl = runtime._Tensor.__init__, CuTeDSL._get_dsl().envar
    compiled = tvm_ffi_provider.TVMFFIJitCompiledFunction, tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs

    def make(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        made(self, ours.tensor(value), *args, **kwargs)

    major, minor = device.compute_capability
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="cupyflash-cute-"))
        options = {"_arch": f"sm_{major}{minor}a", "keep_ptx": True, "dump_dir": folder, "lineinfo": True, "enable_tvm_ffi": True}
        changes = [
            *((settings_of_dsl, *one) for one in options.items()),
            (_execution_engine, "BinaryExecutionEngine", engine_of(Path(folder))),
            *((kind, "__call__", ours.caller(kind.__call__)) for kind in compiled),
            (runtime._Tensor, "__init__", make),
            (cutlass.utils, "HardwareInfo", hardware(device)),
            (CuteDevice, "active", ours),
        ]
        stack.enter_context(replaced(changes))
        stack.enter_context(cuda_on_cpu(device, addresses))
        yield
