"""May a call skip the torch dispatcher?

Plain eager calls go straight to the launcher: the dispatcher would double the host time of a small op. Everything
that wants to see the op (``torch.compile``, dispatch modes such as selective checkpointing, functorch transforms,
tensor subclasses) must find it in the dispatcher. The private torch functions used for that are all here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

try:
    from torch._C import _len_torch_dispatch_stack as _dispatch_modes
except ImportError:  # pragma: no cover - a torch without this private name
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    def _dispatch_modes() -> int:
        return len(_get_current_dispatch_mode_stack())


try:
    from torch._C._functorch import peek_interpreter_stack as _functorch_transform
except ImportError:  # pragma: no cover

    def _functorch_transform() -> Any:
        return None


TENSOR_TYPES = frozenset({Tensor, torch.nn.Parameter})
_PLAIN_TYPES = TENSOR_TYPES | {float, int, bool, str, type(None), torch.dtype}
_only_plain = _PLAIN_TYPES.issuperset


def plain(args: tuple[Any, ...]) -> bool:
    """Return True if nothing but the launcher needs to see a call with these arguments."""
    # Tracers other than Dynamo (export, make_fx, AOT) run under a dispatch mode.
    return (
        not is_dynamo_compiling()
        and _only_plain(map(type, args))
        and not _dispatch_modes()
        and _functorch_transform() is None
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return True if autograd wants a node for a call with these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
