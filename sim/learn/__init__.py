"""The page of `cupyflash learn`: an explanation of FlashAttention whose pictures can be changed, in one file without a network.

Texts are in `en.toml` and `zh.toml`, one file a language; numbers come from `models`, which are translated to JavaScript.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.sim import page as pages
from cupyflash.sim.learn import models
from cupyflash.sim.learn.javascript import translated
from cupyflash.sim.learn.starts import BACKWARD_SRAM, BLOCK_KEYS, GPU_MEMORY, STARTS

HERE = Path(__file__).parent
LANGUAGES = {"en": "English", "zh": "中文"}
SECTIONS = tuple(STARTS)
FORMS = (
    *(models.tiles, models.forward, models.online, models.visits, models.walk, models.warps, models.decoding),
    *(models.backward, models.kept, models.roles, models.busy),
)
DEVICES = ("T4", "A100-40GB", "H100-SXM")


def page(language: str | None = None) -> str:
    """The whole page; it opens in `language` ("en" or "zh"), or in the reader's own if that is None."""
    devices = [Device.named(name) for name in DEVICES]
    told = {
        "language": language,
        "languages": LANGUAGES,
        "starts": STARTS,
        "block_keys": BLOCK_KEYS,
        "backward_sram": BACKWARD_SRAM,
        "gpu_memory": GPU_MEMORY,
        "texts": {name: texts(name) for name in LANGUAGES},
        "devices": [{"name": each.name.split("-")[0], "sram": each.sram_per_block, "sms": each.sm_count} for each in devices],
    }
    style = pages.read("common.css") + read("learn.css")
    scripts = [pages.read("common.js"), translated("forms", *FORMS), *(read(f"{name}.js") for name in ("core", *SECTIONS, "start"))]
    filled = read("learn.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", "".join(scripts))
    return filled.replace("/*DATA*/", pages.embedded(told))


def texts(language: str) -> Report:
    """All texts of a language, by section and name."""
    return tomllib.loads(read(f"{language}.toml"))


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
