"""The calls over ranks: attention of a sequence of which each rank holds a part, and its gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupyflash
from cupyflash.arrays import last_axis_contiguous
from cupyflash.dispatch import as_arrays, device_of, on_gpu
from cupyflash.distributed.agreement import require_alike, together
from cupyflash.distributed.asked import Asked, PieceCalls, contiguous, whole_lengths
from cupyflash.distributed.communicator import Communicator, as_communicator
from cupyflash.distributed.layout import LAYOUTS, part_length, parts
from cupyflash.distributed.plan import RingPlan
from cupyflash.distributed.ring import Ring, run_forward
from cupyflash.distributed.ring_backward import run_backward
from cupyflash.dropout import NO_ORIGIN, Dropout
from cupyflash.gradients import check_beside
from cupyflash.named_scores import one_score
from cupyflash.options import Options, require_choice, require_flag
from cupyflash.problem import Problem, require_usual_head_dim
from cupyflash.score import Mask, Score, captured_values, sizes_of


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
        asked = _asked(layout, gather_kv, **options)
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
        asked = _asked(layout, gather_kv, deterministic, **options)
        return Checked.of(asked, "ring_attention_backward", q=q, k=k, v=v, sinks=sinks, dout=dout, out=out, lse=lse)

    call = Call.opened(as_communicator(comm), check)
    with call.device():
        return run_backward(call.backward(), call.rows(), call.arrays.get("sinks"))


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


def _asked(
    layout: str,
    gather_kv: bool,
    deterministic: bool = False,
    *,
    mask: Any,
    score: Any,
    softcap: Any,
    alibi_slopes: Any,
    causal: Any,
    window: Any,
    scale: Any,
    dropout: Any,
    seed: Any,
    offset: Any,
) -> Asked:
    """TypeError or ValueError for options that are none, whatever the arrays."""
    require_choice("layout", layout, LAYOUTS)
    require_flag("gather_kv", gather_kv)
    require_flag("deterministic", deterministic)
    if not isinstance(mask, Mask | None):
        raise TypeError(f"mask must be a cupyflash.Mask or None over ranks, got {type(mask).__name__}")
    function = one_score(score, softcap, alibi_slopes)
    captured_values(function, mask)
    dropped = Dropout.asked(dropout, seed, offset, NO_ORIGIN)
    options = Options(causal=causal, window=window, scale=scale)
    of_positions = options.causal, options.window, options.scale
    return Asked(*of_positions, layout, bool(gather_kv), function, mask, dropped, bool(deterministic))


@dataclass(frozen=True)
class Checked:
    """A call that is right as far as one rank can see."""

    asked: Asked
    name: str
    arrays: Mapping[str, Any]
    gpu: bool
    problem: Problem

    @classmethod
    def of(cls, asked: Asked, name: str, **given: Any) -> Checked:
        """TypeError or ValueError for arrays that do not go together."""
        arrays = as_arrays(**given)
        captured = as_arrays(**asked.captured[0])
        gpu = on_gpu(**arrays, **captured)
        with device_of(gpu, **arrays, **captured):
            pass
        beside = {"sinks": arrays.get("sinks")}
        options = Options(asked.causal, asked.window, asked.scale, dropout=asked.dropout is not None)
        problem = Problem.from_arrays(arrays["q"], arrays["k"], arrays["v"], options, **beside)
        if "dout" in arrays:
            check_beside(arrays, arrays["q"].shape[:-1])
            require_usual_head_dim(problem, "gradients")
        return cls(asked, name, arrays, gpu, problem)

    @property
    def said(self) -> dict[str, Any]:
        """What others are told: what has to be alike, and the lengths, which need not be."""
        texts = {"cupyflash": cupyflash.__version__, "the call": self.name, "arrays": "CuPy's" if self.gpu else "NumPy's"}
        for name, array in self.arrays.items():
            shape = [str(length) for length in array.shape]
            if name not in ("sinks", "lse"):
                shape[-2] = "n"
            elif name == "lse":
                shape[-1] = "n"
            texts[name] = f"{array.dtype} ({', '.join(shape)})"
        return {"alike": texts | self.asked.text, "lengths": {"q": self.problem.seqlen_q, "k": self.problem.seqlen_k}}


@dataclass(frozen=True)
class Call:
    """A call on which all ranks agree."""

    comm: Communicator
    checked: Checked
    plan: RingPlan

    @classmethod
    def opened(cls, comm: Communicator, check: Callable[[], Checked]) -> Call:
        """The opening exchange: what is wrong on a rank, and what ranks differ in, is raised on all of them."""
        checked, told = together(comm, check, lambda checked: checked.said)
        require_alike([each["alike"] for each in told])
        lengths = {name: [each["lengths"][name] for each in told] for name in "qk"}
        for name, held in lengths.items():
            require_parts(name, held, checked.asked.layout)
        return cls(comm, checked, checked.asked.plan(sum(lengths["q"]), sum(lengths["k"]), comm.size))

    @property
    def arrays(self) -> Mapping[str, Any]:
        return self.checked.arrays

    def device(self) -> AbstractContextManager[object]:
        return device_of(self.checked.gpu, **self.checked.arrays)

    def forward(self) -> Ring:
        def prepare() -> Ring:
            ring = self._ring()
            ring.ready(ring.calls.prepare_forward, self.arrays["q"])
            return ring

        return together(self.comm, prepare, lambda _: {})[0]

    def backward(self) -> Ring:
        def prepare() -> Ring:
            ring = self._ring()
            ring.ready(ring.calls.prepare_backward, self.rows())
            return ring

        return together(self.comm, prepare, lambda _: {})[0]

    def rows(self) -> dict[str, Any]:
        """What the gradients take of this rank's rows."""
        found = {name: self.arrays[name] for name in ("q", "dout", "out", "lse")}
        if not last_axis_contiguous(found["dout"]):
            found["dout"] = contiguous(self.xp, found["dout"])
        return found

    @property
    def xp(self) -> Any:
        return sys.modules["cupy"] if self.checked.gpu else np

    def _ring(self) -> Ring:
        """ValueError for what only shows with the whole sequence's lengths."""
        asked, p = self.checked.asked, self.checked.problem
        whole_lengths(asked, sizes_of(p) | {"row": self.plan.n_q, "k": self.plan.n_k})
        k, v = (contiguous(self.xp, self.arrays[name]) for name in "kv")
        return Ring(self.comm, self.plan, PieceCalls(asked, self.plan, self.checked.gpu), k, v)


def require_parts(name: str, lengths: list[int], layout: str) -> None:
    """ValueError unless ranks hold what a layout gives them."""
    wanted = [part_length(part) for part in parts(sum(lengths), len(lengths), layout)]
    for rank, (length, want) in enumerate(zip(lengths, wanted, strict=True)):
        if length != want:
            raise ValueError(
                f"{name} must be cut as layout {layout!r} does, which gives rank {rank} {want:,} of {sum(lengths):,} positions "
                f"over {len(lengths)} ranks, got {length:,} there: cupyflash.distributed.shard cuts"
            )
