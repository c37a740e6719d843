// Keys of RWKV-7: with t = k * kk, o_kk = t / sqrt(sum of t^2 over the head + 1e-12), o_kka = o_kk * a, and
// o_k = k * (1 + (a - 1) * ka), in fp32 with one rounding each. k, a and results: [tokens, heads, width], dense; kk and
// ka: [heads, width]. A warp owns one head of one token, a lane N consecutive elements of every 32 * N; k and kk are
// read again for the second pass, from L1 as a rule. Grid: any.
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

template <typename T, int N>
__global__ void __launch_bounds__(256)
    rwkv_key(const T* k, const T* kk, const T* a, const T* ka, T* o_k, T* o_kk, T* o_kka, i64 rows, i64 heads, i64 width) {
    const i64 warps = static_cast<i64>(gridDim.x) * (blockDim.x / kWarp);
    const i64 first = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    const i64 lane = threadIdx.x % kWarp * N;
    for (i64 row = first; row < rows; row += warps) {
        const i64 from = row * width, of_head = row % heads * width;
        float total = 0.0f;
        for (i64 i = lane; i < width; i += kWarp * N) {
            float key[N], factor[N];
            load_keep<T, N>(k + from + i, key);
            load_keep<T, N>(kk + of_head + i, factor);
#pragma unroll
            for (int e = 0; e < N; ++e) total += key[e] * factor[e] * (key[e] * factor[e]);
        }
        const float inverse = 1.0f / sqrtf(warp_reduce<Sum>(total) + 1e-12f);
        for (i64 i = lane; i < width; i += kWarp * N) {
            float key[N], factor[N], rate[N], mix[N], mixed[N];
            load_keep<T, N>(k + from + i, key);
            load_keep<T, N>(kk + of_head + i, factor);
            load_stream<T, N>(a + from + i, rate);
            load_keep<T, N>(ka + of_head + i, mix);
#pragma unroll
            for (int e = 0; e < N; ++e) {
                mixed[e] = key[e] * fmaf(rate[e] - 1.0f, mix[e], 1.0f);
                key[e] *= factor[e] * inverse;
                rate[e] *= key[e];
            }
            store<T, N>(o_k + from + i, mixed);
            store<T, N>(o_kk + from + i, key);
            store<T, N>(o_kka + from + i, rate);
        }
    }
}

}  // namespace rtk
