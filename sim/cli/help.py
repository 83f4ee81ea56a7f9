"""A command's help, with its options in groups, and what shells complete."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from cupyflash.basics import FLAGS
from cupyflash.sim.names import FORMATS, NAMES

GROUPS = {
    "Kernel": "kernel grid block cluster spec arch defines includes flags shared_bytes",
    "Axis": "over first last points log",
    "Sizes": "seqlen seqlen_k head_dim head_dim_v heads kv_heads batch dtype",
    "Masks and scores": f"causal window {' '.join(FLAGS)} bias_dtype key_lengths softcap alibi score mask_function capture dropout "
    "score_dtype",
    "Algorithm": "algorithm algorithms backward deterministic tiling lse",
    "Decoding": "decode cache_seqlens page_size append tree num_splits",
    "Several devices": "ranks link layout gather_kv",
    "Device": "device sram mhz cold",
    "Models": "with_l2 l2 with_time roofline results clock",
    "Execution": "seed data_seed max_seconds max_instructions stall_seconds watch",
    "Judging": "reference inputs strict only",
    "Findings": "suppressions fail_on",
    "Output": "form forms as_json output plot html language timeline_block top lines saves against everything",
}
"""The groups of options in a command's help, by their names in Python."""
OTHERS = "Output"
"""The group of an option that is in none, such as --help."""


def coloured(words: str, **style: Any) -> str:
    """Words in a style, which click leaves out of pipes and files; as they are if NO_COLOR is set (no-color.org)."""
    return words if os.environ.get("NO_COLOR") else click.style(words, **style)


class Formatter(click.HelpFormatter):
    """Help with headings that stand out on a terminal."""

    def write_heading(self, heading: str) -> None:
        super().write_heading(coloured(heading, bold=True, fg="cyan"))


class HelpContext(click.Context):
    """The context of a command, whose help `Formatter` writes."""

    formatter_class = Formatter


class GroupedCommand(click.Command):
    """A command whose help has its options in groups."""

    context_class = HelpContext

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {name: title for title, names in GROUPS.items() for name in names.split()}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                rows[group_of.get(param.name or "", OTHERS)].append(record)
        for title in filter(rows.get, rows):
            with formatter.section(title):
                formatter.write_dl(rows[title])


command = functools.partial(click.command, cls=GroupedCommand)
"""`click.command`, with options in groups."""

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completing(kind: str) -> Completion:
    """The completion of names of files ("file") or of folders ("dir"), which is the shell's own."""
    return lambda context, param, incomplete: [CompletionItem(incomplete, type=kind)]


def device_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names of devices that begin so, with dashes for spaces (`Device.named` takes both), else files."""
    from cupyflash.device import Device

    names = [device.name.replace(" ", "-") for device in Device.catalogue()]
    found = [CompletionItem(name) for name in names if name.casefold().startswith(incomplete.casefold())]
    return found or completing("file")(context, param, incomplete)


def algorithm_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names that may follow the last comma."""
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in NAMES if name.startswith(last)]


def format_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The formats of findings."""
    return [CompletionItem(name) for name in FORMATS if name.startswith(incomplete)]
