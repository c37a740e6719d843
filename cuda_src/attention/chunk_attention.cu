// Attention of a short chunk of tokens over the keys of a prefix and over itself, in one launch: rotation of q and k, scores,
// softmax, values. The chunk's keys and values come straight from the projection and are not written to the cache, which
// suits chunks that are computed again, as the action tokens of a policy are in every denoising step.
//
// Work is shared as in decode_cluster.cu: a cluster of 8 blocks owns 16 rows (pairs of a query and a query head that share a
// key head), every warp 16 of up to 1024 keys. Keys below `prefix` are rows of the cache, rotated already; the others are
// those of the chunk, whose heads lie in qkv as [q heads | k heads | v heads]. Pairs of a rotation are elements i and i +
// D / 2; rotated heads are rounded to T. Each block rotates its rows of q into shared memory; keys of the chunk are rotated by
// the lanes that multiply them. With `constant`, keys and values of the prefix are loaded before the previous kernel has
// ended. Merges are in a fixed order.
//
// Shared memory: values [8][16][kValuePitch], later reused for data from other blocks; accumulators of the warps
// [8][16][D + 8], before that the rotated rows of q [16][kValuePitch]; maxima and softmax sums [8][16] each. Grid: (row
// tiles * 8, heads of keys, batch).
#include "common/math.cuh"
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

// Rotates eight pairs: `low` and `high` are elements i and i + D / 2.
template <typename T>
RTK_DEVICE void rotate_pairs(Raw<16>& low, Raw<16>& high, const float* cosines, const float* sines) {
    float a[8], b[8], x[8], y[8];
    unpack<T, 8>(low, a);
    unpack<T, 8>(high, b);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float c = cosines[e], s = sines[e];
        x[e] = a[e] * c - b[e] * s;
        y[e] = b[e] * c + a[e] * s;
    }
    low = pack<T, 8>(x);
    high = pack<T, 8>(y);
}

template <typename T, int D>
__global__ void __launch_bounds__(256, 1)
    chunk_attention(const T* qkv, const T* k_cache, const T* v_cache, const float* cosines, const float* sines, T* out,
                    i64 group, i64 kv_heads, i64 tokens, i64 prefix, i64 qkv_batch, i64 qkv_row, i64 k_batch, i64 k_row,
                    i64 k_head, i64 v_batch, i64 v_row, i64 v_head, i64 angle_row, i64 constant, double scale) {
    extern __shared__ __align__(128) u8 memory[];
    constexpr int kWarps = 8, kValuePitch = 2 * D + 16, kSumPitch = D + 8, kQuads = D / 4, kSteps = D / 32;
    const float minus_infinity = __uint_as_float(0xff800000u);
    float* const arrived = reinterpret_cast<float*>(memory);  // reuses the memory of values
    float* const arrived_state = arrived + kBlocksOfRow * 2 * D;
    float* const sums = reinterpret_cast<float*>(memory + kWarps * kKeysOfWarp * kValuePitch);
    u8* const rotated = reinterpret_cast<u8*>(sums);
    float* const tops = sums + kWarps * kRowsOfCluster * kSumPitch;
    float* const totals = tops + kWarps * kRowsOfCluster;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int rank = ptx::cluster_rank(), row0 = static_cast<int>(blockIdx.x) / kBlocksOfRow * kRowsOfCluster;
    const i64 head_kv = blockIdx.y, batch = blockIdx.z, q_heads = group * kv_heads;
    const int rows = static_cast<int>(tokens * group), per = static_cast<int>(group);
    const int first = (rank * kWarps + warp) * kKeysOfWarp, old = static_cast<int>(prefix);
    const int keys = old + static_cast<int>(tokens);
    qkv += batch * qkv_batch;
    const T* const k_new = qkv + (q_heads + head_kv) * D;
    const T* const v_new = k_new + kv_heads * D;
    const T* const k_old = k_cache + batch * k_batch + head_kv * k_head;
    const T* const v_old = v_cache + batch * v_batch + head_kv * v_head;

    if (constant == 0) ptx::wait_for_previous();
    ptx::launch_dependents();
    // Values of this warp's keys; those that do not exist are 0. `fresh`: those of the chunk.
    u8* const values = memory + warp * (kKeysOfWarp * kValuePitch);
    auto load_values = [&](bool fresh) {
#pragma unroll 4
        for (int i = lane; i < kKeysOfWarp * (D / 8); i += 32) {
            const int key = first + i / (D / 8), column = i % (D / 8) * 8;
            const T* from = key < old ? v_old + key * v_row : v_new + static_cast<i64>(min(key, keys - 1) - old) * qkv_row;
            if ((key >= old) == fresh)
                ptx::cp_async_16_or_zero(ptx::shared_address(values + i / (D / 8) * kValuePitch + 2 * column), from + column, key < keys);
        }
        ptx::cp_async_commit();
    };
    load_values(false);
    // Rows 8n + g of this warp's keys, the 16 bytes t of each 64.
    Raw<16> key_parts[2][kSteps];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int key = first + 8 * n + g;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            clear(key_parts[n][i]);
            if (key < old) key_parts[n][i] = plain_load(reinterpret_cast<const u8*>(k_old + key * k_row + 32 * i + 8 * t));
        }
    }
    if (constant != 0) ptx::wait_for_previous();
    load_values(true);
    // Every thread rotates eight pairs of a row of q: 16 rows of D / 16 groups.
#pragma unroll 1
    for (int i = threadIdx.x; i < kRowsOfCluster * (D / 16); i += 256) {
        const int row = min(row0 + i / (D / 16), rows - 1), column = i % (D / 16) * 8, query = row / per;
        const u8* from = reinterpret_cast<const u8*>(qkv + query * qkv_row + (head_kv * group + row - query * per) * D + column);
        Raw<16> low = plain_load(from), high = plain_load(from + D);
        rotate_pairs<T>(low, high, cosines + (old + query) * angle_row + column, sines + (old + query) * angle_row + column);
        const ptx::SharedAddress to = ptx::shared_address(rotated + i / (D / 16) * kValuePitch + 2 * column);
        ptx::st_shared_16(to, low);
        ptx::st_shared_16(to + D, high);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int key = first + 8 * n + g;
        if (key >= old && key < keys) {
            const u8* from = reinterpret_cast<const u8*>(k_new + static_cast<i64>(key - old) * qkv_row + 8 * t);
#pragma unroll
            for (int i = 0; i < kSteps / 2; ++i) {
                Raw<16>&low = key_parts[n][i], &high = key_parts[n][i + kSteps / 2];
                low = plain_load(from + 64 * i), high = plain_load(from + 64 * i + D);
                rotate_pairs<T>(low, high, cosines + key * angle_row + 32 * i + 8 * t, sines + key * angle_row + 32 * i + 8 * t);
            }
        }
    }
    __syncthreads();

    // Scores of rows g and g + 8 with keys 8n + 2t and 8n + 2t + 1.
    float s[2][4] = {};
    const ptx::SharedAddress q_low = ptx::shared_address(rotated + g * kValuePitch + 16 * t);
    const ptx::SharedAddress q_high = ptx::shared_address(rotated + (g + 8) * kValuePitch + 16 * t);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const Raw<16> low = ptx::ld_shared_16(q_low + 64 * i), high = ptx::ld_shared_16(q_high + 64 * i);
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_64_bytes<T>(s[n], low, high, key_parts[n][i]);
    }
    __syncthreads();  // q has been read; accumulators go to its memory

    // Probabilities, relative to the maximum of each row.
    u32 p[4];
    const float factor = static_cast<float>(scale) * 1.4426950408889634f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float top = minus_infinity, total = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& score = s[n][2 * r + c];
                score = first + 8 * n + 2 * t + c >= keys ? minus_infinity : score * factor;
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
    const int query = row / per;
    const i64 head = head_kv * group + row - query * per;
    float top = minus_infinity;
    for (int r = 0; r < kBlocksOfRow; ++r) top = larger_or_nan(top, arrived_state[2 * (2 * r + own_row)]);
    float value[4] = {}, total = 0.0f;
#pragma unroll
    for (int r = 0; r < kBlocksOfRow; ++r) {
        const int place = 2 * r + own_row;
        const float weight = weight_of(arrived_state[2 * place], top);
        const float4 part = *reinterpret_cast<const float4*>(arrived + place * D + column);
        value[0] += weight * part.x, value[1] += weight * part.y, value[2] += weight * part.z, value[3] += weight * part.w;
        total += weight * arrived_state[2 * place + 1];
    }
    const float inverse = 1.0f / total;
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] *= inverse;
    store<T, 4>(out + ((batch * tokens + query) * q_heads + head) * D + column, value);
}

}  // namespace rtk
