// Destination row of each (token, expert) choice: rows sorted by expert, within an expert by token, every expert's rows
// padded to a multiple. Two launches, one block per chunk of tokens in both (common/chunks.cuh). Integers only, so the
// result does not depend on thread order.
//
// moe_count counts the choices of a chunk, from a list [tokens, top_k] of expert numbers. moe_list does the same from a
// routing map, which it first turns into such a list. moe_place ranks the choices of its chunk (common/rank.cuh); from
// a given list it does so before it waits for the counts.
#include "common/rank.cuh"

namespace rtk {

// A choice is an expert, or none: -1, or any other number that is not an expert.
struct Choices {
    const void* list;
    bool list_int64;  // i64, else i32
    i64 experts;

    RTK_DEVICE i64 at(i64 i) const {
        return list_int64 ? static_cast<const i64*>(list)[i] : static_cast<const i32*>(list)[i];
    }
    RTK_DEVICE int expert(i64 value) const {
        return static_cast<u64>(value) < static_cast<u64>(experts) ? static_cast<int>(value) : -1;
    }
};

// Adds to a number in shared memory once per warp. The whole warp calls this.
RTK_DEVICE void add_from_warp(u32* sum, u32 v) {
    v = __reduce_add_sync(kAllLanes, v);
    if (threadIdx.x % kWarp == 0 && v != 0) atomicAdd(sum, v);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    moe_count(const void* list, u8* table, i64 choices, i64 per_chunk, i64 experts, i64 list_int64, i64 width) {
    constexpr int kInFlight = 4;
    extern __shared__ __align__(16) u32 count[];  // [stride]
    __shared__ u32 chosen_here;
    ptx::launch_dependents();
    const ChunkTable chunks(table, width, gridDim.x, experts);
    const Choices given{list, list_int64 != 0, experts};
    const Chunk mine(choices, per_chunk);
    for (int e = threadIdx.x; e < chunks.stride; e += THREADS) count[e] = 0;
    if (threadIdx.x == 0) chosen_here = 0;
    __syncthreads();
    u32 own = 0;
    for (i64 begin = mine.from; begin < mine.to; begin += kInFlight * THREADS) {
        i64 value[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 i = begin + k * THREADS + threadIdx.x;
            value[k] = -1;
            if (i < mine.to) value[k] = given.at(i);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (begin + k * THREADS >= mine.to) break;
            own += value[k] != -1;
            count_expert(count, given.expert(value[k]));
        }
    }
    add_from_warp(&chosen_here, own);
    __syncthreads();
    chunks.write(blockIdx.x, count);
    if (threadIdx.x == 0) chunks.choice_counts()[blockIdx.x] = chosen_here;
}

// A warp handles several tokens at a time. Choice j of a token is its j-th expert; those past top_k are dropped.
template <int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS)
    moe_list(const u8* map, i32* list, u8* table, i64 tokens, i64 per_chunk, i64 experts, i64 top_k, i64 width) {
    constexpr int kInFlight = 4, kWarps = THREADS / kWarp;
    extern __shared__ __align__(16) u32 count[];  // [stride]
    __shared__ u32 chosen_here;
    ptx::launch_dependents();
    const ChunkTable chunks(table, width, gridDim.x, experts);
    const Chunk mine(tokens, per_chunk);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int columns = static_cast<int>(experts), max_choices = static_cast<int>(top_k);
    const u32 lower = (1u << lane) - 1u;
    for (int e = threadIdx.x; e < chunks.stride; e += THREADS) count[e] = 0;
    if (threadIdx.x == 0) chosen_here = 0;
    __syncthreads();
    u32 own = 0;
    for (i64 begin = mine.from + warp; begin < mine.to; begin += kInFlight * kWarps) {
        int found[kInFlight];
#pragma unroll
        for (int& n : found) n = 0;
        for (int start = 0; start < columns; start += VEC * kWarp) {
            const int expert = start + lane * VEC;
            u32 flags[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const i64 token = begin + k * kWarps;
                flags[k] = 0;
                if (token < mine.to && expert < columns) flags[k] = load_flags<VEC>(map + token * experts + expert);
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                int choice = found[k];
#pragma unroll
                for (int b = 0; b < VEC; ++b) {
                    const u32 set = __ballot_sync(kAllLanes, flags[k] >> (8 * b) & 1u);
                    choice += __popc(set & lower);
                    found[k] += __popc(set);
                }
                i32* place = list + (begin + k * kWarps) * top_k;
#pragma unroll
                for (int b = 0; b < VEC; ++b) {
                    if ((flags[k] >> (8 * b) & 1u) == 0) continue;
                    if (choice < max_choices) {
                        place[choice] = expert + b;
                        atomicAdd(&count[expert + b], 1u);
                    }
                    ++choice;
                }
            }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 token = begin + k * kWarps;
            own += found[k];
            if (token < mine.to)
                for (int j = found[k] + lane; j < max_choices; j += kWarp) list[token * top_k + j] = -1;
        }
    }
    if (lane == 0 && own != 0) atomicAdd(&chosen_here, own);
    __syncthreads();
    chunks.write(blockIdx.x, count);
    if (threadIdx.x == 0) chunks.choice_counts()[blockIdx.x] = chosen_here;
}

// Writes -1 to the rows that no choice fills. Warps of all blocks share the experts, or several warps one expert.
RTK_DEVICE void write_pads(const RowLayout& rows, i32* slots) {
    const int lane = threadIdx.x % kWarp;
    const int warps = static_cast<int>(gridDim.x * blockDim.x) / kWarp;
    const int warp = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
    const int sharing = max(warps / rows.experts, 1);
    for (int share = warp; share < rows.experts * sharing; share += warps) {
        const int expert = share / sharing, part = share - expert * sharing;
        const u32 end = rows.first[expert + 1];
        for (u32 row = rows.first[expert] + rows.kept(expert) + part * kWarp + lane; row < end; row += sharing * kWarp)
            slots[row] = -1;
    }
    const u32 step = gridDim.x * blockDim.x;
    for (u32 row = rows.first[rows.experts] + warp * kWarp + lane; row < rows.rows; row += step) slots[row] = -1;
}

// The whole block calls this. A choice without a row was dropped.
RTK_DEVICE void write_dropped(const RowLayout& rows, const ChunkTable& chunks, i32* dropped) {
    __shared__ u32 lost;
    if (threadIdx.x == 0) lost = 0;
    __syncthreads();
    u32 own = 0;
    for (int c = threadIdx.x; c < chunks.chunks; c += blockDim.x) own += __ldcg(chunks.choice_counts() + c);
    for (int e = threadIdx.x; e < rows.experts; e += blockDim.x) own -= rows.kept(e);
    add_from_warp(&lost, own);
    __syncthreads();
    if (threadIdx.x == 0) *dropped = static_cast<i32>(lost);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    moe_place(const void* list, const u8* table, i32* row_of, i32* expert_of, i32* slots, i32* counts, i32* offsets,
              i32* dropped, i64 choices, i64 per_chunk, i64 experts, i64 row_count, i64 multiple, i64 list_int64, i64 width,
              i64 list_is_new, i64 warps) {
    extern __shared__ __align__(16) u32 memory[];
    const ChunkTable chunks(table, width, gridDim.x, experts);
    const RowLayout rows(memory, chunks, experts, row_count, multiple);
    const Choices given{list, list_int64 != 0, experts};
    if (list_is_new) ptx::wait_for_previous();
    place_chunk<THREADS>(
        rows, chunks, Chunk(choices, per_chunk), static_cast<int>(warps),
        [&](i64 i) { return given.expert(given.at(i)); },
        [&](i64 i, int expert, u32 row) {
            const bool kept = row < rows.rows;
            row_of[i] = kept ? static_cast<i32>(row) : -1;
            expert_of[i] = kept ? expert : -1;
            if (kept) slots[row] = static_cast<i32>(i);
        });
    write_pads(rows, slots);
    if (blockIdx.x != 0) return;
    rows.write(counts, offsets);
    write_dropped(rows, chunks, dropped);
}

}  // namespace rtk
