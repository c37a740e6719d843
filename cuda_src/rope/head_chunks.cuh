// Rotary position embedding: which elements of a head a thread rotates, and how (rotations: rope/angles.cuh).
#pragma once
#include "rope/angles.cuh"

namespace rtk {

inline constexpr int kHalves = 0;    // pairs (i, i + rotary / 2), in and out
inline constexpr int kAdjacent = 1;  // pairs (2 i, 2 i + 1), in and out
inline constexpr int kGather = 2;    // adjacent in, halves out
inline constexpr int kScatter = 3;   // halves in, adjacent out

// A thread ("lane" of the group that works on a head) owns two chunks of N elements. The first rotary / (2 N) lanes
// have the rotary part, so that both elements of a pair belong to them; the others share the rest, an even number of
// chunks. Offsets are in elements from the start of the head.
template <int N, int PAIRS>
struct HeadChunks {
    int in_a, in_b, out_a, out_b;
    bool rotated, any;

    // The rotary part is [first, first + rotary) of the head; spare_chunks are left beside it.
    RTK_DEVICE HeadChunks(int lane, int first, int rotary, int spare_chunks) {
        const int rotary_lanes = rotary / 2 / N;
        rotated = lane < rotary_lanes;
        any = lane < rotary_lanes + spare_chunks / 2;
        if (rotated) {
            const int near = first + lane * N, far = first + rotary / 2 + lane * N;
            const int together = first + lane * 2 * N;
            in_a = PAIRS == kGather ? together : near;
            in_b = PAIRS == kGather ? together + N : far;
            out_a = PAIRS == kScatter ? together : near;
            out_b = PAIRS == kScatter ? together + N : far;
        } else {
            const int a = (lane - rotary_lanes) * N, b = a + spare_chunks / 2 * N;
            in_a = out_a = a < first ? a : a + rotary;
            in_b = out_b = b < first ? b : b + rotary;
        }
    }
};

// Rotates the N pairs of two chunks in place.
template <int N, int PAIRS>
RTK_DEVICE void rotate(const Rotation<N>& r, float (&a)[N], float (&b)[N]) {
    float x0[N], x1[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        constexpr int kRun = N > 1 ? N / 2 : 1;
        float* x = i < kRun ? a : b;
        const int at = 2 * (i % kRun);
        const bool adjacent = (PAIRS == kAdjacent || PAIRS == kGather) && N > 1;
        x0[i] = adjacent ? x[at] : a[i];
        x1[i] = adjacent ? x[at + 1] : b[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float out0 = x0[i] * r.own0[i] + x1[i] * r.cross0[i];
        const float out1 = x1[i] * r.own1[i] + x0[i] * r.cross1[i];
        constexpr int kRun = N > 1 ? N / 2 : 1;
        if constexpr ((PAIRS == kAdjacent || PAIRS == kScatter) && N > 1) {
            float* x = i < kRun ? a : b;
            x[2 * (i % kRun)] = out0;
            x[2 * (i % kRun) + 1] = out1;
        } else {
            a[i] = out0;
            b[i] = out1;
        }
    }
}

// ---- one chunk of a head per lane --------------------------------------------------------------------------------

// Factors of a chunk of N elements of the rotary part:  out = x * own + partner * cross, where partner holds the other
// element of each pair.
template <int N>
struct ChunkRotation {
    float own[N], cross[N];
};

// The chunk begins at element `column` of the rotary part. `adjacent`: pairs are neighbours, not halves apart. One
// position stream; table rows must allow accesses of N entries (half of that for neighbours, unless tables are full).
// Holds entries of the tables first, then (after finish_chunk_rotation) the factors.
template <typename T, int N>
RTK_DEVICE void load_chunk_rotation(const Angles& angles, i64 row, int column, bool adjacent, ChunkRotation<N>& rotation) {
    const int flags = angles.flags, half = angles.rotary / 2;
    const bool inverse = flags & kInverse, full = flags & kTableFull;
    if (row < 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) rotation.own[i] = rotation.cross[i] = __uint_as_float(0x7fffffffu);
        return;
    }
    const i64 at = row * angles.stride;
    if (!adjacent) {
        const int folded = column < half ? column : column - half;
        const int other = column < half ? column + half : column - half;
        load_entries<T, N>(angles.cos, at + (full ? column : folded), flags, rotation.own);
        load_entries<T, N>(angles.sin, at + (!full ? folded : inverse ? other : column), flags, rotation.cross);
    } else if (full) {
        load_entries<T, N>(angles.cos, at + column, flags, rotation.own);
        load_entries<T, N>(angles.sin, at + column, flags, rotation.cross);
    } else {
        float c[N / 2], s[N / 2];
        load_entries<T, N / 2>(angles.cos, at + column / 2, flags, c);
        load_entries<T, N / 2>(angles.sin, at + column / 2, flags, s);
#pragma unroll
        for (int i = 0; i < N; ++i) rotation.own[i] = c[i / 2], rotation.cross[i] = s[i / 2];
    }
}

template <int N>
RTK_DEVICE void finish_chunk_rotation(const Angles& angles, int column, bool adjacent, ChunkRotation<N>& rotation) {
    const bool inverse = angles.flags & kInverse;
    const float scale = angles.mscale;
    if (!adjacent) {
        const float factor = (column < angles.rotary / 2) != inverse ? -scale : scale;
#pragma unroll
        for (int i = 0; i < N; ++i) rotation.own[i] *= scale, rotation.cross[i] *= factor;
    } else {
        const float factor = inverse ? scale : -scale;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float s0 = rotation.cross[i], s1 = rotation.cross[i + 1];
            rotation.own[i] *= scale, rotation.own[i + 1] *= scale;
            rotation.cross[i] = (inverse ? s1 : s0) * factor;
            rotation.cross[i + 1] = (inverse ? s0 : s1) * -factor;
        }
    }
}

// Half of a chunk, which begins at element `column` of the rotary part (or before or after it): whether it is rotated,
// and the distance in bytes to the partners of its elements. Zero for pairs of neighbours, which share a chunk.
template <typename T>
struct HalfChunk {
    bool rotated;
    int to_other;

    RTK_DEVICE HalfChunk(int column, int rotary, bool adjacent) {
        const int half = rotary / 2, bytes = half * static_cast<int>(sizeof(T));
        rotated = column >= 0 && column < rotary;
        to_other = adjacent || !rotated ? 0 : column < half ? bytes : -bytes;
    }
};

// The factors of a chunk whose halves may be in different parts of a head. Table rows must allow accesses of N / 2
// entries (half of that for neighbours, unless tables are full).
template <typename T, int N>
RTK_DEVICE void load_split_rotation(const Angles& angles, i64 row, int column, bool adjacent, bool lower, bool upper,
                                    ChunkRotation<N>& rotation) {
    ChunkRotation<N / 2> part[2];
    if (lower) load_chunk_rotation<T, N / 2>(angles, row, column, adjacent, part[0]);
    if (upper) load_chunk_rotation<T, N / 2>(angles, row, column + N / 2, adjacent, part[1]);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
        finish_chunk_rotation<N / 2>(angles, column + p * (N / 2), adjacent, part[p]);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            rotation.own[p * (N / 2) + i] = part[p].own[i];
            rotation.cross[p * (N / 2) + i] = part[p].cross[i];
        }
    }
}

// True if load_chunk_rotation, with float for T, can be the first thing a thread does: it then waits for nothing before
// finish_chunk_rotation, and its few bytes do not queue behind the heads. For fp32 tables and rows without an index.
template <typename T>
RTK_DEVICE bool tables_first(const Angles& angles) {
    return angles.is_direct() && (sizeof(T) == 4 || (angles.flags & kTableFp32));
}

// The partners of a chunk's elements, taken from `raw`: at the same positions, or (`adjacent`) `raw` is the chunk
// itself and they are its neighbours.
template <typename T>
RTK_DEVICE void unpack_others(Raw<16> raw, bool adjacent, float (&f)[16 / sizeof(T)]) {
    if constexpr (is_same<T, bf16>::value) {
        const u32 upper_half = adjacent ? 0x3244u : 0x1044u, lower_half = adjacent ? 0x1044u : 0x3244u;
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] = __uint_as_float(__byte_perm(raw.w[i / 2], 0u, i % 2 == 0 ? upper_half : lower_half));
    } else {
        const Raw<16> given = raw;
        if (adjacent) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                raw.w[i] = sizeof(T) == 2 ? __byte_perm(given.w[i], 0u, 0x1032u) : given.w[i ^ 1];
        }
        unpack<T, 16 / sizeof(T)>(raw, f);
    }
}

// Element offsets of one pair, for threads that own pairs and not chunks; `pairs` as PAIRS above.
struct PairPlace {
    int in_0, in_1, out_0, out_1;

    RTK_DEVICE PairPlace(int pair, int first, int rotary, int pairs) {
        const bool adjacent_in = pairs == kAdjacent || pairs == kGather;
        const bool adjacent_out = pairs == kAdjacent || pairs == kScatter;
        in_0 = first + (adjacent_in ? 2 * pair : pair);
        in_1 = in_0 + (adjacent_in ? 1 : rotary / 2);
        out_0 = first + (adjacent_out ? 2 * pair : pair);
        out_1 = out_0 + (adjacent_out ? 1 : rotary / 2);
    }
};

// Word by word: for `= {}` of several of them the compiler loads zeros from global memory.
RTK_DEVICE void clear(Raw<16>& raw) {
#pragma unroll
    for (int i = 0; i < 4; ++i) raw.w[i] = 0u;
}

// One element.
template <typename T>
RTK_DEVICE float load_one(const T* p) {
    float value[1];
    load_keep<T, 1>(p, value);
    return value[0];
}

template <typename T>
RTK_DEVICE void store_one(T* p, float v) {
    const float value[1] = {v};
    store<T, 1>(p, value);
}

// A weight of T or fp32.
template <typename T>
RTK_DEVICE float load_weight(const void* weight, int column, bool weight_fp32, float offset) {
    if (weight == nullptr) return 1.0f;
    return offset + (weight_fp32 ? load_one(static_cast<const float*>(weight) + column)
                          : load_one(static_cast<const T*>(weight) + column));
}

}  // namespace rtk
