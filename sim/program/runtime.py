"""The functions of the CUDA runtime, by their names, on the simulated device.

A method that has the name of a runtime function (one underscore less for those that only the compiler's code calls) is that
function; its parameters are the first words of the call, as many as it reads, of which a number
shorter than 64 bits has only its low bits set for sure. It returns nothing for cudaSuccess, raises `CudaError`, or returns the
word that the function returns. All other functions that a program has imported return cudaErrorNotSupported, and the report
names them.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from functools import cached_property

from cupyflash.device import Device
from cupyflash.sim.program import blas
from cupyflash.sim.program.channel import ARGUMENTS, Channel, RuntimeCall
from cupyflash.sim.program.devices import DeviceCalls
from cupyflash.sim.program.errors import CudaError, ErrorCode, name_of, text_of
from cupyflash.sim.program.graphs import GraphCalls
from cupyflash.sim.program.lines import Call
from cupyflash.sim.program.streams import LEGACY, PER_THREAD, Settings

TOUCHED = 2
"""The number of a call that no function makes but an access to closed memory."""
FIRST_NUMBER = 3
"""The number of the first function in a call: 0 and 1 answer orders (stubs.c)."""


CONCURRENT = re.compile(
    r"cudaStream(Create|BeginCapture)|cudaGraph|cudaLaunchKernelExC|.*_pt[sd][sz]$|cuda(MallocHost|HostAlloc|MallocManaged)"
    r"|__cudaRegisterManagedVar"
)
"""Functions without which all of a program's work is in one stream, and the host sees none of its memory."""

PER_THREAD_NAME = re.compile("_pt[sd][sz]$")
"""The end of the names of functions whose stream 0 is the calling thread's own (nvcc --default-stream per-thread)."""


class Runtime(GraphCalls, DeviceCalls, blas.BlasCalls):
    """One program's runtime. `names` are the functions that its stubs number, in this order, of which it `imported` some."""

    def __init__(self, channel: Channel, device: Device, version: int, names: list[str], imported: set[str], settings: Settings):
        super().__init__(channel, device, version, settings)
        self.names = names
        self.concurrent = any(map(CONCURRENT.match, imported))
        self.last: dict[int, ErrorCode] = {}
        self.missing: Counter[str] = Counter()
        self.failed: Counter[tuple[str, str]] = Counter()
        channel.serve = self.serve

    @cached_property
    def functions(self) -> list[tuple[str, Callable[..., int | None] | None, int]]:
        """Returns each stub's name, method and number of parameters, in order."""
        methods = [(name, getattr(self, PER_THREAD_NAME.sub("", name).replace("__", "_"), None)) for name in self.names]
        return [(name, method, parameter_count(method) if method else 0) for name, method in methods]

    def serve(self, call: RuntimeCall) -> int:
        """Returns the result of a call as a word."""
        if call.function == TOUCHED:
            return self.touched(call)
        name, method, count = self.functions[call.function - FIRST_NUMBER]
        self.thread, self.default = call.thread, PER_THREAD if PER_THREAD_NAME.search(name) else LEGACY
        self.call = Call(PER_THREAD_NAME.sub("", name), call.callers)
        try:
            if method is None:
                self.missing[name] += 1
                raise CudaError(ErrorCode.NOT_SUPPORTED)
            result = method(*call.words[:count]) or 0
            self.guard.waited()
            return result
        except CudaError as error:
            if name.startswith("cublas"):
                self.failed[name, f"CUBLAS_STATUS_{blas.status(error).name}{f': {error.why}' if error.why else ''}"] += 1
                return int(blas.status(error))
            if error.code != ErrorCode.NOT_READY:
                self.last[call.thread] = error.code
                self.failed[name, str(error)] += 1
            return int(error.code)

    def touched(self, call: RuntimeCall) -> int:
        """Answers an access of the host to memory that was closed: 1 if it may go on, else the fault is the program's own."""
        address, write = call.words[:2]
        self.found(self.guard.touched(address, bool(write), Call("host", call.callers), self.lines))
        return int(self.guard.open(address))

    def cudaGetLastError(self) -> int:
        return self.last.pop(self.thread, self.sticky)

    def cudaPeekAtLastError(self) -> int:
        return self.last.get(self.thread, self.sticky)

    def cudaGetErrorString(self, error: int) -> int:
        return self.kept(text_of(error & 0xFFFFFFFF))

    def cudaGetErrorName(self, error: int) -> int:
        return self.kept(name_of(error & 0xFFFFFFFF))


def parameter_count(method: Callable[..., int | None]) -> int:
    """Returns the number of words that a method takes: all of them if it takes any number."""
    kinds = [each.kind for each in inspect.signature(method).parameters.values()]
    return ARGUMENTS if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds)


def function_names() -> list[str]:
    """Returns the names of the functions that are here, of the runtime and of cuBLAS."""
    return sorted(name.replace("_cuda", "__cuda") for name in dir(Runtime) if name.startswith(("cuda", "_cuda", "cublas")))
