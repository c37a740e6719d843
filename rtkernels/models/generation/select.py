"""Selection of tokens on the device: what transformers' logits processors compute, without values read on the host.

Processors that are functions of the scores alone are called as they are. Those that depend on the tokens so far are
computed from tables that a step updates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as processors

_PURE = ("temperature", "top_k", "top_p", "min_p", "mass", "epsilon", "filter_value", "min_tokens_to_keep")
_FUNCTIONS_OF_SCORES = (
    processors.TemperatureLogitsWarper, processors.TopKLogitsWarper, processors.TopPLogitsWarper,
    processors.MinPLogitsWarper, processors.TypicalLogitsWarper, processors.EpsilonLogitsWarper,
    processors.LogitNormalization, processors.InfNanRemoveLogitsProcessor,
)  # fmt: skip
_PENALTY = processors.RepetitionPenaltyLogitsProcessor
_MIN_LENGTH = processors.MinLengthLogitsProcessor
_MIN_NEW = processors.MinNewTokensLengthLogitsProcessor
_SUPPRESS = processors.SuppressTokensLogitsProcessor
_KNOWN = (*_FUNCTIONS_OF_SCORES, _PENALTY, _MIN_LENGTH, _MIN_NEW, _SUPPRESS)


def reason_against(given: Any, ids: Tensor) -> str | None:
    """Return why processors cannot be computed here for a prompt, None if they can."""
    for processor in given:
        if type(processor) not in _KNOWN:
            return f"the logits processor {type(processor).__name__} is not computed on the device"
        if type(processor) is _PENALTY and not _ignores_prompt_only(processor.prompt_ignore_length, ids):
            return "a repetition penalty ignores more than the prompt"
    return None


def _ignores_prompt_only(ignored: Any, ids: Tensor) -> bool:
    if isinstance(ignored, Tensor):
        return tuple(ignored.shape) == (ids.shape[0],) and bool((ignored <= ids.shape[1]).all())
    return ignored is None or ignored <= ids.shape[1]


def _form(processor: Any) -> Hashable:
    """Return all that decides what a processor computes, except for values that are set at every call."""
    kind = type(processor)
    if kind is _PENALTY:
        return kind, processor.penalty
    if kind is _SUPPRESS:
        return kind, tuple(processor.suppress_tokens.tolist())
    if kind in (_MIN_LENGTH, _MIN_NEW):
        return kind, tuple(processor.eos_token_id.tolist())
    return kind, *((name, getattr(processor, name, None)) for name in _PURE)


def key_of(given: Any, sampled: bool, stop: list[int], pad: int | None) -> Hashable:
    """Return what a :class:`Selection` depends on."""
    return tuple(map(_form, given)), sampled, tuple(stop), pad


class Selection:
    """The choice of one token for each row of the batch, and the tables that it needs.

    `result` is int64 ``[2 batch + 1]``: the tokens, 1 for each row that goes on, and 1 if probabilities are NaN.
    """

    def __init__(
        self, given: Any, sampled: bool, stop: list[int], pad: int | None, batch: int, vocabulary: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.sampled, self.vocabulary = sampled, vocabulary
        self.stop = torch.tensor(stop, dtype=torch.int64, device=device) if stop else None
        self.pad, self.pad_token = torch.tensor(pad or 0, dtype=torch.int64, device=device), pad or 0
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.columns = torch.zeros((), dtype=torch.int64, device=device)
        self.result = torch.zeros(2 * batch + 1, dtype=torch.int64, device=device)
        self.seen: list[Tensor] = []  # tables of tokens, one for each repetition penalty
        self.allowed_from: list[Tensor] = []
        self.steps = [self._step(p, batch, device) for p in given]

    def _step(self, processor: Any, batch: int, device: torch.device) -> Callable[[Tensor], Tensor]:
        kind = type(processor)
        if kind is _PENALTY:
            self.seen.append(torch.zeros(batch, self.vocabulary + 1, dtype=torch.bool, device=device))
            return self._penalized(self.seen[-1], processor.penalty)
        if kind is _SUPPRESS:
            banned = self._mask(processor.suppress_tokens, device)
            return lambda scores: scores.masked_fill(banned, -torch.inf)
        if kind in (_MIN_LENGTH, _MIN_NEW):
            banned, limit = self._mask(processor.eos_token_id, device), torch.zeros_like(self.columns)
            self.allowed_from.append(limit)
            return lambda scores: scores.masked_fill(banned & (self.columns < limit), -torch.inf)
        kept = copy.copy(processor)  # the caller's may change later
        return lambda scores: kept(None, scores)

    def _mask(self, ids: Tensor, device: torch.device) -> Tensor:
        return torch.isin(torch.arange(self.vocabulary, dtype=torch.int64, device=device), ids.to(device))

    @staticmethod
    def _penalized(seen: Tensor, penalty: float) -> Callable[[Tensor], Tensor]:
        def step(scores: Tensor) -> Tensor:
            changed = torch.where(scores < 0, scores * penalty, scores / penalty)
            return torch.where(seen[:, :-1], changed, scores)

        return step

    def start(self, given: Any, prompt: Tensor) -> None:
        """Prepare the tables for a prompt and processors of the same form."""
        self.active.fill_(True)
        self.columns.fill_(prompt.shape[1])
        limits = [
            p.min_length if type(p) is _MIN_LENGTH else p.prompt_length_to_skip + p.min_new_tokens
            for p in given
            if type(p) in (_MIN_LENGTH, _MIN_NEW)
        ]
        for tensor, limit in zip(self.allowed_from, limits, strict=True):
            tensor.fill_(limit)
        penalties = [p for p in given if type(p) is _PENALTY]
        for processor, seen in zip(penalties, self.seen, strict=True):
            ignored = processor.prompt_ignore_length
            ids = prompt.to(torch.int64).clamp(max=self.vocabulary)
            if ignored is not None:
                column = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
                first = ignored.to(ids.device)[:, None] if isinstance(ignored, Tensor) else ignored
                ids = ids.masked_fill(column < first, self.vocabulary)
            seen.zero_().scatter_(1, ids, True)

    def __call__(self, logits: Tensor) -> Tensor:
        """Select from logits ``[batch, vocabulary]``, update all tables, and return the tokens ``[batch]``."""
        scores = logits.to(torch.float32)
        for step in self.steps:
            scores = step(scores)
        if self.sampled:
            # What torch.multinomial computes for one sample, except that it checks the probabilities on the host.
            probabilities = torch.softmax(scores, -1)
            tokens = (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)
            invalid = probabilities.gather(1, tokens[:, None]).isnan().any()
            self.result[-1:].copy_(invalid.view(1))
        else:
            tokens = scores.argmax(-1)
        if self.stop is not None:
            tokens = torch.where(self.active, tokens, self.pad)
            self.active.logical_and_((tokens[:, None] != self.stop).all(-1))
        for seen in self.seen:
            seen.scatter_(1, tokens[:, None], True)
        self.columns.add_(1)
        batch = tokens.shape[0]
        self.result[:batch].copy_(tokens)
        self.result[batch:-1].copy_(self.active)
        return tokens

    @property
    def is_plain(self) -> bool:
        """True if tokens are those of the largest logits: one kernel selects them (``ops.reduce.step_token``)."""
        return not self.sampled and not self.steps
