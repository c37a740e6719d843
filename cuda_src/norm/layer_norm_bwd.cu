// Backward of layer normalisation over the last dimension (layer_norm.cu): gradients of h, weight and bias.
//
// Rows are worked on by groups of threads (RowGroup). Inputs have any row stride; outputs are dense. The weight (which may
// be null) is of T, or fp32 if `weight_fp32`.
#include "common/block_sums.cuh"
#include "common/reduce.cuh"
#include "common/row_ring.cuh"
#include "norm/common.cuh"
#include "norm/moments.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Backward, with d = h - mean, g = dy * gain:
//   dh = rstd * (g - mean(g) - d * rstd^2 * mean(g * d)) + dsum;  dweight, dbias: sums of dy * d * rstd and dy over rows.
// mean and rstd are recomputed, since h is read anyway: four sums over the row, with one barrier (merge_warps).
//
// Persistent, one block of at most 512 threads per SM, for rows of at most CHUNKS * 512 16-byte vectors: a RowGroup
// owns a row, thread i of it the vectors i, i + threads, ...; rows arrive through a RowRing. With CHUNKS up to 2 gains
// and inputs stay in registers, and enough registers are left for a block of column_sum to wait while this one runs;
// with more they are reread. Fewer than 2^30 rows. Parameter gradients are summed in registers over the rows of a
// group, over the groups of the block in shared memory, and written as one fp32 row per block into `partial` [grid,
// partial_stride] (null if not needed): dweight, then dbias if partial_stride is more than cols. column_sum adds the
// rows: the order is fixed by the grid, never by timing.
template <typename T, int CHUNKS, bool DSUM, int STAGES>
__global__ void __maxnreg__(CHUNKS > 2 ? 128 : DSUM ? 120 : 112)
    layer_norm_bwd(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* partial, i64 rows, i64 cols,
                   i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps, double offset,
                   i64 weight_fp32, i64 partial_stride) {
    constexpr int VEC = 16 / sizeof(T);
    constexpr bool kKeep = CHUNKS <= 2;
    constexpr bool kExact = sizeof(T) == 2;  // fp16 sums over a warp's columns are exact, too (kExactSums)
    extern __shared__ __align__(16) u8 memory[];
    __shared__ GroupScratch<4> scratch;
    const RowGroup group(threads_per_row);
    const WarpColumns<VEC, CHUNKS> columns(group, cols);
    RowRing<DSUM ? 3 : 2, CHUNKS, STAGES> ring(memory);
    ptx::launch_dependents();  // column_sum's blocks are small enough to wait while this one runs
    const int step = static_cast<int>(gridDim.x) * group.count;
    const int first = static_cast<int>(blockIdx.x) * group.count + group.index;
    const float epsilon = static_cast<float>(eps);
    const float shift = static_cast<float>(offset);
    const float inverse = 1.0f / static_cast<float>(cols);
    const int pitch = group.threads * VEC;
    const int end = static_cast<int>(cols);
    const int column = group.thread * VEC;
    const int room = end - column;  // columns from this thread's first one on

    // Addresses are recomputed for every row: incremented pointers would take registers.
    const int count = static_cast<int>(rows);
    auto fetch = [&](int row) {
        if (row < count) {
            const i64 at = row;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (c * pitch < room) {
                    ring.copy(0, c, dy + at * dy_stride + (column + c * pitch));
                    ring.copy(1, c, h + at * h_stride + (column + c * pitch));
                    if constexpr (DSUM) ring.copy(2, c, dsum + at * dsum_stride + (column + c * pitch));
                }
            }
        }
        ring.commit();
    };

    // Groups that run out of rows keep reading their slots while others of the block work, so every slot must be
    // initialised.
    const bool unused_stages = first + (STAGES - 1) * step >= count;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (unused_stages || c * pitch >= room) ring.zero(memory, c);
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
            if (c * pitch < room) load_any_gain<T, VEC>(weight, weight_fp32, column + c * pitch, shift, gain[c]);
        }
    }

    int phase = 0;
    for (int row = first; row - group.index < count; row += step, phase ^= 1) {
        fetch(row + (STAGES - 1) * step);
        ring.wait();
        float dy_kept[kKeep ? CHUNKS : 1][VEC], h_kept[kKeep ? CHUNKS : 1][VEC];
        // Calls visit(dy, h, gain) for a vector; `second_pass` unless it is the first visit; past the end all are 0.
        auto visit_vector = [&](int c, bool second_pass, const auto& visit) {
            float(&incoming)[VEC] = dy_kept[kKeep ? c : 0];
            float(&v)[VEC] = h_kept[kKeep ? c : 0];
            float(&w)[VEC] = gain[kKeep ? c : 0];
            if (!kKeep || !second_pass) {
                ring.template read<T>(0, c, incoming);
                ring.template read<T>(1, c, v);
            }
            if constexpr (!kKeep) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) w[i] = 0.0f;
                if (c * pitch < room) load_any_gain<T, VEC>(weight, weight_fp32, column + c * pitch, shift, w);
            }
            visit(incoming, v, w);
        };
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // sums of h (later their mean), d^2, g and g * d
        float differences = 0.0f;                  // sum of d: the rounding error of the mean
#pragma unroll 2
        for (int c = 0; c < CHUNKS; ++c) {
            visit_vector(c, false, [&](const auto& incoming, const auto& v, const auto& w) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) sums[0] += v[i] * kSmallPart, sums[2] += incoming[i] * w[i];
            });
        }
        warp_reduce_pair<Sum>(sums[0], sums[2], group.threads);
        sums[0] = mean_of_parts(sums[0], columns.own());
#pragma unroll 2
        for (int c = 0; c < CHUNKS; ++c) {
            const float centre = c * pitch < room ? sums[0] : 0.0f;  // past the end h is 0
            visit_vector(c, true, [&](const auto& incoming, const auto& v, const auto& w) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float d = v[i] - centre;
                    if (!kExact) differences += d;
                    sums[1] += d * d;
                    sums[3] += incoming[i] * w[i] * d;
                }
            });
        }
        warp_reduce_pair<Sum>(sums[1], sums[3], group.threads);
        if constexpr (!kExact) {
            differences = warp_reduce<Sum>(differences, group.threads);
            const float off = differences * ptx::rcp(columns.own());
            sums[0] += off;
            sums[1] -= off * differences;
            sums[3] -= off * sums[2];
        }
        merge_warps<true>(sums, columns, group, scratch, phase);
        const float mean = sums[0];
        const float rstd = finite_rstd(sums[1] * inverse + epsilon, mean);
        const float level = sums[2] * inverse * rstd;
        const float pull = sums[3] * inverse * rstd * rstd * rstd;
        if (row < count) {
            T* out_row = dh + static_cast<i64>(row) * cols + column;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                visit_vector(c, true, [&](const auto& incoming, const auto& v, const auto& w) {
                    float out[VEC];
#pragma unroll
                    for (int i = 0; i < VEC; ++i) {
                        const float d = v[i] - mean, scaled = incoming[i] * rstd;
                        dweight[c][i] += scaled * d;
                        dbias[c][i] += incoming[i];
                        out[i] = scaled * w[i] - (d * pull + level);
                    }
                    if constexpr (DSUM) {
                        float extra[VEC];
                        ring.template read<T>(2, c, extra);
#pragma unroll
                        for (int i = 0; i < VEC; ++i) out[i] += extra[i];
                    }
                    if (c * pitch < room) store<T, VEC>(out_row + c * pitch, out);
                });
            }
        }
        ring.next_row();
    }

    if (partial == nullptr) return;
    partial += blockIdx.x * partial_stride;
    const int sets = partial_stride > cols ? 2 : 1;
    if (group.count == 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c * pitch < room) {
                store<float, VEC>(partial + column + c * pitch, dweight[c]);
                if (sets == 2) store<float, VEC>(partial + end + column + c * pitch, dbias[c]);
            }
        }
        return;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(memory);  // [groups, 2, cols]
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c * pitch < room) {
            float* mine = sums + 2 * group.index * end + column + c * pitch;
            put_sums(mine, dweight[c]);
            put_sums(mine + end, dbias[c]);
        }
    }
    __syncthreads();
    add_rows(sums, group.count, 2 * end, sets * end, partial);
}

// Backward for rows that do not fit in registers or allow only narrow accesses: reads the row three times and leaves
// mean and rstd of every row (`stats`, fp32 [rows, 2]; null when not wanted) for layer_norm_bwd_weight. dsum may be null.
template <typename T, int VEC>
__global__ void __launch_bounds__(1024, 1)
    layer_norm_bwd_long(const T* dy, const T* h, const void* weight, const T* dsum, T* dh, float* stats, i64 rows,
                        i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 threads_per_row, double eps,
                        double offset, i64 weight_fp32) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 first = static_cast<i64>(group.thread) * VEC;
    const int pitch = group.threads * VEC;
    const float count = static_cast<float>(cols), per_column = ptx::rcp(count), shift = static_cast<float>(offset);
    int phase = 0;
    auto reduce = [&](float v) { return group_reduce<Sum, false>(v, group, scratch, phase ^= 1); };
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
            load_any_gain<T, VEC>(weight, weight_fp32, column, shift, gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[i] *= gain[i];
        };
        float h_sum = 0.0f, g_sum = 0.0f, differences = 0.0f, square = 0.0f, product = 0.0f;
        for (i64 column = first; column < end; column += pitch) {
            float g[VEC], v[VEC];
            load(column, g, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h_sum += v[i] * per_column, g_sum += g[i];
        }
        const float rough = reduce(h_sum), g_total = reduce(g_sum), level = g_total / count;
        for (i64 column = first; column < end; column += pitch) {
            float g[VEC], v[VEC];
            load(column, g, v);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = v[i] - rough;
                differences += d;
                square += d * d;
                product += g[i] * d;
            }
        }
        differences = reduce(differences), square = reduce(square), product = reduce(product);
        const auto [mean, rstd] = statistics_of(rough, differences, square, count, static_cast<float>(eps));
        const float pull = (product - differences * per_column * g_total) / count * rstd * rstd;
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
