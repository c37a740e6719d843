// Which keys a query sees: lo(i) <= j < hi(i). One rule covers causal attention, sliding windows, lengths and limits
// that are known on the device only, and packed sequences (rtkernels/ops/attention/problem.py has the formulas).
//
// Both ends increase with i (without per-query limits), so the keys that a tile of queries needs, and those that all of
// its queries see, are two intervals; only key tiles outside of the second one are masked element by element. The same
// holds the other way round, for the queries that a tile of keys meets.
#pragma once
#include "common/abi.cuh"

namespace rtk {

struct Interval {
    int first, end;  // empty if first >= end

    RTK_DEVICE bool empty() const { return first >= end; }
};

// One sequence of a batch: where its rows begin in packed tensors (0 otherwise), how many queries and keys it has.
struct Sequence {
    int q_row, k_row, lq, keys;
};

// cu_q, cu_k: null unless sequences are packed; lengths: null, or the number of valid keys of each sequence.
RTK_DEVICE Sequence sequence_at(int batch, i64 lq, i64 lkv, const i32* cu_q, const i32* cu_k, const i32* lengths) {
    Sequence s{0, 0, static_cast<int>(lq), static_cast<int>(lkv)};
    if (cu_q != nullptr) {
        s.q_row = cu_q[batch];
        s.lq = max(cu_q[batch + 1] - s.q_row, 0);
    }
    if (cu_k != nullptr) {
        s.k_row = cu_k[batch];
        s.keys = max(cu_k[batch + 1] - s.k_row, 0);
    }
    if (lengths != nullptr) s.keys = min(s.keys, max(lengths[batch], 0));
    return s;
}

// left, right: keys seen to each side of a query's own, -1 for all. Less than 2^29, as lengths are.
struct Mask {
    int lq, keys, shift, left, right;

    RTK_DEVICE Mask(const Sequence& sequence, i64 keys_left, i64 keys_right)
        : lq(sequence.lq),
          keys(sequence.keys),
          shift(sequence.keys - sequence.lq),
          left(static_cast<int>(keys_left)),
          right(static_cast<int>(keys_right)) {}

    // Of query i, without a limit of its own.
    RTK_DEVICE int lo(int i) const { return left < 0 ? 0 : max(i + shift - left, 0); }
    RTK_DEVICE int hi(int i) const { return right < 0 ? keys : min(keys, i + shift + right + 1); }

    // Keys that any of the queries first..end - 1 sees, and those that all of them see. Queries past the last one are
    // ignored.
    RTK_DEVICE Interval keys_any(int first, int end) const { return {lo(first), hi(min(end, lq) - 1)}; }
    RTK_DEVICE Interval keys_all(int first, int end) const { return {lo(min(end, lq) - 1), hi(first)}; }

    // Queries that see any of the keys first..end - 1, and those that see all of them.
    RTK_DEVICE Interval queries_any(int first, int end) const {
        if (first >= keys) return {0, 0};
        return {right < 0 ? 0 : max(first - shift - right, 0), left < 0 ? lq : min(lq, min(end, keys) - shift + left)};
    }
    RTK_DEVICE Interval queries_all(int first, int end) const {
        if (end > keys) return {0, 0};
        return {right < 0 ? 0 : max(end - 1 - shift - right, 0), left < 0 ? lq : min(lq, first + 1 - shift + left)};
    }
};

}  // namespace rtk
