"""The result of a norm, computed only if its values are needed: fp8 layers read codes instead.

In a decoder layer, projections read the result of a norm. They share the codes, which one kernel writes from the norm's
input, so the normalised rows never exist in 16 bits. Any other reader gets the tensor, computed at its first use. A
lazy norm does not leave its decoder layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rtkernels
from rtkernels.models.fp8_mlp import Norm
from rtkernels.models.fp8_products import Codes
from rtkernels.models.lazy import Lazy, is_good, place_in_graph
from rtkernels.models.reuse import stand_in
from rtkernels.ops.norm import norm_fp8, rms_norm
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.main_grad import start_of

_plain, _of_sum = norm_fp8.FORWARD.at_site(), norm_fp8.FORWARD.at_site()


def _quantized(site: Any, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float, offset: float) -> Any:
    """Return codes by rows and transposed codes of a norm with scales, its statistics and, last, the sum."""
    return site(x, weight, None, residual, None, None, eps, offset, "both", False, "column", False, False)


class _CodesOfSum(torch.autograd.Function):
    """Stands for ``rms_norm(x + residual, weight)`` and the sum. Codes go to the list `written`, past autograd."""

    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, written):
        ctx.set_materialize_grads(False)
        *codes, _, total = _quantized(_of_sum, x, weight, residual, eps, offset)
        written += codes
        ctx.save_for_backward(total, weight)
        ctx.options, ctx.start = (eps, offset), start_of(weight, "rms_norm")
        return stand_in(x), total

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dsum):
        dh, dweight, (need_x, need_residual, need_weight, *_) = dsum, None, ctx.needs_input_grad
        if dy is not None:
            total, weight = ctx.saved_tensors
            dh, dweight = rms_norm.gradients(ctx.start, dy, total, weight, dsum, *ctx.options, need_weight)
        return dh if need_x else None, dh if need_residual else None, dweight, None, None, None


_codes_of_sum = applied(_CodesOfSum)


class LazyNorm(Lazy):
    """``rms_norm(x, weight)``, or ``rms_norm(x + residual, weight)``, which computes codes and sum immediately.

    With `stands_for`, the gradient of the codes goes to that tensor, and x gets it from there.
    """

    _lost = (
        "a projection without gradients reads an fp8 norm that has them: re-entrant checkpointing of a part "
        "of a decoder layer cannot pass them on. Checkpoint whole layers, or with use_reentrant=False"
    )

    def __init__(
        self, x: Tensor, weight: Tensor | None, eps: float, offset: float, residual: Tensor | None = None,
        stands_for: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._stands_for = stands_for
        self.x, self.weight, self.eps, self.offset = x, weight, eps, offset
        self._codes: Any = None
        self._codes_place: Any = None
        self._result: Tensor | None = None
        self.sum = None
        self.trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, residual))
        if residual is not None:
            self._codes, self._codes_place = self._of_sum(residual), place_in_graph()
            self.x = self.sum

    @property
    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, "offset": self.offset}

    def _of_sum(self, residual: Tensor) -> Any:
        if self.trains:
            codes: list[Tensor] = []
            y, self.sum = _codes_of_sum(self.x, residual, self.weight, self.eps, self.offset, codes)
            self._stands_for = y
            return Codes(*codes, y)
        layout = "both" if torch.is_grad_enabled() else "row"
        options = {**self._options, "layout": layout, "scale_layout": "column"}
        codes = rtkernels.rms_norm_fp8(self.x, self.weight, residual=residual, **options)
        self.sum = codes.sum
        return codes

    def codes(self) -> Any:
        """Return codes by rows with scales in columns, and transposed codes if a gradient may be needed.

        Raises:
            RtkError: The gradient of x would be lost.
        """
        self.check_gradient()
        if not is_good(self._codes, self._codes_place):
            if self._stands_for is not None:
                x, weight = self.x.detach(), self.weight.detach()
                quantized = _quantized(_plain, x, weight, None, self.eps, self.offset)
                self._codes = Codes(*quantized[:4], self._stands_for)
            else:
                layout = "both" if torch.is_grad_enabled() else "row"
                options = {**self._options, "layout": layout, "scale_layout": "column"}
                self._codes = rtkernels.rms_norm_fp8(self.x, self.weight, **options)
            self._codes_place = place_in_graph()
        return self._codes

    def taken(self) -> Any:
        """Return the codes and drop them, for the last reader. Later readers compute them again."""
        codes, self._codes = self.codes(), None
        return codes

    def source(self) -> Norm | None:
        """Return what the codes can be recomputed from."""
        return None if self.weight is None else Norm(self.x.detach(), self.weight.detach(), self.eps, self.offset)

    def _make(self) -> Tensor:
        return rtkernels.rms_norm(self.x, self.weight, **self._options)

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __repr__(self) -> str:
        return f"LazyNorm(shape={tuple(self.shape)}, dtype={self.dtype})"
