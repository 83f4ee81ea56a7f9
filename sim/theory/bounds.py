"""Theorems 2 and 5, lower bounds, and the break-even points of Algorithms 1 and 4: functions of N, d and M in elements."""

from __future__ import annotations

import math


def theorem2_standard(seqlen: int, head_dim: int) -> float:
    """Theorems 2 and 5: standard attention makes Theta(N d + N^2) HBM accesses each way; this is the argument, in elements."""
    return seqlen * head_dim + seqlen**2


def theorem2_flash(seqlen: int, head_dim: int, sram_elements: float) -> float:
    """Theorems 2 and 5: for d <= M <= N d, FlashAttention makes Theta(N^2 d^2 / M) HBM accesses; the argument, in elements."""
    return seqlen**2 * head_dim**2 / sram_elements


def theorem2_holds_for(seqlen: int, head_dim: int, sram_elements: float) -> bool:
    """True if M is in the theorem's range, d <= M <= N d."""
    return head_dim <= sram_elements <= seqlen * head_dim


def lower_bound(seqlen: int, head_dim: int, sram_elements: float) -> float:
    """The lower bound for any exact algorithm, in elements, up to a constant that the proofs leave open.

    M >= d^2: N^2 d^2 / M; M < d^2: N^2 d / sqrt(M) (Saha and Ye; for the backward pass Li et al., arXiv 2410.09397). Compare
    shapes and ratios with it, not levels.
    """
    if sram_elements >= head_dim**2:
        return theorem2_flash(seqlen, head_dim, sram_elements)
    return seqlen**2 * head_dim / math.sqrt(sram_elements)


def break_even_sram(head_dim: int) -> int:
    """M in elements above which Algorithm 1 moves less than standard attention, to leading order in N: 3 d^2.

    With one item size throughout, Algorithm 1 moves 3 d N^2 / Bc elements (Q and O read, O written at each visit),
    12 N^2 d^2 / M at Bc = M / 4d, against 4 N^2 for S and P written and read.
    """
    return 3 * head_dim**2


# Theorem 5 says of Algorithms 3 and 4 what Theorem 2 says of 0 and 1.
theorem5_standard, theorem5_flash = theorem2_standard, theorem2_flash


def theorem5_break_even_sram(head_dim: int) -> float:
    """M in elements above which Algorithm 4 moves less than Algorithm 3, to leading order in N: 20 d^2 / 7.

    With one item size throughout, Algorithm 4 moves 5 d N^2 / Bc elements (Q, O, dO and dQ read, dQ written at each visit),
    20 N^2 d^2 / M at Bc = M / 4d, against 7 N^2 (P read twice, dP written and read, dS written and read twice).
    """
    return 20 * head_dim**2 / 7
