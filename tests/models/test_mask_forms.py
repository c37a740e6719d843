"""Masks by their form: the matrix that transformers creates, the same attention, and no matrix on the way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels.models import attention
from rtkernels.models.mask_form import MaskForm, form_of_mask, read_function

pytest.importorskip("transformers", minversion="5.17")

from transformers import masking_utils as given

HEADS, KV_HEADS, WIDTH = 4, 2, 16
CPU = torch.device("cpu")


def options(queries: int, keys: int, offset: Any = 0, kv_offset: int = 0, **others: Any) -> dict[str, Any]:
    mask_function = others.pop("mask_function", given.causal_mask_function)
    return {
        "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": offset, "kv_offset": kv_offset,
        "mask_function": mask_function, "attention_mask": None, "device": CPU, "dtype": torch.bfloat16, **others,
    }  # fmt: skip


def matrix(wanted: dict[str, Any]) -> Tensor:
    return given.sdpa_mask(**{**wanted, "allow_is_causal_skip": False}).expand(2, 1, -1, -1)


def padded(length: int, *valid: tuple[int, int]) -> Tensor:
    mask = torch.zeros(len(valid), length, dtype=torch.bool)
    for row, (start, end) in enumerate(valid):
        mask[row, start:end] = True
    return mask


def packed(base: Any, positions: Tensor) -> Any:
    ids = given.find_packed_sequence_indices(positions)
    if hasattr(given, "packed_sequence_compatibility_function"):
        return given.packed_sequence_compatibility_function(base, positions, ids)
    return given.and_masks(base, given.packed_sequence_mask_function(ids))


CAUSAL, WINDOW = given.causal_mask_function, given.sliding_window_causal_mask_function(4)
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2], [3, 4, 5, 6, 0, 0, 1, 2, 3]])
FORMS = {
    "causal": options(9, 9),
    "window": options(9, 9, mask_function=WINDOW, local_size=4),
    "window of one": options(9, 9, mask_function=given.sliding_window_causal_mask_function(1), local_size=1),
    "left padding": options(9, 9, attention_mask=padded(9, (0, 9), (4, 9))),
    "left padding, window": options(9, 9, attention_mask=padded(9, (2, 9), (5, 9)), mask_function=WINDOW),
    "right padding": options(9, 9, attention_mask=padded(9, (0, 9), (0, 5))),
    "right padding, window": options(9, 9, attention_mask=padded(9, (0, 9), (0, 5)), mask_function=WINDOW),
    "a row of padding": options(9, 9, attention_mask=padded(9, (0, 9), (0, 0))),
    "packed": options(9, 9, mask_function=packed(CAUSAL, POSITIONS)),
    "packed, window": options(9, 9, mask_function=packed(WINDOW, POSITIONS)),
    "after a cache": options(3, 9, 6),
    "after a cache, left padding": options(3, 9, 6, attention_mask=padded(9, (2, 9), (7, 9))),
    "after a cache, window": options(3, 7, 6, 2, mask_function=WINDOW, local_size=4),
    "static cache": options(5, 9),
    "static cache, padding": options(5, 9, attention_mask=padded(5, (2, 5), (0, 5))),
    "static cache, later": options(3, 9, torch.tensor(4)),
    "static cache, later, padding": options(3, 9, torch.tensor(4), attention_mask=padded(7, (0, 7), (0, 5))),
    "one token": options(1, 9, 8),
    "one token, window": options(1, 9, 8, mask_function=WINDOW, local_size=4),
    "one token, static": options(1, 9, torch.tensor(5), attention_mask=padded(6, (0, 6), (0, 6))),
    "not causal": options(9, 9, mask_function=given.bidirectional_mask_function),
    "not causal, padding": options(
        5, 9, mask_function=given.bidirectional_mask_function, attention_mask=padded(9, (0, 9), (0, 4))
    ),
    "not causal, window": options(9, 9, mask_function=given.sliding_window_bidirectional_mask_function(3)),
    "not causal, window, padding": options(
        9,
        9,
        mask_function=given.sliding_window_bidirectional_mask_function(3),
        attention_mask=padded(9, (0, 9), (0, 4)),
    ),
}
OTHERS = {
    "holes": options(9, 9, attention_mask=padded(9, (0, 9), (0, 9)) & (torch.arange(9) != 4)),
    "both sides": options(9, 9, attention_mask=padded(9, (2, 9), (0, 5))),
    "chunks": options(9, 9, mask_function=given.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))),
    "or": options(9, 9, mask_function=given.or_masks(CAUSAL, lambda b, h, q, k: k < 2)),
    "and": options(9, 9, mask_function=given.and_masks(CAUSAL, lambda b, h, q, k: k != 2)),
    "a function like causal": options(9, 9, mask_function=lambda b, h, q, k: k <= q),
    "sequences apart": options(
        9,
        9,
        mask_function=given.and_masks(
            CAUSAL, given.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2]] * 2))
        ),
    ),
    "window without causal": options(9, 9, mask_function=given.sliding_window_overlay(4), kv_offset=1),
    "names of another version": {"batch_size": 2, "kv_length": 9, "mask_function": CAUSAL},
}


def heads(wanted: dict[str, Any]) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, wanted["q_length"]), (KV_HEADS, wanted["kv_length"]), (KV_HEADS, wanted["kv_length"]))
    return tuple(torch.randn(2, n, length, WIDTH, generator=generator).bfloat16() for n, length in sizes)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return the attention in fp32; 0 where a query attends to nothing."""
    k, v = (t.float().repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = (q.float() @ k.mT * 0.25).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


@pytest.mark.parametrize("name", FORMS)
def test_the_matrix_of_transformers(name: str) -> None:
    form = form_of_mask(FORMS[name])
    assert isinstance(form, MaskForm) and form.shape == (2, 1, FORMS[name]["q_length"], FORMS[name]["kv_length"])
    assert torch.equal(form.tensor(), matrix(FORMS[name]))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_form(name: str) -> None:
    assert form_of_mask(OTHERS[name]) is None


def test_every_padding_of_one_row() -> None:
    for bits in itertools.product((False, True), repeat=5):
        wanted = {**options(5, 5, attention_mask=torch.tensor([bits, (True,) * 5]))}
        form = form_of_mask(wanted)
        block = torch.tensor(bits).int().diff(prepend=torch.zeros(1), append=torch.zeros(1)).abs().sum() <= 2
        assert block or form is None
        assert form is None or torch.equal(form.tensor(), matrix(wanted))


class Module(torch.nn.Module):
    is_causal = True


@pytest.fixture
def no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a mask became a matrix")

    monkeypatch.setattr(attention, "_bias", refuse)
    monkeypatch.setattr(MaskForm, "_make", refuse)


def _attended(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return out and gradients by a mask's form, and those by transformers' matrix in fp32."""
    results = []
    for ours in (True, False):
        q, k, v = (t.requires_grad_(FORMS[name]["q_length"] > 1) for t in heads(FORMS[name]))
        if ours:
            mask = attention.attention_mask(**FORMS[name], allow_is_causal_skip=True)
            module = Module()
            module.is_causal = "not causal" not in name
            out = attention.attention_forward(module, q, k, v, mask, scaling=0.25)[0]
        else:
            out = plain(q, k, v, matrix(FORMS[name]))
        found = [out.float().detach()]
        if q.requires_grad:
            (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape).sin()).sum().backward()
            found += [t.grad.float() for t in (q, k, v)]
        results.append(found)
    return results[0], results[1]


@pytest.mark.parametrize("name", FORMS)
def test_attention_by_form(name: str, no_matrix: None) -> None:
    with torch.set_grad_enabled(FORMS[name]["q_length"] > 1):
        for got, wanted in zip(*_attended(name), strict=True):
            assert float((got - wanted).norm()) <= 1e-2 * float(wanted.norm()) + 1e-6


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["left padding, window", "right padding", "packed, window", "static cache, later"])
def test_in_the_emulator(name: str, target: str, no_matrix: None) -> None:
    with rtkernels.emulate(target):
        for got, wanted in zip(*_attended(name), strict=True):
            assert float((got - wanted).norm()) <= 1e-2 * float(wanted.norm()) + 1e-6


def test_a_reader_gets_the_matrix() -> None:
    """Code that reads a mask in any way, or passes it to other sizes of q and k, sees that of transformers."""
    wanted = matrix(FORMS["window"])
    form = attention.attention_mask(**FORMS["window"])
    assert torch.equal(form[:, :, -3:], wanted[:, :, -3:]) and torch.equal(torch.where(form, 1, 0) == 1, wanted)
    assert torch.equal(form & True, wanted) and torch.equal(~form, ~wanted) and form.to(CPU) is form
    assert form.contiguous() is form and form.ndim == 4 and form.dtype == torch.bool and form.to(torch.int).sum() > 0
    q, k, v = heads(FORMS["window"])
    got = attention.attention_forward(Module(), q, k[:, :, :7], v[:, :, :7], form, scaling=0.25)[0]
    assert torch.allclose(got.float(), plain(q, k[:, :, :7], v[:, :, :7], wanted[..., :7]), rtol=0, atol=2e-2)


def test_a_cache_may_move_on() -> None:
    """A static cache adds to its offset in place before its mask is read."""
    offset = torch.tensor(4)
    form = form_of_mask(options(3, 9, offset))
    offset += 3
    assert torch.equal(form.tensor(), matrix(FORMS["static cache, later"]))


def test_another_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory whose function does something else than expected is not trusted, although its name is the same."""
    from rtkernels.models import mask_form

    def overlay(sliding_window: int) -> Any:
        def inner_mask(batch_idx: int, head_idx: int, q_idx: int, kv_idx: int) -> bool:
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    assert read_function(WINDOW) == (3, 0, None, None)
    monkeypatch.setattr(given, "sliding_window_overlay", overlay)
    mask_form._factories.cache_clear()
    try:
        assert read_function(given.sliding_window_causal_mask_function(4)) is None
    finally:
        mask_form._factories.cache_clear()
