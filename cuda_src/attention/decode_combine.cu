// Merges the splits of attention_decode and mla_decode: one block of four warps per row of [batch, lq, heads]. Each
// warp sums every fourth split, 4 columns per lane, and the warps' sums are added in order. Blocks may start before the
// splits are written (ptx/pdl.cuh).
#include "attention/softmax_state.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(128)
    attention_combine(const float* parts, const float* part_lse, const float* sinks, T* out, float* lse, i64 rows, i64 splits,
                      i64 lq, i64 heads, i64 d_v, i64 out_batch, i64 out_row, i64 out_head) {
    __shared__ float weights[128];
    __shared__ __align__(16) float sums[4][512];  // of heads up to 512 wide: latents (mla_decode.cu)
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int count = static_cast<int>(splits), width = static_cast<int>(d_v);
    const u32 token = blockIdx.x / static_cast<u32>(heads);  // a grid has fewer than 2^31 blocks
    const i64 row = blockIdx.x, head = blockIdx.x - token * static_cast<u32>(heads);
    const i64 query = token % static_cast<u32>(lq), batch = token / static_cast<u32>(lq);
    const float sink = sinks == nullptr ? negative_infinity() : sinks[head];
    ptx::wait_for_previous();
    float own[4], top = sink;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // every warp has them all
        own[i] = lane + i * kWarp < count ? part_lse[(lane + i * kWarp) * rows + row] : negative_infinity();
        top = fmaxf(top, own[i]);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, offset));
    const float from = top == negative_infinity() ? 0.0f : top;
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float weight = ptx::ex2((own[i] - from) * kLog2e);
        total += weight;
        if (warp == i) weights[lane + i * kWarp] = weight;
    }
    total = warp_reduce<Sum>(total) + ptx::ex2((sink - from) * kLog2e);
    __syncthreads();
    for (int column = lane * 4; column < width; column += kWarp * 4) {
        float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
        for (int s = warp; s < count; s += 4) {
            float part[4];
            load_keep<float, 4>(parts + (s * rows + row) * d_v + column, part);
#pragma unroll
            for (int c = 0; c < 4; ++c) value[c] += weights[s] * part[c];
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[warp][column + c] = value[c];
    }
    __syncthreads();
    const float times = total == 0.0f ? 0.0f : 1.0f / total;
    T* const to = out + batch * out_batch + query * out_row + head * out_head;
    for (int column = static_cast<int>(threadIdx.x) * 2; column < width; column += 256) {
        float value[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
            value[c] = (((sums[0][column + c] + sums[1][column + c]) + sums[2][column + c]) + sums[3][column + c]) * times;
        store<T, 2>(to + column, value);
    }
    if (threadIdx.x == 0)
        lse[(batch * heads + head) * lq + query] = total == 0.0f ? negative_infinity() : from + log2f(total) * kLn2;
}

}  // namespace rtk
