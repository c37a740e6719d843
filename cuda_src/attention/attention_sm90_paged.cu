// Attention of packed queries over a paged KV cache on sm_90a: rows and tiles as in attention_paged.cu, pipelines and
// products as in attention_sm90_fwd.cu, for 1, 2, 4 .. 64 heads that share keys.
//
// One warp loads: q by one TMA box per 64 columns (heads that share keys, then queries), keys and values by boxes of
// `unit` keys, which never cross a page, one lane per box. The page of a lane's keys is looked up before it waits for
// the stage; entries of the page table after the last key are not read. Values past the last key are cleared, because
// they may be NaN, which a probability of 0 does not hide.
//
// An 8-bit cache (CODES) is loaded as it is by four warps, which convert it to tiles of 16 bits (sm90_page_codes.cuh);
// the scale of keys is part of the factor of scores, that of values of the factor of results.
//
// EXTRAS: 1 for a soft cap. `scale_heads`: 32 bits each of what the scales of two heads of keys, and of values, are apart.
#include "attention/paged_rows.cuh"
#include "attention/sm90_forward.cuh"
#include "attention/sm90_page_codes.cuh"
#include "common/tile_scheduler.cuh"
#include "ptx/barrier.cuh"
#include "ptx/forget.cuh"
#include "ptx/registers.cuh"

namespace rtk {

// Called by a warp: announces all boxes of a tile at a barrier and loads them.
template <typename Tile>
RTK_DEVICE void fetch_pages(const PageBox& box, ptx::SharedAddress to, const ptx::TensorMap& map, ptx::SharedAddress full, int head) {
    if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive_expect(full, Tile::kBytes);
    __syncwarp();
    if (box.row * kTileRow < Tile::kBoxBytes) {
#pragma unroll
        for (int i = 0; i < Tile::kBoxes; ++i)
            ptx::tma_load_4d(to + i * Tile::kBoxBytes + box.row * kTileRow, map, full, 64 * i, box.slot, head, box.page);
    }
    __syncwarp();
}

template <typename T, int D, int BN, int EXTRAS, int CODES>
__global__ void __launch_bounds__(384, 1)
    attention_sm90_paged(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                         const __grid_constant__ ptx::TensorMap v_map, T* out, float* lse, const float* sinks, const i32* cu_q,
                         const i32* lengths, const i32* table, u32* counter, i64 sequences, i64 tiles, i64 section,
                         i64 heads_kv, i64 group, i64 group_divisor, i64 lkv, i64 d_v, i64 unit, i64 page_size,
                         i64 page_divisor, i64 table_row, i64 out_row, i64 out_head, i64 lse_head, i64 left, i64 right,
                         double scale, double softcap, const float* k_scale, const float* v_scale, i64 scale_heads) {
    constexpr int kGroups = 2, BM = 64 * kGroups, kConsumers = 4 * kGroups, kStages = 2;
    using QTile = Boxed<BM, D>;
    using KeyTile = Boxed<BN, D>;
    constexpr bool kByte = CODES != kSameType;
    using Codes = PageCodes<CODES, BN, D>;
    using V = typename PageValue<T, CODES>::Type;
    constexpr int kProducers = kByte ? Codes::kWarps : 1;
    extern __shared__ u8 memory[];
    const ptx::SharedAddress q_tile = ptx::aligned_up<1024>(ptx::shared_address(memory));
    const ptx::SharedAddress k_tiles = q_tile + QTile::kBytes, v_tiles = k_tiles + kStages * KeyTile::kBytes;
    const ptx::SharedAddress codes = v_tiles + kStages * KeyTile::kBytes;
    const ptx::SharedAddress barriers = codes + (kByte ? Codes::kAllBytes : 0);
    const Pipeline<1> q_pipe{barriers};
    const Pipeline<kStages> k_pipe{barriers + Pipeline<1>::kBytes};
    const Pipeline<kStages> v_pipe{k_pipe.barriers + Pipeline<kStages>::kBytes};
    const ptx::SharedAddress patch = v_pipe.barriers + Pipeline<kStages>::kBytes;  // for the last values of a sequence
    u8* const handover_memory = memory + (patch + 8 - ptx::shared_address(memory));
    const ptx::SharedAddress code_barriers = patch + 8 + WarpHandover::kBytes;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const u32 count = static_cast<u32>(tiles) * static_cast<u32>(heads_kv);
    DrawnSource<WarpHandover> source(counter, WarpHandover(handover_memory, warp == kConsumers));
    auto position = [&](u32 index) {
        return QueryTile(index, static_cast<u32>(tiles), static_cast<u32>(heads_kv), 1u, static_cast<u32>(section));
    };
    auto block_at = [&](int number) {
        return paged_block<BM>(number, cu_q, lengths, static_cast<int>(sequences), group, group_divisor, lkv, left, right);
    };

    if (threadIdx.x == 0) {
        q_pipe.init(1, kConsumers);
        k_pipe.init(kProducers, kConsumers);
        v_pipe.init(kProducers, kConsumers);
        ptx::mbarrier_init(patch, 1);
        if constexpr (kByte) Codes::init(code_barriers);
        source.handover.init(kConsumers + kProducers);
        ptx::mbarrier_fence_init();
    }
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<kByte ? 72 : 40>();
        if (warp >= kConsumers + kProducers) return;
        PipelineState<1> q_state;
        PipelineState<kStages> k_state, v_state;
        u32 patched = 0;
        const int quarter = kByte ? warp - kConsumers : 0;  // of the rows of tiles of codes
        const Codes k_codes(codes, code_barriers, quarter, 0), v_codes(codes, code_barriers, quarter, 1);
        typename Codes::State k_coded, v_coded;
        for (u32 index; (index = source.draw()) < count;) {
            index = __shfl_sync(0xffffffffu, index, 0);
            const QueryTile tile = position(index);
            const PagedBlock own = block_at(tile.m);
            if (own.rows <= 0 || own.any.empty()) continue;
            const int first = own.any.first / BN, last = (own.any.end - 1) / BN, keys = own.sequence.keys;
            const i32* const pages = table + own.batch * table_row;
            auto boxes = [&](int n) {
                return PageBox(pages, n * BN, kByte ? k_codes.first : 0, kByte ? Codes::kRows : BN, keys, static_cast<int>(unit),
                               static_cast<int>(page_size), page_divisor);
            };
            if constexpr (kByte) {
                const PageBox box = boxes(last), next = boxes(max(last - 1, first));
                k_codes.fetch(box, k_map, tile.head, k_coded.stage);
                if (last > first) k_codes.fetch(next, k_map, tile.head, k_coded.stage ^ 1);
                v_codes.fetch(box, v_map, tile.head, v_coded.stage);
                if (last > first) v_codes.fetch(next, v_map, tile.head, v_coded.stage ^ 1);
            }

            if (warp == kConsumers) {
                q_pipe.acquire(q_state);
                if (lane == 0) {
                    const ptx::SharedAddress full = q_pipe.expect(q_state, QTile::kBytes);
                    const int query = own.sequence.q_row + own.row0 / static_cast<int>(group);
#pragma unroll
                    for (int i = 0; i < QTile::kBoxes; ++i)
                        ptx::tma_load_3d(q_tile + i * QTile::kBoxBytes, q_map, full, 64 * i, tile.head * static_cast<int>(group),
                                         query);
                }
                q_state.advance();
            }
            if constexpr (kByte) {
                // Keys of tile n - 1, then values of tile n; behind each, codes of the same kind two tiles on are loaded.
                PageBox next = boxes(last);
#pragma unroll 1
                for (int n = last + 1; n >= first; --n) {
                    const PageBox after = boxes(max(n - 3, first));
                    if (n > first) {
                        k_codes.wait(k_coded);
                        k_pipe.acquire(k_state);
                        k_codes.template convert<T>(k_tiles + k_state.stage * KeyTile::kBytes, k_coded.stage);
                        ptx::fence_async_shared();
                        k_pipe.commit_warp(k_state);
                        k_state.advance();
                        if (n - 3 >= first) k_codes.fetch(after, k_map, tile.head, k_coded.stage);
                        k_coded.advance();
                    }
                    if (n <= last) {
                        v_codes.wait(v_coded);
                        if (n * BN + BN > keys) v_codes.clear(keys - n * BN, v_coded.stage);
                        v_pipe.acquire(v_state);
                        v_codes.template convert<V>(v_tiles + v_state.stage * KeyTile::kBytes, v_coded.stage);
                        ptx::fence_async_shared();
                        v_pipe.commit_warp(v_state);
                        v_state.advance();
                        if (n - 2 >= first) v_codes.fetch(next, v_map, tile.head, v_coded.stage);
                        v_coded.advance();
                    }
                    next = after;
                }
                continue;
            }
            auto fetch_keys = [&](const PageBox& box) {
                k_pipe.acquire(k_state);
                fetch_pages<KeyTile>(box, k_tiles + k_state.stage * KeyTile::kBytes, k_map, k_pipe.full(k_state), tile.head);
                k_state.advance();
            };
            PageBox now = boxes(last);
            fetch_keys(now);
#pragma unroll 1
            for (int n = last; n >= first; --n) {
                PageBox next = now;
                if (n > first) {
                    next = boxes(n - 1);
                    fetch_keys(next);
                }
                v_pipe.acquire(v_state);
                const ptx::SharedAddress to = v_tiles + v_state.stage * KeyTile::kBytes;
                if (n * BN + BN > keys) {
                    fetch_pages<KeyTile>(now, to, v_map, patch, tile.head);
                    ptx::mbarrier_wait(patch, patched);
                    patched ^= 1u;
                    for (u32 at = (keys - n * BN) * kTileRow + lane * 16; at < KeyTile::kBoxBytes; at += kWarp * 16)
                        for (int box = 0; box < KeyTile::kBoxes; ++box)
                            ptx::st_shared_16(to + box * KeyTile::kBoxBytes + at, Raw<16>{{0, 0, 0, 0}});
                    ptx::fence_async_shared();
                    v_pipe.commit_warp(v_state);
                } else {
                    fetch_pages<KeyTile>(now, to, v_map, v_pipe.full(v_state), tile.head);
                }
                __syncwarp();
                v_state.advance();
                now = next;
            }
        }
        return;
    }

    ptx::registers_take<kByte ? 216 : 232>();
    const int wg = warp / 4, own_row = wg * 64 + warp % 4 * 16 + lane / 4, t = lane % 4;
    auto wait_for_cores = [&] { ptx::named_barrier_sync(1 + wg, 256); };
    auto pass_cores = [&] { ptx::named_barrier_arrive(1 + (wg + 1) % kGroups, 256); };
    if (wg == kGroups - 1) pass_cores();

    ConsumerStates<kStages> pipe_states;
    for (u32 index; (index = source.draw()) < count;) {
        index = __shfl_sync(0xffffffffu, index, 0);  // shuffled so that the compiler knows it is uniform
        const PagedBlock own = block_at(position(index).m);
        if (own.rows <= 0) continue;
        const PagedKeys seen{Mask(own.sequence, left, right), own.row0, group_divisor};
        // Keys that all rows of the warpgroup see.
        const Interval all = seen.mask.keys_all(seen.query(wg * 64), seen.query(wg * 64 + 63) + 1);

        const float key_scale =
            kByte && k_scale != nullptr ? k_scale[position(index).head * static_cast<i32>(scale_heads)] : 1.0f;
        const float product_scale = static_cast<float>(scale) * key_scale;
        const float factor = EXTRAS != 0 ? 1.0f : kByte ? positive_factor(product_scale) : product_scale * kLog2e;

        SoftmaxState state;
        float o[D / 2];
#pragma unroll
        for (float& x : o) x = 0.0f;

        // Turns scores of tile n into probabilities; `correction` rescales what was accumulated before.
        auto to_probabilities = [&](float(&s)[BN / 2], int n, float(&correction)[2]) {
            if constexpr (EXTRAS != 0) {
                make_scores(s, product_scale, static_cast<float>(softcap));
            } else if (kByte && product_scale < 0.0f) {
#pragma unroll
                for (float& x : s) x = -x;
            }
            if (n * BN < all.first || n * BN + BN > all.end) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    mask_row(s, r, seen.lo(own_row + 8 * r) - n * BN - 2 * t, seen.hi(own_row + 8 * r) - n * BN - 2 * t);
            }
            state.add(s, factor, correction);
        };

        if (!own.any.empty()) {
            const int first = own.any.first / BN, last = (own.any.end - 1) / BN;
            multiply_tiles<T, V, QTile, KeyTile, KeyTile, EXTRAS == 0>(o, ConsumerPipes<kStages>{q_pipe, k_pipe, v_pipe},
                                                                       pipe_states, q_tile + wg * 64 * kTileRow, k_tiles, v_tiles,
                                                                       first, last, wait_for_cores, pass_cores, to_probabilities);
        }

        ptx::forget(index);  // the position of this tile is computed again to save registers above
        const QueryTile at = position(index);
        const PagedBlock rows = block_at(at.m);
        const float value_scale = kByte && v_scale != nullptr ? v_scale[at.head * static_cast<i32>(scale_heads >> 32)] : 1.0f;
        float times[2];
        T* to[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool exists = own_row + 8 * r < rows.rows;
            const PagedRow row(rows.row0 + (exists ? own_row + 8 * r : 0), group, group_divisor);
            const i64 query = rows.sequence.q_row + static_cast<i64>(row.query), head = at.head * group + row.head;
            const float sink = sinks == nullptr ? negative_infinity() : sinks[head] * kLog2e;
            float by[2], logs[2];
            state.finish(factor, sink, by, logs);
            times[r] = by[r] * value_scale;
            to[r] = exists ? out + query * out_row + head * out_head : nullptr;
            if (exists && t == 0) lse[head * lse_head + query] = logs[r];
        }
        store_rows_at<T>(to, static_cast<int>(d_v), o, times);
    }
    if (wg == 0) wait_for_cores();  // the turn that the last warpgroup has passed on
}

}  // namespace rtk
