// C = A B for float16 A (M x K) and B (K x N), float32 C: what a fast GEMM is made of, and so what it gets wrong. Three
// stages of cp.async, XOR-swizzled shared memory, ldmatrix, mma; K is split over blockIdx.z, and the block that finishes a
// tile last adds the parts. K and N are multiples of 8. `count` holds a zero for each tile, and does again afterwards.
constexpr int TILE = 64, DEPTH = 32, STAGES = 3, THREADS = 128;
constexpr int A_CHUNKS = DEPTH / 8, B_CHUNKS = TILE / 8;  // a chunk: 8 elements, 16 bytes
constexpr int A_STAGE = TILE * A_CHUNKS, B_STAGE = DEPTH * B_CHUNKS;

struct __align__(16) Chunk { unsigned short x[8]; };

// Where chunk `column` of a row lies in a tile: eight rows that are read together take all banks.
__device__ int swizzled(int row, int column, int columns) {
  return row * columns + (column ^ row * columns / 8 % columns);
}

__device__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Copies a chunk, or zeros where `inside` is false.
__device__ void copy(Chunk* to, const unsigned short* base, long long offset, bool inside) {
  const unsigned short* from = base + (inside ? offset : 0);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int NEWEST>
__device__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }

__device__ void load(unsigned (&r)[4], const Chunk* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

__device__ void load_transposed(unsigned (&r)[4], const Chunk* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}

__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Calls visit(offset in C, i, j, e) for the pairs of elements acc[i][j][e], acc[i][j][e + 1] of the thread.
template <class Visit>
__device__ void for_each_pair(int row0, int col0, int M, int N, const Visit& visit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 4; j++)
      for (int e = 0; e < 4; e += 2) {
        const int row = row0 + warp / 2 * 32 + i * 16 + lane / 4 + 4 * e;
        const int col = col0 + warp % 2 * 32 + j * 8 + lane % 4 * 2;
        if (row < M && col < N) visit((long long)row * N + col, i, j, e);
      }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm(const unsigned short* A, const unsigned short* B, float* C, float* parts, unsigned* count, int M, int N, int K) {
  __shared__ Chunk A_smem[STAGES * A_STAGE], B_smem[STAGES * B_STAGE];
  __shared__ bool finishes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = blockIdx.y * TILE, col0 = blockIdx.x * TILE;
  const int steps = (K + DEPTH - 1) / DEPTH, share = (steps + gridDim.z - 1) / gridDim.z;
  const int first = blockIdx.z * share, last = min(steps, first + share);

  auto fetch = [&](int step) {
    const int stage = step % STAGES;
    for (int i = threadIdx.x; i < A_STAGE; i += THREADS) {
      const int row = i / A_CHUNKS, column = i % A_CHUNKS, k = step * DEPTH + 8 * column;
      const bool inside = row0 + row < M && k < K;
      copy(A_smem + stage * A_STAGE + swizzled(row, column, A_CHUNKS), A, (long long)(row0 + row) * K + k, inside);
    }
    for (int i = threadIdx.x; i < B_STAGE; i += THREADS) {
      const int row = i / B_CHUNKS, column = i % B_CHUNKS, k = step * DEPTH + row, n = col0 + 8 * column;
      const bool inside = k < K && n < N;
      copy(B_smem + stage * B_STAGE + swizzled(row, column, B_CHUNKS), B, (long long)k * N + n, inside);
    }
  };

  float acc[2][4][4] = {};  // (32 x 32) of the warp's quarter of the tile
  for (int step = first; step < first + STAGES - 1; step++) {
    if (step < last) fetch(step);
    commit();  // prologue
  }
  for (int step = first; step < last; step++) {
    wait<STAGES - 2>();
    __syncthreads();  // the stage is there, and everybody is done with the one before
    if (step + STAGES - 1 < last) fetch(step + STAGES - 1);
    commit();  // loop
    const Chunk* A_tile = A_smem + step % STAGES * A_STAGE;
    const Chunk* B_tile = B_smem + step % STAGES * B_STAGE;
    for (int k = 0; k < DEPTH / 16; k++) {
      unsigned a[2][4], b[2][4];
      for (int i = 0; i < 2; i++)
        load(a[i], A_tile + swizzled(warp / 2 * 32 + i * 16 + lane % 16, k * 2 + lane / 16, A_CHUNKS));
      for (int j = 0; j < 2; j++)
        load_transposed(b[j], B_tile + swizzled(k * 16 + lane % 16, warp % 2 * 4 + 2 * j + lane / 16, B_CHUNKS));
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) multiply(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // The block's part of its tile goes to global memory; each thread later adds the parts of the elements that it holds.
  const long long size = (long long)M * N;
  for_each_pair(row0, col0, M, N, [&](long long at, int i, int j, int e) {
    *reinterpret_cast<float2*>(parts + blockIdx.z * size + at) = make_float2(acc[i][j][e], acc[i][j][e + 1]);
  });
  __threadfence();
  __syncthreads();  // every part is stored
  if (threadIdx.x == 0) finishes = atomicInc(count + blockIdx.y * gridDim.x + blockIdx.x, gridDim.z - 1) == gridDim.z - 1;
  __syncthreads();  // everybody knows whether the block is the last
  if (!finishes) return;
  for_each_pair(row0, col0, M, N, [&](long long at, int, int, int) {
    float2 sum = make_float2(0.f, 0.f);
    for (int z = 0; z < gridDim.z; z++) {
      const float2 part = *reinterpret_cast<const float2*>(parts + z * size + at);
      sum.x += part.x;
      sum.y += part.y;
    }
    *reinterpret_cast<float2*>(C + at) = sum;
  });
}
