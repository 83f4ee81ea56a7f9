"""Numba's CUDA kernels by their own calls, on the PTX machine. All but the first tests need numba-cuda."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.sim.numba import simulated_numba
from cupyflash.sim.ptx import KernelFault, Launch

PROGRAM = Path(__file__).parent / "numba_program.py"


def test_nothing_of_numba_is_imported_unless_asked_for() -> None:
    code = "import sys, cupyflash.sim.numba; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_the_extra_is_named_where_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupyflash.sim.numba.dispatch", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'cupyflash[numba]'")), simulated_numba():
        pass


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """The module of kernels."""
    pytest.importorskip("numba.cuda.dispatcher", reason="numba-cuda is not installed: pip install 'cupyflash[numba]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM.parent))
        import numba_program

        yield numba_program


@pytest.fixture
def launches(kernels: Any) -> Iterator[list[Launch]]:
    with simulated_numba() as found:
        yield found


def line_of(text: str) -> int:
    """The number of the line of the kernels' file that ends so."""
    return next(k for k, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith(text))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_arrays_become_their_descriptors(kernels: Any, launches: list[Launch]) -> None:
    x, y = drawn(1000), np.zeros(1000, np.float32)
    kernels.axpy[8, 128](x, y, np.float32(2))
    np.testing.assert_allclose(y, 2 * (x + x * np.tanh(x) / 2), rtol=1e-5)
    assert {name: counts.read_bytes for name, counts in launches[0].traffic.items()} == {"x": 4000, "y": 4000}
    kernels.axpy.forall(1000)(x[::-1], y, np.float32(1))
    assert len(launches) == 2


def test_strides_and_arrays_on_the_device(kernels: Any, launches: list[Launch]) -> None:
    cuda, x = kernels.cuda, drawn(20, 300)
    there, sums = cuda.to_device(x), cuda.device_array(20, np.float32)
    for view in (there, there[:, ::3], there[::-1], np.asfortranarray(x)):
        kernels.row_sums[view.shape[0], 64](view, sums)
        np.testing.assert_allclose(sums.copy_to_host(), np.asarray(view).sum(axis=1), rtol=1e-4, atol=1e-4)
    cuda.synchronize()
    there.copy_to_device(0 * x)
    assert not there.copy_to_host().any() and x.any()


def test_scalars_tuples_and_records(kernels: Any, launches: list[Launch]) -> None:
    out, record = np.zeros(1), np.array([(2, 0.5)], np.dtype([("count", "i4"), ("weight", "f8")], align=True))[0]
    kernels.mixed[1, 32](out, (5, 2), 1 + 1j, True, record)
    assert out[0] == 5 * (1 + 2 + 0.5)


def test_findings_have_the_lines_of_the_python_file(kernels: Any, launches: list[Launch]) -> None:
    x, y = drawn(64), np.zeros(64, np.float32)
    with pytest.raises(KernelFault, match=rf"numba_program.py:{line_of('# no guard')}: out of bounds: .* of 'x'"):
        kernels.beyond[1, 128](x, y)
    with pytest.raises(KernelFault, match=rf"race: .* numba_program.py:{line_of('part[t] = x[t]')}|race"):
        kernels.unordered[1, 64](x, y)
    with pytest.raises(KernelFault, match=r"uninitialised: .* of 'x'"):
        kernels.beyond[1, 64](kernels.cuda.device_array(64, np.float32), y)


def test_kernels_with_a_signature_are_made_in_the_block(kernels: Any, launches: list[Launch]) -> None:
    cuda = kernels.cuda

    @cuda.jit("void(float32[:], float32)")  # type: ignore[untyped-decorator]
    def scale(x: Any, a: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= a

    x = drawn(100)
    kept = x.copy()
    scale[1, 128](x, 2)
    assert (x == 2 * kept).all()


@pytest.mark.wide
def test_the_judge_takes_numba_s_kernels(kernels: Any) -> None:
    from cupyflash.sim.judging import check

    def right(x: "float32[m, n]") -> Any:
        y = np.empty(x.shape[0], np.float32)
        kernels.row_sums[x.shape[0], 64](x, y)
        return y

    def wrong(x: "float32[n]") -> Any:
        y = np.empty_like(x)
        kernels.beyond[-(-x.size // 128), 128](x, y)
        return y

    with simulated_numba():
        assert check(right, lambda x: x.sum(axis=1), seconds=5).verdict != "wrong"
        assert "out of bounds" in {fault.kind for fault in check(wrong, lambda x: x.copy(), only=0).faults}


def test_the_page_s_example_runs(kernels: Any) -> None:
    page = (PROGRAM.parent.parent / "docs" / "profile.md").read_text()
    (code,) = re.findall(r"```python\n(from cupyflash.sim.numba.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"np": np, "axpy": kernels.axpy, "x": drawn(1000), "y": np.zeros(1000, np.float32)}
    exec(code, names)
    assert names["y"].any() and len(names["launches"]) == 1
