// Products by cuBLAS beside the program's own: tests/test_program.py. The declarations are here, since cuBLAS's headers need not be.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_fp16.h>
#include <vector>

typedef void *Handle;
extern "C" {
int cublasCreate_v2(Handle *);
int cublasDestroy_v2(Handle);
int cublasSetPointerMode_v2(Handle, int);
int cublasSgemm_v2(Handle, int, int, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);
int cublasDgemm_v2(
    Handle, int, int, int, int, int, const double *, const double *, int, const double *, int, const double *, double *, int);
int cublasSgemv_v2(Handle, int, int, int, const float *, const float *, int, const float *, int, const float *, float *, int);
int cublasGemmStridedBatchedEx(
    Handle, int, int, int, int, int, const void *, const void *, int, int, long long, const void *, int, int, long long, const void *, void *,
    int, int, long long, int, int, int);
int cublasSgemmBatched(
    Handle, int, int, int, int, int, const float *, const float *const *, int, const float *const *, int, const float *, float *const *, int, int);
int cublasLtCreate(Handle *);
int cublasLtMatmulDescCreate(Handle *, int, int);
int cublasLtMatmulDescSetAttribute(Handle, int, const void *, size_t);
int cublasLtMatrixLayoutCreate(Handle *, int, uint64_t, uint64_t, int64_t);
int cublasLtMatmul(
    Handle, Handle, const void *, const void *, Handle, const void *, Handle, const void *, const void *, Handle, void *, Handle, const void *,
    void *, size_t, cudaStream_t);
}

static unsigned seed = 1;
static int draw(int below) { return (seed = seed * 1664525u + 1013904223u) / 65536 % below; }

// `count` matrices of rows x cols by columns, `ld` apart, as the device has them, with small whole numbers: all sums are exact.
template <typename T> struct Matrices {
    int rows, cols, ld, count;
    std::vector<T> host;
    T *device = nullptr;
    Matrices(int rows, int cols, int count) : rows(rows), cols(cols), ld((rows ? rows : 1) + draw(3)), count(count), host(step() * count) {
        for (T &value : host) value = T(float(draw(9) - 4));
        cudaMalloc(&device, host.size() * sizeof(T));
        cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    }
    ~Matrices() { cudaFree(device); }
    long long step() const { return (long long)ld * cols; }
    double at(bool transposed, int number, int i, int j) const {
        return double(float(transposed ? host[number * step() + j + i * ld] : host[number * step() + i + j * ld]));
    }
};

// Elements of C, as the device has it now, that are not max(alpha op(A) op(B) + beta C + bias, least).
template <typename T, typename R>
static int wrong(const Matrices<T> &a, const Matrices<T> &b, const Matrices<R> &c, bool ta, bool tb, int k, double alpha, double beta, bool relu = false) {
    std::vector<R> found(c.host.size());
    cudaMemcpy(found.data(), c.device, found.size() * sizeof(R), cudaMemcpyDeviceToHost);
    int count = 0;
    for (int number = 0; number < c.count; number++)
        for (int j = 0; j < c.cols; j++)
            for (int i = 0; i < c.ld; i++) {
                double want = i < c.rows ? beta * c.at(false, number, i, j) : c.at(false, number, i, j);
                if (i < c.rows) {
                    for (int l = 0; l < k; l++) want += alpha * a.at(ta, number, i, l) * b.at(tb, number, l, j);
                    if (relu && (want += i) < 0) want = 0;
                }
                count += double(float(found[number * c.step() + i + j * c.ld])) != want;
            }
    return count;
}

__global__ void read(float *x, float *y) { y[threadIdx.x] = x[threadIdx.x]; }

int main(int argc, char **argv) {
    Handle handle, lt;
    if (cublasCreate_v2(&handle) || cublasLtCreate(&lt)) return 1;
    if (argc > 1 && !strcmp(argv[1], "unwritten")) {
        float *a, *c, one = 1, none = 0;
        cudaMalloc(&a, 64 * 4);
        cudaMalloc(&c, 64 * 4);
        cudaMemset(a, 0, 63 * 4);
        cublasSgemm_v2(handle, 0, 0, 8, 8, 8, &one, a, 8, a, 8, &none, c, 8);
        read<<<1, 7>>>(c, a);
        read<<<1, 8>>>(c, a);
        cudaDeviceSynchronize();
        return 0;
    }
    int bad = 0, calls = 0;
    for (int round = 0; round < 24; round++) {
        int m = 1 + draw(9), n = 1 + draw(9), k = draw(9), count = draw(4), beta = draw(2) * 2, two = 2;
        bool ta = draw(2), tb = draw(2);
        auto rows = [&](bool t, int r, int c) { return t ? c : r; };
#define OPERANDS(T, R, count) \
    Matrices<T> a(rows(ta, m, k), rows(ta, k, m), count), b(rows(tb, k, n), rows(tb, n, k), count); \
    Matrices<R> c(m, n, count)
        {
            OPERANDS(float, float, 1);
            float scalars[2] = {float(two), float(beta)}, *there;
            cudaMalloc(&there, sizeof scalars);
            cudaMemcpy(there, scalars, sizeof scalars, cudaMemcpyHostToDevice);
            bool away = round % 2;
            cublasSetPointerMode_v2(handle, away);
            float *from = away ? there : scalars;
            bad += cublasSgemm_v2(handle, ta, tb, m, n, k, from, a.device, a.ld, b.device, b.ld, from + 1, c.device, c.ld);
            cublasSetPointerMode_v2(handle, 0);
            bad += wrong(a, b, c, ta, tb, k, two, beta);
            calls++;
        }
        {
            Matrices<float> a(m, n, 1), x(1, ta ? m : n, 1), y(1, ta ? n : m, 1);
            float alpha = two, plus = beta;
            bad += cublasSgemv_v2(handle, ta, m, n, &alpha, a.device, a.ld, x.device, x.ld, &plus, y.device, y.ld);
            bad += wrong(x, a, y, false, !ta, ta ? m : n, two, beta);  // its transpose
        }
        {
            OPERANDS(double, double, 1);
            double alpha = two, plus = beta;
            bad += cublasDgemm_v2(handle, ta, tb, m, n, k, &alpha, a.device, a.ld, b.device, b.ld, &plus, c.device, c.ld);
            bad += wrong(a, b, c, ta, tb, k, two, beta);
        }
        {
            OPERANDS(half, half, count);  // CUDA_R_16F, CUBLAS_COMPUTE_32F
            float alpha = two, plus = beta;
            bad += cublasGemmStridedBatchedEx(
                handle, ta, tb, m, n, k, &alpha, a.device, 2, a.ld, a.step(), b.device, 2, b.ld, b.step(), &plus, c.device, 2, c.ld, c.step(), count, 68, 0);
            bad += wrong(a, b, c, ta, tb, k, two, beta);
        }
        {
            OPERANDS(int8_t, int, count);  // CUDA_R_8I, CUDA_R_32I, CUBLAS_COMPUTE_32I
            bad += cublasGemmStridedBatchedEx(
                handle, ta, tb, m, n, k, &two, a.device, 3, a.ld, a.step(), b.device, 3, b.ld, b.step(), &beta, c.device, 10, c.ld, c.step(), count, 72, 0);
            bad += wrong(a, b, c, ta, tb, k, two, beta);
        }
        {
            OPERANDS(float, float, count);
            std::vector<float *> all;
            for (int i = 0; i < count; i++) all.push_back(a.device + i * a.step());
            for (int i = 0; i < count; i++) all.push_back(b.device + i * b.step());
            for (int i = 0; i < count; i++) all.push_back(c.device + i * c.step());
            float **there, alpha = two, plus = beta;
            cudaMalloc(&there, (all.size() + 1) * 8);
            cudaMemcpy(there, all.data(), all.size() * 8, cudaMemcpyHostToDevice);
            bad += cublasSgemmBatched(
                handle, ta, tb, m, n, k, &alpha, there, a.ld, there + count, b.ld, &plus, there + 2 * count, c.ld, count);
            bad += wrong(a, b, c, ta, tb, k, two, beta);
            cudaFree(there);
        }
        {
            OPERANDS(float, float, 1);  // a bias for each row, then ReLU
            Handle product, layouts[3];
            float alpha = two, plus = beta, *bias;
            std::vector<float> numbers(m);
            for (int i = 0; i < m; i++) numbers[i] = i;
            cudaMalloc(&bias, m * 4);
            cudaMemcpy(bias, numbers.data(), m * 4, cudaMemcpyHostToDevice);
            int flags[2] = {ta, tb}, epilogue = 6;
            bad += cublasLtMatmulDescCreate(&product, 68, 0);
            bad += cublasLtMatmulDescSetAttribute(product, 3, flags, 4) + cublasLtMatmulDescSetAttribute(product, 4, flags + 1, 4);
            bad += cublasLtMatmulDescSetAttribute(product, 7, &epilogue, 4) + cublasLtMatmulDescSetAttribute(product, 8, &bias, 8);
            bad += cublasLtMatrixLayoutCreate(layouts, 0, a.rows, a.cols, a.ld);
            bad += cublasLtMatrixLayoutCreate(layouts + 1, 0, b.rows, b.cols, b.ld) + cublasLtMatrixLayoutCreate(layouts + 2, 0, m, n, c.ld);
            bad += cublasLtMatmul(
                lt, product, &alpha, a.device, layouts[0], b.device, layouts[1], &plus, c.device, layouts[2], c.device, layouts[2], nullptr, nullptr,
                0, 0);
            bad += wrong(a, b, c, ta, tb, k, two, beta, true);
        }
    }
    float one = 1, *small;
    cudaMalloc(&small, 4 * 4);
    int short_ld = cublasSgemm_v2(handle, 0, 0, 2, 2, 2, &one, small, 1, small, 2, &one, small, 2);
    int outside = cublasSgemm_v2(handle, 0, 0, 2, 2, 3, &one, small, 2, small, 3, &one, small, 2);
    cublasDestroy_v2(handle);
    int gone = cublasSgemm_v2(handle, 0, 0, 2, 2, 2, &one, small, 2, small, 2, &one, small, 2);
    printf("%d rounds, %d wrong; %d %d %d\n", calls, bad, short_ld, outside, gone);
    return 0;
}
