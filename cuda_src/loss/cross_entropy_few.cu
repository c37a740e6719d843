// Cross entropy of few rows, in one pass or forward only, in one launch: every row is cut into pieces for so many threads,
// in up to eight blocks, that each reads a few of them at once; sums over the rows are made here, too.
// The formulas: cross_entropy.cuh.
#include "loss/cross_entropy_team.cuh"

namespace rtk {

RTK_DEVICE float block_sum(float v, float (&slots)[kWarp]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
    v = warp_reduce<Sum>(v);
    if (lane == 0) slots[threadIdx.x / kWarp] = v;
    __syncthreads();
    return warp_reduce<Sum>(lane < warps ? slots[lane] : 0.0f);
}

// Sums over the rows: every block counts those that count, the last one to end adds up their losses in a fixed order.
struct RowSums {
    enum Kind { kNone, kMean, kSum };
    Kind kind;
    float* out;
    float* accuracy;
    float* factor;  // 1 / rows that count; may be null
    u32* arrived;   // was 0

    // The rows that count, if somebody wants to know.
    RTK_DEVICE float count(const Labels& labels, int rows, float (&slots)[kWarp]) const {
        if (kind != kMean && factor == nullptr) return 0.0f;
        int counted = 0;
#pragma unroll 4
        for (int row = static_cast<int>(threadIdx.x); row < rows; row += static_cast<int>(blockDim.x))
            counted += labels.load(row) != labels.ignore_index;
        return block_sum(static_cast<float>(counted), slots);
    }
    // The gradient of a row's loss.
    RTK_DEVICE float gradient(float count) const {
        return kind != kMean ? 1.0f : count == 0.0f ? 0.0f : 1.0f / count;
    }
    // All threads of a block call it after their last write.
    RTK_DEVICE void add_up(const float* loss, const float* correct, int rows, float count,
                           float (&slots)[2][kWarp]) const {
        if (kind == kNone) return;
        __shared__ bool last;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(arrived, 1u) + 1 == gridDim.x;
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        double sum = 0.0, hits = 0.0;
#pragma unroll 4
        for (int row = static_cast<int>(threadIdx.x); row < rows; row += static_cast<int>(blockDim.x)) {
            sum += static_cast<const volatile float*>(loss)[row];
            if (correct != nullptr) hits += static_cast<const volatile float*>(correct)[row];
        }
        const float whole = block_sum(static_cast<float>(sum), slots[0]);
        const float right = correct == nullptr ? 0.0f : block_sum(static_cast<float>(hits), slots[1]);
        if (threadIdx.x != 0) return;
        // The quotient, not the product with a rounded reciprocal: the mean of equal losses is that loss.
        const float divisor = kind == kMean ? count : 1.0f;
        out[0] = divisor == 0.0f ? 0.0f : whole / divisor;
        if (correct != nullptr) accuracy[0] = divisor == 0.0f ? 0.0f : right / divisor;
        if (factor != nullptr) factor[0] = count == 0.0f ? 0.0f : 1.0f / count;
    }
};

// Thread i of a row's team has the pieces i, i + threads, ... (CHUNKS of them). Without dx only the results of the rows.
// dx may be x: all of a row is read before any of it is written.
template <typename T>
__global__ void __launch_bounds__(768, 1)
    cross_entropy_few(const T* x, T* dx, const void* labels, float* loss, float* stats, float* correct, float* out,
                      float* accuracy, float* factor, u32* arrived, i64* report, i64 rows, i64 cols, i64 x_stride,
                      i64 dx_stride, i64 wide, i64 ignore_index, i64 kind, i64 blocks, i64 threads, double smoothing,
                      double z_loss, double per_column) {
    constexpr int VEC = 16 / sizeof(T), CHUNKS = 5;
    __shared__ Exchange<128> exchange;
    __shared__ float slots[2][kWarp];
    ptx::launch_dependents();
    const Team team(blocks, threads);
    const int row = team.row(), columns = static_cast<int>(cols), count_of_rows = static_cast<int>(rows);
    const T* source = x + row * x_stride;
    const Pieces<T> pieces(source, columns);
    const int pitch = team.threads * VEC;
    const int offset = pieces.head + team.thread * VEC;
    const int ahead = pieces.vectors - team.thread;
    const int edge = pieces.edge(team.thread);
    const Labels all{labels, wide != 0, ignore_index, 0, cols};
    Raw<16> raw[CHUNKS];
    load_batch<T>(raw, source + offset, pitch, ahead, team.threads);
    // Requested now, looked at when the row is there.
    const i64 name = all.load(row);
    const NoCap cap;
    float border = -kInfinity, target = -kInfinity;
    if (edge >= 0) border = score_at(source, edge, cap);
    if (team.blocks > 1) team.meet();  // before the others are written to, they must have started
    const int label = all.column(name, row, columns, report, team.leads());
    const bool counts = label >= 0;
    if (counts) target = score_at(source, label, cap);
    const RowSums sums{static_cast<RowSums::Kind>(kind), out, accuracy, factor, arrived};
    const float count = sums.count(all, count_of_rows, slots[0]);

    // One exponential for every element, relative to the largest score of the warp; it becomes its gradient.
    const bool totals = not_zero(smoothing);
    const float near = warp_reduce<Max>(fmaxf(peak_of<T, CHUNKS>(raw), border));
    const Base<T> base(near);
    float total = 0.0f;
    if (totals) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float z[VEC], part = 0.0f;
            unpack<T, VEC>(raw[c], z);
#pragma unroll
            for (int i = 0; i < VEC; ++i) part += z[i];
            if (c * team.threads < ahead) total += part;
        }
        if (edge >= 0) total += border;
        total = warp_reduce<Sum>(total);
    }
    float e[CHUNKS][VEC], part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        ptx::forget(raw[c]);
        unpack<T, VEC>(raw[c], e[c]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) part[i % 2] += e[c][i] = base.at(e[c][i]);
    }
    float sum = (part[0] + part[1]) * base.correction;
    if (edge >= 0) sum += exponential<Base<T>::kFast>(border - anchored(near));
    sum = warp_reduce<Sum>(sum);
    float top = near;
    share_row(top, sum, total, team, exchange, totals);  // the label's score has been read before any store
    if (correct != nullptr) {
        const bool largest = counts && target == top;
        const float hit = team.first_of_its_score(source, largest ? label : 0, top, cap);
        if (team.leads()) correct[row] = largest ? hit : 0.0f;
    }
    const Terms terms(smoothing, z_loss, per_column);
    const float level = logf(sum);
    if (team.leads()) RowResults{loss, stats, rows}.write(row, label, terms, top, level, target, total);
    if (dx != nullptr) {
        const Gradient<T> gradient(terms, sums.gradient(count), top, level, ptx::rcp(sum));
        const float scale = gradient.scale * base.correction * exponential<false>(near - anchored(top));
        T* to = dx + row * dx_stride;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c * team.threads >= ahead) break;
            if (counts) {
#pragma unroll
                for (int i = 0; i < VEC; ++i) e[c][i] = e[c][i] * scale - gradient.offset;
                store<T, VEC>(to + offset + c * pitch, e[c]);
            } else {
                store_zeros<T, VEC>(to + offset + c * pitch);
            }
        }
        if (edge >= 0) {
            if (counts) {
                gradient.store_one(to + edge, border, cap, 0.0f);
            } else {
                store_zeros<T, 1>(to + edge);
            }
        }
        if (counts && pieces.owner(label, team.threads) == team.thread)
            gradient.store_one(to + label, target, cap, gradient.target);
    }
    sums.add_up(loss, correct, count_of_rows, count, slots);
}

}  // namespace rtk
