// Group-limited routing: experts are in equal groups, and only the best groups may serve a token. The score of a group
// is the sum of its `of_group` largest keys (added in fp32, largest first); ties go to the lower group number.
#pragma once
#include "router/select.cuh"

namespace rtk {

// Groups of `lanes` (a power of two) neighbouring lanes each, of_group 1 or 2. Returns a bit for every lane that may
// take part.
template <int V>
RTK_DEVICE u32 best_lanes(const u32 (&key)[V], int lanes, int of_group, int top_groups) {
    u32 first, second;
    two_largest(key, first, second);
    for (int offset = 1; offset < lanes; offset *= 2) {
        const u32 other = __shfl_xor_sync(kAllLanes, first, offset), next = __shfl_xor_sync(kAllLanes, second, offset);
        second = max(min(first, other), max(second, next));
        first = max(first, other);
    }
    // A lane past the last column has key 0 and is excluded.
    u32 score = first == 0u ? 0u : key_of(of_group == 1 ? value_of(first) : value_of(first) + value_of(second));
    const u32 group = lanes == kWarp ? kAllLanes : (1u << lanes) - 1u;
    u32 allowed = 0u;
    const u32 me = 1u << (threadIdx.x % kWarp);
    for (int i = 0; i < top_groups; ++i) {
        const u32 best = __reduce_max_sync(kAllLanes, score);
        const u32 equal = __ballot_sync(kAllLanes, score == best);
        const u32 taken = group << (__ffs(static_cast<int>(equal)) - 1);
        allowed |= taken;
        if ((taken & me) != 0u) score = 0u;
    }
    return allowed;
}

// Shared memory for groups of any size: keys of the row, scores of the groups, and which groups may take part.
struct GroupMemory {
    u32* key;
    u32* score;
    u8* allowed;
};

// Called by `threads` threads, this one `thread`; `sync` is their barrier. Reads the keys, fills `allowed`.
template <typename Sync>
RTK_DEVICE void best_groups(const GroupMemory& memory, int groups, int size, int of_group, int top_groups, int thread,
                            int threads, const Sync& sync) {
    sync();
    for (int g = thread; g < groups; g += threads) {
        float sum = 0.0f;
        u64 last = ~0ull;
        for (int j = 0; j < of_group; ++j) {
            u64 best = 0ull;
            for (int e = 0; e < size; ++e) {
                const u64 key = memory.key[g * size + e];
                const u64 found = key << 32 | (0xffffffffu - static_cast<u32>(e));
                if (found < last && found > best) best = found;
            }
            sum += value_of(static_cast<u32>(best >> 32));
            last = best;
        }
        memory.score[g] = key_of(sum);
    }
    sync();
    for (int g = thread; g < groups; g += threads) {
        const u32 mine = memory.score[g];
        int rank = 0;
        for (int other = 0; other < groups; ++other) {
            const u32 theirs = memory.score[other];
            rank += theirs > mine || (theirs == mine && other < g) ? 1 : 0;
        }
        memory.allowed[g] = rank < top_groups ? 1 : 0;
    }
    sync();
}

}  // namespace rtk
