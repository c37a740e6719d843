// Tokens for the kernels with weights as the left operand of wgmma: out = rms_norm(a) or a, rounded to T, with the elements of
// each 32 of k in the order that codes need (gemm_swapped_codes.cuh), and zeros up to the next multiple of 32. A norm is
// value * rstd * (offset + gain[k]).
//
// A block owns a row; a thread has every kSwappedTokensThreads-th 32 of k, and keeps the first ones in registers between the
// sum of squares and the result. The launch may start before the previous kernel has ended. Up to kSwappedOverlapRows rows, it
// lets the next one start at once: that one loads its weights in the meantime, and waits for this kernel before it loads tokens.
// More blocks that wait take the room on SMs that the next kernel needs, and let it run with two blocks on one of them.
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "gemm/gemm_swapped_codes.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// As in rtkernels/ops/gemm/swapped_tokens_plan.py.
inline constexpr int kSwappedTokensThreads = 256;
inline constexpr unsigned kSwappedOverlapRows = 32;
inline constexpr i64 kSwappedBytes = 1, kSwappedHalfBytes = 2;  // orders: of codes of 8 bits, of 4 bits

// 32 of k. Not read-only: the previous kernel may write after this one has started.
template <typename T>
RTK_DEVICE void swapped_tokens_load(const T* row, i64 first, i64 k, Raw<16> (&v)[4]) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const i64 at = first + 8 * q;
        clear(v[q]);
        if (at + 8 <= k) {
            const uint4 words = *reinterpret_cast<const uint4*>(row + at);
            v[q] = {{words.x, words.y, words.z, words.w}};
        } else {
#pragma unroll
            for (int e = 0; e < 8; ++e)
                if (at + e < k) v[q].w[e / 2] |= static_cast<u32>(reinterpret_cast<const u16*>(row)[at + e]) << (16 * (e % 2));
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(kSwappedTokensThreads)
    gemm_swapped_tokens(const T* a, const T* gain, T* out, i64 k, i64 a_pitch, i64 out_pitch, i64 order, double eps,
                        double offset) {
    __shared__ float of_warps[kSwappedTokensThreads / kWarp];
    if (gridDim.x <= kSwappedOverlapRows) ptx::launch_dependents();
    ptx::wait_for_previous();
    ptx::launch_dependents();
    const int thread = static_cast<int>(threadIdx.x);
    const T* const row = a + blockIdx.x * a_pitch;
    T* const to = out + blockIdx.x * out_pitch;
    const bool norm = gain != nullptr;
    Raw<16> first[4], first_gain[4];
    swapped_tokens_load(row, 32 * thread, k, first);
    if (norm) swapped_tokens_load(gain, 32 * thread, k, first_gain);
    float rstd = 1.0f;
    if (norm) {
        float square = 0.0f;
        auto add_squares = [&](const Raw<16>(&v)[4]) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float value[8];
                unpack<T, 8>(v[q], value);
#pragma unroll
                for (int e = 0; e < 8; ++e) square = fmaf(value[e], value[e], square);
            }
        };
        add_squares(first);
#pragma unroll 1
        for (i64 at = 32 * (thread + kSwappedTokensThreads); at < k; at += 32 * kSwappedTokensThreads) {
            Raw<16> v[4];
            swapped_tokens_load(row, at, k, v);
            add_squares(v);
        }
        square = warp_reduce<Sum>(square);
        if (thread % kWarp == 0) of_warps[thread / kWarp] = square;
        __syncthreads();
        square = 0.0f;
#pragma unroll
        for (int w = 0; w < kSwappedTokensThreads / kWarp; ++w) square += of_warps[w];
        rstd = rsqrtf(square / static_cast<float>(k) + static_cast<float>(eps));
    }
    auto write = [&](i64 at, Raw<16>(&v)[4], const Raw<16>(&gains)[4]) {
        if (norm) {
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                float value[8], factor[8];
                unpack<T, 8>(v[q], value);
                unpack<T, 8>(gains[q], factor);
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    value[e] *= rstd * (static_cast<float>(offset) + factor[e]);
                    if (at + 8 * q + e >= k) value[e] = 0.0f;  // not 0 * infinity
                }
                v[q] = pack<T, 8>(value);
            }
        }
        if (order == kSwappedBytes) {
            SwappedCodes<e4m3>::reorder(v);
        } else if (order == kSwappedHalfBytes) {
            SwappedNibbles::reorder(v);
        }
#pragma unroll
        for (int q = 0; q < 4; ++q) ptx::st<16>(to + at + 8 * q, v[q]);
    };
    if (32 * thread < k) write(32 * thread, first, first_gain);
#pragma unroll 1
    for (i64 at = 32 * (thread + kSwappedTokensThreads); at < k; at += 32 * kSwappedTokensThreads) {
        Raw<16> v[4], gains[4];
        swapped_tokens_load(row, at, k, v);
        if (norm) swapped_tokens_load(gain, at, k, gains);
        write(at, v, gains);
    }
}

}  // namespace rtk
