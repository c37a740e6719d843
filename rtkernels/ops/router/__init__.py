"""Choice of experts: ``router_gemm`` (logits), ``rms_norm_router`` (norm, fp8 codes and logits), ``topk`` and
``topk_router``, ``router_z_loss`` and ``load_balancing_loss`` (``router_loss.py``). Device code: ``cuda_src/router/``.
Uses ``gemm`` (device headers), ``norm`` and ``quant``.
"""
