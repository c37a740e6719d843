"""Attention where its kernels have corners: last chunks, edges of masks, empty tiles, far caps, saturated codes.

The cheapest calls that distinguish kernels from their mutants (docs/mutation.md).
"""

from __future__ import annotations

import math

import pytest
import torch
from ops.attention import test_attention, test_attention_sm90, test_decode, test_mla_decode
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.inference import assert_like_reference
from support.places import at

import rtkernels
from rtkernels import append_kv_cache, attention_decode, lightning_attention, qkv_split
from rtkernels.ops.attention import decode_plan, sm90_forward_plan
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.plans import Plans

BF16, FP16 = torch.bfloat16, torch.float16

DENSE = {
    "62 keys more than queries": ((1, 70, 132, 1, 1, 64), BF16, {"causal": True}),
    "a cap nearby": ((1, 20, 40, 1, 1, 64), BF16, {"softcap": 2.0}),
    "a cap far away": ((1, 20, 40, 1, 1, 64), BF16, {"softcap": 1e6}),
    "padded heads": ((1, 17, 33, 2, 2, 88), BF16, {}),
    "bias of heads": ((2, 9, 20, 2, 2, 64), BF16, {"bias": test_attention.normal(2, 2, 9, 20, seed=9)}),
}


@at("sm_80")
@pytest.mark.parametrize("name", DENSE)
def test_mma(place: str, name: str) -> None:
    with running_on(place) as device:
        test_attention.check(*DENSE[name], device, backend="mma")


@at("sm_90")
@pytest.mark.parametrize("more", (62, 126))
def test_last_keys_of_a_causal_tile(place: str, more: int) -> None:
    """The first query of a tile sees all of its keys but one."""
    with rtkernels.emulate(place):
        emulate_features(90)
        tensors = test_attention_sm90.qkv(1, 70, 70 + more, 1, 1, 64)
        test_attention_sm90.check_forward(*tensors, right=0)
        test_attention_sm90.check_backward(*tensors, right=0)


@at("sm_90")
def test_tiles_that_see_nothing_between_others(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than blocks, with a narrower last band of heads."""
    monkeypatch.setattr(sm90_forward_plan, "_L2_BYTES", 2 * 2 * 100 * 128)
    Plans.forget_all()
    with rtkernels.emulate(place):
        emulate_features(90)
        test_attention_sm90.check_forward(*test_attention_sm90.qkv(1, 300, 100, 3, 3, 64), right=0)
    Plans.forget_all()


@at("sm_90")
def test_bias_of_queries_alone(place: str) -> None:
    """A bias that is expanded over keys has a stride of 0."""
    with rtkernels.emulate(place):
        emulate_features(90)
        bias = test_attention_sm90.random(2, 1, 19, 1, seed=3).expand(2, 1, 19, 70)
        bias = bias + torch.zeros(1, 2, 1, 1, dtype=bias.dtype)
        wide = test_attention_sm90.random(2, 2, 19, 140, seed=4)[..., ::2]
        for given in (bias, wide):
            test_attention_sm90.check_forward(*test_attention_sm90.qkv(2, 19, 70, 2, 1, 64), {"bias": given})


DECODE = {
    "a warp has seven chunks": ({"lengths": (440,), "capacity": 448, "page": 0, "heads_kv": 4, "heads": 4}, {}),
    "seven chunks in pages": ({"lengths": (447,), "capacity": 448, "page": 32, "heads_kv": 4, "heads": 4}, {}),
    "splits of large scores": (
        {"lengths": (700, 0), "capacity": 704, "page": 16, "heads": 2, "heads_kv": 1, "tokens": 2},
        {"scale": 40.0},
    ),
}


@at("sm_80")
@pytest.mark.parametrize("name", DECODE)
def test_decode_over(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, options = DECODE[name]
    if "splits" not in name:
        monkeypatch.setattr(decode_plan, "_MIN_KEYS", 1 << 20)
    Plans.forget_all()
    with running_on(place) as device:
        test_decode.check(size, options, device)
    Plans.forget_all()


@at("sm_90")
def test_decode_waits_for_its_inputs(place: str) -> None:
    """A kernel that may start early reads nothing that the previous one has yet to write."""
    with running_on(place):
        arguments, *_ = test_decode.make((40,), 48, 16)
        arguments["q"] = rtkernels.rms_norm(arguments["q"], torch.ones(64, dtype=BF16))
        attention_decode(**arguments)
        qkv = rtkernels.rms_norm(torch.randn(3, 64).to(BF16), torch.ones(64, dtype=BF16))
        qkv_split(qkv, 2, 1)


@at("sm_90")
def test_latents_in_several_rounds(place: str) -> None:
    """Scores grow from tile to tile, so accumulators are rescaled."""
    size = {"lengths": (900,), "capacity": 900, "page": 0, "heads": 2, "width": 72}
    with running_on(place) as device:
        arguments, _ = test_mla_decode.cached(**size, device=device)
        arguments["kv_cache"] *= (0.05 * 64 ** torch.linspace(0.0, 1.0, 900)).view(-1, 1).to(BF16)
        with poisoned():
            out, lse = rtkernels.mla_decode(**arguments, value_width=64, scale=1.0, return_lse=True)
        k = arguments["kv_cache"].unsqueeze(2)
        exact = test_mla_decode.exact_attention(
            arguments["q"], k, k[..., :64], causal=True, seqused_k=arguments["seqlens"], scale=1.0
        )
        assert_near(out, exact[0], 2.0**-7, "out")
        assert_near(lse, exact[1], 1e-4, "lse")


@at("sm_90")
def test_codes_are_saturated_at_both_ends(place: str) -> None:
    x = torch.tensor([-300.0, 300.0, -200.0, -128.4, 127.6, -127.4, 0.4, 0.6] * 2).view(1, 1, 1, 16).to(FP16)
    with running_on(place) as device:
        caches = [torch.zeros(1, 2, 1, 16, dtype=torch.int8, device=device) for _ in range(2)]
        one = torch.ones(1, device=device)
        append_kv_cache(x, -x, *caches, torch.zeros(1, dtype=torch.int32), k_scale=one, v_scale=one)
    want = x.float().round().clamp(-127, 127)
    assert torch.equal(caches[0][0, 0], want[0, 0].to(torch.int8))
    assert torch.equal(caches[1][0, 0], -want[0, 0].to(torch.int8))


@at("sm_90")
def test_heads_of_one_vector_and_a_half(place: str) -> None:
    qkv = torch.randn(3, 4 * 24).to(BF16)
    assert_like_reference(place, qkv_split, qkv, 2, 1)
    weight = torch.rand(24).to(BF16)
    assert_like_reference(place, qkv_split, 0.01 * qkv, 2, 1, q_norm=weight, k_norm=weight)


@at("sm_80")
def test_states_that_are_almost_zero(place: str) -> None:
    """Magnitudes that no power of two brings into the range of fp16."""
    q, k, v = (torch.randn(1, 3, 1, 16).to(FP16) for _ in range(3))
    decay = torch.zeros(1)
    with running_on(place):
        for tiny in (6e-35, 1e-37, 1e-40):
            state = torch.full((1, 1, 16, 16), tiny)
            with_state, without = (
                lightning_attention(q, k, v, decay, initial_state=s) for s in (state, torch.zeros_like(state))
            )
            torch.testing.assert_close(with_state, without, rtol=2.0**-9, atol=1e-6)
            assert math.isfinite(with_state.float().sum().item())
