// One AdamW step over lists of tensors with moments of 8 bits, or with weights of 16 bits that have no fp32 copy;
// arithmetic in fp32.
//
// STATE says how moments are kept: kFull (fp32), kDynamic (codes of dynamic_codes.cuh, times the largest magnitude of
// their 256 elements), kFp8 (e4m3, times a scale, the largest magnitude of their 256 elements divided by 448).
// Lists: 0 weights (fp32, bf16 or fp16), 1 gradients, 2 first moments, 3 second moments, 4 step counts (one fp32 number
// each), 5 origins, then, unless STATE is kFull, 6 and 7 the scales of both moments, and last copies of the weights
// (bf16 or fp16), which may be absent. An origin is two int64 numbers: which random numbers a tensor gets, and the place
// of its first element in the whole tensor, of which this one may be a shard.
//
// A warp owns 256 consecutive elements, eight per lane. Scales cover the same 256, so that nothing is exchanged between
// warps. adamw_advance (multi_adamw.cu) runs first. With *found_inf != 0 nothing is changed.
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
    u64 seed, stream, step, place;

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
        constexpr int kPerWord = 4 / SIZE;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if (i % kPerWord == 0) w[i / kPerWord] = 0;
            if (i < here) w[i / kPerWord] |= ptx::ld_stream<SIZE>(p + i * SIZE).w[0] << 8 * SIZE * (i % kPerWord) % 32;
        }
    }
    template <int SIZE>
    RTK_DEVICE void store(u8* p, int here, bool vectors) const {
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
        constexpr int kPerWord = 4 / SIZE;
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (i < here) ptx::st<SIZE>(p + i * SIZE, Raw<SIZE>{{w[i / kPerWord] >> 8 * SIZE * (i % kPerWord) % 32}});
    }
    RTK_DEVICE void load_kind(int kind, const u8* p, int here, bool vectors) {
        if (kind == 0) {
            load<4>(p, here, vectors);
        } else {
            load<2>(p, here, vectors);
        }
    }
    RTK_DEVICE void store_kind(int kind, u8* p, int here, bool vectors) const {
        if (kind == 0) {
            store<4>(p, here, vectors);
        } else {
            store<2>(p, here, vectors);
        }
    }
    template <typename T>
    RTK_DEVICE void get(float (&f)[kEach]) const {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < kEach; i += kPerWord) {
            float some[kPerWord];
            unpack<T, kPerWord>(Raw<4>{{w[i / kPerWord]}}, some);
#pragma unroll
            for (int k = 0; k < kPerWord; ++k) f[i + k] = some[k];
        }
    }
    template <typename T>
    RTK_DEVICE void put(const float (&f)[kEach]) {
        constexpr int kPerWord = 4 / sizeof(T);
#pragma unroll
        for (int i = 0; i < kEach; i += kPerWord) {
            float some[kPerWord];
#pragma unroll
            for (int k = 0; k < kPerWord; ++k) some[k] = f[i + k];
            w[i / kPerWord] = pack<T, kPerWord>(some).w[0];
        }
    }
};

// bf16 bits of eight numbers, rounded by 16 random bits each. `place`: of the first in its whole tensor.
RTK_DEVICE void round_stochastically(const AdamNumbers& adam, u64 place, const float (&f)[kEach], LaneElements<4>& out) {
    const u64 offset = adam.stream << 32 | (adam.step & 0xffffffffull);
    RandomWords words = {};
    if (place % kEach == 0) {
        words = philox(adam.seed, place / kEach, offset);
    } else {  // a shard that begins in between: one element at a time, pushed in from the end
#pragma unroll 1
        for (u64 at = place; at < place + kEach; ++at) {
            const RandomWords these = philox(adam.seed, at / kEach, offset);
            const u32 low = at & 2 ? these.w[1] : these.w[0], high = at & 2 ? these.w[3] : these.w[2];
            const u32 word = at & 4 ? high : low, bits = at & 1 ? word >> 16 : word & 0xffffu;
#pragma unroll
            for (int k = 0; k < 4; ++k) words.w[k] = words.w[k] >> 16 | (k < 3 ? words.w[(k + 1) % 4] : bits) << 16;
        }
    }
    u32 half[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const u32 bits = words.w[i / 2] >> 16 * (i % 2) & 0xffffu;
        const u32 number = __float_as_uint(f[i]);
        const bool finite = (number & 0x7f800000u) != 0x7f800000u;
        half[i] = (number + (finite ? bits : 0u)) >> 16;
        if (!finite && (number & 0x7fffffu) != 0) half[i] |= 0x40u;  // NaN stays NaN
    }
#pragma unroll
    for (int i = 0; i < kEach; i += 2) out.w[i / 2] = half[i] | half[i + 1] << 16;
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

// Moments of a lane and the scale of its block. Fp8 numbers and dynamic codes are bytes.
template <int STATE, bool SIGNED>
struct Moments {
    static constexpr int kBytes = STATE == kFull ? 4 : 1;
    LaneElements<kBytes> raw;
    float scale;

    RTK_DEVICE void get(const DynamicMap* maps, float (&f)[kEach]) const {
        if constexpr (STATE == kFull) {
            raw.template get<float>(f);
        } else if constexpr (STATE == kFp8) {
            raw.template get<e4m3>(f);
        } else {
#pragma unroll
            for (int i = 0; i < kEach; ++i) f[i] = maps[SIGNED ? 0 : 1].template value<SIGNED>(raw.w[i / 4] >> 8 * (i % 4) & 0xffu);
        }
        if constexpr (STATE != kFull) {
#pragma unroll
            for (float& v : f) v *= scale;
        }
    }
    RTK_DEVICE void put(const DynamicMap* maps, const float (&f)[kEach]) {
        if constexpr (STATE == kFull) {
            raw.template put<float>(f);
            return;
        }
        scale = warp_amax(f) * (STATE == kFp8 ? 1.0f / 448.0f : 1.0f);
        if (scale < 1e-36f) scale = 0.0f;  // its inverse would overflow
        const float inverse = scale == 0.0f ? 0.0f : ptx::rcp(scale);
        if constexpr (STATE == kFp8) {
            float scaled[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) scaled[i] = fminf(fmaxf(f[i] * inverse, -448.0f), 448.0f);
            raw.template put<e4m3>(scaled);
        } else if constexpr (STATE == kDynamic) {
            u32 words[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                words[i / 4] |= maps[SIGNED ? 0 : 1].template code<SIGNED>(f[i] * inverse) << 8 * (i % 4);
            raw.w[0] = words[0], raw.w[1] = words[1];
        }
    }
};

template <int STATE, int kResident>
__global__ void __launch_bounds__(kMultiThreads, kResident)
    multi_adamw_codes(const i64* table, const float* lr_by, const float* grad_scale, const float* found_inf, i64 tensors,
                      i64 lists, i64 shift, i64 seed, i64 stochastic, double lr, double log_beta1, double log_beta2,
                      double rest1, double rest2, double eps, double decay, double sign) {
    constexpr int kCopy = STATE == kFull ? kScale : kScale + 2, kWarps = kMultiThreads / kWarp;
    constexpr int kStateBytes = Moments<STATE, true>::kBytes;
    __shared__ AdamNumbers adam;
    __shared__ DynamicMap maps[STATE == kDynamic ? 2 : 1];
    const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), blockIdx.x);
    if constexpr (STATE == kDynamic) {
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < 128) {
            maps[0].template fill<true>(thread);
        } else {
            maps[1].template fill<false>(thread - 128);
        }
    }
    ptx::wait_for_previous();
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    if (threadIdx.x == 0) {
        const double step = static_cast<double>(*reinterpret_cast<const float*>(chunk.record[kMultiHeader + kStep]));
        const double rate = lr_by != nullptr ? static_cast<double>(*lr_by) : lr;
        const double scale = grad_scale != nullptr ? static_cast<double>(*grad_scale) : 1.0;
        const i64* const origin = reinterpret_cast<const i64*>(chunk.record[kMultiHeader + kOrigin]);
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
        adam.place = static_cast<u64>(origin[1] + chunk.begin);
    }
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int weight_kind = chunk.kind(kWeight), gradient_kind = chunk.kind(kGradient);
    const int copy_kind = lists > kCopy ? chunk.kind(kCopy) : 0, blocks = (chunk.count + kBlock - 1) / kBlock;
    const bool vectors = chunk.aligned();
    auto at = [&](int list, int size) { return reinterpret_cast<u8*>(chunk.record[kMultiHeader + list]) + chunk.begin * size; };
    const int weight_size = weight_kind == 0 ? 4 : 2, gradient_size = gradient_kind == 0 ? 4 : 2;
    u8* const w = at(kWeight, weight_size);
    const u8* const g = at(kGradient, gradient_size);
    u8* const m = at(kFirst, kStateBytes);
    u8* const v = at(kSecond, kStateBytes);
    float *scale1 = nullptr, *scale2 = nullptr;
    if constexpr (STATE != kFull) {
        scale1 = reinterpret_cast<float*>(chunk.record[kMultiHeader + kScale]) + chunk.begin / kBlock;
        scale2 = reinterpret_cast<float*>(chunk.record[kMultiHeader + kScale + 1]) + chunk.begin / kBlock;
    }
    auto get = [](int kind, const LaneElements<4>& raw, float (&f)[kEach]) {
        with_type(kind, [&](auto type) { raw.template get<decltype(type)>(f); });
    };
#pragma unroll 1
    for (int block = warp; block < blocks; block += kWarps) {
        const int first_element = block * kBlock + lane * kEach, here = min(max(chunk.count - first_element, 0), kEach);
        LaneElements<4> weight, gradient;
        Moments<STATE, true> first;
        Moments<STATE, false> second;
        weight.load_kind(weight_kind, w + first_element * weight_size, here, vectors);
        gradient.load_kind(gradient_kind, g + first_element * gradient_size, here, vectors);
        first.raw.template load<kStateBytes>(m + first_element * kStateBytes, here, vectors);
        second.raw.template load<kStateBytes>(v + first_element * kStateBytes, here, vectors);
        if constexpr (STATE != kFull) first.scale = scale1[block], second.scale = scale2[block];
        float fw[kEach], fg[kEach], fm[kEach], fv[kEach];
        get(weight_kind, weight, fw);
        get(gradient_kind, gradient, fg);
        first.get(maps, fm);
        second.get(maps, fv);
#pragma unroll
        for (int i = 0; i < kEach; ++i) adam.template apply<STATE == kFull>(fw[i], fg[i], fm[i], fv[i]);
        if (here < kEach) {  // elements that do not exist must not decide about scales
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (i >= here) fm[i] = 0.0f, fv[i] = 0.0f;
        }
        first.put(maps, fm);
        second.put(maps, fv);
        first.raw.template store<kStateBytes>(m + first_element * kStateBytes, here, vectors);
        second.raw.template store<kStateBytes>(v + first_element * kStateBytes, here, vectors);
        if constexpr (STATE != kFull)
            if (lane == 0) scale1[block] = first.scale, scale2[block] = second.scale;
        if (stochastic != 0 && weight_kind == 1) {
            round_stochastically(adam, adam.place + static_cast<u64>(first_element), fw, weight);
        } else {
            with_type(weight_kind, [&](auto type) { weight.template put<decltype(type)>(fw); });
        }
        weight.store_kind(weight_kind, w + first_element * weight_size, here, vectors);
        if (copy_kind != 0) {
            if (copy_kind == 1) {
                weight.template put<bf16>(fw);
            } else {
                weight.template put<fp16>(fw);
            }
            weight.template store<2>(at(kCopy, 2) + first_element * 2, here, vectors);
        }
    }
}

}  // namespace rtk
