"""Norms of rows: ``rms_norm`` and ``layer_norm`` (with a fused residual, and with the gates, modulation and
quantisation of inference: ``norm_modulated.py``), ``group_rms_norm_gate``, and ``rms_norm_fp8`` and ``layer_norm_fp8``,
which write fp8 codes and scales instead of, or as well as, rows (``norm_fp8.py``). Weight gradients end with
``ops.shared.column_sum``. Device code: ``cuda_src/norm/``. Uses ``quant`` (scales, tiles, layouts of codes) and ``act``
(elementwise products in a backward).
"""
