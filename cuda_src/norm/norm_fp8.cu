// Normalisation to e4m3 codes, one scale per 128 columns of a row; and statistics alone, for kernels that need them
// before they start (norm/norm_fp8_tile.cu).  v = h * rstd * gain, or if CENTRED v = (h - mean) * rstd * gain + bias,
// with gain = offset + weight, is quantised from fp32 (recipe: common/fp8_scale.cuh); h = x, or the rounded sum x +
// residual, which is then an output too. Inputs have any row stride; outputs are dense.
#include "common/pressure.cuh"
#include "common/reduce.cuh"
#include "norm/norm_fp8_stats.cuh"
#include "ptx/forget.cuh"
#include "ptx/pdl.cuh"
#include "quant/tile.cuh"

namespace rtk {

// The row in registers: thread i of a RowGroup owns the 16-byte vectors i, i + threads, ... (CHUNKS of them), so cols
// <= CHUNKS * VEC * threads_per_row. The kLanes neighbouring lanes of a group of 128 belong to one row: threads_per_row
// is a multiple of kLanes. The scale of row m, group j goes to scale[m * scale_row + j * scale_group]. `given`: rstd
// and mean are inputs, and no sums are computed. These may be null: residual and sum, weight, bias, q and scale, rstd
// and mean as outputs, y. Fewer than 2^31 rows.
template <typename T, typename W, int CHUNKS, bool CENTRED>
__global__ void __launch_bounds__(512, sizeof(W) == 2 && !CENTRED ? 2 : 1)
    norm_fp8_row(const T* x, const T* residual, const W* weight, const W* bias, e4m3* q, float* scale, float* rstd_at,
                 float* mean_at, T* y, T* sum, i64 rows, i64 cols, i64 x_stride, i64 residual_stride,
                 i64 threads_per_row, i64 scale_row, i64 scale_group, i64 pow2, i64 given, double eps, double offset) {
    constexpr int VEC = 16 / sizeof(T), kGroup = 128, kLanes = kGroup / VEC;
    __shared__ GroupScratch<1> scratch;
    __shared__ GroupScratch<2> pair_scratch;  // used only if sums are not exact
    const RowGroup group(threads_per_row);
    const u32 row = blockIdx.x * static_cast<u32>(group.count) + static_cast<u32>(group.index);
    const int width = static_cast<int>(cols), column = group.thread * VEC, pitch = group.threads * VEC;
    const bool row_exists = row < static_cast<u64>(rows);
    bool inside[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) inside[c] = row_exists && column + c * pitch < width;
    const float count = static_cast<float>(width), epsilon = static_cast<float>(eps);
    const bool weighted = weight != nullptr;
    const float base = weighted ? static_cast<float>(offset) : 1.0f;

    Raw<16> raw[CHUNKS];
    RawParts<W, VEC> gains[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        clear(raw[c]);
        clear(gains[c]);
    }
    {
        const T* from = settled(x + row * x_stride + column);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c, from += pitch)
            if (inside[c]) raw[c] = load_raw<T, VEC>(from);
        if (weighted) {
            const W* gain_from = settled(weight + column);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c, gain_from += pitch)
                if (inside[c]) gains[c] = load_keep_raw<W, VEC>(gain_from);
        }
    }
    if (residual != nullptr) {
        residual += row * residual_stride + column;
        sum += row * cols + column;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (inside[c]) {
                raw[c] = add_rounded<T, VEC>(raw[c], load_raw<T, VEC>(residual + c * pitch));
                ptx::st<16>(sum + c * pitch, raw[c]);
            }
        }
    }
    float v[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        unpack<T, VEC>(raw[c], v[c]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) ptx::keep(v[c][i]);
    }
    // With exact sums the mean is known before the squares are, and is subtracted first; otherwise at the end.
    constexpr bool kSubtractFirst = CENTRED && kExactSums<T>;
    float mean = 0.0f, rstd = 0.0f;
    if (given != 0) {
        if (row_exists) {
            rstd = rstd_at[row];
            if (CENTRED) mean = mean_at[row];
        }
        if constexpr (kSubtractFirst) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[c][i] -= mean;
        }
    } else {
        if constexpr (CENTRED) {
            float total = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < VEC; ++i) total += v[c][i] * kSmallPart;
            mean = mean_of_parts(group_reduce<Sum, false>(total, group, scratch, 0), count);
        }
        float differences = 0.0f, square = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = CENTRED ? (inside[c] ? v[c][i] - mean : 0.0f) : v[c][i];
                square += d * d;
                if constexpr (kSubtractFirst) {
                    v[c][i] = d;
                } else {
                    differences += d;
                }
            }
        }
        if constexpr (CENTRED && !kSubtractFirst) {
            group_reduce_pair<Sum, false>(differences, square, group, pair_scratch, 0);
            const RowStatistics found = statistics_of(mean, differences, square, count, epsilon);
            mean = found.mean, rstd = found.rstd;
        } else {
            rstd = rstd_of(group_reduce<Sum, false>(square, group, scratch, 1), count, epsilon);
        }
        if (group.thread == 0 && row_exists) {
            if (rstd_at != nullptr) rstd_at[row] = rstd;
            if (CENTRED && mean_at != nullptr) mean_at[row] = mean;
        }
    }

    // All values at once, in the registers of their inputs: one chain of shuffles and one scale per thread for all
    // vectors, instead of one after the other.
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        float gain[VEC], shift[VEC];
        unpack_parts<W, VEC>(gains[c], gain);
        if (base != 0.0f) {  // the same for all threads, and an instruction per element less
#pragma unroll
            for (int i = 0; i < VEC; ++i) gain[i] += base;
        }
        if constexpr (CENTRED) {
            RawParts<W, VEC> shifts;
            clear(shifts);
            if (bias != nullptr && inside[c]) shifts = load_keep_raw<W, VEC>(bias + column + c * pitch);
            unpack_parts<W, VEC>(shifts, shift);
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            if constexpr (CENTRED) {
                v[c][i] = (kSubtractFirst ? v[c][i] : v[c][i] - mean) * rstd * gain[i] + shift[i];
            } else {
                v[c][i] = v[c][i] * rstd * gain[i];
            }
        }
    }
    const u64 first = product(row, static_cast<u32>(width)) + static_cast<u32>(column);
    if (y != nullptr) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (inside[c]) store<T, VEC>(y + first + c * pitch, v[c]);
    }
    if (q == nullptr) return;

    // Maxima that ignore NaN but not infinities; the rare thread that met an infinity repeats this without infinities.
    float max_abs[CHUNKS], overall = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        max_abs[c] = fabsf(v[c][0]);
#pragma unroll
        for (int i = 1; i < VEC; ++i) max_abs[c] = fmaxf(max_abs[c], fabsf(v[c][i]));
        // Elements that do not exist are 0 (or NaN), unless there is a mean or a bias.
        if (CENTRED && !inside[c]) max_abs[c] = 0.0f;
        overall = fmaxf(overall, max_abs[c]);
    }
    if (overall == __uint_as_float(0x7f800000u)) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) max_abs[c] = inside[c] ? finite_amax(v[c]) : 0.0f;
    }
    const u32 lane = static_cast<u32>(group.thread) % kLanes;
    const float own = fp8_scale<e4m3>(scattered_max<CHUNKS, kLanes>(max_abs), pow2 != 0);
    const float own_inverse = inverse_scale(own);
    const u32 own_group = (static_cast<u32>(column) + lane % CHUNKS * static_cast<u32>(pitch)) / kGroup;
    if (lane < CHUNKS && own_group * kGroup < static_cast<u32>(width) && row_exists)
        scale[product(row, static_cast<u32>(scale_row)) + product(own_group, static_cast<u32>(scale_group))] = own;
    e4m3* to = settled(q + first);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c, to += pitch) {
        const Raw<VEC> codes = quantized<e4m3>(v[c], __shfl_sync(0xffffffffu, own_inverse, c, kLanes));
        if (inside[c]) ptx::st<VEC>(to, codes);
    }
}

// The statistics of the first `rows` rows, and the sum if there is a residual. From there up to `all_rows` rstd is set
// to -1, which no row has: not computed yet. `ticket` (may be null) becomes 0. Centred unless mean is null.
template <typename T, int VEC>
__global__ void __launch_bounds__(512)
    norm_fp8_stats(const T* x, const T* residual, T* sum, float* rstd, float* mean, u32* ticket, i64 rows, i64 all_rows,
                   i64 cols, i64 x_stride, i64 residual_stride, i64 threads_per_row, double eps) {
    __shared__ GroupScratch<1> scratch;
    ptx::launch_dependents();
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (i64 i = rows + thread; i < all_rows; i += static_cast<i64>(gridDim.x) * blockDim.x) rstd[i] = -1.0f;
    if (ticket != nullptr && thread == 0) *ticket = 0;
    const i64 end = row < rows ? cols : 0;
    x += row * x_stride;
    if (residual != nullptr) residual += row * residual_stride, sum += row * cols;
    auto reduce = [&](float v, int phase) { return group_reduce<Sum, false>(v, group, scratch, phase); };
    const RowStatistics found =
        row_statistics<T, VEC, true, 4>(x, residual, sum, end, static_cast<float>(static_cast<int>(cols)),
                                           static_cast<float>(eps), mean != nullptr, group.thread, group.threads,
                                           reduce);
    if (group.thread == 0 && row < rows) {
        rstd[row] = found.rstd;
        if (mean != nullptr) mean[row] = found.mean;
    }
}

}  // namespace rtk
