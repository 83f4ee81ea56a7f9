"""Waves in several processes: the same outcome as in one, and no second one where blocks may depend on each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_ptx_harness import kernel

from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.execute.ptx_machine import VARIABLE

ROOT = Path(__file__).resolve().parent.parent

REGISTERS = ".reg .b64 %x<6>; .reg .b32 %i<6>; .reg .pred %p; .shared .align 4 .b8 s[256];"
INDEX = """mov.u32 %i0, %tid.x; mov.u32 %i1, %ctaid.x; mad.lo.u32 %i2, %i1, 64, %i0; ld.param.u64 %x0, [x]; ld.param.u64 %x1, [y];
mul.wide.u32 %x2, %i2, 4; add.u64 %x0, %x0, %x2; add.u64 %x1, %x1, %x2; ld.global.u32 %i3, [%x0];"""

BODIES = {
    # Blocks that write what is their own, in part through shared memory; every other element of y stays unwritten.
    "apart": "shl.b32 %i4, %i0, 2; mov.u32 %i5, s; add.u32 %i4, %i4, %i5; st.shared.u32 [%i4], %i3; bar.sync 0; "
    "ld.shared.u32 %i3, [%i4]; and.b32 %i5, %i0, 1; setp.eq.u32 %p, %i5, 0; @%p st.global.u32 [%x1], %i3;",
    "in place": "add.u32 %i3, %i3, 1; st.global.u32 [%x0], %i3; st.global.u32 [%x1], %i3;",
    # Two blocks are a wave.
    "reads what the wave before wrote": "st.global.u32 [%x1], %i3; setp.gt.u32 %p, %i1, 1; @%p ld.global.u32 %i3, [%x1-512]; "
    "st.global.u32 [%x0], %i3;",
    "writes where the wave before did": "st.global.u32 [%x1], %i1; setp.gt.u32 %p, %i1, 1; @%p st.global.u32 [%x1-512], %i1;",
    "one store is out of bounds": "setp.eq.u32 %p, %i2, 200; @%p st.global.u32 [%x1+8192], %i3;",
    "counts": "ld.param.u64 %x3, [y]; red.global.add.u32 [%x3], %i3;",
    "waits": "ld.param.u64 %x3, [y]; atom.global.add.u32 %i4, [%x3], %i3; st.global.u32 [%x0], %i4;",
    "asks the time": "mov.u32 %i4, %clock; st.global.u32 [%x1], %i4;",
}
APART = ("apart", "in place")
FAULTY = ("reads what the wave before wrote", "writes where the wave before did", "one store is out of bounds")

SCRIPT = """
import mmap
import sys
import tempfile
import numpy as np
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx import module
from cupyflash.sim.ptx.execute import ptx_machine

ptx_machine.WAVE_LANES = 128
ptx_machine.cores = lambda: 3  # whatever this machine has
apart = []
inner = ptx_machine.run_apart
module.run_apart = lambda *given: apart.append(inner(*given)) or apart[-1]


def ordinary(size):
    return np.zeros(size, np.uint32)


def mapped(size):
    return np.frombuffer(mmap.mmap(-1, 4 * size), np.uint32)


def on_file(size):
    return np.memmap(tempfile.TemporaryFile(), np.uint32, "w+", shape=size)


def run(text, processes, blocks, memory=ordinary):
    x, y = memory(1024), memory(1024)
    x[:], y[:] = np.arange(1024), 7
    unwritten = ["y"] if "bar.sync" in text else []
    found = Module.from_ptx(text).launch("k", blocks, 64, {"x": x, "y": y}, processes=processes, unwritten=unwritten)
    left = {name: mask.tobytes() for name, mask in found.unwritten.items()}
    return x.tobytes(), y.tobytes(), found.counters, dict(found.traffic), found.findings, found.notes, found.findings_total, left


for text in sys.stdin.read().split("// ----"):
    for blocks in (4, 16):  # of the fewer ones those that depend on each other are in different processes
        apart.clear()
        one = run(text, 1, blocks)
        print([run(text, count, blocks) == one for count in (2, 3)], apart, bool(one[4]))
        apart.clear()
        print([run(text, 3, blocks, memory) == one for memory in (mapped, on_file)], apart)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_the_same_outcome_in_several_processes() -> None:
    texts = [kernel(INDEX + body, [".u64 x", ".u64 y"], REGISTERS) for body in BODIES.values()]
    # A program with one thread, which a worker of pytest-xdist is not.
    command, env = [sys.executable, "-c", SCRIPT], os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(command, input="// ----".join(texts), capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    lines = iter(out.stdout.splitlines())
    for name in BODIES:
        expected = f"[True, True] {[False, name in APART, name in APART]} {name in FAULTY}"
        common = "[True, True] [False, False]"  # memory that processes share: there they must not be used
        assert [next(lines, "") for _ in range(4)] == [expected, common] * 2, (name, out.stderr)


FAULTS = """
import errno, multiprocessing, os, signal, struct, sys
import numpy as np
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.execute import ptx_machine

ptx_machine.WAVE_LANES = 128
ptx_machine.cores = lambda: 3
module, own = Module.from_ptx(sys.stdin.read()), ptx_machine.work


def killed(machine, part, of, pipe):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_within_its_message(machine, part, of, pipe):
    os.write(pipe.fileno(), struct.pack("!i", 1000) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def without_memory(machine, part, of, pipe):
    def run(*_):
        raise MemoryError

    machine.run = run
    own(machine, part, of, pipe)


def refused(*_):
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def outcome(count):
    x, y = np.arange(1024, dtype=np.uint32), np.zeros(1024, np.uint32)
    launch = module.launch("k", 16, 64, {"x": x, "y": y}, processes=count)
    return x.tobytes(), y.tobytes(), launch.counters, launch.findings


expected = outcome(1)
for faulty in (killed, killed_within_its_message, without_memory):
    ptx_machine.work = lambda *given: (faulty if given[1] else own)(*given)
    print(outcome(3) == expected, multiprocessing.active_children())
ptx_machine.work = own
fork, os.fork = os.fork, refused
print(outcome(3) == expected, multiprocessing.active_children())
os.fork, os.pipe = fork, refused
print(outcome(3) == expected, multiprocessing.active_children())
"""


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_processes_that_fail_change_nothing() -> None:
    """A process that is killed, or cannot begin: the launch runs in this one."""
    text = kernel(INDEX + BODIES["in place"], [".u64 x", ".u64 y"], REGISTERS)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", FAULTS], input=text, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120)
    assert out.stdout.splitlines() == ["True []"] * 5, out.stderr


def test_what_is_no_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module.from_ptx(kernel("", [".u64 x"]))
    for wrong in (0, -1, True, "two"):
        with pytest.raises(ValueError, match="processes must be a whole number from 1"):
            module.launch("k", 1, 32, [None], processes=wrong)  # type: ignore[arg-type]
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(ValueError, match=f"{VARIABLE} must be a whole number from 1, got 'many'"):
        module.launch("k", 1, 32, [None])
    module.launch("k", 1, 32, [None], processes=1)
