"""``rtkernels.compat.flaggems`` against plain formulas: routing, blocks of experts, wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at

from rtkernels import ArgumentError
from rtkernels.compat.flaggems import instance_norm, moe_align_block_size, moe_align_block_size_triton, topk_softmax

INTEGERS = (torch.int32, torch.int64, torch.uint32)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(("rows", "experts", "k"), [(5, 8, 3), (1, 1, 1), (0, 8, 2), (33, 130, 7)])
def test_topk_softmax(rows: int, experts: int, k: int, dtype: torch.dtype, place: str) -> None:
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(0))
    probabilities, chosen = logits.double().softmax(1).topk(k)
    with running_on(place) as device:
        for renormalize in (False, True):
            for step in (1, 2):  # dense results, and every second column of some
                weights = torch.full((rows, k * step), -1.0, device=device)[:, ::step]
                indices = torch.full((rows, k * step), 77, dtype=torch.int64, device=device).to(dtype)[:, ::step]
                numbers = torch.full((rows, k * step), 77, dtype=torch.int32, device=device)[:, ::step]
                assert topk_softmax(weights, indices, numbers, logits.to(device), renormalize) is None
                wanted = probabilities / probabilities.sum(1, keepdim=True) if renormalize else probabilities
                torch.testing.assert_close(weights.cpu().double(), wanted, rtol=1e-6, atol=1e-7)
                assert indices.cpu().tolist() == chosen.tolist()
                assert numbers.cpu().tolist() == [[j * rows + r for j in range(k)] for r in range(rows)]


def _plain(ids: list[int], block: int, experts: int, rows: int, blocks: int) -> tuple[list[int], list[int], int]:
    """Return the choices of each row, the expert of each block, and the rows in use."""
    sorted_ids, expert_ids = [], []
    for expert in range(experts):
        mine = [i for i, e in enumerate(ids) if e == expert]
        mine += [len(ids)] * (-len(mine) % block)
        sorted_ids += mine
        expert_ids += [expert] * (len(mine) // block)
    used = len(sorted_ids)
    return sorted_ids + [len(ids)] * (rows - used), expert_ids + [-1] * (blocks - len(expert_ids)), used


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize(
    ("tokens", "k", "experts", "block"), [(9, 2, 8, 4), (1, 1, 1, 1), (0, 2, 5, 16), (70, 3, 6, 16), (3, 2, 40, 7)]
)
def test_moe_align_block_size(tokens: int, k: int, experts: int, block: int, dtype: torch.dtype, place: str) -> None:
    ids = torch.randint(experts, (tokens, k), generator=torch.Generator().manual_seed(1))
    ids[ids == 2] = 0  # an expert without tokens
    rows = tokens * k + experts * (block - 1)
    blocks = -(-rows // block)
    wanted, of_blocks, used = _plain(ids.flatten().tolist(), block, experts, rows, blocks)
    expert_map = torch.arange(experts) * 3 - 1
    mapped = [3 * e - 1 if e >= 0 else -1 for e in of_blocks]
    with running_on(place) as device:
        given = ids.to(device).to(dtype)
        for map_dtype in (None, torch.int32, torch.int64):
            local = None if map_dtype is None else expert_map.to(device, map_dtype)
            found = moe_align_block_size(given, block, experts, local)
            assert all(t.dtype == torch.int32 and t.is_contiguous() for t in found)
            assert found[0].tolist() == wanted and found[2].tolist() == [used]
            assert found[1].tolist() == (of_blocks if local is None else mapped)
        padded = moe_align_block_size(given, block, experts, pad_sorted_ids=True)[0]
        assert padded.tolist() == wanted + [tokens * k] * (blocks * block - rows)
        for extra in (0, 5):
            results = [
                torch.full((n,), 77, dtype=torch.int32, device=device) for n in (rows + extra, blocks + extra, 1)
            ]
            assert moe_align_block_size_triton(given, experts, block, *results) is None
            assert [t.tolist() for t in results] == [wanted + [tokens * k] * extra, of_blocks + [-1] * extra, [used]]


def test_choices_of_no_expert_are_left_out() -> None:
    ids = torch.tensor([[0, -1], [7, 1], [1, 0]])
    sorted_ids, expert_ids, used = moe_align_block_size(ids, 2, 2)
    assert (
        sorted_ids.tolist() == [0, 5, 3, 4, 6, 6, 6, 6] and expert_ids.tolist() == [0, 1, -1, -1] and used.item() == 4
    )
    assert ids.tolist() == [[0, -1], [7, 1], [1, 0]]


def test_strided_ids() -> None:
    ids = torch.randint(4, (6, 10), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    for view in (ids[:, ::3], ids.t()[:5], ids[:1].expand(6, 10)):
        for a, b in zip(moe_align_block_size(view, 4, 4), moe_align_block_size(view.clone(), 4, 4), strict=True):
            assert torch.equal(a, b)


def _full(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


W, N, X, IDS = torch.zeros(4, 2), _full(4, 2), torch.zeros(4, 8), _full(4, 2)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (lambda: topk_softmax(W.half(), N, N, X), "topk_weights has dtype float16; expected float32"),
    "no tensor": (lambda: topk_softmax(W, [1], N, X), "topk_indices is a list; expected a torch.Tensor"),
    "indices": (lambda: topk_softmax(W, W, N, X), "topk_indices has dtype float32; expected int32 or int64 or uint32"),
    "numbers": (lambda: topk_softmax(W, N, N[:3], X), r"token_expert_indices has shape \(3, 2\); expected \(4, 2\)"),
    "logits": (lambda: topk_softmax(W, N, N, X[:3]), r"gating_output has shape \(3, 8\); expected \(4, experts\)"),
    "rows": (lambda: topk_softmax(W[0], N, N, X), r"topk_weights has shape \(2,\); expected \[rows, k\]"),
    "k": (lambda: topk_softmax(W, N, N, X[:, :1]), "k is 2; expected"),
    "gradient": (lambda: topk_softmax(W, N, N, X.clone().requires_grad_()), "gating_output requires grad"),
    "block": (lambda: moe_align_block_size(IDS, 0, 8), "block_size is 0; expected an integer of 1 or more"),
    "experts": (lambda: moe_align_block_size(IDS, 4, 2.0), "num_experts is 2.0; expected an integer of 1 or more"),
    "many experts": (lambda: moe_align_block_size(IDS, 4, 5000), "num_experts is 5000; expected 1 to 4096"),
    "ids": (lambda: moe_align_block_size(IDS.bool(), 4, 8), "topk_ids has dtype bool; expected int32"),
    "dimensions": (lambda: moe_align_block_size(IDS[0], 4, 8), r"topk_ids has shape \(2,\); expected \[tokens, k\]"),
    "map": (lambda: moe_align_block_size(IDS, 4, 8, IDS[0]), r"expert_map has shape \(2,\); expected \(8,\)"),
    "map's dtype": (lambda: moe_align_block_size(IDS, 4, 8, W), "expert_map has dtype float32; expected int32"),
    "few rows": (
        lambda: moe_align_block_size_triton(IDS, 8, 4, _full(31), _full(8), _full(1)),
        r"sorted_token_ids has shape \(31,\); expected \(32,\) or more",
    ),
    "few blocks": (
        lambda: moe_align_block_size_triton(IDS, 8, 4, _full(32), _full(7), _full(1)),
        r"expert_ids has shape \(7,\); expected \(8,\) or more",
    ),
    "used": (
        lambda: moe_align_block_size_triton(IDS, 8, 4, _full(32), _full(8), _full()),
        r"num_tokens_post_pad has shape \(\); expected \(1,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        call()


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 4, 3, 6), (1, 3, 33)], ids=str)
@pytest.mark.parametrize("given", ["all", "weight", "none"])
def test_instance_norm(shape: tuple[int, ...], own: bool, given: str, place: str) -> None:
    channels, generator = shape[1], torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator) + 2 for _ in range(2))
    weight, bias, mean, var = torch.rand((4, channels), generator=generator) + 0.5
    weight, bias = weight if given != "none" else None, bias if given == "all" else None
    results = []
    with running_on(place) as device:
        for function in (instance_norm, torch.nn.functional.instance_norm):
            leaves = [t if t is None else t.to(device).clone().requires_grad_() for t in (x, weight, bias)]
            statistics = [mean.to(device).clone(), var.to(device).clone()]
            if function is instance_norm:
                y = function(*leaves, *statistics, own, 0.3, 1e-4)
            else:
                y = function(leaves[0].double(), *(t.double() for t in statistics),
                             *(t if t is None else t.double() for t in leaves[1:]), own, 0.3, 1e-4)  # fmt: skip
                if own:
                    rows = x.double().flatten(2)
                    statistics = [
                        0.7 * mean + 0.3 * rows.mean((0, 2)), 0.7 * var + 0.3 * rows.var(2, unbiased=True).mean(0),
                    ]  # fmt: skip
            y.backward(dy.to(device).to(y.dtype))
            results.append([y.detach(), *(t.grad for t in leaves if t is not None), *statistics])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours.cpu().double(), plain.cpu().double(), rtol=1e-5, atol=1e-5)


def test_instance_norm_refuses_other_arguments() -> None:
    x = torch.randn(2, 3, 4)
    for wrong, named in (
        ({"input": x[0]}, "input"), ({"input": x.double()}, "input"), ({"weight": torch.ones(4)}, "weight"),
        ({"weight": torch.ones(3), "bias": torch.ones(3).bfloat16()}, "bias"),
        ({"use_input_stats": False}, "running_mean"),
        ({"running_mean": torch.ones(3)}, "running_var"), ({"input": x[:, :, :1]}, "input"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=named):
            instance_norm(**{"input": x, **wrong})
