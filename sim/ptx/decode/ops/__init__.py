"""The opcodes, one module a family. Importing this package fills the table of `decode.registry`."""

from ..registry import Coverage, Plan, coverage, decode, known
from . import (
    access,
    approximate,
    compare,
    control,
    convert,
    copy,
    floating,
    half,
    integer,
    logic,
    mbarrier,
    move,
    tensor,
    warp,
    wmma,
)

__all__ = [
    "Coverage",
    "Plan",
    "access",
    "approximate",
    "compare",
    "control",
    "convert",
    "copy",
    "coverage",
    "decode",
    "floating",
    "half",
    "integer",
    "known",
    "logic",
    "mbarrier",
    "move",
    "tensor",
    "warp",
    "wmma",
]
