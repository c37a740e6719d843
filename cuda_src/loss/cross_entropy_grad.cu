// Cross entropy in one pass: reads the logits once, writes loss and gradient. The formulas: cross_entropy.cuh.
//
// g, the gradient of a row's loss, is factor[0] (1 if null). Ignored rows get gradient 0. dx may be x: a thread reads
// each of its vectors for the last time before it overwrites it, nobody else reads them, and the label's score and the
// check for equal scores come before.
#include "loss/row_in_registers.cuh"
#include "loss/row_cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/prefetch.cuh"

namespace rtk {

// Rows that fit the registers of a group: thread i has the vectors i, i + threads, ... (CHUNKS of them).
template <typename T>
__global__ void __launch_bounds__(512, 2)
    cross_entropy_grad_short(const T* x, T* dx, const void* labels, float* loss, float* stats, float* correct,
                             const float* factor, i64* report, i64 rows, i64 cols, i64 x_stride, i64 dx_stride,
                             i64 labels_int64, i64 ignore_index, i64 threads_per_row, double smoothing, double z_loss,
                             double per_column) {
    constexpr int CHUNKS = 4;
    __shared__ GroupScratch<1> scratch[2];
    ptx::launch_dependents();
    const RowGroup group(threads_per_row);
    const i64 row = static_cast<i64>(blockIdx.x) * group.count + group.index;
    const bool exists = row < rows;
    const int columns = static_cast<int>(cols);
    const T* source = x + (exists ? row : 0) * x_stride;
    RowInRegisters<T, CHUNKS> own_part(source, columns, exists, group.thread, group.threads);
    // Loaded now, used when the row has arrived.
    const Labels all{labels, labels_int64 != 0, ignore_index, 0, cols};
    const i64 name = exists ? all.load(row) : ignore_index;
    own_part.load_edge(source);
    const NoCap cap;
    const int label = all.column(name, row, columns, report, group.thread == 0);
    float target = -kInfinity;
    if (label >= 0) target = score_at(source, label, cap);

    const float top = group_reduce<Max, false>(own_part.peak(), group, scratch[0], 0);
    const Base<T> base(top);
    float total = 0.0f;
    if (not_zero(smoothing)) total = group_reduce<Sum, false>(own_part.total(), group, scratch[1], 0);
    const float sum = group_reduce<Sum, false>(own_part.exponentials(base, top), group, scratch[0], 1);
    if (correct != nullptr) {
        const bool largest = label >= 0 && target == top;
        const float hit = first_of_its_score(source, largest ? label : 0, top, cap, group, scratch[1]);
        if (exists && group.thread == 0) correct[row] = largest ? hit : 0.0f;
    }
    __syncwarp();  // like the barriers of wider groups: the label's score has been read before any store
    if (!exists) return;
    const Terms terms(smoothing, z_loss, per_column);
    const float level = logf(sum);
    if (group.thread == 0) RowResults{loss, stats, rows}.write(row, label, terms, top, level, target, total);
    ptx::wait_for_previous();
    const float g = factor == nullptr ? 1.0f : factor[0];
    const Gradient<T> gradient(terms, g, top, level, ptx::rcp(sum));
    own_part.store_gradient(dx + row * dx_stride, gradient, gradient.base_scale, label, target);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kLongInRegisters = 6;  // 9 do not fit its registers
#else
inline constexpr int kLongInRegisters = 9;
#endif

// Long rows: persistent blocks, each alone or with the others of its cluster, hold one row on their SMs: kInRegisters
// of each thread's vectors in registers, `slots` in shared memory; the rest is read again for the gradient, soon enough
// to come from L2.
//
// SMs are not equally fast, so after its second row a block claims the next one from a counter that was 0.
//
// Memory should be busy all the time: while the gradient of a row is written, vector by vector, the same vector of the
// next row is loaded into the register or slot that became free, and summed kLag pairs of slots later. A slot belongs
// to one thread; there are 2 * kLag of them or more, an even number. Everything is prefetched into L2 kPrefetchVectors
// vectors in advance, so that the first vectors of a row arrive while the sums of the previous row are computed, when
// no register is free. Not further in advance: data that waits in L2 for microseconds is evicted
// (docs/decisions/common.md).
template <typename T>
__global__ void __launch_bounds__(640, 1)
    cross_entropy_grad_long(const T* x, T* dx, const void* labels, float* loss, float* stats, float* correct,
                            const float* factor, i64* report, i64 rows, i64 cols, i64 x_stride, i64 dx_stride,
                            i64 labels_int64, i64 ignore_index, u32* drawn, i64 slots, i64 prefetch_switch, i64 blocks,
                            i64 cluster_threads, i64 clusters, double smoothing, double z_loss, double per_column) {
    constexpr int VEC = 16 / sizeof(T), kInRegisters = kLongInRegisters, kLag = 1, kBeyond = 3, kPrefetchVectors = 2;
    static_assert(kInRegisters % 3 == 0, "summed three at a time");
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Exchange<64> exchange[2];
    __shared__ int upcoming[2];  // the row after the one that is being read
    __shared__ float own_gradient;  // of the label, from and to the thread that owns it: saves a register
    ptx::launch_dependents();
    const RowCluster cluster(blocks, cluster_threads);
    const int thread = cluster.thread, threads = cluster.threads, pitch = threads * VEC;
    const int columns = static_cast<int>(cols), used = static_cast<int>(slots);
    const int count = static_cast<int>(rows);  // rows this long are fewer than 2^31
    const ptx::SharedAddress base = ptx::shared_address(memory + threadIdx.x * 16);
    const Labels all{labels, labels_int64 != 0, ignore_index, 0, cols};
    const NoCap cap;
    const bool totals = not_zero(smoothing);

    // The row being read: this thread's first vector, and the number of vectors from it to the end of the row (0 if the
    // row is ignored and nothing is read).
    const T* source;
    int remaining;
    Running<T> running;
    // The row being written: the same, for ignored rows too; its label's column, if this thread owns it.
    T* out = dx;
    int left = 0, own = -1;
    bool counts = false;
    Gradient<T> gradient(Terms(0.0, 0.0, 0.0), 0.0f, 0.0f, 0.0f, 0.0f);
    // Vectors of either row.
    Raw<16> raw[kInRegisters];

    auto write = [&](T* to, const Raw<16>& vector) {
        if (counts) {
            ptx::st<16>(to, gradient.template vector<VEC>(vector, cap));
        } else {
            store_zeros<T, VEC>(to);
        }
    };

    int row = -1, next = static_cast<int>(cluster.row()), phase = 0;
    int label = all.column(next, columns, report, cluster.leads());
    if (threadIdx.x == 0) upcoming[0] = next + static_cast<int>(clusters);
    cluster.meet();  // other blocks must have started before their memory is written
    while (true) {
        // From one row to the next: the first time there is nothing to write, the last time nothing to read.
        const T* start = x + (next < count ? next : row) * x_stride;
        source = start + AlignedRow<T, 128>(start, columns).head + thread * VEC;
        remaining = label >= 0 ? AlignedRow<T, 128>(start, columns).vectors - thread : 0;
        running.reset();
        // Incremented pointers: the compiler would keep all the multiples of `threads` in registers.
        const T* from = source;
        int to_read = remaining, to_write = left;
        // The first thread of a line prefetches it into L2; the last rounds prefetch for the next row.
        const T* fetched = from + kPrefetchVectors * pitch;
        int to_fetch = thread % 8 == 0 ? to_read - kPrefetchVectors * threads : 0;
        auto fetch = [&] {
            if (to_fetch > 0) ptx::prefetch_l2(fetched);
            fetched += pitch;
            to_fetch -= threads;
        };
#pragma unroll
        for (int c = 0; c < kInRegisters; ++c) {
            if (to_write > 0) write(out, raw[c]);
            fetch();
            if (to_read > 0) raw[c] = load_raw<T, VEC, false>(from);
            from += pitch, out += pitch;
            to_read -= threads, to_write -= threads;
        }
        ptx::SharedAddress slot = base, summed = base;
        int to_sum = remaining;
        const int slot_pitch = static_cast<int>(blockDim.x) * 16;
        auto sum_pair = [&] {
            if (to_sum > 0) {
                Raw<16> pair[2];
                pair[0] = ptx::ld_shared_16(summed);
                clear_scores<T>(pair[1]);
                if (to_sum > threads) pair[1] = ptx::ld_shared_16(summed + slot_pitch);
                running.add_batch(pair, to_sum, threads, totals);
            }
            summed = summed + 2 * slot_pitch;
            to_sum -= 2 * threads;
        };
#pragma unroll 1
        for (int s = 0; s < used; s += 2) {
            if (to_write > 0) {
                Raw<16> pair[2];
                clear(pair[0]), clear(pair[1]);
                if (counts) {
                    pair[0] = ptx::ld_shared_16(slot);
                    if (to_write > threads) pair[1] = ptx::ld_shared_16(slot + slot_pitch);
#pragma unroll
                    for (int c = 0; c < 2; ++c) pair[c] = gradient.template vector<VEC>(pair[c], cap);
                }
                ptx::st<16>(out, pair[0]);
                if (to_write > threads) ptx::st<16>(out + pitch, pair[1]);
            }
            if (s == static_cast<int>(prefetch_switch)) {
                Raw<4> index{{static_cast<u32>(upcoming[phase])}};
                ptx::forget(index);  // otherwise all of this is computed in every round, then selected
                const int after = static_cast<int>(index.w[0]);
                if (after < count) {
                    fetched = x + after * x_stride;
                    const AlignedRow<T, 128> there(fetched, columns);
                    fetched += there.head + thread * VEC;
                    to_fetch = thread % 8 == 0 ? there.vectors - thread : 0;
                }
            }
            fetch(), fetch();
            if (to_read > 0) ptx::cp_async_16(slot, from);
            if (to_read > threads) ptx::cp_async_16(slot + slot_pitch, from + pitch);
            ptx::cp_async_commit();
            from += 2 * pitch, out += 2 * pitch;
            to_read -= 2 * threads, to_write -= 2 * threads;
            slot = slot + 2 * slot_pitch;
            if (s == 2 * (kLag - 1)) {
                if (to_sum > 0) {
#pragma unroll
                    for (int c = 0; c < kInRegisters; c += 3) {
                        Raw<16> three[3];
#pragma unroll
                        for (int i = 0; i < 3; ++i) three[i] = raw[c + i];
                        running.add_batch(three, to_sum - c * threads, threads, totals);
#pragma unroll
                        for (int i = 0; i < 3; ++i) raw[c + i] = three[i];
                    }
                }
                to_sum -= kInRegisters * threads;
            }
            if (s >= 2 * kLag) {
                ptx::cp_async_wait<kLag>();
                sum_pair();
            }
        }
        if (own >= 0) {  // after the vector around it, which the same thread has written
            const float one[1] = {own_gradient};
            store<T, 1>(dx + row * dx_stride + own, one);
        }
        if (next >= count) break;

        // The rest of the sum, and what depends on it.
        row = next;
        next = upcoming[phase];
        ptx::wait_for_previous();
        // Loaded now, used when the sums are complete.
        int then = 0;
        if (cluster.leads()) then = 2 * static_cast<int>(clusters) + static_cast<int>(atomicAdd(drawn, 1u));
        const float g = factor == nullptr ? 1.0f : factor[0];
        const i64 next_label = next < count ? all.load(next) : ignore_index;
        Raw<sizeof(T)> target_raw;
        clear(target_raw);
        if (label >= 0) target_raw = load_raw<T, 1>(start + label);
        const AlignedRow<T, 128> aligned(start, columns);
        const int edge = aligned.edge(thread);
        Raw<sizeof(T)> border_raw;
        clear(border_raw);
        if (label >= 0 && edge >= 0) border_raw = load_raw<T, 1>(start + edge);
        ptx::cp_async_wait<0>();
#pragma unroll 1
        for (int s = 0; s < kLag; ++s) sum_pair();
        source = from;  // the rest of the row
#pragma unroll 1
        for (; to_read > 0; to_read -= kBeyond * threads, from += kBeyond * pitch) {
#pragma unroll
            for (int c = 0; c < kBeyond; ++c) fetch();
            Raw<16> beyond[kBeyond];
            load_batch<T>(beyond, from, pitch, to_read, threads);
            running.add_batch(beyond, to_read, threads, totals);
        }
        counts = label >= 0;
        float border[1];
        unpack<T, 1>(border_raw, border);
        if (counts && edge >= 0) running.add_edge(border[0], totals);
        phase ^= 1;
        if (cluster.leads())
            for (int i = 0; i < cluster.blocks; ++i)
                ptx::st_cluster(ptx::shared_address(upcoming + phase), i, __int_as_float(then));
        // Its barrier also orders the label's score before any store.
        share_row(running, cluster, exchange[phase], totals);
        float one_score[1];
        unpack<T, 1>(target_raw, one_score);
        const float target = one_score[0];
        if (correct != nullptr) {
            const bool largest = counts && target == running.top;
            const float hit = cluster.first_of_its_score(start, largest ? label : 0, running.top, cap);
            if (cluster.leads()) correct[row] = largest ? hit : 0.0f;
        }
        const Terms terms(smoothing, z_loss, per_column);
        const float level = logf(running.sum);
        if (cluster.leads())
            RowResults{loss, stats, rows}.write(row, label, terms, running.top, level, target, running.total);
        own = aligned.owner(label, threads) == thread ? label : -1;
        gradient = Gradient<T>(terms, g, running.top, level, ptx::rcp(running.sum));
        if (own >= 0) own_gradient = gradient.at(target, gradient.target);
        left = aligned.vectors - thread;
        out = dx + row * dx_stride;
        if (edge >= 0) {
            if (counts) {
                gradient.store_one(out + edge, border[0], cap, 0.0f);
            } else {
                store_zeros<T, 1>(out + edge);
            }
        }
        out += aligned.head + thread * VEC;
        // The rest of the row, from its end: what was read last is most likely still in L2.
        to_write = left - (kInRegisters + used) * threads;
        if (to_write > 0) {
            const int batches = (aligned.vectors - (kInRegisters + used) * threads - 1) / (kBeyond * threads);
            from = source + batches * kBeyond * pitch;
            T* to = out + (kInRegisters + used) * pitch + batches * kBeyond * pitch;
            int here = to_write - batches * kBeyond * threads;
#pragma unroll 1
            for (; here <= to_write; here += kBeyond * threads, from -= kBeyond * pitch, to -= kBeyond * pitch) {
                Raw<16> beyond[kBeyond];
                load_batch<T>(beyond, from, pitch, counts ? here : 0, threads);
#pragma unroll
                for (int c = 0; c < kBeyond; ++c)
                    if (here > c * threads) write(to + c * pitch, beyond[c]);
            }
        }
        label = all.column(next_label, next, columns, report, cluster.leads());
    }
}

}  // namespace rtk
