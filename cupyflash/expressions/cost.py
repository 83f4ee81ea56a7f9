"""The compile time of an expression, with a limit: no expression may cost NVRTC minutes and gigabytes."""

from __future__ import annotations

from cupyflash.expressions.tree import Apply, Load, Node, walk

# In additions, about, as a kernel repeats the lines for each score that a thread has. Measured (NVRTC 13.5, fa2_forward, float16,
# d 64; of one kind each): 16 sin 17 s and 0.9 GB, 24 % of floats 53 s and 2 GB, 64 log 15 s and 0.7 GB, 64 exp(s / n) 11 s, 64 tanh
# 6 s, 64 exp 2 s, 256 exp 13 s and 0.5 GB, 512 additions of a sum 2 s.
COSTS = {"sin": 64, "cos": 64, "log": 16, "tanh": 8, "/": 8, "exp": 4, "sqrt": 4}
REMAINDER = {"float": 64, "int": 4}
LOAD, AXIS = 2, 2
MOST = 1024


def cost(tree: Node) -> int:
    """The sum of the costs of all parts; equal parts count once."""
    return sum(map(_own, set(walk(tree))))


def _own(node: Node) -> int:
    if isinstance(node, Apply):
        return REMAINDER[node.type] if node.operation in ("%", "//") else COSTS.get(node.operation, 1)
    return LOAD + AXIS * len(node.indices) if isinstance(node, Load) else 0


def require_affordable(tree: Node, what: str) -> None:
    """Raise a ValueError that names `what` if a tree costs more than `MOST`."""
    found = cost(tree)
    if found > MOST:
        raise ValueError(
            f"{what} is too long to compile in seconds: its parts cost {found:,}, allowed are {MOST:,} (sin, cos, % and // of "
            "floats 64 each, log 16, tanh and / 8, exp, sqrt, % and // of ints 4, an element of an array 2 and 2 an axis, all else "
            "1). Values that depend on positions only may be captured as an array"
        )
