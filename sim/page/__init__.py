"""Pages that need no network: one file, made of page/NAME.html, its style and scripts, those that all share, and its data."""

from __future__ import annotations

import json
from pathlib import Path

from cupyflash.basics import Report

PAGE = Path(__file__).parent
SHARED = ("common.css", "timeline.css"), ("common.js", "chart.js", "timeline.js")


def filled(name: str, told: Report, *more: str) -> str:
    """The page `name` of what is told; `more` scripts of its own come before its script."""
    style, script = ("".join(map(read, names)) for names in ((*SHARED[0], f"{name}.css"), (*SHARED[1], *more, f"{name}.js")))
    return read(f"{name}.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("/*DATA*/", embedded(told))


def embedded(told: Report) -> str:
    """JSON for a page's element: no text in it, of whatever source, can end the element."""
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
