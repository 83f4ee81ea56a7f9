"""Liveness: the registers that are alive at each place of a kernel, and those that may be read before anybody wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..text.syntax import SINK, PtxProgram, Reg
from .flow import ControlFlow
from .registry import Arg, Plan

PER_LANE = {
    *(f"%{name}.{axis}" for name in ("tid", "ctaid", "clusterid", "cluster_ctaid") for axis in "xyz"),
    "%cluster_ctarank",
    "%laneid",
    "%warpid",
    *(f"%lanemask_{name}" for name in ("eq", "le", "lt", "ge", "gt")),
}
"""Special registers that differ between lanes: they live in register slots that are filled at the start of a wave."""

CONSTANT_REGISTERS = {
    *(f"%{name}.{axis}" for name in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for axis in "xyz"),
    *(f"%reserved_smem_offset_{name}" for name in ("begin", "end", "cap", "0", "1")),
    *(f"%{name}_smem_size" for name in ("dynamic", "total", "aggr")),
    *("%cluster_nctarank", "%is_explicit_cluster", "%current_graph_exec", "%nwarpid", "%smid", "%nsmid", "%gridid"),
    *(f"%envreg{n}" for n in range(32)),
}
"""Special registers that are the same for every lane of a launch."""


def numbers(mask: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class LiveRegisters(ControlFlow):
    """Registers have numbers (`ids`; `types` by number); masks of them have bits by number.

    `reads` and `writes` are masks of each instruction, `mentions` the first and the last instruction that names each register;
    `block_in` and `block_out` are masks of the registers that are alive before and behind each basic block.
    """

    def __init__(self, program: PtxProgram, kernel: str, plans: dict[str, list[Plan]]):
        super().__init__(program, kernel, plans)
        self.ids: dict[str, int] = {}
        self.types: list[Reg] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.mentions: list[list[int]] = []
        for pc, plan in enumerate(self.plans):
            read, written = registers_of(plan)
            for register in (*read, *written):
                if register.name not in self.ids:
                    self.ids[register.name] = len(self.types)
                    self.types.append(register)
                    self.mentions.append([pc, pc])
                self.mentions[self.ids[register.name]][1] = pc
            self.reads.append(self.mask(read))
            self.writes.append(self.mask(written))
        effects = {start: self.effects(block) for start, block in self.blocks.items()}
        self.block_in = dict.fromkeys(self.leaders, 0)
        self.block_out = dict.fromkeys(self.leaders, 0)
        changed = True
        while changed:
            changed = False
            for start in reversed(self.leaders):
                out = 0
                for following in self.after[start]:
                    out |= self.block_in[following]
                used, defined = effects[start]
                into = used | (out & ~defined)
                if out != self.block_out[start] or into != self.block_in[start]:
                    self.block_out[start], self.block_in[start] = out, into
                    changed = True

    def mask(self, registers: Iterable[Reg]) -> int:
        mask = 0
        for register in registers:
            mask |= 1 << self.ids[register.name]
        return mask

    def effects(self, pcs: Iterable[int]) -> tuple[int, int]:
        """Returns the registers that straight code reads before it writes them, and those that it writes."""
        used = defined = 0
        for pc in pcs:
            used |= self.reads[pc] & ~defined
            defined |= self.writes[pc]
        return used, defined

    def live_after(self, end: int) -> int:
        """Returns the registers alive before instruction `end`, the first behind a region."""
        if end >= len(self.plans):
            return 0
        stop = self.block_end(end)
        used, defined = self.effects(range(end, stop))
        return used | (self.block_out[self.leaders[int(self._next_leader[end]) - 1]] & ~defined)

    @cached_property
    def doubtful(self) -> Doubtful:
        alive = self.block_in[self.starts[self.kernel]]
        # Every step of a carry chain has the flag as an operand, also the first, which does not use it.
        known = {*PER_LANE, "%carry"}
        return Doubtful.of(self.plans, {self.types[n].name for n in numbers(alive)} - known)


def registers_of(plan: Plan) -> tuple[list[Reg], list[Reg]]:
    """Returns (read, written) registers. A predicated instruction also reads its results: some lanes keep their old values."""
    reads = [a.operand for a in plan.reads if isinstance(a.operand, Reg)]
    writes = [a.operand for a in plan.writes if isinstance(a.operand, Reg) and a.operand != SINK]
    if plan.instruction.predicate:
        reads += [plan.instruction.predicate[0], *writes]
    return [r for r in reads if r != SINK and r.name not in CONSTANT_REGISTERS], writes


COPIED = {
    **dict.fromkeys(("shfl", "not", "shl", "shr", "bfe"), (0,)),
    **dict.fromkeys(("selp", "prmt", "and", "or", "xor", "shf", "bfi"), (0, 1)),
    "lop3": (0, 1, 2),
}
"""Operands, by opcode, whose bits are moved as other operands' bits say."""


def copied(plan: Plan) -> Sequence[int]:
    """Returns the operands in `plan.reads` that the instruction only moves: as a whole, in parts or bit by bit."""
    i = plan.instruction
    if i.opcode == "mov":
        return range(len(plan.reads))
    if i.opcode == "cvt" and all(t.kind != "f" for t in i.types):
        return (0,)
    return COPIED.get(i.opcode, ())


def merged(plan: Plan) -> Sequence[int]:
    """Returns those of them that it mixes with others bit by bit, which uses a register of which nobody wrote any bit.

    Compilers clear unwritten bits with constants before they put bits in: not by `or`, `xor` and `lop3` of registers alone, nor do
    they insert unwritten bits (`bfi`) into written ones.
    """
    if plan.instruction.opcode in ("or", "xor", "lop3"):
        data = copied(plan)
        return data if all(isinstance(plan.reads[k].operand, Reg) for k in data) else ()
    return (0,) if plan.instruction.opcode == "bfi" else ()


def results(plan: Plan) -> tuple[Arg, ...]:
    """Returns the results that are copies: not the predicate of a shuffle."""
    return plan.writes[:1] if plan.instruction.opcode == "shfl" else plan.writes


def names(args: Iterable[Arg]) -> list[str]:
    return [a.operand.name for a in args if isinstance(a.operand, Reg) and a.operand != SINK]


def touched(plan: Plan) -> list[str]:
    """Returns the registers that an instruction names, its predicate among them."""
    predicate = plan.instruction.predicate
    return [*names((*plan.reads, *plan.writes)), *([predicate[0].name] if predicate else [])]


@dataclass(frozen=True)
class Doubtful:
    """Registers that may be read though nobody wrote them: `blank` are so from the start, `registers` are these and all that may
    get copies of them. `watched` are the instructions that read or write such a register.
    """

    blank: frozenset[str]
    registers: frozenset[str]
    watched: frozenset[int]

    @classmethod
    def of(cls, plans: list[Plan], blank: set[str]) -> Doubtful:
        every: set[str] = set()
        more = set(blank)
        while more - every:
            every |= more
            for plan in plans:
                if every.intersection(names(plan.reads[k] for k in copied(plan))):
                    more |= {*names(results(plan))}
        watched = frozenset(pc for pc, plan in enumerate(plans) if every.intersection(touched(plan)))
        return cls(frozenset(blank), frozenset(every), watched)
