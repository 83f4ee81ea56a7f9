"""CuPy's `RawKernel` and `RawModule` on NumPy arrays: compiled as CuPy does, executed by the PTX machine, without a GPU.

from cupyflash.sim.ptx import RawKernel  # instead of: from cupy import RawKernel
kernel = RawKernel(code, "twice")
kernel((8,), (128,), (x, y, np.int32(1000)))

`simulation` sets, for a `with` block, how kernels run and whether findings raise, warn or are kept:

with simulation(arch="sm_90", findings="keep") as launches:
    kernel((8,), (128,), (x, y))
launches[-1].findings
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyflash.launch.compiler import SHARED_WITHOUT_ASKING
from cupyflash.launch.nvrtc import architecture, compile_named, compile_to_cubin
from cupyflash.words import plural

from .module import Launch, Module, Recipe
from .order.history import Stream
from .parameters import POINTER_BYTES, arrays_by_name, ask_about_types, is_maps
from .state.findings import ERROR, FAIL_ON, WARNING, Finding, Suppression, asked, told
from .state.segments import launched, unwritten
from .text.syntax import Array, Variable, base_name, parameters

if TYPE_CHECKING:
    from cupyflash.device import Device
    from cupyflash.sim.clock.timed import Timed


class DeviceArray(np.ndarray):
    """The array type in place of `cupy.ndarray`. A kernel takes it as a pointer, even if it has only one element."""

    def get(self, *_: Any, **__: Any) -> np.ndarray:
        """Returns a copy for the host."""
        return np.array(self, subok=False)

    def set(self, arr: Any, *_: Any, **__: Any) -> None:
        self[...] = arr

    def scatter_add(self, slices: Any, value: Any) -> None:
        """Adds in place, repeated indices too, as `cupyx.scatter_add` asks for."""
        np.add.at(self, slices, value)

    @property
    def _c_contiguous(self) -> bool:
        """CuPy's own name, by which `cupyx.jit` makes the type of an array's parameter."""
        return bool(self.flags.c_contiguous)

    @property
    def _index_32_bits(self) -> bool:
        low, high = np.lib.array_utils.byte_bounds(self)
        return bool(high - low <= 1 << 31)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(DeviceArray)  # CuPy has arrays of no dimensions where NumPy has scalars


POLICIES = ("raise", "warn", "keep")
RAISED = (WARNING, ERROR, "never")


class KernelFault(RuntimeError):
    """Raised when a launch had findings; the arrays hold its results all the same. `launch` is the whole `Launch`."""

    __module__ = "cupyflash.sim.ptx"  # shorter, where a line has little room

    def __init__(self, kernel: str, launch: Launch):
        self.kernel, self.launch = kernel, launch
        super().__init__(fault_text(kernel, launch.findings))

    def __reduce__(self) -> tuple[type, tuple[str, Launch]]:
        return KernelFault, (self.kernel, self.launch)  # from one process to another


class KernelWarning(UserWarning):
    """The warning of anything that is not a fault: `Launch.notes`, suppressed findings, suppressions that let nothing pass."""


class KernelFaultWarning(KernelWarning):
    """The warning in place of `KernelFault`, with the same text."""


def fault_text(kernel: str, findings: tuple[Finding, ...], called: str = "fault") -> str:
    """Returns a launch's findings, a line each, behind one with the place of the first: that is all that pytest's summary shows."""
    (file, line), count = findings[0].places[0], plural(len(findings), called)
    return "\n  ".join([f"{findings[0].kind} at {Path(file).name}:{line} (kernel {kernel} has {count}):", *map(str, findings)])


@dataclass
class SettingsFrame:
    """The settings of one `simulation`, None where the block around decides, and the launches made in it."""

    findings: str | None = None
    arch: str | None = None
    seed: int | None = None
    races: bool | None = None
    suppressions: tuple[Suppression, ...] | None = None
    fail_on: str | None = None
    launches: list[Launch] = field(default_factory=list)


_DEFAULT = SettingsFrame("raise", "compute_80", None, True, (), WARNING)
_frames: ContextVar[tuple[SettingsFrame, ...]] = ContextVar("_frames", default=())


@contextmanager
def simulation(
    *,
    findings: str | None = None,
    arch: str | None = None,
    seed: int | None = None,
    races: bool | None = None,
    suppressions: str | os.PathLike[str] | Sequence[Suppression] | None = None,
    fail_on: str | None = None,
) -> Iterator[list[Launch]]:
    """Sets how `RawKernel` and `RawModule` run in the `with` block; gives the list of the launches made there, in order.

    findings: "raise" (a `KernelFault`, the default), "warn" (a `KernelFaultWarning`) or "keep" (only in the launches).
    arch: the architecture to compile for, "sm_90", "90a", "8.6"; the default is compute_80. seed: None runs warps in lock step
    where they agree, a number in a random order. races: True looks for data races. suppressions: as in `Module.launch`. fail_on:
    the least severity that raises, "warning" (the default), "error" or "never"; lesser findings warn. An omitted setting is that of
    the block around.
    A block with `findings` keeps its launches from the lists of the blocks around it.
    Settings are those of the thread (of the `contextvars` context). Raises ValueError for wrong settings.
    """
    if findings is not None and findings not in POLICIES:
        raise ValueError(f"findings must be one of {', '.join(map(repr, POLICIES))}, got {findings!r}")
    if fail_on is not None and fail_on not in RAISED:
        raise ValueError(f"fail_on must be one of {', '.join(map(repr, RAISED))}, got {fail_on!r}")
    allowed = None if suppressions is None else asked(suppressions)
    frame = SettingsFrame(findings, None if arch is None else architecture(str(arch)), seed, races, allowed, fail_on)
    token = _frames.set((*_frames.get(), frame))
    try:
        yield frame.launches
    finally:
        _frames.reset(token)


def settings() -> SettingsFrame:
    """Returns the settings in force: for each one the innermost block's that sets it, else the default."""
    frames = (_DEFAULT, *_frames.get())

    def last(name: str) -> object:
        return next((value for frame in reversed(frames) if (value := getattr(frame, name)) is not None), None)

    return SettingsFrame(*(last(name) for name in ("findings", "arch", "seed", "races", "suppressions", "fail_on")))  # type: ignore[arg-type]


def deliver(kernel: str, launch: Launch, stacklevel: int) -> None:
    """Adds a launch to the lists of the blocks around, and raises or warns as they say. `stacklevel` as for `warnings.warn`."""
    policy = _DEFAULT.findings
    for frame in reversed(_frames.get()):
        frame.launches.append(launch)
        if frame.findings is not None:
            policy = frame.findings
            break
    if launch.notes and policy != "keep":
        warnings.warn(fault_text(kernel, launch.notes, "note"), KernelWarning, stacklevel + 1)
    if policy != "keep":
        for line in told(launch.suppressed, launch.unmatched):
            warnings.warn(f"kernel {kernel}: {line}", KernelWarning, stacklevel + 1)
    fatal = FAIL_ON[settings().fail_on or WARNING]
    if policy == "raise" and any(one.severity in fatal for one in launch.findings):
        raise KernelFault(kernel, launch)
    if launch.findings and policy != "keep":
        warnings.warn(fault_text(kernel, launch.findings), KernelFaultWarning, stacklevel + 1)


OPT_IN = {75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Most KB of shared memory of a block, by compute capability (the same guide, "Technical Specifications")."""


@dataclass(frozen=True)
class SourceText:
    """Source code to compile, or a file of PTX to read. `place` is (file, line) of the first line of `code`."""

    code: str | None
    path: str | None
    options: tuple[str, ...]
    backend: str
    translate_cucomplex: bool
    jitify: bool
    expressions: tuple[str, ...]
    place: tuple[str, int]

    @property
    def text(self) -> str:
        """Returns the text for NVRTC: the code, its lines numbered as in the file that contains it."""
        code, headers = self.code or "", ""
        if self.translate_cucomplex:  # CuPy's own types of complex numbers under the names of cuComplex.h
            bridge = "#include <cupy/cuComplex_bridge.h>"
            headers = "#include <cupy/complex.cuh>\n#include <cupy/math_constants.h>\n"
            code = re.sub(r"^\s*#\s*include\s*<\s*cuComplex\.h\s*>", bridge, code, flags=re.MULTILINE)
        file, line = self.place
        return f'{headers}#line {line} "{file}"\n{code}'

    def compiler_options(self, arch: str) -> tuple[str, ...]:
        """Returns CuPy's options: its headers, the caller's options, subnormals flushed, unmarked functions made the device's."""
        given = any(option.startswith(("-arch", "--gpu-architecture")) for option in self.options)
        bundled, own = cupy_headers()
        fixed = ("-ftz=true", "--device-as-default-execution-space", *(() if given else (f"-arch={arch}",)))
        return (*(f"-I{path}" for path in bundled), *self.options, *(f"-I{path}" for path in own), *fixed)

    def load(self) -> Loaded:
        """Returns the module for the current architecture; equal requests share one, as in CuPy."""
        return _load(self, settings().arch or "")


@dataclass(frozen=True, eq=False)
class Loaded:
    """A module with the PTX names of its name expressions, and the compiler's log."""

    source: SourceText
    arch: str
    module: Module
    lowered: Mapping[str, str]
    log: str

    @cached_property
    def figures(self) -> dict[str, dict[str, int]]:
        """Returns, by kernel, ptxas' registers, stack, stores and loads in machine code for the PTX's own architecture."""
        from cupyflash.launch.resources import parse_account

        if self.source.code is None:
            raise AttributeError("registers and local memory are not known of a kernel that was read from PTX: ptxas makes them")
        kept = [option for option in self.source.compiler_options("") if not option.startswith(("-arch", "--gpu-architecture"))]
        options = (*kept, f"-arch={self.module.program.target.partition(',')[0]}")
        _, log = compile_to_cubin(self.source.text, options, self.source.place[0], self.source.expressions)
        return {name: figures for name, (figures, _) in parse_account(log).items()}


@lru_cache(maxsize=128)
def _load(source: SourceText, arch: str) -> Loaded:
    if source.code is None:
        assert source.path is not None
        data = Path(source.path).read_bytes()
        if data.startswith((b"\x7fELF", b"\x50\xed\x55\xba")):
            raise ValueError(f"{source.path} is machine code: this machine executes PTX (nvcc -ptx, nvcc --keep)")
        return Loaded(source, arch, Module.from_ptx(data.decode()), {}, "")
    if source.backend != "nvrtc":
        raise ValueError(f"backend must be 'nvrtc', which compiles without a CUDA toolkit, got {source.backend!r}")
    if source.jitify:
        raise ValueError("jitify must be None or False: headers of the host's C++ library are not taken apart here")
    made = compile_named(source.text, source.compiler_options(arch), source.place[0], source.expressions)
    file, line = source.place
    known = {file: source.code} if line == 1 else {}  # else it stands in a Python file, which is there to be read
    module = Module.from_ptx(made.text, sources=known)
    module.recipe = Recipe(source.text, source.compiler_options(arch), source.place[0], source.expressions)
    return Loaded(source, arch, module, made.lowered, made.log)


def cupy_headers() -> tuple[list[str], list[str]]:
    """Returns the existing folders for -I that CuPy puts before the caller's (CCCL's copy) and after them (its own)."""
    spec = find_spec("cupy")
    root = os.path.join(os.path.dirname(spec.origin), "_core", "include") if spec and spec.origin else ""
    bundled = [os.path.join(root, "cupy", "_cccl", part) for part in ("cub", "thrust", "libcudacxx")]
    return [path for path in bundled if os.path.isdir(path)], [path for path in [root] if os.path.isdir(path)]


def place_of(code: str, name: str) -> tuple[str, int]:
    """Returns (file, line) of the first line of `code` in the Python file that makes a kernel of it."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith(f"{__package__}.") and frame.f_back:
        frame = frame.f_back
    return place_in(frame.f_code.co_filename, code, name)


def place_in(file: str, code: str, name: str) -> tuple[str, int]:
    """Returns (file, line) of `code` in a file that contains it once, literally; else line 1 of a file of the kernel's name."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    found = text.find(code) if code.strip() else -1
    if found < 0 or text.find(code, found + 1) >= 0:
        return f"{re.sub('[^0-9A-Za-z_]+', '_', name).strip('_') or 'kernel'}.cu", 1
    return file.replace("\\", "/"), text.count("\n", 0, found) + 1


def _checked(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    return value


def issue(
    module: Module,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    given: Mapping[str, Any],
    *,
    shared_mem: int = 0,
    stream: Any = None,
) -> None:
    """Launches a kernel of a module as the settings in force say, and delivers the launch. Fresh memory is unwritten."""
    holds = settings()
    how: dict[str, Any] = {"seed": holds.seed, "races": bool(holds.races), "suppressions": holds.suppressions or ()}
    how["stream"] = stream if isinstance(stream, Stream) else None
    arrays = arrays_by_name(given)
    names = {id(array): name for name, array in arrays.items()}
    masks = {each: mask for each in names.values() if (mask := unwritten(arrays[each])) is not None}
    launch = module.launch(name, grid, block, given, shared_bytes=shared_mem, unwritten=masks, **how)
    for each in masks:
        launched(arrays[each], launch.unwritten.get(each))
    deliver(name, launch, 3)


class RawKernel:
    """`cupy.RawKernel` on the PTX machine: the kernel `name` (extern "C", or its name in the PTX) of CUDA C, compiled at first use.

    code, name, options, translate_cucomplex: as in CuPy. backend must be 'nvrtc', jitify None or False; both are checked when
    it is compiled. enable_cooperative_groups is accepted, and every launch may synchronise its grid.
    The compiler's options are CuPy's, `-ftz=true` among them; `simulation` sets the architecture and whether findings raise.
    """

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        *,
        enable_cooperative_groups: bool = False,
        jitify: bool | None = None,
    ):
        _checked("code", code, str), _checked("name", name, str), _checked("options", options, tuple)
        place = place_of(code, name)
        self._set(SourceText(code, None, options, backend, bool(translate_cucomplex), bool(jitify), (), place), name)
        self.enable_cooperative_groups = enable_cooperative_groups

    def _set(self, source: SourceText, name: str) -> None:
        self._source = source
        self.name = self.__name__ = name
        self.code, self.file_path, self.options, self.backend = source.code, source.path, source.options, source.backend
        self._dynamic: int | None = None
        self.preferred_shared_memory_carveout = -1
        """Accepted without effect: there is no cache."""

    def __repr__(self) -> str:
        return f"<RawKernel {self.name} on the PTX machine>"

    def compile(self, log_stream: Any = None) -> None:
        """Compiles now; writes the compiler's log to `log_stream`. Raises `cupyflash.launch.nvrtc.CompileError`."""
        loaded, _ = self._loaded()
        if log_stream is not None:
            log_stream.write(loaded.log)

    def _loaded(self) -> tuple[Loaded, str]:
        loaded = self._source.load()
        kernels = loaded.module.kernels
        if self.name not in kernels:
            alike = [kernel for kernel in kernels if base_name(kernel) == self.name]
            hint = f'; its name in the PTX is {alike[0]}: declare it extern "C", or use name_expressions' if alike else ""
            raise ValueError(f"kernel {self.name!r} is not in this module, which has {', '.join(kernels) or 'none'}{hint}")
        return loaded, self.name

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0, stream: Any = None
    ) -> None:
        """Launches the kernel and waits for it.

        grid, block: tuples of up to three lengths; a zero counts as one, as in CuPy. args: in the order of the parameters. A NumPy
        array is a pointer to its first element (the kernel must know its strides), None a null pointer. Other values have
        CuPy's types: Python's int is int64 (a shorter parameter takes the low bytes), its float float64, its bool one byte.
        A structure is a NumPy structured scalar; fields of objects in it are pointers, as in a mapping.
        shared_mem: bytes of dynamic shared memory. stream: a `ptx.Stream` orders the launch among others; any other has no effect.
        Raises TypeError where CuPy would pass bytes that are not the parameter's, or an array of another type than its pointer's
        (view it as unsigned integers to pass it as it is), ValueError for a launch that CUDA refuses, and
        `KernelFault` for findings, unless a `simulation` says otherwise.
        """
        loaded, name = self._loaded()
        grid, block, given = self._given(grid, block, args, shared_mem)
        issue(loaded.module, name, grid, block, given, shared_mem=shared_mem, stream=stream)

    def clock(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        device: Device,
        *,
        shared_mem: int = 0,
        mhz: float | None = None,
        cold: bool = False,
    ) -> Timed:
        """Predicts the time of a launch on a device, as `Module.clock` does; the rest as in a call. Nothing is launched."""
        loaded, name = self._loaded()
        grid, block, given = self._given(grid, block, args, shared_mem)
        return loaded.module.clock(name, grid, block, given, device, shared_bytes=shared_mem, mhz=mhz, cold=cold)

    def _given(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]:
        """Returns grid, block and arguments of a launch, checked; the arguments by the names of the source."""
        _checked("grid", grid, tuple), _checked("block", block, tuple)
        loaded, name = self._loaded()
        code = loaded.module.code(name)
        allowed = self.max_dynamic_shared_size_bytes
        if not 0 <= shared_mem <= allowed:
            ask = "set max_dynamic_shared_size_bytes for more" if self._dynamic is None else "max_dynamic_shared_size_bytes"
            raise ValueError(f"{self.name}: shared_mem must be from 0 to {allowed} bytes ({ask}), got {shared_mem}")
        if len(args) != len(code.params):
            raise TypeError(f"{self.name} takes {plural(len(code.params), 'argument')}, got {len(args)}")
        ask_about_types(self.code or "", name, args)
        names = [each for _, each in parameters(self.code or "", name, len(code.params))]
        zipped = zip(names, args, code.params, strict=True)
        given = {each: argument(self.name, each, value, param) for each, value, param in zipped}
        whole = [tuple(max(1, int(length)) for length in lengths) for lengths in (grid, block)]
        return whole[0], whole[1], given

    @property
    def shared_size_bytes(self) -> int:
        """Bytes of static shared memory of a block."""
        loaded, name = self._loaded()
        return int(loaded.module.code(name).shared.size)

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Most bytes of `shared_mem`; settable up to the architecture's bytes for a block, less the static ones."""
        return SHARED_WITHOUT_ASKING - self.shared_size_bytes if self._dynamic is None else self._dynamic

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        most = OPT_IN.get(self.ptx_version, max(OPT_IN.values())) * 1024 - self.shared_size_bytes
        if not 0 <= size <= most:
            raise ValueError(f"max_dynamic_shared_size_bytes must be from 0 to {most} on sm_{self.ptx_version}, got {size}")
        self._dynamic = int(size)

    @property
    def ptx_version(self) -> int:
        """10 * major + minor of the architecture of the compilation."""
        found = re.match(r"sm_(\d+)", self._loaded()[0].module.program.target)
        return int(found[1]) if found else -1

    binary_version = ptx_version

    @property
    def num_regs(self) -> int:
        """Registers of a thread, by NVRTC's ptxas. Raises AttributeError for a kernel read from PTX."""
        loaded, name = self._loaded()
        return loaded.figures[name]["registers"]

    @property
    def local_size_bytes(self) -> int:
        """Bytes of local memory of a thread (its stack), by NVRTC's ptxas. Raises AttributeError for a kernel read from PTX."""
        loaded, name = self._loaded()
        return loaded.figures[name]["stack"]

    @property
    def const_size_bytes(self) -> int:
        """Bytes of the module's constant memory."""
        return sum(v.size for v in self._loaded()[0].module.program.variables.values() if v.space == "const")

    max_threads_per_block = 1024
    """Most threads of a block on every architecture; on a device a kernel of many registers may be limited to fewer."""

    cache_mode_ca = 0

    @property
    def attributes(self) -> dict[str, int]:
        """All attributes by CuPy's names, -1 for unknown values."""
        names = ("max_threads_per_block", "shared_size_bytes", "const_size_bytes", "local_size_bytes", "num_regs", "ptx_version")
        more = ("binary_version", "cache_mode_ca", "max_dynamic_shared_size_bytes", "preferred_shared_memory_carveout")
        return {name: getattr(self, name, -1) for name in (*names, *more)}


class RawModule:
    """`cupy.RawModule` on the PTX machine: kernels and variables of one source (`code`) or of one file of PTX (`path`).

    name_expressions: C++ names ("twice<float>") of templates' kernels, for `get_function`. The rest as `RawKernel`.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool | None = None,
    ):
        if (code is None) == (path is None):
            raise TypeError("give exactly one of code and path")
        _checked("options", options, tuple)
        if path is not None and name_expressions is not None:
            raise ValueError("name_expressions must be None where path is given: they are looked up in CUDA C++")
        if isinstance(name_expressions, str):
            raise TypeError(f"name_expressions must be a sequence of texts, got {name_expressions!r}")
        place = ("", 1) if code is None else place_of(_checked("code", code, str), "module")
        file = None if path is None else os.fspath(path)
        complex_, expressions = bool(translate_cucomplex), tuple(name_expressions or ())
        self._source = SourceText(code, file, options, backend, complex_, bool(jitify), expressions, place)
        self.enable_cooperative_groups = enable_cooperative_groups
        self.code, self.file_path, self.options, self.backend = code, file, options, backend
        self.name_expressions = expressions or None

    def compile(self, log_stream: Any = None) -> None:
        """Compiles now; writes the compiler's log to `log_stream`. Raises `cupyflash.launch.nvrtc.CompileError`."""
        log = self._source.load().log
        if log_stream is not None:
            log_stream.write(log)

    @property
    def module(self) -> Module:
        """The machine's `Module`, compiled for the current architecture."""
        return self._source.load().module

    def get_function(self, name: str) -> RawKernel:
        """Returns the kernel of that name, in the PTX or among the name expressions. Raises ValueError if there is none."""
        kernel = RawKernel.__new__(RawKernel)
        kernel._set(self._source, self._source.load().lowered.get(name, name))
        kernel.enable_cooperative_groups = self.enable_cooperative_groups
        kernel.compile()
        return kernel

    def get_global(self, name: str) -> Array:
        """Returns the bytes of a variable in global or constant memory, a buffer for `np.ndarray(shape, dtype, buffer)`.

        Writing to them sets the variable. The name is that in the PTX. Raises ValueError if there is none.
        """
        module = self.module
        try:
            return module.variable(name)
        except KeyError:
            known = [v.name for v in module.program.variables.values() if v.space in ("global", "const")]
            raise ValueError(f"variable {name!r} is not in this module, which has {', '.join(known) or 'none'}") from None


def argument(kernel: str, name: str, value: Any, param: Variable) -> Any:
    """Returns an argument as the machine takes it. Raises TypeError where the bytes that CuPy passes are not the parameter's."""
    where = f"{kernel}: argument {name!r}"
    if hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"{where} is on a GPU; this machine runs on NumPy arrays")
    pointer = not param.is_array and param.size == POINTER_BYTES and param.type.kind != "f"
    if isinstance(value, np.ndarray) and value.size == 1 and not pointer and not isinstance(value, DeviceArray):
        value = value.reshape(())[()]  # one value, as CuPy passes an array of one element of the host's
    if value is None or is_maps(value) or isinstance(value, (np.ndarray, Mapping, np.void)):
        return value
    if not isinstance(value, (bool, int, float, complex, np.generic)):
        raise TypeError(f"{where} must be a NumPy array or scalar, a Python number or None, got {value!r}")
    scalar = np.asarray(value)[()]
    passed = f"CuPy passes {value!r} as {scalar.dtype}, {plural(scalar.nbytes, 'byte')}"
    if param.is_array:
        if scalar.nbytes != param.size:
            raise TypeError(f"{where}: {passed}; the parameter is a structure of {plural(param.size, 'byte')}")
        return scalar
    floats, wanted = scalar.dtype.kind not in "biu", param.type.kind == "f"
    if floats != wanted or (floats and scalar.nbytes != param.size) or scalar.nbytes < param.size:
        kind = f"float{8 * param.size}" if wanted else f"int{8 * param.size}"
        whole = "a floating-point number" if wanted else "an integer"
        raise TypeError(f"{where}: {passed}; the parameter is {whole} of {plural(param.size, 'byte')}: pass np.{kind}(...)")
    return scalar
