// out[t] = sum over j of w[t, j] * y[rows[t, j]], and its backward. fp32 sums in the order of the choices, rounded
// once.
//
// SIZE: bytes of an element (common/widths.cuh); VEC: elements of an access.
#include "common/widths.cuh"
#include "moe/rows.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

// Rows can be prefetched once the choices are known: L2 gets those of the token that follows as many tokens later as
// are processed at the same time.
inline constexpr i64 kPrefetchTokens = 1024;

// A RowGroup of whole warps owns one token and each of its threads columns of it; all rows of CHOICES choices are
// loaded before the first is added. UNITS: accesses per row and thread; with more than one, top_k is at most CHOICES,
// so that sums need no registers. `carried` [rows] is copied back to the choices, to carried_out [tokens, top_k]. No
// probs: w = 1. BLOCKS: blocks of 256 threads per SM. Grid: tokens / groups per block.
template <int SIZE, int VEC, int CHOICES, int UNITS, int BLOCKS>
__global__ void __launch_bounds__(256, BLOCKS)
    moe_unpermute(const u8* y, const i32* rows, const u8* probs, const i32* experts, const u8* carried, u8* out,
                  u8* carried_out, i64 tokens, i64 top_k, i64 row_count, i64 vectors, i64 y_stride, i64 half,
                  i64 prob_kind, i64 prob_columns, i64 threads_per_row) {
    constexpr int kBytes = SIZE * VEC;
    const RowGroup group(threads_per_row);
    const i64 token = static_cast<i64>(blockIdx.x) * group.count + group.index;
    if (token >= tokens || group.index >= group.count) return;
    const int count = static_cast<int>(top_k);
    const i32* own = rows + token * top_k;
    const Probs table{probs, experts, prob_kind, prob_columns, count};
    if (group.thread == 0 && token + kPrefetchTokens < tokens) ptx::prefetch_l2(own + kPrefetchTokens * top_k);
    Choices loaded;
    const int end = static_cast<int>(vectors), step = group.threads;
    y += static_cast<i64>(group.thread) * kBytes;
    for (int base = 0; base < end; base += UNITS * step) {
        const int left = end - base - group.thread;  // access u exists if u * step is less
        float sum[UNITS][VEC];
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum[u][i] = 0.0f;
        Choices choices = loaded;
#pragma unroll 1
        for (int first = 0; first < (UNITS > 1 ? CHOICES : count); first += CHOICES) {
            const bool fresh = first % kWarp == 0 && (base == 0 || count > kWarp);
            if (fresh) loaded.load(own, first, count, row_count);
            if (first % kWarp == 0) {
                choices = loaded;
            } else {
                choices.advance(CHOICES);
            }
            Packed<SIZE, VEC> raw[CHOICES][UNITS];
#pragma unroll
            for (int c = 0; c < CHOICES; ++c) {
                const i32 row = choices.row_of(c);
                const u8* source = y + row * y_stride + static_cast<i64>(base) * kBytes;
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    clear(raw[c][u]);
                    if (row >= 0 && u * step < left)
                        raw[c][u] = load_packed<SIZE, VEC>(source + static_cast<i64>(u * step) * kBytes);
                }
            }
            if (fresh && probs != nullptr) {
                loaded.load_weight(table, token, first);
                choices = loaded;
            }
#pragma unroll
            for (int c = 0; c < CHOICES; ++c) {
                const float weight = choices.weight_of(c);
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    float v[VEC];
                    widen<SIZE, VEC>(raw[c][u], half != 0, v);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) sum[u][i] = fmaf(weight, v[i], sum[u][i]);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
            if (u * step < left)
                write<SIZE, VEC>(out + (token * vectors + base + group.thread + u * step) * kBytes, half != 0, sum[u]);
    }
    if (carried_out == nullptr) return;
    const Probs numbers{carried, nullptr, prob_kind, 1, 1};
    for (int j = group.thread; j < count; j += group.threads) {
        const i32 row = load_row(own + j, row_count);
        store_prob_bits(carried_out + (token * top_k + j) * numbers.bytes(), prob_kind,
                        row < 0 ? 0u : numbers.bits(carried + static_cast<i64>(row) * numbers.bytes()));
    }
}

// dy[rows[t, j]] = w[t, j] * dout[t], zeros in the rows that no choice fills, and dprobs[t, j] = <dout[t], y[row]> with 0
// where the choice was dropped. Without y no dprobs; dy may be null. A block owns one token; grid: pad_blocks + tokens.
template <int SIZE, int VEC>
__global__ void __launch_bounds__(256)
    moe_unpermute_bwd(const u8* dout, const u8* y, const i32* rows, const i32* slots, const u8* probs, const i32* experts,
                      u8* dy, u8* dprobs, i64 top_k, i64 row_count, i64 vectors, i64 dout_stride, i64 y_stride, i64 half,
                      i64 prob_kind, i64 prob_columns, i64 pad_blocks) {
    constexpr int kBytes = SIZE * VEC;
    __shared__ float partial[2][256 / kWarp][kChoices];
    if (blockIdx.x < pad_blocks) {
        clear_pad_rows<kBytes>(slots, dy, row_count, vectors, pad_blocks, [](i64) {});
        return;
    }
    const i64 token = blockIdx.x - pad_blocks;
    const int count = static_cast<int>(top_k);
    const i32* own = rows + token * top_k;
    const Probs table{probs, experts, prob_kind, prob_columns, count};
    Choices choices;
    int phase = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += kChoices, phase ^= 1) {
        if (first % kWarp == 0) {
            choices.load(own, first, count, row_count);
            if (dy != nullptr) choices.load_weight(table, token, first);
        } else {
            choices.advance(kChoices);
        }
        float dot[kChoices];
#pragma unroll
        for (int c = 0; c < kChoices; ++c) dot[c] = 0.0f;
        for (i64 base = 0; base < vectors; base += blockDim.x) {
            const i64 at = base + threadIdx.x;
            const bool here = at < vectors;
            Packed<SIZE, VEC> packed, raw[kChoices];
            clear(packed);
            if (here) packed = load_packed<SIZE, VEC>(dout + token * dout_stride + at * kBytes);
#pragma unroll
            for (int c = 0; c < kChoices; ++c) {
                const i32 row = choices.row_of(c);
                clear(raw[c]);
                if (y != nullptr && row >= 0 && here)
                    raw[c] = load_packed<SIZE, VEC>(y + row * y_stride + at * kBytes);
            }
            float g[VEC];
            widen<SIZE, VEC>(packed, half != 0, g);
#pragma unroll
            for (int c = 0; c < kChoices; ++c) {
                float v[VEC];
                widen<SIZE, VEC>(raw[c], half != 0, v);
                const i32 row = choices.row_of(c);
                const float weight = choices.weight_of(c);
                if (row >= 0) {
#pragma unroll
                    for (int i = 0; i < VEC; ++i) dot[c] = fmaf(g[i], v[i], dot[c]);
                }
                if (dy != nullptr && row >= 0 && here) {
#pragma unroll
                    for (int i = 0; i < VEC; ++i) v[i] = weight * g[i];
                    write<SIZE, VEC>(dy + (row * vectors + at) * kBytes, half != 0, v);
                }
            }
        }
        if (y == nullptr) continue;
        const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
        const float sum = scattered<kChoices, kWarp>(dot, lane, Sum::apply);
        if (lane < kChoices) partial[phase][threadIdx.x / kWarp][lane] = sum;
        __syncthreads();
        const int own_choice = static_cast<int>(threadIdx.x);
        if (own_choice < kChoices && first + own_choice < count) {
            float total = 0.0f;
            for (int w = 0; w < warps; ++w) total += partial[phase][w][own_choice];
            store_prob(dprobs + (token * top_k + first + own_choice) * table.bytes(), prob_kind, total);
        }
    }
}

}  // namespace rtk
