"""The timed instructions of rates.py: each a step of PTX that a kernel repeats between two readings of the clock.

A kernel has chains of steps, each of which reads what the one before it in its chain wrote: one chain shows a latency, several in
many warps a rate. In a step's PTX, X0, X1, ... are the registers of its chain, G0, G1, ... given ones that it only reads, T0, T1,
... scratch, and N is the number of the step. X and G come from memory, so that the compiler knows none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TYPES = {"r": "unsigned", "l": "u64", "d": "double"}
ONE, ONES, ONE_64 = 0x3F800000, 0x3C003C00, 0x3FF0000000000000  # float32, two float16, float64
GIVEN = 8  # places of the given registers in memory, before those of the chains

HEAD = """typedef unsigned long long u64;
__device__ unsigned of_shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
"""
KERNEL = r"""
extern "C" __global__ void %(attributes)s__launch_bounds__(%(threads)d) %(kernel)s(
    u64* cells, const u64* values, u64* stamps, u64* sink, int turns
) {
    const unsigned lane = threadIdx.x %% 32, warp = threadIdx.x / 32;
    __shared__ __align__(1024) unsigned words[%(words)d];
    for (unsigned i = threadIdx.x; i < %(words)d; i += blockDim.x) words[i] = 0;
    __syncthreads();
    %(declared)s
    %(setup)s
    __syncthreads();
    const u64 begin = clock64();
    #pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) asm volatile(%(steps)s : %(chains)s : %(given)s : "memory");
    const u64 end = clock64();
    u64* own_stamps = stamps + 2 * (blockIdx.x * (blockDim.x + 31) / 32 + warp);
    if (lane == 0) own_stamps[0] = begin, own_stamps[1] = end;
    sink[threadIdx.x] = %(used)s;
    %(after)s
}
"""


@dataclass(frozen=True)
class Step:
    """An instruction, or the few that make a step. `opcodes` are those that the machine code must have, once for each step.

    chain, given, scratch: the kinds of registers X, G and T: r 32 bits, l 64 bits, d float64. start, values: the bits of each X
    and of each G. setup: C before the clock is read, in which x0 and g0 are X0 and G0; every chain starts with what it makes of X0.
    before, behind: PTX around the steps of a turn. after: C behind the clock. threads: the most of a block. words: 32 bits of
    shared memory each.
    """

    name: str
    ptx: str
    opcodes: tuple[str, ...]
    chain: str = "r"
    given: str = ""
    start: int = ONE
    values: tuple[int, ...] = ()
    scratch: str = ""
    setup: str = ""
    before: str = ""
    behind: str = ""
    after: str = ""
    attributes: str = ""
    threads: int = 1024
    words: int = 128

    def source(self, kernel: str, chains: int, steps: int) -> str:
        """CUDA C of a kernel with that many chains, a turn of which makes `steps` steps of each."""
        width = len(self.chain)
        body = [self._numbered(chain, chains, n, self.ptx) for n in range(steps) for chain in range(chains)]
        scratch = " ".join(f".reg .b{32 if kind == 'r' else 64} T{i};" for i, kind in enumerate(self.scratch))
        xs = [f"x{i}" for i in range(chains * width)]
        declared = [f"{TYPES[kind]} g{i} = {_read(kind, str(i))};" for i, kind in enumerate(self.given)]
        declared += [
            f"{TYPES[self.chain[i % width]]} {x} = {_read(self.chain[i % width], f'{GIVEN + i}')};" for i, x in enumerate(xs)
        ]
        copies = "".join(f" x{i * width} += x0;" for i in range(1, chains)) if self.setup else ""
        behind = self._numbered(0, chains, steps, self.behind)
        lines = "\n".join(f'"{each}\\n"' for each in ["{", scratch, self.before, *body, behind, "}"])
        return KERNEL % {
            "attributes": self.attributes,
            "threads": self.threads,
            "kernel": kernel,
            "words": self.words,
            "declared": "\n    ".join(declared),
            "setup": self.setup + copies,
            "steps": lines,
            "chains": ", ".join(f'"+{self.chain[i % width]}"({x})' for i, x in enumerate(xs)),
            "given": ", ".join(f'"{kind}"(g{i})' for i, kind in enumerate(self.given)),
            "used": " + ".join(f"(u64){x}" for x in xs),
            "after": self.after,
        }

    def start_values(self, chains: int) -> list[int]:
        """The memory from which a kernel reads its registers; a chain behind the first starts at 0 where setup adds x0."""
        rest = [0 if self.setup and chain else self.start for chain in range(chains) for _ in self.chain]
        return [*self.values, *[0] * (GIVEN - len(self.values)), *rest]

    def _numbered(self, chain: int, chains: int, step: int, ptx: str) -> str:
        """PTX with the operands' numbers in C's asm statement, and the step's for N."""
        width = len(self.chain)
        text = re.sub(r"\bX(\d+)", lambda found: f"%{chain * width + int(found[1])}", ptx)
        text = re.sub(r"\bG(\d+)", lambda found: f"%{chains * width + int(found[1])}", text)
        return re.sub(r"\bN\*(\d+)", lambda found: str(step * int(found[1])), text)


def _read(kind: str, place: str) -> str:
    return f"__longlong_as_double(values[{place}])" if kind == "d" else f"({TYPES[kind]})values[{place}]"


@dataclass(frozen=True)
class Timed:
    """A kernel of a step: so many chains, and so many steps of each a turn."""

    step: Step
    chains: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.step.name}_{self.chains}_{self.steps}"

    @property
    def values(self) -> list[int]:
        return self.step.start_values(self.chains)


def source(wanted: Iterable[Timed]) -> str:
    """CUDA C of kernels with their parameters cells, values, stamps (begin and end of each warp), sink, turns."""
    return HEAD + "".join(each.step.source(each.name, each.chains, each.steps) for each in wanted)


def shared(width: int) -> str:
    """C that makes each lane's `width` bytes of shared memory hold their own address."""
    return f"x0 = of_shared(words) + {width} * lane; for (int i = 0; i < {width // 4}; ++i) words[{width // 4} * lane + i] = x0;"


def own(cells: int) -> str:
    """C that makes each thread's `cells` of 8 bytes of global memory hold their own address."""
    return f"x0 = (u64)(cells + {cells} * threadIdx.x); for (int i = 0; i < {cells}; ++i) cells[{cells} * threadIdx.x + i] = x0;"


# Word l of the first matrix is lane l's in what LDSM gives: it holds the address of a row for that lane.
ROWS = "x0 = of_shared(words) + 16 * lane; words[lane] = x0;"
FMA = "fma.rn.f32 X0, X0, G0, G1;"
LOGIC = "lop3.b32 X0, X0, G0, G1, 0xE8;"  # the majority of three: ptxas makes one of two simpler ones
SAME = (0, 0xFFFFFFFF)  # given ones whose majority with X0 is X0

ARITHMETIC = (
    Step("fma", FMA, ("FFMA",), given="rr", values=(ONE, 0)),
    Step("alu", LOGIC, ("LOP3",), given="rr", values=(1, 2)),
    Step("across", f"{FMA} {LOGIC}", ("FFMA", "LOP3"), given="rr", values=(ONE, 0)),
    Step("imad", "mad.lo.u32 X0, X0, G0, G1;", ("IMAD",), given="rr", values=(3, 1)),
    Step("half", "fma.rn.f16x2 X0, X0, G0, G1;", ("HFMA2",), given="rr", start=ONES, values=(ONES, 0)),
    Step("double", "fma.rn.f64 X0, X0, G0, G1;", ("DFMA",), "d", "dd", ONE_64, (ONE_64, 0)),
    Step("special", "ex2.approx.ftz.f32 X0, X0;", ("MUFU",)),
    Step("convert", "popc.b32 X0, X0;", ("POPC",)),
    Step("round", "cvt.rni.ftz.f32.f32 X0, X0;", ("FRND",)),
    Step("pack", "cvt.rn.f16x2.f32 X0, X0, G0;", ("F2FP",), given="r", values=(ONE,)),
    Step("compare", "min.f32 X0, X0, G0; max.f32 X0, X0, G1;", ("FMNMX", "FMNMX"), given="rr", values=(2 * ONE, 0)),
    Step(
        "predicate",
        "{.reg .pred p; setp.gt.u32 p, X0, G0; selp.b32 X0, G1, G2, p;}",
        ("ISETP", "SEL"),
        given="rrr",
        values=(5, 1, 9),
    ),
    Step(
        "guard",
        "{.reg .pred p; setp.gt.u32 p, X0, G0; @p mad.lo.u32 X0, X0, G1, G2;}",
        ("ISETP", "IMAD"),
        given="rrr",
        values=(0, 3, 1),
    ),
    Step(
        "vote",
        "{.reg .pred p; setp.gt.u32 p, X0, G0; vote.sync.ballot.b32 X0, p, 0xffffffff;}",
        ("ISETP", "VOTE"),
        given="r",
        values=(5,),
    ),
    Step("shuffle", "shfl.sync.bfly.b32 X0, X0, G0, 31, 0xffffffff;", ("SHFL",), given="r", values=(3,), setup="x0 += lane;"),
    Step("redux", f"redux.sync.min.u32 X0, X0, 0xffffffff; {LOGIC}", ("REDUX", "IMAD", "LOP3"), given="rr", values=(1, 2)),
)
SHARED = (
    Step("lds_32", "ld.shared.u32 X0, [X0];", ("LDS",), setup=shared(4)),
    # Behind wide loads all words are used, or ptxas makes narrow ones of them.
    Step("lds_32_used", f"ld.shared.u32 X0, [X0]; {LOGIC}", ("LDS", "LOP3"), given="rr", values=SAME, setup=shared(4)),
    Step(
        "lds_64_used",
        "ld.shared.v2.u32 {X0, T0}, [X0]; lop3.b32 X0, X0, T0, G0, 0xE8;",
        ("LDS.64", "LOP3"),
        given="r",
        scratch="r",
        setup=shared(8),
    ),
    Step(
        "lds_128_used",
        "ld.shared.v4.u32 {X0, T0, T1, T2}, [X0]; lop3.b32 X0, X0, T0, T2, 0xE8;",
        ("LDS.128", "LOP3"),
        scratch="rrr",
        setup=shared(16),
    ),
    Step("ldsm_1", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {X0}, [X0];", ("LDSM",), setup=ROWS),
    Step("ldsm_4", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {X0, T0, T1, T2}, [X0];", ("LDSM",), scratch="rrr", setup=ROWS),
    Step("atoms", "atom.shared.add.u32 X0, [G0], X0;", ("ATOMS",), given="r", setup="g0 = of_shared(words) + 4 * lane;"),
    Step("barrier", "bar.sync 0;", ("BAR",)),
    Step("fence_block", "fence.acq_rel.cta;", ("MEMBAR",)),
    Step("fence_gpu", "fence.acq_rel.gpu;", ("MEMBAR",)),
)
L1 = (
    Step(
        "ldg_32",
        "{.reg .b64 a; mov.b64 a, {X0, G0}; ld.global.u32 X0, [a];}",
        ("LDG",),
        given="r",
        setup="unsigned* own = (unsigned*)cells + threadIdx.x; x0 = (unsigned)(u64)own; g0 = (u64)own >> 32; *own = x0;",
    ),
    Step("ldg_64", "ld.global.u64 X0, [X0];", ("LDG.64",), "l", setup=own(1)),
    Step("ldg_64_used", "ld.global.u64 X0, [X0]; or.b64 X0, X0, G0;", ("LDG.64", "LOP3"), "l", "l", setup=own(1)),
    Step(
        "ldg_128_used", "ld.global.v2.u64 {X0, T0}, [X0]; or.b64 X0, X0, T0;", ("LDG.128", "LOP3"), "l", scratch="l", setup=own(2)
    ),
    Step(
        "ldgsts",
        "cp.async.ca.shared.global [X0], [G0], 16; cp.async.wait_all;",
        ("LDGSTS",),
        given="l",
        setup="x0 = of_shared(words) + 16 * lane; g0 = (u64)(cells + 2 * lane);",
    ),
)


def loads(bits: int, merged: bool) -> Step:
    """Loads of shared memory from a place of its own each, neighbours at the same one where they are `merged`."""
    kinds, scratch, used = {
        32: ("u32", "r", "xor.b32 X1, X1, T0;"),
        64: ("v2.u32", "rr", "lop3.b32 X1, X1, T0, T1, 0x96;"),
        128: ("v4.u32", "rrrr", "lop3.b32 X1, X1, T0, T1, 0x96; lop3.b32 X1, X1, T2, T3, 0x96;"),
    }[bits]
    into = ", ".join(f"T{i}" for i in range(len(scratch)))
    ptx = f"ld.shared.{kinds} {f'{{{into}}}' if len(scratch) > 1 else into}, [X0+N*{4 * bits}]; {used}"
    setup = f"x0 = of_shared(words) + {bits // 8} * {'(lane / 2)' if merged else 'lane'};"
    name, opcode = f"stream_{bits}{'_merged' * merged}", "LDS" if bits == 32 else f"LDS.{bits}"
    another = "xor.b32 X0, X0, G0;"  # for all that ptxas knows: or it loads once for all turns
    return Step(name, ptx, (opcode,), "rr", "r", 0, (0,), scratch, setup, behind=another, words=STREAMED * bits)


STREAMED = 64  # steps of a stream of loads: so many places of 32 lanes fit into 48 KB
STREAMS = tuple(loads(bits, merged) for bits, merged in ((32, False), (64, False), (128, False), (64, True), (128, True)))


def mma(name: str, shape: str, accumulators: int, a: int, b: int) -> Step:
    """mma.sync with its sums in X, A and B in G."""
    x, g = [f"X{i}" for i in range(accumulators)], [f"G{i}" for i in range(a + b)]
    ptx = f"mma.sync.aligned.{shape} {{{', '.join(x)}}}, {{{', '.join(g[:a])}}}, {{{', '.join(g[a:])}}}, {{{', '.join(x)}}};"
    return Step(name, ptx, ("MMA",), "r" * accumulators, "r" * (a + b), 0, threads=512)


TENSOR = (
    mma("hmma_16816_f32", "m16n8k16.row.col.f32.f16.f16.f32", 4, 4, 2),
    mma("hmma_16816_f16", "m16n8k16.row.col.f16.f16.f16.f16", 2, 4, 2),
    mma("hmma_1688_f32", "m16n8k8.row.col.f32.f16.f16.f32", 4, 2, 1),
    mma("hmma_1688_tf32", "m16n8k8.row.col.f32.tf32.tf32.f32", 4, 4, 2),
    mma("imma_16832", "m16n8k32.row.col.s32.s8.s8.s32", 4, 4, 2),
    Step(
        "dmma_884",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {X0, X1}, {G0}, {G1}, {X0, X1};",
        ("DMMA",),
        "dd",
        "dd",
        0,
        threads=512,
    ),
)

BARRIERS = (
    Step(
        "mbarrier_arrive",
        "mbarrier.arrive.shared.b64 _, [G0];",
        ("SYNCS",),
        given="r",
        setup='g0 = of_shared(words); asm volatile("mbarrier.init.shared.b64 [%0], 1048575;" :: "r"(g0));',
    ),
    Step(
        "cluster_load",
        "ld.shared::cluster.u32 X0, [X0];",
        ("LD",),
        setup="""unsigned rank, own;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(own) : "r"(of_shared(words + lane)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x0) : "r"(of_shared(words + lane)), "r"(1 - rank));
    words[lane] = own;
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");""",
        after='asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");',
        attributes="__cluster_dims__(2, 1, 1) ",
    ),
    Step(
        "cluster_barrier_relaxed",
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;",
        ("UCGABAR_ARV",),
        attributes="__cluster_dims__(2, 1, 1) ",
    ),
    Step(
        "cluster_barrier",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        ("UCGABAR_ARV",),
        attributes="__cluster_dims__(2, 1, 1) ",
    ),
)

FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
# Descriptors of shared memory, all zeros: no swizzle, 128 bytes from one core matrix to the next along k, 256 along m or n.
DESCRIBED = "{} = (u64)(of_shared(words) >> 4 & 0x3FFF) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;"


def wgmma(n: int, registers: bool, alone: bool) -> Step:
    """A product of 64 x n x 16, A in registers or in shared memory; `alone`: each waits for the one before."""
    sums = ", ".join(f"X{i}" for i in range(n // 2))
    a, given = ("{G0, G1, G2, G3}", "rrrrl") if registers else ("G0", "ll")
    b = f"G{len(given) - 1}"
    ptx = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{sums}}}, {a}, {b}, 1, 1, 1{'' if registers else ', 0'}, 0;"
    setup = "".join(DESCRIBED.format(place) for place in (("g4",) if registers else ("g0", "g1")))
    name = f"wgmma_{n}{'_registers' * registers}{'_alone' * alone}"
    return Step(
        name,
        f"{FENCE} {ptx} {COMMIT}" if alone else ptx,
        ("HGMMA",),
        "r" * (n // 2),
        given,
        0,
        setup=setup,
        before="" if alone else FENCE,
        behind="" if alone else COMMIT,
        threads=256,
        words=4096,
    )
