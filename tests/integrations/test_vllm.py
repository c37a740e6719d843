"""The vLLM plugin with the signatures of vLLM's wheel: norms, layers, and attention over pages.

vLLM itself is not imported: its package needs a CUDA build of torch. ``test_contract.py`` compares the names and
signatures that the plugin relies on with those in the wheel.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at
from torch import Tensor

from integrations import fake_vllm
from integrations.fake_vllm_fp8 import GroupShape


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = fake_vllm.install(monkeypatch)
    monkeypatch.setenv("RTKERNELS_VLLM", "1")
    importlib.import_module("rtkernels.integrations.vllm").register()
    return found


def test_layers_are_replaced_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake_vllm.install(monkeypatch)
    monkeypatch.delenv("RTKERNELS_VLLM", raising=False)
    importlib.import_module("rtkernels.integrations.vllm").register()
    assert not found["layers"]
    assert set(found["backends"]) == {"RTKERNELS", "RTKERNELS_MLA"}
    assert set(found["prefill_backends"]) == {"RTKERNELS"}
    assert set(found["linear_kernels"]) == {"fp8", "fp8_block"}
    assert set(found["quantization"]) == {"rtkernels_fp8"}
    assert all("rtkernels" in op.impls for op in vars(found["ops"]).values())


def test_norms(registered: dict[str, Any]) -> None:
    x, residual, weight = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16(), torch.rand(64).bfloat16()
    norm, both = (op.impls["rtkernels"] for op in vars(registered["ops"]).values())
    wanted = F.rms_norm(x.float(), (64,), weight.float(), 1e-5)
    torch.testing.assert_close(norm.impl_fn(x, weight, 1e-5).float(), wanted, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(
        norm.impl_fn(x, None, 1e-5).float(), F.rms_norm(x.float(), (64,), eps=1e-5), rtol=2**-8, atol=1e-3
    )
    total = x.float() + residual.float()
    a, b = x.clone(), residual.clone()
    results = both.impl_fn(a, b, weight, 1e-5)
    assert results[0] is a and results[1] is b and both.inplace  # what vLLM expects of an op in place
    torch.testing.assert_close(b, total.bfloat16())
    torch.testing.assert_close(a.float(), F.rms_norm(total, (64,), weight.float(), 1e-5), rtol=2**-7, atol=2e-3)
    assert norm.supports_args(x, weight, 1e-5) and both.supports_args(x, residual, weight, 1e-5)
    assert not norm.supports_args(x, weight, 1e-5, 32)
    assert not norm.supports_args(x, weight.float(), 1e-5)
    assert not norm.supports_args(x.double(), weight.double(), 1e-5)


def test_activations_and_rope(registered: dict[str, Any]) -> None:
    x = torch.randn(3, 2, 32)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(fake_vllm.SiluAndMul().forward_cuda(x), F.silu(gate) * up)
    for approximate in ("none", "tanh"):
        op = fake_vllm.GeluAndMul(approximate)
        torch.testing.assert_close(op.forward_cuda(x), F.gelu(gate, approximate=approximate) * up, rtol=1e-5, atol=1e-5)
    for rotary, neox in ((16, True), (8, True), (16, False)):
        rope = fake_vllm.RotaryEmbedding(16, rotary, 50, 10000.0, neox, torch.float32)
        positions, query, key = torch.tensor([3, 0, 49, 7]), torch.randn(4, 3 * 16), torch.randn(4, 16)
        wanted = [_rotated(t, positions, rope.cos_sin_cache, rotary, neox) for t in (query, key)]
        got = rope.forward_cuda(positions, query, key)
        assert got[0] is query
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other)
        alone = torch.randn(4, 16)
        expected = _rotated(alone, positions, rope.cos_sin_cache, rotary, neox)
        result, nothing = rope.forward_cuda(positions, alone)
        assert nothing is None
        torch.testing.assert_close(result, expected)


F8, GROUPS = torch.float8_e4m3fn, GroupShape(1, 128)
TOKENS, TENSOR = GroupShape(1, -1), GroupShape(-1, -1)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("size", [(8, 256), (7, 256), (1, 128), (0, 256)], ids=str)
def test_quantised_activations(registered: dict[str, Any], size: tuple[int, int], place: str) -> None:
    """Shapes and strides of scales are those that vLLM's class documents and its layers read."""
    with running_on(place) as device:
        x = torch.randn(size, device=device).bfloat16()
        m, n = size
        for options, shape, strides, blocks in (
            ({"group_shape": TOKENS}, (m, 1), (1, 1), n), ({"group_shape": GROUPS}, (m, n // 128), (n // 128, 1), 128),
            ({"group_shape": GroupShape(1, 32)}, (m, n // 32), (n // 32, 1), 32),
            ({"group_shape": GROUPS, "column_major_scales": True}, (m, n // 128), (1, m), 128),
        ):  # fmt: skip
            codes, scale = fake_vllm.QuantFP8(False, **options).forward_cuda(x)
            assert (codes.dtype, scale.dtype) == (F8, torch.float32) and codes.shape == x.shape
            assert scale.shape == shape and (not scale.numel() or scale.stride() == strides)
            values = x.float().unflatten(-1, (-1, blocks))
            wanted = values.abs().amax(-1) / 448
            torch.testing.assert_close(scale, wanted, rtol=1e-6, atol=0)
            assert ((codes.float().unflatten(-1, (-1, blocks)) * wanted[..., None] - values).abs()
                    <= wanted[..., None] * 16.01).all()  # fmt: skip
        given = torch.tensor([0.25], device=device)
        codes, scale = fake_vllm.QuantFP8(True, TENSOR).forward_cuda(x, given)
        assert scale is given and torch.equal(codes.float(), (x.float() * 4).to(F8).float())
        if m:
            codes, scale = fake_vllm.QuantFP8(False, TENSOR).forward_cuda(x)
            assert scale.shape == (1,)
            torch.testing.assert_close(scale, x.float().abs().amax().view(1) / 448, rtol=1e-6, atol=0)


def test_quantisers_that_stay_theirs(registered: dict[str, Any]) -> None:
    x, row = torch.randn(6, 256).bfloat16(), torch.ones(6)
    for op, *given in (
        (fake_vllm.QuantFP8(False, GROUPS, use_ue8m0=True), x),
        (fake_vllm.QuantFP8(False, GROUPS, column_major_scales=True, tma_aligned_scales=True), x),
        (fake_vllm.QuantFP8(False, GroupShape(1, 64), column_major_scales=True), x),
        (fake_vllm.QuantFP8(False, GROUPS), x[:, :100]),
        (fake_vllm.QuantFP8(False, TOKENS, num_token_padding=17), x),
        (fake_vllm.QuantFP8(False, TOKENS), x, None, torch.ones(1)),
        (fake_vllm.QuantFP8(True, TOKENS), x, row), (fake_vllm.QuantFP8(True, TENSOR), x, row),
        (fake_vllm.QuantFP8(False, TOKENS), x.double()),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="vLLM's own"):
            op.forward_cuda(*given)


def _rotated(x: Tensor, positions: Tensor, table: Tensor, rotary: int, neox: bool) -> Tensor:
    y = x.view(len(positions), -1, 16).clone()
    cos, sin = table[positions].chunk(2, -1)
    a, b = (y[..., :rotary].chunk(2, -1)) if neox else (y[..., 0:rotary:2], y[..., 1:rotary:2])
    cos, sin = cos[:, None], sin[:, None]
    parts = a * cos - b * sin, b * cos + a * sin
    y[..., :rotary] = torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)
    return y.view(x.shape)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float, sinks: Tensor | None,
    slopes: list[float] | None,
) -> Tensor:  # fmt: skip
    """One request in fp64: queries are its last ones."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
    scores = scale * q @ k.transpose(1, 2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - torch.tensor(slopes).double()[:, None, None] * distance
    hidden = (distance < 0) | (distance >= window if window else distance < 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "head_major", "slopes"),
    [
        (None, 0.0, False, True, None),
        (7, 5.0, False, False, None),
        (9, 0.0, True, True, None),
        (None, 0.0, False, True, [0.5, 0.25, 0.0, 1.0]),
    ],
)
def test_attention_over_steps(
    registered: dict[str, Any],
    window: int | None,
    softcap: float,
    sinks: bool,
    head_major: bool,
    slopes: list[float] | None,
    dtype: str,
    place: str,
) -> None:
    """Prefill, a mixed batch with a chunk of a prompt, and decoding, of three requests whose pages are scattered."""
    module = importlib.import_module("rtkernels.integrations.vllm_attention")
    torch.manual_seed(0)
    heads, kv_heads, width, page = 4, 2, 32, 16
    with running_on(place) as device:
        sink = torch.randn(heads, device=device) if sinks else None
        impl = module.RtkernelsImpl(
            heads, width, width**-0.5, kv_heads, slopes, window, dtype, softcap or None, sinks=sink
        )  # fmt: skip
        builder = module.RtkernelsMetadataBuilder(None, ["layer"], None, torch.device(device))
        of_cache = torch.uint8 if dtype == "fp8" else torch.bfloat16
        shape = (9, kv_heads, page, 2 * width) if head_major else (9, page, kv_heads, 2 * width)
        cache = torch.zeros(shape, dtype=of_cache, device=device)
        cache = cache if head_major else cache.transpose(1, 2)
        layer = fake_vllm.layer_scales(0.02, 0.03, device) if dtype == "fp8" else fake_vllm.layer_scales(device=device)
        pages = random.Random(0).sample(range(1, 9), 6)
        table = torch.tensor(pages, dtype=torch.int32, device=device).view(3, 2)
        known: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
        for new in ((5, 0, 20), (1, 18, 1), (1, 1, 1), (0, 9, 1)):
            rows = sum(new)
            q = torch.randn(rows + 2, heads, width, device=device).bfloat16()  # two rows of padding
            k, v = (torch.randn(rows + 2, kv_heads, width, device=device).bfloat16() for _ in range(2))
            slots, starts, lengths, at_row = [], [0], [], 0
            for request, count in enumerate(new):
                for i in range(count):
                    position = len(known[request])
                    slots.append(int(table[request, position // page]) * page + position % page)
                    known[request].append((k[at_row + i], v[at_row + i]))
                at_row += count
                starts.append(at_row)
                lengths.append(len(known[request]))
            slots += [-1, -1]
            mapping = torch.tensor(slots, dtype=torch.int64, device=device)
            impl.do_kv_cache_update(layer, k, v, cache, mapping)
            metadata = builder.build(0, fake_vllm.common_metadata(starts, lengths, table, mapping, device=device))
            output = torch.full_like(q, torch.nan)
            assert impl.forward(layer, q, k, v, cache, metadata, output) is output
            for request, count in enumerate(new):
                if count:
                    mine = slice(starts[request], starts[request + 1])
                    keys, values = (torch.stack(list(t)) for t in zip(*known[request], strict=True))
                    want = _plain(q[mine].cpu(), keys.cpu(), values.cpu(), width**-0.5, window, softcap,
                                  None if sink is None else sink.cpu(), slopes)  # fmt: skip
                    error = (output[mine].cpu().double() - want).norm() / want.norm()
                    assert error < (0.06 if dtype == "fp8" else 6e-3)
        assert output[rows:].isnan().all()  # padding is left alone
        assert impl.forward(layer, q, k, v, cache, None, output).eq(0).all()


def test_what_the_backend_says(registered: dict[str, Any]) -> None:
    module = importlib.import_module("rtkernels.integrations.vllm_attention")
    name = registered["backends"]["RTKERNELS"]
    assert getattr(module, name.rpartition(".")[2]) is module.RtkernelsBackend
    backend = module.RtkernelsBackend
    assert backend.get_name() == "RTKERNELS" and backend.get_impl_cls() is module.RtkernelsImpl
    assert backend.supports_head_size(128) and not backend.supports_head_size(260)
    with pytest.raises(NotImplementedError, match="attn_type"):
        module.RtkernelsImpl(4, 32, 1.0, 2, attn_type=fake_vllm.AttentionType.ENCODER)
    with pytest.raises(NotImplementedError, match="head_size is 120; expected a multiple of 16 with an fp8 cache"):
        module.RtkernelsImpl(4, 120, 1.0, 2, kv_cache_dtype="fp8")
    assert module.RtkernelsImpl(4, 120, 1.0, 2).head_size == 120
    metadata = fake_vllm.common_metadata([0, 1], [1], torch.zeros(1, 1), torch.zeros(1), torch.tensor([True]))
    with pytest.raises(NotImplementedError, match="causal is a tensor"):
        module.RtkernelsMetadataBuilder(None, [], None, torch.device("cpu")).build(0, metadata)
