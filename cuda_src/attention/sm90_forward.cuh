// The loop over tiles of keys and values of a consumer warpgroup, shared by the wgmma forward kernels of 16-bit attention.
#pragma once
#include "attention/sm90_tile.cuh"
#include "common/pipeline.cuh"

namespace rtk {

template <int kStages>
struct ConsumerPipes {
    Pipeline<1> q;
    Pipeline<kStages> k, v;
};

template <int kStages>
struct ConsumerStates {
    PipelineState<1> q;
    PipelineState<kStages> k, v;
};

struct NothingBefore {
    RTK_DEVICE void operator()(int) const {}
};

// Adds softmax(q k^T) v of tiles last..first, in that order, to `o`: 64 rows of a tile of queries from byte `own_q` on. T is
// the type of q and k, V that of values and of the probabilities that they are multiplied by.
// A tile's scores are multiplied while the values of the tile before are; `to_probabilities(s, n, correction)` turns
// scores of tile n into probabilities, and `correction` rescales what was accumulated before. OVERLAP: the latter overlaps
// the product with values, too, which keeps the registers of its probabilities. Warpgroups take turns on the tensor cores
// between wait_for_cores and pass_cores. `before(n)` is called before tile n is waited for.
template <typename T, typename V, typename QTile, typename KTile, typename VTile, bool OVERLAP, int kStages, int N, typename Wait,
          typename Pass, typename Softmax, typename Before = NothingBefore>
RTK_DEVICE void multiply_tiles(float (&o)[N], const ConsumerPipes<kStages>& pipes, ConsumerStates<kStages>& states,
                               ptx::SharedAddress own_q, ptx::SharedAddress k_tiles, ptx::SharedAddress v_tiles, int first,
                               int last, const Wait& wait_for_cores, const Pass& pass_cores, const Softmax& to_probabilities,
                               const Before& before = {}) {
    constexpr int BN = KTile::kRows;
    const bool speaks = threadIdx.x % kWarp == 0;
    u32 p[BN / 16][4];
    float s[BN / 2], correction[2];
    auto multiply_keys = [&] {
        ptx::wgmma_fence();
        multiply_rows<T, QTile::kRows, BN, KTile::kColumns>(s, own_q, k_tiles + states.k.stage * KTile::kBytes);
        ptx::wgmma_commit();
    };
    auto multiply_values = [&] {
        pipes.v.wait(states.v);
        ptx::wgmma_fence();
        multiply_packed<V, BN>(o, p, v_tiles + states.v.stage * VTile::kBytes, true);
        ptx::wgmma_commit();
    };
    auto release_keys = [&] {
        if (speaks) pipes.k.release(states.k);
        states.k.advance();
    };
    auto release_values = [&] {
        if (speaks) pipes.v.release(states.v);
        states.v.advance();
    };
    before(last);
    pipes.q.wait(states.q);
    pipes.k.wait(states.k);
    wait_for_cores();
    multiply_keys();
    pass_cores();
    ptx::wgmma_wait<0>();
    release_keys();
    to_probabilities(s, last, correction);
    pack_rows<V>(p, s);
#pragma unroll 1
    for (int n = last - 1; n >= first; --n) {
        before(n);
        pipes.k.wait(states.k);
        wait_for_cores();
        multiply_keys();
        multiply_values();
        pass_cores();
        ptx::wgmma_wait<OVERLAP ? 1 : 0>();
        release_keys();
        to_probabilities(s, n, correction);
        ptx::wgmma_wait<0>();
        release_values();
#pragma unroll
        for (int j = 0; j < N; ++j) o[j] *= correction[j / 2 % 2];
        pack_rows<V>(p, s);
    }
    if (speaks) pipes.q.release(states.q);
    states.q.advance();
    multiply_values();
    ptx::wgmma_wait<0>();
    release_values();
}

}  // namespace rtk
