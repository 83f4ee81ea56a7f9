"""Tensor maps that kernels make in memory (PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy")."""

from __future__ import annotations

import numpy as np

from ..memory.swizzles import MAP_BYTES, replaced
from ..state.lane_sets import LaneSet, run_starts
from ..text.syntax import ELEMENT, Array, Imm, Operand, PtxInstruction, Unsupported
from .access import address_arg, make_port, spread, store
from .registry import WHOLE_WARP, Arrays, Frame, Plan, act, args, opcode, taken

PIECE = 16
"""Bytes of a map that one access moves."""

NUMBERED = ("box_dim", "global_dim", "global_stride", "element_stride")
"""Fields with a value for each dimension."""

CHOSEN = {
    "elemtype": ("dtype", (*range(8), 10, 8, 9, 11, 12)),
    "interleave_layout": ("interleave", (0, 1, 2)),
    "swizzle_mode": ("swizzle", (0, 1, 2, 3)),
    "fill_mode": ("fill", (0, 1)),
}
"""Fields that take a constant, and the driver's numbers of what the instruction's numbers mean."""


@opcode(
    "tensormap",
    forms=".replace.tile of all fields but .swizzle_atomicity, .global .shared::cta, generic; .cp_fenceproxy from .shared::cta to "
    ".global",
)
def tensormap(i: PtxInstruction) -> Plan:
    return copy(i) if "cp_fenceproxy" in i.mods else replace(i)


def replace(i: PtxInstruction) -> Plan:
    """tensormap.replace: a map with another value of one field, which takes the place of the whole map."""
    _, _, field, space, _, kind = taken(
        i, "!replace", "!tile", f"!global_address rank {' '.join((*NUMBERED, *CHOSEN))}", "global shared::cta", "!b1024", "!b32 b64"
    )
    memory, *rest = i.operands
    ordinal = constant(rest.pop(0), range(5)) if field in NUMBERED else 0
    (value,) = rest
    name = field
    if field in CHOSEN:
        name, meant = CHOSEN[field]
        value = Imm(meant[constant(value, range(len(meant)))])
    where = {"": "generic", "shared::cta": "shared"}.get(space, space)
    base, offset = address_arg(memory, where)

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        lanes, (addresses, values) = frame.lanes, spread(frame, ins)
        addresses = addresses + addresses.dtype.type(offset)
        found = loaded(frame, i, where, lanes, addresses)
        for k, number in enumerate(values.tolist()):
            made = replaced(found[k].tobytes(), name, ordinal, number)
            if isinstance(made, str):
                one = lanes.subset(np.array([k]))
                frame.machine.memory.findings.report("bad tensor map", made, i, one, address=int(addresses[k]))
                continue
            found[k] = np.frombuffer(made, np.uint8)
        stored(frame, i, where, lanes, addresses, found)

    return act(run, (), (base, *args(kind, value)))


def copy(i: PtxInstruction) -> Plan:
    """tensormap.cp_fenceproxy: a warp copies a map from shared to global memory, and its stores are fenced for the map's use."""
    spaces = "!global", "!shared::cta", "!tensormap::generic"
    taken(i, "!cp_fenceproxy", *spaces, "!release", "!cta cluster gpu sys", "!sync", "!aligned")
    (to, to_offset), (source, offset) = address_arg(i.operands[0], "global"), address_arg(i.operands[1], "shared")
    constant(i.operands[2], range(MAP_BYTES, MAP_BYTES + 1))

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        there, here = spread(frame, ins)
        first = run_starts(frame.lanes.warp)
        lanes = frame.lanes.subset(first)
        found = loaded(frame, i, "shared", lanes, here[first] + here.dtype.type(offset))
        stored(frame, i, "global", lanes, there[first] + there.dtype.type(to_offset), found)
        frame.machine.bulks.maps.release(frame.lanes)

    return act(run, (), (to, source), collective=WHOLE_WARP)


def loaded(frame: Frame, i: PtxInstruction, space: str, lanes: LaneSet, addresses: Array) -> Array:
    """Returns the bytes of the lanes' maps, (lanes, bytes)."""
    found = np.zeros((lanes.n, MAP_BYTES), np.uint8)
    for at in range(0, MAP_BYTES, PIECE):
        port = make_port(frame, i, space, PIECE, "ld")
        pieces = np.zeros(lanes.n, ELEMENT[PIECE])
        for view, index, positions in port.resolve(lanes, addresses + addresses.dtype.type(at)):
            pieces[slice(None) if positions is None else positions] = view[index]
        found[:, at : at + PIECE] = pieces.view(np.uint8).reshape(lanes.n, PIECE)
    return found


def stored(frame: Frame, i: PtxInstruction, space: str, lanes: LaneSet, addresses: Array, maps: Array) -> None:
    """Stores the lanes' maps."""
    for at in range(0, MAP_BYTES, PIECE):
        pieces = np.ascontiguousarray(maps[:, at : at + PIECE]).view(ELEMENT[PIECE]).reshape(lanes.n)
        store(make_port(frame, i, space, PIECE, "st"), lanes, addresses + addresses.dtype.type(at), pieces)


def constant(operand: Operand, allowed: range) -> int:
    """Returns a constant operand. Raises Unsupported for another one."""
    if not isinstance(operand, Imm) or operand.value not in allowed:
        raise Unsupported(f"expected a constant from {allowed.start} to {allowed.stop - 1}")
    return int(operand.value)
