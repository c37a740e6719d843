"""Muon against torch's, its forms against exact polynomials, and AdamW for the other parameters."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor
from torch.nn import Parameter

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import multi_muon
from rtkernels.optim import AdamW, Muon
from rtkernels.optim import muon_iteration as iteration

SHAPES = ((64, 64), (64, 160), (160, 64), (64, 160), (9, 5), (1, 40), (40, 1))


def parameters(device: str, dtype: torch.dtype = torch.float32, shapes=SHAPES) -> list[Parameter]:
    g = torch.Generator().manual_seed(3)
    return [Parameter(torch.randn(shape, generator=g).to(device, dtype)) for shape in shapes]


def set_grads(params: list[Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).to(p.device, p.dtype)


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(x.double().flatten(), y.double().flatten(), dim=0).item()


def exact(x: Tensor, coefficients) -> Tensor:
    """The polynomial of the singular values, in fp64."""
    u, s, v = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@at("cpu", "cuda")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ns_steps": 3, "weight_decay": 0.0},
    ],
    ids=lambda o: "-".join(o) or "default",
)
@pytest.mark.parametrize("gram", [None, False, True])
def test_same_updates_as_torch(place, options, gram) -> None:
    with running_on(place) as device:
        ours, theirs = parameters(device), parameters(device)
        optimizers = Muon(ours, lr=0.02, gram=gram, **options), torch.optim.Muon(theirs, lr=0.02, **options)
        for step in range(3):
            before = [p.detach().clone() for p in ours]
            for params, optimizer in zip((ours, theirs), optimizers, strict=True):
                set_grads(params, step)
                optimizer.step()
            for p, q, old in zip(ours, theirs, before, strict=True):
                assert cosine(p - old, q - old) > 0.999
                assert ((p - q).norm() / (q - old).norm()) < 0.05
                with torch.no_grad():
                    p.copy_(q)  # so that every step is compared from the same weights
                momenta = [o.state[x]["momentum_buffer"] for o, x in zip(optimizers, (p, q), strict=True)]
                torch.testing.assert_close(*momenta, rtol=1e-5, atol=1e-6)


@at()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_everywhere(place, dtype) -> None:
    shapes = ((16, 24), (24, 8), (16, 24), (2, 8, 16))
    with running_on(place) as device:
        params = parameters(device, dtype, shapes)
        before = [p.detach().clone().cpu() for p in params]
        optimizer = Muon(params, lr=0.25, weight_decay=0.5)
        set_grads(params, 0)
        optimizer.step()
    for p, old in zip(params, before, strict=True):
        grad = p.grad.cpu().float()
        update = 0.05 * 0.95 * grad + 0.05 * grad  # lerp(grad, average, momentum), with an average of 0.05 grad
        matrices = update.reshape(-1, *p.shape[-2:])
        factor = math.sqrt(max(1, p.shape[-2] / p.shape[-1]))
        direction = torch.stack([exact(x, iteration.schedule(iteration.QUINTIC, 5)) for x in matrices])
        expected = old.double() * (1 - 0.125) - 0.25 * factor * direction.reshape(p.shape)
        master = optimizer.state[p].get("master", p).detach().cpu().double()
        assert ((master - expected).norm() / (0.25 * factor * direction.norm())) < 0.03
        assert torch.equal(p.detach().cpu(), master.to(dtype)) if dtype != torch.float32 else True


@at()
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_averages_everywhere(nesterov, maximize, place) -> None:
    """Of two steps: after the first one, all forms of momentum have the same direction."""
    g = torch.Generator().manual_seed(5)
    given = [[torch.randn(size, generator=g) for size in (3, 70, 1030)] for _ in range(3)]
    averages = [t.double() for t in given[0]]
    with running_on(place) as device:
        ours = [t.to(device) for t in given[0]]
        for grads in given[1:]:
            updates = [torch.empty_like(t) for t in ours]
            multi_muon.MOMENTUM(ours, [t.to(device) for t in grads], updates, 0.75, nesterov, maximize)
            for i, grad in enumerate(grads):
                signed = -grad.double() if maximize else grad.double()
                averages[i] = 0.75 * averages[i] + 0.25 * signed
                update = 0.75 * averages[i] + 0.25 * signed if nesterov else averages[i]
                torch.testing.assert_close(ours[i].cpu(), averages[i].float(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(updates[i].cpu(), update.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(48, 48), (32, 96), (96, 32), (130, 50)])
def test_forms(shape, name, gram) -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2, *shape, generator=g)
    steps = iteration.schedule(iteration.QUINTIC if name == "quintic" else name, 5)
    out = iteration.orthogonalize_(x.bfloat16(), steps, 1e-7, gram).double()
    for one, given in zip(out, x, strict=True):
        expected = exact(given, steps)
        limit = 0.012 if gram and shape[0] != shape[1] else 0.03
        assert ((one - expected).norm() / expected.norm()) < limit


def test_polar_express_is_closer_to_orthogonal() -> None:
    values = torch.logspace(-3, 0, 500, dtype=torch.float64)
    spreads = []
    for coefficients in (iteration.QUINTIC, "polar_express"):
        s = values.clone()
        for a, b, c in iteration.schedule(coefficients, 5):
            s = a * s + b * s**3 + c * s**5
        spreads.append((s.min().item(), s.max().item()))
    assert spreads[1][0] > 0.7 and spreads[1][1] < 1.13
    assert spreads[0][0] < spreads[1][0] and spreads[0][1] > spreads[1][1]


@pytest.mark.parametrize("gram", [False, True])
def test_degenerate_gradients(gram) -> None:
    zero = torch.zeros(1, 16, 40, dtype=torch.bfloat16)
    assert not iteration.orthogonalize_(zero, iteration.schedule(iteration.QUINTIC, 5), 1e-7, gram).any()
    # Powers of two: bfloat16 holds their products exactly. Rounding would add singular values, which the steps enlarge.
    g = torch.Generator().manual_seed(0)
    u, v = (2.0 ** torch.randint(-2, 3, shape, generator=g) for shape in ((16, 1), (1, 40)))
    for scale in (2.0**-40, 1.0, 2.0**40):
        one = ((u @ v) * scale).bfloat16()[None]
        out = iteration.orthogonalize_(one, iteration.schedule(iteration.QUINTIC, 5), 1e-30, gram)[0].double()
        assert out.isfinite().all()
        assert cosine(out, u @ v) > 0.99


def test_large_matrices_stay_in_the_range_of_float16() -> None:
    x = torch.zeros(1, 300, 1000)
    x[0, 3, 5] = 1e4  # all of the norm in one element
    out = iteration.orthogonalize_(x.bfloat16(), iteration.schedule("polar_express", 5), 1e-7, True)
    assert out.isfinite().all() and 0.7 < out[0, 3, 5] < 1.2


def test_the_rest_of_a_model_is_adamws() -> None:
    matrix, bias = Parameter(torch.randn(8, 16)), Parameter(torch.randn(16))
    other = Parameter(bias.detach().clone())
    optimizer = Muon([{"params": [matrix]}, {"params": [bias], "use_muon": False, "lr": 0.01}], lr=0.02)
    alone = AdamW([other], lr=0.01, weight_decay=0.1)
    for step in range(2):
        set_grads([matrix, bias], step)
        other.grad = bias.grad.clone()
        optimizer.step()
        alone.step()
    assert torch.equal(bias, other)
    assert set(optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state[matrix]) == {"momentum_buffer"}


def test_state_dicts() -> None:
    ours, theirs = parameters("cpu"), parameters("cpu")
    optimizer, torchs = Muon(ours, lr=0.02), torch.optim.Muon(theirs, lr=0.02)
    set_grads(theirs, 0)
    torchs.step()
    optimizer.load_state_dict(torchs.state_dict())
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], torchs.state[q]["momentum_buffer"])
    torchs.load_state_dict(optimizer.state_dict())
    set_grads(theirs, 1)
    torchs.step()

    low = parameters("cpu", torch.bfloat16)
    first = Muon(low, lr=0.02)
    set_grads(low, 0)
    first.step()
    again = [Parameter(p.detach().clone()) for p in low]
    second = Muon(again, lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for params, one in ((low, first), (again, second)):
        set_grads(params, 1)
        one.step()
    for p, q in zip(low, again, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(first.state[p]["master"], second.state[q]["master"])


def test_rate_as_a_tensor_strides_and_missing_gradients() -> None:
    base = torch.randn(24, 16)
    one, other = Parameter(base.clone()), Parameter(base.t().contiguous().t())
    unused = Parameter(torch.randn(4, 4))
    grad = torch.randn(24, 16)
    for p in (one, other):
        p.grad = torch.empty_like(p).copy_(grad)
    Muon([one], lr=0.125).step()
    Muon([other, unused], lr=torch.tensor(0.125)).step()
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"ns_steps": 2.5}, "ns_steps is 2.5"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is"),
        ({"ns_coefficients": "quintic"}, "ns_coefficients is 'quintic'"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'"),
        ({"nesterov": 1}, "nesterov is 1"),
        ({"gram": "yes"}, "gram is 'yes'"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"eps": -0.1}, "eps is -0.1"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        Muon(parameters("cpu"), **options)


@pytest.mark.parametrize("gram", [False, True])
def test_parameters_without_elements(gram: bool) -> None:
    params = parameters("cpu", shapes=((0, 40), (40, 0), (0, 3, 5), (3, 5)))
    optimizer = Muon(params, lr=0.02, gram=gram)
    set_grads(params, 0)
    optimizer.step()
    assert [tuple(p.shape) for p in params] == [(0, 40), (40, 0), (0, 3, 5), (3, 5)] and params[3].isfinite().all()


def test_vectors_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"has shape \(5,\); expected two or three dimensions"):
        Muon([Parameter(torch.randn(5))])


@pytest.mark.gpu
def test_captured_steps() -> None:
    params = parameters("cuda", torch.bfloat16, ((128, 256), (256, 128), (64, 64)))
    alone = [Parameter(p.detach().clone()) for p in params]
    captured, eager = Muon(params, lr=0.02), Muon(alone, lr=0.02)
    for p, q in zip(params, alone, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    captured.step(), eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    graph.replay()
    eager.step()
    for p, q in zip(params, alone, strict=True):
        assert torch.equal(p, q)
