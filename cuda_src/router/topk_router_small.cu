// router_fwd (router/topk_router.cu) for up to 256 experts and 8 choices, without bias and groups: four rows of a warp
// at a time (top8.cuh). Tokens are counted in shared memory, then in `counts`, which must be zeros.
#include "router/top8.cuh"

namespace rtk {

inline constexpr int kMaxThreads = 512;  // at most

RTK_DEVICE float octet_sum(float value) {
    return octet_reduce(value, [](float a, float b) { return a + b; });
}

// Rows are whole groups of logits of SIZE bytes, aligned to these.
template <int SIZE>
__global__ void __launch_bounds__(kMaxThreads, 2)
    router_fwd_small(const void* x, const float*, float* probs, i32* indices, float* dense, u8* map, u32* counts, i64 rows,
               i64 experts, i64 x_stride, i64 top_k, i64 number_kind, i64 modes, double scaling, double epsilon) {
    __shared__ u32 tokens[kOctetColumns];
    __shared__ Choice chosen[kMaxThreads / kWarp][kOctet];
    const int k = static_cast<int>(top_k), cols = static_cast<int>(experts);
    const bool softmax = (modes & kSoftmax) != 0, score_first = (modes & kScoreFirst) != 0;
    const float scale = static_cast<float>(scaling), eps = static_cast<float>(epsilon);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x / kOctet;
    const int in_warp = static_cast<int>(threadIdx.x) % kWarp / kOctet;
    for (int e = threadIdx.x; e < cols; e += blockDim.x) tokens[e] = 0u;
    __syncthreads();

    i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / kOctet;
    for (; row - in_warp < rows; row += step) {
        const i64 start = min(row, rows - 1) * x_stride;  // missing rows repeat the last one, so that all lanes take part
        Octet<SIZE> octet(static_cast<const u8*>(x) + start * SIZE, experts, static_cast<int>(number_kind));
        octet.load();
        octet.look();
        float top = 0.0f, inverse = 0.0f;
        if (softmax && score_first) {
            top = anchor_of(octet.top);
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                if (j * (kOctet * kGroupWidth) >= cols) break;
                float value[kGroupWidth];
                unpack_group<SIZE>(octet.raw[j], octet.kind, value);
#pragma unroll
                for (float v : value) sum += exponential<true>(v - top);
            }
            inverse = inverse_or_zero(octet_sum(sum));
        }
        const int expert = octet.find(k, chosen[threadIdx.x / kWarp]);
        const bool here = octet.lane < k;
        const float logit = here ? load_one(x, start + expert, octet.kind) : kMinusInfinity;
        float score;
        if (!softmax) {
            score = sigmoid_score(logit);
        } else if (score_first) {
            score = expf(logit - top) * inverse;
        } else {
            score = expf(logit - anchor_of(__shfl_sync(kAllLanes, logit, 0, kOctet)));
        }
        const float sum = octet_sum(here ? score : 0.0f);
        float factor = scale;
        if (softmax && !score_first) {
            factor = scale * inverse_or_zero(sum);
        } else if ((modes & kRenormalize) != 0) {
            factor = scale / (sum + eps);
        }
        if (dense != nullptr || map != nullptr) {
            Raw<16> zeros;
            clear(zeros);
            for (int j = 0; row < rows && octet.has(j); ++j) {
                const i64 at = row * experts + octet.column_of(j);
                if (dense != nullptr) ptx::st<16>(dense + at, zeros);
                if (map != nullptr) ptx::st<4>(map + at, Raw<4>{{0u}});
            }
            __syncwarp();  // zeros first, then the entries among them
        }
        if (here && row < rows) {
            const float p = score * factor;
            probs[row * k + octet.lane] = p;
            indices[row * k + octet.lane] = expert;
            atomicAdd(&tokens[expert], 1u);
            if (dense != nullptr) dense[row * experts + expert] = p;
            if (map != nullptr) map[row * experts + expert] = 1;
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < cols; e += blockDim.x)
        if (tokens[e] != 0u) atomicAdd(&counts[e], tokens[e]);
}

}  // namespace rtk
