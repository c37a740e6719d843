"""Statistics from the accumulators of a product: against float64, with ties, infinities and parts of a vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_logprob_tiles as tiles
from rtkernels.ops.loss import logprob_plan as plans
from rtkernels.ops.loss.linear_logprob_operators import FINISH
from rtkernels.runtime import targets
from rtkernels.runtime.operator.kinds import meta_of

IGNORED = -100
WANTED = plans.ENTROPY | plans.LSE | plans.MEAN | plans.TOP1


def make(rows: int, vocabulary: int, size: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weight and ids: the first row's id is its largest logit, the last one's is ignored.

    Numbers have so few bits that sums are exact in any order: all products round logits alike.
    """
    g = torch.Generator().manual_seed(rows + vocabulary)
    shapes = (rows, size), (vocabulary, size)
    hidden, weight = ((torch.randint(-4, 5, s, generator=g) / 4).to(dtype) for s in shapes)
    ids = torch.randint(0, vocabulary, (rows, 1), generator=g)
    ids[0] = (hidden[0].double() @ weight.double().t()).to(dtype).argmax()
    if rows > 1:
        ids[-1] = IGNORED
    return hidden.to(device), weight.to(device), ids.to(device)


def exact(hidden: Tensor, weight: Tensor, ids: Tensor, factor: float, rounds: bool) -> list[Tensor]:
    """Log-probability, entropy, lse, mean and top-1 in float64."""
    logits = hidden.double() @ weight.double().t()
    z = (logits.to(hidden.dtype).double() if rounds else logits) * factor
    lse, ignored = z.logsumexp(-1), ids[:, 0] == IGNORED
    logp = z - lse.unsqueeze(-1)
    logprob = logp.gather(1, ids.long().clamp(min=0))[:, 0]
    of_rows = (-torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1), lse, z.mean(-1))
    found = [t.masked_fill(ignored, 0.0) for t in (logprob, *of_rows)]
    return [*found, (z.argmax(-1) == ids[:, 0]) & ~ignored]


def run(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, factor: float = 1.0, fp32: bool = False, wanted: int = WANTED,
    cuts: tuple[int, ...] = (),
) -> list[Tensor]:  # fmt: skip
    """The results from tiles; with `cuts`, from several parts of the vocabulary."""
    bounds = (0, *cuts, len(weight))
    found = []
    for first, last in itertools.pairwise(bounds):
        numbers = IGNORED, len(weight), wanted, fp32, factor, first, 0
        found.append(tiles.PARTS_OF_TILES(hidden, weight[first:last], ids, *numbers))
    parts, targets = (torch.stack(each) for each in zip(*found, strict=True))
    logprob, entropy, lse, _, mean, top1, _ = FINISH(parts, targets, ids, IGNORED, len(weight), 1, wanted)
    return [logprob[:, 0], entropy, lse, mean, top1]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for got, one in zip(found[:4], wanted, strict=False):
        assert (got.double() - one).abs().max() <= 4e-6 * one.abs().max().clamp(min=1.0)
    assert torch.equal(found[4], wanted[4])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@at("sm_90", "cuda")
def test_agrees_with_float64(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for shape in ((1, 8, 8), (3, 300, 72), (130, 513, 64)):
            given = make(*shape, dtype, device)
            assert_close(run(*given), exact(*given, 1.0, True))
            assert_close(run(*given, factor=0.7, fp32=True), exact(*given, 0.7, False))


@at("sm_90", "cuda")
def test_parts_of_the_vocabulary_and_strides(place: str) -> None:
    with running_on(place) as device:
        hidden, weight, ids = make(67, 600, 64, torch.bfloat16, device)
        wanted = exact(hidden, weight, ids, 1.0, True)
        assert_close(run(hidden, weight, ids.int(), cuts=(8, 264, 520)), wanted)
        wide = torch.full((67, 80), torch.nan, dtype=torch.bfloat16, device=device)
        wide[:, :64] = hidden
        assert_close(run(wide[:, :64], weight, ids), wanted)


@at("sm_90", "cuda")
def test_ties_and_infinities(place: str) -> None:
    with running_on(place) as device:
        weight = torch.zeros(520, 8, dtype=torch.bfloat16, device=device)
        weight[torch.tensor([3, 300, 519])] = 2.0
        hidden = torch.ones(4, 8, dtype=torch.bfloat16, device=device)
        ids = torch.tensor([[3], [300], [519], [7]], device=device)
        found = run(hidden, weight, ids)
        assert_close(found, exact(hidden, weight, ids, 1.0, True))
        assert found[4].tolist() == [True, False, False, False]
        weight[9], weight[511] = -torch.inf, torch.nan
        hidden[0] = 0.0
        bad = run(hidden, weight, ids)
        assert all(bool(t.isnan().all()) for t in bad[:4])
        weight[511] = 0.0
        half = run(hidden[1:], weight, ids[1:])
        for got, one in zip(half[:3], exact(hidden[1:], weight, ids[1:], 1.0, True), strict=False):
            torch.testing.assert_close(got.double(), one, rtol=1e-5, atol=1e-5)
        assert half[3].tolist() == [-torch.inf] * 3


@at("sm_90", "cuda")
def test_only_what_is_wanted(place: str) -> None:
    with running_on(place) as device:
        given = make(5, 260, 16, torch.bfloat16, device)
        every = run(*given)
        for wanted, kept in ((0, ()), (plans.LSE, (2,)), (plans.TOP1, (4,)), (plans.ENTROPY | plans.MEAN, (1, 3))):
            some = run(*given, wanted=wanted)
            for place_of in (0, *kept):
                assert_same_bits(some[place_of], every[place_of])


@at("sm_90", "cuda")
def test_bad_ids_name_their_place(place: str) -> None:
    with running_on(place) as device:
        hidden, weight, ids = make(5, 260, 16, torch.bfloat16, device)
        ids[2] = 260
        with pytest.raises(ArgumentError, match="ids has 260 in place 42"):
            tiles.PARTS_OF_TILES(hidden, weight, ids, IGNORED, 260, 0, False, 1.0, 0, 40)
            if device == "cuda":
                torch.cuda.synchronize()
            plans.raise_if_bad(hidden)


@pytest.mark.gpu
def test_the_public_function_takes_tiles() -> None:
    hidden, weight, ids = make(tiles.FEWEST[0] + 3, tiles.FEWEST[1] + 8, 64, torch.bfloat16, "cuda")
    options = {f"return_{name}": True for name in ("entropy", "lse", "mean_logit", "top1")}
    found = rtkernels.linear_logprob(hidden, weight, ids[:, 0], **options)
    for got, wanted in zip(found[:4], exact(hidden, weight, ids, 1.0, True), strict=False):
        assert (got.double() - wanted).abs().max() <= 1e-3 * wanted.abs().max().clamp(min=1.0)


def test_which_calls_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, ids = make(4, 24, 16, torch.bfloat16, "cpu")
    metas: dict[str, Any] = {"hidden": meta_of(hidden), "weight": meta_of(weight), "ids": meta_of(ids)}
    given = metas | {
        "bias": None, "temperatures": None, "logit_scale": 1.0, "softcap": 0.0, "keep_logits": False, "wanted": WANTED,
        "device": -1,
    }  # fmt: skip
    assert not tiles.suits(**given)
    monkeypatch.setattr(tiles, "FEWEST", (4, 24))
    assert tiles.suits(**given)
    odd = meta_of(torch.zeros(4, 17, dtype=torch.bfloat16)[:, :16])
    for name, value in (
        ("bias", meta_of(weight[:, 0])), ("temperatures", meta_of(hidden)), ("softcap", 3.0), ("logit_scale", -1.0),
        ("keep_logits", True), ("wanted", plans.SQUARES), ("hidden", odd), ("hidden", meta_of(hidden.float())),
        ("ids", meta_of(ids.expand(4, 2))),
    ):  # fmt: skip
        assert not tiles.suits(**(given | {name: value}))
    assert not tiles.TILES.supports(targets.parse("sm_80"))
