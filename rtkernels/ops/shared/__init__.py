"""What several families use and what knows none of them: launching of row rings (``bulk_ring``) and tile streams
(``tile_stream``), the sum over rows that ends weight gradients (``column_sum``), sorting by key (``experts``), layouts
of codes and scales (``fp8_layout``, ``block_formats``, ``row_quant``), operands of row kernels (``row_operands``,
``row_launch``, ``strided``, ``positions``), and launches of the aten layer (``primitive``). Nothing here
is public but ``rtkernels.Quant``. Device code: ``cuda_src/shared/`` and ``cuda_src/common/``.
"""
