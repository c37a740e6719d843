"""The modules against torch's: results, gradients, state dicts, copies, compilation, autocast."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_no_worse, running_on
from support.interpreter import run_python
from support.places import DTYPES, at, short
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import ArgumentError

rnn = rtkernels.nn
SHAPES = {"one": (48,), "odd": (33,), "two": (4, 12), "three": (2, 3, 8)}
NORMS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module], dict[str, Any]]] = {
    "rms": (rnn.RMSNorm, nn.RMSNorm, {"eps": 1e-6}),
    "rms_default_eps": (rnn.RMSNorm, nn.RMSNorm, {}),
    "rms_plain": (rnn.RMSNorm, nn.RMSNorm, {"eps": 1e-6, "elementwise_affine": False}),
    "layer": (rnn.LayerNorm, nn.LayerNorm, {}),
    "layer_no_bias": (rnn.LayerNorm, nn.LayerNorm, {"eps": 1e-3, "bias": False}),
    "layer_plain": (rnn.LayerNorm, nn.LayerNorm, {"elementwise_affine": False}),
}


def randomised(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Give every parameter random values."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def run(module: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Run a module both ways and return the result and all gradients."""
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    gradients = {f"d{name}": p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NORMS)
@at("cpu", "sm_90", "cuda")
def test_norms_are_torchs(place: str, name: str, shape: str) -> None:
    ours, theirs, arguments = NORMS[name]
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(0)
        other = randomised(theirs(SHAPES[shape], **arguments), generator).to(device)
        module = ours(SHAPES[shape], **arguments).to(device)
        module.load_state_dict(other.state_dict())
        x, dy = (torch.randn(3, 5, *SHAPES[shape], generator=generator).to(device) for _ in range(2))
        got, wanted = run(module, x, dy), run(other, x, dy)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        assert got["y"].shape == x.shape


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", ("rms", "layer"))
@at("cpu", "sm_90", "cuda")
def test_parameters_and_input_of_any_dtypes(place: str, name: str, dtype: torch.dtype) -> None:
    ours, theirs, arguments = NORMS[name]
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(0)
        for parameter_dtype in DTYPES:
            module = randomised(ours(48, dtype=parameter_dtype, **arguments), generator).to(device)
            exact = theirs(48, dtype=torch.float64, **arguments).to(device)
            exact.load_state_dict(module.state_dict())
            rounded = copy.deepcopy(exact).to(dtype)
            x, dy = (torch.randn(7, 48, generator=generator).to(dtype).to(device) for _ in range(2))
            got = run(module, x, dy)
            assert got["y"].dtype == dtype and got["dweight"].dtype == parameter_dtype
            wanted, other = run(exact, x.double(), dy.double()), run(rounded, x, dy)
            for what in ("y", "dx"):
                assert_no_worse(got[what], other[what], wanted[what], factor=2, what=f"{what} {parameter_dtype}")
            torch.testing.assert_close(got["dweight"].double(), wanted["dweight"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_default_eps_of_rms_norm(dtype: torch.dtype) -> None:
    x = torch.full((2, 8), 1e-4, dtype=dtype)
    wanted = F.rms_norm(x.float(), (8,), None, torch.finfo(torch.float32).eps).to(dtype)
    torch.testing.assert_close(rnn.RMSNorm(8)(x), wanted)


@pytest.mark.parametrize("kind", ("RMSNorm", "LayerNorm"))
def test_offset(kind: str) -> None:
    x = torch.randn(5, 16)
    plain, moved = getattr(rnn, kind)(16), getattr(rnn, kind)(16, offset=1.0)
    assert not moved.weight.any() and "offset=1.0" in repr(moved) and "offset" not in repr(plain)
    torch.testing.assert_close(moved(x), plain(x))
    with torch.no_grad():
        plain.weight.add_(0.5)
        moved.weight.add_(0.5)
    torch.testing.assert_close(moved(x), plain(x))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", ("RMSNorm", "LayerNorm"))
def test_residual(kind: str, shape: tuple[int, ...]) -> None:
    module = randomised(getattr(rnn, kind)(shape), torch.Generator().manual_seed(0))
    x, residual = torch.randn(3, *shape, requires_grad=True), torch.randn(3, *shape, requires_grad=True)
    y, total = module(x, residual)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(y, module(x + residual))
    (y.square().sum() + total.sum()).backward()
    torch.testing.assert_close(x.grad, residual.grad)


GLUS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "swiglu": (rnn.SwiGLU, F.silu),
    "geglu": (rnn.GeGLU, F.gelu),
    "geglu_tanh": (lambda: rnn.GeGLU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", GLUS)
@at("cpu", "sm_90", "cuda")
def test_gated_activations(place: str, name: str) -> None:
    make, act = GLUS[name]
    with running_on(place) as device:
        module = make()
        x = torch.randn(3, 5, 32, device=device, requires_grad=True)
        gate, up = x.detach().chunk(2, -1)
        y = module(x)
        torch.testing.assert_close(y, act(gate) * up, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(module(gate, up), y)
        y.sum().backward()
        other = x.detach().clone().requires_grad_()
        (act(other.chunk(2, -1)[0]) * other.chunk(2, -1)[1]).sum().backward()
        torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-5)
    assert not module.state_dict()


# ---- the module side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_state_dicts_go_both_ways(name: str) -> None:
    ours, theirs, arguments = NORMS[name]
    first, second = ours((4, 12), **arguments), theirs((4, 12), **arguments)
    assert list(first.state_dict()) == list(second.state_dict())
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    second.load_state_dict(first.state_dict(), strict=True)
    first.load_state_dict(second.state_dict(), strict=True)
    assert isinstance(first, theirs) and repr(first) == repr(second)
    positional = {"RMSNorm": ((8,), 1e-4, False), "LayerNorm": (8, 1e-4, True, False)}[theirs.__name__]
    assert repr(ours(*positional, device="cpu", dtype=torch.float64)) == repr(theirs(*positional))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "rms": lambda: rnn.RMSNorm(32, offset=1.0),
    "layer": lambda: rnn.LayerNorm(32),
    "swiglu": rnn.SwiGLU,
    "geglu": lambda: rnn.GeGLU("tanh"),
}


@pytest.mark.parametrize("name", MODULES)
def test_copies(name: str) -> None:
    module = randomised(MODULES[name](), torch.Generator().manual_seed(0))
    x = torch.randn(3, 32)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)
    for other in copies:
        assert torch.equal(other(x), module(x)) and repr(other) == repr(module)
        assert all(a is not b for a, b in zip(other.parameters(), module.parameters(), strict=True))


def test_repr() -> None:
    assert repr(rnn.SwiGLU()) == "SwiGLU()" and repr(rnn.GeGLU()) == "GeGLU(approximate='none')"


class Block(nn.Module):
    """What a transformer layer does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = rnn.RMSNorm(16), rnn.LayerNorm((2, 8), offset=1.0)
        self.third = rnn.RMSNorm(16, eps=1e-5)
        self.up, self.act, self.gelu = nn.Linear(16, 32), rnn.SwiGLU(), rnn.GeGLU("tanh")

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.up(self.first(x)))
        y, total = self.third(h, x)
        return self.second(total.unflatten(-1, (2, 8))).flatten(-2) + self.gelu(y, h)


@pytest.mark.parametrize("dynamic", (False, True))
@at("cpu", "cuda")
def test_torch_compile(place: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    block = Block().to(place)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 16, device=place)
        results = []
        for function in (compiled, block):
            block.zero_grad()
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in block.parameters())])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, dtype=dtype)
    for make in MODULES.values():
        module = make()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        assert y.dtype == dtype and torch.equal(y, module(x))


@at("cpu", "cuda")
def test_training_with_autocast(place: str) -> None:
    block = Block().to(place)
    x = torch.randn(6, 16, device=place)
    with torch.autocast(place, torch.bfloat16):
        h = block.act(block.up(block.first(x)))
        assert h.dtype == torch.bfloat16
        y = block.first(h)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(block.get_parameter(n).grad.dtype == torch.float32 for n in ("first.weight", "up.weight"))


# ---- errors ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (
        lambda: rnn.RMSNorm(8)(torch.ones(2, 9)),
        r"x has shape \(2, 9\); expected the last dimensions to be \(8,\)",
    ),
    "shape, no weight": (
        lambda: rnn.LayerNorm((2, 4), elementwise_affine=False)(torch.ones(8)),
        r"x has shape \(8,\); expected the last dimensions to be \(2, 4\)",
    ),
    "dtype": (lambda: rnn.RMSNorm(8)(torch.ones(2, 8, dtype=torch.float64)), "x has dtype float64; expected one of"),
    "approximate": (lambda: rnn.GeGLU("erf"), "approximate is 'erf'; expected one of none, tanh"),
}


@pytest.mark.parametrize("name", BAD)
def test_error_messages(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        call()


def test_found_lazily() -> None:
    code = (
        "import sys, rtkernels; assert 'rtkernels.nn' not in sys.modules; rtkernels.nn.RMSNorm(4); "
        "assert 'cupy' not in sys.modules"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
