// y[rows[t, j]] = x[t] for every choice j of token t, with its probability and its scales; zeros in the rows that no
// choice fills. Moves bytes: one kernel for all types.
//
// A RowGroup of whole warps owns one token: it reads the row once, with IN_FLIGHT units of BYTES in flight per thread,
// and writes it to every destination. The first `pad_blocks` blocks write the zeros. Grid: pad_blocks + tokens / groups
// per block.
#include "moe/rows.cuh"

namespace rtk {

template <int BYTES, int IN_FLIGHT>
__global__ void __launch_bounds__(256)
    moe_permute(const u8* x, const i32* rows, const i32* slots, const float* scale, const u8* probs, const i32* experts,
                u8* y, float* scale_out, u8* probs_out, i64 tokens, i64 top_k, i64 row_count, i64 units, i64 x_stride,
                i64 scales, i64 prob_kind, i64 prob_columns, i64 threads_per_row, i64 pad_blocks) {
    const Probs table{probs, experts, prob_kind, prob_columns, static_cast<int>(top_k)};
    if (blockIdx.x < pad_blocks) {
        clear_pad_rows<BYTES>(slots, y, row_count, units, pad_blocks, [&](i64 row) {
            if (probs != nullptr) store_prob_bits(probs_out + row * table.bytes(), prob_kind, 0u);
            for (i64 i = 0; i < scales; ++i) scale_out[row * scales + i] = 0.0f;
        });
        return;
    }
    const RowGroup group(threads_per_row);
    const i64 token = (blockIdx.x - pad_blocks) * group.count + group.index;
    if (token >= tokens || group.index >= group.count) return;
    const i32* own = rows + token * top_k;
    const u8* source = x + token * x_stride;
    const int count = static_cast<int>(top_k);
    Choices loaded;
    for (i64 base = 0; base < units; base += IN_FLIGHT * group.threads) {
        const i64 unit = base + group.thread;
        Raw<BYTES> raw[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; ++k) {
            const i64 at = unit + k * group.threads;
            clear(raw[k]);
            if (at < units) raw[k] = ptx::ld_stream<BYTES>(source + at * BYTES);
        }
        Choices choices = loaded;
#pragma unroll 1
        for (int first = 0; first < count; first += kChoices) {
            if (first % kWarp == 0 && (base == 0 || count > kWarp)) loaded.load(own, first, count, row_count);
            if (first % kWarp == 0) {
                choices = loaded;
            } else {
                choices.advance(kChoices);
            }
#pragma unroll
            for (int c = 0; c < kChoices; ++c) {
                const i32 row = choices.row_of(c);
                if (row < 0) continue;
                u8* target = y + (row * units + unit) * BYTES;
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; ++k)
                    if (unit + k * group.threads < units)
                        ptx::st<BYTES>(target + k * group.threads * BYTES, raw[k]);
            }
        }
    }
    if (probs != nullptr) {
        for (int j = group.thread; j < count; j += group.threads) {
            const i32 row = load_row(own + j, row_count);
            if (row < 0) continue;
            const u8* place = table.place(token, j);
            store_prob_bits(probs_out + static_cast<i64>(row) * table.bytes(), prob_kind,
                            place == nullptr ? 0u : table.bits(place));
        }
    }
    const u32 each = static_cast<u32>(scales);
    for (u32 i = group.thread; i < each * count; i += group.threads) {
        const u32 j = i / each, s = i - j * each;
        const i32 row = load_row(own + j, row_count);
        if (row >= 0) scale_out[row * scales + s] = scale[token * scales + s];
    }
}

// out[t, e] = sum over t's choices of expert e: [tokens, columns] from one number per choice, or, with `rows`, from one
// per row. Without `experts`, column j is choice j. One thread per result.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    moe_probs(const u8* values, const i32* rows, const i32* experts, u8* out, i64 tokens, i64 top_k, i64 row_count,
              i64 columns, i64 prob_kind) {
    const Probs table{values, nullptr, prob_kind, 1, 1};
    const int count = static_cast<int>(top_k);
    const i64 step = static_cast<i64>(gridDim.x) * THREADS, all = tokens * columns;
    for (i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x; i < all; i += step) {
        const i64 token = i / columns;
        const int column = static_cast<int>(i - token * columns);
        auto value = [&](int j) {
            const i64 choice = token * top_k + j;
            if (rows == nullptr) return table.value(values + choice * table.bytes());
            const i32 row = load_row(rows + choice, row_count);
            return row < 0 ? 0.0f : table.value(values + static_cast<i64>(row) * table.bytes());
        };
        float sum = 0.0f;
        if (experts == nullptr) {
            sum = value(column);
        } else {
#pragma unroll 4
            for (int j = 0; j < count; ++j)
                if (static_cast<i32>(ptx::ld_keep<4>(experts + token * top_k + j).w[0]) == column) sum += value(j);
        }
        store_prob(out + i * table.bytes(), prob_kind, sum);
    }
}

}  // namespace rtk
