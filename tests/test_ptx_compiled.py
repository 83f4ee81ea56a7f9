"""Launches by compiled code (CUPYFLASH_ENGINE=llvm) equal NumPy's: bytes, traffic, counters and findings."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyflash.sim import ptx
from cupyflash.sim.ptx import module as launches
from cupyflash.sim.ptx.execute import compiled
from cupyflash.sim.ptx.execute.compiled import Compiler, pays

KERNELS = (Path(__file__).parent / "kernels" / "compiled.cu").read_text()

RNG = np.random.default_rng(1)
ROWS = np.concatenate([[0], np.cumsum(RNG.integers(0, 9, 100))]).astype(np.int32)
SPECIAL = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-40, -1e-40, 3e38, 1e-38, 2, -3, 7.5], np.float32)

LOGGED = np.concatenate(
    [np.exp2(RNG.uniform(-140, 127, 2048)), np.exp2(np.arange(-148, 128)), 1 + RNG.integers(-4096, 4096, 3819) * 2.0**-23]
).astype(np.float32)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def n(value: int) -> np.int32:
    return np.int32(value)


wide = pytest.mark.wide
CASES = [
    pytest.param("gemm16", (4, 4), (16, 16), [floats(64, 64), floats(64, 64), zeros(64, 64), n(64)], True, marks=wide),
    ("reduce", 8, 256, [floats(2000), zeros(8), n(2000)], True),
    ("nosync", 8, 256, [floats(2000), zeros(8), n(2000)], False),
    pytest.param("transpose", (3, 3), (32, 8), [floats(96, 96), zeros(96, 96), n(96)], True, marks=wide),
    ("saxpy", 9, 128, [floats(1100), floats(1100), n(1100)], True),
    ("beyond", 4, 128, [floats(512), zeros(512), n(512)], False),
    ("samespot", 4, 128, [floats(512), zeros(512), n(512)], False),
    ("unwritten", 1, 64, [floats(64), zeros(64), n(64)], False),
    pytest.param(
        "spmv",
        4,
        32,
        [ROWS, RNG.integers(0, 100, ROWS[-1]).astype(np.int32), floats(int(ROWS[-1])), floats(100), zeros(100), n(100)],
        True,
        marks=wide,
    ),
    pytest.param("softmax", 8, 128, [floats(32, 200), zeros(32, 200), n(200)], True, marks=wide),
    pytest.param("stencil", (2, 8), (32, 8), [floats(64, 64).astype(np.float64), np.zeros((64, 64)), n(64)], True, marks=wide),
    pytest.param("vec4", 3, 64, [floats(192, 4), zeros(192, 4), n(1)], True, marks=wide),
    # Neighbouring bytes of a word that different threads write.
    pytest.param("bytes", 1, 64, [RNG.integers(0, 256, 64).astype(np.uint8), np.zeros(64, np.int16), n(1)], True, marks=wide),
    pytest.param(
        "ints", 64, 64, [RNG.integers(-(2**31), 2**31, 4096).astype(np.int32), np.zeros(4096, np.int32), n(1)], True, marks=wide
    ),
    ("hist", 3, 128, [RNG.integers(0, 256, 3000).astype(np.uint8), np.zeros(64, np.uint32), n(3000)], True),
    # Results of atomics are used; a sum of floats would wait, which others do not.
    *(
        pytest.param(
            "atoms", 8, 64, [RNG.integers(-999, 999, 512).astype(np.int32), np.zeros(640, np.int32), n(k)], not k, marks=wide
        )
        for k in (0, 1)
    ),
    # The last of them has a place of its own, or one that an atomic before has: there the order is NumPy's.
    *(
        pytest.param(
            "picked", 80, 64, [RNG.integers(0, 999, 5120).astype(np.int32), np.zeros(10500, np.int32), n(k)], clean, marks=wide
        )
        for k, clean in ((40, True), (4, False))
    ),
    # Local memory: places that somebody wrote, or nobody; one beyond the end.
    *(
        pytest.param("own", 8, 64, [RNG.integers(0, 99, 512).astype(np.int32), np.zeros(512, np.int32), n(k)], k != 7, marks=wide)
        for k in (40, 1, 7)
    ),
    # An assertion.
    *(
        pytest.param("sure", 4, 64, [RNG.integers(0, 99, 256).astype(np.int32), np.zeros(256, np.int32), n(k)], k == 99, marks=wide)
        for k in (99, 90)
    ),
    ("found", 16, 64, [np.sort(RNG.integers(0, 700, 999)).astype(np.int32), np.zeros(1024, np.int32), n(999)], True),
    # Logarithms: of all sizes, near 1, of 0 and infinity; of a negative number NaN.
    *(
        pytest.param("logs", 96, 64, [np.append(LOGGED, np.float32(one)), zeros(6144), n(1)], one >= 0, marks=wide)
        for one in (0.0, np.inf, -1.0)
    ),
    # Addresses without a pattern, stores of some lanes; then two lanes at one place, and a place beyond the end.
    *(
        pytest.param("permute", 16, 64, [places.astype(np.int32), np.zeros(2048, np.int32), n(1024)], clean, marks=wide)
        for places, clean in (
            (RNG.permutation(1024), True),
            (RNG.permutation(np.append(np.arange(1, 1024), 7)), False),
            (RNG.permutation(np.append(np.arange(1, 1024), 4000)), False),
        )
    ),
    # A register that only some lanes have written; then others read it.
    *(
        pytest.param("maybe", 4, 64, [RNG.integers(0, 99, 256).astype(np.int32), np.zeros(256, np.int32), n(k)], k == 1, marks=wide)
        for k in (1, 2)
    ),
    ("mixed", 2, 64, [RNG.integers(0, 9, 128).astype(np.int32), np.zeros(256, np.int32), n(1)], False),
    pytest.param("floats", 64, 64, [floats(4096) * 8, zeros(4096), n(1)], True, marks=wide),
    # A result is NaN, whose bits are NumPy's.
    pytest.param("floats", 4, 64, [RNG.choice(SPECIAL, 256), zeros(256), n(1)], False, marks=wide),
    # Floating-point sums: their order is one, unless somebody looks at them, or adds in another type.
    ("scatter", 8, 128, [floats(1024), zeros(64), n(1)], True),
    pytest.param("scatter", 8, 128, [floats(1024) * np.float32(1e-38), zeros(64), n(1)], True, marks=wide),
    *(pytest.param("looked", 8, 128, [floats(1024), zeros(128), n(k)], not k, marks=wide) for k in (0, 1)),
    pytest.param("twofold", 8, 128, [floats(1024), zeros(128), n(1)], False, marks=wide),
    ("counted", 8, 128, [RNG.integers(0, 9, 1024).astype(np.int32), np.zeros(1024, np.int32), n(1)], True),
    *(pytest.param("volatiles", 1, 128, [floats(128), zeros(128), n(k)], bool(k), marks=wide) for k in (0, 1)),
    ("table", 4, 64, [floats(256), zeros(256), np.append(floats(8), np.int32(7).view(np.float32)).view("V36")[0]], True),
    # No NaN, but zeros of both signs and subnormals.
    pytest.param("special", 4, 64, [RNG.choice(SPECIAL[[3, 4, 5, 6, 8, 9, 10, 11]], 256), zeros(256), n(1)], True, marks=wide),
]


@pytest.fixture(scope="module")
def kernels() -> ptx.Module:
    pytest.importorskip("llvmlite", reason="the extra llvm brings it")
    return ptx.Module.from_source(KERNELS)


def both(kernels, monkeypatch, name, grid, block, args, clean, **more):
    """Runs a launch by NumPy and by compiled code, and compares all there is; returns the masks of unwritten bytes."""
    ran, found = [], []
    own = launches.run_compiled
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    for engine in ("numpy", "llvm"):
        monkeypatch.setenv("CUPYFLASH_ENGINE", engine)
        mine = [each.copy() if isinstance(each, np.ndarray) else each for each in args]
        launch = kernels.launch(name, grid, block, mine, **more)
        unwritten = {key: mask.tobytes() for key, mask in launch.unwritten.items()}
        memory = [each.tobytes() for each in mine]
        found.append((memory, launch.counters, launch.traffic, launch.findings, launch.findings_total, unwritten))
    assert found[0] == found[1]
    assert ran == [clean]  # what is clean ran by compiled code, all else again by NumPy
    return launch.unwritten


@pytest.mark.parametrize(("name", "grid", "block", "args", "clean"), CASES)
def test_compiled_code_equals_numpy(kernels, monkeypatch, name, grid, block, args, clean) -> None:
    both(kernels, monkeypatch, name, grid, block, args, clean)


@pytest.mark.parametrize(("name", "clean"), [("vec4", True), ("saxpy", False)])
def test_unwritten_arrays_are_followed(kernels, monkeypatch, name, clean) -> None:
    found = both(kernels, monkeypatch, name, 2, 64, [floats(300, 4), zeros(300, 4), n(512)], clean, unwritten=["arg1"])
    assert found["arg1"].any()


def remembered(history: ptx.History) -> list:
    """Returns all that a history remembers of accesses, without the moments of the launches."""
    sites = [(site.run.launch, site.instruction.line) for site in history.past.sites]
    found = []
    for region in history.past.regions.values():
        for kind, tables in enumerate(region.kinds):
            for table in tables:
                rows = np.flatnonzero(table.sites)
                places = [sites[one] for one in table.sites[rows].tolist()]
                found.append((kind, region.shift, rows.tolist(), (table.entries[rows] & np.uint64(0xFFFFFFFF)).tolist(), places))
    return found


def test_launches_of_a_history_remember_the_same(kernels, monkeypatch) -> None:
    """Launches by compiled code leave in a history what NumPy's leave: so a later race has the same words."""
    inputs = [floats(64, 64), floats(64, 64), floats(2000), floats(64)]
    ran, found = [], []
    own = launches.run_compiled
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    for engine in ("numpy", "llvm"):
        monkeypatch.setenv("CUPYFLASH_ENGINE", engine)
        a, b, c, d = (one.copy() for one in inputs)
        product, sums, hits = zeros(64, 64), zeros(8), np.zeros(64, np.uint32)
        history = ptx.History()
        one, other = history.stream(), history.stream()
        calls = [
            (one, "gemm16", (4, 4), (16, 16), [a, b, product, n(64)]),  # many lanes, warps and blocks read each element
            (one, "reduce", 8, 256, [c, sums, n(2000)]),
            (one, "saxpy", 9, 128, [a, c, n(1100)]),
            (one, "hist", 3, 128, [d.view(np.uint8), hits, n(256)]),  # atomics of all blocks at one place
            (other, "samespot", 1, 64, [d, zeros(64), n(64)]),
            (other, "reduce", 8, 256, [a, zeros(8), n(2000)]),  # the other stream reads it, too
            (other, "saxpy", 2, 64, [d, b, n(128)]),  # and writes what that one reads
            (other, "bytes", 1, 64, [product.view(np.uint8), zeros(64), n(1)]),  # and reads what that one writes
        ]
        results = [kernels.launch(*call, stream=stream) for stream, *call in calls]
        found.append(([(each.findings, each.counters) for each in results], remembered(history)))
    assert found[0] == found[1]
    assert ran == [True] * 6 + [False] * 2
    assert [bool(findings) for findings, _ in found[0][0]] == [False] * 6 + [True] * 2


def test_long_launches_take_compiled_code_by_themselves(kernels, monkeypatch) -> None:
    monkeypatch.delenv("CUPYFLASH_ENGINE", raising=False)
    ran = []
    own = launches.run_compiled
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    code, args = kernels.code("vec4"), [floats(192, 4), zeros(192, 4), n(1)]
    for seconds in (0, 1e3):
        code.seconds_of_wave = seconds
        kernels.launch("vec4", 3, 64, args)
    assert ran == [True]
    monkeypatch.setenv("CUPYFLASH_ENGINE", "numpy")
    kernels.launch("vec4", 3, 64, args)
    assert ran == [True]
    assert not pays(code, 1)  # the time of a wave is known again
    code.seconds_of_wave = 1e3
    assert pays(code, 1)
    code.gave_up = True
    assert not pays(code, 1)
    code.gave_up = False
    code.compiled_seconds_of_wave = 1e3  # no faster than NumPy
    assert not pays(code, 1)
    code.compiled_seconds_of_wave = 1.0
    assert pays(code, 1)
    monkeypatch.setattr(compiled, "installed", lambda: False)
    assert not pays(code, 1)


def test_another_engine_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUPYFLASH_ENGINE", "cuda")
    module = ptx.Module.from_ptx(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }")
    with pytest.raises(ValueError, match="must be numpy or llvm, got 'cuda'"):
        module.launch("k", 1, 1, [])


def test_without_llvmlite_the_engine_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    with pytest.raises(ImportError, match=r"CUPYFLASH_ENGINE=llvm needs llvmlite: pip install 'cupyflash\[sim\]'"):
        Compiler()


def test_machine_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process takes it; a file that is damaged or another's is made anew."""
    pytest.importorskip("llvmlite", reason="the extra llvm brings it")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    made = []
    own = Compiler.compiled
    monkeypatch.setattr(Compiler, "compiled", lambda *given: made.append(given) or own(*given))

    def seven() -> int:
        compiler = Compiler()
        return ctypes.CFUNCTYPE(ctypes.c_int32)(compiler.function("define i32 @stretch() {\n  ret i32 7\n}", [], ""))()

    assert seven() == seven() == 7 and len(made) == 1
    (file,) = tmp_path.glob("*/*.o")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert seven() == 7 and len(made) == 2
    file.chmod(0o666)
    assert seven() == 7 and len(made) == 3
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert seven() == 7 and len(made) == 4
