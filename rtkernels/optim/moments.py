"""How ``AdamW`` keeps its moments: fp32, 8-bit codes as bitsandbytes has them, or fp8 as TorchAO has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes
from rtkernels.ops.multi.dynamic_codes import fill_memory, in_memory
from rtkernels.runtime.launch.tables import same_order
from rtkernels.runtime.operator.sharding import is_sharded, local

KINDS = ("fp32", "8bit", "fp8")
MIN_CODED = 4096  # elements; smaller tensors keep fp32 moments, as in bitsandbytes
_CODES = {"8bit": torch.uint8, "fp8": torch.float8_e4m3fn}
# Names of the two moments and of their scales in the state of a parameter.
NAMES = {"fp32": ("exp_avg", "exp_avg_sq"), "8bit": ("state1", "state2"), "fp8": ("exp_avg", "exp_avg_sq")}
SCALES = {"8bit": ("absmax1", "absmax2"), "fp8": ("exp_avg_scale", "exp_avg_sq_scale")}
_MAPS = ("qmap1", "qmap2")


def is_coded(p: Tensor, kind: str) -> bool:
    """Return whether the moments of a parameter are codes."""
    return kind != "fp32" and p.numel() >= MIN_CODED


def start(p: Tensor, kind: str) -> dict[str, Tensor]:
    """Return moments of 0."""
    coded = is_coded(p, kind)
    dtype = _CODES[kind] if coded else torch.float32
    state = {name: _zeros(p, dtype) for name in NAMES[kind]}
    if coded:
        count = dynamic_codes.blocks_of(_own(p).numel())
        state |= {name: torch.zeros(count, dtype=torch.float32, device=p.device) for name in SCALES[kind]}
        if kind == "8bit":
            maps = (dynamic_codes.dynamic_map(signed).to(p.device) for signed in (True, False))
            state |= dict(zip(_MAPS, maps, strict=True))
    return state


def _own(t: Tensor) -> Tensor:
    return local(t) if is_sharded(t) else t


def _zeros(p: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros_like(p, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)  # fp8 has no fill of its own
    if dtype != torch.float8_e4m3fn:
        return zeros
    return zeros.view(dtype)


def loaded(p: Tensor, given: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """Return the moments of a state dict (ours, torch's, bitsandbytes' or TorchAO's) as `kind` keeps them."""
    names = NAMES["8bit"] if "state1" in given else NAMES["fp32"]
    values = [given.get(name) for name in names]
    if any(value is None for value in values):
        raise ArgumentError(f"the state of a parameter has {', '.join(given)}; expected two moments")
    scales: list[Tensor | None] = [None, None]
    for pair in SCALES.values():
        if pair[0] in given:
            scales = [given[name] for name in pair]
    for i, value in enumerate(values):
        if hasattr(value, "codes") and hasattr(value, "scale"):  # a state of TorchAO
            values[i], scales[i] = value.codes.reshape(value.shape), value.scale
    for name, signed in zip(_MAPS, (True, False), strict=True):
        own = dynamic_codes.dynamic_map(signed)
        if name in given and not torch.allclose(given[name].float().cpu(), own, atol=1e-6):
            raise ArgumentError(f"{name} of a state dict is another map than that of {len(own)} dynamic codes")
    state = start(p, kind)
    for i, (name, signed) in enumerate(zip(NAMES[kind], (True, False), strict=True)):
        value, scale, to = _own(values[i]).to(p.device), scales[i], _own(state[name])
        value = value if value.shape == to.shape else value.reshape(to.shape)
        if is_coded(p, kind) and value.dtype == to.dtype and scale is not None and same_order(value, to):
            _raw(to).copy_(_raw(value))
            state[SCALES[kind][i]].copy_(scale.reshape(-1))
            continue
        if scale is not None:
            scale = scale.to(p.device).reshape(-1).float()
            full = torch.empty_like(value, dtype=torch.float32)
            fill_memory(full, dynamic_codes.decode(in_memory(value), scale, signed))
            value = full
        if is_coded(p, kind):
            ordered = torch.empty_like(to, dtype=torch.float32).copy_(value)
            codes, scale = dynamic_codes.encode(in_memory(ordered), kind, signed)
            fill_memory(_raw(to), _raw(codes))
            state[SCALES[kind][i]].copy_(scale)
        else:
            to.copy_(value)
    return state


def _raw(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def origin(p: Any, index: int) -> Tensor:
    """Return which random numbers a parameter gets, and the place of its first element in the whole tensor."""
    first = 0
    if is_sharded(p):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        for size, at in zip(p.shape, offset, strict=True):
            first = first * size + at
    return torch.tensor([index, first], dtype=torch.int64, device=p.device)
