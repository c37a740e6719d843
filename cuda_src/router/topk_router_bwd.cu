// Gradient of router logits from gradients of the probabilities: g of each choice is the sum of the compact gradient
// [rows, k] and of the dense one [rows, experts] at its column; either may be missing.
//
// With scores s of the chosen, z = sum s + eps, and ds the gradient of a score:
//     renormalize:  ds = scale / z * (g - sum(g s) / z)          else  ds = scale * g
//     sigmoid:      dx = ds * s * (1 - s) where chosen, else 0
//     softmax over all:  dx = s * (ds - D), D = sum(ds s), ds = 0 where not chosen
//     softmax over the chosen:  dx = scale * s * (g - sum(g s)) where chosen, else 0
// A warp owns a row: first what all columns get, then the chosen ones, in VEC columns per lane.
#include "router/rows.cuh"
#include "router/scores.cuh"

namespace rtk {

template <int VEC>
__global__ void __launch_bounds__(256)
    router_bwd(const void* x, const i32* indices, const float* g_compact, const float* g_dense, void* dx, i64 rows,
               i64 experts, i64 x_stride, i64 g_stride, i64 top_k, i64 number_kind, i64 whole_in, i64 whole_out,
               i64 modes, double scaling, double epsilon) {
    const int cols = static_cast<int>(experts), k = static_cast<int>(top_k), kind = static_cast<int>(number_kind);
    const bool softmax = (modes & kSoftmax) != 0, over_all = softmax && (modes & kScoreFirst) != 0;
    const float scale = static_cast<float>(scaling), eps = static_cast<float>(epsilon);
    const int lane = threadIdx.x % kWarp;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (row >= rows) return;
    const i64 start = row * x_stride, out = row * cols;

    int column[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) column[j] = lane + j * kWarp < k ? indices[row * k + lane + j * kWarp] : -1;
    // Zeros for columns that get nothing else are stored while the rest waits for memory.
    for (int at = over_all ? cols : lane * VEC; at < cols; at += kWarp * VEC) {
        float zeros[VEC];
#pragma unroll
        for (int i = 0; i < VEC; ++i) zeros[i] = 0.0f;
        store_some<VEC>(dx, out + at, kind, whole_out != 0, cols - at, zeros);
    }
    float score[2], g[2];
    float best = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const int i = lane + j * kWarp;
        if (column[j] >= cols) column[j] = -1;
        score[j] = g[j] = 0.0f;
        if (column[j] >= 0) {
            score[j] = load_one(x, start + column[j], kind);
            best = fmaxf(best, score[j]);
            if (g_compact != nullptr) g[j] = g_compact[row * k + i];
            if (g_dense != nullptr) g[j] += g_dense[row * g_stride + column[j]];
        }
    }
    float top = 0.0f, inverse = 0.0f;
    if (over_all) {
        float running_max = kMinusInfinity, sum = 0.0f;
        for (int at = lane * VEC; at < cols; at += kWarp * VEC) {
            float value[VEC], largest = running_max;
            load_some<VEC>(x, start + at, kind, whole_in != 0, cols - at, value);
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                if (at + i < cols) largest = fmaxf(largest, value[i]);
            if (largest > running_max) sum *= expf(running_max - largest), running_max = largest;
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                if (at + i < cols) sum += expf(value[i] - anchor_of(running_max));
        }
        top = anchor_of(warp_reduce<Largest>(running_max));
        inverse = inverse_or_zero(warp_reduce<Sum>(running_max == kMinusInfinity ? sum : sum * expf(running_max - top)));
    } else if (softmax) {
        top = anchor_of(warp_reduce<Largest>(best));
    }
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (column[j] >= 0) {
            score[j] = softmax ? expf(score[j] - top) : sigmoid_score(score[j]);
            if (over_all) score[j] *= inverse;
            sum += score[j];
            dot += g[j] * score[j];
        }
    }
    sum = warp_reduce<Sum>(sum);
    dot = warp_reduce<Sum>(dot);
    if (softmax && !over_all) {
        inverse = inverse_or_zero(sum);
        dot *= inverse;
    }
    const bool renormalize = (modes & kRenormalize) != 0;
    const float share = 1.0f / (sum + eps);
    // D of a softmax over all; renormalised scores have sum(ds s) = scale * dot * (1 - sum / z) / z, and 1 - sum / z is
    // eps / z without the difference.
    const float common = !over_all ? 0.0f : renormalize ? scale * dot * share * (eps * share) : scale * dot;

    if (over_all) {
        for (int at = lane * VEC; at < cols; at += kWarp * VEC) {
            float value[VEC];
            load_some<VEC>(x, start + at, kind, whole_in != 0, cols - at, value);
#pragma unroll
            for (int i = 0; i < VEC; ++i) value[i] = -expf(value[i] - top) * inverse * common;
            store_some<VEC>(dx, out + at, kind, whole_out != 0, cols - at, value);
        }
    }
    __syncwarp();  // the chosen ones follow
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (column[j] >= 0) {
            float ds = renormalize ? scale * share * (g[j] - dot * share) : scale * g[j];
            float slope = score[j] * (1.0f - score[j]);
            if (over_all) {
                slope = score[j], ds -= common;
            } else if (softmax) {
                slope = score[j] * inverse, ds = scale * (g[j] - dot);
            }
            store_one(dx, out + column[j], kind, ds * slope);
        }
    }
}

}  // namespace rtk
