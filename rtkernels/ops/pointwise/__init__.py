"""Element by element: ``add_`` and ``scale_`` in a tensor's own memory (``inplace.py``), sums around other ops
(``add_residual``, ``add_bias``, ``channel_mul``), and steps of samplers (``euler_step``, ``cfg_combine``). Device code:
``cuda_src/pointwise/``, which also has the pointwise operators of ``rtkernels.aten``. Uses ``act``, and ``layout``
(device headers).
"""
