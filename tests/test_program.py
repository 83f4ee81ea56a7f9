"""`cupyflash run`: whole programs give their own results, the runtime answers as CUDA's does, faults and races are found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyflash.device import Device
from cupyflash.sim.clock import sass
from cupyflash.sim.program import build, fatbin
from cupyflash.sim.program.linking import linked
from cupyflash.sim.program.properties import layout, properties
from cupyflash.sim.program.report import report, summary
from cupyflash.sim.program.runtime import Runtime
from cupyflash.sim.program.session import ProgramResult, run_program
from cupyflash.sim.program.streams import Settings
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.execute import scheduler

PROGRAMS = Path(__file__).parent / "programs"
SOURCE = PROGRAMS / "everything.cu"
A100 = Device.named("A100-40GB")


def built(sources: list[Path], into: Path, *options: str) -> Path:
    if shutil.which("nvcc") is None or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("nvcc and a C compiler build the program that these tests run")
    return build.build(sources, into, "80", ["-std=c++17", *options])


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built([SOURCE], tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def products(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built([PROGRAMS / "products.cu"], tmp_path_factory.mktemp("products"), "-lcublas", "-lcublasLt")


@pytest.fixture(scope="session")
def textures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built([PROGRAMS / "textures.cu"], tmp_path_factory.mktemp("textures"), "-w")


def ran(program: Path, *arguments: str, **settings: float) -> ProgramResult:
    return run_program(program, arguments, device=A100, settings=Settings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "launches", "repeated"),
    [
        (("vector", "1000"), {"scale": 1}, {}),
        (("shared",), {"add": 3, "touch": 1}, {}),
        (("pointers",), {"gather": 1}, {}),
        (("ordered",), {"set": 1, "add": 1}, {}),
        (("graph",), {"add": 6}, {}),
        (("repeats",), {"set": 52, "add": 5}, {"set": 48}),
    ],
)
def test_a_program_is_right(
    program: Path, part: tuple[str, ...], launches: dict[str, int], repeated: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    result = ran(program, *part)
    assert result.status == 0, (capfd.readouterr(), result)
    assert not result.findings and not result.missing
    assert {name_of(one.name): one.launches for one in result.kernels} == launches
    assert {name_of(one.name): one.repeated for one in result.kernels if one.repeated} == repeated


def name_of(mangled: str) -> str:
    digits = mangled.removeprefix("_Z")
    size = int("".join(c for c in digits[:2] if c.isdigit()))
    return digits[len(str(size)) :][:size]


def test_a_fault_is_found_and_is_the_error_that_a_device_gives(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = ran(program, "vector", "1000", "8")
    assert capfd.readouterr().out == "cudaErrorIllegalAddress\n"
    kinds = {(one.kind, one.source and one.source[0].endswith("everything.cu")) for one in result.findings}
    assert kinds == {("out of bounds", True)}


AFTER_A_FAULT = """
#include <cstdio>
__device__ int word;
__global__ void beyond(int *p) { p[1 << 20] = 1; }
int main() {
    int *p, x = 1;
    cudaMalloc(&p, sizeof x);
    beyond<<<1, 1>>>(p);
    printf("%d %d", cudaMemcpyToSymbol(word, &x, sizeof x), cudaMemcpyFromSymbol(&x, word, sizeof x));
}
"""


@pytest.mark.wide
def test_copies_of_variables_have_a_failed_kernel_s_error_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "fault.cu"
    source.write_text(AFTER_A_FAULT)
    ran(built([source], tmp_path))
    assert capfd.readouterr().out == "700 700"


def test_cublas_multiplies_as_the_program_does_itself(products: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Six forms of gemm, and gemv: drawn sizes, transposes, leading dimensions, batches; then three calls that are wrong."""
    result = ran(products)
    assert capfd.readouterr().out == "24 rounds, 0 wrong; 7 13 1\n"
    assert result.status == 0 and not result.missing
    assert [error.split(":")[0] for _, error in result.failed] == [
        f"CUBLAS_STATUS_{name}" for name in ("INVALID_VALUE", "EXECUTION_FAILED", "NOT_INITIALIZED")
    ]


def test_a_product_of_what_nobody_wrote_is_what_nobody_wrote(products: Path) -> None:
    """Of the last element alone: the other rows of A and columns of B were written."""
    (finding,) = ran(products, "unwritten").findings
    assert (finding.kind, finding.lane) == ("uninitialised", 7)


def test_a_header_that_is_missing_is_named_with_its_wheel(tmp_path: Path) -> None:
    source = tmp_path / "draws.cu"
    source.write_text("#include <nccl.h>\nint main() {}\n")
    with pytest.raises(build.BuildError, match=r"nccl\.h: it is in the wheel nvidia-nccl"):
        built([source], tmp_path)


@pytest.mark.wide
def test_a_program_of_parts_is_one_module(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two files share functions and variables, and each has a variable, a function and texts of the same name of its own."""
    result = ran(built([PROGRAMS / "parts.cu", PROGRAMS / "parts_far.cu"], tmp_path, "-rdc=true"))
    assert capfd.readouterr().out == "near 0\nfar 1 end\nno error\n0 wrong, counter 2\n"
    assert result.status == 0 and not result.findings and not result.failed


def test_names_of_parts_are_one_thing_where_they_are_shared() -> None:
    part = """.version 8.0\n.target sm_80\n.address_size 64\n.{first} .global .u32 common{init};\n.global .u32 own = {number};
.visible .entry {kernel}(.param .u64 out) {{ .reg .u64 %a; .reg .u32 %x, %y; ld.param.u64 %a, [out];
ld.global.u32 %x, [common]; ld.global.u32 %y, [own]; st.global.v2.u32 [%a], {{%x, %y}}; ret; }}\n"""
    module = linked(
        [
            part.format(first="extern", init="", number=5, kernel="one"),
            part.format(first="visible", init=" = 9", number=7, kernel="two"),
        ]
    )
    found = []
    for kernel in module.kernels:
        out = np.zeros(2, np.uint32)
        assert not module.launch(kernel, 1, 1, [out]).findings
        found.append(out.tolist())
    assert module.kernels == ("one", "two") and found == [[9, 5], [9, 7]]


def test_a_part_may_declare_an_array_without_its_size() -> None:
    head = ".version 8.3\n.target sm_80\n.address_size 64\n"
    reads = (
        ".extern .global .align 4 .b8 table[];\n.visible .entry k(.param .u64 y) { .reg .b32 %r<2>; .reg .b64 %rd<2>;"
        " ld.global.u32 %r0, [table+4]; ld.param.u64 %rd0, [y]; st.global.u32 [%rd0], %r0; ret; }\n"
    )
    has = ".visible .global .align 4 .b8 table[8] = {1,0,0,0,2,0,0,0};\n"
    for parts in ([head + reads, head + has], [head + has, head + reads]):
        out = np.zeros(1, np.uint32)
        assert not linked(parts).launch("k", 1, 1, [out]).findings and out[0] == 2


def test_what_is_suppressed_is_told(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "known.supp"
    file.write_text("out-of-bounds scale everything.cu for the test\n")
    result = run_program(program, ["vector", "1000", "8"], device=A100, settings=Settings(suppressions=file))
    (kernel,) = summary(result)["kernels"]
    assert result.status == 0 and not kernel["findings"] and kernel["suppressed"][0]["by"]["reason"] == "for the test"
    assert "scale: 1 launch" in report(result) and "suppressed by" in report(result)


def test_a_race_between_streams_is_found(program: Path) -> None:
    (finding, *_) = ran(program, "race").findings
    assert finding.kind == "race" and "add" in finding.kernel


def test_errors_are_those_of_the_runtime(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = ran(program, "errors")
    assert capfd.readouterr().out.split("\n") == [
        "cudaErrorInvalidValue",
        "cudaErrorInvalidConfiguration",
        "no error",
        "cudaErrorInvalidValue",
        "cudaErrorInvalidDevice",
        "cudaErrorNotSupported",
        "cudaErrorIllegalAddress",
        "cudaErrorIllegalAddress",
        "",
    ]
    assert result.missing == {"cudaMallocMipmappedArray": 1}
    assert [one.kind for one in result.findings] == ["null pointer"]


def test_the_device_is_the_one_asked_for_and_prints_in_order(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ran(program, "device").status == 0
    assert capfd.readouterr().out == "A100-40GB (simulated) 8.0 108 2147483647 166912 8\ndevice 4\ndevice 5\nhost\n"


def test_a_budget_ends_the_program_and_says_so(program: Path) -> None:
    result = ran(program, "repeats", max_seconds=1e-9)
    assert result.cut and [one.launches for one in result.kernels] == [1]


def test_without_memory_the_program_ends_with_what_was_checked(program: Path) -> None:
    class Short(Runtime):
        def cudaDeviceSynchronize(self) -> None:
            raise MemoryError("2 GiB")

    result = run_program(program, ["vector", "100", "1"], device=A100, runtime=Short)
    assert result.cut and [one.kind for one in result.findings] == ["out of bounds"]
    assert report(result).endswith("ended for want of memory (2 GiB): what came after was not checked")


def test_a_kernel_that_waits_for_the_host_is_refused_by_name(
    program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPYFLASH_STALL_SECONDS", "0.2")
    result = ran(program, "await")
    assert result.status == 1 and not result.findings and capfd.readouterr().out == "cudaErrorNotSupported\n"
    (_, why), later = result.failed
    line = next(n for n, text in enumerate(SOURCE.read_text().splitlines(), 1) if "while (*flag" in text)
    assert (
        later == ("cudaDeviceSynchronize", "cudaErrorNotSupported")
        and f"await waits for the host: {SOURCE}:{line} reads 'flag' (host allocation " in why
    ), why


def test_a_long_launch_is_foretold_with_what_the_budget_leaves(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LONG_SECONDS", 1e-6)
    monkeypatch.setattr(scheduler, "FEW_SECONDS", 0)
    for limit, enough in ((1000, True), (1e-3, False)):
        said: list[str] = []
        settings = Settings(max_seconds=limit, say=said.append)
        result = run_program(program, ["vector", "1000000"], device=A100, settings=settings)
        assert said and said[0].startswith("scale, grid ") and f"; --max-seconds leaves {limit:,.0f} s" in said[0]
        assert enough == (not said[-1].endswith(", so it will not be run to its end")) == (not result.cut)
        if not enough:
            assert "not to its end (estimated to take" in report(result)
            assert summary(result)["kernels"][0]["estimate"]["waves"] == 16


def test_events_tell_the_time_that_the_clock_predicts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One launch takes what the clock says of its code, three take three times that; a fill has no time but the simulation's."""
    if sass.tool("nvdisasm") is None or sass.tool("ptxas") is None:
        pytest.skip("the clock needs ptxas and nvdisasm")
    binary = built([PROGRAMS / "clocked.cu"], tmp_path)
    result = run_program(binary, device=A100)
    one, three, fill = (float(line) for line in capfd.readouterr().out.split())
    n = 1 << 18
    module = Module.from_source((PROGRAMS / "clocked.cu").read_text().partition("int main")[0].replace("#include <cstdio>", ""))
    args = {"x": np.zeros(n, np.float32), "y": np.zeros(n, np.float32), "n": n}
    assert one == pytest.approx(1e3 * module.clock("add", n // 256, 256, args, A100).seconds, rel=0.05)
    assert three == pytest.approx(3 * one, abs=3e-6) and fill > 0
    assert result.predicted and result.timed
    assert report(result).endswith("one after another\nother times that the program measured are the simulation's, not a GPU's")
    plain = ran(binary, clock=False)
    assert plain.timed and not plain.predicted and float(capfd.readouterr().out.split()[0]) != one


def test_the_command_reports_findings_and_has_the_programs_status(program: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "cupyflash", "run", *words]
        return subprocess.run(line, capture_output=True, text=True)

    wrong = command("--json", str(program), "vector", "100", "1")
    assert wrong.returncode == 1 and "the machine found" in wrong.stderr
    report = json.loads(wrong.stdout.partition("\n")[2])
    assert {one["kind"] for one in report["kernels"][0]["findings"]} == {"out of bounds"}
    assert command(str(program), "--", "nothing").returncode == 4
    assert "no such file" in command("nothing.cu").stderr


def test_the_page_shows_what_the_command_prints(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "run.md").read_text()
    source, shown = re.search(r"```cuda\n(.*?)```.*?```text\n\$ (.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    (tmp_path / "saxpy_program.cu").write_text(source)
    line, _, printed = shown.partition("\n")
    words = [sys.executable, "-m", *line.split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    report = done.stderr.partition("\n")[2].replace(f"{tmp_path}/", "")
    assert re.sub(r"\d+\.\d s", "0.0 s", done.stdout + report) == printed
    assert done.returncode == 1


@pytest.mark.wide
def test_the_line_that_checks_a_program_in_ci(program: Path, tmp_path: Path) -> None:
    docs = Path(__file__).parents[1] / "docs"
    (tmp_path / "main.cu").write_text(re.search(r"```cuda\n(.*?)```", (docs / "run.md").read_text(), re.DOTALL)[1])  # type: ignore[index]
    script, told = re.findall(r"```(?:sh|text)\n(.*?)```", (docs / "check_in_ci.md").read_text(), re.DOTALL)[:2]
    line = script.splitlines()[2]
    done = subprocess.run([sys.executable, "-m", *line.split()], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and told in done.stdout and "main.cu" in (tmp_path / "found.sarif").read_text()


@pytest.mark.parametrize("part", ["array", "memory", "layers", "volume", "surface", "ordered"])
def test_arrays_textures_and_surfaces(textures: Path, part: str) -> None:
    result = ran(textures, part)
    assert result.status == 0 and not result.missing and not result.findings


def test_faults_of_textures_and_surfaces_are_found(textures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    beyond, written = ran(textures, "surface", "2").findings
    (freed,) = ran(textures, "freed").findings
    (race,) = ran(textures, "race").findings
    assert capfd.readouterr().out == 2 * "cudaErrorIllegalAddress\n"
    assert {one.kind for one in (beyond, written, freed)} == {"out of bounds"} and beyond.source and freed.source
    assert race.kind == "race" and "plain" in race.kernel and "rise" in race.message
    assert "read of 4 bytes at (0, 4), x in bytes: outside of 'at' (array allocation 1)" in beyond.message, beyond.message


def test_wrong_calls_with_arrays_get_the_runtimes_errors(textures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = ran(textures, "errors")
    assert capfd.readouterr().out.split() == [
        *5 * ["cudaErrorInvalidValue"],
        "cudaErrorInvalidFilterSetting",
        "cudaErrorInvalidNormSetting",
        *2 * ["cudaErrorInvalidValue"],
        "cudaErrorNotSupported",
    ]
    assert result.missing == {"cudaMallocMipmappedArray": 1}


def test_a_program_that_cannot_run_here_is_refused(tmp_path: Path) -> None:
    static = tmp_path / "static"
    static.write_bytes(b"\x7fELF and no libcudart")
    with pytest.raises(build.BuildError, match="-cudart shared"):
        run_program(static, device=A100)


def test_the_wheels_library_is_linked_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have libcudart.so.13 alone; a toolkit has libcudart.so beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    nvcc, library = tmp_path / "bin" / "nvcc", tmp_path / "lib" / "libcudart.so.13"
    assert build.linking(str(nvcc)) == ()
    library.write_text("")
    (flag,) = build.linking(str(nvcc))
    assert build.linking(str(nvcc)) == (flag,) and Path(flag.removeprefix("-L"), "libcudart.so").resolve() == library
    (tmp_path / "lib" / "libcudart.so").symlink_to(library)
    assert build.linking(str(nvcc)) == ()


def test_ptx_is_chosen_by_architecture_and_refusals_say_how_to_compile() -> None:
    def entry(kind: int, architecture: int, flags: int, text: bytes) -> bytes:
        head = kind.to_bytes(2, "little") + b"\1\1" + (80).to_bytes(4, "little") + len(text).to_bytes(8, "little")
        head += bytes(8) + bytes(4) + architecture.to_bytes(4, "little") + bytes(8) + flags.to_bytes(8, "little")
        return head.ljust(80, b"\0") + text

    def binary(*entries: bytes) -> bytes:
        body = b"".join(entries)
        return (0xBA55ED50).to_bytes(4, "little") + b"\1\0\x10\0" + len(body).to_bytes(8, "little") + body

    both = binary(entry(1, 70, 0, b"old\0"), entry(1, 80, 0, b"new\0"), entry(2, 80, 0, b"code"))
    assert (fatbin.ptx_for(both, 75), fatbin.ptx_for(both, 90)) == ("old", "new")
    for data, message in (
        (binary(entry(2, 80, 0, b"code")), "machine code only"),
        (binary(entry(1, 90, 0, b"x")), "choose --device"),
        (binary(entry(1, 80, 0x8000, b"x")), "-no-compress"),
    ):
        with pytest.raises(fatbin.NoPtx, match=message):
            fatbin.ptx_for(data, 80)


@pytest.mark.parametrize(("version", "size"), [(12, 1032), (13, 1008)])
def test_properties_have_the_layout_of_the_toolkit(version: int, size: int) -> None:
    found = properties(A100, version)
    assert len(found) == layout(version).itemsize == size and found.startswith(b"A100-40GB")
