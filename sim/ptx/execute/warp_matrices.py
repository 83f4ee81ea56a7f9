"""The text of LLVM's functions for mma, the product of two matrices of a warp, in fragments as `decode.matrices` has them.

Every sum takes its products one after the other, as `decode.matrices.products` has it. With g = lane >> 2 and t = lane & 3, a
lane's sums are in row g of eight, columns 2 t and 2 t + 1: so an element of A goes to the four lanes of its row, two of B to all
rows.
"""

from __future__ import annotations

from itertools import product as every
from typing import NamedTuple

from ..decode.matrices import BITS, sums_in_order
from ..state.lane_sets import WARP
from .vectors import Text, splat, vector

FACTORS = ("f16", "bf16", "tf32", "s8", "u8")
"""Types of factors that compiled code knows."""

FLUSHING_BITS = 0x8040
"""FTZ and DAZ of MXCSR."""

IN_MODE = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)

define internal i32 @{name}(ptr %factors, ptr %sums) noinline {{
  %kept = alloca i32
  %other = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %kept)
  %old = load i32, ptr %kept
  %new = and i32 %old, {keep}
  store i32 %new, ptr %other
  call void @llvm.x86.sse.ldmxcsr(ptr %other)
  %wrong = call i32 @{name}.kept(ptr %factors, ptr %sums)
  call void @llvm.x86.sse.ldmxcsr(ptr %kept)
  ret i32 %wrong
}}
"""


class WarpProduct(NamedTuple):
    """A product of matrices: lengths, types of C and D, A, B; `flushing`: the kernel flushes subnormal numbers, mma does not."""

    m: int
    n: int
    k: int
    d: str
    a: str
    b: str
    flushing: bool

    @property
    def name(self) -> str:
        return f"product_{self.m}x{self.n}x{self.k}_{self.d}_{self.a}_{self.b}"

    def registers(self) -> tuple[int, int, int]:
        """Returns the number of registers of A, of B and of the sums."""
        words = self.k * BITS[self.a] // 32
        return self.m * words // WARP, self.n * words // WARP, self.m * self.n // WARP


class ProductText(Text):
    """The function of a product: `%factors` are the registers of A and B, `%sums` those of the product, in memory."""

    def __init__(self, shape: WarpProduct):
        super().__init__()
        self.shape = shape

    def text(self) -> str:
        m, n, k, d_type, a_type, b_type, flushing = self.shape
        a_count, b_count, _ = self.shape.registers()
        registers = [self.add(f"load {vector('i32')}, ptr {self.at('%factors', number)}") for number in range(a_count + b_count)]
        each = 32 // BITS[a_type]
        a, b = ([self.elements(r, t) for r in some] for some, t in ((registers[:a_count], a_type), (registers[a_count:], b_type)))
        rows, columns, depth = range(m // 8), range(n // 8), k // (4 * each)
        sums = dict.fromkeys(every(columns, rows, range(2)), "zeroinitializer")
        fused = sums_in_order(m, n, k)
        for at in range(k):
            part, rest = divmod(at, 4 * each)
            t, element = divmod(rest, each)
            left = [self.shuffled(a[part * len(rows) + r][element], [lane & ~3 | t for lane in range(WARP)]) for r in rows]
            for c in columns:
                source = b[c * depth + part][element]
                for odd in range(2):
                    right = self.shuffled(source, [4 * (2 * (lane & 3) + odd) + t for lane in range(WARP)])
                    for r in rows:
                        sums[c, r, odd] = self.added(left[r], right, sums[c, r, odd], fused)
        wrong = self.finished(list(sums.values()), d_type)
        name = f"{self.shape.name}.kept" if flushing else self.shape.name
        body = "\n".join(self.lines)
        around = IN_MODE.format(name=self.shape.name, keep=~FLUSHING_BITS) if flushing else ""
        return f"\ndefine internal i32 @{name}(ptr %factors, ptr %sums) noinline {{\n{body}\n  ret i32 {wrong}\n}}\n{around}"

    def finished(self, sums: list[str], kind: str) -> str:
        """Adds C to sums, which is in their place in memory, and stores D; returns the lanes of which some number is NaN."""
        bad, words, of = "zeroinitializer", vector("i32"), vector("float")
        pairs = 2 if kind == "f16" else 1
        for number in range(len(sums) // pairs):
            place = self.at("%sums", number)
            c = self.add(f"load {words}, ptr {place}, align 64")
            mine = sums[number * pairs : (number + 1) * pairs]
            if kind == "s32":
                d = self.op("add", "i32", c, self.add(f"fptosi {of} {mine[0]} to {words}"))
            elif kind == "f32":
                total = self.op("fadd", "float", mine[0], self.add(f"bitcast {words} {c} to {of}"))
                bad = self.op("or", "i1", bad, self.test("uno", "float", total, total))
                d = self.add(f"bitcast {of} {total} to {words}")
            else:
                d = "zeroinitializer"
                for n, (addend, one) in enumerate(zip(self.elements(c, "f16"), mine, strict=True)):
                    total = self.op("fadd", "float", one, addend)
                    bad = self.op("or", "i1", bad, self.test("uno", "float", total, total))
                    half = self.add(f"fptrunc {of} {total} to {vector('half')}")
                    raw = self.add(f"bitcast {vector('half')} {half} to {vector('i16')}")
                    wide = self.add(f"zext {vector('i16')} {raw} to {words}")
                    d = self.op("or", "i32", d, self.op("shl", "i32", wide, splat("i32", 16 * n)))
            self.say(f"store {words} {d}, ptr {place}, align 64")
        return self.bits(bad)

    def at(self, table: str, number: int) -> str:
        return self.add(f"getelementptr {vector('i32')}, ptr {table}, i64 {number}")

    def elements(self, register: str, kind: str) -> list[str]:
        """Returns the elements of a register as float32."""
        bits, words, of = BITS[kind], vector("i32"), vector("float")
        if kind == "tf32":
            return [self.add(f"bitcast {words} {self.op('and', 'i32', register, splat('i32', -0x2000))} to {of}")]
        found = []
        for n in range(32 // bits):
            if kind == "bf16":
                moved = (
                    self.op("and", "i32", register, splat("i32", -65536))
                    if n
                    else self.op("shl", "i32", register, splat("i32", 16))
                )
                found.append(self.add(f"bitcast {words} {moved} to {of}"))
                continue
            narrow = self.op("lshr", "i32", register, splat("i32", bits * n)) if n else register
            part = self.add(f"trunc {words} {narrow} to {vector(f'i{bits}')}")
            if kind == "f16":
                half = self.add(f"bitcast {vector('i16')} {part} to {vector('half')}")
                found.append(self.add(f"fpext {vector('half')} {half} to {of}"))
            else:
                found.append(self.add(f"{kind[0]}itofp {vector('i8')} {part} to {of}"))
        return found

    def shuffled(self, name: str, lanes: list[int]) -> str:
        listed = ", ".join(f"i32 {lane}" for lane in lanes)
        return self.add(f"shufflevector {vector('float')} {name}, {vector('float')} poison, {vector('i32')} <{listed}>")

    def added(self, a: str, b: str, total: str, fused: bool) -> str:
        of = vector("float")
        if fused:
            return self.add(f"call {of} @llvm.fma.v{WARP}f32({of} {a}, {of} {b}, {of} {total})")
        return self.op("fadd", "float", total, self.op("fmul", "float", a, b))


def product(*shape: object) -> str:
    """Returns the function of a product; `shape`: the fields of `WarpProduct`."""
    return ProductText(WarpProduct(*shape)).text()  # type: ignore[arg-type]
