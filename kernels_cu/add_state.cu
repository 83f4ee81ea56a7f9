// What a call made of some keys, O_part and its log-sum-exp, merged into sums in float32 over the keys before, in place: a warp a row.
//   O = (e^(L - m) O + e^(L_part - m) O_part) / (e^(L - m) + e^(L_part - m)),  L = m + log(e^(L - m) + e^(L_part - m)),  m = max(L, L_part)
// Constants, from the schedule:  ELEMENT  of O_part     DV  columns of O     THREADS  threads of a block
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
add_state(__grid_constant__ const Params given) {
  const Params p = given;
  const int lane = threadIdx.x % 32;
  const long long at = static_cast<long long>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  if (at >= p.rows) return;
  const long long pair = at / p.Nq, row = at % p.Nq, batch = pair / p.heads, head = pair % p.heads;
  float* const L = p.L.of(batch, head) + row * p.L.row;
  float before = 0, now = 0;
  if (lane == 0) {
    before = *L;
    now = p.L_part.of(batch, head)[row * p.L_part.row];
  }
  before = __shfl_sync(~0u, before, 0);
  now = __shfl_sync(~0u, now, 0);
  const float m = fmaxf(before, now), base = m == NEG_INF ? 0.0f : m;  // -inf less -inf is no number
  const float weight_before = expf(before - base), weight_now = expf(now - base);
  const float sum = weight_before + weight_now, total = sum == 0 ? 1.0f : sum;  // where neither saw a key
  if (lane == 0) *L = m + logf(total);
  const float a = weight_before / total, b = weight_now / total;
  float* const O = p.O.of(batch, head) + row * p.O.row;
  const Element* const O_part = p.O_part.of(batch, head) + row * p.O_part.row;
#pragma unroll
  for (int first = 0; first < DV; first += 32) {
    const int col = first + lane;
    if (col < DV) O[col] = a * O[col] + b * to_float(O_part[col]);
  }
}
