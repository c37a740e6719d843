// Gated delta rule: with a = exp(g) for each token and value head,
//     S' = a S,  u = beta (v - S'^T k),  S = S' + k u^T,  o = scale S^T q,
// in chunks of 64 tokens. With c = cumulative sums of g within a chunk, G_ij = exp(c_i - c_j) for i >= j (else 0), E =
// diag(exp c), F = diag(exp(c_end - c)) and the state S before the chunk:
//     T = (I + M)^-1,  M = strictly lower part of beta_i (k_i . k_j) G_ij,  P = scale (q_i . k_j) G_ij
//     R = beta (V - E K S),  U = T R,  O = scale E Q S + P U,  S_end = exp(c_end) S + (F K)^T U
// All exponents are differences <= 0. The state and sums are fp32; T, P, R, U and the state as an operand are rounded to
// the type of the inputs. With a decay per head T is the sum of two such numbers, value and remainder: where betas are near 2
// and keys alike, T has entries near 2 of alternating signs that nearly cancel, and their roundings, which need not, would
// multiply the error of the state from chunk to chunk. Keys and queries that are to be normalised (r x, r = 1 / sqrt(sum x^2 + 1e-6)) stay as they
// are in products; r multiplies sums.
//
// Without the correction by the state (SSD of Mamba-2, `solve` null, kUncorrected): T = I, M = 0 and R = U = beta V.
//
// With a decay for each channel of keys (KDA), c_i is a vector, and so is what multiplies rows of a state:
//     M_ij = beta_i sum_d k_id k_jd exp(c_id - c_jd),  P_ij likewise,  E K, E Q and F K element by element.
// Scans get E K, E Q and F K as tensors, and of `rows` betas and c_end of the channels (kWholes).
//
// Chunks are numbered without a look at lengths: chunk i of sequence b of packed tokens is number cu[b] / 64 + b + i. An
// unused number has no rows. Value head h reads key head h / (heads / key heads).
//
// The state after a segment, a number of chunks, is an affine function of the state S before it, A S + b, where A [d_k, d_k]
// and b do not depend on S. So few long sequences are split: a first pass computes b, by a scan that starts from zeros, and A, by
// one of columns of their own that starts from the identity and whose v is 0; gated_delta_rule_chain.cu computes the states
// between segments from them, and a second pass scans all segments at once. Gradients dS go back by A^T in the same way. A
// sequence's first and last segments need no A: these passes start from the state, or gradient, that is given.
#pragma once
#include "attention/masks.cuh"
#include "common/vec.cuh"
#include "ptx/math.cuh"

namespace rtk {

inline constexpr int kDelta = 64;  // tokens of a chunk
inline constexpr float kMinDecay = -104.0f;  // exp of it is 0 in fp32

inline constexpr i64 kNormalised = 1, kUncorrected = 2;  // flags of gradients

// Numbers of the rows of a chunk and value head: [kRowKinds][64].
enum RowKind { kDecays, kBetas, kKeyNorms, kQueryNorms, kRowKinds };  // decays: c in log2
inline constexpr int kWholes = kKeyNorms;  // of channels: 128 numbers from here on, c_end in log2

// Rows of one sequence.
struct DeltaRows {
    i64 first;  // row of a packed tensor, else 0
    i64 chunk;  // number of its first chunk
    int rows, batch;
};

RTK_DEVICE DeltaRows delta_rows(int batch, i64 length, const i32* cu) {
    const Sequence s = sequence_at(batch, length, 0, cu, nullptr, nullptr);
    const i64 chunk = cu != nullptr ? s.q_row / kDelta + batch : batch * ((length + kDelta - 1) / kDelta);
    return {s.q_row, chunk, s.lq, batch};
}

// The packed sequence that has part `number` of parts of so many rows; -1 if none has.
RTK_DEVICE int delta_sequence(i64 number, i64 part, const i32* cu, int sequences) {
    int low = 0, high = sequences;  // the first sequence whose parts come later
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu[middle] / part + middle <= number) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

// One chunk: its sequence (of packed tokens: 0), first row there, and number of rows.
struct DeltaChunk {
    i64 first;
    int batch, rows;
};

RTK_DEVICE DeltaChunk delta_chunk(i64 number, i64 length, const i32* cu, int sequences) {
    if (cu == nullptr) {
        const i64 each = (length + kDelta - 1) / kDelta, batch = number / each, first = (number - batch * each) * kDelta;
        return {first, static_cast<int>(batch), static_cast<int>(min(length - first, static_cast<i64>(kDelta)))};
    }
    const int sequence = delta_sequence(number, kDelta, cu, sequences);
    if (sequence < 0) return {0, 0, 0};
    const DeltaRows own = delta_rows(sequence, length, cu);
    const i64 skipped = (number - own.chunk) * kDelta;
    return {own.first + skipped, 0, static_cast<int>(max(min(own.rows - skipped, static_cast<i64>(kDelta)), i64{0}))};
}

// Rows of a segment of a sequence, a multiple of kDelta rows, or of a whole one.
struct DeltaSegment : DeltaRows {
    bool begins, ends;  // with its sequence

    RTK_DEVICE bool exists() const { return begins || rows > 0; }
};

// Segment `number` of `numbers`, numbered as chunks are; segment: its rows, 0 for whole sequences.
RTK_DEVICE DeltaSegment delta_segment(int number, int numbers, i64 segment, i64 length, const i32* cu) {
    if (segment == 0) return {delta_rows(number, length, cu), true, true};
    const i64 each = (length + segment - 1) / segment;
    const int sequence = cu != nullptr ? delta_sequence(number, segment, cu, numbers - static_cast<int>(length / segment))
                                       : static_cast<int>(number / each);
    if (sequence < 0) return {{0, 0, 0, 0}, false, false};
    DeltaRows own = delta_rows(sequence, length, cu);
    const i64 part = number - (cu != nullptr ? own.first / segment + sequence : sequence * each), skipped = part * segment;
    const bool ends = skipped + segment >= own.rows;
    own.rows = static_cast<int>(max(min(own.rows - skipped, segment), i64{0}));
    own.first += skipped;
    own.chunk += skipped / kDelta;
    return {own, part == 0, ends};
}

// exp2 of a difference of cumulative log2 decays.
RTK_DEVICE float decay_between(float later, float earlier) { return ptx::ex2(later - earlier); }

// Of the kernels of gradients inside chunks.
template <typename T>
struct DeltaGradArguments {
    const T *q, *k, *v, *dout;
    const float* rows;
    const i32* cu;
    const T *states, *dstates, *updates, *drest;
    T *dq, *dk;
    float *dg, *dbeta;
    i64 sequences, length, heads, key_heads, d_k, d_v, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
        v_head, dout_batch, dout_row, dout_head, flags, stages;
    double scale;
};

}  // namespace rtk
