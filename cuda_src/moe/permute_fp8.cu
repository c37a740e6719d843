// Quantises the rows that moe_permute would write, as quantize_fp8_experts (quant/quantize_fp8_experts.cu) does,
// without writing them first: tiles of 128 x 128 are gathered from the tokens. An expert's rows include its padding
// rows, which are zeros. Rows past the last expert's end get zeros as codes, scales and probabilities.
//
// A persistent grid. Tiles are numbered by bands of `band` column tiles, within a band by blocks of rows, and then
// along the columns: the part of x that a band reads stays in L2, although each token is read once per expert.
#include "moe/rows.cuh"
#include "quant/expert_output.cuh"
#include "quant/tile_quantize.cuh"

namespace rtk {

inline constexpr u32 kNowhere = 0xffffffffu;

// One tile, computed by one thread and kept in shared memory, where it costs no registers.
template <typename T, typename F8>
struct GatheredTile {
    const T* x;   // the tile's first column of token 0
    i64 row;      // first of the tile
    bool leads;   // has the first columns: also writes the per-row results
    TileOutput<F8> out;
    TileExtent extent;
};

// x [tokens, cols] can be read 16 bytes at a time. slots [rows]: the choice (token * top_k + j) of each row, or -1;
// `divisor`: of top_k (common/abi.cuh). q or q_t is null if not needed. BLOCKS: blocks per SM.
template <typename T, typename F8, int BLOCKS>
__global__ void __launch_bounds__(Tile<16 / sizeof(T)>::kThreads, BLOCKS)
    moe_permute_fp8(const T* x, const i32* slots, const i32* offsets, const u8* probs, const i32* experts, F8* q,
                    float* scale, F8* q_t, float* scale_t, u8* probs_out, i64 choices, i64 top_k, i64 divisor, i64 rows,
                    i64 cols, i64 x_stride, i64 expert_count, i64 row_blocks, i64 column_tiles, i64 band, i64 prob_kind,
                    i64 prob_columns, i64 pow2) {
    constexpr int N = 16 / sizeof(T);
    extern __shared__ __align__(16) u8 memory[];
    __shared__ TileScratch<N> scratch;
    __shared__ GatheredTile<T, F8> jobs[4];
    __shared__ __align__(16) u32 places[2][kTileSide];  // offsets of the rows' tokens in x, in units of 16 bytes, or kNowhere
    const ExpertTable table(memory, offsets, 0, expert_count, rows);
    auto tiles = [&] { return table.blocks() * static_cast<u32>(column_tiles); };
    auto self = [] {  // recomputed each time, so that it takes no register in between
        Raw<4> thread = {threadIdx.x};
        ptx::forget(thread);
        return static_cast<int>(thread.w[0]);
    };

    auto prepare = [&](u32 index, GatheredTile<T, F8>& job) {
        if (threadIdx.x != 0 || index >= tiles()) return;
        const u32 per_band = table.blocks() * static_cast<u32>(band), strip = index / per_band;
        const u32 first_group = strip * static_cast<u32>(band), inside = index - strip * per_band;
        const u32 width = min(static_cast<u32>(band), static_cast<u32>(column_tiles) - first_group);
        const u32 block = inside / width, group = first_group + (inside - block * width);
        const ExpertRows expert = table.find(block);
        const i64 row = static_cast<i64>(expert.first_row) + expert.above, column = static_cast<i64>(group) * kTileSide;
        job.x = x + column;
        job.row = row;
        job.leads = group == 0;
        job.extent = {static_cast<i64>(expert.rows) - expert.above, cols - column};
        ExpertOutput<F8>{q, scale, q_t, scale_t, cols, column_tiles}.tile(expert, block, group, job.out);
    };
    // Source of this thread's row of a tile: loaded before the rows, used after them.
    auto request = [&](u32 index, const GatheredTile<T, F8>& job) {
        const int thread = self();
        i32 slot = -1;
        if (thread < kTileSide && index < tiles() && thread < job.extent.rows)
            slot = static_cast<i32>(ptx::ld_keep<4>(slots + job.row + thread).w[0]);
        return slot;
    };
    auto receive = [&](u32 index, i32 slot, const GatheredTile<T, F8>& job, u32* to) {
        const int thread = self();
        if (thread >= kTileSide || index >= tiles()) return;
        const bool has_token = static_cast<u32>(slot) < static_cast<u32>(choices);
        const i32 token = has_token ? static_cast<i32>(divided(static_cast<u32>(slot), divisor)) : -1;
        to[thread] = has_token ? static_cast<u32>(token) * static_cast<u32>(x_stride / N) : kNowhere;
        if (probs_out == nullptr || !job.leads || thread >= job.extent.rows) return;
        const Probs table_of{probs, experts, prob_kind, prob_columns, static_cast<int>(top_k)};
        const u8* place = has_token ? table_of.place(token, slot - token * static_cast<i32>(top_k)) : nullptr;
        store_prob_bits(probs_out + (job.row + thread) * table_of.bytes(), prob_kind,
                        place == nullptr ? 0u : table_of.bits(place));
    };
    prepare(blockIdx.x, jobs[0]);
    prepare(blockIdx.x + gridDim.x, jobs[1]);
    __syncthreads();
    receive(blockIdx.x, request(blockIdx.x, jobs[0]), jobs[0], places[0]);
    u32 nth = 0;
    for (u32 index = blockIdx.x; index < tiles(); index += gridDim.x, ++nth) {
        __syncthreads();
        prepare(index + 2 * gridDim.x, jobs[(nth + 2) % 4]);
        const i32 slot = request(index + gridDim.x, jobs[(nth + 1) % 4]);
        const GatheredTile<T, F8>& job = jobs[nth % 4];
        const u32* sources = places[nth % 2];
        auto load = [&](const Tile<N>& tile, Raw<16>(&raw)[kTileRows]) {
            const T* from = job.x + tile.column;
            Raw<16> place[kTileRows / 4];
#pragma unroll
            for (int i = 0; i < kTileRows / 4; ++i)
                place[i] = *reinterpret_cast<const Raw<16>*>(sources + tile.row + 4 * i);
#pragma unroll
            for (int r = 0; r < kTileRows; ++r) {
                const u32 at = place[r / 4].w[r % 4];
                clear(raw[r]);
                if (at != kNowhere && tile.columns_here > 0) raw[r] = load_raw<T, N>(from + static_cast<u64>(at) * N);
            }
        };
        quantize_loaded_tile<T, F8, true, true, true, true, true, true>(job.extent, load, job.out, scratch, pow2 != 0);
        receive(index + gridDim.x, slot, jobs[(nth + 1) % 4], places[(nth + 1) % 2]);
    }
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x, own = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    const i64 used = table.entry[expert_count].row;
    for (i64 i = used * cols / 4 + own; i < rows * cols / 4; i += step) {
        if (q != nullptr) reinterpret_cast<u32*>(q)[i] = 0;
        if (q_t != nullptr) reinterpret_cast<u32*>(q_t)[i] = 0;
    }
    if (q != nullptr)
        for (i64 i = used * column_tiles + own; i < rows * column_tiles; i += step) scale[i] = 0.0f;
    if (q_t != nullptr)
        for (i64 i = table.blocks() * cols + own; i < row_blocks * cols; i += step) scale_t[i] = 0.0f;
    if (probs_out != nullptr)
        for (i64 i = used + own; i < rows; i += step)
            store_prob_bits(probs_out + i * (prob_kind == kProbFloat ? 4 : 2), prob_kind, 0u);
}

}  // namespace rtk
