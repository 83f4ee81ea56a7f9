"""Executes a schedule's kernels on the PTX machine: the results, and the bytes that the kernels really moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyflash.arrays import check_array, heads_first, is_number, numpy_dtype, of_heads
from cupyflash.basics import Shape
from cupyflash.launch import tensor_maps
from cupyflash.launch.binding import argument_values
from cupyflash.launch.compiler import MOST_PTX, ptx
from cupyflash.launch.launcher import CACHED, TENSORS
from cupyflash.launch.params import flat
from cupyflash.launch.recent import Recent
from cupyflash.request import decode
from cupyflash.request.dropout import Dropout
from cupyflash.request.problem import Problem, check_rows
from cupyflash.request.score import Mask, Score, captured_values, check_captured
from cupyflash.request.score import field as field_of
from cupyflash.request.score_sums import finished, most_terms, zeros_of
from cupyflash.request.varlen import pose
from cupyflash.rows import Rows, softmax_values
from cupyflash.schedules import (
    BackwardSchedule,
    DecodeSchedule,
    Kernel,
    Schedule,
    SoftmaxSchedule,
    TileSchedule,
    VarlenBackwardSchedule,
    VarlenSchedule,
    require_schedule,
)
from cupyflash.sim.host_memory import launched, require_room
from cupyflash.sim.ptx import Counters, Finding, Module, TensorMap
from cupyflash.sim.ptx.memory.spaces import Observer
from cupyflash.sim.traffic import Traffic

# Called when a thread block has completed a barrier, with the block's index and its number of completed barriers.
OnBarrier = Callable[[int, int], None]


class Onlookers(NamedTuple):
    """The observers of a launch: of its memory accesses, and of the fields of its struct before it begins."""

    observer: Observer | None = None
    given: Callable[[Mapping[str, Any]], None] | None = None


NO_SUMS: Mapping[str, np.ndarray] = MappingProxyType({})
# Called before each launch.
Watch = Callable[[Kernel], Onlookers]


@dataclass(frozen=True)
class Execution:
    """The result of executing a schedule. All counts are simulated: they count PTX instructions, not machine code.

    `out` has q's shape and dtype (softmax: x's), `lse` is float32 of shape q.shape[:-1] or None; `traffic` in bytes per tensor;
    `counters` by kernel name, over all its launches; `findings` are the faults that the machine found in the kernels.
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
    seed: int | None = None,
    score: Score | None = None,
    dropout: Dropout | None = None,
    watch: Watch | None = None,
    **beside: Any,
) -> Execution:
    """Run a schedule's real kernels on NumPy arrays that pose its problem: q, k, v, the `score` function and the `dropout`, if it
    has them, and further arguments `beside` them by name (mask, which may be a function, bias, key_lengths, block_mask).

    With `seed` None, warps at the same instruction run together; an integer seeds a random order of warps. `watch` returns the
    observers of each launch before it starts.
    Raises ValueError if the arrays pose another problem than the schedule's, ImportError without NVRTC.
    """
    require_schedule(schedule, TileSchedule, "plan", (BackwardSchedule, VarlenSchedule))
    arrays, captured, numbers = _given(schedule, score, dropout, beside)
    check_captured(schedule.problem, captured)
    _require_posed(schedule.problem, q, k, v, arrays)
    made = _forward_results(schedule, q, v, q.shape[:-1])
    return run(schedule, {"q": q, "k": k, "v": v, **made, **arrays, **captured, **numbers}, seed=seed, watch=watch)


def _result(shape: Shape, dtype: Any = np.float32) -> np.ndarray:
    """An array for kernels to write, filled with NaN, so that an element they leave out is a wrong number."""
    return np.full(shape, np.nan, dtype)


def _forward_results(schedule: TileSchedule, q: np.ndarray, v: np.ndarray, rows: tuple[int, ...]) -> dict[str, Any]:
    """O and, if the schedule computes it, L of so many rows, for kernels to write."""
    return {"out": _result((*q.shape[:-1], v.shape[-1]), q.dtype), "lse": _result(rows) if schedule.lse else None}


def _given(
    schedule: TileSchedule, score: Score | None, dropout: Dropout | None, beside: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The arrays of `beside`, the arrays that functions have captured, and numbers, the last two by the struct's names. ValueError
    for other functions than the schedule's, and if only one of call and schedule has dropout."""
    p, mask = schedule.problem, beside.get("mask")
    function = mask if isinstance(mask, Mask) else None
    captured, numbers = captured_values(score, function)
    for what, given, form in (("score", score, p.options.score), ("mask", function, p.options.mask_function)):
        if (given.form if given else None) != form:
            raise ValueError(f"the schedule has another {what} function than {given!r}")
    if (dropout is not None) != p.options.dropout:
        raise ValueError(f"dropout must be {'a Dropout' if dropout is None else 'None'} for this schedule, got {dropout!r}")
    arrays = {name: array for name, array in beside.items() if array is not None and array is not function}
    return arrays, captured, dict(numbers) | ({} if dropout is None else dropout.numbers)


Arrays = Mapping[str, np.ndarray | None]
"""Arrays of a call by name, None for one that it has not."""


def _require_posed(p: Problem, q: np.ndarray, k: np.ndarray, v: np.ndarray, beside: Arrays) -> None:
    """Raise TypeError or ValueError unless the arrays are NumPy's and pose the problem `p`."""
    _require_numpy(q=q, k=k, v=v, **beside)
    _require_same(Problem.from_arrays(q, k, v, p.options, **beside), p)


def _require_same(posed: Problem, p: Problem) -> None:
    if p.options.pattern is None:
        posed = posed.asking(pattern=None)  # a schedule may not know the values of a mask
    if replace(posed, alignment=p.alignment) != p or posed.alignment < p.alignment:
        raise ValueError(f"the arrays pose {posed}, but the schedule is for {p}")


def _require_numpy(**arrays: object) -> None:
    """Raise TypeError for anything but a plain NumPy array or None; q, k, v and x may not be None."""
    for name, array in arrays.items():
        plain = isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)
        if not plain and (array is not None or name in "qkvx"):
            raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")


@dataclass(frozen=True)
class BackwardExecution:
    """The result of executing a backward schedule: gradients with q's dtype and the shapes of q, k and v; `rows` has the values
    that the schedule computes for each row; the rest as in `Execution`."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    traffic: Traffic
    counters: dict[str, Counters]
    findings: tuple[Finding, ...]
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def gradients(self) -> dict[str, np.ndarray]:
        """The gradients by the kernels' names; one number a head for those that have one."""
        return {"dQ": self.dq, "dK": self.dk, "dV": self.dv, **{name: of_heads(rows) for name, rows in self.rows.items()}}


def execute_backward(
    schedule: BackwardSchedule,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dbias: np.ndarray | None = None,
    dscore: Mapping[str, np.ndarray] = NO_SUMS,
    seed: int | None = None,
    score: Score | None = None,
    dropout: Dropout | None = None,
    watch: Watch | None = None,
    **given: Any,
) -> BackwardExecution:
    """Run a backward schedule's real kernels on NumPy arrays that pose its problem, with the forward's `out`, `lse`, `score`
    function and `dropout`.

    `given` has the further arguments, as `beside` of `execute`.

    `dbias`, zeros in float32 of the bias's shape, receives its gradient if the schedule computes it, and so do the arrays of
    `dscore`, by the names of captured arrays.
    `seed`, `watch` and errors: as in `execute`.
    """
    require_schedule(schedule, BackwardSchedule, "plan_backward", (VarlenBackwardSchedule,))
    beside, captured, numbers = _given(schedule, score, dropout, given)
    check_captured(schedule.problem, captured)
    _require_posed(schedule.problem, q, k, v, beside)
    check_rows({"dout": dout, "q": q, "v": v, "out": out, "lse": lse}, q.shape[:-1])
    if dbias is not None:
        check_array("dbias", dbias)
    bias = beside.get("bias")
    wanted = (bias.shape, np.dtype(np.float32)) if schedule.dbias and bias is not None else None
    if (None if dbias is None else (dbias.shape, dbias.dtype)) != wanted:
        raise ValueError(
            f"dbias must be {'zeros in float32 of the shape of bias' if wanted else 'None, as the schedule makes none'}"
        )
    arrays = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    others = {"dbias": dbias, **beside, **captured, **numbers}
    return _into_gradients(schedule, arrays, others, dscore, lambda array: array, seed=seed, watch=watch)


def _sums_for(
    schedule: BackwardSchedule, dscore: Mapping[str, np.ndarray], captured: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Zeros for the kernels' sums, by the struct's names. TypeError or ValueError for arrays that cannot receive them."""
    if not isinstance(dscore, Mapping) or not all(isinstance(array, np.ndarray) for array in dscore.values()):
        raise TypeError(f"dscore must map names of captured arrays to NumPy arrays, got {dscore!r}")
    shapes = {name: captured[field_of(name)].shape for name in schedule.dscore}
    if {name: array.shape for name, array in dscore.items() if array.dtype == np.float32} != shapes:
        raise ValueError(f"dscore must be zeros in float32 for {', '.join(schedule.dscore) or 'nothing'}, of the captured shapes")
    made = zeros_of(schedule.dscore, shapes, schedule.deterministic)
    return {name: np.zeros(*each) for name, each in made.items()}


def _into_gradients(
    schedule: BackwardSchedule,
    arrays: dict[str, np.ndarray],
    others: dict[str, Any],
    dscore: Mapping[str, np.ndarray],
    shaped: Callable[[np.ndarray], np.ndarray],
    **how: Any,
) -> BackwardExecution:
    """Run a backward schedule's kernels into new gradients, and those of captured arrays into `dscore`. `arrays` (but `lse`) and
    gradients are `shaped` as kernels take them."""
    p, lse, sums = schedule.problem, arrays.pop("lse"), _sums_for(schedule, dscore, others)
    dq, dk, dv = (_result(arrays[name].shape, arrays[name].dtype) for name in "qkv")
    rows = {name: _result(lse.shape) for name in schedule.row_results}
    views = {name: shaped(array) for name, array in {**arrays, "dQ": dq, "dK": dk, "dV": dv}.items()}
    made = run_backward(schedule, {**views, "lse": np.ascontiguousarray(lse), **others, **sums, **rows}, **how)
    terms = 0 if p.options.score is None else lse.size * p.seqlen_k * most_terms(p.options.score)
    for name, gradient in finished(sums, schedule.dscore, terms).items():
        dscore[name][...] = gradient
    return BackwardExecution(dq, dk, dv, *made, rows)


def run_backward(
    schedule: BackwardSchedule,
    arrays: Arrays,
    *,
    seed: int | None = None,
    watch: Watch | None = None,
) -> tuple[Traffic, dict[str, Counters], tuple[Finding, ...]]:
    """Run a backward schedule's kernels into given gradients; `arrays` by `attention_backward`'s names, and dQ, dK, dV, dbias."""
    workspaces = allocate(schedule)
    values = argument_values(schedule, _as_given(schedule, {**arrays, **workspaces}))
    return run_kernels(schedule, values, (*schedule.results, *schedule.row_results, *workspaces), seed=seed, watch=watch)


def _as_given(schedule: TileSchedule, arrays: Arrays) -> dict[str, Any]:
    """Convert a call's arrays for the kernels: by the kernels' names, arrays without strides contiguous and of one type."""
    names = TENSORS | CACHED if "k_cache" in arrays else TENSORS
    named = {names.get(name, name): array for name, array in arrays.items()}
    pointers = schedule.struct.pointers.items()
    return named | {name: np.ascontiguousarray(named[name], kind) for name, kind in pointers if named.get(name) is not None}


def execute_varlen(
    schedule: VarlenSchedule,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    seed: int | None = None,
    score: Score | None = None,
    dropout: Dropout | None = None,
    mask: Mask | None = None,
    watch: Watch | None = None,
    **beside: np.ndarray | None,
) -> Execution:
    """Run the real kernel on packed sequences, q (total_q, h, d), k and v likewise; `lse` is (h, total_q).

    `seed`, `score`, `dropout`, `mask`, a function, and `watch` as in `execute`. Raises ValueError if the schedule does not know
    its lengths or the arrays pose another problem.
    """
    require_schedule(schedule, VarlenSchedule, "plan_varlen")
    arrays, captured, numbers = _given(schedule, score, dropout, {**beside, "mask": mask})
    bounds = _posed_varlen(schedule, q, k, v, arrays | captured)
    made = _forward_results(schedule, q, v, q.shape[1::-1])
    views = {name: heads_first(array) for name, array in (("q", q), ("k", k), ("v", v), ("out", made["out"]))}
    given = made | views | bounds | arrays | captured | numbers
    return replace(run(schedule, given, seed=seed, watch=watch), out=made["out"])


def execute_varlen_backward(
    schedule: VarlenBackwardSchedule,
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    *,
    dscore: Mapping[str, np.ndarray] = NO_SUMS,
    seed: int | None = None,
    score: Score | None = None,
    dropout: Dropout | None = None,
    mask: Mask | None = None,
    watch: Watch | None = None,
    **beside: np.ndarray | None,
) -> BackwardExecution:
    """Run the real backward kernels on packed sequences: q (total_q, h, d) and so on, `lse` (h, total_q); `dscore` as in
    `execute_backward`, `seed`, `score`, `dropout`, `mask`, a function, and `watch` as in `execute`.

    Raises as `execute_varlen` does.
    """
    require_schedule(schedule, VarlenBackwardSchedule, "plan_varlen_backward")
    arrays, captured, numbers = _given(schedule, score, dropout, {**beside, "mask": mask})
    bounds = _posed_varlen(schedule, q, k, v, arrays | captured)
    check_rows({"dout": dout, "q": q, "v": v, "out": out, "lse": lse}, q.shape[1::-1])
    packed, others = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}, bounds | arrays | captured | numbers
    return _into_gradients(schedule, packed, others, dscore, heads_first, seed=seed, watch=watch)


def _posed_varlen(
    schedule: VarlenSchedule | VarlenBackwardSchedule,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    beside: Arrays,
) -> dict[str, np.ndarray]:
    """The sequences' bounds. ValueError if the schedule does not know their lengths, or the arrays pose another problem."""
    _require_numpy(q=q, k=k, v=v, **beside)
    if schedule.seqlens is None:
        raise ValueError("schedule must have the lengths of its sequences (seqlens)")
    p = schedule.problem
    lengths = np.array(schedule.seqlens, np.int64).reshape(-1, 2)
    bounds = {f"cu_seqlens_{side}": np.cumsum([0, *lengths[:, place]], dtype=np.int32) for place, side in enumerate("qk")}
    posed, _ = pose({"q": q, "k": k, "v": v, **bounds, **beside}, p.options, p.seqlen_q, p.seqlen_k)
    _require_same(posed, p)
    return bounds


def execute_decode(
    schedule: DecodeSchedule,
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    cache_seqlens: np.ndarray,
    *,
    seed: int | None = None,
    score: Score | None = None,
    mask: Mask | None = None,
    watch: Watch | None = None,
    **beside: np.ndarray | None,
) -> Execution:
    """Run the real kernels on `attention_decode`'s arrays; new keys go into the caches.

    `beside` has, by name, k, v, block_table, tree_mask, (n_q, n_q) or (b, 1, n_q, n_q), and sinks. `seed`, `score`, `mask`, a
    function, `watch` and errors: as in `execute`.
    """
    require_schedule(schedule, DecodeSchedule, "plan_decode")
    others, captured, numbers = _given(schedule, score, None, {**beside, "mask": mask})
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, **others}
    _require_numpy(**arrays)
    arrays |= captured
    posed, cache = decode.pose(arrays, replace(schedule.problem.options, key_lengths=None))
    _require_same(posed, schedule.problem)
    if cache != schedule.cache:
        raise ValueError(f"the arrays pose {cache}, but the schedule is for {schedule.cache}")
    made = _forward_results(schedule, q, v_cache, q.shape[:-1])
    return run(schedule, arrays | made | numbers, seed=seed, watch=watch)


def allocate(schedule: TileSchedule) -> dict[str, np.ndarray]:
    """Allocate the schedule's workspaces, NumPy arrays by tensor name. MemoryError if a run would need more memory than is free."""
    require_room(launched(schedule), f"running {schedule.algorithm}")
    return {name: np.empty(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()}


def run(
    schedule: TileSchedule,
    arrays: Arrays,
    *,
    workspaces: Mapping[str, np.ndarray] | None = None,
    seed: int | None = None,
    on_barrier: OnBarrier | None = None,
    watch: Watch | None = None,
) -> Execution:
    """Run the kernels on arrays by `attention`'s names, into given "out" and "lse" and given workspaces, if any, whose contents
    count as unwritten; `on_barrier` may read them while a kernel runs; `watch` as in `execute`."""
    spaces = allocate(schedule) if workspaces is None else workspaces
    values = argument_values(schedule, _as_given(schedule, {**arrays, **spaces}))
    found = run_kernels(schedule, values, (*schedule.results, *spaces), seed=seed, on_barrier=on_barrier, watch=watch)
    out = arrays["out"]
    assert out is not None
    return Execution(out, arrays.get("lse"), *found)


def execute_softmax(schedule: SoftmaxSchedule, x: np.ndarray, *, axis: int = -1, seed: int | None = None) -> Execution:
    """Run a softmax schedule's real kernel on a NumPy array with rows of its length along `axis`; `lse` is None.

    `seed` as in `execute`. Raises ValueError if x has other rows than the schedule's.
    """
    require_schedule(schedule, SoftmaxSchedule, "plan_softmax")
    _require_numpy(x=x)
    if x.ndim == 0:
        raise ValueError("x must have at least one axis, got an array of shape ()")
    require_room(launched(schedule), "running softmax")
    out = np.empty_like(x)
    out[...] = np.nan
    if not is_number(axis) or not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be an integer between {-x.ndim} and {x.ndim - 1}, got {axis!r}")
    rows = Rows.of(x, out, int(axis) % x.ndim)
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
    watch: Watch | None = None,
) -> tuple[Traffic, dict[str, Counters], tuple[Finding, ...]]:
    """Run a schedule's kernels with `values` for their parameters: traffic, counters by kernel, findings.

    `values` are the fields of the kernels' struct. `made` names the outputs and workspaces: reading them before a kernel has
    stored there is a finding. Traffic through a tensor map counts for its tensor.
    """
    read, written = Counter[str](), Counter[str]()
    counters: dict[str, Counters] = {}
    findings: list[Finding] = []
    given = {name: machine_value(value) for name, value in flat(values).items()}
    signals = schedule.signals if isinstance(schedule, TileSchedule) else ()
    mapped = {name: value.tensor for name, value in values.items() if isinstance(value, tensor_maps.MapPlan)}
    fields = {tensor: name for name, tensor in mapped.items()} | {name: name for name in given}
    unwritten: dict[str, Any] = {fields[name]: True for name in made if given[fields[name]] is not None}
    for kernel in schedule.kernels():
        if kernel.grid == 0:
            continue
        looks_on = Onlookers() if watch is None else watch(kernel)
        if looks_on.given is not None:
            looks_on.given(given)
        launch = module(kernel, schedule.device.compute_capability).launch(
            kernel.name,
            kernel.grid,
            kernel.threads,
            {"p": given},
            shared_bytes=kernel.shared_bytes,
            seed=seed,
            on_barrier=on_barrier,
            observer=looks_on.observer,
            unwritten=unwritten,
        )
        unwritten = dict(launch.unwritten)
        for name, moved in launch.traffic.items():
            read[mapped.get(name, name)] += 0 if name in signals else moved.read_bytes
            written[mapped.get(name, name)] += moved.write_bytes
        counters.setdefault(kernel.name, Counters()).join(launch.counters)
        findings.extend((*launch.findings, *launch.notes))
    return Traffic.of(read, written), counters, tuple(findings)


def machine_value(value: Any) -> Any:
    """Convert a field's value for the PTX machine: tensor maps become the machine's own."""
    if not isinstance(value, tensor_maps.MapPlan):
        return value
    return TensorMap(
        value.array,
        value.box,
        dims=value.dims,
        strides=value.strides,
        dtype=value.dtype,
        swizzle=value.swizzle,
        l2_promotion=tensor_maps.L2_PROMOTION,
    )


# Keyed by PTX; a module takes about thirty bytes a character.
_modules: Recent[str, Module] = Recent(MOST_PTX, lambda text, _: len(text))


def module(kernel: Kernel, compute_capability: tuple[int, int]) -> Module:
    """The kernel's parsed PTX, cached while it is among the recent ones."""
    text = ptx(kernel, compute_capability)
    return _modules.get(text) or _modules.keep(text, Module.from_ptx(text))
