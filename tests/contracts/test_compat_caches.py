"""``rtkernels.compat.flaggems``: writers of KV caches against loops over tokens, wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

from rtkernels import ArgumentError
from rtkernels.compat.flaggems import concat_and_cache_mla, reshape_and_cache, reshape_and_cache_flash

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PAGES, SIZE, TOKENS = 5, 16, 9
SLOTS = (3, 70, -1, 17, 0, 16, -1, 79, 40)  # the last rows of key are padding
# dtype of the tokens, word of vLLM, dtype of the cache
KINDS = {
    "bf16": (BF16, "auto", BF16),
    "fp16": (FP16, "auto", FP16),
    "fp32": (FP32, "auto", FP32),
    "e4m3": (BF16, "fp8", torch.uint8),
    "e4m3 by its name": (FP16, "fp8_e4m3", E4M3),
    "e4m3 of fp32": (FP32, "fp8e4m3", torch.uint8),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bits(t: Tensor) -> Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]).cpu()


def stored(x: Tensor, kind: str, scale: float) -> Tensor:
    """Return tokens as the cache has them."""
    _, word, dtype = KINDS[kind]
    if word == "auto":
        return x
    return (x.float() * (1.0 / torch.tensor(scale))).clamp(-448, 448).to(E4M3).view(dtype)


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, 7, dtype=torch.uint8).view(E4M3) if dtype == E4M3 else torch.full(shape, 7, dtype=dtype)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 80, 256])
def test_reshape_and_cache_flash(kind: str, width: int, place: str) -> None:
    dtype, word, cached = KINDS[kind]
    key, value = random(TOKENS + 2, 3, width).to(dtype), random(TOKENS + 2, 3, 48, seed=1).to(dtype)
    scales = torch.tensor(0.05), torch.tensor([0.03])
    caches = filled(cached, PAGES, SIZE, 3, width), filled(cached, PAGES, SIZE, 3, 48)
    wanted = [bits(cache).clone() for cache in caches]
    for expected, x, scale in zip(wanted, (key, value), scales, strict=True):
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[divmod(slot, SIZE)] = bits(stored(x[token], kind, float(scale)))
    with running_on(place) as device:
        on = [t.to(device) for t in (key, value, *caches, torch.tensor(SLOTS))]
        assert reshape_and_cache_flash(*on, word, *(s.to(device) for s in scales)) is None
    for got, expected in zip(on[2:4], wanted, strict=True):
        assert torch.equal(bits(got), expected)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", KINDS)
def test_reshape_and_cache(kind: str, place: str) -> None:
    dtype, word, cached = KINDS[kind]
    width, x = 64, 16 // cached.itemsize
    key, value = random(TOKENS, 3, 2 * width).to(dtype)[..., :width], random(TOKENS, 3, width, seed=1).to(dtype)
    scales = torch.tensor([0.05]), torch.tensor([0.03])
    caches = filled(cached, PAGES, 3, width // x, SIZE, x), filled(cached, PAGES, 3, width, SIZE)
    wanted = [bits(cache).clone() for cache in caches]
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            page, place_in_page = divmod(slot, SIZE)
            keys = bits(stored(key[token].contiguous(), kind, 0.05)).view(3, width // x, x)
            wanted[0][page, :, :, place_in_page] = keys
            wanted[1][page, :, :, place_in_page] = bits(stored(value[token], kind, 0.03))
    with running_on(place) as device:
        on = [t.to(device) for t in (key, value, *caches, torch.tensor(SLOTS, dtype=torch.int32))]
        assert reshape_and_cache(*on, word, *(s.to(device) for s in scales)) is None
    for got, expected in zip(on[2:4], wanted, strict=True):
        assert torch.equal(bits(got), expected)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [(512, 64), (128, 32)])
def test_concat_and_cache_mla(columns: tuple[int, int], kind: str, place: str) -> None:
    dtype, word, cached = KINDS[kind]
    kv_c, k_pe = random(TOKENS + 1, columns[0]).to(dtype), random(TOKENS + 1, 2 * columns[1], seed=1).to(dtype)
    k_pe = k_pe[:, : columns[1]]
    cache = filled(cached, PAGES, SIZE, sum(columns))
    wanted = bits(cache).clone()
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            row = torch.cat((kv_c[token], k_pe[token]))
            wanted[divmod(slot, SIZE)] = bits(stored(row, kind, 0.05))
    with running_on(place) as device:
        on = [t.to(device) for t in (kv_c, k_pe, cache, torch.tensor(SLOTS))]
        assert concat_and_cache_mla(*on, word, torch.tensor([0.05], device=device)) is None
    assert torch.equal(bits(on[2]), wanted)


def test_no_tokens() -> None:
    cache = torch.ones(2, 16, 1, 64)
    reshape_and_cache_flash(
        cache[0, :0].clone(), cache[0, :0].clone(), cache, cache.clone(), torch.zeros(0).long(), "auto", None, None
    )
    assert (cache == 1).all()


def _flash(**changes: Any) -> None:
    given = {
        "key": torch.zeros(3, 2, 64), "value": torch.zeros(3, 2, 64), "key_cache": torch.zeros(2, 16, 2, 64),
        "value_cache": torch.zeros(2, 16, 2, 64), "slot_mapping": torch.arange(3), "kv_cache_dtype": "auto",
        "k_scale": None, "v_scale": None,
    }  # fmt: skip
    reshape_and_cache_flash(**given | changes)


CODES = {"kv_cache_dtype": "fp8"} | dict.fromkeys(("key_cache", "value_cache"), torch.zeros(2, 16, 2, 64).to(E4M3))
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"key": torch.zeros(3, 64)}, r"key has shape \(3, 64\)"),
    "dtype of key": ({"key": torch.zeros(3, 2, 64).int()}, "key has dtype int32"),
    "dtype of value": ({"value": torch.zeros(3, 2, 64).half()}, "value has dtype float16; expected float32"),
    "dtype of a cache": ({"key_cache": torch.zeros(2, 16, 2, 64).half()}, "key_cache has dtype float16"),
    "shape of a cache": ({"value_cache": torch.zeros(2, 16, 2, 32)}, "value_cache has shape"),
    "slots": ({"slot_mapping": torch.arange(4)}, r"slot_mapping has shape \(4,\); expected up to 3, rows of key"),
    "dtype of slots": ({"slot_mapping": torch.zeros(3)}, "slot_mapping has dtype float32"),
    "word": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype is 'fp8_e5m2'; expected one of 'auto'"),
    "bytes": ({"kv_cache_dtype": "fp8", "k_scale": torch.ones(1), "v_scale": torch.ones(1)}, "key_cache has dtype"),
    "no scale": (CODES, "k_scale is a NoneType"),
    "scales": ({**CODES, "k_scale": torch.ones(2), "v_scale": torch.ones(1)}, "k_scale has shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        _flash(**changes)


def test_wrong_arguments_of_others() -> None:
    x, slots = torch.zeros(3, 2, 64), torch.arange(3)
    cases = {
        "key_cache has shape": (torch.zeros(2, 2, 8, 16, 8), torch.zeros(2, 2, 64, 16)),
        "value_cache has shape": (torch.zeros(2, 2, 16, 16, 4), torch.zeros(2, 2, 16, 64)),
        "key_cache has strides": (torch.zeros(2, 2, 16, 32, 4)[:, :, :, ::2], torch.zeros(2, 2, 64, 16)),
    }
    for message, caches in cases.items():
        with pytest.raises(ArgumentError, match=message):
            reshape_and_cache(x, x, *caches, slots, "auto", None, None)
    with pytest.raises(ArgumentError, match=r"kv_cache has shape \(2, 16, 64\); expected \(pages, page size, 96\)"):
        concat_and_cache_mla(x[:, 0], x[:, 0, :32], torch.zeros(2, 16, 64), slots, "auto", None)
    with pytest.raises(ArgumentError, match="k_pe has shape"):
        concat_and_cache_mla(x[:, 0], x[:2, 0], torch.zeros(2, 16, 128), slots, "auto", None)
