"""Draws the pictures of the documentation that are drawn from counts: `python docs/pictures.py` (needs matplotlib).

Each file carries a digest of what was drawn, by which `tests/test_pictures.py` tells that it is still what the code draws.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from cupyflash import Device, Mask, Problem, TileSchedule, plan
from cupyflash.request.options import Pattern
from cupyflash.request.score import seen_by
from cupyflash.sim.cli.show import describe
from cupyflash.sim.clock.predicted import predicted
from cupyflash.sim.clock.roofline import Roofline, draw_roofline
from cupyflash.sim.pictures import paper, plot_paper
from cupyflash.sim.pictures.plot import draw
from cupyflash.sim.pictures.plot_ring import draw_ranks
from cupyflash.sim.pictures.sweep import default_range, spaced

HERE = Path(__file__).resolve().parent
KEY = "Drawn"  # of the digest, in a PNG's text


def theorem2() -> Any:
    """`cupyflash sweep --over sram --seqlen 8192 --head-dim 64 --plot theorem2.png` as a Figure."""
    problem = Problem(1, 1, 1, 8192, 8192, 64, "float16")
    return draw(problem, Device.named("A100-40GB"), "sram", spaced(*default_range(problem, "sram")))


def ranks() -> Any:
    """`cupyflash sweep --over ranks --device H100-SXM --plot ranks.png` as a Figure."""
    problem = Problem(1, 32, 8, 131072, 131072, 128, "float16", causal=True)
    title = "32 heads (8 of K and V), N 131,072, d 128, float16, causal; H100-SXM, 450 GB/s each way, by models"
    return draw_ranks(problem, Device.named("H100-SXM"), 450e9, [1 << power for power in range(11)], title)


def behind_l2() -> Any:
    """`cupyflash sweep --over seqlen --from 1024 --to 32768 --points 11 --head-dim 128 --heads 8 --l2 --plot l2.png` likewise."""
    problem = Problem(1, 8, 8, 4096, 4096, 128, "float16")
    return draw(problem, Device.named("A100-40GB"), "seqlen", spaced(1024, 32768, 11, True), with_l2=True)


def roofline() -> Any:
    """`cupyflash predict --seqlen 4096 --head-dim 128 --heads 16 --roofline roofline.png` as a Figure."""
    problem, device = Problem(1, 16, 16, 4096, 4096, 128, "float16"), Device.named("A100-40GB")
    schedule = plan(problem, device)
    return draw_roofline(Roofline.of(schedule, predicted(schedule)), f"FlashAttention-2: {describe(problem)}", device.name)


def masks() -> dict[str, Any]:
    """The masks that masks.md defines, by name: all of its Python but what calls attention."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE / "masks.md").read_text(), re.DOTALL):
        if "cupyflash.attention" not in block:
            exec(compile(block, "masks.md", "exec"), names)
    return {name: mask for name, mask in names.items() if isinstance(mask, Mask)}


def schedule_of(mask: Mask | None = None, array: bool = False, heads: int = 16, n: int = 4096) -> TileSchedule:
    """Returns the schedule of a call with a mask, or an array that says the same, on an A100."""
    problem = Problem(1, heads, heads, n, n, 64, "float16")
    if mask is not None:
        known = problem.asking(mask_function=mask.form)
        pattern = Pattern.of(seen_by(mask.form, known, mask.arrays | mask.numbers))
        problem = problem.asking(mask=True, pattern=pattern) if array else known.asking(pattern=pattern)
    return plan(problem, Device.named("A100-40GB"), "fa2")


def tiles(name: str) -> Any:
    """The states of a mask's tiles as a Figure."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    (found,) = schedule_of(masks()[name]).mask_tiles
    assert found.states is not None
    figure = Figure(figsize=(3.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(
        found.states[0, 0],
        ListedColormap(["#ffffff", "#a8c5e8", "#1f4e8c"]),
        vmin=0,
        vmax=2,
        aspect="auto",
        extent=(0, 4096, 4096, 0),
    )
    axes.set(xlabel="key", ylabel="query", xticks=range(0, 4097, 1024), yticks=range(0, 4097, 1024))
    axes.set_title(name.replace("_", " "), loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    return figure


def of_paper(name: str) -> Any:
    """Draws a figure of `cupyflash paper`."""
    return plot_paper.draw(paper.FIGURES[name]())


MASKS = "documents", "prefix_lm", "global_window", "dilated", "tree"
PICTURES = {
    "theorem2.png": theorem2,
    "ranks.png": ranks,
    "l2.png": behind_l2,
    "roofline.png": roofline,
    **{f"masks_{name}.png": partial(tiles, name) for name in MASKS},
    **{f"paper_{name}.png": partial(of_paper, name) for name in paper.FIGURES},
}


def digest(figure: Any) -> str:
    """A hash of every line's label and points, every text and every image."""
    every = figure.axes
    lines = [[line.get_label(), [[float(x), float(y)] for x, y in line.get_xydata()]] for axes in every for line in axes.lines]
    texts = [text.get_text() for axes in every for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label)]
    texts += [legend.get_title().get_text() for legend in figure.legends] + [axes.get_title(loc="left") for axes in every]
    images = [image.get_array().tolist() for axes in every for image in axes.images]
    return hashlib.sha256(json.dumps([lines, texts, *images]).encode()).hexdigest()


def main() -> None:
    for name, made in PICTURES.items():
        figure = made()
        figure.savefig(HERE / name, dpi=150, metadata={KEY: digest(figure)})
        print(f"wrote {HERE / name}")


if __name__ == "__main__":
    main()
