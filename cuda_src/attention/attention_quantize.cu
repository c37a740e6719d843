// Quantises 16-bit q, k and v [sequence, row, head, column] to the codes that attention_mma_quant takes. A code times
// its scale is the value. NaN or an infinity makes the scale NaN; an amax of 0 gives scale 1.
//
//   attention_key_sums        column sums over 256 rows of k at a time, fp32 [batch, heads, parts, 128]. "Smooth k" subtracts
//                             their mean from each key: this shifts all scores of a row by a constant, which softmax ignores.
//   attention_quantize_rows   rows of q and k: int8 (amax / 127) or e4m3 (amax / 448), one scale per row or per 64 rows. With
//                             column sums, k minus its mean; and, for q, the amount by which that lowers the scores, to be
//                             added to lse. Heads of k follow those of q in the grid.
//   attention_quantize_values v transposed, codes [batch, heads, d_v, padded keys], zeros past the last key; one scale per
//                             column and 64 keys, [batch, heads, blocks, d_v].
//
// Blocks of 128 threads own 64 rows (256 for sums) of one head: grid (blocks of rows, heads, sequences). Rounding is to
// nearest even; the mean is fp32.
#include "common/convert.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kRowsAtATime = 64;
inline constexpr int kWidest = 128;
inline constexpr int kRowsOfSums = 256;

RTK_DEVICE float scale_of(float amax, float largest) {
    return !(amax <= 3.4028235e38f) ? __uint_as_float(0x7fc00000u) : amax == 0.0f ? 1.0f : amax / largest;
}

// Quantises four values, which the scale keeps in range. A NaN scale gives arbitrary codes: the scores are NaN either
// way.
RTK_DEVICE u32 coded(const float (&f)[4], float inverse, bool e4m3_codes) {
    if (e4m3_codes) return to_fp8x2<e4m3>(f[0] * inverse, f[1] * inverse) | to_fp8x2<e4m3>(f[2] * inverse, f[3] * inverse) << 16;
    u32 bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(f[i] * inverse + 12582912.0f);  // 1.5 * 2^23: an integer in the last bits
    return __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
}

// The largest magnitude of a warp's values; NaN compares greater than every number.
RTK_DEVICE float warp_amax(const float (&f)[4]) {
    u32 bits = 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits = max(bits, __float_as_uint(f[i]) & 0x7fffffffu);
    return __uint_as_float(__reduce_max_sync(0xffffffffu, bits));
}

template <typename T>
__global__ void __launch_bounds__(128)
    attention_key_sums(const T* k, float* sums, i64 rows, i64 width, i64 k_batch, i64 k_row, i64 k_head) {
    constexpr int kLanes = kWidest / 8, kSlots = 128 / kLanes, kInFlight = 8;  // threads of a row, rows at a time
    __shared__ float parts[kSlots][kWidest];
    const int column0 = static_cast<int>(threadIdx.x) % kLanes * 8, slot = static_cast<int>(threadIdx.x) / kLanes;
    const i64 first = static_cast<i64>(blockIdx.x) * kRowsOfSums, last = min(first + kRowsOfSums, rows);
    k += blockIdx.z * k_batch + blockIdx.y * k_head + column0;
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    if (column0 < width)
        for (i64 row = first + slot; row < last; row += kSlots * kInFlight) {
            Raw<16> raw[kInFlight];
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                raw[i] = Raw<16>{{0, 0, 0, 0}};
                if (row + i * kSlots < last) raw[i] = load_raw<T, 8, false>(k + (row + i * kSlots) * k_row);
            }
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                float f[8];
                unpack<T, 8>(raw[i], f);
#pragma unroll
                for (int c = 0; c < 8; ++c) sum[c] += f[c];
            }
        }
#pragma unroll
    for (int i = 0; i < 8; ++i) parts[slot][column0 + i] = sum[i];
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x);
    float* const to = sums + ((blockIdx.z * static_cast<i64>(gridDim.y) + blockIdx.y) * gridDim.x + blockIdx.x) * kWidest;
    float total = parts[0][column];
#pragma unroll
    for (int i = 1; i < kSlots; ++i) total += parts[i][column];
    to[column] = total;
}

// `sums`: null, or partial column sums of the heads of k. `taken`: [batch, heads, rows] of q, scale * (q . mean).
template <typename T>
__global__ void __launch_bounds__(128)
    attention_quantize_rows(const T* q, const T* k, const float* sums, u8* q_codes, float* q_scales, u8* k_codes, float* k_scales,
                            float* taken, i64 q_rows, i64 k_rows, i64 q_heads, i64 width, i64 q_batch, i64 q_row, i64 q_head,
                            i64 k_batch, i64 k_row, i64 k_head, i64 parts, i64 blocks_of_rows, i64 e4m3_codes, double scale) {
    constexpr int kOwn = kRowsAtATime / 4;  // rows of a warp
    const bool is_q = blockIdx.y < q_heads;
    const i64 rows = is_q ? q_rows : k_rows, k_heads = gridDim.y - q_heads;
    if (static_cast<i64>(blockIdx.x) * kRowsAtATime >= rows) return;
    const i64 head = is_q ? blockIdx.y : blockIdx.y - q_heads, heads = is_q ? q_heads : k_heads, batch = blockIdx.z;
    const i64 x_row = is_q ? q_row : k_row;
    u8* const codes = is_q ? q_codes : k_codes;
    float* const scales = is_q ? q_scales : k_scales;
    __shared__ float mean[kWidest];
    __shared__ float of_warps[4];
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64 first = static_cast<i64>(blockIdx.x) * kRowsAtATime + warp * kOwn;
    const bool column_exists = lane * 4 < width;
    const T* const x = (is_q ? q + batch * q_batch + head * q_head : k + batch * k_batch + head * k_head) + lane * 4;
    const float largest = e4m3_codes ? 448.0f : 127.0f;
    Raw<8> raw[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {  // issue all loads before using any
        raw[i] = Raw<8>{{0, 0}};
        if (column_exists && first + i < rows) raw[i] = load_raw<T, 4, false>(x + (first + i) * x_row);
    }
    float sum = 0.0f;
    if (sums != nullptr) {
        const i64 of_head = is_q ? head / (q_heads / k_heads) : head;
        const float* const from = sums + (batch * k_heads + of_head) * parts * kWidest + threadIdx.x;
#pragma unroll 16
        for (i64 part = 0; part < parts; ++part) sum += from[part * kWidest];
        sum /= static_cast<float>(k_rows);
    }
    mean[threadIdx.x] = sum;
    __syncthreads();
    float own_mean[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) own_mean[c] = mean[lane * 4 + c];
    // Row i; for k minus the mean, if there is one.
    auto values_of = [&](int i, float(&f)[4]) {
        unpack<T, 4>(raw[i], f);
        if (!is_q && first + i < rows) {
#pragma unroll
            for (int c = 0; c < 4; ++c) f[c] -= own_mean[c];
        }
    };
    u32* const to = reinterpret_cast<u32*>(codes + ((batch * rows + first) * heads + head) * width) + lane;
    float shared_scale = 0.0f;
    if (blocks_of_rows) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            float f[4];
            values_of(i, f);
            amax = MaxMagnitude::apply(warp_amax(f), amax);
        }
        if (lane == 0) of_warps[warp] = amax;
        __syncthreads();
        amax = MaxMagnitude::apply(MaxMagnitude::apply(of_warps[0], of_warps[1]),
                                   MaxMagnitude::apply(of_warps[2], of_warps[3]));
        shared_scale = scale_of(amax, largest);
        const i64 blocks = (rows + kRowsAtATime - 1) / kRowsAtATime;
        if (threadIdx.x == 0) scales[(batch * heads + head) * blocks + blockIdx.x] = shared_scale;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        float f[4];
        values_of(i, f);
        const i64 at = (batch * heads + head) * rows + first + i;
        const bool exists = first + i < rows;
        if (is_q) {
            float dot = 0.0f;
#pragma unroll
            for (int c = 0; c < 4; ++c) dot += f[c] * own_mean[c];
            if (sums != nullptr) dot = warp_reduce<Sum>(dot);
            if (lane == 0 && exists) taken[at] = sums == nullptr ? 0.0f : dot * static_cast<float>(scale);
        }
        float by = shared_scale;
        if (!blocks_of_rows) {
            by = scale_of(warp_amax(f), largest);
            if (lane == 0 && exists) scales[at] = by;
        }
        if (column_exists && exists) to[i * (heads * width / 4)] = coded(f, 1.0f / by, e4m3_codes != 0);
    }
}

template <typename T>
__global__ void __launch_bounds__(128)
    attention_quantize_values(const T* v, u8* codes, float* scales, i64 rows, i64 width, i64 padded, i64 v_batch, i64 v_row,
                              i64 v_head, i64 e4m3_codes) {
    __shared__ __align__(16) float tile[kRowsAtATime][kWidest];
    const i64 head = blockIdx.y, heads = gridDim.y, batch = blockIdx.z, first = static_cast<i64>(blockIdx.x) * kRowsAtATime;
    v += batch * v_batch + head * v_head;
    const int quads = static_cast<int>(width) / 4;
    for (int i = static_cast<int>(threadIdx.x); i < kRowsAtATime * quads; i += 128) {
        const int row = i / quads, column = i % quads * 4;
        float f[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + row < rows) load_keep<T, 4>(v + (first + row) * v_row + column, f);
#pragma unroll
        for (int c = 0; c < 4; ++c) tile[row][column + c] = f[c];
    }
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x);
    if (column >= width) return;
    float amax = 0.0f;
    for (int row = 0; row < kRowsAtATime; ++row) amax = MaxMagnitude::apply(fabsf(tile[row][column]), amax);
    const float by = scale_of(amax, e4m3_codes ? 448.0f : 127.0f), inverse = 1.0f / by;
    const i64 which = batch * heads + head;
    scales[(which * gridDim.x + blockIdx.x) * width + column] = by;
    u8* const to = codes + (which * width + column) * padded + first;
    for (int row = 0; row < kRowsAtATime && first + row < padded; row += 16) {
        Raw<16> raw;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float f[4] = {tile[row + 4 * w][column], tile[row + 4 * w + 1][column], tile[row + 4 * w + 2][column],
                                tile[row + 4 * w + 3][column]};
            raw.w[w] = coded(f, inverse, e4m3_codes != 0);
        }
        ptx::st<16>(to + row, raw);
    }
}

}  // namespace rtk
