"""Predicted times beside published ones, by the clock that executes machine code (docs/clock.md).

python benchmarks/published/predicted.py FOLDER NAME [STEP]

FOLDER has the cubins that build.py made of a ladder's sources.
Kernels are found by their names in C++, for which binutils' c++filt is needed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from cupyflash.sim.ptx.parameters import POINTER_BYTES, BoundArguments, BoundTensor, aligned
from published import Argument, Ladder, Step, ladders
from published.build import cubin_of

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "int32": 4}
SCALARS = {"int": "i4", "unsigned": "u4", "long": "i8", "size_t": "u8", "float": "f4", "half": "f2"}
LIKE = {"A100-PCIe-80GB": ("A100-80GB", 5120)}
"""Devices that differ from one of the catalogue in their memory's clock: its name, and the bits of the bus."""
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
    for text in (member for argument in arguments for member in ((argument,) if isinstance(argument, str) else argument)):
        array = re.fullmatch(r"(\w+)\[(.*)\]", text)
        if array or text == "null":
            found.data += bytes(aligned(len(found.data), POINTER_BYTES) - len(found.data))
            if array:
                size = ITEM_BYTES[array[1]] * int(np.prod([int(each) for each in array[2].split(",")], dtype=np.int64))
                name = f"arg{len(found.tensors)}"
                found.tensors.append(BoundTensor(name, name, np.zeros(size, np.uint8), name, len(found.data)))
            found.data += bytes(POINTER_BYTES)
            continue
        kind, _, value = text.partition(" ")
        if kind not in SCALARS:
            raise ValueError(f"{text}: the clock does not know tensor maps yet")
        scalar = np.array(float(value) if kind in ("float", "half") else int(value), SCALARS[kind])
        found.data += bytes(aligned(len(found.data), scalar.nbytes) - len(found.data)) + scalar.tobytes()
    return found


def plain(name: str) -> str:
    """A kernel's name without the types of numbers, blanks and words for numbers, so that two spellings agree."""
    name = re.sub(r"^void |\s|\((\w+::)*(int|bool|unsigned int|unsigned|[A-Z]\w*)\)(?=\d)|(?<=\d)[uUlL]+\b|\b[a-z]\w*::", "", name)
    return name.replace("true", "1").replace("false", "0")


def kernel(file: Path, name: str) -> Kernel:
    """The kernel of a cubin with this name in C++; ValueError if there is none."""
    cubin = file.read_bytes()
    mangled = list(sass.read(cubin).kernels)
    shown = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True).stdout.splitlines()
    numbered = re.sub(r"\bk[A-Z]\w*", r"\\d+", re.escape(plain(name)))  # c++filt shows an enumerator as its number
    wanted = re.compile(rf"(void)?{numbered}(\(|$)")
    for symbol, told in zip(mangled, shown, strict=True):
        if wanted.match(plain(told)):
            return Kernel.of(cubin, symbol)
    raise ValueError(f"{file.name} has no kernel {name}; it has {', '.join(shown)}")


def device_of(ladder: Ladder) -> Device:
    """The ladder's device, from the catalogue or as another one with other memory."""
    if ladder.device in LIKE:
        name, bits = LIKE[ladder.device]
        assert ladder.clock.memory_mhz is not None
        return replace(Device.named(name), hbm_bandwidth=ladder.clock.memory_mhz * 1e6 * 2 * bits / 8)
    return Device.named(ladder.device)


def predict(ladder: Ladder, step: Step, folder: Path) -> Predicted:
    """Time a step's launches one after another at the highest clock rate of its file."""
    file = cubin_of(folder, ladder, step)
    times, cold = [], "empties" in ladder.timing
    for each in step.launches:
        if each.arguments is None:
            raise ValueError(f"{step.name}: the ladder does not know the arguments")
        launch = Launch(kernel(file, each.kernel), each.grid, each.block, bound(each.arguments), each.shared or 0)
        times.append(Clock(launch, device_of(ladder), ladder.clock.mhz[1], cold=cold).time())
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
