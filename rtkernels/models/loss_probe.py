"""Test whether a model's forward passes the logits of its head to its loss function, at most scaled or capped.

The forward is called with labels on a twin of the model. Its children are stand-ins that return hidden states without
values, its head returns lazy logits that must not be computed, and its loss function records its arguments. Only the
model's own code runs, so this works on any device and for any size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.models.lazy_logits import LazyLogits
from rtkernels.models.probe import NotRecognized, Raised, probing

_SHAPE = (2, 3)  # sequences, tokens


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
