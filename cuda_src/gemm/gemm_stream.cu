// out[m, n] = factor act(sum over k of x[m, k] w[n, k], scaled, + bias[n]) (gated: times the other half) + residual[m, n],
// for a few rows of x and weights of 16, 8 or 4 bits that are read once, at the bandwidth of memory. With a norm, x is
// rms_norm(x) in the type of x. fp32 sums, rounded once.
//
// A block owns `octets` octets of weight rows and one of `parts` parts of k, which form a cluster. 2^row_shift of its 8
// warps are spread along octets, the others along k. Every warp streams its weights through a ring in shared memory
// (gemm_stream_lanes.cuh); all activations of the block's k stay there. Octets are finished in passes of `pass_octets`:
// sums of warps, then of blocks, which arrive through distributed shared memory, are added in the order of k, so that
// results do not depend on timing. The copies of the next pass continue meanwhile.
//
// Every block computes the norm itself, from all of x. The kernel may start before the previous one has ended; with
// kConstantWeights, rings are filled without waiting for it, so that memory is busy while the block waits.
//
// Shared memory: rings [8][4 slots], activations [m][pitch], norm weight, sums [warps along k][pass_octets][m][8], sums
// of blocks [parts][octets that the block finishes][m][8]. Two blocks must fit on an SM, or the next launch cannot load
// its weights before this one ends.
#include "gemm/gemm_decode_terms.cuh"
#include "gemm/gemm_stream_lanes.cuh"
#include "gemm/gemm_stream_rows.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// `types`: four bits each of bias, residual, out, activation (SkinnyTypes, SkinnyActivation). Scales along k: of 128
// each, `groups` of them, 0 if one serves all of k; e2m1 codes: ue4m3, of 16 each. `global_scale` multiplies sums, if not
// null and scales vary along k. `slot_steps` is even for 8-bit codes.
template <typename Codes, typename Math, int QUADS>
__global__ void __launch_bounds__(32 * kDecodeWarps, 2)
    gemm_stream(const u8* x, const u8* weight, const float* scale, const float* global_scale, const void* bias,
                const void* residual, const u8* norm_weight, void* out, i64 m_, i64 n, i64 k_, i64 x_pitch,
                i64 weight_pitch, i64 out_pitch, i64 residual_pitch, i64 scale_row, i64 scale_group, i64 scale_shift,
                i64 groups, i64 octets_, i64 row_shift_, i64 pass_octets_, i64 slot_steps_, i64 flags, i64 types, double eps,
                double offset, double factor) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ float squares[16 * 8], peaks[16 * 8], units[16];
    using Warp = StreamLanes<Codes, Math, QUADS>;
    using Rows = StreamRows<Math, Warp>;
    const int octet_sums = 8 * static_cast<int>(m_);
    const int m = static_cast<int>(m_), k = static_cast<int>(k_), row_shift = static_cast<int>(row_shift_);
    const bool gated = (flags & kDecodeGated) != 0, scaled = Warp::kParts > 1 && groups != 0;
    auto type = [&](int i) { return static_cast<int>(types >> (4 * i) & 15); };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int columns = gated ? 4 : 8;  // results of an octet
    const int parts_shift = 31 - __clz(static_cast<int>(gridDim.x));  // parts are a power of two
    const int pass_octets = static_cast<int>(pass_octets_);
    const int parts = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);
    const int all_octets = (static_cast<int>(n) + columns - 1) / columns;
    const int first_octet = static_cast<int>(blockIdx.y * octets_);
    const int octets = min(static_cast<int>(octets_), all_octets - first_octet);
    const DecodeWeights weights = {weight, scaled ? scale : nullptr, weight_pitch, static_cast<i64>(k) * Warp::Weights::kBits / 8,
                                   scale_row, scale_group, static_cast<int>(scale_shift), static_cast<int>(n),
                                   static_cast<int>(groups), gated};
    const CodeOptions options = {(flags & kSignedCodes) != 0};

    // Steps of the block, and of this warp, in granules.
    constexpr int kGranule = Warp::kGroupSteps == 2 ? 2 : 1;
    const int granules = (k + kGranule * Warp::kDepth - 1) / (kGranule * Warp::kDepth);
    const int all_steps = (k + Warp::kDepth - 1) / Warp::kDepth;
    const int block_begin = granules * rank >> parts_shift, block_end = granules * (rank + 1) >> parts_shift;
    const int along_k = kDecodeWarps >> row_shift, warp_k = warp >> row_shift, warp_row = warp & (1 << row_shift) - 1;
    const int k_shift = 3 - row_shift, block_granules = block_end - block_begin;
    const int begin = (block_begin + (block_granules * warp_k >> k_shift)) * kGranule;
    const int end = min((block_begin + (block_granules * (warp_k + 1) >> k_shift)) * kGranule, all_steps);

    const int slot_steps = static_cast<int>(slot_steps_);
    const int slot_bytes = StreamSlots<Warp>::bytes_of(slot_steps, scaled), ring_bytes = kStreamRing * slot_bytes;
    u8* const own_ring = memory + warp * ring_bytes;
    const StreamSlots<Warp> ring = {ptx::shared_address(own_ring) + lane * 16,
                                    own_ring + 512 * slot_steps, slot_steps, slot_bytes, scaled};
    u8* const x_in_shared = memory + kDecodeWarps * ring_bytes;
    const int first_step = block_begin * kGranule, steps = min(block_end * kGranule, all_steps) - first_step;
    const int row_bytes = steps * (2 * Warp::kDepth);
    // Of the block with the most steps: blocks of a cluster write to each other, so that all have the same layout.
    const int room = (granules + parts - 1 >> parts_shift) * kGranule * (2 * Warp::kDepth);
    const int pitch = (room + 127 & ~127) + 64;
    u8* const norm_in_shared = x_in_shared + m * pitch;
    const Rows rows = {x, x_pitch, m, k, first_step * (Warp::kDepth / 8), row_bytes / 16, ptx::shared_address(x_in_shared), pitch,
                       norm_weight != nullptr ? norm_in_shared : nullptr, static_cast<float>(offset), static_cast<float>(eps)};
    float* const sums = reinterpret_cast<float*>(norm_in_shared + (norm_weight != nullptr ? room : 0));
    float* const received = sums + along_k * pass_octets * octet_sums;

    int load_octet = warp_row, load_at = begin;
    auto fetch = [&](int slot) {
        if (load_octet < octets && begin < end) {
            ring.fetch(weights, slot, lane, first_octet + load_octet, load_at, min(slot_steps, end - load_at));
            load_at += slot_steps;
            if (load_at >= end) load_at = begin, load_octet += 1 << row_shift;
        }
        ptx::cp_async_commit();
    };
    const bool constant = (flags & kConstantWeights) != 0;
    if (!constant) ptx::wait_for_previous();
    ptx::launch_dependents();
#pragma unroll 1
    for (int slot = 0; slot < kStreamRing; ++slot) fetch(slot);
    if (norm_weight != nullptr) {
#pragma unroll 1
        for (int v = threadIdx.x; v < rows.vectors; v += 32 * kDecodeWarps) {
            Raw<16> raw = {};
            if (8 * (rows.first + v) < k) raw = decode_load(norm_weight + (rows.first + v) * 16);
            ptx::st_shared_16(ptx::shared_address(norm_in_shared) + v * 16, raw);
        }
    }
    const DecodeShare share(m);
    const float* const row_scale = scaled ? global_scale : scale;
    auto terms_of = [&](int token, int column, int row, const void* added) {
        const i64 scale_at = (flags & kScaleByRow) == 0 ? 0 : (row >> scale_shift) * scale_row;
        return decode_terms(row_scale, bias, added, scale_at, row, token * residual_pitch + column, static_cast<int>(types));
    };
    auto row_of = [&](int octet, int i) { return gated ? 4 * octet + (i & 3) : 8 * octet + i; };
    // Element i of a pass is row i % 8 of octet i / 8. 
    const int first_row = row_of(first_octet + share.element / 8, share.element % 8);
    const bool has_terms = row_scale != nullptr || bias != nullptr || residual != nullptr;
    if (parts > 1) {
        ptx::cluster_barrier();  // all blocks have started, so that their memory may be written
    } else if (norm_weight != nullptr) {
        __syncthreads();
    }
    if (constant) ptx::wait_for_previous();

    const SkinnyStore store = {nullptr, out, out_pitch, 0, 0, type(2), type(3), false, gated};
    rows.copy(share, squares, peaks);
    if (Rows::kMoved || norm_weight != nullptr) {
        __syncthreads();
        rows.finish(share, squares, peaks, units);
    }
    __syncthreads();

    ptx::SharedAddress own_x[QUADS];
#pragma unroll
    for (int q = 0; q < QUADS; ++q) own_x[q] = rows.to + (min(4 * q + g / 2, m - 1) * pitch + Rows::lane_place(g, t));
    int octet = warp_row, at = begin, slot = 0;  // of the next slot
    Warp own;
    own.clear();
#pragma unroll 1
    for (int first = 0; first < octets; first += pass_octets) {
        const int here = min(pass_octets, octets - first);  // octets of this pass
        if (begin >= end) {  // no k for this warp
#pragma unroll 1
            for (; octet < first + here; octet += 1 << row_shift) {
                float* to = sums + (warp_k * pass_octets + octet - first) * octet_sums + 2 * lane;
#pragma unroll 1
                for (int i = 2 * lane; i < octet_sums; i += 64, to += 64) *reinterpret_cast<float2*>(to) = make_float2(0.0f, 0.0f);
            }
        }
#pragma unroll 1
        while (octet < first + here) {
            ptx::cp_async_wait<kStreamRing - 1>();
            __syncwarp();
            ring.multiply(own, options, slot, min(slot_steps, end - at), own_x, (at - first_step) * (2 * Warp::kDepth));
            __syncwarp();
            fetch(slot);
            slot = (slot + 1) % kStreamRing;
            at += slot_steps;
            if (at < end) continue;
            own.finish();
            own.settle_flags(g);
            float* const to = sums + (warp_k * pass_octets + octet - first) * octet_sums + g;
#pragma unroll
            for (int q = 0; q < QUADS; ++q)
                if (4 * q + t < m) to[(4 * q + t) * 8] = own.total[q];
            own.clear();
            at = begin, octet += 1 << row_shift;
        }
        u32 first_residual = 0u;  // of a thread's first element: loaded before the barrier, converted behind it
        if (first == 0 && residual != nullptr && share.token < m && first_row < n) {
            const i64 at_first = share.token * residual_pitch + first_row;
            first_residual = type(1) == kTypeFp32 ? static_cast<const u32*>(residual)[at_first] : static_cast<const u16*>(residual)[at_first];
        }
        auto of_warps = [&](int octet, int place) {
            float sum = 0.0f;
#pragma unroll 4
            for (int w = 0; w < along_k; ++w) sum += sums[(w * pass_octets + octet) * octet_sums + place];
            if constexpr (Rows::kMoved) sum *= units[place / 8];
            return sum;
        };
        const int finished = pass_octets + parts - 1 >> parts_shift;  // octets that a block finishes: every `parts`th
        if (parts > 1) {
            if (first == 0) {
                __syncthreads();
            } else {
                ptx::cluster_barrier();  // also: others have read what was sent in the last pass
            }
#pragma unroll 1
            for (int token = share.token; token < m; token += share.tokens())
#pragma unroll 1
                for (int i = share.element; i < 8 * here; i += share.elements()) {
                    const int octet = i / 8, place = token * 8 + i % 8;
                    float* to = received + (rank * finished + (octet >> parts_shift)) * octet_sums + place;
                    ptx::st_cluster(ptx::shared_address(to), octet & parts - 1, of_warps(octet, place));
                }
            ptx::cluster_barrier();
        } else {
            __syncthreads();
        }
        // The whole warp calls this: lanes of a gate get the other factor from lanes of its counterpart.
#pragma unroll 1
        for (int token = share.token; token < m; token += share.tokens())
#pragma unroll 1
            for (int from = share.element - lane; from < 8 * here; from += share.elements()) {
                const int i = from + lane, octet = min(i / 8, here - 1), place = token * 8 + i % 8;
                const int row = row_of(first_octet + first + octet, i % 8);
                const bool exists = i < 8 * here && row < n && (octet & parts - 1) == rank;
                float sum = 0.0f;
                if (exists && parts == 1) sum = of_warps(octet, place);
                if (exists && parts > 1) {
#pragma unroll 1
                    for (int p = 0; p < parts; ++p) sum += received[(p * finished + (octet >> parts_shift)) * octet_sums + place];
                }
                DecodeTerms terms = {1.0f, 0.0f, 0.0f};
                const bool is_first = first == 0 && i == share.element && token == share.token;
                if (has_terms && exists)
                    terms = terms_of(token, row, row + (gated && (i & 4) != 0 ? static_cast<int>(n) : 0), is_first ? nullptr : residual);
                if (residual != nullptr && is_first) terms.residual = decode_number(first_residual, type(1));
                float value = fmaf(sum * Warp::Weights::kFactor, terms.scale, terms.bias);
                if (gated) {
                    const float up = __shfl_down_sync(0xffffffffu, value, 4);
                    value = decode_activation(value, store.act) * up;
                } else if (store.act != kActNone) {
                    value = decode_activation(value, store.act);
                }
                if (exists && !(gated && (i & 4) != 0)) store.write(token * out_pitch + row, fmaf(value, static_cast<float>(factor), terms.residual));
            }
        if (parts == 1 && first + pass_octets < octets) __syncthreads();
    }
}

}  // namespace rtk
