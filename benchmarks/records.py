"""The results of a benchmark, a line of JSON at a time, and the limit of its time.

A line is written and flushed as soon as it is known, so that earlier lines survive whatever ends a run. Its `kind`:

    run          what is timed and on what: device, versions, commit
    measurement  one implementation on one case: what it took, or the `error` that it raised
    ring         one way of splitting a case over ranks: what it took, beside one device and the model
    rate         a constant of the clock model: its `value` and `spread` over repeats, and the table's value with its source
    extra        something beside the measurements by `name`: its `value`, or the `error` that it raised
    left_out     cases for which no time was left
    test         a test that failed; `tests` has the counts
    end          why the run ended, and how long it took

No line names the user, the machine or a folder of theirs.
"""

from __future__ import annotations

import datetime
import getpass
import json
import math
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from checkout import ROOT

from cupyflash.basics import Report, Values

LONGEST_TEXT = 300


class Records:
    """A JSON Lines file that is being written.

    `path` is a file that ends in .jsonl, which lines are added to, or a folder, in which a new file gets `name` and the date.
    """

    def __init__(self, path: Path, name: str) -> None:
        if path.suffix != ".jsonl":
            path = _unused(path, f"{name.replace(' ', '-')}-{datetime.date.today().isoformat()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, kind: str, line: Values) -> None:
        self._file.write(json.dumps(finite({"kind": kind, **line}), allow_nan=False) + "\n")
        self._file.flush()

    def extra(self, name: str, found: Callable[[], Any]) -> Any:
        """Writes what `found` gives, or what it raised; gives the same, or None."""
        line = {"name": name, **attempt(found)}
        self.write("extra", line)
        return line.get("value")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def _unused(folder: Path, stem: str) -> Path:
    """A file of the folder that is not there yet: results of the same day stand beside each other."""
    names = (folder / f"{stem}{'' if number == 1 else f'-{number}'}.jsonl" for number in range(1, 1000))
    return next(path for path in names if not path.exists())


def read_rows(path: Path) -> list[Report]:
    """Returns the rows of a file that `write_rows` wrote; none if it is not there."""
    return json.loads(path.read_text()) if path.exists() else []


def write_rows(path: Path, rows: Iterable[Any]) -> None:
    """Writes dataclasses as a list in JSON, a line each, so that a diff shows which have changed."""
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in rows) + "\n]\n")


def finite(value: Any) -> Any:
    """The same without NaN and infinities, which JSON does not have: they become None."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def attempt(found: Callable[[], Any]) -> Report:
    """{"value": what it gives}, or {"error": what it raised, in short}. Only what ends the program goes through."""
    try:
        return {"value": found()}
    except Exception as error:
        return {"error": told(error)}


def told(error: BaseException) -> str:
    """An exception on one short line."""
    return anonymous(f"{type(error).__name__}: {error}")


def anonymous(text: str, longest: int = LONGEST_TEXT) -> str:
    """A text on one line of bounded length, without the names of user and machine and the folders that they are in."""
    for folder, name in ((ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    text = re.sub(r"/(home|Users)/[^/\s'\"]+", r"/\1/-", text)
    for name in _own_names():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", "-", text)
    return " ".join(text.split())[:longest]


def _own_names() -> list[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        user = "root"
    return [name for name in (user, platform.node()) if name not in ("", "root", "localhost")]


def command_output(command: list[str], seconds: float) -> str:
    """The output of a program. RuntimeError with the end of its messages if it fails or takes too long."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{Path(command[0]).name}: not done in {seconds:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: exit status {done.returncode}: {(done.stderr or done.stdout)[-200:]}")
    return done.stdout


def commit() -> str:
    """The commit that is measured, marked where files differ from it."""
    return command_output(["git", "describe", "--always", "--dirty", "--abbrev=40"], 10).strip()


class Budget:
    """Seconds that a run may take."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start, self._seconds = clock, clock(), seconds

    def spent(self) -> float:
        return self._clock() - self._start

    def left(self) -> float:
        return self._seconds - self.spent()
