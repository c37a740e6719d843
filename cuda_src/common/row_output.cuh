// Stores the values of a row, from fp32: unchanged, as 8-bit codes, or as NVFP4. One set of device functions for all
// kernels with a `quant` option; ops/shared/row_quant.py is the host side.
//
//   codes:  scale = max(amax / largest code, floor), or given;   code = (v * (1 / scale)), saturated, NaN kept
//
// There is one scale per tensor (given, or from an amax that an earlier launch has found), per row, or per 128 columns
// of a row. A thread owns kPerThread consecutive columns. amax is over finite values.
#pragma once
#include "common/block_formats.cuh"
#include "common/reduce.cuh"
#include "common/row_elements.cuh"

namespace rtk {

inline constexpr int kPlainOutput = 0, kByteOutput = 1, kFp4Output = 2;  // FORMAT
inline constexpr int kByTensor = 0, kByRow = 1, kByBlock = 2;            // bits 0 and 1 of `quant`
inline constexpr int kToE4m3 = 0, kToE5m2 = 1, kToInt8 = 2;              // bits 2 and 3
inline constexpr int kInBursts = 0, kNoLoop = 1;                         // how a thread loops over a row
inline constexpr i64 kSwizzledScales = 16, kAmaxOnly = 32, kOutFp32 = 64, kFromAmax = 128;

template <typename T, int FORMAT>
inline constexpr int kPerThread = FORMAT == kFp4Output ? 16 : 16 / sizeof(T);

// amax / limit and 1 / scale, correctly rounded where they are normal numbers, without the branches of a division.
RTK_DEVICE float over_limit(float amax, float limit) {
    const float inverse = inverse_scale(limit), near = amax * inverse;
    return fmaf(fmaf(-near, limit, amax), inverse, near);
}
RTK_DEVICE float reciprocal_of(float scale) {
    return scale > 0x1p-120f && scale < 0x1p120f ? inverse_scale(scale) : ptx::rcp(scale);
}

// N codes of `kind`, aligned to N bytes if `aligned16`.
template <int N>
RTK_DEVICE void store_bytes(u8* out, int valid, bool aligned16, int kind, const float (&v)[N], float inverse) {
    float scaled[N];
#pragma unroll
    for (int i = 0; i < N; ++i) scaled[i] = v[i] * inverse;
    if (kind == kToInt8) {
        Raw<N> raw;
        clear(raw);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            // NaN becomes 0, as in a float-to-integer conversion.
            const int code = min(max(__float2int_rn(scaled[i]), -127), 127);
            raw.w[i / 4] |= (static_cast<u32>(code) & 0xffu) << (i % 4 * 8);
        }
        if (aligned16 && valid > 0) {
            ptx::st<N>(out, raw);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i < valid) out[i] = static_cast<u8>(raw.w[i / 4] >> (i % 4 * 8));
        }
    } else if (kind == kToE5m2) {
        store_elements<e5m2, N>(reinterpret_cast<e5m2*>(out), valid, aligned16, scaled);
    } else {
        store_elements<e4m3, N>(reinterpret_cast<e4m3*>(out), valid, aligned16, scaled);
    }
}

// How many of the N columns from `column` on are before `end`.
template <int N>
RTK_DEVICE int count_at(i64 column, i64 end) {
    return static_cast<int>(min(max(end - column, static_cast<i64>(0)), static_cast<i64>(N)));
}

template <typename T, int FORMAT, bool aligned16>
struct RowOutput {
    static constexpr int N = kPerThread<T, FORMAT>;
    void *out, *kept, *scales;
    float* global_out;
    i64 cols, quant;
    float floor, inverse;  // the latter: of the scale of a row
    u32 word;  // the scale of the tensor, or its amax: loaded at the start, and first used when values have arrived

    // `given`: one number on the device; `amax`: bits of the largest magnitude; else `number` is the scale.
    RTK_DEVICE RowOutput(void* out_, void* kept_, void* scales_, float* global_out_, const float* given, const u32* amax,
                         i64 cols_, i64 quant_, double number, double floor_)
        : out(out_),
          kept(kept_),
          scales(scales_),
          global_out(global_out_),
          cols(cols_),
          quant(quant_),
          floor(static_cast<float>(floor_)),
          inverse(0.0f),
          word(__float_as_uint(static_cast<float>(number))) {
        const void* const from = from_amax() ? static_cast<const void*>(amax) : given;
        if constexpr (FORMAT != kPlainOutput) ptx::ld_keep_if<4>(from != nullptr, word, from);
    }

    // Scale of the whole tensor; for NVFP4 the one on top of the block scales.
    RTK_DEVICE float tensor_scale() const {
        const float own = __uint_as_float(word);
        if constexpr (FORMAT == kByteOutput) return fmaxf(from_amax() ? over_limit(own, limit()) : own, floor);
        return !from_amax() ? own : own == 0.0f ? 1.0f : over_limit(own, 2688.0f);
    }

    RTK_DEVICE bool from_amax() const { return (quant & kFromAmax) != 0; }
    RTK_DEVICE int granularity() const { return FORMAT == kByteOutput ? static_cast<int>(quant & 3) : kByTensor; }
    RTK_DEVICE int kind() const { return static_cast<int>(quant >> 2 & 3); }
    RTK_DEVICE float limit() const { return kind() == kToE4m3 ? 448.0f : kind() == kToE5m2 ? 57344.0f : 127.0f; }
    RTK_DEVICE bool amax_only() const { return FORMAT != kPlainOutput && (quant & kAmaxOnly) != 0; }
    RTK_DEVICE bool reads_twice() const { return granularity() == kByRow; }

    // The scale of a row from its amax; `writes`: true in one thread of the row.
    RTK_DEVICE void take_row_scale(float amax, i64 row, bool writes) {
        const float scale = fmaxf(over_limit(amax, limit()), floor);
        inverse = reciprocal_of(scale);
        if (writes) static_cast<float*>(scales)[row] = scale;
    }

    // Stores `valid` values from `column` on. All lanes of a warp call this; `lanes` work on one row.
    RTK_DEVICE void store(i64 row, i64 column, int valid, int lanes, const float (&v)[N]) {
        const i64 at = row * cols + column;
        if (kept != nullptr && valid > 0) store_elements<T, N>(static_cast<T*>(kept) + at, valid, aligned16, v);
        if constexpr (FORMAT == kPlainOutput) {
            if (valid > 0) store_either<T, N>(out, at, quant & kOutFp32, valid, aligned16, v);
        } else if constexpr (FORMAT == kByteOutput) {
            float factor = inverse;
            if (granularity() == kByTensor) {
                factor = reciprocal_of(tensor_scale());
            } else if (granularity() == kByBlock) {
                constexpr int kLanes = 128 / N;
                const float amax = warp_reduce<MaxNumber>(finite_amax(v), min(kLanes, lanes));
                const float scale = fmaxf(over_limit(amax, limit()), floor);
                factor = reciprocal_of(scale);
                if (valid > 0 && (column & 127) == 0) static_cast<float*>(scales)[row * (cols + 127 >> 7) + (column >> 7)] = scale;
            }
            if (valid > 0) store_bytes<N>(static_cast<u8*>(out) + at, valid, aligned16, kind(), v, factor);
        } else {
            store_fp4(row, column, valid, v);
        }
    }

    // The scale of the tensor, once it has arrived.
    RTK_DEVICE void take_tensor_scale() {
        if (FORMAT == kByteOutput && granularity() == kByTensor) inverse = reciprocal_of(tensor_scale());
    }

    // As `store`, for rows of whole vectors: `exists` says whether this thread has one. `start`: row * cols. Call after
    // take_tensor_scale or take_row_scale.
    RTK_DEVICE void store_whole(i64 start, i64 row, int column, bool exists, int lanes, const float (&v)[N]) {
        static_assert(FORMAT != kFp4Output && aligned16, "vectors are what shares a scale, or parts of it");
        float factor = inverse;
        if constexpr (FORMAT == kByteOutput) {
            if (granularity() == kByBlock) {
                const float amax = warp_reduce<MaxNumber>(exists ? finite_amax(v) : 0.0f, min(128 / N, lanes));
                const float scale = fmaxf(over_limit(amax, limit()), floor);
                factor = reciprocal_of(scale);
                if (exists && (column & 127) == 0)
                    static_cast<float*>(scales)[row * (cols + 127 >> 7) + (column >> 7)] = scale;
            }
        }
        if (!exists) return;
        const i64 at = start + column;
        if (kept != nullptr) store_elements<T, N>(static_cast<T*>(kept) + at, N, true, v);
        if constexpr (FORMAT == kByteOutput) {
            store_bytes<N>(static_cast<u8*>(out) + at, N, true, kind(), v, factor);
        } else {
            store_either<T, N>(out, at, quant & kOutFp32, N, true, v);
        }
    }

    // Columns [begin, stop) of a row of whole vectors, none if not `exists`: a pass for the amax of the row, if its
    // scale or that of the tensor depends on it, and one that stores. The next vector is loaded before the current one
    // is processed: ask(asked, column, there), which leaves `asked` unchanged if not `there`, and then make_y(asked,
    // y).
    template <typename Asked, typename Scratch, typename Ask, typename MakeY>
    RTK_DEVICE void finish_whole(const RowGroup& group, Scratch& scratch, i64 row, bool exists, int begin, int stop, u32* amax,
                                 Ask ask, MakeY make_y) {
        const int pitch = group.threads * N, limit_here = exists ? stop : 0;
        const i64 start = row * cols;
        auto for_all = [&](bool stores, auto use) {
            int column = begin + group.thread * N;
            Asked asked;
            asked.clear();
            ask(asked, column, column < limit_here);
            if (stores) take_tensor_scale();
#pragma unroll 1
            for (int first = begin; first < stop; first += pitch, column += pitch) {
                const Asked own = asked;
                ask(asked, column + pitch, column + pitch < limit_here);
                float y[N];
                make_y(own, y);
                use(column, column < limit_here, y);
            }
        };
        if (reads_twice() || amax_only()) {
            float row_amax = 0.0f;
            for_all(false, [&](int, bool there, const float(&y)[N]) { row_amax = there ? fmaxf(row_amax, finite_amax(y)) : row_amax; });
            row_amax = group_reduce<MaxNumber, false>(row_amax, group, scratch, 0);
            if (amax_only()) {
                if (group.thread == 0 && row_amax > 0.0f) atomicMax(amax, __float_as_uint(row_amax));
                return;
            }
            take_row_scale(row_amax, row, group.thread == 0 && exists);
        }
        for_all(true, [&](int column, bool there, const float(&y)[N]) { store_whole(start, row, column, there, group.threads, y); });
        if constexpr (FORMAT == kByteOutput) {
            if (from_amax() && (blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x) == 0) *static_cast<float*>(scales) = tensor_scale();
        }
    }

    // Columns [begin, stop) of a row; those before `end` exist: a pass for the amax of the row, if its scale or that of
    // the tensor depends on it, and one that stores. A thread has V vectors at a time: ask(v, column, valid) is called
    // for all of them before the first make_y(v, asked, column, valid, y), which returns N values, zeros past `valid`.
    // `slot` of the scratch is free.
    // WALK: kNoLoop if these are all columns of the thread.
    template <int V, int WALK, typename Scratch, typename Ask, typename MakeY>
    RTK_DEVICE void finish(const RowGroup& group, Scratch& scratch, int slot, i64 row, bool exists, i64 end, i64 begin,
                           i64 stop, u32* amax, Ask ask, MakeY make_y) {
        const i64 pitch = static_cast<i64>(group.threads) * N;
        auto for_all = [&](auto use) {
#pragma unroll 1
            for (i64 column = begin + group.thread * N, first = begin; first < stop; first += V * pitch, column += V * pitch) {
                decltype(ask(0, column, 0)) asked[V];
#pragma unroll
                for (int v = 0; v < V; ++v) asked[v] = ask(v, column + v * pitch, count_at<N>(column + v * pitch, end));
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    if (first + v * pitch >= stop) break;
                    const int valid = count_at<N>(column + v * pitch, end);
                    float y[N];
                    make_y(v, asked[v], column + v * pitch, valid, y);
                    use(column + v * pitch, valid, y);
                }
                if constexpr (WALK == kNoLoop) break;
            }
        };
        if (reads_twice() || amax_only()) {
            float row_amax = 0.0f;
            for_all([&](i64, int, const float(&y)[N]) { row_amax = fmaxf(row_amax, finite_amax(y)); });
            row_amax = group_reduce<MaxNumber, false>(row_amax, group, scratch, slot);
            if (amax_only()) {
                if (group.thread == 0 && row_amax > 0.0f) atomicMax(amax, __float_as_uint(row_amax));
                return;
            }
            take_row_scale(row_amax, row, group.thread == 0 && exists);
        }
        for_all([&](i64 column, int valid, const float(&y)[N]) { store(row, column, valid, group.threads, y); });
        if constexpr (FORMAT != kPlainOutput) {
            if (from_amax() && (blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x) == 0)
                *(FORMAT == kByteOutput ? static_cast<float*>(scales) : global_out) = tensor_scale();
        }
    }

    // The same for kernels that load their operands in make_y(column, valid, y).
    template <typename Scratch, typename MakeY>
    RTK_DEVICE void finish(const RowGroup& group, Scratch& scratch, int slot, i64 row, bool exists, i64 end, i64 begin,
                           i64 stop, u32* amax, MakeY make_y) {
        finish<1, kInBursts>(group, scratch, slot, row, exists, end, begin, stop, amax, [](int, i64, int) { return 0; },
                  [&](int, int, i64 column, int valid, float(&y)[N]) { make_y(column, valid, y); });
    }

    // Number of columns that a kernel must process: with swizzled scales all that the last tile has scales for, and
    // rows likewise up to a multiple of 128.
    RTK_DEVICE i64 span() const { return quant & kSwizzledScales ? (cols + 63) / 64 * 64 : cols; }

    RTK_DEVICE void store_fp4(i64 row, i64 column, int valid, const float (&v)[N]) {
        if constexpr (N == 16) {
            if (valid <= 0) {
                if ((quant & kSwizzledScales) != 0 && column < span())
                    static_cast<u8*>(scales)[swizzled_place(row, column / 16, (cols + 15) / 16)] = 0;
                return;
            }
            const float g = tensor_scale();
            const u32 code = nvfp4_scale_of<false>(v, finite_amax(v), g, kScaleNearest, kTiesNearest);
            u32 words[2];
            e2m1_pack<16>(v, g * e4m3_value(code), kTiesNearest, words);
            u8* const to = static_cast<u8*>(out) + (row * cols + column) / 2;
            if (valid == 16 && aligned16 && cols % 16 == 0) {
                Raw<8> raw;
                raw.w[0] = words[0], raw.w[1] = words[1];
                ptx::st<8>(to, raw);
            } else {
#pragma unroll
                for (int i = 0; i < 16; i += 2)
                    if (i < valid) to[i / 2] = static_cast<u8>(words[i / 8] >> (i % 8 * 4));
            }
            const i64 blocks = (cols + 15) / 16, block = column / 16;
            const i64 place = quant & kSwizzledScales ? swizzled_place(row, block, blocks) : row * blocks + block;
            static_cast<u8*>(scales)[place] = static_cast<u8>(code);
        }
    }
};

}  // namespace rtk
