"""cuBLAS's products as a program calls them, answered by NumPy: `gemm` in its forms, `gemv`, and cublasLt's with plain layouts.

Numbers are NumPy's: products of half types are summed in float32, none is rounded to TF32, and the order of sums is not cuBLAS's. A
product of bytes that nobody wrote is bytes that nobody wrote, so that a kernel which reads them is found.
Layouts, enumerations and what a call may leave out are those of NVIDIA's "cuBLAS" documentation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partialmethod

import numpy as np

from cupyflash.basics import Array
from cupyflash.sim.program.copies import CopyCalls
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.streams import KERNEL, destroys
from cupyflash.sim.ptx.order.past import READ, WRITE
from cupyflash.sim.ptx.parameters import dtype_of
from cupyflash.sim.ptx.state.segments import UNWRITTEN, WRITTEN

SINGLE, DOUBLE, HALF, INTEGER = (np.dtype(name) for name in ("float32", "float64", "float16", "int32"))
TYPES = {0: "float32", 1: "float64", 2: "float16", 3: "int8", 10: "int32", 14: "bfloat16"}
"""cudaDataType."""
COMPUTE = {
    **dict.fromkeys((64, 65), HALF),
    **dict.fromkeys((68, 69, 74, 75, 77, 78), SINGLE),
    **dict.fromkeys((70, 71, 79), DOUBLE),
    **dict.fromkeys((72, 73), INTEGER),
}
"""cublasComputeType_t: the type of alpha and beta."""
SUMMED = {HALF: SINGLE, INTEGER: DOUBLE}
"""The type in which products are summed, where it is not that of alpha: int32's are exact in float64."""

DEVICE_SCALARS = 1
"""cublasPointerMode_t: alpha and beta lie in the device's memory."""

PLAIN = "handle ta tb m n k alpha A lda B ldb beta C ldc"
TYPED = "handle ta tb m n k alpha A type_a lda B type_b ldb beta C type_c ldc"
STRIDED = "handle ta tb m n k alpha A lda step_a B ldb step_b beta C ldc step_c count"
STRIDED_TYPED = "handle ta tb m n k alpha A type_a lda step_a B type_b ldb step_b beta C type_c ldc step_c count compute"
BATCHED = f"{PLAIN} count"
BATCHED_TYPED = f"{TYPED} count compute"
LETTERS = {"S": SINGLE, "D": DOUBLE, "H": HALF}
PRODUCTS: dict[str, tuple[str, np.dtype | None]] = {
    **{f"cublas{letter}gemm{'' if letter == 'H' else '_v2'}": (PLAIN, one) for letter, one in LETTERS.items()},
    **{f"cublas{letter}gemmStridedBatched": (STRIDED, one) for letter, one in LETTERS.items()},
    **{f"cublas{letter}gemmBatched": (BATCHED, one) for letter, one in LETTERS.items()},
    "cublasSgemmEx": (TYPED, SINGLE),
    "cublasGemmEx": (f"{TYPED} compute", None),
    "cublasGemmStridedBatchedEx": (STRIDED_TYPED, None),
    "cublasGemmBatchedEx": (BATCHED_TYPED, None),
}
"""The functions: the names of their words, and the type of their matrices and scalars, if the words do not say it."""

VECTOR = "handle ta m n alpha A lda x step_x beta y step_y"
"""The words of `gemv`."""

WIDE = {"handle", "alpha", "beta", "A", "B", "C", "x", "y", "step_a", "step_b", "step_c"}
"""Words of 64 bits; the others are ints."""

Read = Callable[[], "np.ndarray"]


class Status(IntEnum):
    """cublasStatus_t."""

    NOT_INITIALIZED = 1
    INVALID_VALUE = 7
    EXECUTION_FAILED = 13
    NOT_SUPPORTED = 15


def status(error: CudaError) -> Status:
    """Returns the status that a function of cuBLAS returns for an error."""
    known = {
        ErrorCode.INVALID_RESOURCE_HANDLE: Status.NOT_INITIALIZED,
        ErrorCode.INVALID_VALUE: Status.INVALID_VALUE,
        ErrorCode.NOT_SUPPORTED: Status.NOT_SUPPORTED,
    }
    return known.get(error.code, Status.EXECUTION_FAILED)


@dataclass
class BlasHandle:
    """A cuBLAS handle: its stream, and where alpha and beta lie."""

    stream: int = 0
    pointer_mode: int = 0
    math_mode: int = 0


@dataclass
class Attributes:
    """A description of cublasLt's, of a product or of a layout, by the numbers of its attributes."""

    values: dict[int, int] = field(default_factory=dict)


class Layout(IntEnum):
    """cublasLtMatrixLayoutAttribute_t."""

    TYPE, ORDER, ROWS, COLS, LD, COUNT, STEP = range(7)


class Product(IntEnum):
    """cublasLtMatmulDescAttributes_t."""

    COMPUTE, SCALE, POINTER_MODE, TRANSPOSE_A, TRANSPOSE_B = range(5)
    EPILOGUE, BIAS, BIAS_TYPE = 7, 8, 26


HARMLESS = {15, 25}
"""Attributes of a product that do not change its result: multiprocessors to use, fast accumulation."""
RELU, BIAS, GELU = 2, 4, 32
"""Bits of cublasLtEpilogue_t."""


@dataclass(frozen=True)
class Matrices:
    """Matrices of a batch, stored by columns: their addresses, `rows` x `cols`, `ld` elements from a column to the next."""

    addresses: tuple[int, ...]
    rows: int
    cols: int
    ld: int
    dtype: np.dtype
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.rows < 0 or self.cols < 0 or self.ld < max(1, self.rows):
            raise CudaError(ErrorCode.INVALID_VALUE, f"{self.rows} x {self.cols} with a leading dimension of {self.ld}")


def of_handle(name: str, bits: int) -> tuple[Callable[[BlasCalls, int, int], None], Callable[[BlasCalls, int, int], None]]:
    """Returns two functions of cuBLAS: one sets an attribute of a handle, a word of so many bits, one writes it to an address."""

    def sets(self: BlasCalls, handle: int, word: int) -> None:
        setattr(self.find(handle, BlasHandle), name, word & ((1 << bits) - 1))

    def gets(self: BlasCalls, handle: int, out: int) -> None:
        self.channel.write(out, getattr(self.find(handle, BlasHandle), name).to_bytes(bits // 8, "little"))

    return sets, gets


class BlasCalls(CopyCalls):
    """The functions of cuBLAS and cublasLt that multiply matrices, and those around them."""

    # -- handles ------------------------------------------------------------------------------------------------------------

    def cublasCreate_v2(self, out: int) -> None:
        self.channel.write_word(out, self.handle(BlasHandle()))

    cublasLtCreate = cublasCreate_v2

    cublasDestroy_v2 = cublasLtDestroy = destroys(BlasHandle)

    cublasSetStream_v2, cublasGetStream_v2 = of_handle("stream", 64)
    cublasSetPointerMode_v2, cublasGetPointerMode_v2 = of_handle("pointer_mode", 32)
    cublasSetMathMode, cublasGetMathMode = of_handle("math_mode", 32)

    def cublasSetWorkspace_v2(self, handle: int) -> None:
        self.find(handle, BlasHandle)

    def cublasGetVersion_v2(self, handle: int, out: int) -> None:
        self.channel.write_int(out, 10000 * self.version)

    def cublasGetStatusString(self, number: int) -> int:
        known = {0: "SUCCESS", **{int(one): one.name for one in Status}}
        return self.kept(f"CUBLAS_STATUS_{known.get(signed(number), 'INTERNAL_ERROR')}")

    cublasGetStatusName = cublasGetStatusString

    # -- copies -------------------------------------------------------------------------------------------------------------

    def cublasSetMatrix(self, rows: int, cols: int, size: int, source: int, lda: int, target: int, ldb: int) -> None:
        item = signed(size)
        row = self.rows(target, signed(ldb) * item, source, signed(lda) * item, signed(rows) * item, signed(cols))
        self.now(row)

    cublasGetMatrix = cublasSetMatrix

    def cublasSetVector(self, n: int, size: int, source: int, step: int, target: int, target_step: int) -> None:
        self.cublasSetMatrix(1, n, size, source, step, target, target_step)

    cublasGetVector = cublasSetVector

    # -- products -----------------------------------------------------------------------------------------------------------

    def gemm(self, form: str, dtype: np.dtype | None, *words: int) -> None:
        """C = alpha op(A) op(B) + beta C for each of a batch: `words` in the order of `form`, of which PRODUCTS has the list."""
        given = named(form, words)
        handle = self.find(given["handle"], BlasHandle)
        if dtype is None and given["compute"] not in COMPUTE:
            raise CudaError(ErrorCode.NOT_SUPPORTED, f"compute type {given['compute']}")
        scalar = dtype or COMPUTE[given["compute"]]
        m, n, k, count = given["m"], given["n"], given["k"], given.get("count", 1)
        if count < 0:
            raise CudaError(ErrorCode.INVALID_VALUE, f"a batch of {count}")

        def matrices(letter: str, rows: int, cols: int, transposed: bool) -> Matrices:
            address, small = given[letter], letter.lower()
            typed = type_of(given[f"type_{small}"]) if f"type_{small}" in given else scalar
            step = signed(given.get(f"step_{small}", 0), 64) * typed.itemsize
            every = tuple(address + step * number for number in range(count))
            if "step_c" not in given and "count" in given:
                every = struct.unpack(f"<{count}Q", self.pointers(address, 8 * count))
            stored = (cols, rows) if transposed else (rows, cols)
            return Matrices(every, *stored, given[f"ld{small}"], typed, transposed)

        a, b, c = matrices("A", m, k, bool(given["ta"])), matrices("B", k, n, bool(given["tb"])), matrices("C", m, n, False)
        alpha, beta = (self.scalar(given[one], scalar, handle.pointer_mode) for one in ("alpha", "beta"))
        self.check_sticky()
        self.issue(handle.stream, KERNEL, lambda _: self.multiply(a, b, c, c, (alpha, beta)))

    def gemv(self, dtype: np.dtype, *words: int) -> None:
        """y = alpha op(A) x + beta y; a vector is the row of a matrix, transposed, its elements a step apart."""
        given = named(VECTOR, words)
        handle, transposed = self.find(given["handle"], BlasHandle), bool(given["ta"])
        a = Matrices((given["A"],), given["m"], given["n"], given["lda"], dtype, transposed)
        length, across = (given["m"], given["n"]) if transposed else (given["n"], given["m"])
        x = Matrices((given["x"],), 1, length, given["step_x"], dtype, transposed=True)
        y = Matrices((given["y"],), 1, across, given["step_y"], dtype, transposed=True)
        alpha, beta = (self.scalar(given[one], dtype, handle.pointer_mode) for one in ("alpha", "beta"))
        self.check_sticky()
        self.issue(handle.stream, KERNEL, lambda _: self.multiply(a, x, y, y, (alpha, beta)))

    def pointers(self, address: int, size: int) -> bytes:
        return self.memory.read(address, size) if self.memory.owns(address) else self.channel.read(address, size)

    def scalar(self, address: int, dtype: np.dtype, pointer_mode: int) -> Read:
        """Returns how to read alpha or beta: the host's now, the device's when the product is made."""
        if pointer_mode == DEVICE_SCALARS:
            return lambda: np.frombuffer(self.memory.read(address, dtype.itemsize), dtype)[0]
        value = np.frombuffer(self.channel.read(address, dtype.itemsize), dtype)[0]
        return lambda: value

    def multiply(
        self,
        a: Matrices,
        b: Matrices,
        c: Matrices,
        d: Matrices,
        scalars: tuple[Read, Read],
        then: Callable[[Array], Array] = lambda result: result,
    ) -> None:
        """D = then(alpha op(A) op(B) + beta C), matrix by matrix. C is not read where beta is 0."""
        alpha, beta = (one() for one in scalars)
        summed = SUMMED.get(alpha.dtype, alpha.dtype)
        for number in range(len(d.addresses)):
            left, left_unwritten = self.operand(a, number)
            right, right_unwritten = self.operand(b, number)
            result = alpha.astype(summed) * (left.astype(summed) @ right.astype(summed))
            unwritten = np.logical_or.outer(left_unwritten.any(axis=1), right_unwritten.any(axis=0))
            if beta:
                added, unset = self.operand(c, number)
                result, unwritten = result + beta.astype(summed) * added.astype(summed), unwritten | unset
            into, state = self.elements(d, number, write=True)
            result = then(result)
            if d.transposed:
                result, unwritten = result.T, unwritten.T
            into[:] = result.astype(np.int64).astype(d.dtype) if d.dtype.kind == "i" else result.astype(d.dtype)
            if state is not None:
                state[:] = np.where(unwritten, UNWRITTEN, WRITTEN)[:, :, None]

    def operand(self, one: Matrices, number: int) -> tuple[Array, Array]:
        """Returns op() of a matrix, and which of its elements nobody wrote."""
        data, state = self.elements(one, number)
        unwritten = np.zeros(data.shape, bool) if state is None else (state == UNWRITTEN).any(axis=2)
        return (data.T, unwritten.T) if one.transposed else (data, unwritten)

    def elements(self, one: Matrices, number: int, write: bool = False) -> tuple[Array, Array | None]:
        """Returns views of a matrix in the device's memory and of its bytes' state, to read or to write. Raises CudaError if it is
        not all there.
        """
        address, item, pitch = one.addresses[number], one.dtype.itemsize, one.ld * one.dtype.itemsize
        size = (one.cols - 1) * pitch + one.rows * item if one.rows and one.cols else 0
        if not size:
            return np.zeros((one.rows, one.cols), one.dtype), None
        try:
            block, where = self.memory.part(address, size)
        except CudaError:
            raise CudaError(ErrorCode.ILLEGAL_ADDRESS, f"{size} bytes at {address:#x} are not one allocation") from None
        columns = range(one.cols) if one.ld > one.rows else (0,)
        width = one.rows * item if one.ld > one.rows else size
        for start in (where.start + column * pitch for column in columns):
            self.memory.note(block, WRITE if write else READ, slice(start, start + width))
        there = block.opened() if write else block.allocation
        data: Array = np.ndarray((one.rows, one.cols), one.dtype, there.memory[where], 0, (item, pitch))
        if there.state is None:
            return data, None
        return data, np.ndarray((one.rows, one.cols, item), np.uint8, there.state[where], 0, (item, pitch, 1))

    # -- cublasLt -----------------------------------------------------------------------------------------------------------

    def cublasLtMatmulDescCreate(self, out: int, compute: int, scale: int) -> None:
        self.channel.write_word(out, self.handle(Attributes({Product.COMPUTE: signed(compute), Product.SCALE: signed(scale)})))

    def cublasLtMatrixLayoutCreate(self, out: int, kind: int, rows: int, cols: int, ld: int) -> None:
        values = {Layout.TYPE: signed(kind), Layout.ROWS: rows, Layout.COLS: cols, Layout.LD: signed(ld, 64)}
        self.channel.write_word(out, self.handle(Attributes({int(key): value for key, value in values.items()})))

    def cublasLtMatmulPreferenceCreate(self, out: int) -> None:
        self.channel.write_word(out, self.handle(Attributes()))

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = destroys(Attributes)

    def cublasLtMatmulDescSetAttribute(self, handle: int, number: int, address: int, size: int) -> None:
        value = int.from_bytes(self.channel.read(address, min(size, 8)), "little", signed=True)
        self.find(handle, Attributes).values[signed(number)] = value

    cublasLtMatrixLayoutSetAttribute = cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(self, *words: int) -> None:
        """Gives one algorithm, without a workspace: a result is 96 bytes, of which zeros say that all is well."""
        wanted, results, count = signed(words[7]), words[8], words[9]
        if wanted < 1:
            raise CudaError(ErrorCode.INVALID_VALUE)
        self.channel.write(results, bytes(96))
        self.channel.write_int(count, 1)

    def cublasLtMatmul(self, *words: int) -> None:
        handle, product, alpha, a, layout_a, b, layout_b, beta, c, layout_c, d, layout_d, *_, stream = words[:16]
        self.find(handle, BlasHandle)
        asked = self.find(product, Attributes).values
        other = asked.keys() - {*Product, *HARMLESS}
        if other or asked.get(Product.EPILOGUE, 1) & ~(1 | RELU | BIAS | GELU):
            raise CudaError(ErrorCode.NOT_SUPPORTED, f"attributes {sorted(other)} or epilogue of a product")
        scalar = type_of(asked[Product.SCALE])

        def matrices(address: int, layout: int, transposed: int = 0) -> Matrices:
            values = self.find(layout, Attributes).values
            typed = type_of(values[Layout.TYPE])
            order, rows, cols = values.get(Layout.ORDER, 0), values[Layout.ROWS], values[Layout.COLS]
            if order not in (0, 1):
                raise CudaError(ErrorCode.NOT_SUPPORTED, f"a matrix in order {order}")
            step = values.get(Layout.STEP, 0) * typed.itemsize
            every = tuple(address + step * number for number in range(values.get(Layout.COUNT, 1)))
            # What is stored by rows is the transpose of what is stored by columns.
            stored = (cols, rows) if order else (rows, cols)
            return Matrices(every, *stored, values[Layout.LD], typed, bool(transposed) != bool(order))

        left = matrices(a, layout_a, asked.get(Product.TRANSPOSE_A, 0))
        right = matrices(b, layout_b, asked.get(Product.TRANSPOSE_B, 0))
        added, into = matrices(c or d, layout_c or layout_d), matrices(d, layout_d)
        mode = asked.get(Product.POINTER_MODE, 0)
        if mode not in (0, DEVICE_SCALARS):
            raise CudaError(ErrorCode.NOT_SUPPORTED, f"pointer mode {mode}")
        scalars = self.scalar(alpha, scalar, mode), self.scalar(beta, scalar, mode)
        self.check_sticky()
        then = self.epilogue(asked, into.dtype)
        self.issue(stream, KERNEL, lambda _: self.multiply(left, right, added, into, scalars, then))

    def epilogue(self, asked: dict[int, int], own: np.dtype) -> Callable[[Array], Array]:
        """Returns what becomes of a product before it is stored: a bias for each row is added, then ReLU or GELU (by tanh)."""
        bits = asked.get(Product.EPILOGUE, 1)
        dtype = type_of(asked[Product.BIAS_TYPE]) if asked.get(Product.BIAS_TYPE, -1) >= 0 else own
        address = asked.get(Product.BIAS, 0) & ((1 << 64) - 1)

        def then(result: Array) -> Array:
            if bits & BIAS:
                bias = np.frombuffer(self.memory.read(address, result.shape[0] * dtype.itemsize), dtype)
                result = result + bias.astype(result.dtype)[:, None]
            if bits & RELU:
                result = np.maximum(result, 0)
            if bits & GELU:
                result = result / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (result + 0.044715 * result**3)))
            return result

        return then


for _name, _form in PRODUCTS.items():
    setattr(BlasCalls, _name, partialmethod(BlasCalls.gemm, *_form))
for _letter in "SD":
    setattr(BlasCalls, f"cublas{_letter}gemv_v2", partialmethod(BlasCalls.gemv, LETTERS[_letter]))


def named(form: str, words: tuple[int, ...]) -> dict[str, int]:
    """Returns a call's words by their names."""
    return {name: word if name in WIDE else signed(word) for name, word in zip(form.split(), words, strict=False)}


def signed(word: int, bits: int = 32) -> int:
    """Returns the low bits of a word as a signed number."""
    low = word & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


def type_of(number: int) -> np.dtype:
    """Returns the type of a cudaDataType. Raises CudaError that names one that is not supported."""
    if number not in TYPES:
        raise CudaError(ErrorCode.NOT_SUPPORTED, f"matrices of cudaDataType {number}")
    return dtype_of(TYPES[number])
