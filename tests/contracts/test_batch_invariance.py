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
from rtkernels.ops.shared.batch_invariance import BATCH, MEANING, PROMISES, REFUSED, ROW, SEQUENCE, table
from rtkernels.runtime.operator import registry

ROOT = Path(__file__).parents[2]
PUBLIC = sorted({name for op in registry.ops() for name in op.public})
rtk = rtkernels
VOCABULARY = torch.randn(40, dynamic.HIDDEN, generator=torch.Generator().manual_seed(5))


def _there_and_back(x: Tensor, index: Any) -> Tensor:
    return rtk.moe_unpermute(rtk.moe_permute(x, index), index)


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
    "embedding": lambda x, ids: rtk.embedding(ids, VOCABULARY),
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
# Positions, places and sizes of groups follow from the row's place in these calls, or rows are weights.
OTHERWISE = {
    "attention_varlen", "index_select", "jsd, labels", "jsd, sequences", "kl_div, one pass", "cross_entropy, one pass",
    "grouped_mm_masked", "mla_rope", "moe_permute", "moe_permute_fp8", "moe_permute_smooth", "qk_norm_rope",
    "qkv_split", "quantize_fp8_experts", "rope", "sort_chunks", "transpose", "transpose_experts", "gated_delta_rule",
    "fp8_linear, tensor",
}  # fmt: skip
ROW_CALLS = sorted(
    name for name in CALLS
    if (name not in OTHERWISE and PROMISES[name.split(",")[0]].kind == ROW) or name == "attention_decode, sequences"
)  # fmt: skip


def test_every_public_function_promises_something() -> None:
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
