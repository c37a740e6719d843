// Turns router logits [rows, experts] into each token's k experts, their probabilities, and the number of tokens per
// expert.
//
// Scores are sigmoids, or a softmax over all experts (score first) or over the chosen ones. Experts are chosen by keys:
// scores (score first) or logits, plus a bias; without bias and groups the logits, which have the same order as the
// scores. Probabilities are scores of the chosen experts, divided by their sum + eps (renormalize), times scale.
//
// Rows of up to 32 * V experts: one warp per row. Longer ones (BLOCK_PER_ROW): one block per row, 32 * V experts per
// warp, and the first warp merges the choices. Dense outputs are assembled in shared memory, so that every row is
// written once, as a whole. Tokens are counted in shared memory, then in `counts`, which must be zeros.
#include "ptx/shared.cuh"
#include "router/groups.cuh"
#include "router/scores.cuh"

namespace rtk {

// BYTES from shared to global memory, both aligned to 16 or to BYTES.
template <int BYTES>
RTK_DEVICE void copy_out(void* to, const void* from) {
    if constexpr (BYTES >= 16) {
#pragma unroll
        for (int at = 0; at < BYTES; at += 16) {
            const Raw<16> raw = ptx::ld_shared_16(ptx::shared_address(static_cast<const u8*>(from) + at));
            ptx::st<16>(static_cast<u8*>(to) + at, raw);
        }
    } else {
        Raw<BYTES> raw;
        if constexpr (BYTES >= 4) {
#pragma unroll
            for (int i = 0; i < BYTES / 4; ++i) raw.w[i] = static_cast<const u32*>(from)[i];
        } else {
            raw.w[0] = *static_cast<const u16*>(from);
        }
        ptx::st<BYTES>(to, raw);
    }
}

RTK_DEVICE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

template <int V, bool BLOCK_PER_ROW>
__global__ void __launch_bounds__(BLOCK_PER_ROW ? 512 : 1024, 1)
    router_fwd(const void* x, const float* bias, float* probs, i32* indices, float* dense, u8* map, u32* counts,
               i64 rows, i64 experts, i64 x_stride, i64 top_k, i64 number_kind, i64 whole_vectors, i64 modes,
               i64 number_of_groups, i64 top_groups, i64 of_group, i64 lanes_of_group, double scaling, double epsilon) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Choice chosen[BLOCK_PER_ROW ? 16 : 32][kMaxChosen];
    __shared__ Choice merged[BLOCK_PER_ROW ? kMaxChosen : 1];
    __shared__ float parts[2][16];
    const int cols = static_cast<int>(experts), k = static_cast<int>(top_k), kind = static_cast<int>(number_kind);
    const int groups = static_cast<int>(number_of_groups), lanes = static_cast<int>(lanes_of_group);
    const bool whole = whole_vectors != 0, softmax = (modes & kSoftmax) != 0, score_first = (modes & kScoreFirst) != 0;
    const bool by_logits = bias == nullptr && groups == 1;
    const float scale = static_cast<float>(scaling), eps = static_cast<float>(epsilon);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int column = (BLOCK_PER_ROW ? static_cast<int>(threadIdx.x) : lane) * V;  // the first one of this thread
    const int valid = cols - column;
    const int thread = BLOCK_PER_ROW ? static_cast<int>(threadIdx.x) : lane;
    const int threads = BLOCK_PER_ROW ? static_cast<int>(blockDim.x) : kWarp;
    auto sync = [] {
        if constexpr (BLOCK_PER_ROW) {
            __syncthreads();
        } else {
            __syncwarp();
        }
    };

    // Shared memory: counts of the block, then for each active row a dense row and its map, or the groups' memory.
    u32* tokens = reinterpret_cast<u32*>(memory);
    const int dense_bytes = dense != nullptr || map != nullptr ? round_up(5 * cols, 16) : 0;
    const int group_bytes = groups > 1 && lanes == 0 ? round_up(4 * (cols + groups) + groups, 16) : 0;
    u8* mine = memory + round_up(4 * cols, 16) + (BLOCK_PER_ROW ? 0 : warp) * (dense_bytes + group_bytes);
    float* row_probs = reinterpret_cast<float*>(mine);
    u8* row_map = mine + 4 * cols;
    const GroupMemory group_memory{reinterpret_cast<u32*>(mine + dense_bytes),
                                   reinterpret_cast<u32*>(mine + dense_bytes) + cols,
                                   mine + dense_bytes + 4 * (cols + groups)};
    const i64 step = BLOCK_PER_ROW ? gridDim.x : static_cast<i64>(gridDim.x) * warps;
    const i64 first_row = BLOCK_PER_ROW ? blockIdx.x : static_cast<i64>(blockIdx.x) * warps + warp;
    float next_row[V];  // the next row
    load_some<V>(x, first_row * x_stride + column, kind, whole, first_row < rows ? valid : 0, next_row);
    for (int e = threadIdx.x; e < cols; e += blockDim.x) tokens[e] = 0u;
    for (int at = thread; at < dense_bytes / 4; at += threads) reinterpret_cast<u32*>(mine)[at] = 0u;
    __syncthreads();

    for (i64 row = first_row; row < rows; row += step) {
        const i64 start = row * x_stride;
        float value[V];
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = next_row[v];
        load_some<V>(x, start + step * x_stride + column, kind, whole, row + step < rows ? valid : 0, next_row);

        // ---- keys
        float top = 0.0f, inverse = 0.0f;
        if (softmax && score_first) {
            top = kMinusInfinity;
#pragma unroll
            for (int v = 0; v < V; ++v) top = fmaxf(top, v < valid ? value[v] : kMinusInfinity);
            top = warp_reduce<Largest>(top);
            if constexpr (BLOCK_PER_ROW) {
                if (lane == 0) parts[0][warp] = top;
                __syncthreads();
                top = warp_reduce<Largest>(lane < warps ? parts[0][lane] : kMinusInfinity);
            }
            top = anchor_of(top);
            float sum = 0.0f;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const float e = v < valid ? expf(value[v] - top) : 0.0f;
                sum += e;
                if (!by_logits) value[v] = e;
            }
            sum = warp_reduce<Sum>(sum);
            if constexpr (BLOCK_PER_ROW) {
                if (lane == 0) parts[1][warp] = sum;
                __syncthreads();
                sum = warp_reduce<Sum>(lane < warps ? parts[1][lane] : 0.0f);
            }
            inverse = inverse_or_zero(sum);
            if (!by_logits) {
#pragma unroll
                for (int v = 0; v < V; ++v) value[v] *= inverse;
            }
        } else if (score_first && !by_logits) {
#pragma unroll
            for (int v = 0; v < V; ++v) value[v] = sigmoid_score(value[v]);
        }
        if (bias != nullptr) {
            float added[V];
            load_some<V>(bias, column, kFloat32, whole, valid, added);
#pragma unroll
            for (int v = 0; v < V; ++v) value[v] += added[v];
        }
        u32 key[V];
        keys_of<V>(value, valid, key);
        if (!BLOCK_PER_ROW && by_logits && kind != kFloat32) tell_apart<V>(key, column);

        // ---- choices
        const Choice* choices = BLOCK_PER_ROW ? merged : chosen[warp];
        bool found = false;
        if (groups > 1 && lanes != 0) {
            if constexpr (V == 8 && !BLOCK_PER_ROW) {
                const u32 allowed = best_lanes<V>(key, lanes, static_cast<int>(of_group), static_cast<int>(top_groups));
                const bool in = (allowed >> lane & 1u) != 0u;
                if (__popc(allowed) * V <= kWarp) {  // one key for each lane
                    Choice* list = chosen[warp] + kWarp;
                    const int place = __popc(allowed & ((1u << lane) - 1u)) * V;
                    if (in) {
#pragma unroll
                        for (int v = 0; v < V; ++v) list[place + v] = {key[v], lane * V + v};
                    }
                    __syncwarp();
                    const Choice one = lane < __popc(allowed) * V ? list[lane] : Choice{0u, 0};
                    choose_lanes(one, k, chosen[warp], lane);
                    found = true;
                } else if (!in) {
#pragma unroll
                    for (int v = 0; v < V; ++v) key[v] = 0u;
                }
            }
        } else if (groups > 1) {
            const int size = cols / groups;
#pragma unroll
            for (int v = 0; v < V; ++v)
                if (v < valid) group_memory.key[column + v] = key[v];
            best_groups(group_memory, groups, size, static_cast<int>(of_group), static_cast<int>(top_groups), thread,
                        threads, sync);
#pragma unroll
            for (int v = 0; v < V; ++v)
                if (v < valid && group_memory.allowed[(column + v) / size] == 0) key[v] = 0u;
        }
        if constexpr (BLOCK_PER_ROW) {
            for (int i = lane; i < k; i += kWarp) chosen[0][warp * k + i] = {0u, 0};
            __syncwarp();
            choose<V>(key, k, column, &chosen[0][warp * k], lane);
            __syncthreads();
            if (warp == 0) merge_choices(&chosen[0][0], warps, k, merged, lane);
        } else if (!found) {
            choose<V>(key, k, column, chosen[warp], lane);
        }

        // ---- probabilities
        int expert[2] = {0, 0};
        if (!BLOCK_PER_ROW || warp == 0) {
            float score[2];
            float best = kMinusInfinity;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                score[j] = 0.0f;
                const int i = lane + j * kWarp;
                if (i < k) {
                    expert[j] = choices[i].column;
                    score[j] = load_one(x, start + expert[j], kind);
                    best = fmaxf(best, score[j]);
                }
            }
            if (softmax && !score_first) best = anchor_of(warp_reduce<Largest>(best));
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if (lane + j * kWarp < k) {
                    if (!softmax) {
                        score[j] = sigmoid_score(score[j]);
                    } else {
                        score[j] = score_first ? expf(score[j] - top) * inverse : expf(score[j] - best);
                    }
                    sum += score[j];
                }
            }
            float factor = scale;
            if (softmax && !score_first) {
                factor = scale * inverse_or_zero(warp_reduce<Sum>(sum));
            } else if ((modes & kRenormalize) != 0) {
                factor = scale / (warp_reduce<Sum>(sum) + eps);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int i = lane + j * kWarp;
                if (i < k) {
                    const float p = score[j] * factor;
                    probs[row * k + i] = p;
                    indices[row * k + i] = expert[j];
                    atomicAdd(&tokens[expert[j]], 1u);
                    if (dense_bytes) row_probs[expert[j]] = p, row_map[expert[j]] = 1;
                }
            }
        }
        if (dense_bytes) {
            sync();
            const i64 to = row * cols + column;
            if (cols % V == 0) {
                if (valid > 0) {
                    if (dense != nullptr) copy_out<V * 4>(dense + to, row_probs + column);
                    if (map != nullptr) copy_out<V>(map + to, row_map + column);
                }
            } else {
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (v < valid) {
                        if (dense != nullptr) dense[to + v] = row_probs[column + v];
                        if (map != nullptr) map[to + v] = row_map[column + v];
                    }
            }
            sync();
            if (!BLOCK_PER_ROW || warp == 0) {
#pragma unroll
                for (int j = 0; j < 2; ++j)
                    if (lane + j * kWarp < k) row_probs[expert[j]] = 0.0f, row_map[expert[j]] = 0;
            }
        }
        sync();  // before the next row's choices
    }

    // ---- counts
    __syncthreads();
    for (int e = threadIdx.x; e < cols; e += blockDim.x)
        if (tokens[e] != 0u) atomicAdd(&counts[e], tokens[e]);
}

}  // namespace rtk
