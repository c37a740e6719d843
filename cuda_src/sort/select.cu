// The k best elements of each part of a long row, by index, unordered; a sort of short rows (sort_rows.cu) then orders
// them. A block owns a part and reads it twice. First each thread finds the best of its own elements; the k-th best of
// these bounds the part's k-th best from below, because k threads have one at least as good. Then everything better
// than the bound, and what equals it, is collected in shared memory, and a bitonic network over (key, index) pairs
// finds the k best of that. At most k - 1 threads have elements better than the bound: the host keeps parts so short
// that these always fit. If the equal ones do not fit, they are searched in order instead, from the part's start, until
// there are enough.
//
// Grid: rows * parts; block: 256 threads. indices: [rows * parts][k], -1 where a part has fewer elements; of equal
// elements the first ones. Loads are 16 bytes where rows and parts allow it (`aligned`).
#include "sort/keys.cuh"

namespace rtk {

inline constexpr int kSelectThreads = 256;
inline constexpr int kSelectBetter = 1536;
inline constexpr int kSelectPlaces = 2048;
inline constexpr int kSelectLoads = 4;

template <typename T>
struct SelectInput {
    const T* x;
    i64 begin, end;
    bool descending;

    // Calls f(key, index) for all elements of this thread.
    template <int N, typename F>
    RTK_DEVICE void each(F&& f) const {
        constexpr i64 kStep = kSelectThreads * N;
        for (i64 at = begin + threadIdx.x * N; at < end; at += kStep * kSelectLoads) {
            Raw<sizeof(T) * N> raw[kSelectLoads];
#pragma unroll
            for (int k = 0; k < kSelectLoads; ++k)
                if (at + k * kStep < end) raw[k] = ptx::ld_keep<sizeof(T) * N>(x + at + k * kStep);
#pragma unroll
            for (int k = 0; k < kSelectLoads; ++k) {
                if (at + k * kStep >= end) break;
#pragma unroll
                for (int i = 0; i < N; ++i)
                    f(key_of_raw<T>(element<T, N>(raw[k], i), descending), static_cast<u32>(at + k * kStep + i));
            }
        }
    }
};

template <typename T>
struct SelectMemory {
    KeyOf<T> keys[kSelectPlaces];  // better than the bound, then equal to it from kSelectBetter on
    u32 from[kSelectPlaces];
    KeyOf<T> bound;
    u32 better, equal, ballots[kSelectThreads / kWarp];
};

template <typename T, int N>
RTK_DEVICE void select_part(const SelectInput<T>& input, i64* indices, int wanted, SelectMemory<T>& memory) {
    using Key = KeyOf<T>;
    constexpr Key kLast = static_cast<Key>(~static_cast<Key>(0));
    constexpr u32 kNobody = 0xffffffffu;
    Key* keys = memory.keys;
    u32* from = memory.from;
    const int thread = static_cast<int>(threadIdx.x);
    Key best = kLast;
    input.template each<N>([&](Key k, u32) { best = k < best ? k : best; });
    keys[thread] = best;
    if (thread == 0) memory.better = memory.equal = 0;
    __syncthreads();
    int rank = 0;
    for (int i = 0; i < kSelectThreads; ++i) rank += keys[i] < best || (keys[i] == best && i < thread);
    if (rank == wanted - 1) memory.bound = best;
    __syncthreads();
    const Key bound = memory.bound;
    for (int i = thread; i < kSelectPlaces; i += kSelectThreads) keys[i] = kLast, from[i] = kNobody;
    __syncthreads();
    input.template each<N>([&](Key k, u32 index) {
        if (k > bound) return;
        const u32 place = k < bound ? atomicAdd(&memory.better, 1u) : kSelectBetter + atomicAdd(&memory.equal, 1u);
        if (place < (k < bound ? kSelectBetter : kSelectPlaces)) keys[place] = k, from[place] = index;
    });
    __syncthreads();
    const int better = static_cast<int>(memory.better), equal = static_cast<int>(memory.equal);
    int places = kSelectPlaces;
    if (equal > kSelectPlaces - kSelectBetter) {  // the first of them, in order
        const int lane = thread % kWarp, warp = thread / kWarp;
        u32 found = 0;
        for (i64 tile = input.begin; tile < input.end && found < static_cast<u32>(wanted); tile += kSelectThreads) {
            const i64 at = tile + thread;
            const bool same = at < input.end && key(input.x + at, input.descending) == bound;
            const u32 votes = __ballot_sync(0xffffffffu, same);
            if (lane == 0) memory.ballots[warp] = votes;
            __syncthreads();
            u32 place = found + __popc(votes & ((1u << lane) - 1u));
            for (int w = 0; w < kSelectThreads / kWarp; ++w) {
                const u32 count = __popc(memory.ballots[w]);
                if (w < warp) place += count;
                found += count;
            }
            if (same && place < static_cast<u32>(wanted)) from[kSelectBetter + place] = static_cast<u32>(at);
            __syncthreads();
        }
        for (int i = kSelectBetter + wanted + thread; i < kSelectPlaces; i += kSelectThreads)
            keys[i] = kLast, from[i] = kNobody;
    } else if (equal <= 32 && better <= 224) {  // the usual case: a short network
        Key k = kLast;
        u32 index = kNobody;
        if (thread < 224) {
            if (thread < better) k = keys[thread], index = from[thread];
        } else if (thread - 224 < equal) {
            k = bound, index = from[kSelectBetter + thread - 224];
        }
        __syncthreads();
        keys[thread] = k, from[thread] = index;
        places = kSelectThreads;
    }
    for (int block = 2; block <= places; block *= 2) {
        for (int step = block / 2; step > 0; step /= 2) {
            __syncthreads();
            for (int pair = thread; pair < places / 2; pair += kSelectThreads) {
                const int low = 2 * pair - (pair & (step - 1)), high = low + step;
                const Key a = keys[low], b = keys[high];
                const u32 i = from[low], j = from[high];
                const bool ordered = a < b || (a == b && i <= j);
                if (ordered != ((low & block) == 0)) {
                    keys[low] = b, keys[high] = a;
                    from[low] = j, from[high] = i;
                }
            }
        }
    }
    __syncthreads();
    if (thread < wanted) indices[thread] = from[thread] == kNobody ? -1 : static_cast<i64>(from[thread]);
}

template <typename T>
__global__ void __launch_bounds__(kSelectThreads)
    select_best(const T* x, i64* indices, i64 n, i64 parts, i64 part_length, i64 k, i64 aligned, i64 descending) {
    const i64 row = blockIdx.x / parts, part = blockIdx.x - row * parts;
    const i64 begin = part * part_length;
    const SelectInput<T> input{x + row * n, begin, min(begin + part_length, n), descending != 0};
    i64* to = indices + static_cast<i64>(blockIdx.x) * k;
    __shared__ SelectMemory<T> memory;
    if (aligned) {
        select_part<T, 16 / sizeof(T)>(input, to, static_cast<int>(k), memory);
    } else {
        select_part<T, 1>(input, to, static_cast<int>(k), memory);
    }
}

}  // namespace rtk
