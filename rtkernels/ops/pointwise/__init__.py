"""Element by element, in a tensor's own memory: ``add_`` and ``scale_`` (``inplace.py``). Device code:
``cuda_src/pointwise/``. Uses no other family.
"""
