"""Private functions of torch that the runtime needs, each with a fallback for a torch without it.

Plain eager calls go straight to the launcher, because the dispatcher would double the host time of a small op.
``torch.compile``, dispatch modes such as selective checkpointing, functorch transforms and tensor subclasses must see
the op in the dispatcher. So an operator checks four conditions, cheapest first: is Dynamo tracing (other tracers use a
dispatch mode), are all tensors of exactly these types, is a dispatch mode active, is a functorch transform active.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_dynamo_compiling

from rtkernels.errors import ArgumentError

try:
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
except ImportError:  # pragma: no cover - a torch without this private name
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def dispatch_modes() -> int:
        return len(_get_current_dispatch_mode_stack())


try:
    from torch._C._functorch import peek_interpreter_stack as functorch_transform
except ImportError:  # pragma: no cover

    def functorch_transform() -> Any:
        return None


try:
    from torch._C._functorch import is_legacy_batchedtensor as is_legacy_batched
except ImportError:  # pragma: no cover

    def is_legacy_batched(t: Tensor) -> bool:
        return False


try:
    from torch._C import _get_tracing_state as jit_tracing_state
except ImportError:  # pragma: no cover

    def jit_tracing_state() -> Any:
        return None


try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # pragma: no cover
    TensorGuards = None

try:
    from torch.autograd import forward_ad

    forward_ad._current_level  # noqa: B018
except (ImportError, AttributeError):  # pragma: no cover

    class forward_ad:
        _current_level = -1


# Tells autograd that the tensors of a tuple were overwritten; torch's public function also takes a single tensor.
increment_versions = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
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


def without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context in which torch computes in the dtypes that it is given, on this kind of device."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


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


class _NumberCall(threading.local):
    call: Any = None  # a function with its arguments and keywords; afterwards its result


_number_call = _NumberCall()


def with_numbers_as_tensors(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a boxed kernel with Python numbers in place of tensors.

    They become 0-d tensors that count as numbers in type promotion, as in ``x + 2``. Python code cannot create such
    tensors, and torch converts numbers to them only while Python calls an operator of aten or prims. So the kernel is
    called inside such an operator, which is defined here.
    """
    _number_call.call = function, args, kwargs
    try:
        _number_operator()()
        return _number_call.call
    finally:
        _number_call.call = None


def _number_operator() -> Callable[[], None]:
    with _defining:  # a second definition is an error, and a cache alone would allow two threads to define it
        return _defined_number_operator()


@functools.cache
def _defined_number_operator() -> Callable[[], None]:
    library = torch.library.Library("prims", "FRAGMENT")
    library.define("rtkernels_numbers() -> ()")

    def run() -> None:
        function, args, kwargs = _number_call.call
        _number_call.call = function(*args, **kwargs)

    library.impl("rtkernels_numbers", run, "CompositeExplicitAutograd")
    _libraries.append(library)
    return torch.ops.prims.rtkernels_numbers.default._op


_defining = threading.Lock()
_libraries: list[Any] = []  # kept alive, because definitions end with their library
