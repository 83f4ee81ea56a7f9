"""Output to a terminal, with rich and without: tables, colours, progress. Pipes get plain text."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupyflash.sim.cli import main, profile, terminal
from cupyflash.sim.clock import timed
from cupyflash.sim.clock.sass import disassembler
from cupyflash.sim.ptx.execute import scheduler
from suites import wide

ROOT = Path(__file__).resolve().parent.parent
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PREDICTION = ("predict", "--seqlen", "4096", "--head-dim", "64")
WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from cupyflash.sim.cli import main; main(prog_name='cupyflash')"


def on_terminal(*arguments: str, columns: int = 100, program: tuple[str, ...] = ("-m", "cupyflash"), **more: str) -> str:
    """The text that a command writes to a terminal so wide, on stdout and stderr."""
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment = own | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TERM": "xterm-256color"} | more
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, columns))
    process = subprocess.Popen([sys.executable, *program, *arguments], env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written = b"".join(read(master))
    assert process.wait() == 0, written
    return written.decode().replace("\r\n", "\n")


def read(file: int) -> Iterator[bytes]:
    """All that a terminal gets; Linux ends it by an error."""
    try:
        while part := os.read(file, 65536):
            yield part
    except OSError:
        pass
    finally:
        os.close(file)


def words(shown: str) -> list[str]:
    """The words in a text, without colours and rules."""
    return [word for word in re.sub("[─━]", "", ESCAPE.sub("", shown)).split() if word]


@pytest.mark.parametrize("columns", [60, wide(100)])
def test_a_terminal_gets_tables_and_colours_by_rich_with_the_same_words(columns: int) -> None:
    pytest.importorskip("rich")
    shown = on_terminal(*PREDICTION, columns=columns)
    plain = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, PREDICTION).stdout
    assert "─" in shown and "\x1b[1m" in shown and "\x1b[32magrees\x1b[0m" in shown
    assert words(shown) == words(plain)
    assert max(len(ESCAPE.sub("", line).rstrip()) for line in shown.splitlines()) <= columns


def test_titles_of_columns_stand_over_their_tables() -> None:
    pytest.importorskip("rich")
    program = (
        "from cupyflash.sim.cli.show import show_table\n"
        "show_table(('t', 'a', 'b', 'a', 'b'), [('Q', *'1234'), ('total', *'5678')], titles=('', *['one'] * 2, *['other'] * 2))"
    )
    title, heads, rule, first, total = ESCAPE.sub("", on_terminal(program=("-c", program))).splitlines()
    assert title.split() == ["one", "other"] and heads.split() == ["t", "a", "b", "a", "b"] and set(rule) == {" ", "─"}
    assert first.split() == ["Q", *"1234"] and total.split() == ["total", *"5678"]
    assert [first.index(n) for n in "1234"] == [total.index(n) for n in "5678"]


@pytest.mark.parametrize("without", ["rich", wide("colours"), wide("a terminal that can")])
def test_without_rich_or_colours_a_terminal_gets_what_a_pipe_gets(without: str) -> None:
    if without == "rich":
        shown = on_terminal(*PREDICTION, program=("-c", WITHOUT_RICH))
    elif without == "colours":
        shown = ESCAPE.sub("", on_terminal(*PREDICTION, NO_COLOR="1").replace("\x1b[1m", ""))
    else:
        shown = on_terminal(*PREDICTION, TERM="dumb")
    assert "\x1b" not in shown
    assert words(shown) == words(CliRunner(env={"COLUMNS": "100"}).invoke(main, PREDICTION).stdout)


def test_a_pipe_gets_plain_text() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TERM": "xterm-256color"}
    for arguments in (("sweep", "--over", "sram", "--points", "2"), ("predict", "--help"), ("nosuch",)):
        program = [sys.executable, "-m", "cupyflash", *arguments]
        ended = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert "\x1b" not in ended.stdout + ended.stderr


def test_help_and_errors_have_colours_on_a_terminal_only() -> None:
    program = "from cupyflash.sim.cli import main\ntry: main(['nosuch'])\nexcept SystemExit as end: assert end.code == 2"
    assert "\x1b[31m\x1b[1mError:\x1b[0m No such command" in on_terminal(program=("-c", program))
    assert re.search(r"^(\x1b\[\d+m)+Sizes\x1b\[0m:$", on_terminal("predict", "--help"), re.MULTILINE)
    assert "\x1b" not in on_terminal("predict", "--help", NO_COLOR="1")


REPORT = """k (k.cu), sm_80
Simulated.

Findings: 1 lane at 1 place
  k.cu:5: race: read at offset 0x20; likely mend: __syncthreads()

Shared memory: 5 bytes
"""


def test_a_report_of_findings_has_headings_findings_and_mends_in_colour(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_report(REPORT)
    assert capsys.readouterr().out == REPORT
    pytest.importorskip("rich")
    shown = on_terminal(program=("-c", f"from cupyflash.sim.cli import terminal; terminal.show_report({REPORT!r})"))
    assert ESCAPE.sub("", shown) == REPORT
    assert re.findall(r"\x1b\[1m(.*?)\x1b\[0m", shown) == [
        "k (k.cu), sm_80",
        "Findings: 1 lane at 1 place",
        "Shared memory: 5 bytes",
    ]
    assert ": \x1b[1;31mrace\x1b[0m: " in shown and "\x1b[32mlikely mend: \x1b[0m" in shown


# -- progress -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimate", "said"), [(None, ""), (1.9, ""), (12.3, " (about 12 s in all)")])
def test_lines_of_progress_have_the_estimate_of_what_is_long_once(
    estimate: float | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.progress(estimate) as steps:
        steps.begin("one")
        steps.begin("two")
        steps.expect(33)
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"one{said} ...\ntwo ...\nabout 33 s in all ...\n")


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    pytest.importorskip("rich")
    program = (
        "import time; from cupyflash.sim.cli import terminal\n"
        "with terminal.progress(5.0) as steps:\n"
        "    steps.begin('first'); time.sleep(0.3); steps.begin('second'); steps.expect(7.0); time.sleep(0.3)\n"
        "print('over')"
    )
    shown = on_terminal(program=("-c", program))
    text = ESCAPE.sub("", shown)
    assert "of about 5 s first" in text and "of about 7 s second" in text and "━" in text
    assert text.rstrip().endswith("over") and shown.rstrip().endswith("\x1b[2Kover")  # the line was cleared


def test_a_loop_says_how_long_it_takes_if_that_is_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for each, said in ((0.1, ""), (1.0, "counting: 1 of 10, about 18 s left ...\n")):
        now = iter(range(100))
        monkeypatch.setattr(terminal.time, "monotonic", lambda now=now, each=each: next(now) * each)
        assert list(terminal.tracked(range(10), "counting")) == [*range(10)]
        assert capsys.readouterr().err == said


def test_a_long_launch_of_profile_has_an_estimate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profile, "LONG_SECONDS", 1e-6)
    monkeypatch.setattr(scheduler, "FEW_SECONDS", 0)
    kernel = tmp_path / "k.ptx"
    kernel.write_text(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n    ret;\n}\n")
    result = CliRunner().invoke(main, ["profile", str(kernel), "--grid", "20000", "--block", "32", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["grid"] == [20000, 1, 1]
    assert re.search(r"\.\.\.\nabout \d+ s in all \.\.\.\n", result.stderr), result.stderr


@pytest.mark.wide
@pytest.mark.parametrize(("each", "said"), [(0.0, False), (60.0, True)])
def test_a_long_run_of_the_clock_has_an_estimate(each: float, said: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not disassembler():
        pytest.skip("the extra clock brings the disassembler")
    monkeypatch.setattr(timed, "SECONDS", each)
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(float* x) { x[threadIdx.x] = 1; }')
    arguments = ["--args", '{"x": {"shape": [32]}}', "--grid", "1", "--block", "32", "--device", "A100-40GB"]
    result = CliRunner().invoke(main, ["time", str(source), *arguments, "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["kernel"] == "k"
    assert ("about 6" in result.stderr) is said, result.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    "command", ["demo --seqlen 64 --heads 1", "verify --seqlen 64", "trace --seqlen 64 --sram 16KB --algorithms fa1"]
)
def test_commands_that_execute_for_long_say_how_long(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LONG_SECONDS", 1e-6)
    result = CliRunner().invoke(main, command.split())
    assert result.exit_code == 0 and re.search(r"\(about \d+ s in all\) \.\.\.", result.stderr.splitlines()[0])
