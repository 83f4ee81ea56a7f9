"""A score function on the command line: --score with what it captures, --softcap, --alibi."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner, Result

from cupyflash.sim.cli import main


def told(command: str) -> Result:
    return CliRunner().invoke(main, shlex.split(command))


SMALL = "--seqlen 20 --seqlen-k 36 --head-dim 16 --heads 4 --kv-heads 2"
LINE = "--score 's + near[h, q - k] * far + deep' --capture near=float16 --capture far=-0.5 --capture deep=bfloat16"


@pytest.mark.wide
@pytest.mark.parametrize(
    "command",
    [
        f"verify {SMALL} --softcap 2.5 --alibi --causal --lse",
        pytest.param(f"verify {SMALL} {LINE} --window 9,3 --algorithm fa1", marks=pytest.mark.wide),
        pytest.param(f"verify --decode --seqlen-k 96 --batch 2 --seqlen 3 --tree {LINE} --append 2", marks=pytest.mark.wide),
    ],
)
def test_verify_draws_what_is_captured(command: str) -> None:
    pytest.importorskip("cupy")
    made = told(f"{command} --json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    witnesses = [found["traffic"][name] for name in ("theory", "replay", "executed")]
    assert found["good"] and witnesses[0] == witnesses[1] == witnesses[2]
    arrays = ("score_near", "score_deep") if "near" in command else ("score_alibi_slopes",)
    assert all(witnesses[0][name]["read_bytes"] > 0 for name in arrays)


def test_predict_counts_what_the_line_reads() -> None:
    """A number a head is read once a thread block; what differs along a row is read for each score that is seen."""
    made = told("predict --seqlen 4096 --head-dim 64 --heads 16 --alibi --json")
    assert json.loads(made.stdout)["traffic"]["score_alibi_slopes"]["read_bytes"] % (4 * 16) == 0
    made = told("predict --seqlen 100 --head-dim 64 --causal --score 's + near[q - k]' --capture near=float16 --json")
    found = json.loads(made.stdout)
    assert found["traffic"]["score_near"]["read_bytes"] == 2 * 100 * 101 // 2
    assert found["problem"]["score"] == {"text": "s + near[q - k]", "captured": {"near": "float16, ndim 1"}}


@pytest.mark.parametrize("options", ["--softcap 30", "--decode --softcap 30"])
@pytest.mark.parametrize("command", ["predict --seqlen 8 --head-dim 16", "explain --seqlen 8 --head-dim 16"])
def test_the_title_says_the_line(command: str, options: str) -> None:
    made = told(f"{command} {options}")
    assert made.exit_code == 0 and "softcap * tanh(s / softcap)" in " ".join(made.output.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--score 's + ('", "not a Python expression"),
        ("--score 's + x[h]'", "'x' is not a captured array"),
        ("--score s --capture x=float32", "x is captured, but 's' does not use it"),
        ("--score 's * x' --capture x=often", "--capture: x must be a number or one of float16"),
        ("--score 's * x' --capture x", "a name once, and what it is"),
        ("--score 's * x' --capture x=1 --capture x=2", "a name once, and what it is"),
        ("--capture x=1", "--capture is for --score"),
        ("--score s --softcap 3", "softcap cannot go with score"),
        ("--score s --alibi", "--alibi cannot go with --score"),
        ("--softcap 0", "softcap must be between"),
    ],
)
def test_what_is_refused_in_one_line(options: str, says: str) -> None:
    for command in ("predict --seqlen 8 --head-dim 16", "predict --decode"):
        made = told(f"{command} {options}")
        assert made.exit_code == 2 and says in made.output and len(made.output.splitlines()) == 1, made.output
