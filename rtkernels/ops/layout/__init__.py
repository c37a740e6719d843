"""Changes of layout without arithmetic: ``transpose``, ``transpose_experts``, ``patchify`` and ``repeat_heads``;
``strided_copy`` and ``transpose_list`` serve other families. Device code: ``cuda_src/layout/``. Uses no other family.
"""
