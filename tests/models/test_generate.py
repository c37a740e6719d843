"""generate() with our attention: one new token reads dynamic and static caches by attention_decode, same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rtkernels
from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

from support.tiny_models import build, tokens

NEW = 6


def generated(model: nn.Module, prompt: Tensor, **options) -> Tensor:
    return model.generate(prompt, max_new_tokens=NEW, do_sample=False, **options)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    calls, op = [], rtkernels.attention_decode
    monkeypatch.setattr(
        rtkernels, "attention_decode", lambda q, *a, **o: calls.append(tuple(q.shape)) or op(q, *a, **o)
    )
    return calls


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_same_tokens(kind: str, cache: str, decoded: list) -> None:
    model = build(kind).to(torch.float16).eval()
    prompt = tokens(2, 9)
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    wanted = generated(model, prompt, **options)
    models.patch(model, attention=True, fused_layers=kind == "qwen3")
    assert torch.equal(generated(model, prompt, **options), wanted)
    layers = 1 if (kind, cache) == ("gpt_oss", "static") else 2  # in a static cache its window is a mask
    assert len(decoded) >= layers * (NEW - 1) and set(decoded) == {(2, 1, 4, 16)}


def test_padding_is_removed_before_decoding(decoded: list) -> None:
    model = build("qwen3").to(torch.float16).eval()
    prompt, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    wanted = generated(model, prompt, attention_mask=mask)
    models.patch(model, attention=True)
    assert torch.equal(generated(model, prompt, attention_mask=mask), wanted) and set(decoded) == {(2, 1, 4, 16)}


def test_fp32_goes_to_torch(decoded: list) -> None:
    model = build("qwen3").eval()
    wanted = generated(model, tokens(2, 9), cache_implementation="static")
    models.patch(model, attention=True)
    assert torch.equal(generated(model, tokens(2, 9), cache_implementation="static"), wanted) and not decoded


@pytest.mark.gpu
def test_a_step_can_be_captured() -> None:
    """A step over a static cache reads nothing on the host: one graph serves every length."""
    from transformers import StaticCache

    model = build("qwen3", head_dim=64, hidden_size=256).to("cuda", torch.float16).eval()
    prompt = tokens(2, 9).cuda()
    models.patch(model, attention=True, fused_layers=True)
    wanted = generated(model, prompt)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        first = model(input_ids=prompt, past_key_values=cache).logits[:, -1].argmax(-1)
        ids, position = first[:, None].clone(), torch.full((2, 1), 9, device="cuda")

        def step() -> None:
            out = model(input_ids=ids, past_key_values=cache, position_ids=position)
            ids.copy_(out.logits[:, -1].argmax(-1)[:, None])
            position.add_(1)

        found = [first[:, None].clone()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles
            found.append(ids.clone())
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(NEW - 2):
            graph.replay()
            found.append(ids.clone())
    assert torch.equal(torch.cat(found, 1), wanted[:, 9:])
