"""The table of elementwise opcodes: arithmetic, comparison, logic, shifts, bit fields, conversions (`table_rows` reads it); and
their approximate functions, with the errors that the PTX ISA allows.

PTX ISA: "Integer Arithmetic", "Extended-Precision Integer Arithmetic", "Floating Point", "Half Precision Floating Point",
"Comparison and Selection", "Logic and Shift", "Data Movement and Conversion Instructions".

Approximate instructions (.approx, and div.full) have an error of the documented size. The exact result is made in float64 and
moved by the ISA's bound less the last rounding. For a relative bound those bits are flipped whose weights add up to it: up or
down by the result's own bits, and never out of its power of two, so that no result changes its sign or overflows. An absolute
bound is added with a sign from the argument's bits. Every run has the same errors. Zeros, infinities and NaN keep the results
that the ISA lists. docs/ptx.md has the table; a launch with `approximate=False` gets the exact result, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..text.syntax import SINK, TYPES, Array, Operand, PtxInstruction, Reg, Unsupported, Vec
from .primitives import EIGHTS, PRMT_MODES, inverse_root, lent, lookup
from .registry import ANY_TYPE, ROUNDING, Arg, Arrays, Frame, Plan, Thunk, act, arg, opcode, pure, taken
from .table_rows import Case, decode, primitive, row, writer

# -- approximate functions ---------------------------------------------------------------------------------------------------

Move = Callable[..., Array]
"""Maps the exact results and the inputs, float64, to results with an error."""

SMALLEST = 2.0**-126
FINITE = np.array(1000, np.float32)
"""2 to this power is finite in float64."""

CIRCLES = tuple(float(np.float32(turns * np.pi)) for turns in (1, 2, 100))
"""pi, 2 pi and 100 pi, rounded to float32: all three are rounded up."""


def flip(exact: Array, mask: int | Array) -> Array:
    """Moves results by at most `mask` units in the last place of float64."""
    return (exact.view(np.uint64) ^ np.asarray(mask, np.uint64)).view(np.float64)


def ulps(count: int, precision: int) -> Move:
    """Moves results by at most `count` units in the last place of the format. The last bit of the mask decides ties."""
    mask = int((count - 0.5) * 2.0 ** (53 - precision)) | 1
    return lambda exact, *_: flip(exact, mask)


def relative(bound: float, precision: int) -> Move:
    """Moves results by at most `bound` of the result: as much of it as a power of two allows."""
    mask = int((bound - 2.0**-precision) * 2.0**52)
    return lambda exact, *_: flip(exact, mask)


def signs(a: Array) -> Array:
    """Returns 1 or -1 for each argument, by a hash of its bits."""
    return np.where((a.view(np.uint64) >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(63), 1.0, -1.0)


def absolute(bound: float | Array, precision: int) -> Move:
    """Moves results in [-1, 1], which they do not leave, by `bound` less the last rounding."""
    move = np.asarray(bound) - 2.0 ** (-precision - 1)
    return lambda exact, a: np.clip(exact + signs(a) * move, -1, 1)


def circular(nearest: float) -> Move:
    """Moves sin and cos: by `nearest` up to pi (CUDA's __sinf and __cosf), 2**-20.5 up to 2 pi, 2**-14.7 up to 100 pi.

    Beyond, where the ISA gives no bound, by as much for each unit of the argument as there.
    """

    def move(exact: Array, a: Array) -> Array:
        size = np.abs(a)
        near, middle, far = (size <= limit for limit in CIRCLES)
        bound = np.select([near, middle, far], [nearest, 2.0**-20.5, 2.0**-14.7], size * (2.0**-14.7 / CIRCLES[-1]))
        return absolute(bound, 24)(exact, a)

    return move


def logarithmic(exact: Array, a: Array) -> Array:
    """Moves lg2: by at most 2**-22.9 between 1/2 and 2, elsewhere by one unit."""
    between = (a > 0.5) & (a < 2)
    return np.where(between, absolute(2.0**-22.9, 24)(exact, a), ulps(1, 24)(exact))


def hyperbolic(exact: Array, a: Array) -> Array:
    """Moves tanh in float32: by 2**-11 of the result, in [-1, 1]; subnormal numbers pass through."""
    return np.where(np.abs(a) < SMALLEST, a, np.clip(relative(2.0**-11, 24)(exact), -1, 1))


MOVES: dict[tuple[str, str], Move] = {
    ("ex2", "f16"): relative(2.0**-9.9, 11),
    ("ex2", "bf16"): ulps(1, 8),
    ("lg2", "f32"): logarithmic,
    ("sin", "f32"): circular(2.0**-21.41),
    ("cos", "f32"): circular(2.0**-21.19),
    ("tanh", "f32"): hyperbolic,
    ("tanh", "f16"): absolute(2.0**-10.987, 11),
    ("tanh", "bf16"): absolute(2.0**-8, 8),
    ("rcp", "f32"): ulps(1, 24),
    ("sqrt", "f32"): ulps(1, 24),
    ("rsqrt", "f32"): relative(2.0**-22.9, 24),
    ("div", "f32"): ulps(2, 24),
    ("rsqrt", "f64"): lambda exact, _: flip(exact, 1),
}
"""Errors by opcode and type. docs/ptx.md names the source of each bound."""


def division(a: Array, b: Array) -> Array:
    """div.approx computes a times an approximate float32 1/b: beyond 2**126 that is 0, and an infinity where b is tiny."""
    inverse = np.where((np.abs(b) > 2.0**126) & np.isfinite(b), np.copysign(0, b), 1 / b)
    lost = (inverse == 0) | (np.abs(inverse) >= 2.0**128)
    return np.where(lost, a * np.where(inverse == 0, inverse, np.copysign(np.inf, b)), a / b)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "div": division,
    "div.full": np.divide,
    "rsqrt.f64": inverse_root,
}


def result(function: Callable[..., Array], move: Move | None, values: Sequence[Array]) -> Array:
    """Returns the function of float64 `values`, moved where it is not special: float64, to be rounded."""
    exact = np.asarray(function(*values))
    if move is None:
        return exact
    ordinary = np.isfinite(exact)
    for value in values:
        ordinary &= np.isfinite(value) & (value != 0)
    return np.where(ordinary, move(exact, *values), exact)


@primitive
def approximated(approximate: bool, function: str, kind: str, *values: Array) -> Array:
    """Returns a function of float64 values for results of type `kind`; as float64, to be rounded."""
    move = MOVES[function.removesuffix(".full"), kind] if approximate else None
    return result(FUNCTIONS.get(f"{function}.{kind}") or FUNCTIONS[function], move, values)


@writer
def exponential(frame: Frame, d: Array, a: Array) -> Thunk:
    """ex2 in float32: off by one unit. It has its own thunk, with lent arrays, as softmax depends on it.

    Powers of two are exact, as CUDA's tanh of float64 relies on it, and zeros and infinities among them.
    """
    approximate = frame.machine.approximate
    exact, whole, moved, small = lent(frame, "ex2", d.shape, np.float64, np.float32, bool, bool)
    bits, mask = exact.view(np.uint64), np.array(1 << 28 | 1, np.uint64)

    def run() -> None:
        if approximate:
            np.rint(a, whole)
            np.not_equal(a, whole, moved)
            np.less(a, FINITE, small)  # an infinity has no bit to flip
            np.logical_and(moved, small, moved)
        np.copyto(exact, a)
        np.exp2(exact, exact)
        if approximate:
            np.bitwise_xor(bits, mask, bits, where=moved)
        np.copyto(d, exact, casting="same_kind")

    return run


HIGH = np.uint64(0xFFFFFFFF00000000)
LOW = np.uint64(0xFFFFFFFF)
CANONICAL = np.uint64(0x7FFFFFFF00000000)


@primitive
def gross(approximate: bool, function: str, a: Array) -> Array:
    """rcp and rsqrt.approx.ftz.f64, on the upper halves: 20 bits behind the point of the operand and of the result.

    The result is off by one of its last bits.
    """

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)

    upper = flushed((a.view(np.uint64) & HIGH).view(np.float64))
    found = flushed(result(FUNCTIONS[function], ulps(1, 21) if approximate else None, [upper]))
    bits = found.view(np.uint64)
    bits = (bits + (LOW >> np.uint64(1)) + ((bits >> np.uint64(32)) & np.uint64(1))) & HIGH
    return np.where(np.isnan(found), CANONICAL, bits).view(np.float64)


WORDS = ".u32 .s32 .u64 .s64"
BITS = ".b16 .b32 .b64"
ROUNDED = "{.rn .rz .rm .rp}{.ftz}"
REQUIRED = ".rn .rz .rm .rp{.ftz}"

# -- arithmetic ---------------------------------------------------------------------------------------------------------------

LIMITED = "minimum(maximum({}, {}), {})"
S32 = LIMITED.format("{}", -(1 << 31), (1 << 31) - 1)
PRODUCT_24 = "(wide(a) << 40 >> 40) * (wide(b) << 40 >> 40)"
"""The product of the numbers in the lower 24 bits."""

row("add", ".u16-.s64 .u16x2 .s16x2", "a + b")
row("sub", ".u16-.s64 .u16x2 .s16x2", "a - b")
row("add", ".sat.s32", S32.format("s64(a) + s64(b)"))
row("sub", ".sat.s32", S32.format("s64(a) - s64(b)"))
row("add", f"{ROUNDED}{{.sat}}.f32 .f64 .f32x2", "a + b")
row("sub", f"{ROUNDED}{{.sat}}.f32 .f64 .f32x2", "a - b")
row("add", "{.rn}{.ftz}{.sat} halves", "a + b")
row("sub", "{.rn}{.ftz}{.sat} halves", "a - b")

row("mul", ".u16-.s64", {"lo": "a * b", "hi": "high_product(a, b)"})
row("mul", ".u16 .s16 .u32 .s32", {"wide": "d.wide = wide(a) * wide(b)"})
row("mul", f"{ROUNDED}{{.sat}}.f32 .f64 .f32x2", "a * b")
row("mul", "{.rn}{.ftz}{.sat} halves", "a * b")
row("mul24", ".u32 .s32", {"lo": PRODUCT_24, "hi": f"{PRODUCT_24} >> 16"})

row("mad", ".u16-.s64", {"lo": "a * b + c", "hi": "high_product(a, b) + c"})
row("mad", ".u16 .s16 .u32 .s32", {"wide": "d.wide = wide(a) * wide(b) + c.wide"})
row("mad", ".s32", {"hi.sat": S32.format("s64(high_product(a, b)) + s64(c)")})
row("mad24", ".u32 .s32", {"lo": f"{PRODUCT_24} + c", "hi": f"({PRODUCT_24} >> 16) + c"})


def fused(case: Case) -> str:
    """Returns a * b + c, rounded once: a sum rounded twice in one direction is the sum rounded once."""
    directed = case.one_of(("rz", "rm", "rp"))
    return "f32(f64(a) * f64(b) + f64(c))" if directed else f"fused_f32(a, b, c, {int('ftz' in case.mods)})"


row("fma", f"{REQUIRED}{{.sat}}.f32 .f32x2", fused)
row("fma", ".rn.f64", "fused_f64(a, b, c)")
row("fma", ".rn{.ftz}{.sat}{.relu} halves", "fused_odd(a, b, c)")
row("mad", f"{ROUNDED}{{.sat}}.f32", fused)
row("mad", "{.rn}.f64", "fused_f64(a, b, c)")

row("sad", ".u16-.s64", "c + (maximum(a, b) - minimum(a, b))")
row("div", ".u16-.s64", "quotient(a, b)")
row("rem", ".u16-.s64", "remainder(a, b)")
row("div", f"{REQUIRED}.f32 .f64", "a / b")
row("rcp", f"{REQUIRED}.f32 .f64", "1 / a")
row("sqrt", f"{REQUIRED}.f32 .f64", "sqrt(a)")

row("abs", ".s16 .s32 .s64", "absolute(a)")
row("neg", ".s16 .s32 .s64", "-a")
row("abs", ".f32 .f64", {"": "absolute(a)", "ftz": "absolute(a) * 1"})  # under .ftz a product flushes
row("neg", ".f32 .f64", {"": "-a", "ftz": "-a * 1"})
row("abs", "{.ftz} halves", "absolute(a)")
row("neg", "{.ftz} halves", "-a")
row("copysign", ".f32 .f64", "copysign(b, a)")


def extreme(case: Case) -> str:
    """Returns the least or greatest of two or three numbers; `.xorsign` gives it the product's sign."""
    names = "abc"[: len(case.operands) - 1]
    magnitude = case.one_of(("abs", "xorsign"))
    function = {"min": "minimum", "max": "maximum"}[case.opcode] if "NaN" in case.mods else f"f{case.opcode}"
    found, *rest = (f"absolute({name})" if magnitude else name for name in names)
    for value in rest:
        found = f"extreme({found}, {value}, '{function}')"
    if "xorsign" in case.mods:
        found = f"signed({found}, {', '.join(names)})"
    return found


row("min", "{.relu}.u16-.s64 .u16x2 .s16x2", "minimum(a, b)")
row("max", "{.relu}.u16-.s64 .u16x2 .s16x2", "maximum(a, b)")
row("min max", "{.ftz}{.NaN}{.xorsign}{.abs}.f32 halves", extreme)
row("min max", "{.ftz}{.NaN}{.abs}.f64", extreme)


def dot(case: Case) -> str:
    """Returns c and the sum of products of the parts of a and b."""
    left, right = ("i" if type_.kind == "s" else "u" for type_ in case.types)
    size = 1 if case.opcode == "dp4a" else 2
    return f"d.u32 = c.u32 + dot(a.u32, b.u32, '{left}{size}', '{right}1', {2 * ('hi' in case.mods)})"


def differences(case: Case) -> str:
    """Returns the absolute differences of the parts of a and b, bytes or halves; with .add their sum and c."""
    size = 1 if case.opcode == "vabsdiff4" else 2
    left, right = (f"i{size}" if type_.kind == "s" else f"u{size}" for type_ in case.types[1:])
    found = f"differences_of_parts(a.u32, b.u32, '{left}', '{right}')"
    if "add" in case.mods:
        return f"d.u32 = c.u32 + sum_of_parts({found}, 'u{size}')"
    case.unused = 1
    return f"d.u32 = {found}"


row("dp4a", ".u32 .s32", dot, count=2)
row("dp2a", ".lo .hi .u32 .s32", dot, count=2)
row("vabsdiff2 vabsdiff4", "{.add}.u32 .s32", differences, count=3)

# -- extended precision -------------------------------------------------------------------------------------------------------

SUM = "d.unsigned = {x} + {y} + unsigned(carry.pred)"
SUM_CC = "d.unsigned, carry.pred = {x} + {y}, {x} + {y} < {x}"
SUM_BOTH = "d.unsigned, carry.pred = {x} + {y} + unsigned(carry), ({x} + {y} < {x}) | ({x} + {y} + unsigned(carry) < {x} + {y})"
PRODUCTS = {"lo": "a.unsigned * b.unsigned", "hi": "high_product(a.unsigned, b.unsigned)"}


def chain(text: str, part: str = "") -> str:
    """Returns the sum of a and b, or of c and a part of their product."""
    return text.format(x=PRODUCTS[part], y="c.unsigned") if part else text.format(x="a.unsigned", y="b.unsigned")


row("add", f".cc{WORDS}", chain(SUM_CC))
row("addc", WORDS, {"": chain(SUM), "cc": chain(SUM_BOTH)})
row("sub", f".cc{WORDS}", "d.unsigned, carry.pred = a.unsigned - b.unsigned, a < b")
row(
    "subc",
    WORDS,
    {
        "": "d = a - b - own(carry.pred)",
        "cc": "d.unsigned, carry.pred = a.unsigned - b.unsigned - unsigned(carry), (a < b) | (a - b < unsigned(carry))",
    },
)
for part, types in (("lo", WORDS), ("hi", ".u32 .u64")):
    row("mad", types, {f"{part}.cc": chain(SUM_CC, part)})
    row("madc", types, {part: chain(SUM, part), f"{part}.cc": chain(SUM_BOTH, part)})

# -- approximations -------------------------------------------------------------------------------------------------------------


def approximation(case: Case) -> str:
    """Returns the function of the opcode, moved by its error."""
    name, kind = case.opcode + ".full" * ("full" in case.mods), case.types[0].name
    if kind == "f64":
        return f"gross(approximate, '{name}', a)" if "ftz" in case.mods else f"approximated(approximate, '{name}', 'f64', a)"
    if (name, kind) == ("ex2", "f32"):
        return "exponential(a)"
    values = "f64(a), f64(b)" if case.opcode == "div" else "f64(a)"
    return f"approximated(approximate, '{name}', '{kind.removesuffix('x2')}', {values})"


row("ex2 tanh", ".approx{.ftz}.f32 halves", approximation)
row("lg2 sin cos sqrt", ".approx{.ftz}.f32", approximation)
row("rsqrt", ".approx{.ftz}.f32 .f64", approximation)
row("rcp", ".approx{.ftz}.f32", approximation)
row("rcp", ".approx.f64", {"ftz": "gross(approximate, 'rcp', a)"})
row("div", ".approx .full{.ftz}.f32", approximation)

# -- comparison and selection -----------------------------------------------------------------------------------------------------

ORDERED = {"eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b"}
UNSIGNED = ORDERED | {"lo": "a < b", "ls": "a <= b", "hi": "a > b", "hs": "a >= b"}
FLOATING = ORDERED | {
    "ne": "(a < b) | (a > b)",
    "equ": "~((a < b) | (a > b))",
    "neu": "a != b",
    "ltu": "~(a >= b)",
    "leu": "~(a > b)",
    "gtu": "~(a <= b)",
    "geu": "~(a < b)",
    "num": "(a == a) & (b == b)",
    "nan": "(a != a) | (b != b)",
}
"""Comparisons. An ordered one with NaN is false, an unordered one is true."""

COMBINED = {"": "{}", "and": "({}) & c.pred", "or": "({}) | c.pred", "xor": "({}) ^ c.pred"}


def compared(case: Case) -> tuple[str, str]:
    """Returns a comparison, and the format that combines it with a predicate."""
    table = FLOATING if case.types[-1].kind == "f" else UNSIGNED
    return table[case.one_of(table)], COMBINED[case.one_of(("and", "or", "xor"))]


def test(case: Case) -> str:
    """Returns the comparison and its opposite, or those of the two elements of pairs; combined with a predicate."""
    found, combined = compared(case)
    both = (f"low({found})", f"high({found})") if case.types[0].name.endswith("x2") else (found, f"~({found})")
    return f"p.pred, q.pred = {', '.join(map(combined.format, both))}"


def set_(case: Case) -> str:
    """Returns all ones for integers, 1.0 for floating-point numbers if the comparison holds, else 0; of a pair two masks of 16
    bits.
    """
    found, combined = compared(case)
    value, (to, of) = combined.format(found), case.types
    if to.name.endswith("x2") != of.name.endswith("x2"):
        if to.kind == "f" or to.name.endswith("x2"):
            raise Unsupported(f"a result .{to.name} of .{of.name}")
        return f"{to.name}(low(-u16({value}))) | {to.name}(high(-u16({value}))) << 16"
    return f"f32({value})" if to.kind == "f" else f"-{to.name}({value})"


for table, types in ((UNSIGNED, f"{BITS} .u16 .u32 .u64"), (ORDERED, ".s16 .s32 .s64"), (FLOATING, ".f32 .f64 halves")):
    names, results = " ".join(f".{name}" for name in table), ".u32 .s32 .f32" + " halves" * (table is FLOATING)
    row("setp", f"{names} {{.and .or .xor}}{{.ftz}}{types}", test)
    row("set", f"{names} {{.and .or .xor}}{{.ftz}}{results} from {types}", set_, count=2)
# Values are moved as bits: a NaN must not be quieted on its way.
row("selp", f"{BITS} .u16-.s64 .f32 .f64", "d.bits = select(a.bits, b.bits, c.pred)")
row(
    "slct",
    f"{{.ftz}}{BITS} .u16-.s64 .f32 .f64 from .s32 .f32",
    lambda case: "d.b{0} = select(a.b{0}, b.b{0}, c >= 0)".format(case.types[0].bits),
    count=2,
)
row(
    "testp",
    ".f32 .f64",
    {
        "finite": "d.pred = isfinite(a)",
        "infinite": "d.pred = isinf(a)",
        "number": "d.pred = a == a",
        "notanumber": "d.pred = a != a",
        "normal": "d.pred = isfinite(a) & ~subnormal(a)",
        "subnormal": "d.pred = subnormal(a)",
    },
)

# -- logic, shifts, bit fields -----------------------------------------------------------------------------------------------------

row("and", f".pred {BITS}", "a & b")
row("or", f".pred {BITS}", "a | b")
row("xor", f".pred {BITS}", "a ^ b")
row("not", f".pred {BITS}", "~a")
row("cnot", f".pred {BITS}", "a == 0")
row("lop3", ".b32", lookup)

# NumPy shifts out everything if the amount is at least the width, as PTX does; as a signed number a huge one is negative, and does.
AMOUNT = {32: "b", **dict.fromkeys((16, 64), "own(minimum(b.u32, 64))")}
row("shl", BITS, lambda case: f"a << {AMOUNT[case.types[0].bits]}")
row("shr", f"{BITS} .u16-.s64", lambda case: f"a >> {AMOUNT[case.types[0].bits]}")

PAIR = "((u64(b) << 32) | u64(a))"
row(
    "shf",
    ".b32",
    {
        "l.wrap": f"{PAIR} << u64(c & 31) >> 32",
        "l.clamp": f"{PAIR} << u64(minimum(c, 32)) >> 32",
        "r.wrap": f"{PAIR} >> u64(c & 31)",
        "r.clamp": f"{PAIR} >> u64(minimum(c, 32))",
    },
)
row("prmt", ".b32", {"": "permute(a, b, c)"} | {mode: f"permute(a, b, selector(c, '{mode}'))" for mode in PRMT_MODES})


def field(case: Case) -> str:
    """Returns the bits from b on, c of them. What is past the top is filled with zeros, with the sign for signed types."""
    bits = case.types[0].bits
    spare = f"own({bits} - minimum(c.u32 & 255, {bits}))"
    return f"a >> own(minimum(b.u32 & 255, {bits})) << {spare} >> {spare}"


def insertion(case: Case) -> str:
    """Returns b with the low e bits of a from bit c on; what reaches past the top is dropped."""
    bits = case.types[0].bits
    place, length = (f"own(minimum({name}.u32 & 255, {bits}))" for name in "ce")
    ones = f"((own(1) << {length}) - 1 << {place})"
    return f"b & ~{ones} | (a << {place}) & {ones}"


row("bfe", WORDS, field)
row("bfi", ".b32 .b64", insertion)
row("popc", ".b32 .b64", "d.u32 = bitwise_count(a)")
row("clz", ".b32 .b64", lambda case: f"d.u32 = {case.types[0].bits - 1} - top_bit(a)")
row("brev", ".b32 .b64", "reversed_bits(a)")
row("fns", ".b32", "nth_set_bit(a, b, c.s32)")


def highest(case: Case) -> str:
    """Returns the highest bit that is not the sign, or the shift that brings it to the top; all ones if there is none."""
    found = "top_bit(select(~a, a, a < 0))"
    return f"d.u32 = select(-1, {case.types[0].bits - 1} - {found}, {found} < 0)" if "shiftamt" in case.mods else f"d.u32 = {found}"


row("bfind", f"{{.shiftamt}}{WORDS}", highest)
ONES = "((u64(1) << u64({1})) - 1) << u64({0})"
row("bmsk", ".b32", {"clamp": ONES.format("minimum(a, 32)", "minimum(b, 32)"), "wrap": ONES.format("a & 31", "b & 31")})
# The arithmetic shift of a signed word brings the sign along; by 32 (no bits) the word is 0 already.
EXTENDED = "a << own(32 - {0}) >> own(32 - {0})"
row("szext", ".u32 .s32", {"clamp": EXTENDED.format("minimum(b.u32, 32)"), "wrap": EXTENDED.format("(b.u32 & 31)")})

# -- conversions ------------------------------------------------------------------------------------------------------------------

INTEGER_ROUNDING = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def conversion(case: Case) -> str:
    """Returns the expression of cvt."""
    target, source = case.types
    to, of = target.name, source.name
    direction = case.one_of((*ROUNDING, *INTEGER_ROUNDING))
    relu = "relu" in case.mods
    if to in ("f16x2", "bf16x2") and of == "f32" and direction in ("rn", "rz"):
        return "f16(interleave(b, a))" if (to, direction, relu) == ("f16x2", "rn", False) else "interleave(b, a)"
    if to == "tf32" and of == "f32" and not relu:
        return f"d.b32 = to_tf32(a, '{direction}')"
    if not {to, of} <= SCALARS:
        raise Unsupported(f"cvt .{to}.{of}")
    if target.kind == "f":
        value = f"{INTEGER_ROUNDING[direction]}(a)" if direction in INTEGER_ROUNDING else "a"
        if target.bits == 16:
            return value if source.kind == "f" else f"f64({value})"
        return f"{value} * 1" if to == of else f"{to}({value})"  # under .ftz this flushes; else it changes nothing
    if source.kind == "f":
        return f"d.extended = limited({INTEGER_ROUNDING.get(direction, 'trunc')}(f64(a)), '{to}', '{of}')"
    if "sat" in case.mods:
        limits, own = np.iinfo(target.dtype), np.iinfo(source.dtype)
        return f"d.extended = {to}({LIMITED.format('a', max(limits.min, own.min), min(limits.max, own.max))})"
    return f"d.extended = {to}(a)"


def conversion_of_eights(case: Case) -> str:
    """Returns the expression of cvt between pairs of 8-bit floats and .f16x2 or two .f32."""
    to, of = (type_.name for type_ in case.types)
    relu, finite = int("relu" in case.mods), "satfinite" in case.mods
    if to in EIGHTS and finite and of in ("f32", "f16x2"):
        high, low = ("a", "b") if of == "f32" else ("high(a)", "low(a)")
        return f"u16(eight({high}, '{to}', {relu})) << 8 | u16(eight({low}, '{to}', {relu}))"
    if of in EIGHTS and to == "f16x2" and not finite:
        return f"f16(interleave(from_eight(a & 255, '{of}', {relu}), from_eight(a >> 8, '{of}', {relu})))"
    raise Unsupported(f"cvt .{to}.{of}")


SCALARS = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"}


INTEGERS = ".u8 .s8 .u16-.s64"
row(
    "cvt",
    f"{{.rn .rz .rm .rp .rna .rni .rzi .rmi .rpi}}{{.ftz}}{{.sat}}{{.relu}}{INTEGERS} .f32 .f64 halves .tf32",
    conversion,
    count=2,
)
row("cvt", ".rn{.satfinite}{.relu}.e4m3x2 .e5m2x2 .f16x2 from .f32 .f16x2 .e4m3x2 .e5m2x2", conversion_of_eights, count=2)

# -- moves ------------------------------------------------------------------------------------------------------------------------

CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


@opcode("mov", forms=".pred .b16-.b64 .u16-.s64 .f32 .f64; vectors to and from one register; addresses; special registers")
def mov(i: PtxInstruction) -> Plan:
    d, a = i.operands
    if isinstance(a, Reg) and a.name in CLOCKS:
        return clock(d, a)
    if not isinstance(d, Vec) and not isinstance(a, Vec):
        return decode(i)
    taken(i, ANY_TYPE)
    bits = i.type.bits
    return regrouped(bits, d, a)


def regrouped(bits: int, d: Operand, a: Operand) -> Plan:
    """Returns the plan that puts registers together to one, or takes one apart."""
    whole, parts = (d, a) if isinstance(a, Vec) else (a, d)
    if not isinstance(whole, Reg) or not isinstance(parts, Vec) or len(parts.items) not in (2, 4, 8):
        raise Unsupported("a vector of this length, or not to or from one register")
    count, packs = len(parts.items), parts is a
    part = TYPES[f"b{bits // count}"]

    def make(*arrays: Array) -> Thunk:
        register, *pieces = arrays if packs else (arrays[-1], *arrays[:-1])
        columns = [register.view(part.dtype)[k::count] for k in range(count)]
        targets, sources = (columns, pieces) if packs else (pieces, columns)
        moves = [(to, value) for to, value, item in zip(targets, sources, parts.items, strict=True) if packs or item != SINK]
        overlapping = any(np.shares_memory(register, piece) for piece in pieces)

        def run() -> None:
            for target, value in [(to, value.copy()) for to, value in moves] if overlapping else moves:
                target[...] = value

        return run

    one, several = [arg(whole, TYPES[f"b{bits}"])], [arg(o, part) for o in parts.items]
    return pure(make, one, several) if packs else pure(make, several, one)


def clock(d: object, a: Reg) -> Plan:
    """Clocks count instructions that the machine has run: they only grow."""
    high = a.name.endswith("_hi")
    assert isinstance(d, Reg)

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        now = frame.machine.clock()
        np.copyto(out[0], np.array(now >> 32 if high else now, np.uint64), casting="unsafe")

    return act(run, (Arg(d, TYPES[f"u{d.type.bits}"].dtype),))


row("mov", f".pred {BITS} .u16-.s64 .f32 .f64", "d.bits = a.bits")
