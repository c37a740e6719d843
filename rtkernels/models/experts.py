"""Expert layers of transformers: tokens sorted by expert, grouped products, the gate as one op, no wait for the device.

Modules that transformers' experts interface knows carry flags that say how their weights lie. A module whose gate is
recognised gets our forward, as norms do; the others keep the implementation that the model's configuration names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.recognize import NotRecognized, Recognized, activations, probe_values, twin_of

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def is_experts(module: nn.Module) -> bool:
    """Return True if a module has the flags of the experts interface."""
    return all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS) and hasattr(module, "_apply_gate")


def recognize(module: nn.Module) -> Recognized:
    """Return which expert layer a candidate is.

    Raises:
        NotRecognized: None that we have.
    """
    if not module.has_gate:
        raise NotRecognized("its experts have no gate")
    if module.has_bias:
        raise NotRecognized("its experts have biases")
    if getattr(module, "has_post_expert_norm", False):
        raise NotRecognized("it normalises the results of experts")

    def theirs(gate: Tensor, up: Tensor) -> Tensor:
        both = torch.cat([gate, up], -1) if module.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
        return type(module)._apply_gate(twin_of(module, {}), both)

    inputs = [probe_values(7, 64, seed=1), probe_values(7, 64, seed=2)]
    found = activations(theirs, inputs)
    if len(found) != 1:
        raise NotRecognized("its gate computes none of our activations")
    options = (("act", found[0]), ("concatenated", module.is_concatenated), ("transposed", module.is_transposed))
    return Recognized("experts", options)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Return the products of groups of rows with the weights of their experts ``[experts, out, in]``."""
    if transposed or x.dtype == torch.float32:
        return nn.functional.grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    return rtkernels.grouped_mm(x, weight, offs=ends)


def _experts(original: type[nn.Module], act: str, concatenated: bool, transposed: bool) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        if hidden_states.dtype != self.gate_up_proj.dtype or hidden_states.dim() != 2:
            return own(self, hidden_states, top_k_index, top_k_weights)
        index = rtkernels.moe_index(top_k_index, self.num_experts)
        permuted = rtkernels.moe_permute(hidden_states, index, probs=top_k_weights, dense_probs=False)
        ends = index.offsets[1:]
        both = _grouped(permuted.y, self.gate_up_proj, ends, transposed)
        gate, up = (both, None) if concatenated else (both[..., ::2], both[..., 1::2])
        # The weight of a choice commutes with the second product.
        inner = rtkernels.glu(gate, up, act=act, weight=permuted.probs)
        return rtkernels.moe_unpermute(_grouped(inner, self.down_proj, ends, transposed), index)

    return forward


replace.register("experts", _experts)
