"""The kernels' needs on a multiprocessor: occupancy by CUDA's own rules, ptxas' account read and compiled once."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import pickle
import random
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.launch import compiler, params, resources
from cupyflash.launch.cubins import CompiledCubin, Program, compiled
from cupyflash.launch.nvrtc import CompileError, compile_to_cubin, header_directories
from cupyflash.launch.resources import Resources, parse_account
from cupyflash.multiprocessor import Multiprocessor
from cupyflash.schedules import Kernel
from cupyflash.sim.cli import main
from suites import sample

SPILLS = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
  __shared__ float s[100];
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n + threadIdx.x];
  s[threadIdx.x % 100] = a[3];
  __syncthreads();
  for (int j = 0; j < 64; j++)
    for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i + 1) % 64] + a[i * 7 % 64] + s[j];
  for (int i = 0; i < 64; i++) x[i * n + threadIdx.x] = a[i];
}
extern "C" __global__ void clean(float* x) { x[threadIdx.x] *= 2; }
"""


def needs(threads: int, registers: int, shared: int) -> Resources:
    return Resources("kernel", threads, registers, 0, 0, shared)


@pytest.mark.parametrize(
    ("device", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        ("A100-40GB", 128, 32, 0, 16, ("threads", "registers")),  # 2048 threads; 65,536 registers
        ("A100-40GB", 32, 16, 0, 32, ("blocks",)),
        ("RTX 3090", 32, 16, 0, 16, ("blocks",)),
        ("L4", 32, 16, 0, 24, ("blocks",)),
        ("RTX 5090", 32, 16, 0, 24, ("blocks",)),
        ("T4", 32, 16, 0, 16, ("blocks",)),
        ("A100-40GB", 128, 170, 101_376, 1, ("shared memory",)),  # 101,376 + 1,024 of 167,936
        ("H100-SXM", 128, 170, 101_376, 2, ("registers", "shared memory")),
        ("T4", 128, 64, 32_768, 2, ("shared memory",)),  # nothing reserved on 7.5
        ("A100-40GB", 128, 64, 40_960, 4, ("shared memory",)),  # the reserve makes 4 of the 4.1 that fit
        ("A100-40GB", 1024, 65, 0, 0, ("registers",)),  # 72 x 32 x 32 registers are more than there are
        ("A100-40GB", 160, 254, 0, 1, ("registers",)),  # 8 warps of 256 x 32 registers, 5 a block
    ],
)
def test_occupancy(device: str, threads: int, registers: int, shared: int, blocks: int, limited_by: tuple[str, ...]) -> None:
    occupancy = needs(threads, registers, shared).occupancy(Device.named(device))
    assert (occupancy.blocks, occupancy.limited_by) == (blocks, limited_by)
    assert occupancy.fraction == blocks * threads / Multiprocessor.of(Device.named(device).compute_capability).threads


def test_a_block_that_needs_more_than_it_may_have_does_not_run() -> None:
    assert needs(128, 32, 100_000).occupancy(Device.named("T4")).limits["shared memory"] == 0
    assert needs(1025, 16, 0).occupancy(Device.named("A100-40GB")).blocks == 0


def test_an_unknown_compute_capability_is_refused_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"compute_capability = 6\.1: occupancy is known for 7\.5, 8\.0"):
        Multiprocessor.of((6, 1))
    with pytest.raises(ValueError, match="occupancy is known for"):
        needs(128, 32, 0).occupancy(replace(Device.named("T4"), compute_capability=(6, 1)))


HARNESS = """
#include "cuda_occupancy.h"
int blocks(int major, int minor, int max_threads, int registers_per_sm, int sram_block, int sram_sm, int reserved,
           int threads, int registers, int shared) {
  cudaOccDeviceProp device = {major, minor, 1024, max_threads, registers_per_sm, registers_per_sm, 32, 48 * 1024, sram_sm,
                              1, sram_block, reserved};
  cudaOccFuncAttributes kernel = {INT_MAX, registers, 0, PARTITIONED_GC_OFF, FUNC_SHMEM_LIMIT_OPTIN, shared, 1, 0};
  cudaOccDeviceState state = {0};
  state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
  cudaOccResult result;
  cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
  return error == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : -error;
}
"""


@pytest.fixture(scope="module")
def cuda_occupancy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    """CUDA's own occupancy calculator, from the header that comes with it."""
    include = next((path for path in header_directories() if (Path(path) / "cuda_occupancy.h").exists()), None)
    compiler = shutil.which("cc")
    if include is None or compiler is None:
        pytest.skip("needs cuda_occupancy.h and a C compiler")
    folder = tmp_path_factory.mktemp("occupancy")
    (folder / "harness.c").write_text(HARNESS)
    command = [compiler, "-std=gnu99", "-w", "-shared", "-fPIC", "-I", include, "harness.c", "-o", "harness.so"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "harness.so")).blocks  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", Device.catalogue(), ids=lambda device: device.name)
def test_occupancy_is_cuda_s(device: Device, cuda_occupancy: Callable[..., int]) -> None:
    random.seed(device.name)
    most = Multiprocessor.of(device.compute_capability)
    figures = (most.threads, device.registers_per_sm, device.sram_per_block, device.sram_per_sm, most.shared_reserved)
    for _ in range(2000):
        threads, registers = random.randint(1, 1024), random.randint(1, 255)
        shared = random.choice([0, random.randint(0, 4096), random.randint(0, device.sram_per_block)])
        expected = cuda_occupancy(*device.compute_capability, *figures, threads, registers, shared)
        assert needs(threads, registers, shared).occupancy(device).blocks == expected, (threads, registers, shared)


def test_spills_stack_and_static_shared_memory_are_seen() -> None:
    pytest.importorskip("cupy")
    accounts = parse_account(compile_to_cubin(SPILLS, ("-arch=sm_80",), "spills.cu")[1])
    figures, static = accounts["spills"]
    assert figures["stack"] > 0 and figures["stores"] > 0 and figures["loads"] > 0 and static == 400
    figures, static = accounts["clean"]
    assert figures["stack"] == figures["stores"] == figures["loads"] == static == 0 < figures["registers"]


@pytest.mark.parametrize("log", ["", "ptxas info : Compiling entry function 'f' for 'sm_80'\nUsed 12 registers"])
def test_an_account_that_cannot_be_read_is_an_error(log: str) -> None:
    with pytest.raises(RuntimeError, match="account"):
        parse_account(log)


def test_kernels_of_one_file_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    device, calls = Device.named("H100-SXM"), []

    def counted(program: Program) -> CompiledCubin:
        calls.append(program)
        return compiled(program)

    monkeypatch.setattr(resources, "compiled", counted)
    kernels = plan(Problem(1, 1, 1, 64, 64, 64, "float16"), device, "standard").kernels()
    found = resources.resources(kernels, device.compute_capability)
    assert len(calls) == 1 and [each.name for each in found] == [kernel.name for kernel in kernels]
    for each, kernel in zip(found, kernels, strict=True):
        assert each.clean and each.shared_bytes == kernel.shared_bytes and 16 <= each.registers <= 255
        assert each.report(device)["blocks_per_sm"] == each.occupancy(device).blocks > 0


def inspect(*options: str) -> Result:
    return CliRunner().invoke(main, ["inspect", *options])


@pytest.mark.parametrize(
    ("device", "algorithm"),
    sample(product(["T4", "A100-40GB", "RTX 5090"], ["fa1", "standard"]), [("T4", "standard")]),
)
def test_inspect_shows_each_kernel(algorithm: str, device: str) -> None:
    pytest.importorskip("cupy")
    result = inspect("--algorithm", algorithm, "--device", device, "--causal", "--json")
    assert result.exit_code == 0, result.stderr
    report, chip = json.loads(result.stdout), Device.named(device)
    kernels = plan(Problem(1, 1, 1, 1024, 1024, 64, "float16", causal=True), chip, algorithm).kernels()
    found = resources.resources(kernels, chip.compute_capability)
    assert len(report["kernels"]) == len(kernels)
    for row, kernel, needs in zip(report["kernels"], kernels, found, strict=True):
        occupancy = needs.occupancy(chip)
        assert (row["name"], row["threads"], row["grid"]) == (kernel.name, kernel.threads, kernel.grid)
        assert (row["registers"], row["shared_bytes"]) == (needs.registers, kernel.shared_bytes)
        assert (row["stack_bytes"], row["spill_bytes"]) == (0, 0)
        assert (row["blocks_per_sm"], row["occupancy"]) == (occupancy.blocks, occupancy.fraction)
        assert row["limited_by"] == list(occupancy.limited_by) and 0 < occupancy.fraction <= 1


@pytest.mark.wide
@pytest.mark.parametrize("deterministic", [False, True])
def test_inspect_knows_the_backward(deterministic: bool) -> None:
    result = inspect("--backward", "--algorithm", "fa2", "--causal", "--json", *(["--deterministic"] if deterministic else []))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["backward"] and report["deterministic"] is deterministic
    names = [row["name"] for row in report["kernels"]]
    last = "fa2_backward_queries" if deterministic else "fa2_backward_finish"
    assert names == ["row_bases", "fa2_backward_rows", "fa2_backward", last]
    assert all(row["registers"] > 0 and row["blocks_per_sm"] > 0 and row["spill_bytes"] == 0 for row in report["kernels"])


def test_inspect_as_text() -> None:
    pytest.importorskip("cupy")
    result = inspect("--algorithm", "standard", "--head-dim", "33")
    assert result.exit_code == 0, result.stderr
    for word in ("standard_scores", "standard_softmax", "standard_values", "registers", "occupancy", "limited by", "sm_80"):
        assert word in result.stdout
    assert "local memory" not in result.stdout


def test_inspect_shows_what_ptxas_remarked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    remark = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function '{}'"

    def compiled_with(program: Program) -> CompiledCubin:
        made = compiled(program)
        said = [remark.format(name) for name in ("standard_values", "another", "standard_values")]
        return CompiledCubin(made.code, "\n".join([*said, made.log]))

    monkeypatch.setattr(resources, "compiled", compiled_with)
    arguments = "--algorithm", "standard", "--head-dim", "33"
    assert f"wait: {remark.format('standard_values')}" in " ".join(inspect(*arguments).stdout.split())
    kernels = {row["name"]: row["remarks"] for row in json.loads(inspect(*arguments, "--json").stdout)["kernels"]}
    assert [len(said) for said in kernels.values()] == [1, 1, 3] and list(kernels)[2] == "standard_values"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "T4", "--dtype", "bfloat16"], "compute capability 8.0"),
        (["--head-dim", "0"], "head_dim"),
        (["--sram", "1KB"], "needs at least 6,144 bytes"),
    ],
)
def test_inspect_tells_what_is_wrong_in_one_line(options: list[str], says: str) -> None:
    result = inspect(*options)
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1 and result.stdout == ""


@pytest.fixture(scope="module")
def gate() -> types.ModuleType:
    """`.ci/compile_gate.py`, which is no package."""
    path = Path(__file__).parents[1] / ".ci" / "compile_gate.py"
    spec = importlib.util.spec_from_file_location("compile_gate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_gate"] = module  # so that its classes can be found by their names
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def jobs(gate: types.ModuleType) -> list[Any]:
    return gate.jobs()  # type: ignore[no-any-return]


def test_the_gate_compiles_every_kernel_dtype_and_head_dimension_on_every_chip(gate: types.ModuleType, jobs: list[Any]) -> None:
    seen: dict[str, set[tuple[object, ...]]] = {}
    for job in jobs:
        constants = dict(job.kernels[0].constants)
        for kernel in job.kernels:
            seen.setdefault(kernel.name, set()).add((job.device.sm, constants["ELEMENT"], constants.get("HEAD_DIM")))
    assert {"fa1_forward", "standard_scores", "standard_softmax", "standard_values", "softmax_safe", "softmax_online"} <= set(seen)
    architectures = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}
    backward = {name: seen.pop(name) for name in list(seen) if "backward" in name or name == "row_bases"}
    assert {"fa1_backward", "fa2_backward", "fa2_backward_queries", "row_bases"} <= set(backward)
    assert {sm for found in backward.values() for sm, _, _ in found} == {"sm_75", "sm_80", "sm_90", "sm_120"}
    hopper = seen.pop("fa3_forward")
    assert {(sm, element) for sm, element, _ in hopper} == {("sm_90", "__half"), ("sm_90", "__nv_bfloat16")}
    assert {64, 96, 128, 192, 256} <= {d for _, _, d in hopper}
    assert {sm for sm, _, _ in seen.pop("fa3_queue")} == {"sm_90"}  # which reads no elements
    of_decoding = seen.pop("decode") | seen.pop("merge_splits")
    assert {sm for sm, _, _ in of_decoding} == architectures
    for element in ("__half", "__nv_bfloat16", "float"):
        assert {d for _, of, d in of_decoding if of == element} == {64, 96, 128, 256}
    assert {sm for sm, _, _ in seen.pop("mask_tiles")} == architectures  # which reads no elements
    alike = {"sm_86", "sm_89"}  # between them
    for name, found in seen.items():
        assert {sm for sm, _, _ in found} == architectures
        for sm in architectures:
            elements = {element for at, element, _ in found if at == sm}
            assert elements == {"__half", "float"} | ({"__nv_bfloat16"} if sm != "sm_75" else set())
        if name.startswith(("softmax", "add_state")):
            continue
        for group in ({"sm_75"}, {"sm_80"}, alike, {"sm_90"}, {"sm_100"}, {"sm_120"}):
            where = group if name == "fa2_forward" else architectures
            assert {d for sm, element, d in found if sm in where and element == "float"} == set(gate.HEAD_DIMS)


def test_the_gate_compiles_decoding_for_every_number_of_rows_and_what_a_call_may_bring(jobs: list[Any]) -> None:
    constants = [dict(job.kernels[0].constants) for job in jobs if job.kernels[0].name == "decode"]
    assert 60 <= len(constants) <= 90
    found = {name: {each[name] for each in constants} for name in constants[0]}
    assert found["PACK"] == {1, 4, 8, 16} and found["ROW_WARPS"] == {1, 2, 4, 8} and found["ROW_TILES"] == {1, 2}
    assert found["PAGE"] >= {0, 16} and len(found["PAGE"]) > 2
    assert all(found[name] == {0, 1} for name in ("APPEND", "PADDED", "TREE", "SCALE_FIRST", "CAUSAL", "WINDOW", "SINKS"))
    assert {each.get("SCORE", 0) for each in constants} == {0, 1}


@pytest.mark.parametrize("spills", [0, 8])
def test_the_gate_fails_on_a_spill(
    gate: types.ModuleType,
    jobs: list[Any],
    spills: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    job = next(job for job in jobs if job.device.name == "A10" and job.kernels[0].name == "fa1_forward")
    needs = Resources("fa1_forward", 128, 255, spills, spills, 1000)
    accounts = gate.Accounts
    monkeypatch.setattr(gate, "jobs", lambda: [job])
    monkeypatch.setattr(gate, "compiled_everywhere", lambda jobs, processes, nvrtc: [(needs,) for _ in jobs])
    monkeypatch.setattr(gate, "Accounts", lambda version: accounts(version, tmp_path))
    assert gate.main(["--json", str(tmp_path / "gate.json")]) == (1 if spills else 0)
    out = capsys.readouterr().out
    assert ("8 bytes of spills" in out) == bool(spills) and "sm_86" in out
    assert json.loads((tmp_path / "gate.json").read_text())[0]["registers"] == 255


WGMMA = r"""extern "C" __global__ void k(float* y, unsigned long long a) {
  float c[4] = {};
  for (int i = 0; i < 4; i++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 2; k++) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a + k));
      if (SERIAL) c[1] += 1.f;
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) :: "memory");
  }
  if (HMMA) asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, "
                         "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(int(a)));
  for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = c[i];
}"""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        pytest.param("", "", marks=pytest.mark.wide),
        ("SERIAL", "(C75"),
        pytest.param("HMMA", "1 HMMA beside 8 HGMMA", marks=pytest.mark.wide),
    ],
)
def test_the_gate_fails_where_tensor_cores_wait(
    gate: types.ModuleType,
    jobs: list[Any],
    fault: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """And does not keep such a program, so that it fails again."""
    pytest.importorskip("cupy")
    if fault == "HMMA" and not gate.sass.disassembler():
        pytest.skip("needs cuobjdump")
    (tmp_path / "k.cu").write_text(WGMMA)
    constants = tuple((name, int(name == fault)) for name in ("SERIAL", "HMMA"))
    job = next(job for job in jobs if job.device.name == "H100-SXM" and len(job.kernels) == 1)
    kernel = replace(job.kernels[0], source=str(tmp_path / "k.cu"), name="k", constants=constants, accelerated=True)
    job, accounts = replace(job, kernels=(kernel,)), gate.Accounts
    monkeypatch.setattr(gate, "jobs", lambda: [job])
    monkeypatch.setattr(gate, "Accounts", lambda version: accounts(version, tmp_path))
    monkeypatch.setattr(gate, "compiled_everywhere", lambda jobs, *_: [gate.compiled(each) for each in jobs])
    assert gate.main(["--write"]) == (1 if fault else 0)
    out = capsys.readouterr().out
    assert says in out and ("sm_90 k, " in out) == bool(fault)
    assert (accounts(gate.nvrtc_version(), tmp_path).find(job.program) is None) == bool(fault)


def test_the_gate_compiles_what_has_no_account_and_a_sample_of_the_rest(
    gate: types.ModuleType,
    jobs: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    pytest.importorskip("cupy")
    accounts, compiled = gate.Accounts, []
    some = [job for job in jobs if job.device.name == "A10" and job.kernels[0].name == "fa1_forward"][:6]
    registers = dict.fromkeys(some, 100)

    def compile_some(jobs: list[Any], processes: object, nvrtc: object) -> list[tuple[Resources, ...]]:
        compiled.append(jobs)
        return [
            (Resources("fa1_forward", job.kernels[0].threads, registers[job], 0, 0, 9 + job.kernels[0].shared_bytes),)
            for job in jobs
        ]

    monkeypatch.setattr(gate, "jobs", lambda: some)
    monkeypatch.setattr(gate, "compiled_everywhere", compile_some)
    monkeypatch.setattr(gate, "Accounts", lambda version: accounts(version, tmp_path))
    monkeypatch.setattr(gate, "DRAWN", 4)
    monkeypatch.delenv("CUPYFLASH_TEST_DRAW", raising=False)
    assert gate.main([]) == 0 and compiled.pop() == some  # none is known, and nothing was kept
    assert gate.main(["--write"]) == 0 and compiled.pop() == some
    assert gate.main(["--json", str(tmp_path / "gate.json")]) == 0 and compiled.pop() == [some[0], some[4]]
    assert [row["registers"] for row in json.loads((tmp_path / "gate.json").read_text())] == [100] * 2
    drawn: set[Any] = set()
    for draw in "abcdefgh":
        monkeypatch.setenv("CUPYFLASH_TEST_DRAW", draw)
        assert gate.main([]) == 0
        drawn.update(compiled.pop())
    assert drawn == set(some)
    monkeypatch.delenv("CUPYFLASH_TEST_DRAW")
    registers[some[4]] = 101
    assert gate.main([]) == 1 and "not as it was kept" in capsys.readouterr().out
    assert gate.main(["--write"]) == 1 and gate.main([]) == 0
    (file,) = tmp_path.glob("*.txt")
    (line,) = file.read_text().splitlines()
    assert line.startswith("sm_86 fa1_forward.cu: ") and line.count("=100") == 5 and line.count("=101") == 1


def a_program(jobs: list[Any], source: str) -> Any:
    return next(job for job in jobs if job.kernels[0].source == source).program


def with_fields(program: Any, *fields: params.Field, place: int | None = None) -> Any:
    """A program whose struct has further fields, behind the others or at a place."""

    def more(kernel: Kernel) -> Kernel:
        own = kernel.params.fields
        at = len(own) if place is None else place
        return replace(kernel, params=params.Params((*own[:at], *fields, *own[at:])))

    return program._replace(kernels=tuple(map(more, program.kernels)))


def with_constants(program: Any, *constants: tuple[str, int]) -> Any:
    return program._replace(kernels=tuple(replace(each, constants=(*each.constants, *constants)) for each in program.kernels))


TEMPERATURE = params.Field("temperature", "const float", params.POINTER)


def test_an_account_is_of_what_the_machine_code_depends_on(
    gate: types.ModuleType, jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another digest for another architecture, for a constant, a field's place or a text that the program names or includes."""
    accounts = sys.modules["accounts"]
    program = a_program(jobs, "fa2_forward.cu")
    digest, source = accounts.digest(program), accounts.kernels_cu.source
    others = {
        accounts.digest(program._replace(capability=(8, 6))),
        accounts.digest(with_constants(program, ("SINKS", 2))),
        accounts.digest(with_fields(program, TEMPERATURE, place=0)),
    }

    def with_text(file: str, text: str) -> str:
        accounts._text.cache_clear()
        monkeypatch.setattr(accounts.kernels_cu, "source", lambda name: source(name) + text * (name == file))
        return accounts.digest(program)  # type: ignore[no-any-return]

    others |= {with_text(file, "\n#define MORE 1\n") for file in ("fa2_forward.cu", "mma.cuh")}
    others.add(with_text("mma.cuh", "const int temperature = 0;"))
    assert digest not in others and len(others) == 6
    assert with_text("fa1_forward.cu", "\n#define MORE 1\n") == digest
    assert with_text("mma.cuh", "\n  // a comment\n/* and\nanother */ \n") == digest
    accounts._text.cache_clear()


# A program of each way in which a kernel takes its struct
SOURCES = ("fa1_forward", "standard", "fa2_forward", "decode", "fa3_forward", "fa2_backward", "row_bases", "softmax")


@pytest.mark.parametrize("source", ["mask_tiles", *(pytest.param(each, marks=pytest.mark.wide) for each in SOURCES)])
def test_what_a_text_does_not_name_is_not_in_its_code(gate: types.ModuleType, jobs: list[Any], source: str) -> None:
    """A field behind the others and a constant that nothing names change no digest and no instruction of the PTX."""
    pytest.importorskip("cupy")
    digest, program = sys.modules["accounts"].digest, a_program(jobs, f"{source}.cu")
    more = with_constants(with_fields(program, TEMPERATURE), ("TEMPERATURE", 1))
    assert digest(more) == digest(program)

    def instructions(of: Any) -> Counter[str]:
        """Not in their order, in which copies of registers may differ."""
        return Counter(re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.:]+)", compiler.ptx(of.kernels[0], of.capability), re.MULTILINE))

    assert instructions(more) == instructions(program)


def test_what_does_not_compile_is_told_from_one_process_to_another() -> None:
    error = pickle.loads(pickle.dumps(CompileError("kernel.cu", "line 1")))
    assert isinstance(error, CompileError) and error.log == "line 1" and str(error) == str(CompileError("kernel.cu", "line 1"))


def test_another_nvrtc_is_called_as_cupy_s_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is the same one, by its file."""
    binding = pytest.importorskip("cupy.cuda").nvrtc
    wheels = importlib.util.find_spec("nvidia")
    folder = Path(next(iter(wheels.submodule_search_locations or ()))) if wheels else Path()
    if not list(folder.rglob("libnvrtc.so*")):
        pytest.skip("NVRTC is not from a wheel")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / ".ci"))
    other = importlib.import_module("other_nvrtc").OtherNvrtc(folder)
    program = other.createProgram(SPILLS, "spills.cu", [], [])
    other.compileProgram(program, ["-arch=sm_80", "--ptxas-options=-v"])
    assert parse_account(other.getProgramLog(program)) == parse_account(compile_to_cubin(SPILLS, ("-arch=sm_80",), "spills.cu")[1])
    assert other.getCUBIN(program).startswith(b"\x7fELF") and other.getVersion() == tuple(binding.getVersion())
    other.destroyProgram(program)
    program = other.createProgram("int number = NUMBER;", "bad.cu", [], [])
    with pytest.raises(other.NVRTCError):
        other.compileProgram(program, [])
    assert "NUMBER" in other.getProgramLog(program)


def test_a_document_keeps_what_was_written_by_hand(gate: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "markdown", lambda: iter(["# Tables", "anew"]))
    path = tmp_path / "kernels.md"
    assert gate.documented(path) == "# Tables\nanew\n"
    path.write_text(f"# Tables\nof before\n\n{gate.BY_HAND}\n\n## By hand\n")
    assert gate.documented(path) == f"# Tables\nanew\n\n{gate.BY_HAND}\n\n## By hand\n"
    assert (Path(__file__).parents[1] / "docs" / "kernels.md").read_text().count(gate.BY_HAND) == 1
