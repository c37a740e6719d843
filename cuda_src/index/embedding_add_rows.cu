// grad[row] = ((grad[row] + dy[first token]) + dy[next token]) + ... from the sorted list of (row, token): in the order
// of the tokens, one by one, so that calls over parts of the tokens leave the bits of one call over all. grad is fp32.
//
// A block owns the rows that begin in its 32 entries of the list, and 128 threads' columns; a thread owns VEC columns.
// It reads a row's entries to their end, also past its own. Elements of dy have FROM bytes (common/widths.cuh).
#include "common/widths.cuh"
#include "index/embedding_tokens.cuh"

namespace rtk {

template <int FROM, int VEC>
__global__ void __launch_bounds__(128)
    embedding_add_rows(const u8* dy, float* grad, const i64* entries, i64 tokens, i64 cols, i64 dy_stride, i64 grad_stride,
                       i64 dy_half) {
    constexpr int kInFlight = 8;
    ptx::wait_for_previous();
    const i64 column = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * VEC;
    const i64 first = static_cast<i64>(blockIdx.x) * kWarp, end = min(first + kWarp, tokens);
    auto entry = [&](i64 at) { return at < 0 || at >= tokens ? list_entry(-1, 0) : __ldcg(entries + at); };
    if (column >= cols) return;
    i32 before = entry_row(entry(first - 1));
    for (i64 begin = first; begin < end; ++begin) {
        const i32 row = entry_row(entry(begin));
        if (row < 0) return;
        const bool begins = row != before;
        before = row;
        if (!begins) continue;
        float* const target = grad + row * grad_stride + column;
        float sum[VEC];
        widen<4, VEC>(load_packed<4, VEC, false>(reinterpret_cast<const u8*>(target)), false, sum);
        bool more = true;
        for (i64 at = begin; more; at += kInFlight) {
            Packed<FROM, VEC> raw[kInFlight];
            bool same[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                const i64 one = entry(at + k);
                same[k] = entry_row(one) == row;
                if (same[k]) raw[k] = load_packed<FROM, VEC, false>(dy + (entry_token(one) * dy_stride + column) * FROM);
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                if (!same[k]) continue;
                float v[VEC];
                widen<FROM, VEC>(raw[k], dy_half != 0, v);
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum[i] += v[i];
            }
            more = same[kInFlight - 1];
        }
        store<float, VEC>(target, sum);
    }
}

}  // namespace rtk
