#!/usr/bin/env python3
"""Compile every kernel to machine code for every architecture, without a GPU, and fail if one spills, has a stack, or makes its
tensor cores wait: if ptxas remarks on wgmma (C75xx), or if a kernel for an architecture's own instructions has older products
(HMMA; this check needs a disassembler).

    python .ci/compile_gate.py [--write] [--sample] [--only NAME] [--processes N] [--json FILE] [--markdown docs/kernels.md]
        [--nvrtc FOLDER]

The kernels come from their schedules: for every architecture (the backward: for one of each kind of chip), dtype and head
dimension, on the tiling that its device gets. Some combinations take turns. Head dimensions do for A10 and L4, which have the same
tiles (their registers were A100's in all 42 programs tried), and for kernels other than FlashAttention-2's. FlashAttention-2 is
compiled on all tilings that lengths choose between for common cases, else on one of them in turns. From d 128 on, where registers
are scarce, Algorithm 1 is compiled without a mask, with all masks at once, and in turns with one of the kinds that cost registers;
below that, and for standard attention and the backward, the lightest and the heaviest kernel in turns; FlashAttention-2 in float16
at d 64 and 128 causal, too. Two architectures also have other tilings, each kind of mask by itself, and a d of V that differs from
d. FlashAttention-2 at d 256: without a mask, and two of four other kinds in turns; at some d a window with the narrowest copies.
Decoding: each number of rows on every architecture at two head dimensions, and a call's options in turns. bfloat16, whose kernels
differ from float16's in few registers, has fewer programs. `--nvrtc` uses
another compiler (other_nvrtc.py): CI uses CUDA 12's, for `--sample`. Tiles are chosen by our own compiler's registers: another one
may spill a few bytes (`FEW_BYTES`), which are printed.

Clean programs are kept in .ci/accounts/ (accounts.py), for each compiler: only programs that are not there as they are now are
compiled, and some of those that are, which have to agree: others for each CUPYFLASH_TEST_DRAW. `--write` keeps those that were
compiled: run it when kernels or tiles have changed, with `--sample --nvrtc` for CUDA 12's. `--sample` looks at one of 24 programs
only, `--only` at the programs with a kernel whose name has NAME in it, to try a change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import numpy as np
from accounts import Accounts, Program, Registers

from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.arrays import MAX_ALIGNMENT
from cupyflash.basics import Report
from cupyflash.launch.resources import Resources, resources
from cupyflash.schedules import (
    ALGORITHMS,
    BACKWARD_ALGORITHMS,
    Cache,
    Kernel,
    Schedule,
    fa2_tiles,
    fa3_backward,
    plan_backward,
    plan_decode,
    plan_softmax,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.schedules.add_state import AddStateSchedule
from cupyflash.schedules.softmax import SOFTMAX_ALGORITHMS
from cupyflash.sim.clock import sass
from cupyflash.tiling import DoesNotFit, TilingChoice

# One device for each architecture.
DEVICES = tuple(Device.named(name) for name in ("T4", "A100-40GB", "A10", "L4", "H100-SXM", "B200", "RTX 5090"))
# Chips that take head dimensions in turns, since they have the same tiles and machine code alike.
ALIKE = ((8, 6), (8, 9))
# Of each kind of chip one: the backward is compiled for these.
KINDS = ((7, 5), (8, 0), (9, 0), (12, 0))
HEAD_DIMS = (16, 40, 64, 80, 96, 128, 192, 256)
HALVES = ("float16", "bfloat16")
DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}
MASKS = ("causal", "mask", "bias", "padded")
Variant = tuple[tuple[str, ...], bool]  # which of MASKS, or a window, and whether the copies are as narrow as an element
LIGHT: Variant = ((), False)
CAUSAL: Variant = (("causal",), False)
HEAVY: Variant = (MASKS, True)
# Of the widest d, where FlashAttention-2's O alone takes half of the registers: what takes more of them, two at a time in turns.
WIDEST: tuple[Variant, ...] = (HEAVY, (("bias",), False), (("window",), True), (("mask",), False))
WINDOW = (512, 64)
SOFTCAP = Score("softcap * tanh(s / softcap)", softcap=30.0)
DOCUMENTS = Mask("document[b, q] == document[b, k] and k <= q", document=np.zeros((1, 1), np.int64))
# Without anything of a score's own in memory; with what is one for a row and for a key; with an element a score.
SCORES = {
    "soft-cap": SOFTCAP,
    "documents": Score("where(document[b, q] == document[b, k], s, -far)", document=np.zeros((1, 1), np.int64), far=math.inf),
    "relative": Score("s + near[h, q - k + 4]", near=np.zeros((1, 9), np.float16)),
}
# Copies of an element, whose addresses take registers, beside a window's bounds, which do too.
NARROW_HEADS = (25, 40, 96, 154)
PACKED = ((64, "float16"), (128, "float16"), (256, "float16"), (256, "float32"))
COMMON = (64, 128)
SCARCE = 128  # d from which on O takes most of the registers
EXTRAS = ((7, 5), (9, 0))
# Sub-tiles of 16, 32, 48 and 64 columns; one warp and eight.
TILINGS: tuple[TilingChoice, ...] = ((16, 16), (128, 32), (16, 48), (128, 64))
VALUE_DIMS = ((64, 128), (192, 128), (128, 40), (256, 16))
# Of FlashAttention-2 above 256, where warps share columns; and what of kinds goes with them in turns.
WIDE_HEADS = ((272, 272), (320, 320), (384, 384), (512, 512), (512, 64), (64, 512))
WIDE_VARIANTS: tuple[Variant, ...] = (CAUSAL, HEAVY, (("packed", "window"), True), (("bias",), False), (("window", "sinks"), True))
SOFTMAX_COLS = (2, 20, 1000, 5000)
# Of FlashAttention-3: each number of slabs and each team of warpgroups, and the options that take registers.
FA3_HEADS = (16, 40, 64, 96, 128, 160, 192, 256)
FA3_DESIGNS = 3  # of each problem, its own among them: those that benchmarks time
FA3_GRADIENTS = (
    (64, 64),
    (16, 40),
    (40, 128),
    (96, 96),
    (128, 80),
    (128, 128),
    (136, 40),
    (192, 128),
    (192, 192),
    (256, 256),
)  # (d, d_v)
FA3_MASKS = ((), ("causal",), ("window",), ("padded", "causal"), ("packed",), ("packed", "window"))
# Of gradients, whatever each score or weight has of its own; a bias where heads are narrow.
FA3_OWN_GRADIENTS = (
    *(("mask",), ("dropout", "causal"), ("mask", "dropout", "window", "padded"), ("documents", "padded")),
    *(("documents", "packed"), ("dropout", "packed", "window"), ("bias", "causal"), ("bias", "mask", "dropout", "window")),
)
# Whatever each score or weight has of its own; "documents" is DOCUMENTS.
FA3_OWN = (
    *(("mask",), ("mask", "window"), ("bias", "causal"), ("dropout",), ("dropout", "window"), ("documents", "packed")),
    *(("documents", "padded"), ("mask", "bias", "dropout", "window", "padded"), ("documents", "dropout", "packed", "window")),
)
# Of decoding: (query heads of a key head, queries), from one warp's rows to two tiles of them; and what a call brings.
DECODE_ROWS = ((1, 1), (4, 1), (16, 2), (8, 8), (16, 8), (16, 20))
DECODE_HEADS = (64, 128, 256, 96)
DECODE_CALLS: tuple[tuple[Report, Cache], ...] = (
    ({"causal": True}, Cache(appended=1)),
    ({"causal": True}, Cache(appended=4, page_size=16, pages=4096)),
    ({"window": WINDOW, "sinks": True, "score": SOFTCAP.form}, Cache(page_size=48, pages=4096)),
    ({"padded": False}, Cache()),
    ({"causal": True, "scale": -1.0}, Cache(appended=20, page_size=256, pages=400, tree=True)),
)
FEW_BYTES = 32
"""Bytes of stack and spills that another compiler than ours may need."""

SAMPLED = 24
"""`--sample` has one of so many programs."""
DRAWN = 96
"""Of the programs whose account is known, one in so many is compiled all the same: others for each CUPYFLASH_TEST_DRAW."""


@dataclass(frozen=True)
class Job:
    """Kernels that one compilation gives, for one architecture, and what they are for."""

    label: str
    kernels: tuple[Kernel, ...]
    device: Device

    @property
    def program(self) -> Program:
        return Program(self.kernels, self.device.compute_capability)


Labelled = Iterator[tuple[str, Schedule]]
"""Schedules, each with a label."""


def labelled(what: str, schedule: Any, *words: str) -> tuple[str, Schedule]:
    """A schedule with its label: its sizes, further words, its tile."""
    p = schedule.problem
    sizes = f"{what} d {p.head_dim}, d_v {p.head_dim_v}, {p.dtype}, copies of {p.alignment} bytes"
    return ", ".join([sizes, *words, str(schedule.tiling.used)]), schedule


def planned(problem: Problem, device: Device, **asked: Any) -> Schedule:
    """The schedule of a problem, of packed sequences if it says so."""
    return (plan_varlen if problem.options.packed else plan)(problem, device, **asked)


def planned_backward(problem: Problem, device: Device, **asked: Any) -> Schedule:
    """The same of its gradients."""
    return (plan_varlen_backward if problem.options.packed else plan_backward)(problem, device, **asked)


def has(device: Device, dtype: str) -> bool:
    """True if a device has instructions for a dtype."""
    return dtype != "bfloat16" or device.compute_capability >= (8, 0)


def variants(algorithm: str, dtype: str, d: int, turn: int) -> list[Variant]:
    """The masks and copies to compile, of the 32 combinations."""
    if algorithm == "fa2" and d == max(HEAD_DIMS) and dtype != "bfloat16":
        return [LIGHT, *WIDEST[(turn + DTYPES[dtype] // 2) % 2 :: 2]]
    if dtype == "bfloat16" and d < max(HEAD_DIMS):
        return [LIGHT] if d == 64 or (algorithm == "fa1" and d >= SCARCE) else []
    if algorithm == "fa1" and d >= SCARCE:
        one: Variant = ((("mask", "bias")[turn // 2 % 2 if dtype == "float16" else 1],), False)
        return [LIGHT, *([one] if turn % 2 else []), HEAVY]
    if algorithm == "fa2" and d in COMMON and dtype == "float16":
        return [HEAVY if turn % 2 else LIGHT, CAUSAL]
    return [HEAVY if turn % 2 else LIGHT]


def attention_schedules(device: Device) -> Labelled:
    """Every kind of attention kernel that a device has."""
    for algorithm in (each for each in ALGORITHMS if each not in ("fa3", "decode")):
        cases: list[tuple[Problem, TilingChoice]] = []
        for dtype in DTYPES:
            if not has(device, dtype):
                continue
            for turn, d in enumerate(HEAD_DIMS, DEVICES.index(device)):
                if device.compute_capability in ALIKE or algorithm != "fa2":
                    if turn % 2:
                        continue
                    turn //= 2
                cases += [(posed(d, dtype, one), None) for one in variants(algorithm, dtype, d, turn)]
            if device.compute_capability in EXTRAS and dtype != "bfloat16":
                if algorithm == "fa1":
                    cases += [(posed(64, dtype, ((name,), False)), None) for name in MASKS]
                    cases += [(posed(d, dtype, LIGHT, value), None) for d, value in VALUE_DIMS]
                cases += [(posed(64, dtype, HEAVY), tiling) for tiling in TILINGS]
        if algorithm == "fa2":
            cases += [(posed(d, "float16", (("window",), True)), None) for d in NARROW_HEADS[DEVICES.index(device) % 2 :: 2]]
            cases = [case for turn, each in enumerate(cases) for case in of_finalists(*each, device, turn)]
        for problem, tiling in cases:
            try:
                schedule = plan(problem, device, algorithm, tiling)
                schedule.kernels()
            except DoesNotFit:
                continue  # one of TILINGS on a small SRAM
            except ValueError:
                break  # an algorithm without a kernel
            yield labelled(algorithm, schedule, *(name for name in (*MASKS, "window") if getattr(problem.options, name)))


def wide_schedules(device: Device) -> Labelled:
    """FlashAttention-2 of d and d_v above 256: the lightest, and of the other kinds one in turns."""
    for turn, (d, value) in enumerate(WIDE_HEADS, DEVICES.index(device)):
        for variant in (LIGHT, WIDE_VARIANTS[turn % len(WIDE_VARIANTS)]):
            problem = posed(d, wide_dtype(turn, device), variant, value)
            for one, tiling in of_finalists(problem, None, device, turn):
                yield labelled("fa2", planned(one, device, tiling=tiling), *variant[0])


def wide_dtype(turn: int, device: Device) -> str:
    return "bfloat16" if turn % 4 == 3 and has(device, "bfloat16") else "float16"


def wide_backward_schedules(device: Device) -> Labelled:
    """Their gradients, with dQ's atomics and a kernel for dQ in turns: without a mask, and with the other kinds in turns."""
    place = DEVICES.index(device)
    for turn, (d, value) in enumerate(WIDE_HEADS, place):
        variant = WIDE_VARIANTS[turn // 2 % len(WIDE_VARIANTS)] if turn % 2 else LIGHT
        problem, deterministic = posed(d, wide_dtype(turn, device), variant, value), bool((turn + place) // 2 % 2)
        dbias = {"dbias": True} if problem.options.bias and not deterministic else {}
        yield labelled("fa2 backward", planned_backward(problem, device, deterministic=deterministic, **dbias), *variant[0])


def float32_bias_schedules(device: Device) -> Labelled:
    """A bias of float32 beside half types, where registers are scarce, forward and backward."""
    wide, usual = (posed(d, "float16", (("bias", "causal"), False)).asking(bias_dtype="float32") for d in (256, SCARCE))
    yield labelled("fa2", plan(wide, device, "fa2"), "float32 bias")
    yield labelled("fa2 backward", plan_backward(usual, device), "float32 bias")
    if device.compute_capability == (9, 0):
        yield labelled("fa3", plan(usual, device, "fa3"), "float32 bias")


def sums_schedules(device: Device) -> Labelled:
    """The gradients of captured arrays: sums in float32, and of integers, in turns."""
    table = SCORES["relative"]
    for turn, d in enumerate((64, 128), DEVICES.index(device)):
        problem = Problem(1, 1, 1, 1024, 1024, d, "float16", causal=True, score=table.form)
        yield labelled("fa2 backward", plan_backward(problem, device, deterministic=bool(turn % 2), dscore=("near",)), "sums")


def fa3_schedules(device: Device) -> Labelled:
    """FlashAttention-3's kernel, whose tile follows from the head dimension, the causal mask and what is kept through its loops."""
    if device.compute_capability != (9, 0):
        return
    for turn, d in enumerate(FA3_HEADS):
        for masks in (*FA3_MASKS, *FA3_OWN):
            problem = posed(d, HALVES[turn % 2], ((*masks, *(("sinks",) if turn % 2 else ())), False))
            problem = replace(problem, batch=8 if d == COMMON[0] else 1)  # more row blocks than multiprocessors: with their queue
            yield labelled("fa3", planned(problem, device, algorithm="fa3", lse=True), *masks)
    for (name, score), d in itertools.product(SCORES.items(), COMMON):
        problem = posed(d, "float16", (("causal",), False)).asking(score=score.form)
        yield labelled("fa3", plan(problem, device, "fa3", lse=True), "causal", name)


def decode_schedules(device: Device) -> Labelled:
    """Decoding: for each number of rows each head dimension in two dtypes, and in turns what a call may bring."""
    place, others = DEVICES.index(device), ("float32", "bfloat16")
    for turn, (group, queries) in enumerate(DECODE_ROWS, place):
        for dtype, d in (("float16", DECODE_HEADS[turn % 4]), (others[(turn // 2 + place // 2) % 2], DECODE_HEADS[(turn + 2) % 4])):
            if not has(device, dtype):
                continue
            asked, cache = DECODE_CALLS[(turn + place) % len(DECODE_CALLS)]
            problem = Problem(8, 2 * group, 2, queries, 3840, d, dtype, **{"padded": True} | asked)
            try:
                schedule = plan_decode(problem, device, cache, num_splits=8, lse=True)
            except DoesNotFit:
                continue
            given = ", ".join([*asked, *(f"{name} {value}" for name, value in asdict(cache).items() if value)])
            yield f"decode d {d}, {dtype}, {queries} queries, groups of {group}, {given}, {schedule.config}", schedule


def of_finalists(problem: Problem, tiling: TilingChoice, device: Device, turn: int) -> Iterator[tuple[Problem, TilingChoice]]:
    """A case of FlashAttention-2 for the tiles that lengths choose between, or one of them in turns."""
    if tiling is not None:
        yield problem, tiling
        return
    sizes = [(each.config.block_rows, each.config.block_cols) for each in fa2_tiles.finalists(problem, device)]
    common = problem.head_dim in COMMON and problem.dtype == "float16"
    for chosen in sizes if common else [sizes[turn % len(sizes)]]:
        yield problem, chosen


def posed(d: int, dtype: str, variant: Variant, value_dim: int | None = None) -> Problem:
    """A problem with these constants; its lengths are not among them."""
    masks, narrow = variant
    size = DTYPES[dtype]
    alignment = size if narrow else math.gcd(d * size, (value_dim or d) * size, MAX_ALIGNMENT)
    constants: Report = {name: WINDOW if name == "window" else True for name in masks if name != "documents"}
    constants["mask_function"] = DOCUMENTS.form if "documents" in masks else None
    return Problem(1, 1, 1, 4096, 4096, d, dtype, head_dim_v=value_dim, alignment=alignment, **constants)


def backward_schedules(device: Device) -> Labelled:
    """The backward pass up to d 128, where its kernels have no spills: dimensions, masks and determinism in turns."""
    dims = tuple(d for d in HEAD_DIMS if d <= SCARCE)
    turn = DEVICES.index(device)
    for algorithm in (each for each in BACKWARD_ALGORITHMS if each != "fa3"):
        for dtype in ("float16", "float32"):
            some = dims if algorithm == "fa2" and dtype == "float16" else (dims[turn % len(dims)],)
            for d in some:
                turn += 1
                deterministic = algorithm == "fa2" and bool(turn // 2 % 2)
                variant = (LIGHT, HEAVY)[turn % 2]
                schedule = plan_backward(posed(d, dtype, variant), device, algorithm, deterministic=deterministic)
                yield labelled(f"{algorithm} backward", schedule, *variant[0])


def fa3_backward_schedules(device: Device) -> Labelled:
    """The Hopper's gradients: d and d_v of one slab and of two, each mask that it takes, with dQ's sum in any order and in one."""
    if device.compute_capability != (9, 0):
        return
    for turn, (d, value) in enumerate(FA3_GRADIENTS):
        for masks in FA3_MASKS:
            for deterministic in (False, True):
                problem = posed(d, HALVES[turn % 2], ((*masks, *(("sinks",) if turn % 2 else ())), False), value)
                schedule = planned_backward(problem, device, algorithm="fa3", deterministic=deterministic)
                yield labelled("fa3 backward", schedule, *masks)
    for (d, value), masks in itertools.product(FA3_GRADIENTS, FA3_OWN_GRADIENTS):
        problem = posed(d, "float16", (masks, False), value)
        if not fa3_backward.refusal(problem, device):
            dbias = {"dbias": True} if "bias" in masks else {}
            yield labelled("fa3 backward", planned_backward(problem, device, algorithm="fa3", **dbias), *masks)
    for turn, (d, value) in enumerate(FA3_GRADIENTS):
        masks = ("causal",) if turn % 2 else ()
        problem = posed(d, HALVES[turn % 2], (masks, False), value)
        for design in fa3_backward.designs(problem)[1:FA3_DESIGNS]:
            yield labelled("fa3 backward", plan_backward(problem, device, "fa3", design), design.label, *masks)
    for (name, score), (d, value) in itertools.product(SCORES.items(), FA3_GRADIENTS[::3]):
        problem = posed(d, "float16", (("causal",), False), value).asking(score=score.form)
        if not fa3_backward.refusal(problem, device):
            yield labelled("fa3 backward", plan_backward(problem, device, "fa3"), "causal", name)


def varlen_schedules(device: Device) -> Labelled:
    """Packed sequences, with and without a causal mask in turns."""
    for turn, (d, dtype) in enumerate(PACKED, DEVICES.index(device)):
        yield labelled("varlen", plan_varlen(posed(d, dtype, (("causal",) if turn % 2 else (), False)), device))


def varlen_backward_schedules(device: Device) -> Labelled:
    """Their backward, whose atomics and orderly sums are compiled in turns; windows take more registers than packing alone."""
    for turn, d in enumerate(COMMON, DEVICES.index(device)):
        problem = posed(d, "float16", (("window",), False))
        yield labelled("varlen backward", plan_varlen_backward(problem, device, deterministic=bool(turn % 2)), "window")


def score_schedules(device: Device) -> Labelled:
    """Score functions in turns in FlashAttention-2, forward, and backward with atomics and without."""
    for turn, d in enumerate(COMMON, 2 * KINDS.index(device.compute_capability)):
        name, score = list(SCORES.items())[turn % len(SCORES)]
        problem = posed(d, "float16", LIGHT).asking(score=score.form)
        yield labelled("fa2 forward", plan(problem, device, lse=True), name)
        yield labelled("fa2 backward", plan_backward(problem, device, deterministic=turn % 4 > 1), name)


def mask_schedules(device: Device) -> Labelled:
    """A mask function with a part of each row and key, by tiles: FlashAttention-2's forward and backward, each at half of the d."""
    for turn, d in enumerate(COMMON, KINDS.index(device.compute_capability)):
        problem = posed(d, "float16", LIGHT).asking(mask_function=DOCUMENTS.form)
        if turn % 2:
            yield labelled("fa2 backward", plan_backward(problem, device), "a mask function")
        else:
            yield labelled("fa2 forward", plan(problem, device, "fa2", lse=True), "a mask function")


def dropout_schedules(device: Device) -> Labelled:
    """FlashAttention-2 with dropout, whose generator takes registers: the common dimensions, and in turns the widest and float32;
    the backward of one chip of each kind, whose dQ is summed and made by itself in turns."""
    place = DEVICES.index(device)
    cases = [*((d, "float16", CAUSAL if (turn + place) % 2 else LIGHT) for turn, d in enumerate(COMMON))]
    cases.append((max(HEAD_DIMS), "float16", LIGHT) if place % 2 else (96, "float32", HEAVY))
    for d, dtype, variant in cases:
        problem = posed(d, dtype, variant).asking(dropout=True)
        for each in fa2_tiles.finalists(problem, device)[: None if d in COMMON else 1]:
            schedule = plan(problem, device, "fa2", (each.config.block_rows, each.config.block_cols))
            yield labelled("fa2", schedule, "dropout", *variant[0])
    for turn, d in enumerate(COMMON if device.compute_capability in KINDS else (), place):
        backward = plan_backward(posed(d, "float16", LIGHT).asking(dropout=True), device, deterministic=bool(turn % 2))
        yield labelled("fa2 backward", backward, "dropout")


def softmax_schedules(device: Device) -> Labelled:
    """Softmax by one thread, by part of a warp, by a warp and by a block a row."""
    for dtype in DTYPES:
        if not has(device, dtype):
            continue
        for algorithm in SOFTMAX_ALGORITHMS:
            yield f"softmax {dtype} down the columns", plan_softmax(10**6, 20, dtype, device, algorithm, adjacent_rows=True)
            for cols in SOFTMAX_COLS:
                yield f"softmax {dtype} {cols} columns", plan_softmax(1000, cols, dtype, device, algorithm)


def sum_schedules(device: Device) -> Labelled:
    """The schedules that add a call's results to the sums of a ring: rows that a warp's lanes divide evenly, and not."""
    for dtype, d in (("float16", 128), ("bfloat16", 36), ("float32", 200)):
        if has(device, dtype):
            yield f"sums of a ring {dtype} d_v {d}", AddStateSchedule(1000, d, dtype, device)


OF_KINDS = (
    *(backward_schedules, wide_backward_schedules, float32_bias_schedules, sums_schedules, varlen_backward_schedules),
    *(score_schedules, mask_schedules),
)
"""Makers of schedules for one chip of each kind."""
MAKERS: tuple[Callable[[Device], Labelled], ...] = (
    *(attention_schedules, wide_schedules, *OF_KINDS[:4], fa3_schedules, fa3_backward_schedules, decode_schedules),
    *(varlen_schedules, *OF_KINDS[4:], dropout_schedules, softmax_schedules, sum_schedules),
)


def jobs() -> list[Job]:
    """The programs to compile, each once for an architecture."""
    programs: dict[tuple[Any, ...], Job] = {}
    for device in DEVICES:
        makers = [make for make in MAKERS if device.compute_capability in KINDS or make not in OF_KINDS]
        for label, schedule in itertools.chain.from_iterable(make(device) for make in makers):
            for kernel in schedule.kernels():
                key = device, kernel.source, kernel.constants, kernel.params
                job = programs.get(key, Job(label, (), device))
                if kernel.name not in [each.name for each in job.kernels]:
                    programs[key] = Job(job.label, (*job.kernels, kernel), device)
    return list(programs.values())


def compiled(job: Job) -> tuple[Resources, ...]:
    return resources(job.kernels, job.device.compute_capability, old_products)


def old_products(kernel: Kernel, cubin: bytes) -> Iterator[str]:
    """A remark where a kernel that should multiply by wgmma has HMMA as well; none where no disassembler is at hand."""
    if kernel.accelerated and sass.disassembler():
        code = sass.read(cubin).kernels[kernel.name]
        found = sum(each.opcode == "HMMA" for each in code)
        if found:
            yield f"{found} HMMA beside {sum(each.opcode == 'HGMMA' for each in code)} HGMMA"


def use(folder: Path | None) -> None:
    """Compiles with a folder's NVRTC from now on, where one is given."""
    if folder:
        import other_nvrtc

        other_nvrtc.use(folder)


def nvrtc_version() -> tuple[int, int]:
    from cupy.cuda import nvrtc

    major, minor = nvrtc.getVersion()
    return major, minor


def compiled_everywhere(jobs: list[Job], processes: int | None, nvrtc: Path | None = None) -> list[tuple[Resources, ...]]:
    """The account of each job, by so many processes, one a core where that is None; `nvrtc` is a folder with another compiler."""
    with ProcessPoolExecutor(processes, initializer=use, initargs=(nvrtc,)) as pool:
        return list(pool.map(compiled, jobs, chunksize=4))


def table(found: list[tuple[Job, str, int]], dirty: list[tuple[Job, Resources]]) -> Iterator[str]:
    """A line for each kernel and architecture."""
    yield f"{'kernel':<20}{'device':<12}{'sm':>7}{'programs':>10}{'registers':>12}{'with stack or spills':>22}"
    for name in dict.fromkeys(name for _, name, _ in found):
        for device in DEVICES:
            taken = [registers for job, each, registers in found if (each, job.device) == (name, device)]
            if taken:
                bad = sum((needs.name, job.device) == (name, device) for job, needs in dirty)
                yield f"{name:<20}{device.name:<12}{device.sm:>7}{len(taken):>10}{f'{min(taken)} to {max(taken)}':>12}{bad:>22}"


def rows(made: Mapping[Job, tuple[Resources, ...]]) -> list[Report]:
    """Returns every kernel that was compiled, for JSON."""
    return [
        {"for": job.label, "device": job.device.name, "sm": job.device.sm} | asdict(needs) for job in made for needs in made[job]
    ]


BY_HAND = "<!-- by hand from here on -->"


def documented(path: Path) -> str:
    """The text of docs/kernels.md: the tables anew, and the part after them that was written by hand."""
    before = path.read_text() if path.exists() else ""
    return "\n".join(markdown()) + "\n" + (f"\n{BY_HAND}{before.partition(BY_HAND)[2]}" if BY_HAND in before else "")


def markdown() -> Iterator[str]:
    """docs/kernels.md: registers and occupancy of the configurations that are used by default."""
    yield "# Registers and occupancy"
    yield ""
    yield "The kernels' needs on a multiprocessor, from their machine code (`ptxas -v` through NVRTC {}.{}; no GPU).".format(
        *nvrtc_version()
    )
    yield "Written by `python .ci/compile_gate.py --markdown docs/kernels.md`; `cupyflash inspect` shows the same for any problem."
    yield ""
    yield "A cell: registers a thread / thread blocks that a multiprocessor holds / occupancy (resident warps over the most that"
    yield "it can hold); no mask, 16-byte copies, one head of 4,096 queries (FlashAttention-2 takes larger blocks if more heads"
    yield "fill the device). The gate in `.ci/run` fails when a kernel has a stack or spills. Algorithm 1 takes as much shared"
    yield "memory as its block sizes can use, and Br = min(Bc, d) makes few warps: a large M costs occupancy."
    cells: dict[str, dict[str, dict[Device, str]]] = {}
    for algorithm, dtype, d in itertools.product(ALGORITHMS, ("float16", "float32"), (64, 128, 256)):
        for device in DEVICES:
            try:
                kernels = plan(Problem(1, 1, 1, 4096, 4096, d, dtype), device, algorithm).kernels()
            except ValueError:  # nothing fits, or an algorithm without a kernel
                continue
            for needs in resources(kernels, device.compute_capability):
                occupancy = needs.occupancy(device)
                cell = f"{needs.registers} / {occupancy.blocks} / {occupancy.fraction:.0%}{'' if needs.clean else ', spills'}"
                cells.setdefault(needs.name, {}).setdefault(f"{dtype}, d {d}", {})[device] = cell
    for name, lines in cells.items():
        yield from ("", f"## {name}", "")
        yield "| | " + " | ".join(f"{device.name} ({device.sm})" for device in DEVICES) + " |"
        yield "| --- |" + " --- |" * len(DEVICES)
        for configuration, line in lines.items():
            yield f"| {configuration} | " + " | ".join(line.get(device, "-") for device in DEVICES) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every compiled kernel there")
    parser.add_argument("--markdown", type=Path, help="write the default configurations there, and compile nothing else")
    parser.add_argument("--processes", type=int, help="how many compile at a time; as many as there are cores when not given")
    parser.add_argument("--nvrtc", type=Path, help="a folder of wheels with another NVRTC and its headers")
    parser.add_argument("--write", action="store_true", help="keep the clean programs in .ci/accounts")
    parser.add_argument("--sample", action="store_true", help=f"one of {SAMPLED} programs only, by their labels")
    parser.add_argument("--only", metavar="NAME", default="", help="programs with a kernel whose name has this in it")
    arguments = parser.parse_args(argv)
    if arguments.write and (arguments.only or arguments.sample != bool(arguments.nvrtc)):
        parser.error("--write is for all programs, of --nvrtc for the --sample, and not for --only")
    if arguments.markdown:
        arguments.markdown.write_text(documented(arguments.markdown))
        return 0
    start, work = time.perf_counter(), jobs()
    names = sorted({kernel.name for job in work for kernel in job.kernels})
    work = [job for job in work if any(arguments.only in kernel.name for kernel in job.kernels)]
    if not work:
        parser.error(f"--only must be in a kernel's name: {', '.join(names)}; got {arguments.only!r}")
    if arguments.sample:
        work = [job for job in work if zlib.crc32(f"{job.device.sm} {job.label}".encode()) % SAMPLED == 0]
    use(arguments.nvrtc)
    kept = Accounts(nvrtc_version())
    known = {job: registers for job in work if (registers := kept.find(job.program))}
    draw = zlib.crc32(os.environ.get("CUPYFLASH_TEST_DRAW", "").encode())
    fresh = [job for turn, job in enumerate(work, draw) if job not in known or turn % DRAWN == 0]
    made = dict(zip(fresh, compiled_everywhere(fresh, arguments.processes, arguments.nvrtc), strict=True))
    now: dict[Job, Registers] = known | {job: tuple(needs.registers for needs in made[job]) for job in made}
    wrong = [
        f"{job.device.sm}, {job.label}: {now[job]} registers; {kept.path.name} has {known[job]}"
        for job in made
        if known.get(job, now[job]) != now[job]
    ]
    dirty = [(job, needs) for job in made for needs in made[job] if not needs.clean]
    if arguments.write:  # what is not clean is compiled again at each run, and fails
        bad = {job for job, _ in dirty}
        kept.write((job.program, now[job]) for job in work if job not in bad)
    found = [(job, kernel.name, registers) for job in work for kernel, registers in zip(job.kernels, now[job], strict=True)]
    print("\n".join(table(found, dirty)))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows(made), indent=1) + "\n")
    for job, needs in dirty:
        print(
            f"{job.device.sm} {needs.name}, {job.label}: {needs.registers} registers, {needs.stack_bytes} bytes of stack, "
            f"{needs.spill_bytes} bytes of spills; {dict(job.kernels[0].constants)}",
            *(f"  {remark}" for remark in needs.remarks),
            sep="\n",
        )
    told = f"{len(work)} programs, {len(found)} kernels, {len(dirty)} with stack, spills or remarks"
    print(f"{told}; {len(fresh)} compiled, the others clean by {kept.path.name}, {time.perf_counter() - start:.0f} s")
    if wrong:
        print("\n".join(["not as it was kept (--write keeps what it is now):", *wrong]))
    few = [needs for _, needs in dirty if not needs.remarks and needs.stack_bytes + needs.spill_bytes <= FEW_BYTES]
    return 1 if wrong or len(dirty) > (len(few) if arguments.nvrtc else 0) else 0


if __name__ == "__main__":
    sys.exit(main())
