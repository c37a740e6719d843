"""vLLM's multi-head latent attention: the decode backend ``RTKERNELS_MLA`` and the prefill backend ``RTKERNELS``.

``mla_decode`` reads the paged latents, ``mla_attention`` the expanded keys and values of prompts, and
``append_kv_cache`` writes 512 + 64 columns of new tokens. The split of a batch into both parts, the expansion of
cached latents in chunks, and the projections are vLLM's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

import rtkernels


class RtkernelsMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """vLLM's builder; several tokens per request (speculative decoding) take the decode kernel."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM


class RtkernelsMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """The latent attention of one layer."""

    can_return_lse_for_decode: bool = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla_args: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla_args,
        )  # fmt: skip
        given = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in given.items():
            if value:
                raise NotImplementedError(f"RTKERNELS_MLA attention: {name} is given; expected None")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"RTKERNELS_MLA attention: attn_type is {attn_type}; expected decoder")
        if kv_cache_dtype.startswith("fp8"):
            raise NotImplementedError(
                f"RTKERNELS_MLA attention: kv_cache_dtype is {kv_cache_dtype}; expected auto, float16 or bfloat16"
            )

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor, skip_scale: bool = False,
    ) -> None:  # fmt: skip
        """Write latents and rotated keys of new tokens into their slots."""
        if kv_cache.numel():
            rtkernels.compat.flaggems.concat_and_cache_mla(
                kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), "auto", k_scale
            )

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention of decoding requests in the space of latents, and its log-sum-exp."""
        q = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        decode = attn_metadata.decode
        requests, heads = decode.seq_lens.shape[0], q.shape[1]
        tokens = q.shape[0] // max(requests, 1)
        if requests * tokens != q.shape[0]:
            raise NotImplementedError(
                f"RTKERNELS_MLA attention: {q.shape[0]} tokens of {requests} requests; expected the same number of each"
            )
        out, lse = rtkernels.mla_decode(
            q.view(requests, tokens, heads, q.shape[2]), kv_c_and_k_pe_cache, decode.seq_lens,
            page_table=decode.block_table, value_width=self.kv_lora_rank, scale=self.scale,
            causal=attn_metadata.causal, return_lse=True,
        )  # fmt: skip
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


class RtkernelsMLABackend(MLACommonBackend):
    """What vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name for ``--attention-backend``."""
        return "RTKERNELS_MLA"

    @staticmethod
    def get_impl_cls() -> type[RtkernelsMLAImpl]:
        """Return the class of a layer's attention."""
        return RtkernelsMLAImpl

    @staticmethod
    def get_builder_cls() -> type[RtkernelsMLAMetadataBuilder]:
        """Return the class that prepares a batch."""
        return RtkernelsMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page sizes: multiples of 16."""
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the widths of latents with their rotated keys."""
        return [320, 512, 576]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return True from 8.0 on."""
        return (capability.major, capability.minor) >= (8, 0)


class RtkernelsMLAPrefillBackend(MLAPrefillBackend):
    """Attention of prompts over expanded keys and values, whose widths differ."""

    @staticmethod
    def get_name() -> str:
        """Return the name for ``mla_prefill_backend``."""
        return "RTKERNELS"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        """Return True from 8.0 on."""
        return device_capability is not None and (device_capability.major, device_capability.minor) >= (8, 0)

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        """Return True for multiples of 8 up to 256."""
        width = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return all(size % 8 == 0 and 8 <= size <= 256 for size in (width, mla_dimensions.v_head_dim))

    def supports_out(self) -> bool:
        """Return True: results are written to `out`."""
        return True

    def run_prefill_new_tokens(
        self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Return the causal attention of new tokens over each other."""
        if output_scale is not None:
            raise NotImplementedError("RTKERNELS MLA prefill: an output scale is given; expected None")
        m = self._prefill_metadata
        ends, length = m.query_start_loc, m.max_query_len
        return self._run(q, k, v, ends, ends, length, length, True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of new tokens over a part of what came before them, and its log-sum-exp."""
        return self._run(
            q, k, v, chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len, False, True, out
        )

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, causal: bool,
        lse: bool, out: Tensor | None,
    ) -> Any:  # fmt: skip
        return rtkernels.mla_attention(
            q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
            scale=self.scale, causal=causal, return_lse=lse, out=(out, None) if lse and out is not None else out,
        )  # fmt: skip
