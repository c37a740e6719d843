// What moe/permute_fp8.cu does, with transposed codes among the results, for sm_90. Transposed codes of 128 columns of an
// expert are one run of memory, however many rows it has: they are put together in shared memory and written as a run, so
// that lines of memory are whole, although the columns begin anywhere. Experts of many rows have several such pieces.
//
// Blocks stay, and draw units of work (moe/permute_fp8_runs.cuh) from a counter. One warp asks the copy engine for rows
// of tokens, block of 128 rows after block; eight quantise them along the rows, 16 rows each; for each of four slots, two
// quantise the columns, 64 each and a lane two of them, alone with their maxima; the last ones write runs.
//
// Staged codes have no gaps, and no padding that would spread them over the banks. Instead, lanes take pieces of 16
// rows in an order of their own: lane l has columns 2l and 2l + 1, and begins with piece l. In units of 16 bytes, column to
// column is any number m; then neighbouring lanes are 2m + 1 units apart, an odd number.
#include "moe/permute_fp8_runs.cuh"
#include "moe/rows.cuh"
#include "quant/amax.cuh"

namespace rtk {

struct RunOutput {
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

// Whether a magnitude that `larger_of` made may be an infinity.
RTK_DEVICE bool not_finite(float magnitude) { return magnitude > 3.40282347e38f; }

// The larger magnitudes of two words. NaN does not count, infinities do not if FINITE.
template <bool FINITE>
RTK_DEVICE u32 larger_of(u32 most, u32 word) {
    return ptx::max_magnitudes_bf16x2(most, FINITE ? WordMax<bf16>::finite(word) : word);
}
RTK_DEVICE float low_magnitude(u32 word) { return __uint_as_float(word << 16 & 0x7fffffffu); }
RTK_DEVICE float high_magnitude(u32 word) { return __uint_as_float(word & 0x7fff0000u); }

// Codes and scales of the warp's 16 rows of a block.
template <typename F8>
RTK_DEVICE void quantize_block_rows(const RowBlock& block, const u8* tile, int warp, const RunOutput& out) {
    constexpr int kSteps = 8;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, rows = static_cast<int>(block.rows);
    if (warp * 16 >= rows) return;
    const u32 column = lane % 16 * 8;
    const bool here = column < out.columns(block.unit);
    const int row = warp * 16 + lane / 16;  // of the thread's first; the others are two apart
    const ptx::SharedAddress own_rows = ptx::shared_address(tile) + row * kRowBytes + column * 2;
    Raw<16> raw[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        clear(raw[s]);
        if (here) raw[s] = ptx::ld_shared_16(own_rows + 2 * s * kRowBytes);
    }
    float most[kSteps], largest = 0.0f;
    auto find = [&](auto larger) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            const u32 word = larger(larger(larger(larger(0u, raw[s].w[0]), raw[s].w[1]), raw[s].w[2]), raw[s].w[3]);
            most[s] = fmaxf(low_magnitude(word), high_magnitude(word));
            largest = fmaxf(largest, most[s]);
        }
    };
    find([](u32 a, u32 b) { return larger_of<false>(a, b); });
    if (not_finite(largest)) find([](u32 a, u32 b) { return larger_of<true>(a, b); });  // rarely
    const float own = fp8_scale<F8>(scattered<kSteps, 16>(most, lane, fmaxf), out.pow2);
    const u32 above = block.unit.above + block.down;
    const int own_row = row + 2 * (lane % kSteps);
    if (lane % 16 < kSteps && own_row < rows)
        out.scale[static_cast<u64>(block.unit.start) * out.strips + static_cast<u64>(block.unit.strip) * block.unit.count +
                  above + own_row] = own;
    const float inverses = inverse_scale(own);
    u8* to = out.q + static_cast<u64>(block.unit.start + above + row) * out.cols + (block.unit.strip * kTileSide + column);
#pragma unroll
    for (int s = 0; s < kSteps; ++s, to += 2 * out.cols) {
        const float inverse = __shfl_sync(0xffffffffu, inverses, s, 16);
        float v[8];
        unpack<bf16, 8>(raw[s], v);
        const Raw<8> codes = quantized<F8>(v, inverse);
        if (here && row + 2 * s < rows) ptx::st_stream<8>(to, codes);
    }
}

// Codes and scales of 64 columns of a block, two in a lane. `wait` returns when the codes may be staged.
template <typename F8, typename Wait>
RTK_DEVICE void quantize_block_columns(const RowBlock& block, const u8* tile, int half, u8* stage, const RunOutput& out,
                                       const Wait& wait) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, chunks = static_cast<int>(block.rows + 15) / 16;
    const u32 column = half * 64 + lane * 2;
    const bool here = column < out.columns(block.unit);
    const u8* words = tile + column * 2;
    auto word = [&](int r) { return *reinterpret_cast<const u32*>(words + r * kRowBytes); };
    float inverse[2] = {};
    if (here) {
        float magnitude[2];
        auto find = [&](auto larger) {
            u32 most[2] = {0, 0};
#pragma unroll 1
            for (int c = 0; c < chunks; ++c)
#pragma unroll
                for (int r = 0; r < 16; ++r) most[r % 2] = larger(most[r % 2], word(c * 16 + r));
            most[0] = larger(most[0], most[1]);
            magnitude[0] = low_magnitude(most[0]), magnitude[1] = high_magnitude(most[0]);
        };
        find([](u32 a, u32 b) { return larger_of<false>(a, b); });
        if (not_finite(fmaxf(magnitude[0], magnitude[1]))) find([](u32 a, u32 b) { return larger_of<true>(a, b); });  // rarely
        Raw<8> scales;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float scale = fp8_scale<F8>(magnitude[i], out.pow2);
            scales.w[i] = __float_as_uint(scale);
            inverse[i] = inverse_scale(scale);
        }
        const u32 number = block.unit.block + block.down / kTileSide;
        ptx::st<8>(out.scale_t + static_cast<u64>(number) * out.cols + block.unit.strip * kTileSide + column, scales);
    }
    wait();
    if (!here) return;
    const u32 pitch = block.unit.pitch();
    const ptx::SharedAddress to = ptx::shared_address(stage) + column * pitch + block.down;
    int chunk = lane % chunks;
#pragma unroll 1
    for (int s = 0; s < chunks; ++s) {
        float low[16], high[16];
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            float both[2];
            unpack<bf16, 2>(Raw<4>{word(chunk * 16 + r)}, both);
            low[r] = both[0], high[r] = both[1];
        }
        ptx::st_shared_16(to + chunk * 16, quantized<F8>(low, inverse[0]));
        ptx::st_shared_16(to + pitch + chunk * 16, quantized<F8>(high, inverse[1]));
        chunk = chunk + 1 == chunks ? 0 : chunk + 1;
    }
}

// Writes the staged codes of a unit. All warps that store call.
RTK_DEVICE void store_unit(const Unit& unit, const u8* stage, int thread, const RunOutput& out) {
    const u32 columns = out.columns(unit), pitch = unit.pitch();
    u8* to = out.q_t + static_cast<u64>(unit.start) * out.cols + static_cast<u64>(unit.strip * kTileSide) * unit.count +
             unit.above;
    if (unit.count % 16 == 0) {
        const ptx::SharedAddress from = ptx::shared_address(stage);
        if (unit.whole()) {
            constexpr u32 kPart = 4096;
            const u32 bytes = columns * pitch, first = thread * kPart;
            if (thread < kWarp && first < bytes) ptx::bulk_store(to + first, from + first, min(bytes - first, kPart));
        } else {
            for (u32 c = thread; c < columns; c += kStoreWarps * kWarp)
                ptx::bulk_store(to + static_cast<u64>(c) * unit.count, from + c * pitch, unit.rows);
        }
        ptx::bulk_store_commit();
        ptx::bulk_store_wait_read();
        return;
    }
    // Columns may begin at any byte. Lanes write aligned words, shifted together from two, and the bytes at the ends.
    const int lane = thread % kWarp, rows = static_cast<int>(unit.rows);
#pragma unroll 1
    for (u32 c = thread / kWarp; c < columns; c += kStoreWarps) {
        u8* column = to + static_cast<u64>(c) * unit.count;
        const u32* words = reinterpret_cast<const u32*>(stage + c * pitch);
        const int ahead = static_cast<int>(reinterpret_cast<u64>(column) & 3);
#pragma unroll 1
        for (int w = lane; w * 4 - ahead < rows; w += kWarp) {
            const u32 low = w == 0 ? 0u : words[w - 1], high = w * 4 < static_cast<int>(pitch) ? words[w] : 0u;
            const u32 shifted = __funnelshift_l(low, high, ahead * 8);
            const int first = w * 4 - ahead;
            if (first >= 0 && first + 4 <= rows) {
                ptx::st<4>(column + first, Raw<4>{shifted});
            } else {
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    if (first + b >= 0 && first + b < rows) ptx::st<1>(column + first + b, Raw<1>{shifted >> (8 * b) & 0xffu});
            }
        }
    }
}

// Warps that ask for rows of x, `x_stride` elements apart, 32 of each block.
template <int MODE>
struct RowFetch {
    const bf16* x;
    const i32* slots;
    i64 x_stride, divisor;
    u32 choices, cols;
    u32 first;  // row of the warp in a block

    // What fills the lane's row of a block.
    RTK_DEVICE u32 request(const Unit& unit, u32 down) const {
        const u32 row = down + first + threadIdx.x % kWarp;
        return row < unit.rows ? ptx::ld_keep<4>(slots + unit.start + unit.above + row).w[0] : ~0u;
    }

    // Rows without a token are zeros, up to the next 16.
    RTK_DEVICE void ask(const RowBlock& block, u32 found, ptx::SharedAddress barrier, u8* tile) const {
        const u32 lane = threadIdx.x % kWarp, column = block.unit.strip * kTileSide;
        const u32 columns = min(cols - column, static_cast<u32>(kTileSide)), bytes = columns * 2;
        const u32 rows = (block.rows + 15) / 16 * 16;
        const bool filled = found < choices;
        if constexpr (MODE == 0) {
            u8* row = tile + (first + lane) * kRowBytes;
            if (first + lane < rows && !filled) {
                Raw<16> zeros;
                clear(zeros);
                for (u32 b = 0; b < bytes; b += 16) *reinterpret_cast<Raw<16>*>(row + b) = zeros;
                ptx::fence_async_shared();
            }
            const int count = __popc(__ballot_sync(0xffffffffu, filled ? 1 : 0));
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive_expect(barrier, static_cast<u32>(count) * bytes);
            __syncwarp();
            if (filled) ptx::bulk_load(ptx::shared_address(row), x + divided(found, divisor) * x_stride + column, bytes, barrier);
        } else {
            const i64 place = filled ? divided(found, divisor) * x_stride : -1;
            const u32 own = lane % 16 * 8;
            const ptx::SharedAddress to = ptx::shared_address(tile) + (first + lane / 16) * kRowBytes + own * 2;
#pragma unroll
            for (int r = 0; r < kWarp; r += 2) {
                const i64 from = __shfl_sync(0xffffffffu, place, r + static_cast<int>(lane) / 16);
                if (first + r < rows && own < columns)
                    ptx::cp_async_16_or_zero(to + r * kRowBytes, x + (from < 0 ? 0 : from) + column + own, from >= 0);
            }
            ptx::cp_async_arrive(barrier);
        }
    }
};

// Arguments as those of moe_permute_fp8 (moe/permute_fp8.cu); cols is a multiple of 16, q_t is wanted. counter: 0.
// Dynamic shared memory: kRunMemory + 12 * (expert_count + 1) bytes.
template <typename F8, int MODE>
__global__ void __launch_bounds__(kRunThreads, 1)
    moe_permute_fp8_runs(const bf16* x, const i32* slots, const i32* offsets, const u8* probs, const i32* experts, F8* q,
                         float* scale, F8* q_t, float* scale_t, u8* probs_out, u32* counter, i64 choices, i64 top_k,
                         i64 divisor, i64 rows, i64 cols, i64 x_stride, i64 expert_count, i64 row_blocks,
                         i64 column_tiles, i64 prob_kind, i64 prob_columns, i64 pow2) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ RunShared shared;
    u8* const stages = memory + kSlots * kSlotBytes;
    shared.init(MODE == 0 ? kFetchWarps + 1 : kFetchWarps * kWarp + 1);
    const Units units(memory + kRunMemory, offsets, expert_count, rows);
    const RunOutput out = {reinterpret_cast<u8*>(q), scale, reinterpret_cast<u8*>(q_t), scale_t, static_cast<u32>(cols),
                           static_cast<u32>(column_tiles), pow2 != 0};
    const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;

    if (warp < kRowWarps) {
#pragma unroll 1
        for (u32 turn = 0;; ++turn) {
            const RowBlock& block = shared.wait_full(turn);
            if (block.rows == 0) break;
            if (q != nullptr)
                quantize_block_rows<F8>(block, memory + turn % kSlots * kSlotBytes, (warp + turn) % kRowWarps, out);
            shared.release(turn);
        }
    } else if (warp < kRowWarps + kColumnWarps) {
        const u32 slot = (warp - kRowWarps) / 2;
#pragma unroll 1
        for (u32 turn = slot;; turn += kSlots) {
            const RowBlock& block = shared.wait_full(turn);
            const u32 buffer = block.turn % 2, rows_here = block.rows, arrivals = block.arrivals;
            auto wait = [&] { ptx::mbarrier_wait(ptx::shared_address(&shared.freed[buffer]), (block.turn / 2 & 1) ^ 1); };
            if (rows_here != 0) {
                quantize_block_columns<F8>(block, memory + slot * kSlotBytes, warp % 2, stages + buffer * kStageBytes, out,
                                           wait);
            } else if (arrivals != 0) {
                wait();
            }
            ptx::fence_async_shared();
            __syncwarp();
            if (lane == 0)
                for (u32 i = 0; i < arrivals; ++i) ptx::mbarrier_arrive(ptx::shared_address(&shared.staged[buffer]));
            if (rows_here == 0) break;
            shared.release(turn);
        }
    } else if (warp < kRowWarps + kColumnWarps + kStoreWarps) {
        const int thread = static_cast<int>(threadIdx.x) - (kRowWarps + kColumnWarps) * kWarp;
#pragma unroll 1
        for (u32 turn = 0;; ++turn) {
            const u32 buffer = turn % 2;
            ptx::mbarrier_wait(ptx::shared_address(&shared.staged[buffer]), turn / 2 & 1);
            const Unit& unit = shared.units[turn % kKeptUnits];
            if (unit.rows == 0) break;
            store_unit(unit, stages + buffer * kStageBytes, thread, out);
            __syncwarp();
            if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&shared.freed[buffer]));
        }
    } else {
        const u32 fetcher = warp - (kRowWarps + kColumnWarps + kStoreWarps);
        const RowFetch<MODE> fetch = {x, slots, x_stride, divisor, static_cast<u32>(choices), out.cols, fetcher * kWarp};
        const bool tells = fetcher == 0 && lane == 0;  // the others what there is to do
        auto draw = [&](u32 later) {
            if (!tells) return;
            shared.numbers[later % kKeptUnits] = later == 0 ? blockIdx.x : gridDim.x + atomicAdd(counter, 1u);
            ptx::mbarrier_arrive(ptx::shared_address(&shared.drawn[later % kKeptUnits]));
        };
        draw(0), draw(1);
        u32 down = 0, unit_turn = 0, turn = 0;
        Unit unit = units.find(blockIdx.x, out.strips);
        u32 found = fetch.request(unit, 0);
#pragma unroll 1
        for (u32 ends = 0; ends < kSlots; ++turn) {
            Unit next = unit;
            u32 next_down = down + kTileSide;
            if (unit.rows != 0 && next_down >= unit.rows) {
                const u32 later = unit_turn + 1;
                ptx::mbarrier_wait(ptx::shared_address(&shared.drawn[later % kKeptUnits]), later / kKeptUnits & 1);
                next = units.find(shared.numbers[later % kKeptUnits], out.strips);
                next_down = 0;
                draw(later + 1);
            }
            const u32 requested = fetch.request(next, next_down);
            const u32 slot = turn % kSlots;
            ptx::mbarrier_wait(ptx::shared_address(&shared.empty[slot]), (turn / kSlots & 1) ^ 1);
            const u32 left = unit.rows - min(down, unit.rows), rows_here = min(left, static_cast<u32>(kTileSide));
            // The last block of a unit arrives for those that are not there, too.
            const u32 blocks_missing = kUnitBlocks - unit.blocks();
            const u32 arrivals = ends > 0 ? 0u : left > kTileSide ? 1u : unit.rows == 0 ? kUnitBlocks : 1 + blocks_missing;
            const RowBlock block = {unit, unit_turn, down, rows_here, arrivals};
            const ptx::SharedAddress full = ptx::shared_address(&shared.full[slot]);
            if (tells) {
                shared.blocks[slot] = block;
                if (down == 0 && ends == 0) shared.units[unit_turn % kKeptUnits] = unit;
                ptx::mbarrier_arrive(full);
            }
            fetch.ask(block, found, full, memory + slot * kSlotBytes);
            if (rows_here == 0) ++ends;
            if (next_down == 0) ++unit_turn;
            unit = next, down = unit.rows == 0 ? 0 : next_down;
            found = requested;
        }
    }

    const i64 step = static_cast<i64>(gridDim.x) * kRunThreads, own = static_cast<i64>(blockIdx.x) * kRunThreads + threadIdx.x;
    const i64 used = units.table.entry[expert_count].row;
    if (probs_out != nullptr) {
        const Probs numbers{probs, experts, prob_kind, prob_columns, static_cast<int>(top_k)};
        for (i64 row = own; row < rows; row += step) {
            const u32 slot = ptx::ld_keep<4>(slots + row).w[0], token = divided(slot, divisor);
            const bool filled = row < used && slot < static_cast<u32>(choices);
            const u8* place = filled ? numbers.place(token, static_cast<int>(slot - token * static_cast<u32>(top_k))) : nullptr;
            store_prob_bits(probs_out + row * numbers.bytes(), prob_kind, place == nullptr ? 0u : numbers.bits(place));
        }
    }
    for (i64 i = used * cols / 4 + own; i < rows * cols / 4; i += step) {
        if (q != nullptr) reinterpret_cast<u32*>(q)[i] = 0;
        reinterpret_cast<u32*>(q_t)[i] = 0;
    }
    if (q != nullptr)
        for (i64 i = used * column_tiles + own; i < rows * column_tiles; i += step) scale[i] = 0.0f;
    for (i64 i = units.table.blocks() * cols + own; i < row_blocks * cols; i += step) scale_t[i] = 0.0f;
}

}  // namespace rtk
