"""The operators of ``quantize_fp8`` and ``dequantize_fp8``."""

from __future__ import annotations

from rtkernels.ops.quant import dequantize_fp8_plan as back
from rtkernels.ops.quant import quantize_fp8_plan as plans
from rtkernels.ops.quant import reference
from rtkernels.runtime.operator.declared import Argument, Dense, Operator, Rows
from rtkernels.runtime.operator.plan import Memory

_X, _OPTIONS = Rows("x", None), "str granularity, ScalarType dtype, bool pow2_scale, str scale_layout"
QUANTIZE = Operator(
    "quantize_fp8", (_X,), options=_OPTIONS, results="q scale", outputs=plans.outputs_quantize,
    plan=plans.plan_quantize, reference=reference.quantize, check=plans.check_quantize,
)  # fmt: skip
BOTH = Operator(
    "quantize_fp8_both", (_X,), options=_OPTIONS, results="q scale q_t scale_t", outputs=plans.outputs_both,
    plan=plans.plan_both, reference=reference.both, check=plans.check_both,
)  # fmt: skip
STATIC = Operator(
    "quantize_fp8_static", (_X, Argument("scale", None)), options="ScalarType dtype", results="q",
    outputs=lambda x, dtype: (Memory(x.shape, dtype),), plan=plans.plan_static, reference=reference.static,
    check=plans.check_static,
)  # fmt: skip
DEQUANTIZE = Operator(
    "dequantize_fp8", (Rows("q", None), Dense("scale", None)),
    options="str granularity, ScalarType code_dtype, ScalarType dtype, str scale_layout", results="y",
    outputs=back.outputs, plan=back.plan, reference=reference.dequantize, check=back.check_dequantize,
)  # fmt: skip
