"""Where routed tokens go: the index that the MoE permutation uses, built on the device from what a router gives."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.moe import moe_index_layout as layout
from rtkernels.ops.moe.moe_index_layout import MoeIndex, max_rows
from rtkernels.ops.moe.moe_index_plan import KERNELS, check, check_map, is_map, plan_index, plan_map
from rtkernels.ops.shared.redirected import redirected
from rtkernels.runtime.operator.arguments import an_integer
from rtkernels.runtime.operator.declared import Dense, Operator
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.replayed import replayed

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _listed(routing_map: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the first `top_k` experts of each token, -1 where it has fewer, and how many were left out."""
    flags = routing_map != 0
    choice = flags.cumsum(1) - 1
    kept = flags & (choice < top_k)
    tokens, experts = flags.shape
    result = torch.full((tokens, top_k + 1), -1, dtype=torch.int32, device=flags.device)
    numbers = torch.arange(experts, dtype=torch.int32, device=flags.device).expand(tokens, experts)
    result.scatter_(1, torch.where(kept, choice, top_k), torch.where(kept, numbers, -1))
    return result[:, :top_k], (flags & ~kept).sum()


def _reference_index(routing: Tensor, experts: int, top_k: int, multiple_of: int, rows: int) -> tuple[Tensor, ...]:
    if not is_map(routing.dtype):
        return tuple(layout.build(routing, experts, multiple_of, rows))
    choices, left_out = _listed(routing, top_k)
    index = layout.build(choices, experts, multiple_of, rows)
    return tuple(index._replace(dropped=(index.dropped + left_out).to(torch.int32)))


def _reference_map(routing_map: Tensor, multiple_of: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    flags = routing_map != 0
    experts = torch.arange(flags.shape[1], dtype=torch.int64, device=flags.device)
    index = layout.build(torch.where(flags, experts, -1), flags.shape[1], multiple_of, rows)
    return index.rows, index.counts, index.offsets


def _outputs(routing, experts, top_k, rows):
    tokens = routing.shape[0]
    shapes = (tokens, top_k), (tokens, top_k), (rows,), (experts,), (experts + 1,), ()
    return tuple(Memory(shape, torch.int32) for shape in shapes)


def _map_outputs(routing_map):
    tokens, experts = routing_map.shape
    return tuple(Memory(shape, torch.int32) for shape in ((tokens, experts), (experts,), (experts + 1,)))


INDEX = Operator(
    "moe_index", (Dense("routing", None),), options="SymInt experts, SymInt top_k, SymInt multiple_of, SymInt rows",
    results="row_of expert_of slots counts offsets dropped", outputs=_outputs, plan=plan_index,
    reference=_reference_index, check=check, plans_empty=True,
)  # fmt: skip
ROW_ID_MAP = Operator(
    "moe_row_id_map", (Dense("routing_map", None),), options="SymInt multiple_of, SymInt rows",
    results="ids counts offsets", outputs=_map_outputs, plan=plan_map, reference=_reference_map, check=check_map,
    plans_empty=True,
)  # fmt: skip


def moe_rows(tokens: int, top_k: int, num_experts: int, multiple_of: int = 1) -> int:
    """Return the most rows, pad rows included, that routed tokens can need, however they are routed.

    That is how many rows :func:`moe_index` makes room for by default, and what buffers of fixed size (in a CUDA graph,
    say) have to hold. Callers that know a smaller number, exact or a limit, pass it as `rows` instead.

    Args:
        tokens: Number of tokens.
        top_k: The most experts of a token.
        num_experts: Number of experts.
        multiple_of: Every expert's rows are padded to a multiple of this.

    Returns:
        The number of rows.
    """
    given = {"tokens": tokens, "top_k": top_k, "num_experts": num_experts, "multiple_of": multiple_of}
    for name, size in given.items():
        an_integer(name, size)
    return max_rows(tokens, top_k, num_experts, multiple_of)


@replayed
def moe_index(
    routing: Tensor, num_experts: int | None = None, *, top_k: int | None = None, multiple_of: int = 1,
    rows: int | None = None,
) -> MoeIndex:  # fmt: skip
    """Give every choice of an expert its row: sorted by expert, inside an expert by token.

    Runs as two kernels, without waiting for the device: the call can be captured in a CUDA graph. The same routing
    always gives the same index. Choices are dropped where there is no room (``rows``), where the expert does not exist,
    and where a token of a routing map has more than `top_k` experts; how many is in the result, and their rows are -1.
    -1 is a choice not made: it has no row and counts nowhere. An expert that a token names twice gets two rows.

    Not differentiable: it moves no data.

    Args:
        routing: Experts of each token, ``[tokens, top_k]`` int32 or int64; or a routing map ``[tokens, experts]``, bool
            or uint8 (anything but 0 is set), where choice j is the token's j-th expert. Any object with ``__dlpack__``
            is accepted; results are then of the same kind.
        num_experts: Number of experts, 1 to 4096. May be left out with a routing map.
        top_k: The most experts a token of a routing map may have; all by default. Smaller is faster, and the index
            smaller.
        multiple_of: Every expert's rows are padded to a multiple of this.
        rows: Number of rows to make room for: an exact number or a limit that the caller knows. By default what
            :func:`moe_rows` gives, and nothing is dropped for want of rows.

    Returns:
        A :class:`MoeIndex`. Pad rows, those past the last expert's included, have slot -1.
    """
    if not isinstance(routing, Tensor):
        return MoeIndex(*interop.call_with(moe_index, locals()))
    tokens, width = routing.shape if routing.dim() == 2 else (0, 0)
    an_integer("multiple_of", multiple_of)
    top_k = None if top_k is None else an_integer("top_k", top_k)
    experts = None if num_experts is None else an_integer("num_experts", num_experts)
    if is_map(routing.dtype):
        experts = width if experts is None else experts
        choices = per_token = experts if top_k is None else top_k
    else:
        if experts is None:
            raise ArgumentError("num_experts is None; expected the number of experts, as routing is a list of them")
        choices = width if top_k is None else top_k
        tokens, per_token = tokens * choices, 1  # a token may name an expert twice: more choices than experts
    if rows is None:
        rows = max_rows(tokens, per_token, experts, max(multiple_of, 1))
    return MoeIndex(*INDEX.call(routing, experts, choices, multiple_of, rows))


def moe_row_id_map(
    routing_map: Tensor, multiple_of: int = 1, rows: int | None = None, *, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Give every routed (token, expert) pair its row, as a dense map: sorted by expert, inside an expert by token.

    The form that permutations driven by a mask take; :func:`moe_index` gives the same rows as a compact list. Runs as
    two kernels, without waiting for the device.

    Args:
        routing_map: ``[tokens, experts]``, bool or uint8; anything but 0 is set. Up to 4096 experts. Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        multiple_of: Every expert's rows are padded to a multiple of this.
        rows: Pairs whose row would not be below this get none. By default all have one.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(map, counts, offsets)``, all int32: the map ``[tokens, experts]`` with -1 where there is no row; tokens of
        each expert that have a row ``[experts]``; the first row of each expert ``[experts + 1]``, of which the last
        entry is the number of rows in use.
    """
    if out is not None or not isinstance(routing_map, Tensor):
        return redirected(moe_row_id_map, locals())
    an_integer("multiple_of", multiple_of)
    if routing_map.dim() != 2:
        raise ArgumentError(f"routing_map has shape {tuple(routing_map.shape)}; expected [tokens, experts]")
    if rows is None:
        tokens, experts = routing_map.shape
        rows = max_rows(tokens, experts, experts, max(multiple_of, 1))
    return ROW_ID_MAP.call(routing_map, multiple_of, rows)


OP = Op("moe_index", public=("moe_index", "moe_row_id_map", "moe_rows"), kernels=KERNELS, torch_ops=(INDEX, ROW_ID_MAP))
