"""A contract of all public functions: what they promise inside of ``batch_invariant``, fuzzed with rows of a batch.

Of every function that promises it, rows of results, and of the gradient of x, are compared with those of the same row
alone, bit by bit. Neighbouring rows are large, infinite or NaN. Functions of sequences have tests of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import PLACES, at
from torch import Tensor

import rtkernels
from contracts import test_dynamic_rows as dynamic
from rtkernels import ArgumentError
from rtkernels.ops.shared.batch_invariance import BATCH, MEANING, PROMISES, REFUSED, ROW, SEQUENCE, Promise, table
from rtkernels.runtime.operator import registry

ROOT = Path(__file__).parents[2]
PUBLIC = sorted({name for op in registry.ops() for name in op.public})
rtk = rtkernels
VOCABULARY = torch.randn(40, dynamic.HIDDEN, generator=torch.Generator().manual_seed(5))


def _there_and_back(x: Tensor, index: Any) -> Tensor:
    return rtk.moe_unpermute(rtk.moe_permute(x, index), index)


def _one_expert(ids: Tensor) -> Any:
    return rtk.moe_index(torch.zeros_like(ids[:, :1]), 1)  # rows stay in their order


def _angles(x: Tensor, ids: Tensor) -> list[Tensor]:
    return [t.to(x.device)[ids[:, 0]] for t in dynamic._angles(x)]  # a row has its own position


def _by_rows(found: Any) -> tuple[Tensor, Tensor]:
    return found[0], found[1].view(-1, found[0].shape[0])  # scales of an expert are a matrix [groups, rows]


def _count(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[0], dtype=torch.int64, device=x.device)


# Calls whose results have one row per row of x, in the place of those that reduce, or that look at x as a sequence.
CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = dynamic.CALLS | {
    "cross_entropy": lambda x, ids: rtk.cross_entropy(x, ids[:, 0], reduction="none"),
    "jsd": lambda x, ids: rtk.jsd(x, x.detach() * 0.5, from_logits=True, reduction="none"),
    "kl_div": lambda x, ids: rtk.kl_div(x, x.detach() * 0.5, log_target=True, reduction="none"),
    "linear_cross_entropy": lambda x, ids: rtk.linear_cross_entropy(
        x.bfloat16(), VOCABULARY.bfloat16(), ids[:, 0], reduction="none"
    ),
    "linear_logprob": lambda x, ids: rtk.linear_logprob(
        x.bfloat16(), VOCABULARY.bfloat16(), ids[:, 0], return_entropy=True
    ),
    "softmax": lambda x, ids: rtk.softmax(x.bfloat16()),
    "linear_logprob, candidates": lambda x, ids: rtk.linear_logprob(
        x.bfloat16(), VOCABULARY.bfloat16(), ids, bias=VOCABULARY[:, 0].bfloat16(), softcap=5.0, logit_scale=0.7,
        temperature=0.5 + ids[:, 0].float(), return_entropy=True, return_lse=True, return_log_sum_sq=True,
        return_mean_logit=True, return_top1=True, save="logits",
    ),
    "linear_logprob, frozen": lambda x, ids: rtk.linear_logprob(
        x.bfloat16(), VOCABULARY.bfloat16(), ids, fp32_logits=True, return_entropy=True, save="projected"
    ),
    "embedding": lambda x, ids: rtk.embedding(ids, VOCABULARY),
    "rope": lambda x, ids: rtk.rope(x.view(1, -1, 8, 32), *_angles(x, ids)),
    "mla_rope": lambda x, ids: rtk.mla_rope(
        x.view(-1, 1, 4, 64), x.view(-1, 1, 4, 64), x[:, :32].view(-1, 1, 32), *_angles(x, ids)
    ),
    "qk_norm_rope": lambda x, ids: rtk.qk_norm_rope(
        x.view(-1, 1, dynamic.HIDDEN), *(dynamic.WEIGHT[:32],) * 2, *_angles(x, ids), q_heads=4, kv_heads=2
    ),
    "qkv_split": lambda x, ids: rtk.qkv_split(x, 4, 2, rope=tuple(_angles(x, ids)), q_norm=dynamic.WEIGHT[:32]),
    "index_select": lambda x, ids: rtk.index_select(x, torch.arange(x.shape[0], device=x.device)),
    "sort_chunks": lambda x, ids: rtk.sort_chunks(x, _count(x), torch.zeros_like(_count(x))),
    "transpose_experts": lambda x, ids: rtk.transpose_experts(x, _count(x)).view(dynamic.HIDDEN, -1),
    "quantize_fp8_experts": lambda x, ids: _by_rows(rtk.quantize_fp8_experts(x, _count(x), output="row")),
    "moe_permute": lambda x, ids: rtk.moe_permute(x, _one_expert(ids)),
    "moe_permute_fp8": lambda x, ids: _by_rows(rtk.moe_permute_fp8(x, _one_expert(ids), output="row")),
    "moe_permute_smooth": lambda x, ids: rtk.moe_permute_smooth(x, _one_expert(ids), dynamic.FACTORS[:1])[:2],
    "grouped_mm_masked": lambda x, ids: rtk.grouped_mm_masked(
        x.detach().bfloat16().expand(2, -1, -1), dynamic.STACK, masked_m=_count(x).int().expand(2).contiguous()
    ),
    "add_bias": lambda x, ids: rtk.add_bias(x, dynamic.WEIGHT),
    "channel_mul": lambda x, ids: rtk.channel_mul(x, dynamic.WEIGHT),
    "euler_step": lambda x, ids: rtk.euler_step(x, 2 * x, 0.1),
    "cfg_combine": lambda x, ids: rtk.cfg_combine(x, 2 * x, x + 1, 0.5),
    "patchify": lambda x, ids: rtk.patchify(x.view(-1, 8, 8, 4), 4),
    "quantize_mxfp8": lambda x, ids: rtk.quantize_mxfp8(x.detach()),
    "quantize_mxfp4": lambda x, ids: rtk.quantize_mxfp4(x.detach()),
    "dequantize_mxfp8": lambda x, ids: rtk.dequantize_mxfp8(*rtk.quantize_mxfp8(x.detach())),
    "dequantize_mxfp4": lambda x, ids: rtk.dequantize_mxfp4(*rtk.quantize_mxfp4(x.detach())),
    "dequantize_nvfp4": lambda x, ids: rtk.dequantize_nvfp4(
        *rtk.quantize_nvfp4(x.detach(), global_scale=0.01)[:2], 0.01
    ),
    "quantize_nvfp4": lambda x, ids: rtk.quantize_nvfp4(x.detach(), global_scale=0.01)[:2],
    "grouped_mm": lambda x, ids: rtk.grouped_mm(
        x.bfloat16(), dynamic.STACK, offs=torch.full((2,), x.shape[0], dtype=torch.int32, device=x.device)
    ),
    "moe_unpermute": lambda x, ids: _there_and_back(x, rtk.moe_index(ids, dynamic.EXPERTS)),  # drops no choice
    "rms_norm, wide": lambda x, ids: rtk.rms_norm(x.repeat(1, 9), dynamic.WEIGHT.repeat(9)),
    "layer_norm, wide": lambda x, ids: rtk.layer_norm(x.repeat(1, 9)),
    "scaled_mm, bias": lambda x, ids: rtk.scaled_mm(x.bfloat16(), VOCABULARY.bfloat16(), bias=VOCABULARY[:, 0]),
    "attention_decode, sequences": lambda x, ids: rtk.attention_decode(
        dynamic._heads(x.detach()), *(dynamic._heads(x.detach()).unsqueeze(1).expand(-1, 9, -1, -1),) * 2,
        1 + ids[:, 0].int(),
    ),
}  # fmt: skip
# Their sums over rows or their groups follow from the batch; other forms of these functions are compared.
OTHERWISE = {
    "cross_entropy, one pass", "fp8_linear, tensor", "jsd, labels", "jsd, sequences", "kl_div, one pass"
}  # fmt: skip


def _promise(name: str) -> Promise:
    return PROMISES.get(name.split(",")[0], Promise(""))  # a test says what is missing


ROW_CALLS = sorted(
    name for name in CALLS
    if (name not in OTHERWISE and _promise(name).kind == ROW) or name == "attention_decode, sequences"
)  # fmt: skip


def _lengths(x: Tensor) -> Tensor:
    return torch.full(x.shape[:1], x.shape[1], dtype=torch.int32, device=x.device)


def _packed(x: Tensor) -> Tensor:
    ends = torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], dtype=torch.int32, device=x.device)
    found = rtk.attention_varlen(*dynamic._qkv(x.flatten(0, 1)), ends, ends, *x.shape[1:2] * 2, causal=True)
    return found.unflatten(0, x.shape[:2])


# Calls with sequences ``[sequences, tokens, HIDDEN]``.
SEQUENCES: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: rtk.attention(*dynamic._qkv(x), causal=True, return_lse=False),
    "sdpa": lambda x: rtk.sdpa(*(t.transpose(1, 2) for t in dynamic._qkv(x)), is_causal=True),
    "mla_attention": lambda x: rtk.mla_attention(*dynamic._qkv(x)),
    "attention_varlen": _packed,
    "attention_decode": lambda x: rtk.attention_decode(
        dynamic._heads(x.detach()[:, -1]), *(dynamic._heads(x.detach()),) * 2, _lengths(x)
    ),
    "mla_decode": lambda x: rtk.mla_decode(
        dynamic._heads(x.detach()[:, -1]), dynamic._heads(x.detach())[:, :, 0], _lengths(x), value_width=64
    ),
    "lightning_attention": lambda x: rtk.lightning_attention(*dynamic._qkv(x), dynamic.WEIGHT[:4]),
    "gated_delta_rule": lambda x: rtk.gated_delta_rule(
        *dynamic._qkv(x), -x[..., :4].abs(), x[..., :4].sigmoid(), l2norm=True
    ),
    "ssd": lambda x: rtk.ssd(
        dynamic._heads(x), x[..., :4], -dynamic.WEIGHT[:4], *(dynamic._heads(x)[..., :2, :],) * 2,
        D=dynamic.WEIGHT[:4], dt_softplus=True,
    ),
    "causal_conv1d": lambda x: rtk.causal_conv1d(x, dynamic.WEIGHT[:, None].repeat(1, 4)),
    "conv": lambda x: rtk.conv(
        x.view(x.shape[0], 4, -1, 64), dynamic.WEIGHT[:36].view(4, 1, 3, 3), padding=1, groups=4
    ),
}  # fmt: skip


def test_every_row_and_every_sequence_is_compared() -> None:
    """Nothing that has a batch is left out: it is compared below, or it raises."""
    of_kind = {kind: {name for name, promise in PROMISES.items() if promise.kind == kind} for kind in MEANING}
    assert {name.split(",")[0] for name in ROW_CALLS} - {"attention_decode"} == of_kind[ROW]
    assert set(SEQUENCES) == of_kind[SEQUENCE]


@at("sm_80", "sm_90")
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_do_not_depend_on_their_batch(name: str, place: str) -> None:
    with running_on(place), rtkernels.batch_invariant(2):
        x = torch.randn(4, 70, dynamic.HIDDEN, generator=torch.Generator().manual_seed(4))
        x[1], x[2] = 1e3 * x[1], torch.nan

        def run(x: Tensor) -> list[Tensor]:
            leaf = x.clone().requires_grad_()
            results = dynamic._tensors(SEQUENCES[name](leaf))
            return [*results, *(g for g in dynamic._gradient(results, leaf) if g is not None)]

        full, last = run(x), run(x[3:])
        for one, two, first in zip(full, last, run(x[:1]), strict=True):
            assert torch.isfinite(two).all()
            assert torch.equal(one[3:], two) and torch.equal(one[:1], first)


@at("sm_90")
@pytest.mark.parametrize("name", [n for n in CALLS if PROMISES[n.split(",")[0]].kind == BATCH])
def test_results_of_a_batch_are_repeated(name: str, place: str) -> None:
    x, ids = dynamic._inputs(33)
    with running_on(place):
        found = []
        for level in (0, 1, 2, 2):
            with rtkernels.batch_invariant(level):
                found.append(dynamic._tensors(CALLS[name](x, ids)))
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.every_op
def test_every_public_function_promises_something() -> None:
    missing = sorted({*PUBLIC} - {*PROMISES})
    assert not missing, f"add {', '.join(missing)} to PROMISES in rtkernels/ops/shared/batch_invariance.py"
    assert sorted(PROMISES) == PUBLIC
    assert {promise.kind for promise in PROMISES.values()} == {*MEANING}


def test_the_page_has_the_table() -> None:
    assert table() in (ROOT / "docs/how_to/batch_invariance.md").read_text()


def _run(name: str, x: Tensor, ids: Tensor, gradient: bool) -> list[Tensor]:
    x = x.clone().requires_grad_(gradient)
    results = dynamic._tensors(CALLS[name](x, ids))
    found = [] if not gradient else [g for g in dynamic._gradient(results, x) if g is not None]
    return [*(t.detach() for t in results), *found]


def _row(full: Tensor, alone: Tensor, i: int, rows: int) -> tuple[Tensor, Tensor] | None:
    """Return row i of a result, and that of a call with this row only; None if there are no such rows."""
    if full.dim() != alone.dim():
        return None
    dims = [d for d in range(full.dim()) if full.shape[d] != alone.shape[d]]
    if len(dims) != 1 or full.shape[dims[0]] % rows or alone.shape[dims[0]] * rows != full.shape[dims[0]]:
        return None
    each = alone.shape[dims[0]]
    return full.narrow(dims[0], i * each, each), alone


@at("sm_80", "sm_90")
@pytest.mark.parametrize("name", ROW_CALLS)
def test_rows_do_not_depend_on_their_batch(name: str, place: str) -> None:
    compared = 0
    with running_on(place), rtkernels.batch_invariant(2):
        for rows in (37, 5):
            x, ids = dynamic._inputs(rows)
            x[1], x[2] = 1e4 * x[1], torch.nan
            full = _run(name, x, ids, gradient=True)
            for i in (0, rows - 1):
                alone = _run(name, x[i : i + 1], ids[i : i + 1], gradient=True)
                for pair in (_row(*two, i, rows) for two in zip(full, alone, strict=True)):
                    if pair is not None:
                        compared += 1
                        assert torch.equal(*(t.nan_to_num(nan=7.0) for t in pair)), (rows, i)
    assert compared, "no result has rows"


NUMBERS = {"cuda": (*range(1, 65), 127, 128, 129, 513), "sm_90": (2, 33)}  # of rows, from batches of:
BATCHES = {"cuda": 4096, "sm_90": 66}
EMULATED = ("rms_norm", "layer_norm", "softmax", "scaled_mm", "cross_entropy")


def _row_dim(one: Tensor, other: Tensor) -> int | None:
    """Return the dimension of rows, from results for different numbers of rows; None if there is none."""
    dims = [d for d in range(one.dim()) if one.dim() == other.dim() and one.shape[d] != other.shape[d]]
    return dims[0] if len(dims) == 1 else None


@pytest.mark.parametrize(
    ("name", "place"),
    [pytest.param(name, "cuda", marks=PLACES["cuda"]) for name in ROW_CALLS]
    + [pytest.param(name, "sm_90", marks=PLACES["sm_90"]) for name in EMULATED],
)
def test_rows_of_any_number(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of rows, any place, permuted, beside rows that are huge or NaN, at any address."""
    rows, compared = BATCHES[place], 0
    with running_on(place) as device, rtkernels.batch_invariant(2):
        for module in (dynamic, sys.modules[__name__]):
            for key, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    monkeypatch.setattr(module, key, value.to(device))
        x, ids = (t.to(device) for t in dynamic._inputs(rows))
        x[1], x[2] = 1e4 * x[1], torch.nan
        full = _run(name, x, ids, gradient=True)
        dims = [_row_dim(*two) for two in zip(full, _run(name, x[:1], ids[:1], gradient=True), strict=True)]

        def check(found: list[Tensor], chosen: Tensor) -> None:
            nonlocal compared
            for result, part, dim in zip(full, found, dims, strict=True):
                if dim is None or result.shape[dim] != rows or part.shape[dim] != len(chosen):
                    continue
                compared += 1
                wanted = result.index_select(dim, chosen)
                pair = (t.view(torch.uint8) if t.element_size() == 1 else t.nan_to_num(nan=7.0) for t in (wanted, part))
                assert torch.equal(*pair), (len(chosen), int(chosen[0]))

        for count in NUMBERS[place]:
            first = count * 61 % (rows - count)
            chosen = torch.arange(first, first + count, device=device)
            check(_run(name, x[chosen], ids[chosen], gradient=True), chosen)
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
        check(_run(name, x[chosen], ids[chosen], gradient=True), chosen)
        shifted = torch.empty(5 * x.shape[1] + 1, device=device)[1:].view(5, -1).copy_(x[:5])
        results = [t.detach() for t in dynamic._tensors(CALLS[name](shifted, ids[:5]))]
        check([*results, *full[len(results) :]], torch.arange(5, device=device))
    assert compared, "no result has rows"


@at("sm_80", "sm_90")
@pytest.mark.parametrize("name", sorted(name for name, promise in PROMISES.items() if promise.kind == REFUSED))
def test_what_cannot_be_invariant_raises(name: str, place: str) -> None:
    x, ids = dynamic._inputs(8)
    with running_on(place), rtkernels.batch_invariant(1), pytest.raises(ArgumentError, match="batch-invariant"):
        dynamic.CALLS[name](x, ids)
    with running_on(place):
        dynamic.CALLS[name](x, ids)


REFUSALS: dict[str, Callable[[Tensor], Any]] = {
    "fp8_linear": lambda x: rtk.fp8_linear(x, dynamic.WEIGHTS, recipe="tensor"),
    "quantize_fp8": lambda x: rtk.quantize_fp8(x, granularity="tensor"),
    "quantize_fp8, block": lambda x: rtk.quantize_fp8(x, granularity="block"),
    "quantize_int8": lambda x: rtk.quantize_int8(x, granularity="tensor"),
    "quantize_nvfp4": lambda x: rtk.quantize_nvfp4(x),
    "rms_norm": lambda x: rtk.rms_norm(x, quant=rtk.Quant(dynamic.F8, granularity="tensor")),
    "scaled_mm": lambda x: rtk.scaled_mm(x.bfloat16(), VOCABULARY.bfloat16(), backend="torch"),
    "scaled_mm, skinny": lambda x: rtk.scaled_mm(x.bfloat16(), VOCABULARY.bfloat16(), backend="skinny"),
}


@at("sm_90")
@pytest.mark.parametrize("name", REFUSALS)
def test_options_that_cannot_be_invariant_raise(name: str, place: str) -> None:
    x, _ = dynamic._inputs(8)
    with running_on(place), rtkernels.batch_invariant(1), pytest.raises(ArgumentError, match="batch-invariant"):
        REFUSALS[name](x)


# Sums over rows that cannot start from a sum so far.
WEIGHT_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "group_rms_norm_gate": lambda x, w: rtk.group_rms_norm_gate(x, x.detach(), w, groups=4),
    "causal_conv1d": lambda x, w: rtk.causal_conv1d(x[None], w[:, None].expand(-1, 4)),
    "experts": lambda x, w: _expert(x, w),
}


def _expert(x: Tensor, weight: Tensor) -> Tensor:
    from rtkernels.models.experts import _Product

    stack = torch.nn.Parameter(weight.detach().expand(2, 8, -1).bfloat16().contiguous())
    stack.main_grad = torch.zeros(stack.shape)
    return _Product.apply(x.bfloat16(), stack, torch.tensor([2, 4], dtype=torch.int32))


@at("sm_80")
@pytest.mark.parametrize("name", WEIGHT_GRADIENTS)
def test_other_gradients_of_weights_raise_at_level_3(name: str, place: str) -> None:
    x, _ = dynamic._inputs(4)
    weight = dynamic.WEIGHT.clone().requires_grad_()
    for level in (2, 3):
        with running_on(place), rtkernels.batch_invariant(level):
            if level == 2:
                WEIGHT_GRADIENTS[name](x, weight).sum().backward()
                continue
            with pytest.raises(ArgumentError, match="batch-invariant"):
                WEIGHT_GRADIENTS[name](x, weight).sum().backward()


def test_sequences_and_batches_are_declared() -> None:
    kinds = [promise.kind for promise in PROMISES.values()]
    assert kinds.count(SEQUENCE) >= 8 and kinds.count(BATCH) >= 8
