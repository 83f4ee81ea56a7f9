"""RawKernel and RawModule on NumPy arrays: CuPy's calls, its options and types, what findings do, and the pytest plugin."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.launch.nvrtc import CompileError
from cupyflash.sim import ptx
from cupyflash.sim.ptx import KernelFault, RawKernel, RawModule, pytest_plugin, rawkernel, simulation
from cupyflash.sim.ptx.rawkernel import settings
from cupyflash.sim.ptx.text.syntax import parameters

cupy = pytest.importorskip("cupy")

CODE = r"""
#include <cuda_fp16.h>
#include <cupy/complex.cuh>
struct Box { const float* x; int n; };
extern "C" __global__ void twice(const float* x, float* y /* doubled */, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * x[i];  // twice
}
extern "C" __global__ void shift(const float* x, float* y) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = s[63 - threadIdx.x];  // no barrier
}
extern "C" __global__ void scalars(
    double* out, bool b, signed char c, float f, double d, long long q, __half h, complex<float> z, Box box
) {
    double all[] = {(double)b, (double)c, f, d, (double)q, (double)__half2float(h), z.real() + z.imag(), box.x[box.n]};
    for (int i = 0; i < 8; ++i) out[i] = all[i];
}
extern "C" __global__ void dynamic(int* out) {
    extern __shared__ int more[];
    __shared__ int own[256];
    own[threadIdx.x] = more[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = own[threadIdx.x] + more[threadIdx.x];
}
__device__ int seen;
extern "C" __global__ void count(const float* x) { if (!x) atomicAdd(&seen, 1); }
"""


def a_box(x: np.ndarray, n: int) -> np.void:
    made: np.void = np.array((x, n), np.dtype([("x", object), ("n", "i4")], align=True))[()]
    return made


def kernel(name: str) -> RawKernel:
    return RawKernel(CODE, name)


def test_a_kernel_of_cupy_s_runs_with_one_import_changed() -> None:
    x, y = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    kernel("twice")((4,), (32,), (x, y, x.size))
    assert (y == 2 * x).all()


def test_a_fault_is_raised_at_the_line_of_the_python_file() -> None:
    x, y = np.zeros(100, np.float32), np.zeros(64, np.float32)
    said = r"^out of bounds at \S+:\d+ \(kernel twice has 1 fault\):\n  \S+: out of bounds: .* of 'y'"
    with pytest.raises(KernelFault, match=said) as caught:
        kernel("twice")((4,), (32,), (x, y, 100))
    lines = Path(__file__).read_text().splitlines()
    (finding,) = caught.value.launch.findings
    assert finding.source == (__file__, lines.index("    if (i < n) y[i] = 2 * x[i];  // twice") + 1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_what_findings_do_is_settled_by_the_innermost_block_that_says_it() -> None:
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with simulation(findings="keep") as outer:
        kernel("shift")((1,), (64,), (x, y))
        with simulation(seed=1) as seeded:
            kernel("shift")((1,), (64,), (x, y))
        with simulation(races=False):
            kernel("shift")((1,), (64,), (x, y))
        with simulation(findings="warn") as own, pytest.warns(ptx.KernelFaultWarning, match="race") as warned:
            kernel("shift")((1,), (64,), (x, y))
        assert warned[0].filename == __file__
        assert [len(launch.findings) > 0 for launch in outer] == [True, True, False] and outer[1:2] == seeded and len(own) == 1
        with simulation(findings="raise"), pytest.raises(KernelFault, match="race"):
            kernel("shift")((1,), (64,), (x, y))
    assert (settings().findings, settings().arch) == ("raise", "compute_80")


@pytest.mark.parametrize("wrong", [{"findings": "ignore"}, {"arch": "fast"}])
def test_wrong_settings_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong.values()))), simulation(**wrong):  # type: ignore[arg-type]
        pass


GOOD: dict[str, Any] = {
    "b": True,
    "c": -3,
    "f": np.float32(0.5),
    "d": 0.25,
    "q": 1 << 40,
    "h": np.float16(1.5),
    "z": np.complex64(1 + 2j),
}


def values_of(**changed: Any) -> np.ndarray:
    out, given = np.zeros(8), GOOD | changed
    box = given.pop("box", a_box(np.arange(9, dtype=np.float32), 7))
    kernel("scalars")((1,), (1,), (out, *given.values(), box))
    return out


def test_scalars_have_cupy_s_types() -> None:
    assert values_of().tolist() == [1, -3, 0.5, 0.25, 1 << 40, 1.5, 3, 7]
    assert values_of(b=np.bool_(False), c=np.int64(5), q=np.uint64(3), d=np.full((1,), 2.5)).tolist()[:5] == [0, 5, 0.5, 2.5, 3]
    with pytest.raises(KernelFault, match="null pointer"):
        values_of(box=a_box(None, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("f", 0.5, r"argument 'f': CuPy passes 0.5 as float64, 8 bytes; .* of 4 bytes: pass np.float32"),
        ("f", 1, r"'f': CuPy passes 1 as int64, 8 bytes; the parameter is a floating-point number"),
        ("q", np.int32(1), r"'q': .* as int32, 4 bytes; the parameter is an integer of 8 bytes: pass np.int64"),
        ("q", 1.0, r"'q': .* as float64, .* an integer of 8 bytes"),
        ("c", 300, r"300 does not fit"),
        ("z", 1j, r"'z': CuPy passes 1j as complex128, 16 bytes; the parameter is a structure of 8 bytes"),
        ("h", 1.5, r"'h': .* float64, 8 bytes; the parameter is a structure of 2 bytes"),
        ("box", np.zeros(1, "i4,i4")[0], r"box"),
        ("d", "1", r"'d' must be a NumPy array or scalar, a Python number or None, got '1'"),
    ],
)
def test_bytes_that_are_not_the_parameter_s_are_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        values_of(**{name: value})


def test_an_array_of_another_type_is_asked_about() -> None:
    twice = RawKernel('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.f; }', "twice")
    with pytest.raises(TypeError, match=r"argument 0 is an array of float64, its parameter is float\* x: did you mean float32\?"):
        twice((1,), (4,), (np.ones(4),))
    x = np.ones(4, np.float32)
    twice((1,), (4,), (x.view(np.uint32),))  # bits
    assert x.tolist() == [2] * 4


def test_denormals_are_flushed_as_cupy_has_them() -> None:
    x, y = np.full(32, 1e-40, np.float32), np.ones(32, np.float32)
    kernel("twice")((1,), (32,), (x, y, 32))
    assert not y.any()


def test_what_a_block_may_ask_for_is_what_the_devices_have() -> None:
    for device in Device.catalogue():
        major, minor = device.compute_capability
        assert rawkernel.OPT_IN[10 * major + minor] * 1024 == device.sram_per_block, device


def test_complex_numbers_of_cuda_are_cupy_s() -> None:
    code = """#include <cuComplex.h>
    extern "C" __global__ void squares(const cuFloatComplex* x, cuFloatComplex* y) {
        y[threadIdx.x] = cuCmulf(x[threadIdx.x], x[threadIdx.x]);
    }"""
    x = (np.arange(4) + 1j).astype(np.complex64)
    y = np.empty_like(x)
    RawKernel(code, "squares", translate_cucomplex=True)((1,), (4,), (x, y))
    assert (y == x * x).all()


def test_dynamic_shared_memory_is_asked_for() -> None:
    dynamic, out = kernel("dynamic"), np.zeros(256, np.int32)
    assert dynamic.shared_size_bytes == 1024 and dynamic.max_dynamic_shared_size_bytes == 47 * 1024
    dynamic((1,), (256,), (out,), shared_mem=1024)
    assert (out == 2 * np.arange(256)).all()
    with pytest.raises(ValueError, match=r"shared_mem must be from 0 to 48128 bytes .set max_dynamic_shared_size_bytes"):
        dynamic((1,), (256,), (out,), shared_mem=48 * 1024)
    dynamic.max_dynamic_shared_size_bytes = 64 * 1024
    dynamic((1,), (256,), (out,), shared_mem=64 * 1024)
    with pytest.raises(ValueError, match=f"from 0 to {162 * 1024} on sm_80, got {163 * 1024}"):
        dynamic.max_dynamic_shared_size_bytes = 163 * 1024


def test_attributes_have_cupy_s_names() -> None:
    attributes = kernel("twice").attributes
    named = re.findall(r"'(\w+)'", inspect.getdoc(cupy.RawKernel.attributes) or "") or list(attributes)
    assert set(named) <= set(attributes) and all(hasattr(cupy.RawKernel, name) for name in attributes)
    assert attributes["num_regs"] > 0 and attributes["ptx_version"] == 80 and attributes["local_size_bytes"] == 0


@pytest.mark.parametrize("name", ["RawKernel", "RawModule"])
def test_signatures_are_cupy_s(name: str) -> None:
    told = (getattr(cupy, name).__doc__ or "").partition("(")[2].partition(")\n")[0]
    if not told:
        pytest.skip("this CuPy does not tell its signature")
    theirs = re.findall(r"(?:\w+ )?(\w+)(?:=[^,]*\))?(?:=[^,]*)?(?:, |$)", told.replace("*, ", ""))
    assert list(inspect.signature(getattr(ptx, name)).parameters) == theirs


TEMPLATE = r"""
template <typename T> __global__ void fill(T* x, T value, int n) { if (threadIdx.x < n) x[threadIdx.x] = value * T(SCALE); }
__constant__ float table[4];
extern "C" __global__ void look_up(float* out) { out[threadIdx.x] = table[threadIdx.x]; }
"""


def test_a_module_has_templates_and_variables() -> None:
    module = RawModule(code=TEMPLATE, options=("-DSCALE=3",), name_expressions=["fill<float>", "fill<int>"])
    x = np.zeros(8, np.int32)
    module.get_function("fill<int>")((1,), (8,), (x, np.int32(2), 4))
    assert x.tolist() == [6] * 4 + [0] * 4
    with pytest.raises(KernelFault, match="of 'x'"):
        module.get_function("fill<float>")((1,), (64,), (np.zeros(8, np.float32), np.float32(2), 64))
    np.ndarray((4,), np.float32, module.get_global("table"))[...] = [1, 2, 3, 4]
    out = np.zeros(4, np.float32)
    module.get_function("look_up")((1,), (4,), [out])
    assert out.tolist() == [1, 2, 3, 4]
    for wrong in (module.get_function, module.get_global):
        with pytest.raises(ValueError, match=r"'fill' is not in this module"):
            wrong("fill")


def test_a_module_of_ptx_knows_no_registers(tmp_path: Path) -> None:
    path = tmp_path / "kernels.ptx"
    path.write_text(RawModule(code=CODE).module.text)
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    twice = RawModule(path=str(path)).get_function("twice")
    twice((1,), (32,), (x, y, 32))
    assert (y == 2).all() and twice.attributes["num_regs"] == -1
    with pytest.raises(AttributeError, match="read from PTX"):
        _ = twice.num_regs


def test_kernels_of_one_source_share_their_variables() -> None:
    before = RawModule(code=CODE).get_global("seen").view(np.int32)[0]
    kernel("count")((5, 0, 0), (0,), (None,))
    assert RawModule(code=CODE).get_global("seen").view(np.int32)[0] == before + 5


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RawKernel(CODE, "twice", ["-g"]), TypeError, "options must be a tuple"),  # type: ignore[arg-type]
        (lambda: RawKernel("int", "twice").compile(), CompileError, "twice.cu"),
        (lambda: RawKernel(CODE, "twice", backend="nvcc").compile(), ValueError, "backend must be 'nvrtc'"),
        (lambda: RawKernel(CODE, "twice", jitify=True).compile(), ValueError, "jitify must be"),
        (lambda: kernel("thrice").compile(), ValueError, "'thrice' is not in this module, which has "),
        (lambda: RawModule(), TypeError, "exactly one of code and path"),
        (lambda: RawModule(path="k.ptx", name_expressions=["f"]), ValueError, "name_expressions must be None"),
        (lambda: kernel("twice")(4, (32,), ()), TypeError, "grid must be a tuple, got 4"),  # type: ignore[arg-type]
        (lambda: kernel("twice")((4,), (32,), (None, None)), TypeError, "twice takes 3 arguments, got 2"),
    ],
)
def test_wrong_use_is_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("cuda", "names"),
    [
        ("__global__ void k(float *__restrict__ a, const int (&b)[3], T<int, 2> c = 1) {}", ["a", "arg1", "c"]),
        ("__global__ void k(int a, /* int x, */ int b[], // y\n unsigned c) {}", ["a", "b", "c"]),
        ("void k(int);\n__global__ void __launch_bounds__(128) k(int a, int b, int c);", ["a", "b", "c"]),
        ("void k(int p, int q, int r);\n__global__ void k(int a, int b, int c) { k(1, 2, 3); }", ["a", "b", "c"]),
        ("PARAMETERS(k)", ["arg0", "arg1", "arg2"]),
    ],
)
def test_names_of_parameters_come_from_the_source(cuda: str, names: list[str]) -> None:
    found = [name for _, name in parameters(cuda, "k", 3)]
    assert found == names if "arg1" not in names else found in (names, ["arg0", "arg1", "arg2"])


def test_cupy_is_numpy_for_a_while() -> None:
    real, made_before = cupy.zeros, cupy.RawKernel(CODE, "twice")
    globals()["MADE_BEFORE"] = made_before
    with ptx.simulated_cupy():
        x = cupy.random.random(64, dtype=cupy.float32)
        y = cupy.zeros_like(x)
        globals()["MADE_BEFORE"]((2,), (32,), (x, y, x.size))
        cupy.cuda.Stream.null.synchronize()
        cupy.testing.assert_array_equal(y, 2 * x)
        assert type(y.get()) is np.ndarray and type(y.max()) is cupy.ndarray and cupy.get_array_module(y) is cupy
        host = np.arange(4)
        assert not np.shares_memory(cupy.asarray(host), host) and cupy.asnumpy(cupy.exp(x)).dtype == np.float32
        with pytest.raises(TypeError, match="'n' is an array"):
            kernel("twice")((1,), (32,), (x, y, cupy.array(32)))
    assert cupy.zeros is real and globals().pop("MADE_BEFORE") is made_before


def test_a_test_has_its_kernels_faults(request: pytest.FixtureRequest) -> None:
    item: Any = request.node
    for faulty, raises in ((False, False), (True, False), (True, True)):
        with simulation(findings="keep") as launches:
            item.stash[pytest_plugin._LAUNCHES] = launches
            y = np.zeros(64, np.float32)
            kernel("shift" if faulty else "twice")((1,), (64,), (y, y.copy()) if faulty else (y, y.copy(), 64))
            call = pytest_plugin.pytest_runtest_call(item)
            next(call)
            with warnings.catch_warnings():
                try:
                    call.throw(ZeroDivisionError) if raises else call.send(None)
                except StopIteration:
                    ended = "well"
                except pytest.fail.Exception as failure:
                    ended = str(failure)
                except ZeroDivisionError:
                    ended = item._report_sections.pop()[2]
            assert ended == "well" if not faulty else "race: " in ended and f"{__file__}:" in ended
    del item.stash[pytest_plugin._LAUNCHES]


DOCS = (Path(__file__).resolve().parent.parent / "docs" / "profile.md").read_text()
_, SETTINGS, PLUGIN, *_ = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)


def test_the_settings_of_the_docs_hold() -> None:
    axpy = """extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        y[i] += a * x[i];  // n is not looked at
    }"""
    names = {"kernel": RawKernel(axpy, "axpy"), "x": np.ones(1000, np.float32), "y": np.zeros(1000, np.float32), "np": np}
    exec(SETTINGS, names)
    (launch,) = names["launches"]  # type: ignore[misc]
    assert [(finding.tensor, len(finding.also)) for finding in launch.findings] == [("x", 2)] and (names["y"] == 0.5).all()  # type: ignore[attr-defined]


SUITE = '''
import cupy, numpy as np, pytest

SHIFT = cupy.RawKernel(r"""extern "C" __global__ void shift(float* x) {
    x[threadIdx.x] = x[(threadIdx.x + 1) % 64];
}""", "shift")

def test_numbers():
    x = cupy.arange(64, dtype=cupy.float32)
    cupy.RawKernel('extern "C" __global__ void half(float* x) { x[threadIdx.x] /= 2; }', "half")((1,), (64,), (x,))
    assert (x.get() == np.arange(64) / 2).all()

def test_fault():
    SHIFT((1,), (64,), (cupy.zeros(64, cupy.float32),))

def test_expected(simulated_cupy):
    from cupyflash.sim import ptx
    with ptx.simulation(findings="keep") as launches:
        SHIFT((1,), (64,), (cupy.zeros(64, cupy.float32),))
    assert launches[-1].findings and not simulated_cupy
'''


@pytest.mark.wide
def test_a_whole_suite_runs_without_a_gpu(tmp_path: Path) -> None:
    # As docs/profile.md shows: the plugin's name in conftest.py, a test that asks for the fixture, the suite by its setting.
    (tmp_path / "conftest.py").write_text(next(line for line in PLUGIN.splitlines() if line.startswith("pytest_plugins")))
    (tmp_path / "my_package.py").write_text("def twice(x):\n    return x + x\n")
    shown = PLUGIN[PLUGIN.index("def ") :]
    (tmp_path / "test_kernels.py").write_text(SUITE + "\nimport my_package\n\n" + shown)
    setting = re.search(r"usefixtures = \w+", shown)
    assert setting is not None
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{setting[0]}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 1 and "1 failed, 3 passed" in ran.stdout, ran.stdout + ran.stderr
    assert re.search(r"\(kernel shift has 1 fault\):\n  \S*test_kernels.py:5: race: ", ran.stdout), ran.stdout
