"""The problems on which faults are seeded in FlashAttention-2's backward kernels, and the lines at which they are found."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import test_backward
from test_backward_sparse import run_packed

from cupyflash import Device, Problem
from cupyflash.request.options import BlockMask
from cupyflash.schedules import BackwardSchedule, VarlenBackwardSchedule, plan_backward, plan_varlen_backward
from cupyflash.sim.execution import BackwardExecution
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn

A100, H100, T4 = (Device.named(name) for name in ("A100-40GB", "H100-SXM", "T4"))
BWD, DQ, PRODUCTS, MASK = "fa2_backward.cu", "fa2_backward_queries.cu", "row_products.cuh", "mask.cuh"
ROWS = "fa2_backward_rows.cuh"
SEQUENCE, SUM = "sequence.cuh", "query_sum.cuh"
COPY, COPY_FLOAT, LDMATRIX, MMA = "cp.async.cg.shared.global", "cp.async.ca.shared.global", "ldmatrix.sync", "mma.sync"
STORE_TWO, STORE_TILE = "st.shared.b32", "reinterpret_cast<uint4*>"
ATOMIC, RED = "atomicAdd", "red.global.add"
MOVED = (COPY, LDMATRIX, COPY_FLOAT, "float2*>(slot.")
MOVED_ROWS = (*MOVED, "L_smem[", "D_smem[")
DS = (STORE_TWO, LDMATRIX)
LEFT = (STORE_TWO, STORE_TILE)
SYNC, SYNCWARP = "__syncthreads();", "__syncwarp();"

KEPT = BlockMask.of(np.array([[[[1, 0], [1, 1]], [[0, 1], [0, 1]]]], bool))
PROBLEMS = {
    "": Problem(1, 2, 1, 45, 70, 32, "float16"),
    "groups": Problem(1, 4, 2, 45, 70, 32, "float16"),
    "float": Problem(1, 2, 1, 45, 70, 32, "float32"),
    "dV, then dK": Problem(1, 1, 1, 45, 70, 256, "float16"),
    "odd width": Problem(1, 2, 1, 45, 70, 40, "float16"),
    "causal": Problem(1, 2, 2, 90, 70, 32, "float16", causal=True),
    "window": Problem(1, 1, 1, 70, 90, 32, "float16", window=(25, 20)),
    "mask": Problem(1, 2, 1, 45, 70, 32, "float16", mask=True),
    # Each head of K has thread blocks of its own, and both sum the bias's gradient.
    "bias": Problem(1, 2, 2, 45, 70, 32, "float16", bias=True),
    "lengths": Problem(1, 2, 1, 45, 70, 32, "float16", padded=True, key_lengths=(37,)),
    "rows": Problem(1, 2, 1, 150, 70, 32, "float16"),
    "rows of groups": Problem(1, 4, 2, 150, 70, 32, "float16"),
    "causal rows": Problem(1, 1, 1, 150, 130, 32, "float16", causal=True),
    "window of rows": Problem(1, 1, 1, 150, 130, 32, "float16", window=(25, 10)),
    "blocks": Problem(1, 2, 1, 300, 150, 32, "float16", block_mask=KEPT),
    "packed": Problem(4, 4, 2, 45, 70, 32, "float16", causal=True),
    "32 keys": Problem(1, 1, 1, 70, 150, 48, "float16", causal=True),
    "shared keys": Problem(1, 2, 1, 150, 130, 128, "float16", causal=True),
    "wide": Problem(1, 1, 1, 45, 70, 16, "float16", head_dim_v=272),
    "wide, by turns": Problem(1, 1, 1, 45, 70, 16, "float16", head_dim_v=272),
    "wide dQ": Problem(1, 1, 1, 45, 70, 272, "float16", head_dim_v=16),
}
"""Ragged both ways, several row blocks and column blocks of two warps; where there are more rows than keys, some see nothing."""
PLANNED = ("32 keys", "shared keys")  # with the blocks that an A100 gets
SMALL = {"wide": "45KB", "wide, by turns": "20KB"}  # with room for one Q and dO block, and for either

SEQLENS = ((5, 40), (0, 9), (45, 70), (33, 0))


@cache
def schedule(problem: str, device: Device = A100) -> BackwardSchedule:
    """`problem` is one of PROBLEMS, "one stage: " one of them with room for one Q and dO block, "fixed: " with a kernel for dQ."""
    kind, _, name = problem.rpartition(": ")
    p, tiling = PROBLEMS[name], None if name in PLANNED else (32, 32) if name.startswith("wide") else (16, 32)
    device = device.with_sram("8KB") if kind == "one stage" else device
    device = device.with_sram(SMALL[name]) if name in SMALL else device
    if name == "packed":
        return plan_varlen_backward(p, device, SEQLENS, tiling, deterministic=kind == "fixed")
    plain = plan_backward(p.asking(block_mask=None), device, "fa2", tiling, deterministic=kind == "fixed", dbias=p.options.bias)
    return replace(plain, problem=p, mask_blocks=(256, 128)) if p.options.block_mask else plain


def backward(schedule: BackwardSchedule, seed: int | None = None) -> tuple[BackwardExecution, bool]:
    """A bias is shared by the heads, and leaves a row nothing."""
    if isinstance(schedule, VarlenBackwardSchedule):
        execution, of_each = run_packed(schedule, seed)
        return execution, all(each.good for each in of_each)
    inputs = drawn(schedule.problem, v_mean=1.0, blocks=schedule.mask_blocks)
    if "bias" in inputs.beside:
        bias = inputs.beside["bias"][:, :1].copy()
        bias[:, :, 4] = -np.inf
        inputs = replace(inputs, beside={**inputs.beside, "bias": bias})
    execution, numbers = test_backward.backward_with_errors(schedule, inputs, draw_gradient(schedule.problem), seed)
    return execution, all(each.good for each in numbers.values())
