"""Benchmark rows of ``linear_divergence``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import rtkernels
from bench.rows.row import Row, in_fp32

_CHUNK, _BETA = 512, 0.5


def host(x: Tensor) -> dict[str, Callable[[], Any]]:
    return {"linear_divergence": lambda: rtkernels.linear_divergence(x, x, x, x)}


def _divergence(student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    """From whole logits in fp32."""
    log_q, log_p = (in_fp32(linear(x, w)).log_softmax(-1) for x, w in ((student, head), (teacher, teacher_head)))
    q, p = log_q.exp(), log_p.exp()
    log_m = (_BETA * p + (1.0 - _BETA) * q).log()
    return _BETA * (p * (log_p - log_m)).sum(-1) + (1.0 - _BETA) * (q * (log_q - log_m)).sum(-1)


def _chunked(
    function: Callable[..., Tensor], student: Tensor, head: Tensor, teacher: Tensor, of_teacher: Tensor
) -> Tensor:
    """The form of trainers: chunks of rows, computed again in the backward pass."""
    chunks = zip(student.split(_CHUNK), teacher.split(_CHUNK), strict=True)
    return torch.cat([checkpoint(function, x, head, y, of_teacher, use_reentrant=False) for x, y in chunks])


def _ours(student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor) -> Tensor:
    return rtkernels.linear_divergence(student, head, teacher, teacher_head, beta=_BETA)


def _both(function: Callable[..., Tensor], student: Tensor, head: Tensor, **others: Tensor) -> tuple[Tensor, ...]:
    leaves = student.detach().requires_grad_(), head.detach().requires_grad_()
    loss = function(*leaves, *others.values())
    return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)


def _prepared(compiled: bool) -> Callable[..., Callable[[], Any]]:
    def prepare(**given: Tensor) -> Callable[[], Any]:
        one = torch.compile(_divergence, dynamic=False) if compiled else _divergence
        return lambda: _both(lambda *tensors: _chunked(one, *tensors), **given)

    return prepare


def rows() -> Iterator[Row]:
    count, size, of_teacher, vocabulary = 8192, 4096, 8192, 151936

    def make(device: str, generator: torch.Generator) -> dict[str, Any]:
        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=torch.bfloat16, device=device, generator=generator)

        return {
            "student": normal(count, size), "head": normal(vocabulary, size) * size**-0.5,
            "teacher": normal(count, of_teacher), "teacher_head": normal(vocabulary, of_teacher) * of_teacher**-0.5,
        }  # fmt: skip

    yield Row(
        name="linear_divergence", shape=f"{count}x{size}x{of_teacher}x{vocabulary}", make=make,
        ours=lambda **given: _both(_ours, **given), torch=lambda **given: _both(_divergence, **given),
        bytes=4 * size * (count + vocabulary) + 2 * of_teacher * (count + vocabulary) + 4 * count,
        flops=2 * count * vocabulary * (3 * size + of_teacher),
        backends={"chunked": _prepared(False), "chunked_compiled": _prepared(True)},
    )  # fmt: skip
