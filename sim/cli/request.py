"""The request that the shared options make: a problem on a device, with the plan that was asked for, and the score and mask
functions of --softcap, --alibi, --score and --mask-function with their captured values."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
import numpy as np

from cupyflash.arrays import MAX_ALIGNMENT
from cupyflash.basics import Array, Report, Values
from cupyflash.device import Device
from cupyflash.expressions.c import ELEMENTS
from cupyflash.expressions.tree import depends_on
from cupyflash.request.dropout import checked_probability
from cupyflash.request.keywords import SCORE_NUMBERS
from cupyflash.request.named_scores import one_score
from cupyflash.request.options import OPTIONS, Pattern, Window, not_taken
from cupyflash.request.problem import Problem
from cupyflash.request.score import MAX_AXES, Mask, Score, seen_by, sizes_of
from cupyflash.request.score import field as field_of
from cupyflash.schedules import (
    Cache,
    Choice,
    DecodeSchedule,
    TileSchedule,
    choose,
    choose_backward,
    plan,
    plan_backward,
    plan_decode,
)
from cupyflash.sim.cli.options import Command, first_given, whole_number
from cupyflash.sim.cli.show import describe, describe_cache, flat
from cupyflash.sim.names import NAMES
from cupyflash.sim.numbers.yardstick import DTYPES
from cupyflash.tiling import TilingChoice
from cupyflash.words import plural

# -- score and mask functions ------------------------------------------------------------------------------------------------

# Of a mask that is looked through for its tiles
MOST_SCORES = 1 << 28


@dataclass(frozen=True)
class ScoreFunctions:
    """A command's functions; `given` are the captured values that were said, by name: the other arrays have one element."""

    score: Score | None = None
    mask: Mask | None = None
    given: Values = field(default_factory=dict)

    @classmethod
    def of(cls, options: Values) -> ScoreFunctions:
        """The functions of the options' values, by name. Raises as `Score`, `Mask` and `one_score` do, or click.UsageError."""
        texts = {name: options[name] for name in ("score", "mask_function") if options[name] is not None}
        if options["capture"] and not texts:
            raise click.UsageError("--capture is for --score and --mask-function")
        if options.get("mask") and "mask_function" in texts:
            raise click.UsageError("--mask cannot go with --mask-function, which is the mask")
        values = _captured([*texts.values()], options["capture"])
        used = {name: _words(text) for name, text in texts.items()}
        made: Report = {}
        for name, text in texts.items():
            others = set().union(*(words for other, words in used.items() if other != name)) - used[name]
            made[name] = (Score if name == "score" else Mask)(text, **{one: values[one] for one in values.keys() - others})
        score = made.get("score")
        if score is not None and options["alibi"]:
            raise click.UsageError("--alibi cannot go with --score, which is the whole function of a score")
        slopes = np.ones(1, np.float32) if options["alibi"] else None
        score = one_score({"score": score, "alibi_slopes": slopes} | {name: options[name] for name in SCORE_NUMBERS})
        numbers = {} if score is None else score.numbers
        return cls(score, made.get("mask_function"), {**numbers, **{one: it for one, it in values.items() if not _is_drawn(it)}})

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers among the given values."""
        return {name: value for name, value in self.given.items() if not isinstance(value, np.ndarray)}

    @property
    def forms(self) -> Report:
        """The functions' forms, or None, by the names of `Options`."""
        return {
            "score": None if self.score is None else self.score.form,
            "mask_function": None if self.mask is None else self.mask.form,
        }

    @property
    def fields(self) -> Report:
        """The given values, by the names of the kernels' struct."""
        forms = [form for form in self.forms.values() if form is not None]
        return {
            field_of(one.name, form.kind): self.given[one.name] for form in forms for one in form.captured if one.name in self.given
        }

    def check(self, problem: Problem) -> None:
        """ValueError unless the given arrays fit a problem."""
        shapes = {name: value.shape for name, value in self.given.items() if isinstance(value, np.ndarray)}
        for form in filter(None, self.forms.values()):
            form.check(shapes, sizes_of(problem))

    def pattern(self, problem: Problem) -> Pattern | None:
        """The mask's value for each score; None if its arrays are not given, or if there are too many scores."""
        form = problem.options.mask_function
        if form is None or not all(one.name in self.given for one in form.captured):
            return None
        along = depends_on(form.tree)
        sizes = {"batch": problem.batch, "head": problem.heads, "row": problem.seqlen_q, "column": problem.seqlen_k}
        if math.prod(size for axis, size in sizes.items() if axis in along) > MOST_SCORES:
            return None
        return Pattern.of(seen_by(form, problem, {one.name: self.given[one.name] for one in form.captured}))


class _Drawn(np.ndarray):
    """The placeholder for an array that will be drawn."""


def _is_drawn(value: Any) -> bool:
    return isinstance(value, _Drawn)


def _captured(texts: Sequence[str], captures: Sequence[str]) -> Report:
    """Values by name."""
    found: Report = {}
    for capture in captures:
        name, equals, what = (part.strip() for part in capture.partition("="))
        if not (name.isidentifier() and equals) or name in found:
            raise click.BadParameter(f"NAME=WHAT, each name once, such as slope=float32; got {capture!r}", param_hint="--capture")
        if what in ELEMENTS:
            axes = max((_axes(each, name) for each in texts), default=0)
            found[name] = np.ones((1,) * axes, DTYPES[what] if what == "bfloat16" else what).view(_Drawn)
        elif what.endswith(".npy"):
            found[name] = _loaded(name, what)
        elif re.fullmatch(r"[-+]?\d+", what):
            found[name] = int(what)
        else:
            try:
                found[name] = float(what)
            except ValueError:
                allowed = f"a number, a .npy file, or one of {', '.join(ELEMENTS)}"
                raise click.BadParameter(f"{name} must be {allowed}, got {what!r}", param_hint="--capture") from None
    return found


def _loaded(name: str, path: str) -> Array:
    """A file's array."""
    try:
        loaded: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it holds no array that NumPy loads"
        raise click.BadParameter(f"{name}: {path}: {reason}", param_hint="--capture") from error
    return loaded


def _tree(text: str) -> list[ast.AST]:
    """All nodes of a text; none for a wrong one, which `Score` and `Mask` refuse with a better message."""
    try:
        return [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return []


def _words(text: str) -> set[str]:
    """The names in a text."""
    return {node.id for node in _tree(text) if isinstance(node, ast.Name)}


def _axes(text: str, name: str) -> int:
    """The number of axes of an array that a text indexes."""
    indices = (node.slice for node in _tree(text) if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) == name)
    counts = [len(index.elts) if isinstance(index, ast.Tuple) else 1 for index in indices]
    return min(max(counts, default=0), MAX_AXES)


# -- problems ----------------------------------------------------------------------------------------------------------------

# The options that decoding has not, and those for it alone.
NOT_DECODING = ("backward", "deterministic", "key_lengths", "algorithm", "tiling", *not_taken("attention_decode"))
DECODE_ONLY = ("cache_seqlens", "page_size", "append", "tree", "num_splits")


@dataclass(frozen=True)
class ProblemRequest:
    """A problem on a device, with an algorithm and a tiling to plan it by: what the shared options say.

    `lse` is for a forward pass, `deterministic` for a `backward`; a `cache` and perhaps `num_splits` for decoding. `functions` are
    the problem's, with the known captured values; `dropout` is the probability.
    """

    problem: Problem
    device: Device
    algorithm: str
    tiling: TilingChoice
    lse: bool
    backward: bool = False
    deterministic: bool = False
    cache: Cache | None = None
    num_splits: int | None = None
    functions: ScoreFunctions = field(default_factory=ScoreFunctions)
    dropout: float = 0.0

    @classmethod
    def of(cls, given: Report) -> ProblemRequest:
        """The request of `problem_options`' values, by name. ValueError or click.UsageError for what does not go together."""
        if given.get("decode"):
            return cls.decoding(given)
        if alone := first_given(DECODE_ONLY):
            raise click.UsageError(f"{alone} is for --decode")
        key_lengths, functions, dropout = given["key_lengths"], ScoreFunctions.of(given), checked_probability(given["dropout"])
        problem = posed(
            given,
            given["kv_heads"] or given["heads"],
            given["seqlen"] if given["seqlen_k"] is None else given["seqlen_k"],
            functions,
            padded=key_lengths is not None,
            key_lengths=None if key_lengths is None else parse_lengths(key_lengths),
            dropout=dropout > 0,
            bias_dtype=given.get("bias_dtype"),
            score_dtype=given.get("score_dtype"),
        )
        backward, deterministic, lse = given.get("backward", False), given.get("deterministic", False), given["lse"]
        if backward and lse:
            raise click.UsageError("--lse is for the forward pass: a backward reads L")
        if deterministic and not backward:
            raise click.UsageError("--deterministic is for --backward: the forward pass has one order")
        device = on(given["device"], given["sram"])
        algorithm, tiling = given["algorithm"], parse_tiling(given["tiling"])
        if algorithm == "auto":
            algorithm = (choose_backward if backward else choose)(problem, device, tiling).algorithm
        return cls(problem, device, algorithm, tiling, lse, backward, deterministic, functions=functions, dropout=dropout)

    @classmethod
    def decoding(cls, given: Report) -> ProblemRequest:
        """The request of the same values, for --decode."""
        if other := first_given(NOT_DECODING):
            instead = ": --cache-seqlens has the keys of each sequence" if other == "--key-lengths" else ""
            raise click.UsageError(f"{other} cannot go with --decode{instead}")
        own_heads = first_given(("heads",)) and not first_given(("kv_heads",))
        room, page, appended = given["seqlen_k"], given["page_size"], given["append"]
        if page and not first_given(("seqlen_k",)):  # a default is made whole pages
            room = -(-room // page) * page
        if not given["seqlen"]:
            raise click.BadParameter("at least one query, got 0", param_hint="--seqlen")
        if appended > room:
            raise click.BadParameter(
                f"at most the {room:,} keys that the cache has room for, got {appended:,}", param_hint="--append"
            )
        if page and room % page:
            raise click.BadParameter(f"must divide --seqlen-k, {room:,} keys, got {page:,}", param_hint="--page-size")
        batch, functions = given["batch"], ScoreFunctions.of(given)
        pages = batch * room // page if page else 0
        problem = posed(
            given,
            given["heads"] if own_heads else given["kv_heads"],
            room,
            functions,
            padded=True,
            key_lengths=cached_lengths(given["cache_seqlens"], batch, room - appended, appended),
        )
        cache, device = Cache(appended, page, pages, given["tree"]), on(given["device"], given["sram"])
        own: Any = {"cache": cache, "num_splits": given["num_splits"], "functions": functions}
        return cls(problem, device, "decode", None, given["lse"], **own)

    @property
    def choice(self) -> Choice:
        """The choice of "auto", with the reason, whatever was asked for."""
        return (choose_backward if self.backward else choose)(self.problem, self.device, self.tiling)

    def schedule(self) -> TileSchedule:
        if self.cache is not None:
            return self.decode_schedule()
        problem = self.problem
        if problem.options.mask_function is not None:
            problem = problem.asking(pattern=self.functions.pattern(problem))
        if self.backward:
            return plan_backward(problem, self.device, self.algorithm, self.tiling, deterministic=self.deterministic)
        return plan(problem, self.device, self.algorithm, self.tiling, lse=self.lse)

    def decode_schedule(self) -> DecodeSchedule:
        """The schedule of decoding."""
        return plan_decode(self.problem, self.device, self.cache, num_splits=self.num_splits, lse=self.lse)

    @property
    def title(self) -> str:
        """Algorithm and problem in one line."""
        if self.cache is not None:
            return f"{NAMES[self.algorithm]}: {describe_cache(self.problem, self.cache)}"
        how = ", backward" * self.backward + ", deterministic" * self.deterministic
        return f"{NAMES[self.algorithm]}{how}: {describe(self.problem)}"

    @property
    def report(self) -> Report:
        """The request for JSON: the head of a command's report."""
        report: Report = {"problem": flat(self.problem), "algorithm": self.algorithm}
        report |= {"numbers": self.functions.numbers} if self.functions.numbers else {}
        report |= {"dropout": self.dropout} if self.dropout else {}
        if self.cache is not None:
            return report | {"cache": asdict(self.cache), "num_splits": self.num_splits}
        return report | ({"backward": True, "deterministic": self.deterministic} if self.backward else {})


def on(device: Device, sram: str | None) -> Device:
    """The device with --sram's SRAM."""
    return device if sram is None else device.with_sram(sram)


def refuse_longer(estimate: float, max_seconds: float) -> None:
    """UsageError if the estimated time is longer than --max-seconds."""
    if estimate > max_seconds:
        raise click.UsageError(
            f"this is estimated to take {estimate:,.0f} s, over --max-seconds {max_seconds:g}: make it smaller, or raise the limit"
        )


def posed(given: Values, kv_heads: int, keys: int, functions: ScoreFunctions, **options: Any) -> Problem:
    """The problem of contiguous arrays, by the options of sizes, flags, --window and functions, and further `options` of
    `Problem`."""
    names = ("batch", "heads", "seqlen", "head_dim", "dtype", "head_dim_v", "window")
    batch, heads, queries, d, dtype, d_v, window = (given[name] for name in names)
    window = None if window is None else parse_window(window)
    options |= {name: given[name] for name, each in OPTIONS.items() if name == "causal" or each.flag}
    problem = Problem(batch, heads, kv_heads, queries, keys, d, dtype, head_dim_v=d_v, window=window, **functions.forms, **options)
    functions.check(problem)
    rows = (dim * problem.itemsize for dim in (problem.head_dim, problem.head_dim_v))
    return replace(problem, alignment=math.gcd(*rows, MAX_ALIGNMENT))  # the bytes of a row bound how wide a copy can be


def parse_lengths(text: str, option: str = "--key-lengths") -> tuple[int, ...]:
    """The value of --key-lengths, or of another option: whole numbers with commas between."""
    found = [whole_number(part) for part in text.split(",")]
    lengths = tuple(each for each in found if each is not None)
    if len(lengths) != len(found):
        raise click.BadParameter(f"lengths such as 100,80, got {text!r}", param_hint=option)
    return lengths


def cached_lengths(text: str | None, batch: int, most: int, appended: int) -> tuple[int, ...] | None:
    """The lengths of --cache-seqlens: one for each sequence of the batch; None, for a full cache, if the option is not given."""
    if text is None:
        return None
    option = "--cache-seqlens"
    lengths = parse_lengths(text, option)
    if len(lengths) not in (1, batch):
        raise click.BadParameter(
            f"one length, or one for each of {plural(batch, 'sequence')}, got {len(lengths)}", param_hint=option
        )
    if max(lengths) > most:
        new = f" less {plural(appended, 'new one')}" if appended else ""
        raise click.BadParameter(
            f"at most {most:,}, the keys that the cache has room for{new}, got {max(lengths):,}", param_hint=option
        )
    return lengths * batch if len(lengths) == 1 else lengths


def parse_window(text: str) -> Window:
    """--window's value as `Problem` takes it."""
    sides = [part.strip() for part in text.split(",")]
    numbers = [whole_number(side) for side in sides]
    if len(sides) != 2 or any(side != "-" and number is None for side, number in zip(sides, numbers, strict=True)):
        raise click.BadParameter(f"two numbers such as 128,0, or - for no limit on a side, got {text!r}", param_hint="--window")
    left, right = numbers
    return left, right


def parse_tiling(text: str) -> TilingChoice:
    """--tiling's value as `plan` takes it."""
    if text in ("fitted", "paper"):
        return "paper" if text == "paper" else None
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal()):
        raise click.BadParameter(f"'fitted', 'paper' or BRxBC such as 64x128, got {text!r}", param_hint="--tiling")
    return int(rows), int(cols)


def requested(work: Command) -> Command:
    """Decorate a command's work so that the shared options reach it as one `ProblemRequest`, beside those that it names itself."""
    names = inspect.signature(work).parameters

    @functools.wraps(work)
    def run(**given: Any) -> None:
        own = {name: given.pop(name) for name in names if name in given}
        work(ProblemRequest.of(given), **own)

    return run
