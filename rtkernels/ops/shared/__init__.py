"""What several families use and what knows none of them: launching of row rings (``bulk_ring``) and tile streams
(``tile_stream``), the sum over rows that ends weight gradients (``column_sum``), sorting by key (``experts``).
Nothing here is public. Device code: ``cuda_src/shared/`` and ``cuda_src/common/``.
"""
