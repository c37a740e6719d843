"""Attention with sums in fp16, on GPUs that gain from them."""

from __future__ import annotations

import pytest
import torch

import rtkernels
from rtkernels import ArgumentError
from rtkernels.ops.attention import mma_plan
from rtkernels.runtime.targets import parse

GAINING = "sm_89"


def operands(lq: int, lk: int, d_qk: int, d_v: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, lq, 4, d_qk), (2, lk, 2, d_qk), (2, lk, 2, d_v))
    q, k, v = (torch.randn(shape, generator=g) for shape in shapes)
    return [q.half(), k.half(), (3 * v + 1).half()]


@pytest.mark.parametrize("acc", ["fp16_qk", "fp16_pv", "fp16"])
@pytest.mark.parametrize("sizes", [(70, 130, 64, 64), (65, 100, 128, 96), (3, 70, 80, 128)])
def test_sums_in_fp16(acc: str, sizes: tuple[int, ...]) -> None:
    q, k, v = operands(*sizes)
    expected, lse = rtkernels.attention(q, k, v, causal=True, return_lse=True)
    bias = torch.zeros(1, 1, sizes[0], sizes[1])
    with rtkernels.emulate(GAINING):
        got, logs = rtkernels.attention(q, k, v, causal=True, return_lse=True, acc=acc)
        with_bias = rtkernels.attention(q, k, v, causal=True, acc=acc, bias=bias, softcap=1e4)
    # Scores are rounded to 11 bits: below 2^-9 of the largest one, which the softmax passes on.
    assert float((logs - lse).abs().max()) < (4e-3 if acc != "fp16_pv" else 1e-5)
    for result in (got, with_bias):
        assert float((result.float() - expected.float()).abs().max()) < 3e-2


def test_large_values_do_not_overflow() -> None:
    """The softmax does not lag: 64 probabilities of at most 1, times values up to 1000, fit into fp16."""
    q, k, v = operands(64, 256, 64, 64)
    k = k * torch.linspace(0.1, 4.0, 256).view(1, -1, 1, 1).half()  # maxima grow from tile to tile
    v = torch.full_like(v, 900.0)
    with rtkernels.emulate(GAINING):
        got = rtkernels.attention(q, k, v, acc="fp16_pv")
    assert float((got.float() - 900.0).abs().max()) < 4.0


def test_refusals() -> None:
    q, k, v = operands(9, 9, 64, 64)
    for target in ("sm_80", "sm_90"):
        assert not mma_plan.gains_from_fp16(parse(target))
        with rtkernels.emulate(target), pytest.raises(ArgumentError, match="take as long with sums in fp32"):
            rtkernels.attention(q, k, v, acc="fp16")
    told = "acc is 'fp16', which has no kernel.*wider than 128.*expected the default of acc"
    with rtkernels.emulate(GAINING), pytest.raises(ArgumentError, match=told):
        rtkernels.attention(*operands(9, 9, 192, 128), acc="fp16")
    for told, given, kw in (
        ("acc is 'fp8'", (q, k, v), {"acc": "fp8"}),
        ("backend is 'sm90' and acc is 'fp16'", (q, k, v), {"acc": "fp16", "backend": "sm90"}),
        ("q has dtype bfloat16", tuple(t.bfloat16() for t in (q, k, v)), {"acc": "fp16"}),
        ("requires grad|gradient", (q.requires_grad_(), k, v), {"acc": "fp16"}),
    ):
        with pytest.raises(ArgumentError, match=told):
            rtkernels.attention(*given, **kw)


def test_backends_are_not_named_after_sums() -> None:
    q, k, v = operands(9, 9, 64, 64)
    ends = torch.tensor([0, 9], dtype=torch.int32)
    for call in (
        lambda name: rtkernels.attention(q, k, v, backend=name),
        lambda name: rtkernels.attention(q, k, v, backend=name, acc="fp16"),
        lambda name: rtkernels.mla_attention(q, k, v, backend=name),
        lambda name: rtkernels.attention_varlen(q[0], k[0], v[0], ends, ends, 9, 9, backend=name),
    ):
        for name in ("fp16", "fp16_qk", "fp16_pv"):
            with rtkernels.emulate(GAINING), pytest.raises(ArgumentError, match=f"backend is '{name}'; expected.*acc="):
                call(name)


def test_names_of_gn_kernels() -> None:
    q, k, v = operands(9, 9, 64, 64)
    expected = rtkernels.attention(q, k, v)
    with rtkernels.emulate(GAINING):
        for both in ((False, False), (True, False), (False, True), (True, True)):
            got = rtkernels.compat.gn.attn(q, k, v, qk_fp16_acc=both[0], pv_fp16_acc=both[1])
            assert float((got.float() - expected.float()).abs().max()) < 3e-2
