"""The end of a greedy decoding step in one launch: the largest logit, stop tokens, and the numbers of the next step."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import FLOAT_DTYPES, WIDTH, vector_bytes
from rtkernels.runtime.operator.declared import Dense, InPlaceExact, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_BLOCKS = 8  # of a cluster, which share a row
_THREADS = 512
_KERNEL = Kernel(
    "reduce/step_token.cu", "step_token", template="T N", max_registers=80, tier="serve",
    args="logits:ptr stop:ptr rings:ptr token:ptr position:ptr length:ptr active:ptr columns:ptr result:ptr places:ptr "
    "vocabulary:i64 row_stride:i64 stops:i64 pad:i64 batch:i64 windows:i64",
    variants=[(t, n) for t, width in WIDTH.items() for n in (1, width)],
)  # fmt: skip


def _check(logits, stop, rings, token, position, length, active, columns, result, places) -> None:
    if logits.dim() != 2 or not 0 < logits.shape[1] < 2**31:
        raise ArgumentError(f"logits has shape {tuple(logits.shape)}; expected [batch, vocabulary]")
    batch, windows = logits.shape[0], rings.shape[0] if rings.dim() == 1 else -1
    wanted = {
        "rings": (rings, torch.int64, (windows,)), "token": (token, torch.int64, (batch,)),
        "position": (position, torch.int64, (batch,)), "length": (length, torch.int32, (batch,)),
        "active": (active, torch.bool, (batch,)), "columns": (columns, torch.int64, ()),
        "result": (result, torch.int64, (2 * batch + 1,)), "places": (places, torch.int32, (windows, 2, batch)),
    }  # fmt: skip
    for name, (meta, dtype, shape) in wanted.items():
        if meta.dtype != dtype or tuple(meta.shape) != shape:
            raise ArgumentError(f"{name} is {meta.dtype} {tuple(meta.shape)}; expected {dtype} {shape}")
    if stop is not None and (stop.dtype != torch.int64 or stop.dim() != 1):
        raise ArgumentError(f"stop is {stop.dtype} {tuple(stop.shape)}; expected int64 with one dimension")


def _plan(logits: Meta, stop, rings, pad, device) -> Steps:
    batch, vocabulary = logits.shape
    size = logits.dtype.itemsize
    stride = logits.row_stride if batch > 1 else vocabulary
    aligned16 = vector_bytes(logits.misaligned, vocabulary * size, stride * size) == 16
    blocks = _BLOCKS if "cluster" in device_info(device).target.features else 1
    launch = _KERNEL.bind(
        (logits.token, 16 // size if aligned16 else 1), device, (blocks, batch), _THREADS, overlap=True, cluster=blocks
    )
    names = ("logits", "stop", "rings", "token", "position", "length", "active", "columns", "result", "places")
    numbers = (vocabulary, stride, 0 if stop is None else stop.shape[0], pad, batch, rings.shape[0])
    return Steps(Step(launch, *names, *numbers))


def _reference(logits, stop, rings, token, position, length, active, columns, result, places, pad) -> None:
    batch = logits.shape[0]
    tokens = logits.argmax(-1)
    if stop is not None and stop.numel():
        tokens = torch.where(active, tokens, pad)
        active.logical_and_((tokens[:, None] != stop).all(-1))
    token.copy_(tokens)
    result[:batch] = tokens
    result[batch : 2 * batch] = active
    position.add_(1)
    length.add_(1)
    columns.add_(1)
    ring = rings.view(-1, 1)
    places[:, 0] = torch.where(ring == 0, length, length % ring.clamp(min=1)).int()
    places[:, 1] = torch.where(ring == 0, length + 1, torch.minimum(length + 1, ring)).int()


FORWARD = Operator(
    "step_token",
    (
        Rows("logits", FLOAT_DTYPES), Dense("stop", None, optional=True), Dense("rings", None),
        InPlaceExact("token", None), InPlaceExact("position", None), InPlaceExact("length", None),
        InPlaceExact("active", None), InPlaceExact("columns", None), InPlaceExact("result", None),
        InPlaceExact("places", None),
    ),
    options="int pad", results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip

OP = Op("step_token", public=(), kernels=(_KERNEL,), torch_ops=(FORWARD,))
