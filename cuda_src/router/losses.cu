// Losses of a router, over the rows of logits [rows, experts], and their gradients; sums in a fixed order, in fp32.
//     z-loss:          factor * sum over rows of logsumexp(x)^2
//     load balancing:  factor * sum over rows and experts of counts * s, s the softmax of the row, its sigmoids divided
//                      by their sum, or the numbers themselves; counts are those of the row's sequence
// A warp owns a row at a time, with the first of its columns in registers and those of its next row in flight. Blocks
// leave their sums in `partial`; the last one, by `ticket` (0 before), adds them.
#include "router/rows.cuh"
#include "router/scores.cuh"

namespace rtk {

enum LossKind : int { kZLoss = 0, kBalanceSoftmax = 1, kBalanceSigmoid = 2, kBalancePlain = 3 };

// The counts that weight a row: of all rows, of `inner` neighbouring rows, or of every inner-th row.
struct CountsOf {
    const i32* counts;
    i64 experts, inner, interleaved;

    RTK_DEVICE const i32* operator()(i64 row) const {
        if (counts == nullptr || inner == 0) return counts;
        return counts + (interleaved ? row % inner : row / inner) * experts;
    }
};

template <int VEC>
RTK_DEVICE void load_counts(const i32* counts, int at, int cols, float (&f)[VEC]) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) f[i] = at + i < cols ? static_cast<float>(counts[at + i]) : 0.0f;
}

// Columns of a row in the registers of a warp; most routers have no more. Missing ones add nothing to sums.
template <int VEC>
struct Columns {
    static constexpr int kVectors = 2;
    static constexpr int kCount = kVectors * kWarp * VEC;
    float value[kVectors][VEC];

    RTK_DEVICE static int place(int vector, int lane) { return (vector * kWarp + lane) * VEC; }

    // Those from `first` on, of a row that starts at element `start` of x.
    RTK_DEVICE void load(const void* x, i64 start, int first, int cols, int kind, bool whole, int loss, int lane) {
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
            const int at = first + place(p, lane);
            load_some<VEC>(x, start + at, kind, whole, cols - at, value[p]);
        }
        if (first + kCount > cols) {
            const float nothing = loss == kBalancePlain ? 0.0f : kMinusInfinity;
#pragma unroll
            for (int p = 0; p < kVectors; ++p)
#pragma unroll
                for (int i = 0; i < VEC; ++i)
                    if (first + place(p, lane) + i >= cols) value[p][i] = nothing;
        }
    }
};

struct RowSums {
    float top, sum, dot;  // the largest, the sum of exponentials or sigmoids, and that with the counts as factors
};

// `head` has the first columns of the row.
template <int VEC>
RTK_DEVICE RowSums row_sums(const Columns<VEC>& head, const void* x, i64 start, const i32* counts, int cols, int kind,
                            bool whole, int loss, int lane) {
    using Part = Columns<VEC>;
    float running_max = kMinusInfinity, sum = 0.0f, dot = 0.0f;
    const bool exponential = loss == kZLoss || loss == kBalanceSoftmax;
    auto add = [&](const Part& part, int first) {
        float anchor = 0.0f;
        if (exponential) {
            float largest = running_max;
#pragma unroll
            for (int p = 0; p < Part::kVectors; ++p)
#pragma unroll
                for (int i = 0; i < VEC; ++i) largest = fmaxf(largest, part.value[p][i]);
            anchor = anchor_of(largest);
            if (first > 0) {
                const float factor = expf(running_max - anchor);
                sum *= factor, dot *= factor;
            }
            running_max = largest;
        }
#pragma unroll
        for (int p = 0; p < Part::kVectors; ++p) {
            float count[VEC];
            if (loss != kZLoss) load_counts<VEC>(counts, first + Part::place(p, lane), cols, count);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                float s = part.value[p][i];
                if (exponential) {
                    s = expf(s - anchor);
                } else if (loss == kBalanceSigmoid) {
                    s = sigmoid_score(s);
                }
                sum += s;
                if (loss != kZLoss) dot += s * count[i];
            }
        }
    };
    add(head, 0);
    for (int first = Part::kCount; first < cols; first += Part::kCount) {
        Part part;
        part.load(x, start, first, cols, kind, whole, loss, lane);
        add(part, first);
    }
    RowSums all{0.0f, 0.0f, 0.0f};
    if (exponential) {
        all.top = anchor_of(warp_reduce<Largest>(running_max));
        const float factor = running_max == kMinusInfinity ? 1.0f : expf(running_max - all.top);
        sum *= factor, dot *= factor;
    }
    all.sum = warp_reduce<Sum>(sum);
    if (loss != kZLoss) all.dot = warp_reduce<Sum>(dot);
    return all;
}

// z-loss of fp32 rows of whole vectors that fit into registers: ROWS at a time, so that a warp waits for them together.
template <int VEC, int ROWS>
struct RowsTogether {
    static constexpr int kVectors = Columns<VEC>::kVectors;
    float value[ROWS][kVectors][VEC];
    float top[ROWS], sum[ROWS];  // the largest, and the sum of exponentials of differences from it

    RTK_DEVICE void load(const float* x, i64 first_row, i64 rows, i64 stride, int cols, int lane) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {  // missing rows read the last one, so that all lanes do the same
            const float* from = x + min(first_row + r, rows - 1) * stride;
#pragma unroll
            for (int p = 0; p < kVectors; ++p) {
                const int at = Columns<VEC>::place(p, lane);
#pragma unroll
                for (float& v : value[r][p]) v = kMinusInfinity;
                if (at < cols) load_keep<float, VEC>(from + at, value[r][p]);
            }
        }
    }

    // The sum of exp(value - top) for every row; values become exponentials.
    RTK_DEVICE void add_up() {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            top[r] = kMinusInfinity, sum[r] = 0.0f;
#pragma unroll
            for (auto& vector : value[r])
#pragma unroll
                for (float v : vector) top[r] = fmaxf(top[r], v);
        }
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
            for (float& t : top) t = fmaxf(t, __shfl_xor_sync(kAllLanes, t, offset));
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            top[r] = anchor_of(top[r]);
#pragma unroll
            for (auto& vector : value[r])
#pragma unroll
                for (float& v : vector) sum[r] += v = expf(v - top[r]);
        }
#pragma unroll
        for (int offset = kWarp / 2; offset > 0; offset /= 2)
#pragma unroll
            for (float& t : sum) t += __shfl_xor_sync(kAllLanes, t, offset);
    }
};

RTK_DEVICE float block_sum(float v, float* parts) {
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    v = warp_reduce<Sum>(v);
    __syncthreads();
    if (lane == 0) parts[threadIdx.x / kWarp] = v;
    __syncthreads();
    return warp_reduce<Sum>(lane < warps ? parts[lane] : 0.0f);
}

// *loss = factor * the sum over all threads of all blocks.
RTK_DEVICE void finish_loss(float total, float* partial, float* loss, u32* ticket, double factor) {
    __shared__ float parts[kWarp];
    __shared__ u32 drawn;
    total = block_sum(total, parts);
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

template <int VEC>
__global__ void __launch_bounds__(256, 4)
    router_loss_fwd(const void* x, const i32* counts, float* partial, float* loss, u32* ticket, i64 rows, i64 experts,
                    i64 x_stride, i64 inner, i64 interleaved, i64 number_kind, i64 whole, i64 loss_kind,
                    double factor) {
    const int cols = static_cast<int>(experts), kind = static_cast<int>(number_kind);
    const int which = static_cast<int>(loss_kind);
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    const CountsOf counts_of{counts, experts, inner, interleaved};
    const i64 step = static_cast<i64>(gridDim.x) * warps;
    i64 row = static_cast<i64>(blockIdx.x) * warps + threadIdx.x / kWarp;
    Columns<VEC> next_head;
    if (row < rows) next_head.load(x, row * x_stride, 0, cols, kind, whole != 0, which, lane);
    float total = 0.0f;
    for (; row < rows; row += step) {
        const Columns<VEC> head = next_head;
        if (row + step < rows) next_head.load(x, (row + step) * x_stride, 0, cols, kind, whole != 0, which, lane);
        const RowSums sums =
            row_sums<VEC>(head, x, row * x_stride, counts_of(row), cols, kind, whole != 0, which, lane);
        if (which == kZLoss) {
            const float level = logf(sums.sum) + sums.top;
            total += level * level;
        } else {
            total += which == kBalancePlain ? sums.dot : sums.dot * inverse_or_zero(sums.sum);
        }
    }
    finish_loss(lane == 0 ? total : 0.0f, partial, loss, ticket, factor);
}

// Takes the arguments of the kernels above and below; for rows that fit into registers.
template <int VEC>
__global__ void __launch_bounds__(256, 2)
    router_z_fwd(const float* x, const i32*, float* partial, float* loss, u32* ticket, i64 rows, i64 experts,
                 i64 x_stride, i64, i64, i64, i64, i64, double factor) {
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    constexpr int kRows = 4;
    const i64 step = static_cast<i64>(gridDim.x) * warps * kRows;
    float total = 0.0f;
    i64 row = (static_cast<i64>(blockIdx.x) * warps + threadIdx.x / kWarp) * kRows;
    for (; row < rows; row += step) {
        RowsTogether<VEC, kRows> all;
        all.load(x, row, rows, x_stride, static_cast<int>(experts), lane);
        all.add_up();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float level = logf(all.sum[r]) + all.top[r];
            if (row + r < rows) total += level * level;
        }
    }
    finish_loss(lane == 0 ? total : 0.0f, partial, loss, ticket, factor);
}

template <int VEC>
__global__ void __launch_bounds__(256, 2)
    router_z_bwd(const float* g, const float* x, const i32*, float* dx, i64 rows, i64 experts, i64 x_stride, i64, i64,
                 i64, i64, i64, i64, double factor) {
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp, cols = static_cast<int>(experts);
    const i64 row = static_cast<i64>(blockIdx.x) * warps + threadIdx.x / kWarp;
    if (row >= rows) return;
    RowsTogether<VEC, 1> one;
    one.load(x, row, rows, x_stride, cols, lane);
    const float all_rows = *g * static_cast<float>(factor);
    one.add_up();
    const float inverse = inverse_or_zero(one.sum[0]);
    const float scale = all_rows * (2.0f * (logf(one.sum[0]) + one.top[0]));
#pragma unroll
    for (int p = 0; p < one.kVectors; ++p) {
        const int at = Columns<VEC>::place(p, lane);
#pragma unroll
        for (float& v : one.value[0][p]) v = scale * (v * inverse);
        if (at < cols) store<float, VEC>(dx + row * cols + at, one.value[0][p]);
    }
}

// dx = factor * g * gradient of the row's term
template <int VEC>
__global__ void __launch_bounds__(256, 4)
    router_loss_bwd(const float* g, const void* x, const i32* counts, void* dx, i64 rows, i64 experts, i64 x_stride,
                    i64 inner, i64 interleaved, i64 number_kind, i64 whole_in, i64 whole_out, i64 loss_kind,
                    double factor) {
    const int cols = static_cast<int>(experts), kind = static_cast<int>(number_kind);
    const int which = static_cast<int>(loss_kind);
    const int lane = threadIdx.x % kWarp;
    const CountsOf counts_of{counts, experts, inner, interleaved};
    using Part = Columns<VEC>;
    const i64 step = static_cast<i64>(gridDim.x) * (blockDim.x / kWarp);
    i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    Part next_head;
    if (row < rows) next_head.load(x, row * x_stride, 0, cols, kind, whole_in != 0, which, lane);
    for (; row < rows; row += step) {
        const i64 start = row * x_stride;
        const i32* weights = counts_of(row);
        Part part = next_head;
        if (row + step < rows) next_head.load(x, start + step * x_stride, 0, cols, kind, whole_in != 0, which, lane);
        float scale = *g * static_cast<float>(factor), mean = 0.0f, inverse = 0.0f, top = 0.0f;
        if (which != kBalancePlain) {
            const RowSums sums = row_sums<VEC>(part, x, start, weights, cols, kind, whole_in != 0, which, lane);
            inverse = inverse_or_zero(sums.sum);
            top = sums.top;
            mean = sums.dot * inverse;
            if (which == kZLoss) scale *= 2.0f * (logf(sums.sum) + top);
        }
        for (int first = 0; first < cols; first += Part::kCount) {
            if (first > 0) part.load(x, start, first, cols, kind, whole_in != 0, which, lane);
#pragma unroll
            for (int p = 0; p < Part::kVectors; ++p) {
                const int at = first + Part::place(p, lane);
                float value[VEC], count[VEC];
                if (which != kZLoss) load_counts<VEC>(weights, at, cols, count);
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    const float before = part.value[p][i];
                    if (which == kZLoss) {
                        value[i] = scale * (expf(before - top) * inverse);
                    } else if (which == kBalanceSoftmax) {
                        value[i] = scale * (expf(before - top) * inverse) * (count[i] - mean);
                    } else if (which == kBalanceSigmoid) {
                        const float s = sigmoid_score(before);
                        value[i] = scale * inverse * (s * (1.0f - s)) * (count[i] - mean);
                    } else {
                        value[i] = scale * count[i];
                    }
                }
                store_some<VEC>(dx, row * cols + at, kind, whole_out != 0, cols - at, value);
            }
        }
    }
}

// counts[s, e] = number of choices of expert e in the rows of sequence s: `length` rows of k, from row s * first_step
// on, row_step apart. One block per sequence; numbers outside of 0..experts-1 are not counted.
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
