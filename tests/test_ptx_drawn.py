"""Drawn programs of PTX, straight and branching, run by NumPy and by compiled code: the same bytes, counts and findings."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx import module as launches
from cupyflash.sim.ptx.execute.compiled import run_compiled
from suites import MORE, sample

WORDS = (
    *("add.s32 {d}, {a}, {b};", "sub.s32 {d}, {a}, {b};", "mul.lo.s32 {d}, {a}, {b};", "mad.lo.s32 {d}, {a}, {b}, {c};"),
    *("and.b32 {d}, {a}, {b};", "or.b32 {d}, {a}, {b};", "xor.b32 {d}, {a}, {b};", "not.b32 {d}, {a};", "shl.b32 {d}, {a}, {n};"),
    *("shr.u32 {d}, {a}, {b};", "shr.s32 {d}, {a}, {n};", "min.s32 {d}, {a}, {b};", "max.u32 {d}, {a}, {b};", "abs.s32 {d}, {a};"),
    *("prmt.b32 {d}, {a}, {b}, {c};", "bfe.u32 {d}, {a}, {n}, 9;", "bfi.b32 {d}, {a}, {b}, 3, {n};", "popc.b32 {d}, {a};"),
    *("clz.b32 {d}, {a};", "brev.b32 {d}, {a};", "lop3.b32 {d}, {a}, {b}, {c}, {byte};", "selp.b32 {d}, {a}, {b}, {p};"),
    *("div.u32 {d}, {a}, {b};", "rem.s32 {d}, {a}, {b};", "mul.hi.u32 {d}, {a}, {b};", "shf.l.wrap.b32 {d}, {a}, {b}, {c};"),
    *("mov.u32 {d}, %laneid;", "mov.u32 {d}, {number};", "cvt.s32.s8 {d}, {a};", "cvt.rzi.s32.f32 {d}, {x};"),
    *("setp.lt.s32 {q}, {a}, {b};", "setp.ne.u32 {q}, {a}, {n};", "setp.gt.f32 {q}, {x}, {y};", "activemask.b32 {d};"),
)
FLOATS = (
    *("cvt.rn.f32.s32 {f}, {a};", "mov.f32 {f}, 0f3FC00000;", "neg.f32 {f}, {x};", "abs.f32 {f}, {x};"),
    "mul.f32 {f}, {x}, 0f3E800000;",
    *("add.f32 {f}, {x}, {y};", "sub.f32 {f}, {x}, {y};", "fma.rn.f32 {f}, {x}, 0f3F000000, {y};", "max.f32 {f}, {x}, {y};"),
    *("min.f32 {f}, {x}, {y};", "add.rz.f32 {f}, {x}, {y};", "mul.ftz.f32 {f}, {x}, 0f3F400000;", "selp.f32 {f}, {x}, {y}, {p};"),
)
HALVES = (
    *("add.f16x2 {d}, %h0, %h1;", "fma.rn.f16x2 {d}, %h0, %h1, %h0;", "mul.bf16x2 {d}, %h0, %h1;", "max.f16x2 {d}, %h0, %h1;"),
    *("cvt.rn.bf16x2.f32 {d}, {x}, {y};", "neg.f16x2 {d}, %h1;", "fma.rn.bf16x2 {d}, %h0, %h1, %h1;", "sub.f16x2 {d}, %h1, %h0;"),
)
"""Arithmetic of pairs below 1: other bits may be NaN."""


@dataclass
class Drawn:
    """A program as it is drawn: its text, and what numbers come next."""

    random: random.Random
    lines: list[str] = field(default_factory=list)
    labels: int = 0

    def filled(self, text: str) -> str:
        draw = self.random
        words = {name: f"%r{draw.randrange(8)}" for name in "abcd"}
        floats = {name: f"%f{draw.randrange(4)}" for name in "xyf"}
        predicates = {name: f"%p{draw.randrange(4)}" for name in "pq"}
        numbers = {"n": draw.randrange(32), "byte": draw.randrange(256), "number": draw.randrange(-99, 99)}
        return text.format(**words, **floats, **predicates, **numbers)

    def label(self) -> str:
        self.labels += 1
        return f"$L{self.labels}"

    def straight(self, count: int) -> None:
        for _ in range(count):
            guard = self.filled(self.random.choice(["@{p} ", "@!{p} "])) if self.random.random() < 0.15 else ""
            self.lines.append(guard + self.filled(self.random.choice(WORDS if self.random.random() < 0.7 else FLOATS)))

    def halves(self) -> None:
        """Arithmetic of packed pairs."""
        self.lines += [self.filled("and.b32 %h0, {a}, 0x3BFF3BFF;"), self.filled("and.b32 %h1, {b}, 0xBBFFBBFF;")]
        self.lines.append(self.filled(self.random.choice(HALVES)))

    def load(self) -> None:
        """A load from anywhere in the input, an atomic addition somewhere in the sums."""
        self.lines += [self.filled("and.b32 %s0, {a}, 255;"), "mul.wide.u32 %o0, %s0, 4;", "add.u64 %o0, %o0, %in;"]
        self.lines.append(self.filled("ld.global.u32 {d}, [%o0];"))
        if self.random.random() < 0.5:
            self.lines += ["and.b32 %s0, %s0, 7;", "mul.wide.u32 %o0, %s0, 4;", "add.u64 %o0, %o0, %sums;"]
            self.lines.append(self.filled("red.global.add.u32 [%o0], {a};"))
            if self.random.random() < 0.5:
                self.lines += ["sub.u64 %o0, %o0, %sums;", "add.u64 %o0, %o0, %reals;"]
                self.lines.append(self.filled("red.global.add.f32 [%o0], {x};"))

    def private(self) -> None:
        """A store to local memory and a load, somewhere in it; loads may read what nobody wrote."""
        for how in ("st.local.u32 [%o0], {a};", "ld.local.u32 {d}, [%o0];"):
            self.lines += [
                self.filled("and.b32 %s0, {b}, 60;"),
                "cvt.u64.u32 %o0, %s0;",
                "mov.u64 %o1, depot;",
                "add.u64 %o0, %o0, %o1;",
            ]
            self.lines.append(self.filled(how))

    def together(self) -> None:
        """Something that all lanes of a block do at once."""
        how = self.random.randrange(7)
        if how == 0:
            mode = self.random.choice(["bfly", "up", "down", "idx"])
            self.lines.append(self.filled(f"shfl.sync.{mode}.b32 {{d}}|{{q}}, {{a}}, {{n}}, {0 if mode == 'up' else 31}, -1;"))
        elif how == 1:
            self.lines.append(self.filled("vote.sync.ballot.b32 {d}, {p}, -1;"))
        elif how == 2:
            self.lines.append(self.filled(f"redux.sync.{self.random.choice(['add.s32', 'max.u32', 'xor.b32'])} {{d}}, {{a}}, -1;"))
        elif how == 3:
            self.lines.append(self.filled(f"bar.red.{self.random.choice(['or', 'and'])}.pred {{q}}, 0, {{p}};"))
        elif how == 4:
            for k in range(5):
                self.lines.append(self.filled(f"and.b32 %m{k}, {{a}}, 0x3BFF3BFF;"))
            sums = ", ".join(f"%f{k}" for k in range(4))
            shape = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
            self.lines.append(f"{shape} {{{sums}}}, {{%m0, %m1}}, {{%m2}}, {{{sums}}};")
        elif how == 5:
            self.lines += [self.filled("and.b32 %s0, {a}, 255;"), "mul.wide.u32 %o0, %s0, 4;", "add.u64 %o0, %o0, %in;"]
            self.lines += ["bar.sync 0;", "cp.async.ca.shared.global [%own], [%o0], 4;", "cp.async.commit_group;"]
            self.lines += [self.filled("add.s32 {d}, {a}, {b};"), "cp.async.wait_group 0;", "bar.sync 0;"]
            self.lines += ["xor.b32 %s0, %own, 4;", self.filled("ld.shared.u32 {d}, [%s0];")]
        else:
            self.lines += ["bar.sync 0;", self.filled("st.shared.u32 [%own], {a};"), "bar.sync 0;"]
            self.lines += [f"xor.b32 %s0, %own, {4 * self.random.randrange(16)};", self.filled("ld.shared.u32 {d}, [%s0];")]

    def part(self, depth: int) -> None:
        """A few instructions, then branches or a loop with a number of turns of each lane's own."""
        self.straight(self.random.randrange(2, 7))
        if self.random.random() < 0.5:
            self.load()
        if self.random.random() < 0.3:
            self.halves()
        if self.random.random() < 0.3:
            self.private()
        if not depth:
            return
        if self.random.random() < 0.5:
            other, end = self.label(), self.label()
            self.lines.append(self.filled(f"@{{p}} bra {other};"))
            self.part(depth - 1)
            self.lines += [f"bra {end};", f"{other}:"]
            self.part(depth - 1)
            self.lines.append(f"{end}:")
        else:
            head = self.label()
            count = f"%t{depth}"
            self.lines += [self.filled(f"and.b32 {count}, {{a}}, 3;"), f"{head}:"]
            self.part(depth - 1)
            self.lines += [f"add.s32 {count}, {count}, -1;", f"setp.ge.s32 %again, {count}, 0;", f"@%again bra {head};"]

    def text(self) -> str:
        for _ in range(self.random.randrange(2, 5)):
            self.part(self.random.randrange(3))
            self.together()
        stores = [f"st.global.u32 [%out+{4 * k}], %r{k};" for k in range(8)]
        stores += [f"st.global.f32 [%out+{32 + 4 * k}], %f{k};" for k in range(4)]
        first = [f"mad.lo.s32 %r{k}, %t0, {2 * k + 1}, {k};" for k in range(8)]
        first += [f"cvt.rn.f32.s32 %f{k}, %r{k};" for k in range(4)]
        body = "\n".join([*first, *(f"setp.lt.s32 %p{k}, %r{k}, {40 * k};" for k in range(4)), *self.lines, *stores])
        return f"""
.version 8.8
.target sm_90
.address_size 64
.visible .entry drawn(.param .u64 in, .param .u64 out, .param .u64 sums, .param .u64 reals) {{
.reg .b32 %r<8>, %t<4>, %s<2>, %own, %h<2>, %m<5>;
.reg .f32 %f<4>;
.reg .b64 %in, %out, %sums, %reals, %o<2>;
.reg .pred %p<4>, %again;
.shared .align 4 .b8 mine[512];
.local .align 4 .b8 depot[64];
ld.param.u64 %in, [in];
ld.param.u64 %out, [out];
ld.param.u64 %sums, [sums];
ld.param.u64 %reals, [reals];
mov.u32 %t0, %tid.x;
shl.b32 %own, %t0, 2;
mov.u32 %s0, mine;
add.u32 %own, %own, %s0;
mov.u32 %s0, %ctaid.x;
mov.u32 %s1, %ntid.x;
mad.lo.u32 %t0, %s0, %s1, %t0;
mul.wide.u32 %o0, %t0, 48;
add.u64 %out, %out, %o0;
{body}
ret;
}}
"""


@pytest.mark.parametrize("seeds", sample([range(3), range(3, 40 * MORE)], [range(3)]), ids=len)
def test_drawn_programs_are_the_same_by_both(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite", reason="the extra llvm brings it")
    ran = [both(seed, monkeypatch) for seed in seeds]
    assert 3 * sum(ran) >= len(ran)  # in the others some number is NaN, or the like, and NumPy runs them


def both(seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a drawn program by NumPy and by compiled code, and compares all there is; returns whether that did not give up."""
    kernel = Module.from_ptx(Drawn(random.Random(seed)).text())
    values = np.random.default_rng(seed).integers(-(2**31), 2**31, 256).astype(np.int32)
    own, ran, found = run_compiled, [], []
    monkeypatch.setattr(launches, "run_compiled", lambda *given: ran.append(own(*given)) or ran[-1])
    threads = (32, 64, 96, 128)[seed % 4]
    for engine in ("numpy", "llvm"):
        monkeypatch.setenv("CUPYFLASH_ENGINE", engine)
        arrays = [values, np.zeros((5 * threads, 12), np.uint32), np.zeros(8, np.uint32), np.zeros(8, np.float32)]
        launch = kernel.launch("drawn", 5, threads, arrays)
        found.append(([one.tobytes() for one in arrays], launch.counters, launch.traffic, launch.findings))
    assert found[0] == found[1], f"seed {seed}"
    return ran[0]
