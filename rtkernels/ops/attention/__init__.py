"""Attention: ``attention`` and ``attention_varlen`` (exact, differentiable), ``sdpa`` with torch's signature,
``attention_decode`` over a KV cache, ``qkv_split`` and ``append_kv_cache``, which fill one, ``merge_attention`` for
parts with their log-sum-exps; ``mla_attention`` and ``mla_decode`` (latents), ``lightning_attention`` and
``lightning_attention_step``, ``gated_delta_rule``, ``ssd`` and their steps (linear); ``attention_quantized`` and
``sage_attention`` of codes that ``quantize_qk`` and ``quantize_v`` make.

``problem`` says in plain data what a call computes; ``backends`` lists who makes steps of that: ``decode_plan`` (few
queries), ``sm90_plan`` (wgmma and TMA), ``mma_plan`` (mma.sync, every target).
Device code: ``cuda_src/attention/``. Uses ``gemm`` (device headers), ``index``, ``norm``, ``reduce`` and
``rope``.
"""
