"""Modules around the ops, in place of torch's: same constructors, same state dicts, one kernel each way.

None of them is changed by ``torch.autocast``: they compute in fp32 whatever the inputs are, and results have the dtype
of the input. Parameters may be of another dtype than the input (fp32 parameters with bfloat16 activations).
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
