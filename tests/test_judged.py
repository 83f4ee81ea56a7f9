"""The judge's own problems in benchmarks/judged: right functions are right, faults are named, and the results on record say so."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("cupy")

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "judged"
RECORD = {one["name"]: one for one in json.loads((FOLDER / "results.json").read_text())["results"]}
QUICK = ("reverse in place",)
SHORT = [name for name, one in RECORD.items() if sum(one["seconds"]) < 1.3]


@pytest.fixture(scope="module")
def judged() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judged_main", FOLDER / "__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.wide) for name in SHORT if name not in QUICK)])
def test_a_right_function_is_right_and_a_fault_is_named(judged: ModuleType, name: str) -> None:
    (pair,) = (pair for pair in judged.pairs() if pair.name == name)
    found = judged.judged(pair)
    assert found["right"] == "right" and found["named"], found


def test_the_record_is_of_these_problems_and_all_is_well(judged: ModuleType) -> None:
    pairs = judged.pairs()
    assert [pair.name for pair in pairs] == list(RECORD) and len(pairs) >= 40
    assert all(one["right"] == "right" and one["named"] and max(one["seconds"]) < 60 for one in RECORD.values())
    assert [pair.fault for pair in pairs] == [one["fault"] for one in RECORD.values()]
