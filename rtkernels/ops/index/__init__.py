"""Rows by index: ``embedding`` and ``embedding_grad_`` with a deterministic gradient, ``index_select``, ``scatter_add``
and ``sort_chunks``, which move or add whole rows (``row_moves.py``), and ``id_bounds``, where equal ids begin and end
in a sorted list. ``gathering`` and ``adding`` are behind torch's own operators. Device code: ``cuda_src/index/``. Uses
no other family, but ``ops.shared.experts`` for sorting.
"""
