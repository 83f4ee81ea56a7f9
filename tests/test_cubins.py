"""Machine code for an architecture's own instructions: what is kept on disk, when it is compiled anew, how it is loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tile_copy import TileCopy

from cupyflash import Problem
from cupyflash.launch import compiler, cubins, first_use, nvrtc, own_files
from cupyflash.launch.cubins import CompiledCubin, Program
from cupyflash.launch.nvrtc import CompileError, remarks
from cupyflash.launch.resources import parse_account
from faults import within

ELF = b"\x7fELF"
PROGRAM = Program('extern "C" __global__ void set(int* x) { *x = VALUE; }', "set.cu", ("-DVALUE=1",), "90a")
KEPT = CompiledCubin(ELF + bytes(1000), "a log")


class Recorded:
    """CuPy's RawModule for paths, as far as it is used: it reads the file at get_function, once a path, as CuPy's memo has it."""

    def __init__(self) -> None:
        self.paths: list[Path] = []
        self.modules: dict[str, bytes] = {}

    def RawModule(self, *, path: str) -> Any:
        def get_function(name: str) -> Any:
            self.paths.append(Path(path))
            if path not in self.modules:
                try:
                    self.modules[path] = Path(path).read_bytes()
                except FileNotFoundError as error:
                    raise RuntimeError("CUDA_ERROR_FILE_NOT_FOUND") from error
            if not self.modules[path].startswith(ELF):
                raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
            return types.SimpleNamespace(name=name, code=self.modules[path], local_size_bytes=0)

        return types.SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recorded]:
    cubins.compiler()  # while CuPy, which has NVRTC's binding, is itself
    for name in (cubins.IN_MEMORY, cubins.SAVE_SOURCE, cubins.DUMP):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(first_use.FOLDER, str(tmp_path / "cache"))
    recorded = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", recorded)
    yield recorded


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were compiled, to what `KEPT` has."""
    found: list[Program] = []
    monkeypatch.setattr(cubins, "compiled", lambda program: found.append(program) or KEPT)
    return found


def folder() -> Path:
    return Path(os.environ[first_use.FOLDER])


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder().iterdir()}


# -- kept -----------------------------------------------------------------------------------------------------------------


def test_a_program_is_compiled_once_and_read_from_its_file(cupy: Recorded, compiled: list[Program]) -> None:
    for _ in range(2):
        function, said = cubins.function(PROGRAM, "set")
        assert (function.name, function.code, said) == ("set", KEPT.code, ())
    assert compiled == [PROGRAM] and set(files()) == {f"cupyflash_{PROGRAM.key}.{kind}" for kind in ("cubin", "json")}
    assert json.loads(files()[f"cupyflash_{PROGRAM.key}.json"])["log"] == "a log"
    assert len(set(cupy.paths)) == 2 and not any(path.parent.exists() for path in cupy.paths)  # CuPy keeps a path's contents


def test_what_is_loaded_is_what_was_read(cupy: Recorded, compiled: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others who may write in the folder may write between reading and loading; a folder that is emptied meanwhile does not matter
    either."""
    cubins.function(PROGRAM, "set")
    read = cubins.read

    def read_and_change(path: Path) -> CompiledCubin | None:
        found = read(path)
        path.write_bytes(ELF + b"another's")
        return found

    def read_and_lose(path: Path) -> CompiledCubin | None:
        found = read(path)
        shutil.rmtree(path.parent)
        return found

    for changing in (read_and_change, read_and_lose):
        cubins.write(folder() / f"cupyflash_{PROGRAM.key}.cubin", KEPT, "")
        monkeypatch.setattr(cubins, "read", changing)
        assert cubins.function(PROGRAM, "set")[0].code == KEPT.code and compiled == [PROGRAM]


CHANGES: dict[str, dict[str, Any]] = {
    "the source": {"source": PROGRAM.source + " "},
    "an option": {"options": ("-DVALUE=2",)},
    "the sources that it includes": {"options": ("-DVALUE=1", "-DCUPYFLASH_SOURCES=0x2")},
    "the architecture": {"architecture": "100a"},
}


def test_all_that_can_change_the_machine_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {PROGRAM.key, *(PROGRAM._replace(**change).key for change in CHANGES.values())}
    (kernel,) = TileCopy.of(Problem(1, 1, 1, 16, 16, 64, "float16")).kernels()
    assert any(option.startswith("-DCUPYFLASH_SOURCES=") for option in compiler.options(kernel))
    assert "release" in cubins.compiler() and "Build ID" in cubins.compiler()
    monkeypatch.setattr(cubins, "compiler", lambda: "another")
    keys.add(PROGRAM.key)
    monkeypatch.setattr(cubins, "header_directories", lambda: ("/elsewhere",))
    assert len({*keys, PROGRAM.key}) == len(CHANGES) + 3


def deep(cubin: Path, told: Path) -> None:
    told.write_text("[" * 200_000)


def of_another_program(cubin: Path, told: Path) -> None:
    """Whole, the user's own, and under another's name."""
    other = cubin.with_name(f"cupyflash_{PROGRAM._replace(source='other').key}.cubin")
    cubins.write(other, CompiledCubin(ELF + b"other", ""), "")
    other.replace(cubin), other.with_suffix(".json").replace(told)


def a_link(cubin: Path, told: Path) -> None:
    cubin.symlink_to(cubin.rename(cubin.with_suffix(".elsewhere")))


def a_pipe(cubin: Path, told: Path) -> None:
    told.unlink()
    os.mkfifo(told)


DAMAGE = {
    "truncated": lambda cubin, told: cubin.write_bytes(cubin.read_bytes()[:500]),
    "emptied": lambda cubin, told: cubin.write_bytes(b""),
    "a bit that flipped": lambda cubin, told: cubin.write_bytes(ELF + b"\1" + cubin.read_bytes()[5:]),
    "another's hash": lambda cubin, told: told.write_text(json.dumps({"sha256": "0" * 64, "log": ""})),
    "another log": lambda cubin, told: told.write_text(told.read_text().replace("a log", "a lie")),
    "half of what tells of it": lambda cubin, told: told.write_text(told.read_text()[:20]),
    "something else there": lambda cubin, told: told.write_text("[]"),
    "a text without a log": lambda cubin, told: told.write_text('{"sha256": 1e999}'),
    "a number of many digits": lambda cubin, told: told.write_text("9" * 100_000),
    "no text": lambda cubin, told: told.write_bytes(b"\xff\xfe\0"),
    "brackets without end": deep,
    "a program under another's name": of_another_program,
    "nothing beside it": lambda cubin, told: told.unlink(),
    "only what tells of it": lambda cubin, told: cubin.unlink(),
    "others may write it": lambda cubin, told: cubin.chmod(0o666),
    "others may write what tells of it": lambda cubin, told: told.chmod(0o660),
    "a link": a_link,
    "a pipe, which nobody writes": a_pipe,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_compiled_again(name: str, cupy: Recorded, compiled: list[Program]) -> None:
    """And its place is taken by a whole one, which links and pipes make way for."""
    path = folder() / f"cupyflash_{PROGRAM.key}.cubin"
    cubins.function(PROGRAM, "set")
    whole = files()
    DAMAGE[name](path, path.with_suffix(".json"))
    assert within(20, lambda: cubins.read(path)) is None
    assert cubins.function(PROGRAM, "set")[0].code == KEPT.code
    assert compiled == [PROGRAM] * 2 and whole.items() <= files().items()
    assert all(stat.S_IMODE((folder() / each).lstat().st_mode) == 0o600 for each in whole)


def test_files_of_another_user_are_not_read(cupy: Recorded, compiled: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they are whole and of the right name, as in a folder where everybody may put some."""
    cubins.function(PROGRAM, "set")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    first_use._say_unusable.cache_clear()
    with pytest.warns(RuntimeWarning, match="files there are not this user's alone"):  # what we write is another's, too
        assert cubins.function(PROGRAM, "set")[0].code == KEPT.code
    assert compiled == [PROGRAM] * 2


def test_a_folder_at_a_files_place_is_no_error(cupy: Recorded, compiled: list[Program]) -> None:
    (folder() / f"cupyflash_{PROGRAM.key}.cubin").mkdir(parents=True)
    first_use._say_unusable.cache_clear()
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert cubins.function(PROGRAM, "set")[0].code == KEPT.code
    assert [each.name for each in folder().iterdir()] == [f"cupyflash_{PROGRAM.key}.cubin"]


WRITER = """
import os, signal, sys
from pathlib import Path
from cupyflash.launch import cubins
os.{call} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
cubins.write(Path(sys.argv[1]), cubins.CompiledCubin(b"half", ""), "")
"""


def test_what_a_killed_writer_leaves_is_swept(tmp_path: Path) -> None:
    """Files so old that nobody is still writing them are removed; a reader has never seen them."""
    path = tmp_path / "cupyflash_1.cubin"
    cubins.write(path, KEPT, "")
    killed = subprocess.run([sys.executable, "-c", WRITER.format(call="replace"), str(path)], check=False)
    (left,) = (each for each in tmp_path.iterdir() if each.suffix not in (".cubin", ".json"))
    assert killed.returncode == -signal.SIGKILL and cubins.read(path) == KEPT
    cubins.write(path, KEPT, "")
    assert left.exists()
    strangers = tmp_path / "cupyflash_notes.txt", tmp_path / "other.tmp"
    for old in (left, *strangers):
        old.touch()
        os.utime(old, (0, 0))
    cubins.write(path, KEPT, "")
    assert not left.exists() and all(each.exists() for each in strangers) and cubins.read(path) == KEPT


def test_many_may_write_and_read_at_once(tmp_path: Path) -> None:
    """Compilers that do not agree to the byte: a reader has one of them whole, or none."""
    path, options = tmp_path / "cupyflash_1.cubin", [CompiledCubin(bytes([n]) * (1000 + n), str(n)) for n in range(8)]

    def work(turn: int) -> CompiledCubin | None:
        cubins.write(path, options[turn % 8], "")
        return cubins.read(path)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(64))) <= {None, *options}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cupyflash_1.cubin", "cupyflash_1.json"]


@pytest.mark.parametrize("mode", ["a file", "below a file", "full"])
def test_an_unusable_folder_is_no_error(
    mode: str, cupy: Recorded, compiled: list[Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cubin is then loaded from a file that goes, at another path each time."""
    (tmp_path / "file").touch()
    if mode == "full":

        def full(path: Path, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(own_files, "write", full)
    else:
        monkeypatch.setenv(first_use.FOLDER, str(tmp_path / "file" / ("below" if mode == "below a file" else "")))
    for _ in range(2):
        assert cubins.function(PROGRAM, "set")[0].code == KEPT.code
    assert len(set(cupy.paths)) == 2 and not any(path.exists() or path.parent.exists() for path in cupy.paths)
    assert compiled == [PROGRAM] * 2


def test_a_full_disk_leaves_nothing_half(cupy: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(before: str, after: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    cubins.write(tmp_path / "cupyflash_1.cubin", KEPT, "")
    assert list(tmp_path.iterdir()) == []


def test_cupys_switches(cupy: Recorded, compiled: list[Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cubins.IN_MEMORY, "1")
    cubins.function(PROGRAM, "set")
    assert not folder().exists() and not cupy.paths[0].exists()
    for off in ("0", "", "yes"):  # as CuPy reads it
        monkeypatch.setenv(cubins.IN_MEMORY, off)
        cubins.function(PROGRAM, "set")
    assert len(compiled) == 2 and len(files()) == 2
    monkeypatch.setenv(cubins.SAVE_SOURCE, "1")
    other = PROGRAM._replace(name="other.cu")
    cubins.function(other, "set")
    assert files()[f"cupyflash_{other.key}.cubin.cu"].decode() == PROGRAM.source
    monkeypatch.delenv(first_use.FOLDER)
    monkeypatch.setenv("HOME", str(tmp_path))
    cubins.function(PROGRAM, "set")
    assert (tmp_path / ".cupy" / "kernel_cache" / f"cupyflash_{PROGRAM.key}.cubin").read_bytes() == KEPT.code


def test_what_the_driver_refuses_is_no_files_fault(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubins, "read", lambda path: CompiledCubin(b"no ELF", ""))
    monkeypatch.setattr(cubins, "compiled", lambda program: pytest.fail("compiled"))
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        cubins.function(PROGRAM, "set")
    assert not cupy.paths[-1].parent.exists()


# -- compiled ---------------------------------------------------------------------------------------------------------------


def test_nvrtc_makes_machine_code_for_sm_90a_and_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions that sm_90 has not, and ptxas' account."""
    source = 'extern "C" __global__ void k(int* x) { asm volatile("wgmma.fence.sync.aligned;"); *x = VALUE; }'
    made = cubins.compiled(Program(source, "k.cu", ("-DVALUE=1",), "90a"))
    assert made.code.startswith(ELF) and b"sm_90a" in made.code and set(parse_account(made.log)) == {"k"}
    segments, length, count = struct.unpack_from("<32xQ14xHH", made.code)
    assert segments + length * count == len(made.code)  # a file has no zero behind it, as a text in memory has
    assert nvrtc.whole(made.code) == nvrtc.whole(made.code[:-1]) == made.code and nvrtc.whole(made.code[:-2]) == made.code[:-2]
    with pytest.raises(CompileError, match="wgmma"):
        cubins.compiled(Program(source, "k.cu", ("-DVALUE=1",), "90"))


def test_a_source_that_does_not_compile_is_shown_if_asked(
    cupy: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(source: str, options: Any, name: str) -> Any:
        raise CompileError(name, "expected a ';'")

    monkeypatch.setattr(cubins, "compile_to_cubin", refuse)
    for asked in ("0", "1"):
        monkeypatch.setenv(cubins.DUMP, asked)
        with pytest.raises(CompileError, match=r"set\.cu does not compile"):
            cubins.function(PROGRAM, "set")
        said = capsys.readouterr().err
        assert ("expected a ';'" in said and "   1 extern" in said and "-arch=sm_90a -DVALUE=1" in said) == (asked == "1")
    assert not folder().exists()


SERIAL = r"""#define R(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
extern "C" __global__ void k(float* y, unsigned long long a, unsigned long long b, int n) {
  float c[4] = {};
  for (int i = 0; i < n; i++) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 2; k++) {
      asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;" : R(0)
                   : "l"(a + k), "l"(b + i));
      BETWEEN
    }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : R(0)::"memory");
  }
  for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = c[i];
}"""


def test_products_that_wait_for_each_other_are_remarked_on() -> None:
    said = [
        remarks(cubins.compiled(Program(SERIAL, "k.cu", (f"-DBETWEEN={between}",), "90a")).log) for between in ("", "c[1]+=1.f;")
    ]
    assert said[0] == ()
    assert any("wgmma" in line and "in function 'k'" in line.replace("the function", "function") for line in said[1])


def test_a_kernel_that_waits_makes_way_for_the_next(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits makes way, as one with local memory does; an ordinary kernel never comes here."""
    (kernel,) = TileCopy.of(Problem(1, 1, 1, 16, 16, 64, "float16")).kernels()
    others = tuple(type(kernel)(**{**kernel.__dict__, "constants": (*kernel.constants, ("OTHER", n))}) for n in (1, 2))
    first = type(kernel)(**{**kernel.__dict__, "instead": others})
    asked: list[Program] = []
    remark = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"

    def made(program: Program) -> CompiledCubin:
        asked.append(program)
        return CompiledCubin(KEPT.code, "" if "-DOTHER=2" in program.options else remark)

    monkeypatch.setattr(cubins, "compiled", made)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr("cupyflash.launch.dispatch.current_gpu", lambda ordinal: types.SimpleNamespace(compute_capability=(9, 0)))
    found, function = compiler.gpu_kernel(first, 0)
    assert found == others[1] and function.code == KEPT.code and len(asked) == 3
    assert all(each.architecture == "90a" and "-ftz=true" in each.options for each in asked)
    assert all(set(compiler.options(kernel)) <= set(each.options) for each in asked)
    compiler._functions.clear()  # the remarks are kept, too
    assert compiler.gpu_kernel(first, 0)[0] == others[1] and len(asked) == 3
    assert compiler.gpu_kernel(first, 1)[0] == others[1] and len(cupy.paths) == 9  # each device loads its own
    assert nvrtc.remarks(remark) == (remark,)


def test_code_for_debugging_is_compiled_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC makes other code of a process's later programs after it."""
    from cupyflash.launch import nvrtc

    monkeypatch.setattr(nvrtc, "_compile_here", lambda *_: pytest.fail("NVRTC ran in this process"))
    assert ".debug_info" in nvrtc.compile_to_ptx('extern "C" __global__ void k() {}', ("-G",), "k.cu")
    with pytest.raises(nvrtc.CompileError, match="does not compile"):
        nvrtc.compile_to_ptx("no C", ("--device-debug",), "k.cu")
