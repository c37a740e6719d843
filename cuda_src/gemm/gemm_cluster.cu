// out[m, n] = act(sum over k of a[m, k] b[n, k], scaled, + bias[n] + add[m, n]) for up to 64 rows of a, where the time until
// the first result counts more than bandwidth: all of b is asked for in the first instructions of one wave of blocks.
//
// A cluster of `parts` blocks owns a tile of 32 rows of b (gated: 16 and their counterparts) and all rows of a. k is cut into
// stages of 512 bytes, whose ranges belong to the blocks of the cluster in order. The copy engine brings a stage's rows of both
// operands to shared memory, `ring` stages at a time; of each stage, warp w of 8 has the 64 bytes w of all rows. Lane 4g + t reads
// the 16 bytes t of them of row g, of both operands, which is another order of k than that of mma.sync, but the same for both.
// Sums are fp32; those of 8-bit operands leave the tensor cores after every stage. The sums of a block's warps are added in
// shared memory in order, then sent to the block of the cluster that finishes the token, which adds those of the blocks in
// order: results do not depend on timing.
//
// The launch may start before the previous kernel has ended: it asks L2 for its rows of b meanwhile, which needs no order, or
// (`kConstantB`: nobody writes b) copies them, and waits before it reads anything else.
//
// Shared memory: barriers, then stages of [32 rows of b, m rows of a][kStagePitch]; after the last stage in their place the sums of
// warps [8][16 TOKENS][kPitch] and those of blocks [parts][tokens of a block][32].
#include "common/convert.cuh"
#include "gemm/gemm_skinny_finish.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/pdl.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

inline constexpr int kClusterWarps = 8, kClusterRows = 32, kClusterPitch = 36, kClusterRing = 4;
inline constexpr int kStageBytes = 512, kStagePitch = kStageBytes + 64;  // two rows at a time read other banks
inline constexpr i64 kGatedProduct = 1, kAccumulate = 2, kConstantB = 4;  // flags

template <typename T>
RTK_DEVICE void cluster_mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    if constexpr (is_same<T, bf16>::value) {
        ptx::mma_m16n8k16_bf16(d, a, b);
    } else if constexpr (is_same<T, fp16>::value) {
        ptx::mma_m16n8k16_f16(d, a, b);
    } else {
        ptx::mma_m16n8k32_e4m3(d, a, b);
    }
}

// d += the 64 bytes of a step: both halves of what lanes have of rows g (`low`) and g + 8 (`high`) of a, and of row g of b.
template <typename T>
RTK_DEVICE void cluster_step(float (&d)[4], const Raw<16>& low, const Raw<16>& high, const Raw<16>& b) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 left[4] = {low.w[2 * half], high.w[2 * half], low.w[2 * half + 1], high.w[2 * half + 1]};
        const u32 right[2] = {b.w[2 * half], b.w[2 * half + 1]};
        cluster_mma<T>(d, left, right);
    }
}

// `types`: four bits each of bias, add, out, activation (SkinnyTypes, SkinnyActivation).
template <typename T, int TOKENS>
__global__ void __launch_bounds__(kClusterWarps * 32, TOKENS == 1 ? 2 : 1)
    gemm_cluster(const u8* a, const u8* b, const float* scale_a, const float* scale_b, const float* global_scale,
                 const void* bias, const void* add, void* out, i64 m, i64 n, i64 k_bytes, i64 a_pitch, i64 b_pitch,
                 i64 out_pitch, i64 add_pitch, i64 scale_a_step, i64 scale_b_step, i64 global_step, i64 parts_, i64 flags,
                 i64 types, i64 ring_) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int kTiles = kClusterRows / 8;
    constexpr bool kPromoted = sizeof(T) == 1;
    u8* const stages = memory + 128;
    float* const warp_sums = reinterpret_cast<float*>(stages);
    float* const block_sums = warp_sums + kClusterWarps * 16 * TOKENS * kClusterPitch;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int parts = static_cast<int>(parts_), rank = parts == 1 ? 0 : ptx::cluster_rank();
    const int tile = static_cast<int>(blockIdx.x) / parts, tokens = static_cast<int>(m), ring = static_cast<int>(ring_);
    const bool gated = flags & kGatedProduct, constant = flags & kConstantB;
    const int columns = gated ? kClusterRows / 2 : kClusterRows;
    const i64 first_column = static_cast<i64>(tile) * columns;
    const int total_stages = static_cast<int>((k_bytes + kStageBytes - 1) / kStageBytes);
    const int begin = total_stages * rank / parts, end = total_stages * (rank + 1) / parts;
    const int stage_size = (kClusterRows + tokens) * kStagePitch;
    auto barrier = [&](int slot) { return ptx::shared_address(memory + 8 * slot); };

    // By warp 0. Rows of b behind the last column are read once more, for nothing.
    const i64 own_column = min(first_column + (gated ? lane % 16 : lane), n - 1);
    const u8* const own_row = b + (own_column + (gated && lane >= 16 ? n : 0)) * b_pitch;
    auto bytes_of = [&](int stage) { return static_cast<u32>(min(k_bytes - static_cast<i64>(stage) * kStageBytes, static_cast<i64>(kStageBytes))); };
    auto fetch_b = [&](int stage, int slot) {
        const u32 bytes = bytes_of(stage);
        if (lane == 0) ptx::mbarrier_arrive_expect(barrier(slot), (kClusterRows + tokens) * bytes);
        __syncwarp();
        ptx::bulk_load(ptx::shared_address(stages + slot * stage_size + lane * kStagePitch),
                       own_row + static_cast<i64>(stage) * kStageBytes, bytes, barrier(slot));
    };
    auto fetch_a = [&](int stage, int slot) {
        const u32 bytes = bytes_of(stage);
        for (int row = lane; row < tokens; row += 32)
            ptx::bulk_load(ptx::shared_address(stages + slot * stage_size + (kClusterRows + row) * kStagePitch),
                           a + row * a_pitch + static_cast<i64>(stage) * kStageBytes, bytes, barrier(slot));
    };
    if (threadIdx.x < kClusterRing) {
        ptx::mbarrier_init(barrier(threadIdx.x), 1);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();
    const int ready = min(end - begin, ring);  // stages that are asked for at the start
    if (warp == 0) {
        if (constant) {
            for (int i = 0; i < ready; ++i) fetch_b(begin + i, i);
        } else if (end > begin) {
            const i64 from = static_cast<i64>(begin) * kStageBytes, to = min(static_cast<i64>(end) * kStageBytes, k_bytes);
            ptx::prefetch_l2_bulk(own_row + from, static_cast<u32>(to - from));
        }
    }
    ptx::wait_for_previous();
    ptx::launch_dependents();
    if (warp == 0) {
        for (int i = 0; i < ready; ++i) {
            if (!constant) fetch_b(begin + i, i);
            fetch_a(begin + i, i);
        }
    }

    float total[TOKENS][kTiles][4] = {};
    int slot = 0;
    u32 phase = 0;
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
        ptx::mbarrier_wait(barrier(slot), phase);
        const u8* const rows = stages + slot * stage_size + 64 * warp + 16 * t;
        const bool exists = static_cast<i64>(stage) * kStageBytes + 64 * warp + 16 * t < k_bytes;
        auto read = [&](int row) {
            Raw<16> raw;
            clear(raw);
            if (exists) raw = ptx::ld_shared_16(ptx::shared_address(rows + row * kStagePitch));
            return raw;
        };
        Raw<16> of_b[kTiles];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) of_b[j] = read(8 * j + g);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const Raw<16> low = read(kClusterRows + min(16 * i + g, tokens - 1));
            const Raw<16> high = read(kClusterRows + min(16 * i + 8 + g, tokens - 1));
            float part[kTiles][4] = {};
#pragma unroll
            for (int j = 0; j < kTiles; ++j) cluster_step<T>(kPromoted ? part[j] : total[i][j], low, high, of_b[j]);
            if (kPromoted) {
#pragma unroll
                for (int j = 0; j < kTiles; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) total[i][j][e] += part[j][e];
            }
        }
        if (stage + ring < end) {
            __syncthreads();
            if (warp == 0) fetch_b(stage + ring, slot), fetch_a(stage + ring, slot);
        }
        if (++slot == ring) slot = 0, phase ^= 1;
    }
    __syncthreads();  // sums take the place of stages

    float* const own_sums = warp_sums + warp * (16 * TOKENS * kClusterPitch);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2*>(own_sums + (16 * i + g + 8 * r) * kClusterPitch + 8 * j + 2 * t) =
                    make_float2(total[i][j][2 * r], total[i][j][2 * r + 1]);
    if (parts > 1) {
        ptx::cluster_barrier();  // also: every block of the cluster has its last stage behind it, and may be written to
    } else {
        __syncthreads();
    }

    // A warp has one token at a time, a lane one of its columns.
    auto of_warps = [&](int token) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kClusterWarps; ++w) sum += warp_sums[(w * 16 * TOKENS + token) * kClusterPitch + lane];
        return sum;
    };
    const int own_tokens = (tokens + parts - 1) / parts;  // those of block r are r, r + parts, ...
    if (parts > 1) {
        for (int token = warp; token < tokens; token += kClusterWarps) {
            const int at = (rank * own_tokens + token / parts) * kClusterRows + lane;
            ptx::st_cluster(ptx::shared_address(block_sums + at), token % parts, of_warps(token));
        }
        ptx::cluster_barrier();
    }

    const i64 column = first_column + lane % columns, row = column + (lane >= columns ? n : 0);
    const bool exists = column < n;
    const int out_type = static_cast<int>(types >> 8 & 15), act = static_cast<int>(types >> 12 & 15);
    float times = 1.0f, plus = 0.0f;
    if (exists) {
        if (scale_b != nullptr) times *= scale_b[row * scale_b_step];
        if (global_scale != nullptr) times *= global_scale[lane >= columns ? global_step : 0];
        if (bias != nullptr) plus = skinny_load(bias, row, static_cast<int>(types & 15));
    }
    for (int own = warp; rank + own * parts < tokens; own += kClusterWarps) {
        const int token = rank + own * parts;
        float sum = 0.0f;
        if (parts == 1) {
            sum = of_warps(token);
        } else {
            for (int p = 0; p < parts; ++p) sum += block_sums[(p * own_tokens + own) * kClusterRows + lane];
        }
        float v = sum * times * (scale_a == nullptr ? 1.0f : scale_a[token * scale_a_step]) + plus;
        const float up = __shfl_down_sync(0xffffffffu, v, 16);
        if (!exists || lane >= columns) continue;
        if (add != nullptr) v += skinny_load(add, token * add_pitch + column, static_cast<int>(types >> 4 & 15));
        v = skinny_activation(v, act);
        if (gated) v *= up;
        const i64 at = token * out_pitch + column;
        if (flags & kAccumulate) v += skinny_load(out, at, out_type);
        const float one[1] = {v};
        if (out_type == kTypeFp32) {
            static_cast<float*>(out)[at] = v;
        } else if (out_type == kTypeBf16) {
            store<bf16, 1>(static_cast<bf16*>(out) + at, one);
        } else {
            store<fp16, 1>(static_cast<fp16*>(out) + at, one);
        }
    }
}

}  // namespace rtk
