"""Where routed tokens go: the index that the MoE permutation uses, built on the device from what a router gives."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.moe import moe_index_layout as layout
from rtkernels.ops.moe.moe_index_layout import MoeIndex, max_rows
from rtkernels.ops.moe.moe_index_plan import KERNELS, check, check_map, is_map, plan_index, plan_map
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Matching, Within, check_integer
from rtkernels.runtime.operator.declared import Dense, Operator
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op

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


@public(recent=False)
def moe_rows(tokens: int, top_k: int, num_experts: int, multiple_of: int = 1) -> int:
    """Return the largest number of rows, including pad rows, that any routing of the tokens can need.

    This is the default number of rows of :func:`moe_index`, and the size that fixed buffers (for a CUDA graph, for
    example) need. Callers that know a smaller number or limit pass it as `rows` instead.

    Args:
        tokens: Number of tokens.
        top_k: Largest number of experts of a token.
        num_experts: Number of experts.
        multiple_of: Every expert's rows are padded to a multiple of this.

    Returns:
        The number of rows.
    """
    given = {"tokens": tokens, "top_k": top_k, "num_experts": num_experts, "multiple_of": multiple_of}
    for name, size in given.items():
        check_integer(name, size)
    return max_rows(tokens, top_k, num_experts, multiple_of)


@public(options=dict.fromkeys(("num_experts", "top_k", "multiple_of"), Within("int")))
def moe_index(
    routing: Tensor, num_experts: int | None = None, *, top_k: int | None = None, multiple_of: int = 1,
    rows: int | None = None,
) -> MoeIndex:  # fmt: skip
    """Assign a row to every choice of an expert, sorted by expert and within an expert by token.

    Runs as two kernels without synchronisation, so it can be captured in a CUDA graph. The same routing always gives
    the same index. A choice is dropped if there are not enough rows (`rows`), if the expert does not exist, or if a
    token of a routing map has more than `top_k` experts. Dropped choices have row -1, and the result has their number.
    A choice of -1 means no expert: it has no row and is not counted as dropped. If a token names an expert twice, it
    gets two rows.

    Not differentiable: it moves no data.

    Args:
        routing: Experts of each token, ``[tokens, top_k]`` int32 or int64; or a routing map ``[tokens, experts]``, bool
            or uint8 (nonzero means set), where choice j is the token's j-th expert. Any object with ``__dlpack__`` is
            accepted; results are then of the same kind.
        num_experts: Number of experts, 1 to 4096. Optional with a routing map.
        top_k: Largest number of experts of a token in a routing map. Default: all. A smaller number is faster and makes
            the index smaller.
        multiple_of: Every expert's rows are padded to a multiple of this.
        rows: Number of rows: an exact number or an upper limit. Default: the result of :func:`moe_rows`, with which no
            choice is dropped for lack of rows.

    Returns:
        A :class:`MoeIndex`. Pad rows, including those after the last expert, have slot -1.
    """
    tokens, width = routing.shape if routing.dim() == 2 else (0, 0)
    experts = num_experts
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


_MAP = Matching((), "routing_map.dim() == 2", "[tokens, experts]")


@public(options={"routing_map": _MAP, "multiple_of": Within("int")})
def moe_row_id_map(
    routing_map: Tensor, multiple_of: int = 1, rows: int | None = None, *, out: tuple[Tensor | None, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Assign a row to every routed (token, expert) pair, as a dense map; sorted by expert, then by token.

    Mask-driven permutations take this form; :func:`moe_index` returns the same rows as a compact list. Runs as two
    kernels without synchronisation.

    Args:
        routing_map: ``[tokens, experts]``, bool or uint8; nonzero means set. Up to 4096 experts. Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        multiple_of: Every expert's rows are padded to a multiple of this.
        rows: Number of rows; pairs that do not fit get no row. Default: all pairs have one.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(map, counts, offsets)``, all int32: the map ``[tokens, experts]`` with -1 for pairs without a row; the number
        of tokens of each expert that have a row, ``[experts]``; the first row of each expert, ``[experts + 1]``, with
        the number of used rows as last entry.
    """
    if rows is None:
        tokens, experts = routing_map.shape
        rows = max_rows(tokens, experts, experts, max(multiple_of, 1))
    return ROW_ID_MAP.call(routing_map, multiple_of, rows)


OP = Op("moe_index", public=("moe_index", "moe_row_id_map", "moe_rows"), kernels=KERNELS, torch_ops=(INDEX, ROW_ID_MAP))
