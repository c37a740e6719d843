"""A linear layer for inference with an 8-bit or 4-bit weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.ops.quant import pack
from rtkernels.ops.quant.quantize_fp8 import quantize_fp8
from rtkernels.ops.shared.block_formats import divided


class _Format(NamedTuple):
    """Options of a weight format."""

    groups: tuple[int, ...]  # elements of a row that share a scale, 0 for the whole row; the first is the default
    activations: tuple[str | None, ...]


FORMATS = {
    "fp8": _Format((0, 128), (None, "fp8")),
    "int8": _Format((0, 128), (None, "int8")),
    "int4": _Format((128, 64, 32, 0), (None, "int8")),
    "nvfp4": _Format((16,), (None,)),
}
_TINY = 1e-30  # scale of rows of zeros


class QuantizedLinear(torch.nn.Module):
    """``x @ weight.T + bias`` with an 8-bit or 4-bit weight, for inference; replaces ``torch.nn.Linear``.

    Create it with :meth:`from_linear`, which quantises the weight once, in plain torch. The input is ``[...,
    in_features]`` in bfloat16 or float16, and the result has the same dtype. Sums are fp32 (exact int32 for int8 with
    int8) and rounded once. The layer has no gradients: :func:`rtkernels.scaled_mm` refuses an input that requires one.

    =========  =========================  =====================================  ==================
    weights    group                      weight, scale                          activations
    =========  =========================  =====================================  ==================
    ``fp8``    0 (a row) or 128           uint8 (e4m3), float32                  None or "fp8"
    ``int8``   0 or 128                   int8, float32                          None or "int8"
    ``int4``   128, 64, 32 or 0           int8 (two codes in a byte), float32    None or "int8"
    ``nvfp4``  16                         uint8 (two e2m1), uint8 (e4m3), and    None
                                          float32 ``global_scale``
    =========  =========================  =====================================  ==================

    Weight, scales and bias are buffers and part of the state dict. Codes and scales keep their dtypes if the module is
    moved to another dtype; the bias changes. ``int8`` with int8 activations has one scale per row.

    Args:
        in_features: Columns of the weight; a multiple of the group, and of 2 for 4 bits.
        out_features: Rows of the weight.
        bias: Whether the layer has a bias.
        device: Device of the buffers.
        dtype: Dtype of the bias.
        weights: Format of the weight, see above.
        group: Elements of a row that share a scale, 0 for the whole row. Default: the first group in the table.
        activations: None keeps 16-bit activations. "fp8" or "int8" quantises the input like the weight: one scale per
            row, or for fp8 with a group one per 128 elements.
        backend: Backend of the product, as for :func:`rtkernels.scaled_mm`.

    Raises:
        ArgumentError: The format does not support the group, the activations or `in_features`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None, *, weights: str = "int4", group: int | None = None,
        activations: str | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        if weights not in FORMATS:
            raise ArgumentError(f"weights is {weights!r}; expected one of {', '.join(map(repr, FORMATS))}")
        found = FORMATS[weights]
        group = found.groups[0] if group is None else group
        if group not in found.groups:
            raise ArgumentError(f"group is {group!r}; expected {_listed(found.groups)} for {weights} weights")
        if activations not in found.activations:
            wanted = _listed(found.activations)
            raise ArgumentError(f"activations is {activations!r}; expected {wanted} for {weights} weights")
        if weights == "int8" and activations is not None and group:
            raise ArgumentError(f"group is {group}; expected 0 for int8 weights with int8 activations")
        if group and in_features % group:
            raise ArgumentError(f"in_features is {in_features}; expected a multiple of the group, {group}")
        if weights in ("int4", "nvfp4") and in_features % 2:
            raise ArgumentError(f"in_features is {in_features}; expected a multiple of 2 for {weights} weights")
        self.in_features, self.out_features = in_features, out_features
        self.weights, self.group, self.activations, self.backend = weights, group, activations, backend
        halved = 2 if weights in ("int4", "nvfp4") else 1
        code = torch.int8 if weights in ("int8", "int4") else torch.uint8
        scales = (out_features, in_features // group) if group else (out_features,)
        kept = torch.uint8 if weights == "nvfp4" else torch.float32
        self.register_buffer("weight", torch.zeros(out_features, in_features // halved, dtype=code, device=device))
        self.register_buffer("scale", torch.zeros(scales, dtype=kept, device=device))
        one = torch.ones((), dtype=torch.float32, device=device) if weights == "nvfp4" else None
        self.register_buffer("global_scale", one)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, weights: str = "int4", group: int | None = None,
        activations: str | None = None, *, backend: str = "auto", global_scale: Tensor | None = None,
    ) -> QuantizedLinear:  # fmt: skip
        """Return a layer with the quantised weight of another. Arguments as for the class.

        Args:
            linear: A ``torch.nn.Linear``, or a module with its weight and bias. It does not change.
            weights: See the class.
            group: See the class.
            activations: See the class.
            backend: See the class.
            global_scale: Of ``nvfp4``, float32 ``[]``, if it is shared with other layers.

        Raises:
            ArgumentError: `linear` has no weight, or the format does not support an option.
        """
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            raise ArgumentError(f"linear is a {type(linear).__name__}; expected a torch.nn.Linear")
        bias = getattr(linear, "bias", None)
        layer = cls(
            weight.shape[1], weight.shape[0], bias is not None, weight.device, None if bias is None else bias.dtype,
            weights=weights, group=group, activations=activations, backend=backend,
        )  # fmt: skip
        with torch.no_grad():
            layer.quantize_(weight, global_scale)
            if bias is not None:
                layer.bias.copy_(bias)
        return layer.train(linear.training)

    def quantize_(self, weight: Tensor, global_scale: Tensor | None = None) -> None:
        """Set codes and scales from a weight ``[out_features, in_features]`` of any floating-point dtype.

        Args:
            weight: The weight.
            global_scale: Of ``nvfp4``, float32 ``[]``, if it is shared with other layers.
        """
        if tuple(weight.shape) != (self.out_features, self.in_features):
            wanted = [self.out_features, self.in_features]
            raise ArgumentError(f"weight has shape {list(weight.shape)}; expected {wanted}")
        weight = weight.detach()
        if self.weights == "int4":
            codes, scale = pack.quantize_int4(weight, self.group)
        elif self.weights == "nvfp4":
            codes, scale, global_scale = pack.quantize_nvfp4(weight, global_scale)
            scale = scale.view(torch.uint8)
            self.global_scale.copy_(global_scale)
        else:
            codes, scale = _quantized(weight, self.group, self.weights)
        self.weight.copy_(codes)
        self.scale.copy_(scale)

    def dequantized(self) -> Tensor:
        """Return the dequantised weight: float32 ``[out_features, in_features]``."""
        if self.weights in ("int4", "nvfp4"):
            values = pack.nibble_values(self.weight, "int4" if self.weights == "int4" else "e2m1")
        else:
            values = self._codes().float()
        scale = self.scale.view(torch.float8_e4m3fn).float() if self.weights == "nvfp4" else self.scale
        if self.global_scale is not None:
            scale = scale * self.global_scale
        return (values.unflatten(-1, (-1, self.group or self.in_features)) * scale.unsqueeze(-1).view(
            self.out_features, -1, 1
        )).flatten(-2)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` in the input's dtype."""
        if x.dtype not in (torch.bfloat16, torch.float16):
            dtype = str(x.dtype).removeprefix("torch.")
            raise ArgumentError(f"x has dtype {dtype}; expected bfloat16 or float16")
        options: dict[str, Any] = {"bias": self.bias, "out_dtype": x.dtype, "backend": self.backend}
        if self.weights == "int4":
            options["packed"] = (None, "int4")
        elif self.weights == "nvfp4":
            scale = self.scale.view(torch.float8_e4m3fn)
            options |= {"packed": (None, "e2m1"), "global_scale": self.global_scale}
            return scaled_mm(x, self.weight, None, scale, **options)
        if self.activations is None:
            return scaled_mm(x, self._codes(), None, self.scale, **options)
        rows = x.reshape(-1, self.in_features)
        if self.activations == "fp8":
            codes, scale = quantize_fp8(rows, granularity="group" if self.group else "row")
        else:
            codes, scale = _quantized(rows, 0, "int8")
        y = scaled_mm(codes, self._codes(), scale, self.scale, **options)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _codes(self) -> Tensor:
        return self.weight.view(torch.float8_e4m3fn) if self.weights == "fp8" else self.weight

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Move buffers; scales stay float32 if `fn` changes dtypes."""
        kept = {name: getattr(self, name) for name in ("scale", "global_scale")}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            moved = getattr(self, name)
            if moved is not None and moved.dtype != before.dtype:
                setattr(self, name, before.to(moved.device))
        return self

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"weights={self.weights!r}, group={self.group}, activations={self.activations!r}"
        )


def _quantized(x: Tensor, group: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return codes and float32 scales of rows, or of groups within rows: ``scale = amax / largest code``."""
    largest = 448.0 if kind == "fp8" else 127.0
    blocks = x.float().unflatten(-1, (-1, group or x.shape[-1]))
    scale = divided(blocks.abs().amax(-1, keepdim=True), largest).clamp_min(_TINY)
    values = (blocks / scale).clamp(-largest, largest).flatten(-2)
    codes = values.to(torch.float8_e4m3fn).view(torch.uint8) if kind == "fp8" else values.round().to(torch.int8)
    scale = scale.squeeze(-1)
    return codes, scale if group else scale.squeeze(-1)


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join(map(repr, values))
