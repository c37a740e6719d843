// Epilogue of gemm_sm90.cu: turns the accumulators of a warpgroup into the result; run-time flags, the same for all
// threads, choose each step.
//
// Accumulators (layout: ptx/wgmma.cuh) are multiplied by a factor per row and one per column, and a bias per column is
// added, in registers. Then they go to boxes of 64 rows of 128 bytes in shared memory, with the 128-byte swizzle:
//     plainly      as elements of the result, which TMA stores, or adds to fp32 results; it skips everything outside of the
//                  matrix
//     in general   as fp32 numbers (or int32 sums). Threads read them back, 4 neighbours each, apply the matrix to add, the
//                  activation and the old result, and store exactly the valid rows and columns, in any alignment
#pragma once
#include "gemm/epilogue_flags_sm90.cuh"
#include "gemm/split_rows_sm90.cuh"
#include "ptx/barrier.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace rtk {

// Adds N numbers of a matrix. Plain loads: other threads may write elsewhere in it.
template <typename T, int N>
RTK_DEVICE void add_numbers(float (&v)[N], const T* p) {
    float more[N];
    if constexpr (N == 4 && sizeof(T) == 4) {
        const float4 four = *reinterpret_cast<const float4*>(p);
        more[0] = four.x, more[1] = four.y, more[2] = four.z, more[3] = four.w;
    } else if constexpr (N == 4) {
        const uint2 four = *reinterpret_cast<const uint2*>(p);
        unpack<T, 4>(Raw<8>{{four.x, four.y}}, more);
    } else if constexpr (sizeof(T) == 4) {
        more[0] = *reinterpret_cast<const float*>(p);
    } else {
        unpack<T, 1>(Raw<2>{{*reinterpret_cast<const u16*>(p)}}, more);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] += more[i];
}

template <int N>
RTK_DEVICE void add_numbers_of(u32 kind, float (&v)[N], const void* matrix, i64 at) {
    if (kind == kBf16) {
        add_numbers(v, static_cast<const bf16*>(matrix) + at);
    } else if (kind == kFp16) {
        add_numbers(v, static_cast<const fp16*>(matrix) + at);
    } else {
        add_numbers(v, static_cast<const float*>(matrix) + at);
    }
}

// SLOTS boxes of one warpgroup, written in batches. All 128 threads call; `barrier` is their own. The first lanes of
// the four warps send the boxes of a batch; each counts its own groups of stores, one per batch.
template <int SLOTS>
struct BoxRing {
    static constexpr u32 kBytes = 64 * 128;
    u8* memory;
    int barrier;
    int slot = 0;

    // Returns BOXES boxes that may be overwritten: TMA and threads have finished reading them. Batches that are not
    // sent (`sends` is false) leave no group to count, so these wait for all groups that were sent.
    template <int BOXES>
    RTK_DEVICE u8* open(bool sends) {
        static_assert(SLOTS % BOXES == 0, "whole batches");
        if (threadIdx.x % kWarp == 0) {
            if (sends) {
                ptx::bulk_store_wait_read_but<SLOTS / BOXES - 1>();
            } else {
                ptx::bulk_store_wait_read();
            }
        }
        ptx::named_barrier_sync(barrier, 128);
        u8* box = memory + slot * kBytes;
        slot = slot + BOXES == SLOTS ? 0 : slot + BOXES;
        return box;
    }

    // `boxes` consecutive boxes of `columns` columns each.
    RTK_DEVICE void send(const ptx::TensorMap& map, u8* box, int boxes, int columns, i32 n, i32 row, i32 group, bool adds) const {
        ptx::fence_async_shared();
        ptx::named_barrier_sync(barrier, 128);
        if (threadIdx.x % kWarp == 0) {
#pragma unroll 1
            for (int i = static_cast<int>(threadIdx.x) / kWarp % 4; i < boxes; i += 4) {
                const ptx::SharedAddress from = ptx::shared_address(box + i * kBytes);
                if (adds) {
                    ptx::tma_add_3d(map, from, n + i * columns, row, group);
                } else {
                    ptx::tma_store_3d(map, from, n + i * columns, row, group);
                }
            }
            ptx::bulk_store_commit();
        }
    }

    RTK_DEVICE void close() const {
        if (threadIdx.x % kWarp == 0) ptx::bulk_store_wait_read();
    }
};

// Addresses of the result and of a matrix to add, and how the result is finished.
struct ResultPlace {
    const ptx::TensorMap& map;
    void* out;
    const void* add;
    i64 pitch, group_pitch, add_pitch;
    i32 columns;  // of the whole result
    EpilogueFlags flags;
};

// 64 rows of a tile. `rows` of them are valid; `engine`: TMA may store them.
struct ResultPart {
    i32 row, n;
    int rows;
    i32 group;
    bool engine;
};

// N neighbours of a row, from a box: the matrix to add, the activation, the old result. N is 4 where rows of all
// matrices are aligned to four elements.
template <int N>
RTK_DEVICE void finish_numbers(const u32 (&raw)[N], const ResultPlace& place, const Activation& activate, i64 at, i64 added_at) {
    const EpilogueFlags flags = place.flags;
    if (flags.out() == kInt32) {
        i32* p = static_cast<i32*>(place.out) + at;
#pragma unroll
        for (int c = 0; c < N; ++c) p[c] = static_cast<i32>(raw[c]) + (flags.accumulate() ? p[c] : 0);
        return;
    }
    float v[N];
#pragma unroll
    for (int c = 0; c < N; ++c) v[c] = __uint_as_float(raw[c]);
    if (place.add != nullptr) add_numbers_of(flags.add(), v, place.add, added_at);
#pragma unroll
    for (int c = 0; c < N; ++c) v[c] = activate(v[c]);
    if (flags.accumulate()) add_numbers_of(flags.out(), v, place.out, at);
    if (flags.out() == kBf16) {
        store<bf16, N>(static_cast<bf16*>(place.out) + at, v);
    } else if (flags.out() == kFp16) {
        store<fp16, N>(static_cast<fp16*>(place.out) + at, v);
    } else {
        store<float, N>(static_cast<float*>(place.out) + at, v);
    }
}

// The number of a lane's column in a row of a box [64, 32].
RTK_DEVICE u32 box_number(const u8* box, int row, int lane) {
    return *reinterpret_cast<const u32*>(box + row * 128 + ((lane / 4 ^ (row & 7)) << 4) + lane % 4 * 4);
}

// Every fourth row of a box of finished numbers, from `row` on, to memory in any alignment: a lane has a column.
template <typename T>
RTK_DEVICE void store_rows(const u8* box, T* to, i64 pitch, int row, int rows, int lane) {
#pragma unroll 4
    for (; row < rows; row += 4) {
        const float v[1] = {__uint_as_float(box_number(box, row, lane))};
        store<T, 1>(to + row * pitch, v);
    }
}

// Threads of a warpgroup finish a box of fp32 numbers [64, 32] with first column n. Where rows are aligned, a thread has
// four neighbours; otherwise a warp has a row, so that its stores are neighbours.
RTK_DEVICE void finish_box(const u8* box, const ResultPlace& place, const ResultPart& part, i32 n) {
    const EpilogueFlags flags = place.flags;
    const Activation activate(flags.act());
    const int thread = static_cast<int>(threadIdx.x) % 128, rows = min(part.rows, 64);
    if (flags.aligned() && place.columns - n >= 32) {
#pragma unroll 1
        for (int i = thread; i < rows * 8; i += 128) {
            const int row = i / 8, vector = i % 8;
            const i64 m = part.row + row, column = n + 4 * vector;
            const Raw<16> raw = ptx::ld_shared_16(ptx::shared_address(box + row * 128 + ((vector ^ (row & 7)) << 4)));
            finish_numbers<4>(raw.w, place, activate, part.group * place.group_pitch + m * place.pitch + column,
                              m * place.add_pitch + column);
        }
        return;
    }
    const int lane = thread % kWarp, warp = thread / kWarp;
    if (lane >= place.columns - n) return;
    const i64 first = part.group * place.group_pitch + part.row * place.pitch + n + lane;
    if (place.add == nullptr && flags.act() == kNoAct && !flags.accumulate()) {
        if (flags.out() == kBf16) {
            store_rows(box, static_cast<bf16*>(place.out) + first, place.pitch, warp, rows, lane);
        } else if (flags.out() == kFp16) {
            store_rows(box, static_cast<fp16*>(place.out) + first, place.pitch, warp, rows, lane);
        } else {  // the bits of an int32 result pass through unchanged
            store_rows(box, static_cast<float*>(place.out) + first, place.pitch, warp, rows, lane);
        }
        return;
    }
#pragma unroll 1
    for (int row = warp; row < rows; row += 4) {
        const u32 one[1] = {box_number(box, row, lane)};
        finish_numbers<1>(one, place, activate, first + row * place.pitch, (part.row + row) * place.add_pitch + n + lane);
    }
}

// The first 32 columns of a box of 16-bit results, which begin at column n; rows are aligned as TMA needs them.
RTK_DEVICE void store_half_box(const u8* box, const ResultPlace& place, const ResultPart& part, i32 n) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 128; i < min(part.rows, 64) * 4; i += 128) {
        const int row = i / 4, vector = i % 4;
        const i64 column = n + 8 * vector;
        if (column >= place.columns) continue;
        const i64 at = part.group * place.group_pitch + (part.row + row) * place.pitch + column;
        ptx::st<16>(static_cast<u8*>(place.out) + 2 * at,
                    ptx::ld_shared_16(ptx::shared_address(box + row * 128 + ((vector ^ (row & 7)) << 4))));
    }
}

// Called by a warpgroup: fp32 accumulators of 64 rows begin with the result so far, and products are added in the order
// of k. So a sum over k in several launches has the bits of one launch, if k is cut between its stages.
template <int COLS>
RTK_DEVICE void load_sums(float (&sums)[COLS / 2], const ResultPlace& place, const ResultPart& part) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int row = static_cast<int>(threadIdx.x) / kWarp % 4 * 16 + lane / 4;
    const i32 n = part.n + lane % 4 * 2;
    const float* const from = static_cast<const float*>(place.out) + part.group * place.group_pitch +
                              static_cast<i64>(part.row + row) * place.pitch + n;
    const bool pairs = place.flags.aligned() && place.columns % 2 == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool exists = row + 8 * r < part.rows;
        const float* const of_row = from + 8 * r * place.pitch;
        if (pairs) {
#pragma unroll
            for (int j = 0; j < COLS / 8; ++j) {
                float* const two = sums + 4 * j + 2 * r;
                two[0] = two[1] = 0.0f;
                ptx::ld_pair_if(exists && n + 8 * j < place.columns, two[0], two[1], of_row + 8 * j);
            }
        } else {
#pragma unroll
            for (int j = 0; j < COLS / 8; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& one = sums[4 * j + 2 * r + c];
                    one = 0.0f;
                    ptx::ld_float_if(exists && n + 8 * j + c < place.columns, one, of_row + 8 * j + c);
                }
        }
    }
}

// Requests what load_sums will read of another part, for L2: a row per thread.
template <int COLS>
RTK_DEVICE void prefetch_sums(const ResultPlace& place, const ResultPart& part) {
    const int row = static_cast<int>(threadIdx.x) % 128;
    if (row >= min(part.rows, 64) || !place.flags.aligned() || place.columns % 4 != 0) return;
    const float* const from = static_cast<const float*>(place.out) + part.group * place.group_pitch +
                              static_cast<i64>(part.row + row) * place.pitch + part.n;
    ptx::prefetch_l2_stream(from, 4 * static_cast<u32>(min(COLS, place.columns - part.n)));
}

template <int N>
struct BoxEights {  // columns of a box, by the eight
    enum : int { value = N };
};

RTK_DEVICE float as_float(float sum) { return sum; }
RTK_DEVICE float as_float(i32 bits) { return __uint_as_float(static_cast<u32>(bits)); }
template <typename Sum>
RTK_DEVICE Sum as_sum(float value) {
    if constexpr (is_same<Sum, i32>::value) {
        return static_cast<i32>(__float_as_uint(value));
    } else {
        return value;
    }
}

// Called by a warpgroup: finishes all its parts of a tile, WAVES of 64 rows; part_of(w) says where they are. `columns`
// is [2, COLS] in shared memory: factors, then biases (not read without FACTORS). A single loop runs over boxes and
// selects the accumulators of a box by comparison: registers cannot be indexed, and separate code for every box would
// take seconds to compile. SPLIT: accumulators have even columns before odd ones (gemm/split_rows_sm90.cuh). Stores are those of ptx/, because the compiler would merge plain ones and first move the
// accumulators to common registers. Batches of boxes share barriers.
template <int COLS, bool FACTORS, bool SPLIT, typename Sum, int WAVES, int SLOTS, typename PartOf>
RTK_DEVICE void finish_parts(Sum (&sums)[WAVES][COLS / 2], const float (&row_factor)[WAVES][2], const float* columns,
                             BoxRing<SLOTS>& ring, const ResultPlace& place, const PartOf& part_of) {
    u32 thread[1] = {threadIdx.x};
    ptx::wgmma_pin(thread);  // so that values derived from it are not kept in registers from tile to tile
    const int lane = static_cast<int>(thread[0]) % kWarp, t = lane % 4;
    const int row = static_cast<int>(thread[0]) / kWarp % 4 * 16 + lane / 4;
    const EpilogueFlags flags = place.flags;
    const bool raw = flags.out() == kInt32;
    if constexpr (is_same<Sum, i32>::value) {  // here, not in the loop: the compiler would keep both forms of all values
        if (!raw) {
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (Sum& sum : sums[w]) sum = static_cast<i32>(__float_as_uint(static_cast<float>(sum)));
        }
    }
    // In place, before the loop over boxes, so that its two forms only store.
    // Without rows, no barrier would follow before the next tile's columns are written.
    if (FACTORS && flags.factors() && part_of(0).rows > 0) {
        ptx::named_barrier_sync(ring.barrier, 128);  // all columns are valid
#pragma unroll
        for (int j = 0; j < COLS / 8; ++j) {
            if (j % 4 == 0) __syncwarp();  // otherwise the compiler hoists more loads of factors than it has registers for
            const float2 factor = *reinterpret_cast<const float2*>(columns + 8 * j + 2 * t);
            const float2 bias = *reinterpret_cast<const float2*>(columns + COLS + 8 * j + 2 * t);
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    Sum* const two = sums[w] + 4 * j + 2 * r;
                    two[0] = as_sum<Sum>(as_float(two[0]) * (row_factor[w][r] * factor.x) + bias.x);
                    two[1] = as_sum<Sum>(as_float(two[1]) * (row_factor[w][r] * factor.y) + bias.y);
                }
        }
    }
    // Columns 8 (first + j) + 2t and the next, of rows `row` and `row + 8`, into a box.
    auto finished = [&](int w, int first, auto& v) {
        constexpr int kCount = sizeof(v) / sizeof(v[0]);
#pragma unroll
        for (int j = 0; j < kCount; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                v[j][r] = make_float2(as_float(sums[w][4 * (first + j) + 2 * r]), as_float(sums[w][4 * (first + j) + 2 * r + 1]));
    };
    // Rows of the matrices that this lane passes to stmatrix: those at columns 8j, those 8 rows below, then both at 8
    // (j + 1).
    const int named_row = row - lane / 4 + lane % 16, named_column = lane / 16;
    auto two_bytes = [&](ptx::SharedAddress box, int w, int first, auto eights) {
        constexpr int kEights = decltype(eights)::value;
        if constexpr (SPLIT) {
            SplitSums<COLS, Sum>{sums[w]}.template two_bytes<kEights / 2>(box, row, t, first / 2, flags.out() == kBf16);
            return;
        }
        float2 v[kEights][2];
        finished(w, first, v);
        u32 packed[kEights][2];
        if (flags.out() == kBf16) {
#pragma unroll
            for (int i = 0; i < 2 * kEights; ++i) packed[i / 2][i % 2] = ptx::cvt_bf16x2(v[i / 2][i % 2].x, v[i / 2][i % 2].y);
        } else {
#pragma unroll
            for (int i = 0; i < 2 * kEights; ++i) packed[i / 2][i % 2] = ptx::cvt_f16x2(v[i / 2][i % 2].x, v[i / 2][i % 2].y);
        }
#pragma unroll
        for (int j = 0; j < kEights; j += 2)
            ptx::stmatrix_x4(box + named_row * 128 + (((j + named_column) ^ (lane & 7)) << 4), packed[j][0], packed[j][1],
                             packed[j + 1][0], packed[j + 1][1]);
    };
    auto four_bytes = [&](ptx::SharedAddress box, int w, int first) {
        if constexpr (SPLIT) {
            SplitSums<COLS, Sum>{sums[w]}.four_bytes(box, row, t, first / 2);
            return;
        }
        float2 v[4][2];
        finished(w, first, v);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int at = row + 8 * r;
                ptx::st_shared_8(box + at * 128 + (((2 * j + t / 2) ^ (at & 7)) << 4) + 8 * (t % 2),
                                 Raw<8>{{__float_as_uint(v[j][r].x), __float_as_uint(v[j][r].y)}});
            }
    };
    // TMA stores boxes of 64 16-bit columns; if the last one has 32, threads do.
    constexpr bool kHalfBox = COLS % 64 != 0;
    constexpr int kNarrowBoxes = (COLS + 63) / 64;
    constexpr int kNarrowBatch = SLOTS < kNarrowBoxes ? SLOTS : kNarrowBoxes, kBatch = SLOTS < COLS / 32 ? SLOTS : COLS / 32;
#pragma unroll 1
    for (int wave = 0; wave < WAVES; ++wave) {
        const ResultPart part = part_of(wave);
        if (part.rows <= 0) break;
        const bool narrow = part.engine && flags.out() <= kFp16;
        const int box_columns = narrow ? 64 : 32, step = narrow ? 64 * kNarrowBatch : 32 * kBatch;
#pragma unroll 1
        for (int column = 0; column < COLS && part.n + column < place.columns; column += step) {
            u8* first_box;
            if (narrow) {
                first_box = ring.template open<kNarrowBatch>(true);
            } else {
                first_box = ring.template open<kBatch>(part.engine);
            }
            const ptx::SharedAddress to = ptx::shared_address(first_box);
#pragma unroll
            for (int w = 0; w < WAVES; ++w) {
                if (narrow) {
#pragma unroll
                    for (int i = 0; i < COLS / 64; ++i)
                        if (w == wave && i / kNarrowBatch * 64 * kNarrowBatch == column)
                            two_bytes(to + i % kNarrowBatch * BoxRing<SLOTS>::kBytes, w, 8 * i, BoxEights<8>());
                    if constexpr (kHalfBox) {
                        constexpr int kLast = COLS / 64;
                        if (w == wave && kLast / kNarrowBatch * 64 * kNarrowBatch == column)
                            two_bytes(to + kLast % kNarrowBatch * BoxRing<SLOTS>::kBytes, w, 8 * kLast, BoxEights<4>());
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < COLS / 32; ++i)
                        if (w == wave && i / kBatch * 32 * kBatch == column)
                            four_bytes(to + i % kBatch * BoxRing<SLOTS>::kBytes, w, 4 * i);
                }
            }
            int boxes = min(step, place.columns - part.n - column + box_columns - 1) / box_columns;
            if constexpr (kHalfBox) boxes = min(boxes, (COLS - column) / box_columns);
            if (part.engine) {
                ring.send(place.map, first_box, boxes, box_columns, part.n + column, part.row, part.group,
                          flags.copy_engine_adds());
                if constexpr (kHalfBox) {
                    if (narrow && column + step > COLS - 32)
                        store_half_box(first_box + (COLS - column) / 64 * BoxRing<SLOTS>::kBytes, place, part, part.n + COLS - 32);
                }
            } else {
                ptx::named_barrier_sync(ring.barrier, 128);
#pragma unroll 1
                for (int i = 0; i < boxes; ++i)
                    finish_box(first_box + i * BoxRing<SLOTS>::kBytes, place, part, part.n + column + 32 * i);
            }
        }
    }
}

}  // namespace rtk
