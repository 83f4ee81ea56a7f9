"""The ladders of published times: every file is well-formed, and a malformed one is refused by file and field."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.launch.nvrtc import compile_to_cubin
from cupyflash.sim.clock import sass
from cupyflash.sim.clock.whole import RULES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
published, predicted, build, nvrtc, scores = (
    importlib.import_module(f"published{name}") for name in ("", ".predicted", ".build", ".nvrtc", ".scores")
)
LADDERS = published.ladders()
CATALOGUE = {device.name: device for device in Device.catalogue()}


def test_every_file_is_read_and_the_two_guides_are_those_of_the_rules() -> None:
    assert [ladder.name for ladder in LADDERS] == sorted(path.stem for path in published.FOLDER.glob("*.toml"))
    assert {ladder.name for ladder in LADDERS if ladder.use == "guide"} == {"sgemm_a6000", "mma_a100"}
    count = Counter(step.group for ladder in LADDERS for step in ladder.steps)
    assert count["without roles"] >= 80 and count["Hopper"] >= 40


def test_a_device_is_in_the_catalogue_or_missing_there_but_not_both() -> None:
    assert not set(CATALOGUE) & set(published.MISSING)
    assert set(published.MISSING) <= {ladder.device for ladder in LADDERS}


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.name)
def test_a_ladder_fits_its_device(ladder: Any) -> None:
    """The architecture is the device's own or an older one of its generation; no rate is above the peak or the memory's."""
    major, minor = capability(ladder.device)
    architecture = int(ladder.compiler.architecture.removeprefix("sm_").removesuffix("a"))
    assert 10 * major <= architecture <= 10 * major + minor
    device = CATALOGUE.get(ladder.device)
    for step in ladder.steps:
        assert 1e-6 < step.seconds < 1
        if device is not None and ladder.counted == "FLOP":
            assert step.work / step.seconds < 1.05 * max(device.tensor_peak.values()), step.name
        if device is not None and ladder.unit == "GB/s":
            assert step.work / step.seconds < device.hbm_bandwidth, step.name
        for launch in step.launches:
            assert launch.shared is None or device is None or launch.shared <= device.sram_per_block, step.name


def capability(name: str) -> tuple[int, int]:
    return CATALOGUE[name].compute_capability if name in CATALOGUE else published.MISSING[name]


GOOD = """\
title = "a product"
group = "without roles"
use = "compared"
repository = "https://github.com/someone/kernels"
commit = "0123456789abcdef0123456789abcdef01234567"
figures = "README.md"
device = "RTX 4090"
unit = "GFLOP/s"
timing = "events"

[clock]
mhz = [2235, 2520]
source = "a data sheet"

[compiler]
version = "nvcc 12.4"
architecture = "sm_89"
needs = "CUDA's headers"

[every]
work = 2000000
shared = 0

[[step]]
name = "one"
figure = 1000.0
file = "one.cu"
kernel = "one<32>"
grid = [8, 1, 1]
block = [32, 32, 1]
arguments = ["int 4", "pointer to map float32[64, 64] box [32, 32] swizzle 128", ["float16[4]", "null"]]

[[step]]
name = "two"
figure = 500.0
file = "two.cu"
block = [64, 1, 1]
arguments = []

[[step.launch]]
kernel = "first"
grid = [2, 1, 1]

[[step.launch]]
kernel = "second"
grid = [4, 1, 1]
shared = 512
"""


def test_a_step_takes_from_every_and_a_launch_from_its_step(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    ladder = published.read(tmp_path / "good.toml")
    one, two = ladder.steps
    assert ladder.buildable and ladder.counted == "FLOP" and (one.seconds, two.seconds) == (2e-6, 4e-6)
    assert one.commit == two.commit == "0123456789abcdef0123456789abcdef01234567"
    assert one.launches[0].arguments[2] == ("float16[4]", "null") and one.launches[0].cluster == (1, 1, 1)
    assert [(launch.kernel, launch.shared, launch.block) for launch in two.launches] == [
        ("first", 0, (64, 1, 1)),
        ("second", 512, (64, 1, 1)),
    ]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('commit = "01234567', 'commit = "1234567', "commit is"),
        ('device = "RTX 4090"', 'device = "RTX 4091"', "device is 'RTX 4091', must be one of"),
        ('unit = "GFLOP/s"', 'unit = "FLOP/s"', "unit is 'FLOP/s'"),
        ('unit = "GFLOP/s"', 'unit = "ms"', "counted is None, must be given"),
        ("figure = 1000.0", "figure = -1000.0", "step 'one': figure is -1000.0, must be a number above 0"),
        ("figure = 1000.0", "", "step 'one': figure is None, must be given"),
        ("work = 2000000", "work = 0", "work is 0"),
        ("mhz = [2235, 2520]", "mhz = [2520, 2235]", "clock: mhz is"),
        ("block = [32, 32, 1]", "block = [64, 32, 1]", "at most 1,024 threads"),
        ("grid = [8, 1, 1]", "grid = [8, 1, 1]\ncluster = [3, 1, 1]", "cluster is [3, 1, 1], must be divisors of the grid"),
        ("shared = 0\n", "", "step 'one': shared is None, must be given"),
        ('"int 4"', '"integer 4"', "arguments is 'integer 4'"),
        ('name = "two"', 'name = "one"', "names differ"),
        ('timing = "events"', 'timing = "events"\nspeed = 3', "speed is 3, must be absent"),
        ('repository = "https', 'repository = "http', "repository is"),
        ('version = "nvcc 12.4"', 'version = "nvcc 12.4"\napart = 1', "apart is 1, must be true or false"),
        ("[clock]", "[clock", "not TOML"),
    ],
)
def test_a_malformed_file_is_refused_by_file_and_field(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert GOOD.count(before) == 1
    (tmp_path / "bad.toml").write_text(GOOD.replace(before, after))
    with pytest.raises(ValueError) as refusal:
        published.read(tmp_path / "bad.toml")
    assert str(refusal.value).startswith("bad.toml: ") and words in str(refusal.value)


def test_the_command_lists_ladders_and_steps(capsys: pytest.CaptureFixture[str]) -> None:
    run = subprocess.run([sys.executable, ROOT / "benchmarks" / "published"], capture_output=True, text=True, check=True)
    assert all(ladder.name in run.stdout and ladder.title in run.stdout for ladder in LADDERS)
    command = importlib.import_module("published.__main__")
    assert command.main(["mma_a100"]) == 0
    listed = capsys.readouterr().out
    assert all(step.name in listed for ladder in LADDERS if ladder.name == "mma_a100" for step in ladder.steps)
    with pytest.raises(SystemExit):
        command.main(["mma_a101"])
    assert "no ladder 'mma_a101'" in capsys.readouterr().err


def test_arguments_are_laid_out_as_parameters() -> None:
    found = predicted.bound(("int 7", "float32[3, 5]", ("half 0.5", "null"), "size_t 9"))
    assert len(found.data) == 40 and [tensor.at for tensor in found.tensors] == [8] and found.tensors[0].array.nbytes == 60
    assert np.frombuffer(found.data, "i4")[0] == 7 and np.frombuffer(found.data[16:18], "f2")[0] == 0.5 and found.data[32] == 9
    mapped = predicted.bound(("int 7", "map float16[8, 8] box [8, 8] swizzle 0"))
    assert len(mapped.data) == 256 and mapped.tensors[0].array.nbytes == 128
    assert predicted.strides_of((64, 100, 2, 16, 3), 2) == [256, 128, 25600, 409600]  # (3, 16, 100, 128), in columns of 64


@pytest.mark.skipif(sass.disassembler() is None or not shutil.which("c++filt"), reason="needs NVIDIA's disassemblers and c++filt")
def test_a_step_s_kernel_is_found_and_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder = next(each for each in LADDERS if each.name == "sgemm_a6000")
    step = ladder.steps[0]
    parameters = "int m, int n, int k, float a, float* A, float* B, float b, float* C"
    source = f"__global__ void {step.launches[0].kernel}({parameters}) {{ C[threadIdx.x] = a * A[0]; }}"
    cubin = build.cubin_of(tmp_path, ladder, step)
    cubin.parent.mkdir(parents=True)
    cubin.write_bytes(compile_to_cubin(source, ("-arch=sm_86",), "k.cu")[0])
    tiny = replace(
        step,
        launches=(
            replace(
                step.launches[0],
                grid=(4, 1, 1),
                arguments=("int 1", "int 1", "int 1", "float 1", *["float32[1024]"] * 2, "float 1", "float32[1024]"),
            ),
        ),
    )
    found = predicted.predict(ladder, tiny, predicted.clocks_of(ladder, tiny, tmp_path))
    assert 0 < found.least <= found.predicted <= found.most and found.predicted < found.lowest < 1e-4
    assert found.measured == step.seconds and found.kind in scores.CLASSES
    with pytest.raises(ValueError, match="has no kernel missing"):
        predicted.kernel(cubin, "missing")


def result(measured: float, predicted: float, lowest: float | None = None, kind: str = "memory") -> Any:
    return scores.Result(measured, predicted, lowest or predicted, 0.9 * predicted, 1.1 * predicted, kind, "DRAM")


HOST_AND_DEVICE = """\
#include <iostream>
#include <cstdint>
#define TWICE(x) \\
  (2 * (x))
struct Pair { uint32_t a, b; };  // not of the host
constexpr int LEAST{3};
void check(cudaError_t error) { std::cout << error; }
__device__ uint32_t sum(Pair pair) { return pair.a + pair.b; }
template <int N> __global__ void one(uint32_t* y) { y[threadIdx.x] = sum({N, TWICE(LEAST)}); }
template <int N> void launch_one(uint32_t* y) { one<N><<<1, 32>>>(y); check(cudaGetLastError()); }
template void launch_one<32>(uint32_t* y);
"""


def test_a_source_is_built_by_another_nvrtc_without_its_host_s_functions(tmp_path: Path) -> None:
    kept = nvrtc.device_code(HOST_AND_DEVICE)
    assert [word in kept for word in ("TWICE(x)", "Pair {", "LEAST{3}", "sum(Pair", "void one(")] == [True] * 5
    assert [word in kept for word in ("check", "launch_one", "of the host")] == [False] * 3
    wheels = importlib.util.find_spec("nvidia")
    folder = Path(next(iter(wheels.submodule_search_locations or ()))) if wheels else Path()
    if not list(folder.rglob("libnvrtc.so*")):
        pytest.skip("NVRTC is not from a wheel")
    (tmp_path / "good.toml").write_text(GOOD.replace('needs = "CUDA', 'options = ["-O3", "-std=c++14"]\nneeds = "CUDA'))
    (tmp_path / "one.cu").write_text(HOST_AND_DEVICE)
    ladder, target = published.read(tmp_path / "good.toml"), tmp_path / "made" / "one.cubin"
    assert build.build(tmp_path / "one.cu", target, ladder, ["one<32>"], [], folder) == ""
    assert list(sass.read(target.read_bytes()).kernels) == ["_Z3oneILi32EEvPj"]
    assert "two<32>" in build.build(tmp_path / "one.cu", target, ladder, ["two<32>"], [], folder)


def test_figures_of_a_compiler_that_cannot_be_had_are_in_no_group_s_score() -> None:
    results = {name: {"1 naive, 5120": result(1.0, 1.5)} for name in ("sgemm_steps_3090",)}
    results["sgemm_a6000"] = {"1: Naive": result(1.0, 1.1)}
    assert scores.of_class(results, "memory") == [list(results["sgemm_a6000"].values())]


def test_scores_are_absolute_within_the_rates_and_after_one_factor() -> None:
    slow = [result(1.0, 1.5), result(2.0, 3.0), result(4.0, 6.0)]
    assert scores.Score([slow]).cells() == ["3", "50.0 %, 0", "50.0 %, 0", "0.0 %, 3", "1.00", "+50.0 %", "20.0 %"]
    # Between the predictions at both rates there is no error, beyond them that of the nearer one.
    assert [result(1.2, 1.0, 1.5).inside, result(2.0, 1.0, 1.5).inside, result(0.5, 1.0, 1.5).inside] == [1.0, 0.75, 2.0]
    other = [result(1.0, 2.0), result(1.2, 1.0), result(1.02, 9.0)]  # 1.0 and 1.02 have no order
    assert scores.Score([other]).tau == -1 and scores.Score([slow, other]).tau == pytest.approx(1 / 5)
    assert scores.Score([[slow[0]]]).tau is None


def test_figures_by_older_rules_of_the_clock_are_named() -> None:
    new, old = result(1.0, 1.1), result(1.0, 1.2)
    new = replace(new, rules=RULES)
    results = {"a": {"1": new, "2": old}, "b": {"3": old}, "c": {"4": new}}
    assert scores.stale(results) == "2 of 4 figures are by older rules of the clock: a (2), b (all)"
    assert scores.stale({"c": {"4": new}}).endswith(": none")


def test_the_table_and_the_known_errors_are_those_of_the_results() -> None:
    results = scores.compared()
    assert len([step for steps in results.values() for step in steps]) >= 80
    for name, steps in results.items():
        ladder = next(each for each in LADDERS if each.name == name)
        measured = {step.name: step.seconds for step in ladder.steps}
        assert all(one.measured == measured[step] and one.least <= one.predicted <= one.most for step, one in steps.items())
    assert scores.page(scores.PAGE.read_text(), results) == scores.PAGE.read_text()
    assert scores.errors(results) == scores.ERRORS.read_text()
