"""The options by which `profile` and `run` report findings: formats, what fails, suppressions, and running again on each change."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupyflash.basics import Report, Values
from cupyflash.sim.cli.group import Found, orderly
from cupyflash.sim.cli.help import format_names
from cupyflash.sim.cli.options import Command, NewFile
from cupyflash.sim.names import FAIL_ON, FORMATS
from cupyflash.words import plural

if TYPE_CHECKING:
    from cupyflash.sim import formats

POLL_SECONDS = 0.3


def asked(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path | None]:
    """KIND or KIND=FILE, each: the files by kind, None for stdout."""
    found: dict[str, Path | None] = {}
    for value in values:
        kind, named, file = value.partition("=")
        if kind not in FORMATS:
            raise click.BadParameter(f"{value!r} is none of {', '.join(FORMATS)}, with =FILE or without", context, param)
        if kind in found:
            raise click.BadParameter(f"{kind} is there twice", context, param)
        found[kind] = NewFile().convert(file, param, context) if named else None
    if list(found.values()).count(None) > 1:
        raise click.BadParameter("only one format can go to stdout: give others a file, as in sarif=found.sarif", context, param)
    return found


@dataclass(frozen=True)
class FindingsReport:
    """The formats that are asked for, and the severity that fails the command."""

    forms: Mapping[str, Path | None]
    as_json: bool
    fail_on: str

    @property
    def all_forms(self) -> dict[str, Path | None]:
        """Returns the formats and their files (None: stdout); the text is among them unless something else goes to stdout."""
        forms = dict(self.forms)
        if self.as_json:
            if None in forms.values():
                raise click.UsageError("--json is --format json: no other format can go to stdout beside it")
            forms["json"] = None
        return forms if None in forms.values() or "text" in forms else {**forms, "text": None}

    def tell(
        self,
        checked: formats.CheckedKernels,
        as_text: Callable[[], str],
        as_data: Callable[[], Report],
        where: str,
        text_to_stderr: bool = False,
    ) -> None:
        """Prints and writes the report. Raises Found if something fails the command; `where`, its end: in the kernel."""
        from cupyflash.sim import files, formats
        from cupyflash.sim.cli import terminal

        for kind, path in self.all_forms.items():
            if kind == "text":
                content = as_text() + "\n"
            elif kind == "json":
                content = json.dumps(as_data(), indent=2) + "\n"
            else:
                content = formats.WRITERS[kind](checked)
            if path is None and kind == "text":
                terminal.show_report(content, text_to_stderr)
            elif path is None:
                click.echo(content, nl=False)
            else:
                files.write(path, content)
                click.echo(f"wrote {path}", err=True)
        faults = [one for one in checked.findings if one.severity in FAIL_ON[self.fail_on]]
        if faults:
            raise Found(f"the machine found {plural(len(faults), 'fault')} in {where}")


SUPPRESSIONS = click.option(
    "--suppressions",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=lambda context, param, value: value or (),
    metavar="FILE",
    help="A file of allowed findings, one a line: KIND KERNEL FILE[:LINE] REASON. The report counts them.",
)
_OPTIONS = (
    click.option(
        "--format",
        "forms",
        multiple=True,
        callback=asked,
        metavar="KIND[=FILE]",
        shell_complete=format_names,
        help=f"The report's format, to stdout or to a file; may be repeated: {', '.join(FORMATS)}.",
    ),
    click.option("--json", "as_json", is_flag=True, help="As --format json."),
    click.option(
        "--fail-on",
        type=click.Choice(tuple(FAIL_ON)),
        default="warning",
        show_default=True,
        help="Exit with status 1 for a finding of this severity or a worse one.",
    ),
)


def findings_report(command: Command) -> Command:
    """Decorate a command with the options of `FindingsReport` and of suppressions."""
    for option in reversed((SUPPRESSIONS, *_OPTIONS)):
        command = option(command)
    return command


def watched(sources: Callable[[Values], Iterable[Path]]) -> Callable[[Command], Command]:
    """Decorate a command with --watch. `sources`: of its options, the files and folders that it depends on."""

    def decorate(command: Command) -> Command:
        @click.option("--watch", is_flag=True, help="Run again whenever a source, or a file beside it, changes; Ctrl-C ends it.")
        @functools.wraps(command)
        def run(*args: Any, watch: bool, **given: Any) -> None:
            if not watch:
                command(*args, **given)
                return
            paths = [*sources(given)]
            while True:
                before = states(paths)
                try:
                    with orderly():
                        command(*args, **given)
                except click.ClickException as error:
                    error.show()
                except SystemExit as end:
                    click.echo(f"exit status {end.code}", err=True)
                click.echo(f"waiting for a change of {', '.join(map(str, paths))} ...", err=True)
                while states(paths) == before:
                    time.sleep(POLL_SECONDS)

        return run

    return decorate


WATCHED = (".cu", ".cuh", ".h", ".hpp", ".inl", ".c", ".cc", ".cpp", ".cxx", ".ptx", ".json", ".npy")


def states(paths: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Returns the time of change and the size of files, and of the sources in their folders."""
    found = {}
    for path in paths:
        folder = path if path.is_dir() else path.parent
        beside = [each for each in folder.iterdir() if each.suffix in WATCHED] if folder.is_dir() else []
        for file in (path, *beside):
            try:
                at = file.stat()
            except OSError:
                continue
            if file.is_file():
                found[file] = at.st_mtime_ns, at.st_size
    return found
