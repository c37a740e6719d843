// Experts of a decoding step, up to 8 tokens: two launches that read the weights of every chosen expert once.
//
// The first one computes inner[p] = act(g) u, (g, u) = w[expert of p] norm(x[token of p]), for the pairs p = token top_k + j
// of tokens and experts; the second one (DOWN) out[t] = residual[t] + sum over j of probs[t, j] w[expert] inner[p]. fp32
// sums, rounded once each. Numbers of experts outside of [0, experts) choose none. Expects at most 64 pairs.
//
// Every block lists the distinct experts in the order of their first pair. The items of a launch are octets (see
// gemm_decode_stage.cuh) of each expert's weights, DOWN: of the results, over all experts; blocks share them evenly. A
// unit is up to `chunk` steps of one expert's k; the units of an item are dealt to the 8 warps, each of which streams them
// through its own ring. All tokens multiply the weights of an expert, and those that did not choose it are dropped.
// Sums of warps are added in their order.
//
// Shared memory: rings [8][ring slots], activations [m][pitch] (DOWN: [pairs and zeros][pitch]), norm weight, sums
// [8][pass_items][m][8].
#include "gemm/gemm_decode_ring.cuh"
#include "gemm/gemm_decode_rows.cuh"
#include "gemm/gemm_decode_stage.cuh"
#include "gemm/gemm_skinny_finish.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kStepPairs = 64, kStepTokens = 8;

// The experts of a step, in shared memory.
struct StepExperts {
    i32 chosen[kStepPairs];                    // of a pair, -1 for none
    i32 expert[kStepPairs];                    // distinct ones
    signed char pair[kStepPairs][kStepTokens];  // of an expert and a token, -1 for none
    float prob[kStepPairs][kStepTokens];
    int count;

    // Called by the whole block.
    RTK_DEVICE void list(const i32* given, const float* probs, int m, int top_k, int experts, bool rounded, bool as_bf16) {
        const int pairs = m * top_k, thread = threadIdx.x;
        if (thread < kStepPairs) {
            const i32 e = thread < pairs ? given[thread] : -1;
            chosen[thread] = e >= 0 && e < experts ? e : -1;
#pragma unroll
            for (int t = 0; t < kStepTokens; ++t) pair[thread][t] = -1, prob[thread][t] = 0.0f;
        }
        __syncthreads();
        auto first_of = [&](int p) {
            int q = 0;
            while (chosen[q] != chosen[p]) ++q;
            return q;
        };
        u32 low = 0, high = 0;  // pairs that are the first of their expert
        if (thread < 32) {
            low = __ballot_sync(0xffffffffu, chosen[thread] >= 0 && first_of(thread) == thread);
            high = __ballot_sync(0xffffffffu, chosen[thread + 32] >= 0 && first_of(thread + 32) == thread + 32);
            if ((low >> thread & 1u) != 0u) expert[__popc(low & (1u << thread) - 1u)] = chosen[thread];
            if ((high >> thread & 1u) != 0u) expert[__popc(low) + __popc(high & (1u << thread) - 1u)] = chosen[thread + 32];
            if (thread == 0) count = __popc(low) + __popc(high);
        }
        __syncthreads();
        if (thread < pairs && chosen[thread] >= 0) {
            const int token = thread / top_k;
            int e = 0;
            while (expert[e] != chosen[thread]) ++e;
            float sum = 0.0f;
            bool first = true;  // of this token's pairs with the expert
            for (int q = token * top_k; q < (token + 1) * top_k; ++q) {
                if (chosen[q] != chosen[thread]) continue;
                first = first && q >= thread;
                float p = probs != nullptr ? probs[q] : 0.0f;
                if (rounded) p = as_bf16 ? round_trip<bf16>(p) : round_trip<fp16>(p);
                sum += p;
            }
            if (first) pair[e][token] = static_cast<signed char>(thread), prob[e][token] = sum;
        }
        __syncthreads();
    }

    template <typename T>
    RTK_DEVICE static float round_trip(float x) {
        float one[1] = {x};
        const Raw<2> raw = pack<T, 1>(one);
        unpack<T, 1>(raw, one);
        return one[0];
    }
};

inline constexpr i64 kStepByTma = 1, kStepRounded = 2;  // flags: loads by TMA; probabilities are rounded to the type of x

template <typename Math, bool DOWN>
__global__ void __launch_bounds__(32 * kDecodeWarps, 1)
    gemm_step_experts(const u8* x, const u8* weight, const i32* given, const float* probs, const void* residual,
                      const u8* norm_weight, void* out, i64 m_, i64 n, i64 k_, i64 top_k_, i64 experts_, i64 x_pitch,
                      i64 expert_stride, i64 weight_pitch, i64 residual_pitch, i64 chunk_, i64 ring_, i64 pass_items_, i64 flags,
                      i64 act, double eps, double offset) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float squares[16 * 8];
    __shared__ u64 barriers[kDecodeWarps * kDecodeMaxRing];
    __shared__ StepExperts step;
    using Warp = DecodeWarp<Math, Math, 1>;
    using Rows = DecodeRows<Math, 1>;
    constexpr int kType = is_same<Math, bf16>::value ? kTypeBf16 : kTypeFp16;
    const int m = static_cast<int>(m_), k = static_cast<int>(k_), top_k = static_cast<int>(top_k_), pairs = m * top_k;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int chunk = static_cast<int>(chunk_), all_steps = (k + Warp::kDepth - 1) / Warp::kDepth;
    const int chunks = (all_steps + chunk - 1) / chunk, octet_sums = 8 * m, pass_items = static_cast<int>(pass_items_);
    const int columns = DOWN ? 8 : 4, octets = (static_cast<int>(n) + columns - 1) / columns;
    const int slot_bytes = DecodeRing::slot_bytes(chunk, 0), own_ring = static_cast<int>(ring_) * slot_bytes;
    const ptx::SharedAddress base = ptx::shared_address(memory);
    DecodeRing ring = {base + warp * own_ring, ptx::shared_address(barriers + warp * kDecodeMaxRing), chunk,
                       static_cast<int>(ring_), (flags & kStepByTma) != 0, false};
    const int rings = kDecodeWarps * own_ring, row_bytes = all_steps * (2 * Warp::kDepth), pitch = (row_bytes + 127 & ~127) + 64;
    const int kept = DOWN ? pairs : m;
    const Rows rows = {x, x_pitch, kept, k, 0, row_bytes / 16, base + rings, pitch};
    u8* const norm_in_shared = memory + rings + (DOWN ? pairs + 1 : m) * pitch;
    float* const sums = reinterpret_cast<float*>(norm_in_shared + (norm_weight != nullptr ? row_bytes : 0));

    ring.open(lane);
    ptx::launch_dependents();
    if (norm_weight != nullptr) {
#pragma unroll 1
        for (int v = threadIdx.x; v < rows.vectors; v += 32 * kDecodeWarps) {
            Raw<16> raw = {};
            if (8 * v < k) raw = decode_load(norm_weight + v * 16);
            ptx::st_shared_16(ptx::shared_address(norm_in_shared) + v * 16, raw);
        }
    }
    if constexpr (DOWN) {
#pragma unroll 1
        for (int at = threadIdx.x * 16; at < pitch; at += 32 * kDecodeWarps * 16)
            ptx::st_shared_16(base + (rings + pairs * pitch + at), Raw<16>{});
    }
    ptx::wait_for_previous();
    step.list(given, DOWN ? probs : nullptr, m, top_k, static_cast<int>(experts_), (flags & kStepRounded) != 0, kType == kTypeBf16);

    // This block's items, and the units of an item.
    const int all_items = DOWN ? octets : step.count * octets, units = DOWN ? step.count * chunks : chunks;
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int begin = static_cast<int>(static_cast<i64>(all_items) * block / blocks);
    const int end = static_cast<int>(static_cast<i64>(all_items) * (block + 1) / blocks);
    DecodeWeights weights = {weight, nullptr, weight_pitch, static_cast<i64>(k) * 2, 0, 0, 0, static_cast<int>(n), 0, !DOWN};
    int fetch_item = begin, fetch_unit = warp;
    auto fetch = [&](int slot) {
        if (fetch_item < end && fetch_unit < units) {
            const int e = DOWN ? fetch_unit / chunks : fetch_item / octets, c = DOWN ? fetch_unit % chunks : fetch_unit;
            weights.data = weight + step.expert[e] * expert_stride;
            ring.fetch(weights, slot, slot_bytes, lane, DOWN ? fetch_item : fetch_item % octets, c * chunk, min(chunk, all_steps - c * chunk), 0, 0);
            fetch_unit += kDecodeWarps;
            if (fetch_unit >= units) fetch_unit = warp, ++fetch_item;
        } else if (!ring.bulk) {
            ptx::cp_async_commit();
        }
    };
#pragma unroll 1
    for (int i = 0; i < ring.count; ++i) fetch(i);

    if constexpr (DOWN) {
        // Rows of pairs that do not exist stay uninitialised; nothing reads them.
#pragma unroll 1
        for (int p = warp; p < pairs; p += kDecodeWarps) {
            if (step.chosen[p] < 0) continue;
#pragma unroll 1
            for (int v = lane; v < rows.vectors; v += 32) {
                Raw<16> raw = {};
                if (8 * v < k) raw = decode_load(x + p * x_pitch + v * 16);
                ptx::st_shared_16(rows.to + (p * pitch + v * 16), raw);
            }
        }
    } else {
        const DecodeShare share(m);
        rows.copy(share, norm_weight != nullptr ? squares : nullptr);
        if (norm_weight != nullptr) {
            __syncthreads();
            rows.normalize(share, squares, ptx::shared_address(norm_in_shared), static_cast<float>(offset), static_cast<float>(eps));
        }
    }
    __syncthreads();

    const CodeOptions options = {false};
    const u32 own_row = ring.row(g) + t * 16;
    const SkinnyStore store = {nullptr, out, n, 0, 0, kType, static_cast<int>(act), false, !DOWN};
#pragma unroll 1
    for (int first = begin; first < end; first += pass_items) {
        const int here = min(pass_items, end - first);
#pragma unroll 1
        for (int i = 0; i < here; ++i) {
            Warp own;
            own.clear();
#pragma unroll 1
            for (int u = warp; u < units; u += kDecodeWarps) {
                const int e = DOWN ? u / chunks : 0, c = DOWN ? u % chunks : u;
                int row = min(g, m - 1);
                bool exists = true;
                float factor = 1.0f;
                if constexpr (DOWN) {
                    row = g < m ? step.pair[e][g] : -1;
                    exists = row >= 0;
                    factor = exists ? step.prob[e][g] : 0.0f;
                    if (!exists) row = pairs;
                }
                const ptx::SharedAddress own_x = base + (rings + row * pitch + t * 16 + c * chunk * (2 * Warp::kDepth));
                ring.wait();
                const ptx::SharedAddress now = ring.slots + ring.slot * slot_bytes;
                const int count = min(chunk, all_steps - c * chunk);
#pragma unroll 2
                for (int s = 0; s < count; ++s)
                    own.step(options, ptx::ld_shared_16(now + (own_row + 64 * s)), own_x + s * (2 * Warp::kDepth), own_x);
                if (exists) own.promote(make_float2(factor, factor));
                if (DOWN) own.drop();  // zeros times weights that are not finite
                __syncwarp();
                fetch(ring.slot);
                ring.next();
            }
            float* to = sums + (warp * pass_items + i) * octet_sums + g * 8 + 2 * t;
            if (g < m) *reinterpret_cast<float2*>(to) = make_float2(own.total[0], own.total[1]);
        }
        __syncthreads();
        // The whole warp calls this: lanes of a gate get the other factor from lanes of its counterpart.
#pragma unroll 1
        for (int from = warp * 32; from < 8 * m * here; from += 32 * kDecodeWarps) {
            const int i = from + lane, item = min(i / octet_sums, here - 1), place = i % octet_sums, token = place / 8;
            float value = 0.0f;
            if (i < 8 * m * here) {
#pragma unroll
                for (int w = 0; w < kDecodeWarps; ++w) value += sums[(w * pass_items + item) * octet_sums + place];
            }
            const int octet = DOWN ? first + item : (first + item) % octets;
            const int column = DOWN ? 8 * octet + place % 8 : 4 * octet + place % 4;
            bool exists = i < 8 * m * here && column < n;
            i64 row = token;
            if constexpr (DOWN) {
                if (exists && residual != nullptr) value += skinny_load(residual, token * residual_pitch + column, kType);
            } else {
                const float up = __shfl_down_sync(0xffffffffu, value, 4);
                value = skinny_activation(value, store.act) * up;
                row = exists ? step.pair[(first + item) / octets][token] : -1;
                exists = exists && (place & 4) == 0 && row >= 0;
            }
            if (exists) store.write(row * n + column, value);
        }
        if (first + pass_items < end) __syncthreads();
    }
}

}  // namespace rtk
