"""Rows of the table of elementwise opcodes: (opcode, form, expression); an instruction's plan is made from its row.

A form lists types and modifiers as PTX ISA does. `{.rn .rz}{.ftz}.f32 .f64` has two optional modifiers, the first of them one of
two, and takes either type; what is not in braces and no type is required. The expression (`expressions`) is a text, a text by
modifiers, or a function that makes the text from what the instruction has.

What many opcodes have in common is no part of their expressions: `.sat` and `.relu` limit the result, the rounding and `.ftz` are
bits of the host's floating-point environment (`rounding`), and halves are widened to float32 and their result is narrowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np

from ...text.syntax import SINK, TYPES, Array, Imm, Instruction, Not, Operand, Pair, PtxType, Reg, Unsupported
from ..registry import Arg, Frame, Plan, Thunk, arg, known, opcode
from .expressions import Apply, Expression, Meaning, Name, evaluate, meaning, substitute
from .rounding import HALF_TYPES, KEEP, NEAREST, ROUNDING, mode

RANGES = {".u16-.s64": ".u16 .s16 .u32 .s32 .u64 .s64", "halves": ".f16 .f16x2 .bf16 .bf16x2"}
"""Short names of several types in forms."""

KINDS = {
    **TYPES,
    **{name: PtxType(name, 32, name[0], np.dtype(np.uint32)) for name in ("u16x2", "s16x2")},
    **{name: PtxType(name, 16, "b", np.dtype(np.uint16)) for name in ("e4m3x2", "e5m2x2")},
}
"""The types that an elementwise instruction may name."""

CARRY = Reg("%carry", TYPES["pred"])
"""CC.CF, the condition code of extended-precision arithmetic: one a lane."""


@dataclass
class Case:
    """An instruction's modifiers, types and operands, for expressions that depend on them."""

    opcode: str
    mods: frozenset[str]
    types: tuple[PtxType, ...]
    operands: list[Operand]

    def one_of(self, names: Iterable[str], default: str = "") -> str:
        """Returns the modifier that is one of `names`."""
        return next((name for name in names if name in self.mods), default)

    def constant(self) -> int:
        """Takes the last operand, a constant, away."""
        last = self.operands.pop()
        if not isinstance(last, Imm):
            raise Unsupported("the table must be constant")
        return last.value


Text = str | Mapping[str, str] | Callable[[Case], str]
SOURCES = "abce"
"""The operands behind the result."""

DONE = 4
"""The number of checks of a form."""


def words(text: str) -> list[str]:
    return re.findall(r"[\w:]+", text)


@dataclass(frozen=True, eq=False)
class Row:
    """One form of an opcode, and what it does. `count`: the number of types that an instruction names."""

    opcode: str
    form: str
    text: Text
    count: int

    @cached_property
    def described(self) -> str:
        """The form, with the modifiers that choose a text."""
        if not isinstance(self.text, Mapping):
            return self.form
        names = " ".join(f".{name}" for name in self.text if name)
        return f"{{{names}}}{self.form}" if "" in self.text else f"{names} {self.form}"

    @cached_property
    def groups(self) -> list[list[str]]:
        """Groups of optional modifiers, each with at most one; the last one has the types, and what is required."""
        return [words(group) for group in [*re.findall(r"\{(.*?)\}", self.form), re.sub(r"\{.*?\}", "", self.form)]]

    def check(self, mods: Sequence[str]) -> tuple[int, str]:
        """Returns (DONE, the key of the text), or (number of passed checks, the reason of the refusal)."""
        *optional, plain = self.groups
        types, rest = [m for m in mods if m in KINDS], [m for m in mods if m not in KINDS]
        for name in types:
            if name not in plain:
                return 0, f"type .{name} is not executed here"
        if len(types) != self.count:
            return 1, f"expected {COUNTS[self.count]}, got {len(types)}"
        keys = self.text if isinstance(self.text, Mapping) else [""]
        key = max((key for key in keys if set(words(key)) <= set(rest)), key=len, default=None)
        required = [name for name in plain if name not in KINDS]
        if key is None or (required and not set(required) & set(rest)):
            return 2, f"{self.opcode} needs one of .{', .'.join(required or keys)}"
        for group in [*([word] for word in words(key)), *optional, required]:
            for name in [name for name in rest if name in group][:1]:
                rest.remove(name)
        return (3, f"modifier .{rest[0]} is not executed here") if rest else (DONE, key)


COUNTS = {1: "one type", 2: "two types", 3: "three types"}
ROWS: dict[str, list[Row]] = {}


def row(opcodes: str, form: str, text: Text, count: int = 1) -> None:
    """Adds a row for each of `opcodes`."""
    for short, types in RANGES.items():
        form = form.replace(short, types)
    for name in opcodes.split():
        if not known(name):
            opcode(name, forms=partial(forms, name), family="elementwise")(decode)
        ROWS.setdefault(name, []).append(Row(name, form, text, count))


def forms(name: str) -> str:
    """Returns the forms of an opcode, as the list of opcodes shows them."""
    text = "; ".join(one.described for one in ROWS[name])
    for short, types in RANGES.items():
        text = text.replace(types, short)
    return text


@cache
def choose(name: str, mods: tuple[str, ...]) -> tuple[Row, str]:
    """Returns the row of an instruction, and the key of its text. Raises `Unsupported` for the row that fits best."""
    checks = [(*one.check(mods), one) for one in ROWS[name]]
    passed, answer, best = max(checks, key=lambda check: check[0])
    if passed < DONE:
        raise Unsupported(answer)
    return best, answer


def decode(i: Instruction) -> Plan:
    """Returns the plan of an instruction with a row."""
    found, key = choose(i.opcode, i.mods)
    case = Case(i.opcode, frozenset(i.mods), tuple(KINDS[m] for m in i.mods if m in KINDS), list(i.operands))
    text = found.text[key] if isinstance(found.text, Mapping) else found.text if isinstance(found.text, str) else found.text(case)
    return plan(case, meaning(text, case.types[-1]))


# -- plans ----------------------------------------------------------------------------------------------------------------


def extended(operand: Operand, type_: PtxType) -> Arg:
    """Returns a destination that may be wider than the type: it is then seen whole, to be sign- or zero-extended."""
    if isinstance(operand, Reg) and operand.type.bits > type_.bits:
        return Arg(operand, TYPES[f"{'s' if type_.kind == 's' else 'u'}{operand.type.bits}"].dtype)
    return arg(operand, type_)


def plan(case: Case, found: Meaning) -> Plan:
    """Returns the plan of an instruction with this meaning."""
    to, *sources = case.operands
    if len(sources) != len([name for name in found.reads if name in SOURCES]):
        raise Unsupported(f"unknown operand form: {len(sources)} operands behind the result")
    first, second = (to.first, to.second) if isinstance(to, Pair) else (to, SINK)
    operands = dict(zip(SOURCES, sources, strict=False)) | {"d": to, "p": first, "q": second, "carry": CARRY}
    own = {"d": case.types[0]} | dict.fromkeys(SOURCES, case.types[-1])
    types = {name: KINDS.get(found.views.get(name, "")) or own[name] for name in (*found.targets, *found.reads)}
    negated = {name for name, type_ in types.items() if type_ == TYPES["pred"] != case.types[-1]} & {
        name for name, operand in operands.items() if isinstance(operand, Not)
    }

    def seen(name: str) -> Arg:
        operand = operands[name]
        if found.views.get(name) == "extended":
            return extended(operand, types[name])
        return arg(operand.reg if isinstance(operand, Not) and name in negated else operand, types[name])

    def source(name: Name) -> Expression:
        if name.name not in types:
            return name
        return Apply("invert", (name,)) if name.name in negated else widened(name, types[name.name], case)

    written = [k for k, name in enumerate(found.targets) if operands[name] != SINK] or [0]
    targets = [found.targets[k] for k in written]
    values = [result(substitute(found.values[k], source), types[name], case) for k, name in zip(written, targets, strict=True)]

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        return evaluate(values, frame, out, dict(zip(found.reads, ins, strict=True)))

    return Plan(tuple(map(seen, targets)), tuple(map(seen, found.reads)), bind, environment(case, list(types.values())))


def flushes(case: Case) -> bool:
    """True if halves are flushed here. A conversion flushes float32 only."""
    return "ftz" in case.mods and len(case.types) == 1


def widened(name: Name, type_: PtxType, case: Case) -> Expression:
    """Returns an operand as a number to work with: halves as float32."""
    if type_.name not in HALF_TYPES:
        return name
    element = type_.name.removesuffix("x2")
    value = Apply("f32" if element == "f16" else "bfloat_value", (name,))
    return Apply("flushed", (value, element)) if flushes(case) else value


def result(e: Expression, type_: PtxType, case: Case) -> Expression:
    """Returns a value as the destination gets it: limited by .sat and .relu, and narrowed to halves unless it is one."""
    element = type_.name.removesuffix("x2")
    halves = type_.name in HALF_TYPES
    if halves and isinstance(e, Apply) and e.primitive == element:
        return e
    if "sat" in case.mods and type_.kind == "f":
        e = Apply("saturated", (e,))
    if "relu" in case.mods and type_.kind != "b":
        e = Apply("maximum", (e, 0))
    if not halves:
        return e
    if flushes(case):
        e = Apply("flushed", (e, element))
    return Apply(f"{element}_bits", (e, case.one_of(ROUNDING, "rn")))


def environment(case: Case, types: Sequence[PtxType]) -> int | None:
    """Returns the floating-point environment: the instruction's, if a float32 or float64 is its result (the first of `types`)."""
    if not any(type_.kind == "f" for type_ in types):
        return None
    halves = [type_.name in HALF_TYPES for type_ in types]
    if any(halves) and len(case.types) == 1:
        return KEEP
    directed = types[0].kind == "f" and not (halves[0] and types[-1].kind == "f")
    direction = ROUNDING[case.one_of(ROUNDING, "rn")] if directed else NEAREST
    return mode(direction, "ftz" in case.mods)
