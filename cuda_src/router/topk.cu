// values, indices = the k largest numbers of every row of x, largest first, equal ones by column. Values keep their bits.
//
// Rows of up to 32 * V columns: one per warp. Longer ones: one per block, 32 * V columns per warp, whose choices the first
// warp merges.
#include "router/select.cuh"

namespace rtk {

RTK_DEVICE void write_choices(const void* x, i64 start, void* values, void* indices, i64 row, int k, int kind, bool wide,
                              const Choice* chosen, int lane) {
    for (int i = lane; i < k; i += kWarp) {
        const int column = chosen[i].column;
        const i64 place = row * k + i;
        if (kind == kFloat32) {
            ptx::st<4>(static_cast<float*>(values) + place, ptx::ld_keep<4>(static_cast<const float*>(x) + start + column));
        } else {
            ptx::st<2>(static_cast<u16*>(values) + place, ptx::ld_keep<2>(static_cast<const u16*>(x) + start + column));
        }
        if (wide) {
            static_cast<i64*>(indices)[place] = column;
        } else {
            static_cast<i32*>(indices)[place] = column;
        }
    }
}

template <int V>
RTK_DEVICE void load_keys(const void* x, i64 start, int column, i64 cols, i64 kind, i64 whole, u32 (&key)[V]) {
    const int valid = static_cast<int>(cols) - column;
    float value[V];
    load_some<V>(x, start + column, static_cast<int>(kind), whole != 0, valid, value);
    keys_of<V>(value, valid, key);
}

template <int V>
__global__ void __launch_bounds__(256) topk_fwd(const void* x, void* values, void* indices, i64 rows, i64 cols,
                                                i64 x_stride, i64 k, i64 kind, i64 whole, i64 wide) {
    __shared__ Choice chosen[8][kMostChosen];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + warp;
    if (row >= rows) return;
    u32 key[V];
    load_keys<V>(x, row * x_stride, lane * V, cols, kind, whole, key);
    choose<V>(key, static_cast<int>(k), lane * V, chosen[warp], lane);
    write_choices(x, row * x_stride, values, indices, row, static_cast<int>(k), static_cast<int>(kind), wide != 0,
                  chosen[warp], lane);
}

template <int V>
__global__ void __launch_bounds__(1024, 1) topk_fwd_wide(const void* x, void* values, void* indices, i64 rows, i64 cols,
                                                     i64 x_stride, i64 k, i64 kind, i64 whole, i64 wide) {
    extern __shared__ __align__(16) u8 memory[];
    Choice* parts = reinterpret_cast<Choice*>(memory);
    __shared__ Choice chosen[kMostChosen];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int most = static_cast<int>(k), column = static_cast<int>(threadIdx.x) * V;
    const i64 row = blockIdx.x, start = row * x_stride;
    u32 key[V];
    load_keys<V>(x, start, column, cols, kind, whole, key);
    for (int i = lane; i < most; i += kWarp) parts[warp * most + i] = {0u, 0};
    __syncwarp();
    choose<V>(key, most, column, parts + warp * most, lane);
    __syncthreads();
    if (warp != 0) return;
    merge_choices(parts, warps, most, chosen, lane);
    write_choices(x, start, values, indices, row, most, static_cast<int>(kind), wide != 0, chosen, lane);
}

// dx = g at the chosen columns, 0 elsewhere. A warp owns a row; SIZE is the bytes of a number, whose bits are moved.
template <int SIZE>
__global__ void __launch_bounds__(256)
    topk_bwd(const void* g, const void* indices, void* dx, i64 rows, i64 cols, i64 k, i64 whole, i64 wide) {
    const int lane = threadIdx.x % kWarp;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
    if (row >= rows) return;
    u8* out = static_cast<u8*>(dx) + row * cols * SIZE;
    Raw<16> zeros;
    clear(zeros);
    if (whole) {
        for (i64 at = lane * 16; at < cols * SIZE; at += kWarp * 16) ptx::st<16>(out + at, zeros);
    } else {
        Raw<SIZE> zero;
        clear(zero);
        for (i64 at = lane * SIZE; at < cols * SIZE; at += kWarp * SIZE) ptx::st<SIZE>(out + at, zero);
    }
    __syncwarp();  // zeros first, then the gradients among them
    for (int i = lane; i < static_cast<int>(k); i += kWarp) {
        const i64 place = row * k + i;
        const i64 column = wide ? static_cast<const i64*>(indices)[place] : static_cast<const i32*>(indices)[place];
        if (column < 0 || column >= cols) continue;
        ptx::st<SIZE>(out + column * SIZE, ptx::ld_keep<SIZE>(static_cast<const u8*>(g) + place * SIZE));
    }
}

}  // namespace rtk
