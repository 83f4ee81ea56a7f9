"""FlashAttention-3's forward (arXiv 2407.08608): FlashAttention-2's order of blocks, run by warpgroups with roles on a Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from cupyflash.basics import Array
from cupyflash.launch.params import POINTER, Params, arrays, numbers
from cupyflash.launch.tensor_maps import Box
from cupyflash.request.score import named
from cupyflash.schedules import fa3_queue, fa3_tiles
from cupyflash.schedules.base import (
    GRANULE,
    Kernel,
    Workspace,
    attention_params,
    element_constants,
    tile_constants,
)
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3_queue import Grouping, Items
from cupyflash.schedules.moves import BEGIN, END, Move, Room, Tensor, Totals, Walk, whole
from cupyflash.schedules.parts import Visited

MAPPED = ("Q", "K", "V", "O")
OWN = (
    *numbers("int", "works", "section", "alike", "last_head"),
    *numbers("long long", "keys_together", "last_key"),
    *arrays("int", POINTER, ("queue", "taken")),
)
LENGTH = 4  # bytes of a key length, of a place in the queue
# Of the L2, what the K and V of the heads at work may take: half of it holds the same bytes for the other half of the
# multiprocessors (an H100, measured), and of the rest a half is Q's and O's, which only pass through.
L2_SHARE = 4
# Row blocks of the heads at work for each multiprocessor, at least: with fewer, those that end early have nothing to do.
LEAST_ROUNDS = 2
# The same where only the last heads' even out what was before.
LAST_ROUNDS = 3
# Parts of the heads at work that begin at different times: with fewer all would wait for their first K and V at once.
SECTIONS_AT_ONCE = 4
# How much later the busiest multiprocessor may end by it than by the longest first.
SLOWER = 1.015


class Fa3Schedule(Fa2Schedule):
    """FlashAttention-3's schedule: a row block visits the column blocks that it sees, from the last one on.

    A thread block takes one row block after the other (`works` in all), from a queue if these differ. TMA copies the part of a
    block that is in the tensor: if a batch has fewer keys than k, the block in which they end is copied whole.
    """

    algorithm: ClassVar[str] = "fa3"
    params: ClassVar[Params] = attention_params(*OWN, maps=MAPPED)
    rings: ClassVar[Mapping[str, str]] = {"K": "K", "V": "V"}
    by_tiles: ClassVar[bool] = False
    whole_boxes: ClassVar[bool] = True

    @property
    def config(self) -> fa3_tiles.Fa3Config:
        """The kernel's configuration for these block sizes. Raises ValueError with the reason if it cannot run them."""
        return fa3_tiles.choose(self.problem, self.device, (self.tiling.used.block_rows, self.block_cols)).config

    def _tiles(self) -> tuple[Room, ...]:
        return tuple(Room(name, nbytes) for name, nbytes in fa3_tiles.rooms(self.problem, self._replayed).items())

    @property
    def out_room(self) -> str:
        return "O" if self._replayed.o_apart else "Q"

    @property
    def _replayed(self) -> fa3_tiles.Fa3Config:
        """The configuration, or for block sizes that no kernel runs one like it."""
        try:
            return self.config
        except ValueError:
            team = replace(fa3_tiles.TEAMS[0], consumers=-(-self.tiling.used.block_rows // fa3_tiles.WARPGROUP_ROWS))
            return fa3_tiles.Fa3Config(team, self.block_cols, fa3_tiles.STAGES[-1], False, team.registers[0], o_apart=False)

    @property
    def pack(self) -> int:
        return fa3_tiles.packed_heads(self.problem, self.tiling.used.block_rows)

    @property
    def block_rows(self) -> int:
        """Queries of a row block: Br, or a part of it if the block has the queries of several heads."""
        return self.tiling.used.block_rows // self.pack

    @property
    def state_words(self) -> int:
        return 0  # the producer has the states of 32 tiles in registers

    @property
    def repeats(self) -> int:
        return self.problem.head_count // self.pack

    @property
    def room_q(self) -> int:
        return self.problem.seqlen_q

    @property
    def room_k(self) -> int:
        return self.problem.seqlen_k

    @property
    def rooms_beyond(self) -> tuple[int, int]:
        return self.room_q, self.room_k

    @property
    def warps(self) -> int:
        """The warps that have work: the producer and the consumers. Roles do not wait for one another at the start of a row block,
        so each of these warps finds out by itself what to do."""
        return 1 + self.tiling.used.block_rows // GRANULE

    @property
    def looks(self) -> int:
        return self.warps

    def maps(self) -> Mapping[str, Box]:
        rows = {"Q": self.block_rows // self.config.q_parts, "O": fa3_tiles.WARPGROUP_ROWS // self.pack}
        return {
            **{tensor: Box(tensor, each, fa3_tiles.SLAB, fa3_tiles.SWIZZLE, heads=self.pack) for tensor, each in rows.items()},
            **{tensor: Box(tensor, self.block_cols, fa3_tiles.SLAB, fa3_tiles.SWIZZLE) for tensor in "KV"},
        }

    @cached_property
    def grouping(self) -> Grouping:
        """The row blocks that come together: of few heads of short causal sequences, if that is even enough, else as lengths have
        it."""
        few = self._of_few_heads if self.queued else None
        return few if few and self._items(few).slower <= SLOWER else self._by_length

    @property
    def _of_set(self) -> int:
        """Row blocks that share K and V."""
        return max(1, self.works // (self.problem.batch * self.problem.kv_heads))

    @property
    def _set(self) -> int:
        """Heads (or sets of `pack` heads) that share K and V."""
        return self.problem.group // self.pack

    @property
    def _longest(self) -> int:
        """Column blocks of the longest row blocks."""
        return -(-self.problem.seqlen_k // self.block_cols)

    def _sets(self, rounds: int) -> int:
        """Key heads, counted over all sequences, of whose K and V a quarter of the L2 holds the keys in a window, or that have so
        many row blocks for each multiprocessor."""
        p, keys = self.problem, self.problem.seqlen_k
        if p.options.left is not None and p.options.right is not None:
            keys = min(keys, p.options.left + p.options.right + self.block_rows)
        held = self.device.l2_bytes // L2_SHARE // max(1, keys * (p.head_dim + p.head_dim_v) * p.itemsize)
        return max(1, held, -(-rounds * self.device.sm_count // self._of_set))

    @property
    def _by_length(self) -> Grouping:
        """The row blocks of so many heads as the L2 has room for, and the shortest ones of all heads at the end. All are told apart
        without a causal mask, since those of one sequence then are equally long, or nearly."""
        p, sets = self.problem, self._sets(LEAST_ROUNDS)
        alike = fa3_queue.alike_from(self.works / self.grid, self._longest) if p.options.causal else fa3_queue.NEVER
        together = fa3_queue.evenly(p.batch, max(1, sets // p.kv_heads)) * p.seqlen_k
        return Grouping(fa3_queue.evenly(p.kv_heads, sets) * self._set, together, alike)

    @property
    def _of_few_heads(self) -> Grouping | None:
        """The row blocks of few heads behind those of others, short ones too, and only those of the last heads sorted together:
        where row blocks differ by a causal mask alone and none is long, all heads' short ones at the end would load so many keys
        again that DRAM binds."""
        p, asked = self.problem, self.problem.options
        other = asked.window is not None or asked.padded or asked.packed or asked.masked
        if not asked.causal or other or self._longest >= fa3_queue.LONG:
            return None
        section = fa3_queue.evenly(p.kv_heads, max(1, self.device.sm_count // SECTIONS_AT_ONCE // self._of_set)) * self._set
        sets = min(self._sets(LAST_ROUNDS), p.batch * p.kv_heads)
        sequences = -(-sets // p.kv_heads)  # of one, some heads are the last, of more all
        last_head = (p.kv_heads - sets) * self._set if sequences == 1 else 0
        return Grouping(section, p.seqlen_k, 0, (p.batch - sequences) * p.seqlen_k, last_head)

    @property
    def last_heads(self) -> int:
        """Heads of all sequences whose row blocks come at the end, sorted together; 0 if none are set apart."""
        p, made = self.problem, self.grouping
        return max(0, p.batch * p.heads - made.last_key // p.seqlen_k * p.heads - made.last_head * self.pack)

    def numbers(self) -> Mapping[str, int]:
        return {"works": self.works, **self.grouping._asdict()}

    @property
    def queued(self) -> bool:
        """True if thread blocks take row blocks from a queue. If these are alike, or no more than thread blocks, its two
        microseconds would be wasted."""
        return self.works > self.grid and self.unlike

    @property
    def unlike(self) -> bool:
        """True if some row blocks may be longer than others."""
        asked = self.problem.options
        return asked.causal or asked.window is not None or asked.padded or asked.packed or asked.masked

    @cached_property
    def items(self) -> Items:
        return self._items(self.grouping)

    def _items(self, grouping: Grouping) -> Items:
        """The blocks of rows of a head, of all batches."""
        p, starts = self.problem, np.arange(self.problem.batch) * self.problem.seqlen_k
        every = p.keys_of_each
        turns = {keys: Visited.of(self, keys, None).counts for keys in set(every)}
        first_key = np.repeat(starts, self.row_blocks)
        return Items(np.concatenate([turns[keys] for keys in every]), first_key, p.heads // self.pack, self.grid, grouping)

    def order(self) -> tuple[Array, Array]:
        """The items, and the sets of heads, in the order in which they are taken."""
        if self.queued:
            return self.items.order()
        pair, i = np.divmod(np.arange(self.works), self.row_blocks)
        batch, head = np.divmod(pair, self.items.heads)
        return batch * self.row_blocks + i, head

    @property
    def blocks_there(self) -> int:
        """The number of row blocks that exist, of those that have a number."""
        return self.works

    @property
    def asked_for(self) -> int:
        """Row blocks that producers ask for, up to the first that a sequence has not."""
        return self.blocks_there + max(0, min(self.grid, self.works - self.blocks_there))

    def sharing(self, kernel: str) -> int | None:
        return 1

    def walks(self) -> Iterator[Walk | Totals]:
        *tiles, main = super().walks()
        yield from tiles
        assert isinstance(main, Walk)
        main = replace(main, takes=self, any_order=False, inner_first=True)
        if not self.queued:
            yield main
            return
        # Each item looks at itself, its thread block at all. The queue is written once; behind each row block one more is taken.
        items = self.queue_items
        often = items * (1 + -(-items // fa3_queue.THREADS))
        looks = (whole(name, often * words, LENGTH) for name, words in self.look_words.items())
        queue, count = Tensor("queue", "work", 1, LENGTH), Tensor("taken", "one", 1, LENGTH)
        made = whole("queue", self.works, LENGTH, write=True), whole("taken", 1, LENGTH, write=True)
        yield Totals("fa3_queue", (*looks, *made))
        taken = Move(queue, BEGIN), Move(count, END), Move(count, END, write=True)
        yield replace(main, moves=(*main.moves, *taken))

    @property
    def look_words(self) -> Mapping[str, int]:
        """The words that a thread reads to find the length of an item, by array."""
        return {"key_lengths": 1} if self.problem.options.padded else {}

    def workspaces(self) -> Mapping[str, Workspace]:
        queue = {"queue": Workspace((self.works,), "int32"), "taken": Workspace((1,), "int32")}
        return self.tile_workspaces() | (queue if self.queued else {})

    @property
    def grid(self) -> int:
        return min(self.works, self.device.sm_count)

    def kernels(self) -> tuple[Kernel, ...]:
        return (*self.tile_kernels(), *((self.queue_kernel,) if self.queued else ()), self.main_kernel)

    @property
    def queue_items(self) -> int:
        """The blocks of rows of all heads, also of packed sequences whose lengths are not known."""
        return self.works // (self.problem.heads // self.pack)

    @property
    def queue_kernel(self) -> Kernel:
        """The kernel that writes the queue."""
        return replace(
            self.main_kernel,
            source="fa3_queue.cu",
            name="fa3_queue",
            grid=-(-self.queue_items // fa3_queue.THREADS),
            threads=fa3_queue.THREADS,
            shared_bytes=0,
            accelerated=False,
        )

    @property
    def main_kernel(self) -> Kernel:
        config, p = self.config, self.problem
        constants = (
            *element_constants(p),
            *tile_constants(self),
            *named(BR=config.team.block_rows, BC=config.block_cols, STAGES=config.stages),
            *named(CONSUMER_REGISTERS=config.registers[0], PRODUCER_REGISTERS=config.registers[1]),
            *named(PING_PONG=int(config.ping_pong), O_APART=int(config.o_apart)),
            *named(PACK=self.pack, VARLEN=int(p.options.packed)),
        )
        shared = sum(fa3_tiles.rooms(p, config).values())
        return Kernel(
            "fa3_forward.cu", "fa3_forward", constants, self.grid, config.team.threads, shared, self.struct, accelerated=True
        )
