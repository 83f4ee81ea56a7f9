"""Judging generated kernels: draws inputs, runs a function's kernels on the PTX machine and compares it with a reference."""

from __future__ import annotations

from .draws import Draw
from .judge import check
from .verdict import Fault, Judgement

__all__ = ["Draw", "Fault", "Judgement", "check"]
