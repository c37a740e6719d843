"""attention_varlen over pages of 8-bit codes by wgmma: sizes of pages, scales of any sign, NaN, the kernel's choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.attention.test_paged import E4M3, FP16, INT8, Batch, check, random
from support.compare import running_on
from support.places import at, emulated, order_test

from rtkernels import batch_invariant, emulate
from rtkernels.ops.attention import paged_plan

# Lengths end inside of a tile of 128 keys, at its end and after it, in rows of different warps that convert.
TILES = ((3, 270), (9, 128), (1, 129), (2, 385), (0, 40), (5, 0), (4, 33))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pages of 16": ({"lengths": TILES, "heads": (4, 2)}, {"causal": True}),
    "pages of 32": ({"lengths": TILES, "page": 32, "dtype": FP16}, {"causal": True}),
    "pages of 48": ({"lengths": TILES, "page": 48, "widths": (96, 128)}, {"window": (70, 20)}),
    "pages of 64": ({"lengths": TILES, "page": 64, "widths": (128, 128), "heads": (4, 2)}, {"causal": True}),
    "pages of 256": ({"lengths": TILES, "page": 256, "widths": (128, 64)}, {"causal": True, "window": 150}),
    "soft cap": ({"lengths": TILES, "page": 64, "widths": (112, 128)}, {"causal": True, "softcap": 1.5}),
    "sinks": ({"lengths": TILES, "heads": (8, 2)}, {"causal": True, "sinks": random(8, seed=7)}),
    "int8": ({"lengths": TILES, "cache": INT8, "page": 64, "widths": (128, 128)}, {"causal": True}),
    "int8 of fp16": ({"lengths": TILES, "cache": INT8, "dtype": FP16, "heads": (4, 2)}, {"softcap": 2.0}),
}


def _sides(options: dict[str, Any]) -> dict[str, Any]:
    window = options.get("window", -1)
    left, right = window if isinstance(window, tuple) else (window, -1)
    others = {name: value for name, value in options.items() if name in ("softcap", "sinks")}
    return {"left": left, "right": 0 if options.get("causal") else right, **others}


@at("sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_tiles_and_pages(name: str, place: str) -> None:
    given, options = CASES[name]
    batch = Batch(**{"cache": E4M3, **given})
    with running_on(place) as device:
        check(batch, batch.call(device, backend="sm90", **options), **_sides(options))


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_scales_of_any_sign(softcap: float, place: str) -> None:
    """A scale per head, of which one is negative and one 0, and a negative one of values."""
    batch = Batch(((3, 140), (2, 20)), cache=E4M3, heads=(6, 3))
    scales = {"k_scale": torch.tensor([-0.1, 0.0, 0.3]), "v_scale": torch.tensor([0.5, -2.0, 0.0])}
    batch.values = [
        value / (old if old.dim() else old.view(1)).double().view(-1, 1) * new.double().view(-1, 1)
        for value, old, new in zip(batch.values, batch.scales.values(), scales.values(), strict=True)
    ]
    batch.scales = scales
    with running_on(place) as device:
        check(batch, batch.call(device, causal=True, softcap=softcap), right=0, softcap=softcap)


@at("cpu", "sm_90", "cuda")
def test_no_scales(place: str) -> None:
    batch = Batch(((3, 140), (2, 20)), cache=E4M3)
    batch.values = [pool.double() for pool in batch.pools]
    batch.scales = {}
    with running_on(place) as device:
        check(batch, batch.call(device, causal=True), right=0)


@at("cpu", "sm_90", "cuda")
def test_nan_codes_and_scales(place: str) -> None:
    """NaN of one key reaches the queries that see it, one of a value its column, and no other sequence or head."""
    batch = Batch(((3, 140), (4, 30), (2, 20)), cache=E4M3, heads=(4, 2))
    k, v = (pool.view(torch.uint8).flatten(0, 1) for pool in batch.pools)
    k[batch.rows[0][139], 0, 5] = 0x7F  # the last key: of three queries one sees it
    v[batch.rows[1][0], 1, 7] = 0xFF
    with running_on(place) as device:
        out = batch.call(device, causal=True)[0].cpu()
    hidden = torch.zeros(out.shape, dtype=torch.bool)
    hidden[2, :2] = True
    hidden[3:7, 2:, 7] = True
    assert torch.equal(out.isnan(), hidden)


def run(page: int) -> Any:
    return Batch(((3, 270), (2, 129)), cache=E4M3, page=page).call(backend="sm90", causal=True)


test_every_order_of_threads = order_test(run, 16, 64)


@emulated
def test_bits_do_not_depend_on_other_sequences() -> None:
    """The last query of a sequence has the same bits alone and in a batch, also with a soft cap."""
    batch = Batch(((5, 137), (40, 250), (1, 20)), heads=(4, 2), cache=E4M3)
    for softcap in (0.0, 2.0):
        with emulate("sm_90"), batch_invariant(1):
            out, _ = batch.call(causal=True, softcap=softcap)
            for b, (_, keys) in enumerate(batch.lengths):
                last = int(batch.ends[b + 1])
                alone = Batch(((1, keys),), heads=(4, 2), cache=E4M3)
                alone.q, alone.pools, alone.scales = batch.q[last - 1 : last], batch.pools, batch.scales
                alone.table, alone.used = batch.table[b : b + 1], batch.used[b : b + 1]
                assert torch.equal(alone.call(causal=True, softcap=softcap)[0][0], out[last - 1]), b


def test_which_kernel_takes_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_90a wgmma, but for heads that it cannot take; mma.sync elsewhere, and where it is named."""
    chosen: list[str] = []
    for name in ("_sm90", "_mma"):
        original = getattr(paged_plan, name)

        def watched(call: Any, device: int, name: str = name, original: Any = original) -> Any:
            chosen.append(name)
            return original(call, device)

        monkeypatch.setattr(paged_plan, name, watched)
    narrow, wide = Batch(((2, 21),), cache=E4M3), Batch(((2, 22),), cache=E4M3, widths=(192, 192))
    for batch, target, backend in (
        (narrow, "sm_90", "auto"), (wide, "sm_90", "auto"), (narrow, "sm_90", "mma"), (narrow, "sm_80", "auto"),
    ):  # fmt: skip
        with emulate(target):
            check(batch, batch.call(causal=True, backend=backend), right=0)
    assert chosen == ["_sm90", "_mma", "_mma", "_mma"]
