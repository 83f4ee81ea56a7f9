"""The fenced blocks of the pages, as tests/test_snippets.py runs them: a page is one session, from its first block to its last.

Python runs with the names that the blocks before left; a literal in the comment behind an expression is its value. Lines of a
shell are read by bash, and what they call is run here: `cupyflash`, and examples. `text` is what the block before printed, or a
part of it, letter by letter but for the digits of errors. A block may say more about itself, in comments directly above it:

    <!-- spec.json -->                      it is a file of that name, for the blocks below
    <!-- before: x = np.zeros(4) -->        Python that the block takes for granted, as everybody does who reads it
    <!-- smaller: n = 4096 => n = 256 -->   here that runs in place of this
    <!-- output of: cupyflash demo -->      what printed the text, where no block did
    <!-- run by tests/test_mpi.py -->       a test of its own runs it
    <!-- not run: needs nvcc -->            nobody does, and why
"""

from __future__ import annotations

import ast
import io
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

from cupyflash.sim.cli import main

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"((?:^<!-- (?:(?!-->).)* -->\n)*)^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!-- (.*?) -->$", re.MULTILINE | re.DOTALL)
MARKS = ("before", "smaller", "output of", "not run", "run by")
FILE = re.compile(r"[\w.-]+\.\w+")
# What a shell's lines may call. What prints text for others prints a word.
PROGRAMS = ("cupyflash", "git", "mpiexec", "nvcc", "pip", "python")
SHELL = "\n".join(
    [
        "set -eu; PATH=",
        *(f"{name}() {{ printf '%s\\0' $(($# + 1)) {name} \"$@\" >&3; }}" for name in PROGRAMS),
        *(f"{name}() {{ echo word; }}" for name in ("basename", "cat", "dirname", "grep", "head")),
    ]
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page's path in the repository, its line there, its language, its text, and what it says about itself."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def here(self) -> str:
        """Its text, smaller if it says so."""
        shown, smaller = self.marks.get("smaller", "=>").split("=>")
        assert shown.strip() in self.text, f"{self}: nothing to make smaller"
        return self.text.replace(shown.strip(), smaller.strip()) if shown else self.text


def read(page: str, text: str) -> list[Block]:
    """The blocks of a page; AssertionError where a comment above a block is none of those that this module knows."""
    blocks = []
    for found in FENCED.finditer(text):
        above, language, inside = found.groups()
        line, marks, file = text[: found.start(2)].count("\n") + 1, {}, None
        for comment in COMMENT.findall(above):
            mark = next((mark for mark in MARKS if comment.startswith(mark)), None)
            if mark:
                marks[mark] = comment.removeprefix(mark).lstrip(":").strip()
            elif FILE.fullmatch(comment):
                file = comment
            else:
                assert comment == "two commands", f"{page}:{line}: what is '{comment}'?"  # .ci/run's
        blocks.append(Block(page, line, language, inside, marks, file))
    return blocks


@cache
def pages() -> dict[str, list[Block]]:
    """The blocks of every page that has any."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    found = {str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)}
    assert all(len(re.findall("^```", text, re.MULTILINE)) == 2 * len(read(page, text)) for page, text in found.items())
    return {page: blocks for page, text in found.items() if (blocks := read(page, text))}


def commands(block: Block) -> list[list[str]]:
    """The commands in a shell's lines, each as its words, as bash reads them."""
    called = subprocess.run(["bash", "-c", f"exec 3>&1 >&2\n{SHELL}\n{block.here}"], capture_output=True, text=True)
    assert called.returncode == 0 and not called.stderr.replace("word\n", ""), f"{block}: {called.stderr}"
    words, found = iter(called.stdout.split("\0")[:-1]), []
    for count in words:
        found.append([next(words) for _ in range(int(count))])
    return found


@cache
def printed(words: tuple[str, ...]) -> str:
    """The output of a command that needs no file and writes none."""
    return run_command(words)


def run_command(words: tuple[str, ...]) -> str:
    result = CliRunner().invoke(main, words[1:])
    assert result.exit_code == 0, f"{shlex.join(words)}: {result.output}"
    return result.stdout


def run_example(words: list[str]) -> str:
    """A program of this repository, as `python examples/name.py --option`."""
    with redirect_stdout(io.StringIO()) as told, mock.patch.object(sys, "argv", words[1:]):
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    return told.getvalue()


def claims(source: str) -> Iterator[tuple[ast.stmt, Any]]:
    """The statements of a source, each with the value that its comment claims, or `...`."""
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    for statement in ast.parse(source).body:
        value = ...
        if isinstance(statement, ast.Expr) and statement.end_lineno in comments:
            with suppress(ValueError, SyntaxError):  # words
                value = ast.literal_eval(comments[statement.end_lineno])
        yield statement, value


def masked(text: str) -> str:
    """A text without what differs between machines: the digits of errors, the folders of sources."""
    return re.sub(r"/\S+/(?=\w+\.cu:\d)", "", re.sub(r"\d\.\d+(?=e-\d)", "#.##", text))


@dataclass
class Session:
    """A page that is run in the current folder: its names, and what its last block printed."""

    names: dict[str, Any] = field(default_factory=dict)
    told: str = ""

    def run(self, block: Block) -> None:
        """Runs a block or holds it against what is known; AssertionError where it claims what is not so."""
        if block.marks.keys() & {"not run", "run by"}:
            return
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            with redirect_stdout(io.StringIO()) as told:
                self._python(block)
            self.told = told.getvalue()
        elif block.language == "sh":
            exec(block.marks.get("before", ""), self.names)
            self.told = "".join(self._shell(block, words) for words in commands(block))
        else:
            assert block.language == "text", f"{block}: neither run nor marked"
            if "output of" in block.marks:
                self.told = printed(tuple(shlex.split(block.marks["output of"])))
            assert masked(block.text) in masked(self.told), f"{block} is not what is printed:\n{self.told}"

    def _python(self, block: Block) -> None:
        exec(block.marks.get("before", ""), self.names)
        for statement, value in claims(block.here):
            if value is ...:
                # Lines are the page's: tracebacks show them, and the machine finds kernels by them.
                exec(compile(ast.Module([statement], []), block.page, "exec"), self.names)
            else:
                assert isinstance(statement, ast.Expr)
                found = eval(compile(ast.Expression(statement.value), block.page, "eval"), self.names)
                assert found == value, f"{block}: {ast.unparse(statement)} is {found}, not {value}"
            if isinstance(statement, ast.FunctionDef) and statement.name.startswith("test_"):
                self.names[statement.name]()

    def _shell(self, block: Block, words: list[str]) -> str:
        if words[0] == "cupyflash":
            return run_command(tuple(words))
        if words[0] == "python":
            return run_example(words)
        assert words[0] == "pip", f"{block}: {words[0]} is not run here"
        return ""
