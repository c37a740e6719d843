"""mla_decode: paged and contiguous latents against float64, several tokens, splits, lengths on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention_exact import assert_near, exact_attention
from support.compare import poisoned, running_on
from support.places import at, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor

from rtkernels import emulate, mla_decode

BF16, FP16 = torch.bfloat16, torch.float16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def cached(
    lengths: tuple[int, ...], capacity: int, page: int, *, heads: int = 3, tokens: int = 1, width: int = 576,
    dtype: torch.dtype = BF16, device: str = "cpu",
) -> tuple[dict[str, Any], Tensor]:  # fmt: skip
    """Return arguments, and the latents as [batch, capacity, 1, width]; unused pages are NaN."""
    batch = len(lengths)
    latents = random(batch, capacity, width, seed=1, dtype=dtype)
    results: dict[str, Any] = {
        "q": random(batch, tokens, heads, width, dtype=dtype), "kv_cache": latents,
        "seqlens": torch.tensor(lengths, dtype=torch.int32),
    }  # fmt: skip
    if page:
        pages = capacity // page
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(5))
        spread = torch.full((batch * pages + 1, page, width), float("nan"), dtype=dtype)
        spread[order] = latents.view(batch * pages, page, width)
        results |= {"kv_cache": spread, "page_table": order.int().view(batch, pages)}
    return {name: t.to(device) for name, t in results.items()}, latents.unsqueeze(2)


DECODE: dict[str, tuple[dict[str, Any], int]] = {
    "pages": ({"lengths": (0, 1, 65), "capacity": 80, "page": 16}, 512),
    "tokens": ({"lengths": (40,), "capacity": 48, "page": 0, "heads": 11, "tokens": 3}, 512),
    "many heads": ({"lengths": (300, 20), "capacity": 320, "page": 32, "width": 72, "heads": 70}, 64),
    "splits": ({"lengths": (130, 5), "capacity": 320, "page": 32, "width": 72}, 64),
    "splits, narrow": ({"lengths": (300, 20), "capacity": 300, "page": 10, "width": 72, "dtype": FP16}, 64),
}


def check_decode(size: dict[str, Any], value_width: int, device: str) -> None:
    arguments, k = cached(**size, device=device)
    with poisoned():
        out, lse = mla_decode(**arguments, value_width=value_width, scale=192**-0.5, return_lse=True)
    host = arguments["q"].cpu(), k, k[..., :value_width]
    exact = exact_attention(*host, causal=True, seqused_k=arguments["seqlens"].cpu(), scale=192**-0.5)
    assert_near(out, exact[0], 2.0**-7, "out")
    assert_near(lse, exact[1], 1e-4, "lse")


@at("sm_90")
@pytest.mark.parametrize(
    "name", ["tokens", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pages", "many heads", "splits"))]
)
def test_decode_by_wgmma(name: str, place: str) -> None:
    with running_on(place) as device:
        check_decode(*DECODE[name], device)


@pytest.mark.gpu
def test_many_heads() -> None:
    check_decode(*DECODE["many heads"], "cuda")


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("name", ["pages", "tokens", "splits, narrow"])
def test_decode(name: str, place: str) -> None:
    with running_on(place) as device:
        check_decode(*DECODE[name], device)


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_80"):
        check_decode(*DECODE["splits, narrow"], "cpu")
    with emulate("sm_90"):
        check_decode({"lengths": (3,), "capacity": 8, "page": 0, "width": 64}, 64, "cpu")


def test_decode_shapes() -> None:
    arguments, _ = cached((20, 7), 32, 16)
    out, lse = mla_decode(**arguments, return_lse=True)
    q = arguments.pop("q").squeeze(1)
    single, single_lse = mla_decode(q, **arguments, return_lse=True)
    assert torch.equal(single, out.squeeze(1)) and torch.equal(single_lse, lse.squeeze(2))
    cache = arguments.pop("kv_cache").unsqueeze(2)
    assert torch.equal(mla_decode(q, cache, **arguments), single)


def test_decode_repeats_bit_by_bit() -> None:
    arguments, _ = cached((70,), 80, 16, width=64)
    results = []
    for order in ("forward", "reverse"):
        with emulate("sm_80", order):
            results.append((mla_decode(**arguments, value_width=64),))
    assert_equal_bits(*results)


@pytest.mark.gpu
def test_one_graph_serves_all_lengths() -> None:
    arguments, _ = cached((300, 1, 0), 320, 16, heads=16, device="cuda")
    replay = captured(lambda: mla_decode(**arguments))
    for values in ((300, 1, 0), (17, 300, 129)):
        arguments["seqlens"].copy_(torch.tensor(values))
        assert torch.equal(replay(), mla_decode(**arguments))


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        arguments, _ = cached((5,), 16, 0, width=64)
        mla_decode(**({"value_width": 64} | arguments | changes))

    return call, message


BAD = {
    "value_width": bad("value_width is 72; expected a multiple of 8 to 64", value_width=72),
    "width": bad("kv_cache has width 128; expected 64", kv_cache=random(1, 16, 128)),
    "dtype": bad("kv_cache has dtype float16", kv_cache=random(1, 16, 64, dtype=FP16)),
    "lengths": bad("seqlens has dtype int64", seqlens=torch.tensor([5])),
    "batch": bad("kv_cache has 2 sequences", kv_cache=random(2, 16, 64)),
    "scale": bad("scale is 0.0", scale=0.0),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)
