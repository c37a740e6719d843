"""How operators work on the shards of a DTensor: rules that torch is told when it has DTensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rtkernels.runtime.torch_private import TENSOR_TYPES

if TYPE_CHECKING:
    from rtkernels.runtime.operator.operator import TorchOp

# Placements of all results, and those of arguments by name.
Way = tuple[Sequence[Any], dict[str, Any]]
_pending: list[tuple[Any, Callable[..., Any]]] = []


def shard(op: TorchOp, ways: Callable[[dict[str, Any]], Iterable[Way]]) -> None:
    """Declare how an operator works on shards, besides on tensors that are whole everywhere.

    Args:
        op: The operator.
        ways: Gets its arguments by name, tensors as torch's descriptions of them, which have a shape. Gives ways that
            the tensors may lie: placements of all results, and those of arguments that are not whole everywhere.
    """
    names = [argument.name for argument in op.overload._schema.arguments]
    results = len(op.overload._schema.returns)

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Replicate

        tensors = [hasattr(arg, "placements") for arg in args]
        whole = [Replicate() if is_tensor else None for is_tensor in tensors]
        found: list[tuple[list[Any], list[Any]]] = [([Replicate()] * results, whole)]
        for made, given in ways(dict(zip(names, args, strict=True))):
            places = [given.get(name, other) for name, other in zip(names, whole, strict=True)]
            places = [place if is_tensor else None for place, is_tensor in zip(places, tensors, strict=True)]
            found.append((list(made), places))
        return found

    _pending.append((op.overload, rule))
    register_rules()  # calls that are compiled cannot do it later


def shard_rows(op: TorchOp, rows: Sequence[str], sums: int = 0) -> None:
    """Declare an operator whose rows, all but the last dimension, are independent of one another.

    Args:
        op: The operator. Its other tensors have to be whole everywhere.
        rows: Names of the tensors that have these rows; one of them is the first argument.
        sums: How many results, the last ones, are sums over rows: each process has those of its own rows, and they are
            added where they are used. The others have the rows.
    """
    results = len(op.overload._schema.returns)

    def ways(args: dict[str, Any]) -> Iterator[Way]:
        from torch.distributed.tensor import Partial, Shard

        for dim in range(len(next(iter(args.values())).shape) - 1):
            yield [Shard(dim)] * (results - sums) + [Partial()] * sums, dict.fromkeys(rows, Shard(dim))

    shard(op, ways)


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
