// Cross entropy of few rows, in one pass or forward only, in one launch: a row is divided among so many threads, in up
// to eight blocks, that each has no more than CHUNKS vectors of it. Sums over the rows are computed here, too. The
// formulas: cross_entropy.cuh.
#include "loss/row_in_registers.cuh"
#include "loss/row_cluster.cuh"

namespace rtk {

RTK_DEVICE float block_sum(float v, float (&slots)[kWarp]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = static_cast<int>(blockDim.x) / kWarp;
    v = warp_reduce<Sum>(v);
    if (lane == 0) slots[threadIdx.x / kWarp] = v;
    __syncthreads();
    return warp_reduce<Sum>(lane < warps ? slots[lane] : 0.0f);
}

// Sums over the rows: every block counts its valid rows, and the last one to finish adds the losses in a fixed order.
struct RowSums {
    enum Kind { kNone, kMean, kSum };
    Kind kind;
    float* out;
    float* accuracy;
    float* factor;  // 1 / number of valid rows; may be null
    u32* arrived;   // was 0

    // The number of valid rows, if it is needed.
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
    // All threads of a block call this after their last write.
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
        // A division, not a product with a rounded reciprocal: the mean of equal losses is that loss.
        const float divisor = kind == kMean ? count : 1.0f;
        out[0] = divisor == 0.0f ? 0.0f : whole / divisor;
        if (correct != nullptr) accuracy[0] = divisor == 0.0f ? 0.0f : right / divisor;
        if (factor != nullptr) factor[0] = count == 0.0f ? 0.0f : 1.0f / count;
    }
};

// Thread i of a row's cluster has the vectors i, i + threads, ... (CHUNKS of them). Without dx only the results of the
// rows. dx may be x: all of a row is read before any of it is written.
template <typename T>
__global__ void __launch_bounds__(896, 1)
    cross_entropy_few_rows(const T* x, T* dx, const void* labels, float* loss, float* stats, float* correct, float* out,
                      float* accuracy, float* factor, u32* arrived, i64* report, i64 rows, i64 cols, i64 x_stride,
                      i64 dx_stride, i64 labels_int64, i64 ignore_index, i64 kind, i64 blocks, i64 threads, double smoothing,
                      double z_loss, double per_column) {
    constexpr int CHUNKS = 5;
    __shared__ Exchange<8 * 896 / kWarp> exchange;
    __shared__ float slots[2][kWarp];
    ptx::launch_dependents();
    const RowCluster cluster(blocks, threads);
    const int row = cluster.row(), columns = static_cast<int>(cols), count_of_rows = static_cast<int>(rows);
    const T* source = x + row * x_stride;
    RowInRegisters<T, CHUNKS, true> own_part(source, columns, true, cluster.thread, cluster.threads);
    // Loaded now, used when the row has arrived.
    const Labels all{labels, labels_int64 != 0, ignore_index, 0, cols};
    const i64 name = all.load(row);
    own_part.load_edge(source);
    if (cluster.blocks > 1) cluster.meet();  // other blocks must have started before their memory is written
    const NoCap cap;
    const int label = all.column(name, row, columns, report, cluster.leads());
    float target = -kInfinity;
    if (label >= 0) target = score_at(source, label, cap);
    const RowSums sums{static_cast<RowSums::Kind>(kind), out, accuracy, factor, arrived};
    const float count = sums.count(all, count_of_rows, slots[0]);

    // Exponentials are relative to the largest score of the warp.
    const bool totals = not_zero(smoothing);
    const float near = warp_reduce<Max>(own_part.peak());
    const Base<T> base(near);
    float top = near, total = 0.0f;
    if (totals) total = warp_reduce<Sum>(own_part.total());
    float sum = warp_reduce<Sum>(own_part.exponentials(base, near));
    share_row(top, sum, total, cluster, exchange, totals);  // the label's score has been read before any store
    if (correct != nullptr) {
        const bool largest = label >= 0 && target == top;
        const float hit = cluster.first_of_its_score(source, largest ? label : 0, top, cap);
        if (cluster.leads()) correct[row] = largest ? hit : 0.0f;
    }
    const Terms terms(smoothing, z_loss, per_column);
    const float level = logf(sum);
    if (cluster.leads()) RowResults{loss, stats, rows}.write(row, label, terms, top, level, target, total);
    if (dx != nullptr) {
        const Gradient<T> gradient(terms, sums.gradient(count), top, level, ptx::rcp(sum));
        const float scale = gradient.scale * base.correction * exponential<false>(near - anchored(top));
        own_part.store_gradient(dx + row * dx_stride, gradient, scale, label, target);
    }
    sums.add_up(loss, correct, count_of_rows, count, slots);
}

}  // namespace rtk
