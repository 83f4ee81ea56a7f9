"""The suites of tests: the README's command runs a sample of everything, `pytest -m wide` all of it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

MORE = int(os.environ.get("CUPYFLASH_TEST_EXAMPLES", 1))


def place(name: str) -> float:
    """The place of a test's name in a draw, from 0 to 1: the same on any machine, and another one for each CUPYFLASH_TEST_DRAW."""
    key = f"{os.environ.get('CUPYFLASH_TEST_DRAW', '')} {name}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def wide(*case: Any) -> Any:
    """A case for `parametrize` that is in the wide suite only."""
    return pytest.param(*case, marks=pytest.mark.wide)


def problems_each() -> int:
    """The number of random problems of one kernel, whose compilation takes longer: fewer if there are few examples."""
    return 1 if _few else 3


_few = False


def sample(cases: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Cases for `parametrize`: those that are not among the `few` are in the wide suite only, as many as `pairwise` leaves."""
    cases = list(cases)
    assert all(one in cases for one in few), [one for one in few if one not in cases]
    single = [case if isinstance(case, tuple) else (case,) for case in cases]
    left = pairwise(single, [values for case, values in zip(cases, single, strict=True) if case in few])
    return [case if case in few else wide(*values) for case, values in zip(cases, single, strict=True) if values in left]


def pairwise(cases: Iterable[tuple[Any, ...]], kept: Collection[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Some of the cases: any two parameters have, in one of them, each two values that they have in any of all cases.

    Most faults show with two parameters' values; all cases of three and more take the time of many kernels. The `kept` are among
    them, and with CUPYFLASH_TEST_EXAMPLES all are.
    """
    cases = list(cases)
    if MORE > 1 or not cases or len(cases[0]) < 3:
        return cases
    together = [set(combinations(enumerate(map(repr, case)), 2)) for case in cases]
    chosen = {n for n, case in enumerate(cases) if case in kept}
    todo = set().union(*together).difference(*(together[n] for n in chosen))
    while todo:
        best = max(range(len(cases)), key=lambda n: len(together[n] & todo))
        chosen.add(best)
        todo -= together[best]
    return [cases[n] for n in sorted(chosen)]


def sweep(few: int, many: int, **drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test on `few` random examples, and on `many` in the wide suite; `drawn` as for hypothesis.given.

    The test's other arguments are pytest's. Without `drawn` it is given `data`.
    """
    strategies = drawn or {"data": st.data()}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(examples: int, **chosen: Any) -> None:
            global _few
            _few = examples == few
            settings(max_examples=examples * MORE)(given(**strategies)(test))(**chosen)

        signature = inspect.signature(test)
        examples = inspect.Parameter("examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        others = [each for name, each in signature.parameters.items() if name not in strategies]
        run.__signature__ = signature.replace(parameters=[examples, *others])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("examples", [pytest.param(few, marks=pytest.mark.few), wide(many)])(run)

    return decorate
