"""Routed tokens: ``moe_index``, ``moe_row_id_map`` and ``moe_rows`` say where each one goes, ``moe_permute`` and
``moe_unpermute`` move them to expert order and back, ``moe_permute_fp8``, ``moe_permute_smooth`` and
``moe_permute_smooth_t`` quantise on the way. Counts stay on the device. Device code: ``cuda_src/moe/``. Uses
``quant``.
"""
