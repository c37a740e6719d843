// Pairs of a head's elements that are halves apart, where a half is no whole number of 16-byte chunks (or neighbours, where
// the rotary part is none): a chunk may then have elements of both halves and of what is not rotated, so that each element
// has its own entry of the tables, and each 4-byte word its own place where the other elements of its pairs are. Halves
// are whole words.
#pragma once
#include "rope/qk_norm_rope.cuh"

namespace rtk {

inline constexpr int kByElement = 4;  // in place of kHalves and kAdjacent: each element of a chunk finds its own pair

// From an element of a head to the other one of its pair; zero where there is none, or for pairs of neighbours, which
// are found in the same word or chunk.
RTK_DEVICE int to_other_half(int element, int half, bool adjacent) {
    return adjacent || element >= 2 * half ? 0 : element < half ? half : -half;
}

// What one element of a head is multiplied with, and the other one of its pair: for chunks whose elements may lie in both
// halves of the rotary part and behind it. One position stream; tables of Entry, of any alignment.
struct ElementTurn {
    float own, cross;
};

template <typename Entry>
RTK_DEVICE ElementTurn load_element_turn(const Angles& angles, i64 row, int element, bool adjacent) {
    const int flags = angles.flags, half = angles.rotary / 2;
    const bool full = flags & kTableFull, neighbours = flags & kTableAdjacent, inverse = flags & kInverse;
    const int second = adjacent ? element & 1 : element >= half;
    const int pair = adjacent ? element / 2 : element - second * half;
    const int of_sin = inverse ? second ^ 1 : second;
    auto entry = [&](int of) { return !full ? pair : neighbours ? 2 * pair + of : pair + of * half; };
    float c = 1.0f, s = 0.0f;
    if (element < 2 * half) {
        c = s = __uint_as_float(0x7fffffffu);
        if (row >= 0) {
            c = load_one(static_cast<const Entry*>(angles.cos) + row * angles.stride + entry(second));
            s = load_one(static_cast<const Entry*>(angles.sin) + row * angles.stride + entry(of_sin));
        }
        c *= angles.mscale, s *= (second != 0) != inverse ? angles.mscale : -angles.mscale;
    }
    return {c, s};
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
            const Pieces<N, kHalves> own(lane, 0, rotary, (dim - rotary) / N);
            any = has_b = in_group && own.any;
            rotated = own.rotated;
            in_a = any ? own.in_a : 0, in_b = any ? own.in_b : 0;
        }
    }
};

// The rotations of the chunks that begin at elements a and b, as Rotation has them for kByElement: own0 and cross0 are for
// the elements of a and those that form pairs with them, own1 and cross1 for those of b.
template <typename T, int N>
RTK_DEVICE void load_rotation_by_element(const Angles& angles, int batch, int place, int a, int b, bool adjacent,
                                         Rotation<N>& r) {
    const i64 row = angles.row(batch, place, 0);
    auto load = [&](auto entry) {
        using Entry = decltype(entry);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const ElementTurn of_a = load_element_turn<Entry>(angles, row, a + i, adjacent);
            const ElementTurn of_b = load_element_turn<Entry>(angles, row, b + i, adjacent);
            r.own0[i] = of_a.own, r.cross0[i] = of_a.cross, r.own1[i] = of_b.own, r.cross1[i] = of_b.cross;
        }
    };
    // One branch for all entries: with one for each, the loads wait for one another.
    if (sizeof(T) == 4 || (angles.flags & kTableWide)) {
        load(float{});
    } else {
        load(T{});
    }
}

// Where the other elements of the pairs of a chunk's four words are, in bytes from the chunk: two in a register.
struct OtherWords {
    u32 packed[2];

    // place(element) tells where a word of the head is.
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

// Rotates the numbers of the chunk at `words`; those that form pairs with them are at `others`.
template <typename T, int N>
RTK_DEVICE void turn_by_element(const u8* words, const OtherWords& others, bool adjacent, const float (&own)[N],
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
