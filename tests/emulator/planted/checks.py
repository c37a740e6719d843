"""What the planted bugs must be caught by: small calls in the emulator, each against its reference.

A check raises an ``EmulatorError``, or an AssertionError if a result is wrong; without a bug it does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from contracts.samples import samples_of
from contracts.test_far_rows import CALLS as FAR_CALLS
from contracts.test_instructions import check_instructions
from support.far_rows import assert_finds_far_rows
from support.fresh_memory import fresh_memory
from torch import Tensor

import rtkernels
from rtkernels import emulate, emulator
from rtkernels.ops.act import glu
from rtkernels.ops.index import embedding, row_moves_operators
from rtkernels.ops.layout import transpose
from rtkernels.ops.loss import cross_entropy_operators, cross_entropy_plan
from rtkernels.ops.moe import moe_index, moe_permute
from rtkernels.ops.moe.moe_index_layout import build
from rtkernels.ops.multi import multi_adamw, multi_tensor
from rtkernels.ops.multi.reference import SQUARES
from rtkernels.ops.norm import group_rms_norm_gate, layer_norm, norm_fp8_operators, rms_norm
from rtkernels.ops.pointwise import inplace
from rtkernels.ops.quant import column_absmax, hadamard, quantize_fp8, smooth_quant
from rtkernels.ops.reduce import row_dot, softmax
from rtkernels.ops.rope import rope_operators
from rtkernels.ops.router import rms_norm_router as rms_norm_router_op
from rtkernels.ops.router import router_gemm, router_gemm_kernels, topk, topk_router
from rtkernels.ops.router.topk_router_plan import SOFTMAX

CHECKS: dict[str, Callable[[], None]] = {}
_TOLERANCE = {
    torch.float32: (1e-4, 1e-4),
    torch.float64: (1e-9, 1e-9),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (4e-3, 4e-3),
    torch.float8_e4m3fn: (0.15, 0.01),
    torch.float8_e5m2: (0.3, 0.01),
}
_F8 = torch.float8_e4m3fn


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check under its own name."""
    CHECKS[function.__name__] = function
    return function


def _cloned(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_cloned(item) for item in value)
    return value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [t for item in value for t in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def agrees(op: Any, *args: Any, place: str = "sm_90") -> None:
    """Check an operator in the emulator against its reference: results, and arguments that it writes over."""
    expected_args = _cloned(args)
    expected = op.reference(*expected_args)
    with emulate(place):
        got = op(*args)
    for a, b in zip(_tensors((got, args)), _tensors((expected, expected_args)), strict=True):
        if a.dtype in (_F8, torch.float8_e5m2):
            differ = int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
            assert differ <= a.numel() // 50, f"{differ} of {a.numel()} codes differ"
        if a.is_floating_point():
            relative, absolute = _TOLERANCE[a.dtype]
            torch.testing.assert_close(a.double(), b.double(), rtol=relative, atol=absolute, equal_nan=True)
        else:
            assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} integers differ"


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return fp32 numbers, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _samples(op: str, *which: int, place: str = "sm_90") -> None:
    for i, (torch_op, args) in enumerate(samples_of(op, "cpu")):
        if not which or i in which:
            agrees(torch_op, *args, place=place)


# ---- norm ------------------------------------------------------------------------------------------------------------


@check
def rms_norm_offset() -> None:
    agrees(rms_norm.FORWARD, normal(5, 48), normal(48), 1e-6, 1.0)


@check
def rms_norm_long_rows() -> None:
    agrees(rms_norm.FORWARD, normal(9, 2048), normal(2048), 1e-6, 0.0)


@check
def rms_norm_sum() -> None:
    agrees(rms_norm.ADD_FORWARD, normal(5, 48), normal(5, 48, seed=1), normal(48), 1e-6, 0.0)


@check
def rms_norm_backward() -> None:
    agrees(rms_norm.BACKWARD, normal(5, 48), normal(5, 48, seed=1), normal(48), None, 1e-6, 0.0, True, place="sm_80")


@check
def rms_norm_backward_bulk() -> None:
    agrees(rms_norm.BACKWARD, normal(600, 256), normal(600, 256, seed=1), normal(256), None, 1e-6, 0.0, True)


@check
def rms_norm_backward_groups() -> None:
    given = (normal(40, 512), normal(40, 512, seed=1), normal(512), None, 1e-6, 0.0, True)
    agrees(rms_norm.BACKWARD, *given, place="sm_80")


@check
def layer_norm_odd_rows() -> None:
    agrees(layer_norm.FORWARD, normal(9, 1001), normal(1001), normal(1001, seed=1), 1e-5, 0.0)


@check
def norm_fp8_rows() -> None:
    options = (None, None, None, None, 1e-6, 0.0, "row", False, "row", False, False)
    agrees(norm_fp8_operators.FORWARD, normal(3, 136), normal(136), *options)


@check
def gated_groups() -> None:
    agrees(group_rms_norm_gate.FORWARD, normal(7, 48), normal(7, 48, seed=1), normal(48), 3, 1e-6, "same")


# ---- act -------------------------------------------------------------------------------------------------------------


@check
def glu_odd_columns() -> None:
    agrees(glu.FORWARD, normal(5, 2 * 24), None, None, "silu")


@check
def glu_weighted_backward() -> None:
    agrees(glu.BACKWARD, normal(5, 24), normal(5, 24, seed=1), normal(5, 24, seed=2), normal(5), "gelu_erf", False)


@check
def glu_blocks_in_z() -> None:
    x, up, y = normal(60, 16), normal(60, 16, seed=1), torch.full((60, 16), torch.nan)
    with emulate():
        run = emulator.on_host(glu._FWD, ("fp32", "Silu", 4, 2))
        run((1, 2, 2), 32, (x, up, 0, y, 60, 16, 16, 16, 0, 2))
    torch.testing.assert_close(y, torch.nn.functional.silu(x) * up)


@check
def glu_far_rows() -> None:
    assert_finds_far_rows(FAR_CALLS["glu_gate"])


@check
def glu_fp8_both() -> None:
    _samples("glu_fp8", 0)


# ---- quant -----------------------------------------------------------------------------------------------------------


@check
def quantize_rows() -> None:
    x = normal(40, 512)
    x[1] = 0.0
    agrees(quantize_fp8.QUANTIZE, x.bfloat16(), "row", _F8, False, "row")


@check
def quantize_powers_of_two() -> None:
    agrees(quantize_fp8.QUANTIZE, normal(5, 64), "row", _F8, True, "row")


@check
def quantize_in_software() -> None:
    agrees(quantize_fp8.QUANTIZE, normal(8, 64) * torch.logspace(-6, 0, 64), "row", _F8, False, "row", place="sm_80")


@check
def quantize_tensor() -> None:
    x = normal(400, 256)
    x[-1, -1] = 50.0
    agrees(quantize_fp8.QUANTIZE, x[:, :250], "tensor", _F8, False, "row")
    agrees(quantize_fp8.QUANTIZE, x[:, 6:], "tensor", _F8, False, "row")


@check
def quantize_groups() -> None:
    agrees(quantize_fp8.QUANTIZE, normal(5, 136), "group", _F8, False, "row")


@check
def dequantize_blocks() -> None:
    q, scale = quantize_fp8.QUANTIZE.reference(normal(131, 136) * torch.logspace(0, 2, 136), "block", _F8, False, "row")
    agrees(quantize_fp8.DEQUANTIZE, q, scale, "block", _F8, torch.float32, "row")


@check
def column_maxima() -> None:
    agrees(column_absmax.ABSMAX, normal(201, 40), None, None)


@check
def hadamard_blocks() -> None:
    agrees(hadamard.TRANSFORM, normal(3, 64), 64, torch.float32)


@check
def smooth_experts() -> None:
    factors = normal(2, 16).abs() + 0.5
    agrees(smooth_quant.SMOOTH, normal(15, 16), factors, torch.arange(15, dtype=torch.int32) % 2, _F8, False, False)


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
    _samples("moe_index", 3)


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
    _samples("router_gemm", 0)


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
    _samples("router_loss", 2, 3)


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
    _samples("cross_entropy", 3)


@check
def cross_entropy_mean() -> None:
    _samples("cross_entropy", 0)


@check
def cross_entropy_few_rows() -> None:
    given = (normal(2, 24_000).bfloat16(), torch.tensor([3, 20_000]), -100, 0.0, 0.0, 0.0, cross_entropy_plan.MEAN)
    agrees(cross_entropy_operators.FORWARD, *given, False)


@check
def divergence_mean() -> None:
    _samples("divergence", 1)  # over the rows that count


# ---- reduce ----------------------------------------------------------------------------------------------------------


@check
def softmax_lengths() -> None:
    x = normal(15, 48)
    x[14], x[3, 0] = -torch.inf, torch.nan
    agrees(softmax.FORWARD, x, torch.arange(15) * 4 + 4, 1.0, False)


@check
def row_dot_odd_rows() -> None:
    agrees(row_dot.FORWARD, normal(5, 48), normal(5, 48, seed=1))


# ---- rope, index, layout, pointwise ----------------------------------------------------------------------------------


@check
def rope_odd_heads() -> None:
    angle = normal(5, 7)
    given = (normal(2, 5, 3, 30), None, "bshd", "bshd", 6, 14, 0, False, angle.cos(), angle.sin())
    agrees(rope_operators.FORWARD, *given, None, None, "", 0, 1, 1.0)


@check
def rope_heads() -> None:
    _samples("rope", 0)


@check
def qk_norm_rope_backward() -> None:
    _samples("qk_norm_rope", 1)


@check
def embedding_outside() -> None:
    agrees(embedding.FORWARD, normal(20, 16), torch.tensor([3, 25, -7, 19, 2**40]), 0)


@check
def embedding_backward() -> None:
    _samples("embedding", 2)


@check
def embedding_two_rounds() -> None:
    ids = torch.full((1500,), 3)
    agrees(embedding.BACKWARD, normal(1500, 4), ids, 5000, 0, embedding.NO_PADDING)


@check
def embedding_long_run() -> None:
    ids = torch.full((700,), 3)
    ids[::50] = 5
    agrees(embedding.BACKWARD, normal(700, 16), ids, 20, 0, embedding.NO_PADDING)


@check
def embedding_many_ids() -> None:
    ids = torch.randint(0, 90_000, (17_000,), generator=torch.Generator().manual_seed(0))
    agrees(embedding.BACKWARD, normal(17_000, 4), ids, 90_000, 0, embedding.NO_PADDING)


@check
def select_rows() -> None:
    agrees(row_moves_operators.SELECT, normal(12, 16), torch.tensor([3, -1, 11, 12, 0]), normal(12).abs())


@check
def sort_row_chunks() -> None:
    counts, order = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 3, 0, 2])  # chunk 2 is named twice
    agrees(row_moves_operators.CHUNKS, normal(12, 16), counts, order, None, False)


@check
def transpose_experts() -> None:
    agrees(transpose.EXPERTS, normal(600, 600).bfloat16(), torch.tensor([200, 0, 330]), 16)


@check
def transpose_matrices() -> None:
    agrees(transpose.TRANSPOSE, normal(3, 70, 48), 1, 2, 32)


@check
def scale_in_place() -> None:
    _samples("inplace", 1)


@check
def add_in_place() -> None:
    agrees(inplace.ADD, normal(3, 50), normal(3, 50, seed=1), None, 0.5, 2.0)


# ---- multi -----------------------------------------------------------------------------------------------------------


@check
def norms_of_large_tensors() -> None:
    """multi_finish by itself: two tensors of 256 chunks, each added up by the whole block."""
    chunks, table = 512, torch.zeros(2, 4, dtype=torch.int64)
    table[:, 0], table[1, 2] = 256 << 12, 256
    partial, out = torch.arange(chunks).double(), torch.zeros(3, dtype=torch.float64)
    with emulate():
        run = emulator.on_host(multi_tensor._FINISH, (SQUARES,))
        run(2, 1024, (table, partial, out, 2, 12, chunks, 1))
    assert out.tolist() == [partial.sum(), partial[:256].sum(), partial[256:].sum()]


@check
def norms_of_small_tensors() -> None:
    x = normal(100)
    agrees(multi_tensor.REDUCE, [x[1:3], x[5:90]], SQUARES, True, False)


@check
def clip_small_norm() -> None:
    agrees(multi_tensor.CLIP, [normal(100) * 1e-3], SQUARES, 5.0)


@check
def adamw_step() -> None:
    (op, args), *_ = multi_adamw.samples("cpu")
    agrees(op, *args)


# ---- instructions ----------------------------------------------------------------------------------------------------


@check
def instructions() -> None:
    check_instructions()
