"""vLLM's latent attention, as far as our plugin uses it: signatures of its wheel, and a plain model of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

M = TypeVar("M")


class QueryLenSupport(Enum):
    SINGLE_ONLY = "single_only"
    UNIFORM = "uniform"


@dataclass
class MLACommonMetadata:
    """The fields that kernels read: the requests that decode come first."""

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    slot_mapping: Tensor
    causal: bool = True
    prefill: Any = None
    decode: Any = None


class MLACommonBackend:
    pass


class MLACommonMetadataBuilder(Generic[M]):
    pass


class MLACommonImpl(Generic[M]):
    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, q_lora_rank: int | None, kv_lora_rank: int, qk_nope_head_dim: int,
        qk_rope_head_dim: int, qk_head_dim: int, v_head_dim: int, kv_b_proj: Any, indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, float(scale), kv_cache_dtype
        self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim = (
            kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
        )  # fmt: skip
        self.v_head_dim, self.kv_b_proj = v_head_dim, kv_b_proj

    def _expand(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_b_proj(latent)[0].view(len(latent), self.num_heads, -1)
        k, v = both.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        return torch.cat((k, rotated.view(len(latent), 1, -1).expand(-1, self.num_heads, -1)), -1), v

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any,
        k_scale: Tensor, output: Tensor, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Attend to new tokens, then to what each request has in the cache; merge both."""
        prefill = attn_metadata.prefill
        backend, chunk = prefill.prefill_backend, prefill.chunk
        k, v = self._expand(kv_c_normed, k_pe)
        result = backend.run_prefill_new_tokens(q=q, k=k, v=v, return_softmax_lse=chunk is not None)
        if chunk is not None:
            cached = kv_c_and_k_pe_cache.flatten(0, 1)[chunk.slots]
            k, v = self._expand(*cached.split((self.kv_lora_rank, self.qk_rope_head_dim), -1))
            before = torch.full_like(result[0], torch.nan)
            context, lse = backend.run_prefill_context_chunk(chunk=chunk, q=q, k=k, v=v, out=before)
            assert context.data_ptr() == before.data_ptr()
            weights = torch.stack((result[1], lse)).softmax(0).transpose(1, 2).unsqueeze(-1)
            result = (weights[0] * result[0].float() + weights[1] * context.float()).to(q.dtype)
        output.copy_(result.flatten(1))


class MLAPrefillBackend:
    def __init__(
        self, num_heads: int, scale: float, kv_lora_rank: int, qk_nope_head_dim: int, qk_rope_head_dim: int,
        v_head_dim: int, vllm_config: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.scale = num_heads, scale

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


def metadata(
    backend: Any, new: list[int], known: list[int], table: Tensor, slots: Tensor, page: int
) -> MLACommonMetadata:
    """Return the metadata of a batch: numbers of new tokens and of all tokens, decoding requests first."""
    device = table.device
    decodes = next((i for i, count in enumerate(new) if count != 1), len(new))

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def ends(counts: list[int]) -> Tensor:
        return ints([sum(counts[:i]) for i in range(len(counts) + 1)])

    result = MLACommonMetadata(sum(new), decodes, decodes, len(new) - decodes, slots)
    if decodes:
        result.decode = SimpleNamespace(block_table=table[:decodes], seq_lens=ints(known[:decodes]))
    if decodes < len(new):
        counts, before = new[decodes:], [k - n for k, n in zip(known[decodes:], new[decodes:], strict=True)]
        chunk = None
        if any(before):
            pages = table[decodes:].tolist()
            places = [pages[r][i // page] * page + i % page for r, count in enumerate(before) for i in range(count)]
            chunk = SimpleNamespace(
                query_start_loc=ends(counts), cu_seq_lens=ends(before), max_query_len=max(counts),
                max_seq_len=max(before), slots=torch.tensor(places, device=device),
            )  # fmt: skip
        result.prefill = SimpleNamespace(
            query_start_loc=ends(counts), max_query_len=max(counts), prefill_backend=backend, chunk=chunk
        )
        backend.prepare_metadata(result.prefill)
    return result


def attend(
    impl: Any, q: Tensor, latent: Tensor, rotated: Tensor, cache: Tensor, given: MLACommonMetadata, weight: Tensor
) -> Tensor:
    """Do what vLLM's layer does around its backend: cache, prefill, and decoding with absorbed projections.

    q ``[tokens, heads, nope + rope]``; weight of ``kv_b_proj``, ``[heads * (nope + v), rank]``.
    """
    impl.do_kv_cache_update(latent, rotated.unsqueeze(1), cache, given.slot_mapping, "auto", torch.ones(()))
    nope, heads, first = impl.qk_nope_head_dim, impl.num_heads, given.num_decode_tokens
    output = torch.full((len(q), heads * impl.v_head_dim), torch.nan, dtype=q.dtype, device=q.device)
    if given.prefill is not None:
        impl.forward_mha(q[first:], latent[first:], rotated[first:], cache, given, torch.ones(()), output[first:])
    if given.decode is not None:
        up_k, up_v = weight.view(heads, -1, impl.kv_lora_rank).split((nope, impl.v_head_dim), 1)
        absorbed = torch.einsum("thn,hnr->thr", q[:first, :, :nope], up_k)
        out, lse = impl.forward_mqa((absorbed, q[:first, :, nope:]), cache, given, None)
        assert out.shape == (first, heads, impl.kv_lora_rank) and lse.shape == (first, heads)
        output[:first] = torch.einsum("thr,hvr->thv", out, up_v).flatten(1)
    return output
