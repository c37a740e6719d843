// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011): four random words for a counter under a key, without state.
#pragma once
#include "common/abi.cuh"

namespace rtk {

struct RandomWords {
    u32 w[4];
};

// `seed` is the key; `counter` and `offset` are the two halves of the Philox counter.
RTK_DEVICE RandomWords philox(u64 seed, u64 counter, u64 offset) {
    u32 c0 = static_cast<u32>(counter), c1 = static_cast<u32>(counter >> 32);
    u32 c2 = static_cast<u32>(offset), c3 = static_cast<u32>(offset >> 32);
    u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 left = static_cast<u64>(0xD2511F53u) * c0, right = static_cast<u64>(0xCD9E8D57u) * c2;
        c0 = static_cast<u32>(right >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(right);
        c2 = static_cast<u32>(left >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(left);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// [0, 1): 24 bits.
RTK_DEVICE float unit(u32 word) { return static_cast<float>(word >> 8) * 0x1p-24f; }
// (0, 1): neither end, so that logarithms are finite and not 0.
RTK_DEVICE float open_unit(u32 word) { return (static_cast<float>(word >> 9) + 0.5f) * 0x1p-23f; }

}  // namespace rtk
