"""The pictures in docs/ are what `python docs/pictures.py` draws today."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest

from cupyflash.sim.clock.sass import disassembler
from cupyflash.sim.pictures.paper import FIGURES
from suites import wide

DOCS = Path(__file__).resolve().parent.parent / "docs"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(path: Path) -> dict[str, str]:
    """The texts of a PNG's tEXt chunks."""
    content, at, found = path.read_bytes(), 8, {}
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        if content[at + 4 : at + 8] == b"tEXt":
            key, _, value = content[at + 8 : at + 8 + length].partition(b"\0")
            found[key.decode("latin-1")] = value.decode("latin-1")
        at += 12 + length
    return found


MASKS = [f"masks_{name}.png" for name in ("documents", "prefix_lm", "global_window", "dilated", "tree")]
PAPER = [f"paper_{name}.png" for name in FIGURES]


@pytest.mark.parametrize(
    "name", ["theorem2.png", MASKS[0], *map(wide, ["roofline.png", "ranks.png", "l2.png", *MASKS[1:]]), *PAPER]
)
def test_a_picture_shows_today_s_counts(name: str) -> None:
    pytest.importorskip("matplotlib")
    if name == "roofline.png" and disassembler() is None:
        pytest.skip("it has the clock's time, which needs NVIDIA's disassemblers")
    pictures = script()
    assert set(pictures.PICTURES) == {"theorem2.png", "ranks.png", "roofline.png", "l2.png", *MASKS, *PAPER}
    drawn = texts(DOCS / name)[pictures.KEY]
    assert drawn == pictures.digest(pictures.PICTURES[name]()), "python docs/pictures.py draws it anew"
