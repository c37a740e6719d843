"""Expert layers of transformers: tokens sorted by expert, grouped products, one gate op, no device synchronisation.

Modules of transformers' experts interface have flags that describe the layout of their weights. If the gate is
recognised, the module gets our forward, as norms do. Others keep the implementation named in the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace
from rtkernels.models.merged import has_watched_child
from rtkernels.models.probe import (
    HALVES,
    NotRecognized,
    Recognized,
    Trial,
    check_plain,
    check_pure,
    difference,
    normal,
    probing,
    rows_of_scales,
    twin_of,
)
from rtkernels.models.recognize import activations, limits
from rtkernels.models.reuse import glu
from rtkernels.ops.act.act import KINDS
from rtkernels.ops.gemm.weight_gradient import TokenBlocks
from rtkernels.runtime.invariance import OF_EXPERTS, level, refuse, starts_from_result
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.torch_private import is_dynamo_compiling

_ON_CPU = (None, "eager", "grouped_mm", "batched_mm")  # implementations of the interface that run on the CPU
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def is_experts(module: nn.Module) -> bool:
    """Return True if a module has the flags of the experts interface."""
    return all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS) and hasattr(module, "_apply_gate")


def holds_experts(module: nn.Module) -> bool:
    """Return True if a module may be an expert layer: it has the flags, or a matrix for each expert."""
    matrices = [p for p in module._parameters.values() if p is not None and p.dim() == 3 and min(p.shape) > 1]
    enough = len(matrices) >= 2 or "expert" in type(module).__name__.lower()
    one_each = len({p.shape[0] for p in matrices}) == 1 and enough
    return is_experts(module) or (one_each and not any(True for child in module.children() for _ in child.parameters()))


@probing()
def recognize(module: nn.Module) -> Recognized:
    """Return which expert layer a candidate is.

    Raises:
        NotRecognized: It is none of ours.
    """
    _check_interface(module)
    act, limit = _gate_of(module) if module.has_gate else (_activation_alone(module), None)
    first = _first(module)
    check_plain(module)
    given = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    biases = {f"{first}_bias", "down_proj_bias"} if module.has_bias else set()
    if set(given) != {first, "down_proj"} | biases:
        raise NotRecognized(f"its parameters are {', '.join(given)}; expected {first}, down_proj and biases")
    widths = {size for shape in given.values() for size in shape[1:]}
    if any(len(shape) not in (2, 3) for shape in given.values()) or not widths <= set(_sizes(module, given)):
        raise NotRecognized("the sizes of its weights do not fit each other")
    options = (("act", act), ("bias", module.has_bias), ("transposed", module.is_transposed))
    kind = Recognized("plain_experts", options)
    if module.has_gate:
        kind = Recognized("experts", (*options[:2], ("concatenated", module.is_concatenated), options[2]))
    if limit is not None:
        kind = Recognized("limited_experts", (*kind.options, ("limit", limit)))
    _prove(module, kind, given)
    return kind


def _first(module: nn.Module) -> str:
    """Return the name of the first projection's weight."""
    return "gate_up_proj" if module.has_gate else "up_proj"


@probing()
def activation_of(module: nn.Module) -> str:
    """Return the activation of an expert layer's gate.

    Raises:
        NotRecognized: The activation is none of ours, or there is no gate.
    """
    act, limit = _gate_of(module)
    if limit is not None:
        raise NotRecognized("its gate is clamped")
    return act


def _gate_of(module: nn.Module) -> tuple[str, str | None]:
    """Return the activation of an expert layer's gate, and the attribute that is its limit (None: the usual one)."""
    _check_interface(module)
    if not module.has_gate:
        raise NotRecognized("its experts have no gate")

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        both = torch.cat([gate, up], -1) if module.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
        return type(module)._apply_gate(twin_of(module, {}), both)

    for name in (None, *limits(module)):
        found = activations(gated, None if name is None else getattr(module, name))
        if len(found) == 1:
            return found[0], name
    raise NotRecognized("its gate computes none of our activations")


def _check_interface(module: nn.Module) -> None:
    if not is_experts(module):
        raise NotRecognized("it is not of transformers' experts interface")
    if getattr(module, "has_post_expert_norm", False):
        raise NotRecognized("it normalises the results of experts")


@probing()
def _activation_alone(module: nn.Module) -> str:
    """Return the activation of experts without a gate."""
    trials = [Trial("for rows of any scale", (rows_of_scales(9, 64),))]
    trials.append(Trial("for large numbers", (normal(3, 64, seed=3) * 1e8,)))
    own = getattr(twin_of(module, {}), "act_fn", None)
    for kind in KINDS if callable(own) else ():
        if not any(difference(partial(rtkernels.act, kind=kind), own, trial) for trial in trials):
            return kind
    raise NotRecognized("its activation is none of ours")


def _sizes(module: nn.Module, given: dict[str, tuple[int, ...]]) -> dict[int, int]:
    """Map the widths of an expert layer to those of a small twin; equal widths stay equal."""
    _, both, hidden = given[_first(module)]
    if module.is_transposed:
        both, hidden = hidden, both
    return {hidden: 24, both: 32, both // 2: 16} if module.has_gate else {hidden: 24, both: 16}


def _prove(module: nn.Module, kind: Recognized, given: dict[str, tuple[int, ...]]) -> None:
    """Compare our forward with the module's own on a twin of small sizes.

    Raises:
        NotRecognized: They differ.
    """
    first = given[_first(module)]
    experts, sizes = first[0], _sizes(module, given)
    attributes = {old: new for old, new in sizes.items() if old != experts}  # the number of experts stays
    shapes = {name: (experts, *(sizes[size] for size in shape[1:])) for name, shape in given.items()}
    hidden = first[1 if module.is_transposed else 2]
    width, count = sizes[hidden], min(experts, 3)
    theirs = type(module).forward
    if getattr(getattr(module, "config", None), "_experts_implementation", "eager") not in _ON_CPU:
        theirs = inspect.unwrap(theirs)
    ours = replace.forward_of(kind.kind, type(module), **dict(kind.options))
    drawn = torch.rand(11, experts, generator=torch.Generator().manual_seed(5), dtype=torch.float32, device="cpu")
    chosen = drawn.argsort(-1)[:, :count]
    settings = [(torch.float32, True), (torch.float32, False), *((dtype, True) for dtype in HALVES)]
    for dtype, training in settings:
        fresh = {name: normal(*shape, seed=i, dtype=dtype) * 0.3 for i, (name, shape) in enumerate(shapes.items())}
        twin = twin_of(module, fresh, sizes=attributes, training=training)
        weights = normal(11, count, seed=8, dtype=dtype).softmax(-1)
        # In fp32, inputs exceed the limits of clamped gates. In 16 bits they stay inside: near a limit, rounding would
        # decide whether a value is clamped, and so its gradient.
        inside = min([1.0, *(getattr(module, name) / 8 for name in limits(module))])
        x = normal(11, width, dtype=dtype) * (3 if dtype == torch.float32 else inside)
        trial = Trial(f"in {str(dtype)[6:]}", (x, weights), lambda x, w: (x, chosen, w))
        if dtype == torch.float32:
            check_pure(partial(theirs, twin), twin, trial)
        parameters = [p for p in twin._parameters.values() if p is not None]
        if found := difference(partial(ours, twin), partial(theirs, twin), trial, parameters):
            raise NotRecognized(f"it computes other results than our experts: {found}")


class _Product(torch.autograd.Function):
    """``grouped_mm(x, weight)`` with an uninitialised gradient in the rows after the last expert's.

    Nothing reads those rows here; grouped_mm's own gradient would first fill all rows with zeros.
    """

    @staticmethod
    def forward(ctx, x, weight, ends, tokens=None):
        ctx.start, ctx.tokens = start_of(weight, "experts"), tokens
        if ctx.start is not None and tokens is None:
            refuse("the gradient of experts' weights with a main_grad", OF_EXPERTS)
        ctx.save_for_backward(x, weight, ends)
        return rtkernels.grouped_mm(x, weight, offs=ends, b_layout="nk")

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, ends = ctx.saved_tensors
        dx = rtkernels.grouped_mm(dy, weight, offs=ends, b_layout="kn") if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.start is not None:
            ctx.tokens().add_products_(ctx.start.total, dy, x)
            dw = ctx.start.added()
        elif ctx.needs_input_grad[1]:
            dw = rtkernels.grouped_wgrad(dy, x, offs=ends, out_dtype=weight.dtype)
        return dx, dw, None, None


@cache
def _torch_is_faster(device: int) -> bool:
    """Return True if torch has grouped-product kernels for this GPU; elsewhere it waits for the group sizes.

    Both were measured: docs/decisions/models.md.
    """
    return device >= 0 and torch.cuda.get_device_capability(device)[0] == 9


def _of_every_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return grouped products with ``[experts, in, out]``, computed as one product of all rows per expert.

    For fp32 in a CUDA graph: torch's grouped product would wait for the group sizes, and ours has no fp32.
    """
    row = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)[:, None]
    out = x.new_zeros(x.shape[0], weight.shape[-1])
    for i, own in enumerate(weight.unbind()):
        inside = row < ends[i] if i == 0 else (row >= ends[i - 1]) & (row < ends[i])
        out = torch.where(inside, x @ own, out)
    return out


def _token_blocks(index: rtkernels.MoeIndex) -> Callable[[], TokenBlocks]:
    """Return what computes, once, where rows of experts lie in sums of level 3."""
    tokens, choices = index.rows.shape

    @cache
    def blocks() -> TokenBlocks:
        slots = index.slots.long()
        return TokenBlocks(torch.where(slots < 0, slots, slots // choices), index.offsets[1:], tokens)

    return blocks


def _grouped(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool, tokens: Any = None) -> Tensor:
    """Return the products of groups of rows with the weights ``[experts, out, in]`` of their experts."""
    if (transposed or x.dtype == torch.float32) and start_of(weight, "experts") is not None:
        refuse("the gradient of these experts' weights with a main_grad", OF_EXPERTS)
    if x.dtype == torch.float32 and x.is_cuda and torch.cuda.is_current_stream_capturing():
        return _of_every_expert(x, weight if transposed else weight.transpose(-2, -1), ends)
    if level() and x.dtype != torch.float32:  # torch's kernels choose by the number of rows
        return _Product.apply(x, weight.transpose(-2, -1) if transposed else weight, ends, tokens)
    dense = x.shape[-1] % 8 == 0 and weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0 and weight.is_contiguous()
    if transposed or x.dtype == torch.float32 or (dense and _torch_is_faster(x.get_device())):
        return nn.functional.grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    if is_dynamo_compiling():
        return rtkernels.grouped_mm(x, weight, offs=ends)
    return _Product.apply(x, weight, ends)


class _BiasAndHalves(torch.autograd.Function):
    """Add the bias of each row's expert; if gate and up columns alternate, separate them into halves.

    Grouped products write neither the rows after the last expert's nor their gradients, so sums over rows exclude them.
    The sum is a product with a matrix of zeros and ones, which is deterministic.
    """

    @staticmethod
    def forward(ctx, x, bias, expert, alternating):
        if start_of(bias, "experts") is not None:
            refuse("the gradient of experts' biases with a main_grad", OF_EXPERTS)
        ctx.save_for_backward(expert)
        ctx.experts, ctx.alternating = bias.shape[0], alternating
        rows = bias.index_select(0, expert.clamp(max=bias.shape[0] - 1))
        if not alternating:
            return x + rows
        out, half = torch.empty_like(x), x.shape[-1] // 2
        for i, part in enumerate((out[:, :half], out[:, half:])):
            torch.add(x[:, i::2], rows[:, i::2], out=part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (expert,) = ctx.saved_tensors
        if ctx.alternating:
            half = dy.shape[-1] // 2
            dy = torch.stack((dy[:, :half], dy[:, half:]), -1).flatten(-2)
        dbias = None
        if ctx.needs_input_grad[1]:
            of_expert = expert == torch.arange(ctx.experts, dtype=torch.int64, device=dy.device)[:, None]
            written = torch.where((expert < ctx.experts)[:, None], dy, 0.0)
            dbias = of_expert.to(dy.dtype) @ written
        return dy, dbias, None, None


def _expert_of_row(index: rtkernels.MoeIndex) -> Tensor:
    """Return the expert of each permuted row; the number of experts for rows after the last group."""
    rows = torch.arange(index.slots.shape[0], device=index.slots.device, dtype=index.offsets.dtype)
    return torch.searchsorted(index.offsets[1:], rows, right=True)


def _experts(
    original: type[nn.Module], act: str, bias: bool, concatenated: bool, transposed: bool, limit: str | None = None
) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        if hidden_states.dtype != self.gate_up_proj.dtype or hidden_states.dim() != 2 or has_watched_child(self):
            return own(self, hidden_states, top_k_index, top_k_weights)
        highest = None if limit is None else getattr(self, limit)
        index = rtkernels.moe_index(top_k_index, self.num_experts)
        ends, tokens = index.offsets[1:], _token_blocks(index) if starts_from_result() else None
        if bias:
            expert = _expert_of_row(index)
            both = _grouped(rtkernels.moe_permute(hidden_states, index), self.gate_up_proj, ends, transposed, tokens)
            both = _BiasAndHalves.apply(both, self.gate_up_proj_bias, expert, not concatenated)
            y = _grouped(glu(both, act=act, limit=highest), self.down_proj, ends, transposed, tokens)
            y = _BiasAndHalves.apply(y, self.down_proj_bias, expert, False)
            return rtkernels.moe_unpermute(y, index, probs=top_k_weights, dense_probs=False)
        permuted = rtkernels.moe_permute(hidden_states, index, probs=top_k_weights, dense_probs=False)
        both = _grouped(permuted.y, self.gate_up_proj, ends, transposed, tokens)
        gate, up = (both, None) if concatenated else (both[..., ::2], both[..., 1::2])
        # Scaling rows by their routing weight commutes with the second product.
        inner = glu(gate, up, act=act, weight=permuted.probs, limit=highest)
        return rtkernels.moe_unpermute(_grouped(inner, self.down_proj, ends, transposed, tokens), index)

    return forward


replace.register("experts", _experts)
replace.register("limited_experts", _experts)


def _plain_experts(original: type[nn.Module], act: str, bias: bool, transposed: bool) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        if hidden_states.dtype != self.up_proj.dtype or hidden_states.dim() != 2 or has_watched_child(self):
            return own(self, hidden_states, top_k_index, top_k_weights)
        index = rtkernels.moe_index(top_k_index, self.num_experts)
        ends, tokens = index.offsets[1:], _token_blocks(index) if starts_from_result() else None
        expert = _expert_of_row(index) if bias else None
        y = rtkernels.moe_permute(hidden_states, index)
        for name in ("up_proj", "down_proj"):
            y = _grouped(y, getattr(self, name), ends, transposed, tokens)
            if bias:
                y = _BiasAndHalves.apply(y, getattr(self, f"{name}_bias"), expert, False)
            if name == "up_proj":
                y = rtkernels.act(y, act)
        return rtkernels.moe_unpermute(y, index, probs=top_k_weights, dense_probs=False)

    return forward


replace.register("plain_experts", _plain_experts)
