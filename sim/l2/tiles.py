"""The kernel that finds the states of a mask's tiles: a thread block a tile, which asks the mask for each of its scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash.schedules.base import TileSchedule
from cupyflash.schedules.mask_tiles import THREADS, MaskTiles
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, resident
from cupyflash.sim.l2.parts import Bounds, Part
from cupyflash.sim.l2.reads import At, Given, Known, Reads, Scores
from cupyflash.sim.l2.streamed import FEW_REGISTERS

# Within a turn
FIRST, OF_LINES, OF_SCORES, LAST = range(4)


class TileStates(Launch):
    """Of the tiles of one schedule."""

    def __init__(self, schedule: TileSchedule, tiles: MaskTiles, parts: list[Part], memory: Memory, given: Given) -> None:
        self.tiles, self.parts = tiles, parts
        self.grid, self.slots = tiles.count, resident(schedule.device, THREADS, 0, FEW_REGISTERS)
        self.turns = np.ones(self.grid, np.int64)
        self.reads = Reads(schedule, memory, given, by_tiles=True, of_mask=True)
        self.known = Known(schedule, memory)
        self.heft = 1 + self.reads.heft(*tiles.blocks)
        packed = tiles.packed
        self.bounds = None if packed is None else Bounds.of(packed, "q", tiles.blocks[0], parts, memory)
        self.found = None if self.bounds is None else self.bounds.found()
        self.unit = 1

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_tile(block)))

    def _of_tile(self, block: int) -> Iterator[Requests]:
        (Br, Bc), (_, heads, Tr, Tc) = self.tiles.blocks, self.tiles.shape
        plane, row_block, j = block // Tc // Tr, block // Tc % Tr, block % Tc
        number, i, head = plane // heads, row_block, plane % heads
        if self.bounds and self.found:
            number, i = (int(each[row_block]) for each in self.found)
            yield from self.bounds.search(FIRST, number)
        part = self.parts[number]
        p = part.problem
        rows, cols = min(Br, p.seqlen_q - i * Br), min(Bc, p.seqlen_k - j * Bc)
        if rows <= 0 or cols <= 0:  # what a sequence has not
            return
        at = At.of(part, head)
        yield from self.reads.of_head(at, 0, FIRST)
        yield from self.reads.of_rows(at, OF_LINES, 0, i * Br, rows)
        yield from self.reads.of_keys(at, OF_LINES, 0, j * Bc, cols)
        if self.reads.of_each["score"]:
            row = i * Br + np.arange(rows)[None]
            scores = Scores(row, np.full_like(row, j * Bc), np.full_like(row, j * Bc + cols))
            yield from self.reads.of_scores(at, OF_SCORES, np.zeros((1, 1), np.int64), scores)
        address = self.known.at(self.tiles.field, part, head, i, j)
        yield Requests.of(0, LAST, address, 1, write=True)


def states_found(schedule: TileSchedule, parts: list[Part], memory: Memory, given: Given) -> Iterator[Launch]:
    """The launches that find them, where the call does not bring them."""
    for each in schedule.found_tiles:
        yield TileStates(schedule, each, parts, memory, given)
