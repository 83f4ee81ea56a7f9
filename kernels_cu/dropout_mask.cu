// Which weights are kept (dropout.cuh), an element a thread: kept (batch x heads x Nq x Nk).
// Constants, from the schedule:  ELEMENT  float     DROPOUT  1     THREADS  threads of a block
#include "dropout.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
dropout_mask(__grid_constant__ const Params given) {
  const Params p = given;
  const long long at = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (at >= p.elements) return;
  const long long row = at / p.Nk, pair = row / p.Nq;
  p.kept[at] = dropout_of(p, pair / p.heads, pair % p.heads).keeps_at(row % p.Nq, at % p.Nk);
}
