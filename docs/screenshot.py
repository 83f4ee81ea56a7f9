"""Draws docs/trace.png: `python docs/screenshot.py` (needs chromium, chromedriver, selenium and Pillow).

It is the page of the command in trace.md, in the middle of its play. The file carries a digest of the moves, by which
`tests/test_trace.py` tells that it is still what the kernels do.
"""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from cupyflash.sim.cli import main

HERE = Path(__file__).resolve().parent
KEY = "Drawn"  # of the digest, in a PNG's text
COMMAND = "cupyflash trace --seqlen 128 --head-dim 64 --sram 16KB --causal"
WIDTH, HEIGHT, PLACE = 1440, 1190, 0.455


def told(*more: str) -> dict[str, Any]:
    """The command's report."""
    result = CliRunner().invoke(main, [*shlex.split(COMMAND)[1:], "--json", *more])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def digest(report: dict[str, Any]) -> str:
    """Of every move but for the line of the kernel's source that made it."""
    source = report["columns"].index("source")
    moves = [[move[:source] + move[source + 1 :] for move in player["moves"]] for player in report["players"]]
    return hashlib.sha256(json.dumps(moves).encode()).hexdigest()


def draw() -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from PIL import Image, PngImagePlugin

    import browsers

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "out.html"
        drawn = digest(told("--html", str(page)))
        (Path(folder) / "browser").mkdir()
        with browsers.chromium(Path(folder) / "browser") as browser:
            browsers.screen(browser, WIDTH, HEIGHT, prefers_color_scheme="light")
            browser.get(page.as_uri())
            browser.execute_script("jump(most * arguments[0]); for (const player of players) player.render(true)", PLACE)
            picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB").quantize(128)
    text = PngImagePlugin.PngInfo()
    text.add_text(KEY, drawn)
    picture.save(HERE / "trace.png", optimize=True, pnginfo=text)
    print("wrote", HERE / "trace.png")


if __name__ == "__main__":
    draw()
