// The computation of moe/permute_fp8.cu with transposed codes among the results, for sm_90. Transposed codes of 128
// columns of an expert are one stretch of memory, however many rows it has: they are assembled in shared memory and
// written as one, so that only whole cache lines are written, although columns begin anywhere. Long experts have
// several such stretches.
//
// One block per SM; each has its share of units (moe/permute_fp8_stretches.cuh), which one warp determines. Four warps
// load rows of tokens, up to 128 at a time, into four slots of shared memory. Two consumers, of eight warps each,
// quantise a slot: each warp 16 rows, and then 32 rows of 64 columns, two per lane, which are kept in registers, so
// that the slot is free. Three warps write the stretches. They synchronise by mbarriers only.
//
// Staged codes have no gaps, and no padding that would spread them over the banks. Instead, lanes take vectors of 16
// rows in an order of their own: lane l has columns 2l and 2l + 1, and begins with vector l. In units of 16 bytes, the
// column pitch is any number m; then neighbouring lanes are 2m + 1 units apart, an odd number.
#include "moe/permute_fp8_stretches.cuh"
#include "moe/rows.cuh"
#include "ptx/cp_async.cuh"
#include "common/amax.cuh"

namespace rtk {

// Destinations of codes and scales, as in quant/expert_output.cuh.
struct StretchOutput {
    u8* q;
    float* scale;
    u8* q_t;
    float* scale_t;
    u32 cols, strips;
    bool pow2;

    RTK_DEVICE u32 columns(const Unit& unit) const {
        return min(cols - unit.strip * kTileSide, static_cast<u32>(kTileSide));
    }
};

// True if a magnitude from `larger_of` may be an infinity.
RTK_DEVICE bool not_finite(float magnitude) { return magnitude > 3.40282347e38f; }

// The larger magnitudes of two words. NaN is ignored, and so are infinities if FINITE.
template <bool FINITE>
RTK_DEVICE u32 larger_of(u32 max_abs, u32 word) {
    return ptx::max_magnitudes_bf16x2(max_abs, FINITE ? WordMax<bf16>::finite(word) : word);
}
RTK_DEVICE float low_magnitude(u32 word) { return __uint_as_float(word << 16 & 0x7fffffffu); }
RTK_DEVICE float high_magnitude(u32 word) { return __uint_as_float(word & 0x7fff0000u); }

// Codes and scales of the warp's 16 rows of a block.
template <typename F8>
RTK_DEVICE void quantize_block_rows(const RowBlock& block, const u8* tile, u32 warp, const StretchOutput& out) {
    constexpr int kSteps = 8;
    const u32 lane = threadIdx.x % kWarp, rows = block.rows();
    if (warp * 16 >= rows) return;
    const u32 column = lane % 16 * 8;
    const bool here = column < out.columns(block.unit);
    const u32 row = warp * 16 + lane / 16;  // of the thread's first; the others are two apart
    const ptx::SharedAddress own_rows = ptx::shared_address(tile) + row * kRowBytes + column * 2;
    Raw<16> raw[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        clear(raw[s]);
        if (here) raw[s] = ptx::ld_shared_16(own_rows + 2 * s * kRowBytes);
    }
    float max_abs[kSteps], largest = 0.0f;
    auto find = [&](auto larger) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const u32 word = larger(larger(larger(larger(0u, raw[s].w[0]), raw[s].w[1]), raw[s].w[2]), raw[s].w[3]);
            max_abs[s] = fmaxf(low_magnitude(word), high_magnitude(word));
            largest = fmaxf(largest, max_abs[s]);
        }
    };
    find([](u32 a, u32 b) { return larger_of<false>(a, b); });
    if (not_finite(largest)) find([](u32 a, u32 b) { return larger_of<true>(a, b); });  // rarely
    const float own = fp8_scale<F8>(scattered<kSteps, 16>(max_abs, static_cast<int>(lane), fmaxf), out.pow2);
    const u32 above = block.unit.above + block.down, own_row = row + 2 * (lane % kSteps);
    const Unit& unit = block.unit;
    const u64 scales = static_cast<u64>(unit.start) * out.strips + static_cast<u64>(unit.strip) * unit.count;
    if (lane % 16 < kSteps && own_row < rows) out.scale[scales + above + own_row] = own;
    const float inverses = inverse_scale(own);
    u8* to = out.q + static_cast<u64>(unit.start + above + row) * out.cols + (unit.strip * kTileSide + column);
#pragma unroll
    for (int s = 0; s < kSteps; ++s, to += 2 * out.cols) {
        const float inverse = __shfl_sync(0xffffffffu, inverses, s, 16);
        float v[8];
        unpack<bf16, 8>(raw[s], v);
        const Raw<8> codes = quantized<F8>(v, inverse);
        if (here && row + 2 * s < rows) ptx::st_stream<8>(to, codes);
    }
}

// Columns of a block, in registers: 64 of them in a warp, two in a lane, and two vectors of 16 rows.
template <typename F8>
struct BlockColumns {
    static constexpr int kVectors = 2;  // of a lane
    static constexpr int kInColumn = kTileSide / 16, kAbove = kInColumn / kVectors;  // stacked warps

    u32 word[kVectors][16];
    u32 lane, warp, column;
    u32 rows;    // of the block, up to the next 16; 0 if there are no such columns
    u32 vector;  // the lane's first

    RTK_DEVICE BlockColumns(const RowBlock& block, const u8* tile, u32 consumer_warp, const StretchOutput& out)
        : lane(threadIdx.x % kWarp), warp(consumer_warp) {
        column = warp / kAbove * (2 * kWarp) + lane * 2;
        rows = column < out.columns(block.unit) ? (block.rows() + 15) / 16 * 16 : 0;
        // With few rows, bank conflicts matter less than idle warps.
        vector = warp % kAbove * kVectors + (block.rows() > kTileSide / 2 ? lane : 0);
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
            const u8* first = tile + row(p) * kRowBytes + column * 2;
#pragma unroll
            for (int r = 0; r < 16; ++r)
                word[p][r] = row(p) < rows ? *reinterpret_cast<const u32*>(first + r * kRowBytes) : 0u;
        }
    }

    // First of the lane's vectors.
    RTK_DEVICE u32 row(int p) const { return (vector + p) % kInColumn * 16; }

    // Largest magnitudes, in a word.
    RTK_DEVICE u32 maxima() const {
        auto find = [&](auto larger) {
            u32 max_abs[kVectors] = {};
#pragma unroll
            for (int r = 0; r < 16; ++r)
#pragma unroll
                for (int p = 0; p < kVectors; ++p) max_abs[p] = larger(max_abs[p], word[p][r]);
            return larger(max_abs[0], max_abs[1]);
        };
        const u32 max_abs = find([](u32 a, u32 b) { return larger_of<false>(a, b); });
        if (!not_finite(fmaxf(low_magnitude(max_abs), high_magnitude(max_abs)))) return max_abs;
        return find([](u32 a, u32 b) { return larger_of<true>(a, b); });  // rarely
    }

    // Turns the maxima of all stacked warps, [kAbove][kWarp], into the reciprocals of the lane's scales. One of these
    // warps stores the scales.
    RTK_DEVICE void scales(const RowBlock& block, const u32* max_abs, const StretchOutput& out, float (&inverse)[2]) const {
        u32 all = max_abs[lane];
#pragma unroll
        for (int w = 1; w < kAbove; ++w) all = larger_of<false>(all, max_abs[w * kWarp + lane]);
        const float low = fp8_scale<F8>(low_magnitude(all), out.pow2);
        const float high = fp8_scale<F8>(high_magnitude(all), out.pow2);
        inverse[0] = inverse_scale(low), inverse[1] = inverse_scale(high);
        if (warp % kAbove != 0 || rows == 0) return;
        const u64 place = static_cast<u64>(block.unit.block + block.down / kTileSide) * out.cols;
        ptx::st<8>(out.scale_t + place + block.unit.strip * kTileSide + column,
                   Raw<8>{__float_as_uint(low), __float_as_uint(high)});
    }

    // Codes, with column pitch `pitch` in bytes; `stage`: where those of the block's first row go.
    RTK_DEVICE void codes(const float (&inverse)[2], u8* stage, u32 pitch) const {
        const ptx::SharedAddress to = ptx::shared_address(stage) + column * pitch;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
            if (row(p) >= rows) continue;
            float low[16], high[16];
#pragma unroll
            for (int r = 0; r < 16; ++r) {
                float both[2];
                unpack<bf16, 2>(Raw<4>{word[p][r]}, both);
                low[r] = both[0], high[r] = both[1];
            }
            ptx::st_shared_16(to + row(p), quantized<F8>(low, inverse[0]));
            ptx::st_shared_16(to + pitch + row(p), quantized<F8>(high, inverse[1]));
        }
    }
};

// Writes the staged codes of a unit. All storing warps call this.
RTK_DEVICE void store_unit(const Unit& unit, const u8* stage, int thread, const StretchOutput& out) {
    const u32 columns = out.columns(unit), pitch = unit.pitch();
    u8* to = out.q_t + static_cast<u64>(unit.start) * out.cols + static_cast<u64>(unit.strip * kTileSide) * unit.count +
             unit.above;
    if (unit.count % 16 == 0) {
        const ptx::SharedAddress from = ptx::shared_address(stage);
        if (unit.whole()) {
            constexpr u32 kPart = 4096;
            const u32 bytes = columns * pitch, first = thread * kPart;
            if (first < bytes) ptx::bulk_store(to + first, from + first, min(bytes - first, kPart));
            ptx::bulk_store_commit();
            ptx::bulk_store_wait_read();
            return;
        }
        // Vectors of 16 bytes along the columns.
        const u32 in_column = pitch / 16, all = in_column * columns;
        const u32 step = kStoreWarps * kWarp, down = step / in_column, right = step - down * in_column;
        u32 c = thread / in_column, vector = thread - c * in_column;
#pragma unroll 4
        for (u32 i = thread; i < all; i += step) {
            ptx::st<16>(to + static_cast<u64>(c) * unit.count + vector * 16, ptx::ld_shared_16(from + i * 16));
            c += down, vector += right;
            if (vector >= in_column) ++c, vector -= in_column;
        }
        return;
    }
    // Columns may begin at any byte. Lanes write aligned words, each funnel-shifted from two, and the bytes at the
    // ends.
    const int lane = thread % kWarp, rows = static_cast<int>(unit.rows);
#pragma unroll 1
    for (u32 c = thread / kWarp; c < columns; c += kStoreWarps) {
        u8* column = to + static_cast<u64>(c) * unit.count;
        const u32* words = reinterpret_cast<const u32*>(stage + c * pitch);
        const int misaligned = static_cast<int>(reinterpret_cast<u64>(column) & 3);
#pragma unroll 1
        for (int w = lane; w * 4 - misaligned < rows; w += kWarp) {
            const u32 low = w == 0 ? 0u : words[w - 1], high = w * 4 < static_cast<int>(pitch) ? words[w] : 0u;
            const u32 shifted = __funnelshift_l(low, high, misaligned * 8);
            const int first = w * 4 - misaligned;
            if (first >= 0 && first + 4 <= rows) {
                ptx::st<4>(column + first, Raw<4>{shifted});
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (first + b >= 0 && first + b < rows)
                        ptx::st<1>(column + first + b, Raw<1>{shifted >> (8 * b) & 0xffu});
            }
        }
    }
}

// Runs on the loading warps; each serves one slot. `stride`: from token to token, in units of 16 bytes.
struct RowFetch {
    static constexpr int kOwn = kTileSide / kWarp;  // rows of a lane
    static constexpr u32 kNowhere = 0xffffffffu;

    const u8* x;
    const i32* slots;
    u32 stride, choices, cols;
    i64 divisor;

    // Sources of the lane's rows.
    RTK_DEVICE void request(const RowBlock& block, u32 (&found)[kOwn]) const {
        const i32* first = slots + (block.unit.start + block.unit.above + block.down);
        const u32 rows = block.rows();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const u32 row = i * kWarp + threadIdx.x % kWarp;
            found[i] = row < rows ? ptx::ld_keep<4>(first + row).w[0] : ~0u;
        }
    }

    // Rows without a token are zeros, up to the next 16.
    RTK_DEVICE void ask(const RowBlock& block, const u32 (&found)[kOwn], ptx::SharedAddress tile,
                        ptx::SharedAddress barrier) const {
        const u32 lane = threadIdx.x % kWarp, vector = lane % 16;
        const u32 column = block.unit.strip * kTileSide, columns = min(cols - column, static_cast<u32>(kTileSide));
        const u32 rows = vector * 8 < columns ? (block.rows() + 15) / 16 * 16 : 0;
        const u8* from = x + column * 2 + vector * 16;
        const ptx::SharedAddress to = tile + lane / 16 * kRowBytes + vector * 16;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const bool has_token = found[i] < choices;
            const u32 own = has_token ? divided(found[i], divisor) * stride : kNowhere;
            if (__all_sync(0xffffffffu, has_token && rows != 0 ? 1 : 0)) {
#pragma unroll
                for (int r = 0; r < kWarp; r += 2) {
                    const u32 at = __shfl_sync(0xffffffffu, own, r + static_cast<int>(lane) / 16);
                    ptx::cp_async_16(to + (i * kWarp + r) * kRowBytes, from + static_cast<u64>(at) * 16);
                }
            } else if (i * kWarp < block.rows()) {
#pragma unroll 1
                for (int r = 0; r < kWarp; r += 2) {
                    const u32 at = __shfl_sync(0xffffffffu, own, r + static_cast<int>(lane) / 16);
                    const bool reads = at != kNowhere;
                    if (i * kWarp + r < rows)
                        ptx::cp_async_16_or_zero(to + (i * kWarp + r) * kRowBytes,
                                                 from + (reads ? static_cast<u64>(at) * 16 : 0), reads);
                }
            }
        }
        ptx::cp_async_arrive(barrier);
    }
};

// Arguments as those of moe_permute_fp8 (moe/permute_fp8.cu); cols is a multiple of 16, q_t is not null. Dynamic shared
// memory: kStretchMemory + 12 * (expert_count + 1) bytes.
template <typename F8>
__global__ void __launch_bounds__(kStretchThreads, 1)
    moe_permute_fp8_stretches(const bf16* x, const i32* slots, const i32* offsets, const u8* probs, const i32* experts,
                              F8* q, float* scale, F8* q_t, float* scale_t, u8* probs_out, i64 choices, i64 top_k,
                              i64 divisor, i64 rows, i64 cols, i64 x_stride, i64 expert_count, i64 row_blocks,
                              i64 column_tiles, i64 prob_kind, i64 prob_columns, i64 pow2) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ StretchShared shared;
    u8* const stages = memory + kSlots * kSlotBytes;
    shared.init();
    const Units units(memory + kStretchMemory, offsets, expert_count, rows, static_cast<u32>(column_tiles));
    const StretchOutput out = {reinterpret_cast<u8*>(q), scale, reinterpret_cast<u8*>(q_t), scale_t,
                               static_cast<u32>(cols), units.strips, pow2 != 0};
    const u32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

    if (warp < kWorkWarps) {
        const u32 consumer = warp / kConsumerWarps, own = warp % kConsumerWarps;
#pragma unroll 1
        for (u32 nth = consumer;; nth += kConsumers) {
            const u32 slot = nth % kSlots, phase = nth / kConsumers;
            wait_for(shared.full[slot], nth / kSlots);
            const RowBlock block = shared.blocks[slot];
            const u32 buffer = block.unit_nth % 2;
            if (block.rows() == 0) {
                if (block.down == 0) {  // one consumer signals the storing warps
                    wait_for(shared.freed[buffer], block.unit_nth / 2 + 1);
                    warp_arrive(shared.staged[buffer], block.arrivals());
                }
                break;
            }
            const u8* tile = memory + slot * kSlotBytes;
            if (q != nullptr) quantize_block_rows<F8>(block, tile, own, out);
            const BlockColumns<F8> columns(block, tile, own, out);
            warp_arrive(shared.empty[slot]);
            shared.max_abs[consumer][phase % 2][own][lane] = columns.maxima();
            warp_arrive(shared.added[consumer]);
            wait_for(shared.added[consumer], phase);
            float inverse[2];
            columns.scales(block, shared.max_abs[consumer][phase % 2][own / columns.kAbove * columns.kAbove], out, inverse);
            wait_for(shared.freed[buffer], block.unit_nth / 2 + 1);
            columns.codes(inverse, stages + buffer * kStageBytes + block.down, block.unit.pitch());
            ptx::fence_async_shared();
            warp_arrive(shared.staged[buffer], block.arrivals());
        }
    } else if (warp < kWorkWarps + kStoreWarps) {
        const int thread = static_cast<int>(threadIdx.x) - kWorkWarps * kWarp;
#pragma unroll 1
        for (u32 nth = 0;; ++nth) {
            const u32 buffer = nth % 2;
            wait_for(shared.staged[buffer], nth / 2);
            const Unit unit = shared.units[nth % kKeptUnits];
            if (unit.rows == 0) break;
            store_unit(unit, stages + buffer * kStageBytes, thread, out);
            warp_arrive(shared.freed[buffer]);
        }
    } else if (warp < kWorkWarps + kStoreWarps + kFetchWarps) {
        const u32 slot = warp - (kWorkWarps + kStoreWarps);
        const RowFetch fetch = {reinterpret_cast<const u8*>(x), slots, static_cast<u32>(x_stride / 8),
                                static_cast<u32>(choices), out.cols, divisor};
        auto take = [&](u32 nth, u32(&found)[RowFetch::kOwn]) {
            wait_for(shared.planned[nth % kPlanned], nth / kPlanned);
            const RowBlock block = shared.plan[nth % kPlanned];
            fetch.request(block, found);
            warp_arrive(shared.taken[nth % kPlanned]);
            return block;
        };
        u32 found[RowFetch::kOwn], found_next[RowFetch::kOwn];
        RowBlock block = take(slot, found);
#pragma unroll 1
        for (u32 nth = slot;; nth += kSlots) {
            const bool last = block.unit.rows == 0;
            RowBlock next = block;
            if (!last) next = take(nth + kSlots, found_next);
            wait_for(shared.empty[slot], nth / kSlots + 1);
            if (lane == 0) {
                shared.blocks[slot] = block;
                if (block.down == 0) shared.units[block.unit_nth % kKeptUnits] = block.unit;
                ptx::mbarrier_arrive(ptx::shared_address(&shared.full[slot]));
            }
            fetch.ask(block, found, ptx::shared_address(memory + slot * kSlotBytes),
                      ptx::shared_address(&shared.full[slot]));
            if (last) break;
            block = next;
#pragma unroll
            for (int i = 0; i < RowFetch::kOwn; ++i) found[i] = found_next[i];
        }
    } else if (lane == 0) {
        u32 nth = 0;
#pragma unroll 1
        for (u32 unit_nth = 0;; ++unit_nth) {
            const Unit unit = units.find(blockIdx.x + unit_nth * gridDim.x);
            // At the end, an end marker for every loading warp.
            const u32 rows_or_ends = unit.rows == 0 ? kSlots : unit.rows, step_down = unit.rows == 0 ? 1 : kTileSide;
#pragma unroll 1
            for (u32 down = 0; down < rows_or_ends; down += step_down, ++nth) {
                wait_for(shared.taken[nth % kPlanned], nth / kPlanned + 1);
                shared.plan[nth % kPlanned] = {unit, unit_nth, down};
                ptx::mbarrier_arrive(ptx::shared_address(&shared.planned[nth % kPlanned]));
            }
            if (unit.rows == 0) break;
        }
    }

    const i64 step = static_cast<i64>(gridDim.x) * kStretchThreads;
    const i64 own = static_cast<i64>(blockIdx.x) * kStretchThreads + threadIdx.x;
    const i64 used = units.entry[expert_count].row;
    if (probs_out != nullptr) {
        const Probs numbers{probs, experts, prob_kind, prob_columns, static_cast<int>(top_k)};
        for (i64 row = own; row < rows; row += step) {
            const u32 slot = ptx::ld_keep<4>(slots + row).w[0], token = divided(slot, divisor);
            const int choice = static_cast<int>(slot - token * static_cast<u32>(top_k));
            const bool has_token = row < used && slot < static_cast<u32>(choices);
            const u8* place = has_token ? numbers.place(token, choice) : nullptr;
            store_prob_bits(probs_out + row * numbers.bytes(), prob_kind, place == nullptr ? 0u : numbers.bits(place));
        }
    }
    for (i64 i = used * cols / 4 + own; i < rows * cols / 4; i += step) {
        if (q != nullptr) reinterpret_cast<u32*>(q)[i] = 0;
        reinterpret_cast<u32*>(q_t)[i] = 0;
    }
    if (q != nullptr)
        for (i64 i = used * column_tiles + own; i < rows * column_tiles; i += step) scale[i] = 0.0f;
    for (i64 i = units.entry[expert_count].block * cols + own; i < row_blocks * cols; i += step) scale_t[i] = 0.0f;
}

}  // namespace rtk
