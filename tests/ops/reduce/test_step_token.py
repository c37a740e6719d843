"""The end of a greedy decoding step: tokens, stop tokens, positions, places of the next keys."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce.step_token import FORWARD

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def case(device="cpu", batch=3, vocabulary=1000, dtype=torch.bfloat16, stop=(7, 400), rings=(0, 6)):
    g = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(batch, vocabulary, generator=g).to(dtype)
    logits[0, vocabulary // 2] = logits[0, vocabulary - 1] = 9.0
    logits[1 % batch, 7 % vocabulary] = 20.0
    numbers = [torch.full((batch,), -1), torch.arange(batch) + 5, torch.arange(batch, dtype=torch.int32) + 5]
    state = [*numbers, torch.tensor([True, True, False])[:batch], torch.tensor(11), torch.full((2 * batch + 1,), -1)]
    stops = torch.tensor(stop) if stop else None
    places = torch.full((len(rings), 2, batch), -1, dtype=torch.int32)
    given = (logits, stops, torch.tensor(rings), *state, places)
    return [t if t is None else t.to(device) for t in given] + [99]


CASES = {
    "plain": {}, "no stop": {"stop": ()}, "odd": {"vocabulary": 1003}, "one": {"batch": 1, "vocabulary": 1},
    "one window": {"rings": (8,), "batch": 1}, "large": {"vocabulary": 9000, "dtype": torch.float32},
    "half": {"dtype": torch.float16},
}  # fmt: skip


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, place: str) -> None:
    wanted = case(**CASES[name])
    logits, stop, rings, token, position, length, active, columns, result, places, pad = wanted
    batch = logits.shape[0]
    token.copy_(logits.double().argmax(-1))
    if stop is not None:
        token.copy_(torch.where(active, token, pad))
        active &= (token[:, None] != stop).all(-1)
    result[:batch], result[batch : 2 * batch] = token, active
    position += 1
    length += 1
    columns += 1
    for w, ring in enumerate(rings.tolist()):
        places[w, 0] = length % ring if ring else length
        places[w, 1] = (length + 1).clamp(max=ring) if ring else length + 1
    with running_on(place) as device:
        found = case(device, **CASES[name])
        FORWARD.call(*found)
        for got, own in zip(found[3:10], wanted[3:10], strict=True):
            assert torch.equal(got.cpu(), own)


@at("sm_90", "cuda")
def test_order_of_logits(place: str) -> None:
    rows = torch.zeros(4, 777)
    rows[0, 5:9] = torch.nan
    rows[1] = -torch.inf
    rows[2, :3] = -0.0
    rows[3, 600], rows[3, 601] = torch.inf, torch.inf
    with running_on(place) as device:
        given = case(device, batch=3, vocabulary=777, stop=(), dtype=torch.float32)
        given[0] = rows[:3].to(device)
        FORWARD.call(*given)
        assert given[3].tolist() == [5, 0, 0]
        given[0] = rows[1:].to(device)
        FORWARD.call(*given)
        assert given[3].tolist() == [0, 0, 600]


@pytest.mark.parametrize(("place", "value", "message"), [
    (0, torch.zeros(3), "logits"), (3, torch.zeros(3), "token"), (8, torch.zeros(4, dtype=torch.int64), "result"),
    (1, torch.zeros(2), "stop"), (9, torch.zeros(2, 2, 2, dtype=torch.int32), "places"),
])  # fmt: skip
def test_wrong_arguments(place: int, value: object, message: str) -> None:
    given = case()
    given[place] = value
    with pytest.raises(ArgumentError, match=message):
        FORWARD.call(*given)


def emulated_coverage() -> None:
    with rtkernels.emulate("sm_90"):
        for dtype in DTYPES:
            for vocabulary in (1000, 1001):
                FORWARD.call(*case(vocabulary=vocabulary, dtype=dtype))
