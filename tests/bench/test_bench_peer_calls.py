"""Adapters called with stand-ins of their libraries: do they compute what the row does?"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import peers
from bench.measure.run import relative_error, tensors
from bench.rows.attention import attention, decode
from bench.rows.gemm import gated_mm, scaled_mm
from bench.rows.loss import linear_divergence, linear_logprob
from bench.rows.rope import rope
from bench.rows.row import Row


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        part = ".".join(parts[:i])
        module = sys.modules.get(part) if i < len(parts) else None
        monkeypatch.setitem(sys.modules, part, module or ModuleType(part))
    for key, function in functions.items():
        setattr(sys.modules[name], key, function)


def _attention(q, k, v, softmax_scale=None, causal=False, num_splits=1, deterministic=False):
    if num_splits == 0:
        raise NotImplementedError("no heuristic here")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2), None


def _paged(q, k, v, seqused_k=None, page_table=None, num_splits=1, **_):
    k, v = (cache[page_table.long()].flatten(1, 2) for cache in (k, v))
    assert bool((seqused_k == k.shape[1]).all())
    return _attention(q, k, v, num_splits=num_splits)


def _agrees(row: Row, peer: str, inputs: dict[str, Any] | None = None) -> None:
    given = row.make("cpu", torch.Generator().manual_seed(1)) if inputs is None else inputs
    call = peers.adapters_of(row)[peer](**given)
    assert relative_error(tensors(call())[:1], tensors(row.torch(**given))[:1]) < 0.03


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "flash_attn.cute", flash_attn_func=_attention, flash_attn_varlen_func=_paged)


@pytest.mark.parametrize("causal", [False, True])
def test_fa4_attention(fa4: None, causal: bool) -> None:
    forward, backward = attention.pair(2, 6, 2, 17, 32, causal)
    _agrees(forward, "fa4")
    given = forward.make("cpu", torch.Generator().manual_seed(1))
    given |= {"dy": torch.randn(2, 17, 6, 32).bfloat16(), "scale": 32**-0.5}
    for name in ("fa4", "fa4_deterministic"):
        _agrees(backward, name, given)


@pytest.mark.parametrize("page", [None, 16])
def test_fa4_decode(fa4: None, page: int | None) -> None:
    _agrees(decode.at(3, 32, 6, 2, 32, torch.bfloat16, page), "fa4")
    row = decode.at(3, 32, 6, 2, 32, torch.int8, 16)
    with pytest.raises(peers.Absent, match="dtype of q"):
        _agrees(row, "fa4")


def test_quack_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(a, b, activation, store_preact, tuned):
        assert activation == "swiglu" and not store_preact
        out = a @ b
        return None, F.silu(out[:, ::2]) * out[:, 1::2]

    _install(monkeypatch, "quack.gemm_interface", gemm=lambda a, b, tuned: a @ b, gemm_gated=gated)
    for name in ("quack", "quack_tuned"):
        _agrees(scaled_mm.product("bf16", 5, 16, 24), name)
        _agrees(gated_mm.at(5, 16, 24), name)
    with pytest.raises(peers.Absent, match="8 bits"):
        _agrees(scaled_mm.product("fp8_row", 5, 16, 32), "quack")


def test_quack_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    def rotary(x, cos, sin):
        a, b = x.float().chunk(2, -1)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    _install(monkeypatch, "quack.rotary", apply_rotary=rotary)
    _agrees(rope.forward(2, 7, 4, 2, 16), "quack")


def test_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fp8(a, b, out):
        left = a[0].float() * a[1].repeat_interleave(128, 1)[:, : a[0].shape[1]]
        scale = b[1].repeat_interleave(128, 0)[: b[0].shape[0]].repeat_interleave(128, 1)[:, : b[0].shape[1]]
        out.copy_(left @ (b[0].float() * scale).t())

    same = {"get_mn_major_tma_aligned_tensor": lambda scale: scale}
    _install(monkeypatch, "deep_gemm", fp8_gemm_nt=fp8, bf16_gemm_nt=lambda a, b, out: out.copy_(a @ b.t()), **same)
    _agrees(scaled_mm.product("fp8_block", 5, 200, 264), "deepgemm")
    for kind in ("fp8_row", "fp8_tensor", "int8"):
        with pytest.raises(peers.Absent, match="DeepGEMM"):
            _agrees(scaled_mm.product(kind, 5, 200, 264), "deepgemm")


def test_padded_products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that torch's products get, and the part of their results that is compared."""

    def scaled(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    def integers(a, b):
        assert a.shape[0] > 16 and a.shape[1] % 8 == b.shape[1] % 8 == 0
        return a.int() @ b.int()

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(torch, "_int_mm", integers)
    for kind in ("fp8_row", "fp8_tensor", "int8"):
        row = scaled_mm.product(kind, 5, 40, 72)
        given = row.make("cpu", torch.Generator().manual_seed(1))
        got = row.backends["padded"](**given)()
        assert got.shape == (5, 40) and relative_error(got, row.exact(**given)) < 0.03
    assert "torch_padded" in peers.torch_peers(scaled_mm.product("int8", 5, 40, 72), None)

    calls = []

    def blocks(a, b, scale_a, scale_b):
        calls.append(scale_b.stride())
        if scale_b.shape[1] % 4 == 0:  # as versions that want to see no padding
            raise ValueError("shape")
        return scaled_mm._torch(a, b, scale_a, scale_b)

    monkeypatch.setattr(scaled_mm, "_blocks", blocks)
    row = scaled_mm.product("fp8_block", 5, 200, 264)
    given = row.make("cpu", torch.Generator().manual_seed(1))
    got = row.backends["padded"](**given)()
    assert calls == [(4, 1)] * 3 and got.shape == (5, 200)
    monkeypatch.setattr(scaled_mm, "_blocks", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        row.backends["padded"](**given)


def test_backends_of_torch_attention_are_peers() -> None:
    forward, backward = attention.pair(1, 2, 1, 9, 32, True)
    assert {"torch_cudnn", "torch_flash", "torch_fused"} <= set(peers.torch_peers(forward, None))
    assert {"torch_cudnn", "torch_flash", "torch_fused"} <= set(peers.torch_peers(backward, forward))
    given = forward.make("cpu", torch.Generator().manual_seed(1))
    # On a CPU only flash attention is there.
    call = peers.torch_peers(forward, None)["torch_flash"](**given)
    assert relative_error(call(), forward.exact(**given)) < 0.03


# ---- heads of trainers ----------------------------------------------------------------------------------------------


def _statistics(hidden, weight, ids):
    logp = (hidden @ weight.t()).float().log_softmax(-1)
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions with the signatures of TRL, Liger and verl."""

    def trl(hidden, weight, bias, ids, temperature, chunk, softcap, scale, outputs):
        assert bias is None and softcap is None and (temperature, chunk, scale, outputs) == (1.0, 32, 1.0, ("entropy",))
        return *_statistics(hidden, weight, ids), None, None, None

    def liger(hidden, weight, ids, temperature, ignore_index, tiles, return_entropy):
        assert (temperature, ignore_index, tiles, return_entropy) == (1.0, -100, 1, True)
        logprob, entropy = _statistics(hidden, weight, ids)
        return -logprob, entropy.bfloat16()

    def chunked(hidden, weight, ids, bias, temperature, chunk):
        assert bias is None and temperature == 1.0
        return _statistics(hidden, weight, ids)[0]

    def verl(hidden, weight, ids, temperature, reduction):
        assert (temperature, reduction) == (1.0, "none")
        return _statistics(hidden, weight, ids)

    apply = {"ChunkedLogProbFunction": SimpleNamespace(apply=trl)}
    _install(monkeypatch, "trl.kernels", **apply)
    _install(monkeypatch, "trl.trainer.utils", _CHUNKED_LOGPROB_CHUNK_SIZE=32)
    _install(
        monkeypatch, "liger_kernel.ops", LigerFusedLinearScaledCrossEntropyFunction=SimpleNamespace(apply=liger)
    )  # fmt: skip
    _install(
        monkeypatch, "liger_kernel.chunked_loss.fused_linear_ppo",
        _ChunkedSelectiveLogProbFunction=SimpleNamespace(apply=chunked),
    )  # fmt: skip
    _install(monkeypatch, "verl.utils.kernel.linear_cross_entropy", linear_cross_entropy=verl)


@pytest.mark.parametrize("peer", ["trl", "liger", "liger_chunked", "verl"])
def test_heads(heads: None, peer: str) -> None:
    forward, both = list(linear_logprob.rows())[:2]
    hidden, weight, ids = torch.randn(6, 8), torch.randn(40, 8), torch.randint(0, 40, (6,))
    given = {"hidden": hidden, "weight": weight, "ids": ids}
    _agrees(forward, peer, given)
    given["g"] = torch.rand(6)
    _agrees(both, peer, given)
    grads, wanted = peers.adapters_of(both)[peer](**given)()[-2:], both.torch(**given)[-2:]
    if peer != "liger_chunked":  # which has no entropy
        assert relative_error(list(grads), list(wanted)) < 0.03


def test_heads_of_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    def trl(student, head, bias, teacher, teacher_head, teacher_bias, beta):
        assert bias is None and teacher_bias is None and beta == 0.5
        return linear_divergence._divergence(student, head, teacher, teacher_head), None

    def liger(weight_hard_loss, weight_soft_loss, beta):
        assert (weight_hard_loss, weight_soft_loss, beta) == (0.0, 1.0, 0.5)
        return lambda *heads: linear_divergence._divergence(*heads[:4]).mean()

    _install(monkeypatch, "trl.kernels.chunked_divergence", ChunkedDivergenceFunction=SimpleNamespace(apply=trl))
    _install(monkeypatch, "liger_kernel.chunked_loss", LigerFusedLinearJSDLoss=liger)
    (row,) = linear_divergence.rows()
    given = {
        "student": torch.randn(6, 8), "head": torch.randn(40, 8), "teacher": torch.randn(6, 4),
        "teacher_head": torch.randn(40, 4),
    }  # fmt: skip
    _agrees(row, "trl", given)
    call = peers.adapters_of(row)["liger"](**given)
    found, wanted = call(), row.torch(**given)
    assert call.compare(found).shape == wanted[0].shape
    assert relative_error([found[1] * 6], [wanted[1]]) < 0.03
