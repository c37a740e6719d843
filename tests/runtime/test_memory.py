"""Zeros that cost no launch: how much memory is kept for them."""

from __future__ import annotations

import pytest
import torch

from rtkernels.runtime.launch import memory
from rtkernels.runtime.operator.plan import StepPlan, Steps


def test_zeros_of_many_sizes_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are built for every number of tokens; the rest of their zeros is not released."""
    zeros = torch.zeros
    monkeypatch.setattr(memory, "_zero_words", {})
    monkeypatch.setattr(memory, "current_stream", lambda device: 0)
    monkeypatch.setattr(memory, "is_capturing", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda n, dtype, device: zeros(n, dtype=dtype, device="meta"))
    for n in range(1, 1 << 15, 61):
        StepPlan("order", [], (), {}, "tuple", Steps(zeros={"order": n}), 0).run()
        assert memory.zero_words_for(0, n) >= n == memory.zero_words_for(-1, n)
    kept = {id(result): result.nbytes for pairs in memory._zero_words.values() for result, _ in pairs}
    assert sum(kept.values()) <= 64 << 20


@pytest.mark.parametrize("n", [6, 8])
def test_zeros_of_one_call_can_be_overwritten_while_those_of_another_are_saved(n: int) -> None:
    first, second = memory.fresh_zeros(-1, n), memory.fresh_zeros(-1, n)
    weight = torch.ones(n, requires_grad=True)
    loss = (weight * second).sum()
    first.add_(1)
    loss.backward()
    assert first.data_ptr() % 16 == second.data_ptr() % 16 == 0 and not second.any()
