"""The standard headers that kernels include, for NVRTC, which has none: each forwards to CCCL's copy, or says what NVRTC lacks."""

from __future__ import annotations

import re

CPP = [
    *("algorithm", "array", "atomic", "bit", "cmath", "complex", "cstddef", "cstdint", "cstring", "ctime", "functional"),
    *("initializer_list", "limits", "numeric", "optional", "ratio", "span", "tuple", "type_traits", "utility", "variant"),
]
"""Headers of C++ whose names CCCL has in cuda::std."""

WIDTHS = [f"{speed}{bits}" for speed in ("", "_least", "_fast") for bits in (8, 16, 32, 64)]
USING = "".join(f"using cuda::std::{sign}int{width}_t;\n" for sign in ("", "u") for width in (*WIDTHS, "max", "ptr"))

ASSERT = """#undef assert
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, decltype(sizeof(0)));
#define assert(condition) ((condition) ? (void)0 : __assertfail(#condition, __FILE__, __LINE__, __func__, 1))
#endif
"""

MATH = """#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#define HUGE_VAL __longlong_as_double(0x7ff0000000000000LL)
#define HUGE_VALF INFINITY
#endif
#ifndef M_PI
#define M_E 2.7182818284590452354
#define M_LOG2E 1.4426950408889634074
#define M_LN2 0.69314718055994530942
#define M_PI 3.14159265358979323846
#define M_PI_2 1.57079632679489661923
#define M_SQRT2 1.41421356237309504880
#define M_SQRT1_2 0.70710678118654752440
#endif
"""


def forward(name: str) -> str:
    """Returns a header that has CCCL's names in std."""
    return f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"


BUILT_IN = "#pragma once\n#include <cuda/std/cstddef>\nusing cuda::std::ptrdiff_t;\n#ifndef NULL\n#define NULL 0\n#endif\n"

HEADERS: dict[str, str] = {
    **{name: forward(name) for name in CPP},
    **{name: f"#pragma once\n#include <cuda/std/{name}>\n" for name in ("cfloat", "climits")},
    "cmath": forward("cmath") + MATH,
    "math.h": "#pragma once\n" + MATH,
    "stdint.h": f"#pragma once\n#include <cuda/std/cstdint>\n{USING}",
    "cstdint": forward("cstdint") + USING,
    "inttypes.h": f"#pragma once\n#include <cuda/std/cstdint>\n{USING}",
    "float.h": "#include <cfloat>\n",
    "limits.h": "#include <climits>\n",
    "stdbool.h": "#pragma once\n",
    # printf, memcpy, malloc and the like are NVRTC's own
    **dict.fromkeys(("stddef.h", "stdio.h", "cstdio", "stdlib.h", "cstdlib", "string.h"), BUILT_IN),
    "assert.h": ASSERT,
    "cassert": ASSERT,
}

MISSING = {
    r"crt/": "it is in the wheel nvidia-cuda-crt",
    r"curand": "it is in the wheel nvidia-curand",
    r"(iostream|vector|string|map|memory|chrono|thread|fstream|sstream|iomanip)$": "it is the host's: leave it out of the file"
    " of the kernel, or run the whole program with `cupyflash run`",
}
"""Advice about headers that are not found, by the beginning of their names."""


def advice(log: str) -> str:
    """Returns what to do about the header that a compiler did not find; nothing if it found all, or if we do not know."""
    found = re.search(r'cannot open source file "([^"]+)"', log)
    known = [text for pattern, text in MISSING.items() if found and re.match(pattern, found[1])]
    return f"{found[1]}: {known[0]}" if found and known else ""


def for_nvrtc() -> tuple[list[bytes], list[bytes]]:
    """Returns the headers' texts and names, as CuPy's binding of NVRTC takes them."""
    return [text.encode() for text in HEADERS.values()], [name.encode() for name in HEADERS]
