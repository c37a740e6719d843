"""Modules that replace torch's: same constructors, same state dicts, one kernel each for forward and backward.

``torch.autocast`` does not affect them: they compute in fp32 for all input dtypes, and results have the input's dtype.
Parameters may have a different dtype than the input, such as fp32 parameters with bfloat16 activations.
"""

from rtkernels.nn.fp8_gather import gather_in_fp8
from rtkernels.nn.fp8_gradient import fp8_gradient, glu_with_fp8_gradient, unpermute_with_fp8_gradient
from rtkernels.nn.fp8_linear import Fp8HadamardLinear, Fp8Linear, Fp8SmoothLinear, fixed_weights
from rtkernels.nn.fp8_moe import Fp8GroupedLinear, Fp8MoE
from rtkernels.nn.glu import GeGLU, SwiGLU
from rtkernels.nn.grad_scaling import GradScaling
from rtkernels.nn.norm import LayerNorm, RMSNorm
from rtkernels.nn.quantized_linear import QuantizedLinear

__all__ = [
    "Fp8GroupedLinear",
    "Fp8HadamardLinear",
    "Fp8Linear",
    "Fp8MoE",
    "Fp8SmoothLinear",
    "GeGLU",
    "GradScaling",
    "LayerNorm",
    "QuantizedLinear",
    "RMSNorm",
    "SwiGLU",
    "fixed_weights",
    "fp8_gradient",
    "gather_in_fp8",
    "glu_with_fp8_gradient",
    "unpermute_with_fp8_gradient",
]
