"""Benchmark rows of ``topk_router``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.router.topk_router import BACKWARD, FORWARD, topk_router
from rtkernels.ops.router.topk_router_plan import RENORMALIZE, SCORE_FIRST, SOFTMAX


def _torch_groups(logits, k, bias, num_groups, top_groups, scale):
    """Group-limited sigmoid routing as models write it: dense probabilities, map, counts."""
    s = torch.sigmoid(logits)
    key = s + bias
    grouped = key.unflatten(-1, (num_groups, -1))
    best = grouped.topk(k // top_groups, -1).values.sum(-1).topk(top_groups, -1).indices
    mask = torch.zeros_like(grouped[..., 0]).scatter(-1, best, 1.0).bool()
    key = grouped.masked_fill(~mask.unsqueeze(-1), -torch.inf).flatten(-2)
    chosen = key.topk(k, -1).indices
    routing_map = torch.zeros_like(s).scatter(-1, chosen, 1.0).bool()
    s = s * routing_map
    return s / (s.sum(-1, keepdim=True) + 1e-20) * scale, routing_map, routing_map.sum(0)


def _torch_groups_bwd(dy, logits, indices, routing_map, scale):
    s = torch.sigmoid(logits)
    m = routing_map.to(s.dtype)
    z = (s * m).sum(-1, keepdim=True) + 1e-20
    return scale * m * s * (1 - s) / z * (dy - (s * dy * m).sum(-1, keepdim=True) / z)


def _torch_softmax(logits, k):
    values, indices = torch.softmax(logits, -1).topk(k, -1)
    counts = torch.zeros(logits.shape[-1], dtype=torch.int32, device=logits.device)
    ones = torch.ones_like(indices, dtype=torch.int32).flatten()
    return values / values.sum(-1, keepdim=True), indices, counts.scatter_add(0, indices.flatten(), ones)


def softmax_row(tokens: int, experts: int, k: int) -> Row:
    """Return the row of softmax, top-k and renormalisation of a size."""
    return Row(
        name="softmax_router_fwd",
        shape=f"{tokens}x{experts}k{k}",
        make=lambda device, g: {"logits": torch.randn(tokens, experts, device=device, generator=g), "k": k},
        ours=lambda logits, k: FORWARD(
            logits, None, k, SCORE_FIRST | RENORMALIZE | SOFTMAX, 1, 1, 1, 1.0, 1e-20, False, False
        )[:3],
        torch=_torch_softmax,
        bytes=tokens * (4 * experts + 8 * k) + 4 * experts,
    )


def rows() -> Iterator[Row]:
    tokens = 8192
    mode = SCORE_FIRST | RENORMALIZE

    def normal(device: str, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    for experts, k, groups, kept in ((256, 8, 32, 4), (256, 8, 8, 4)):
        n = tokens * experts

        def make(device, g, *, experts=experts, k=k, groups=groups, kept=kept) -> dict[str, Any]:
            bias = normal(device, g, experts)
            return {
                "logits": normal(device, g, tokens, experts), "k": k, "bias": bias, "num_groups": groups,
                "top_groups": kept, "scale": 2.5,
            }  # fmt: skip

        def ours(logits, k, bias, num_groups, top_groups, scale):
            results = FORWARD(
                logits, bias, k, mode, num_groups, top_groups, k // top_groups, scale, 1e-20, True, True
            )  # fmt: skip
            return results[3], results[4], results[2]

        yield Row(
            name="group_topk_fwd",
            shape=f"{tokens}x{experts}k{k}g{groups}of{kept}",
            make=make,
            ours=ours,
            torch=_torch_groups,
            bytes=n * 9,
        )
        if groups != 32:
            continue

        def make_bwd(device, g, *, make=make) -> dict[str, Any]:
            inputs = make(device, g)
            routing = topk_router(
                inputs["logits"], inputs["k"], score="sigmoid", bias=inputs["bias"], num_groups=inputs["num_groups"],
                top_groups=inputs["top_groups"], routing_map=True,
            )  # fmt: skip
            dy = normal(device, g, *inputs["logits"].shape)
            found = {"indices": routing.indices, "routing_map": routing.routing_map}
            return {"dy": dy, "logits": inputs["logits"], **found, "scale": inputs["scale"]}

        yield Row(
            name="group_topk_bwd",
            shape=f"{tokens}x{experts}k{k}g{groups}of{kept}",
            make=make_bwd,
            ours=lambda dy, logits, indices, routing_map, scale: BACKWARD(
                logits, indices, None, dy, mode, scale, 1e-20
            ),
            torch=_torch_groups_bwd,
            bytes=n * 13,
            no_graph="the row has no bias, which the forward needs",
        )
    for experts, k in ((256, 8), (128, 8), (64, 6), (8, 2)):
        yield softmax_row(tokens, experts, k)
