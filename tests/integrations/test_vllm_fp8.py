"""vLLM's fp8 linear layers and experts with our kernels, against dequantised products in fp64."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at
from torch import Tensor, nn

import rtkernels
from integrations import fake_vllm, fake_vllm_fp8
from integrations.fake_vllm_fp8 import KEYS, FP8ScaledMMLinearLayerConfig


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = fake_vllm.install(monkeypatch)
    monkeypatch.setenv("RTKERNELS_VLLM", "1")
    importlib.import_module("rtkernels.integrations.vllm").register()
    return found


def _config(weight: str, activation: str, dtype: torch.dtype | None = torch.bfloat16) -> FP8ScaledMMLinearLayerConfig:
    return FP8ScaledMMLinearLayerConfig(KEYS[weight], KEYS[activation], (0, 0), torch.bfloat16, dtype)


def _blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]


def _close(got: Tensor, want: Tensor, limit: float) -> None:
    error = (got.double().cpu() - want.double().cpu()).norm() / want.double().norm().cpu()
    assert error < limit, f"error {error}"


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("weights", ["tensor", "channel"])
@pytest.mark.parametrize("activations", ["kFp8StaticTensorSym", "kFp8DynamicTensorSym", "kFp8DynamicTokenSym"])
def test_linear_layers_with_scales_of_tensors_and_rows(
    registered: dict[str, Any], weights: str, activations: str, place: str
) -> None:
    kernel_class, platform = registered["linear_kernels"]["fp8"]
    assert platform.name == "CUDA"
    torch.manual_seed(0)
    with running_on(place) as device:
        w = torch.randn(80, 96, device=device)
        codes, scale = rtkernels.quantize_fp8(w, granularity="tensor" if weights == "tensor" else "row")
        layer = nn.Module()
        layer.weight = codes.t()  # vLLM keeps [k, n] with unit stride along k
        layer.weight_scale = scale.reshape(-1, 1) if weights == "channel" else scale.reshape(1)
        key = "kFp8StaticTensorSym" if weights == "tensor" else "kFp8StaticChannelSym"
        config = _config(key, activations)
        if activations == "kFp8StaticTensorSym":
            layer.input_scale = torch.tensor(0.01, device=device)
        assert kernel_class.can_implement(config) == (True, None) and kernel_class.is_supported(90) == (True, None)
        kernel = kernel_class(config, ["weight", "weight_scale", "input_scale", "input_scale_ub"])
        wanted = codes.double() * scale.double().reshape(-1, 1)
        for shape in ((3, 5, 96), (1, 96), (0, 96)):
            x, bias = torch.randn(shape, device=device).bfloat16(), torch.randn(80, device=device).bfloat16()
            got = kernel.apply_weights(layer, x, bias)
            assert got.shape == (*shape[:-1], 80) and got.dtype == torch.bfloat16
            if x.numel():
                _close(got, x.double() @ wanted.t() + bias.double(), 0.04)
        q, s = rtkernels.quantize_fp8(torch.randn(7, 96, device=device), granularity="row")
        y = kernel.apply_scaled_mm(
            A=q, B=layer.weight, out_dtype=torch.float32, As=s, Bs=layer.weight_scale, bias=None, output_shape=[7, 80]
        )
        _close(y, q.double() * s.double().reshape(-1, 1) @ wanted.t(), 1e-5)
        layer.input_scale_ub = torch.tensor(2.0, device=device)  # an upper limit: vLLM's quantiser
        x = torch.randn(4, 96, device=device).bfloat16()
        limited, of_rows = kernel.quant_fp8(x, None, layer.input_scale_ub)
        _close(kernel.apply_weights(layer, x), limited.double() * of_rows.double() @ wanted.t(), 4e-3)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_linear_layers_with_scales_of_blocks(registered: dict[str, Any], place: str) -> None:
    kernel_class, _ = registered["linear_kernels"]["fp8_block"]
    config = _config("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
    assert kernel_class.can_implement(config) == (True, None)
    torch.manual_seed(0)
    with running_on(place) as device:
        codes, scale = rtkernels.quantize_fp8(torch.randn(200, 264, device=device), granularity="block")
        kernel, layer = kernel_class(config), nn.Module()
        layer.weight = codes
        # e8m0 scales of a checkpoint become float32
        layer.weight_scale_inv = scale.log2().ceil().exp2().to(torch.float8_e8m0fnu)
        kernel.process_weights_after_loading(layer)
        assert layer.weight_scale_inv.dtype == torch.float32
        wanted = codes.double() * _blocks(layer.weight_scale_inv.detach().double(), 200, 264)
        for shape in ((2, 7, 264), (1, 264), (0, 264)):
            x, bias = torch.randn(shape, device=device).bfloat16(), torch.randn(200, device=device).bfloat16()
            got = kernel.apply_weights(layer, x, bias)
            assert got.shape == (*shape[:-1], 200) and got.dtype == torch.bfloat16
            if x.numel():
                _close(got, x.double() @ wanted.t() + bias.double(), 0.04)
        q, s = rtkernels.quantize_fp8(torch.randn(9, 264, device=device), granularity="group")
        exact = q.double() * s.double().repeat_interleave(128, -1)[:, :264] @ wanted.t()
        _close(kernel.apply_block_scaled_mm(q, layer.weight, s, layer.weight_scale_inv), exact, 4e-3)


def test_what_the_linear_kernels_refuse(registered: dict[str, Any]) -> None:
    plain, blocks = (registered["linear_kernels"][kind][0] for kind in ("fp8", "fp8_block"))
    for kernel, config in (
        (plain, _config("kFp8StaticTensorSym", "kFp8Dynamic128Sym")),
        (plain, _config("kFp8Static128BlockSym", "kFp8DynamicTokenSym")),
        (plain, _config("kFp8StaticTensorSym", "kFp8DynamicTokenSym", torch.float64)),
        (blocks, _config("kFp8StaticTensorSym", "kFp8Dynamic128Sym")),
        (blocks, _config("kFp8Static128BlockSym", "kFp8DynamicTokenSym")),
    ):
        possible, reason = kernel.can_implement(config)
        assert not possible and reason
        assert not kernel.is_supported(75)[0]


def test_the_quantisation_method(registered: dict[str, Any]) -> None:
    config_class = registered["quantization"]["rtkernels_fp8"]
    checkpoint = {"quant_method": "fp8"}
    assert config_class.get_name() == "rtkernels_fp8"
    assert config_class.override_quantization_method(checkpoint, "rtkernels_fp8") == "rtkernels_fp8"
    assert config_class.override_quantization_method(checkpoint, None) is None
    assert config_class.override_quantization_method({"quant_method": "awq"}, "rtkernels_fp8") is None
    plain, blocks = (registered["linear_kernels"][kind][0] for kind in ("fp8", "fp8_block"))
    for size, kernel in ((None, plain), ([128, 128], blocks)):
        config = config_class(weight_block_size=size, ignored_layers=["head"])
        layer = fake_vllm_fp8.LinearBase()
        method = config.get_quant_method(layer, "model.q_proj")
        method.create_weights(layer, 256, [128, 128], 256, 256, torch.bfloat16)
        assert type(method.fp8_linear) is kernel and not method.use_marlin
        assert config.get_quant_method(layer, "head") is None
        experts = fake_vllm_fp8.RoutedExperts()
        experts.moe_config = fake_vllm_fp8.MoEConfig()
        method = config.get_quant_method(experts, "model.experts")
        module = importlib.import_module("rtkernels.integrations.vllm_moe")
        assert method.experts_cls is module.RtkernelsExperts and method.fp8_backend.name == "TRITON"
        experts.moe_config = fake_vllm_fp8.MoEConfig(moe_backend="cutlass")  # the user's choice
        assert config.get_quant_method(experts, "model.experts").experts_cls is None
    assert config_class(activation_scheme="static").get_quant_method(layer, "x").activation_quant_key.scale.static


def test_which_experts_are_replaced(registered: dict[str, Any]) -> None:
    module = importlib.import_module("rtkernels.integrations.vllm_moe")
    method = fake_vllm.UnquantizedFusedMoEMethod(fake_vllm_fp8.MoEConfig())
    assert type(method) is module.RtkernelsUnquantizedMoEMethod
    assert method.experts_cls is module.RtkernelsExperts and method.unquantized_backend.name == "TRITON"
    for options in ({"has_bias": True}, {"swiglu_limit": 7.0}, {"is_act_and_mul": False},
                    {"activation": fake_vllm_fp8.MoEActivation.SWIGLUOAI}, {"moe_backend": "triton"},
                    {"moe_parallel_config": SimpleNamespace(use_fi_nvl_two_sided_kernels=True)}):  # fmt: skip
        assert fake_vllm.UnquantizedFusedMoEMethod(fake_vllm_fp8.MoEConfig(**options)).experts_cls is None, options


def _expected(
    x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, act: str, on_input: bool = False,
    rounded: Callable[[Tensor], Tensor] = lambda t: t, coded: Sequence[Callable[[Tensor], Tensor]] = (lambda t: t,) * 2,
) -> Tensor:  # fmt: skip
    """Loop over choices in fp64; results of steps are rounded, and operands of both products coded, by functions."""
    x, w1, w2, weights = (t.double().cpu() for t in (x, w1, w2, weights))
    function = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}[act]
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64)
    x = coded[0](rounded(x * weights) if on_input else x)
    pairs = [(t, j, expert) for t, row in enumerate(ids.tolist()) for j, expert in enumerate(row) if expert >= 0]
    if not pairs:
        return out
    halves = [rounded(w1[expert] @ x[t]).chunk(2) for t, _, expert in pairs]
    hidden = coded[1](torch.stack([rounded(function(gate) * up) for gate, up in halves]))
    for (t, j, expert), row in zip(pairs, hidden, strict=True):
        out[t] += (1 if on_input else weights[t, j]) * rounded(w2[expert] @ row)
    return rounded(out)


def _codes(granularity: str, static: float | None = None) -> Callable[[Tensor], Tensor]:
    """Return what leaves of a matrix what its fp8 codes have."""

    def coded(t: Tensor) -> Tensor:
        if static is not None:
            return (t / static).clamp(-448, 448).to(torch.float8_e4m3fn).double() * static
        codes, scale = rtkernels.quantize_fp8(t.float(), granularity=granularity)
        if granularity == "group":
            scale = scale.repeat_interleave(128, 1)[:, : t.shape[1]]
        return codes.double() * scale.double().reshape(-1, scale.shape[-1] if granularity == "group" else 1)

    return coded


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("kind", ["16 bits", "block", "channel", "tensor", "static"])
@pytest.mark.parametrize("tokens", [1, 13])
def test_experts(registered: dict[str, Any], kind: str, tokens: int, place: str) -> None:
    module = importlib.import_module("rtkernels.integrations.vllm_moe")
    torch.manual_seed(0)
    experts, width, hidden, top_k = 5, 128, 256, 3
    with running_on(place) as device:
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        w1 = torch.randn(experts, 2 * width, hidden, device=device).bfloat16() / 8
        w2 = torch.randn(experts, hidden, width, device=device).bfloat16() / 8
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(device, torch.int32)
        weights = torch.rand(tokens, top_k, device=device)
        weights[:, 0] = 0.5019  # almost half a unit from the next bfloat16
        config, a2_scale, of_rows = fake_vllm_fp8.QuantConfig(), None, ""
        exact = [w1, w2]
        if kind != "16 bits":
            granularity = {"block": "block", "channel": "row"}.get(kind, "tensor")
            pairs = [[rtkernels.quantize_fp8(m, granularity=granularity) for m in w] for w in (w1, w2)]
            w1, w2 = (torch.stack([codes for codes, _ in pair]) for pair in pairs)
            scales = [torch.stack([scale for _, scale in pair]) for pair in pairs]
            if kind == "block":
                exact = [c.double() * _blocks(s.double(), *c.shape[1:]) for c, s in zip((w1, w2), scales, strict=True)]
            else:
                scales = [s.reshape(experts, -1, 1) if kind == "channel" else s.reshape(experts) for s in scales]
                exact = [c.double() * s.double().view(experts, -1, 1) for c, s in zip((w1, w2), scales, strict=True)]
            config = fake_vllm_fp8.QuantConfig(*scales, [128, 128] if kind == "block" else None)
            of_rows = {"block": "group", "channel": "row"}.get(kind, "tensor")
            a2_scale = torch.tensor([0.15], device=device) if kind == "static" else None
        coded = (
            (_codes(of_rows), _codes(of_rows, 0.15 if kind == "static" else None)) if of_rows else (lambda t: t,) * 2
        )

        def as_usual(got: Tensor, *given: Any) -> None:
            """As near to fp64 as bfloat16 between steps, and the same codes, allow."""
            wide, rounded = (x, *given[0], *given[1:]), lambda t: t.bfloat16().double()
            want = _expected(*wide)
            allowed = (_expected(*wide, rounded=rounded, coded=coded) - want).norm() / want.norm()
            _close(got, want, 1.25 * float(allowed) + 2**-10)

        for act in ("silu", "gelu", "gelu_tanh") if kind == "16 bits" else ("silu",):
            moe = fake_vllm_fp8.MoEConfig(activation=fake_vllm_fp8.MoEActivation(act))
            layer = module.RtkernelsExperts(moe, config)
            got = fake_vllm_fp8.run_experts(layer, x, w1, w2, weights, ids, a2_scale=a2_scale, kind=of_rows)
            as_usual(got, exact, weights, ids, act)
        # Two of five experts are here; a padded token has no expert.
        places = torch.tensor([-1, 1, -1, -1, 0], dtype=torch.int32, device=device)
        ids[0] = -1
        here = torch.where(ids < 0, -1, places[ids.long().clamp(min=0)])
        layer.quant_config = fake_vllm_fp8.QuantConfig(
            None if config.w1_scale is None else config.w1_scale[[4, 1]],
            None if config.w2_scale is None else config.w2_scale[[4, 1]], config.block_shape,
        )  # fmt: skip
        got = fake_vllm_fp8.run_experts(
            layer, x, w1[[4, 1]], w2[[4, 1]], weights, ids, expert_map=places, a2_scale=a2_scale, kind=of_rows
        )
        assert not got[0].any()
        if (here >= 0).any():
            as_usual(got, [exact[0][[4, 1]], exact[1][[4, 1]]], weights, here, act)
        one = ids[:, :1].contiguous().clamp(min=0)  # router weights on the input, as Llama 4 has them
        got = fake_vllm_fp8.run_experts(
            module.RtkernelsExperts(moe, config), x, w1, w2, weights[:, :1], one, a2_scale=a2_scale, on_input=True,
            kind=of_rows,
        )  # fmt: skip
        as_usual(got, exact, weights[:, :1].bfloat16(), one, act, True)  # as the caller rounds them
