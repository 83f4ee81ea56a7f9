"""Ctrl-C and forks in the middle of a call: everything ends, and the next call is right. Each in a process that may hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import compiled
from suites import wide

TESTS = Path(__file__).parent

SMALL = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's job in the background ignores
import numpy as np
import compiled
from pathlib import Path
compiled.share(Path(sys.argv[1]))
import cupyflash
from cupyflash.distributed import ring_attention, threads

x = np.random.default_rng(0).standard_normal((1, 64, 16)).astype(np.float16)
def attention():
    return cupyflash.attention(x, x, x)
expected = attention()

def traced():
    # As a debugger does: a function would not begin while the interpreter waits to raise an error in a thread that is gone.
    sys.settrace(lambda *_: None)
    try:
        assert (lambda: 1)() == 1
    finally:
        sys.settrace(None)
"""

# Three ranks go on for ever: `work(comm)`. SIGINT comes while they do, each time a little later.
AMONG_THREADS = """
for delay in DELAYS:
    main = threading.main_thread().ident
    timer = threading.Timer(delay, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()  # which waits for the thread, on a busy machine longer than the delay
        threads(3, work)
        raise AssertionError("nothing was raised")
    except KeyboardInterrupt:
        pass
    timer.join()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank")]
    traced()
    assert np.array_equal(attention(), expected)
    assert np.array_equal(threads(2, lambda comm: ring_attention(x, x, x, comm))[0][:, :3], cupyflash.attention(x, X2, X2)[:, :3])
"""

WORKS = {
    "waiting": "def work(comm):\n    if comm.rank:\n        comm.gather(b'x')\n    while True:\n        pass\n",
    "computing": "def work(comm):\n    while True:\n        ring_attention(x, x, x, comm)\n",
    "talking": "def work(comm):\n    while True:\n        comm.gather(b'x')\n",
    "all at once": "def work(comm):\n    if comm.rank == 0:\n        comm.gather(b'x')\n    while True:\n        attention()\n",
}


def python(code: str, seconds: float = 60) -> None:
    """Run it in a process of its own, which must end well and in time."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", SMALL + code, *map(str, compiled.shared)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_what_runs_behind_threads_can_be_traced() -> None:
    python("threads(2, lambda comm: comm.gather(b'x'))\ntraced()\n", seconds=30)


@pytest.mark.parametrize("name", ["all at once", *(wide(name) for name in WORKS if name != "all at once")])
def test_ctrl_c_among_threads_ends_all_ranks(name: str) -> None:
    delays = "DELAYS = [0.1]" if name == "all at once" else "DELAYS = np.random.default_rng(1).uniform(0.01, 0.1, 10)"
    python(f"{WORKS[name]}\n{delays}\nX2 = np.concatenate([x, x], axis=1)\n{AMONG_THREADS}")


@pytest.mark.wide
def test_a_rank_that_swallows_an_interrupt_gets_another() -> None:
    """Python itself swallows exceptions that are raised in a destructor."""
    swallows = """
def work(comm):
    for _ in range(2):
        try:
            while True:
                pass
        except BaseException:
            pass
    raise RuntimeError
"""
    python(f"{swallows}\nDELAYS = [0.1]\nX2 = np.concatenate([x, x], axis=1)\n{AMONG_THREADS}")


def test_a_child_that_is_forked_in_the_middle_of_a_call() -> None:
    python("""
from cupyflash.launch import compiler, simulated
large = np.zeros((64, 512, 64), np.float16)
thread = threading.Thread(target=lambda: cupyflash.attention(large, large, large), daemon=True)
thread.start()
while not simulated._machine.lock.locked():
    time.sleep(0.01)
with compiler._compiling.lock:  # of whichever thread
    child = os.fork()
if child == 0:
    free = compiler._compiling.lock.acquire(blocking=False)
    os._exit(0 if free and np.array_equal(attention(), expected) else 1)
until = time.monotonic() + 30
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    if time.monotonic() > until:
        os.kill(child, signal.SIGKILL)
        raise AssertionError("the child hangs")
    time.sleep(0.01)
assert ended[1] == 0 and thread.is_alive()
os._exit(0)
""")
