"""The command line without a compiler: predict and devices, help, widths, exit statuses. The demo is in test_demo.py."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.launch.simulated import refuse_findings
from cupyflash.schedules import BACKWARD_ALGORITHMS, plan_backward
from cupyflash.sim import text, theory
from cupyflash.sim.cli import main
from cupyflash.sim.cli.group import INTERRUPTED, PIPE_CLOSED
from cupyflash.sim.traffic import Traffic
from cupyflash.words import plural

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("demo", "learn", "predict", "verify", "trace", "sweep", "paper", "explain", "inspect", "profile", "check", "run")
COMMANDS += ("nvcc", "time", "devices")


def cupyflash(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def predict(*more: str) -> dict[str, object]:
    result = cupyflash("predict", "--seqlen", "1000", "--head-dim", "64", *more, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
@pytest.mark.parametrize("causal", [False, True])
def test_predict_is_the_theory(algorithm: str, causal: bool) -> None:
    options = (
        "--algorithm",
        algorithm,
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--batch",
        "3",
        "--device",
        "H100-SXM",
        "--sram",
        "64KB",
    )
    report = predict(*options, "--dtype", "float32", *(["--causal"] if causal else []))
    problem = Problem(3, 4, 2, 1000, 1000, 64, "float32", causal=causal)
    form = theory.traffic(plan(problem, Device.named("H100-SXM", sram="64KB"), algorithm))
    assert report["traffic"] == form.as_dict()
    assert report["replay_agrees"] is True
    assert report["flops"] == problem.flops
    assert report["ratio_to_standard"] == form.total_bytes / theory.standard_ideal(problem).total_bytes


@pytest.mark.parametrize("algorithm", BACKWARD_ALGORITHMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_predict_is_the_theory_of_the_backward(algorithm: str, deterministic: bool, causal: bool) -> None:
    flags = [name for name, wanted in (("--causal", causal), ("--deterministic", deterministic)) if wanted]
    device = "H100-SXM" if algorithm == "fa3" else "A100-40GB"
    flags += ["--device", device, "--heads", "4", "--kv-heads", "2", "--batch", "3"]
    report = predict("--backward", "--algorithm", algorithm, *flags)
    problem = Problem(3, 4, 2, 1000, 1000, 64, "float16", causal=causal)
    schedule = plan_backward(problem, Device.named(device), algorithm, deterministic=deterministic)
    form = theory.traffic(schedule)
    assert report["traffic"] == form.as_dict() and report["extra_memory_bytes"] == schedule.workspace_bytes
    assert report["backward"] is True and report["deterministic"] is deterministic
    assert report["flops"] == 5 * problem.flops // 2 == 10 * 12 * 1000**2 * 64
    assert report["ratio_to_standard"] == form.total_bytes / theory.standard_backward_ideal(problem).total_bytes
    assert "theorem5_elements" in report and "theorem2_elements" not in report


def test_standard_s_ideal_backward_is_algorithm_3() -> None:
    """Each product's inputs once and its output once; dK and dV once for the two heads that share them."""
    d, dv, rows, cols, heads = 8, 4, 10, 20, 6
    ideal = theory.standard_backward_ideal(Problem(3, 2, 1, rows, cols, d, "float32", head_dim_v=dv))
    steps = [  # (what is read, what is written) a head
        (rows * cols + rows * dv, 0),  # P, dO: dV
        (rows * dv + cols * dv, rows * cols),  # dO, V: dP
        (2 * rows * cols, rows * cols),  # P, dP: dS
        (rows * cols + cols * d, rows * d),  # dS, K: dQ
        (rows * cols + rows * d, 0),  # dS, Q: dK
    ]
    assert ideal.read_bytes == 4 * heads * sum(read for read, _ in steps)
    assert ideal.write_bytes == 4 * (heads * sum(written for _, written in steps) + 3 * cols * (d + dv))


def test_predict_shows_the_backward() -> None:
    text = cupyflash("predict", "--seqlen", "4096", "--head-dim", "64", "--backward").stdout
    for word in ("backward", "dO", "dK ", "Theorem 5", "10 N^2 d", "standard attention's backward"):
        assert word in text, word


def test_predict_shows_every_tensor_and_stage() -> None:
    text = cupyflash("predict", "--seqlen", "4096", "--head-dim", "64", "--lse", "--algorithm", "fa1").stdout
    for word in (
        "paper",
        "fitted",
        "used",
        "O_acc",
        "L ",
        "Theorem 2",
        "arithmetic intensity",
        "326",
        "320",
        "lower bound",
    ):
        assert word in text, word


def test_paper_tiling_of_standard_attention_is_refused_by_the_sram_but_predicted() -> None:
    report = predict("--algorithm", "standard", "--tiling", "paper")
    assert report["replay_agrees"] is None and "does not fit" in str(report["replay_refused"])
    assert report["ratio_to_standard"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("predict", "--seqlen", "64", "--head-dim", "600"), "head_dim must be between 1 and 512"),
        (("predict", "--seqlen", "64", "--head-dim", "300", "--algorithm", "fa1"), "1 and 256 for algorithm 'fa1', got 300"),
        (("predict", "--seqlen", "64", "--head-dim", "256", "--sram", "8KB", "--algorithm", "fa1"), "25,344 bytes"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--device", "A1000"), "A100-40GB"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--sram", "much"), "much"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--tiling", "64"), "BRxBC"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--heads", "4", "--kv-heads", "3"), "multiple"),
        (("predict", "--seqlen", "-1", "--head-dim", "64"), "--seqlen"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--backward", "--lse"), "--lse is for the forward pass"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--deterministic"), "--deterministic is for --backward"),
        (("sweep", "--over", "sram", "--backward"), "--backward"),
    ],
)
def test_wrong_input_is_one_line_and_no_traceback(arguments: tuple[str, ...], says: str) -> None:
    result = cupyflash(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert says in result.stderr and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_devices() -> None:
    report = json.loads(cupyflash("devices", "--json").stdout)
    assert [row["name"] for row in report["catalogue"]] == [device.name for device in Device.catalogue()]
    text = cupyflash("devices").stdout
    assert "166,912" in text and "detected:" in text


# -- the environment ----------------------------------------------------------------------------------------------------


def test_the_device_is_the_environment_s_unless_an_option_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_DEVICE", "H100-SXM")
    for command in ("predict --seqlen 64 --head-dim 64", "sweep --over seqlen --to 64", "explain"):
        for more, name in (("", "H100-SXM"), (" --device T4", "T4")):
            report = json.loads(cupyflash(*f"{command}{more} --json".split()).stdout)
            assert report["device"]["name"] == name, command
    assert "simulated H100-SXM" in cupyflash("devices").stdout
    assert json.loads(cupyflash("devices", "--json").stdout)["simulated"]["name"] == "H100-SXM"
    for command in ("demo", "predict", "verify", "sweep", "explain", "inspect"):
        assert "CUPYFLASH_DEVICE" in cupyflash(command, "--help").stdout, command


def test_a_wrong_device_in_the_environment_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ("A1000", str(tmp_path / "none.toml"), str(tmp_path / "folder.toml")):
        (tmp_path / "folder.toml").mkdir(exist_ok=True)
        monkeypatch.setenv("CUPYFLASH_DEVICE", wrong)
        listed = cupyflash("devices")  # shows what is allowed all the same
        assert listed.exit_code == 2 and "H100-SXM" in listed.stdout and f"CUPYFLASH_DEVICE={wrong}: " in listed.stderr
        result = cupyflash("predict", "--seqlen", "64", "--head-dim", "64")
        assert result.exit_code == 2 and "CUPYFLASH_DEVICE" in result.stderr and wrong in result.stderr
        assert cupyflash("predict", "--seqlen", "64", "--head-dim", "64", "--device", "T4").exit_code == 0


# -- one default --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [[], ["--backward"]])
def test_predict_is_of_what_attention_runs_with_the_others_beside_it(backward: list[str]) -> None:
    report = predict(*backward)
    assert report["algorithm"] == "fa2" and report["traffic"] == predict(*backward, "--algorithm", "fa2")["traffic"]
    beside: Any = report["algorithms"]
    assert list(beside) == ["fa2", "fa1", "standard", "standard_ideal"]
    for algorithm in ("fa2", "fa1", "standard"):
        alone: Any = predict(*backward, "--algorithm", algorithm)
        total = alone["traffic"]["total"]
        assert (beside[algorithm]["read_bytes"], beside[algorithm]["write_bytes"]) == (total["read_bytes"], total["write_bytes"])
        assert beside[algorithm]["ratio_to_standard"] == alone["ratio_to_standard"]
        used = alone["tiling"]["used"]
        assert (beside[algorithm]["block_rows"], beside[algorithm]["block_cols"]) == (used["block_rows"], used["block_cols"])
    assert beside["standard_ideal"]["total_bytes"] == report["standard_ideal_bytes"]
    shown = cupyflash("predict", "--seqlen", "1000", "--head-dim", "64", *backward).stdout
    for row in beside.values():
        assert f"{row['total_bytes']:,}" in shown and f"{row['ratio_to_standard']:.3f}" in shown


def test_an_algorithm_that_does_not_fit_is_told_beside_the_others() -> None:
    options = ("--sram", "10KB", "--dtype", "float32", "--algorithm", "standard")
    report = predict(*options)
    refused = [name for name, row in report["algorithms"].items() if "refused" in row]  # type: ignore[attr-defined]
    assert refused == ["fa2", "fa1"]
    shown = cupyflash("predict", "--seqlen", "64", "--head-dim", "64", *options)
    assert shown.exit_code == 0 and "fa1 at head_dim 64 float32 needs at least 13,056 bytes" in " ".join(shown.stdout.split())


def test_every_command_that_runs_attention_s_default_says_so() -> None:
    for command, default in (("predict", "auto"), ("verify", "auto"), ("inspect", "auto"), ("sweep", "fa1")):
        (option,) = (each for each in main.commands[command].params if each.name == "algorithm")
        assert option.default == default, command


# -- how a command ends -------------------------------------------------------------------------------------------------


def test_a_disagreement_is_1_and_wrong_input_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory, "traffic", lambda schedule: Traffic({}))
    result = cupyflash("predict", "--seqlen", "64", "--head-dim", "64")
    assert result.exit_code == 1 and "DISAGREES" in result.stdout and "disagrees" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nosuch", "nosuch"),
        ("--nosuch", "--nosuch"),
        ("predict --seqlen 64 --head-dim 64 --device no.toml", "no.toml"),
        ("predict --seqlen 64 --head-dim 64 --window 3", "--window"),
        ("predict --seqlen 64 --head-dim 64 --key-lengths ,", "--key-lengths"),
        ("predict --seqlen 99999999999 --head-dim 64", "seqlen_q"),
        ("verify --max-seconds nan", "nan"),
        ("demo --max-seconds 0.0001", "--max-seconds"),
        ("sweep --over seqlen --to 1" + "0" * 400, "--to"),
        ("profile " + str(ROOT) + " --grid 1 --block 1", "is a directory"),
    ],
)
def test_what_is_wrong_is_one_line_and_2(arguments: str, says: str) -> None:
    result = cupyflash(*arguments.split())
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert says in result.stderr and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError("8 GiB"), OverflowError("too large"), OSError(28, "No space left on device")])
def test_what_the_machine_lacks_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("cupyflash.sim.cli.devices"), "detected", fail)
    result = cupyflash("devices")
    assert result.exit_code == 2 and result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_ctrl_c_is_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("cupyflash.sim.cli.devices"), "detected", interrupt)
    result = cupyflash("devices")
    assert result.exit_code == INTERRUPTED == 128 + signal.SIGINT and result.stderr.split() == ["interrupted"]


def as_module(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`python -m cupyflash`, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "cupyflash", *arguments], env=environment, text=True, **more)


@pytest.mark.wide
def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    """The reader is gone from the beginning, so that what `cupyflash sweep | head -1` may cause happens for certain."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        ended = as_module("sweep", "--over", "sram", stdout=pipe, stderr=subprocess.PIPE)
    assert ended.returncode == PIPE_CLOSED == 128 + signal.SIGPIPE and ended.stderr == ""


def test_python_m_cupyflash_is_the_command_line() -> None:
    ended = as_module("--version", capture_output=True)
    assert ended.returncode == 0 and ended.stdout.startswith("python -m cupyflash, version ") and ended.stderr == ""


# -- help ---------------------------------------------------------------------------------------------------------------


def test_every_command_is_described() -> None:
    assert tuple(main.commands) == COMMANDS
    for columns in ("40", "80"):
        listed = CliRunner(env={"COLUMNS": columns}).invoke(main, ["--help"])
        assert listed.exit_code == 0 and "..." not in listed.stdout.replace("[ARGS]...", "")
        lines = [line for line in listed.stdout.split("Commands:")[1].split("\n\n")[0].splitlines() if line]
        assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert cupyflash().exit_code == 0 and cupyflash().stdout == cupyflash("--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_every_option_and_its_examples_can_be_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = main.commands[name]
    for param in command.params:
        assert isinstance(param, click.Argument) or getattr(param, "help", None), param.name
    shown = cupyflash(name, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    lines = [shlex.split(line) for line in shown.split("Examples:")[1].splitlines() if " cupyflash " in line or "=" in line[:30]]
    assert len(lines) >= 2
    monkeypatch.chdir(tmp_path)
    for file in ("k.cu", "k.ptx", "k.cubin", "before.json"):
        Path(file).touch()
    for words in lines:
        start = words.index("cupyflash") + 1
        assert words[start] == name
        command.make_context(name, words[start + 1 :])  # raises where it cannot be parsed
        if name in ("predict", "explain", "devices") or (name == "sweep" and "--plot" not in words):
            if "--l2" in words:  # takes a second, and is docs/l2.md's
                continue
            assert cupyflash(*words[start:]).exit_code == 0


# -- widths -------------------------------------------------------------------------------------------------------------

SHOWN = (
    "predict --seqlen 65536 --head-dim 128 --heads 32 --batch 8 --causal --lse",
    "predict --seqlen 4096 --head-dim 64 --backward --sram 20KB",
    "sweep --over sram",
    "sweep --over seqlen --lse --causal",
    "explain --head-dim 128 --device H100-SXM --all",
    "devices",
)


@pytest.mark.parametrize("columns", [None, 60, 80, 200])
@pytest.mark.parametrize("command", SHOWN)
def test_nothing_is_wider_than_the_terminal_and_no_number_is_lost(command: str, columns: int | None) -> None:
    def numbers(columns: int | None) -> set[str]:
        result = CliRunner(env={} if columns is None else {"COLUMNS": str(columns)}).invoke(main, command.split())
        assert result.exit_code == 0
        assert max(map(len, result.stdout.splitlines())) <= (columns or 100)
        return {word.strip("();,:.") for word in result.stdout.split()}

    assert numbers(columns) == numbers(1000)


def test_a_table_that_is_too_wide_is_stacked_under_its_first_column() -> None:
    heads, rows = ("key", "one", "two", "three"), [("a", "1", "22", "333"), ("b", "4", "5", "6")]
    titles = ("", "left", "left", "right")
    whole = ["         left    right", "  key  one  two  three", "  a      1   22    333", "  b      4    5      6"]
    assert text.table(heads, rows, titles=titles) == whole
    stacked = text.table(heads, rows, titles=titles, width=18)
    assert stacked == [
        *("         left", "  key  one  two", "  a      1   22", "  b      4    5"),
        "",
        *("       right", "  key  three", "  a      333", "  b        6"),
    ]
    assert text.table(heads, rows, titles=titles, width=12)[:3] == ["       left", "  key  one", "  a      1"]


def test_a_last_column_that_may_be_cut_takes_what_is_left() -> None:
    rows = [("7", "x" * 50)]
    assert text.table(("line", "source"), rows, left=(0, 1), cut=True, width=40)[1] == "  7     " + "x" * 29 + "..."
    assert text.table(("line", "source"), rows, left=(0, 1), cut=True)[1].endswith("x" * 50)


def test_a_formula_is_not_broken() -> None:
    assert text.paragraph("here Bc = ceil(M / 4d)", width=18) == ["here", "Bc = ceil(M / 4d)"]


def test_plurals() -> None:
    assert [plural(count, "fault") for count in (0, 1, 2, 1000)] == ["0 faults", "1 fault", "2 faults", "1,000 faults"]
    with pytest.raises(RuntimeError, match=r"found 1 fault in the kernel: here$"):
        refuse_findings(["here"])
    with pytest.raises(RuntimeError, match=r"found 2 faults in the kernel, the first: here$"):
        refuse_findings(["here", "there"])


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["predict", "--seqlen", "4k"], ["predict"]),
        (["predict", "--seqlen", "1M", "--seqlen-k", "16K"], ["predict", "--seqlen", str(2**20), "--seqlen-k", "16384"]),
        (["predict", "--window", "1k,-", "--key-lengths", "2k"], ["predict", "--window", "1024,-", "--key-lengths", "2048"]),
        (["predict", "--decode", "--cache-seqlens", "3k"], ["predict", "--decode", "--cache-seqlens", "3072"]),
        (
            ["sweep", "--over", "seqlen", "--from", "1k", "--to", "4k", "--points", "3"],
            ["sweep", "--over", "seqlen", "--from", "1024", "--to", "4096", "--points", "3"],
        ),
    ],
)
def test_sizes_by_k_and_m(short: list[str], long: list[str]) -> None:
    """And `predict` has defaults as its siblings have."""
    one, other = (CliRunner().invoke(main, [*command, "--json"]) for command in (short, long))
    assert one.exit_code == other.exit_code == 0 and one.stdout == other.stdout


@pytest.mark.parametrize("size", ["4kk", "k", "4g", "4.5k", "-1k"])
def test_what_is_no_size_is_refused(size: str) -> None:
    assert CliRunner().invoke(main, ["predict", "--seqlen", size]).exit_code == 2
