"""Matrix products, dense and grouped, of 16-bit, 8-bit and 4-bit operands with scales (device code: ``cuda_src/gemm``).

``product`` says in plain data what a call multiplies; a backend (``sm90_plan``: wgmma and the copy engine, ``mma_plan``:
mma.sync for every target, ``skinny_plan``: few rows, weights at memory speed) turns that into steps. Uses ``quant``.
"""
