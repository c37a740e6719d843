"""Benchmark rows of ``linear_logprob``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import rtkernels
from bench.peers.base import Compared
from bench.rows.row import Row, in_fp32

_CHUNK = 1024  # rows of the chunked peers


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    ids = torch.arange(len(x), device=x.device)
    return {"linear_logprob": lambda: rtkernels.linear_logprob(x, x, ids)}


def _statistics(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy from whole logits in fp32."""
    logits = in_fp32(torch.nn.functional.linear(hidden, weight))
    logp = logits.log_softmax(-1)
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def _chunked(function: Callable[..., tuple[Tensor, ...]], hidden: Tensor, weight: Tensor, ids: Tensor) -> Any:
    """The form of trainers: chunks of rows, computed again in the backward pass."""
    parts = [
        checkpoint(function, some, weight, of_rows, use_reentrant=False)
        for some, of_rows in zip(hidden.split(_CHUNK), ids.split(_CHUNK), strict=True)
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _ours(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return rtkernels.linear_logprob(hidden, weight, ids, return_entropy=True, **options)


def _both(function: Callable[..., Any], hidden: Tensor, weight: Tensor, ids: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    results = function(*leaves, ids)
    return *(t.detach() for t in results), *torch.autograd.grad(results, leaves, (g, g))


def _backends(gradients: bool) -> dict[str, Callable[..., Callable[[], Any]]]:
    def prepared(compiled: bool) -> Callable[..., Callable[[], Any]]:
        def prepare(hidden: Tensor, weight: Tensor, ids: Tensor, g: Tensor | None = None) -> Callable[[], Any]:
            one = torch.compile(_statistics, dynamic=False) if compiled else _statistics

            def call(*tensors: Tensor) -> Any:
                return _chunked(one, *tensors)

            if gradients:
                return lambda: _both(call, hidden, weight, ids, g)
            return lambda: call(hidden, weight, ids)

        return prepare

    ways = {"chunked": prepared(False), "chunked_compiled": prepared(True)}
    return ways if gradients else {**ways, "mm": _product}


def _product(hidden: Tensor, weight: Tensor, ids: Tensor) -> Callable[[], Any]:
    """The product of the head alone, which writes all logits: what the forward pass is compared with."""
    out = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)

    def log_probs(logits: Tensor) -> Tensor:
        return torch.cat([-cross_entropy(in_fp32(some), of, reduction="none")
                          for some, of in zip(logits.split(_CHUNK), ids.split(_CHUNK), strict=True)])  # fmt: skip

    return Compared(lambda: torch.mm(hidden, weight.t(), out=out), log_probs)


def _frozen(function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, ids: Tensor, g: Tensor) -> Any:
    """Log-probabilities and the gradient of hidden states: the head of a model that is trained by adapters."""
    leaf = hidden.detach().requires_grad_()
    logprob = function(leaf, weight, ids)
    return logprob.detach(), *torch.autograd.grad(logprob, leaf, g)


def _candidates(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return in_fp32(torch.nn.functional.linear(hidden, weight)).log_softmax(-1).gather(-1, ids)


def _special_rows(count: int, size: int, vocabulary: int, make: Any, make_both: Any) -> Iterator[Row]:
    """Rows of a frozen head, and of several candidates of each row."""
    product = 2 * count * size * vocabulary
    yield Row(
        name="linear_logprob_frozen", shape=f"{count}x{size}x{vocabulary}", make=make_both,
        ours=lambda **given: _frozen(lambda *t: rtkernels.linear_logprob(*t, save="projected"), **given),
        torch=lambda **given: _frozen(lambda *t: _statistics(*t)[0], **given),
        bytes=2 * size * (2 * count + vocabulary) + 16 * count, flops=2 * product,
    )  # fmt: skip
    for k in (8, 64):

        def make_ids(device: str, generator: torch.Generator, k: int = k) -> dict[str, Any]:
            given = make(device, generator)
            return given | {"ids": torch.randint(0, vocabulary, (count, k), device=device, generator=generator)}

        yield Row(
            name="linear_logprob_candidates", shape=f"{count}x{size}x{vocabulary} of {k}", make=make_ids,
            ours=lambda **given: rtkernels.linear_logprob(**given), torch=_candidates,
            bytes=2 * size * (count + vocabulary) + 12 * count * k, flops=product,
        )  # fmt: skip


def rows() -> Iterator[Row]:
    shapes = ((8192, 4096, 151936), (8192, 2048, 131072), (2048, 7168, 129280), (256, 4096, 151936))
    for count, size, vocabulary in shapes:

        def make(
            device: str, generator: torch.Generator, count: int = count, size: int = size, vocabulary: int = vocabulary
        ) -> dict[str, Any]:
            def normal(*sizes: int) -> Tensor:
                return torch.randn(*sizes, dtype=torch.bfloat16, device=device, generator=generator)

            ids = torch.randint(0, vocabulary, (count,), device=device, generator=generator)
            return {"hidden": normal(count, size), "weight": normal(vocabulary, size) * size**-0.5, "ids": ids}

        def make_both(device: str, generator: torch.Generator, make: Any = make) -> dict[str, Any]:
            given = make(device, generator)
            return given | {"g": torch.rand(len(given["ids"]), device=device, generator=generator)}

        shape, product = f"{count}x{size}x{vocabulary}", 2 * count * size * vocabulary
        yield Row(
            name="linear_logprob", shape=shape, make=make, ours=_ours, torch=_statistics,
            bytes=2 * size * (count + vocabulary) + 16 * count, flops=product, backends=_backends(False),
        )  # fmt: skip
        yield Row(
            name="linear_logprob_grad", shape=shape, make=make_both, ours=lambda **given: _both(_ours, **given),
            torch=lambda **given: _both(_statistics, **given), bytes=4 * size * (count + vocabulary) + 24 * count,
            flops=3 * product, backends=_backends(True),
        )  # fmt: skip
        if (count, size, vocabulary) == shapes[0]:
            yield Row(
                name="linear_logprob_grad", shape=f"{shape}, logits kept", make=make_both,
                ours=lambda **given: _both(partial(_ours, save="logits"), **given),
                torch=lambda **given: _both(_statistics, **given), bytes=4 * size * (count + vocabulary) + 24 * count,
                flops=3 * product, backends=_backends(True),
            )  # fmt: skip
            yield from _special_rows(count, size, vocabulary, make, make_both)
