"""Costs of accesses: wavefronts of shared memory and L1 with the chip's conflicts, and the sectors that the L1 lacks."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .lanes import Array
from .memory import WarpAccess
from .rates import ChipRates

BANKS, BANK_BYTES = 32, 4


def _degrees(addresses: Array, lanes: Array, size: int, merge: bool = True) -> Array:
    """Returns for each row the wavefronts of its lanes together: the most words that one bank has to give.

    A word that several lanes ask for counts once if they `merge`.
    """
    words = max(size // BANK_BYTES, 1)
    asked = (addresses // BANK_BYTES)[:, :, None] + np.arange(words)
    asked = np.where(lanes[:, :, None], asked, -1).reshape(len(addresses), -1)
    asked = np.sort(asked, axis=1)
    counts = asked >= 0
    if merge:
        counts[:, 1:] &= asked[:, 1:] != asked[:, :-1]
    rows, columns = np.nonzero(counts)
    places = rows * BANKS + asked[rows, columns] % BANKS
    found: Array = np.bincount(places, minlength=BANKS * len(addresses)).reshape(-1, BANKS).max(axis=1)
    return found


def _parts(addresses: Array, lanes: Array, size: int, width: int, merge: bool = True) -> Array:
    """Returns the wavefronts of rows whose lanes go `width` at a time."""
    count = addresses.shape[1] // width
    degrees = _degrees(addresses.reshape(-1, width), lanes.reshape(-1, width), size, merge)
    found: Array = degrees.reshape(-1, count).sum(axis=1)
    return found


def wavefronts(access: WarpAccess, rates: ChipRates, matrices: bool = False) -> Array:
    """Returns the wavefronts of each warp's access: 64 bits a lane go by half warps, 128 by quarters.

    Loads of either kind need half as many if their lanes pair at distance 1, or all at distance 2, and nothing conflicts.
    """
    addresses, lanes, size = access.addresses, access.lanes, access.size
    if size <= BANK_BYTES:
        return _degrees(addresses, lanes, size)
    width = int(rates["shared.lanes_64" if size == 8 else "shared.lanes_128"])
    plain = _parts(addresses, lanes, size, width)
    if access.write or matrices:
        return plain
    least = rates["shared.merged_64" if size == 8 else "shared.merged_128"]
    number = np.arange(addresses.shape[1])
    pairs = np.zeros(len(addresses), np.bool_)
    for distance in (1, 2):
        other = number ^ distance
        alike = (addresses == addresses[:, other]) | ~lanes | ~lanes[:, other]
        pairs |= alike.all(axis=1)
    merged = _parts(addresses, lanes, size, 2 * width)
    return np.where(pairs & (merged <= least), np.minimum(plain, merged), plain)


class SharedMemory:
    """The wavefronts of accesses; a pattern that came before is looked up."""

    def __init__(self, rates: ChipRates) -> None:
        self.rates = rates
        self.known: dict[tuple[int, bool, bool, bytes, bytes], Array] = {}

    def wavefronts(self, access: WarpAccess, matrices: bool = False) -> Array:
        base = int(access.addresses[access.lanes].min(initial=1 << 60)) // 128 * 128
        pattern = np.where(access.lanes, access.addresses - base, 0).tobytes()
        key = access.size, access.write, matrices, pattern, access.lanes.tobytes()
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = wavefronts(access, self.rates, matrices)
        return found


class L1:
    """The lines that a multiprocessor's L1 has, with their sectors; the one that was used last goes last."""

    def __init__(self, rates: ChipRates, shared_bytes: int) -> None:
        self.line, self.sector = int(rates["l1.line"]), int(rates["l1.sector"])
        self.lines = max(int(rates["l1.bytes"]) - shared_bytes, self.line) // self.line
        self.banks = int(rates["l1.tags"])
        self.held: OrderedDict[int, int] = OrderedDict()

    def look_up(self, sectors: Array, load: bool) -> tuple[int, int]:
        """Looks up the different sectors of a warp's access; returns the clocks of the tags and how many sectors go to the L2.

        Only loads find and leave sectors. The lines' tags lie in banks, each of which gives one a clock.
        """
        lines = sectors * self.sector // self.line
        different = np.unique(lines)
        folded = different ^ different >> 2 ^ different >> 4 ^ different >> 6 ^ different >> 8
        tags = int(np.bincount(folded & self.banks - 1).max(initial=0))
        if not load:
            return tags, len(sectors)
        missed, held = 0, self.held
        for sector, line in zip(sectors.tolist(), lines.tolist(), strict=True):
            bit = 1 << sector % (self.line // self.sector)
            has = held.get(line, 0)
            if has & bit:
                held.move_to_end(line)
                continue
            missed += 1
            held[line] = has | bit
            held.move_to_end(line)
            if len(held) > self.lines:
                held.popitem(last=False)
        return tags, missed


def sectors_of(addresses: Array, size: int, sector: int) -> Array:
    """Returns the different sectors that some addresses touch."""
    first = addresses // sector
    return np.unique(np.concatenate([first, (addresses + size - 1) // sector]))
