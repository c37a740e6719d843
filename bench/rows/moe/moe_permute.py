"""Benchmark rows of the permutation: the sizes of MoE layers, balanced and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import PERMUTE, UNPERMUTE, UNPERMUTE_BWD

PAD = 16


class Case(NamedTuple):
    """A routed batch: T tokens of H columns, k choices among E experts, of which some are used."""

    tokens: int
    cols: int
    experts: int
    top_k: int
    used: int
    note: str = ""

    @property
    def shape(self) -> str:
        return f"{self.tokens}x{self.cols}e{self.experts}k{self.top_k}{self.note}"

    @property
    def choices(self) -> int:
        return self.tokens * self.top_k

    @property
    def rows(self) -> int:
        """Rows with padding: half of what each expert can need more, and four standard deviations of that sum.

        Experts with few rows need more than half on average; the bound is then what they can need at most.
        """
        if self.choices < 8 * PAD * self.used:
            return -(-(self.choices + min(self.used, self.choices) * (PAD - 1)) // PAD) * PAD
        padding = self.used * (PAD - 1) / 2 + 4 * PAD * (self.used / 12) ** 0.5 if self.used > 1 else 0
        return -(-(self.choices + int(padding)) // PAD) * PAD

    def index(self, device: str, generator: torch.Generator) -> MoeIndex:
        """Return the index of random choices. Also of tensors without data, unlike ``build``."""
        logits = torch.randn(self.tokens, self.used, device=device, generator=generator)
        spread = self.experts // self.used if self.used > 1 else 1  # the unused experts lie between the others
        choices = logits.topk(self.top_k, dim=1).indices * spread
        key, places = choices.flatten(), torch.arange(self.choices, device=device)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=device)
        counts = counts.scatter_add(0, key, torch.ones_like(key))
        ends, padded_ends = counts.cumsum(0), ((counts + PAD - 1) // PAD * PAD).cumsum(0)
        offsets = torch.cat([torch.zeros_like(ends[:1]), padded_ends])
        order = torch.argsort(key, stable=True)
        row = offsets[key[order]] + places - (ends - counts)[key[order]]
        rows = torch.empty_like(key).scatter(0, order, row).view(choices.shape)
        slots = torch.full((self.rows,), -1, dtype=torch.int64, device=device).scatter(0, row, order)
        dropped = torch.zeros((), dtype=torch.int64, device=device)
        return MoeIndex(*(t.to(torch.int32) for t in (rows, choices, slots, counts, offsets, dropped)))


MAIN = Case(8192, 2048, 256, 8, 256)
LARGE = Case(8192, 7168, 256, 8, 256)
CASES = (
    MAIN,
    LARGE,
    Case(32768, 2048, 32, 2, 32),
    Case(32768, 2048, 256, 1, 1, " one expert"),
    Case(8192, 2048, 64, 8, 32, " half empty"),
)


def make(case: Case, device: str, generator: torch.Generator, *names: str) -> dict[str, Any]:
    """Return the named inputs and those that every row has, the parts of the index."""
    index = case.index(device, generator)
    like = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    shapes = {"x": case.tokens, "dout": case.tokens, "y": len(index.slots), "dy": len(index.slots)}
    result: dict[str, Any] = {n: torch.randn(shapes[n], case.cols, **like) for n in names if n in shapes}
    if "probs" in names:
        result["probs"] = torch.rand(case.tokens, case.top_k, device=device, generator=generator)
    if "dprobs" in names:
        result["dprobs"] = torch.rand(len(index.slots), device=device, generator=generator)
    return {**result, **index._asdict()}


def padded_rows(values: Tensor, slots: Tensor, top_k: int) -> Tensor:
    """Return ``values`` of the tokens, ``[T, ...]``, by rows in plain torch."""
    return torch.where((slots >= 0)[:, None], values[(slots.clamp(min=0) // top_k).long()], 0)


def plain_permute(x: Tensor, rows: Tensor, slots: Tensor, probs: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """moe_permute with probabilities in plain torch."""
    numbers = torch.where(slots >= 0, probs.flatten()[slots.clamp(min=0).long()], 0)
    return padded_rows(x, slots, rows.shape[1]), numbers


def plain_unpermute(y: Tensor, rows: Tensor, probs: Tensor | None = None, **_: Any) -> Tensor:
    """moe_unpermute in plain torch."""
    terms = y[rows.long()]
    if probs is not None:
        terms = terms * probs[..., None]
    return terms.sum(1, dtype=torch.float32 if y.dtype == torch.bfloat16 else y.dtype).to(y.dtype)


def plain_backward(dout: Tensor, y: Tensor, rows: Tensor, slots: Tensor, probs: Tensor, **_: Any):
    """The gradients of moe_unpermute with weights in plain torch."""
    weights = torch.where(slots >= 0, probs.flatten()[slots.clamp(min=0).long()], 0)
    dy = (padded_rows(dout, slots, rows.shape[1]) * weights[:, None]).to(dout.dtype)
    return dy, (y[rows.long()] * dout[:, None]).sum(-1)


def permute_rows(case: Case) -> Iterator[Row]:
    """Yield the rows of a batch that is permuted with its probabilities, and put back."""
    tokens, many, choices = (2 * n * case.cols for n in (case.tokens, case.rows, case.choices))
    numbers = 4 * case.choices
    yield Row(
        name="permute_pad",
        shape=case.shape,
        make=lambda device, g: make(case, device, g, "x", "probs"),
        ours=lambda x, rows, slots, probs, **_: PERMUTE(x, rows, slots, None, probs, None)[::2],
        torch=plain_permute,
        bytes=tokens + many + 2 * numbers + 4 * case.rows,
    )
    yield Row(
        name="unpermute_pad",
        shape=case.shape,
        make=lambda device, g: make(case, device, g, "y"),
        ours=lambda y, rows, **_: UNPERMUTE(y, rows, None, None, None),
        torch=plain_unpermute,
        bytes=choices + tokens + numbers,
    )


def rows() -> Iterator[Row]:
    """Yield the benchmark rows."""
    for case in CASES:
        yield from permute_rows(case)
        if case in (MAIN, LARGE):
            yield from _other_rows(case)


def _other_rows(case: Case) -> Iterator[Row]:
    tokens, many, choices = (2 * n * case.cols for n in (case.tokens, case.rows, case.choices))
    numbers = 4 * case.choices
    yield Row(
        name="unpermute_pad_probs",
        shape=case.shape,
        make=lambda device, g: make(case, device, g, "y", "probs"),
        ours=lambda y, rows, probs, **_: UNPERMUTE(y, rows, probs, None, None),
        torch=plain_unpermute,
        bytes=choices + tokens + 2 * numbers,
    )
    yield Row(
        name="permute_pad_bwd",
        shape=case.shape,
        make=lambda device, g: make(case, device, g, "dy", "dprobs"),
        ours=lambda dy, dprobs, rows, **_: UNPERMUTE(dy, rows, None, None, dprobs),
        torch=lambda dy, dprobs, rows, **_: (plain_unpermute(dy, rows), dprobs[rows.long()]),
        bytes=choices + tokens + 3 * numbers,
    )
    yield Row(
        name="unpermute_pad_bwd",
        shape=case.shape,
        make=lambda device, g: make(case, device, g, "dout"),
        ours=lambda dout, rows, slots, **_: PERMUTE(dout, rows, slots, None, None, None),
        torch=lambda dout, rows, slots, **_: padded_rows(dout, slots, rows.shape[1]),
        bytes=tokens + many + numbers,
    )
    yield Row(
        name="unpermute_pad_probs_bwd",
        shape=case.shape,
        make=lambda device, g: make(case, device, g, "dout", "y", "probs"),
        ours=lambda dout, y, rows, slots, probs, **_: UNPERMUTE_BWD(dout, y, rows, slots, probs, None, True),
        torch=plain_backward,
        bytes=tokens + choices + many + 3 * numbers,
    )
