// y = softmax(x) along rows (Milakov and Gimelshein, arXiv 1805.02867): safe softmax reads a row three times, the online
// form twice, since it keeps the largest element m and the normalizer d together. Rows need no contiguous axis: elements
// are x_step apart, and row r is (outer, middle, inner) = (r / inner / middle, r / inner % middle, r % inner) of three axes
// with strides of their own. A row's length, the paper's V, is n.
//
// Constants, all from the schedule:
//   ELEMENT  __half, __nv_bfloat16 or float
//   LANES    threads that share a row, a power of two up to 32, or THREADS; neighbouring threads have neighbouring elements,
//            or neighbouring rows where it is 1
//   THREADS  threads of a block; a power of two from 32 on
#include "element.cuh"
#include "params.cuh"

constexpr int WARPS = (LANES + 31) / 32;  // that share a row
static_assert(WARPS == 1 || LANES == THREADS, "a row of several warps has the block to itself");

// m_0: the lowest finite number in place of the paper's -inf, so that an element of -inf adds exp(-inf) = 0 and not
// exp(-inf - -inf). A row of nothing else ends with d = 0, and 0 / 0.
#define LOWEST __int_as_float(0xff7fffff)

struct Normalizer {
  float m, d;
};

// Equation 4: [m_i, d_i] + [m_j, d_j]. Rounded as written, so that it commutes to the bit and all lanes get the same.
__device__ __forceinline__ Normalizer merge(Normalizer i, Normalizer j) {
  const float m = fmaxf(i.m, j.m);
  return {m, __fadd_rn(__fmul_rn(i.d, exp_of(i.m - m)), __fmul_rn(j.d, exp_of(j.m - m)))};
}

__device__ __forceinline__ float from_lane(float part, int lane_xor) { return __shfl_xor_sync(~0u, part, lane_xor); }
__device__ __forceinline__ Normalizer from_lane(Normalizer part, int lane_xor) {
  return {from_lane(part.m, lane_xor), from_lane(part.d, lane_xor)};
}

// What all lanes of a row have together, for each of them. Every thread of the block takes part.
//   part_smem (WARPS), unused where a row has one warp or less
template <typename T, typename Combine>
__device__ __forceinline__ T of_row(T part, Combine combine, T* part_smem) {
#pragma unroll
  for (int other = LANES / WARPS / 2; other > 0; other /= 2) part = combine(part, from_lane(part, other));
  if constexpr (WARPS > 1) {
    if (threadIdx.x % 32 == 0) part_smem[threadIdx.x / 32] = part;
    __syncthreads();
    part = part_smem[threadIdx.x % WARPS];
#pragma unroll
    for (int other = WARPS / 2; other > 0; other /= 2) part = combine(part, from_lane(part, other));
  }
  return part;
}

struct Row {
  const Element* x;
  Element* y;
  long long n;  // 0 for a thread that is past the last row
};

__device__ __forceinline__ Row row_of_thread(const Params& p) {
  const long long row = static_cast<long long>(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
  const long long i = row / p.inner / p.middle, j = row / p.inner % p.middle, k = row % p.inner;
  return {p.x + i * p.x_outer + j * p.x_middle + k * p.x_inner, p.y + i * p.y_outer + j * p.y_middle + k * p.y_inner,
          row < p.rows ? p.n : 0};
}

// Algorithm 2, safe softmax: three reads and one write of each element
extern "C" __global__ void __launch_bounds__(THREADS, 1)
softmax_safe(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ float part_smem[];  // (2 x WARPS)
  const Row row = row_of_thread(p);
  const int lane = threadIdx.x % LANES;

  float m = LOWEST;                                                                                    // line 1
  for (long long k = lane; k < row.n; k += LANES) m = fmaxf(m, to_float(row.x[k * p.x_step]));           // lines 2 to 4
  m = of_row(m, [](float a, float b) { return fmaxf(a, b); }, part_smem);

  float d = 0.f;                                                                                       // line 5
  for (long long j = lane; j < row.n; j += LANES) d += exp_of(to_float(row.x[j * p.x_step]) - m);        // lines 6 to 8
  d = of_row(d, [](float a, float b) { return a + b; }, part_smem + WARPS);

  for (long long i = lane; i < row.n; i += LANES)                                                      // lines 9 to 11
    row.y[i * p.y_step] = from_float<Element>(exp_of(to_float(row.x[i * p.x_step]) - m) / d);
}

// Algorithm 3, online normalizer: two reads and one write of each element
extern "C" __global__ void __launch_bounds__(THREADS, 1)
softmax_online(__grid_constant__ const Params given) {
  const Params p = given;
  extern __shared__ Normalizer normalizer_smem[];  // (WARPS)
  const Row row = row_of_thread(p);
  const int lane = threadIdx.x % LANES;

  float m = LOWEST;                                    // line 1
  float d = 0.f;                                       // line 2
  for (long long j = lane; j < row.n; j += LANES) {    // line 3
    const float x_j = to_float(row.x[j * p.x_step]);
    const float m_new = fmaxf(m, x_j);                 // line 4
    d = d * exp_of(m - m_new) + exp_of(x_j - m_new);   // line 5
    m = m_new;
  }                                                    // line 6
  const Normalizer all = of_row(Normalizer{m, d}, merge, normalizer_smem);

  for (long long i = lane; i < row.n; i += LANES)      // lines 7 to 9
    row.y[i * p.y_step] = from_float<Element>(exp_of(to_float(row.x[i * p.x_step]) - all.m) / all.d);
}
