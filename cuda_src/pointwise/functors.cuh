// The functors of the pointwise family. Each has kInputs operands (a, b, d) in Compute<T>, T being torch's promoted dtype, and
// scalars s.s0 to s.s3. They propagate NaN as torch does; integers wrap; integer division by zero gives 0 (torch: undefined).
#pragma once
#include "pointwise/transposed.cuh"
#include "ptx/math.cuh"

namespace rtk {

// ---- helpers ----------------------------------------------------------------------------------------------------

template <typename C>
inline constexpr bool kIsFloat = is_same<C, float>::value;

// Sums and products of integers wrap.
template <typename C>
RTK_DEVICE C plus(C a, C b) {
    if constexpr (kIsFloat<C>) return a + b;
    else return static_cast<C>(static_cast<u64>(a) + static_cast<u64>(b));
}
template <typename C>
RTK_DEVICE C minus(C a, C b) {
    if constexpr (kIsFloat<C>) return a - b;
    else return static_cast<C>(static_cast<u64>(a) - static_cast<u64>(b));
}
template <typename C>
RTK_DEVICE C times(C a, C b) {
    if constexpr (kIsFloat<C>) return a * b;
    else return static_cast<C>(static_cast<u64>(a) * static_cast<u64>(b));
}

// Quotient rounded towards zero and its remainder; -1 is handled separately, because the smallest number has no
// negative.
template <typename C>
RTK_DEVICE C quotient(C a, C b) {
    return b == 0 ? 0 : b == -1 ? minus<C>(0, a) : a / b;
}
template <typename C>
RTK_DEVICE C modulus(C a, C b) {
    return b == 0 || b == -1 ? 0 : a % b;
}

template <typename C>
RTK_DEVICE bool is_nan(C a) {
    return a != a;
}

// NaN if there is one. The larger of two zeros is the positive one, the smaller the negative one.
template <typename C>
RTK_DEVICE C larger(C a, C b) {
    if constexpr (kIsFloat<C>) return ptx::max_nan(a, b);
    else return a > b ? a : b;
}
template <typename C>
RTK_DEVICE C smaller(C a, C b) {
    if constexpr (kIsFloat<C>) return -ptx::max_nan(-a, -b);
    else return a < b ? a : b;
}

RTK_DEVICE float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

// Rounds to T after each step, as a chain of torch ops does.
template <typename T, typename C>
RTK_DEVICE C step(C x) {
    if constexpr (kIsFloat<C> && sizeof(T) == 2) return round_to<T>(x);
    else return x;
}

#define RTK_UNPACKED(...) __VA_ARGS__
#define RTK_FUNCTOR(NAME, INPUTS, OPERANDS, EXPRESSION)                                  \
    struct NAME {                                                                        \
        static constexpr int kInputs = INPUTS, kOwnType = 0;                             \
        template <typename T, typename C>                                                \
        RTK_DEVICE static auto apply(RTK_UNPACKED OPERANDS, const Scalars<T>& s) {       \
            return EXPRESSION;                                                           \
        }                                                                                \
    };
#define RTK_UNARY(NAME, EXPRESSION) RTK_FUNCTOR(NAME, 1, (C a), EXPRESSION)
#define RTK_BINARY(NAME, EXPRESSION) RTK_FUNCTOR(NAME, 2, (C a, C b), EXPRESSION)
#define RTK_TERNARY(NAME, EXPRESSION) RTK_FUNCTOR(NAME, 3, (C a, C b, C d), EXPRESSION)

// ---- copies -----------------------------------------------------------------------------------------------------

struct Copy {
    static constexpr int kInputs = 1, kOwnType = 1;
    template <typename T, typename C>
    RTK_DEVICE static C apply(C a, const Scalars<T>&) {
        return a;
    }
};
struct Fill {
    static constexpr int kInputs = 0, kOwnType = 0;
    template <typename T>
    RTK_DEVICE static auto apply(const Scalars<T>& s) {
        return s.s0;
    }
};
struct Where {
    static constexpr int kInputs = 3, kOwnType = 1;
    template <typename T, typename C>
    RTK_DEVICE static C apply(i32 a, C b, C d, const Scalars<T>&) {
        return a != 0 ? b : d;
    }
};
struct MaskedFill {
    static constexpr int kInputs = 3, kOwnType = 2;
    template <typename T, typename C>
    RTK_DEVICE static C apply(C a, i32 b, C d, const Scalars<T>&) {
        return b != 0 ? d : a;
    }
};

struct DropoutBackward {
    static constexpr int kInputs = 2, kOwnType = 2;
    template <typename T, typename C>
    RTK_DEVICE static C apply(C a, i32 b, const Scalars<T>& s) {
        return a * (b != 0 ? 1.0f : 0.0f) * s.s0;  // dropped infinities and NaN give NaN
    }
};

// ---- unary ------------------------------------------------------------------------------------------------------

template <typename C>
RTK_DEVICE C absolute(C a) {
    if constexpr (kIsFloat<C>) return fabsf(a);
    else return a < 0 ? minus<C>(0, a) : a;
}

RTK_UNARY(Abs, absolute(a))
RTK_UNARY(Neg, kIsFloat<C> ? -a : minus<C>(0, a))
RTK_UNARY(Atan, atanf(a))
RTK_UNARY(Ceil, ceilf(a))
RTK_UNARY(Cos, cosf(a))
RTK_UNARY(Erf, erff(a))
RTK_UNARY(Exp, expf(a))
RTK_UNARY(Exp2, exp2f(a))
RTK_UNARY(Expm1, expm1f(a))
RTK_UNARY(Floor, floorf(a))
RTK_UNARY(Log, logf(a))
RTK_UNARY(Log10, log10f(a))
RTK_UNARY(Log1p, log1pf(a))
RTK_UNARY(Log2, log2f(a))
RTK_UNARY(Reciprocal, 1.0f / a)
RTK_UNARY(Round, rintf(a))
RTK_UNARY(Rsqrt, rsqrtf(a))
RTK_UNARY(Sin, sinf(a))
RTK_UNARY(Sqrt, sqrtf(a))
RTK_UNARY(Tanh, tanhf(a))
RTK_UNARY(Trunc, truncf(a))
RTK_UNARY(Relu, is_nan(a) || a > C(0) ? a : C(0))
RTK_UNARY(Sigmoid, logistic(a))
RTK_UNARY(Silu, a / (1.0f + expf(-a)))
RTK_UNARY(LogSigmoid, (a < 0.0f ? a : 0.0f) - log1pf(expf(-fabsf(a))))
RTK_UNARY(LogicalNot, a == C(0))
RTK_UNARY(IsNan, is_nan(a))
RTK_UNARY(IsInf, kIsFloat<C> ? absolute(a) == static_cast<C>(__uint_as_float(0x7f800000u)) : false)
RTK_UNARY(IsFinite, kIsFloat<C> ? absolute(a) < static_cast<C>(__uint_as_float(0x7f800000u)) : true)
RTK_UNARY(Angle, is_nan(a) ? a : a < 0.0f ? 3.14159265358979f : 0.0f)
RTK_UNARY(Square, times<C>(a, a))
RTK_UNARY(Cube, times<C>(step<T>(times<C>(a, a)), a))
RTK_UNARY(InverseSquare, 1.0f / step<T>(a * a))

struct BitwiseNot {
    static constexpr int kInputs = 1, kOwnType = 0;
    template <typename T, typename C>
    RTK_DEVICE static C apply(C a, const Scalars<T>&) {
        return is_same<T, bool>::value ? C(a == 0) : static_cast<C>(~a);
    }
};

// s0 for NaN, s1 for the positive infinity, s2 for the negative one.
RTK_UNARY(NanToNum, is_nan(a) ? s.s0 : a == __uint_as_float(0x7f800000u) ? s.s1 : a == __uint_as_float(0xff800000u) ? s.s2 : a)
RTK_UNARY(Gelu, 0.5f * a * (1.0f + erff(a * 0.70710678118654752f)))
RTK_DEVICE float gelu_tanh_inner(float a) { return 0.79788456080286536f * (a + 0.044715f * a * a * a); }
RTK_UNARY(GeluTanh, 0.5f * a * (1.0f + tanhf(gelu_tanh_inner(a))))
// s0 alpha * scale, s1 scale, s2 input_scale.
RTK_UNARY(Elu, a > 0.0f ? a * s.s1 : expm1f(a * s.s2) * s.s0)
// s0 beta, s1 threshold.
RTK_UNARY(Softplus, a * s.s0 > s.s1 ? a : log1pf(expf(a * s.s0)) / s.s0)
// s0 threshold, s1 value.
RTK_UNARY(Threshold, a <= s.s0 ? s.s1 : a)
// An index that counts from the end if it is negative; s0 elements.
RTK_UNARY(FromEnd, a < static_cast<C>(0) ? plus<C>(a, s.s0) : a)
// s0 exponent.
RTK_UNARY(PowNumber, powf(a, s.s0))

// ---- binary -----------------------------------------------------------------------------------------------------

RTK_BINARY(Add, plus<C>(a, times<C>(b, s.s0)))
RTK_BINARY(Sub, minus<C>(a, times<C>(b, s.s0)))
RTK_BINARY(Mul, times<C>(a, b))
RTK_BINARY(Div, a / b)

// With torch's intermediate roundings to T, which decide what is truncated.
template <typename T>
RTK_DEVICE float floor_quotient(float a, float b) {
    if (b == 0.0f) return a / b;
    const float remainder = fmodf(a, b);
    float result = step<T>(step<T>(a - remainder) / b);
    if (remainder != 0.0f && (b < 0.0f) != (remainder < 0.0f)) result = step<T>(result - 1.0f);
    if (result == 0.0f) return copysignf(0.0f, a / b);
    const float below = floorf(result);
    return result - below > 0.5f ? below + 1.0f : below;
}
template <typename T, typename C>
RTK_DEVICE C floor_quotient(C a, C b) {
    const C result = quotient(a, b);
    return modulus(a, b) != 0 && (a < 0) != (b < 0) ? result - 1 : result;
}
RTK_BINARY(DivFloor, floor_quotient<T>(a, b))
// torch divides by a number by multiplying with its reciprocal; `b` of MulTrunc is the reciprocal.
RTK_DEVICE float floor_quotient_by(float a, float b) {
    const float remainder = fmodf(a, b), inverse = 1.0f / b;
    if (b == 0.0f) return a * inverse;
    float result = (a - remainder) * inverse;
    if (remainder != 0.0f && (b < 0.0f) != (remainder < 0.0f)) result -= 1.0f;
    if (result == 0.0f) return copysignf(0.0f, a * inverse);
    const float below = floorf(result);
    return result - below > 0.5f ? below + 1.0f : below;
}
RTK_BINARY(DivFloorBy, floor_quotient_by(a, b))
RTK_BINARY(MulTrunc, truncf(a * b))

template <typename T, typename C>
RTK_DEVICE C trunc_quotient(C a, C b) {
    if constexpr (kIsFloat<C>) return truncf(step<T>(a / b));
    else return quotient(a, b);
}
RTK_BINARY(DivTrunc, trunc_quotient<T>(a, b))

template <typename C>
RTK_DEVICE C remainder_of(C a, C b) {
    C rest;
    if constexpr (kIsFloat<C>) rest = fmodf(a, b);
    else rest = modulus(a, b);
    return rest != C(0) && (rest < C(0)) != (b < C(0)) ? plus<C>(rest, b) : rest;
}
RTK_BINARY(Remainder, remainder_of(a, b))

template <typename C>
RTK_DEVICE C fmod_of(C a, C b) {
    if constexpr (kIsFloat<C>) return fmodf(a, b);
    else return modulus(a, b);
}
RTK_BINARY(Fmod, fmod_of(a, b))

template <typename C>
RTK_DEVICE C power(C a, C b) {
    if constexpr (kIsFloat<C>) {
        return powf(a, b);
    } else {
        if (b < 0) return a == 1 ? C(1) : a == -1 ? (b & 1 ? C(-1) : C(1)) : C(0);
        C result = 1;
        for (C left = b, base = a; left > 0; left >>= 1, base = times<C>(base, base))
            if (left & 1) result = times<C>(result, base);
        return result;
    }
}
RTK_BINARY(Pow, power(a, b))
RTK_BINARY(Maximum, larger(a, b))
RTK_BINARY(Minimum, smaller(a, b))
RTK_BINARY(Eq, a == b)
RTK_BINARY(Ne, a != b)
RTK_BINARY(Lt, a < b)
RTK_BINARY(Le, a <= b)
RTK_BINARY(Gt, a > b)
RTK_BINARY(Ge, a >= b)
RTK_BINARY(LogicalAnd, (a != C(0)) & (b != C(0)))
RTK_BINARY(LogicalOr, (a != C(0)) | (b != C(0)))
RTK_BINARY(LogicalXor, (a != C(0)) != (b != C(0)))
RTK_BINARY(BitwiseAnd, a & b)
RTK_BINARY(BitwiseOr, a | b)
RTK_BINARY(BitwiseXor, a ^ b)

// Shifts by more than the width give 0 to the left, copies of the sign to the right.
struct ShiftLeft {
    static constexpr int kInputs = 2, kOwnType = 0;
    template <typename T, typename C>
    RTK_DEVICE static C apply(C a, C b, const Scalars<T>&) {
        return b < 0 || b >= static_cast<C>(8 * sizeof(T)) ? C(0) : static_cast<C>(static_cast<u64>(a) << b);
    }
};
struct ShiftRight {
    static constexpr int kInputs = 2, kOwnType = 0;
    template <typename T, typename C>
    RTK_DEVICE static C apply(C a, C b, const Scalars<T>&) {
        return b < 0 || b >= static_cast<C>(8 * sizeof(T)) ? (a < 0 ? C(-1) : C(0)) : static_cast<C>(a >> b);
    }
};

// A complex number of its magnitude and angle: both floats in 64 bits, the real part in the lower ones.
struct Polar {
    static constexpr int kInputs = 2, kOwnType = 0;
    template <typename T>
    RTK_DEVICE static i64 apply(float a, float b, const Scalars<T>&) {
        const u32 real = __float_as_uint(a * cosf(b)), imaginary = __float_as_uint(a * sinf(b));
        return static_cast<i64>(static_cast<u64>(imaginary) << 32 | real);
    }
};

// s0 rtol, s1 atol, s2 equal_nan; both tolerances zero: equality. Each step is rounded as torch's chain of ops rounds it.
struct IsClose {
    static constexpr int kInputs = 2, kOwnType = 0;
    template <typename T>
    RTK_DEVICE static bool apply(float a, float b, const Scalars<T>& s) {
        if (a == b || (s.s2 != 0.0f && is_nan(a) && is_nan(b))) return true;
        if (s.s0 == 0.0f && s.s1 == 0.0f) return false;
        const float allowed = step<T>(s.s1 + fabsf(step<T>(s.s0 * b))), actual = fabsf(step<T>(a - b));
        return actual < __uint_as_float(0x7f800000u) && actual <= allowed;
    }
};

RTK_DEVICE float lerp_of(float a, float b, float weight) {
    const float way = b - a;
    return fabsf(weight) < 0.5f ? a + weight * way : b - way * (1.0f - weight);
}
RTK_BINARY(LerpNumber, lerp_of(a, b, s.s0))

// ---- gradients --------------------------------------------------------------------------------------------------

RTK_BINARY(SigmoidBackward, a * (1.0f - b) * b)
RTK_BINARY(TanhBackward, a * (1.0f - b * b))
RTK_DEVICE float silu_slope(float x) {
    const float gate = logistic(x);
    return gate * (1.0f + x * (1.0f - gate));
}
RTK_BINARY(SiluBackward, a * silu_slope(b))
RTK_DEVICE float gelu_slope(float x) {
    return 0.5f * (1.0f + erff(x * 0.70710678118654752f)) + x * 0.3989422804014327f * expf(-0.5f * x * x);
}
RTK_BINARY(GeluBackward, a * gelu_slope(b))
RTK_DEVICE float gelu_tanh_slope(float x) {
    const float square = x * x, bent = tanhf(0.79788456080286536f * (x + 0.044715f * (square * x)));
    const float inner = 0.79788456080286536f * (1.0f + 3.0f * 0.044715f * square);
    return 0.5f * (1.0f + bent) + 0.5f * x * (1.0f - bent * bent) * inner;
}
RTK_BINARY(GeluTanhBackward, a * gelu_tanh_slope(b))
// s0 negative coefficient, s1 positive one, s2 input_scale; b is the input, or the result.
RTK_BINARY(EluBackward, b <= 0.0f ? a * s.s2 * s.s0 * expf(b * s.s2) : a * s.s1)
RTK_BINARY(EluBackwardResult, b <= 0.0f ? a * s.s2 * (b + s.s0) : a * s.s1)
RTK_DEVICE float softplus_gradient(float g, float scaled, float threshold) {
    const float e = expf(scaled);
    return scaled > threshold ? g : g * e / (e + 1.0f);
}
RTK_BINARY(SoftplusBackward, softplus_gradient(a, b * s.s0, s.s1))
RTK_BINARY(ThresholdBackward, b <= s.s0 ? C(0) : a)
RTK_DEVICE float log_sigmoid_slope(float x) {
    const float e = expf(-fabsf(x)), rest = e * ptx::rcp(1.0f + e);  // a division would spill because of its slow path
    return x < 0.0f ? 1.0f - rest : rest;
}
RTK_BINARY(LogSigmoidBackward, a * log_sigmoid_slope(b))
RTK_BINARY(Glu, a * logistic(b))
RTK_BINARY(GluBackwardFirst, a * logistic(b))
// Gradient of the gate x, for an incoming gradient g and the other half a.
RTK_DEVICE float glu_gate_gradient(float g, float a, float gate) { return (1.0f - gate) * gate * g * a; }
RTK_TERNARY(MseLossBackward, s.s0 * (b - d) * a)
RTK_TERNARY(GluBackwardSecond, glu_gate_gradient(a, b, logistic(d)))

// ---- ternary ----------------------------------------------------------------------------------------------------

RTK_TERNARY(Lerp, lerp_of(a, b, d))
RTK_TERNARY(Addcmul, plus<C>(a, times<C>(s.s0, times<C>(b, d))))
RTK_TERNARY(Addcdiv, a + s.s0 * (b / d))
RTK_TERNARY(Clamp, is_nan(a) ? a : smaller(larger(a, b), d))
// s0 beta, s1 alpha; without beta, a is ignored.
RTK_TERNARY(Addr, plus<C>(s.s0 == C(0) ? C(0) : step<T>(times<C>(s.s0, a)),
                          step<T>(times<C>(s.s1, step<T>(times<C>(b, d))))))

}  // namespace rtk
