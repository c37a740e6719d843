"""Calls of attention drawn at random, among them shapes that nobody chose, against float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from ops.attention import test_gated_delta_rule, test_kda, test_sparse_mla, test_ssd
from support.attention_exact import exact_attention
from support.compare import running_on
from support.places import at
from torch import Tensor

from rtkernels import attention, attention_varlen, sparse_mla

BF16, FP16 = torch.bfloat16, torch.float16
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11}


class Draw(random.Random):
    """Choices of one seed, and tensors."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def laid(self, t: Tensor) -> Tensor:
        """Return the same values, dense or among NaN: in a slice, with rows and heads exchanged, or misaligned."""
        kind = self.choice(("dense", "sliced", "exchanged", "misaligned"))
        if kind == "sliced":
            heads, width = t.shape[-2:]
            view = torch.full((*t.shape[:-2], heads + 2, width + 8), math.nan, dtype=t.dtype)[..., 1:-1, 8:]
        elif kind == "exchanged":
            view = torch.full(t.transpose(-2, -3 % t.dim()).shape, math.nan, dtype=t.dtype).transpose(-2, -3 % t.dim())
        elif kind == "misaligned":
            view = torch.full((t.numel() + 1,), math.nan, dtype=t.dtype)[1:].view(t.shape)
        else:
            return t
        return view.copy_(t)


def check(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """Compare results, by the largest number of each row, and their lse."""
    out, lse = (t.double() for t in got)
    assert not out.isnan().any() and not lse.isnan().any()
    largest = want[0].abs().amax(-1, keepdim=True).clamp(min=0.05)
    assert bool(((out - want[0]).abs() <= 6 * UNIT[dtype] * largest).all())
    assert torch.equal(lse.isinf(), want[1].isinf())
    torch.testing.assert_close(lse.nan_to_num(neginf=0.0), want[1].nan_to_num(neginf=0.0), rtol=0.0, atol=1e-3)


@at("sm_80", "sm_90")
@pytest.mark.parametrize("seed", range(8))
def test_attention(seed: int, place: str) -> None:
    draw = Draw(seed)
    dtype, kv_heads, batch = draw.choice((BF16, FP16)), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2))
    heads = kv_heads * draw.choice((1, 2, 3, 5, 6, 7, 41) if kv_heads == 1 else (1, 2, 3, 5))
    width = 8 * draw.choice((1, 3, 5, 8, 9, 12, 13, 16, 17, 22, 24, 25, 32))
    queries, keys = draw.choice((1, 2, 3, 9, 17, 33)), draw.choice((1, 2, 7, 31, 64, 65, 129, 180))
    q = draw.normal(batch, queries, heads, width, dtype=dtype)
    k = draw.normal(batch, keys, kv_heads, width, dtype=dtype)
    v = draw.normal(batch, keys, kv_heads, draw.choice((width, 8, min(width + 8, 256))), dtype=dtype)
    options = {"causal": draw.random() < 0.5}
    if draw.random() < 0.3:
        options["window"] = draw.choice((0, 3, 40))
    if draw.random() < 0.15:
        options["softcap"] = 2.0
    if draw.random() < 0.15:
        options["sinks"] = draw.normal(heads)
    if draw.random() < 0.25:
        options["seqused_k"] = draw.integers(0, keys + 1, batch)
    want = exact_attention(q, k, v, **options)
    for b, n in enumerate(options["seqused_k"].tolist() if "seqused_k" in options else ()):
        k[b, n:], v[b, n:] = math.nan, math.nan
    with running_on(place):
        check(attention(*(draw.laid(t) for t in (q, k, v)), return_lse=True, **options), want, dtype)


@at("sm_80", "sm_90")
@pytest.mark.parametrize("seed", range(5))
def test_attention_of_packed_sequences(seed: int, place: str) -> None:
    """Also without queries or without keys; what is behind the last sequence is NaN."""
    draw = Draw(seed)
    dtype, kv_heads, padding = draw.choice((BF16, FP16)), draw.choice((1, 2)), draw.choice((0, 3))
    heads, width = kv_heads * draw.choice((1, 2, 3, 5, 7)), 8 * draw.choice((2, 5, 8, 9, 13, 16, 19, 24))
    lengths = [(draw.choice((0, 1, 3, 20, 40)), draw.choice((0, 1, 9, 30, 70))) for _ in range(draw.randint(1, 5))]
    ends = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    (total_q, total_k), options = ends[-1].tolist(), {"causal": draw.random() < 0.6}
    q = draw.normal(total_q + padding + 1, heads, width, dtype=dtype)
    k, v = (draw.normal(total_k + padding + 1, kv_heads, width, dtype=dtype) for _ in range(2))
    q[total_q:], k[total_k:], v[total_k:] = math.nan, math.nan, math.nan
    parts = []
    for (q0, k0), (q1, k1) in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        parts.append(exact_attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options))
    outs, logs = ([t[0] for t in part] for part in zip(*parts, strict=True))
    longest = [max(column) + draw.choice((0, 5)) for column in zip(*lengths, strict=True)]
    with running_on(place):
        cu_q, cu_k = (ends[:, i].contiguous() for i in range(2))
        out, lse = attention_varlen(
            *(draw.laid(t) for t in (q, k, v)), cu_q, cu_k, *longest, return_lse=True, **options
        )
    assert not out[total_q:].any()
    check((out[:total_q], lse[:, :total_q]), (torch.cat(outs), torch.cat(logs, 1)), dtype)


@at("sm_80", "sm_90")
@pytest.mark.parametrize("seed", range(5))
def test_sparse_attention(seed: int, place: str) -> None:
    """Indices outside of the cache on both sides, keys that nobody chose NaN, sinks, positions before the first key."""
    draw = Draw(seed)
    coded, dtype = draw.random() < 0.4, draw.choice((BF16, FP16))
    width = 576 if coded else 8 * draw.choice((1, 3, 8, 9, 33, 64, 65, 72))
    value_width = 512 if coded else min(512, 8 * draw.randint(1, width // 8))
    tokens, heads = draw.choice((1, 2, 3)), draw.choice((1, 3, 33, 64, 65))
    keys, count = draw.choice((1, 5, 64, 300)), draw.choice((1, 5, 64, 65, 129, 300))
    q, latents = draw.normal(tokens, heads, width, dtype=dtype), draw.normal(keys, width)
    kv, latents = test_sparse_mla.packed(latents) if coded else (latents.to(dtype),) * 2
    indices = draw.integers(-3, keys + 3, tokens, count)
    positions = draw.integers(-1, keys + 2, tokens) if draw.random() < 0.5 else None
    sinks = draw.normal(heads) if draw.random() < 0.4 else None
    scale = 0.3 / math.sqrt(width)
    want = test_sparse_mla.exact(q, latents, indices, value_width, scale, positions, sinks)
    unused = torch.ones(keys, dtype=torch.bool)
    unused[indices[(indices >= 0) & (indices < keys)].long()] = False
    kv = kv.clone()
    kv[unused] = 255 if coded else math.nan
    with running_on(place):
        got = sparse_mla(
            draw.laid(q), kv, indices, scale=scale, value_width=value_width, positions=positions, sinks=sinks,
            return_lse=True,
        )  # fmt: skip
    check(got, want, dtype)


@at("sm_80", "sm_90")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ("ssd", "heads", "channels"))
def test_scans(rule: str, seed: int, place: str) -> None:
    """Packed sequences of 0 to 70 tokens that share chunks of memory, with all gradients."""
    draw = Draw(seed)
    dtype, tokens, key_heads = draw.choice((BF16, FP16)), draw.choice((2, 63, 65, 100, 129)), draw.choice((1, 1, 2))
    heads, d_k, d_v = key_heads * draw.choice((1, 2, 3)), 8 * draw.randint(1, 16), 8 * draw.choice((1, 2, 8, 9, 17, 25))
    ends = [0]
    while ends[-1] < tokens - 1 and len(ends) < 6:
        ends.append(min(tokens - 1, ends[-1] + draw.choice((0, 1, 2, 63, 64, 65, 70))))
    sizes, decay = (d_k, d_v, len(ends) - 1, dtype), draw.choice((0.01, 0.3, 2.0))
    if rule == "ssd":
        test_ssd.check(test_ssd.inputs(tokens, key_heads, heads, *sizes, decay), ends, place)
    elif rule == "heads":
        inputs = test_gated_delta_rule.inputs(tokens, key_heads, heads, *sizes, decay)
        test_gated_delta_rule.check(inputs, ends, place)
    else:
        test_gated_delta_rule.check(test_kda.inputs(tokens, heads, *sizes, decay, key_heads), ends, place)
