"""The options that commands share, which pose a problem on a device, and the request that they make."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cupyflash.arrays import ITEMSIZE, MAX_ALIGNMENT
from cupyflash.device import Device
from cupyflash.launch.simulated import DEFAULT_DEVICE, DEFAULT_SECONDS
from cupyflash.request.dropout import checked_probability
from cupyflash.request.options import OPTIONS, Window, not_taken
from cupyflash.request.problem import Problem
from cupyflash.schedules import ALGORITHMS, Cache, Choice, DecodeSchedule, TileSchedule, choose, plan, plan_backward, plan_decode
from cupyflash.sim.cli.functions import FUNCTIONS, ScoreFunctions
from cupyflash.sim.cli.show import NAMES, describe, describe_cache, flat
from cupyflash.tiling import TilingChoice
from cupyflash.words import plural

Command = Callable[..., None]


def examples(*lines: str) -> str:
    """A command's examples, for the end of its help."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def find_device(context: click.Context, param: click.Parameter, value: str) -> Device:
    """--device: a name of the catalogue, or the path of a .toml."""
    try:
        return Device.named(value)
    except OSError as error:
        raise click.BadParameter(f"{value}: {error.strerror}", context, param) from error
    except ValueError as error:
        raise click.BadParameter(str(error), context, param) from error


def a_number(context: click.Context, param: click.Parameter, value: float) -> float:
    """Refuse nan, which would be no limit."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number of seconds; write inf for no limit", context, param)
    return value


class NewFile(click.Path):
    """A file to be written: it has a name, its folder is there. With `suffixes`, one of them ends it, the first if none does."""

    def __init__(self, suffixes: Sequence[str] = ()):
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        if path.name in ("", "..") or str(value).endswith("/"):
            self.fail(f"{str(value)!r} names no file", param, ctx)
        if self.suffixes and not path.suffix:
            path = path.with_name(path.name.rstrip(".") + self.suffixes[0])
        if self.suffixes and path.suffix.lower() not in self.suffixes:
            self.fail(f"{str(path)!r} must end in {' or '.join(self.suffixes)}", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"{str(path)!r}: there is no folder {path.parent}", param, ctx)
        return super().convert(path, param, ctx)


def gathered(**kinds: type[Any]) -> Callable[[Command], Command]:
    """Decorate a command so that the options that are fields of a dataclass reach it as one: `gathered(span=Span)` passes
    `span`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> None:
            made = {name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in kinds.items()}
            command(*args, **given, **made)

        names: list[str] = []
        for name in inspect.signature(command).parameters:
            names += [each.name for each in fields(kinds[name])] if name in kinds else [name]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        return run

    return decorate


def whole_number(text: str) -> int | None:
    """'4096', '4k' or '1M' (k is 1,024, M 1,024 k); None for all else."""
    found = re.fullmatch(r"\s*([0-9]{1,19})([kKmM]?)\s*", text)
    return int(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()] if found else None


def from_0(flag: str, told: str) -> Callable[[Command], Command]:
    """An option whose value is a whole number, 0 if not said otherwise."""
    return click.option(flag, default=0, show_default=True, type=click.IntRange(0), help=told)


def timeline_block(launch: str = "") -> Callable[[Command], Command]:
    """--timeline-block, None if it is not given."""
    told = f"The thread block {launch}that has a timeline; only --html makes one without.  [default: 0 with --html]"
    return click.option("--timeline-block", type=click.IntRange(0), help=told)


def formats(*names: str) -> Callable[[Command], Command]:
    """--format, by default the first of these, and --json; `kind_of` says which it is."""
    form = click.option("--format", "form", type=click.Choice(names), help=f"What to print.  [default: {names[0]}]")
    as_json = click.option("--json", "as_json", is_flag=True, help="As --format json.")
    return lambda command: form(as_json(command))


def kind_of(form: str | None, as_json: bool) -> str | None:
    """The format that is asked for, None for the first one. UsageError for two at once."""
    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json is --format json: it cannot go with --format {form}")
    return "json" if as_json else form


class Count(click.IntRange):
    """A whole number, as `whole_number` reads it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = whole_number(value) if isinstance(value, str) else None
        return super().convert(value if found is None else found, param, ctx)


AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
OUTPUT = click.option("--output", metavar="FILE", type=NewFile(), help="Write there instead of to stdout.")
SEED = click.option("--seed", type=click.IntRange(0), help="Run warps apart from each other, in a random order drawn from this.")
DEVICE = click.option(
    "--device",
    callback=find_device,
    default=DEFAULT_DEVICE,
    envvar="CUPYFLASH_DEVICE",
    show_default=True,
    show_envvar=True,
    metavar="NAME",
    help="A name that `cupyflash devices` lists, or the path of a .toml.",
)
SRAM = click.option("--sram", metavar="SIZE", help="SRAM of one block instead of the device's, such as 100KB.")
MAX_SECONDS = click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    callback=a_number,
    default=DEFAULT_SECONDS,
    envvar="CUPYFLASH_MAX_SECONDS",
    show_default=True,
    show_envvar=True,
    metavar="SECONDS",
    help="Refuse work whose estimated time is longer; inf for no limit.",
)
BACKWARD = (
    click.option("--backward", is_flag=True, help="Run the backward pass: dQ, dK and dV from dO, O and L."),
    click.option("--deterministic", is_flag=True, help="Use a backward that gives the same bits each time."),
)


def count_option(flag: str, least: int, told: str, default: int | None = None) -> Any:
    """An option whose value is a whole number of at least `least`."""
    return click.option(flag, metavar="N", type=Count(least), default=default, show_default=default is not None, help=told)


def size_options(seqlen: int, head_dim: int) -> tuple[Any, ...]:
    """The shapes, with a command's own defaults."""
    about = "Queries of a head, and keys unless --seqlen-k; 4k is 4,096, here and in all sizes."
    return (
        count_option("--seqlen", 0, about, seqlen),
        count_option("--seqlen-k", 0, "Keys of a head, if not --seqlen."),
        click.option(
            "--head-dim",
            metavar="D",
            type=int,
            default=head_dim,
            show_default=True,
            help="d of Q and K, and of V unless --head-dim-v.",
        ),
        click.option("--head-dim-v", metavar="D", type=int, help="d of V and O, if not --head-dim."),
        count_option("--heads", 1, "Heads of Q.", 1),
        count_option("--kv-heads", 1, "Heads of K and V, if fewer."),
        count_option("--batch", 1, "Batch size.", 1),
        click.option(
            "--dtype", default="float16", show_default=True, type=click.Choice(list(ITEMSIZE)), help="Dtype of Q, K, V and O."
        ),
    )


MASKS = (
    click.option("--causal/--no-causal", help="A row sees the keys up to its own; the default with --decode."),
    click.option(
        "--window",
        metavar="LEFT,RIGHT",
        help="The numbers of keys that a row sees before and after its own, such as 128,0; '-' for no limit.",
    ),
    *(click.option(f"--{name}", is_flag=True, help=each.flag) for name, each in OPTIONS.items() if each.flag),
    click.option("--key-lengths", metavar="N,N,...", help="Keys of each sequence of the batch, if fewer than all."),
)


DROPOUT = click.option("--dropout", metavar="P", type=float, default=0.0, help="Drop weights with this probability, 0 to below 1.")
SCORE_DTYPE = click.option(
    "--score-dtype", type=click.Choice(["float32"]), help="The dtype of S in memory, for --algorithm standard.  [default: --dtype]"
)


# Of the options above, what decoding has not; and sizes of --decode where no others are given.
NOT_DECODING = ("backward", "deterministic", "key_lengths", "algorithm", "tiling", *not_taken("attention_decode"))
DECODING = {"seqlen": 1, "seqlen_k": 8192, "head_dim": 128, "heads": 32, "kv_heads": 8, "causal": True}


def options_of(given: Mapping[str, Any]) -> str:
    """Options by their names in Python, as they are written on the command line."""
    return ", ".join(f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in given.items())


def decode_options(sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """The options of decoding, of which `sizes` are a command's own beside `DECODING`."""

    def decoding(context: click.Context, param: click.Parameter, value: bool) -> bool:
        """Set the defaults of the other options for --decode, which is parsed before them."""
        if value:
            context.default_map = {**(context.default_map or {}), **DECODING, **sizes}
        return value

    own = options_of({name: size for name, size in {**DECODING, **sizes}.items() if name != "causal"})
    about = "Run `attention_decode`: --seqlen queries of each sequence against a cache with room for --seqlen-k keys."
    lengths = "Keys in the cache of each sequence, or one number for all.  [default: a full cache]"
    return (
        click.option("--decode", is_flag=True, is_eager=True, callback=decoding, help=f"{about}  [default then: {own}]"),
        click.option("--cache-seqlens", metavar="N,N,...", help=lengths),
        count_option("--page-size", 1, "Divide the cache into pages of N keys, a multiple of 16."),
        click.option("--append", metavar="N", type=Count(0), default=0, help="New keys to append to those of each sequence."),
        click.option("--tree", is_flag=True, help="Use a mask over the newest keys, for drafts that branch."),
        click.option(
            "--num-splits",
            metavar="N",
            type=int,
            help="Parts into which each sequence's keys are split.  [default: the model's choice]",
        ),
    )


DECODE_ONLY = ("cache_seqlens", "page_size", "append", "tree", "num_splits")


def problem_options(
    *,
    seqlen: int,
    head_dim: int,
    algorithm: str = "auto",
    algorithms: Sequence[str] = ("auto", *ALGORITHMS),
    tiling: str = "fitted",
    backward: bool = False,
    decode: Mapping[str, int] | None = None,
) -> Callable[[Command], Command]:
    """The options that pose a problem; the command gets them as one `ProblemRequest`, the options that it names itself beside it.

    `algorithm` is --algorithm's default, and `algorithms` are those that the command knows. `backward`: True if it knows the
    backward pass. `decode`: if it knows decoding, its own default sizes.
    """
    paper = "; fa1 is FlashAttention, the paper's" if "fa1" in algorithms else ""
    which = (
        "The algorithm; auto is the default of `attention`: fa3 (FlashAttention-3) on a Hopper if the model predicts it to be "
        f"faster, else fa2 (FlashAttention-2){paper}."
    )
    options = (
        *size_options(seqlen, head_dim),
        DEVICE,
        SRAM,
        *MASKS,
        *FUNCTIONS,
        DROPOUT,
        *((SCORE_DTYPE,) if "standard" in algorithms else ()),
        click.option("--algorithm", default=algorithm, show_default=True, type=click.Choice(algorithms), help=which),
        *(BACKWARD if backward else ()),
        click.option(
            "--tiling",
            default=tiling,
            show_default=True,
            metavar="fitted|paper|BRxBC",
            help="Block sizes: fitted to the kernel's layout, the paper's formula to the letter, or your own.",
        ),
        click.option("--lse", is_flag=True, help="Also compute L, the log-sum-exp of each row."),
        *(() if decode is None else decode_options(decode)),
    )

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            own = {name: given.pop(name) for name in inspect.signature(command).parameters if name in given}
            command(ProblemRequest.of(given), **own)

        for option in reversed(options):
            run = option(run)
        return run

    return decorate


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
    def of(cls, given: dict[str, Any]) -> ProblemRequest:
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
            algorithm = "fa2" if backward else choose(problem, device, tiling).algorithm
        return cls(problem, device, algorithm, tiling, lse, backward, deterministic, functions=functions, dropout=dropout)

    @classmethod
    def decoding(cls, given: dict[str, Any]) -> ProblemRequest:
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
        """The choice of "auto" for the forward, with the reason, whatever was asked for."""
        return choose(self.problem, self.device, self.tiling)

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
    def report(self) -> dict[str, Any]:
        """The request for JSON: the head of a command's report."""
        report: dict[str, Any] = {"problem": flat(self.problem), "algorithm": self.algorithm}
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


def posed(given: Mapping[str, Any], kv_heads: int, keys: int, functions: ScoreFunctions, **options: Any) -> Problem:
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


def first_given(names: Sequence[str]) -> str | None:
    """The first of some options, by their names in Python, that is on the command line, in its form there."""
    context = click.get_current_context()
    found = (name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    return next((f"--{name.replace('_', '-')}" for name in found), None)


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
