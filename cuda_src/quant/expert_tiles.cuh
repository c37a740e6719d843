// Tiles of 128 x 128 that never span two experts, and the destinations of their codes and scales.
#pragma once
#include "common/pressure.cuh"
#include "quant/experts.cuh"

namespace rtk {

// Up to 128 rows of one expert (without experts, all rows belong to one) by up to 128 columns.
struct alignas(8) TilePlace {
    u32 row, rows;     // the first one, and how many
    u32 start, count;  // the expert's first row, and its rows
    u32 down, column;  // number of the row block, and the first column
};

// All tiles, numbered along the columns first. Without counts there is one expert.
struct TilePlaces {
    ExpertTable table;
    u32 rows, across;
    bool by_expert;

    // `memory`: 8 * (experts + 1) bytes of shared memory. Fewer than 2^31 rows. The whole block calls.
    RTK_DEVICE TilePlaces(void* memory, const void* counts, i64 width, i64 experts, i64 all_rows, i64 cols)
        : table(memory, counts, width, experts, all_rows),
          rows(static_cast<u32>(all_rows)),
          across(static_cast<u32>((cols + (kTileSide - 1)) / kTileSide)),
          by_expert(counts != nullptr) {}

    // Without experts.
    RTK_DEVICE TilePlaces(i64 all_rows, i64 cols)
        : rows(static_cast<u32>(all_rows)),
          across(static_cast<u32>((cols + (kTileSide - 1)) / kTileSide)),
          by_expert(false) {}

    RTK_DEVICE u32 row_blocks() const { return by_expert ? table.blocks() : (rows + (kTileSide - 1)) / kTileSide; }
    RTK_DEVICE u32 count() const { return row_blocks() * across; }

    // `index` must be less than count().
    RTK_DEVICE TilePlace find(u32 index) const {
        const u32 down = index / across;
        ExpertRows expert = {0, rows, down * kTileSide};
        if (by_expert) expert = table.find(down);
        const u32 left = expert.rows - expert.above;
        return {expert.first_row + expert.above, min(left, static_cast<u32>(kTileSide)), expert.first_row, expert.rows,
                down, (index - down * across) * kTileSide};
    }
};

// Destinations of the codes of a matrix [rows, cols]; either half may be missing. Within an expert, row scales are
// stored by rows, or by groups if `by_group`; transposed codes and their scales are stored as for a matrix of the
// expert's rows alone.
struct Quantized {
    e4m3* q;
    float* scale;
    e4m3* q_t;
    float* scale_t;
    u32 cols;
    bool by_group, pow2;
    const float* max_abs = nullptr;  // of each column [experts, cols], if all rows of an expert's column share a scale
    u32 expert = 0;               // that of the tile, if so
    u32 start_t = 0, pitch_t = 0;    // first row and rows of the expert in q_t where these are padded; pitch_t is 0 if not
};

// There is room for the largest number of row blocks that the rows can form; unused ones get scale 0.
RTK_DEVICE void clear_scales(const TilePlaces& places, i64 row_blocks, i64 cols, float* scale_t) {
    if (scale_t == nullptr) return;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
#pragma unroll 1
    for (i64 i = places.row_blocks() * cols + blockIdx.x * blockDim.x + threadIdx.x; i < row_blocks * cols; i += step)
        scale_t[i] = 0.0f;
}

}  // namespace rtk
