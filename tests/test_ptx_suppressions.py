"""Findings that somebody lets pass, by a file or by comments in the source: counted and said, and so are entries of no use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cupyflash.sim.cli import main
from cupyflash.sim.ptx import KernelFault, KernelWarning, Launch, Module, RawKernel, Suppression, simulation
from cupyflash.sim.ptx.state.findings import asked, comments, entries

CUDA = r"""__device__ void put(int* o, int v) {
    o[0] = v;
}
extern "C" __global__ void all_write(int* o) {
    put(o, threadIdx.x);
    o[1] = 7;
}
extern "C" __global__ void beyond(int* o) {
    o[threadIdx.x + 32] = 1;
}
"""


def run(kernel: str, allowed: str = "", cuda: str = CUDA, **how: object) -> Launch:
    given = tuple(entries(allowed, "list"))
    module = Module.from_source(cuda, name="writes.cu")
    return module.launch(kernel, 1, 64, {"o": np.zeros(64, np.int32)}, suppressions=given, **how)  # type: ignore[arg-type]


def lines(launch: Launch) -> list[tuple[str, int]]:
    return sorted((f.kind, f.source[1]) for f in launch.findings if f.source)


def told(launch: Launch) -> list[tuple[int, list[int]]]:
    """By the line of each suppression, the lines of the findings that it allowed."""
    return [(one.by.written[1], sorted(f.source[1] for f in one.findings if f.source)) for one in launch.suppressed]


# -- by file --------------------------------------------------------------------------------------------------------------


def test_by_kind_kernel_and_place() -> None:
    both = [("race", 2), ("race", 6)]
    every = run("all_write")
    assert lines(every) == both and every.findings_total == 64 and not every.suppressed and not every.unmatched
    for entry, left in {
        "race all_write writes.cu:2 why": [both[1]],
        "race all_* writes.cu:6 why": [both[0]],
        "race * *.cu:1-3 why": [both[1]],
        "race * * why": [],
        "race * writes.cu:5 the call that line 2 is inlined at": [both[1]],
        "race beyond * why": both,
        "race * other.cu why": both,
        "race * tes.cu why": both,
        "race * writes.cu:3 why": both,
        "out-of-bounds * * why": both,
    }.items():
        for seed in (None, 0):
            launch = run("all_write", entry, seed=seed)
            assert lines(launch) == left, entry
            assert [line for _, found in told(launch) for line in found] == [line for _, line in both if (_, line) not in left], (
                entry
            )
            used, mine = len(left) < 2, "beyond" not in entry
            assert len(launch.unmatched) == (not used and mine)
            assert (launch.findings_total == every.findings_total) == (not used)


def test_the_first_entry_takes_it_and_each_is_counted() -> None:
    launch = run("all_write", "# two\n\nrace * writes.cu:2 first\nrace * * second\nrace * * third\n")
    assert told(launch) == [(3, [2]), (4, [6])] and [one.reason for one in launch.unmatched] == ["third"]
    assert [str(one) for one in launch.suppressed] == [
        "1 error suppressed by list:3 (race: first)",
        "1 warning suppressed by list:4 (race: second)",
    ]
    assert launch.suppressed[0].findings[0].lanes == 32 and launch.findings == () and launch.findings_total == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("race * k.cu", r"list:1: a suppression is KIND KERNEL FILE\[:LINE\[-LINE\]\] REASON, got 'race \* k.cu'"),
        ("\nraces * k.cu why", r"list:2: a suppression's kind is one of bad-arrival, .*uninitialised, got 'races'"),
        ("race", "a suppression is KIND"),
    ],
)
def test_what_is_no_entry(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(entries(text, "list"))


def test_what_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "known.supp"
    file.write_text("null-pointer * * why it is\n")
    (one,) = Suppression.read(file)
    assert (one.kind, one.reason, one.lines, one.written) == ("null pointer", "why it is", None, (str(file), 1))
    assert asked(file) == asked(str(file)) == asked([one]) == (one,)
    for wrong in (3, ["race * * why"]):
        with pytest.raises(TypeError, match="suppressions must be a file, or a sequence of Suppression"):
            asked(wrong)  # type: ignore[arg-type]


def test_of_several_processes_too() -> None:
    cuda = """extern "C" __global__ void k(int* o) {
        if (blockIdx.x == 9) o[threadIdx.x + (1 << 20)] = 1;
        o[blockIdx.x * 64 + threadIdx.x] = 1;
    }"""
    found = []
    for processes in (1, 2):
        o = np.zeros(64 * 4096, np.int32)
        given = tuple(entries("out-of-bounds * * why", "list"))
        found.append(Module.from_source(cuda).launch("k", 4096, 64, [o], processes=processes, suppressions=given))
        assert o.all()
    assert found[0].suppressed == found[1].suppressed and len(found[0].suppressed) == 1 and found[0].findings == ()


# -- by comments ----------------------------------------------------------------------------------------------------------


def test_on_the_line_or_alone_before_it() -> None:
    for cuda in (
        CUDA.replace("o[1] = 7;", "o[1] = 7;  // cupyflash: allow race: all write the same"),
        CUDA.replace("    o[1] = 7;", "    /* cupyflash: allow race, all write the same */ o[1] = 7;"),
        CUDA.replace("    put(o, threadIdx.x);\n", "    // cupyflash: allow race: all write the same\n").replace(
            "v) {", "v) { o[2] = v;"
        ),
    ):
        launch = run("all_write", cuda=cuda)
        assert [f.source[1] for one in launch.suppressed for f in one.findings if f.source] == [6], cuda
        assert launch.suppressed[0].by.reason == "all write the same" and not launch.unmatched
    inlined = run("all_write", cuda=CUDA.replace("threadIdx.x);", "threadIdx.x); // cupyflash: allow race - the first is as good"))
    assert told(inlined) == [(5, [2])] and lines(inlined) == [("race", 6)]


def test_of_no_use_is_said_where_it_might_have_been_of_use() -> None:
    """It is reported for a line of this kernel or of none, not for one of another kernel."""
    for where, said in (("o[1] = 7;", True), ("o[threadIdx.x + 32] = 1;", False), ("__device__", True)):
        cuda = CUDA.replace(where, f"/* cupyflash: allow out of bounds: a b */ {where}", 1)
        launch = run("all_write", cuda=cuda)
        assert [(one.kind, one.reason) for one in launch.unmatched] == [("out of bounds", "a b")] * said, where
    cuda = CUDA.replace("32] = 1;", "32] = 1;  // cupyflash: allow out-of-bounds: a b")
    assert len(run("beyond", cuda=cuda).suppressed) == 1


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("// cupyflash: allow race", "k.cu:2: a comment that allows race gives a reason"),
        ("// cupyflash: allow races: why", "k.cu:2: a suppression's kind is one of .*, got 'races'"),
        ("// cupyflash: allow everything", "got 'everything'"),
    ],
)
def test_a_comment_has_a_kind_and_a_reason(comment: str, message: str) -> None:
    (found,) = comments(f"\nx = 1; {comment}\n", "k.cu")
    with pytest.raises(ValueError, match=message):
        found.read()
    with pytest.raises(ValueError, match=message.replace("k.cu:2", "writes.cu:6")):
        run("all_write", cuda=CUDA.replace("o[1] = 7;", f"o[1] = 7; {comment}"))


def test_several_on_a_line() -> None:
    found = [one.read() for one in comments("x; // cupyflash: allow race: one // cupyflash: allow in-flight: two\n", "k.cu")]
    assert [(one.kind, one.reason, one.lines) for one in found] == [("race", "one", (1, 1)), ("in flight", "two", (1, 1))]


def test_in_a_file_that_the_ptx_names(tmp_path: Path) -> None:
    file = tmp_path / "[writes].cu"
    file.write_text(CUDA.replace("o[1] = 7;", "o[1] = 7;  // cupyflash: allow race: all write the same"))
    text = Module.from_source(CUDA, name=str(file)).text
    o = {"o": np.zeros(64, np.int32)}
    assert len(Module.from_ptx(text).launch("all_write", 1, 64, o).suppressed) == 1
    file.unlink()
    assert len(Module.from_ptx(text).launch("all_write", 1, 64, o).findings) == 2
    file.mkdir()
    assert len(Module.from_ptx(text).launch("all_write", 1, 64, o).findings) == 2


# -- said -----------------------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("writes.cu").write_text(CUDA.replace("put(o, threadIdx.x)", "put(o, 5)"))
    Path("known.supp").write_text("race * writes.cu:6 all write 7\nrace * writes.cu:40 not there\n")

    spec = '[{"shape": [64], "dtype": "int32"}]'
    base = ["profile", "writes.cu", "--kernel", "all_write", "--grid", "1", "--block", "64", "--args", spec]

    def profile(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, [*base, *more])
        return result.exit_code, " ".join(result.stdout.split())

    status, text = profile()
    assert status == 1 and "findings 64 (2 warnings)" in text and "suppressed" not in text
    assert profile("--fail-on", "error")[0] == 0 and profile("--fail-on", "warning")[0] == 1
    status, text = profile("--suppressions", "known.supp")
    assert status == 1 and "findings 32 (1 warning); 1 finding suppressed" in text
    assert "1 warning suppressed by known.supp:1 (race: all write 7)" in text
    assert "nothing to suppress for known.supp:2 (race: not there)" in text
    told = json.loads(profile("--suppressions", "known.supp", "--json")[1])
    assert [one["severity"] for one in told["findings"]] == ["warning"] and told["notes"] == []
    assert [(one["by"]["reason"], len(one["findings"])) for one in told["suppressed"]] == [("all write 7", 1)]
    assert [one["reason"] for one in told["unmatched"]] == ["not there"]
    Path("known.supp").write_text("race * *:2 one\nrace * *:6 two\n")
    status, text = profile("--suppressions", "known.supp", "--html", "page.html")
    assert (
        status == 0
        and "findings none; 2 findings suppressed" in text
        and "suppressed by known.supp:2" in Path("page.html").read_text()
    )
    Path("known.supp").write_text("race\n")
    result = CliRunner().invoke(main, [*base, "--suppressions", "known.supp"])
    assert result.exit_code == 2 and "known.supp:1: a suppression is KIND" in result.stderr


def test_a_simulation_has_suppressions(tmp_path: Path) -> None:
    file = tmp_path / "known.supp"
    file.write_text("race * * each write is as good\nmisaligned * * not met\n")
    kernel = RawKernel(CUDA, "all_write")
    with pytest.raises(KernelFault, match="race"):
        kernel((1,), (64,), (np.zeros(64, np.int32),))
    with simulation(suppressions=file), pytest.warns(KernelWarning) as warned:
        kernel((1,), (64,), (np.zeros(64, np.int32),))
    said = [str(one.message) for one in warned]
    assert len(said) == 2 and "1 error and 1 warning suppressed by" in said[0] and "nothing to suppress for" in said[1]


SUITE = '''
import cupy

WRITE = cupy.RawKernel(r"""extern "C" __global__ void write(int* o) {
    o[0] = 7;
}""", "write")

BEYOND = cupy.RawKernel(r"""extern "C" __global__ void beyond(int* o) {
    o[threadIdx.x + 1] = 7;  // cupyflash: allow out of bounds: for the test
}""", "beyond")

def test_write():
    WRITE((1,), (64,), (cupy.zeros(64, "i4"),))

def test_beyond():
    BEYOND((1,), (64,), (cupy.zeros(64, "i4"),))
'''


@pytest.mark.wide
def test_the_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["cupyflash.sim.ptx.pytest_plugin"]\n')
    (tmp_path / "test_kernels.py").write_text(SUITE)
    (tmp_path / "known.supp").write_text("race write test_kernels.py:5 all write 7\nrace other * not met\n")

    def ran(setting: str) -> tuple[int, str]:
        (tmp_path / "pytest.ini").write_text(f"[pytest]\nusefixtures = simulated_cupy\n{setting}\n")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], cwd=tmp_path, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr

    status, text = ran("")
    assert status == 1 and "1 failed, 1 passed" in text and "warning: race" in text
    assert "- Failed: test_kernels.py:5: warn" in text, "the short summary names the line"
    assert "1 error suppressed by" in text and "(out of bounds: for the test)" in text
    status, text = ran("cupyflash_fail_on = error")
    assert status == 0 and "test_kernels.py:5: warning: race" in text
    status, text = ran("cupyflash_suppressions = known.supp")
    assert status == 0 and "1 warning suppressed by" in text and "(race: all write 7)" in text
    assert "nothing to suppress for" in text and "(race: not met)" in text and text.count("nothing to suppress") == 1
    for setting, message in (
        ("cupyflash_fail_on = none", "must be one of error, warning, note, never"),
        ("cupyflash_suppressions = none.supp", "none.supp"),
    ):
        status, text = ran(setting)
        assert status == 4 and message in text
