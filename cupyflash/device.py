"""The figures of a GPU for which a tiling is chosen: on-chip memory, bandwidth, arithmetic peaks.

A `Device` holds figures only. It comes from the catalogue (`Device.named`), from a user's file (`Device.from_file`) or
from the GPU at hand (`Device.current`); the first two need neither CuPy nor a GPU.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash.basics import is_number

__all__ = ["PEAK_DTYPES", "Device"]

PEAK_DTYPES = ("float16", "bfloat16", "float32", "tf32")
"""The keys that `Device.tensor_peak` may have."""

_MAX_SRAM = 2**40  # an override serves theory (Theorem 2 needs M up to N d), so the limit is far beyond any chip
_SIZE = re.compile(r"([0-9]{1,16})\s*([KMG]?)(?:I?B)?", re.IGNORECASE)
_UNIT = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZES_ALLOWED = f"1 to {_MAX_SRAM} bytes, as an integer or as text: '166912', '100KB', '100 KiB', '1MB' (K = 1024)"


class _Peaks(Mapping[str, float]):
    """An immutable, hashable, picklable mapping (types.MappingProxyType is neither of the last two)."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, float]) -> None:
        self._items = tuple((key, float(items[key])) for key in PEAK_DTYPES if key in items)

    def __getitem__(self, key: str) -> float:
        for name, peak in self._items:
            if name == key:
                return peak
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))


@dataclass(frozen=True)
class Device:
    """One GPU, in figures. Immutable and hashable.

    Attributes:
        name: the catalogue's name, or CUDA's name of the device.
        compute_capability: (major, minor).
        sram_per_block: shared memory that one block may opt in to, bytes; the paper's M, which counts elements.
        sram_per_sm: shared memory of one multiprocessor, bytes.
        registers_per_sm: 32-bit registers of one multiprocessor.
        sm_count: multiprocessors.
        l2_bytes: L2 cache, bytes.
        hbm_bandwidth: peak bandwidth of device memory, bytes/s; None if it is not known.
        tensor_peak: dense peaks in FLOP/s by dtype name. float16 and bfloat16: tensor cores that accumulate in
            float32; tf32: tensor cores on float32 data; float32: ordinary FMA, as full float32 has no tensor core.
            A dtype that is absent has no tensor core, or no known peak. Empty if nothing is known.

    Raises:
        TypeError: a figure of the wrong type.
        ValueError: a figure that is not positive and finite, or sram_per_block > sram_per_sm.
    """

    name: str
    compute_capability: tuple[int, int]
    sram_per_block: int
    sram_per_sm: int
    registers_per_sm: int
    sm_count: int
    l2_bytes: int
    hbm_bandwidth: float | None
    tensor_peak: Mapping[str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"name = {self.name!r}: allowed is a text that is not empty")
        match self.compute_capability:
            case (int(major), int(minor)) if major > 0 and minor >= 0:
                object.__setattr__(self, "compute_capability", (major, minor))
            case _:
                raise ValueError(f"compute_capability = {self.compute_capability!r}: allowed are two integers, as 8, 0")
        for key in ("sram_per_block", "sram_per_sm", "registers_per_sm", "sm_count", "l2_bytes"):
            _check_positive(key, getattr(self, key), int)
        if self.sram_per_block > self.sram_per_sm:
            raise ValueError(f"sram_per_block = {self.sram_per_block}: allowed is at most sram_per_sm = {self.sram_per_sm}")
        if self.hbm_bandwidth is not None:
            _check_positive("hbm_bandwidth", self.hbm_bandwidth, float)
            object.__setattr__(self, "hbm_bandwidth", float(self.hbm_bandwidth))
        if not isinstance(self.tensor_peak, Mapping):
            raise TypeError(f"tensor_peak = {self.tensor_peak!r}: allowed is a table of FLOP/s by dtype name")
        for key, peak in self.tensor_peak.items():
            if key not in PEAK_DTYPES:
                raise ValueError(f"tensor_peak has the key {key!r}: allowed are {', '.join(PEAK_DTYPES)}")
            _check_positive(f"tensor_peak.{key}", peak, float)
        object.__setattr__(self, "tensor_peak", _Peaks(self.tensor_peak))

    @property
    def sm(self) -> str:
        """The architecture as compilers name it: 'sm_80' for compute capability 8.0."""
        return "sm_{}{}".format(*self.compute_capability)

    def with_sram(self, sram: int | str) -> Device:
        """The same device with another SRAM size M, to study Theorem 2.

        Args:
            sram: bytes, or text such as '100KB', '100 KiB', '8kb', '166912', '1MB'; K is 1024, as NVIDIA uses it, with
                or without the i. At most 2**40 bytes, far beyond any chip. It replaces sram_per_block, and
                raises sram_per_sm where that is smaller.

        Raises:
            TypeError: neither an integer nor text.
            ValueError: text that is no size, or a size out of range.
        """
        M = _parse_size("sram", sram)
        return replace(self, sram_per_block=M, sram_per_sm=max(self.sram_per_sm, M))

    @classmethod
    def named(cls, name: str | os.PathLike[str], sram: int | str | None = None) -> Device:
        """A device of the catalogue, or of a file that holds one.

        Args:
            name: a catalogue name such as 'A100-40GB', or what CUDA calls that device ('NVIDIA A100-SXM4-40GB'); case,
                spaces, dashes and underscores do not matter. A path ending in .toml is read by `from_file`.
            sram: as for `with_sram`.

        Raises:
            TypeError: `name` is neither text nor a path.
            ValueError: no such device, or a bad size or file.
            OSError: the file cannot be read.
        """
        return find_device("name", name, sram)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], name: str | None = None, sram: int | str | None = None) -> Device:
        """A device of a user's own TOML file.

        The format is the catalogue's, cupyflash/devices.toml: one table a device, headed by its name, with every figure
        of `Device`. Sizes in bytes may be text ('163KB'). `cuda_names` and `sources` may be left out.

        Args:
            path: the file.
            name: which device; needed where the file holds several.
            sram: as for `with_sram`.

        Raises:
            ValueError: not TOML; a missing or unknown key, a wrong type, a figure that is not positive (with file,
                device and key); no such device; or several, and no name.
            TypeError: `path` is no path, or `name` no text.
            OSError: the file cannot be read.
        """
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"path must be the path of a .toml file, got {path!r}")
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a device's name or None, got {name!r}")
        entries = _parse(Path(path).read_bytes(), os.fspath(path))
        if name is None and len(entries) > 1:
            names = ", ".join(entry.device.name for entry in entries)
            raise ValueError(f"name = None: {os.fspath(path)} holds several devices, allowed are {names}")
        device = (entries[0] if name is None else _pick(entries, "name", name, os.fspath(path))).device
        return device if sram is None else device.with_sram(sram)

    @classmethod
    def catalogue(cls) -> tuple[Device, ...]:
        """Every device that `named` knows; cupyflash/devices.toml gives the source of each figure."""
        return tuple(entry.device for entry in _catalogue())

    @classmethod
    def current(cls, ordinal: int | None = None) -> Device:
        """The GPU at hand, from CUDA's device attributes through CuPy.

        CUDA does not report tensor peaks. They come from the catalogue if name, compute capability and multiprocessor
        count match a catalogue device (a MIG slice matches none), else they are empty. The bandwidth comes from there
        too if the driver does not report memory clock and bus width, else it is None.

        Args:
            ordinal: CUDA's device number; the current device by default.

        Raises:
            ImportError: CuPy cannot be imported.
            RuntimeError: no usable GPU, or CuPy was built for ROCm.
            ValueError: no device of that number.
        """
        from cupyflash.launch import first_use  # only here, where there may be a GPU

        try:
            cupy = first_use.import_cupy()
        except ImportError as error:
            way = "pip install 'cupyflash[cuda13]', or [cuda12] for a CUDA 12 driver"
            raise ImportError(first_use.two_packages() or f"cannot import CuPy ({error}): {way}") from error
        runtime = cupy.cuda.runtime
        if runtime.is_hip:
            raise RuntimeError("CuPy was built for ROCm: cupyflash's kernels are CUDA C, they need an NVIDIA GPU")
        try:
            count = runtime.getDeviceCount()
        except RuntimeError as error:  # CUDARuntimeError: no driver, a driver too old, no device
            raise RuntimeError(first_use.no_gpu(runtime, error)) from error
        if count == 0:
            raise RuntimeError("no GPU that CUDA can use: CUDA counts 0 devices")
        if ordinal is None:
            ordinal = runtime.getDevice()
        if not 0 <= ordinal < count:
            raise ValueError(f"ordinal = {ordinal}: allowed are 0 to {count - 1}")

        properties = runtime.getDeviceProperties(ordinal)
        attributes = cupy.cuda.Device(ordinal).attributes  # names without 'cudaDevAttr'; unknown ones are absent
        name = properties["name"].decode()
        compute_capability = (properties["major"], properties["minor"])
        sm_count = attributes["MultiProcessorCount"]
        known = next(
            (
                entry.device
                for entry in _catalogue()
                if _key(name) in map(_key, entry.cuda_names)
                and entry.device.compute_capability == compute_capability
                and entry.device.sm_count == sm_count
            ),
            None,
        )
        # kHz, bits; two transfers a clock. The deviceQuery formula. 0 or absent if the driver does not report it.
        bandwidth: float | None = attributes.get("MemoryClockRate", 0) * 1000 * 2 * attributes.get("GlobalMemoryBusWidth", 0) / 8
        return cls(
            name=name,
            compute_capability=compute_capability,
            sram_per_block=attributes["MaxSharedMemoryPerBlockOptin"],
            sram_per_sm=attributes["MaxSharedMemoryPerMultiprocessor"],
            registers_per_sm=attributes["MaxRegistersPerMultiprocessor"],
            sm_count=sm_count,
            l2_bytes=attributes["L2CacheSize"],
            hbm_bandwidth=bandwidth or (known.hbm_bandwidth if known else None),
            tensor_peak=known.tensor_peak if known else {},
        )


def find_device(argument: str, name: str | os.PathLike[str], sram: int | str | None = None) -> Device:
    """`Device.named`, with errors that name the caller's `argument`."""
    if not isinstance(name, str | os.PathLike):
        raise TypeError(f"{argument} must be a device's name or the path of a .toml file, got {name!r}")
    if isinstance(name, os.PathLike) or name.lower().endswith(".toml"):
        return Device.from_file(name, sram=sram)
    device = _pick(_catalogue(), argument, name, "the catalogue", "; or the path of a .toml file").device
    return device if sram is None else device.with_sram(sram)


class _Entry(NamedTuple):
    device: Device
    cuda_names: tuple[str, ...]


_SIZE_KEYS = ("sram_per_block", "sram_per_sm", "l2_bytes")
_FIGURES = tuple(key for key in Device.__dataclass_fields__ if key != "name")


@cache
def _catalogue() -> tuple[_Entry, ...]:
    return _parse(resources.files("cupyflash").joinpath("devices.toml").read_bytes(), "devices.toml")


def _parse(data: bytes, label: str) -> tuple[_Entry, ...]:
    """The devices of a TOML file; errors begin with `label`, the file."""
    try:
        tables = tomllib.loads(data.decode())
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError
        raise ValueError(f"{label}: not a TOML file: {error}") from error
    if not tables:
        raise ValueError(f"{label}: no device in it; allowed is one table a device, as [A100-40GB]")
    return tuple(_entry(label, name, table) for name, table in tables.items())


def _entry(label: str, name: str, table: Any) -> _Entry:
    try:
        if not isinstance(table, dict):
            raise ValueError(f"{table!r} stands outside a device's table, as [A100-40GB]")
        figures = {key: value for key, value in table.items() if key not in ("cuda_names", "sources")}
        if missing := [key for key in _FIGURES if key not in figures]:
            raise ValueError(f"missing {', '.join(missing)}")
        if unknown := [key for key in figures if key not in _FIGURES]:
            raise ValueError(f"unknown {', '.join(unknown)}; allowed are {', '.join(_FIGURES)}, cuda_names, sources")
        for key in _SIZE_KEYS:
            figures[key] = _parse_size(key, figures[key])
        cuda_names = table.get("cuda_names", [])
        if not isinstance(cuda_names, list) or not all(isinstance(each, str) for each in cuda_names):
            raise ValueError(f"cuda_names = {cuda_names!r}: allowed is a list of texts")
        return _Entry(Device(name=name, **figures), tuple(cuda_names))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{label}: device {name!r}: {error}") from error


def _key(name: str) -> str:
    """The part of a name that is compared; older drivers leave out the leading 'NVIDIA'."""
    return re.sub(r"[\s_-]+", "", name).casefold().removeprefix("nvidia")


def _pick(entries: tuple[_Entry, ...], argument: str, name: str, where: str, also: str = "") -> _Entry:
    known = {_key(each): entry for entry in entries for each in (entry.device.name, *entry.cuda_names)}
    if found := known.get(_key(name)):
        return found
    import difflib  # only an error needs this import

    close = dict.fromkeys(known[key].device.name for key in difflib.get_close_matches(_key(name), known))
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    names = ", ".join(entry.device.name for entry in entries)
    raise ValueError(f"{argument} = {name!r}: not in {where}; {hint}allowed are {names}{also}")


def _parse_size(argument: str, value: int | str) -> int:
    """Bytes of '100KB', '100 KiB', '166912' or an integer."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        size = int(match[1]) * _UNIT[match[2].upper()] if match else 0
    elif not is_number(value):
        raise TypeError(f"{argument} = {value!r}: allowed are {_SIZES_ALLOWED}")
    else:
        size = int(value)
    if not 0 < size <= _MAX_SRAM:
        raise ValueError(f"{argument} = {value!r}: allowed are {_SIZES_ALLOWED}")
    return size


def _check_positive(key: str, value: object, kind: type[int] | type[float]) -> None:
    if not is_number(value, (int, kind)):
        raise TypeError(f"{key} = {value!r}: allowed is a positive {'integer' if kind is int else 'number'}")
    if not 0 < value < math.inf:
        raise ValueError(f"{key} = {value!r}: allowed is a positive, finite number")
