"""FlashAttention-3's forward (arXiv 2407.08608): FlashAttention-2's order of blocks, run by warpgroups with roles on a Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from cupyflash.params import Params, numbers
from cupyflash.schedules import fa3_tiles
from cupyflash.schedules.base import GRANULE, Kernel, Move, Room, attention_params, element_constants
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.moves import head_moves
from cupyflash.tensor_maps import Box

SWIZZLE = 128
MAPPED = ("Q", "K", "V", "O")
OWN = numbers("int", "works", "section")
LENGTH = 4  # bytes of a key length
# Of the L2, what the K and V of the heads at work are to take: the other half is Q's and O's, which only pass through.
L2_SHARE = 2


class Fa3Schedule(Fa2Schedule):
    """FlashAttention-3's schedule: a phase is a row block, its visits the column blocks that it sees, from the last one on.

    A thread block takes one row block after the other (`works` in all). TMA copies of a block what is in the tensor: where a
    batch has fewer keys than k, the block that they end in comes whole. `room_q` and `room_k` are the rows that the tensors have
    from a head's first on.
    """

    algorithm: ClassVar[str] = "fa3"
    params: ClassVar[Params] = attention_params(*OWN, maps=MAPPED)
    rings: ClassVar[Mapping[str, str]] = {"K": "K", "V": "V"}
    by_tiles: ClassVar[bool] = False

    @property
    def config(self) -> fa3_tiles.Config:
        """How the kernel runs these block sizes. ValueError where it cannot, with the reason."""
        return fa3_tiles.choose(self.problem, self.device, (self.tiling.used.block_rows, self.block_cols)).config

    def _tiles(self) -> tuple[Room, ...]:
        return tuple(Room(name, nbytes) for name, nbytes in fa3_tiles.rooms(self.problem, self._replayed).items())

    @property
    def _replayed(self) -> fa3_tiles.Config:
        """The configuration, or for block sizes that no kernel runs one like it."""
        try:
            return self.config
        except ValueError:
            team = replace(fa3_tiles.TEAMS[0], consumers=-(-self.tiling.used.block_rows // fa3_tiles.WARPGROUP_ROWS))
            return fa3_tiles.Config(team, self.block_cols, fa3_tiles.STAGES[-1], False, team.registers[0])

    @property
    def pack(self) -> int:
        return fa3_tiles.packed_heads(self.problem, self.tiling.used.block_rows)

    @property
    def block_rows(self) -> int:
        """Queries of a row block: Br, or a part of it where the block has them of several heads."""
        return self.tiling.used.block_rows // self.pack

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
    def warps(self) -> int:
        """Those with something to do: the producer and the consumers. Roles do not wait for one another at the start of a row
        block, so each of these warps finds out by itself what there is to do."""
        return 1 + self.tiling.used.block_rows // GRANULE

    def _length_moves(self) -> tuple[Move, ...]:
        return (Move("key_lengths", self.warps, LENGTH),) if self.problem.options.padded else ()

    def _head_moves(self) -> tuple[Move, ...]:
        """Each consumer warp reads them, of each head that its rows have."""
        return head_moves(self.problem, (self.warps - 1) * self.pack)

    def copied_rows(self, rows: int) -> int:
        return min(self.block_rows, self.room_q - (self.row_blocks - 1) * self.block_rows) if rows < self.block_rows else rows

    def tail_cols(self, tail: int, keys: int) -> int:
        return min(self.block_cols, self.room_k - tail * self.block_cols)

    def maps(self) -> Mapping[str, Box]:
        rows = {"Q": self.block_rows, "O": fa3_tiles.WARPGROUP_ROWS // self.pack}
        return {
            **{tensor: Box(tensor, each, fa3_tiles.SLAB, SWIZZLE, heads=self.pack) for tensor, each in rows.items()},
            **{tensor: Box(tensor, self.block_cols, fa3_tiles.SLAB, SWIZZLE) for tensor in "KV"},
        }

    @property
    def section(self) -> int:
        """Heads (or sets of `pack` heads) whose row blocks are taken together, so that their K and V stay in L2: whole groups that
        share them."""
        p = self.problem
        group = p.heads // p.kv_heads
        keys = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.itemsize
        return min(self.repeats, max(1, self.device.l2_bytes // L2_SHARE // max(1, keys)) * group // self.pack)

    def numbers(self) -> Mapping[str, int]:
        return {"works": self.works, "section": self.section}

    @property
    def grid(self) -> int:
        return min(self.works, self.device.sm_count)

    def kernels(self) -> tuple[Kernel, ...]:
        config, p = self.config, self.problem
        constants = (
            *element_constants(p),
            ("BR", config.team.block_rows),
            ("BC", config.block_cols),
            ("STAGES", config.stages),
            ("CONSUMER_REGISTERS", config.registers[0]),
            ("PRODUCER_REGISTERS", config.registers[1]),
            ("PING_PONG", int(config.ping_pong)),
            ("PACK", self.pack),
            ("VARLEN", int(p.options.packed)),
        )
        shared = sum(fa3_tiles.rooms(p, config).values())
        return (
            Kernel(
                "fa3_forward.cu", "fa3_forward", constants, self.grid, config.team.threads, shared, self.struct, accelerated=True
            ),
        )
