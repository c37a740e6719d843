// Layer normalisation over the last dimension:  y = (h - mean) * rstd * (offset + weight) + bias,
// rstd = 1/sqrt(mean((h - mean)^2) + eps), h = x, or the rounded sum x + residual, which is then an output too.
// fp32 arithmetic, one rounding at each store. The variance is always that of the differences from the finished mean:
// a mean far from zero costs no digits.
//
// Rows are worked on by groups of threads (RowGroup). Inputs have any row stride; outputs are dense. weight and bias
// (either may be null) have one type: W, or where it is chosen at run time T, or fp32 if `wide`.
#include "common/reduce.cuh"
#include "common/row_ring.cuh"
#include "norm/common.cuh"
#include "ptx/forget.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Forward with the row in registers: thread i of a RowGroup owns the 16-byte pieces i, i + threads, ... (CHUNKS of them)
// of its row, so cols <= CHUNKS * VEC * threads_per_row. Grid: rows / groups per block. weight and bias are requested at
// the end: other blocks have left them in L1, and the registers they would need are better spent on more blocks.
template <typename T, typename W, int CHUNKS, bool RESIDUAL>
__global__ void __launch_bounds__(sizeof(W) > sizeof(T) ? 512 : 768, 1)
    layer_norm_fwd(const T* x, const T* residual, const W* weight, const W* bias, T* y, T* sum, i64 rows, i64 cols,
                   i64 x_stride, i64 residual_stride, i64 threads_per_row, double eps, double offset) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    const float count = static_cast<float>(static_cast<int>(cols));
    const bool weighted = weight != nullptr, biased = bias != nullptr;
    x += row * x_stride + column;
    if constexpr (RESIDUAL) residual += row * residual_stride + column, sum += row * cols + column;
    weight += column;
    bias += column;
    y += row * cols + column;

    Raw<16> raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(raw[c]);
        if (column + c * pitch < end) raw[c] = load_raw<T, VEC>(x + c * pitch);
    }
    float total = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if constexpr (RESIDUAL) {
            if (column + c * pitch < end) {
                raw[c] = add_rounded<T, VEC>(raw[c], load_raw<T, VEC>(residual + c * pitch));
                ptx::st<16>(sum + c * pitch, raw[c]);
            }
        }
        float h[VEC];
        unpack<T, VEC>(raw[c], h);
#pragma unroll
        for (int i = 0; i < VEC; ++i) total += h[i];
    }
    const float mean = mean_of(group_reduce<Sum, false>(total, group, scratch, 0), count);
    float square = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            ptx::forget(raw[c]);
            float h[VEC];
            unpack<T, VEC>(raw[c], h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) square += (h[i] - mean) * (h[i] - mean);
        }
    }
    square = group_reduce<Sum, false>(square, group, scratch, 1);
    const float rstd = rsqrtf(mean_of(square, count) + static_cast<float>(eps));
    const float level = -mean * rstd;
    const float base = weighted ? static_cast<float>(offset) : 1.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            ptx::forget(raw[c]);
            WideRaw<W, VEC> gains, biases;
            clear(gains), clear(biases);
            if (weighted) gains = load_keep_raw<W, VEC>(weight + c * pitch);
            if (biased) biases = load_keep_raw<W, VEC>(bias + c * pitch);
            float h[VEC], gain[VEC], shift[VEC];
            unpack<T, VEC>(raw[c], h);
            unpack_wide<W, VEC>(gains, gain);
            unpack_wide<W, VEC>(biases, shift);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] = (h[i] * rstd + level) * (gain[i] + base) + shift[i];
            store<T, VEC>(y + c * pitch, h);
        }
    }
}

template <typename T, int N>
RTK_DEVICE void load_any_h(const T* x, const T* residual, float (&h)[N]) {
    if (residual == nullptr) {
        load_stream<T, N>(x, h);
    } else {
        unpack<T, N>(load_h<T, N, true>(x, residual), h);
    }
}

// Forward for rows that do not fit in registers or whose addresses allow only narrow accesses: reads the row three
// times. residual may be null.
template <typename T, int VEC>
__global__ void __launch_bounds__(1024, 1)
    layer_norm_fwd_long(const T* x, const T* residual, const void* weight, const void* bias, T* y, T* sum, i64 rows,
                        i64 cols, i64 x_stride, i64 residual_stride, i64 threads_per_row, double eps, double offset,
                        i64 wide) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 first = static_cast<i64>(group.thread) * VEC;
    const int pitch = group.threads * VEC;
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const T* x_row = x + row * x_stride;
        const T* residual_row = residual == nullptr ? nullptr : residual + row * residual_stride;
        auto load = [&](i64 column, float(&h)[VEC]) {
            load_any_h<T, VEC>(x_row + column, residual_row == nullptr ? nullptr : residual_row + column, h);
        };
        float total = 0.0f;
        for (i64 column = first; column < end; column += pitch) {
            float h[VEC];
            load(column, h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) total += h[i];
        }
        const float mean = group_reduce<Sum, false>(total, group, scratch, 0) / static_cast<float>(cols);
        float square = 0.0f;
        for (i64 column = first; column < end; column += pitch) {
            float h[VEC];
            load(column, h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) square += (h[i] - mean) * (h[i] - mean);
        }
        square = group_reduce<Sum, false>(square, group, scratch, 1);
        const float rstd = rsqrtf(square / static_cast<float>(cols) + static_cast<float>(eps));
        for (i64 column = first; column < end; column += pitch) {
            float h[VEC], gain[VEC], shift[VEC];
            load(column, h);
            if (residual != nullptr) store<T, VEC>(sum + row * cols + column, h);
            load_any_gain<T, VEC>(weight, wide, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) shift[i] = 0.0f;
            if (bias != nullptr) load_any_gain<T, VEC>(bias, wide, column, 0.0f, shift);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] = (h[i] - mean) * (rstd * gain[i]) + shift[i];
            store<T, VEC>(y + row * cols + column, h);
        }
    }
}

// Backward, with d = h - mean, g = dy * gain:
//   dh = rstd * (g - mean(g) - d * rstd^2 * mean(g * d)) + dsum;  dweight, dbias: sums of dy * d * rstd and dy over rows.
// mean and rstd are recomputed, since h is read anyway: the sums of h and g share a reduction, those of d^2 and g * d
// the next.
//
// Persistent, one block per multiprocessor, for rows of at most CHUNKS * 512 pieces of 16 bytes: a RowGroup owns a row,
// thread i of it the pieces i, i + threads, ...; rows arrive through a RowRing. With CHUNKS up to 2 gains and inputs stay
// in registers. Parameter gradients are summed in registers over the rows of a group, over the groups of the block in
// shared memory, and written as one fp32 row per block into `partial` [grid, partial_stride] (null when not wanted):
// dweight, then dbias if partial_stride is more than cols. column_sum adds the rows up: the order is fixed by the grid,
// never by timing.
template <typename T, int CHUNKS, bool DSUM, int STAGES>
__global__ void __launch_bounds__(512, 1)
    layer_norm_bwd(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* partial, i64 rows, i64 cols,
                   i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps, double offset,
                   i64 wide, i64 partial_stride) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr bool kKeep = CHUNKS <= 2;
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<2> scratch;
    const RowGroup group(threads_per_row);
    RowRing<DSUM ? 3 : 2, CHUNKS, STAGES> ring(memory);
    ptx::launch_dependents();  // column_sum's blocks are small enough to wait beside this one
    const i64 step = static_cast<i64>(gridDim.x) * group.count;
    const i64 first = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const float epsilon = static_cast<float>(eps);
    const float shift = static_cast<float>(offset);
    const float count = static_cast<float>(cols);
    const float inverse = 1.0f / count;
    const int pitch = group.threads * VEC;
    const int end = static_cast<int>(cols);
    const int column = group.thread * VEC;

    // Pointers that walk along with the rows: this thread's first column of the next row to fetch, and to store.
    dy += first * dy_stride + column;
    h += first * h_stride + column;
    if constexpr (DSUM) dsum += first * dsum_stride + column;
    dh += first * cols + column;
    auto fetch = [&](i64 row) {
        if (row < rows) {
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
        dy += step * dy_stride;
        h += step * h_stride;
        if constexpr (DSUM) dsum += step * dsum_stride;
    };

    // Groups that run out of rows go on reading their slots while others of the block work: all must hold something.
    const bool few = first + (STAGES - 1) * step >= rows;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (few || column + c * pitch >= end) ring.zero(memory, c);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) fetch(first + s * step);
    float gain[kKeep ? CHUNKS : 1][VEC], dweight[CHUNKS][VEC], dbias[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) dweight[c][i] = dbias[c][i] = 0.0f;
        if constexpr (kKeep) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) gain[c][i] = 0.0f;
            if (column + c * pitch < end) load_any_gain<T, VEC>(weight, wide, column + c * pitch, shift, gain[c]);
        }
    }

    for (i64 row = first; row - group.index < rows; row += step) {
        fetch(row + (STAGES - 1) * step);
        ring.wait();
        float dy_kept[kKeep ? CHUNKS : 1][VEC], h_kept[kKeep ? CHUNKS : 1][VEC];
        // The pieces of chunk c: kept, or read again from where they are.
        auto read = [&](int c, bool gains) {
            ring.template read<T>(0, c, dy_kept[kKeep ? c : 0]);
            ring.template read<T>(1, c, h_kept[kKeep ? c : 0]);
            if (!kKeep && gains) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) gain[0][i] = 0.0f;
                if (column + c * pitch < end) load_any_gain<T, VEC>(weight, wide, column + c * pitch, shift, gain[0]);
            }
        };
        float h_sum = 0.0f, g_sum = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            read(c, true);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                h_sum += h_kept[kKeep ? c : 0][i];
                g_sum += dy_kept[kKeep ? c : 0][i] * gain[kKeep ? c : 0][i];
            }
        }
        group_reduce_pair<Sum, true>(h_sum, g_sum, group, scratch, 0);
        const float mean = h_sum / count;
        float square = 0.0f, product = 0.0f;  // sums of d^2 and g * d
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if constexpr (!kKeep) read(c, true);
            float(&d)[VEC] = h_kept[kKeep ? c : 0];
#pragma unroll
            for (int i = 0; i < VEC; ++i) d[i] -= mean;
            if (column + c * pitch < end) {  // past the end h is 0, not mean
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    square += d[i] * d[i];
                    product += dy_kept[kKeep ? c : 0][i] * gain[kKeep ? c : 0][i] * d[i];
                }
            }
        }
        group_reduce_pair<Sum, true>(square, product, group, scratch, 1);
        const float rstd = rsqrtf(square * inverse + epsilon);
        const float pull = product * inverse * rstd * rstd * rstd;
        const float level = g_sum * inverse * rstd;
        if (row < rows) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if constexpr (!kKeep) {
                    read(c, true);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) h_kept[0][i] -= mean;
                }
                float out[VEC];
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float d = h_kept[kKeep ? c : 0][i], incoming = dy_kept[kKeep ? c : 0][i];
                    const float scaled = incoming * rstd;
                    dweight[c][i] += scaled * d;
                    dbias[c][i] += incoming;
                    out[i] = scaled * gain[kKeep ? c : 0][i] - (d * pull + level);
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
    partial += blockIdx.x * partial_stride;
    const int sets = partial_stride > cols ? 2 : 1;
    if (group.count == 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (column + c * pitch < end) {
                store<float, VEC>(partial + column + c * pitch, dweight[c]);
                if (sets == 2) store<float, VEC>(partial + end + column + c * pitch, dbias[c]);
            }
        }
        return;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* sums_of_groups = reinterpret_cast<float*>(memory);  // [groups, 2, cols]
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            float* mine = sums_of_groups + 2 * group.index * end + column + c * pitch;
#pragma unroll
            for (int i = 0; i < VEC; i += 4) {
                *reinterpret_cast<float4*>(mine + i) =
                    make_float4(dweight[c][i], dweight[c][i + 1], dweight[c][i + 2], dweight[c][i + 3]);
                *reinterpret_cast<float4*>(mine + end + i) =
                    make_float4(dbias[c][i], dbias[c][i + 1], dbias[c][i + 2], dbias[c][i + 3]);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < sets * end; i += blockDim.x) {
        float total = 0.0f;
        for (int g = 0; g < group.count; ++g) total += sums_of_groups[2 * g * end + i];
        partial[i] = total;
    }
}

// Backward for rows that do not fit in registers or allow only narrow accesses: reads the row three times and leaves
// mean and rstd of every row (`stats`, fp32 [rows, 2]; null when not wanted) for layer_norm_bwd_weight. dsum may be null.
template <typename T, int VEC>
__global__ void __launch_bounds__(1024, 1)
    layer_norm_bwd_long(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* stats, i64 rows,
                        i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps,
                        double offset, i64 wide) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 first = static_cast<i64>(group.thread) * VEC;
    const int pitch = group.threads * VEC;
    const float count = static_cast<float>(cols), shift = static_cast<float>(offset);
    for (i64 base = static_cast<i64>(blockIdx.x) * group.count; base < rows;
         base += static_cast<i64>(gridDim.x) * group.count) {
        const i64 row = base + group.index;
        const i64 end = row < rows ? cols : 0;
        const T* dy_row = dy + row * dy_stride;
        const T* h_row = h + row * h_stride;
        auto load = [&](i64 column, float(&g)[VEC], float(&v)[VEC]) {
            float gain[VEC];
            load_stream<T, VEC>(dy_row + column, g);
            load_stream<T, VEC>(h_row + column, v);
            load_any_gain<T, VEC>(weight, wide, column, shift, gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[i] *= gain[i];
        };
        float h_sum = 0.0f, g_sum = 0.0f, square = 0.0f, product = 0.0f;
        for (i64 column = first; column < end; column += pitch) {
            float g[VEC], v[VEC];
            load(column, g, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h_sum += v[i], g_sum += g[i];
        }
        const float mean = group_reduce<Sum, false>(h_sum, group, scratch, 0) / count;
        const float level = group_reduce<Sum, false>(g_sum, group, scratch, 1) / count;
        for (i64 column = first; column < end; column += pitch) {
            float g[VEC], v[VEC];
            load(column, g, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                square += (v[i] - mean) * (v[i] - mean);
                product += g[i] * (v[i] - mean);
            }
        }
        square = group_reduce<Sum, false>(square, group, scratch, 0);
        product = group_reduce<Sum, false>(product, group, scratch, 1);
        const float rstd = rsqrtf(square / count + static_cast<float>(eps));
        const float pull = product / count * rstd * rstd;
        if (stats != nullptr && row < rows && group.thread == 0) stats[2 * row] = mean, stats[2 * row + 1] = rstd;
        for (i64 column = first; column < end; column += pitch) {
            float g[VEC], v[VEC];
            load(column, g, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) v[i] = rstd * (g[i] - ((v[i] - mean) * pull + level));
            if (dsum != nullptr) {
                float extra[VEC];
                load_stream<T, VEC>(dsum + row * dsum_stride + column, extra);
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[i] += extra[i];
            }
            store<T, VEC>(dh + row * cols + column, v);
        }
    }
}

// Partial parameter gradients for the long rows: block (x, y) sums dy * (h - mean) * rstd and dy over every gridDim.y-th
// row for the blockDim.x * VEC columns it owns, into row y of `partial` (laid out as by layer_norm_bwd).
template <typename T, int VEC>
__global__ void __launch_bounds__(256)
    layer_norm_bwd_weight(const T* dy, const T* h, const float* stats, float* partial, i64 rows, i64 cols, i64 dy_stride,
                          i64 h_stride, i64 partial_stride) {
    const i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    if (column >= cols) return;
    float dweight[VEC], dbias[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) dweight[i] = dbias[i] = 0.0f;
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        float g[VEC], v[VEC];
        load_stream<T, VEC>(dy + row * dy_stride + column, g);
        load_stream<T, VEC>(h + row * h_stride + column, v);
        const float mean = stats[2 * row], rstd = stats[2 * row + 1];
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            dweight[i] += g[i] * ((v[i] - mean) * rstd);
            dbias[i] += g[i];
        }
    }
    partial += blockIdx.y * partial_stride + column;
    store<float, VEC>(partial, dweight);
    if (partial_stride > cols) store<float, VEC>(partial + cols, dbias);
}

}  // namespace rtk
