"""Compute the loss of a causal language model from hidden states and head, with ``linear_cross_entropy``.

Three parts of a model are replaced. While the model trains with labels, its head returns ``LazyLogits``. Hooks of the
model tell the head when that is the case. The loss function accepts lazy logits and passes all others to the original.

A model is tested first: does its forward pass the logits of its head to its loss function, at most scaled or capped?
The forward is called with labels on a twin of the model. Its children are stand-ins that return hidden states without
values, its head returns lazy logits that must not be computed, and its loss function records its arguments. Only the
model's own code runs, so this works on any device and for any size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import rtkernels
from rtkernels.models import replace, trl_forward
from rtkernels.models.decoding import head as decoded_head
from rtkernels.models.lazy_logits import LazyLogits
from rtkernels.models.probe import NotRecognized, Raised, Recognized, probing
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.torch_private import is_dynamo_compiling

_KIND = Recognized("head", ())
_LAZY = "_rtkernels_lazy"
_HOOKS = "_rtkernels_hooks"
LOSS_ONLY = "_rtkernels_loss_only"
ALWAYS_LAZY = "_rtkernels_always_lazy"  # of a model whose caller takes lazy logits without labels
_SHAPE = (2, 3)  # sequences, tokens


def _head(original: type[nn.Module]) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden, materialize=False, loss=None):
        if loss is not None:  # the module is called so that hooks which gather its weight run
            return loss(self, hidden)
        if getattr(self, _LAZY, False) and not materialize and not isinstance(self.weight, DTensor):
            return LazyLogits(hidden, self)  # hooks of tensor parallelism accept only tensors
        logits = decoded_head(self, hidden)
        return own(self, hidden) if logits is None else logits

    return forward


def _gathered_whole(head: nn.Module) -> bool:
    """Return True if FSDP2 shards a head whose weights were no DTensors before, as those of tensor parallelism are."""
    if not isinstance(head, FSDPModule):
        return False
    state = head._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    parameters = [p for unit in groups for p in getattr(unit, "fsdp_params", ())]
    return bool(parameters) and not any(getattr(p, "is_dtensor", True) for p in parameters)


class _LazyUnderFsdp:
    """Returns lazy logits of a head that FSDP2 shards before hooks run, so that only the call for the loss gathers it.

    Modules that are one unit of FSDP2, as accelerate's final norm and head, free their weights in the backward pass
    when the first call of the last one has been differentiated: a second call would free the norm's too early.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get(_LAZY) and len(args) == 1 and not kwargs and _gathered_whole(self):
            return LazyLogits(args[0], self)
        return super().__call__(*args, **kwargs)


replace.register("head", _head, _LazyUnderFsdp)


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
            if hidden.dtype not in FLOAT_DTYPES:
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
    hooks = (*head._forward_hooks.values(), *head._forward_pre_hooks.values())
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    gathering = [(getattr(function, "__module__", None) or "").startswith(_GATHERING) for function in functions]
    return bool(head._backward_hooks or head._backward_pre_hooks) or not all(gathering)


# Hooks are module-level functions that look up the head at every call: a copied or unpickled model has its own head,
# and PEFT may have exchanged it.


def _before(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if "fused_lm_head" in kwargs and not is_dynamo_compiling():
        trl_forward.tell(model, kwargs)
    wanted = kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None
    trains = model.training and torch.is_grad_enabled()
    for head in _heads(model):
        lazy = wanted and (trains or model.__dict__.get(LOSS_ONLY, False))
        lazy = lazy or model.__dict__.get(ALWAYS_LAZY, False)
        setattr(head, _LAZY, lazy and not _has_hooks(head))


@contextmanager
def lazy_head(model: nn.Module) -> Iterator[None]:
    """Let the replaced head of a model return lazy logits, with labels or without."""
    heads = _heads(model)
    model.__dict__[ALWAYS_LAZY] = True  # for the hooks of a patched model
    for head in heads:
        setattr(head, _LAZY, True)
    try:
        yield
    finally:
        model.__dict__.pop(ALWAYS_LAZY, None)
        for head in heads:
            setattr(head, _LAZY, False)


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


# ---- the test -------------------------------------------------------------------------------------------------------


class _LogitsComputed(Exception):
    """The forward used the values of the logits."""


class _Output:
    """Output of a model's body: hidden states, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state, self.hidden_states = hidden, (hidden,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return getattr(self, key)
        return (self.last_hidden_state,)[key] if isinstance(key, slice) or key == 0 else None

    def __iter__(self) -> Any:
        return iter((self.last_hidden_state,))

    def __len__(self) -> int:
        return 1


class _Child:
    """Stands for a child without the head: it has the child's attributes, and its children are stand-ins, too."""

    def __init__(self, module: nn.Module, hidden: Tensor) -> None:
        self.__dict__ |= {"_module": module, "_hidden": hidden}

    def __getattr__(self, name: str) -> Any:
        return self._standing_for(getattr(self._module, name))

    def __getitem__(self, key: Any) -> Any:
        return self._standing_for(self._module[key])

    def __len__(self) -> int:
        return len(self._module)

    def _standing_for(self, found: Any) -> Any:
        return _Child(found, self._hidden) if isinstance(found, nn.Module) else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(t, LazyLogits) for t in (*args, *kwargs.values())):  # a soft cap as a module
            if any(True for _ in self._module.parameters()):
                raise _LogitsComputed
            return self._module(*args, **kwargs)
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        if isinstance(self._module, nn.Embedding):
            return self._hidden
        one_input = len(inspect.signature(type(self._module).forward).parameters) == 2
        if one_input and given is not None and given.is_floating_point():  # a norm, a dropout, a dense layer
            return given
        return _Output(self._hidden)


class _Head:
    """Stands for the head."""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        self._module, self.weight = module, weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __call__(self, hidden: Tensor, materialize: bool = False) -> Any:
        if materialize:
            raise _LogitsComputed
        return LazyLogits(hidden, self)


class _Loss:
    """Records that it was called with lazy logits; arguments as for ``ForCausalLMLoss``."""

    called = False

    def __call__(
        self, logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
        shift_labels: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if not isinstance(logits, LazyLogits) or logits.shaping() is None:
            raise _LogitsComputed
        rows = logits.head.weight.shape[0]
        if vocab_size != rows:
            raise NotRecognized(f"its loss is that of {vocab_size} words, its head gives {rows}")
        if kwargs:
            raise NotRecognized(f"its loss has options that ours has not: {', '.join(kwargs)}")
        self.called = True
        return torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)


def takes_labels(model: nn.Module) -> bool:
    """Return True if a model can compute a loss: its forward takes labels."""
    return "labels" in inspect.signature(inspect.unwrap(type(model).forward)).parameters


@probing()
def check_loss(model: nn.Module, head: nn.Module, weight: Tensor) -> None:
    """Call the forward of a model with labels, as described above.

    Raises:
        NotRecognized: The forward raises an exception, computes logits, or does not call its loss function.
    """
    forward, loss = inspect.unwrap(type(model).forward), _Loss()
    ids = torch.ones(_SHAPE, dtype=torch.int64, device="cpu")
    name = getattr(model, "main_input_name", "input_ids")
    taken = inspect.signature(forward).parameters
    plain = {"dtype": torch.float32, "device": "cpu"}
    given = {name: ids if name == "input_ids" else torch.zeros(*_SHAPE, 4, **plain), "labels": ids}
    given |= {"return_dict": True} if "return_dict" in taken else {}
    twin = _stubbed(model, head, weight, torch.zeros(*_SHAPE, weight.shape[1], **plain))
    twin.__dict__ |= {"_loss_function": loss, "training": True}
    try:
        forward(twin, **given)
    except NotRecognized:
        raise
    except _LogitsComputed:
        raise NotRecognized("its forward makes the logits: it does more with them than scale or cap them") from None
    except Exception as error:
        raise Raised("with labels", error) from error
    if not loss.called:
        raise NotRecognized("its forward does not call its loss function")


def _stubbed(module: nn.Module, head: nn.Module, weight: Tensor, hidden: Tensor) -> Any:
    """Return a stand-in for the head or for a child without it, or a copy of a module that contains the head."""
    if module is head:
        return _Head(module, weight)
    if all(inner is not head for inner in module.modules()):
        return _Child(module, hidden)
    twin = object.__new__(type(module))  # calling a class of FSDP would build a module
    twin.__dict__ = {**module.__dict__, **nn.Module().__dict__}  # without hooks
    twin.__dict__ |= {name: module.__dict__[name] for name in ("_parameters", "_buffers", "training")}
    twin.__dict__.pop("forward", None)
    children = module._modules.items()
    twin._modules = {name: None if c is None else _stubbed(c, head, weight, hidden) for name, c in children}
    return twin
