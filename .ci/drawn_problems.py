"""Random problems for `.ci/choices.py`, with all options and on all chips, and all that schedules say of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from accounts import given

from cupyflash import Device, Mask, Problem, Score, plan
from cupyflash.request.options import OPTIONS, BlockMask, Options, Pattern
from cupyflash.schedules import (
    ALGORITHMS,
    BACKWARD_ALGORITHMS,
    Schedule,
    decode_tiles,
    fa2_backward_tiles,
    fa2_tiles,
    fa3_tiles,
    plan_backward,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.sim import replay, theory

COUNT = 250
SCORES = (
    Score("s * 0.5 + tanh(s / 20) - abs(q - k) / 8"),
    Score("s - slope[h] * (q - k) + near[h, q - k]", slope=np.ones(4, np.float32), near=np.ones((4, 300), np.float16)),
    Score("where(k % 3 == 0, s / scale[row], exp(bound[b]))", scale=np.ones(300, np.float32), bound=np.ones(3, np.float32)),
)
MASKS = (Mask("k <= q and q - k < 9"), Mask("id[q] == id[k]", id=np.zeros(300, np.int32)))
KINDS = (
    *ALGORITHMS,
    *(f"{algorithm} backward" for algorithm in BACKWARD_ALGORITHMS),
    *("fa2", "fa2 backward", "decode", "packed fa2", "packed fa3", "packed fa2 backward"),
)
TILES = {"fa2": fa2_tiles, "fa3": fa3_tiles, "decode": decode_tiles, "fa2 backward": fa2_backward_tiles}
H100 = Device.named("H100-SXM")
# And one that no catalogue has: a small chip between others
DEVICES = (*Device.catalogue(), replace(Device.named("RTX 4090"), compute_capability=(11, 0)))


def options(rng: random.Random, taker: str, batch: int, heads: int, n_q: int, n_k: int, blocks: tuple[int, int] | None) -> Options:
    """Some options of those that a call or algorithm takes, most of the time few; a block mask has `blocks`."""

    def some(chance: float = 0.25) -> bool:
        return rng.random() < chance

    chosen: dict[str, Any] = {name: some() for name in ("causal", "bias", "sinks", "padded")}
    if chosen["padded"] and some(0.5):
        chosen["key_lengths"] = tuple(rng.randint(0, n_k) for _ in range(batch))
    if some():
        chosen["window"] = rng.randint(0, n_k), None if chosen["causal"] else rng.randint(0, n_k)
    if some():
        chosen["score"] = rng.choice(SCORES).form
    if blocks and some(0.5):
        chosen["block_mask"] = BlockMask.of(patches(rng, batch, heads, -(-n_q // blocks[0]), -(-n_k // blocks[1])))
    chosen["mask"] = some(0.15)
    if not chosen["mask"] and some():
        chosen["mask_function"] = rng.choice(MASKS).form
    taken = {name: value for name, value in chosen.items() if name in OPTIONS and taker in OPTIONS[name].takers and value}
    if {"mask", "mask_function"} & set(taken):
        taken["tiles_given"] = some(0.5)
        taken["pattern"] = Pattern.of(patches(rng, batch, heads, n_q, n_k)) if some(0.5) else None
    return Options(**taken)


def patches(rng: random.Random, batch: int, heads: int, rows: int, cols: int) -> np.ndarray:
    """An array of bool of which some parts are alike."""
    of = np.random.default_rng(rng.randrange(99)).random(
        (rng.choice([1, batch]), rng.choice([1, heads]), rows // 40 + 1, cols // 40 + 1)
    )
    parts = of if max(rows, cols) > 40 else np.broadcast_to(of, (*of.shape[:2], 1, 1))
    return (parts < rng.choice([0.2, 0.6, 1.0]))[..., np.arange(rows)[:, None] // 40, np.arange(cols) // 40]


def planned(rng: random.Random) -> tuple[str, Schedule]:
    """A schedule of a random problem, and its kind; the errors of `plan`."""
    kind = rng.choice(KINDS)
    packed, backward = kind.startswith("packed"), kind.endswith("backward")
    algorithm = kind.removeprefix("packed ").removesuffix(" backward")
    batch, (heads, kv_heads) = rng.randint(1, 3), rng.choice([(1, 1), (4, 4), (4, 2), (4, 1)])
    n_q, n_k = (rng.randint(*rng.choice([(1, 99), (100, 300), (100, 300), (1000, 5000)])) for _ in range(2))
    hopper = algorithm == "fa3"
    d = rng.choice([64, 128, 256, 96] if hopper else [16, 33, 40, 64, 80, 128, 192, 256] + [272, 320] * (algorithm == "fa2"))
    dtype = "bfloat16" if hopper else rng.choice(["float16", "bfloat16", "float32"])
    size = 4 if dtype == "float32" else 2
    tiling = None if algorithm in ("fa3", "decode") else rng.choice([None, None, (16, 16), (32, 64), (64, 32)])
    asked = options(rng, "attention_varlen" if packed else kind, batch, heads, n_q, n_k, tiling)
    bits = d * size | 16
    shape = (batch, heads, kv_heads, n_q, n_k, d, dtype)
    alignment = 16 if hopper else rng.choice([bits & -bits, size])
    whole = Problem(*shape, head_dim_v=rng.choice([None, None, 24, d]), alignment=alignment, options=asked)
    device = H100 if hopper else rng.choice(DEVICES)
    lengths = tuple((rng.randint(0, n_q), rng.randint(0, n_k)) for _ in range(batch)) if rng.random() < 0.7 else None
    deterministic = algorithm == "fa2" and rng.random() < 0.4
    if packed and backward:
        return kind, plan_varlen_backward(whole, device, lengths, tiling, deterministic=deterministic)
    if packed:
        return kind, plan_varlen(whole, device, lengths, tiling, algorithm=algorithm)
    if backward:
        dbias = algorithm == "fa2" and asked.bias and rng.random() < 0.5
        return kind, plan_backward(whole, device, algorithm, tiling, deterministic=deterministic, dbias=dbias)
    return kind, plan(whole, device, algorithm, tiling, lse=rng.random() < 0.5)


def said(kind: str, schedule: Schedule) -> dict[str, Any]:
    """All that a schedule says: launches, what may replace them, room, tiles of masks, bytes, and the candidates it chose from."""
    problem, device = schedule.problem, schedule.device
    found: dict[str, Any] = {
        "problem": repr(problem)[:2000],
        "device": device.name,
        "traffic": repr(theory.traffic(schedule)),
        "replay": repr(replay(schedule)),
    }
    for kernel in schedule.kernels():
        ways = [
            f"{each.grid} x {each.threads} threads, {each.shared_bytes} bytes, {given(each)}" for each in (kernel, *kernel.instead)
        ]
        found[kernel.name] = [*ways, getattr(schedule, "sharing", lambda _: None)(kernel.name)]
    found["workspaces"] = repr(schedule.workspaces())
    for walk in schedule.walks():
        moves = [
            (each.tensor.name, str(each.when), each.write, each.tile, each.room, each.times, each.by_rows) for each in walk.moves
        ]
        own = [getattr(walk, name, None) for name in ("block", "loop", "rooms", "every", "sizes", "heads", "pack", "few", "works")]
        found[f"moves of {walk.kernel}"] = [moves, repr(own)]
    for name in ("found_tiles", "given_tiles"):
        found[name] = [(each.field, each.blocks, each.count) for each in getattr(schedule, name, ())]
    if kind in TILES:
        found["candidates"] = [asdict(each) for each in TILES[kind].candidates(problem, device)]
    return found


def problems() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The kind, number and figures of each random problem; of one that no schedule takes, the reason."""
    for number in range(COUNT):
        try:
            kind, schedule = planned(random.Random(number))
            yield kind, str(number), said(kind, schedule)
        except (ValueError, TypeError) as error:  # DoesNotFit is one
            yield "refused", str(number), {"reason": f"{type(error).__name__}: {error}"}
