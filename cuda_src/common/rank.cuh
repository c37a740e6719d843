// Ranks the choices of a chunk in their order: a warp owns consecutive ones and counts equal experts among them, then
// the counts of warps are added in order.
#pragma once
#include "common/chunks.cuh"

namespace rtk {

// Adds a choice (-1: none) to counts in shared memory, once for all lanes that agree. The whole warp calls this.
RTK_DEVICE void count_expert(u32* count, int expert) {
    const u32 same = __match_any_sync(kAllLanes, expert);
    if (expert >= 0 && __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % kWarp))
        atomicAdd(&count[expert], static_cast<u32>(__popc(same)));
}

// Calls put(i, expert_of(i), row) for every item of the chunk, where row is rows.rows or more if there is none (for
// expert -1 always). `ranking` warps do this; they have (ranking + 1) * stride * 2 bytes of shared memory after the
// layout. Items are ranked before the block waits for the previous kernel, whose counts say where rows begin. The whole
// block calls this; the layout can be read afterwards.
template <int THREADS, typename Expert, typename Put>
RTK_DEVICE void place_chunk(const RowLayout& rows, const ChunkTable& chunks, const Chunk& mine, int ranking,
                            const Expert& expert_of, const Put& put) {
    constexpr int kRounds = 4;
    // Counts of equal experts in earlier warps, two 16-bit numbers per word; the last row has their sums.
    const int words = chunks.stride / 2;
    u32* earlier = rows.end();  // [ranking + 1][words]
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const u32 lower = (1u << lane) - 1u;
    u32* sums = earlier + ranking * words;
    u16* own = reinterpret_cast<u16*>(earlier + min(warp, ranking) * words);
    i64 begin = mine.from;
    do {
        const int left = static_cast<int>(min(mine.to - begin, static_cast<i64>(kRounds * kWarp * ranking)));
        const int rounds = (left + ranking * kWarp - 1) / (ranking * kWarp);
        const int first = warp * rounds * kWarp + lane;
        int expert[kRounds];
        u32 rank[kRounds];
        if (warp < ranking) {
#pragma unroll
            for (int r = 0; r < kRounds; ++r) {
                const int at = first + r * kWarp;
                expert[r] = -1;
                if (r < rounds && at < left) expert[r] = expert_of(begin + at);
            }
            for (int w = lane; w < words; w += kWarp) earlier[warp * words + w] = 0;
            __syncwarp();
#pragma unroll
            for (int r = 0; r < kRounds; ++r) {
                if (r >= rounds) break;
                const u32 same = __match_any_sync(kAllLanes, expert[r]);
                const bool exists = expert[r] >= 0;
                const u32 before = exists ? own[expert[r]] : 0u;
                rank[r] = before + __popc(same & lower);
                __syncwarp();
                if (exists && (same & lower) == 0) own[expert[r]] = static_cast<u16>(before + __popc(same));
                __syncwarp();
            }
        }
        __syncthreads();
        if (begin == mine.from) {
            ptx::wait_for_previous();
            rows.find(chunks, blockIdx.x);
        }
        for (int w = threadIdx.x; w < words; w += THREADS) {
            if (begin != mine.from) {
                rows.base[2 * w] += sums[w] & 0xffffu;
                rows.base[2 * w + 1] += sums[w] >> 16;
            }
            u32 sum = 0;
            for (int i = 0; i < ranking; ++i) {
                const u32 here = earlier[i * words + w];
                earlier[i * words + w] = sum;
                sum += here;
            }
            sums[w] = sum;
        }
        __syncthreads();
        if (warp < ranking) {
#pragma unroll
            for (int r = 0; r < kRounds; ++r) {
                const int at = first + r * kWarp;
                if (r >= rounds || at >= left) break;
                const int e = expert[r];
                put(begin + at, e, e < 0 ? rows.rows : rows.base[e] + own[e] + rank[r]);
            }
        }
        begin += kRounds * kWarp * ranking;
        if (begin < mine.to) __syncthreads();
    } while (begin < mine.to);
}

}  // namespace rtk
