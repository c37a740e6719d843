"""How operators work on the shards of a DTensor: sharding rules, registered once torch has DTensors."""

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
    """Declare how an operator works on shards; replicated tensors always work.

    Args:
        op: The operator.
        ways: Takes the arguments by name, with torch's tensor metadata, which has a shape, in place of tensors. Yields
            supported shardings: placements of all results, and of the arguments that are not replicated.
    """
    names = [argument.name for argument in op.overload._schema.arguments]
    results = len(op.overload._schema.returns)

    def rule(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Replicate

        tensors = [hasattr(arg, "placements") for arg in args]
        whole = [Replicate() if is_tensor else None for is_tensor in tensors]
        found: list[tuple[list[Any], list[Any]]] = [([Replicate()] * results, whole)]
        for outputs, given in ways(dict(zip(names, args, strict=True))):
            places = [given.get(name, other) for name, other in zip(names, whole, strict=True)]
            places = [place if is_tensor else None for place, is_tensor in zip(places, tensors, strict=True)]
            found.append((list(outputs), places))
        return found

    _pending.append((op.overload, rule))
    register_rules()  # compiled calls cannot do it later


def shard_rows(op: TorchOp, rows: Sequence[str], sums: int = 0) -> None:
    """Declare an operator whose rows, all but the last dimension, are independent of one another.

    Args:
        op: The operator. All other tensors must be replicated.
        rows: Names of the tensors with these rows; one of them is the first argument.
        sums: Number of results, the last ones, that are sums over rows: each process has the sums over its own rows,
            and torch adds them when they are used. All other results have the rows.
    """
    results = len(op.overload._schema.returns)

    def ways(args: dict[str, Any]) -> Iterator[Way]:
        from torch.distributed.tensor import Partial, Shard

        for dim in range(len(next(iter(args.values())).shape) - 1):
            yield [Shard(dim)] * (results - sums) + [Partial()] * sums, dict.fromkeys(rows, Shard(dim))

    shard(op, ways)


def register_rules() -> None:
    """Register the rules with torch once DTensors can exist. Plain eager calls never need them."""
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
    if t is None or type(t) in TENSOR_TYPES:  # Dynamo sees only these, and must not read sys.modules, which changes
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def local(t: Tensor) -> Tensor:
    """Return the local shard of a tensor, not a copy. Callers disable gradients."""
    return t.to_local() if is_sharded(t) else t
