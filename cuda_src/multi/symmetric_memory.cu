// Memory of several GPUs that each of them can address: signals between them, and sums over them. `pads` and `buffers` are
// tables with the address that every rank's memory has here. A pad has a word per slot and rank: how often that rank has
// signalled this one in this slot, less what was waited for. So signals are never lost or mixed up, whoever is faster.
//
// symmetric_signal: one block, thread p for rank p. symmetric_sum: a thread owns N consecutive elements of the result and
// adds those of all ranks in the order of ranks, in fp32, so that all ranks get the same bits; grid: any.
#include "common/vec.cuh"
#include "ptx/system_words.cuh"

namespace rtk {

template <int kRanks>
__global__ void __launch_bounds__(kRanks)
    symmetric_signal(u32* const* pads, i64 rank, i64 world, i64 slot, i64 arrives, i64 waits) {
    const i64 peer = threadIdx.x;
    if (peer >= world) return;
    if (arrives) ptx::add_word_release_system(pads[peer] + slot * world + rank, 1u);
    if (waits) {
        u32* own = pads[rank] + slot * world + peer;
        while (ptx::ld_word_acquire_system(own) == 0u) {
        }
        ptx::add_word_release_system(own, ~0u);
    }
}

template <typename T, typename Result, int N>
__global__ void __launch_bounds__(256)
    symmetric_sum(const T* const* buffers, Result* y, i64 vectors, i64 world) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += step) {
        float sum[N];
        load_stream<T, N>(buffers[0] + i * N, sum);
        for (i64 peer = 1; peer < world; ++peer) {
            float more[N];
            load_stream<T, N>(buffers[peer] + i * N, more);
#pragma unroll
            for (int k = 0; k < N; ++k) sum[k] += more[k];
        }
        store<Result, N>(y + i * N, sum);
    }
}

}  // namespace rtk
