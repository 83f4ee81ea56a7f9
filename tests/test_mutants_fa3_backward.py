"""Seeded faults in the Hopper's gradients: each is found, and what is not broken is clean under any order of execution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_backward_sparse import run_packed

from cupyflash import Device, Mask, Problem, Score
from cupyflash.schedules import BackwardSchedule, VarlenBackwardSchedule, fa3_backward, plan_backward, plan_varlen_backward
from cupyflash.sim.execution import BackwardExecution, execute_backward
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.numbers.yardstick import draw_gradient, draw_mask, knowing_mask
from cupyflash.sim.verification import DrawnInputs, VerifiedRun, run_drawn
from mutants import Mutant, check_mutant, check_unbroken
from suites import MORE, sample
from yardstick import draw

H100 = Device.named("H100-SXM")
PROBLEMS = {
    "": Problem(1, 1, 1, 100, 150, 80, "float16"),
    "groups": Problem(1, 2, 1, 70, 150, 80, "float16"),
    "many": Problem(1, 1, 1, 330, 130, 80, "float16"),
    "causal": Problem(1, 1, 1, 200, 200, 80, "float16", causal=True),
    "narrow": Problem(1, 1, 1, 150, 150, 40, "float16"),
    "dropout": Problem(1, 2, 1, 70, 150, 80, "float16", dropout=True),
    "by heads": Problem(1, 2, 1, 200, 200, 80, "float16", mask_function=Mask("q // 70 == k // 70 or h > 0 and q > k").form),
    "long": Problem(1, 1, 1, 2200, 70, 40, "float16", mask_function=Mask("q % 700 == k").form),
    "biased": Problem(1, 2, 1, 70, 150, 40, "float16", bias=True),
    "scored": Problem(1, 2, 1, 70, 150, 80, "float16", score=Score("2 * tanh(s / 2)").form, dropout=True),
    "wide": Problem(1, 1, 1, 150, 100, 192, "float16", score=Score("2 * tanh(s / 2)").form),
    "pair": Problem(1, 1, 1, 150, 200, 192, "float16"),
    "window pair": Problem(1, 1, 1, 200, 200, 192, "float16", window=(10, 0)),
    "apart": Problem(1, 1, 1, 200, 150, 80, "float16"),
    "apart pair": Problem(1, 1, 1, 200, 300, 80, "float16"),
}
DESIGNS = {"apart": 1, "window apart": 1, "apart pair": 2}
"""Ragged both ways; two column blocks, of two to six turns in blocks of 64 x 128, or of 128 x 128 where d is narrow."""


def mutant(old: str, new: str, finds: str, problem: str = "") -> Mutant:
    """A fault that is found in any line."""
    return Mutant("fa3_backward.cu", old, new, finds, ("",), problem)


# No harm do: dS without __syncwarp, whose readers wait in turns first; dO that is given back before dV, since the producer waits
# for Q's room before it takes dO's; keys that are not cleared, unless they hold infinities (test_fa3_backward.py).
MUTANTS = {
    "dS is not published": mutant(
        "    publish_writes();\n    __syncwarp();\n    announce(s.dS_full + 8 * room);",
        "    __syncwarp();\n    announce(s.dS_full + 8 * room);",
        "proxy",
    ),
    "dQ is not published": mutant(
        "    publish_writes();\n    __syncwarp();\n    announce(s.dQ_full);",
        "    __syncwarp();\n    announce(s.dQ_full);",
        "proxy",
    ),
    "dQ is there for one lane": mutant(
        "    publish_writes();\n    __syncwarp();\n    announce(s.dQ_full);",
        "    publish_writes();\n    announce(s.dQ_full);",
        "race",
    ),
    "the first zeros are not published": mutant(
        "    publish_writes();\n    __syncwarp();\n    announce(s.dS_full + 8);",
        "    __syncwarp();\n    announce(s.dS_full + 8);",
        "proxy",
    ),
    "there are no first zeros": mutant(
        "    for (int at = 0; at < dS_BYTES; at +=",
        "    for (int at = dS_BYTES; at < dS_BYTES; at +=",
        "uninitialised",
    ),
    "all heads drop the first one's weights": mutant(
        "dropout_of(p, w.number, head)", "dropout_of(p, w.number, 0)", "numbers", "dropout"
    ),
    "dropped weights reach dV": mutant("round(P, KeptWeights(S).of);", "round(P, S);", "numbers", "dropout"),
    "dV is not scaled by dropout": mutant("DROPOUT ? dropout_of(p, 0, 0).scale : 1.f", "1.f", "numbers", "dropout"),
    "weights are dropped by other keys": mutant(
        "const int key = j * BC + group * OWN_KEYS + thread",
        "const int key = j * BC + thread",
        "numbers",
        "dropout",
    ),
    "a mask is not asked": mutant("asks = MASK && kept_at(s, w, h, i) & 2;", "asks = false;", "numbers|bytes", "by heads"),
    "every mask is the first head's": mutant(
        "masks_of_head(p, masks, w, head, asks)", "masks_of_head(p, masks, w, 0, asks)", "numbers", "by heads"
    ),
    "all heads visit the first one's blocks": mutant(
        "(h * kept_words(w) + i / 32", "(i / 32", "numbers|deadlock|bytes", "by heads"
    ),
    "blocks that are left out have turns": mutant(
        "w.visits += __popc(kept[h * words + word]);",
        "w.visits = max(0, w.end - w.first) * p.group;",
        "deadlock|numbers|out of bounds|race",
        "by heads",
    ),
    "nobody waits for what a mask says": mutant(
        "  __syncwarp();\n  for (int word = w.first",
        "  for (int word = w.first",
        "race",
        "long",
    ),
    "the bias is that of other rows": mutant("((e % 2 ? 7 : 1) * row + (n", "(7 * row + (n", "numbers|out of bounds", "biased"),
    "a second key has the first one's bias": mutant("8 * col - BR * row", "-BR * row", "numbers", "biased"),
    "a score function has no derivative": mutant(": of_given_score(weight, scored.slope);", ": weight;", "numbers", "scored"),
    "dropped weights of scaled scores reach dV": mutant("if (!is_kept(kept, n, e)) P[", "if (false) P[", "numbers", "scored"),
    "dropped weights of scaled scores have gradients": mutant(
        "is_kept(kept, n, e) ? dropout.scale : 0.f", "dropout.scale", "numbers", "scored"
    ),
    "dS is given back before dQ is made": mutant(
        "      wait_for_products<0>(dQ);\n      if (PAIRED || n + 1 == QUERY_PARTS) release(s.dS_empty + 8 * slot.index);\n",
        "      if (PAIRED || n + 1 == QUERY_PARTS) release(s.dS_empty + 8 * slot.index);\n      wait_for_products<0>(dQ);\n",
        "race",
        "apart",
    ),
    "dQ's warpgroup does not wait for dS": mutant(
        "    wait_for(s.dS_full + 8 * slot.index, slot.parity);\n    if constexpr (PAIRED)",
        "    if constexpr (PAIRED)",
        "race|uninitialised|proxy",
        "apart",
    ),
    "dQ's warpgroup does not wait for the other's dS": mutant(
        "    if constexpr (PAIRED) wait_for(s.dS_came + 8 * slot.index, slot.parity);\n",
        "",
        "race|flight|uninitialised",
        "apart pair",
    ),
    "both of a pair make the same columns": mutant(
        "place.j % CLUSTER : unknown(n)", "0 : unknown(n)", "numbers|bytes", "apart pair"
    ),
    "dQ's parts are both the first": mutant("place.j % CLUSTER : unknown(n)", "0 : unknown(0)", "numbers|bytes", "apart"),
    "dK leaves before dQ is made": mutant(
        "      return wait_for(s.dS_empty + 8 * slot.index, slot.parity);", "      return;", "race", "apart"
    ),
    "one of a pair ends before the other": mutant(
        "  if constexpr (PAIRED && APART) meet_cluster();", "", "exited block", "apart pair"
    ),
    "the other's K comes unexpected": mutant(
        "SENT_BYTES : SENT_BYTES + share(1 - peer));", "SENT_BYTES : SENT_BYTES);", "transaction|deadlock|race|flight", "apart pair"
    ),
    "one warp gives dS back for all": mutant(
        "CLUSTER * (APART ? 4 : WARPS)", "CLUSTER * (APART ? 1 : WARPS)", "race|deadlock", "apart"
    ),
    "dS waits for a phase that is over": mutant("(APART ? 0 : slot.index)", "slot.index", "deadlock|race", "apart"),
    "wide heads' halves of columns are both the first": mutant("(SLABS > 1 ? group * NEXT : 0)", "0", "numbers", "wide"),
    "halves of a slab are written to the first one's place": mutant(
        "OWN_SLABS * 4 + group * 2;", "OWN_SLABS * 4;", "numbers|race", "wide"
    ),
    "the second piece of dQ is the first one": mutant("unknown(share)", "0", "numbers", "wide"),
    "the columns of both of a pair are the first one's": mutant(
        "w.j % CLUSTER * CONSUMERS + group, p.scale", "group, p.scale", "numbers", "pair"
    ),
    "columns of the other one's keys are the first one's": mutant(
        "(APART ? part : part / CONSUMERS) * PEER_BYTES", "0", "numbers|uninitialised", "pair"
    ),
    "the other one's keys are not waited for": mutant(
        "    if constexpr (ONE_ROOM) wait_for(s.K_came, 0);\n", "", "race|flight|uninit", "pair"
    ),
    "the other one's dS is not waited for": mutant(
        "    if constexpr (PAIRED) wait_for(s.dS_came, at.index);\n", "", "race|flight", "pair"
    ),
    "dS is sent before it is there": mutant(
        "    wait_for(s.dS_full + 8 * room, ONE_ROOM ? turn % 2 : turn / 2 % 2);\n", "", "race|uninit|proxy", "pair"
    ),
    "dS is sent over its own": mutant("copy_to(dS + dS_BYTES, dS +", "copy_to(dS, dS +", "race|uninit", "pair"),
    "dS comes unexpected": mutant(
        "    arrive_expecting(came, ONE_ROOM || turn ?", "    arrive(came), (0 ?", "race|flight|transaction", "pair"
    ),
    "each loads Q and dO for both": mutant(
        "for (int slab = unknown(w.j) % CLUSTER; slab < slabs; slab += CLUSTER)",
        "for (int slab = 0; slab < slabs; slab++)",
        "transaction|race|deadlock",
        "pair",
    ),
    "a pair's room is given back for its own": mutant(
        "if (threadIdx.x % 32 < CLUSTER) arrive_in(empty, threadIdx.x % 32);",
        "if (threadIdx.x % 32 < CLUSTER) arrive(empty);",
        "race|phase|flight",
        "pair",
    ),
    "a pair leaves through what the other one reads": mutant(
        "return wait_for(s.dS_empty, slot.index);", "return;", "race|exited block", "pair"
    ),
    "the other one has not begun": mutant(
        "  if constexpr (PAIRED) meet_cluster();  // the other one has begun\n", "", "not begun", "pair"
    ),
    "both of a pair have the same keys": mutant("w.kv_head, w.j + 1, w.keys", "w.kv_head, w.j, w.keys", "race|numbers", "pair"),
    "a pair's rows are those of its first keys": mutant(
        "cols = min(CLUSTER * BC, w.keys - first_key)", "cols = min(BC, w.keys - first_key)", "numbers", "window pair"
    ),
    "half of dS is not handed on": mutant(
        "if (WIDE && k / (BR / 32) != group) continue;", "if (WIDE && k / (BR / 32)) continue;", "uninitialised", "wide"
    ),
    "slabs leave before both warpgroups have written them": mutant(
        "  meet(WIDE ? BOTH : OWN + group, WIDE ? WARPGROUP * CONSUMERS : WARPGROUP);\n",
        "  meet(OWN + group, WARPGROUP);\n",
        "race",
        "wide",
    ),
    "barriers are not published": mutant(
        "    publish_barriers();\n",
        "",
        "proxy",
    ),
    "nobody waits for barriers": mutant(
        "  __syncthreads();\n  if (VARLEN && read_work",
        "  if (VARLEN && read_work",
        "race",
    ),
    "gradients are not published on their way out": mutant(
        "  publish_writes();\n  meet(WIDE ?",
        "  meet(WIDE ?",
        "proxy",
    ),
    "gradients leave before they are there": mutant(
        "  meet(WIDE ? BOTH : OWN + group, WIDE ? WARPGROUP * CONSUMERS : WARPGROUP);\n",
        "",
        "race",
    ),
    "nobody waits until all are done with K": mutant(
        "    if constexpr (!PAIRED && !APART) meet(BOTH, WARPGROUP * CONSUMERS);  // all are done with K_j\n",
        "",
        "race",
    ),
    "a thread block ends before its gradients are read": mutant(
        "    wait_for_stores();\n  }\n}",
        "  }\n}",
        "in flight",
    ),
    "dQ is overwritten while it is added": mutant(
        "    wait_for_stores();\n    arrive(s.dQ_empty);",
        "    arrive(s.dQ_empty);",
        "in flight|race",
    ),
    "dQ is put where the last has not left": mutant(
        "    wait_for(s.dQ_empty, 1 - at.index);",
        "    ",
        "deadlock",
    ),
    "dQ is added before it is there": mutant(
        "    wait_for(s.dQ_full, parity);\n    parity ^= 1;",
        "    parity ^= 1;",
        "race",
    ),
    "dQ's phases do not alternate": mutant(
        "    parity ^= 1;\n#if ORDERED",
        "#if ORDERED",
        "deadlock",
    ),
    "the first dQ counts": mutant(
        "  wait_for(s.dQ_full, 0);\n  arrive(s.dQ_empty);  // the first dQ is of no turn\n  int parity = 1;",
        "  int parity = 0;",
        "numbers",
    ),
    "dQ of the last turn is forgotten": mutant(
        "    multiply_shared<QueryColumns>(dQ, slot.next());\n    finish_queries<false>(dQ, slot.next(), [] {}, add_last);\n"
        "    hand_on_queries();\n",
        "",
        "deadlock",
    ),
    "all pieces of dQ have all rows": mutant(
        "end = before + min(BR, w.rows(p) - i * BR), first",
        "end = (before + min(BR, w.rows(p) - i * BR) + 7) / 8 * 8, first",
        "bytes",
    ),
    "pieces that have not all rows are forgotten": mutant(
        "    if (end % 8 && whole >= 0) add_some",
        "    if (false) add_some",
        "numbers",
    ),
    "dQ is added to another row block": mutant(
        "p.total_q, w.row(i) - before, 0);",
        "p.total_q, w.row(max(0, i - 1)) - before, 0);",
        "numbers",
    ),
    "dQ is added to the first head's": mutant(
        "sums_of(p.dQ_acc, w.plane(p, h),",
        "sums_of(p.dQ_acc, w.plane(p, 0),",
        "numbers",
        problem="groups",
    ),
    "dS is stored where it is read": mutant(
        "    wait_for(s.dS_empty + 8 * room, ONE_ROOM ? 1 - slot.index : 1 ^ slot.parity ^ (APART ? 0 : slot.index));\n",
        "",
        "race",
        problem="many",
    ),
    "dS is multiplied before it is there": mutant(
        "    wait_for(s.dS_full + 8 * room, PAIRED ? at.index : at.parity);\n",
        "",
        "race",
    ),
    "dS is of the turn itself": mutant(
        "    const int room = PAIRED ? 0 : 1 - at.index;",
        "    const int room = at.index;",
        "deadlock",
    ),
    "dS is given back at once": mutant(
        "    release(s.dS_empty + (PAIRED ? 0 : 8 * (1 - at.index)));\n",
        "",
        "deadlock",
    ),
    "Q is not waited for": mutant(
        "    wait_for(s.Q_full + 8 * at.index, at.parity);\n",
        "",
        "in flight|race|uninitialised",
    ),
    "dO is not waited for": mutant(
        "    wait_for(s.dO_full + 8 * slot.index, slot.parity);\n",
        "",
        "deadlock|in flight|race|uninitialised",
    ),
    "Q is waited for with the other parity": mutant(
        "    wait_for(s.Q_full + 8 * at.index, at.parity);",
        "    wait_for(s.Q_full + 8 * at.index, at.parity ^ 1);",
        "in flight|race|uninitialised",
    ),
    "K and V are not waited for": mutant(
        "    wait_for(s.KV_full, 0);\n",
        "",
        "in flight",
    ),
    "Q is released before dK": mutant(
        "    wait_for_products<!APART>(dK);\n    release(s.Q_empty + 8 * slot.index);",
        "    release(s.Q_empty + 8 * slot.index);\n    wait_for_products<!APART>(dK);",
        "race",
        problem="many",
    ),
    "Q is never released": mutant(
        "    release(s.Q_empty + 8 * slot.index);\n",
        "",
        "deadlock",
        problem="many",
    ),
    "a warp releases Q for all": mutant(
        "init_barrier(Q_empty + 8 * slot, CLUSTER * WARPS)",
        "init_barrier(Q_empty + 8 * slot, 1)",
        "in flight|race",
        problem="many",
    ),
    "a warp releases dO for all": mutant(
        "init_barrier(dO_empty + 8 * slot, CLUSTER * WARPS)",
        "init_barrier(dO_empty + 8 * slot, 1)",
        "deadlock",
        problem="many",
    ),
    "a warp hands on dS for all": mutant(
        "init_barrier(dS_full + 8 * slot, of_peer ? 1 : WARPS)",
        "init_barrier(dS_full + 8 * slot, 1)",
        "deadlock",
    ),
    "a warp hands on dQ for all": mutant(
        "init_barrier(dQ_full, APART ? 1 : WARPS)",
        "init_barrier(dQ_full, 1)",
        "deadlock",
    ),
    "Q is there without its rows' numbers": mutant(
        "init_barrier(Q_full + 8 * slot, 2)",
        "init_barrier(Q_full + 8 * slot, 1)",
        "in flight|race|uninitialised",
    ),
    "dO is there without D": mutant(
        "init_barrier(dO_full + 8 * slot, 2)",
        "init_barrier(dO_full + 8 * slot, 1)",
        "deadlock|uninitialised",
    ),
    "Q is expected a row short": mutant(
        "arrive_expecting(cut ? s.came : full, bytes);",
        "arrive_expecting(cut ? s.came : full, bytes - SLAB_ROW);",
        "deadlock",
    ),
    "slots are not empty at first": mutant(
        "  Slot slot = {0, 1};\n",
        "  Slot slot = {0, 0};\n",
        "deadlock",
    ),
    "S is read before it is there": mutant(
        "    wait_for_products<LATE ? 0 : 1>(S);\n",
        "    wait_for_products<2>(S);\n",
        "in flight",
    ),
    "dP is read before it is there": mutant(
        "    wait_for_products<0>(dP);\n",
        "    wait_for_products<1>(dP);\n",
        "in flight",
    ),
    "dQ is read before it is there": mutant(
        "      wait_for_products<BESIDE>(dQ);\n",
        "      wait_for_products<BESIDE + 1>(dQ);\n",
        "in flight|race",
        problem="many",
    ),
    "the mask is a row off": mutant(
        "first_key(j), i * BR, Nq, [&](int n, int e, int row, int key, bool seen) {\n        if constexpr (MASK)",
        "first_key(j), i * BR + 1, Nq, [&](int n, int e, int row, int key, bool seen) {\n        if constexpr (MASK)",
        "numbers",
        problem="causal",
    ),
    "no block is masked": mutant(
        "    if (!whole || asks) {",
        "    if (false) {",
        "numbers",
        problem="causal",
    ),
    "rows that are not there count": mutant(
        "L[n] = 32 * n < rows ? p.L[row + 32 * n] : -NEG_INF;",
        "L[n] = p.L[min(row + 32 * n, row + rows - 1)];",
        "bytes",
    ),
    "exponents are not negative": mutant(
        "L[n] * -UNIT);",
        "L[n] * UNIT);",
        "numbers",
    ),
    "D is forgotten": mutant(
        "const float d = e % 2 ? D[n].y : D[n].x;",
        "const float d = 0.f;",
        "numbers",
    ),
    "D is the other row's": mutant(
        "const float d = e % 2 ? D[n].y : D[n].x;",
        "const float d = e % 2 ? D[n].x : D[n].y;",
        "numbers",
    ),
    "dK is not scaled": mutant(
        "write_rows<KeyColumns>(c.dK, p.scale,",
        "write_rows<KeyColumns>(c.dK, 1.f,",
        "numbers",
    ),
    "dS is not swizzled": mutant(
        "const unsigned chunk = (k % 4 * 2 + thread % 32 / 16) ^ row % 8;",
        "const unsigned chunk = k % 4 * 2 + thread % 32 / 16;",
        "numbers",
    ),
    "both warpgroups have the first keys": mutant(
        "Operand::rows(tile) + unknown(group) * (OWN_KEYS * SLAB_ROW)",
        "Operand::rows(tile)",
        "numbers",
    ),
    "both make the same part of dQ": mutant(
        "BY_ROWS ? part * BC * SLAB_ROW : 0;",
        "0;",
        "numbers",
        problem="narrow",
    ),
    "a row block is skipped": mutant(
        "if (--of_block == 0) i--, of_block",
        "if (--of_block == 0) i = max(0, i - 2), of_block",
        "numbers",
        problem="causal",
    ),
    "nobody has the first turn": mutant(
        "    if (PING_PONG && group == CONSUMERS - 1) pass_turn();\n",
        "",
        "deadlock",
    ),
    "the second head's rows are the first's": mutant(
        "return plane(p, h) * p.total_q + row(i);",
        "return plane(p, 0) * p.total_q + row(i);",
        "numbers",
        problem="groups",
    ),
}
# Of dQ in one order, by its bits. A turn that is passed on before the additions are finished is no fault here: the machine finishes
# them in the order in which they are issued.
ORDERED = {
    "nobody waits for its turn": mutant("    wait_for_turn(added, ", "    if (false) wait_for_turn(added, ", "numbers"),
    "a turn is passed on before it is taken": mutant(
        "    wait_for_turn(added, w.j - visible_begin(masks, i * BR) / BC);\n",
        "    pass_turn_on(added);\n    wait_for_turn(added, 1 + w.j - visible_begin(masks, i * BR) / BC);\n",
        "endless",
    ),
    "a turn is not passed on": mutant("    pass_turn_on(added);\n", "", "endless"),
    "turns are those of the first row block": mutant(
        "p.turns + w.row_of(p, h, i);", "p.turns + w.row_of(p, h, 0);", "endless|deadlock"
    ),
    "dQ's warpgroup does not wait for its turn": mutant(
        "  if (thread == 0) wait_for_turn(p.turns", "  if (false) wait_for_turn(p.turns", "numbers", "apart"
    ),
    "dQ's warpgroup has the turns of other rows": mutant(
        "masks_of(p, 0, 0, place.rows(p), VARLEN ? place.keys : p.Nk, p.Nk)",
        "masks_of(p, 0, 0, VARLEN ? place.keys : p.Nk, place.rows(p), p.Nk)",
        "numbers|endless|deadlock",
        "window apart",
    ),
    "turns begin at the first key": mutant("w.j - visible_begin(masks, i * BR) / BC", "w.j", "endless|deadlock", problem="window"),
    "turns begin anywhere": Mutant(
        "fa2_backward_rows.cuh",
        "if (first == 0 && place.row < p.total_q) p.turns[place.at] = 0;",
        "",
        "uninitialised",
        ("",),
    ),
    "the blocks that have begun are taken for additions": mutant("found % BEGUN != before", "found != before", "endless"),
    "a pair waits for as many as thread blocks": mutant(
        "(w.j / CLUSTER - visible", "(w.j - visible", "endless|deadlock", problem="pair"
    ),
    "all blocks have the first keys": mutant("w.row_of(p, 0, 0), BEGUN)", "w.row_of(p, 0, 0), 0)", "race"),
}
# Of packed sequences. What lies behind a sequence is cleared for infinities alone (test_fa3_backward.py), and a thread block too
# many would have no turns.
PACKED = {
    "dQ lies as if it began with 8 rows": mutant("thread % 32 / 4 + first_query % 8;", "thread % 32 / 4;", "numbers"),
    "dQ's first rows are forgotten": mutant("    if (before) add_some", "    if (false) add_some", "numbers"),
    "rows of the sequence before are added to": mutant(
        "add_some(sums, s.dQ, before, min(8, end) - before);", "add_some(sums, s.dQ, 0, min(8, end));", "uninitialised|numbers"
    ),
    "the last keys leave with those behind": mutant("    if (keys < 64) {", "    if (false) {", "race"),
    "thread blocks of sequences are not counted apart": mutant(
        "w.j -= w.first_key / BC + number;", "w.j -= w.first_key / BC;", "numbers"
    ),
    "what comes first is not told apart": mutant("    came ^= 1;\n", "", "in flight"),
    "what has come is not waited for": mutant("    wait_for(s.came, came);\n", "", "race|in flight|proxy"),
    "zeros are not published": mutant(
        "    clear_rows<BR>(tile, slabs, rows);\n    publish_writes();\n", "    clear_rows<BR>(tile, slabs, rows);\n", "proxy"
    ),
    "rows are those of the first sequence": mutant("(VARLEN ? first_query : 0) + i * BR", "i * BR", "numbers"),
    "keys are those of the first sequence": mutant("(VARLEN ? first_key : 0) + j * BC", "j * BC", "race|numbers"),
    "as many rows as in the longest": mutant("return VARLEN ? queries : p.Nq;", "return p.Nq;", "numbers"),
}
# The wide suite has these, and with CUPYFLASH_TEST_EXAMPLES all.
WIDE = {
    "dS is not published",
    "there are no first zeros",
    "gradients leave before they are there",
    "nobody waits until all are done with K",
    "dQ is overwritten while it is added",
    "dQ is added before it is there",
    "pieces that have not all rows are forgotten",
    "all pieces of dQ have all rows",
    "dS is stored where it is read",
    "dS is multiplied before it is there",
    "dO is not waited for",
    "Q is released before dK",
    "a warp releases Q for all",
    "Q is there without its rows' numbers",
    "dP is read before it is there",
    "the mask is a row off",
    "rows that are not there count",
    "both make the same part of dQ",
    "nobody has the first turn",
    "the second head's rows are the first's",
}


def planned(name: str) -> BackwardSchedule:
    """The schedule of a problem, which knows what its mask says."""
    design = fa3_backward.designs(PROBLEMS[name])[DESIGNS.get(name, 0)]
    return knowing_mask(plan_backward(PROBLEMS[name], H100, "fa3", design), 0, draw_mask(PROBLEMS[name], 0))


def run(schedule: BackwardSchedule, seed: int | None) -> tuple[VerifiedRun, bool]:
    """A run on drawn arrays, and whether its numbers are right."""
    found = run_drawn(schedule, DrawnInputs.of(schedule.problem, 0), 1.0, seed)
    return found, all(each.good for each in found.numbers.values())


@pytest.mark.parametrize("name", sample([name for name in MUTANTS if MORE > 1 or name in WIDE], {"dS is stored where it is read"}))
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = MUTANTS[name]
    check_mutant(fault, planned(fault.problem), run, tmp_path, monkeypatch)


IN_ORDER = {
    "": Problem(1, 1, 1, 130, 600, 40, "float16"),
    "window": Problem(1, 1, 1, 400, 400, 40, "float16", window=(130, 0)),
    "apart": Problem(1, 1, 1, 330, 1100, 40, "float16"),
    "window apart": Problem(1, 1, 1, 400, 300, 40, "float16", window=(130, 0)),
    "pair": Problem(1, 1, 1, 60, 500, 136, "float16"),
}
"""Five and four column blocks, nine and three where dQ is made apart, four of pairs: of two additions to zero, order changes
nothing, and of three the machine's orders seldom."""


def bits(schedule: BackwardSchedule, seed: int | None) -> tuple[BackwardExecution, bytes]:
    """A run on drawn arrays, and dQ's bits."""
    q, k, v = draw(schedule.problem)
    window = schedule.problem.options.window
    out, lse = reference(q, k, v, window=window)
    given = draw_gradient(schedule.problem), q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    found = execute_backward(schedule, *given, seed=seed)
    return found, found.dq.tobytes()


@pytest.mark.parametrize("name", sample(list(ORDERED), {"all blocks have the first keys"}))
def test_mutant_of_the_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ORDERED[name]
    monkeypatch.setenv("CUPYFLASH_STALL_SECONDS", "2")  # in which this machine's kernels come far
    design = fa3_backward.designs(IN_ORDER[fault.problem], True)[DESIGNS.get(fault.problem, 0)]
    schedule = plan_backward(IN_ORDER[fault.problem], H100, "fa3", design, deterministic=True)
    _, right = bits(schedule, None)

    def in_some_orders(schedule: BackwardSchedule, _: int | None) -> tuple[BackwardExecution, bool]:
        runs = []
        for seed in (None, 0, 1, 2):
            runs.append(bits(schedule, seed))
            if runs[-1][0].findings:
                break
        return runs[-1][0], all(made == right for _, made in runs)

    check_mutant(fault, schedule, in_some_orders, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", sample(list(PACKED), {"dQ's first rows are forgotten"}))
def test_mutant_of_packed_sequences(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(3, 1, 1, 100, 150, 80, "float16", packed=True)
    schedule = plan_varlen_backward(problem, H100, ((21, 30), (100, 150), (68, 131)), algorithm="fa3")

    def run_each(schedule: VarlenBackwardSchedule, seed: int | None) -> tuple[BackwardExecution, bool]:
        found, numbers = run_packed(schedule, seed)
        return found, all(each.good for each in numbers)

    check_mutant(PACKED[name], schedule, run_each, tmp_path, monkeypatch)


@pytest.mark.wide
@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_is_not_broken_is_clean(problem: str) -> None:
    check_unbroken(planned(problem), run, range(2))
