"""Per-token results of TRL's heads from :func:`rtkernels.linear_logprob`, with the head called as a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rtkernels
from rtkernels.models import loss as losses
from rtkernels.models import replace
from rtkernels.models.probe import NotRecognized

IGNORED = -100
# TRL's results in the order of linear_logprob's, with the option that asks for each.
RESULTS = {
    "entropy": "return_entropy",
    "log_sum_sq_probs": "return_log_sum_sq",
    "mean_logits": "return_mean_logit",
    "is_top1": "return_top1",
}


def prepare_head(model: nn.Module) -> None:
    """Let the head compute a loss when it is called with one.

    Raises:
        NotRecognized: The head is not a plain linear layer.
    """
    heads = losses._heads(model)
    if not heads:
        raise NotRecognized("it has no head")
    for head in heads:
        if replace.replaced(head) is None and type(head).forward is not nn.Linear.forward:
            raise NotRecognized(f"its head is a {type(head).__name__}, no plain nn.Linear")
        own = head.__dict__.get("forward")
        cast = isinstance(own, FunctionType) and (own.__globals__.get("__name__") or "").startswith("trl.")
        if not cast:
            replace.check_own_forward(head)
    for head in heads:
        own = head.__dict__.get("forward")
        if isinstance(own, FunctionType) and not hasattr(own, "_rtkernels_own"):
            head.forward = _with_loss(head, own)  # cast_lm_head_to_fp32
        elif replace.replaced(head) is None:
            replace.replace(head, losses._KIND)


def _with_loss(head: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(hidden_states, loss=None):
        return own(hidden_states) if loss is None else loss(head, hidden_states)

    forward._rtkernels_own = own
    return forward


def gathered(tensor: Tensor | None) -> Tensor | None:
    """Return a weight as a whole, which FSDP2 may have split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def autocasts(x: Tensor) -> bool:
    """Return True if autocast is on for the device of a tensor."""
    return torch.is_autocast_enabled(x.device.type)


def values(head: nn.Module, hidden: Tensor, labels: Tensor, cells: dict[str, Any], given: dict[str, Any]) -> dict:
    """Return per-token results by TRL's names, of rows that all count."""
    names = [name for name in RESULTS if name in cells["outputs"]]
    softcap, scale = cells["final_logit_softcapping"], cells["logit_scale"]

    def loss(module: nn.Module, hidden: Tensor) -> Any:
        weight, bias = gathered(module.weight), gathered(module.bias)
        if not autocasts(hidden) and weight.dtype != hidden.dtype:
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        save = given["save"]
        if save == "projected" and (weight.requires_grad or (bias is not None and bias.requires_grad)):
            save = "stats"
        if save == "projected" and ("log_sum_sq_probs" in names or "mean_logits" in names):
            save = "stats"
        return rtkernels.linear_logprob(
            hidden, weight, labels, bias=bias, ignore_index=IGNORED, logit_scale=scale, softcap=softcap,
            temperature=cells["temperature"], save=save, chunk_bytes=given["chunk_bytes"],
            **{RESULTS[name]: True for name in names},
        )  # fmt: skip

    fp32 = cells["cast_lm_head_to_fp32"]
    with torch.autocast(hidden.device.type, enabled=False) if fp32 else nullcontext():
        found = head(hidden.float() if fp32 else hidden, loss=loss)
    found = found if isinstance(found, tuple) else (found,)
    return dict(zip(("log_probs", *names), found, strict=True))
