// Softmax over the last dimension and its logarithm, with z = scale * x:
//   y = exp(z - max z) / sum,   or   y = z - max z - log(sum),   sum over the row of exp(z - max z)
// fp32 arithmetic, one rounding at the store. Columns from lengths[row] on do not count: y is 0, or -inf. So is all of a
// row that has nothing but -inf or no valid column. A NaN or +inf makes the row NaN.
//
// Rows are worked on by groups of threads (RowGroup). x and y have any row stride and may be the same memory: a thread
// has read each piece for the last time before it overwrites it, and no other thread reads it.
#include "softmax/rows.cuh"

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

// Makes scores ready for a TopAndSum: signs flipped, -inf from `valid` columns after the first one of the piece on.
template <typename T, int N>
RTK_DEVICE void prepare_scores(Raw<sizeof(T) * N>& raw, u32 flip, int valid) {
#pragma unroll
    for (u32& word : raw.w) word ^= flip;
    if (valid < N) mask_tail<T, N, true>(raw, valid);
}

// Forward for rows that fit in shared memory: thread i of a RowGroup owns the 16-byte pieces i, i + threads, ... (CHUNKS
// of them) of its row, so cols <= CHUNKS * VEC * threads_per_row. Grid: rows / groups per block. A thread's pieces stay
// in slots of its own, CHUNKS * blockDim.x * 16 bytes in all, and are read from there for the sum and for the result: that
// leaves registers for more blocks, and a row needs only one reduction, of maximum and sum together.
template <typename T, int CHUNKS, bool LOG>
__global__ void __launch_bounds__(CHUNKS > 4 ? 1024 : 256, CHUNKS > 4 ? 1 : 5)
    softmax_fwd(const T* x, T* y, const void* lengths, i64 rows, i64 cols, i64 x_stride, i64 y_stride, i64 wide,
                i64 threads_per_row, double scale) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr int kStep = CHUNKS % 2 == 0 ? 2 : CHUNKS;  // pieces that are waited for and rescaled together
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    const Exponent<T> exponent(scale);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int limit = row < rows ? static_cast<int>(valid_columns(lengths, wide, row, cols)) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    const ThreadSlots slots(memory);
    x += row * x_stride + column;
    y += row * y_stride + column;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < limit) slots.copy(c, x + c * pitch);
        if (c % kStep == kStep - 1) ptx::cp_async_commit();
    }
    if (exponent.flip != 0 || column + (CHUNKS - 1) * pitch + VEC > limit) {
        ptx::cp_async_wait<0>();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int valid = limit - column - c * pitch;
            Raw<16> raw;
            clear(raw);
            if (valid > 0) raw = slots.read(c);
            prepare_scores<T, VEC>(raw, exponent.flip, valid);
            slots.at(memory, c) = raw;
        }
    }

    TopAndSum part;
#pragma unroll
    for (int c = 0; c < CHUNKS; c += kStep) {
        wait_for_all_but((CHUNKS - c) / kStep - 1);
        float top = part.top;
#pragma unroll
        for (int k = c; k < c + kStep; ++k) {
            float v[VEC];
            unpack<T, VEC>(slots.read(k), v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) top = fmaxf(top, v[i]);
        }
        part.raise(top, exponent);
#pragma unroll
        for (int k = c; k < c + kStep; ++k) {
            float v[VEC];
            unpack<T, VEC>(slots.read(k), v);
            part.add<VEC>(v, exponent);
        }
    }
    const Result<T, LOG> result(exponent, group_top_and_sum(part, exponent, group, scratch, 0));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            float v[VEC];
            unpack<T, VEC>(slots.read(c), v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = result(v[i]);
            Raw<16> out = pack<T, VEC>(v);
            if (column + c * pitch + VEC > limit) mask_tail<T, VEC, LOG>(out, limit - column - c * pitch);
            ptx::st<16>(y + c * pitch, out);
        }
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

// Forward for rows that do not fit or whose addresses allow only narrow accesses: reads the row once for maximum and sum
// together, and once more to write it.
template <typename T, int VEC>
__global__ void __launch_bounds__(1024, 1)
    softmax_fwd_long(const T* x, T* y, const void* lengths, i64 rows, i64 cols, i64 x_stride, i64 y_stride, i64 wide,
                     i64 threads_per_row, double scale, i64 log) {
    constexpr int CHUNKS = VEC == 1 ? 8 : 2;  // pieces in flight
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    const Exponent<T> exponent(scale);
    const int pitch = group.threads * VEC;
    const i64 first = static_cast<i64>(group.thread) * VEC;
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 limit = row < rows ? valid_columns(lengths, wide, row, cols) : 0;
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
        const TopAndSum whole = group_top_and_sum(part, exponent, group, scratch, phase);
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
                            v[c][i] = log ? -kInfinity : 0.0f;
                        } else {
                            v[c][i] = log ? logarithm_of(v[c][i]) : share_of(v[c][i]);
                        }
                    }
                    store<T, VEC>(y_row + column, v[c]);
                }
            }
        }
    }
}

// ---- backward:  dx = scale * y * (dy - sum of dy * y),  or  dx = scale * (dy - exp(y) * sum of dy) ------------------

// Its part of the sum over the row.
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
            g[i] = scale * v[i] * (g[i] - sum);
        }
    }
}

// Zeros in the pieces of dy and y from `valid` columns after the first one of chunk 0 on.
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

// One row in registers, as in softmax_row; dy_raw and y_raw are 0 from `limit` on.
template <typename T, int CHUNKS, bool LOG>
RTK_DEVICE void softmax_row_gradient(Raw<16> (&dy_raw)[CHUNKS], Raw<16> (&y_raw)[CHUNKS], float scale,
                                     const RowGroup& group, GroupScratch<1>& scratch, T* dx, int column, int pitch,
                                     int end, int limit, u32 zero) {
    constexpr int VEC = 16 / sizeof(T);
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        float g[VEC], v[VEC];
        unpack<T, VEC>(dy_raw[c], g);
        unpack<T, VEC>(y_raw[c], v);
        sum += gradient_sum<LOG, VEC>(g, v);
    }
    sum = group_reduce<Sum, false>(sum, group, scratch, 0);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            refresh(dy_raw[c], zero);
            refresh(y_raw[c], zero);
            float g[VEC], v[VEC];
            unpack<T, VEC>(dy_raw[c], g);
            unpack<T, VEC>(y_raw[c], v);
            gradient<T, LOG, VEC>(g, v, sum, scale);
            Raw<16> out = pack<T, VEC>(g);
            if (column + c * pitch + VEC > limit) mask_tail<T, VEC, false>(out, limit - column - c * pitch);
            ptx::st<16>(dx + c * pitch, out);
        }
    }
}

// As softmax_fwd.
template <typename T, int CHUNKS, bool LOG>
__global__ void __launch_bounds__(1024, 1)
    softmax_bwd(const T* dy, const T* y, T* dx, const void* lengths, i64 rows, i64 cols, i64 dy_stride, i64 y_stride,
                i64 wide, i64 threads_per_row, double scale) {
    constexpr int VEC = 16 / sizeof(T);
    const u32 zero = static_cast<u32>(rows >> 62);
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int limit = row < rows ? static_cast<int>(valid_columns(lengths, wide, row, cols)) : 0;
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
    softmax_row_gradient<T, CHUNKS, LOG>(dy_raw, y_raw, static_cast<float>(scale), group, scratch, dx, column, pitch, end,
                                         limit, zero);
}

// As softmax_fwd_long.
template <typename T, int VEC>
__global__ void __launch_bounds__(1024, 1)
    softmax_bwd_long(const T* dy, const T* y, T* dx, const void* lengths, i64 rows, i64 cols, i64 dy_stride,
                     i64 y_stride, i64 wide, i64 threads_per_row, double scale, i64 log) {
    constexpr int CHUNKS = VEC == 1 ? 8 : 1;
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const int pitch = group.threads * VEC;
    const i64 first = static_cast<i64>(group.thread) * VEC;
    const float slope = static_cast<float>(scale);
    int phase = 0;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count, phase ^= 1) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const i64 limit = row < rows ? valid_columns(lengths, wide, row, cols) : 0;
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

}  // namespace rtk
