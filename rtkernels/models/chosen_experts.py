"""Llama 4's mixture of experts, whose code runs every expert on every token, with inputs times their weight or 0.

Ours runs the chosen experts only: tokens sorted by expert, times their weights, grouped products, a sum for each token.
As in ``fused_layers``, a module is replaced only if the sources of its forwards are those this code was written for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.experts import _grouped, _token_blocks
from rtkernels.models.fused_layers import form_of
from rtkernels.models.merged import has_watched_child, is_watched
from rtkernels.models.probe import NotRecognized, Recognized, check_plain
from rtkernels.models.recognize import activations
from rtkernels.models.reuse import glu
from rtkernels.runtime.invariance import starts_from_result

# Hashes of the forwards of the layer, its router and its experts; transformers 5.17 to 5.23.
FORMS = {("6f9863fcc8313ee9", "e67ac26ae72620fe", "5f66bc719c393081")}


def is_known(module: nn.Module) -> bool:
    """Return True if a module is such a layer, in a form that is known here."""
    parts = [module, *(module._modules.get(name) for name in ("router", "experts"))]
    if any(part is None for part in parts) or "shared_expert" not in module._modules:
        return False
    return tuple(form_of(replace.original_of(type(part)).forward) for part in parts) in FORMS


def recognize(module: nn.Module) -> Recognized:
    """Return how a layer is replaced.

    Raises:
        NotRecognized: The activation of its experts is none of ours.
    """
    check_plain(module, ("router", "experts", "shared_expert"))
    check_plain(module.experts)
    own = module.experts.act_fn
    found = activations(lambda gate, up: up * own(gate))
    if len(found) != 1:
        raise NotRecognized("its gate computes none of our activations")
    return Recognized("chosen_experts", (("act", found[0]),))


def is_inside(model: nn.Module, name: str) -> bool:
    """Return True if a module belongs to a layer that was replaced, which does not call it."""
    parent = replace.replaced(model.get_submodule(name.rpartition(".")[0]))
    return parent is not None and parent.kind == "chosen_experts" and name.endswith("experts")


def _layer(original: type[nn.Module], act: str) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        experts, x = self.experts, hidden_states.reshape(-1, self.hidden_dim)
        if x.dtype != experts.gate_up_proj.dtype or is_watched(experts) or has_watched_child(experts):
            return own(self, hidden_states)
        scores, logits = self.router(x)
        chosen = logits.topk(self.top_k, dim=1).indices  # as in the router
        index = rtkernels.moe_index(chosen, self.num_experts)
        ends, tokens = index.offsets[1:], _token_blocks(index) if starts_from_result() else None
        rows = rtkernels.moe_permute(x, index, probs=scores.gather(1, chosen), dense_probs=False)
        both = _grouped(rows.y * rows.probs.unsqueeze(-1).to(x.dtype), experts.gate_up_proj, ends, True, tokens)
        y = _grouped(glu(both, act=act), experts.down_proj, ends, True, tokens)
        return self.shared_expert(x) + rtkernels.moe_unpermute(y, index), logits

    return forward


replace.register("chosen_experts", _layer)
