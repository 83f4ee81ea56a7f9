"""Addresses of shared::cluster: the shared memory of all blocks of a cluster as one window.

PTX ISA, "State Spaces: Shared State Space", "mapa". Such an address is FLAG | rank of a block in its cluster << RANK_SHIFT |
offset in that block's shared memory. A plain offset, the address of shared::cta, is one too: it means the own block. A
generic address to shared memory is SHARED_WINDOW + either.
"""

from __future__ import annotations

import numpy as np

from ..state.lanes import Lanes
from ..text.types import Array

RANK_SHIFT, RANK_BITS = 24, 5
FLAG = 1 << 30
"""Set in an address that names a rank, the own one included."""

OFFSET = (1 << RANK_SHIFT) - 1
RANKS = (1 << RANK_BITS) - 1
"""More than any cluster has: ranks from here on are all nobody's."""
NOBODY = -1


def names_rank(addresses: Array) -> Array:
    """Which of the addresses of shared::cluster (of any integer type, less SHARED_WINDOW) name a rank."""
    found: Array = addresses >> addresses.dtype.type(RANK_SHIFT + RANK_BITS) == FLAG >> RANK_SHIFT + RANK_BITS
    return found


def cluster_address(rank: Array, addresses: Array) -> Array:
    """mapa: what `addresses` (less SHARED_WINDOW) are in the blocks of these ranks, in the type of `addresses`."""
    kind = addresses.dtype.type
    offset = np.where(names_rank(addresses), addresses & kind(OFFSET), addresses)
    address: Array = (kind(FLAG) | (np.minimum(rank, RANKS).astype(addresses.dtype) << kind(RANK_SHIFT)) | offset).astype(
        addresses.dtype
    )
    return address


def rank_of(lanes: Lanes, addresses: Array) -> Array:
    """getctarank (int64): the rank that each address names, else that of the lane's own block."""
    named = addresses.astype(np.int64)
    own = lanes.block % lanes.wave.cluster
    return np.where(names_rank(named), named >> RANK_SHIFT & RANKS, own)


def targets(lanes: Lanes, addresses: Array) -> tuple[Array, Array]:
    """(block of the wave, offset in its shared memory), int64, one a lane, of addresses of shared::cluster (less SHARED_WINDOW).

    The block is NOBODY where the cluster has no such rank. Offsets are not checked.
    """
    cluster = lanes.wave.cluster
    rank = rank_of(lanes, addresses)
    named = addresses.astype(np.int64)
    offset = np.where(names_rank(named), named & OFFSET, named)
    return np.where(rank < cluster, lanes.block - lanes.block % cluster + rank, NOBODY), offset
