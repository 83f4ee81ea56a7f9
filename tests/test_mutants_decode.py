"""Seeded faults in the decoding kernels: each is found, and what is not broken is clean under any order of execution."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cases_decode import CACHES, Case, executed
from cupyflash import Device, Problem
from cupyflash.launch.binding import argument_values
from cupyflash.launch.launcher import CACHED, TENSORS
from cupyflash.schedules import Cache, DecodeSchedule
from cupyflash.sim.execution import Execution, allocate, run_kernels
from mutants import Mutant, check_mutant, check_unbroken
from suites import MORE, sample

DECODE = "decode.cu"
LOAD, READ, STORE = "cp.async.c", "ldmatrix", "*reinterpret_cast<uint4*>(to_gmem)"
PARTS = ("p.m_part[part]", "p.l_part[part]", "reinterpret_cast<float2*>(row + col)")
PLACE, LOOK_UP = "pages[key / PAGE", "pages[page % KNOWN_PAGES]"


def posed(lengths: tuple[int, ...], room: int, n_q: int = 3, group: int = 4) -> Problem:
    return Problem(len(lengths), group, 1, n_q, room, 16, "float16", causal=True, padded=True, key_lengths=lengths, sinks=True)


SPLITS = Case(posed((103, 37), 128), Cache(5, 16, 18, tree=True), splits=4, blocks=(16, 3), tree_each=True)
"""Seven blocks of keys in four splits, and three, so that one split has nothing."""
CASES = {
    "": SPLITS,
    "one slot": replace(SPLITS, splits=1, blocks=(16, 1), device=Device.named("T4")),
    "key warps": replace(SPLITS, problem=posed((150, 37), 192), cache=Cache(5, 48, 10), splits=1, blocks=(64, 2)),
    "tiles": Case(posed((70,), 112, 40, 8), Cache(20), splits=2, blocks=(16, 2)),
    "long": Case(posed((1200,), 16 * 90, 1, 1), Cache(0, 16, 91), splits=1, blocks=(16, 4)),
    "tree": replace(SPLITS, problem=posed((100, 37), 128, 20, 1).asking(causal=False), cache=replace(SPLITS.cache, appended=20)),
    "lost": replace(SPLITS, problem=posed((0, 0), 128), cache=Cache(5, 16, 18)),
}
LOST = np.array([300, -9], np.int32), np.array([[0, 1, 2**31 - 1, 3, 4, 5, 6, -1], [-8, 9, 10, 11, 12, 13, 14, 15]], np.int32)
"""Lengths out of range, and pages."""


def mutant(old: str, new: str, finds: str, *lines: str, problem: str = "", file: str = DECODE) -> Mutant:
    return Mutant(file, old, new, finds, lines, problem)


MUTANTS = {
    # splits
    "splits write the same part": mutant("part = split * static_cast<long long>(p.rows) + L_row;", "part = L_row;", "race", *PARTS),
    "a split reads another's part": mutant(
        "p.m_part[part] = m,", "p.m_part[part] = fmaxf(m, p.m_part[L_row]),", "race|uninitialised", "p.m_part[part]"
    ),
    "splits share a block": mutant(
        "end = SPLIT ? keys.begin_of(p, split + 1)", "end = SPLIT ? min(keys.end, keys.begin_of(p, split + 1) + 1)", "bytes"
    ),
    "a split without keys takes part": mutant(
        "const int splits = keys.splits(p);", "const int splits = p.splits;", "uninitialised", "p.m_part[s"
    ),
    "a split too few is merged": mutant(
        "const int splits = keys.splits(p);", "const int splits = max(1, keys.splits(p) - 1);", "numbers"
    ),
    "weights are other splits'": mutant("weight = weights[s];", "weight = weights[splits - 1 - s];", "numbers"),
    "weights without l": mutant("weight_kept(weights[s], now, factor) * ls[s]", "weight_kept(weights[s], now, factor)", "numbers"),
    "the largest m is a lane's": mutant("m = fmaxf(m, __shfl_xor_sync(~0u, m, step));", "m = fmaxf(m, 0.f);", "numbers"),
    "sinks join each split": mutant(
        "p.l_part[part] = l;", "p.l_part[part] = l + exp2_of(p.sinks[head] * LOG2_E - m * factor);", "numbers"
    ),
    "the sink is another head's": mutant("sink_of<32>(p, head, true)", "sink_of<32>(p, 0, true)", "numbers"),
    "weights are used before they are there": mutant(
        "  __syncthreads();\n  for (int c = 4 * lane", "  for (int c = 4 * lane", "race", "weights[s]", "weight = weights"
    ),
    "sums are used before they are there": mutant("  __syncthreads();\n  Element* O = p.O", "  Element* O = p.O", "race", "sums[w"),
    # the cache and new keys
    "new keys are read from the cache": mutant(
        "APPEND && key >= keys.cached", "APPEND && key >= keys.all", "race", LOAD, STORE, problem="tiles"
    ),
    "whole blocks of new keys are read from the cache": mutant(
        "(j + 1) * BC <= keys.cached", "(j + 1) * BC <= keys.all", "race", LOAD, STORE, problem="tiles"
    ),
    "every row tile appends": mutant("APPEND && tile == p.row_tiles - 1", "APPEND", "race", STORE, problem="tiles"),
    "keys are appended a row further": mutant(
        "place(j * BC + row).of(p.K, keys", "place(j * BC + row + 1).of(p.K, keys", "numbers"
    ),
    "a row too many is appended": mutant(
        "behind = min(keys.all - j * BC, BC);", "behind = min(keys.all + 1 - j * BC, BC);", "bytes"
    ),
    "the block before new keys is written, too": mutant("first = max(keys.cached - j * BC, 0)", "first = 0", "bytes"),
    "new values are keys": mutant(
        "gather<ValueTile>(j, V_smem(slot), p.V, p.V_new)", "gather<ValueTile>(j, V_smem(slot), p.V, p.K_new)", "bytes"
    ),
    "a length is taken at its word": mutant(
        "max(0, min(p.Nk - p.appended, cached))", "cached", "out of bounds", "", problem="lost"
    ),
    "a page is taken at its word": mutant("max(0, min(found, p.pages - 1))", "found", "out of bounds", "", problem="lost"),
    # the ring
    "a slot is filled while it is read": mutant(
        "STAGES - 2 : 0)>();\n    __syncthreads();", "STAGES - 2 : 0)>();", "race", LOAD, READ
    ),
    "a block is not waited for": mutant(
        "(STAGES > 1 ? STAGES - 2 : 0)", "(STAGES > 1 ? STAGES - 1 : 0)", "in flight|race", READ, LOAD
    ),
    "the only slot is filled while it is read": mutant(
        "    if (STAGES == 1) __syncthreads();\n", "", "race", "uint4*>(to_smem) =", READ, problem="one slot"
    ),
    "a slot too early": mutant("slot == 0 ? STAGES - 1 : slot - 1", "slot", "race|in flight", LOAD, READ, problem="long"),
    "parts are put where keys are read": mutant(
        "(KEY_WARPS > 1) {\n    __syncthreads();", "(KEY_WARPS > 1) {", "race", READ, "part[32", problem="key warps"
    ),
    "parts are joined before they are there": mutant(
        "  __syncthreads();\n  if (key_warp > 0) return;", "  if (key_warp > 0) return;", "race", "other[32", problem="key warps"
    ),
    "parts are joined as they are": mutant(
        "theirs[h] = weight_kept(-minus_m[h], now, factor)", "theirs[h] = 1.f", "numbers", problem="key warps"
    ),
    # pages
    "places are used before they are there": mutant("  if (PAGE) __syncthreads();\n", "", "race", PLACE, LOOK_UP),
    "places are overwritten before they were used": mutant(
        "KNOWN_PAGES = 128", "KNOWN_PAGES = 32", "race", PLACE, LOOK_UP, problem="long"
    ),
    "places are looked up too late": mutant(
        "    stream.look_up((j + STAGES + 1) * BC);\n", "", "race|uninitialised|out of bounds", PLACE, LOAD, problem="long"
    ),
    "the first place is written while the length is read": mutant(
        "  __syncthreads();  // the length's place becomes a page's\n", "", "race", LOOK_UP, "*scratch"
    ),
    "places are looked up for each block": mutant(
        "    stream.look_up((j", "    stream.looked = begin * BC / PAGE;\n    stream.look_up((j", "bytes"
    ),
    "every thread reads the length": mutant("if (threadIdx.x == 0) *scratch =", "*scratch =", "bytes"),
    "the table is the first sequence's": mutant("static_cast<long long>(keys.batch) * p.table_row + page", "page", "numbers"),
    # which keys
    "the last keys are not read": mutant(
        "keys.end = begin < end ? (end + BC - 1) / BC : 0;", "keys.end = begin < end ? end / BC : 0;", "bytes"
    ),
    "a key too many is read": mutant("cache.at, keys.all - j * BC,", "cache.at, keys.all + 1 - j * BC,", "bytes"),
    "new keys are seen by all": mutant(
        "if (TREE) keys.whole_end = min(keys.whole_end, max(0, keys.all - p.Nq) / BC);", "", "bytes", problem="tree"
    ),
    "the tree is a key on": mutant("(col - newest) * p.tree_mask.col", "(col - newest + 1) % p.Nq * p.tree_mask.col", "numbers"),
    "the tree is the first sequence's": mutant("p.tree_mask.of(batch, 0)", "p.tree_mask.of(0, 0)", "numbers"),
    "the diagonal is a key off": mutant("p.Nq, keys.all, keys.all);", "p.Nq, keys.all + 1, keys.all);", "numbers"),
    "rows of a group are neighbours": mutant(
        "keys.kv_head * PACK + r % PACK) + r / PACK * p.Q.row", "keys.kv_head * PACK + r / p.Nq) + r % p.Nq * p.Q.row", "numbers"
    ),
    "rows that are none are written": mutant("there = query < p.Nq;", "there = true;", "out of bounds|race", *PARTS),
    "every lane writes m and l": mutant("} else if (there && t == 0) {", "} else if (there) {", "bytes"),
    "l is a lane's": mutant("state.l[i][h] = row_sum(state.l[i][h]);", "state.l[i][h] *= 1.f;", "numbers"),
}


def of_case(problem: str, schedule: DecodeSchedule, seed: int | None) -> tuple[Execution, bool]:
    """An execution, and whether its numbers and the caches are right."""
    if problem == "lost":
        return run_lost(schedule), True
    execution, numbers, kept = executed(replace(CASES[problem], order=seed))
    return execution, kept and all(each.good for each in numbers.values())


def run_lost(schedule: DecodeSchedule) -> Execution:
    """Run with lengths and pages out of range, as only a GPU's arrays may have them."""
    arrays, _ = CASES["lost"].arrays()
    for name in CACHES:
        arrays[name][...] = 0
    out = np.empty(arrays["q"].shape, np.float16)
    made = {"O": out, "L": np.empty(out.shape[:-1], np.float32), **allocate(schedule)}
    kernels = {(TENSORS | CACHED).get(name, name): array for name, array in arrays.items()}
    values = argument_values(schedule, {**kernels, **dict(zip(("cache_seqlens", "block_table"), LOST, strict=True)), **made})
    return Execution(out, None, *run_kernels(schedule, values, made))


# Of the wide suite; with CUPYFLASH_TEST_EXAMPLES all are run.
WIDE = {
    "splits write the same part",
    "a split reads another's part",
    "a split without keys takes part",
    "a split too few is merged",
    "weights are other splits'",
    "sinks join each split",
    "weights are used before they are there",
    "new keys are read from the cache",
    "every row tile appends",
    "keys are appended a row further",
    "a page is taken at its word",
    "a slot is filled while it is read",
    "parts are joined before they are there",
    "places are used before they are there",
    "places are overwritten before they were used",
    "places are looked up for each block",
    "every thread reads the length",
    "the last keys are not read",
    "new keys are seen by all",
    "the tree is a key on",
    "rows that are none are written",
}


@pytest.mark.parametrize(
    "name",
    sample([name for name in MUTANTS if MORE > 1 or name in WIDE], {"new keys are read from the cache"}),
)
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = MUTANTS[name]
    run = partial(of_case, fault.problem)
    check_mutant(fault, CASES[fault.problem].schedule, run, tmp_path, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("problem", [name for name in CASES if name != "lost"])
def test_what_is_not_broken_is_clean(problem: str) -> None:
    check_unbroken(CASES[problem].schedule, partial(of_case, problem), range(1))
