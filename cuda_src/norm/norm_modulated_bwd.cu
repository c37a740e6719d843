// Backward of norm/norm_modulated.cu where no weight gradient is needed:
//
//     h = residual + gate * (x + bias),  n = (h - mean) * rstd,  a = n * (weight + offset) + norm_bias
//     y = (a * (1 + scale) + shift) * channel_scale
//
//     d = dy * channel_scale,  g = d * (1 + scale) * (weight + offset)
//     dh = rstd * (g - mean(g) - n * mean(g n)) + dsum      without mean(g) if not centred
//     dscale = a * d,  dshift = d,  dx = dh * gate,  dgate = (x + bias) * dh      one row of each for every row of x
//
// Absent operands are null pointers. x, dy, h, dsum and results are of T, all others of T or fp32. Arithmetic is fp32,
// rounded once at each store; the order of sums depends only on the number of columns.
//
// A RowGroup owns a row: thread i the columns [i * N, i * N + N) of each stretch of threads * N. The row is read two or
// three times, after the first time from the caches. Grid: rows / groups of a block.
#include "norm/norm_modulated.cuh"

namespace rtk {

inline constexpr i64 kAlignedRows = 1, kCentred = 2, kGateFp32 = 32, kBiasFp32 = 64, kWeightFp32 = 128, kNormBiasFp32 = 256,
                     kScaleFp32 = 512, kChannelFp32 = 2048;

template <typename T>
__global__ void __launch_bounds__(512)
    norm_modulated_bwd(const T* dy, const T* h, const T* dsum, const T* x, const void* gate, const void* bias, const void* weight,
                       const void* norm_bias, const void* scale, const void* channel_scale, T* dh, T* dscale, T* dshift, T* dx,
                       T* dgate, i64 rows, i64 cols, i64 dy_stride, i64 h_stride, i64 dsum_stride, i64 x_stride,
                       i64 gate_stride, i64 gate_divisor, i64 scale_stride, i64 scale_divisor, i64 lane_bits, i64 flags,
                       double eps, double offset) {
    constexpr int N = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
    __shared__ GroupScratch<2> pairs;
    const RowGroup group = RowGroup::of_lanes(lane_bits);
    const u32 row = blockIdx.x * group.count + group.index;
    const i64 end = row < rows ? cols : 0, start = row * cols;
    const bool aligned16 = flags & kAlignedRows, centred = flags & kCentred;
    const i64 gate_row = divided(row, gate_divisor) * gate_stride, scale_row = divided(row, scale_divisor) * scale_stride;
    auto for_all = [&](auto use) {
#pragma unroll 1
        for (i64 column = group.thread * N; column < end; column += group.threads * N) use(column, count_at<N>(column, end));
    };
    auto of_h = [&](i64 column, int valid, float(&v)[N]) {
        load_elements<T, N>(h + row * h_stride + column, valid, aligned16, v);
    };
    auto operand = [&](const void* p, i64 at, i64 fp32, int valid, float without, float(&v)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = without;
        if (p != nullptr) load_either<T, N>(p, at, flags & fp32, valid, aligned16, v);
    };
    // d, and g of N columns; `gain`: weight + offset.
    auto gradients = [&](i64 column, int valid, float(&d)[N], float(&gain)[N], float(&g)[N]) {
        float factor[N];
        load_elements<T, N>(dy + row * dy_stride + column, valid, aligned16, d);
        operand(channel_scale, column, kChannelFp32, valid, 1.0f, factor);
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] *= factor[i];
        operand(weight, column, kWeightFp32, valid, 1.0f, gain);
        const float more = weight != nullptr ? static_cast<float>(offset) : 0.0f;
        operand(scale, scale_row + column, kScaleFp32, valid, 0.0f, factor);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            gain[i] += more;
            g[i] = d[i] * (1.0f + factor[i]) * gain[i];
        }
    };

    const float count = static_cast<float>(cols);
    float rough = 0.0f;
    if (centred) {
        float sum = 0.0f;
        for_all([&](i64 column, int valid) {
            float v[N];
            of_h(column, valid, v);
#pragma unroll
            for (int i = 0; i < N; ++i) sum += v[i] * kSmallPart;
        });
        rough = mean_of_parts(group_reduce<Sum, false>(sum, group, scratch, 0), count);
    }
    float differences = 0.0f, squares = 0.0f, sum_g = 0.0f, sum_gh = 0.0f;
    for_all([&](i64 column, int valid) {
        float v[N], d[N], gain[N], g[N];
        of_h(column, valid, v);
        gradients(column, valid, d, gain, g);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float off = i < valid ? v[i] - rough : 0.0f;
            differences += off, squares += off * off;
            sum_g += i < valid ? g[i] : 0.0f, sum_gh += i < valid ? g[i] * off : 0.0f;
        }
    });
    group_reduce_pair<Sum, false>(differences, squares, group, pairs, 0);
    group_reduce_pair<Sum, false>(sum_g, sum_gh, group, pairs, 1);
    RowStatistics of_row = {0.0f, rstd_of(squares, count, static_cast<float>(eps))};
    if (centred) of_row = statistics_of(rough, differences, squares, count, static_cast<float>(eps));
    const float mean_g = centred ? mean_of(sum_g, count) : 0.0f;
    const float mean_gn = mean_of((sum_gh - (of_row.mean - rough) * sum_g) * of_row.rstd, count);

    for_all([&](i64 column, int valid) {
        float v[N], d[N], gain[N], g[N], other[N];
        of_h(column, valid, v);
        gradients(column, valid, d, gain, g);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            v[i] = (v[i] - of_row.mean) * of_row.rstd;
            g[i] = of_row.rstd * (g[i] - mean_g - v[i] * mean_gn);
        }
        const i64 at = start + column;
        if (dshift != nullptr) store_elements<T, N>(dshift + at, valid, aligned16, d);
        if (dscale != nullptr) {
            operand(norm_bias, column, kNormBiasFp32, valid, 0.0f, other);
#pragma unroll
            for (int i = 0; i < N; ++i) d[i] *= fmaf(v[i], gain[i], other[i]);
            store_elements<T, N>(dscale + at, valid, aligned16, d);
        }
        if (dsum != nullptr) {
            load_elements<T, N>(dsum + row * dsum_stride + column, valid, aligned16, other);
#pragma unroll
            for (int i = 0; i < N; ++i) g[i] += other[i];
        }
        if (dh != nullptr) store_elements<T, N>(dh + at, valid, aligned16, g);
        if (dgate != nullptr) {
            load_elements<T, N>(x + row * x_stride + column, valid, aligned16, v);
            operand(bias, column, kBiasFp32, valid, 0.0f, other);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = (v[i] + other[i]) * g[i];
            store_elements<T, N>(dgate + at, valid, aligned16, v);
        }
        if (dx != nullptr) {
            operand(gate, gate_row + column, kGateFp32, valid, 1.0f, other);
#pragma unroll
            for (int i = 0; i < N; ++i) g[i] *= other[i];
            store_elements<T, N>(dx + at, valid, aligned16, g);
        }
    });
}

}  // namespace rtk
