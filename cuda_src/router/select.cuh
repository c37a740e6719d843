// The k largest numbers of a row, largest first, equal ones by column: exact, for every input.
//
// A warp holds up to 32 * V columns, V neighbours per lane. Numbers become unsigned keys of the same order: NaN above
// all, -0 and +0 equal, 0 for what does not take part. A lane tracks its two largest keys. The fast path takes the
// largest of all lanes k times, one warp reduction each, ignoring ties; it then checks that exactly k keys were taken
// and that no lane hides a third one that belongs among them. This succeeds for most rows when k is small. The slow
// path handles ties and any number of keys per lane in their order.
#pragma once
#include "common/abi.cuh"
#include "ptx/math.cuh"
#include "router/rows.cuh"

namespace rtk {

inline constexpr int kMaxChosen = 64;
inline constexpr int kQuickChosen = 16;  // beyond, most rows need a third key of some lane

RTK_DEVICE u32 key_of_canonical(float x) {
    const u32 bits = __float_as_uint(x);
    return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}

RTK_DEVICE u32 key_of(float x) { return key_of_canonical(ptx::canonical(x)); }

RTK_DEVICE float value_of(u32 key) { return __uint_as_float(key ^ ((key & 0x80000000u) ? 0x80000000u : 0xffffffffu)); }

// The keys of neighbours; `valid` of them exist.
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

// Keys of 16-bit numbers leave their last 8 bits unused: with the column there, the first one largest, no two keys are
// equal. `first` is the lane's first column among the warp's 256.
template <int V>
RTK_DEVICE void tell_apart(u32 (&key)[V], int first) {
#pragma unroll
    for (int v = 0; v < V; ++v)
        if (key[v] != 0u) key[v] = (key[v] & ~255u) | static_cast<u32>(255 - first - v);
}

struct alignas(8) Choice {
    u32 key;
    i32 column;
};

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

// Writes the choices to out[0..k) of the warp's own shared memory; this lane's keys are those of the columns from
// `column` on. Places past the number of keys stay unchanged. All lanes may read `out` afterwards.
template <int V>
RTK_DEVICE void choose(const u32 (&key)[V], int k, int column, Choice* out, int lane) {
    if (k <= kQuickChosen) {
        u32 first, second;
        two_largest(key, first, second);
        u32 next = first, after = second, best = 0u;
        int taken = -1, earlier = -1;  // rounds in which this lane gave its last key, and the one before
        for (int i = 0; i < k; ++i) {
            best = __reduce_max_sync(kAllLanes, next);
            if (next == best) {
                earlier = taken, taken = i;
                next = after, after = 0u;
            }
        }
        const u32 givers = __ballot_sync(kAllLanes, taken >= 0), twice = __ballot_sync(kAllLanes, earlier >= 0);
        bool sure = best != 0u && __popc(givers) + __popc(twice) == k;
        if (V > 2 && sure && twice != 0u) {
            int count = 0;
#pragma unroll
            for (int v = 0; v < V; ++v) count += key[v] >= best ? 1 : 0;
            sure = !__any_sync(kAllLanes, earlier >= 0 && count > 2);
        }
        if (sure) {
            if (taken >= 0) {
                int slot = 0;
#pragma unroll
                for (int v = V - 1; v >= 0; --v)
                    if (key[v] == first) slot = v;
                out[earlier >= 0 ? earlier : taken] = {first, column + slot};
            }
            if (earlier >= 0) {
                int slot = 0;
#pragma unroll
                for (int v = 0; v < V; ++v)
                    if (key[v] == second) slot = v;
                out[taken] = {second, column + slot};
            }
            __syncwarp();
            return;
        }
    }
    u32 alive = kAllLanes, head = 0u;
    int slot = 0;
    auto scan = [&] {
        head = 0u;
#pragma unroll
        for (int v = 0; v < V; ++v)
            if (key[v] > head && (alive >> v & 1u) != 0u) head = key[v], slot = v;
    };
    scan();
    for (int i = 0; i < k; ++i) {
        const u32 best = __reduce_max_sync(kAllLanes, head);
        if (best == 0u) break;
        const u32 equal = __ballot_sync(kAllLanes, head == best);
        if ((equal & (0u - equal)) == 1u << lane) {
            out[i] = {best, column + slot};
            alive &= ~(1u << slot);
            scan();
        }
    }
    __syncwarp();
}

// The k largest of one key per lane; ties in the order of lanes.
RTK_DEVICE void choose_lanes(Choice mine, int k, Choice* out, int lane) {
    u32 left = mine.key;
    for (int i = 0; i < k; ++i) {
        const u32 best = __reduce_max_sync(kAllLanes, left);
        const u32 equal = __ballot_sync(kAllLanes, left == best);
        if ((equal & (0u - equal)) == 1u << lane) {
            out[i] = mine;
            left = 0u;
        }
    }
    __syncwarp();
}

// Merges the choices of up to 32 parts of a row, a list of `k` places each (key 0: end), into those of the row. Parts
// are in the order of their columns. Called by one warp; a lane holds the head of a list.
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
