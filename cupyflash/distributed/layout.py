"""The positions of a sequence that each rank holds, and the ranks whose keys are there at each step of a ring."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from cupyflash.basics import LAYOUTS as LAYOUTS
from cupyflash.basics import MOST_RANKS as MOST_RANKS
from cupyflash.basics import is_number
from cupyflash.request.options import require_choice
from cupyflash.request.problem import checked_size

# Chunks begin at multiples of this: whole tiles of rows, whole 16 bytes of anything that is a number a row.
UNIT = 32

Part = tuple[range, ...]
"""The positions that one rank holds: ranges in rising order, some perhaps empty."""


def parts(length: int, ranks: int, layout: str) -> tuple[Part, ...]:
    """The global positions of each rank, as ranges in order.

    "contiguous": `ranks` chunks, rank r has chunk r. "zigzag": 2 `ranks` chunks, rank r has chunk r and chunk 2 `ranks` - 1 - r, so
    that under a causal mask all ranks have the same work. Chunk c of n begins at unit floor(c U / n) of U = ceil(length / 32) units
    of 32 positions, the last one ends with the sequence: chunks differ by at most a unit, and some are empty if U < n.

    Raises TypeError or ValueError that names the argument.
    """
    length, ranks = checked_size("length", length), checked_ranks(ranks)
    require_choice("layout", layout, LAYOUTS)
    return _parts(length, ranks, layout)


def part_length(part: Part) -> int:
    """The number of positions in a part."""
    return sum(map(len, part))


class Chunk(NamedTuple):
    """A stretch of the positions that a rank holds, and its begin in the rank's part."""

    positions: range
    start: int

    @property
    def there(self) -> slice:
        """The chunk in the sequence."""
        return slice(self.positions.start, self.positions.stop)

    @property
    def here(self) -> slice:
        """The chunk in the rank's part."""
        return slice(self.start, self.start + len(self.positions))

    def within(self, begin: int, end: int) -> range:
        """The positions from begin to end that are in it."""
        return range(max(begin, self.positions.start), max(min(end, self.positions.stop), begin, self.positions.start))

    def local(self, positions: range) -> range:
        """The places of some positions in the rank's part."""
        shift = self.start - self.positions.start
        return range(positions.start + shift, positions.stop + shift)


def placed(part: Part) -> tuple[Chunk, ...]:
    """The chunks of a part that are not empty."""
    starts = accumulate(map(len, part), initial=0)
    return tuple(Chunk(chunk, start) for chunk, start in zip(part, starts, strict=False) if chunk)


def arrivals(rank: int, k_parts: tuple[Part, ...], shifts: tuple[int, ...], gather: bool) -> list[tuple[int, Part]]:
    """The rank whose keys are there at each step, and those keys: of the rank `shift` before this one, or all at once if they are
    gathered."""
    if gather:
        return [(rank, (range(sum(map(part_length, k_parts))),))]
    sources = [(rank - shift) % len(k_parts) for shift in shifts]
    return [(source, k_parts[source]) for source in sources]


@lru_cache(maxsize=64)
def _parts(length: int, ranks: int, layout: str) -> tuple[Part, ...]:
    if layout == "contiguous":
        return tuple((chunk,) for chunk in chunks(length, ranks))
    cut = chunks(length, 2 * ranks)
    return tuple((cut[rank], cut[-1 - rank]) for rank in range(ranks))


def chunks(length: int, count: int) -> tuple[range, ...]:
    """A sequence in `count` chunks of whole units, as equal as these allow."""
    units = -(-length // UNIT)
    bounds = [min(length, UNIT * (c * units // count)) for c in range(count)] + [length]
    return tuple(range(start, stop) for start, stop in pairwise(bounds))


def checked_ranks(ranks: object) -> int:
    """A number of ranks. TypeError or ValueError that names it."""
    if not is_number(ranks):
        raise TypeError(f"ranks must be an integer, got {ranks!r}")
    number = int(ranks)
    if not 1 <= number <= MOST_RANKS:
        raise ValueError(f"ranks must be between 1 and {MOST_RANKS:,}, got {ranks}")
    return number
