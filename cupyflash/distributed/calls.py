"""The calls over ranks: attention of a sequence of which each rank holds a part, of packed ones too, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from cupyflash.distributed.communicator import as_communicator
from cupyflash.distributed.opening import Checked, RingCall
from cupyflash.distributed.ring import ForwardPass
from cupyflash.distributed.ring_backward import BackwardPass
from cupyflash.distributed.varlen import VarlenChecked
from cupyflash.request import keywords
from cupyflash.request.keywords import asks, keywords_of


@asks(keywords.Ring, layout="zigzag")
def ring_attention(q: Any, k: Any, v: Any, comm: Any, **asked: Unpack[keywords.Ring]) -> Any:
    """Compute `attention` of a sequence that is cut over the ranks of `comm`: each gives its part of q, k and v, and gets its part
    of O.

    comm: an `mpi4py.MPI.Comm`, a communicator of `cupy.cuda.nccl` or `nccl4py`, the one that `threads` passes, or a `Communicator`
    of your own. All ranks make the call, with the same options. layout: the positions of a rank, as `shard` cuts them: "zigzag",
    the first and the last still free chunk of 2 x ranks, so that under a causal mask all have the same work, or "contiguous", one
    chunk. Lengths need not divide; q and k may have different ones. `parts` lists the positions. gather_kv: gather all K and V on
    each rank at once, instead of passing them round while computing: more memory, fewer and larger calls.

    Shapes, dtypes and the other options are `attention`'s, over the whole sequence: `causal` and `window` are aligned with its end,
    and score and mask functions, ALiBi and dropout see positions in it; captured arrays are whole on each rank. A mask is a `Mask`.
    Sinks join once.

    The result equals one device's except for the order of sums: O is summed in float32 and rounded at the end.

    A mistake on one rank is an error on all: ValueError that names the rank, before anything is sent; `RankFailed` if a rank fails
    in the middle.
    """
    return _forward(ring_attention, comm, {"q": q, "k": k, "v": v, **asked})


@asks(keywords.RingGradients, layout="zigzag")
def ring_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, comm: Any, **asked: Unpack[keywords.RingGradients]
) -> tuple[Any, ...]:
    """Compute dq, dk and dv of this rank's part: its effect on sum(dout * O) over all ranks.

    `out` and `lse` are the results of `ring_attention(..., return_lse=True)` on this rank, `dout` is the gradient of its out. All
    other arguments have the values of that call; `deterministic` as for `attention_backward`.

    With `sinks`, equal on all ranks, also returns the gradient of sinks from this rank's rows. Their sum over the ranks is the
    gradient, as for every parameter that ranks share.
    """
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **asked}
    return _run(ring_attention_backward, comm, given, BackwardPass)


@asks(keywords.RingGradients, layout="zigzag")
def ring_attention_vjp(
    q: Any, k: Any, v: Any, comm: Any, **asked: Unpack[keywords.RingGradients]
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Return `ring_attention(q, k, v, comm, ...)` and its pullback, which takes dout and returns the results of
    `ring_attention_backward`.

    `options` are `ring_attention`'s except `return_lse`. All ranks call the pullback, any number of times. It holds q, k, v, out
    and the log-sum-exps of this rank.
    """
    if "return_lse" in asked:
        raise TypeError("ring_attention_vjp has no return_lse")
    forward: dict[str, Any] = {name: value for name, value in asked.items() if name not in keywords.OF_GRADIENTS}
    out, lse = ring_attention(q, k, v, comm, return_lse=True, **forward)

    def pullback(dout: Any) -> tuple[Any, ...]:
        return ring_attention_backward(dout, q, k, v, out, lse, comm, **asked)

    return out, pullback


@asks(keywords.Ring, layout="zigzag")
def ring_attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, comm: Any, **asked: Unpack[keywords.Ring]
) -> Any:
    """Compute `attention_varlen` of packed sequences whose tokens are cut over the ranks of `comm`, wherever the cuts fall.

    q, k and v are this rank's tokens, (tokens, h, d), as `shard(..., axis=0)` cuts them. cu_seqlens_q and cu_seqlens_k are the
    bounds of all sequences in all tokens, as `attention_varlen` takes them, the same on all ranks; those on a GPU are copied to the
    host, which waits for it. All else as for `ring_attention`, in each sequence. Score and mask functions and dropout see the same
    positions as in `attention_varlen`: b is the sequence's number, row, q and k count from its own beginning, n_q and n_k are its
    lengths. Captured arrays are whole on each rank; an axis that row or k indexes has as many elements as the longest sequence.

    Returns this rank's O, (tokens, h, d_v), and with `return_lse` L, float32 of shape (h, tokens). Raises as `ring_attention`.
    """
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _forward(ring_attention_varlen, comm, {"q": q, "k": k, "v": v, **bounds, **asked})


@asks(keywords.RingGradients, layout="zigzag")
def ring_attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    comm: Any,
    **asked: Unpack[keywords.RingGradients],
) -> tuple[Any, ...]:
    """Compute dq, dk and dv of this rank's tokens (and its share of dsinks), from the results of `ring_attention_varlen` with
    `return_lse`.

    All other arguments as there, and as for `ring_attention_backward`.
    """
    rows = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _run(ring_attention_varlen_backward, comm, {**rows, **bounds, **asked}, BackwardPass)


def _run(
    function: Callable[..., Any], comm: Any, given: Mapping[str, Any], kind: type[ForwardPass] | type[BackwardPass]
) -> tuple[Any, ...]:
    checked = VarlenChecked if "cu_seqlens_q" in given else Checked
    call = RingCall.opened(as_communicator(comm), lambda: checked.of(keywords_of(function), given))
    with call.device():
        return call.begin(kind).run(call.checked.arrays.get("sinks"), call.checked.returned)


def _forward(function: Callable[..., Any], comm: Any, given: Mapping[str, Any]) -> Any:
    out, lse = _run(function, comm, given, ForwardPass)
    return (out, lse) if given.get("return_lse") else out
