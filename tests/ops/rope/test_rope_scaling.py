"""rope_table with the rope_parameters of transformers: frequencies, attention factors, lengths, wrong keys."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at

import rtkernels
from rtkernels import ArgumentError, rope_table
from rtkernels.ops.rope.rope_scaling import rates, read

LENGTH = 4096  # max_position_embeddings of the configurations below
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 512,
    "short_factor": [1 + i / 40 for i in range(32)], "long_factor": [1.5 + i * i / 40 for i in range(32)],
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, another base": {"rope_type": "dynamic", "factor": 3.5, "rope_theta": 5e5},
    "yarn": YARN,
    "yarn, no truncation": {**YARN, "truncate": False, "rope_theta": 150000.0, "beta_fast": 16, "beta_slow": 2},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale for nothing": {**YARN, "mscale": 0.707, "mscale_all_dim": 0},
    "yarn, attention factor": {**YARN, "attention_factor": 0.75, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn, ratio": {**YARN, "factor": None},
    "yarn, no scaling": {**YARN, "factor": 1.0},
    "yarn, one pair": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, tiny": {**YARN, "original_max_position_embeddings": 4},
    "longrope": LONG,
    "longrope, factor": {**LONG, "factor": 4.0, "rope_theta": 1e5},
    "longrope, factor 1": {**LONG, "factor": 1.0},
    "longrope, attention factor": {**LONG, "attention_factor": 1.25},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
        "original_max_position_embeddings": 512,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "proportional, factor": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0},
}  # fmt: skip


def _theirs(name: str, length: int) -> tuple[torch.Tensor, float, dict[str, Any]]:
    """Return transformers' frequencies and attention factor, and the parameters of the configuration."""
    pytest.importorskip("transformers", minversion="5.0")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = copy.deepcopy(PARAMETERS[name])
    if (kind := parameters["rope_type"]) not in ROPE_INIT_FUNCTIONS:
        pytest.skip(f"this transformers has no {kind}")
    config = LlamaConfig(head_dim=64, max_position_embeddings=LENGTH, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies, factor, {**config.rope_parameters, "max_position_embeddings": LENGTH}


@pytest.mark.parametrize("length", (7, 512, 513, 4096, 5000))
@pytest.mark.parametrize("name", PARAMETERS)
def test_like_transformers(name: str, length: int) -> None:
    wanted, factor, parameters = _theirs(name, length)
    scaling = read(parameters, 64, 10000.0)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)
    ours = rates(scaling.at(length, 64), 64, torch.device("cpu"))
    torch.testing.assert_close(ours, wanted.double(), rtol=1e-6, atol=0)
    positions = torch.arange(length)
    angles = positions.double()[:, None] * wanted
    for given in (length, positions, positions.flip(0)[:, None]):
        for table, exact in zip(rope_table(given, 64, scaling=parameters), (angles.cos(), angles.sin()), strict=True):
            assert table.dtype == torch.float32
            if isinstance(given, torch.Tensor):
                table = table.reshape(length, 32) if given.dim() == 1 else table.reshape(length, 32).flip(0)
            error = (table - factor * exact).abs()
            assert (error <= 1e-6 * (1 + factor * angles)).all()  # their frequencies are float32
            assert error[:8].max() <= 1e-6


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", ("yarn, mscale", "longrope", "dynamic", "llama3"))
def test_kernels(name: str, place: str) -> None:
    parameters = {**PARAMETERS[name], "max_position_embeddings": 16, "rope_theta": 100.0}
    if name == "longrope":
        parameters |= {"original_max_position_embeddings": 8, "short_factor": [1.0] * 4, "long_factor": [2.0, 3, 4, 5]}
    scaling = read(parameters, 8, 10000.0)
    with running_on(place) as device:
        for positions in (0, 3, 20, torch.tensor([[30, 2, 9]]), torch.tensor(5), torch.empty(0, 3)):
            given = positions if isinstance(positions, int) else positions.to(device)
            flat = torch.arange(positions) if isinstance(positions, int) else positions
            length = int(flat.max()) + 1 if flat.numel() else 0
            angles = flat.double()[..., None] * rates(scaling.at(length, 8), 8, torch.device("cpu"))
            for dtype in (torch.float32, torch.bfloat16):
                tables = rope_table(given, 8, scaling=parameters, dtype=dtype, device=device)
                for table, wanted in zip(tables, (angles.cos(), angles.sin()), strict=True):
                    wanted = (scaling.attention_factor * wanted).float().to(dtype)
                    torch.testing.assert_close(table.cpu(), wanted, rtol=0, atol=2e-7)


def test_the_old_names_and_plain_parameters() -> None:
    plain = rope_table(9, 16, base=500.0)
    for parameters in (
        {"type": "default", "rope_theta": 500.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ):
        found = rope_table(9, 16, base=500.0, scaling=parameters)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    linear = rope_table(9, 16, scaling={"type": "linear", "rope_type": "linear", "factor": 4})
    assert all(torch.equal(a, b) for a, b in zip(linear, rope_table(9, 16, scaling=0.25), strict=True))


def test_deepseek_yarn() -> None:
    """The formula of DeepSeek's modules, whose magnitudes are m(factor, mscale) / m(factor, mscale_all_dim)."""
    dim, base, length, factor = 64, 10000.0, 4096, 40.0
    mscale, mscale_all_dim = 0.707, 0.5
    f = base ** (-torch.arange(0, dim, 2).double() / dim)
    low, high = (dim * torch.log(torch.tensor(length / (2 * torch.pi * beta))).item() for beta in (32, 1))
    scale = 2 * torch.log(torch.tensor(base)).item()
    low, high = max(int(low / scale // 1), 0), min(int(-(-high / scale // 1)), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low)).double().clamp(0, 1)
    angles = torch.arange(100).double()[:, None] * (f * (1 - ramp) + f / factor * ramp)
    m = [0.1 * a * torch.log(torch.tensor(factor)).item() + 1 for a in (mscale, mscale_all_dim)]
    scaling = {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length, "beta_fast": 32,
        "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale_all_dim,
    }  # fmt: skip
    for table, wanted in zip(rope_table(100, dim, scaling=scaling), (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(table.double(), m[0] / m[1] * wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ("dynamic", "longrope", "yarn"))
def test_gradients_and_compile(name: str) -> None:
    parameters = {**PARAMETERS[name], "max_position_embeddings": 16}
    positions = torch.tensor([0.0, 3.0, 30.0], requires_grad=True)
    rope_table(positions, 64, scaling=parameters)[1].sum().backward()
    assert positions.grad.isfinite().all() and positions.grad.abs().sum() > 0

    def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_table(positions, 64, scaling=parameters)

    given = torch.tensor([5, 600])
    compiled = torch.compile(tables, backend="eager", fullgraph=True)(given)
    assert all(torch.equal(a, b) for a, b in zip(compiled, tables(given), strict=True))


BAD: dict[str, tuple[Any, str]] = {
    "no kind": ({"factor": 2.0}, "scaling has no 'rope_type'; expected 'rope_type'"),
    "nested": ({"full_attention": {}}, r"parameters of one kind of layer, as in scaling\['full_attention'\]"),
    "unknown kind": ({"rope_type": "axial"}, r"scaling\['rope_type'\] is 'axial'; expected one of default, linear"),
    "a number as kind": ({"rope_type": 3}, r"scaling\['rope_type'\] is 3; expected one of"),
    "two kinds": ({"rope_type": "linear", "type": "yarn"}, r"scaling\['type'\] is 'yarn'; expected 'linear'"),
    "unknown key": ({**YARN, "fast": 1, 3: 4}, "scaling has 'fast', 3 with rope_type 'yarn'; expected no keys but"),
    "key of another": ({"rope_type": "linear", "factor": 2, "mscale": 1}, "scaling has 'mscale' with rope_type"),
    "no factor": ({"rope_type": "linear"}, "scaling has no 'factor'; expected it with rope_type 'linear'"),
    "no yarn factor": ({**YARN, "factor": None}, "scaling has no 'factor'; expected it with rope_type 'yarn'"),
    "no ratio": (LONG, "scaling has no 'factor'; expected it with rope_type 'longrope'"),
    "no length": ({"rope_type": "dynamic", "factor": 2}, "scaling has no 'max_position_embeddings'; expected it"),
    "no original": ({"rope_type": "yarn", "factor": 2}, "scaling has no 'original_max_position_embeddings'"),
    "factor": ({"rope_type": "linear", "factor": "2"}, r"scaling\['factor'\] is '2'; expected a number"),
    "factor 0": ({"rope_type": "linear", "factor": 0}, r"scaling\['factor'\] is 0; expected a finite number above 0"),
    "nan": ({"rope_type": "linear", "factor": float("nan")}, r"scaling\['factor'\] is nan; expected a finite number"),
    "theta": ({"rope_type": "default", "rope_theta": -1}, r"scaling\['rope_theta'\] is -1; expected a finite number"),
    "length": ({**YARN, "original_max_position_embeddings": 4.5}, r"original_max_position_embeddings'\] is .*integer"),
    "short length": ({**YARN, "original_max_position_embeddings": 1}, r"embeddings'\] is 1; expected 2 or more"),
    "truncate": ({**YARN, "truncate": None}, r"scaling\['truncate'\] is None; expected True or False"),
    "yarn's base": ({**YARN, "rope_theta": 1.0}, "base is 1.0; expected more than 1 with rope_type 'yarn'"),
    "factors": ({**LONG, "long_factor": [1.0] * 31}, r"'long_factor'\] has 31 numbers; expected dim / 2, which is 32"),
    "no list": ({**LONG, "short_factor": 2.0}, r"scaling\['short_factor'\] is a float; expected a list of 32 numbers"),
    "in a list": ({**LONG, "short_factor": [1.0] * 31 + [0]}, r"scaling\['short_factor'\]\[31\] is 0; expected"),
    "llama3": (
        {**PARAMETERS["llama3"], "high_freq_factor": 1.0},
        r"scaling\['high_freq_factor'\] is 1.0; expected more than 'low_freq_factor', 1.0",
    ),
    "neither": ("yarn", "scaling is 'yarn'; expected a number"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name: str) -> None:
    scaling, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        rope_table(4, 64, scaling=scaling)


def test_two_bases_and_two_elements() -> None:
    with pytest.raises(ArgumentError, match=r"base is 500.0; expected 1000.0, which is scaling\['rope_theta'\]"):
        rope_table(4, 8, base=500.0, scaling={"rope_type": "default", "rope_theta": 1000.0})
    dynamic = {**PARAMETERS["dynamic"], "max_position_embeddings": 16}
    with pytest.raises(ArgumentError, match="dim is 2; expected 4 or more with rope_type 'dynamic'"):
        rope_table(4, 2, scaling=dynamic)
    assert rtkernels.rope_table(4, 4, scaling=dynamic)[0].shape == (4, 2)


@pytest.mark.parametrize("dynamic", (False, True))
def test_tables_are_compiled_without_warnings(dynamic: bool) -> None:
    """Also for a number of positions that is a symbol, and for bases that are."""

    def tables(x: torch.Tensor, base: float) -> tuple[torch.Tensor, ...]:
        scaled = rope_table(x.shape[0], 8, scaling=0.5)
        return *rope_table(x.shape[0], 8, base=base, device="cpu"), *scaled

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(tables, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for rows, base in ((5, 1e4), (7, 1e4), (7, 5e5)):
            for got, wanted in zip(compiled(torch.empty(rows), base), tables(torch.empty(rows), base), strict=True):
                assert torch.equal(got, wanted)
