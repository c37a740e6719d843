"""attention_decode over short caches: one launch of clusters, its masks, sinks, lengths and rows that do not exist."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at
from support.ways import captured
from torch import Tensor

import rtkernels
from rtkernels import attention_decode
from rtkernels.ops.attention import decode_cluster_plan
from rtkernels.runtime import targets

BF16, FP16 = torch.bfloat16, torch.float16


def make(batch: int, tokens: int, heads: int, heads_kv: int, width: int, keys: int, capacity: int, dtype: torch.dtype):
    """Return q, caches whose unused rows are NaN, and lengths."""
    generator = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(batch, length, count, width, generator=generator).to(dtype)
        for length, count in ((tokens, heads), (capacity, heads_kv), (capacity, heads_kv))
    )
    k[:, keys:], v[:, keys:] = torch.nan, torch.nan
    return q, k, v, torch.full((batch,), keys, dtype=torch.int32)


CASES = {
    "a policy": ((1, 2, 8, 1, 256, 970, 978, BF16), {"causal": False}),
    "causal, sinks": ((1, 3, 4, 2, 128, 50, 77, FP16), {"sinks": True}),
    "several sequences, a window": ((2, 1, 4, 2, 128, 130, 140, BF16), {"window": (60, 0)}),
    "no keys": ((1, 4, 2, 1, 128, 0, 20, BF16), {"causal": False}),
}


def check(name: str, place: str) -> None:
    sizes, options = CASES[name]
    tensors, options = make(*sizes), dict(options)
    sinks = torch.linspace(-1, 2, sizes[2]) if options.pop("sinks", False) else None
    wanted, wanted_lse = attention_decode(*tensors, sinks=sinks, return_lse=True, **options)
    with running_on(place) as device:
        given = [t.to(device) for t in tensors]
        own = None if sinks is None else sinks.to(device)
        found, lse = attention_decode(*given, sinks=own, return_lse=True, **options)
    near(found, wanted)
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=1e-4, atol=1e-4)


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.cpu().float(), wanted.float(), rtol=0.02, atol=0.004)


@at("sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, place: str) -> None:
    check(name, place)


def test_longer_caches_and_other_formats_go_elsewhere() -> None:
    from rtkernels.ops.attention.decode_plan import TENSORS, Decode

    call = Decode("bf16", 0, 1, 10, 8, 1, 256, 256, 978, 0, 0, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, 0, -1, -1, 0.1, 0.0)
    with rtkernels.emulate("sm_90"):
        assert decode_cluster_plan.steps(call, -1, TENSORS) is not None
        for other in ({"codes": 1}, {"lkv": 1025}, {"page_size": 24}, {"softcap": 5.0}, {"d_v": 128}, {"d_qk": 64}):
            assert decode_cluster_plan.steps(call._replace(**other), -1, TENSORS) is None
    assert not decode_cluster_plan.CLUSTER.supports(targets.parse("sm_80"))


@pytest.mark.gpu
def test_a_graph_serves_all_lengths() -> None:
    q, k, v, lengths = (t.cuda() for t in make(1, 10, 8, 1, 256, 978, 978, BF16))
    replay = captured(lambda: attention_decode(q, k, v, lengths, causal=False))
    for keys in (978, 500, 16):
        lengths.fill_(keys)
        near(replay(), attention_decode(q.cpu(), k.cpu(), v.cpu(), lengths.cpu(), causal=False))
