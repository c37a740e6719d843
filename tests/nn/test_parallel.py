"""Two processes on gloo against one: rules for DTensors, a split vocabulary, context and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import WORLD, run_in_processes, whole
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.nn.parallel import exchange_rows, expert_parallel, ring_attention

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _compare(mesh: Any, call: Any, inputs: dict[str, tuple[Tensor, Any]], expected: Any) -> None:
    """Compare results and gradients of a function of DTensors with those of plain tensors; check placements."""
    from torch.distributed.tensor import distribute_tensor

    found = []
    for shared in (False, True):
        leaves = {}
        for name, (value, place) in inputs.items():
            leaf = distribute_tensor(value.clone(), mesh, [place]) if shared else value.clone()
            leaves[name] = leaf.detach().requires_grad_(value.is_floating_point() and name not in ("cos", "sin"))
        result = call(**leaves)
        result = result if isinstance(result, tuple) else (result,)
        if shared:
            assert all(t.placements == (expected,) for t in result), [t.placements for t in result]
        total = sum((whole(t) * _numbers(*t.shape, seed=7)).sum() for t in result if t.requires_grad)
        total.backward()
        found.append(
            [*(whole(t.detach()) for t in result), *(whole(t.grad) for t in leaves.values() if t.requires_grad)]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def check_rules(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    # Sizes that two processes cannot share equally, where the rows are what is split.
    x, up, weight = _numbers(3, 5, 8), _numbers(3, 5, 8, seed=1), _numbers(3, 5, seed=2)
    for dim in (0, 1):
        at = Shard(dim)
        _compare(mesh, rtkernels.glu, {"x": (x, at)}, at)
        _compare(mesh, rtkernels.glu, {"x": (x, at), "up": (up, at), "weight": (weight, at)}, at)
        _compare(mesh, rtkernels.softmax, {"x": (x, at)}, at)
        _compare(mesh, rtkernels.log_softmax, {"x": (x, at), "lengths": (torch.full((3, 5), 6), at)}, at)
    _compare(mesh, rtkernels.glu, {"x": (x, Shard(2)), "up": (up, Shard(2))}, Shard(2))
    given = {"x": (x, Shard(2)), "up": (up, Shard(2)), "weight": (weight, Replicate())}
    _compare(mesh, rtkernels.glu, given, Shard(2))

    ids, table = torch.tensor([[1, 4, 2], [0, 4, 6], [3, 3, 5]]), _numbers(7, 6)
    for of_ids, of_table, result in (
        (Shard(0), Replicate(), Shard(0)), (Shard(1), Replicate(), Shard(1)), (Replicate(), Shard(1), Shard(2)),
    ):  # fmt: skip
        _compare(mesh, rtkernels.embedding, {"ids": (ids, of_ids), "weight": (table, of_table)}, result)

    q, k = _numbers(2, 6, 4, 8), _numbers(2, 6, 2, 8, seed=1)
    angles = {"cos": _numbers(2, 6, 8, seed=2), "sin": _numbers(2, 6, 8, seed=3)}
    for dim, of_tables in ((0, Shard(0)), (1, Shard(1)), (2, Replicate())):
        tables = {name: (value, of_tables) for name, value in angles.items()}
        _compare(mesh, rtkernels.rope, {"x": (q, Shard(dim)), "k": (k, Shard(dim)), **tables}, Shard(dim))
    tables = {name: (value[0], Replicate()) for name, value in angles.items()}
    positions = torch.tensor([3, 1, 2, 0, 5, 4])
    _compare(
        mesh, rtkernels.rope, {"x": (q, Shard(1)), **tables, "positions": (positions, Shard(0))}, Shard(1)
    )  # fmt: skip
    heads_first = {"x": (q.transpose(1, 2).contiguous(), Shard(1)), **tables}
    _compare(mesh, lambda **t: rtkernels.rope(layout="bhsd", **t), heads_first, Shard(1))


def check_losses_of_dtensors(rank: int, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    logits, labels = _numbers(3, 4, 20), torch.randint(0, 20, (3, 4), generator=torch.Generator().manual_seed(0))
    labels[1, 2] = -100
    hidden, weight, bias = _numbers(3, 4, 6), _numbers(20, 6, seed=1), _numbers(20, seed=2)
    places = {
        "rows": (Shard(0), Replicate()), "tokens": (Shard(1), Replicate()), "vocabulary": (Replicate(), Shard(0)),
        "both": (Shard(0), Shard(0)), "whole": (Replicate(), Replicate()),
    }  # fmt: skip
    for name, (of_rows, of_weight) in places.items():
        of_logits = Shard(2) if name in ("vocabulary", "both") else of_rows
        for reduction in ("mean", "sum", "none"):
            options = {"reduction": reduction, "softcap": 5.0, "return_accuracy": True, "return_lse": True}
            plain = [t.clone().requires_grad_() for t in (logits, hidden, weight, bias)]
            shared = [
                distribute_tensor(t.clone(), mesh, [place]).requires_grad_()
                for t, place in zip((logits, hidden, weight, bias), (of_logits, of_rows, *[of_weight] * 2), strict=True)
            ]
            own_labels = labels if reduction == "sum" else distribute_tensor(labels, mesh, [Replicate()])
            found = []
            for (a, b, c, d), targets in ((plain, labels), (shared, own_labels)):
                one = rtkernels.cross_entropy(a, targets, **options)
                two = rtkernels.linear_cross_entropy(b, c, targets, bias=d, **options)
                for loss in (whole(one[0]), whole(two[0])):
                    (loss * torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)).sum().backward()
                found.append([*map(whole, (*one, *two)), *(whole(t.grad) for t in (a, b, c, d))])
            for i, (one, other) in enumerate(zip(*found, strict=True)):
                torch.testing.assert_close(
                    other, one, rtol=1e-5, atol=1e-6, msg=lambda m, n=name, r=reduction, i=i: f"{n} {r} {i}: {m}"
                )


def check_split_vocabulary(rank: int, mesh: Any) -> None:
    group = mesh.get_group()
    hidden, weight, bias = _numbers(3, 5, 8), _numbers(30, 8, seed=1), _numbers(30, seed=2)
    labels = torch.randint(0, 30, (3, 5), generator=torch.Generator().manual_seed(0))
    labels[0, 0] = -100
    for dtype, bounds, options in (
        (torch.float32, (0, 15, 30), {}),
        (torch.float32, (0, 19, 30), {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 0.01, "chunk_rows": 4}),
        (torch.float32, (0, 15, 30), {"reduction": "none", "softcap": 3.0, "chunk_rows": 7}),
        (torch.bfloat16, (0, 15, 30), {"chunk_rows": 6}),
    ):
        first, last = bounds[rank], bounds[rank + 1]
        plain = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight, bias)]
        own = [t.to(dtype, copy=True).requires_grad_() for t in (hidden, weight[first:last], bias[first:last])]
        more = {} if bounds[1] == 15 else {"vocab_start": first, "vocab_size": 30}
        both = {"return_lse": True, "return_accuracy": True, **options}
        wanted = rtkernels.linear_cross_entropy(plain[0], plain[1], labels, bias=plain[2], **both)
        got = rtkernels.linear_cross_entropy(own[0], own[1], labels, bias=own[2], group=group, **more, **both)
        for one in (wanted[0], got[0]):
            (one * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum().backward()
        exact = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        for one, other in zip(wanted, got, strict=True):
            torch.testing.assert_close(other, one, **exact)
        torch.testing.assert_close(own[0].grad, plain[0].grad, **exact)
        for one, other in zip(own[1:], plain[1:], strict=True):
            torch.testing.assert_close(one.grad, other.grad[first:last], **exact)
    with torch.no_grad():  # no gradients, no rows
        assert rtkernels.linear_cross_entropy(hidden[:, :0], weight[:15], labels[:, :0], group=group).item() == 0.0
    with pytest.raises(ArgumentError, match="vocab_start and vocab_size are given without a group"):
        rtkernels.linear_cross_entropy(hidden, weight, labels, vocab_start=0, vocab_size=30)


def check_ring_attention(rank: int, mesh: Any) -> None:
    group, length = mesh.get_group(), 12
    tensors = [_numbers(2, length, heads, 16, seed=i).bfloat16() for i, heads in enumerate((4, 2, 2, 4))]
    quarters = [range(i * length // 4, (i + 1) * length // 4) for i in range(4)]
    for causal, zigzag, softcap in ((False, False, 0.0), (True, False, 0.0), (True, True, 0.0), (True, True, 5.0)):
        mine = [*quarters[rank], *quarters[3 - rank]] if zigzag else [*quarters[2 * rank], *quarters[2 * rank + 1]]
        plain = [t.clone().requires_grad_() for t in tensors[:3]]
        own = [t[:, mine].clone().requires_grad_() for t in tensors[:3]]
        wanted = rtkernels.attention(*plain, causal=causal, softcap=softcap)
        got = ring_attention(*own, group=group, causal=causal, softcap=softcap, zigzag=zigzag)
        torch.testing.assert_close(got, wanted[:, mine], rtol=2e-2, atol=2e-2)
        wanted.backward(tensors[3])
        got.backward(tensors[3][:, mine])
        for one, other in zip(own, plain, strict=True):
            torch.testing.assert_close(one.grad, other.grad[:, mine], rtol=3e-2, atol=3e-2)
            assert float((one.grad - other.grad[:, mine]).float().norm() / other.grad[:, mine].float().norm()) < 1e-2
    with pytest.raises(ArgumentError, match="q has length 3; expected an even one for zigzag"):
        ring_attention(*(t[:, :3] for t in tensors[:3]), group=group, zigzag=True)
    with pytest.raises(ArgumentError, match="zigzag is None; expected False if rank r"):
        ring_attention(*tensors[:3], group=group, causal=True)


def _products(matrices: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the experts' outputs for rows sorted by expert: one matrix each."""

    def compute(rows: Tensor, ends: Tensor) -> Tensor:
        parts = torch.tensor_split(rows[: ends[-1]], ends[:-1].tolist())
        results = [torch.tanh(part @ matrix) for part, matrix in zip(parts, matrices, strict=True)]
        return torch.cat([*results, rows.new_zeros(len(rows) - int(ends[-1]), matrices.shape[-1])])

    return compute


def check_experts(rank: int, mesh: Any) -> None:
    group, tokens, width, count = mesh.get_group(), 14, 8, 4
    x, weights = _numbers(tokens, width), _numbers(tokens, 2, seed=1).softmax(-1)
    matrices = _numbers(count, width, width, seed=2)
    g = _numbers(tokens, width, seed=3)
    chosen = torch.randint(0, count, (tokens, 2), generator=torch.Generator().manual_seed(4))
    chosen[3, 1] = -1  # no choice
    for experts in (chosen, torch.zeros_like(chosen)):  # of the second, one process gets all tokens
        plain = [t.clone().requires_grad_() for t in (x, weights, matrices)]
        index = rtkernels.moe_index(experts, count)
        rows = _products(plain[2])(rtkernels.moe_permute(plain[0], index), index.offsets[1:])
        wanted = rtkernels.moe_unpermute(rows, index, probs=plain[1], dense_probs=False)
        wanted.backward(g)
        mine = slice(rank * 5, 5) if rank == 0 else slice(5, tokens)  # other numbers of tokens
        half = slice(rank * count // WORLD, (rank + 1) * count // WORLD)
        own = [t.clone().requires_grad_() for t in (x[mine], weights[mine], matrices[half])]
        got = expert_parallel(own[0], experts[mine], own[1], _products(own[2]), num_experts=count, group=group)
        torch.testing.assert_close(got, wanted[mine], rtol=1e-5, atol=1e-6)
        got.backward(g[mine])
        for one, other, part in zip(own, plain, (mine, mine, half), strict=True):
            torch.testing.assert_close(one.grad, other.grad[part], rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match="num_experts is 3; expected a multiple of 2"):
        expert_parallel(x, chosen, weights, _products(matrices), num_experts=3, group=group)
    with pytest.raises(ArgumentError, match=r"send is \[1, 2\]"):
        exchange_rows(x, [1, 2], [1, 2], group=group)


CHECKS = (check_rules, check_losses_of_dtensors, check_split_vocabulary, check_ring_attention, check_experts)


@pytest.mark.one_in(1000)
def test_two_processes_give_what_one_gives(tmp_path: Any) -> None:
    run_in_processes(CHECKS, tmp_path)


@pytest.mark.gpu
def test_a_group_of_one_process_on_a_gpu(tmp_path: Any) -> None:
    """The kernels behind a split vocabulary, a ring and experts, with sizes that no tile divides."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        hidden, weight = (t.cuda().bfloat16() for t in (_numbers(3, 77, 136), _numbers(1003, 136, seed=1)))
        labels = torch.randint(0, 1003, (3, 77), generator=torch.Generator().manual_seed(0)).cuda()
        found = []
        for options in ({}, {"group": group, "chunk_rows": 50}):
            leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
            loss = rtkernels.linear_cross_entropy(leaves[0], leaves[1], labels, **options)
            loss.backward()
            found.append([loss.detach(), *(t.grad for t in leaves)])
        for one, other in zip(*found, strict=True):
            assert float((one - other).float().norm() / one.float().norm()) < 1e-2
        q, k, v = (_numbers(2, 75, heads, 64, seed=heads).cuda().bfloat16() for heads in (8, 2, 2))
        found = []
        for call in (rtkernels.attention, lambda *t, **o: ring_attention(*t, group=group, zigzag=False, **o)):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = call(*leaves, causal=True)
            out.backward(q)
            found.append([out.detach(), *(t.grad for t in leaves)])
        for one, other in zip(*found, strict=True):
            assert float((one - other).float().norm() / one.float().norm()) < 1e-2
        x, weights, matrices = (t.cuda() for t in (_numbers(33, 24), torch.rand(33, 2), _numbers(4, 24, 24)))
        experts = torch.randint(0, 4, (33, 2), generator=torch.Generator().manual_seed(0)).cuda()
        got = expert_parallel(x, experts, weights, _products(matrices), num_experts=4, group=group)
        wanted = (torch.tanh(torch.einsum("th,tkhi->tki", x, matrices[experts])) * weights.unsqueeze(-1)).sum(1)
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    finally:
        dist.destroy_process_group()
