"""CuTe DSL's kernels by their own calls (docs/profile.md), on the PTX machine. The last test needs CuTe DSL and PyTorch."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cupyflash.sim.cute import simulated_cute
from cupyflash.sim.cute.tensor_maps import translated
from cupyflash.sim.ptx import KernelFault
from cupyflash.sim.ptx.memory.swizzles import decode

PROGRAM = Path(__file__).parent / "cute_program.py"
QUERIES = (0, 0x10080, 0x246532, 0x10, 0x40, 0x3200, 0, 0, 127, 3, 199, 0, 0, 0x3F000000, 0x3F01, 0)
"""The map of Q, bfloat16 (1, 200, 4, 128), in FlashAttention-4's forward with packed heads: words of 32 bits."""


def test_nothing_of_cute_or_pytorch_is_imported_unless_asked_for() -> None:
    code = "import sys, cupyflash.sim.cute; sys.exit(bool({'torch', 'cutlass', 'tvm_ffi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_the_extra_is_named_where_cute_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupyflash.sim.cute.host_code", raising=False)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'cupyflash[cute]'")), simulated_cute():
        pass


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="H100-SXM"), simulated_cute("H900"):
        pass


def test_a_tensor_map_of_host_code_is_translated() -> None:
    data, address = translated(struct.pack("<32I", *QUERIES, *[0xABCD] * 16))
    found = decode(data)
    assert found is not None and found[1] == address == 0x10080 << 32
    assert (found[0].dtype, found[0].swizzle, found[0].box) == ("bfloat16", 128, (64, 2, 64, 1))
    assert found[0].dims == (128, 4, 200, 1) and found[0].strides == (256, 1024, 204_800)


@pytest.mark.parametrize("word, value", [(2, 0x1246532), (2, 0), (13, 0x3F000001), (15, 1)])
def test_a_tensor_map_with_unknown_fields_is_refused(word: int, value: int) -> None:
    words = [*QUERIES[:word], value, *QUERIES[word + 1 :]]
    with pytest.raises(NotImplementedError, match="fields that are not simulated"):
        translated(struct.pack("<32I", *words, *[0] * 16))


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    """The module of kernels."""
    pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed: pip install 'cupyflash[cute]'")
    pytest.importorskip("torch", reason="PyTorch is not installed (its CPU build will do)")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAM.parent))
        import cute_program

        yield cute_program


def test_a_compiled_function_runs_on_tensors_of_the_cpu(program: Any) -> None:
    import torch

    x = torch.arange(100, dtype=torch.float32)
    y, z = torch.full((100,), torch.nan), torch.full((100,), torch.nan)
    with simulated_cute() as launches:
        double = program.compiled(x, y, 100)
        double(x, y, 100)
    with simulated_cute(seed=1):
        double(x[:50], z[:50], 50)
        with pytest.raises(KernelFault, match=r"cute_program.py:\d+: out of bounds: read of 4 bytes"):
            double(x, z, 101)
    assert torch.equal(y, x + x) and torch.equal(z[:50], y[:50]) and len(launches) == 1
    moved = [(one.read_bytes, one.write_bytes) for one in launches[0].traffic.values()]
    assert moved == [(400, 0), (0, 400)]
