"""The bytes that two processes really send are those of the formulas in docs/how_to/several_gpus.md."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import WORLD, run_in_processes
from torch import Tensor

import rtkernels
from rtkernels.nn.parallel import expert_parallel, ring_attention

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

import make_several_gpus as formulas

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()


@contextmanager
def counted() -> Iterator[list[float]]:
    """Count bytes that leave this process, with ring algorithms for all-gather and all-reduce."""
    sent: list[float] = []

    def sends(moves: Any) -> None:
        sent.extend(_size(move.tensor) for move in moves if move.op is dist.isend)

    def exchanges(out: Tensor, x: Tensor, receive: Any = None, send: Any = None, **options: Any) -> None:
        parts = [len(x) // WORLD] * WORLD if send is None else send
        sent.append(_size(x) / max(len(x), 1) * (sum(parts) - parts[dist.get_rank()]))

    def gathers(out: Tensor, x: Tensor, **options: Any) -> None:
        sent.append(_size(x) * (WORLD - 1))

    def reduces(x: Tensor, *args: Any, **options: Any) -> None:
        sent.append(2 * (WORLD - 1) / WORLD * _size(x))

    counters: dict[str, Callable[..., None]] = {
        "batch_isend_irecv": sends, "all_to_all_single": exchanges, "all_gather_into_tensor": gathers,
        "all_reduce": reduces,
    }  # fmt: skip
    originals = {name: getattr(dist, name) for name in counters}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counters[name](*args, **options)
            return originals[name](*args, **options)

        return call

    for name in counters:
        setattr(dist, name, wrapped(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _passes(call: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the bytes of a forward and of a backward pass."""
    with counted() as sent:
        result = call()
        forward = sum(sent)
        result.sum().backward()
        return forward, sum(sent) - forward


def _flat(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.flatten() for t in (results if isinstance(results, tuple) else (results,))])


def check_bytes(rank: int, mesh: Any) -> None:
    group, random = mesh.get_group(), torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(2, 6, heads, 16, generator=random).bfloat16().requires_grad_() for heads in (4, 2, 2))
    for options in ({}, {"causal": True, "zigzag": False}, {"causal": True, "zigzag": True}):
        found = _passes(lambda options=options: ring_attention(q, k, v, group=group, **options))
        assert found == formulas.ring_attention(WORLD, 2 * 6, 2 * 16), options

    q, k, v = (torch.randn(2, 6, heads, 16, generator=random).bfloat16().requires_grad_() for heads in (1, 1, 2))
    beta = torch.rand(2, 6, 2, generator=random)
    for zigzag, wants_state in product((False, True), (False, True)):
        call = {"l2norm": True, "group": group, "zigzag": zigzag, "return_state": wants_state}
        found = _passes(lambda call=call: _flat(rtkernels.gated_delta_rule(q, k, v, None, beta, **call)))
        assert found == formulas.gated_delta_rule(WORLD, 2 * 2, 16, 16, 1 + zigzag, wants_state), call

    x = torch.randn(8, 16, generator=random).bfloat16().requires_grad_()
    chosen = torch.tensor([[0, 2], [3, 1]]).repeat(4, 1)  # one expert of each process for every token
    weights = torch.full((8, 2), 0.5)
    given = {"num_experts": 4, "group": group}
    found = _passes(lambda: expert_parallel(x, chosen, weights, lambda rows, ends: rows * 2, **given))
    assert found == formulas.expert_parallel(WORLD, 16, 16, 4)

    logits = torch.randn(10, 8, generator=random).requires_grad_()
    labels = torch.arange(10)
    assert _passes(lambda: rtkernels.cross_entropy(logits, labels, group=group)) == formulas.cross_entropy(WORLD, 10)
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 24).requires_grad_(), torch.randn(8, 24).requires_grad_()
    found = _passes(lambda: rtkernels.linear_cross_entropy(hidden, weight, labels, group=group))
    assert found == formulas.linear_cross_entropy(WORLD, 10, 24)


@pytest.mark.one_in(1000)
def test_two_processes_send_what_the_page_says(tmp_path: Path) -> None:
    run_in_processes((check_bytes,), tmp_path)


def test_the_table_is_that_of_the_script() -> None:
    text = formulas.PAGE.read_text(encoding="utf-8")
    assert formulas.page(text) == text, "run: python docs/make_several_gpus.py"
    for gpus in (8, 64, 1024):
        for row in formulas.rows(gpus):
            assert 0 <= row.overlapping <= row.sent
