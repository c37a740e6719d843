// Copies the inputs of a tile (quant/tile_square.cuh) to shared memory while another tile is processed. A thread copies
// what it will read itself, so that no barrier is needed.
#pragma once
#include "ptx/cp_async.cuh"
#include "quant/tile_square.cuh"

namespace rtk {

inline constexpr int kLayer = kSquareThreads * 16;  // bytes of one row of each thread

// Rows of the thread in flight to shared memory, 16 bytes each.
struct SquareSlots {
    u8* memory;  // kLayer bytes for each row, in shared memory

    RTK_DEVICE u8* slot(int r) const { return memory + r * kLayer + this_thread() * 16; }
    RTK_DEVICE Raw<16> read(int r) const { return ptx::ld_shared_16(ptx::shared_address(slot(0)) + r * kLayer); }
    RTK_DEVICE void write(int r, const float* f) const {
        *reinterpret_cast<Raw<16>*>(slot(r)) = {__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                                                __float_as_uint(f[3])};
    }

    // Starts copying the first ROWS rows of the thread's spot, the first one from `p`; missing rows are zero-filled.
    template <int ROWS, typename T, typename Stride>
    RTK_DEVICE void fetch(const SquareSpot& spot, const T* p, Stride stride) const {
        const ptx::SharedAddress to = ptx::shared_address(slot(0));
        if (spot.rows >= ROWS && spot.columns > 0) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r, p += stride) ptx::cp_async_16(to + r * kLayer, p);
        } else {
#pragma unroll 1
            for (int r = 0; r < ROWS; ++r, p += stride) {
                if (r < spot.rows && spot.columns > 0) {
                    ptx::cp_async_16(to + r * kLayer, p);
                } else {
                    clear(*reinterpret_cast<Raw<16>*>(slot(r)));
                }
            }
        }
    }
};

}  // namespace rtk
