"""Reductions of rows: ``softmax`` and ``log_softmax`` with a scale and lengths, and ``row_dot``. The other modules are
behind torch's own operators: sums and extremes (``reduction``), norms with the statistics that aten keeps, losses.
Device code: ``cuda_src/reduce/``. Uses no other family.
"""
