"""Private functions of torch that the runtime needs, each with what to do where a torch does not have it.

Plain eager calls go straight to the launcher: the dispatcher would double the host time of a small op. Everything
that wants to see the op (``torch.compile``, dispatch modes such as selective checkpointing, functorch transforms,
tensor subclasses) must find it in the dispatcher. An operator asks four questions, cheapest first: is Dynamo tracing
(other tracers run under a dispatch mode), are all tensors of exactly these types, is a dispatch mode on, is a
functorch transform on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
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


# Tells autograd that tensors of a tuple were overwritten; torch's own function for it also takes a single one.
increment_versions = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})


def never(*tensors: Any) -> bool:
    """Match nothing."""
    return False


def same_tensors(tensors: Sequence[Tensor | None]) -> Callable[..., bool]:
    """Return a function that says whether it is given tensors just like these, and None for None.

    One comparison in C++ tells type, dtype, sizes, strides, device, ``requires_grad`` and the dispatch keys in effect,
    which a functorch transform changes. Without the private class of torch that it needs it never matches.
    """
    if TensorGuards is None:
        return never
    there = [t for t in tensors if t is not None]
    sizes, strides = [list(t.shape) for t in there], [list(t.stride()) for t in there]
    check = TensorGuards(*there, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check if len(there) == len(tensors) else _with_absent(tuple(t is None for t in tensors))(check)


@functools.cache
def _with_absent(absent: tuple[bool, ...]) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Return what makes a comparison of all tensors of one that wants None in the places that are `absent`."""
    names = [f"t{i}" for i in range(len(absent))]
    none = [f"{name} is None" for name, missing in zip(names, absent, strict=True) if missing]
    there = ", ".join(name for name, missing in zip(names, absent, strict=True) if not missing)
    return eval(f"lambda check: lambda {', '.join(names)}: {' and '.join(none)} and check({there})")


def refuse_lazy(name: str, tensor: Tensor) -> None:
    """Raise an ArgumentError if the memory of a tensor holds the opposite of its values.

    Where it is only read, a copy is made instead: by ``TorchOp``, or by the dispatcher.
    """
    if tensor.is_neg() or tensor.is_conj():
        what, remedy = ("negative", "neg") if tensor.is_neg() else ("conjugate", "conj")
        raise ArgumentError(
            f"{name} is a lazy {what}: its memory holds other values; expected a tensor whose memory holds its own "
            f"(call .resolve_{remedy}())"
        )


# Inside of this no version counter rises: where the dispatcher runs kernels of in-place operators.
below_versions = torch._C._AutoDispatchBelowADInplaceOrView


class _NumberCall(threading.local):
    call: Any = None  # a function, its arguments and keywords; then what it returned


_number_call = _NumberCall()


def with_numbers_as_tensors(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a boxed kernel with Python numbers in the places of tensors.

    They become 0-d tensors that count as numbers in type promotion, as torch makes them of ``x + 2``. Python cannot
    make such tensors itself, and torch converts numbers to them only while an operator of aten or prims is called from
    Python: so the kernel is called inside of one of those, which is defined here.
    """
    _number_call.call = function, args, kwargs
    try:
        _number_operator()()
        return _number_call.call
    finally:
        _number_call.call = None


def _number_operator() -> Callable[[], None]:
    with _defining:  # once: the dispatcher refuses a second definition, and a cache alone lets two threads through
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
_libraries: list[Any] = []  # which last as long as they are referred to
