"""The module `cupy` without a GPU: array functions are NumPy's, kernels run on the PTX machine.

with simulated_cupy():
    x = cupy.arange(1000, dtype=cupy.float32)
    cupy.RawKernel(code, "twice")((8,), (128,), (x, x.size))

Of `ElementwiseKernel`, `ReductionKernel` and `cupyx.jit.rawkernel` CuPy writes the CUDA C. A parameter that is an array is CuPy's
`CArray` by value (pointer, size, shape, strides), the loop's indices are a `CIndexer`. Types, broadcasting, blocks and threads are
CuPy's; a reduction is CuPy's own kernel, not CUB's.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from cupyflash.launch import first_use
from cupyflash.sim.replaced import replaced

from .rawkernel import DeviceArray, RawKernel, RawModule, SourceText, issue, place_in, place_of, settings
from .state.segments import empty, empty_like
from .text.syntax import Array, parameters

NDARRAY, INDEXER, SCALAR = 1, 2, 3
"""CuPy's kinds of arguments (`_ArgKind`)."""
MOST_BLOCKS = (1 << 31) - 1


def headers() -> str:
    """Returns the lines that CuPy puts before each kernel that it writes."""
    from cupy._core import core

    return "".join(f"#include <{name}>\n" for name in core._cupy_header_list)


def carray(name: str, array: Array) -> dict[str, Any]:
    """Returns an array as the fields of a `CArray`; the pointer has the parameter's name."""
    lengths = {"shape": array.shape, "strides": array.strides} if array.ndim else {}
    return {name: array, "size": np.int64(array.size), **{key: [np.int64(each) for each in of] for key, of in lengths.items()}}


def cindexer(shape: Sequence[int]) -> dict[str, Any]:
    """Returns the fields of a `CIndexer`."""
    lengths = {"shape": shape, "index": [0] * len(shape)} if shape else {}
    return {"size": np.int64(math.prod(shape)), **{key: [np.int64(each) for each in of] for key, of in lengths.items()}}


class KernelArguments:
    """The arguments of one launch of a kernel that CuPy writes: each as CuPy describes it, and as the machine takes it."""

    def __init__(self) -> None:
        self.infos: list[Any] = []
        self.given: dict[str, Any] = {}

    def add(self, parameter: Any, value: Any) -> None:
        """Adds an argument: an array, a NumPy scalar, or a shape for an indexer."""
        from cupy._core import _kernel, core

        if isinstance(value, np.ndarray):
            info = NDARRAY, core.ndarray, value.dtype, value.ndim, value.flags.c_contiguous, value.view(DeviceArray)._index_32_bits
            name = parameter.name if parameter.raw else f"_raw_{parameter.name}"
            self.given[name] = carray(parameter.name, value)
        elif isinstance(value, tuple):
            info = INDEXER, object, None, len(value), True, math.prod(value) <= 1 << 31
            self.given[parameter.name] = cindexer(value)
        else:
            info = SCALAR, object, value.dtype, 0, True, True
            self.given[parameter.name] = value
        self.infos.append(_kernel._ArgInfo(*info))

    def launch(self, name: str, code: str, options: tuple[str, ...], threads: int, block: int) -> None:
        """Launches a kernel of that CUDA C on so many threads, as CuPy's `linear_launch` does."""
        source = SourceText(headers() + code, None, options, "nvrtc", False, False, (), (f"{name}.cu", 1))
        grid = min(MOST_BLOCKS, -(-threads // block))
        issue(source.load().module, name, (grid,), (min(block, threads),), self.given)


def of_arrays(values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the types of the arrays among values, None for scalars, as CuPy decides a kernel's types by them."""
    return tuple(value.dtype if isinstance(value, np.ndarray) else None for value in values)


def checked(values: Sequence[Any], name: str) -> list[Any]:
    """Returns the arguments of a call. Raises TypeError for anything but arrays and numbers."""
    for value in values:
        if hasattr(value, "__cuda_array_interface__"):
            raise TypeError(f"{name}: an argument is on a GPU; this machine runs on NumPy arrays")
        if not isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
            raise TypeError(f"{name} takes arrays and numbers, got {type(value).__name__}")
    return list(values)


def cast(values: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Returns the values with numbers as NumPy scalars of their parameters' types."""
    pairs = zip(values, types, strict=True)
    return [value if isinstance(value, np.ndarray) else np.asarray(value).astype(kind)[()] for value, kind in pairs]


def spread(values: list[Any], parameters: Sequence[Any], size: int | None) -> tuple[list[Any], tuple[int, ...]]:
    """Returns the values with their arrays broadcast, `raw` ones as they are, and the common shape."""
    chosen = [k for k, value in enumerate(values) if isinstance(value, np.ndarray) and not parameters[k].raw]
    if size is not None:
        if chosen:
            raise ValueError("Specified 'size' can be used only if all of the ndarray are 'raw'.")
        return values, (int(size),)
    if not chosen:
        raise ValueError("Loop size is undecided.")
    shape = np.broadcast_shapes(*(values[k].shape for k in chosen))
    wide = [np.broadcast_to(value, shape) if k in chosen and value.shape != shape else value for k, value in enumerate(values)]
    return wide, shape


def allocated(given: list[Any], parameters: Sequence[Any], types: Sequence[Any], shape: tuple[int, ...], sized: bool) -> list[Any]:
    """Returns the outputs: the given ones, checked, or fresh arrays."""
    if not given:
        if any(parameter.raw for parameter in parameters) and not sized:
            raise ValueError("Output array size is Undecided")
        return [empty(shape, kind).view(DeviceArray) for kind in types]
    for parameter, value in zip(parameters, given, strict=True):
        if not isinstance(value, np.ndarray):
            raise TypeError("Output arguments type must be cupy.ndarray")
        if not parameter.raw and value.shape != shape:
            raise ValueError(f"Out shape is mismatched: {parameter.name} has {value.shape}, the result {shape}")
    return given


def flattened(values: list[Any], parameters: Sequence[Any], shape: tuple[int, ...]) -> tuple[list[Any], tuple[int, ...]]:
    """Returns arrays and shape as one axis if all of them are contiguous, as CuPy reduces axes; else as they are."""
    chosen = [k for k, value in enumerate(values) if isinstance(value, np.ndarray) and not parameters[k].raw]
    if len(shape) < 2 or not chosen or not all(values[k].flags.c_contiguous for k in chosen):
        return values, shape
    return [value.reshape(-1) if k in chosen else value for k, value in enumerate(values)], (math.prod(shape),)


class WrittenKernel:
    """A kernel that CuPy writes around expressions: made as CuPy makes it, or of one that CuPy has made (`real`).

    Its attributes are CuPy's. Raises what CuPy raises for wrong parameters.
    """

    module: str
    """CuPy's module of its class of this name."""

    def __init__(self, *args: Any, real: Any = None, **kwargs: Any):
        made = getattr(import_module(self.module), type(self).__name__)
        self._real = made(*args, **kwargs) if real is None else real
        self.__name__ = self._real.name
        self._place = place_of(getattr(self._real, "operation", ""), self.__name__)
        """The file and line of the expression that each thread computes, if there is only one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class ElementwiseKernel(WrittenKernel):
    """`cupy.ElementwiseKernel` on the PTX machine: the parameters are CuPy's, `size` and `block_size` of a call too.

    Raises TypeError for arguments that are neither arrays nor numbers.
    """

    module = "cupy._core._kernel"

    def __call__(self, *args: Any, size: int | None = None, stream: Any = None, block_size: int = 128) -> Any:
        from cupy._core import _kernel

        real = self._real
        if block_size <= 0:
            raise ValueError("block_size must be greater than zero")
        if len(args) not in (real.nin, real.nargs):
            counts = f"either {real.nin} or {real.nargs} (with outputs)"
            raise TypeError(f"Wrong number of arguments for {real.name!r}. It must be {counts}, but given {len(args)}.")
        sized = size is not None and size != -1
        values, shape = spread(checked(args, real.name), real.params, size if sized else None)
        given, outs = values[: real.nin], list(args[real.nin :])
        kinds = of_arrays(given), of_arrays(outs)
        in_types, out_types, types = _kernel._decide_params_type(real.in_params, real.out_params, *kinds)
        outs = allocated(outs, real.out_params, out_types, shape, sized)
        result = None if real.no_return else outs[0] if real.nout == 1 and not real.return_tuple else tuple(outs)
        if 0 in shape:
            return result
        every = cast(given, in_types) + outs
        if real.reduce_dims:
            every, shape = flattened(every, real.params, shape)
        arguments = KernelArguments()
        for parameter, value in zip(real.params, [*every, shape], strict=True):
            arguments.add(parameter, value)
        line = f'\n#line {self._place[1]} "{self._place[0]}"\n' if self._place[0].endswith(".py") else ""
        parts = {name: real.kwargs[name] for name in ("loop_prep", "after_loop") if name in real.kwargs}
        text = line + real.operation
        code = _kernel._get_elementwise_kernel_code(
            tuple(arguments.infos), types, real.params, text, real.name, real.preamble, **parts
        )
        arguments.launch(real.name, code, tuple(real.kwargs.get("options", ())), math.prod(shape), block_size)
        return result


class ReductionKernel(WrittenKernel):
    """`cupy.ReductionKernel` on the PTX machine: the parameters are CuPy's, `out`, `axis` and `keepdims` of a call too.

    Raises TypeError for arguments that are neither arrays nor numbers.
    """

    module = "cupy._core._reduction"

    def __call__(self, *args: Any, out: Any = None, axis: Any = None, keepdims: bool = False, stream: Any = None) -> Any:
        from cupy._core import _reduction

        real = self._real
        if len(args) not in (real.nin, real.nargs):
            raise TypeError(f"Wrong number of arguments for {real.name}")
        outs = list(args[real.nin :])
        if out is not None:
            if outs:
                raise ValueError("cannot specify 'out' as both a positional and keyword argument")
            if real.nout != 1:
                raise NotImplementedError("out= is for kernels with one output")
            outs = [out]
        given, shape = spread(checked(args[: real.nin], real.name), real.in_params, None)
        kinds = [tuple(kind and kind.type for kind in of_arrays(values)) for values in (given, outs)]
        in_types, out_types, types = _reduction._decide_params_type(real.in_params, real.out_params, *kinds)
        reduced, kept = _reduction._get_axis(axis, len(shape))
        ends = tuple(1 if k in reduced else n for k, n in enumerate(shape)) if keepdims else tuple(shape[k] for k in kept)
        outs = allocated(outs, real.out_params, out_types, ends, False)
        if outs[0].size == 0:
            return outs[0]
        if real.identity == "" and 0 in shape:
            raise ValueError(f"zero-size array to reduction operation {real.name} which has no identity")
        self._launch(cast(given, in_types), outs, shape, (*reduced, *kept), ends, types)
        return outs[0]

    def _launch(
        self, given: list[Any], outs: list[Any], shape: tuple[int, ...], axes: tuple[int, ...], ends: tuple[int, ...], types: Any
    ) -> None:
        from cupy._core import _kernel, _reduction

        real = self._real
        if axes != tuple(range(len(shape))):
            if any(parameter.raw for parameter in real.in_params):
                raise NotImplementedError("raw parameters reduce over leading axes only")
            given = [value.transpose(axes) if isinstance(value, np.ndarray) else value for value in given]
            shape = tuple(shape[k] for k in axes)
        if real.reduce_dims:
            given, shape = flattened(given, real.in_params, shape)
            outs, ends = flattened(outs, real.out_params, ends)
        wide = math.prod(shape) / math.prod(ends) > 0x7FFFFFFF
        types = _kernel._TypeMap((*types._pairs, ("IndexT", "int64" if wide else "int32")))
        row = contiguous(given, real.in_params, ends, len(shape))
        block, stride, blocks = _reduction._get_block_specs(math.prod(shape), math.prod(ends), row, -1)
        arguments = KernelArguments()
        for parameter, value in zip(real._params, [*given, *outs, shape, ends, np.int32(stride)], strict=True):
            arguments.add(parameter, value)
        code = _reduction._ReductionKernel_get_cached_function_code(
            *(real.nin, real.nout, real._params, tuple(arguments.infos), types, real.name, block, real.reduce_type),
            *(real.identity, real.map_expr, real.reduce_expr, real.post_map_expr, real.preamble, real.options),
        )
        arguments.launch(real.name, code, tuple(real.options), blocks * block, block)


def contiguous(values: Sequence[Any], parameters: Sequence[Any], ends: Sequence[int], axes: int) -> int:
    """Returns how many elements along the axes that remain lie one behind the other, in the array that has most of them."""
    most = 1
    for value, parameter in zip(values, parameters, strict=True):
        if not isinstance(value, np.ndarray) or parameter.raw:
            continue
        count = 1
        for k, length in enumerate(reversed(ends)):
            if k >= axes or value.strides[axes - k - 1] != count * value.itemsize:
                break
            count *= length
        most = max(most, count)
    return most


class CompiledModule:
    """The module that `cupyx.jit` compiles its CUDA C to: its kernels take arrays as `CArray`."""

    def __init__(self, source: SourceText):
        self._source = source

    def get_function(self, name: str) -> Callable[..., None]:
        """Returns the kernel of that name."""

        def launch(
            grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int = 0, stream: Any = None, *_: Any
        ) -> None:
            loaded = self._source.load()
            code = loaded.module.code(name)
            names = [each for _, each in parameters(self._source.code or "", name, len(code.params))]
            arrays = {each: carray(each, value) for each, value in zip(names, args, strict=True) if isinstance(value, np.ndarray)}
            issue(loaded.module, name, grid, block, dict(zip(names, args, strict=True)) | arrays, shared_mem=shared_mem)

        return launch


def functions_of_jit(cupy: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yields the names of `cupyx.jit` to replace, so that NumPy's functions, which programs find in CuPy's place, are CuPy's in its
    kernels: (module, name, value)."""
    from cupyx.jit import _builtin_funcs, _compile, _internal_types

    pairs = ((getattr(np, name, None), value) for name, value in vars(cupy).items() if isinstance(value, cupy.ufunc))
    theirs = {ours: value for ours, value in pairs if isinstance(ours, np.ufunc)}
    call = _compile._call_ufunc

    class FunctionInJit(_internal_types.BuiltinFunc):  # type: ignore[misc]
        def __init__(self, function: Any):
            self.function = function

        def call(self, env: Any, *args: Any, dtype: Any = None) -> Any:
            return call(self.function, args, dtype and dtype.obj, env)

    known = _builtin_funcs.builtin_functions_dict | {ours: FunctionInJit(value) for ours, value in theirs.items()}
    yield _builtin_funcs, "builtin_functions_dict", known
    for name, value in {"_get_warpsize": 32, "_full_mask": 0xFFFFFFFF}.items():
        yield cupy._core, name, lambda value=value: value
    # `min` and `max` in a kernel are functions of CuPy's.
    yield _compile, "_call_ufunc", lambda function, *given: call(theirs.get(function, function), *given)


def compile_with_cache(source: str, options: tuple[str, ...] = (), backend: str = "nvrtc", jitify: bool = False, **_: Any) -> Any:
    """Compiles as the function of that name in `cupy._core.core`, for the PTX machine."""
    found = re.search(r"__global__\s+void\s+(\w+)", source)
    place = f"{found[1] if found else 'jit'}.cu", 1
    return CompiledModule(SourceText(headers() + source, None, options, backend, False, jitify, (), place))


def remade_kernel(value: Any) -> ElementwiseKernel | ReductionKernel | None:
    """Returns a kernel that the real CuPy made before as one of ours; None for anything else."""
    kind = type(value)
    ours = next((one for one in (ElementwiseKernel, ReductionKernel) if one.__name__ == kind.__name__), None)
    return ours(real=value) if ours and str(kind.__module__).startswith("cupy._core") else None


# -- the module --------------------------------------------------------------------------------------------------------------


def on_device(value: Any) -> Any:
    """Returns NumPy's result as CuPy gives it: arrays of the device, without dimensions where NumPy has a scalar."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value).view(DeviceArray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(on_device, value)) if type(value) in (tuple, list) else value
    return value


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a NumPy function: it returns arrays of the device, and takes `dtype` even if NumPy's does not (random)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return on_device(function(*args, **kwargs))
        except TypeError:
            dtype = kwargs.pop("dtype", None)
            if dtype is None:
                raise
            return on_device(function(*args, **kwargs)).astype(dtype)

    return call


def copied(a: Any, dtype: Any = None, **kwargs: Any) -> DeviceArray:
    """Does what `asarray` and its like do: arrays of the device stay as they are, the host's are copied."""
    kwargs.pop("blocking", None)
    made = np.asanyarray(a, dtype, **kwargs) if isinstance(a, DeviceArray) else np.array(a, dtype, **kwargs)
    return np.asarray(made).view(DeviceArray)


def asnumpy(a: Any, *_: Any, **__: Any) -> np.ndarray:
    return a.get() if isinstance(a, DeviceArray) else np.asarray(a)


class Submodule:
    """`random`, `linalg` or `fft` of NumPy's, with results on the device."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return wrapped(found) if callable(found) and not isinstance(found, type) else found


class IdleQueue:
    """A stream, an event or a device: everything is done when the call returns, so there is nothing to wait for."""

    ptr, id = 0, 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return self

    use = synchronize = record = wait_event = __enter__ = _nothing

    def __exit__(self, *_: Any) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        return (settings().arch or "").removeprefix("compute_")


class IdlePool:
    """A pool of memory, which is NumPy's: it holds nothing."""

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 0

    used_bytes = free_bytes = total_bytes = n_free_blocks = get_limit = _nothing
    free_all_blocks = free_all_free = set_limit = _nothing


class IdleStream(IdleQueue):
    null: IdleQueue


IdleStream.null = IdleStream()


def replacements(cupy: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yields the names to replace during the simulation: (module, name, value)."""
    own = {
        "RawKernel": RawKernel,
        "RawModule": RawModule,
        "ElementwiseKernel": ElementwiseKernel,
        "ReductionKernel": ReductionKernel,
        "ndarray": DeviceArray,
        "asnumpy": asnumpy,
        "is_available": lambda: True,
        "memoize": lambda *_, **__: functools.cache,
        "get_default_memory_pool": IdlePool,
        "get_default_pinned_memory_pool": IdlePool,
        "get_array_module": lambda *args: cupy if any(isinstance(arg, DeviceArray) for arg in args) else np,
        "empty": wrapped(empty),
        "empty_like": wrapped(empty_like),
        "asarray": copied,
        "asanyarray": copied,
        "ascontiguousarray": functools.partial(copied, order="C"),
        "asfortranarray": functools.partial(copied, order="F"),
        **{name: Submodule(getattr(np, name)) for name in ("random", "linalg", "fft")},
    }
    for name in dir(cupy):
        there, numpys = getattr(cupy, name), getattr(np, name, None)
        if name in own:
            yield cupy, name, own[name]
        elif (
            not name.startswith("_")
            and callable(there)
            and callable(numpys)
            and there is not numpys
            and not isinstance(numpys, type)
        ):
            yield cupy, name, numpys if isinstance(numpys, np.ufunc) else wrapped(numpys)
    for kernel in (ElementwiseKernel, ReductionKernel):  # by which `cupy.vectorize` calls them
        yield cupy._core, kernel.__name__, kernel
    yield cupy.cuda.device, "get_compute_capability", lambda: IdleQueue().compute_capability
    yield cupy.cuda, "get_elapsed_time", lambda *_: 0.0
    for name, value in {"Stream": IdleStream, "Event": IdleQueue, "Device": IdleQueue}.items():
        yield cupy.cuda, name, value
    # `cupyx.jit` keeps what it compiled by the device's number: none that a GPU has.
    yield cupy.cuda, "get_device_id", lambda: -1
    yield cupy._core.core, "compile_with_cache", compile_with_cache
    yield from functions_of_jit(cupy)
    yield cupy.cuda, "is_available", lambda: True
    yield cupy.cuda, "get_current_stream", lambda *_: IdleStream.null
    runtime = {"deviceSynchronize": None, "streamSynchronize": None, "getDevice": 0, "getDeviceCount": 1, "setDevice": None}
    for name, result in runtime.items():
        yield cupy.cuda.runtime, name, lambda *_, result=result: result


def remade(value: Any, file: str) -> RawKernel | RawModule:
    """Returns a kernel or module that the real CuPy made before, in a Python file, as one of ours."""
    made: RawKernel | RawModule
    if type(value).__name__ == "RawModule":
        kept = {"backend": value.backend, "enable_cooperative_groups": value.enable_cooperative_groups}
        given = {"path": value.file_path} if value.code is None else {"code": value.code, "options": value.options, **kept}
        made, name = RawModule(**given, name_expressions=value.name_expressions), "module"
    else:
        state = value.__getstate__()
        kept = {name: state[name] for name in ("options", "backend", "translate_cucomplex", "enable_cooperative_groups")}
        made, name = RawKernel(state["code"], state["name"], **kept), state["name"]
    if made.code is not None:
        made._source = replace(made._source, place=place_in(file, made.code, name))
    return made


@contextmanager
def simulated_cupy() -> Iterator[None]:
    """Makes `cupy` work without a GPU in the `with` block, as far as arrays and raw kernels go.

    Functions that NumPy has under the same name are NumPy's, on a subclass of its arrays with `get` and `set`; RawKernel and
    RawModule are those of the PTX machine; streams, events and devices have nothing to do. Kernels, modules and functions that
    other modules hold by a name of their own, made or imported before, are replaced there too. ElementwiseKernel, ReductionKernel
    and `cupyx.jit.rawkernel` run there too. Not replaced, and failing as they do without a GPU: the rest of
    `cupyx`, and what NumPy does not have. Raises ImportError without CuPy.
    """
    cupy = first_use.import_cupy()
    real = (cupy.RawKernel, cupy.RawModule)
    if RawKernel in real:  # simulated already
        yield
        return
    changes = list(replacements(cupy))
    instead = {id(getattr(owner, name)): value for owner, name, value in changes if owner is cupy}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not names or getattr(module, "__name__", "").partition(".")[0] in (
            "cupy",
            "cupyx",
            "cupy_backends",
            "numpy",
            "cupyflash",
        ):
            continue
        for name, value in list(names.items()):
            if type(value) in real and (type(value) is real[1] or value.code is not None):
                changes.append((module, name, remade(value, str(names.get("__file__", "")))))
            elif (kernel := remade_kernel(value)) is not None:
                changes.append((module, name, kernel))
            elif id(value) in instead and not isinstance(value, (int, float, bool)):
                changes.append((module, name, instead[id(value)]))
    with replaced(changes):
        yield
