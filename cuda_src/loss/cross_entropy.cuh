// What the cross-entropy kernels share: labels, the pieces of a row, the running sum of exponentials, the gradient.
//
// With z the logits (soft-capped: z = cap * tanh(x / cap)), lse = log(sum of exp(z)), t the label and e the smoothing:
//   loss = (1 - e) * (lse - z[t]) + e * (lse - mean z) + z_loss * lse^2
//   dz   = g * ((1 + 2 * z_loss * lse) * softmax(z) - (1 - e) * [column == t] - e / vocabulary)
// All in fp32. The sum is kept relative to the largest score, so that nothing overflows.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/forget.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNan = __builtin_bit_cast(float, 0x7fffffffu);

// A NaN is not kept: it reaches the result through the sum.
struct Max {
    static constexpr float kIdentity = -kInfinity;
    RTK_DEVICE static float apply(float a, float b) { return fmaxf(a, b); }
};

// ---- labels ---------------------------------------------------------------------------------------------------------

inline constexpr int kElsewhere = -1;  // a good label that belongs to another part of the vocabulary
inline constexpr int kIgnored = -2;
inline constexpr int kBad = -3;

// Where the labels are, and which part of the vocabulary this call has: columns [first, first + cols) of `vocabulary`.
struct Labels {
    const void* data;
    bool wide;  // i64, else i32
    i64 ignore_index, first, vocabulary;

    // The column of a row's label, or one of the constants above. The first thread of a row reports bad ones.
    RTK_DEVICE int column(i64 row, int cols, i64* report, bool reporter) const {
        const i64 label = wide ? static_cast<const i64*>(data)[row] : static_cast<const i32*>(data)[row];
        if (label == ignore_index) return kIgnored;
        if (label < 0 || label >= vocabulary) {
            if (reporter) report[1] = label, report[2] = row, report[0] = 1;
            return kBad;
        }
        const i64 local = label - first;
        return local >= 0 && local < cols ? static_cast<int>(local) : kElsewhere;
    }
};

// ---- rows -----------------------------------------------------------------------------------------------------------

// A row of any alignment: columns [0, head) up to the first multiple of 16 bytes, `vectors` pieces of 16 bytes, and the
// rest. Thread i of a group (16 threads at least) has edge(i), one column of head or rest, or -1.
template <typename T>
struct Pieces {
    static constexpr int VEC = 16 / sizeof(T);
    int head, vectors, rest;

    RTK_DEVICE Pieces(const T* row, int cols) {
        head = static_cast<int>((0 - reinterpret_cast<u64>(row)) & 15u) / static_cast<int>(sizeof(T));
        head = head < cols ? head : cols;
        vectors = (cols - head) / VEC;
        rest = cols - head - vectors * VEC;
    }
    RTK_DEVICE int edge(int thread) const {
        if (thread < head) return thread;
        return thread < head + rest ? vectors * VEC + thread : -1;
    }
    // The thread of a group that has this column; none if it is negative.
    RTK_DEVICE int owner(int column, int threads) const {
        if (column < head) return column;
        const int vector = (column - head) / VEC;
        return vector < vectors ? vector % threads : column - vectors * VEC;
    }
};

// A test that is one comparison with a kernel parameter: the compiler repeats it wherever it is needed, and would
// repeat a conversion, which competes with the exponentials.
RTK_DEVICE bool not_zero(double parameter) {
    return static_cast<u32>(__builtin_bit_cast(u64, parameter) >> 32) << 1 != 0;
}

// ---- scores ---------------------------------------------------------------------------------------------------------

// The soft cap of the logits.
template <typename T>
struct Cap {
    static constexpr bool kFast = sizeof(T) == 2;
    float cap, inverse;  // 0: none

    RTK_DEVICE explicit Cap(double softcap) : cap(static_cast<float>(softcap)) {
        inverse = cap == 0.0f ? 0.0f : 1.0f / cap;
    }
    RTK_DEVICE bool active() const { return cap != 0.0f; }
    RTK_DEVICE float operator()(float x) const {
        if constexpr (kFast) {
            const float e = ptx::ex2(x * inverse * 2.8853900817779268f);
            return cap * (1.0f - 2.0f * ptx::rcp(1.0f + e));
        }
        return cap * tanhf(x / cap);
    }
    // The derivative, from the capped score.
    RTK_DEVICE float slope(float z) const {
        const float t = z * inverse;
        return 1.0f - t * t;
    }
};

struct NoCap {
    RTK_DEVICE static constexpr bool active() { return false; }
    RTK_DEVICE float operator()(float x) const { return x; }
    RTK_DEVICE static float slope(float) { return 1.0f; }
};

template <typename T, int N, typename C>
RTK_DEVICE void scores(const Raw<sizeof(T) * N>& raw, const C& cap, float (&z)[N]) {
    unpack<T, N>(raw, z);
    if (cap.active()) {
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] = cap(z[i]);
    }
}

template <typename T, typename C>
RTK_DEVICE float score_at(const T* row, int column, const C& cap) {
    float z[1];
    scores<T, 1>(load_raw<T, 1>(row + column), cap, z);
    return z[0];
}

RTK_DEVICE float anchored(float top) { return top == -kInfinity ? 0.0f : top; }

// group_reduce; for kBlock without the code for groups within a warp.
template <typename Op, bool kBlock>
RTK_DEVICE float reduce_row(float v, const RowGroup& group, GroupScratch<1>& scratch, int phase) {
    if constexpr (!kBlock) return group_reduce<Op, false>(v, group, scratch, phase);
    const int lane = group.thread % kWarp;
    v = warp_reduce<Op>(v);
    if (lane == 0) scratch.slot[phase][group.thread / kWarp][0] = v;
    __syncthreads();
    return warp_reduce<Op>(lane < group.threads / kWarp ? scratch.slot[phase][lane][0] : Op::kIdentity);
}

// What a thread has seen of a row: the largest score, the sum of exponentials relative to it, the sum of scores.
template <typename T>
struct Running {
    static constexpr bool kFast = sizeof(T) == 2;
    float top = -kInfinity, sum = 0.0f, total = 0.0f;

    template <int N>
    RTK_DEVICE void add(const float (&z)[N], bool totals) {
        float peak = z[0];
#pragma unroll
        for (int i = 1; i < N; ++i) peak = fmaxf(peak, z[i]);
        if (peak > top) {
            sum *= exponential<kFast>(top - peak);
            top = peak;
        }
        const float anchor = anchored(top);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) part += exponential<kFast>(z[i] - anchor);
        sum += part;
        Raw<4> wanted{{totals ? 1u : 0u}};
        ptx::forget(wanted);  // or the compiler makes two versions of all the code around the calls
        if (wanted.w[0] != 0u) {
            part = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) part += z[i];
            total += part;
        }
    }
    template <typename C>
    RTK_DEVICE void add_raw(const Raw<16>& raw, const C& cap, bool totals) {
        float z[16 / sizeof(T)];
        scores<T, 16 / sizeof(T)>(raw, cap, z);
        add(z, totals);
    }
    RTK_DEVICE void add_edge(float z, bool totals) {
        const float one[1] = {z};
        add(one, totals);
    }
    // Not by assignment of a fresh one: the compiler reads its numbers from a table in global memory.
    RTK_DEVICE void reset() { top = -kInfinity, sum = 0.0f, total = 0.0f; }

    // Every thread of the group gets the numbers of the whole row. kBlock: the group is a block of several warps.
    template <bool kBlock>
    RTK_DEVICE void combine(const RowGroup& group, GroupScratch<1> (&scratch)[2], bool totals) {
        const float mine = top;
        top = reduce_row<Max, kBlock>(mine, group, scratch[0], 0);
        sum = reduce_row<Sum, kBlock>(sum * exponential<false>(mine - anchored(top)), group, scratch[0], 1);
        if (totals) total = reduce_row<Sum, kBlock>(total, group, scratch[1], 0);
    }
};

// True if no column before the label has the label's score, the largest of the row. The whole group calls it.
template <bool kBlock, typename T, typename C>
RTK_DEVICE float first_of_its_score(const T* row, int column, float top, const C& cap, const RowGroup& group,
                                    GroupScratch<1> (&scratch)[2]) {
    float earlier = 0.0f;
#pragma unroll 1
    for (int i = group.thread; i < column; i += group.threads)
        if (score_at(row, i, cap) == top) earlier = 1.0f;
    return reduce_row<Max, kBlock>(earlier, group, scratch[1], 1) == 0.0f ? 1.0f : 0.0f;
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
            const float even = smoothing * (level + top) - per_column * total;
            value = (1.0f - smoothing) * value + even;
        }
        const float lse = top + level;
        return z_loss == 0.0f ? value : value + z_loss * lse * lse;
    }
};

// dx of one row: scale * exp(z - anchor) - offset, less `target` at the label; times the slope of the cap.
template <typename T>
struct Gradient {
    static constexpr bool kFast = sizeof(T) == 2;
    float anchor, scale, offset, target;

    // g: gradient of the row's loss. inverse_sum: 1 / sum of exp(z - top).
    RTK_DEVICE Gradient(const Terms& terms, float g, float top, float level, float inverse_sum)
        : anchor(anchored(top)),
          scale(g * inverse_sum * (1.0f + 2.0f * terms.z_loss * (top + level))),
          offset(g * terms.per_column),
          target(g * (1.0f - terms.smoothing)) {}

    // Of one element, before the slope of the cap.
    RTK_DEVICE float at(float z, float less) const { return exponential<kFast>(z - anchor) * scale - offset - less; }

    template <int N, typename C>
    RTK_DEVICE void store_piece(T* dx, const Raw<sizeof(T) * N>& raw, const C& cap) const {
        float z[N];
        scores<T, N>(raw, cap, z);
        if (cap.active()) {
#pragma unroll
            for (int i = 0; i < N; ++i) z[i] = at(z[i], 0.0f) * cap.slope(z[i]);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) z[i] = exponential<kFast>(z[i] - anchor) * scale - offset;
        }
        store<T, N>(dx, z);
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

// What the first thread of a row writes. stats: top and level of each row; without `loss` also target and total.
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
