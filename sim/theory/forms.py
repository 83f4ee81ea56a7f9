"""The closed forms of one query head in plain numbers: visits of row blocks, and the rows that each algorithm moves.

The rest of this folder makes bytes per tensor of them, and `sim.learn` translates them to JavaScript for its page: they have
numbers, dicts of numbers and arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping

from cupyflash.sim.theory.sums import clipped_sum, count_below

FLOAT32 = 4
Rows = dict[str, int]
"""Rows of each tensor; of S, P, dP and dS elements."""


def blocks_in(length: int, size: int) -> int:
    """The number of blocks of `size` that cover a length; the last may be short."""
    return -(-length // size)


def seen_range(rows: int, keys: int, block_rows: int, left: int, right: int) -> tuple[int, int]:
    """(begin, end) of the row blocks whose rows see any key; row r sees the keys from r - left to r + right."""
    if keys == 0 or rows + right <= 0:  # the last row sees nothing
        return 0, 0
    begin = count_below(rows // block_rows, block_rows, block_rows + right, 1)
    return begin, count_below(blocks_in(rows, block_rows), block_rows, -left, keys)


def col_range(rows: int, keys: int, block_rows: int, block_cols: int, left: int, right: int, block: int) -> tuple[int, int]:
    """(begin, end) of the column blocks that row block `block`, one of `seen_range`, sees."""
    first = block * block_rows
    end = min(first + block_rows, rows)
    return max(first - left, 0) // block_cols, blocks_in(min(end + right, keys), block_cols)


def visited(rows: int, keys: int, block_rows: int, block_cols: int, left: int, right: int) -> tuple[int, int, int, int, int]:
    """(R, rows, keys, blocks, ends) of `Visits` for a head without a block mask."""
    begin, end = seen_range(rows, keys, block_rows, left, right)
    full, tail = divmod(rows, block_rows)
    n = max(0, min(end, full) - begin)  # the seen row blocks of block_rows rows
    start = begin * block_rows
    upper = clipped_sum(n, block_rows, start + block_rows + right, keys, block_cols, block_cols - 1)
    blocks = upper - clipped_sum(n, block_rows, start - left, keys, block_cols)
    row_visits, seen = block_rows * blocks, block_rows * n
    last = blocks_in(keys, block_cols) - 1  # the last column block, which may be short
    ends = n - count_below(n, block_rows, start + block_rows + right, last * block_cols + 1)
    if tail and begin <= full < end:
        first, stop = col_range(rows, keys, block_rows, block_cols, left, right, full)
        row_visits, seen, blocks = row_visits + tail * (stop - first), seen + tail, blocks + stop - first
        ends += rows + right > last * block_cols  # so does the last row, unless a window ends before its own key
    return row_visits, seen, blocks * block_cols - ends * (-keys % block_cols), blocks, ends


def loaded_keys(rows: int, keys: int, block_rows: int, block_cols: int, left: int, right: int, room: int) -> int:
    """The keys of the column blocks that any row block visits, counted up to key `room`."""
    begin, end = seen_range(rows, keys, block_rows, left, right)
    if begin == end:
        return 0
    first = col_range(rows, keys, block_rows, block_cols, left, right, begin)[0]
    stop = col_range(rows, keys, block_rows, block_cols, left, right, end - 1)[1]
    return min(stop * block_cols, room) - first * block_cols


def row_bytes(head_dim: int, head_dim_v: int, itemsize: int, score_itemsize: int) -> Rows:
    """Bytes of a row of each tensor; of an element of S, P, dP and dS. All others have FLOAT32."""
    of_keys, of_values = head_dim * itemsize, head_dim_v * itemsize
    each = dict.fromkeys(("Q", "K", "K_new", "dQ", "dK"), of_keys)
    each |= dict.fromkeys(("V", "O", "V_new", "dO", "dV"), of_values)
    each |= dict.fromkeys(("P", "dP", "dS"), itemsize)
    partial = blocks_in(head_dim_v, 4) * 4 * FLOAT32
    beside = {"S": score_itemsize, "O_acc": head_dim_v * FLOAT32, "dQ_acc": head_dim * FLOAT32}
    return each | beside | {"O_part": partial, "bases": 2 * FLOAT32}


def bytes_of(rows: Mapping[str, int], each: Mapping[str, int]) -> Rows:
    """Bytes of so many rows of each tensor, by the bytes of a row."""
    return {name: number * each.get(name, FLOAT32) for name, number in rows.items()}


def standard(rows: int, keys: int, scores: int) -> tuple[Rows, Rows]:
    """Algorithm 0, each input of each step read once: rows that are read, rows that are written."""
    return {"Q": rows, "K": keys, "V": keys, "S": scores, "P": scores}, {"S": scores, "P": scores, "O": rows}


def fa1(rows: int, loaded: int, row_visits: int) -> tuple[Rows, Rows]:
    """Algorithm 1: Q, O, l and m are read at each of R visits of a row, and O, l and m written, and once to begin.

    O_acc is O between the visits, in float32; the last of its R + Nq writes is O's.
    """
    R = row_visits
    read = {"Q": R, "K": loaded, "V": loaded, "O_acc": R, "l": R, "m": R}
    return read, {"O_acc": R, "O": rows, "l": R + rows, "m": R + rows}


def fa2(rows: int, seen: int, keys: int) -> tuple[Rows, Rows]:
    """FlashAttention-2: the rows of Q that see a key once, K and V at each visit, O once."""
    return {"Q": seen, "K": keys, "V": keys}, {"O": rows}


def decode(rows: int, keys: int, parts: int) -> tuple[Rows, Rows]:
    """Decoding: K and V once, O once, and `parts` rows of splits' O, m and l written and read again; all but Q."""
    of_splits = {"O_part": parts, "m_part": parts, "l_part": parts}
    return {"K": keys, "V": keys, **of_splits}, {"O": rows, **of_splits}


def standard_backward(rows: int, keys: int, made: int, scores: int) -> tuple[Rows, Rows]:
    """Algorithm 3, P given, each input of each step read once; `made` rows of dK and dV, which are a key head's, are written."""
    read = {"Q": rows, "K": keys, "V": keys, "dO": 2 * rows, "P": 2 * scores, "dP": scores, "dS": 2 * scores}
    return read, {"dP": scores, "dS": scores, "dQ": rows, "dK": made, "dV": made}


def fa1_backward(rows: int, keys: int, loaded: int, row_visits: int) -> tuple[Rows, Rows]:
    """Algorithm 4: Q, O, dO and dQ are read at each of R visits of a row, and dQ written, and once to begin; dK and dV are
    written once to begin, and once for the column blocks that are loaded.

    dQ_acc is dQ between the visits, in float32; the last of its R + Nq writes is dQ's.
    """
    R = row_visits
    read = {"Q": R, "K": loaded, "V": loaded, "O": R, "dO": R, "dQ_acc": R}
    return read, {"dQ_acc": R, "dQ": rows, "dK": keys + loaded, "dV": keys + loaded}


def split_bytes(rows: int, cols: int, head_dim: int, warps: int) -> dict[str, dict[str, int]]:
    """Bytes of shared memory that the lanes ask for in one tile of half types, by splitting and by what moves (d_v = d)."""
    q, kv, o = rows * head_dim * 2, 2 * cols * head_dim * 2, rows * head_dim * 4
    maxima = warps * rows * 4
    return {
        "split-Q": {"Q": q, "K and V": warps * kv, "O": 0, "maxima": 0},
        "split-K": {"Q": warps * q, "K and V": kv, "O": 2 * warps * o, "maxima": maxima + warps * maxima},
    }
