"""wgmma: the products of warpgroups, from their issue to their wait; instructions that all four warps must run, and setmaxnreg.

A warpgroup is four warps of a block, the first with a number that 4 divides. A product begins when all four have come to it.
It is computed as late as allowed, at the wait of one of its warps, from the contents of shared memory and A's registers then;
under a seed at a random moment before. Each warp's part of D is in its registers once that warp has waited. Products that add to
the same registers run in order, and those of one chain that are due together as one product along K.

The four warps of a warpgroup must all run wgmma.fence, .mma_async, .commit_group, .wait_group and setmaxnreg: PTX ISA, `.aligned`
of these asks that all threads of the warpgroup run the same instruction. The warps may come to it at any times, so an
instruction that one of them runs is kept until the other three have run one too; then they are compared. And between two
setmaxnreg the warps of a warpgroup must synchronise.

setmaxnreg sets the number of registers that a warp holds (PTX ISA, "Miscellaneous Instructions: setmaxnreg"). A block gets the
registers per thread of its directives (`Function.registers`), times its threads; but no more than the largest count that an .inc
of the kernel asks for, as ptxas 13.0 has it. A warp gives some back (.dec) or takes more (.inc), which waits until the block's
pool has them. Without such directives ptxas ignores the instruction.
"""

from __future__ import annotations

import numpy as np

from cupyflash.sim.ranges import members

from ..decode.matrices import decoder
from ..decode.registry import Arg, Multiply, MultiplyWait, RegisterCount
from ..memory.swizzles import DESCRIPTOR_UNIT, MODES, Descriptor
from ..state.findings import Stuck, source, source_and_call
from ..state.lane_sets import GROUP, WARP, LaneSet, by_value, merged
from ..state.segments import IN_FLIGHT, UNWRITTEN
from ..text.syntax import Array, PtxInstruction, Reg
from .products import (
    ROWS,
    THREADS,
    BoundProduct,
    MatrixOperand,
    MatrixOperands,
    PendingProduct,
    Sums,
    land,
    matrix,
    put_rows,
    rows_of,
)
from .register_followers import BITS, SLOTS, Flights
from .registers import RegisterFiles, WaveUnit

MODE_NUMBERS = np.array([MODES[Descriptor.of(bits << 62).mode] for bits in range(4)], np.uint8)
"""Swizzles as the record of tensor copies has them, by the descriptor's bits."""

EARLY = 0.06
"""Probability, between two steps of a seeded run, that a product is computed before its wait."""


class Warpgroups(WaveUnit):
    """The products of a wave."""

    def __init__(self, machine: RegisterFiles, flights: Flights, random: np.random.Generator | None):
        super().__init__(machine)
        self.flights = flights
        self.random = random
        self.per_block = self.wave.warps_per_block
        self.agreement = Agreement(machine)
        self.committed = np.zeros(self.wave.size // WARP, np.int64)
        # By first warp: the products that it, or a warp of its group, has yet to wait for, oldest first.
        self.flying: dict[int, list[PendingProduct]] = {}
        self.products: dict[int, PendingProduct] = {}
        self.waiting: dict[tuple[int, int], list[LaneSet]] = {}
        self.operands = MatrixOperands(machine)
        self._sums: dict[int, Sums] = {}
        # The newest product, and the number of changes of registers in flight at its issue.
        self.last: PendingProduct | None = None
        self.last_change = 0
        self._bound: dict[int, BoundProduct] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting)

    # -- fence and commit -----------------------------------------------------------------------------------------------------

    def fence(self, i: PtxInstruction, lanes: LaneSet) -> None:
        self.agreement.come(i, lanes)
        self.flights.fence(lanes.warp_ids)

    def commit(self, i: PtxInstruction, lanes: LaneSet) -> None:
        self.agreement.come(i, lanes)
        self.committed[lanes.warp_ids] += 1

    # -- meeting --------------------------------------------------------------------------------------------------------------

    def arrive(self, pc: int, control: Multiply, lanes: LaneSet) -> None:
        """Takes lanes to a wgmma.mma_async: it runs for the warpgroups that are all there."""
        first = self.agreement.whole(lanes)
        if first is not None:
            self.issue(pc, lanes, first)
            self.push(pc + 1, lanes)
            return
        complete: list[LaneSet] = []
        for number, some in lanes.split(lanes.warp - lanes.warp % self.per_block % GROUP):
            parts = self.waiting.setdefault((number, pc), [])
            parts.append(some)
            if sum(part.n for part in parts) == THREADS:
                complete += self.waiting.pop((number, pc))
        if complete:
            together = merged(complete)
            first = self.agreement.whole(together)
            assert first is not None
            self.issue(pc, together, first)
            self.push(pc + 1, together)

    def stuck(self) -> list[Stuck]:
        """Returns the warps of each warpgroup that wait at a product."""
        out = []
        for (number, pc), parts in self.waiting.items():
            here = sorted({int(w) % self.per_block for part in parts for w in part.warp_ids})
            first = number % self.per_block
            alive = self.wave.alive_by_warp[number : min(number + GROUP, (number // self.per_block + 1) * self.per_block)]
            gone = THREADS - int(alive.sum())
            what = (
                f"in wgmma for the rest of the warpgroup of warps {first} to {first + GROUP - 1}: only warps "
                f"{', '.join(map(str, here))} have come{f'; {gone} of its threads have exited or never existed' if gone else ''}"
            )
            out.append(Stuck(self.code.instructions[pc], merged(parts), what))
        return out

    # -- issue ----------------------------------------------------------------------------------------------------------------

    def bound(self, pc: int) -> BoundProduct:
        found = self._bound.get(pc)
        if found is None:
            code = self.code
            plan, i = code.plans[pc], code.instructions[pc]
            control = plan.control
            assert isinstance(control, Multiply)
            at = control.registers
            d, a = plan.reads[:at], plan.reads[at : at + 4] if control.a_in_registers else ()
            others = plan.reads[at + len(a) :]
            decode = decoder(control.types[0]), decoder(control.types[1])
            found = self._bound[pc] = BoundProduct(i, control, *self.places(d), *self.places(a), others, decode)
        return found

    def places(self, args: tuple[Arg, ...]) -> tuple[Array, Array]:
        names = [a.operand.name for a in args if isinstance(a.operand, Reg)]
        slots = self.code.slots
        return np.array([slots[name][1] for name in names], np.int64), self.flights.numbers(names)

    def issue(self, pc: int, lanes: LaneSet, first: Array) -> None:
        bound = self.bound(pc)
        self.agreement.come(bound.instruction, lanes)
        self.machine.flush()
        *descriptors, adds = (self.uniform(one, bound.instruction, lanes, len(first)) for one in bound.others)
        control, k_major = bound.control, bound.control.k_major
        b = self.operand(descriptors[-1], lanes, control.columns, k_major[1], bound)
        a = None if control.a_in_registers else self.operand(descriptors[0], lanes, ROWS, k_major[0], bound)
        operands = [one for one in (a, b) if one is not None]
        self.look(bound.instruction, lanes, operands)
        slots = self.chain(bound, lanes, first, adds)
        number = self.flights.issue(bound.instruction, lanes, bound.d_rows, bound.a_rows)
        count = len(first)
        product = PendingProduct(
            number,
            bound,
            lanes,
            first,
            (a, b),
            adds,
            self.sums(control.columns),
            slots,
            self.committed[first],
            np.zeros(count, bool),
            np.zeros((count, GROUP), bool),
        )
        if self.races is not None and self.races.tiles is not None:
            product.reading = self.races.tiles.issue(bound.instruction, first, operands)
        for one in first.tolist():
            self.flying.setdefault(one, []).append(product)
        self.products[number] = product
        product.sums.newest[slots] = number
        self.last, self.last_change = product, self.flights.changes

    def uniform(self, one: Arg, i: PtxInstruction, lanes: LaneSet, count: int) -> Array:
        """Returns an operand that all threads of a warpgroup must agree on: one value for each warpgroup."""
        value = self.machine.full.array(one)
        if not value.ndim:
            return np.full(count, value)
        found = value[lanes.slice or lanes.index].reshape(count, THREADS)
        differ = found != found[:, :1]
        if differ.any():
            at = int(np.flatnonzero(differ)[0])
            what = "scale-d" if found.dtype == bool else "descriptor"
            message = f"threads of a warpgroup differ in the {what} of wgmma"
            self.findings.report("disagreement", message, i, lanes, at, count=int(np.count_nonzero(differ)))
        return found[:, 0].copy()

    def operand(self, descriptors: Array, lanes: LaneSet, rows: int, k_major: bool, bound: BoundProduct) -> MatrixOperand:
        """Returns `rows` of M or N in shared memory, for each warpgroup."""
        shape = (rows, 2, True) if k_major else (bound.control.depth, rows // 8, False)
        found = self.operands.of(descriptors, lanes, shape, bound.instruction)
        if self.memory.swizzles.modes is not None:
            self.look_at_swizzles(found, bound.instruction, lanes)
        return found

    def look_at_swizzles(self, operand: MatrixOperand, i: PtxInstruction, lanes: LaneSet) -> None:
        """Reports tiles that tensor copies wrote in another swizzle than that of the descriptor."""
        memory, descriptors = self.memory, operand.descriptors
        modes = MODE_NUMBERS[(descriptors >> np.uint64(62)).astype(np.int64)]
        if memory.swizzles.pages_are(operand.pages, modes[:, None]):
            return
        units = operand.units()
        if memory.swizzles.all_are(units, modes[:, None, None]):
            return
        for bits, at in by_value(descriptors):
            rows, mode = units[at].reshape(-1), Descriptor.of(bits).mode
            if memory.races is not None and memory.races.tiles is not None:
                rows = rows[memory.races.tiles.of_tensor_copies(rows)]
            other = memory.swizzles.differing(rows, mode)
            if other is not None:
                message = f"wgmma's descriptor has swizzle {mode}; a tensor copy wrote the tile with swizzle {other}"
                count = THREADS * len(at)
                memory.findings.report("swizzle", message, i, lanes, int(at[0]) * THREADS, count=count)

    def look(self, i: PtxInstruction, lanes: LaneSet, operands: list[MatrixOperand]) -> None:
        """Counts the reads of a product; reports unwritten bytes and bytes in flight."""
        memory = self.memory
        counts = memory.tally.shared[i, "wgmma", DESCRIPTOR_UNIT]
        counts.requests += len(operands[0].blocks) * len(operands)
        for operand in operands:
            counts.bytes += operand.size * DESCRIPTOR_UNIT
            counts.wavefronts += operand.size // 8
            counts.ideal_wavefronts += operand.size // 8
            if memory.settled or memory.all_written(operand.pages):
                continue
            states = memory.states[8].reshape(-1, 2).take(operand.units().reshape(-1), 0)
            if states.any():
                flat = states.view(np.uint8).reshape(len(operand.blocks), -1)
                for state, kind, text in (
                    (UNWRITTEN, "uninitialised", "that nobody wrote"),
                    (IN_FLIGHT, "in flight", "whose asynchronous copy has not been waited for"),
                ):
                    bad = (flat == state).any(axis=1)
                    if bad.any():
                        at = int(np.flatnonzero(bad)[0]) * THREADS
                        memory.findings.report(kind, f"wgmma reads shared memory {text}", i, lanes, at, count=int(bad.sum()))
            memory.settle()

    def chain(self, bound: BoundProduct, lanes: LaneSet, first: Array, adds: Array) -> Array:
        """Returns the slots for a product's sums: those of the product before it, to go on with, or new ones set from registers."""
        before = self.last
        if (
            before is not None
            and before.lanes is lanes
            and self.last_change == self.flights.changes
            and not before.over.any()
            and before.bound.goes_on(bound)
            and np.array_equal(before.bound.d_rows, bound.d_rows)
        ):
            return before.slots
        warps, control = lanes.warp_ids, bound.control
        codes = self.flights.codes[bound.d_rows[:, None], warps]
        pending = codes >> BITS > self.flights.done[warps]
        slots = np.full(len(first), -1)
        if pending.any():
            waits = pending.reshape(-1, len(first), GROUP).any(axis=(0, 2))
            heads = codes[0, ::GROUP] >> BITS
            expected = np.repeat(heads, GROUP) * SLOTS + np.arange(len(codes))[:, None]
            whole = (codes == expected).reshape(-1, len(first), GROUP).all(axis=(0, 2)) & waits
            for number in np.unique(heads[whole]).tolist():
                other = self.products.get(number)
                if other is not None and other.bound.goes_on(bound):
                    mine = np.flatnonzero(whole & (heads == number))
                    slots[mine] = other.slots[np.searchsorted(other.first, first[mine])]
            rest = np.flatnonzero(waits & (slots < 0))
            if len(rest):
                self.begin_anew(bound, lanes, rest, (codes, pending))
        new = np.flatnonzero(slots < 0)
        if len(new):
            sums = self.sums(control.columns)
            slots[new] = sums.take(len(new))
            sums.pool[slots[new]] = 0
            added = new[adds[new]]
            if len(added):
                some = lanes if len(added) == len(first) else lanes.subset(members(added, THREADS))
                sums.pool[slots[added]] = matrix(rows_of(self.machine, bound.d_places, some), len(added), control)
        return slots

    def begin_anew(self, bound: BoundProduct, lanes: LaneSet, which: Array, found: tuple[Array, Array]) -> None:
        """Ends products on other registers for warpgroups that are to add to their sums, and begins anew."""
        some = lanes if which.size * THREADS == lanes.n else lanes.subset(members(which, THREADS))
        columns = members(which, GROUP)
        codes, pending = (each[:, columns] for each in found)
        self.mixed(bound, some, codes, pending)
        self.machine.deactivate()
        first = some.warp_ids[::GROUP]
        land(self.machine, self.of(first), lambda p: p.of(first))
        self.deliver(some, codes.max(initial=0) >> BITS, bound.d_rows, bound.d_places)

    def sums(self, columns: int) -> Sums:
        if columns not in self._sums:
            self._sums[columns] = Sums(columns)
        return self._sums[columns]

    def mixed(self, bound: BoundProduct, lanes: LaneSet, codes: Array, pending: Array) -> None:
        """Reports accumulators of products of another shape, or of other registers of them, that were not waited for."""
        for number in np.unique(codes[pending] >> BITS).tolist():
            other = self.products.get(number)
            same = codes == number * SLOTS + np.arange(len(codes))[:, None]
            if other is None or (other.bound.control.columns == bound.control.columns and same[codes >> BITS == number].all()):
                continue
            message = f"accumulates in registers of {source(other.bound.instruction)}, another shape, which has not been waited for"
            self.findings.report("in flight", message, bound.instruction, lanes)

    def of(self, first: Array) -> list[PendingProduct]:
        """Returns the products in flight of warpgroups with these first warps, oldest first."""
        found = {p.number: p for one in first.tolist() for p in self.flying.get(one, ())}
        return [found[number] for number in sorted(found)]

    # -- landing --------------------------------------------------------------------------------------------------------------

    def deliver(self, lanes: LaneSet, newest: int | Array, rows: Array, places: Array) -> None:
        """Writes the sums of products up to `newest` (of all, or of each warp) to those of these registers that wait for them."""
        warps = lanes.warp_ids
        codes, done = self.flights.codes[rows[:, None], warps], self.flights.done[warps]
        if (codes[:, 1:] == codes[:, :-1]).all() and (done == done[0]).all() and np.all(newest == np.ravel(newest)[0]):
            # It is the same for all warps: look at one.
            codes, done, newest = codes[:, :1], done[:1], np.ravel(newest)[:1]
        numbers = codes >> BITS
        due = (numbers > done) & (numbers <= newest)
        if not due.any():
            return
        file, start = self.machine.full.files[32], self.code.row_base[32]
        self.machine.rewritten(sum(1 << start + place for place in places.tolist()))
        for number in np.unique(numbers[due]).tolist():
            product = self.products[number]
            held = product.registers()
            mine = due & (numbers == number)
            some = np.flatnonzero(mine.any(axis=1))
            column = np.searchsorted(product.lanes.warp_ids, warps)
            if mine[some].all() and (codes[some] == codes[some, :1]).all():
                values = chosen(held, codes[some, 0] % SLOTS)
                if product.lanes is not lanes:
                    values = values.reshape(len(some), -1, WARP)[:, column].reshape(len(some), -1)
                put_rows(self.machine, places[some], lanes, values)
                continue
            of = np.flatnonzero(mine.any(axis=0))
            block = codes[some[:, None], of]
            if mine[some[:, None], of].all() and (block == block[:, :1]).all():
                # All of some warps: they arrive with other warps than those with which the product began.
                values, part = chosen(held, block[:, 0] % SLOTS), product.lanes
                if len(of) < part.warps:
                    part = lanes.where(np.isin(lanes.warp, warps[of]))
                    values = values.reshape(len(some), -1, WARP)[:, column[of]].reshape(len(some), -1)
                put_rows(self.machine, places[some], part, values)
                continue
            for row in some.tolist():
                at = np.flatnonzero(mine[row])
                to = members(warps[at], WARP)
                there = members(column[at], WARP)
                file[places[row], to] = held[np.repeat(codes[row, at] % SLOTS, WARP), there]

    # -- waits ----------------------------------------------------------------------------------------------------------------

    def wait(self, pc: int, control: MultiplyWait, lanes: LaneSet) -> None:
        """Waits until at most `newest` of each warp's newest groups are pending."""
        self.agreement.come(self.code.instructions[pc], lanes)
        over = self.finished(lanes, self.committed[lanes.warp_ids] - control.newest)
        if over:
            self.machine.deactivate()
            land(self.machine, [self.products[number] for number in over], lambda p: np.asarray(over[p.number].any(axis=1)))
            names = self.flights.facts.waits[pc]
            slots = self.code.slots
            places = np.array([slots[name][1] for name in names], np.int64)
            wide = np.array([slots[name][0] == 32 for name in names], bool)
            newest = np.zeros_like(self.committed)
            for number in sorted(over):
                newest[(self.products[number].first[:, None] + np.arange(GROUP))[over[number]]] = number
            self.deliver(lanes, newest[lanes.warp_ids], self.flights.numbers(names)[wide], places[wide])
            self.close(over)
        self.push(pc + 1, lanes)

    def finished(self, lanes: LaneSet, limit: Array) -> dict[int, Array]:
        """Returns for each product a mask of its warps that have now waited for it: those whose group is below the warp's limit."""
        found: dict[int, Array] = {}
        limits = np.zeros_like(self.committed)
        limits[lanes.warp_ids] = limit
        for product in self.of(np.unique(lanes.warp_ids - lanes.warp_ids % self.per_block % GROUP)):
            now = (product.group[:, None] < limits[product.first[:, None] + np.arange(GROUP)]) & ~product.over
            if now.any():
                found[product.number] = now
        return found

    def close(self, over: dict[int, Array]) -> None:
        """Records that these warps have waited: for the race detector at this moment."""
        races, done = self.races, self.flights.done
        for number, now in over.items():
            product = self.products[number]
            product.over |= now
            warps = (product.first[:, None] + np.arange(GROUP))[now]
            done[warps] = np.maximum(done[warps], number)
            if product.reading is not None and races is not None and races.tiles is not None:
                races.tiles.wait(product.reading, now)
            if product.over.all():
                self.forget(product)
        if races is not None:
            races.now += 1

    def forget(self, product: PendingProduct) -> None:
        del self.products[product.number]
        product.sums.newest[product.slots[product.sums.newest[product.slots] == product.number]] = 0
        for one in product.first.tolist():
            self.flying[one].remove(product)
            if not self.flying[one]:
                del self.flying[one]

    def stir(self) -> None:
        """Computes some products early, which then reach their registers: seeded runs call this between stretches."""
        assert self.random is not None
        if self.random.random() > EARLY:
            return
        chosen = self.products[list(self.products)[int(self.random.integers(len(self.products)))]]
        self.machine.deactivate()
        land(self.machine, [p for p in self.of(chosen.first) if p.number <= chosen.number], lambda p: p.of(chosen.first))
        if self.random.random() < 0.5:
            # Only registers that these products write last: the newest one of a chain writes.
            self.deliver(chosen.lanes, chosen.number, chosen.bound.d_rows, chosen.bound.d_places)

    def leave(self) -> None:
        """Ends threads: no warp will see the products in flight of warps that are gone."""
        if self.agreement.ahead:
            self.agreement.leave()
        if not self.products:
            return
        gone = self.wave.alive_by_warp == 0
        for product in list(self.products.values()):
            if (gone[product.first[:, None] + np.arange(GROUP)] | product.over).all():
                self.forget(product)


def chosen(held: Array, rows: Array) -> Array:
    """Returns some rows, without a copy if they are all."""
    return held if len(rows) == len(held) and (rows == np.arange(len(rows))).all() else held[rows]


# -- rules for whole warpgroups ------------------------------------------------------------------------------------------


class Agreement(WaveUnit):
    """Warpgroups of a wave, by first warp: `ahead`, instructions of each warp that not all have run; `broken`, disagreements."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine)
        self.per_block = self.wave.warps_per_block
        self.ahead: dict[int, list[list[PtxInstruction]]] = {}
        self.broken: set[int] = set()
        self.resized: dict[int, list[tuple[int, PtxInstruction]]] = {}
        """The setmaxnreg that each warp has run so far, and when."""
        self._whole: dict[LaneSet, Array | None] = {}

    def whole(self, lanes: LaneSet) -> Array | None:
        """Returns the first warps of the warpgroups that these lanes are, if they are whole ones."""
        if lanes not in self._whole:
            found = None
            if lanes.whole_warps and lanes.warps % GROUP == 0:
                warps = lanes.warp_ids.reshape(-1, GROUP)
                if (self.first_of(warps) == warps[:, :1]).all() and (warps - warps[:, :1] == np.arange(GROUP)).all():
                    found = warps[:, 0].copy()
            self._whole[lanes] = found
        return self._whole[lanes]

    def first_of(self, warps: Array) -> Array:
        """Returns the first warps of the warpgroups that these warps belong to."""
        return warps - warps % self.per_block % GROUP

    def size(self, first: int) -> int:
        """Returns the number of warps of a warpgroup: the last one of a block may have less than four."""
        return min(GROUP, self.per_block - first % self.per_block)

    # -- the same instructions ------------------------------------------------------------------------------------------------

    def come(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Records that lanes run such an instruction."""
        if not self.ahead and self.whole(lanes) is not None:
            return
        if not lanes.converged:
            self.partial(i, lanes)
            return
        warps = lanes.warp_ids
        for warp, first in zip(warps.tolist(), self.first_of(warps).tolist(), strict=True):
            if first not in self.broken:
                self.ahead.setdefault(first, [[] for _ in range(self.size(first))])[warp - first].append(i)
        for first in np.unique(self.first_of(warps)).tolist():
            if first in self.ahead:
                self.compare(first)

    def compare(self, first: int) -> None:
        """Drops instructions that all warps have run; reports the first in which they differ."""
        logs, alive = self.ahead[first], self.wave.alive_by_warp
        while any(logs) and all(log or not alive[first + k] for k, log in enumerate(logs)):
            # None: exited, without having run what another warp has.
            heads = [log[0] if log else None for log in logs]
            if any(head is not heads[0] for head in heads):
                self.report(first, heads)
                self.broken.add(first)
                break
            for log in logs:
                del log[0]
        if first in self.broken or not any(logs):
            del self.ahead[first]

    def report(self, first: int, heads: list[PtxInstruction | None]) -> None:
        """Reports a disagreement at the instruction that is first in the text: a warp that runs a later one has left it out."""
        i = next(one for one in self.code.instructions if any(one is head for head in heads))
        here = [k for k, head in enumerate(heads) if head is i]
        other, instead = next((k, head) for k, head in enumerate(heads) if head is not i)
        start = first % self.per_block
        does = "has exited" if instead is None else f"runs {name(instead)} at {source_and_call(instead)} instead"
        message = (
            f"{name(i)} must be run by all warps of a warpgroup: of warps {start} to {start + len(heads) - 1} "
            f"warp {start + other} {does}"
        )
        lanes = self.wave.lanes(np.arange((first + here[0]) * WARP, (first + here[0] + 1) * WARP))
        self.findings.report("disagreement", message, i, lanes, 0, count=WARP * len(here))

    def partial(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Reports an instruction whose predicate holds for some threads of a warp only."""
        few = np.flatnonzero(np.bincount(lanes.warp)[lanes.warp] < self.wave.alive_by_warp[lanes.warp])
        message = f"{name(i)} must be run by all threads of a warpgroup, but its predicate holds for some threads of a warp only"
        self.findings.report("disagreement", message, i, lanes, few)

    def leave(self) -> None:
        """Ends threads: they will never run what they have not run."""
        for first in list(self.ahead):
            self.compare(first)

    # -- two setmaxnreg -------------------------------------------------------------------------------------------------------

    def resize(self, i: PtxInstruction, lanes: LaneSet) -> None:
        """Checks that warps run a second setmaxnreg only behind the first one of all warps of their warpgroup."""
        self.come(i, lanes)
        races = self.races
        if races is None:
            return
        for warp in lanes.warp_ids.tolist():
            before = self.resized.get(warp)
            if before:
                self.look(i, lanes.where(lanes.warp == warp), warp, before[-1][1], len(before) - 1)
        for warp in lanes.warp_ids.tolist():
            self.resized.setdefault(warp, []).append((races.now, i))
        races.now += 1

    def look(self, i: PtxInstruction, lanes: LaneSet, warp: int, previous: PtxInstruction, last: int) -> None:
        """Reports a warp of the warpgroup that may not have run its setmaxnreg number `last`, before these lanes' next one."""
        races = self.races
        assert races is not None
        known = races.heard.knows(races.groups(lanes))[0].reshape(-1, WARP).max(axis=1)
        first = int(self.first_of(np.array([warp]))[0])
        for other in range(first, first + self.size(first)):
            ran = self.resized.get(other, [])
            behind = last < len(ran) and known[other % len(known)] >= ran[last][0]
            if behind or other == warp or not self.wave.alive_by_warp[other]:
                continue
            message = (
                f"{name(i)} while warp {other % self.per_block} of the warpgroup may not have run the one at "
                f"{source_and_call(previous)}: its warps must synchronise between the two"
            )
            self.findings.report("register budget", message, i, lanes)
            return


def name(i: PtxInstruction) -> str:
    """Returns the name of the instruction: wgmma.fence and the like."""
    return f"{i.opcode}.{i.mods[0]}"


class RegisterPools(WaveUnit):
    """The pools of a wave's blocks. `held`: registers per thread of each warp; `free`: registers of each block."""

    def __init__(self, machine: RegisterFiles, agreement: Agreement):
        super().__init__(machine)
        self.agreement = agreement
        self.launch = self.code.registers
        counts = [p.control.count for p in self.code.plans if isinstance(p.control, RegisterCount) and p.control.more]
        if self.launch is not None and counts:
            self.launch = min(self.launch, max(counts))
        self.per_block = self.wave.warps_per_block
        self.held = np.full(self.wave.size // WARP, self.launch or 0, np.int64)
        self.free = np.zeros(self.wave.blocks, np.int64)
        self.waiting: list[tuple[int, LaneSet]] = []

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def arrive(self, pc: int, control: RegisterCount, lanes: LaneSet) -> None:
        """Takes whole warps that come to a setmaxnreg."""
        self.agreement.resize(self.code.instructions[pc], lanes)
        if self.launch is None:
            self.push(pc + 1, lanes)
            return
        self.waiting += [(pc, part) for _, part in lanes.split(lanes.warp)]
        # Warps that give registers back go first; then the waiting ones, as long as one of them can go on.
        moved = True
        while moved:
            moved = False
            for one in list(self.waiting):
                moved |= self.settle(one)

    def settle(self, one: tuple[int, LaneSet]) -> bool:
        """Runs a warp's setmaxnreg; returns False if the warp must wait."""
        pc, lanes = one
        control = self.code.plans[pc].control
        assert isinstance(control, RegisterCount)
        warp = int(lanes.warp_ids[0])
        block, held = warp // self.per_block, int(self.held[warp])
        more = (control.count - held) * WARP
        if control.more != (more >= 0) and more:
            message = f"setmaxnreg.{'inc' if control.more else 'dec'} to {control.count} registers in a warp that has {held}"
            self.findings.report("register budget", message, self.code.instructions[pc], lanes)
        elif more > self.free[block]:
            return False
        self.free[block] -= more
        self.held[warp] = control.count
        self.waiting.remove(one)
        self.push(pc + 1, lanes)
        return True

    def stuck(self) -> list[Stuck]:
        out = []
        for pc, lanes in self.waiting:
            control = self.code.plans[pc].control
            assert isinstance(control, RegisterCount)
            block = int(lanes.block[0])
            held = self.held[block * self.per_block : (block + 1) * self.per_block]
            pool = (self.launch or 0) * WARP * self.per_block
            shares = ", ".join(f"{np.count_nonzero(held == count)} of {count}" for count in np.unique(held).tolist())
            what = (
                f"for {control.count} registers a thread: of the block's {pool} registers {int(self.free[block])} are free; "
                f"its warps hold, a thread: {shares}"
            )
            out.append(Stuck(self.code.instructions[pc], lanes, what))
        return out
