"""Random problems for `.ci/choices.py`, with all options and on all chips, known and unknown, and all that schedules say of them.

A problem is drawn from its kind and number alone, so that another kind, or more problems of one, change no other problem. Some are
wrong on purpose, or too large: then the figure is the message.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from accounts import given

from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.basics import Array, Report
from cupyflash.device import PEAK_DTYPES
from cupyflash.multiprocessor import Multiprocessor, clock_rate, mma_rate, occupancy, tensor_rate
from cupyflash.request.options import OPTIONS, VECTORS, BlockMask, Options, Pattern
from cupyflash.schedules import (
    ALGORITHMS,
    BACKWARD_ALGORITHMS,
    BackwardSchedule,
    Cache,
    DecodeSchedule,
    Schedule,
    TileSchedule,
    choose,
    decode_tiles,
    fa2_backward_clocks,
    fa2_backward_tiles,
    fa2_tiles,
    fa3_tiles,
    plan_backward,
    plan_decode,
    plan_softmax,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.schedules.add_state import AddStateSchedule
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.schedules.fa3_backward import Fa3BackwardSchedule
from cupyflash.sim import estimate, l2, replay, theory
from cupyflash.tiling import TileSize

# Scores up to which the L2 is played
PLAYED = 20_000
# Problems in a line of drawn.txt, and the number of lines of each kind
EACH = 5
LINES = {
    **dict.fromkeys(ALGORITHMS, 6),
    **{f"{algorithm} backward": 6 for algorithm in BACKWARD_ALGORITHMS},
    "fa2": 18,
    "fa2 backward": 20,
    "fa3": 12,
    "decode": 10,
    "packed fa2": 8,
    "packed fa3": 8,
    "packed fa2 backward": 8,
    "cache": 12,
    "auto": 8,
    "softmax": 6,
    "others": 3,
    "chip": 6,
}
SCORES = (
    Score("s * 0.5 + tanh(s / 20) - abs(q - k) / 8"),
    Score("s - slope[h] * (q - k) + near[h, q - k]", slope=np.ones(4, np.float32), near=np.ones((4, 300), np.float16)),
    Score("where(k % 3 == 0, s / scale[row], exp(bound[b]))", scale=np.ones(300, np.float32), bound=np.ones(3, np.float32)),
    Score("s * slope[h] + sin(far[k])", slope=np.ones(4, np.float32), far=np.ones(300, np.float32)),
)
MASKS = (
    Mask("k <= q and q - k < 9"),
    Mask("id[q] == id[k]", id=np.zeros(300, np.int32)),
    Mask("k <= q + far[h] or of[b, q] == of[b, k]", far=np.zeros(4, np.int32), of=np.zeros((3, 300), np.int32)),
)
H100 = Device.named("H100-SXM")


def unknown(name: str, **figures: Any) -> Device:
    """A device like one of the catalogue of which less is known."""
    return replace(Device.named(name), name=f"unlike {name}", **{"tensor_peak": {}, "hbm_bandwidth": None, **figures})


# And those that no catalogue has: other compute capabilities, between the others and behind them, and chips without known peaks
OTHERS = {"A10": (8, 7), "B200": (10, 3), "RTX 4090": (11, 0), "RTX 5090": (12, 1)}
DEVICES = (
    *Device.catalogue(),
    *(replace(Device.named(name), compute_capability=capability) for name, capability in OTHERS.items()),
    unknown("T4"),
    unknown("A100-40GB", registers_per_sm=32768),
    unknown("RTX 4090", compute_capability=(13, 0), sm_count=7),
)
HOPPERS = (H100, H100, unknown("H100-SXM", sm_count=9), replace(H100, name="of little L2", l2_bytes=1 << 20))


def length(rng: random.Random) -> int:
    """A length: short ones, those of several blocks, and long ones."""
    return rng.randint(*rng.choice([(0, 3), (1, 99), (100, 300), (100, 300), (1000, 5000)]))


def options(
    rng: random.Random, takers: tuple[str, ...], pairs: tuple[int, int], lengths: tuple[int, int], blocks: tuple[int, int] | None
) -> Options:
    """Some options of those that calls and algorithms take, most of the time few, and now and then another one, for (batch, heads)
    `pairs` and (n_q, n_k) `lengths`. A block mask has `blocks`, but for some."""
    (batch, heads), (n_q, n_k) = pairs, lengths

    def some(chance: float = 0.25) -> bool:
        return rng.random() < chance

    chosen: Report = {name: some() for name in ("causal", "bias", *VECTORS, "padded")}
    if chosen["padded"] and some(0.5):
        chosen["key_lengths"] = tuple(rng.randint(0, n_k) for _ in range(batch))
    if some():
        chosen["window"] = rng.randint(0, n_k), None if chosen["causal"] else rng.choice([None, rng.randint(0, n_k)])
    if some():
        chosen["score"] = rng.choice(SCORES if some() else SCORES[:-1]).form
    if blocks and some(0.5):
        rows, cols = rng.choice([blocks] * 9 + [(32, 80)])
        chosen["block_mask"] = BlockMask.of(patches(rng, batch, heads, -(-n_q // rows), -(-n_k // cols)))
    chosen["mask"] = some(0.15)
    chosen["dropout"] = some(0.15)
    chosen["scale"] = -0.3 if some(0.1 if "fa3" not in takers else 0.02) else None
    chosen["score_dtype"] = "float32" if some() else None
    if not chosen["mask"] and some():
        chosen["mask_function"] = rng.choice(MASKS).form
    untaken = {name for name in OPTIONS if any(by not in OPTIONS[name].takers for by in takers)}
    taken = {name: value for name, value in chosen.items() if value and (name not in untaken or some(0.02))}
    if "bias" in taken and "padded" in taken:
        taken["bias_dtype"] = "float32"
    if {"mask", "mask_function"} & set(taken):
        taken["tiles_given"] = "tiles_given" not in untaken and some(0.5)
        taken["pattern"] = Pattern.of(patches(rng, batch, heads, n_q, n_k)) if "pattern" not in untaken and some(0.5) else None
    return Options(**taken)


def patches(rng: random.Random, batch: int, heads: int, rows: int, cols: int) -> Array:
    """An array of bool of which some parts are alike."""
    of = np.random.default_rng(rng.randrange(99)).random(
        (rng.choice([1, batch]), rng.choice([1, heads]), rows // 40 + 1, cols // 40 + 1)
    )
    parts = of if max(rows, cols) > 40 else of[..., :1, :1]
    return (parts < rng.choice([0.2, 0.6, 1.0]))[..., np.arange(rows)[:, None] // 40, np.arange(cols) // 40]


def tilings(rng: random.Random, algorithm: str) -> Any:
    """None for the fitted blocks most of the time, or others, of which no kernel runs some."""
    if algorithm == "fa3":
        return rng.choice(
            [None, None, None, None, (128, 16), (192, 64), rng.choice([(64, 32), (128, 24), (128, 256), (128, 272), "paper"])]
        )
    some = (16, 16), (32, 64), (64, 32)
    others = (
        (128, 32),
        (16, 128),
        (32, 96),
        "paper",
        TileSize(20, 23, "to count with"),
        rng.choice([(64, 144), (256, 16), (48, 24)]),
    )
    return rng.choice([None, None, None, *some, rng.choice(others)])


def chip(rng: random.Random, hopper: bool) -> Device:
    """A device, some with little SRAM."""
    device = rng.choice(HOPPERS if hopper else DEVICES)
    return device.with_sram(rng.choice([4, 12, 24, 40, 64, 100, 160]) << 10) if rng.random() < 0.2 else device


def problem(rng: random.Random, takers: tuple[str, ...], tiling: Any, hopper: bool = False) -> Problem:
    """A random problem for calls and algorithms, most of the time one that fa3 runs if it is for a `hopper`."""
    batch = rng.randint(1, 3)
    heads, kv_heads = rng.choice([(1, 1), (4, 4), (4, 2), (4, 1), (32, 8), (12, 2)] + [(64, 64)] * hopper)
    n_q, n_k = length(rng), length(rng)
    if "decode" in takers[0] and rng.random() < 0.7:
        n_q = rng.randint(1, 9)
    dtype = "bfloat16" if hopper and rng.random() < 0.97 else rng.choice(["float16", "bfloat16", "float32"])
    size = 4 if dtype == "float32" else 2
    wide = [272, 320] * (takers[0] in ("fa2", "fa2 backward") and size == 2) + [264] * (rng.random() < 0.05)
    d = rng.choice(
        [64, 64, 128, 128, 256, 96, 80, 192, *wide[-1:]] if hopper else [16, 33, 40, 64, 64, 80, 128, 128, 192, 256, *wide]
    )
    bits = d * size | 16
    alignment = 16 if hopper and rng.random() < 0.97 else rng.choice([bits & -bits, bits & -bits, size])
    asked = options(rng, takers, (batch, heads), (n_q, n_k), tiling if isinstance(tiling, tuple) else None)
    shape = (batch, heads, kv_heads, n_q, n_k, d, dtype)
    return Problem(*shape, head_dim_v=rng.choice([None, None, 24, d]), alignment=alignment, options=asked)


def attention(rng: random.Random, kind: str) -> Schedule:
    """A schedule of an algorithm, forward or backward."""
    algorithm, _, backward = kind.partition(" ")
    tiling = None if algorithm == "decode" else tilings(rng, algorithm)
    whole, device = problem(rng, (kind,), tiling, algorithm == "fa3"), chip(rng, algorithm == "fa3")
    if not backward:
        return plan(whole, device, algorithm, tiling, lse=rng.random() < 0.5)
    deterministic = rng.random() < 0.5
    dbias = (algorithm == "fa2" and whole.options.bias and rng.random() < 0.5) or rng.random() < 0.06
    return plan_backward(whole, device, algorithm, tiling, deterministic=deterministic, dbias=dbias)


def packed(rng: random.Random, kind: str) -> Schedule:
    """A schedule of packed sequences, of known and of unknown lengths."""
    _, algorithm, *backward = kind.split()
    tiling = tilings(rng, algorithm)
    takers = "attention_varlen", f"{algorithm}{' backward' * bool(backward)}"
    whole, device = problem(rng, takers, tiling, algorithm == "fa3"), chip(rng, algorithm == "fa3")
    if algorithm == "fa3" and rng.random() < 0.3:
        whole = replace(whole, batch=40, seqlen_q=whole.seqlen_q % 300, seqlen_k=whole.seqlen_k % 300)
    most = whole.seqlen_q + (rng.random() < 0.02), whole.seqlen_k
    lengths = tuple((rng.randint(0, most[0]), rng.randint(0, most[1])) for _ in range(whole.batch)) if rng.random() < 0.7 else None
    totals = None if lengths or rng.random() < 0.5 else (whole.batch * whole.seqlen_q, whole.batch * whole.seqlen_k // 2)
    known: Report = {"totals": totals}
    if whole.options.mask_function and lengths and max(most) < 400 and rng.random() < 0.7:
        known["patterns"] = tuple(Pattern.of(patches(rng, 1, whole.heads, *each)) for each in lengths)
    if backward:
        return plan_varlen_backward(whole, device, lengths, tiling, algorithm=algorithm, deterministic=rng.random() < 0.5, **known)
    return plan_varlen(whole, device, lengths, tiling, algorithm=algorithm, lse=rng.random() < 0.5, **known)


def cached(rng: random.Random) -> DecodeSchedule:
    """A schedule of decoding with a cache."""
    whole, device = problem(rng, ("attention_decode",), None), chip(rng, False)
    page = rng.choice([None, 16, 48, 64] + [24] * (rng.random() < 0.1))
    if page and rng.random() < 0.95:
        whole = replace(whole.asking(key_lengths=None, pattern=None), seqlen_k=-(-whole.seqlen_k // page) * page)
    new = rng.choice([0, 0, 1, whole.seqlen_q, 3])
    if whole.options.padded and rng.random() < 0.9 and new <= whole.seqlen_k:
        whole = whole.asking(key_lengths=tuple(rng.randint(0, whole.seqlen_k - new) for _ in range(whole.batch)))
    cache = Cache(new, page, rng.randint(0, 900) if page else 0, tree=rng.random() < 0.2)
    splits = rng.choice([None, None, None, 1, 3, 40, 256] + [257] * (rng.random() < 0.1))
    return plan_decode(whole, device, cache, num_splits=splits, lse=rng.random() < 0.5)


def softmax(rng: random.Random) -> Schedule:
    """A schedule of softmax."""
    rows, cols = (int(2 ** rng.uniform(0, 21)) - rng.randint(0, 1) for _ in range(2))
    dtype, algorithm = rng.choice(["float16", "bfloat16", "float32"]), rng.choice(["online", "safe"])
    return plan_softmax(
        rows << 12 * (rng.random() < 0.2), cols, dtype, chip(rng, False), algorithm, adjacent_rows=rng.random() < 0.4
    )


def other(rng: random.Random) -> Schedule:
    """A schedule of the sums over ranks, or of the dropped weights."""
    if rng.random() < 0.5:
        return AddStateSchedule(length(rng), rng.randint(1, 256), rng.choice(["float16", "float32"]), chip(rng, False))
    return DropoutMaskSchedule((rng.randint(1, 3), rng.randint(1, 9), length(rng), length(rng)), chip(rng, False))


def limits(rng: random.Random) -> Report:
    """The limits and rates of a chip, and the occupancy by a few kernels."""
    device = chip(rng, False)
    kernels = [
        (rng.choice([1, 32, 100, 128, 256, 288, 1024, 1056]), rng.randint(0, 255), rng.randint(0, 110_000)) for _ in range(8)
    ]
    held = [occupancy(device, *each, estimate=True) for each in kernels]
    rates = [(tensor_rate(device, dtype), mma_rate(device, dtype)) for dtype in PEAK_DTYPES]
    found = {
        "chip": repr(device),
        "rates": [*rates, clock_rate(device)],
        "like": vars(Multiprocessor.like(device.compute_capability)),
    }
    own = tried("of", lambda: repr(Multiprocessor.of(device.compute_capability)))
    return found | own | {"occupancy": [[each.limits, each.blocks, each.fraction, each.limited_by] for each in held]}


def said(schedule: Schedule) -> Report:
    """All that a schedule says: launches, what may replace them, room, tiles of masks, bytes, moves."""
    found: Report = {
        "device": schedule.device.name,
        "workspaces": repr(schedule.workspaces()),
        "bytes": schedule.workspace_bytes,
    }
    found |= tried("theory", lambda: dict(theory.traffic(schedule))) | tried("replay", lambda: dict(replay(schedule)))
    found |= tried("kernels", lambda: [launch(schedule, kernel) for kernel in schedule.kernels()])
    if isinstance(found["kernels"], list) and not isinstance(schedule, AddStateSchedule):
        found["estimate"] = [estimate.seconds(schedule, seeded=each) for each in (False, True)]
    for walk in schedule.walks():
        moves = [
            (each.tensor.name, str(each.when), each.write, each.tile, each.room, each.times, each.by_rows) for each in walk.moves
        ]
        own = [getattr(walk, name, None) for name in ("block", "loop", "rooms", "every", "sizes", "heads", "pack", "few", "works")]
        found[f"moves of {walk.kernel}"] = [moves, repr(own)]
    for name in ("found_tiles", "given_tiles"):
        found[name] = [(each.field, each.blocks, each.count) for each in getattr(schedule, name, ())]
    if isinstance(schedule, TileSchedule):
        p = schedule.problem
        found |= {"problem": repr(p)[:2000], "tiling": repr(schedule.tiling), "of rows": getattr(schedule, "row_results", ())}
        found |= tried("numbers", lambda: [dict(schedule.numbers()), repr(dict(schedule.maps()))])
        if p.head_count * p.seqlen_q * p.seqlen_k < PLAYED:
            found |= tried("played", lambda: played(schedule))
    if isinstance(schedule, Fa3Schedule):
        found |= tried("order", lambda: [[int(each @ np.arange(len(each)) ** 2 % 999_983) for each in schedule.order()]])
    return found


def played(schedule: TileSchedule) -> list[Any]:
    """Returns the hits of the L2 and the bytes of DRAM."""
    return [l2.run(schedule).as_dict()]


def launch(schedule: Schedule, kernel: Any) -> list[Any]:
    """All that a launch is, and those that may replace it."""
    ways = [f"{each.grid} x {each.threads} threads, {each.shared_bytes} bytes, {given(each)}" for each in (kernel, *kernel.instead)]
    return [kernel.name, *ways, getattr(schedule, "sharing", lambda _: None)(kernel.name)]


def tried(name: str, figures: Callable[[], Any]) -> Report:
    """Figures, or the reason why there are none."""
    try:
        return {name: figures()}
    except ValueError as error:  # DoesNotFit is one
        return {name: f"{type(error).__name__}: {error}"}


def models(schedule: Schedule) -> Report:
    """The candidates that a schedule chose from, with its blocks and with any, and what models say of them."""
    if not isinstance(schedule, TileSchedule):
        return {}
    p, device, blocks = schedule.problem, schedule.device, schedule.blocks
    found: Report = {}

    def candidates(*ways: Callable[[], Any]) -> list[Any]:
        return [vars(each) for way in ways for each in way()]

    if isinstance(schedule, DecodeSchedule):
        best, splits = schedule.candidate, np.arange(1, 9)
        found["candidates"] = candidates(lambda: decode_tiles.candidates(p, device))
        times = decode_tiles.times(p, device, best.config, best.resident, splits)
        found["times"] = {name: each.tolist() for name, each in times.items()}
        found["least"] = decode_tiles.least_seconds(p, device), decode_tiles.needed_in_flight(device)
        found["under way"] = decode_tiles.under_way(p, device, best), decode_tiles.at_a_time(p, device, best)
    elif isinstance(schedule, Fa2BackwardSchedule) and not isinstance(schedule, Fa3BackwardSchedule):
        own, rows, dq = fa2_backward_tiles, schedule.by_rows, not schedule.deterministic
        ways = ((of, within) for of in (own.candidates, own.query_candidates) for within in (None, schedule.mask_blocks))
        found["candidates"] = candidates(*(lambda of=of, within=within: of(p, device, within) for of, within in ways))
        parts = [fa2_backward_clocks.column_parts(p, device, blocks, schedule.warps, one, dq) for one in own.launches(p)]
        parts += [fa2_backward_clocks.query_parts(p, device, (rows.block_rows, rows.block_cols), rows.warps)]
        found["clocks"] = parts
    elif isinstance(schedule, Fa3Schedule):
        found |= tried("candidates", lambda: candidates(lambda: fa3_tiles.candidates(p, device, None)))
        found |= tried("clocks", lambda: fa3_tiles.clocks(p, device, fa3_tiles.choose(p, device)))
    elif schedule.algorithm == "fa2" and not isinstance(schedule, BackwardSchedule):
        ways = (None, (blocks[0] // 16 * 16 or 16, blocks[1] // 16 * 16 or 16), (256, 64))
        found["candidates"] = candidates(*(lambda blocks=blocks: fa2_tiles.candidates(p, device, blocks) for blocks in ways))
    return found


def drawn(kind: str, number: int) -> Report:
    """The figures of a random problem of a kind; of one that nothing runs, the reason."""
    rng = random.Random(f"{kind} {number}")  # a text gives the same numbers in each process
    try:
        if kind == "chip":
            return limits(rng)
        if kind == "auto":
            takers, hopper = ("fa2", *["decode"] * (rng.random() < 0.7))[::-1], rng.random() < 0.8
            asked = problem(rng, takers, None, hopper), chip(rng, hopper)
            return {"choice": repr(choose(*asked, rng.choice([None] * 9 + [(64, 64)])))}
        makers: dict[str, Callable[[], Schedule]] = {"softmax": lambda: softmax(rng), "others": lambda: other(rng)}
        makers |= {"cache": lambda: cached(rng)}
        made = makers[kind]() if kind in makers else (packed if kind.startswith("packed") else attention)(rng, kind)
        return said(made) | models(made)
    except (ValueError, TypeError) as error:  # DoesNotFit is one
        return {"refused": f"{type(error).__name__}: {error}"}


def problems() -> Iterator[tuple[str, str, Report]]:
    """The line, number and figures of each random problem: a line of each kind, then the next of each."""
    for line in range(max(LINES.values())):
        for kind in (kind for kind, lines in LINES.items() if line < lines):
            for number in range(line * EACH, (line + 1) * EACH):
                yield f"{kind} {line}", str(number), drawn(kind, number)
