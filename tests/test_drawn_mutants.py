"""Drawn mutants of kernels and schedules: what is drawn, that it dies, and by what; and what schedules choose is written down."""

from __future__ import annotations

import ast
import sys
from argparse import Namespace
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

import mutator
import verdicts
from cupyflash import kernels_cu
from killers import killers
from mutator import KINDS, Mutant

sys.path.insert(0, str(mutator.ROOT / ".ci"))

DRAWN = mutator.kept()
STEPS = Mutant("cupyflash/schedules/packed.py", "constant", "            steps += 1", "            steps += 0")


@pytest.fixture(scope="module")
def examiner(tmp_path_factory: pytest.TempPathFactory) -> verdicts.Examiner:
    """An examiner with the programs that this run has compiled."""
    return verdicts.Examiner(str(verdicts.compiled.shared[0]))


def add_state(old: str, new: str) -> Mutant:
    """A change of the kernel that compiles fastest."""
    lines = (kernels_cu.DIRECTORY / "add_state.cu").read_text().split("\n")
    (line,) = (each for each in lines if old in each)
    return Mutant("kernels_cu/add_state.cu", "statement", line, line.replace(old, new))


def test_a_mutant_is_one_change_of_a_file() -> None:
    """A change of any kind, the same for a seed, leaves as many lines, of which one statement's differ; Python stays Python."""
    some = list(islice(mutator.drawn(5), 150))
    assert some == list(islice(mutator.drawn(5), 150)) != list(islice(mutator.drawn(6), 150))
    assert {each.kind for each in some} == set(KINDS) and {each.is_kernel for each in some} == {True, False}
    for mutant in some:
        before, after = mutant.path.read_text(), mutant.text()
        assert before != after and before.count("\n") == after.count("\n")
        if not mutant.is_kernel:
            ast.parse(after)


def test_drawn_ones_are_of_what_is_asked_for() -> None:
    for room, kind, pattern in (("kernels", "barrier", "fa3"), ("schedules", "relation", "decode")):
        some = list(islice(mutator.drawn(1, room, pattern, kind), 20))
        assert all(pattern in each.file and each.kind == kind and each.is_kernel == (room == "kernels") for each in some)


def test_a_swap_that_changes_nothing_is_no_mutant() -> None:
    text = "  x = fmaxf(a, b);\n  y = fmaf(a, b, c);\n  z = of(a, b);\n"
    made = [mutator.mutant_at("one.cu", text, site) for site in mutator.of_cuda(text) if site[0] == "swap"]
    assert [each.new.strip() for each in made if each] == ["y = fmaf(a, c, b);", "z = of(b, a);"]


def test_an_interrupted_draw_goes_on(tmp_path: Path) -> None:
    """Deaths are known from the file; a survivor is tried again."""
    tried: list[Mutant] = []

    class Tried:
        def examine(self, mutant: Mutant) -> verdicts.Verdict:
            tried.append(mutant)
            return verdicts.Verdict("survives" if len(tried) in (2, 5) else "killed", by="one")

    asked = Namespace(seed=5, room="kernels", file="", kind=None, json=tmp_path / "some.jsonl", again=None, renew=False)
    assert not mutator.examine(asked, Tried(), 4)[0] and len(tried) == 4
    assert not mutator.examine(asked, Tried(), 6)[0]
    assert len(tried) == 7 and tried[4] == tried[1] and len(set(tried)) == 6


@pytest.mark.parametrize(
    ("old", "new", "verdict", "says"),
    [
        ("m == NEG_INF ? 0.0f : m", "m", "killed", "numbers"),
        ("if (at >= p.rows) return;", "if (at >= p.rows)  return;", "survives", "0 of 1 problems have another program"),
        ("if (at >= p.rows) return;", "if (at >= rows) return;", "no program", "rows"),
    ],
)
def test_verdicts(examiner: verdicts.Examiner, old: str, new: str, verdict: str, says: str) -> None:
    """A mutant that breaks a kernel dies, one that changes no program lives, and one that does not compile is neither."""
    found = examiner.examine(add_state(old, new))
    assert found.verdict == verdict and says in found.why, found


def test_by_one_problem_is_by_that_alone(examiner: verdicts.Examiner) -> None:
    """A mutant that dies by another problem survives."""
    mutant = add_state("m == NEG_INF ? 0.0f : m", "m")
    assert [examiner.examine(mutant, by).verdict for by in ("add_state 1", "softmax 1")] == ["killed", "survives"]


def test_a_room_is_renewed_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other room's stay, kernels first; and a mutant whose lines are gone says what to do."""
    kernels, schedules = ([one for one in DRAWN if Mutant.of(one).room == room] for room in mutator.SHARES)
    monkeypatch.setattr(mutator, "DRAWN", tmp_path / "drawn.jsonl")
    mutator.DRAWN.write_text("")
    for room, some in (("schedules", schedules), ("kernels", kernels), ("schedules", schedules[:1])):
        mutator.keep(room, some)
    assert mutator.kept() == [*kernels, *schedules[:1]]
    with pytest.raises(ValueError, match="--renew"):
        Mutant("kernels_cu/add_state.cu", "statement", "gone", "").text()


@pytest.mark.parametrize("more", [1, -1])
def test_what_takes_more_or_less_dies(more: int) -> None:
    """Numbers and bytes as they were, and an instruction more or less."""
    (problem,) = (each for each in killers() if each.add_state)
    now = verdicts.killers.written()
    other = now[problem.name] | {"instructions": now[problem.name]["instructions"] - more}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="takes other counts than it did"):
        patch.setattr("killers.written", lambda: {"nvrtc": verdicts.killers.nvrtc_version(), problem.name: other})
        problem.check()


def test_listed_mutants_are_there() -> None:
    """Equivalent mutants, each with a reason, and those that the wide suite runs: their lines stand in the files once."""
    assert all(len(why) > 20 for why in mutator.equivalent().values())
    known = [Mutant(file, "", old, new) for file, old, new in mutator.equivalent()]
    for name, advice, some in (
        (mutator.EQUIVALENT.name, "write down their lines as they are now, or take them out", known),
        (mutator.DRAWN.name, mutator.RENEW, [Mutant.of(one) for one in DRAWN]),
    ):
        gone = [f"{each.file}: {each.old!r}" for each in some if each.path.read_text().count(each.old) != 1]
        assert not gone, f"{name} has mutants of lines that are not in the files once; {advice}\n" + "\n".join(gone)
    assert Counter(Mutant.of(one).room for one in DRAWN) == mutator.SHARES
    assert not {Mutant.of(one).key for one in DRAWN} & set(mutator.equivalent())


def test_every_kernel_has_problems() -> None:
    """Each file of CUDA C is in a program of some problem, and each problem says why it is there."""
    seen = {file for each in killers() for kernel in each.kernels for file in verdicts.killers.closure(kernel.source)}
    assert {path.name for path in kernels_cu.DIRECTORY.glob("*.cu*")} == seen
    assert all(each.why for each in killers()) and len({each.name for each in killers()}) == len(killers())


@pytest.mark.wide
@pytest.mark.parametrize("name", sorted({one["by"] for one in DRAWN} & {each.name for each in killers()}))
def test_a_problem_holds_without_mutants(name: str) -> None:
    """Otherwise mutants would die of it. Comes first, so that what is compiled and decoded here is there for the mutants."""
    (problem,) = (each for each in killers() if each.name == name)
    problem.check()


@pytest.mark.wide
@pytest.mark.parametrize("one", DRAWN, ids=lambda one: Path(one["file"]).name)
def test_a_drawn_mutant_dies(examiner: verdicts.Examiner, one: dict[str, str]) -> None:
    mutant, by = Mutant.of(one), one["by"]
    found = examiner.examine(mutant, by)
    assert found.verdict == "killed", f"{mutant}: {found.verdict}, {found.why} ({by}); or {mutator.RENEW}"


@pytest.mark.wide
def test_a_search_without_end_dies(examiner: verdicts.Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only more sequences than a warp looks at in a step come to a second one."""
    monkeypatch.setattr(verdicts, "LONGEST", 2)
    found = examiner.examine(STEPS, "fa2_forward 15")
    assert found.verdict == "killed" and "Endless" in found.why, found


@pytest.mark.wide
@pytest.mark.parametrize("name", ["planned.txt", "modelled.txt", "drawn.txt"])
def test_choices_are_as_they_are_written_down(name: str) -> None:
    """`python .ci/choices.py --write` writes what they are now."""
    import choices

    assert list(choices.differences(name)) == []
