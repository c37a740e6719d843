// RMS normalisation over the last dimension:  y = h * rstd * (offset + weight),  rstd = 1/sqrt(mean(h^2) + eps),
// h = x, or the rounded sum x + residual, which is then an output too. fp32 arithmetic, one rounding at each store.
//
// A group of threads (RowGroup) works on a row. Inputs have any row stride; outputs are dense.
#include "common/l2_prefetch.cuh"
#include "common/block_sums.cuh"
#include "common/reduce.cuh"
#include "common/row_ring.cuh"
#include "norm/common.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Forward with the row in registers: thread i of a RowGroup owns the vectors i, i + threads, ... (CHUNKS of them) of
// its row, so cols <= CHUNKS * VEC * threads_per_row. Grid: rows / groups per block. x and weight are loaded together,
// so that the weight's latency hides behind the reduction.
template <typename T, typename W, int VEC, int CHUNKS, bool RESIDUAL>
__global__ void __launch_bounds__(512, 1)
    rms_norm_fwd(const T* x, const T* residual, const W* weight, T* y, T* sum, i64 rows, i64 cols, i64 x_stride,
                 i64 residual_stride, i64 threads_per_row, double eps, double offset) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    x += row * x_stride + column;
    if constexpr (RESIDUAL) residual += row * residual_stride + column;

    Raw<sizeof(T) * VEC> raw[CHUNKS];
    RawParts<W, VEC> gains[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(raw[c]);
        clear(gains[c]);
        if (column + c * pitch < end) {
            raw[c] = load_raw<T, VEC>(x + c * pitch);
            if (weight != nullptr) gains[c] = load_keep_raw<W, VEC>(weight + column + c * pitch);
        }
    }
    if (!RESIDUAL && group.thread == 0) prefetch_later_row(x, row, rows, cols, x_stride);
    float square = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if constexpr (RESIDUAL) {
            if (column + c * pitch < end) {
                raw[c] = add_rounded<T, VEC>(raw[c], load_raw<T, VEC>(residual + c * pitch));
                ptx::st<sizeof(T) * VEC>(sum + row * cols + column + c * pitch, raw[c]);
            }
        }
        float h[VEC];
        unpack<T, VEC>(raw[c], h);
#pragma unroll
        for (int i = 0; i < VEC; ++i) square += h[i] * h[i];
    }
    square = group_reduce<Sum, false>(square, group, scratch, 0);
    const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
    y += row * cols + column;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            float h[VEC], gain[VEC];
            unpack<T, VEC>(raw[c], h);
            unpack_parts<W, VEC>(gains[c], gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                h[i] *= weight != nullptr ? rstd * (gain[i] + static_cast<float>(offset)) : rstd;
            store<T, VEC>(y + c * pitch, h);
        }
    }
}

// Flags of the kernels for long rows.
inline constexpr i64 kWeightFp32 = 1, kAligned16 = 2;  // the weight is of fp32, not of T; rows allow 16-byte accesses

template <typename T, int VEC>
RTK_DEVICE void long_rows(const T* x, const T* residual, const void* weight, T* y, T* sum, i64 rows, i64 cols, i64 x_stride,
                          i64 residual_stride, i64 threads_per_row, bool weight_fp32, double eps, double offset,
                          GroupScratch<1>& scratch) {
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const T* x_row = x + row * x_stride;
        const T* residual_row = residual == nullptr ? nullptr : residual + row * residual_stride;
        auto load = [&](i64 column) {
            return residual_row == nullptr ? load_raw<T, VEC>(x_row + column)
                                           : load_h<T, VEC, true>(x_row + column, residual_row + column);
        };
        float square = 0.0f;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            float h[VEC];
            unpack<T, VEC>(load(column), h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) square += h[i] * h[i];
        }
        square = group_reduce<Sum, false>(square, group, scratch, phase);
        const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            const auto raw = load(column);
            if (residual != nullptr) ptx::st<sizeof(T) * VEC>(sum + row * cols + column, raw);
            float h[VEC], gain[VEC];
            unpack<T, VEC>(raw, h);
            load_any_gain<T, VEC>(weight, weight_fp32, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] *= rstd * gain[i];
            store<T, VEC>(y + row * cols + column, h);
        }
    }
}

// Forward for rows that do not fit in registers or whose addresses allow only narrow accesses: reads the row twice.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    rms_norm_fwd_long(const T* x, const T* residual, const void* weight, T* y, T* sum, i64 rows, i64 cols, i64 x_stride,
                      i64 residual_stride, i64 threads_per_row, i64 flags, double eps, double offset) {
    __shared__ GroupScratch<1> scratch;
    const bool weight_fp32 = flags & kWeightFp32;
    if (flags & kAligned16) {
        long_rows<T, 16 / sizeof(T)>(x, residual, weight, y, sum, rows, cols, x_stride, residual_stride, threads_per_row,
                                     weight_fp32, eps, offset, scratch);
    } else {
        long_rows<T, 1>(x, residual, weight, y, sum, rows, cols, x_stride, residual_stride, threads_per_row, weight_fp32, eps,
                        offset, scratch);
    }
}

// Backward:  dh = rstd * g - h * rstd^3 * mean(g * h) + dsum,  g = dy * gain;  dweight = sum of dy * h * rstd over rows.
// rstd is recomputed: h is read anyway, and the two row sums share one reduction. weight is of T, or of fp32 if `weight_fp32`.
//
// Persistent, one block per SM, for rows of at most CHUNKS * 512 16-byte vectors: a RowGroup owns a row, thread i of it
// the vectors i, i + threads, ...; rows arrive through a RowRing, gains stay in registers. Weight gradients are summed
// in registers over the rows of a group, over the groups of the block in shared memory, and written as one fp32 row per
// block (`partial`, [grid, cols]; null if not needed) for column_sum to add up: the order is fixed by the grid, never
// by timing. Blocks of at most 768 (CHUNKS 1) or 512 threads, with few enough registers to leave room for a block of
// column_sum.
template <typename T, int CHUNKS, bool DSUM, int STAGES>
__global__ void __maxnreg__(CHUNKS == 1 ? 72 : 112)
    rms_norm_bwd(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* partial, i64 rows, i64 cols,
                 i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, i64 weight_fp32, double eps,
                 double offset) {
    constexpr int VEC = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    RowRing<DSUM ? 3 : 2, CHUNKS, STAGES> ring(memory);
    ptx::launch_dependents();  // column_sum's blocks are small enough to wait while this one runs
    const i64 step = static_cast<i64>(gridDim.x) * group.count;
    const i64 first = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const float epsilon = static_cast<float>(eps);
    const float shift = static_cast<float>(offset);
    const float inverse = 1.0f / static_cast<float>(cols);
    const int pitch = group.threads * VEC;
    const int end = static_cast<int>(cols);
    const int column = group.thread * VEC;

    // Pointers that advance with the rows: this thread's first column of the next row to fetch, and to store.
    dy += first * dy_stride + column;
    h += first * h_stride + column;
    if constexpr (DSUM) dsum += first * dsum_stride + column;
    dh += first * cols + column;
    i64 fetched = first;
    auto fetch = [&] {
        if (fetched < rows) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (column + c * pitch < end) {
                    ring.copy(0, c, dy + c * pitch);
                    ring.copy(1, c, h + c * pitch);
                    if constexpr (DSUM) ring.copy(2, c, dsum + c * pitch);
                }
            }
        }
        ring.commit();
        fetched += step;
        dy += step * dy_stride;
        h += step * h_stride;
        if constexpr (DSUM) dsum += step * dsum_stride;
    };

    // Groups that run out of rows keep reading their slots while others of the block work, so every slot must be
    // initialised.
    const bool unused_stages = first + (STAGES - 1) * step >= rows;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (unused_stages || column + c * pitch >= end) ring.zero(memory, c);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch();
    float gain[CHUNKS][VEC], dweight[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) dweight[c][i] = 0.0f;
#pragma unroll
        for (int i = 0; i < VEC; ++i) gain[c][i] = 0.0f;
        if (column + c * pitch < end) load_any_gain<T, VEC>(weight, weight_fp32, column + c * pitch, shift, gain[c]);
    }

    int phase = 0;
    for (i64 row = first; row - group.index < rows; row += step, phase ^= 1) {
        fetch();
        ring.wait();
        float dy_kept[CHUNKS][VEC], h_kept[CHUNKS][VEC];
        float square = 0.0f, product = 0.0f;  // sums of h^2 and g * h
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float(&d)[VEC] = dy_kept[c];
            float(&v)[VEC] = h_kept[c];
            float(&w)[VEC] = gain[c];
            ring.template read<T>(0, c, d);
            ring.template read<T>(1, c, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                square += v[i] * v[i];
                product += d[i] * w[i] * v[i];
            }
        }
        group_reduce_pair<Sum, true>(square, product, group, scratch, phase);
        const float rstd = rsqrtf(square * inverse + epsilon);
        const float pull = product * inverse * rstd * rstd * rstd;
        if (row < rows) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float(&d)[VEC] = dy_kept[c];
                float(&v)[VEC] = h_kept[c];
                float(&w)[VEC] = gain[c];
                float out[VEC];
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float scaled = d[i] * rstd;
                    dweight[c][i] += scaled * v[i];
                    out[i] = scaled * w[i] - v[i] * pull;
                }
                if constexpr (DSUM) {
                    float extra[VEC];
                    ring.template read<T>(2, c, extra);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) out[i] += extra[i];
                }
                if (column + c * pitch < end) store<T, VEC>(dh + c * pitch, out);
            }
        }
        dh += step * cols;
        ring.next_row();
    }

    if (partial == nullptr) return;
    partial += blockIdx.x * cols;
    if (group.count == 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (column + c * pitch < cols) store<float, VEC>(partial + column + c * pitch, dweight[c]);
        return;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);  // [groups, cols]
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (column + c * pitch < end) put_sums(sums + group.index * end + column + c * pitch, dweight[c]);
    __syncthreads();
    add_rows(sums, group.count, end, end, partial);
}

template <typename T, int VEC>
RTK_DEVICE void long_rows_bwd(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* rstd_out, i64 rows,
                              i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, bool weight_fp32,
                              double eps, double offset, GroupScratch<1>& scratch, GroupScratch<1>& product_scratch) {
    const RowGroup group(threads_per_row);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        float square = 0.0f, product = 0.0f;  // h^2, g * h
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            float g[VEC], v[VEC], gain[VEC];
            load_stream<T, VEC>(dy + row * dy_stride + column, g);
            load_stream<T, VEC>(h + row * h_stride + column, v);
            load_any_gain<T, VEC>(weight, weight_fp32, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                square += v[i] * v[i];
                product += g[i] * gain[i] * v[i];
            }
        }
        square = group_reduce<Sum, false>(square, group, scratch, phase);
        product = group_reduce<Sum, false>(product, group, product_scratch, phase);
        const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
        const float pull = product / static_cast<float>(cols) * rstd * rstd * rstd;
        if (rstd_out != nullptr && row < rows && group.thread == 0) rstd_out[row] = rstd;
        for (i64 column = static_cast<i64>(group.thread) * VEC; column < end; column += group.threads * VEC) {
            float g[VEC], v[VEC], gain[VEC];
            load_stream<T, VEC>(dy + row * dy_stride + column, g);
            load_stream<T, VEC>(h + row * h_stride + column, v);
            load_any_gain<T, VEC>(weight, weight_fp32, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = g[i] * gain[i] * rstd - v[i] * pull;
            if (dsum != nullptr) {
                float d[VEC];
                load_stream<T, VEC>(dsum + row * dsum_stride + column, d);
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[i] += d[i];
            }
            store<T, VEC>(dh + row * cols + column, v);
        }
    }
}

// Backward for rows that do not fit in registers or allow only narrow accesses: reads the row twice and leaves rstd
// of every row (fp32, [rows]; null when not wanted) for rms_norm_bwd_weight.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    rms_norm_bwd_long(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* rstd_out, i64 rows,
                      i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, i64 flags, double eps,
                      double offset) {
    __shared__ GroupScratch<1> scratch, product_scratch;
    const bool weight_fp32 = flags & kWeightFp32;
    if (flags & kAligned16) {
        long_rows_bwd<T, 16 / sizeof(T)>(dy, h, weight, dsum, dh, rstd_out, rows, cols, dy_stride, h_stride, dsum_stride,
                                         threads_per_row, weight_fp32, eps, offset, scratch, product_scratch);
    } else {
        long_rows_bwd<T, 1>(dy, h, weight, dsum, dh, rstd_out, rows, cols, dy_stride, h_stride, dsum_stride,
                            threads_per_row, weight_fp32, eps, offset, scratch, product_scratch);
    }
}

template <typename T, int VEC>
RTK_DEVICE void weight_gradients(const T* dy, const T* h, const float* rstd, float* partial, i64 rows, i64 cols,
                                 i64 dy_stride, i64 h_stride) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    if (column >= cols) return;
    float total[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) total[i] = 0.0f;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        float g[VEC], v[VEC];
        load_stream<T, VEC>(dy + row * dy_stride + column, g);
        load_stream<T, VEC>(h + row * h_stride + column, v);
        const float scale = rstd[row];
#pragma unroll
        for (int i = 0; i < VEC; ++i) total[i] += g[i] * (v[i] * scale);
    }
    store<float, VEC>(partial + blockIdx.y * cols + column, total);
}

// Partial weight gradients for the long rows: block (x, y) sums dy * h * rstd over every gridDim.y-th row for the
// blockDim.x columns (times 16 / sizeof(T) if `aligned16`) it owns, into row y of `partial` [gridDim.y, cols].
template <typename T>
__global__ void __launch_bounds__(256)
    rms_norm_bwd_weight(const T* dy, const T* h, const float* rstd, float* partial, i64 rows, i64 cols, i64 dy_stride,
                        i64 h_stride, i64 aligned16) {
    if (aligned16) {
        weight_gradients<T, 16 / sizeof(T)>(dy, h, rstd, partial, rows, cols, dy_stride, h_stride);
    } else {
        weight_gradients<T, 1>(dy, h, rstd, partial, rows, cols, dy_stride, h_stride);
    }
}

}  // namespace rtk
