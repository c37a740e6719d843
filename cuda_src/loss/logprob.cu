// Log-probabilities of ids and statistics of their distribution, from slabs of logits: parts of rows, results from the
// parts, and the gradient of logits. The formulas: logprob.cuh.
#include "loss/logprob.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// Adds columns [first, first + cols) of the vocabulary to the parts [6, rows] and targets [k, rows] of rows; with
// `begins`, overwrites them. targets: scores of ids, -inf where a column is elsewhere. `wanted` has kWantsTotal and
// kWantsTop1. A RowGroup owns a row and reads it once, BATCH 16-byte vectors per thread at a time.
template <typename T, bool ENTROPY, bool SQUARES>
__global__ void __launch_bounds__(512, 2)
    logprob_parts(const T* x, const void* ids, const float* temperatures, float* parts, float* targets, i64* report,
                  i64 rows, i64 cols, i64 x_stride, i64 ids_int64, i64 k, i64 ignore_index, i64 first, i64 vocabulary,
                  i64 threads_per_row, i64 wanted, i64 begins, double scale, double softcap, double temperature) {
    constexpr int VEC = 16 / sizeof(T), BATCH = 4;
    constexpr bool kFast = sizeof(T) == 2;
    __shared__ GroupScratch<1> scratch[3], of_ids;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool exists = row < rows;
    const T* source = x + (exists ? row : 0) * x_stride;
    const AlignedRow<T> aligned(source, static_cast<int>(cols));
    const int threads = group.threads, pitch = threads * VEC;
    const T* next = source + aligned.head + group.thread * VEC;
    int remaining = (exists ? aligned.vectors : 0) - group.thread;  // vectors from this thread's next one to the end
    const int edge = aligned.edge(group.thread);
    Raw<16> raw[BATCH];
    load_batch(raw, next, pitch, remaining, threads);  // before ids are known: a valid row must not wait

    const Ids all{ids, ids_int64 != 0, k, ignore_index, vocabulary};
    const Score<T> score(softcap, scale, temperature_of(temperatures, temperature, exists ? row : 0));
    bool counts = false;
    if (k == 1) {
        counts = exists && all.load(row) != ignore_index;
    } else {
        float some = 0.0f;
        for (i64 j = group.thread; exists && j < k; j += threads)
            if (all.load(row * k + j) != ignore_index) some = 1.0f;
        counts = group_reduce<Max, false>(some, group, of_ids, 0) > 0.0f;
    }
    if (!counts) remaining = 0;
    const bool totals = (wanted & kWantsTotal) != 0;
    const bool batches = kFast && !score.cap.active() && score.factor > 0.0f;
    RowParts<ENTROPY, SQUARES> found;
#pragma unroll 1
    while (remaining > 0) {
        if (batches) {
            if constexpr (kFast) found.add_batch(raw, score, remaining, threads, totals);
        } else {
#pragma unroll
            for (int c = 0; c < BATCH; ++c) {
                if (c * threads >= remaining) break;
                float z[VEC];
                unpack<T, VEC>(raw[c], z);
#pragma unroll
                for (int i = 0; i < VEC; ++i) z[i] = score(z[i]);
                found.template add<kFast>(z, totals);
            }
        }
        next += BATCH * pitch;
        remaining -= BATCH * threads;
        if (remaining > 0) load_batch(raw, next, pitch, remaining, threads);
    }
    if (counts && edge >= 0) {
        const float z[1] = {score.at(source, edge)};
        found.template add<kFast>(z, totals);
    }
    for (i64 j = group.thread; exists && j < k; j += threads) {
        const i64 id = all.load(row * k + j), local = id - first;
        const bool ignored = id == ignore_index;
        if (begins && !ignored && !all.inside(id)) report[1] = id, report[2] = row * k + j, report[0] = 2;
        float* target = targets + j * rows + row;
        if (!ignored && local >= 0 && local < cols) {
            *target = score.at(source, static_cast<int>(local));
        } else if (begins) {
            *target = -kInfinity;
        }
    }
    found.combine(group, scratch, totals);
    float before = -kInfinity;
    if (wanted & kWantsTop1) {  // uniform over the block
        const i64 id = counts ? all.load(row * k) : first;
        const i64 local = id - first;
        if (local >= cols) before = found.top;
        float earlier = 0.0f;
        if (counts && local >= 0 && local < cols) {
            const int column = static_cast<int>(local);
            if (score.at(source, column) == found.top) {
#pragma unroll 1
                for (int i = group.thread; i < column; i += threads)
                    if (score.at(source, i) == found.top) earlier = 1.0f;
            }
        }
        if (group_reduce<Max, false>(earlier, group, of_ids, 1) > 0.0f) before = found.top;
    }
    if (!exists || group.thread != 0) return;
    if (!counts) found.top = 0.0f, found.sum = 1.0f, found.squares = 1.0f;
    if (!begins && counts) {
        RowParts<ENTROPY, SQUARES> others;
        others.load(parts, row, rows);
        others.fold(found);
        found = others;
        before = fmaxf(before, parts[5 * rows + row]);
    }
    found.store(parts, row, rows);
    parts[5 * rows + row] = before;
}

// Results of rows from the parts [n, 6, rows] and targets [n, k, rows] of n sets of columns, in this order. stats: top
// and level. Results of ignored ids and rows are 0; those that are null are not wanted. A thread owns a row. A template
// only because every kernel is one; T is float.
template <typename T>
__global__ void __launch_bounds__(128)
    logprob_finish(const T* parts, const T* targets, const void* ids, T* logprob, T* entropy, T* lse, T* log_sum_sq,
                   T* mean_logit, u8* top1, T* stats, i64 n, i64 rows, i64 k, i64 ids_int64, i64 ignore_index,
                   i64 vocabulary) {
    const i64 row = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Ids all{ids, ids_int64 != 0, k, ignore_index, vocabulary};
    RowParts<true, true> found;
    float before = -kInfinity;
    for (i64 i = 0; i < n; ++i) {
        RowParts<true, true> more;
        more.load(parts + i * kParts * rows, row, rows);
        before = fmaxf(before, parts[(i * kParts + 5) * rows + row]);
        found.fold(more);
    }
    const float level = logf(found.sum);
    bool counts = false;
    for (i64 j = 0; j < k; ++j) {
        const i64 id = all.load(row * k + j);
        float target = -kInfinity;
        for (i64 i = 0; i < n; ++i) target = fmaxf(target, targets[(i * k + j) * rows + row]);
        const bool ignored = id == ignore_index;
        if (!ignored) counts = true;
        logprob[row * k + j] = ignored ? 0.0f : all.inside(id) ? (target - found.top) - level : kNan;
        if (j == 0 && top1 != nullptr) top1[row] = !ignored && target >= found.top && target > before;
    }
    if (entropy != nullptr) entropy[row] = counts ? level - found.shifted / found.sum : 0.0f;
    if (lse != nullptr) lse[row] = counts ? found.top + level : 0.0f;
    if (log_sum_sq != nullptr) log_sum_sq[row] = counts ? logf(found.squares) - 2.0f * level : 0.0f;
    if (mean_logit != nullptr) mean_logit[row] = counts ? found.total / static_cast<float>(vocabulary) : 0.0f;
    stats[row] = counts ? found.top : 0.0f;
    stats[rows + row] = counts ? level : 0.0f;
}

// What the gradient of a row is made of, [6, rows]: top, level, then constant, slope, square and offset of
// dz = p * (constant + slope * log p + square * p) + offset. The level of ignored rows is +inf, the others are 0.
// Incoming gradients may be null; so may entropy and log_sum_sq if theirs are. A thread owns a row.
template <typename T>
__global__ void __launch_bounds__(128)
    logprob_terms(const T* dlogprob, const T* dentropy, const T* dlse, const T* dsquares, const T* dmean,
                  const void* ids, const T* stats, const T* entropy, const T* log_sum_sq, T* terms, i64 rows, i64 k,
                  i64 ids_int64, i64 ignore_index, i64 vocabulary) {
    const i64 row = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const Ids all{ids, ids_int64 != 0, k, ignore_index, vocabulary};
    bool counts = false;
    float constant = 0.0f, slope = 0.0f, square = 0.0f, offset = 0.0f;
    for (i64 j = 0; j < k; ++j) {
        const i64 id = all.load(row * k + j);
        if (id != ignore_index) counts = true;
        if (dlogprob != nullptr && all.valid(id)) constant -= dlogprob[row * k + j];
    }
    if (counts) {
        if (dlse != nullptr) constant += dlse[row];
        if (dentropy != nullptr) slope = -dentropy[row], constant += slope * entropy[row];
        if (dsquares != nullptr) {
            constant -= 2.0f * dsquares[row];
            square = 2.0f * dsquares[row] * expf(-log_sum_sq[row]);
        }
        if (dmean != nullptr) offset = dmean[row] / static_cast<float>(vocabulary);
    }
    terms[row] = stats[row], terms[rows + row] = counts ? stats[rows + row] : kInfinity;
    terms[2 * rows + row] = constant, terms[3 * rows + row] = slope;
    terms[4 * rows + row] = square, terms[5 * rows + row] = offset;
}

// The gradient D of logits T in columns [first, first + cols), from the terms [6, rows], the scores `targets` of ids
// and the gradient of their log-probabilities (may be null). Ignored rows get 0, whatever their logits are. dx may be x
// if the types are equal. A block has CHUNKS vectors per thread of one row, or of several short ones; columns of ids
// are written again once all others are.
template <typename T, typename D>
__global__ void __launch_bounds__(256, 4)
    logprob_gradient(const T* x, D* dx, const void* ids, const float* temperatures, const float* terms,
                     const float* targets, const float* dlogprob, i64 rows, i64 cols, i64 x_stride, i64 dx_stride,
                     i64 ids_int64, i64 k, i64 ignore_index, i64 first, i64 vocabulary, i64 threads_per_row, i64 segments,
                     i64 by_segments, double scale, double softcap, double temperature) {
    constexpr int VEC = 16 / sizeof(T), CHUNKS = 4;
    constexpr bool kFast = sizeof(D) == 2;
    const RowGroup group(threads_per_row);
    const u32 row_block = divided(blockIdx.x, by_segments);
    const int segment = static_cast<int>(blockIdx.x - row_block * static_cast<u32>(segments));
    const i64 row = static_cast<i64>(row_block) * group.count + group.index;
    const bool exists = row < rows;
    const i64 at = exists ? row : 0;
    x += at * x_stride;
    dx += at * dx_stride;
    const AlignedRow<T> aligned(x, static_cast<int>(cols));
    const int start = segment * CHUNKS * group.threads + group.thread;
    const i64 offset = aligned.head + static_cast<i64>(start) * VEC;
    const int vectors = exists ? aligned.vectors : 0;
    Raw<16> raw[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (start + c * group.threads < vectors) raw[c] = load_raw<T, VEC, false>(x + offset + c * group.threads * VEC);

    const float warmth = temperature_of(temperatures, temperature, at);
    const Score<T> score(softcap, scale, warmth);
    const float top = anchored(terms[at]), level = terms[rows + at];
    const float constant = terms[2 * rows + at], tilt = terms[3 * rows + at];
    const float square = terms[4 * rows + at], mean_term = terms[5 * rows + at];
    const bool counts = level != kInfinity;
    auto of_score = [&](float z, float more) {
        const float logp = (z - top) - level, p = exponential<kFast>(logp);
        const float d = p == 0.0f ? 0.0f : p * fmaf(square, p, fmaf(tilt, logp, constant));
        return (d + mean_term + more) * score.slope(z, warmth);
    };
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (start + c * group.threads >= vectors) break;
        float z[VEC];
        unpack<T, VEC>(raw[c], z);
#pragma unroll
        for (int i = 0; i < VEC; ++i) z[i] = counts ? of_score(score(z[i]), 0.0f) : 0.0f;
        store<D, VEC>(dx + offset + c * group.threads * VEC, z);
    }
    const int edge = segment == 0 && exists ? aligned.edge(group.thread) : -1;
    if (edge >= 0) {
        const float d[1] = {counts ? of_score(score.at(x, edge), 0.0f) : 0.0f};
        store<D, 1>(dx + edge, d);
    }
    if (dlogprob == nullptr) return;
    __syncthreads();
    if (!exists) return;
    const Ids all{ids, ids_int64 != 0, k, ignore_index, vocabulary};
    for (i64 j = group.thread; j < k; j += group.threads) {
        const i64 id = all.load(row * k + j), local = id - first;
        if (!all.valid(id) || local < 0 || local >= cols) continue;
        const int inner = static_cast<int>(local) - aligned.head, vector = inner / VEC;
        const bool is_edge = inner < 0 || vector >= aligned.vectors;
        const int from = segment * CHUNKS * group.threads;
        if (is_edge ? segment != 0 : vector < from || vector >= from + CHUNKS * group.threads) continue;
        float more = 0.0f;  // equal ids write equal numbers
        for (i64 i = 0; i < k; ++i)
            if (all.load(row * k + i) == id) more += dlogprob[row * k + i];
        const float d[1] = {of_score(targets[j * rows + row], more)};
        store<D, 1>(dx + local, d);
    }
}

}  // namespace rtk
