"""The calls over ranks: attention of a sequence of which each rank holds a part, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyflash.distributed.communicator import as_communicator
from cupyflash.distributed.opening import Call, Checked, options_asked
from cupyflash.distributed.ring import run_forward
from cupyflash.distributed.ring_backward import run_backward
from cupyflash.options import require_flag
from cupyflash.score import Mask, Score


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    comm: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "zigzag",
    mask: Mask | None = None,
    sinks: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    gather_kv: bool = False,
    return_lse: bool = False,
) -> Any:
    """`attention` of a sequence that is cut over the ranks of `comm`: each gives its part of q, k and v, and gets its part of O.

    comm: an `mpi4py.MPI.Comm`, a communicator of `cupy.cuda.nccl` or `nccl4py`, what `threads` hands over, or a `Communicator` of
    your own. All ranks make the call, with the same options.
    layout: which positions a rank holds, as `shard` cuts them: "zigzag", the first and the last still free chunk of 2 x ranks, so
    that under a causal mask all have the same work, or "contiguous", one chunk. Lengths need not divide; q and k may be of
    different ones. `parts` says what goes where.
    gather_kv: gather all K and V on each rank, at once, instead of passing them round while computing: more memory, fewer and
    larger calls.

    Shapes, dtypes and the other options are `attention`'s, over the whole sequence: `causal` and `window` are aligned with its end,
    and score and mask functions, ALiBi and dropout see positions in it; what a function has captured is whole on each rank. A mask
    is a `Mask`. Sinks join once.

    The result equals one device's but for the order of sums: O is summed in float32 and rounded at the end.

    Raises on every rank what is wrong on one: ValueError that names it, before anything is sent; `RankFailed` where a rank failed
    in the middle.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "seed": seed}
    options |= {"offset": offset, "mask": mask, "score": score, "softcap": softcap, "alibi_slopes": alibi_slopes}

    def check() -> Checked:
        require_flag("return_lse", return_lse)
        asked = options_asked(layout, gather_kv, **options)
        return Checked.of(asked, "ring_attention", q=q, k=k, v=v, sinks=sinks)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        out, lse = run_forward(call.forward(), call.arrays["q"], call.arrays.get("sinks"))
    return (out, lse) if return_lse else out


def ring_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    comm: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "zigzag",
    mask: Mask | None = None,
    sinks: Any | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    scale: float | None = None,
    gather_kv: bool = False,
    deterministic: bool = False,
) -> tuple[Any, ...]:
    """dq, dk and dv of this rank's part: what it does to sum(dout * O) over all ranks.

    `out` and `lse` are what `ring_attention(..., return_lse=True)` returned here, `dout` is the gradient of this rank's out. All
    else as there, and with the values of that call; `deterministic` as for `attention_backward`.

    With `sinks`, of which all ranks have the same, their gradient too: of this rank's rows, so that the sum over the ranks is that
    of the whole, as for every parameter that ranks share.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "dropout": dropout, "seed": seed}
    options |= {"offset": offset, "mask": mask, "score": score, "softcap": softcap, "alibi_slopes": alibi_slopes}

    def check() -> Checked:
        asked = options_asked(layout, gather_kv, deterministic, **options)
        return Checked.of(asked, "ring_attention_backward", q=q, k=k, v=v, sinks=sinks, dout=dout, out=out, lse=lse)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        return run_backward(*call.backward(), call.arrays.get("sinks"))


def ring_attention_vjp(
    q: Any, k: Any, v: Any, comm: Any, *, deterministic: bool = False, **options: Any
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`ring_attention(q, k, v, comm, ...)` and its pullback, which takes dout and returns what `ring_attention_backward` does.

    `options` are `ring_attention`'s but for `return_lse`. All ranks call the pullback, as often as they like. It holds q, k, v, out
    and the log-sum-exps of this rank.
    """
    if "return_lse" in options:
        raise TypeError("ring_attention_vjp has no return_lse")
    out, lse = ring_attention(q, k, v, comm, return_lse=True, **options)

    def pullback(dout: Any) -> tuple[Any, ...]:
        return ring_attention_backward(dout, q, k, v, out, lse, comm, deterministic=deterministic, **options)

    return out, pullback
