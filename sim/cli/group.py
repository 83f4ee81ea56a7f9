"""The end of a command: quiet, or with one line on stderr, and an exit status that says which."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import click

from cupyflash.sim.cli.help import HelpContext, coloured

if TYPE_CHECKING:
    from cupyflash.launch.nvrtc import CompileError

WRONG_INPUT = 2
INTERRUPTED = 130  # as shells say that SIGINT ended a command, and
PIPE_CLOSED = 141  # that SIGPIPE did

EXIT_STATUS = f"""\b
Exit status:
  0    all is well
  1    a finding or a disagreement: the report says which
  {WRONG_INPUT}    wrong input, or something that is missing: one line on stderr
  {INTERRUPTED}  interrupted"""


class OneLine(click.ClickException):
    """An error that is printed in one line, without the usage above it."""

    exit_code = WRONG_INPUT

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"{coloured('Error:', bold=True, fg='red')} {self.format_message()}", file=file, err=file is None)


class Found(OneLine):
    """A finding or a disagreement, reported after the output."""

    exit_code = 1


class CommandLine(click.Group):
    """Commands in the order of a first tour; every error is one line and has its exit status."""

    context_class = HelpContext

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and args[0] not in self.commands and not args[0].startswith("-"):
            import difflib  # only an error needs it

            close = difflib.get_close_matches(args[0], self.commands)
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else f" Commands are {', '.join(self.commands)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with orderly():  # without a command, help is what is wanted
            return super().make_context(info_name, args or ["--help"], parent, **extra)

    def invoke(self, context: click.Context) -> Any:
        with orderly():
            return super().invoke(context)


@contextmanager
def orderly() -> Iterator[None]:
    """Turn errors that end a command into one line on stderr, or nothing, and an exit status."""
    try:
        yield
    except BrokenPipeError:  # the reader has had enough, as of `| head`
        drop_output()
        sys.exit(PIPE_CLOSED)
    except KeyboardInterrupt:
        click.echo("\ninterrupted", err=True)
        sys.exit(INTERRUPTED)
    except click.UsageError as error:
        raise wrong_input(error.format_message()) from error
    except OSError as error:
        drop_output()
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error.strerror
        raise wrong_input(named or str(error)) from error
    except MemoryError as error:
        raise wrong_input(f"not enough memory: {error}") from error
    except (ValueError, TypeError, OverflowError, ImportError) as error:
        raise wrong_input(str(error)) from error
    except RuntimeError as error:
        compiler = sys.modules.get("cupyflash.launch.nvrtc")  # which help does not load
        if compiler is None or not isinstance(error, compiler.CompileError):
            raise
        raise wrong_input(first_error(error)) from error


def wrong_input(text: str) -> OneLine:
    """An error that ends the command with exit status 2."""
    return OneLine(" ".join(text.split()))


def drop_output() -> None:
    """Drop output that cannot be written any more: it would fail again when Python ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except AttributeError:  # closed before Python began
            pass


def first_error(error: CompileError) -> str:
    """A compiler's log in one line: its first error, the number of others, what to do about it."""
    errors = [line for line in error.log.splitlines() if re.search(r"\berror\b[^:]*:", line)] or [error.log]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return " ".join(errors[0].split()) + more + (f"; {error.advice}" if error.advice else "")
