// Rotary position embedding: the rotation of a token.
//
// Pair p of a head's rotary part (`rotary` elements, p < rotary / 2) is rotated by the angle in row `row(token)` of two
// tables, cos and sin. A table row has one entry per pair, or one per element ("full": the two elements of a pair may
// then have different angles), in the order in which the rotation leaves the elements:
//     out0 = x0 * cos0 - x1 * sin0,   out1 = x1 * cos1 + x0 * sin1
// The inverse is the adjoint of that: out0 = x0 * cos0 + x1 * sin1, out1 = x1 * cos1 - x0 * sin0. A row outside the
// tables gives NaN, never an out-of-bounds access.
#pragma once
#include "common/vec.cuh"

namespace rtk {

inline constexpr int kTableFp32 = 1;      // tables are fp32, not T
inline constexpr int kTableFull = 2;      // one entry per element
inline constexpr int kTableAdjacent = 4;  // full tables hold the two entries of a pair side by side
inline constexpr int kIndexInt64 = 8;     // index is i64, not i32
inline constexpr int kInverse = 16;

inline constexpr int kByPlace = 0;      // row = position in the sequence
inline constexpr int kByToken = 1;      // row = token: tables [batch, length, ...]
inline constexpr int kByPosition = 2;   // row = index[stream, batch, place]
inline constexpr int kBySequence = 3;   // index holds where packed sequences begin: row = position in its sequence

inline constexpr int kOneStream = 0;
inline constexpr int kBlocks = 1;       // three position streams, each for neighbouring pairs
inline constexpr int kInterleaved = 2;  // pair p belongs to stream p % 3, to stream 0 where that one is used up

struct Angles {
    const void *cos, *sin, *index;
    i64 rows, stride;  // of the tables
    i64 stream_rows;   // rows between position streams (tables that have all three)
    i64 index_step;    // entries between batches in index
    int flags, kind;
    int index_count;   // entries of index: those of one stream, or all sequence starts
    int section_kind, section_0, section_1, section_2;
    int rotary, length;
    int cp_rank, cp_size;  // context parallelism: this rank has parts rank and 2 * size - 1 - rank of each sequence
    float mscale;

    RTK_DEVICE i64 entry(i64 at) const {
        if (flags & kIndexInt64) return static_cast<const i64*>(index)[at];
        return static_cast<const i32*>(index)[at];
    }

    RTK_DEVICE i64 zigzag(i64 offset, i64 count) const {
        if (cp_size == 1) return offset;
        const i64 half = count / 2;
        return offset < half ? offset + cp_rank * half : offset - half + (2 * cp_size - 1 - cp_rank) * half;
    }

    // Position of a packed token in its sequence. index holds the starts (and the end) before context parallelism.
    RTK_DEVICE i64 in_sequence(int token) const {
        const i64 reach = static_cast<i64>(token) * cp_size;
        int low = 0, high = index_count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (entry(middle) <= reach) {
                low = middle;
            } else {
                high = middle;
            }
        }
        i64 start = entry(low), end = entry(high < index_count ? high : low);
        if (cp_size != 1) {  // 32 bits: a 64-bit division is a function call, with registers saved around it
            start = static_cast<u32>(start) / static_cast<u32>(cp_size);
            end = static_cast<u32>(end) / static_cast<u32>(cp_size);
        }
        return zigzag(token - start, end - start);
    }

    // Checked before the stream is added: a row of another stream is as wrong as one outside the table.
    RTK_DEVICE i64 checked(i64 row, int stream) const {
        const i64 limit = stream_rows == 0 ? rows : stream_rows;
        return row >= 0 && row < limit ? row + stream * stream_rows : -1;
    }

    // The row of stream 0, if it does not come from an index.
    RTK_DEVICE bool is_direct() const { return kind == kByPlace || kind == kByToken; }
    RTK_DEVICE i64 direct_row(int batch, int place) const {
        return checked(kind == kByPlace ? zigzag(place, length) : static_cast<i64>(batch) * length + place, 0);
    }

    RTK_DEVICE i64 row(int batch, int place, int stream) const {
        i64 row;
        if (kind == kByPlace) {
            row = zigzag(place, length);
        } else if (kind == kByToken) {
            row = static_cast<i64>(batch) * length + place;
        } else if (kind == kByPosition) {
            row = entry(static_cast<i64>(stream) * index_count + batch * index_step + place);
        } else {
            row = in_sequence(place);
        }
        return checked(row, stream);
    }

    RTK_DEVICE int stream_of(int pair) const {
        if (section_kind == kOneStream) return 0;
        if (section_kind == kBlocks) return pair < section_0 ? 0 : pair < section_0 + section_1 ? 1 : 2;
        const int stream = pair % 3;
        return stream == 1 && pair < 3 * section_1 ? 1 : stream == 2 && pair < 3 * section_2 ? 2 : 0;
    }
};

// The last arguments of every kernel that rotates.
struct AngleArguments {
    const void *cos, *sin, *index;
    i64 table_rows, table_stride, stream_rows, angle_flags, index_kind, index_count, index_step, section_kind,
        section_0, section_1, section_2, rotary, cp_rank, cp_size;
    double mscale;

    RTK_DEVICE Angles of(i64 length) const {
        return {cos, sin, index, table_rows, table_stride, stream_rows, index_step, static_cast<int>(angle_flags),
                static_cast<int>(index_kind), static_cast<int>(index_count), static_cast<int>(section_kind),
                static_cast<int>(section_0), static_cast<int>(section_1), static_cast<int>(section_2),
                static_cast<int>(rotary), static_cast<int>(length), static_cast<int>(cp_rank),
                static_cast<int>(cp_size), static_cast<float>(mscale)};
    }
};

// N consecutive entries of a table.
template <typename T, int N>
RTK_DEVICE void load_entries(const void* table, i64 at, int flags, float (&f)[N]) {
    if constexpr (sizeof(T) < 4) {
        if (!(flags & kTableFp32)) {
            load_keep<T, N>(static_cast<const T*>(table) + at, f);
            return;
        }
    }
    load_keep<float, N>(static_cast<const float*>(table) + at, f);
}

// Factors of N pairs:  out0 = x0 * own0 + x1 * cross0,  out1 = x1 * own1 + x0 * cross1.
template <int N>
struct Rotation {
    float own0[N], own1[N], cross0[N], cross1[N];
};

// A token's row in each position stream.
struct TokenRows {
    i64 row[3];

    RTK_DEVICE TokenRows(const Angles& angles, int batch, int place) {
        row[0] = row[1] = row[2] = angles.row(batch, place, 0);
        if (angles.section_kind != kOneStream) {
            row[1] = angles.row(batch, place, 1);
            row[2] = angles.row(batch, place, 2);
        }
    }
};

// The rotation of one pair: any alignment, any streams.
template <typename T>
RTK_DEVICE void load_pair(const Angles& angles, const TokenRows& rows, int pair, Rotation<1>& r) {
    const int flags = angles.flags;
    const int stream = angles.stream_of(pair);
    const i64 row = stream == 0 ? rows.row[0] : stream == 1 ? rows.row[1] : rows.row[2];
    float c0 = __uint_as_float(0x7fffffffu), c1 = c0, s0 = c0, s1 = c0;
    if (row >= 0) {
        const bool full = flags & kTableFull, adjacent = full && (flags & kTableAdjacent);
        const i64 at = row * angles.stride + (adjacent ? 2 * pair : pair);
        const i64 next = at + (adjacent ? 1 : full ? angles.rotary / 2 : 0);
        float value[1];
        load_entries<T, 1>(angles.cos, at, flags, value), c0 = value[0] * angles.mscale;
        load_entries<T, 1>(angles.cos, next, flags, value), c1 = value[0] * angles.mscale;
        load_entries<T, 1>(angles.sin, at, flags, value), s0 = value[0] * angles.mscale;
        load_entries<T, 1>(angles.sin, next, flags, value), s1 = value[0] * angles.mscale;
    }
    r.own0[0] = c0;
    r.own1[0] = c1;
    r.cross0[0] = flags & kInverse ? s1 : -s0;
    r.cross1[0] = flags & kInverse ? -s0 : s1;
}

// The rotations of the N pairs of chunk `chunk` (see HeadChunks). kSplit: half of its pairs are in the first half of
// the rotary part and half in the second; without it they are consecutive. One position stream; table rows must allow
// accesses of whole stretches of entries. With kSplit, full tables are adjacent, without it they are not.
template <typename T, int N, bool kSplit>
RTK_DEVICE void load_rotation(const Angles& angles, int batch, int place, int chunk, Rotation<N>& r) {
    static_assert(N > 1, "for single pairs there is load_pair");
    constexpr int kRun = kSplit ? N / 2 : N;
    const int half = angles.rotary / 2;
    const int flags = angles.flags;
    const i64 row = angles.row(batch, place, 0);
    float(&c0)[N] = r.own0;
    float(&c1)[N] = r.own1;
    float(&s0)[N] = r.cross0;
    float(&s1)[N] = r.cross1;
    const i64 at = row * angles.stride;
    if (row < 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) c0[i] = c1[i] = s0[i] = s1[i] = __uint_as_float(0x7fffffffu);
    } else if constexpr (kSplit) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int pair = (chunk * N + u * half) / 2;
            if (flags & kTableFull) {
                float c[N], s[N];
                load_entries<T, N>(angles.cos, at + 2 * pair, flags, c);
                load_entries<T, N>(angles.sin, at + 2 * pair, flags, s);
#pragma unroll
                for (int i = 0; i < kRun; ++i) {
                    c0[u * kRun + i] = c[2 * i], c1[u * kRun + i] = c[2 * i + 1];
                    s0[u * kRun + i] = s[2 * i], s1[u * kRun + i] = s[2 * i + 1];
                }
            } else {
                float c[kRun], s[kRun];
                load_entries<T, kRun>(angles.cos, at + pair, flags, c);
                load_entries<T, kRun>(angles.sin, at + pair, flags, s);
#pragma unroll
                for (int i = 0; i < kRun; ++i) {
                    c0[u * kRun + i] = c1[u * kRun + i] = c[i];
                    s0[u * kRun + i] = s1[u * kRun + i] = s[i];
                }
            }
        }
    } else {
        load_entries<T, N>(angles.cos, at + chunk * N, flags, c0);
        load_entries<T, N>(angles.sin, at + chunk * N, flags, s0);
        if (flags & kTableFull) {
            load_entries<T, N>(angles.cos, at + half + chunk * N, flags, c1);
            load_entries<T, N>(angles.sin, at + half + chunk * N, flags, s1);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) c1[i] = c0[i], s1[i] = s0[i];
        }
    }
    if (angles.mscale != 1.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            c0[i] *= angles.mscale;
            c1[i] *= angles.mscale;
            s0[i] *= angles.mscale;
            s1[i] *= angles.mscale;
        }
    }
    if (flags & kInverse) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float first = s0[i];
            r.cross0[i] = s1[i];
            r.cross1[i] = -first;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) r.cross0[i] = -s0[i];
    }
}

}  // namespace rtk
