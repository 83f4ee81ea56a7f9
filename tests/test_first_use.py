"""The obstacles before a new user's first kernel: each gives one clear sentence with the way out."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cupyflash.device import Device
from cupyflash.launch import compiler, cubins, first_use
from suites import wide


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Refused(RuntimeError):
    """The stand-in of CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"error {status}")


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    packages = [types.SimpleNamespace(metadata={"Name": name}) for name in names]
    monkeypatch.setattr("importlib.metadata.distributions", lambda: packages)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CuPy of CUDA 13.2 whose driver counts no devices: how old it is, and why."""

    def install(driver: int, status: int = 35, built_for: int = 13020) -> None:
        def count() -> int:
            raise Refused(status)

        answers = {"driverGetVersion": lambda: driver, "runtimeGetVersion": lambda: built_for}
        runtime = types.SimpleNamespace(is_hip=False, getDeviceCount=count, **answers)
        module = types.ModuleType("cupy")
        module.cuda = types.SimpleNamespace(runtime=runtime)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupy", module)

    installed(monkeypatch, "cupy-cuda13x", "numpy")
    return install


@pytest.mark.parametrize(
    ("driver", "status", "built_for", "told"),
    [
        (0, 35, 13020, r"^no NVIDIA driver was found: install one .* NumPy arrays run on the simulated device$"),
        (12080, 35, 13020, r"^the NVIDIA driver is for CUDA 12\.8 and older, .* CUDA 13\.2: pip install 'cupyflash\[cuda12\]'"),
        (11040, 35, 13020, r"^the NVIDIA driver is for CUDA 11\.4 and older, .* CUDA 13\.2: update it$"),
        (11040, 35, 12090, r"CUDA 12\.9: update it$"),
        (13000, 100, 13020, r"^the driver shows no GPU \(error 100\): nvidia-smi lists .* CUDA_VISIBLE_DEVICES"),
    ],
)
def test_no_gpu_is_one_sentence_with_the_way_out(cupy: Any, driver: int, status: int, built_for: int, told: str) -> None:
    cupy(driver, status, built_for)
    with pytest.raises(RuntimeError, match=told) as raised:
        Device.current()
    assert "\n" not in str(raised.value)


def test_two_cupys_are_named_whether_it_can_be_imported_or_not(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "CuPy-cuda12x", "cupy-cuda13x", "cupyx-something", "cupyflash")
    told = r"^cupy-cuda12x and cupy-cuda13x are both installed .*: pip uninstall cupy-cuda12x cupy-cuda13x, then install one again"
    cupy(12080)
    with pytest.raises(RuntimeError, match=told):
        Device.current()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=told):
        Device.current()
    installed(monkeypatch, "cupy-cuda12x", "cupyflash")
    assert first_use.two_packages() is None


def test_a_cache_that_cannot_be_written_is_said_once(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning comes once, whatever the file is called."""

    def replace(before: str, after: Path) -> None:
        raise OSError(28, "No space left on device", before, None, str(after))

    first_use._say_unusable.cache_clear()
    monkeypatch.setattr(os, "replace", replace)
    for name in ("a", "b"):
        cubins.write(tmp_path / "cache" / f"{name}.cubin", cubins.CompiledCubin(b"", ""), "")
    (said,) = recwarn
    assert "each process compiles them anew: set CUPY_CACHE_DIR to a folder that you may write" in str(said.message)
    assert said.category is RuntimeWarning and f"{tmp_path / 'cache'} (No space left on device)" in str(said.message)


WITHOUT_A_FOLDER = """
import os, sys, threading, warnings
import numpy as np
warnings.simplefilter("error")
import cupyflash
from cupyflash.launch import first_use
x = np.ones((4, 16), np.float16)
threads = [threading.Thread(target=first_use.import_cupy) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
try:
    cupyflash.Device.current()
except RuntimeError:
    pass  # as on any machine without a GPU
assert (cupyflash.attention(x, x, x) == 1).all()
assert os.environ.get("CUPY_CACHE_DIR", "unset") == sys.argv[1]
import cupy
folder = cupy.cuda.compiler._kernel_cache_backend._cache_dir
if os.fork() == 0:
    sys.exit()
os.wait()
assert os.path.isdir(folder)
try:
    first_use.say_what_is_not_kept()
except RuntimeWarning as told:
    assert str(first_use.cache_folder()) in str(told), told
else:
    raise AssertionError("nothing was said")
print(folder)
"""


@pytest.mark.parametrize("given", ["unset", wide("below a file"), wide("")])
def test_a_cache_that_cannot_be_made_does_not_stop_the_simulation(given: str, tmp_path: Path) -> None:
    """CuPy cannot be imported then, for its NVRTC either; the folder that it is given instead goes with the process."""
    home = tmp_path / "file"
    home.touch()
    given = str(home / "below") if given == "below a file" else given
    env = {name: value for name, value in os.environ.items() if name != "CUPY_CACHE_DIR"} | {"HOME": str(home)}
    env |= {} if given == "unset" else {"CUPY_CACHE_DIR": given}
    ran = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_A_FOLDER, given], env=env, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert not Path(ran.stdout.strip()).exists() and home.read_bytes() == b""


def impatient(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, seconds: float) -> io.StringIO:
    """A terminal in the place of stderr (within a test: pytest takes that back before), before any message."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(first_use, "PATIENCE", seconds)
    first_use._told.clear()
    return stderr


def test_a_terminal_that_waits_is_told_once_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(kernel: Any, device_id: int) -> tuple[int, Any]:
        assert first_use._told.wait(10)
        return 0, None

    monkeypatch.setattr(compiler, "_without_fault", slow)
    params = types.SimpleNamespace(constants=())
    figures = {"constants": (), "shared_bytes": 0, "accelerated": False, "instead": (), "params": params}
    kernel: Any = types.SimpleNamespace(name="k", source="k.cu", **figures)
    terminal = impatient(monkeypatch, Terminal(), 0.01)
    for device_id in (-1, -2):
        compiler.gpu_kernel(kernel, device_id)
    told = terminal.getvalue()
    assert told.startswith("cupyflash compiles k (k.cu) for this GPU; the next time") and told.count("\n") == 1


def test_who_does_not_wait_or_is_no_terminal_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr, seconds in ((Terminal(), 60.0), (io.StringIO(), 0.0)):
        told = impatient(monkeypatch, stderr, seconds)
        with first_use.patience("it"):
            assert not first_use._told.wait(0.05)
        assert told.getvalue() == ""
