"""Seeded faults in how kernels give a score function its place and what it reads: each is found."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_varlen
from lines import one

from cases_decode import Case
from cases_decode import executed as decoded
from cupyflash import Device, Problem, Score, TileSchedule, plan
from cupyflash.schedules import Cache, DecodeSchedule, VarlenSchedule, plan_varlen
from cupyflash.sim.execution import Execution, execute, execute_varlen
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import draw_score, drawn, measure
from mutants import Mutant, check_mutant
from suites import sample

A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")
LINE = Score("s - a[b, h] * abs(q - k) + t[h % 2, k - q + 30] * (b + 1)", a=one(2), t=one(2, "float16")).form
SEQLENS = ((5, 17), (40, 33), (20, 0), (30, 60))
HEADS = Problem(2, 4, 1, 20, 70, 32, "float16", causal=True, score=LINE)
CASE = Case(
    Problem(2, 6, 2, 5, 112, 16, "float16", causal=True, padded=True, key_lengths=(103, 37), score=LINE), Cache(5), splits=3
)
SCHEDULES: dict[str, TileSchedule] = {
    "fa2": plan(HEADS, A100, "fa2", (32, 32), lse=True),
    "heads": plan(HEADS, H100, "fa3", (128, 16), lse=True),
    "large": plan(HEADS.asking(scale=1e3), H100, "fa3", (128, 16), lse=True),
    "packed": plan_varlen(Problem(4, 2, 1, 40, 60, 32, "float16", score=LINE), A100, SEQLENS, (32, 32), lse=True),
    "packed fa3": plan_varlen(
        Problem(4, 2, 1, 40, 60, 32, "float16", score=LINE), H100, SEQLENS, (128, 16), lse=True, algorithm="fa3"
    ),
    "decode": CASE.schedule,
}


def mutant(file: str, old: str, new: str, finds: str, problem: str) -> Mutant:
    return Mutant(file, old, new, finds, problem=problem)


MUTANTS = {
    "all rows have the first head's": mutant("fa3_forward.cu", "place.Nk}, row % PACK)", "place.Nk}, 0)", "numbers", "heads"),
    "all rows are of the first head": mutant("fa3_forward.cu", "w.masks.head += row % PACK;", "", "numbers", "heads"),
    "every lane reads a head's": mutant("score.cuh", "if (lane < HEADS) of_head", "if (lane < 8) of_head", "bytes", "heads"),
    "L is scaled twice": mutant("fa3_forward.cu", "(SCALED ? LN_2 : p.scale)", "p.scale", "numbers", "large"),
    "the sequence is the first": mutant("fa2_forward.cu", "masks.batch = place.sequence;", "", "numbers", "packed"),
    "the warps' sequence is the first": mutant(
        "fa3_forward.cu", "w.masks.batch = w.place.sequence,", "w.masks.batch = 0,", "numbers", "packed fa3"
    ),
    "what no row sees is read": mutant("mask.cuh", "if (seen || !SCORE_LOADS)", "if (true)", "bytes", "fa2"),
    "decoding's rows have one head's": mutant("decode.cu", "OF_HEAD ? heads[8 * h]", "OF_HEAD ? heads[0]", "numbers", "decode"),
    "decoding reads what no row sees": mutant("decode.cu", "wanted = !SCORE_LOADS || (", "wanted = true || (", "bytes", "decode"),
    "decoding counts cached keys only": mutant("decode.cu", "key, p.Nq, keys.all}", "key, p.Nq, keys.cached}", "numbers", "decode"),
}


def run(schedule: TileSchedule, seed: int | None) -> tuple[Execution, bool]:
    """An execution in the order of a seed, and whether its numbers are right."""
    p = schedule.problem
    if isinstance(schedule, DecodeSchedule):
        execution, numbers, kept = decoded(CASE)
        return execution, kept and all(each.good for each in numbers.values())
    if isinstance(schedule, VarlenSchedule):
        q, k, v, *_ = test_varlen.packed(SEQLENS, p.heads, p.kv_heads, p.head_dim, p.head_dim_v)
        score = draw_score(p)
        execution = execute_varlen(schedule, q, k, v, seed=seed, score=score)
        try:
            test_varlen.check_sequences(execution.out, execution.lse, q, k, v, SEQLENS, p.asking(packed=False).options, score)
        except AssertionError:
            return execution, False
        return execution, True
    inputs: Inputs = drawn(p, v_mean=1.0)
    execution = execute(schedule, *inputs.qkv, seed=seed, score=inputs.score)
    return execution, all(each.good for each in measure(execution.out, execution.lse, inputs).values())


@pytest.mark.parametrize("name", sample(MUTANTS, {"all rows have the first head's"}))
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(MUTANTS[name], SCHEDULES[MUTANTS[name].problem], run, tmp_path, monkeypatch)
