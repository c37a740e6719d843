"""Linear layers and experts for inference with fp8 weights in blocks of 128 x 128.

Parameters have the names and shapes of transformers' own modules for such checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import RtkError
from rtkernels.models.fp8_linear import codes_of
from rtkernels.models.lazy_norm import LazyNorm
from rtkernels.models.merged import adjacent, is_watched
from rtkernels.models.recognize import NotRecognized
from rtkernels.nn.fp8_experts import E4M3, ExpertCodes, experts, group_ends
from rtkernels.ops.gemm.fp8_operands import rows_of
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.torch_private import is_dynamo_compiling

BLOCK = 128
AS_IT_IS = 16  # up to so many rows x is not quantised: reading the weights takes longer, and quantising costs a launch


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class _KeepsScales(nn.Module):
    """Keeps the dtypes of codes and scales when the module is moved to another dtype."""

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        kept = {name: p.data for name, p in self._parameters.items() if p is not None and name != "bias"}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            moved = self._parameters[name]
            if moved.dtype != before.dtype:
                self._parameters[name] = _frozen(before.to(moved.device))
        return self


class ServedLinear(_KeepsScales):
    """``x @ weight.T + bias`` of 16-bit rows with an fp8 weight.

    Args:
        weight: e4m3 ``[out features, in features]``; in features is a multiple of 16.
        weight_scale_inv: float32, one factor per 128 x 128 block of the weight; codes are multiplied by it.
        bias: In the result's dtype, or None.
    """

    def __init__(self, weight: Tensor, weight_scale_inv: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.weight_scale_inv = _frozen(weight), _frozen(weight_scale_inv)
        self.bias = None if bias is None else _frozen(bias.detach())

    def forward(self, x: Any) -> Tensor:
        """Return ``[..., out features]`` in x's dtype. Layers that read the same tensor share its codes."""
        return _multiply(self, x, self.weight, self.weight_scale_inv, self.bias)

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def gated(down: nn.Module, gate_up: Tensor, act: str) -> Tensor | None:
    """Return ``down(glu(gate_up))`` with gated values stored only as codes, None if that is not possible."""
    if type(down) is not ServedLinear or is_dynamo_compiling() or is_as_it_is(gate_up):
        return None
    if gate_up.dtype not in (torch.bfloat16, torch.float16) or gate_up.requires_grad or is_watched(down):
        return None
    codes = rtkernels.glu_fp8(gate_up, act=act, scale_layout="column")
    return _of_codes(codes.q, codes.scale, down.weight, down.weight_scale_inv, down.bias, gate_up.dtype)


def _of_codes(
    q: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``x @ weight.T + bias`` for codes of x with scales in columns."""
    left = rows_of(q.reshape(-1, weight.shape[1]), scale, "group")
    y = rtkernels.scaled_mm(
        left.q, weight, left.scale, weight_scale, recipe="block_1x128_128x128", bias=bias, out_dtype=dtype
    )
    return y.view(*q.shape[:-1], weight.shape[0])


def is_as_it_is(x: Any) -> bool:
    """Return True if a layer's input has so few rows that it is not quantised; never with batch invariance."""
    return row_count(x.shape) <= AS_IT_IS and not level()


def _multiply(reader: nn.Module, x: Any, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` for a tensor or lazy norm x, read by a layer, and an fp8 weight in blocks.

    x is quantised, too, unless it has few rows. Its gradient is that of the product with the dequantised weight.
    """
    if isinstance(x, LazyNorm) and x.trains:
        x = x.tensor()
    y = _product(reader, x, weight, weight_scale, bias)
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        return _GradientOfInput.apply(y, x, weight, weight_scale)
    return y


class _GradientOfInput(torch.autograd.Function):
    """Returns y, the product of x with an fp8 weight that was computed without gradients, and passes them on to x."""

    @staticmethod
    def forward(ctx, y, x, weight, weight_scale):
        ctx.save_for_backward(weight, weight_scale)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        weight, weight_scale = ctx.saved_tensors
        values = rtkernels.dequantize_fp8(weight, weight_scale, granularity="block", dtype=dy.dtype)
        return None, dy @ values, None, None


def _product(reader: nn.Module, x: Any, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    plain = not is_dynamo_compiling() and isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    with torch.no_grad():
        if plain and is_as_it_is(x):
            y = rtkernels.scaled_mm(
                x.reshape(-1, weight.shape[1]), weight, None, weight_scale, recipe="block_1x128_128x128", bias=bias
            )
            return y.view(*x.shape[:-1], weight.shape[0])
        codes = codes_of(x, reader)
        if isinstance(codes, Tensor):  # under the compiler, or in fp32
            q, scale = rtkernels.quantize_fp8(x, granularity="group", scale_layout="column")
        else:
            q, scale = codes.q, codes.scale
        return _of_codes(q, scale, weight, weight_scale, bias, x.dtype).view(*x.shape[:-1], weight.shape[0])


def _alike(linears: Sequence[nn.Module]) -> bool:
    """Return True if weights may be adjacent: they consist of whole blocks, and all or none have biases."""
    first = linears[0]
    return all(
        type(m) is ServedLinear
        and m.in_features == first.in_features
        and m.out_features % BLOCK == 0
        and (m.bias is None) == (first.bias is None)
        and m.weight.device == first.weight.device
        for m in linears
    )


def make_adjacent(linears: Sequence[nn.Module]) -> None:
    """Move the codes of layers that read the same tensor into one block of memory, and their scales into another."""
    if not _alike(linears) or linears[0].weight.device.type == "meta":
        return
    for name in ("weight", "weight_scale_inv"):
        parts, start = [getattr(m, name) for m in linears], 0
        block = torch.cat([p.detach().view(torch.uint8) for p in parts]).view(parts[0].dtype)
        for p in parts:
            p.data = block[start : start + p.shape[0]]
            start += p.shape[0]


def merged(x: Any, linears: Sequence[nn.Module]) -> Tensor | None:
    """Return the results of layers as columns of one tensor, None if the layers must be called separately."""
    if type(linears[0]) is not ServedLinear or is_dynamo_compiling() or not _alike(linears):
        return None
    if any(is_watched(m) for m in linears):
        return None
    weight = adjacent([m.weight for m in linears])
    scale = adjacent([m.weight_scale_inv for m in linears])
    if weight is None or scale is None:
        return None
    bias = None if linears[0].bias is None else torch.cat([m.bias for m in linears])
    return _multiply(linears[0], x, weight, scale, bias)


class ServedExperts(_KeepsScales):
    """Gated experts with fp8 weights. Tokens are quantised during permutation, gated values during activation.

    Args:
        gate_up_proj: e4m3 ``[experts, 2 * inner, hidden]``; inner is a multiple of 128.
        gate_up_proj_scale_inv: float32 ``[experts, 2 * inner / 128, hidden / 128]``.
        down_proj: e4m3 ``[experts, hidden, inner]``.
        down_proj_scale_inv: float32 ``[experts, hidden / 128, inner / 128]``.
        act: Activation, as for :func:`rtkernels.glu`.
    """

    has_bias, has_gate, is_transposed, is_concatenated = False, True, False, True

    def __init__(self, gate_up_proj, gate_up_proj_scale_inv, down_proj, down_proj_scale_inv, act: str) -> None:
        super().__init__()
        self.num_experts, self.act = gate_up_proj.shape[0], act
        self.gate_up_proj, self.down_proj = _frozen(gate_up_proj), _frozen(down_proj)
        self.gate_up_proj_scale_inv = _frozen(gate_up_proj_scale_inv)
        self.down_proj_scale_inv = _frozen(down_proj_scale_inv)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``[tokens, hidden]``.

        Raises:
            RtkError: A gradient is needed.
        """
        if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
            raise RtkError(
                "fp8 experts of serve_fp8 have no gradients. To train adapters, put them on the 16-bit model, with "
                "rtkernels.models.patch(model, fp8=True) for fp8 products; merge them before export_fp8"
            )
        rows = max(moe_rows(top_k_index.numel(), 1, self.num_experts, BLOCK), BLOCK)
        index = moe_index(top_k_index, self.num_experts, multiple_of=BLOCK, rows=rows)
        up, down = self.gate_up_proj, self.down_proj
        none = up.new_empty(0)
        given = (
            *ExpertCodes(up.flatten(0, 1), self.gate_up_proj_scale_inv.flatten(0, 1), none),
            *ExpertCodes(down.flatten(0, 1), self.down_proj_scale_inv.flatten(0, 1), none),
        )
        with torch.no_grad():
            return experts(
                hidden_states, top_k_weights.float(), up, down, index.rows, index.slots, group_ends(index.offsets),
                (None, None), self.act, E4M3, False, *given,
            )  # fmt: skip

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"experts={self.num_experts}, hidden={self.down_proj.shape[1]}, inner={self.down_proj.shape[2]}"


def _empty(weight: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*weight.shape[:-2], _blocks(weight.shape[-2]), _blocks(weight.shape[-1]))
    return torch.empty_like(weight, dtype=E4M3), torch.empty(shape, dtype=torch.float32, device=weight.device)


def _coded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of a weight, or of expert weights with a multiple of 128 rows."""
    flat = weight.detach().reshape(-1, weight.shape[-1])
    q, scale = rtkernels.quantize_fp8(flat, granularity="block")
    return q.view(weight.shape), scale.view(*weight.shape[:-2], -1, scale.shape[-1])


def serve_linear(linear: nn.Module, empty: bool = False) -> ServedLinear:
    """Return the serving layer of a linear layer: from its codes if it has them, from its weight, or uninitialised."""
    scale = getattr(linear, "weight_scale_inv", None)
    if scale is not None and linear.weight.element_size() == 1:  # transformers' FP8Linear
        return ServedLinear(linear.weight.data, scale.data.float(), linear.bias)
    codes = _empty(linear.weight) if empty else _coded(linear.weight)
    return ServedLinear(*codes, linear.bias)


def serve_experts(experts: nn.Module, empty: bool = False) -> ServedExperts:
    """Return the serving layer of experts.

    Raises:
        NotRecognized: Their activation is none of ours.
    """
    from rtkernels.models.experts import activation_of

    act = activation_of(experts)
    weights = experts.gate_up_proj, experts.down_proj
    if weights[0].element_size() == 1:  # transformers' FP8Experts
        scales = experts.gate_up_proj_scale_inv.data.float(), experts.down_proj_scale_inv.data.float()
        return ServedExperts(weights[0].data, scales[0], weights[1].data, scales[1], act)
    pairs = [_empty(w) if empty else _coded(w) for w in weights]
    return ServedExperts(*pairs[0], *pairs[1], act)


__all__ = ["BLOCK", "NotRecognized", "ServedExperts", "ServedLinear", "serve_experts", "serve_linear"]
