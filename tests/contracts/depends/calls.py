"""The calls: public functions with the arguments of the fuzzer, overloads of aten with those of the benchmark."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rtkernels
from contracts import test_dynamic_rows
from contracts.fuzz import calls as fuzz_calls
from contracts.fuzz import extra_calls
from contracts.fuzz.calls import leaves

_SHAPE = (8, 16)
# A call of these is emulated for a second or more: another call of the same function is here as well, or the function
# is a wrapper of one.
TOO_SLOW = {
    "attention_varlen()", "mla_decode()", "attention(), bias", "attention(), limits", "attention(), long",
    "attention_quantized()", "sage_attention()", "scaled_mm(), add, large", "grouped_mm()", "grouped_mm_masked()",
    "grouped_wgrad()",
}  # fmt: skip
# Public functions without a call here: these take numbers only, wait for reports, or put tensors in a tuple.
NO_CALLS = {"check_labels", "moe_rows", "nvfp4_scale_bytes", "tensor_list"}
# A sample has calls that are emulated in a few milliseconds.
_NOT_SAMPLED = TOO_SLOW | {
    "rms_norm_router()", "router_gemm()", "lightning_attention()", "lightning_attention_step()", "moe_permute_fp8()",
    "load_balancing_loss(), sequences", "scaled_mm(), quantised", "scaled_mm(), kn", "scaled_mm(), rows and bias",
    "grouped_mm(), same matrix", "grouped_mm(), rows", "grouped_wgrad(), overwritten", "quantize_fp8_experts()",
    "attention_decode()", "embedding_grad_()", "scatter_add()", "scatter_add(), weights", "glu_fp8_backward()",
    "fp8_linear()", "fp8_linear(), hadamard", "fp8_linear(), row", "fp8_linear(), smooth", "fp8_linear(), tensor",
    "gated_mm()", "quantize_qk()", "quantize_v()", "scaled_mm()", "attention()", "attention(), sinks",
    "attention(), bhld", "sdpa()", "mla_attention()", "transpose_experts()", "moe_index()", "moe_row_id_map()",
    "linear_cross_entropy()", "linear_cross_entropy(), none", "scaled_mm(), add, mma",
    "gated_delta_rule()", "gated_delta_rule_step()", "ssd()", "ssd_step()", "decode_linear()", "chunk_attention()",
    "sparse_mla()", "indexer_logits()", "indexer_topk()", "conv()", "linear_logprob()", "linear_divergence()",
}  # fmt: skip


class Call(NamedTuple):
    """One call, with arguments by name and tensors on the CPU.

    Attributes:
        name: ``rms_norm(), residual`` or ``aten add.Tensor``.
        function: Called with `given` by name.
        given: All arguments but those that an overload of aten has by default.
        aten: It is an overload of aten.
    """

    name: str
    function: Callable[..., Any]
    given: dict[str, Any]
    aten: bool = False

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Tensors among the arguments, also those of lists and of objects with fields."""
        return [(name, value) for name, value in leaves(self.given, "") if isinstance(value, Tensor)]

    def call(self, given: dict[str, Any]) -> Any:
        """Call it."""
        if self.aten:  # as torch does
            names = [argument.name for argument in self.function._schema.arguments if not argument.kwarg_only]
            some = [given[name] for name in names if name in given]
            return self.function(*some, **{name: value for name, value in given.items() if name not in names})
        return self.function(**given)

    def replays(self) -> list[Any]:
        """Return the functions that replay calls of it."""
        if self.aten:
            from rtkernels.aten.replay import known_calls

            known = known_calls(self.name.removeprefix("aten "), "CUDA")
            return [found.replay for found in known.values() if found.replay is not None]
        recent = getattr(self.function, "recent", None)
        return [] if recent is None else [known.replay for known in recent.known.values() if known.replay is not None]


def public() -> dict[str, Callable[[], Call]]:
    """Return what makes a call of every public function, by name."""
    makers: dict[str, Callable[[], Call]] = {}
    for label, call in test_dynamic_rows.CALLS.items():
        name = label.partition(",")[0]
        makers[f"{name}(){label[len(name) :]}"] = lambda name=name, call=call: (name, fuzz_calls._captured(name, call))
    for label, (name, *given) in extra_calls.calls().items():
        makers[f"{name}(){label}"] = lambda name=name, given=given: (name, given)
    for name, args in _others().items():
        makers[f"{name}()"] = lambda name=name, args=args: (name, (args, {}))
    return {label: lambda label=label, make=make: _public(label, *make()) for label, make in makers.items()}


def _others() -> dict[str, tuple[Any, ...]]:
    """Return functions that neither has, with arguments; ``NO_CALLS`` are missing."""
    generator = torch.Generator().manual_seed(8)
    packed = torch.randint(0, 256, (5, 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (5, 4), generator=generator, dtype=torch.uint8)
    return {
        "dequantize_mxfp4": (packed, scales[:, :2]),
        "dequantize_nvfp4": (packed, scales.view(torch.float8_e4m3fn)),
        "fp8_weight": (torch.randn(24, 64, generator=generator),),
        "nvfp4_swizzle": (scales,),
        "nvfp4_unswizzle": (torch.arange(512).to(torch.uint8), 5, 64),
        "rope_table": (torch.arange(6), 16),
    }


def _public(label: str, name: str, given: Any) -> Call:
    function = getattr(rtkernels, name)
    bound = inspect.signature(function).bind(*given[0], **given[1])
    bound.apply_defaults()
    return Call(label, function, dict(bound.arguments))


def aten() -> dict[str, Callable[[], Call | None]]:
    """Enable all overrides, and return what makes a call of every overload that is replayed, by name."""
    from rtkernels.aten import table

    for name in table.MIN_ELEMENTS:
        table.MIN_ELEMENTS[name] = 0
    rtkernels.enable("all")
    return {f"aten {name}": lambda row=row: _aten(row) for name, row in table.table().items() if row.replays}


def _aten(row: Any) -> Call | None:
    from rtkernels.aten import table

    torch.manual_seed(0)
    made = _aten_arguments(row)
    if made is None:
        return None
    base, _, overload = row.name.partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload or "default")
    schema = table.schema_of(row.name).arguments
    given = {argument.name: value for argument, value in zip(schema, made[0], strict=False)} | made[1]
    return Call(f"aten {row.name}", function, given, aten=True)


def _aten_arguments(row: Any) -> Any:
    """Return the arguments of an overload; one with `out` has those of its functional form."""
    from bench.measure.aten import arguments
    from rtkernels.aten import table

    made = arguments(row, _SHAPE, torch.float32, "cpu")
    schema = table.schema_of(row.name).arguments
    outs = [argument.name for argument in schema if argument.kwarg_only and argument.alias_info is not None]
    if made is not None or len(outs) != 1:
        return made
    base, _, overload = row.name.partition(".")
    for other in (overload.removesuffix("out").removesuffix("_"), "Tensor", "self", "dim_IntList", "Scalar"):
        functional = table.table().get(f"{base}.{other}" if other else base)
        found = None if functional is None else arguments(functional, _SHAPE, torch.float32, "cpu")
        names = [argument.name for argument in table.schema_of(functional.name).arguments] if found else []
        if not found or names[: len(found[0])] != [argument.name for argument in schema][: len(found[0])]:
            continue
        function = getattr(getattr(torch.ops.aten, base), other or "default")
        try:
            result = function(*found[0], **found[1])
        except (RuntimeError, TypeError):
            continue
        if isinstance(result, Tensor):
            return found[0], {**found[1], outs[0]: torch.empty_like(result)}
    return None


def chosen(kind: str, pattern: str, rng: random.Random, count: int | None, part: int, parts: int) -> Iterator[Call]:
    """Yield calls whose names have `pattern` in them: `count` at random, or a part of all."""
    makers = aten() if kind == "aten" else public()
    names = [name for name in makers if pattern in name]
    if count is not None:
        names = rng.sample([name for name in names if name not in _NOT_SAMPLED], count)
    for i, name in enumerate(names):
        call = makers[name]() if i % parts == part else None
        if call is not None:
            yield call
