"""``nn.QuantizedLinear`` layers of a model: several as one matrix of codes, for prompts and for decoding steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtkernels.models import replace
from rtkernels.models.merged import adjacent, is_watched
from rtkernels.nn.quantized_linear import QuantizedLinear
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.runtime.torch_private import is_dynamo_compiling

_PACKED = {"int4": "int4", "nvfp4": "e2m1"}  # as products call codes, two of which are in a byte
_FLOAT8 = torch.float8_e4m3fn


class Codes(NamedTuple):
    """The codes of layers as one matrix, as :func:`rtkernels.decode_linear` takes them."""

    weight: Tensor
    scale: Tensor
    global_scale: Tensor | None
    packed: str | None


def _are_alike(linears: Sequence[nn.Module]) -> bool:
    first = linears[0]
    return all(
        replace.original_of(type(m)) is QuantizedLinear
        and (m.weights, m.group, m.activations, m.backend) == (first.weights, first.group, None, first.backend)
        and (m.in_features, m.weight.device) == (first.in_features, first.weight.device)
        for m in linears
    )


def codes_of(linears: Sequence[nn.Module]) -> Codes | str:
    """Return the codes of layers without activations of their own as one matrix, or why they are none."""
    if not _are_alike(linears):
        return "its projections have weights of different formats, or quantise activations"
    first = linears[0]
    weight = adjacent([m.weight for m in linears])
    scale = adjacent([m.scale if m.scale.dim() == 2 else m.scale.unsqueeze(1) for m in linears])
    if weight is None or scale is None:
        return "codes or scales of its projections are not adjacent in memory"
    whole = first.global_scale
    if whole is not None and any(m.global_scale.data_ptr() != whole.data_ptr() for m in linears):
        return "its projections have different global scales"
    if first.weights == "fp8":
        weight = weight.view(_FLOAT8)
    elif first.weights == "nvfp4":
        scale = scale.view(_FLOAT8)
    return Codes(weight, scale if first.group else scale.squeeze(1), whole, _PACKED.get(first.weights))


def make_adjacent(linears: Sequence[nn.Module]) -> None:
    """Move the codes of layers that read the same tensor into one block of memory, and their scales into another.

    Global scales that are equal become one number in memory.
    """
    if not _are_alike(linears) or linears[0].weight.device.type == "meta":
        return
    for name in ("weight", "scale"):
        parts, start = [getattr(m, name) for m in linears], 0
        block = torch.cat([part.detach() for part in parts])
        for part in parts:
            part.data = block[start : start + part.shape[0]]
            start += part.shape[0]
    first, *others = [m.global_scale for m in linears]
    if first is not None and all(torch.equal(first, other) for other in others):
        for other in others:
            other.data = first.data


def merged(x: Any, linears: Sequence[nn.Module]) -> Tensor | None:
    """Return the results of layers as columns of one tensor, None if the layers must be called separately."""
    if type(linears[0]) is not QuantizedLinear or is_dynamo_compiling() or any(map(is_watched, linears)):
        return None
    if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    codes, biases = codes_of(linears), [m.bias for m in linears if m.bias is not None]
    if isinstance(codes, str) or len(biases) not in (0, len(linears)):
        return None
    recipe = "nvfp4" if codes.scale.dtype == _FLOAT8 else "row" if codes.scale.dim() == 1 else "auto"
    packed = None if codes.packed is None else (None, codes.packed)
    return scaled_mm(
        x, codes.weight, None, codes.scale, recipe=recipe, global_scale=codes.global_scale, packed=packed,
        bias=torch.cat(biases) if biases else None, backend=linears[0].backend,
    )  # fmt: skip
