// Coordinates of units of up to four dimensions, and indices that name one of `n` places.
#pragma once
#include "common/abi.cuh"

namespace rtk {

struct Coordinates {
    i64 c0, c1, c2, c3;

    RTK_DEVICE i64 dot(i64 s0, i64 s1, i64 s2, i64 s3) const { return c0 * s0 + c1 * s1 + c2 * s2 + c3 * s3; }
};

// Dividers are those of ``divided``, for fewer than 2^31 units; divider3 is 0 for more.
RTK_DEVICE Coordinates coordinates_at(i64 at, i64 size1, i64 size2, i64 size3, i64 divider1, i64 divider2,
                                      i64 divider3) {
    Coordinates c;
    if (divider3 != 0) {
        const u32 rest2 = divided(static_cast<u32>(at), divider3), rest1 = divided(rest2, divider2);
        const u32 rest0 = divided(rest1, divider1);
        c.c3 = static_cast<u32>(at) - rest2 * static_cast<u32>(size3);
        c.c2 = rest2 - rest1 * static_cast<u32>(size2);
        c.c1 = rest1 - rest0 * static_cast<u32>(size1), c.c0 = rest0;
    } else {
        const i64 rest2 = at / size3, rest1 = rest2 / size2, rest0 = rest1 / size1;
        c.c3 = at - rest2 * size3, c.c2 = rest2 - rest1 * size2, c.c1 = rest1 - rest0 * size1, c.c0 = rest0;
    }
    return c;
}

RTK_DEVICE i64 index_at(const void* index, i64 place, i64 is_int64) {
    return is_int64 ? static_cast<const i64*>(index)[place] : static_cast<const i32*>(index)[place];
}

// Traps for an index outside of 0 ... n - 1, as torch does; with `from_end` negative ones count from the end.
RTK_DEVICE i64 checked_index(i64 i, i64 from_end, i64 n) {
    if (from_end && i < 0) i += n;
    if (static_cast<u64>(i) >= static_cast<u64>(n)) __trap();
    return i;
}

}  // namespace rtk
