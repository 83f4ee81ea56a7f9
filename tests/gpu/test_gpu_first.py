"""The most important checks first: each kernel with each option, by the 2x rule (first.py has the list)."""

from __future__ import annotations

import pytest
from chip import STAND_IN, check_backward, check_forward, choose
from first import FIRST, First

from cupyflash import Device


@pytest.mark.parametrize("asked", choose(FIRST, FIRST[::16]), ids=str)
def test_first(asked: First) -> None:
    if lacking := asked.lacking(Device.current()):
        pytest.skip(lacking)
    problem = asked.problem(small=bool(STAND_IN))
    if asked.backward:
        check_backward(problem, asked.algorithm, **asked.flags)
    else:
        check_forward(problem, asked.algorithm)
