"""What commands share: the options that pose a problem on a device, and what they stand for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from cupyflash.device import Device
from cupyflash.problem import ITEMSIZE, MAX_ALIGNMENT, Problem, Window
from cupyflash.schedules import ALGORITHMS, TileSchedule, plan, plan_backward
from cupyflash.sim.cli.show import NAMES, describe
from cupyflash.simulated import DEFAULT_DEVICE
from cupyflash.tiling import TilingChoice

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
DEVICE = click.option(
    "--device", "device_name", default=DEFAULT_DEVICE, show_default=True, metavar="NAME", help="A catalogue name or a .toml."
)
SRAM = click.option("--sram", metavar="SIZE", help="SRAM of one block instead of the device's, 100KB say.")
BACKWARD = (
    click.option("--backward", is_flag=True, help="The backward pass: dQ, dK and dV from dO, O and L."),
    click.option("--deterministic", is_flag=True, help="A backward with the same bits each time."),
)


@dataclass(frozen=True)
class Request:
    """A problem on a device, with an algorithm and a tiling to plan it by: what the shared options say.

    `lse` is for a forward pass, `deterministic` for a `backward`.
    """

    problem: Problem
    device: Device
    algorithm: str
    tiling: TilingChoice
    lse: bool
    backward: bool = False
    deterministic: bool = False

    def schedule(self) -> TileSchedule:
        if self.backward:
            return plan_backward(self.problem, self.device, self.algorithm, self.tiling, deterministic=self.deterministic)
        return plan(self.problem, self.device, self.algorithm, self.tiling, lse=self.lse)

    @property
    def title(self) -> str:
        """Algorithm and problem in one line."""
        how = ", backward" * self.backward + ", deterministic" * self.deterministic
        return f"{NAMES[self.algorithm]}{how}: {describe(self.problem)}"

    @property
    def report(self) -> dict[str, Any]:
        """What was asked for, for JSON: the head of a command's report."""
        report: dict[str, Any] = {"problem": asdict(self.problem), "algorithm": self.algorithm}
        return report | ({"backward": True, "deterministic": self.deterministic} if self.backward else {})


def problem_options(
    *,
    seqlen: int | None = None,
    head_dim: int | None = None,
    tiling: str = "fitted",
    only: str | None = None,
    backward: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that pose a problem; the command gets them as one `Request`, its own options beside it.

    `seqlen` and `head_dim` are required where they have no default. `only`: the one algorithm that the command is about, which
    then takes no --algorithm. `backward`: whether it knows the backward pass.
    """

    def default(value: int | None) -> dict[str, Any]:
        return {"required": True} if value is None else {"default": value, "show_default": True}

    shared = (
        click.option(
            "--seqlen",
            type=click.IntRange(0),
            help="N: queries a head, and keys unless --seqlen-k.",
            **default(seqlen),
        ),
        click.option("--seqlen-k", type=click.IntRange(0), help="Keys a head."),
        click.option("--head-dim", type=int, help="d", **default(head_dim)),
        click.option("--head-dim-v", type=int, help="d of V and O, when another."),
        click.option("--heads", default=1, show_default=True, type=click.IntRange(1)),
        click.option("--kv-heads", type=click.IntRange(1), help="Heads of K and V, when fewer."),
        click.option("--batch", default=1, show_default=True, type=click.IntRange(1)),
        click.option("--dtype", default="float16", show_default=True, type=click.Choice(list(ITEMSIZE))),
        DEVICE,
        SRAM,
        click.option("--causal", is_flag=True),
        click.option("--window", metavar="LEFT,RIGHT", help="How far from its own key a row sees: 128,0 say; '-' for no limit."),
        click.option("--mask", is_flag=True, help="With a boolean mask, one entry a score."),
        click.option("--bias", is_flag=True, help="With a number added to each score."),
        click.option("--key-lengths", metavar="N,N,...", help="Keys of each of the batch, when fewer than all."),
        *([] if only else [click.option("--algorithm", default="fa1", show_default=True, type=click.Choice(ALGORITHMS))]),
        *(BACKWARD if backward else ()),
        click.option(
            "--tiling",
            "tiling_text",
            default=tiling,
            show_default=True,
            metavar="fitted|paper|BRxBC",
            help="Block sizes: fitted to the kernel's layout, the paper's formula to the letter, or your own.",
        ),
        click.option("--lse", is_flag=True, help="With L, the log-sum-exp of each row."),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(
            *,
            seqlen: int,
            seqlen_k: int | None,
            head_dim: int,
            head_dim_v: int | None,
            heads: int,
            kv_heads: int | None,
            batch: int,
            dtype: str,
            device_name: str,
            sram: str | None,
            causal: bool,
            window: str | None,
            mask: bool,
            bias: bool,
            key_lengths: str | None,
            tiling_text: str,
            lse: bool,
            algorithm: str | None = only,
            backward: bool = False,
            deterministic: bool = False,
            **own: Any,
        ) -> None:
            problem = Problem(
                batch,
                heads,
                kv_heads or heads,
                seqlen,
                seqlen if seqlen_k is None else seqlen_k,
                head_dim,
                dtype,
                causal,
                head_dim_v=head_dim_v,
                mask=mask,
                bias=bias,
                padded=key_lengths is not None,
                key_lengths=None if key_lengths is None else parse_lengths(key_lengths),
                window=None if window is None else parse_window(window),
            )
            device = Device.named(device_name, sram=sram)
            if backward and lse:
                raise click.UsageError("--lse is for the forward pass: a backward reads L")
            if deterministic and not backward:
                raise click.UsageError("--deterministic is for --backward: the forward pass has one order")
            assert algorithm is not None
            asked = Request(contiguous(problem), device, algorithm, parse_tiling(tiling_text), lse, backward, deterministic)
            command(asked, **own)

        for option in reversed(shared):
            run = option(run)
        return run

    return decorate


def contiguous(problem: Problem) -> Problem:
    """The problem as contiguous arrays pose it: the bytes of a row bound how wide a copy can be."""
    rows = (dim * problem.itemsize for dim in (problem.head_dim, problem.value_dim))
    return replace(problem, alignment=math.gcd(*rows, MAX_ALIGNMENT))


def parse_lengths(text: str) -> tuple[int, ...]:
    """--key-lengths' value: whole numbers with commas between."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"lengths such as 100,80, got {text!r}", param_hint="--key-lengths")
    return tuple(int(part) for part in parts)


def parse_window(text: str) -> Window:
    """--window's value as `Problem` takes it."""
    sides = [part.strip() for part in text.split(",")]
    if len(sides) != 2 or not all(side == "-" or side.isdecimal() for side in sides):
        raise click.BadParameter(f"two numbers such as 128,0, or - for no limit on a side, got {text!r}", param_hint="--window")
    left, right = (None if side == "-" else int(side) for side in sides)
    return left, right


def parse_tiling(text: str) -> TilingChoice:
    """--tiling's value as `plan` takes it."""
    if text in ("fitted", "paper"):
        return "paper" if text == "paper" else None
    rows, _, cols = text.partition("x")
    if not (rows.isdecimal() and cols.isdecimal()):
        raise click.BadParameter(f"'fitted', 'paper' or BRxBC such as 64x128, got {text!r}", param_hint="--tiling")
    return int(rows), int(cols)
