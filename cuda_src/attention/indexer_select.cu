// The indices of the `count` largest numbers of each row, in ascending order, -1 after the last; of equal numbers the first
// ones. NaN is larger than all others; -inf is never chosen.
//
// A block owns a row. Four passes over it find the smallest number that is chosen, 8 bits at a time, by counts of digits among the
// numbers that agree in the bits before; a fifth one writes the indices. Grid: rows.
#include "attention/softmax_state.cuh"
#include "common/types.cuh"

namespace rtk {

inline constexpr int kSelectThreads = 512;

// Keys order as numbers do; 0: not to be chosen.
RTK_DEVICE u32 select_key(float x) {
    if (x != x) return 0xffffffffu;
    if (x == negative_infinity()) return 0u;
    const u32 bits = __float_as_uint(x + 0.0f);  // -0 counts as 0
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

template <typename T>
__global__ void __launch_bounds__(kSelectThreads)
    indexer_select(const T* x, i32* indices, i64 first, i64 columns, i64 count) {
    constexpr int kWarps = kSelectThreads / kWarp;
    __shared__ u32 digits[256];
    __shared__ u32 chosen_digit, remaining;
    __shared__ u32 counts[kWarps][2];
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const i64 row = blockIdx.x;
    x += row * columns;
    indices += (first + row) * count;
    u32 prefix = 0u, wanted = static_cast<u32>(count);
    bool all = false;  // fewer than `count` can be chosen
#pragma unroll 1
    for (int shift = 24; shift >= 0 && !all; shift -= 8) {
        for (int i = thread; i < 256; i += kSelectThreads) digits[i] = 0u;
        __syncthreads();
        for (i64 i = thread; i < columns; i += kSelectThreads) {
            const u32 key = select_key(x[i]);
            if (key != 0u && (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8))) atomicAdd(&digits[key >> shift & 255u], 1u);
        }
        __syncthreads();
        if (warp == 0) {
            // Lane l has digits 255 - 8 l down to 248 - 8 l.
            u32 own = 0u;
#pragma unroll
            for (int i = 0; i < 8; ++i) own += digits[255 - 8 * lane - i];
            u32 before = own;
#pragma unroll
            for (int offset = 1; offset < kWarp; offset *= 2) {
                const u32 lower = __shfl_up_sync(0xffffffffu, before, offset);
                if (lane >= offset) before += lower;
            }
            const u32 total = __shfl_sync(0xffffffffu, before, 31);
            before -= own;
            if (lane == 0 && total < wanted) chosen_digit = 256u;
            if (before < wanted && wanted <= before + own) {
#pragma unroll 1
                for (int i = 0; i < 8; ++i) {
                    const u32 digit = static_cast<u32>(255 - 8 * lane - i), number = digits[digit];
                    if (wanted <= before + number) {
                        chosen_digit = digit, remaining = wanted - before;
                        break;
                    }
                    before += number;
                }
            }
        }
        __syncthreads();
        all = chosen_digit == 256u;
        if (!all) prefix |= chosen_digit << shift, wanted = remaining;
        __syncthreads();
    }
    // Larger keys than `prefix`, and the first `wanted` that equal it.
    u32 written = 0u, equal_before = 0u;
#pragma unroll 1
    for (i64 start = 0; start < columns; start += kSelectThreads) {
        const i64 i = start + thread;
        const u32 key = i < columns ? select_key(x[i]) : 0u;
        const bool equal = !all && key == prefix && key != 0u;
        const u32 equals = __ballot_sync(0xffffffffu, equal), lower = (1u << lane) - 1u;
        const u32 larger = __ballot_sync(0xffffffffu, key != 0u && (all || key > prefix));
        if (lane == 0) counts[warp][0] = static_cast<u32>(__popc(larger)), counts[warp][1] = static_cast<u32>(__popc(equals));
        __syncthreads();
        u32 larger_before = 0u, same_before = equal_before, place_base = written;
        u32 all_larger = 0u, all_equal = 0u;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            if (w < warp) larger_before += counts[w][0], same_before += counts[w][1];
            all_larger += counts[w][0], all_equal += counts[w][1];
        }
        larger_before += static_cast<u32>(__popc(larger & lower));
        same_before += static_cast<u32>(__popc(equals & lower));
        const u32 taken_before = min(same_before, wanted) - min(equal_before, wanted);
        const u32 place = place_base + larger_before + taken_before;
        if ((larger >> lane & 1u) != 0u || (equal && same_before < wanted)) indices[place] = static_cast<i32>(i);
        written += all_larger + min(equal_before + all_equal, wanted) - min(equal_before, wanted);
        equal_before += all_equal;
        __syncthreads();
    }
    for (i64 i = written + thread; i < count; i += kSelectThreads) indices[i] = -1;
}

}  // namespace rtk
