"""Moves between HBM and the chip: each once, with its tensor, its box, its turn and its direction.

A walk describes how the thread blocks of one kernel go through the tiles of scores, and what they move on the way. The replay and
its SRAM, counted bytes, the L2's requests and the traces' pages come from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from cupyflash.basics import Array
from cupyflash.expressions.tree import Load
from cupyflash.request import score
from cupyflash.request.options import VECTORS
from cupyflash.request.problem import Problem

if TYPE_CHECKING:
    from cupyflash.schedules.base import TileSchedule
    from cupyflash.schedules.packed import Packed
    from cupyflash.schedules.parts import Part

FLOAT32 = 4
WORD = 4

Beside = Literal["seen", "newest", "head", "batch", "tile", "one", "search", "work", "whole"]
Of = Literal["query", "key", "scores", "part", "new", "added", "pages", "row block", Beside]
"""The things for which a tensor has a row: each query of a head, each key of a key head, and so on. "scores": each score of a head;
"row block": each row block of a head; "seen": an element that only scores read whose position is visible; "tile": each tile;
"one": the tensor is one word; "search": the bounds among which a thread block searches its sequence; "work": each piece of work
in the order in which it is taken; "whole": all that moves is its width. In decoding "part": each query of a head and each split
of its keys; "new": each new key; "added": the same after the cached ones, where the last row tile puts them; "pages": each page
of a sequence; "newest": as "seen", for as many of the newest keys as there are queries.
"""


@dataclass(frozen=True)
class Room:
    """Room in SRAM, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor in HBM, with rows of `width` elements. A head has whole multiples of `rounded` rows. `load` is that of a score or
    mask function by which its elements are found."""

    name: str
    of: Of
    width: int
    itemsize: int
    rounded: int = 1
    load: tuple[score.Form, Load] | None = None

    @property
    def row_bytes(self) -> int:
        return self.width * self.itemsize

    @property
    def along(self) -> str:
        """The axes, i and j, by whose tiles it is moved."""
        return {"query": "i", "part": "i", "key": "j", "scores": "ij", "new": "j", "added": "ij", "pages": "i"}.get(self.of, "")


class When(NamedTuple):
    """The turns of a thread block in which something moves.

    tiles: the tiles (g, i, j) for which it moves: query head of the group, row block, column block. "visited"; "mixed", those of
    them whose scores need the mask; "earlier", all visits of a row block except the last (for tensors of rows); "spanned", the
    tiles that positions allow, even if masks leave them out; "unseen", row blocks that visit nothing; "every". axes: it moves once
    for all of those tiles that agree in these, beside the thread block's own axes. at: in the first or the last turn of those
    tiles, or when the thread block begins or ends.

    A tensor moves whole along its axes that are not among these.
    """

    axes: str = "gij"
    tiles: Literal["visited", "mixed", "earlier", "spanned", "unseen", "every"] = "visited"
    at: Literal["first", "last", "begin", "end"] = "first"


BEGIN, END = When("", "every", "begin"), When("", "every", "end")
VISIT, MIXED = When(), When(tiles="mixed")
SEEN = When("")
SPANNED = When(tiles="spanned", at="begin")


@dataclass(frozen=True)
class Move:
    """Rows of a tensor into or out of `tile`, or registers if that is None.

    room: True if rows move too that only have room there: keys beyond a batch's length, within a tensor map's box. times: the
    number of threads that each read all of it. by_rows: True if a thread for each row of the row block reads it.
    """

    tensor: Tensor
    when: When
    write: bool = False
    tile: str | None = None
    room: bool = False
    times: int = 1
    by_rows: bool = False


@dataclass(frozen=True)
class Totals:
    """A kernel's moves by their sums, without an order."""

    kernel: str
    moves: tuple[Move, ...]
    rooms: tuple[Room, ...] = ()


class TakesWorks(Protocol):
    """A schedule whose `grid` of thread blocks take pieces of work: they ask for `asked_for`, of which `blocks_there` exist, from a
    queue if `queued`, else in turns."""

    @property
    def queued(self) -> bool: ...
    @property
    def blocks_there(self) -> int: ...
    @property
    def asked_for(self) -> int: ...
    @property
    def grid(self) -> int: ...
    def order(self) -> tuple[Array, Array]:
        """The item and the query head of each piece of work, in the order in which they are taken."""


@dataclass(frozen=True)
class Walk:
    """The way of one kernel's thread blocks through the tiles of scores.

    A thread block has one batch (or packed sequence) and key head, and of the axes g, i and j those in `block`. It goes through the
    others in the order of `loop`, the last one fastest, capitals from the last tile down; if `loop` is empty, through all in one
    turn. It visits the tiles that position and masks leave, or `every` tile. `sizes` are rows and columns of a tile, if they differ
    from the schedule's. `heads` are (key heads, query heads of each), if they differ from the problem's; `pack` query heads share a
    tile of rows. Blocks that only pass over rows take `few` registers; `streamed`: the rows of such a block, too few
    for blocks to be followed one by one. `works`: the number of pieces of work, if not all thread blocks find one. `alternate`: the
    thread blocks of so many key heads alternate in the launch. `takes`: how blocks take one piece of work after the other, if
    they do. `any_order`: a launch may have the blocks in another order. `inner_first`: the first of what passes by is asked for
    before what stays. `cluster`: the number of thread blocks that have a piece of work together, each with
    `rooms` for its part of the keys.
    """

    kernel: str
    schedule: TileSchedule
    parts: tuple[Part, ...]
    block: str
    loop: str
    moves: tuple[Move, ...]
    rooms: tuple[Room, ...] = ()
    every: bool = False
    sizes: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None
    pack: int = 1
    few: bool = False
    streamed: int = 0
    works: int | None = None
    alternate: int = 1
    takes: TakesWorks | None = None
    any_order: bool = False
    inner_first: bool = False
    cluster: int = 1

    @property
    def key_heads(self) -> int:
        """Key heads of a batch."""
        return self.schedule.problem.kv_heads if self.heads is None else self.heads[0]

    @property
    def group(self) -> int:
        """Query heads of a key head, or sets of `pack`."""
        p = self.schedule.problem
        return (p.group if self.heads is None else self.heads[1]) // self.pack

    @property
    def blocks(self) -> tuple[int, int]:
        """Br and Bc."""
        return self.sizes or self.schedule.blocks

    def axes(self, when: When) -> str:
        """The axes in which moves of a kernel that come then differ: its thread blocks' and their own."""
        return self.block.lower() + when.axes


def passing(kernel: str, schedule: TileSchedule, parts: tuple[Part, ...], moves: tuple[Move, ...], rows: int) -> Walk:
    """A kernel that passes over rows once, `rows` for each thread block."""
    return Walk(kernel, schedule, parts, "gi", "", moves, every=True, few=True, streamed=rows)


D, D_V, ONE = "head_dim", "head_dim_v", 1
TENSORS: dict[str, tuple[Of, str | int, str | int]] = {
    **dict.fromkeys(("Q", "dQ"), ("query", D, "itemsize")),
    **dict.fromkeys(("O", "dO"), ("query", D_V, "itemsize")),
    **dict.fromkeys(("K", "dK"), ("key", D, "itemsize")),
    **dict.fromkeys(("V", "dV"), ("key", D_V, "itemsize")),
    "O_acc": ("query", D_V, FLOAT32),
    "dQ_acc": ("query", D, FLOAT32),
    **dict.fromkeys(("L", "l", "m", "D", "dsinks"), ("query", ONE, FLOAT32)),
    "bases": ("query", 2, FLOAT32),
    "S": ("scores", ONE, "score_itemsize"),
    **dict.fromkeys(("P", "dP", "dS"), ("scores", ONE, "itemsize")),
    "mask": ("seen", ONE, 1),
    "bias": ("seen", ONE, "bias_itemsize"),
    "dbias": ("seen", ONE, FLOAT32),
    **dict.fromkeys(VECTORS, ("head", ONE, FLOAT32)),
    **dict.fromkeys(("key_lengths", "cache_seqlens"), ("batch", ONE, WORD)),
    "K_new": ("new", D, "itemsize"),
    "V_new": ("new", D_V, "itemsize"),
    "O_part": ("part", D_V, FLOAT32),
    **dict.fromkeys(("m_part", "l_part"), ("part", ONE, FLOAT32)),
    "block_table": ("pages", ONE, WORD),
    "tree_mask": ("newest", ONE, 1),
    **dict.fromkeys(("block_mask", "tiles", "query_tiles"), ("tile", ONE, 1)),
}
"""Tensors by name: the thing for which each has a row, its width and its item size, as numbers or as the problem's attributes."""


def tensor(p: Problem, name: str, of: Of | None = None, width: int | None = None, rounded: int = 1) -> Tensor:
    """A tensor by its name; `of` another thing, or in rows of another `width`, if a kernel reads it so."""
    usual, wide, size = TENSORS[name]
    own, itemsize = (getattr(p, each) if isinstance(each, str) else each for each in (wide, size))
    return Tensor(name, of or usual, own if width is None else width, itemsize, rounded)


def reads(p: Problem, when: When, *names: str, tile: str | None = None) -> tuple[Move, ...]:
    """The moves that read tensors."""
    return tuple(Move(tensor(p, name), when, tile=tile) for name in names)


def writes(p: Problem, when: When, *names: str, tile: str | None = None, room: bool = False) -> tuple[Move, ...]:
    """The moves that write tensors."""
    return tuple(Move(tensor(p, name), when, write=True, tile=tile, room=room) for name in names)


PLACES: dict[str, Of] = {"head": "head", "row": "query", "key": "key", "score": "seen"}


def captured(
    p: Problem, place: str, when: When, asked: When | None = None, *, by_tiles: bool = True, times: int = 1
) -> tuple[Move, ...]:
    """The loads of score and mask functions at a place (`score.Parts`); the mask's move at `asked`, if given."""
    return tuple(
        Move(loaded(form, load, PLACES[place]), asked if asked and form.kind == "mask" else when, times=times)
        for form in functions(p)
        for load in getattr(score.parts(form, by_tiles), place)
    )


def loaded(form: score.Form, load: Load, of: Of) -> Tensor:
    """An array that a function has captured, as one load sees it."""
    return Tensor(score.field(load.name, form.kind), of, 1, score.itemsize(form, load), load=(form, load))


def score_reads(p: Problem, *, by_tiles: bool = False) -> tuple[Move, ...]:
    """The reads, score by score, of a mask where it is needed, of the bias and of functions' arrays."""
    mask, bias = reads(p, MIXED, *["mask"] * p.options.mask), reads(p, VISIT, *["bias"] * p.options.bias)
    return (*mask, *bias, *captured(p, "score", VISIT, MIXED, by_tiles=by_tiles))


def length_reads(p: Problem, times: int = 1) -> tuple[Move, ...]:
    """The move by which a thread block reads its batch's key length."""
    return (Move(tensor(p, "key_lengths"), BEGIN, times=times),) if p.options.padded else ()


def tile_reads(schedule: TileSchedule) -> tuple[Move, ...]:
    """The moves by which a thread block reads the block mask and the states of tiles."""
    names = ["block_mask"] if schedule.problem.options.block_mask is not None else []
    return reads(schedule.problem, SPANNED, *names, *(each.field for each in schedule.mask_tiles[:1]))


def sink_reads(p: Problem, when: When) -> tuple[Move, ...]:
    """The reads of sinks: each row reads its head's sink."""
    return (Move(tensor(p, "sinks"), when, by_rows=True),) if p.options.sinks else ()


def search_reads(packed: Packed | None, axis: str, times: int = 1) -> tuple[Move, ...]:
    """The moves by which a thread block reads bounds: along one axis, to find its sequence, and that sequence's along both."""
    bounds = {} if packed is None else packed.searched(axis)
    return tuple(Move(Tensor(name, "search", number, WORD), BEGIN, times=times) for name, number in bounds.items())


def whole(name: str, elements: int, itemsize: int, *, write: bool = False) -> Move:
    """A move of `elements` in all, wherever they are."""
    return Move(Tensor(name, "whole", elements, itemsize), BEGIN, write)


def functions(problem: Problem) -> tuple[score.Form, ...]:
    """Returns the problem's score and mask function, as far as it has them."""
    return tuple(form for form in (problem.options.score, problem.options.mask_function) if form is not None)


def part_bytes(problem: Problem, rows: int, keys: int) -> int:
    """Bytes of shared memory for the values that score and mask functions read by tiles, for `rows` rows and `keys` keys."""
    found = [score.parts(form) for form in functions(problem)]
    return FLOAT32 * sum(rows * len(each.row) + keys * len(each.key) for each in found)
