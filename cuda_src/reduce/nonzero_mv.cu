// y = k v for a vector k [n] with many zeros and v [n, m]: rows of v whose k is 0 are not read. fp32 sums, one rounding.
// Two launches: blocks own 32 * N columns and `part_rows` rows each and write fp32 sums [parts, m]; then threads add the
// parts of a column in their order. In a block, warps take 32 rows at a time: a lane reads one k, a vote tells which
// rows count, and a lane owns N consecutive columns of each. Warps are added in their order: results do not vary.
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kMvWarps = 8, kMvTogether = 4;  // rows in flight

template <typename T, int N>
__global__ void __launch_bounds__(256) nonzero_mv_parts(const T* k, const T* v, float* sums, i64 n, i64 m, i64 v_row, i64 part_rows) {
    __shared__ float partial[kMvWarps][kWarp * N];
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 column = (static_cast<i64>(blockIdx.x) * kWarp + lane) * N;
    const i64 first = static_cast<i64>(blockIdx.y) * part_rows, end = first + part_rows < n ? first + part_rows : n;
    const T* const own = v + column;
    float acc[N];
#pragma unroll
    for (int e = 0; e < N; ++e) acc[e] = 0.0f;
    for (i64 base = first + warp * kWarp; base < end; base += kMvWarps * kWarp) {
        float value[1] = {0.0f};
        if (base + lane < end) load_keep<T, 1>(k + base + lane, value);
        u32 rows = __ballot_sync(0xffffffffu, value[0] != 0.0f);  // NaN counts
        while (rows != 0u) {
            float x[kMvTogether][N], factor[kMvTogether];
#pragma unroll
            for (int u = 0; u < kMvTogether; ++u) {
                const bool there = rows != 0u;
                const int at = there ? 31 - __clz(static_cast<int>(rows)) : 0;
                factor[u] = __shfl_sync(0xffffffffu, value[0], at);
#pragma unroll
                for (int e = 0; e < N; ++e) x[u][e] = 0.0f;
                if (there && column < m) load_stream<T, N>(own + (base + at) * v_row, x[u]);
                if (!there) factor[u] = 0.0f;
                rows &= ~(there ? 1u << at : 0u);
            }
#pragma unroll
            for (int u = 0; u < kMvTogether; ++u)
#pragma unroll
                for (int e = 0; e < N; ++e) acc[e] = fmaf(factor[u], x[u][e], acc[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < N; ++e) partial[warp][e * kWarp + lane] = acc[e];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kWarp * N; i += 256) {
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < kMvWarps; ++w) total += partial[w][i];
        const i64 to = (static_cast<i64>(blockIdx.x) * kWarp + i % kWarp) * N + i / kWarp;
        if (to < m) sums[static_cast<i64>(blockIdx.y) * m + to] = total;
    }
}

template <typename T>
__global__ void __launch_bounds__(256) nonzero_mv_sum(const float* sums, T* y, i64 parts, i64 m) {
    const i64 column = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (column >= m) return;
    float total[1] = {0.0f};
    for (i64 p = 0; p < parts; ++p) total[0] += sums[p * m + column];
    store<T, 1>(y + column, total);
}

}  // namespace rtk
