"""Loads, stores, atomics, textures, surfaces, and conversions of addresses between spaces (PTX ISA, "Data Movement: ld, st, cvta,
mapa", "Texture Instructions", "Surface Instructions")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from cupyflash.words import plural

from ..memory.ports import ALL, PORTS, LocalPort, Part, Port, cluster_address, rank_of
from ..memory.spaces import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, SPACE_BITS, Addends
from ..memory.texels import AXES, CUBES, LAYERED, Texels, Texture, TexturePort, padded, some, take, texels_of
from ..state.lane_sets import WARP, LaneSet, run_starts
from ..text.syntax import ELEMENT, SINK, TYPES, Array, Mem, Operand, PtxInstruction, PtxType, Reg, Sym, Unsupported
from .primitives import narrow, wide
from .registry import ANY_TYPE, Arg, Arrays, Frame, Plan, Thunk, act, arg, args, items, opcode, pair, pure, taken
from .table_rows import HALF_TYPES, extended

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0, "const": 0, "param": PARAM_WINDOW}
SPACES = "global shared shared::cta shared::cluster local const param param::entry"


@opcode("cvta", forms="{.to} .global .shared{::cta ::cluster} .local .const .param{::entry} .u64 .u32")
def cvta(i: PtxInstruction) -> Plan:
    backward, named, _ = taken(i, "to", f"!{SPACES}", "!u64 u32")
    space = named.partition("::")[0]
    window = WINDOWS[space]
    d, a = (arg(o, i.type) for o in i.operands)
    if not window:
        return pure(lambda d, a: partial(np.copyto, d, a), [d], [a])
    base = np.array(window, np.uint64)
    fn = np.subtract if backward else np.bitwise_or if space == "param" else np.add
    return pure(lambda d, a: partial(fn, a, base, d), [d], [a])


@opcode("isspacep", forms=".global .shared{::cta ::cluster} .local .param{::entry}")
def isspacep(i: PtxInstruction) -> Plan:
    (named,) = taken(i, f"!{SPACES.replace('const ', '')}")
    space = named.partition("::")[0]
    tags = [np.array(WINDOWS[one] >> SPACE_BITS, np.uint64) for one in (space, *(["param"] if space == "global" else []))]

    p, a = i.operands

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        of = ins[0] >> np.uint64(SPACE_BITS)
        out[0][...] = np.logical_or.reduce([of == tag for tag in tags])  # the window of parameters is within that of .global
        if named in ("shared", "shared::cta") and frame.lanes.wave.cluster > 1:
            # An address of the lane's own block, with its rank or without.
            address = np.broadcast_to(ins[0], frame.n)
            out[0][...] &= rank_of(frame.lanes, address - np.uint64(SHARED_WINDOW)) == frame.lanes.block % frame.lanes.wave.cluster

    return act(run, args("pred", p), args("u64", a))


def ranked(i: PtxInstruction) -> tuple[PtxType, bool]:
    """Returns the type of mapa and getctarank, and True if addresses are generic."""
    space, _ = taken(i, "shared::cluster", "!u32 u64")
    if not space and i.type.bits == 32:
        raise Unsupported("a generic address of 32 bits")
    return i.type, not space


def shared_offsets(frame: Frame, i: PtxInstruction, addresses: Array, generic: bool) -> Array:
    """Returns addresses of shared memory, one a lane, less the window if they are generic; those of another space are a finding."""
    found = np.broadcast_to(addresses, frame.n)
    if not generic:
        return found
    bad = found >> np.uint64(SPACE_BITS) != SHARED_WINDOW >> SPACE_BITS
    if bad.any():
        message = f"{i.opcode} of {int(found[bad][0]):#x}, which is no address of shared memory"
        frame.machine.memory.findings.report("out of bounds", message, i, frame.lanes, np.flatnonzero(bad))
    return found - np.uint64(SHARED_WINDOW)


@opcode("mapa", forms="{.shared::cluster} .u32 .u64")
def mapa(i: PtxInstruction) -> Plan:
    type_, generic = ranked(i)
    d, a, b = i.operands

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        rank, blocks = np.broadcast_to(ins[1], frame.n), frame.lanes.wave.cluster
        bad = rank >= blocks
        if bad.any():
            message = f"mapa to rank {int(rank[bad][0])} of a cluster of {plural(blocks, 'block')}"
            frame.machine.memory.findings.report("bad rank", message, i, frame.lanes, np.flatnonzero(bad))
        found = cluster_address(rank, shared_offsets(frame, i, ins[0], generic))
        out[0][...] = found + np.uint64(SHARED_WINDOW) if generic else found

    return act(run, (arg(d, type_),), (arg(a, type_), *args("u32", b)))


@opcode("getctarank", forms="{.shared::cluster} .u32 .u64")
def getctarank(i: PtxInstruction) -> Plan:
    type_, generic = ranked(i)
    d, a = i.operands

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        out[0][...] = rank_of(frame.lanes, shared_offsets(frame, i, ins[0], generic))

    return act(run, args("u32", d), (arg(a, type_),))


ORDER = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio", "cta", "gpu", "sys", "cluster")
CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")


def hints(i: PtxInstruction) -> tuple[str, ...]:
    """Returns modifiers that steer caches and ordering; execution is sequentially consistent, so they change nothing.

    L2::cache_hint has a policy as last operand, which is ignored.
    """
    return (*ORDER, *CACHE, *(m for m in i.mods if m.startswith(("L1::", "L2::"))))


def space_of(name: str) -> str:
    """Returns the space, as `memory.ports` has it, that a modifier means, or that none of them means."""
    return {"": "generic", "shared::cta": "shared", "param::entry": "param"}.get(name, name)


def address_arg(memory: Operand, space: str) -> tuple[Arg, int]:
    """Returns the base of an address as an unsigned number of its register's width, and the offset."""
    if not isinstance(memory, Mem):
        raise Unsupported("expected an address in brackets")
    if memory.coordinates:
        raise Unsupported("coordinates of a tensor")
    base = memory.base
    narrow_space = space in ("shared", "shared::cluster", "local", "param")
    bits = base.type.bits if isinstance(base, Reg) else 32 if narrow_space else 64
    if bits < 64 and not narrow_space:
        raise Unsupported("a 32-bit address outside of shared and local memory and of parameters")
    return Arg(base, TYPES[f"u{bits}"].dtype), memory.offset


def address_thunk(frame: Frame, base: Array, offset: int) -> Callable[[], Array]:
    """Returns a function that computes the addresses of all lanes of the frame."""
    kind = base.dtype
    delta = np.array(offset & ((1 << (8 * kind.itemsize)) - 1), kind)
    if base.ndim == 0:
        constant = np.full(frame.n, base + delta)
        return lambda: constant
    if offset == 0:
        return lambda: base
    scratch = np.empty(frame.n, kind)

    def add() -> Array:
        np.add(base, delta, scratch)
        return scratch

    return add


def make_port(frame: Frame, i: PtxInstruction, space: str, size: int, kind: str, used: Array | slice = ALL) -> Port:
    if space == "param" and frame.machine.is_call_param(i):
        return LocalPort(frame.machine.memory, i, frame.n, size, kind, used)
    return PORTS[space](frame.machine.memory, i, frame.n, size, kind, used)


def moved(i: PtxInstruction, registers: Operand, memory: Operand) -> tuple[str, PtxType, tuple[Operand, ...], Arg, int]:
    """Returns the space of a load or store, the type of its elements, its registers, and the base and offset of its address."""
    space, vector, _ = taken(i, SPACES, "v2 v4 v8", ANY_TYPE, ignored=hints(i))
    count = int(vector[1:] or 1)
    if count * i.type.bytes > (32 if space == "global" else 16):
        raise Unsupported(f"accesses of {count * i.type.bytes} bytes")
    space = space_of(space)
    return space, i.type, items(registers, count), *address_arg(memory, space)


@opcode(
    "ld",
    "ldu",
    forms="{.v2 .v4 .v8} .global .shared{::cta ::cluster} .local .const .param{::entry}, generic; .b8-.f64; hints ignored",
)
def ld(i: PtxInstruction) -> Plan:
    target, memory = i.operands[:2]
    space, type_, registers, base, offset = moved(i, target, memory)
    count, size = len(registers), len(registers) * type_.bytes
    view = TYPES[f"{'s' if type_.kind == 's' else 'u'}{type_.bits}"]

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        if space == "param" and isinstance(memory, Mem) and isinstance(memory.base, Sym) and ins[0].ndim == 0:
            constant = frame.machine.parameter(memory.base, offset, size)
            if constant is not None:
                return constants(out, np.frombuffer(constant, view.dtype))
        # A vector may be loaded whole though only some of its elements matter.
        read = [isinstance(r, Reg) and r.name in frame.read_somewhere for r in registers]
        used = np.repeat(read, type_.bytes) if count > 1 else ALL
        address, port = address_thunk(frame, ins[0], offset), make_port(frame, i, space, size, "ld", used)
        direct = count == 1 and out[0].itemsize == size and out[0].flags.c_contiguous
        buffer = out[0].view(ELEMENT[size]) if direct else np.empty(frame.n, ELEMENT[size])
        columns = buffer.view(view.dtype).reshape(frame.n, count)
        copies = [] if direct else [(o, columns[:, k]) for k, o in enumerate(out) if registers[k] != SINK]

        def run() -> None:
            gather(port.resolve(frame.lanes, address()), buffer)
            for register, column in copies:
                np.copyto(register, column, casting="unsafe")

        return run

    return Plan(tuple(extended(r, view) for r in registers), (base,), bind, pure=False)


def constants(out: Sequence[Array], values: Array) -> Thunk:
    def run() -> None:
        for register, value in zip(out, values, strict=True):
            np.copyto(register, value, casting="unsafe")

    return run


def gather(parts: list[Part], buffer: Array) -> None:
    """Reads the elements that the port resolved; lanes it left out get zero."""
    if len(parts) == 1 and parts[0][2] is None:
        parts[0][0].take(parts[0][1], 0, buffer, "clip")
        return
    buffer.view(np.uint8)[:] = 0
    for view, index, positions in parts:
        buffer[positions if positions is not None else slice(None)] = view[index]


def store(port: Port, lanes: LaneSet, addresses: Array, buffer: Array) -> None:
    """Writes the lanes' elements of `buffer` where the port resolves their addresses."""
    port.memory.storing(lanes, buffer)
    for view, index, positions in port.resolve(lanes, addresses):
        view[index] = buffer if positions is None else buffer[positions]
    port.memory.stored()


@opcode("st", forms="{.v2 .v4 .v8} .global .shared{::cta ::cluster} .local .param, generic; .b8-.f64; hints ignored")
def st(i: PtxInstruction) -> Plan:
    memory, source = i.operands[:2]
    space, type_, registers, base, offset = moved(i, source, memory)
    count, size, view = len(registers), len(registers) * type_.bytes, f"b{type_.bits}"

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        address, port = address_thunk(frame, ins[0], offset), make_port(frame, i, space, size, "st")
        values = ins[1:]
        direct = count == 1 and values[0].ndim == 1 and values[0].flags.c_contiguous
        buffer = values[0].view(ELEMENT[size]) if direct else np.empty(frame.n, ELEMENT[size])
        columns = [] if direct else list(buffer.view(TYPES[view].dtype).reshape(frame.n, count).T)

        def run() -> None:
            for column, value in zip(columns, values, strict=False):
                np.copyto(column, value)
            store(port, frame.lanes, address(), buffer)

        return run

    return Plan((), (base, *args(view, *registers)), bind, pure=False)


@opcode("createpolicy", forms="gives 0: cache policies change nothing")
def createpolicy(i: PtxInstruction) -> Plan:
    zero = np.array(0, np.uint64)
    return Plan(args("b64", i.operands[0]), (), lambda frame, out, ins: lambda: np.copyto(out[0], zero))


# -- atomics ------------------------------------------------------------------------------------------------------------

Update = Callable[[Array, Array, Array], Array]
"""(old value, first operand, second operand) to the new value."""


def update(name: str, type_: PtxType) -> Update:
    """Returns the function of the new value, on arrays of raw bits."""
    storage = np.dtype(np.uint16 if type_.name.startswith("b") else np.float16)

    def of_numbers(fn: np.ufunc) -> Update:
        if type_.name not in HALF_TYPES:
            return lambda old, value, _: fn(old.view(type_.dtype), value.view(type_.dtype)).view(old.dtype)
        return lambda old, value, _: narrow(fn(*(wide(x.view(storage), type_) for x in (old, value))), type_).view(old.dtype)

    table: dict[str, Update] = {
        "add": of_numbers(np.add),
        "min": of_numbers(np.fmin),
        "max": of_numbers(np.fmax),
        "and": lambda old, value, _: old & value,
        "or": lambda old, value, _: old | value,
        "xor": lambda old, value, _: old ^ value,
        "exch": lambda old, value, _: value,
        "cas": lambda old, compare, value: np.where(old == compare, value, old),
        "inc": lambda old, value, _: np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1)),
        "dec": lambda old, value, _: np.where((old == 0) | (old > value), value, old - old.dtype.type(1)),
    }
    return table[name]


def rounds(index: Array) -> list[Array]:
    """Returns positions in the order of execution: each round touches an element at most once, lanes go in their order."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    new = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    if new.all():
        return [np.arange(len(index))]
    start = np.maximum.accumulate(np.where(new, np.arange(len(index)), 0))
    rank = np.empty(len(index), np.int64)
    rank[order] = np.arange(len(index)) - start
    by_rank = np.argsort(rank, kind="stable")
    return np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])


def add_at_once(view: Array, index: Array, value: Array) -> Array:
    """Adds integers of lanes in their order; returns the old values, by running sums within each element."""
    order = np.argsort(index, kind="stable")
    ordered, addends = index[order], value[order]
    new = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    before = np.cumsum(addends, dtype=value.dtype) - addends
    start = np.maximum.accumulate(np.where(new, np.arange(len(index)), 0))
    old = np.empty(len(index), value.dtype)
    old[order] = view[ordered] + (before - before[start])
    np.add.at(view, index, value)
    return old


REPEATED: dict[str, np.ufunc] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}
"""Updates of integers that can be made one behind the other at once."""


def crowded(index: Array) -> bool:
    """True if an element has more lanes than there are elements."""
    _, counts = np.unique(index, return_counts=True)
    return bool(counts.max() > len(counts))


def in_turn(view: Array, index: Array, value: Array, turns: np.ufunc | None) -> Array:
    """Updates the elements of lanes in their order, element by element; returns the old values. Without a function for turns the
    value takes the old one's place.
    """
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    heads = run_starts(ordered)
    old = np.empty(len(index), value.dtype)
    for start, end in zip(heads.tolist(), [*heads[1:].tolist(), len(index)], strict=True):
        place, lanes = ordered[start], order[start:end]
        values = np.concatenate((view[place : place + 1], value[lanes]))
        if turns is not None:
            values = turns.accumulate(values)
        old[lanes], view[place] = values[:-1], values[-1]
    return old


@opcode(
    "atom",
    "red",
    forms=".global .shared{::cta ::cluster}, generic: .add .min .max .inc .dec .u32-.s64, .and .or .xor .exch .cas .b16-.b64, "
    ".add .f32 .f64 .f16 .f16x2 .bf16 .bf16x2, of .global {.v2 .v4 .v8} of those up to 16 bytes",
)
def atom(i: PtxInstruction) -> Plan:
    operations = "!add min max inc dec and or xor exch cas"
    named, vector, name, _ = taken(i, SPACES, "v2 v4 v8", operations, ANY_TYPE, ignored=(*hints(i), "noftz"))
    space, count, type_ = space_of(named), int(vector[1:] or 1), i.type
    if space not in ("global", "shared", "shared::cluster", "generic") or type_.bits < 16:
        raise Unsupported("this atomic")
    if type_.kind == "f" and name != "add":
        raise Unsupported(f"atomic {name} of floating point")
    size = count * type_.bytes
    if count > 1 and (space != "global" or type_.kind != "f" or type_.bits == 64 or size > 16):
        raise Unsupported("this atomic of a vector")
    returns = i.opcode == "atom"
    targets = items(i.operands[0], count) if returns else [SINK] * count
    memory, *given = i.operands[1:] if returns else i.operands
    values = given[: 2 if name == "cas" else 1] if count == 1 else items(given[0], count)
    base, offset = address_arg(memory, space)
    fn = update(name, type_)
    chained = type_.kind != "f" and name in (*REPEATED, "exch")
    bits = f"b{type_.bits}"
    storage = TYPES[bits].dtype

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        address, port = address_thunk(frame, ins[0], offset), make_port(frame, i, space, size, "atom")
        operands = [v if v.ndim else np.full(frame.n, v) for v in ins[1:]]
        sums = frame.machine.memory.sums
        waits = sums is not None and i in sums.own

        def run() -> None:
            olds = [np.zeros(frame.n, storage) for _ in range(count)]
            for whole, index, positions in port.resolve(frame.lanes, address()):
                chosen = operands if positions is None else [v[positions] for v in operands]
                if waits and wait(frame, whole, index, positions, chosen[0].view(type_.dtype)):
                    continue
                view, index = whole.view(storage), index.astype(np.int64) * count
                for k, old in enumerate(olds):  # each element of a vector is an atomic of its own
                    first, second = (chosen[0], chosen[-1]) if count == 1 else (chosen[k], chosen[k])
                    if name == "add" and type_.kind != "f":
                        found = add_at_once(view, index, first)
                    elif chained and crowded(index):
                        found = in_turn(view.view(type_.dtype), index, first.view(type_.dtype), REPEATED.get(name)).view(storage)
                    else:
                        found = np.empty(len(index), storage)
                        for at in rounds(index):
                            found[at] = view[index[at] + k]
                            view[index[at] + k] = fn(found[at], first[at], second[at])
                    old[positions if positions is not None else slice(None)] = found
            for register, old in zip(out, olds, strict=True):
                np.copyto(register, old)

        return run

    return Plan(args(bits, *targets), (base, *args(bits, *values)), bind, mode=0, pure=False)


def wait(frame: Frame, whole: Array, index: Array, positions: Array | None, values: Array) -> bool:
    """Makes additions wait; returns False if they are not to a tensor."""
    memory, lanes = frame.machine.memory, frame.lanes
    segment = memory.segment_of(whole, values.itemsize)
    if memory.sums is None or segment is None:
        return False
    where = slice(None) if positions is None else positions
    block, warp = lanes.block[where], lanes.warp[where] % (lanes.wave.lanes_per_block // WARP)
    order = block << 40 | memory.sums.barriers()[block] << 12 | warp
    memory.sums.add(segment, whole.view(values.dtype), Addends(index.astype(np.int64), values.copy(), order))
    return True


# -- textures and surfaces ----------------------------------------------------------------------------------------------------

COLORS = "!f32 s32 u32"


def place_in(operand: Operand, geometry: str, type_: str) -> tuple[Arg, ...]:
    """Returns the handle and the coordinates of a place in a texture or surface; a layer's number comes first and is unsigned."""
    if not isinstance(operand, Mem) or operand.offset or not isinstance(operand.base, Reg) or operand.base.type.bits != 64:
        raise Unsupported("a texture that is not given by its handle in a register of 64 bits")
    layered = geometry in LAYERED
    types = ["u32"] * layered + [type_] * (AXES[geometry] + (geometry in CUBES))
    given = operand.coordinates[: len(types)]
    return (*args("u64", operand.base), *(arg(each, TYPES[name]) for each, name in zip(given, types, strict=True)))


def texture_port(frame: Frame, i: PtxInstruction, size: int, kind: str = "ld") -> TexturePort:
    return frame.lend(("texture", i, size), lambda: TexturePort(frame.machine.memory, i, frame.n, size, kind))


def spread(frame: Frame, ins: Arrays) -> list[Array]:
    """Returns operands with an element for each lane."""
    return [one if one.ndim else np.broadcast_to(one, frame.n) for one in ins]


@opcode(
    "tex",
    forms="{.base .level .grad} .1d .2d .3d .a1d .a2d .cube .acube, .v4 .f32 .s32 .u32 by coordinates .f32 .s32, of a handle; "
    "levels are ignored: no texture has more than one",
)
def tex(i: PtxInstruction) -> Plan:
    _, geometry, _, to, of = taken(i, "base level grad", f"!{' '.join(AXES)}", "!v4", COLORS, "!f32 s32")
    target, resident = pair(i.operands[0])

    def values(frame: Frame, lanes: LaneSet, ins: Arrays, found: Texture) -> list[Array]:
        port = texture_port(frame, i, found.texels.format.size)
        return padded(frame.machine.textures.fetch(port, lanes, found, geometry, ins))

    return fetching(i, geometry, to, (*items(target, 4), resident), place_in(i.operands[1], geometry, of), values)


@opcode("tld4", forms=".r .g .b .a .2d .v4 .f32 .s32 .u32 by coordinates .f32, of a handle")
def tld4(i: PtxInstruction) -> Plan:
    channel, geometry, _, to, _ = taken(i, "!r g b a", "!2d", "!v4", COLORS, "!f32")
    target, resident = pair(i.operands[0])

    def values(frame: Frame, lanes: LaneSet, ins: Arrays, found: Texture) -> list[Array]:
        port = texture_port(frame, i, found.texels.format.size)
        gathered = frame.machine.textures.gather(port, lanes, found, ins, "rgba".index(channel))
        return list(gathered.T)

    return fetching(i, geometry, to, (*items(target, 4), resident), place_in(i.operands[1], geometry, "f32"), values)


Values = Callable[[Frame, LaneSet, Arrays, Texture], Sequence[Array]]
"""(frame, lanes, their coordinates, their texture) to the four results of these lanes."""


def fetching(
    i: PtxInstruction, geometry: str, type_: str, registers: Sequence[Operand], place: tuple[Arg, ...], values: Values
) -> Plan:
    """Returns the plan of a fetch into four registers and a predicate: the texel is there."""

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        handles, *coordinates = spread(frame, ins)
        textures = frame.machine.textures
        results: list[Array] = []
        for at, found in textures.textures(frame.lanes, handles, i, geometry):
            lanes = some(frame.lanes, at)
            if textures.same_kind(found, type_ == "f32", lanes, i):
                fetched = values(frame, lanes, [one[at] for one in coordinates], found)
                if isinstance(at, slice):
                    results = list(fetched)
                    break
                results = results or [np.zeros(frame.n, fetched[0].dtype) for _ in range(4)]
                for result, value in zip(results, fetched, strict=True):
                    result[at] = value
        for register, result in zip(out, results or [np.zeros(1, np.uint32)] * 4, strict=False):
            np.copyto(register, result.view(register.dtype))
        out[4][...] = True

    return act(run, (*args(type_, *registers[:4]), *args("pred", registers[4])), place)


@opcode(
    "suld",
    "sust",
    forms=".b .1d .2d .3d .a1d .a2d {.v2 .v4} .b8 .b16 .b32 .b64 .trap .clamp .zero, of a handle; hints ignored",
)
def surface(i: PtxInstruction) -> Plan:
    geometries = " ".join(one for one in AXES if one not in CUBES)
    _, geometry, vector, _, clamp = taken(
        i, "!b", f"!{geometries}", "v2 v4", "!b8 b16 b32 b64", "trap clamp zero", ignored=hints(i)
    )
    loads, count, type_ = i.opcode == "suld", int(vector[1:] or 1), i.type
    where, given = i.operands[::-1] if loads else i.operands
    registers = items(given, count)
    size, place = count * type_.bytes, place_in(where, geometry, "s32")
    bits = TYPES[f"u{type_.bits}"]

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        handles, *coordinates = spread(frame, ins[: len(place)])
        buffer = np.zeros(frame.n, ELEMENT[size])
        columns = buffer.view(bits.dtype).reshape(frame.n, count)
        for k, value in enumerate(ins[len(place) :]):
            columns[:, k] = value
        port, textures = texture_port(frame, i, size, "ld" if loads else "st"), frame.machine.textures
        for at, found in textures.surfaces(frame.lanes, handles, i, geometry):
            lanes, mine = some(frame.lanes, at), [one[at] for one in coordinates]
            address, inside = textures.byte_places(lanes, found, mine, size, i, clamp or "trap")
            if not inside.all():
                at, address = np.arange(frame.n)[at][inside], address[inside]
                if not len(at):
                    continue
                lanes = frame.lanes.subset(at)
            if loads:
                take(port.resolve(lanes, address), buffer, at)
            else:
                store(port, lanes, address, buffer[at])
            port.count()
        for register, column in zip(out, columns.T, strict=False):
            np.copyto(register, column, casting="unsafe")

    values = tuple(extended(one, bits) for one in registers) if loads else args(f"b{type_.bits}", *registers)
    return act(run, values if loads else (), place if loads else (*place, *values))


@opcode("txq", "suq", forms=".width .height .depth .array_size, txq also .normalized_coords, .b32, of a handle")
def query(i: PtxInstruction) -> Plan:
    textures = i.opcode == "txq"
    asked, _ = taken(i, f"!width height depth array_size{' normalized_coords' * textures}", "!b32")
    d, where = i.operands
    if not isinstance(where, Mem) or where.offset or not isinstance(where.base, Reg):
        raise Unsupported("a texture that is not given by its handle in a register of 64 bits")

    def answer(found: Texture | Texels) -> int:
        texels = texels_of(found)
        if isinstance(found, Texture) and asked == "normalized_coords":
            return int(found.normalized)
        sizes = dict(zip(("width", "height", "depth"), texels.shape, strict=True))
        return {**sizes, "array_size": texels.layers}[asked]

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        (handles,) = spread(frame, ins)
        unit = frame.machine.textures
        for at, found in (unit.textures if textures else unit.surfaces)(frame.lanes, handles, i, ""):
            out[0][at] = answer(found)

    return act(run, args("b32", d), args("u64", where.base))
