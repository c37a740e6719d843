"""attention_decode: paged and contiguous caches, 16 and 8 bits, splits, lengths on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention_exact import assert_near, exact_attention
from support.compare import poisoned, running_on
from support.places import at, error_tests
from support.ways import captured
from torch import Tensor

from rtkernels import attention_decode, emulate
from rtkernels.ops.attention.decode_plan import arrangement, split_count
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo

BF16, FP16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(
    lengths: tuple[int, ...], capacity: int, page: int, *, heads: int = 4, heads_kv: int = 2, width: int = 64,
    width_v: int | None = None, tokens: int = 1, dtype: torch.dtype = BF16, cache: torch.dtype | None = None,
    device: str = "cpu",
) -> tuple[dict[str, Any], Tensor, Tensor]:  # fmt: skip
    """Return arguments, and keys and values in float64 as [batch, capacity, heads, width]; unused pages are NaN."""
    batch, cache = len(lengths), cache or dtype
    q = random(batch, tokens, heads, width).to(dtype)
    arguments: dict[str, Any] = {"q": q, "seqlens": torch.tensor(lengths, dtype=torch.int32)}
    dense = []
    for i, (name, size) in enumerate((("k", width), ("v", width_v or width))):
        x = random(batch, capacity, heads_kv, size, seed=i + 1)
        scale = torch.ones(heads_kv, 1)
        if cache in (E4M3, INT8):
            scale = (0.01 + 0.02 * torch.arange(1, heads_kv + 1)).view(-1, 1)
            x = (x / scale).round().clamp(-127, 127)
            arguments[f"{name}_scale"] = scale.flatten()
        codes = x.to(cache)
        dense.append(codes.double() * scale)
        if page:
            pages = capacity // page
            order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(5))
            spread = torch.full((batch * pages + 2, page, heads_kv, size), float("nan")).to(cache)
            spread[order] = codes.view(batch * pages, page, heads_kv, size)
            codes, arguments["page_table"] = spread, order.int().view(batch, pages)
        arguments[f"{name}_cache"] = codes
    return {name: t.to(device) for name, t in arguments.items()}, *dense


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "contiguous": ({"lengths": (40, 7), "capacity": 40, "page": 0}, {}),
    "pages of 16": ({"lengths": (0, 1, 63), "capacity": 64, "page": 16, "heads": 8, "heads_kv": 1}, {}),
    "pages of 7": ({"lengths": (40, 20), "capacity": 42, "page": 7}, {}),
    "splits": ({"lengths": (700, 3), "capacity": 704, "page": 16, "heads": 2, "heads_kv": 1}, {"sinks": torch.ones(2)}),
    "several tokens": (
        {"lengths": (64, 5), "capacity": 64, "page": 16, "heads": 16, "tokens": 3},
        {"window": 20, "softcap": 3.0},
    ),
    "16 heads share": ({"lengths": (50,), "capacity": 64, "page": 16, "heads": 16, "heads_kv": 1}, {}),
    "e4m3": ({"lengths": (40, 64), "capacity": 64, "page": 16, "cache": E4M3}, {}),
    "int8": ({"lengths": (40, 64), "capacity": 64, "page": 16, "cache": INT8, "dtype": FP16}, {}),
    "int8, 80 and 48": ({"lengths": (40,), "capacity": 64, "page": 0, "cache": INT8, "width": 80, "width_v": 48}, {}),
}
WIDTHS = {
    "128": ({"lengths": (40,), "capacity": 64, "page": 8, "width": 128}, {}),
    "128, a short cache of pages": ({"lengths": (40, 0), "capacity": 96, "page": 32, "width": 128}, {}),
    "192 and 128": ({"lengths": (40,), "capacity": 64, "page": 16, "width": 192, "width_v": 128}, {}),
    "e4m3 256": ({"lengths": (40,), "capacity": 64, "page": 16, "width": 256, "cache": E4M3}, {}),
}


def check(size: dict[str, Any], options: dict[str, Any], device: str) -> None:
    arguments, k, v = make(**size, device=device)
    options = {name: o.to(device) if isinstance(o, Tensor) else o for name, o in options.items()}
    with poisoned():
        out, lse = attention_decode(**arguments, **options, return_lse=True)
    host = {name: o.cpu() if isinstance(o, Tensor) else o for name, o in options.items()}
    exact, exact_lse = exact_attention(
        arguments["q"].cpu(), k, v, causal=True, seqused_k=arguments["seqlens"].cpu(), **host
    )
    assert_near(out, exact, 2.0**-7, "out")
    assert_near(lse, exact_lse, 1e-4, "lse")


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, place: str) -> None:
    with running_on(place) as device:
        check(*CASES[name], device)


@at("sm_90", "cuda")
@pytest.mark.parametrize("name", WIDTHS)
def test_widths(name: str, place: str) -> None:
    with running_on(place) as device:
        check(*WIDTHS[name], device)


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_80"):
        check(*CASES["splits"], "cpu")
    with emulate("sm_90"):
        short = torch.zeros(1, 16, 1, 128, dtype=BF16)  # test_decode_cluster.py
        attention_decode(short[:, :1], short, short, torch.tensor([16], dtype=torch.int32))


@at("cpu", "sm_80", "cuda")
def test_one_token_per_sequence(place: str) -> None:
    with running_on(place) as device:
        arguments, *_ = make((40, 7), 48, 16, device=device)
        out, lse = attention_decode(**arguments, return_lse=True)
        q = arguments.pop("q")
        single, single_lse = attention_decode(q.squeeze(1), **arguments, return_lse=True)
        assert torch.equal(single, out.squeeze(1)) and torch.equal(single_lse, lse.squeeze(2))


def test_arrangement_follows_from_shapes() -> None:
    info = DeviceInfo("an H200", targets.parse("sm_90a"), 132, 227 << 10)
    found = {blocks: arrangement(blocks, 8192, 128, 0, info) for blocks in (8, 64, 132, 133, 1024)}
    assert {blocks: (result.warps, result.splits) for blocks, result in found.items()} == {
        8: (8, 16), 64: (8, 1), 132: (8, 1), 133: (4, 1), 1024: (4, 1),
    }  # fmt: skip
    assert all(result.shared * (8 // result.warps) <= info.shared_per_block for result in found.values())
    assert arrangement(8, 8192, 256, 0, info).warps == 2
    assert arrangement(8, 8192, 128, 0, DeviceInfo("an A100", targets.parse("sm_80"), 108, 163 << 10)).warps == 4


def test_splits_follow_from_shapes() -> None:
    assert split_count(1024, 65536, 264) == 1
    assert 20 <= split_count(8, 65536, 264) <= 66
    assert split_count(8, 100, 264) == 1
    assert split_count(1, 1 << 20, 264) <= 128


@pytest.mark.gpu
def test_one_graph_serves_all_lengths() -> None:
    arguments, k, v = make((700, 3), 704, 16, width=128, device="cuda")
    replay = captured(lambda: attention_decode(**arguments))
    for lengths in ((700, 3), (16, 704), (0, 333)):
        arguments["seqlens"].copy_(torch.tensor(lengths))
        exact, _ = exact_attention(arguments["q"].cpu(), k, v, causal=True, seqused_k=torch.tensor(lengths))
        assert_near(replay(), exact, 2.0**-7, str(lengths))


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        arguments, *_ = make((8, 4), 8, 0)
        attention_decode(**(arguments | changes))

    return call, message


BAD = {
    "lengths": bad("seqlens has dtype int64; expected int32", seqlens=torch.zeros(2, dtype=torch.int64)),
    "batch": bad("seqlens has shape", seqlens=torch.zeros(3, dtype=torch.int32)),
    "cache dtype": bad("k_cache has dtype float32", k_cache=torch.zeros(2, 8, 2, 64)),
    "caches differ": bad("v_cache has dtype", v_cache=torch.zeros(2, 8, 2, 64, dtype=INT8)),
    "strides": bad("k_cache has strides", k_cache=torch.zeros(2, 8, 2, 66, dtype=BF16)[..., 1:65]),
    "scale": bad("k_scale is given for a cache of q's dtype", k_scale=torch.ones(())),
    "width": bad("k_cache has heads of 32 elements; expected 64", k_cache=torch.zeros(2, 8, 2, 32, dtype=BF16)),
    "heads": bad("q has 3 heads", q=torch.zeros(2, 1, 3, 64, dtype=BF16)),
    "gradient": bad(
        "attention_decode is not differentiable", q=torch.zeros(2, 1, 4, 64, dtype=BF16, requires_grad=True)
    ),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)
