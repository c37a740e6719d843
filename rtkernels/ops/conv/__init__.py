"""Convolutions: ``conv``.

Depthwise ones have a kernel of their own. Those whose windows do not overlap (patches) are matrix products. All others
are torch's, because cuDNN is faster (docs/decisions/conv.md).
"""
