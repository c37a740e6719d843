// Shared by the normalisations: gains, means and the residual sum.
#pragma once
#include "common/vec.cuh"
#include "ptx/math.cuh"

namespace rtk {

// (offset + weight) of N columns, or ones without a weight.
template <typename W, int N>
RTK_DEVICE void load_gain(const W* weight, i64 column, float offset, float (&gain)[N]) {
    if (weight == nullptr) {
#pragma unroll
        for (int i = 0; i < N; ++i) gain[i] = 1.0f;
        return;
    }
    load_keep<W, N>(weight + column, gain);
#pragma unroll
    for (int i = 0; i < N; ++i) gain[i] += offset;
}

// sum / count, correctly rounded but for rare cases, without the branches of a division.
RTK_DEVICE float mean_of(float sum, float count) {
    const float inverse = ptx::rcp(count), mean = sum * inverse;
    return mean + inverse * (sum - mean * count);
}

// 1 / count, within a unit or two of the last digit, in four instructions. For counts of columns.
RTK_DEVICE float reciprocal(float count) {
    const float inverse = ptx::rcp(count);
    return inverse + inverse * (1.0f - count * inverse);
}

// 1/sqrt(sum/count + eps) for a sum of squares; 0 for an infinite one, where mean_of would give NaN.
RTK_DEVICE float rstd_of(float sum, float count, float eps) {
    const float mean = sum < __uint_as_float(0x7f800000u) ? mean_of(sum, count) : sum;
    return rsqrtf(mean + eps);
}

// Sums of up to 2^14 such parts of numbers do not overflow, and are as exact as those of the numbers.
constexpr float kSmallPart = 1.0f / (1 << 14);
RTK_DEVICE float mean_of_parts(float sum, float count) { return mean_of(sum, count) * (1.0f / kSmallPart); }

// Squares about one number from those about another: `squares` minus `excess`. An infinite sum stays infinite, and
// rounding never makes the result negative.
RTK_DEVICE float squares_less(float squares, float excess) {
    return squares < __uint_as_float(0x7f800000u) ? fmaxf(squares - excess, 0.0f) : squares;
}

// Sums of up to 2^16 numbers of this type are exact whenever the numbers are so close that the rounding of their mean
// would matter.
template <typename T>
constexpr bool kExactSums = false;
template <>
constexpr bool kExactSums<bf16> = true;

struct RowStatistics {
    float mean, rstd;
};

// Mean and rstd from sums over `count` numbers: of their differences from `rough`, a number near their mean, and of the
// squares of these differences. The first sum corrects the rounding error of `rough`, so the mean is as good as fp32
// allows, and the mean of equal numbers is that number. An infinite sum of squares makes rstd 0, as in torch.
RTK_DEVICE RowStatistics statistics_of(float rough, float differences, float squares, float count, float eps) {
    const float off = differences * ptx::rcp(count);
    return {rough + off, rstd_of(squares_less(squares, off * differences), count, eps)};
}

// (offset + weight) of N columns for a weight of T, or of fp32 if `weight_fp32`; ones without a weight.
template <typename T, int N>
RTK_DEVICE void load_any_gain(const void* weight, bool weight_fp32, i64 column, float offset, float (&gain)[N]) {
    if (weight_fp32) {
        load_gain<float, N>(static_cast<const float*>(weight), column, offset, gain);
    } else {
        load_gain<T, N>(static_cast<const T*>(weight), column, offset, gain);
    }
}

// The same in two steps: loaded as early as possible, unpacked where it is needed.
template <typename T, int N>
struct AskedGain {
    RawParts<float, N> raw;  // or N of T in its first part

    // One address for both: loads of either kind into the same registers would wait for each other.
    RTK_DEVICE void ask(const void* weight, bool weight_fp32, i64 column) {
        const u8* const from = static_cast<const u8*>(weight) + column * (weight_fp32 ? sizeof(float) : sizeof(T));
        raw.part[0] = ptx::ld_keep<16>(from);
        if (sizeof(T) < sizeof(float) && weight_fp32) raw.part[raw.kParts - 1] = ptx::ld_keep<16>(from + 16);
    }
    RTK_DEVICE void get(bool weight_fp32, float offset, float (&gain)[N]) const {
        if (weight_fp32) {
            unpack_parts<float, N>(raw, gain);
        } else {
            unpack<T, N>(raw.part[0], gain);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) gain[i] += offset;
    }
};

// x + residual as stored, rounded to T.
template <typename T, int N>
RTK_DEVICE Raw<sizeof(T) * N> add_rounded(const Raw<sizeof(T) * N>& x, const Raw<sizeof(T) * N>& residual) {
    float h[N], r[N];
    unpack<T, N>(x, h);
    unpack<T, N>(residual, r);
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] += r[i];
    return pack<T, N>(h);
}

// h of N columns as stored.
template <typename T, int N, bool kResidual>
RTK_DEVICE Raw<sizeof(T) * N> load_h(const T* x, const T* residual) {
    if constexpr (kResidual) return add_rounded<T, N>(load_raw<T, N>(x), load_raw<T, N>(residual));
    return load_raw<T, N>(x);
}

}  // namespace rtk
