// Cross entropy of targets that are distributions, or of labels with class weights and smoothing. With z the logits
// (soft-capped if asked), p the target's probabilities (1 at the label, 0 elsewhere) and
//   q[c] = weight[c] * (keep * p[c] + spread),  Q = sum of q
// the loss of a row is the sum of q[c] * (lse - z[c]), and dz[c] = g * (Q * softmax(z)[c] - q[c]). All in fp32.
// `target`, `labels` and `weight` may be null, not the first two at once. A RowGroup owns a row and reads it once.
#include "loss/cross_entropy.cuh"

namespace rtk {

template <typename P, int VEC>
struct TargetRow {
    const P* target;
    const float* weight;
    i64 label;  // negative: none
    float keep, spread;

    RTK_DEVICE void load(i64 column, float (&q)[VEC]) const {
        if (target != nullptr) {
            load_keep<P, VEC>(target + column, q);
#pragma unroll
            for (int i = 0; i < VEC; ++i) q[i] = fmaf(keep, q[i], spread);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i) q[i] = column + i == label ? keep + spread : spread;
        }
        if (weight != nullptr) {
            float w[VEC];
            load_keep<float, VEC>(weight + column, w);
#pragma unroll
            for (int i = 0; i < VEC; ++i) q[i] *= w[i];
        }
    }
};

template <typename T, int VEC>
RTK_DEVICE void load_scores(const T* p, const Cap<T>& cap, float (&z)[VEC]) {
    load_stream<T, VEC>(p, z);
    if (cap.active()) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) z[i] = cap(z[i]);
    }
}

// Per row: loss (0 if ignored, NaN for a bad label), and stats: top, level, Q.
template <typename T, typename P, int VEC>
__global__ void __launch_bounds__(256)
    cross_entropy_soft_fwd(const T* x, const P* target, const void* labels, const float* weight, float* loss, float* stats,
                           i64* report, i64 rows, i64 cols, i64 x_stride, i64 target_stride, i64 labels_int64,
                           i64 ignore_index, i64 threads_per_row, double keep, double spread, double softcap) {
    constexpr bool kFast = sizeof(T) == 2;
    __shared__ GroupScratch<1> scratch[2];
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool exists = row < rows;
    int label = kElsewhere;
    if (exists && labels != nullptr) {
        const Labels all{labels, labels_int64 != 0, ignore_index, 0, cols};
        label = all.column(row, static_cast<int>(cols), report, group.thread == 0);
    }
    const bool counts = exists && label >= kElsewhere;
    const T* source = x + row * x_stride;
    const TargetRow<P, VEC> targets{target == nullptr ? nullptr : target + row * target_stride, weight, label,
                                    static_cast<float>(keep), static_cast<float>(spread)};
    const Cap<T> cap(softcap);
    // `below` is the sum of q * (top - z): relative to the largest score, so that a common offset costs no digits.
    float top = -kInfinity, sum = 0.0f, whole = 0.0f, below = 0.0f;
    for (i64 column = group.thread * VEC; counts && column < cols; column += group.threads * VEC) {
        float z[VEC], q[VEC];
        load_scores<T, VEC>(source + column, cap, z);
        targets.load(column, q);
        float peak = z[0];
#pragma unroll
        for (int i = 1; i < VEC; ++i) peak = fmaxf(peak, z[i]);
        if (peak > top) {
            if (top != -kInfinity) {
                sum *= exponential<kFast>(top - peak);
                below += whole * (peak - top);
            }
            top = peak;
        }
        const float from = anchored(top);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            sum += exponential<kFast>(z[i] - from);
            whole += q[i];
            below += q[i] * (from - z[i]);
        }
    }
    const float highest = group_reduce<Max, false>(top, group, scratch[0], 0), from = anchored(highest);
    if (top != -kInfinity) {
        sum *= exponential<kFast>(top - from);
        below += whole * (from - top);
    }
    sum = group_reduce<Sum, false>(sum, group, scratch[1], 0);
    whole = group_reduce<Sum, false>(whole, group, scratch[0], 1);
    below = group_reduce<Sum, false>(below, group, scratch[1], 1);
    if (!exists || group.thread != 0) return;
    const float level = logf(sum);
    stats[row] = counts ? highest : 0.0f;
    stats[rows + row] = counts ? level : 0.0f;
    stats[2 * rows + row] = counts ? whole : 0.0f;
    loss[row] = counts ? fmaf(whole, level, below) : label == kBad ? kNan : 0.0f;
}

// dx, dense, from the stats and the gradient of each row's loss.
template <typename T, typename P, int VEC>
__global__ void __launch_bounds__(256)
    cross_entropy_soft_bwd(const float* dloss, const T* x, const P* target, const void* labels, const float* weight,
                           const float* stats, T* dx, i64* report, i64 rows, i64 cols, i64 x_stride, i64 target_stride,
                           i64 labels_int64, i64 ignore_index, i64 threads_per_row, double keep, double spread,
                           double softcap) {
    constexpr bool kFast = sizeof(T) == 2;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (row >= rows) return;
    int label = kElsewhere;
    if (labels != nullptr) {
        const Labels all{labels, labels_int64 != 0, ignore_index, 0, cols};
        label = all.column(row, static_cast<int>(cols), report, false);
    }
    const bool counts = label >= kElsewhere;
    const T* source = x + row * x_stride;
    T* out = dx + row * cols;
    const TargetRow<P, VEC> targets{target == nullptr ? nullptr : target + row * target_stride, weight, label,
                                    static_cast<float>(keep), static_cast<float>(spread)};
    const Cap<T> cap(softcap);
    const float from = anchored(stats[row]), g = dloss[row];
    const float scale = g * stats[2 * rows + row] * expf(-stats[rows + row]);
    for (i64 column = group.thread * VEC; column < cols; column += group.threads * VEC) {
        if (!counts) {
            store_zeros<T, VEC>(out + column);
            continue;
        }
        float z[VEC], q[VEC];
        load_scores<T, VEC>(source + column, cap, z);
        targets.load(column, q);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const float d = exponential<kFast>(z[i] - from) * scale - g * q[i];
            z[i] = cap.active() ? d * cap.slope(z[i]) : d;
        }
        store<T, VEC>(out + column, z);
    }
}

}  // namespace rtk
