"""`cupyflash profile` and `sim.profile`: the report is the counters', its example in the docs is true, wrong input is one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import sim
from cupyflash.launch.nvrtc import CompileError, architecture
from cupyflash.sim.cli import main
from cupyflash.sim.profiling.arguments import make_arguments, read_arguments
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.parameters import arrays_by_name, ask_about_types, dtype_of
from cupyflash.sim.ptx.text.syntax import base_name, find_kernel, source_name

DOCS = (Path(__file__).resolve().parent.parent / "docs" / "profile.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\S+) -->\n```\w+\n(.*?)```", DOCS, re.DOTALL))

AXPY = """#include "scale.cuh"
namespace tools {
template <typename T> __global__ void axpy(const T* x, T* y, T a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[STRIDE * i] += scaled(x[i], a);
}
}
template __global__ void tools::axpy<float>(const float*, float*, float, int);
"""
HEADER = "template <typename T> __device__ T scaled(T x, T a) {\n    return x * a * a;\n}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    Path("axpy.cu").write_text(AXPY)
    Path("scale.cuh").write_text(HEADER)
    return tmp_path


def profiled(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["profile", *arguments])


SPEC: dict[str, Any] = {"x": {"shape": [100], "fill": 2}, "y": {"shape": [100], "fill": "arange"}, "a": 3, "n": 100}


def axpy(*more: str, spec: dict[str, Any] = SPEC, file: str = "axpy.cu", block: str = "64") -> Result:
    return profiled(file, "--grid", "2", "--block", block, "--args", json.dumps(spec), "-DSTRIDE=1", *more)


def report(*more: str, **options: Any) -> dict[str, Any]:
    result = axpy("--json", *more, **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# -- the docs -----------------------------------------------------------------------------------------------------------


def test_padding_takes_the_conflicts_away_as_the_docs_say() -> None:
    Path("transpose.json").write_text(BLOCKS["transpose.json"])
    Path("transpose.cu").write_text(BLOCKS["transpose.cu"].replace("[32][32]", "[32][33]"))
    padded = profiled("transpose.cu", "--grid", "8,8", "--block", "32,32", "--args", "transpose.json", "--json")
    assert sum(row["conflicts"] for row in json.loads(padded.stdout)["total"]["shared"]) == 0


def test_the_tensor_map_of_the_docs() -> None:
    for name in ("tile.cu", "tile.json"):
        Path(name).write_text(BLOCKS[name])
    (command,) = re.findall(r"^cupyflash (profile tile.cu .*)$", DOCS, re.MULTILINE)
    result = CliRunner().invoke(main, [*command.split(), "--json", "--save", "x=x.npy", "--save", "y=y.npy"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    x, y = np.load("x.npy"), np.load("y.npy")
    assert (y[:100] == x).all() and not y[100:].any()
    assert found["total"]["global"]["x"]["read"]["bytes"] == x.nbytes and found["cluster"] is None
    clustered = CliRunner().invoke(main, [*command.split(), "--cluster", "7"])
    assert clustered.exit_code == 0 and "cluster 7 x 1 x 1" in clustered.stdout


MAPS = [
    ({"map": {"shape": [8, 8]}}, '"map" needs "box"'),
    ({"map": "y", "box": [4, 4]}, "no array 'y' among the arguments before; there are x"),
    ({"map": 5, "box": [4, 4]}, '"map" must be an array or the name of an argument before'),
    ({"map": "x", "box": [3, 4]}, "argument 'm': the innermost dimension of the box must be a multiple of 16 bytes, got 12"),
    ({"map": "x", "box": [4, 4], "size": 3}, "unknown key 'size'; beside 'map' there may be box, dims, dtype"),
]


def test_descriptions_of_tensor_maps() -> None:
    spec = {"x": {"shape": [8, 8], "fill": "empty"}, "m": {"map": "x", "box": [4, 4], "element_strides": [1, 2]}}
    listed = {"z": {"fields": {"m": {"map": {"shape": [4, 8], "fill": "empty"}, "box": [8, 1]}}}}
    made = make_arguments(spec | listed, Path())
    assert made.values["m"].array is made.values["x"] and made.unwritten == ("x", "z.m")
    assert made.values["m"].description.counts == (4, 2)
    for given, message in MAPS:
        with pytest.raises(ValueError, match=re.escape(message)):
            make_arguments({"x": {"shape": [8, 8]}, "m": given}, Path())


def test_the_docs_name_every_key_of_the_json() -> None:
    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(keys, value))
        if not isinstance(value, dict):
            return set()
        return set(value).union(*(keys(v) for k, v in value.items() if k not in ("by_class", "by_opcode")))

    found = keys(report("--l2")) | keys(json.loads(axpy("--json", "-DSTRIDE=2", "--timeline-block", "0").stdout))
    assert {key for key in found - set(SPEC) if f"`{key}`" not in DOCS} == set()


# -- the report ---------------------------------------------------------------------------------------------------------


def test_the_report_is_what_the_machine_counted() -> None:
    x, y = np.full(100, 2, np.float32), np.arange(100, dtype=np.float32)
    found = sim.profile("axpy.cu", grid=2, block=64, args={"x": x, "y": y, "a": 3.0, "n": 100}, options=["-DSTRIDE=1"])
    assert (y == np.arange(100) + 18).all() and found.name == "tools::axpy" and found.kernel.startswith("_Z")
    assert report() == found.to_dict() | {"file": "axpy.cu"}
    assert found.to_dict()["total"]["global"]["y"]["write"] == {
        "bytes": 400,
        "unique_bytes": 400,
        "requests": 4,
        # Three warps of 128 bytes, one of four lanes with 16.
        "sectors": 13,
        "sectors_per_request": 3.25,
        "coalescing": 400 / (13 * 32),
    }
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_lines_carry_their_text_and_headers_their_callers() -> None:
    lines = report("--arch", "sm_90")["lines"]
    assert {line["line"] for line in lines if line["text"].startswith("if (i < n)")} == {5}
    (inlined,) = (line for line in lines if line["file"].endswith("scale.cuh"))
    assert inlined["text"] == "return x * a * a;" and [site["line"] for site in inlined["inlined_at"]] == [5]
    assert "from 5: return x * a * a;" in axpy().stdout and "scale.cuh:2" in axpy().stdout


def test_a_ptx_file_and_a_module_are_profiled_alike() -> None:
    text = Module.from_source('extern "C" __global__ void k(int* x) { x[threadIdx.x] = 1; }').text
    Path("k.ptx").write_text(text)
    x = np.zeros(32, np.int32)
    by_file = sim.profile("k.ptx", grid=1, block=32, args=[x])
    by_module = sim.profile(Module.from_ptx(text), "k", grid=1, block=32, args=[x])
    assert by_file.to_dict() == by_module.to_dict() | {"file": "k.ptx"} and x.all()
    assert "untouched" not in by_file.text() and "arg0 int32[32]" in by_file.text()


def test_without_line_information_the_lines_are_the_ptx_s() -> None:
    text = Module.from_source('extern "C" __global__ void k(int* x) { x[threadIdx.x] = 1; }').text
    Path("k.ptx").write_text(re.sub(r"\t\.loc.*", "", text))
    result = profiled("k.ptx", "--grid", "1", "--block", "32", "--args", '[{"shape": 32, "dtype": "int32"}]')
    assert result.exit_code == 0 and re.search(r"PTX:\d+ .*st\.global", result.stdout)


def test_findings_are_told_and_the_exit_status_says_so() -> None:
    result = axpy(spec=SPEC | {"n": 101})
    assert result.exit_code == 1 and "Error: the machine found " in result.stderr
    # In a pipe, one line each.
    told = [line for line in result.stdout.splitlines() if "axpy.cu:5: out of bounds" in line]
    assert told and all(line.endswith("]") for line in told)
    assert max(len(line) for line in result.stdout.splitlines() if line not in told) <= 100
    found = json.loads(axpy("--json", spec=SPEC | {"n": 101}).stdout)
    assert {finding["kind"] for finding in found["findings"]} == {"out of bounds"} and found["findings_total"] >= 1


def test_one_fault_is_one_fault() -> None:
    Path("one.cu").write_text('extern "C" __global__ void one(int* x) { x[0] = 1; x[1] = 1; }')
    result = profiled("one.cu", "--grid", "1", "--block", "1", "--args", '[{"shape": [1], "dtype": "int32"}]')
    assert result.exit_code == 1 and "Error: the machine found 1 fault in the kernel" in result.stderr
    assert "Findings: 1 lane at 1 place\n" in result.stdout and "4 bytes requested, 1 sector\n" in result.stdout


def test_a_file_s_name_may_have_any_letters() -> None:
    Path("né ü.cu").write_text('extern "C" __global__ void one(int* x) {\n    x[0] = 1;\n}')
    result = profiled("né ü.cu", "--grid", "1", "--block", "1", "--args", '[{"shape": [1], "dtype": "int32"}]')
    assert result.exit_code == 0 and "\n  2     arg0    write" in result.stdout and "x[0] = 1;" in result.stdout


def test_one_thread_waits() -> None:
    source = 'extern "C" __global__ void k() { asm volatile("bar.sync 1, 64;"); }'
    (finding,) = sim.profile(Module.from_source(source), grid=1, block=1).launch.findings
    assert finding.message.startswith("1 thread waits at barrier 1: ")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_page_fits_the_terminal(columns: int) -> None:
    spec = SPEC | {"y": {"shape": [100], "fill": "empty"}}
    found = CliRunner(env={"COLUMNS": str(columns)}).invoke(
        main, ["profile", "axpy.cu", "--grid", "2", "--block", "64", "--args", json.dumps(spec), "-DSTRIDE=1"]
    )
    longest = max(map(len, found.stdout.splitlines()))
    assert longest <= columns and (longest > 100) is (columns > 100)


def test_arrays_that_nobody_wrote_are_told_apart() -> None:
    empty = axpy(spec=SPEC | {"y": {"shape": [100], "fill": "empty"}})
    assert empty.exit_code == 1 and "axpy.cu:5: uninitialised" in " ".join(empty.stdout.split()) and "'y'" in empty.stdout
    y = np.zeros(32, np.float32)
    source = 'extern "C" __global__ void k(float* y) { y[threadIdx.x] += 1; }'
    for unwritten, kinds in (((), set()), (("y",), {"uninitialised"})):
        found = sim.profile(Module.from_source(source), grid=1, block=32, args={"y": y}, unwritten=unwritten)
        assert {finding.kind for finding in found.launch.findings} == kinds


def test_no_count_depends_on_the_seed_here() -> None:
    assert report() == report("--seed", "3") | {"seed": None}


def test_top_limits_the_tables() -> None:
    rows = axpy("--top", "1").stdout.split("Instructions by line")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 3 and "the first 1 of" in rows[0]


def test_arrays_are_saved_after_the_run() -> None:
    pytest.importorskip("ml_dtypes")
    spec = SPEC | {"h": {"shape": [3], "dtype": "bfloat16", "fill": 1.5}}
    Path("two.cu").write_text('extern "C" __global__ void two(float* x, float* y, float a, int n, short* h) { y[0] = a; }')
    result = axpy("--save", "y=out.npy", "--save", "h=h.npy", spec=spec, file="two.cu", block="1")
    assert result.exit_code == 1  # two blocks write one word: a race
    assert np.load("out.npy")[0] == 3
    again = make_arguments({"h": {"file": "h.npy", "dtype": "bfloat16"}}, Path())
    assert again.values["h"].dtype.name == "bfloat16" and (again.values["h"] == 1.5).all()


# -- the arguments ------------------------------------------------------------------------------------------------------


def made(**spec: Any) -> Any:
    return make_arguments({"x": spec}, Path()).values["x"]


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "bfloat16", "float32", "float64", "bool"])
def test_arrays_by_type(dtype: str) -> None:
    for fill, want in (("zeros", 0), ("ones", 1), (1, 1)):
        array = made(shape=[2, 3], dtype=dtype, fill=fill)
        assert array.shape == (2, 3) and str(array.dtype) == dtype and (array.astype(float) == want).all()
        assert array.flags.writeable and array.flags.c_contiguous
    empty = made(shape=[4], dtype=dtype, fill="empty")
    assert (empty.view(np.uint8) == 0xFF).all() and (empty.dtype.kind not in "fV" or np.isnan(empty.astype(float)).all())


def test_random_arrays_differ_by_place_and_repeat() -> None:
    spec = {"a": {"shape": [50], "fill": "normal"}, "b": {"shape": [50], "fill": "normal"}}
    first, again = (make_arguments(spec, Path()).values for _ in range(2))
    assert (first["a"] == again["a"]).all() and (first["a"] != first["b"]).any()
    seeded = make_arguments({name: value | {"seed": 5} for name, value in spec.items()}, Path()).values
    assert (seeded["a"] == seeded["b"]).all() and (seeded["a"] != first["a"]).any()
    numbers = made(shape=[1000], dtype="int32", fill="uniform", low=-3, high=4)
    assert set(numbers.tolist()) == set(range(-3, 4))
    inside = made(shape=[1000], fill="uniform", low=2, high=3)
    assert inside.dtype == np.float32 and inside.min() >= 2 and inside.max() <= 3
    assert made(shape=[2, 2], dtype="int16", fill="arange").tolist() == [[0, 1], [2, 3]]


def test_numbers_pointers_structures_files_and_names(folder: Path) -> None:
    np.save("x.npy", np.arange(6).reshape(2, 3))
    Path("sub").mkdir()
    spec = '{"n": 4, "p": null, "s": {"bytes": "0a00 00ff"}, "v": {"value": 5, "dtype": "int16"}, "x": {"file": "../x.npy"}}'
    Path("sub/spec.json").write_text(spec)
    values = read_arguments("sub/spec.json").values
    assert list(values) == ["n", "p", "s", "v", "x"] and values["n"] == 4 and values["p"] is None
    assert values["s"] == b"\x0a\0\0\xff" and values["v"] == np.int16(5) and values["v"].dtype == np.int16
    assert values["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    listed = read_arguments('[1, {"shape": [2], "fill": "empty"}]')
    assert list(listed.values) == ["arg0", "arg1"] and listed.unwritten == ("arg1",)


def test_a_structure_by_value_is_the_example_in_the_docs(folder: Path) -> None:
    for name in ("scale.cu", "scale.json"):
        Path(name).write_text(BLOCKS[name])
    command = [
        "scale.cu",
        "--grid",
        "4",
        "--block",
        "256",
        "--args",
        "scale.json",
        "--save",
        "y=y.npy",
        "--save",
        "p.x=x.npy",
        "--json",
    ]
    result = profiled(*command)
    assert result.exit_code == 0, result.output
    tensors = json.loads(result.stdout)["tensors"]
    assert tensors == {name: {"shape": [1000], "dtype": "float32", "bytes": 4000} for name in "xy"}
    assert np.array_equal(np.load("y.npy"), 2 * np.load("x.npy"))
    Path("scale.cu").write_text(BLOCKS["scale.cu"].replace("p.y[i] =", "p.y[i] +="))
    faulty = profiled(*command)
    assert faulty.exit_code == 1 and {f["tensor"] for f in json.loads(faulty.stdout)["findings"]} == {"y"}


def test_arrays_in_structures_have_paths_and_random_numbers_of_their_own() -> None:
    array = {"shape": [9], "fill": "normal"}
    empty = {"shape": [9], "fill": "empty"}
    fields = {"many": [array, array, None], "box": {"fields": {"a": array, "out": empty}}, "out": empty, "raw": {"bytes": "00"}}
    made = make_arguments({"a": array, "p": {"fields": fields}, "q": {"fields": {"a": array}}}, Path())
    arrays = arrays_by_name(made.values)
    paths = ["a", "p.many[0]", "p.many[1]", "p.box.a", "p.box.out", "p.out", "q.a", "many[0]", "many[1]"]
    assert list(arrays) == paths and made.unwritten == ("p.box.out", "p.out")
    drawn = [tuple(arrays[name].tolist()) for name in ("a", "p.many[0]", "p.many[1]", "p.box.a", "q.a")]
    assert len(set(drawn)) == 5


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ('{"x": ', "not valid JSON"),
        ('{"x": 1, "x": 2}', "'x' occurs twice"),
        ('{"x": "3"}', "argument 'x': must be a number, null, or an object"),
        ('{"x": {}}', "argument 'x': must be a number"),
        ('{"x": {"shape": [2], "dtype": "float31"}}', "argument 'x': unknown dtype 'float31'"),
        ('{"x": {"shape": [2], "dtype": "bfloat"}}', "unknown dtype"),
        ('{"x": {"shape": [-2]}}', '"shape" must be a list of lengths'),
        ('{"x": {"shape": [2], "fill": "random"}}', '"fill" must be a number or one of zeros'),
        ('{"x": {"shape": [2], "dtype": "int32", "fill": "normal"}}', "is for floating-point types"),
        ('{"x": {"shape": [2], "dtype": "int8", "fill": 300}}', "300 does not fit int8"),
        ('{"x": {"shape": [2], "fil": 3}}', "unknown key 'fil'"),
        ('{"x": {"shape": [2], "fill": "uniform", "low": 3}}', '"low" must be a number below "high"'),
        ('{"x": {"shape": [2], "low": 3}}', '"low" and "high" belong to'),
        ('{"x": {"shape": [2], "seed": 3}}', '"seed" belongs to'),
        ('{"x": {"shape": [2], "fill": "normal", "seed": -3}}', '"seed" must be a whole number'),
        ('{"x": {"file": "none.npy"}}', "no file none.npy"),
        ('{"x": {"file": "axpy.cu"}}', "axpy.cu is not a .npy file"),
        ('{"x": {"bytes": "0"}}', "hexadecimal"),
        ('{"x": {"value": 3.5, "dtype": "int32"}}', "3.5 does not fit int32"),
        ('{"x": {"fields": [1]}}', "argument 'x': \"fields\" must be an object, got [1]"),
        ('{"x": {"fields": {"n": 5}}}', "argument 'x': field 'n': a number needs its type: "),
        ('{"x": {"fields": {"a": [{"shape": [2]}, {"shape": -1}]}}}', "argument 'x': field 'a[1]': "),
        ('{"x": {"fields": {}, "shape": [2]}}', "unknown key 'fields'"),
        ('{"x": {"bytes": "00", "fill": 3}}', "unknown key 'fill'; beside 'bytes' there is nothing"),
        ('{"x": {"shape": [1000000000000000]}}', "argument 'x': "),
        ("nosuch.json", "nosuch.json"),
    ],
)
def test_wrong_arguments_are_one_line(spec: str, says: str) -> None:
    result = profiled("axpy.cu", "--grid", "1", "--block", "32", "--args", spec)
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("Error: ") and says in result.stderr and result.stderr.count("\n") == 1


# -- wrong input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.cu", "--grid", "1", "--block", "1"], "none.cu"),
        (["axpy.cu", "--block", "1", "--args", "[]"], "--grid"),
        (["axpy.cu", "--grid", "0", "--block", "1"], "'0' is not one to three positive whole numbers"),
        (["axpy.cu", "--grid", "1,2,3,4", "--block", "1"], "--grid"),
        (["axpy.cu", "--grid", "1", "--block", "2000", "-DSTRIDE=1", "--args", json.dumps(SPEC)], "block x is at most 1024"),
        (["axpy.cu", "--grid", "1", "--block", "1"], 'axpy.cu(5): error: identifier "STRIDE" is undefined'),
        (["axpy.cu", "--grid", "1", "--block", "1", "-DSTRIDE=1", "--args", "[]"], "takes 4 arguments, got 0"),
        (["axpy.cu", "--grid", "1", "--block", "1", "-DSTRIDE=1", "--args", "[1.5, 2, 3, 4]"], "'arg0'"),
        (["axpy.cu", "--grid", "1", "--block", "1", "-DSTRIDE=1", "--kernel", "saxpy"], "it has tools::axpy (_Z"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--arch", "fast"], "architecture 'fast'"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--arch", "1.0"], "--gpu-architecture"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--save", "x"], "NAME=FILE.npy"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--save", "x=no/x.npy"], "there is no folder no"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--save", "x=x.npy", "--args", "[]"], "there are none"),
        (["odd.ptx", "--grid", "1", "--block", "1"], "line 3 of the PTX, frobnicate"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--args", ""], "--args"),
        (["axpy.cu", "--grid", "1", "--block", "1", "--args", "."], "."),
        (["axpy.cu", "--grid", "1", "--block", "1", "--save", "x=folder.npy"], "is a directory"),
        (["zip.npz", "--grid", "1", "--block", "1"], "zip.npz is not a text file"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], says: str) -> None:
    Path("odd.ptx").write_text(".version 8.0\n.entry k() { .reg .b32 %r<3>;\nfrobnicate.b32 %r1, %r2;\nret; }")
    Path("folder.npy").mkdir()
    Path("zip.npz").write_bytes(b"PK\x80\xff")
    result = profiled(*arguments)
    errors = [line for line in result.stderr.splitlines() if not line.startswith("executing")]
    assert result.exit_code == 2 and result.stdout == "" and isinstance(result.exception, SystemExit)
    assert len(errors) == 1 and errors[0].startswith("Error: ") and says in errors[0]


def test_from_python_the_compiler_s_whole_log_is_raised() -> None:
    with pytest.raises(CompileError) as raised:
        sim.profile("axpy.cu", grid=1, block=1)
    assert "STRIDE" in raised.value.log


# -- types and templates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "asks"),
    [
        ("float const*", "float64", True),
        ("float*", "int32", True),
        ("const int* __restrict__", "int64", True),
        ("__half const*", "bfloat16", True),
        ("double*", "float32", True),
        ("float*", "float32", False),
        ("float*", "uint32", False),
        ("float*", "uint8", False),
        ("unsigned int*", "int32", False),
        ("unsigned int*", "float32", False),
        ("short*", "bfloat16", False),
        ("std::int64_t*", "int64", False),
        ("__nv_bfloat16*", "bfloat16", False),
        ("float4*", "float64", False),
        ("float**", "float64", False),
        ("void*", "float64", False),
        ("float", "float64", False),
    ],
)
def test_an_array_of_another_type_is_asked_about(kind: str, dtype: str, asks: bool) -> None:
    code, array = f"__global__ void k({kind} x) {{}}", np.zeros(4, dtype_of(dtype))
    for args in ([array], {"named": array}):
        if asks:
            with pytest.raises(TypeError, match="did you mean"):
                ask_about_types(code, "k", args)
        else:
            ask_about_types(code, "k", args)


def test_what_several_sources_say_of_a_type_must_agree() -> None:
    two = "#ifdef HALF\n__global__ void k({0} x, int n) {{}}\n#else\n__global__ void k({1} x, int n) {{}}\n#endif"
    ask_about_types(two.format("half*", "float*"), "k", [np.zeros(4), 3])
    with pytest.raises(TypeError, match="did you mean float32"):
        ask_about_types(two.format("const float*", "float *__restrict__ const"), "k", [np.zeros(4), 3])


def test_a_mangled_name_knows_the_template_s_types() -> None:
    if source_name("_Z1kIfEvv") != "k<float>":
        pytest.skip("the C++ runtime library, whose demangler it needs, is not here")
    wrong = axpy(spec=SPEC | {"x": {"shape": [100], "dtype": "float64"}})
    assert (
        wrong.exit_code == 2 and "argument 'x' is an array of float64" in wrong.stderr and "did you mean float32?" in wrong.stderr
    )


def test_without_arguments_a_template_is_printed_that_runs() -> None:
    asked = profiled("axpy.cu", "-DSTRIDE=1")
    assert asked.exit_code == 2 and "give it with --args" in asked.stderr
    spec = json.loads(asked.stdout)
    assert [*spec] == ["x", "y", "a", "n"] and {one["dtype"] for one in (spec["x"], spec["y"])} == {"float32"}
    assert (spec["a"], spec["n"]) == (0.0, 0) and axpy(spec=spec).exit_code == 0
    Path("axpy.ptx").write_text(Module.from_source(AXPY, ["-DSTRIDE=1", "-I."], name=str(Path("axpy.cu").resolve())).text)
    assert json.loads(profiled("axpy.ptx").stdout) == spec, "by the lines of its source"
    missing = profiled("axpy.cu", "-DSTRIDE=1", "--args", asked.stdout)
    assert missing.exit_code == 2 and "Missing option '--grid'" in missing.stderr
    Path("other.cu").write_text("""struct P { float* x; int n; };
    extern "C" __global__ void k(P p, unsigned long long* flags, const void* raw, double scale) { *flags = p.n + scale; }
    extern "C" __global__ void none() {}""")
    spec = json.loads(profiled("other.cu", "--kernel", "k").stdout)
    assert spec["p"] == {"bytes": "00" * 16} and spec["flags"]["dtype"] == "uint64" and spec["scale"] == 0.0
    assert profiled("other.cu", "--kernel", "k", "--grid", "1", "--block", "1", "--args", json.dumps(spec)).exit_code == 0
    assert profiled("other.cu", "--kernel", "none", "--grid", "1", "--block", "1").exit_code == 0


# -- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_Z7softmaxPf", "softmax"),
        ("_Z6kernelIfLi4EEvPT_", "kernel"),
        ("_ZN5tools4axpyIfEEvPKT_PS1_S1_i", "tools::axpy"),
        ("_ZN1a1b1cEv", "a::b::c"),
        ("_ZN12_GLOBAL__N_13fooEPf", "foo"),
        ("_ZL6hiddenPf", "hidden"),
        ("plain", "plain"),
        ("_Zsomething", "_Zsomething"),
    ],
)
def test_names_in_the_source(mangled: str, name: str) -> None:
    assert base_name(mangled) == name and find_kernel([mangled, "other"], name) == mangled
    assert find_kernel([mangled], None) == mangled == find_kernel([mangled, "other"], mangled)
    assert find_kernel([mangled, "other"], name.rpartition("::")[2]) == mangled


def test_names_that_are_not_unique_or_unknown_are_listed() -> None:
    kernels = ["_Z1kPf", "_Z1kPd", "_Z5otherv"]
    for name, says in (("k", "_Z1kPf, _Z1kPd"), ("no", r"k \(_Z1kPf\), k \(_Z1kPd\), other"), (None, "say which kernel")):
        with pytest.raises(ValueError, match=says):
            find_kernel(kernels, name)


@pytest.mark.parametrize("text", ["80", "8.0", "sm_80", "compute_80"])
def test_architectures(text: str) -> None:
    assert architecture(text) == "compute_80" and architecture("sm_90a") == "compute_90a" and architecture("12.0") == "compute_120"
