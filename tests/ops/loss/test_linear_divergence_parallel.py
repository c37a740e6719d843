"""Divergence over a vocabulary that is split between processes: the numbers of one process, gradients too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.processes import joined, spawn
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

CASES: tuple[dict[str, Any], ...] = (
    {"beta": 0.0},
    {"beta": 0.3, "temperature": 1.3, "chunk_bytes": 1},
    {"beta": 1.0, "chunk_bytes": 1},
    {"beta": 0.3, "k": 5},
)


def _run(first: int, last: int, beta: float, k: int = 0, **more: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(5)
    shapes = ((2, 4, 8), (400, 8), (2, 4, 6), (400, 6), (400,), (400,))
    student, weight, teacher, head, bias, teacher_bias = (torch.randn(*s, generator=g) for s in shapes)
    bias[:3] = -torch.inf
    labels = torch.zeros(2, 4, dtype=torch.int64)
    labels[0, 3] = -100
    states = student.requires_grad_()
    weight, bias = (t[first:last].clone().requires_grad_() for t in (weight, bias))
    if k:
        logprobs, ids = torch.randn(2, 4, 400, generator=g).log_softmax(-1)[..., 3:].topk(k)
        named: dict[str, Any] = {"teacher_ids": ids + 3, "teacher_logprobs": logprobs}
    else:
        teacher_bias[:3] = -torch.inf
        named = {
            "teacher_hidden": teacher, "teacher_weight": head[first:last], "teacher_bias": teacher_bias[first:last],
        }  # fmt: skip
    loss = rtkernels.linear_divergence(states, weight, student_bias=bias, labels=labels, beta=beta, **named, **more)
    loss.backward(torch.linspace(0.5, 1.5, 8).view(2, 4))
    return [loss.detach(), states.grad, weight.grad, bias.grad]


def _worker(rank: int, world: int, path: str) -> None:
    with joined(rank, path, world):
        group, results = torch.distributed.group.WORLD, []
        for bounds in ((0, 200, 400), (0, 270, 400)):
            first, last = bounds[rank], bounds[rank + 1]
            extra = {"group": group} | ({} if bounds[1] == 200 else {"vocab_start": first, "vocab_size": 400})
            results += [(first, last, _run(first, last, **case, **extra)) for case in CASES]
        try:
            _run(0, 400, 0.0, group=group, vocab_start=1, vocab_size=400)
        except ArgumentError as error:
            results.append(str(error))
        torch.save(results, f"{path}/{rank}.pt")


def test_split_vocabulary(tmp_path: Path) -> None:
    spawn(_worker, 2, tmp_path)
    for rank in range(2):
        *results, message = torch.load(tmp_path / f"{rank}.pt")
        assert "vocab_start is 1" in message
        for case, (first, last, found) in zip([*CASES, *CASES], results, strict=True):
            loss, states, weight, bias = _run(0, 400, **case)
            for got, one in zip(found, (loss, states, weight[first:last], bias[first:last]), strict=True):
                torch.testing.assert_close(got, one, rtol=2e-5, atol=2e-6)
