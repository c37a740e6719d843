// values, indices = the k largest numbers of every row of x, largest first, equal ones by column. Values keep their
// bits.
//
// Up to 8 of rows of up to 256 columns: four rows per warp. Others of up to 32 * V columns: one per warp. Longer ones:
// one per block, 32 * V columns per warp. In every warp, none of the k largest is below the t-th largest of the lanes'
// maxima, where t * warps >= k. The few candidates that are not below the smallest of these floors find their places by
// counting the larger ones. If too many are left (ties), each warp chooses from its own, and the first one merges.
#include "router/top8.cuh"

namespace rtk {

struct TopkResults {
    const void* x;
    void* values;
    void* indices;
    int kind;
    bool indices_int64;

    // Writes element `start + column` of x to `place`.
    RTK_DEVICE void put(i64 place, i64 start, int column) const {
        if (kind == kFloat32) {
            ptx::st<4>(static_cast<float*>(values) + place, ptx::ld_keep<4>(static_cast<const float*>(x) + start + column));
        } else {
            ptx::st<2>(static_cast<u16*>(values) + place, ptx::ld_keep<2>(static_cast<const u16*>(x) + start + column));
        }
        if (indices_int64) {
            static_cast<i64*>(indices)[place] = column;
        } else {
            static_cast<i32*>(indices)[place] = column;
        }
    }
};

template <int V>
RTK_DEVICE void load_keys(const void* x, i64 start, int column, i64 cols, i64 kind, i64 whole, u32 (&key)[V]) {
    const int valid = static_cast<int>(cols) - column;
    float value[V];
    load_some<V>(x, start + column, static_cast<int>(kind), whole != 0, valid, value);
    keys_of<V>(value, valid, key);
}

template <int V>
__global__ void __launch_bounds__(256) topk_fwd(const void* x, void* values, void* indices, i64 rows, i64 cols,
                                                i64 x_stride, i64 k, i64 kind, i64 whole, i64 indices_int64) {
    __shared__ Choice chosen[8][kMaxChosen];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + warp, start = row * x_stride;
    if (row >= rows) return;
    u32 key[V];
    load_keys<V>(x, start, lane * V, cols, kind, whole, key);
    if (kind != kFloat32) tell_apart<V>(key, lane * V);
    choose<V>(key, static_cast<int>(k), lane * V, chosen[warp], lane);
    const TopkResults results{x, values, indices, static_cast<int>(kind), indices_int64 != 0};
    for (int i = lane; i < static_cast<int>(k); i += kWarp) results.put(row * k + i, start, chosen[warp][i].column);
}

inline constexpr int kOctetThreads = 128;

// k up to 8 of up to 256 columns, whole groups of numbers of SIZE bytes: four rows of a warp at a time (top8.cuh).
template <int SIZE>
__global__ void __launch_bounds__(kOctetThreads, 4)
    topk_fwd_octets(const void* x, void* values, void* indices, i64 rows, i64 cols, i64 x_stride, i64 k, i64 kind, i64,
                    i64 indices_int64) {
    __shared__ Choice chosen[kOctetThreads / kWarp][kOctet];
    const int wanted = static_cast<int>(k), in_warp = static_cast<int>(threadIdx.x) % kWarp / kOctet;
    const i64 row = (static_cast<i64>(blockIdx.x) * kOctetThreads + threadIdx.x) / kOctet;
    if (row - in_warp >= rows) return;
    const i64 start = min(row, rows - 1) * x_stride;  // missing rows repeat the last one, so that all lanes take part
    Octet<SIZE> octet(static_cast<const u8*>(x) + start * SIZE, cols, static_cast<int>(kind));
    octet.load();
    octet.look();
    const int column = octet.find(wanted, chosen[threadIdx.x / kWarp]);
    const TopkResults results{x, values, indices, octet.kind, indices_int64 != 0};
    if (octet.lane < wanted && row < rows) results.put(row * k + octet.lane, start, column);
}

inline constexpr int kMaxCandidates = 256;

template <int V>
__global__ void __launch_bounds__(1024, 2) topk_fwd_block(const void* x, void* values, void* indices, i64 rows, i64 cols,
                                                     i64 x_stride, i64 k, i64 kind, i64 whole, i64 indices_int64) {
    extern __shared__ __align__(16) u8 memory[];
    __shared__ u64 candidates[kMaxCandidates];
    __shared__ u32 floors[kWarp], found;
    __shared__ Choice chosen[kMaxChosen];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    const int wanted = static_cast<int>(k), column = static_cast<int>(threadIdx.x) * V;
    const i64 row = blockIdx.x, start = row * x_stride;
    const TopkResults results{x, values, indices, static_cast<int>(kind), indices_int64 != 0};
    u32 key[V];
    load_keys<V>(x, start, column, cols, kind, whole, key);

    // ---- candidates for the largest
    const int full = static_cast<int>(cols) / (kWarp * V);  // warps all of whose columns exist
    const int rounds = (wanted + full - 1) / full;
    u32 largest = key[0];
#pragma unroll
    for (int v = 1; v < V; ++v) largest = max(largest, key[v]);
    u32 floor = 0u;
    if (rounds <= kWarp) {
        u32 left = largest;
        for (int i = 0; i < rounds; ++i) {
            const u32 best = __reduce_max_sync(kAllLanes, left);
            if (best == 0u) break;
            floor = best;
            if (left == best) left = 0u;
        }
    }
    if (lane == 0) floors[warp] = floor;
    if (threadIdx.x == 0) found = 0u;
    __syncthreads();
    floor = __reduce_min_sync(kAllLanes, lane < full ? floors[lane] : ~0u);
    if (floor != 0u && largest >= floor) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
            if (key[v] >= floor) {
                const u32 place = atomicAdd(&found, 1u);
                if (place < kMaxCandidates)
                    candidates[place] = static_cast<u64>(key[v]) << 32 | ~static_cast<u32>(column + v);
            }
        }
    }
    __syncthreads();
    const int count = static_cast<int>(found);
    if (floor != 0u && count <= kMaxCandidates) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const u64 mine = candidates[i];
            int rank = 0;
            for (int j = 0; j < count; ++j) rank += candidates[j] > mine ? 1 : 0;
            if (rank < wanted) results.put(row * k + rank, start, static_cast<int>(~static_cast<u32>(mine)));
        }
        return;
    }

    // ---- all of them
    Choice* lists = reinterpret_cast<Choice*>(memory);
    for (int i = lane; i < wanted; i += kWarp) lists[warp * wanted + i] = {0u, 0};
    __syncwarp();
    load_keys<V>(x, start, column, cols, kind, whole, key);  // keeping them would take registers from other rows
    choose<V>(key, wanted, column, lists + warp * wanted, lane);
    __syncthreads();
    if (warp != 0) return;
    merge_choices(lists, warps, wanted, chosen, lane);
    for (int i = lane; i < wanted; i += kWarp) results.put(row * k + i, start, chosen[i].column);
}

// dx = g at the chosen columns, 0 elsewhere. A warp owns a row; SIZE is the bytes of an element, which is moved as
// bits.
template <int SIZE>
__global__ void __launch_bounds__(256)
    topk_bwd(const void* g, const void* indices, void* dx, i64 rows, i64 cols, i64 k, i64 whole, i64 indices_int64) {
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
        const i64 column = indices_int64 ? static_cast<const i64*>(indices)[place] : static_cast<const i32*>(indices)[place];
        if (column < 0 || column >= cols) continue;
        ptx::st<SIZE>(out + column * SIZE, ptx::ld_keep<SIZE>(static_cast<const u8*>(g) + place * SIZE));
    }
}

}  // namespace rtk
