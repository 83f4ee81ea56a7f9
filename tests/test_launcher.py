"""The GPU path against a recorded CuPy: what it asks for, on a machine that has no GPU."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem, attention, attention_backward, attention_varlen, plan
from cupyflash.launch import compiler, first_use, launcher
from cupyflash.schedules import plan_backward, plan_varlen
from recorded_cupy import Recorded


def test_one_launch_with_the_schedules_constants(cupy: Recorded) -> None:
    q, k, v = cupy.array(2, 4, 100, 64), cupy.array(2, 2, 200, 64), cupy.array(2, 2, 200, 64)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    schedule = plan(Problem.from_arrays(q, k, v, causal=True), Device.named("B200"), lse=True)
    (kernel,) = schedule.kernels()
    assert cupy.launches[0][:2] == ((kernel.grid,), (kernel.threads,))
    assert cupy.launches[0][3] == kernel.shared_bytes > compiler.SHARED_WITHOUT_ASKING and cupy.opted_in == [kernel.shared_bytes]
    options = cupy.compiled[0][1]
    for name, value in kernel.constants:
        assert f"-D{name}={value}" in options
    assert any(option.startswith("-DCUPYFLASH_SOURCES=") for option in options)
    given = cupy.launches[0][2]
    assert given["Q"] is q and given["O"] is out and given["L"] is lse
    assert given["Q_row"] == 64 and given["K_batch"] == 2 * 200 * 64 and given["group"] == 2
    assert {shape for shape, _ in cupy.allocated} == {q.shape, q.shape[:-1]}


def test_a_kernel_with_local_memory_makes_way_for_the_next_of_its_blocks(cupy: Recorded) -> None:
    """For any compiler: two stages are said to spill, then all."""
    arrays = [cupy.array(64, 4096, 64) for _ in range(3)]
    (kernel,) = plan(Problem.from_arrays(*arrays), Device.named("B200")).kernels()
    assert ("STAGES", 2) in kernel.constants
    sizes = [(name, value) for name, value in kernel.constants if name in ("BR", "BC")]
    other = next(each for each in kernel.instead if ("STAGES", 2) not in each.constants)
    assert all(set(sizes) <= set(each.constants) and each.grid == kernel.grid for each in kernel.instead)
    cupy.spilled = {"STAGES=2"}
    attention(*arrays)
    assert f"-DSTAGES={dict(other.constants)['STAGES']}" in cupy.compiled[-1][1]
    assert cupy.launches[-1][:2] == ((other.grid,), (other.threads,)) and cupy.launches[-1][3] == other.shared_bytes
    attention(*arrays)
    attention(*[cupy.array(65, 4096, 64) for _ in range(3)])
    assert [launch[:2] for launch in cupy.launches[1:]] == [((grid,), (other.threads,)) for grid in (64 * 32, 65 * 32)]
    launcher.KEPT.clear()
    compiler._functions.clear()
    cupy.spilled = {f"BR={dict(sizes)['BR']}"}
    attention(*arrays)
    assert cupy.launches[-1][1] == (kernel.threads,) and cupy.launches[-1][3] == kernel.shared_bytes


@pytest.mark.parametrize(("name", "size"), [("fa2_backward", 64), ("fa2_backward_queries", 32)])
def test_a_kernel_of_the_backward_makes_way_too(cupy: Recorded, name: str, size: int) -> None:
    """32 keys (in dQ's kernel rows) a warp are said to spill, then 16 with all columns at once too; the others stay as they are."""
    arrays = {each: cupy.array(64, 4096, 128) for each in ("dout", "q", "k", "v", "out")}
    arrays["lse"] = cupy.array(64, 4096, dtype=np.float32)
    problem = Problem.from_arrays(arrays["q"], arrays["k"], arrays["v"])
    kernels = plan_backward(problem, Device.named("H100-SXM"), deterministic=True).kernels()
    place, kernel = next((place, each) for place, each in enumerate(kernels) if each.name == name)
    own, at_once = ("WARP_ROWS", "WARP_COLS") if name == "fa2_backward_queries" else ("WARP_KEYS", "WARP_ROWS")
    whole = {"WARP_COLS": "BC", "WARP_ROWS": "BR"}[at_once]
    ways = [tuple(dict(each.constants)[of] for of in (own, at_once, whole)) for each in (kernel, *kernel.instead)]
    assert ways == [(32, 32, size), *((16, wide, size) for wide in (64, 32, 16) if wide <= size)]
    sizes = [{of: dict(each.constants)[of] for of in ("BR", "BC")} for each in (kernel, *kernel.instead)]
    assert all(each == sizes[0] for each in sizes) and {each.grid for each in kernel.instead} == {kernel.grid}

    spilled: list[str] = []
    for taken, also in ((1, f"{own}=32"), (2, f"{at_once}={size}")):
        spilled.append(also)
        cupy.spilled = set(spilled)
        cupy.launches.clear()
        launcher.KEPT.clear()
        compiler._functions.clear()
        attention_backward(**arrays, deterministic=True)
        other = kernel.instead[taken - 1]
        assert cupy.launches[place][:2] == ((kernel.grid,), (other.threads,)) and cupy.launches[place][3] == other.shared_bytes
        assert [launch[0] for launch in cupy.launches] == [(each.grid,) for each in kernels]


def test_compiled_once_a_configuration_whatever_the_sizes(cupy: Recorded) -> None:
    """fa1 is compiled once; fa2 once for each of the three Br that lengths and heads choose from."""
    sizes = [(heads, n) for n in (1, 64, 100, 300, 5000, 40_000) for heads in (1, 3, 100)]
    for algorithm, most in (("fa1", 1), ("fa2", 3)):
        cupy.compiled.clear()
        for heads, n in sizes:
            attention(*(cupy.array(heads, n, 64) for _ in range(3)), algorithm=algorithm)
        assert 1 <= len(cupy.compiled) <= most
    assert len(cupy.launches) == 2 * len(sizes)
    cupy.compiled.clear()
    attention(*(cupy.array(1, 64, 128) for _ in range(3)), algorithm="fa1")
    assert len(cupy.compiled) == 1 and cupy.opted_in[-1] == cupy.launches[-1][3] > compiler.SHARED_WITHOUT_ASKING


def test_without_lse_its_pointer_is_null(cupy: Recorded) -> None:
    attention(*(cupy.array(16, 64) for _ in range(3)))
    assert cupy.launches[0][2]["L"] is None


def test_standard_is_three_launches(cupy: Recorded) -> None:
    attention(*(cupy.array(3, 100, 64) for _ in range(3)), algorithm="standard")
    assert [grid for (grid,), _, _, _ in cupy.launches] == [3 * 2 * 2, 75, 3 * 2]


def test_nothing_is_launched_for_nothing(cupy: Recorded) -> None:
    assert attention(cupy.array(0, 64), cupy.array(5, 64), cupy.array(5, 64)).shape == (0, 64)
    assert cupy.launches == [] and cupy.compiled == []


def test_masks_reach_the_kernel_with_their_strides(cupy: Recorded) -> None:
    q, k, v = cupy.array(2, 4, 100, 64), cupy.array(2, 2, 200, 64), cupy.array(2, 2, 200, 32)
    mask, bias = cupy.array(100, 200, dtype=bool), cupy.array(4, 1, 200)
    lengths = cupy.array(2, dtype=np.int64)
    out = attention(q, k, v, mask=mask, bias=bias, key_lengths=lengths)
    assert out.shape == (2, 4, 100, 32)
    given = cupy.launches[0][2]
    assert given["mask"] is mask and given["bias"] is bias and given["key_lengths"].dtype == np.int32
    assert [given[f"mask_{axis}"] for axis in ("batch", "head", "row", "col")] == [0, 0, 200, 1]
    assert [given[f"bias_{axis}"] for axis in ("batch", "head", "row", "col")] == [0, 200, 0, 1]


def test_each_call_has_its_own_seed_and_offset_and_one_kernel(cupy: Recorded) -> None:
    """A kept call has neither; without dropout the struct has no such fields."""
    q, k, v = (cupy.array(2, 4, 100, 64) for _ in range(3))
    asked = [(0.1, 2**32 + 5, 0), (0.1, 2**32 + 5, 1), (0.5, 6, 1)]
    for p, seed, offset in asked:
        attention(q, k, v, dropout=p, seed=seed, offset=offset)
    assert len(cupy.compiled) == 1 and len(launcher.KEPT) == 1
    names = ("threshold", "seed_low", "seed_high", "offset", "scale")
    found = [tuple(float(given[f"dropout_{name}"]) for name in names) for _, _, given, _ in cupy.launches]
    tenth = round(0.1 * 2**16)
    scale = float(np.float32(2**16 / (2**16 - tenth)))
    assert found == [(tenth << 16, 5, 1, 0, scale), (tenth << 16, 5, 1, 1, scale), (2**31, 6, 0, 1, 2)]
    attention(q, k, v, seed=3)
    assert len(cupy.compiled) == 2 and not [name for name in cupy.launches[-1][2] if name.startswith("dropout")]
    kept = cupyflash.dropout_mask((2, 4, 100, 100), 0.1, seed=3, dropout_origin=(1, 2, 32, 16), xp=cupy)
    given = cupy.launches[-1][2]
    assert given["kept"] is kept and kept.dtype == bool and given["dropout_pair"] == (1 << 16) + 2
    assert (given["dropout_row"], given["dropout_key"], given["heads"], given["Nk"]) == (8, 8, 4, 100)


def test_packed_sequences_are_one_launch_and_looked_at_only_without_their_longest(cupy: Recorded) -> None:
    q, k, v = cupy.array(40, 4, 64), cupy.array(25, 2, 64), cupy.array(25, 2, 32)
    host = [np.array(bounds, np.int32) for bounds in ([0, 10, 40], [0, 20, 25])]
    on_gpu = [cupy.ndarray(bounds.shape, bounds.dtype, bounds) for bounds in host]
    calls: list[tuple[list[Any], tuple[int, ...], int]] = [
        (host, (), 0),
        (on_gpu, (), 2),
        (on_gpu, (30, 20), 0),
        ([on_gpu[0], host[1]], (30,), 0),
    ]
    for bounds, longest, looks in calls:
        cupy.looked_at = 0
        out, lse = attention_varlen(q, k, v, *bounds, *longest, causal=True, return_lse=True)
        assert cupy.looked_at == looks
        assert out.shape == (40, 4, 32) and lse.shape == (4, 40) and lse.dtype == np.float32
        posed = Problem(2, 4, 2, 30, 20, 64, "float16", causal=True, head_dim_v=32)
        schedule = plan_varlen(posed, Device.named("B200"), lse=True, totals=(40, 25))
        (kernel,) = schedule.kernels()
        assert cupy.launches[-1][:2] == ((kernel.grid,), (kernel.threads,)) and kernel.grid == 4 * (40 // schedule.block_rows + 2)
        given = cupy.launches[-1][2]
        assert [given[name].data.ptr for name in "QKVOL"] == [array.data.ptr for array in (q, k, v, out, lse)]
        assert [given[name] for name in ("Nq", "Nk", "total_q", "heads", "group")] == [30, 20, 40, 4, 2]
        assert [given[f"Q_{axis}"] for axis in ("batch", "head", "row")] == [0, 64, 256]
        assert [given[f"V_{axis}"] for axis in ("batch", "head", "row")] == [0, 32, 64]
        for name, bound in zip(("cu_seqlens_q", "cu_seqlens_k"), host, strict=True):
            assert given[name].dtype == np.int32 and np.array_equal(given[name].host, bound)
    assert len(cupy.compiled) == 1 and "-DVARLEN=1" in cupy.compiled[0][1]


def test_packed_sequences_that_were_looked_at_are_checked(cupy: Recorded) -> None:
    q, k, v = cupy.array(40, 4, 64), cupy.array(25, 2, 64), cupy.array(25, 2, 64)
    wrong, right = (cupy.ndarray((2,), np.dtype(np.int32), np.array([0, n], np.int32)) for n in (39, 25))
    with pytest.raises(ValueError, match="end with 40, the length of q"):
        attention_varlen(q, k, v, wrong, right)
    with pytest.raises(TypeError, match=r"q is NumPy's, .*cu_seqlens_k is CuPy's"):
        numpy = [np.zeros(array.shape, np.float16) for array in (q, k, v)]
        attention_varlen(*numpy, np.array([0, 40], np.int32), right)
    assert cupy.compiled == [] and cupy.allocated == []


def test_arrays_on_another_device_run_there(cupy: Recorded) -> None:
    attention(*(cupy.array(16, 64, device=1) for _ in range(3)))
    attention(*(cupy.array(16, 64) for _ in range(3)))
    assert cupy.devices == [1, 0] and len(cupy.compiled) == 2 and cupy.current == [0]


def test_two_devices_do_not_mix(cupy: Recorded) -> None:
    with pytest.raises(ValueError, match="q is on GPU 0, k is on GPU 1"):
        attention(cupy.array(16, 64), cupy.array(16, 64, device=1), cupy.array(16, 64))


def test_a_cache_directory_that_cannot_be_written_does_not_stop_a_call(cupy: Recorded) -> None:
    cupy.disk_is_full = True
    attention(*(cupy.array(16, 64) for _ in range(3)))
    assert len(cupy.launches) == 1 and "CUPY_CACHE_IN_MEMORY" not in os.environ


def test_a_cache_that_goes_with_the_process_is_said(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_not_kept", [OSError(13, "Permission denied")])
    first_use._say_unusable.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"cannot be kept in .* \(Permission denied\)"):
        attention(*(cupy.array(16, 64) for _ in range(3)))
    assert len(cupy.launches) == 1


def test_a_gpu_too_old_is_refused(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    old = dataclasses.replace(Device.named("T4"), name="V100", compute_capability=(7, 0))
    monkeypatch.setattr("cupyflash.launch.dispatch.current_gpu", lambda ordinal: old)
    with pytest.raises(ValueError, match=r"needs compute capability 7.5 or later; V100 has 7.0"):
        attention(*(cupy.array(16, 64) for _ in range(3)))
    assert cupy.compiled == [] and cupy.allocated == []


def test_threads_compile_once(cupy: Recorded) -> None:
    cupy.compile_seconds = 0.05
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: attention(*(cupy.array(16, 64) for _ in range(3))), range(8)))
    assert len(cupy.compiled) == 1 and len(cupy.launches) == 8


def test_out_must_not_overlap_an_input(cupy: Recorded) -> None:
    q, k, v = (cupy.array(16, 64) for _ in range(3))
    with pytest.raises(ValueError, match="out must not overlap v"):
        attention(q, k, v, out=v)


def test_numpy_and_cupy_do_not_mix(cupy: Recorded) -> None:
    with pytest.raises(TypeError, match="q is CuPy's, k is NumPy's"):
        cupyflash.attention(cupy.array(16, 64), np.zeros((16, 64), np.float16), cupy.array(16, 64))


def test_the_options_change_with_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = plan(Problem(1, 1, 1, 16, 16, 64, "float16"), Device.named("B200")).kernels()[0]
    before = compiler.options(kernel)
    monkeypatch.setattr(compiler.kernels_cu, "fingerprint", lambda: "0" * 16)
    assert compiler.options(kernel) != before
