"""Modules of torchtitan on our kernels, and a converter for fp8 linear layers.

Overrides are named on torchtitan's command line, ``--override.imports rtkernels.integrations.torchtitan.rms_norm,...``;
the converter goes into a model's ``converters``. Modules keep torchtitan's parameters, so sharding and checkpoints do
not change. An override replaces configurations of exactly its class: subclasses compute something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.runtime import get_partition_spec
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components import loss as titan_loss
from torchtitan.config import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common import feed_forward as titan_feed_forward
from torchtitan.models.common import moe as titan_moe
from torchtitan.models.common import nn_modules as titan_modules
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module

import rtkernels
from rtkernels.errors import ArgumentError

_HALVES = (torch.bfloat16, torch.float16)
_FP8_MULTIPLE = 16  # features of a layer that fp8 products take without padding
_RECIPES = ("block", "row", "tensor")


def _like(x: Tensor, call: Callable[[], Tensor]) -> Tensor:
    """Return the result of a call, with x's type in spmd_types: its type checker does not know our operators."""
    if not spmd.is_type_checking():
        return call()
    with spmd.no_typecheck():
        result = call()
    spmd.assert_type(result, spmd.get_local_type(x), get_partition_spec(x))
    return result


# ---- norms and MLPs -------------------------------------------------------------------------------------------------


class RMSNorm(titan_modules.RMSNorm):
    """torchtitan's RMSNorm on :func:`rtkernels.rms_norm`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_modules.RMSNorm.Config):
        """Fields of torchtitan's configuration."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised input."""
        return _like(input, lambda: rtkernels.rms_norm(input, self.weight, eps=self.eps))


@override(target=titan_modules.RMSNorm.Config, exact=True, description="rtkernels.rms_norm")
def rms_norm(config: Any) -> RMSNorm.Config:
    """Replace ``RMSNorm``."""
    return derive(config, RMSNorm.Config)


class FeedForward(titan_feed_forward.FeedForward):
    """torchtitan's FeedForward with :func:`rtkernels.glu` between its projections."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_feed_forward.FeedForward.Config):
        """Fields of torchtitan's configuration."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``w2(silu(w1(x)) * w3(x))``."""
        gate, up = self.w1(x), self.w3(x)
        return self.w2(_like(gate, lambda: rtkernels.glu(gate, up)))


@override(target=titan_feed_forward.FeedForward.Config, exact=True, description="rtkernels.glu")
def feed_forward(config: Any, fp8: bool = False, recipe: str = "block") -> FeedForward.Config:
    """Replace ``FeedForward``; with `fp8` also its projections, as :class:`Fp8LinearConverter` does."""
    changes = {name: _in_fp8(getattr(config, name), recipe) for name in ("w1", "w2", "w3")} if fp8 else {}
    return derive(config, FeedForward.Config, **changes)


class GroupedExperts(titan_moe.GroupedExperts):
    """torchtitan's GroupedExperts on :func:`rtkernels.grouped_mm` and :func:`rtkernels.glu`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_moe.GroupedExperts.Config):
        """Fields of torchtitan's configuration."""

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return the experts' results for rows that are sorted by expert; rows after the last are uninitialised."""
        return _like(x_RD, lambda: self._products(x_RD, num_tokens_per_expert_E))

    def _products(self, x: Tensor, counts: Tensor) -> Tensor:
        given = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        w1, w2, w3 = ((w.to_local() if isinstance(w, DTensor) else w).bfloat16() for w in given)
        ends, rows = torch.cumsum(counts, dim=0, dtype=torch.int32), x.bfloat16()
        gate, up = (rtkernels.grouped_mm(rows, w, offs=ends, b_layout="nk") for w in (w1, w3))
        hidden = rtkernels.glu(gate, up)
        return rtkernels.grouped_mm(hidden, w2, offs=ends, b_layout="nk").type_as(x)


@override(target=titan_moe.GroupedExperts.Config, exact=True, description="rtkernels.grouped_mm")
def grouped_experts(config: Any) -> GroupedExperts.Config:
    """Replace ``GroupedExperts``."""
    return derive(config, GroupedExperts.Config)


# ---- attention ------------------------------------------------------------------------------------------------------


def _fits(q: Tensor, v: Tensor) -> bool:
    """Return whether our attention supports the widths of the heads."""
    return all(t.shape[-1] % 8 == 0 and t.shape[-1] <= 256 for t in (q, v))


class ScaledDotProductAttention(titan_attention.ScaledDotProductAttention):
    """torchtitan's ScaledDotProductAttention on :func:`rtkernels.attention`, in bfloat16 and float16.

    Other dtypes, heads wider than 256 and torch's context parallelism, which intercepts torch's own attention, run
    torchtitan's code.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan_attention.ScaledDotProductAttention.Config):
        """Fields of torchtitan's configuration."""

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any = None,
        scale: float | None = None, enable_gqa: bool = False, is_causal: bool = True, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return ``[batch, length, heads, width]``."""
        aligned = not is_causal or q_BLNH.shape[1] == k_BLNH.shape[1]  # torch aligns causal masks to the first key
        ours = attention_masks is None and aligned and q_BLNH.dtype in _HALVES and _fits(q_BLNH, v_BLNH)
        if not ours or isinstance(q_BLNH, DTensor):
            return super().forward(
                q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=scale, enable_gqa=enable_gqa,
                is_causal=is_causal, **kwargs,
            )  # fmt: skip
        return _like(q_BLNH, lambda: rtkernels.attention(q_BLNH, k_BLNH, v_BLNH, scale=scale, causal=is_causal))


@override(target=titan_attention.ScaledDotProductAttention.Config, exact=True, description="rtkernels.attention")
def scaled_dot_product_attention(config: Any) -> ScaledDotProductAttention.Config:
    """Replace ``ScaledDotProductAttention``."""
    return derive(config, ScaledDotProductAttention.Config)


class VarlenAttention(titan_attention.VarlenAttention):
    """torchtitan's VarlenAttention on :func:`rtkernels.attention_varlen`; computed in bfloat16, as torchtitan does."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan_attention.VarlenAttention.Config):
        """Fields of torchtitan's configuration."""

    def __init__(self, config: Config) -> None:
        Module.__init__(self)  # not torchtitan's, which loads FlashAttention 3
        self.window_size = config.window_size

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return ``[batch, length, heads, width]``, after `out_transform`, which also gets the log-sum-exps."""
        if not isinstance(attention_masks, titan_attention.VarlenMetadata):
            raise ArgumentError(f"attention_masks is a {type(attention_masks).__name__}; expected VarlenMetadata")
        results: list[Tensor] = []

        def call() -> Tensor:
            left, right = self.window_size
            masks = attention_masks
            q, k, v = (t.flatten(0, 1).bfloat16() for t in (q_BLNH, k_BLNH, v_BLNH))
            out, lse = rtkernels.attention_varlen(
                q, k, v, masks.cu_seq_q.int(), masks.cu_seq_k.int(), int(masks.max_q), int(masks.max_k), scale=scale,
                causal=right == 0, window=(left, right), return_lse=True,
            )  # fmt: skip
            results.append(lse)
            return out.view(*q_BLNH.shape[:3], v.shape[-1]).to(q_BLNH.dtype)

        out = _like(q_BLNH, call)
        if out_transform is None:
            return out
        lse = results[0].transpose(0, 1).reshape(q_BLNH.shape[:3])
        if spmd.is_type_checking():
            spec = get_partition_spec(q_BLNH)
            spec = None if spec is None else spmd.PartitionSpec(*spec[:-1])
            spmd.assert_type(lse, spmd.get_local_type(q_BLNH), spec)
        return out_transform(out, lse)


@override(target=titan_attention.VarlenAttention.Config, exact=True, description="rtkernels.attention_varlen")
def varlen_attention(config: Any) -> VarlenAttention.Config:
    """Replace ``VarlenAttention``."""
    return derive(config, VarlenAttention.Config)


# ---- loss -----------------------------------------------------------------------------------------------------------


def _sum_over_columns(logits: Tensor, labels: Tensor, group: Any, vocabulary: int) -> Tensor:
    """Return the summed loss of logits with this process's columns; torch gives the last process the smaller part."""
    part = -(-vocabulary // dist.get_world_size(group))
    first = min(vocabulary, part * dist.get_rank(group))
    return rtkernels.cross_entropy(
        logits, labels, reduction="sum", ignore_index=titan_loss.IGNORE_INDEX, group=group, vocab_start=first,
        vocab_size=vocabulary,
    )  # fmt: skip


def cross_entropy_sum(pred: Tensor, labels: Tensor, *, global_vocab_size: int | None = None) -> Tensor:
    """Return the summed cross entropy of logits, whose vocabulary may be split by any of torchtitan's backends.

    Args:
        pred: ``[batch, length, columns]``: a tensor, this process's columns, or a DTensor.
        labels: ``[batch, length]``.
        global_vocab_size: Size of the vocabulary; needed with ``spmd_backend="spmd_types"`` and tensor parallelism.

    Returns:
        A scalar in float32.

    Raises:
        ArgumentError: `global_vocab_size` is needed and missing.
    """
    if isinstance(pred, DTensor) and not isinstance(labels, DTensor):
        if pred.placements == (Shard(pred.ndim - 1),):
            return _sum_over_columns(pred.to_local(), labels, pred.device_mesh.get_group(), pred.shape[-1])
        pred = pred.full_tensor()
    elif not isinstance(pred, DTensor) and get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
        if global_vocab_size is None:
            raise ArgumentError(
                "global_vocab_size is None; expected the size of the vocabulary, which tensor parallelism splits: set "
                "CrossEntropyLoss.Config(global_vocab_size=...)"
            )
        group, typed = current_spmd_mesh().get_group("tp"), spmd.is_type_checking()
        with spmd.no_typecheck():
            loss = _sum_over_columns(pred, labels, group, global_vocab_size)
        if typed:
            spmd.assert_type(loss, {**spmd.get_local_type(pred), group: spmd.I})
        return loss
    with spmd.no_typecheck():
        loss = rtkernels.cross_entropy(pred, labels, reduction="sum", ignore_index=titan_loss.IGNORE_INDEX)
    if spmd.is_type_checking():
        spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
    return loss


class CrossEntropyLoss(titan_loss.CrossEntropyLoss):
    """torchtitan's CrossEntropyLoss on :func:`rtkernels.cross_entropy`, which reads 16-bit logits without a copy.

    It is not compiled by ``--compile.components loss``: it is one kernel already.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan_loss.CrossEntropyLoss.Config):
        """Fields of torchtitan's configuration."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        super().__init__(config)
        self.fn = cross_entropy_sum


@override(target=titan_loss.CrossEntropyLoss.Config, exact=True, description="rtkernels.cross_entropy")
def cross_entropy_loss(config: Any) -> CrossEntropyLoss.Config:
    """Replace ``CrossEntropyLoss``, also inside of ``ChunkedLossWrapper``."""
    return derive(config, CrossEntropyLoss.Config)


# ---- fp8 ------------------------------------------------------------------------------------------------------------


class Fp8Linear(rtkernels.nn.Fp8Linear, Module):
    """torchtitan's Linear on :class:`rtkernels.nn.Fp8Linear`: products of fp8 codes, parameters as before."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Fields of torchtitan's configuration, and the recipe of :func:`rtkernels.fp8_linear`."""

        recipe: str = "block"

    def __init__(self, config: Config) -> None:
        # save_weight: FSDP2 frees gathered weights after a forward pass, so their codes are not kept either.
        options = {"recipe": config.recipe, "save_weight": True}
        super().__init__(config.in_features, config.out_features, bias=config.bias, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        if not spmd.is_type_checking():
            return super().forward(input)
        with spmd.no_typecheck():
            result = super().forward(input)
        layout = None if self._sharding_config is None else self._sharding_config.out_src_shardings
        if layout is not None:
            spmd.assert_type(result, layout.axis_types, layout.partition_spec)
        return result


def _in_fp8(config: Linear.Config, recipe: str) -> Linear.Config:
    """Return the configuration of an fp8 layer; subclasses and sizes that are no multiples of 16 stay as they are."""
    if recipe not in _RECIPES:
        raise ArgumentError(f"recipe is {recipe!r}; expected one of {', '.join(map(repr, _RECIPES))}")
    if type(config) is not Linear.Config or config.in_features % _FP8_MULTIPLE or config.out_features % _FP8_MULTIPLE:
        return config
    return derive(config, Fp8Linear.Config, recipe=recipe)


@override(target=Linear.Config, fqns=["*layers.*.attention*"], exact=True, description="rtkernels.nn.Fp8Linear")
def attention_fp8(config: Any, recipe: str = "block") -> Linear.Config:
    """Replace the projections of attention by fp8 layers; :func:`feed_forward` has an option for those of an MLP."""
    return _in_fp8(config, recipe)


class Fp8LinearConverter(ModelConfigConverter):
    """Replace the linear layers of a model by :class:`Fp8Linear`.

    Raises:
        ArgumentError: The recipe is unknown.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """What to convert."""

        recipe: str = "block"
        """Recipe of :func:`rtkernels.fp8_linear`: "block", "row" or "tensor"."""

        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head", "router.gate"])
        """Layers with one of these in their name stay as they are."""

    def __init__(self, config: Config) -> None:
        if config.recipe not in _RECIPES:
            raise ArgumentError(f"recipe is {config.recipe!r}; expected one of {', '.join(map(repr, _RECIPES))}")
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Return the configuration of a model with fp8 layers; it is changed in place."""
        for name, config, parent, attribute in list(model_config.traverse(Linear.Config)):
            if any(part in name for part in self.config.filter_fqns):
                continue
            changed = _in_fp8(config, self.config.recipe)
            if parent is None:
                model_config = changed
            elif isinstance(parent, list):
                parent[attribute] = changed
            else:
                setattr(parent, attribute, changed)
        return model_config
