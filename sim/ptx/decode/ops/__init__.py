"""The opcodes: the table of elementwise ones (`elementwise`), and a module for each other family.

Importing this package fills the table of `decode.registry`.
"""

from ..registry import Coverage, Plan, coverage, decode, known
from . import access, control, copies, elementwise, matrices, warp

__all__ = ["Coverage", "Plan", "access", "control", "copies", "coverage", "decode", "elementwise", "known", "matrices", "warp"]
