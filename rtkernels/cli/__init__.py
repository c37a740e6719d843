"""The commands of ``python -m rtkernels``: ``doctor`` (with ``diagnosis``, which draws the conclusions), ``show`` and
``list`` (``show``), ``demo``. ``warm`` and ``cache`` are functions of the library. Every command works without a GPU.
"""
