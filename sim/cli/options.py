"""The options that commands share, declared without NumPy: those that pose a problem on a device, of output, of limits."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cupyflash.basics import DEFAULT_DEVICE, DEFAULT_SECONDS, FLAGS, ITEMSIZE, Values
from cupyflash.sim.cli.help import device_names
from cupyflash.sim.names import NAMES

if TYPE_CHECKING:
    from cupyflash.device import Device

Command = Callable[..., None]


def examples(*lines: str) -> str:
    """A command's examples, for the end of its help."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def find_device(context: click.Context, param: click.Parameter, value: str) -> Device | None:
    """--device: a name of the catalogue, or the path of a .toml."""
    if context.resilient_parsing:  # a shell completes the line
        return None
    from cupyflash.device import Device

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
HTML = click.option("--html", metavar="FILE", type=NewFile((".html", ".htm")), help="Write the page there.")
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
    shell_complete=device_names,
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
    *(click.option(f"--{name}", is_flag=True, help=told) for name, told in FLAGS.items()),
    click.option("--bias-dtype", type=click.Choice(["float32"]), help="The dtype of a --bias.  [default: --dtype]"),
    click.option("--key-lengths", metavar="N,N,...", help="Keys of each sequence of the batch, if fewer than all."),
)


FUNCTIONS = (
    click.option("--softcap", metavar="X", type=float, help="Scores become X tanh(score / X)."),
    click.option("--alibi", is_flag=True, help="ALiBi: subtract a slope, one for each head, times the distance of row and key."),
    click.option("--score", metavar="TEXT", help="The transformed score, such as 's + slope[h] * (k - q)'."),
    click.option(
        "--mask-function", metavar="TEXT", help="The condition on which row q sees key k, such as 'k <= q and q - k < 100'."
    ),
    click.option(
        "--capture",
        metavar="NAME=WHAT",
        multiple=True,
        help="The value of a name in --score or --mask-function: a number, a .npy file with an array, or the dtype of an array "
        "of drawn elements; may be repeated.",
    ),
)
DROPOUT = click.option("--dropout", metavar="P", type=float, default=0.0, help="Drop weights with this probability, 0 to below 1.")
SCORE_DTYPE = click.option(
    "--score-dtype", type=click.Choice(["float32"]), help="The dtype of S in memory, for --algorithm standard.  [default: --dtype]"
)


# The sizes of --decode where no others are given.
DECODING = {"seqlen": 1, "seqlen_k": 8192, "head_dim": 128, "heads": 32, "kv_heads": 8, "causal": True}


def options_of(given: Values) -> str:
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


def problem_options(
    *,
    seqlen: int,
    head_dim: int,
    algorithm: str = "auto",
    algorithms: Sequence[str] = ("auto", *NAMES),
    tiling: str = "fitted",
    backward: bool = False,
    decode: Mapping[str, int] | None = None,
) -> Callable[[Command], Command]:
    """The options that pose a problem; `request.requested` makes one `ProblemRequest` of them.

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
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def first_given(names: Sequence[str]) -> str | None:
    """The first of some options, by their names in Python, that is on the command line, in its form there."""
    context = click.get_current_context()
    found = (name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE)
    return next((f"--{name.replace('_', '-')}" for name in found), None)
