// Forward of softmax over the last dimension and of its logarithm, with z = scale * x:
//   y = exp(z - max z) / sum,   or   y = z - max z - log(sum),   sum over the row of exp(z - max z)
// Arithmetic is fp32, rounded once at the store. Columns from lengths[row] on are masked: y is 0, or -inf. So is all of
// a row that has only -inf or no valid column. A NaN or +inf makes the row NaN.
//
// A group of threads (RowGroup) works on a row. x and y have any row stride and may be the same memory: a thread has
// read each vector for the last time before it overwrites it, and no other thread reads it.
#include "common/l2_prefetch.cuh"
#include "ptx/cluster.cuh"
#include "reduce/softmax_rows.cuh"

namespace rtk {

// The softmax of a score v, or its logarithm, from the largest score and the sum of the row.
template <typename T, bool LOG>
struct Result {
    const Exponent<T>& exponent;
    float top, sum, inverse, level;

    RTK_DEVICE Result(const Exponent<T>& e, const TopAndSum& row)
        : exponent(e), top(row.top == -kInfinity ? 0.0f : row.top), sum(row.sum), inverse(inverse_of(row.sum)),
          level(row.sum == 0.0f ? 0.0f : -logf(row.sum)) {}

    RTK_DEVICE float operator()(float v) const {
        if constexpr (LOG) return (v - top) * exponent.slope + level;
        return share<!Exponent<T>::kFast>(exponent(v - top), sum, inverse);
    }
};

// Prepares scores for a TopAndSum: signs flipped, -inf from `valid` columns after the first one of the vector on.
template <typename T, int N>
RTK_DEVICE void prepare_scores(Raw<sizeof(T) * N>& raw, u32 flip, int valid) {
#pragma unroll
    for (u32& word : raw.w) word ^= flip;
    if (valid < N) mask_tail<T, N, true>(raw, valid);
}

// Writes a thread's vectors of a row from its slots: `room` columns; `valid` of them are not masked.
template <typename T, int CHUNKS, bool LOG>
RTK_DEVICE void write_results(const Result<T, LOG>& result, const ThreadSlots& slots, T* y, int pitch, int room, int valid) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr int kStep = CHUNKS % 2 == 0 ? 2 : CHUNKS;
#pragma unroll kStep
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * pitch < room) {
            float v[VEC];
            unpack<T, VEC>(slots.read(c), v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = result(v[i]);
            Raw<16> out = pack<T, VEC>(v);
            if (c * pitch + VEC > valid) mask_tail<T, VEC, LOG>(out, valid - c * pitch);
            ptx::st<16>(y + c * pitch, out);
        }
    }
}

// The same from registers.
template <typename T, int CHUNKS, bool LOG>
RTK_DEVICE void write_kept(const Result<T, LOG>& result, const Raw<16> (&raw)[CHUNKS], T* y, int pitch, int room, int valid) {
    constexpr int VEC = 16 / sizeof(T);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * pitch >= room) break;
        float v[VEC];
        unpack<T, VEC>(raw[c], v);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = result(v[i]);
        Raw<16> out = pack<T, VEC>(v);
        if (c * pitch + VEC > valid) mask_tail<T, VEC, LOG>(out, valid - c * pitch);
        ptx::st<16>(y + c * pitch, out);
    }
}

// Forward for rows that fit in shared memory: thread i of a RowGroup owns the 16-byte vectors i, i + threads, ...
// (CHUNKS of them) of its row, so cols <= CHUNKS * VEC * threads_per_row. Grid: rows / groups per block. A row needs
// only one reduction, of maximum and sum together; a thread's vectors are then read again for the result, from slots of
// its own, CHUNKS * blockDim.x * 16 bytes in all: that leaves registers for more blocks.
template <typename T, int CHUNKS>
__global__ void __launch_bounds__(CHUNKS > 4 ? 1024 : 256, CHUNKS > 4 ? 1 : 5)
    softmax_fwd(const T* x, T* y, const void* lengths, i64 rows, i64 cols, i64 x_stride, i64 y_stride, i64 lengths_int64,
                i64 threads_per_row, double scale, i64 log) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr int kStep = CHUNKS % 2 == 0 ? 2 : CHUNKS;  // vectors that are rescaled together
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    const Exponent<T> exponent(scale);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    // Columns from this thread's first one on: all of the row, and the valid ones.
    const int room = row < rows ? static_cast<int>(cols) - column : 0;
    const int valid = row < rows ? static_cast<int>(valid_columns(lengths, lengths_int64, row, cols)) - column : 0;
    const ThreadSlots slots(memory);
    x += row * x_stride + column;
    y += row * y_stride + column;
    // Through registers, not by cp.async, which cannot tell L2 to evict these lines last (ptx::ld_stream).
    Raw<16> raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (c * pitch < valid) raw[c] = load_raw<T, VEC>(x + c * pitch);
    if (group.thread == 0) prefetch_later_row(x, row, rows, cols, x_stride);
    if (exponent.flip != 0 || (CHUNKS - 1) * pitch + VEC > valid) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) prepare_scores<T, VEC>(raw[c], exponent.flip, valid - c * pitch);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) slots.put(c, raw[c]);

    TopAndSum part;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += kStep) {
        float top = part.top;
#pragma unroll
        for (int k = c; k < c + kStep; ++k) {
            float v[VEC];
            unpack<T, VEC>(raw[k], v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) top = fmaxf(top, v[i]);
        }
        part.raise(top, exponent);
#pragma unroll
        for (int k = c; k < c + kStep; ++k) {
            float v[VEC];
            unpack<T, VEC>(raw[k], v);
            part.add<VEC>(v, exponent);
        }
    }
    const TopAndSum whole = with_empty_rows(group_top_and_sum(part, exponent, group, scratch, 0), log);
    if (log & kLogarithm) {
        write_results<T, CHUNKS>(Result<T, true>(exponent, whole), slots, y, pitch, room, valid);
    } else {
        write_results<T, CHUNKS>(Result<T, false>(exponent, whole), slots, y, pitch, room, valid);
    }
}

// Forward for fewer rows than there are SMs: the `blocks` blocks of a cluster, up to 8, share a row (row_cluster). Thread
// i of them owns the 16-byte vectors i, i + threads, ... of it, up to kClusterVectors, in registers. Every warp sends its
// maximum and sum to all blocks of its cluster. Blocks of at most 1024 threads; grid: rows * blocks.
inline constexpr int kClusterVectors = 5;

template <typename T>
__global__ void __launch_bounds__(1024, 1)
    softmax_fwd_few_rows(const T* x, T* y, const void* lengths, i64 cols, i64 x_stride, i64 y_stride, i64 lengths_int64,
                         i64 blocks, double scale, i64 log) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ float tops[8 * kWarp], sums[8 * kWarp];
    const int count = static_cast<int>(blocks), rank = ptx::cluster_rank();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int threads = static_cast<int>(blockDim.x), end = static_cast<int>(cols);
    const i64 row = blockIdx.x / static_cast<u32>(count);
    const int column = (rank * threads + static_cast<int>(threadIdx.x)) * VEC, pitch = count * threads * VEC;
    const int valid = static_cast<int>(valid_columns(lengths, lengths_int64, row, cols)) - column;
    x += row * x_stride + column;
    y += row * y_stride + column;
    Raw<16> raw[kClusterVectors];
#pragma unroll
    for (int c = 0; c < kClusterVectors; ++c)
        if (c * pitch < valid) raw[c] = load_raw<T, VEC>(x + c * pitch);
    if (count > 1) ptx::cluster_barrier();  // the other blocks have started: their memory may be written
    const Exponent<T> exponent(scale);
    TopAndSum part;
#pragma unroll
    for (int c = 0; c < kClusterVectors; ++c) {
        if (c * pitch >= end) break;
        prepare_scores<T, VEC>(raw[c], exponent.flip, valid - c * pitch);
        float v[VEC], top = part.top;
        unpack<T, VEC>(raw[c], v);
#pragma unroll
        for (int i = 0; i < VEC; ++i) top = fmaxf(top, v[i]);
        part.raise(top, exponent);
        part.add<VEC>(v, exponent);
    }
    part = warp_top_and_sum(part, exponent);
    const int warps = threads / kWarp, slot = rank * warps + warp;
    if (lane < count) {
        ptx::st_cluster(ptx::shared_address(tops + slot), lane, part.top);
        ptx::st_cluster(ptx::shared_address(sums + slot), lane, part.sum);
    }
    if (count > 1) {
        ptx::cluster_barrier();
    } else {
        __syncthreads();
    }
    TopAndSum whole;
    for (int i = lane; i < count * warps; i += kWarp) whole.top = fmaxf(whole.top, tops[i]);
    whole.top = warp_reduce<Max>(whole.top);
    for (int i = lane; i < count * warps; i += kWarp) {
        TopAndSum other;
        other.top = tops[i], other.sum = sums[i];
        other.raise(whole.top, exponent);
        whole.sum += other.sum;
    }
    whole.sum = warp_reduce<Sum>(whole.sum);
    whole = with_empty_rows(whole, log);
    const int room = end - column;
    if (log & kLogarithm) {
        write_kept<T, kClusterVectors>(Result<T, true>(exponent, whole), raw, y, pitch, room, valid);
    } else {
        write_kept<T, kClusterVectors>(Result<T, false>(exponent, whole), raw, y, pitch, room, valid);
    }
}

// N scores of a row from `column` on, masked from `limit` on.
template <typename T, int N>
RTK_DEVICE void load_scores(const T* x_row, i64 column, i64 limit, u32 flip, float (&v)[N]) {
    if (column < limit) {
        auto raw = load_raw<T, N>(x_row + column);
        prepare_scores<T, N>(raw, flip, limit - column < N ? static_cast<int>(limit - column) : N);
        unpack<T, N>(raw, v);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = -kInfinity;
    }
}

template <typename T, int VEC>
RTK_DEVICE void long_rows(const T* x, T* y, const void* lengths, i64 rows, i64 cols, i64 x_stride, i64 y_stride,
                          i64 lengths_int64, i64 threads_per_row, double scale, i64 log, GroupScratch<2>& scratch) {
    constexpr int CHUNKS = VEC == 1 ? 8 : 2;  // vectors in flight
    const RowGroup group(threads_per_row);
    const Exponent<T> exponent(scale);
    const int pitch = group.threads * VEC;
    const i64 first = static_cast<i64>(group.thread) * VEC;
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 limit = row < rows ? valid_columns(lengths, lengths_int64, row, cols) : 0;
        const T* x_row = x + row * x_stride;
        T* y_row = y + row * y_stride;
        TopAndSum part;
        for (i64 start = first; start < limit; start += CHUNKS * pitch) {
            float v[CHUNKS][VEC];
            float top = part.top;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                load_scores<T, VEC>(x_row, start + c * pitch, limit, exponent.flip, v[c]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) top = fmaxf(top, v[c][i]);
            }
            part.raise(top, exponent);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) part.add<VEC>(v[c], exponent);
        }
        const TopAndSum whole = with_empty_rows(group_top_and_sum(part, exponent, group, scratch, phase), log);
        const bool logarithm = (log & kLogarithm) != 0;
        const Result<T, false> share_of(exponent, whole);
        const Result<T, true> logarithm_of(exponent, whole);
        for (i64 start = first; start < end; start += CHUNKS * pitch) {
            float v[CHUNKS][VEC];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                load_scores<T, VEC>(x_row, start + c * pitch, limit, exponent.flip, v[c]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const i64 column = start + c * pitch;
                if (column < end) {
#pragma unroll
                    for (int i = 0; i < VEC; ++i) {
                        if (column + i >= limit) {
                            v[c][i] = logarithm ? -kInfinity : 0.0f;
                        } else {
                            v[c][i] = logarithm ? logarithm_of(v[c][i]) : share_of(v[c][i]);
                        }
                    }
                    store<T, VEC>(y_row + column, v[c]);
                }
            }
        }
    }
}

// Forward for rows that do not fit or, without `aligned16`, whose addresses allow only narrow accesses: reads the row once
// for maximum and sum together, and once more to write it.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    softmax_fwd_long(const T* x, T* y, const void* lengths, i64 rows, i64 cols, i64 x_stride, i64 y_stride, i64 lengths_int64,
                     i64 threads_per_row, double scale, i64 log, i64 aligned16) {
    __shared__ GroupScratch<2> scratch;
    if (aligned16) {
        long_rows<T, 16 / sizeof(T)>(x, y, lengths, rows, cols, x_stride, y_stride, lengths_int64, threads_per_row, scale, log,
                                     scratch);
    } else {
        long_rows<T, 1>(x, y, lengths, rows, cols, x_stride, y_stride, lengths_int64, threads_per_row, scale, log, scratch);
    }
}

}  // namespace rtk
