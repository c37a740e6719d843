"""Hybrid models with linear layers: everything replaced or a reason, results, gradients, decoding, packed sequences."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.20")

from bench.zoo import build
from rtkernels import models
from rtkernels.models import mixers

# Class, modules that call our ops, and parts of the reasons why others do not.
MODELS: dict[str, tuple[str, list[str]]] = {
    "Qwen3NextForCausalLM": ("Qwen3NextGatedDeltaNet", []),
    "Qwen3_5ForCausalLM": ("Qwen3_5GatedDeltaNet", []),
    "OlmoHybridForCausalLM": ("OlmoHybridGatedDeltaNet", []),
    "KimiLinearForCausalLM": ("KimiLinearDeltaAttention", []),
    "Mamba2ForCausalLM": ("Mamba2Mixer", []),
    "NemotronHForCausalLM": ("NemotronHMamba2Mixer", []),
    "BambaForCausalLM": ("BambaMixer", []),
    "FalconH1ForCausalLM": ("FalconH1Mixer", []),
    "GraniteMoeHybridForCausalLM": ("GraniteMoeHybridMambaLayer", []),
}


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build.build(name).model.bfloat16()


def patched(model: nn.Module) -> models.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return models.patch(model)


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).detach().norm() / b.float().detach().norm())


def step(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(name: str) -> None:
    """In bf16, where our ops round once: not farther from fp32 than the model itself, and half as far again."""
    model, tokens = small(name).train(), ids(2, 70)
    exact_loss, exact = step(copy.deepcopy(model).float(), tokens)
    own_loss, own = step(copy.deepcopy(model), tokens)
    report = patched(model)
    mixer, reasons = MODELS[name]
    assert {site.module for site in report.sites if site.kind == "mixer" and site.reason is None} == {mixer}, report
    left = [site for site in report.left_alone if site.kind != "loss"]
    assert len(left) == len(reasons) and all(r in s.reason for r, s in zip(reasons, left, strict=True)), report
    loss, grads = step(model, tokens)
    assert abs(loss - exact_loss) <= 1.5 * abs(own_loss - exact_loss) + 2e-3 * exact_loss
    assert grads.keys() == exact.keys()
    largest = max(float(g.norm()) for g in exact.values())
    for key, want in exact.items():
        if any(part in key for part in ("experts", ".gate.", "router")):  # a choice of experts may flip
            continue
        allowed = 1.5 * float((own[key].float() - want).norm()) + 0.02 * float(want.norm()) + 2e-3 * largest
        assert float((grads[key].float() - want).norm()) <= allowed, key


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_decoding(name: str) -> None:
    """Logits of each step of ``generate`` are those of the unpatched model behind the same tokens."""
    model, tokens = small(name).eval(), ids(2, 9)
    unpatched = copy.deepcopy(model)
    patched(model)
    found = model.generate(
        tokens, max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with torch.no_grad():
        want = unpatched.float()(found.sequences).logits[:, tokens.shape[1] - 1 : -1]
    got = torch.stack(found.logits, 1)
    assert distance(got, want) < 0.03
    gap = want.topk(2, -1).values.diff(dim=-1).abs().squeeze(-1)
    same = got.argmax(-1) == want.argmax(-1)
    assert bool((same | (gap < 0.05 * want.abs().amax(-1))).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Mamba2ForCausalLM", "KimiLinearForCausalLM"])
def test_packed_sequences(name: str, dtype: torch.dtype) -> None:
    """Linear layers keep packed sequences apart, for which transformers needs fla or mamba_ssm; in fp32 one by one."""
    model = small(name).to(dtype).eval()
    patched(model)
    (layer,) = [m for m in model.modules() if type(m).__name__ == MODELS[name][0]][:1]
    width = next(m for m in layer.modules() if isinstance(m, nn.Linear)).in_features
    x = torch.randn(1, 80, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    starts = torch.tensor([0, 11, 80], dtype=torch.int32)
    with torch.no_grad():
        whole = layer(x, cu_seq_lens_q=starts)
        parts = torch.cat([layer(x[:, :11]), layer(x[:, 11:])], 1)
        assert distance(layer(x), parts) > 0.05
    assert distance(whole, parts) < (0.01 if dtype == torch.bfloat16 else 1e-5)
    if name == "Mamba2ForCausalLM":
        index = torch.cat((torch.zeros(11), torch.ones(69))).int().unsqueeze(0)
        with torch.no_grad():
            assert torch.equal(layer(x, seq_idx=index), whole)


def test_packed_sequences_of_other_sizes() -> None:
    """Calls that ours does not take: heads of 12 elements; lengths 0 and 1, a state before, tokens of no sequence."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    rule = mixers._delta_rule(qwen.torch_chunk_gated_delta_rule)
    generator = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    state = leaf(4, 2, 12, 12)
    tensors = (*(leaf(1, 30, 2, 12) for _ in range(3)), leaf(1, 30, 2), leaf(1, 30, 2))
    starts = torch.tensor([0, 7, 7, 8, 25], dtype=torch.int32)

    def run(*given: Tensor, **options) -> tuple[Tensor, Tensor]:
        *rows, decay, strength = given
        return rule(
            *rows, g=-decay.square(), beta=strength.sigmoid(), output_final_state=True, use_qk_l2norm_in_kernel=True,
            **options,
        )  # fmt: skip

    out, final = run(*tensors, cu_seqlens=starts, initial_state=state)
    assert out.shape == (1, 30, 2, 12) and not out[:, 25:].any() and torch.equal(final[1], state[1])
    grads = torch.autograd.grad(out.sum() + final.square().sum(), (*tensors, state))
    total = state[1].square().sum()
    for i, (first, end) in enumerate(pairwise([0, 7, 7, 8, 25])):
        if end > first:
            y, last = run(*(t[:, first:end] for t in tensors), initial_state=state[i : i + 1])
            assert distance(out[:, first:end], y) < 1e-6 and distance(final[i : i + 1], last) < 1e-6
            total = total + y.sum() + last.square().sum()
    for got, want in zip(grads, torch.autograd.grad(total, (*tensors, state)), strict=True):
        assert distance(got, want) < 1e-5


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM"])
@pytest.mark.parametrize("before", [0, 9])
def test_packed_arguments_behind_a_cache(name: str, before: int) -> None:
    """The cache puts earlier rows, or zeros, before those that `cu_seqlens` counts: the model's own forward runs."""
    model, tokens = small(name).eval(), ids(1, before + 3)
    unpatched = copy.deepcopy(model)
    patched(model)
    found: list[Tensor | str] = []
    for one in (model, unpatched):
        with torch.no_grad():
            cache = one(tokens[:, :before], use_cache=True).past_key_values if before else None
            starts = torch.tensor([0, 3], dtype=torch.int32)
            try:
                result = one(tokens[:, before:], use_cache=True, cu_seq_lens_q=starts, past_key_values=cache)
                found.append(result.logits)
            except ValueError as error:  # without fla, some models refuse packed sequences
                found.append(str(error))
    if name.startswith("Qwen"):
        assert found[0] == found[1] and "packed sequences" in found[0]
    else:
        assert distance(*found) < 0.03


def test_unpatched_again() -> None:
    model = small("Mamba2ForCausalLM").eval()
    tokens = ids(2, 20)
    want = model(tokens).logits
    patched(model)
    assert not torch.equal(model(tokens).logits, want)
    models.unpatch(model)
    assert torch.equal(model(tokens).logits, want)


def test_switched_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = models.patch(small("Mamba2ForCausalLM"), mixer=False)
    assert "mixer" not in report.asked and not report.replaced["mixer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_short_convolutions(dtype: torch.dtype) -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    model, tokens = Lfm2ForCausalLM(config).to(dtype).eval(), ids(2, 9)
    want, drawn = model(tokens).logits, model.generate(tokens, max_new_tokens=5, do_sample=False)
    assert patched(model).replaced["mixer"] == 1
    assert distance(model(tokens).logits, want) < (1e-5 if dtype == torch.float32 else 0.02)
    if dtype == torch.float32:
        assert torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), drawn)
