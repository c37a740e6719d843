"""Log-probabilities over a vocabulary that is split between processes: the numbers of one process, gradients too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.processes import joined, spawn
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

ALL = {f"return_{name}": True for name in ("entropy", "lse", "log_sum_sq", "mean_logit", "top1")}
SOME = {"return_entropy": True, "return_lse": True}
CASES: tuple[dict[str, Any], ...] = (
    ALL,
    {**ALL, "softcap": 3.0, "temperature": 1.3, "save": "logits"},
    {**SOME, "save": "projected", "chunk_bytes": 1},
    {**ALL, "fp32_logits": True, "chunk_bytes": 1},
)


def _inputs(k: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(5)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((2, 4, 8), (400, 8), (400,)))
    weight[3] = weight[300] = 3 * hidden[0, 0]  # equal logits in two parts, the largest of a row
    bias[3] = bias[300] = 0.0
    ids = torch.randint(0, 400, (2, 4, k) if k else (2, 4), generator=g)
    ids[0, 0], ids[0, 3] = 300, -100
    return hidden, weight, bias, ids


def _run(k: int, first: int, last: int, more: dict[str, Any]) -> list[Tensor]:
    hidden, weight, bias, ids = _inputs(k)
    frozen = more.get("save") == "projected"
    states = hidden.requires_grad_()
    head, added = (t[first:last].clone().requires_grad_(not frozen) for t in (weight, bias))
    found = rtkernels.linear_logprob(states, head, ids, bias=added, **more)
    count = 3 if frozen else 5
    torch.autograd.backward(found[:count], [torch.linspace(0.5, 1.5, t.numel()).view(t.shape) for t in found[:count]])
    return [*(t.detach() for t in found), states.grad, *([] if frozen else [head.grad, added.grad])]


def _check_shards() -> None:
    """DTensors: rows of hidden states, or the vocabulary of the weight, on both processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for k, (hidden_at, weight_at) in (
        (0, (Shard(0), Replicate())),
        (3, (Replicate(), Shard(0))),
        (3, (Shard(1), Shard(0))),
    ):
        hidden, weight, bias, ids = _inputs(k)
        plain = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        wanted = rtkernels.linear_logprob(*plain[:2], ids, bias=plain[2], **ALL)
        sum(t.sum() for t in wanted[:5]).backward()
        places = (hidden_at, weight_at, weight_at)
        leaves = [
            distribute_tensor(t, mesh, [place]).requires_grad_()
            for t, place in zip((hidden, weight, bias), places, strict=True)
        ]
        found = rtkernels.linear_logprob(*leaves[:2], ids, bias=leaves[2], **ALL)
        sum(t.sum().full_tensor() for t in found[:5]).backward()
        for got, one in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), one, rtol=2e-5, atol=2e-6)
        for leaf, one in zip(leaves, plain, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), one.grad, rtol=2e-5, atol=2e-6)


def _check_no_rows(group: Any) -> None:
    hidden, weight, _, ids = _inputs(2)
    for more in ({**ALL}, {"save": "projected"}, {"save": "logits", **SOME}):
        states, head = hidden[:0].clone().requires_grad_(), weight[:200].clone()
        head.requires_grad_(more.get("save") != "projected")
        found = rtkernels.linear_logprob(states, head, ids[:0], group=group, **more)
        found = found if isinstance(found, tuple) else (found,)
        assert found[0].shape == (0, 4, 2)
        found[0].sum().backward()
        assert states.grad.shape == (0, 4, 8) and (head.grad is None or not head.grad.any())
    labels = torch.zeros(0, dtype=torch.int64)
    assert rtkernels.cross_entropy(torch.zeros(0, 200), labels, group=group, reduction="none").shape == (0,)
    none = rtkernels.linear_divergence(states, weight[:200], states.detach(), weight[:200], group=group)
    assert none.shape == (0, 4)


def _check_masked_part(group: Any, rank: int) -> None:
    """All columns of the first process are masked, and e to the power of the others' scores is 0 in fp32."""
    hidden, weight, bias, ids = _inputs(0)
    bias = torch.where(torch.arange(400) < 200, -torch.inf, bias - 200.0)
    ids = torch.where(ids < 0, ids, 200 + ids % 200)
    part = slice(200 * rank, 200 * rank + 200)
    for save in ("stats", "projected"):
        grads = []
        for rows, more in ((slice(None), {}), (part, {"group": group})):
            states = hidden.clone().requires_grad_()
            given = {"bias": bias[rows], "save": save, **SOME, **more}
            results = rtkernels.linear_logprob(states, weight[rows], ids, **given)
            sum(t.sum() for t in results).backward()
            grads.append(states.grad)
        torch.testing.assert_close(grads[1], grads[0], rtol=2e-5, atol=2e-6)


def _worker(rank: int, world: int, path: str) -> None:
    with joined(rank, path, world):
        group, results = torch.distributed.group.WORLD, []
        for bounds in ((0, 200, 400), (0, 270, 400)):
            first, last = bounds[rank], bounds[rank + 1]
            extra = {"group": group} | ({} if bounds[1] == 200 else {"vocab_start": first, "vocab_size": 400})
            results += [(first, last, _run(k, first, last, case | extra)) for k in (0, 3) for case in CASES]
        _check_shards()
        _check_no_rows(group)
        _check_masked_part(group, rank)
        try:
            hidden, weight, _, ids = _inputs(0)
            rtkernels.linear_logprob(hidden, weight, ids, group=group, vocab_start=1, vocab_size=400)
        except ArgumentError as error:
            results.append(str(error))
        torch.save(results, f"{path}/{rank}.pt")


def test_split_vocabulary(tmp_path: Path) -> None:
    spawn(_worker, 2, tmp_path)
    for rank in range(2):
        *results, message = torch.load(tmp_path / f"{rank}.pt")
        assert "vocab_start is 1" in message
        cases = [(k, case) for _ in range(2) for k in (0, 3) for case in CASES]
        for (k, case), (first, last, found) in zip(cases, results, strict=True):
            wanted = _run(k, 0, 400, case)
            if case.get("save") != "projected":
                wanted[-2:] = [t[first:last] for t in wanted[-2:]]
            assert len(found) == len(wanted)
            for got, one in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, one, rtol=2e-5, atol=2e-6)
