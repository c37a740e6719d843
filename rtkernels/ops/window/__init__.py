"""Windows over the last two dimensions: pooling and nearest upsampling. Device code: ``cuda_src/window/``. Uses no
other family.
"""
