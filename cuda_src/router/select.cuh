// The k largest numbers of a row, largest first, equal ones by column: exact, for every input.
//
// A warp holds up to 256 columns, each lane V neighbours. Numbers become unsigned keys of the same order: NaN above all,
// -0 and +0 equal, 0 for what does not take part. The quick way puts a key's column in place of its last 8 bits, so that
// no two are equal, and takes the largest of all lanes k times over, one warp reduction each, from the two largest that
// each lane has at hand. Then it makes sure that neither those bits nor a third key of a lane could have changed
// anything, which is so for most rows when k is small. The other way takes ties and any number of keys from one lane in
// their order.
#pragma once
#include "common/abi.cuh"
#include "ptx/math.cuh"
#include "router/rows.cuh"

namespace rtk {

inline constexpr int kMostChosen = 64;
inline constexpr int kQuickChosen = 16;  // beyond, a third key of one lane is the rule

RTK_DEVICE u32 key_of(float x) {
    const u32 bits = __float_as_uint(ptx::canonical(x));
    return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}

RTK_DEVICE float value_of(u32 key) { return __uint_as_float(key ^ ((key & 0x80000000u) ? 0x80000000u : 0xffffffffu)); }

// The keys of neighbours of which `valid` exist.
template <int V>
RTK_DEVICE void keys_of(const float (&value)[V], int valid, u32 (&key)[V]) {
#pragma unroll
    for (int v = 0; v < V; ++v) key[v] = key_of(value[v]);
    if (valid < V) {
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (v >= valid) key[v] = 0u;
    }
}

template <int V>
RTK_DEVICE void two_largest(const u32 (&key)[V], u32& first, u32& second) {
    first = max(key[0], key[1]), second = min(key[0], key[1]);
#pragma unroll
    for (int v = 2; v < V; v += 2) {
        const u32 high = max(key[v], key[v + 1]), low = min(key[v], key[v + 1]);
        second = max(min(first, high), max(second, low));
        first = max(first, high);
    }
}

// A choice of a warp: anything, and in the last 8 bits its column among the warp's 256, the first one largest.
inline constexpr u32 kColumnBits = 255u;
RTK_DEVICE u32 choice_of(int column) { return kColumnBits - static_cast<u32>(column); }
RTK_DEVICE int column_of(u32 choice) { return static_cast<int>(kColumnBits - (choice & kColumnBits)); }

// out[0..k) gets the choices, unless the result is false. `short_keys`: the last 8 bits tell no two keys apart.
template <int V>
RTK_DEVICE bool choose_quick(const u32 (&key)[V], int k, bool short_keys, u32* out, int lane) {
    u32 marked[V], next, after, best = 0u;
#pragma unroll
    for (int v = 0; v < V; ++v) marked[v] = (key[v] & ~kColumnBits) | (choice_of(lane * V) - v);
    two_largest(marked, next, after);
    for (int i = 0; i < k; ++i) {
        best = __reduce_max_sync(kAllLanes, next);
        if (lane == 0) out[i] = best;
        if (next == best) next = after, after = 0u;
    }
    const u32 least = short_keys ? best : best & ~kColumnBits;
    bool sure = next < least;
    if (V > 2 && __any_sync(kAllLanes, next == 0u)) {
        int count = 0;
#pragma unroll
        for (int v = 0; v < V; ++v) count += marked[v] >= least ? 1 : 0;
        sure = sure && (next != 0u || count <= 2);
    }
    __syncwarp();
    if (!short_keys && lane < k - 1) sure = sure && (out[lane] ^ out[lane + 1]) > kColumnBits;
    return __all_sync(kAllLanes, sure && best > kColumnBits);
}

// The same for all keys; returns how many were chosen, which is fewer if there are fewer.
template <int V>
RTK_DEVICE int choose_in_order(const u32 (&key)[V], int k, u32* out, int lane) {
    u32 alive = kAllLanes, head = 0u;
    int slot = 0;
    auto scan = [&] {
        head = 0u;
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (key[v] > head && (alive >> v & 1u) != 0u) head = key[v], slot = v;
    };
    scan();
    int i = 0;
    for (; i < k; ++i) {
        const u32 best = __reduce_max_sync(kAllLanes, head);
        if (best == 0u) break;
        const u32 equal = __ballot_sync(kAllLanes, head == best);
        if ((equal & (0u - equal)) == 1u << lane) {
            out[i] = choice_of(lane * V + slot);
            alive &= ~(1u << slot);
            scan();
        }
    }
    return i;
}

// out[0..k) of the warp's own shared memory gets the choices; all lanes may read them afterwards. Returns their number.
template <int V>
RTK_DEVICE int choose(const u32 (&key)[V], int k, bool short_keys, u32* out, int lane) {
    if (k <= kQuickChosen && choose_quick<V>(key, k, short_keys, out, lane)) return k;
    __syncwarp();
    const int count = choose_in_order<V>(key, k, out, lane);
    __syncwarp();
    return count;
}

// The same for one key per lane; in the order of lanes where equal.
RTK_DEVICE void choose_lanes(u32 key, u32 choice, int k, u32* out, int lane) {
    for (int i = 0; i < k; ++i) {
        const u32 best = __reduce_max_sync(kAllLanes, key);
        const u32 equal = __ballot_sync(kAllLanes, key == best);
        if ((equal & (0u - equal)) == 1u << lane) {
            out[i] = choice;
            key = 0u;
        }
    }
    __syncwarp();
}

// A choice among the columns of a whole row.
struct alignas(8) Choice {
    u32 key;
    i32 column;
};

// The choices of a warp whose columns start at `column` as a list with keys, key 0 where there are no more. `scratch` has
// room for k.
template <int V>
RTK_DEVICE void list_choices(const u32 (&key)[V], int k, bool short_keys, int column, u32* scratch, Choice* list,
                             int lane) {
    const int count = choose<V>(key, k, short_keys, scratch, lane);
    for (int first = 0; first < k; first += kWarp) {
        const int i = first + lane, at = i < count ? column_of(scratch[i]) : 0;
        u32 its = 0u;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const u32 one = __shfl_sync(kAllLanes, key[v], at / V);
            if (at % V == v) its = one;
        }
        if (i < k) list[i] = i < count ? Choice{its, column + at} : Choice{0u, 0};
    }
}

// The choices of up to 32 parts of a row, a list of `k` places for each (key 0: no more), become those of the row. Parts
// are in the order of their columns. By one warp; a lane holds the head of a list.
RTK_DEVICE void merge_choices(const Choice* lists, int parts, int k, Choice* out, int lane) {
    const Choice* next = lists + lane * k;
    const Choice* end = lane < parts ? next + k : next;
    Choice head = {0u, 0};
    if (next < end) head = *next;
    for (int i = 0; i < k; ++i) {
        const u32 best = __reduce_max_sync(kAllLanes, head.key);
        const u32 equal = __ballot_sync(kAllLanes, head.key == best);
        if ((equal & (0u - equal)) == 1u << lane) {
            out[i] = head;
            head = {0u, 0};
            if (++next < end) head = *next;
        }
    }
    __syncwarp();
}

}  // namespace rtk
