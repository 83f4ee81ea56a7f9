"""`Module.from_ptx` returns a module or raises one of two errors, for any text, in time and memory bounded by its length."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import ptx_corpus
import pytest
import test_ptx_gallery
from ptx_noise import broken

from cupyflash.launch.nvrtc import compile_to_ptx
from cupyflash.sim.ptx import Module, PtxError, UnsupportedPTX
from suites import MORE, wide

pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The PTX that NVRTC makes of some kernels of the gallery, and of one with tensor cores and asynchronous copies."""
    names = sorted(test_ptx_gallery.gallery.names)[::4]
    cuda = [test_ptx_gallery.gallery.make(name) for name in names]
    found = [compile_to_ptx(run.cuda, run.options or ("-arch=compute_80",), "kernel.cu") for run in cuda]
    gemm = (Path(__file__).parent / "kernels" / "pipelined_gemm.cu").read_text()
    return [*found, compile_to_ptx(gemm, ("-arch=compute_90a",), "gemm.cu")]


@pytest.mark.parametrize("seeds", [range(150), wide(range(1000, 1000 + 1000 * MORE))])
def test_any_text_is_a_module_or_an_error(texts: list[str], seeds: range) -> None:
    kinds = {load(broken(random.Random(seed), texts)) for seed in seeds}
    assert kinds >= {Module, PtxError, UnsupportedPTX}


@pytest.mark.parametrize("seeds", [range(40), wide(range(5000, 5000 + 200 * MORE))])
def test_what_loads_also_launches_or_is_refused(texts: list[str], seeds: range) -> None:
    """If the arguments do not fit any more, an error says so; nothing else is raised, and the launch ends."""
    launched = 0
    for seed in seeds:
        try:
            module = Module.from_ptx(broken(random.Random(seed), [text for text in texts if len(text) < 20_000]))
        except PtxError:
            continue
        for kernel in set(module.kernels) - set(module.refused):
            sizes = [parameter.size for parameter in module.program.functions[kernel].params]
            args = [np.zeros(4096, np.uint8) if size == 8 else 3 if size in (1, 2, 4) else bytes(size) for size in sizes]
            try:
                module.launch(kernel, 2, 64, args, max_instructions=20_000)
                launched += 1
            except (PtxError, ValueError, TypeError) as error:
                assert str(error)
    assert launched > len(seeds) / 10


def load(text: str) -> type:
    try:
        return type(Module.from_ptx(text))
    except PtxError as error:
        assert len(str(error)) < 4000
        return type(error)


def test_bytes_are_text_of_utf_8() -> None:
    text = ptx_corpus.text("body", "")
    assert Module.from_ptx(text.encode()).kernels == ("k",)
    for noise in (b"", b"\0", b"\xff\xfe{}", bytes(range(256)), text.encode() + b"\xff"):
        assert load(noise) in (Module, PtxError, UnsupportedPTX)  # type: ignore[arg-type]


def test_a_message_has_ten_statements_and_a_count() -> None:
    with pytest.raises(UnsupportedPTX) as caught:
        Module.from_ptx(ptx_corpus.text("body", "\n".join(f"strange.u32 %r1, {'z' * 500}{n};" for n in range(25))))
    lines = str(caught.value).splitlines()
    assert len(caught.value.items) == 25 and len(lines) == 12 and lines[-1].strip() == "and 15 more"
    assert max(map(len, lines)) < 200


GROWING: dict[str, Callable[[int], str]] = {
    "braces in braces": lambda n: ptx_corpus.text("body", "{" * n + "mov.u32 %r1, 1;" + "}" * n),
    "braces one after another": lambda n: ptx_corpus.text("body", "{ mov.u32 %r1, 1; }" * n),
    "open braces": lambda n: ptx_corpus.text("body", "{" * n),
    "brackets": lambda n: ptx_corpus.text("body", "ld.global.u32 %r1, " + "[" * n + "%rd1" + "]" * n + ";"),
    "parentheses": lambda n: ptx_corpus.text("body", "call " + "(" * n + ";"),
    "a long address": lambda n: ptx_corpus.text("body", "ld.global.u32 %r1, [%rd1" + " " * n + "+4" * n + "];"),
    "a long name": lambda n: ptx_corpus.text("body", f"mov.u32 %r1, {'1' * n}a; mov.u32 %r1, {'a' * n};"),
    "blank lines": lambda n: ptx_corpus.text("body", "\n" * n),
    "labels": lambda n: ptx_corpus.text("body", "".join(f"A{k}:\n" for k in range(n))),
    "labels that nobody has": lambda n: ptx_corpus.text("body", "bra M;" * n),
    "variables and their names": lambda n: ptx_corpus.text(
        "body", "".join(f".shared .b8 v{k}[4];" for k in range(n)) + "".join(f"mov.u32 %r1, v{k};" for k in range(n))
    ),
    "comments that do not end": lambda n: ptx_corpus.text("module", "/* " * n),
    "a declaration of brackets": lambda n: ptx_corpus.text("module", ".global .foo " + "a[" * n + ";"),
    "qualifiers": lambda n: ptx_corpus.text("module", ".global" + " .a" * n + " .q 5;"),
    "headers that do not end": lambda n: ptx_corpus.text("module", ".func a(" * n),
    "directives in one line": lambda n: ptx_corpus.text("body", ".what;" * n),
    "unknown directives": lambda n: ptx_corpus.text("module", ".what\n" * n),
    "initialisers": lambda n: ptx_corpus.text("module", f".global .u32 g[{n}] = {{{', '.join('1' * n)}}};"),
    "branch targets": lambda n: ptx_corpus.text("body", "T: .branchtargets " + "L," * n + "L;"),
}


@pytest.mark.parametrize("name", GROWING)
def test_twice_the_length_takes_twice_the_lines(name: str) -> None:
    """Lines of the machine's own code that run; loops within a line, as regular expressions have them, `test_long_texts` sees."""
    load(GROWING[name](10))
    few, many = (lines(lambda n=n: load(GROWING[name](n))) for n in (400, 800))  # type: ignore[misc]
    assert many < 2.3 * few + 2000


@pytest.mark.wide
@pytest.mark.parametrize("name", GROWING)
def test_long_texts_end(name: str) -> None:
    """A hundred thousand of them: what is quadratic would take minutes to hours."""
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (60, 60)); import test_ptx_broken as t; "
    script += "t.load(t.GROWING[sys.argv[1]](100_000))"
    subprocess.run([sys.executable, "-c", script, name], cwd=Path(__file__).parent, check=True)


def lines(work: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def pieces(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(place, piece) for place, each in table.items() for piece in each]


def taken(place: str, piece: str) -> bool:
    try:
        return not Module.from_ptx(ptx_corpus.text(place, piece)).refused
    except PtxError:
        return False


def test_what_ptxas_takes_and_refuses() -> None:
    assert [each for each in pieces(ptx_corpus.TAKEN) if not taken(*each)] == []
    assert [each for each in pieces(ptx_corpus.REFUSED) if taken(*each)] == []
    assert [each for each in pieces(ptx_corpus.PERMISSIVE) if not taken(*each)] == []


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no ptxas on the PATH")
def test_that_is_what_ptxas_says(tmp_path: Path) -> None:
    file = tmp_path / "k.ptx"
    for table, wanted in ((ptx_corpus.TAKEN, True), (ptx_corpus.REFUSED, False), (ptx_corpus.PERMISSIVE, False)):
        for place, piece in pieces(table):
            file.write_text(ptx_corpus.text(place, piece))
            done = subprocess.run(["ptxas", "-arch=sm_90a", str(file), "-o", "/dev/null"], capture_output=True, text=True)
            assert (done.returncode == 0) == wanted, (place, piece, done.stderr)


def test_a_kernel_has_as_much_static_shared_memory_as_a_block_can_have() -> None:
    rest = 232_448 - 256  # beside what the text has
    for size, fits in ((rest, True), (rest + 1, False), (1 << 30, False)):
        assert taken("body", f".shared .b8 big[{size}]; mov.u32 %r1, big;") == fits
