"""The tile of FlashAttention-3's kernel: which sizes a Hopper runs, which of them a problem gets, and why a problem gets none.

Everything here is a pure function of the problem and the device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np

from cupyflash.device import Device
from cupyflash.expressions.tree import Apply, walk
from cupyflash.multiprocessor import EXPONENTIALS, PARTITIONS, WARP, Multiprocessor, tensor_rate
from cupyflash.request.options import OPTIONS, refused
from cupyflash.request.problem import USUAL_HEAD_DIM, Problem
from cupyflash.schedules.balance import MOST_PIECES, Pieces, busiest
from cupyflash.schedules.base import GRANULE, padded_dim
from cupyflash.schedules.moves import functions
from cupyflash.schedules.score_cost import of_score, reads_scores
from cupyflash.tiling import DoesNotFit, TileSize

COMPUTE_CAPABILITY = (9, 0)
WARPGROUP = 128
WARPGROUP_ROWS = 64
"""Rows of a warpgroup's product (wgmma m64nNk16)."""
MOST_COLS = 256
"""Columns of one product."""
WIDEST = 128
"""Columns of a block, unless a tiling asks for more: up to it O has room of its own at d 128, so that the next Q comes while O
leaves, and little of a last block is beyond the keys, or under a causal mask beyond the diagonal. By the clock wider ones are 2 %
faster a key, and 2,700 clocks slower a row block (docs/performance.md)."""
MOST_DIM_IN_TURNS = 128
"""A number of columns of V: beyond it warpgroups issue their products when they can, since the tensor cores bind by far."""
REGISTERS, REGISTER_UNIT = 65536, 8
"""Registers of a multiprocessor; the unit in which a thread's are allocated."""
SLAB = 64
"""Columns of a half type in a row of 128 bytes, within which the 128-byte swizzle exchanges 16-byte pieces."""
SLAB_BYTES = SWIZZLE = 128
STACKED = {"sin", "cos"}
"""The functions in a score that, for large numbers, are computed with an array in local memory."""
HEADS_OF_A_LANE = 8
"""Heads that rows of a block may have in turn beside a score function, so that a lane's rows, eight apart, are of one head."""
STAGES = (4, 3, 2)
"""Slots of the rings: as many as fit."""
BARRIER_BYTES = 8
WORD = 4
WORK_BYTES = 8
"""Bytes for the number of the row block that the producer hands on."""
ALIGNMENT = 16
"""Bytes that TMA wants to divide every row's address."""
ISSUED = 2.75, 70
"""Instructions of a warp's turn besides its products: for each column, and for all of them (machine code of d 64, 128 and 256)."""
DROPPED = 16
"""Instructions of a lane for whether a weight is dropped: half of what a call of Philox gives is for rows that another warp has."""
WORK_LATENCY = 2000
"""Clocks from a row block's start to its first products and from its last to its end."""
IN_STEP = 1.1
"""A turn's clocks over those of its busiest unit: warpgroups wait for one another."""


@dataclass(frozen=True)
class Team:
    """The consumer warpgroups of a thread block.

    `registers`: of a consumer's and of a producer's thread, after `setmaxnreg`. Together they are those that the block has at
    launch: a multiprocessor's 65,536 over its threads, rounded down to multiples of eight. The second pair is for a producer that
    keeps more than a causal mask's bounds: a window, key lengths, packed sequences; the third for one that looks for the blocks
    that masks leave. `accumulators`: of a thread, for O, S and P, and `block_cols`: Bc, up to which `.ci/compile_gate.py` sees
    neither spills nor serialised products, with none to four kinds of values kept through the loops (`kept`). `least_accumulators`:
    the same with a mask, a bias or dropout, by the number of these and of kinds together, one to four, up to d_v 128 and above.
    """

    consumers: int
    registers: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    accumulators: tuple[int, int, int, int, int]
    block_cols: tuple[int, int, int, int, int]
    least_accumulators: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]

    @property
    def block_rows(self) -> int:
        """Br."""
        return WARPGROUP_ROWS * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def launch_registers(self) -> int:
        """Registers of every thread at launch, before the roles are known."""
        return REGISTERS // self.threads // REGISTER_UNIT * REGISTER_UNIT


TEAMS = (
    Team(
        3,
        registers=((160, 32), (160, 32), (152, 56)),
        accumulators=(128, 104, 88, 80, 72),
        block_cols=(256, 96, 80, 64, 48),
        least_accumulators=((104, 92, 92, 80), (0, 0, 0, 0)),
    ),
    Team(
        2,
        registers=((240, 24), (232, 40), (232, 40)),
        accumulators=(200, 176, 160, 160, 136),
        block_cols=(256, 128, 112, 96, 80),
        least_accumulators=((164, 160, 148, 140), (160, 152, 148, 140)),
    ),
)


@dataclass(frozen=True)
class Fa3Config:
    """One configuration of the kernel."""

    team: Team
    block_cols: int
    stages: int
    ping_pong: bool
    registers: tuple[int, int]
    o_apart: bool

    @property
    def q_parts(self) -> int:
        """The number of parts in which Q is loaded: if warpgroups take turns, each one's rows separately."""
        return self.team.consumers if self.ping_pong else 1

    @property
    def roles(self) -> dict[str, dict[str, int]]:
        """Threads, and registers of each thread, by role."""
        consumer, producer = self.registers
        return {
            "producer": {"threads": WARPGROUP, "registers": producer},
            "consumers": {"threads": WARPGROUP * self.team.consumers, "registers": consumer},
        }

    def __str__(self) -> str:
        order = "in turns" if self.ping_pong else "each when it can"
        return f"a producer and {self.team.consumers} consumer warpgroups, {order}, {self.stages} stages"


@dataclass(frozen=True)
class Fa3Candidate:
    """A configuration with its needs, and the reason why it was rejected or the length of its turn by the model.

    `rooms`: bytes of shared memory by contents. `registers`: of a consumer's thread, for O, S and P, of `most_registers` that are
    free for them. `parts`: clocks that a turn of the whole block takes of a multiprocessor's tensor cores, exponential units and so
    on.
    """

    config: Fa3Config
    rooms: tuple[tuple[str, int], ...]
    registers: int
    most_registers: int
    rejected: str | None = None
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def shared_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.rooms)

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: part[1])[0]

    @property
    def turn(self) -> float:
        """Clocks of a turn."""
        return IN_STEP * max(clocks for _, clocks in self.parts)

    @property
    def rate(self) -> float:
        """Scores a clock of a multiprocessor that runs such turns."""
        return self.config.team.block_rows * self.config.block_cols / self.turn


def refusal(problem: Problem, device: Device) -> str | None:
    """The reason why the kernel does not run a problem with any tile, in one sentence; None if it does."""
    p, asked = problem, problem.options
    if device.compute_capability != COMPUTE_CAPABILITY:
        return f"warpgroup products are compute capability 9.0's, and {device.name} has " + "{}.{}".format(
            *device.compute_capability
        )
    if p.itemsize != 2:
        return f"warpgroup products are of half types, and this is {p.dtype}"
    if (widest := max(p.head_dim, p.head_dim_v)) > USUAL_HEAD_DIM:
        return f"the kernel takes d and d_v up to {USUAL_HEAD_DIM}, and this has {widest}"
    if lacking := refused(asked, "fa3"):
        return f"the kernel has no place for {OPTIONS[lacking].words}"
    for form in functions(p):
        if stacked := sorted(STACKED & {node.operation for node in walk(form.tree) if isinstance(node, Apply)}):
            return f"the kernel has no stack, and the {form.kind} function's {stacked[0]} takes one"
    if p.softmax_scale <= 0:
        return f"the kernel's scale is positive, and this is {p.softmax_scale}"
    if not (p.seqlen_q and p.seqlen_k and p.head_count):
        return "TMA copies from tensors with elements, and one here has none"
    if p.alignment < ALIGNMENT:
        return f"TMA takes rows at multiples of {ALIGNMENT} bytes, and here they are at multiples of {p.alignment}"
    return None


def slab_bytes(columns: int) -> int:
    """Bytes of a row of `columns` elements in shared memory."""
    return -(-columns // SLAB) * SLAB_BYTES


def rooms(problem: Problem, config: Fa3Config) -> dict[str, int]:
    """Bytes of shared memory by contents: Q, through which O is stored if it has no room of its own, the two rings, and the
    barriers with the values that they pass on: with a mask also the next block, beside each K block and part of Q."""
    k, v = slab_bytes(problem.head_dim), slab_bytes(problem.head_dim_v)
    passed = WORD * (config.q_parts + config.stages) if problem.options.masked else 0
    return {
        "Q": config.team.block_rows * (k if config.o_apart else max(k, v)),
        **({"O": config.team.block_rows * v} if config.o_apart else {}),
        "K": config.stages * config.block_cols * k,
        "V": config.stages * config.block_cols * v,
        "barriers": BARRIER_BYTES * (3 + 2 * config.q_parts + 4 * config.stages) + WORK_BYTES + passed,
    }


def accumulators(problem: Problem, block_cols: int) -> int:
    """Registers of a thread for O, S and P."""
    return padded_dim(problem.head_dim_v) // 2 + block_cols // 2 + block_cols // 4


def packed_heads(problem: Problem, block_rows: int) -> int:
    """Query heads whose rows share blocks of `block_rows` rows: those that share K and V, as far as the kernel can, if this makes
    fewer blocks, that is, if queries are few. With masks, a bias or dropout, which a head has of its own, blocks are not shared."""
    p = problem
    if own_of_scores(p):
        return 1
    pack = math.gcd(p.group, WARPGROUP_ROWS if not p.options.transformed else HEADS_OF_A_LANE)
    apart, together = pack * -(-p.seqlen_q // block_rows), -(-pack * p.seqlen_q // block_rows)
    return pack if together < apart and not p.options.packed and block_rows % pack == 0 else 1


def kept(problem: Problem) -> int:
    """The number of kinds of values that are kept through the loops, beside a causal mask's bounds: a window's, a packed
    sequence's, a score function's. If that function reads an element for each score, its addresses count as three."""
    asked = problem.options
    scored = 3 if reads_scores(problem) else int(asked.score is not None)
    return min(4, (asked.window is not None) + asked.packed + scored)


def own_of_scores(problem: Problem) -> int:
    """The number of things that each score or weight has beside a score function: a mask, a bias, dropout. A bias beside dropout
    counts as two."""
    bias, dropout = problem.options.bias, problem.options.dropout
    return problem.options.masked + bias + dropout + (bias and dropout)


def held_at_most(problem: Problem, team: Team) -> tuple[int, int]:
    """Registers of a thread for O, S and P, and columns of S, up to which nothing spills."""
    kinds, own = kept(problem), own_of_scores(problem)
    most = team.accumulators[kinds]
    if own:
        most = min(most, team.least_accumulators[problem.head_dim_v > MOST_DIM_IN_TURNS][min(kinds + own, 4) - 1])
    return most, team.block_cols[kinds] if kinds or not own else team.block_cols[1]


def candidate(problem: Problem, device: Device, team: Team, block_cols: int) -> Fa3Candidate:
    """A configuration, with O's own room and as many slots as fit beside it, else without; its needs, its rejection or clocks."""
    more = kept(problem) or problem.options.padded or own_of_scores(problem)
    turns, registers = problem.head_dim_v <= MOST_DIM_IN_TURNS, team.registers[2 if problem.options.masked else bool(more)]
    held, (most, widest) = accumulators(problem, block_cols), held_at_most(problem, team)
    configs = [Fa3Config(team, block_cols, stages, turns, registers, apart) for apart in (True, False) for stages in STAGES]
    needs = [Fa3Candidate(config, tuple(rooms(problem, config).items()), held, most) for config in configs]
    each = next((each for each in needs if each.shared_bytes <= device.sram_per_block), needs[-1])
    if held > most:
        return replace(each, rejected=f"registers: O, S and P take {held} of {most}")
    if block_cols > widest:
        return replace(each, rejected=f"registers: beside what else is kept, S has up to {widest} columns")
    if each.shared_bytes > device.sram_per_block:
        return replace(each, rejected=f"shared memory: {each.shared_bytes:,} of {device.sram_per_block:,} bytes")
    return replace(each, parts=tuple(part_clocks(problem, device, each.config).items()))


def candidates(problem: Problem, device: Device, blocks: tuple[int, int] | None = None) -> tuple[Fa3Candidate, ...]:
    """The configurations in the order in which they are tried: three warpgroups if O is narrow, then two, of each the widest blocks
    first. `blocks` fixes (Br, Bc).

    ValueError for blocks that the kernel does not run.
    """
    if blocks is not None:
        team = next((team for team in TEAMS if team.block_rows == blocks[0]), None)
        if team is None or blocks[1] % GRANULE or blocks[1] > MOST_COLS:
            rows = " or ".join(str(team.block_rows) for team in reversed(TEAMS))
            runs = f"blocks of {rows} rows and a multiple of {GRANULE} up to {MOST_COLS} columns"
            raise ValueError(f"the fa3 kernel runs {runs}; the tiling asks for Br {blocks[0]} x Bc {blocks[1]}")
        return (candidate(problem, device, team, blocks[1]),)
    teams = TEAMS if max(problem.head_dim, problem.head_dim_v) <= SLAB else TEAMS[1:]
    tried = itertools.product(teams, range(WIDEST, 0, -GRANULE))
    return tuple(candidate(problem, device, team, cols) for team, cols in tried)


def choose(problem: Problem, device: Device, blocks: tuple[int, int] | None = None) -> Fa3Candidate:
    """The first configuration that registers and shared memory hold.

    ValueError if `refusal` has a reason or the kernel does not run `blocks`, `DoesNotFit` if nothing fits.
    """
    reason = refusal(problem, device)
    if reason:
        raise ValueError(f"fa3 does not run this: {reason}")
    found = candidates(problem, device, blocks)
    able = next((each for each in found if not each.rejected), None)
    if able is not None:
        return able
    least = min(found, key=lambda each: each.shared_bytes)
    raise DoesNotFit(
        f"fa3 at head_dim {problem.head_dim} does not fit {device.name} with blocks of {least.config.team.block_rows} x "
        f"{least.config.block_cols}{'' if blocks else ', the smallest'}: {least.rejected}"
    )


def fit(problem: Problem, device: Device) -> TileSize:
    """The chosen configuration's block sizes, with the reason. Raises as `choose` does."""
    best = choose(problem, device)
    reason = f"the widest that fits; {best.config}; {best.shared_bytes:,} of {device.sram_per_block:,} bytes; bound by {best.bound}"
    return TileSize(best.config.team.block_rows, best.config.block_cols, reason)


def fma_rate(problem: Problem, device: Device) -> float:
    """FMAs of the two products in a clock of one multiprocessor, by warpgroup products."""
    return tensor_rate(device, problem.dtype) or 2048.0


def part_clocks(problem: Problem, device: Device, config: Fa3Config) -> dict[str, float]:
    """Clocks of one multiprocessor for one turn of a whole block (Br x Bc, both products), by unit."""
    sm = Multiprocessor.like(device.compute_capability)
    rows, cols = config.team.block_rows, config.block_cols
    each, all_ = ISSUED
    own, special = of_score(problem)
    own += DROPPED * problem.options.dropout
    return {
        "tensor": rows * cols * (padded_dim(problem.head_dim) + padded_dim(problem.head_dim_v)) / fma_rate(problem, device),
        "exp": rows * cols * (1 + special) / EXPONENTIALS,
        "float32": rows * cols * 2 / sm.fma_lanes,
        "issue": (rows // GRANULE * (each * cols + all_) + rows * cols / WARP * own) / PARTITIONS,
    }


def clocks(problem: Problem, device: Device, best: Fa3Candidate) -> float:
    """The clocks that the model gives the problem."""
    p, block_cols = problem, best.config.block_cols
    pack = packed_heads(p, best.config.team.block_rows)
    block_rows = best.config.team.block_rows // pack  # queries
    row_blocks, heads = -(-p.seqlen_q // block_rows), p.head_count // pack
    some = min(row_blocks, MOST_PIECES)  # of many row blocks a sample, which has their lengths but for a column block or two
    starts = np.arange(some) * row_blocks // max(some, 1) * block_rows
    first, _ = p.keys_seen(starts, p.seqlen_k)
    _, end = p.keys_seen(np.minimum(starts + block_rows, p.seqlen_q) - 1, p.seqlen_k)
    turns = np.sort(np.maximum(0, -(-end // block_cols) - first // block_cols))[::-1]
    work = row_blocks * heads
    return spread(best, device, Pieces(work, lambda pieces: turns[pieces // heads * some // row_blocks], work))


def spread(best: Fa3Candidate, device: Device, turns: Pieces) -> float:
    """Clocks of the busiest multiprocessor, for row blocks of these numbers of turns in the order in which multiprocessors take
    them."""
    return busiest(turns._replace(lengths=lambda pieces: turns.lengths(pieces) * best.turn + WORK_LATENCY), device.sm_count)
