// Threads that share a row of logits: those of a block, or of all blocks of a cluster.
#pragma once
#include "loss/cross_entropy.cuh"
#include "ptx/cluster.cuh"

namespace rtk {

struct RowCluster {
    int blocks;   // of a row
    int threads;  // of all of them; from the host, because a kernel's parameters need no registers
    int thread;   // among them

    RTK_DEVICE RowCluster(i64 blocks, i64 threads) : blocks(static_cast<int>(blocks)), threads(static_cast<int>(threads)) {
        thread = static_cast<int>(threadIdx.x);
        if (blocks > 1) thread += ptx::cluster_rank() * static_cast<int>(blockDim.x);
    }
    // The first row of this cluster.
    RTK_DEVICE int row() const { return static_cast<int>(blockIdx.x) / blocks; }
    RTK_DEVICE bool leads() const { return thread == 0; }
    // Orders all accesses of the cluster's threads before it against those after it.
    RTK_DEVICE void meet() const {
        if (blocks > 1) {
            ptx::cluster_barrier();
        } else {
            __syncthreads();
        }
    }
    // For the leader: 1 if no column before the label has the label's score, the largest of the row, else 0. The logits
    // may be overwritten afterwards.
    template <typename T, typename C>
    RTK_DEVICE float first_of_its_score(const T* row, int column, float top, const C& cap) const {
        const int here = static_cast<int>(blockDim.x);  // threads of other blocks start beyond it
        const float earlier = thread < here ? has_score(row, column, top, cap, thread, here) : 0.0f;
        const int some = __syncthreads_or(earlier != 0.0f);
        meet();
        return some ? 0.0f : 1.0f;
    }
};

// The statistics of all warps of a cluster.
template <int WARPS>
struct Exchange {
    float top[WARPS], sum[WARPS], total[WARPS];
};

// Merges the statistics of a thread's warp into those of the row: the largest score, the sum of exponentials relative
// to it, the sum of scores (if needed). One barrier. The blocks of a cluster have synchronised before.
template <int WARPS>
RTK_DEVICE void share_row(float& top, float& sum, float& total, const RowCluster& cluster, Exchange<WARPS>& exchange,
                          bool totals) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warps = cluster.threads / kWarp, warp = cluster.thread / kWarp;
    if (cluster.blocks == 1) {
        if (lane == 0) exchange.top[warp] = top, exchange.sum[warp] = sum, exchange.total[warp] = total;
    } else if (lane < cluster.blocks) {  // to all of them
        ptx::st_cluster(ptx::shared_address(exchange.top + warp), lane, top);
        ptx::st_cluster(ptx::shared_address(exchange.sum + warp), lane, sum);
        ptx::st_cluster(ptx::shared_address(exchange.total + warp), lane, total);
    }
    cluster.meet();
    top = -kInfinity, sum = 0.0f;
#pragma unroll 1
    for (int i = lane; i < warps; i += kWarp) top = fmaxf(top, exchange.top[i]);
    top = warp_reduce<Max>(top);
#pragma unroll 1
    for (int i = lane; i < warps; i += kWarp)
        sum += exchange.sum[i] * exponential<false>(exchange.top[i] - anchored(top));
    sum = warp_reduce<Sum>(sum);
    if (!totals) return;
    total = 0.0f;
#pragma unroll 1
    for (int i = lane; i < warps; i += kWarp) total += exchange.total[i];
    total = warp_reduce<Sum>(total);
}

// The same from the statistics of each thread.
template <typename T, int WARPS>
RTK_DEVICE void share_row(Running<T>& running, const RowCluster& cluster, Exchange<WARPS>& exchange, bool totals) {
    const float warp_top = warp_reduce<Max>(running.top);
    running.sum = warp_reduce<Sum>(running.sum * exponential<false>(running.top - anchored(warp_top)));
    running.top = warp_top;
    if (totals) running.total = warp_reduce<Sum>(running.total);
    share_row(running.top, running.sum, running.total, cluster, exchange, totals);
}

}  // namespace rtk
