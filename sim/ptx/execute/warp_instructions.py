"""Translations of instructions that are no rows of the table: between registers, between the lanes of a warp, of matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode.access import WINDOWS
from ..decode.control import source_lanes
from ..decode.matrices import SHAPES, lengths
from ..decode.registry import FLUSH, Plan
from ..state.lane_sets import WARP
from ..text.syntax import TYPES, Imm, PtxInstruction, Reg
from .vectors import LaneValue, NoCode, scalar, splat, vector
from .warp_accesses import copied, loaded_matrices
from .warp_matrices import FACTORS, WarpProduct
from .warp_text import WarpText

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
    absent = text.add(f"xor i32 {text.bits(there)}, -1")
    text.fail_if(text.add(f"icmp ne i32 {text.add(f'and i32 {absent}, {text.mask}')}, 0"))
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
        holds = text.op("xor", "i1", holds, splat("i1", "true"))
    ballot = text.add(f"and i32 {text.bits(holds)}, {text.mask}")
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


# -- matrices ---


def multiplied(text: WarpText, plan: Plan, i: PtxInstruction) -> None:
    """mma of half types, TF32 and bytes."""
    shape, d_type, a_type, b_type, _ = (mod for mod in i.mods if mod in SHAPE_NAMES or mod in TYPES)
    if a_type not in FACTORS or "satfinite" in i.mods:
        raise NoCode
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
