// The end of a greedy decoding step: the index of the largest logit of each sequence, and all that depends on it. NaN is
// the largest; of equal logits the first one counts.
//
// The blocks of a cluster share a row of logits; their candidates meet in the first block, whose first thread writes the
// token, whether the sequence goes on, its next position, and where its next key goes: for each window w, places[w][0] is
// the row of the cache and places[w][1] the number of keys then, of rings[w] rows at the most (0: no ring). Nothing else
// reads or writes these numbers meanwhile. The kernel may start before the previous one has ended, and waits for it.
#include "common/vec.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kTokenThreads = 512;

// A candidate that compares as an unsigned number: the logit in order, then the lowest index.
RTK_DEVICE u64 token_candidate(float value, u32 index) {
    const u32 bits = __float_as_uint(value + 0.0f);  // -0 is 0
    const u32 ordered = value != value ? 0xffffffffu : (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(ordered) << 32 | (0xffffffffu - index);
}

// Not read-only: the previous kernel may write logits after this one has started.
template <int B>
RTK_DEVICE Raw<B> token_load(const void* p) {
    if constexpr (B == 16) {
        const uint4 words = *static_cast<const uint4*>(p);
        return {{words.x, words.y, words.z, words.w}};
    } else if constexpr (B == 4) {
        return {{*static_cast<const u32*>(p)}};
    } else {
        return {{*static_cast<const u16*>(p)}};
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(kTokenThreads)
    step_token(const T* logits, const i64* stop, const i64* rings, i64* token, i64* position, i32* length, u8* active,
               i64* columns, i64* result, i32* places, i64 vocabulary, i64 row_stride, i64 stops, i64 pad, i64 batch,
               i64 windows) {
    __shared__ u64 of_warps[kTokenThreads / 32];
    __shared__ float2 of_blocks[8];
    ptx::wait_for_previous();
    const int rank = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const i64 row = blockIdx.y, vectors = vocabulary / N;
    const T* const own = logits + row * row_stride;
    u64 best = 0;
    const i64 step = static_cast<i64>(blocks) * kTokenThreads;
#pragma unroll 4
    for (i64 i = static_cast<i64>(rank) * kTokenThreads + threadIdx.x; i < vectors; i += step) {
        float value[N];
        unpack<T, N>(token_load<sizeof(T) * N>(own + i * N), value);
#pragma unroll
        for (int k = 0; k < N; ++k) best = max(best, token_candidate(value[k], static_cast<u32>(i * N + k)));
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, lanes));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (blocks > 1) ptx::cluster_barrier();  // all blocks have started
    if (threadIdx.x == 0) {
        for (int w = 1; w < kTokenThreads / 32; ++w) best = max(best, of_warps[w]);
        if (blocks > 1) {
            const ptx::SharedAddress to = ptx::shared_address(of_blocks + rank);
            ptx::st_cluster(to, 0, __uint_as_float(static_cast<u32>(best >> 32)));
            ptx::st_cluster(to + 4, 0, __uint_as_float(static_cast<u32>(best)));
        }
    }
    if (blocks > 1) ptx::cluster_barrier();
    if (rank != 0 || threadIdx.x != 0) return;
    for (int b = 1; b < blocks; ++b)
        best = max(best, static_cast<u64>(__float_as_uint(of_blocks[b].x)) << 32 | __float_as_uint(of_blocks[b].y));
    i64 chosen = static_cast<i64>(0xffffffffu - static_cast<u32>(best));
    bool goes_on = active[row] != 0;
    if (stops > 0) {
        if (!goes_on) chosen = pad;
        for (i64 s = 0; s < stops; ++s) goes_on = goes_on && chosen != stop[s];
        active[row] = goes_on;
    }
    token[row] = chosen;
    result[row] = chosen;
    result[batch + row] = goes_on;
    position[row] += 1;
    const i32 now = length[row] + 1;
    length[row] = now;
    if (row == 0) *columns += 1;
    for (i64 w = 0; w < windows; ++w) {
        const i32 ring = static_cast<i32>(rings[w]);
        places[2 * w * batch + row] = ring == 0 ? now : now % ring;
        places[(2 * w + 1) * batch + row] = ring == 0 ? now + 1 : min(now + 1, ring);
    }
}

}  // namespace rtk
