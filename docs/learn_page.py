"""A hook of mkdocs: the site has learn.html, the page of `cupyflash learn`, which docs/learn.md links to."""

from __future__ import annotations

from typing import Any


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    from cupyflash.sim.learn import page

    files.append(File.generated(config, "learn.html", content=page()))
    return files
