"""vLLM's attention backend ``RTKERNELS``: prefill, chunked prefill, decode and mixed batches over its paged cache.

One launch of ``append_kv_cache`` writes new keys and values, one call of ``attention_varlen`` reads the pages. Lengths
and pages are read on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

import rtkernels


@dataclass
class RtkernelsMetadata:
    """What one batch has in common for all layers."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool


class RtkernelsMetadataBuilder(AttentionMetadataBuilder[RtkernelsMetadata]):
    """Takes what vLLM knows of a batch as it is: our kernels need no schedule."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RtkernelsMetadata:
        """Return the metadata of a batch, without copies."""
        c = common_attn_metadata
        if isinstance(c.causal, Tensor):
            raise NotImplementedError("RTKERNELS attention: causal is a tensor; expected one mask for all requests")
        return RtkernelsMetadata(
            c.num_actual_tokens, c.max_query_len, c.query_start_loc, c.max_seq_len, c.seq_lens, c.block_table_tensor,
            c.slot_mapping, bool(c.causal),
        )  # fmt: skip


class RtkernelsImpl(AttentionImpl[RtkernelsMetadata]):
    """The attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"RTKERNELS attention: attn_type is {attn_type}; expected decoder")
        if kv_cache_dtype.startswith("fp8") and head_size % 16:
            raise NotImplementedError(
                f"RTKERNELS attention: head_size is {head_size}; expected a multiple of 16 with an fp8 cache"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.softcap = logits_soft_cap or 0.0
        self.sinks, self.attn_type = sinks, attn_type
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as [pages, page size, heads, width], views of [pages, heads, page size, 2 width]."""
        k, v = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if not self.kv_cache_dtype.startswith("fp8"):
            return k, v
        return k.view(torch.float8_e4m3fn), v.view(torch.float8_e4m3fn)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write keys and values of new tokens into their slots."""
        dtype = "fp8" if self.kv_cache_dtype.startswith("fp8") else "auto"
        rtkernels.compat.flaggems.reshape_and_cache_flash(
            key, value, *self._caches(kv_cache), slot_mapping, dtype, layer._k_scale, layer._v_scale
        )  # fmt: skip

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: RtkernelsMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write the attention of a batch to `output` and return it; the new keys are in the cache already."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("RTKERNELS attention: an output scale is given; expected None")
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        m, rows = attn_metadata, attn_metadata.num_actual_tokens
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        k, v = self._caches(kv_cache)
        scales = (layer._k_scale, layer._v_scale) if k.dtype == torch.float8_e4m3fn else (None, None)
        rtkernels.attention_varlen(
            query[:rows], k, v, m.query_start_loc, None, m.max_query_len, m.max_seq_len, scale=self.scale,
            causal=m.causal, window=self.window, softcap=self.softcap, sinks=self.sinks, alibi_slopes=self.slopes,
            seqused_k=m.seq_lens, page_table=m.block_table, k_scale=scales[0], v_scale=scales[1],
            out=output[:rows].view(rows, self.num_heads, self.head_size),
        )  # fmt: skip
        return output


class RtkernelsBackend(AttentionBackend):
    """What vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page sizes: multiples of 16."""
        return [MultipleOf(16)]

    @staticmethod
    def get_name() -> str:
        """Return the name for ``--attention-backend``."""
        return "RTKERNELS"

    @staticmethod
    def get_impl_cls() -> type[RtkernelsImpl]:
        """Return the class of a layer's attention."""
        return RtkernelsImpl

    @staticmethod
    def get_builder_cls() -> type[RtkernelsMetadataBuilder]:
        """Return the class that prepares a batch."""
        return RtkernelsMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return True for multiples of 8 up to 256."""
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: GPT-OSS."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return True from 8.0 on; fp8 caches need no more."""
        return (capability.major, capability.minor) >= (8, 0)
