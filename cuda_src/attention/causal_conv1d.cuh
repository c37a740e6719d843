// Short causal convolutions over time, one filter of W taps per channel:
//     z[t] = bias + sum over j of w[j] x[t - W + 1 + j],  y[t] = silu(z[t]) or z[t],
// over the rows of one sequence; rows before its first one come from the columns of its initial state [channels,
// columns], the last column nearest, or are 0. Arithmetic is fp32, rounded once.
#pragma once
#include "common/math.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kConvRows = 16;  // consecutive rows of a warp
inline constexpr int kConvWarps = 8;

// Rows first..end - 1 are those of sequence `number`, which is -1 for rows of no sequence.
struct RowSpan {
    i64 first, end;
    int number;
};

// The span of a row of `length` rows, packed if `cu` is not null.
RTK_DEVICE RowSpan span_at(i64 row, i64 length, const i32* cu, int sequences, int batch) {
    if (cu == nullptr) return {0, length, batch};
    int low = 0, high = sequences;  // the first sequence that begins behind the row
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu[middle] <= row) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return {0, sequences > 0 ? static_cast<i64>(cu[0]) : length, -1};
    const i64 first = cu[low - 1], end = cu[low];
    if (row < end) return {first, end < length ? end : length, low - 1};
    return {end, low < sequences ? static_cast<i64>(cu[low]) : length, -1};
}

// One element of x or, before the first row of the sequence, of its initial state; N neighbouring channels.
template <typename T, int N>
RTK_DEVICE void conv_input(const T* x, i64 x_row, const T* initial, i64 columns, i64 channels, i64 channel, i64 row,
                           const RowSpan& span, float (&f)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = 0.0f;
    if (span.number < 0) return;
    if (row >= span.first) {
        load_keep<T, N>(x + row * x_row, f);
        return;
    }
    const i64 column = columns + row - span.first;
    if (initial == nullptr || column < 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float one[1];
        load_keep<T, 1>(initial + (span.number * channels + channel + i) * columns + column, one);
        f[i] = one[0];
    }
}

// Numbers of T or, on request, of fp32.
template <typename T>
RTK_DEVICE float conv_number(const void* numbers, i64 at, bool fp32) {
    float one[1];
    if (fp32) load_keep<float, 1>(static_cast<const float*>(numbers) + at, one);
    else load_keep<T, 1>(static_cast<const T*>(numbers) + at, one);
    return one[0];
}

template <typename T, int W, int N>
struct ConvFilter {
    float tap[W][N], bias[N];

    RTK_DEVICE ConvFilter(const void* weight, const void* biases, i64 channel, bool fp32, bool bias_fp32) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
#pragma unroll
            for (int j = 0; j < W; ++j) tap[j][i] = conv_number<T>(weight, (channel + i) * W + j, fp32);
            bias[i] = biases == nullptr ? 0.0f : conv_number<T>(biases, channel + i, bias_fp32);
        }
    }
};

}  // namespace rtk
