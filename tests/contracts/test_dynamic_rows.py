"""A contract of all public functions: compiled and exported code serves any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import pieces
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rtkernels
from contracts.samples import collected
from rtkernels.runtime.operator import registry

HIDDEN, EXPERTS = 256, 8
ROWS = (6, 10, 7, 33)
# The gradient of a convolution's weight is torch's, which has other kernels on the CPU for 16 images and more.
APART = {"conv": ((6, 10, 7, 15), (17, 33, 20))}
WEIGHT = torch.linspace(0.5, 1.5, HIDDEN)
MATRIX = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
FACTORS = WEIGHT.expand(EXPERTS, HIDDEN).contiguous()
STACK = MATRIX.bfloat16().expand(2, EXPERTS, HIDDEN).contiguous()
OFFS = torch.tensor([2, 6], dtype=torch.int32)
ENDS = torch.tensor([0, 2, 6], dtype=torch.int32)  # of packed sequences
COUNTS = torch.zeros(4, dtype=torch.int64)
SIZES, ORDER = torch.tensor([2, 4]), torch.tensor([1, 0])
F8 = torch.float8_e4m3fn


def _inputs(rows: int) -> tuple[Tensor, Tensor]:
    """Return ``[rows, HIDDEN]`` and ``[rows, 2]``, choices of experts."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator)
    return x, torch.rand(rows, EXPERTS, generator=generator).topk(2).indices


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.arange(64 * 16, dtype=torch.float32, device="cpu").view(64, 16) * 0.01
    return angles.cos(), angles.sin()


def _index(ids: Tensor) -> Any:
    return rtkernels.moe_index(ids, EXPERTS, rows=128)


def _heads(x: Tensor) -> Tensor:
    return x.bfloat16().view(*x.shape[:-1], 4, 64)


def _qkv(x: Tensor) -> tuple[Tensor, ...]:
    return _heads(x), _heads(2 * x), _heads(x + 1)


def _appended(k: Tensor) -> Tensor:
    cache = k.new_zeros(k.shape[0], 2, 4, 64)
    rtk.append_kv_cache(k, k, cache, cache.clone(), k.new_ones(k.shape[0], dtype=torch.int32))
    return cache


def _written(x: Tensor, function: Callable[[Tensor], Any]) -> Tensor:
    y = x.detach() * 1
    function(y)
    return y


rtk = rtkernels
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "act": lambda x, ids: rtk.act(x, "silu", add=WEIGHT),
    "add_residual": lambda x, ids: rtk.add_residual(x, 2 * x, gate=WEIGHT),
    "add_": lambda x, ids: _written(x, lambda y: rtk.add_(y, x.detach())),
    "append_kv_cache": lambda x, ids: _appended(_heads(x.detach())),
    "attention": lambda x, ids: rtk.attention(*_qkv(x[None]), causal=True, return_lse=True),
    "attention_decode": lambda x, ids: rtk.attention_decode(
        _heads(x.detach()), *(_heads(x.detach()).unsqueeze(1),) * 2, torch.ones_like(ids[:, 0], dtype=torch.int32)
    ),
    "attention_varlen": lambda x, ids: rtk.attention_varlen(*_qkv(x), ENDS, ENDS, 64, 64, causal=True),
    "column_absmax": lambda x, ids: rtk.column_absmax(x),
    "cross_entropy": lambda x, ids: rtk.cross_entropy(x, ids[:, 0]),
    "cross_entropy, one pass": lambda x, ids: rtk.cross_entropy(x, ids[:, 0], one_pass=True),
    "dequantize_fp8": lambda x, ids: rtk.dequantize_fp8(x.detach().to(F8), x.new_ones(())),
    "dequantize_fp8_hadamard": lambda x, ids: rtk.dequantize_fp8_hadamard(x.detach().to(F8), x.detach()[:, 0].abs()),
    "dequantize_fp8_smooth": lambda x, ids: rtk.dequantize_fp8_smooth(x.detach().to(F8), x.detach()[:, 0].abs()),
    "embedding": lambda x, ids: rtk.embedding(ids, x[:6] * 2),
    "embedding_grad_": lambda x, ids: _written(MATRIX, lambda y: rtk.embedding_grad_(y, ids[:, 0], x.detach())),
    "fp8_linear": lambda x, ids: rtk.fp8_linear(x, WEIGHTS),
    "fp8_linear, hadamard": lambda x, ids: rtk.fp8_linear(x, WEIGHTS, recipe="hadamard"),
    "fp8_linear, row": lambda x, ids: rtk.fp8_linear(x, WEIGHTS, recipe="row"),
    "fp8_linear, smooth": lambda x, ids: rtk.fp8_linear(x, WEIGHTS, recipe="smooth", smooth=WEIGHT),
    "fp8_linear, tensor": lambda x, ids: rtk.fp8_linear(x, WEIGHTS, recipe="tensor"),
    "decode_linear": lambda x, ids: rtk.decode_linear(x.detach().bfloat16(), MATRIX.bfloat16()),
    "gated_mm": lambda x, ids: rtk.gated_mm(x.bfloat16(), MATRIX.bfloat16()),
    "glu": lambda x, ids: rtk.glu(x),
    "glu_fp8": lambda x, ids: rtk.glu_fp8(x)[:2],
    "glu_fp8_backward": lambda x, ids: rtk.glu_fp8_backward(x.detach()[:, :128], x.detach(), layout="row")[:2],
    "glu_smooth_fp8": lambda x, ids: rtk.glu_smooth_fp8(x, WEIGHT[:128])[:2],
    "glu_smooth_fp8_backward": lambda x, ids: rtk.glu_smooth_fp8_backward(
        x.detach()[:, :128], x.detach(), WEIGHT
    )[:2],
    "grouped_mm": lambda x, ids: rtk.grouped_mm(x.bfloat16(), STACK, offs=OFFS)[:6],
    "grouped_mm_masked": lambda x, ids: rtk.grouped_mm_masked(
        x.detach().bfloat16().expand(2, -1, -1), STACK, masked_m=OFFS
    )[:, :2],
    "grouped_wgrad": lambda x, ids: rtk.grouped_wgrad(x.detach().bfloat16()[:, :16], x.detach().bfloat16(), offs=OFFS),
    "group_rms_norm_gate": lambda x, ids: rtk.group_rms_norm_gate(x, 2 * x, groups=2),
    "hadamard": lambda x, ids: rtk.hadamard(x),
    "id_bounds": lambda x, ids: rtk.id_bounds(ids[:, 0].sort().values),
    "index_select": lambda x, ids: rtk.index_select(x, ids[:, 0] % 6),
    "jsd": lambda x, ids: rtk.jsd(x, x.detach() * 0.5, from_logits=True),
    "jsd, labels": lambda x, ids: rtk.jsd(x, x.detach() * 0.5, labels=ids[:, 0], ignore_index=1, one_pass=True),
    "jsd, sequences": lambda x, ids: rtk.jsd(x.view(-1, 4, 64), x.detach().view(-1, 4, 64) * 0.5, reduction="mean"),
    "kl_div": lambda x, ids: rtk.kl_div(x, x.detach() * 0.5, log_target=True),
    "kl_div, one pass": lambda x, ids: rtk.kl_div(x, x.detach() * 0.5, reduction="mean", one_pass=True),
    "layer_norm": lambda x, ids: rtk.layer_norm(x, WEIGHT, WEIGHT - 1),
    "layer_norm_fp8": lambda x, ids: rtk.layer_norm_fp8(x, WEIGHT)[:2],
    "linear_cross_entropy": lambda x, ids: rtk.linear_cross_entropy(x, MATRIX, ids[:, 0]),
    "linear_cross_entropy, none": lambda x, ids: rtk.linear_cross_entropy(x, MATRIX, ids[:, 0], reduction="none"),
    "load_balancing_loss": lambda x, ids: rtk.load_balancing_loss(x[:, :EXPERTS], ids, coefficient=0.1),
    "load_balancing_loss, sequences": lambda x, ids: rtk.load_balancing_loss(
        x.view(-1, 32, EXPERTS), ids.view(-1, 1, 2).expand(-1, 32, 2), sequence_dim=1
    ),
    "log_softmax": lambda x, ids: rtk.log_softmax(x),
    "merge_attention": lambda x, ids: rtk.merge_attention(_qkv(x)[:2], (x[:, :4].t(), x[:, 4:8].t())),
    "mla_rope": lambda x, ids: rtk.mla_rope(
        x.view(-1, 1, 4, 64), x.view(-1, 1, 4, 64), x[:, :32].view(-1, 1, 32), *_angles(x)
    ),
    "moe_index": lambda x, ids: _index(ids).rows,
    "moe_permute": lambda x, ids: rtk.moe_permute(x, _index(ids)),
    "moe_permute_fp8": lambda x, ids: rtk.moe_permute_fp8(x, _index(ids), output="row").scale,
    "moe_permute_smooth": lambda x, ids: rtk.moe_permute_smooth(x, _index(ids), FACTORS)[:2],
    "moe_permute_smooth_t": lambda x, ids: rtk.moe_permute_smooth_t(x, _index(ids))[:2],
    "moe_row_id_map": lambda x, ids: rtk.moe_row_id_map(x.detach()[:, :EXPERTS] > 0, rows=400),
    "moe_unpermute": lambda x, ids: rtk.moe_unpermute(rtk.moe_permute(x, _index(ids)), _index(ids)),
    "multi_clip_": lambda x, ids: _written(x, lambda y: rtk.multi_clip_([y], 0.5)),
    "multi_clip_norm_": lambda x, ids: _written(x, lambda y: rtk.multi_clip_norm_([y], 0.5)),
    "multi_copy_": lambda x, ids: _written(x, lambda y: rtk.multi_copy_([y], [x.detach()], 2.0)),
    "lightning_attention": lambda x, ids: rtk.lightning_attention(*_qkv(x[None]), WEIGHT[:4]),
    "lightning_attention_step": lambda x, ids: rtk.lightning_attention_step(
        *(_heads(x.detach()),) * 3, WEIGHT[:4], x.new_zeros(x.shape[0], 4, 64, 64)
    ),
    "mla_attention": lambda x, ids: rtk.mla_attention(*_qkv(x[None])),
    "mla_decode": lambda x, ids: rtk.mla_decode(
        _heads(x.detach()), _heads(x.detach()).unsqueeze(1)[:, :, 0], torch.ones_like(ids[:, 0], dtype=torch.int32),
        value_width=64,
    ),
    "attention_quantized": lambda x, ids: rtk.attention_quantized(
        *(_heads(x.detach())[None].to(torch.int8),) * 2, _heads(x.detach())[None],
        *(x.detach()[None, :, :4].mT.abs(),) * 2,
    ),
    "quantize_qk": lambda x, ids: rtk.quantize_qk(*(_heads(x.detach())[None],) * 2),
    "quantize_v": lambda x, ids: rtk.quantize_v(_heads(x.detach())[:, None]),
    "sage_attention": lambda x, ids: rtk.sage_attention(*_qkv(x[None])),
    "multi_count_zeros": lambda x, ids: rtk.multi_count_zeros([x.detach()]),
    "multi_norm": lambda x, ids: rtk.multi_norm([x.detach()]),
    "multi_scale_": lambda x, ids: _written(x, lambda y: rtk.multi_scale_([y], 2.0)),
    "qk_norm_rope": lambda x, ids: rtk.qk_norm_rope(
        x.view(-1, 1, HIDDEN), WEIGHT[:32], WEIGHT[:32], *_angles(x), q_heads=4, kv_heads=2
    ),
    "qkv_split": lambda x, ids: rtk.qkv_split(x, 4, 2, rope=_angles(x), q_norm=WEIGHT[:32]),
    "quantize_nvfp4": lambda x, ids: rtk.quantize_nvfp4(x.detach()),
    "repeat_heads": lambda x, ids: rtk.repeat_heads(x.view(-1, 4, 64), 2),
    "quantize_fp8": lambda x, ids: rtk.quantize_fp8(x, granularity="row"),
    "quantize_fp8_experts": lambda x, ids: rtk.quantize_fp8_experts(x, COUNTS, output="row")[:2],
    "quantize_fp8_hadamard": lambda x, ids: rtk.quantize_fp8_hadamard(x)[:2],
    "quantize_fp8_shard_": lambda x, ids: rtk.quantize_fp8_shard_(
        x.new_zeros(x.shape, dtype=F8), x.new_ones(x.shape[0]), x.detach().view(-1), 0
    ),
    "quantize_fp8_smooth": lambda x, ids: rtk.quantize_fp8_smooth(x, WEIGHT)[:2],
    "rms_norm": lambda x, ids: rtk.rms_norm(x, WEIGHT),
    "rms_norm, modulated": lambda x, ids: rtk.rms_norm(x, WEIGHT, residual=2 * x, scale=WEIGHT, shift=x)[:2],
    "rms_norm, static fp8": lambda x, ids: rtk.rms_norm(x.detach(), shift=WEIGHT, quant=rtk.Quant(F8, 0.1)),
    "rms_norm, residual": lambda x, ids: rtk.rms_norm(x, WEIGHT, residual=2 * x, return_rstd=True),
    "rms_norm_fp8": lambda x, ids: rtk.rms_norm_fp8(x, WEIGHT)[:2],
    "rms_norm_router": lambda x, ids: rtk.rms_norm_router(x.bfloat16(), None, MATRIX.bfloat16())[0],
    "rope": lambda x, ids: rtk.rope(x.view(1, -1, 8, 32), *_angles(x)),
    "router_gemm": lambda x, ids: rtk.router_gemm(x.bfloat16(), MATRIX.bfloat16()),
    "router_z_loss": lambda x, ids: rtk.router_z_loss(x, 0.1),
    "row_dot": lambda x, ids: rtk.row_dot(x, 2 * x),
    "scale_": lambda x, ids: _written(x, lambda y: rtk.scale_(y, 2.0)),
    "scaled_mm": lambda x, ids: rtk.scaled_mm(x.bfloat16(), MATRIX.bfloat16()),
    "scaled_mm, rows": lambda x, ids: rtk.scaled_mm(
        x.detach().to(F8), MATRIX.to(F8), x.detach()[:, 0].abs(), MATRIX[:, 0]
    ),
    "scaled_mm, quantised": lambda x, ids: rtk.scaled_mm(x.detach().bfloat16(), MATRIX.bfloat16(), quant_out="row"),
    "scatter_add": lambda x, ids: rtk.scatter_add(x, ids[:, 0], EXPERTS),
    "sdpa": lambda x, ids: rtk.sdpa(*(t.transpose(0, 1) for t in _qkv(x)), is_causal=True),
    "smooth_factors": lambda x, ids: rtk.smooth_factors(rtk.column_absmax(x)),
    "softmax": lambda x, ids: rtk.softmax(x),
    "sort_chunks": lambda x, ids: rtk.sort_chunks(x, SIZES, ORDER),
    "topk": lambda x, ids: rtk.topk(x, 3),
    "topk_router": lambda x, ids: rtk.topk_router(x[:, :EXPERTS], 2)[0],
    "transpose": lambda x, ids: rtk.transpose(x),
    "transpose_experts": lambda x, ids: rtk.transpose_experts(x, COUNTS),
    **collected("CALLS"),  # of samples/<family>/<op>.py, where a new op has its own
}  # fmt: skip
# Lists of tensors for other functions, and sizes as numbers; tables and scales of weights; operators of others above.
WITHOUT_ROWS = {"tensor_list", "moe_rows", "check_labels", "fp8_weight", "rope_table", "patchify"}
WITHOUT_ROWS |= {"nvfp4_scale_bytes", "nvfp4_swizzle", "nvfp4_unswizzle"}
WITHOUT_ROWS |= {"add_bias", "channel_mul", "euler_step", "cfg_combine", "dequantize_nvfp4"}
WITHOUT_ROWS |= {"quantize_mxfp4", "quantize_mxfp8", "dequantize_mxfp4", "dequantize_mxfp8"}


OWNERS = {name: op.name for op in registry.ops() for name in op.public}


@pytest.mark.parametrize("name", sorted(OWNERS))
def test_every_public_function_is_tried(name: str) -> None:
    function = getattr(rtkernels, name)
    if callable(function) and not isinstance(function, type):
        problem = pieces.call(name, OWNERS[name], {*WITHOUT_ROWS, *(call.split(",")[0] for call in CALLS)})
        assert not problem, problem


def _tensors(results: Any) -> list[Tensor]:
    results = results if isinstance(results, tuple | list) else [results]
    return [t.float() if t.dtype.itemsize == 1 else t for t in results if t is not None]


def _gradient(results: list[Tensor], x: Tensor) -> list[Tensor | None]:
    wanted = [t for t in results if t.requires_grad]
    if not wanted:
        return []
    return list(torch.autograd.grad(sum(t.sum() for t in wanted), [x], allow_unused=True))


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", CALLS)
def test_one_graph_for_all_numbers_of_rows(name: str) -> None:
    """Dynamo makes one graph for the first number of rows and one for any; gradients come from them, too."""
    for numbers in APART.get(name, (ROWS,)):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(CALLS[name], fullgraph=True, backend=counter)
        for rows in numbers:
            x, ids = _inputs(rows)
            found = []
            for function in (compiled, CALLS[name]):
                leaf = x.clone().requires_grad_()
                results = _tensors(function(leaf, ids))
                found.append([*results, *_gradient(results, leaf)])
            torch.testing.assert_close(*found, equal_nan=True)
        assert counter.frame_count <= 2


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.function(x, ids)


@pytest.mark.parametrize("name", CALLS)
def test_export_with_any_number_of_rows(name: str) -> None:
    rows = torch.export.Dim("rows", min=6, max=4096)
    program = torch.export.export(_Module(CALLS[name]), _inputs(10), dynamic_shapes=({0: rows}, {0: rows}))
    module = program.module()
    for number in (10, 7, 33):
        inputs = _inputs(number)
        torch.testing.assert_close(_tensors(module(*inputs)), _tensors(CALLS[name](*inputs)), equal_nan=True)
