// Shared by the kernels of log-probabilities: ids, scores of logits, and the parts of a row.
//
// With x the logits and T the temperature: a = scale * x, c = cap * tanh(a / cap) (or a), z = c / T. A set of columns
// has the parts top (largest z), sum = sum of e^(z - top), shifted = sum of e^(z - top) (z - top), squares = sum of
// e^(2 (z - top)), total = sum of z. All in fp32.
#pragma once
#include "loss/logits.cuh"

namespace rtk {

inline constexpr int kParts = 6;  // rows of parts: top, sum, shifted, squares, total, largest score before the first id
inline constexpr int kWantsTotal = 8, kWantsTop1 = 16;

struct Ids {
    const void* data;  // [rows, k]
    bool is_int64;     // else i32
    i64 k, ignore_index, vocabulary;

    RTK_DEVICE i64 load(i64 place) const {
        return is_int64 ? static_cast<const i64*>(data)[place] : static_cast<const i32*>(data)[place];
    }
    RTK_DEVICE bool inside(i64 id) const { return id >= 0 && id < vocabulary; }
    RTK_DEVICE bool valid(i64 id) const { return id != ignore_index && inside(id); }
};

// z of a logit. Without a cap, `factor` is scale / T.
template <typename T>
struct Score {
    Cap<T> cap;
    float factor, after, gradient;

    RTK_DEVICE Score(double softcap, double scale, float temperature) : cap(softcap) {
        gradient = static_cast<float>(scale) / temperature;
        after = 1.0f / temperature;
        factor = cap.active() ? static_cast<float>(scale) : gradient;
    }
    RTK_DEVICE float operator()(float x) const {
        const float a = x * factor;
        return cap.active() ? cap(a) * after : a;
    }
    // dz / dx, from z.
    RTK_DEVICE float slope(float z, float temperature) const {
        return cap.active() ? gradient * cap.slope(z * temperature) : gradient;
    }
    RTK_DEVICE float at(const T* row, int column) const {
        float x[1];
        unpack<T, 1>(load_raw<T, 1, false>(row + column), x);
        return (*this)(x[0]);
    }
};

RTK_DEVICE float temperature_of(const float* temperatures, double temperature, i64 row) {
    return temperatures == nullptr ? static_cast<float>(temperature) : temperatures[row];
}

// e^-rise of parts whose top is `rise` below another one; without columns they are all 0, or NaN.
template <bool kFast>
struct Fall {
    float rise, factor;

    RTK_DEVICE Fall(float own, float top) {
        const bool none = own == -kInfinity;
        rise = none ? 0.0f : top - own;
        factor = none ? 0.0f : exponential<kFast>(-rise);
    }
};

template <bool ENTROPY, bool SQUARES>
struct RowParts {
    float top = -kInfinity, sum = 0.0f, shifted = 0.0f, squares = 0.0f, total = 0.0f;
    float anchor = 0.0f;  // of add_batch: the logit whose score is the top

    // Makes all relative to another top, which is not below this one.
    template <bool kFast>
    RTK_DEVICE void rebase(float to) {
        const Fall<kFast> fall(top, to);
        if constexpr (ENTROPY) shifted = fall.factor * (shifted - fall.rise * sum);
        if constexpr (SQUARES) squares *= fall.factor * fall.factor;
        sum *= fall.factor;
        top = to;
    }
    template <bool kFast, int N>
    RTK_DEVICE void add(const float (&z)[N], bool totals) {
        float peak = z[0];
#pragma unroll
        for (int i = 1; i < N; ++i) peak = fmaxf(peak, z[i]);
        if (peak > top) rebase<kFast>(peak);
        const float anchor = anchored(top);
        float parts[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float away = z[i] - anchor, e = exponential<kFast>(away);
            parts[0] += e;
            if constexpr (ENTROPY) parts[1] = fmaf(e, fmaxf(away, -1000.0f), parts[1]);  // e is 0 long before
            if constexpr (SQUARES) parts[2] = fmaf(e, e, parts[2]);
        }
        sum += parts[0];
        if constexpr (ENTROPY) shifted += parts[1];
        if constexpr (SQUARES) squares += parts[2];
        if (totals) {
            float part = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) part += z[i];
            total += part;
        }
    }
    // Several vectors of 16-bit logits together, whose scores are x * score.factor, a positive one: one maximum and one
    // new top for all, and exponents relative to it in base 2 by one multiplication (Base in logits.cuh). Vectors that
    // do not exist are cleared; a score of -inf adds e = 0.
    template <typename T, int B>
    RTK_DEVICE void add_batch(Raw<16> (&raw)[B], const Score<T>& score, int left, int threads, bool totals) {
        constexpr int VEC = 16 / sizeof(T);
        if (totals) {
            float part = 0.0f;
            add_total<T, B>(raw, left, threads, part);
            total = fmaf(part, score.factor, total);
        }
#pragma unroll
        for (int c = 0; c < B; ++c) ptx::forget(raw[c]);
        const float peak = peak_of<T, B>(raw), to = peak * score.factor;
        if (to > top) rebase<true>(to), anchor = peak;
        const float slope = score.factor * 1.4426950408889634f, base = anchor * slope;
        const float rest = fmaf(-anchor, slope, base), correction = ptx::ex2(rest);  // of the rounding of base
        float parts[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < B; ++c) {
            float x[VEC];
            unpack<T, VEC>(raw[c], x);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const float away = fmaf(x[i], slope, -base), e = ptx::ex2(away);
                parts[0] += e;
                if constexpr (ENTROPY) parts[1] = fmaf(e, fmaxf(away, -1000.0f), parts[1]);
                if constexpr (SQUARES) parts[2] = fmaf(e, e, parts[2]);
            }
        }
        sum = fmaf(parts[0], correction, sum);
        if constexpr (ENTROPY) {
            const float shift = fmaf(rest, parts[0], parts[1]) * correction;
            shifted = fmaf(shift, 0.6931471805599453f, shifted);
        }
        if constexpr (SQUARES) squares = fmaf(parts[2], correction * correction, squares);
    }
    RTK_DEVICE void combine(const RowGroup& group, GroupScratch<1> (&scratch)[3], bool totals) {
        rebase<false>(group_reduce<Max, false>(top, group, scratch[0], 0));
        sum = group_reduce<Sum, false>(sum, group, scratch[0], 1);
        if constexpr (ENTROPY) shifted = group_reduce<Sum, false>(shifted, group, scratch[1], 0);
        if constexpr (SQUARES) squares = group_reduce<Sum, false>(squares, group, scratch[1], 1);
        if (totals) total = group_reduce<Sum, false>(total, group, scratch[2], 0);
    }
    // Adds parts of other columns.
    RTK_DEVICE void fold(RowParts other) {
        const float to = fmaxf(top, other.top);
        rebase<false>(to);
        other.template rebase<false>(to);
        sum += other.sum, shifted += other.shifted, squares += other.squares, total += other.total;
    }
    RTK_DEVICE void load(const float* parts, i64 row, i64 rows) {
        top = parts[row], sum = parts[rows + row], total = parts[4 * rows + row];
        if constexpr (ENTROPY) shifted = parts[2 * rows + row];
        if constexpr (SQUARES) squares = parts[3 * rows + row];
    }
    RTK_DEVICE void store(float* parts, i64 row, i64 rows) const {
        parts[row] = top, parts[rows + row] = sum, parts[2 * rows + row] = shifted, parts[3 * rows + row] = squares;
        parts[4 * rows + row] = total;
    }
};

}  // namespace rtk
