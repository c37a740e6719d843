"""Gated activations: ``glu`` (SwiGLU, GeGLU and others, merged or separate inputs), and ``glu_fp8`` and
``glu_smooth_fp8`` with their backward, which write fp8 codes, dense or per expert. Device code: ``cuda_src/act/``.
Uses ``quant`` (scales, tiles, experts).
"""
