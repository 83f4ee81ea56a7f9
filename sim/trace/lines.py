"""The papers' algorithms line by line, and which line a kernel's move belongs to.

Algorithms 0, 1, 3 and 4 are those of FlashAttention (arXiv 2205.14135, 3 and 4 in its appendix B), FlashAttention-2's are its own 1
and 2 (arXiv 2307.08691), FlashAttention-3's its Algorithm 1, which has the producer's copies (arXiv 2407.08608). Lines say in our
letters what those say; lines that only divide tensors or end a loop are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AlgorithmStep:
    """The part of an algorithm that one kernel does.

    `reads` and `writes` have the line of each tensor's moves; tensors that are not named there (masks and the like) have the line
    `usual`, or the first of `scores`. `first` is the line of a write before any read. `scores` are the lines that work on a tile of
    S. `registers`: what the kernel holds there of the current tiles.
    """

    does: str
    reads: Mapping[str, int] = field(default_factory=dict)
    writes: Mapping[str, int] = field(default_factory=dict)
    first: int | None = None
    scores: tuple[int, ...] = ()
    registers: str = ""
    usual: int | None = None

    def line(self, tensor: str, write: bool, first: bool) -> int | None:
        """The line of a move; `first`: True if the thread block has read nothing yet."""
        if write and first and self.first is not None:
            return self.first
        usual = self.usual if self.usual is not None or not self.scores else self.scores[0]
        return (self.writes if write else self.reads).get(tensor, usual)


@dataclass(frozen=True)
class Algorithm:
    """`lines` by number, each with its depth in loops; `steps` by kernel. Some lines are there only where one of certain tensors
    moves: `only`, by number."""

    title: str
    lines: tuple[tuple[int, int, str], ...]
    steps: Mapping[str, AlgorithmStep]
    only: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def lines_with(self, tensors: Collection[str]) -> list[tuple[int, int, str]]:
        """The lines of a call that moves these tensors."""
        return [line for line in self.lines if line[0] not in self.only or not self.only[line[0]].isdisjoint(tensors)]


FORWARD = {
    "standard": Algorithm(
        "Algorithm 0",
        (
            (1, 0, "load Q, K by blocks, S = Q Kᵀ, write S"),
            (2, 0, "read S, P = softmax(S), write P"),
            (3, 0, "load P, V by blocks, O = P V, write O"),
        ),
        {
            "standard_scores": AlgorithmStep("S = Q Kᵀ, a tile a thread block", scores=(1,), registers="S_ij"),
            "standard_softmax": AlgorithmStep("P = softmax(S), a row a warp", registers="m, l of each row", usual=2),
            "standard_values": AlgorithmStep("O = P V, a row block a thread block", registers="P_ij, O_i", usual=3),
        },
    ),
    "fa1": Algorithm(
        "Algorithm 1",
        (
            (2, 0, "O = 0, l = 0, m = −∞ in HBM"),
            (5, 0, "for 1 ≤ j ≤ Tc"),
            (6, 1, "load K_j, V_j to SRAM"),
            (7, 1, "for 1 ≤ i ≤ Tr"),
            (8, 2, "load Q_i, O_i, l_i, m_i"),
            (9, 2, "S_ij = Q_i K_jᵀ"),
            (10, 2, "m̃ = rowmax(S_ij), P̃ = exp(S_ij − m̃), l̃ = rowsum(P̃)"),
            (11, 2, "m_new, l_new from m_i, l_i, m̃, l̃"),
            (12, 2, "write O_i: old rescaled, plus P̃ V_j"),
            (13, 2, "write l_i = l_new, m_i = m_new"),
        ),
        {
            "fa1_forward": AlgorithmStep(
                "one thread block a head",
                {"K": 6, "V": 6, "Q": 8, "O_acc": 8, "O": 8, "l": 8, "m": 8},
                {"O_acc": 12, "O": 12, "l": 13, "m": 13, "L": 13},
                first=2,
                scores=(9, 10, 11),
                registers="S_ij, P̃_ij, O_i, l_i, m_i",
            )
        },
    ),
    "fa2": Algorithm(
        "Algorithm 1 of its paper",
        (
            (3, 0, "for 1 ≤ i ≤ Tr (thread blocks)"),
            (4, 1, "load Q_i to SRAM"),
            (5, 1, "O_i = 0, l_i = 0, m_i = −∞ on chip"),
            (6, 1, "for 1 ≤ j ≤ Tc"),
            (7, 2, "load K_j, V_j to SRAM"),
            (8, 2, "S_ij = Q_i K_jᵀ"),
            (9, 2, "m_i = max(m_i, rowmax(S_ij)), P̃ = exp(S_ij − m_i), l_i"),
            (10, 2, "O_i = O_i rescaled + P̃ V_j"),
            (12, 1, "O_i = O_i / l_i"),
            (13, 1, "L_i = m_i + log(l_i)"),
            (14, 1, "write O_i"),
            (15, 1, "write L_i"),
        ),
        {
            "fa2_forward": AlgorithmStep(
                "a row block a thread block",
                {"Q": 4, "K": 7, "V": 7},
                {"O": 14, "L": 15},
                scores=(8, 9, 10),
                registers="S_ij, P̃_ij, O_i, l_i, m_i",
            )
        },
    ),
    "fa3": Algorithm(
        "Algorithm 1 of its paper",
        (
            (1, 0, "each row block's place in the queue, the longest first; taken = 0"),
            (2, 0, "producer warp: take the next row block i"),
            (4, 1, "load Q_i by TMA"),
            (6, 1, "for 0 ≤ j < Tc"),
            (8, 2, "load K_j, V_j by TMA into the ring"),
            (11, 0, "consumer warpgroups:"),
            (13, 1, "O_i = 0, l_i = 0, m_i = −∞ on chip"),
            (15, 1, "for 0 ≤ j < Tc"),
            (17, 2, "S_ij = Q_i K_jᵀ by wgmma"),
            (18, 2, "m_i = max(m_i, rowmax(S_ij))"),
            (19, 2, "P̃ = exp(S_ij − m_i), l_i"),
            (21, 2, "O_i = O_i rescaled + P̃ V_j by wgmma"),
            (24, 1, "O_i = O_i / l_i, L_i = m_i + log(l_i)"),
            (25, 1, "write O_i, L_i"),
        ),
        {
            "fa3_queue": AlgorithmStep("128 blocks of rows of all heads a thread block", usual=1),
            "fa3_forward": AlgorithmStep(
                "row blocks, one after the other a thread block",
                {"queue": 2, "taken": 2, "Q": 4, "K": 8, "V": 8},
                {"taken": 2, "O": 25, "L": 25},
                scores=(17, 18, 19, 21),
                registers="S_ij, P̃_ij, O_i, l_i, m_i",
            ),
        },
    ),
    "decode": Algorithm(
        "lines of our own",
        (
            (1, 0, "for each split of a key head's keys (thread blocks)"),
            (2, 1, "n = cache_seqlens, and new keys if any"),
            (3, 1, "load Q_i of all heads of the group to SRAM"),
            (4, 1, "for each block j of the split's keys"),
            (5, 2, "look up the pages of K_j, V_j in block_table"),
            (6, 2, "load K_j, V_j to SRAM"),
            (7, 2, "of new keys: load K_new, V_new there"),
            (8, 2, "and write them behind the cached ones"),
            (9, 2, "S_ij = Q_i K_jᵀ, masked"),
            (10, 2, "m_i = max(m_i, rowmax(S_ij)), P̃ = exp(S_ij − m_i), l_i"),
            (11, 2, "O_i = O_i rescaled + P̃ V_j"),
            (12, 1, "write the split's m_i, l_i, O_i / l_i: m_part, l_part, O_part"),
            (13, 0, "for each row (thread blocks): merge its splits s"),
            (14, 1, "m = max m_s, weights l_s exp(m_s − m) over their sum, and L"),
            (15, 1, "O = Σ weight × O_s"),
            (16, 1, "write O"),
        ),
        {
            "decode": AlgorithmStep(
                "a split of the keys a thread block",
                {"cache_seqlens": 2, "Q": 3, "block_table": 5, "K": 6, "V": 6, "K_new": 7, "V_new": 7, "sinks": 16},
                {"K": 8, "V": 8, "O_part": 12, "m_part": 12, "l_part": 12, "O": 16, "L": 16},
                scores=(9, 10, 11),
                registers="S_ij, P̃_ij, O_i, l_i, m_i",
            ),
            "merge_splits": AlgorithmStep(
                "the splits merged, a row a thread block",
                {"cache_seqlens": 13, "m_part": 14, "l_part": 14, "O_part": 15, "sinks": 16},
                {"O": 16, "L": 14},
                registers="O, l, m",
            ),
        },
        {
            2: frozenset({"cache_seqlens"}),
            5: frozenset({"block_table"}),
            **dict.fromkeys((7, 8), frozenset({"K_new"})),
            **dict.fromkeys((12, 13, 14, 15), frozenset({"O_part"})),
        },
    ),
}


def _row_bases(line: int) -> AlgorithmStep:
    """The step before a backward that makes m and log(l) again; half types only read L."""
    return AlgorithmStep("m and log(l) of each row, made again", scores=(line,), registers="S_ij, m_i, l_i")


BACKWARD = {
    "standard": Algorithm(
        "Algorithm 3",
        (
            (0, 0, "(before: P = exp(Q Kᵀ − L), write P)"),
            (1, 0, "load P, dO by blocks, dV = Pᵀ dO, write dV"),
            (2, 0, "load dO, V by blocks, dP = dO Vᵀ, write dP"),
            (3, 0, "read P, dP, dS = P ∘ (dP − rowsum(P ∘ dP)), write dS"),
            (4, 0, "load dS, K by blocks, dQ = dS K, write dQ"),
            (5, 0, "load dS, Q by blocks, dK = dSᵀ Q, write dK"),
        ),
        {
            "row_bases": _row_bases(0),
            "standard_backward_weights": AlgorithmStep("P = exp(Q Kᵀ − L), a tile a thread block", scores=(0,), registers="P_ij"),
            "standard_backward_values": AlgorithmStep("dV = Pᵀ dO", registers="dV_j", usual=1),
            "standard_backward_weight_gradients": AlgorithmStep("dP = dO Vᵀ", registers="dP_ij", usual=2),
            "standard_backward_softmax": AlgorithmStep("dS, a row a warp", registers="a sum a row", usual=3),
            "standard_backward_queries": AlgorithmStep("dQ = dS K", registers="dQ_i", usual=4),
            "standard_backward_keys": AlgorithmStep("dK = dSᵀ Q", registers="dK_j", usual=5),
        },
    ),
    "fa1": Algorithm(
        "Algorithm 4",
        (
            (5, 0, "dQ = 0, dK = 0, dV = 0 in HBM"),
            (6, 0, "for 1 ≤ j ≤ Tc"),
            (7, 1, "load K_j, V_j to SRAM"),
            (8, 1, "dK̃_j = 0, dṼ_j = 0 on SRAM"),
            (9, 1, "for 1 ≤ i ≤ Tr"),
            (10, 2, "load Q_i, O_i, dO_i, dQ_i, l_i, m_i (here L_i)"),
            (11, 2, "S_ij = Q_i K_jᵀ"),
            (13, 2, "P_ij = exp(S_ij − L_i)"),
            (16, 2, "dṼ_j += P_ijᵀ dO_i"),
            (17, 2, "dP_ij = dO_i V_jᵀ"),
            (19, 2, "D_i = rowsum(dO_i ∘ O_i)"),
            (20, 2, "dS_ij = P_ij ∘ (dP_ij − D_i)"),
            (21, 2, "write dQ_i += dS_ij K_j"),
            (22, 2, "dK̃_j += dS_ijᵀ Q_i"),
            (24, 1, "write dK_j = dK̃_j, dV_j = dṼ_j"),
        ),
        {
            "row_bases": _row_bases(5),
            "fa1_backward": AlgorithmStep(
                "one thread block a key head",
                {"K": 7, "V": 7, "Q": 10, "O": 10, "dO": 10, "L": 10, "bases": 10, "dQ_acc": 10, "dQ": 10},
                {"dQ_acc": 21, "dQ": 21, "dK": 24, "dV": 24},
                first=5,
                scores=(11, 13, 16, 17, 20, 22),
                registers="S_ij, dP_ij, O_i, dQ_i",
            ),
        },
    ),
    "fa2": Algorithm(
        "Algorithm 2 of its paper",
        (
            (3, 0, "dQ = 0 in HBM"),
            (4, 0, "D = rowsum(dO ∘ O), write D"),
            (5, 0, "for 1 ≤ j ≤ Tc (thread blocks)"),
            (6, 1, "load K_j, V_j to SRAM"),
            (7, 1, "dK_j = 0, dV_j = 0 on chip"),
            (8, 1, "for 1 ≤ i ≤ Tr"),
            (9, 2, "load Q_i, dO_i, L_i, D_i"),
            (10, 2, "S_ij = Q_i K_jᵀ"),
            (11, 2, "P_ij = exp(S_ij − L_i)"),
            (12, 2, "dV_j += P_ijᵀ dO_i"),
            (13, 2, "dP_ij = dO_i V_jᵀ"),
            (14, 2, "dS_ij = P_ij ∘ (dP_ij − D_i)"),
            (15, 2, "dQ_i += dS_ij K_j in HBM (atomics)"),
            (16, 2, "dK_j += dS_ijᵀ Q_i"),
            (18, 1, "write dK_j, dV_j"),
            (20, 0, "return dQ, dK, dV: dQ in its own type"),
        ),
        {
            "fa2_backward_rows": AlgorithmStep(
                "D = rowsum(dO ∘ O), dQ = 0",
                writes={"dQ_acc": 3},
                registers="D_i",
                usual=4,
            ),
            "row_bases": _row_bases(4),
            "fa2_backward": AlgorithmStep(
                "a column block a thread block",
                {"K": 6, "V": 6, "Q": 9, "dO": 9, "L": 9, "bases": 9, "D": 9, "dQ_acc": 15},
                {"dQ_acc": 15, "dK": 18, "dV": 18},
                scores=(10, 11, 12, 13, 14, 16),
                registers="S_ij, dP_ij, dK_j, dV_j",
            ),
            "fa2_backward_queries": AlgorithmStep(
                "dQ by itself, a row block a thread block (deterministic)",
                {"Q": 9, "dO": 9, "L": 9, "bases": 9, "D": 9, "K": 6, "V": 6},
                {"dQ": 15},
                scores=(10, 11, 13, 14),
                registers="S_ij, dP_ij, dQ_i",
            ),
            "fa2_backward_finish": AlgorithmStep("dQ rounded to its own type", registers="dQ_i", usual=20),
        },
    ),
}
MASK_TILES = AlgorithmStep("which tiles a mask leaves empty, whole or mixed")
