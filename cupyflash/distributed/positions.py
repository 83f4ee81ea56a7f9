"""Score and mask functions of a part of a call: the same expression, with positions in the whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from cupyflash.expressions.tree import Apply, Load, Name, Node, apply, walk
from cupyflash.request.score import Captured, Form

# What an expression says of position, by the number that a part adds to its own or has in its place.
NUMBERS = {"row": "first_row", "q": "first_query", "k": "first_key", "n_q": "queries", "n_k": "keys"}
# And of packed sequences, which are batches
BATCH = {"b": "first_batch"}


def by_position(form: Form | None) -> bool:
    """True if a function depends on positions."""
    return form is not None and any(isinstance(node, Name) and node.name in NUMBERS for node in walk(form.tree))


@lru_cache(maxsize=256)
def of_part(form: Form, moved: tuple[str, ...] = tuple(NUMBERS)) -> tuple[Form, Mapping[str, str]]:
    """The function for any part, and the numbers that it captures besides: their names, by those of `moved`, which are keys of
    `NUMBERS` and `BATCH`.

    All parts are compiled as one. An index that was a position alone becomes a sum, which is clamped into an axis as any other.
    """
    taken = {one.name for one in form.captured}
    said = {node.name for node in walk(form.tree) if isinstance(node, Name)} & set(moved)
    names = {}
    for position in sorted(said):
        name = (NUMBERS | BATCH)[position]
        while name in taken:
            name += "_"
        names[position] = name
    captured = (*form.captured, *(Captured(name, "int") for name in names.values()))
    tree = _moved(form.tree, names)
    return Form(tree, tuple(sorted(captured, key=lambda one: one.name)), form.kind, form.text), MappingProxyType(names)


def _moved(node: Node, names: Mapping[str, str]) -> Node:
    match node:
        case Name(name=name) if name in names:
            first = Name("int", names[name])
            own = {"row": "row", "q": "row", "k": "k", "b": "b"}.get(name)
            return first if own is None else apply("+", Name("int", own), first)
        case Load(type, name, indices):
            return Load(type, name, tuple(_moved(each, names) for each in indices))
        case Apply(type, operation, operands):
            return Apply(type, operation, tuple(_moved(each, names) for each in operands))
    return node


def numbers_of_part(names: Mapping[str, str], row: int, key: int, n_q: int, n_k: int, batch: int = 0) -> dict[str, int]:
    """The numbers, by name, of a part whose first batch, row and key are these in a whole of n_q rows and n_k keys."""
    values = {"b": batch, "row": row, "q": row + n_k - n_q, "k": key, "n_q": n_q, "n_k": n_k}
    return {name: values[position] for position, name in names.items()}


@lru_cache(maxsize=256)
def without_first(mask: Form | None) -> tuple[Form, tuple[str, str]]:
    """The mask, if any, without a call's first rows and keys; their numbers are captured besides. Also returns the names of these
    numbers."""
    captured = () if mask is None else mask.captured
    names = []
    for name in ("hidden_rows", "hidden_keys"):
        while name in {one.name for one in captured}:
            name += "_"
        names.append(name)
        captured = (*captured, Captured(name, "int"))
    rows, keys = names
    tree = apply("and", *(apply(">=", Name("int", own), Name("int", name)) for own, name in (("row", rows), ("k", keys))))
    tree = tree if mask is None else apply("and", tree, mask.tree)
    text = "" if mask is None else mask.text
    return Form(tree, tuple(sorted(captured, key=lambda one: one.name)), "mask", text), (rows, keys)
