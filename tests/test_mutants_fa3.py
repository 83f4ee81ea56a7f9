"""Seeded faults in FlashAttention-3's kernel: each is found, and what is not broken is clean under any order of execution."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_varlen

from cases_fa3 import H100, Case, Layout, executed
from cupyflash import Mask, Problem, TileSchedule
from cupyflash.request.options import Options, Pattern
from cupyflash.schedules import VarlenSchedule, patterns_of, plan_varlen
from cupyflash.sim import execute_varlen
from cupyflash.sim.execution import Execution
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure
from mutants import Mutant, check_mutant, check_unbroken
from suites import MORE, sample

FA3, WORK, QUEUE, PRODUCTS, ROLES = "fa3_forward.cu", "fa3_work.cuh", "fa3_queue.cu", "wgmma.cuh", "warp_roles.cuh"
LOAD, STORE, PRODUCT = "d.shared::cluster.global.tile", "d.global.shared::cta.tile", "PRODUCT("
PUT, WAIT, ARRIVE = "stmatrix", "mbarrier.try_wait", "mbarrier.arrive"
PASSED = "st.shared.b32", "ld.shared.b32"
WRITTEN = "      if constexpr (SKIPS) write_shared(s.next + 4 * K_slot.index, next);\n"
COPIED = """      arrive_expecting(s.K_full + 8 * K_slot.index, K_BYTES);
      load_tile<BC>(s.K + K_slot.index * K_BYTES, given.K, s.K_full + 8 * K_slot.index, K_SLABS, w.place.first_key + j * BC,
                    w.place.kv_head, w.place.batch);
"""
CLEARED = """      clear_rows<BC>(V, V_SLABS, w.masks.keys - j * BC);
      publish_writes();
      __syncwarp();
"""
LOADED = (LOAD, PRODUCT)

PROBLEM = Problem(1, 1, 1, 150, 77, 80, "float16")
"""Two row blocks, ragged, of five turns each in blocks of 128 x 16; rows of two slabs in shared memory."""
TWO_STAGES = H100.with_sram("50KB")


def pattern(keys: int, heads: int = 1) -> Pattern:
    """Tiles of 128 x 16 in turns whole, mixed and empty, others of each row block and head."""
    h, r, c = np.ogrid[:heads, :150, :keys]
    kind = (h + r // 128 + c // 16) % 3
    return Pattern.of((kind == 0) | (kind == 1) & ((r + c) % 3 > 0))


FUNCTION = Mask("d[b, k] == d[b, q] and k % 3 > 0", d=np.sort(np.random.default_rng(0).integers(0, 3, (5, 77)), axis=1))
CASES = {
    "": PROBLEM,
    "causal": PROBLEM.asking(causal=True),
    "window": PROBLEM.asking(window=(20, 10)),
    "lengths": Problem(2, 1, 1, 150, 77, 80, "float16", padded=True, key_lengths=(51, 55)),
    "sinks": PROBLEM.asking(sinks=True),
    "sharp": PROBLEM.asking(scale=3.0),
    "heads": Problem(1, 8, 1, 20, 77, 80, "float16", causal=True, sinks=True),
    "groups": Problem(1, 3, 1, 100, 20, 80, "float16"),
    "few": replace(PROBLEM.asking(causal=True), seqlen_q=200, seqlen_k=20),
    "sections": Problem(2, 3, 3, 250, 20, 80, "float16", padded=True, key_lengths=(20, 15)),
    "last heads": Problem(2, 3, 3, 250, 250, 80, "float16", causal=True),
    "apart": replace(PROBLEM, head_dim=64, head_dim_v=64),
    "mask": PROBLEM.asking(mask=True, pattern=pattern(77)),
    # The first row block sees no key; of the second the diagonal cuts whole tiles.
    "whole tiles": replace(PROBLEM, seqlen_q=200).asking(
        causal=True, mask=True, pattern=Pattern.of(np.repeat(np.arange(200)[:, None] >= 128, 77, 1))
    ),
    "one tile": replace(PROBLEM, seqlen_q=300, seqlen_k=16).asking(mask=True, pattern=Pattern.of(np.ones((300, 16), bool))),
    "many tiles": replace(PROBLEM, seqlen_k=600).asking(mask=True, pattern=pattern(600)),
    "two heads": Problem(1, 2, 1, 150, 77, 80, "float16", mask=True, pattern=pattern(77, 2), dropout=True),
    "bias": PROBLEM.asking(bias=True),
    "large scores": PROBLEM.asking(bias=True, scale=300.0),
    "dropout": replace(PROBLEM, batch=2).asking(dropout=True),
    "apart, short": replace(PROBLEM, head_dim=64, head_dim_v=64, seqlen_k=16),  # a turn each, in which warpgroups do not meet
}


def mutant(old: str, new: str, finds: str, *lines: str, problem: str = "", file: str = FA3) -> Mutant:
    return Mutant(file, old, new, finds, lines, problem)


def swapped(first: str, second: str, finds: str, *lines: str, **others: str) -> Mutant:
    """The second of two neighbouring lines before the first."""
    return mutant(f"    {first}\n    {second}\n", f"    {second}\n    {first}\n", finds, *lines, **others)


MUTANTS = {
    # what generic writes are to copies and products
    "O is not published": mutant("publish_writes();\n  meet", "meet", "proxy", STORE, PUT),
    "zeros are not published": mutant(
        "publish_writes();\n      __syncwarp();", "__syncwarp();", "proxy", PRODUCT, "st.shared.v4", problem="lengths"
    ),
    "zeros are there for one lane": mutant(
        "publish_writes();\n      __syncwarp();", "publish_writes();", "race|proxy", PRODUCT, "st.shared.v4", problem="lengths"
    ),
    "barriers are not published": mutant("    publish_barriers();\n", "", "proxy|missing fence|race", LOAD, "mbarrier"),
    "nobody waits for barriers": mutant("s.init_barriers();\n  __syncthreads();", "s.init_barriers();", "race", "mbarrier"),
    # slots that are given back early
    "K is released before its product": swapped(
        "wait_for_products<1>(S);", "release(s.K_empty + 8 * slot.index);", "race", *LOADED
    ),
    "the first K is released before its product": swapped(
        "wait_for_products<0>(S);", "release(s.K_empty + 8 * slot.index);", "race", *LOADED
    ),
    "V is released before its product": swapped(
        "wait_for_products<0>(O);", "release(s.V_empty + 8 * before.index);", "race", *LOADED
    ),
    "a warp releases K for all": mutant(
        "init_barrier(K_empty + 8 * slot, WARPS)", "init_barrier(K_empty + 8 * slot, 1)", "race|deadlock", *LOADED, WAIT
    ),
    "a warp releases V for all": mutant(
        "init_barrier(V_empty + 8 * slot, WARPS)", "init_barrier(V_empty + 8 * slot, 1)", "race|deadlock", *LOADED, WAIT
    ),
    "a warp releases Q for all": mutant("(O_APART ? 4 : 1)", "1", "race|deadlock", *LOADED, WAIT, problem="apart"),
    "Q is released before O has left": mutant(
        "    wait_for_stores();\n    if constexpr (!O_APART) arrive(s.own_Q_empty());\n",
        "    if constexpr (!O_APART) arrive(s.own_Q_empty());\n    wait_for_stores();\n",
        "race",
        LOAD,
        STORE,
    ),
    "nobody waits until O has left": mutant("    wait_for_stores();\n    if", "    if", "race", LOAD, STORE),
    "O is put where O has not left": mutant("    wait_for_stores();\n    if", "    if", "race", STORE, PUT, problem="apart"),
    "a warp does not know that O has left": mutant(
        "  if constexpr (O_APART) meet(1 + c.group, WARPGROUP);", "", "race", STORE, PUT, problem="apart, short"
    ),
    "Q is not released": mutant(
        "      if constexpr (O_APART) c.release(s.own_Q_empty());\n      c.end();\n    } else",
        "      c.end();\n    } else",
        "deadlock",
        WAIT,
        problem="apart",
    ),
    "a warpgroup's rows of Q come with another's": mutant(
        "s.Q_full + 8 * group, parity);", "s.Q_full, parity);", "in flight|race|uninitialised", *LOADED
    ),
    # barriers
    "a slot is not empty at first": mutant("K_slot = {0, 1}", "K_slot = {0, 0}", "deadlock", WAIT),
    "V's slot is not empty at first": mutant("V_slot = {0, 1}", "V_slot = {0, 0}", "deadlock", WAIT),
    "the parity stays": mutant("Slot{0, parity ^ 1}", "Slot{0, parity}", "race|in flight|deadlock", *LOADED, WAIT, file=ROLES),
    "the first K is not waited for": mutant(
        "wait_for(s.K_full + 8 * slot.index, slot.parity);", "", "in flight|race|uninitialised", *LOADED
    ),
    "K is waited for with the other parity": mutant(
        "slot.next().index, slot.next().parity",
        "slot.next().index, slot.next().parity ^ 1",
        "in flight|race|uninitialised|deadlock",
        *LOADED,
    ),
    "V is waited for with the other parity": mutant(
        "before.index, before.parity", "before.index, before.parity ^ 1", "in flight|race|uninitialised|deadlock", *LOADED
    ),
    "the last V is not waited for": mutant(
        "    wait_for(s.V_full + 8 * slot.index, slot.parity);\n    multiply_values(slot);",
        "    multiply_values(slot);",
        "in flight|race|uninitialised|deadlock",
        *LOADED,
        WAIT,
    ),
    "Q is not waited for": mutant(
        "    wait_for(Q_PARTS == 1 ? s.Q_full : s.Q_full + 8 * group, parity);\n", "", "in flight|race|uninitialised", *LOADED
    ),
    "the consumers' parity stays": mutant("parity = 0;; parity ^= 1)", "parity = 0;;)", "race|in flight|deadlock", *LOADED, WAIT),
    "Q's room is taken early": mutant("        wait_for(s.Q_empty + 8 * part, parity);\n", "", "race", *LOADED),
    "Q's room has one parity": mutant("    parity ^= 1;\n", "", "race|deadlock", *LOADED, WAIT),
    "cut blocks have one parity": mutant(
        "      came ^= 1;\n", "", "race|in flight|deadlock", *LOADED, "st.shared.v4", WAIT, problem="lengths"
    ),
    "a cut block is there before it is cut": mutant(
        f"{CLEARED}      if (copies) arrive(full);",
        f"      if (copies) arrive(full);\n{CLEARED[:-1]}",
        "race|proxy",
        PRODUCT,
        "st.shared.v4",
        problem="lengths",
    ),
    "K is expected a row short": mutant(
        "full + 8 * K_slot.index, K_BYTES);",
        "full + 8 * K_slot.index, K_BYTES - SLAB_ROW);",
        "in flight|race|bad arrival|deadlock",
        *LOADED,
        ARRIVE,
        WAIT,
    ),
    "V is expected a row long": mutant("s.V_came : full, V_BYTES", "s.V_came : full, V_BYTES + SLAB_ROW", "deadlock", WAIT),
    "Q is expected a row short": mutant(
        "Q_ROWS * SLAB_ROW * K_SLABS);",
        "(Q_ROWS - 1) * SLAB_ROW * K_SLABS);",
        "in flight|race|bad arrival|deadlock",
        *LOADED,
        ARRIVE,
        WAIT,
    ),
    "a row block without keys does not count": mutant("          arrive(full);\n", "", "deadlock", WAIT, problem="few"),
    # the queue, and what is handed on
    "what is taken is not counted from 0": mutant(
        "  if (own == 0) *p.taken = 0;\n", "", "uninitialised", "p.taken", problem="causal", file=QUEUE
    ),
    "what is taken is counted by several": mutant("atomicAdd(p.taken, 1)", "(*p.taken)++", "race", "p.taken", problem="sections"),
    "all of the grid take the first": mutant("gridDim.x + (p.queue", "1 + (p.queue", "bytes", problem="sections"),
    "a row block is skipped": mutant("gridDim.x + (p.queue", "gridDim.x + 1 + (p.queue", "bytes"),
    "who takes one does not say so": mutant("  arrive(s.work_full);\n", "", "deadlock", WAIT, problem="causal"),
    "nobody waits for what is handed on": mutant(
        "  wait_for(s.work_full, parity);\n",
        "",
        "race|uninitialised",
        "next_work",
        "read_shared(s.work)",
        "ld.shared.b32",
        "st.shared.b32",
        problem="causal",
    ),
    "what was not read is overwritten": mutant(
        "  wait_for(s.work_empty, parity);\n",
        "",
        "race|bad arrival",
        "next_work",
        "read_shared(s.work)",
        "ld.shared.b32",
        "st.shared.b32",
        ARRIVE,
        problem="few",
    ),
    "who has read does not say so": mutant(
        "  if (threadIdx.x % 32 == 0) arrive(s.work_empty);\n", "", "deadlock", WAIT, problem="causal"
    ),
    "a warp has read for all": mutant(
        "init_barrier(work_empty, WARPS)",
        "init_barrier(work_empty, 1)",
        "race|bad arrival|deadlock",
        "next_work",
        "read_shared(s.work)",
        "ld.shared.b32",
        "st.shared.b32",
        ARRIVE,
        WAIT,
    ),
    "the last one is not handed on": mutant("      if (copies) hand_on(s, NO_WORK, parity);\n", "", "deadlock", WAIT),
    # products
    "S is not fenced": mutant(
        "    begin_products();\n#pragma unroll\n    for (int k = 0; k < (HEAD",
        "#pragma unroll\n    for (int k = 0; k < (HEAD",
        "missing fence|in flight",
        PRODUCT,
    ),
    "O is not fenced": mutant(
        "    begin_products();\n#pragma unroll\n    for (int k = 0; k < BC",
        "#pragma unroll\n    for (int k = 0; k < BC",
        "missing fence|in flight",
        PRODUCT,
    ),
    "S is read before it is there": mutant("wait_for_products<1>(S)", "wait_for_products<2>(S)", "in flight", ""),
    "O is given on before it is there": mutant(
        "wait_for_products<0>(O);\n    release(s.V_empty + 8 * before",
        "wait_for_products<1>(O);\n    release(s.V_empty + 8 * before",
        "in flight|race",
        "",
    ),
    "S has no group of its own": mutant("k > 0);\n    }\n    commit_products();", "k > 0);\n    }", "in flight", ""),
    "P is overwritten while it is read": mutant(
        "    wait_for_products<0>(O);\n    release(s.V_empty + 8 * before.index);\n    weigh<EARLY>(offset);\n"
        "    drop(block_of(j), w, row);\n    round_weights();",
        "    weigh<EARLY>(offset);\n    round_weights();\n    wait_for_products<0>(O);\n    release(s.V_empty + 8 * before.index);",
        "in flight",
        "",
    ),
    "S is added to": mutant(", k > 0);", ", true);", "numbers"),
    # descriptors
    "another swizzle": mutant("| 1ull << 30", "| 2ull << 30", "swizzle", PRODUCT, file=PRODUCTS),
    "no swizzle": mutant("| 1ull << 30", "| 0ull << 30", "swizzle", PRODUCT, file=PRODUCTS),
    "eight rows are half as far apart": mutant("1024ull >> 4 |", "512ull >> 4 |", "numbers", file=PRODUCTS),
    "slabs of V are a row off": mutant("columns(s.V, BC * SLAB_ROW)", "columns(s.V, (BC + 1) * SLAB_ROW)", "numbers"),
    "slabs of V do not count": mutant("<< 16};", "<< 15};", "numbers", file=PRODUCTS),
    "warpgroups have one another's rows": mutant(
        "+ group * 64 * SLAB_ROW, K", "+ (CONSUMERS - 1 - group) * 64 * SLAB_ROW, K", "numbers"
    ),
    "steps of Q and K are half as long": mutant("k % 4 * 32;", "k % 4 * 16;", "numbers"),
    "the second slab of Q is K's": mutant("k / 4 * BR * SLAB_ROW", "k / 4 * BC * SLAB_ROW", "numbers"),
    "K's first slab twice": mutant("k / 4 * BC * SLAB_ROW + inside", "inside", "numbers"),
    "slots overlap": mutant("V = K + STAGES * K_BYTES", "V = K + STAGES * K_BYTES - 1024", "race|in flight", *LOADED),
    # what is copied
    "K a row on": mutant("K_SLABS, w.place.first_key + j * BC,", "K_SLABS, w.place.first_key + j * BC + 1,", "numbers"),
    "slabs have the same columns": mutant("full, slab * SLAB, row", "full, 0, row", "bytes", file=ROLES),
    "O a row on": mutant("slab * SLAB, query, place", "slab * SLAB, query + 1, place", "bytes"),
    "warpgroups store the same rows": mutant("first = place.i * BR + c.group * 64;", "first = place.i * BR;", "race", STORE),
    "O is stored before the warpgroup has put it down": mutant(
        "  publish_writes();\n  meet(1 + c.group, WARPGROUP);", "  publish_writes();", "race", STORE, PUT
    ),
    "O is not swizzled": mutant("(n % 4 * 2 + lane / 16) ^ row % 8", "(n % 4 * 2 + lane / 16)", "numbers"),
    "O's slabs are one": mutant("from + slab * BR * SLAB_ROW", "from", "numbers"),
    "every key head is its query head": mutant(
        "head, head / p.group, p.Nq", "head, head, p.Nq", "bytes", problem="groups", file=WORK
    ),
    "zeros begin a row late": mutant("chunk = from * 8 + ", "chunk = (from + 1) * 8 + ", "numbers", problem="lengths", file=ROLES),
    "no block is cut": mutant("cut = (PADDED || VARLEN) &&", "cut = false &&", "numbers", problem="lengths"),
    "the batch's length is the first's": mutant(
        "p.key_lengths[place.batch]", "p.key_lengths[0]", "numbers", problem="lengths", file=WORK
    ),
    "every lane asks for the length": mutant("if (threadIdx.x % 32 == 0) keys", "keys", "bytes", problem="lengths", file=WORK),
    # which blocks
    "the diagonal is taken for whole": mutant(
        "visible_end(w.masks, row) / BC", "(visible_end(w.masks, row) + BC) / BC", "numbers", problem="causal", file=WORK
    ),
    "the window's left edge is taken for whole": mutant(
        "(visible_begin(w.masks, last_row) + BC - 1) / BC",
        "visible_begin(w.masks, row) / BC",
        "numbers",
        problem="window",
        file=WORK,
    ),
    "the mask is a key off": mutant(
        "w.masks, row, block_of(j) * BC,", "w.masks, row, block_of(j) * BC + 1,", "numbers", problem="causal"
    ),
    "the mask is a row off": mutant(
        "w.row() + group * 64 + warp * 16 + lane / 4;",
        "w.row() + group * 64 + warp * 16 + lane / 4 + 1;",
        "numbers",
        problem="causal",
    ),
    "the last keys are not visited": mutant("(end_key + BC - 1) / BC", "end_key / BC", "bytes", file=WORK),
    "the first keys are not visited": mutant(
        "w.first = first_key / BC", "w.first = (first_key + BC - 1) / BC", "bytes", problem="window", file=WORK
    ),
    "a row block is done twice": mutant("return {i, batch", "return {max(0, i - 1), batch", "bytes", file=WORK),
    "a section is as long as the others": mutant(
        "min(p.section, mine.last_head - begin)", "p.section", "out of bounds|race", "p.queue[", problem="sections", file=QUEUE
    ),
    "the last heads are sections as the others are": mutant(
        "last ? heads - begin", "last ? p.section", "race|uninitialised", "p.queue[", problem="last heads", file=QUEUE
    ),
    "all heads are the last": mutant(
        "last ? p.last_head : p.heads / PACK", "p.last_head", "race|uninitialised|out of bounds", problem="last heads", file=QUEUE
    ),
    "two have the same place": mutant(
        "other.turns == mine.turns && first + n < own", "false", "race|uninitialised", "p.queue[", problem="lengths", file=QUEUE
    ),
    "batches are heads": mutant(
        "pair / (p.heads / PACK), head = pair * PACK - batch * p.heads",
        "pair % p.sequences, head = pair / p.sequences",
        "numbers",
        problem="sections",
        file=WORK,
    ),
    # the softmax
    "O is not rescaled": mutant("      if (grown) scale_values(rescale);\n", "", "numbers", problem="sharp"),
    "O is rescaled late": mutant(": --j) >= until && !grown", ": --j) >= until", "numbers", problem="sharp"),
    "warps wait apart": mutant(
        "        end_turn(before, SKIPS ? next >= 0 : j > w.first, j, w, row, offset);",
        "        if (grown) end_turn(before, true, j, w, row, offset);\n"
        "        else end_turn(before, j > w.first, j, w, row, offset);",
        "disagreement",
        "",
        problem="sharp",
    ),
    "l is not rescaled": mutant("l[h] *= rescale[h];", "", "numbers", problem="sharp"),
    "the offset is the old one": mutant("      offset[h] = now.offset;\n", "", "numbers", problem="sharp"),
    "the first exponentials are taken twice": mutant("weigh<EARLY>(offset);", "weigh<0>(offset);", "numbers"),
    "the last exponentials are left out": mutant("    weigh<EARLY>(offset);\n", "", "numbers"),
    "the maximum is forgotten": mutant("      minus_m[h] = -m_new;\n", "", "numbers", problem="sharp"),
    "m never grows": mutant("(growth > MOST_GROWTH) | ", "", "numbers", problem="sharp"),
    "the maximum is a lane's": mutant("row_max(largest)", "largest", "numbers", problem="sharp"),
    "l is a lane's": mutant("row_sum(c.l[h])", "c.l[h]", "numbers"),
    "l begins with the block before": mutant(
        "c.minus_m[h] = -NEG_INF, c.l[h] = 0.f;", "c.minus_m[h] = -NEG_INF;", "numbers", problem="few"
    ),
    "the sink is forgotten": mutant(
        "by[h] *= join_sink(L, sink_of(p, place.head + of_pack, query < place.Nq));", "", "numbers", problem="sinks"
    ),
    "the sink is another head's": mutant("sink_of(p, place.head + of_pack,", "sink_of(p, place.head,", "numbers", problem="heads"),
    "L without its offset": mutant("(log2f(l) - origin.offset)", "log2f(l)", "numbers"),
    "L is another head's": mutant("p.L[place.L_row + ", "p.L[", "numbers", problem="groups"),
    "L is written past the end": mutant(
        "lane % 4 == 0 && query < place.Nq) p.L", "lane % 4 == 0) p.L", "out of bounds|race", "p.L["
    ),
    "every lane writes L": mutant("p.L && lane % 4 == 0 && query", "p.L && query", "bytes"),
    # rows of several heads in a block
    "the rows of a head are neighbours": mutant(
        "query = row / PACK, of_pack = row % PACK",
        "query = row % (BR / PACK), of_pack = row / (BR / PACK)",
        "race|out of bounds",
        "p.L[",
        problem="heads",
    ),
    "the mask knows one head": mutant("(row0 + 8 * h) / PACK", "row0 + 8 * h", "numbers", problem="heads", file="mask.cuh"),
    "the block's last query is a head's": mutant(
        "(w.row() + BR) / PACK", "w.row() / PACK + 1", "bytes", problem="heads", file=WORK
    ),
    "O of one head": mutant("first / PACK;", "first;", "bytes", problem="heads"),
    # a mask's tiles, and the visits that are handed on
    "the next visit is read when K is given back": mutant(
        "        if constexpr (SKIPS) next = next_visit();\n        multiply_both(before);",
        "        multiply_both(before);\n        if constexpr (SKIPS) next = next_visit();",
        "race",
        *PASSED,
        problem="mask",
    ),
    "the first block's next visit is read when K is given back": mutant(
        "    release(s.K_empty + 8 * slot.index);\n    mask(j, w, row);",
        "    release(s.K_empty + 8 * slot.index);\n    if (next_visit() != next) return NO_VISIT;\n    mask(j, w, row);",
        "race",
        *PASSED,
        problem="mask",
    ),
    "the next visit is written before its slot is empty": mutant(
        "      wait_for(s.K_empty + 8 * K_slot.index, K_slot.parity);\n"
        "      if constexpr (SKIPS) write_shared(s.next + 4 * K_slot.index, next);\n",
        "      if constexpr (SKIPS) write_shared(s.next + 4 * K_slot.index, next);\n"
        "      wait_for(s.K_empty + 8 * K_slot.index, K_slot.parity);\n",
        "race",
        *PASSED,
        problem="mask",
    ),
    "the next visit is written behind its K block's copy": mutant(
        WRITTEN + COPIED, COPIED + WRITTEN, "race|uninitialised", *PASSED, problem="mask"
    ),
    "the first visit is written before Q's room is empty": mutant(
        "        wait_for(s.Q_empty + 8 * part, parity);\n        if constexpr (SKIPS) write_shared(s.begin + 4 * part, visit);\n",
        "        if constexpr (SKIPS) write_shared(s.begin + 4 * part, visit);\n        wait_for(s.Q_empty + 8 * part, parity);\n",
        "race",
        *PASSED,
        problem="one tile",
    ),
    "a warpgroup reads another's first visit": mutant(
        "s.begin + 4 * group) : NO_VISIT", "s.begin) : NO_VISIT", "race|uninitialised", *PASSED, problem="one tile"
    ),
    "the visit behind the next is handed on": mutant(
        "next = tiles.below(block_of(visit));\n          load", "load", "bytes", problem="mask"
    ),
    "empty tiles are visited": mutant("__ballot_sync(~0u, state != EMPTY)", "~0u", "bytes", problem="mask"),
    "mixed tiles are taken for whole": mutant("mixed >> j % 32 & 1 ? ASKS : 0", "0", "bytes", problem="mask"),
    "whole tiles are asked": mutant("__ballot_sync(~0u, state == MIXED)", "kept", "bytes", problem="mask"),
    "the diagonal is taken for whole beside a mask": mutant(
        "(j < w.whole_begin || j >= w.whole_end ? CUT : 0)", "0", "numbers", problem="whole tiles"
    ),
    "the first 32 tiles are all": mutant(
        "if (j / 32 != word) read(j / 32);", "if (word < 0) read(j / 32);", "bytes", problem="many tiles"
    ),
    "tiles are counted from the word's last": mutant("kept << (31 - j % 32)", "kept", "bytes", problem="mask"),
    "the last tile of a word is passed over": mutant("j = j / 32 * 32 - 1)", "j = j / 32 * 32 - 2)", "bytes", problem="many tiles"),
    "states behind the keys are read": mutant(
        "w.first <= j && j < w.end ? mask.state", "w.first <= j ? mask.state", "bytes", problem="mask"
    ),
    "the states are the first row block's": mutant("mask.state[w.place.i * mask", "mask.state[0 * mask", "bytes", problem="mask"),
    "the states are the first head's": mutant(
        "block_mask_of(p, w.place.batch, w.place.head,", "block_mask_of(p, w.place.batch, 0,", "bytes", problem="two heads"
    ),
    "the states are the first sequence's": mutant(
        "w.place.head, w.place.first_block<BR>())", "w.place.head)", "bytes", problem="packed, mask"
    ),
    "a row block that sees nothing takes Q": mutant(
        "const bool seen = SKIPS ? visit >= 0 : w.turns() > 0;", "const bool seen = w.turns() > 0;", "bytes", problem="whole tiles"
    ),
    "a function knows the batch, not the sequence": mutant(
        "w.masks.batch = w.place.sequence,", "w.masks.batch = w.place.batch,", "numbers", problem="packed, mask"
    ),
    # a bias
    "the score beside a bias is not scaled": mutant("BIAS ? w.masks.p->scale_log2 : 1.f", "1.f", "numbers", problem="bias"),
    "scores beside a bias are scaled again": mutant("SCALED ? 1.f : p.scale_log2", "p.scale_log2", "numbers", problem="bias"),
    "L of scaled scores is scaled again": mutant("(SCALED ? LN_2 : p.scale)", "p.scale", "numbers", problem="large scores"),
    # dropout
    "nothing is dropped": mutant("kept >> bit & 1)", "true)", "numbers", problem="dropout"),
    "what is kept does not grow": mutant(
        "    if constexpr (DROPOUT) by[h] *= dropout_of(p, 0, 0).scale;\n", "", "numbers", problem="dropout"
    ),
    "l has only what is kept": mutant(
        "        l[e / 2] += S[n][e];\n",
        "        if (!DROPOUT) l[e / 2] += S[n][e];\n",
        "numbers",
        problem="dropout",
    ),
    "the first block drops nothing": mutant(
        "    weigh(offset);\n    drop(block_of(j), w, row);\n", "    weigh(offset);\n", "numbers", problem="dropout"
    ),
    "the weights of the first keys are dropped": mutant("j * BC + 8 * n,", "8 * n,", "numbers", problem="dropout"),
    "another row's weights are dropped": mutant("row / 16 * 16, j * BC", "row / 32 * 32, j * BC", "numbers", problem="dropout"),
    "the bits are taken from the first": mutant(
        "for (int e = 3; e >= 0; e--)", "for (int e = 0; e < 4; e++)", "numbers", problem="dropout"
    ),
    "the first head's weights are dropped": mutant(
        "dropout_of(*w.masks.p, w.masks.batch, w.masks.head)",
        "dropout_of(*w.masks.p, w.masks.batch, 0)",
        "numbers",
        problem="two heads",
    ),
    "all sequences drop the same": mutant(
        "dropout_of(*w.masks.p, w.masks.batch, w.masks.head)",
        "dropout_of(*w.masks.p, 0, w.masks.head)",
        "numbers",
        problem="packed, mask",
    ),
    # packed sequences
    "a sequence's last rows go together": mutant("if (rows < 64) {", "if (rows < 0) {", "race", STORE, problem="packed"),
    "a sequence's rows go to the next": mutant("query + r, place", "query + r + 1, place", "race", STORE, problem="packed"),
    "Q is released while rows leave": mutant(
        "      wait_for_stores();\n      __syncwarp();", "      wait_for_stores();", "race", LOAD, STORE, problem="packed"
    ),
    "nobody waits until rows have left": mutant(
        "      wait_for_stores();\n      __syncwarp();", "      __syncwarp();", "race", LOAD, STORE, problem="packed"
    ),
    "what is behind a sequence counts": mutant("(PADDED || VARLEN) &&", "PADDED &&", "numbers", problem="packed"),
    "the keys are the first sequence's": mutant("w.place.first_key + j * BC", "j * BC", "numbers", problem="packed"),
    "the queries are the first sequence's": mutant(
        "w.place.first_query + (w.row() + part", "(w.row() + part", "numbers", problem="packed"
    ),
    "a block too many is done": mutant("sequence.block * BR < sequence.queries,", "true,", "bytes", problem="packed", file=WORK),
    # warpgroups and their registers
    "nobody has the first turn": mutant("  if (PING_PONG && group == CONSUMERS - 1) c.pass_turn();\n", "", "deadlock", ""),
    "a turn is passed to oneself": mutant("TURN + (group + 1 < CONSUMERS ? group + 1 : 0)", "TURN + group", "deadlock", ""),
    "warpgroups meet at one barrier": mutant(
        "meet(1 + c.group, WARPGROUP)", "meet(1, WARPGROUP)", "race|deadlock|partial barrier", ""
    ),
    "warpgroups want more registers": mutant('"n"(CONSUMER_REGISTERS)', '"n"(CONSUMER_REGISTERS + 8)', "deadlock", "setmaxnreg"),
    "the producer gives none back": mutant(
        '    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));\n', "", "deadlock", "setmaxnreg"
    ),
}


def case_of(problem: str) -> Case:
    layouts = dict.fromkeys(("q", "k", "v", "out"), Layout())
    l2_bytes = 25_600 if problem in ("sections", "last heads") else H100.l2_bytes
    device = replace(TWO_STAGES, sm_count=2 if problem == "sections" else 1, l2_bytes=l2_bytes)
    return Case(CASES[problem], device, (128, 16), layouts, axes=4, seed=0, order=None, v_mean=1.0, lse=True)


SEQLENS = ((70, 20), (0, 5), (150, 77), (30, 0), (100, 40))
POISONED = 2  # of the sequences, one with NaN for K and V, which is its own affair


def schedule_of(problem: str) -> TileSchedule:
    if not problem.startswith("packed"):
        return case_of(problem).schedule
    posed, patterns = Problem(len(SEQLENS), 1, 1, 150, 77, 80, "float16"), None
    if problem == "packed, mask":
        posed = posed.asking(mask_function=FUNCTION.form, dropout=True)
        patterns = patterns_of(posed, SEQLENS, FUNCTION.arrays)
    device = replace(TWO_STAGES, sm_count=2)
    return plan_varlen(posed, device, SEQLENS, (128, 16), lse=True, algorithm="fa3", patterns=patterns)


def of_case(problem: str, schedule: TileSchedule, seed: int | None) -> tuple[Execution, bool]:
    """An execution, and whether its numbers are right."""
    if isinstance(schedule, VarlenSchedule):
        return run_packed(schedule, seed)
    execution, numbers = executed(replace(case_of(problem), order=seed))
    return execution, all(each.good for each in numbers.values())


def run_packed(schedule: VarlenSchedule, seed: int | None) -> tuple[Execution, bool]:
    q, k, v, cu_q, cu_k = test_varlen.packed(SEQLENS, 1, 1, 80, 80)
    k[cu_k[POISONED] : cu_k[POISONED + 1]] = v[cu_k[POISONED] : cu_k[POISONED + 1]] = np.nan
    options, patterns = schedule.problem.options, schedule.patterns
    given = {"mask": FUNCTION if options.mask_function else None, "dropout": test_varlen.dropout_of(options)}
    execution = execute_varlen(schedule, q, k, v, seed=seed, **given)
    assert execution.lse is not None
    good = True
    for each in range(len(SEQLENS)):
        if each != POISONED:
            rows, keys = slice(*cu_q[each : each + 2]), slice(*cu_k[each : each + 2])
            beside = {"mask": patterns[each].kept[0]} if patterns else {}
            arrays = (array.swapaxes(0, 1) for array in (q[rows], k[keys], v[keys]))
            inputs = Inputs(*arrays, Options(dropout=options.dropout), beside, dropout=test_varlen.dropout_of(options, each))
            numbers = measure(execution.out[rows].swapaxes(0, 1), execution.lse[:, rows], inputs)
            good &= all(one.good for one in numbers.values())
    return execution, good


# The wide suite has one or two of each kind, and with CUPYFLASH_TEST_EXAMPLES all.
WIDE = {
    "O is not published",
    "zeros are not published",
    "barriers are not published",
    "V is released before its product",
    "Q is released before O has left",
    "V's slot is not empty at first",
    "K is waited for with the other parity",
    "V is waited for with the other parity",
    "Q is not waited for",
    "a cut block is there before it is cut",
    "K is expected a row short",
    "S is not fenced",
    "O is not fenced",
    "S is read before it is there",
    "P is overwritten while it is read",
    "another swizzle",
    "the second slab of Q is K's",
    "K a row on",
    "O is stored before the warpgroup has put it down",
    "O is not swizzled",
    "the mask is a key off",
    "a row block is skipped",
    "what is taken is not counted from 0",
    "what was not read is overwritten",
    "O is put where O has not left",
    "O is not rescaled",
    "warps wait apart",
    "the sink is forgotten",
    "nobody has the first turn",
    "warpgroups want more registers",
    "the mask knows one head",
    "a sequence's last rows go together",
    "what is behind a sequence counts",
}


# Where warps run together, these do no harm.
IN_ANOTHER_ORDER = {"warpgroups meet at one barrier"}


@pytest.mark.parametrize(
    "name",
    sample([name for name in MUTANTS if MORE > 1 or name in WIDE], {"V is released before its product"}),
)
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, seed = MUTANTS[name].problem, 0 if name in IN_ANOTHER_ORDER else None
    check_mutant(MUTANTS[name], schedule_of(problem), lambda schedule, _: of_case(problem, schedule, seed), tmp_path, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("problem", [*CASES, "packed", "packed, mask"])
def test_what_is_not_broken_is_clean(problem: str) -> None:
    check_unbroken(schedule_of(problem), partial(of_case, problem), range(1))
