"""``generate()`` of patched hybrid models: layers with keys beside layers with states, in steps over our cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from support.generation import padded, programs
from support.tiny_models import tokens
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.17")

from bench.zoo import build
from rtkernels import models
from rtkernels.models.generation import loop
from rtkernels.models.generation.cache import FixedCache, states_of

pytestmark = pytest.mark.one_in(3)  # whole models: a second each

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {},
    "Qwen3_5ForCausalLM": {},
    "OlmoHybridForCausalLM": {},
    "KimiLinearForCausalLM": {},
    "NemotronHForCausalLM": {},
    "FalconH1ForCausalLM": {},  # both in one layer
    "Lfm2ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},  # no recurrent states
    "GraniteMoeHybridForCausalLM": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "BambaForCausalLM": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
}
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def small(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = build.build(name, changes=MODELS[name]).model.to(dtype).eval()
    model.config.use_cache = model.generation_config.use_cache = True
    return model


def patched(model: nn.Module) -> models.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return models.patch(model, attention=True)


@pytest.mark.parametrize("rows", ["one", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(name: str, rows: str) -> None:
    """Twice: the second call finds the states of the first in the cache that it uses again."""
    model = small(name)
    prompt, options = (tokens(1, 9), OPTIONS) if rows == "one" else (tokens(3, 9), {**OPTIONS, **padded()})
    wanted = model.generate(prompt, max_new_tokens=12, **options)
    report = patched(model)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, max_new_tokens=12, **options), wanted)
    (program,) = programs(model)
    assert program.count == 22 and not report.not_captured
    assert states_of(program.cache)


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "FalconH1ForCausalLM"])
def test_capacities_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "FIRST_CAPACITY", 16)
    monkeypatch.setattr(loop, "SOON", 1)
    model, prompt = small(name), tokens(2, 9)
    wanted = model.generate(prompt, max_new_tokens=30, **OPTIONS)
    report = patched(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=30, **OPTIONS), wanted)
    assert [program.cache.capacity for program in programs(model)] == [16, 32, 64] and not report.not_captured


def test_sampling() -> None:
    model, prompt, found = small("Qwen3NextForCausalLM"), tokens(2, 9), []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(model.generate(prompt, max_new_tokens=12, **{**OPTIONS, "do_sample": True, "top_k": 20}))
        patched(model)
    assert torch.equal(*found) and programs(model)


def test_states_that_are_not_loaded_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is compared with transformers', which then decodes."""
    model, prompt = small("Qwen3NextForCausalLM"), tokens(2, 9)
    wanted = model.generate(prompt, max_new_tokens=6, **OPTIONS)
    report = patched(model)
    monkeypatch.setattr(FixedCache, "set_states", lambda *_: None)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, **OPTIONS), wanted)
    assert any("gives other logits" in reason for reason in report.not_captured)


def test_a_model_without_keys_is_left_to_transformers() -> None:
    model, prompt = small_without_keys(), tokens(2, 9)
    wanted = model.generate(prompt, max_new_tokens=6, **OPTIONS)
    patched(model)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, **OPTIONS), wanted)


def small_without_keys() -> nn.Module:
    torch.manual_seed(0)
    model = build.build("Mamba2ForCausalLM").model.float().eval()
    model.config.use_cache = model.generation_config.use_cache = True
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [f"{name}ForCausalLM" for name in ("Qwen3Next", "KimiLinear", "FalconH1", "Lfm2")])
def test_steps_are_captured(name: str, dtype: torch.dtype) -> None:
    """A replay computes what a plain step computes, and so do later calls."""
    model, prompt = small(name, dtype).cuda(), tokens(2, 9).cuda()
    before = model.generate(prompt, max_new_tokens=24, **OPTIONS)
    report = patched(model)
    found: list[Tensor] = [model.generate(prompt, max_new_tokens=24, **OPTIONS) for _ in range(2)]
    assert report.captures == 1 and not report.not_captured
    assert torch.equal(*found)
    if dtype == torch.float32:
        assert torch.equal(found[0], before)
    plain = torch.cat([model.generate(prompt, max_new_tokens=n, **OPTIONS)[:, -1:] for n in (1, 2, 3)], 1)
    assert torch.equal(plain, found[0][:, 9:12])  # too few steps for a graph
