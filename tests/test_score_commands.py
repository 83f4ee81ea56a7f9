"""Score and mask functions on the command line, with what they capture; dropout, and S of standard attention."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Mask, Problem, plan
from cupyflash.request.options import Pattern
from cupyflash.request.score import seen_by
from cupyflash.sim import theory
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


IDS = np.repeat([0, 1, 2], [100, 60, 40]).astype(np.int32)
DOCUMENTS = "--mask-function 'document[q] == document[k] and k <= q' --capture document"


def test_predict_knows_what_a_mask_says_of_positions_and_files(tmp_path: Path) -> None:
    """An array that is only drawn counts as if the mask needed every score."""
    np.save(tmp_path / "ids.npy", IDS)
    size = "predict --seqlen 200 --head-dim 64 --tiling 32x16 --algorithm fa2"
    mask = Mask("document[q] == document[k] and k <= q", document=IDS)
    problem = Problem(1, 1, 1, 200, 200, 64, "float16", mask_function=mask.form)
    known = problem.asking(pattern=Pattern.of(seen_by(mask.form, problem, mask.arrays)))
    for what, posed in ((tmp_path / "ids.npy", known), ("int32", problem)):
        made = told(f"{size} {DOCUMENTS}={what} --json")
        found, schedule = json.loads(made.stdout), plan(posed, Device.named("A100-40GB"), "fa2", (32, 16))
        assert found["replay_agrees"] and found["traffic"] == theory.traffic(schedule).as_dict()
        assert (found["mask_tiles"] is None) == (posed is problem)
        assert found["problem"]["mask_function"] == {"text": mask.text, "captured": {"document": "int32, ndim 1"}}
    made = told("predict --seqlen 512 --head-dim 64 --tiling 64x64 --mask-function 'k <= q and q - k < 100'")
    assert f"tiles of the mask: {64 - 21} empty, {8 + 7 + 6} mixed, 0 whole" in made.output
    assert "skips no tiles" in told("predict --seqlen 40 --head-dim 16 --mask").output
    for bad, says in (("--seqlen 8", "document must have length 8 along axis 0"), ("--seqlen 200 --mask", "--mask cannot go with")):
        line = "--mask-function 'document[row] == document[k]'"
        made = told(f"predict --head-dim 16 {bad} {line} --capture document={tmp_path / 'ids.npy'}")
        assert made.exit_code == 2 and says in made.output, made.output


@pytest.mark.wide
@pytest.mark.parametrize(
    "command",
    [
        f"verify {SMALL} {DOCUMENTS}=int32 --dropout 0.1 --lse",
        f"verify {SMALL} --backward --mask-function 'k <= q or others[row, k]' --capture others=bool {LINE} --dropout 0.3",
        "verify --decode --mask-function 'k < 5 or q - k < wide' --capture wide=50",
        "verify --seqlen 40 --head-dim 16 --algorithm standard --score-dtype float32 --mask-function 'k <= q'",
    ],
)
def test_verify_draws_masks_and_what_is_dropped(command: str) -> None:
    pytest.importorskip("cupy")
    made = told(f"{command} --json")
    found = json.loads(made.stdout)
    witnesses = [found["traffic"][name] for name in ("theory", "replay", "executed")]
    assert made.exit_code == 0 and found["good"] and witnesses[0] == witnesses[1] == witnesses[2]
    assert ("mask_document" in witnesses[0]) == ("document" in command)
    assert found.get("dropout") == (float(command.split("--dropout ")[1].split()[0]) if "--dropout" in command else None)


def test_dropout_and_the_type_of_s() -> None:
    for command, says in (
        ("predict --seqlen 8 --head-dim 16 --dropout 1.5", "dropout must be at least 0 and below 1, got 1.5"),
        ("predict --decode --dropout 0.1", "--dropout cannot go with --decode"),
        ("predict --seqlen 8 --head-dim 16 --score-dtype float32", "no place for score_dtype, the dtype of an S in memory"),
        ("explain --score-dtype float32", "No such option '--score-dtype'"),
    ):
        made = told(command)
        assert made.exit_code == 2 and says in made.output and len(made.output.splitlines()) == 1, made.output
    plain, wide = (
        json.loads(told(f"predict --seqlen 64 --head-dim 16 --algorithm standard {asked} --json").stdout)
        for asked in ("", "--score-dtype float32")
    )
    assert wide["traffic"]["S"]["write_bytes"] == 2 * plain["traffic"]["S"]["write_bytes"]
    assert wide["algorithms"]["fa2"]["total_bytes"] == plain["algorithms"]["fa2"]["total_bytes"]


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
        ("--score 's * x' --capture x=often", "--capture: x must be a number, a .npy file, or one of float16"),
        ("--score 's * x' --capture x", "NAME=WHAT, each name once"),
        ("--score 's * x' --capture x=1 --capture x=2", "NAME=WHAT, each name once"),
        ("--capture x=1", "--capture is for --score"),
        ("--mask-function 'q - k'", "a mask is a condition"),
        ("--mask-function 'x[k]' --capture x=/nowhere/x.npy", "x: /nowhere/x.npy: No such file"),
        ("--mask-function 'k < x' --score s --capture x=1 --capture y=1", "y is captured, but"),
        ("--score s --softcap 3", "softcap cannot go with score"),
        ("--score s --alibi", "--alibi cannot go with --score"),
        ("--softcap 0", "softcap must be between"),
    ],
)
def test_what_is_refused_in_one_line(options: str, says: str) -> None:
    for command in ("predict --seqlen 8 --head-dim 16", "predict --decode"):
        made = told(f"{command} {options}")
        assert made.exit_code == 2 and says in made.output and len(made.output.splitlines()) == 1, made.output
