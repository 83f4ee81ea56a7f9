"""The benchmarks without a GPU: the whole path on the simulated device with a clock of our own."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
TICK = 0.002  # seconds between two looks at the clock


def load(name: str) -> types.ModuleType:
    """A file of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def forward() -> types.ModuleType:
    return load("forward")


def test_a_dry_run_measures_every_case_and_writes_the_file(
    forward: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = itertools.count()
    assert forward.main(["--dry-run", "--out", str(tmp_path)], clock=lambda: next(ticks) * TICK) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("simulated-A100-40GB-")
    result = json.loads(path.read_text())
    assert result["simulated"] and result["commit"] and result["versions"]["numpy"] == np.__version__
    rows = result["forward"]
    names = {"fa2", "fa1", "standard", "numpy"}
    assert {row["implementation"] for row in rows} == names and len(rows) == 4 * len(names)
    for row in rows:
        assert row["agrees"] and row["seconds"] == pytest.approx(TICK) and row["spread_s"] == pytest.approx(0, abs=1e-9)
        scores = row["batch"] * row["heads"] * row["n"] ** 2
        assert row["batch"] * row["n"] == 32 and row["heads"] * row["d"] == 32
        assert row["tflops"] == pytest.approx(4 * scores * row["d"] / (2 if row["causal"] else 1) / TICK / 1e12)
    assert all(each["ratio"] == pytest.approx(1) and each["best_other"] == "numpy" for each in result["ratios"])
    assert result["warm_call_host"]["seconds"] == pytest.approx(TICK)
    assert result["first_call"]["cold"]["first_call_s"] > 0 and set(result["first_call"]) == {"cold", "warm"}
    assert f"written: {path}" in capsys.readouterr().out


class Scripted:
    """A bench whose peers fail, lie and tell the truth."""

    device = None

    def draw(self, case: Any, seed: int) -> tuple[Any, Any, Any]:
        q, k, v = np.random.default_rng(seed).standard_normal((3, *case.shape)).astype(case.dtype)
        return q, k, v

    def seconds(self, call: Any) -> float:
        call()
        return getattr(call, "takes", 1.0)

    def wait(self) -> None: ...

    def release(self) -> None: ...

    def to_host(self, out: Any) -> np.ndarray:
        return np.asarray(out, np.float32)

    def peers(self, case: Any, q: Any, k: Any, v: Any) -> Mapping[str, Any]:
        import cupyflash

        def absent() -> None:
            raise RuntimeError("No available kernel.\nAborting execution.")

        def wrong() -> np.ndarray:
            return np.ones_like(q)

        def right() -> Any:
            return cupyflash.attention(q, k, v, causal=case.causal)

        wrong.takes, right.takes = 0.1, 0.5  # type: ignore[attr-defined]
        return {"absent": absent, "wrong": wrong, "right": right}


def test_a_peer_that_does_not_answer_is_told_and_one_that_is_wrong_does_not_win(forward: types.ModuleType) -> None:
    rows = forward.measure(Scripted(), [forward.Case("float16", 16, 16, True, 1, 1)])
    by = {row["implementation"]: row for row in rows}
    assert by["absent"]["error"] == "RuntimeError: No available kernel. Aborting execution." and "tflops" not in by["absent"]
    assert not by["wrong"]["agrees"] and by["right"]["agrees"]
    (ratio,) = forward.ratios(rows)
    assert ratio["best_other"] == "right" and ratio["ratio"] == pytest.approx(0.5)
    text = "\n".join(forward.show(rows))
    assert "No available kernel" in text and "DIFFERS" in text


def test_the_grid_is_sixteen_thousand_tokens_each(forward: types.ModuleType) -> None:
    cases = forward.grid(forward.DTYPES, forward.HEAD_DIMS, forward.LENGTHS, forward.TOKENS, forward.WIDTH)
    assert len(set(cases)) == len(cases) == 2 * 3 * 6 * 2
    assert all(case.batch * case.n == 16384 and case.heads * case.d == 2048 for case in cases)
    full = next(case for case in cases if (case.d, case.n, case.causal) == (128, 16384, False))
    assert full.flops == 4 * 16 * 16384**2 * 128 == 4 * full.batch * full.heads * full.n**2 * full.d


def test_ncu_s_figures_are_read_from_among_its_messages(forward: types.ModuleType) -> None:
    text = (
        '==PROF== Connected to process 7\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","fa2_forward","dram__bytes_read.sum","byte","1,048,576"\n"0","fa2_forward","lts__t_bytes.sum","byte","4194304"\n'
        '"0","fa2_forward","launch__waves","","1"\n'
    )
    assert forward.ncu_metrics(text) == {"dram__bytes_read.sum": 1048576.0, "lts__t_bytes.sum": 4194304.0}
    assert forward.ncu_metrics("==ERROR== ERR_NVGPUCTRPERM") == {}
