"""A Qwen3 of transformers whose attention is the vLLM backend's: prompts in chunks, mixed batches, decoding, the same
tokens as transformers' ``generate()``.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at

from integrations import fake_vllm

transformers = pytest.importorskip("transformers")
PAGE, PAGES = 16, 4  # of a request
PROMPTS, STEPS = (5, 21, 9), 6


class Server:
    """A scheduler of three requests, as small as it can be: it packs their tokens into one row for the model."""

    def __init__(self, model: Any, device: str) -> None:
        self.model, self.device, config = model, device, model.config
        attention = importlib.import_module("rtkernels.integrations.vllm_attention")
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        layers = range(config.num_hidden_layers)
        self.layers = [attention.RtkernelsImpl(heads, width, width**-0.5, kv_heads) for _ in layers]
        self.caches = [
            torch.zeros(3 * PAGES, kv_heads, PAGE, 2 * width, dtype=model.dtype, device=device) for _ in layers
        ]
        self.builder = attention.RtkernelsMetadataBuilder(None, [], None, torch.device(device))
        self.pages = torch.randperm(3 * PAGES, device=device).int().view(3, PAGES)
        self.known, self.scales = [0, 0, 0], fake_vllm.layer_scales(device=device)
        transformers.AttentionInterface.register("vllm_backend", self.attend)
        model.set_attn_implementation("vllm_backend")

    def attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        impl, cache = self.layers[module.layer_idx], self.caches[module.layer_idx]
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        impl.do_kv_cache_update(self.scales, k, v, cache, self.slots)
        output = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
        return impl.forward(self.scales, q, k, v, cache, self.metadata, output).unsqueeze(0), None

    def step(self, new: list[list[int]]) -> list[torch.Tensor]:
        """Feed tokens to the requests and return the logits after the last one of each."""
        positions, slots, starts = [], [], [0]
        for request, tokens in enumerate(new):
            for position in range(self.known[request], self.known[request] + len(tokens)):
                positions.append(position)
                slots.append(int(self.pages[request, position // PAGE]) * PAGE + position % PAGE)
            self.known[request] += len(tokens)
            starts.append(len(slots))
        self.slots = torch.tensor(slots, device=self.device)
        common = fake_vllm.common_metadata(starts, self.known, self.pages, self.slots, device=self.device)
        self.metadata = self.builder.build(0, common)
        ids = torch.tensor([[t for tokens in new for t in tokens]], device=self.device)
        with torch.no_grad():
            logits = self.model(
                input_ids=ids, position_ids=torch.tensor([positions], device=self.device), use_cache=False
            ).logits[0]
        return [logits[end - 1].float() for end in starts[1:]]


@at("cpu", "cuda")
def test_the_same_tokens_as_transformers(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    fake_vllm.install(monkeypatch)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    with running_on(place) as device:
        model = transformers.Qwen3ForCausalLM(config).to(device, torch.float16).eval()
        prompts = [torch.randint(0, 97, (length,)).tolist() for length in PROMPTS]
        wanted, margins = [], []
        for prompt in prompts:
            result = model.generate(
                torch.tensor([prompt], device=device), max_new_tokens=STEPS, do_sample=False, output_scores=True,
                return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            wanted.append(result.sequences[0, len(prompt) :].tolist())
            best = [score[0].float().topk(2).values for score in result.scores]
            margins.append([float(b[0] - b[1]) for b in best])
        server, compared = Server(model, device), 0
        # The first prompt whole, the second in three chunks beside decoding steps of the first, the third late.
        chunks = [[prompts[0], prompts[1][:7], []], [None, prompts[1][7:20], []], [None, prompts[1][20:], prompts[2]]]
        got: list[list[int]] = [[], [], []]
        whole = [False, False, False]
        while min(map(len, got)) < STEPS:
            plan = chunks.pop(0) if chunks else [None, None, None]
            fed = [got[r][-1:] if tokens is None else tokens for r, tokens in enumerate(plan)]
            logits = server.step(fed)
            for r, tokens in enumerate(plan):
                whole[r] = whole[r] or server.known[r] >= len(prompts[r])
                if (tokens is None or tokens) and whole[r] and len(got[r]) < STEPS:
                    number = len(got[r])
                    if int(logits[r].argmax()) != wanted[r][number]:
                        assert margins[r][number] < 0.05, (r, number)
                    else:
                        compared += 1
                    got[r].append(wanted[r][number])
                elif whole[r] and len(got[r]) >= STEPS:
                    got[r] = [*got[r], wanted[r][-1]]
        assert compared >= 3 * STEPS - 2
