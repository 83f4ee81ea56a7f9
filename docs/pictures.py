"""Draws the pictures of the documentation that are drawn from counts: `python docs/pictures.py` (needs matplotlib).

Each file carries a digest of what was drawn, by which `tests/test_pictures.py` tells that it is still what the code draws.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cupyflash import Device, Problem
from cupyflash.sim.plot import draw
from cupyflash.sim.sweep import default_range, spaced

HERE = Path(__file__).resolve().parent
KEY = "Drawn"  # of the digest, in a PNG's text


def theorem2() -> Any:
    """`cupyflash sweep --over sram --seqlen 8192 --head-dim 64 --plot theorem2.png` as a Figure."""
    problem = Problem(1, 1, 1, 8192, 8192, 64, "float16")
    return draw(problem, Device.named("A100-40GB"), "sram", spaced(*default_range(problem, "sram")))


PICTURES = {"theorem2.png": theorem2}


def digest(figure: Any) -> str:
    """Of every line's label and points, and of every text."""
    (axes,) = figure.axes
    lines = [[line.get_label(), [[float(x), float(y)] for x, y in line.get_xydata()]] for line in axes.lines]
    titles = (legend.get_title() for legend in figure.legends)
    texts = [text.get_text() for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label, *titles)]
    texts.append(axes.get_title(loc="left"))
    return hashlib.sha256(json.dumps([lines, texts]).encode()).hexdigest()


def main() -> None:
    for name, made in PICTURES.items():
        figure = made()
        figure.savefig(HERE / name, dpi=150, metadata={KEY: digest(figure)})
        print(f"wrote {HERE / name}")


if __name__ == "__main__":
    main()
