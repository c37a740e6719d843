"""To codes of 8 and 4 bits and back: ``quantize_fp8`` (per tensor, row, 1x128 group, 128x128 block, both layouts),
``quantize_fp8_experts``, ``dequantize_fp8``; smooth quantisation (``quantize_fp8_smooth``, ``dequantize_fp8_smooth``,
``smooth_factors``, ``quantize_fp8_shard_``); Hadamard transforms (``hadamard``, ``quantize_fp8_hadamard``,
``dequantize_fp8_hadamard``); ``column_absmax``; block formats (``quantize_nvfp4``, ``quantize_mxfp8``,
``quantize_mxfp4``, with ``dequantize_nvfp4``, ``dequantize_mxfp8``, ``dequantize_mxfp4``) and their scales as tensor
cores read them (``nvfp4_swizzle``, ``nvfp4_unswizzle``, ``nvfp4_scale_bytes``); 4-bit codes and block scales of weights
in plain torch (``pack``). Device code: ``cuda_src/quant/``. Uses ``layout``.
"""
