"""Predicted times beside published ones, by the clock that executes machine code (docs/clock.md).

python benchmarks/published/predicted.py FOLDER NAME [STEP] [--write]

FOLDER has the cubins that build.py made of a ladder's sources.
Kernels are found by their names in C++, for which binutils' c++filt is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from operator import mul
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cupyflash import Device
from cupyflash.sim.clock import sass
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.known import kind_of
from cupyflash.sim.clock.whole import RULES, Clock
from cupyflash.sim.ptx import TensorMap
from cupyflash.sim.ptx.memory.swizzles import ADDRESS_AT
from cupyflash.sim.ptx.parameters import POINTER_BYTES, BoundArguments, BoundTensor
from published import Argument, Ladder, Step, ladders
from published.build import cubin_of
from published.scores import Result, Score, read, write

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "int32": 4}
SCALARS = {"int": "i4", "unsigned": "u4", "long": "i8", "size_t": "u8", "float": "f4", "half": "f2"}
MAP_ALIGNMENT = 128
LIKE = {"A100-PCIe-80GB": ("A100-80GB", 5120), "H800-SXM": ("H100-SXM", 0)}
"""Devices that differ from one of the catalogue in their memory's clock: its name, and the bits of the bus; 0 if in links only."""


def bound(arguments: Sequence[Argument]) -> BoundArguments:
    """Lay the arguments of a launch out as parameters; arrays hold zeros."""
    found = BoundArguments()
    for number, argument in enumerate(arguments):
        members = (argument,) if isinstance(argument, str) else argument
        found.data += bytes(-len(found.data) % max(alignment(text) for text in members))
        found.offsets[f"arg{number}"] = len(found.data)
        for text in members:
            add(found, text)
    return found


def alignment(text: str) -> int:
    kind = text.partition(" ")[0]
    return MAP_ALIGNMENT if kind == "map" else np.dtype(SCALARS[kind]).itemsize if kind in SCALARS else POINTER_BYTES


def add(found: BoundArguments, text: str) -> None:
    """Append one value behind the others."""
    found.data += bytes(-len(found.data) % alignment(text))
    at, name = len(found.data), f"arg{len(found.tensors)}"
    kind, _, value = text.partition(" ")
    if kind in SCALARS:
        found.data += np.array(float(value) if kind in ("float", "half") else int(value), SCALARS[kind]).tobytes()
        return
    shape = re.fullmatch(r"(pointer to )?map (\w+)\[(.*)\] box \[(.*)\] swizzle (\d+)", text)
    if shape:
        sizes, box = ([int(each) for each in shape[k].split(",")] for k in (3, 4))
        array = np.zeros(int(np.prod(sizes)), f"u{ITEM_BYTES[shape[2]]}")
        kind = "uint8" if ITEM_BYTES[shape[2]] == 1 else shape[2]
        strides = strides_of(sizes, ITEM_BYTES[shape[2]])
        made = TensorMap(array, box, dims=sizes, strides=strides, dtype=kind, swizzle=int(shape[5]))
        encoded = made.description.encode(0)
        if not shape[1]:
            found.data += encoded
            found.tensors.append(BoundTensor(name, name, array, name, at + ADDRESS_AT))
            return
        holder = np.frombuffer(encoded, np.uint8).copy()
        found.tensors.append(BoundTensor(f"{name}.map", name, holder, name, at))
        found.tensors.append(BoundTensor(name, name, array, "*", ADDRESS_AT, holder))
    elif text != "null":
        array_of = re.fullmatch(r"(\w+)\[(.*)\]", text)
        assert array_of is not None
        size = ITEM_BYTES[array_of[1]] * int(np.prod([int(each) for each in array_of[2].split(",")], dtype=np.int64))
        found.tensors.append(BoundTensor(name, name, np.zeros(size, np.uint8), name, at))
    found.data += bytes(POINTER_BYTES)


def strides_of(sizes: Sequence[int], item: int) -> list[int]:
    """The strides of a map's dimensions: rows of a matrix cut into columns lie between others, matrices in turn."""
    if len(sizes) < 3:
        return [sizes[0] * item][: len(sizes) - 1]
    row, matrix = sizes[0] * sizes[2] * item, sizes[0] * sizes[1] * sizes[2] * item
    return [row, sizes[0] * item, *accumulate(sizes[3:-1], mul, initial=matrix)][: len(sizes) - 1]


def plain(name: str) -> str:
    """A kernel's name without the types of numbers, blanks and words for numbers, so that two spellings agree."""
    name = re.sub(r"^void |\s|\((\w+::)*(int|bool|unsigned int|unsigned|[A-Z]\w*)\)(?=\d)|(?<=\d)[uUlL]+\b|\b[a-z]\w*::", "", name)
    return name.replace("true", "1").replace("false", "0")


def kernel(file: Path, name: str) -> CubinKernel:
    """The kernel of a cubin with this name in C++; ValueError if there is none."""
    cubin = file.read_bytes()
    mangled = list(sass.read(cubin).kernels)
    shown = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    own, _, behind = re.escape(plain(name)).partition("<")
    numbered = re.sub(r"\bk[A-Z]\w*|\b[A-Z]\w*::\w+", r"\\d+", behind)  # c++filt shows an enumerator as its number
    wanted = re.compile(rf"(void)?{own}{'<' * bool(behind)}{numbered}(\(|$)")
    for symbol, told in zip(mangled, shown, strict=True):
        if wanted.match(plain(told)):
            return CubinKernel.of(cubin, symbol)
    raise ValueError(f"{file.name} has no kernel {name}; it has {', '.join(shown)}")


def device_of(ladder: Ladder) -> Device:
    """The ladder's device, from the catalogue or as another one with other memory."""
    if ladder.device in LIKE:
        name, bits = LIKE[ladder.device]
        if not bits:
            return Device.named(name)
        assert ladder.clock.memory_mhz is not None
        return replace(Device.named(name), hbm_bandwidth=ladder.clock.memory_mhz * 1e6 * 2 * bits / 8)
    return Device.named(ladder.device)


def clocks_of(ladder: Ladder, step: Step, folder: Path) -> list[Clock]:
    """The clocks of a step's launches at the highest rate of the ladder's file."""
    file, (low, high) = cubin_of(folder, ladder, step), ladder.clock.mhz
    cold = "empties" in ladder.timing or ladder.warm is not None
    series = ladder.series * step.seconds if ladder.series else inf
    found = []
    for each in step.launches:
        if each.arguments is None:
            raise ValueError(f"{step.name}: the ladder does not know the arguments")
        arguments = bound(each.arguments)
        launch = CodeLaunch(kernel(file, each.kernel), each.grid, each.block, arguments, each.shared or 0, cluster=each.cluster)
        found.append(Clock(launch, device_of(ladder), high, cold=cold))
        found[-1].series, found[-1].locked, found[-1].warm = series, low == high, ladder.warm or 0
    return found


def predict(ladder: Ladder, step: Step, clocks: Sequence[Clock]) -> Result:
    """Time a step's launches one after another, at both rates and over phases and assumed latencies."""
    times = [clock.time() for clock in clocks]
    slowest, longest = max(zip(clocks, times, strict=True), key=lambda each: each[1].seconds)
    seconds = sum(each.seconds for each in times)
    low, high = ladder.clock.mhz
    lowest = seconds if low == high else sum(clock.again(mhz=low).time().seconds for clock in clocks)
    varied = [clock.spread() for clock in clocks]
    least, most = (sum(each[side] for each in varied) for side in (0, 1))
    return Result(step.seconds, seconds, lowest, least, most, kind_of(slowest, longest), longest.binds, RULES)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/published/predicted.py", description="Predictions beside figures.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the cubins that build.py made")
    parser.add_argument("name", metavar="NAME", help="the ladder")
    parser.add_argument("step", nargs="?", default="", metavar="STEP", help="a part of the names of the steps (default: all)")
    parser.add_argument("--write", action="store_true", help="keep the results in predicted.json")
    asked = parser.parse_args(words)
    ladder = next((each for each in ladders() if each.name == asked.name), None)
    if ladder is None:
        parser.error(f"no ladder {asked.name!r}; there are {', '.join(each.name for each in ladders())}")
    found = {}
    for step in (each for each in ladder.steps if asked.step in each.name):
        one = found[step.name] = predict(ladder, step, clocks_of(ladder, step, asked.folder))
        print(
            f"  {step.name:34} measured {one.measured * 1e6:12,.1f} us, predicted {one.predicted * 1e6:12,.1f}, {one.ratio:5.2f} "
            f"({one.least / one.measured:.2f} to {one.most / one.measured:.2f}); {one.binds} binds",
            flush=True,
        )
        if asked.write:
            kept = read()
            write(kept | {ladder.name: kept.get(ladder.name, {}) | {step.name: one}})
    if found:
        print("  figures, error at the highest rate, within the rates, after a factor, tau, bias, spread: ", end="")
        print("; ".join(Score([list(found.values())]).cells()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
