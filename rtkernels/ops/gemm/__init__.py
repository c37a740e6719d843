"""Matrix products, dense and grouped, of 16-bit, 8-bit and 4-bit operands with scales (device code: ``cuda_src/gemm``).

``product`` says in plain data what a call multiplies; a backend makes steps of that: ``sm90_plan`` (wgmma and the copy
engine), ``mma_plan`` (mma.sync, every target), ``skinny_plan`` (a small m, weights at memory speed). Uses ``quant``.
"""
