"""Mixture-of-experts layers that multiply fp8 codes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.nn.fp8_experts import GroupedLinear, experts, group_ends, weight_codes
from rtkernels.nn.fp8_linear import KeepsCodes, main_grad_of
from rtkernels.ops.gemm.fp8_operands import PITCH, SIDE
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.ops.router.router_gemm import router_gemm
from rtkernels.ops.router.topk_router import Routing, topk_router
from rtkernels.runtime.layout import check_same, token


def _initial(weight: Tensor) -> None:
    """Initialise a weight as torch.nn.Linear does."""
    bound = weight.shape[-1] ** -0.5
    torch.nn.init.uniform_(weight, -bound, bound)


def _check_main_grad(name: str, weight: Tensor, main_grad: Tensor | None) -> None:
    if main_grad is not None:
        token(f"{name}.main_grad", main_grad.dtype, (torch.float32,))
        check_same(f"{name}.main_grad", tuple(main_grad.shape), tuple(weight.shape), "shape", of=name)


class Fp8GroupedLinear(torch.nn.Module, KeepsCodes):
    """``y[rows of g] = x[rows of g] @ weight[g].T`` from fp8 codes, forward and backward.

    Uses recipe "block" of :func:`rtkernels.fp8_linear`. Every group must begin at a multiple of 128 rows
    (``moe_index(..., multiple_of=128)``). This is not checked, because group ends are on the device.

    Args:
        groups: Number of weights, up to 512.
        in_features: Columns of each weight.
        out_features: Rows of each weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        grad_dtype: fp8 dtype of the incoming gradient's codes.
        pow2_scale: Round scales up to powers of two.
    """

    def __init__(
        self, groups: int, in_features: int, out_features: int, device: Any = None, dtype: torch.dtype | None = None,
        *, grad_dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.grad_dtype, self.pow2_scale = grad_dtype, pow2_scale
        self.weight = torch.nn.Parameter(torch.empty(groups, out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights as torch.nn.Linear does."""
        _initial(self.weight)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return ``[rows, out_features]`` in x's dtype.

        Args:
            x: ``[rows, in_features]``, bfloat16, float16 or float32, sorted by group.
            ends: int32 ``[groups]``, the row after each group's last one (``MoeIndex.offsets[1:]``). Rows after the
                last group are 0 in the result.
        """
        token("x", x.dtype)
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ArgumentError(f"x has shape {tuple(x.shape)}; expected [rows, {self.in_features}]")
        if ends.dtype != torch.int32 or ends.shape != (self.groups,):
            kind = str(ends.dtype).removeprefix("torch.")
            raise ArgumentError(f"ends is {kind} {tuple(ends.shape)}; expected int32 ({self.groups},)")
        main_grad = main_grad_of(self.weight)
        _check_main_grad("weight", self.weight, main_grad)
        codes = self.codes_of("weight", self.weight, lambda w, t: weight_codes(w, t, self.pow2_scale))
        return GroupedLinear.apply(
            x, self.weight, ends, main_grad, self.grad_dtype, self.pow2_scale, *(codes or ())
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features}"


class Fp8MoE(torch.nn.Module, KeepsCodes):
    """A layer of SwiGLU experts: router, permutation, products of fp8 codes, weighted sum; forward and backward.

    ``out[t] = sum over the top_k experts e of t of prob * down[e] @ (silu(gate) * up)`` with
    ``[gate | up] = gate_up[e] @ x[t]``. Logits are fp32. Tokens are quantised during permutation, gated values during
    the activation, and gradients likewise. Products use recipe "block" of :func:`rtkernels.fp8_linear`. The host reads
    nothing from the device, and memory depends only on the number of tokens, so the layer can be captured in a CUDA
    graph and replayed with any routing.

    Parameters: ``router_weight`` ``[experts, hidden]``, ``gate_up_weight`` ``[experts, 2 * ffn, hidden]``,
    ``down_weight`` ``[experts, hidden, ffn]``. With ``selection_bias`` there is a buffer of that name, ``[experts]``,
    added to the scores for the selection only. Update it from ``routing.counts`` to balance experts without an
    auxiliary loss.

    Args:
        hidden: Columns of x, a multiple of 16.
        ffn: Gated values of an expert, a multiple of 16.
        experts: Number of experts, up to 512.
        top_k: Number of experts per token.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        score: "softmax" or "sigmoid". This and the other options of the router are those of
            :func:`rtkernels.topk_router`.
        score_first: Compute scores over all experts before the selection.
        renormalize: Divide by the sum of the selected scores.
        num_groups: Number of groups of experts.
        top_groups: Number of groups that a token may select experts from.
        scale: Factor of the probabilities.
        selection_bias: Whether the layer has that buffer.
        act: Activation of the gate, as for :func:`rtkernels.glu`.
        rows: Number of permuted rows to allocate, a multiple of 128; choices that do not fit are dropped. Default:
            enough for any routing, ``tokens * top_k`` plus up to 127 per expert.
        grad_dtype: fp8 dtype of the incoming gradient's codes; those of gate and up are e4m3.
        pow2_scale: Round scales up to powers of two.

    Raises:
        ArgumentError: A size is not a supported multiple, or not ``1 <= top_k <= experts <= 512``.
    """

    def __init__(
        self, hidden: int, ffn: int, experts: int, top_k: int, device: Any = None, dtype: torch.dtype | None = None, *,
        score: str = "softmax", score_first: bool = True, renormalize: bool = True, num_groups: int = 1,
        top_groups: int | None = None, scale: float = 1.0, selection_bias: bool = False, act: str = "silu",
        rows: int | None = None, grad_dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        for name, size in (("hidden", hidden), ("ffn", ffn)):
            if size < 1 or size % PITCH:
                raise ArgumentError(f"{name} is {size}; expected a multiple of {PITCH}")
        if not 1 <= top_k <= experts <= 512:
            raise ArgumentError(f"top_k is {top_k} and experts {experts}; expected 1 <= top_k <= experts <= 512")
        if rows is not None and (rows < SIDE or rows % SIDE):
            raise ArgumentError(f"rows is {rows}; expected a multiple of {SIDE}")
        self.hidden, self.ffn, self.experts, self.top_k, self.rows = hidden, ffn, experts, top_k, rows
        self.act, self.grad_dtype, self.pow2_scale = act, grad_dtype, pow2_scale
        self.routing_options = {
            "score": score, "score_first": score_first, "renormalize": renormalize, "num_groups": num_groups,
            "top_groups": top_groups, "scale": scale,
        }  # fmt: skip
        factory = {"device": device, "dtype": dtype}
        self.router_weight = torch.nn.Parameter(torch.empty(experts, hidden, **factory))
        self.gate_up_weight = torch.nn.Parameter(torch.empty(experts, 2 * ffn, hidden, **factory))
        self.down_weight = torch.nn.Parameter(torch.empty(experts, hidden, ffn, **factory))
        bias = torch.zeros(experts, dtype=torch.float32, device=device) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all weights as torch.nn.Linear does."""
        for weight in (self.router_weight, self.gate_up_weight, self.down_weight):
            _initial(weight)
        if self.selection_bias is not None:
            torch.nn.init.zeros_(self.selection_bias)

    def route(self, x: Tensor) -> Routing:
        """Return the experts of each row of x ``[tokens, hidden]`` and their probabilities."""
        if x.dtype == torch.float32:  # router_gemm takes 16-bit rows
            logits = F.linear(x, self.router_weight.float())
        else:
            logits = router_gemm(x, self.router_weight, main_grad=main_grad_of(self.router_weight))
        return topk_router(logits, self.top_k, bias=self.selection_bias, **self.routing_options)

    def forward(self, x: Tensor, return_routing: bool = False) -> Any:
        """Return the output for x ``[..., hidden]`` in x's dtype; with `return_routing` also the ``Routing``."""
        token("x", x.dtype)
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ArgumentError(f"x has shape {tuple(x.shape)}; expected [..., {self.hidden}]")
        flat = x.reshape(-1, self.hidden)
        routing = self.route(flat)
        rows = self.rows
        if rows is None:
            rows = max(moe_rows(flat.shape[0] * self.top_k, 1, self.experts, SIDE), SIDE)
        index = moe_index(routing.indices, self.experts, multiple_of=SIDE, rows=rows)
        weights = (self.gate_up_weight, self.down_weight)
        main_grads = tuple(main_grad_of(weight) for weight in weights)
        for name, weight, main_grad in zip(("gate_up_weight", "down_weight"), weights, main_grads, strict=True):
            _check_main_grad(name, weight, main_grad)
        kept = [
            self.codes_of(name, weight, lambda w, t: weight_codes(w, t, self.pow2_scale))
            for name, weight in zip(("gate_up", "down"), weights, strict=True)
        ]
        out = experts(
            flat, routing.probs, *weights, index.rows, index.slots, group_ends(index.offsets), main_grads, self.act,
            self.grad_dtype, self.pow2_scale, *(part for codes in kept if codes for part in codes),
        ).view(x.shape)  # fmt: skip
        return (out, routing) if return_routing else out

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return f"hidden={self.hidden}, ffn={self.ffn}, experts={self.experts}, top_k={self.top_k}"
