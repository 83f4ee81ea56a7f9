"""Ladders of times that authors measured with kernels whose source is public: one TOML file a ladder, read and checked here.

README.md says what a file holds, and which rules a model that is held against these figures has to keep.

    python benchmarks/published [NAME ...]

lists the ladders, or the steps of the named ones. Nothing here builds, runs or loads anybody's kernel.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

# Devices of ladders that cupyflash/devices.toml does not have yet, with their compute capability.
MISSING: Mapping[str, tuple[int, int]] = {
    "A100-PCIe-80GB": (8, 0),
    "H800-SXM": (9, 0),
    "RTX PRO 6000 Blackwell Max-Q": (12, 0),
    "RTX PRO 6000 Blackwell Server": (12, 0),
}
GROUPS = "without roles", "Hopper", "Blackwell"
USES = "guide", "compared", "unseen"
NEEDS = "CUDA's headers", "CUTLASS", "PyTorch's headers"
RATES: Mapping[str, tuple[str, float]] = {"TFLOP/s": ("FLOP", 1e12), "GFLOP/s": ("FLOP", 1e9), "GB/s": ("bytes", 1e9)}
TIMES: Mapping[str, float] = {"ms": 1e-3, "us": 1e-6}

COMMIT = r"[0-9a-f]{40}"
REPOSITORY = r"https://github\.com/[\w.-]+/[\w.-]+"
DIMENSIONS = r"\[\d+(, \d+)*\]"
ARRAY = rf"(float32|float16|bfloat16|float8_e4m3|int32){DIMENSIONS}"
NUMBER = r"-?\d+(\.\d+)?(e-?\d+)?"
ARGUMENT = re.compile(
    rf"null|(int|unsigned|long|size_t|float|half) {NUMBER}|{ARRAY}|(pointer to )?map {ARRAY} box {DIMENSIONS} swizzle (0|32|64|128)"
)

Argument = str | tuple[str, ...]  # a tuple is a struct by value, with its members


@dataclass(frozen=True)
class Launch:
    """A kernel with its grid, block, cluster, dynamic shared memory in bytes, and arguments; None is what nobody read."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int | None
    arguments: tuple[Argument, ...] | None


@dataclass(frozen=True)
class Step:
    """One figure, the kernel's file and commit, its launches in order, and the FLOP or bytes that the unit counts."""

    name: str
    figure: float
    seconds: float
    work: int
    group: str
    file: str
    commit: str
    launches: tuple[Launch, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Clock:
    """A multiprocessor's clock rate as an interval in MHz, the memory's and the power limit if a source has them."""

    mhz: tuple[float, float]
    source: str
    memory_mhz: float | None
    watts: float | None


@dataclass(frozen=True)
class Compiler:
    """The compiler that made the measured machine code, its options, and the headers that its source needs.

    `apart`: it cannot be had.
    """

    version: str
    architecture: str
    options: tuple[str, ...]
    needs: str
    apart: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Ladder:
    """The figures that one author measured with one problem on one device."""

    name: str
    title: str
    use: str
    repository: str
    figures: str
    device: str
    clock: Clock
    compiler: Compiler
    timing: str
    series: int | None
    warm: int | None
    spread: float | None
    unit: str
    counted: str
    steps: tuple[Step, ...]
    library: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def buildable(self) -> bool:
        """True if the kernels are CUDA C that includes CUDA's own headers only."""
        return self.compiler.needs == NEEDS[0]


class Table:
    """A table of a file whose fields are taken out one by one; each refusal names the file and the field."""

    def __init__(self, path: Path, where: str, data: Any, inherited: Mapping[str, Any] | None = None) -> None:
        self.path, self.where = path, where
        if not isinstance(data, dict):
            raise self.refusal(where or "the file", data, "a table")
        self.data = {**(inherited or {}), **data}

    def refusal(self, field: str, value: object, allowed: str) -> ValueError:
        return ValueError(f"{self.path.name}: {self.where and self.where + ': '}{field} is {value!r}, must be {allowed}")

    def take(self, field: str, default: Any = ..., allowed: str = "", right: Callable[[Any], bool] = lambda value: True) -> Any:
        """A field's value, which is `right`, or its default."""
        if field not in self.data:
            if default is ...:
                raise self.refusal(field, None, "given")
            return default
        value = self.data.pop(field)
        if not right(value):
            raise self.refusal(field, value, allowed)
        return value

    def text(self, field: str, *, among: Sequence[str] = (), like: str = "") -> Any:
        allowed = f"one of {', '.join(among)}" if among else f"like {like}" if like else "a text that is not empty"
        pattern = re.compile(like or r"\s*\S.*", re.DOTALL)
        right = among.__contains__ if among else pattern.fullmatch
        return self.take(field, ..., allowed, lambda text: isinstance(text, str) and right(text))

    def texts(self, field: str) -> tuple[str, ...]:
        allowed = "a list of texts"
        return tuple(self.take(field, [], allowed, lambda texts: is_list(texts) and all(isinstance(text, str) for text in texts)))

    def positive(self, field: str, default: Any = ...) -> Any:
        return self.take(field, default, "a number above 0", lambda value: type(value) in (int, float) and value > 0)

    def whole(self, field: str, default: Any = ..., *, least: int = 0) -> Any:
        allowed = f"a whole number of at least {least}"
        return self.take(field, default, allowed, lambda value: type(value) is int and value >= least)

    def extent(self, field: str, default: Any = ...) -> tuple[int, ...]:
        allowed = "three whole numbers above 0"
        return tuple(self.take(field, default, allowed, lambda sizes: is_list(sizes, 3) and all(n > 0 for n in sizes)))

    def finish(self) -> None:
        if self.data:
            field, value = next(iter(self.data.items()))
            raise self.refusal(field, value, "absent: no such field is known")


def is_list(value: Any, of_numbers: int = 0) -> bool:
    """True for a list; if `of_numbers` is not 0, one of so many whole numbers."""
    return isinstance(value, list) and (not of_numbers or [type(each) for each in value] == [int] * of_numbers)


@cache
def devices() -> frozenset[str]:
    """The names of cupyflash's catalogue and of the devices that it lacks."""
    catalogue = tomllib.loads((FOLDER.parents[1] / "cupyflash" / "devices.toml").read_text())
    return frozenset(catalogue) | frozenset(MISSING)


def ladders(folder: Path = FOLDER) -> tuple[Ladder, ...]:
    """Read all ladders of a folder, in the order of their names; raises ValueError as `read` does."""
    return tuple(read(path) for path in sorted(folder.glob("*.toml")))


def read(path: Path) -> Ladder:
    """Read one ladder; raises ValueError, which names file and field, if a field is missing, unknown or not of its form."""
    try:
        table = Table(path, "", tomllib.loads(path.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name}: not TOML: {error}") from None
    unit = table.text("unit", among=(*RATES, *TIMES))
    counted = RATES[unit][0] if unit in RATES else table.text("counted", among=("FLOP", "bytes"))
    compiler, every = compiler_of(table), table.take("every", {})
    every = {"commit": table.text("commit", like=COMMIT), "group": table.text("group", among=GROUPS), **every}
    steps = table.take("step", ..., "a list of tables", lambda steps: is_list(steps) and steps)
    ladder = Ladder(
        name=path.stem,
        title=table.text("title"),
        use=table.text("use", among=USES),
        repository=table.text("repository", like=REPOSITORY),
        figures=table.text("figures"),
        device=table.text("device", among=sorted(devices())),
        clock=clock_of(table),
        compiler=compiler,
        timing=table.text("timing"),
        series=table.whole("series", None, least=1),
        warm=table.whole("warm", None),
        spread=table.positive("spread", None),
        unit=unit,
        counted=counted,
        steps=tuple(step_of(path, number, step, every, unit, compiler.needs) for number, step in enumerate(steps, 1)),
        library=library_of(table),
        notes=table.texts("notes"),
    )
    names = [step.name for step in ladder.steps]
    if len(set(names)) < len(names):
        raise table.refusal("step", names, "tables whose names differ")
    table.finish()
    return ladder


def clock_of(ladder: Table) -> Clock:
    table = Table(ladder.path, "clock", ladder.take("clock"))
    allowed = "a lowest and a highest rate, whole numbers above 0"
    mhz = table.take("mhz", ..., allowed, lambda mhz: is_list(mhz, 2) and 0 < mhz[0] <= mhz[1])
    clock = Clock((mhz[0], mhz[1]), table.text("source"), table.positive("memory_mhz", None), table.positive("watts", None))
    table.finish()
    return clock


def compiler_of(ladder: Table) -> Compiler:
    table = Table(ladder.path, "compiler", ladder.take("compiler"))
    architecture = table.text("architecture", like=r"sm_\d+a?")
    options, needs = table.texts("options"), table.text("needs", among=NEEDS)
    apart = table.take("apart", False, "true or false", lambda value: type(value) is bool)
    compiler = Compiler(table.text("version"), architecture, options, needs, apart, table.texts("notes"))
    table.finish()
    return compiler


def library_of(ladder: Table) -> Mapping[str, float]:
    table = Table(ladder.path, "library", ladder.take("library", {}))
    return {name: table.positive(name) for name in list(table.data)}


def step_of(path: Path, number: int, data: Any, every: Mapping[str, Any], unit: str, needs: str) -> Step:
    named = data.get("name") if isinstance(data, dict) else None
    table = Table(path, f"step {number}" if named is None else f"step {named!r}", data, every)
    of_launch = ("kernel", "grid", "block", "cluster", "shared", "arguments")
    common = {field: table.data.pop(field) for field in of_launch if field in table.data}
    launches = table.take("launch", [{}], "a list of tables", lambda launches: is_list(launches) and launches)
    figure, work = table.positive("figure"), table.whole("work", least=1)
    step = Step(
        name=table.text("name"),
        figure=figure,
        seconds=work / (figure * RATES[unit][1]) if unit in RATES else figure * TIMES[unit],
        work=work,
        group=table.text("group", among=GROUPS),
        file=table.text("file"),
        commit=table.text("commit", like=COMMIT),
        launches=tuple(launch_of(Table(path, table.where, launch, common), needs) for launch in launches),
        notes=table.texts("notes"),
    )
    table.finish()
    return step


def launch_of(table: Table, needs: str) -> Launch:
    grid, block, cluster = table.extent("grid"), table.extent("block"), table.extent("cluster", [1, 1, 1])
    if prod(block) > 1024:
        raise table.refusal("block", list(block), "at most 1,024 threads")
    if any(blocks % size for blocks, size in zip(grid, cluster, strict=True)):
        raise table.refusal("cluster", list(cluster), f"divisors of the grid, {list(grid)}")
    arguments = table.take("arguments", None)
    shared = table.whole("shared", None)
    if needs == NEEDS[0] and (arguments is None or shared is None):
        raise table.refusal("arguments" if arguments is None else "shared", None, f"given, since {NEEDS[0]} are enough to build it")
    read_arguments = None if arguments is None else arguments_of(table, arguments)
    launch = Launch(table.text("kernel"), grid, block, cluster, shared, read_arguments)
    table.finish()
    return launch


def arguments_of(table: Table, arguments: Any) -> tuple[Argument, ...]:
    """The arguments, each of them a text or, for a struct by value, a list of texts."""
    if not isinstance(arguments, list):
        raise table.refusal("arguments", arguments, "a list")
    for text in (member for argument in arguments for member in (argument if isinstance(argument, list) else [argument])):
        if not isinstance(text, str) or not ARGUMENT.fullmatch(text):
            allowed = "'TYPE NUMBER', 'TYPE[SIZES]', 'map TYPE[SIZES] box [SIZES] swizzle N' or 'null'"
            raise table.refusal("arguments", text, allowed)
    return tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments)
