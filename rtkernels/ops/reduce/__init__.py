"""Reductions of rows: ``softmax`` and ``log_softmax`` with a scale and lengths, and ``row_dot``. Device code:
``cuda_src/reduce/``. Uses no other family.
"""
