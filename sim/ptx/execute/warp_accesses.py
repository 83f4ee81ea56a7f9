"""Translations of accesses to memory: loads, stores, atomics, matrices of shared memory, asynchronous copies.

An access is a call of `execute.warp_memory`'s functions: one that looks at the addresses, counts and follows, and others that move.
"""

from __future__ import annotations

from typing import NamedTuple

from ..decode.access import address_arg, moved
from ..decode.matrices import matrix_mods
from ..decode.registry import FLUSH, Arg, Plan, items
from ..memory.spaces import PARAM_WINDOW
from ..state.lane_sets import WARP
from ..text.syntax import SINK, Imm, Mem, Operand, PtxInstruction, PtxType, Sym, Unsupported
from .vectors import NoCode, scalar, splat, vector
from .warp_tables import ATOMICS, SITE_WORDS, WARP_STATE, access_name
from .warp_text import AccessSite, WarpText

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


def active(text: WarpText, mask: str | None) -> str:
    """Returns the lanes that run an instruction with this predicate."""
    return text.mask if mask is None else text.add(f"and i32 {text.bits(mask)}, {text.mask}")


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
        parameter(text, plan, i, type_, registers, offset)
        return
    if space not in ("global", "shared", "const", "generic", "param"):
        raise NoCode
    size = len(registers) * type_.bytes
    addresses, mask = address_of(text, base, offset), text.predicate(i)
    if space == "param":
        addresses = text.op("or", "i64", addresses, splat("i64", PARAM_WINDOW))
    if space != "shared":
        space = "global"
    here = active(text, mask)
    kind = "atom" if i.opcode in ("atom", "red") else i.opcode
    placed = place(text, AccessSite(i, space, kind, size), here, addresses)
    if kind == "atom":
        update(text, plan, i, space, f"i64 {placed.host}, i32 {here}, {vector('i64')} {addresses}")
        return
    pieces = plan.writes if i.opcode == "ld" else plan.reads[1:]
    for k, (register, arg) in enumerate(zip(registers, pieces, strict=True)):
        bits = f"i{type_.bits}"
        given = f"i64 {placed.host}, i32 {placed.form}, i32 {here}, {vector('i64')} {addresses}, i64 {k * type_.bytes}, i64 {size}"
        text.helpers.add(("move", i.opcode, type_.bits))
        if i.opcode == "st":
            value = text.read(arg)
            text.say(f"call void @st_{bits}({given}, {vector(bits)} {text.raw(value)})")
        elif register != SINK:
            loaded = text.add(f"call {vector(bits)} @ld_{bits}({given})")
            wide = text.resized(loaded, bits, f"i{8 * arg.dtype.itemsize}", type_.kind == "s")
            text.write(arg, text.seen(wide, arg.dtype), mask)


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


def update(text: WarpText, plan: Plan, i: PtxInstruction, space: str, given: str) -> None:
    """Adds an atomic access whose order among those of other lanes does not matter, or is that of `memory.open_sums`."""
    type_ = i.type
    how = next((mod for mod in i.mods if mod in ATOMICS), "")
    used = bool(plan.writes) and plan.writes[0].operand != SINK and set(plan.written) & text.code.read_somewhere
    if not how or used or type_.bits < 32:
        raise NoCode
    if type_.kind == "f" and (how != "add" or not (once(text, i) if space == "shared" else i in text.code.open_sums)):
        raise NoCode
    bits = f"i{type_.bits}"
    text.helpers.add(("update", how, type_.name, text.code.base_mode == FLUSH))
    value = text.raw(text.read(plan.reads[1]))
    odd = text.add(f"call i32 @update_{how}_{type_.name}({given}, {vector(bits)} {value})")
    text.add_to("%bad", odd, "or", "i32")


def once(text: WarpText, i: PtxInstruction) -> bool:
    """True if each lane makes this access at most once, and no other has an order that matters: lanes then come in theirs."""
    sums = [one for one in text.code.instructions if one.opcode in ("atom", "red") and one.types[-1].kind == "f"]
    at = text.code.instructions.index(i)
    return len(sums) == 1 and not any(first <= at <= last for first, last in text.code.loop_spans)


# -- matrices ---


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
    here = active(text, text.predicate(i))
    whole = here
    if len(plan.reads) > 2:
        width = text.read(plan.reads[2]).name
        full, none = text.test("uge", "i32", width, splat("i32", size)), text.test("eq", "i32", width, "zeroinitializer")
        text.flagged(text.op("xor", "i1", text.op("or", "i1", full, none), splat("i1", "true")))
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
