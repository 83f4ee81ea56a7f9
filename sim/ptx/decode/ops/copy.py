"""cp.async and its groups (PTX ISA, "Data Movement: Non-bulk asynchronous copy")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...memory.ports import GlobalPort, Part, SharedPort
from ...text.types import TYPES, Array
from ..registry import Frame, Imm, Instruction, Mem, Mods, Plan, Reg, Thunk, Unsupported, arg, opcode
from .access import address_arg, address_thunk
from .bulk import arrive_when_landed, bulk
from .bulk_tensor import map_prefetch, tensor


@opcode(
    "cp",
    forms=".async.ca .cg 4 8 16 bytes with source size; .async.commit_group .wait_group .wait_all .mbarrier.arrive{.noinc}; "
    ".async.bulk{.tensor.1d-5d in tile mode} from .global to .shared::cta and .shared::cluster{.multicast::cluster} with an "
    "mbarrier, from .shared::cta to .global with .commit_group .wait_group{.read}, .prefetch to .L2; .async.bulk from "
    ".shared::cta to .shared::cluster; .reduce.async.bulk{.tensor}: .add .min .max .inc .dec .and .or .xor",
)
def cp(i: Instruction) -> Plan:
    if "bulk" in i.mods:
        return tensor(i) if "tensor" in i.mods else bulk(i)
    mods = Mods(i, *(m for m in i.mods if m.startswith("L2::")))
    if not mods.flag("async"):
        raise Unsupported("only cp.async")
    if mods.flag("mbarrier"):
        counted = mods.flag("noinc")
        mods.flag("arrive", "shared", "shared::cta", "b64")
        mods.done()
        (memory,) = i.operands
        assert isinstance(memory, Mem)
        return arrive_when_landed(i, memory, counted)
    action = mods.choice(("commit_group", "wait_group", "wait_all"))
    if action:
        mods.done()
        return group(i, action)
    mods.choice(("ca", "cg"))
    if not mods.flag("shared", "shared::cta") or not mods.flag("global"):
        raise Unsupported("only from global to the block's shared memory")
    mods.done()
    to, source, size_operand, *rest = i.operands
    if "L2::cache_hint" in i.mods:
        rest = rest[:-1]
    if not isinstance(size_operand, Imm) or size_operand.value not in (4, 8, 16):
        raise Unsupported("the size must be 4, 8 or 16")
    size = size_operand.value
    target, target_offset = address_arg(to, "shared")
    origin, origin_offset = address_arg(source, "global")
    if len(rest) > 1 or (rest and isinstance(rest[0], Reg) and rest[0].type.name == "pred"):
        raise Unsupported("an ignore-src predicate")
    sizes = [arg(o, TYPES["u32"]) for o in rest]

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        memory = frame.machine.memory
        to_address = address_thunk(frame, ins[0], target_offset)
        from_address = address_thunk(frame, ins[1], origin_offset)
        shared = SharedPort(memory, i, frame.n, size, "cp.async")
        whole = GlobalPort(memory, i, frame.n, size, "ld")
        ports: dict[int, GlobalPort] = {frame.n: whole}

        def sources(width: Array, addresses: Array) -> tuple[list[Part], list[Part], Array | None]:
            if width.ndim == 0:
                width = np.full(frame.n, width)
            complete = width >= size
            if complete.all():
                return whole.resolve(frame.lanes, addresses), [], None
            parts: list[Part] = []
            at = np.flatnonzero(complete)
            if len(at):
                port = ports.setdefault(len(at), GlobalPort(memory, i, len(at), size, "ld"))
                for view, index, inner in port.resolve(frame.lanes.subset(at), addresses[at]):
                    parts.append((view, index, at if inner is None else at[inner]))
            pieces: list[Part] = []
            at = np.flatnonzero(~complete & (width > 0))
            if len(at):
                for view, index, inner in whole.resolve_sizes(frame.lanes.subset(at), addresses[at], width[at]):
                    assert inner is not None
                    pieces.append((view, index, at[inner]))
            return parts, pieces, width

        def run() -> None:
            lanes = frame.lanes
            found = shared.resolve(lanes, to_address())
            parts, pieces, width = sources(ins[2], from_address()) if sizes else (whole.resolve(lanes, from_address()), [], None)
            # The ports' index arrays are scratch: the copy outlives this instruction.
            parts = [(view, index.copy(), where) for view, index, where in parts]
            if len(found) == 1 and found[0][2] is None:
                frame.machine.copies.issue(lanes, size, found[0][1], parts, pieces, width)

        return run

    return Plan((), (target, origin, *sizes), bind, pure=False)


@opcode("prefetch", "prefetchu", "discard", "applypriority", forms="no effect; of .prefetch.tensormap the map is checked")
def prefetch(i: Instruction) -> Plan:
    return map_prefetch(i) if "tensormap" in i.mods else Plan((), (), lambda frame, out, ins: _nothing)


def _nothing() -> None:
    pass


def group(i: Instruction, action: str) -> Plan:
    newest = None
    if action == "wait_group":
        (operand,) = i.operands
        if not isinstance(operand, Imm):
            raise Unsupported("the number of groups must be constant")
        newest = operand.value

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        if action == "commit_group":
            return lambda: frame.machine.copies.commit(frame.lanes)
        return lambda: frame.machine.copies.wait(frame.lanes, newest, i)

    return Plan((), (), bind, pure=False)
