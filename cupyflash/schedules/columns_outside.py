"""What FlashAttention's Algorithms 1 and 4 (arXiv 2205.14135) have in common: K/V blocks outside, Q blocks inside."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules.base import GRANULE, MAX_BLOCK_ROWS, Move, Phase, TileSchedule, Visit, Visited
from cupyflash.schedules.moves import mask_moves, scores_seen, visited_scores
from cupyflash.tiling import TileSize, paper_blocks, round_down, shrink_to_fit


def fit_paper_blocks(
    problem: Problem, device: Device, shared_bytes: Callable[[Problem, int, int], int], what: str, residents: str
) -> TileSize:
    """The paper's blocks rounded down to tensor core tiles, and further until what is in shared memory fits the SRAM.

    `shared_bytes(problem, block_rows, block_cols)` are those bytes, of the `residents`; `what` is the algorithm. Raises
    `DoesNotFit`.
    """
    paper = paper_blocks(problem, device)
    rounded = round_down(paper.block_cols, GRANULE)
    rows = min(round_down(paper.block_rows, GRANULE), MAX_BLOCK_ROWS)

    def smaller(block_rows: int, block_cols: int) -> tuple[int, int] | None:
        if block_cols == GRANULE:
            return None
        return min(block_rows, block_cols - GRANULE), block_cols - GRANULE

    block_rows, block_cols = shrink_to_fit(
        (rows, rounded),
        smaller,
        lambda r, c: shared_bytes(problem, r, c),
        device,
        f"{what} at head_dim {problem.head_dim} {problem.dtype}",
    )
    reasons = [f"in steps of {GRANULE}: {rounded} columns"]
    if block_cols < rounded:
        reasons.append(f"{residents} fit at {block_cols} columns")
    if rows == MAX_BLOCK_ROWS < paper.block_rows:
        reasons.append(f"the register file holds {MAX_BLOCK_ROWS} rows")
    reasons.append(f"{shared_bytes(problem, block_rows, block_cols):,} of {device.sram_per_block:,} bytes")
    return TileSize(block_rows, block_cols, "; ".join(reasons))


class ColumnsOutside(TileSchedule):
    """A schedule whose outer steps are column blocks, each of which the row blocks that see it visit."""

    @abstractmethod
    def _visit(self, times: int, rows: int, last: bool, masks: tuple[Move, ...] = ()) -> Visit:
        """A row block of `rows` rows in an outer step; `last` if it is its last visit."""

    @abstractmethod
    def _outer(self, times: int, cols: int, visits: tuple[Visit, ...]) -> Phase:
        """An outer step with `cols` rows of K and V, and its visits."""

    def _outer_steps(self, heads: list[Visited], alike: int, keys: int, literal: bool) -> Iterator[Phase]:
        """All of them, for query heads of which `alike` each visit what one of `heads` says."""
        # The column blocks that any row block of any head visits; only the one with the last key may be short.
        columns = np.unique(np.concatenate([visited.columns for visited in heads]))
        tail = (keys - 1) // self.block_cols
        tail_cols = keys - tail * self.block_cols
        if literal:
            for j in columns.tolist():
                cols = tail_cols if j == tail else self.block_cols
                yield self._outer(1, cols, tuple(visit for each in heads * alike for visit in self._walk(j, cols, each)))
            return
        for cols, lo, hi in ((self.block_cols, 0, tail), (tail_cols, tail, tail + 1)):
            steps = int(((lo <= columns) & (columns < hi)).sum())
            if steps:
                yield self._outer(steps, cols, tuple(visit for each in heads for visit in self._count(lo, hi, each, alike)))
        # What masks read differs from visit to visit; counted, it is one sum.
        yield Phase(alike, enter=mask_moves(self.problem, sum(visited_scores(self, each, keys) for each in heads)))

    def _walk(self, j: int, cols: int, visited: Visited) -> Iterator[Visit]:
        """The visits of outer step j by one query head, one by one."""
        p, columns = self.problem, range(j * self.block_cols, j * self.block_cols + cols)
        for i in visited.rows(j).tolist():
            rows = range(i * self.block_rows, min((i + 1) * self.block_rows, p.seqlen_q))
            yield self._visit(1, len(rows), j == visited.last[i], mask_moves(p, scores_seen(p, rows, columns)))

    def _count(self, lo: int, hi: int, visited: Visited, alike: int) -> Iterator[Visit]:
        """The visits of the outer steps from lo to hi by `alike` query heads, by kind: full or ragged row block, last or not."""
        visits, finished = visited.count(lo, hi), (lo <= visited.last) & (visited.last < hi)
        for rows in np.unique(self._rows()).tolist():
            of_kind = self._rows() == rows
            last = int(finished[of_kind].sum())
            for times, is_last in ((int(visits[of_kind].sum()) - last, False), (last, True)):
                if times:
                    yield self._visit(alike * times, rows, is_last)
