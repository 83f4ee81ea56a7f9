// Small kernels of many kinds, four of them faulty (nosync, beyond, samespot, unwritten): tests/test_ptx_compiled.py.
extern "C" __global__ void gemm16(const float* A, const float* B, float* C, int n) {
  __shared__ float a[16][16], b[16][16];
  int x = threadIdx.x, y = threadIdx.y, c = blockIdx.x*16+x, r = blockIdx.y*16+y; float s = 0;
  for (int k = 0; k < n; k += 16) {
    a[y][x] = A[r*n + k + x]; b[y][x] = B[(k+y)*n + c]; __syncthreads();
    for (int i = 0; i < 16; i++) s += a[y][i]*b[i][x];
    __syncthreads(); }
  C[r*n+c] = s; }
extern "C" __global__ void reduce(const float* A, float* C, int n) {
  __shared__ float s[256]; int t = threadIdx.x, i = blockIdx.x*256+t; s[t] = i < n ? A[i] : 0; __syncthreads();
  for (int k = 128; k; k /= 2) { if (t < k) s[t] += s[t+k]; __syncthreads(); }
  if (!t) C[blockIdx.x] = s[0]; }
extern "C" __global__ void nosync(const float* A, float* C, int n) {
  __shared__ float s[256]; int t = threadIdx.x, i = blockIdx.x*256+t; s[t] = i < n ? A[i] : 0; __syncthreads();
  for (int k = 128; k; k /= 2) { if (t < k) s[t] += s[t+k]; }
  if (!t) C[blockIdx.x] = s[0]; }
extern "C" __global__ void transpose(const float* A, float* C, int n) {
  __shared__ float s[32][33]; int x = threadIdx.x, y = threadIdx.y;
  for (int k = y; k < 32; k += 8) s[k][x] = A[(blockIdx.y*32+k)*n + blockIdx.x*32+x]; __syncthreads();
  for (int k = y; k < 32; k += 8) C[(blockIdx.x*32+k)*n + blockIdx.y*32+x] = s[x][k]; }
extern "C" __global__ void saxpy(const float* A, float* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x; if (i < n) C[i] = 2.5f*A[i] + C[i]; }
extern "C" __global__ void beyond(const float* A, float* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x; C[i] = A[i+1]; }
extern "C" __global__ void samespot(const float* A, float* C, int n) { C[blockIdx.x/2*blockDim.x+threadIdx.x] = A[threadIdx.x]; }
extern "C" __global__ void unwritten(const float* A, float* C, int n) { __shared__ float s[64]; if (threadIdx.x < 60) s[threadIdx.x]=A[threadIdx.x]; __syncthreads(); C[threadIdx.x] = s[threadIdx.x]; }
extern "C" __global__ void spmv(const int* P, const int* J, const float* V, const float* X, float* Y, int n) {
  int i = blockIdx.x*blockDim.x+threadIdx.x; if (i >= n) return; float s = 0; for (int k = P[i]; k < P[i+1]; k++) s += V[k]*X[J[k]]; Y[i] = s; }
extern "C" __global__ void softmax(const float* A, float* C, int n) {
  int w = threadIdx.x/32, l = threadIdx.x%32, r = blockIdx.x*4+w; float m = -1e30f, s = 0;
  for (int k = l; k < n; k += 32) m = fmaxf(m, A[r*n+k]);
  for (int o = 16; o; o /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
  for (int k = l; k < n; k += 32) s += expf(A[r*n+k]-m);
  for (int o = 16; o; o /= 2) s += __shfl_xor_sync(~0u, s, o);
  for (int k = l; k < n; k += 32) C[r*n+k] = expf(A[r*n+k]-m)/s; }
extern "C" __global__ void stencil(const double* A, double* C, int n) { int x = blockIdx.x*32+threadIdx.x, y = blockIdx.y*8+threadIdx.y;
  if (x > 0 && y > 0 && x < n-1 && y < n-1) C[y*n+x] = 0.25*(A[y*n+x-1]+A[y*n+x+1]+A[(y-1)*n+x]+A[(y+1)*n+x]) - A[y*n+x]; }
extern "C" __global__ void vec4(const float4* A, float4* C, int n) { __shared__ float4 s[64]; s[threadIdx.x]=A[blockIdx.x*64+threadIdx.x]; __syncthreads(); C[blockIdx.x*64+threadIdx.x]=s[63-threadIdx.x]; }
extern "C" __global__ void bytes(const unsigned char* A, short* C, int n) { __shared__ unsigned char s[64]; s[threadIdx.x]=A[threadIdx.x]; __syncthreads(); C[threadIdx.x]=(short)(signed char)s[threadIdx.x ^ 1] - 3; }
extern "C" __global__ void ints(const int* A, int* C, int n) { int i=blockIdx.x*64+threadIdx.x; int a=A[i], b=A[63-threadIdx.x]; unsigned u=a; long long w=(long long)a*b;
  C[i] = (a>>(b&31)) ^ (u<<7) ^ min(a,b) ^ max(u,(unsigned)b) ^ (int)(w>>13) ^ __popc(a) ^ (a<b ? a*b : a-b) ^ (int)(u>>(b&63)) ^ __umulhi(u,b) ^ (a & ~b | 77) ^ (a/7) ^ (u%11) ^ __clz(b) ^ __brev(a); }
extern "C" __global__ void special(const float* A, float* C, int n) { int i=blockIdx.x*64+threadIdx.x; float a=A[i], b=A[63-threadIdx.x];
  C[i] = a*b + fminf(a,b)*fmaxf(b,a) - (a < b ? a : -b)/3.0f; }
extern "C" __global__ void floats(const float* A, float* C, int n) { int i=blockIdx.x*64+threadIdx.x; float a=A[i], b=A[63-threadIdx.x]; double d=a;
  C[i] = a/b + sqrtf(fabsf(a)) - fminf(a,-b)*fmaxf(a,b) + (float)(d*b+1.0) + (float)i + (float)(d > b ? d : 2.0) + __int_as_float(__float_as_int(a)^0x80000000) + (float)(int)a; }
extern "C" __global__ void hist(const unsigned char* A, unsigned* C, int n) { __shared__ unsigned s[64]; if (threadIdx.x < 64) s[threadIdx.x] = 0; __syncthreads();
  for (int i = blockIdx.x*blockDim.x+threadIdx.x; i < n; i += gridDim.x*blockDim.x) atomicAdd(s + A[i] % 64, 1u);
  __syncthreads(); if (threadIdx.x < 64) atomicAdd(C + threadIdx.x, s[threadIdx.x]); }
extern "C" __global__ void atoms(const int* A, int* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x, a = A[i], k = (a & 7) * 16, r = 0; unsigned* U = (unsigned*)C;
  r ^= atomicAdd(C+k, a) ^ atomicMin(C+k+1, a) ^ atomicMax(C+k+2, a) ^ atomicMin(U+k+3, (unsigned)a) ^ atomicMax(U+k+4, (unsigned)a);
  r ^= atomicInc(U+k+5, 5u) ^ atomicDec(U+k+6, 7u) ^ atomicAnd(C+k+7, a) ^ atomicOr(C+k+8, a) ^ atomicXor(C+k+9, a) ^ atomicExch(C+k+10, a) ^ atomicCAS(C+k+11, a & 1, i);
  if (n) atomicAdd((float*)C+k+12, a * 1e-6f); atomicAdd((unsigned long long*)(C+k+14), (unsigned long long)a); C[128+i] = r; }
extern "C" __global__ void permute(const int* A, int* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x; C[A[i]] = A[A[i]] + (A[i] % 3 ? i : A[i] / 3); if (A[i] & 1) C[n + i] = i; }
extern "C" __global__ void mixed(const int* A, int* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x; atomicAdd(C + A[i] % 4, 1); C[8 + i] = C[A[i] % 4]; }
extern "C" __global__ void maybe(const int* A, int* C, int n) { int i = blockIdx.x*64+threadIdx.x, a = A[i], x; __shared__ int s[64]; s[threadIdx.x] = a;
  if (a & 1) x = A[63 - threadIdx.x]; __syncthreads(); if (a & n) C[i] = x + s[63 - threadIdx.x]; }
// Sums of floats in global memory, in loops and between barriers; then others look at them, or add in another type.
extern "C" __global__ void scatter(const float* A, float* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x, j = (i * 37 ^ i >> 3) % 50;
  for (int k = 0; k < 3; k++) { atomicAdd(C + j + k, A[i]); __syncthreads(); atomicAdd(C + (j * 7 + k) % 50, A[i] * 0.3f); } }
extern "C" __global__ void looked(const float* A, float* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x;
  atomicAdd(C + 100 + blockIdx.x, A[i]); __syncthreads(); if (threadIdx.x < n) C[blockIdx.x] = C[100 + blockIdx.x]; }
extern "C" __global__ void twofold(const float* A, float* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x;
  atomicAdd(C + i % 7, A[i]); atomicAdd((double*)(C + 64) + i % 5, (double)A[i]); }
extern "C" __global__ void counted(const int* A, int* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x, s = 0;
  for (int k = 0; k < 3; k++) { s = 3*s + __syncthreads_count(A[i] > k) + 100*__syncthreads_or(A[i] == 5 + k) + 1000*__syncthreads_and(A[i] >= k); }
  C[i] = s; }
extern "C" __global__ void volatiles(const float* A, float* C, int n) { __shared__ volatile float s[128]; int t = threadIdx.x;
  s[t] = A[t]; if (n) __syncthreads(); C[t] = s[127 - t]; }
struct Table { float x[8]; int n; };
extern "C" __global__ void table(const float* A, float* C, const __grid_constant__ Table v) { int i = blockIdx.x*blockDim.x+threadIdx.x; C[i] = A[i] * v.x[i % v.n]; }
// Atomics whose results are used: places in a list, and three numbers of each block's own, behind a branch; then two for one place.
extern "C" __global__ void picked(const int* A, int* C, int n) { int i = blockIdx.x*blockDim.x+threadIdx.x, a = A[i]; __shared__ int s[4];
  if (threadIdx.x < 4) s[threadIdx.x] = 0; __syncthreads(); if (a % 3 == 0) { int k = atomicAdd(C, 1); C[64 + k] = a; }
  int r = atomicMax(s + (a & 3), a); __syncthreads(); if (a & 1) r += atomicExch(C + 1 + (a & 7), i) + atomicCAS(C + 16 + (a & 3), 0, i);
  C[5200 + i] = r + s[a & 3]; if (n && threadIdx.x == 7) C[10400 + blockIdx.x] = atomicInc((unsigned*)C + n, 5u); }
// Local memory: an array with indices of each lane's own, of which nobody may have written the place, or beyond the end.
extern "C" __global__ void own(const int* A, int* C, int n) { int i = blockIdx.x*64+threadIdx.x, a = A[i], s = 0; int x[16]; short y[8];
  for (int k = 0; k < n; k++) { x[((k * a) & 15) + (n == 7) * 60] = k + a; y[(k ^ a) & 7] = (short)(a - k); if (a & 1) x[k & 15] ^= i; }
  for (int k = 0; k < 16; k += 2) s = s * 3 + x[(k + a) & 15] + y[(a >> k) & 7]; C[i] = s; }
// An assertion that holds, or not: it has a finding.
#include <assert.h>
extern "C" __global__ void sure(const int* A, int* C, int n) { int i = blockIdx.x*64+threadIdx.x; assert(A[i] < n); C[i] = 2 * A[i]; }
// Binary search in an array that nobody writes.
extern "C" __global__ void found(const int* A, int* C, int n) { int i = blockIdx.x*64+threadIdx.x, low = 0, high = n, want = i * 3 % 700;
  while (low < high) { int middle = (low + high) / 2; if (A[middle] < want) low = middle + 1; else { high = middle; if (A[middle] == want) break; } } C[i] = low; }
extern "C" __global__ void logs(const float* A, float* C, int n) { int i = blockIdx.x*64+threadIdx.x; C[i] = __log2f(A[i]) + __log2f(A[i] * 1e-3f); }
