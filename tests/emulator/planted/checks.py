"""What the planted bugs must be caught by: small calls in the emulator, each against its reference.

A check raises an ``EmulatorError``, or an AssertionError if a result is wrong; without a bug it does neither.
Those of routing and losses are in ``checks_routing.py``.
"""

from __future__ import annotations

import torch
from contracts.samples.multi.multi_tensor import adamw_samples
from contracts.test_far_rows import CALLS as FAR_CALLS
from contracts.test_instructions import check_instructions
from support.far_rows import assert_finds_far_rows

from planted.judge import F8, agrees, check, normal, sampled
from rtkernels import emulate, emulator
from rtkernels.ops.act import glu, glu_plan
from rtkernels.ops.index import embedding, row_moves_operators
from rtkernels.ops.layout import transpose
from rtkernels.ops.multi import multi_tensor
from rtkernels.ops.multi.reference import SQUARES
from rtkernels.ops.norm import group_rms_norm_gate, layer_norm, norm_fp8_operators, rms_norm
from rtkernels.ops.pointwise import inplace
from rtkernels.ops.quant import column_absmax, hadamard, quantize_fp8, smooth_quant
from rtkernels.ops.reduce import row_dot, softmax
from rtkernels.ops.rope import rope_operators

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
        run = emulator.on_host(glu_plan._FWD, ("fp32", "Silu", 4, 2))
        run((1, 2, 2), 32, (x, up, 0, y, 60, 16, 16, 16, 0, 2, float("inf")))
    torch.testing.assert_close(y, torch.nn.functional.silu(x) * up)


@check
def glu_far_rows() -> None:
    assert_finds_far_rows(FAR_CALLS["glu_gate"])


@check
def glu_fp8_both() -> None:
    sampled("glu_fp8", 0)


# ---- quant -----------------------------------------------------------------------------------------------------------


@check
def quantize_rows() -> None:
    x = normal(40, 512)
    x[1] = 0.0
    agrees(quantize_fp8.QUANTIZE, x.bfloat16(), "row", F8, False, "row")


@check
def quantize_powers_of_two() -> None:
    agrees(quantize_fp8.QUANTIZE, normal(5, 64), "row", F8, True, "row")


@check
def quantize_in_software() -> None:
    agrees(quantize_fp8.QUANTIZE, normal(8, 64) * torch.logspace(-6, 0, 64), "row", F8, False, "row", place="sm_80")


@check
def quantize_tensor() -> None:
    x = normal(400, 256)
    x[-1, -1] = 50.0
    agrees(quantize_fp8.QUANTIZE, x[:, :250], "tensor", F8, False, "row")
    agrees(quantize_fp8.QUANTIZE, x[:, 6:], "tensor", F8, False, "row")


@check
def quantize_groups() -> None:
    agrees(quantize_fp8.QUANTIZE, normal(5, 136), "group", F8, False, "row")


@check
def dequantize_blocks() -> None:
    q, scale = quantize_fp8.QUANTIZE.reference(normal(131, 136) * torch.logspace(0, 2, 136), "block", F8, False, "row")
    agrees(quantize_fp8.DEQUANTIZE, q, scale, "block", F8, torch.float32, "row")


@check
def column_maxima() -> None:
    agrees(column_absmax.ABSMAX, normal(201, 40), None, None)


@check
def hadamard_blocks() -> None:
    agrees(hadamard.TRANSFORM, normal(3, 64), 64, torch.float32)


@check
def smooth_experts() -> None:
    factors = normal(2, 16).abs() + 0.5
    agrees(smooth_quant.SMOOTH, normal(15, 16), factors, torch.arange(15, dtype=torch.int32) % 2, F8, False, False)


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
    sampled("rope", 0)


@check
def qk_norm_rope_backward() -> None:
    sampled("qk_norm_rope", 1)


@check
def embedding_outside() -> None:
    agrees(embedding.FORWARD, normal(20, 16), torch.tensor([3, 25, -7, 19, 2**40]), 0)


@check
def embedding_backward() -> None:
    sampled("embedding", 2)


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
    sampled("inplace", 1)


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
    (op, args), *_ = adamw_samples("cpu")
    agrees(op, *args)


# ---- instructions ----------------------------------------------------------------------------------------------------


@check
def instructions() -> None:
    check_instructions()
