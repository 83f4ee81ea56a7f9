"""Score and mask functions as an operation's arguments: a text with expressions and numbers, and the captured tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cupyflash.request.score import Mask, Score

KINDS = {"score": Score, "mask": Mask}


def text_of(**given: tuple[str, dict[str, Any], Sequence[str]]) -> str:
    """The text of functions by kind: (expression, captured numbers, names of captured tensors, in their order)."""
    return json.dumps(given)


def functions_of(text: str, captured: Sequence[Any]) -> dict[str, Any]:
    """The Score and the Mask of such a text, by keyword, with their captured arrays."""
    arrays, made = list(captured), {}
    for kind, (expression, numbers, names) in json.loads(text).items() if text else ():
        made[kind] = KINDS[kind](expression, **numbers, **{name: arrays.pop(0) for name in names})
    return made
