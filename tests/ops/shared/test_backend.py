"""The choice of a backend: who is asked, what errors say, and ``explain`` for products and attention."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels import (
    attention,
    attention_quantized,
    attention_varlen,
    explain,
    gated_mm,
    grouped_mm,
    grouped_mm_masked,
    grouped_wgrad,
    mla_attention,
    scaled_mm,
    sdpa,
)
from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.backends import ATTENTION
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.shared.backend import Backend, Backends, NoBackendError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.operator.plan import Steps


class _Problem(NamedTuple):
    size: int
    title: str = "a problem"


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Backends[_Problem]:
    """Three backends: one for even sizes, one for sizes up to 9 that nobody can name, one for sizes up to 99."""
    monkeypatch.setattr(Backends, "known", [])

    def up_to(limit: int):
        return lambda problem, info: None if problem.size <= limit else f"more than {limit}"

    return Backends(
        "problem",
        (
            Backend("even", lambda problem, info: "an odd size" if problem.size % 2 else None, lambda p, d: Steps()),
            Backend("small", up_to(9), lambda p, d: Steps(), by_name=False),
            Backend("large", up_to(99), lambda p, d: Steps()),
        ),
        order=lambda problem, info: ("small", "even", "large") if problem.size == 2 else ("even", "small", "large"),
        others=("torch",),
    )


def _chosen(backends: Backends[_Problem], size: int, wanted: str = "auto"):
    choice = backends.choose(_Problem(size), device_info(-1), wanted)
    return choice.backend and choice.backend.name, choice.refused, choice.after


def test_the_first_backend_that_can(backends: Backends[_Problem]) -> None:
    assert _chosen(backends, 4) == ("even", {}, ("small", "large"))
    assert _chosen(backends, 2) == ("small", {}, ("even", "large"))
    assert _chosen(backends, 11) == ("large", {"even": "an odd size", "small": "more than 9"}, ())
    assert _chosen(backends, 4, "large") == ("large", {}, ())
    assert _chosen(backends, 101, "large") == (None, {"large": "more than 99"}, ())


def test_errors_say_why_not(backends: Backends[_Problem]) -> None:
    on = f"problem on {device_info(-1).target}"
    for size, wanted, message in (
        (101, "auto", f"no kernel for this {on}: even: an odd size; small: more than 9; large: more than 99"),
        (7, "even", f"backend is 'even', which has no kernel for this {on}: an odd size; expected 'auto'"),
        (101, "even", "an odd size; nor has any other (small: more than 9; large: more than 99)"),
    ):
        with pytest.raises(NoBackendError) as raised:
            backends.steps(_Problem(size), -1, wanted)
        assert message in str(raised.value)
    for wanted, expected in (("smal", "'auto', 'even', 'large' or 'torch'"), ("torch", "'auto', 'even' or 'large'")):
        with pytest.raises(ArgumentError) as raised:
            backends.check(wanted)
        assert str(raised.value) == f"backend is {wanted!r}; expected {expected}"
    with pytest.raises(ArgumentError, match="backend is 'small'"):  # only "auto" takes it
        backends.steps(_Problem(4), -1, "small")


def test_families_list_their_backends() -> None:
    assert PRODUCTS.names == ("sm90", "skinny", "unpack", "mma", "cluster", "decode", "tcgen05", "swapped", "pad")
    assert ATTENTION.names == ("sm90", "mma")
    assert {op.name for op in rtkernels.ops.attention.attention.OP.torch_ops} >= set(ATTENTION.problems)
    assert len(PRODUCTS.problems) == 8


# ---- explain --------------------------------------------------------------------------------------------------------


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_products_are_explained() -> None:
    few, many, weight = _empty(16, 4096), _empty(65, 4096), _empty(4096, 4096)
    told = explain(scaled_mm, few, weight, target="8.0")
    assert told.backend == "skinny" and told.refused == {} and told.after == ("sm90", "unpack", "mma")
    assert explain(scaled_mm, few, weight[:256]).backend == "cluster"
    told = explain(scaled_mm, many, weight, target="8.0")
    assert told.backend == "mma" and told.product is told.problem and told.product.m == 65
    assert list(told.refused) == ["sm90", "skinny", "unpack"] and told.refused["sm90"] == "sm_80 has no wgmma"
    assert str(told).startswith("65 x 4096 x 4096 of bf16 and bf16 to bf16: mma")
    assert str(told).endswith("; unpack: sm_80 has no wgmma)") and "(sm90: sm_80 has no wgmma; skinny:" in str(told)
    assert explain(scaled_mm, many, weight).backend == "sm90"
    told = explain(scaled_mm, many, weight, backend="sm90", target="sm_80")
    assert told.backend is None and told.refused == {"sm90": "sm_80 has no wgmma"} and "no backend" in str(told)
    codes = many.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
    told = explain(scaled_mm, *codes, global_scale=1.0)
    assert told.refused["sm90"] == "no global scale" and told.product.global_scale == 1


def test_grouped_and_gated_products_are_explained() -> None:
    rows, stack, offs = _empty(64, 256), _empty(2, 8, 256), _empty(2, dtype=torch.int32)
    assert explain(gated_mm, rows, stack[0]).product.n == 4
    assert explain(grouped_mm, rows, stack, offs=offs, align=128).product.groups.align == 128
    assert explain(grouped_mm_masked, stack, stack, masked_m=offs).product.groups.kind == "masked"
    assert explain(grouped_wgrad, rows, rows, offs=offs).product.groups == ("depth", 2, 1, 0)
    out = _empty(64, 8, dtype=torch.float32)
    assert explain(scaled_mm, rows, stack[0], out=out, accumulate=True).product.accumulate
    assert explain(scaled_mm, rows, stack[0], quant_out="1x128").product.quantized == "1x128"


def test_attention_is_explained() -> None:
    q, k = _empty(2, 512, 8, 128), _empty(2, 512, 4, 128)
    told = explain(attention, q, k, k, causal=True)
    assert told.backend == "sm90" and told.problem.right == 0 and told.after == ("mma",)
    assert told.refused == {"decode": "1024 queries share keys; 64 at the most"}
    assert str(told) == (
        f"2 x 512 x 512, 8 heads over 4 of 128 elements, bf16: sm90: {told.summary} "
        "(decode: 1024 queries share keys; 64 at the most)"
    )
    assert "queries x" in told.summary and "queries x" in explain(attention, q, k, k, target="sm_80").summary
    assert explain(attention, q, k, k, target="sm_80").refused["sm90"] == "sm_80 has no wgmma"
    assert explain(attention, q[:, :1], k, k).backend == "decode"
    assert explain(attention, q, k, k, backend="mma").backend == "mma"
    assert explain(attention, q, k, k, out=_empty(2, 512, 8, 128)).backend == "sm90"
    ends = _empty(3, dtype=torch.int32)
    told = explain(attention_varlen, q[0], k[0], k[0], ends, ends, 512, 512)
    assert told.backend == "sm90" and told.problem.varlen and str(told).startswith("512 x 512 packed, 8 heads over 4")
    assert explain(mla_attention, q, k, k, clip_value=4.0).problem.softcap < 0.0
    heads = q.transpose(1, 2)
    assert explain(sdpa, heads, heads, heads, is_causal=True).problem.right == 0


def test_quantised_attention_is_explained() -> None:
    q, v = _empty(2, 512, 8, 128, dtype=torch.int8), _empty(2, 512, 8, 128)
    scale = _empty(2, 8, 512, dtype=torch.float32)
    told = explain(attention_quantized, q, q, v, scale, scale)
    assert told.backend == "sm90" and told.after == ("mma",)
    assert told.problem.title == "1024 queries x 1024 keys, 8 heads over 8, int8 queries and keys, bf16 values"
    assert explain(attention_quantized, q, q, v, scale, scale, target="sm_80").backend == "mma"
    codes = q.to(torch.float8_e4m3fn)
    refused = explain(attention_quantized, codes, codes, v, scale, scale, target="sm_80").refused
    assert refused == {
        "sm90": "sm_80 has no wgmma",
        "mma": "sm_80 has no products of float8_e4m3fn; expected int8 codes",
    }


def test_explained_as_copied() -> None:
    """What an operator copies first is explained as the copy that its kernels read."""
    q = torch.zeros(1, 70, 2, 65).bfloat16()[..., 1:]
    assert explain(attention, q, q, q).backend == "sm90"
    for _ in range(3):  # a call that was recorded is explained, too
        attention(q, q, q)
    assert explain(attention, q.requires_grad_(), q, q).problem.lq == 70


def test_what_is_not_explained() -> None:
    few, weight = _empty(16, 256), _empty(8, 256)
    for function in (torch.mm, rtkernels.rms_norm, 3):
        with pytest.raises(ArgumentError, match=r"expected one of .*scaled_mm, gated_mm"):
            explain(function, few, weight)
    with pytest.raises(ArgumentError, match="backend is 'torch'"):
        explain(scaled_mm, few, weight, backend="torch")
    with pytest.raises(ArgumentError, match="backend is 'cutlass'"):
        explain(scaled_mm, few, weight, backend="cutlass")
    with pytest.raises(ArgumentError, match="k has shape"):
        explain(attention, _empty(1, 8, 2, 64), _empty(8, 2, 64), _empty(1, 8, 2, 64))


@pytest.mark.parametrize(
    ("target", "wanted"), [("sm_89", "mma"), ("sm_120a", "mma"), ("sm_90a", None), ("sm_80", None)]
)
def test_explain_tells_what_runs_for_mxfp8(target: str, wanted: str | None) -> None:
    x = torch.randn(1, 20, 2, 64).bfloat16()
    codes, scale = rtkernels.quantize_mxfp8(x)
    scale = scale.transpose(1, 2)
    told = rtkernels.explain(rtkernels.attention_quantized, codes, codes, x, scale, scale, target=target)
    assert told.backend == wanted
    if wanted is None:
        assert "no backend: attention of bfloat16 operands" in str(told)
