// Divergence of a student's distribution Q from a teacher's P, in slabs of fp32 logits. stats [5, rows]: top and level
// of the student, top and level of the teacher, KL(Q || M). `kind`: 0 is KL(P || Q), 1 is KL(Q || P), 2 is
// beta KL(P || M) + (1 - beta) KL(Q || M) with M = beta P + (1 - beta) Q. Terms with probability 0 are 0. All in fp32.
#include "loss/logprob.cuh"

namespace rtk {

struct Pair {
    float log_q, log_p;
};

// log q - log M and log p - log M.
struct Ratios {
    float student, teacher;
};

// The distributions of a row at one column.
struct Distributions {
    float q_top, q_level, p_top, p_level, inverse, beta;

    RTK_DEVICE Distributions(const float* stats, i64 row, i64 rows, double temperature, double beta)
        : q_top(anchored(stats[row])),
          q_level(stats[rows + row]),
          p_top(anchored(stats[2 * rows + row])),
          p_level(stats[3 * rows + row]),
          inverse(1.0f / static_cast<float>(temperature)),
          beta(static_cast<float>(beta)) {}

    RTK_DEVICE Pair at(float student, float teacher) const {
        return {(student * inverse - q_top) - q_level, (teacher * inverse - p_top) - p_level};
    }
    // From the larger of p and q, so that nothing overflows, and without a difference of two logarithms.
    RTK_DEVICE Ratios ratios(const Pair& d) const {
        const float gap = d.log_p - d.log_q, larger = gap > 0.0f ? beta : 1.0f - beta;
        const float level = logf(fmaf(1.0f - larger, expf(-fabsf(gap)), larger));  // log M - log max(p, q)
        return {-(fmaxf(gap, 0.0f) + level), fminf(gap, 0.0f) - level};
    }
};

RTK_DEVICE float times(float probability, float x) { return probability == 0.0f ? 0.0f : probability * x; }

// Adds the columns of a slab to parts [5, rows]: top and sum of the student's scores, of the teacher's, and for kind 0
// the sum of e^(z - top) (z - y) with z the teacher's scores and y the student's, for kind 1 with both exchanged. With
// `begins`, overwrites them. Rows whose id is ignored get the parts of equal distributions. One pass is enough for
// these kinds. A RowGroup owns a row; T is float.
template <typename T>
__global__ void __launch_bounds__(256)
    linear_divergence_parts(const T* student, const T* teacher, const i64* ids, float* parts, i64 rows, i64 cols,
                            i64 student_stride, i64 teacher_stride, i64 ignore_index, i64 threads_per_row, i64 kind,
                            i64 begins, double temperature) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch[3];
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool exists = row < rows, counts = exists && ids[row] != ignore_index;
    const i64 at = exists ? row : 0;
    const float inverse = 1.0f / static_cast<float>(temperature);
    // `own` is the distribution that weights the terms.
    const T* own_row = kind == 0 ? teacher + at * teacher_stride : student + at * student_stride;
    const T* other_row = kind == 0 ? student + at * student_stride : teacher + at * teacher_stride;
    RowParts<false, false> own, other;
    float cross = 0.0f;
    auto rebase = [&](float to) {
        cross *= Fall<false>(own.top, to).factor;
        own.rebase<false>(to);
    };
    auto add = [&](auto& z, auto& y) {
        constexpr int N = sizeof(z) / sizeof(float);
        float peak = z[0] * inverse;
#pragma unroll
        for (int i = 0; i < N; ++i) z[i] *= inverse, y[i] *= inverse, peak = fmaxf(peak, z[i]);
        if (peak > own.top) rebase(peak);
        other.template add<false>(y, false);
        const float anchor = anchored(own.top);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float e = expf(z[i] - anchor);
            own.sum += e;
            if (e != 0.0f) cross = fmaf(e, z[i] - y[i], cross);
        }
    };
    const int vectors = static_cast<int>(cols) / VEC;
    for (int v = group.thread; counts && v < vectors; v += group.threads) {
        float z[VEC], y[VEC];
        load_stream<T, VEC>(own_row + static_cast<i64>(v) * VEC, z);
        load_stream<T, VEC>(other_row + static_cast<i64>(v) * VEC, y);
        add(z, y);
    }
    for (int c = vectors * VEC + group.thread; counts && c < cols; c += group.threads) {
        float z[1] = {own_row[c]}, y[1] = {other_row[c]};
        add(z, y);
    }
    rebase(group_reduce<Max, false>(own.top, group, scratch[0], 0));
    own.sum = group_reduce<Sum, false>(own.sum, group, scratch[0], 1);
    cross = group_reduce<Sum, false>(cross, group, scratch[1], 0);
    other.rebase<false>(group_reduce<Max, false>(other.top, group, scratch[1], 1));
    other.sum = group_reduce<Sum, false>(other.sum, group, scratch[2], 0);
    if (!exists || group.thread != 0) return;
    if (!counts) own.top = other.top = 0.0f, own.sum = other.sum = 1.0f;
    float* of_own = parts + (kind == 0 ? 2 * rows : 0) + row;
    float* of_other = parts + (kind == 0 ? 0 : 2 * rows) + row;
    if (!begins && counts) {
        RowParts<false, false> more;
        more.top = *of_own, more.sum = of_own[rows];
        const float to = fmaxf(more.top, own.top);
        cross = cross * Fall<false>(own.top, to).factor + parts[4 * rows + row] * Fall<false>(more.top, to).factor;
        own.fold(more);
        more.top = *of_other, more.sum = of_other[rows];
        other.fold(more);
    }
    *of_own = own.top, of_own[rows] = own.sum;
    *of_other = other.top, of_other[rows] = other.sum;
    parts[4 * rows + row] = cross;
}

// Adds the columns of a slab to sums [2, rows]: the divergence, and KL(Q || M). With `begins`, overwrites them. Rows
// whose id is ignored are 0. A RowGroup owns a row; T is float.
template <typename T>
__global__ void __launch_bounds__(256)
    linear_divergence_sums(const T* student, const T* teacher, const float* stats, const i64* ids, float* sums, i64 rows,
                           i64 cols, i64 student_stride, i64 teacher_stride, i64 ignore_index, i64 threads_per_row,
                           i64 kind, i64 begins, double temperature, double beta) {
    constexpr int VEC = 16 / sizeof(T);
    __shared__ GroupScratch<1> scratch;
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool exists = row < rows, counts = exists && ids[row] != ignore_index;
    const i64 at = exists ? row : 0;
    const Distributions both(stats, at, rows, temperature, beta);
    student += at * student_stride, teacher += at * teacher_stride;
    float sum = 0.0f, mixed = 0.0f;
    auto add = [&](float x, float y) {
        const Pair d = both.at(x, y);
        if (kind == 0) {
            sum += times(expf(d.log_p), d.log_p - d.log_q);
        } else if (kind == 1) {
            sum += times(expf(d.log_q), d.log_q - d.log_p);
        } else {
            const Ratios ratios = both.ratios(d);
            const float of_student = times(expf(d.log_q), ratios.student);
            mixed += of_student;
            sum += both.beta * times(expf(d.log_p), ratios.teacher) + (1.0f - both.beta) * of_student;
        }
    };
    const int vectors = static_cast<int>(cols) / VEC;
    for (int v = group.thread; counts && v < vectors; v += group.threads) {
        float x[VEC], y[VEC];
        load_stream<T, VEC>(student + static_cast<i64>(v) * VEC, x);
        load_stream<T, VEC>(teacher + static_cast<i64>(v) * VEC, y);
#pragma unroll
        for (int i = 0; i < VEC; ++i) add(x[i], y[i]);
    }
    for (int c = vectors * VEC + group.thread; counts && c < cols; c += group.threads) add(student[c], teacher[c]);
    sum = group_reduce<Sum, false>(sum, group, scratch, 0);
    mixed = group_reduce<Sum, false>(mixed, group, scratch, 1);
    if (!exists || group.thread != 0) return;
    sums[row] = begins ? sum : sums[row] + sum;
    sums[rows + row] = begins ? mixed : sums[rows + row] + mixed;
}

// The gradient D in the student's logits of a slab; stats[4] is the divergence itself for kind 1. dx may be `student`
// if D is float. A thread owns VEC columns of a row; blocks are y over rows.
template <typename T, typename D>
__global__ void __launch_bounds__(256)
    linear_divergence_grad(const T* student, const T* teacher, D* dx, const float* dloss, const float* stats,
                           const i64* ids, i64 rows, i64 cols, i64 student_stride, i64 teacher_stride, i64 dx_stride,
                           i64 ignore_index, i64 kind, i64 segments, i64 by_segments, double temperature, double beta) {
    constexpr int VEC = 16 / sizeof(T);
    const u32 row_index = divided(blockIdx.x, by_segments);
    const i64 row = row_index, segment = blockIdx.x - row_index * static_cast<u32>(segments);
    const i64 first = (segment * blockDim.x + threadIdx.x) * VEC;
    if (first >= cols) return;
    const Distributions both(stats, row, rows, temperature, beta);
    const float centre = stats[4 * rows + row];
    const bool counts = ids[row] != ignore_index;
    const float g = dloss[row] * both.inverse;
    auto of_pair = [&](float x, float y) {
        if (!counts) return 0.0f;
        const Pair d = both.at(x, y);
        const float q = expf(d.log_q);
        if (kind == 0) return g * (q - expf(d.log_p));
        if (kind == 1) return g * times(q, (d.log_q - d.log_p) - centre);
        return g * (1.0f - both.beta) * times(q, both.ratios(d).student - centre);
    };
    student += row * student_stride, teacher += row * teacher_stride, dx += row * dx_stride;
    if (first + VEC <= cols) {
        float x[VEC], y[VEC];
        load_stream<T, VEC>(student + first, x);
        load_stream<T, VEC>(teacher + first, y);
#pragma unroll
        for (int i = 0; i < VEC; ++i) x[i] = of_pair(x[i], y[i]);
        store<D, VEC>(dx + first, x);
    } else {
        for (i64 c = first; c < cols; ++c) {
            const float d[1] = {of_pair(student[c], teacher[c])};
            store<D, 1>(dx + c, d);
        }
    }
}

}  // namespace rtk
