"""One turn of a consumer in a warp-specialised Hopper kernel: its instructions, and what runs while which products are in flight.

A consumer warpgroup issues products (HGMMA) in groups and goes on while the tensor cores compute them; WARPGROUP.DEPBAR waits for
all groups except the latest ones. Instructions between a group's last HGMMA and the wait for it cost the tensor cores no time.
Instructions while nothing is in flight do: they are *exposed*, unless another warpgroup has products of its own then. There is no
clock model here: only counts and the order of instructions.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from cupyflash import plan
from cupyflash.multiprocessor import WARP
from cupyflash.sim.clock.sass import Instruction
from machine_code.flow import LONGEST, Loop, Tracer, conditional, jumps
from machine_code.ours import Code, Subject, read

PEERS = Path(__file__).with_name("flash_attention_3.json")
WARPGROUP_ROWS = 64
WARPGROUP_THREADS = 4 * WARP
FMA_RATE = 2048
"""FMAs on half types a clock of a multiprocessor's tensor cores: 989 TFLOP/s of 132 at 1.83 GHz."""
SCORES, VALUES = "QK", "PV"
ISSUING = "issuing"
# What an instruction is counted as besides HGMMA. What is in none of these is uniform (U...) or integer.
KINDS: Mapping[str, tuple[str, ...]] = {
    "MUFU": ("MUFU",),
    "float32": ("FFMA", "FMUL", "FADD", "FMNMX", "F2FP", "SHFL"),
    "shared": ("STSM", "STS", "LDS", "LDSM"),
    "spills": ("LDL", "STL"),
    "waits": ("BAR", "SYNCS", "WARPGROUP", "FENCE", "MEMBAR"),
    "uniform": (),
    "integer": (),
    "branch": ("BRA", "BSSY", "BSYNC", "WARPSYNC", "CALL", "EXIT", "RET", "BREAK", "BRX"),
    "other": ("R2UR", "S2R", "S2UR", "CS2R", "LDC", "LDG", "ELECT", "VOTE", "DEPBAR", "YIELD", "NOP", "WARPGROUPSET"),
}
_KIND = {opcode: kind for kind, opcodes in KINDS.items() for opcode in opcodes}
_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


def kind(instruction: Instruction) -> str:
    """HGMMA, or one of KINDS."""
    opcode = instruction.opcode
    return "HGMMA" if opcode == "HGMMA" else _KIND.get(opcode, "uniform" if opcode.startswith("U") else "integer")


def clocks(instructions: Sequence[Instruction]) -> int:
    """The clocks of one warp by itself, by stall counts."""
    return sum(max(each.control.stall, 1) for each in instructions)


def shape(product: Instruction) -> tuple[int, int, int]:
    """Rows, columns and depth of an HGMMA."""
    found = next(filter(None, map(_SHAPE.fullmatch, product.modifiers)))
    return int(found[1]), int(found[2]), int(found[3])


@dataclass(frozen=True)
class Group:
    """Products that are waited for together, from one place of a turn to another: S = Q K^T, or O += P V."""

    name: str
    first: int
    last: int
    products: tuple[Instruction, ...]

    @property
    def fmas(self) -> int:
        sizes = [shape(each) for each in self.products]
        return sum(rows * columns * depth for rows, columns, depth in sizes)

    @property
    def columns(self) -> int:
        """The columns of the result, which may lie in several accumulators."""
        return sum({each.operands[0]: shape(each)[1] for each in self.products}.values())


@dataclass(frozen=True)
class Turn:
    """Instructions of one turn as a warp issues them."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups in the order of issue. Scores begin at zero, values are added to O."""
        found: list[Group] = []
        pending: list[int] = []
        for at, each in enumerate(self.instructions):
            if each.opcode == "HGMMA":
                pending.append(at)
                if "gsb0" in each.operands:
                    products = tuple(self.instructions[place] for place in pending)
                    name = SCORES if any("RZ" in product.operands[1:] for product in products) else VALUES
                    found.append(Group(name, pending[0], at, products))
                    pending = []
        return tuple(found)

    @cached_property
    def flight(self) -> tuple[tuple[str, ...], ...]:
        """The groups in flight at each instruction; from a group's first HGMMA to its last, ISSUING and its name.

        In a steady turn these include the groups that the turn before left in flight.
        """
        issuing = {at: group for group in self.groups for at in range(group.first, group.last + 1)}
        held: tuple[str, ...] = ()
        found: list[tuple[str, ...]] = []
        for _ in range(2):
            found = []
            for at, each in enumerate(self.instructions):
                if each.opcode == "WARPGROUP" and "DEPBAR" in each.modifiers:
                    kept = int(each.operands[-1], 0)
                    held = held[max(0, len(held) - kept) :]
                group = issuing.get(at)
                found.append((ISSUING, group.name) if group else held)
                if group and at == group.last:
                    held = (*held, group.name)
        return tuple(found)

    @property
    def counts(self) -> dict[str, int]:
        """Instructions besides HGMMA, by kind."""
        found = Counter(map(kind, self.instructions))
        return {name: found[name] for name in KINDS}

    @property
    def stalls(self) -> int:
        return clocks(self.instructions)

    @property
    def exposed(self) -> int:
        """Clocks by stall counts while no product of this warpgroup is in flight or being issued."""
        return clocks([each for each, held in zip(self.instructions, self.flight, strict=True) if not held])

    @property
    def hidden(self) -> int:
        """Exponentials while a product is in flight."""
        pairs = zip(self.instructions, self.flight, strict=True)
        return sum(each.opcode == "MUFU" and bool(held) and held[0] != ISSUING for each, held in pairs)

    @property
    def keys(self) -> int:
        """The keys that a turn takes: Bc."""
        return sum(group.columns for group in self.groups if group.name == SCORES)

    @property
    def tensor_clocks(self) -> float:
        """The clocks that the tensor cores need for the turn's products."""
        return sum(group.fmas for group in self.groups) / FMA_RATE

    def stretches(self) -> Iterator[str]:
        """A line for each stretch with the same groups in flight."""
        pairs = zip(self.instructions, self.flight, strict=True)
        for held, stretch in groupby(pairs, key=lambda pair: pair[1]):
            code = [each for each, _ in stretch]
            found = Counter(map(kind, code))
            parts = ", ".join(f"{found[name]} {name}" for name in ("HGMMA", *KINDS) if found[name])
            now = " ".join(held) if held[:1] == (ISSUING,) else f"{' and '.join(held)} in flight" if held else "nothing in flight"
            yield f"{code[0].address:05x} {now:23} {len(code):4} instructions, {clocks(code):4} clocks: {parts}"


def follow(code: Sequence[Instruction], loop: Loop) -> tuple[Instruction, ...]:
    """Follow one turn of a loop in the steady state: waits succeed at once, nothing leaves the loop, the shorter of two ways is
    taken, and optional code is not skipped.

    ValueError if that does not come back to the loop's first instruction.
    """
    place = {each.address: at for at, each in enumerate(code)}
    found: list[Instruction] = []
    at = loop.head
    while not found or at != loop.head:
        each = code[at]
        found.append(each)
        target = place.get(each.target) if jumps(each) and each.target is not None else None
        always = target is not None and not conditional(each)
        ends = each.opcode in ("EXIT", "RET") and not each.guard
        if ends or at not in loop or len(found) > LONGEST:
            raise ValueError(f"the loop from {code[loop.head].address:x} is left at {each.address:x}")
        taken = target is not None and (
            always or target == loop.head or (at < target and target in loop and _passes(code, place, at))
        )
        at = target if taken and target is not None else at + 1
    return tuple(found)


def _passes(code: Sequence[Instruction], place: Mapping[int, int], at: int) -> bool:
    """True if a conditional branch forward skips the code after it: a wait's repetition, or the longer of two ways."""
    target = place[code[at].target or 0]
    last = code[target - 1]
    if "PHASECHK" in code[at - 1].modifiers:
        return True
    joined = place.get(last.target or 0, 0) if jumps(last) and not conditional(last) else 0
    return joined > target and joined - target < target - at - 1


def turns(code: Sequence[Instruction]) -> list[Turn]:
    """The loops over K/V blocks, the shortest first, which has no masks. A loop that contains another such loop does not count."""
    loops = [loop for loop in Tracer(code).loops if conditional(code[loop.tail]) and _consumes(code[loop.head : loop.tail + 1])]
    inner = [loop for loop in loops if not any(each != loop and each.head in loop and each.tail in loop for each in loops)]
    found = []
    for loop in sorted(inner, key=lambda loop: loop.tail - loop.head):
        try:
            found.append(Turn(follow(code, loop)))
        except ValueError:  # a wait's repetition, which stands behind the kernel and comes back
            continue
    return found


def _consumes(code: Sequence[Instruction]) -> bool:
    return {"HGMMA", "MUFU", "WARPGROUP"} <= {each.opcode for each in code}


def steady(code: Code) -> Turn:
    """A kernel's turn without masks. ValueError where no loop has products of warpgroups, a wait for them, and exponentials."""
    found = turns(code.instructions)
    if not found:
        raise ValueError(f"{code.name} has no loop with HGMMA, MUFU and a wait for HGMMA")
    return found[0]


def role_registers(code: Sequence[Instruction]) -> tuple[int, int] | None:
    """Registers of a consumer's and of a producer's thread, as `setmaxnreg` moves them; None where it does not."""
    found = {each.modifiers[0]: int(each.operands[-1], 0) for each in code if each.opcode == "USETMAXREG"}
    return (found["TRY_ALLOC"], found["DEALLOC"]) if found else None


@dataclass(frozen=True)
class Figures:
    """The compared figures of a kernel, for one warp's turn: 64 rows of Q a warpgroup against one block of K and V.

    `registers`: of a thread at launch, of a consumer's, of a producer's. `stack`: bytes. `hidden`: exponentials while a product is
    in flight; `exposed`: clocks while none is; `counts`: besides HGMMA.
    """

    d: int
    causal: bool
    rows: int
    keys: int
    registers: tuple[int, ...]
    stack: int
    counts: Mapping[str, int]
    stalls: int
    exposed: int
    hidden: int
    tensor_clocks: float

    @property
    def tile(self) -> str:
        return f"{self.rows}x{self.keys}"

    @property
    def issued(self) -> int:
        return sum(self.counts.values())

    @property
    def per_key(self) -> float:
        return self.issued / self.keys

    @property
    def exposure(self) -> float:
        """Exposed clocks for each clock that the tensor cores need."""
        return self.exposed / self.tensor_clocks

    @property
    def roles(self) -> str:
        """Registers of a thread: at launch, and those of consumers and producer."""
        launched, *moved = self.registers
        return f"{launched}: {', '.join(map(str, moved))}" if moved else str(launched)

    def record(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {**vars(self), "issued": self.issued, "per_key": round(self.per_key, 3), "exposure": round(self.exposure, 3)}

    def lines(self) -> Iterator[str]:
        """The figures for a reader."""
        under = f"{self.hidden} of {self.counts['MUFU']} exponentials under a product"
        yield f"{self.tile}, registers {self.roles}, {self.stack} bytes of stack; {under}"
        yield (
            f"{self.issued} instructions besides HGMMA, {self.per_key:.2f} a key; {self.exposed} of {self.stalls} clocks exposed, "
            f"{self.exposure:.2f} a tensor clock"
        )
        yield ", ".join(f"{number} {name}" for name, number in self.counts.items() if number)


def figures(code: Code, causal: bool = False) -> Figures:
    """The figures of a kernel's turn without masks. Raises as `steady` does."""
    turn, roles = steady(code), role_registers(code.instructions)
    scores = sum(group.fmas for group in turn.groups if group.name == SCORES)
    return Figures(
        d=scores // (WARPGROUP_ROWS * turn.keys),
        causal=causal,
        rows=WARPGROUP_ROWS * (code.threads // WARPGROUP_THREADS - (roles is not None)),
        keys=turn.keys,
        registers=(code.resources["REG"], *(roles or ())),
        stack=code.resources["STACK"],
        counts=turn.counts,
        stalls=turn.stalls,
        exposed=turn.exposed,
        hidden=turn.hidden,
        tensor_clocks=turn.tensor_clocks,
    )


@dataclass(frozen=True)
class Pair:
    """Our kernel's subject, and FlashAttention-3's figures for it."""

    subject: Subject
    theirs: Figures

    @property
    def words(self) -> set[str]:
        """The words that choose it on the command line."""
        return {"fa3"} | self.subject.words

    def __str__(self) -> str:
        return f"fa3 {self.subject}"

    @cached_property
    def code(self) -> Code:
        """The kernel that cupyflash plans for the subject, compiled."""
        kernel = plan(self.subject.problem(), self.subject.device, "fa3").kernels()[-1]
        return read(kernel, self.subject.device)

    @cached_property
    def ours(self) -> Figures:
        return figures(self.code, self.subject.causal)

    @property
    def issue(self) -> float:
        """Our instructions a key over theirs."""
        return self.ours.per_key / self.theirs.per_key

    @property
    def exposure(self) -> float:
        """Our exposed clocks a tensor clock over theirs."""
        return self.ours.exposure / self.theirs.exposure


def pairs() -> Iterator[Pair]:
    """All pairs for which FlashAttention-3's figures are on file."""
    for facts in json.loads(PEERS.read_text())["kernels"]:
        theirs = Figures(**{**facts, "registers": tuple(facts["registers"])})
        yield Pair(Subject("forward", 90, theirs.d, theirs.causal), theirs)
