"""Draws docs/trace.png, timeline.png, profile.png and learn.png: `python docs/screenshot.py [trace] [timeline] [profile] [learn]`.

They are the page of the first command in trace.md in the middle of its play, FlashAttention-3's timeline on the page of another
one, the page of the example in profile.md without its barrier, with a line opened, and the page of `cupyflash learn` as it opens.
Each file carries a digest of what it shows, by which `tests/test_trace.py`, `test_timeline_page.py`, `test_profile_page.py` and
`test_learn.py` tell that it is still so. It takes chromium, chromedriver, selenium and Pillow.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
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
TIMELINE = "cupyflash trace --device H100-SXM --seqlen 1024 --head-dim 128 --algorithms fa3"
TIMELINE_WIDTH, TIMELINE_HEIGHT, VIEW, CLOCK = 1280, 900, (0.38, 0.62), 0.45
PROFILE_WIDTH, PROFILE_HEIGHT = 1100, 1160

LEARN = "cupyflash learn"
LEARN_WIDTH, LEARN_HEIGHT = 1280, 790


def told(*more: str, command: str = COMMAND) -> dict[str, Any]:
    """A command's report."""
    result = CliRunner().invoke(main, [*shlex.split(command)[1:], "--json", *more])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def digest(report: dict[str, Any]) -> str:
    """A hash of every move without the line of the kernel's source that made it."""
    source = report["columns"].index("source")
    moves = [[move[:source] + move[source + 1 :] for move in player["moves"]] for player in report["players"]]
    return hashlib.sha256(json.dumps(moves).encode()).hexdigest()


def timeline_digest(report: dict[str, Any]) -> str:
    """A hash of every span without its line and its note."""
    rows = report["players"][0]["launches"][0]["timeline"]["rows"]
    return hashlib.sha256(json.dumps([[row["name"], *(span[:3] for span in row["spans"])] for row in rows]).encode()).hexdigest()


def profiled(folder: Path) -> dict[str, Any]:
    """The JSON of profile.md's example without its barrier; its page is `folder`/out.html."""
    page = (HERE / "profile.md").read_text()
    blocks = dict(re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", page, re.DOTALL))
    (shown,) = re.findall(r"^cupyflash (profile transpose.cu .*)$", page, re.MULTILINE)
    source = folder / "transpose.cu"
    source.write_text(blocks["transpose.cu"].replace("    __syncthreads();\n", ""))
    (folder / "transpose.json").write_text(blocks["transpose.json"])
    command = [word.replace("transpose.", f"{folder}/transpose.") for word in shlex.split(shown)]
    result = CliRunner().invoke(main, [*command, "--json", "--html", str(folder / "out.html")])
    assert result.exit_code == 1, result.output  # the race
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def profile_digest(report: dict[str, Any]) -> str:
    """A hash of the counts of each line."""
    lines = [[line[key] for key in ("line", "instructions", "global", "shared")] for line in report["lines"]]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def keep(browser: Any, name: str, drawn: str) -> None:
    """Save what the browser shows, in a file that carries the digest."""
    from PIL import Image, PngImagePlugin

    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB").quantize(128)
    text = PngImagePlugin.PngInfo()
    text.add_text(KEY, drawn)
    picture.save(HERE / name, optimize=True, pnginfo=text)
    print("wrote", HERE / name)


def draw_trace(browser: Any, folder: Path) -> None:
    drawn = digest(told("--html", str(folder / "out.html")))
    set_screen(browser, WIDTH, HEIGHT)
    browser.get((folder / "out.html").as_uri())
    browser.execute_script("view(null); jump(most * arguments[0]); for (const player of players) player.render(true)", PLACE)
    keep(browser, "trace.png", drawn)


def draw_timeline(browser: Any, folder: Path) -> None:
    drawn = timeline_digest(told("--html", str(folder / "out.html"), command=TIMELINE))
    set_screen(browser, TIMELINE_WIDTH, TIMELINE_HEIGHT)
    browser.get((folder / "out.html").as_uri())
    browser.execute_script("choices[0].root.open = true; document.querySelector('.controls').remove(); scrollTo(0, 0)")
    browser.execute_script(
        "document.body.replaceChildren(choices[0].root); choices[0].root.style.cssText = 'border: 0; margin: 4px 14px'"
    )
    browser.execute_async_script("setTimeout(arguments[0], 300)")  # until it is laid out
    browser.execute_script(
        "const one = choices[0].timeline, { chart } = one, warp = chart.told.rows.findIndex(row => row.role === 'producer');"
        "chart.look(chart.end * arguments[0], chart.end * arguments[1]);"
        "one.pick({ row: warp, n: chart.first(warp, chart.end * arguments[2]) }); chart.draw()",
        *VIEW,
        CLOCK,
    )
    keep(browser, "timeline.png", drawn)


def draw_profile(browser: Any, folder: Path) -> None:
    drawn = profile_digest(profiled(folder))
    set_screen(browser, PROFILE_WIDTH, PROFILE_HEIGHT)
    browser.get((folder / "out.html").as_uri())
    # The file's folder is a temporary one.
    browser.execute_script("data.file = 'transpose.cu'; $('what').textContent = $('what').textContent.replace(/^\\S+\\//, '')")
    browser.execute_script("document.querySelector('#sources summary').firstChild.data = data.file; by('conflicts')")
    browser.execute_script("toggle($('L0-9'), counted.get(data.sources[0].file + '\\n9'))")
    keep(browser, "profile.png", drawn)


def learn_digest(report: dict[str, Any]) -> str:
    """A hash of the numbers that the page of `cupyflash learn` begins with."""
    return hashlib.sha256(json.dumps(report["memory"], sort_keys=True).encode()).hexdigest()


def draw_learn(browser: Any, folder: Path) -> None:
    drawn = learn_digest(told("--html", str(folder / "out.html"), "--language", "en", command=LEARN))
    set_screen(browser, LEARN_WIDTH, LEARN_HEIGHT)
    browser.get((folder / "out.html").as_uri())
    keep(browser, "learn.png", drawn)


def set_screen(browser: Any, width: int, height: int) -> None:
    import browsers

    browsers.screen(browser, width, height, prefers_color_scheme="light")


def draw(names: list[str]) -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import browsers

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "browser").mkdir()
        with browsers.chromium(Path(folder) / "browser") as browser:
            for name, one in (("trace", draw_trace), ("timeline", draw_timeline), ("profile", draw_profile), ("learn", draw_learn)):
                if not names or name in names:
                    one(browser, Path(folder))


if __name__ == "__main__":
    draw(sys.argv[1:])
