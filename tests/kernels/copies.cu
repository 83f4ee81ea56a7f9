// Tiles through asynchronous copies and matrices of shared memory, some of them faulty: tests/test_ptx_compiled_matrices.py.
__device__ unsigned place(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy16(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(place(to)), "l"(from), "r"(bytes)); }
__device__ void copy4(void* to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(place(to)), "l"(from)); }
__device__ void commit() { asm volatile("cp.async.commit_group;"); }
template<int n> __device__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(n)); }

// C[i] += the sums of pairs of tiles that two stages bring; `fault`: 1 no wait, 2 no barrier behind it, 3 the next copy overwrites
// what others still read, 4 a copy that nobody waits for, 5 a store into bytes in flight, 6 a commit by some lanes.
extern "C" __global__ void stages(const float4* A, float4* C, int n, int fault) {
  __shared__ float4 tile[2][64]; int t = threadIdx.x; const float4* mine = A + blockIdx.x*64*n; float4 s = {0, 0, 0, 0};
  copy16(&tile[0][t], mine + t, 16); commit();
  for (int k = 0; k < n; k++) {
    if (k + 1 < n) copy16(&tile[(k+1) & 1][t], mine + 64*(k+1) + t, (k & 1) && t == 5 ? 0 : 16);
    if (fault != 6 || t & 1 || k) commit();
    if (fault == 5 && k == 1) tile[0][t].x = 1;
    if (fault != 1) { if (k + 1 < n) wait<1>(); else wait<0>(); }
    if (fault != 2) __syncthreads();
    float4 x = tile[k & 1][63 - t]; s.x += x.x; s.y += x.y; s.z += x.z; s.w += x.w;
    if (fault != 3) __syncthreads(); }
  if (fault == 4) copy16(&tile[0][t], mine + t, 16);
  C[blockIdx.x*64 + t] = s; }

extern "C" __global__ void words(const float* A, float* C, int n) {
  __shared__ float s[128]; int t = threadIdx.x, i = blockIdx.x*128 + t; if (i < n) copy4(s + t, A + i); else s[t] = 0;
  asm volatile("cp.async.wait_all;"); __syncthreads(); C[i] = s[127 - t]; }

// The source of a copy is written in the same launch.
extern "C" __global__ void inplace(float* A, float* C, int n) {
  __shared__ float s[128]; int t = threadIdx.x; copy4(s + t, A + t); asm volatile("cp.async.wait_all;"); __syncthreads();
  A[127 - t] = s[t]; C[t] = 0; }

// Rows of 16 bytes of a matrix, in order and turned; `fault`: 1 no barrier of the warp, 2 an address beyond shared memory.
extern "C" __global__ void matrices(const uint4* A, unsigned* C, int fault) {
  __shared__ uint4 s[64]; int t = threadIdx.x, w = t / 32, l = t % 32; s[t] = A[blockIdx.x*64 + t]; if (fault != 1) __syncwarp();
  unsigned a, b, c, d, p = place(s + 32*w + (l ^ (l >> 3 & 3))) + (fault == 2 && t == 63 ? 64 : 0);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(p));
  unsigned x = a ^ b*3 ^ c*5 ^ d*7;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(p));
  x ^= a*11 ^ b*13 ^ c*17 ^ d*19;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(p));
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(c) : "r"(p));
  C[blockIdx.x*64 + t] = x ^ a*23 ^ b*29 ^ c*31; }
