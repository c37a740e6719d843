// grad[row] += (or =) the sum of dy[token] over the tokens of that row, from the sorted list of (row, token). fp32 sums
// in the order of the tokens, rounded once at the store, no floating-point atomics. With `weights`, dy[token] is
// multiplied by the token's weight.
//
// A block owns a window of the list (a multiple of 32 entries) and a slice of the columns; a thread owns VEC columns.
// Runs of equal rows that begin in the window belong to it if they end before the 32nd entry of the next one, which
// skips them. Longer runs are cut at window edges: parts go to `partial` as fp32, and the last block to arrive adds
// them in order, in two levels (kGroup windows, then the sums of those), so that a row with all tokens takes little
// longer than rows with a few each. Elements of dy have FROM bytes, those of grad TO bytes (common/widths.cuh). Without
// ADDS, `accumulate` is 0: holding the old grad takes a quarter of the registers.
#include "common/widths.cuh"
#include "index/embedding_tokens.cuh"

namespace rtk {

inline constexpr u32 kEveryLane = 0xffffffffu;
inline constexpr int kGroup = 32;  // windows

template <int N>
RTK_DEVICE void load_partial(const float* p, float (&v)[N]) {
    if constexpr (N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 part = __ldcg(reinterpret_cast<const float4*>(p + i));
            v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = __ldcg(p + i);
    }
}

// Number of lanes before the first one whose predicate is false, 32 if all are true.
RTK_DEVICE int leading(bool agrees) {
    const u32 other = ~__ballot_sync(kEveryLane, agrees);
    return other == 0 ? kWarp : __ffs(static_cast<int>(other)) - 1;
}

// A block's view of the list.
struct SortedList {
    const i64* entries;
    i64 tokens, window;

    RTK_DEVICE i64 entry(i64 at) const { return at < 0 || at >= tokens ? list_entry(-1, 0) : __ldcg(entries + at); }
    RTK_DEVICE i32 row(i64 at) const { return entry_row(entry(at)); }
    RTK_DEVICE i64 end(i64 w) const { return (w + 1) * window < tokens ? (w + 1) * window : tokens; }
};

// The parts of a cut run: their addresses, and which blocks have arrived.
template <int TO, int VEC>
struct RunParts {
    float* partial;  // at this thread's columns
    i32* counters;   // of this slice
    i64 cols;
    u8* grad;         // at this thread's columns
    i64 grad_stride;  // bytes
    int slices;
    bool accumulate, half, active;

    RTK_DEVICE void finish(i32 row, float (&sum)[VEC]) const {
        if (!active) return;
        u8* target = grad + row * grad_stride;
        if (accumulate) {
            float old[VEC];
            widen<TO, VEC>(load_packed<TO, VEC>(target), half, old);
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[i] += old[i];
        }
        write<TO, VEC>(target, half, sum);
    }

    RTK_DEVICE float* slot(int window, bool tail) const {
        return partial + (2 * static_cast<i64>(window) + tail) * cols;
    }

    RTK_DEVICE void put(int window, bool tail, const float (&sum)[VEC]) const {
        if (active) store<float, VEC>(slot(window, tail), sum);
    }

    // True in all threads of the block that arrives as the last of `wanted`.
    RTK_DEVICE bool last(int counter, int wanted) const {
        __shared__ int arrived;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) arrived = atomicAdd(&counters[static_cast<i64>(counter) * slices], 1);
        __syncthreads();
        const bool mine = arrived == wanted - 1;
        __syncthreads();
        __threadfence();
        return mine;
    }

    // Sum of the parts of window first, then of every `step`-th window up to `final`, starting with a multiple of it.
    RTK_DEVICE void add(int first, int final, int step, int run_start, float (&sum)[VEC]) const {
        constexpr int kInFlight = 4;
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
        if (!active) return;
        const int aligned = first / step * step;
        const int count = (final - aligned) / step + 1;
        for (int base = 0; base < count; base += kInFlight) {
            float v[kInFlight][VEC];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const int w = base + k == 0 ? first : aligned + (base + k) * step;
                if (base + k < count) load_partial<VEC>(slot(w, w == run_start), v[k]);
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k)
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum[i] += base + k < count ? v[k][i] : 0.0f;
        }
    }
};

// Called by all threads of a block after its part of the run of `row` is stored.
template <int TO, int VEC>
RTK_DEVICE void combine(const RunParts<TO, VEC>& parts, const SortedList& list, i32 row, int window, int windows) {
    u32 before = 0, after = 0;
#pragma unroll 4
    for (int w = threadIdx.x % kWarp; w < windows; w += kWarp) {
        if (w == window) continue;
        const bool same = list.row(w < window ? list.end(w) - 1 : w * list.window) == row;
        before += same && w < window;
        after += same && w > window;
    }
    const int start = window - static_cast<int>(__reduce_add_sync(kEveryLane, before));
    const int final = window + static_cast<int>(__reduce_add_sync(kEveryLane, after));
    const int group = window / kGroup * kGroup;
    const int from = group > start ? group : start;
    const int to = group + kGroup - 1 < final ? group + kGroup - 1 : final;
    const int groups = final / kGroup - start / kGroup + 1;
    float sum[VEC];
#pragma unroll 1
    for (int level = 0; level < (groups > 1 ? 2 : 1); ++level) {
        if (level == 1) parts.put(from, from == start, sum);
        // Two runs may have parts in a window that begins a group: one that ends there, and one that begins there.
        const int counter = level == 0 ? 2 * from + (from == start) : 2 * windows + start;
        if (!parts.last(counter, level == 0 ? to - from + 1 : groups)) return;
        parts.add(level == 0 ? from : start, level == 0 ? to : final, level == 0 ? 1 : kGroup, start, sum);
    }
    parts.finish(row, sum);
}

template <int FROM, int TO, int VEC, bool ADDS>
__global__ void __launch_bounds__(128, 4)
    embedding_sum(const u8* dy, u8* grad, const i64* entries, float* partial, i32* counters, const float* weights,
                  i64 tokens, i64 cols, i64 dy_stride, i64 grad_stride, i64 window_size, i64 dy_half, i64 grad_half,
                  i64 accumulate) {
    constexpr int kInFlight = !ADDS ? 8 : FROM == 2 && TO == 4 ? 4 : 6;  // tokens
    const bool add = ADDS && accumulate != 0;
    ptx::wait_for_previous();
    const SortedList list{entries, tokens, window_size};
    const int window = static_cast<int>(blockIdx.x), windows = static_cast<int>(gridDim.x);
    const int lane = threadIdx.x % kWarp;
    const i64 column = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * VEC;
    const RunParts<TO, VEC> parts{partial + column, counters + blockIdx.y, cols, grad + column * TO, grad_stride * TO,
                                 static_cast<int>(gridDim.y), add, grad_half != 0, column < cols};
    const i64 start = window * window_size, end = list.end(window);
    // Everything that decides which run belongs to which block, loaded together.
    i64 entry = list.entry(start + lane);
    const i32 row_before = list.row(start - 1), last_row = list.row(end - 1), row_after = list.row(end + lane);
    const i32 first_row = __shfl_sync(kEveryLane, entry_row(entry), 0);
    if (first_row < 0) return;

    int skip = 0, extra = 0;
    bool cut = false;  // the current run began in an earlier window and was cut
    if (row_before == first_row) {
        const int length = leading(entry_row(entry) == first_row);
        const i64 previous = start - window_size;
        const bool earlier = list.row(previous) == first_row && list.row(previous - 1) == first_row;
        cut = earlier || length == kWarp;
        if (!cut) skip = length;
    }
    if (start + skip >= end) return;
    if (last_row >= 0 && !(cut && last_row == first_row)) {
        const int length = leading(row_after == last_row);
        if (length < kWarp) extra = length;
    }

    dy += column * FROM;
    dy_stride *= FROM;
    float sum[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
    bool open = false;       // a run has begun and not ended
    bool head_cut = false;   // the part of the first run is stored
    const i64 stop = end + extra;
    for (i64 base = start; base < stop; base += kWarp) {
        const i64 at = base + lane;
        if (base != start) entry = list.entry(at);
        const i32 row = entry_row(entry);
        i32 next_row = __shfl_down_sync(kEveryLane, row, 1);
        if (lane == kWarp - 1) next_row = list.row(base + kWarp);
        const u32 ends = __ballot_sync(kEveryLane, row != next_row);
        const int count = leading(at < stop && row >= 0);
        if (count == 0) break;
        float weight = 1.0f;
        if (weights != nullptr && lane < count) weight = weights[entry_token(entry)];
        for (int group = base == start ? skip : 0; group < count; group += kInFlight) {
            Packed<FROM, VEC> raw[kInFlight];
            Packed<TO, VEC> old[ADDS ? kInFlight : 1];
            i32 rows[kInFlight];
            float factor[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const int j = group + k;
                const i64 token = entry_token(__shfl_sync(kEveryLane, entry, j));
                rows[k] = __shfl_sync(kEveryLane, row, j);
                factor[k] = __shfl_sync(kEveryLane, weight, j);
                if (j < count && parts.active) {
                    raw[k] = load_packed<FROM, VEC, false>(dy + token * dy_stride);
                    if (add && ends >> j & 1u)
                        old[ADDS ? k : 0] = load_packed<TO, VEC, false>(parts.grad + rows[k] * parts.grad_stride);
                }
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const int j = group + k;
                if (j < count) {
                    float v[VEC];
                    if (parts.active) {
                        widen<FROM, VEC>(raw[k], dy_half != 0, v);
#pragma unroll
                        for (int i = 0; i < VEC; ++i) sum[i] += v[i] * factor[k];
                    }
                    open = true;
                    if (ends >> j & 1u) {
                        if (cut) {
                            parts.put(window, false, sum);
                            head_cut = true;
                        } else if (parts.active) {
                            if (add) {
                                widen<TO, VEC>(old[ADDS ? k : 0], parts.half, v);
#pragma unroll
                                for (int i = 0; i < VEC; ++i) sum[i] += v[i];
                            }
                            write<TO, VEC>(parts.grad + rows[k] * parts.grad_stride, parts.half, sum);
                        }
#pragma unroll
                        for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
                        cut = open = false;
                    }
                }
            }
        }
    }
    if (open) parts.put(window, !cut, sum);
    const bool tail_cut = open && !cut;
    head_cut = head_cut || (open && cut);
#pragma unroll 1
    for (int part = head_cut ? 0 : 1; part < (tail_cut ? 2 : 1); ++part)
        combine(parts, list, part == 0 ? first_row : last_row, window, windows);
}

}  // namespace rtk
