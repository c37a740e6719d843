// Shared by the wgmma attention kernels: tiles in shared memory, products over them, and stores of accumulator rows.
//
// A tile of R rows and D columns (16-bit) is D / 64 boxes, rounded up, of R rows of 128 bytes with the 128-byte
// swizzle, one after another, as TMA writes them; columns past the last one of the tensor are 0. Tiles start at
// multiples of 1024 bytes, R is a multiple of 8.
#pragma once
#include "attention/masks.cuh"
#include "attention/softmax_state.cuh"
#include "common/vec.cuh"
#include "gemm/operand.cuh"
#include "gemm/terms.cuh"
#include "ptx/forget.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma_attention.cuh"

namespace rtk {

template <int R, int D>
struct Boxed {
    static_assert(R % 8 == 0, "whole groups of 8 rows");
    static constexpr int kRows = R, kColumns = D;
    static constexpr int kBoxes = (D + 63) / 64;
    static constexpr u32 kBoxBytes = R * kTileRow, kBytes = kBoxes * kBoxBytes;

    // Called by one thread: issues the TMA load of a tile that starts at row `row` of a tensor (column, row, head,
    // sequence).
    RTK_DEVICE static void fetch(ptx::SharedAddress to, const ptx::TensorMap& map, ptx::SharedAddress full, int row, int head,
                                 int batch) {
#pragma unroll
        for (int i = 0; i < kBoxes; ++i) ptx::tma_load_4d(to + i * kBoxBytes, map, full, 64 * i, row, head, batch);
    }

    // Called by a warp, for a tile with the last keys of a sequence: loads the tile, waits, and clears its rows from
    // `rows` on. These belong to another sequence or to none and may be NaN, which a probability of 0 does not hide.
    // `patch` is a barrier for this alone, `parity` that of its phase.
    RTK_DEVICE static void fetch_some(ptx::SharedAddress to, const ptx::TensorMap& map, ptx::SharedAddress patch, u32& parity, int row,
                                      int head, int batch, int rows) {
        const u32 lane = threadIdx.x % kWarp;
        if (lane == 0) {
            ptx::mbarrier_arrive_expect(patch, kBytes);
            fetch(to, map, patch, row, head, batch);
        }
        ptx::mbarrier_wait(patch, parity);
        parity ^= 1u;
        for (u32 at = rows * kTileRow + lane * 16; at < kBoxBytes; at += kWarp * 16)
            for (int box = 0; box < kBoxes; ++box) ptx::st_shared_16(to + box * kBoxBytes + at, Raw<16>{{0, 0, 0, 0}});
        ptx::fence_async_shared();
    }
};

// d = a b^T (+ d if `add`): 64 rows of a [RA, D], whose first row starts at byte `a`, and b [RB, D], summed over D.
template <typename T, int RA, int RB, int D, int N>
RTK_DEVICE void multiply_rows(float (&d)[N], ptx::SharedAddress a, ptx::SharedAddress b, bool add = false) {
    static_assert(RB == 2 * N, "all rows of b");
    const u64 left = k_major_descriptor(a), right = k_major_descriptor(b);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        const u64 box = k / 4, step = k % 4 * kNextKMajor;
        ptx::wgmma_ss<T, false, false>(d, left + box * (RA * kTileRow >> 4) + step, right + box * (RB * kTileRow >> 4) + step,
                                       add || k != 0);
    }
}

// d += a b: a [64, R] from registers, 16 of R per four words (as pack_rows packs them), b [R, D], summed over R.
template <typename T, int R, int N>
RTK_DEVICE void multiply_packed(float (&d)[N], const u32 (&a)[R / 16][4], ptx::SharedAddress b, bool add) {
    const u64 right = ptx::matrix_descriptor(b, R * kTileRow);
#pragma unroll
    for (int k = 0; k < R / 16; ++k) ptx::wgmma_rs<T, true>(d, a[k], right + k * kNextColumnMajor, add || k != 0);
}

// Packs the accumulators of a product as the first operand of the next one.
template <typename T, int N>
RTK_DEVICE void pack_rows(u32 (&to)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int k = 0; k < N / 8; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[k][i] = packed_pair<T>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// Transposes the words of a quad: word i of lane t becomes word t of lane i. Where pairs of columns are 8 columns apart,
// each lane then has 8 neighbours, and the other way round. All lanes of a warp must call this.
RTK_DEVICE void exchange_in_quad(u32 (&w)[4]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(0xffffffffu, t & 1 ? w[i] : w[i + 1], 1);
        (t & 1 ? w[i] : w[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(0xffffffffu, t & 2 ? w[i] : w[i + 2], 2);
        (t & 2 ? w[i] : w[i + 2]) = got;
    }
}

// Stores two accumulator rows of this thread, each at an address of its own (null: no such row), times times[r], rounded,
// and the first `columns` columns, a multiple of 8. The four lanes of a quad exchange pairs until each has 8 neighbours,
// 16 bytes; addresses are aligned to that. All lanes of a warp must call this.
template <typename T, int N>
RTK_DEVICE void store_rows_at(T* const (&to)[2], int columns, const float (&d)[N], const float (&times)[2]) {
    static_assert(N % 16 == 0, "32 columns at a time");
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < N / 4; j += 4) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                w[i] = packed_pair<T>(d[4 * (j + i) + 2 * r] * times[r], d[4 * (j + i) + 2 * r + 1] * times[r]);
            exchange_in_quad(w);
            if (to[r] != nullptr && 8 * (j + t) < columns) ptx::st<16>(to[r] + 8 * (j + t), Raw<16>{{w[0], w[1], w[2], w[3]}});
        }
    }
}

// The same for rows `row` and `row` + 8 of those from `to` on, of which `rows` exist.
template <typename T, int N>
RTK_DEVICE void store_rows(T* to, i64 stride, int row, int rows, int columns, const float (&d)[N], const float (&times)[2]) {
    T* const both[2] = {row < rows ? to + row * stride : nullptr, row + 8 < rows ? to + (row + 8) * stride : nullptr};
    store_rows_at<T>(both, columns, d, times);
}

// The same, not rounded: parts of sums.
template <int N>
RTK_DEVICE void store_rows(float* to, i64 stride, int row, int rows, int columns, const float (&d)[N], const float (&times)[2]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < N / 4; ++j)
            if (row + 8 * r < rows && 8 * j < columns)
                *reinterpret_cast<float2*>(to + (row + 8 * r) * stride + 8 * j + 2 * t) =
                    make_float2(d[4 * j + 2 * r] * times[r], d[4 * j + 2 * r + 1] * times[r]);
}

// An element of a bias: kind 1 bf16, 2 fp16, 3 fp32.
RTK_DEVICE float bias_at(const void* bias, int kind, i64 index) {
    float value[1];
    if (kind == 1) {
        load_keep<bf16, 1>(static_cast<const bf16*>(bias) + index, value);
    } else if (kind == 2) {
        load_keep<fp16, 1>(static_cast<const fp16*>(bias) + index, value);
    } else {
        value[0] = static_cast<const float*>(bias)[index];
    }
    return value[0];
}

// Turns products into scores in units of log2, with a soft-cap unless it is 0; a negative one clips scores at its
// magnitude.
template <int N>
RTK_DEVICE void make_scores(float (&s)[N], float scale, float softcap) {
    if (softcap <= 0.0f) {
        const float times = scale * kLog2e, ceiling = softcap < 0.0f ? -softcap * kLog2e : -negative_infinity();
#pragma unroll
        for (float& x : s) x = fmin_nan(x * times, ceiling);
    } else {
        const float inside = scale / softcap, outside = softcap * kLog2e;
#pragma unroll
        for (float& x : s) x = outside * tanh_by_ex2(x * inside);
    }
}

// Keeps columns from..end - 1, counted from this thread's first one, of its row r, and masks the others.
template <int N>
RTK_DEVICE void mask_row(float (&s)[N], int r, int from, int end) {
#pragma unroll
    for (int j = 0; j < N / 4; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
            if (8 * j + c < from || 8 * j + c >= end) s[4 * j + 2 * r + c] = negative_infinity();
}

// The order in which blocks take query tiles: `heads_together` heads (of all sequences) share L2; within these the last
// query tiles come first, because causal masks leave them the most keys.
struct QueryTile {
    int m, head, batch;

    RTK_DEVICE QueryTile(u32 index, u32 tiles, u32 heads, u32 batches, u32 heads_together) {
        const u32 all = heads * batches, band = index / (heads_together * tiles), first = band * heads_together;
        const u32 here = min(heads_together, all - first), inside = index - first * tiles;
        const u32 step = inside / here, which = first + inside - step * here;
        m = static_cast<int>(tiles - 1 - step);
        batch = static_cast<int>(which / heads);
        head = static_cast<int>(which - batch * heads);
    }
};

// The query of a row of a tile, where rows are `bundle` heads of each query.
RTK_DEVICE int query_of(int row, int bundle) { return bundle == 1 ? row : row / bundle; }

// Keys that any of `rows` queries from row0 on sees, and keys that all 64 rows of warpgroup `group` see.
struct WarpgroupRows {
    Mask mask;
    int row0;
    Interval any, all;

    RTK_DEVICE WarpgroupRows(const Mask& of, int first, int rows, int group, int bundle = 1)
        : mask(of), row0(first), any(of.keys_any(first, first + rows)),
          all(of.keys_all(first + query_of(group * 64, bundle), first + query_of(group * 64 + 63, bundle) + 1)) {}
};

}  // namespace rtk
