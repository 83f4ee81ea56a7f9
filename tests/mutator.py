#!/usr/bin/env python3
"""Draws mutants of the kernels (CUDA C) and of the schedules (Python), and says which of them die, and by which problem.

    python tests/mutator.py --seed 7 --count 60 [--room kernels|schedules] [--file PATTERN] [--kind KIND] [--json FILE] [--renew]

A mutant is one change: a relation or an operator, a constant, a statement that is dropped, a barrier that is dropped, two
arguments or indices that are swapped, a condition that always or never holds. It dies by the problems of killers.toml (killers.py
says what is held against each); one of a schedule also by what is written down of choices and models (.ci/choices.py), and by quick
tests. What does not compile or import is drawn again, and so is a swap of what may be swapped, as the arguments of max. Mutants
that change nothing are listed, with reasons, in equivalent_mutants.toml.

Deaths that the --json file has are not repeated: an interrupted draw goes on. `--again FILE` tries the survivors of such a file.
`--renew` writes drawn_mutants.jsonl, which the wide suite runs, or a room's part of it: the first of a room's draw that die, each
with what it dies by, but for those whose death takes long; where one survives, it writes nothing.
`--spent` runs all problems on the kernels as they are, with `--file` those of some kernels, and writes down what each takes
(killers_spent.json), for who changes a kernel so that it takes more, or less. CUPYFLASH_TEST_PROGRAMS is a folder for programs.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import io
import json
import os
import random
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KERNELS, SCHEDULES = "kernels_cu", "cupyflash"
# What sizes launches beside the schedules themselves
PYTHON = ("schedules/*.py", "tiling.py", "rows.py", "tiled_mask.py", "multiprocessor.py")
KINDS = ("relation", "operator", "constant", "statement", "barrier", "swap", "condition")
# A mutant of a schedule with which pytest runs tests (-p mutator)
VARIABLE = "CUPYFLASH_MUTANT"
# The wide suite's draw: its seed, how many of each room, and the processor time in s that the death of one may take
SEED, SHARES, DEAREST = 401, {"kernels": 45, "schedules": 15}, 3.0
RENEW = "draw the wide suite's again: python tests/mutator.py --renew"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
DRAWN = Path(__file__).with_name("drawn_mutants.jsonl")


@dataclass(frozen=True)
class Mutant:
    """`old` in `file`, whole lines that are there once, becomes `new`, which has as many lines."""

    file: str
    kind: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return ROOT / self.file

    @property
    def module(self) -> str:
        """The name by which Python imports a schedule's file."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_kernel(self) -> bool:
        return self.file.startswith(KERNELS + "/")

    @classmethod
    def of(cls, fields: dict[str, str]) -> Mutant:
        return cls(*(fields[name] for name in ("file", "kind", "old", "new")))

    @property
    def room(self) -> str:
        return "kernels" if self.is_kernel else "schedules"

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of a mutant, which stays when lines move."""
        return self.file, self.old, self.new

    def text(self) -> str:
        """The file with the change. ValueError where `old` is not there once."""
        text = self.path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}: {RENEW}")
        return text.replace(self.old, self.new)

    @property
    def line(self) -> int:
        """The first changed line."""
        before = self.path.read_text().split(self.old)[0].count("\n") + 1
        return before + next(n for n, (a, b) in enumerate(zip(self.old.split("\n"), self.new.split("\n"), strict=True)) if a != b)

    def __str__(self) -> str:
        changed = [(a, b) for a, b in zip(self.old.split("\n"), self.new.split("\n"), strict=True) if a != b]
        return f"{self.file}:{self.line} ({self.kind}): " + "; ".join(f"{a.strip()}  ->  {b.strip()}" for a, b in changed)


# --- what may be changed: (kind, where, where it ends, instead)

Site = tuple[str, int, int, str]
OPERATORS = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "%": "/",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "|",
    "+=": "-=",
    "-=": "+=",
    "*=": "/=",
    "|=": "&=",
    "&=": "|=",
    "//": "*",
    "**": "*",
}
RELATIONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "and": "or", "or": "and"}
RELATIONS |= {"in": "not in", "is": "is not"}
# Calls whose first two arguments may be swapped
SYMMETRIC = re.compile(r"\b(?:fmaxf|fminf|fmaf|__fmul_rn|__fadd_rn|max|min|maximum|minimum)\($")
BARRIER = re.compile(
    r"__sync|\bmeet\(|wait|commit|close_group|fence|publish|arrive|mbarrier|release|\bbar\.|barrier|__nanosleep|acquire|expect"
)
WORDS = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|static_assert\([^;]*;',
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])(\d+)(?:(\.\d*)f?|u|ull)?(?![\w.])")


def other_numbers(digits: str) -> list[str]:
    """The numbers that replace a whole number: one more, one less; 0 and 1 each other."""
    n = int(digits)
    return [str(each) for each in ((n + 1, n - 1) if n else (1,)) if each >= 0]


def blanked(text: str) -> str:
    """CUDA C without comments, texts, lines of the preprocessor and asserts at compile time, every character where it was."""
    return WORDS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def of_cuda(text: str) -> Iterator[Site]:
    """Every known change of a file of CUDA C. In this project's layout binary operators stand between blanks; operators without
    blanks (templates, pointers) are left alone."""
    bare = blanked(text)
    for found in re.finditer(r"(?<= )(<<|>>|<=|>=|==|!=|&&|\|\||\+=|-=|\*=|\|=|&=|[-+*/%<>&|^])(?= )", bare):
        word = found[1]
        kind, table = ("relation", RELATIONS) if word in RELATIONS else ("operator", OPERATORS)
        yield kind, *found.span(1), table[word]
    for found in re.finditer(r"(?<=[\w\])])\+\+|--(?=[;)])", bare):
        yield "operator", *found.span(), "--" if found[0] == "++" else "++"
    for found in NUMBER.finditer(bare):
        for other in other_numbers(found[1]):
            yield "constant", *found.span(1), other
    yield from dropped_of_cuda(text, bare)
    for begin, end in calls(bare):
        parts = split(bare, begin, end)
        for (a, b), (c, d) in pairwise(parts):
            if bare[a:b].strip() and bare[a:b].strip() != bare[c:d].strip():
                yield "swap", a, d, text[c:d] + text[b:c] + text[a:b]
    for found in re.finditer(r"\]\[", bare):
        begin, end = bare.rfind("[", 0, found.start()), bare.find("]", found.end())
        first, second = text[begin + 1 : found.start()], text[found.end() : end]
        if first != second:
            yield "swap", begin + 1, end, f"{second}][{first}"
    for found in re.finditer(r"\b(?:if|while) \(|\bfor \([^;()]*;", bare):
        begin = found.end()
        end = closing(bare, begin) if found[0][-1] == "(" else bare.find(";", begin)
        for other in ("true", "false"):
            if bare[begin:end].strip():
                yield "condition", begin, end, other
    for found in re.finditer(r"(?<=[ (])!(?=[\w(])", bare):
        yield "condition", *found.span(), ""
    for found in re.finditer(r" \? ([^?:;]+) : ([^?:;,)]+)(?=[;,)])", bare):
        yield "swap", found.start(1), found.end(2), f"{text[found.start(2) : found.end(2)]} : {text[found.start(1) : found.end(1)]}"


def closing(bare: str, begin: int) -> int:
    """The end of the bracket that is opened before `begin`."""
    depth = 1
    for place in range(begin, len(bare)):
        depth += (bare[place] in "([{") - (bare[place] in ")]}")
        if depth == 0:
            return place
    return len(bare)


def calls(bare: str) -> Iterator[tuple[int, int]]:
    """The texts between the brackets of calls, not of definitions."""
    for found in re.finditer(r"[\w>](\(|\{)", bare):
        end = closing(bare, found.end())
        line = bare[bare.rfind("\n", 0, found.start()) + 1 : found.start()]
        if "__device__" in line or "__global__" in line or bare[found.end() : end].count(";"):
            continue
        yield found.end(), end


def split(bare: str, begin: int, end: int) -> list[tuple[int, int]]:
    """The parts between a call's commas, without the blanks at their ends."""
    parts, depth, start = [], 0, begin
    for place in range(begin, end + 1):
        letter = bare[place] if place < end else ","
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            part = bare[start:place]
            parts.append((start + len(part) - len(part.lstrip()), start + len(part.rstrip())))
            start = place + 1
    return parts


DECLARES = re.compile(
    r"(return|using|typedef|template|struct|static|constexpr|enum|extern|break|continue|friend|namespace|__device__|const|int|unsigned"
    r"|float|bool|long|if|for|while|else|do)\b"
)


def dropped_of_cuda(text: str, bare: str) -> Iterator[Site]:
    """Statements that may go: calls, assignments, jumps, texts of assembler."""
    for found in re.finditer(r"(?<=[;{})\n])[ \t]*((?:asm volatile|[\w*&(])[^;{}]*);", bare):
        begin, end = found.span(1)
        statement = bare[begin:end]
        simple = re.match(
            r"(asm volatile|[\w.\->*\[\]:()<>, +&]+\(|[\w.\->*\[\]()+ /%]+ ?([-+*|&^]|<<|>>)?= |\+\+|--|[\w.\[\]]+(\+\+|--)$)",
            statement,
        )
        jumps = re.match(r"(return|continue|break)$", statement)
        if not jumps and (not simple or DECLARES.match(statement)):
            continue
        if re.match(r"[A-Za-z_][\w:<>, ]*[*&]? +[*&]?\w+ ?(=|\(|$)", statement):
            continue  # a declaration
        kind = "barrier" if BARRIER.search(text[begin:end]) else "statement"
        yield kind, begin, end + 1, "(void)0;" + "\n" * text[begin:end].count("\n")


def of_python(text: str) -> Iterator[Site]:
    """Every known change of a Python file; texts, annotations and `raise` statements stay."""
    tree = ast.parse(text)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node: Any) -> tuple[int, int]:
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    left = [span(node) for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", ())]
        left += [span(note) for note in notes if note is not None]

    def stays(begin: int, end: int) -> bool:
        return any(a <= begin and end <= b for a, b in left)

    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        begin, end = (starts[line - 1] + column for line, column in (token.start, token.end))
        word = token.string
        if stays(begin, end):
            continue
        two_sided = text[begin - 1 : begin] == " " and text[end : end + 1] == " "
        if token.type in (tokenize.OP, tokenize.NAME) and two_sided:
            if word == "is" and text[end : end + 5] == " not ":
                yield "relation", begin, end + 4, "is"
            elif word in RELATIONS and not (
                word == "in" and re.match(r"[^\n]*\bfor\b[^\n]*$", text[text.rfind("\n", 0, begin) + 1 : begin])
            ):
                yield "relation", begin, end, RELATIONS[word]
            elif word in OPERATORS:
                yield "operator", begin, end, OPERATORS[word]
        if token.type == tokenize.NUMBER and word.isdecimal():
            for other in other_numbers(word):
                yield "constant", begin, end, other
        if word in ("min", "max") and text[end : end + 1] == "(":
            yield "swap", begin, end, "max" if word == "min" else "min"
        if word in ("True", "False"):
            yield "constant", begin, end, str(word != "True")
        if word == "not" and text[begin - 3 : begin] != "is " and text[end : end + 4] != " in ":
            yield "condition", begin, end, ""
    for node in ast.walk(tree):
        if not hasattr(node, "lineno") or stays(*span(node)):
            continue
        begin, end = span(node)
        if isinstance(node, ast.AugAssign | ast.Delete) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)
        ):
            yield "statement", begin, end, "pass" + "\n" * text[begin:end].count("\n")
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            for other in ("True", "False"):
                yield "condition", *span(node.test), other + "\n" * 0
        if isinstance(node, ast.IfExp):
            (a, b), (c, d) = span(node.body), span(node.orelse)
            yield "swap", a, d, text[c:d] + text[b:c] + text[a:b]
        if isinstance(node, ast.Call | ast.Tuple):
            parts = node.args if isinstance(node, ast.Call) else node.elts
            for one, two in pairwise(parts):
                (a, b), (c, d) = span(one), span(two)
                if text[a:b] != text[c:d] and text[a - 1 : a] != "*":
                    yield "swap", a, d, text[c:d] + text[b:c] + text[a:b]


def mutant_at(file: str, text: str, site: Site) -> Mutant | None:
    """A change as whole lines, as many before it as make them unlike all others; None where that changes the number of lines, or
    nothing."""
    kind, begin, end, instead = site
    if kind == "swap" and SYMMETRIC.search(text, 0, begin):
        return None
    if text[begin:end].count("\n") != instead.count("\n"):
        instead += "\n" * (text[begin:end].count("\n") - instead.count("\n"))
    first, last = text.rfind("\n", 0, begin) + 1, (text + "\n").find("\n", end)
    while text.count(text[first:last]) > 1 and first > 0:
        first = text.rfind("\n", 0, first - 1) + 1
    old, new = text[first:last], text[first:begin] + instead + text[end:last]
    return Mutant(file, kind, old, new) if old != new and old.count("\n") == new.count("\n") else None


@cache
def sites(file: str) -> tuple[Site, ...]:
    text = (ROOT / file).read_text()
    return tuple((of_python if file.endswith(".py") else of_cuda)(text))


def files(room: str | None = None, pattern: str = "") -> list[str]:
    """The files that mutants are drawn from."""
    kernels = sorted((ROOT / KERNELS).glob("*.cu*"))
    schedules = sorted(path for each in PYTHON for path in (ROOT / SCHEDULES).glob(each))
    chosen = {"kernels": kernels, "schedules": schedules, None: kernels + schedules}[room]
    names = [path.relative_to(ROOT).as_posix() for path in chosen]
    return [name for name in names if pattern in name]


def drawn(seed: int, room: str | None = None, pattern: str = "", kind: str | None = None) -> Iterator[Mutant]:
    """Mutants without end: a room, three of four times the kernels; a kind; then each place of that kind as often as the others."""
    rng = random.Random(seed)
    known: dict[str | None, dict[str, list[tuple[str, Site]]]] = {}
    for one in ("kernels", "schedules") if room is None else (room,):
        known[one] = {}
        for file in files(one, pattern):
            for site in sites(file):
                known[one].setdefault(site[0], []).append((file, site))
    rooms = [one for one, places in known.items() if places]
    while True:
        places = known[rng.choices(rooms, [3 if one == "kernels" else 1 for one in rooms])[0]]
        chosen = kind if kind in places else rng.choice([each for each in KINDS if each in places])
        file, site = rng.choice(places[chosen])
        made = mutant_at(file, (ROOT / file).read_text(), site)
        if made is not None:
            yield made


def equivalent() -> dict[tuple[str, str, str], str]:
    """Mutants that change nothing that anybody could see, with the reason."""
    listed: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text()).get("mutant", []) if EQUIVALENT.exists() else []
    return {(each["file"], each["old"], each["new"]): each["why"] for each in listed}


class Changed(importlib.abc.MetaPathFinder):
    """Finds one module with another text."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.path, self.text = mutant.module, str(mutant.path), mutant.text()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        package = self.path.endswith("__init__.py")
        loader = _Text(self.text, self.path)
        return importlib.util.spec_from_file_location(
            fullname, self.path, loader=loader, submodule_search_locations=[str(Path(self.path).parent)] if package else None
        )


class _Text(importlib.abc.SourceLoader):
    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path

    def get_filename(self, fullname: str) -> str:
        return self.path

    def get_data(self, path: str) -> bytes:
        if path != self.path:
            raise OSError(path)  # no bytecode
        return self.text.encode()


def use(mutant: Mutant) -> None:
    """Make whatever imports the mutant's module get the changed one from now on."""
    sys.meta_path.insert(0, Changed(mutant))


if VARIABLE in os.environ:
    use(Mutant(**json.loads(os.environ[VARIABLE])))


# --- the command


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--room", choices=("kernels", "schedules"))
    parser.add_argument("--file", default="", help="only files whose path has this in it")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--json", type=Path, help="a file to which each verdict is added, a line each; its deaths count")
    parser.add_argument("--again", type=Path, help="such a file, whose survivors are tried again")
    parser.add_argument("--spent", action="store_true", help="write down what each problem takes, unchanged")
    parser.add_argument("--renew", action="store_true", help="draw those of the wide suite")
    return parser.parse_args()


def kept() -> list[dict[str, str]]:
    """The wide suite's: the fields of a mutant, and what it dies `by`."""
    return [json.loads(line) for line in DRAWN.read_text().splitlines()]


def keep(room: str, some: list[dict[str, str]]) -> None:
    """Makes these a room's part of the wide suite's."""
    others = [one for one in kept() if Mutant.of(one).room != room]
    DRAWN.write_text("".join(json.dumps(one) + "\n" for one in sorted(some + others, key=lambda one: Mutant.of(one).room)))


def known_deaths(path: Path | None) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The verdicts of a --json file that are deaths, by mutant."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    return {Mutant.of(one).key: one for one in found if one["verdict"] == "killed"}


def wanted(asked: argparse.Namespace) -> Iterator[Mutant]:
    if asked.again is None:
        yield from drawn(asked.seed, asked.room, asked.file, asked.kind)
    for line in asked.again.read_text().splitlines():
        found = json.loads(line)
        if found["verdict"] == "survives":
            yield Mutant.of(found)


def examine(asked: argparse.Namespace, examiner: Any, enough: int) -> tuple[bool, list[dict[str, str]]]:
    """Says what becomes of so many; returns whether none survives, and with --renew those to keep, which it then counts."""
    counts, spent, seen = Counter[str](), 0.0, set[tuple[str, str, str]]()
    same, deaths = equivalent(), known_deaths(asked.json)
    kept: list[dict[str, str]] = []
    for mutant in wanted(asked):
        if (len(kept) if asked.renew else counts.total() - counts["no program"]) >= enough:
            break
        if mutant.key in seen:
            continue
        seen.add(mutant.key)
        if mutant.key in same:
            found = {"verdict": "equivalent", "why": same[mutant.key], "by": "", "seconds": 0.0}
        else:
            found = deaths.get(mutant.key) or asdict(examiner.examine(mutant))
        counts[found["verdict"]] += 1
        spent += found["seconds"]
        print(f"{found['verdict']:<12}{found['seconds']:6.1f} s  {mutant}\n{'':12}{found['why']}", flush=True)
        if asked.json and found["verdict"] != "no program" and mutant.key not in deaths:
            with asked.json.open("a") as file:
                file.write(json.dumps(asdict(mutant) | found) + "\n")
        if asked.renew and found["verdict"] == "killed" and found["by"]:
            # By that alone it may die sooner
            again = found if found["seconds"] <= DEAREST else asdict(examiner.examine(mutant, found["by"]))
            if again["verdict"] == "killed" and again["seconds"] <= DEAREST:
                kept.append(asdict(mutant) | {"by": found["by"]})
    died, others = counts["killed"], (counts["equivalent"], counts["no program"])
    lived = counts.total() - died - sum(others)
    print(f"\n{died} of {died + lived} die; equivalent: {others[0]}, no program: {others[1]}; {spent:.0f} s of processor time")
    return lived == 0, kept


def main() -> int:
    import verdicts

    asked = arguments()
    if asked.spent:
        verdicts.write_spent(asked.file)
        return 0
    examiner = verdicts.Examiner(os.environ.get("CUPYFLASH_TEST_PROGRAMS"))
    if not asked.renew:
        return 0 if examine(asked, examiner, asked.count)[0] else 1
    for room in [asked.room] if asked.room else SHARES:
        asked.room = room
        fine, some = examine(asked, examiner, SHARES[room])
        if not fine:
            print(f"{DRAWN.name} stays as it was: first a problem for each survivor, or its reason in {EQUIVALENT.name}")
            return 1
        keep(room, some)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    sys.exit(main())
