"""The work of `cupyflash learn`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cupyflash.sim import files
from cupyflash.sim.learn import page
from cupyflash.sim.learn.starts import numbers


def learn(html: Path | None, language: str | None, as_json: bool) -> None:
    """Write the page to `html`, print its first numbers, or both. UsageError if neither is asked for."""
    if html is None and not as_json:
        raise click.UsageError("learn writes a page to --html FILE, or its numbers as --json")
    if html is not None:
        files.write(html, page(language))
        click.echo(f"wrote {html}", err=True)
    if as_json:
        click.echo(json.dumps(numbers()))
