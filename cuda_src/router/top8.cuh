// The eight largest numbers of a row of up to 256 columns, largest first, equal ones by column, by eight lanes: a warp
// has four rows at a time.
//
// Columns are in groups of four neighbours, eight groups per lane. The eight largest are in the eight groups with the
// largest maxima (ties by position): sorting networks find these first, each lane then takes one of them, and networks
// sort their 32 numbers. The sort keys, smallest first, are the distance of a number from the largest one, with its
// position in the low bits; so no two are equal. Large distances lose their last bits: rows of fp32 numbers where that
// could make a difference, very few, are checked again. 16-bit numbers have none to lose.
#pragma once
#include "ptx/forget.cuh"
#include "router/scores.cuh"
#include "router/select.cuh"

namespace rtk {

inline constexpr int kOctet = 8;       // lanes of a row, and what they find
inline constexpr int kGroupWidth = 4;  // columns of a group
inline constexpr int kOctetColumns = kOctet * kOctet * kGroupWidth;

// A distance in 32 - PLACE_BITS bits, in the same order: exact in half of that range, beyond without some last bits.
template <int PLACE_BITS>
RTK_DEVICE u32 shortened(u32 distance) {
    return min(distance, (distance >> (PLACE_BITS + 1)) + (1u << (31 - PLACE_BITS)));
}

// The largest distance that becomes this or less.
template <int PLACE_BITS>
RTK_DEVICE u32 longest(u32 code) {
    const u32 half = 1u << (31 - PLACE_BITS);
    return code < half ? code : max(code, (code - half) << (PLACE_BITS + 1) | ((2u << PLACE_BITS) - 1u));
}

inline constexpr int kGroupBits = 6;
inline constexpr int kCandidateBits = 5;
inline constexpr u32 kExactGroup = 1u << (31 - kGroupBits);

RTK_DEVICE void order(u32& low, u32& high) {
    const u32 smaller = min(low, high);
    high = max(low, high);
    low = smaller;
}

RTK_DEVICE void sort4(u32 (&key)[4]) {
    order(key[0], key[1]), order(key[2], key[3]);
    order(key[0], key[2]), order(key[1], key[3]);
    order(key[1], key[2]);
}

RTK_DEVICE void sort8(u32 (&key)[8]) {
    order(key[0], key[2]), order(key[1], key[3]), order(key[4], key[6]), order(key[5], key[7]);
    order(key[0], key[4]), order(key[1], key[5]), order(key[2], key[6]), order(key[3], key[7]);
    order(key[0], key[1]), order(key[2], key[3]), order(key[4], key[5]), order(key[6], key[7]);
    order(key[2], key[4]), order(key[3], key[5]);
    order(key[1], key[4]), order(key[3], key[6]);
    order(key[1], key[2]), order(key[3], key[4]), order(key[5], key[6]);
}

// Sorts a bitonic sequence (rising, then falling, or the other way round).
RTK_DEVICE void sort_bitonic(u32 (&key)[8]) {
#pragma unroll
    for (int distance = 4; distance > 0; distance /= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if ((i & distance) == 0) order(key[i], key[i + distance]);
}

// From sorted keys of two lanes, whose numbers differ in bit `other`, the eight smallest, not yet sorted.
RTK_DEVICE void join(u32 (&key)[8], int other) {
    u32 theirs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) theirs[i] = __shfl_xor_sync(kAllLanes, key[i], other);
#pragma unroll
    for (int i = 0; i < 8; ++i) key[i] = min(key[i], theirs[7 - i]);
}

RTK_DEVICE u32 chosen_of(bool larger, u32 a, u32 b) { return larger ? max(a, b) : min(a, b); }

// One number of each of eight lanes, in ascending order.
RTK_DEVICE u32 sort_lanes(u32 mine, int lane) {
#pragma unroll
    for (int size = 2; size <= kOctet; size *= 2)
#pragma unroll
        for (int distance = size / 2; distance > 0; distance /= 2) {
            const bool up = size == kOctet || (lane & size) == 0, high = (lane & distance) != 0;
            mine = chosen_of(up == high, mine, __shfl_xor_sync(kAllLanes, mine, distance));
        }
    return mine;
}

template <typename Reduce>
RTK_DEVICE float octet_reduce(float value, Reduce reduce) {
#pragma unroll
    for (int offset = 1; offset < kOctet; offset *= 2) value = reduce(value, __shfl_xor_sync(kAllLanes, value, offset));
    return value;
}

// A group of numbers of SIZE bytes.
template <int SIZE>
RTK_DEVICE Raw<SIZE * kGroupWidth> load_group(const u8* from) {
    return ptx::ld_keep<SIZE * kGroupWidth>(from);
}

template <int SIZE>
RTK_DEVICE void unpack_group(const Raw<SIZE * kGroupWidth>& raw, int kind, float (&value)[kGroupWidth]) {
#pragma unroll
    for (int i = 0; i < kGroupWidth; ++i) {
        if constexpr (SIZE == 4) {
            value[i] = __uint_as_float(raw.w[i]);
        } else {
            value[i] = half_of(raw.w[i / 2] >> (i % 2 * 16) & 0xffffu, kind);
        }
    }
}

// What one of eight lanes knows about its row: `cols` numbers of SIZE bytes in whole groups, aligned to these.
template <int SIZE>
struct Octet {
    static constexpr int kBytes = SIZE * kGroupWidth;
    static constexpr u32 kMissing = ~0u;
    const u8* row;
    int cols, kind;
    int lane;            // of the eight
    Raw<kBytes> raw[8];  // its groups: number `lane` of every eight
    float top;           // the largest number of the row; NaN if there is one

    RTK_DEVICE Octet(const u8* row_of_x, i64 columns, int number_kind)
        : row(row_of_x), cols(static_cast<int>(columns)), kind(SIZE == 4 ? static_cast<int>(kFloat32) : number_kind),
          lane(static_cast<int>(threadIdx.x) % kOctet) {}

    // The first column of its group j.
    RTK_DEVICE int column_of(int j) const { return (8 * j + lane) * kGroupWidth; }
    RTK_DEVICE bool has(int j) const { return column_of(j) < cols; }

    // Numbers of missing groups are -inf.
    RTK_DEVICE void load() {
        const u8* from = row + lane * kBytes;
        ptx::forget(from);
        if (cols == kOctetColumns) {
#pragma unroll
            for (int j = 0; j < 8; ++j) raw[j] = load_group<SIZE>(from + j * (8 * kBytes));
        } else {
            const u32 nothing = SIZE == 4 ? 0xff800000u : kind == kBfloat16 ? 0xff80ff80u : 0xfc00fc00u;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
#pragma unroll
                for (u32& word : raw[j].w) word = nothing;
                if (has(j)) raw[j] = load_group<SIZE>(from + j * (8 * kBytes));
            }
        }
    }

    // Finds `top`, and the keys of the groups. The whole warp calls this.
    RTK_DEVICE void look() {
        float largest[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float value[kGroupWidth];
            unpack_group<SIZE>(raw[j], kind, value);
            const float low = ptx::max_nan(value[0], value[1]), high = ptx::max_nan(value[2], value[3]);
            largest[j] = ptx::canonical(ptx::max_nan(low, high));
        }
        float four[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] = ptx::max_nan(largest[j], largest[j + 4]);
        const float mine = ptx::max_nan(ptx::max_nan(four[0], four[1]), ptx::max_nan(four[2], four[3]));
        top = octet_reduce(mine, [](float a, float b) { return ptx::max_nan(a, b); });
        const u32 first = key_of_canonical(top);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            group[j] = (shortened<kGroupBits>(first - key_of_canonical(largest[j])) << kGroupBits) + lane + 8u * j;
        if (cols != kOctetColumns) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (!has(j)) group[j] = kMissing;
        }
    }

    // The column at place `lane` among the k largest, after `look`. The whole warp calls this, with its scratch.
    RTK_DEVICE int find(int k, Choice* scratch) {
        u32 mine = has(0) ? static_cast<u32>(lane) : kMissing;
        if (cols > kOctet * kGroupWidth) {  // more than one group for each lane
            const u32 best = best_group();
            mine = sort_lanes(best == kMissing ? best : best & 63u, lane);  // candidates in the order of columns
        }
        const u32 key = choose(mine);
        int column = static_cast<int>(__shfl_sync(kAllLanes, mine, key >> 2 & 7u, kOctet) * kGroupWidth + (key & 3u));
        if constexpr (SIZE == 4) {
            const u32 last = __shfl_sync(kAllLanes, key, k - 1, kOctet);
            const bool near = last >> kCandidateBits < kExactGroup;  // the distances of all that matters are exact
            if (__any_sync(kAllLanes, !near)) {
                const bool surely = sure(key, last, k);
                column = in_order(column, !near && !surely, k, scratch);
            }
        }
        return column;
    }

private:
    u32 group[8];      // keys of its groups
    u32 candidate[4];  // keys of the numbers of one of the best groups

    // One of the eight best groups' keys, a different one in each lane.
    RTK_DEVICE u32 best_group() const {
        u32 best[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) best[j] = group[j];
        sort8(best);
        join(best, 1);
        sort_bitonic(best);
        join(best, 2);
        sort_bitonic(best);
        // The last four lanes have the same eight in the opposite order.
        u32 four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = min(best[i], __shfl_xor_sync(kAllLanes, best[7 - i], 4));
        const u32 low = (lane & 1) ? four[1] : four[0], high = (lane & 1) ? four[3] : four[2];
        return (lane & 2) ? high : low;
    }

    // The key at place `lane` among those of the numbers of all lanes' groups.
    RTK_DEVICE u32 choose(u32 mine) {
        const bool missing = mine == kMissing;
        const u32 first = key_of_canonical(top);
        float value[kGroupWidth];
        unpack_group<SIZE>(load_group<SIZE>(row + (missing ? 0u : mine) * kBytes), kind, value);
        u32 four[4];
#pragma unroll
        for (int i = 0; i < kGroupWidth; ++i) {
            const u32 distance = first - key_of(value[i]);
            four[i] = (shortened<kCandidateBits>(distance) << kCandidateBits) + kGroupWidth * lane + i;
            if (missing) four[i] = kMissing;
            candidate[i] = four[i];
        }
        sort4(four);
        u32 best[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) best[i] = four[i], best[7 - i] = __shfl_xor_sync(kAllLanes, four[i], 1);
        sort_bitonic(best);
        join(best, 2);
        sort_bitonic(best);
        join(best, 4);
        // The last steps of sort_bitonic, for one place only.
#pragma unroll
        for (int i = 0; i < 4; ++i) best[i] = chosen_of((lane & 4) != 0, best[i], best[i + 4]);
#pragma unroll
        for (int i = 0; i < 2; ++i) best[i] = chosen_of((lane & 2) != 0, best[i], best[i + 2]);
        return chosen_of((lane & 1) != 0, best[0], best[1]);
    }

    // True if the first k, up to the key `last`, are the k largest in order although that key has lost bits: no two of
    // them, and nothing else, agree in the remaining bits.
    RTK_DEVICE bool sure(u32 key, u32 last, int k) const {
        const u32 next = __shfl_down_sync(kAllLanes, key, 1, kOctet), end = last | 31u;
        const u32 farthest = longest<kCandidateBits>(last >> kCandidateBits);
        const u32 group_end = shortened<kGroupBits>(farthest) << kGroupBits | 63u;
        // Three 8-bit numbers in one.
        u32 found = lane < k - 1 && (key ^ next) < 32u ? 1u << 16 : 0u;
#pragma unroll
        for (u32 c : candidate)
            if (c <= end) found += 1u << 8;
#pragma unroll
        for (u32 g : group)
            if (g <= group_end) found += 1u;
#pragma unroll
        for (int offset = 1; offset < kOctet; offset *= 2) found += __shfl_xor_sync(kAllLanes, found, offset);
        return found >> 8 == static_cast<u32>(k) && (found & 255u) <= 8u;
    }

    // The columns of uncertain rows, computed by the whole warp one after the other; for the others `column`.
    RTK_DEVICE int in_order(int column, bool unsure, int k, Choice* scratch) const {
        for (u32 left = __ballot_sync(kAllLanes, unsure && lane == 0); left != 0u; left &= left - 1u) {
            const int first = __ffs(static_cast<int>(left)) - 1, all = static_cast<int>(threadIdx.x) % kWarp;
            const u64 address = __shfl_sync(kAllLanes, reinterpret_cast<u64>(row), first);
            float value[8];
            u32 key[8];
            load_some<8>(reinterpret_cast<const void*>(address), all * 8, kFloat32, false, cols - all * 8, value);
            keys_of<8>(value, cols - all * 8, key);
            ::rtk::choose<8>(key, k, all * 8, scratch, all);
            if (all / kOctet == first / kOctet && lane < k) column = scratch[lane].column;
            __syncwarp();
        }
        return column;
    }
};

}  // namespace rtk
