// out[o][r] = x[o][r] + alpha * (the sum of source[o][t] over all t with index[t] = r): index_add, scatter_add of whole
// rows, accumulating index_put, and (x null: zeros) the gradient of an embedding. One launch without a sort, for up to
// 2^16 tokens t. x and out are dense (outer, rows, columns), and may be the same tensor; source has any row stride.
// fp32 sums in the order of the tokens (for rows with many tokens, partial sums in order), rounded once, no
// floating-point atomics.
//
// A block owns up to 128 rows and a slice of 32, 64 or 128 accesses of their columns. Its warps read all indices, a
// consecutive share each, and keep those that name its rows; they count them, and list the tokens of each row in shared
// memory, ascending. Then a warp (or some of its lanes, for narrow rows) sums the slice of a row, or of two or four
// rows, with four accesses in flight per thread; all warps share a row of many tokens. An index outside of the rows
// traps, as in torch, except for `ignored`; with `from_end` negative ones count from the end. Rows that no index names
// are copied, or left alone if x is out. Grid: slices of columns, stretches of rows, outer.
#include "common/scan.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kAddThreads = 256;
inline constexpr int kAddWarps = kAddThreads / kWarp;
inline constexpr int kAddRows = 128;   // of a block
inline constexpr int kAddAccesses = 4; // accesses in flight per lane, of one row or several
inline constexpr int kLongRow = 16;    // tokens above which all warps share a row

struct AddScratch {
    u32 place[kAddWarps][kAddRows];  // number of tokens of a row that a warp found, then the position of its next one
    u32 start[kAddRows + 1];         // start of a row's tokens in the list
    u32 total[kAddWarps];
};

template <typename T, int VEC>
RTK_DEVICE void add_scaled(const Raw<sizeof(T) * VEC>& raw, float alpha, float (&sum)[VEC]) {
    float v[VEC];
    unpack<T, VEC>(raw, v);
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum[i] = fmaf(alpha, v[i], sum[i]);
}

template <typename T, int VEC>
__global__ void __launch_bounds__(kAddThreads, 3)
    add_rows(const T* x, const void* index, const T* source, T* out, i64 tokens, i64 rows, i64 rows_per_block, i64 units,
             i64 lane_bits, i64 source_stride, i64 index_stride, i64 index_int64, i64 from_end, i64 ignored, i64 share,
             i64 copies, i64 slice_bits, double factor) {
    constexpr int kBytes = sizeof(T) * VEC, kInFlight = 8;
    extern __shared__ __align__(16) u32 memory[];  // [warps][share]: row in the block and token; then the list of tokens
    __shared__ AddScratch scratch;
    __shared__ float parts[kAddThreads * VEC];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int bits = static_cast<int>(lane_bits), lanes = 1 << bits, per_warp = kWarp >> bits, sub = lane >> bits;
    const i64 first_row = blockIdx.y * rows_per_block;
    const int own_rows = static_cast<int>(min(rows_per_block, rows - first_row));
    const i64 first_unit = static_cast<i64>(blockIdx.x) << (slice_bits + bits), unit = first_unit + (lane & (lanes - 1));
    const float alpha = static_cast<float>(factor);

    // The tokens of the block's rows, in order within each warp's share.
    const int begin = warp * static_cast<int>(share), end = min(begin + static_cast<int>(share), static_cast<int>(tokens));
    u32* own = memory + begin;
    const u32 lower_lanes = (1u << lane) - 1u;
    int found = 0;
    for (int i = threadIdx.x; i < kAddWarps * kAddRows; i += kAddThreads) scratch.place[i / kAddRows][i % kAddRows] = 0;
    __syncthreads();
    for (int base = begin; base < end; base += kInFlight * kWarp) {
        i64 named[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = (base + k * kWarp + lane) * index_stride;
            named[k] = 0;
            if (base + k * kWarp + lane < end)
                named[k] = index_int64 ? static_cast<const i64*>(index)[at] : static_cast<const i32*>(index)[at];
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const int token = base + k * kWarp + lane;
            i64 row = named[k];
            if (from_end && row < 0) row += rows;
            const bool counts = token < end && row != ignored;
            if (counts && static_cast<u64>(row) >= static_cast<u64>(rows)) __trap();
            const bool mine = counts && static_cast<u64>(row - first_row) < static_cast<u64>(own_rows);
            const u32 hits = __ballot_sync(kAllLanes, mine);
            if (mine)
                own[found + __popc(hits & lower_lanes)] = static_cast<u32>(row - first_row) << 16 | static_cast<u32>(token);
            found += __popc(hits);
        }
    }
    __syncwarp();
    for (int i = lane; i < found; i += kWarp) atomicAdd(&scratch.place[warp][own[i] >> 16], 1u);
    __syncthreads();
    const int r = static_cast<int>(threadIdx.x);
    u32 count = 0;
    if (r < kAddRows)
        for (int w = 0; w < kAddWarps; ++w) count += scratch.place[w][r];
    const u32 sum_to_row = sum_up_to_lane(count);
    if (lane == kWarp - 1) scratch.total[warp] = sum_to_row;
    __syncthreads();
    if (r < kAddRows) {
        u32 at = sum_to_row - count;
        for (int w = 0; w < warp; ++w) at += scratch.total[w];
        scratch.start[r] = at;
        if (r == kAddRows - 1) scratch.start[kAddRows] = at + count;
        for (int w = 0; w < kAddWarps; ++w) {
            const u32 of_warp = scratch.place[w][r];
            scratch.place[w][r] = at;
            at += of_warp;
        }
    }
    __syncthreads();
    u16* list = reinterpret_cast<u16*>(memory + kAddWarps * share);
    for (int base = 0; base < found; base += kWarp) {
        const bool exists = base + lane < found;
        const u32 entry = exists ? own[base + lane] : ~0u;
        const u32 same = __match_any_sync(kAllLanes, entry >> 16);
        const u32 at = exists ? scratch.place[warp][entry >> 16] : 0u;
        __syncwarp();
        if (exists) {
            list[at + __popc(same & lower_lanes)] = static_cast<u16>(entry);
            if ((same & lower_lanes) == 0) scratch.place[warp][entry >> 16] = at + __popc(same);
        }
        __syncwarp();
    }
    __syncthreads();

    const i64 corner = (static_cast<i64>(blockIdx.z) * rows + first_row) * units * VEC;  // of the block's rows
    source += blockIdx.z * tokens * source_stride;
    if (x != nullptr) x += corner;
    out += corner;
    const int across = 1 << slice_bits, next_row = kAddWarps * per_warp;  // accesses of a row, and the warp's next one
    for (int row0 = warp * per_warp + sub; row0 < own_rows; row0 += next_row * kAddAccesses / across) {
        const T* from = source + unit * VEC;
        Raw<kBytes> mine[kAddAccesses], next[kAddAccesses];
        u32 first[kAddAccesses], many[kAddAccesses];  // first token of a row in the list, and how many there are
        bool wanted[kAddAccesses];
#pragma unroll
        for (int u = 0; u < kAddAccesses; ++u) {
            const int row = row0 + (u >> slice_bits) * next_row, column = (u & (across - 1)) * kWarp;
            first[u] = many[u] = 0;
            clear(mine[u]);
            clear(next[u]);
            wanted[u] = row < own_rows && unit + column < units;
            if (!wanted[u]) continue;
            first[u] = scratch.start[row];
            many[u] = scratch.start[row + 1] - first[u];
            wanted[u] = many[u] <= kLongRow && (many[u] != 0 || copies);
            if (!wanted[u]) continue;
            if (x != nullptr) mine[u] = ptx::ld_stream<kBytes>(x + (row * units + unit + column) * VEC);
            if (many[u] != 0) next[u] = ptx::ld_stream<kBytes>(from + list[first[u]] * source_stride + column * VEC);
        }
        float sum[kAddAccesses][VEC];
        u32 longest = 0;
#pragma unroll
        for (int u = 0; u < kAddAccesses; ++u) {
            unpack<T, VEC>(mine[u], sum[u]);
            if (!wanted[u]) many[u] = 0;
            if (many[u] != 0) add_scaled<T, VEC>(next[u], alpha, sum[u]);
            longest = max(longest, many[u]);
        }
        for (u32 t = 1; t < longest; ++t) {
#pragma unroll
            for (int u = 0; u < kAddAccesses; ++u)
                if (t < many[u])
                    next[u] = ptx::ld_stream<kBytes>(from + list[first[u] + t] * source_stride + (u & (across - 1)) * kWarp * VEC);
#pragma unroll
            for (int u = 0; u < kAddAccesses; ++u)
                if (t < many[u]) add_scaled<T, VEC>(next[u], alpha, sum[u]);
        }
#pragma unroll
        for (int u = 0; u < kAddAccesses; ++u) {
            const int row = row0 + (u >> slice_bits) * next_row, column = (u & (across - 1)) * kWarp;
            if (wanted[u]) store<T, VEC>(out + (row * units + unit + column) * VEC, sum[u]);
        }
    }
    const int shares = kAddWarps * per_warp, columns = lanes * VEC;
    for (int row = 0; row < own_rows; ++row) {
        const u32 from = scratch.start[row], to = scratch.start[row + 1];
        if (to - from <= kLongRow) continue;
        const u32 each = (to - from + shares - 1) / shares;
        const u32 first = min(from + (warp * per_warp + sub) * each, to), last = min(first + each, to);
        for (int u = 0; u < across && first_unit + u * lanes < units; ++u) {
            float sum[VEC];
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[i] = 0.0f;
            for (u32 at = first; at < last && unit + u * lanes < units; at += kInFlight) {
                Raw<kBytes> raw[kInFlight];
#pragma unroll
                for (int k = 0; k < kInFlight; ++k) {
                    clear(raw[k]);
                    if (at + k < last)
                        raw[k] = ptx::ld_stream<kBytes>(source + list[at + k] * source_stride + (unit + u * lanes) * VEC);
                }
#pragma unroll
                for (int k = 0; k < kInFlight; ++k)
                    if (at + k < last) add_scaled<T, VEC>(raw[k], alpha, sum);
            }
#pragma unroll
            for (int i = 0; i < VEC; ++i) parts[threadIdx.x * VEC + i] = sum[i];
            __syncthreads();
            for (int c = threadIdx.x; c < columns; c += kAddThreads) {
                const i64 column = (first_unit + u * lanes) * VEC + c;
                if (column >= units * VEC) break;
                float row_sum[1] = {0.0f};
                if (x != nullptr) load_keep<T, 1>(x + row * units * VEC + column, row_sum);
                for (int p = 0; p < shares; ++p) row_sum[0] += parts[p * columns + c];
                store<T, 1>(out + row * units * VEC + column, row_sum);
            }
            __syncthreads();
        }
    }
}

}  // namespace rtk
