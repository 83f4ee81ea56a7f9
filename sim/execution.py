"""Executes a schedule's kernels on the PTX machine: numbers, and the bytes that the kernels really moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash.binding import NO_MASKS, Masks, argument_values, gradient_values, kernel_arguments
from cupyflash.compiler import ptx
from cupyflash.gradients import check_beside
from cupyflash.problem import Problem, numpy_dtype
from cupyflash.rows import Rows, softmax_values
from cupyflash.schedules import (
    BackwardSchedule,
    Kernel,
    Schedule,
    SoftmaxSchedule,
    TileSchedule,
    VarlenBackwardSchedule,
    VarlenSchedule,
    require_schedule,
)
from cupyflash.sim.ptx import Counters, Finding, Module
from cupyflash.sim.traffic import TensorTraffic, Traffic
from cupyflash.varlen import heads_first, pose

# Called when a thread block has completed a barrier, with the block's index and how many barriers it has completed.
OnBarrier = Callable[[int, int], None]


@dataclass(frozen=True)
class Execution:
    """What executing a schedule gave. All counts are simulated: they are of PTX instructions, not of machine code.

    `out` has q's shape and dtype (softmax: x's), `lse` is float32 of shape q.shape[:-1] or None; `traffic` in bytes per tensor;
    `counters` by kernel name, of all its launches; `findings` what the machine held against the kernels.
    """

    out: np.ndarray
    lse: np.ndarray | None
    traffic: Traffic
    counters: dict[str, Counters]
    findings: tuple[Finding, ...]


def execute(
    schedule: TileSchedule,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_lengths: np.ndarray | None = None,
    block_mask: np.ndarray | None = None,
    seed: int | None = None,
) -> Execution:
    """Run a schedule's real kernels on NumPy arrays that pose its problem.

    `seed` None runs warps together where they agree; an integer schedules them in a random order drawn from it.
    Raises ValueError when the arrays pose another problem than the schedule's, ImportError without NVRTC.
    """
    require_schedule(schedule, TileSchedule, "plan", (BackwardSchedule, VarlenSchedule))
    masks = {"mask": mask, "bias": bias, "key_lengths": key_lengths, "block_mask": block_mask}
    _require_posed(schedule.problem, q, k, v, masks)
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = np.empty(q.shape[:-1], np.float32) if schedule.lse else None
    return run(schedule, q, k, v, out, lse, allocate(schedule), masks=_bound(masks), seed=seed)


def _require_posed(p: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, masks: Mapping[str, np.ndarray | None]) -> None:
    """TypeError or ValueError unless the arrays are NumPy's and pose the problem `p`."""
    _require_numpy(q=q, k=k, v=v, **masks)
    posed = Problem.from_arrays(q, k, v, causal=p.causal, window=p.window, scale=p.scale, **masks)
    if replace(posed, alignment=p.alignment) != p or posed.alignment < p.alignment:
        raise ValueError(f"the arrays pose {posed}, but the schedule is for {p}")


def _require_numpy(**arrays: object) -> None:
    """TypeError for what is neither a NumPy array nor None."""
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) and (array is not None or name in "qkv"):
            raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")


def _bound(masks: Mapping[str, np.ndarray | None]) -> Masks:
    """Masks as kernels take them."""
    lengths = masks["key_lengths"]
    return Masks(**{**masks, "key_lengths": None if lengths is None else np.ascontiguousarray(lengths, np.int32)})


@dataclass(frozen=True)
class BackwardExecution:
    """What executing a backward schedule gave: gradients of q's dtype and the shapes of q, k and v; the rest as `Execution`."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    traffic: Traffic
    counters: dict[str, Counters]
    findings: tuple[Finding, ...]


def execute_backward(
    schedule: BackwardSchedule,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_lengths: np.ndarray | None = None,
    block_mask: np.ndarray | None = None,
    dbias: np.ndarray | None = None,
    seed: int | None = None,
) -> BackwardExecution:
    """Run a backward schedule's real kernels on NumPy arrays that pose its problem, with the forward's `out` and `lse`.

    `dbias`, zeros in float32 of the bias's shape, receives its gradient where the schedule makes it.
    `seed`, and what this raises, as for `execute`.
    """
    require_schedule(schedule, BackwardSchedule, "plan_backward", (VarlenBackwardSchedule,))
    masks = {"mask": mask, "bias": bias, "key_lengths": key_lengths, "block_mask": block_mask}
    _require_posed(schedule.problem, q, k, v, masks)
    check_beside({"dout": dout, "q": q, "v": v, "out": out, "lse": lse}, q.shape[:-1])
    if schedule.dbias and (bias is None or dbias is None or dbias.shape != bias.shape or dbias.dtype != np.float32):
        raise ValueError("dbias must be zeros in float32 of the bias's shape: the schedule makes its gradient")
    dq, dk, dv = (np.empty_like(array, order="C") for array in (q, k, v))
    arrays = {"Q": q, "K": k, "V": v, "O": out, "dO": dout, "dQ": dq, "dK": dk, "dV": dv, "dbias": dbias}
    arrays["L"] = np.ascontiguousarray(lse)
    return BackwardExecution(dq, dk, dv, *run_backward(schedule, arrays, masks=_bound(masks), seed=seed))


def run_backward(
    schedule: BackwardSchedule, arrays: Mapping[str, Any], *, masks: Masks = NO_MASKS, seed: int | None = None
) -> tuple[Traffic, dict[str, Counters], tuple[Finding, ...]]:
    """Run a backward schedule's kernels into given gradients; `arrays` by their names in `gradient_values`."""
    workspaces = allocate(schedule)
    values = gradient_values(schedule, arrays, workspaces, masks)
    return run_kernels(schedule, values, (*schedule.results, *workspaces), seed=seed)


def execute_varlen(schedule: VarlenSchedule, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, seed: int | None = None) -> Execution:
    """Run the real kernel on packed sequences, q (total_q, h, d), k and v likewise; `lse` is (h, total_q).

    `seed` as in `execute`. Raises ValueError when the schedule does not say its lengths or the arrays pose another problem.
    """
    require_schedule(schedule, VarlenSchedule, "plan_varlen")
    cu_seqlens = _posed_varlen(schedule, q, k, v)
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = np.empty(q.shape[1::-1], np.float32) if schedule.lse else None
    views = {name: heads_first(array) for name, array in (("q", q), ("k", k), ("v", v), ("out", out))}
    execution = run(schedule, **views, lse=lse, workspaces=allocate(schedule), masks=Masks(**cu_seqlens), seed=seed)
    return replace(execution, out=out)


def execute_varlen_backward(
    schedule: VarlenBackwardSchedule,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    seed: int | None = None,
) -> BackwardExecution:
    """Run the real backward kernels on packed sequences: q (total_q, h, d) and so on, `lse` (h, total_q); `seed` as in `execute`.

    Raises as `execute_varlen` does.
    """
    require_schedule(schedule, VarlenBackwardSchedule, "plan_varlen_backward")
    cu_seqlens = _posed_varlen(schedule, q, k, v)
    check_beside({"dout": dout, "q": q, "v": v, "out": out, "lse": lse}, q.shape[1::-1])
    dq, dk, dv = (np.empty_like(array, order="C") for array in (q, k, v))
    named = {"Q": q, "K": k, "V": v, "O": out, "dO": dout, "dQ": dq, "dK": dk, "dV": dv}
    arrays = {name: heads_first(array) for name, array in named.items()} | {"L": np.ascontiguousarray(lse)}
    return BackwardExecution(dq, dk, dv, *run_backward(schedule, arrays, masks=Masks(**cu_seqlens), seed=seed))


def _posed_varlen(
    schedule: VarlenSchedule | VarlenBackwardSchedule, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> dict[str, np.ndarray]:
    """The sequences' bounds. ValueError when the schedule does not say their lengths, or the arrays pose another problem."""
    _require_numpy(q=q, k=k, v=v)
    if schedule.seqlens is None:
        raise ValueError("schedule must say how long its sequences are (seqlens)")
    p = schedule.problem
    lengths = np.array(schedule.seqlens, np.int64).reshape(-1, 2)
    cu_seqlens = {f"cu_seqlens_{side}": np.cumsum([0, *lengths[:, place]], dtype=np.int32) for place, side in enumerate("qk")}
    said: dict[str, Any] = {"max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k, "scale": p.scale, **cu_seqlens}
    posed, _ = pose(q, k, v, causal=p.causal, window=p.window, **said)
    if replace(posed, alignment=p.alignment) != p or posed.alignment < p.alignment:
        raise ValueError(f"the arrays pose {posed}, but the schedule is for {p}")
    return cu_seqlens


def allocate(schedule: TileSchedule) -> dict[str, np.ndarray]:
    """The schedule's workspaces as NumPy arrays, by tensor name."""
    return {name: np.empty(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()}


def run(
    schedule: TileSchedule,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None,
    workspaces: dict[str, np.ndarray],
    *,
    masks: Masks = NO_MASKS,
    seed: int | None = None,
    on_barrier: OnBarrier | None = None,
) -> Execution:
    """Run the kernels into given outputs and workspaces, whose contents count as nobody's; `on_barrier` may look at them while
    a kernel runs."""
    values = argument_values(schedule, q, k, v, out, lse, workspaces, masks)
    made = (*schedule.results, *workspaces)
    return Execution(out, lse, *run_kernels(schedule, values, made, seed=seed, on_barrier=on_barrier))


def execute_softmax(schedule: SoftmaxSchedule, x: np.ndarray, *, axis: int = -1, seed: int | None = None) -> Execution:
    """Run a softmax schedule's real kernel on a NumPy array with rows of its length along `axis`; `lse` is None.

    `seed` as in `execute`. Raises ValueError when x has other rows than the schedule's.
    """
    require_schedule(schedule, SoftmaxSchedule, "plan_softmax")
    if not isinstance(x, np.ndarray) or x.ndim == 0:
        raise TypeError(f"x must be a NumPy array of one axis or more, got {x!r}")
    out = np.empty_like(x)
    rows = Rows.of(x, out, axis % x.ndim)
    if (rows.rows, rows.cols, str(x.dtype)) != (schedule.rows, schedule.cols, schedule.dtype):
        raise ValueError(
            f"x has {rows.rows} rows of {rows.cols} {x.dtype}, but the schedule is for {schedule.rows} of {schedule.cols} "
            f"{schedule.dtype}"
        )
    return Execution(out, None, *run_kernels(schedule, softmax_values(x, out, rows), ("y",), seed=seed))


def run_kernels(
    schedule: Schedule,
    values: Mapping[str, Any],
    made: Collection[str],
    *,
    seed: int | None = None,
    on_barrier: OnBarrier | None = None,
) -> tuple[Traffic, dict[str, Counters], tuple[Finding, ...]]:
    """Run a schedule's kernels with `values` for their parameters: traffic, counters by kernel, findings.

    `made` names the outputs and workspaces: until a kernel has stored there, nobody may read them.
    """
    tensors: dict[str, TensorTraffic] = {}
    counters: dict[str, Counters] = {}
    findings: list[Finding] = []
    unwritten: dict[str, Any] = {name: True for name in made if isinstance(values[name], np.ndarray)}
    for kernel in schedule.kernels():
        if kernel.grid == 0:
            continue
        launch = module(kernel, schedule.chip.compute_capability).launch(
            kernel.name,
            kernel.grid,
            kernel.threads,
            kernel_arguments(kernel, values),
            shared_bytes=kernel.shared_bytes,
            seed=seed,
            on_barrier=on_barrier,
            unwritten={name: where for name, where in unwritten.items() if name in kernel.params},
        )
        unwritten = {name: where for name, where in unwritten.items() if name not in kernel.params} | dict(launch.unwritten)
        for name, moved in launch.traffic.items():
            before = tensors.get(name, TensorTraffic())
            tensors[name] = TensorTraffic(before.read_bytes + moved.read_bytes, before.write_bytes + moved.write_bytes)
        counters.setdefault(kernel.name, Counters()).join(launch.counters)
        findings.extend(launch.findings)
    return Traffic(tensors), counters, tuple(findings)


_modules: dict[str, Module] = {}


def module(kernel: Kernel, compute_capability: tuple[int, int]) -> Module:
    """The kernel's PTX, parsed once."""
    text = ptx(kernel, compute_capability)
    if text not in _modules:
        _modules[text] = Module.from_ptx(text)
    return _modules[text]
