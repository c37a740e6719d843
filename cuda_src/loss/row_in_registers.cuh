// A row of logits that stays in registers from the first read to the gradient.
#pragma once
#include "loss/cross_entropy.cuh"

namespace rtk {

// A thread's part of a row, if there are so many threads that none has more than CHUNKS vectors: vectors thread, thread
// + threads, ..., and possibly one of the columns before and after the vectors. First logits, then their exponentials,
// then the gradient. `kLast`: L2 evicts the logits last (ptx::ld_stream), which helps only with few rows.
template <typename T, int CHUNKS, bool kLast = false>
struct RowInRegisters {
    static constexpr int VEC = 16 / sizeof(T);
    const AlignedRow<T> aligned;
    const int thread, threads;
    const int offset;  // column of the first vector
    const int remaining;   // vectors from that one to the end of the row
    const int edge;    // the column before or after the vectors, or -1
    Raw<16> raw[CHUNKS];
    float border = -kInfinity;  // score of the edge
    float e[CHUNKS][VEC];

    // Loads the vectors. A row that does not exist has none.
    RTK_DEVICE RowInRegisters(const T* row, int cols, bool exists, int thread_, int threads_)
        : aligned(row, cols),
          thread(thread_),
          threads(threads_),
          offset(aligned.head + thread * VEC),
          remaining((exists ? aligned.vectors : 0) - thread),
          edge(exists ? aligned.edge(thread) : -1) {
        load_batch(raw, row + offset, threads * VEC, remaining, threads, [](const T* p) { return load_raw<T, VEC, kLast>(p); });
    }
    RTK_DEVICE void load_edge(const T* row) {
        if (edge >= 0) border = score_at(row, edge, NoCap{});
    }
    RTK_DEVICE float peak() const { return fmaxf(peak_of<T, CHUNKS>(raw), border); }
    RTK_DEVICE float total() const {
        float total = 0.0f;
        add_total<T, CHUNKS>(raw, remaining, threads, total);
        return edge >= 0 ? total + border : total;
    }
    // One exponential for every element, which later becomes its gradient; `base` is that of `top`. Returns their sum.
    RTK_DEVICE float exponentials(const Base<T>& base, float top) {
        float part[2] = {0.0f, 0.0f};
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            ptx::forget(raw[c]);
            unpack<T, VEC>(raw[c], e[c]);
#pragma unroll
            for (int i = 0; i < VEC; ++i) part[i % 2] += e[c][i] = base.at(e[c][i]);
        }
        const float sum = (part[0] + part[1]) * base.correction;
        return edge >= 0 ? sum + exponential<Base<T>::kFast>(border - anchored(top)) : sum;
    }
    // Writes the gradient of the row to `out`; the exponentials times `scale` are what `gradient` computes from the
    // logits. `target` is the score of the label's column; without one the gradient is 0.
    RTK_DEVICE void store_gradient(T* out, const Gradient<T>& gradient, float scale, int label, float target) {
        const NoCap cap;
        const bool counts = label >= 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c * threads >= remaining) break;
            T* to = out + offset + c * threads * VEC;
            if (counts) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) e[c][i] = e[c][i] * scale - gradient.offset;
                store<T, VEC>(to, e[c]);
            } else {
                store_zeros<T, VEC>(to);
            }
        }
        if (edge >= 0) {
            if (counts) {
                gradient.store_one(out + edge, border, cap, 0.0f);
            } else {
                store_zeros<T, 1>(out + edge);
            }
        }
        if (counts && aligned.owner(label, threads) == thread)
            gradient.store_one(out + label, target, cap, gradient.target);
    }
};

}  // namespace rtk
