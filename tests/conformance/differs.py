"""What differs from torch on purpose, or between torch's kernels for the CPU and for CUDA, by overload; the lines for
users are a table in ``docs/operators.md``.
"""

from __future__ import annotations

# ---- on purpose -----------------------------------------------------------------------------------------------------

# Random numbers differ from torch's.
RANDOM = frozenset({
    "uniform_", "normal_", "exponential_", "bernoulli_.float", "rand", "randn", "rand_like", "randn_like", "randperm",
    "native_dropout", "normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor",
})  # fmt: skip
# Integers divided by zero: undefined in torch on CUDA, 0 here; the CPU raises.
DIVIDES = frozenset({"div", "floor_divide", "remainder", "fmod"})
# Version counters: torch's `isclose` is a chain that writes to its own result; factories count one if they are called
# as `torch.ops.aten.rand`, none as `torch.rand`.
VERSIONS = frozenset({"isclose", "rand", "randn", "randperm"})
# Statistics of rows with infinities are infinite or NaN, by the order of additions.
STATISTICS = frozenset({
    "native_layer_norm", "native_group_norm", "native_batch_norm", "var_mean.correction", "std_mean.correction",
})  # fmt: skip
# Which of equal elements comes first: torch promises it with stable=True alone (short rows are sorted by a network).
# Elements are compared, and indices must name them, each once.
TIES = frozenset({"topk", "sort"})
# The sign of a zero that a sum, an extreme or a product of many elements gives depends on their order.
SIGN_OF_ZERO: frozenset[str] = frozenset({"_unique2"})  # which of two zeros stands for both
# Large numbers: intermediate results overflow in one order of additions and not in another.
CALM = frozenset({
    "addcmul", "addcmul_", "addcmul.out", "addr", "prod", "prod.dim_int", "_softmax_backward_data",
    "_log_softmax_backward_data", "_weight_norm_interface", "_weight_norm_interface_backward", "native_group_norm",
    "native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward", "native_layer_norm_backward",
    "cumsum",  # torch's scan rounds every partial sum
    "nll_loss2d_forward",  # and so do its sums in float16
    "tanh_backward",  # and 1 - y^2
    "mse_loss_backward",  # and the difference of two large numbers in float16
})  # fmt: skip
# Without a reduction torch's CUDA kernels leave the total weight as it was allocated; ours is 0.
TOTAL_WEIGHT = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
# Infinities: torch's kernels differ among each other, by the length of a row.
PLAIN = frozenset({
    "_fused_rms_norm", "_fused_rms_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
})  # fmt: skip

# ---- tolerances -----------------------------------------------------------------------------------------------------

# Operators whose result may be much smaller than their operands.
CANCELS = frozenset(
    "add sub rsub lerp addcmul addcdiv addr mse_loss_backward native_layer_norm_backward native_group_norm_backward "
    "native_batch_norm_backward _fused_rms_norm_backward _weight_norm_interface_backward _softmax_backward_data "
    "tanh_backward".split()
)
LOOSER: dict[str, float] = {}

# ---- torch's CPU kernels, beside which the emulator is compared -----------------------------------------------------

# They multiply in another order than the CUDA kernels; ours follow the latter.
CALM_ON_THE_CPU = frozenset({
    "addcmul", "addcmul_", "addcmul.out", "addr", "gelu", "gelu_", "gelu.out",
    "native_layer_norm_backward", "native_group_norm_backward",
    "std.correction", "std_mean.correction", "var.correction", "var_mean.correction",  # there they sum in float64
})  # fmt: skip
# They blend both branches, one of which may be NaN.
PLAIN_ON_THE_CPU = frozenset({"elu_backward"})
# They approximate the error function.
ROUGH_ON_THE_CPU = frozenset({"erf", "erf_", "erf.out", "gelu", "gelu_", "gelu.out", "gelu_backward"})
# Of zeros of both signs CUDA's maximum is the positive one, its minimum the negative one; the CPU's depends on order.
SIGN_OF_ZERO_ON_THE_CPU = frozenset(
    f"{name}{form}" for name in ("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "elu", "celu", "gelu")
    for form in ("", ".out", "_", ".Tensor", "_.Tensor", ".Tensor_out")
)  # fmt: skip
# They wait for a number from the device, which a graph cannot.
NOT_CAPTURED = frozenset({
    "_unique2", "nonzero", "randperm", "masked_select", "repeat_interleave.Tensor", "allclose", "normal.Tensor_Tensor",
    "normal.float_Tensor",
})  # fmt: skip
