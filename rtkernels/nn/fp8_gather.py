"""Let FSDP2 gather codes: half the bytes of a 16-bit all-gather, and no 16-bit weights while a layer runs.

Each process quantises its rows of a weight in blocks of 128 x 128, and codes and scales are gathered. Shards consist of
whole blocks, so the codes are those of the gathered weight, and no maximum has to be exchanged. A layer gets the codes
of a gathered weight without computation; transposed codes cost a transposition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rtkernels.errors import ArgumentError
from rtkernels.nn.fp8_linear import KeepsCodes
from rtkernels.ops.gemm.fp8_operands import OPERAND, PITCH, SIDE
from rtkernels.ops.layout.transpose import TRANSPOSE
from rtkernels.ops.quant.quantize_fp8 import quantize_fp8
from rtkernels.runtime.layout import nothing

_aten = torch.ops.aten
# Operations of FSDP on a parameter while it shards it; their results are parts of the weight.
_PARTS = frozenset((
    _aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default, _aten.view.default,
    _aten.as_strided.default, _aten.split.Tensor, _aten.slice.Tensor, _aten.new_zeros.default,
    _aten.empty_like.default, _aten.copy_.default, _aten._pin_memory.default,
))  # fmt: skip


class GatheredCodes(torch.Tensor):
    """A whole weight ``[n, k]`` stored only as codes ``q`` and scales ``scale`` ``[n / 128, k / 128]``."""

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor, dtype: torch.dtype) -> GatheredCodes:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)

    def __init__(self, q: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.q, self.scale = q, scale

    def values(self) -> Tensor:
        """Return the dequantised weight."""
        n, k = self.q.shape
        scale = self.scale.repeat_interleave(SIDE, 0)[:n].repeat_interleave(SIDE, 1)[:, :k]
        return (self.q.float() * scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is OPERAND.overload and isinstance(args[0], cls):
            return _operand(*args)
        if func in (_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view.default):
            return cls(args[0].q, args[0].scale, args[0].dtype)
        return func(*_plain(cls, args), **_plain(cls, kwargs or {}))

    def __repr__(self) -> str:
        return f"GatheredCodes(shape={tuple(self.shape)}, dtype={self.dtype})"


def _plain(cls: type, values: Any) -> Any:
    return tree_map_only(cls, lambda t: t.values() if isinstance(t, GatheredCodes) else t.data_, values)


def _operand(
    weight: GatheredCodes, kind: str, dtype: torch.dtype, pow2_scale: bool, by_rows: bool, transposed: bool,
    rotation: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the result of ``OPERAND`` for the weight, from its codes."""
    if kind != "block" or pow2_scale:
        raise ArgumentError(f"weight was gathered in blocks of 128 x 128; expected recipe 'block', not {kind!r}")
    q, none = weight.q, nothing(weight.scale)
    return q if by_rows else none, weight.scale, TRANSPOSE(q, 0, 1, 1) if transposed else none, none


class Fp8GatherWeight(torch.Tensor):
    """A weight, or a process's rows of it, that FSDP2 gathers as codes. Otherwise an ordinary tensor."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Fp8GatherWeight:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype,
            device=data.device,
        )  # fmt: skip

    def __init__(self, data: Tensor) -> None:
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*_plain(cls, args), **_plain(cls, kwargs or {}))
        if func is _aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, cls, result) if func in _PARTS else result

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Fp8GatherWeight:
        return cls(inner["data_"])

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, Tensor], Any]:
        """Return the tensors to gather: codes and scales of this process's rows."""
        q, scale = quantize_fp8(self.data_, granularity="block")
        return (q.view(torch.uint8), scale), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return the whole weight and its memory; with `out`, whose memory is filled already, nothing."""
        if out is not None:
            return None
        q, scale = outputs
        return GatheredCodes(q.view(torch.float8_e4m3fn), scale, param_dtype), (q, scale)

    def __repr__(self) -> str:
        return f"Fp8GatherWeight({self.data_!r})"


def gather_in_fp8(module: torch.nn.Module, shards: int) -> int:
    """Let FSDP2 gather the weights of fp8 layers as codes. Call it before ``fully_shard``.

    The layers must have recipe "block" and should have ``save_weight=True``, so that nothing of a gathered weight is
    kept from the forward to the backward pass. A weight is converted only if its shards are whole blocks, that is, if
    its rows are a multiple of ``128 * shards``. Other weights are gathered in their own dtype.

    Args:
        module: A model with ``Fp8Linear`` layers, or one patched with fp8.
        shards: Number of processes that share a weight. With 1, FSDP2 gathers nothing, and nothing is converted.

    Returns:
        The number of weights that will be gathered as codes.

    Raises:
        ArgumentError: `shards` is less than 1.
    """
    if shards < 1:
        raise ArgumentError(f"shards is {shards}; expected the number of processes that share a weight")
    count = 0
    for layer in module.modules():
        if not isinstance(layer, KeepsCodes) or not isinstance(layer, torch.nn.Linear):
            continue
        weight = layer.weight
        named = layer.recipe if hasattr(layer, "recipe") else dict(layer._rtkernels_kind.options)["recipe"]
        pow2 = getattr(layer, "pow2_scale", False) or getattr(named, "pow2_scale", False)
        fits = shards > 1 and weight.shape[0] % (SIDE * shards) == 0 and weight.shape[1] % PITCH == 0
        if getattr(named, "name", named) == "block" and not pow2 and fits and type(weight) is torch.nn.Parameter:
            layer.weight = torch.nn.Parameter(Fp8GatherWeight(weight.data), weight.requires_grad)
            count += 1
    return count
