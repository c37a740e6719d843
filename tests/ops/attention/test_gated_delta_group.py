"""gated_delta_rule with a sequence split over processes: against one process, and the kernels against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ops.attention.test_gated_delta_rule import BF16, NAMES, exact, inputs, random
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.places import at
from support.processes import joined, spawn
from torch import Tensor

from rtkernels import gated_delta_rule
from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.gated_delta_rule_parallel import CHAIN

needs_gloo = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")

# ---- states between parts -------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("sizes", ((2, 5, 2, 16, 24), (1, 4, 1, 96, 8), (3, 2, 1, 8, 8), (1, 1, 2, 8, 8)), ids=str)
def test_the_chain(sizes: tuple[int, ...], place: str) -> None:
    """In both directions; the first and the last state stay as they are, and a state of zeros does not meet NaN."""
    transitions, given = random(*sizes[:-1], sizes[-2], seed=1) / 8, random(*sizes, seed=2)
    for reverse in (False, True):
        states = given.double()
        for i in range(sizes[1] - 2, 0, -1) if reverse else range(1, sizes[1] - 1):
            by = transitions[:, i].double()
            states[:, i] += by.mT @ states[:, i + 1] if reverse else by @ states[:, i - 1]
        with running_on(place) as device:
            found = given.clone().to(device)
            CHAIN.call(transitions.to(device), found, reverse)
            torch.testing.assert_close(found.cpu().double(), states, rtol=1e-5, atol=1e-5)
            if sizes[1] > 2:
                zeros = torch.zeros_like(found)
                zeros[..., 1:] = found[..., 1:]
                CHAIN.call(torch.full_like(transitions, torch.nan).to(device), zeros.fill_(0.0), reverse)
                assert not zeros.any()


def test_errors_of_the_chain() -> None:
    states = torch.zeros(1, 3, 2, 8, 16)
    for transitions, given, message in (
        (states, states, r"transitions has shape .*16\); expected .*8, 8\)"),
        (states, states[0], r"states has shape .*; expected \[sequences, parts, heads, width of k, width of v\]"),
        (torch.zeros(1, 3, 2, 12, 12), torch.zeros(1, 3, 2, 12, 16), "expected a multiple of 8 as the width of k"),
    ):
        with pytest.raises(ArgumentError, match=message):
            CHAIN.call(transitions, given, False)


# ---- several processes ----------------------------------------------------------------------------------------------

RULE = ("q", "k", "v", "g", "beta", "initial_state")


def _given(tokens: int, key_heads: int, heads: int, channels: bool = False, seed: int = 0) -> dict[str, Tensor]:
    q, k, v = (
        random(2, tokens, count, width, seed=seed + i, dtype=BF16)
        for i, (count, width) in enumerate(((key_heads, 16), (key_heads, 16), (heads, 24)))
    )
    g = -0.1 * random(2, tokens, heads, *[16] * channels, seed=seed + 3).abs()
    beta, state = random(2, tokens, heads, seed=seed + 4).sigmoid(), random(2, heads, 16, 24, seed=seed + 5)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}


def _raw(given: dict[str, Tensor], heads: int, channels: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    width = [16] * channels
    gates = {"A_log": random(heads, seed=8), "dt_bias": random(heads, *width, seed=9)}
    raw = {"g": random(*given["g"].shape, seed=10).to(BF16), "beta": random(*given["beta"].shape, seed=11)}
    options = {"lower_bound": -5.0} if channels else {}
    return given | raw | gates, {**options, "beta_sigmoid": True, "beta_scale": 2.0}


def _calls(tokens: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
    yield _given(tokens, 1, 2), {"l2norm": True, "return_state": True}
    given = _given(tokens, 2, 2, seed=20)
    yield {name: given[name] for name in ("q", "k", "v", "beta")}, {"g": None, "scale": 0.5, "l2norm": True}
    raw, options = _raw(_given(tokens, 1, 3, seed=40), 3, False)
    raw["initial_state"] = raw["initial_state"].mT.contiguous()
    yield raw, {**options, "l2norm": True, "return_state": True, "state_layout": "vk"}
    raw, options = _raw(_given(tokens, 1, 2, True, seed=60), 2, True)
    yield raw, {**options, "l2norm": True, "return_state": True}


def _differentiated(
    given: dict[str, Tensor], options: dict[str, Any], dout: Tensor, dfinal: Tensor
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    found = gated_delta_rule(**leaves, **options)
    found = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(found, [dout, dfinal][: len(found)])
    return tuple(t.detach() for t in found), {name: t.grad for name, t in leaves.items()}


def _near(got: Tensor, want: Tensor, what: str) -> None:
    """Results of 16 bits may be rounded to the neighbour."""
    assert got.shape == want.shape and got.dtype == want.dtype, what
    largest = max(want.abs().max().item(), 1e-30) if want.numel() else 1.0
    error = (got.double() - want.double()).abs().max().item() if want.numel() else 0.0
    assert error <= largest * (2e-5 if want.dtype == torch.float32 else 2.0**-8), f"{what}: {error}, {largest}"


def _compare(rank: int, rows: list[list[int]], group: Any, zigzag: bool) -> None:
    """Compare with one process; `rows`: of each member."""
    tokens, own = sum(map(len, rows)), rows[rank]
    for number, (given, options) in enumerate(_calls(tokens)):
        dout = random(2, tokens, *given["v"].shape[2:], seed=80, dtype=BF16)
        shape = given["initial_state"].shape if "initial_state" in given else (1,)
        dfinals = [random(*shape, seed=90 + i) for i in range(len(rows))]
        wanted, gradients = _differentiated(given, options, dout, torch.stack(dfinals).sum(0))
        mine = {name: t[:, own] if t.shape[:2] == (2, tokens) else t for name, t in given.items()}
        if rank and number:
            mine.pop("initial_state", None)
        elif rank and "initial_state" in mine:  # what it holds does not matter
            mine["initial_state"] = torch.full_like(mine["initial_state"], torch.nan)
        options = {**options, "group": group, "zigzag": zigzag}
        results, found = _differentiated(mine, options, dout[:, own], dfinals[rank])
        where = f"call {number} of rank {rank} of {len(rows)}, zigzag={zigzag}"
        _near(results[0], wanted[0][:, own], f"out, {where}")
        if len(results) > 1:
            _near(results[1], wanted[1], f"state, {where}")
        for name, want in gradients.items():
            if want.shape[:2] == (2, tokens):
                _near(found[name], want[:, own], f"gradient of {name}, {where}")
                continue
            total = found[name].float() if name in found else torch.zeros(want.shape)
            assert name != "initial_state" or not rank or not total.any(), where
            dist.all_reduce(total, group=group)
            _near(total, want, f"gradient of {name}, {where}")
        with torch.no_grad():
            for _ in range(2):
                again = gated_delta_rule(**mine, **options)
                assert torch.equal(again[0] if isinstance(again, tuple) else again, results[0])


def _check_both_orders(rank: int, world: int) -> None:
    group = dist.group.WORLD
    lengths = {1: [70], 2: [66, 83], 4: [70, 0, 1, 65]}[world]
    ends = [0, *accumulate(lengths)]
    _compare(rank, [[*range(*pair)] for pair in pairwise(ends)], group, False)
    part = {1: 67, 2: 35, 4: 19}[world]
    parts = [[*range(part * i, part * i + part)] for i in range(2 * world)]
    _compare(rank, [parts[r] + parts[-1 - r] for r in range(world)], group, True)


def _check_unused_results(rank: int, world: int) -> None:
    """Gradients if some members' outputs are unused, or all members' states."""
    group, length = dist.group.WORLD, 10
    given, own = _given(length * world, 1, 1), slice(length * rank, length * rank + length)
    weight = random(2, 1, 16, 24, seed=7)
    for uses_state in (False, True):
        leaves = [{n: t.clone().requires_grad_() for n, t in given.items()} for _ in range(2)]
        out, final = gated_delta_rule(**leaves[0], return_state=True)
        loss = (final * weight).sum() if uses_state else out[:, :length].float().square().sum()
        loss.backward()
        mine = {n: t if n == "initial_state" else t[:, own] for n, t in leaves[1].items()}
        out, final = gated_delta_rule(**mine, return_state=True, group=group, zigzag=False)
        if uses_state:
            ((final * weight).sum() * (1.0 if rank == world - 1 else 0.0)).backward()
        else:
            (out.float().square().sum() * (1.0 if rank == 0 else 0.0)).backward()
        for name, leaf in leaves[1].items():
            total = leaf.grad.float()
            dist.all_reduce(total, group=group)
            _near(total.to(leaf.dtype), leaves[0][name].grad, f"gradient of {name}, uses_state={uses_state}")


def _check_errors(rank: int, world: int) -> None:
    given = _given(6, 1, 2)
    call = {**given, "group": dist.group.WORLD}
    cu = torch.tensor([0, 6], dtype=torch.int32)
    odd = {name: t if name == "initial_state" else t[:, :5] for name, t in call.items() if name != "group"}
    for options, message in (
        (call, "zigzag is None; expected False if rank r"),
        ({**call, "zigzag": 1}, "zigzag is 1; expected False if rank r"),
        ({**given, "zigzag": True}, "zigzag is True and group is None"),
        ({**call, "zigzag": False, "cu_seqlens": cu}, "group and cu_seqlens are given; expected one of them"),
        ({**odd, "group": call["group"], "zigzag": True}, r"q has shape \(2, 5, 1, 16\); .* an even length for zigzag"),
        ({**call, "q": given["q"][0], "zigzag": False}, r"q has shape \(6, 1, 16\); expected \[batch, length"),
        ({**call, "zigzag": False, "initial_state": torch.zeros(1, 2, 16, 24)}, "initial_state has shape"),
        ({**call, "zigzag": False, "beta": given["beta"][:, :5]}, "beta has shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            gated_delta_rule(**options)


CHECKS = (_check_both_orders, _check_unused_results, _check_errors)


def _joined(rank: int, world: int, path: str) -> None:
    with joined(rank, path, world):
        for check in CHECKS:
            check(rank, world)


@needs_gloo
@pytest.mark.one_in(1000)
@pytest.mark.parametrize("world", (2, 4))
def test_several_processes_give_what_one_gives(world: int, tmp_path: Path) -> None:
    spawn(_joined, world, str(tmp_path), world=world)


@needs_gloo
def test_a_world_of_one_gives_what_no_group_gives(tmp_path: Path) -> None:
    with joined(0, tmp_path, 1):
        for check in CHECKS:
            check(0, 1)


# ---- kernels: one process that has both parts of a sequence ---------------------------------------------------------


@needs_gloo
@at("cpu", "sm_80", "sm_90", "cuda")
def test_parts_of_no_rows(place: str, tmp_path: Path) -> None:
    with joined(0, tmp_path, 1, "nccl" if place == "cuda" else "gloo"), running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device).requires_grad_() for t in inputs(0, 1, 2, 16, 24, 1, BF16))
        for zigzag in (False, True):
            rows = (t.unsqueeze(0) for t in (q, k, v, g, beta))
            options = {"return_state": True, "group": dist.group.WORLD, "zigzag": zigzag}
            out, final = gated_delta_rule(*rows, initial_state=state, **options)
            gradients = torch.autograd.grad((out, final), (q, g, state), (out.detach(), 2 * state.detach()))
            assert out.shape == (1, 0, 2, 24) and gradients[0].shape == q.shape and gradients[1].shape == g.shape
            assert torch.equal(final, state) and torch.equal(gradients[2], 2 * state)


@needs_gloo
@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("channels", (False, True))
def test_two_parts_of_one_process(channels: bool, place: str, tmp_path: Path) -> None:
    """In zigzag order the only member has them one after the other. Neither is a number of whole chunks."""
    tokens, heads = 140, 1 if channels else 2
    tensors = inputs(tokens, 1, heads, 16, 40, 1, BF16)
    if channels:
        tensors[3] = -0.1 * random(tokens, 1, 16, seed=3).abs()
    results = []
    with joined(0, tmp_path, 1, "nccl" if place == "cuda" else "gloo"), running_on(place) as device:

        def ours(*values: Tensor) -> tuple[Tensor, Tensor]:
            *rows, states = values
            options = {"return_state": True, "l2norm": True, "group": dist.group.WORLD, "zigzag": True}
            out, final = gated_delta_rule(*(t.unsqueeze(0) for t in rows), initial_state=states, **options)
            return out.squeeze(0), final

        for function in (ours, lambda *values: exact(*values, [0, tokens], True)):
            leaves = [(t if function is ours else t.double()).to(device).requires_grad_() for t in tensors]
            with poisoned():
                found = function(*leaves)
                incoming = [random(*t.shape, seed=20 + i).to(BF16).to(t) for i, t in enumerate(found)]
                results.append((*(t.detach() for t in found), *torch.autograd.grad(found, leaves, incoming)))
    for what, got, want in zip(NAMES, *results, strict=True):
        assert_near(got, want, 2.0**-6, what)
