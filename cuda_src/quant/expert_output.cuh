// Destinations of the codes and scales of rows sorted by expert, tile by tile.
#pragma once
#include "quant/experts.cuh"
#include "quant/tile_quantize.cuh"

namespace rtk {

// q [rows, cols] with scales [column tiles, rows of the expert] by expert; q_t [cols, rows of the expert] by expert with
// scales [blocks of rows, cols]. Either pair may be null.
template <typename F8>
struct ExpertOutput {
    F8* q;
    float* scale;
    F8* q_t;
    float* scale_t;
    i64 cols, column_tiles;

    RTK_DEVICE void tile(const ExpertRows& expert, u32 block, u32 group, TileOutput<F8>& out) const {
        const i64 first = expert.first_row, height = expert.rows, above = expert.above;
        const i64 row = first + above, column = static_cast<i64>(group) * kTileSide;
        out = {};
        if (q != nullptr) {
            out.q = q + row * cols + column;
            out.stride = cols;
            out.scale = scale + first * column_tiles + group * height + above;
            out.scale_step = 1;
        }
        if (q_t != nullptr) {
            out.transposed = q_t + first * cols + column * height + above;
            out.pitch = height;
            out.column_scale = scale_t + block * cols + column;
        }
    }
};

}  // namespace rtk
