// Causal convolution (attention/causal_conv1d.cuh): forward, final states, and one token.
#include "attention/causal_conv1d.cuh"

namespace rtk {

// A lane owns N neighbouring channels, a warp kConvRows consecutive rows; its last W - 1 rows stay in registers. Rows of
// no sequence give 0. y is dense. Grid: blocks of rows, tiles of 32 N channels, batch (1 if packed).
template <typename T, int W, int N>
__global__ void __launch_bounds__(32 * kConvWarps, 3)
    causal_conv1d_fwd(const T* x, const void* weight, const void* bias, const T* initial, const i32* cu, T* y, i64 sequences,
                      i64 length, i64 channels, i64 x_batch, i64 x_row, i64 columns, i64 weight_fp32, i64 bias_fp32,
                      i64 silu) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 channel = (static_cast<i64>(blockIdx.y) * kWarp + lane) * N;
    const i64 row0 = (static_cast<i64>(blockIdx.x) * kConvWarps + warp) * kConvRows;
    if (channel >= channels || row0 >= length) return;
    const int batch = static_cast<int>(blockIdx.z), count = static_cast<int>(sequences);
    x += batch * x_batch + channel;
    y += batch * length * channels + channel;
    const ConvFilter<T, W, N> filter(weight, bias, channel, weight_fp32 != 0, bias_fp32 != 0);
    RowSpan span = span_at(row0, length, cu, count, batch);
    float window[W][N];  // rows t - W + 1 to t
#pragma unroll
    for (int j = 1; j < W; ++j)
        conv_input<T, N>(x, x_row, initial, columns, channels, channel, row0 - W + j, span, window[j]);
    constexpr int kInFlight = 4;
#pragma unroll 1
    for (int base = 0; base < kConvRows; base += kInFlight) {
        Raw<sizeof(T) * N> raw[kInFlight];
#pragma unroll
        for (int r = 0; r < kInFlight; ++r) {
            clear(raw[r]);
            if (row0 + base + r < length) raw[r] = load_raw<T, N>(x + (row0 + base + r) * x_row);
        }
#pragma unroll
        for (int r = 0; r < kInFlight; ++r) {
            const i64 row = row0 + base + r;
            if (row >= length) return;
            if (row >= span.end) {
                span = span_at(row, length, cu, count, batch);
#pragma unroll
                for (int j = 1; j < W; ++j)
                    conv_input<T, N>(x, x_row, initial, columns, channels, channel, row - W + j, span, window[j]);
            }
#pragma unroll
            for (int j = 0; j + 1 < W; ++j)
#pragma unroll
                for (int i = 0; i < N; ++i) window[j][i] = window[j + 1][i];
            unpack<T, N>(raw[r], window[W - 1]);
            float out[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float z = filter.bias[i];
#pragma unroll
                for (int j = 0; j < W; ++j) z += filter.tap[j][i] * window[j][i];
                if (silu) z = sigmoid_gate<sizeof(T) == 2>(z, z).product;
                out[i] = span.number < 0 ? 0.0f : z;
            }
            store<T, N>(y + row * channels, out);
        }
    }
}

// The last `columns` inputs of each sequence, [sequences, channels, columns]. A thread owns one element.
template <typename T>
__global__ void __launch_bounds__(256)
    causal_conv1d_state(const T* x, const T* initial, const i32* cu, T* final, i64 sequences, i64 length, i64 channels,
                        i64 x_batch, i64 x_row, i64 columns) {
    const i64 step = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < sequences * channels * columns; i += step) {
        const i64 number = i / (channels * columns), channel = i / columns % channels, column = i % columns;
        RowSpan span{0, length, static_cast<int>(number)};
        if (cu != nullptr) span.first = cu[number], span.end = max(static_cast<i64>(cu[number + 1]), span.first);
        float one[1];
        conv_input<T, 1>(x + (cu == nullptr ? number * x_batch : 0) + channel, x_row, initial, columns, channels, channel,
                         span.end - columns + column, span, one);
        store<T, 1>(final + i, one);
    }
}

// One token of each sequence: its inputs move through the state in place. A thread owns one channel of a sequence.
template <typename T, int W>
__global__ void __launch_bounds__(256)
    causal_conv1d_step(const T* x, const void* weight, const void* bias, T* state, T* y, i64 sequences, i64 channels,
                       i64 x_batch, i64 columns, i64 weight_fp32, i64 bias_fp32, i64 silu) {
    const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= sequences * channels) return;
    const i64 batch = i / channels, channel = i - batch * channels;
    const ConvFilter<T, W, 1> filter(weight, bias, channel, weight_fp32 != 0, bias_fp32 != 0);
    T* const own = state + i * columns;
    float window[W][1];
#pragma unroll
    for (int j = 0; j + 1 < W; ++j) load_keep<T, 1>(own + columns - W + 1 + j, window[j]);
    load_keep<T, 1>(x + batch * x_batch + channel, window[W - 1]);
    float z[1] = {filter.bias[0]};
#pragma unroll
    for (int j = 0; j < W; ++j) z[0] += filter.tap[j][0] * window[j][0];
    if (silu) z[0] = sigmoid_gate<sizeof(T) == 2>(z[0], z[0]).product;
    store<T, 1>(y + i, z);
    // With W columns the oldest one is only kept for others.
#pragma unroll
    for (int j = 0; j < W; ++j)
        if (columns - W + j >= 0) store<T, 1>(own + columns - W + j, window[j]);
}

}  // namespace rtk
