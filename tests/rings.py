"""The common part of the tests of rings: arrays, a call over ranks that are threads, and plain calls in place of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.distributed import (
    ring_attention,
    ring_attention_backward,
    shard,
    threads,
    unshard,
)
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.threads import ThreadCommunicator
from cupyflash.request.options import Options
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import masked_scores, reference

LAYOUTS = ("zigzag", "contiguous")
A100 = Device.named("A100-40GB")


def arrays(n_q: int, n_k: int, d: int = 16, heads: int = 2, dtype: Any = np.float16, seed: int = 0) -> list[np.ndarray]:
    """q, k, v and dout, of one key head."""
    rng = np.random.default_rng(seed)
    shapes = [(heads, n_q, d), (1, n_k, d), (1, n_k, d), (heads, n_q, d)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def over_ranks(
    ranks: int, q: Any, k: Any, v: Any, dout: Any, *, layout: str = "zigzag", gather_kv: bool = False, **options: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """O, L, dQ, dK and dV of the whole, and the ranks' shares of dsinks."""
    alike = {"layout": layout, "gather_kv": gather_kv}

    def work(comm: ThreadCommunicator) -> tuple[list[Any], tuple[Any, ...]]:
        own = [shard(x, comm, layout) for x in (q, k, v)]
        forward = {name: value for name, value in options.items() if name != "deterministic"}
        out, lse = ring_attention(*own, comm, return_lse=True, **alike, **forward)
        made = ring_attention_backward(shard(dout, comm, layout), *own, out, lse, comm, **alike, **options)
        return [unshard(x, comm, layout, -1 if x is lse else -2) for x in (out, lse, *made[:3])], made[3:]

    results = threads(ranks, work)
    for whole, _ in results[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(whole, results[0][0], strict=True))
    return results[0][0], [share for _, shares in results for share in shares]


def plain_forward(calls: PieceCalls, piece: Any, q: Any, k: Any, v: Any) -> Any:
    given = calls._of(piece, q, k, v)
    return reference(given["q"], given["k"], given["v"], causal=given["causal"], window=given["window"])


def plain_backward(calls: PieceCalls, piece: Any, rows: Any, k: Any, v: Any) -> Any:
    """The gradients from the whole's L and O, in float64."""
    given = calls._of(piece, rows["q"], k, v) | calls._rows(piece, rows)
    inputs = Inputs(given["q"], given["k"], given["v"], Options(causal=given["causal"], window=given["window"]))
    lse = np.where(np.isneginf(given["lse"]), 0, given["lse"])[..., None]
    P = np.exp(masked_scores(inputs).astype(np.float64) - lse)
    dP = given["dout"] @ np.swapaxes(given["v"], -1, -2)
    dS = P * (dP - (given["dout"] * given["out"]).sum(axis=-1, keepdims=True)) * inputs.problem.softmax_scale
    groups = (np.swapaxes(dS, -1, -2) @ given["q"], np.swapaxes(P, -1, -2) @ given["dout"])
    return dS @ given["k"], *(x.sum(axis=0, keepdims=True) for x in groups)


@pytest.fixture(name="plainly")
def plain_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces in NumPy's float64, which nothing has to be compiled for: what is tested is the ring."""
    monkeypatch.setattr(PieceCalls, "forward", plain_forward)
    monkeypatch.setattr(PieceCalls, "backward", plain_backward)
    for name in ("prepare_forward", "prepare_backward"):
        monkeypatch.setattr(PieceCalls, name, lambda *arguments: None)


def refusals(ranks: int, work: Callable[[Any], Any]) -> list[Exception]:
    """The errors of each rank."""

    def caught(comm: Any) -> Exception:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as info:
            work(comm)
        return info.value

    return threads(ranks, caught)
