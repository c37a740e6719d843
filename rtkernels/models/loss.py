"""Compute the loss of a causal language model from hidden states and head, with ``linear_cross_entropy``.

Three parts of a model are replaced. While the model trains with labels, its head returns ``LazyLogits``. Hooks of the
model tell the head when that is the case. The loss function accepts lazy logits and passes all others to the original.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import rtkernels
from rtkernels.models import replace
from rtkernels.models.lazy_logits import LazyLogits
from rtkernels.models.loss_probe import check_loss
from rtkernels.models.probe import NotRecognized, Recognized

_KIND = Recognized("head", ())
_LAZY = "_rtkernels_lazy"
_HOOKS = "_rtkernels_hooks"
LOSS_ONLY = "_rtkernels_loss_only"


def _head(original: type[nn.Module]) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden, materialize=False, loss=None):
        if loss is not None:  # the module is called so that hooks which gather its weight run
            return loss(self, hidden)
        if getattr(self, _LAZY, False) and not materialize and not isinstance(self.weight, DTensor):
            return LazyLogits(hidden, self)  # hooks of tensor parallelism accept only tensors
        return own(self, hidden)

    return forward


replace.register("head", _head)


class CausalLMLoss:
    """``ForCausalLMLoss`` of transformers, computed without logits if they are lazy."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original

    def __call__(
        self, logits: Any, labels: Tensor | None, vocab_size: int, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        def as_before(logits: Tensor) -> Tensor:
            return self.original(
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index, shift_labels=shift_labels, **kwargs,
            )  # fmt: skip

        if isinstance(logits, DTensor) and not kwargs:  # from a head that is split between processes
            options = {"ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum"}
            value = rtkernels.cross_entropy(logits, self._shifted(labels, shift_labels, ignore_index), **options)
            return self._mean(value.full_tensor(), num_items_in_batch)
        if not isinstance(logits, LazyLogits):
            return as_before(logits)
        shaping = logits.shaping()
        head, hidden = logits.head, logits.hidden
        if shaping is None or kwargs or logits._result is not None or head.weight.shape[0] != vocab_size:
            return as_before(logits.tensor())
        targets = self._shifted(labels, shift_labels, ignore_index).reshape(-1).to(hidden.device)

        def loss(module: nn.Module, hidden: Tensor) -> Tensor | None:
            if isinstance(module.weight, DTensor) or isinstance(hidden, DTensor) or hidden.dtype != module.weight.dtype:
                return None
            scaled = hidden if shaping.scale == 1.0 else hidden * shaping.scale
            return rtkernels.linear_cross_entropy(
                scaled.reshape(-1, hidden.shape[-1]), module.weight, targets, bias=module.bias,
                ignore_index=ignore_index, softcap=shaping.softcap,
                reduction="mean" if num_items_in_batch is None else "sum",
            )  # fmt: skip

        value = head(hidden, loss=loss)
        return as_before(logits.tensor()) if value is None else self._mean(value, num_items_in_batch)

    @staticmethod
    def _shifted(labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        return shift_labels

    @staticmethod
    def _mean(value: Tensor, num_items_in_batch: Any) -> Tensor:
        if num_items_in_batch is None:
            return value
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(value.device)
        return value / num_items_in_batch


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the head as one linear layer, or the copies that PEFT trains in its place (``modules_to_save``)."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    saved = getattr(head, "modules_to_save", None)
    if isinstance(saved, nn.ModuleDict):
        return [head.original_module, *saved.values()]
    return [] if head is None else [head]


# Hooks that gather or split weights: the loss calls the head a second time so that they run.
_GATHERING = ("torch.distributed", "transformers", "accelerate", "deepspeed")


def _has_hooks(head: nn.Module) -> bool:
    """Return True if a head has hooks that read or change logits or hidden states."""
    if head._backward_hooks or head._backward_pre_hooks:
        return True
    for hook in (*head._forward_hooks.values(), *head._forward_pre_hooks.values()):
        function = hook.func if isinstance(hook, partial) else hook
        if not (getattr(function, "__module__", None) or "").startswith(_GATHERING):
            return True
    return False


# Hooks are module-level functions that look up the head at every call: a copied or unpickled model has its own head,
# and PEFT may have exchanged it.


def _before(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    trains = model.training and torch.is_grad_enabled()
    for head in _heads(model):
        lazy = wanted and (trains or model.__dict__.get(LOSS_ONLY, False))
        setattr(head, _LAZY, lazy and not _has_hooks(head))


def _after(model: nn.Module, args: Any, output: Any) -> None:
    for head in _heads(model):
        setattr(head, _LAZY, False)


def replace_loss(model: nn.Module) -> None:
    """Replace head and loss of a causal language model.

    Raises:
        NotRecognized: Its loss is a different one, its head is not a plain linear layer, or its forward needs the
            logits.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        raise NotRecognized("its loss is not transformers' loss of causal language models")
    heads = _heads(model)
    if not heads:
        raise NotRecognized("it has no head")
    for head in heads:
        if type(head).forward is not nn.Linear.forward:  # FSDP's subclasses have it, those of adapters do not
            raise NotRecognized(f"its head is a {type(head).__name__}, no plain nn.Linear")
        replace.check_own_forward(head)
        if _has_hooks(head):
            raise NotRecognized("its head has hooks, which see logits")
    check_loss(model, model.get_output_embeddings(), heads[0].weight)
    for head in heads:
        replace.replace(head, _KIND)
        setattr(head, _LAZY, False)
    model.__dict__[_HOOKS] = (
        model.register_forward_pre_hook(_before, with_kwargs=True),
        model.register_forward_hook(_after, always_call=True),
    )
    model.loss_function = CausalLMLoss(ForCausalLMLoss)


def restore_loss(model: nn.Module) -> None:
    """Undo :func:`replace_loss`."""
    for handle in model.__dict__.pop(_HOOKS, ()):
        handle.remove()
    if isinstance(getattr(model, "_loss_function", None), CausalLMLoss):
        del model._loss_function
    for module in model.modules():  # adapters may wrap the head by now
        if replace.replaced(module) == _KIND:
            module.__dict__.pop(_LAZY, None)
            replace.restore(module)
