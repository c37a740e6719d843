// Rotation factors of a token's heads, in shared memory.
#pragma once
#include "rope/head_chunks.cuh"

namespace rtk {

// The factors of a token's q heads and of its k heads in shared memory, by chunks of a head.
template <int N>
struct StagedRotations {
    u8* memory;
    int lanes;

    RTK_DEVICE Raw<16>& word(int part, int i, int chunk) const {
        return reinterpret_cast<Raw<16>*>(memory)[(part * (N / 2) + i) * lanes + chunk];
    }

    RTK_DEVICE void put(int part, int chunk, const ChunkRotation<N>& rotation) const {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            Raw<16> four;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                four.w[j] = __float_as_uint(4 * i < N ? rotation.own[(4 * i + j) % N] : rotation.cross[(4 * i + j) % N]);
            word(part, i, chunk) = four;
        }
    }

    RTK_DEVICE void put(int part, int element, float own, float cross) const {
        const int i = element % N / 4, j = element % 4;
        word(part, i, element / N).w[j] = __float_as_uint(own);
        word(part, N / 4 + i, element / N).w[j] = __float_as_uint(cross);
    }

    RTK_DEVICE void get(int part, int chunk, ChunkRotation<N>& rotation) const {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const Raw<16> four = word(part, i, chunk);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                (4 * i < N ? rotation.own : rotation.cross)[(4 * i + j) % N] = __uint_as_float(four.w[j]);
        }
    }
};

}  // namespace rtk
