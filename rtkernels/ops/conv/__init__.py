"""Convolutions: ``conv``.

Depthwise ones have kernels of their own. Those whose windows do not overlap (patches, and 1 x 1 of channels-last
tensors) are matrix products. All others are torch's, because cuDNN is faster (docs/decisions/conv.md).
"""
