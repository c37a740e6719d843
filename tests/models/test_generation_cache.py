"""The cache of fixed capacity: rows without padding, rings, and the kernels that write and read them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rtkernels

pytest.importorskip("transformers", minversion="5.0")

from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from rtkernels.models.generation.cache import FixedCache

WINDOW, HEADS, WIDTH, STEPS = 6, 2, 16, 10


def columns(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return keys and values of three rows."""
    generator = torch.Generator().manual_seed(count)
    shape = (2, 3, HEADS, count, WIDTH)
    return tuple(torch.randn(shape, generator=generator).to(dtype))


def loaded(k: Tensor, v: Tensor, length: int, start: Tensor, capacity: int) -> FixedCache:
    prompt = Cache(layers=[DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)])
    for layer in (0, 1):
        prompt.update(k[:, :, :length], v[:, :, :length], layer)
    cache = FixedCache(prompt, capacity)
    cache.load(prompt, start, length)
    return cache


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("padded", [False, True])
def test_every_key_is_where_it_should_be(length: int, padded: bool) -> None:
    k, v = columns(length + STEPS)
    start = torch.tensor([min(3, length - 1), 0, length - 1]) if padded else torch.zeros(3, dtype=torch.int64)
    cache = loaded(k, v, length, start, 16)
    rows = (length - start).to(torch.int32)
    for column in range(length, length + STEPS):
        if column == 15:
            cache, smaller = FixedCache(cache, 32), cache
            cache.take(smaller)
        cache.begin(rows)
        for layer, window in ((0, None), (1, WINDOW)):
            new = (t[:, :, column : column + 1] for t in (k, v))
            found = cache.update(*new, layer)
            seen = cache.layers[layer].lengths.seen
            for row, first in enumerate(start.tolist()):
                count = column + 1 - first
                assert int(seen[row]) == (count if window is None else min(count, window))
                for token in range(count - int(seen[row]), count):
                    slot = token if window is None else token % window
                    for got, wanted in zip(found, (k, v), strict=True):
                        assert torch.equal(got[row, :, slot], wanted[row, :, first + token])
        rows += 1


def test_the_length_is_not_known_on_the_host() -> None:
    cache = loaded(*columns(5), 4, torch.zeros(3, dtype=torch.int64), 16)
    with pytest.raises(rtkernels.RtkError, match="only the device knows"):
        cache.get_seq_length()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_write_and_read_a_ring(arch: str) -> None:
    """In the emulator, attention over the ring is attention over the last keys in their order."""
    k, v = columns(12, torch.bfloat16)
    start = torch.tensor([3, 0, 6])
    cache = loaded(k, v, 7, start, 16)
    rows, q = (7 - start).to(torch.int32), torch.randn(3, 1, 2 * HEADS, WIDTH).to(torch.bfloat16)
    for column in range(7, 12):
        cache.begin(rows)
        with rtkernels.emulate(arch):
            keys, values = (t.transpose(1, 2) for t in cache.update(k[:, :, column, None], v[:, :, column, None], 1))
            got = rtkernels.attention_decode(q, keys, values, cache.layers[1].lengths.seen)
        for row, first in enumerate(start.tolist()):
            last = slice(max(first, column + 1 - WINDOW), column + 1)
            one = [t[row : row + 1, :, last].transpose(1, 2) for t in (k, v)]
            count = torch.tensor([one[0].shape[1]], dtype=torch.int32)
            wanted = rtkernels.attention_decode(q[row : row + 1], *one, count)
            torch.testing.assert_close(got[row : row + 1], wanted, rtol=0.02, atol=0.02)
        rows += 1
