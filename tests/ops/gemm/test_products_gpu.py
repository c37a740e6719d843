"""Products on a GPU: captured in graphs, on several streams, over 2^31 elements, no waiting for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import poisoned
from support.product_cases import assert_product, codes, exact, scale
from support.ways import assert_equal_bits, captured

import rtkernels
from rtkernels import gated_mm, grouped_mm, grouped_mm_masked, grouped_wgrad, scaled_mm

pytestmark = pytest.mark.gpu
OFFS = [40, 40, 130, 200]


def _calls() -> dict[str, Callable[[], Any]]:
    device = "cuda"
    a, b = (codes("bf16", rows, 192, device=device, seed=i).codes for i, rows in enumerate((200, 160)))
    stack = codes("bf16", 4, 160, 192, device=device, seed=2).codes
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    rows, columns = scale(200, device=device), scale(160, device=device)
    offs = torch.tensor(OFFS, dtype=torch.int32, device=device)
    sizes = torch.tensor([3, 0, 16, 50], dtype=torch.int32, device=device)
    rooms = a.view(4, 50, 192)
    out = torch.zeros(4, 160, 192, device=device)
    return {
        "scaled_mm": lambda: scaled_mm(a, b, act="silu"),
        "scaled_mm, odd": lambda: scaled_mm(a[1:78, 1:], b[:, 1:]),
        "scaled_mm, rows": lambda: scaled_mm(a8, b8, rows, columns),
        "scaled_mm, few rows": lambda: scaled_mm(a[:5], b),
        "scaled_mm, quantised": lambda: scaled_mm(a, b, quant_out="1x128"),
        "gated_mm": lambda: gated_mm(a, b),
        "grouped_mm": lambda: grouped_mm(a, stack, offs=offs),
        "grouped_mm_masked": lambda: grouped_mm_masked(rooms, stack, masked_m=sizes).index_select(1, sizes[:1].long()),
        "grouped_wgrad": lambda: grouped_wgrad(a[:, :160], a, offs=offs, out=out, accumulate=False).clone(),
    }


NAMES = (
    "scaled_mm", "scaled_mm, odd", "scaled_mm, rows", "scaled_mm, few rows", "scaled_mm, quantised", "gated_mm",
    "grouped_mm", "grouped_wgrad",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_captured_in_a_graph(name: str) -> None:
    call = _calls()[name]
    wanted = call()
    replay = captured(call)
    for _ in range(2):
        assert_equal_bits(replay(), wanted, name)


@pytest.mark.parametrize("name", NAMES)
def test_on_two_streams(name: str) -> None:
    call = _calls()[name] if name != "grouped_wgrad" else None
    if call is None:
        pytest.skip("writes to one tensor")
    wanted = call()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            results.append(call())
    torch.cuda.synchronize()
    for got in results:
        assert_equal_bits(got, wanted, name)


@pytest.mark.parametrize("name", _calls() if torch.cuda.is_available() else NAMES)
def test_nothing_waits_for_the_gpu(name: str) -> None:
    call = _calls()[name]
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_every_time(name: str) -> None:
    call = _calls()[name]
    wanted = call()
    for _ in range(5):
        with poisoned():
            assert_equal_bits(call(), wanted, name)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["result", "a", "b"])
def test_more_than_2_to_the_31_elements(which: str) -> None:
    m, n, k = {"result": (70000, 40000, 64), "a": (1100000, 16, 2048), "b": (16, 1100000, 2048)}[which]
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs 40 GiB")
    g = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(rows, k, device="cuda", generator=g, dtype=torch.bfloat16) for rows in (m, n))
    got = scaled_mm(a, b)
    for row in {0, m // 2, m - 1}:
        for cut in (slice(0, 64), slice(max(n - 64, 0), n)):
            assert_product(got[row : row + 1, cut], *exact(a[row : row + 1].double(), b[cut].double()))


def test_host_time_of_a_repeated_call() -> None:
    """A repeated call costs no more host time than torch.mm plus the extra cost of our launch."""
    import time

    a, b = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def host(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - began) / 100)
        return min(times) * 1e6

    weight = b.t()
    assert host(lambda: rtkernels.scaled_mm(a, b)) < host(lambda: torch.mm(a, weight)) + 6
