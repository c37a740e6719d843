"""States in host memory: the updates of an optimizer that keeps them on the device, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at
from torch.nn import Parameter

from rtkernels.errors import ArgumentError
from rtkernels.optim import AdamW, Lion, Muon, offload

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Several chunks, several in a chunk, no multiple of a block, not contiguous, smaller than what is offloaded.
SHAPES = ((130, 96), (4097,), (4096,), (70, 64), (9000,), (100,))
CASES = (
    (AdamW, {}), (AdamW, {"state": "8bit"}), (AdamW, {"state": "4bit"}), (AdamW, {"state": "fp8", "master": False}),
    (AdamW, {"state": "8bit", "master": False, "stochastic": True, "seed": 7}),
    (AdamW, {"maximize": True, "betas": (0.8, 0.9)}),
    (Lion, {}), (Lion, {"state": "8bit"}), (Lion, {"state": "bf16", "master": False, "stochastic": True}),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_ELEMENTS", 4000)
    monkeypatch.setattr(offload, "CHUNK_BYTES", 60000)


def parameters(device: str, dtype: torch.dtype) -> list[Parameter]:
    g = torch.Generator().manual_seed(3)
    leaves = [Parameter(torch.randn(shape, generator=g).to(device, dtype)) for shape in SHAPES]
    leaves[3] = Parameter(leaves[3].detach().t().contiguous().t())
    return leaves


def set_grads(params: list[Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=g))


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def assert_equal(params: list[Parameter], optimizer, others: list[Parameter], reference) -> None:
    for p, q in zip(params, others, strict=True):
        assert_same_bits(p.detach(), q.detach())
        for name, value in reference.state[q].items():
            if isinstance(value, torch.Tensor):
                assert_same_bits(optimizer.state[p][name].cpu(), value.cpu(), name)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (B16, F32), ids=str)
@pytest.mark.parametrize(("make", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_same_bits_as_on_the_device(place: str, make: type, options: dict, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        ours, theirs = parameters(device, dtype), parameters(device, dtype)
        mine, reference = make(ours, lr=1e-2, offload=True, **options), make(theirs, lr=1e-2, **options)
        for step in range(3):
            for params in (ours, theirs):
                set_grads(params, step)
                if step == 1:
                    params[1].grad = None
            mine.step()
            reference.step()
        settle(device)
        assert_equal(ours, mine, theirs, reference)
        if device == "cuda":
            for i, p in enumerate(ours):
                kept = mine.state[p][next(name for name in ("exp_avg", "state1") if name in mine.state[p])]
                assert kept.is_pinned() == (i < 5) and kept.is_cuda == (i == 5) and mine.state[p]["step"].is_cuda


@at("cpu", "sm_90", "cuda")
def test_skipped_steps_and_rate_as_a_tensor(place: str) -> None:
    with running_on(place) as device:
        ours, theirs = parameters(device, F16), parameters(device, F16)
        rate = torch.tensor(1e-2, device=device)
        optimizers = [AdamW(ours, lr=rate, offload=True), AdamW(theirs, lr=rate)]
        for step in range(3):
            for params, optimizer in zip((ours, theirs), optimizers, strict=True):
                set_grads(params, step)
                optimizer.grad_scale = torch.tensor(128.0, device=device)
                optimizer.found_inf = torch.tensor(float(step == 1), device=device)
                optimizer.step()
        settle(device)
        assert_equal(ours, optimizers[0], theirs, optimizers[1])
        assert all(optimizers[0].state[p]["step"].item() == 2 for p in ours)


@at("cpu", "cuda")
@pytest.mark.parametrize("state", ("fp32", "8bit", "4bit"))
@pytest.mark.parametrize(("before", "after"), ((True, True), (False, True), (True, False)))
def test_states_are_saved_and_loaded(place: str, state: str, before: bool, after: bool) -> None:
    with running_on(place) as device:
        ours = parameters(device, B16)
        first = AdamW(ours, state=state, offload=before)
        set_grads(ours, 0)
        first.step()
        saved = copy.deepcopy(first.state_dict())
        others = [Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in ours]
        second = AdamW(others, offload=after)
        second.load_state_dict(saved)
        assert second.param_groups[0]["offload"] is after and second.param_groups[0]["state"] == state
        for params, optimizer in ((ours, first), (others, second)):
            set_grads(params, 1)
            optimizer.step()
        settle(device)
        assert_equal(others, second, ours, first)
        if device == "cuda":
            assert second.state[others[0]]["master"].is_pinned() == after
        exported = first.export_state_dict("torch")["state"][0]["exp_avg"]
        assert exported.shape == ours[0].shape and exported.dtype == F32


@at("cpu", "cuda")
def test_one_group_only(place: str) -> None:
    with running_on(place) as device:
        ours, theirs = parameters(device, B16), parameters(device, B16)
        mine = AdamW([{"params": ours[:2], "offload": True}, {"params": ours[2:]}])
        reference = AdamW([{"params": theirs[:2]}, {"params": theirs[2:]}])
        for params, optimizer in ((ours, mine), (theirs, reference)):
            set_grads(params, 0)
            optimizer.step()
        settle(device)
        assert_equal(ours, mine, theirs, reference)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="offload is 1; expected True or False"):
        AdamW([Parameter(torch.ones(3))], offload=1)
    with pytest.raises(ArgumentError, match="offload is True, and use_muon is True"):
        Muon([{"params": [Parameter(torch.ones(3, 4))], "offload": True}])
    p = Parameter(torch.ones(70, 64))
    optimizer = Lion([p], offload=True)
    p.grad = torch.ones(64, 70).t()
    with pytest.raises(ArgumentError, match=r"grads\[0\] has strides"):
        optimizer.step()


@pytest.mark.gpu
def test_a_step_in_a_graph_is_refused() -> None:
    p = Parameter(torch.ones(4096, device="cuda"))
    optimizer = AdamW([p], offload=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match="a CUDA graph is being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
