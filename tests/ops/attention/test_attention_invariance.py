"""Attention with batch invariance: one sequence has the same bits in every form in which it can be computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels as rtk
from rtkernels import ArgumentError

LENGTH, HEADS, KEY_HEADS, PAGE = 140, 4, 2, 16
EXACT = at("sm_80", "sm_90", "cuda")


def _normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def _sequence(width: int) -> list[Tensor]:
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [_normal(LENGTH, n, width, seed=i, scale=2.0) for i, n in enumerate(heads)]


def _batch(tensors: list[Tensor], place: int, count: int, longer: int = 0) -> list[Tensor]:
    """Return batches with a sequence among others, whose elements are large, and padding after it."""
    found = []
    for i, t in enumerate(tensors):
        others = _normal(count, LENGTH + longer, *t.shape[1:], seed=10 + i, scale=40.0)
        others[place, :LENGTH] = t
        found.append(others)
    return found


def _packed(t: Tensor, seed: int) -> Tensor:
    before, after = (_normal(n, *t.shape[1:], seed=seed + i, scale=40.0) for i, n in enumerate((35, 3)))
    return torch.cat([before, t, after])


def _int32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _pages(t: Tensor, table: Tensor) -> Tensor:
    pages = _normal(len(table) + 2, PAGE, *t.shape[1:], seed=3, scale=40.0)
    padded = torch.cat([t, t.new_zeros(len(table) * PAGE - len(t), *t.shape[1:])])
    pages[table.long()] = padded.unflatten(0, (-1, PAGE))
    return pages


@EXACT
@pytest.mark.parametrize(
    ("width", "softcap"),
    [(64, 0.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((64, 20.0), (128, 0.0)))],
)
def test_prompts_chunks_and_decoding(width: int, softcap: float, place: str) -> None:
    options = {"causal": True, "softcap": softcap}
    with running_on(place) as device, rtk.batch_invariant(1):
        sequence = _sequence(width)
        q, k, v = (t.to(device) for t in sequence)
        alone = rtk.attention(q[None], k[None], v[None], **options)[0]
        batch = [t.to(device) for t in _batch(sequence, 1, 2, longer=9)]
        assert torch.equal(rtk.attention(*batch, **options)[1, :LENGTH], alone)
        ends = _int32(device, 0, 35, 35 + LENGTH, 38 + LENGTH)
        packed = [_packed(t, 5).to(device) for t in sequence]
        result = rtk.attention_varlen(*packed, ends, ends, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH, **options)
        assert torch.equal(result[35 : 35 + LENGTH], alone)

        table = torch.randperm(-(-LENGTH // PAGE), generator=torch.Generator().manual_seed(0)).int()
        pages = [_pages(t, table).to(device) for t in sequence[1:]]
        table = table[None].to(device)
        for first, end in ((0, LENGTH), (0, 37), (37, LENGTH)):
            chunk = rtk.attention(q[None, first:end], k[None, :end], v[None, :end], **options)[0]
            assert torch.equal(chunk, alone[first:end]), (first, end)
            cut = _int32(device, 0, end - first), None
            result = rtk.attention_varlen(
                q[first:end], *pages, *cut, max_seqlen_q=end - first, max_seqlen_k=LENGTH, page_table=table,
                seqused_k=_int32(device, end), **options,
            )  # fmt: skip
            assert torch.equal(result, alone[first:end]), (first, end)
        places = [0, 1, 63, 64, 127, 128, LENGTH - 1]
        queries, lengths = q[places], _int32(device, *(i + 1 for i in places))
        caches = [t[None].expand(len(places), -1, -1, -1).clone() for t in (k, v)]
        for cache in caches:
            for row, i in zip(cache, places, strict=True):
                row[i + 1 :] = torch.nan
        assert torch.equal(rtk.attention_decode(queries, *caches, lengths, softcap=softcap), alone[places])
        tables = table.expand(len(places), -1).contiguous()
        result = rtk.attention_decode(queries, *pages, lengths, page_table=tables, softcap=softcap)
        assert torch.equal(result, alone[places])
        single = rtk.attention_decode(queries[-1:], *pages, lengths[-1:], page_table=tables[-1:])
        assert softcap or torch.equal(single, alone[-1:])


@EXACT
@pytest.mark.parametrize("window", [(40, 0), (100, 0)])
def test_chunks_under_a_window(window: tuple[int, int], place: str) -> None:
    """Tiles of keys that a query does not see are read for others of its tile, before its own ones and after them."""
    length = 200
    with running_on(place) as device, rtk.batch_invariant(1):
        heads = enumerate((2, 1, 1))
        q, k, v = (_normal(1, length, count, 64, seed=i, scale=2.0).half().to(device) for i, count in heads)
        alone, sums = rtk.attention(q, k, v, causal=True, window=window, return_lse=True)
        for first in (30, 64, 130, 190):
            out, lse = rtk.attention(q[:, first:], k, v, causal=True, window=window, return_lse=True)
            assert torch.equal(out, alone[:, first:]) and torch.equal(lse, sums[..., first:]), first


def _gradients(function: Callable[..., Tensor], tensors: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    return list(torch.autograd.grad(function(*leaves), leaves, dout))


@EXACT
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_a_sequence(causal: bool, place: str) -> None:
    with running_on(place) as device, rtk.batch_invariant(2):
        sequence = [*_sequence(64), _normal(LENGTH, HEADS, 64, seed=9)]
        *qkv, dout = (t.to(device)[None] for t in sequence)
        alone = _gradients(lambda *t: rtk.attention(*t, causal=causal), qkv, dout)
        *batch, dout = (t.to(device) for t in _batch(sequence, 2, 3))
        for found, wanted in zip(
            _gradients(lambda *t: rtk.attention(*t, causal=causal), batch, dout), alone, strict=True
        ):
            assert torch.equal(found[2], wanted[0])
        *packed, dout = (_packed(t, 5).to(device) for t in sequence)
        ends = _int32(device, 0, 35, 35 + LENGTH, 38 + LENGTH)

        def function(*tensors: Tensor) -> Tensor:
            return rtk.attention_varlen(*tensors, ends, ends, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH, causal=causal)

        for found, wanted in zip(_gradients(function, packed, dout), alone, strict=True):
            assert torch.equal(found[35 : 35 + LENGTH], wanted[0])


@at("sm_90")
@pytest.mark.parametrize(("heads", "width"), [(1, 256), (3, 64), (7, 64)])
def test_what_is_refused_over_pages(heads: int, width: int, place: str) -> None:
    q, cache = _normal(2, heads, width, seed=0), _normal(2, PAGE, 1, width, seed=1)
    lengths, table = torch.ones(2, dtype=torch.int32), torch.arange(2, dtype=torch.int32)[:, None]
    with running_on(place), rtk.batch_invariant(1):
        with pytest.raises(ArgumentError, match="batch-invariant"):
            rtk.attention_decode(q, cache, cache, lengths, page_table=table)
        rtk.attention_decode(q, *(cache[:, :1],) * 2, lengths)  # the same without pages
        assert not rtk.attention_decode(q, *(cache[:0],) * 2, 0 * lengths, page_table=table[:, :0]).any()


@EXACT
def test_an_8_bit_cache(place: str) -> None:
    with running_on(place) as device, rtk.batch_invariant(1):
        q = _normal(3, HEADS, 64, seed=0).to(device)
        cache = _normal(3, 300, KEY_HEADS, 64, seed=1).to(torch.float8_e4m3fn).to(device)
        lengths = _int32(device, 300, 17, 160)
        whole = rtk.attention_decode(q, cache, cache, lengths)
        for i in range(3):
            part = slice(i, i + 1)
            assert torch.equal(rtk.attention_decode(q[part], cache[part], cache[part], lengths[part]), whole[part])
