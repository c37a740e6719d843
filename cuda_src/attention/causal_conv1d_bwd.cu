// Gradients of causal convolution (attention/causal_conv1d.cuh). With dz = dy act'(z), z recomputed:
//     dx[t] = sum over j of w[j] dz[t + W - 1 - j],  dw[j] = sum over t of dz[t] x[t - W + 1 + j],  dbias = sum of dz,
// within a sequence; the gradient of a final state belongs to the rows that it holds.
#include "attention/causal_conv1d.cuh"

namespace rtk {

template <bool kFast>
RTK_DEVICE float conv_slope(float dy, float z, bool silu) {
    if (!silu) return dy;
    const SigmoidGate s = sigmoid_gate<kFast>(z, z);
    return dy * (s.sigmoid + s.product * (1.0f - s.sigmoid));
}

// Owners as in the forward; a warp also computes dz of the W - 1 rows behind its own. Sums for the weight and the bias
// are added over the warps of a block in order, to row blockIdx.z * gridDim.x + blockIdx.x of dweight [.., channels, W]
// and dbias [.., channels], which are fp32 or null. dx is dense, or null.
template <typename T, int W, int N>
__global__ void __launch_bounds__(32 * kConvWarps, 1)
    causal_conv1d_bwd(const T* dy, const T* dfinal, const T* x, const void* weight, const void* bias, const T* initial,
                      const i32* cu, T* dx, float* dweight, float* dbias, i64 sequences, i64 length, i64 channels,
                      i64 dy_batch, i64 dy_row, i64 x_batch, i64 x_row, i64 columns, i64 weight_fp32, i64 bias_fp32,
                      i64 silu) {
    constexpr int kChannels = kWarp * N;
    __shared__ float sums[kConvWarps][kChannels];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 channel = (static_cast<i64>(blockIdx.y) * kWarp + lane) * N;
    const i64 row0 = (static_cast<i64>(blockIdx.x) * kConvWarps + warp) * kConvRows;
    const int batch = static_cast<int>(blockIdx.z), count = static_cast<int>(sequences);
    float to_tap[W + 1][N];  // the last one: of the bias
#pragma unroll
    for (int j = 0; j <= W; ++j)
#pragma unroll
        for (int i = 0; i < N; ++i) to_tap[j][i] = 0.0f;
    if (channel < channels && row0 < length) {
        x += batch * x_batch + channel;
        dy += batch * dy_batch + channel;
        if (dx != nullptr) dx += batch * length * channels + channel;
        const ConvFilter<T, W, N> filter(weight, bias, channel, weight_fp32 != 0, bias_fp32 != 0);
        RowSpan span = span_at(row0, length, cu, count, batch);
        float window[W][N], slope[W][N];  // x of rows t - W + 1 to t, dz of the same
        i64 ends[W];                      // of their sequences
        int numbers[W];
#pragma unroll
        for (int j = 0; j < W; ++j) {
            ends[j] = 0, numbers[j] = -1;
#pragma unroll
            for (int i = 0; i < N; ++i) slope[j][i] = 0.0f;
            if (j > 0) conv_input<T, N>(x, x_row, initial, columns, channels, channel, row0 - W + j, span, window[j]);
        }
        const i64 last = min(row0 + kConvRows, length);
#pragma unroll 2
        for (i64 row = row0; row < last + W - 1; ++row) {
            const bool there = row < length;
            if (there && row >= span.end) {
                span = span_at(row, length, cu, count, batch);
#pragma unroll
                for (int j = 1; j < W; ++j)
                    conv_input<T, N>(x, x_row, initial, columns, channels, channel, row - W + j, span, window[j]);
            }
#pragma unroll
            for (int j = 0; j + 1 < W; ++j) {
                ends[j] = ends[j + 1], numbers[j] = numbers[j + 1];
#pragma unroll
                for (int i = 0; i < N; ++i) window[j][i] = window[j + 1][i], slope[j][i] = slope[j + 1][i];
            }
            ends[W - 1] = span.end, numbers[W - 1] = there ? span.number : -1;
            const bool counts = there && span.number >= 0;
            float incoming[N];
#pragma unroll
            for (int i = 0; i < N; ++i) incoming[i] = window[W - 1][i] = 0.0f;
            if (counts) {
                load_keep<T, N>(x + row * x_row, window[W - 1]);
                load_keep<T, N>(dy + row * dy_row, incoming);
            }
#pragma unroll
            for (int i = 0; i < N; ++i) {
                float z = filter.bias[i];
#pragma unroll
                for (int j = 0; j < W; ++j) z += filter.tap[j][i] * window[j][i];
                const float dz = counts ? conv_slope<sizeof(T) == 2>(incoming[i], z, silu != 0) : 0.0f;
                slope[W - 1][i] = dz;
                if (row < last && counts) {
#pragma unroll
                    for (int j = 0; j < W; ++j) to_tap[j][i] += dz * window[j][i];
                    to_tap[W][i] += dz;
                }
            }
            const i64 out_row = row - W + 1;
            if (dx == nullptr || out_row < row0) continue;
            float out[N];
#pragma unroll
            for (int i = 0; i < N; ++i) {
                out[i] = 0.0f;
#pragma unroll
                for (int k = 0; k < W; ++k)
                    if (out_row + k < ends[0]) out[i] += slope[k][i] * filter.tap[W - 1 - k][i];
            }
            const i64 column = out_row - ends[0] + columns;
            if (dfinal != nullptr && numbers[0] >= 0 && column >= 0) {
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    float one[1];
                    load_keep<T, 1>(dfinal + (numbers[0] * channels + channel + i) * columns + column, one);
                    out[i] += one[0];
                }
            }
#pragma unroll
            for (int i = 0; i < N; ++i) out[i] = numbers[0] < 0 ? 0.0f : out[i];
            store<T, N>(dx + out_row * channels, out);
        }
    }
    if (dweight == nullptr && dbias == nullptr) return;
    const i64 part = static_cast<i64>(blockIdx.z) * gridDim.x + blockIdx.x;
    const i64 channel0 = static_cast<i64>(blockIdx.y) * kChannels;
#pragma unroll
    for (int j = 0; j <= W; ++j) {
        float* const to = j < W ? dweight : dbias;
        if (to == nullptr) continue;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) sums[warp][lane * N + i] = to_tap[j][i];
        __syncthreads();
        const int own = static_cast<int>(threadIdx.x);
        if (own < kChannels && channel0 + own < channels) {
            float total = sums[0][own];
#pragma unroll
            for (int w = 1; w < kConvWarps; ++w) total += sums[w][own];
            const i64 at = part * channels + channel0 + own;
            to[j < W ? at * W + j : at] = total;
        }
    }
}

// The gradient of initial states, [sequences, channels, columns]: from the first rows and, where a sequence is shorter
// than its state, from the final state. A thread owns one channel of a sequence.
template <typename T, int W>
__global__ void __launch_bounds__(256)
    causal_conv1d_state_bwd(const T* dy, const T* dfinal, const T* x, const void* weight, const void* bias, const T* initial,
                            const i32* cu, T* dinitial, i64 sequences, i64 length, i64 channels, i64 dy_batch, i64 dy_row,
                            i64 x_batch, i64 x_row, i64 columns, i64 weight_fp32, i64 bias_fp32, i64 silu) {
    const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= sequences * channels) return;
    const i64 number = i / channels, channel = i - number * channels;
    const ConvFilter<T, W, 1> filter(weight, bias, channel, weight_fp32 != 0, bias_fp32 != 0);
    RowSpan span{0, length, static_cast<int>(number)};
    if (cu != nullptr) span.first = cu[number], span.end = max(static_cast<i64>(cu[number + 1]), span.first);
    else x += number * x_batch, dy += number * dy_batch;
    x += channel, dy += channel;
    float slope[W - 1];  // dz of the first rows
#pragma unroll
    for (int t = 0; t + 1 < W; ++t) {
        slope[t] = 0.0f;
        if (span.first + t >= span.end) continue;
        float z = filter.bias[0], one[1];
#pragma unroll
        for (int j = 0; j < W; ++j) {
            conv_input<T, 1>(x, x_row, initial, columns, channels, channel, span.first + t - W + 1 + j, span, one);
            z += filter.tap[j][0] * one[0];
        }
        load_keep<T, 1>(dy + (span.first + t) * dy_row, one);
        slope[t] = conv_slope<sizeof(T) == 2>(one[0], z, silu != 0);
    }
    for (int column = 0; column < static_cast<int>(columns); ++column) {
        const int back = static_cast<int>(columns) - column;  // rows before the first one
        float out[1] = {0.0f};
#pragma unroll
        for (int t = 0; t + 1 < W; ++t)
#pragma unroll
            for (int j = 0; j < W; ++j)
                if (t - W + 1 + j == -back) out[0] += slope[t] * filter.tap[j][0];
        const i64 later = column - (span.end - span.first);
        if (dfinal != nullptr && later >= 0) {
            float one[1];
            load_keep<T, 1>(dfinal + i * columns + later, one);
            out[0] += one[0];
        }
        store<T, 1>(dinitial + i * columns + column, out);
    }
}

}  // namespace rtk
