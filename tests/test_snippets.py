"""Every fenced block of every page is run here, or says which test runs it, or why nobody does."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from contextlib import suppress
from pathlib import Path

import click
import pytest

from cupyflash.sim.cli import main
from snippets import ROOT, Session, commands, pages, read
from suites import sample

# Pages that take no second; the others are run in the wide suite, and here their blocks are only read.
QUICK = ["check_in_ci", "internals", "profile", "ptx", "ring_traffic", "witnesses"]
# Blocks that no test runs
NOT_RUN = {"docs/check_in_ci.md": 1, "docs/found.md": 32, "docs/profile.md": 1}


@pytest.mark.parametrize("page", sample(pages(), [f"docs/{name}.md" for name in QUICK]))
def test_the_page_runs_and_claims_the_truth(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session()
    for block in pages()[page]:
        session.run(block)


HONEST = """
<!-- x.json -->
```json
[3]
```
<!-- smaller: 1000 => 2 -->
```python
import json

x = json.load(open("x.json"))  # [4]
n = 1000
x * n  # [3, 3]
def test_it():
    assert n == 2
print(x, "error 1.25e-03")
```
```text
error 1.33e-03
```
```sh
cupyflash predict --seqlen '64' --head-dim $((30 + 2)) --algorithm \\
  standard
```
```text
  total       36,864         20,480
```
"""


def test_a_page_is_run_from_its_first_block_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session()
    for block in read("a page", HONEST):
        session.run(block)
    assert session.names["n"] == 2 and session.names["x"] == [3]


@pytest.mark.parametrize(
    ("honest", "false"),
    [
        ("# [3, 3]", "# [3, 4]"),
        ("error 1.33e-03", "an error 1.33e-03"),
        ("error 1.33e-03", "error 1.33e-04"),
        ("36,864", "36,865"),
        ("--seqlen '64'", "--seqlen '-64'"),
        ("cupyflash predict", "flash predict"),
        ("assert n == 2", "assert n == 3"),
        ("1000 =>", "2000 =>"),
        ("smaller:", "shorter:"),
        ("```json", "```yaml\n```\n```json"),
    ],
)
def test_what_is_false_is_noticed(honest: str, false: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert honest in HONEST
    session = Session()
    with pytest.raises(AssertionError):
        for block in read("a page", HONEST.replace(honest, false, 1)):
            session.run(block)


@pytest.mark.parametrize("page", pages())
def test_every_block_can_be_read_and_has_who_runs_it(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python compiles, commands are understood, extras exist, and the test that a block names speaks of its page or program."""
    monkeypatch.chdir(tmp_path)
    for block in pages()[page]:
        if "run by" in block.marks:
            program = re.search(r"(\w+)\.py", block.text)
            words = (Path(page).name, program[1]) if program else (Path(page).name,)
            assert any(word in (ROOT / block.marks["run by"]).read_text() for word in words), block
        elif block.language == "python":
            compile(block.here, page, "exec")
        elif block.language == "sh":
            for words in commands(block):
                understood(words)
        else:
            assert block.language == "text" or block.file or "not run" in block.marks, block


def understood(words: list[str]) -> None:
    """True if a command's options exist, its JSON is JSON, and the extras that are installed exist."""
    if words[0] == "cupyflash":
        for word in words:
            if re.fullmatch(r"[\w.-]+\.(cu|ptx)", word):
                Path(word).touch()
            if word[0] in "{[":
                json.loads(word)
        main.commands[words[1]].make_context(words[1], words[2:])
    if words[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = [extra for word in words for extra in re.findall(r"\.\[([\w,]+)\]", word)]
        assert asked and set(",".join(asked).split(",")) <= extras.keys()


@pytest.mark.parametrize("page", [str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]])
def test_commands_in_a_line_are_understood(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that have options, and no dots for more of them."""
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"`(cupyflash \w+ [^`]*--[^`]*)`", (ROOT / page).read_text()):
        if "..." not in line:
            with suppress(click.MissingParameter):  # one is spoken of by what matters there
                understood(shlex.split(line))


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_an_example_is_called_as_its_first_line_says(path: Path) -> None:
    """Its options exist, and a test runs it."""
    source = path.read_text()
    name, options = re.search(r"python examples/(\w+\.py)(.*)", source.splitlines()[0]).groups()  # type: ignore[union-attr]
    assert name == path.name and re.findall(r"--\w+", options)
    assert all(f'add_argument("{option}"' in source for option in re.findall(r"--\w+", options))
    assert any(re.search(rf"\b{path.stem}\b", test.read_text()) for test in (ROOT / "tests").glob("test_*.py"))


def test_blocks_that_nobody_runs_are_counted() -> None:
    found = {page: sum("not run" in block.marks for block in blocks) for page, blocks in pages().items()}
    assert {page: count for page, count in found.items() if count} == NOT_RUN
    assert all(block.marks["not run"] for blocks in pages().values() for block in blocks if "not run" in block.marks)
