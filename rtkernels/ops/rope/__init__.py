"""Rotary position embeddings: ``rope`` in all common layouts, ``mla_rope`` for multi-head latent attention, and
``qk_norm_rope``, which splits a merged qkv, norms q and k and rotates them. Angles come from tables (``rope_table``) or
frequencies (``angles.py``). Device code: ``cuda_src/rope/``. Uses no other family.
"""
