"""The kernels of ``glu_fp8`` and ``glu_fp8_backward``."""

from __future__ import annotations

from itertools import product

import torch

from rtkernels.ops.shared.tile_stream import supported
from rtkernels.runtime.launch.device import shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.targets import Target

FAST_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}

_STREAM = "act/glu_fp8_stream.cu"
_FAST = "act/glu_fp8_double_buffered.cu"
_ANY = "act/glu_fp8_generic.cu"
_FAST_SPACE = 128 << 10  # of shared memory, for fast kernels to be worth while
_OUTPUTS = "q:ptr scale:ptr q_t:ptr scale_t:ptr"
_COMMON = "experts:i64 count_width:i64 row_blocks:i64 by_group:i64 pow2:i64 check:i64"


def _fast_variants(target: Target) -> list[tuple[str]]:
    # The kernel for everything needs less, and smaller GPUs are not what these are tuned for.
    return [(t,) for t in FAST_TYPES.values()] if shared_limit(target) >= _FAST_SPACE else []


def _stream_variants(target: Target) -> list[tuple[str, bool]]:
    return list(product(FAST_TYPES.values(), (False, True))) if supported(target) else []


FWD = Kernel(
    _FAST, "glu_fp8_fwd", template="T", max_registers=128,
    args=f"gate:ptr up:ptr weight:ptr counts:ptr {_OUTPUTS} rows:i64 cols:i64 gate_stride:i64 up_stride:i64 {_COMMON}",
    variants=_fast_variants,
)  # fmt: skip
BWD = Kernel(
    _FAST, "glu_fp8_bwd", template="T", max_registers=128,
    args=f"dy:ptr gate:ptr up:ptr weight:ptr counts:ptr {_OUTPUTS} dx:ptr partial:ptr rows:i64 cols:i64 dy_stride:i64 "
    f"gate_stride:i64 up_stride:i64 {_COMMON}",
    variants=_fast_variants,
)  # fmt: skip
FWD_STREAM = Kernel(
    _STREAM, "glu_fp8_fwd_stream", template="T EXPERTS", max_registers=96, needs=("tma",),
    args=f"gate:tmap up:tmap weight:ptr counts:ptr {_OUTPUTS} counter:ptr rows:i64 cols:i64 {_COMMON}",
    variants=_stream_variants,
)  # fmt: skip
BWD_STREAM = Kernel(
    _STREAM, "glu_fp8_bwd_stream", template="T EXPERTS", max_registers=96, needs=("tma",),
    args=f"dy:tmap gate:tmap up:tmap weight:ptr counts:ptr {_OUTPUTS} dx:ptr partial:ptr counter:ptr rows:i64 cols:i64 "
    f"{_COMMON}",
    variants=_stream_variants,
)  # fmt: skip
ANY = Kernel(
    _ANY, "glu_fp8_any", template="FP32 MIXED", max_registers=128,
    args=f"dy:ptr gate:ptr up:ptr weight:ptr counts:ptr {_OUTPUTS} dx:ptr partial:ptr factor:ptr max_abs:ptr rows:i64 "
    f"cols:i64 dy_stride:i64 gate_stride:i64 up_stride:i64 weight_type:i64 {_COMMON} act:i64 type:i64 words:i64 "
    "pad_to:i64",
    variants=list(product((False, True), (False, True))),
)  # fmt: skip
