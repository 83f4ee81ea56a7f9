"""The tests' own tools: compiled programs shared by workers, and what is in which suite."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

import compiled
from cupyflash import kernels_cu
from cupyflash.launch import nvrtc
from mutants import Mutant
from rooms import left_out, rooms_of
from suites import MORE, pairwise, sample, sweep, wide

HEADER = "#define NUMBER {}\n"
SOURCE = '#include "number.cuh"\nint number = NUMBER;'


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two workers' compilers with one folder, and what was really compiled."""
    seen: list[str] = []

    def compile_it(source: str, options: Any, name: str, product: str) -> tuple[bytes, str]:
        seen.append(name)
        if name == "bad":
            raise nvrtc.CompileError(name, "no")
        return source.encode(), str(options)

    monkeypatch.setattr(nvrtc, "_compile", nvrtc._compile)  # back to what it was when the test is over
    monkeypatch.setattr(compiled, "_compile", compile_it)
    workers = []
    for _ in range(2):
        compiled.share(tmp_path)
        workers.append(nvrtc._compile)
    return SimpleNamespace(seen=seen, workers=workers)


def test_a_program_is_compiled_by_one_worker_and_read_by_the_others(compiler: Any) -> None:
    for worker in compiler.workers * 2:
        assert worker("a", ("-x",), "one", "getPTX") == (b"a", "('-x',)")
    assert compiler.seen == ["one"]


def test_whatever_changes_a_program_is_another_one(compiler: Any, tmp_path: Path) -> None:
    worker, _ = compiler.workers
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "number.cuh").write_text(HEADER.format(1))
    options = (f"-I{folder}", "-x")
    worker(SOURCE, options, "first", "getPTX")
    worker(SOURCE + " ", options, "source", "getPTX")
    worker(SOURCE, (*options, "-y"), "options", "getPTX")
    worker(SOURCE, options, "first", "getCUBIN")
    (folder / "number.cuh").write_text(HEADER.format(2))
    worker(SOURCE, options, "first", "getPTX")
    assert compiler.seen == ["first", "source", "options", "first", "first"]


def test_what_does_not_compile_is_not_kept(compiler: Any) -> None:
    for worker in compiler.workers:
        with pytest.raises(nvrtc.CompileError):
            worker("a", (), "bad", "getPTX")
    assert compiler.seen == ["bad", "bad"]


def test_a_sample_has_every_case_and_marks_all_but_a_few() -> None:
    cases = sample([(1, "a"), (2, "b")], [(2, "b")])
    assert cases == [wide(1, "a"), (2, "b")] and sample("xy", {"x"}) == ["x", wide("y")]
    with pytest.raises(AssertionError):
        sample([(1, "a")], [(3, "c")])


def test_pairwise_leaves_each_pair_of_values_and_what_is_kept() -> None:
    cases = [case for case in product(range(4), "abc", [False, True], range(3)) if case != (0, "a", True, 1)]
    kept = [(0, "a", False, 2), (3, "c", True, 1)]
    left = pairwise(cases, kept)

    def pairs(some: list[tuple[Any, ...]]) -> set[Any]:
        return {pair for case in some for pair in combinations(enumerate(case), 2)}

    assert pairs(left) == pairs(cases) and set(kept) <= set(left) <= set(cases)
    assert MORE > 1 or len(left) < len(cases) / 2
    assert pairwise([(1, "a"), (2, "b"), (1, "b")]) == [(1, "a"), (2, "b"), (1, "b")] and pairwise([]) == []


def test_a_sweep_draws_few_examples_or_many() -> None:
    drawn = []

    @sweep(2, 5, number=st.integers(0, 99))
    def draws(letter: str, number: int) -> None:
        drawn.append((letter, number))

    (mark,) = draws.pytestmark  # type: ignore[attr-defined]
    assert mark.args == ("examples", [pytest.param(2, marks=pytest.mark.few), wide(5)])
    for examples in (2, 5):
        drawn.clear()
        draws(examples=examples, letter="a")
        assert len(drawn) == examples * MORE and {letter for letter, _ in drawn} == {"a"}


def test_every_test_file_is_in_one_room() -> None:
    files = [path.name for path in Path(__file__).parent.glob("test_*.py")]
    assert {file: len(rooms_of(file)) for file in files} == dict.fromkeys(files, 1)


def test_a_room_collects_its_own_tests_alone() -> None:
    here, chosen = Path(__file__).parent, ["theory", "commands"]
    assert not left_out(here / "test_cli.py", chosen) and not left_out(here / "test_counts.py", chosen)
    assert left_out(here / "test_merge.py", chosen) and not left_out(here / "gpu" / "test_machine.py", chosen)
    assert not left_out(here / "test_merge.py", None)


# What a user calls, or writes in the words of the problem
PUBLIC = {
    *("attention", "attention_backward", "attention_varlen", "attention_varlen_backward", "warmup", "execute_backward"),
    *("attention_decode", "warmup_decode", "execute_decode", "execute_varlen", "execute_varlen_backward"),
    *("ring_attention", "ring_attention_backward", "ring_attention_varlen", "ring_attention_varlen_backward", "options_asked"),
    *("Problem.__init__", "profile", "Module.launch", "plan_varlen_backward"),
    # other libraries' functions, with the parameters that they have there
    *("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "flex_attention", "dot_product_attention"),
    "fused",  # a kernel of Triton, whose tensors come one by one with their strides
}


@pytest.mark.wide
def test_no_function_but_public_calls_has_more_than_eight_parameters() -> None:
    root, crowded = Path(__file__).parents[1], set()
    for path in [path for folder in ("cupyflash", "sim", "benchmarks", "tests", ".ci") for path in (root / folder).rglob("*.py")]:
        tree = ast.parse(path.read_text())
        owners = {id(part): f"{owner.name}." for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for part in owner.body}
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            given = function.args
            names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs) if each.arg not in ("self", "cls")]
            if len(names) > 8:
                crowded.add(owners.get(id(function), "") + function.name)
    assert crowded <= PUBLIC


def faults_in(tables: Any) -> Iterator[Mutant]:
    """The faults of a module's tables, which may contain tables."""
    for value in tables.values():
        if isinstance(value, Mutant):
            yield value
        elif isinstance(value, dict):
            yield from faults_in(value)


def test_every_fault_is_of_a_text_that_there_is() -> None:
    """Most faults are seeded in the wide suite only; that a line has changed shows here."""
    tests = [path for path in Path(__file__).parent.glob("test_*.py") if "import Mutant" in path.read_text()]
    faults = {fault for path in tests for fault in faults_in(vars(import_module(path.stem)))}
    folders = kernels_cu.DIRECTORY, Path(__file__).parent / "kernels"
    found = {path.name: path.read_text() for folder in folders for path in folder.glob("*.cu*")}
    assert len(faults) > 300
    assert not [f"{fault.file} has no {fault.old!r}" for fault in faults if fault.old not in found[fault.file]]
