// Token ids as the embedding kernels read them, and the sorted list of (row, token) pairs that they exchange.
#pragma once
#include "common/vec.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// The table holds the rows of ids start, start + 1, ... An id outside of it, or the padding id, has no row.
struct Tokens {
    const void* ids;
    bool ids_int64;  // i64, else i32
    i64 start, rows, padding;

    RTK_DEVICE i64 id(i64 token) const {
        return ids_int64 ? static_cast<const i64*>(ids)[token] : static_cast<const i32*>(ids)[token];
    }
    // Row of a token, -1 if it has none.
    RTK_DEVICE i64 row_of(i64 id) const {
        const u64 row = static_cast<u64>(id) - static_cast<u64>(start);
        return row < static_cast<u64>(rows) && id != padding ? static_cast<i64>(row) : -1;
    }
};

inline constexpr int kFillVectors = 16;  // of 16 bytes, in a thread

// Zeros in the part of a block of THREADS threads.
template <int THREADS>
RTK_DEVICE void fill_zeros(u8* memory, i64 bytes, i64 block) {
    Raw<16> zeros;
    clear(zeros);
    const i64 vectors = bytes / 16;
    const i64 first = block * THREADS * kFillVectors + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kFillVectors; ++k) {
        const i64 at = first + k * THREADS;
        if (at < vectors) ptx::st<16>(memory + at * 16, zeros);
    }
    if (block == 0 && threadIdx.x < bytes % 16) memory[vectors * 16 + threadIdx.x] = 0;
}

// One element of the list: the row in the lower half, the token in the upper one.
RTK_DEVICE i64 list_entry(i32 row, u32 token) {
    return static_cast<i64>(static_cast<u64>(token) << 32 | static_cast<u32>(row));
}
RTK_DEVICE i32 entry_row(i64 entry) { return static_cast<i32>(entry & 0xffffffff); }
RTK_DEVICE u32 entry_token(i64 entry) { return static_cast<u32>(static_cast<u64>(entry) >> 32); }

}  // namespace rtk
