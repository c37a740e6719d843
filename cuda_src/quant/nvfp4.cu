// NVFP4 and MX formats (common/block_formats.cuh): quantises rows, finds the amax of a tensor, and dequantises.
//
// A thread owns 16 consecutive columns of a row at a time: a block of NVFP4, or half a block of MX, with the other half
// in the next lane. Threads are numbered along rows, `blocks` of them per row; a smaller grid loops, and loads the next
// values before it works on those that have arrived. With swizzled scales, threads are also numbered for the rows and
// blocks that pad the last tile of 128 x 4; these write zeros.
#include "common/block_formats.cuh"
#include "common/reduce.cuh"
#include "common/row_elements.cuh"

namespace rtk {

inline constexpr int kNvfp4 = 0, kMxfp4 = 1, kMxfp8 = 2;                                        // FORMAT
inline constexpr i64 kAligned16 = 1, kSwizzled = 2, kChannelFp32 = 4, kE5m2 = 8, kRoundUp = 16;  // flags
inline constexpr i64 kWholeCodes = 32, kDenseRows = 64;

// Position of N values.
template <int N>
struct Place {
    i64 row, column;
    int valid;

    // `number`: index of the values; `blocks` of them per row. `divisor`: runtime/layout.py, or 0 for numbers of 2^31
    // and more.
    RTK_DEVICE Place(i64 number, i64 rows, i64 cols, i64 blocks, i64 divisor) {
        row = divisor != 0 ? divided(static_cast<u32>(number), divisor) : number / blocks;
        column = (number - row * blocks) * N;
        valid = row < rows ? static_cast<int>(min(max(cols - column, static_cast<i64>(0)), static_cast<i64>(N))) : 0;
    }
};

// Loads them, in rows of 16-byte units.
template <typename T>
RTK_DEVICE void ask_sixteen(Asked<T, 16>& asked, const Place<16>& own, const T* x, i64 x_stride, i64 flags, u64 policy) {
    asked.ask((flags & kAligned16) != 0, x + own.row * x_stride + own.column, own.valid, policy);
}

// The values, times the scale of their column, and the largest finite magnitude.
template <typename T>
RTK_DEVICE float take_sixteen(const Asked<T, 16>& asked, const Place<16>& own, const T* x, const void* channel_scale, i64 x_stride,
                              i64 flags, float (&v)[16]) {
    const bool aligned16 = flags & kAligned16;
    if (aligned16) {
        asked.get(v);
        if (channel_scale == nullptr) return asked.amax();
    } else {
        load_elements<T, 16>(x + own.row * x_stride + own.column, own.valid, false, v);
    }
    if (channel_scale != nullptr) {
        float factor[16];
        load_either<T, 16>(channel_scale, own.column, flags & kChannelFp32, own.valid, aligned16, factor);
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] *= factor[i];
    }
    return finite_amax(v);
}

RTK_DEVICE i64 own_number() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// Raises *amax, the bits of a non-negative float, to the largest finite magnitude. The order of updates does not
// matter.
template <typename T>
__global__ void __launch_bounds__(256) tensor_amax(const T* x, const void* channel_scale, u32* amax, i64 rows, i64 cols,
                                                   i64 blocks, i64 x_stride, i64 divisor, i64 flags) {
    __shared__ GroupScratch<1> scratch;
    float largest = 0.0f;
    for (i64 number = own_number(); number < rows * blocks; number += static_cast<i64>(gridDim.x) * blockDim.x) {
        const Place<16> own(number, rows, cols, blocks, divisor);
        Asked<T, 16> asked;
        float v[16];
        ask_sixteen(asked, own, x, x_stride, flags, ptx::l2_last());
        largest = fmaxf(largest, take_sixteen(asked, own, x, channel_scale, x_stride, flags, v));
    }
    largest = block_reduce<MaxNumber>(largest, scratch);
    if (threadIdx.x == 0 && largest > 0.0f) atomicMax(amax, __float_as_uint(largest));
}

// Quantises 16 values to fp8.
template <typename F8>
RTK_DEVICE void store_codes(u8* out, const float (&v)[16], float inverse, int valid, bool aligned16) {
    float scaled[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) scaled[i] = v[i] * inverse;
    store_elements<F8, 16>(reinterpret_cast<F8*>(out), valid, aligned16 && valid == 16, scaled);
}

// 16 codes, aligned to 8 bytes if `aligned8`.
RTK_DEVICE void store_fp4(u8* out, const u32 (&words)[2], int valid, bool aligned8) {
    if (aligned8 && valid == 16) {
        Raw<8> raw;
        raw.w[0] = words[0], raw.w[1] = words[1];
        ptx::st<8>(out, raw);
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2)
        if (i < valid) out[i / 2] = static_cast<u8>(words[i / 8] >> (i % 8 * 4));
}

// NVFP4 of dense 16-bit rows of whole blocks, codes rounded to nearest even by scales rounded to nearest or up: nearly
// every call. Threads take blocks of 16 numbers in memory order, so rows matter only for the positions of swizzled
// scales (`blocks_of_row` per row, `divisor`: runtime/layout.py); there is no padding. g as below.
template <typename T>
__global__ void __launch_bounds__(256, 5)
    quantize_dense(const T* x, const float* global_scale, const u32* amax, u8* out, u8* scales, float* global_out, i64 count,
                   i64 blocks_of_row, i64 divisor, i64 flags, i64 scale_rule, double number) {
    const u32 blocks = static_cast<u32>(count), stride = gridDim.x * blockDim.x;
    const u64 policy = ptx::l2_last();
    u32 block = blockIdx.x * blockDim.x + threadIdx.x;
    Asked<T, 16> next;
    next.ask(block < blocks, x + static_cast<i64>(block) * 16, 16, policy);
    float g = static_cast<float>(number);
    if (global_scale != nullptr) g = *global_scale;
    if (amax != nullptr) g = *amax == 0u ? 1.0f : __uint_as_float(*amax) / 2688.0f;
    if (global_out != nullptr && block == 0) *global_out = g;
    const int rule = static_cast<int>(scale_rule);
    for (; block < blocks; block += stride) {
        const Asked<T, 16> own = next;
        next.ask(block + stride < blocks, x + static_cast<i64>(block + stride) * 16, 16, policy);
        u32 raw[8], largest = 0u;
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = own.raw[i / 4].w[i % 4], largest = WordMax<T>::larger_or_nan(largest, raw[i]);
        float pair[2];
        WordMax<T>::unpacked(largest, pair);
        const float whole = ptx::max_nan(pair[0], pair[1]);
        float v[16];
        u32 words[2], scale = nvfp4_scale_of<false>(v, whole, g, rule, kTiesNearest);
        const float step = g * e4m3_value(scale);
        if (whole <= 6.5f * step && step >= 0x1p-60f && step <= 0x1p60f) {
            e2m1_pack_elements<T>(raw, step, words);
        } else {  // zeros, numbers that are not finite, scales at the ends of their range
            own.get(v);
            scale = nvfp4_scale_of<false>(v, own.amax(), g, rule, kTiesNearest);
            e2m1_pack<16>(v, g * e4m3_value(scale), kTiesNearest, words);
        }
        Raw<8> codes;
        codes.w[0] = words[0], codes.w[1] = words[1];
        ptx::st<8>(out + static_cast<i64>(block) * 8, codes);
        i64 place = block;
        if (flags & kSwizzled) {
            const u32 row = divided(block, divisor);
            place = swizzled_place(row, block - row * static_cast<u32>(blocks_of_row), blocks_of_row);
        }
        scales[place] = static_cast<u8>(scale);
    }
}

// g: *global_scale, or from *amax, or the given number; it is written to global_out if that is not null.
template <typename T, int FORMAT>
__global__ void __launch_bounds__(256, sizeof(T) == 4 || FORMAT == kNvfp4 ? 3 : 4)
    quantize_blocks(const T* x, const void* channel_scale, const float* global_scale, const u32* amax, u8* out, u8* scales,
                    float* global_out, i64 rows, i64 cols, i64 blocks, i64 threads, i64 x_stride, i64 divisor, i64 flags,
                    i64 scale_rule, i64 elem_rule, double number) {
    constexpr bool kNv = FORMAT == kNvfp4;
    constexpr int kThreads = kNv ? 1 : 2;  // for a scale
    auto place_of = [&](i64 thread) {
        const bool there = thread < threads;
        return Place<16>(there ? thread : 0, there ? rows : 0, cols, blocks, divisor);
    };
    const u64 policy = ptx::l2_last();
    Asked<T, 16> next;
    ask_sixteen(next, place_of(own_number()), x, x_stride, flags, policy);
    float g = static_cast<float>(number);
    if constexpr (kNv) {
        if (global_scale != nullptr) g = *global_scale;
        if (amax != nullptr) g = *amax == 0u ? 1.0f : __uint_as_float(*amax) / 2688.0f;
        if (global_out != nullptr && own_number() == 0) *global_out = g;
    }
    const i64 scales_of_row = ceil_div(cols, 16 * kThreads), step = static_cast<i64>(gridDim.x) * blockDim.x;
    const bool whole_rows = (cols & 15) == 0;
    for (i64 thread = own_number(); thread - threadIdx.x < threads; thread += step) {  // all lanes, for the exchange below
        const Place<16> own = place_of(thread);
        float v[16];
        const float largest = take_sixteen(next, own, x, channel_scale, x_stride, flags, v);
        ask_sixteen(next, place_of(thread + step), x, x_stride, flags, policy);  // nothing after the last
        const i64 at = own.row * cols + own.column;  // elements before this thread's
        u32 scale = 0u;
        if constexpr (kNv) {
            const int ties = static_cast<int>(elem_rule);
            scale = nvfp4_scale_of<true>(v, largest, g, static_cast<int>(scale_rule), ties);
            u32 words[2];
            e2m1_pack<16>(v, g * e4m3_value(scale), ties, words);
            store_fp4(out + at / 2, words, own.valid, whole_rows);
        } else {
            constexpr bool kFp4 = FORMAT == kMxfp4;
            const bool e5 = flags & kE5m2;
            const float amax32 = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            const int exponent = kFp4 ? 2 : e5 ? 15 : 8;
            scale = mx_scale(amax32, exponent, kFp4 ? 6.0f : e5 ? 57344.0f : 448.0f, flags & kRoundUp);
            const float inverse = e8m0_inverse(scale);
            if constexpr (kFp4) {
                u32 words[2];
                e2m1_words<16>(v, [&](float one) { return one * inverse; }, words);
                store_fp4(out + at / 2, words, own.valid, whole_rows);
            } else if (e5) {
                store_codes<e5m2>(out + at, v, inverse, own.valid, whole_rows);
            } else {
                store_codes<e4m3>(out + at, v, inverse, own.valid, whole_rows);
            }
        }
        const i64 block = own.column / (16 * kThreads);
        if (thread >= threads || (kThreads == 2 && (own.column & 16) != 0)) continue;
        if (flags & kSwizzled) {
            scales[swizzled_place(own.row, block, scales_of_row)] = own.valid > 0 ? static_cast<u8>(scale) : 0;
        } else if (own.valid > 0) {
            scales[own.row * scales_of_row + block] = static_cast<u8>(scale);
        }
    }
}

// Dequantises: 8 elements of a row per thread at a time, so that neighbours write neighbouring 16 bytes of a 16-bit T,
// and kStretches of these, 256 threads apart; all codes are loaded before the first is used. `kDenseRows`: rows of
// whole blocks without gaps, so that row boundaries do not matter.
inline constexpr int kStretches = 2;

template <typename T>
__global__ void __launch_bounds__(256)
    dequantize_blocks(const u8* codes, const u8* scales, const float* global_scale, T* out, i64 rows, i64 cols, i64 blocks,
                      i64 codes_stride, i64 divisor, i64 flags, i64 format) {
    const bool mx = format != kNvfp4, fp4 = format != kMxfp8;
    const int shift = mx ? 5 : 4;
    const i64 scales_of_row = (cols + (1 << shift) - 1) >> shift;
    const i64 first = static_cast<i64>(blockIdx.x) * (kStretches * 256) + threadIdx.x;
    u32 scale[kStretches];
    Raw<8> raw[kStretches];
#pragma unroll
    for (int s = 0; s < kStretches; ++s) {
        const i64 number = first + s * 256;
        if (flags & kDenseRows) {
            scale[s] = 0u;
            clear(raw[s]);
            if (number >= rows * blocks) continue;
            scale[s] = scales[number >> (shift - 3)];
            if (fp4) {
                raw[s].w[0] = ptx::ld_keep<4>(codes + number * 4).w[0];
            } else {
                raw[s] = ptx::ld_stream<8>(codes + number * 8);
            }
            continue;
        }
        const Place<8> own(number, rows, cols, blocks, divisor);
        const i64 block = own.column >> shift;
        const u8* const from = codes + own.row * codes_stride + (fp4 ? own.column / 2 : own.column);
        scale[s] = 0u;
        clear(raw[s]);
        if (own.valid == 0) continue;
        scale[s] = scales[flags & kSwizzled ? swizzled_place(own.row, block, scales_of_row) : own.row * scales_of_row + block];
        if ((flags & kWholeCodes) && own.valid == 8) {
            if (fp4) {
                raw[s].w[0] = ptx::ld_stream<4>(from).w[0];
            } else {
                raw[s] = ptx::ld_stream<8>(from);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (i >= own.valid) break;
                if (!fp4) raw[s].w[i / 4] |= static_cast<u32>(from[i]) << (i % 4 * 8);
                if (fp4 && i % 2 == 0) raw[s].w[0] |= static_cast<u32>(from[i / 2]) << (i * 4);
            }
        }
    }
    const float global = global_scale != nullptr ? *global_scale : 1.0f;
#pragma unroll
    for (int s = 0; s < kStretches; ++s) {
        const i64 number = first + s * 256;
        if (number >= rows * blocks) continue;
        const float step = (mx ? e8m0_value(scale[s]) : e4m3_value(scale[s])) * global;
        float v[8];
        if (fp4) {
            e2m1_values(raw[s].w[0], v);
        } else if (flags & kE5m2) {
            unpack<e5m2, 8>(raw[s], v);
        } else {
            unpack<e4m3, 8>(raw[s], v);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= step;
        if (flags & kDenseRows) {
            store_elements<T, 8>(out + number * 8, 8, true, v);
        } else {
            const Place<8> own(number, rows, cols, blocks, divisor);
            store_elements<T, 8>(out + own.row * cols + own.column, own.valid, flags & kAligned16, v);
        }
    }
}

}  // namespace rtk
