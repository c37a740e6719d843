// Shared by the cross-entropy kernels: labels, loss and gradient.
//
// With z the logits (soft-capped: z = cap * tanh(x / cap)), lse = log(sum of exp(z)), t the label and e the smoothing:
//   loss = (1 - e) * (lse - z[t]) + e * (lse - mean z) + z_loss * lse^2
//   dz   = g * ((1 + 2 * z_loss * lse) * softmax(z) - (1 - e) * [column == t] - e / vocabulary)
// All in fp32.
#pragma once
#include "loss/logits.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// ---- labels ---------------------------------------------------------------------------------------------------------

inline constexpr int kElsewhere = -1;  // a good label that belongs to another part of the vocabulary
inline constexpr int kIgnored = -2;
inline constexpr int kBad = -3;

// The labels, and the part of the vocabulary of this call: columns [first, first + cols) of `vocabulary`.
struct Labels {
    const void* data;
    bool labels_int64;  // i64, else i32
    i64 ignore_index, first, vocabulary;

    RTK_DEVICE i64 load(i64 row) const {
        return labels_int64 ? static_cast<const i64*>(data)[row] : static_cast<const i32*>(data)[row];
    }
    // The column of a row's label, or one of the constants above. The first thread of a row reports bad ones.
    RTK_DEVICE int column(i64 row, int cols, i64* report, bool reporter) const {
        return column(load(row), row, cols, report, reporter);
    }
    RTK_DEVICE int column(i64 label, i64 row, int cols, i64* report, bool reporter) const {
        if (label == ignore_index) return kIgnored;
        if (label < 0 || label >= vocabulary) {
            if (reporter) report[1] = label, report[2] = row, report[0] = 1;
            return kBad;
        }
        const i64 local = label - first;
        return local >= 0 && local < cols ? static_cast<int>(local) : kElsewhere;
    }
};

// 1 if no column before the label has the label's score, the largest of the row, else 0. The whole group calls this.
template <typename T, typename C>
RTK_DEVICE float first_of_its_score(const T* row, int column, float top, const C& cap, const RowGroup& group,
                                    GroupScratch<1>& scratch) {
    const float earlier = has_score(row, column, top, cap, group.thread, group.threads);
    return group_reduce<Max, false>(earlier, group, scratch, 1) == 0.0f ? 1.0f : 0.0f;
}

// ---- loss and gradient ----------------------------------------------------------------------------------------------

struct Terms {
    float smoothing, z_loss, per_column;  // per_column: smoothing / vocabulary

    RTK_DEVICE Terms(double smoothing, double z_loss, double per_column)
        : smoothing(static_cast<float>(smoothing)),
          z_loss(static_cast<float>(z_loss)),
          per_column(static_cast<float>(per_column)) {}

    // `level` is the logarithm of the sum relative to `top`.
    RTK_DEVICE float loss(float top, float level, float target, float total) const {
        float value = level + (top - target);
        if (smoothing != 0.0f) {
            const float uniform = smoothing * (level + top) - per_column * total;
            value = (1.0f - smoothing) * value + uniform;
        }
        const float lse = top + level;
        return z_loss == 0.0f ? value : value + z_loss * lse * lse;
    }
};

// dx of one row: scale * exp(z - anchor) - offset, minus `target` at the label; times the slope of the cap.
template <typename T>
struct Gradient {
    static constexpr bool kFast = sizeof(T) == 2;
    Base<T> base;
    float anchor, scale, base_scale, offset, target;

    // g: gradient of the row's loss. inverse_sum: 1 / sum of exp(z - top).
    RTK_DEVICE Gradient(const Terms& terms, float g, float top, float level, float inverse_sum)
        : base(top),
          anchor(anchored(top)),
          scale(g * inverse_sum * (1.0f + 2.0f * terms.z_loss * (top + level))),
          base_scale(scale * base.correction),
          offset(g * terms.per_column),
          target(g * (1.0f - terms.smoothing)) {}

    // The gradient of one element, before the slope of the cap.
    RTK_DEVICE float at(float z, float less) const { return exponential<kFast>(z - anchor) * scale - offset - less; }

    template <int N, typename C>
    RTK_DEVICE Raw<sizeof(T) * N> vector(const Raw<sizeof(T) * N>& raw, const C& cap) const {
        float z[N];
        scores<T, N>(raw, cap, z);
        if (cap.active()) {
#pragma unroll
            for (int i = 0; i < N; ++i) z[i] = at(z[i], 0.0f) * cap.slope(z[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) z[i] = base.at(z[i]) * base_scale - offset;
        }
        return pack<T, N>(z);
    }
    template <int N, typename C>
    RTK_DEVICE void store_vector(T* dx, const Raw<sizeof(T) * N>& raw, const C& cap) const {
        ptx::st<sizeof(T) * N>(dx, vector<N>(raw, cap));
    }
    template <typename C>
    RTK_DEVICE void store_one(T* dx, float z, const C& cap, float less) const {
        const float one[1] = {cap.active() ? at(z, less) * cap.slope(z) : at(z, less)};
        store<T, 1>(dx, one);
    }
};

template <typename T, int N>
RTK_DEVICE void store_zeros(T* dx) {
    Raw<sizeof(T) * N> zeros;
    clear(zeros);
    ptx::st<sizeof(T) * N>(dx, zeros);
}

// Results that the first thread of a row writes. stats: top and level of each row; without `loss` also target and
// total.
struct RowResults {
    float* loss;
    float* stats;
    i64 rows;

    RTK_DEVICE void write(i64 row, int label, const Terms& terms, float top, float level, float target,
                          float total) const {
        const bool counts = label >= kElsewhere;
        stats[row] = counts ? top : 0.0f;
        stats[rows + row] = counts ? level : 0.0f;
        if (loss != nullptr) {
            loss[row] = counts ? terms.loss(top, level, target, total) : label == kBad ? kNan : 0.0f;
        } else {
            stats[2 * rows + row] = counts ? target : 0.0f;
            stats[3 * rows + row] = counts ? total : 0.0f;
        }
    }
};

}  // namespace rtk
