"""Random numbers and dropout by Philox 4x32-10.

Seed and offset are those of torch's generator, which moves on; while a graph is captured, and in the emulator, the seed
is one int64 that the generator draws on the device. So ``torch.manual_seed``, an explicit generator and captured
graphs work as they do with torch; numbers differ from torch's.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import FLOATS
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import is_capturing
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

KINDS = {"uniform": 0, "normal": 1, "exponential": 2, "bernoulli": 3}  # cuda_src/random/random.cu
_THREADS = 256
_FILL = Kernel(
    "random/random.cu", "random_fill", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="out:ptr seed:ptr n:i64 kind:i64 a:f64 b:f64 aligned:i64 known_key:i64 offset:i64",
)  # fmt: skip
_DROPOUT = Kernel(
    "random/random.cu", "random_dropout", template="T", variants=TYPES, max_registers=48, tier="aten",
    args="x:ptr y:ptr mask:ptr seed:ptr n:i64 keep:f64 scale:f64 aligned:i64 known_key:i64 offset:i64",
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


def _plan_fill(out: Meta, seed: Meta | None, kind: str, device: int) -> Steps:
    n = out.numel()
    launch = _FILL.bind((out.token,), device, _grid(n, device), _THREADS)
    aligned = out.misaligned % (4 * out.dtype.itemsize) == 0
    return Steps(Step(launch, "out", "seed", n, KINDS[kind], "a", "b", int(aligned), "key", "offset"))


def _plan_dropout(x: Meta, seed: Meta | None, device: int) -> Steps:
    n = x.numel()
    launch = _DROPOUT.bind((x.token,), device, _grid(n, device), _THREADS)
    aligned = x.misaligned % (4 * x.dtype.itemsize) == 0
    return Steps(Step(launch, "x", "y", "mask", "seed", n, "keep", "scale", int(aligned), "key", "offset"))


_SEED = Dense("seed", None, optional=True)
_DRAWN = Primitive(
    "random_fill", (InPlace("out", None), _SEED), "kind, a, b, key, offset", results="", plan=_plan_fill,
    numbers="a b key offset",
)  # fmt: skip
_DROPPED = Primitive(
    "random_dropout", (Argument("x", None), _SEED), "keep, scale, key, offset", results="y mask",
    numbers="keep scale key offset", plan=_plan_dropout,
    outputs=lambda x: (Memory(x.shape, x.dtype, tuple(x.stride)), Memory(x.shape, torch.bool, tuple(x.stride))),
)  # fmt: skip
_OTHER_THAN_TORCHS = 0xD1B54A32D192ED03  # or torch's own kernels would draw some of the same words
_lock = threading.Lock()


def _state(like: Tensor, generator: torch.Generator | None) -> tuple[Tensor | None, int, int]:
    """Return a seed on the device, or None, a key and an offset."""
    if not like.is_cuda or is_capturing():
        return torch.empty(1, dtype=torch.int64, device=like.device).random_(generator=generator), 0, 0
    generator = generator or torch.cuda.default_generators[like.get_device()]
    with _lock:
        offset = generator.get_offset()
        generator.set_offset(offset + 4)  # in steps of torch's
    key = (generator.initial_seed() ^ _OTHER_THAN_TORCHS) & (2**64 - 1)
    return None, key - 2**64 if key >= 2**63 else key, offset


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
    seed, key, offset = _state(out, generator)
    _DRAWN(out, seed, kind, float(a), float(b), key, offset)
    return out


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return x with elements zeroed with probability p and the others times 1 / (1 - p), and the mask of those kept.

    Args:
        x: bfloat16, float16 or float32; its memory without gaps; not empty.
        p: 0 to 1.

    Returns:
        Both of x's strides; the mask is bool.
    """
    seed, key, offset = _state(x, None)
    return _DROPPED(x, seed, 1.0 - p, 0.0 if p == 1 else 1.0 / (1.0 - p), key, offset)


OP = Op("philox", public=(), kernels=(_FILL, _DROPOUT), torch_ops=())
__all__ = ["FLOATS", "OP", "dropout", "fill", "is_packed"]
