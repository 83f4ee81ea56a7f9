"""The command line without a compiler: predict and devices. The demo is in test_demo.py."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.schedules import BACKWARD_ALGORITHMS, plan_backward
from cupyflash.sim import theory
from cupyflash.sim.cli import main


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
    problem = Problem(3, 4, 2, 1000, 1000, 64, "float32", causal)
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
    report = predict("--backward", "--algorithm", algorithm, "--heads", "4", "--kv-heads", "2", "--batch", "3", *flags)
    problem = Problem(3, 4, 2, 1000, 1000, 64, "float16", causal)
    schedule = plan_backward(problem, Device.named("A100-40GB"), algorithm, deterministic=deterministic)
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
        (("predict", "--seqlen", "64"), "--head-dim"),
        (("predict", "--seqlen", "64", "--head-dim", "300"), "head_dim must be between 1 and 256"),
        (("predict", "--seqlen", "64", "--head-dim", "256", "--sram", "8KB", "--algorithm", "fa1"), "25,344 bytes"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--device", "A1000"), "A100-40GB"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--sram", "much"), "much"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--tiling", "64"), "BRxBC"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--heads", "4", "--kv-heads", "3"), "multiple"),
        (("predict", "--seqlen", "-1", "--head-dim", "64"), "--seqlen"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--backward", "--lse"), "--lse is for the forward pass"),
        (("predict", "--seqlen", "64", "--head-dim", "64", "--deterministic"), "--deterministic is for --backward"),
        (("sweep", "--over", "sram", "--backward"), "--backward"),
        (("explain", "--backward"), "--backward"),
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


def test_every_command_is_described() -> None:
    assert set(main.commands) == {"demo", "predict", "verify", "sweep", "explain", "inspect", "profile", "devices"}
    for command in ((), *((name,) for name in main.commands)):
        assert cupyflash(*command, "--help").exit_code == 0
