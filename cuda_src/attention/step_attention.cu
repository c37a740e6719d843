// Attention of a decoding step in one launch, from a merged projection [batch, q heads + 2 kv heads, D] of one new token
// per sequence: RMS norm of q and k heads (optional), rotation, the new key and value into row slots[b] of sequence b of
// the cache, then attention over its first lengths[b] rows.
//     n = x * rstd * (offset + weight),  rstd = 1/sqrt(mean(x^2) + eps)
// q, k and v are rounded to T, as a kernel that writes them to memory would do; scores and sums are fp32, probabilities
// are rounded to T for the second product.
//
// A cluster of up to 8 blocks, a power of two, owns the up to 16 query heads that share a key head. Keys are dealt in
// sixteens: to the first warps of all blocks, then to the second ones, so that few keys are spread over all blocks. A warp
// loads its keys and values into its own stages, with an online softmax over them. Every block computes the heads of the
// new token; the block whose warp has row slots[b] writes it to the cache, and that warp takes it from shared memory.
// Accumulators of warps, then of blocks through distributed shared memory, are merged in a fixed order: results do not
// depend on timing.
//
// The kernel may start before the previous one has ended. With kConstantCache, lengths, slots, norm weights, angles and older
// rows of the cache are read before it waits.
//
// Shared memory: stages [8][stages][16 keys, 16 values], later the accumulators of warps; q [16][kKeyPitch]; the new key
// and value; what blocks send, [blocks][16 / blocks][D] and as many pairs; maxima and softmax sums of warps [8][16] each.
#include "attention/softmax_state.cuh"
#include "common/any_type.cuh"
#include "common/reduce.cuh"
#include "gemm/rows_mma.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kStepWarps = 8, kStepRows = 16, kStepKeys = 16;
inline constexpr i64 kWholeTables = 1, kInterleavedPairs = 2, kConstantCache = 4;

// One head of the new token: norm and rotation by a warp, `pairs` of elements in each lane.
template <typename T, int D>
struct StepHead {
    static constexpr int kPairs = D / 64;
    const void* cosines;
    const void* sines;
    i64 angles;  // index of the token's first angle
    int half, angle_type, weight_type;
    bool whole, interleaved;
    float eps, offset;

    RTK_DEVICE int first_of(int p) const { return p < half ? (interleaved ? 2 * p : p) : 2 * p; }
    RTK_DEVICE int second_of(int p) const { return p < half ? (interleaved ? 2 * p + 1 : p + half) : 2 * p + 1; }

    // Factors of a lane's pairs, which no kernel of a step writes.
    struct Factors {
        float gain[kPairs][2], cosine[kPairs][2], sine[kPairs][2];
    };
    RTK_DEVICE void load(const void* weight, bool rotates, Factors& f) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int p = lane + kWarp * j;
            const int at[2] = {first_of(p), second_of(p)};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                f.gain[j][i] = weight != nullptr ? offset + load_any(weight, weight_type, at[i]) : 1.0f;
                f.cosine[j][i] = 1.0f, f.sine[j][i] = 0.0f;
                if (rotates && p < half) {
                    f.cosine[j][i] = load_any(cosines, angle_type, angles + (whole ? at[i] : p));
                    f.sine[j][i] = load_any(sines, angle_type, angles + (whole ? at[i] : p));
                }
            }
        }
    }

    // `x` was written by the previous kernel, which may still have run when this one started: no read-only loads.
    RTK_DEVICE void write(const T* x, bool normed, bool rotates, const Factors& f, ptx::SharedAddress to) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        auto value = [&](int i) {
            float v[1];
            unpack<T, 1>(Raw<2>{{*reinterpret_cast<const u16*>(x + i)}}, v);
            return v[0];
        };
        float a[kPairs], b[kPairs], square = 0.0f;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int p = lane + kWarp * j;
            a[j] = value(first_of(p)), b[j] = value(second_of(p));
            square += a[j] * a[j] + b[j] * b[j];
        }
        float rstd = 1.0f;
        if (normed) rstd = rsqrtf(warp_reduce<Sum>(square) / static_cast<float>(D) + eps);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int p = lane + kWarp * j, first = first_of(p), second = second_of(p);
            a[j] *= rstd * f.gain[j][0];
            b[j] *= rstd * f.gain[j][1];
            float one[1] = {a[j]}, other[1] = {b[j]};
            if (rotates && p < half) {
                one[0] = a[j] * f.cosine[j][0] - b[j] * f.sine[j][0];
                other[0] = b[j] * f.cosine[j][1] + a[j] * f.sine[j][1];
            }
            ptx::st_shared_2(to + 2 * first, pack<T, 1>(one).w[0]);
            ptx::st_shared_2(to + 2 * second, pack<T, 1>(other).w[0]);
        }
    }
};

RTK_DEVICE float step_larger(float a, float b) { return a > b || a != a ? a : b; }  // NaN if one is

// `flags`: also four bits each of the types of angles, norm weights and sinks (common/any_type.cuh).
template <typename T, int D>
__global__ void __launch_bounds__(32 * kStepWarps)
    step_attention(const T* qkv, const void* q_weight, const void* k_weight, const void* cosines, const void* sines,
                   const i64* positions, const i32* slots, const i32* lengths, const void* sinks, T* k_cache, T* v_cache,
                   T* out, i64 group_, i64 kv_heads, i64 rotary, i64 qkv_row, i64 angle_row, i64 angle_rows, i64 k_batch,
                   i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 capacity, i64 stages_, i64 flags,
                   double eps, double offset, double scale, double softcap) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int kKeyPitch = 2 * D + 64, kValuePitch = 2 * D + 16, kStage = kStepKeys * (kKeyPitch + kValuePitch);
    constexpr int kSumPitch = D + 8, kQuads = D / 4;
    const float minus_infinity = __uint_as_float(0xff800000u);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rank = ptx::cluster_rank(), group = static_cast<int>(group_), stages = static_cast<int>(stages_);
    const int blocks = static_cast<int>(gridDim.x), shift = 31 - __clz(blocks), keys_of_round = blocks * (kStepWarps * kStepKeys);
    const int rows_sent = kStepRows >> shift;  // to a block
    const i64 head_kv = blockIdx.y, batch = blockIdx.z;
    u8* const own = memory + warp * stages * kStage;
    u8* const queries = memory + kStepWarps * stages * kStage;
    u8* const fresh = queries + kStepRows * kKeyPitch;  // key, value
    float* const arrived = reinterpret_cast<float*>(fresh + 4 * D);
    float* const arrived_state = arrived + kStepRows * D;
    float* const tops = arrived_state + kStepRows * 2;
    float* const totals = tops + kStepWarps * kStepRows;

    const bool constant = (flags & kConstantCache) != 0;
    if (!constant) ptx::wait_for_previous();
    ptx::launch_dependents();
    const int length = min(max(static_cast<const volatile i32*>(lengths)[batch], 0), static_cast<int>(capacity));
    const int slot = static_cast<const volatile i32*>(slots)[batch];
    T* const k_rows = k_cache + batch * k_batch + head_kv * k_head;
    T* const v_rows = v_cache + batch * v_batch + head_kv * v_head;
    const int first_key = (warp * blocks + rank) * kStepKeys, rounds = (length + keys_of_round - 1) / keys_of_round;
    auto fetch = [&](int round) {
        const int first = round * keys_of_round + first_key, usable = length - first;
        if (round < rounds && usable > 0) {
            const ptx::SharedAddress keys = ptx::shared_address(own + round % stages * kStage);
            const ptx::SharedAddress values = keys + kStepKeys * kKeyPitch;
#pragma unroll 4
            for (int i = lane; i < kStepKeys * (D / 8); i += 32) {
                const int key = i / (D / 8), column = i % (D / 8) * 8;
                const bool read = key < usable && first + key != slot;  // that one is new
                const i64 row = first + min(key, usable - 1);
                ptx::cp_async_16_or_zero(keys + (key * kKeyPitch + 2 * column), k_rows + row * k_row + column, read);
                ptx::cp_async_16_or_zero(values + (key * kValuePitch + 2 * column), v_rows + row * v_row + column, read);
            }
        }
        ptx::cp_async_commit();
    };
    fetch(0);
    if (stages > 1) fetch(1);
    for (int i = threadIdx.x; i < (kStepRows - group) * (D / 8); i += 32 * kStepWarps) {
        Raw<16> zero = {};
        ptx::st_shared_16(ptx::shared_address(queries + (group + i / (D / 8)) * kKeyPitch + i % (D / 8) * 16), zero);
    }
    i64 angles = batch;
    if (positions != nullptr) angles = min(max(static_cast<const volatile i64*>(positions)[batch], i64{0}), angle_rows - 1);
    const StepHead<T, D> head = {cosines, sines, angles * angle_row, static_cast<int>(rotary) / 2,
                                 static_cast<int>(flags >> 4 & 15), static_cast<int>(flags >> 8 & 15), (flags & kWholeTables) != 0,
                                 (flags & kInterleavedPairs) != 0, static_cast<float>(eps), static_cast<float>(offset)};
    const T* const x = qkv + batch * qkv_row;
    const i64 q_heads = kv_heads * group_;
    typename StepHead<T, D>::Factors factors;
    auto weight_at = [&](int h) { return h == group + 1 ? nullptr : h < group ? q_weight : k_weight; };
    if (warp < group + 2) head.load(weight_at(warp), warp != group + 1, factors);
    ptx::cluster_barrier();  // all blocks have started, so that their memory may be written
    if (constant) ptx::wait_for_previous();
#pragma unroll 1
    for (int h = warp; h < group + 2; h += kStepWarps) {
        const bool is_q = h < group, is_v = h == group + 1;
        if (h != warp) head.load(weight_at(h), !is_v, factors);
        const i64 from = is_q ? head_kv * group_ + h : q_heads + (is_v ? kv_heads : 0) + head_kv;
        u8* const to = is_q ? queries + h * kKeyPitch : fresh + (is_v ? 2 * D : 0);
        head.write(x + from * D, weight_at(h) != nullptr, !is_v, factors, ptx::shared_address(to));
    }
    __syncthreads();
    if (slot >= 0 && slot < capacity && (slot / kStepKeys & blocks - 1) == rank && threadIdx.x < 2 * (D / 8)) {
        const bool is_v = threadIdx.x >= D / 8;
        const int column = static_cast<int>(threadIdx.x) % (D / 8) * 8;
        const Raw<16> raw = ptx::ld_shared_16(ptx::shared_address(fresh + (is_v ? 2 * D : 0) + 2 * column));
        T* const to = is_v ? v_rows + slot * v_row + column : k_rows + slot * k_row + column;
        *reinterpret_cast<uint4*>(to) = make_uint4(raw.w[0], raw.w[1], raw.w[2], raw.w[3]);
    }

    // Rows g and g + 8: scores with keys 8n + 2t and 8n + 2t + 1, results at columns 8i + 2t and 8i + 2t + 1.
    float sum[D / 8][4] = {}, top[2] = {minus_infinity, minus_infinity}, total[2] = {0.0f, 0.0f};
    const float factor = static_cast<float>(scale) * (softcap > 0.0 ? 1.0f : 1.4426950408889634f);
    const float cap = static_cast<float>(softcap), inverse_cap = cap > 0.0f ? 1.0f / cap : 0.0f;
    const ptx::SharedAddress q_low = ptx::shared_address(queries + g * kKeyPitch + t * 16);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
        if (stages > 1) {
            ptx::cp_async_wait<1>();
        } else {
            ptx::cp_async_wait<0>();
        }
        __syncwarp();
        u8* const keys = own + round % stages * kStage;
        u8* const values = keys + kStepKeys * kKeyPitch;
        const int first = round * keys_of_round + first_key, usable = length - first;
        if (usable > 0) {
            if (slot >= first && slot < first + kStepKeys && slot < capacity) {
                for (int i = lane; i < 2 * (D / 8); i += 32) {
                    const bool is_v = i >= D / 8;
                    const int column = i % (D / 8) * 16;
                    u8* const to = is_v ? values + (slot - first) * kValuePitch : keys + (slot - first) * kKeyPitch;
                    ptx::st_shared_16(ptx::shared_address(to + column),
                                      ptx::ld_shared_16(ptx::shared_address(fresh + (is_v ? 2 * D : 0) + column)));
                }
                __syncwarp();
            }
            float s[2][4] = {};
            const ptx::SharedAddress k_low = ptx::shared_address(keys + g * kKeyPitch + t * 16);
#pragma unroll 4
            for (int at = 0; at < D; at += 32) {
                const Raw<16> low = ptx::ld_shared_16(q_low + 2 * at), high = ptx::ld_shared_16(q_low + (8 * kKeyPitch + 2 * at));
                mma_64_bytes<T>(s[0], low, high, ptx::ld_shared_16(k_low + 2 * at));
                mma_64_bytes<T>(s[1], low, high, ptx::ld_shared_16(k_low + (8 * kKeyPitch + 2 * at)));
            }
            u32 p[4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float now = top[r];
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float& score = s[n][2 * r + c];
                        score *= factor;
                        if (cap > 0.0f) score = cap * tanh_by_ex2(score * inverse_cap) * 1.4426950408889634f;
                        if (8 * n + 2 * t + c >= usable) score = minus_infinity;
                        now = step_larger(now, score);
                    }
                now = step_larger(now, __shfl_xor_sync(0xffffffffu, now, 1));
                now = step_larger(now, __shfl_xor_sync(0xffffffffu, now, 2));
                const float from = now == minus_infinity ? 0.0f : now, before = ptx::ex2(top[r] - from);
                float here = 0.0f;
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float pair[2] = {ptx::ex2(s[n][2 * r] - from), ptx::ex2(s[n][2 * r + 1] - from)};
                    here += pair[0] + pair[1];
                    p[2 * n + r] = pack<T, 2>(pair).w[0];
                }
                here += __shfl_xor_sync(0xffffffffu, here, 1);
                here += __shfl_xor_sync(0xffffffffu, here, 2);
                total[r] = total[r] * before + here;
                top[r] = now;
#pragma unroll
                for (int i = 0; i < D / 8; ++i) sum[i][2 * r] *= before, sum[i][2 * r + 1] *= before;
            }
            const u8* const turned = values + (lane % 8 + lane / 8 % 2 * 8) * kValuePitch + lane / 16 * 16;
#pragma unroll
            for (int i = 0; i < D / 16; ++i) {
                u32 b[4];
                ptx::ldmatrix_x4_trans(b, turned + 32 * i);
                mma_16_bytes_half<T>(sum[2 * i], p, {b[0], b[1]});
                mma_16_bytes_half<T>(sum[2 * i + 1], p, {b[2], b[3]});
            }
            __syncwarp();
        }
        fetch(round + stages);
    }
    ptx::cp_async_wait<0>();
    __syncwarp();
    float* const sums = reinterpret_cast<float*>(own);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (t == 0) {
            tops[warp * kStepRows + g + 8 * r] = top[r];
            totals[warp * kStepRows + g + 8 * r] = total[r];
        }
#pragma unroll
        for (int i = 0; i < D / 8; ++i)
            *reinterpret_cast<float2*>(sums + (g + 8 * r) * kSumPitch + 8 * i + 2 * t) = make_float2(sum[i][2 * r], sum[i][2 * r + 1]);
    }
    __syncthreads();

    // Rescales a softmax sum from its own maximum to another one.
    auto weight_of = [&](float own_top, float common) { return own_top == minus_infinity ? 0.0f : ptx::ex2(own_top - common); };
#pragma unroll 1
    for (int i = threadIdx.x; i < group * kQuads; i += 32 * kStepWarps) {
        const int row = i / kQuads, column = i % kQuads * 4;
        float common = minus_infinity;
        for (int w = 0; w < kStepWarps; ++w) common = step_larger(common, tops[w * kStepRows + row]);
        float value[4] = {}, all = 0.0f;
#pragma unroll
        for (int w = 0; w < kStepWarps; ++w) {
            const float weight = weight_of(tops[w * kStepRows + row], common);
            const float4 part = *reinterpret_cast<const float4*>(memory + w * stages * kStage + (row * kSumPitch + column) * 4);
            value[0] += weight * part.x, value[1] += weight * part.y, value[2] += weight * part.z, value[3] += weight * part.w;
            all += weight * totals[w * kStepRows + row];
        }
        const int place = rank * rows_sent + (row >> shift), to = row & blocks - 1;
        ptx::st_cluster(ptx::shared_address(arrived + place * D + column), to, value);
        if (column == 0) {
            ptx::st_cluster(ptx::shared_address(arrived_state + 2 * place), to, common);
            ptx::st_cluster(ptx::shared_address(arrived_state + 2 * place + 1), to, all);
        }
    }
    ptx::cluster_barrier();

    const int column = static_cast<int>(threadIdx.x) % kQuads * 4;
#pragma unroll 1
    for (int own_row = static_cast<int>(threadIdx.x) / kQuads; own_row < rows_sent; own_row += 32 * kStepWarps / kQuads) {
        const int row = rank + (own_row << shift);
        if (row >= group) return;
        const i64 q_head = head_kv * group_ + row;
        const float sink =
            sinks == nullptr ? minus_infinity : load_any(sinks, static_cast<int>(flags >> 12 & 15), q_head) * 1.4426950408889634f;
        float common = sink;
        for (int r = 0; r < blocks; ++r) common = step_larger(common, arrived_state[2 * (rows_sent * r + own_row)]);
        float value[4] = {}, all = weight_of(sink, common);
        for (int r = 0; r < blocks; ++r) {
            const int place = rows_sent * r + own_row;
            const float weight = weight_of(arrived_state[2 * place], common);
            const float4 part = *reinterpret_cast<const float4*>(arrived + place * D + column);
            value[0] += weight * part.x, value[1] += weight * part.y, value[2] += weight * part.z, value[3] += weight * part.w;
            all += weight * arrived_state[2 * place + 1];
        }
        const float inverse = all == 0.0f ? 0.0f : 1.0f / all;
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] *= inverse;
        store<T, 4>(out + (batch * q_heads + q_head) * D + column, value);
    }
}

}  // namespace rtk
