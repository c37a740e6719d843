"""fp8_linear on DTensors: every process multiplies its own shards, for column- and row-parallel layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.operator.sharding import is_sharded, local


def linear_of_shards(
    function: Callable[..., Tensor], x: Any, weight: Any, bias: Any, options: dict[str, Any]
) -> Tensor:
    """Return ``function(x, weight, bias, **options)`` of DTensors.

    A weight sharded by rows (output features) takes x whole and gives a result sharded by its last dimension; one
    sharded by columns takes x so sharded and gives parts of sums; a whole one takes x sharded by any other dimension.
    x is redistributed where it lies otherwise. Shards are quantised by themselves.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not is_sharded(x) or not is_sharded(weight) or (bias is not None and not is_sharded(bias)):
        kinds = ", ".join(f"{name} is a {type(t).__name__}" for name, t in (("x", x), ("weight", weight)))
        raise ArgumentError(f"{kinds}; expected x, weight and bias to be DTensors if one of them is")
    if options["smooth"] is not None:
        raise ArgumentError("recipe 'smooth' got DTensors; expected plain tensors, or another recipe")
    mesh, last = weight.device_mesh, x.dim() - 1
    x_at, x_grad, w_at, w_grad, b_at, b_grad, y_at = ([] for _ in range(7))
    for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
        if of_weight == Shard(0):
            found = (Replicate(), Partial(), Shard(0), Shard(0), Shard(0), Shard(0), Shard(last))
        elif of_weight == Shard(1):
            found = (Shard(last), Shard(last), Shard(1), Shard(1), Replicate(), Replicate(), Partial())
        elif isinstance(of_x, Shard) and of_x.dim != last:
            found = (of_x, of_x, Replicate(), Partial(), Replicate(), Partial(), of_x)
        else:
            found = (Replicate(),) * 7
        for places, place in zip((x_at, x_grad, w_at, w_grad, b_at, b_grad, y_at), found, strict=True):
            places.append(place)

    def own(t: Any, places: list[Any], grads: list[Any]) -> Tensor:
        return t.redistribute(mesh, places).to_local(grad_placements=grads)

    sums = any(place == Partial() for place in y_at)
    own_bias = None if bias is None or sums else own(bias, b_at, b_grad)
    main_grad = options["main_grad"]
    options = options | {"main_grad": None if main_grad is None else local(main_grad)}
    y = function(own(x, x_at, x_grad), own(weight, w_at, w_grad), own_bias, **options)
    shape = (*x.shape[:-1], weight.shape[0])
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    y = DTensor.from_local(y, mesh, y_at, run_check=False, shape=shape, stride=tuple(strides))
    return y if bias is None or own_bias is not None else y + bias
