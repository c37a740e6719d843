"""merge_attention: parts of keys give what all keys give, with gradients; a ring of two processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.attention_exact import assert_near, exact_attention
from support.compare import running_on
from support.places import at
from support.processes import joined, spawn
from torch import Tensor

from rtkernels import ArgumentError, attention, emulate, merge_attention

BF16 = torch.bfloat16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("layout", ["blhd", "bhld"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_parts_give_the_whole(layout: str, dtype: torch.dtype, place: str) -> None:
    with running_on(place) as device:
        q, k, v = (
            random(2, 5, 4, 16).to(BF16),
            random(2, 12, 2, 16, seed=1).to(BF16),
            random(2, 12, 2, 16, seed=2).to(BF16),
        )
        outs, lses = zip(*(exact_attention(q, k[:, i : i + 4], v[:, i : i + 4]) for i in (0, 4, 8)), strict=True)
        if layout == "bhld":
            outs = tuple(out.transpose(1, 2).contiguous() for out in outs)
        outs = [out.to(dtype).to(device).requires_grad_() for out in outs]
        lses = [lse.float().to(device).requires_grad_() for lse in lses]
        out, lse = merge_attention(outs, lses, layout=layout)
        exact, exact_lse = exact_attention(q, k, v)
        assert out.dtype == dtype and lse.dtype == torch.float32
        got = out.transpose(1, 2) if layout == "bhld" else out
        assert_near(got, exact, 2.0**-6 if dtype == BF16 else 1e-5, "out")
        assert_near(lse, exact_lse, 1e-5, "lse")

        g, gl = random(*out.shape, seed=5).to(dtype).to(device), random(*lse.shape, seed=6).to(device)
        grads = torch.autograd.grad((out, lse), (*outs, *lses), (g, gl))
        plain = [t.detach().double().requires_grad_() for t in (*outs, *lses)]
        total = torch.logsumexp(torch.stack(plain[3:]), 0)
        weights = [(part - total).exp() for part in plain[3:]]
        if layout == "blhd":
            weights = [w.transpose(1, 2) for w in weights]
        merged = sum(w.unsqueeze(-1) * part for w, part in zip(weights, plain[:3], strict=True))
        wanted = torch.autograd.grad((merged, total), plain, (g.double(), gl.double()))
        for grad, exact in zip(grads, wanted, strict=True):
            assert_near(grad, exact, 2.0**-6 if dtype == BF16 else 1e-4, "gradient")


@at("cpu", "sm_80", "cuda")
def test_parts_that_saw_nothing(place: str) -> None:
    with running_on(place) as device:
        a = torch.full((1, 2, 1, 8), float("nan"), device=device)
        b = torch.ones(1, 2, 1, 8, device=device)
        lse_a = torch.tensor([[[float("-inf"), float("-inf")]]], device=device)
        lse_b = torch.tensor([[[0.5, float("-inf")]]], device=device)
        out, lse = merge_attention((a, b), (lse_a, lse_b))
        assert torch.equal(out[0, :, 0, 0].cpu(), torch.tensor([1.0, 0.0]))
        assert torch.equal(lse, lse_b)


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_90"):
        out, lse = random(1, 3, 2, 8).requires_grad_(), random(1, 2, 3).requires_grad_()
        merge_attention((out, out), (lse, lse))[0].sum().backward()


def test_packed_parts_and_float32() -> None:
    outs, lses = [random(6, 2, 8, seed=i).to(BF16) for i in range(2)], [random(2, 6, seed=i + 4) for i in range(2)]
    out, lse = merge_attention(outs, lses, out_dtype=torch.float32)
    assert out.shape == (6, 2, 8) and out.dtype == torch.float32 and lse.shape == (2, 6)


def test_bad_arguments() -> None:
    out, lse = random(1, 3, 2, 8), random(1, 2, 3)
    with pytest.raises(ArgumentError, match="sequences of equally many"):
        merge_attention((out,), (lse, lse))
    with pytest.raises(ArgumentError, match="lses has shape"):
        merge_attention((out, out), (lse, lse[:, :1]))
    with pytest.raises(ArgumentError, match="lse_a has shape"):
        merge_attention((out, out), (lse.transpose(1, 2), lse.transpose(1, 2)))
    with pytest.raises(ArgumentError, match=r"out_dtype is torch\.float16"):
        merge_attention((out, out), (lse, lse), out_dtype=torch.float16)


# ---- context parallelism --------------------------------------------------------------------------------------------


def _ring(rank: int, world: int, results: str) -> None:
    """Each process has a part of q, k and v; keys and values rotate, and partial results are merged on arrival."""
    with joined(rank, results, world):
        whole = (random(1, 8, h, 16, seed=i).to(BF16) for i, h in enumerate((4, 2, 2)))
        q, k, v = (t.chunk(world, 1)[rank].contiguous() for t in whole)
        outs, lses = [], []
        for step in range(world):
            owner = (rank - step) % world  # the rank that owns these keys
            if owner <= rank:  # causal: later keys are not seen
                out, lse = attention(q, k, v, causal=owner == rank, return_lse=True)
                outs.append(out)
                lses.append(lse)
            received = [torch.empty_like(t) for t in (k, v)]
            work = [dist.isend(t, (rank + 1) % world) for t in (k, v)]
            for t in received:
                dist.recv(t, (rank - 1) % world)
            for w in work:
                w.wait()
            k, v = received
        out, lse = merge_attention(outs, lses)
        torch.save((out, lse), f"{results}/{rank}.pt")
        dist.barrier()


def test_ring_of_two_processes(tmp_path) -> None:
    spawn(_ring, 2, str(tmp_path))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    q, k, v = (random(1, 8, h, 16, seed=i).to(BF16) for i, h in enumerate((4, 2, 2)))
    exact, exact_lse = exact_attention(q, k, v, causal=True)
    assert_near(torch.cat([out for out, _ in parts], 1), exact, 2.0**-6, "out")
    assert_near(torch.cat([lse for _, lse in parts], 2), exact_lse, 1e-4, "lse")
