"""Rules about arguments that hold for all ops: what may be overwritten, where tensors are, what a number is."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import pieces
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels
from contracts.samples import collected, samples_of
from contracts.test_dynamic_rows import OWNERS
from contracts.test_every_argument import arguments_of
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch import plans as plans_module
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.operator import TorchOp


def _ids() -> Tensor:
    return torch.tensor([0, 1, 2])


def _labels() -> Tensor:
    return torch.zeros(4, dtype=torch.int64)


def _angles() -> tuple[Tensor, Tensor]:
    return torch.zeros(3, 4), torch.ones(3, 4)


@contextmanager
def _made_at(place: str) -> Iterator[None]:
    """Run ops at a place, with new tensors where they belong."""
    with running_on(place) as device, torch.device(device):
        yield


# ---- tensors that are overwritten -----------------------------------------------------------------------------------


def _mla(q: Tensor) -> Any:
    return rtkernels.mla_rope(q, torch.randn(3, 1, 2, 8), torch.randn(3, 1, 1, 8), *_angles(), in_place=True)


def _shard(scale: Tensor) -> Any:
    q = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)
    return rtkernels.quantize_fp8_shard_(q, scale, torch.ones(32), 0)


# For each, the shape of what is overwritten, a call, and whether it is differentiable and so takes what is no leaf.
OVERWRITING: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any], bool]] = {
    "softmax": ((4, 8), lambda x: rtkernels.softmax(x, in_place=True), True),
    "softmax, another dim": ((4, 8), lambda x: rtkernels.softmax(x, 0, in_place=True), True),
    "log_softmax": ((4, 8), lambda x: rtkernels.log_softmax(x, in_place=True), True),
    "cross_entropy": ((4, 8), lambda x: rtkernels.cross_entropy(x, _labels(), in_place=True), True),
    "rope": ((1, 3, 2, 8), lambda x: rtkernels.rope(x, *_angles(), in_place=True), True),
    "rope, k": ((1, 3, 2, 8), lambda x: rtkernels.rope(x.detach() * 1, *_angles(), k=x, in_place=True)[1], True),
    "mla_rope": ((3, 1, 2, 16), _mla, True),
    "add_": ((4, 8), lambda x: rtkernels.add_(x, torch.ones(4, 8)), True),
    "scale_": ((4, 8), lambda x: rtkernels.scale_(x, 2.0), False),
    "multi_clip_": ((4, 8), lambda x: rtkernels.multi_clip_([x], 0.1), False),
    "multi_scale_": ((4, 8), lambda x: rtkernels.multi_scale_([torch.ones(2), x], 2.0), False),
    "multi_scale_, tensor_list": ((4, 8), lambda x: rtkernels.multi_scale_(rtkernels.tensor_list([x]), 2.0), False),
    "multi_copy_": ((4, 8), lambda x: rtkernels.multi_copy_([x], [torch.ones(4, 8)]), False),
    "multi_clip_norm_": ((4, 8), lambda x: rtkernels.multi_clip_norm_([x], 0.5), False),
    "embedding_grad_": ((4, 8), lambda x: rtkernels.embedding_grad_(x, _ids(), torch.ones(3, 8)), False),
    "quantize_fp8_shard_": ((4,), _shard, False),
    "rms_norm": ((4, 8), lambda x: rtkernels.rms_norm(torch.randn(4, 8), out=x), False),
    "layer_norm": ((4, 8), lambda x: rtkernels.layer_norm(torch.randn(4, 8), out=x), False),
    "scaled_mm": (
        (4, 8),
        lambda x: rtkernels.scaled_mm(torch.ones(4, 8).half(), torch.ones(8, 8).half(), out=x),
        False,
    ),
    "index_select": ((3, 8), lambda x: rtkernels.index_select(torch.randn(4, 8), _ids(), out=x), False),
    "scatter_add": ((4, 8), lambda x: rtkernels.scatter_add(torch.randn(3, 8), _ids(), out=x), False),
    **collected("OVERWRITING"),
}


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("name", OVERWRITING)
def test_leaves_that_require_grad_are_not_overwritten(name: str, place: str) -> None:
    shape, run, differentiable = OVERWRITING[name]
    message = "requires grad|needs gradients" if not differentiable else "is a leaf that requires grad"
    with _made_at(place):
        x = torch.randn(shape)
        leaf = x.clone().requires_grad_()
        with pytest.raises(ArgumentError, match=message):
            run(leaf)
        assert torch.equal(leaf, x), "changed before it was refused"
        if differentiable:
            run(leaf * 1)
        else:
            with pytest.raises(ArgumentError, match=message):
                run(leaf * 1)
        with torch.no_grad():
            run(leaf)
    assert not torch.equal(leaf, x) or name == "cross_entropy"  # which has no gradient to write


@pytest.mark.parametrize("name", [name for name in sorted(OWNERS) if name.endswith("_")])
def test_every_function_that_overwrites_is_tried(name: str) -> None:
    problem = pieces.overwriting(name, OWNERS[name], OVERWRITING)
    assert not problem, problem


def test_what_a_copy_reads_needs_no_grad_either() -> None:
    with pytest.raises(ArgumentError, match="multi_copy_ is not differentiable"):
        rtkernels.multi_copy_([torch.zeros(3)], [torch.ones(3, requires_grad=True)])
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3, requires_grad=True)  # as create_graph=True leaves it
    rtkernels.optim.clip_grad_norm_([parameter], 0.5)
    assert parameter.grad.norm() < 0.51


# ---- where tensors are ----------------------------------------------------------------------------------------------


# Gradients and what a forward saved are where autograd found them; lists are looked at in test_multi_tensor.
_BY_AUTOGRAD = ("_bwd", "cross_entropy_scale", "cross_entropy_bwd_in_place", "multi_adamw_", "multi_lion_")


def _calls_with_several_tensors(but: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yield operators whose names do not end so, with arguments, and the places of the tensors among them."""
    for op in registry.ops():
        for number, (torch_op, args) in enumerate(samples_of(op.name, "cpu")):
            tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
            if len(tensors) > 1 and not torch_op.name.endswith(but):
                yield pytest.param(torch_op, args, tensors, id=f"{torch_op.name}-{number}")


def _cloned(args: tuple[Any, ...]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


@pytest.mark.parametrize(("torch_op", "args", "tensors"), _calls_with_several_tensors())
def test_tensors_on_meta_among_others_are_refused(torch_op: TorchOp, args: tuple, tensors: list[int]) -> None:
    for i in tensors:
        given = _cloned(args)
        given[i] = given[i].to("meta")
        with pytest.raises(ArgumentError, match=r"is on (meta|cpu); expected (cpu|meta), that of "):
            torch_op(*given)


@pytest.mark.parametrize(("torch_op", "args", "tensors"), _calls_with_several_tensors(but=_BY_AUTOGRAD))
def test_launchers_refuse_tensors_of_another_gpu(
    torch_op: TorchOp, args: tuple, tensors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would read an address that is not there."""
    elsewhere: set[int] = set()
    get_device = Tensor.get_device
    monkeypatch.setattr(Tensor, "get_device", lambda t: 1 if t.data_ptr() in elsewhere else get_device(t))
    for i in tensors[1:]:
        given = _cloned(args)
        if not given[i].numel():
            continue
        elsewhere.clear()
        elsewhere.add(given[i].data_ptr())
        with rtkernels.emulate("sm_90"), pytest.raises(ArgumentError, match="device"):
            torch_op.launch(*given)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op.name for op in registry.ops()])
def test_tensors_on_the_cpu_among_those_on_a_gpu_are_refused(op: str) -> None:
    for torch_op, args in samples_of(op, "cuda"):
        tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.numel()]
        if len(tensors) < 2 or torch_op.name.endswith(_BY_AUTOGRAD):
            continue
        for i in tensors:
            given = _cloned(args)
            given[i] = given[i].cpu()
            with pytest.raises(ArgumentError, match=r"device|is on|expected"):
                torch_op(*given)
    torch.cuda.synchronize()


def test_q_and_kv_have_the_same_tokens() -> None:
    def call(q: tuple[int, ...], kv: tuple[int, ...], layout: str = "sbhd", dtype: torch.dtype = torch.float32) -> Any:
        batch_and_length = (kv[0], kv[2]) if layout == "bhsd" else kv[:-2]
        k_pos = torch.randn(*batch_and_length, 8)
        return rtkernels.mla_rope(torch.randn(q, dtype=dtype), torch.randn(kv), k_pos, *_angles(), layout=layout)

    call((3, 2, 4, 16), (3, 2, 1, 24))
    call((2, 4, 3, 16), (2, 1, 3, 24), "bhsd")
    call((3, 4, 16), (3, 1, 24))
    for wrong in (
        ((2, 2, 4, 16), (3, 2, 1, 24)),
        ((3, 1, 4, 16), (3, 2, 1, 24)),
        ((2, 4, 2, 16), (2, 1, 3, 24), "bhsd"),
        ((2, 4, 16), (3, 1, 24)),
        ((3, 4, 16), (3, 1, 1, 24)),
    ):
        with pytest.raises(ArgumentError, match="expected the batch and length of kv"):
            call(*wrong)
    with pytest.raises(ArgumentError, match="q has dtype bfloat16; expected float32, that of kv"):
        call((3, 2, 4, 16), (3, 2, 1, 24), dtype=torch.bfloat16)


# ---- what a number is -----------------------------------------------------------------------------------------------


def _index() -> rtkernels.MoeIndex:
    return rtkernels.moe_index(torch.arange(8).view(4, 2) % 4, 4)


def _f8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def _bytes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def _b16(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def _offs(*ends: int) -> Tensor:
    return torch.tensor(ends or [1, 4], dtype=torch.int32)


def _heads(*shape: int) -> list[Tensor]:
    return [_b16(*shape) for _ in range(3)]


# A call of public functions that take numbers; all of them can be given by name on top. Of others the call is that of
# ``test_dynamic_rows``.
NUMBERS: dict[str, Callable[..., Any]] = {
    "glu_smooth_fp8_backward": lambda **n: rtkernels.glu_smooth_fp8_backward(
        torch.ones(4, 8), torch.ones(4, 16), None, layout="both", **n
    ),
    "attention": lambda **n: rtkernels.attention(*_heads(1, 4, 2, 16), **n),
    "attention_decode": lambda **n: rtkernels.attention_decode(
        _b16(1, 1, 2, 64), *_heads(1, 4, 2, 64)[1:], _offs(3), **n
    ),
    "attention_varlen": lambda **n: rtkernels.attention_varlen(
        *_heads(4, 2, 16), _offs(0, 4), _offs(0, 4), **{"max_seqlen_q": 4, "max_seqlen_k": 4, **n}
    ),
    "lightning_attention": lambda **n: rtkernels.lightning_attention(*_heads(1, 4, 2, 16), torch.ones(2), **n),
    "lightning_attention_step": lambda **n: rtkernels.lightning_attention_step(
        *_heads(1, 2, 16), torch.ones(2), torch.zeros(1, 2, 16, 16), **n
    ),
    "gated_delta_rule": lambda **n: rtkernels.gated_delta_rule(
        *_heads(1, 4, 2, 16), torch.zeros(1, 4, 2), torch.ones(1, 4, 2), **n
    ),
    "gated_delta_rule_step": lambda **n: rtkernels.gated_delta_rule_step(
        *_heads(1, 2, 16), torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2, 16, 16), **n
    ),
    "ssd": lambda **n: rtkernels.ssd(
        *(_heads(1, 4, 2, 16)[0], torch.ones(1, 4, 2), -torch.ones(2)), *_heads(1, 4, 2, 16)[1:], **n
    ),
    "ssd_step": lambda **n: rtkernels.ssd_step(
        *(_heads(1, 2, 16)[0], torch.ones(1, 2), -torch.ones(2)), *_heads(1, 2, 16)[1:], torch.zeros(1, 2, 16, 16), **n
    ),
    "causal_conv1d": lambda **n: rtkernels.causal_conv1d(torch.ones(1, 4, 8), torch.ones(8, 4), **n),
    "causal_conv1d_step": lambda **n: rtkernels.causal_conv1d_step(
        torch.ones(1, 8), torch.ones(8, 4), None, torch.zeros(1, 8, 4), **n
    ),
    "mla_attention": lambda **n: rtkernels.mla_attention(*_heads(4, 2, 16), cu_seqlens_q=_offs(0, 4), **n),
    "mla_decode": lambda **n: rtkernels.mla_decode(
        _b16(1, 2, 64), _b16(1, 4, 64), _offs(3), **{"value_width": 64, **n}
    ),
    "sparse_mla": lambda **n: rtkernels.sparse_mla(
        _b16(2, 2, 64), _b16(4, 64), _offs(3, 1).view(2, 1), **{"value_width": 64, **n}
    ),
    "indexer_logits": lambda **n: rtkernels.indexer_logits(_b16(2, 2, 64), _b16(4, 64), torch.ones(2, 2), **n),
    "indexer_topk": lambda **n: rtkernels.indexer_topk(
        _b16(2, 2, 64), _b16(4, 64), torch.ones(2, 2), **{"count": 2, **n}
    ),
    "attention_quantized": lambda **n: rtkernels.attention_quantized(
        *(torch.ones(4, 2, 16, dtype=torch.int8),) * 2, _b16(4, 2, 16), torch.ones(2, 4), torch.ones(2, 4),
        cu_seqlens_q=_offs(0, 4), cu_seqlens_k=_offs(0, 4), **{"max_seqlen_q": 4, "max_seqlen_k": 4, **n}
    ),
    "quantize_qk": lambda **n: rtkernels.quantize_qk(*_heads(1, 4, 2, 16)[1:], **n),
    "sage_attention": lambda **n: rtkernels.sage_attention(*_heads(1, 4, 2, 16), **n),
    "sdpa": lambda **n: rtkernels.sdpa(*_heads(1, 2, 4, 16), **n),
    "add_bias": lambda **n: rtkernels.add_bias(torch.ones(4, 8), torch.ones(8), pos=torch.ones(2, 8), **n),
    "cfg_combine": lambda **n: rtkernels.cfg_combine(*[torch.ones(4, 8)] * 3, **{"beta": 1.0, **n}),
    "dequantize_nvfp4": lambda **n: rtkernels.dequantize_nvfp4(_bytes(4, 8), _bytes(4, 1), **n),
    "euler_step": lambda **n: rtkernels.euler_step(torch.ones(4, 8), torch.ones(4, 8), **{"dt": 0.1, **n}),
    "nvfp4_scale_bytes": lambda **n: rtkernels.nvfp4_scale_bytes(**{"rows": 4, "cols": 16, **n}),
    "nvfp4_unswizzle": lambda **n: rtkernels.nvfp4_unswizzle(_bytes(512), **{"rows": 4, "cols": 16, **n}),
    "patchify": lambda **n: rtkernels.patchify(torch.ones(1, 4, 4, 3), **{"patch": 2, **n}),
    "qkv_split": lambda **n: rtkernels.qkv_split(torch.ones(4, 32), **{"num_heads": 2, "num_kv_heads": 1, **n}),
    "quantize_nvfp4": lambda **n: rtkernels.quantize_nvfp4(torch.ones(4, 16), **n),
    "repeat_heads": lambda **n: rtkernels.repeat_heads(torch.ones(4, 2, 8), **{"n": 2, **n}),
    "rope_table": lambda **n: rtkernels.rope_table(**{"positions": 4, "dim": 8, **n}),
    "add_": lambda **n: rtkernels.add_(torch.ones(4, 8), torch.ones(4, 8), **n),
    "cross_entropy": lambda **n: rtkernels.cross_entropy(torch.ones(4, 8), _labels(), **n),
    "dequantize_fp8_hadamard": lambda **n: rtkernels.dequantize_fp8_hadamard(_f8(4, 128), torch.ones(4), **n),
    "dequantize_fp8_smooth": lambda **n: rtkernels.dequantize_fp8_smooth(_f8(4, 128), torch.ones(4), **n),
    "embedding": lambda **n: rtkernels.embedding(_ids(), torch.ones(4, 8), **n),
    "embedding_grad_": lambda **n: rtkernels.embedding_grad_(torch.ones(4, 8), _ids(), torch.ones(3, 8), **n),
    "chunk_attention": lambda **n: rtkernels.chunk_attention(
        _b16(1, 3, 512), _b16(1, 9, 1, 128), _b16(1, 9, 1, 128), (torch.ones(16, 64),) * 2, **{"prefix": 5, **n}
    ),
    "decode_linear": lambda **n: rtkernels.decode_linear(_b16(4, 8), _b16(8, 8), norm_weight=_b16(8), **n),
    "gated_mm": lambda **n: rtkernels.gated_mm(_b16(4, 8), _b16(8, 8), **n),
    "grouped_mm": lambda **n: rtkernels.grouped_mm(_b16(4, 8), _b16(2, 8, 8), offs=_offs(), **n),
    "grouped_mm_masked": lambda **n: rtkernels.grouped_mm_masked(
        _b16(2, 4, 8), _b16(2, 8, 8), masked_m=_offs(), **n
    ),
    "grouped_wgrad": lambda **n: rtkernels.grouped_wgrad(_b16(4, 8), _b16(4, 8), offs=_offs(), **n),
    "group_rms_norm_gate": lambda **n: rtkernels.group_rms_norm_gate(
        torch.ones(4, 8), torch.ones(4, 8), **{"groups": 2, **n}
    ),
    "hadamard": lambda **n: rtkernels.hadamard(torch.ones(4, 128), **n),
    "jsd": lambda **n: rtkernels.jsd(torch.zeros(4, 8), torch.zeros(4, 8), labels=_labels(), from_logits=True, **n),
    "kl_div": lambda **n: rtkernels.kl_div(
        torch.zeros(4, 8), torch.zeros(4, 8), labels=_labels(), from_logits=True, **n
    ),
    "layer_norm": lambda **n: rtkernels.layer_norm(torch.ones(4, 8), **n),
    "layer_norm_fp8": lambda **n: rtkernels.layer_norm_fp8(torch.ones(4, 128), **n),
    "fp8_linear": lambda **n: rtkernels.fp8_linear(torch.ones(4, 64), torch.ones(64, 64), **n),
    "fp8_weight": lambda **n: rtkernels.fp8_weight(torch.ones(64, 64), **n),
    "linear_cross_entropy": lambda **n: rtkernels.linear_cross_entropy(
        torch.ones(4, 8), torch.ones(8, 8), _labels(), **n
    ),
    "linear_divergence": lambda **n: rtkernels.linear_divergence(
        torch.ones(4, 8), torch.ones(8, 8), torch.ones(4, 8), torch.ones(8, 8), labels=_labels(), **n
    ),
    "linear_logprob": lambda **n: rtkernels.linear_logprob(torch.ones(4, 8), torch.ones(8, 8), _labels(), **n),
    "load_balancing_loss": lambda **n: rtkernels.load_balancing_loss(
        torch.ones(4, 8), counts=torch.ones(8, dtype=torch.int32), **{"k": 2, **n}
    ),
    "log_softmax": lambda **n: rtkernels.log_softmax(torch.ones(4, 8), **n),
    "mla_rope": lambda **n: rtkernels.mla_rope(
        torch.ones(3, 1, 2, 16), torch.ones(3, 1, 2, 24), torch.ones(3, 1, 8), *_angles(), **n
    ),
    "moe_index": lambda **n: rtkernels.moe_index(torch.arange(8).view(4, 2) % 4, **{"num_experts": 4, **n}),
    "moe_row_id_map": lambda **n: rtkernels.moe_row_id_map(torch.ones(4, 4, dtype=torch.bool), **n),
    "moe_rows": lambda **n: rtkernels.moe_rows(**{"tokens": 4, "top_k": 2, "num_experts": 4, **n}),
    "column_absmax": lambda **n: rtkernels.column_absmax(torch.ones(4, 8), **n),
    "dequantize_fp8": lambda **n: rtkernels.dequantize_fp8(_f8(4, 128), torch.ones(4, 1), granularity="group", **n),
    "multi_clip_": lambda **n: rtkernels.multi_clip_([torch.ones(4)], **{"limit": 1.0, **n}),
    "multi_clip_norm_": lambda **n: rtkernels.multi_clip_norm_([torch.ones(4)], **{"max_norm": 1.0, **n}),
    "multi_copy_": lambda **n: rtkernels.multi_copy_([torch.ones(4)], [torch.ones(4)], **n),
    "multi_norm": lambda **n: rtkernels.multi_norm([torch.ones(4)], **n),
    "multi_scale_": lambda **n: rtkernels.multi_scale_([torch.ones(4)], **{"scale": 1.0, **n}),
    "qk_norm_rope": lambda **n: rtkernels.qk_norm_rope(
        torch.ones(3, 1, 32), None, None, *_angles(), **{"q_heads": 2, "kv_heads": 1, **n}
    ),
    "quantize_fp8": lambda **n: rtkernels.quantize_fp8(torch.ones(4, 128), granularity="group", **n),
    "quantize_fp8_hadamard": lambda **n: rtkernels.quantize_fp8_hadamard(torch.ones(4, 128), **n),
    "quantize_fp8_shard_": lambda **n: rtkernels.quantize_fp8_shard_(
        _f8(4, 8), torch.ones(4), torch.ones(32), **{"offset": 0, **n}
    ),
    "quantize_fp8_smooth": lambda **n: rtkernels.quantize_fp8_smooth(
        torch.ones(4, 128), granularity="channel", **n
    ),
    "rms_norm": lambda **n: rtkernels.rms_norm(torch.ones(4, 8), **n),
    "rms_norm_fp8": lambda **n: rtkernels.rms_norm_fp8(torch.ones(4, 128), **n),
    "rms_norm_router": lambda **n: rtkernels.rms_norm_router(
        torch.ones(4, 128, dtype=torch.bfloat16), None, torch.ones(8, 128, dtype=torch.bfloat16), **n
    ),
    "rope": lambda **n: rtkernels.rope(torch.ones(1, 3, 2, 8), *_angles(), **n),
    "router_z_loss": lambda **n: rtkernels.router_z_loss(torch.ones(4, 8), **n),
    "scale_": lambda **n: rtkernels.scale_(torch.ones(4, 8), **{"factor": 1.0, **n}),
    "scatter_add": lambda **n: rtkernels.scatter_add(torch.ones(3, 8), _ids(), **{"rows": 4, **n}),
    "scaled_mm": lambda **n: rtkernels.scaled_mm(_b16(4, 8), _b16(8, 8), **n),
    "smooth_factors": lambda **n: rtkernels.smooth_factors(torch.ones(8), **n),
    "softmax": lambda **n: rtkernels.softmax(torch.ones(4, 8), **n),
    "topk": lambda **n: rtkernels.topk(torch.ones(4, 8), **{"k": 2, **n}),
    "topk_router": lambda **n: rtkernels.topk_router(torch.ones(4, 8), **{"k": 2, **n}),
    "transpose": lambda **n: rtkernels.transpose(torch.ones(4, 8), **n),
    "transpose_experts": lambda **n: rtkernels.transpose_experts(torch.ones(4, 8), torch.tensor([1, 3]), **n),
}  # fmt: skip


NO_OPS = ("warm", "tune", "check_labels", "set_batch_invariant")


def _numbers() -> Iterator[tuple[str, str, set[str]]]:
    """Yield function, parameter and the types it may have for every public parameter that is a number."""
    for name in rtkernels.__all__:
        if inspect.isfunction(function := getattr(rtkernels, name)) and name not in NO_OPS:
            for parameter in inspect.signature(function).parameters.values():
                types = set(str(parameter.annotation).split(" | "))
                if types & {"int", "float"}:
                    yield name, parameter.name, types


@pytest.mark.one_in(12)
@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize(("name", "option", "types"), [pytest.param(*n, id=".".join(n[:2])) for n in _numbers()])
def test_what_is_no_number_is_refused_by_name(
    name: str, option: str, types: set[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = NUMBERS.get(name) or _call_with_options(name, monkeypatch)
    wrong = ["1", 1j, [1], *([None] if "None" not in types else []), *([0.5] if "float" not in types else [])]
    with _made_at(place):
        for value in wrong:
            with pytest.raises(ArgumentError, match=rf"\b{option}\b"):
                call(**{option: value})
        call()


def _call_with_options(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    function, right = arguments_of(name, monkeypatch)

    def call(**options: Any) -> Any:
        place = torch.get_default_device()
        given = {key: a.detach().to(place) if isinstance(a, Tensor) else a for key, a in right.items()} | options
        bound = inspect.signature(function).bind_partial()
        bound.arguments.update(given)
        return function(*bound.args, **bound.kwargs)

    return call


def _one_sample_of_each() -> Iterator[Any]:
    for op in registry.ops():
        for torch_op, args in dict(samples_of(op.name, "cpu")).items():
            yield pytest.param(torch_op, args, id=torch_op.name)


@pytest.mark.one_in(12)
@at("cpu", "sm_90")
@pytest.mark.parametrize(("torch_op", "args"), _one_sample_of_each())
def test_the_default_device_makes_no_difference(torch_op: TorchOp, args: tuple, place: str) -> None:
    """As after ``torch.set_default_device("cuda")``: what ops allocate is where their tensors are, or on the host."""
    given, wanted_args = copy.deepcopy(args), copy.deepcopy(args)
    with running_on(place):
        plans_module.Plans.forget_all()
        with torch.device("meta"):
            got = torch_op(*given)
        wanted = torch_op(*wanted_args)
    written = [i for i, a in enumerate(torch_op.overload._schema.arguments) if a.alias_info and a.alias_info.is_write]
    results = (got, [given[i] for i in written]), (wanted, [wanted_args[i] for i in written])
    torch.testing.assert_close(*results, equal_nan=True, rtol=0, atol=0)
