"""The prototype of a persistent decoding kernel: every sum of a layer, with blocks that wait for each other."""

from __future__ import annotations

import pytest
import torch

import rtkernels
from bench.measure import step_stream
from rtkernels import emulator


def test_every_weight_is_packed_once() -> None:
    weights = [[None] * 5, [None] * 5]
    for layer in range(2):
        for stage in range(5):
            if step_stream.PARTS[stage]:
                shape = step_stream.PARTS[stage], step_stream.RESULTS[stage], 1536 * step_stream.THIRDS[stage]
                weights[layer][stage] = torch.ones(shape, dtype=torch.uint8) * (5 * layer + stage + 1)
    packed = step_stream.packed(weights, 132)
    found = torch.bincount(packed.flatten().int(), minlength=11)
    for layer in range(2):
        for stage, weight in enumerate(weights[layer]):
            assert found[5 * layer + stage + 1] == (0 if weight is None else weight.numel())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("counters", "tagged words"))
def test_sums_of_a_layer(mode: str) -> None:
    given = step_stream.make(1, 4, "cpu")
    given["words"][1:] = -1
    names = ("packed", "words", "counters", "launches")
    with rtkernels.emulate("sm_90"), emulator.recording():
        shared = 8 * step_stream.PAGE_UNITS * 2 * step_stream.UNIT
        launch = step_stream.KERNEL.bind((8,), -1, 4, step_stream.THREADS, shared, resident=True)
        for _ in range(2):
            pointers = (given[name].data_ptr() for name in names)
            launch(*pointers, given["packed"].shape[1] * 2, 1, step_stream.MODES[mode])
    assert step_stream.error(given) <= 1.0
