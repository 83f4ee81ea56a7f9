"""The numbers of the page: the closed forms of `sim.theory` for each section's picture, and small models beside them.

`javascript.translated` makes the page's functions of these, so they keep to its part of Python.
"""

from __future__ import annotations

import math

from cupyflash.sim.theory import forms
from cupyflash.sim.theory.bounds import break_even_sram
from cupyflash.tiling import paper_sizes

FLOAT32 = 4


def tiles(sram_elements: int, head_dim: int) -> dict[str, int]:
    """The paper's Br and Bc for an SRAM of M elements, the M at which standard attention moves as much, both in elements."""
    block_rows, block_cols = paper_sizes(sram_elements, head_dim)
    return {"block_rows": block_rows, "block_cols": block_cols, "break_even": break_even_sram(head_dim)}


def forward(
    algorithm: str, seqlen: int, head_dim: int, block_rows: int, block_cols: int, causal: bool, itemsize: int
) -> dict[str, dict[str, int]]:
    """Bytes that one head reads and writes, by tensor, with N queries and N keys: `theory.traffic` of a schedule with these
    blocks. Standard attention's are `theory.standard_ideal`."""
    right = 0 if causal else 2 * seqlen
    found = forms.visited(seqlen, seqlen, block_rows, block_cols, 2 * seqlen, right)
    if algorithm == "fa1":
        loaded = forms.loaded_keys(seqlen, seqlen, block_rows, block_cols, 2 * seqlen, right, seqlen)
        read, written = forms.fa1(seqlen, loaded, found[0])
    elif algorithm == "fa2":
        read, written = forms.fa2(seqlen, found[1], found[2])
    else:
        read, written = forms.standard(seqlen, seqlen, seqlen * seqlen)
    each = forms.row_bytes(head_dim, head_dim, itemsize, itemsize)
    return {"read": forms.bytes_of(read, each), "written": forms.bytes_of(written, each)}


def online(scores: list[float], values: list[float], block: int, most_growth: float) -> list[dict[str, float]]:
    """Online softmax over blocks of scores, a state after each block: m, l, O (not divided yet), the factor `scale` that l and O
    were multiplied by, and the block's largest score `top`.

    A maximum that grows by no more than `most_growth` is not taken: m is then the old one, and nothing is rescaled.
    """
    m, l, O = -math.inf, 0.0, 0.0  # noqa: E741 (the paper's names)
    steps = []
    for begin in range(forms.blocks_in(len(scores), block)):
        first = begin * block
        end = min(first + block, len(scores))
        top = max(scores[first:end])
        base = top if top > m + most_growth else m
        scale = math.exp(m - base)
        l, O = l * scale, O * scale  # noqa: E741
        for n in range(first, end):
            p = math.exp(scores[n] - base)
            l, O = l + p, O + p * values[n]  # noqa: E741
        m = base
        steps.append({"top": top, "scale": scale, "m": m, "l": l, "O": O})
    return steps
