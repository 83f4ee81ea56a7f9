// Hopper's warpgroup products (wgmma, PTX ISA): 64 rows of a warpgroup times up to 256 columns, one factor or both from shared memory.
// Only for an architecture with the suffix a: sm_90a.
// Constants: ELEMENT (__half or __nv_bfloat16).
//
// A tile in shared memory is slabs of 64 columns; in a slab a row is 128 bytes, of which TMA has moved the 16-byte chunks about (the
// 128-byte swizzle): chunk c of row r lies in place c ^ r % 8. Slabs begin at multiples of 1,024 bytes.
#pragma once
#include "element.cuh"

constexpr int WARPGROUP = 128;
constexpr int SLAB = 64, SLAB_ROW = 2 * SLAB;  // columns, and bytes of a row
__device__ constexpr int slabs(int columns) { return (columns + SLAB - 1) / SLAB; }

// What a product is told of a tile: its matrix descriptor, whose low word steps through the tile as the address in it does.
// The high word says: 128-byte swizzle, 1,024 bytes from eight rows to the next.
struct Operand {
  static constexpr unsigned long long HIGH = (1024ull >> 4 | 1ull << 30) << 32;
  unsigned long long descriptor;

  // Rows of K columns (K-major); `leading` does not count, since a product takes 16 columns of one slab.
  static __device__ __forceinline__ Operand rows(unsigned smem) { return {HIGH | (smem & 0x3ffff) >> 4}; }
  // Columns of K rows (MN-major), with `leading` bytes from one slab to the next
  static __device__ __forceinline__ Operand columns(unsigned smem, int leading) {
    return {HIGH | (smem & 0x3ffff) >> 4 | static_cast<unsigned>(leading >> 4) << 16};
  }
  __device__ __forceinline__ Operand operator+(int bytes) const { return {descriptor + static_cast<unsigned>(bytes >> 4)}; }
};

// Accumulators may be touched again, and what was written to shared memory or registers may be read, by products from here on.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING groups of products are on their way. C, which the others made, must not be read before.
template <int PENDING, int N> __device__ __forceinline__ void wait_for_products(float (&C)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) asm volatile("" : "+f"(C[n][e])::"memory");
}

// Inline assembly wants its operands written out, and their numbers as text: accumulators of 16, 32, ... columns, 8 to a thread each.
#define WGMMA_TYPE_OF___half "f16"
#define WGMMA_TYPE_OF___nv_bfloat16 "bf16"
#define WGMMA_TYPE_OF(element) WGMMA_TYPE_OF_(element)
#define WGMMA_TYPE_OF_(element) WGMMA_TYPE_OF_##element

#define FOUR(C, n) "+f"(C[n][0]), "+f"(C[n][1]), "+f"(C[n][2]), "+f"(C[n][3])
#define REGS_16(C, n) FOUR(C, n), FOUR(C, n + 1)
#define REGS_32(C, n) REGS_16(C, n), REGS_16(C, n + 2)
#define REGS_48(C, n) REGS_32(C, n), REGS_16(C, n + 4)
#define REGS_64(C, n) REGS_48(C, n), REGS_16(C, n + 6)
#define REGS_80(C, n) REGS_64(C, n), REGS_16(C, n + 8)
#define REGS_96(C, n) REGS_80(C, n), REGS_16(C, n + 10)
#define REGS_112(C, n) REGS_96(C, n), REGS_16(C, n + 12)
#define REGS_128(C, n) REGS_112(C, n), REGS_16(C, n + 14)
#define REGS_144(C, n) REGS_128(C, n), REGS_16(C, n + 16)
#define REGS_160(C, n) REGS_144(C, n), REGS_16(C, n + 18)
#define REGS_176(C, n) REGS_160(C, n), REGS_16(C, n + 20)
#define REGS_192(C, n) REGS_176(C, n), REGS_16(C, n + 22)
#define REGS_208(C, n) REGS_192(C, n), REGS_16(C, n + 24)
#define REGS_224(C, n) REGS_208(C, n), REGS_16(C, n + 26)
#define REGS_240(C, n) REGS_224(C, n), REGS_16(C, n + 28)
#define REGS_256(C, n) REGS_240(C, n), REGS_16(C, n + 30)

#define TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_32 TEXT_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT_48 TEXT_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TEXT_64 TEXT_48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT_80 TEXT_64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT_96 TEXT_80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT_112 TEXT_96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TEXT_128 TEXT_112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TEXT_144 TEXT_128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TEXT_160 TEXT_144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TEXT_176 TEXT_160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TEXT_192 TEXT_176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TEXT_208 TEXT_192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TEXT_224 TEXT_208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TEXT_240 TEXT_224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TEXT_256 TEXT_240 ", %120, %121, %122, %123, %124, %125, %126, %127"

// C (64 x N) = A B^T, or += where `add`: A and B rows of 16 columns each in shared memory
template <int N> __device__ __forceinline__ void multiply(float (&C)[N / 8][4], Operand A, Operand B, bool add);
// The same of A (16 x 64) and B (16 x N), columns of 16 rows each: C = A^T B
template <int N> __device__ __forceinline__ void multiply_columns(float (&C)[N / 8][4], Operand A, Operand B, bool add);
// C (64 x N) += A B: A (64 x 16) in registers, each warp's 16 rows as in row_products.cuh, B columns of 16 rows in shared memory
template <int N> __device__ __forceinline__ void multiply(float (&C)[N / 8][4], const unsigned (&A)[4], Operand B);

#define IN_SHARED_MEMORY(NAME, N, R0, R1, R2, TRANSPOSED) \
  template <> __device__ __forceinline__ void NAME<N>(float (&C)[N / 8][4], Operand A, Operand B, bool add) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " R2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." \
                 WGMMA_TYPE_OF(ELEMENT) "." WGMMA_TYPE_OF(ELEMENT) " {" TEXT_##N "}, " R0 ", " R1 ", p, 1, 1, " TRANSPOSED ";\n}" \
                 : REGS_##N(C, 0) : "l"(A.descriptor), "l"(B.descriptor), "r"(static_cast<int>(add))); \
  }
#define PRODUCT(N, R0, R1, R2, R3, R4) \
  IN_SHARED_MEMORY(multiply, N, R0, R1, R2, "0, 0") \
  IN_SHARED_MEMORY(multiply_columns, N, R0, R1, R2, "1, 1") \
  template <> __device__ __forceinline__ void multiply<N>(float (&C)[N / 8][4], const unsigned (&A)[4], Operand B) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPE_OF(ELEMENT) "." WGMMA_TYPE_OF(ELEMENT) \
                 " {" TEXT_##N "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " R4 ", 1, 1, 1, 1;" \
                 : REGS_##N(C, 0) : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B.descriptor)); \
  }
PRODUCT(16, "%8", "%9", "%10", "%11", "%12")
PRODUCT(32, "%16", "%17", "%18", "%19", "%20")
PRODUCT(48, "%24", "%25", "%26", "%27", "%28")
PRODUCT(64, "%32", "%33", "%34", "%35", "%36")
PRODUCT(80, "%40", "%41", "%42", "%43", "%44")
PRODUCT(96, "%48", "%49", "%50", "%51", "%52")
PRODUCT(112, "%56", "%57", "%58", "%59", "%60")
PRODUCT(128, "%64", "%65", "%66", "%67", "%68")
PRODUCT(144, "%72", "%73", "%74", "%75", "%76")
PRODUCT(160, "%80", "%81", "%82", "%83", "%84")
PRODUCT(176, "%88", "%89", "%90", "%91", "%92")
PRODUCT(192, "%96", "%97", "%98", "%99", "%100")
PRODUCT(208, "%104", "%105", "%106", "%107", "%108")
PRODUCT(224, "%112", "%113", "%114", "%115", "%116")
PRODUCT(240, "%120", "%121", "%122", "%123", "%124")
PRODUCT(256, "%128", "%129", "%130", "%131", "%132")
