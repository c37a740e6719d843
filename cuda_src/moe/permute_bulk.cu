// moe_permute (moe/permute.cu) by TMA bulk copies: bytes pass through shared memory, none through registers.
//
// A warp owns one token. TMA loads its row and then writes it to every destination, one lane issuing each copy. Warps
// of the last `row_blocks` blocks handle 32 rows of y each: zeros for those that no choice fills, and the probabilities
// of all of them, which are adjacent there. Grid: tokens / warps of a block + row_blocks.
#include "moe/rows.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/bulk.cuh"

namespace rtk {

// Rows of x and y are multiples of 16 bytes. Dynamic shared memory: a row and 8 bytes per warp. `divisor`: of top_k
// (common/abi.cuh).
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    moe_permute_bulk(const u8* x, const i32* rows, const i32* slots, const float* scale, const u8* probs,
                     const i32* experts, u8* y, float* scale_out, u8* probs_out, i64 tokens, i64 top_k, i64 divisor,
                     i64 row_count, i64 row_bytes, i64 x_stride, i64 scales, i64 prob_kind, i64 prob_columns,
                     i64 row_blocks) {
    extern __shared__ __align__(128) u8 memory[];
    const int warps = static_cast<int>(blockDim.x) / kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, count = static_cast<int>(top_k);
    const u32 bytes = static_cast<u32>(row_bytes);
    const i64 token_blocks = gridDim.x - row_blocks;
    if (blockIdx.x >= token_blocks) {
        // Neighbouring rows belong to different blocks, so that many blocks share a long stretch of zeros.
        const i64 first = (warp * row_blocks + (blockIdx.x - token_blocks)) * kWarp, row = first + lane;
        const u32 slot = row < row_count ? ptx::ld_keep<4>(slots + row).w[0] : 0u;
        const bool pad = static_cast<i32>(slot) < 0;
        if (probs != nullptr && row < row_count) {
            const Probs table{probs, experts, prob_kind, prob_columns, count};
            const u32 token = divided(pad ? 0u : slot, divisor);
            const u8* place = pad || token >= tokens ? nullptr : table.place(token, static_cast<int>(slot - token * count));
            store_prob_bits(probs_out + row * table.bytes(), prob_kind, place == nullptr ? 0u : table.bits(place));
        }
        Raw<16> zeros;
        clear(zeros);
        for (u32 left = __ballot_sync(0xffffffffu, pad ? 1 : 0); left != 0; left &= left - 1) {
            const i64 empty = first + __ffs(static_cast<int>(left)) - 1;
            for (u32 i = lane * 16; i < bytes; i += kWarp * 16) ptx::st<16>(y + empty * row_bytes + i, zeros);
            for (i64 i = lane; i < scales; i += kWarp) scale_out[empty * scales + i] = 0.0f;
        }
        return;
    }
    const i64 token = static_cast<i64>(blockIdx.x) * warps + warp;
    if (token >= tokens) return;
    const ptx::SharedAddress row_memory = ptx::shared_address(memory + warp * row_bytes);
    const ptx::SharedAddress arrived = ptx::shared_address(memory + warps * row_bytes + warp * 8);
    if (lane == 0) {
        ptx::mbarrier_init(arrived, 1);
        ptx::mbarrier_fence_init();
        ptx::mbarrier_arrive_expect(arrived, bytes);
        ptx::bulk_load(row_memory, x + token * x_stride, bytes, arrived);
    }
    const i32* own = rows + token * top_k;
    i32 target = lane < count ? load_row(own + lane, row_count) : -1;
    __syncwarp();
    ptx::mbarrier_wait(arrived, 0);
    if (target >= 0) ptx::bulk_store(y + target * row_bytes, row_memory, bytes);
    for (int j = lane + kWarp; j < count; j += kWarp) {
        target = load_row(own + j, row_count);
        if (target >= 0) ptx::bulk_store(y + target * row_bytes, row_memory, bytes);
    }
    ptx::bulk_store_commit();
    const u32 each = static_cast<u32>(scales);
    for (u32 i = lane; i < each * count; i += kWarp) {
        const u32 j = i / each, s = i - j * each;
        const i32 row = load_row(own + j, row_count);
        if (row >= 0) scale_out[row * scales + s] = scale[token * scales + s];
    }
    ptx::bulk_store_wait_read();
}

}  // namespace rtk
