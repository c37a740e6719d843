// One step of AdamW or Lion over lists of tensors: moments of any kind, weights with or without an fp32 copy, arithmetic
// in fp32. RULE is kAdamW or kLion; STATE says how moments are kept (lane_moments.cuh).
//
// Lists of AdamW: 0 weights (fp32, bf16 or fp16), 1 gradients, 2 first moments, 3 second moments, 4 step counts (one fp32
// number each), 5 origins, then, if moments are codes, 6 and 7 their scales, and last copies of the weights (bf16 or
// fp16), which may be absent. Lion has one moment and one list of scales: 3 origins, 4 step counts, 5 scales, copies. An
// origin is two int64 numbers: which random numbers a tensor gets, and the place of its first element in the whole
// tensor, of which this one may be a shard.
//
// A warp owns 256 consecutive elements, eight per lane. Scales cover the same 256, or half of them, so that nothing is
// exchanged between warps. adamw_advance (multi_adamw.cu) runs first. With *found_inf != 0 nothing is changed.
//
// `stochastic`: bf16 weights are rounded up with a probability that is the part that rounding down cuts off. The random
// bits of an element depend on the seed, the tensor's number, the step and the element's place: not on the launch.
#include "multi/lane_moments.cuh"
#include "multi/list.cuh"
#include "ptx/pdl.cuh"

namespace rtk {

enum : int { kAdamW = 0, kLion = 1 };
enum : int { kWeight = 0, kGradient = 1, kFirst = 2, kSecond = 3, kStep = 4 };

struct StepNumbers {
    float keep, beta1, rest1, beta2, rest2, rate, second, eps, inverse;
    Origin origin;
    u64 place;

    // Moments of 8 bits have no use for an exact root.
    template <bool EXACT>
    RTK_DEVICE void adamw(float& w, float g, float& m, float& v) const {
        g *= inverse;
        m = fmaf(rest1, g, beta1 * m);
        v = fmaf(rest2 * g, g, beta2 * v);
        w = fmaf(-rate * m, ptx::rcp(fmaf(EXACT ? sqrtf(v) : ptx::sqrt_fast(v), second, eps)), w * keep);
    }
    // Products are rounded before they are added: the sign of a sum that cancels depends on it.
    RTK_DEVICE void lion(float& w, float g, float& m) const {
        g *= inverse;
        const float u = __fadd_rn(__fmul_rn(beta1, m), __fmul_rn(rest1, g));
        m = fmaf(rest2, g, beta2 * m);
        w = __fadd_rn(__fmul_rn(w, keep), u > 0.0f ? -rate : u < 0.0f ? rate : u);  // 0 or NaN
    }
};

template <bool WHOLE>
struct Whole {
    static constexpr bool kWhole = WHOLE;
};

// Conversions of e4m3 without an instruction for them need more registers than three blocks per SM leave.
constexpr int resident_blocks(int state, int wanted) {
#if RTK_HAS_FP8_CVT
    return wanted;
#else
    return state == kFp8 ? 2 : wanted;
#endif
}

template <int RULE, int STATE, int kResident>
__global__ void __launch_bounds__(kMultiThreads, resident_blocks(STATE, kResident))
    multi_moments(const i64* table, const float* lr_by, const float* grad_scale, const float* found_inf, i64 tensors,
                  i64 lists, i64 shift, i64 seed, i64 stochastic, double lr, double log_beta1, double log_beta2,
                  double rest1, double rest2, double eps, double decay, double sign) {
    constexpr bool kTwo = RULE == kAdamW;
    using First = Moments<STATE, true>;
    using Second = Moments<STATE, false>;
    constexpr int kOrigin = kTwo ? 5 : 3, kScale = kTwo ? 6 : 5;
    constexpr int kCopy = kScale + (First::kScaled ? (kTwo ? 2 : 1) : 0), kWarps = kMultiThreads / kWarp;
    __shared__ StepNumbers numbers;
    __shared__ MomentMaps<STATE> maps;
    const Chunk chunk(table, tensors, static_cast<int>(lists), static_cast<int>(shift), blockIdx.x);
    maps.fill(static_cast<int>(threadIdx.x));
    ptx::wait_for_previous();
    if (found_inf != nullptr && *found_inf != 0.0f) return;
    if (threadIdx.x == 0) {
        const double step = static_cast<double>(*reinterpret_cast<const float*>(chunk.record[kMultiHeader + kStep]));
        const double rate = lr_by != nullptr ? static_cast<double>(*lr_by) : lr;
        const double scale = grad_scale != nullptr ? static_cast<double>(*grad_scale) : 1.0;
        const i64* const origin = reinterpret_cast<const i64*>(chunk.record[kMultiHeader + kOrigin]);
        numbers.keep = static_cast<float>(1.0 - rate * decay);
        numbers.beta1 = static_cast<float>(1.0 - rest1);
        numbers.rest1 = static_cast<float>(rest1);
        numbers.beta2 = static_cast<float>(1.0 - rest2);
        numbers.rest2 = static_cast<float>(rest2);
        numbers.rate = static_cast<float>(kTwo ? rate / (1.0 - exp(step * log_beta1)) : rate);
        numbers.second = kTwo ? static_cast<float>(1.0 / sqrt(1.0 - exp(step * log_beta2))) : 0.0f;
        numbers.eps = static_cast<float>(eps);
        numbers.inverse = static_cast<float>(sign / scale);
        numbers.origin = {static_cast<u64>(seed), static_cast<u64>(origin[0]), static_cast<u64>(step)};
        numbers.place = static_cast<u64>(origin[1] + chunk.begin);
    }
    __syncthreads();
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int weight_kind = chunk.kind(kWeight), gradient_kind = chunk.kind(kGradient);
    const int copy_kind = lists > kCopy ? chunk.kind(kCopy) : 0, blocks = (chunk.count + kBlock - 1) / kBlock;
    const bool aligned = chunk.aligned();
    auto at = [&](int list, int bits) {
        return reinterpret_cast<u8*>(chunk.record[kMultiHeader + list]) + chunk.begin * bits / 8;
    };
    const int weight_size = weight_kind == 0 ? 4 : 2, gradient_size = gradient_kind == 0 ? 4 : 2;
    u8* const w = at(kWeight, 8 * weight_size);
    const u8* const g = at(kGradient, 8 * gradient_size);
    u8* const m = at(kFirst, First::kBits);
    u8* const v = kTwo ? at(kSecond, Second::kBits) : nullptr;
    float *scale1 = nullptr, *scale2 = nullptr;
    if constexpr (First::kScaled) {
        const i64 begin = chunk.begin / (First::kLanes * kEach);
        scale1 = reinterpret_cast<float*>(chunk.record[kMultiHeader + kScale]) + begin;
        if constexpr (kTwo) scale2 = reinterpret_cast<float*>(chunk.record[kMultiHeader + kScale + 1]) + begin;
    }
    auto get = [](int kind, const LaneElements<4>& raw, float (&f)[kEach]) {
        with_type(kind, [&](auto type) { raw.template get<decltype(type)>(f); });
    };
    // Whole blocks that are aligned have a loop without conditions on elements.
    auto update = [&](int block, auto whole) {
        constexpr bool kWhole = decltype(whole)::kWhole;
        const bool vectors = kWhole || aligned;
        const int first_element = block * kBlock + lane * kEach;
        const int here = kWhole ? kEach : min(max(chunk.count - first_element, 0), kEach);
        LaneElements<4> weight, gradient;
        First first;
        Second second;
        weight.load_kind(weight_kind, w + first_element * weight_size, here, vectors);
        gradient.load_kind(gradient_kind, g + first_element * gradient_size, here, vectors);
        first.load(m, scale1, first_element, here, chunk.count, vectors);
        if constexpr (kTwo) second.load(v, scale2, first_element, here, chunk.count, vectors);
        float fw[kEach], fg[kEach], fm[kEach], fv[kEach];
        get(weight_kind, weight, fw);
        get(gradient_kind, gradient, fg);
        first.get(maps, fm);
        if constexpr (kTwo) second.get(maps, fv);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            if constexpr (kTwo) {
                numbers.template adamw<STATE == kFull>(fw[i], fg[i], fm[i], fv[i]);
            } else {
                numbers.lion(fw[i], fg[i], fm[i]);
            }
        }
        if (here < kEach) {  // elements that do not exist must not decide about scales
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (i >= here) fm[i] = 0.0f, fv[i] = 0.0f;
        }
        first.put(maps, fm);
        first.store(m, scale1, first_element, here, vectors);
        if constexpr (kTwo) {
            second.put(maps, fv);
            second.store(v, scale2, first_element, here, vectors);
        }
        if (stochastic != 0 && weight_kind == 1) {
            round_stochastically(numbers.origin, numbers.place + static_cast<u64>(first_element), fw, weight);
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
            weight.template store<2>(at(kCopy, 16) + first_element * 2, here, vectors);
        }
    };
    int block = warp;
    const int whole_blocks = aligned ? chunk.count / kBlock : 0;
#pragma unroll 1
    for (; block < whole_blocks; block += kWarps) update(block, Whole<true>());
#pragma unroll 1
    for (; block < blocks; block += kWarps) update(block, Whole<false>());
}

}  // namespace rtk
