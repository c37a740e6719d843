"""Norms of rows: ``rms_norm``, ``layer_norm`` (both with a fused residual), ``group_rms_norm_gate``, and
``rms_norm_fp8`` and ``layer_norm_fp8``, which write fp8 codes and scales instead of, or as well as, rows
(``norm_fp8.py``). Weight gradients end with ``ops.shared.column_sum``. Device code: ``cuda_src/norm/``. Uses
``quant`` (scales, tiles, layouts of codes).
"""
