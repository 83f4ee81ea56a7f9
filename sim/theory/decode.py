"""The closed form of decoding's HBM traffic: K and V once a key head and row tile, partial results written, then read."""

from __future__ import annotations

from collections import Counter

from cupyflash.schedules import DecodeSchedule
from cupyflash.sim.theory import forms
from cupyflash.sim.theory.forms import blocks_in
from cupyflash.sim.theory.visits import head_bytes, in_bytes, score_bytes
from cupyflash.sim.traffic import Traffic


def decode_traffic(schedule: DecodeSchedule) -> Traffic:
    """Bytes per tensor, each sequence with its own length."""
    heads, every = schedule.problem.kv_heads, schedule.lengths()
    return Traffic.summed((batches * heads, _key_head(schedule, cached)) for cached, batches in every.items())


def _key_head(schedule: DecodeSchedule, cached: int) -> Traffic:
    """The traffic of a key head whose sequence has `cached` keys."""
    p, cache, group = schedule.problem, schedule.cache, schedule.group
    rows, keys, split = p.seqlen_q * group, cached + cache.appended, schedule.splits > 1
    old = new = parts = pages = 0  # keys of the cache, new keys, rows of splits, places of pages
    for tile in range(blocks_in(rows, schedule.block_rows)):
        here = min(schedule.block_rows, rows - tile * schedule.block_rows)
        begin, end = _read(schedule, cached, tile)
        splits = min(schedule.splits, blocks_in(end - begin, schedule.block_cols))
        old += max(0, min(end, cached) - begin)
        new += max(0, end - max(begin, cached))
        parts += here * splits
        pages += _pages(schedule, begin, end, splits)
    looks = blocks_in(rows, schedule.block_rows) * schedule.splits + (rows if split else 0)
    read, written = forms.decode(rows, old, parts * split)
    read |= {"Q": parts, "K_new": new, "V_new": new, "sinks": rows * p.options.sinks}
    read |= {"cache_seqlens": looks * p.options.padded, "block_table": pages}
    of_scores = Counter(tree_mask=_scores(schedule, keys, max(0, keys - p.seqlen_q)) if cache.tree else 0)
    of_scores += head_bytes(p, parts) + score_bytes(p, _scores(schedule, keys))
    written |= {"K": cache.appended, "V": cache.appended, "L": rows * schedule.lse}
    return Traffic.of(in_bytes(p, read) + of_scores, in_bytes(p, written))


def key_bytes(schedule: DecodeSchedule) -> int:
    """Bytes of the rows of K and V that some query of their sequence sees or that are new, each row once."""
    p, appended = schedule.problem, schedule.cache.appended
    rows = 0
    for cached, batches in schedule.lengths().items():
        keys = cached + appended
        left, right = _sides(schedule, keys)
        begin, end = max(0, -left), max(0, min(keys, p.seqlen_q + right))
        seen = range(begin, end)
        rows += batches * (len(seen) + appended - len(range(max(begin, cached), end)))
    return rows * p.kv_heads * (p.head_dim + p.head_dim_v) * p.itemsize


def splits_with_keys(schedule: DecodeSchedule) -> int:
    """The number of thread blocks, over all sequences, that read any keys."""
    total = 0
    for cached, batches in schedule.lengths().items():
        for tile in range(schedule.row_tiles):
            begin, end = _read(schedule, cached, tile)
            total += batches * schedule.problem.kv_heads * min(schedule.splits, blocks_in(end - begin, schedule.block_cols))
    return total


def _sides(schedule: DecodeSchedule, keys: int) -> tuple[int, int]:
    """(left, right): query i sees the keys from i - left to i + right; "no limit" is a number beyond all keys."""
    p, far = schedule.problem, schedule.problem.seqlen_q + keys
    left, right = (far if side is None else side for side in (p.options.left, p.options.right))
    return left - (keys - p.seqlen_q), right + keys - p.seqlen_q


def _read(schedule: DecodeSchedule, cached: int, tile: int) -> tuple[int, int]:
    """The keys begin <= key < end that a row tile reads: whole blocks, up to the last key. The last tile reads all new keys."""
    keys, cols, rows = cached + schedule.cache.appended, schedule.block_cols, schedule.block_rows
    left, right = _sides(schedule, keys)
    first, last = tile * rows // schedule.group, (min((tile + 1) * rows, schedule.rows) - 1) // schedule.group
    begin, end = max(0, first - left), max(0, min(keys, last + right + 1))
    if schedule.cache.appended and tile == blocks_in(schedule.rows, rows) - 1:
        begin = min(begin, cached)
    return (begin // cols * cols, min(keys, blocks_in(end, cols) * cols)) if begin < end else (0, 0)


def _pages(schedule: DecodeSchedule, begin: int, end: int, splits: int) -> int:
    """The number of pages that hold some of these keys; a page that two splits share counts twice."""
    page, cols = schedule.cache.page_size, schedule.block_cols
    if page is None or begin == end:
        return 0
    blocks = blocks_in(end - begin, cols)
    bounds = [begin + blocks * split // splits * cols for split in range(1, splits)]
    return blocks_in(end, page) - begin // page + sum(bound % page != 0 for bound in bounds)


def _scores(schedule: DecodeSchedule, keys: int, first: int = 0) -> int:
    """The number of scores, for keys from `first` on, that position lets a query see."""
    n_q, (left, right) = schedule.problem.seqlen_q, _sides(schedule, keys)
    return schedule.group * sum(max(0, min(keys, i + right + 1) - max(first, i - left)) for i in range(n_q))
