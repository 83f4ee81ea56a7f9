"""The opcodes of machine code, computed where that decides addresses and branches: integers, predicates, moves, votes.

There is no manual of these opcodes. Their meaning is read from their names (CUDA Binary Utilities, "Instruction Set Reference"),
from what ptxas makes of PTX whose meaning is known, and proven by the PTX machine: both must make the same accesses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from .lanes import ALWAYS, VOTED, VOTES, ZERO, Array, Lanes, Mask, Read, neighbour
from .operands import (
    CONSTANT,
    PREDICATE,
    REGISTER,
    SUFFIX,
    WARP,
    Banks,
    Operands,
    OperandWork,
    UnknownInstruction,
    extended,
    is_unsigned,
    signed,
)
from .sass import Instruction

WORD = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
SPECIAL = (
    *(f"SR_{name}.{axis}" for name in ("TID", "CTAID", "NCTAID") for axis in "XYZ"),
    *("SR_LANEID", "SR_LTMASK", "SR_CgaCtaId", "SR_SWINHI"),
)
"""Special registers that are known; the last is the upper half of generic addresses of shared memory, here 0."""
UNIFORM = re.compile(r"UR\d+$")

Decoder = Callable[[Instruction, Operands], OperandWork]
OPCODES: dict[str, Decoder] = {}


def opcode(*names: str) -> Callable[[Decoder], Decoder]:
    """Registers a decoder; a uniform opcode (UMOV) is decoded as the one without U."""

    def add(decoder: Decoder) -> Decoder:
        OPCODES.update(dict.fromkeys(names, decoder))
        return decoder

    return add


def work(operands: Operands, writes: Sequence[str], compute: Callable[[Lanes], Array]) -> OperandWork:
    """Returns the work of an instruction with one result."""
    return OperandWork(tuple(writes), tuple(operands.reads), lambda lanes, mask: [compute(lanes)])


def function(
    *names: str, takes: str, known: Callable[[Instruction], bool] = lambda i: True
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Registers a function of 32 bits: it gets the instruction and the arrays of its operands behind the result, and returns that.

    `takes` has a letter an operand: n for a number, p for a predicate, - for predicates that nobody reads. The results of an
    instruction that is not `known` are unknown.
    """

    def add(compute: Callable[..., Array]) -> Callable[..., Array]:
        def decoder(i: Instruction, o: Operands) -> OperandWork:
            if not known(i):
                raise UnknownInstruction(f"{i} is not executed")
            d, reads = o.take(), []
            for kind in takes:
                if kind == "-":
                    o.results()
                else:
                    reads.append(o.number() if kind == "n" else o.predicate())
            return work(o, [d], lambda lanes: compute(i, *(read(lanes) for read in reads)))

        opcode(*names)(decoder)
        return compute

    return add


def of_register(i: Instruction) -> bool:
    """True if an instruction's operand is a register, negated or not."""
    return bool(REGISTER.match(SUFFIX.sub("", i.operands[1])))


@opcode("MOV", "MOV32I")
def move(i: Instruction, o: Operands) -> OperandWork:
    d = o.take()
    if "64" in i.modifiers:
        return double(d, o, o.wide())
    return work(o, [d], o.number())


def double(d: str, o: Operands, value: Read) -> OperandWork:
    """Returns the work of an instruction whose result has 64 bits."""

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        found = value(lanes)
        return [found & WORD, found >> HALF]

    return OperandWork((d, neighbour(d)), tuple(o.reads), compute)


def with_carries(total: Array, carries: int) -> list[Array]:
    """Returns a sum's 32 bits, and so many predicates of what goes beyond: that it is more than 0, more than 1."""
    return [total & WORD, *(total >> HALF > np.uint64(k) for k in range(carries))]


@opcode("LDC", "LDCU", "LDC32")
def load_constant(i: Instruction, o: Operands) -> OperandWork:
    d, text = o.take(), o.take()
    count = next((int(m) // 32 for m in i.modifiers if m in ("64", "128", "256")), 1)
    found = CONSTANT.match(SUFFIX.sub("", text))
    names = tuple(neighbour(d, k) for k in range(count))
    if not found:
        return OperandWork(names)
    first = int(found[3] or "0", 0)
    if found[2] in (None, *ZERO):
        parts = [o.number_of(f"c[{found[1]}][{hex(first + 4 * k)}]") for k in range(count)]
    else:
        parts = [o.indexed(found[1], found[2], first + 4 * k) for k in range(count)]
    return OperandWork(names, (), lambda lanes, mask: [part(lanes) for part in parts])


@opcode("S2R", "CS2R")
def special(i: Instruction, o: Operands) -> OperandWork:
    d, name = o.take(), o.take()
    names = (d,) if i.opcode != "CS2R" or "32" in i.modifiers else (d, neighbour(d))
    if name == "SRZ":
        return OperandWork(names, (), lambda lanes, mask: [lanes.zero] * len(names))
    if name not in SPECIAL:
        return OperandWork(names)
    return OperandWork(names, (), lambda lanes, mask: [lanes.special[name], lanes.zero][: len(names)])


@opcode("R2UR")
def to_uniform(i: Instruction, o: Operands) -> OperandWork:
    o.results()
    d, a = o.take(), o.number()
    return OperandWork((d,), tuple(o.reads), lambda lanes, mask: [a(lanes)], warps=True)


@opcode("ELECT")
def elect(i: Instruction, o: Operands) -> OperandWork:
    """Sets a predicate in the first active lane of each warp, and the number of that lane."""
    chosen, number = o.take(), o.take()

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        first = first_lanes(lanes, mask).argmax(axis=1)
        own = np.arange(WARP, dtype=np.uint32)
        return [(own == first[:, None]).ravel(), np.repeat(first.astype(np.uint32), WARP)]

    return OperandWork((chosen, number), (), compute)


@opcode("USETMAXREG")
def resize(i: Instruction, o: Operands) -> OperandWork:
    """Registers are always granted."""
    granted = o.results()
    return OperandWork(tuple(granted), (), lambda lanes, mask: [lanes.everyone for _ in granted])


def of_warp(i: Instruction) -> bool:
    """True if an instruction takes a register and a number that is one for the warp."""
    return bool(REGISTER.match(i.operands[1])) and any(kind.match(i.operands[2]) for kind in (UNIFORM, CONSTANT))


@function("FMUL", takes="nn", known=of_warp)
def scaled(i: Instruction, x: Array, y: Array) -> Array:
    """Multiplies by a number that is one for the warp, as kernels do by a cluster's inverse size; another product is unknown."""
    with np.errstate(all="ignore"):
        return (x.view(np.float32) * y.view(np.float32)).view(np.uint32)


@opcode("SEL")
def select(i: Instruction, o: Operands) -> OperandWork:
    d = o.take()
    if "64" in i.modifiers:
        a, b, p = o.wide(), o.wide(), o.predicate()
        return double(d, o, lambda lanes: np.where(p(lanes), a(lanes), b(lanes)))
    a, b, p = o.number(), o.number(), o.predicate()
    return work(o, [d], lambda lanes: np.where(p(lanes), a(lanes), b(lanes)))


@opcode("IADD3", "IADD", "VIADD", "VIADD3")
def add(i: Instruction, o: Operands) -> OperandWork:
    d = o.take()
    if "64" in i.modifiers:
        o.results()
        terms = [o.wide() for _ in range(len(o.rest)) if not PREDICATE.match(o.rest[0])]
        return double(d, o, lambda lanes: sum(term(lanes) for term in terms))  # type: ignore[arg-type, return-value]
    carries = o.results()
    parts: list[Read] = []
    while o.rest and not PREDICATE.match(o.rest[0]):
        text = o.rest[0]
        if text.startswith("-") and not text.startswith("-0x"):  # so that the carry is that of the complement and one
            o.rest[0] = text[1:]
            inner = o.number()
            parts.append(lambda lanes, inner=inner: (~inner(lanes)).astype(np.uint64) + np.uint64(1))  # type: ignore[misc]
        else:
            plain = o.number()
            parts.append(lambda lanes, plain=plain: plain(lanes).astype(np.uint64))  # type: ignore[misc]
    carried = [o.predicate() for _ in range(len(o.rest))]

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        total = parts[0](lanes)
        for part in (*parts[1:], *carried):
            total = total + part(lanes)
        return with_carries(total, len(carries))

    return OperandWork((d, *carries), tuple(o.reads), compute)


@opcode("IMAD")
def multiply_add(i: Instruction, o: Operands) -> OperandWork:
    d, mods, unsigned = o.take(), i.modifiers, is_unsigned(i)
    carries = o.results()
    a, b = o.number(), o.number()
    if "WIDE" in mods or "HI" in mods:
        c = o.wide()
        carry = o.predicate() if "X" in mods else None
        if carries:
            # A carry out of 64 bits: of the sum, by comparison.
            def summed(lanes: Lanes, mask: Mask) -> list[Array]:
                product = extended(a(lanes), unsigned) * extended(b(lanes), unsigned)
                total = product + c(lanes)
                return [total & WORD, total >> HALF, *([total < product] + [lanes.zero] * len(carries))[: len(carries)]]

            return OperandWork((d, neighbour(d), *carries), tuple(o.reads), summed)

        def total(lanes: Lanes) -> Array:
            product = extended(a(lanes), unsigned) * extended(b(lanes), unsigned) + c(lanes)
            return product + carry(lanes).astype(np.uint64) if carry else product

        if "HI" in mods:
            return work(o, [d], lambda lanes: total(lanes) >> HALF)
        return double(d, o, total)
    c = o.number()
    carry = o.predicate() if "X" in mods else None

    def low(lanes: Lanes) -> Array:
        found = a(lanes) * b(lanes) + c(lanes)
        return found + carry(lanes).astype(np.uint32) if carry else found

    return work(o, [d], low)


@opcode("LEA")
def shifted_add(i: Instruction, o: Operands) -> OperandWork:
    d, mods = o.take(), i.modifiers
    carries = o.results()
    a, b = o.number(), o.number()
    high = o.number() if "HI" in mods and "SX32" not in mods else None
    shift = int(o.take(), 0)
    carry = o.predicate() if "X" in mods else None

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        low = a(lanes)
        if "HI" in mods:
            wide = extended(low, False) if high is None else low.astype(np.uint64) | high(lanes).astype(np.uint64) << HALF
            shifted = (wide << np.uint64(shift)) >> HALF
        else:
            shifted = low.astype(np.uint64) << np.uint64(shift) & WORD
        total = shifted + b(lanes).astype(np.uint64)
        if carry:
            total = total + carry(lanes).astype(np.uint64)
        return with_carries(total, len(carries))

    return OperandWork((d, *carries), tuple(o.reads), compute)


@function("SHF", takes="nnn")
def shift_pair(i: Instruction, low: Array, amount: Array, high: Array) -> Array:
    mods, by = i.modifiers, amount.astype(np.uint64)
    wide = low.astype(np.uint64) | high.astype(np.uint64) << HALF
    if "W" in mods:
        by = by & np.uint64(63 if "U64" in mods or "S64" in mods else 31)
    else:
        by = np.minimum(by, np.uint64(64))
    if "L" in mods:
        shifted = np.left_shift(wide, by)
    elif "S32" in mods or "S64" in mods:
        shifted = np.right_shift(signed(wide), np.minimum(by, np.uint64(63)).astype(np.int64)).view(np.uint64)
    else:
        shifted = np.right_shift(wide, by)
    return shifted >> HALF if "HI" in mods else shifted & WORD


@function("SHL", "SHR", takes="nn")
def shift(i: Instruction, value: Array, amount: Array) -> Array:
    by = np.minimum(amount, np.uint32(63))
    if i.opcode.endswith("SHL"):
        return np.left_shift(value, by)
    return np.right_shift(value, by) if is_unsigned(i) else np.right_shift(signed(value), by.view(np.int32))


@function("SGXT", "BMSK", takes="nn")
def field_of_bits(i: Instruction, a: Array, count: Array) -> Array:
    """Extends a number of so many bits (SGXT), or makes so many ones from a bit on (BMSK); .W takes counts modulo 32."""

    def bits(number: Array) -> Array:
        found = number.astype(np.uint64)
        return found & np.uint64(31) if "W" in i.modifiers else np.minimum(found, np.uint64(32))

    width = bits(count)
    ones = np.left_shift(np.uint64(1), width) - np.uint64(1)
    if i.opcode == "BMSK":
        return np.left_shift(ones, bits(a)) & WORD
    found: Array = a.astype(np.uint64) & ones
    sign = ones ^ ones >> np.uint64(1)
    return found if is_unsigned(i) else np.where(found & sign, found | WORD ^ ones, found)


def looked_up(table: int, a: Array, b: Array, c: Array) -> Array:
    """Returns bit 4a + 2b + c of a table, for each bit."""
    total = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            total = total | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return total


@opcode("LOP3")
def logic(i: Instruction, o: Operands) -> OperandWork:
    tested = o.results()
    d, a, b, c = o.take(), o.number(), o.number(), o.number()
    table = int(o.take(), 0)
    other = o.predicate()
    if "PAND" in i.modifiers:
        raise UnknownInstruction("LOP3.PAND")

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        value = looked_up(table, a(lanes), b(lanes), c(lanes))
        return [value, *((value != 0) | other(lanes) for _ in tested)]

    return OperandWork((d, *tested), tuple(o.reads), compute)


@function("LOP", takes="nn")
def logic_of_two(i: Instruction, a: Array, b: Array) -> Array:
    return {"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor}[i.modifiers[0]](a, b)


@opcode("PLOP3")
def predicate_logic(i: Instruction, o: Operands) -> OperandWork:
    first, second = o.take(), o.take()
    a, b, c = o.predicate(), o.predicate(), o.predicate()
    tables = int(o.take(), 0), int(o.take(), 0)

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        values = a(lanes), b(lanes), c(lanes)
        return [looked_up(table, *values) for table in tables]

    return OperandWork((first, second), (), compute, partly=tuple(o.reads))


COMPARE = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}
COMBINE = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}


@opcode("ISETP")
def compare(i: Instruction, o: Operands) -> OperandWork:
    mods = i.modifiers
    first, second = o.take(), o.take()
    wide = "U64" in mods or "S64" in mods or "64" in mods
    a, b = (o.wide(), o.wide()) if wide else (o.number(), o.number())
    name = next(m for m in mods if m in COMPARE)
    relation, combine = COMPARE[name], COMBINE[next(m for m in mods if m in COMBINE)]
    numbers = tuple(o.reads)
    other = o.predicate()
    partly = tuple(o.reads)[len(numbers) :]
    lower = o.predicate() if "EX" in mods else None

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        x, y = a(lanes), b(lanes)
        if not is_unsigned(i):
            x, y = signed(x), signed(y)
        if lower is None:
            found = relation(x, y)
        elif name == "NE":
            found = (x != y) | lower(lanes)
        else:  # the upper words decide, or where they are equal the lower ones
            found = (x == y) & lower(lanes)
            if name != "EQ":
                found = found | (np.less(x, y) if name[0] == "L" else np.greater(x, y))
        p = other(lanes)
        return [combine(found, p), combine(~found, p)]

    needed = numbers + tuple(o.reads)[len(numbers) + len(partly) :]
    return OperandWork((first, second), needed, compute, partly=partly)


@opcode("FSETP")
def compare_reals(i: Instruction, o: Operands) -> OperandWork:
    """Compares numbers that came from memory as they are: any arithmetic makes a number unknown."""
    first, second, a, b = o.take(), o.take(), o.real(), o.real()
    name = next((m for m in i.modifiers if m.removesuffix("U") in COMPARE), None)
    if name is None:
        raise UnknownInstruction(f"{i}: not one of the comparisons that are executed")
    relation, combine = COMPARE[name.removesuffix("U")], COMBINE[next(m for m in i.modifiers if m in COMBINE)]
    numbers = len(o.reads)
    other = o.predicate()

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        x, y, p = a(lanes), b(lanes), other(lanes)
        unordered = np.isnan(x) | np.isnan(y)
        found = relation(x, y) | unordered if name.endswith("U") else relation(x, y) & ~unordered
        return [combine(found, p), combine(~found, p)]

    return OperandWork((first, second), tuple(o.reads[:numbers]), compute, partly=tuple(o.reads[numbers:]))


@function("IMNMX", "VIMNMX", takes="-nnp")
def extreme(i: Instruction, x: Array, y: Array, least: Array) -> Array:
    if not is_unsigned(i):
        x, y = signed(x), signed(y)
    found: Array = np.where(least, np.minimum(x, y), np.maximum(x, y)).view(np.uint32)
    return found


@function("VIADDMNMX", takes="-nnnp")
def extreme_of_sum(i: Instruction, a: Array, b: Array, c: Array, least: Array) -> Array:
    return extreme(i, a + b, c, least)


@function("IABS", takes="n")
def magnitude(i: Instruction, a: Array) -> Array:
    return np.abs(signed(a)).view(np.uint32)


@function("PRMT", takes="nnn")
def permute(i: Instruction, a: Array, chosen: Array, b: Array) -> Array:
    wide = a.astype(np.uint64) | b.astype(np.uint64) << HALF
    total = np.zeros(len(a), np.uint64)
    for n in range(4):
        nibble = chosen.astype(np.uint64) >> np.uint64(4 * n)
        byte = wide >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
        sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
        total |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * n)
    return total


@function("POPC", "BREV", "FLO", takes="-n")
def bits(i: Instruction, a: Array) -> Array:
    value = np.ascontiguousarray(a)
    if i.opcode.endswith("POPC"):
        count: Array = np.bitwise_count(value)
        return count
    if i.opcode.endswith("BREV"):
        backwards = np.unpackbits(value.view(np.uint8), bitorder="little").reshape(-1, 32)[:, ::-1]
        return np.packbits(backwards, axis=1, bitorder="little").view(np.uint32).ravel()
    if not is_unsigned(i):
        value = np.where(signed(value) < 0, ~value, value)
    top = np.frexp(value.astype(np.float64))[1].astype(np.int64) - 1
    found = 31 - top if "SH" in i.modifiers else top
    return np.where(value == 0, -1, found) & 0xFFFFFFFF


@opcode("B2R")
def barrier_to_registers(i: Instruction, o: Operands) -> OperandWork:
    """Takes the result of a barrier that reduces: the number of its votes, and whether any, or all, were true."""
    if "RESULT" not in i.modifiers:
        raise UnknownInstruction("B2R")
    d, said = o.take(), o.results()
    votes, voted = o.number_of(VOTES), o.predicate_of(VOTED)
    return OperandWork((d, *said), tuple(o.reads), lambda lanes, mask: [votes(lanes), *(voted(lanes) for _ in said)])


@opcode("P2R")
def predicates_to_register(i: Instruction, o: Operands) -> OperandWork:
    """Packs the predicates that a mask names into a register; its other bits come from another one."""
    d, _, rest, mask = o.take(), o.take(), o.number(), int(o.take(), 0)
    chosen = [(k, o.predicate_of(f"P{k}")) for k in range(7) if mask >> k & 1]

    def compute(lanes: Lanes) -> Array:
        total = rest(lanes) & np.uint32(~mask & 0xFFFFFFFF)
        for k, predicate in chosen:
            total = total | predicate(lanes).astype(np.uint32) << np.uint32(k)
        return total

    return work(o, [d], compute)


@opcode("R2P")
def register_to_predicates(i: Instruction, o: Operands) -> OperandWork:
    _, a, mask = o.take(), o.number(), int(o.take(), 0)
    chosen = [k for k in range(7) if mask >> k & 1]

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        return [(a(lanes) >> np.uint32(k) & 1).astype(np.bool_) for k in chosen]

    return OperandWork(tuple(f"P{k}" for k in chosen), tuple(o.reads), compute)


def first_lanes(lanes: Lanes, mask: Mask) -> Array:
    """Returns the running lanes as rows of warps."""
    running = np.ones(lanes.threads, np.bool_) if mask is None else mask
    return running.reshape(-1, WARP)


@opcode("VOTE", "VOTEU")
def vote(i: Instruction, o: Operands) -> OperandWork:
    results = [] if PREDICATE.match(o.rest[0]) else [o.take()]
    predicates = [o.take()] if len(o.rest) > 1 else []
    value = o.predicate()
    if not results and i.modifiers[0] != "EQ":
        return OperandWork(tuple(predicates), (), rare(i.modifiers[0] == "ALL", value, tuple(o.reads)))

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        running, votes = first_lanes(lanes, mask), value(lanes).reshape(-1, WARP)
        ballot = np.packbits(votes & running, axis=1, bitorder="little").view(np.uint32).ravel()
        everyone = np.packbits(running, axis=1, bitorder="little").view(np.uint32).ravel()
        said = {"ANY": ballot != 0, "ALL": ballot == everyone, "EQ": (ballot == everyone) | (ballot == 0)}[i.modifiers[0]]
        return [*(np.repeat(ballot, WARP) for _ in results), *(np.repeat(said, WARP) for _ in predicates)]

    return OperandWork((*results, *predicates), tuple(o.reads), compute, across=True)


def rare(wanted: bool, value: Callable[[Lanes], Array], reads: Sequence[str]) -> Callable[[Lanes, Mask], Sequence[Array]]:
    """A vote for a branch: whether any lane has what is not `wanted`. Unknown numbers have it not: kernels vote on what is rare."""

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        votes = (value(lanes) != wanted).reshape(-1, WARP) & first_lanes(lanes, mask)
        unknown = lanes.lacking(reads, mask)
        if unknown is not None:
            votes &= ~unknown.reshape(-1, WARP)
        return [np.repeat(votes.any(axis=1) != wanted, WARP)]

    return compute


@opcode("SHFL")
def shuffle(i: Instruction, o: Operands) -> OperandWork:
    inside = o.take()
    d, a, lane, clamp = o.take(), o.number(), o.number(), o.number()
    mode = i.modifiers[0]

    def compute(lanes: Lanes, mask: Mask) -> list[Array]:
        own = np.arange(lanes.threads) % WARP
        by, limit = lane(lanes).astype(np.int64) & 31, clamp(lanes).astype(np.int64)
        segment, most = limit >> 8 & 31, limit & 31
        lowest = own & segment
        highest = lowest | most & ~segment
        if mode == "UP":
            source, valid = own - by, own - by >= highest
        else:
            source = {"DOWN": own + by, "BFLY": own ^ by, "IDX": lowest | by & ~segment}[mode]
            valid = source <= highest
        source = np.where(valid, source, own)
        return [np.take_along_axis(a(lanes).reshape(-1, WARP), source.reshape(-1, WARP), 1).ravel(), valid]

    return OperandWork((d, inside), tuple(o.reads), compute, across=True)


OTHER_INTEGERS = {"U64", "S64", "U8", "S8", "U16", "S16"}


@function("I2F", "I2FP", takes="n", known=lambda i: not {"F64", "F16", *OTHER_INTEGERS} & set(i.modifiers))
def to_float(i: Instruction, a: Array) -> Array:
    """Converts as the division of integers needs it; numbers beyond become unknown."""
    value = (a if is_unsigned(i) else signed(a)).astype(np.float64)
    near = value.astype(np.float32)
    if "RP" in i.modifiers:
        near = np.where(near < value, np.nextafter(near, np.float32(np.inf)), near)
    return near.view(np.uint32)


@function("MUFU", takes="n", known=lambda i: i.modifiers == ("RCP",) and of_register(i))
def reciprocal(i: Instruction, a: Array) -> Array:
    with np.errstate(all="ignore"):
        return (np.float32(1) / a.view(np.float32)).view(np.uint32)


@function("F2I", takes="n", known=lambda i: not {"F64", "F16", "U64", "S64"} & set(i.modifiers) and of_register(i))
def to_integer(i: Instruction, a: Array) -> Array:
    low, high = (0, 2**32 - 1) if is_unsigned(i) else (-(2**31), 2**31 - 1)
    value = np.nan_to_num(a.view(np.float32).astype(np.float64))
    whole = np.trunc(value) if "TRUNC" in i.modifiers else np.floor(value) if "FLOOR" in i.modifiers else np.rint(value)
    return np.clip(whole, low, high).astype(np.int64) & 0xFFFFFFFF


@opcode("HFMA2")
def half_constant(i: Instruction, o: Operands) -> OperandWork:
    """Moves a constant of two halves, as the assembler does to spare the integer pipe; a product of numbers is unknown."""
    d = o.take()
    a, b, *rest = o.rest
    if a.lstrip("-") != "RZ" or b.lstrip("-") != "RZ" or len(rest) != 2 or any("R" in each for each in rest):
        return OperandWork((d,))
    high, low = (int(np.array(float(each), np.float16).view(np.uint16)) for each in rest)
    return OperandWork((d,), (), lambda lanes, mask: [lanes.constant(high << 16 | low, 4)])


MODIFIERS: dict[str, set[str]] = {"PRMT": {"U32"}, "P2R": set(), "R2P": set()}
"""The only modifiers that are executed of an opcode."""
UNKNOWN = {
    **dict.fromkeys(("FADD", "FFMA", "FMNMX", "FMNMX3", "FSEL", "FSET", "FSWZADD", "F2FP", "HADD2", "HMUL2", "HMNMX2"), 1),
    **dict.fromkeys(("HADD2_32", "FRND", "FCHK", "IDP", "I2I", "I2IP", "VABSDIFF", "FADD32I", "FMUL32I"), 1),
    **dict.fromkeys(("DADD", "DMUL", "DFMA", "DMNMX", "FFMA2", "FADD2", "FMUL2"), 2),
    **dict.fromkeys(("HMMA", "IMMA", "QMMA", "OMMA"), 4),
    **dict.fromkeys(("DMMA",), 8),
    **dict.fromkeys(("HGMMA", "IGMMA", "QGMMA", "BGMMA"), 0),  # sums stay as they were: only floats' arithmetic reads them
    **dict.fromkeys(("MOVM", "B2R", "REDUX", "CREDUX"), 1),
}
"""Registers that an opcode makes unknown."""
UNKNOWN_PREDICATES = ("FSETP", "HSETP2", "DSETP", "FCHK")
NOTHING = frozenset(
    (
        *("NOP", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "YIELD", "DEPBAR", "LDGDEPBAR", "MEMBAR", "CCTL", "ERRBAR", "NANOSLEEP"),
        *("FENCE", "CCTLL", "PREEXIT", "ACQBULK", "BMOV", "WARPGROUP", "RPCMOV", "PMTRIG", "UCGABAR_ARV"),
        *("CGAERRBAR", "UTMACMDFLUSH", "UTMACCTL", "UTMAPF", "UBLKPF", "ENDCOLLECTIVE", "USETSHMSZ"),
    )
)
"""Opcodes that change no register that matters here."""


def results_of(i: Instruction) -> tuple[str, ...]:
    """Returns the registers and predicates of an instruction whose results are unknown."""
    if i.opcode in UNKNOWN_PREDICATES:
        return tuple(each for each in i.operands[:2] if each not in ALWAYS)
    if i.opcode == "R2P":
        return tuple(f"P{k}" for k in range(7))
    if i.opcode == "B2R":  # the result of a barrier that reduces: a register and a predicate
        return i.operands
    operands, found = list(i.operands), []
    while operands and PREDICATE.match(operands[0]):
        found.append(operands.pop(0))
    if operands and REGISTER.match(operands[0]):
        count = UNKNOWN.get(i.opcode, UNKNOWN.get(i.opcode[1:], 1))
        if (i.opcode in ("F2F", "I2F") and "F64" in i.modifiers) or (i.opcode == "F2I" and "64" in "".join(i.modifiers)):
            count = 2
        found += [neighbour(operands[0], k) for k in range(count)]
    return tuple(found)


def decoded(i: Instruction, banks: Banks) -> OperandWork:
    """Returns an instruction's effect on registers. UnknownInstruction for an opcode that is not known at all."""
    if i.opcode in NOTHING:
        return OperandWork(())
    name = "S2R" if i.opcode == "S2UR" else i.opcode if i.opcode in OPCODES else i.opcode.removeprefix("U")
    if name in OPCODES:
        try:
            if not set(i.modifiers) <= MODIFIERS.get(name, set(i.modifiers)):
                raise UnknownInstruction(f"{name}.{'.'.join(i.modifiers)}")
            return OPCODES[name](i, Operands(i, banks))
        except UnknownInstruction:
            return OperandWork(results_of(i))
    if name in UNKNOWN or i.opcode in UNKNOWN_PREDICATES or i.opcode == "F2F":
        return OperandWork(results_of(i))
    raise UnknownInstruction(f"{i.opcode} is not executed")
