// y[t] = weight[ids[t] - start]; 0 for ids outside of the table. Moves bytes: one kernel for all types.
//
// A RowGroup owns one token and copies its row in units of BYTES, with four in flight per thread. Grid: tokens / groups
// per block.
#include "common/reduce.cuh"
#include "index/embedding_tokens.cuh"

namespace rtk {

template <int BYTES>
__global__ void __launch_bounds__(256)
    embedding_fwd(const void* ids, const u8* weight, u8* y, i64 tokens, i64 units, i64 weight_stride, i64 rows,
                  i64 start, i64 ids_int64, i64 threads_per_row) {
    constexpr int kInFlight = 4;
    const RowGroup group(threads_per_row);
    const i64 token = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (token >= tokens || group.index >= group.count) return;
    const Tokens table{ids, ids_int64 != 0, start, rows, -1};
    const i64 row = table.row_of(table.id(token));
    const u8* source = weight + row * weight_stride;
    u8* target = y + token * units * BYTES;
    for (i64 unit = group.thread; unit < units; unit += kInFlight * group.threads) {
        Raw<BYTES> raw[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = unit + k * group.threads;
            clear(raw[k]);
            if (at < units && row >= 0) raw[k] = ptx::ld_stream<BYTES>(source + at * BYTES);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const i64 at = unit + k * group.threads;
            if (at < units) ptx::st<BYTES>(target + at * BYTES, raw[k]);
        }
    }
}

}  // namespace rtk
