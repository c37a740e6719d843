// Rows of logits: how they are split into 16-byte vectors, and the statistics of their scores (soft-capped logits) in
// one pass: the largest one, the sum of exponentials relative to it, so that nothing overflows, and the sum. All in
// fp32.
#pragma once
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "ptx/forget.cuh"
#include "ptx/packed.cuh"

namespace rtk {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kNan = __builtin_bit_cast(float, 0x7fffffffu);

// A NaN is not kept: it reaches the result through the sum.
struct Max {
    static constexpr float kIdentity = -kInfinity;
    RTK_DEVICE static float apply(float a, float b) { return fmaxf(a, b); }
};

// ---- rows -----------------------------------------------------------------------------------------------------------

// A row of any alignment: columns [0, head) up to the first multiple of ALIGN bytes, then `vectors` vectors of 16
// bytes, then the rest. Thread i of a group (of ALIGN threads at least) has edge(i), one column of head or rest, or -1.
// Groups of many warps align to whole lines of 128 bytes.
template <typename T, int ALIGN = 16>
struct AlignedRow {
    static constexpr int VEC = 16 / sizeof(T);
    int head, vectors, rest;

    RTK_DEVICE AlignedRow(const T* row, int cols) {
        constexpr u64 kPast = ALIGN - 1;
        head = static_cast<int>((0 - reinterpret_cast<u64>(row)) & kPast) / static_cast<int>(sizeof(T));
        head = head < cols ? head : cols;
        vectors = (cols - head) / VEC;
        rest = cols - head - vectors * VEC;
    }
    RTK_DEVICE int edge(int thread) const {
        if (thread < head) return thread;
        return thread < head + rest ? vectors * VEC + thread : -1;
    }
    // The thread of a group that owns this column; none if it is negative.
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

// exp(z - top) of logits in one multiplication and one exponential: 2^(z * log2(e) - anchor) times a correction for the
// rounding of anchor = top * log2(e). Where that rounding is not small, the 16-bit neighbours of `top` are so far away
// that their exponential is 0 in any base, and base 2 needs no rounding. fp32 has no such gaps and uses the difference.
template <typename T>
struct Base {
    static constexpr bool kFast = sizeof(T) == 2;
    float slope, anchor, correction;

    RTK_DEVICE explicit Base(float top) {
        const float from = anchored(top);
        slope = kFast ? (fabsf(from) < 1048576.0f ? 1.4426950408889634f : 1.0f) : 1.0f;
        anchor = from * slope;
        correction = kFast ? ptx::ex2(fmaf(-from, slope, anchor)) : 1.0f;
    }
    // The exponential of a logit, not of a capped score.
    RTK_DEVICE float at(float z) const {
        if constexpr (kFast) return ptx::ex2(fmaf(z, slope, -anchor));
        return expf(z - anchor);
    }
};

// Sums the logits of the vectors with c * threads < left.
template <typename T, int B>
RTK_DEVICE void add_total(const Raw<16> (&raw)[B], int left, int threads, float& total) {
    constexpr int VEC = 16 / sizeof(T);
#pragma unroll
    for (int c = 0; c < B; ++c) {
        float z[VEC], part = 0.0f;
        unpack<T, VEC>(raw[c], z);
#pragma unroll
        for (int i = 0; i < VEC; ++i) part += z[i];
        if (c * threads < left) total += part;
    }
}

// The largest of the logits in some vectors; NaN only if there is nothing else in some of its columns.
template <typename T, int B>
RTK_DEVICE float peak_of(const Raw<16> (&raw)[B]) {
    if constexpr (sizeof(T) == 2) {
        auto larger = [](u32 a, u32 b) {
            return is_same<T, bf16>::value ? ptx::max_bf16x2(a, b) : ptx::max_f16x2(a, b);
        };
        Raw<4> largest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            largest[i].w[0] = raw[0].w[i];
#pragma unroll
            for (int c = 1; c < B; ++c) largest[i].w[0] = larger(largest[i].w[0], raw[c].w[i]);
        }
#pragma unroll
        for (int i = 2; i > 0; i /= 2)
#pragma unroll
            for (int k = 0; k < i; ++k) largest[k].w[0] = larger(largest[k].w[0], largest[k + i].w[0]);
        float pair[2];
        unpack<T, 2>(largest[0], pair);
        return fmaxf(pair[0], pair[1]);
    } else {
        float peak = __uint_as_float(raw[0].w[0]);
#pragma unroll
        for (int i = 1; i < 4 * B; ++i) peak = fmaxf(peak, __uint_as_float(raw[i / 4].w[i % 4]));
        return peak;
    }
}

// A vector of -inf, which adds nothing to a sum of exponentials.
template <typename T>
RTK_DEVICE void clear_scores(Raw<16>& raw) {
#pragma unroll
    for (u32& word : raw.w)
        word = is_same<T, bf16>::value ? 0xff80ff80u : is_same<T, fp16>::value ? 0xfc00fc00u : 0xff800000u;
}

// Loads vectors at `from` and every `pitch` elements, each by `load`. Those where c * threads < left is false do not
// exist; they are cleared.
template <typename T, int B, typename Load>
RTK_DEVICE void load_batch(Raw<16> (&raw)[B], const T* from, int pitch, int left, int threads, const Load& load) {
    if (left > (B - 1) * threads) {
#pragma unroll
        for (int c = 0; c < B; ++c) {  // incremented: all the multiples of the pitch would take registers
            raw[c] = load(from);
            from += pitch;
        }
    } else {
#pragma unroll
        for (int c = 0; c < B; ++c) {
            clear_scores<T>(raw[c]);
            if (left > 0) raw[c] = load(from);
            from += pitch;
            left -= threads;
        }
    }
}

template <typename T, int B>
RTK_DEVICE void load_batch(Raw<16> (&raw)[B], const T* from, int pitch, int left, int threads) {
    load_batch(raw, from, pitch, left, threads, [](const T* p) { return load_raw<T, 16 / sizeof(T), false>(p); });
}

// A thread's statistics of a row: the largest score, the sum of exponentials relative to it, the sum of scores.
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
        ptx::forget(wanted);  // otherwise the compiler duplicates all the code around the calls
        if (wanted.w[0] != 0u) {
            part = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) part += z[i];
            total += part;
        }
    }
    // Several vectors of logits together, without a cap: one maximum and one new base for all. Those where c * threads
    // < left is false do not exist and are cleared.
    template <int B>
    RTK_DEVICE void add_batch(Raw<16> (&raw)[B], int left, int threads, bool totals) {
        constexpr int VEC = 16 / sizeof(T);
        Raw<4> wanted{{totals ? 1u : 0u}};
        ptx::forget(wanted);
        if (wanted.w[0] != 0u) add_total<T, B>(raw, left, threads, total);
#pragma unroll
        for (int c = 0; c < B; ++c) ptx::forget(raw[c]);
        const float was = top;
        top = fmaxf(top, peak_of<T, B>(raw));
        const Base<T> base(top);
        sum *= exponential<kFast>(was - anchored(top));
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < B; ++c) {
            float z[VEC];
            unpack<T, VEC>(raw[c], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) part[i % 2] += base.at(z[i]);
        }
        sum = fmaf(part[0] + part[1], base.correction, sum);
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
    // Not by assigning a fresh one: the compiler would read its numbers from a table in global memory.
    RTK_DEVICE void reset() { top = -kInfinity, sum = 0.0f, total = 0.0f; }

    // Every thread of the group gets the statistics of the whole row.
    RTK_DEVICE void combine(const RowGroup& group, GroupScratch<1> (&scratch)[2], bool totals) {
        const float mine = top;
        top = group_reduce<Max, false>(mine, group, scratch[0], 0);
        sum = group_reduce<Sum, false>(sum * exponential<false>(mine - anchored(top)), group, scratch[0], 1);
        if (totals) total = group_reduce<Sum, false>(total, group, scratch[1], 0);
    }
};

// 1 if one of the columns thread, thread + threads, ... before a given one has this score, else 0.
template <typename T, typename C>
RTK_DEVICE float has_score(const T* row, int column, float score, const C& cap, int thread, int threads) {
    float found = 0.0f;
#pragma unroll 1
    for (int i = thread; i < column; i += threads)
        if (score_at(row, i, cap) == score) found = 1.0f;
    return found;
}

}  // namespace rtk
