"""The agreement of a ring's ranks before any work, and the errors of the others if one fails. MPI: test_mpi.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Score
from cupyflash.distributed import (
    RankFailed,
    ring_attention,
    ring_attention_backward,
    ring_attention_vjp,
    shard,
    threads,
    unshard,
)
from cupyflash.distributed.asked import PieceCalls
from cupyflash.distributed.threads import ThreadCommunicator
from cupyflash.sim.numbers.reference import reference
from rings import A100, LAYOUTS, arrays, over_ranks, plain_backward, plain_forward, plain_pieces, refusals  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "causal must be the same on all 3 ranks, got False on ranks 0 and 2; True on rank 1"),
        ({"scale": 0.5}, "scale must be the same on all 3 ranks, got None on ranks 0 and 2; 0.5 on rank 1"),
        ({"softcap": 3.0}, "score must be the same on all 3 ranks"),
        ({"dropout": 0.1, "seed": 3}, "dropout must be the same on all 3 ranks"),
        ({"gather_kv": True}, "gather_kv must be the same on all 3 ranks"),
        ({"layout": "contiguous"}, "layout must be the same on all 3 ranks, got zigzag on ranks 0 and 2; contiguous on rank 1"),
        ({"sinks": np.zeros(2, np.float32)}, "sinks must be the same on all 3 ranks, got none on ranks 0 and 2; float32"),
        ({"layout": "spiral"}, "layout must be one of zigzag, contiguous, got 'spiral'"),
        ({"mask": np.ones((32, 96), bool)}, "mask must be a cupyflash.Mask or None over ranks, got ndarray"),
        ({"window": (-1, 3)}, "window must be .left, right. of at least 0"),
        ({"dropout": 0.1}, "dropout needs a seed"),
    ],
)
def test_what_differs_on_a_rank_is_refused_on_all(change: dict[str, Any], message: str) -> None:
    q, k, v, _ = arrays(96, 96)

    def work(comm: Any) -> None:
        ring_attention(*(shard(x, comm) for x in (q, k, v)), comm, **(change if comm.rank == 1 else {}))

    found = refusals(3, work)
    for rank, error in enumerate(found):
        assert isinstance(error, ValueError | TypeError)
        with pytest.raises(type(error), match=message):
            raise error
        own = "must be the same" in message or rank == 1
        assert own or str(error).startswith("rank 1 cannot take part: "), error


@pytest.mark.wide
@pytest.mark.parametrize("d", [16, 300])
def test_the_gradient_of_a_sum_and_wide_heads(d: int) -> None:
    """A dout that is broadcast, which kernels cannot read as it is."""
    q = np.random.default_rng(0).standard_normal((2, 64, d)).astype(np.float16)

    def work(comm: ThreadCommunicator) -> list[np.ndarray]:
        own = [shard(q, comm)] * 3
        out, pullback = ring_attention_vjp(*own, comm)
        return [unshard(x, comm) for x in pullback(np.broadcast_to(np.float16(1), out.shape))]

    out, pullback = cupyflash.attention_vjp(q, q, q)
    for found, expected in zip(threads(2, work)[0], pullback(np.ones_like(out)), strict=True):
        assert np.abs(found.astype(np.float64) - expected).max() < 8e-3


def test_arrays_that_do_not_go_together_are_refused_on_all() -> None:
    q, k, v, dout = arrays(96, 96)

    def call(changed: Callable[[Any, list[Any]], list[Any]]) -> list[Exception]:
        return refusals(2, lambda comm: ring_attention(*changed(comm, [shard(x, comm) for x in (q, k, v)]), comm))

    found = call(lambda comm, own: [x.astype(np.float32) for x in own] if comm.rank else own)
    assert {str(each) for each in found} == {
        "q must be the same on all 2 ranks, got float16 (2, n, 16) on rank 0; float32 (2, n, 16) on rank 1"
    }
    found = call(lambda comm, own: [own[0][:, :-1], *own[1:]] if comm.rank else own)
    assert "q must be cut as layout 'zigzag' does" in str(found[0]) and str(found[0]) == str(found[1])
    found = call(lambda comm, own: [own[0], own[1][..., :8], own[2]] if comm.rank else own)
    own = "k must have q's head dimension 16, got shape (1, 64, 8)"
    assert [str(each) for each in found] == [f"rank 1 cannot take part: ValueError: {own}", own]
    slopes = Score("s + table[k]", table=np.zeros(32, np.float32))  # of a part, where the whole's is wanted
    for error in refusals(2, lambda comm: ring_attention(*(shard(x, comm) for x in (q, k, v)), comm, score=slopes)):
        with pytest.raises(ValueError, match="table must have length 96 along axis 0"):
            raise error
    ring = refusals(2, lambda comm: (ring_attention if comm.rank else lambda *a: unshard(a[0], comm))(q, k, v, comm))
    assert all("the call must be the same" in str(each) for each in ring)
    lse = np.zeros((2, 5), np.float32)
    alone = refusals(1, lambda comm: ring_attention_backward(dout, q, k, v, q, lse, comm))[0]
    assert "lse must have shape (2, 96)" in str(alone)
    with pytest.raises(TypeError, match=r"comm must be an mpi4py.MPI.Comm .pip install 'cupyflash\[mpi\]'."):
        ring_attention(q, k, v, None)


# -- faults ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_a_rank_that_fails_in_the_middle(plainly: None, monkeypatch: pytest.MonkeyPatch, backward: bool, gather: bool) -> None:
    """It raises its own error, the others one that names it; all have passed on what they had to."""
    q, k, v, dout = arrays(256, 256, d=4)
    pieces = {"forward": plain_forward, "backward": plain_backward}
    name = "backward" if backward else "forward"

    def fails(calls: PieceCalls, piece: Any, *given: Any) -> Any:
        if piece.row >= 96 and piece.row < 128:  # rows that rank 3 alone holds
            raise MemoryError("nothing left")
        return pieces[name](calls, piece, *given)

    def work(comm: Any) -> Any:
        own = [shard(x, comm, "contiguous") for x in (q, k, v)]
        _, pullback = ring_attention_vjp(*own, comm, layout="contiguous", gather_kv=gather)
        return pullback(shard(dout, comm, "contiguous"))

    def caught(comm: Any) -> Any:
        with pytest.raises((MemoryError, RankFailed)) as info:
            work(comm)
        return type(info.value), str(info.value)

    threads(8, work)
    monkeypatch.setattr(PieceCalls, name, fails)
    failed = (RankFailed, "rank 3 failed: MemoryError: nothing left")
    assert threads(8, caught) == [failed] * 3 + [(MemoryError, "nothing left")] + [failed] * 4


def test_a_late_rank_and_one_that_leaves(plainly: None) -> None:
    q, k, v, _ = arrays(64, 64, d=4)

    def late(comm: Any) -> np.ndarray:
        time.sleep(0.1 * (comm.rank == 1))
        return unshard(ring_attention(*(shard(x, comm) for x in (q, k, v)), comm), comm)

    assert all(np.allclose(out, reference(q, k, v)[0], atol=2e-3) for out in threads(2, late))

    def leaves(comm: Any) -> Any:
        if comm.rank == 1:
            raise KeyError("gone")
        return ring_attention(*(shard(x, comm) for x in (q, k, v)), comm)

    with pytest.raises(KeyError, match="gone"):
        threads(2, leaves)
    with pytest.raises(RankFailed, match="rank 1 failed: it has returned"):
        threads(2, lambda comm: None if comm.rank else comm.gather(b""))
