// Gated delta rule: with a = exp(g) for each token and value head,
//     S' = a S,  u = beta (v - S'^T k),  S = S' + k u^T,  o = scale S^T q,
// in chunks of 64 tokens. With c = cumulative sums of g within a chunk, G_ij = exp(c_i - c_j) for i >= j (else 0), E =
// diag(exp c), F = diag(exp(c_end - c)) and the state S before the chunk:
//     T = (I + M)^-1,  M = strictly lower part of beta_i (k_i . k_j) G_ij,  P = scale (q_i . k_j) G_ij
//     R = beta (V - E K S),  U = T R,  O = scale E Q S + P U,  S_end = exp(c_end) S + (F K)^T U
// All exponents are differences <= 0. The state and sums are fp32; T, P, R, U and the state as an operand are rounded to
// the type of the inputs. Keys and queries that are to be normalised (r x, r = 1 / sqrt(sum x^2 + 1e-6)) stay as they
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
    int low = 0, high = sequences;  // the first sequence whose chunks come later
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu[middle] / kDelta + middle <= number) low = middle + 1;
        else high = middle;
    }
    if (low == 0) return {0, 0, 0};
    const DeltaRows own = delta_rows(low - 1, length, cu);
    const i64 skipped = (number - own.chunk) * kDelta;
    return {own.first + skipped, 0, static_cast<int>(max(min(own.rows - skipped, static_cast<i64>(kDelta)), i64{0}))};
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
