"""Translations of instructions that are no rows of the table: accesses to memory and copies; between registers; between the
lanes of a warp; matrices, with the text of the functions that load and multiply them.

An access is a call of `execute.warp_memory`'s functions: one that looks at the addresses, counts and follows, and others that
move.

mma is the product of two matrices of a warp, in fragments as `decode.matrices` has them. Every sum takes its products one after
the other, as `decode.matrices.products` has it. With g = lane >> 2 and t = lane & 3, a lane's sums are in row g of eight,
columns 2 t and 2 t + 1: so an element of A goes to the four lanes of its row, two of B to all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as every
from string import Template
from typing import NamedTuple

import numpy as np

from ..decode.access import WINDOWS, address_arg, moved
from ..decode.control import source_lanes
from ..decode.matrices import BITS, SHAPES, lengths, matrix_mods, sums_in_order
from ..decode.registry import FLUSH, Arg, Plan, items
from ..memory.spaces import PARAM_WINDOW
from ..state.lane_sets import WARP
from ..text.syntax import SINK, TYPES, Imm, Mem, Operand, PtxInstruction, PtxType, Reg, Sym, Unsupported
from .vectors import LaneValue, NoCode, Text, scalar, splat, vector
from .warp_text import ATOMICS, SITE_WORDS, STREWN, WARP_STATE, AccessSite, WarpText, access_name, steps

# -- functions of matrices ----------------------------------------------------------------------------------------------------

FACTORS = ("f16", "bf16", "tf32", "s8", "u8")
"""Types of factors that compiled code knows."""

FLUSHING_BITS = 0x8040
"""FTZ and DAZ of MXCSR."""

IN_MODE = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal i32 @{name}(ptr %factors, ptr %sums) noinline {{
  %kept = alloca i32
  %other = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %kept)
  %old = load i32, ptr %kept
  %new = and i32 %old, {keep}
  store i32 %new, ptr %other
  call void @llvm.x86.sse.ldmxcsr(ptr %other)
  %wrong = call i32 @{name}.kept(ptr %factors, ptr %sums)
  call void @llvm.x86.sse.ldmxcsr(ptr %kept)
  ret i32 %wrong
}}
"""


class WarpProduct(NamedTuple):
    """A product of matrices: lengths, types of C and D, A, B; `flushing`: the kernel flushes subnormal numbers, mma does not."""

    m: int
    n: int
    k: int
    d: str
    a: str
    b: str
    flushing: bool

    @property
    def name(self) -> str:
        return f"product_{self.m}x{self.n}x{self.k}_{self.d}_{self.a}_{self.b}"

    def registers(self) -> tuple[int, int, int]:
        """Returns the number of registers of A, of B and of the sums."""
        words = self.k * BITS[self.a] // 32
        return self.m * words // WARP, self.n * words // WARP, self.m * self.n // WARP


class ProductText(Text):
    """The function of a product: `%factors` are the registers of A and B, `%sums` those of the product, in memory."""

    def __init__(self, shape: WarpProduct):
        super().__init__()
        self.shape = shape

    def text(self) -> str:
        m, n, k, d_type, a_type, b_type, flushing = self.shape
        a_count, b_count, _ = self.shape.registers()
        registers = [self.add(f"load {vector('i32')}, ptr {self.at('%factors', number)}") for number in range(a_count + b_count)]
        each = 32 // BITS[a_type]
        a, b = ([self.elements(r, t) for r in some] for some, t in ((registers[:a_count], a_type), (registers[a_count:], b_type)))
        rows, columns, depth = range(m // 8), range(n // 8), k // (4 * each)
        sums = dict.fromkeys(every(columns, rows, range(2)), "zeroinitializer")
        fused = sums_in_order(m, n, k)
        for at in range(k):
            part, rest = divmod(at, 4 * each)
            t, element = divmod(rest, each)
            left = [self.shuffled(a[part * len(rows) + r][element], [lane & ~3 | t for lane in range(WARP)]) for r in rows]
            for c in columns:
                source = b[c * depth + part][element]
                for odd in range(2):
                    right = self.shuffled(source, [4 * (2 * (lane & 3) + odd) + t for lane in range(WARP)])
                    for r in rows:
                        sums[c, r, odd] = self.added(left[r], right, sums[c, r, odd], fused)
        wrong = self.finished(list(sums.values()), d_type)
        name = f"{self.shape.name}.kept" if flushing else self.shape.name
        body = "\n".join(self.lines)
        around = IN_MODE.format(name=self.shape.name, keep=~FLUSHING_BITS) if flushing else ""
        return f"\ndefine internal i32 @{name}(ptr %factors, ptr %sums) noinline {{\n{body}\n  ret i32 {wrong}\n}}\n{around}"

    def finished(self, sums: list[str], kind: str) -> str:
        """Adds C to sums, which is in their place in memory, and stores D; returns the lanes of which some number is NaN."""
        bad, words, of = "zeroinitializer", vector("i32"), vector("float")
        pairs = 2 if kind == "f16" else 1
        for number in range(len(sums) // pairs):
            place = self.at("%sums", number)
            c = self.add(f"load {words}, ptr {place}, align 64")
            mine = sums[number * pairs : (number + 1) * pairs]
            if kind == "s32":
                d = self.op("add", "i32", c, self.add(f"fptosi {of} {mine[0]} to {words}"))
            elif kind == "f32":
                total = self.op("fadd", "float", mine[0], self.add(f"bitcast {words} {c} to {of}"))
                bad = self.op("or", "i1", bad, self.test("uno", "float", total, total))
                d = self.add(f"bitcast {of} {total} to {words}")
            else:
                d = "zeroinitializer"
                for n, (addend, one) in enumerate(zip(self.elements(c, "f16"), mine, strict=True)):
                    total = self.op("fadd", "float", one, addend)
                    bad = self.op("or", "i1", bad, self.test("uno", "float", total, total))
                    half = self.add(f"fptrunc {of} {total} to {vector('half')}")
                    raw = self.add(f"bitcast {vector('half')} {half} to {vector('i16')}")
                    wide = self.add(f"zext {vector('i16')} {raw} to {words}")
                    d = self.op("or", "i32", d, self.op("shl", "i32", wide, splat("i32", 16 * n)))
            self.say(f"store {words} {d}, ptr {place}, align 64")
        return self.bits(bad)

    def at(self, table: str, number: int) -> str:
        return self.add(f"getelementptr {vector('i32')}, ptr {table}, i64 {number}")

    def elements(self, register: str, kind: str) -> list[str]:
        """Returns the elements of a register as float32."""
        bits, words, of = BITS[kind], vector("i32"), vector("float")
        if kind == "tf32":
            return [self.add(f"bitcast {words} {self.op('and', 'i32', register, splat('i32', -0x2000))} to {of}")]
        found = []
        for n in range(32 // bits):
            if kind == "bf16":
                moved = (
                    self.op("and", "i32", register, splat("i32", -65536))
                    if n
                    else self.op("shl", "i32", register, splat("i32", 16))
                )
                found.append(self.add(f"bitcast {words} {moved} to {of}"))
                continue
            narrow = self.op("lshr", "i32", register, splat("i32", bits * n)) if n else register
            part = self.add(f"trunc {words} {narrow} to {vector(f'i{bits}')}")
            if kind == "f16":
                half = self.add(f"bitcast {vector('i16')} {part} to {vector('half')}")
                found.append(self.add(f"fpext {vector('half')} {half} to {of}"))
            else:
                found.append(self.add(f"{kind[0]}itofp {vector('i8')} {part} to {of}"))
        return found

    def shuffled(self, name: str, lanes: list[int]) -> str:
        listed = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.add(f"shufflevector {vector('float')} {name}, {vector('float')} poison, {vector('i32')} <{listed}>")

    def added(self, a: str, b: str, total: str, fused: bool) -> str:
        of = vector("float")
        if fused:
            return self.add(f"call {of} @llvm.fma.v{WARP}f32({of} {a}, {of} {b}, {of} {total})")
        return self.op("fadd", "float", total, self.op("fmul", "float", a, b))


def product(*shape: object) -> str:
    """Returns the function of a product; `shape`: the fields of `WarpProduct`."""
    return ProductText(WarpProduct(*shape)).text()  # type: ignore[arg-type]


MATRIX = Template("""
define internal <32 x i32> @rows(i64 %host, ptr %places) alwaysinline {
start:
$LOADS
  %words = bitcast <64 x i16> $LAST to <32 x i32>
  ret <32 x i32> %words
}

define internal <32 x i32> @matrix(i64 %host, ptr %places) noinline {
start:
  %words = call <32 x i32> @rows(i64 %host, ptr %places)
  ret <32 x i32> %words
}

define internal <32 x i32> @matrix_turned(i64 %host, ptr %places) noinline {
start:
  %words = call <32 x i32> @rows(i64 %host, ptr %places)
  %halves = bitcast <32 x i32> %words to <64 x i16>
  %turned = shufflevector <64 x i16> %halves, <64 x i16> poison, <64 x i32> $COLUMNS
  %out = bitcast <64 x i16> %turned to <32 x i32>
  ret <32 x i32> %out
}
""")


def matrix() -> str:
    """Returns the functions that load a matrix of eight rows of eight halves: a lane's word, and a lane's word of the transpose."""
    lines = []
    for k in range(8):
        lines += [
            f"  %p{k} = getelementptr i64, ptr %places, i64 {k}",
            f"  %a{k} = load i64, ptr %p{k}",
            f"  %h{k} = add i64 %a{k}, %host",
            f"  %q{k} = inttoptr i64 %h{k} to ptr",
            f"  %r{k} = load <8 x i16>, ptr %q{k}, align 1",
        ]
    names, width = [f"%r{k}" for k in range(8)], 8
    while len(names) > 1:
        listed = ", ".join(f"i32 {n}" for n in range(2 * width))
        for k in range(len(names) // 2):
            a, b = names[2 * k : 2 * k + 2]
            of = f"<{width} x i16>"
            lines.append(f"  %s{width}.{k} = shufflevector {of} {a}, {of} {b}, <{2 * width} x i32> <{listed}>")
        names = [f"%s{width}.{k}" for k in range(len(names) // 2)]
        width *= 2
    columns = ", ".join(f"i32 {8 * row + column}" for column in range(8) for row in range(8))
    assert width == 2 * WARP
    return MATRIX.substitute(LOADS="\n".join(lines), LAST=names[0], COLUMNS=f"<{columns}>")


# -- accesses ----------------------------------------------------------------------------------------------------------------

OPCODES = frozenset({"ld", "st", "atom", "red"})
SPACES = ("global", "shared", "const", "param", "local")


def space_of(i: PtxInstruction) -> str:
    """Returns the space of an access; one with a window is generic."""
    return next((mod.partition("::")[0] for mod in i.mods if mod.partition("::")[0] in SPACES), "generic")


def target(i: PtxInstruction) -> tuple[str, PtxType, tuple[Operand, ...], Arg, int]:
    """Returns space, type, registers, base and offset of a load, a store, or an atomic access without a vector."""
    if i.opcode not in ("atom", "red"):
        return moved(i, *(i.operands[:2] if i.opcode == "ld" else i.operands[1::-1]))
    returns = i.opcode == "atom"
    space = space_of(i)
    return space, i.type, (i.operands[0] if returns else SINK,), *address_arg(i.operands[int(returns)], space)


class PlacedAccess(NamedTuple):
    """An access that was looked at: the distance from addresses to host memory, its form, and the addresses of all lanes."""

    host: str
    form: str
    addresses: str


def address_of(text: WarpText, base: Arg, offset: int) -> str:
    """Returns the addresses of all lanes, as i64."""
    found = text.read(base)
    delta = splat(scalar(found.dtype), offset)
    return text.resized(text.add(f"add {vector(found.dtype)} {found.name}, {delta}"), scalar(found.dtype), "i64", False)


def place(text: WarpText, site: AccessSite, here: str, addresses: str) -> PlacedAccess:
    """Looks at an access of the lanes `here`; gives up if it is anything but plain."""
    name = site.space, site.kind, site.size
    text.helpers.add(("access", *name))
    at = text.field("%sites", SITE_WORDS * len(text.sites))
    text.sites.append(site)
    given = f"ptr %launch, ptr {at}, ptr %w, i32 {here}, {vector('i64')} {addresses}"
    answer = text.add(f"call {{i64, i32}} @{access_name(*name)}({given})")
    host, form = (text.add(f"extractvalue {{i64, i32}} {answer}, {k}") for k in range(2))
    text.fail_if(text.add(f"icmp slt i32 {form}, 0"))
    return PlacedAccess(host, form, addresses)


def access(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """Adds a load, store or atomic access."""
    try:
        space, type_, registers, base, offset = target(i)
    except Unsupported:
        raise NoCode from None
    if space == "param" and isinstance(base.operand, Sym):
        if i.opcode == "st" and base.operand.name in text.code.call_params:
            return  # for a call, at which the launch gives up
        parameter(text, plan, i, type_, registers, offset)
        return
    size = len(registers) * type_.bytes
    addresses, mask = address_of(text, base, offset), text.predicate(i)
    here = text.running(mask)
    if space == "local":
        placed = private(text, size, here, addresses)
    elif space in ("global", "shared", "const", "generic", "param"):
        if space == "param":
            addresses = text.op("or", "i64", addresses, splat("i64", PARAM_WINDOW))
        space = "shared" if space == "shared" else "global"
        kind = "atom" if i.opcode in ("atom", "red") else i.opcode
        placed = place(text, AccessSite(i, space, kind, size), here, addresses)
    else:
        raise NoCode
    lanes = f"i32 {here}, {vector('i64')} {placed.addresses}"
    if i.opcode in ("atom", "red"):
        update(text, plan, i, space, f"i64 {placed.host}, {lanes}, ptr %pairs", mask)
        return
    pieces = plan.writes if i.opcode == "ld" else plan.reads[1:]
    for k, (register, arg) in enumerate(zip(registers, pieces, strict=True)):
        bits = f"i{type_.bits}"
        given = f"i64 {placed.host}, i32 {placed.form}, {lanes}, i64 {k * type_.bytes}, i64 {size}"
        text.helpers.add(("move", i.opcode, type_.bits))
        if i.opcode == "st":
            value = text.read(arg)
            text.say(f"call void @st_{bits}({given}, {vector(bits)} {text.raw(value)})")
        elif register != SINK:
            loaded = text.add(f"call {vector(bits)} @ld_{bits}({given})")
            wide = text.resized(loaded, bits, f"i{8 * arg.dtype.itemsize}", type_.kind == "s")
            text.write(arg, text.seen(wide, arg.dtype), mask)


def private(text: WarpText, size: int, here: str, addresses: str) -> PlacedAccess:
    """Looks at an access to local memory, whose lanes lie one behind the other; gives up if it is out of bounds or not aligned."""
    room = text.code.local.size - size
    if room < 0:
        raise NoCode
    outside = text.test("ugt", "i64", addresses, splat("i64", room))
    skew = text.test("ne", "i64", text.op("and", "i64", addresses, splat("i64", size - 1)), "zeroinitializer")
    bad = text.bits(text.op("or", "i1", outside, skew))
    text.fail_for(text.add(f"and i32 {bad}, {here}"))
    placed = text.op("add", "i64", addresses, steps("i64", text.local_bytes))
    return PlacedAccess(text.load("%w", WARP_STATE["local"]), str(STREWN), placed)


def parameter(text: WarpText, plan: Plan, i: PtxInstruction, type_: PtxType, registers: tuple[Operand, ...], offset: int) -> None:
    """Adds a load of a parameter of the kernel at a fixed place."""
    memory = i.operands[1]
    if i.opcode != "ld" or not isinstance(memory, Mem) or not isinstance(memory.base, Sym) or type_.bytes > 8:
        raise NoCode
    mask = text.predicate(i)
    for k, (register, arg) in enumerate(zip(registers, plan.writes, strict=True)):
        if register == SINK:
            continue
        one = text.constant("parameter", (memory.base, offset + k * type_.bytes, type_.bytes, type_.kind == "s"))
        bits = f"i{8 * arg.dtype.itemsize}"
        if bits != "i64":
            one = text.add(f"trunc i64 {one} to {bits}")
        text.write(arg, text.seen(text.everywhere(bits, one), arg.dtype), mask)


def update(text: WarpText, plan: Plan, i: PtxInstruction, space: str, given: str, mask: str | None) -> None:
    """Adds an atomic access: lanes come to it in their order, unless that does not matter or is that of `memory.open_sums`."""
    type_, code = i.type, text.code
    how = next((mod for mod in i.mods if mod in ATOMICS), "")
    if not how or type_.bits < 32:
        raise NoCode
    if i in code.ordered:
        if code.repeats(i) or len(code.plans) >> 16 or (space == "shared" and not alone(text, i)):
            raise NoCode
    elif type_.kind == "f" and not (once(text, i) if space == "shared" else i in code.open_sums):
        raise NoCode
    bits = f"i{type_.bits}"
    text.helpers.add(("update", how, type_.name, code.base_mode == FLUSH))
    for k, arg in enumerate(plan.reads[1:]):
        place = text.add(f"getelementptr {vector(bits)}, ptr %pairs, i64 {k}")
        text.say(f"store {vector(bits)} {text.raw(text.read(arg))}, ptr {place}, align 64")
    odd = text.add(f"call i32 @update_{how}_{type_.name}({given})")
    text.add_to("%bad", odd, "or", "i32")
    if i in code.answered:
        old = text.add(f"load {vector(bits)}, ptr %pairs, align 64")
        text.write(plan.writes[0], text.seen(old, plan.writes[0].dtype), mask)


def alone(text: WarpText, i: PtxInstruction) -> bool:
    """True if no other atomic access can be to shared memory."""
    atomics = [one for one in text.code.instructions if one.opcode in ("atom", "red") and "global" not in one.mods]
    return atomics == [i]


def once(text: WarpText, i: PtxInstruction) -> bool:
    """True if each lane makes this access at most once, and no other has an order that matters: lanes then come in theirs."""
    sums = [one for one in text.code.instructions if one.opcode in ("atom", "red") and one.types[-1].kind == "f"]
    return len(sums) == 1 and not text.code.repeats(i)


# -- matrices of shared memory ---


def matrix_rows(text: WarpText, i: PtxInstruction, memory: Operand, space: str, count: int) -> PlacedAccess:
    """Looks at the rows of `count` matrices in shared memory, one a lane, 16 bytes each."""
    if space != "shared":
        raise NoCode
    addresses = address_of(text, *address_arg(memory, space))
    mask = text.mask
    if count < WARP // 8:
        mask = text.add(f"and i32 {mask}, {(1 << 8 * count) - 1}")
    return place(text, AccessSite(i, space, i.opcode, 16), mask, addresses)


def loaded_matrices(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """ldmatrix: the rows of a matrix lie one behind the other in the words of a register, or turned."""
    count, transposed, space = matrix_mods(i)
    placed = matrix_rows(text, i, i.operands[1], space, count)
    name = "matrix_turned" if transposed else "matrix"
    text.needs("matrix")
    text.say(f"store {vector('i64')} {placed.addresses}, ptr %rows, align 64")
    written = {arg.operand: arg for arg in plan.writes}
    for k, register in enumerate(items(i.operands[0], count)):
        if register in written:
            at = text.field("%rows", 8 * k)
            found = text.add(f"call {vector('i32')} @{name}(i64 {placed.host}, ptr {at})")
            text.write(written[register], text.seen(found, written[register].dtype), None)


# -- asynchronous copies ---


def copied(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """cp.async, its groups, and waits. The bytes move at once, which no kernel can see that waits for them, since nobody writes the
    source; until then the destination is in flight.
    """
    if "bulk" in i.mods or "mbarrier" in i.mods:
        raise NoCode
    if {"commit_group", "wait_group", "wait_all"} & set(i.mods):
        grouped(text, i)
        return
    operand = i.operands[2]
    if not isinstance(operand, Imm):
        raise NoCode
    size = operand.value
    to, source = (address_of(text, *address_arg(o, space)) for o, space in zip(i.operands, ("shared", "global"), strict=False))
    here = text.running(text.predicate(i))
    whole = here
    if len(plan.reads) > 2:
        width = text.read(plan.reads[2]).name
        full, none = text.test("uge", "i32", width, splat("i32", size)), text.test("eq", "i32", width, "zeroinitializer")
        text.flagged(text.negated(text.op("or", "i1", full, none)))
        whole = text.add(f"and i32 {here}, {text.bits(full)}")
    target = place(text, AccessSite(i, "shared", "cp.async", size), here, to)
    origin = place(text, AccessSite(i, "global", "cp.async", size), whole, source)
    text.helpers.add(("copy", size))
    lanes = vector("i64")
    given = f"i64 {target.host}, {lanes} {to}, i64 {origin.host}, {lanes} {source}"
    failed = text.add(f"call i1 @copy_{size}(ptr %w, i32 {here}, i32 {whole}, {given})")
    text.fail_if(failed)


def grouped(text: WarpText, i: PtxInstruction) -> None:
    """Closes a group of copies, or waits until at most some of the newest are pending: for the whole warp."""
    if i.predicate is not None:
        raise NoCode
    alive = text.add(f"trunc i64 {text.load('%w', WARP_STATE['alive'])} to i32")
    text.fail_if(text.add(f"icmp ne i32 {text.mask}, {alive}"))
    if "wait_group" not in i.mods:
        text.count("%w", WARP_STATE["committed"], "1")
    if "commit_group" in i.mods:
        return
    newest = 0
    if i.operands:
        if not isinstance(i.operands[0], Imm):
            raise NoCode
        newest = i.operands[0].value
    text.needs("land")
    text.say(f"call void @land(ptr %launch, ptr %w, i64 {newest})")


# -- registers, lanes, matrices ----------------------------------------------------------------------------------------------

LANES = f"<{', '.join(f'i32 {n}' for n in range(WARP))}>"
SHAPE_NAMES = {name for names in SHAPES.values() for name in names}
REDUCED = {"add": ("add", 0), "min": ("", 0), "max": ("", 0), "and": ("and", -1), "or": ("or", 0), "xor": ("xor", 0)}


def window(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """cvta: adds or subtracts the start of a space's window."""
    space = next(mod.partition("::")[0] for mod in i.mods if mod.partition("::")[0] in WINDOWS)
    if space == "param":
        raise NoCode
    found = text.read(plan.reads[0])
    name = found.name
    if WINDOWS[space]:
        element = scalar(found.dtype)
        name = text.op("sub" if "to" in i.mods else "add", element, name, splat(element, WINDOWS[space]))
    text.write(plan.writes[0], LaneValue(name, found.dtype), text.predicate(i))


def regrouped(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """mov of several registers to one, or of one to several."""
    mask, bits = text.predicate(i), i.type.bits
    whole, part = f"i{bits}", bits // max(len(plan.reads), len(plan.writes))
    if len(plan.writes) == 1:
        total = "zeroinitializer"
        for k, arg in enumerate(plan.reads):
            wide = text.resized(text.raw(text.read(arg)), f"i{part}", whole, False)
            total = text.op("or", whole, total, text.op("shl", whole, wide, splat(whole, k * part)))
        text.write(plan.writes[0], text.seen(total, plan.writes[0].dtype), mask)
        return
    source = text.raw(text.read(plan.reads[0]))
    for k, arg in enumerate(plan.writes):
        piece = text.resized(text.op("lshr", whole, source, splat(whole, k * part)), whole, f"i{part}", False)
        text.write(arg, text.seen(piece, arg.dtype), mask)


def shuffle(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """shfl: the source lanes are those of `decode.control.source_lanes`."""
    mode = next(mod for mod in i.mods if mod in ("up", "down", "bfly", "idx"))
    by, clamp = i.operands[2:4]
    value = text.read(plan.reads[0]).name
    if isinstance(by, Imm) and isinstance(clamp, Imm):
        lanes, within = source_lanes(mode, np.array(by.value), np.array(clamp.value), np.arange(WARP))
        places = f"<{', '.join(f'i32 {n}' for n in lanes.tolist())}>"
        inside = f"<{', '.join(f'i1 {str(bool(n)).lower()}' for n in within.tolist())}>"
        there, found = (
            text.add(f"shufflevector {vector(of)} {x}, {vector(of)} poison, {vector('i32')} {places}")
            for of, x in (("i1", text.active), ("i32", value))
        )
        if text.moved != "0":
            blank = text.add(f"bitcast i32 {text.add(f'trunc i64 {text.moved} to i32')} to {vector('i1')}")
            blank = text.add(f"shufflevector {vector('i1')} {blank}, {vector('i1')} poison, {vector('i32')} {places}")
            text.moved = text.add(f"zext i32 {text.bits(blank)} to i64")
    else:
        step, segment, last, first = segments(text, plan)
        how = {"up": "sub", "down": "add", "bfly": "xor"}.get(mode)
        source = text.op(how, "i32", LANES, step) if how else text.op("or", "i32", first, segment)
        inside = text.test("sge" if mode == "up" else "sle", "i32", source, last)
        source = text.chosen(inside, source, LANES, "i32")
        bit = text.op("shl", "i32", splat("i32", 1), source)
        there = text.test("ne", "i32", text.op("and", "i32", bit, text.everywhere("i32", text.mask)), "zeroinitializer")
        text.say(f"store {vector('i32')} {value}, ptr %exchanged, align 64")
        text.needs("exchanged")
        found = text.add(f"call {vector('i32')} @exchanged(ptr %exchanged, {vector('i32')} {source})")
    # A lane that does not take part has no value: NumPy says so.
    text.fail_for(text.running(text.negated(there)))
    text.write(plan.writes[0], LaneValue(found, np.dtype(np.uint32)), None)
    text.write(plan.writes[1], LaneValue(inside, np.dtype(bool)), None)


def segments(text: WarpText, plan: Plan) -> tuple[str, str, str, str]:
    """Returns the step, its part outside of the segment's bits, the last and the first lane of each lane's segment."""
    step = text.op("and", "i32", text.read(plan.reads[1]).name, splat("i32", 31))
    c = text.read(plan.reads[2]).name
    segment = text.op("and", "i32", text.op("lshr", "i32", c, splat("i32", 8)), splat("i32", 31))
    others = text.op("xor", "i32", segment, splat("i32", -1))
    first = text.op("and", "i32", LANES, segment)
    last = text.op("or", "i32", first, text.op("and", "i32", text.op("and", "i32", c, splat("i32", 31)), others))
    return step, text.op("and", "i32", step, others), last, first


def vote(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """vote, for lanes that all name each other (`together`)."""
    mode = next(mod for mod in i.mods if mod in ("all", "any", "uni", "ballot"))
    holds = text.read(plan.reads[0]).name
    if not isinstance(i.operands[1], Reg | Imm):
        holds = text.negated(holds)
    ballot = text.running(holds)
    if mode == "ballot":
        text.write(plan.writes[0], LaneValue(text.everywhere("i32", ballot), np.dtype(np.uint32)), None)
        return
    none, every = (text.add(f"icmp eq i32 {ballot}, {limit}") for limit in ("0", text.mask))
    bit = {"all": every, "any": text.add(f"xor i1 {none}, true"), "uni": text.add(f"or i1 {none}, {every}")}[mode]
    text.write(plan.writes[0], LaneValue(text.everywhere("i1", bit), np.dtype(bool)), None)


def active_lanes(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    if i.predicate is not None:
        raise NoCode
    text.write(plan.writes[0], LaneValue(text.everywhere("i32", text.mask), np.dtype(np.uint32)), None)


def reduced(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """redux of integers, for lanes that all name each other."""
    name = next(mod for mod in i.mods if mod in REDUCED)
    x = text.read(plan.reads[0])
    if x.dtype.kind == "f" or "abs" in i.mods:
        raise NoCode
    how, neutral = REDUCED[name]
    if name in ("min", "max"):
        how = ("s" if x.dtype.kind == "i" else "u") + name
        info = np.iinfo(x.dtype)
        neutral = int(info.max if name == "min" else info.min)
    some = text.chosen(text.active, x.name, splat("i32", neutral), "i32")
    found = text.add(f"call i32 @llvm.vector.reduce.{how}.v{WARP}i32({vector('i32')} {some})")
    text.write(plan.writes[0], LaneValue(text.everywhere("i32", found), x.dtype), None)


# -- products of matrices ---


def multiplied(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """mma of half types, TF32 and bytes."""
    found = [mod for mod in i.mods if mod in SHAPE_NAMES or mod in TYPES]
    if len(found) != 5 or found[2] not in FACTORS or "satfinite" in i.mods:
        raise NoCode
    shape, d_type, a_type, b_type, _ = found
    flushing = text.code.base_mode == FLUSH and d_type != "s32"
    m, n, k = lengths(shape)
    product = WarpProduct(m, n, k, d_type, a_type, b_type, flushing)
    text.helpers.add(("product", *product))
    a_count, b_count, _ = product.registers()
    for number, arg in enumerate(plan.reads):
        table, at = ("%factors", number) if number < a_count + b_count else ("%sums", number - a_count - b_count)
        place = text.add(f"getelementptr {vector('i32')}, ptr {table}, i64 {at}")
        text.say(f"store {vector('i32')} {text.raw(text.read(arg))}, ptr {place}, align 64")
    wrong = text.add(f"call i32 @{product.name}(ptr %factors, ptr %sums)")
    text.add_to("%bad", wrong, "or", "i32")
    for number, arg in enumerate(plan.writes):
        place = text.add(f"getelementptr {vector('i32')}, ptr %sums, i64 {number}")
        text.write(arg, text.seen(text.add(f"load {vector('i32')}, ptr {place}, align 64"), arg.dtype), None)


OTHERS: dict[str, Callable[[WarpText, Plan, PtxInstruction], None]] = {
    "cp": copied,
    "cvta": window,
    "shfl": shuffle,
    "vote": vote,
    "activemask": active_lanes,
    "redux": reduced,
    "ldmatrix": loaded_matrices,
    "mma": multiplied,
}
"""Instructions that are no rows of the table, and no plain accesses."""
