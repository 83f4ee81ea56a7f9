"""The tables that a compiled launch and its functions share (`execute.compiled`): places, tags, forms of accesses."""

from __future__ import annotations

from typing import NamedTuple

from ..decode.code import Code
from ..order.shadow import WIDEST
from ..state.lane_sets import WARP

LAUNCH = {
    name: place
    for place, name in enumerate(
        (
            *("budget", "regions", "offs", "parted", "sites", "constants"),
            *("registers", "warps_memory", "template", "warps", "alive"),
            *("grid_x", "grid_y", "shared", "shared_bytes", "states", "written", "read", "updated", "granules"),
            *("segments", "segment_count", "barriers", "exp2", "copies"),
            *("votes", "threads"),
        )
    )
}
"""Places in the table of a launch."""

WARP_STATE = {
    name: place
    for place, name in enumerate(
        (*("alive", "pending", "tag", "global_tag", "barrier", "whole"), *("copies", "head", "tail", "committed"), "vote", "bitmap")
    )
}
"""Places in the memory of a warp: its living lanes, how many groups wait, tags, the number of its barrier and 1, the lanes that it
began with; its records of asynchronous copies, the numbers of the oldest one and of the next, the groups that it has closed; the
number of lanes that hold at a barrier that reduces; then bits of the blocks at which groups wait, and their lanes, one number a
block.
"""

REDUCED_BARRIER = 1 << 8
"""A barrier that reduces has its number and this."""

COPY_SLOTS, COPY_WORDS, COPY_ADDRESSES = 256, 40, 8
"""Asynchronous copies of a warp that may be pending at once, a power of two; numbers of a record, the first of its addresses."""

SEGMENT_WORDS = 8
"""A segment: start, bytes, distance to host memory, distance to the states of its bytes (0: none), shadow (0: nobody writes there),
address of the shadow's granule 0, number, whether it may be written.
"""

SITE_WORDS = 64
"""An access: segment, counts, start and end in shared memory, the instruction's number; then the last addresses without a pattern:
their mask, place in a sector, sectors, different addresses, wavefronts, those without conflicts; then the addresses.
"""
SITE = {name: place for place, name in enumerate(("segment", "counts", "low", "high", "number"))}
KNOWN = 8
DISTANCES = 16

COUNTS = 4
"""Counts of a segment at a site: requests, lanes, sectors and different addresses; of shared memory requests, lanes, wavefronts and
those without bank conflicts."""

WROTE, READ, UPDATED, BY = range(4)
"""Words of a granule's row in the shadow: the last writer, reader and atomic access as tags, and 16 bits for the number of the
instruction of each of them. A tag is block + 1, epoch of the block (the number of its barriers), crowd and thread. The last two
words are there only if something needs them.
"""
KINDS = {"ld": READ, "ldmatrix": READ, "st": WROTE, "stmatrix": WROTE, "cp.async": WROTE, "atom": UPDATED}
CONFLICTS = {READ: (WROTE, UPDATED), WROTE: (WROTE, READ, UPDATED), UPDATED: (WROTE, READ)}
"""The accesses that an access must be ordered behind, by kind."""

COLLECTIVE = ("ldmatrix", "stmatrix")
"""Accesses for all lanes of a warp together."""

THREAD_BITS, EPOCH_BITS = 12, 20
"""A tag's lower bits; the topmost of THREAD_BITS are crowds."""
WARP_CROWD, BLOCK_CROWD, GRID_CROWD = 1 << 10, 1 << 11, -(1 << 63)
"""Other lanes that a reader's tag stands for: of its warp, of its block, or of other blocks."""
CROWDS = GRID_CROWD | BLOCK_CROWD | WARP_CROWD

MEETING, EPOCH = 12, 18
"""The first bit of a tag in shared memory that counts barriers of the warp, and the first that counts those of the block."""
LAST_MEETING = ((1 << (EPOCH - MEETING)) - 1) << MEETING

NOBODY, ROW, ONE, STREWN = range(4)
"""Forms of an access: no lane, one lane behind the other, one address, any. Negative: it gave up."""

ATOMICS = {"add": "add", "min": "min", "max": "max", "and": "and", "or": "or", "xor": "xor"}


class ShadowRow(NamedTuple):
    """The shadow of a kernel: bytes of a granule of global and of shared memory; its parts that are kept."""

    granule: int
    shared_granule: int
    atomics: bool
    numbers: bool
    copies: bool
    """Bytes may be in flight."""

    @classmethod
    def of(cls, code: Code, numbers: bool) -> ShadowRow:
        """`numbers`: the launch is one of a history, in which later ones ask for the instructions."""
        sharing = code.sharing
        copies = any(i.opcode == "cp" for i in code.instructions)
        # Nobody asks for the granules of what is only read, unless other launches may write it.
        widths = (width for place, width in sharing.global_granules.items() if numbers or place == "*" or sharing.writes(place))
        return cls(min([WIDEST, *widths]), sharing.shared_granule, sharing.atomics, numbers, copies)

    @property
    def words(self) -> int:
        return 4 if self.atomics or self.numbers else 2


def access_name(space: str, kind: str, size: int) -> str:
    return f"access_{space}_{kind}_{size}"


def steps(element: str, step: int) -> str:
    """Returns a constant with a multiple of `step` for each lane."""
    return f"<{', '.join(f'{element} {step * n}' for n in range(WARP))}>"
