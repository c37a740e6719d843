"""Calls that a type checker must refuse, each on a line marked so. Nobody runs them."""

from __future__ import annotations

from torch import Tensor, ones

import rtkernels as rtk

x, w = ones(6, 256), ones(256)
flag = bool(x.numel())

y1: Tensor = rtk.rms_norm(x, w, residual=x)  # wrong
y2: Tensor = rtk.rms_norm(x, w, return_rstd=True)  # wrong
y3: Tensor = rtk.rms_norm(x, w, return_rstd=flag)  # wrong
y4: Tensor = rtk.rms_norm(x, w, quant="nvfp4")  # wrong
y5: tuple[Tensor, Tensor] = rtk.rms_norm(x, w)  # wrong
y6: Tensor = rtk.layer_norm(x, w, return_statistics=True)  # wrong
y7: Tensor = rtk.attention(x, x, x, return_lse=True)  # wrong
y8: tuple[Tensor, Tensor] = rtk.cross_entropy(x, w, return_lse=True, return_accuracy=True)  # wrong
y9: tuple[Tensor, Tensor] = rtk.quantize_fp8(x, layout="both")  # wrong
z1: Tensor = rtk.scaled_mm(x, x, quant_out="row")  # wrong
z2: Tensor = rtk.transpose([x, x])  # wrong
z3: Tensor = rtk.rope(x, x, x, k=x)  # wrong
z4: Tensor = rtk.glu(x, quant=rtk.Quant())  # wrong
rtk.glu(x, act="sillu")  # wrong
rtk.glu_fp8(x, act="gelu")  # wrong
rtk.scaled_mm(x, x, act="gelu_erf")  # wrong
rtk.scaled_mm(x, x, quant_out="1x32")  # wrong
rtk.attention(x, x, x, layout="bshd")  # wrong
rtk.cross_entropy(x, x, reduction="batchmean")  # wrong
rtk.quantize_fp8(x, granularity="token")  # wrong
rtk.rms_norm(x, w, quant="fp8")  # wrong
rtk.rms_norm(x, w, epsilon=1e-6)  # wrong
rtk.rms_norm("x", w)  # wrong
rtk.topk_router(x, 2, score="tanh")  # wrong
