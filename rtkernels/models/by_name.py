"""Our attention and expert layers under a name of transformers' own tables: ``attn_implementation="rtkernels"``.

A name is chosen when a model is built, before anything about its code is known, so the checks that ``patch`` makes in
advance are made here at the first call of a class (attention) or a module (experts). A model that fails them raises.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.errors import RtkError
from rtkernels.models import attention, experts, replace
from rtkernels.models.patch import check_transformers
from rtkernels.models.patcher import Patcher
from rtkernels.models.probe import Recognized

_KEY = "_rtkernels_experts"  # an attribute of expert layers: the key of their forward in _forwards
_PLAIN = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"})
_forwards: dict[Any, Callable[..., Tensor]] = {}


def register() -> None:
    """Make ``attn_implementation="rtkernels"`` and ``experts_implementation="rtkernels"`` known to transformers.

    After this call, ``from_pretrained``, ``from_config``, ``model.set_attn_implementation`` and
    ``model.set_experts_implementation`` accept the name. Nothing else changes: models that do not ask for it compute as
    before, and norms, MLPs, rotations and the loss need :func:`patch`. Calling it again changes nothing.

    The attention is that of ``patch(attention=True)``: in bf16 and fp16, with fp32, dropout and unusual head sizes left
    to torch's attention. The expert layers are those of ``patch(experts=True)``: they are compared with the model's own
    on random inputs at the first call.

    Raises:
        RtkError: transformers is missing or older than 5.0. The first forward of a model raises it, too, if the
            attention behaves differently for names it does not know, or if the expert layers are none of ours.
    """
    check_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    attention.by_name = attention_by_name
    AttentionInterface.register(attention.NAME, attention_by_name)
    AttentionMaskInterface.register(attention.NAME, attention.attention_mask)
    ALL_EXPERTS_FUNCTIONS.register(attention.NAME, experts_by_name)
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    except ImportError:  # transformers 5.0 has no table for these
        return
    ALL_FP8_EXPERTS_FUNCTIONS.register(attention.NAME, _refuse_codes)


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_by_name(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return :func:`rtkernels.models.attention.attention_forward` after checking the module's class.

    Raises:
        RtkError: The class needs more than its name to be changed.
    """
    if attention.is_accepted(module):
        return attention.attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    kinds = tuple(getattr(getattr(module, "config", None), "layer_types", None) or ())
    if reason := _why_not(type(module), kinds, getattr(module, "is_causal", None) is False):
        raise RtkError(
            f'attn_implementation="rtkernels": {reason}. Build the model with its default attention; '
            f"rtkernels.models.patch(model, attention=True) says whether ours can replace it"
        )
    return attention.attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


@torch.compiler.assume_constant_result
def _why_not(cls: type[nn.Module], kinds: tuple[str, ...], not_causal: bool) -> str:
    """Return why a class cannot use the name, "" if it can."""
    cls = replace.original_of(cls)
    reason = _found_in_file(cls, kinds, not_causal)
    return reason and f"{cls.__name__} {reason}"


@cache
def _found_in_file(cls: type[nn.Module], kinds: tuple[str, ...], not_causal: bool) -> str:
    """Return why changing the name of a class's attention is not enough, "" if it is."""
    if not cls.__module__.startswith("transformers.models."):
        return ""
    classes = [
        found for found in vars(sys.modules[cls.__module__]).values()
        if inspect.isclass(found) and issubclass(found, nn.Module) and found.__module__ == cls.__module__
    ]  # fmt: skip
    if any(attention._asks(found, "sdpa") for found in classes):
        return "is in a file whose code compares the name of the attention with those it knows"
    if any("allow_is_causal_skip" in given for found in classes for _, given in attention._names_and_constants(found)):
        return "is in a file whose code reads masks that are omitted for this attention"
    if other := sorted(set(kinds) - _PLAIN):
        return f"has layers of type {', '.join(other)}, whose masks other code reads"
    whole = [found for found in classes if hasattr(found, "_supports_sdpa")]
    if not_causal and whole and not any(found._supports_sdpa for found in whole):
        return "is not causal, and its model always creates masks, which are omitted for this attention"
    return ""


# ---- experts --------------------------------------------------------------------------------------------------------


def experts_by_name(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts; indices equal to the number of experts are skipped.

    Raises:
        RtkError: The layer computes something else than our expert layers.
    """
    key = self.__dict__.get(_KEY)
    if key not in _forwards:
        key = _recognized(self)
    return _forwards[key](self, hidden_states, top_k_index, top_k_weights)


@torch.compiler.assume_constant_result
def _recognized(module: nn.Module) -> tuple[type[nn.Module], Recognized]:
    """Compare an expert layer with ours, and return the key of the forward that computes the same."""
    cls = replace.original_of(type(module))
    with torch.inference_mode(False), torch.enable_grad():
        answer = Patcher().answer("experts", module, experts.recognize)
    if isinstance(answer, str):
        raise RtkError(
            f'experts_implementation="rtkernels": {cls.__name__} is none of our expert layers: {answer}. Call '
            f'model.set_experts_implementation("grouped_mm")'
        )
    # The model's own loop, not the class's forward, which would look up the name and come back here.
    own = SimpleNamespace(forward=inspect.unwrap(cls.forward))
    _forwards[cls, answer] = replace.forward_of(answer.kind, own, **dict(answer.options))
    module.__dict__[_KEY] = cls, answer
    return cls, answer


def _refuse_codes(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    raise RtkError(
        f'experts_implementation="rtkernels": {type(self).__name__} has fp8 weights. Call rtkernels.models.serve_fp8 '
        f"on the model, which keeps its codes, or choose another implementation"
    )
