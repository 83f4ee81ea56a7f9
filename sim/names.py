"""Names that the simulator's commands take and print; they need no NumPy."""

from __future__ import annotations

from typing import Literal, get_args

NAMES = {
    "fa1": "FlashAttention",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "standard": "standard",
    "decode": "Flash-Decoding",
}
"""The algorithms of `plan`, and of decoding, as reports name them."""

ERROR, WARNING, NOTE = SEVERITIES = "error", "warning", "note"
"""Wrong on some chip or in some order; undefined, yet every known chip does it; against the PTX ISA, without effect."""

FAIL_ON = {ERROR: (ERROR,), WARNING: (ERROR, WARNING), NOTE: SEVERITIES, "never": ()}
"""Severities that fail a test or a command: errors only, warnings too, notes too, none."""

FORMATS = ("text", "lines", "github", "junit", "sarif", "json")
"""The formats of findings."""

Axis = Literal["sram", "seqlen", "head-dim", "block-cols"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""The axes of Theorem 2, along which traffic is swept."""

FIGURES = ("training", "block_size", "block_sparse", "sram", "softmax", "operations")
"""The papers' figures."""
