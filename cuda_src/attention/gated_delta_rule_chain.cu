// The gated delta rule between segments (attention/gated_delta_rule_rows.cuh): of each sequence's segments but the first and the
// last, in order, ends[i] += A_i ends[i - 1]; with REVERSE, in the other order, starts[i] += A_i^T starts[i + 1]. All fp32:
// `states`, ends or starts, [segments][heads][d_k][d_v], `transitions` [segments][heads][d_k][d_k].
//
// A block owns a sequence, a head and kColumns columns of states. Threads have a row each and one half of the sum, which is in
// order; slabs of kSlab columns (REVERSE: rows) of transitions lie in shared memory. If the block's columns are all zeros, A
// is not used: it may have overflowed. Grid: columns, heads, sequences.
#include "attention/gated_delta_rule_rows.cuh"
#include "ptx/cp_async.cuh"

namespace rtk {

template <int DK, bool REVERSE>
__global__ void __launch_bounds__(2 * DK)
    gated_delta_rule_chain(const float* transitions, float* states, const i32* cu, i64 segment, i64 length, i64 heads, i64 d_k,
                           i64 d_v) {
    constexpr int kColumns = 8, kSlab = 32, kStages = 4, kThreads = 2 * DK, kSlabs = DK / kSlab;
    constexpr int kRows = REVERSE ? kSlab : DK, kSpan = REVERSE ? DK : kSlab, kPitch = kSpan + 4;
    extern __shared__ __align__(16) float slabs[];  // [kStages][kRows][kPitch]
    __shared__ __align__(16) float state[DK][kColumns], halves[DK][kColumns];

    const int head = static_cast<int>(blockIdx.y), row = static_cast<int>(threadIdx.x) % DK;
    const bool first_half = threadIdx.x < DK, exists = row < d_k;
    const DeltaRows own = delta_rows(static_cast<int>(blockIdx.z), length, cu);
    const int count = static_cast<int>((own.rows + segment - 1) / segment), steps = count - 2;
    if (steps <= 0) return;
    const i64 first = cu != nullptr ? own.first / segment + own.batch : own.batch * ((length + segment - 1) / segment);
    // Of the state that step 0 to `steps` computes; the first one is given.
    auto number = [&](int step) { return (first + (REVERSE ? count - 1 - step : step)) * heads + head; };
    auto place = [&](int step) { return states + (number(step) * d_k + row) * d_v + static_cast<i64>(blockIdx.x) * kColumns; };
    auto fetch = [&](int use) {
        const int step = use / kSlabs + 1, skipped = use % kSlabs * kSlab;
        if (step > steps) return ptx::cp_async_commit();
        const float* const from = transitions + number(step) * d_k * d_k;
        const ptx::SharedAddress to = ptx::shared_address(slabs) + use % kStages * (kRows * kPitch * 4);
#pragma unroll
        for (int i = 0; i < kRows * kSpan / 4 / kThreads; ++i) {
            const int at = static_cast<int>(threadIdx.x) + i * kThreads, y = at / (kSpan / 4), x = at % (kSpan / 4) * 4;
            const int from_row = REVERSE ? y + skipped : y, from_column = REVERSE ? x : x + skipped;
            ptx::cp_async_16_or_zero(to + (y * kPitch + x) * 4, from + from_row * d_k + from_column,
                                     from_row < d_k && from_column < d_k);
        }
        ptx::cp_async_commit();
    };
#pragma unroll
    for (int use = 0; use < kStages - 1; ++use) fetch(use);

    float sums[kColumns] = {}, next[kColumns] = {};
    if (first_half && exists) load_keep<float, kColumns>(place(0), sums);
#pragma unroll 1
    for (int step = 1; step <= steps; ++step) {
        bool some = false;
        if (first_half) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
                state[row][c] = sums[c];
                some = some || sums[c] != 0.0f;
            }
            if (exists) load_keep<float, kColumns>(place(step), next);
        }
        some = __syncthreads_or(some);
#pragma unroll
        for (float& sum : sums) sum = 0.0f;
#pragma unroll 1
        for (int part = 0; part < kSlabs; ++part) {
            const int use = (step - 1) * kSlabs + part;
            ptx::cp_async_wait<kStages - 2>();
            __syncthreads();
            fetch(use + kStages - 1);
            const float* const slab = slabs + use % kStages * (kRows * kPitch);
            const int begin = first_half ? 0 : kSlab / 2;
            if (!some) continue;
#pragma unroll 4
            for (int k = begin; k < begin + kSlab / 2; k += 4) {
                float a[4];
                if constexpr (REVERSE) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[i] = slab[(k + i) * kPitch + row];
                } else {
                    const float4 four = *reinterpret_cast<const float4*>(slab + row * kPitch + k);
                    a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* const before = state[part * kSlab + k + i];
#pragma unroll
                    for (int c = 0; c < kColumns; ++c) sums[c] += a[i] * before[c];
                }
            }
        }
        if (!first_half) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) halves[row][c] = sums[c];
        }
        __syncthreads();
        if (first_half) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) sums[c] = next[c] + (sums[c] + halves[row][c]);
            if (exists) store<float, kColumns>(place(step), sums);
        }
    }
}

}  // namespace rtk
