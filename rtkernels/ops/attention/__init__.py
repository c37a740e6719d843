"""Attention, exact and fused: ``attention`` and ``attention_varlen`` (differentiable), ``sdpa`` with torch's signature,
``attention_decode`` over a KV cache, ``append_kv_cache``, ``merge_attention`` for parts with their log-sum-exps.

``problem`` says in plain data what a call computes; a backend (``mma_plan``: mma.sync for every target, ``sm90_plan``:
wgmma and the copy engine) turns that into steps. Device code: ``cuda_src/attention/``. Uses no other family.
"""
