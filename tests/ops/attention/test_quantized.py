"""attention_quantized, quantize_qk and quantize_v: against float64 attention of the dequantised operands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.attention_exact import assert_near, exact_attention
from support.compare import poisoned, running_on
from support.places import at, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from rtkernels import attention_quantized, emulate, quantize_qk, quantize_v
from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import quant_plan
from rtkernels.ops.shared.block_formats import decode_e8m0

BF16, FP16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype).to(device)


# batch, queries, keys, heads, heads of k, width, width of v; type; codes of q and k, of v; options
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, torch.dtype, torch.dtype | None, dict[str, Any]]] = {
    "int8": ((2, 33, 70, 2, 2, 64, 64), BF16, INT8, None, {}),
    "int8, fp16, causal": ((1, 130, 140, 4, 1, 48, 40), FP16, INT8, None, {"causal": True}),
    "int8, window": ((1, 70, 90, 1, 1, 64, 64), BF16, INT8, None, {"window": (13, 7)}),
    "int8, lengths": ((3, 9, 70, 2, 1, 64, 64), BF16, INT8, None, {"seqused_k": torch.tensor([0, 65, 4])}),
    "int8 values": ((1, 40, 132, 2, 1, 64, 64), BF16, INT8, INT8, {"causal": True}),
    "fp8": ((1, 20, 70, 2, 1, 64, 64), BF16, E4M3, None, {"causal": True}),
    "fp8 values": ((1, 40, 130, 1, 1, 64, 48), FP16, INT8, E4M3, {}),  # by mma.sync: keys are no multiple of 4
    "fp8 values, tiles": ((2, 200, 520, 4, 2, 128, 96), FP16, INT8, E4M3, {"causal": True}),
    "fp8 values, lengths": ((3, 9, 264, 2, 1, 64, 64), BF16, INT8, E4M3, {"seqused_k": torch.tensor([0, 257, 4])}),
    "int8 values, window": ((1, 300, 300, 2, 1, 128, 128), BF16, INT8, INT8, {"window": (40, 9)}),
    "int8, tiles": ((2, 300, 513, 8, 1, 128, 128), BF16, INT8, None, {"causal": True}),
    "fp8 all, 128": ((1, 20, 72, 1, 1, 128, 128), BF16, E4M3, E4M3, {"causal": True}),
}


def decoded(codes: Tensor, scales: Tensor, block: int = 1) -> Tensor:
    every = scales.double().repeat_interleave(block, -1)[..., : codes.shape[1]]
    return codes.double() * every.transpose(1, 2).unsqueeze(-1)


def decoded_values(codes: Tensor, scales: Tensor, keys: int) -> Tensor:
    every = scales.double().repeat_interleave(64, 2)[:, :, :keys]
    return (codes.double()[..., :keys].transpose(-1, -2) * every).transpose(1, 2)


def spoil_behind(used: int, k: Tensor, scale_k: Tensor, v: Tensor) -> None:
    """Fill everything past the valid keys with NaN, or with the largest code."""
    k[used:], scale_k[:, used:] = 127, torch.nan
    if v.dtype in (BF16, FP16):
        v[used:] = torch.nan
    else:
        v[..., used:] = torch.finfo(v.dtype).max if v.dtype == E4M3 else 127


def check(name: str, device: str, granularity: str = "token") -> None:
    (batch, lq, lkv, heads, heads_kv, width, width_v), dtype, code, value_code, options = CASES[name]
    options = {n: o.int().to(device) if isinstance(o, Tensor) else o for n, o in options.items()}
    q = random(batch, lq, heads, width, dtype=dtype, device=device)
    q[:, lq // 2] = 0
    k = random(batch, lkv, heads_kv, width, seed=1, dtype=dtype, device=device)
    v = random(batch, lkv, heads_kv, width_v, seed=2, dtype=dtype, device=device)
    with poisoned():
        qc, qs, kc, ks, taken = quantize_qk(q, k, dtype=code, granularity=granularity, smooth_k=False)
        assert not taken.any()
        if granularity == "token":
            qs[..., lq // 2] = 0  # as other quantisers may write for a row of zeros
        values, scale_v = (v.clone(), None) if value_code is None else quantize_v(v, dtype=value_code)
        clean = kc.clone(), ks.clone(), values.clone(), None if scale_v is None else scale_v.clone()
        for i, used in enumerate(options.get("seqused_k", ())):
            spoil_behind(int(used), kc[i], ks[i], values[i])
            if scale_v is not None:
                scale_v[i, :, -(-int(used) // 64) :] = math.nan
        block = {"block_q": 64, "block_k": 64} if granularity == "block" else {}
        out, lse = attention_quantized(
            qc, kc, values, qs, ks, scale_v, **options, **block, out_dtype=dtype, return_lse=True
        )
    kc, ks, values, scale_v = clean
    given = decoded(qc, qs, block.get("block_q", 1)), decoded(kc, ks, block.get("block_k", 1))
    if value_code is not None:
        values = decoded_values(values, scale_v, lkv)
    host = {n: o.cpu() if isinstance(o, Tensor) else o for n, o in options.items()}
    exact, exact_lse = exact_attention(*given, values, **host)
    assert out.dtype == dtype
    assert_near(out, exact, 2.0**-6 if value_code is None else 3e-2, "out")
    assert_near(lse, exact_lse, 1e-4 if value_code is None else 2e-2, "lse")
    # And close to unquantised attention.
    exact, _ = exact_attention(q, k, v, **host)
    assert_near(out, exact, 0.08, "out, of 16 bits")


_DEFAULT = ("int8", "int8, fp16, causal", "int8 values", "fp8 all, 128")


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in _DEFAULT else pytest.mark.slow) for n in CASES])
def test_values(name: str, place: str) -> None:
    with running_on(place) as device:
        check(name, device)


def by_columns(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return transposed e4m3 codes of v [batch, keys, heads, width] and a scale for each column of a head."""
    scale = v.float().abs().amax(1) / 448
    codes = torch.nn.functional.pad((v.float() / scale.unsqueeze(1)).permute(0, 2, 3, 1), (0, -v.shape[1] % 16))
    return codes.to(E4M3), scale


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize(("width", "code"), [(64, E4M3), pytest.param(192, E4M3, marks=pytest.mark.slow), (64, INT8)])
def test_a_scale_for_each_column_of_values(width: int, code: torch.dtype, place: str) -> None:
    with running_on(place) as device, poisoned():
        q, k = (random(1, n, h, width, seed=n).to(device) for n, h in ((33, 2), (132, 1)))
        v = random(1, 132, 1, min(width, 128), seed=2).to(device)
        (qc, qs), (kc, ks) = (rows_of_codes(x, code) for x in (q, k))
        values, scale_v = by_columns(v)
        out, lse = attention_quantized(qc, kc, values, qs, ks, scale_v, causal=True, return_lse=True)
        given = (decoded(qc, qs), decoded(kc, ks), (values.double()[..., :132] * scale_v.double().unsqueeze(-1)))
        exact, exact_lse = exact_attention(*given[:2], given[2].permute(0, 3, 1, 2), causal=True)
        assert_near(out, exact, 3e-2, "out")
        assert_near(lse, exact_lse, 2e-2, "lse")


def rows_of_codes(x: Tensor, code: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / (448 if code == E4M3 else 127)
    values = x.float() / scale.unsqueeze(-1)
    return (values if code == E4M3 else values.round()).to(code), scale.transpose(1, 2).contiguous()


@at("cpu", "sm_90", "cuda")
def test_heads_of_192_with_values_of_128(place: str) -> None:
    with running_on(place) as device, poisoned():
        q, k = (random(1, n, h, 192, seed=n).to(device) for n, h in ((33, 2), (70, 1)))
        v = random(1, 70, 1, 128, seed=2).to(device)
        (qc, qs), (kc, ks) = (rows_of_codes(x, E4M3) for x in (q, k))
        out = attention_quantized(qc, kc, v, qs, ks, causal=True)
        exact, _ = exact_attention(decoded(qc, qs), decoded(kc, ks), v, causal=True)
        assert_near(out, exact, 2.0**-6, "out")


def test_wide_heads_without_wgmma() -> None:
    q, k, v = (random(1, 4, 1, d) for d in (192, 192, 128))
    (qc, qs), (kc, ks) = (rows_of_codes(x, INT8) for x in (q, k))
    with emulate("sm_80"), pytest.raises(ArgumentError, match="192 elements; expected up to 128"):
        attention_quantized(qc, kc, v, qs, ks)


@at("cpu", "sm_80", "cuda")
def test_a_scale_for_blocks(place: str) -> None:
    with running_on(place) as device:
        check("int8", device, "block")


@at("sm_80", "sm_90")
@pytest.mark.parametrize("code", [INT8, E4M3])
def test_a_query_that_sees_one_key_gives_its_value(code: torch.dtype, place: str) -> None:
    """Only the result is rounded, so sums of weights and the scale of every column show."""
    if place == "sm_80" and code == E4M3:
        pytest.skip("fp8 values are for sm_90")
    q, k, v = (random(1, 64, 1, 64, seed=i) for i in range(3))
    v = v * (1 + torch.arange(64)).to(BF16)
    with running_on(place), poisoned():
        qc, qs, kc, ks, _ = quantize_qk(q, k, smooth_k=False)
        values, scale_v = quantize_v(v, dtype=code)
        out = attention_quantized(qc, kc, values, qs, ks, scale_v, causal=True, out_dtype=BF16)
    want = decoded_values(values, scale_v, 64)[0, 0]
    assert ((out[0, 0].double() - want).abs() <= 2.0**-8 * want.abs()).all()


@at("sm_80", "sm_90")
def test_the_next_sequence_may_be_infinite(place: str) -> None:
    """A tile of values extends into it; masked values are not multiplied."""
    x = random(1, 40, 1, 64)
    v = random(40, 1, 64, seed=2)
    ends = torch.tensor([0, 15, 40], dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 25, "max_seqlen_k": 25}
    with running_on(place), poisoned():
        qc, qs, kc, ks, _ = quantize_qk(x, x, smooth_k=False)
        given = qc[0], kc[0], v, qs[0], ks[0]
        want = attention_quantized(*given, **options)
        v[15:] = math.inf
        got = attention_quantized(*given, **options)
    assert torch.equal(got[:15], want[:15]) and want.isfinite().all()


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    q = random(1, 5, 2, 16)
    with emulate("sm_90"):
        qc, qs, kc, ks, _ = quantize_qk(q, q)
        attention_quantized(qc, kc, q, qs, ks)
    with emulate("sm_80"):
        attention_quantized(qc, kc, *quantize_v(q)[:1], qs, ks, quantize_v(q)[1])
        ends = torch.tensor([0, 3], dtype=torch.int32)
        attention_quantized(
            qc[0], kc[0], q[0], qs[0], ks[0], cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=3, max_seqlen_k=3
        )


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_codes_are_the_nearest(dtype: torch.dtype, place: str) -> None:
    with running_on(place) as device:
        x = random(2, 70, 2, 48, device=device)
        x[0, 3, 1] = 0.0
        x[1, 69, 0, 5] = float("nan")
        largest = 127.0 if dtype == INT8 else 448.0
        with poisoned():
            codes, scales, *_ = quantize_qk(x, x, dtype=dtype, smooth_k=False)
            transposed, of_columns = quantize_v(x, dtype=dtype)
        amax = x.float().abs().amax(-1).transpose(1, 2)
        assert scales[0, 1, 3] == 1.0 and scales[1, 0, 69].isnan()
        amax[0, 1, 3] = largest
        torch.testing.assert_close(scales, amax / largest, equal_nan=True)
        step = 0.5 if dtype == INT8 else 16.0
        good = torch.ones_like(amax, dtype=torch.bool)
        good[1, 0, 69] = False
        error = (codes.float() - x.float() / scales.transpose(1, 2).unsqueeze(-1)).abs().amax(-1).transpose(1, 2)
        assert error[good].max() <= step + 0.01
        assert transposed.shape == (2, 2, 48, 80) and not transposed[:1, ..., 70:].float().any()
        assert of_columns.shape == (2, 2, 2, 48) and of_columns[1, 0, 1, 5].isnan()
        error = decoded_values(transposed[:1], of_columns[:1], 70) - x[:1].double()
        assert error.abs().max() <= 0.06 * x[:1].float().abs().max()


@at("cpu", "sm_80", "cuda")
def test_smooth_keys(place: str) -> None:
    """A channel that is large in all keys costs precision unless it is taken out; lse comes back with `taken`."""
    with running_on(place) as device:
        q, k, v = (random(1, 70, 2 if i == 0 else 1, 64, seed=i, device=device) for i in range(3))
        k[..., 7] += 20.0
        exact, exact_lse = exact_attention(q, k, v)
        errors = []
        for smooth in (True, False):
            qc, qs, kc, ks, taken = quantize_qk(q, k, smooth_k=smooth)
            out, lse = attention_quantized(qc, kc, v, qs, ks, return_lse=True)
            errors.append((out.double() - exact).norm().item())
            assert_near(lse + taken, exact_lse, 5e-3, "lse")
        assert errors[0] < 0.5 * errors[1]


@at("cpu", "sm_80", "sm_90", "cuda")
def test_packed_sequences(place: str) -> None:
    ends_q, ends_k = (0, 5, 5, 75), (0, 9, 20, 90)
    with running_on(place) as device:
        q, k, v = (random(n, h, 64, seed=h, device=device) for n, h in ((78, 4), (93, 2), (93, 2)))
        qc, qs, kc, ks, _ = quantize_qk(q.unsqueeze(0), k[:, :2].unsqueeze(0), smooth_k=False)
        cu = [torch.tensor(e, dtype=torch.int32, device=device) for e in (ends_q, ends_k)]
        with poisoned():
            out, lse = attention_quantized(
                qc[0], kc[0], v, qs[0], ks[0], causal=True, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_seqlen_q=70,
                max_seqlen_k=70, return_lse=True,
            )  # fmt: skip
        full_q, full_k = decoded(qc, qs)[0], decoded(kc, ks)[0]
        for b in range(3):
            rows, columns = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
            exact, exact_lse = exact_attention(
                full_q[rows].unsqueeze(0), full_k[columns].unsqueeze(0), v[columns].unsqueeze(0), causal=True
            )
            assert_near(out[rows], exact[0], 2.0**-6, "out")
            assert_near(lse[:, rows], exact_lse[0], 1e-4, "lse")
        assert not out[75:].any() and (lse[:, 75:] == float("-inf")).all()


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize(("lq", "lkv"), [(0, 5), (5, 0)])
def test_empty_lengths(lq: int, lkv: int, place: str) -> None:
    with running_on(place) as device:
        q, k = random(1, lq, 2, 16, device=device), random(1, lkv, 2, 16, device=device)
        qc, qs, kc, ks, _ = quantize_qk(q, k)
        for values, scales in ((k, None), quantize_v(k)):
            out, lse = attention_quantized(qc, kc, values, qs, ks, scales, return_lse=True)
            assert out.shape == (1, lq, 2, 16) and not out.any() and (lse == float("-inf")).all()


def test_threads_in_any_order_give_the_same_bits() -> None:
    results = []
    q = random(1, 70, 1, 64)
    for order in ("forward", "reverse"):
        with emulate("sm_80", order):
            qc, qs, kc, ks, taken = quantize_qk(q, q)
            values, scales = quantize_v(q)
            results.append((qc, qs, kc, ks, taken, values, attention_quantized(qc, kc, values, qs, ks, scales)))
    assert_equal_bits(*results)


@pytest.mark.gpu
def test_one_graph_serves_all_lengths() -> None:
    q, k, v = (random(3, 300, 4 if i == 0 else 2, 128, seed=i, device="cuda") for i in range(3))
    lengths = torch.tensor([300, 1, 0], dtype=torch.int32, device="cuda")
    qc, qs, kc, ks, _ = quantize_qk(q, k)
    replay = captured(lambda: attention_quantized(qc, kc, v, qs, ks, causal=True, seqused_k=lengths))
    for values in ((300, 1, 0), (17, 300, 129)):
        lengths.copy_(torch.tensor(values))
        assert torch.equal(replay(), attention_quantized(qc, kc, v, qs, ks, causal=True, seqused_k=lengths))


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        q = random(1, 5, 2, 16)
        codes, scales, *_ = quantize_qk(q, q)
        given = {"q": codes, "k": codes, "v": q, "scale_q": scales, "scale_k": scales}
        attention_quantized(**(given | changes))

    return call, message


BAD = {
    "dtype": bad("q has dtype bfloat16; expected int8 or float8_e4m3fn", q=random(1, 5, 2, 16)),
    "other dtype": bad("k has dtype float8_e4m3fn", k=random(1, 5, 2, 16).to(E4M3)),
    "scales": bad("scale_q has shape", scale_q=torch.ones(1, 2, 4)),
    "blocks": bad("block_q is 3; expected a power of two", block_q=3),
    "values": bad("v has dtype float32", v=torch.zeros(1, 5, 2, 16)),
    "codes of values": bad("v has shape .*multiple of 16", v=torch.zeros(1, 2, 16, 5, dtype=INT8)),
    "scales of values": bad("scale_v is None", v=torch.zeros(1, 2, 16, 16, dtype=INT8)),
    "out": bad("out_dtype is torch.float32", out_dtype=torch.float32),
    "width": ((lambda: quantize_qk(random(1, 5, 2, 24), random(1, 5, 2, 24))), "multiple of 16 from 16 to 128"),
    "granularity": (
        (lambda: quantize_qk(random(1, 5, 2, 16), random(1, 5, 2, 16), granularity="row")),
        "granularity is",
    ),
    "code": ((lambda: quantize_v(random(1, 5, 2, 16), dtype=BF16)), "dtype is torch.bfloat16"),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)


# ---- MXFP8 ----------------------------------------------------------------------------------------------------------


def _mx(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of [..., rows, heads, width], and bytes of scales with heads before rows."""
    codes, scales = rtkernels.quantize_mxfp8(x.reshape(-1, x.shape[-1]).bfloat16())
    scales = scales.view(torch.uint8).reshape(*x.shape[:-1], -1)
    return codes.view(x.shape), scales.transpose(-3, -2).contiguous()


@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_80"])
@pytest.mark.parametrize(
    ("width", "d_v", "lq", "lk", "causal"), [(64, 64, 70, 130, True), (128, 128, 65, 64, False), (96, 24, 3, 150, True)]
)
def test_mxfp8(
    target: str, width: int, d_v: int, lq: int, lk: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target == "sm_90":  # the kernel itself, although bfloat16 is faster there
        monkeypatch.setattr(quant_plan, "multiplies_mx", lambda target: "fp8_cvt" in target.features)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, d, generator=g) for n, h, d in ((lq, 4, width), (lk, 2, width), (lk, 2, d_v)))
    (q8, sq), (k8, sk), v = _mx(q * torch.rand(2, lq, 4, 1, generator=g) * 8), _mx(k * 4), v.bfloat16()
    values = [
        c.double() * decode_e8m0(s).double().repeat_interleave(32, -1).transpose(1, 2) for c, s in ((q8, sq), (k8, sk))
    ]
    exact = rtkernels.attention_quantized(q8, k8, v, sq, sk, causal=causal)
    scores = torch.einsum("bihd,bjhd->bhij", values[0], values[1].repeat_interleave(2, 2)) / width**0.5
    if causal:
        i, j = torch.arange(lq).view(-1, 1), torch.arange(lk)
        scores = scores.masked_fill(j > i + lk - lq, -torch.inf)
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double().repeat_interleave(2, 2))
    with rtkernels.emulate(target):
        got, lse = rtkernels.attention_quantized(
            q8, k8, v, sq.view(torch.float8_e8m0fnu), sk, causal=causal, return_lse=True
        )
        named = rtkernels.compat.gn.attn_mxfp8_qk(*(t.transpose(1, 2) for t in (q8, k8, v)), sq, sk).transpose(1, 2)
    assert float((lse - scores.logsumexp(-1)).abs().max()) < 1e-3
    for result in (exact, got, *([] if causal else [named])):
        assert float((result.double() - expected).abs().max()) < 0.03


def test_mxfp8_of_packed_sequences_and_wrong_arguments() -> None:
    g = torch.Generator().manual_seed(0)
    (q8, sq), (k8, sk) = (_mx(torch.randn(40, 2, 64, generator=g)) for _ in range(2))
    v, ends = torch.randn(40, 2, 64, generator=g).bfloat16(), torch.tensor([0, 25, 38], dtype=torch.int32)
    given = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 25, "max_seqlen_k": 25, "causal": True}
    expected = rtkernels.attention_quantized(q8, k8, v, sq, sk, **given)
    for target in ("sm_89", "sm_80"):
        with rtkernels.emulate(target):
            got = rtkernels.attention_quantized(q8, k8, v, sq, sk, **given)
        assert float((got.float() - expected.float()).abs().max()) < 0.03 and not got[38:].any()
    q8, k8, v = (t.unsqueeze(0) for t in (q8, k8, v))
    sq, sk = sq.unsqueeze(0), sk.unsqueeze(0)
    for told, arguments in (
        ("scale_k has dtype float32", (q8, k8, v, sq, torch.ones(1, 2, 40))),
        ("scale_q has one byte per scale", (q8, k8, v.half(), sq, sk)),
        ("scale_q has one byte per scale", (q8.view(torch.int8), k8.view(torch.int8), v, sq, sk)),
        ("scale_q has shape", (q8, k8, v, sq[..., :1].contiguous(), sk)),
    ):
        with pytest.raises(ArgumentError, match=told):
            rtkernels.attention_quantized(*arguments)
