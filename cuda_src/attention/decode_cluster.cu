// Decoding attention with few queries over up to 1024 keys in one launch, for minimal latency: every warp has 16 keys,
// and only results are written to global memory.
//
// A cluster of 8 blocks owns 16 rows (pairs of a query and a query head that share a key head). Block r owns the 128
// keys from 128 r on, and its warp w the 16 keys from 16 w on; pages, if any, hold a multiple of 16 keys. Scores are
// computed from rows of q and k read straight from global memory (gemm/rows_mma.cuh); values are transposed through
// shared memory. Each warp leaves its accumulator, maximum and softmax sum in shared memory; blocks merge those of
// their warps and send them to the block that finishes a row, row % 8, which merges those of the blocks. All merges are
// in a fixed order, so results do not depend on timing. Arithmetic is fp32; probabilities are rounded to T for the
// second product. Loops are kept small: code that runs once costs mostly its instruction fetch.
//
// Shared memory: values [8][16][kValuePitch], later reused for data from other blocks, [8][2][D] and [8][2] pairs;
// accumulators of the warps [8][16][D + 8]; their maxima and softmax sums [8][16] each. Grid: (row tiles * 8, heads of
// keys, batch).
#include "attention/masks.cuh"
#include "common/reduce.cuh"
#include "gemm/rows_mma.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

inline constexpr int kBlocksOfRow = 8;
inline constexpr int kRowsOfCluster = 16;
inline constexpr int kKeysOfWarp = 16;

RTK_DEVICE float larger_or_nan(float a, float b) { return a > b || a != a ? a : b; }

template <typename T, int D>
__global__ void __launch_bounds__(256)
    attention_decode_cluster(const T* q, const T* k_cache, const T* v_cache, const i32* lengths, const i32* table,
                             const float* sinks, T* out, float* lse, i64 heads, i64 group, i64 lq, i64 lkv, i64 page_size,
                             i64 page_divisor, i64 table_row, i64 q_batch, i64 q_row, i64 q_head,
                             i64 k_batch, i64 k_row, i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 out_batch,
                             i64 out_row, i64 out_head, i64 left, i64 right, double scale) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int kWarps = 8, kValuePitch = 2 * D + 16, kSumPitch = D + 8, kQuads = D / 4;
    const float minus_infinity = __uint_as_float(0xff800000u);
    ptx::wait_for_previous();
    ptx::launch_dependents();
    float* const arrived = reinterpret_cast<float*>(memory);  // reuses the memory of values
    float* const arrived_state = arrived + kBlocksOfRow * 2 * D;
    float* const sums = reinterpret_cast<float*>(memory + kWarps * kKeysOfWarp * kValuePitch);
    float* const tops = sums + kWarps * kRowsOfCluster * kSumPitch;
    float* const totals = tops + kWarps * kRowsOfCluster;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rank = ptx::cluster_rank(), row0 = static_cast<int>(blockIdx.x) / kBlocksOfRow * kRowsOfCluster;
    const i64 head_kv = blockIdx.y, batch = blockIdx.z;
    const int rows = static_cast<int>(lq * group), per = static_cast<int>(group);
    const int first = (rank * kWarps + warp) * kKeysOfWarp;
    // Where this warp's keys are: a row of a sequence or of a page. The page number is loaded before the length is
    // known.
    i64 page = batch;
    int slot = first;
    if (table != nullptr) {
        const int index = static_cast<int>(divided(static_cast<u32>(first), page_divisor));
        page = index < table_row ? table[batch * table_row + index] : 0;
        slot = first - index * static_cast<int>(page_size);
    }
    const Sequence sequence = sequence_at(batch, lq, lkv, nullptr, nullptr, lengths);
    const Mask mask(sequence, left, right);
    const int usable = sequence.keys - first;  // keys of this warp: 16 or fewer; 0 or less: none
    if (usable <= 0) page = 0, slot = 0;

    // Values of this warp's keys; those that do not exist are 0.
    u8* const values = memory + warp * (kKeysOfWarp * kValuePitch);
    const T* const v_first = v_cache + page * v_batch + slot * v_row + head_kv * v_head;
#pragma unroll 4
    for (int i = lane; i < kKeysOfWarp * (D / 8); i += 32) {
        const int key = i / (D / 8), column = i % (D / 8) * 8;
        ptx::cp_async_16_or_zero(ptx::shared_address(values + key * kValuePitch + 2 * column),
                                 v_first + static_cast<i64>(min(key, max(usable - 1, 0))) * v_row + column, key < usable);
    }
    ptx::cp_async_commit();

    // Scores of rows g and g + 8 with keys 8n + 2t and 8n + 2t + 1.
    int query[2];
    const T* q_rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = min(row0 + g + 8 * r, rows - 1);
        query[r] = row / per;
        q_rows[r] = q + batch * q_batch + query[r] * q_row + (head_kv * group + row - query[r] * per) * q_head + 8 * t;
    }
    const T* const k_first = k_cache + page * k_batch + slot * k_row + head_kv * k_head + 8 * t;
    const T* k_rows[2];
#pragma unroll
    for (int n = 0; n < 2; ++n)  // masked rows may point at any readable memory
        k_rows[n] = usable <= 0 ? q_rows[0] : k_first + static_cast<i64>(min(8 * n + g, usable - 1)) * k_row;
    float s[2][4] = {};
#pragma unroll 4
    for (int at = 0; at < D; at += 32) {
        const Raw<16> low = plain_load(reinterpret_cast<const u8*>(q_rows[0] + at));
        const Raw<16> high = plain_load(reinterpret_cast<const u8*>(q_rows[1] + at));
#pragma unroll
        for (int n = 0; n < 2; ++n)
            mma_64_bytes<T>(s[n], low, high, plain_load(reinterpret_cast<const u8*>(k_rows[n] + at)));
    }

    // Probabilities, relative to the maximum of each row.
    u32 p[4];
    const float factor = static_cast<float>(scale) * 1.4426950408889634f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int low = mask.lo(query[r]), high = mask.hi(query[r]);
        float top = minus_infinity, total = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int key = first + 8 * n + 2 * t + c;
                float& score = s[n][2 * r + c];
                score = key < low || key >= high ? minus_infinity : score * factor;
                top = larger_or_nan(top, score);
            }
        top = larger_or_nan(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = larger_or_nan(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float from = top == minus_infinity ? 0.0f : top;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const float pair[2] = {ptx::ex2(s[n][2 * r] - from), ptx::ex2(s[n][2 * r + 1] - from)};
            total += pair[0] + pair[1];
            p[2 * n + r] = pack<T, 2>(pair).w[0];
        }
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        if (t == 0) {
            tops[warp * kRowsOfCluster + g + 8 * r] = top;
            totals[warp * kRowsOfCluster + g + 8 * r] = total;
        }
    }

    ptx::cp_async_wait<0>();
    __syncwarp();
    float* const own = sums + warp * (kRowsOfCluster * kSumPitch) + g * kSumPitch + 2 * t;
    const u8* const turned = values + (lane % 8 + lane / 8 % 2 * 8) * kValuePitch + lane / 16 * 16;
#pragma unroll 2
    for (int at = 0; at < D; at += 16) {
        u32 b[4];
        ptx::ldmatrix_x4_trans(b, turned + 2 * at);
        float o[2][4] = {};
        mma_16_bytes_half<T>(o[0], p, {b[0], b[1]});
        mma_16_bytes_half<T>(o[1], p, {b[2], b[3]});
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<float2*>(own + 8 * r * kSumPitch + at + 8 * n) = make_float2(o[n][2 * r], o[n][2 * r + 1]);
    }
    ptx::cluster_barrier();  // also: all blocks have read their values, so that memory may be overwritten

    // Rescales a maximum and its softmax sum to another maximum.
    auto weight_of = [&](float top, float common) { return top == minus_infinity ? 0.0f : ptx::ex2(top - common); };
#pragma unroll 1
    for (int i = threadIdx.x; i < kRowsOfCluster * kQuads; i += 256) {
        const int row = i / kQuads, column = i % kQuads * 4;
        float top = minus_infinity;
        for (int w = 0; w < kWarps; ++w) top = larger_or_nan(top, tops[w * kRowsOfCluster + row]);
        float value[4] = {}, total = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = weight_of(tops[w * kRowsOfCluster + row], top);
            const float4 part = *reinterpret_cast<const float4*>(sums + (w * kRowsOfCluster + row) * kSumPitch + column);
            value[0] += weight * part.x, value[1] += weight * part.y, value[2] += weight * part.z, value[3] += weight * part.w;
            total += weight * totals[w * kRowsOfCluster + row];
        }
        const int place = rank * 2 + row / kBlocksOfRow;
        ptx::st_cluster(ptx::shared_address(arrived + place * D + column), row % kBlocksOfRow, value);
        if (column == 0) {
            ptx::st_cluster(ptx::shared_address(arrived_state + 2 * place), row % kBlocksOfRow, top);
            ptx::st_cluster(ptx::shared_address(arrived_state + 2 * place + 1), row % kBlocksOfRow, total);
        }
    }
    ptx::cluster_barrier();

    const int own_row = static_cast<int>(threadIdx.x) / kQuads, column = static_cast<int>(threadIdx.x) % kQuads * 4;
    const int row = row0 + rank + kBlocksOfRow * own_row;
    if (own_row >= 2 || row >= rows) return;
    const int own_query = row / per;
    const i64 head = head_kv * group + row - own_query * per;
    const float sink = sinks == nullptr ? minus_infinity : sinks[head] * 1.4426950408889634f;
    float top = sink;
    for (int r = 0; r < kBlocksOfRow; ++r) top = larger_or_nan(top, arrived_state[2 * (2 * r + own_row)]);
    float value[4] = {}, total = weight_of(sink, top);
#pragma unroll
    for (int r = 0; r < kBlocksOfRow; ++r) {
        const int place = 2 * r + own_row;
        const float weight = weight_of(arrived_state[2 * place], top);
        const float4 part = *reinterpret_cast<const float4*>(arrived + place * D + column);
        value[0] += weight * part.x, value[1] += weight * part.y, value[2] += weight * part.z, value[3] += weight * part.w;
        total += weight * arrived_state[2 * place + 1];
    }
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] *= inverse;
    store<T, 4>(out + batch * out_batch + own_query * out_row + head * out_head + column, value);
    if (column == 0)
        lse[(batch * heads + head) * lq + own_query] =
            total == 0.0f ? minus_infinity : top * 0.6931471805599453f + logf(total);
}

}  // namespace rtk
