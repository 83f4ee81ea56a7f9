"""Help and completion: what they load and take, options in groups, names that are nearly right, what a shell completes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from click.testing import CliRunner

from cupyflash import Device
from cupyflash.basics import FLAGS
from cupyflash.request.options import OPTIONS
from cupyflash.schedules import ALGORITHMS
from cupyflash.sim import formats
from cupyflash.sim.cli import main
from cupyflash.sim.cli.help import GROUPS
from cupyflash.sim.names import FIGURES, FORMATS, NAMES
from cupyflash.sim.pictures import paper

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("numpy", "cupy", "cupyflash.schedules", "cupyflash.kernels_cu", "cupyflash.request.problem", "cupyflash.sim.ptx")
LOADED = """
import json, os, sys
from contextlib import redirect_stdout, suppress
from cupyflash.sim.cli import main
with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
    for words in json.loads(sys.argv[1]):
        with suppress(SystemExit):
            main(words, prog_name="cupyflash")
    for words in json.loads(sys.argv[2]):
        os.environ |= {"_CUPYFLASH_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        with suppress(SystemExit):
            main(prog_name="cupyflash")
print(json.dumps(sorted(sys.modules)))
"""
COMPLETED = (
    ["cupyflash", "pre"],
    ["cupyflash", "predict", "--"],
    ["cupyflash", "verify", "--device", "H100-SXM", "--algorithm", "f"],
    ["cupyflash", "predict", "--device", "H"],
    ["cupyflash", "trace", "--algorithms", "fa1,f"],
)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(ROOT)}


def completions(*words: str) -> list[CompletionItem]:
    """The words that are offered for the last one."""
    return ShellComplete(main, {}, "cupyflash", "_CUPYFLASH_COMPLETE").get_completions(list(words[:-1]), words[-1])


def values(*words: str) -> list[str]:
    return [item.value for item in completions(*words)]


# -- instant ------------------------------------------------------------------------------------------------------------


def test_help_and_completion_load_neither_numpy_nor_a_kernel() -> None:
    helps = [["--help"], *([name, "--help"] for name in main.commands)]
    program = [sys.executable, "-c", LOADED, json.dumps(helps), json.dumps(COMPLETED)]
    loaded = json.loads(subprocess.run(program, env=environment(), check=True, capture_output=True, text=True).stdout)
    assert "cupyflash.sim.cli.commands.problems" in loaded and "cupyflash.device" in loaded  # whose names were completed
    assert not [name for name in loaded if any(name == heavy or name.startswith(f"{heavy}.") for heavy in HEAVY)]


def test_help_and_completion_take_at_most_three_times_an_import_of_click() -> None:
    """Processor time of whole processes, the least of a few."""

    def seconds(*program: str, **more: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *program], env=environment() | more, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    run = "import sys; sys.argv[0] = 'cupyflash'; from cupyflash.sim.cli import main; main()"
    words = {"_CUPYFLASH_COMPLETE": "bash_complete", "COMP_WORDS": "cupyflash predict --device H", "COMP_CWORD": "3"}
    kinds = {"click": lambda: seconds("-c", "import click"), "help": lambda: seconds("-c", run, "--help")}
    kinds |= {"of a command": lambda: seconds("-c", run, "predict", "--help"), "completion": lambda: seconds("-c", run, **words)}
    found = {kind: min(measure() for _ in range(3)) for kind, measure in kinds.items()}
    assert max(found.values()) <= 3 * found["click"], found


def test_names_that_help_has_are_those_of_what_computes() -> None:
    assert tuple(NAMES) == ALGORITHMS and tuple(paper.FIGURES) == FIGURES
    assert ("text", *formats.WRITERS, "json") == FORMATS
    assert {name: each.flag for name, each in OPTIONS.items() if each.flag} == FLAGS


# -- groups -------------------------------------------------------------------------------------------------------------


def test_each_option_is_in_one_group_of_its_commands_help() -> None:
    listed = [name for names in GROUPS.values() for name in names.split()]
    options = {param.name for command in main.commands.values() for param in command.params if isinstance(param, click.Option)}
    assert len(set(listed)) == len(listed) and set(listed) == options - {"help"}
    for name, command in main.commands.items():
        shown = CliRunner().invoke(main, [name, "--help"]).stdout
        titles = [line[:-1] for line in shown.splitlines() if line.endswith(":") and line[:-1] in GROUPS]
        own = {param.name for param in command.params}
        assert titles == [title for title, names in GROUPS.items() if title == "Output" or own & {*names.split()}], name
        assert "\nOptions:\n" not in shown


# -- names that are nearly right ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["prdict"], "'predict'"),
        (["veryfy", "--causal"], "'verify'"),
        (["predict", "--seqlne", "4"], "'--seqlen'"),
        (["predict", "--device", "H100SMX"], "H100-SXM"),
        (["predict", "--device", "RTX4091"], "RTX 4090"),
    ],
)
def test_a_name_that_is_nearly_right_is_suggested(words: list[str], meant: str) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert meant in result.stderr[result.stderr.casefold().index("did you mean") :]


def test_a_command_that_is_like_none_is_told_what_there_is() -> None:
    stderr = CliRunner().invoke(main, ["xyz"]).stderr
    assert "mean" not in stderr and all(name in stderr for name in main.commands)


# -- completion ---------------------------------------------------------------------------------------------------------


def test_a_shell_completes_commands_options_devices_algorithms_and_files() -> None:
    assert values("p") == ["predict", "paper", "profile"]
    assert values("predict", "--head") == ["--head-dim", "--head-dim-v", "--heads"]
    devices = values("predict", "--device", "")
    assert [Device.named(name) for name in devices] == list(Device.catalogue()) and not any(" " in name for name in devices)
    assert values("predict", "--device", "rtx-4") == ["RTX-4070-Ti-SUPER", "RTX-4090"]
    assert values("sweep", "--over", "s") == ["sram", "seqlen"]
    assert values("trace", "--algorithms", "fa1,fa") == ["fa1,fa1", "fa1,fa2", "fa1,fa3"]
    assert values("profile", "k.cu", "--format", "s") == ["sarif"]
    kinds = {
        ("predict", "--device", "my"): "file",
        ("profile", "k"): "file",
        ("profile", "k.cu", "--args", "s"): "file",
        ("profile", "k.cu", "-I", "i"): "dir",
        ("trace", "--html", "o"): "file",
        ("sweep", "--plot", "o"): "file",
        ("predict", "--results", "r"): "dir",
        ("paper", "--plot", "r"): "dir",
        ("run", "p"): "file",
        ("nvcc", "m"): "file",
    }
    for words, kind in kinds.items():
        assert [(item.type, item.value) for item in completions(*words)] == [(kind, words[-1])], words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_page_has_the_line_for_each_shell(shell: str) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert f"_CUPYFLASH_COMPLETE={shell}_source cupyflash" in page
    script = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'cupyflash'; from cupyflash.sim.cli import main; main()"],
        env=environment() | {"_CUPYFLASH_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
    ).stdout
    assert f"_CUPYFLASH_COMPLETE={shell}_complete" in script


# -- JSON ---------------------------------------------------------------------------------------------------------------


def test_every_command_takes_json() -> None:
    for name, command in main.commands.items():
        assert any("--json" in param.opts for param in command.params), name


def test_nvcc_tells_its_command_and_status_as_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho compiled; echo warned >&2; exit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    result = CliRunner().invoke(main, ["nvcc", "-c", "k.cu", "--json"])
    told = json.loads(result.stdout)
    assert result.exit_code == told["exit_status"] == 3 and told["output"].split() == ["compiled", "warned"]
    assert (
        told["command"][:3] == [str(compiler), "-c", "k.cu"] and "-lineinfo" in told["command"] and "--json" not in told["command"]
    )
