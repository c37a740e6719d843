// State that two launches share about routed tokens. The first counts, for each chunk of tokens, those of every expert;
// the second, with one chunk per block, adds them up: where every expert's rows begin, and how many of them earlier
// chunks take. Blocks of the same launch do not communicate.
#pragma once
#include "common/scan.cuh"
#include "ptx/ldst.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

// [chunks][stride] counts, where stride is the number of experts rounded up to a multiple of four; then, 4 bytes each,
// the number of choices in every chunk (of lists; maps have none).
struct ChunkTable {
    u8* memory;
    int width;  // bytes of a count, 1, 2 or 4
    int chunks, stride;

    RTK_DEVICE ChunkTable(const u8* table, i64 bytes, i64 count, i64 experts)
        : memory(const_cast<u8*>(table)),
          width(static_cast<int>(bytes)),
          chunks(static_cast<int>(count)),
          stride(static_cast<int>(experts + 3) / 4 * 4) {}

    RTK_DEVICE u32* choice_counts() const { return reinterpret_cast<u32*>(memory + static_cast<i64>(chunks) * stride * width); }

    // Counts of four experts, packed. They come from the previous kernel, which may have overlapped with this one.
    template <int WIDTH>
    RTK_DEVICE Raw<4 * WIDTH> load(int chunk, int quad) const {
        const u8* at = memory + (static_cast<i64>(chunk) * stride + 4 * quad) * WIDTH;
        if constexpr (WIDTH == 1) {
            return {__ldcg(reinterpret_cast<const u32*>(at))};
        } else if constexpr (WIDTH == 2) {
            const uint2 v = __ldcg(reinterpret_cast<const uint2*>(at));
            return {v.x, v.y};
        } else {
            const uint4 v = __ldcg(reinterpret_cast<const uint4*>(at));
            return {v.x, v.y, v.z, v.w};
        }
    }

    template <int WIDTH>
    RTK_DEVICE static u32 count(const Raw<4 * WIDTH>& packed, int i) {
        if constexpr (WIDTH == 2) return packed.w[i / 2] >> (16 * (i % 2)) & 0xffffu;
        if constexpr (WIDTH == 4) return packed.w[i];
    }

    // Writes the counts of four experts.
    RTK_DEVICE void write(int chunk, int quad, const u32 (&c)[4]) const {
        u8* at = memory + (static_cast<i64>(chunk) * stride + 4 * quad) * width;
        if (width == 1) {
            *reinterpret_cast<u32*>(at) = c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24;
        } else if (width == 2) {
            *reinterpret_cast<uint2*>(at) = make_uint2(c[0] | c[1] << 16, c[2] | c[3] << 16);
        } else {
            *reinterpret_cast<uint4*>(at) = make_uint4(c[0], c[1], c[2], c[3]);
        }
    }

    // Writes a chunk's counts, [stride] in shared memory. The whole block calls this, after a barrier.
    RTK_DEVICE void write(int chunk, const u32* count) const {
        for (int quad = threadIdx.x; quad < stride / 4; quad += blockDim.x) {
            const u32* c = count + 4 * quad;
            write(chunk, quad, {c[0], c[1], c[2], c[3]});
        }
    }
};

// Where the rows of every expert are. In shared memory, (2 * groups + 1) * stride + 4 words (layout_bytes in
// ops/moe/moe_index_layout.py).
struct RowLayout {
    u32* total;  // [stride] tokens of each expert
    u32* base;   // [stride] row of the first token that this block's chunk has for each expert
    u32* first;  // [experts + 1] first row of each expert; no more than `rows`
    int experts, stride, groups;
    u32 rows, multiple;

    RTK_DEVICE RowLayout(u32* memory, const ChunkTable& table, i64 expert_count, i64 row_count, i64 multiple_of)
        : total(memory),
          base(memory + table.stride),
          first(memory + 2 * table.stride),
          experts(static_cast<int>(expert_count)),
          stride(table.stride),
          rows(static_cast<u32>(row_count)),
          multiple(static_cast<u32>(multiple_of)) {
        // No more threads read the table than have several chunks each.
        groups = max(min(static_cast<int>(blockDim.x) / (stride / 4), (table.chunks + 7) / 8), 1);
    }

    RTK_DEVICE u32* end() const { return sums(groups); }

    // The whole block calls this; ends with a barrier.
    RTK_DEVICE void find(const ChunkTable& table, int chunk) const {
        if (table.width == 1) {
            add<1>(table, chunk);
        } else if (table.width == 2) {
            add<2>(table, chunk);
        } else {
            add<4>(table, chunk);
        }
        __syncthreads();
        scan();
        __syncthreads();
    }

    // Tokens of an expert that have a row.
    RTK_DEVICE u32 kept(int expert) const { return min(total[expert], first[expert + 1] - first[expert]); }

    RTK_DEVICE void write(i32* counts, i32* offsets) const {
        for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
            if (e < experts) counts[e] = static_cast<i32>(kept(e));
            offsets[e] = static_cast<i32>(first[e]);
        }
    }

   private:
    // [2][stride] what a group of threads has read: all tokens of each expert, and those of earlier chunks.
    RTK_DEVICE u32* sums(int group) const {
        return group == 0 ? total : first + stride + 4 + (group - 1) * 2 * stride;
    }

    RTK_DEVICE u32 padded(u32 count) const {
        const u32 more = count + (multiple - 1);
        const u32 whole = (multiple & (multiple - 1)) == 0 ? more & ~(multiple - 1) : more / multiple * multiple;
        return min(whole, rows);
    }

    template <int WIDTH>
    RTK_DEVICE void add(const ChunkTable& table, int mine) const {
        constexpr int kInFlight = 16 / WIDTH;
        const int threads = static_cast<int>(blockDim.x), quads = stride / 4;
        const int group = static_cast<int>(threadIdx.x) / quads;
        if (group >= groups) return;
        for (int quad = static_cast<int>(threadIdx.x) - group * quads; quad < quads; quad += threads) {
            u32 sum[4] = {0, 0, 0, 0}, before[4] = {0, 0, 0, 0};
            for (int chunk = group; chunk < table.chunks; chunk += kInFlight * groups) {
                Raw<4 * WIDTH> packed[kInFlight];
#pragma unroll
                for (int k = 0; k < kInFlight; ++k) {
                    const int at = chunk + k * groups;
#pragma unroll
                    for (u32& word : packed[k].w) word = 0;
                    if (at < table.chunks) packed[k] = table.load<WIDTH>(at, quad);
                }
                if constexpr (WIDTH == 1) {  // two counts in a word
                    u32 bytes_0_2 = 0, bytes_1_3 = 0, bytes_0_2_before = 0, bytes_1_3_before = 0;
#pragma unroll
                    for (int k = 0; k < kInFlight; ++k) {
                        const u32 two = packed[k].w[0] & 0x00ff00ffu, others = packed[k].w[0] >> 8 & 0x00ff00ffu;
                        bytes_0_2 += two, bytes_1_3 += others;
                        if (chunk + k * groups < mine) bytes_0_2_before += two, bytes_1_3_before += others;
                    }
                    sum[0] += bytes_0_2 & 0xffffu, sum[1] += bytes_1_3 & 0xffffu, sum[2] += bytes_0_2 >> 16, sum[3] += bytes_1_3 >> 16;
                    before[0] += bytes_0_2_before & 0xffffu, before[1] += bytes_1_3_before & 0xffffu;
                    before[2] += bytes_0_2_before >> 16, before[3] += bytes_1_3_before >> 16;
                } else {
#pragma unroll
                    for (int k = 0; k < kInFlight; ++k)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const u32 count = ChunkTable::count<WIDTH>(packed[k], i);
                            sum[i] += count;
                            before[i] += chunk + k * groups < mine ? count : 0u;
                        }
                }
            }
            u32* target = sums(group) + 4 * quad;
            *reinterpret_cast<uint4*>(target) = make_uint4(sum[0], sum[1], sum[2], sum[3]);
            *reinterpret_cast<uint4*>(target + stride) = make_uint4(before[0], before[1], before[2], before[3]);
        }
    }

    RTK_DEVICE void scan() const {
        const ScanItems own(experts);
        for (int e = own.from; e < own.to; ++e) {
            u32 sum = total[e], before = base[e];
#pragma unroll 8
            for (int g = 1; g < groups; ++g) {
                sum += sums(g)[e];
                before += sums(g)[stride + e];
            }
            total[e] = sum, base[e] = before;
            first[e] = padded(sum);
        }
        exclusive_scan_up_to(
            experts, rows, [&](int e) { return first[e]; },
            [&](int e, u32 before, u32 sum) {
                first[e] = before;
                base[e] += before;
                if (e == experts - 1) first[experts] = sum;
            });
    }
};

// The first and the last (exclusive) item of this block's chunk.
struct Chunk {
    i64 from, to;
    RTK_DEVICE Chunk(i64 items, i64 per_chunk) {
        from = min(static_cast<i64>(blockIdx.x) * per_chunk, items);
        to = min(from + per_chunk, items);
    }
};

// VEC (4 or 1) flags of a routing map: 1 in the byte of each that is set, whatever its value.
template <int VEC>
RTK_DEVICE u32 set_flags(u32 word) {
    if constexpr (VEC == 1) return word != 0;
    return (((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7 & 0x01010101u;
}

template <int VEC>
RTK_DEVICE u32 load_flags(const u8* p) {
    return set_flags<VEC>(ptx::ld_stream<VEC>(p).w[0]);
}

}  // namespace rtk
