"""Provenance of addresses: the tensors that an access may reach, and the variable of shared memory that it is of.

An access to shared memory is of the variable from whose address its own was computed, if that is sure. A compiler keeps
`__shared__` arrays apart as variables and does not know their order in memory: no address that it computes from one is meant for
another. Addresses that may come from several variables, or from none, say nothing.

A guessed load is one of a word that an atomic compare-and-swap at the same address then compares with the loaded value.

    old = *p; do { assumed = old; old = atomicCAS(p, assumed, f(assumed)); } while (assumed != old);

This ordinary load races with other threads' atomics by the PTX ISA. It does no harm: a swap with a wrong guess does not happen.
That holds if all values computed from the guess go only into such a swap, until the swap's answer has been compared with the
guess: then the guess was right, or the values computed from it are not used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..memory.swizzles import ADDRESS_AT
from ..order.shadow import WIDEST, Sharing, is_async, is_narrow, is_phase, is_strong
from ..state.segments import Place, PointerField
from ..text.syntax import TYPES, Imm, Mem, Operand, PtxInstruction, Reg, Sym, Variable, Vec, leaves
from .flow import ControlFlow
from .registry import Branch, Plan, named

NUMBER, UNSURE = "", "*"
"""The contents of a register that is no address in a variable: a number (or an address elsewhere); unknown."""


TEXTURES = frozenset({"tex", "tld4", "txq", "suld", "sust", "suq"})
"""Opcodes whose address is the handle of a texture or surface, with coordinates in that."""


class Home(NamedTuple):
    """A variable of shared memory and its place, in bytes; `end` None: to the end of all."""

    name: str
    start: int
    end: int | None


def homes(plans: Sequence[Plan], variables: Mapping[str, Home]) -> dict[PtxInstruction, Home]:
    """Returns the accesses that may only be of one of these variables, each with that variable."""
    if len({home.start for home in variables.values()}) < 2:
        return {}
    names = frozenset(variables)
    held = provenance(plans, names)
    addresses = {plan.instruction: addresses_of(plan.instruction)[0] for plan in plans}
    own = {i: variables.get(of(address.base, held, names) or UNSURE) for i, address in addresses.items() if address is not None}
    return {i: home for i, home in own.items() if home is not None}


def addresses_of(i: PtxInstruction) -> tuple[Mem | None, Mem | None]:
    """Returns the addresses in shared and in global memory that an instruction accesses; a generic one may be either."""
    first, second, *_ = [*(operand for operand in i.operands if isinstance(operand, Mem)), None, None]
    if i.opcode in TEXTURES:
        return None, first
    if i.opcode != "cp" or second is None:
        return first, first
    if {"shared::cluster", "shared::cta"} <= set(i.mods):
        return None, second
    return (second, first) if "bulk_group" in i.mods else (first, second)


def of(operand: Operand, held: Mapping[str, str], names: frozenset[str]) -> str | None:
    """Returns the contents of an operand: the name of a variable, NUMBER or UNSURE; None: not known yet."""
    if isinstance(operand, Sym):
        return operand.name if operand.name in names else NUMBER
    if isinstance(operand, Reg):
        return held.get(operand.name)
    return NUMBER if isinstance(operand, Imm) else UNSURE


def provenance(plans: Sequence[Plan], names: frozenset[str]) -> dict[str, str]:
    """Returns the contents of each register, the same wherever it is written."""
    written = {name for plan in plans for name in plan.written}
    read = {a.operand.name for plan in plans for a in plan.reads if isinstance(a.operand, Reg)}
    held = dict.fromkeys(read - written, NUMBER)  # special registers
    before: dict[str, str] = {}
    while before != held:
        before = dict(held)
        for plan in plans:
            found = result(plan.instruction, [of(a.operand, held, names) for a in plan.reads]) if plan.written else None
            if found is not None:
                held |= {name: found if held.get(name, found) == found else UNSURE for name in plan.written}
    return held


def result(i: PtxInstruction, read: Sequence[str | None]) -> str | None:
    """Returns the contents that an instruction with these inputs writes; None: not known yet."""
    if i.opcode in ("ld", "ldu", "atom"):
        return NUMBER
    if None in read:
        return None
    sure = [one or NUMBER for one in read]
    if all(one == NUMBER for one in sure):
        return NUMBER
    if i.opcode in ("mov", "cvt") and len(sure) > 1:
        return UNSURE  # halves put together
    if i.opcode == "selp":
        return sure[0] if sure[0] == sure[1] else UNSURE
    at = ADDRESS_IN.get(i.opcode)
    # An address rounded down is still an address; the result of any other mask is not sure.
    if at is None or (i.opcode == "and" and not aligns(i.operands[2])):
        return UNSURE
    if i.opcode in ("add", "or", "xor") and sure[1] != NUMBER:
        at = 1
    return sure[at] if all(one == NUMBER for one in (*sure[:at], *sure[at + 1 :])) else UNSURE


ADDRESS_IN = {**dict.fromkeys(("mov", "cvt", "cvta", "mapa", "shfl", "sub", "add", "or", "xor", "and"), 0), "mad": 2, "mad24": 2}
"""The operand, by opcode, that may be an address where all others are numbers, with an address for the result."""


def aligns(operand: Operand) -> bool:
    """True if a mask clears low bits only."""
    return isinstance(operand, Imm) and -(1 << 16) <= signed(operand.value) < 0


def signed(value: int) -> int:
    """Returns a 32-bit constant, which may be written without its sign."""
    return value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value


def sharing_of(plans: Sequence[Plan], params: Sequence[Variable]) -> Sharing:
    """Returns the facts about a kernel with these parameters, the device functions that it calls included."""
    instructions = [plan.instruction for plan in plans]
    reach = reached(plans, params)
    # A store with an address of unknown origin may go anywhere.
    stores = [r or (ANYWHERE if touches(i, {"global"}) else r) for i, r in zip(instructions, reach, strict=True) if may_write(i)]
    written = frozenset[Place]().union(*stores)
    return Sharing(
        min((width(i) for i in instructions if touches(i, {"shared", "shared::cta", "shared::cluster"})), default=WIDEST),
        global_granules(instructions, reach),
        any(is_strong(i) or (i.opcode == "cp" and "reduce" in i.mods) for i in instructions),
        any(i.opcode in ("fence", "membar") or {"release", "acq_rel"} & set(i.mods) for i in instructions),
        None if "*" in written else written,
        any(is_async(i) for i in instructions),
        any(i.opcode == "wgmma" for i in instructions),
        any(is_narrow(i) and touches(i, {"global", "shared::cluster"}) for i in instructions),
    )


def names_all(mask: Operand) -> bool:
    """True for the constant mask of all lanes of a warp."""
    return isinstance(mask, Imm) and isinstance(mask.value, int) and mask.value & 0xFFFFFFFF == 0xFFFFFFFF


def shuffled(plans: Sequence[Plan], loops: Sequence[tuple[int, int]], load: PtxInstruction, store: PtxInstruction) -> bool:
    """Returns True if a store's value comes from what all lanes of its warp have loaded, by shuffles of all lanes: no chip can
    store it before each lane's load. False in a loop, where a lane may load what another one stored in the turn before.
    """
    instructions = [plan.instruction for plan in plans]
    first, last = instructions.index(load), instructions.index(store)
    if first >= last or any(start <= load.line and store.line <= end for start, end in loops):
        return False
    masks = [plan for plan in plans if plan.instruction.opcode == "mov" and names_all(plan.instruction.operands[-1])]
    others = {name for plan in plans if plan not in masks for name in plan.written}
    everyone = {name for plan in masks for name in plan.written} - others
    values = dict.fromkeys(plans[first].written, False)  # True: a shuffle is between
    for plan in plans[first + 1 : last]:
        i = plan.instruction
        given = [values[name] for name in plan.read if name in values]
        if i.opcode == "shfl" and given:
            given.append(names_all(i.operands[-1]) or not everyone.isdisjoint(named(i.operands[-1])))
        for name in plan.written:
            if given:
                values[name] = any(given) or values.get(name, False)
            elif i.predicate is None:
                values.pop(name, None)
    return any(values.get(name, False) for name in named(*(a.operand for a in plans[last].reads[1:])))


def may_write(i: PtxInstruction) -> bool:
    """True if an instruction may write global memory."""
    return i.opcode in ("st", "atom", "red", "sust", "tensormap") or bool({"bulk_group", "store"} & set(i.mods))


def touches(i: PtxInstruction, spaces: set[str]) -> bool:
    """True if an instruction accesses one of these spaces, or generic addresses."""
    if i.opcode == "cp" and not is_phase(i):
        return "prefetch" not in i.mods and any(isinstance(operand, Mem) for operand in i.operands)
    if i.opcode in ("suld", "sust"):
        return "global" in spaces
    named = {"global", "shared", "shared::cta", "shared::cluster", "local", "const", "param"} & set(i.mods)
    plain = i.opcode in ("ld", "ldu", "st", "atom", "red", "tensormap")
    accesses = plain or is_phase(i) or (i.opcode == "wmma" and "mma" not in i.mods)
    return accesses and (not named or bool(named & spaces))


def width(i: PtxInstruction) -> int:
    """Returns the bytes that a lane accesses, WIDEST at most."""
    if is_phase(i):
        return 8
    if i.opcode == "tensormap":
        return WIDEST
    if i.opcode == "cp":
        # A source size may be any number of bytes up to the width; such sources are rounded up to granules.
        size = i.operands[2] if len(i.operands) > 2 else None
        return min(WIDEST, size.value) if isinstance(size, Imm) and isinstance(size.value, int) else WIDEST
    count = max(vector * (f"v{vector}" in i.mods) for vector in (1, 2, 4, 8)) or 1
    return min(WIDEST, count * [TYPES[m] for m in i.mods if m in TYPES][-1].bytes)


def global_granules(instructions: list[PtxInstruction], reach: list[frozenset[Place]]) -> dict[Place, int]:
    """Returns the narrowest access, in bytes, of each place in global memory: races there are told apart no finer than that."""
    found: dict[Place, int] = {}
    for i, places in zip(instructions, reach, strict=True):
        if touches(i, {"global"}):
            for place in places or ANYWHERE:
                found[place] = min(found.get(place, WIDEST), width(i))
    return found


ANYWHERE: frozenset[Place] = frozenset({"*"})

PARAMETERS = "parameters"
"""The memory of the parameters themselves, which nobody writes."""


class AddressPiece(NamedTuple):
    """A part of a pointer's bytes, loaded from a place: a pointer again once it is put together with others."""

    of: Place


Origin = Place | AddressPiece
"""A place or part from which a register's value may be computed."""


@dataclass(frozen=True)
class AddressStep:
    """The effect of an instruction on origins: its results get those of its sources, and some of its own.

    `joins`: it puts two halves of 64 bits together.
    """

    written: list[str]
    sources: list[str]
    own: frozenset[Origin]
    joins: bool = False


def reached(plans: Sequence[Plan], params: Sequence[Variable]) -> list[frozenset[Place]]:
    """Returns for each instruction the places of the pointers from which its global address may be computed.

    A register carries the places of all that it may be computed from. A pointer loaded from memory is of anywhere ("*").
    """
    instructions = [plan.instruction for plan in plans]
    if any(i.opcode == "call" for i in instructions):
        return [ANYWHERE] * len(plans)
    carried: dict[str, frozenset[Origin]] = dict.fromkeys(("%envreg1", "%envreg2"), frozenset({"grid workspace"}))
    addresses = ParameterAddresses(plans, {p.name for p in params})
    steps = origin_steps(plans, params, addresses)
    changed = True
    while changed:
        changed = False
        for step in steps:
            origins = step.own.union(*(carried.get(source, ()) for source in step.sources))
            if step.joins:
                origins = frozenset(one.of if isinstance(one, AddressPiece) else one for one in origins)
            for name in step.written if origins else ():
                before = carried.get(name, frozenset())
                if not origins <= before:
                    carried[name] = before | origins
                    changed = True

    def places(i: PtxInstruction) -> frozenset[Place]:
        address = addresses_of(i)[1]
        if address is None or isinstance(address.base, Imm):
            return frozenset()
        if address.coordinates and i.opcode not in TEXTURES:
            return addresses.of_map(address)
        if isinstance(address.base, Sym):
            return frozenset({address.base.name})
        return frozenset(one for one in carried.get(address.base.name, ()) if not isinstance(one, AddressPiece))

    return [places(i) for i in instructions]


def origin_steps(plans: Sequence[Plan], params: Sequence[Variable], addresses: ParameterAddresses) -> list[AddressStep]:
    """Returns the steps of all instructions that may write a pointer or a piece of one."""
    structures = {p.name for p in params if p.is_array}
    some_join = any(joins(plan.instruction) for plan in plans)
    steps = []
    for plan in plans:
        i = plan.instruction
        if plan.written and i.opcode not in ("ld", "ldu", "atom"):
            parts = [part for operand in i.operands for part in leaves(operand)]
            named = [part.name for part in parts if isinstance(part, Sym)]
            own: frozenset[Origin] = frozenset(PARAMETERS if name in addresses.params else name for name in named)
            steps.append(AddressStep(plan.written, [p.name for p in parts if isinstance(p, Reg)], own, joins(i)))
            continue
        results = [(k, a.operand) for k, a in enumerate(plan.writes) if isinstance(a.operand, Reg)]
        whole = any(register.type.bits == 64 for _, register in results)
        for k, register in results if whole or some_join else ():  # else it is no pointer
            sources = addresses.read(i, k * i.type.bytes)
            places: frozenset[Place] = frozenset(
                param if offset is None or param not in structures else PointerField(param, offset, i.type.bytes)
                for param, offset in sources
            )
            steps.append(AddressStep([register.name], [], places if whole else frozenset(map(AddressPiece, places))))
    return steps


def joins(i: PtxInstruction) -> bool:
    """True if an instruction may join two halves, loaded apart, to 64 bits: mov.b64 of a pair, a shift of one to the upper half."""
    if i.opcode == "mov":
        return isinstance(i.operands[1], Vec) and i.type.bits == 64
    return i.opcode == "shl" and i.operands[2] == Imm(32) and i.type.bits == 64


def copies_address(i: PtxInstruction) -> bool:
    """True if an instruction copies an address unchanged: to another space, or from 32 bits to 64."""
    return i.opcode in ("mov", "cvta") or (i.opcode == "cvt" and {one.bits for one in i.types} <= {32, 64})


Addresses = set[tuple[str, int | None]]
"""Parameters with a byte offset in each, None where that is not known."""


class ParameterAddresses:
    """Registers that hold the address of a parameter, as compilers take it of a structure whose fields they index.

    `at`: the possible targets of each. `only`: those that point to nothing else: a generic load from there reads a parameter.
    """

    def __init__(self, plans: Sequence[Plan], params: set[str]):
        self.params = params
        self.at: dict[str, Addresses] = {}
        self.only: set[str] = set()
        if not any(isinstance(o, Sym) and o.name in params for plan in plans for o in plan.instruction.operands):
            return
        writers = Counter(name for plan in plans for name in plan.written)
        changed = True
        while changed:
            changed = False
            for plan in plans:
                found = self.result(plan.instruction)
                for name in plan.written if found else ():
                    # A register with several writers may grow in a loop.
                    places = found if writers[name] == 1 else {(param, None) for param, _ in found}
                    if not places <= self.at.setdefault(name, set()):
                        self.at[name] |= places
                        changed = True
        self.only = set(self.at)
        while mixed := {name for p in plans for name in p.written if name in self.only and not self.pure(p.instruction)}:
            self.only -= mixed

    def of(self, operand: Operand) -> Addresses:
        if isinstance(operand, Sym) and operand.name in self.params:
            return {(operand.name, operand.offset)}
        return self.at.get(operand.name, set()) if isinstance(operand, Reg) else set()

    def of_map(self, address: Mem) -> frozenset[Place]:
        """Returns the tensors of the tensor maps that may be at an address: of parameters, or of any in memory."""
        base = address.base
        if isinstance(base, Imm) or not (base.name in self.only or base.name in self.params):
            return ANYWHERE
        return frozenset(
            param if offset is None else PointerField(param, offset + address.offset + ADDRESS_AT)
            for param, offset in self.of(base)
        )

    def result(self, i: PtxInstruction) -> Addresses:
        """Returns the places where the result of an instruction may point."""
        if i.opcode in ("ld", "ldu", "atom"):
            return set()
        found = [self.of(operand) for operand in i.operands[1:]]
        if copies_address(i):
            return found[0]
        if i.opcode == "add" and isinstance(i.operands[2], Imm):
            plus = i.operands[2].value
            return {(param, None if offset is None else offset + plus) for param, offset in found[0]}
        return {(param, None) for places in found for param, _ in places}

    def pure(self, i: PtxInstruction) -> bool:
        """True if the result of an instruction points to a parameter and nowhere else."""
        sure = self.params | self.only
        found = [isinstance(o, Sym | Reg) and o.name in sure for o in i.operands[1:]]
        if i.opcode == "selp":
            return all(found[:2])
        return found[0] if copies_address(i) else i.opcode in ("add", "sub", "mad") and any(found)

    def read(self, i: PtxInstruction, plus: int) -> Addresses:
        """Returns the parameters and offsets that a load reads, `plus` bytes behind its address; ("*", None) for other memory."""
        address = next(operand for operand in i.operands[1:] if isinstance(operand, Mem))
        places = {(param, None if offset is None else offset + address.offset + plus) for param, offset in self.of(address.base)}
        known = "param" in i.mods or (isinstance(address.base, Reg) and address.base.name in self.only)
        return places if known and places else places | {("*", None)}


# -- guessed loads -----------------------------------------------------------------------------------------------------------

RegisterNames = frozenset[str]
NOTHING: RegisterNames = frozenset()


class GuessState(NamedTuple):
    """Registers by what they may hold: the `raw` guess, values `derived` from it, values of a wrong guess (`stale`).

    `answers` hold the values that the swap found for sure. `differs` and `equals` are predicates that compare the guess with that.
    """

    raw: RegisterNames = NOTHING
    derived: RegisterNames = NOTHING
    stale: RegisterNames = NOTHING
    answers: RegisterNames = NOTHING
    differs: RegisterNames = NOTHING
    equals: RegisterNames = NOTHING

    @property
    def tainted(self) -> RegisterNames:
        return self.raw | self.derived | self.stale

    def less(self, names: RegisterNames) -> GuessState:
        return GuessState(*(each - names for each in self))

    def joined(self, other: GuessState) -> GuessState:
        may = [mine | theirs for mine, theirs in zip(self[:3], other[:3], strict=True)]
        return GuessState(*may, *(mine & theirs for mine, theirs in zip(self[3:], other[3:], strict=True)))


def guesses(flow: ControlFlow) -> frozenset[PtxInstruction]:
    """Returns the loads of a kernel that only guess."""
    swaps = [i for i in flow.instructions if i.opcode == "atom" and "cas" in i.mods]
    if not swaps:
        return frozenset()
    sole = sole_writers(flow)
    places = {(i.type.bytes, address(i.operands[1], sole)) for i in swaps}
    found = set()
    for pc, i in enumerate(flow.instructions):
        if i.opcode == "ld" and isinstance(i.operands[0], Reg) and not is_strong(i) and "param" not in i.mods:
            place = i.type.bytes, address(i.operands[1], sole)
            if place in places and only_guesses(flow, pc, i.operands[0].name, place, sole):
                found.add(i)
    return frozenset(found)


# -- addresses ----------------------------------------------------------------------------------------------------------


def sole_writers(flow: ControlFlow) -> dict[str, PtxInstruction]:
    """Returns, for each register with a single writing instruction, that instruction."""
    found: dict[str, PtxInstruction | None] = {}
    for plan in flow.plans:
        for name in plan.written:
            found[name] = None if name in found or plan.instruction.predicate else plan.instruction
    return {name: i for name, i in found.items() if i is not None}


def address(operand: Operand, sole: dict[str, PtxInstruction]) -> tuple[str, int]:
    """Returns the origin of an address: the first register or name that it can be followed back to, and an offset."""
    if not isinstance(operand, Mem):
        return "", 0
    base, offset = operand.base, operand.offset
    while isinstance(base, Reg) and base.name in sole:
        i = sole[base.name]
        if i.opcode in ("mov", "cvta") and isinstance(i.operands[1], Reg | Sym):
            base = i.operands[1]
        elif i.opcode == "add" and isinstance(i.operands[1], Reg) and isinstance(i.operands[2], Imm):
            base, offset = i.operands[1], offset + i.operands[2].value
        else:
            break
    if isinstance(base, Imm):
        return "", base.value + offset
    return base.name, offset + (base.offset if isinstance(base, Sym) else 0)


# -- uses of a guess ----------------------------------------------------------------------------------------------------


Word = tuple[int, tuple[str, int]]
"""The width and the address of a word."""


def only_guesses(flow: ControlFlow, start: int, register: str, place: Word, sole: dict[str, PtxInstruction]) -> bool:
    """True if the value of the load at `start` goes nowhere but into swaps at its own place."""
    states: dict[int, GuessState] = {}
    waiting = [(pc, GuessState(raw=frozenset({register}))) for pc in flow.successors(start)]
    while waiting:
        pc, state = waiting.pop()
        if pc == start or not state.tainted:
            continue
        known = states.get(pc)
        joined = state if known is None else known.joined(state)
        if joined == known:
            continue
        states[pc] = joined
        plan = flow.plans[pc]
        if plan.control is not None:
            ways = branched(flow, pc, joined)
            if ways is None:
                return False
            waiting += ways
            continue
        after = passed(plan, joined, place, sole)
        if after is None:
            return False
        waiting += [(one, after) for one in flow.successors(pc)]
    return True


def branched(flow: ControlFlow, pc: int, state: GuessState) -> list[tuple[int, GuessState]] | None:
    """Returns the successors of a control instruction with their states; None: the guess decides its effect in another way."""
    plan = flow.plans[pc]
    if not plan.read & state.tainted:
        return [(one, state) for one in flow.successors(pc)]
    if not isinstance(plan.control, Branch) or plan.control.table or plan.instruction.predicate is None:
        return None
    register, negated = plan.instruction.predicate
    if register.name not in state.differs | state.equals:
        return None
    wrong = (register.name in state.differs) != negated
    target = flow.target(plan.control.target)
    # If the swap has happened, the guess was right, and nothing is a guess any more.
    stale = GuessState(stale=state.tainted)
    return [(target, stale)] if wrong else [(pc + 1, stale)]


def passed(plan: Plan, state: GuessState, place: Word, sole: dict[str, PtxInstruction]) -> GuessState | None:
    """Returns the state behind an instruction; None if it uses the guess in another way than the swap."""
    i, out = plan.instruction, frozenset(plan.written)
    used = plan.read & state.tainted
    rest = state if i.predicate else state.less(out)
    if i.opcode == "atom" and "cas" in i.mods and (i.type.bytes, address(i.operands[1], sole)) == place and not i.predicate:
        guess = named(i.operands[2])
        sure = guess <= state.raw and not guess & (state.derived | state.stale) and not used & state.stale
        if used and (not sure or used & named(i.operands[1])):
            return None
        return rest._replace(answers=rest.answers | out) if sure else rest
    if not used:
        copies = i.opcode == "mov" and not i.predicate and bool(named(i.operands[1]) & state.answers)
        return rest._replace(answers=rest.answers | out) if copies else rest
    if used & state.stale or not plan.pure or (i.predicate and i.predicate[0].name in used):
        return None
    if i.opcode == "mov" and used <= state.raw - state.derived and isinstance(i.operands[1], Reg) and not i.predicate:
        return rest._replace(raw=rest.raw | out)
    rest = rest._replace(derived=rest.derived | out)
    if i.opcode == "setp" and not i.predicate and len(out) == 1 and i.mods[0] in ("ne", "eq") and len(i.mods) == 2:
        first, second = (named(operand) for operand in i.operands[1:3])
        raw = state.raw - state.derived
        if (first <= raw and second <= state.answers) or (second <= raw and first <= state.answers):
            if i.mods[0] == "ne":
                return rest._replace(differs=rest.differs | out)
            return rest._replace(equals=rest.equals | out)
    return rest
