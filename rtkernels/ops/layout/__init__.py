"""Changes of layout without arithmetic: ``transpose`` and ``transpose_experts``. Device code: ``cuda_src/layout/``.
Uses no other family.
"""
