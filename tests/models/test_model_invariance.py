"""A whole patched model with batch invariance: rollouts, in any batch, have the bits of the trainer's forward pass."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.generation import programs
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels import models
from rtkernels.models.mask_form import MaskForm

transformers = pytest.importorskip("transformers", minversion="5.0")
VOCABULARY = 96
PROMPTS = ([88, 2], [9, 9, 31, 70, 12, 1])
NEW = 3


def _model(device: str) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device).to(torch.bfloat16).eval()
    models.patch(model, attention=True, fused_layers=True)
    return model


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return rtkernels.log_softmax(logits.float()).gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def _rollout(model: torch.nn.Module, prompt: list[int], device: str) -> tuple[list[int], Tensor]:
    """Sample token by token over a cache; return all tokens and the log-probabilities of the new ones."""
    cache, tokens, found = None, torch.tensor([prompt], device=device), []
    fed = tokens
    for _ in range(NEW):
        out = model(fed, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        fed = logits.float().topk(3).indices[:, len(found) % 3 : len(found) % 3 + 1]
        found.append(_logprobs(logits, fed[:, 0]))
        tokens = torch.cat([tokens, fed], 1)
    return tokens[0].tolist(), torch.cat(found)


def _trained(model: torch.nn.Module, sequences: list[list[int]], device: str) -> list[Tensor]:
    """Return the trainer's log-probabilities of all tokens but the first, of sequences in one padded batch."""
    longest = max(map(len, sequences))
    ids = torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=device)
    mask = torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences], device=device)
    logits = model(ids, attention_mask=mask, use_cache=False).logits
    found = _logprobs(logits[:, :-1], ids[:, 1:])
    return [row[: len(s) - 1] for row, s in zip(found, sequences, strict=True)]


@pytest.mark.slow  # a minute or two in the emulator; a run on a GPU has it
@at("sm_80", "sm_90", "cuda")
def test_rollouts_have_the_trainers_bits(place: str) -> None:
    with running_on(place) as device, rtkernels.batch_invariant(2):
        model = _model(device)
        rollouts = [_rollout(model, prompt, device) for prompt in PROMPTS]
        sequences = [tokens for tokens, _ in rollouts]
        for batch in (sequences, sequences[1:]):
            trained = _trained(model, batch, device)
            for tokens, found in zip(batch, trained, strict=True):
                rolled = rollouts[sequences.index(tokens)][1]
                assert torch.equal(found[-NEW:].detach(), rolled)
                assert float((rolled.exp() * (rolled - found[-NEW:].detach())).sum()) == 0.0  # their divergence
        trained[0].sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@at("sm_80", "sm_90", "cuda")
def test_micro_batches_leave_the_gradients_of_one_batch(place: str) -> None:
    """Level 3: all parameters of a model, in 1, 2 and 4 micro-batches of 128 rows and more."""
    with running_on(place) as device, rtkernels.batch_invariant(3):
        model = _model(device)
        ids = torch.randint(VOCABULARY, (4, 128), generator=torch.Generator().manual_seed(1)).to(device)
        tokens = torch.tensor(4 * 127, device=device)
        found: list[list[Tensor]] = []
        for parts in (1, 2, 4):
            for parameter in model.parameters():
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            for some in ids.chunk(parts):
                model(some, labels=some, use_cache=False, num_items_in_batch=tokens).loss.backward()
            found.append([parameter.main_grad for parameter in model.parameters()])
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(total.any() and total.isfinite().all() for total in found[0])
        for totals in found[1:]:
            assert all(torch.equal(one, other) for one, other in zip(found[0], totals, strict=True))


@at("sm_80", "sm_90", "cuda")
def test_padding_after_long_sequences(place: str) -> None:
    """More keys than a tile has: limits of keys must not lead to kernels with other tiles."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 140, heads, 64, generator=generator).bfloat16() for heads in (2, 1, 1))
    with running_on(place) as device, rtkernels.batch_invariant(1):
        q, k, v = (t.to(device) for t in (q, k, v))
        form = MaskForm(2, 140, 140, q.device, ends=[130, 140])
        alone = rtkernels.attention(*(t[:1, :130] for t in (q, k, v)), causal=True)
        assert torch.equal(form.attend(q, k, v)[:1, :130], alone)


def test_generate_keeps_steps_of_each_level_apart() -> None:
    model = _model("cpu")
    ids = torch.tensor([PROMPTS[1]])
    for level in (0, 1, 0, 1):
        with rtkernels.batch_invariant(level):
            model.generate(ids, max_new_tokens=6, do_sample=False)
    assert len(programs(model)) == 2
