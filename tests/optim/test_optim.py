"""The optimizer against torch's, step by step, and clipping of gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import weakref

import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.places import DTYPES, ORDERS, at, emulated, short
from torch import Tensor
from torch.nn import Parameter

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.optim import AdamW, Lion, Muon, clip_grad_norm_

SHAPES = ((33, 7), (4100,), (), (0, 3), (64, 80), (2, 3, 4))
OPTIONS = (
    {},
    {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    {"lr": 0.01, "betas": (0.0, 0.5), "weight_decay": 0.0, "maximize": True},
)


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    g = torch.Generator().manual_seed(3)
    leaves = [Parameter(torch.randn(shape, generator=g).to(device, dtype)) for shape in SHAPES]
    leaves[4] = Parameter(leaves[4].detach().t().contiguous().t())  # dense, but not contiguous
    flat = torch.zeros(100, device=device, dtype=dtype)
    leaves.append(Parameter(flat[1:70]))  # unaligned
    with torch.no_grad():
        leaves[-1].copy_(torch.randn(69, generator=g))
    return leaves


def set_grads(params: list[Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = (torch.randn(p.shape, generator=g) * 10.0 ** (step % 3 - 1)).to(p.device, p.dtype)
        p.grad = torch.empty_like(p).copy_(grad)


def same(ours: Tensor, theirs: Tensor, what: str, scale: Tensor | float = 0.0, c: float = 8.0) -> None:
    """Compare fp32 results that may differ by a few roundings of the value, or of its terms."""
    exact = theirs.detach().double()
    assert_close(ours.detach(), exact, scale=exact.abs() + scale, c=c, what=what)


class Largest:
    """The largest gradient of each element so far: roundings of its moments are relative to it."""

    def __init__(self, params: list[Parameter]) -> None:
        self.seen = [torch.zeros(p.shape, device=p.device) for p in params]

    def update(self, params: list[Parameter]) -> None:
        self.seen = [t if p.grad is None else t.maximum(p.grad.abs()) for t, p in zip(self.seen, params, strict=True)]

    def check(self, i: int, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        same(mine["exp_avg"], theirs["exp_avg"], f"exp_avg {i}", self.seen[i])
        same(mine["exp_avg_sq"], theirs["exp_avg_sq"], f"exp_avg_sq {i}", self.seen[i].square())
        assert float(mine["step"]) == float(theirs["step"])


# ---- against torch --------------------------------------------------------------------------------------------------


@at()
@pytest.mark.parametrize("options", OPTIONS, ids=("defaults", "other", "maximize"))
def test_fp32_step_by_step(place: str, options: dict) -> None:
    with running_on(place) as device:
        ours, theirs = parameters(device), parameters(device)
        mine, reference = AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
        largest = Largest(ours)
        for step in range(5):
            for params in (ours, theirs):
                set_grads(params, step)
            if step == 2:  # a parameter without a gradient keeps its state and its step count
                ours[1].grad = theirs[1].grad = None
            assert mine.step() is None
            reference.step()
            largest.update(ours)
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                same(p, q, f"parameter {i} after step {step}", 1.0)
                largest.check(i, mine.state[p], reference.state[q])


@at()
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
def test_master_weights_step_by_step(place: str, dtype: torch.dtype) -> None:
    """As torch on fp32 copies of the parameters with gradients cast to fp32; the parameters are the rounded copies."""
    options = OPTIONS[1]
    with running_on(place) as device:
        ours = parameters(device, dtype)
        theirs = [Parameter(p.detach().float()) for p in ours]
        mine, reference = AdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
        largest = Largest(theirs)
        for step in range(4):
            set_grads(ours, step)
            for p, q in zip(ours, theirs, strict=True):
                q.grad = p.grad.float()
            mine.step()
            reference.step()
            largest.update(theirs)
            for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
                state = mine.state[p]
                assert {state[name].dtype for name in ("master", "exp_avg", "exp_avg_sq")} == {torch.float32}
                same(state["master"], q, f"master {i} after step {step}", 1.0)
                assert_same_bits(p.detach(), state["master"].to(dtype), f"parameter {i}")
                largest.check(i, state, reference.state[q])


@at("cpu", "sm_90", "cuda")
def test_small_updates_are_not_lost(place: str) -> None:
    with running_on(place) as device:
        p = Parameter(torch.ones(8, device=device, dtype=torch.bfloat16))
        optimizer = AdamW([p], lr=1e-4, weight_decay=0.0)
        for _ in range(60):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert_close(p.detach(), torch.full((8,), 1 - 60e-4, dtype=torch.float64), c=1.01)


@at()
def test_mixed_dtypes_and_groups(place: str) -> None:
    with running_on(place) as device:
        ours = [
            Parameter(torch.ones(n, device=device).to(d)) for n, d in ((5, DTYPES[0]), (6, DTYPES[2]), (7, DTYPES[1]))
        ]
        optimizer = AdamW([{"params": ours[:2], "lr": 0.5, "weight_decay": 0.0}, {"params": ours[2:]}], lr=0.25)
        set_grads(ours, 0)
        for p in ours:
            p.grad = p.grad.abs() + 1
        optimizer.step()
    for p, lr, decay in zip(ours, (0.5, 0.5, 0.25), (0.0, 0.0, 0.01), strict=True):
        torch.testing.assert_close(
            p.detach().float(), torch.full_like(p, 1 - lr * decay - lr).float(), atol=4e-3, rtol=0
        )


@at("cpu", "sm_80", "cuda")
def test_rate_as_a_tensor(place: str) -> None:
    with running_on(place) as device:
        lr = torch.tensor(0.5, device=device)
        p, q = (Parameter(torch.ones(9, device=device)) for _ in range(2))
        mine, other = AdamW([p], lr=lr), AdamW([q], lr=0.5)
        for rate in (0.5, 0.125):
            lr.fill_(rate)
            other.param_groups[0]["lr"] = rate
            for one in (p, q):
                one.grad = torch.ones(9, device=device)
            mine.step()
            other.step()
    assert_same_bits(p.detach(), q.detach())


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_same_bits_in_every_order(order: str | int) -> None:
    results = []
    for which in ("forward", order):
        params = parameters("cpu", torch.bfloat16)
        with rtkernels.emulate("sm_80", which):
            optimizer = AdamW(params)
            for step in range(2):
                set_grads(params, step)
                optimizer.step()
        results.append([p.detach() for p in params] + [optimizer.state[p]["master"] for p in params])
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)


# ---- gradient scaling -----------------------------------------------------------------------------------------------


@at()
def test_scaled_gradients_and_skipped_steps(place: str) -> None:
    """What torch.amp.GradScaler passes: the scale, and whether an infinity was found."""
    with running_on(place) as device:
        p, q = (Parameter(torch.ones(5000, device=device).bfloat16()) for _ in range(2))
        mine, plain = AdamW([p]), AdamW([q])
        mine.grad_scale = torch.tensor(8.0, device=device)
        for step, found in enumerate((0.0, 1.0, 0.0)):
            set_grads([q], step)
            p.grad = q.grad * 8
            mine.found_inf = torch.tensor(found, device=device)
            before = [p.detach().clone()] + [t.clone() for t in mine.state[p].values()]
            if found:
                p.grad.fill_(math.inf)
            mine.step()
            if found:
                for old, new in zip(before, [p.detach(), *mine.state[p].values()], strict=True):
                    assert_same_bits(new, old)
            else:
                plain.step()
        assert float(mine.state[p]["step"]) == 2.0
        assert_same_bits(p.detach(), q.detach())
        for name in ("exp_avg", "exp_avg_sq"):  # steps themselves are the same for gradients of any scale
            assert_same_bits(mine.state[p][name], plain.state[q][name])


def test_grad_scaler_uses_it() -> None:
    p = Parameter(torch.ones(4))
    optimizer, scaler = AdamW([p], lr=0.5, weight_decay=0.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((2 * p).sum()).backward()
    assert p.grad[0] == 8.0
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(p.detach(), torch.full((4,), 0.5))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full((4,), 0.2))


# ---- state ----------------------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "cuda")
def test_state_dict_keeps_every_bit(place: str) -> None:
    with running_on(place) as device:
        ours = parameters(device, torch.bfloat16)
        first = AdamW(ours)
        set_grads(ours, 0)
        first.step()
        saved = copy.deepcopy(first.state_dict())
        others = [Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in ours]
        second = AdamW(others)
        second.load_state_dict(saved)
        for params, optimizer in ((ours, first), (others, second)):
            set_grads(params, 1)
            optimizer.step()
    for p, q in zip(ours, others, strict=True):
        assert_same_bits(p.detach(), q.detach())
        for name, value in first.state[p].items():
            assert_same_bits(value, second.state[q][name], name)


@at("cpu", "cuda")
def test_state_of_torch_can_be_loaded(place: str) -> None:
    theirs, ours = parameters(place), parameters(place)
    reference, mine = torch.optim.AdamW(theirs), AdamW(ours)
    set_grads(theirs, 0)
    reference.step()
    with torch.no_grad():
        for p, q in zip(ours, theirs, strict=True):
            p.copy_(q)
    mine.load_state_dict(reference.state_dict())
    for params in (ours, theirs):
        set_grads(params, 1)
    mine.step()
    reference.step()
    for p, q in zip(ours, theirs, strict=True):
        same(p, q, "parameter", 1.0)
    with pytest.raises(ArgumentError, match="amsgrad"):
        amsgrad = torch.optim.AdamW(theirs, amsgrad=True)
        amsgrad.step()
        mine.load_state_dict(amsgrad.state_dict())


def test_a_model_learns_with_closure_and_schedule() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = AdamW(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(40):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[-1] < 0.01 * losses[0]


def test_parameters_saved_for_backward_notice_the_step() -> None:
    p = Parameter(torch.ones(4))
    loss = p.square().sum()
    optimizer = AdamW([p])
    p.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0; expected a number of at least 0"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\); expected a single number"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] is 1.0; expected a number from 0 to below 1"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] is -0.1"),
        ({"eps": -1e-8}, "eps is -1e-08"),
        ({"weight_decay": math.nan}, "weight_decay is nan"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AdamW([Parameter(torch.ones(3))], **options)
    with pytest.raises(ArgumentError, match=message):
        AdamW([{"params": [Parameter(torch.ones(3))], **options}])


@at("cpu", "sm_80", "cuda")
def test_bad_parameters(place: str) -> None:
    with running_on(place) as device:
        double = Parameter(torch.ones(3, device=device, dtype=torch.float64))
        gaps = Parameter(torch.ones(3, 4, device=device)[:, :2])
        sparse = Parameter(torch.ones(3, 2, device=device))
        for p, message in (
            (double, "a parameter is torch.float64"),
            (gaps, r"weights\[0\] has shape \(3, 2\) and strides \(4, 1\), which leave gaps or overlap"),
            (sparse, r"grads\[0\] has layout torch.sparse_coo; expected a dense tensor"),
        ):
            p.grad = torch.ones_like(p).to_sparse() if p is sparse else torch.ones_like(p)
            with pytest.raises(ArgumentError, match=message):
                AdamW([p]).step()


# ---- clipping -------------------------------------------------------------------------------------------------------


@at()
@pytest.mark.parametrize("norm_type", (2.0, 1.0, math.inf))
@pytest.mark.parametrize("most", (0.5, 1e6))
def test_clip_grad_norm(place: str, norm_type: float, most: float) -> None:
    with running_on(place) as device:
        ours, theirs = parameters(device), parameters(device)
        for params in (ours, theirs):
            set_grads(params, 0)
            params[1].grad = None
            params[3].grad = None  # torch cannot take the largest element of nothing
        norm = clip_grad_norm_(iter(ours), most, norm_type)
        want = torch.nn.utils.clip_grad_norm_(theirs, most, norm_type)
    torch.testing.assert_close(norm, want, rtol=1e-6, atol=0)
    for p, q in zip(ours, theirs, strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_clip_grad_norm_of_one_and_of_none() -> None:
    p = Parameter(torch.zeros(4))
    assert clip_grad_norm_(p, 1.0) == 0.0
    assert clip_grad_norm_([], 1.0) == 0.0
    p.grad = torch.full((4,), 2.0)
    assert clip_grad_norm_(p, 1.0) == 4.0
    torch.testing.assert_close(p.grad.norm(), torch.ones(()))


@at("cpu", "cuda")
def test_error_if_nonfinite(place: str) -> None:
    p = Parameter(torch.zeros(4, device=place))
    p.grad = torch.tensor([1.0, math.inf, 2.0, 3.0], device=place)
    before = p.grad.clone()
    with pytest.raises(RuntimeError, match=r"the norm of order 2\.0 of the gradients is inf"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert_same_bits(p.grad, before)


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_training_step_in_a_graph() -> None:
    """Gradients are allocated inside the capture, so their addresses are new there."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    rates = [torch.tensor(1e-2, device="cuda") for _ in range(2)]
    optimizers = [AdamW(m.parameters(), lr=lr) for m, lr in zip(models, rates, strict=True)]

    def step(i: int) -> Tensor:
        optimizers[i].zero_grad(set_to_none=True)
        models[i](x).float().square().mean().backward()
        norm = clip_grad_norm_(models[i].parameters(), 0.1)
        optimizers[i].step()
        return norm

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(0)
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        step(1)
    graph = torch.cuda.CUDAGraph()
    optimizers[0].zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        norm = step(0)
    for i in range(4):
        for lr in rates:
            lr.fill_(1e-2 / (i + 1))
        graph.replay()
        want = step(1)
        torch.testing.assert_close(norm, want)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert_same_bits(p.detach(), q.detach())
    assert float(optimizers[0].state[next(models[0].parameters())]["step"]) == 6.0


@pytest.mark.gpu
def test_steps_do_not_wait_for_the_device() -> None:
    params = parameters("cuda", torch.bfloat16)
    optimizer = AdamW(params)
    set_grads(params, 0)
    optimizer.step()
    set_grads(params, 1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(params, 1.0)
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_2_to_the_31_parameters() -> None:
    p = Parameter(torch.zeros(2**31 + 4099, device="cuda", dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=0.5, weight_decay=0.0)
    p.grad = torch.zeros_like(p)
    p.grad[-1] = p.grad[2**31] = 1.0
    optimizer.step()
    assert p.detach()[[0, 5, 2**31 - 1, 2**31, 2**31 + 1, -1]].tolist() == [0.0, 0.0, 0.0, -0.5, 0.0, -0.5]


# ---- options of torch's ---------------------------------------------------------------------------------------------


def _one() -> list[Parameter]:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return [p]


@pytest.mark.parametrize(
    "options",
    [
        *({"fused": value} for value in (True, False, None)),
        *({"foreach": value} for value in (True, False, None)),
        *({"capturable": value} for value in (True, False)),
        {"amsgrad": False, "differentiable": False, "fused": True, "foreach": False},
    ],
    ids=str,
)
def test_options_that_choose_torchs_loops_change_nothing(options: dict) -> None:
    (mine,), (plain,) = _one(), _one()
    AdamW([mine], **options).step()
    AdamW([plain]).step()
    assert torch.equal(mine, plain)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"amsgrad": True}, "amsgrad is True, and must be False: this optimizer keeps no running maximum"),
        ({"differentiable": True}, "differentiable is True, and must be False: autograd does not record"),
        ({"fused": True, "foreach": True}, "fused and foreach are both True"),
        ({"fused": "yes"}, "fused is 'yes'; expected True or False or None"),
        ({"capturable": None}, "capturable is None; expected True or False"),
        ({"amsgrad": 1}, "amsgrad is 1; expected True or False"),
    ],
)
def test_options_that_would_change_results_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        AdamW(_one(), **options)
    if options.keys() & {"amsgrad", "differentiable"}:
        with pytest.raises(ArgumentError, match=text):
            AdamW([{"params": _one(), **options}])
        mine, torchs = AdamW(_one()), torch.optim.AdamW(_one())
        saved = torchs.state_dict()
        saved["param_groups"][0].update(options)
        with pytest.raises(ArgumentError, match=text):
            mine.load_state_dict(saved)


def test_every_argument_of_torchs_is_known() -> None:
    torchs = inspect.signature(torch.optim.AdamW).parameters
    mine = inspect.signature(AdamW).parameters
    assert torchs.keys() <= mine.keys()
    positional = [name for name, p in torchs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(mine)[: len(positional)] == positional


def _overwritten(p: Parameter, way: str) -> None:
    new = torch.full_like(p.detach(), 7.0)
    if way == "copied":
        with torch.no_grad():
            p.copy_(new)
    elif way == "another tensor":
        p.data = new
    else:
        with torch.no_grad():
            p[1:3].fill_(7.0)


@pytest.mark.parametrize("way", ["copied", "another tensor", "a part"])
@pytest.mark.parametrize("kind", [AdamW, Lion, Muon])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_was_overwritten_keeps_its_value(kind, way: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    p = Parameter(torch.randn(6, 10, generator=g).to(dtype))
    optimizer = kind([p], lr=1e-4, weight_decay=0.0)
    for _ in range(3):
        p.grad = torch.randn(6, 10, generator=g).to(dtype)
        optimizer.step()
    before, master = p.detach().clone(), optimizer.state[p]["master"].clone()
    assert not torch.equal(master, before.float())
    _overwritten(p, way)
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    changed = slice(1, 3) if way == "a part" else slice(None)
    wanted, wanted_master = before.clone(), master.clone()
    wanted[changed], wanted_master[changed] = 7.0, 7.0
    assert_same_bits(p.detach(), wanted)
    assert_same_bits(optimizer.state[p]["master"], wanted_master)  # the others keep their low bits


def test_a_copied_optimizer_notices_what_is_overwritten_and_keeps_no_parameter_alive() -> None:
    p = Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=0.0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    q, other = copy.deepcopy((p, optimizer))
    _overwritten(q, "copied")
    q.grad = torch.ones_like(q)
    other.step()
    assert q.eq(7.0).all()
    known = weakref.ref(q)
    other.param_groups[0]["params"].clear()
    other.state.clear()
    del q
    gc.collect()
    assert known() is None


def test_master_weights_of_a_state_dict_are_those_of_its_parameters() -> None:
    p = Parameter(torch.randn(6, 10, generator=torch.Generator().manual_seed(5)).bfloat16())
    optimizer = AdamW([p], lr=1e-4)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    saved, weights, master = copy.deepcopy(optimizer.state_dict()), p.detach().clone(), optimizer.state[p]["master"]
    for late in (False, True):  # the model is loaded before the optimizer, or after it
        q = Parameter(torch.zeros_like(p))
        loaded = AdamW([q], lr=0.0)
        for one in (late, not late):
            if one:
                loaded.load_state_dict(saved)
            else:
                with torch.no_grad():
                    q.copy_(weights)
        q.grad = torch.zeros_like(q)
        loaded.param_groups[0]["lr"] = 0.0
        loaded.step()
        assert_same_bits(loaded.state[q]["master"], master)
        assert_same_bits(q.detach(), weights)


def test_muon_refuses_sparse_gradients() -> None:
    p = Parameter(torch.zeros(4, 4))
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(ArgumentError, match="expected a dense tensor"):
        Muon([p]).step()
