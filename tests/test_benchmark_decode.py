"""Decoding's benchmark: its cases, its peers, what it writes, and what it tells where no GPU is."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.sim.clock.measured import read

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
cases, decode, machine, peers, report = (
    importlib.import_module(name) for name in ("cases", "decode", "machine", "peers", "report")
)
A100 = Device.named("A100-40GB")


def test_the_cases_are_those_that_fit_and_begin_with_what_matters() -> None:
    every = cases.decoding(False, float("inf"))
    assert len(set(every)) == len(every) == 6 * 5 * 3 and (every[0].batch, every[0].n, every[0].kv_heads) == (8, 16384, 8)
    assert {case.batch for case in every} >= {1, 128} and {case.n for case in every} >= {1024, 131072}
    assert {case.heads // case.kv_heads for case in every} == {1, 4, 8}
    fits = cases.decoding(False, 4e9)
    assert fits == [case for case in every if case.cache_bytes <= 4e9] and 30 < len(fits) < len(every)
    assert set(cases.decoding(True, 4e9)) < set(fits)
    case = cases.DecodeCase("float16", 128, 1000, True, 2, 32, 8)
    assert case.cache_bytes == 2 * 2 * 8 * 1000 * 128 * 2 and case.flops == case.problem.flops == 4 * 2 * 32 * 1000 * 128
    assert case.rates(1, 2.0)["gb_s"] == case.cache_bytes / 2e9
    assert [np.empty(shape, bool).size for shape in case.shapes(3)] == [2 * 32 * 128, 2 * 8 * 1000 * 128, 2 * 8 * 1000 * 128]


def test_pages_hold_the_cache_in_the_order_of_the_table() -> None:
    case = cases.DecodeCase("float16", 16, 64, True, 3, 4, 2)
    simulated = machine.Simulated()
    q, k, v = simulated.draw(case, 0, 3)
    (pages,) = decode.paged(simulated, case, [q, k, v])
    assert pages.size == 16 and pages.table.shape == (3, 4) and sorted(pages.table.ravel()) == list(range(12))
    assert not np.array_equal(pages.table.ravel(), np.arange(12))
    for cache, held in ((k, pages.k), (v, pages.v)):
        for b in range(3):
            assert np.array_equal(np.concatenate(list(held[pages.table[b]]), axis=1), cache[b])


def test_what_is_planned_is_told_for_a_device_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--plan", "A100-40GB", "--quick"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "A100-40GB: 108 multiprocessors, each of which needs 23 kB in flight" and columns == decode.PLAN_HEAD
    assert len(rows) == 2 * len(cases.decoding(True, decode.PLAN_MEMORY / decode.TIMES_IN_MEMORY))
    schedule = decode.planned(A100, cases.decoding(True, float("inf"))[0])
    batch, n, group, page, splits, blocks, *_ = rows[0].split()
    assert (batch, n, group, page) == ("8", "16384", "4", "-")
    assert (int(splits), int(blocks)) == (schedule.splits, schedule.grid) == (schedule.splits, 8 * 8 * schedule.splits)
    says = decode.facts(schedule)
    assert says["loads_a_turn"] * 16 * schedule.config.threads == schedule.block_cols * 2 * 128 * 2
    with pytest.raises(SystemExit):
        decode.main(["--plan", "A100-40GB", "--out", "here"])


@pytest.mark.wide
def test_a_dry_run_measures_and_judges_both_layouts(tmp_path: Path) -> None:
    assert decode.main(["--dry-run", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    lines = list(read(path))
    rows = {line["implementation"]: line for line in lines if line["kind"] == "measurement"}
    assert list(rows) == ["decode", "decode, pages of 16", "numpy"] and all(row["right"] for row in rows.values())
    row = rows["decode, pages of 16"]
    assert row["gb_s"] == pytest.approx(2 * 2 * 2 * 64 * 16 * 2 / row["seconds"] / 1e9) and row["splits"] >= 1
    (copy,) = (line["value"]["copy_gb_s"] for line in lines if line.get("name") == "machine")
    assert row["of_copy"] == pytest.approx(row["gb_s"] / copy)
    told = list(report.summary(lines))
    assert report.DECODE_HEAD in told and any("decode, pages of 16" in line and f"{row['of_copy']:.0%}" in line for line in told)
    assert any(
        "batch 2, cache 64, 2 query heads a key head: decode has 0." in line and "of the GB/s of numpy" in line for line in told
    )


def stand_ins(torch: Any) -> dict[str, types.ModuleType]:
    """flash_attn and flashinfer as far as decoding calls them, with their layouts, in plain PyTorch."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        """q (h, d), k and v (n, h_kv, d)."""
        k, v = (each.repeat_interleave(q.shape[0] // each.shape[1], 1).float() for each in (k, v))
        weights = torch.softmax(torch.einsum("hd,nhd->hn", q.float(), k) / q.shape[-1] ** 0.5, -1)
        return torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)

    def flash_attn_with_kvcache(q: Any, k: Any, v: Any, *, cache_seqlens: Any, causal: bool, block_table: Any = None) -> Any:
        assert causal and cache_seqlens.dtype == torch.int32
        outs = []
        for b, n in enumerate(cache_seqlens.tolist()):
            each = [x[b] if block_table is None else x[block_table[b].long()].flatten(0, 1) for x in (k, v)]
            outs.append(attend(q[b, 0], *(x[:n] for x in each))[None])
        return torch.stack(outs)

    class Wrapper:
        def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
            assert layout == "HND" and workspace.dtype == torch.uint8

        def plan(self, starts: Any, indices: Any, last: Any, heads: int, kv_heads: int, d: int, size: int, **types: Any) -> None:
            self.starts, self.indices, self.last = starts.tolist(), indices.long(), last.tolist()
            assert all(each == torch.float16 for each in types.values())

        def run(self, q: Any, pages: Any) -> Any:
            outs = []
            for b, (begin, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
                each = [x[self.indices[begin:end]].transpose(1, 2).flatten(0, 1) for x in pages]
                full = each[0].shape[0] - pages[0].shape[2] + self.last[b]
                outs.append(attend(q[b], *(x[:full] for x in each)))
            return torch.stack(outs)

    modules = {name: types.ModuleType(name) for name in ("flash_attn", "flashinfer")}
    modules["flash_attn"].flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    return modules


def test_peers_compute_the_same_of_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    for name, module in stand_ins(torch).items():
        monkeypatch.setitem(sys.modules, name, module)
    case = cases.DecodeCase("float16", 16, 256, True, 2, 4, 2)
    simulated = machine.Simulated()
    arrays = decode.DECODE.draw(simulated, case, 0)
    (right,) = decode.reference(np, [array.astype(np.float32) for array in arrays[:3]], True)
    pages = [peers.Pages(*(torch.from_numpy(each) for each in (each.k, each.v, each.table))) for each in arrays[3:]]
    q, k, v = (torch.from_numpy(array) for array in arrays[:3])
    calls = dict(peers.TorchDecoding(torch, q, k, v, torch.full((2,), 256, dtype=torch.int32), pages).calls())
    assert {"torch math", "torch math, packed", "torch flash, packed", "flash_attn", "flash_attn, pages of 256"} < set(calls)
    assert {"flashinfer, pages of 16", "flashinfer, pages of 256"} < set(calls) and "flash_attn, pages of 16" not in calls
    for name, call in calls.items():
        if any(word in name for word in ("math", "flash")):
            out = call().float().numpy()
            assert out.shape == right.shape and np.abs(out - right).max() < 2e-3, name
