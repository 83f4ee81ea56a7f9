"""Addresses of one space as those of another, and whose they are (PTX ISA, "Data Movement: cvta, isspacep, mapa, getctarank")."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from cupyflash.words import plural

from ...memory.cluster import cluster_address, rank_of
from ...memory.memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, SPACE_BITS
from ...text.types import TYPES, Array, PtxType
from ..registry import Frame, Instruction, Mods, Plan, Thunk, Unsupported, arg, opcode, pure

WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "global": 0, "const": 0, "param": PARAM_WINDOW}
SHARED = ("shared", "shared::cta", "shared::cluster")


def named_space(i: Instruction, mods: Mods) -> str:
    """The space that an instruction names."""
    if set(SHARED) & set(i.mods):
        return "shared"
    return "param" if mods.flag("param::entry") else mods.choice(tuple(WINDOWS))


@opcode("cvta", forms="{.to} .global .shared{::cta ::cluster} .local .const .param{::entry} .u64 .u32")
def cvta(i: Instruction) -> Plan:
    mods = Mods(i, *SHARED)
    backward, type_ = mods.flag("to"), mods.type("u64", "u32")
    space = named_space(i, mods)
    mods.done()
    window = WINDOWS[space]
    d, a = (arg(o, type_) for o in i.operands)
    if not window:
        return pure(lambda d, a: partial(np.copyto, d, a), [d], [a])
    base = np.array(window, np.uint64)
    fn = np.subtract if backward else np.bitwise_or if space == "param" else np.add
    return pure(lambda d, a: partial(fn, a, base, d), [d], [a])


@opcode("isspacep", forms=".global .shared{::cta ::cluster} .local .param{::entry}")
def isspacep(i: Instruction) -> Plan:
    mods = Mods(i, *SHARED)
    space = named_space(i, mods)
    mods.done()
    if space == "const":
        raise Unsupported("isspacep.const")
    tags = [np.array(WINDOWS[one] >> SPACE_BITS, np.uint64) for one in (space, *(["param"] if space == "global" else []))]

    p, a = i.operands

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            of = ins[0] >> np.uint64(SPACE_BITS)
            out[0][...] = np.logical_or.reduce([of == tag for tag in tags])  # the window of parameters is within that of .global
            if space == "shared" and "shared::cluster" not in i.mods and frame.lanes.wave.cluster > 1:
                # The own block's, be it with its rank or without.
                address = np.broadcast_to(ins[0], frame.n)
                out[0][...] &= (
                    rank_of(frame.lanes, address - np.uint64(SHARED_WINDOW)) == frame.lanes.block % frame.lanes.wave.cluster
                )

        return run

    return Plan((arg(p, TYPES["pred"]),), (arg(a, TYPES["u64"]),), bind, pure=False)


def ranked(i: Instruction) -> tuple[PtxType, bool]:
    """Type of mapa and getctarank, and whether addresses are generic."""
    mods = Mods(i)
    generic = not mods.flag("shared::cluster")
    type_ = mods.type("u32", "u64")
    mods.done()
    if generic and type_.bits == 32:
        raise Unsupported("a generic address of 32 bits")
    return type_, generic


def shared_offsets(frame: Frame, i: Instruction, addresses: Array, generic: bool) -> Array:
    """Addresses of shared memory, one a lane, less the window where they are generic; of another space they are a finding."""
    found = np.broadcast_to(addresses, frame.n)
    if not generic:
        return found
    bad = found >> np.uint64(SPACE_BITS) != SHARED_WINDOW >> SPACE_BITS
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        message = f"{i.opcode} of {int(found[first]):#x}, which is no address of shared memory"
        frame.machine.memory.findings.report("out of bounds", message, i, frame.lanes, first, count=int(bad.sum()))
    shared: Array = found - np.uint64(SHARED_WINDOW)
    return shared


@opcode("mapa", forms="{.shared::cluster} .u32 .u64")
def mapa(i: Instruction) -> Plan:
    type_, generic = ranked(i)
    d, a, b = i.operands

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            rank, blocks = np.broadcast_to(ins[1], frame.n), frame.lanes.wave.cluster
            bad = rank >= blocks
            if bad.any():
                first = int(np.flatnonzero(bad)[0])
                message = f"mapa to rank {int(rank[first])} of a cluster of {plural(blocks, 'block')}"
                frame.machine.memory.findings.report("bad rank", message, i, frame.lanes, first, count=int(bad.sum()))
            found = cluster_address(rank, shared_offsets(frame, i, ins[0], generic))
            out[0][...] = found + np.uint64(SHARED_WINDOW) if generic else found

        return run

    return Plan((arg(d, type_),), (arg(a, type_), arg(b, TYPES["u32"])), bind, pure=False)


@opcode("getctarank", forms="{.shared::cluster} .u32 .u64")
def getctarank(i: Instruction) -> Plan:
    type_, generic = ranked(i)
    d, a = i.operands

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            out[0][...] = rank_of(frame.lanes, shared_offsets(frame, i, ins[0], generic))

        return run

    return Plan((arg(d, TYPES["u32"]),), (arg(a, type_),), bind, pure=False)
