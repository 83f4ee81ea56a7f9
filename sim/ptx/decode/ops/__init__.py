"""The opcodes, one module a family. Importing this package fills the table of `decode.registry`."""

from ..registry import Coverage, Plan, coverage, decode, known
from . import access, control, copies, floating, integer, logic, matrices, move, rounding, warp

__all__ = [
    "Coverage",
    "Plan",
    "access",
    "control",
    "copies",
    "coverage",
    "decode",
    "floating",
    "integer",
    "known",
    "logic",
    "matrices",
    "move",
    "rounding",
    "warp",
]
