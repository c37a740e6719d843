"""Rows by index: ``embedding`` and ``embedding_grad_`` with a deterministic gradient, and ``index_select``,
``scatter_add`` and ``sort_chunks``, which move or add whole rows (``row_moves.py``). Device code:
``cuda_src/index/``. Uses no other family, but ``ops.shared.experts`` for sorting.
"""
