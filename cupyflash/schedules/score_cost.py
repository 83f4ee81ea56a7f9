"""The cost of a score function for a multiprocessor, for the models that choose tiles and kernels."""

from __future__ import annotations

from functools import lru_cache

from cupyflash.expressions.tree import Apply, Load, depends_on, walk
from cupyflash.request.problem import Problem
from cupyflash.request.score import Form, of_head

# Instructions of an operation of one score, where not one (machine code of sm_80 and sm_90); of a load, and of each of its axes.
ISSUED = {"/": 6, "%": 20, "tanh": 14, "exp": 4, "log": 14, "sqrt": 4, "sin": 40, "cos": 40}
LOAD, AXIS = 3, 3
# Of those, for the unit that has exponentials; it converts integers too, as slowly.
SPECIAL = {"tanh": 2, "exp": 1, "sqrt": 1, "float": 1}
# With a score function every block takes the masked path, which asks where each score is.
PLACED = 2.0


@lru_cache(maxsize=256)
def _of_form(form: Form) -> tuple[float, float]:
    issued, special = PLACED, 0.0
    for node in set(walk(form.tree)):
        if not depends_on(node) & {"score", "column"}:
            continue  # once a row, or a head
        if isinstance(node, Apply):
            issued += ISSUED.get(node.operation, 1)
            special += SPECIAL.get(node.operation, 0)
        elif isinstance(node, Load) and node not in of_head(form):
            issued += LOAD + AXIS * len(node.indices)
    return issued, special


def of_score(problem: Problem) -> tuple[float, float]:
    """(instructions, exponentials or instructions of equal cost) of the problem's score function for each score; (0, 0) without
    one."""
    return (0.0, 0.0) if problem.options.score is None else _of_form(problem.options.score)


def reads_scores(problem: Problem) -> bool:
    """True if each score reads an element of its own for the score function."""
    form = problem.options.score
    return form is not None and len(of_head(form)) < len(form.loads)
