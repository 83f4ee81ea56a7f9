"""The text of LLVM's vectors of a warp: arithmetic on float16 and bfloat16, as `decode.primitives` has it."""

from __future__ import annotations

import numpy as np

from ..state.lane_sets import WARP
from .vectors import OWN, Arithmetic, LaneValue, NoCode, scalar, splat, vector


class HalfArithmetic(Arithmetic):
    """Arithmetic with halves, which are widened to float32, or to float64 where that rounds to odd, and then narrowed."""

    def bfloat_value(self, a: LaneValue) -> LaneValue:
        wide = self.op("shl", "i32", self.resized(a.name, "i16", "i32", False), splat("i32", 16))
        return self.noted(self.seen(wide, np.dtype(np.float32)))

    def noted(self, x: LaneValue) -> LaneValue:
        """Notes a value that may be NaN."""
        return LaneValue(self.result(x.name, x.dtype), x.dtype)

    def narrowed(self, x: LaneValue) -> LaneValue:
        """Returns a float64 as float32, rounded to odd, which can be rounded once more."""
        if x.dtype.itemsize != 8:
            return x
        near = self.cast(x, np.dtype(np.float32))
        wide = self.add(f"fpext {vector('float')} {near.name} to {vector('double')}")
        size, other = (self.add(f"call {vector('double')} @llvm.fabs.v{WARP}f64({vector('double')} {v})") for v in (x.name, wide))
        more, inexact = self.test("ogt", "double", size, other), self.test("one", "double", x.name, wide)
        found = self.seen(self.odd(self.raw(near), "i32", more, inexact), near.dtype)
        # Beyond float32's range the nearest number is none.
        self.flagged(self.op("xor", "i1", self.ordinary(wide), splat("i1", "true")))
        self.doubtful.pop(near.name, None)
        return found

    def odd(self, bits: str, element: str, more: str, inexact: str) -> str:
        """Returns bits of numbers nearest to a value as those of the odd one of its two neighbours; `more`: it is larger."""
        even = self.test("eq", element, self.op("and", element, bits, splat(element, 1)), "zeroinitializer")
        step = self.chosen(more, splat(element, 1), splat(element, -1), element)
        moved = self.op("and", "i1", even, inexact)
        return self.op("add", element, bits, self.chosen(moved, step, "zeroinitializer", element))

    def fused_odd(self, a: LaneValue, b: LaneValue, c: LaneValue) -> LaneValue:
        """Returns a * b + c of halves as float64, rounded to odd."""
        wide = np.dtype(np.float64)
        x, y, z = (self.cast(v, wide) for v in (a, b, c))
        product = self.op("fmul", "double", x.name, y.name)
        total, rest = self.two_parts(product, z.name)
        for v in (x, y, z):
            self.doubtful.pop(v.name, None)
        self.flagged(self.op("xor", "i1", self.ordinary(total), splat("i1", "true")))
        raw = self.add(f"bitcast {vector('double')} {total} to {vector('i64')}")
        other = self.add(f"bitcast {vector('double')} {rest} to {vector('i64')}")
        more = self.test("sge", "i64", self.op("xor", "i64", raw, other), "zeroinitializer")
        return self.seen(self.odd(raw, "i64", more, self.test("one", "double", rest, "zeroinitializer")), wide)

    def f16_bits(self, x: LaneValue, rounding: str) -> LaneValue:
        if rounding != "rn":
            raise NoCode
        return self.cast(self.narrowed(x), np.dtype(np.float16))

    def bf16_bits(self, x: LaneValue, rounding: str) -> LaneValue:
        x = self.narrowed(x)
        if rounding != "rn" or x.dtype != np.dtype(np.float32):
            raise NoCode
        self.flagged(self.test("uno", "float", x.name, x.name))
        self.doubtful.pop(x.name, None)
        bits = self.raw(x)
        last = self.op("and", "i32", self.op("lshr", "i32", bits, splat("i32", 16)), splat("i32", 1))
        up = self.op("add", "i32", bits, self.op("add", "i32", last, splat("i32", 0x7FFF)))
        return LaneValue(self.resized(self.op("lshr", "i32", up, splat("i32", 16)), "i32", "i16", False), np.dtype(np.uint16))

    def flushed_half(self, x: LaneValue, element: str) -> LaneValue:
        if x.dtype.itemsize == 8:
            raise NoCode
        kind = scalar(x.dtype)
        size = self.add(f"call {vector(kind)} @llvm.fabs.v{WARP}f32({vector(kind)} {x.name})")
        small = self.test("olt", kind, size, splat(kind, self.literal(2.0**-14 if element == "f16" else 2.0**-126, x.dtype)))
        zero = self.seen(self.op("and", "i32", self.raw(x), splat("i32", -(1 << 31))), x.dtype)
        return LaneValue(self.result(self.chosen(small, zero.name, x.name, kind), x.dtype, x.name), x.dtype)


OWN |= {name: getattr(HalfArithmetic, name) for name in ("bfloat_value", "fused_odd", "f16_bits", "bf16_bits")}
OWN["flushed"] = HalfArithmetic.flushed_half
