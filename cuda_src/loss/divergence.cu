// Divergences between two sets of rows, x = log Q (predictions) and a target P, summed over the columns, and their
// gradients. fp32 arithmetic, one rounding at the store.
//   kProbability  target t = P:      t (log t - x)
//   kLogarithm    target t = log P:  e^t (t - x)
//   kMixed        target t = log P:  beta P (t - m) + (1 - beta) Q (x - m),  m = log M,  M = beta P + (1 - beta) Q
// Where a probability is 0 its term and the gradient through it are 0, whatever its logarithm is. Rows with the label
// `ignore` count as 0.
//
// A group of threads (RowGroup) works on a row; a thread owns every threads-th vector of VEC columns. Elements have
// BYTES bytes (common/widths.cuh).
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/widths.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kForwardBlocks = 3;  // blocks per SM; 4 exceed the registers
#else
inline constexpr int kForwardBlocks = 4;
#endif

inline constexpr int kProbability = 0, kLogarithm = 1, kMixed = 2;

template <bool kFast>
RTK_DEVICE float logarithm(float v) {
    if constexpr (kFast) return __logf(v);
    return logf(v);
}

struct Terms {
    float loss, dx, dtarget;
};

template <int BYTES>
RTK_DEVICE void write_zeros(u8* row, i64 cols, const RowGroup& group) {
    Raw<BYTES> zero;
    clear(zero);
    for (i64 column = group.thread; column < cols; column += group.threads) ptx::st<BYTES>(row + column * BYTES, zero);
}

template <int MODE, bool kFast>
RTK_DEVICE Terms divergence(float x, float t, float beta) {
    if constexpr (MODE == kProbability) {
        const float gap = t == 0.0f ? 0.0f : logarithm<kFast>(t) - x;
        return {t * gap, -t, 0.0f};
    } else if constexpr (MODE == kLogarithm) {
        const float p = exponential<kFast>(t);
        const float gap = p == 0.0f ? 0.0f : t - x;
        return {p * gap, -p, p * (gap + 1.0f)};
    } else {
        // In terms of the larger and the smaller of the two, so that nothing overflows.
        const bool x_is_larger = x >= t || x != x;  // a NaN is always the larger one
        const float high = x_is_larger ? x : t, gap = x_is_larger ? t - x : x - t;
        const float share = x_is_larger ? 1.0f - beta : beta, rest = 1.0f - share;
        const float ratio = exponential<kFast>(gap);
        const float level = kFast ? __logf(share + rest * ratio) : log1pf(rest * expm1f(gap));
        const float p = exponential<kFast>(high);
        const float upper = p == 0.0f ? 0.0f : share * p * -level;
        const float lower = p == 0.0f || ratio == 0.0f ? 0.0f : rest * p * ratio * (gap - level);
        return {upper + lower, x_is_larger ? upper : lower, x_is_larger ? lower : upper};
    }
}

RTK_DEVICE bool counts(const void* labels, i64 labels_int64, i64 ignore, i64 row) {
    if (labels == nullptr) return true;
    return (labels_int64 ? static_cast<const i64*>(labels)[row] : static_cast<const i32*>(labels)[row]) != ignore;
}

// ---- forward --------------------------------------------------------------------------------------------------------

// Sum of one row over this thread's vectors; also writes the terms if `each` is given, or the gradient times `scale` in
// x (in the target with kTarget) if `out` is given.
template <int BYTES, int VEC, int MODE, bool kTarget>
RTK_DEVICE float divergence_row(const u8* x, const u8* target, u8* each, u8* out, i64 cols, const RowGroup& group,
                                bool half, float beta, float scale) {
    constexpr int kInFlight = VEC == 1 ? 4 : 2, kAccessBytes = BYTES * VEC;
    constexpr bool kFast = BYTES == 2, kLast = MODE != kMixed;
    const i64 pitch = group.threads * kAccessBytes, end = cols * BYTES;
    float sum = 0.0f;
    for (i64 at = group.thread * kAccessBytes; at < end; at += kInFlight * pitch) {
        Packed<BYTES, VEC> a[kInFlight], b[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (at + k * pitch < end) {
                a[k] = load_packed<BYTES, VEC, kLast>(x + at + k * pitch);
                b[k] = load_packed<BYTES, VEC, kLast>(target + at + k * pitch);
            }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (at + k * pitch < end) {
                float v[VEC], t[VEC];
                widen<BYTES, VEC>(a[k], half, v);
                widen<BYTES, VEC>(b[k], half, t);
                float part = 0.0f;
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const Terms terms = divergence<MODE, kFast>(v[i], t[i], beta);
                    part += v[i] = terms.loss;
                    t[i] = (kTarget ? terms.dtarget : terms.dx) * scale;
                }
                sum += part;
                if (each != nullptr) write<BYTES, VEC>(each + at + k * pitch, half, v);
                if (out != nullptr) write<BYTES, VEC>(out + at + k * pitch, half, t);
            }
        }
    }
    return sum;
}

// row_loss[row] = sum of the row; or each[row, column] if that is not null. With `out` also the gradient, for an incoming
// gradient of 1: times total[1], or `scale` if total is null; with kLogarithm in the target if `in_target`.
template <int BYTES, int VEC>
__global__ void __launch_bounds__(256, kForwardBlocks)
    divergence_fwd(const u8* x, const u8* target, const void* labels, float* row_loss, u8* each, u8* out,
                   const float* total, i64 rows, i64 cols, i64 x_stride, i64 target_stride, i64 labels_int64, i64 ignore,
                   i64 threads_per_row, i64 half, i64 mode, i64 in_target, double beta, double scale) {
    __shared__ GroupScratch<1> scratch;
    ptx::launch_dependents();
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool here = row < rows;
    const float share = static_cast<float>(beta), times = total == nullptr ? static_cast<float>(scale) : total[1];
    const u8* x_row = x + row * x_stride * BYTES;
    const u8* target_row = target + row * target_stride * BYTES;
    u8* each_row = each == nullptr ? nullptr : each + row * cols * BYTES;
    u8* out_row = out == nullptr ? nullptr : out + row * cols * BYTES;
    const bool is_half = half != 0;
    float sum = 0.0f;
    if (here && counts(labels, labels_int64, ignore, row)) {
        if (mode == kProbability) {
            sum = divergence_row<BYTES, VEC, kProbability, false>(x_row, target_row, each_row, out_row, cols, group,
                                                                  is_half, share, times);
        } else if (mode == kMixed) {
            sum = divergence_row<BYTES, VEC, kMixed, false>(x_row, target_row, each_row, out_row, cols, group, is_half,
                                                            share, times);
        } else if (!in_target) {
            sum = divergence_row<BYTES, VEC, kLogarithm, false>(x_row, target_row, each_row, out_row, cols, group,
                                                                is_half, share, times);
        } else {
            sum = divergence_row<BYTES, VEC, kLogarithm, true>(x_row, target_row, each_row, out_row, cols, group,
                                                               is_half, share, times);
        }
    } else if (here) {
        if (each != nullptr) write_zeros<BYTES>(each_row, cols, group);
        if (out != nullptr) write_zeros<BYTES>(out_row, cols, group);
    }
    if (each != nullptr) return;
    sum = group_reduce<Sum, false>(sum, group, scratch, 0);
    if (here && group.thread == 0) row_loss[row] = sum;
}

// total[1] = factor, divided by the number of valid rows if `divide`; total[0] = total[1] * the sum of row_loss (if
// given). One block; sums in fp64, in a fixed order. Without any row both are 0.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    divergence_total(const float* row_loss, const void* labels, float* total, i64 rows, i64 labels_int64, i64 ignore,
                     i64 divide, double factor) {
    __shared__ double sums[THREADS];
    __shared__ i64 counted[THREADS];
    ptx::wait_for_previous();
    double sum = 0.0;
    i64 count = 0;
#pragma unroll 4
    for (i64 row = threadIdx.x; row < rows; row += THREADS) {
        if (row_loss != nullptr) sum += row_loss[row];
        count += counts(labels, labels_int64, ignore, row);
    }
    sums[threadIdx.x] = sum, counted[threadIdx.x] = count;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
            counted[threadIdx.x] += counted[threadIdx.x + half];
        }
    }
    if (threadIdx.x != 0) return;
    const double scale = counted[0] == 0 ? 0.0 : divide ? factor / static_cast<double>(counted[0]) : factor;
    total[0] = static_cast<float>(counted[0] == 0 ? 0.0 : scale * sums[0]);
    total[1] = static_cast<float>(scale);
}

// ---- backward -------------------------------------------------------------------------------------------------------

// The gradient in x, or in the target, of one row, times the incoming one.
template <int BYTES, int VEC, int MODE, bool kTarget>
RTK_DEVICE void divergence_grad_row(const u8* x, const u8* target, const u8* each, u8* out, i64 cols,
                                    const RowGroup& group, bool half, float beta, float scale) {
    constexpr int kInFlight = VEC == 1 ? 4 : 2, kAccessBytes = BYTES * VEC;
    constexpr bool kFast = BYTES == 2;
    constexpr bool kNeedsX = kTarget || MODE == kMixed, kLast = MODE != kMixed;
    const i64 pitch = group.threads * kAccessBytes, end = cols * BYTES;
    for (i64 at = group.thread * kAccessBytes; at < end; at += kInFlight * pitch) {
        Packed<BYTES, VEC> a[kInFlight], b[kInFlight], c[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (at + k * pitch < end) {
                if constexpr (kNeedsX) a[k] = load_packed<BYTES, VEC, kLast>(x + at + k * pitch);
                b[k] = load_packed<BYTES, VEC, kLast>(target + at + k * pitch);
                if (each != nullptr) c[k] = load_packed<BYTES, VEC, kLast>(each + at + k * pitch);
            }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (at + k * pitch < end) {
                float v[VEC], t[VEC], g[VEC];
                if constexpr (kNeedsX) widen<BYTES, VEC>(a[k], half, v);
                widen<BYTES, VEC>(b[k], half, t);
                if (each != nullptr) {
                    widen<BYTES, VEC>(c[k], half, g);
                } else {
#pragma unroll
                    for (int i = 0; i < VEC; ++i) g[i] = scale;
                }
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const Terms terms = divergence<MODE, kFast>(kNeedsX ? v[i] : 0.0f, t[i], beta);
                    v[i] = (kTarget ? terms.dtarget : terms.dx) * g[i];
                }
                write<BYTES, VEC>(out + at + k * pitch, half, v);
            }
        }
    }
}

// out = gradient in x for the incoming gradient *grad * total[1], or each[row, column] if that is not null; with
// kLogarithm in the target if `in_target`. (The mixture is symmetric, so the host swaps x and target. A target of
// probabilities has no gradient.) Ignored rows get 0.
template <int BYTES, int VEC>
__global__ void __launch_bounds__(256, 3)
    divergence_bwd(const u8* x, const u8* target, const void* labels, const float* grad, const float* total,
                   const u8* each, u8* out, i64 rows, i64 cols, i64 x_stride, i64 target_stride, i64 each_stride,
                   i64 labels_int64, i64 ignore, i64 threads_per_row, i64 half, i64 mode, i64 in_target, double beta) {
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (row >= rows) return;
    const float share = static_cast<float>(beta);
    const float scale = each == nullptr ? *grad * total[1] : 0.0f;
    const u8* x_row = x + row * x_stride * BYTES;
    const u8* target_row = target + row * target_stride * BYTES;
    const u8* each_row = each == nullptr ? nullptr : each + row * each_stride * BYTES;
    u8* out_row = out + row * cols * BYTES;
    const bool is_half = half != 0;
    if (!counts(labels, labels_int64, ignore, row)) {
        write_zeros<BYTES>(out_row, cols, group);
    } else if (mode == kProbability) {
        divergence_grad_row<BYTES, VEC, kProbability, false>(x_row, target_row, each_row, out_row, cols, group, is_half,
                                                             share, scale);
    } else if (mode == kMixed) {
        divergence_grad_row<BYTES, VEC, kMixed, false>(x_row, target_row, each_row, out_row, cols, group, is_half,
                                                       share, scale);
    } else if (!in_target) {
        divergence_grad_row<BYTES, VEC, kLogarithm, false>(x_row, target_row, each_row, out_row, cols, group, is_half,
                                                           share, scale);
    } else {
        divergence_grad_row<BYTES, VEC, kLogarithm, true>(x_row, target_row, each_row, out_row, cols, group, is_half,
                                                          share, scale);
    }
}

}  // namespace rtk
