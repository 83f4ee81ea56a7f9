"""docs/decoding.md: its table is the closed form's, the layouts of caches are the views that it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.schedules import Cache, plan_decode
from cupyflash.sim import theory

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "decoding.md").read_text()


def bytes_table() -> Iterator[str]:
    device = Device.named("H100-SXM")
    for group in (1, 4, 8):
        problem = Problem(8, 32, 32 // group, 1, 16384, 128, "float16", causal=True, padded=True, alignment=16)
        schedule = plan_decode(problem, device, Cache(0, 16, 8 * 1024))
        moved, rows = theory.traffic(schedule), theory.traffic(plan(problem, device, "fa2"))
        parts = sum(moved[name].total_bytes for name in ("O_part", "m_part", "l_part") if name in moved)
        of = moved["K"].total_bytes + moved["V"].total_bytes, parts, moved["block_table"].total_bytes, moved.total_bytes
        figures = " | ".join(f"{each / 1e6:,.1f}" for each in (*of, rows.total_bytes))
        yield f"| {group} | {schedule.splits} | {schedule.grid} | {figures} | {rows.total_bytes / moved.total_bytes:.2f} |"


def test_the_table_of_bytes_is_the_closed_form_s() -> None:
    shown = PAGE.split("<!-- bytes -->\n")[1].split("\n<!-- end -->")[0].splitlines()[2:]
    assert shown == list(bytes_table())


def test_vllm_s_layouts_are_the_views_that_the_page_says() -> None:
    k, v = np.arange(2 * 5 * 16 * 2 * 8).reshape(2, 5, 16, 2, 8)  # (blocks, block_size, h_kv, d)
    shown = re.findall(r"^\| (?:today's|before, .*?) \| (\(.*?\)) \| `(.*)` \|$", PAGE, re.M)
    packed = np.concatenate([k, v], -1)
    caches = {
        "(blocks, h_kv, block_size, 2 d)": packed.swapaxes(1, 2).copy(),
        "(blocks, 2, block_size, h_kv, d)": np.stack([k, v], 1),
        "(2, blocks, block_size, h_kv, d)": np.stack([k, v]),
        "(blocks, block_size, h_kv, d + d_v)": packed,
    }
    assert [shape for shape, _ in shown] == list(caches)
    for shape, line in shown:
        names: dict[str, Any] = {"kv_cache": caches[shape], "d": 8}
        exec(line, names)
        for view, right in ((names["k"], k), (names["v"], v)):
            assert np.shares_memory(view, caches[shape]) and np.array_equal(view, right.swapaxes(1, 2))
            assert view.strides[-1] == view.itemsize and view.shape[2] == cupyflash.schedules.decode.PAGE_STEP
