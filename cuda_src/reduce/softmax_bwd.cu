// Backward of softmax and of its logarithm (softmax.cu):
//   dx = scale * (y * dy - y * sum of dy * y),   or   dx = scale * (dy - exp(y) * sum of dy),   sums over the row
// Arithmetic is fp32, rounded once at the store. Columns from lengths[row] on are masked: dx is 0. A group of threads
// (RowGroup) works on a row; dy and y have any row stride, dx is dense.
#include "reduce/softmax_rows.cuh"

namespace rtk {

// Contribution of a vector to the sum over the row.
template <bool LOG, int N>
RTK_DEVICE float gradient_sum(const float (&g)[N], const float (&v)[N]) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) part += LOG ? g[i] : g[i] * v[i];
    return part;
}

// g becomes the gradient of x.
template <typename T, bool LOG, int N>
RTK_DEVICE void gradient(float (&g)[N], const float (&v)[N], float sum, float scale) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if constexpr (LOG) {
            g[i] = scale * (g[i] - exponential<sizeof(T) == 2>(v[i]) * sum);
        } else {
            const float weight = scale * v[i];
            g[i] = weight * g[i] - weight * sum;  // the difference of g and the sum may be too large for a float
        }
    }
}

// Zeros in the vectors of dy and y from `valid` columns after the first one of chunk 0 on.
template <typename T, int N, int CHUNKS>
RTK_DEVICE void zero_past(Raw<sizeof(T) * N> (&dy_raw)[CHUNKS], Raw<sizeof(T) * N> (&y_raw)[CHUNKS], int valid,
                          int pitch) {
    if (valid - (CHUNKS - 1) * pitch < N) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            mask_tail<T, N, false>(dy_raw[c], valid - c * pitch);
            mask_tail<T, N, false>(y_raw[c], valid - c * pitch);
        }
    }
}

// A thread's part of the sum over the row.
template <typename T, int CHUNKS, bool LOG>
RTK_DEVICE float sum_in_registers(const Raw<16> (&dy_raw)[CHUNKS], const Raw<16> (&y_raw)[CHUNKS]) {
    constexpr int VEC = 16 / sizeof(T);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        float g[VEC], v[VEC];
        unpack<T, VEC>(dy_raw[c], g);
        unpack<T, VEC>(y_raw[c], v);
        sum += gradient_sum<LOG, VEC>(g, v);
    }
    return sum;
}

// The gradient of x in a vector.
template <typename T, bool LOG>
RTK_DEVICE Raw<16> gradient_in_registers(Raw<16> dy_raw, Raw<16> y_raw, float sum, float scale, u32 zero) {
    constexpr int VEC = 16 / sizeof(T);
    refresh(dy_raw, zero);
    refresh(y_raw, zero);
    float g[VEC], v[VEC];
    unpack<T, VEC>(dy_raw, g);
    unpack<T, VEC>(y_raw, v);
    gradient<T, LOG, VEC>(g, v, sum, scale);
    return pack<T, VEC>(g);
}

// With the row in registers: thread i of a RowGroup owns the 16-byte vectors i, i + threads, ... (CHUNKS of them) of dy
// and y, so cols <= CHUNKS * VEC * threads_per_row. Grid: rows / groups per block.
template <typename T, int CHUNKS>
__global__ void __launch_bounds__(CHUNKS > 2 ? 1024 : 512, CHUNKS > 2 ? 1 : CHUNKS > 1 ? 3 : 4)
    softmax_bwd(const T* dy, const T* y, T* dx, const void* lengths, i64 rows, i64 cols, i64 dy_stride, i64 y_stride,
                i64 lengths_int64, i64 threads_per_row, double scale, i64 log) {
    constexpr int VEC = 16 / sizeof(T);
    const u32 zero = static_cast<u32>(rows >> 62);
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int limit = row < rows ? static_cast<int>(valid_columns(lengths, lengths_int64, row, cols)) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    dy += row * dy_stride + column;
    y += row * y_stride + column;
    dx += row * cols + column;
    Raw<16> dy_raw[CHUNKS], y_raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < limit) {
            dy_raw[c] = load_raw<T, VEC>(dy + c * pitch);
            y_raw[c] = load_raw<T, VEC>(y + c * pitch);
        }
    }
    zero_past<T, VEC>(dy_raw, y_raw, limit - column, pitch);
    const float part = log ? sum_in_registers<T, CHUNKS, true>(dy_raw, y_raw) : sum_in_registers<T, CHUNKS, false>(dy_raw, y_raw);
    const float sum = group_reduce<Sum, false>(part, group, scratch, 0);
    const float slope = static_cast<float>(scale);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            Raw<16> out = log ? gradient_in_registers<T, true>(dy_raw[c], y_raw[c], sum, slope, zero)
                              : gradient_in_registers<T, false>(dy_raw[c], y_raw[c], sum, slope, zero);
            if (column + c * pitch + VEC > limit) mask_tail<T, VEC, false>(out, limit - column - c * pitch);
            ptx::st<16>(dx + c * pitch, out);
        }
    }
}

template <typename T, int VEC>
RTK_DEVICE void long_rows(const T* dy, const T* y, T* dx, const void* lengths, i64 rows, i64 cols, i64 dy_stride,
                          i64 y_stride, i64 lengths_int64, i64 threads_per_row, double scale, i64 log,
                          GroupScratch<1>& scratch) {
    constexpr int CHUNKS = VEC == 1 ? 8 : 1;
    const RowGroup group(threads_per_row);
    const int pitch = group.threads * VEC;
    const i64 first = static_cast<i64>(group.thread) * VEC;
    const float slope = static_cast<float>(scale);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 limit = row < rows ? valid_columns(lengths, lengths_int64, row, cols) : 0;
        const T* dy_row = dy + row * dy_stride;
        const T* y_row = y + row * y_stride;
        auto load = [&](i64 column, Raw<sizeof(T) * VEC>& dy_raw, Raw<sizeof(T) * VEC>& y_raw) {
            if (column < limit) {
                dy_raw = load_raw<T, VEC>(dy_row + column);
                y_raw = load_raw<T, VEC>(y_row + column);
            }
            if (column + VEC > limit) {
                const int valid = column < limit ? static_cast<int>(limit - column) : 0;
                mask_tail<T, VEC, false>(dy_raw, valid);
                mask_tail<T, VEC, false>(y_raw, valid);
            }
        };
        float sum = 0.0f;
        for (i64 start = first; start < limit; start += CHUNKS * pitch) {
            Raw<sizeof(T) * VEC> dy_raw[CHUNKS], y_raw[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) load(start + c * pitch, dy_raw[c], y_raw[c]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                float g[VEC], v[VEC];
                unpack<T, VEC>(dy_raw[c], g);
                unpack<T, VEC>(y_raw[c], v);
                sum += log ? gradient_sum<true, VEC>(g, v) : gradient_sum<false, VEC>(g, v);
            }
        }
        sum = group_reduce<Sum, false>(sum, group, scratch, phase);
        for (i64 start = first; start < end; start += CHUNKS * pitch) {
            Raw<sizeof(T) * VEC> dy_raw[CHUNKS], y_raw[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) load(start + c * pitch, dy_raw[c], y_raw[c]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const i64 column = start + c * pitch;
                if (column < end) {
                    float g[VEC], v[VEC];
                    unpack<T, VEC>(dy_raw[c], g);
                    unpack<T, VEC>(y_raw[c], v);
                    if (log) {
                        gradient<T, true, VEC>(g, v, sum, slope);
                    } else {
                        gradient<T, false, VEC>(g, v, sum, slope);
                    }
                    Raw<sizeof(T) * VEC> out = pack<T, VEC>(g);
                    if (column + VEC > limit)
                        mask_tail<T, VEC, false>(out, column < limit ? static_cast<int>(limit - column) : 0);
                    ptx::st<sizeof(T) * VEC>(dx + row * cols + column, out);
                }
            }
        }
    }
}

// As softmax_fwd_long.
template <typename T>
__global__ void __launch_bounds__(1024, 1)
    softmax_bwd_long(const T* dy, const T* y, T* dx, const void* lengths, i64 rows, i64 cols, i64 dy_stride,
                     i64 y_stride, i64 lengths_int64, i64 threads_per_row, double scale, i64 log, i64 aligned16) {
    __shared__ GroupScratch<1> scratch;
    if (aligned16) {
        long_rows<T, 16 / sizeof(T)>(dy, y, dx, lengths, rows, cols, dy_stride, y_stride, lengths_int64, threads_per_row,
                                     scale, log, scratch);
    } else {
        long_rows<T, 1>(dy, y, dx, lengths, rows, cols, dy_stride, y_stride, lengths_int64, threads_per_row, scale, log,
                        scratch);
    }
}

}  // namespace rtk
