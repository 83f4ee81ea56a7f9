"""Options: one table says who takes which field, everybody reads it, and a new field is refused until it is in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_refusals import CALLS, Accepted

import cupyflash
from cupyflash import Device, Mask, Options, Problem, Score, plan
from cupyflash.request.options import ARRAYS, OPTIONS, VECTORS, BlockMask, Pattern, not_taken
from cupyflash.schedules import ALGORITHMS, BACKWARD_ALGORITHMS, choose, plan_backward, plan_decode, plan_varlen
from cupyflash.sim.cli.show import describe
from cupyflash.sim.clock.ring_model import ring_of

A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")
FUNCTION = {"mask_function": Mask("k <= q").form}
# Each field as it is asked for, with what has to be said beside it.
ASKED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "scale": {"scale": 0.5},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "bias_dtype": {"bias": True, "bias_dtype": "float32"},
    "padded": {"padded": True},
    "key_lengths": {"padded": True, "key_lengths": (60,)},
    "block_mask": {"block_mask": BlockMask((1, 1, 4, 4))},
    "packed": {"packed": True},
    **{name: {name: True} for name in VECTORS},
    "dropout": {"dropout": True},
    "score_dtype": {"score_dtype": "float32"},
    "score": {"score": Score("s * s").form},
    "mask_function": FUNCTION,
    "pattern": {**FUNCTION, "pattern": Pattern.of(np.tri(64, dtype=bool))},
    "tiles_given": {**FUNCTION, "tiles_given": True},
}


def planner(by: str) -> Callable[[Problem], object]:
    """The planner of one of those that the table names. Blocks are 16, if there is a choice, like the block mask's."""
    algorithm, _, backward = by.partition(" ")
    if backward:
        on, tiling = (H100, None) if algorithm == "fa3" else (A100, (16, 16))
        return lambda problem: plan_backward(problem, on, algorithm, tiling).kernels()
    if by in ALGORITHMS:
        tiling = None if by in ("fa3", "decode") else (16, 16)
        return lambda problem: plan(problem, H100 if by == "fa3" else A100, by, tiling).kernels()
    others: dict[str, Callable[[Problem], object]] = {
        "attention_decode": lambda problem: plan_decode(problem, A100).kernels(),
        "attention_varlen": lambda problem: plan_varlen(problem, A100).kernels(),
        "ring_attention": lambda problem: ring_of(problem, 2),
    }
    return others[by]


BACKWARDS = tuple(f"{name} backward" for name in BACKWARD_ALGORITHMS)
TAKERS = (*ALGORITHMS, *BACKWARDS, "attention_decode", "attention_varlen", "ring_attention")


def test_the_table_names_every_field_and_nobody_else() -> None:
    assert set(OPTIONS) == set(ASKED) == {each.name for each in fields(Options)}
    assert {by for each in OPTIONS.values() for by in each.takers} == set(TAKERS)


@pytest.mark.parametrize("by", TAKERS)
def test_each_takes_what_the_table_says_and_refuses_all_else(by: str) -> None:
    """A kernel is planned with each field that is taken; packed sequences are taken by the algorithms that plan_varlen has."""
    made, untaken = planner(by), not_taken(by)
    for name, asked in ASKED.items():
        problem = Problem(1, 2, 2, 64, 64, 16, "float16", **asked)
        if name == "packed" and by not in ("attention_varlen", *untaken):
            continue
        if not {name, *asked} & set(untaken):
            made(problem)
            continue
        with pytest.raises(ValueError, match=r"has no place for|does not run this: the kernel has no place for"):
            made(problem)


def test_auto_takes_nothing_that_it_would_then_refuse() -> None:
    for device in (A100, H100):
        for rows in (1, 64):
            for name, asked in ASKED.items():
                if name not in ("packed", "score_dtype", "block_mask"):  # plan_varlen's, "standard"'s, and of blocks that are given
                    sizes = {"key_lengths": (60,)} if "key_lengths" in asked else {}
                    problem = Problem(1, 1, 1, rows, 4096, 64, "float16", **asked | sizes | {"pattern": None})
                    assert plan(problem, device, choose(problem, device).algorithm).kernels()


def test_a_field_that_nobody_listed_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ignored it would give another answer than was asked for."""
    monkeypatch.setitem(OPTIONS, "window", OPTIONS["window"]._replace(takers=()))
    not_taken.cache_clear()
    problem = Problem(1, 2, 2, 64, 64, 16, "float16", window=(5, 3))
    try:
        for by in TAKERS:
            with pytest.raises(ValueError, match="has no place for a window"):
                planner(by)(problem)
    finally:
        monkeypatch.undo()
        not_taken.cache_clear()


def test_values_are_those_of_the_forward_and_its_gradients() -> None:
    """`attention_vjp` hands them to both; a "value" is a keyword of the calls as it is, an array one by its name."""
    forward, backward = (set(signature(call).parameters) for call in (cupyflash.attention, cupyflash.attention_backward))
    values, found = ({name for name, each in OPTIONS.items() if each.kind == kind} for kind in ("value", "found"))
    assert values | {*ARRAYS} == forward & backward & set(OPTIONS) - found
    assert {"causal", "window", "scale", "score_dtype"} == values and values | {*ARRAYS} | found == set(OPTIONS)


@pytest.mark.parametrize("call", [name for name in CALLS if name.startswith("attention")])
def test_a_call_hands_on_what_its_signature_has(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def asked(**options: Any) -> Options:
        given.update(options)
        raise Accepted

    monkeypatch.setattr("cupyflash.launch.cold.Options", asked)
    function, right, _ = CALLS[call]
    with pytest.raises(Accepted):
        function(**right)
    of_call = set(signature(function).parameters)
    assert of_call & {name for name, each in OPTIONS.items() if each.kind == "value"} <= set(given)


@pytest.mark.parametrize("name", ["attention", "attention_backward", "attention_vjp", "attention_varlen", "attention_decode"])
def test_a_signature_says_names_types_and_defaults(name: str) -> None:
    """`help` shows them, and what is no such keyword is refused as Python does."""
    function, right, _ = CALLS[name]
    parameters = signature(function).parameters
    assert parameters["causal"].annotation == "bool" and parameters["causal"].default is (name == "attention_decode")
    assert not [each for each in parameters.values() if each.kind is each.VAR_KEYWORD]
    assert "scale: 'float | None' = None" in str(signature(function))
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'casual'"):
        function(**right, casual=True)


def taken() -> str:
    """The table for users: a field that says more of another has no row."""
    rows = ["|  | " + " | ".join(TAKERS) + " |", "| --- |" + " --- |" * len(TAKERS)]
    for name in OPTIONS:
        words, takers = OPTIONS[name].words, OPTIONS[name].takers
        if name not in ("key_lengths", "pattern", "tiles_given"):
            rows.append(f"| {words} | " + " | ".join("x" if by in takers else "" for by in TAKERS) + " |")
    return "\n".join(rows)


def test_the_page_has_the_table() -> None:
    assert taken() in (Path(__file__).parents[1] / "docs" / "limits.md").read_text(), taken()


# Fields that a title leaves out.
UNTOLD = {
    "scale": "no command has it",
    "block_mask": "no command has it",
    "key_lengths": "`padded` says that there are some",
    "pattern": "the mask is told of",
}


def test_a_title_tells_of_each_field() -> None:
    plain = describe(Problem(1, 2, 2, 64, 64, 16, "float16"))
    told = {name for name, asked in ASKED.items() if describe(Problem(1, 2, 2, 64, 64, 16, "float16", **asked)) != plain}
    said_beside = {"key_lengths", "pattern"}  # which come with what is told of
    assert told - said_beside == set(OPTIONS) - set(UNTOLD)
