"""The opcodes, one module a family. Importing this package fills the table of `decode.registry`."""

from ..registry import Coverage, Plan, coverage, decode
from . import (
    access,
    address,
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
    "address",
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
    "logic",
    "mbarrier",
    "move",
    "tensor",
    "warp",
    "wmma",
]
