// Row-wise steps before and after the products of the backward on sm_90a.
//
//   attention_bwd_stats   lse in units of log2 (+inf where a query sees no key, so that its probabilities are 0) and
//                         delta = sum of dout * out - dlse, in padded order (sm90_bwd.cuh); padding is +inf and 0. Half a
//                         warp per row.
//   attention_bwd_dq      dq = scale * sums, rounded once; 0 for queries that no key tile meets. One block per tile.
//   attention_bwd_parts   dk or dv = the sum of `parts` fp32 parts [heads * parts, rows, width], in order, rounded once. A
//                         thread per 8 columns.
//   attention_bwd_sinks   dsinks[h] = -sum over queries of exp(sinks[h] - lse) * delta. One block per head. Padded rows that
//                         belong to no sequence were never written and are not read.
#include "attention/sm90_bwd.cuh"

namespace rtk {

template <typename T>
__global__ void __launch_bounds__(256)
    attention_bwd_stats(const T* out, const T* dout, const float* lse, const float* dlse, const i32* cu_q, float* lse_rows,
                        float* delta_rows, i64 heads, i64 lq, i64 padded_rows, i64 d_v, i64 out_batch, i64 out_row,
                        i64 out_head, i64 dout_batch, i64 dout_row, i64 dout_head, i64 lse_batch, i64 lse_head) {
    // Sixteen lanes own a row of up to 128 elements, in vectors of 8, or half of a row of up to 256.
    const int lane = threadIdx.x % 16;
    const u32 padded_lq = static_cast<u32>((lq + kRowPad - 1) / kRowPad * kRowPad);
    const int head = blockIdx.y % static_cast<u32>(heads), batch = blockIdx.y / static_cast<u32>(heads);
    const Sequence sequence = sequence_at(batch, lq, 0, cu_q, nullptr, nullptr);
    const int exist = (sequence.lq + kRowPad - 1) / kRowPad * kRowPad;
    const i64 to = head * padded_rows + padded_row(batch, sequence, lq, cu_q != nullptr);
    const T* const x_rows = out + batch * out_batch + sequence.q_row * out_row + head * out_head + 8 * lane;
    const T* const y_rows = dout + batch * dout_batch + sequence.q_row * dout_row + head * dout_head + 8 * lane;
    const i64 statistics = batch * lse_batch + head * lse_head + sequence.q_row;
    for (u32 i = blockIdx.x * 16 + threadIdx.x / 16; i < padded_lq; i += gridDim.x * 16) {  // whole warps: 16 divides both
        if (static_cast<int>(i) >= exist) break;
        float scaled = -negative_infinity(), sum = 0.0f;
        const bool row_exists = static_cast<int>(i) < sequence.lq;
#pragma unroll
        for (int part = 0; part < 2; ++part)
            if (row_exists && 8 * lane + 128 * part < d_v) {
                float x[8], y[8];
                load_stream<T, 8>(x_rows + i * out_row + 128 * part, x);
                load_stream<T, 8>(y_rows + i * dout_row + 128 * part, y);
#pragma unroll
                for (int k = 0; k < 8; ++k) sum += x[k] * y[k];
            }
#pragma unroll
        for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (row_exists && lane == 0) {
            if (dlse != nullptr) sum -= dlse[statistics + i];
            const float value = lse[statistics + i];
            if (value != negative_infinity()) scaled = value * kLog2e;
        }
        if (lane == 0) {
            lse_rows[to + i] = scaled;
            delta_rows[to + i] = sum;
        }
    }
}

template <typename T, int D>
__global__ void __launch_bounds__(256)
    attention_bwd_dq(const float* dq_sums, const i32* cu_q, const i32* cu_k, const i32* lengths, T* dq, i64 heads, i64 lq,
                     i64 lkv, i64 padded_rows, i64 d_qk, i64 dq_batch, i64 dq_row, i64 dq_head, i64 left, i64 right,
                     double scale) {
    constexpr int BQ = BackwardTile<D>::kQueries;
    const int m = blockIdx.x, head = static_cast<int>(blockIdx.y % heads), batch = static_cast<int>(blockIdx.y / heads);
    const Sequence sequence = sequence_at(batch, lq, lkv, cu_q, cu_k, lengths);
    if (m * BQ >= sequence.lq) return;
    const i64 first = padded_row(batch, sequence, lq, cu_q != nullptr) + m * BQ;
    const float* from = dq_sums + (head * padded_rows + first) * D;
    float sums[32];
    const bool nothing = Mask(sequence, left, right).keys_any(m * BQ, m * BQ + BQ).empty();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32 at = ((threadIdx.x / 128 * 8 + i) * 128 + threadIdx.x % 128) * 4;
        const float4 x = nothing ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *reinterpret_cast<const float4*>(from + at);
        sums[4 * i] = x.x, sums[4 * i + 1] = x.y, sums[4 * i + 2] = x.z, sums[4 * i + 3] = x.w;
    }
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = warp / 4;
    const int row = group * BackwardTile<D>::kRow + warp % 4 * 16 + lane / 4, column = group * BackwardTile<D>::kColumn;
    const float times[2] = {static_cast<float>(scale), static_cast<float>(scale)};
    store_rows(dq + batch * dq_batch + head * dq_head + (sequence.q_row + m * BQ) * dq_row + column, dq_row, row,
               sequence.lq - m * BQ, static_cast<int>(d_qk) - column, sums, times);
}

template <typename T>
__global__ void __launch_bounds__(256)
    attention_bwd_parts(const float* from, T* to, i64 parts, i64 rows, i64 length, i64 width, i64 batch_step, i64 row_step,
                        i64 head_step) {
    const u32 vectors = static_cast<u32>(width / 8);
    const i64 index = blockIdx.x * 256ll + threadIdx.x;
    const i64 row = index / vectors;
    if (row >= rows) return;
    const u32 column = static_cast<u32>(index - row * vectors) * 8;
    const float* part = from + (blockIdx.y * parts * rows + row) * width + column;
    float sum[8] = {};
    for (i64 i = 0; i < parts; ++i, part += rows * width) {
        float x[8];
        load_keep<float, 8>(part, x);
#pragma unroll
        for (int k = 0; k < 8; ++k) sum[k] += x[k];
    }
    const i64 batch = row / length;
    store<T, 8>(to + batch * batch_step + (row - batch * length) * row_step + blockIdx.y * head_step + column, sum);
}

template <typename T>
__global__ void __launch_bounds__(256)
    attention_bwd_sinks(const T* sinks, const float* lse_rows, const float* delta_rows, const i32* cu_q, float* dsinks,
                        i64 batches, i64 lq, i64 padded_rows) {
    __shared__ float parts[8];
    float sink[1];
    load_keep<T, 1>(sinks + blockIdx.x, sink);
    float sum = 0.0f;
    for (int batch = 0; batch < batches; ++batch) {
        const Sequence sequence = sequence_at(batch, lq, 0, cu_q, nullptr, nullptr);
        const i64 first = blockIdx.x * padded_rows + padded_row(batch, sequence, lq, cu_q != nullptr);
        for (int i = threadIdx.x; i < sequence.lq; i += blockDim.x) {
            const float lse = lse_rows[first + i];
            if (lse < -negative_infinity()) sum -= ptx::ex2(sink[0] * kLog2e - lse) * delta_rows[first + i];
        }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < 8; ++i) sum += parts[i];
        dsinks[blockIdx.x] = sum;
    }
}

}  // namespace rtk
