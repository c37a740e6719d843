"""Activations: ``act``, ``glu`` (SwiGLU, GeGLU and others, merged or separate inputs), and ``glu_fp8`` and
``glu_smooth_fp8``, which write fp8 codes, dense or per expert, with ``glu_fp8_backward`` and
``glu_smooth_fp8_backward``. ``combine`` has the sums and products around an activation, for other families too;
``quantize_int8`` is its quantised output alone. Device code: ``cuda_src/act/``. Uses ``quant`` (scales, tiles, experts)
and ``layout``.
"""
