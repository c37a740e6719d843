"""Cross entropy over a vocabulary that is split between processes: the numbers of one process, gradients included."""

from __future__ import annotations

from pathlib import Path

import torch
from support.compare import running_on
from support.places import at
from support.processes import joined, spawn
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_operators as ops
from rtkernels.ops.loss import cross_entropy_parallel as parallel
from rtkernels.ops.loss import cross_entropy_plan as plans

cross_entropy = rtkernels.cross_entropy

_SPLIT_CASES = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01},
    {"reduction": "none", "softcap": 3.0},
    {"in_place": True},
)


def _split_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 4, 40, generator=generator) * 3
    logits[0, 0, 3] = logits[0, 0, 30] = 20.0  # equal scores in two parts
    logits[1, 0, 8:] = -torch.inf  # nothing in the last part
    labels = torch.tensor([[3, 39, 19, -100], [2, 20, 21, 0]])
    return logits, labels


def _split_worker(rank: int, world: int, path: str) -> None:
    with joined(rank, path, world):
        logits, labels = _split_inputs()
        group = torch.distributed.group.WORLD
        results = []
        for bounds in ((0, 20, 40), (0, 27, 40)):
            first, last = bounds[rank], bounds[rank + 1]
            extra = {} if bounds[1] == 20 else {"vocab_start": first, "vocab_size": 40}
            for options in _SPLIT_CASES:
                leaf = logits[..., first:last].clone().requires_grad_()
                loss, lse, accuracy = cross_entropy(
                    leaf * 1.0, labels, group=group, return_lse=True, return_accuracy=True, **options, **extra
                )
                loss.backward(torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape))
                results.append((loss.detach(), lse, accuracy, leaf.grad))
        try:
            cross_entropy(logits[..., :20], labels + 1, group=group)
        except ArgumentError as error:
            results.append(str(error))
        torch.save(results, f"{path}/{rank}.pt")


def test_split_vocabulary(tmp_path: Path) -> None:
    spawn(_split_worker, 2, str(tmp_path))
    logits, labels = _split_inputs()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for index, options in enumerate(_SPLIT_CASES * 2):
        options = {k: v for k, v in options.items() if k != "in_place"}
        leaf = logits.clone().requires_grad_()
        wanted = cross_entropy(leaf, labels, return_lse=True, return_accuracy=True, **options)
        wanted[0].backward(torch.linspace(0.5, 1.5, wanted[0].numel()).view(wanted[0].shape))
        for rank in ranks:
            for got, one in zip(rank[index], wanted, strict=False):
                torch.testing.assert_close(got, one.detach())
        grad = torch.cat([rank[index][3] for rank in ranks], -1)
        torch.testing.assert_close(grad, leaf.grad)
    assert all("labels has 40 in row 1" in rank[-1] for rank in ranks)


@at("cpu", "sm_90", "cuda")
def test_parts_make_the_whole(place: str) -> None:
    """What the processes exchange and combine, in one process and with kernels."""
    logits, labels = _split_inputs()
    with running_on(place) as device:
        logits, labels = logits.to(device).bfloat16(), labels.to(device)
        wanted = ops.FORWARD(logits, labels, -100, 0.1, 0.01, 0.0, plans.MEAN, True)
        parts = [ops.PARTS(logits[..., a:b], labels, -100, 0.1, 0.0, a, 40) for a, b in ((0, 27), (27, 40))]
        got = parallel.combined(torch.stack(parts), labels, -100, 0.1, 0.01, 40, plans.MEAN)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        whole = ops.BACKWARD(wanted[0] / wanted[0], logits, labels, wanted[2], wanted[3], -100, 0.1, 0.01, 0.0, 0, 40)
        for a, b in ((0, 27), (27, 40)):
            part = ops.BACKWARD(
                wanted[0] / wanted[0], logits[..., a:b], labels, got[2], got[3], -100, 0.1, 0.01, 0.0, a, 40
            )
            torch.testing.assert_close(part, whole[..., a:b], equal_nan=True, rtol=2**-7, atol=1e-6)
