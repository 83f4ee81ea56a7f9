"""The derivative by the score, or by a captured element, as a tree of the same kind.

The rule of each operation is in `tree.OPERATIONS`, in the language itself. A part that does not depend on it has no term: it may be
infinite or NaN, and the derivative is still right.
"""

from __future__ import annotations

from collections.abc import Sequence

from cupyflash.expressions.parse import parse
from cupyflash.expressions.tree import ONE, OPERATIONS, Apply, Name, Node, Number, apply

ZERO = Number("float", 0.0)


SCORE = Name("float", "s")


def derivative(tree: Node, by: Node = SCORE) -> Node | None:
    """The derivative of a tree by s, or by a load; None if the tree does not depend on it, or only in steps."""
    if tree == by:
        return ONE
    if not isinstance(tree, Apply) or tree.type != "float":
        return None
    return _of_operation(tree, [derivative(operand, by) for operand in tree.operands])


def _of_operation(tree: Apply, inner: Sequence[Node | None]) -> Node | None:
    """Apply the operation's rule; its operands have the derivatives `inner`."""
    rule, operands = OPERATIONS[tree.operation], list(tree.operands)
    if not any(inner):
        return None
    if rule.choice:
        condition = {"c": operands.pop(0)} if tree.operation == "where" else {}
        tangents = [ZERO if one is None else one for one in inner[-2:]]
        return parse(rule.choice, condition | dict(zip(("a", "b", "da", "db", "y"), (*operands, *tangents, tree), strict=True)))
    names = dict(zip("ab", operands, strict=False)) | {"y": tree}
    terms = [parse(term, names | {"d": one}) for term, one in zip(rule.terms, inner, strict=False) if one is not None]
    total = None
    for term in terms:
        total = term if total is None else apply("+", total, term)
    return total
