// Attention forward on sm_90a with 8-bit queries and keys, and 16-bit or 8-bit values: the computation of
// attention_mma_quant.cu with wgmma and TMA, in the order of attention_sm90_fwd.cu.
//
// A block takes tiles of 128 queries of one head from a counter: two consumer warpgroups of 64 queries each, and one
// warp that loads q and tiles of 128 keys and values, last keys first, through a ring of stages each. Scales are loaded
// along with their tiles, by cp.async, because their rows are not aligned.
//
// A score counts as 2^(factor[r] * scale_k[j] * sum), factor[r] = scale * scale_q * log2(e) of its row. With 16-bit
// values, int8 accumulators start at kShift, an integer whose bits are those of a float, so that one multiply-add turns
// them into scaled floats (off by less than one unit of the integer). With 8-bit values the ALUs that this needs are
// the bottleneck, and a conversion is faster.
//
// 16-bit values: the warpgroups are in ping-pong, and the products for a tile's scores overlap with the product of the
// previous tile's probabilities and values.
// 8-bit values (codes [d_v, keys], scales per column and 64 keys): probabilities become a left operand without shuffles
// because the keys of a tile are stored in a permuted order (KeyOrder). TMA writes them in that order: four
// neighbouring keys form one dimension of the tensor map, and each half of the tile takes two of them; so the number of
// rows of k is a multiple of 4. Each product over 64 keys starts from zero and is scaled and added in fp32, unless all keys
// share the scales of values (kValuesWhole): then tensor cores add to the sums, in the order of 16-bit values.
#include "attention/coded_softmax.cuh"
#include "attention/sm90_codes.cuh"
#include "attention/sm90_tile.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"

namespace rtk {

template <typename T, int QK, int PV, int DQK, int D>
__global__ void __launch_bounds__(384, 1)
    attention_sm90_quant(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                         const __grid_constant__ ptx::TensorMap v_map, const float* scale_q, const float* scale_k,
                         const float* scale_v, const i32* lengths, const i32* cu_q, const i32* cu_k, void* out, float* lse,
                         u32* counter, i64 batches, i64 heads, i64 heads_per_kv, i64 lq, i64 lkv, i64 d_v, i64 out_batch,
                         i64 out_row, i64 out_head, i64 lse_batch, i64 lse_head, i64 sq_batch, i64 sq_head, i64 sq_shift,
                         i64 sk_batch, i64 sk_head, i64 sk_shift, i64 sv_batch, i64 sv_head, i64 sv_block, i64 left, i64 right,
                         i64 heads_together, i64 out_fp16, double scale) {
    constexpr bool kCodes = PV != kValues16, kDirect = PV == kValues16 || PV == kValuesWhole;
    constexpr int kBoxes = (DQK + 127) / 128;  // of 128 columns of q and k
    constexpr int BM = 128, BN = 128, kConsumers = 8, kStages = !kDirect ? 4 : DQK > 128 ? 2 : 3, kHalf = 64;  // kHalf: keys that share scales of values
    constexpr int kProducerRegisters = kDirect ? 40 : 56, kConsumerRegisters = kDirect ? 232 : 224;
    using Score = ScoreProduct<QK, kDirect>;
    using Order = KeyOrder<kCodes>;
    using VTile = Boxed<BN, D>;
    constexpr u32 kRowBytes = kTileRow, kQBytes = kBoxes * BM * kRowBytes, kKBytes = kBoxes * BN * kRowBytes;
    constexpr u32 kVBytes = kCodes ? D * kRowBytes : VTile::kBytes;
    constexpr u32 kKeyScales = BN * 4, kValueScales = kDirect ? 0 : 2 * D * 4;  // bytes of a stage
    extern __shared__ u8 memory[];
    const ptx::SharedAddress q_tile = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress k_tiles = q_tile + kQBytes, v_tiles = k_tiles + kStages * kKBytes;
    const ptx::SharedAddress key_scales = v_tiles + kStages * kVBytes, value_scales = key_scales + kStages * kKeyScales;
    const ptx::SharedAddress barriers = value_scales + kStages * kValueScales;
    const Pipeline<1> q_pipe{barriers};
    const Pipeline<kStages> k_pipe{barriers + Pipeline<1>::kBytes};
    const Pipeline<kStages> v_pipe{k_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress patch = v_pipe.barriers + Pipeline<kStages>::kBytes;
    u8* const handover_memory = memory + (patch + 8 - ptx::shared_address(memory));
    // Two numbers in shared memory.
    auto pair_at = [&](ptx::SharedAddress address) {
        return *reinterpret_cast<const float2*>(memory + (address - ptx::shared_address(memory)));
    };
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const u32 tiles = static_cast<u32>(ceil_div(lq, BM));
    const u32 count = tiles * static_cast<u32>(heads) * static_cast<u32>(batches);
    DrawnSource<WarpHandover> source(counter, WarpHandover(handover_memory, warp == kConsumers));

    if (threadIdx.x == 0) {
        q_pipe.init(1, kConsumers);
        k_pipe.init(1 + kWarp, kConsumers);
        v_pipe.init(kDirect ? 1 : 1 + kWarp, kConsumers);
        ptx::mbarrier_init(patch, 1);
        source.handover.init(kConsumers + 1);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<kProducerRegisters>();
        if (warp != kConsumers) return;
        PipelineState<1> q_state;
        PipelineState<kStages> k_state, v_state;
        u32 patched = 0;
        for (u32 index; (index = source.draw()) < count;) {
            const QueryTile tile(index, tiles, static_cast<u32>(heads), static_cast<u32>(batches),
                                 static_cast<u32>(heads_together));
            const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
            const Interval any = Mask(sequence, left, right).keys_any(tile.m * BM, tile.m * BM + BM);
            if (tile.m * BM >= sequence.lq || any.empty()) continue;
            const int kv_head = tile.head / static_cast<int>(heads_per_kv), batch = cu_q == nullptr ? tile.batch : 0;
            const int first = any.first / BN, last = (any.end - 1) / BN;

            q_pipe.acquire(q_state);
            if (lane == 0) {
                const ptx::SharedAddress full = q_pipe.expect(q_state, kQBytes);
#pragma unroll
                for (int i = 0; i < kBoxes; ++i)
                    ptx::tma_load_4d(q_tile + i * BM * kRowBytes, q_map, full, 128 * i, sequence.q_row + tile.m * BM, tile.head, batch);
            }
            q_state.advance();
            auto fetch_keys = [&](int n) {
                k_pipe.acquire(k_state);
                const ptx::SharedAddress to = k_tiles + k_state.stage * kKBytes;
                if (lane == 0) {
                    const ptx::SharedAddress full = k_pipe.expect(k_state, kKBytes);
#pragma unroll
                    for (int i = 0; i < kBoxes; ++i) {
                        const ptx::SharedAddress box = to + i * BN * kRowBytes;
                        if constexpr (kCodes) {
#pragma unroll
                            for (int half = 0; half < 2; ++half)
                                ptx::tma_load_5d(box + half * (BN * kRowBytes / 2), k_map, full, 128 * i, 2 * half, n * (BN / 4),
                                                 kv_head, batch);
                        } else {
                            ptx::tma_load_4d(box, k_map, full, 128 * i, sequence.k_row + n * BN, kv_head, batch);
                        }
                    }
                }
                const float* const from = scale_k + tile.batch * sk_batch + kv_head * sk_head + sequence.k_row;
                for (int i = lane; i < BN; i += kWarp)
                    ptx::cp_async_4_or_zero(key_scales + k_state.stage * kKeyScales + 4 * i, from + ((n * BN + i) >> sk_shift),
                                            n * BN + i < sequence.keys);
                ptx::cp_async_arrive(k_pipe.full(k_state));
                k_state.advance();
            };
            fetch_keys(last);
#pragma unroll 1
            for (int n = last; n >= first; --n) {
                if (n > first) fetch_keys(n - 1);
                v_pipe.acquire(v_state);
                const ptx::SharedAddress to = v_tiles + v_state.stage * kVBytes;
                if constexpr (kCodes) {
                    if (lengths != nullptr && n * BN + BN > sequence.keys) {
                        // As in Boxed::fetch_some: rows past the last 16 valid keys may be NaN.
                        if (lane == 0) {
                            ptx::mbarrier_arrive_expect(patch, kVBytes);
                            ptx::tma_load_4d(to, v_map, patch, n * BN, 0, kv_head, batch);
                        }
                        ptx::mbarrier_wait(patch, patched);
                        patched ^= 1u;
                        for (int row = lane; row < D; row += kWarp)
                            for (int vector = (sequence.keys - n * BN + 15) / 16; vector < 8; ++vector)
                                ptx::st_shared_16(to + row * kRowBytes + ((vector ^ row % 8) << 4), Raw<16>{{0, 0, 0, 0}});
                        ptx::fence_async_shared();
                        v_pipe.commit_warp(v_state);
                    } else if (lane == 0) {
                        ptx::tma_load_4d(to, v_map, v_pipe.expect(v_state, kVBytes), n * BN, 0, kv_head, batch);
                    }
                    if constexpr (!kDirect) {
                        const float* const from = scale_v + tile.batch * sv_batch + kv_head * sv_head;
                        for (int i = lane; i < 2 * D; i += kWarp)
                            ptx::cp_async_4_or_zero(value_scales + v_state.stage * kValueScales + 4 * i,
                                                    from + (2 * n + i / D) * sv_block + i % D,
                                                    i % D < d_v && n * BN + i / D * kHalf < sequence.keys);
                        ptx::cp_async_arrive(v_pipe.full(v_state));
                    }
                } else if ((lengths != nullptr || cu_k != nullptr) && n * BN + BN > sequence.keys) {
                    VTile::fetch_some(to, v_map, patch, patched, sequence.k_row + n * BN, kv_head, batch, sequence.keys - n * BN);
                    v_pipe.commit_warp(v_state);
                } else if (lane == 0) {
                    VTile::fetch(to, v_map, v_pipe.expect(v_state, kVBytes), sequence.k_row + n * BN, kv_head, batch);
                }
                __syncwarp();
                v_state.advance();
            }
        }
        return;
    }

    ptx::registers_take<kConsumerRegisters>();
    const int group = warp / 4, own_row = group * 64 + warp % 4 * 16 + lane / 4, t = lane % 4;
    const bool speaks = lane == 0;
    auto wait_for_cores = [&] { ptx::named_barrier_sync(1 + group, 256); };
    auto pass_cores = [&] { ptx::named_barrier_arrive(2 - group, 256); };
    if (kDirect && group == 1) pass_cores();

    PipelineState<1> q_state;
    PipelineState<kStages> k_state, v_state;
    for (u32 index; (index = source.draw()) < count;) {
        index = __shfl_sync(0xffffffffu, index, 0);  // shuffled so that the compiler knows it is uniform
        const QueryTile tile(index, tiles, static_cast<u32>(heads), static_cast<u32>(batches),
                             static_cast<u32>(heads_together));
        const Sequence sequence = sequence_at(tile.batch, lq, lkv, cu_q, cu_k, lengths);
        const WarpgroupRows own(Mask(sequence, left, right), tile.m * BM, BM, group);
        if (own.row0 >= sequence.lq) continue;
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own.row0 + own_row + 8 * r;
            const i64 at = tile.batch * sq_batch + tile.head * sq_head + sequence.q_row + (i >> sq_shift);
            factor[r] = i < sequence.lq ? scale_q[at] * (static_cast<float>(scale) * kLog2e) : 1.0f;
            if (factor[r] == 0.0f) factor[r] = 1e-30f;  // no 0 * inf where keys are masked
        }
        SoftmaxState state;
        float o[D / 2];
#pragma unroll
        for (float& x : o) x = 0.0f;

        typename Score::Sum sums[BN / 2];
        u32 p[BN / (kCodes ? 32 : 16)][4];
        float correction[2];
        const ptx::SharedAddress own_q = q_tile + group * 64 * kRowBytes;
        auto multiply_keys = [&] {
            const u64 a = k_major_descriptor(own_q), b = k_major_descriptor(k_tiles + k_state.stage * kKBytes);
#pragma unroll
            for (int step = 0; step < DQK / 32; ++step) {
                const u64 box = step / 4, at = step % 4 * kNextKMajor;
                ptx::wgmma_typed<typename Score::Code, typename Score::Code, false, false>(
                    sums, a + box * (BM * kRowBytes >> 4) + at, b + box * (BN * kRowBytes >> 4) + at, Score::kShifted || step != 0);
            }
        };
        auto clear = [&] {
            if constexpr (Score::kShifted) {
#pragma unroll
                for (auto& x : sums) x = Score::kShiftBits;
            }
        };
        // Turns sums of tile n into probabilities in `s`; the stage of its keys is free afterwards.
        auto to_probabilities = [&](float(&s)[BN / 2], int n) {
            const ptx::SharedAddress scales = key_scales + k_state.stage * kKeyScales + 4 * Order::of_lane(t);
#pragma unroll
            for (int j = 0; j < BN / 8; ++j) {
                const float2 by = pair_at(scales + 4 * Order::of_tile(j));
                const float2 shift_by = make_float2(Score::kShift * by.x, Score::kShift * by.y);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    s[4 * j + e] = Score::scaled(sums[4 * j + e], e % 2 == 0 ? by.x : by.y, e % 2 == 0 ? shift_by.x : shift_by.y);
            }
            __syncwarp();
            if (speaks) k_pipe.release(k_state);
            k_state.advance();
            if (n * BN < own.all.first || n * BN + BN > own.all.end) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int i = own.row0 + own_row + 8 * r, j0 = n * BN + Order::of_lane(t);
                    const int from = own.mask.lo(i) - j0, end = own.mask.hi(i) - j0;
#pragma unroll
                    for (int j = 0; j < BN / 8; ++j)
#pragma unroll
                        for (int c = 0; c < 2; ++c)
                            if (Order::of_tile(j) + c < from || Order::of_tile(j) + c >= end) s[4 * j + 2 * r + c] = negative_infinity();
                }
            }
            if constexpr (kCodes) {
                ProbabilityCodes<PV>::add(state, s, factor, correction);
            } else {
                state.add(s, factor, correction);
            }
        };
        auto pack = [&](const float(&s)[BN / 2]) {
            if constexpr (kCodes) {
#pragma unroll
                for (int step = 0; step < BN / 32; ++step)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int j = 2 * step + i / 2, r = i % 2;  // keys 16j.. + 15; tile j + 8 holds their second pairs
                        p[step][i] = ProbabilityCodes<PV>::pack(s[4 * j + 2 * r], s[4 * j + 2 * r + 1], s[4 * (j + 8) + 2 * r],
                                                          s[4 * (j + 8) + 2 * r + 1]);
                    }
            } else {
                pack_rows<T>(p, s);
            }
        };

        // Rescales what was accumulated before, where a maximum has grown.
        auto rescale = [&] {
            if (__any_sync(0xffffffffu, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
                for (int j = 0; j < D / 2; ++j) o[j] *= correction[j / 2 % 2];
            }
        };
        auto release_values = [&] {
            __syncwarp();
            if (speaks) v_pipe.release(v_state);
            v_state.advance();
        };

        // Adds the product of probabilities and values to o.
        auto multiply_values = [&] {
            if constexpr (PV == kValuesWhole) {
                const u64 b = k_major_descriptor(v_tiles + v_state.stage * kVBytes);
#pragma unroll
                for (int step = 0; step < BN / 32; ++step) ValueProduct<PV>::multiply(o, p[step], b + step * kNextKMajor, true);
            } else if constexpr (PV == kValues16) {
                multiply_packed<T, BN>(o, p, v_tiles + v_state.stage * kVBytes, true);
            }
        };

        if (!own.any.empty()) {
            const int first = own.any.first / BN, last = (own.any.end - 1) / BN;
            q_pipe.wait(q_state);
            if constexpr (!kDirect) {
                using Product = ValueProduct<PV>;
                typename Product::Sum part[D / 2];
                auto multiply_half = [&](int half) {
                    const u64 b = k_major_descriptor(v_tiles + v_state.stage * kVBytes);
                    ptx::wgmma_fence();
#pragma unroll
                    for (int step = 0; step < 2; ++step)
                        Product::multiply(part, p[2 * half + step], b + (2 * half + step) * kNextKMajor, step != 0);
                    ptx::wgmma_commit();
                };
                auto add_half = [&](int half) {
                    const ptx::SharedAddress scales = value_scales + v_state.stage * kValueScales + 4 * (half * D + 2 * t);
#pragma unroll
                    for (int j = 0; j < D / 8; ++j) {
                        const float2 of_columns = pair_at(scales + 32 * j);
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            o[4 * j + e] += static_cast<float>(part[4 * j + e]) * (e % 2 == 0 ? of_columns.x : of_columns.y);
                    }
                };
#pragma unroll 1
                for (int n = last; n >= first; --n) {
                    clear();
                    k_pipe.wait(k_state);
                    ptx::wgmma_fence();
                    multiply_keys();
                    ptx::wgmma_commit();
                    ptx::wgmma_wait<0>();
                    {
                        float s[BN / 2];
                        to_probabilities(s, n);
                        pack(s);
                    }
                    v_pipe.wait(v_state);
                    multiply_half(0);
                    rescale();
                    ptx::wgmma_wait<0>();
                    add_half(0);
                    multiply_half(1);
                    ptx::wgmma_wait<0>();
                    add_half(1);
                    release_values();
                }
            } else {
                clear();
                k_pipe.wait(k_state);
                wait_for_cores();
                ptx::wgmma_fence();
                multiply_keys();
                ptx::wgmma_commit();
                pass_cores();
                ptx::wgmma_wait<0>();
                {
                    float s[BN / 2];
                    to_probabilities(s, last);
                    pack(s);
                }
#pragma unroll 1
                for (int n = last - 1; n >= first; --n) {
                    clear();
                    k_pipe.wait(k_state);
                    wait_for_cores();
                    ptx::wgmma_fence();
                    multiply_keys();
                    ptx::wgmma_commit();
                    v_pipe.wait(v_state);
                    ptx::wgmma_fence();
                    multiply_values();
                    ptx::wgmma_commit();
                    pass_cores();
                    ptx::wgmma_wait<1>();
                    float s[BN / 2];
                    to_probabilities(s, n);
                    ptx::wgmma_wait<0>();
                    release_values();
                    rescale();
                    pack(s);
                }
                v_pipe.wait(v_state);
                ptx::wgmma_fence();
                multiply_values();
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                release_values();
            }
            if (speaks) q_pipe.release(q_state);
            q_state.advance();
        }

        ptx::forget(index);  // the position of this tile is computed again to save registers above
        const QueryTile at(index, tiles, static_cast<u32>(heads), static_cast<u32>(batches),
                           static_cast<u32>(heads_together));
        const Sequence rows = sequence_at(at.batch, lq, lkv, cu_q, cu_k, lengths);
        const int exist = rows.lq - at.m * BM;
        const i64 first_row = rows.q_row + at.m * BM;
        float times[2], row_lse[2];
        state.finish(factor, negative_infinity(), times, row_lse);
        if constexpr (PV == kValuesWhole) {
            const float* const scales = scale_v + at.batch * sv_batch + at.head / heads_per_kv * sv_head + 2 * t;
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float by = 8 * j < d_v ? scales[8 * j + c] : 0.0f;
                    o[4 * j + c] *= by, o[4 * j + 2 + c] *= by;
                }
        }
        const i64 first_out = at.batch * out_batch + at.head * out_head + first_row * out_row;
        if (kCodes && out_fp16 != 0) {
            store_rows(static_cast<fp16*>(out) + first_out, out_row, own_row, exist, static_cast<int>(d_v), o, times);
        } else {
            store_rows(static_cast<T*>(out) + first_out, out_row, own_row, exist, static_cast<int>(d_v), o, times);
        }
        float* const to = lse + at.batch * lse_batch + at.head * lse_head + first_row + own_row;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (t == 0 && own_row + 8 * r < exist) to[8 * r] = row_lse[r] - (kCodes ? logf(ProbabilityCodes<PV>::kLargest) : 0.0f);
    }
    if (kDirect && group == 0) wait_for_cores();  // the turn that the last warpgroup has passed on
}

}  // namespace rtk
