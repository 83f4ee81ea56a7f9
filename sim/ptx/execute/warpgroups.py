"""wgmma: the products of warpgroups, from their issue to their wait.

A warpgroup is four warps of a block, the first with a number that 4 divides. A product begins when all four have come to it.
It is computed as late as allowed, at the wait of one of its warps, from what shared memory and A's registers hold then; under
a seed at a random moment before. Each warp's part of D is in its registers once that warp has waited. Products that add to the same
registers run in order, and those of one chain that are due together as one product along K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..decode.ops.tensor import decoder
from ..decode.registry import Arg, Multiply, MultiplyWait
from ..memory.descriptors import UNIT, Descriptor
from ..memory.swizzles import MODES
from ..report.findings import Stuck, source
from ..state.lanes import WARP, Lanes
from ..state.segments import IN_FLIGHT, UNWRITTEN
from ..text.syntax import Instruction, Reg
from ..text.types import Array
from .agreement import Agreement
from .flights import SLOTS, Flights
from .host import Host
from .products import GROUP, ROWS, THREADS, Bound, Product, compute, joins, matrix, rows_of

REMEMBERED = 512
"""Tiles whose units are kept."""

MODE_NUMBERS = np.array([MODES[Descriptor.of(bits << 62).mode] for bits in range(4)], np.uint8)
"""Swizzles as the record of tensor copies has them, by the descriptor's bits."""

EARLY = 0.06
"""How often, between two steps of a seeded run, a product is computed before its wait."""


class Warpgroups:
    """The products of a wave."""

    def __init__(self, machine: Host, flights: Flights, random: np.random.Generator | None):
        self.machine = machine
        self.flights = flights
        self.random = random
        self.per_block = machine.wave.warps_per_block
        self.agreement = Agreement(machine)
        self.committed = np.zeros(machine.wave.size // WARP, np.int64)
        # By first warp: the products that it, or a warp of its group, has yet to wait for, oldest first.
        self.flying: dict[int, list[Product]] = {}
        self.products: dict[int, Product] = {}
        self.waiting: dict[tuple[int, int], list[Lanes]] = {}
        self._units: dict[tuple[Any, ...], Array] = {}
        self._tiles: dict[tuple[int, tuple[int, int, bool]], Array] = {}
        self._bound: dict[int, Bound] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting)

    # -- simple ones ----------------------------------------------------------------------------------------------------------

    def fence(self, i: Instruction, lanes: Lanes) -> None:
        self.agreement.come(i, lanes)
        self.flights.fence(lanes.warp_ids)

    def commit(self, i: Instruction, lanes: Lanes) -> None:
        self.agreement.come(i, lanes)
        self.committed[lanes.warp_ids] += 1

    # -- meeting --------------------------------------------------------------------------------------------------------------

    def arrive(self, pc: int, lanes: Lanes) -> None:
        """Lanes come to a wgmma.mma_async: it runs for the warpgroups that are all there."""
        first = self.agreement.whole(lanes)
        if first is not None:
            self.issue(pc, lanes, first)
            self.machine.push(pc + 1, lanes)
            return
        wave, complete = self.machine.wave, []
        numbers = lanes.warp - lanes.warp % self.per_block % GROUP
        for number in np.unique(numbers).tolist():
            parts = self.waiting.setdefault((number, pc), [])
            parts.append(lanes.subset(np.flatnonzero(numbers == number)))
            if sum(part.n for part in parts) == THREADS:
                complete.append(np.concatenate([part.index for part in self.waiting.pop((number, pc))]))
        if complete:
            together = wave.lanes(np.sort(np.concatenate(complete)))
            first = self.agreement.whole(together)
            assert first is not None
            self.issue(pc, together, first)
            self.machine.push(pc + 1, together)

    def stuck(self) -> list[Stuck]:
        """Which warps of a warpgroup wait at which product."""
        machine, out = self.machine, []
        for (number, pc), parts in self.waiting.items():
            here = sorted({int(w) % self.per_block for part in parts for w in part.warp_ids})
            first = number % self.per_block
            alive = machine.wave.alive_by_warp[number : min(number + GROUP, (number // self.per_block + 1) * self.per_block)]
            gone = THREADS - int(alive.sum())
            what = (
                f"in wgmma for the rest of the warpgroup of warps {first} to {first + GROUP - 1}: only warps "
                f"{', '.join(map(str, here))} have come{f'; {gone} of its threads have exited or never existed' if gone else ''}"
            )
            together = machine.wave.lanes(np.sort(np.concatenate([part.index for part in parts])))
            out.append(Stuck(machine.code.instructions[pc], together, what))
        return out

    # -- issue ----------------------------------------------------------------------------------------------------------------

    def bound(self, pc: int) -> Bound:
        found = self._bound.get(pc)
        if found is None:
            code = self.machine.code
            plan, i = code.plans[pc], code.instructions[pc]
            control = plan.control
            assert isinstance(control, Multiply)
            at = control.registers
            d, a = plan.reads[:at], plan.reads[at : at + 4] if control.a_in_registers else ()
            others = plan.reads[at + len(a) :]
            decode = decoder(control.types[0]), decoder(control.types[1])
            found = self._bound[pc] = Bound(i, control, *self.places(d), *self.places(a), others, decode)
        return found

    def places(self, args: tuple[Arg, ...]) -> tuple[Array, Array]:
        names = [a.operand.name for a in args if isinstance(a.operand, Reg)]
        slots = self.machine.code.slots
        return np.array([slots[name][1] for name in names], np.int64), self.flights.numbers(names)

    def issue(self, pc: int, lanes: Lanes, first: Array) -> None:
        machine, bound = self.machine, self.bound(pc)
        self.agreement.come(bound.instruction, lanes)
        machine.flush()
        *descriptors, adds = (self.uniform(one, bound.instruction, lanes, len(first)) for one in bound.others)
        control, k_major = bound.control, bound.control.k_major
        b_units = self.units(descriptors[-1], lanes, control.columns, k_major[1], bound)
        a_units = None if control.a_in_registers else self.units(descriptors[0], lanes, ROWS, k_major[0], bound)
        tiles = [one for one in (a_units, b_units) if one is not None]
        self.look(bound.instruction, lanes, tiles)
        total = self.chain(bound, lanes, first, adds)
        number = self.flights.issue(bound.instruction, lanes, bound.d_rows, bound.a_rows)
        count = len(first)
        product = Product(
            number,
            bound,
            lanes,
            first,
            (a_units, b_units),
            adds,
            total,
            self.committed[first],
            np.zeros(count, np.bool_),
            np.zeros((count, GROUP), np.bool_),
        )
        races = machine.memory.races
        if races is not None and races.tiles is not None:
            product.reading = races.tiles.issue(bound.instruction, first, [one.reshape(count, -1) for one in tiles])
        for one in first.tolist():
            self.flying.setdefault(one, []).append(product)
        self.products[number] = product

    def uniform(self, one: Arg, i: Instruction, lanes: Lanes, count: int) -> Array:
        """An operand that all threads of a warpgroup must agree on: one value for each."""
        value = self.machine.full.array(one)
        if not value.ndim:
            return np.full(count, value)
        found = value[lanes.slice or lanes.index].reshape(count, THREADS)
        differ = found != found[:, :1]
        if differ.any():
            at = int(np.flatnonzero(differ)[0])
            what = "scale-d" if found.dtype == np.bool_ else "descriptor"
            message = f"threads of a warpgroup differ in the {what} of wgmma"
            self.machine.memory.findings.report("disagreement", message, i, lanes, at, count=int(np.count_nonzero(differ)))
        return found[:, 0].copy()

    def units(self, descriptors: Array, lanes: Lanes, rows: int, k_major: bool, bound: Bound) -> Array:
        """The 16-byte units of the wave's shared memory that hold `rows` of M or N: (warpgroups, rows of units, units of a row)."""
        shape = (rows, 2, True) if k_major else (bound.control.depth, rows // 8, False)
        key = lanes, descriptors.tobytes(), shape
        found = self._units.get(key)
        if found is None:
            if len(self._units) > REMEMBERED:
                self._units.clear()
            memory = self.machine.memory
            base = lanes.block.reshape(-1, THREADS)[:, 0] * (memory.shared_stride // UNIT)
            matrices = [self.tile(bits, shape, bound.instruction, lanes) for bits in descriptors.tolist()]
            found = (np.stack(matrices) + base[:, None]).reshape(len(descriptors), shape[0], shape[1])
            self._units[key] = found
        if self.machine.memory.swizzles.modes is not None:
            self.look_at_swizzles(descriptors, found, bound.instruction, lanes)
        return found

    def look_at_swizzles(self, descriptors: Array, units: Array, i: Instruction, lanes: Lanes) -> None:
        """Report tiles that tensor copies wrote in another swizzle than that of the descriptor."""
        memory = self.machine.memory
        if memory.swizzles.all_are(units, MODE_NUMBERS[(descriptors >> np.uint64(62)).astype(np.int64)][:, None, None]):
            return
        for bits in np.unique(descriptors).tolist():
            at = np.flatnonzero(descriptors == bits)
            rows, mode = units[at].reshape(-1), Descriptor.of(bits).mode
            if memory.races is not None and memory.races.tiles is not None:
                rows = rows[memory.races.tiles.of_tensor_copies(rows)]
            other = memory.swizzles.differing(rows, mode)
            if other is not None:
                message = f"wgmma's descriptor has swizzle {mode}; a tensor copy wrote the tile with swizzle {other}"
                count = THREADS * len(at)
                memory.findings.report("swizzle", message, i, lanes, int(at[0]) * THREADS, count=count)

    def tile(self, bits: int, shape: tuple[int, int, bool], i: Instruction, lanes: Lanes) -> Array:
        """The units of one matrix in its block's shared memory, in bounds."""
        found = self._tiles.get((bits, shape))
        if found is not None:
            return found
        units = Descriptor.of(bits).units(*shape)
        limit = self.machine.memory.shared_size // UNIT
        if units.max() >= limit:
            last = int(units.max()) * UNIT
            message = f"wgmma reads up to offset {last + UNIT:#x} of shared memory, which has {limit * UNIT:#x} bytes"
            self.machine.memory.findings.report("out of bounds", message, i, lanes, 0, count=lanes.n, address=last)
            units = np.minimum(units, limit - 1)
        if len(self._tiles) > REMEMBERED:
            self._tiles.clear()
        self._tiles[bits, shape] = units
        return units

    def look(self, i: Instruction, lanes: Lanes, tiles: list[Array]) -> None:
        """Count what a product reads; report what nobody wrote, and what is on its way."""
        memory = self.machine.memory
        counts = memory.tally.shared[i, "wgmma", UNIT]
        counts.requests += tiles[0].shape[0] * len(tiles)
        for units in tiles:
            counts.bytes += units.size * UNIT
            counts.wavefronts += units.size // 8
            counts.ideal_wavefronts += units.size // 8
            if memory.settled:
                continue
            states = memory.state_view(8).reshape(-1, 2).take(units.reshape(-1), 0)
            if states.any():
                flat = states.view(np.uint8).reshape(len(units), -1)
                for state, kind, text in (
                    (UNWRITTEN, "uninitialised", "that nobody wrote"),
                    (IN_FLIGHT, "in flight", "whose asynchronous copy has not been waited for"),
                ):
                    bad = (flat == state).any(axis=1)
                    if bad.any():
                        at = int(np.flatnonzero(bad)[0]) * THREADS
                        memory.findings.report(kind, f"wgmma reads shared memory {text}", i, lanes, at, count=int(bad.sum()))
            memory.settle()

    def chain(self, bound: Bound, lanes: Lanes, first: Array, adds: Array) -> Array:
        """Where the sums of a product go: on with those of the product before it, or from what the registers hold."""
        codes = self.flights.codes[bound.d_rows[:, None], lanes.warp_ids]
        pending = codes // SLOTS > self.flights.done[lanes.warp_ids]
        control = bound.control
        if pending.any():
            before = self.products.get(int(codes[0, 0]) // SLOTS)
            expected = (0 if before is None else before.number * SLOTS) + np.arange(len(codes))[:, None]
            if before is not None and (codes == expected).all() and np.array_equal(before.first, first):
                known = before.bound.control
                if (known.columns, known.result) == (control.columns, control.result):
                    return before.total
            self.mixed(bound, lanes, codes, pending)
            self.machine.deactivate()
            self.land(self.of(first), lambda p: p.of(first))
            self.deliver(lanes, codes.max(initial=0) // SLOTS, bound.d_rows, bound.d_places)
        total = np.zeros((len(first), ROWS, control.columns), np.float32)
        if adds.any():
            held = rows_of(self.machine, bound.d_places, lanes)
            np.copyto(total, matrix(held, len(first), control), where=adds[:, None, None])
        return total

    def mixed(self, bound: Bound, lanes: Lanes, codes: Array, pending: Array) -> None:
        """Accumulators of products of another shape, or of other registers of them, must be waited for."""
        for number in np.unique(codes[pending] // SLOTS).tolist():
            other = self.products.get(number)
            same = codes == number * SLOTS + np.arange(len(codes))[:, None]
            if other is None or (other.bound.control.columns == bound.control.columns and same[codes // SLOTS == number].all()):
                continue
            message = f"accumulates in registers of {source(other.bound.instruction)}, another shape, which has not been waited for"
            self.machine.memory.findings.report("in flight", message, bound.instruction, lanes, 0, count=lanes.n)

    def of(self, first: Array) -> list[Product]:
        """The products on their way of warpgroups with these first warps, oldest first."""
        found = {p.number: p for one in first.tolist() for p in self.flying.get(one, ())}
        return [found[number] for number in sorted(found)]

    # -- landing --------------------------------------------------------------------------------------------------------------

    def land(self, products: list[Product], due: Callable[[Product], Array]) -> None:
        """Compute what is due (booleans, a warpgroup each) of these products, oldest first."""
        run: list[Product] = []
        for product in products:
            now = due(product) & ~product.landed
            if not now.any():
                continue
            product.landed |= now
            if not now.all():
                compute(self.machine, run)
                run = []
                compute(self.machine, [product], np.flatnonzero(now))
                continue
            if run and not (run[-1].total is product.total and joins(run[-1], product)):
                compute(self.machine, run)
                run = []
            run.append(product)
        compute(self.machine, run)

    def deliver(self, lanes: Lanes, newest: int | Array, rows: Array, places: Array) -> None:
        """Write the sums of products up to `newest` (of all, or of each warp) to those of these registers that wait for them."""
        warps = lanes.warp_ids
        codes = self.flights.codes[rows[:, None], warps]
        numbers = codes // SLOTS
        due = (numbers > self.flights.done[warps]) & (numbers <= newest)
        if not due.any():
            return
        file, start = self.machine.full.files[32], self.machine.code.row_base[32]
        self.machine.rewritten(sum(1 << start + place for place in places.tolist()))
        for number in np.unique(numbers[due]).tolist():
            product = self.products[number]
            held = product.registers()
            mine = due & (numbers == number)
            some = np.flatnonzero(mine.any(axis=1))
            column = np.searchsorted(product.lanes.warp_ids, warps)
            if mine[some].all() and (codes[some] == codes[some, :1]).all():
                values = held[codes[some, 0] % SLOTS]
                if product.lanes is not lanes:
                    values = values.reshape(len(some), -1, WARP)[:, column].reshape(len(some), -1)
                if lanes.slice is not None:
                    file[places[some], lanes.slice] = values
                else:
                    file[places[some][:, None], lanes.index] = values
                continue
            of = np.flatnonzero(mine.any(axis=0))
            block = codes[some[:, None], of]
            if mine[some[:, None], of].all() and (block == block[:, :1]).all():
                # All of some warps: under seeds they come with others than those that the product began with.
                to, there = ((each[of][:, None] * WARP + np.arange(WARP)).reshape(-1) for each in (warps, column))
                file[places[some][:, None], to] = held[(block[:, 0] % SLOTS)[:, None], there]
                continue
            for row in some.tolist():
                at = np.flatnonzero(mine[row])
                to = (warps[at][:, None] * WARP + np.arange(WARP)).reshape(-1)
                there = (column[at][:, None] * WARP + np.arange(WARP)).reshape(-1)
                file[places[row], to] = held[np.repeat(codes[row, at] % SLOTS, WARP), there]

    # -- waits ----------------------------------------------------------------------------------------------------------------

    def wait(self, pc: int, control: MultiplyWait, lanes: Lanes) -> None:
        """Until at most `newest` of each warp's newest groups are pending."""
        self.agreement.come(self.machine.code.instructions[pc], lanes)
        over = self.finished(lanes, self.committed[lanes.warp_ids] - control.newest)
        if over:
            self.machine.deactivate()
            self.land([self.products[number] for number in over], lambda p: np.asarray(over[p.number].any(axis=1)))
            facts = self.machine.code.in_flight
            assert facts is not None
            names = facts.waits[pc]
            slots = self.machine.code.slots
            places = np.array([slots[name][1] for name in names], np.int64)
            wide = np.array([slots[name][0] == 32 for name in names], np.bool_)
            newest = np.zeros_like(self.committed)
            for number in sorted(over):
                newest[(self.products[number].first[:, None] + np.arange(GROUP))[over[number]]] = number
            self.deliver(lanes, newest[lanes.warp_ids], self.flights.numbers(names)[wide], places[wide])
            self.close(over)
        self.machine.push(pc + 1, lanes)

    def finished(self, lanes: Lanes, limit: Array) -> dict[int, Array]:
        """For each product which of its warps have now waited for it: those whose group is below the warp's limit."""
        found: dict[int, Array] = {}
        limits = np.zeros_like(self.committed)
        limits[lanes.warp_ids] = limit
        for product in self.of(np.unique(lanes.warp_ids - lanes.warp_ids % self.per_block % GROUP)):
            now = (product.group[:, None] < limits[product.first[:, None] + np.arange(GROUP)]) & ~product.over
            if now.any():
                found[product.number] = now
        return found

    def close(self, over: dict[int, Array]) -> None:
        """These warps have waited: for the race detector at this moment."""
        races = self.machine.memory.races
        done = self.flights.done
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

    def forget(self, product: Product) -> None:
        del self.products[product.number]
        for one in product.first.tolist():
            self.flying[one].remove(product)
            if not self.flying[one]:
                del self.flying[one]

    def stir(self) -> None:
        """Seeded runs call this between stretches: some products are computed early, and reach their registers."""
        assert self.random is not None
        if self.random.random() > EARLY:
            return
        chosen = self.products[list(self.products)[int(self.random.integers(len(self.products)))]]
        self.machine.deactivate()
        self.land([p for p in self.of(chosen.first) if p.number <= chosen.number], lambda p: p.of(chosen.first))
        if self.random.random() < 0.5:
            facts = self.machine.code.in_flight
            assert facts is not None
            # Only where the products stand last: of a chain the newest one writes.
            self.deliver(chosen.lanes, chosen.number, chosen.bound.d_rows, chosen.bound.d_places)

    def leave(self) -> None:
        """Threads have exited: what is on its way for warps that are gone nobody sees."""
        if self.agreement.ahead:
            self.agreement.leave()
        if not self.products:
            return
        gone = self.machine.wave.alive_by_warp == 0
        for product in list(self.products.values()):
            if (gone[product.first[:, None] + np.arange(GROUP)] | product.over).all():
                self.forget(product)
