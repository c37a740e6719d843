"""Log-probabilities of DTensors: rows on several processes, a vocabulary on several processes, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rtkernels.ops.loss.cross_entropy_shards import _own, _vocabulary, placements_of_heads
from rtkernels.runtime.operator.sharding import is_sharded


def linear_logprob_of_shards(
    function: Callable[..., Any], hidden: Any, weight: Any, ids: Any, bias: Any, temperature: Any,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Return ``function(hidden, weight, ids, ...)`` where hidden or weight is a DTensor; results are DTensors.

    Hidden states may be sharded by rows, the weight over one dimension of the mesh by its vocabulary: where a dimension
    of the mesh shards both, hidden states are gathered along it.
    """
    from torch.distributed.tensor import DTensor

    mesh, hidden_at, weight_at, weight_grad = placements_of_heads(hidden, weight)
    more = options | _vocabulary(weight.shape, mesh, weight_at, 0)
    own_bias = None if bias is None else _own(bias, mesh, weight_at, weight_grad)
    if isinstance(temperature, torch.Tensor) or is_sharded(temperature):
        temperature = _own(temperature, mesh, hidden_at)
    found = function(
        _own(hidden, mesh, hidden_at), _own(weight, mesh, weight_at, weight_grad), _own(ids, mesh, hidden_at),
        bias=own_bias, temperature=temperature, **more,
    )  # fmt: skip

    def whole(t: torch.Tensor, shape: torch.Size) -> Any:
        strides = torch.empty(shape, dtype=t.dtype, device="meta").stride()
        return DTensor.from_local(t, mesh, hidden_at, run_check=False, shape=shape, stride=strides)

    if isinstance(found, torch.Tensor):
        return whole(found, ids.shape)
    return whole(found[0], ids.shape), *(whole(t, hidden.shape[:-1]) for t in found[1:])
