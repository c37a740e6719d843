"""OpenRLHF's actor: log-probabilities and entropies from hidden states.

Importing this module replaces the forward of OpenRLHF's ``Actor``, for all actors of the process. The model is called
as before, through DeepSpeed, PEFT and hooks, but its head returns lazy logits, which nobody computes.
"""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.models import actor as theirs
from torch import Tensor

from rtkernels.models import loss as losses
from rtkernels.models.fused_head import _unwrapped
from rtkernels.models.lazy_logits import LazyLogits
from rtkernels.models.trl_values import prepare_head, values

_original = theirs.Actor.forward
_READY = "_rtkernels_head_of_actor"


def forward(
    self: Any, sequences: Tensor, action_mask: Tensor | None = None, attention_mask: Tensor | None = None,
    return_output: bool = False, allgather_logits: bool = False, return_logprobs: bool = False,
    ring_attn_group: Any = None, packed_seq_lens: Any = None, return_entropy: bool = False, **mm_inputs: Any,
) -> Any:  # fmt: skip
    """Return what ``Actor.forward`` does. Calls for logits, and models of images, are those of OpenRLHF."""
    given = (attention_mask, return_output, allgather_logits, return_logprobs, ring_attn_group, packed_seq_lens)
    if (action_mask is None and not return_logprobs) or mm_inputs or getattr(self, "is_vlm", False):
        return _original(self, sequences, action_mask, *given, return_entropy, **mm_inputs)
    batch, length = sequences.size()
    packs = getattr(self, "packing_samples", False)
    if packs:
        sequences, position_ids, rolled, padding, indices = theirs.unpad_and_slice_tensor(
            sequences, attention_mask, ring_attn_group
        )
        attention_mask = None
    else:
        rolled = torch.roll(sequences, shifts=-1, dims=1)
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids.masked_fill_(attention_mask == 0, 1)

    output, found = _called(self, sequences, rolled, attention_mask, position_ids, return_entropy)
    if packs:
        of = (ring_attn_group, padding, indices, batch, length)
        found = {name: theirs.gather_and_pad_tensor(t, *of) for name, t in found.items()}
    if return_entropy:
        output.entropy = found["entropy"][:, :-1]
    log_probs = found["log_probs"][:, :-1]
    if action_mask is not None:
        log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
    return (log_probs, output) if return_output else log_probs


def _called(
    self: Any, sequences: Tensor, rolled: Tensor, attention_mask: Tensor | None, position_ids: Tensor, entropy: bool
) -> tuple[Any, dict[str, Tensor]]:
    """Call the model; return its output, whose logits are lazy, and results for each token by name."""
    model = _unwrapped(self.model)
    if not model.__dict__.get(_READY):
        prepare_head(model)
        losses.check_loss(model, model.get_output_embeddings(), losses._heads(model)[0].weight)
        model.__dict__[_READY] = True
    with losses.lazy_head(model):
        output = self.model(sequences, attention_mask=attention_mask, position_ids=position_ids)
    logits = output["logits"]
    shaping = logits.shaping() if isinstance(logits, LazyLogits) else None
    if shaping is None:
        raise RuntimeError("the model has computed its logits; expected a head without hooks and tensor parallelism")
    cells = {
        "outputs": ("entropy",) if entropy else (), "final_logit_softcapping": shaping.softcap,
        "logit_scale": shaping.scale, "temperature": self.temperature, "cast_lm_head_to_fp32": False,
    }  # fmt: skip
    given = {"save": "stats", "chunk_bytes": None}
    found = values(logits.head, logits.hidden, rolled, cells, given)
    output["logits"] = logits.float() / self.temperature
    return output, found


theirs.Actor.forward = forward
