// One AdamW step over lists of tensors with moments of 8 bits, or with weights of 16 bits that have no fp32 copy;
// arithmetic in fp32.
//
// STATE says how moments are kept: kFull (fp32), kDynamic (codes of dynamic_codes.cuh, times the largest magnitude of
// their 256 elements), kFp8 (e4m3, times a scale, the largest magnitude of their 256 elements divided by 448).
// Lists: 0 weights (fp32, bf16 or fp16), 1 gradients, 2 first moments, 3 second moments, 4 step counts (one fp32 number
// each), 5 origins, then, unless STATE is kFull, 6 and 7 the scales of both moments, and last copies of fp32
// weights (bf16 or fp16), which may be absent. An origin is two int64 numbers: which random numbers a tensor gets, and the place
// of its first element in the whole tensor, of which this one may be a shard.
//
// Blocks walk over chunks (list.cuh). A warp owns 256 consecutive elements of a chunk, eight per lane, and loads the next
// ones before it computes codes. Scales cover the same 256, so that nothing is exchanged between warps. adamw_advance
// (multi_adamw.cu) runs first. With *found_inf != 0 nothing is changed.
//
// `stochastic`: bf16 weights are rounded up with a probability that is the part that rounding down cuts off. The random
// bits of an element depend on the seed, the tensor's number, the step and the element's place: not on the launch.
#include "multi/dynamic_codes.cuh"
#include "multi/list.cuh"
#include "ptx/math.cuh"
#include "ptx/pdl.cuh"
#include "common/philox.cuh"

namespace rtk {

enum : int { kWeight = 0, kGradient = 1, kFirst = 2, kSecond = 3, kStep = 4, kOrigin = 5, kScale = 6 };
enum : int { kFull = 0, kDynamic = 1, kFp8 = 2 };
inline constexpr int kEach = 8, kBlock = kWarp * kEach;

struct AdamNumbers {
    float keep, beta1, rest1, beta2, rest2, rate, second, eps, inverse;
    u64 seed, stream, step, origin;

    // Moments of 8 bits have no use for an exact root.
    template <bool EXACT>
    RTK_DEVICE void apply(float& w, float g, float& m, float& v) const {
        g *= inverse;
        m = fmaf(rest1, g, beta1 * m);
        v = fmaf(rest2 * g, g, beta2 * v);
        w = fmaf(-rate * m, ptx::rcp(fmaf(EXACT ? sqrtf(v) : ptx::sqrt_fast(v), second, eps)), w * keep);
    }
};

// Eight elements of a lane as they are in memory, of 1, 2 or 4 bytes each; `here` of them exist. The type is a run-time
// kind (list.cuh), the same for the whole block, so that there is one copy of the arithmetic.
template <int BYTES>
struct LaneElements {
    u32 w[2 * BYTES];

    template <int SIZE>
    RTK_DEVICE void load(const u8* p, int here, bool vectors) {
        if (vectors && here == kEach) {
            constexpr int kPart = SIZE * kEach > 16 ? 16 : SIZE * kEach;
#pragma unroll
            for (int i = 0; i < SIZE * kEach / kPart; ++i) {
                const Raw<kPart> raw = ptx::ld_stream<kPart>(p + i * kPart);
#pragma unroll
                for (int k = 0; k < kPart / 4; ++k) w[i * kPart / 4 + k] = raw.w[k];
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) shift_in<SIZE>(i < here ? ptx::ld_stream<SIZE>(p + i * SIZE).w[0] : 0u);
    }
    template <int SIZE>
    RTK_DEVICE void store(u8* p, int here, bool vectors) {
        if (vectors && here == kEach) {
            constexpr int kPart = SIZE * kEach > 16 ? 16 : SIZE * kEach;
#pragma unroll
            for (int i = 0; i < SIZE * kEach / kPart; ++i) {
                Raw<kPart> raw;
#pragma unroll
                for (int k = 0; k < kPart / 4; ++k) raw.w[k] = w[i * kPart / 4 + k];
                ptx::st<kPart>(p + i * kPart, raw);
            }
            return;
        }
#pragma unroll 1
        for (int i = 0; i < here; ++i) {
            ptx::st<SIZE>(p + i * SIZE, Raw<SIZE>{{SIZE == 4 ? w[0] : w[0] & (1u << 8 * SIZE % 32) - 1u}});
            shift_in<SIZE>(0u);
        }
    }
    // Drops the first of eight elements of SIZE bytes and appends one: a loop over elements that has one copy of its body.
    template <int SIZE>
    RTK_DEVICE void shift_in(u32 element) {
#pragma unroll
        for (int k = 0; k < 2 * SIZE; ++k) {
            const u32 above = k + 1 < 2 * SIZE ? w[(k + 1) % (2 * BYTES)] : element;
            w[k] = SIZE == 4 ? above : w[k] >> 8 * SIZE % 32 | above << (32 - 8 * SIZE) % 32;
        }
    }
    RTK_DEVICE void load_kind(int kind, const u8* p, int here, bool vectors) {
        if constexpr (BYTES == 4) {
            if (kind == 0) return load<4>(p, here, vectors);
        }
        load<2>(p, here, vectors);
    }
    RTK_DEVICE void store_kind(int kind, u8* p, int here, bool vectors) {
        if constexpr (BYTES == 4) {
            if (kind == 0) return store<4>(p, here, vectors);
        }
        store<2>(p, here, vectors);
    }
    // Elements `first` to `first` + N - 1, as fp32, of a run-time kind.
    template <int N>
    RTK_DEVICE void get_kind(int kind, int first, float (&f)[N]) const {
        if (BYTES == 4 && kind == 0) {
            get_some<float>(first, f);
        } else if (kind == 1) {
            get_some<bf16>(first, f);
        } else {
            get_some<fp16>(first, f);
        }
    }
    template <int N>
    RTK_DEVICE void put_kind(int kind, int first, const float (&f)[N]) {
        if (BYTES == 4 && kind == 0) {
            put_some<float>(first, f);
        } else if (kind == 1) {
            put_some<bf16>(first, f);
        } else {
            put_some<fp16>(first, f);
        }
    }
    template <typename T, int N>
    RTK_DEVICE void get_some(int first, float (&f)[N]) const {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < N; i += kPerWord) {
            float some[kPerWord];
            unpack<T, kPerWord>(Raw<4>{{w[(first + i) / kPerWord]}}, some);
#pragma unroll
            for (int k = 0; k < kPerWord; ++k) f[i + k] = some[k];
        }
    }
    template <typename T, int N>
    RTK_DEVICE void put_some(int first, const float (&f)[N]) {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < N; i += kPerWord) {
            float some[kPerWord];
#pragma unroll
            for (int k = 0; k < kPerWord; ++k) some[k] = f[i + k];
            w[(first + i) / kPerWord] = pack<T, kPerWord>(some).w[0];
        }
    }
};

// 16 random bits for each of eight elements, the first of which is element `place` of its whole tensor.
RTK_DEVICE RandomWords random_bits(const AdamNumbers& adam, u64 place) {
    const u64 offset = adam.stream << 32 | (adam.step & 0xffffffffull);
    if (place % kEach == 0) return philox(adam.seed, place / kEach, offset);
    RandomWords words = {};
    // A shard that begins in between: one element at a time, pushed in from the end.
#pragma unroll 1
    for (u64 at = place; at < place + kEach; ++at) {
        const RandomWords these = philox(adam.seed, at / kEach, offset);
        const u32 low = at & 2 ? these.w[1] : these.w[0], high = at & 2 ? these.w[3] : these.w[2];
        const u32 word = at & 4 ? high : low, bits = at & 1 ? word >> 16 : word & 0xffffu;
#pragma unroll
        for (int k = 0; k < 4; ++k) words.w[k] = words.w[k] >> 16 | (k < 3 ? words.w[(k + 1) % 4] : bits) << 16;
    }
    return words;
}

// bf16 bits of a number, rounded by 16 random bits.
RTK_DEVICE u32 round_stochastically(float f, u32 bits) {
    const u32 number = __float_as_uint(f);
    const bool finite = (number & 0x7f800000u) != 0x7f800000u;
    const u32 half = (number + (finite ? bits : 0u)) >> 16;
    return !finite && (number & 0x7fffffu) != 0 ? half | 0x40u : half;  // NaN stays NaN
}

// The largest magnitude among the lanes; NaN if there is one.
RTK_DEVICE float warp_amax(const float (&f)[kEach]) {
    u32 bits = 0;
#pragma unroll
    for (float v : f) bits = max(bits, __float_as_uint(v) & 0x7fffffffu);
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, offset));
    return __uint_as_float(bits);
}

template <int STATE>
struct Maps {
    RTK_DEVICE void fill() {}
};
template <>
struct Maps<kDynamic> {
    DynamicMap<true> first;
    DynamicMap<false> second;

    RTK_DEVICE void fill() {
        first.fill_values<kMultiThreads>(), second.fill_values<kMultiThreads>();
        __syncthreads();
        first.fill_bins<kMultiThreads>(), second.fill_bins<kMultiThreads>();
        __syncthreads();
    }
    template <bool SIGNED>
    RTK_DEVICE const DynamicMap<SIGNED>& of() const {
        if constexpr (SIGNED) {
            return first;
        } else {
            return second;
        }
    }
};

// Moments of a lane and the scale of its block. Fp8 numbers and dynamic codes are bytes.
template <int STATE, bool SIGNED>
struct Moments {
    static constexpr int kBytes = STATE == kFull ? 4 : 1;
    LaneElements<kBytes> raw;
    float scale;

    RTK_DEVICE void get(const Maps<STATE>& maps, float (&f)[kEach]) const {
        if constexpr (STATE == kFull) {
            raw.template get_some<float>(0, f);
        } else if constexpr (STATE == kFp8) {
            raw.template get_some<e4m3>(0, f);
#pragma unroll
            for (float& v : f) v *= scale;
        } else {
            maps.template of<SIGNED>().decode(raw.w, scale, f);
        }
    }
    RTK_DEVICE void put(const Maps<STATE>& maps, const float (&f)[kEach]) {
        if constexpr (STATE == kFull) {
            raw.template put_some<float>(0, f);
            return;
        }
        scale = warp_amax(f) * (STATE == kFp8 ? 1.0f / 448.0f : 1.0f);
        if (scale < 1e-36f) scale = 0.0f;  // its inverse would overflow
        const float inverse = scale == 0.0f ? 0.0f : ptx::rcp(scale);
        if constexpr (STATE == kFp8) {
            float scaled[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) scaled[i] = f[i] * inverse;
            raw.template put_some<e4m3>(0, scaled);
        } else if constexpr (STATE == kDynamic) {
            maps.template of<SIGNED>().encode(f, inverse, raw.w);
        }
    }
};

// What a lane has loaded. BYTES: the most of a weight or a gradient.
template <int STATE, int BYTES>
struct Elements {
    LaneElements<BYTES> weight, gradient;
    Moments<STATE, true> first;
    Moments<STATE, false> second;
};

template <int STATE, int BYTES, int kResident>
__global__ void __launch_bounds__(kMultiThreads, kResident)
    multi_adamw_codes(const i64* table, const float* lr_by, const float* grad_scale, const float* found_inf, i64 tensors,
                      i64 lists, i64 shift, i64 chunks, i64 seed, i64 stochastic, double lr, double log_beta1,
                      double log_beta2, double rest1, double rest2, double eps, double decay, double sign) {
    constexpr int kCopy = STATE == kFull ? kScale : kScale + 2, kWarps = kMultiThreads / kWarp;
    constexpr int kStateBytes = Moments<STATE, true>::kBytes;
    __shared__ AdamNumbers adam;
    __shared__ Maps<STATE> maps;
    maps.fill();
    ptx::wait_for_previous();
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const i64* record = nullptr;  // of the tensor whose numbers are in `adam`
#pragma unroll 1
    for (i64 index = blockIdx.x; index < chunks; index += gridDim.x) {
        const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), index);
        if (chunk.record != record) {
            record = chunk.record;
            __syncthreads();
            if (threadIdx.x == 0) {
                const double step = static_cast<double>(*reinterpret_cast<const float*>(record[kMultiHeader + kStep]));
                const double rate = lr_by != nullptr ? static_cast<double>(*lr_by) : lr;
                const double scale = grad_scale != nullptr ? static_cast<double>(*grad_scale) : 1.0;
                const i64* const origin = reinterpret_cast<const i64*>(record[kMultiHeader + kOrigin]);
                adam.keep = static_cast<float>(1.0 - rate * decay);
                adam.beta1 = static_cast<float>(1.0 - rest1);
                adam.rest1 = static_cast<float>(rest1);
                adam.beta2 = static_cast<float>(1.0 - rest2);
                adam.rest2 = static_cast<float>(rest2);
                adam.rate = static_cast<float>(rate / (1.0 - exp(step * log_beta1)));
                adam.second = static_cast<float>(1.0 / sqrt(1.0 - exp(step * log_beta2)));
                adam.eps = static_cast<float>(eps);
                adam.inverse = static_cast<float>(sign / scale);
                adam.seed = static_cast<u64>(seed);
                adam.step = static_cast<u64>(step);
                adam.stream = static_cast<u64>(origin[0]);
                adam.origin = static_cast<u64>(origin[1]);
            }
            __syncthreads();
        }
        const int weight_kind = chunk.kind(kWeight), gradient_kind = chunk.kind(kGradient);
        const int copy_kind = lists > kCopy ? chunk.kind(kCopy) : 0, blocks = (chunk.count + kBlock - 1) / kBlock;
        const bool vectors = chunk.aligned();
        const int weight_size = weight_kind == 0 ? 4 : 2, gradient_size = gradient_kind == 0 ? 4 : 2;
        // Addresses are read again from L1 where they are needed: seven of them would be in registers otherwise.
        auto at = [&](int list, int size, int from) {
            return reinterpret_cast<u8*>(record[kMultiHeader + list]) + (chunk.begin + from) * size;
        };
        auto scale_at = [&](int list, int block) {
            return reinterpret_cast<float*>(record[kMultiHeader + kScale + list]) + (chunk.begin / kBlock + block);
        };
        auto load = [&](Elements<STATE, BYTES>& to, int block) {
            const int from = block * kBlock + lane * kEach, here = min(max(chunk.count - from, 0), kEach);
            to.weight.load_kind(weight_kind, at(kWeight, weight_size, from), here, vectors);
            to.gradient.load_kind(gradient_kind, at(kGradient, gradient_size, from), here, vectors);
            to.first.raw.template load<kStateBytes>(at(kFirst, kStateBytes, from), here, vectors);
            to.second.raw.template load<kStateBytes>(at(kSecond, kStateBytes, from), here, vectors);
            if constexpr (STATE != kFull) to.first.scale = *scale_at(0, block), to.second.scale = *scale_at(1, block);
        };
        Elements<STATE, BYTES> next;
        if (warp < blocks) load(next, warp);
#pragma unroll 1
        for (int block = warp; block < blocks; block += kWarps) {
            const int from = block * kBlock + lane * kEach, here = min(max(chunk.count - from, 0), kEach);
            Elements<STATE, BYTES> now = next;
            float fm[kEach], fv[kEach];
            now.first.get(maps, fm);
            now.second.get(maps, fv);
            const bool random = stochastic != 0 && weight_kind == 1;
            RandomWords bits = {};
            if (random) bits = random_bits(adam, adam.origin + static_cast<u64>(chunk.begin + from));
#pragma unroll
            for (int i = 0; i < kEach; i += 2) {
                float fw[2], fg[2];
                now.weight.get_kind(weight_kind, i, fw);
                now.gradient.get_kind(gradient_kind, i, fg);
#pragma unroll
                for (int k = 0; k < 2; ++k) adam.template apply<STATE == kFull>(fw[k], fg[k], fm[i + k], fv[i + k]);
                if (random) {
                    const u32 word = bits.w[i / 2];
                    now.weight.w[i / 2] = round_stochastically(fw[0], word & 0xffffu) | round_stochastically(fw[1], word >> 16) << 16;
                } else {
                    now.weight.put_kind(weight_kind, i, fw);
                }
            }
            if (BYTES == 4 && copy_kind != 0) {
                LaneElements<2> copy;
#pragma unroll
                for (int i = 0; i < kEach; i += 2) {
                    float fw[2];
                    now.weight.template get_some<float>(i, fw);
                    copy.put_kind(copy_kind, i, fw);
                }
                copy.template store<2>(at(kCopy, 2, from), here, vectors);
            }
            now.weight.store_kind(weight_kind, at(kWeight, weight_size, from), here, vectors);
            if (block + kWarps < blocks) load(next, block + kWarps);
            if (here < kEach) {  // elements that do not exist must not decide about scales
#pragma unroll
                for (int i = 0; i < kEach; ++i)
                    if (i >= here) fm[i] = 0.0f, fv[i] = 0.0f;
            }
            now.first.put(maps, fm);
            now.second.put(maps, fv);
            now.first.raw.template store<kStateBytes>(at(kFirst, kStateBytes, from), here, vectors);
            now.second.raw.template store<kStateBytes>(at(kSecond, kStateBytes, from), here, vectors);
            if constexpr (STATE != kFull)
                if (lane == 0) *scale_at(0, block) = now.first.scale, *scale_at(1, block) = now.second.scale;
        }
    }
}

}  // namespace rtk
