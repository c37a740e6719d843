"""Convolutions: ``conv``. Depthwise ones have a kernel of their own, and those whose windows do not overlap (patches)
are matrix products. All others are torch's, because cuDNN is faster (docs/decisions/conv.md). Device code:
``cuda_src/conv/``. Uses ``gemm``.
"""
