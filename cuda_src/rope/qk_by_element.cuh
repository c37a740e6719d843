// Pairs of elements that are halves apart, where a half is not a whole number of 16-byte chunks (or neighbours, where
// the rotary part is not): a chunk may then contain elements of both halves and of the part that is not rotated, so
// each element has its own table entry, and each 4-byte word its own partner address. Halves are whole words.
#pragma once
#include "rope/qk_norm_rope.cuh"

namespace rtk {

inline constexpr int kByElement = 4;  // in place of kHalves and kAdjacent: each element of a chunk finds its own pair

// Distance from an element of a head to its partner; zero where there is none, or for pairs of neighbours, which are in
// the same word or chunk.
RTK_DEVICE int to_other_half(int element, int half, bool adjacent) {
    return adjacent || element >= 2 * half ? 0 : element < half ? half : -half;
}

// Factors of the W elements of a word of the rotary part and of their partners; a chunk may have words of both halves
// of the rotary part and after it. One position stream; tables of Entry, of any alignment. Holds entries of the tables
// first, then (after finish_word) the factors.
template <int W>
struct WordFactors {
    float own[W], cross[W];
};

template <typename Entry, int W>
RTK_DEVICE void load_word_entries(const Angles& angles, i64 row, int column, bool adjacent, WordFactors<W>& word) {
    const int flags = angles.flags, half = angles.rotary / 2;
    const bool full = flags & kTableFull, neighbours = flags & kTableAdjacent, inverse = flags & kInverse;
    const int between = !full ? 0 : neighbours ? 1 : half;  // the two entries of a pair
    const int behind = !adjacent && column >= half;         // the word is in the second half
    const i64 at = row * angles.stride;
    const Entry* cos = static_cast<const Entry*>(angles.cos) + at;
    const Entry* sin = static_cast<const Entry*>(angles.sin) + at;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        const int second = adjacent ? (W == 1 ? column & 1 : i) : behind;
        const int pair = adjacent ? (column + i) / 2 : column - behind * half + i;
        const int first = full && neighbours ? 2 * pair : pair;
        word.own[i] = word.cross[i] = __uint_as_float(0x7fffffffu);
        if (row >= 0) {
            word.own[i] = load_one(cos + (first + second * between));
            word.cross[i] = load_one(sin + (first + (inverse ? second ^ 1 : second) * between));
        }
    }
}

template <int W>
RTK_DEVICE void finish_word(const Angles& angles, int column, bool adjacent, WordFactors<W>& word) {
    const bool inverse = angles.flags & kInverse;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        const bool second = adjacent ? (column + i) & 1 : column + i >= angles.rotary / 2;
        word.own[i] *= angles.mscale, word.cross[i] *= second != inverse ? angles.mscale : -angles.mscale;
    }
}

// The two chunks of a lane of a group. in_b is in_a where there is no second one.
template <int N, int PAIRS>
struct LaneChunks {
    int in_a, in_b;
    bool any, has_b, rotated;

    RTK_DEVICE bool lacks_b() const { return PAIRS == kByElement && !has_b; }

    RTK_DEVICE LaneChunks(int lane, int lanes, int rotary, int dim, bool in_group) {
        if constexpr (PAIRS == kByElement) {
            any = rotated = in_group;
            has_b = any && (lane + lanes) * N < dim;
            in_a = lane * N;
            in_b = has_b ? (lane + lanes) * N : in_a;
        } else {
            const HeadChunks<N, kHalves> own(lane, 0, rotary, (dim - rotary) / N);
            any = has_b = in_group && own.any;
            rotated = own.rotated;
            in_a = any ? own.in_a : 0, in_b = any ? own.in_b : 0;
        }
    }
};

// The rotations of the chunks that begin at elements a and b, as Rotation has them for kByElement: own0 and cross0 are
// for the elements of a and their partners, own1 and cross1 for those of b.
template <typename T, int N>
RTK_DEVICE void load_rotation_by_element(const Angles& angles, int batch, int place, int a, int b, bool adjacent,
                                         Rotation<N>& r) {
    constexpr int W = 4 / sizeof(T);
    const i64 row = angles.row(batch, place, 0);
    auto each_word = [&](int begin, auto work) {
#pragma unroll
        for (int i = 0; i < N; i += W)
            if (begin + i < angles.rotary) work(begin + i, i);
    };
    auto load = [&](auto entry, int begin, float(&own)[N], float(&cross)[N]) {
        each_word(begin, [&](int column, int i) {
            WordFactors<W> word;
            load_word_entries<decltype(entry), W>(angles, row, column, adjacent, word);
#pragma unroll
            for (int k = 0; k < W; ++k) own[i + k] = word.own[k], cross[i + k] = word.cross[k];
        });
    };
    auto load_both = [&](auto entry) {
        load(entry, a, r.own0, r.cross0);
        load(entry, b, r.own1, r.cross1);
    };
    auto finish = [&](int begin, float(&own)[N], float(&cross)[N]) {
        each_word(begin, [&](int column, int i) {
            WordFactors<W> word;
#pragma unroll
            for (int k = 0; k < W; ++k) word.own[k] = own[i + k], word.cross[k] = cross[i + k];
            finish_word<W>(angles, column, adjacent, word);
#pragma unroll
            for (int k = 0; k < W; ++k) own[i + k] = word.own[k], cross[i + k] = word.cross[k];
        });
    };
    // One branch for all entries: with one for each, the loads would wait for one another.
    if (sizeof(T) == 4 || (angles.flags & kTableFp32)) {
        load_both(float{});
    } else {
        load_both(T{});
    }
    finish(a, r.own0, r.cross0);
    finish(b, r.own1, r.cross1);
}

// Offsets of the partners of a chunk's four words, in bytes from the chunk: two per register.
struct OtherWords {
    u32 packed[2];

    // place(element) returns the address of a word of the head.
    template <typename T, typename Place>
    RTK_DEVICE static OtherWords of(int column, int half, bool adjacent, Place place) {
        u32 bytes[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int element = column + w * 4 / static_cast<int>(sizeof(T));
            bytes[w] = static_cast<u32>(place(element + to_other_half(element, half, adjacent)));
        }
        return {{(bytes[0] & 0xffffu) | bytes[1] << 16, (bytes[2] & 0xffffu) | bytes[3] << 16}};
    }
    RTK_DEVICE int operator[](int w) const {
        const int both = static_cast<int>(packed[w / 2]);
        return w % 2 == 0 ? both << 16 >> 16 : both >> 16;
    }
};

// Rotates the numbers of the chunk at `words`; their partners are at `others`.
template <typename T, int N>
RTK_DEVICE void rotate_by_element(const u8* words, const OtherWords& others, bool adjacent, const float (&own)[N],
                                const float (&cross)[N], float (&g)[N]) {
    Raw<16> raw;
#pragma unroll
    for (int w = 0; w < 4; ++w) raw.w[w] = *reinterpret_cast<const u32*>(words + others[w]);
    float partner[N];
    unpack_others<T>(raw, adjacent, partner);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = g[i] * own[i] + partner[i] * cross[i];
}

}  // namespace rtk
