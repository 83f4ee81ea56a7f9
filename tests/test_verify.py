"""`cupyflash verify`: agreement passes, and every kind of disagreement is told and fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.sim import verification
from cupyflash.sim.cli import main
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import Numbers, measure
from cupyflash.sim.traffic import TensorTraffic, Traffic
from cupyflash.sim.verification import Difference
from suites import sample, wide

pytest.importorskip("cupy")


def verify(*options: str) -> Result:
    """`cupyflash verify`, by FlashAttention as the paper has it unless the options say otherwise."""
    if "bfloat16" in options:
        pytest.importorskip("ml_dtypes")
    return CliRunner().invoke(main, ["verify", "--algorithm", "fa1", *options])


def report(*options: str) -> dict[str, Any]:
    result = verify(*options, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "where", "causal"),
    sample(
        [
            ("float16", ["--device", "A100-40GB"], []),
            ("bfloat16", ["--device", "A100-40GB"], ["--causal"]),
            ("float32", ["--device", "A100-40GB"], []),
            ("bfloat16", ["--device", "H100-SXM"], []),
            ("float16", ["--device", "T4"], ["--causal"]),
            *[(dtype, ["--sram", "16KB"], ["--causal"]) for dtype in ("float16", "bfloat16", "float32")],
            ("float16", ["--sram", "100KB"], []),
            ("float32", ["--sram", "100KB"], ["--causal"]),
            *[("float16", ["--sram", "8KB"], causal) for causal in ([], ["--causal"])],
        ],
        [("float16", ["--sram", "8KB"], ["--causal"])],
    ),
)
def test_it_passes(dtype: str, where: list[str], causal: list[str]) -> None:
    """d 64, on the tilings of three devices and of three sizes of SRAM, several blocks each way for the small ones."""
    found = report("--seqlen", "100", "--seqlen-k", "144", "--dtype", dtype, "--lse", *where, *causal)
    assert found["good"] and found["differences"] == [] and found["findings"] == []
    assert found["traffic"]["theory"] == found["traffic"]["replay"] == found["traffic"]["executed"]
    assert [(row["v_mean"], row["tensor"]) for row in found["numbers"]] == [(0, "O"), (0, "L"), (1, "O"), (1, "L")]
    for row in found["numbers"]:
        assert row["good"] and (0 if row["tensor"] == "L" else 1e-9) <= row["error"] <= row["allowed"]


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        wide(["--causal"]),
        wide(["--dtype", "float32", "--device", "H100-SXM", "--head-dim-v", "24", "--deterministic"]),
        wide(["--dtype", "bfloat16", "--heads", "4", "--kv-heads", "2", "--window", "20,10", "--seed", "3"]),
        ["--mask", "--bias", "--key-lengths", "60,0", "--batch", "2", "--tiling", "32x48"],
    ],
)
def test_the_backward_passes(options: list[str]) -> None:
    found = report("--backward", "--algorithm", "fa2", "--seqlen", "70", "--seqlen-k", "90", "--head-dim", "32", *options)
    assert found["good"] and found["backward"] and found["differences"] == [] and found["findings"] == []
    assert found["traffic"]["theory"] == found["traffic"]["replay"] == found["traffic"]["executed"]
    for row, (v_mean, tensor) in zip(found["numbers"], product((0, 1), ("dQ", "dK", "dV")), strict=True):
        assert (row["v_mean"], row["tensor"], row["good"]) == (v_mean, tensor, True)
        assert 0 < row["error"] <= row["allowed"]


@pytest.mark.wide
def test_text_shows_the_gradients() -> None:
    result = verify("--backward", "--seqlen", "64")
    assert result.exit_code == 0, result.stderr
    for word in ("backward", "dO", "dK", "V about 1", "theory == replay == executed"):
        assert word in result.stdout


def test_by_default_it_is_what_attention_runs() -> None:
    result = CliRunner().invoke(main, ["verify", "--seqlen", "32", "--head-dim", "16", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["algorithm"] == "fa2"


@pytest.mark.parametrize("tensor", ["dq", "dk", "dv"])
def test_a_wrong_gradient_fails_by_name(monkeypatch: pytest.MonkeyPatch, tensor: str) -> None:
    right = verification.execute_backward

    def worse(*arguments: Any, **more: Any) -> Any:
        execution = right(*arguments, **more)
        return replace(execution, **{tensor: getattr(execution, tensor) * np.float16(1.1)})

    monkeypatch.setattr(verification, "execute_backward", worse)
    result = verify("--backward", "--seqlen", "64")
    assert result.exit_code == 1 and result.stderr.endswith(f"further off than allowed in d{tensor[1].upper()}\n")


def test_8_kb_hold_a_half_type_and_not_float32() -> None:
    """(2 x 16 + 16) rows of 64 + 8 elements: 6,912 bytes in float16, 13,056 with 64 + 4 in float32."""
    assert "6,912 of 8,192 bytes" in report("--seqlen", "32", "--sram", "8KB")["tiling"]["used"]["reason"]
    result = verify("--sram", "8KB", "--dtype", "float32")
    assert result.exit_code == 2 and "13,056 bytes" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        wide(["--algorithm", "standard", "--dtype", "float32", "--lse"]),
        wide(["--head-dim", "33", "--head-dim-v", "20", "--heads", "4", "--kv-heads", "2", "--batch", "2", "--seed", "3"]),
        ["--head-dim", "33", "--head-dim-v", "20", "--heads", "2", "--kv-heads", "1", "--seqlen", "20", "--seed", "3"],
        wide(["--mask", "--bias", "--key-lengths", "60,0", "--batch", "2", "--causal", "--sram", "16KB"]),
        wide(["--tiling", "32x48"]),
        ["--seqlen", "0"],
        wide(["--seqlen-k", "0", "--lse"]),
    ],
)
def test_other_problems_pass(options: list[str]) -> None:
    assert report(*(["--seqlen", "70"] if "--seqlen" not in options else []), *options)["good"]


def test_text_shows_each_witness_and_the_numbers() -> None:
    result = verify("--seqlen", "64", "--lse")
    assert result.exit_code == 0, result.stderr
    for word in ("theory", "replay", "executed", "O_acc", "V about 1", "theory == replay == executed", "fitted"):
        assert word in result.stdout
    assert "executing" in result.stderr


def wrong_traffic(name: str, read: int) -> Callable[[Any], Traffic]:
    """The theory's count with so many bytes more read of one tensor."""
    right = verification.theory.traffic

    def traffic(schedule: Any) -> Traffic:
        tensors = dict(right(schedule))
        before = tensors.get(name, TensorTraffic())
        return Traffic(tensors | {name: TensorTraffic(before.read_bytes + read, before.write_bytes)})

    return traffic


@pytest.mark.parametrize(("tensor", "read"), [("K", 128), ("Q", -2), ("workspace", 64)])
def test_a_wrong_theory_fails_with_the_difference_per_tensor(monkeypatch: pytest.MonkeyPatch, tensor: str, read: int) -> None:
    monkeypatch.setattr(verification.theory, "traffic", wrong_traffic(tensor, read))
    result = verify("--seqlen", "64")
    assert result.exit_code == 1 and f"the counts disagree in {tensor}" in result.stderr
    for witness in ("replay", "executed"):
        assert f"{tensor}: {witness} has {-read:+,} bytes read and +0 bytes written" in result.stdout
    result = verify("--seqlen", "64", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["good"]
    assert found["differences"] == [
        {"witness": witness, "tensor": tensor, "read_bytes": -read, "write_bytes": 0} for witness in ("replay", "executed")
    ]


def test_a_wrong_replay_is_told_from_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verification.replay
    monkeypatch.setattr(verification, "replay", lambda schedule: Traffic(dict(right(schedule)) | {"V": TensorTraffic(1, 2)}))
    schedule = plan(Problem(1, 1, 1, 32, 32, 16, "float16"), Device.named("A100-40GB"))
    found = verification.verify(schedule)
    assert found.differences == (Difference("replay", "V", 1 - 1024, 2),) and not found.good


def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verification.execute

    def worse(*arguments: Any, **more: Any) -> Any:
        execution = right(*arguments, **more)
        return replace(execution, out=(execution.out * np.float16(1.1)).astype(execution.out.dtype))

    monkeypatch.setattr(verification, "execute", worse)
    result = verify("--seqlen", "64")
    assert result.exit_code == 1 and "further off than allowed" in result.stderr and "numbers hold" not in result.stdout


def test_findings_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = verification.execute
    monkeypatch.setattr(
        verification, "execute", lambda *arguments, **more: replace(right(*arguments, **more), findings=("a.cu:3: race",))
    )
    result = verify("--seqlen", "64")
    assert result.exit_code == 1 and "found 1 fault in" in result.stderr and "a.cu:3: race" in result.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seqlen", "100000", "--heads", "8"], "--max-seconds 60"),
        (["--max-seconds", "0.001"], "over --max-seconds 0.001"),
        (["--seqlen", "1024", "--seed", "1", "--max-seconds", "3"], "over --max-seconds 3"),
        (["--device", "T4", "--dtype", "bfloat16"], "compute capability 8.0"),
        (["--tiling", "20x20"], "in steps of 16"),
        (["--algorithm", "standard", "--tiling", "paper", "--seqlen", "64"], "no kernel has tiling"),
        (["--key-lengths", "a,b"], "--key-lengths"),
        (["--backward", "--lse"], "--lse is for the forward pass"),
        (["--backward", "--tiling", "20x20"], "in steps of 16"),
        (["--backward", "--seqlen", "100000", "--heads", "8"], "--max-seconds 60"),
        (["--seed", "x"], "--seed"),
    ],
)
def test_what_cannot_be_verified_is_told_in_one_line(options: list[str], says: str) -> None:
    result = verify(*options)
    assert result.exit_code == 2 and says in result.stderr and result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_not_a_number_is_never_good() -> None:
    q, k, v = (np.ones((4, 8), np.float32) for _ in range(3))
    out, lse = np.full((4, 8), np.nan, np.float32), np.full(4, -np.inf, np.float32)
    numbers = measure(out, lse, Inputs.of(q, k, v))
    assert numbers["O"].error == numbers["L"].error == np.inf and not any(each.good for each in numbers.values())
    assert not Numbers(2, 1).good and Numbers(1, 1).good
