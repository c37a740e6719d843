// Weights of experts in decoding steps (gemm_step_experts.cu): rings in shared memory.
//
// A warp loads up to kDecodeMaxSteps steps of an octet (gemm_decode_stage.cuh) at a time into a slot of its own ring. A
// slot has the even rows, then the odd ones, 64 bytes later than they would be: the two rows that eight lanes read together
// are in different banks. The weights are followed by their scales [group of 128 of k][row], if they vary along k.
//
// TMA copies the rows of a slot, one by each of eight lanes, and arrives at its barrier; cp.async does so on older
// targets and where rows end inside of a step, which it fills up with zeros.
#pragma once
#include "gemm/gemm_decode_stage.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mbarrier.cuh"

namespace rtk {

inline constexpr int kDecodeMaxSteps = 8;  // of a slot
inline constexpr int kDecodeMaxRing = 8;   // slots of a warp

// The slots of a warp. Slots of a ring are filled and read by turns, all of them first.
struct DecodeRing {
    ptx::SharedAddress slots, barriers;
    int steps, count;  // of a slot; slots
    bool bulk, scaled;
    int slot = 0;
    u32 phase = 0;

    RTK_DEVICE int scales() const { return 512 * steps + 64; }  // offset in a slot
    RTK_DEVICE static int slot_bytes(int steps, int scales) { return 512 * steps + 64 + 4 * scales; }
    RTK_DEVICE int row(int r) const { return (r >> 1) * (64 * steps) + (r & 1) * (256 * steps + 64); }

    RTK_DEVICE void open(int lane) const {
#if RTK_HAS_TMA
        if (bulk) {
            if (lane < count) {
                ptx::mbarrier_init(barriers + 8 * lane, scaled ? 33 : 1);
                ptx::mbarrier_fence_init();
            }
            __syncwarp();
        }
#endif
    }

    // Issues the loads of `some` steps from `first` on into slot `s`; `group` is that of the first one's k.
    RTK_DEVICE void fetch(const DecodeWeights& from, int s, int bytes, int lane, int octet, int first, int some, int group, int group_count) const {
        const ptx::SharedAddress to = slots + s * bytes;
        const i64 begin = static_cast<i64>(first) * 64;
#if RTK_HAS_TMA
        if (bulk) {
            if (lane == 0) ptx::mbarrier_arrive_expect(barriers + 8 * s, 512 * some);
            __syncwarp();
            if (lane < 8) ptx::bulk_load(to + row(lane), from.data + from.row(octet, lane) * from.pitch + begin, 64 * some, barriers + 8 * s);
        } else
#endif
        {
            const i64 offset = begin + lane * 16;
            if (lane < 4 * some) {
#pragma unroll
                for (int r = 0; r < 8; ++r)
                    ptx::cp_async_16_stream(to + (row(r) + lane * 16), from.data + from.row(octet, r) * from.pitch + offset,
                                            offset < from.row_bytes ? 16 : 0);
            }
        }
        if (scaled) {
#pragma unroll 1
            for (int at = lane; at < 8 * group_count; at += 32) {
                const float* scale = from.scale + (from.row(octet, at % 8) >> from.scale_shift) * from.scale_row +
                                     min(group + at / 8, from.groups - 1) * from.scale_group;
                ptx::cp_async_4_partial(to + (scales() + at * 4), scale, 4);
            }
#if RTK_HAS_TMA
            if (bulk) ptx::cp_async_arrive(barriers + 8 * s);
#endif
        }
        if (!bulk) ptx::cp_async_commit();
    }

    // Waits for the oldest slot. Each one has had a fetch, or none if nothing was left.
    RTK_DEVICE void wait() const {
#if RTK_HAS_TMA
        if (bulk) {
            ptx::mbarrier_wait(barriers + 8 * slot, phase);
            return;
        }
#endif
        switch (count) {  // all but the newest count - 1
            case 1: ptx::cp_async_wait<0>(); break;
            case 2: ptx::cp_async_wait<1>(); break;
            case 3: ptx::cp_async_wait<2>(); break;
            case 4: ptx::cp_async_wait<3>(); break;
            case 5: ptx::cp_async_wait<4>(); break;
            case 6: ptx::cp_async_wait<5>(); break;
            case 7: ptx::cp_async_wait<6>(); break;
            default: ptx::cp_async_wait<7>(); break;
        }
        __syncwarp();
    }

    RTK_DEVICE void next() {
        if (++slot == count) slot = 0, phase ^= 1;
    }
};

}  // namespace rtk
