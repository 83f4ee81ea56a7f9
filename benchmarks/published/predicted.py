"""Predicted times beside published ones, by the clock that executes machine code (docs/clock.md).

python benchmarks/published/predicted.py FOLDER NAME [STEP]

FOLDER has the cubins that you built of a ladder's sources, with its compiler's options: NAME_FILE.cubin for each file of its steps.
Kernels are found by their names in C++, for which binutils' c++filt is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cupyflash import Device
from cupyflash.sim.clock import sass
from cupyflash.sim.clock.execution import Kernel, Launch
from cupyflash.sim.clock.whole import Clock, Time
from cupyflash.sim.ptx import TensorMap
from cupyflash.sim.ptx.memory.layouts import ADDRESS_AT
from cupyflash.sim.ptx.parameters import POINTER_BYTES, BoundArguments, BoundTensor
from published import Argument, Ladder, Step, ladders

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "int32": 4}
SCALARS = {"int": "i4", "unsigned": "u4", "long": "i8", "size_t": "u8", "float": "f4", "half": "f2"}
MAP_ALIGNMENT = 128
APART = 1.05  # pairs of figures that differ by less have no order


@dataclass(frozen=True)
class Predicted:
    """A step with its time by the clock; `binds` is what limits its last launch."""

    step: Step
    seconds: float
    last: Time

    @property
    def ratio(self) -> float:
        return self.seconds / self.step.seconds


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
    """The strides of a map's dimensions: rows of a matrix cut into columns of 64 lie between those of others."""
    if len(sizes) < 3:
        return [sizes[0] * item][: len(sizes) - 1]
    width = sizes[0] * sizes[2]
    return [width * item, sizes[0] * item, *(width * sizes[1] * item for _ in sizes[3:])]


def plain(name: str) -> str:
    """A kernel's name without the types of numbers, blanks and words for numbers, so that two spellings agree."""
    name = re.sub(r"^void |\s|\((int|bool|unsigned int|unsigned)\)|(?<=\d)[uUlL]+\b", "", name)
    return name.replace("true", "1").replace("false", "0")


def kernel(file: Path, name: str) -> Kernel:
    """The kernel of a cubin with this name in C++; ValueError if there is none."""
    cubin = file.read_bytes()
    mangled = list(sass.read(cubin).kernels)
    shown = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    for symbol, told in zip(mangled, shown, strict=True):
        if plain(told).startswith((f"{plain(name)}(", f"void{plain(name)}(")) or plain(told) == plain(name):
            return Kernel.of(cubin, symbol)
    raise ValueError(f"{file.name} has no kernel {name}; it has {', '.join(shown)}")


def predict(ladder: Ladder, step: Step, folder: Path) -> Predicted:
    """Time a step's launches one after another at the highest clock rate of its file."""
    file = folder / f"{ladder.name}_{Path(step.file).name}.cubin"
    times, cold = [], "empties" in ladder.timing
    for each in step.launches:
        if each.arguments is None:
            raise ValueError(f"{step.name}: the ladder does not know the arguments")
        arguments = bound(each.arguments)
        launch = Launch(kernel(file, each.kernel), each.grid, each.block, arguments, each.shared or 0, cluster=each.cluster)
        times.append(Clock(launch, Device.named(ladder.device), ladder.clock.mhz[1], cold=cold).time())
    return Predicted(step, sum(each.seconds for each in times), times[-1])


def scores(found: Sequence[Predicted]) -> str:
    """The median error, the errors within 20 %, Kendall's tau and the bias."""
    errors = [abs(each.ratio - 1) for each in found]
    signs = [
        1 if (a.step.seconds > b.step.seconds) == (a.seconds > b.seconds) else -1
        for a, b in combinations(found, 2)
        if max(a.step.seconds / b.step.seconds, b.step.seconds / a.step.seconds) > APART
    ]
    tau = f", tau {mean(signs):.2f}" if signs else ""
    bias = exp(mean(log(each.ratio) for each in found)) - 1
    near = sum(error <= 0.2 for error in errors)
    return f"{len(found)} figures: median error {median(errors):.1%}, {near} within 20 %{tau}, bias {bias:+.1%}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/published/predicted.py", description="Predictions beside figures.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the cubins, as NAME_FILE.cubin")
    parser.add_argument("name", metavar="NAME", help="the ladder")
    parser.add_argument("step", nargs="?", default="", metavar="STEP", help="a part of the names of the steps (default: all)")
    asked = parser.parse_args(words)
    ladder = next((each for each in ladders() if each.name == asked.name), None)
    if ladder is None:
        parser.error(f"no ladder {asked.name!r}; there are {', '.join(each.name for each in ladders())}")
    found = []
    for step in (each for each in ladder.steps if asked.step in each.name):
        one = predict(ladder, step, asked.folder)
        found.append(one)
        print(
            f"  {step.name:34} measured {step.seconds * 1e6:12,.1f} us, predicted {one.seconds * 1e6:12,.1f}, "
            f"{one.ratio:5.2f} of it; {one.last.binds} binds; {one.last.sampled}",
            flush=True,
        )
    if found:
        print(f"  {scores(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
