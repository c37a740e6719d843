"""A DeepSeek-V3 of transformers with the vLLM plugin's latent attention and experts: prompts in chunks, mixed batches,
decoding, the same tokens as transformers' ``generate()``.
"""

from __future__ import annotations

import copy
import importlib
from types import MethodType
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor, nn
from torch.nn import functional as F

import rtkernels
from integrations import fake_vllm, fake_vllm_fp8, fake_vllm_mla

transformers = pytest.importorskip("transformers")
PAGE, PAGES = 16, 4  # of a request
PROMPTS, STEPS = (5, 21, 9), 5


class Server:
    """A scheduler of three requests that puts those with one new token first, as vLLM does for latent attention."""

    def __init__(self, model: Any, device: str, quantized: bool = False) -> None:
        self.model, self.device, config = model, device, model.config
        mla, moe = (importlib.import_module(f"rtkernels.integrations.vllm_{name}") for name in ("mla", "moe"))
        dims = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        heads, width = config.num_attention_heads, dims[0] + dims[2]
        scale = model.model.layers[0].self_attn.scaling
        self.backend = mla.RtkernelsMLAPrefillBackend(heads, scale, *dims, None)
        assert self.backend.supports_out()
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.cache = torch.zeros(3 * PAGES, PAGE, width, dtype=model.dtype, device=device)
            attention.impl = mla.RtkernelsMLAImpl(
                heads, width, scale, 1, None, None, "auto", None, fake_vllm.AttentionType.DECODER, None,
                q_lora_rank=config.q_lora_rank, kv_lora_rank=dims[0], qk_nope_head_dim=dims[1],
                qk_rope_head_dim=dims[2], qk_head_dim=dims[1] + dims[2], v_head_dim=dims[3],
                kv_b_proj=lambda x, linear=attention.kv_b_proj: (linear(x), None),
            )  # fmt: skip
            attention.forward = MethodType(self.attend, attention)
            if hasattr(layer.mlp, "experts"):
                _serve_experts(layer.mlp.experts, moe, quantized)
        if quantized:
            _serve_linear_layers(model)
        self.pages, self.known = torch.randperm(3 * PAGES, device=device).int().view(3, PAGES), [0, 0, 0]

    def attend(self, module: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, **__: Any) -> Any:
        """The forward of ``DeepseekV3Attention`` around vLLM's backend."""
        modeling = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
        x, impl = hidden_states, module.impl
        q = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(x))).view(1, x.shape[1], impl.num_heads, -1)
        q, q_rot = q.transpose(1, 2).split((impl.qk_nope_head_dim, impl.qk_rope_head_dim), -1)
        latent, k_rot = module.kv_a_proj_with_mqa(x).split((impl.kv_lora_rank, impl.qk_rope_head_dim), -1)
        latent = module.kv_a_layernorm(latent)[0]
        q_rot, k_rot = modeling.apply_rotary_pos_emb_interleave(q_rot, k_rot.unsqueeze(1), *position_embeddings)
        q = torch.cat((q, q_rot), -1)[0].transpose(0, 1)
        up = module.kv_b_proj.dense if hasattr(module.kv_b_proj, "dense") else module.kv_b_proj.weight
        out = fake_vllm_mla.attend(impl, q, latent, k_rot[0, 0], module.cache, self.given, up)
        return module.o_proj(out.unsqueeze(0)), None

    def step(self, new: list[list[int]]) -> list[Tensor | None]:
        """Feed tokens to the requests and return the logits after the last one of each."""
        order = sorted((r for r in range(3) if new[r]), key=lambda r: len(new[r]) > 1)
        ids, positions, slots, ends = [], [], [], []
        for r in order:
            for position in range(self.known[r], self.known[r] + len(new[r])):
                positions.append(position)
                slots.append(int(self.pages[r, position // PAGE]) * PAGE + position % PAGE)
            ids += new[r]
            ends.append(len(ids))
            self.known[r] += len(new[r])
        self.given = fake_vllm_mla.metadata(
            self.backend, [len(new[r]) for r in order], [self.known[r] for r in order], self.pages[order],
            torch.tensor(slots, device=self.device), PAGE,
        )  # fmt: skip
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([ids], device=self.device), use_cache=False,
                position_ids=torch.tensor([positions], device=self.device),
            ).logits[0]  # fmt: skip
        assert logits.isfinite().all()
        return [logits[ends[order.index(r)] - 1].float() if r in order else None for r in range(3)]


def _serve_experts(experts: Any, moe: Any, quantized: bool) -> None:
    weights = experts.gate_up_proj.detach(), experts.down_proj.detach()
    config = fake_vllm_fp8.QuantConfig()
    if quantized:
        pairs = [[rtkernels.quantize_fp8(m, granularity="block") for m in w] for w in weights]
        weights = tuple(torch.stack([codes for codes, _ in pair]) for pair in pairs)
        config = fake_vllm_fp8.QuantConfig(*(torch.stack([s for _, s in pair]) for pair in pairs), [128, 128])
    layer = moe.RtkernelsExperts(fake_vllm_fp8.MoEConfig(), config)

    def forward(self: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        kind = "group" if quantized else ""
        return fake_vllm_fp8.run_experts(layer, x, *weights, probs.float(), ids, kind=kind)

    experts.forward = MethodType(forward, experts)


def _serve_linear_layers(model: Any) -> None:
    """Let the plugin's quantisation method do all linear layers but the head."""
    fp8 = importlib.import_module("rtkernels.integrations.vllm_fp8")
    config = fp8.RtkernelsFp8Config(weight_block_size=[128, 128])
    for name, linear in [*model.model.named_modules()]:
        if isinstance(linear, nn.Linear):
            layer = fake_vllm_fp8.LinearBase()
            method = config.get_quant_method(layer, name)
            method.create_weights(layer, linear.in_features, [linear.out_features], 0, 0, model.dtype)
            method.fp8_linear.config.out_dtype = model.dtype
            codes, scale = rtkernels.quantize_fp8(linear.weight.detach(), granularity="block")
            fake_vllm_fp8.replace_parameter(layer, "weight", codes)
            fake_vllm_fp8.replace_parameter(layer, "weight_scale_inv", scale)
            linear.dense = _dequantized(codes, scale).to(model.dtype)
            linear.forward = lambda x, method=method, layer=layer: method.apply(layer, x)


def _model(device: str, real: bool, quantized: bool) -> Any:
    """Return a small model. If its layers are quantised, all experts are chosen, because rounding may change a choice,
    and weights are small: with sharp softmaxes, rounding changes what is attended to.
    """
    torch.manual_seed(0)
    experts, groups, top_k = (4, 1, 4) if quantized else (8, 2, 3)
    rank, rope, nope = (512, 64, 128) if real else (64, 16, 32)
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=experts,
        num_experts_per_tok=top_k, n_group=groups, topk_group=1, first_k_dense_replace=1, q_lora_rank=64,
        kv_lora_rank=rank, qk_rope_head_dim=rope, qk_nope_head_dim=nope, v_head_dim=nope, max_position_embeddings=128,
        initializer_range=0.06 if quantized else 0.15,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "experts." in name:  # transformers leaves them uninitialised in some versions
            nn.init.normal_(parameter, std=0.06 if quantized else 0.1)
    model = model.to(device, torch.float16).eval()
    if quantized:  # transformers computes with the weights as they are in fp8
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "lm_head" not in name and "gate.weight" not in name:
                for matrix in parameter.data.view(-1, *parameter.shape[-2:]):
                    matrix.copy_(_dequantized(*rtkernels.quantize_fp8(matrix, granularity="block")))
    return model


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
    return codes.float() * wide


def _generated(model: Any, prompts: list[list[int]], device: str) -> tuple[list[list[int]], list[list[Tensor]]]:
    tokens, scores = [], []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt], device=device), max_new_tokens=STEPS, do_sample=False, output_logits=True,
            return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        tokens.append(result.sequences[0, len(prompt) :].tolist())
        scores.append([score[0].float() for score in result.logits])
    return tokens, scores


def _coded(x: Tensor) -> Tensor:
    """Return what codes of groups of 128 leave of activations."""
    codes, scale = rtkernels.quantize_fp8(x.reshape(-1, x.shape[-1]).float().cpu(), granularity="group")
    wide = scale.double().repeat_interleave(128, 1)[:, : x.shape[-1]]
    return (codes.double() * wide).view(x.shape).to(x.device)


def _in_double(model: Any, prompts: list[list[int]], wanted: list[list[int]], coded: bool) -> Tensor:
    """Return the logits of all generated tokens in fp64; if `coded`, of activations that fp8 codes have rounded."""
    model = copy.deepcopy(model).double()
    seen = _coded if coded else (lambda x: x)

    def experts(self: Any, x: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for i, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = (seen(x) @ gate_up.t()).chunk(2, -1)
            factor = (probs * (ids == i)).sum(-1, keepdim=True).double()
            result += factor * (seen(F.silu(gate) * up) @ down.t())
        return result

    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, given: (seen(given[0]),))
        elif hasattr(module, "gate_up_proj") and module.gate_up_proj.__class__ is nn.Parameter:
            module.forward = MethodType(experts, module)
    device, found = next(model.parameters()).device, []
    for prompt, tokens in zip(prompts, wanted, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]], device=device)
        found.append(model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :])
    return torch.stack(found)


@at("cpu", "cuda")
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
def test_the_same_tokens_as_transformers(
    monkeypatch: pytest.MonkeyPatch, real: bool, quantized: bool, place: str
) -> None:
    fake_vllm.install(monkeypatch)
    with running_on(place) as device:
        model = _model(device, real, quantized)
        prompts = [torch.randint(0, 97, (length,)).tolist() for length in PROMPTS]
        wanted, scores = _generated(model, prompts, device)
        with torch.no_grad():
            exact = _in_double(model, prompts, wanted, False)
            usual = _in_double(model, prompts, wanted, True) if quantized else torch.stack([*map(torch.stack, scores)])
        server, same, ours = Server(model, device, quantized), 0, torch.zeros_like(exact)
        # The first prompt whole, the second in chunks beside decoding steps of the first, the third late.
        plans = [[prompts[0], prompts[1][:7], []], [None, prompts[1][7:20], []], [None, prompts[1][20:], prompts[2]]]
        got: list[int] = [0, 0, 0]
        while min(got) < STEPS:
            plan = plans.pop(0) if plans else [None, None, None]
            fed = [[wanted[r][got[r] - 1]] if tokens is None else tokens for r, tokens in enumerate(plan)]
            fed = [[] if got[r] == STEPS else tokens for r, tokens in enumerate(fed)]
            logits = server.step(fed)
            for r in range(3):
                if fed[r] and server.known[r] >= len(prompts[r]):
                    want, ours[r, got[r]] = scores[r][got[r]], logits[r]
                    margin = float(want.topk(2).values.diff().abs())
                    alike = int(logits[r].argmax()) == wanted[r][got[r]]
                    assert alike or margin < (1.0 if quantized else 0.05) * float(want.std()), (r, got[r])
                    same += alike
                    got[r] += 1
        assert same >= (STEPS if quantized else 3 * STEPS - 2)
        # As far from fp64 as codes of activations are, or as transformers in fp16, which may choose another expert.
        error, allowed = ((one.double() - exact).norm() / exact.norm() for one in (ours, usual))
        assert error < (1.25 * allowed + 0.01 if quantized else max(2 * allowed, 0.05)), (float(error), float(allowed))


@at("cpu", "sm_90", "cuda")
def test_several_tokens_of_each_request(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Speculative decoding: two requests with three new tokens each take the decode kernel."""
    fake_vllm.install(monkeypatch)
    mla = importlib.import_module("rtkernels.integrations.vllm_mla")
    torch.manual_seed(0)
    with running_on(place) as device:
        impl = mla.RtkernelsMLAImpl(
            4, 80, 0.1, 1, None, None, "auto", None, "decoder", None, q_lora_rank=None, kv_lora_rank=64,
            qk_nope_head_dim=32, qk_rope_head_dim=16, qk_head_dim=48, v_head_dim=32, kv_b_proj=None,
        )  # fmt: skip
        q, cache = torch.randn(6, 4, 80, device=device).bfloat16(), torch.randn(4, 16, 80, device=device).bfloat16()
        table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=device)
        slots = torch.zeros(0, device=device)
        given = fake_vllm_mla.metadata(None, [1, 1], [20, 7], table, slots, 16)
        for causal in (True, False):
            given.causal = causal
            out, lse = impl.forward_mqa((q[..., :64], q[..., 64:]), cache, given, None)
            for r, length in enumerate((20, 7)):
                keys = cache[table[r].long()].flatten(0, 1)[:length].double().cpu()
                scores = 0.1 * torch.einsum("thw,kw->htk", q[3 * r : 3 * r + 3].double().cpu(), keys)
                if causal:
                    hidden = torch.arange(length) > torch.arange(length - 3, length)[:, None]
                    scores = scores.masked_fill(hidden, -torch.inf)
                want = torch.einsum("htk,kv->thv", scores.softmax(-1), keys[:, :64])
                mine = slice(3 * r, 3 * r + 3)
                torch.testing.assert_close(out[mine].double().cpu(), want, rtol=0.02, atol=0.02)
                torch.testing.assert_close(lse[mine].double().cpu(), scores.logsumexp(-1).t(), rtol=1e-3, atol=1e-3)
        with pytest.raises(NotImplementedError, match="tokens of 2 requests"):
            impl.forward_mqa(q[:5], cache, given, None)


def test_what_the_backends_say(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake_vllm.install(monkeypatch)
    importlib.import_module("rtkernels.integrations.vllm").register()
    mla = importlib.import_module("rtkernels.integrations.vllm_mla")
    backend, prefill = mla.RtkernelsMLABackend, mla.RtkernelsMLAPrefillBackend
    assert found["backends"]["RTKERNELS_MLA"].rpartition(".")[2] == backend.__name__
    assert found["prefill_backends"]["RTKERNELS"].rpartition(".")[2] == prefill.__name__
    assert backend.get_name() == "RTKERNELS_MLA" and backend.get_impl_cls() is mla.RtkernelsMLAImpl
    assert 576 in backend.get_supported_head_sizes() and prefill.get_name() == "RTKERNELS"
    options = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "logits_soft_cap": None,
               "attn_type": "decoder"}  # fmt: skip
    for name, value in (("alibi_slopes", [1.0]), ("sliding_window", 4), ("logits_soft_cap", 3.0),
                        ("attn_type", "encoder"), ("kv_cache_dtype", "fp8")):  # fmt: skip
        with pytest.raises(NotImplementedError, match=name):
            mla.RtkernelsMLAImpl(
                4, 80, 0.1, 1, **(options | {name: value}), kv_sharing_target_layer_name=None, q_lora_rank=None,
                kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, qk_head_dim=48, v_head_dim=32,
                kv_b_proj=None,
            )  # fmt: skip
    from types import SimpleNamespace

    sizes = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert prefill.supports_mla_dimensions(sizes)
    assert not prefill.supports_mla_dimensions(SimpleNamespace(**{**vars(sizes), "qk_nope_head_dim": 256}))
    capability = SimpleNamespace(major=7, minor=5)
    assert not prefill.supports_compute_capability(capability) and not backend.supports_compute_capability(capability)
    with pytest.raises(NotImplementedError, match="output scale"):
        prefill(4, 0.1, 64, 32, 16, 32, None).run_prefill_new_tokens(None, None, None, False, None, torch.ones(()))
