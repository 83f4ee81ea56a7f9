"""Pages that need no network: one file, made of page/NAME.html, its style and scripts, those that all share, and its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent
SHARED = ("common.css", "timeline.css"), ("common.js", "chart.js", "timeline.js")


def filled(name: str, told: dict[str, Any]) -> str:
    """The page `name` of what is told."""
    # No source of a stranger can end the element that its text stands in.
    data = json.dumps(told, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    style, script = ("".join(map(read, (*shared, f"{name}.{kind}"))) for shared, kind in zip(SHARED, ("css", "js"), strict=True))
    return read(f"{name}.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script).replace("/*DATA*/", data)


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
