// Losses of a router, over the rows of logits [rows, experts], and their gradients; sums in a fixed order, in fp32.
//     z-loss:          factor * sum over rows of logsumexp(x)^2
//     load balancing:  factor * sum over rows and experts of counts * s, s the softmax of the row, its sigmoids divided
//                      by their sum, or the numbers themselves; counts are those of the row's sequence
// A warp owns a row at a time, in PIECE columns per lane. Blocks leave their sums in `partial`; the last one, by
// `ticket` (0 before), adds them.
#include "router/rows.cuh"
#include "router/scores.cuh"

namespace rtk {

enum LossKind : int { kZLoss = 0, kBalanceSoftmax = 1, kBalanceSigmoid = 2, kBalancePlain = 3 };

// The counts a row is weighed with: of all rows, of rows in runs of `inner`, or of every inner-th row.
struct CountsOf {
    const i32* counts;
    i64 experts, inner, interleaved;

    RTK_DEVICE const i32* operator()(i64 row) const {
        if (counts == nullptr || inner == 0) return counts;
        return counts + (interleaved ? row % inner : row / inner) * experts;
    }
};

template <int PIECE>
RTK_DEVICE void load_counts(const i32* counts, int at, int cols, float (&f)[PIECE]) {
#pragma unroll
    for (int i = 0; i < PIECE; ++i) f[i] = at + i < cols ? static_cast<float>(counts[at + i]) : 0.0f;
}

struct RowSums {
    float top, sum, dot;  // the largest, the sum of exponentials or sigmoids, and that with the counts as factors
};

template <int PIECE>
RTK_DEVICE RowSums row_sums(const void* x, i64 start, const i32* counts, int cols, int kind, bool whole, int loss,
                            int lane) {
    float most = kMinusInfinity, sum = 0.0f, dot = 0.0f;
    const bool exponential = loss == kZLoss || loss == kBalanceSoftmax;
    for (int at = lane * PIECE; at < cols; at += kWarp * PIECE) {
        float value[PIECE], count[PIECE];
        load_some<PIECE>(x, start + at, kind, whole, cols - at, value);
        if (loss != kZLoss) {
            load_counts<PIECE>(counts, at, cols, count);
        } else {
#pragma unroll
            for (int i = 0; i < PIECE; ++i) count[i] = 0.0f;
        }
        float largest = most;
        if (exponential) {
#pragma unroll
            for (int i = 0; i < PIECE; ++i)
                if (at + i < cols) largest = fmaxf(largest, value[i]);
            if (largest > most) {
                const float factor = expf(most - largest);
                sum *= factor, dot *= factor, most = largest;
            }
        }
        const float anchor = anchor_of(most);
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            if (at + i < cols) {
                float s = value[i];
                if (exponential) {
                    s = expf(s - anchor);
                } else if (loss == kBalanceSigmoid) {
                    s = sigmoid_score(s);
                }
                sum += s;
                dot += s * count[i];
            }
        }
    }
    RowSums all{0.0f, 0.0f, 0.0f};
    if (exponential) {
        all.top = anchor_of(warp_reduce<Largest>(most));
        const float factor = most == kMinusInfinity ? 1.0f : expf(most - all.top);
        sum *= factor, dot *= factor;
    }
    all.sum = warp_reduce<Sum>(sum);
    all.dot = warp_reduce<Sum>(dot);
    return all;
}

RTK_DEVICE float block_sum(float v, float* parts) {
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    v = warp_reduce<Sum>(v);
    __syncthreads();
    if (lane == 0) parts[threadIdx.x / kWarp] = v;
    __syncthreads();
    return warp_reduce<Sum>(lane < warps ? parts[lane] : 0.0f);
}

template <int PIECE>
__global__ void __launch_bounds__(256)
    router_loss_fwd(const void* x, const i32* counts, float* partial, float* loss, u32* ticket, i64 rows, i64 experts,
                    i64 x_stride, i64 inner, i64 interleaved, i64 number_kind, i64 whole, i64 loss_kind,
                    double factor) {
    __shared__ float parts[kWarp];
    __shared__ u32 drawn;
    const int cols = static_cast<int>(experts), kind = static_cast<int>(number_kind);
    const int which = static_cast<int>(loss_kind);
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    const CountsOf counts_of{counts, experts, inner, interleaved};
    float total = 0.0f;
    for (i64 row = static_cast<i64>(blockIdx.x) * warps + threadIdx.x / kWarp; row < rows;
         row += static_cast<i64>(gridDim.x) * warps) {
        const RowSums sums =
            row_sums<PIECE>(x, row * x_stride, counts_of(row), cols, kind, whole != 0, which, lane);
        if (which == kZLoss) {
            const float level = logf(sums.sum) + sums.top;
            total += level * level;
        } else {
            total += which == kBalancePlain ? sums.dot : sums.dot * inverse_or_zero(sums.sum);
        }
    }
    total = block_sum(lane == 0 ? total : 0.0f, parts);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = total;
        __threadfence();
        drawn = atomicAdd(ticket, 1u);
    }
    __syncthreads();
    if (drawn != gridDim.x - 1) return;
    __threadfence();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += blockDim.x) sum += __ldcg(partial + i);
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) *loss = sum * static_cast<float>(factor);
}

// dx = factor * g * gradient of the row's term
template <int PIECE>
__global__ void __launch_bounds__(256)
    router_loss_bwd(const float* g, const void* x, const i32* counts, void* dx, i64 rows, i64 experts, i64 x_stride,
                    i64 inner, i64 interleaved, i64 number_kind, i64 whole_in, i64 whole_out, i64 loss_kind,
                    double factor) {
    const int cols = static_cast<int>(experts), kind = static_cast<int>(number_kind);
    const int which = static_cast<int>(loss_kind);
    const int lane = threadIdx.x % kWarp;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (row >= rows) return;
    const i64 start = row * x_stride;
    const i32* weights = CountsOf{counts, experts, inner, interleaved}(row);
    float scale = *g * static_cast<float>(factor), mean = 0.0f, inverse = 0.0f, top = 0.0f;
    if (which != kBalancePlain) {
        const RowSums sums = row_sums<PIECE>(x, start, weights, cols, kind, whole_in != 0, which, lane);
        inverse = inverse_or_zero(sums.sum);
        top = sums.top;
        mean = sums.dot * inverse;
        if (which == kZLoss) scale *= 2.0f * (logf(sums.sum) + top);
    }
    for (int at = lane * PIECE; at < cols; at += kWarp * PIECE) {
        float value[PIECE], count[PIECE];
        load_some<PIECE>(x, start + at, kind, whole_in != 0, cols - at, value);
        if (which != kZLoss) load_counts<PIECE>(weights, at, cols, count);
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            if (which == kZLoss) {
                value[i] = scale * (expf(value[i] - top) * inverse);
            } else if (which == kBalanceSoftmax) {
                value[i] = scale * (expf(value[i] - top) * inverse) * (count[i] - mean);
            } else if (which == kBalanceSigmoid) {
                const float s = sigmoid_score(value[i]);
                value[i] = scale * inverse * (s * (1.0f - s)) * (count[i] - mean);
            } else {
                value[i] = scale * count[i];
            }
        }
        store_some<PIECE>(dx, row * cols + at, kind, whole_out != 0, cols - at, value);
    }
}

// counts[s, e] = choices of expert e among the rows of sequence s: `length` rows of k, from row s * first_step on, each
// row_step after the other. A block per sequence; other numbers than 0..experts-1 are not counted.
template <typename I>
__global__ void __launch_bounds__(1024) router_counts(const I* indices, i32* counts, i64 length, i64 top_k, i64 experts,
                                                      i64 first_step, i64 row_step) {
    extern __shared__ __align__(16) u8 memory[];
    u32* tokens = reinterpret_cast<u32*>(memory);
    const int cols = static_cast<int>(experts), k = static_cast<int>(top_k);
    for (int e = threadIdx.x; e < cols; e += blockDim.x) tokens[e] = 0u;
    __syncthreads();
    const I* mine = indices + blockIdx.x * first_step * k;
    if (row_step == 1) {
        for (i64 i = threadIdx.x; i < length * k; i += blockDim.x) {
            const i64 e = mine[i];
            if (e >= 0 && e < experts) atomicAdd(&tokens[e], 1u);
        }
    } else {
        for (i64 row = threadIdx.x; row < length; row += blockDim.x) {
            for (int j = 0; j < k; ++j) {
                const i64 e = mine[row * row_step * k + j];
                if (e >= 0 && e < experts) atomicAdd(&tokens[e], 1u);
            }
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < cols; e += blockDim.x) counts[blockIdx.x * experts + e] = static_cast<i32>(tokens[e]);
}

}  // namespace rtk
