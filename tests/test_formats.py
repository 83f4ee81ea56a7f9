"""Findings in the formats of other tools: each is well formed, and has the finding with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result
from sarif_schema import LOG

from cupyflash.sim import formats
from cupyflash.sim.cli import main, reporting
from cupyflash.sim.formats import CheckedKernels
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.state.findings import SEVERITIES, Finding, Suppressed, Suppression, by_cause, of_program
from cupyflash.sim.ptx.text.syntax import source_name

CUDA = """template <int N> __global__ void k(float* x, int* o) {
    __shared__ float s[N];
    s[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = s[N - 1 - threadIdx.x];
    o[0] = 7;  // cupyflash: allow race: all write 7
    o[1] = 8;
}
template __global__ void k<64>(float*, int*);
"""
LAUNCH = ["--grid", "1", "--block", "64", "--args", '[{"shape": [64]}, {"shape": [2], "dtype": "int32"}]']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cupy")
    folder = tmp_path_factory.mktemp("a folder, 100%")
    (folder / "k.cu").write_text(CUDA)
    return folder


def profiled(*more: str) -> Result:
    return CliRunner().invoke(main, ["profile", "k.cu", *LAUNCH, *more])


def test_one_run_writes_every_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    outputs = {kind: folder / f"out.{kind}" for kind in formats.FORMATS}
    done = profiled(*(part for kind, path in outputs.items() for part in ("--format", f"{kind}={path.name}")))
    assert done.exit_code == 1 and not done.stdout
    race, warning = outputs["lines"].read_text().splitlines()
    assert re.fullmatch(r"k\.cu:4:1: error: race: .*\[k<64>, block 0, warp \d, lane \d+.*\]", race)
    assert warning.startswith("k.cu:6:1: warning: race: ")
    assert [line.partition("::")[2].partition("::")[0] for line in outputs["github"].read_text().splitlines()] == [
        "error file=k.cu,line=4,title=cupyflash%3A race",
        "warning file=k.cu,line=6,title=cupyflash%3A race",
    ]
    suite = ElementTree.fromstring(outputs["junit"].read_bytes())[0]
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    (case,) = suite
    assert (case.get("classname"), case.get("name"), [each.get("type") for each in case]) == ("k.cu", "k<64>", ["race"])
    results = checked_sarif(outputs["sarif"].read_text())
    assert [(each["level"], line_of(each), "suppressions" in each) for each in results] == [
        ("error", ("k.cu", 4), False),
        ("warning", ("k.cu", 6), False),
        ("warning", ("k.cu", 5), True),
    ]
    assert results[2]["suppressions"][0]["justification"] == "all write 7"
    assert json.loads(outputs["json"].read_text())["name"] == "k" and "Findings:" in outputs["text"].read_text()


def line_of(result: dict[str, Any]) -> tuple[str, int]:
    place = result["locations"][0]["physicalLocation"]
    return place["artifactLocation"]["uri"], place["region"]["startLine"]


def checked_sarif(text: str) -> list[dict[str, Any]]:
    """Returns the results of a log that is valid by SARIF's schema, and whose parts agree with each other."""
    log = json.loads(text)
    jsonschema.validate(log, LOG, format_checker=jsonschema.FormatChecker())
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for each in run["results"]:
        assert rules[each["ruleIndex"]]["id"] == each["ruleId"] and each["level"] in SEVERITIES
        assert each["message"]["text"] and len(each["locations"]) == 1 and each["partialFingerprints"]
        related = each.get("relatedLocations", [])
        assert [one["id"] for one in related] == [*range(len(related))]
        for place in [*each["locations"], *related, *(one["location"] for one in each.get("suppressions", []))]:
            at = place["physicalLocation"]["artifactLocation"]
            assert re.fullmatch(r"[A-Za-z0-9._~/%:-]+", at["uri"]) and at["uri"].startswith("file:///") != ("uriBaseId" in at)
    return list(run["results"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda log: log.pop("runs"),
        lambda log: log.update(version="2.2.0"),
        lambda log: log["runs"][0].pop("tool"),
        lambda log: log["runs"][0]["results"][0].update(level="fatal"),
        lambda log: log["runs"][0]["results"][0].update(rule="race"),
        lambda log: log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"].update(startLine=0),
        lambda log: log["runs"][0]["results"][0]["message"].pop("text"),
    ],
)
def test_the_schema_refuses_what_sarif_does_not_have(spoil: Callable[[dict[str, Any]], object]) -> None:
    log = json.loads(formats.sarif(CheckedKernels(["_Z1kv"], [made()])))
    jsonschema.validate(log, LOG)
    spoil(log)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(log, LOG)


def made(**fields: Any) -> Finding:
    given = {
        "kind": "race",
        "message": "both",
        "kernel": "_Z1kv",
        "source": ("k.cu", 3),
        "ptx_line": 9,
        "block": 0,
        "warp": 0,
        "lane": 0,
    }
    return Finding(**(given | fields))


def test_paths_and_texts_of_any_letters() -> None:
    """A path elsewhere, one with blanks, none at all; control characters, percent signs and ends of lines in a message."""
    odd = made(message="50 %\n\x1b[0m <&>", source=("/else where/a,b:c.cu", 2))
    plain = made(source=None, severity="note")
    rule = Suppression("race", "*", "*", None, "known", ("list.supp", 4))
    checked = CheckedKernels(["_Z1kv", "other"], [odd, plain], [Suppressed(rule, (made(),))], "a b.ptx")
    results = checked_sarif(formats.sarif(checked))
    assert [unquote(line_of(one)[0]) for one in results] == ["file:///else where/a,b:c.cu", "a b.ptx", "k.cu"]
    assert results[2]["suppressions"][0]["kind"] == "external" and line_of(results[1])[1] == 9
    first, second = formats.github(checked).splitlines()
    assert first.startswith("::error file=/else where/a%2Cb%3Ac.cu,line=2,") and "50 %25%0A" in first
    assert second.startswith("::notice file=a b.ptx,line=9,")
    assert formats.lines(checked).splitlines()[-1].startswith("a b.ptx:9:1: note: race: both [k, ")
    suite = ElementTree.fromstring(formats.junit(checked))[0]
    assert [[child.tag for child in case] for case in suite] == [["failure", "system-out"], []]


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        (["--format", "lines", "--json"], 2, "no other format can go to stdout"),
        (["--format", "lines", "--format", "sarif"], 2, "only one format can go to stdout"),
        (["--format", "lines", "--format", "lines=a"], 2, "twice"),
        (["--format", "xml"], 2, "none of text, lines, github, junit, sarif, json"),
        (["--format", "sarif=no/where"], 2, "there is no folder"),
        (["--format", "lines", "--fail-on", "never"], 0, ""),
        (["--format", "lines", "--fail-on", "note"], 1, "2 faults"),
        (["--format", "lines", "--fail-on", "error"], 1, "1 fault in"),
    ],
)
def test_formats_and_severities(folder: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], status: int, says: str) -> None:
    monkeypatch.chdir(folder)
    done = profiled(*more)
    assert done.exit_code == status and says in done.stderr


def test_watch_runs_again_when_a_header_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("w.cu").write_text('#include "w.cuh"\nextern "C" __global__ void w(int* x) { x[AT] = 1; }\n')
    Path("w.cuh").write_text("#define AT 9\n")
    texts = ["#define AT is no C", "#define AT 3\n"]

    def change(seconds: float) -> None:
        """Changes the header while the command waits, at last interrupts it."""
        if not texts:
            raise KeyboardInterrupt
        Path("w.cuh").write_text(texts.pop(0))

    monkeypatch.setattr(reporting.time, "sleep", change)
    spec = ["--args", '[{"shape": [4], "dtype": "int32"}]']
    done = CliRunner().invoke(main, ["profile", "w.cu", "--grid", "1", "--block", "1", "--watch", "--format", "lines", *spec])
    assert done.exit_code == 130 and done.stdout.count("out of bounds") == 1 and done.stderr.count("waiting for a change") == 3
    assert done.stderr.count("w.cu(2): error: ") == 1, "a source that does not compile ends no watch"


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_Z5saxpyPKfPffi", "saxpy"),
        ("_Z1kIfLi4EEvPT_", "k<float, 4>"),
        ("_ZN12_GLOBAL__N_11kEPf", "k"),
        ("_Z1fIZ4mainEUliE_EvT_", "f<main::{lambda(int)#1}>"),
        ("_Z1kPFvifE", "k"),
        ("_Zbad", "_Zbad"),
        ("plain", "plain"),
        ("_Z1kI" + "f" * 100 + "EvPf", f"k<{'float, ' * 40}"[:117] + "..."),
    ],
)
def test_kernels_have_their_names_of_the_source(mangled: str, name: str) -> None:
    if source_name("_Z1kIfEvv") != "k<float>":
        pytest.skip("the C++ runtime library, whose demangler it needs, is not here")
    assert source_name(mangled) == name


def test_findings_of_one_cause_are_one() -> None:
    """A variable without a value is used at several lines; a program's launches find one fault at several addresses."""
    pytest.importorskip("cupy")
    code = """extern "C" __global__ void k(float* x, float* y, int n) {
        float v;
        if (threadIdx.x < n) v = x[threadIdx.x];
        y[threadIdx.x] = v * 2;
        x[threadIdx.x] = v < 3;
        y[threadIdx.x + 32] = v;
        y[threadIdx.x + 64] = 1;
    }"""
    arrays = np.ones(32, np.float32), np.ones(96, np.float32)
    (one,) = Module.from_source(code).launch("k", 1, 32, [*arrays, 28]).findings
    assert (one.lane, len(one.also)) == (28, 2) and "2 more of this cause, at " in str(one)
    assert one.mend.startswith("a value for the variable")
    guard = """extern "C" __global__ void k(const float* x, double* y, float* z, int n) {
        int i = threadIdx.x;
        float a = i <= n ? x[i] : 0;
        if (i <= n) y[i] += a * x[i];
        if (i < n) z[n - i] = a;
    }"""
    given = [np.ones(28, np.float32), np.ones(28), np.ones(28, np.float32), 28]
    wrong, other = Module.from_source(guard).launch("k", 1, 32, given).findings
    assert (wrong.tensor, wrong.lane, len(wrong.also)) == ("arg0", 28, 2) and other.tensor == "arg2"
    calls = """__device__ float two(const float* x, int a) {
        return x[a % 128] +
            x[(a + 64) % 128];
    }
    extern "C" __global__ void k(float* x, float* y) {
        int t = threadIdx.x;
        x[t] = 1;
        y[t] = two(x, t + 32) + two(x, t + 96);
        y[t + 128] = x[127 - t];
    }"""
    racing = Module.from_source(calls).launch("k", 1, 128, [np.ones(128, np.float32), np.zeros(256, np.float32)]).findings
    assert [one.mend for one in racing] == [f"__syncthreads() between line 7 and line {line}" for line in (8, 9)]
    assert [{line for _, line in one.also} for one in racing] == [{3}, set()]
    launches = [made(message=f"write at {at:#x} of 'allocation {n}'", lanes=2) for n, at in enumerate((16, 0xAB))]
    merged = by_cause([*launches, made(message="read at 0x10"), made(source=("k.cu", 4))], of_program)
    assert [(each.lanes, each.also) for each in merged] == [(4, (("k.cu", 3),)), (1, ()), (1, ())]
    assert str(merged[0]).startswith("k.cu:3: race: write at 0x10 of 'allocation 0'; 1 more of this cause [k, ")


def test_a_mend_stands_in_the_innermost_function_that_has_both_lines() -> None:
    pytest.importorskip("cupy")
    code = """__device__ float get(const float* x, int a) { return x[a % 128]; }
    __device__ void both(float* x, float* y, int t) {
        x[t] = 1;
        y[t] = get(x, t + 32);
    }
    extern "C" __global__ void k(float* x, float* y) { both(x, y, threadIdx.x); }"""
    (racing,) = Module.from_source(code).launch("k", 1, 128, [np.ones(128, np.float32), np.zeros(128, np.float32)]).findings
    assert racing.mend == "__syncthreads() between line 3 and line 4"


def test_a_finding_in_inlined_code_is_shown_at_the_project_s_own_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    calls = (("/lib/block.h", 7), (str(tmp_path / "k.cu"), 3))
    checked = CheckedKernels(["_Z1kv"], [made(source=("/lib/warp.h", 9), inlined_at=calls)])
    assert formats.lines(checked).startswith("k.cu:3:1: error: race: /lib/warp.h:9 (inlined at k.cu:3): both [k, ")
    (result,) = checked_sarif(formats.sarif(checked))
    related = [one["physicalLocation"]["region"]["startLine"] for one in result["relatedLocations"]]
    assert line_of(result) == ("k.cu", 3) and related == [9, 7]


HAZARDS = """template <bool A, bool B> __global__ void tiles(const int* a, int* c, int n) {
    __shared__ int tile[64];
    int t = threadIdx.x, sum = 0;
    #pragma unroll 1
    for (int k = 0; k < n; k++) {
        tile[t] = a[64 * k + t];  // 6
        if (A) __syncthreads();
        sum += tile[63 - t];  // 8
        if (B) __syncthreads();
    }
    c[t] = sum;
}
template __global__ void tiles<true, false>(const int*, int*, int);
template __global__ void tiles<false, true>(const int*, int*, int);
extern "C" __global__ void reduce(const int* a, int* c, int n) {
    __shared__ int part[64];
    part[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    for (int half = 32; half; half /= 2)
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];  // 20
    __syncthreads();
    c[threadIdx.x] = part[0];
}
extern "C" __global__ void lanes(const int* a, int* c, int n) {
    __shared__ int swap[64];
    swap[threadIdx.x] = a[threadIdx.x];  // 26
    c[threadIdx.x] = swap[threadIdx.x ^ 1];  // 27
}
extern "C" __global__ void count(const int* a, int* c, int n) {
    __shared__ int swap[64];
    swap[threadIdx.x] = 0;  // 31
    atomicAdd(&swap[a[threadIdx.x] & 7], 1);  // 32
    __syncthreads();
    c[threadIdx.x] = swap[threadIdx.x];
}
extern "C" __global__ void grid(const int*, int* c, int n) {
    if (threadIdx.x == 0) c[blockIdx.x] = n;  // 37
    if (threadIdx.x == 0)
        c[blockIdx.x + 4] = c[blockIdx.x ^ 1];  // 39
}
extern "C" __global__ void writers(const int*, int* c, int n) { if (threadIdx.x == 0) c[0] = blockIdx.x; }  // 41
extern "C" __global__ void rounds(const int*, int* c, int n) {
    #pragma unroll 1
    for (int k = 0; k < n; k++) {
        atomicAdd(&c[k], 1);  // 45
        __syncthreads();
        if (c[k] > 1000) asm volatile("trap;");  // 47
    }
}
"""


def test_a_race_has_its_hazard_and_its_mend_and_both_lines() -> None:
    pytest.importorskip("cupy")
    module = Module.from_source(HAZARDS, name="/some where/h.cu")
    cases = {
        "tiles<true, false>": (
            (6, 8),
            "write after read, of a loop's next turn",
            "__syncthreads() between line 8 and line 6 of the next turn",
        ),
        "tiles<false, true>": ((6, 8), "read after write", "__syncthreads() between line 6 and line 8"),
        "reduce": ((20, 20), "read and write of one line", "__syncwarp() between the accesses of line 20"),
        "lanes": ((26, 27), "read after write", "__syncwarp() between line 26 and line 27"),
        "count": ((31, 32), "atomic access after write", "__syncthreads() between line 31 and line 32"),
        "grid": ((37, 39), "read after write", "__threadfence() and an atomic flag between line 37 and line 39"),
        "rounds": ((45, 47), "read after atomic access", "__threadfence() and an atomic flag between line 45 and line 47"),
        "writers": ((41, 41), "write after write", "atomics (atomicAdd), or one block alone writes there"),
    }
    for kernel in module.kernels:
        lines, hazard, mend = cases.pop(source_name(kernel))
        arrays = [np.arange(256, dtype=np.int32), np.zeros(64, np.int32)]
        (finding,) = module.launch(kernel, 2 if lines[0] > 36 else 1, 64, [*arrays, 4]).findings
        told = [line for one in (finding.source, finding.other) if one for line in one[1:]]
        assert (sorted(told), finding.hazard) == ([*lines], hazard) and finding.mend.endswith(mend), (kernel, finding)
        assert f"/some where/h.cu:{told[1]}" in finding.message
        assert lines[0] > 36 or re.search(r"at offset 0x\w+ \((tile|part|swap)( \+ \d+)?\) of shared memory", finding.message)
    assert not cases
