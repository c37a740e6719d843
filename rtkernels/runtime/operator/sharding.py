"""How operators work on the shards of a DTensor: rules that torch is told when it has DTensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rtkernels.runtime.torch_private import TENSOR_TYPES

if TYPE_CHECKING:
    from rtkernels.runtime.operator.operator import TorchOp

_pending: list[tuple[Any, Callable[..., Any]]] = []


def shard_rows(op: TorchOp, rows: Sequence[str], sums: int = 0) -> None:
    """Declare an operator whose rows, all but the last dimension, are independent of one another.

    Args:
        op: The operator. Its other tensors have to be whole everywhere.
        rows: Names of the tensors that have these rows; one of them is the first argument.
        sums: How many results, the last ones, are sums over rows: each process has those of its own rows, and they are
            added where they are used. The others have the rows.
    """
    names = [argument.name for argument in op.overload._schema.arguments]
    results = len(op.overload._schema.returns)

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Partial, Replicate, Shard

        def placements(of_rows: Any, of_sums: Any) -> tuple[list[Any], list[Any]]:
            given = [
                None if not hasattr(arg, "placements") else of_rows if name in rows else Replicate()
                for name, arg in zip(names, args, strict=True)
            ]
            return [of_rows] * (results - sums) + [of_sums] * sums, given

        sharded = [placements(Shard(dim), Partial()) for dim in range(len(args[0].shape) - 1)]
        return [placements(Replicate(), Replicate()), *sharded]

    _pending.append((op.overload, rule))
    register_rules()  # calls that are compiled cannot do it later


def register_rules() -> None:
    """Tell torch the rules, unless it cannot have made a DTensor yet. Plain eager calls never need them."""
    if not _pending or "torch.distributed.tensor" not in sys.modules:
        return
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # torch 2.4
        return
    while _pending:
        overload, rule = _pending.pop()
        register_sharding(overload)(rule)


def is_sharded(t: Any) -> bool:
    """Return True for a DTensor."""
    if type(t) in TENSOR_TYPES:  # Dynamo, which sees these alone, must not look at a table that others change
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """Return the part of a tensor that this process has: its memory, not a copy. Callers are under ``no_grad``."""
    return t.to_local() if is_sharded(t) else t
