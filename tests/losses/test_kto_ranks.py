"""KTO over several processes: the divergence from the reference is the mean over all of them."""

from __future__ import annotations

from pathlib import Path

import torch
from support.processes import joined, spawn
from torch import Tensor

from rtkernels import losses

DESIRABLE = torch.tensor([1, 0, 1, 0])


def _inputs(rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rank)
    policy, ref, kl, kl_ref = (-torch.rand(4, generator=generator) for _ in range(4))
    return policy, ref, kl + rank, kl_ref


def _worker(rank: int, world: int, path: str) -> None:
    with joined(rank, path, world):
        policy, ref, kl, kl_ref = _inputs(rank)
        leaf = policy.requires_grad_()
        group = torch.distributed.group.WORLD
        loss = losses.kto(leaf, ref, DESIRABLE, kl_logprobs=kl, kl_ref=kl_ref, beta=0.5, process_group=group)
        loss.backward()
        torch.save((loss.detach(), leaf.grad), f"{path}/{rank}.pt")


def test_the_divergence_is_that_of_all_processes(tmp_path: Path) -> None:
    spawn(_worker, 2, tmp_path)
    means = [(kl - kl_ref).mean() for _, _, kl, kl_ref in map(_inputs, range(2))]
    k = sum(means) / 2
    assert k > 0.1 and abs(means[0] - k) > 0.1  # or the test shows nothing
    for rank in range(2):
        policy, ref, _, _ = _inputs(rank)
        policy.requires_grad_()
        good, bad = 1 - torch.sigmoid(0.5 * (policy - ref - k)), 1 - torch.sigmoid(0.5 * (k - policy + ref))
        wanted = torch.where(DESIRABLE != 0, good, bad).mean()
        wanted.backward()
        loss, grad = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(loss, wanted.detach())
        torch.testing.assert_close(grad, policy.grad)
