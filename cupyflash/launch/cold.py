"""The first call of some layouts and options: checked, planned, and prepared for later calls."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from cupyflash.arrays import AnyArray, ArrayLayout, heads_first, last_axis_contiguous
from cupyflash.basics import Report, Shape, Values
from cupyflash.device import Device
from cupyflash.launch.binding import prepare
from cupyflash.launch.dispatch import as_arrays, as_integers, device_of, placed, reach_of, refuse_written, target
from cupyflash.launch.launcher import KEPT, Arrays, Key, Numbers, PublicCall, Ready, as_contiguous, read, refuse_copy, zeros
from cupyflash.launch.tensor_maps import first_refusal
from cupyflash.request import decode, varlen
from cupyflash.request.dropout import Dropout
from cupyflash.request.keywords import LAYOUTS
from cupyflash.request.named_scores import named_numbers, one_score
from cupyflash.request.options import ARRAYS, VALUES, Options, Pattern, check_key_lengths, require_choice, require_flag
from cupyflash.request.problem import Problem, check_rows
from cupyflash.request.score import Mask, Score, captured_among, captured_by, captured_values, check_captured, seen_by
from cupyflash.request.score import field as captured_field
from cupyflash.request.score_sums import asked_sums, zeros_of
from cupyflash.schedules import (
    ALGORITHMS,
    BACKWARD_ALGORITHMS,
    TileSchedule,
    choose,
    choose_backward,
    plan,
    plan_backward,
    plan_decode,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.tiled_mask import Given, TiledMask

# What may be a list; and what may stay on the host beside arrays on a GPU, to be looked at there and copied by the call.
INTEGERS = ("key_lengths", *varlen.BOUNDS, "cache_seqlens")
ON_HOST = (*INTEGERS, "block_table")
TENSORS = ("q", "k", "v", "dout", "out", "lse", "k_cache", "v_cache", "tree_mask", *ARRAYS, *ON_HOST)
# Tensors of (total, h, d), which the kernels take with their heads first
ROWS = ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "K_new", "V_new")
# The same by a call's names, which (b, n, h, d) has with its heads behind
ROWS_GIVEN = ("q", "k", "v", "out", "dout", "k_cache", "v_cache")
# What a backward copies by tensor maps, by the kernels' names
TENSORS_OF_MAPS = ("Q", "K", "V", "dO")
Made = dict[str, ArrayLayout]
Step = Callable[[Mapping[str, Any], Arrays, Numbers], None]


def first(call: PublicCall, given: Values) -> Any:
    """Makes a call that has to be looked at, which may then be found to be like one before."""
    request = FirstCall.of(call, given)
    with device_of(request.gpu, **request.placed):
        return request.ready().launch({**given, **request.longest}, request.by_field)


def compile_first(call: PublicCall, given: Values) -> None:
    """Do the work of such a call before its launch; only the layouts of the arrays matter, and the captured values of functions."""
    request = FirstCall.of(call, given)
    with device_of(request.gpu, **request.placed):
        request.ready().prepared.compile()


@dataclass(frozen=True)
class FirstCall:
    """A complete call: `asked`, all arguments, and `given`, the given ones, with arrays as views.

    `arrays`: the call's arrays by argument, and the functions' captured arrays by the struct's names; `numbers`: the captured
    numbers; `placed`: the arrays that are where the call runs.
    """

    call: PublicCall
    asked: Values
    given: Values
    arrays: Values
    placed: Values
    gpu: bool
    options: Options
    mask: Given
    numbers: Numbers

    @classmethod
    def of(cls, call: PublicCall, given: Values) -> FirstCall:
        """Return the request of some arguments. TypeError or ValueError for arguments that are wrong whatever the shapes."""
        asked = call.keywords.complete(given)
        score = one_score(asked)
        mask = Given.of(asked["mask"], call.masks)
        captured, numbers = captured_values(score, mask.function)
        dropped = Dropout.asked(asked)
        packed = varlen.BOUNDS[0] in asked
        taken = {name: asked[name] for name in VALUES if name in asked}
        options = Options(**taken, packed=packed, dropout=dropped is not None, score=None if score is None else score.form)
        _check_choices(asked)
        views = {name: asked[name] for name in asked if name in TENSORS and name not in INTEGERS} | {"mask": mask.array} | captured
        there = call.keywords.required
        arrays = as_arrays(views, there)
        lists = {name: asked[name] for name in INTEGERS if name in there or asked.get(name) is not None}
        on_host = {name: as_integers(name, value) for name, value in lists.items()}
        on_host |= {name: arrays.pop(name) for name in ("block_table",) if name in arrays}
        gpu, beside = placed(arrays, on_host)
        views = arrays | on_host
        options = mask.asked(options, views)
        views |= {each.kind: each.over(views) for each in (asked["score"], asked["mask"]) if isinstance(each, Score | Mask)}
        views |= {} if mask.tiled is None else {"mask": mask.tiled}
        own = {name: views.get(call.fields.get(name, name), views.get(name, value)) for name, value in given.items()}
        return cls(call, asked, own, arrays | on_host, arrays | beside, gpu, options, mask, dict(numbers))

    def ready(self) -> Ready:
        """Prepared, or found."""
        key = self.key if self.gpu else None
        found: Ready | None = KEPT.get(key)
        if found is not None:
            return found
        made = self._prepared()
        return made if key is None else KEPT.keep(key, made)

    @property
    def key(self) -> Key | None:
        """The key of `launcher.read`, for packed sequences with the lengths of the longest."""
        return read(self.call, {**self.given, **self.longest}, looked_at=True)[0]

    @property
    def longest(self) -> dict[str, int]:
        """The lengths of the longest of packed sequences, by argument."""
        return dict(zip(varlen.LONGEST, self.sequences.longest, strict=True)) if self.options.packed else {}

    @property
    def by_field(self) -> Arrays:
        """The arrays by the struct's names."""
        return {self.call.fields.get(name, name): array for name, array in self.arrays.items()}

    @cached_property
    def layouts(self) -> Report:
        """All that a kept launch may depend on: the layouts of arrays on a GPU; for a dout that kernels cannot read, its copy's."""
        arrays = {name: decode.for_all_heads(array) if name == "tree_mask" else array for name, array in self.arrays.items()}
        return readable({name: ArrayLayout.of(array) for name, array in arrays.items()} if self.gpu else arrays)

    @property
    def inputs(self) -> Report:
        """The arrays of the forward, whose O a backward takes."""
        backward = ("dout", "out", "lse") if "deterministic" in self.asked else ()
        return {name: array for name, array in self.layouts.items() if name not in backward}

    @property
    def swapped(self) -> bool:
        """True if the call's rows come before its heads, which kernels take first."""
        return self.options.packed or self.asked.get("layout") == "bnhd"

    @cached_property
    def sequences(self) -> varlen.Sequences:
        """The lengths from the bounds of packed sequences; ValueError for bounds that do not fit q and k."""
        longest = [self.asked[name] for name in varlen.LONGEST]
        with layout_named(self):
            varlen.check_bounds(self.arrays)
            found = varlen.sequences(self.arrays, *self.totals, *longest)
        return replace(found, lengths=None) if self.gpu else found

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of q, and of k, of all sequences together."""
        return self.arrays["q"].shape[0], self.arrays["k"].shape[0]

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of a tensor with one number for each row of q."""
        q = self.layouts["q"]
        shape: Shape = (heads_first(q) if self.swapped else q).shape
        return shape[:-1]

    @cached_property
    def problem(self) -> Problem:
        sequences = self.sequences if self.options.packed else None
        with layout_named(self):
            if sequences is None:
                return pose(self.gpu, with_heads_first(self.inputs, self.swapped), self.options, self.numbers)
            problem = sequences.of(varlen.posed(self.inputs, self.options))
        check_captured(problem, captured_among(self.arrays))
        return problem

    def tensors(self, *made: Made) -> Report:
        """The arrays and the call's own tensors, by the kernels' names and in their layout."""
        found = {self.call.fields.get(name, name): array for name, array in self.layouts.items()}
        for more in made:
            found |= more
        if self.swapped:
            found |= {name: heads_first(found[name]) for name in ROWS if name in found}
        return found | self.numbers

    def _prepared(self) -> Ready:
        device, simulation = target(self.gpu)
        kind = _decode if "cache_seqlens" in self.asked else _backward if "deterministic" in self.asked else _forward
        schedule, made, sums = kind(self, device)
        device_id = sys.modules["cupy"].cuda.runtime.getDevice() if self.gpu else None
        if "dout" not in self.asked and kind is _backward:  # of a pullback that is yet to be called
            schedule.kernels()
            return Ready(self.call, NOTHING, (), device_id)
        prepared = prepare(schedule, simulation, self.tensors(made, sums), made)
        return Ready(self.call, prepared, tuple(steps(self, schedule, sums)), device_id)


class _Nothing:
    """The prepared launch of a call that only checks."""

    def launch(self, arrays: Arrays, numbers: Numbers) -> Report:
        return {}


NOTHING = _Nothing()


def _check_choices(asked: Values) -> None:
    if "algorithm" in asked:
        algorithms = BACKWARD_ALGORITHMS if "deterministic" in asked else ALGORITHMS
        require_choice("algorithm", asked["algorithm"], ("auto", *algorithms))
    if "layout" in asked:
        require_choice("layout", asked["layout"], LAYOUTS)
    for name in ("return_lse", "deterministic", "return_dbias"):
        require_flag(name, asked.get(name, False))
    if asked.get("return_dbias") and asked["bias"] is None:
        raise ValueError("return_dbias is for a call with a bias, and there is none")


def pose(gpu: bool, arrays: Mapping[str, AnyArray], options: Options, numbers: Values) -> Problem:
    """The problem of a call's arrays, captured ones among them, and captured numbers; with NumPy's arrays also the pattern of a
    mask function."""
    captured = captured_among(arrays)
    problem = Problem.from_arrays(**{name: array for name, array in arrays.items() if name not in captured}, options=options)
    check_captured(problem, captured)
    form = options.mask_function
    if gpu or form is None:
        return problem
    return problem.asking(pattern=Pattern.of(seen_by(form, problem, captured_by(form, {**captured, **numbers}))))


def _forward(r: FirstCall, device: Device) -> tuple[TileSchedule, Made, Made]:
    problem, tiling, algorithm = r.problem, r.asked["tiling"], r.asked.get("algorithm", "auto")
    lse = bool(r.asked["return_lse"])
    made = _rows(r, problem, lse)
    if algorithm == "auto":
        tensors = r.tensors(made)
        algorithm = choose(problem, device, tiling, first_refusal({name: tensors[name] for name in "QKVO"})).algorithm
    if not r.options.packed:
        return plan(problem, device, algorithm, tiling, lse=lse), made, {}
    lengths, totals = r.sequences.lengths, r.totals
    return plan_varlen(problem, device, lengths, tiling, lse=lse, totals=totals, algorithm=algorithm), made, {}


def _rows(r: FirstCall, problem: Problem, lse: bool) -> Made:
    """O and L, as far as they are made."""
    q = r.layouts["q"]
    made = {} if "out" in r.layouts else {"O": ArrayLayout.contiguous((*q.shape[:-1], problem.head_dim_v), q.dtype)}
    return made | ({"L": ArrayLayout.contiguous(r.rows, np.float32)} if lse else {})


def _backward(r: FirstCall, device: Device) -> tuple[TileSchedule, Made, Made]:
    arrays, problem, asked = r.layouts, r.problem, r.asked
    deterministic, dbias = bool(asked["deterministic"]), bool(asked.get("return_dbias"))
    bias: Any = arrays.get("bias")
    if "dout" in arrays:
        problem = replace(problem, alignment=min(problem.alignment, check_rows(arrays, r.rows)))
    if dbias and deterministic and not _spans(bias, problem):
        raise ValueError(f"deterministic=True cannot sum the gradient of a broadcast bias, got a bias of shape {bias.shape}")
    dscore = asked_sums(r.options.score, asked.get("return_dscore", False))
    algorithm = asked.get("algorithm", "auto")
    if algorithm == "auto":
        tensors = r.tensors({})
        mapped = {name: tensors[name] for name in TENSORS_OF_MAPS if name in tensors}
        algorithm = choose_backward(problem, device, asked["tiling"], first_refusal(mapped)).algorithm
    if r.options.packed:
        lengths, totals = r.sequences.lengths, r.totals
        how: Report = {"deterministic": deterministic, "totals": totals, "algorithm": algorithm, "dscore": dscore}
        schedule: Any = plan_varlen_backward(problem, device, lengths, asked["tiling"], **how)
    else:
        how = {"deterministic": deterministic, "dbias": dbias, "dscore": dscore}
        schedule = plan_backward(problem, device, algorithm, asked["tiling"], **how)
    made = {f"d{name.upper()}": ArrayLayout.contiguous(arrays[name].shape, arrays[name].dtype) for name in "qkv"}
    made |= {name: ArrayLayout.contiguous(r.rows, np.float32) for name in schedule.row_results}
    sums: dict[str, tuple[tuple[int, ...], Any]] = {"dbias": (bias.shape, np.float32)} if dbias else {}
    sums |= zeros_of(dscore, {name: arrays[captured_field(name)].shape for name in dscore}, deterministic)
    return schedule, made, {name: ArrayLayout.contiguous(*each) for name, each in sums.items()}


def _spans(bias: Any, problem: Problem) -> bool:
    """True if a bias has an element of its own for every score."""
    whole = problem.head_count * problem.seqlen_q * problem.seqlen_k
    return math.prod(bias.shape) == whole and all(bias.strides[n] for n, size in enumerate(bias.shape) if size > 1)


def _decode(r: FirstCall, device: Device) -> tuple[TileSchedule, Made, Made]:
    with layout_named(r):
        problem, cache = decode.pose(with_heads_first(r.layouts, r.swapped), r.options)
    lse = bool(r.asked["return_lse"])
    return plan_decode(problem, device, cache, num_splits=r.asked["num_splits"], lse=lse), _rows(r, problem, lse), {}


@contextmanager
def layout_named(r: FirstCall) -> Iterator[None]:
    """A context in which an error names the other layout, if the arrays fit together in that layout and not in this one."""
    try:
        yield
    except ValueError as error:
        q, k = (r.layouts[name].shape for name in ("q", "k_cache" if "k_cache" in r.layouts else "k"))
        heads, other = (-2, -3) if r.swapped else (-3, -2)
        if not (len(q) == len(k) > 2 and k[heads] and k[other] and not q[other] % k[other]):
            raise
        if r.options.packed:
            ends = {name: r.arrays[name].ravel()[-1:].tolist() for name in varlen.BOUNDS if isinstance(r.arrays[name], np.ndarray)}
            here, there = ({name: [shape[at]] for name, shape in zip(varlen.BOUNDS, (q, k), strict=True)} for at in (-3, -2))
            if all(ends[name] == there[name] != here[name] for name in ends) and (ends or q[heads] % k[heads]):
                words = "are the arrays (h, total, d)? Then exchange their first two axes, as in q.swapaxes(0, 1)"
                raise ValueError(f"{error}: {words}") from None
        elif q[heads] % k[heads]:
            layout = next(each for each in LAYOUTS if each != r.asked["layout"])
            raise ValueError(f"{error}: are the arrays {layout}? Then pass layout={layout!r}") from None
        raise


def with_heads_first(arrays: Values, swapped: bool) -> Report:
    """Arrays by a call's names; if `swapped`, those of rows as `heads_first`."""
    return {name: heads_first(array) if swapped and name in ROWS_GIVEN else array for name, array in arrays.items()}


def readable(arrays: Report) -> Report:
    """The arrays as kernels get them: of a dout that they cannot read, as a broadcast one is, the layout of its copy."""
    dout = arrays.get("dout")
    if dout is None or last_axis_contiguous(dout):
        return arrays
    return arrays | {"dout": ArrayLayout.contiguous(dout.shape, dout.dtype)}


def steps(r: FirstCall, schedule: TileSchedule, sums: Made) -> Iterator[Step]:
    """The steps of each such call before its launch, on its own arrays: checks, copies to where they are needed, and zeros for
    `sums`. They hold nothing of this call."""
    gpu, names = r.gpu, {r.call.fields.get(name, name): name for name in r.arrays}
    on_host = {field for field, name in names.items() if gpu and isinstance(r.arrays[name], np.ndarray)}
    if {"cache_seqlens", "key_lengths"} & on_host:  # of layouts, nobody could look into them
        swapped = r.swapped
        yield lambda given, arrays, numbers: _check_lengths(
            with_heads_first({name: arrays[field] for field, name in names.items()}, swapped)
        )
    of_caches = ("k_cache", "v_cache") if "k" in r.arrays and "k_cache" in r.arrays else ()
    written = [name for name in (*of_caches, "out") if name in r.arrays and "lse" not in r.arrays]
    if written:
        fields = {name: r.call.fields.get(name, name) for name in r.placed}
        reach = [(fields[name], *reach_of(array)) for name, array in r.placed.items()]
        yield partial(_refuse_written, gpu, written, fields, reach)
    tiled = r.mask.tiled is not None
    if tiled:
        yield lambda given, arrays, numbers: given["mask"].require(arrays["Q"], arrays["K"], arrays)
    if "tree_mask" in names:
        yield lambda given, arrays, numbers: arrays.update(tree_mask=decode.for_all_heads(arrays["tree_mask"]))
    wanted: Report = {field: kind for field, kind in schedule.struct.pointers.items() if field in names}
    if "dO" in names and not last_axis_contiguous(r.arrays["dout"]):
        wanted["dO"] = r.arrays["dout"].dtype
    for field, kind in wanted.items():
        array = r.arrays[names[field]]
        if field in on_host or (array.dtype, array.strides) != (kind, ArrayLayout.contiguous(array.shape, kind).strides):
            yield partial(_make_contiguous, gpu, names[field], field, kind)
    if r.numbers:
        yield _bring_numbers
    if r.options.dropout or {"seed", "offset", "dropout"} & r.given.keys():
        yield _drop
    if tiled:
        tiles = schedule.given_tiles
        yield lambda given, arrays, numbers: arrays.update(given["mask"].states(tiles, gpu, {**arrays, **numbers}))
    for name, each in sums.items():
        yield partial(_begin_sum, gpu, name, each.shape, each.dtype)


def _begin_sum(gpu: bool, name: str, shape: Shape, dtype: Any, given: Values, arrays: Arrays, numbers: Numbers) -> None:
    arrays[name] = zeros(gpu, shape, dtype)


def _check_lengths(arrays: Arrays) -> None:
    if "k_cache" in arrays:
        decode.check_contents(arrays)
    else:
        check_key_lengths(arrays["key_lengths"], len(arrays["key_lengths"]), arrays["k"].shape[-2])


def _refuse_written(
    gpu: bool,
    written: list[str],
    fields: Mapping[str, str],
    reach: list[tuple[str, int, int]],
    given: Values,
    arrays: Arrays,
    numbers: Numbers,
) -> None:
    """Refuse overlaps with written arrays. It looks closely only if addresses are near each other, which is rare."""
    if gpu:
        spans = [(field, (at := arrays[field].data.ptr) - before, at + behind) for field, before, behind in reach]
        own = {field: (first, end) for field, first, end in spans}
        for first, end in [own[fields[name]] for name in written]:
            if sum([each[1] < end and first < each[2] for each in spans]) > 1:
                break
        else:
            return
    refuse_written({name: arrays[field] for name, field in fields.items()}, written)


def _make_contiguous(gpu: bool, name: str, field: str, kind: Any, given: Values, arrays: Arrays, numbers: Numbers) -> None:
    """An array as kernels take it."""
    if gpu and isinstance(arrays[field], np.ndarray):
        refuse_copy(name)
    arrays[field] = as_contiguous(gpu, arrays[field], kind)


def _bring_numbers(given: Values, arrays: Arrays, numbers: Numbers) -> None:
    """Add the numbers that functions have captured; a cap is one of them."""
    score, mask = given.get("score"), given.get("mask")
    if score is None:
        numbers |= named_numbers(given)
    for function in (score, mask.mask if isinstance(mask, TiledMask) else mask):
        if isinstance(function, Score | Mask):
            numbers |= function.fields


def _drop(given: Values, arrays: Arrays, numbers: Numbers) -> None:
    """A dropout's, checked."""
    dropped = Dropout.asked(given)
    if dropped is not None:
        numbers |= dropped.numbers
