"""Matrix products, dense and grouped, of 16-bit, 8-bit and 4-bit operands with scales.

``scaled_mm``, ``gated_mm``, ``grouped_mm``, ``grouped_mm_masked``, ``grouped_wgrad``; ``rtkernels.explain`` tells what
one would run; ``fp8_linear`` and ``fp8_weight`` are built on them. ``recipes`` and ``checks`` make of a call a
``product``, plain data; ``backend`` lists who makes steps of that: ``sm90_plan`` (wgmma and TMA),
``cluster_plan``, ``decode_plan`` and ``skinny_plan`` (a small m, weights at memory speed), ``unpack_plan`` (codes are
unpacked for wgmma first), ``mma_plan`` (mma.sync, every target). ``reference``: the same in plain torch. Device code:
``cuda_src/gemm/``. Uses ``quant``, ``layout``, and ``act`` (device headers).
"""
