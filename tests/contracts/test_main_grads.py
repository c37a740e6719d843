"""A contract of all public functions: at level 3 the gradient of a parameter goes to its ``main_grad``, or it raises.

A gradient that autograd gets would be added to ``.grad``, in an order that depends on micro-batches.
``tests/ops/shared/test_micro_batches.py`` compares the bits of what starts from a main_grad.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels as rtk
from rtkernels import ArgumentError
from rtkernels.ops.shared.batch_invariance import PROMISES, REFUSED

ROWS, HIDDEN = 8, 64
BF16, F32 = torch.bfloat16, torch.float32
Made = Callable[..., Tensor]


def _numbers(*shape: int, seed: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _x(dtype: torch.dtype = BF16, *shape: int) -> Tensor:
    return _numbers(*(shape or (ROWS, HIDDEN)), seed=1, dtype=dtype)


def _ids() -> Tensor:
    return torch.arange(ROWS)


def _angles() -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0.0, 1.0, ROWS * 8).view(ROWS, 8)
    return angles.cos(), angles.sin()


def _heads(*shape: int) -> Tensor:
    return _x(BF16, *shape)


COLUMNS, MATRIX, BIAS = (HIDDEN,), (32, HIDDEN), (32,)
# By function: shapes of parameters and their dtype, and a call with them. A comma separates forms.
CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], torch.dtype, Made]] = {
    "act": ((COLUMNS,), BF16, lambda a: rtk.act(_x(), "silu", add=a)),
    "add_bias": ((COLUMNS,), BF16, lambda b: rtk.add_bias(_x(), b)),
    "add_bias, pos": ((COLUMNS, (4, HIDDEN)), BF16, lambda b, p: rtk.add_bias(_x(), b, pos=p)),
    "add_residual": ((COLUMNS, COLUMNS), BF16, lambda g, b: rtk.add_residual(_x(), _x(), gate=g, bias=b)),
    "channel_mul": ((COLUMNS,), BF16, lambda s: rtk.channel_mul(_x(), s)),
    "rms_norm": ((COLUMNS,), BF16, lambda w: rtk.rms_norm(_x(), w)),
    "rms_norm, modulated": (
        (COLUMNS, COLUMNS, COLUMNS), BF16, lambda w, s, t: rtk.rms_norm(_x(), w, scale=s, shift=t)
    ),
    "rms_norm, gated": ((COLUMNS, COLUMNS), BF16, lambda w, g: rtk.rms_norm(_x(), w, residual=_x(), gate=g)[0]),
    "layer_norm": ((COLUMNS, COLUMNS), BF16, lambda w, b: rtk.layer_norm(_x(), w, b)),
    "layer_norm, modulated": ((COLUMNS, COLUMNS), BF16, lambda s, t: rtk.layer_norm(_x(), scale=s, shift=t)),
    "rms_norm_fp8": ((COLUMNS,), BF16, lambda w: rtk.rms_norm_fp8(_grad(), w, keep=True).y),
    "layer_norm_fp8": ((COLUMNS, COLUMNS), BF16, lambda w, b: rtk.layer_norm_fp8(_grad(), w, b, keep=True).y),
    "group_rms_norm_gate": ((COLUMNS,), BF16, lambda w: rtk.group_rms_norm_gate(_x(), _x(), w, groups=2)),
    "qk_norm_rope": (
        ((16,), (16,)), BF16,
        lambda q, k: sum(
            t.float().sum() for t in rtk.qk_norm_rope(
                _heads(ROWS, 1, 8 * 16), q, k, *_angles(), q_heads=4, kv_heads=2
            )
        ),
    ),
    "qkv_split": (
        ((16,),), BF16, lambda q: rtk.qkv_split(_heads(ROWS, 8 * 16), 4, 2, rope=_angles(), q_norm=q)[0]
    ),
    "scaled_mm": ((MATRIX, BIAS), BF16, lambda w, b: rtk.scaled_mm(_x(), w, bias=b)),
    "gated_mm": (((64, HIDDEN),), BF16, lambda w: rtk.gated_mm(_x(), w)),
    "grouped_mm": (
        ((2, 32, HIDDEN),), BF16, lambda w: rtk.grouped_mm(_x(), w, offs=torch.tensor([4, 8], dtype=torch.int32))
    ),
    "fp8_linear": (((64, 128), (64,)), BF16, lambda w, b: rtk.fp8_linear(_x(BF16, 128, 128), w, b)),
    "fp8_linear, row": (((64, 128), (64,)), BF16, lambda w, b: rtk.fp8_linear(_x(BF16, 128, 128), w, b, recipe="row")),
    "fp8_linear, smooth": (
        ((64, 128), (64,)), BF16,
        lambda w, b: rtk.fp8_linear(_x(BF16, 128, 128), w, b, recipe="smooth", smooth=torch.ones(128)),
    ),
    "fp8_linear, hadamard": (
        ((64, 128), (64,)), BF16, lambda w, b: rtk.fp8_linear(_x(BF16, 128, 128), w, b, recipe="hadamard")
    ),
    "router_gemm": ((MATRIX,), F32, lambda w: rtk.router_gemm(_x(), w)),
    "router_gemm, bias": ((MATRIX, BIAS), F32, lambda w, b: rtk.router_gemm(_x(), w, bias=b)),
    "rms_norm_router": ((COLUMNS, MATRIX), BF16, lambda w, r: rtk.rms_norm_router(_grad(), w, r).logits),
    "embedding": (((20, HIDDEN),), BF16, lambda w: rtk.embedding(_ids(), w)),
    "index_select": (((20, HIDDEN),), BF16, lambda w: rtk.index_select(w, _ids())),
    "linear_cross_entropy": ((MATRIX, BIAS), BF16, lambda w, b: rtk.linear_cross_entropy(_x(), w, _ids(), bias=b)),
    "linear_logprob": ((MATRIX, BIAS), BF16, lambda w, b: rtk.linear_logprob(_x(), w, _ids(), bias=b)),
    "linear_logprob, logits": (
        (MATRIX, BIAS), BF16, lambda w, b: rtk.linear_logprob(_x(), w, _ids(), bias=b, save="logits")
    ),
    "linear_divergence": (
        (MATRIX, BIAS), BF16, lambda w, b: rtk.linear_divergence(_x(), w, _x(), w.detach(), student_bias=b)
    ),
    "attention": (((4,),), F32, lambda s: rtk.attention(*(_heads(1, ROWS, 4, 16),) * 3, sinks=s, causal=True)),
    "attention, bias": (((1, 4, ROWS, ROWS),), BF16, lambda b: rtk.attention(*(_heads(1, ROWS, 4, 16),) * 3, bias=b)),
    "attention_varlen": (
        ((4,),), F32,
        lambda s: rtk.attention_varlen(
            *(_heads(ROWS, 4, 16),) * 3, *(torch.tensor([0, 3, ROWS], dtype=torch.int32),) * 2, 5, 5, sinks=s,
            causal=True,
        ),
    ),
    "causal_conv1d": (((HIDDEN, 4), COLUMNS), BF16, lambda w, b: rtk.causal_conv1d(_x()[None], w, b)),
    "conv": (((4, 1, 3, 3), (4,)), BF16, lambda w, b: rtk.conv(_heads(2, 4, 8, 8), w, b, padding=1, groups=4)),
    "gated_delta_rule": (
        ((4,), (4,)), F32,
        lambda a, t: rtk.gated_delta_rule(
            *(_heads(1, ROWS, 4, 16),) * 3, _x(F32, 1, ROWS, 4), _x(F32, 1, ROWS, 4), A_log=a, dt_bias=t, l2norm=True,
            beta_sigmoid=True,
        ),
    ),
    "ssd": (
        ((4,), (4,), (4,)), F32,
        lambda a, d, t: rtk.ssd(
            _heads(1, ROWS, 4, 16), _x(F32, 1, ROWS, 4), -a.abs(), *(_heads(1, ROWS, 2, 16),) * 2, D=d, dt_bias=t,
            dt_softplus=True,
        ),
    ),
}  # fmt: skip
# Names of arguments that are parameters of layers, in functions with gradients.
NAMES = {"weight", "bias", "b", "add", "gate", "shift", "s", "pos", "sinks", "A", "D", "q_norm", "k_norm"}
NAMES |= {"A_log", "dt_bias", "q_weight", "k_weight", "router_weight", "student_weight", "student_bias"}
WITHOUT_GRADIENTS = {
    "cross_entropy": "weight has no gradient", "topk_router": "bias has no gradient",
    **dict.fromkeys(("attention_decode", "causal_conv1d_step", "fp8_weight", "glu_fp8_backward",
                     "glu_smooth_fp8_backward", "grouped_mm_masked", "sparse_mla", "gated_delta_rule_step", "ssd_step"),
                    "not differentiable"),
    **dict.fromkeys(("glu_fp8", "glu_smooth_fp8"), "codes have no gradients"), "glu": "weight has a factor of each row",
}  # fmt: skip


def _grad() -> Tensor:
    return _x().requires_grad_()


def test_every_function_with_parameters_is_tried() -> None:
    tried = {name.partition(",")[0] for name in CALLS}
    for name, promise in PROMISES.items():
        function = getattr(rtk, name)
        if promise.kind == REFUSED or isinstance(function, type):
            continue
        if NAMES & set(inspect.signature(function).parameters):
            assert (name in tried) != (name in WITHOUT_GRADIENTS), name
    assert set(WITHOUT_GRADIENTS) <= set(PROMISES)


@at("sm_80", "sm_90")
@pytest.mark.parametrize("name", CALLS)
def test_parameters_start_from_main_grad_or_raise(name: str, place: str) -> None:
    shapes, dtype, call = CALLS[name]
    with running_on(place), rtk.batch_invariant(3):
        given = [torch.nn.Parameter(_numbers(*shape, seed=2 + i, dtype=dtype)) for i, shape in enumerate(shapes)]
        for parameter in given:
            parameter.main_grad = torch.zeros(parameter.shape)
        try:
            result = call(*given)
            (result.float() * torch.linspace(0.5, 1.5, result.numel()).view(result.shape)).sum().backward()
        except ArgumentError as error:
            assert "batch-invariant" in str(error)
            return
    assert [p.grad is None and bool(p.main_grad.any()) for p in given] == [True] * len(given)


@at("sm_80")
@pytest.mark.parametrize("name", CALLS)
def test_parameters_have_gradients_without_a_level(name: str, place: str) -> None:
    """Or calls show nothing."""
    shapes, dtype, call = CALLS[name]
    with running_on(place):
        given = [torch.nn.Parameter(_numbers(*shape, seed=2 + i, dtype=dtype)) for i, shape in enumerate(shapes)]
        call(*given).float().square().sum().backward()
    assert [p.grad is not None and bool(p.grad.any()) for p in given] == [True] * len(given)
