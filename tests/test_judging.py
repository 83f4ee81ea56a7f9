"""`cupyflash check`: right kernels are right, and each kind of fault is named; declarations, draws, bounds, the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash.sim import ptx
from cupyflash.sim.cli import main
from cupyflash.sim.judging import Draw, Judgement, check
from cupyflash.sim.judging.declared import Declaration, declaration
from cupyflash.sim.judging.tensors import compiler_has_shared_memory, minds_nan
from cupyflash.sim.ptx import RawKernel
from cupyflash.sim.ptx.state import segments

cp = pytest.importorskip("cupy")

PAGE = Path(__file__).resolve().parent.parent / "docs" / "judging.md"

CODE = r"""
extern "C" __global__ void twice(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * x[i];
}
extern "C" __global__ void sums(const float* x, float* y, int n) {
    __shared__ float part[64];
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 64) sum += x[blockIdx.x * n + i];
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 32; half; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[blockIdx.x] = part[0];
}
extern "C" __global__ void add_all(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(y, x[i]);
}
"""


def kernel(name: str, source: str = CODE) -> RawKernel:
    return RawKernel(source, name)


def doubled(x: Any, y: Any, n: int | None = None) -> None:
    n = x.size if n is None else n
    kernel("twice")((max(1, -(-n // 128)),), (128,), (x, y, np.int32(n)))


def twice(x: "float32[n]") -> Any:
    y = np.empty_like(x)
    doubled(x, y)
    return y


def reference(x: Any) -> Any:
    return 2 * x


def sums(x: "float32[m, n]", y: "out float32[m]") -> None:
    kernel("sums")((x.shape[0],), (64,), (x, y, np.int32(x.shape[1])))


def sums_reference(x: Any) -> Any:
    return x.sum(axis=1)


def kinds(verdict: Judgement) -> set[str]:
    return {fault.kind for fault in verdict.faults}


@pytest.mark.parametrize(("function", "against"), [(twice, reference), pytest.param(sums, sums_reference, marks=pytest.mark.wide)])
def test_right_kernels_are_right(function: Callable[..., Any], against: Callable[..., Any]) -> None:
    verdict = check(function, against)
    assert verdict.verdict == "right", verdict.text()
    assert {one.draw for one in verdict.conditions} <= {one.draw for one in verdict.tried if not one.demanded}
    assert json.loads(json.dumps(verdict.to_dict()))["planned"] == len(verdict.tried)


def all_but_one(x: "float32[n]") -> Any:
    y = np.empty_like(x)
    doubled(x, y, x.size - 1 if x.size > 1000 else x.size)
    return y


def in_place(x: "float32[n]") -> Any:
    doubled(x, x)
    return x


KEPT = np.zeros(1 << 17, np.float32)


def kept(x: "float32[n]") -> Any:
    y = KEPT[: x.size]
    doubled(x, y)
    return y


def on_the_host(x: "float32[n]") -> Any:
    return 2 * x


def other_shape(x: "float32[n]") -> Any:
    return twice(x)[None]


def raising(x: "float32[n]") -> Any:
    if x.size > 1500:
        raise ValueError("too long")
    return twice(x)


def counting(x: "float32[n]", memory: list[int] = []) -> Any:  # noqa: B006
    memory.append(1)
    y = twice(x)
    y[0] += len(memory) % 2
    return y


def rounded(x: "float32[n]") -> Any:
    return twice(x).astype(np.float16).astype(np.float32)


def without_a_barrier(x: "float32[m, n]", y: "out float32[m]") -> None:
    broken = CODE.replace("part[threadIdx.x + half];\n        __syncthreads();", "part[threadIdx.x + half];")
    kernel("sums", broken)((x.shape[0],), (64,), (x, y, np.int32(x.shape[1])))


def unwritten_sum(x: "float32[n]") -> Any:
    y = np.empty(1, np.float32)
    kernel("add_all")((-(-x.size // 128),), (128,), (x, y, np.int32(x.size)))
    return y


def summed(x: Any) -> Any:
    return x.sum(keepdims=True)


@pytest.mark.parametrize(
    ("function", "against", "kind"),
    [
        (all_but_one, reference, "unwritten"),
        (in_place, reference, "changed input"),
        (kept, reference, "overwritten"),
        (on_the_host, reference, "not launched"),
        (other_shape, reference, "shape"),
        (raising, reference, "raised"),
        (counting, reference, "state"),
        (rounded, reference, "wrong values"),
        (without_a_barrier, sums_reference, "race"),
        (unwritten_sum, summed, "uninitialised"),
    ],
)
def test_faults_have_their_names(function: Callable[..., Any], against: Callable[..., Any], kind: str) -> None:
    # What a function keeps shows in a later draw: one is made in less time.
    verdict = check(function, against, seconds=2 if function is kept else 0.1)
    assert verdict.verdict == "wrong" and kind in kinds(verdict), verdict.text()


def test_bits_that_depend_on_the_order_are_a_condition_unless_strict() -> None:
    def atomic(x: "float32[n]") -> Any:
        y = np.zeros(1, np.float32)
        kernel("add_all")((-(-x.size // 128),), (128,), (x, y, np.int32(x.size)))
        return y

    assert "bits" in {one.kind for one in check(atomic, summed, only=0).conditions}
    assert kinds(check(atomic, summed, only=0, strict=True)) == {"bits"}


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("float32[m, 16*k]", Declaration(("float32",), ("m", "16*k"))),
        ("'float16 | bfloat16[...]'", Declaration(("float16", "bfloat16"), ("...",))),
        ("int32[n] in range(1, m)", Declaration(("int32",), ("n",), "range(1, m)")),
        ("out float32[n]", Declaration(("float32",), ("n",), None, "out")),
        ("float32[m, n<=64]", Declaration(("float32",), ("m", "n<=64"))),
        ("n", Declaration((), size="n")),
        (float, Declaration(("float",))),
        ("np.ndarray", None),
        ("list[int]", None),
        ("Stream", None),
        (None, None),
    ],
)
def test_annotations_declare_inputs(annotation: Any, expected: Declaration | None) -> None:
    assert declaration(annotation) == expected


@pytest.mark.parametrize(
    "wrong", ["float32[2*n<=64]", "float32[n] in m", "out float32", "float32[n()]", "float32[x.y]", "int32[n] in list(m)"]
)
def test_wrong_declarations_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"write in range|no size|only an array"):
        declaration(wrong)


def test_undeclared_inputs_are_asked_for() -> None:
    def misspelt(x: "flaot32[n]") -> Any:
        return x

    with pytest.raises(ValueError, match=r"parameter 'x' is not declared by .*flaot32\[n\]"):
        check(misspelt, reference)
    with pytest.raises(ValueError, match="parameter 'x' is not declared"):
        check(lambda x: x, reference)


def test_inputs_come_from_a_function_if_there_is_one() -> None:
    seen: list[tuple[int, ...]] = []

    def inputs(draw: Draw) -> Any:
        return draw.array((draw.size("n", multiple=8, least=16),), "float32", 1, 2)

    def function(x: Any) -> Any:
        seen.append(x.shape)
        assert x.size % 8 == 0 and x.size >= 16 and x.min() >= 1 and x.max() <= 2
        return twice(x)

    verdict = check(function, reference, inputs)
    assert verdict.verdict == "right" and len(set(seen)) > 3, verdict.text()


def test_inputs_say_which_arrays_are_written() -> None:
    def inputs(draw: Draw) -> Any:
        n = draw.size("n")
        return draw.array(n), draw.out(n), n

    def solve(A: Any, B: Any, N: int) -> None:
        doubled(A, B, N)

    def short(A: Any, B: Any, N: int) -> None:
        doubled(A, B, N - 1)

    assert not check(solve, lambda A, N: 2 * A, inputs, seconds=0.1).faults
    assert kinds(check(short, lambda A, N: 2 * A, inputs, only=0)) == {"unwritten"}


def test_memory_that_nobody_wrote_is_seen_by_the_next_kernel() -> None:
    y = np.empty(1, np.float32)
    with ptx.simulated_cupy(), ptx.simulation(findings="keep") as launches:
        made, half = cp.empty(64, np.float32), cp.empty(64, np.float32)
        half[32:] = 1
        for x in (made, half, half[32:], cp.zeros(64, np.float32)):
            kernel("sums")((1,), (64,), (x, y, np.int32(x.size)))
    assert [[finding.kind for finding in launch.findings] for launch in launches] == [["uninitialised"]] * 2 + [[], []]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "complex64", "bfloat16"])
def test_fresh_memory_shows_which_elements_nobody_wrote(dtype: str) -> None:
    import ml_dtypes

    x = segments.empty((4, 6), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x[1, ::2] = 3
    written = np.zeros((4, 6), bool)
    written[1, ::2] = True
    assert (segments.unwritten_elements(x) == ~written).all()
    mask = segments.unwritten(x[1:])
    assert mask is not None and (mask.all(-1) == ~written[1:]).all()
    assert segments.unwritten(np.empty(3)) is None and segments.unwritten(x[1, ::2]) is None


def test_the_command_names_the_fault_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"(?:<!-- ([\w.]+) -->\n)?```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, text in blocks:
        if name:
            (tmp_path / name).write_text(text)
    told = next(text for _, text in blocks if text.startswith("wrong"))
    result = CliRunner().invoke(main, ["check", "kernel.py::no_tail", "--against", "reference.py::gelu"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line for line in lines if line in told.splitlines()] == told.splitlines(), result.output
    options = ["--only", "0", "--json", "--output", "v.json"]
    again = CliRunner().invoke(main, ["check", "kernel.py::no_tail", "--against", "reference.py::gelu", *options])
    made = json.loads((tmp_path / "v.json").read_text())
    assert json.loads(again.stdout) == made and made["faults"][0]["evidence"]["from_to"] == [[1792, 1802]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("k.py::f --against k.py", "is not FILE.py::NAME"),
        ("k.py::nothing --against k.py::f", "has no function nothing"),
        ("absent.py::f --against k.py::f", "no such file"),
        ("k.py::f --against broken.py::f", r"broken.py raises ZeroDivisionError at broken.py:1"),
        ("k.py::f --against k.py::f --only 999", "there is no draw 999"),
    ],
)
def test_wrong_input_is_one_line(words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("k.py").write_text('def f(x: "float32[n]"):\n    return x\n')
    Path("broken.py").write_text("1 / 0\n")
    result = CliRunner().invoke(main, ["check", *words.split()])
    assert result.exit_code == 2 and re.search(said, result.output), result.output


TANH = r"""extern "C" __global__ void k(const float* x, float* y, int n) {
    int i = blockIdx.x * 128 + threadIdx.x;
    float e = expf(-2 * fabsf(x[i < n ? i : 0]));
    if (i < n) y[i] = copysignf((1 - e) / (1 + e), x[i]);
}"""


def test_digits_lost_at_tiny_values_are_a_condition() -> None:
    def by_exp(x: "float32[n]") -> Any:
        y = np.empty_like(x)
        kernel("k", TANH)((-(-x.size // 128),), (128,), (x, y, np.int32(x.size)))
        return y

    verdict = check(by_exp, lambda x: np.tanh(x))
    assert verdict.verdict == "right" and "accuracy" in {one.kind for one in verdict.conditions}, verdict.text()


def test_sizes_keep_their_limits_and_one_element_has_any_shape() -> None:
    def total(x: "float32[n<=100]") -> Any:
        assert x.size <= 100
        y = np.zeros(1, np.float32)
        kernel("add_all")((1,), (128,), (x, y, np.int32(x.size)))
        return y

    verdict = check(total, lambda x: x.sum(), seconds=0.2)
    assert not verdict.faults and "shape" in {one.kind for one in verdict.conditions}, verdict.text()


@pytest.mark.wide
def test_functions_that_use_pytorch_get_tensors() -> None:
    torch = pytest.importorskip("torch")

    def function(x: "float32[n]") -> Any:
        assert isinstance(x, torch.Tensor)
        y = torch.empty_like(x)
        doubled(x.contiguous().numpy()[: len(x) - 1], y.numpy()[: len(x) - 1])
        return y

    found = check(function, lambda x: torch.add(x, x), only=0)
    assert [fault.evidence["got"] for fault in found.faults] == ["nan"]


SHIFT = """extern "C" __global__ void shift(const signed char* x, signed char* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + 1;
}"""


def test_bytes_that_have_the_pattern_by_chance_are_written() -> None:
    """A kernel that reads what another one wrote to fresh memory is right, whatever bytes those are; what none wrote is found."""

    def twice_shifted(some: int) -> Callable[..., Any]:
        def function(x: "int8[n]") -> Any:
            between, y = cp.empty_like(x), cp.empty_like(x)
            for source, to, count in ((x, between, x.size - some), (between, y, x.size)):
                kernel("shift", SHIFT)((max(1, -(-x.size // 64)),), (64,), (source, to, np.int32(count)))
            return y

        return function

    def shifted(x: Any) -> Any:
        return x + np.int8(2)

    assert not check(twice_shifted(0), shifted, only=0).faults
    assert "uninitialised" in kinds(check(twice_shifted(3), shifted, only=0))


def test_nan_is_an_input_where_the_reference_says_what_becomes_of_it() -> None:
    def guarded(x: Any) -> Any:
        return np.where(np.isnan(x), 0, x)

    def calls(x: Any) -> Any:
        return helper(x)

    assert minds_nan(guarded) and minds_nan(np.nansum) and minds_nan(lambda x: np.fmax(x, 0)) and minds_nan(calls)
    assert not minds_nan(lambda x: np.where(x < 0, np.nan, x)) and not minds_nan(reference)


def helper(x: Any) -> Any:
    return np.nan_to_num(x)


@pytest.mark.parametrize("kinds, told", [(["triton.runtime.jit"], True), (["numba.cuda.dispatcher"], False), ([], False)])
def test_shared_memory_is_the_compilers_in_triton_alone(kinds: list[str], told: bool) -> None:
    def function() -> Any:
        return kernels

    kernels = [type("Kernel", (), {"__module__": kind})() for kind in kinds]
    space = {f"kernel{k}": one for k, one in enumerate(kernels)}
    assert compiler_has_shared_memory(type(function)(function.__code__, space, closure=function.__closure__)) is told
    gluon = {**space, "other": type("Kernel", (), {"__module__": "triton.experimental.gluon._runtime"})()}
    assert not compiler_has_shared_memory(type(function)(function.__code__, gluon, closure=function.__closure__))
