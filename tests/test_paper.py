"""`cupyflash paper`: its page is what the counts are today, and says of each figure what the paper's claim is about."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.pictures.paper import FIGURES, GPT2, beside_products, markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "paper.md"


def paper(*options: str) -> Result:
    result = CliRunner().invoke(main, ["paper", *options])
    assert result.exit_code == 0, result.stderr
    return result


def test_the_page_is_today_s() -> None:
    assert PAGE.read_text() == markdown([make() for make in FIGURES.values()]) == paper("--format", "markdown").stdout


def test_every_form_says_the_same_numbers() -> None:
    reports, text = json.loads(paper("--format", "json").stdout), paper().stdout
    assert [report["name"] for report in reports] == list(FIGURES)
    for report, make in zip(reports, FIGURES.values(), strict=True):
        rows = make().rows
        assert [tuple(row.values()) for row in report["rows"]] == list(rows) and report["title"] in text
        assert all(cell in text for row in rows for cell in row)
    (one,) = json.loads(paper("--format", "json", "softmax", "softmax").stdout)
    assert one == reports[list(FIGURES).index("softmax")]


def test_a_figure_that_is_none_is_named() -> None:
    result = CliRunner().invoke(main, ["paper", "figure 9"])
    assert result.exit_code == 2 and "figure 9" in result.stderr and "training" in result.stderr


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = paper("operations", "--plot", str(tmp_path), "--output", str(tmp_path / "page.txt"))
    assert (tmp_path / "paper_operations.png").read_bytes()[:4] == b"\x89PNG" and not result.stdout
    assert FIGURES["operations"]().title in (tmp_path / "page.txt").read_text()


def test_standard_attention_is_the_ideal_s() -> None:
    first = FIGURES["training"]().rows[0]
    ideal = theory.standard_ideal(GPT2).total_bytes, theory.standard_backward_ideal(GPT2).total_bytes
    assert first[1:3] == tuple(f"{each / 1e9:.2f}" for each in ideal)


def test_the_claims_hold_of_the_points() -> None:
    """Bytes fall with Bc and with M as the theorem says, and rise with the share of blocks; online softmax is 3 of 4."""
    points = {name: {line.label: np.array(line.points) for line in make().picture.lines} for name, make in FIGURES.items()}
    (block_sizes, _), (sparse, _) = points["block_size"].values(), points["block_sparse"].values()
    assert (np.diff(block_sizes[:, 1]) <= 0).all()
    slope, constant = np.polyfit(sparse[:, 0], sparse[:, 1], 1)
    assert np.allclose(sparse[:, 1], slope * sparse[:, 0] + constant, atol=1e-9) and 0 < constant < 0.03
    standard, flash, bound = points["sram"].values()
    large = flash[:, 0] >= 8
    assert (standard[:, 1] == standard[0, 1]).all() and (flash[:, 1] > bound[:, 1]).all()
    assert np.ptp((flash / bound)[large, 1]) / 20 < 0.2  # along the bound from M = d^2 on
    safe, online = points["softmax"].values()
    assert (safe[:, 1] == 4).all() and (online[:, 1] == 3).all()


def test_operations_beside_the_products() -> None:
    """The lines of Algorithm 1 and FlashAttention-2, run on numbers: elementwise operations are counted as they are done."""
    d, Bc, blocks = 8, 16, 50
    counted = [run(d, Bc, blocks) for run in (algorithm_1, flash_attention_2)]
    for (operations, out), expected in zip(counted, beside_products(d, Bc), strict=True):
        assert operations / (Bc * blocks) == pytest.approx(expected, rel=1e-3)
        assert np.allclose(out, counted[0][1])


def of_one_row(d: int, Bc: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a row with the keys of each block, and V."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((blocks, Bc)), rng.standard_normal((blocks, Bc, d))


def algorithm_1(d: int, Bc: int, blocks: int) -> tuple[int, np.ndarray]:
    m, total, out, count = -np.inf, 0.0, np.zeros(d), 0
    for S, V in zip(*of_one_row(d, Bc, blocks), strict=True):
        s = 1.0 * S
        m_block = s.max()
        P = np.exp(s - m_block)
        l_block = P.sum()
        count += 5 * Bc  # scaled, compared, less m, exponential, added
        m_new = max(m, m_block)
        old, new = np.exp(m - m_new), np.exp(m_block - m_new)
        l_new = old * total + new * l_block
        count += 1 + 4 + 3
        inverse, weight = 1 / l_new, total * old
        out = inverse * (weight * out + new * (P @ V))
        count += 2 + 4 * d
        m, total = m_new, l_new
    return count, out


def flash_attention_2(d: int, Bc: int, blocks: int) -> tuple[int, np.ndarray]:
    m, total, out, count = -np.inf, 0.0, np.zeros(d), 0
    for S, V in zip(*of_one_row(d, Bc, blocks), strict=True):
        s = 1.0 * S
        m_new = max(m, s.max())
        P = np.exp(s - m_new)
        count += 5 * Bc + 1
        old = np.exp(m - m_new)
        total = old * total + P.sum()
        count += 2 + 2
        out = old * out + P @ V  # the sum is the product's
        count += d
        m = m_new
    return count, out / total


def test_json_is_a_format_too() -> None:
    as_format, as_flag = (CliRunner().invoke(main, ["paper", "softmax", *flag]) for flag in (("--format", "json"), ("--json",)))
    assert as_flag.exit_code == 0 and as_flag.stdout == as_format.stdout and json.loads(as_flag.stdout)
    assert CliRunner().invoke(main, ["paper", "--json", "--format", "markdown"]).exit_code == 2
