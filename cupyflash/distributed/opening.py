"""The beginning of a call over ranks: each checks its own, all compare, and what is wrong anywhere is raised everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cupyflash.arrays import last_axis_contiguous
from cupyflash.basics import Report, Values
from cupyflash.distributed.agreement import require_alike, shown, together
from cupyflash.distributed.asked import PieceCalls, RingOptions
from cupyflash.distributed.communicator import Communicator, taking_part
from cupyflash.distributed.layout import LAYOUTS, part_length, parts
from cupyflash.distributed.ring import ForwardPass, RingSide
from cupyflash.distributed.ring_backward import BackwardPass
from cupyflash.distributed.streams import array_module
from cupyflash.launch.cold import readable
from cupyflash.launch.dispatch import as_arrays, device_of, on_gpu
from cupyflash.launch.launcher import capturing
from cupyflash.request.dropout import Dropout
from cupyflash.request.keywords import Keywords
from cupyflash.request.named_scores import one_score
from cupyflash.request.options import VECTORS, Options, require_choice, require_flag
from cupyflash.request.problem import Problem, check_rows
from cupyflash.request.score import Mask, captured_values, sizes_of
from cupyflash.version import __version__

# The arrays of a call
ARRAYS = ("dout", "q", "k", "v", "out", "lse", *VECTORS)


def options_asked(given: Values) -> RingOptions:
    """TypeError or ValueError for options that are none, whatever the arrays."""
    layout, mask, deterministic = given["layout"], given["mask"], given.get("deterministic", False)
    require_choice("layout", layout, LAYOUTS)
    for name in ("gather_kv", "return_lse", "deterministic"):
        require_flag(name, given.get(name, False))
    if not isinstance(mask, Mask | None):
        raise TypeError(f"mask must be a cupyflash.Mask or None over ranks, got {type(mask).__name__}")
    function = one_score(given)
    captured_values(function, mask)
    dropped = Dropout.asked(given)
    options = Options(causal=given["causal"], window=given["window"], scale=given["scale"])
    of_positions = options.causal, options.window, options.scale
    return RingOptions(*of_positions, layout, bool(given["gather_kv"]), function, mask, dropped, bool(deterministic))


@dataclass(frozen=True)
class Checked:
    """A call that is right as far as one rank can see."""

    asked: RingOptions
    name: str
    arrays: Values
    gpu: bool
    problem: Problem

    @classmethod
    def of(cls, call: Keywords, given: Values) -> Checked:
        """TypeError or ValueError for options that are none, and for arrays that do not go together."""
        asked = options_asked(call.complete(given))
        arrays = as_arrays({name: given[name] for name in ARRAYS if name in given}, call.required)
        captured = as_arrays(captured_values(asked.score, asked.mask)[0])
        gpu = on_gpu(**arrays, **captured)
        with device_of(gpu, **arrays, **captured):
            if gpu and capturing():
                raise ValueError("a CUDA graph cannot hold attention over ranks, which wait for each other on the host")
        options = Options(asked.causal, asked.window, asked.scale, dropout=asked.dropout is not None)
        own = {name: array for name, array in arrays.items() if name in ("q", "k", "v", *VECTORS)}
        problem = Problem.from_arrays(**own, options=options)
        if "dout" in arrays:
            check_rows(readable(arrays), arrays["q"].shape[:-1])
        return cls(asked, call.call, arrays, gpu, problem)

    @property
    def xp(self) -> Any:
        return array_module(self.gpu)

    def returned(self, array: Any) -> Any:
        """An array in the caller's order of axes."""
        return array

    def plan(self, n_q: int, n_k: int, ranks: int) -> Any:
        """The plan of the ranks' calls. ValueError for what only the whole's lengths show."""
        return self.asked.plan(n_q, n_k, ranks)

    def calls(self, plan: Any) -> PieceCalls:
        return PieceCalls(self.asked, plan, self.gpu)

    def whole_sizes(self, plan: Any) -> dict[str, int]:
        """The lengths that captured arrays must have: those of the whole sequence, on each rank."""
        return sizes_of(self.problem) | {"row": plan.n_q, "k": plan.n_k}

    @property
    def said(self) -> Report:
        """The message to other ranks: the values that must be alike, and the lengths, which need not be."""
        texts = {"cupyflash": __version__, "the call": self.name, "arrays": "CuPy's" if self.gpu else "NumPy's"}
        for name, array in self.arrays.items():
            texts[name] = shown(array, None if name in VECTORS else -1 if name == "lse" else -2)
        return {"alike": texts | self.asked.text, "lengths": {"q": self.problem.seqlen_q, "k": self.problem.seqlen_k}}


@dataclass(frozen=True)
class RingCall:
    """A call on which all ranks agree."""

    comm: Communicator
    checked: Checked
    plan: Any

    @classmethod
    def opened(cls, comm: Communicator, check: Callable[[], Checked]) -> RingCall:
        """The opening exchange: what is wrong on a rank, and what ranks differ in, is raised on all of them."""
        with taking_part(comm):
            checked, told = together(comm, check, lambda checked: checked.said)
        require_alike([each["alike"] for each in told])
        lengths = {name: [each["lengths"][name] for each in told] for name in "qk"}
        for name, held in lengths.items():
            require_parts(name, held, checked.asked.layout)
        return cls(comm, checked, checked.plan(sum(lengths["q"]), sum(lengths["k"]), comm.size))

    @contextmanager
    def device(self) -> Iterator[None]:
        """The context of the rest of the call."""
        with taking_part(self.comm), device_of(self.checked.gpu, **self.checked.arrays):
            yield

    def begin(self, kind: type[ForwardPass] | type[BackwardPass]) -> ForwardPass | BackwardPass:
        """A pass that is ready for the ring to begin: an error on one rank is raised on all."""
        return together(self.comm, lambda: kind(self._ring(), self.rows()), lambda _: {})[0]

    def rows(self) -> Report:
        """The given arrays of this rank's rows."""
        found = {name: array for name, array in self.checked.arrays.items() if name in ("q", "dout", "out", "lse")}
        if "dout" in found and not last_axis_contiguous(found["dout"]):
            found["dout"] = self.checked.xp.ascontiguousarray(found["dout"])
        return found

    def _ring(self) -> RingSide:
        """ValueError for captured arrays that are not the whole's."""
        for each in self.checked.asked.functions:
            shapes = {name: array.shape for name, array in each.arrays.items()}
            each.form.check(shapes, self.checked.whole_sizes(self.plan))
        k, v = (self.checked.xp.ascontiguousarray(self.checked.arrays[name]) for name in "kv")
        return RingSide(self.comm, self.plan, self.checked.calls(self.plan), k, v)


def require_parts(name: str, lengths: list[int], layout: str) -> None:
    """ValueError unless ranks hold the parts of the layout."""
    wanted = [part_length(part) for part in parts(sum(lengths), len(lengths), layout)]
    for rank, (length, want) in enumerate(zip(lengths, wanted, strict=True)):
        if length != want:
            raise ValueError(
                f"{name} must be cut as layout {layout!r} does, which gives rank {rank} {want:,} of {sum(lengths):,} positions "
                f"over {len(lengths)} ranks, got {length:,} there: cupyflash.distributed.shard cuts"
            )
