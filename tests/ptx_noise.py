"""Broken PTX, drawn: changes of texts that compilers wrote, and noise that no compiler ever would."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

TOKEN = re.compile(r"[A-Za-z_$%.@!][\w$.:]*|\d\w*|\s+|.", re.S)
NUMBERS = (
    *("0", "-1", "09", "0x", "0b", "1e9", "1.5", "0f3f80000", "0d3ff0000000000000", "999999", "4294967296", "1" * 30, "1" * 5000),
)
MARKS = (*"{}[]()<>;,:|!@=+-", '"', "/*", "*/", "//", "\0", "\ud800", "é")
WORDS = (
    *(
        ".reg",
        ".param",
        ".shared",
        ".global",
        ".const",
        ".align 3",
        ".entry",
        ".func",
        ".branchtargets",
        ".loc",
        ".file",
        ".section",
    ),
    *(
        "_",
        "%p1",
        "%r1",
        "%rd1",
        "%f1",
        "%tid.x",
        "bra",
        "call",
        "ret",
        "mov.b32",
        "setp.eq.and.s32",
        "ld.global.v4.u32",
        "bar.sync",
    ),
    *(
        "shfl.sync.idx.b32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "wgmma.wait_group.sync.aligned",
        "cvta.to.global.u64",
    ),
    *(
        ".maxntid 0",
        ".maxntid 1, 0, 5",
        ".reqntid 0",
        ".minnctapersm 0",
        ".maxnreg 0",
        ".reqnctapercluster 0, 1",
        ".maxclusterrank 0",
    ),
)
OPERANDS = ("{%r1, %r2}", "[%rd1+4]", "%r1|%p1", "!%p1", "!5", "WARP_SZ")


def tokens(text: str) -> list[str]:
    return TOKEN.findall(text)


def cut(draw: random.Random, parts: list[str]) -> None:
    at = draw.randrange(len(parts))
    del parts[at : at + draw.choice((1, 1, 1, 2, 5, 40))]


def twice(draw: random.Random, parts: list[str]) -> None:
    at = draw.randrange(len(parts))
    parts[at:at] = parts[at : at + draw.choice((1, 3, 20))] * draw.choice((1, 1, 50))


def swap(draw: random.Random, parts: list[str]) -> None:
    a, b = draw.randrange(len(parts)), draw.randrange(len(parts))
    parts[a], parts[b] = parts[b], parts[a]


def elsewhere(draw: random.Random, parts: list[str]) -> None:
    parts[draw.randrange(len(parts))] = draw.choice(parts)


def number(draw: random.Random, parts: list[str]) -> None:
    places = [at for at, part in enumerate(parts) if part[0].isdigit()]
    parts[draw.choice(places) if places else 0] = draw.choice(NUMBERS)


def mark(draw: random.Random, parts: list[str]) -> None:
    parts.insert(draw.randrange(len(parts)), draw.choice(MARKS) * draw.choice((1, 1, 1, 3, 300)))


def word(draw: random.Random, parts: list[str]) -> None:
    parts.insert(draw.randrange(len(parts)), f" {draw.choice(WORDS)} ")


def operand(draw: random.Random, parts: list[str]) -> None:
    places = [at for at, part in enumerate(parts) if part[0] in "%[" or part[0].isdigit()]
    parts[draw.choice(places) if places else 0] = draw.choice(
        (*NUMBERS, *MARKS, *WORDS, "{%r1, %r2}", "[%rd1+4]", "%r1|%p1", "!%p1", "!5")
    )


def truncate(draw: random.Random, parts: list[str]) -> None:
    del parts[draw.randrange(1, len(parts) + 1) :]


def statement(draw: random.Random, parts: list[str]) -> None:
    """A statement is lost, or comes twice."""
    ends = [at for at, part in enumerate(parts) if part == ";"]
    if len(ends) > 1:
        k = draw.randrange(len(ends) - 1)
        between = parts[ends[k] + 1 : ends[k + 1] + 1]
        parts[ends[k] + 1 : ends[k + 1] + 1] = between * draw.choice((0, 2))


CHANGES: tuple[Callable[[random.Random, list[str]], None], ...] = (
    *(cut, twice, swap, elsewhere, number, mark, word, operand, truncate, statement),
)


def broken(draw: random.Random, texts: list[str]) -> str:
    """One of the texts with one to four changes; now and then two of them spliced, or nothing but noise."""
    if draw.random() < 0.03:
        return "".join(draw.choice((*MARKS, *WORDS, *NUMBERS, " ", "\n")) for _ in range(draw.randrange(60)))
    parts = tokens(draw.choice(texts))
    if draw.random() < 0.05:
        other = tokens(draw.choice(texts))
        parts = parts[: draw.randrange(len(parts))] + other[draw.randrange(len(other)) :]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(CHANGES)(draw, parts)
        if not parts:
            break
    return "".join(parts)
