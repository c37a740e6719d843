// Shared by the kernels that move rows between tokens and experts. A row outside [0, row_count) is a dropped choice: it
// is never touched, whatever the index holds.
#pragma once
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kChoices = 8;  // of a token, handled together

RTK_DEVICE i32 load_row(const i32* place, i64 row_count) {
    const i32 row = static_cast<i32>(ptx::ld_keep<4>(place).w[0]);
    return static_cast<u32>(row) < static_cast<u32>(row_count) ? row : -1;
}

// One number per choice, of a type known at run time.
enum ProbKind : i64 { kProbFloat = 0, kProbBf16 = 1, kProbFp16 = 2 };

// The probabilities of the choices: [tokens, top_k], or [tokens, experts] with `experts` saying which column.
struct Probs {
    const u8* data;
    const i32* experts;  // null: one per choice
    i64 kind, columns;
    int top_k;

    RTK_DEVICE int bytes() const { return kind == kProbFloat ? 4 : 2; }

    // Address of a choice's number; null if its expert does not exist.
    RTK_DEVICE const u8* place(i64 token, int choice) const {
        i64 column = choice;
        if (experts != nullptr) {
            column = static_cast<i32>(ptx::ld_keep<4>(experts + token * top_k + choice).w[0]);
            if (static_cast<u64>(column) >= static_cast<u64>(columns)) return nullptr;
        }
        return data + (token * columns + column) * bytes();
    }
    RTK_DEVICE u32 bits(const u8* p) const {
        return kind == kProbFloat ? ptx::ld_keep<4>(p).w[0] : ptx::ld_keep<2>(p).w[0];
    }
    RTK_DEVICE float value(const u8* p) const {
        if (kind == kProbFloat) return __uint_as_float(ptx::ld_keep<4>(p).w[0]);
        const Raw<2> raw = ptx::ld_keep<2>(p);
        float v[1];
        if (kind == kProbBf16) {
            unpack<bf16, 1>(raw, v);
        } else {
            unpack<fp16, 1>(raw, v);
        }
        return v[0];
    }
};

RTK_DEVICE void store_prob_bits(u8* p, i64 kind, u32 bits) {
    if (kind == kProbFloat) {
        ptx::st<4>(p, Raw<4>{bits});
    } else {
        ptx::st<2>(p, Raw<2>{bits});
    }
}

RTK_DEVICE void store_prob(u8* p, i64 kind, float value) {
    const float v[1] = {value};
    if (kind == kProbFloat) {
        ptx::st<4>(p, pack<float, 1>(v));
    } else {
        ptx::st<2>(p, kind == kProbBf16 ? pack<bf16, 1>(v) : pack<fp16, 1>(v));
    }
}

// Choices of one token, one per lane of the warp: 32 of them, from choice `first` on.
struct Choices {
    i32 row;       // -1: none
    float weight;  // 0 where there is no row; 1 without probabilities

    RTK_DEVICE void load(const i32* own, int first, int top_k, i64 row_count) {
        const int j = first + static_cast<int>(threadIdx.x) % kWarp;
        row = j < top_k ? load_row(own + j, row_count) : -1;
        weight = 1.0f;
    }
    RTK_DEVICE void load_weight(const Probs& probs, i64 token, int first) {
        const u8* place = nullptr;
        if (row >= 0) place = probs.place(token, first + static_cast<int>(threadIdx.x) % kWarp);
        weight = place == nullptr ? 0.0f : probs.value(place);
    }
    // Row and weight of the choice that lane c holds; the whole warp calls this. c is a compile-time constant: no
    // register for it.
    RTK_DEVICE i32 row_of(int c) const { return __shfl_sync(0xffffffffu, row, c); }
    RTK_DEVICE float weight_of(int c) const { return __shfl_sync(0xffffffffu, weight, c); }
    // The choices after the first `count`.
    RTK_DEVICE void advance(int count) {
        row = __shfl_down_sync(0xffffffffu, row, count);
        weight = __shfl_down_sync(0xffffffffu, weight, count);
    }
};

// Zeros for the rows that no choice fills (slots < 0). Each warp of the first `pad_blocks` blocks checks 32 rows;
// neighbouring ones belong to different blocks, so that many blocks share a long stretch of such rows.
template <int BYTES, typename Each>
RTK_DEVICE void clear_pad_rows(const i32* slots, u8* y, i64 row_count, i64 units, i64 pad_blocks, const Each& each) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const i64 first = (threadIdx.x / kWarp * pad_blocks + blockIdx.x) * kWarp;
    if (first >= row_count) return;
    const bool pad = first + lane < row_count && slots[first + lane] < 0;
    if (pad) each(first + lane);
    Raw<BYTES> zeros;
    clear(zeros);
#pragma unroll 1
    for (int r = 0; r < kWarp; ++r) {
        if (!__shfl_sync(0xffffffffu, pad ? 1 : 0, r)) continue;
        u8* target = y + (first + r) * units * BYTES;
        for (i64 unit = lane; unit < units; unit += kWarp) ptx::st<BYTES>(target + unit * BYTES, zeros);
    }
}

}  // namespace rtk
