"""The checks of experts, of routers and of losses."""

from __future__ import annotations

import torch
from support.fresh_memory import fresh_memory
from torch import Tensor

import rtkernels
from planted.judge import agrees, check, normal, sampled
from rtkernels import emulate
from rtkernels.ops.loss import cross_entropy_operators, cross_entropy_plan
from rtkernels.ops.moe import moe_index, moe_permute
from rtkernels.ops.moe.moe_index_layout import build
from rtkernels.ops.router import rms_norm_router as rms_norm_router_op
from rtkernels.ops.router import router_gemm, router_gemm_kernels, topk, topk_router
from rtkernels.ops.router.topk_router_plan import SOFTMAX

# ---- moe -------------------------------------------------------------------------------------------------------------


def _choices(tokens: int, top_k: int, experts: int) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)])


@check
def index_of_lists() -> None:
    agrees(moe_index.INDEX, _choices(40, 3, 8), 8, 3, 4, 200)  # more rows than experts fill


@check
def index_of_many_chunks() -> None:
    agrees(moe_index.INDEX, _choices(900, 2, 8), 8, 2, 4, 1840)


@check
def index_of_many_experts() -> None:
    agrees(moe_index.INDEX, _choices(100, 3, 64), 64, 3, 4, 500)


@check
def index_of_many_rounds() -> None:
    agrees(moe_index.INDEX, torch.arange(6000).view(3000, 2) * 7 % 8, 8, 2, 4, 6040)


@check
def index_of_maps() -> None:
    flags = torch.rand(40, 16, generator=torch.Generator().manual_seed(0)) < 0.15
    agrees(moe_index.INDEX, flags, 16, 3, 4, 200)


@check
def index_of_maps_in_zeros() -> None:
    with fresh_memory(0):
        index_of_maps()


@check
def row_ids() -> None:
    sampled("moe_index", 3)


@check
def permute_dropped() -> None:
    choices = _choices(6, 3, 5)
    choices[1, 2] = -1
    index = build(choices, 5, 4, 40)
    agrees(moe_permute.PERMUTE, normal(6, 16), index.rows, index.slots, None, None, None, place="sm_80")


@check
def permute_bulk() -> None:
    index = build(_choices(6, 5, 8), 8, 4, 60)
    agrees(moe_permute.PERMUTE, normal(6, 16), index.rows, index.slots, None, None, None)


@check
def unpermute_weighted() -> None:
    index = build(_choices(6, 3, 5), 5, 4, 40)
    agrees(moe_permute.UNPERMUTE, normal(40, 512), index.rows, normal(6, 3), None, None)


@check
def unpermute_backward() -> None:
    index = build(_choices(6, 10, 12), 12, 4, 100)
    given = (normal(6, 512), normal(100, 512, seed=1), index.rows, index.slots, normal(6, 10), None)
    agrees(moe_permute.UNPERMUTE_BWD, *given, True)


# ---- router ----------------------------------------------------------------------------------------------------------


@check
def router_gemm_deep() -> None:
    x, weight = normal(9, 1600).bfloat16(), normal(12, 1600, seed=1)
    agrees(router_gemm.FORWARD, x, weight, None, router_gemm_kernels.EXACT, place="sm_80")


@check
def router_gemm_forward() -> None:
    sampled("router_gemm", 0)


@check
def router_gemm_many_tiles() -> None:
    given = (normal(15, 12), normal(15, 1304, seed=1).bfloat16(), normal(12, 1304, seed=2))
    agrees(router_gemm.BACKWARD, *given, router_gemm_kernels.HIGH, True, False)


@check
def rms_norm_router() -> None:
    given = (normal(192, 1024).bfloat16(), None, normal(64, 1024, seed=1).bfloat16(), 1e-6, 0.0)
    agrees(rms_norm_router_op.FORWARD, *given, router_gemm_kernels.HIGH, False, "row")


@check
def topk_second_warp_lower() -> None:
    x = normal(3, 512)
    x[:, 256:] -= 20.0  # both of the largest two are in the first warp
    agrees(topk.FORWARD, x, 2, False)


@check
def topk_long_rows() -> None:
    agrees(topk.FORWARD, normal(3, 1000), 5, True)


@check
def topk_backward() -> None:
    x = normal(5, 48)
    agrees(topk.BACKWARD, x[:, :3].contiguous(), torch.topk(x, 3).indices, 48)


@check
def topk_router_dense() -> None:
    agrees(topk_router.FORWARD, normal(300, 40), None, 9, SOFTMAX, 1, 1, 1, 1.0, 1e-20, True, True)


@check
def router_losses() -> None:
    sampled("router_loss", 2, 3)


@check
def router_loss_bf16() -> None:
    x = normal(24, 100).bfloat16()
    with emulate():
        got = rtkernels.router_z_loss(x)
    torch.testing.assert_close(got, x.float().logsumexp(-1).square().mean(), rtol=1e-4, atol=0.0)


# ---- loss ------------------------------------------------------------------------------------------------------------


@check
def cross_entropy_all_ignored() -> None:
    labels = torch.full((6,), -100)
    agrees(cross_entropy_operators.FORWARD, normal(6, 40), labels, -100, 0.0, 0.0, 0.0, cross_entropy_plan.MEAN, False)


@check
def cross_entropy_backward() -> None:
    sampled("cross_entropy", 3)


@check
def cross_entropy_mean() -> None:
    sampled("cross_entropy", 0)


@check
def cross_entropy_few_rows() -> None:
    given = (normal(2, 24_000).bfloat16(), torch.tensor([3, 20_000]), -100, 0.0, 0.0, 0.0, cross_entropy_plan.MEAN)
    agrees(cross_entropy_operators.FORWARD, *given, False)


@check
def divergence_mean() -> None:
    sampled("divergence", 1)  # over the rows that count
