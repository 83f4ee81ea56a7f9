"""The standard headers that kernels include, for NVRTC, which has none: each forwards to CCCL's copy, or says what NVRTC lacks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

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


DRIVER = """#pragma once
#define CUDA_VERSION (1000 * __CUDACC_VER_MAJOR__ + 10 * __CUDACC_VER_MINOR__)
typedef unsigned long long CUdeviceptr;
typedef struct alignas(__CUDACC_VER_MAJOR__ < 13 ? 64 : 128) CUtensorMap_st { unsigned long long opaque[16]; } CUtensorMap;
"""
"""cuda.h: the types of the driver that code on the device may have."""


def forward(name: str) -> str:
    """Returns a header that has CCCL's names in std."""
    return f"#pragma once\n#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"


CUB = {
    "block": "adjacent_difference discontinuity exchange histogram load merge_sort radix_rank radix_sort reduce run_length_decode"
    " scan shuffle store",
    "warp": "exchange load merge_sort reduce scan store",
    "thread": "load operators reduce scan search store",
}
"""CUB's headers for code on the device, by folder; its own cub.cuh includes those for the host, too, and refuses NVRTC."""


def of_cub() -> str:
    """Returns cub.cuh: those that CUB's version has."""
    names = [f"cub/{folder}/{folder}_{name}.cuh" for folder, names in CUB.items() for name in names.split()]
    found = "".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n" for name in names)
    return f"#pragma once\n{found}#include <cub/util_type.cuh>\n"


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
    "cub/cub.cuh": of_cub(),
    "cuda.h": DRIVER,
    "assert.h": ASSERT,
    "cassert": ASSERT,
}

HOST = "it is the host's: leave it out of the file of the kernel, or run the whole program with `cupyflash run`"
MISSING = {
    r"crt/": "it is in the wheel nvidia-cuda-crt (of CUDA 12: nvidia-cuda-nvcc-cu12)",
    r"(cub|thrust|cuda|nv)/": "it is in the wheel nvidia-cuda-cccl (of CUDA 12: nvidia-cuda-cccl-cu12)",
    r"(curand|cublas|cusparse|cufft|cusolver)": r"it is in the wheel nvidia-\1 (of CUDA 12: nvidia-\1-cu12)",
    r"cudnn": "it is in the wheel nvidia-cudnn-cu13 (of CUDA 12: nvidia-cudnn-cu12)",
    r"nccl": "it is in the wheel nvidia-nccl-cu13 (of CUDA 12: nvidia-nccl-cu12)",
    r"(cutlass|cute)/": "it is in the wheel nvidia-cutlass, and in CUTLASS's folder include: -I says where",
    r"helper_": "it is in the folder Common of NVIDIA's cuda-samples: -I says where",
    r"(iostream|vector|string|map|memory|chrono|thread|fstream|sstream|iomanip|stdexcept|random)$": HOST,
    r"(time|omp|unistd|getopt|pthread|sys/\w+)\.h$": HOST,
}
"""Advice about headers that are not found, by the beginning of their names."""
OFFER = "nvcc, which is on the PATH, compiles what NVRTC does not: `nvcc -ptx -lineinfo -arch=compute_80 FILE` makes PTX to profile"


def advice(log: str, folders: Iterable[str] = (), nvcc: bool = False) -> str:
    """Returns what to do about the log of NVRTC or of a compiler of the host, "" if we do not know.

    folders: a toolkit's, which may have a header that was not found. nvcc: there is one on the PATH.
    """
    found = re.search(r'cannot open source file "([^"]+)"|fatal error: (\S+): No such file', log)
    if "host functions are not allowed in JIT mode" in log:
        return "; ".join([f"main or another function without __device__: {HOST}", *[OFFER] * nvcc])
    if found is None:
        return OFFER if nvcc and re.search(r'namespace "std" has no member|not supported when compiling with NVRTC', log) else ""
    header = found[1] or found[2]
    told = [match.expand(text) for pattern, text in MISSING.items() if (match := re.match(pattern, header))]
    told += [f"a CUDA toolkit has it: -I {folder}" for folder in folders if os.path.isfile(os.path.join(folder, header))][:1]
    if told[:1] == [HOST]:
        told += [OFFER] * nvcc
    return f"{header}: {'; '.join(told or ['-I says in which folder it is'])}"


def for_nvrtc() -> tuple[list[bytes], list[bytes]]:
    """Returns the headers' texts and names, as CuPy's binding of NVRTC takes them."""
    return [text.encode() for text in HEADERS.values()], [name.encode() for name in HEADERS]
