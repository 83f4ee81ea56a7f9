"""The package as it is installed: what its import brings, what it does without CuPy, what it says then."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import cupyflash
from cupyflash import kernels_cu
from cupyflash.launch import nvrtc


def python(code: str) -> str:
    """The output of a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=3600).stdout


DOCUMENTED = (
    *("attention", "attention_backward", "attention_decode", "attention_varlen", "attention_varlen_backward", "attention_vjp"),
    *(
        "attention_jvp",
        "attention_double_backward",
        "block_mask",
        "dropout_mask",
        "merge_states",
        "plan",
        "simulated_device",
        "softmax",
        "warmup",
        "warmup_decode",
    ),
    *("Device", "Mask", "Options", "Problem", "Score", "TileSchedule", "TileSize", "Tiling", "schedules.plan_softmax"),
    *("distributed.Communicator", "distributed.RankFailed", "distributed.parts", "distributed.plan", "distributed.ring_attention"),
    *("sim.execute", "sim.execute_backward", "sim.profile", "sim.replay", "sim.l2", "sim.ring.replay", "sim.trace.trace"),
    *("sim.theory.traffic", "sim.theory.ring.link_bytes", "sim.verification.verify", "sim.ptx.Module", "sim.ptx.RawKernel"),
    *("sim.ptx.Stream", "sim.ptx.TensorMap", "sim.ptx.pytest_plugin", "sim.ptx.simulated_cupy", "sim.triton.simulated_triton"),
    *("sim.cute.simulated_cute", "sim.numba.simulated_numba", "sim.judging.check"),
)
"""Import paths that README and docs have had: whatever moves inside, they stay."""


def test_documented_import_paths_work() -> None:
    """Each in an interpreter of its own, which no other test has touched."""
    python(f"import pkgutil\nfor path in {DOCUMENTED!r}: pkgutil.resolve_name('cupyflash.' + path)")


IMPORT = """
import json, sys
import numpy
before, calls = set(sys.modules), 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
import cupyflash
own = calls
loaded = [name for name in sys.modules if name.startswith("cupyflash.")]
for name in cupyflash.__all__:
    getattr(cupyflash, name)
sys.setprofile(None)
print(json.dumps([own, loaded, sorted(set(sys.modules) - before), calls]))
"""


def test_an_import_beyond_numpy_is_small() -> None:
    """The cost of an import, in counts: the imported modules, and the functions that run; by itself it loads nothing more."""
    own, loaded, modules, calls = json.loads(python(IMPORT))
    assert own < 1000 and loaded == ["cupyflash.version"]
    others = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert "cupyflash" in others and others <= {"cupyflash", "ml_dtypes"}
    assert not [name for name in modules if name.startswith("cupyflash.sim.")]
    assert not {"asyncio", "concurrent", "email", "http", "multiprocessing", "subprocess", "unittest"} & set(modules)
    assert 1000 < calls < 100_000


def test_what_needs_no_compiler_imports_no_cupy_and_runs_without_it() -> None:
    python(
        "import sys; sys.modules['cupy'] = None\n"
        "import cupyflash\n"
        "from cupyflash.sim import theory, replay\n"
        "s = cupyflash.plan(cupyflash.Problem(1, 1, 1, 64, 64, 64, 'float16'), cupyflash.Device.named('T4'))\n"
        "assert theory.traffic(s) == replay(s)\n"
        "from click.testing import CliRunner; from cupyflash.sim.cli import main\n"
        "assert CliRunner().invoke(main, ['predict', '--seqlen', '64', '--head-dim', '64']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['devices']).exit_code == 0\n"
    )


@pytest.mark.wide
def test_what_needs_a_compiler_says_what_to_install() -> None:
    out = python(
        "import sys; sys.modules['cupy'] = None; sys.modules['cupy.cuda'] = None; import numpy, cupyflash\n"
        "q = numpy.zeros((16, 64), numpy.float16)\n"
        "try: cupyflash.attention(q, q, q)\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install 'cupyflash[sim]'" in out


@pytest.mark.wide
def test_float16_and_float32_need_no_ml_dtypes() -> None:
    """A bare machine has CuPy, NumPy and a CUDA toolkit; only bfloat16 asks for more, and says so."""
    pytest.importorskip("cupy")
    python(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'ml_dtypes': raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import numpy, cupyflash\n"
        "import cupyflash.sim.profiling.arguments, cupyflash.sim.cli, cupyflash.sim.verification, cupyflash.sim.numbers.yardstick\n"
        "from cupyflash import schedules, sim\n"
        "for dtype in ('float16', 'float32'):\n"
        "    problem = cupyflash.Problem(1, 1, 1, 16, 16, 16, dtype)\n"
        "    for algorithm in ('fa1', 'fa2', 'standard'):\n"
        "        for plan in (cupyflash.plan, schedules.plan_backward):\n"
        "            sim.execution.allocate(plan(problem, cupyflash.Device.named('T4'), algorithm))\n"
        "    assert sim.numbers.yardstick.draw(problem)[0].dtype == dtype\n"
        "assert cupyflash.attention(*3 * [numpy.ones((16, 16), numpy.float16)]).all()\n"
        "try: sim.verification.DTYPES['bfloat16']\n"
        "except ImportError as error: assert 'bfloat16 needs ml_dtypes' in str(error), error\n"
        "else: raise AssertionError\n"
    )


ROOT = Path(__file__).parents[1]
OPTIONAL = ("ml_dtypes", "cuda", "matplotlib", "rich", "torch", "triton", "numba", "jax", "cutlass", "tvm_ffi", "flash_attn")
CUTE = "sim/cute/host_code.py", "benchmarks/flash_attention_4.py", "tests/cute_program.py"
# What is for nobody who has not installed it
FOR_OTHERS = {
    "torch": (
        *("cupyflash/torch/*.py", "examples/torch_*.py", "sim/triton/devices.py"),
        *("tests/beside_torch.py", "tests/triton_program.py", *CUTE),
    ),
    "triton": (
        *("benchmarks/fused_triton.py", "sim/triton/driver.py", "sim/triton/backend/*.py"),
        *("tests/gluon_program.py", "tests/triton_program.py"),
    ),
    "numba": ("sim/numba/dispatch.py", "tests/numba_program.py"),
    **dict.fromkeys(("cutlass", "tvm_ffi", "flash_attn"), CUTE),
    "jax": ("cupyflash/jax.py",),
}


def test_nothing_imports_what_is_optional_before_it_is_asked_for() -> None:
    """A module that needs more than a bare machine has could not even be collected there."""
    found = []
    imports = re.compile(rf"^(?:import|from)\b.*\b(?:{'|'.join(OPTIONAL)})\b", re.MULTILINE)  # all others need no look
    for folder in ("cupyflash", "sim", "kernels_cu", "benchmarks", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            for statement in ast.parse(text).body if imports.search(text) else ():
                names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
                names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) and not statement.level else []
                found += [(path.relative_to(ROOT), name) for name in names if name.split(".")[0] in OPTIONAL]
    other = [(str(path), name) for path, name in found if not any(map(path.match, FOR_OTHERS.get(name.split(".")[0], ())))]
    assert found and not other


def test_no_extra_brings_pytorch_or_jax() -> None:
    """PyTorch's usual wheel for Linux takes gigabytes of CUDA along."""
    required = {re.split(r"[^\w.-]", one)[0].lower() for one in metadata.requires("cupyflash") or ()}
    assert {"numpy", "pytest", "mpich"} <= required and not {name for name in required if name.startswith(("torch", "jax"))}


@pytest.mark.parametrize("pathfinder", ["missing", "finding nothing"])
def test_headers_are_found_in_the_usual_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pathfinder: str) -> None:
    """CUDA_PATH, or the toolkit that the nvcc on the PATH belongs to, behind its links; nothing that lacks the header."""
    module = types.SimpleNamespace(find_nvidia_header_directory=lambda _: None) if pathfinder != "missing" else None
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", module)
    monkeypatch.setattr(nvrtc, "find_spec", lambda _: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    toolkit, empty = tmp_path / "cuda-13.9", tmp_path / "empty"
    for made in (toolkit / "include", toolkit / "bin", empty / "include", tmp_path / "bin"):
        made.mkdir(parents=True)
    (toolkit / "include" / "cuda_fp16.h").touch()
    (toolkit / "bin" / "nvcc").touch(0o755)
    (tmp_path / "bin" / "nvcc").symlink_to(toolkit / "bin" / "nvcc")
    for path, where in ((toolkit, "/nowhere"), (empty, str(tmp_path / "bin")), (None, str(tmp_path / "bin"))):
        monkeypatch.setenv("PATH", where)
        monkeypatch.setenv("CUDA_PATH", str(path)) if path else monkeypatch.delenv("CUDA_PATH")
        assert nvrtc.header_directories.__wrapped__() == (str(toolkit / "include"),)


def test_headers_of_wheels_are_found_without_pathfinder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folders of CUDA 13 and of CUDA 12 differ."""
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(nvrtc, "find_spec", lambda _: types.SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    for folder in ("cuda_runtime", "cu13"):
        (tmp_path / folder / "include").mkdir(parents=True)
        (tmp_path / folder / "include" / "cuda_fp16.h").touch()
        assert nvrtc.header_directories.__wrapped__() == (str(tmp_path / folder / "include"),)


def test_a_header_that_is_nowhere_is_an_import_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that needs none compiles all the same, and what else is wrong is still the compiler's own word."""
    pytest.importorskip("cupy")
    monkeypatch.setattr(nvrtc, "header_directories", lambda: ())
    assert ".entry f" in nvrtc.compile_to_ptx('extern "C" __global__ void f() {}', (), "f.cu")
    with pytest.raises(ImportError, match=r"needs the CUDA headers .*nowhere\.h.*CUDA_PATH"):
        nvrtc.compile_to_ptx("#include <nowhere.h>", (), "f.cu")
    with pytest.raises(nvrtc.CompileError, match="expected"):
        nvrtc.compile_to_ptx("int", (), "f.cu")


def test_before_cuda_13_a_function_without_a_space_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 12's compiler takes generic lambdas within a kernel for functions without one."""
    binding = pytest.importorskip("cupy.cuda").nvrtc
    source = 'int f() { return 1; } extern "C" __global__ void g(int* x) { *x = f(); }'
    with pytest.raises(nvrtc.CompileError, match="host functions are not allowed"):
        nvrtc.compile_to_ptx(source, (), "f.cu")
    monkeypatch.setattr(binding, "getVersion", lambda: (12, 9))
    assert ".entry g" in nvrtc.compile_to_ptx(source, (), "f.cu")


def test_a_missing_compiler_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy loads NVRTC when it is first called, and then says RuntimeError."""
    binding = pytest.importorskip("cupy.cuda").nvrtc

    def missing(*_: object) -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    monkeypatch.setattr(binding, "createProgram", missing)
    with pytest.raises(ImportError, match=r"needs NVRTC \(CuPy failed to load libnvrtc\.so\.13\): pip install"):
        nvrtc.compile_to_ptx("", (), "f.cu")


def test_kernels_are_beside_the_package() -> None:
    assert "fa1_forward" in kernels_cu.source("fa1_forward.cu")
    assert len(kernels_cu.fingerprint()) == 16


def test_the_names_that_are_loaded_when_asked_for_are_those_that_editors_see() -> None:
    tree = ast.parse(Path(cupyflash.__file__).read_text())
    (seen,) = [each.body for each in tree.body if isinstance(each, ast.If)]
    pairs = [(each.module, alias.name, alias.asname) for each in seen if isinstance(each, ast.ImportFrom) for alias in each.names]
    assert pairs == sorted((f"cupyflash.{home}", name, name) for name, home in cupyflash._HOME.items())
    assert {*cupyflash.__all__, "__version__"} <= set(dir(cupyflash))
    with pytest.raises(AttributeError, match="'cupyflash' has no attribute 'nothing'"):
        cupyflash.nothing  # noqa: B018


@pytest.mark.parametrize("name", cupyflash.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    assert getattr(cupyflash, name).__doc__


ROOT = Path(__file__).resolve().parent.parent


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements within it, however deep; no expressions, which are most of a tree."""
    yield node
    for part in ("body", "handlers", "cases", "orelse", "finalbody"):
        for each in getattr(node, part, ()):
            yield from statements(each)


@cache
def sources() -> dict[Path, list[ast.AST]]:
    """The statements of each file."""
    paths = [path for folder in ("cupyflash", "sim") for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT): [*statements(ast.parse(path.read_text()))] for path in paths}


MOST_PARAMETERS = 8


def parameters(node: ast.FunctionDef) -> int:
    """The number of parameters of a function, `self` and `cls` not counted."""
    named = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")]) + bool(node.args.vararg) + bool(node.args.kwarg)


def test_only_what_the_reference_describes_takes_more_than_eight_parameters() -> None:
    """Functions, and methods of the classes, that docs/reference.md names: all beyond a few are named options of a user's call."""
    named = set(re.findall(r"^::: .*\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE))
    crowds = []
    for path, nodes in sources().items():
        public = {part for node in nodes if isinstance(node, ast.ClassDef) and node.name in named for part in node.body}
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node not in public and node.name not in named]
        crowds += [f"{path}: {node.name}" for node in functions if parameters(node) > MOST_PARAMETERS]
    assert crowds == []


def test_a_class_has_a_name_of_its_own() -> None:
    classes = Counter(node.name for nodes in sources().values() for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, uses in classes.items() if uses > 1] == []


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = {
        f"{path}: {text}"
        for path, nodes in sources().items()
        for node in nodes
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and re.match(r"(What|Of|Which|Where|How)\b", text)
    }
    assert texts == set()
