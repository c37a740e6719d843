"""Arrays through the device's number conversions, for tests that try every input."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN

_UNIT, _ARGS = "probe/convert.cu", "x:ptr y:ptr n:i64"
_NARROW_TYPES = [("bf16",), ("fp16",), ("e4m3",), ("e5m2",)]
_NARROW = Kernel(_UNIT, "probe_narrow", template="T", args=_ARGS, variants=_NARROW_TYPES, max_registers=40)
_WIDEN = Kernel(_UNIT, "probe_widen", template="T", args=_ARGS, variants=_NARROW_TYPES, max_registers=40)
_ENCODE = Kernel(_UNIT, "probe_encode", template="F8", args=_ARGS, variants=[("e4m3",), ("e5m2",)], max_registers=40)
_DECODE = Kernel(_UNIT, "probe_decode", template="F8", args=_ARGS, variants=[("e4m3",)], max_registers=40)
KERNELS = (_NARROW, _WIDEN, _ENCODE, _DECODE)


def convert(x: Tensor, dtype: torch.dtype, *, software: bool = False) -> Tensor:
    """Return x converted by device code, on a GPU or in the host emulator.

    Args:
        x: Dense, not empty, 16-byte aligned; float32, or bfloat16, float16, float8_e4m3fn, float8_e5m2.
        dtype: One of the narrow types if x is float32, else float32.
        software: Use the integer version of an fp8 conversion (from or to e4m3, to e5m2) on every target, instead of
            the best way the target has.

    Raises:
        ArgumentError: There is no such conversion, or x is on the CPU and nothing emulates a GPU.
    """
    narrowing = x.dtype == torch.float32
    kernel = (_ENCODE if software else _NARROW) if narrowing else (_DECODE if software else _WIDEN)
    variant = (DTYPE_TOKEN.get(dtype if narrowing else x.dtype),)
    if variant not in kernel._variants or (not narrowing and dtype != torch.float32):
        raise ArgumentError(f"the probe has no {'software ' * software}conversion from {x.dtype} to {dtype}")
    per_block = 256 if software else 4 * 256
    grid = -(-x.numel() // per_block)

    def run() -> Tensor:
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        kernel.bind(variant, x.get_device(), grid, 256)(x.data_ptr(), y.data_ptr(), x.numel())
        return y

    if x.is_cuda:
        return run()
    features = emulator.active()
    if features is None:
        raise ArgumentError("the probe runs device code: pass a CUDA tensor, or call it inside rtkernels.emulate()")
    with emulator.lock:
        emulate_features(features)
        with emulator.recording():
            return run()
