// Latent attention (MLA) of tokens over a choice of keys for each of them on sm_90a: the computation of sparse_mla.cu with
// wgmma (sm90_latent.cuh). A block owns a token, 64 of its heads and one split of its indices, with an even number of
// tiles of 64 keys. Two producer warps per tile gather its rows, in the order in which consumers release parts of the
// previous contents. Keys that do not count are 0 in the tile, and their bits in `counts`, which belongs to the part with
// the last box, are 0.
//
// Rows of 16-bit latents are copied by cp.async. Their bytes become visible to wgmma by a fence after they have arrived,
// so a part is committed after the copies of the next one are issued, or before the producer waits for a part to be
// released. With CODED, latents have 656 bytes (sparse_mla.cu) and go through registers, the next four vectors of a thread
// being loaded while it decodes four. Grid: tokens by tiles of heads, splits.
#include "attention/sm90_latent.cuh"
#include "attention/sparse_mla.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/registers.cuh"

namespace rtk {

// Masks keys that do not count: bits of the 64 keys of a tile.
struct ChosenKeys {
    ptx::SharedAddress counts;  // of both tiles
    u32 word[2];

    RTK_DEVICE void read(int tile) {
        const Raw<8> raw = ptx::ld_shared_8(counts + tile % 2 * 8);
        word[0] = raw.w[0], word[1] = raw.w[1];
    }
    RTK_DEVICE void apply(float (&s)[LatentBlock::kKeys / 2], int) const {
        if ((word[0] & word[1]) == 0xffffffffu) return;
        const int first = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
        for (int j = 0; j < LatentBlock::kKeys / 8; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if ((word[j / 4] >> (j % 4 * 8 + first + c) & 1u) == 0) s[4 * j + c] = s[4 * j + 2 + c] = negative_infinity();
    }
};

// A row of 16 e4m3 codes times their scale, or of 8 bf16 columns, as vectors of T.
template <typename T>
RTK_DEVICE void store_decoded(ptx::SharedAddress row, int vector, int swizzle, const Raw<16>& codes, float scale) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float f[8];
        unpack<e4m3, 8>(Raw<8>{{codes.w[2 * half], codes.w[2 * half + 1]}}, f);
#pragma unroll
        for (int i = 0; i < 8; ++i) f[i] *= scale;
        ptx::st_shared_16(row + (((2 * vector + half) ^ swizzle) << 4), pack<T, 8>(f));
    }
}

template <typename T, bool CODED>
__global__ void __launch_bounds__(LatentBlock::kThreads, 1)
    sparse_mla_sm90(const T* q, const u8* cache, const i32* indices, const i32* positions, const float* sinks, T* out, float* lse,
                    float* parts, float* part_lse, i64 tokens, i64 heads, i64 keys, i64 count, i64 d_qk, i64 d_v, i64 splits,
                    i64 q_row, i64 q_head, i64 cache_row, i64 index_row, double scale) {
    using Tile = LatentBlock::Tile;
    using Pipe = LatentBlock::Pipe;
    constexpr int kKeys = LatentBlock::kKeys, kHalfBoxes = LatentBlock::kHalfBoxes, kConsumers = LatentBlock::kConsumers;
    extern __shared__ u8 memory[];
    const LatentBlock block(memory);
    const ptx::SharedAddress counts = block.after;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarp, 0), lane = threadIdx.x % kWarp;
    const int row_tiles = (static_cast<int>(heads) + LatentBlock::kRows - 1) / LatentBlock::kRows, split = static_cast<int>(blockIdx.y);
    const i64 token = blockIdx.x / row_tiles;
    const int row0 = static_cast<int>(blockIdx.x % row_tiles) * LatentBlock::kRows;
    const int all_rounds = (static_cast<int>(count) + 2 * kKeys - 1) / (2 * kKeys);
    const int per_split = (all_rounds + static_cast<int>(splits) - 1) / static_cast<int>(splits);
    const int begin = split * per_split, rounds = max(min(begin + per_split, all_rounds) - begin, 0);

    if (threadIdx.x == 0) {
        block.init(2);
        ptx::mbarrier_fence_init();
    }
    if (rounds > 0)
        block.store_queries<T>(d_qk, [&](int row) -> const T* {
            return row0 + row < heads ? q + token * q_row + (row0 + row) * q_head : nullptr;
        });
    ptx::fence_async_shared();
    __syncthreads();

    if (warp >= kConsumers) {
        ptx::registers_give<CODED ? 72 : 40>();
        const int tile = (warp - kConsumers) / 2, half_warp = warp % 2;
        const Pipe last = block.last_pipe(), first = block.half_pipe(tile), second = block.half_pipe(1 - tile);
        const int first_box = tile * kHalfBoxes, second_box = kHalfBoxes - first_box;
        const i64 limit = positions == nullptr ? keys - 1 : min(static_cast<i64>(positions[token]), keys - 1);
        const ptx::SharedAddress to = block.tiles + tile * Tile::kBytes;
        const i32* const own = indices + token * index_row;
        // Keys `lane` and `lane` + 32 of a tile, -1 if they do not count.
        i32 key[2];
        auto find = [&](int round) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int place = ((begin + round) * 2 + tile) * kKeys + i * kWarp + lane;
                const i32 at = place < count ? own[place] : -1;
                key[i] = at >= 0 && at <= limit ? at : -1;
            }
        };
        auto publish = [&] {
            const u32 low = __ballot_sync(0xffffffffu, key[0] >= 0), high = __ballot_sync(0xffffffffu, key[1] >= 0);
            if (half_warp == 0 && lane == 0) ptx::st_shared_8(counts + tile * 8, Raw<8>{{low, high}});
        };
        if (rounds > 0) find(0);
        if constexpr (!CODED) {
            // Eight lanes copy 128 bytes of a row: rows `near` + 8j, so that all of a lane's are swizzled alike.
            const int near = half_warp * 4 + lane / 8, vector = lane % 8;
            const ptx::SharedAddress place = to + near * kTileRow + ((vector ^ near) << 4);
            const int width = static_cast<int>(d_qk);
            ptx::SharedAddress pending = 0;  // the barrier of the part that is being copied
            auto commit = [&] {
                ptx::fence_async_shared();
                __syncwarp();
                if (lane == 0) ptx::mbarrier_arrive(pending);
                pending = 0;
            };
            auto claim = [&](const Pipe& pipe, const Pipe::State& state) {
                if (pending != 0 && !__all_sync(0xffffffffu, ptx::mbarrier_test(pipe.empty(state), state.phase ^ 1u))) {
                    ptx::cp_async_wait<0>();
                    commit();
                }
                pipe.acquire(state);
            };
            auto copy = [&](const Pipe& pipe, int box, int boxes, const Pipe::State& state, const i32(&of)[2]) {
#pragma unroll
                for (int j = 0; j < kKeys / 8; ++j) {
                    const i32 at = __shfl_sync(0xffffffffu, of[j / 4], near + j % 4 * 8);
                    const u8* const from = cache + (at < 0 ? 0 : at * cache_row) + box * 128 + vector * 16;
#pragma unroll
                    for (int b = 0; b < boxes; ++b)
                        ptx::cp_async_16_or_zero(place + (box + b) * Tile::kBoxBytes + j * (8 * kTileRow), from + b * 128,
                                                 at >= 0 && (box + b) * 64 + vector * 8 < width);
                }
                ptx::cp_async_commit();
                if (pending != 0) {
                    ptx::cp_async_wait<1>();
                    commit();
                }
                pending = pipe.full(state);
            };
#pragma unroll 1
            for (int round = 0; round < rounds; ++round) {
                const Pipe::State state{tile, static_cast<u32>(round) % 2};
                const i32 now[2] = {key[0], key[1]};
                claim(last, state);
                publish();
                copy(last, 2 * kHalfBoxes, 1, state, now);
                claim(first, state);
                copy(first, first_box, kHalfBoxes, state, now);
                if (round + 1 < rounds) find(round + 1);
                claim(second, state);
                copy(second, second_box, kHalfBoxes, state, now);
            }
            if (pending != 0) {
                ptx::cp_async_wait<0>();
                commit();
            }
        } else {
            constexpr int kEach = 4;  // vectors of a thread in a step
            // Codes: four lanes take 64 codes of a row, rows 32 * half_warp + lane / 4 + 8j. The last box: eight lanes take a
            // row, rows 32 * half_warp + lane / 8 + 4j. Stores of eight lanes have no bank conflicts.
            auto key_of = [&](const i32(&of)[2], int row) { return __shfl_sync(0xffffffffu, half_warp == 0 ? of[0] : of[1], row); };
            auto load_codes = [&](Raw<16>(&raw)[kEach], float(&by)[2], int j, int box, const i32(&of)[2]) {
                const i32 at = key_of(of, lane / 4 + 8 * j);
                const u8* const from = cache + (at < 0 ? 0 : at * cache_row);
#pragma unroll
                for (int b = 0; b < kEach; ++b) {
                    raw[b] = Raw<16>{{0, 0, 0, 0}};
                    if (at >= 0) raw[b] = load_raw<u8, 16, false>(from + (box + b) * 64 + lane % 4 * 16);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    by[i] = at >= 0 ? reinterpret_cast<const float*>(from + 512)[box / 2 + i] : 0.0f;
            };
            auto decode = [&](const Pipe& pipe, int box, const Pipe::State& state, const i32(&of)[2]) {
                Raw<16> raw[2][kEach];
                float by[2][2];
                load_codes(raw[0], by[0], 0, box, of);
                pipe.acquire(state);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (j < 3) load_codes(raw[(j + 1) % 2], by[(j + 1) % 2], j + 1, box, of);
                    const ptx::SharedAddress row = to + (32 * half_warp + lane / 4 + 8 * j) * kTileRow;
#pragma unroll
                    for (int b = 0; b < kEach; ++b)
                        store_decoded<T>(row + (box + b) * Tile::kBoxBytes, lane % 4, lane / 4, raw[j % 2][b], by[j % 2][b / 2]);
                }
                ptx::fence_async_shared();
                pipe.commit_warp(state);
            };
#pragma unroll 1
            for (int round = 0; round < rounds; ++round) {
                const Pipe::State state{tile, static_cast<u32>(round) % 2};
                const i32 now[2] = {key[0], key[1]};
                Raw<16> raw[8];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const i32 at = key_of(now, lane / 8 + 4 * j);
                    raw[j] = Raw<16>{{0, 0, 0, 0}};
                    if (at >= 0) raw[j] = load_raw<bf16, 8, false>(reinterpret_cast<const bf16*>(cache + at * cache_row + 528) + lane % 8 * 8);
                }
                last.acquire(state);
                publish();
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int row = 32 * half_warp + lane / 8 + 4 * j;
                    if constexpr (!is_same<T, bf16>::value) {
                        float f[8];
                        unpack<bf16, 8>(raw[j], f);
                        raw[j] = pack<T, 8>(f);
                    }
                    ptx::st_shared_16(to + 2 * kHalfBoxes * Tile::kBoxBytes + row * kTileRow + ((lane % 8 ^ row % 8) << 4), raw[j]);
                }
                ptx::fence_async_shared();
                last.commit_warp(state);
                decode(first, first_box, state, now);
                if (round + 1 < rounds) find(round + 1);
                decode(second, second_box, state, now);
            }
        }
        return;
    }

    ptx::registers_take<CODED ? 216 : 232>();
    float o[LatentBlock::kColumns / 2], times[2], logs[2];
    block.attend<T>(rounds, static_cast<float>(scale) * kLog2e, ChosenKeys{counts, {0, 0}}, o, times, logs);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + warp % 4 * 16 + lane / 4 + 8 * r;
        if (row >= heads) continue;
        if (sinks != nullptr && splits == 1) add_sink(sinks[row], times[r], logs[r]);
        const i64 flat = token * heads + row, of_split = split * (tokens * heads) + flat;
        LatentBlock::store_row(out + flat * d_v, splits > 1 ? parts + of_split * d_v : nullptr, d_v, o, r, times[r]);
        if (warp < 4 && lane % 4 == 0) (splits > 1 ? part_lse[of_split] : lse[flat]) = logs[r];
    }
}

}  // namespace rtk
