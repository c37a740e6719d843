// Forward of layer normalisation over the last dimension:  y = (h - mean) * rstd * (offset + weight) + bias,
// rstd = 1/sqrt(mean((h - mean)^2) + eps), h = x, or the rounded sum x + residual, which is then an output too.
// Arithmetic is fp32, rounded once at each store. The variance always uses differences from the mean, which is
// subtracted first: a mean far from zero costs no precision, and rows of equal numbers give exactly the bias. Sums of h
// are sums of h / cols, which do not overflow; where sums of squares do, rstd is 0.
//
// Rows are worked on by groups of threads (RowGroup). Inputs have any row stride; outputs are dense. weight and bias
// (either may be null) have one type: W, or where it is chosen at run time T, or fp32 if `weight_fp32`.
#include "common/reduce.cuh"
#include "norm/common.cuh"
#include "ptx/forget.cuh"

namespace rtk {

// Forward with the row in registers: thread i of a RowGroup owns the 16-byte vectors i, i + threads, ... (CHUNKS of
// them) of its row, so cols <= CHUNKS * VEC * threads_per_row. Grid: rows / groups per block. weight and bias are
// loaded at the end: other blocks have left them in L1, and their registers are better spent on more blocks. Blocks of
// at most 512 threads, or 384 with CHUNKS 6: with fewer vectors a thread, an SM has room for two blocks of long rows only.
template <typename T, typename W, int CHUNKS>
__global__ void __launch_bounds__(CHUNKS > 4 ? 384 : sizeof(W) > sizeof(T) ? 512 : 768, CHUNKS > 4 ? 2 : 1)
    layer_norm_fwd(const T* x, const T* residual, const W* weight, const W* bias, T* y, T* sum, i64 rows, i64 cols,
                   i64 x_stride, i64 residual_stride, i64 threads_per_row, double eps, double offset) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
    __shared__ GroupScratch<2> pair_scratch;  // not used with exact sums
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const int end = row < rows ? static_cast<int>(cols) : 0;
    const int column = group.thread * VEC;
    const int pitch = group.threads * VEC;
    const float count = static_cast<float>(static_cast<int>(cols));
    const bool weighted = weight != nullptr, biased = bias != nullptr;
    x += row * x_stride + column;
    const bool summed = residual != nullptr;
    if (summed) residual += row * residual_stride + column, sum += row * cols + column;
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
        if (summed && column + c * pitch < end) {
            raw[c] = add_rounded<T, VEC>(raw[c], load_raw<T, VEC>(residual + c * pitch));
            ptx::st<16>(sum + c * pitch, raw[c]);
        }
        float h[VEC];
        unpack<T, VEC>(raw[c], h);
#pragma unroll
        for (int i = 0; i < VEC; ++i) total += h[i] * kSmallPart;
    }
    const float rough = mean_of_parts(group_reduce<Sum, false>(total, group, scratch, 0), count);
    float differences = 0.0f, square = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            ptx::forget(raw[c]);
            float h[VEC];
            unpack<T, VEC>(raw[c], h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = h[i] - rough;
                if (!kExactSums<T>) differences += d;
                square += d * d;
            }
        }
    }
    if constexpr (kExactSums<T>) {
        square = group_reduce<Sum, false>(square, group, scratch, 1);
    } else {
        group_reduce_pair<Sum, false>(differences, square, group, pair_scratch, 0);
    }
    const auto [mean, rstd] = statistics_of(rough, differences, square, count, static_cast<float>(eps));
    const float base = weighted ? static_cast<float>(offset) : 1.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column + c * pitch < end) {
            ptx::forget(raw[c]);
            RawParts<W, VEC> gains, biases;
            clear(gains), clear(biases);
            if (weighted) gains = load_keep_raw<W, VEC>(weight + c * pitch);
            if (biased) biases = load_keep_raw<W, VEC>(bias + c * pitch);
            float h[VEC], gain[VEC], shift[VEC];
            unpack<T, VEC>(raw[c], h);
            unpack_parts<W, VEC>(gains, gain);
            unpack_parts<W, VEC>(biases, shift);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] = (h[i] - mean) * rstd * (gain[i] + base) + shift[i];
            store<T, VEC>(y + c * pitch, h);
        }
    }
}

// Threads per SM that its registers must suffice for.
template <typename T, typename W, int VECTORS>
constexpr int uniform_resident() {
    if (VECTORS > 2) return sizeof(W) > sizeof(T) || !RTK_HAS_TMA ? 768 : 1024;
    return sizeof(W) > sizeof(T) ? 1024 : RTK_HAS_TMA ? 1536 : 1280;
}

// Forward for rows of exactly VECTORS 16-byte vectors per thread of a block, without a residual: nothing is masked, and
// there is one barrier. Every warp uses differences from the mean of its own columns, of which all warps have equally
// many; the means are merged as differences from that of the first warp, which costs no precision either. Blocks have
// at most THREADS threads; with two vectors per thread, exactly that many or one warp less. Takes the arguments of
// layer_norm_fwd.
template <typename T, typename W, int VECTORS, int THREADS>
__global__ void __launch_bounds__(THREADS, uniform_resident<T, W, VECTORS>() / THREADS)
    layer_norm_fwd_uniform(const T* x, const T*, const W* weight, const W* bias, T* y, T*, i64, i64 cols, i64 x_stride, i64, i64,
                        double eps, double offset) {
    constexpr int VEC = 16 / sizeof(T), kMaxWarps = THREADS / kWarp;
    constexpr float kEach = VECTORS * kWarp * VEC;  // columns of a warp
    constexpr bool kExact = sizeof(T) == 2;        // fp16 sums over a warp's columns are exact, too (kExactSums)
    constexpr bool kLoadsBeforeSums = VECTORS <= 2;           // weight and bias are loaded before the sums are merged
    __shared__ float means[kMaxWarps], squares[kMaxWarps];
    const int threads = static_cast<int>(blockDim.x);
    constexpr int pitch = kWarp * VEC;  // the vectors of a warp are adjacent
    const int column = static_cast<int>(threadIdx.x / kWarp * VECTORS * kWarp + threadIdx.x % kWarp) * VEC;
    x += blockIdx.x * x_stride + column;
    Raw<16> raw[VECTORS];
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) raw[c] = load_raw<T, VEC>(x + c * pitch);
    float total = 0.0f, differences = 0.0f, square = 0.0f;
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) {
        float h[VEC];
        unpack<T, VEC>(raw[c], h);
#pragma unroll
        for (int i = 0; i < VEC; ++i) total += h[i] * (1.0f / kEach);
    }
    const float rough = warp_reduce<Sum>(total);
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) {
        ptx::forget(raw[c]);
        float h[VEC];
        unpack<T, VEC>(raw[c], h);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float d = h[i] - rough;
            if (!kExact) differences += d;
            square += d * d;
        }
    }
    if constexpr (kExact) {
        square = warp_reduce<Sum>(square);
    } else {
        warp_reduce_pair<Sum>(differences, square, kWarp);
    }
    if (threadIdx.x % kWarp == 0) {
        const float off = differences * (1.0f / kEach);
        means[threadIdx.x / kWarp] = rough + off;
        squares[threadIdx.x / kWarp] = squares_less(square, off * differences);
    }
    __syncthreads();
    const bool weighted = weight != nullptr, biased = bias != nullptr;
    weight += column, bias += column;
    RawParts<W, VEC> gains[kLoadsBeforeSums ? VECTORS : 1], biases;
    auto load_gains = [&](int c, RawParts<W, VEC>& to) {
        clear(to);
        if (weighted) to = load_keep_raw<W, VEC>(weight + c * pitch);
    };
    auto load_biases = [&](int c) {
        clear(biases);
        if (biased) biases = load_keep_raw<W, VEC>(bias + c * pitch);
    };
    if constexpr (kLoadsBeforeSums) {
#pragma unroll
        for (int c = 0; c < VECTORS; ++c) load_gains(c, gains[c]);
        load_biases(0);
    }
    const float warps = static_cast<float>(threads / kWarp), centre = means[0];
    float away = 0.0f;  // the row's mean from `centre`
    if constexpr (kMaxWarps <= 4) {  // every thread adds them all; at most one warp is missing
        const bool all = threads == THREADS;
        float there[kMaxWarps] = {};
#pragma unroll
        for (int w = 1; w < kMaxWarps; ++w) {
            there[w] = w < kMaxWarps - 1 || all ? means[w] - centre : 0.0f;
            away += there[w];
        }
        away = away * ptx::rcp(warps);
        square = 0.0f;
#pragma unroll
        for (int w = 0; w < kMaxWarps; ++w) {
            const float d = there[w] - away;
            square += w < kMaxWarps - 1 || all ? squares[w] * (1.0f / kEach) + d * d : 0.0f;
        }
    } else {
        const int from = static_cast<int>(threadIdx.x) % kMaxWarps;
        const bool exists = from * kWarp < threads;
        const float there = exists ? means[from] - centre : 0.0f;
        away = warp_reduce<Sum>(there, kMaxWarps) * ptx::rcp(warps);
        const float d = there - away;
        square = warp_reduce<Sum>(exists ? squares[from] * (1.0f / kEach) + d * d : 0.0f, kMaxWarps);
    }
    const float mean = centre + away;
    const float rstd = rstd_of(square, warps, static_cast<float>(eps));
    const float base = weighted ? static_cast<float>(offset) : 1.0f;
    y += blockIdx.x * cols + column;
#pragma unroll
    for (int c = 0; c < VECTORS; ++c) {
        if constexpr (!kLoadsBeforeSums) {
            load_gains(0, gains[0]), load_biases(0);
            weight += pitch, bias += pitch;
        }
        ptx::forget(raw[c]);
        float h[VEC], gain[VEC], shift[VEC];
        unpack<T, VEC>(raw[c], h);
        unpack_parts<W, VEC>(gains[kLoadsBeforeSums ? c : 0], gain);
        unpack_parts<W, VEC>(biases, shift);
#pragma unroll
        for (int i = 0; i < VEC; ++i) h[i] = (h[i] - mean) * rstd * (gain[i] + base) + shift[i];
        if (kLoadsBeforeSums && c + 1 < VECTORS) load_biases(c + 1);
        store<T, VEC>(y, h);
        y += pitch;
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
                        i64 weight_fp32) {
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 first = static_cast<i64>(group.thread) * VEC;
    const int pitch = group.threads * VEC;
    const float count = static_cast<float>(cols), per_column = ptx::rcp(count);
    int phase = 0;
    auto reduce = [&](float v) { return group_reduce<Sum, false>(v, group, scratch, phase ^= 1); };
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
            for (int i = 0; i < VEC; ++i) total += h[i] * per_column;
        }
        const float rough = reduce(total);
        float differences = 0.0f, square = 0.0f;
        for (i64 column = first; column < end; column += pitch) {
            float h[VEC];
            load(column, h);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float d = h[i] - rough;
                differences += d;
                square += d * d;
            }
        }
        differences = reduce(differences), square = reduce(square);
        const auto [mean, rstd] = statistics_of(rough, differences, square, count, static_cast<float>(eps));
        for (i64 column = first; column < end; column += pitch) {
            float h[VEC], gain[VEC], shift[VEC];
            load(column, h);
            if (residual != nullptr) store<T, VEC>(sum + row * cols + column, h);
            load_any_gain<T, VEC>(weight, weight_fp32, column, static_cast<float>(offset), gain);
#pragma unroll
            for (int i = 0; i < VEC; ++i) shift[i] = 0.0f;
            if (bias != nullptr) load_any_gain<T, VEC>(bias, weight_fp32, column, 0.0f, shift);
#pragma unroll
            for (int i = 0; i < VEC; ++i) h[i] = (h[i] - mean) * rstd * gain[i] + shift[i];
            store<T, VEC>(y + row * cols + column, h);
        }
    }
}

}  // namespace rtk
