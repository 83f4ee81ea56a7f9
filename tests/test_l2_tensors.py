"""The L2's model has every tensor of theory and no other: each option by itself, in every schedule that takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.options import BlockMask
from cupyflash.schedules import Cache, TileSchedule, fa2, plan_backward, plan_decode
from cupyflash.sim import l2, theory

A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")
N = 64
SCORE, MASK = Score("s + x[k]", x=np.ones(N, np.float32)).form, Mask("k < p[row]", p=np.ones(N, np.int32)).form
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "key_lengths": {"padded": True, "key_lengths": (50,)},
    "block_mask": {"block_mask": BlockMask.of(np.eye(2, dtype=bool))},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    "score": {"score": SCORE},
    "mask function": {"mask_function": MASK},
}
KINDS = (
    "standard",
    "fa1",
    "fa2",
    "fa3",
    "decode",
    *(f"{each} gradients" for each in ("standard", "fa1", "fa2")),
    "fa2 deterministic",
)


def planned(kind: str, options: dict[str, Any]) -> TileSchedule:
    """A schedule of one tensor at least for each option; ValueError where its kernel does not take it."""
    if kind == "decode":
        problem = Problem(1, 4, 2, 1, 256, 64, "float16", **{"padded": True, "key_lengths": (200,)} | options)
        return plan_decode(problem, A100, cache=Cache(0, 16, 16))
    problem = Problem(1, 2, 1, N, N, 64, "float16", **options)
    algorithm, _, way = kind.partition(" ")
    if not way:
        return plan(problem, H100 if algorithm == "fa3" else A100, algorithm, None if algorithm == "fa3" else (32, 32), lse=True)
    return plan_backward(problem, A100, algorithm, (32, 32), deterministic=way == "deterministic")


def differs(schedule: TileSchedule) -> set[str]:
    """The tensors of which theory and the model do not count the same."""
    counted, modelled = theory.traffic(schedule), l2.run(schedule).asked
    return {name for name in {*counted, *modelled} if counted.get(name) != modelled.get(name)}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_theory_is_in_the_model(kind: str, option: str) -> None:
    try:
        schedule = planned(kind, OPTIONS[option])
    except ValueError as error:
        assert "has no place for" in str(error)  # a combination that no call has
        return
    assert differs(schedule) == set()


@pytest.mark.parametrize(("option", "missing"), [("mask", "mask"), ("bias", "bias"), ("score", "score")])
def test_a_tensor_that_is_left_out_is_noticed(option: str, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("captured", "score_reads"):
        monkeypatch.setattr(fa2, name, lambda *_, **__: ())
    assert any(name.startswith(missing) for name in differs(planned("fa2", OPTIONS[option])))
