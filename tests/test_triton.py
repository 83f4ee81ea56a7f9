"""Triton's kernels by their own calls, on the PTX machine. All but the first tests need Triton, most of those PyTorch, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.sim import ptx
from cupyflash.sim.triton import simulated_triton

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "triton_program.py"


def test_nothing_of_triton_or_pytorch_is_imported_unless_asked_for() -> None:
    code = "import sys, cupyflash.sim.triton; sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_the_extra_is_named_where_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupyflash.sim.triton.driver", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'cupyflash[triton]'")), simulated_triton():
        pass


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="H100-SXM"), simulated_triton("H900"):
        pass


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of kernels that the tests share, with a cache of Triton's own."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'cupyflash[triton]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", os.environ.get("TRITON_CACHE_DIR") or str(tmp_path_factory.mktemp("triton")))
        patch.syspath_prepend(str(PROGRAM.parent))
        import triton_program

        yield triton_program


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed (its CPU build will do)")


def line_of(text: str) -> int:
    """The number of the line of the kernels' file that has this text."""
    return next(n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("device, arch", [("A100-40GB", "sm_80"), ("H100-SXM", "sm_90a")])
def test_a_kernel_is_compiled_for_the_device_and_its_traffic_has_the_arguments_names(
    kernels: Any, torch: Any, device: str, arch: str
) -> None:
    with simulated_triton(device) as launches:
        x, y = torch.rand(1000, device="cuda"), torch.rand(1000, device="cuda")
        out = torch.full_like(x, torch.nan)
        compiled = kernels.add[4,](x, y, out, 1000, BLOCK=256)
        assert str(x.device) == "cuda:0" and x.is_cuda and torch.cuda.is_available()
    assert torch.equal(out, x + y) and x.device.type == "cpu"
    assert re.search(r"\.target (\w+)", compiled.asm["ptx"])[1] == arch and compiled.n_regs > 0
    moved = {name: (one.read_bytes, one.write_bytes) for name, one in launches[0].traffic.items()}
    assert moved == {"x": (4000, 0), "y": (4000, 0), "out": (0, 4000)}


def test_numpy_arrays_are_pointers(kernels: Any) -> None:
    x, y, out = np.arange(300, dtype=np.float32), np.ones(300, np.float32), np.zeros(600, np.float32)[::2]
    with simulated_triton():
        kernels.add[2,](x, y, np.zeros(0, np.float32).view(), 0, BLOCK=256)
        kernels.add_strided[2,](x, y, out, 300, out.strides[0] // 4, BLOCK=256)
    assert np.array_equal(out, x + y)


def test_a_finding_has_the_arguments_name_and_the_line_of_python(kernels: Any, torch: Any) -> None:
    x, y, out = torch.rand(1000), torch.rand(1000), torch.empty(1000)
    with simulated_triton(), pytest.raises(ptx.KernelFault, match="out of bounds") as caught:
        kernels.add_without_a_mask[4,](x, y, out, BLOCK=256)
    found = caught.value.launch.findings
    assert found[0].tensor == "x" and "offset 4000 of 'x', which has 4,000 bytes" in str(found[0])
    assert f"{PROGRAM.name}:{line_of('unmasked load')}: out of bounds" in str(found[0])


def test_views_share_their_storage_and_kernels_follow_pointers_in_memory(kernels: Any, torch: Any) -> None:
    with simulated_triton() as launches:
        whole = torch.arange(64, device="cuda", dtype=torch.float32)
        left, right = whole.chunk(2)
        out = torch.zeros(32, device="cuda")
        table = torch.tensor([left.data_ptr(), right.data_ptr(), out.data_ptr()], device="cuda")
        kernels.add_by_table[1,](table, BLOCK=32, num_warps=1)
        assert right.data_ptr() - left.data_ptr() == 128 and whole.data_ptr() % 256 == 0
        kernels.add[1,](left, right, right, 32, BLOCK=32, num_warps=1)
    assert torch.equal(out, torch.arange(64.0)[:32] + torch.arange(64.0)[32:]) and torch.equal(right, out)
    assert {one.unique_read_bytes for one in launches[0].traffic.values()} == {24, 256, 0}
    assert launches[1].traffic["x, y, out"].read_bytes == 256


def test_a_generator_of_cuda_is_the_cpus(kernels: Any, torch: Any) -> None:
    with simulated_triton():
        drawn = [torch.rand(4, generator=torch.Generator(device="cuda").manual_seed(3), device="cuda") for _ in range(2)]
        assert isinstance(torch.Generator("cuda:0"), torch.Generator)
    assert torch.equal(*drawn)


def test_what_was_replaced_is_there_again(kernels: Any, torch: Any) -> None:
    import triton

    before = triton.testing.do_bench, torch.cuda.is_available, triton.runtime.driver._active, torch.Generator
    with simulated_triton(), pytest.raises(RuntimeError, match="already"), simulated_triton():
        pass
    assert before == (triton.testing.do_bench, torch.cuda.is_available, triton.runtime.driver._active, torch.Generator)


def test_a_benchmark_takes_the_clocks_time_and_says_so(kernels: Any, torch: Any) -> None:
    import triton

    if find_spec("nvidia") is None:
        pytest.skip("NVIDIA's disassemblers are not installed: pip install 'cupyflash[clock]'")
    with simulated_triton("H100-SXM") as launches, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x, y, out = (torch.rand(1 << 20, device="cuda") for _ in range(3))
        ms = triton.testing.do_bench(lambda: kernels.add[1 << 10,](x, y, out, 1 << 20, BLOCK=1024))
        assert np.isnan(triton.testing.do_bench(lambda: x + y))
    assert 3 * 4 * 2**20 / 3.4e12 < ms * 1e-3 < 1e-4 and not launches  # no faster than DRAM
    texts = [str(one.message) for one in said]
    assert "predicted for H100-SXM by the clock, not measured" in texts[0] and "no time here" in texts[1]


def test_kernels_print_and_assert(kernels: Any, torch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with simulated_triton(findings="keep") as launches:
        kernels.show[1,](torch.arange(32, device="cuda", dtype=torch.int32), BLOCK=32, num_warps=1, debug=True)
    lines = capfd.readouterr().out.splitlines()
    assert [int(line.split()[-1]) for line in lines if "value:" in line] == list(range(32))
    (found,) = launches[0].findings
    assert found.kind == "trap" and "too large" in found.message and found.lane == 31


@pytest.mark.parametrize("device", ["A100-40GB", "H100-SXM"])
def test_descriptors_of_the_host_and_of_the_device(kernels: Any, torch: Any, device: str) -> None:
    """On 9.0 they are tensor maps: the host's in the parameters, the device's in scratch memory; on 8.0 pointers."""
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not hasattr(triton, "set_allocator"):
        pytest.skip("this Triton has no descriptors that kernels make")
    x = torch.arange(24 * 40, dtype=torch.float32).reshape(24, 40)
    made, given = torch.zeros(24, 40), torch.zeros(24, 40)
    with simulated_triton(device) as launches:
        triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
        tiles = [TensorDescriptor.from_tensor(one, [16, 32]) for one in (x, given)]
        kernels.copy_tiles[2, 2](*tiles, BLOCK_M=16, BLOCK_N=32)
        kernels.copy_made_tiles[2, 2](x, made, 24, 40, BLOCK_M=16, BLOCK_N=32)
    assert torch.equal(given, x) and torch.equal(made, x)
    assert [one.traffic["x"].unique_read_bytes for one in launches] == [x.nbytes, x.nbytes]


def test_a_program_on_a_cluster_sums_over_its_blocks(kernels: Any, torch: Any) -> None:
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        pytest.skip("before 3.9 Triton's reductions read shared memory that the other block of a cluster wrote in its own")
    x, out = torch.rand(64, 128), torch.zeros(192)
    with simulated_triton("H100-SXM", findings="keep") as launches:
        kernels.sums[1,](x, out, M=64, N=128, num_ctas=2)
    assert torch.allclose(out, torch.cat((x.sum(1), x.sum(0))))
    assert launches[0].counters.distributed_memory.bytes and {one.severity for one in launches[0].findings} <= {"warning"}


def test_the_programs_of_a_cooperative_launch_are_there_together(kernels: Any, torch: Any) -> None:
    count, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(16, 64, dtype=torch.int32)
    with simulated_triton("H100-SXM"):
        kernels.meet[8,](count, seen, 8, BLOCK=64, launch_cooperative_grid=True)
    assert int(count) == 8 and torch.equal(seen[8:], torch.roll(seen[:8], -1, 0))


def test_gluon_runs_by_the_same_way(kernels: Any, torch: Any) -> None:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper", reason="this Triton has no Gluon for Hopper")
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gluon_program import copy_tiles  # where `kernels` put its folder

    layout = gl.NVMMASharedLayout.get_default_for([128], gl.float32)
    with simulated_triton("H100-SXM", findings="keep") as launches:
        x, out = torch.rand(1000, device="cuda"), torch.zeros(1000, device="cuda")
        copy_tiles[8,](*(TensorDescriptor.from_tensor(one, [128], layout) for one in (x, out)), layout, BLOCK=128, num_warps=4)
    assert torch.equal(out, x) and launches[0].traffic["x"].unique_read_bytes == x.nbytes
    assert [(one.kind, one.severity) for one in launches[0].findings] == [("proxy", "warning")]  # no fence.mbarrier_init


@pytest.mark.parametrize("way", ["module", "switch"])
def test_a_program_runs_as_it_stands(kernels: Any, torch: Any, way: str, tmp_path: Path) -> None:
    """By the module, or by the switch of the environment, for which an installed package has an entry point."""
    described = tmp_path / "switched-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: switched\nVersion: 1\n")
    project = (ROOT / "pyproject.toml").read_text()
    entry = re.search(r'\[project.entry-points."triton.backends"\]\ncupyflash = "(.*)"', project)
    assert entry is not None
    (described / "entry_points.txt").write_text(f"[triton.backends]\ncupyflash = {entry[1]}\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = os.environ | {"PYTHONPATH": path, "CUPYFLASH_DEVICE": "H100-SXM"}
    command = [sys.executable, *(["-m", "cupyflash.sim.triton"] if way == "module" else []), str(PROGRAM)]
    done = subprocess.run(command, env=environment | {"CUPYFLASH_TRITON": "1"} if way == "switch" else environment,
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["H100-SXM (9, 0) cuda:0", "right"]
