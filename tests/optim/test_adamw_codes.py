"""AdamW with moments of 8 and 4 bits, without master weights: codes, random rounding, states of other libraries."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor
from torch.nn import Parameter

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes, multi_adamw_codes
from rtkernels.optim import AdamW, moments

KINDS = ("fp32", "8bit", "fp8", "4bit")
B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def lists(kind: str, weight: torch.dtype, grad: torch.dtype, copies: bool, first: int = 0, shift: int = 0) -> list:
    """Arguments of a step, on the CPU."""
    g = torch.Generator().manual_seed(5)
    sizes = (4700, 1, 256, 300)

    def some(dtype: torch.dtype, scale: float) -> list[Tensor]:
        return [(torch.randn(size + shift, generator=g) * scale).to(dtype)[shift:] for size in sizes]

    moments = [some(F32, 1e-2), [t.square() for t in some(F32, 1e-2)]]
    scales: list[list[Tensor]] = [[], []]
    if kind != "fp32":
        pairs = [[dynamic_codes.encode(t, kind, i == 0) for t in one] for i, one in enumerate(moments)]
        moments, scales = ([[pair[k] for pair in one] for one in pairs] for k in (0, 1))
    weights = some(weight, 1.0)
    steps = [torch.full((), 3.0) for _ in sizes]
    origins = [torch.tensor([i, first]) for i, _ in enumerate(sizes)]
    low = [w.bfloat16() for w in weights] if copies else []
    return [weights, some(grad, 1e-2), *moments, steps, origins, *scales, low]


def codes_of(moment: Tensor) -> Tensor:
    """Codes as numbers, also those that share bytes."""
    codes = moment.view(torch.uint8).int()
    return torch.stack([codes >> 4, codes & 15]) if moment.dtype == torch.int8 else codes


NUMBERS = (None, None, None, 1e-2, 0.9, 0.95, 1e-8, 0.1, False)


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("weight", "grad", "stochastic", "copies", "first", "shift"),
    [
        (B16, B16, True, False, 0, 0),
        (B16, F32, True, False, 13, 1),
        (F32, B16, False, True, 0, 0),
        (F16, F32, False, False, 0, 3),
    ],
)
def test_kernels_are_the_reference(place, kind, weight, grad, stochastic, copies, first, shift) -> None:
    expected = lists(kind, weight, grad, copies, first, shift)
    with torch.no_grad():
        multi_adamw_codes.STEP(*expected, *NUMBERS, 1 << 40, stochastic)
        with running_on(place) as device:
            ours = [[t.to(device).clone() for t in one] for one in lists(kind, weight, grad, copies, first, shift)]
            multi_adamw_codes.STEP(*ours, *NUMBERS, 1 << 40, stochastic)
    for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
        for x, y in zip(one, other, strict=True):
            x = x.cpu()
            if x.dtype in dynamic_codes.KIND_OF:  # a rounding error moves a few codes to the next
                distance = (codes_of(x) - codes_of(y)).abs()
                assert distance.max() <= 1 and (distance > 0).float().mean() < 0.01
            else:
                size = y.float().abs().max()
                unit = torch.finfo(y.dtype).eps if index in (0, 8) and y.is_floating_point() else 1e-6
                assert (x.float() - y.float()).abs().max() <= 2 * unit * size
                assert (x != y).float().mean() < 0.01 or y.dtype == F32


@pytest.mark.parametrize("signed", [True, False])
def test_the_map(signed) -> None:
    values = dynamic_codes.dynamic_map(signed)
    assert len(values) == 256 and values.diff().min() > 0
    assert values[-1] == 1 and values[127 if signed else 0] == 0
    assert values.abs().unique()[1] == pytest.approx(5.5e-7 if signed else 3.25e-7)
    codes, scale = dynamic_codes.encode(values * 3.0, "8bit", signed)
    assert torch.equal(codes, torch.arange(256, dtype=torch.uint8)) and scale.tolist() == [3.0]
    torch.testing.assert_close(dynamic_codes.decode(codes, scale, signed), values * 3.0, rtol=1e-6, atol=0)


def test_the_maps_of_4_bits() -> None:
    first, second = (dynamic_codes.code_map("4bit", signed) for signed in (True, False))
    magnitudes = torch.tensor([0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875])
    torch.testing.assert_close(first, torch.cat([-magnitudes.flip(0), torch.zeros(1), magnitudes, torch.ones(1)]))
    assert torch.equal(second * 16, torch.arange(1.0, 17))
    for values, signed in ((first, True), (second, False)):
        codes, scale = dynamic_codes.encode(values * 3.0, "4bit", signed)
        expected = torch.arange(16, dtype=torch.uint8)
        assert torch.equal(codes.view(torch.uint8), expected[::2] << 4 | expected[1::2]) and scale.tolist() == [3.0]
        torch.testing.assert_close(dynamic_codes.decode(codes, scale, signed), values * 3.0, rtol=1e-6, atol=0)
    odd = torch.tensor([1.0, -0.5, 0.25])
    codes, scale = dynamic_codes.encode(odd, "4bit", True)
    assert codes.shape == (2,) and dynamic_codes.decode(codes, scale, True, 3).shape == (3,)


@pytest.mark.parametrize("kind", ["8bit", "fp8", "4bit"])
def test_zeros_nan_and_short_blocks(kind) -> None:
    x = torch.zeros(600)
    codes, scale = dynamic_codes.encode(x, kind, True)
    block = dynamic_codes.BLOCKS[kind]
    assert scale.shape == (-(-600 // block),) and not dynamic_codes.decode(codes, scale, True).any()
    x[300] = float("nan")
    codes, scale = dynamic_codes.encode(x, kind, True)
    assert scale.isnan().nonzero().tolist() == [[300 // block]]


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", KINDS)
def test_odd_gradients(place, kind) -> None:
    """NaN and infinities stay within the elements that share a scale, and reach the weights."""
    with running_on(place) as device:
        p = Parameter(torch.ones(4099, device=device).bfloat16())
        optimizer = AdamW([p], state=kind, master=False)
        for step in range(2):
            p.grad = torch.ones_like(p)
            p.grad[0], p.grad[300], p.grad[4098] = (1.0, 1.0, 1.0) if step else (float("nan"), float("inf"), 0.0)
            optimizer.step()
    block = dynamic_codes.BLOCKS.get(kind, 1)
    odd = ~p.detach().isfinite().cpu()
    assert odd[0] and odd[300] and not odd[3 * block + 512 :].any()
    if kind == "fp32":
        assert odd.sum() == 2


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("zeros", (True, False))
def test_eps_of_0_is_as_in_torch(place, zeros) -> None:
    """Subnormal second moments divide as they are; 0 by 0 is NaN."""
    with running_on(place) as device:
        grad = torch.logspace(-22, -17, 64) * torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
        if zeros:
            grad[3:9] = 0.0
        params = [Parameter(torch.ones(64, device=device)) for _ in range(2)]
        for p, one in zip(params, (AdamW, torch.optim.AdamW), strict=True):
            optimizer = one([p], lr=1e-2, eps=0.0)
            for _ in range(3):
                p.grad = grad.clone().to(p.device)
                optimizer.step()
    ours, theirs = (p.detach().cpu() for p in params)
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours.isnan().any() == zeros
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_eps_that_would_be_flushed_is_refused() -> None:
    p = Parameter(torch.ones(5000))
    with pytest.raises(ArgumentError, match=r"eps is 1e-40; expected 0 or at least 1\.2e-38"):
        AdamW([p], eps=1e-40)
    for kind in KINDS[1:]:
        with pytest.raises(ArgumentError, match=f"eps is 0.0; expected at least 1e-15 with state='{kind}'"):
            AdamW([p], eps=0.0, state=kind)
    optimizer = AdamW([p], eps=0.0)
    with pytest.raises(ArgumentError, match=r"eps is 0\.0"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2))], "state": "4bit"})
    assert len(optimizer.param_groups) == 1


def test_random_bits_depend_on_the_place_only() -> None:
    whole = dynamic_codes.random_bits(3, 1, 2, 0, 100)
    assert torch.equal(whole[13:60], dynamic_codes.random_bits(3, 1, 2, 13, 47))
    assert not torch.equal(whole, dynamic_codes.random_bits(3, 1, 3, 0, 100))
    assert not torch.equal(whole, dynamic_codes.random_bits(3, 2, 2, 0, 100))
    many = dynamic_codes.random_bits(4, 0, 1, 0, 1 << 16).double()
    assert many.min() >= 0 and many.max() < 65536 and abs(many.mean() / 32767.5 - 1) < 0.01


def test_rounding_keeps_the_mean() -> None:
    x = torch.full((4096,), 1.0 + 0.3 * 2**-7)
    rounded = dynamic_codes.round_stochastically(x, dynamic_codes.random_bits(0, 0, 1, 0, 4096)).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert abs((rounded.mean() - 1) * 2**7 - 0.3) < 0.03
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    kept = dynamic_codes.round_stochastically(odd, torch.full((4,), 65535, dtype=torch.int32))
    assert kept[0].isnan() and kept[1:3].tolist() == [float("inf"), -float("inf")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stochastic", [True, False])
def test_200_steps_against_fp32(kind, stochastic) -> None:
    g = torch.Generator().manual_seed(0)
    target = torch.randn(80, 64, generator=g)
    losses = []
    for options in ({}, {"state": kind, "master": not stochastic, "stochastic": stochastic}):
        p = Parameter(torch.zeros(80, 64, dtype=B16))
        optimizer = AdamW([p], lr=2e-2, weight_decay=0.0, **options)
        for _ in range(200):
            p.grad = (p.detach().float() - target).to(B16)
            optimizer.step()
        losses.append((p.float() - target).square().mean().item())
    # TorchAO's AdamW4bit ends at 0.075, too: no code stands for second moments that become small.
    assert losses[1] < (0.09 if kind == "4bit" else 2 * losses[0] + 1e-3)


def test_the_same_seed_gives_the_same_bits() -> None:
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(0)
        p = Parameter(torch.randn(5000).bfloat16())
        optimizer = AdamW([p], lr=1e-3, state="8bit", master=False, stochastic=True, seed=seed)
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
        results.append(p.detach().clone())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def _stepped(kind: str, **options) -> tuple[list[Parameter], AdamW]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(70, 64)), Parameter(torch.randn(30))]
    optimizer = AdamW(params, lr=1e-2, state=kind, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    return params, optimizer


def test_state_is_that_of_bitsandbytes() -> None:
    params, optimizer = _stepped("8bit")
    large, small = (optimizer.state_dict()["state"][i] for i in (0, 1))
    assert set(large) == {"step", "state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"}
    assert large["step"] == 1 and type(large["step"]) is int
    assert large["state1"].dtype == torch.uint8 and large["state1"].shape == params[0].shape
    assert large["absmax1"].shape == (-(-70 * 64 // 256),) and large["qmap1"].shape == (256,)
    assert set(small) == {"step", "state1", "state2"} and small["state1"].dtype == F32
    again = AdamW([Parameter(p.detach().clone()) for p in params], lr=1e-2, state="8bit")
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_state_dicts_of_bitsandbytes_hide_moments_from_fsdp() -> None:
    """Those of 0.50 have them in a dict of their own."""
    params, optimizer = _stepped("8bit")
    state = copy.deepcopy(optimizer.state_dict())
    for i, one in state["state"].items():
        hidden = {name: one.pop(name) for name in list(one) if name != "step"}
        state["state"][i] = {**one, "__bnb_optimizer_quant_state__": hidden}
    again = AdamW([Parameter(p.detach().clone()) for p in params], lr=1e-2, state="8bit")
    again.load_state_dict(state)
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", [*KINDS, "torch", "torchao"])
def test_states_are_converted(kind, source) -> None:
    params, optimizer = _stepped("fp32" if source in ("torch", "torchao") else source)
    exact = _stepped("fp32")[1]
    state = copy.deepcopy(optimizer.state_dict())
    if source == "torch":
        state = torch.optim.AdamW(params).state_dict() | {"state": state["state"]}
    if source == "torchao":
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            whole = state["state"][0][name]
            codes, scale = dynamic_codes.encode(whole, "fp8", signed)
            state["state"][0][name] = SimpleNamespace(codes=codes, scale=scale, shape=whole.shape)
        state["state"][0] = state["state"][0]
    target = AdamW([Parameter(p.detach().clone()) for p in params], lr=1e-2, state=kind)
    if source == "torchao":
        loaded = moments.loaded(target.param_groups[0]["params"][0], state["state"][0], kind)
    else:
        target.load_state_dict(state)
        assert target.param_groups[0]["state"] == ("fp32" if source == "fp32" else target.param_groups[0]["state"])
        kind = target.param_groups[0]["state"]
        loaded = next(iter(target.state.values()))
    names = ("state1", "state2") if kind == "8bit" else ("exp_avg", "exp_avg_sq")
    scales = moments.SCALES.get(kind)
    reference = next(iter(exact.state.values()))
    for i, name in enumerate(names):
        value = loaded[name]
        if scales is not None:
            value = dynamic_codes.decode(value, loaded[scales[i]], i == 0, value.numel() * (2 if kind == "4bit" else 1))
        whole = reference[("exp_avg", "exp_avg_sq")[i]]
        value = value.float().reshape(whole.shape)
        assert ((value - whole).norm() / whole.norm()) < (0.2 if "4bit" in (kind, source) else 0.06)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("layouts", ("from", "to", "both"))
def test_states_of_other_layouts_are_converted(kind, source, layouts) -> None:
    """Scales belong to 256 neighbours in memory, whose magnitudes here differ from row to row."""
    torch.manual_seed(0)
    base = torch.randn(70, 64)
    turned = base.t().contiguous().t()
    grad = torch.randn(70, 64) * torch.logspace(-4, 0, 70)[:, None]
    one, other = (Parameter(turned if layouts in (name, "both") else base) for name in ("from", "to"))
    exact, before, after = (
        AdamW([p], lr=1e-2, state=state) for p, state in ((Parameter(base), "fp32"), (one, source), (other, kind))
    )
    for optimizer in (exact, before):
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = torch.empty_like(p).copy_(grad)
        optimizer.step()
    state = copy.deepcopy(before.state_dict())
    state["param_groups"][0]["state"] = kind
    after.load_state_dict(state)
    for i, name in enumerate(("exp_avg", "exp_avg_sq")):
        found = after.state[other][f"state{i + 1}" if kind == "8bit" else name]
        assert kind == "4bit" or found.stride() == other.stride()
        if kind != "fp32":
            scale = after.state[other][f"absmax{i + 1}" if kind == "8bit" else f"{name}_scale"]
            decoded = torch.empty_like(other, dtype=F32).detach()
            flat = dynamic_codes.in_memory(found)
            dynamic_codes.fill_memory(decoded, dynamic_codes.decode(flat, scale, i == 0))
            found = decoded
        wanted = next(iter(exact.state.values()))[name]
        if "4bit" in (kind, source):
            assert torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.8
        else:
            assert (found - wanted).norm() < 0.06 * wanted.norm()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": "bf16"}, "state is 'bf16'; expected 'fp32', '8bit', 'fp8', '4bit'"),
        ({"master": 1}, "master is 1"),
        ({"stochastic": True}, "stochastic is True, and so is master"),
        ({"master": False, "stochastic": True, "seed": -1}, "seed is -1"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        AdamW([Parameter(torch.randn(5))], **options)


def test_float16_is_not_rounded_stochastically() -> None:
    p = Parameter(torch.randn(5).half())
    p.grad = torch.randn_like(p)
    with pytest.raises(ArgumentError, match="a parameter is float16"):
        AdamW([p], master=False, stochastic=True).step()


@pytest.mark.gpu
def test_captured_steps_and_scaled_gradients() -> None:
    params = [Parameter(torch.randn(100, 80, device="cuda").bfloat16()) for _ in range(2)]
    optimizers = [AdamW([p], lr=1e-2, state="8bit", master=False, stochastic=True) for p in params]
    with torch.no_grad():
        params[1].copy_(params[0])
    for p in params:
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    graph.replay()
    optimizers[1].step()
    assert torch.equal(*params)
    optimizers[0].found_inf = torch.ones((), device="cuda")
    optimizers[0].step()
    assert torch.equal(*params)
