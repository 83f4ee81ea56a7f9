"""The n-th allocation, launch, compilation, write or message fails: a clear error, nothing half-written, the next call right.

A call is run once to count its events, then once for each of them: a few in the quick suite, in the wide one the first and the
last at each place that asks, CUPYFLASH_TEST_EXAMPLES times as many.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cupyflash
from cupyflash import Mask, attention
from cupyflash.distributed import (
    RankFailed,
    ring_attention,
    ring_attention_backward,
    ring_attention_varlen,
    ring_attention_varlen_backward,
    ring_backward,
    shard,
    threads,
)
from cupyflash.distributed import ring as ring_forward
from cupyflash.launch import compiler, cubins, dispatch, driver, first_use, launcher, nvrtc
from cupyflash.launch.nvrtc import CompileError
from cupyflash.sim import execution, files
from cupyflash.sim.cli import main
from failing_memory import MEMORY
from faults import Disk, Killed, Lossy, Nth, drawn, left_as_found, no_right, no_space, same, temporary_folder, within  # noqa: F401 (a fixture)
from rings import arrays as of_a_ring
from rings import plain_pieces  # noqa: F401 (a fixture)
from suites import MORE, sample, wide

Arrays = Mapping[str, Any]
Call = Callable[[Any], Sequence[Any]]


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float16)


Q, K, V, DOUT = draw(2, 16, 16), draw(1, 20, 16), draw(1, 20, 16), draw(2, 16, 16)
BIAS = draw(16, 20)
BOUNDS = np.array([0, 5, 16], np.int32), np.array([0, 8, 20], np.int32)
PACKED = {name: x.swapaxes(0, 1).copy() for name, x in {"q": Q, "k": K, "v": V, "dout": DOUT}.items()}


def whole() -> dict[str, np.ndarray]:
    out, lse = attention(Q, K, V, causal=True, bias=BIAS, return_lse=True)
    return {"q": Q, "k": K, "v": V, "dout": DOUT, "out": out, "lse": lse, "bias": BIAS}


def packed() -> dict[str, np.ndarray]:
    out, lse = cupyflash.attention_varlen(*(PACKED[name] for name in "qkv"), *BOUNDS, return_lse=True)
    return PACKED | {"out": out, "lse": lse}


def appended() -> dict[str, np.ndarray]:
    caches = {name: draw(1, 1, 32, 16) for name in ("k_cache", "v_cache")}
    return {"q": draw(1, 2, 1, 16), **caches, "k": draw(1, 1, 2, 16), "v": draw(1, 1, 2, 16), "lengths": np.array([5], np.int32)}


GIVEN: dict[str, Callable[[], dict[str, np.ndarray]]] = {
    "attention": whole,
    "attention into out": lambda: whole() | {"into": np.zeros_like(Q)},
    "attention with a block_mask": whole,
    "attention_backward": whole,
    "attention_vjp": whole,
    "attention_varlen": packed,
    "attention_varlen_backward": packed,
    "attention_decode": appended,
    "dropout_mask": dict,
    "softmax": lambda: {"x": Q},
    "merge_states": lambda: {"o": whole()["out"], "lse": whole()["lse"]},
}
arguments = cache(lambda name: GIVEN[name]())  # launches: by the tests that ask, not whenever tests are collected
# What a call may have written in part where it fails: all of `out`, and of a cache the places of new keys.
NEW = np.s_[:, :, 5:7]
WRITTEN: dict[str, dict[str, Any]] = {
    "attention into out": {"into": np.s_[:]},
    "attention_decode": {"k_cache": NEW, "v_cache": NEW},
}


def call(name: str, x: Arrays, xp: Any = np) -> Sequence[Any]:
    """The results of a call: new arrays, and those that it was given to write."""
    match name:
        case "attention":
            return attention(x["q"], x["k"], x["v"], causal=True, bias=x["bias"], return_lse=True)
        case "attention into out":
            return [attention(x["q"], x["k"], x["v"], out=x["into"])]
        case "attention with a block_mask":
            return [attention(x["q"], x["k"], x["v"], mask=cupyflash.block_mask(Mask("k <= q + 3"), x["q"], x["k"]))]
        case "attention_backward":
            of = [x[name] for name in ("dout", "q", "k", "v", "out", "lse")]
            return cupyflash.attention_backward(*of, causal=True, bias=x["bias"], return_dbias=True)
        case "attention_vjp":
            out, pullback = cupyflash.attention_vjp(x["q"], x["k"], x["v"], causal=True)
            return out, *pullback(x["dout"])
        case "attention_varlen":
            return cupyflash.attention_varlen(x["q"], x["k"], x["v"], *BOUNDS, causal=True, return_lse=True)
        case "attention_varlen_backward":
            return cupyflash.attention_varlen_backward(*(x[name] for name in ("dout", "q", "k", "v", "out", "lse")), *BOUNDS)
        case "attention_decode":
            made = cupyflash.attention_decode(x["q"], x["k_cache"], x["v_cache"], x["lengths"], k=x["k"], v=x["v"])
            return made, x["k_cache"], x["v_cache"]
        case "dropout_mask":
            return [cupyflash.dropout_mask((1, 2, 16, 20), 0.5, seed=1, xp=xp)]
        case "softmax":
            return [cupyflash.softmax(x["x"])]
        case "merge_states":
            return cupyflash.merge_states(x["o"], x["lse"], x["o"], x["lse"])
    raise AssertionError(name)


def host(array: Any) -> np.ndarray:
    return np.array(array) if isinstance(array, np.ndarray) else array.get()


def untouched(name: str, found: Arrays) -> bool:
    """The arguments of a call that it may not write."""
    for key, array in found.items():
        before, after = arguments(name)[key].copy(), host(array)
        if (place := WRITTEN.get(name, {}).get(key)) is not None:
            before[place] = after[place] = 0
        if not np.array_equal(before, after):
            return False
    return True


def fresh(name: str, xp: Any = np) -> dict[str, Any]:
    return {key: np.array(array) if xp is np else xp.asarray(array) for key, array in arguments(name).items()}


QUICK = ("attention", "attention_decode")


@pytest.mark.parametrize(("name", "most"), [*((name, 4) for name in QUICK), *(wide(name, 14) for name in GIVEN)])
def test_numpys_memory_fails(name: str, most: int, temporary: Path) -> None:
    """Any allocation on the simulated device fails, of the call or of the machine. The same arrays are right in the next call."""
    call(name, fresh(name))
    given = fresh(name)
    with MEMORY.failing_at(0):
        expected = call(name, given)
    chosen = drawn(MEMORY.places, most * MORE)
    for n in chosen:
        given = fresh(name)
        with left_as_found(temporary):
            with pytest.raises(MemoryError, match="Unable to allocate"), MEMORY.failing_at(n):
                call(name, given)
            assert untouched(name, given), n
        if n in chosen[::10] or n == chosen[-1]:
            assert same(map(host, call(name, given)), expected), n


def test_a_fresh_programs_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """While PTX is taken apart: nothing half is kept."""
    arrays, text = fresh("softmax"), execution.ptx
    expected = [*map(host, call("softmax", arrays))]
    for n in (1, 2, 5, 20):
        monkeypatch.setattr(execution, "ptx", lambda *asked, n=n: f"{text(*asked)}\n// {n}")
        with pytest.raises(MemoryError), MEMORY.failing_at(n):
            call("softmax", arrays)
        assert same(map(host, call("softmax", arrays)), expected), n


@pytest.mark.wide
def test_a_block_mask_whose_first_call_failed_is_right_in_the_next(temporary: Path) -> None:
    """The tiles that it found are kept whole, or not at all."""
    expected = attention(Q, K, V, mask=cupyflash.block_mask(Mask("k <= q + 3"), Q, K))
    mask = cupyflash.block_mask(Mask("k <= q + 3"), Q, K)
    with MEMORY.failing_at(0):
        attention(Q, K, V, mask=mask)
    for n in drawn(MEMORY.places, 8):
        mask = cupyflash.block_mask(Mask("k <= q + 3"), Q, K)
        with pytest.raises(MemoryError), MEMORY.failing_at(n):
            attention(Q, K, V, mask=mask)
        assert np.array_equal(attention(Q, K, V, mask=mask), expected), n


# -- a GPU's stand-in -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The stand-in for CuPy, which has compiled nothing yet and keeps it in a folder of its own."""
    pytest.importorskip("cupy.cuda._compiler_cache")  # of CuPy 14, whose classes the stand-in takes
    import stand_in_cupy
    from stand_in_cupy import raw

    monkeypatch.setenv(first_use.FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(cubins, "compiled", stand_in_cupy.machine_code)
    monkeypatch.setattr(cubins, "compiler", stand_in_cupy.compiler)
    monkeypatch.setattr(driver, "functions", lambda: stand_in_cupy.functions)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(raw, "_disk", raw.DiskKernelCacheBackend())
    monkeypatch.setitem(sys.modules, "cupy", stand_in_cupy)
    for kept in (launcher.KEPT.clear, dispatch.current_gpu.cache_clear, raw._load.cache_clear):
        kept()
    yield stand_in_cupy
    for kept in (launcher.KEPT.clear, dispatch.current_gpu.cache_clear, raw._load.cache_clear):
        kept()


def out_of_memory() -> Exception:
    from cupy.cuda.memory import OutOfMemoryError  # the real one's

    return OutOfMemoryError(512, 0)


def refused() -> Exception:
    from stand_in_cupy.streams import CUDARuntimeError

    return CUDARuntimeError(700)


KINDS = {"memory": out_of_memory, "launches": refused, "modules": refused}
WITHOUT = {("attention into out", "memory"), ("merge_states", "launches"), ("merge_states", "modules")}  # have no such event


def forget() -> None:
    """Forget everything, as a new process: nothing is prepared, nothing loaded."""
    from stand_in_cupy import raw

    launcher.KEPT.clear()
    raw._load.cache_clear()
    compiler._functions.clear()


def allocator(cupy: Any, nth: Nth) -> Callable[[int], Any]:
    own = cupy.cuda.MemoryPool().malloc
    return lambda size: nth.event("malloc") or own(size)


@contextmanager
def failing(cupy: Any, kind: str, nth: Nth, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, events of a kind are the `nth`'s."""
    from stand_in_cupy import raw

    patched = {"launches": (raw.RawKernel, "__call__"), "modules": (raw.RawModule, "get_function")}
    if kind == "memory":
        with cupy.cuda.using_allocator(allocator(cupy, nth)):
            yield
        return
    forget()
    where, name = patched[kind]
    act = getattr(where, name)
    with monkeypatch.context() as context:
        context.setattr(where, name, lambda self, *a, **k: nth.event(name) or act(self, *a, **k))
        yield


@pytest.mark.parametrize(
    ("name", "kind"),
    sample([(name, kind) for name in GIVEN for kind in KINDS], [("attention_decode", "memory"), ("attention", "launches")]),
)
def test_a_gpu_fails(name: str, kind: str, cupy: Any, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each allocation, launch and loading of a module fails, with CuPy's own errors; the same arrays are right in the next call."""
    counting, given = Nth(KINDS[kind]), fresh(name, cupy)
    expected = [*map(host, call(name, fresh(name, cupy), cupy))]
    with failing(cupy, kind, counting, monkeypatch):
        call(name, given, cupy)
    assert bool(counting.places) == ((name, kind) not in WITHOUT)
    for n in range(1, len(counting.places) + 1):
        given, nth = fresh(name, cupy), Nth(KINDS[kind], n)
        with left_as_found(temporary):
            with failing(cupy, kind, nth, monkeypatch), pytest.raises(type(nth.error())):
                call(name, given, cupy)
            assert untouched(name, given), (n, nth.places)
        assert same(map(host, call(name, given, cupy)), expected), (n, nth.places)


@pytest.mark.wide
def test_memory_fails_while_a_graph_is_captured(cupy: Any, temporary: Path) -> None:
    """The capture can be given up, and the same stream takes another one."""
    given = fresh("attention_vjp", cupy)
    expected = [*map(host, call("attention_vjp", given))]
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for n in (1, 2, 0):
            nth = Nth(out_of_memory, n)
            stream.begin_capture()
            with left_as_found(temporary), cupy.cuda.using_allocator(allocator(cupy, nth)):
                if n:
                    with pytest.raises(MemoryError):
                        call("attention_vjp", given)
                else:
                    made = call("attention_vjp", given)
            graph = stream.end_capture()
        graph.launch()
        assert same(map(host, made), expected)


# -- compilers and the disks that keep what they made ---------------------------------------------------------------------


def not_compiled() -> Exception:
    return CompileError("fa2_forward.cu", "the compiler has lost its way")


WORKS: dict[str, Callable[[], object]] = {
    "attention_backward": lambda: call("attention_backward", fresh("attention_backward")),
    "warmup": lambda: cupyflash.warmup(head_dim=16, tiling=(16, 16)),
    "warmup_decode": lambda: cupyflash.warmup_decode(batch=[1, 64], heads=2, head_dim=16, room=4096),
}


TURNS = count()  # each makes other programs, which nobody has compiled yet
COMPILED = [(what, error) for what in WORKS for error in (not_compiled, MemoryError)]


@pytest.mark.parametrize(("what", "error"), sample(COMPILED, [("warmup", not_compiled)]))
def test_a_compiler_fails(what: str, error: Callable[[], Exception], temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program fails: earlier ones stay, and the next call compiles the rest."""
    own, options, work = nvrtc._compile, compiler.options, WORKS[what]

    def compile_anew(nth: Nth, source: str, options: Sequence[str], *more: Any) -> Any:
        nth.event("compile")
        return own(source, [option for option in options if not option.startswith("-DTURN=")], *more)

    n, failed = 0, True
    while failed:
        n, nth, turn = n + 1, Nth(error, n + 1), f"-DTURN={next(TURNS)}"
        monkeypatch.setattr(compiler, "options", lambda kernel, turn=turn: (*options(kernel), turn))
        monkeypatch.setattr(nvrtc, "_compile", partial(compile_anew, Nth(error)))
        with monkeypatch.context() as patched, left_as_found(temporary):
            patched.setattr(nvrtc, "_compile", partial(compile_anew, nth))
            try:
                work()
            except type(error()):
                assert len(nth.places) == n
            else:
                failed = False
        work()
    assert n > len(nth.places) > 0


DISKS = (no_space, no_right)


@pytest.mark.parametrize("error", DISKS)
@pytest.mark.parametrize("before", [False, True])
def test_a_disk_fails_that_keeps_cubins(
    error: Callable[[], OSError], before: bool, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of writing fails: a warning, and the next process finds all of it or none."""
    path, made, old = (
        tmp_path / "cache" / "below" / "cupyflash_1.cubin",
        cubins.CompiledCubin(b"new" * 100, "a"),
        cubins.CompiledCubin(b"old", "b"),
    )
    monkeypatch.setenv(cubins.SAVE_SOURCE, "1")
    n, failed = 0, True
    while failed:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        if before:
            cubins.write(path, old, "")
        n, nth = n + 1, Nth(error, n + 1)
        first_use._say_unusable.cache_clear()
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Disk(nth, tmp_path, patched)
            cubins.write(path, made, "source")
        failed = len(nth.places) >= n
        assert all(each.category is RuntimeWarning for each in said)
        assert len(said) == failed or cubins.read(path) == made, n  # to make a folder that is there already need not work
        assert all(os.strerror(error().errno or 0) in str(each.message) for each in said)
        assert cubins.read(path) in ((None, old, made) if failed else (made,))
        left = {each.name for each in path.parent.iterdir()} if path.parent.exists() else set()
        assert left <= {path.name, f"{path.stem}.json", f"{path.name}.cu"}, (n, left)
        cubins.write(path, made, "source")
        assert cubins.read(path) == made
    assert n > 12


def test_a_disk_fails_that_keeps_cupys_kernels(cupy: Any, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is right all the same, and says that nothing is kept."""
    expected = [*map(host, call("softmax", fresh("softmax", cupy)))]
    count = 0
    for n in range(9):
        forget()
        for each in (tmp_path / "cache").iterdir():
            each.unlink()
        given, nth = fresh("softmax", cupy), Nth(no_space, n)
        first_use._say_unusable.cache_clear()
        with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            Disk(nth, tmp_path / "cache", patched)
            found = [*map(host, call("softmax", given))]
        count = count or len(nth.places)
        assert same(found, expected) and len(said) == (0 < n <= count)
        assert os.environ.get(cubins.IN_MEMORY) is None
    assert 0 < count < n


def reported(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stderr


KERNEL = r"""extern "C" __global__ void twice(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }"""
PROFILED = ["--grid", "1", "--block", "32", "--args", '{"x": {"shape": [32], "fill": "normal"}, "y": {"shape": [32]}}']
REPORTS = {
    "sweep --output": ["sweep", "--over", "sram", "--seqlen", "64", "--format", "csv", "--output", "FOLDER/report.csv"],
    "paper --output": ["paper", "softmax", "--json", "--output", "FOLDER/report.json"],
    "paper --plot": ["paper", "softmax", "--plot", "FOLDER"],
    "profile --html --save": ["profile", "KERNEL", *PROFILED, "--html", "FOLDER/report.html", "--save", "y=FOLDER/y.npy"],
}


@pytest.mark.parametrize("name", sample(REPORTS, ["sweep --output"]))
def test_a_disk_fails_under_a_report(name: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names the file, exit status 2; what was there before is there still, and nothing beside it."""
    if "--plot" in name:
        pytest.importorskip("matplotlib")
    (tmp_path / "kernel.cu").write_text(KERNEL)
    folder = tmp_path / "reports"
    folder.mkdir()
    command = [each.replace("FOLDER", str(folder)).replace("KERNEL", str(tmp_path / "kernel.cu")) for each in REPORTS[name]]
    counting = Nth(no_space)
    with monkeypatch.context() as patched:
        Disk(counting, folder, patched)
        assert reported(*command)[0] == 0
    whole = {each: each.read_bytes() for each in folder.iterdir()}
    assert all(whole.values()) and counting.places
    for n in range(1, len(counting.places) + 1):
        before = b"before" if n % 2 else b""
        for each in whole:
            each.write_bytes(before) if before else each.unlink(missing_ok=True)
        with monkeypatch.context() as patched, left_as_found(temporary):
            Disk(Nth(no_space, n), folder, patched)
            status, said = reported(*command)
        assert status == 2 and any(f"{each}: No space left on device" in said for each in whole), (n, said)
        left = {each: each.read_bytes() for each in folder.iterdir()}
        assert left.keys() <= whole.keys() and all(left[each] in (before, whole[each]) for each in left), n
    assert reported(*command)[0] == 0 and all(each.exists() for each in whole)


def test_reports_are_written_in_one_place() -> None:
    """All reports are written by `sim/files.py`, which the test above checks."""
    ways = (".write_text(", ".write_bytes(", "savefig(", "np.save(path")
    found = {path for path in Path(files.__file__).parent.rglob("*.py") for way in ways if way in path.read_text(encoding="utf-8")}
    assert found == {Path(files.__file__)}


def test_a_report_goes_where_it_is_sent(tmp_path: Path) -> None:
    """Through links, with the rights that were there, and into what is no file."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target)
    files.write(link, "after")
    assert link.is_symlink() and target.read_text() == "after" and target.stat().st_mode & 0o777 == 0o640
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    within(20, lambda: files.write(pipe, "through"))
    reader.join(20)
    assert read == ["through"] and pipe.is_fifo()
    with pytest.raises(OSError, match=r"No such file or directory: .*/absent/report'$"):
        files.write(tmp_path / "absent" / "report", "")


# -- ranks and messages ----------------------------------------------------------------------------------------------------

RANKS = 3
RING = dict(zip(("q", "k", "v", "dout"), of_a_ring(70, 70, heads=1), strict=True))
SEQUENCES = np.array([0, 40, 70], np.int32)


def ring(name: str, comm: Any, gather: bool) -> Sequence[Any]:
    """Forward and backward of a ring, as one rank does it."""
    if name == "packed":
        q, k, v, dout = (shard(x.swapaxes(0, 1), comm, axis=0) for x in RING.values())
        bounds, options = (SEQUENCES, SEQUENCES), {"causal": True, "gather_kv": gather}
        out, lse = ring_attention_varlen(q, k, v, *bounds, comm, return_lse=True, **options)
        return out, lse, *ring_attention_varlen_backward(dout, q, k, v, out, lse, *bounds, comm, **options)
    q, k, v, dout = (shard(x, comm) for x in RING.values())
    out, lse = ring_attention(q, k, v, comm, return_lse=True, causal=True, gather_kv=gather)
    return out, lse, *ring_attention_backward(dout, q, k, v, out, lse, comm, causal=True, gather_kv=gather)


def each_rank(name: str, gather: bool, lossy: Callable[[Any], Any]) -> list[Any]:
    """The result or error of each rank."""
    found: list[Any] = [None] * RANKS

    def work(comm: Any) -> None:
        try:
            found[comm.rank] = ring(name, lossy(comm), gather)
        except BaseException as error:
            found[comm.rank] = error
            raise

    def over() -> None:
        with suppress(Exception, Killed):
            threads(RANKS, work)

    within(120, over)
    return found


def lost() -> Exception:
    return ConnectionError("the message is lost")


@pytest.mark.parametrize(("gather", "most"), sample([(gather, most) for gather in (False, True) for most in (3, 12)], [(False, 3)]))
def test_messages_fail(gather: bool, most: int, temporary: Path, plainly: None) -> None:
    """A rank's n-th step of a message, or with all: an error on every rank, its own on that one, and the next call is right."""
    counting = [Nth(lost) for _ in range(RANKS)]
    expected = each_rank("", gather, lambda comm: Lossy(comm, counting[comm.rank]))
    for rank in range(RANKS):
        for n in drawn(range(len(counting[rank].places)), most):
            for error in (lost, Killed):
                nth = Nth(error, n)
                with left_as_found(temporary):
                    found = each_rank("", gather, lambda comm, nth=nth, rank=rank: Lossy(comm, nth) if comm.rank == rank else comm)
                assert isinstance(found[rank], type(error())), (rank, n, found)
                others = [each for at, each in enumerate(found) if at != rank]
                assert all(
                    isinstance(each, RankFailed) and f"rank {rank} failed: {type(error()).__name__}" in str(each) for each in others
                )
            if n % 10 == 1:
                assert all(map(same, each_rank("", gather, lambda comm: comm), expected)), (rank, n)
    assert all(map(same, each_rank("", gather, lambda comm: comm), expected))


ARITHMETIC = (
    *((ring_forward, "add_state"), (ring_forward.RingSide, "put")),
    *((ring_backward, "add"), (ring_backward.GatheredSums, "take")),
)


@pytest.mark.parametrize("gather", sample((False, True), [True]))
def test_a_rank_that_fails_passes_on_what_others_wait_for(gather: bool, plainly: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank's own sums fail, as launches do, all messages of the call still go round: no transport is left waiting."""

    def steps() -> tuple[list[Any], list[int]]:
        counted = [Nth(lost) for _ in range(RANKS)]
        return each_rank("", gather, lambda comm: Lossy(comm, counted[comm.rank])), [len(each.places) for each in counted]

    whole, failed = steps()[1], 0
    for owner, name in ARITHMETIC:
        own = getattr(owner, name)
        for n in (1, 2, 3):
            nth = Nth(refused_numbers, n)

            def act(*given: Any, own: Any = own, nth: Nth = nth) -> Any:
                if threading.current_thread().name == "rank 1":
                    nth.event("sum")
                return own(*given)

            with monkeypatch.context() as patched:
                patched.setattr(owner, name, act)
                found, passed = steps()
            if len(nth.places) < n:
                continue
            failed += 1
            assert isinstance(found[1], FloatingPointError), (name, n, found)
            assert all(isinstance(found[rank], RankFailed) and "rank 1 failed" in str(found[rank]) for rank in (0, 2)), (name, n)
            assert len(set(passed)) == 1 and passed[0] <= whole[0], (name, n, passed)
    assert failed >= 3


def refused_numbers() -> Exception:
    return FloatingPointError("the sum is refused")


OF_A_RING = [(name, gather, True, most) for name in ("", "packed") for gather in (False, True) for most in (12, 50)]


@pytest.mark.parametrize(
    ("name", "gather", "plain", "most"),
    sample([*OF_A_RING, ("packed", False, False, 2)], [("", False, True, 12), ("", True, True, 12)]),
)
@pytest.mark.filterwarnings("error")
def test_a_ranks_memory_fails(
    name: str, gather: bool, plain: bool, most: int, temporary: Path, request: pytest.FixtureRequest
) -> None:
    """Any array of any rank fails: all ranks get an error that says so, none a result. If pieces are plain, it is the
    ring's own."""
    if plain:
        request.getfixturevalue("plainly")
    expected = each_rank(name, gather, lambda comm: comm)
    with MEMORY.failing_at(0):
        each_rank(name, gather, lambda comm: comm)
    chosen, never = drawn(MEMORY.places, most), []
    for n in chosen:
        with left_as_found(temporary), MEMORY.failing_at(n):
            found = each_rank(name, gather, lambda comm: comm)
        if len(MEMORY.places) < n:  # ranks that meet in another order ask for memory a few times less
            never.append(n)
            assert all(map(same, found, expected)), n
            continue
        assert all(isinstance(each, MemoryError | RankFailed | ValueError) for each in found), (n, found)
        assert sum(isinstance(each, MemoryError) for each in found) == 1
        assert all("Unable to allocate" in str(each) for each in found), (n, found)
    assert not never or (not plain and never == chosen[-1:])
    assert all(map(same, each_rank(name, gather, lambda comm: comm), expected))


@pytest.mark.wide
@pytest.mark.parametrize("gather", [False, True])
def test_a_ranks_gpu_fails(gather: bool, cupy: Any, temporary: Path) -> None:
    """Its memory, in a call whose kernels are there: an error on all ranks, and the next call is right."""
    given = {name: cupy.asarray(array) for name, array in RING.items()}

    def each(nth: Nth) -> list[Any]:
        found: list[Any] = [None] * 2

        def work(comm: Any) -> None:
            own = [shard(x, comm) for x in given.values()]
            allocating = cupy.cuda.using_allocator(allocator(cupy, nth)) if comm.rank else nullcontext()
            try:
                with allocating:
                    out, lse = ring_attention(*own[:3], comm, causal=True, gather_kv=gather, return_lse=True)
                    made = ring_attention_backward(own[3], *own[:3], out, lse, comm, causal=True, gather_kv=gather)
                found[comm.rank] = [*map(host, (out, lse, *made))]
            except Exception as error:
                found[comm.rank] = error
                raise

        def over() -> None:
            with suppress(Exception):
                threads(2, work)

        within(120, over)
        return found

    expected = each(counting := Nth(out_of_memory))
    for n in drawn(range(len(counting.places)), 5):
        with left_as_found(temporary):
            other, own = each(Nth(out_of_memory, n))
        assert isinstance(own, MemoryError) and isinstance(other, RankFailed | ValueError), (n, own, other)
        assert "rank 1" in str(other) and "OutOfMemoryError" in str(other), n
    assert all(map(same, each(Nth(out_of_memory)), expected))
