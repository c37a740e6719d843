"""Random numbers and dropout by Philox 4x32-10.

The seed is one int64 that torch's generator draws on the device, so that ``torch.manual_seed``, an explicit generator
and captured graphs work as they do with torch; numbers differ from torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.primitive import Primitive
from rtkernels.ops.shared.strided import FLOATS
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

KINDS = {"uniform": 0, "normal": 1, "exponential": 2, "bernoulli": 3}  # cuda_src/random/random.cu
_THREADS = 256
_TYPES = [(t,) for t in ("bf16", "fp16", "fp32")]
_FILL = Kernel(
    "random/random.cu", "random_fill", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args="out:ptr seed:ptr n:i64 kind:i64 a:f64 b:f64 aligned:i64",
)  # fmt: skip
_DROPOUT = Kernel(
    "random/random.cu", "random_dropout", template="T", variants=_TYPES, max_registers=48, tier="aten",
    args="x:ptr y:ptr mask:ptr seed:ptr n:i64 keep:f64 scale:f64 aligned:i64",
)  # fmt: skip


def is_packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if elements fill their memory without gaps or overlap, in any order of dimensions."""
    expected = 1
    for size, step in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n != 1), key=lambda d: d[1]):
        if step != expected:
            return False
        expected *= size
    return True


def _grid(n: int, device: int) -> int:
    return min(-(-n // (4 * _THREADS)), 16 * device_info(device).sm_count)


def _plan_fill(out: Meta, seed: Meta, kind: str, device: int) -> Steps:
    n = out.numel()
    launch = _FILL.bind((out.token,), device, _grid(n, device), _THREADS)
    aligned = out.misaligned % (4 * out.dtype.itemsize) == 0
    return Steps(Step(launch, "out", "seed", n, KINDS[kind], "a", "b", int(aligned)))


def _plan_dropout(x: Meta, seed: Meta, device: int) -> Steps:
    n = x.numel()
    launch = _DROPOUT.bind((x.token,), device, _grid(n, device), _THREADS)
    aligned = x.misaligned % (4 * x.dtype.itemsize) == 0
    return Steps(Step(launch, "x", "y", "mask", "seed", n, "keep", "scale", int(aligned)))


_DRAWN = Primitive(
    "random_fill", (InPlace("out", None), Dense("seed", None)), "kind, a, b", results="", plan=_plan_fill, numbers="a b"
)
_DROPPED = Primitive(
    "random_dropout", (Argument("x", None), Dense("seed", None)), "keep, scale", results="y mask", numbers="keep scale",
    outputs=lambda x, *_: (Memory(x.shape, x.dtype, tuple(x.stride)), Memory(x.shape, torch.bool, tuple(x.stride))),
    plan=_plan_dropout,
)  # fmt: skip


def drawn_seed(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return one int64 of torch's generator, on the device."""
    return torch.empty(1, dtype=torch.int64, device=like.device).random_(generator=generator)


def fill(out: Tensor, kind: str, a: float, b: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill a tensor with random numbers, computed in fp32.

    Args:
        out: bfloat16, float16 or float32; its memory without gaps (``is_packed``); not empty.
        kind: "uniform" over [a, b), "normal" of mean a and deviation b, "exponential" of rate a, "bernoulli": 1 with
            probability a.
        a: See `kind`.
        b: See `kind`.
        generator: Where the seed comes from; None: the device's own.

    Returns:
        out.
    """
    _DRAWN(out, drawn_seed(out, generator), kind, float(a), float(b))
    return out


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return x with elements zeroed with probability p and the others times 1 / (1 - p), and the mask of those kept.

    Args:
        x: bfloat16, float16 or float32; its memory without gaps; not empty.
        p: 0 to 1.

    Returns:
        Both of x's strides; the mask is bool.
    """
    return _DROPPED(x, drawn_seed(x), 1.0 - p, 0.0 if p == 1 else 1.0 / (1.0 - p))


OP = Op("philox", public=(), kernels=(_FILL, _DROPOUT), torch_ops=())
__all__ = ["FLOATS", "OP", "dropout", "fill", "is_packed"]
