"""Private functions of torch that the runtime needs, each with a fallback for a torch without it.

Plain eager calls go straight to the launcher, because the dispatcher would double the host time of a small op.
``torch.compile``, dispatch modes such as selective checkpointing, functorch transforms and tensor subclasses must see
the op in the dispatcher. So an operator checks four conditions, cheapest first: is Dynamo tracing (other tracers use a
dispatch mode), are all tensors of exactly these types, is a dispatch mode active, is a functorch transform active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_dynamo_compiling
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rtkernels.errors import ArgumentError

_autograd, _functorch = getattr(torch._C, "_autograd", None), getattr(torch._C, "_functorch", None)
dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: len(_get_current_dispatch_mode_stack()))
functorch_transform = getattr(_functorch, "peek_interpreter_stack", lambda: None)
is_legacy_batched = getattr(_functorch, "is_legacy_batchedtensor", lambda tensor: False)
jit_tracing_state = getattr(torch._C, "_get_tracing_state", lambda: None)
storage_uses = getattr(torch._C, "_storage_Use_Count", lambda storage: 2)  # 2: by a tensor and by who asks
top_saved_tensors_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None)
TensorGuards = getattr(torch._C._dynamo.guards, "TensorGuards", None)
forward_ad = torch.autograd.forward_ad  # ``_current_level`` is below 0 outside of forward-mode differentiation
forward_ad = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)
# Tells autograd that the tensors of a tuple were overwritten; torch's public function also takes a single tensor.
increment_versions = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
# Torch's public function of Python calls it.
deterministic = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})


def never(*tensors: Any) -> bool:
    """Match nothing."""
    return False


def same_tensors(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """Return a guard: a function that returns True for tensors like these, with the same absent ones and aliases.

    One comparison in C++ covers type, dtype, sizes, strides, device, ``requires_grad`` and the active dispatch keys,
    which a functorch transform changes. The guard never matches in a torch without the private class that it needs.
    """
    if TensorGuards is None:
        return never
    first: dict[int, int] = {}  # lists of parameters have thousands of tensors
    numbers = tuple(None if t is None else first.setdefault(id(t), i) for i, t in enumerate(tensors))
    there = [t for i, t in enumerate(tensors) if numbers[i] == i]
    sizes, strides = [list(t.shape) for t in there], [list(t.stride()) for t in there]
    check = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if len(there) == len(tensors) else _where(numbers)(check)


@functools.cache
def _where(numbers: tuple[int | None, ...]) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Return a function that wraps a guard, so that tensors must be None or be another one where they were."""
    names = [f"t{i}" for i in range(len(numbers))]
    others = [f"t{i} is {None if j is None else f't{j}'}" for i, j in enumerate(numbers) if i != j]
    there = ", ".join(name for i, name in enumerate(names) if numbers[i] == i)
    return eval(f"lambda check: lambda {', '.join(names)}: {' and '.join(others)} and check({there})")


# For all kinds of devices; unlike torch.autocast, it takes 1 us and does not empty the cache of cast weights, which
# torch.autocast does at the end of every use in a thread of autograd.
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: False)
no_autocast = getattr(torch._C, "_DisableAutocast", nullcontext)


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context in which torch computes in the dtypes that it is given, on this kind of device."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def is_batched(tensor: Tensor) -> bool:
    """Return True for a batch without memory: of gradients (``is_grads_batched``), or of ``torch.func.vmap``."""
    return is_legacy_batched(tensor) or (functorch_transform() is not None and _functorch.is_batchedtensor(tensor))


class Batch:
    """The dimension that makes tensors a batch, from one of them."""

    def __init__(self, tensor: Tensor) -> None:
        self._of = torch if is_legacy_batched(tensor) else _functorch
        levels = (_functorch.maybe_get_level(tensor),) if self._of is _functorch else range(1, 8)
        self._level = next((n for n in levels if not is_batched(self._of._remove_batch_dim(tensor, n, 1, 0))), 0)

    def __bool__(self) -> bool:
        """Return False for a batch of batches."""
        return self._level > 0

    def removed(self, tensor: Tensor) -> Tensor:
        """Return a tensor with memory, whose first dimension counts the batch."""
        return self._of._remove_batch_dim(tensor, self._level, 1, 0)

    def added(self, tensor: Tensor) -> Tensor:
        """Return a batch of what the first dimension of a tensor counts."""
        return self._of._add_batch_dim(tensor, 0, self._level)


def has_address(tensor: torch.Tensor) -> bool:
    """Return False for a tensor that is traced: by Dynamo, or as a fake by ``torch.export``."""
    if is_dynamo_compiling():
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def refuse_lazy(name: str, tensor: Tensor) -> None:
    """Raise an ArgumentError if a tensor is a lazy conjugate or negative, so that its memory has other values.

    Tensors that are only read are copied instead, by ``TorchOp`` or by the dispatcher.
    """
    if tensor.is_neg() or tensor.is_conj():
        what, remedy = ("negative", "neg") if tensor.is_neg() else ("conjugate", "conj")
        raise ArgumentError(
            f"{name} is a lazy {what}: its memory has other values; expected a tensor whose memory has its values "
            f"(call .resolve_{remedy}())"
        )


# In this context version counters do not change: the dispatcher runs kernels of in-place operators in it.
below_versions = torch._C._AutoDispatchBelowADInplaceOrView
