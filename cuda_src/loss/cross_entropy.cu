// Cross entropy in two passes (forward, backward), and the small kernels of all modes. The formulas: cross_entropy.cuh.
#include "loss/cross_entropy.cuh"

namespace rtk {

// Per row: loss (0 if ignored, NaN for a bad label), stats, and optionally whether the label is the first column with
// the largest score. Without `loss`, for this part of the vocabulary: top, level, the label's score (-inf if it is
// elsewhere), sum of scores.
//
// A RowGroup owns a row and reads it once, BATCH 16-byte vectors per thread at a time; other warps work meanwhile. A
// thread does not prefetch vector by vector: the hardware counts loads, and the compiler gives all loads of a loop one
// counter, so that waiting for the oldest means waiting for the youngest.
template <typename T>
__global__ void __launch_bounds__(512, 2)
    cross_entropy_fwd(const T* x, const void* labels, float* loss, float* stats, float* correct, i64* report, i64 rows,
                      i64 cols, i64 x_stride, i64 labels_int64, i64 ignore_index, i64 first, i64 vocabulary,
                      i64 threads_per_row, i64 evict_first, double smoothing, double z_loss, double per_column,
                      double softcap) {
    constexpr int VEC = 16 / sizeof(T), BATCH = 4;
    __shared__ GroupScratch<1> scratch[2];
    ptx::launch_dependents();
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool exists = row < rows;
    const T* source = x + (exists ? row : 0) * x_stride;
    const AlignedRow<T> aligned(source, static_cast<int>(cols));
    const int threads = group.threads, pitch = threads * VEC;
    const T* next = source + aligned.head + group.thread * VEC;
    int remaining = (exists ? aligned.vectors : 0) - group.thread;  // vectors from this thread's next one to the end
    const int edge = aligned.edge(group.thread);
    const u64 policy = ptx::l2_policy(evict_first != 0);
    auto load = [&](const T* p) { return load_raw<T, VEC>(p, policy); };
    Raw<16> raw[BATCH];
    load_batch(raw, next, pitch, remaining, threads, load);  // before the label is known: a valid row must not wait

    const Labels all{labels, labels_int64 != 0, ignore_index, first, vocabulary};
    const int label = exists ? all.column(row, static_cast<int>(cols), report, group.thread == 0) : kIgnored;
    const bool counts = label >= kElsewhere;
    if (!counts) remaining = 0;
    const Cap<T> cap(softcap);
    const bool totals = not_zero(smoothing);
    float target = -kInfinity;
    if (label >= 0) target = score_at(source, label, cap);
    Running<T> running;
    if (cap.active()) {  // three times the work per element: not worth more loads
#pragma unroll 1
        for (; remaining > 0; remaining -= 2 * threads, next += 2 * pitch) {
            Raw<16> pair[2];
            load_batch<T>(pair, next, pitch, remaining, threads);
            running.add_raw(pair[0], cap, totals);
            if (threads < remaining) running.add_raw(pair[1], cap, totals);
        }
    }
#pragma unroll 1
    while (remaining > 0) {
        running.add_batch(raw, remaining, threads, totals);
        next += BATCH * pitch;
        remaining -= BATCH * threads;
        if (remaining > 0) load_batch(raw, next, pitch, remaining, threads, load);
    }
    if (counts && edge >= 0) running.add_edge(score_at(source, edge, cap), totals);
    running.combine(group, scratch, totals);
    if (correct != nullptr) {
        const bool largest = label >= 0 && target == running.top;
        const float hit = first_of_its_score(source, largest ? label : 0, running.top, cap, group, scratch[1]);
        if (exists && group.thread == 0) correct[row] = largest ? hit : 0.0f;
    }
    if (exists && group.thread == 0) {
        const Terms terms(smoothing, z_loss, per_column);
        RowResults{loss, stats, rows}.write(row, label, terms, running.top, logf(running.sum), target, running.total);
    }
}

// dx from the saved top and level of each row and the gradient of its loss, dloss[row * dloss_stride] * factor[0]
// (factor may be null). dx may be x. A block has CHUNKS vectors per thread of one row, or of several short ones.
template <typename T>
__global__ void __launch_bounds__(256, 4)
    cross_entropy_bwd(const float* dloss, const T* x, T* dx, const void* labels, const float* stats,
                      const float* factor, i64* report, i64 rows, i64 cols, i64 x_stride, i64 dx_stride,
                      i64 dloss_stride, i64 labels_int64, i64 ignore_index, i64 first, i64 vocabulary, i64 threads_per_row,
                      i64 segments, i64 by_segments, double smoothing, double z_loss, double per_column,
                      double softcap) {
    constexpr int VEC = 16 / sizeof(T), CHUNKS = 4;
    const RowGroup group(threads_per_row);
    const u32 row_block = divided(blockIdx.x, by_segments);
    const int segment = static_cast<int>(blockIdx.x - row_block * static_cast<u32>(segments));
    const i64 row = static_cast<i64>(row_block) * group.count + group.index;
    if (row >= rows) return;
    x += row * x_stride;
    dx += row * dx_stride;
    const AlignedRow<T> aligned(x, static_cast<int>(cols));
    const int start = segment * CHUNKS * group.threads + group.thread;
    const i64 offset = aligned.head + static_cast<i64>(start) * VEC;
    Raw<16> raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (start + c * group.threads < aligned.vectors) raw[c] = load_raw<T, VEC, false>(x + offset + c * group.threads * VEC);

    const Labels all{labels, labels_int64 != 0, ignore_index, first, vocabulary};
    const int label = all.column(row, static_cast<int>(cols), report, false);
    const bool counts = label >= kElsewhere;
    const float top = stats[row], level = stats[rows + row];
    const float g = dloss[row * dloss_stride] * (factor == nullptr ? 1.0f : factor[0]);
    const Cap<T> cap(softcap);
    const Gradient<T> gradient(Terms(smoothing, z_loss, per_column), g, top, level, expf(-level));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int vector = start + c * group.threads;
        if (vector >= aligned.vectors) break;
        T* out = dx + offset + c * group.threads * VEC;
        if (!counts) {
            store_zeros<T, VEC>(out);
            continue;
        }
        const int at = label - aligned.head - vector * VEC;
        float z = 0.0f;
        if (label >= 0 && at >= 0 && at < VEC) z = score_at(x, label, cap);  // before the vector is overwritten
        gradient.template store_vector<VEC>(out, raw[c], cap);
        if (label >= 0 && at >= 0 && at < VEC) gradient.store_one(dx + label, z, cap, gradient.target);
    }
    const int edge = segment == 0 ? aligned.edge(group.thread) : -1;
    if (edge >= 0) {
        if (counts) {
            gradient.store_one(dx + edge, score_at(x, edge, cap), cap, edge == label ? gradient.target : 0.0f);
        } else {
            store_zeros<T, 1>(dx + edge);
        }
    }
}

// factor[0]: 1 / number of valid rows (0 if there are none). With `loss`: out[0], the sum of the losses, and
// accuracy[0], the sum of `correct` (if given), both times the factor for a mean; the loss of bad labels is NaN.
// One block; or several, and the last one adds what they left in `parts`, three numbers for each and a counter that was
// 0. A template only because every kernel is one; T is float.
template <typename T>
__global__ void __launch_bounds__(1024)
    cross_entropy_reduce(const T* loss, const T* correct, const void* labels, T* out, T* accuracy, T* factor, T* parts,
                         i64 rows, i64 labels_int64, i64 ignore_index, i64 mean) {
    __shared__ GroupScratch<1> scratch[3];
    __shared__ u32 arrived;
    ptx::launch_dependents();
    const RowGroup group(blockDim.x);
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const i64 first = static_cast<i64>(block) * blockDim.x + threadIdx.x, step = static_cast<i64>(blocks) * blockDim.x;
    i64 counted = 0;
#pragma unroll 4
    for (i64 row = first; row < rows; row += step) {
        const i64 label = labels_int64 ? static_cast<const i64*>(labels)[row] : static_cast<const i32*>(labels)[row];
        counted += label != ignore_index;
    }
    float count = group_reduce<Sum, false>(static_cast<float>(counted), group, scratch[0], 0);
    ptx::wait_for_previous();
    float whole = 0.0f, right = 0.0f;
    if (loss != nullptr) {
        double sum = 0.0, hits = 0.0;
#pragma unroll 4
        for (i64 row = first; row < rows; row += step) sum += loss[row];
        if (correct != nullptr) {
#pragma unroll 4
            for (i64 row = first; row < rows; row += step) hits += correct[row];
        }
        whole = group_reduce<Sum, false>(static_cast<float>(sum), group, scratch[0], 1);
        if (correct != nullptr) right = group_reduce<Sum, false>(static_cast<float>(hits), group, scratch[1], 0);
    }
    if (blocks > 1) {
        if (threadIdx.x == 0) {
            parts[block] = count, parts[blocks + block] = whole, parts[2 * blocks + block] = right;
            __threadfence();
            arrived = atomicAdd(reinterpret_cast<u32*>(parts + 3 * blocks), 1u);
        }
        __syncthreads();
        if (arrived + 1 != static_cast<u32>(blocks)) return;
        __threadfence();
        float part[3] = {0.0f, 0.0f, 0.0f};
        for (int i = static_cast<int>(threadIdx.x); i < blocks; i += static_cast<int>(blockDim.x)) {
#pragma unroll
            for (int k = 0; k < 3; ++k) part[k] += static_cast<volatile T*>(parts)[k * blocks + i];
        }
        count = group_reduce<Sum, false>(part[0], group, scratch[1], 1);
        if (loss != nullptr) whole = group_reduce<Sum, false>(part[1], group, scratch[2], 0);
        if (correct != nullptr) right = group_reduce<Sum, false>(part[2], group, scratch[2], 1);
    }
    if (threadIdx.x != 0) return;
    if (factor != nullptr) factor[0] = count == 0.0f ? 0.0f : 1.0f / count;
    if (loss == nullptr) return;
    // A division, not a product with a rounded reciprocal: the mean of equal losses is that loss.
    out[0] = !mean ? whole : count == 0.0f ? 0.0f : whole / count;
    if (correct != nullptr) accuracy[0] = !mean ? right : count == 0.0f ? 0.0f : right / count;
}

// x *= dloss[row * dloss_stride], in place; rows with factor 1 are not touched, so that the usual call (all ones) ends
// without work, and the host need not know. Persistent blocks; a RowGroup owns a row at a time.
template <typename T>
__global__ void __launch_bounds__(256)
    cross_entropy_scale(T* x, const float* dloss, i64 rows, i64 cols, i64 x_stride, i64 dloss_stride,
                        i64 threads_per_row) {
    constexpr int VEC = 16 / sizeof(T), CHUNKS = 4;
    ptx::wait_for_previous();
    if (dloss_stride == 0 && dloss[0] == 1.0f) return;
    const RowGroup group(threads_per_row);
    for (i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index; row < rows;
         row += static_cast<i64>(gridDim.x) * group.count) {
        const float g = dloss[row * dloss_stride];
        if (g == 1.0f) continue;
        T* line = x + row * x_stride;
        const AlignedRow<T> aligned(line, static_cast<int>(cols));
        for (int start = group.thread; start < aligned.vectors; start += CHUNKS * group.threads) {
            T* vectors_at = line + aligned.head + static_cast<i64>(start) * VEC;
            float v[CHUNKS][VEC];
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                if (start + c * group.threads < aligned.vectors)
                    load_stream<T, VEC>(vectors_at + c * group.threads * VEC, v[c]);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (start + c * group.threads < aligned.vectors) {
#pragma unroll
                    for (int k = 0; k < VEC; ++k) v[c][k] *= g;
                    store<T, VEC>(vectors_at + c * group.threads * VEC, v[c]);
                }
            }
        }
        const int edge = aligned.edge(group.thread);
        if (edge >= 0) {
            float v[1];
            load_stream<T, 1>(line + edge, v);
            v[0] *= g;
            store<T, 1>(line + edge, v);
        }
    }
}

}  // namespace rtk
