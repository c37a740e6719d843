"""``scaled_mm`` and its kin: what they refuse, and in which words."""

from __future__ import annotations

import pytest
import torch
from support.places import error_tests

from rtkernels import gated_mm, grouped_mm, grouped_mm_masked, grouped_wgrad, scaled_mm
from rtkernels.errors import ArgumentError

F8 = torch.float8_e4m3fn
A, B = torch.zeros(4, 256), torch.zeros(8, 256)
A8, B8, I8, J8 = A.to(F8), B.to(F8), A.to(torch.int8), B.to(torch.int8)
A16, B16 = A.bfloat16(), B.bfloat16()
ONES = torch.ones
OFFS = torch.tensor([1, 4], dtype=torch.int32)
B3 = torch.zeros(2, 8, 256).bfloat16()

test_on_the_cpu, test_in_the_launchers = error_tests(
    {
        "one dimension": (lambda: scaled_mm(A16[0], B16), r"a has shape \(256,\); expected 2 dimensions"),
        "b of three": (lambda: scaled_mm(A16, B3), r"b has shape \(2, 8, 256\); expected 2 dimensions"),
        "another k": (
            lambda: scaled_mm(A16, B16[:, :128]),
            r"b has shape \(8, 128\), \[n, k\] with k = 128; expected k = 256",
        ),
        "k x n by rows": (
            lambda: scaled_mm(A16, B16.t().contiguous()),
            r"expected k = 256, as a \(b_layout='kn' takes b as \[k, n\]",
        ),
        "dtype": (lambda: scaled_mm(A.double(), B), "a has dtype float64; expected one of bfloat16, float16"),
        "pair": (
            lambda: scaled_mm(A16, B16.half()),
            "b has elements of fp16; expected elements that match bf16, those of a",
        ),
        "fp8 and 16 bits": (lambda: scaled_mm(A8, B16), "b has elements of bf16; expected elements that match e4m3"),
        "int4 across": (
            lambda: scaled_mm(I8, J8.t().contiguous(), b_layout="kn", packed="int4"),
            r"b \(int4\) has strides \(8, 1\), contiguous along n; expected 1 along k",
        ),
        "no unit stride": (
            lambda: scaled_mm(A16[:, :128], B16[:, ::2]),
            r"b has strides \(256, 2\); expected 1 along k, or say b_layout='nk'",
        ),
        "b_layout": (lambda: scaled_mm(A16, B16, b_layout="t"), "b_layout is 't'; expected 'auto', 'nk' or 'kn'"),
        "rows of out": (
            lambda: scaled_mm(A16.view(2, 2, 256), B16, out=torch.zeros(2, 4, 8).bfloat16()[:, :2]),
            r"out has strides \(32, 8, 1\); expected unit-stride rows, evenly spaced",
        ),
        "recipe": (lambda: scaled_mm(A8, B8, recipe="rows"), "recipe is 'rows'; expected one of auto, none, tensor"),
        "scales of none": (
            lambda: scaled_mm(A8, B8, ONES(4), recipe="none"),
            "scale_a is given; expected None for recipe",
        ),
        "missing scale": (
            lambda: scaled_mm(A8, B8, ONES(4), recipe="row"),
            "scale_b is None; expected scales for recipe 'row'",
        ),
        "tensor": (
            lambda: scaled_mm(A8, B8, ONES(2), ONES(()), recipe="tensor"),
            r"scale_a has shape \(2,\); expected one number",
        ),
        "row": (
            lambda: scaled_mm(A8, B8, ONES(4), ONES(9), recipe="row"),
            r"scale_b has shape \(9,\); expected \[8\] for an op",
        ),
        "1x128": (
            lambda: scaled_mm(A8, B8, ONES(4, 3), ONES(1, 2), recipe="block_1x128_128x128"),
            r"scale_a has shape \(4, 3\); expected \[4, 2\] for an operand of 4 rows and k = 256",
        ),
        "128x128, b as k x n": (
            lambda: scaled_mm(A8, B8.t(), ONES(4, 2), ONES(1, 2), recipe="block_1x128_128x128"),
            r"scale_b has shape \(1, 2\); expected \[1, 2\], transposed as b is, for an operand of 8 rows",
        ),
        "tile": (
            lambda: scaled_mm(A8, B8, ONES(3, 2), ONES(8, 2), recipe="tile"),
            r"expected \[4 / q, 256 / q\] with whole numbers",
        ),
        "auto": (lambda: scaled_mm(A8, B8, ONES(3), ONES(8)), r"expected one number, \[4\], or \[4 / q, 256 / q\]"),
        "scale dtype": (lambda: scaled_mm(A8, B8, ONES(4).int(), ONES(8)), "scale_a has dtype int32; expected float32"),
        "bytes": (
            lambda: scaled_mm(A8, B8, ONES(4, 8).byte(), ONES(8, 8).byte()),
            "scale_a has dtype uint8, which may be e8m0 or e4m3; pass recipe 'mx32' or 'nvfp4'",
        ),
        "mx32": (
            lambda: scaled_mm(A8, B8, ONES(4, 7).byte(), ONES(8, 8).byte(), recipe="mx32"),
            r"scale_a has shape \(4, 7\); expected \(4, 8\) for recipe 'mx32', or one dimension of 1024 bytes",
        ),
        "mx32, dtype": (
            lambda: scaled_mm(A8, B8, ONES(4, 8), ONES(8, 8), recipe="mx32"),
            "scale_a has dtype float32; expected float8_e8m0fnu or uint8 for 'mx32'",
        ),
        "packed": (
            lambda: scaled_mm(I8, J8, packed="int3"),
            "packed is 'int3'; expected 'int4', 'uint4', 'e2m1', None",
        ),
        "nibble": (
            lambda: scaled_mm(I8, J8, packed="int4", nibble="first"),
            "nibble is 'first'; expected 'low' or 'high'",
        ),
        "nibble of one": (
            lambda: scaled_mm(A16, J8, None, ONES(8), packed=(None, "int4"), nibble="high"),
            "pack.swap_nibbles makes",
        ),
        "nibble of one, all packed": (
            lambda: scaled_mm(A16, J8, None, ONES(8), packed="int4", nibble="high"),
            "nibble is 'high' and one operand is packed",
        ),
        "acc": (lambda: scaled_mm(A8, B8, acc="fp64"), "acc is 'fp64'; expected one of auto, fp32, fast, fp16, int32"),
        "acc of floats": (
            lambda: scaled_mm(A8, B8, acc="int32"),
            "acc is 'int32'; expected fp32, fast or fp16 for e4m3",
        ),
        "acc of integers": (lambda: scaled_mm(I8, J8, acc="fp32"), "acc is 'fp32'; expected int32 for int8 and int8"),
        "acc of bf16": (lambda: scaled_mm(A16, B16, acc="fp16"), "acc is 'fp16'; expected operands of fp16 or fp8"),
        "acc of blocks": (
            lambda: scaled_mm(A8, B8, ONES(4, 2), ONES(1, 2), acc="fast"),
            "acc is 'fast'; expected 'fp32' with scales along k",
        ),
        "act": (lambda: scaled_mm(A16, B16, act="tanh"), "act is 'tanh'; expected None, relu, silu, gelu_tanh, gelu"),
        "bias": (lambda: scaled_mm(A16, B16, bias=ONES(4)), r"bias has shape \(4,\); expected \(8,\)"),
        "bias, dtype": (
            lambda: scaled_mm(A16, B16, bias=ONES(8).int()),
            "bias has dtype int32; expected bfloat16, float16",
        ),
        "add": (
            lambda: scaled_mm(A16, B16, add=ONES(8)),
            r"add has shape \(8,\); expected \(4, 8\), that of the result",
        ),
        "out": (
            lambda: scaled_mm(A16, B16, out=ONES(8, 4)),
            r"out has shape \(8, 4\); expected \(4, 8\), that of the result",
        ),
        "out, strides": (
            lambda: scaled_mm(A16, B16, out=ONES(8, 4).t()),
            r"out has strides \(1, 4\); expected unit-stride rows",
        ),
        "out, dtype": (
            lambda: scaled_mm(A16, B16, out=ONES(4, 8).double()),
            "out has dtype float64; expected one of bfloat16",
        ),
        "out and out_dtype": (
            lambda: scaled_mm(A16, B16, out=ONES(4, 8), out_dtype=torch.half),
            "expected torch.float32, that",
        ),
        "out over a": (lambda: scaled_mm(A16, B16, out=A16[:, :8]), "out shares memory with a; expected its own"),
        "accumulate": (
            lambda: scaled_mm(A16, B16, accumulate=True),
            "accumulate is True; expected out, which the result",
        ),
        "out_dtype": (
            lambda: scaled_mm(A16, B16, out_dtype=F8),
            "out_dtype is float8_e4m3fn; expected one of bfloat16",
        ),
        "int32 of floats": (
            lambda: scaled_mm(A16, B16, out_dtype=torch.int32),
            "out_dtype is int32; expected a float, or int",
        ),
        "int32 and bias": (
            lambda: scaled_mm(I8, J8, bias=ONES(8)),
            "out_dtype is int32; expected a float, or integer op",
        ),
        "global_scale": (
            lambda: scaled_mm(A8, B8, global_scale=ONES(2)),
            r"global_scale has dtype float32 and shape \(2,\); expected one num",
        ),
        "quant_out": (
            lambda: scaled_mm(A16, B16, quant_out="1x64"),
            "quant_out is '1x64'; expected '1x128', 'row', '1x16'",
        ),
        "quant_out, dtype": (
            lambda: scaled_mm(A16, B16, quant_out="row", out_dtype=torch.half),
            "out_dtype is float16; expected float8_e4m3fn or",
        ),
        "quant_out, 1x16": (
            lambda: scaled_mm(A16, B16, quant_out="1x16"),
            "the result has 8 columns; expected a multiple of 16",
        ),
        "quant_out and out": (lambda: scaled_mm(A16, B16, quant_out="row", out=ONES(4, 8)), "expected one of them"),
        "backend": (
            lambda: scaled_mm(A16, B16, backend="cublas"),
            "backend is 'cublas'; expected 'auto', 'rtkernels', 'sm90'",
        ),
        "gradient": (
            lambda: scaled_mm(A8, B8, ONES(4).requires_grad_(), ONES(8)),
            "scaled_mm has a gradient for float operands without",
        ),
        "gated": (lambda: gated_mm(A16, B16[:7]), "b has 7 rows; expected a multiple of 2: those of the gate"),
        "gated, act": (lambda: gated_mm(A16, B16, act=None), "act is None; expected one of relu, silu"),
        "grouped": (lambda: grouped_mm(A16, B3), "offs and m_indices are both None; expected one of them"),
        "grouped, offs": (
            lambda: grouped_mm(A16, B3, offs=OFFS.float()),
            r"offs has dtype float32 and shape \(2,\); expected int32 of shape",
        ),
        "grouped, b": (lambda: grouped_mm(A16, B16, offs=OFFS), r"expected \[rows, k\] and \[groups, n, k\]"),
        "grouped, align": (lambda: grouped_mm(A16, B3, offs=OFFS, align=3), "align is 3; expected a power of two"),
        "grouped, labels": (
            lambda: grouped_mm(A16, B3, m_indices=OFFS),
            r"m_indices has .*shape \(2,\); expected int32 of sh",
        ),
        "grouped, scales": (
            lambda: grouped_mm(A8, B3.to(F8), ONES(4), ONES(8), offs=OFFS, recipe="row"),
            "for each of 2 groups",
        ),
        "masked": (lambda: grouped_mm_masked(B3, B3), "masked_m is None; expected int32"),
        "masked, groups": (lambda: grouped_mm_masked(B3[:1], B3, masked_m=OFFS), "a has 1 groups; expected 2, as b"),
        "wgrad": (lambda: grouped_wgrad(A16, B16, offs=OFFS), "dy and x have 4 and 8 rows; expected the same number"),
        "wgrad, out": (
            lambda: grouped_wgrad(A16, A16, offs=OFFS, out=ONES(2, 4, 4)),
            r"out has shape \(2, 4, 4\); expected \(2, 256, 256\)",
        ),
    }
)


def test_wrong_types() -> None:
    for wrong in ({"act": 3}, {"recipe": None}, {"out_dtype": "bf16"}, {"bias": 1.0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            scaled_mm(A16, B16, **wrong)
