// A forward pass as Hopper's are, on which the simulator's time is measured: one warp loads by TMA, two warpgroups of 64 rows each
// multiply by wgmma, K and V go through two stages on mbarriers, and a tile's softmax runs under the products of its neighbours
// (FlashAttention-3, arXiv 2407.08608, Algorithm 2). float16, d 128, Br = Bc = 128; any lengths; CAUSAL 0 or 1.
#include <cuda_fp16.h>
typedef unsigned long long u64;
constexpr int D = 128, BR = 128, BC = 128, STAGES = 2, WARPGROUP = 128, CONSUMERS = 2;
constexpr int SLAB = 64, SLABS = D / SLAB, ROW_BYTES = 2 * SLAB;  // a tile is SLABS times so many columns, rows of 128 bytes, swizzled
constexpr int Q_BYTES = BR * D * 2, K_BYTES = BC * D * 2;
#define NEG_INF __int_as_float(0xff800000)

struct alignas(64) TensorMap { char bytes[128]; };
struct Shared { unsigned Q, K, V, Q_full, K_full, V_full, K_empty, V_empty; };  // addresses; of the last four one a stage
struct Work { int i, head, first, turns; };  // row block, head, and its column blocks from the last, `first`, down

__device__ __forceinline__ void init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(unsigned barrier, int parity) {
  asm volatile("{\n.reg .pred done;\nAGAIN_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN_%=;\n}"
               ::"r"(barrier), "r"(parity) : "memory");
}

// rows x D from a tensor of heads of rows, a slab after the other; what is behind the last row is zero
template <int ROWS>
__device__ __forceinline__ void load(unsigned to, const TensorMap& map, unsigned barrier, int row, int head) {
  for (int slab = 0; slab < SLABS; slab++)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to + slab * ROWS * ROW_BYTES), "l"(&map), "r"(barrier), "r"(slab * SLAB), "r"(row), "r"(head) : "memory");
}

// A matrix descriptor: 128-byte swizzle, 1,024 bytes from eight rows to the next eight, `leading` from a slab to the next
__device__ __forceinline__ u64 tile(unsigned at, int leading) {
  return (at & 0x3ffff) >> 4 | u64(leading >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
#define ACC4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define ACC16(c, i) ACC4(c, i), ACC4(c, i + 4), ACC4(c, i + 8), ACC4(c, i + 12)
#define ACC64(c) ACC16(c, 0), ACC16(c, 16), ACC16(c, 32), ACC16(c, 48)
#define NAMES                                                                                                                   \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "    \
  "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
// C (64 x 128) = A B^T, or C += with `add`: A and B rows of K
__device__ __forceinline__ void multiply(float (&C)[64], u64 A, u64 B, int add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " NAMES
               ", %64, %65, p, 1, 1, 0, 0;\n}" : ACC64(C) : "l"(A), "l"(B), "r"(add));
}
// C += A B: A in registers, B columns of K
__device__ __forceinline__ void multiply(float (&C)[64], const unsigned* A, u64 B) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " NAMES ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : ACC64(C) : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "l"(B));
}
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// until at most N groups are on their way; C is what the others made
template <int N>
__device__ __forceinline__ void finish(float (&C)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
#pragma unroll
  for (int n = 0; n < 64; n++) asm volatile("" : "+f"(C[n])::"memory");
}

__device__ __forceinline__ void produce(const Shared& s, const TensorMap& Q, const TensorMap& K, const TensorMap& V, const Work& w,
                                        int kv_head) {
  expect(s.Q_full, Q_BYTES);
  load<BR>(s.Q, Q, s.Q_full, w.i * BR, w.head);
  for (int turn = 0; turn < w.turns; turn++) {
    const int stage = turn % STAGES, round = turn / STAGES & 1, row = (w.first - turn) * BC;
    wait(s.K_empty + 8 * stage, round ^ 1);
    expect(s.K_full + 8 * stage, K_BYTES);
    load<BC>(s.K + stage * K_BYTES, K, s.K_full + 8 * stage, row, kv_head);
    wait(s.V_empty + 8 * stage, round ^ 1);
    expect(s.V_full + 8 * stage, K_BYTES);
    load<BC>(s.V + stage * K_BYTES, V, s.V_full + 8 * stage, row, kv_head);
  }
}

// S = Q K_j^T
__device__ __forceinline__ void scores(float (&S)[BC / 2], unsigned Q, unsigned K) {
  begin();
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const int slab = k / 4, inside = k % 4 * 32;
    multiply(S, tile(Q + slab * BR * ROW_BYTES + inside, 0), tile(K + slab * BC * ROW_BYTES + inside, 0), k > 0);
  }
  commit();
}
// O += P V_j
__device__ __forceinline__ void values(float (&O)[D / 2], const unsigned (&P)[BC / 4], unsigned V) {
  begin();
#pragma unroll
  for (int k = 0; k < BC / 16; k++) multiply(O, P + 4 * k, tile(V + k * 16 * ROW_BYTES, BC * ROW_BYTES));
  commit();
}
// S to the exponentials; m and l follow, `factor` is what O is to be multiplied by
__device__ __forceinline__ void softmax(float (&S)[BC / 2], float (&m)[2], float (&l)[2], float (&factor)[2], float scale_log2) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float highest = m[h], sum = 0;
#pragma unroll
    for (int n = h; n < BC / 4; n += 2) highest = fmaxf(highest, fmaxf(S[2 * n], S[2 * n + 1]));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    const float shift = highest == NEG_INF ? 0 : highest * scale_log2;
    factor[h] = exp2f(m[h] * scale_log2 - shift);
    m[h] = highest;
#pragma unroll
    for (int n = h; n < BC / 4; n += 2)
#pragma unroll
      for (int e = 0; e < 2; e++) sum += S[2 * n + e] = exp2f(fmaf(S[2 * n + e], scale_log2, -shift));
    l[h] = l[h] * factor[h] + sum;
  }
}
__device__ __forceinline__ unsigned packed(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

__device__ __forceinline__ void consume(const Shared& s, const TensorMap& out, float* L, const Work& w, int n_q, int n_k,
                                        float scale_log2, int group) {
  float S[BC / 2], O[D / 2] = {}, m[2] = {NEG_INF, NEG_INF}, l[2] = {0, 0}, factor[2];
  unsigned P[BC / 4];
  const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, own = group * 64 + thread / 32 * 16;  // of its warp the first row
  const int row = w.i * BR + own + lane / 4, column = lane % 4 * 2;
  const unsigned Q = s.Q + group * 64 * ROW_BYTES;

  const auto take_exponentials = [&](int turn) {
    if (turn < 1 + (CAUSAL ? BR / BC : 0)) {
#pragma unroll
      for (int n = 0; n < BC / 2; n++) {
        const int key = (w.first - turn) * BC + n / 4 * 8 + column + n % 2, query = row + n / 2 % 2 * 8;
        if (key >= n_k || (CAUSAL && key > query + n_k - n_q)) S[n] = NEG_INF;
      }
    }
    softmax(S, m, l, factor, scale_log2);
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int n = 0; n < BC / 4; n++) P[n] = packed(S[2 * n], S[2 * n + 1]);
  };
  const auto scale_values = [&] {
#pragma unroll
    for (int n = 0; n < D / 2; n++) O[n] *= factor[n / 2 % 2];
  };

  if (w.turns > 0) {
    wait(s.Q_full, 0);
    wait(s.K_full, 0);
    scores(S, Q, s.K);
    finish<0>(S);
    arrive(s.K_empty);
    take_exponentials(0);
    round_weights();
#pragma unroll 1
    for (int turn = 1; turn < w.turns; turn++) {
      const int stage = turn % STAGES, before = (turn - 1) % STAGES;
      wait(s.K_full + 8 * stage, turn / STAGES & 1);
      scores(S, Q, s.K + stage * K_BYTES);
      wait(s.V_full + 8 * before, (turn - 1) / STAGES & 1);
      values(O, P, s.V + before * K_BYTES);
      finish<1>(S);
      arrive(s.K_empty + 8 * stage);
      take_exponentials(turn);
      finish<0>(O);
      arrive(s.V_empty + 8 * before);
      scale_values();
      round_weights();
    }
    const int last = (w.turns - 1) % STAGES;
    wait(s.V_full + 8 * last, (w.turns - 1) / STAGES & 1);
    values(O, P, s.V + last * K_BYTES);
    finish<0>(O);
  }

  // O / l leaves through the rows of Q that nobody else reads
#pragma unroll
  for (int h = 0; h < 2; h++) {
    l[h] += __shfl_xor_sync(~0u, l[h], 1);
    l[h] += __shfl_xor_sync(~0u, l[h], 2);
    factor[h] = l[h] > 0 ? 1 / l[h] : 0;
    if (lane % 4 == 0 && row + 8 * h < n_q)
      L[(long long)w.head * n_q + row + 8 * h] = l[h] > 0 ? 0.6931471806f * (m[h] * scale_log2 + log2f(l[h])) : NEG_INF;
  }
  scale_values();
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
    const int to_row = own + lane % 16, chunk = (n % 4 * 2 + lane / 16) ^ (to_row % 8);
    const float* part = O + 8 * n;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(s.Q + n / 4 * BR * ROW_BYTES + to_row * ROW_BYTES + chunk * 16), "r"(packed(part[0], part[1])),
                 "r"(packed(part[2], part[3])), "r"(packed(part[4], part[5])), "r"(packed(part[6], part[7])) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(WARPGROUP) : "memory");
  if (thread == 0) {
    for (int slab = 0; slab < SLABS; slab++)
      asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                   ::"l"(&out), "r"(Q + slab * BR * ROW_BYTES), "r"(slab * SLAB), "r"(w.i * BR + group * 64), "r"(w.head) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}

extern "C" __global__ void __launch_bounds__(WARPGROUP * (1 + CONSUMERS), 1)
hopper_forward(const __grid_constant__ TensorMap Q, const __grid_constant__ TensorMap K, const __grid_constant__ TensorMap V,
               const __grid_constant__ TensorMap O, float* L, int n_q, int n_k, int group_heads, float scale_log2) {
  extern __shared__ __align__(1024) char smem[];
  const unsigned base = (unsigned)__cvta_generic_to_shared(smem), K_smem = base + Q_BYTES, V_smem = K_smem + STAGES * K_BYTES;
  const unsigned full = V_smem + STAGES * K_BYTES + 8, step = 8 * STAGES;
  const Shared s = {base, K_smem, V_smem, full - 8, full, full + step, full + 2 * step, full + 3 * step};
  const int row_blocks = (n_q + BR - 1) / BR, i = row_blocks - 1 - blockIdx.x % row_blocks;
  const int keys = CAUSAL ? max(0, min(n_k, (i + 1) * BR + n_k - n_q)) : n_k, turns = (keys + BC - 1) / BC;
  const Work work = {i, int(blockIdx.x / row_blocks), turns - 1, turns};
  if (threadIdx.x == 0) {
    init(s.Q_full, 1);
    for (int stage = 0; stage < STAGES; stage++) {
      init(s.K_full + 8 * stage, 1), init(s.V_full + 8 * stage, 1);
      init(s.K_empty + 8 * stage, CONSUMERS * WARPGROUP), init(s.V_empty + 8 * stage, CONSUMERS * WARPGROUP);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) produce(s, Q, K, V, work, work.head / group_heads);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(s, O, L, work, n_q, n_k, scale_log2, threadIdx.x / WARPGROUP - 1);
  }
}
