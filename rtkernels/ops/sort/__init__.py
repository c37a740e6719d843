"""Stable sorting of rows, and their largest or smallest elements. Device code: ``cuda_src/sort/``. Uses no other
family.
"""
