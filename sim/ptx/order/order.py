"""What happens before what: the clocks of barriers, fences and atomics (those of mbarriers are in `order.heard`).

What orders: a lane its own accesses; barriers their threads; bar.warp.sync its members; a fence and then an atomic (or a
store that is volatile, relaxed or release) with a later atomic (or such a load, and then a fence) on the same address.
Shuffles, mma and ldmatrix order nothing.

The order of execution is one legal interleaving, so a single clock `now` stamps every access, and ticks when somebody
synchronises. What a warp knows are then moments: `base` of its block (what the block did until then is over for all of
it: the last barrier), `synced` of the warp (bar.warp.sync), `known[w, v]` (warp w has heard of what warp v did until
then: barriers with a thread count). An access is ordered behind an earlier one whose stamp is not above such a moment.

An entry stands for accesses: stamp << 32 | who << 30 | lane (who: one lane, LANES of a warp, WARPS of a block, BLOCKS).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.types import Array
from .heard import Heard
from .proxy import Proxy

STAMP = 32
ONE, LANES, WARPS, BLOCKS = (k << 30 for k in range(4))
LANE = (1 << 30) - 1
LOW = np.uint64((1 << STAMP) - 1)


class Order:
    """Who is ordered behind whom in one launch of `blocks` blocks; `proxies`: the kernel uses the asynchronous proxy."""

    def __init__(self, blocks: int, proxies: bool = False):
        self.blocks = blocks
        self.proxies = proxies
        self.proxy: Proxy | None = None
        self.now = 1
        # What lanes have learnt of other lanes through atomics: stamps over the lanes of the grid.
        self._lane_knows: dict[int, Array] = {}
        self._block_knows: dict[int, Array] = {}
        self._heard: dict[int, Array] = {}
        self._messages: dict[tuple[int, int, int], Array] = {}
        # When each lane of the grid last fenced: for the whole device; for its block.
        self._fenced: tuple[Array, Array] | None = None

    def begin_wave(self, wave: Wave) -> None:
        self.wave = wave
        blocks, warps = wave.blocks, wave.warps_per_block
        self.first = wave.first_block * wave.lanes_per_block
        self.now += 1
        start = self.now - 1
        self.base = np.full(blocks, start, np.int64)
        self._floors: dict[Lanes, tuple[int, int]] = {}
        self.synced = np.full(blocks * warps, start, np.int64)
        self.known = np.full((blocks, warps, warps), start, np.int64)
        self.heard = Heard(self)
        if self.proxies:
            self.proxy = Proxy(self)
        # Only after bar.warp.sync of some lanes: moments between the lanes of a warp.
        self.partial: dict[int, Array] = {}

    # -- barriers ------------------------------------------------------------------------------------------------------

    def block_barrier(self, blocks: Array) -> None:
        """All threads of these blocks have met."""
        moment = self.now
        self.base[blocks] = moment
        self.synced.reshape(self.wave.blocks, -1)[blocks] = moment
        self.known[blocks] = moment
        for block in blocks.tolist():
            self.heard.rows.pop(block, None)
        self._floors.clear()
        self.now += 1
        if self.proxy is not None:
            self.proxy.meet(blocks)
        if self._lane_knows:
            per = self.wave.lanes_per_block
            for block in blocks.tolist():
                number = block + self.wave.first_block
                lanes = [lane for lane in self._lane_knows if lane // per == number]
                if lanes:
                    learnt = [self._lane_knows.pop(lane) for lane in lanes]
                    self._block_knows[number] = highest([*learnt, self._block_knows.get(number)])

    def floors(self, lanes: Lanes) -> tuple[int, int]:
        """Until when everything in the blocks of these lanes is over for each of them, and everything in their warps."""
        found = self._floors.get(lanes)
        if found is None:
            floor = int(self.base[lanes.block_ids].min())
            found = self._floors[lanes] = floor, max(floor, int(self.synced[lanes.warp_ids].min()))
        return found

    def arrive(self, lanes: Lanes) -> tuple[int, Array]:
        """Lanes of one block come to a barrier with a thread count: what they release, at this moment."""
        block = int(lanes.block[0])
        warps = lanes.warp_ids % self.wave.warps_per_block
        released = self.known[block, warps].max(axis=0)
        released[warps] = self.now
        self.now += 1
        return block, released if self.proxy is None else np.concatenate((released, self.proxy.told(lanes)))

    def depart(self, lanes: Lanes, released: list[tuple[int, Array]]) -> None:
        """Lanes of one block have waited for the arrivals that released this."""
        block = int(lanes.block[0])
        heard = np.maximum.reduce([moments for _, moments in released])
        if self.proxy is not None:
            self.proxy.hear(lanes, heard[self.wave.warps_per_block :])
            heard = heard[: self.wave.warps_per_block]
        warps = lanes.warp_ids % self.wave.warps_per_block
        self.known[block, warps] = np.maximum(self.known[block, warps], heard)
        self.synced[lanes.warp_ids] = np.maximum(self.synced[lanes.warp_ids], heard[warps])
        self._floors.clear()

    def warp_sync(self, warps: Array) -> None:
        """All lanes of these warps of the wave have met."""
        self.synced[warps] = self.now
        self._floors.clear()
        self.now += 1
        if self.heard.rows:
            for warp in warps.tolist():
                self.heard.share(warp, np.arange(WARP))
        if self._lane_knows:
            for warp in warps.tolist():
                self._share(range(self.first + warp * WARP, self.first + (warp + 1) * WARP))

    def lanes_sync(self, warp: int, mask: int) -> None:
        """Some lanes of a warp have met."""
        members = np.array([lane for lane in range(WARP) if mask >> lane & 1])
        moments = self.partial.setdefault(warp, np.zeros((WARP, WARP), np.int64))
        heard = moments[members].max(axis=0)
        heard[members] = self.now
        moments[members] = heard
        self.heard.share(warp, members)
        self.now += 1
        if self._lane_knows:
            self._share((members + self.first + warp * WARP).tolist())

    def _share(self, lanes: list[int] | range) -> None:
        learnt = [self._lane_knows[lane] for lane in lanes if lane in self._lane_knows]
        if learnt:
            together = highest(learnt)
            self._lane_knows |= dict.fromkeys(lanes, together)

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""
        stamp = (entries >> np.uint64(STAMP)).astype(np.int64)
        low = (entries & LOW).astype(np.int64)
        other, who = low & LANE, low & ~LANE
        per, warps = self.wave.lanes_per_block, self.wave.warps_per_block
        near = (other // per == mine // per) & (who != BLOCKS)
        ours = near & (other >> 5 == mine >> 5) & (who <= LANES)
        block = np.where(near, mine // per - self.wave.first_block, 0)
        known = self.known[block, mine % per >> 5]
        moment = np.where(who == WARPS, known.min(axis=1), known[np.arange(len(mine)), np.where(near, other % per >> 5, 0)])
        moment = np.where(ours, self.synced[block * warps + (mine % per >> 5)], moment)
        race = (stamp > 0) & ~(near & (stamp <= moment))
        if not collective:
            race &= ~((other == mine) & (who == ONE))
        if self.partial:
            for at in np.flatnonzero(race & ours & (who == ONE)):
                moments = self.partial.get(int(mine[at] - self.first) >> 5)
                race[at] &= moments is None or stamp[at] > moments[mine[at] & 31, other[at] & 31]
        if self.heard.rows and race.any():
            race &= stamp > self.heard.moments(mine, other, (who == LANES) | (who == WARPS), who == WARPS)
        if (self._lane_knows or self._block_knows) and race.any():
            for lane in np.unique(mine[race]):
                learnt = self.learnt(int(lane))
                if learnt is None:
                    continue
                heard = race & (mine == lane)
                found = learnt[other]
                found[who == LANES] = learnt.reshape(-1, WARP).min(axis=1)[other[who == LANES] // WARP]
                found[who == WARPS] = learnt.reshape(-1, per).min(axis=1)[other[who == WARPS] // per]
                # Readers in many blocks are not told apart: whoever has heard of other blocks is believed.
                found[who == BLOCKS] = self.now
                race &= ~(heard & (stamp <= found))
        return np.asarray(race)

    # -- atomics and fences: what a lane has heard -------------------------------------------------------------------------

    def learnt(self, lane: int) -> Array | None:
        """For each lane of the grid until when this one has heard of it through atomics; None: of nobody."""
        mine, block = self._lane_knows.get(lane), self._block_knows.get(lane // self.wave.lanes_per_block)
        return highest([mine, block]) if mine is not None or block is not None else None

    def fence(self, lanes: Lanes, block_only: bool) -> None:
        if self._fenced is None:
            size = self.blocks * self.wave.lanes_per_block
            self._fenced = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._fenced[1][lanes.index + self.first] = self.now
        if not block_only:
            self._fenced[0][lanes.index + self.first] = self.now
        self.now += 1
        if self._heard:
            for lane in (lanes.index + self.first).tolist():
                heard = self._heard.pop(lane, None)
                if heard is not None:
                    self._lane_knows[lane] = highest([heard, self._lane_knows.get(lane)])

    def strong(self, lanes: Lanes, where: Array, area: int, reads: bool, writes: bool, mods: frozenset[str]) -> None:
        """Atomics and strong accesses at `where`, one a lane: they carry what their lanes knew at their last fence."""
        releases, acquires = bool(mods & {"release", "acq_rel"}), bool(mods & {"acquire", "acq_rel"})
        per = self.wave.lanes_per_block
        for lane, at in zip((lanes.index + self.first).tolist(), where.tolist(), strict=True):
            # What was fenced for the block only is heard in the block only; shared memory is the block's anyway.
            for block_only in (False, True) if area >= 0 else (True,):
                key = (area, 1 + lane // per if block_only else 0, at)
                message = self._messages.get(key)
                if reads and message is not None:
                    # An atomic is taken to acquire at once, as the code that counts finished blocks relies on.
                    into = self._lane_knows if acquires or writes else self._heard
                    into[lane] = highest([message, into.get(lane)])
                fences = None if self._fenced is None else self._fenced[block_only]
                moment = self.now if releases else 0 if fences is None else int(fences[lane])
                if writes and moment:
                    self._messages[key] = highest([self._release(lane, moment, fences), message])
        self.now += 1

    def _release(self, lane: int, moment: int, fences: Array | None) -> Array:
        """What a lane hands on that fenced at `moment`: its own past, what it heard of, its block as far as it fenced too."""
        per, warps = self.wave.lanes_per_block, self.wave.warps_per_block
        out = np.zeros(self.blocks * per, np.int64)
        block = lane // per
        local, mine = block - self.wave.first_block, lane % per >> 5
        moments = np.repeat(self.known[local, mine], WARP)
        moments[mine * WARP : (mine + 1) * WARP] = self.synced[local * warps + mine]
        if local in self.heard.rows:
            moments = np.maximum(moments, self.heard.rows[local][lane % per])
        limit = np.full(per, moment)
        if fences is not None:
            limit = np.maximum(limit, fences[block * per : (block + 1) * per])
        out[block * per : (block + 1) * per] = np.minimum(moments, limit)
        out[lane] = moment
        return highest([out, self.learnt(lane)])


def highest(arrays: Sequence[Array | None]) -> Array:
    highest: Array = np.maximum.reduce([a for a in arrays if a is not None])
    return highest
